"""Streamed input over loopback sockets: ends, room, cancels, retries, other loops."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from raw_peers import (
    PATH,
    RawRequest,
    RawWorker,
    body_of,
    make_runtime,
    open_descriptors,
    shut_down,
    until,
    within,
)

from dynamo._core import RouterMode
from dynamo.runtime import Client, Context, DistributedRuntime, PyAsyncRequestStream
from dynamo.runtime._discovery.memory import MemoryBackend, MemoryStore
from dynamo.runtime._wire.callhome import encode_handshake
from dynamo.runtime.errors import (
    InstanceNotFound,
    NoInstances,
    Refused,
    RemoteError,
    StreamBroken,
    StreamError,
)

BLOCK = bytes(64 * 1024)
# More than the buffers on the way hold, in the kernel and in both processes.
MANY_BLOCKS = 800
HELD_BLOCKS = 300

pytestmark = pytest.mark.usefixtures("each_lane")


class Cluster:
    """Workers and clients that find each other; everything ends with the test."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.runtimes: list[DistributedRuntime] = []
        self.serving: list[Awaitable[Any]] = []
        self.raw: list[RawWorker] = []

    def runtime(self, number: int | None = None, **settings: Any) -> DistributedRuntime:
        made = make_runtime(None, **settings)
        made._core.backend = MemoryBackend(self.store, connection_id=number)
        self.runtimes.append(made)
        return made

    async def serve(
        self, handler: Any, number: int | None = None, **settings: Any
    ) -> DistributedRuntime:
        worker = self.runtime(number, **settings)
        endpoint = worker.endpoint(PATH)
        self.serving.append(endpoint.serve_bidirectional_endpoint(handler))
        found = await endpoint.client()
        await until(lambda: endpoint.connection_id() in found.instance_ids())
        return worker

    async def client(self, mode: RouterMode | None = None, **settings: Any) -> Client:
        client = await self.runtime(**settings).endpoint(PATH).client(mode)
        await client.wait_for_instances(timeout=5)
        return client

    async def pair(self, handler: Any) -> Client:
        """A client of one worker."""
        await self.serve(handler)
        return await self.client()

    def by_hand(self, number: int, *, ours: bool = True) -> RawWorker:
        worker = RawWorker(self.store, instance_id=number, codec="msgpack", ours=ours)
        worker.start()
        self.raw.append(worker)
        return worker

    async def close(self) -> None:
        for worker in self.raw:
            await worker.close()
        for runtime in self.runtimes:
            await shut_down(runtime)
        for serving in self.serving:
            await within(serving)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    yield made
    await made.close()


class Source:
    """A stream of requests that notes how far it came and that it was closed."""

    def __init__(self, *values: Any, then: Exception | None = None) -> None:
        self.taken = 0
        self.closed = asyncio.Event()
        self._values = values
        self._then = then
        self._wait = False

    def for_ever(self) -> Source:
        """After the values: silence."""
        self._wait = True
        return self

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            for value in self._values:
                self.taken += 1
                yield value
            if self._then is not None:
                raise self._then
            if self._wait:
                await asyncio.Event().wait()
        finally:
            self.closed.set()


class Handler:
    """What a handler saw of one call."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.context: Context | None = None
        self.input_ended = asyncio.Event()
        self.ended = asyncio.Event()

    @property
    def state(self) -> tuple[bool, bool]:
        """Stopped and killed."""
        assert self.context is not None
        return self.context.is_stopped(), self.context.is_killed()

    async def __call__(
        self, requests: PyAsyncRequestStream, context: Context
    ) -> AsyncIterator[Any]:
        self.context = context
        try:
            yield "ready"
            async for value in requests:
                self.values.append(value)
                yield value
            self.input_ended.set()
        finally:
            self.ended.set()


async def echo(requests: Any) -> AsyncIterator[Any]:
    async for value in requests:
        yield value


async def read(stream: Any) -> list[Any]:
    async def reading() -> list[Any]:
        return [item async for item in stream]

    return await within(reading())


async def called(client: Client, requests: Any, **options: Any) -> list[Any]:
    """All items of a call."""
    return await read(await client.bidirectional(requests, annotated=False, **options))


# ------------------------------------------------------------------------ both directions


async def test_values_go_and_come_one_by_one(cluster: Cluster):
    """A conversation: each question is asked after the answer to the one before."""
    client = await cluster.pair(echo)
    answers: asyncio.Queue[int] = asyncio.Queue()

    async def questions() -> AsyncIterator[int]:
        number = 1
        while number < 100:
            yield number
            number += await answers.get()

    stream = await client.bidirectional(questions(), annotated=False)
    found = []
    async for answer in stream:
        found.append(answer)
        answers.put_nowait(answer)
    assert found == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize("codec", ["msgpack", "json"])
async def test_any_value_can_be_streamed(cluster: Cluster, codec: str):
    await cluster.serve(echo, codec=codec)
    client = await cluster.client()
    values = [0, -1, 1.5, "", "é", [], {"a": [1, {"b": False}]}, 2**63]
    assert await called(client, values) == values


async def test_nothing_as_a_value_reaches_the_handler(cluster: Cluster):
    handler = Handler()
    client = await cluster.pair(handler)
    assert await called(client, [None, None]) == ["ready"]  # items without data
    assert handler.values == [None, None]


@pytest.mark.parametrize("annotated", [True, None])
async def test_items_come_with_or_without_their_envelope(
    cluster: Cluster, annotated: bool | None
):
    client = await cluster.pair(echo)
    stream = await client.bidirectional([5], annotated)
    (item,) = await read(stream)
    assert (item.data() if annotated else item) == 5


async def test_an_empty_stream_of_requests_is_a_call(cluster: Cluster):
    handler = Handler()
    client = await cluster.pair(handler)
    assert await called(client, []) == ["ready"]
    assert handler.values == []
    assert handler.input_ended.is_set()


async def test_id_and_metadata_reach_the_handler(cluster: Cluster):
    handler = Handler()
    client = await cluster.pair(handler)
    await called(client, [1], context=Context("my-id", {"user": "ada"}))
    assert handler.context is not None
    assert handler.context.id() == "my-id"
    assert handler.context.metadata["user"] == "ada"


async def test_the_handler_may_answer_before_it_is_asked(cluster: Cluster):
    """BD-05."""
    greeted = asyncio.Event()

    async def greeting(requests: Any) -> AsyncIterator[Any]:
        for number in range(10):
            yield number
        async for value in requests:
            yield value

    async def source() -> AsyncIterator[str]:
        await greeted.wait()
        yield "first question"

    client = await cluster.pair(greeting)
    stream = await client.bidirectional(source(), annotated=False)
    assert [await within(anext(stream)) for _ in range(10)] == list(range(10))
    greeted.set()
    assert await read(stream) == ["first question"]


async def test_streams_do_not_mix(cluster: Cluster):
    """BD-04."""
    client = await cluster.pair(echo)

    async def one(number: int) -> None:
        sent = [[number, step] for step in range(random.randrange(20))]

        async def source() -> AsyncIterator[Any]:
            for value in sent:
                yield value
                if random.random() < 0.3:
                    await asyncio.sleep(0)

        assert await called(client, source()) == sent

    await within(asyncio.gather(*map(one, range(200))), 15)


@pytest.mark.slow
async def test_many_calls_whose_input_nobody_reads_leave_nothing(
    cluster: Cluster, scale: float
):
    """BD-02."""

    async def deaf(requests: Any) -> AsyncIterator[str]:
        yield "done"

    client = await cluster.pair(deaf)
    await called(client, [1])
    gc.collect()
    before = open_descriptors(), len(asyncio.all_tasks())
    for _ in range(int(20 * scale)):
        calls = [called(client, [1]) for _ in range(20)]
        assert await within(asyncio.gather(*calls)) == [["done"]] * 20
    # The pool may have grown by a connection or two for calls made at once.
    await until(lambda: open_descriptors() <= before[0] + 40)
    await until(lambda: len(asyncio.all_tasks()) <= before[1])
    lane = client._home.lane  # type: ignore[attr-defined]
    await until(lambda: not lane.callhome.listener.connections)
    assert lane.callhome.listener._waiting == {}
    links = lane.duplex._links.values()
    await until(lambda: all(one.idle for link in links for one in link._connections))


# --------------------------------------------------------------------- the end of input


async def test_the_end_of_input_is_no_cancellation(cluster: Cluster):
    """BD-01."""
    context: list[Context] = []
    stopped: list[bool] = []

    async def handler(requests: Any, context: Context) -> AsyncIterator[Any]:
        async for value in requests:
            yield value
        for number in range(500):
            await asyncio.sleep(0)
            stopped.append(context.is_stopped())
            yield number

    client = await cluster.pair(handler)
    assert await called(client, ["only"]) == ["only", *range(500)]
    assert context == []
    assert stopped == [False] * 500


async def test_the_end_of_input_stays_the_end(cluster: Cluster):
    async def handler(requests: Any) -> AsyncIterator[Any]:
        async for value in requests:
            yield value
        for _ in range(3):
            with contextlib.suppress(StopAsyncIteration):
                yield ["more", await requests.__anext__()]
        yield "end"

    client = await cluster.pair(handler)
    assert await called(client, [1, 2]) == [1, 2, "end"]


# ------------------------------------------------------------------------ back-pressure


async def test_a_handler_that_does_not_read_holds_the_source(cluster: Cluster):
    may_read = asyncio.Event()
    source = Source(*[BLOCK] * MANY_BLOCKS)

    async def slow(requests: Any) -> AsyncIterator[int]:
        yield 0
        await may_read.wait()
        read_here = 0
        async for _ in requests:
            read_here += 1
        yield read_here

    client = await cluster.pair(slow)
    stream = await client.bidirectional(source, annotated=False)
    assert await within(anext(stream)) == 0
    await until_it_stands_still(lambda: source.taken)
    assert source.taken < HELD_BLOCKS
    may_read.set()
    assert await within(anext(stream), 10) == MANY_BLOCKS
    assert await read(stream) == []


async def until_it_stands_still(measure: Callable[[], int], turns: int = 300) -> None:
    """Wait until a number has not grown for so many turns of the loop."""
    last, still = -1, 0
    while still < turns:
        still = still + 1 if measure() == last else 0
        last = measure()
        await asyncio.sleep(0.0005)


async def test_a_caller_that_does_not_read_holds_the_handler_and_the_source(
    cluster: Cluster,
):
    source = Source(*[BLOCK] * MANY_BLOCKS)
    client = await cluster.pair(echo)
    stream = await client.bidirectional(source, annotated=False)
    await until_it_stands_still(lambda: source.taken)
    assert source.taken < 2 * HELD_BLOCKS
    received = 0
    async for block in stream:
        received += 1
        assert source.taken - received < 2 * HELD_BLOCKS
        assert len(block) == len(BLOCK)
    assert received == MANY_BLOCKS


# ------------------------------------------------------ ends that come from the worker


async def test_a_handler_that_returns_early_closes_the_source(cluster: Cluster):
    """BD-07: of a million values one was wanted."""
    ended: list[str] = []

    def source() -> Iterator[int]:
        try:
            yield from range(10**6)
        finally:
            ended.append("finally")

    async def first_only(requests: Any) -> AsyncIterator[Any]:
        async for value in requests:
            yield value
            return

    client = await cluster.pair(first_only)
    assert await called(client, source()) == [0]
    await until(lambda: ended)
    assert ended == ["finally"]


async def test_a_handler_that_ignores_its_input_does_not_hold_the_caller(
    cluster: Cluster,
):
    """HG-14."""

    async def deaf(requests: Any) -> AsyncIterator[str]:
        await until(lambda: source.taken)
        yield "done"

    source = Source(*[bytes(1024)] * 10_000)
    client = await cluster.pair(deaf)
    assert await called(client, source) == ["done"]
    await within(source.closed.wait())


async def test_a_handler_that_returns_while_the_source_is_held_closes_it(
    cluster: Cluster,
):
    may_return = asyncio.Event()

    async def deaf(requests: Any) -> AsyncIterator[str]:
        await may_return.wait()
        yield "done"

    source = Source(*[BLOCK] * MANY_BLOCKS)
    client = await cluster.pair(deaf)
    stream = await client.bidirectional(source, annotated=False)
    await until_it_stands_still(lambda: source.taken)
    assert not source.closed.is_set()
    may_return.set()
    assert await read(stream) == ["done"]
    await within(source.closed.wait())


@pytest.mark.parametrize("after", [0, 2])
async def test_an_error_of_the_handler_reaches_the_caller_and_closes_the_source(
    cluster: Cluster, after: int
):
    async def failing(requests: Any) -> AsyncIterator[Any]:
        for _ in range(after):
            yield await requests.__anext__()
        raise KeyError("mine")

    source = Source(*range(after)).for_ever()
    client = await cluster.pair(failing)
    stream = await client.bidirectional(source, annotated=False)
    for number in range(after):
        assert await within(anext(stream)) == number
    with pytest.raises(RemoteError, match="Internal: KeyError: 'mine'"):
        await within(anext(stream))
    if source.taken:
        await within(source.closed.wait())


async def test_a_worker_that_is_lost_closes_the_source(cluster: Cluster):
    worker = cluster.by_hand(1)
    client = await cluster.client()
    source = Source(1).for_ever()
    calling = client.bidirectional(source, annotated=False)
    request = await worker.request()
    inputs = await dial_input(worker, request)
    home = await request.accept()
    stream = await within(calling)
    assert body_of(await inputs.frame()) == 1
    home.reset()
    inputs.reset()
    with pytest.raises(StreamBroken):
        await within(anext(stream))
    await within(source.closed.wait())


async def dial_input(worker: RawWorker, request: RawRequest) -> Any:
    """Connect to where the input comes from, as a worker does first of all."""
    where = request.control.request_stream
    assert where is not None
    inputs = await worker.dial(where.address)
    await inputs.send(encode_handshake(where.subject, "request"))
    return inputs


# ------------------------------------------------------ ends that come from the caller


async def test_an_error_of_the_source_is_the_callers_own(cluster: Cluster):
    """BD-06."""
    handler = Handler()
    client = await cluster.pair(handler)
    error = LookupError("mine")

    async def source() -> AsyncIterator[int]:
        yield 1
        yield 2
        await until(lambda: len(handler.values) == 2)
        raise error

    stream = await client.bidirectional(source(), annotated=False)
    with pytest.raises(LookupError) as caught:
        await read(stream)
    assert caught.value is error
    with pytest.raises(StopAsyncIteration):
        await within(anext(stream))
    await within(handler.ended.wait())
    assert handler.state == (True, True)


@pytest.mark.parametrize("bad", [object(), ValueError("mine")])
async def test_a_call_that_fails_before_its_handler_runs_has_a_stream_that_says_so(
    cluster: Cluster, bad: Any
):
    """The error comes from the stream and never from the call: there is one place."""
    client = await cluster.pair(echo)

    async def source() -> AsyncIterator[Any]:
        if isinstance(bad, Exception):
            raise bad
        yield bad

    for _ in range(20):
        stream = await within(client.bidirectional(source(), annotated=False))
        with pytest.raises((TypeError, ValueError), match=r"unsupported type|mine"):
            await read(stream)


async def test_a_value_that_cannot_be_sent_ends_the_call(cluster: Cluster):
    handler = Handler()
    client = await cluster.pair(handler)

    async def source() -> AsyncIterator[Any]:
        yield 1
        await until(lambda: handler.values)
        yield object()

    stream = await client.bidirectional(source(), annotated=False)
    with pytest.raises(TypeError, match="unsupported type"):
        await read(stream)
    await within(handler.ended.wait())
    assert handler.state == (True, True)


async def test_an_error_of_another_call_keeps_its_facts(cluster: Cluster):
    """A stage that streams what it gets from another one."""
    client = await cluster.pair(echo)
    error = StreamError("Unavailable: elsewhere", instance_id=7, attempts=3)
    stream = await client.bidirectional(Source(1, then=error), annotated=False)
    with pytest.raises(StreamError) as caught:
        await read(stream)
    assert caught.value is error
    assert (error.instance_id, error.attempts) == (7, 3)


class Ends:
    """The ways in which a caller ends a call."""

    @staticmethod
    async def stop(stream: Any, context: Context) -> None:
        context.stop_generating()

    @staticmethod
    async def kill(stream: Any, context: Context) -> None:
        context._state.kill()

    @staticmethod
    async def aclose(stream: Any, context: Context) -> None:
        await stream.aclose()

    @staticmethod
    async def cancel(stream: Any, context: Context) -> None:
        stream.cancel()


@pytest.mark.parametrize(
    ("end", "killed"),
    [
        (Ends.stop, False),
        (Ends.kill, True),
        (Ends.aclose, True),
        (Ends.cancel, True),
    ],
)
async def test_a_call_that_is_ended_closes_the_source_and_stops_the_handler(
    cluster: Cluster, end: Callable[[Any, Context], Awaitable[None]], killed: bool
):
    handler = Handler()
    source = Source(1).for_ever()
    client = await cluster.pair(handler)
    context = Context()
    stream = await client.bidirectional(source, annotated=False, context=context)
    assert [await within(anext(stream)) for _ in range(2)] == ["ready", 1]
    await end(stream, context)
    await within(source.closed.wait(), 1)
    await within(handler.ended.wait(), 1)
    assert handler.state == (True, killed)
    assert await read(stream) == []


async def test_a_stop_closes_the_source_before_the_worker_reacts(cluster: Cluster):
    worker = cluster.by_hand(1)
    client = await cluster.client()
    source = Source(1).for_ever()
    context = Context()
    calling = client.bidirectional(source, annotated=False, context=context)
    request = await worker.request()
    inputs = await dial_input(worker, request)
    home = await request.accept()
    stream = await within(calling)
    assert body_of(await inputs.frame()) == 1
    context.stop_generating()
    await within(source.closed.wait(), 1)
    for connection in (inputs, home):
        word = await connection.frame()
        assert word is not None
        assert word.header == b'"stop"'
        connection.close()
    assert await read(stream) == []


async def test_a_stream_that_is_dropped_closes_the_source(cluster: Cluster):
    handler = Handler()
    source = Source(1).for_ever()
    client = await cluster.pair(handler)
    stream = await client.bidirectional(source, annotated=False)
    assert await within(anext(stream)) == "ready"
    del stream
    gc.collect()
    await within(source.closed.wait(), 1)
    await within(handler.ended.wait(), 1)


async def test_leaving_the_stream_closes_the_source(cluster: Cluster):
    source = Source(1).for_ever()
    client = await cluster.pair(Handler())
    async with await client.bidirectional(source, annotated=False) as stream:
        assert await within(anext(stream)) == "ready"
        assert not source.closed.is_set()
    await within(source.closed.wait(), 1)


async def test_a_stop_while_the_source_is_held_closes_it(cluster: Cluster):
    async def deaf(requests: Any, context: Context) -> AsyncIterator[str]:
        await context.async_killed_or_stopped()
        yield "never seen"

    source = Source(*[BLOCK] * MANY_BLOCKS)
    client = await cluster.pair(deaf)
    context = Context()
    stream = await client.bidirectional(source, annotated=False, context=context)
    await until_it_stands_still(lambda: source.taken)
    context.stop_generating()
    await within(source.closed.wait(), 1)
    assert await read(stream) == []


class Closable:
    """An iterator whose closing shows although it was never begun."""

    def __init__(self) -> None:
        self.closed = 0

    def __aiter__(self) -> Closable:
        return self

    async def __anext__(self) -> int:
        return 1

    async def aclose(self) -> None:
        self.closed += 1


async def test_a_call_that_nobody_takes_closes_the_source(cluster: Cluster):
    client = await cluster.runtime().endpoint(PATH).client()
    source = Closable()
    with pytest.raises(NoInstances):
        await client.bidirectional(source)
    await until(lambda: source.closed)
    assert source.closed == 1


async def test_a_call_that_is_cancelled_before_it_begins_closes_the_source(
    cluster: Cluster,
):
    client = await cluster.pair(echo)
    source = Closable()
    calling = client.bidirectional(source)
    calling.cancel()
    await until(lambda: source.closed)
    await asyncio.sleep(0)
    assert source.closed == 1


async def test_a_stopped_context_closes_the_source_unread(cluster: Cluster):
    client = await cluster.pair(echo)
    context = Context()
    context.stop_generating()
    source = Closable()
    assert await called(client, source, context=context) == []
    await until(lambda: source.closed)
    assert source.closed == 1


# --------------------------------------------------------------------- whom it calls


async def serve_three(cluster: Cluster) -> None:
    for number in (1, 2, 3):
        await cluster.serve(echo, number)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (None, [1, 2, 3, 1, 2, 3]),
        (RouterMode.RoundRobin, [1, 2, 3, 1, 2, 3]),
        (RouterMode.Direct, [1, 2, 3, 1, 2, 3]),
    ],
)
async def test_the_rotation_is_honoured(
    cluster: Cluster, mode: RouterMode | None, expected: list[int]
):
    """RT-05."""
    await serve_three(cluster)
    client = await cluster.client(mode)
    chosen = []
    for _ in expected:
        stream = await client.bidirectional([1])
        chosen.append(stream.instance_id)
        await read(stream)
    assert chosen == expected


@pytest.mark.parametrize(
    "mode", [RouterMode.LeastLoaded, RouterMode.DeviceAwareWeighted]
)
async def test_loads_are_honoured(cluster: Cluster, mode: RouterMode):
    """RT-05."""
    await serve_three(cluster)
    client = await cluster.client(mode)
    streams = [await client.bidirectional(Source().for_ever()) for _ in range(6)]
    assert Counter(stream.instance_id for stream in streams) == {1: 2, 2: 2, 3: 2}
    for stream in streams:
        await stream.aclose()


async def test_two_choices_are_honoured(cluster: Cluster):
    """RT-05: with two held streams the third call never goes where they are."""
    for number in (1, 2):
        await cluster.serve(echo, number)
    client = await cluster.client(RouterMode.PowerOfTwoChoices)
    held = [
        await client.bidirectional(Source().for_ever(), instance_id=1) for _ in range(2)
    ]
    for _ in range(5):
        stream = await client.bidirectional([1])
        assert stream.instance_id == 2
        await read(stream)
    for stream in held:
        await stream.aclose()


async def test_chance_is_honoured(cluster: Cluster):
    """RT-05: of 60 calls in 3 directions all meet somebody, and not in turn."""
    await serve_three(cluster)
    client = await cluster.client(RouterMode.Random)
    chosen = []
    for _ in range(60):
        stream = await client.bidirectional([1])
        chosen.append(stream.instance_id)
        await read(stream)
    assert set(chosen) == {1, 2, 3}
    assert chosen != [1, 2, 3] * 20


async def test_an_instance_can_be_named(cluster: Cluster):
    await serve_three(cluster)
    client = await cluster.client()
    for number in (2, 2, 3):
        stream = await client.bidirectional(
            [number], annotated=False, instance_id=number
        )
        assert stream.instance_id == number
        assert await read(stream) == [number]
    with pytest.raises(InstanceNotFound):
        await client.bidirectional([1], instance_id=9)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"requests": "text"}, TypeError),
        ({"requests": {"a": 1}}, TypeError),
        ({"requests": [], "annotated": 1}, TypeError),
        ({"requests": [], "context": "id"}, TypeError),
        ({"requests": [], "instance_id": "1"}, TypeError),
        ({"requests": [], "instance_id": -1}, OverflowError),
        ({"requests": [], "instance_id": 2**64}, OverflowError),
    ],
)
async def test_bad_arguments_are_refused_at_the_call(
    cluster: Cluster, arguments: dict[str, Any], kind: type[Exception]
):
    client = await cluster.runtime().endpoint(PATH).client()
    with pytest.raises(kind):
        client.bidirectional(**arguments)


async def test_a_refused_call_goes_elsewhere_with_all_its_values(cluster: Cluster):
    refusing = cluster.by_hand(1)
    await cluster.serve(echo, 2)
    client = await cluster.client()
    calling = client.bidirectional(Source(1, 2, 3), annotated=False)
    await (await refusing.request()).ack("Server unavailable: draining")
    stream = await within(calling)
    assert stream.instance_id == 2
    assert await read(stream) == [1, 2, 3]


async def test_a_dead_instance_is_passed_over(cluster: Cluster):
    dead = cluster.by_hand(1)
    await dead.stop_listening()
    await cluster.serve(echo, 2)
    client = await cluster.client()
    assert await called(client, Source(1, 2, 3)) == [1, 2, 3]


async def test_a_call_whose_value_was_taken_does_not_go_elsewhere(cluster: Cluster):
    refusing = cluster.by_hand(1)
    await cluster.serve(echo, 2)
    client = await cluster.client()
    source = Source(1, 2, 3).for_ever()
    calling = client.bidirectional(source, annotated=False)
    request = await refusing.request()
    inputs = await dial_input(refusing, request)
    assert body_of(await inputs.frame()) == 1
    await request.ack("Server unavailable: draining")
    with pytest.raises(Refused) as caught:
        await within(calling)
    assert caught.value.instance_id == 1
    await within(source.closed.wait())


async def test_a_named_instance_is_the_only_one(cluster: Cluster):
    refusing = cluster.by_hand(1)
    await cluster.serve(echo, 2)
    client = await cluster.client()
    source = Closable()
    calling = client.bidirectional(source, instance_id=1)
    await (await refusing.request()).ack("Server unavailable: draining")
    with pytest.raises(Refused):
        await within(calling)
    await until(lambda: source.closed)


async def test_a_value_that_a_genuine_worker_cannot_read_is_refused(cluster: Cluster):
    """It would kill the call without a word about the reason."""
    genuine = cluster.by_hand(1, ours=False)
    client = await cluster.client()
    source = Source(1, {(1, 2): "a map with a list as key"}, 3)
    calling = client.bidirectional(source, annotated=False)
    request = await genuine.request()
    inputs = await dial_input(genuine, request)
    await request.accept()
    stream = await within(calling)
    assert body_of(await inputs.frame()) == 1
    with pytest.raises(StreamError, match="cannot decode this request") as caught:
        await within(anext(stream))
    assert caught.value.phase == "send"
    assert caught.value.instance_id == 1
    await within(source.closed.wait())


async def test_a_value_that_json_cannot_carry_is_refused(cluster: Cluster):
    await cluster.serve(echo, codec="json")
    client = await cluster.client()
    stream = await client.bidirectional([1, {(1, 2): 3}], annotated=False)
    with pytest.raises(StreamError, match="cannot be encoded as json"):
        await read(stream)


# ---------------------------------------------------------------- the wrong kind of call


async def test_a_single_request_to_such_an_endpoint_is_an_error(cluster: Cluster):
    client = await cluster.pair(echo)
    for method in (client.random, client.round_robin, client.generate):
        with pytest.raises(RemoteError, match="takes a stream of requests"):
            await read(await method(1))


async def test_a_stream_of_requests_to_a_plain_endpoint_is_an_error(cluster: Cluster):
    async def plain(request: Any) -> AsyncIterator[Any]:
        yield request

    worker = cluster.runtime()
    cluster.serving.append(worker.endpoint(PATH).serve_endpoint(plain))
    client = await cluster.client()
    source = Closable()
    stream = await client.bidirectional(source, annotated=False)
    with pytest.raises(RemoteError, match="takes a single request"):
        await within(anext(stream))
    await until(lambda: source.closed)
    assert source.closed == 1


async def test_a_plain_generator_function_cannot_take_a_stream(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
):
    def plain(requests: Any) -> Iterator[Any]:
        yield 1

    client = await cluster.pair(plain)
    with pytest.raises(Exception, match="has no attribute '__anext__'"):
        await within(client.bidirectional([1]))
    assert "use 'async def'" in caplog.text


# ---------------------------------------------------------- what a handler does with it


async def test_a_handler_reads_from_a_task_of_its_own(cluster: Cluster):
    async def handler(requests: Any) -> AsyncIterator[Any]:
        async def reading() -> list[Any]:
            return [value async for value in requests]

        yield await asyncio.create_task(reading())

    client = await cluster.pair(handler)
    assert await called(client, range(100)) == [list(range(100))]


async def test_a_limit_on_one_value_loses_none(cluster: Cluster):
    """A handler that waits in slices sees every value once."""

    async def impatient(requests: Any) -> AsyncIterator[Any]:
        with contextlib.suppress(StopAsyncIteration):
            while True:
                with contextlib.suppress(asyncio.TimeoutError):
                    yield await asyncio.wait_for(requests.__anext__(), 0.001)

    gate = asyncio.Event()

    async def source() -> AsyncIterator[int]:
        yield 0
        await gate.wait()
        for number in range(1, 200):
            yield number

    client = await cluster.pair(impatient)
    stream = await client.bidirectional(source(), annotated=False)
    assert await within(anext(stream)) == 0
    gate.set()
    assert await read(stream) == list(range(1, 200))


# ----------------------------------------------------------------------- another loop


async def in_another_loop(work: Callable[[], Any]) -> Any:
    return await within(asyncio.to_thread(asyncio.run, work()), 15)


async def test_a_call_from_another_loop_runs_its_source_there(cluster: Cluster):
    client = await cluster.pair(echo)
    home = threading.current_thread()

    async def elsewhere() -> list[Any]:
        # Bound to the loop in which it is waited for.
        queue: asyncio.Queue[int | None] = asyncio.Queue()
        threads = set()

        async def source() -> AsyncIterator[int]:
            while (value := await queue.get()) is not None:
                threads.add(threading.current_thread())
                yield value

        stream = await client.bidirectional(source(), annotated=False)
        found = []
        for number in range(100):
            queue.put_nowait(number)
            found.append(await anext(stream))
        queue.put_nowait(None)
        found += [item async for item in stream]
        assert threads == {threading.current_thread()} != {home}
        return found

    assert await in_another_loop(elsewhere) == list(range(100))


async def test_a_call_from_another_loop_has_back_pressure(cluster: Cluster):
    client = await cluster.pair(echo)

    async def elsewhere() -> tuple[int, int]:
        source = Source(*[BLOCK] * MANY_BLOCKS)
        stream = await client.bidirectional(source, annotated=False)
        await until_it_stands_still(lambda: source.taken)
        held = source.taken
        return held, len([block async for block in stream])

    held, received = await in_another_loop(elsewhere)
    assert held < 2 * HELD_BLOCKS
    assert received == MANY_BLOCKS


async def test_a_call_from_another_loop_closes_its_source_there(cluster: Cluster):
    handler = Handler()
    client = await cluster.pair(handler)

    async def elsewhere() -> None:
        source = Source(1).for_ever()
        async with await client.bidirectional(source, annotated=False) as stream:
            assert [await anext(stream), await anext(stream)] == ["ready", 1]
        await asyncio.wait_for(source.closed.wait(), 2)

    await in_another_loop(elsewhere)
    await within(handler.ended.wait())


async def test_an_error_of_a_source_in_another_loop_is_raised_there(cluster: Cluster):
    client = await cluster.pair(echo)
    error = LookupError("mine")

    async def elsewhere() -> BaseException | None:
        stream = await client.bidirectional(Source(1, then=error), annotated=False)
        try:
            async for _ in stream:
                pass
        except LookupError as raised:
            return raised
        return None

    assert await in_another_loop(elsewhere) is error


async def test_a_loop_that_ends_in_mid_call_ends_the_call(cluster: Cluster):
    """Its tasks are cancelled, the source among them."""
    handler = Handler()
    client = await cluster.pair(handler)
    streams = []

    async def elsewhere() -> None:
        source = Source(1).for_ever()
        stream = await client.bidirectional(source, annotated=False)
        assert await anext(stream) == "ready"
        streams.append(stream)

    await in_another_loop(elsewhere)
    await within(handler.ended.wait())
    assert handler.state == (True, True)


# --------------------------------------------------------------------------- shutdown


async def test_a_worker_that_drains_finishes_a_stream_of_requests(cluster: Cluster):
    worker = await cluster.serve(echo, drain_timeout_s=5.0)
    client = await cluster.client()
    go_on = asyncio.Event()

    async def source() -> AsyncIterator[int]:
        yield 1
        await go_on.wait()
        yield 2

    stream = await client.bidirectional(source(), annotated=False)
    assert await within(anext(stream)) == 1
    worker.shutdown()
    await until(lambda: client.instance_ids() == [])
    go_on.set()
    assert await read(stream) == [2]
