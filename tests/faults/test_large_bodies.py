"""Large bodies on each lane: where they are read to, and what becomes of it after a cut.

Rows TR-22 and TR-24.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from raw_peers import until, within
from served import Served, served

from dynamo.runtime import errors
from dynamo.runtime._transports import connection
from dynamo.runtime._wire import framing

MIB = 1024 * 1024
pytestmark = [
    pytest.mark.usefixtures("each_lane"),
    # Those that have connections.
    pytest.mark.parametrize("each_lane", ["duplex", "callhome"], indirect=True),
]


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
    monkeypatch.setenv("DYN_TCP_RESPONSE_STREAM_HOST", "127.0.0.1")


async def echo(request: Any) -> AsyncIterator[Any]:
    yield request


async def sizes(request: list[int]) -> AsyncIterator[bytes]:
    for number, size in enumerate(request):
        yield bytes([number]) * size


class Direct:
    """Counts what is read to where it belongs, and may cut after some of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed_bytes = 0
        self.cut_after: int | None = None
        plain = connection.Connection.buffer_updated

        def counting(one: connection.Connection, size: int) -> None:
            self.passed_bytes += size
            if self.cut_after is not None and self.passed_bytes >= self.cut_after:
                self.cut_after = None
                one.abort()
            plain(one, size)

        monkeypatch.setattr(connection.Connection, "buffer_updated", counting)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> Direct:
    return Direct(monkeypatch)


def memories(pair: Served) -> list[framing.Memory]:
    """Where the two ends of a pair put large messages together."""
    lanes = pair.caller._core.lane
    (server,) = {life._server for life in pair.worker._core._served}
    return [server.memory, lanes.callhome.listener.memory, lanes.duplex.memory]


async def test_a_large_body_is_read_to_where_it_belongs(direct: Direct) -> None:
    async with served(echo) as pair:
        value = bytes(range(256)) * (8 * MIB // 256)
        assert await pair.items(value) == [value]
        # Both ways; what comes with the head of a frame takes the other path.
        assert direct.passed_bytes > 8 * MIB
        before = direct.passed_bytes
        assert await pair.items(b"small") == [b"small"]
        assert direct.passed_bytes == before


async def test_large_bodies_take_turns_in_the_same_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    new_room = framing._new_room

    def counting(size: int) -> bytearray:
        made.append(size)
        return new_room(size)

    monkeypatch.setattr(framing, "_new_room", counting)
    monkeypatch.setattr(connection, "_KEPT_S", 1000)
    async with served(echo) as pair:
        value = bytes(MIB)
        await pair.items(value)
        assert made
        made.clear()
        for _ in range(10):
            await pair.items(value)
        assert made == []


async def test_memory_that_nobody_needs_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "_KEPT_S", 0.2)
    async with served(echo) as pair:
        await pair.items(bytes(MIB))
        both = memories(pair)
        await until(lambda: not any(one.held_bytes for one in both))
        assert await pair.items(bytes(MIB)) == [bytes(MIB)]


@pytest.mark.parametrize("share", [0.1, 0.7])
async def test_a_cut_in_a_large_item_breaks_the_stream_and_leaves_nothing(
    direct: Direct, share: float
) -> None:
    size = 4 * MIB
    async with served(sizes) as pair:
        direct.cut_after = int(share * size)
        stream = await pair.call([1, size, 2])
        assert await within(stream.__anext__()) == b"\0"
        with pytest.raises(errors.StreamBroken):
            await within(stream.__anext__())
        await until(lambda: not pair.in_flight)
        assert [len(item) for item in await pair.items([5, size])] == [5, size]


async def test_a_cut_in_a_large_request_is_an_error_of_the_call(
    direct: Direct,
) -> None:
    async with served(echo) as pair:
        direct.cut_after = 2 * MIB
        with pytest.raises(errors.ConnectionFailed):
            await pair.items(bytes(8 * MIB))
        await until(lambda: not pair.in_flight)
        assert await pair.items("again") == ["again"]


async def test_large_and_small_items_keep_their_order_for_a_slow_reader() -> None:
    wanted = [3 * MIB, 10, 300_000, 0, 2 * MIB, 70_000, 1, 5 * MIB]
    async with served(sizes) as pair:
        stream = await pair.call(wanted)
        got = []
        for number, size in enumerate(wanted):
            item = await within(stream.__anext__())
            assert item == bytes([number]) * size
            got.append(len(item))
            # Smaller calls pass meanwhile.
            assert await pair.items([7]) == [bytes(7)]
        with pytest.raises(StopAsyncIteration):
            await within(stream.__anext__())
        assert got == wanted
