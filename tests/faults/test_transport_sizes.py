"""Sizes on the way: what passes whole, what it costs, and what one peer can hold up.

Rows TR-02, TR-04, TR-07, TR-22, TR-24, TR-26, TR-27 and TR-29.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from linked import linked
from programs import LIMIT_S, Programs
from raw_peers import (
    PATH,
    RawClient,
    address_of,
    make_runtime,
    shut_down,
    until,
    within,
)
from served import Served, served

from dynamo.runtime import errors
from dynamo.runtime._calls import inbox
from dynamo.runtime._transports import connection
from dynamo.runtime._wire import duplex_frames, framing

MIB = 1024 * 1024
# Where something begins to behave differently as a frame grows.
MARKS = (
    connection._EARLY_BYTES,
    connection._HIGH_WATER,
    duplex_frames.CHUNK_BYTES,
    2 * duplex_frames.CHUNK_BYTES,
    framing._ASSEMBLED_BYTES,
    inbox._FULL_BYTES,
    10 * inbox._FULL_BYTES,
)


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
    monkeypatch.setenv("DYN_TCP_RESPONSE_STREAM_HOST", "127.0.0.1")


async def echo(request: Any) -> AsyncIterator[Any]:
    yield request


async def sized(size_bytes: int) -> AsyncIterator[bytes]:
    yield bytes(size_bytes)
    yield b"behind it"


@pytest.fixture
async def pair() -> AsyncIterator[Served]:
    async with served(echo) as pair:
        yield pair


# ------------------------------------------------------------------ TR-02, TR-22, TR-27


def near(mark: int) -> list[int]:
    return [mark - 1, mark, mark + 1]


@pytest.mark.parametrize("mark", MARKS)
async def test_frames_around_the_size_of_a_buffer_pass_both_ways(
    pair: Served, mark: int
) -> None:
    # Of the value, and of the frame around an item or a request.
    for size in [*near(mark), *near(mark - 60), *near(mark - 500)]:
        value = bytes([size % 251]) * size
        (answer,) = await pair.items(value)
        assert answer == value


async def test_a_frame_of_ten_times_the_request_limit_passes_as_an_item() -> None:
    """The genuine limit is for requests: on the way back there is none."""
    async with served(sized, worker={"max_message_bytes": MIB}) as pair:
        items = await pair.items(10 * MIB)
        assert [len(item) for item in items] == [10 * MIB, len(b"behind it")]


@pytest.mark.parametrize("size", [1_400_000, 33 * MIB])
async def test_large_fields_obey_no_hidden_limit(size: int, scale: float) -> None:
    """33 MiB is over the default limit of requests; the long form takes 120 MB."""
    size = min(120_000_000, int(size * scale))
    field = {"field": "x" * size}
    limits = {"max_message_bytes": 2 * size}
    async with served(echo, worker=limits, caller=limits) as pair:
        (answer,) = await pair.items(field)
        assert answer == field


# ----------------------------------------------------------------------------- TR-04


@pytest.mark.parametrize("value", [object(), 2**64, "\ud800", {(1, 2): object()}])
async def test_an_item_that_cannot_be_sent_is_an_error_after_those_before_it(
    value: object,
) -> None:
    ended: list[str] = []

    async def handler(request: Any) -> AsyncIterator[Any]:
        try:
            yield "good"
            yield value
            yield "never"
        finally:
            ended.append("closed")

    async with served(handler) as pair:
        stream = await pair.call()
        assert await within(stream.__anext__()) == "good"
        with pytest.raises(errors.RemoteError, match="failed serializing Python resp"):
            await within(stream.__anext__())
        with pytest.raises(StopAsyncIteration):
            await within(stream.__anext__())
        await until(lambda: ended == ["closed"])


# ----------------------------------------------------------------------------- TR-07


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
async def test_binary_values_travel_as_they_are(kind: Any) -> None:
    size = 8 * MIB
    raw = bytes(range(256)) * (size // 256)
    async with linked(echo) as link:
        sent = dict(link.requests.passed), dict(link.answers.passed)
        stream = await link.call(kind(raw))
        assert [item async for item in stream] == [raw]
        there = link.requests.passed["up"] - sent[0]["up"]
        back = link.answers.passed["up"] - sent[1]["up"]
    # Base64 alone would add a third.
    assert size < there < size + 2000
    assert size < back < size + 2000


# ----------------------------------------------------------------------------- TR-26


@pytest.mark.parametrize("value", [{1: 2}, {True: {-5: None}}, {b"k": 1.5, "s": 0}])
async def test_keys_that_are_no_text_survive_the_round_trip(
    pair: Served, value: Any
) -> None:
    assert await pair.items(value) == [value]


# ----------------------------------------------------------------------------- TR-24

LARGE_WORKER = """
async def large(size):
    yield bytes(size)

async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("ns.comp.gen")
    serving = endpoint.serve_endpoint(large)
    say("serving")
    await serving

run(main)
"""
LARGE_CLIENT = """
import resource

def peak():
    with open("/proc/self/status") as status:
        for row in status:
            if row.startswith("VmHWM"):
                return int(row.split()[1]) * 1024

async def fetch(client, size):
    async for item in await client.random(size, annotated=False):
        return item

async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    client = await runtime.endpoint("ns.comp.gen").client()
    await client.wait_for_instances()
    await fetch(client, 1000)
    count, size = int(sys.argv[2]), int(sys.argv[3])
    base = peak()
    kept = await asyncio.gather(*(fetch(client, size) for _ in range(count)))
    say(peak() - base, sum(map(len, kept)))

run(main)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("each_lane")
async def test_many_large_answers_at_once_take_little_more_memory_than_they_are(
    programs: Programs, scale: float
) -> None:
    count, size = 8, int(4 * MIB * min(scale, 4))
    worker = await programs.start(LARGE_WORKER)
    await worker.says("serving")
    shares = []
    # What an allocator keeps for itself is partly chance: the best of three counts.
    while len(shares) < 3 and (not shares or min(shares) >= 1.5):
        client = await programs.start(LARGE_CLIENT, str(count), str(size))
        grown, payload = map(int, (await client.line(LIMIT_S * scale)).split())
        assert payload == count * size
        shares.append(grown / payload)
    print(f"peak of the client: {shares} x payload")
    assert min(shares) < 1.5


async def test_the_time_of_a_frame_grows_with_its_size_and_not_faster(
    pair: Served,
) -> None:
    async def fastest(size: int) -> float:
        times = []
        for _ in range(4):
            started = time.process_time()
            await pair.items(bytes(size))
            times.append(time.process_time() - started)
        return min(times)

    # Both sizes are beyond what allocator and processor caches hold, or the small
    # one is cheaper per byte. Eight times the bytes; quadratic would be 64 times.
    small, large = await fastest(2 * MIB), await fastest(16 * MIB)
    assert large < 32 * max(small, 0.001)


# ----------------------------------------------------------------------------- TR-29


@pytest.fixture
def descriptors() -> Iterator[None]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16_384), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
@pytest.mark.usefixtures("descriptors")
async def test_peers_that_stop_within_a_frame_are_closed_and_idle_ones_stay(
    scale: float,
) -> None:
    count = int(100 * scale)
    worker = make_runtime(frame_timeout_s=0.5)
    serving = worker.endpoint(PATH).serve_endpoint(echo)
    client = RawClient(await within(address_of(worker)))
    server, _, _ = await worker._core.request_server()
    try:
        begun = [await client.connect() for _ in range(count)]
        silent = [await client.connect() for _ in range(count)]
        for peer in begun:
            await peer.send(b"\x00")
        await until(lambda: len(server._connections) == 2 * count)
        home = await client.call("while all of them hang")
        await home.frames(3)
        for peer in begun:
            assert await peer.ended()
        open_now = [one for one in list(server._connections) if one.is_open]
        assert len(open_now) <= count + 1
        # The others are as good as new.
        for peer in silent:
            await peer.send(client.request("late"))
            assert (await peer.frames(1))[0].text == ""
    finally:
        client.close()
        await shut_down(worker)
        await within(serving)
