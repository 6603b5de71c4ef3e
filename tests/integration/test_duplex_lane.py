"""The duplex lane between two runtimes of one process, with a relay between them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import time
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from raw_peers import (
    connected_socket,
    make_runtime,
    refusal_of,
    shut_down,
    until,
    within,
)

from dynamo.runtime import Client, Context, DistributedRuntime
from dynamo.runtime._calls.streams import ResponseSender
from dynamo.runtime._discovery.memory import MemoryStore
from dynamo.runtime._transports import CallRequest, duplex_client, request_pool
from dynamo.runtime._transports.duplex_client import _Link, _WorkerConnection
from dynamo.runtime._transports.duplex_worker import DuplexWorkerConnection
from dynamo.runtime._wire.duplex import LAST_ID_TO_OPEN, ClientSide
from dynamo.runtime._wire.duplex_frames import (
    CONNECTION_CREDIT,
    CREDIT,
    HELLO,
    PREFACE,
    REQUEST,
    Hello,
    RequestHead,
    encode_frame,
    encode_hello,
    encode_number,
    encode_request_front,
)
from dynamo.runtime._wire.records import (
    INSTANCES,
    EndpointName,
    EndpointRecord,
    encode_record,
    tcp_address,
)
from dynamo.runtime.errors import (
    CallTimeout,
    CannotListen,
    ConnectionFailed,
    MessageTooLarge,
    Overloaded,
    Refused,
    RemoteError,
    StreamBroken,
    WorkerLost,
)
from dynamo.runtime.testing import Cut, FaultProxy

MIB = 1024 * 1024
MAX_BYTES = 32 * MIB
PATH = "t.w.e"
NAME = EndpointName("t", "w", "e")


class Link:
    """A worker and a client that finds it behind a relay."""

    worker: DistributedRuntime
    caller: DistributedRuntime
    client: Client
    relay: FaultProxy
    serving: asyncio.Future[tuple[()]]
    lanes: tuple[str, ...] = ("duplex",)

    @property
    def instance_id(self) -> int:
        return self.worker._core.backend.connection_id

    @property
    def record(self) -> EndpointRecord:
        path = f"{self.instance_id:x}/t/w/e"
        return EndpointRecord(
            name=NAME,
            instance_id=self.instance_id,
            transport_kind="tcp",
            address=tcp_address("127.0.0.1", self.relay.port, path),
            codec=self.worker._core.config.codec,
            lanes=self.lanes,
            ours=True,
        )

    async def publish(self) -> None:
        """Anew, if it was published before."""
        record = self.record
        backend = self.caller._core.backend
        await backend.unregister(INSTANCES, record.key)
        await backend.register(INSTANCES, record.key, encode_record(record))
        # Its watchers are told in the next turn.
        await asyncio.sleep(0)

    async def call(self, request: Any = None, **options: Any) -> Any:
        options.setdefault("annotated", False)
        return await self.client.direct(request, self.instance_id, **options)

    async def items(self, request: Any = None, **options: Any) -> list[Any]:
        return [item async for item in await self.call(request, **options)]

    @property
    def connection(self) -> _WorkerConnection:
        """The one connection that the client has."""
        (link,) = self.caller._core.lane.duplex._links.values()
        (connection,) = link._connections
        return connection

    @property
    def connections(self) -> int:
        links = self.caller._core.lane.duplex._links.values()
        return sum(len(link._connections) for link in links)

    @property
    def links(self) -> list[_Link]:
        return list(self.caller._core.lane.duplex._links.values())

    @property
    def ready(self) -> int:
        """How many connections take calls."""
        return sum(len(link._ready) for link in self.links)

    @property
    def loads(self) -> list[int]:
        """How many calls each of them has, in the order in which they were opened."""
        return [len(one.side.streams) for link in self.links for one in link._ready]

    @property
    def at_worker(self) -> DuplexWorkerConnection:
        server = self.worker._core._server
        assert server is not None
        (connection,) = [one for one in server._duplex_connections() if one.is_open]
        return connection

    @property
    def in_flight(self) -> int:
        return sum(life.in_flight for life in self.worker._core._served)


@contextlib.asynccontextmanager
async def linked(
    handler: Any, *, lanes: tuple[str, ...] = ("duplex",), **changes: Any
) -> AsyncIterator[Link]:
    link = Link()
    link.lanes = lanes
    link.worker = make_runtime(**changes)
    link.caller = make_runtime(**changes)
    link.serving = link.worker.endpoint(PATH).serve_endpoint(handler)
    _, _, port = await link.worker._core.request_server()
    async with FaultProxy(port) as link.relay:
        await link.publish()
        link.client = await link.caller.endpoint(PATH).client()
        await link.client.wait_for_instances(timeout=5)
        try:
            yield link
        finally:
            await shut_down(link.caller)
            await shut_down(link.worker)
            await link.serving


async def count(request: Any) -> AsyncIterator[Any]:
    for number in range(request):
        yield number


async def echo(request: Any) -> AsyncIterator[Any]:
    yield request


class Hush:
    """A handler that yields its request and then is silent until it is stopped."""

    def __init__(self) -> None:
        self.running = 0
        self.ended = 0

    async def __call__(self, request: Any, context: Context) -> AsyncIterator[Any]:
        self.running += 1
        try:
            if request is not None:
                yield request
            await context.async_killed_or_stopped()
        finally:
            self.ended += 1


# ------------------------------------------------------------------------------- calls


async def test_calls_share_one_connection_and_nothing_calls_back() -> None:
    async with linked(count) as link:
        lists = await asyncio.gather(*(link.items(5) for _ in range(50)))
        assert lists == [[0, 1, 2, 3, 4]] * 50
        assert link.relay.accepted == 1
        assert link.caller._core.lane.callhome.listener.address == ""
        assert link.caller._core.lane.callhome._pools._pools == {}


async def test_our_workers_advertise_the_lane_and_are_called_on_it() -> None:
    runtime = make_runtime()
    serving = runtime.endpoint(PATH).serve_endpoint(count)
    client = await runtime.endpoint(PATH).client()
    await client.wait_for_instances(timeout=5)
    assert [i async for i in await client.random(2, annotated=False)] == [0, 1]
    assert len(runtime._core.lane.duplex._links) == 1
    await shut_down(runtime)
    await within(serving)


async def test_either_side_can_be_told_to_use_call_home() -> None:
    runtime = make_runtime(lanes=())
    serving = runtime.endpoint(PATH).serve_endpoint(count)
    client = await runtime.endpoint(PATH).client()
    await client.wait_for_instances(timeout=5)
    assert [i async for i in await client.random(2, annotated=False)] == [0, 1]
    assert runtime._core.lane.duplex._links == {}
    (record,) = client._home.instances.records
    assert record.lanes == ()
    await shut_down(runtime)
    await within(serving)
    async with linked(count) as link:
        link.caller._core.lane._speaks_duplex = False
        assert await link.items(2) == [0, 1]
        assert link.caller._core.lane.duplex._links == {}


@pytest.mark.parametrize("codec", ["msgpack", "json"])
async def test_values_travel_in_the_codec_of_the_worker(codec: str) -> None:
    value = {"text": "ä" * 100, "numbers": [1, 2.5, None], "deep": {"a": {"b": []}}}
    async with linked(echo, codec=codec) as link:
        assert await link.items(value) == [value]


async def test_metadata_deadline_and_trace_reach_the_handler() -> None:
    seen: list[Any] = []

    async def look(request: Any, context: Context) -> AsyncIterator[Any]:
        seen.append((context.id(), dict(context.metadata), context.deadline))
        yield 1

    async with linked(look) as link:
        loop = asyncio.get_running_loop()
        context = Context("my-id", {"tenant": "blue"})
        context._state.deadline = loop.time() + 30
        await link.items(context=context)
        ((call_id, metadata, deadline),) = seen
        assert (call_id, metadata) == ("my-id", {"tenant": "blue"})
        assert deadline == pytest.approx(context._state.deadline, abs=1)
        context._state.deadline = loop.time() - 0.001
        with pytest.raises(CallTimeout, match="did not end in time"):
            await link.items(context=context)
        assert len(seen) == 1


async def test_a_handlers_error_is_typed_and_comes_after_its_items() -> None:
    async def boom(request: Any) -> AsyncIterator[Any]:
        yield 1
        raise ValueError("no good")

    async with linked(boom) as link:
        stream = await link.call()
        assert await stream.__anext__() == 1
        with pytest.raises(RemoteError, match="no good") as caught:
            await stream.__anext__()
        assert caught.value.remote_type == "ValueError"
        stream = await link.call()
        assert await stream.__anext__() == 1
        assert link.relay.accepted == 1


async def test_streamed_input_travels_both_ways_on_the_connection() -> None:
    async def double(requests: Any) -> AsyncIterator[Any]:
        async for value in requests:
            yield 2 * value

    runtime = make_runtime()
    endpoint = runtime.endpoint(PATH)
    serving = endpoint.serve_bidirectional_endpoint(double)
    client = await endpoint.client()
    await client.wait_for_instances(timeout=5)
    stream = await client.bidirectional(range(1000), annotated=False)
    assert [item async for item in stream] == [2 * n for n in range(1000)]
    assert runtime._core.lane.callhome.listener.address == ""
    await shut_down(runtime)
    await within(serving)


async def test_an_answer_at_once_ends_the_input_and_closes_its_source() -> None:
    class Source:
        """Told to close even if nothing was read: a generator would not say so."""

        closed = asyncio.Event()

        def __aiter__(self) -> Source:
            return self

        async def __anext__(self) -> int:
            return 1

        async def aclose(self) -> None:
            self.closed.set()

    async def answer(stream: Any) -> AsyncIterator[Any]:
        yield "enough"

    runtime = make_runtime()
    endpoint = runtime.endpoint(PATH)
    serving = endpoint.serve_bidirectional_endpoint(answer)
    client = await endpoint.client()
    await client.wait_for_instances(timeout=5)
    stream = await client.bidirectional(Source(), annotated=False)
    assert [item async for item in stream] == ["enough"]
    await within(Source.closed.wait())
    await shut_down(runtime)
    await within(serving)


async def test_an_answer_that_cannot_be_read_fails_its_stream_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with linked(echo) as link:
        with monkeypatch.context() as patch:
            module = "dynamo.runtime._calls.ingress.encode_item"
            patch.setattr(module, lambda codec, value: b"\xc1")
            stream = await link.client.round_robin(1)
            with pytest.raises(ValueError, match="not msgpack"):
                await stream.__anext__()
        assert await link.items(2) == [2]


async def test_input_waits_for_a_handler_that_does_not_read() -> None:
    go_on = asyncio.Event()
    taken = 0

    async def slow(requests: Any) -> AsyncIterator[Any]:
        await go_on.wait()
        total = 0
        async for value in requests:
            total += len(value)
        yield total

    def source() -> Any:
        nonlocal taken
        for _ in range(100):
            taken += 1
            yield bytes(100_000)

    runtime = make_runtime()
    endpoint = runtime.endpoint(PATH)
    serving = endpoint.serve_bidirectional_endpoint(slow)
    client = await endpoint.client()
    await client.wait_for_instances(timeout=5)
    stream = await client.bidirectional(source(), annotated=False)
    (connection,) = (
        one
        for link in runtime._core.lane.duplex._links.values()
        for one in link._connections
    )
    await until(lambda: connection.side.waiting)
    assert taken < 30
    go_on.set()
    assert [item async for item in stream] == [100 * 100_000]
    await shut_down(runtime)
    await within(serving)


# -------------------------------------------------------------------------- refusals


async def test_a_full_worker_refuses_and_says_when_to_come_again() -> None:
    hush = Hush()
    async with linked(hush, worker_pool_size=1, work_queue_size=0) as link:
        running = await link.call("a")
        assert await running.__anext__() == "a"
        waiting = asyncio.get_running_loop().create_task(link.call("b"))
        await until(lambda: link.in_flight == 2)
        with pytest.raises(Overloaded, match="at capacity") as caught:
            await link.call("c")
        assert caught.value.retry_after == 1.0
        running.cancel()
        stream = await within(waiting)
        assert await stream.__anext__() == "b"
        stream.cancel()


async def test_a_call_that_waits_for_its_turn_outlives_the_time_for_the_ack() -> None:
    hush = Hush()
    async with linked(hush, worker_pool_size=1, request_timeout_s=0.1) as link:
        running = await link.call("a")
        waiting = asyncio.get_running_loop().create_task(link.call("b"))
        await until(lambda: link.in_flight == 2)
        began = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() - began > 0.3)
        assert not waiting.done()
        running.cancel()
        (await within(waiting)).cancel()


async def test_an_unknown_endpoint_is_refused_by_name() -> None:
    async with linked(count) as link:
        server = link.worker._core._server
        assert server is not None
        path = f"{link.instance_id:x}/t/w/e"
        assert server.forget(path, server._served[path])
        with pytest.raises(Refused, match=f"unknown endpoint {path}"):
            await link.call(1)


async def test_a_refused_call_goes_to_another_instance_by_itself() -> None:
    """From a worker that is full, and from one that no longer serves the endpoint."""
    store = MemoryStore()
    hush = Hush()
    full = make_runtime(store, worker_pool_size=1, work_queue_size=0)
    free = make_runtime(store)
    caller = make_runtime(store)
    serving = [
        full.endpoint(PATH).serve_endpoint(Hush()),
        free.endpoint(PATH).serve_endpoint(hush),
    ]
    client = await caller.endpoint(PATH).client()
    await until(lambda: len(client.instance_ids()) == 2)
    full_id = full._core.backend.connection_id

    async def four_calls_arrive() -> None:
        before = hush.running
        for _ in range(4):
            stream = await within(client.round_robin("b", annotated=False))
            assert await within(stream.__anext__()) == "b"
            stream.cancel()
        assert hush.running == before + 4

    running = await within(client.direct("a", full_id, annotated=False))
    waiting = client.direct("a", full_id)
    await until(lambda: full._core._served[0].in_flight == 2)
    await four_calls_arrive()
    running.cancel()
    (await within(waiting)).cancel()
    await until(lambda: not full._core._served[0].in_flight)
    server = full._core._server
    assert server is not None
    ((path, taker),) = server._served.items()
    assert server.forget(path, taker)
    await four_calls_arrive()
    for runtime in (caller, full, free):
        await shut_down(runtime)
    await within(asyncio.gather(*serving))


async def test_too_large_a_request_is_refused_before_it_is_sent() -> None:
    async with linked(echo, max_message_bytes=100_000) as link:
        assert len((await link.items(bytes(99_000)))[0]) == 99_000
        passed = link.relay.passed["up"]
        with pytest.raises(MessageTooLarge, match="limit 100000"):
            await link.call(bytes(100_000))
        assert link.relay.passed["up"] == passed


async def test_what_is_too_large_for_the_worker_is_not_sent_either() -> None:
    """It said so as the connection began; we would allow more."""
    async with linked(echo, max_message_bytes=100_000) as link:
        await link.items(1)
        config = link.connection._config
        more = dataclasses.replace(config, max_message_bytes=10_000_000)
        link.connection._config = more
        passed = link.relay.passed["up"]
        with pytest.raises(MessageTooLarge, match="max: 100000 bytes"):
            await link.call(bytes(300_000))
        assert link.relay.passed["up"] == passed


async def test_who_cannot_be_reached_again_is_left_alone_for_a_moment() -> None:
    async with linked(echo) as link:
        reached = link.relay
        async with FaultProxy(reached.target[1]) as link.relay:
            await link.publish()
        reasons = []
        # The machine may be busy, and the pauses grow.
        for _ in range(6):
            with pytest.raises(ConnectionFailed) as caught:
                await link.call()
            reasons.append(str(caught.value.facts["reason"]))
        link.relay = reached
    told = [reason.endswith("(a moment ago)") for reason in reasons]
    assert told[:2] == [False, False]
    assert any(told)


async def test_the_worker_refuses_what_only_it_finds_too_large() -> None:
    async with linked(echo, max_message_bytes=100_000) as link:
        await link.items(1)
        core = link.caller._core
        config = dataclasses.replace(core.config, max_message_bytes=10_000_000)
        connection = link.connection
        connection._config = config
        peer = connection.side.peer
        assert peer is not None
        connection.side.peer = msgspec.structs.replace(peer, max_message_bytes=0)
        with pytest.raises(MessageTooLarge, match="max: 100000 bytes"):
            await link.call(bytes(300_000))
        assert await link.items(2) == [2]


# -------------------------------------------------------------------------- cancelling


@pytest.mark.parametrize("way", ["cancel", "drop", "stop", "task"])
async def test_every_cancel_arrives_within_a_tenth_of_a_second(way: str) -> None:
    took_s = []
    hush = Hush()
    async with linked(hush) as link:
        loop = asyncio.get_running_loop()
        for number in range(1, 6):
            context = Context()
            stream = await link.call("x", context=context)
            assert await stream.__anext__() == "x"
            began = loop.time()
            if way == "cancel":
                stream.cancel()
            elif way == "drop":
                del stream
            elif way == "stop":
                context.stop_generating()
            else:
                reading = loop.create_task(read_all(stream))
                await asyncio.sleep(0)
                reading.cancel()
            await until(lambda count=number: hush.ended == count)
            took_s.append(loop.time() - began)
            await until(lambda: not link.at_worker.side.streams)
    assert min(took_s) < 0.1


async def read_all(stream: Any) -> list[Any]:
    return [item async for item in stream]


async def test_a_client_that_dies_ends_its_calls_at_the_worker() -> None:
    hush = Hush()
    async with linked(hush) as link:
        stream = await link.call("x")
        assert await stream.__anext__() == "x"
        link.relay.break_all()
        await until(lambda: hush.ended == 1)
        with pytest.raises(StreamBroken):
            await stream.__anext__()


async def test_a_handler_parked_for_credit_is_woken_by_the_stop() -> None:
    closed = asyncio.Event()

    async def flood(request: Any) -> AsyncIterator[Any]:
        try:
            while True:
                yield bytes(100_000)
        finally:
            closed.set()

    async with linked(flood) as link:
        stream = await link.call()
        await until(lambda: link.at_worker.side.waiting)
        stream.cancel()
        await within(closed.wait(), 1)
        await until(lambda: link.in_flight == 0)


# ------------------------------------------------------------------------ flow control


async def test_streams_that_are_not_read_hold_only_themselves() -> None:
    produced = 0

    async def flood(request: Any) -> AsyncIterator[Any]:
        nonlocal produced
        for _ in range(request):
            produced += 1
            yield bytes(50_000)

    async with linked(flood) as link:
        unread = [await link.call(100) for _ in range(100)]
        await until(lambda: len(link.at_worker.side.waiting) == 100)
        assert produced < 100 * 40
        assert len(await link.items(200)) == 200
        lengths = [len(await read_all(stream)) for stream in unread]
        assert lengths == [100] * 100


async def test_a_large_item_lets_the_items_of_others_pass() -> None:
    async def either(request: Any) -> AsyncIterator[Any]:
        if request == "large":
            yield bytes(8_000_000)
        else:
            for number in range(50):
                yield number
                await asyncio.sleep(0)

    async with linked(either) as link:
        large = await link.call("large")
        assert await link.items("small") == list(range(50))
        assert [len(item) async for item in large] == [8_000_000]


async def test_tokens_of_many_streams_pass_a_large_answer_on_the_same_connection() -> (
    None
):
    async def either(request: Any) -> AsyncIterator[Any]:
        if request == "large":
            yield bytes(30_000_000)
        else:
            for number in range(20):
                yield number
                await asyncio.sleep(0)

    async with linked(either) as link:
        # Two hundred times its credit: it comes in as many turns at least.
        large = await link.call("large")
        whole = asyncio.get_running_loop().create_task(read_all(large))
        lists = await asyncio.gather(*(link.items("small") for _ in range(100)))
        assert not whole.done()
        assert lists == [list(range(20))] * 100
        assert [len(item) for item in await whole] == [30_000_000]
        assert link.relay.accepted == 1


async def test_4000_streams_at_once_with_default_limits() -> None:
    gate = asyncio.Event()

    async def wait(request: Any) -> AsyncIterator[Any]:
        yield request
        await gate.wait()
        yield -request

    async with linked(wait) as link:
        streams = await asyncio.gather(*(link.call(n) for n in range(4000)))
        assert link.in_flight == 4000
        gate.set()
        lists = await asyncio.gather(*map(read_all, streams))
        assert lists == [[n, -n] for n in range(4000)]
        assert link.relay.accepted == 1


async def test_nothing_is_left_of_thousands_of_cancelled_calls() -> None:
    hush = Hush()
    async with linked(hush) as link:
        for _ in range(20):
            streams = await asyncio.gather(*(link.call(n) for n in range(100)))
            for stream in streams:
                stream.cancel()
        await until(lambda: link.in_flight == 0)
        await until(lambda: not link.at_worker.side.streams)
        assert not link.connection.side.streams
        assert not link.connection.unacknowledged
        assert hush.ended == hush.running == 2000
        stream = await link.call("again")
        assert await stream.__anext__() == "again"
        stream.cancel()


@pytest.mark.slow
async def test_no_credit_is_lost_with_cancelled_calls(scale: float) -> None:
    """Each ends in another state: with items under way, parked for credit, silent."""

    async def some(request: Any) -> AsyncIterator[Any]:
        size, times = {0: (100_000, 20), 1: (0, 0)}.get(request % 20, (1000, 5))
        for _ in range(times):
            yield bytes(size)
        await asyncio.Event().wait()

    async with linked(some) as link:
        # Ten seconds on a busy machine are 10,000 calls.
        for _ in range(20 if scale <= 1 else int(100 * scale)):
            streams = await asyncio.gather(*(link.call(n) for n in range(100)))
            for stream in streams[::2]:
                await asyncio.sleep(0)
                stream.cancel()
            for stream in streams[1::2]:
                stream.cancel()
        await until(lambda: link.in_flight == 0)
        near, far = link.connection.side, link.at_worker.side
        # What one side may send is what the other has room for.
        await until(lambda: (near._credit, far._credit) == (far._room, near._room))
        assert 2 * min(near._credit, far._credit) > CONNECTION_CREDIT
        assert not near.streams
        assert not near.waiting
        assert not far.streams
        assert not far.waiting
        assert link.relay.accepted == 1


# ------------------------------------------------------------ connections that are lost


async def test_a_call_after_a_lost_connection_opens_another() -> None:
    async with linked(count) as link:
        assert await link.items(1) == [0]
        link.relay.break_all()
        await until(lambda: link.connections == 0)
        assert await link.items(2) == [0, 1]
        assert link.relay.accepted == 2


async def test_a_stream_that_loses_its_connection_is_broken() -> None:
    async def two(request: Any) -> AsyncIterator[Any]:
        yield 1
        await asyncio.Event().wait()

    async with linked(two) as link:
        stream = await link.call()
        assert await stream.__anext__() == 1
        link.relay.break_all(reset=False)
        with pytest.raises(StreamBroken, match="ended before generation completed"):
            await stream.__anext__()


async def test_an_acknowledged_call_that_loses_its_connection_may_have_run() -> None:
    hush = Hush()
    async with linked(hush, worker_pool_size=1) as link:
        running = await link.call("a")
        waiting = asyncio.get_running_loop().create_task(link.call("b"))
        await until(lambda: link.in_flight == 2)
        await until(lambda: not link.connection.unacknowledged)
        link.relay.break_all()
        with pytest.raises(WorkerLost) as caught:
            await within(waiting)
        assert not caught.value.retryable
        with pytest.raises(StreamBroken):
            await read_all(running)


async def test_a_worker_that_is_not_there_fails_and_can_come_back() -> None:
    async with linked(count) as link:
        link.relay.refuse()
        for _ in range(3):
            with pytest.raises(ConnectionFailed) as caught:
                await within(link.call(1))
            assert caught.value.retryable
        async with FaultProxy(link.relay.target[1]) as relay:
            link.relay, old = relay, link.relay
            await link.publish()
            assert await link.items(1) == [0]
            link.relay = old


async def size(request: Any) -> AsyncIterator[Any]:
    yield len(request)


async def hold(time_s: float) -> None:
    """Let so much time pass in which nothing arrives."""
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(time_s, over.set)
    await over.wait()


async def test_the_time_of_a_large_request_begins_when_it_has_gone_out() -> None:
    """A worker that takes it slowly, or the network, is no worker that is silent."""
    limit_s = 0.6
    async with linked(size, request_timeout_s=limit_s) as link:
        assert await link.items("warm") == [4]
        link.relay.stall()
        call = asyncio.create_task(link.items(bytes(8 * MIB)))
        await until(lambda: link.connection.unacknowledged)
        (sent,) = link.connection.unacknowledged
        await hold(1.7 * limit_s)
        assert sent.sending
        link.relay.flow()
        await until(lambda: not sent.sending)
        # Beyond the second limit, counted from the beginning.
        link.relay.stall()
        await hold(0.5 * limit_s)
        link.relay.flow()
        assert await within(call) == [8 * MIB]


async def test_an_unacknowledged_call_fails_in_time_and_the_worker_is_told() -> None:
    hush = Hush()
    async with linked(hush, request_timeout_s=0.1) as link:
        assert (await link.call("warm")) is not None
        link.relay.stall()
        with pytest.raises(CallTimeout, match="timed out") as caught:
            await within(link.call("late"), 1)
        assert not caught.value.retryable
        link.relay.flow()
        await until(lambda: hush.running == hush.ended)
        await until(lambda: link.in_flight == 0)


async def test_time_in_which_our_loop_stood_still_is_no_calls_time() -> None:
    """Also of the calls that were made after the one whose limit is looked at."""
    async with linked(echo, request_timeout_s=0.6) as link:
        assert await link.items("warm") == ["warm"]
        link.relay.stall()
        loop = asyncio.get_running_loop()
        first = loop.create_task(link.items("first"))
        await until(lambda: link.connection.unacknowledged)
        began = loop.time()
        await until(lambda: loop.time() - began > 0.3)
        second = loop.create_task(link.items("second"))
        await until(lambda: len(link.connection.unacknowledged) == 2)
        time.sleep(0.8)
        with pytest.raises(CallTimeout, match="timed out"):
            await within(first)
        assert len(link.connection.unacknowledged) == 1
        link.relay.flow()
        assert await within(second) == ["second"]


async def test_the_time_of_a_call_begins_when_its_whole_request_has_gone_out() -> None:
    async with linked(echo) as link:
        assert await link.items("warm") == ["warm"]
        link.relay.stall()
        loop = asyncio.get_running_loop()
        connection = link.connection
        large = loop.create_task(link.items(bytes(600_000)))
        await until(lambda: connection.unacknowledged)
        (waiting,) = connection.unacknowledged
        small = loop.create_task(link.items("small"))
        await until(lambda: len(connection.unacknowledged) == 2)
        assert next(iter(connection.unacknowledged)) is waiting
        credit = encode_frame(CREDIT, waiting._stream.id, encode_number(MIB))
        connection.received(credit)
        _, (last, limit_at) = connection.unacknowledged.items()
        assert last is waiting
        assert limit_at == max(connection.unacknowledged.values())
        link.relay.flow()
        answers = await within(asyncio.gather(large, small))
        assert [len(item) for (item,) in answers] == [600_000, 5]


async def test_a_silent_peer_is_dead_after_a_while_on_both_sides() -> None:
    hush = Hush()
    async with linked(hush, ping_interval_s=0.05, ping_timeout_s=0.2) as link:
        stream = await link.call("x")
        assert await stream.__anext__() == "x"
        loop = asyncio.get_running_loop()
        began = loop.time()
        await until(lambda: loop.time() - began > 0.5)
        assert hush.ended == 0
        link.relay.stall()
        with pytest.raises(StreamBroken):
            await within(stream.__anext__(), 2)
        await until(lambda: hush.ended == 1)
        link.relay.flow()


async def test_a_first_item_that_takes_its_time_is_waited_for() -> None:
    """Slow is not dead: the loops answer pings while the handler thinks."""
    think = asyncio.Event()

    async def slow(request: Any) -> AsyncIterator[Any]:
        await think.wait()
        yield "at last"

    async with linked(slow, ping_interval_s=0.1, ping_timeout_s=0.5) as link:
        stream = await link.call()
        loop = asyncio.get_running_loop()
        began = loop.time()
        # Ten times as long as a peer may be silent for would show no more.
        await until(lambda: loop.time() - began > 1.5)
        think.set()
        assert await read_all(stream) == ["at last"]
        assert link.relay.accepted == 1


async def test_a_side_that_stood_still_does_not_blame_the_other() -> None:
    """Also if nothing arrived meanwhile: the other one had no reason to speak."""
    hush = Hush()
    async with linked(hush) as link:
        lane = link.caller._core.lane.duplex
        lane.config = dataclasses.replace(
            lane.config, ping_interval_s=0.05, ping_timeout_s=0.2
        )
        stream = await link.call("x")
        assert await stream.__anext__() == "x"
        connection = link.connection
        asked = link.relay.passed["up"]
        await until(lambda: link.relay.passed["up"] > asked)
        for _ in range(2):
            time.sleep(0.4)
            asked = link.relay.passed["up"]
            await until(lambda n=asked: link.relay.passed["up"] > n)
        assert connection.is_open
        stream.cancel()


async def test_an_idle_connection_is_closed_and_the_next_call_opens_another() -> None:
    async with linked(count, ping_interval_s=0.02, host_idle_ttl_s=0.05) as link:
        assert await link.items(1) == [0]
        await until(lambda: link.connections == 0)
        assert await link.items(1) == [0]
        assert link.relay.accepted == 2


async def test_a_connection_at_the_end_of_its_ids_gives_way_to_another() -> None:
    hush = Hush()
    async with linked(hush) as link:
        old = await link.call("old")
        first = link.connection
        first.side.last_id = LAST_ID_TO_OPEN
        new = await link.call("new")
        assert link.connections == 2
        assert [await old.__anext__(), await new.__anext__()] == ["old", "new"]
        old.cancel()
        await until(lambda: not first.is_open)
        new.cancel()


async def test_a_connection_at_the_end_of_its_ids_keeps_the_calls_on_it() -> None:
    async with linked(echo) as link:
        assert await link.items("warm") == ["warm"]
        first = link.connection
        link.relay.stall()
        loop = asyncio.get_running_loop()
        old = loop.create_task(link.items("old"))
        await until(lambda: first.unacknowledged)
        first.side.last_id = LAST_ID_TO_OPEN
        new = loop.create_task(link.items("new"))
        await until(lambda: link.links[0]._opening.under_way)
        link.relay.flow()
        assert await within(asyncio.gather(old, new)) == [["old"], ["new"]]
        await until(lambda: not first.is_open)


# ---------------------------------------------------------------------- choosing a lane


LATER_HELLO = PREFACE + encode_frame(HELLO, 0, encode_hello(Hello(lowest=2, highest=3)))


@pytest.mark.parametrize(
    "answer", [None, b"\x00\x00\x00\x00", b"HTTP/1.1 400 Bad", LATER_HELLO]
)
async def test_a_port_without_the_lane_is_called_the_other_way_and_remembered(
    answer: bytes | None,
) -> None:
    """What a record promises and a middle box or an older worker does not keep."""
    prefaces = 0

    async def old_worker(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        nonlocal prefaces
        head = await reader.read(8)
        if head == PREFACE:
            prefaces += 1
            if answer is not None:
                writer.write(answer)
        await reader.read()
        writer.close()

    async with linked(count, connect_timeout_s=0.2, request_timeout_s=0.2) as link:
        server = await asyncio.start_server(old_worker, "127.0.0.1", 0)
        async with server:
            address = server.sockets[0].getsockname()
            link.relay.target = ("127.0.0.1", address[1])
            for _ in range(2):
                with pytest.raises(CallTimeout, match="timed out"):
                    await within(link.call(1))
            assert prefaces == 1
            await link.publish()
            with pytest.raises(CallTimeout):
                await within(link.call(1))
            assert prefaces == 2
            link.relay.break_all()


async def test_a_call_home_request_may_begin_like_a_preface() -> None:
    """Two bytes of length that are the first of the preface, and then a plain path."""
    async with linked(count) as link:
        await link.items(1)
        _, host, port = await link.worker._core.request_server()
        sock = await connected_socket(host, port)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, b"\xff\xff")
        await loop.sock_sendall(sock, b"x" * 65535 + b"\0\0" + b"\0\0\0\0")
        ack = await within(loop.sock_recv(sock, 100))
        assert b"unknown endpoint" in ack
        sock.close()


async def test_a_preface_that_stops_is_given_up() -> None:
    async with linked(count, frame_timeout_s=0.1) as link:
        _, host, port = await link.worker._core.request_server()
        sock = await connected_socket(host, port)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, PREFACE[:7])
        with contextlib.suppress(ConnectionError):
            assert await within(loop.sock_recv(sock, 100)) == b""
        sock.close()


async def test_a_preface_may_come_byte_by_byte() -> None:
    async with linked(count) as link:
        _, host, port = await link.worker._core.request_server()
        sock = await connected_socket(host, port)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop = asyncio.get_running_loop()
        for byte in PREFACE:
            await loop.sock_sendall(sock, bytes([byte]))
            await asyncio.sleep(0.001)
        assert (await within(loop.sock_recv(sock, 100))).startswith(PREFACE)
        sock.close()


async def test_a_connection_lost_in_the_turn_in_which_it_stood_fails_the_call_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request must not wait there for an answer that cannot come."""
    original = _Link._open

    async def lost_at_once(link: _Link) -> _WorkerConnection:
        connection = await original(link)
        connection.abort()
        return connection

    async def echo(request: Any) -> AsyncIterator[Any]:
        yield request

    async with linked(echo, request_timeout_s=60.0) as link:
        with monkeypatch.context() as patch:
            patch.setattr(_Link, "_open", lost_at_once)
            with pytest.raises(ConnectionFailed) as caught:
                await within(link.call())
        assert caught.value.retryable
        assert "as soon as it stood" in str(caught.value.facts["reason"])


async def test_a_connection_lost_before_it_is_known_to_stand_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = duplex_client.connect

    async def lost_before(*args: Any) -> Any:
        connection: Any = await original(*args)
        connection.abort()
        await until(lambda: connection._transport is None)
        return connection

    async with linked(echo) as link:
        with monkeypatch.context() as patch:
            patch.setattr(duplex_client, "connect", lost_before)
            with pytest.raises(ConnectionFailed):
                await within(link.call())
        assert link.connections == 0
        assert await link.items(1) == [1]


async def test_the_limit_of_connections_under_way_is_one_for_all_lanes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    under_way = most = 0
    go_on = asyncio.Event()

    async def connect(*args: Any) -> Any:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await go_on.wait()
        under_way -= 1
        raise ConnectionFailed("nobody is there")

    for module in (duplex_client, request_pool):
        monkeypatch.setattr(module, "connect", connect)
    async with linked(echo, global_connect_limit=1) as link:
        lane = link.caller._core.lane
        request = CallRequest(call_id="id", value=1, packed=b"\x01", metadata={})
        loop = asyncio.get_running_loop()
        calls = [
            loop.create_task(one.open(link.record, request, Mock()))
            for one in (lane.duplex, lane.callhome)
        ]
        await until(lambda: lane.duplex.connecting._waiters)
        assert under_way == 1
        go_on.set()
        errors = await within(asyncio.gather(*calls, return_exceptions=True))
        assert [type(error) for error in errors] == [ConnectionFailed] * 2
        assert most == 1


# ----------------------------------------------------------------------------- draining


async def test_a_draining_worker_ends_its_calls_and_takes_no_new_ones() -> None:
    go_on = asyncio.Event()

    async def wait(request: Any) -> AsyncIterator[Any]:
        yield 1
        await go_on.wait()
        yield 2

    async with linked(wait, drain_timeout_s=5.0) as link:
        stream = await link.call()
        assert await stream.__anext__() == 1
        link.worker.shutdown()
        await until(lambda: link.connection.side.going_away)
        with pytest.raises(Refused, match="is draining") as caught:
            await link.call()
        assert caught.value.retryable
        go_on.set()
        assert await read_all(stream) == [2]
        await within(link.serving)
        await until(lambda: link.connections == 0)


async def push_large(
    request: Any, context: Context, response_sender: ResponseSender
) -> AsyncIterator[Any]:
    response_sender.send(bytes(3_000_000))
    return
    yield


async def test_a_drain_waits_until_a_slow_reader_has_all_of_its_answer() -> None:
    async with linked(push_large, drain_timeout_s=5.0) as link:
        stream = await link.call()
        link.connection.side.withhold(link.connection.side.streams[1])
        await until(lambda: link.in_flight == 0)
        assert link.at_worker.side.waiting
        link.worker.shutdown()
        await until(lambda: link.connection.side.going_away)
        assert not link.serving.done()
        link.connection.side.release(link.connection.side.streams[1])
        link.connection.touch()
        assert [len(item) for item in await read_all(stream)] == [3_000_000]
        await within(link.serving)


async def test_a_drain_does_not_wait_for_ever_for_a_reader_that_stalls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with linked(push_large, drain_timeout_s=0.1) as link:
        stream = await link.call()
        link.connection.side.withhold(link.connection.side.streams[1])
        await until(lambda: link.in_flight == 0)
        link.worker.shutdown()
        await within(link.serving, 2)
        assert "have not read the end of their answers" in caplog.text
        with pytest.raises(StreamBroken):
            await read_all(stream)


async def test_a_drain_does_not_wait_for_a_reader_that_has_gone() -> None:
    async with linked(push_large, drain_timeout_s=60.0) as link:
        stream = await link.call()
        link.connection.side.withhold(link.connection.side.streams[1])
        await until(lambda: link.in_flight == 0)
        assert link.at_worker.side.waiting
        link.worker.shutdown()
        await until(lambda: link.connection.side.going_away)
        assert not link.serving.done()
        link.relay.break_all()
        await within(link.serving)
        with pytest.raises(StreamBroken):
            await read_all(stream)


async def test_a_large_first_item_is_acknowledged_before_it_is_there() -> None:
    async def large(request: Any) -> AsyncIterator[Any]:
        yield bytes(3_000_000)

    async with linked(large, request_timeout_s=0.1) as link:
        await link.items()
        link.relay.stall()
        calling = asyncio.get_running_loop().create_task(link.call())
        await until(lambda: link.connection.unacknowledged)
        link.relay.flow()
        stream = await within(calling)
        link.connection.side.withhold(link.connection.side.streams[2])
        loop = asyncio.get_running_loop()
        began = loop.time()
        await until(lambda: loop.time() - began > 0.3)
        link.connection.side.release(link.connection.side.streams[2])
        link.connection.touch()
        assert [len(item) for item in await read_all(stream)] == [3_000_000]


async def test_streams_run_to_their_end_when_the_clients_runtime_is_shut_down() -> None:
    go_on = asyncio.Event()

    async def wait(request: Any) -> AsyncIterator[Any]:
        yield 1
        await go_on.wait()
        yield 2

    async with linked(wait) as link:
        stream = await link.call()
        assert await stream.__anext__() == 1
        connection = link.connection
        await shut_down(link.caller)
        go_on.set()
        assert await read_all(stream) == [2]
        await until(lambda: not connection.is_open)


async def test_a_request_cut_in_the_middle_was_never_started() -> None:
    async with linked(echo) as link:
        link.relay.cut = Cut(up=200_000, how="reset")
        with pytest.raises(ConnectionFailed) as caught:
            await within(link.call(bytes(3_000_000)))
        assert caught.value.retryable
        link.relay.cut = Cut()
        assert await link.items(3) == [3]


async def test_a_runtime_that_shares_its_port_says_no_go_away() -> None:
    """GOAWAY would be for the whole connection: the other runtime takes calls on it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = MemoryStore()
    hush = Hush()
    workers = [
        make_runtime(store, rpc_port=port, drain_timeout_s=5.0) for _ in range(2)
    ]
    serving = [one.endpoint(PATH).serve_endpoint(hush) for one in workers]
    caller = make_runtime(store)
    client = await caller.endpoint(PATH).client()
    await until(lambda: len(client.instance_ids()) == 2)
    leaves, stays = (one._core.backend.connection_id for one in workers)
    record = client._home.instances.get(leaves)
    assert record is not None

    async def begun(instance_id: int) -> Any:
        stream = await client.direct("x", instance_id, annotated=False)
        assert await stream.__anext__() == "x"
        return stream

    streams = [await begun(leaves), await begun(stays)]
    (link,) = caller._core.lane.duplex._links.values()
    (connection,) = link._connections
    workers[0].shutdown()
    await until(lambda: client.instance_ids() == [stays])
    refusal = await within(refusal_of(caller, record))
    assert "is draining" in str(refusal)
    assert not connection.side.going_away
    streams.append(await begun(stays))
    streams.pop(0).cancel()
    await within(serving[0])
    streams.append(await begun(stays))
    assert link._connections == {connection}
    workers[1].shutdown()
    await until(lambda: connection.side.going_away)
    for stream in streams:
        stream.cancel()
    await within(serving[1])
    await shut_down(caller)


async def test_a_client_that_cannot_be_connected_to_calls_all_the_same() -> None:
    """As behind a firewall: were anything to call back, its listener would fail."""

    async def double(requests: Any) -> AsyncIterator[Any]:
        async for value in requests:
            yield 2 * value

    hush = Hush()
    store = MemoryStore()
    worker = make_runtime(store)
    serving = [
        worker.endpoint(PATH).serve_endpoint(hush),
        worker.endpoint("t.w.double").serve_bidirectional_endpoint(double),
    ]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        caller = make_runtime(store, response_port=taken.getsockname()[1])
        with pytest.raises(CannotListen):
            await caller._core.lane.callhome.listener.start()
        client = await caller.endpoint(PATH).client()
        await client.wait_for_instances(timeout=5)
        stream = await client.random("x", annotated=False)
        assert await stream.__anext__() == "x"
        stream.cancel()
        await until(lambda: hush.ended == 1)
        doubling = await caller.endpoint("t.w.double").client()
        await doubling.wait_for_instances(timeout=5)
        answers = await doubling.bidirectional(range(10), annotated=False)
        assert await read_all(answers) == [2 * n for n in range(10)]
    await shut_down(caller)
    await shut_down(worker)
    await asyncio.gather(*serving)


async def test_a_peer_that_reads_nothing_of_what_it_makes_us_say_is_cut_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Refusals need no credit: 32 MiB of them are the most that is kept for anybody."""
    async with linked(count) as link:
        server, host, port = await link.worker._core.request_server()
        sock = await connected_socket(host, port)
        loop = asyncio.get_running_loop()
        side = ClientSide(Hello())
        await loop.sock_sendall(sock, b"".join(side.out))
        head = encode_request_front(RequestHead("i", "p" * 4000), 0, MAX_BYTES)
        kept = 0
        with pytest.raises(ConnectionError):  # noqa: PT012 - one of many fails
            for number in range(1, 30_000):
                frame = encode_frame(REQUEST, number, head)
                await within(loop.sock_sendall(sock, frame))
                (connection,) = server._connections
                transport = connection._transport
                if transport is not None:
                    kept = max(kept, transport.get_write_buffer_size())
        assert "does not read what it is sent" in caplog.text
        assert 31 * MIB < kept < 33 * MIB
        sock.close()
        assert await link.items(2) == [0, 1]


# ------------------------------------------------------- more than one per worker process


async def test_another_connection_is_opened_when_each_has_a_call() -> None:
    hush = Hush()
    async with linked(hush, duplex_connections=3) as link:
        streams = [await link.call("a")]
        assert link.connections == 1
        streams += [await link.call("b")]
        await until(lambda: link.ready == 2)
        assert link.loads == [2, 0]
        streams += [await link.call("c") for _ in range(2)]
        await until(lambda: link.ready == 3)
        streams += [await link.call("d") for _ in range(8)]
        # The least busy one gets the next call.
        assert link.loads == [4, 4, 4]
        assert link.relay.accepted == 3
        for stream in streams:
            stream.cancel()
        await until(lambda: hush.ended == 12)
        assert link.connections == 3


async def test_no_call_waits_for_a_further_connection_or_fails_with_it() -> None:
    hush = Hush()
    async with linked(hush, duplex_connections=2, connect_timeout_s=0.2) as link:
        streams = [await link.call("a")]
        link.relay.cut = Cut(up=0, how="silent")
        streams += [await within(link.call("b"), 0.2 * 0.9)]
        await until(lambda: link.relay.accepted == 2)
        await until(lambda: not link.links[0]._opening.under_way)
        assert link.ready == 1
        link.relay.cut = Cut()
        streams += [await link.call("c")]
        await until(lambda: link.ready == 2)
        assert [await one.__anext__() for one in streams] == ["a", "b", "c"]
        for stream in streams:
            stream.cancel()


async def test_one_after_the_other_needs_no_second_connection() -> None:
    async with linked(count, duplex_connections=3) as link:
        for _ in range(20):
            assert await link.items(2) == [0, 1]
        assert link.relay.accepted == 1


async def test_of_several_connections_those_that_idle_are_closed() -> None:
    hush = Hush()
    async with linked(
        hush, duplex_connections=2, ping_interval_s=0.02, host_idle_ttl_s=0.05
    ) as link:
        kept = await link.call("a")
        other = await link.call("b")
        await until(lambda: link.ready == 2)
        third = await link.call("c")
        assert sorted(link.loads) == [1, 2]
        for stream in (other, third):
            stream.cancel()
        await until(lambda: link.loads == [1])
        assert await kept.__anext__() == "a"
        kept.cancel()
        await until(lambda: link.connections == 0)


async def test_a_connection_that_is_lost_takes_only_its_own_calls_with_it() -> None:
    hush = Hush()
    async with linked(hush, duplex_connections=2) as link:
        first = await link.call("a")
        second = await link.call("b")
        await until(lambda: link.ready == 2)
        third = await link.call("c")
        streams = [first, second, third]
        assert [await one.__anext__() for one in streams] == ["a", "b", "c"]
        assert link.loads == [2, 1]
        lost, _ = link.links[0]._ready
        lost.abort()
        for stream in (first, second):
            with pytest.raises(StreamBroken):
                await stream.__anext__()
        fourth = await link.call("d")
        assert await fourth.__anext__() == "d"
        await until(lambda: link.ready == 2)
        for stream in (third, fourth):
            stream.cancel()


async def test_a_draining_worker_refuses_on_all_of_its_connections() -> None:
    hush = Hush()
    async with linked(hush, duplex_connections=2, drain_timeout_s=5.0) as link:
        streams = [await link.call("a"), await link.call("b")]
        await until(lambda: link.ready == 2)
        link.worker.shutdown()
        connections = list(link.links[0]._ready)
        await until(lambda: all(one.side.going_away for one in connections))
        for _ in range(3):
            with pytest.raises(Refused, match="is draining"):
                await link.call("c")
        for stream in streams:
            stream.cancel()
        await within(link.serving)
        await until(lambda: link.connections == 0)
