"""`FaultProxy` on sockets and on the network in memory: each fault as both ends see it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from talker import Talker

from dynamo.runtime._network import SOCKETS
from dynamo.runtime.testing import Cut, FaultProxy, Pace, in_virtual_time, until
from dynamo.runtime.testing._network import MemoryNetwork

LARGE = bytes(range(256)) * 40_000  # 10 MiB, more than the buffers of two sockets


@dataclass
class Way:
    """A client, a server, and a proxy between them."""

    proxy: FaultProxy
    network: Any
    servers: list[Talker]
    clients: list[Talker] = field(default_factory=list)

    async def connect(self, *, keeps_half: bool = False) -> Talker:
        """Connect; with the proxy's end at the server, if it gets there."""
        talker = Talker(keeps_half=keeps_half)
        self.clients.append(talker)
        await self.network.connect(
            asyncio.get_running_loop(),
            lambda: talker,
            self.proxy.host,
            self.proxy.port,
        )
        return talker

    async def pair(self, *, keeps_half: bool = False) -> tuple[Talker, Talker]:
        known = len(self.servers)
        near = await self.connect(keeps_half=keeps_half)
        await until(
            lambda: len(self.servers) > known and self.servers[-1].transport is not None
        )
        self.servers[-1].keeps_half = keeps_half
        return near, self.servers[-1]


@contextlib.asynccontextmanager
async def way_through(kind: str) -> AsyncIterator[Way]:
    loop = asyncio.get_running_loop()
    servers: list[Talker] = []

    def accept() -> Talker:
        servers.append(Talker())
        return servers[-1]

    if kind == "sockets":
        here = there = middle = SOCKETS
        addresses = ["127.0.0.1", "127.0.0.1"]
    else:
        network = MemoryNetwork()
        here, there, middle = (network.host() for _ in range(3))
        addresses = [there.address, middle.address]
    listening, port = await there.listen(loop, accept, addresses[0], 0, 10)
    async with FaultProxy(
        port, target_host=addresses[0], host=addresses[1], network=middle
    ) as proxy:
        way = Way(proxy, here, servers)
        yield way
    listening.close()
    every = [one for one in way.clients + servers if one.transport is not None]
    for one in every:
        one.transport.abort()
    await until(lambda: all(one.lost for one in every))


@pytest.fixture(params=["sockets", "memory"])
async def way(request: pytest.FixtureRequest) -> AsyncIterator[Way]:
    async with way_through(request.param) as made:
        yield made


def turns(count: int = 30) -> Any:
    """Let the loop go on, for what must not happen."""

    async def pass_by() -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    return pass_by()


async def test_bytes_pass_both_ways_and_are_counted(way: Way) -> None:
    way.proxy.record = []
    near, far = await way.pair()
    near.transport.write(b"question")
    await until(lambda: far.data == b"question")
    far.transport.write(b"answer")
    await until(lambda: near.data == b"answer")
    assert way.proxy.passed == {"up": 8, "down": 6}
    assert way.proxy.record == [("up", b"question"), ("down", b"answer")]
    assert (way.proxy.accepted, way.proxy.connections) == (1, 1)


async def test_much_passes_no_faster_than_it_is_read(way: Way) -> None:
    near, far = await way.pair()
    far.transport.pause_reading()
    near.transport.write(LARGE)
    await until(lambda: way.proxy.passed["up"])
    await turns()
    assert way.proxy.passed["up"] < len(LARGE)
    far.transport.resume_reading()
    await until(lambda: len(far.data) == len(LARGE))
    assert far.data == LARGE


async def test_the_end_passes_and_then_the_other_end(way: Way) -> None:
    near, far = await way.pair(keeps_half=True)
    near.transport.write(b"question")
    near.transport.write_eof()
    await until(lambda: far.events == ["eof"])
    assert far.data == b"question"
    far.transport.write(b"answer")
    far.transport.close()
    await until(lambda: near.events == ["eof"])
    assert near.data == b"answer"
    near.transport.close()
    await until(lambda: not way.proxy.connections)


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize(("how", "seen"), [("fin", "eof"), ("reset", "reset")])
async def test_a_connection_is_cut_after_so_many_bytes(
    way: Way, direction: Any, how: Any, seen: str
) -> None:
    way.proxy.cut = Cut(**{direction: 5}, how=how)
    near, far = await way.pair()
    sender, receiver = (near, far) if direction == "up" else (far, near)
    sender.transport.write(b"12345678")
    await until(lambda: near.events and far.events)
    assert way.proxy.passed[direction] == 5
    if seen == "eof":
        assert receiver.data == b"12345"
        assert near.events[0] == far.events[0] == "eof"
    else:
        assert b"12345".startswith(receiver.data)
        assert near.events == far.events == [ConnectionResetError]


async def test_a_cut_at_the_first_byte_lets_nothing_pass(way: Way) -> None:
    way.proxy.cut = Cut(up=0)
    near = await way.connect()
    await until(lambda: near.events[:1] == ["eof"])
    assert way.proxy.passed == {"up": 0, "down": 0}


async def test_a_silent_cut_swallows_what_follows(way: Way) -> None:
    way.proxy.cut = Cut(up=2, how="silent")
    near, far = await way.pair()
    near.transport.write(b"abcd")
    near.transport.write(b"efgh")
    await until(lambda: far.data == b"ab")
    far.transport.write(b"heard")
    await until(lambda: near.data == b"heard")
    await turns()
    assert (far.data, near.events, far.events) == (b"ab", [], [])
    # The sender may go; nobody hears of it.
    near.transport.close()
    await until(lambda: near.events)
    await turns()
    assert far.events == []


async def test_a_half_cut_ends_one_direction_alone(way: Way) -> None:
    way.proxy.cut = Cut(up=2, how="half")
    near, far = await way.pair(keeps_half=True)
    near.transport.write(b"abcd")
    await until(lambda: far.events == ["eof"])
    far.transport.write(b"still here")
    await until(lambda: near.data == b"still here")
    near.transport.write(b"unheard")
    await turns()
    assert far.data == b"ab"
    assert (near.events, far.events) == ([], ["eof"])


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_one_direction_can_be_ended_now(way: Way, direction: Any) -> None:
    near, far = await way.pair(keeps_half=True)
    way.proxy.half_close(direction)
    ended, goes_on = (far, near) if direction == "up" else (near, far)
    await until(lambda: ended.events == ["eof"])
    ended.transport.write(b"more")
    await until(lambda: goes_on.data == b"more")
    assert goes_on.events == []


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_what_is_sent_after_that_end_is_lost(way: Way, direction: Any) -> None:
    complaints: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, complaint: complaints.append(complaint))
    near, far = await way.pair(keeps_half=True)
    way.proxy.half_close(direction)
    sender, ended = (near, far) if direction == "up" else (far, near)
    await until(lambda: ended.events == ["eof"])
    sender.transport.write(b"too late")
    ended.transport.write(b"still here")
    await until(lambda: sender.data == b"still here")
    await turns()
    assert (ended.data, complaints) == (b"", [])


async def test_a_stall_holds_all_and_loses_nothing(way: Way) -> None:
    near, far = await way.pair()
    way.proxy.stall()
    assert not way.proxy.flowing
    near.transport.write(b"question")
    far.transport.write(b"answer")
    late = await way.connect()
    late.transport.write(b"late")
    await turns()
    assert (near.data, far.data) == (b"", b"")
    way.proxy.flow()
    await until(lambda: (near.data, far.data) == (b"answer", b"question"))
    await until(lambda: way.servers[-1].data == b"late")


async def test_a_proxy_that_refuses_is_nobody_until_it_starts_again(way: Way) -> None:
    near, far = await way.pair()
    way.proxy.refuse()
    way.proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        await way.connect()
    near.transport.write(b"goes on")
    await until(lambda: far.data == b"goes on")
    port = way.proxy.port
    await way.proxy.start()
    assert way.proxy.port == port
    await way.pair()


@pytest.mark.parametrize("reset", [True, False])
async def test_all_connections_can_be_cut_now(way: Way, reset: bool) -> None:
    pairs = [await way.pair() for _ in range(3)]
    way.proxy.break_all(reset=reset)
    await until(lambda: all(near.events and far.events for near, far in pairs))
    expected = ConnectionResetError if reset else "eof"
    for near, far in pairs:
        assert near.events[0] == far.events[0] == expected
    await way.pair()


async def test_a_target_that_is_not_there_resets_the_client(way: Way) -> None:
    way.proxy.target = (way.proxy.target[0], 9)
    near = await way.connect()
    await until(lambda: near.events == [ConnectionResetError])


async def test_closing_ends_everything(way: Way) -> None:
    near, far = await way.pair()
    dialling = await way.connect()
    await way.proxy.aclose()
    await until(lambda: near.events and far.events and dialling.events)
    assert way.proxy.connections == 0


# ------------------------------------------------------------- pace, in virtual time


@in_virtual_time
async def test_a_delay_shifts_everything_by_as_much() -> None:
    loop = asyncio.get_running_loop()
    async with way_through("memory") as way:
        near, far = await way.pair()
        way.proxy.pace = Pace(delay_s=10)
        began = loop.time()
        near.transport.write(b"one")
        await asyncio.sleep(1)
        near.transport.write(b"two")
        near.transport.write_eof()
        await until(lambda: far.data, timeout=60)
        assert loop.time() - began == pytest.approx(10, abs=0.1)
        assert far.data == b"one"
        await until(lambda: far.events, timeout=60)
        assert loop.time() - began == pytest.approx(11, abs=0.1)
        assert far.data == b"onetwo"


@in_virtual_time
async def test_a_trickle_lets_pieces_pass_at_its_pace() -> None:
    loop = asyncio.get_running_loop()
    async with way_through("memory") as way:
        near, far = await way.pair()
        way.proxy.pace = Pace(chunk_bytes=2, interval_s=5)
        way.proxy.record = []
        began = loop.time()
        near.transport.write(b"abcdefg")
        await until(lambda: len(far.data) == 7, timeout=60)
        assert loop.time() - began == pytest.approx(15, abs=0.1)
        assert [data for _, data in way.proxy.record] == [b"ab", b"cd", b"ef", b"g"]
        # The next piece keeps its distance, too.
        near.transport.write(b"h")
        await until(lambda: len(far.data) == 8, timeout=60)
        assert loop.time() - began == pytest.approx(20, abs=0.1)


@in_virtual_time
async def test_a_slow_proxy_holds_the_sender() -> None:
    async with way_through("memory") as way:
        near, far = await way.pair()
        way.proxy.pace = Pace(chunk_bytes=64 * 1024, interval_s=1)
        near.transport.write(LARGE)
        await asyncio.sleep(10)
        assert 9 <= len(far.data) / (64 * 1024) <= 12
        assert near.transport.get_write_buffer_size() > len(LARGE) / 2
        await until(lambda: len(far.data) == len(LARGE), timeout=3600)
        assert far.data == LARGE


@in_virtual_time
async def test_what_waits_is_lost_with_a_cut() -> None:
    async with way_through("memory") as way:
        near, far = await way.pair()
        way.proxy.pace = Pace(delay_s=10)
        near.transport.write(b"late")
        await asyncio.sleep(1)
        way.proxy.break_all()
        await asyncio.sleep(60)
        assert far.data == b""
