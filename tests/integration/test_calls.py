"""Calls over real loopback sockets, between runtimes that share a store in memory."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import os
import random
import socket
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo.runtime import Context, DistributedRuntime
from dynamo.runtime._discovery.memory import MemoryBackend, MemoryStore
from dynamo.runtime._wire.records import (
    INSTANCES,
    EndpointName,
    EndpointRecord,
    encode_record,
)
from dynamo.runtime.errors import (
    Cancelled,
    CannotConnect,
    CannotListen,
    ConnectionFailed,
    ConnectionTimeout,
    Disconnected,
    DiscoveryError,
    DynamoException,
    EngineShutdown,
    HandlerRefused,
    InvalidArgument,
    MessageTooLarge,
    NoInstances,
    Overloaded,
    Refused,
    RemoteError,
    RouterQueueLimitExceeded,
    RuntimeClosed,
    SelectionServiceError,
    StreamBroken,
    StreamIncomplete,
    Unknown,
    WorkerUnavailable,
)

SOURCE = Path(__file__).resolve().parents[2] / "src"
NAME = EndpointName("ns", "comp", "gen")
PATH = "ns.comp.gen"
LIMIT_S = 5.0
PROMISE_S = 0.1

pytestmark = pytest.mark.usefixtures("each_lane")


class Cluster:
    """Runtimes of one store, all shut down at the end."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.store = MemoryStore()
        self.runtimes: list[DistributedRuntime] = []
        self.held = contextlib.ExitStack()

    def runtime(
        self, connection_id: int | None = None, **changes: Any
    ) -> DistributedRuntime:
        made = DistributedRuntime(self.loop, "mem", "tcp")
        core = made._core
        core.config = dataclasses.replace(core.config, **changes)
        core.backend = MemoryBackend(self.store, connection_id=connection_id)
        if "worker_pool_size" in changes:
            core.admission = type(core.admission)(
                core.config.worker_pool_size, core.config.work_queue_size
            )
        self.runtimes.append(made)
        return made

    async def worker(
        self, handler: Any, connection_id: int | None = None, **changes: Any
    ) -> Worker:
        runtime = self.runtime(connection_id, **changes)
        endpoint = runtime.endpoint(PATH)
        known = set(self.store.content(INSTANCES))
        worker = Worker(runtime, endpoint, endpoint.serve_endpoint(handler))
        await until(
            lambda: worker.serving.done() or set(self.store.content(INSTANCES)) > known
        )
        return worker

    async def client(self, mode: Any = None, **changes: Any) -> Any:
        runtime = self.runtime(**changes)
        return await runtime.endpoint(PATH).client(mode)

    async def dead(self, connection_id: int) -> None:
        """A record whose port nobody listens on, nor gets meanwhile."""
        taken = self.held.enter_context(socket.socket())
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        address = f"127.0.0.1:{port}/{connection_id:x}/ns/comp/gen"
        one = EndpointRecord(
            name=NAME, instance_id=connection_id, transport_kind="tcp", address=address
        )
        self.store.create(INSTANCES, one.key, encode_record(one))

    async def close(self) -> None:
        self.held.close()
        for runtime in self.runtimes:
            runtime._core.shutdown(hurry=True)
        for runtime in self.runtimes:
            await asyncio.wait_for(runtime._core.closed(), LIMIT_S)


class Worker:
    def __init__(self, runtime: DistributedRuntime, endpoint: Any, serving: Any):
        self.runtime = runtime
        self.endpoint = endpoint
        self.serving = serving

    @property
    def instance_id(self) -> int:
        return self.endpoint.connection_id()

    @property
    def in_flight(self) -> int:
        return sum(life.in_flight for life in self.runtime._core._served)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    yield made
    await made.close()


async def until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(poll(), limit_s)


async def read(stream: Any) -> list[Any]:
    return [item async for item in stream]


async def call(client: Any, request: Any = None, **options: Any) -> list[Any]:
    stream = await client.round_robin(request, annotated=False, **options)
    return await asyncio.wait_for(read(stream), LIMIT_S)


def loads(client: Any) -> dict[int, int]:
    return client._home.in_flight


def nothing_in_flight(client: Any) -> bool:
    return loads(client) == {}


async def echo(request):
    yield request


class Silent:
    """A handler that sends one item, then nothing, and notes how it was told to end."""

    def __init__(self) -> None:
        self.running = 0
        self.started = 0
        self.contexts: list[Context] = []

    async def __call__(self, request, context):
        self.running += 1
        self.started += 1
        self.contexts.append(context)
        try:
            yield request
            await context.async_killed_or_stopped()
        finally:
            self.running -= 1


# ------------------------------------------------------------------ the normal course


async def test_items_context_and_instance_of_a_call(cluster: Cluster):
    async def handler(request, context):
        yield context.id()
        yield context.metadata.copy()
        context.metadata["k"] = "changed there"
        yield request

    worker = await cluster.worker(handler)
    client = await cluster.client()
    context = Context("mine", {"k": "v"})
    stream = await client.round_robin({"x": 1}, context=context)
    assert stream.instance_id == worker.instance_id
    items = await read(stream)
    assert [item.data() for item in items] == ["mine", {"k": "v"}, {"x": 1}]
    assert context.metadata.copy() == {"k": "v"}
    assert loads(client) == {}


async def test_two_hundred_calls_at_once(cluster: Cluster):
    await cluster.worker(echo)
    client = await cluster.client()
    answers = await asyncio.gather(*(call(client, number) for number in range(200)))
    assert answers == [[number] for number in range(200)]
    assert loads(client) == {}


async def test_equal_ids_do_not_disturb_each_other(cluster: Cluster):
    await cluster.worker(echo)
    client = await cluster.client()
    context = Context("same")
    answers = await asyncio.gather(
        *(call(client, number, context=context) for number in range(20))
    )
    assert answers == [[number] for number in range(20)]


async def test_variables_of_the_serving_context_are_seen_and_do_not_leak(
    cluster: Cluster,
):
    import contextvars

    seen = contextvars.ContextVar("seen", default="nothing")

    async def handler(request):
        yield seen.get()
        seen.set("changed by a call")
        yield seen.get()

    seen.set("serving")
    await cluster.worker(handler)
    seen.set("calling")
    client = await cluster.client()
    for _ in range(2):
        assert await call(client) == ["serving", "changed by a call"]


async def test_a_received_item_can_be_passed_on(cluster: Cluster):
    async def inner(request):
        yield {"_dynamo_annotated": True, "data": 1, "event": "e", "comment": ["c"]}

    await cluster.worker(inner)
    client = await cluster.client()
    proxy = cluster.runtime().endpoint("ns.comp.proxy")

    async def outer(request, context):
        async for item in await client.round_robin(request, context=context):
            yield item

    proxy.serve_endpoint(outer)
    user = await proxy.client()
    await user.wait_for_instances(timeout=LIMIT_S)
    (item,) = await read(await user.round_robin(None))
    assert (item.data(), item.event(), item.comments()) == (1, "e", ["c"])


# ------------------------------------------------------------------ cancellation


async def closes(stream: Any) -> None:
    await stream.aclose()


async def cancels(stream: Any) -> None:
    stream.cancel()


async def leaves(stream: Any) -> None:
    async with stream:
        """Leaves at once."""


async def cancels_the_reading_task(stream: Any) -> None:
    reading = asyncio.create_task(read(stream))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def cancels_in_a_thread(stream: Any) -> None:
    await asyncio.to_thread(stream.cancel)


@pytest.mark.parametrize(
    "end", [closes, cancels, leaves, cancels_the_reading_task, cancels_in_a_thread]
)
async def test_a_silent_handler_is_told_at_once(
    cluster: Cluster, end: Callable[[Any], Any]
):
    silent = Silent()
    worker = await cluster.worker(silent)
    client = await cluster.client()
    stream = await client.round_robin("first", annotated=False)
    assert await anext(stream) == "first"
    start = cluster.loop.time()
    await end(stream)
    await until(lambda: silent.running == 0)
    assert cluster.loop.time() - start < PROMISE_S
    assert silent.contexts[0].is_stopped()
    assert silent.contexts[0].is_killed()
    assert await read(stream) == []
    await until(lambda: worker.in_flight == 0)
    assert loads(client) == {}


@pytest.mark.parametrize("where", ["here", "in a thread", "in a cycle"])
async def test_a_dropped_stream_is_told_at_once(cluster: Cluster, where: str):
    silent = Silent()
    await cluster.worker(silent)
    client = await cluster.client()
    holder = [await client.round_robin("first")]
    await until(lambda: silent.running == 1)
    start = cluster.loop.time()
    if where == "in a thread":
        thread = threading.Thread(target=holder.clear)
        thread.start()
        thread.join(LIMIT_S)
    else:
        if where == "in a cycle":
            holder.append(holder)
        del holder
        if where == "in a cycle":
            gc.collect()
            start = cluster.loop.time()
    await until(lambda: silent.running == 0)
    assert cluster.loop.time() - start < PROMISE_S
    assert silent.contexts[0].is_killed()
    assert loads(client) == {}


async def test_a_stopped_context_ends_the_stream_after_what_has_arrived(
    cluster: Cluster,
):
    silent = Silent()
    await cluster.worker(silent)
    client = await cluster.client()
    context = Context()
    stream = await client.round_robin("first", annotated=False, context=context)
    reading = asyncio.create_task(read(stream))
    await until(lambda: silent.running == 1)
    start = cluster.loop.time()
    await asyncio.to_thread(context.stop_generating)
    assert await asyncio.wait_for(reading, LIMIT_S) == ["first"]
    await until(lambda: silent.running == 0)
    assert cluster.loop.time() - start < PROMISE_S
    assert silent.contexts[0].is_stopped()
    assert not silent.contexts[0].is_killed()
    # A stop is no fault.
    assert await client.wait_for_instances(timeout=0) == client.instance_ids()


async def test_a_context_stopped_before_the_call_sends_nothing(cluster: Cluster):
    silent = Silent()
    await cluster.worker(silent)
    client = await cluster.client()
    context = Context()
    context.stop_generating()
    assert await call(client, context=context) == []
    assert client._home.lane.callhome._pools._pools == {}
    assert client._home.lane.duplex._links == {}
    assert silent.started == 0


async def test_time_outs_and_breaks_change_nothing(cluster: Cluster):
    go = asyncio.Event()

    async def handler(request):
        yield 1
        yield 2
        await go.wait()
        yield 3

    await cluster.worker(handler)
    client = await cluster.client()
    stream = await client.round_robin(None, annotated=False)
    async for item in stream:
        assert item == 1
        break
    assert await anext(stream) == 2
    for _ in range(3):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
    go.set()
    assert await read(stream) == [3]


async def test_the_handlers_context_links_further_calls(cluster: Cluster):
    silent = Silent()
    await cluster.worker(silent)
    inner = await cluster.client()
    outer = cluster.runtime().endpoint("ns.comp.outer")

    async def handler(request, context):
        async for item in await inner.round_robin(request, context=context):
            yield item

    outer.serve_endpoint(handler)
    client = await outer.client()
    await client.wait_for_instances(timeout=LIMIT_S)
    context = Context("linked")
    stream = await client.round_robin("first", annotated=False, context=context)
    assert await anext(stream) == "first"
    assert silent.contexts[0].id() == "linked"
    start = cluster.loop.time()
    context.stop_generating()
    await until(lambda: silent.running == 0)
    assert cluster.loop.time() - start < PROMISE_S
    assert await read(stream) == []


@pytest.mark.parametrize("connected", [True, False])
async def test_a_call_cancelled_at_any_stage_leaves_no_handler_running(
    cluster: Cluster, connected: bool
):
    """After ever more turns of the loop, until the stream stands before that."""
    silent = Silent()
    worker = await cluster.worker(silent)
    client = await cluster.client()
    if connected:
        await (await client.round_robin(None)).aclose()
    turns, too_late = 0, False
    while not too_late:
        if not connected:
            client = await cluster.client()
        calling = client.round_robin(None)
        for _ in range(turns):
            await asyncio.sleep(0)
        too_late = not calling.cancel()
        await asyncio.wait((calling,))
        del calling
        await until(lambda: silent.running == 0 and worker.in_flight == 0)
        await until(functools.partial(nothing_in_flight, client))
        turns += 1 + turns // 8
    assert turns > 2
    assert silent.started > 0


async def test_a_thousand_calls_cancelled_at_random_leave_nothing(cluster: Cluster):
    silent = Silent()
    worker = await cluster.worker(silent)
    client = await cluster.client()
    assert await anext(await client.round_robin(1, annotated=False)) == 1
    await until(lambda: silent.running == 0)
    base = asyncio.all_tasks()
    chance = random.Random(1)

    async def use(how: int) -> None:
        context = Context()
        stream = await client.round_robin("x", annotated=False, context=context)
        if how == 0:
            async for _ in stream:
                break
        elif how == 1:
            context.stop_generating()
            await read(stream)
        else:
            await read(stream)

    async def one() -> None:
        task = asyncio.create_task(use(chance.randrange(3)))
        cluster.loop.call_later(chance.random() * 0.05, task.cancel)
        await asyncio.wait((task,))

    for _ in range(10):
        await asyncio.gather(*(one() for _ in range(100)))
    gc.collect()
    await until(lambda: silent.running == 0 and worker.in_flight == 0)
    await until(lambda: loads(client) == {})
    lane = client._home.lane
    await until(lambda: not lane.callhome.listener.connections)
    links = lane.duplex._links.values()
    await until(lambda: all(one.idle for link in links for one in link._connections))
    await until(lambda: asyncio.all_tasks() <= base | {asyncio.current_task()})
    admission = worker.runtime._core.admission
    assert (admission._running, admission._reserved) == (0, 0)
    assert not admission._waiting
    assert await client.wait_for_instances(timeout=0) == [worker.instance_id]
    # Calls stopped before they called home are remembered a while for that.
    assert len(lane.callhome.listener._waiting) < 1000


async def test_stopping_a_queued_call_ends_it_at_once(cluster: Cluster):
    silent = Silent()
    await cluster.worker(silent, worker_pool_size=1, work_queue_size=5)
    client = await cluster.client()
    first = await client.round_robin(1)
    await until(lambda: silent.running == 1)
    context = Context()
    queued = client.round_robin(2, context=context)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.shield(queued), 0.05)
    context.stop_generating()
    assert await read(await asyncio.wait_for(queued, LIMIT_S)) == []
    await first.aclose()
    await until(lambda: silent.running == 0)
    assert await anext(await client.round_robin(3, annotated=False)) == 3
    assert silent.started == 2


# ------------------------------------------------------------------ errors


class Odd(Exception):
    pass


class OddBase(BaseException):
    pass


class OddValue(ValueError):
    pass


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Unutterable(BaseException):
    def __str__(self) -> str:
        raise Unutterable


class HttpLike(Exception):
    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code
        self.message = "m"


ERRORS: list[tuple[BaseException, str, str | None, bool]] = [
    (ValueError("boom"), "InvalidRequest: ValueError: boom", "ValueError", False),
    (TypeError("boom"), "InvalidRequest: TypeError: boom", "TypeError", False),
    (OddValue("boom"), "InvalidRequest: OddValue: boom", "OddValue", False),
    (KeyError("boom"), "Internal: KeyError: 'boom'", "KeyError", False),
    (RuntimeError("boom"), "Internal: RuntimeError: boom", "RuntimeError", False),
    (AssertionError("boom"), "Internal: AssertionError: boom", "AssertionError", False),
    (MemoryError("boom"), "Internal: MemoryError: boom", "MemoryError", False),
    (OSError("boom"), "Internal: OSError: boom", "OSError", False),
    (Odd("boom"), "Internal: Odd: boom", "Odd", False),
    (OddBase("boom"), "Internal: OddBase: boom", "OddBase", False),
    (Unspeakable(), "Internal: Unspeakable: <exception str() failed>", None, False),
    (Unutterable(), "Internal: Unutterable: <exception str() failed>", None, False),
    (TimeoutError("boom"), "DeadlineExceeded: TimeoutError: boom", None, False),
    (ConnectionError("boom"), "Unavailable: ConnectionError: boom", None, False),
    (
        ConnectionResetError("boom"),
        "Unavailable: ConnectionResetError: boom",
        "ConnectionResetError",
        False,
    ),
    (
        StopAsyncIteration("boom"),
        "Internal: RuntimeError: async generator raised StopAsyncIteration",
        "RuntimeError",
        False,
    ),
    (
        StopIteration("boom"),
        "Internal: RuntimeError: async generator raised StopIteration",
        "RuntimeError",
        False,
    ),
    (GeneratorExit("boom"), "Unavailable: engine shutting down", None, True),
    (ValueError(), "InvalidRequest: ValueError: ", "ValueError", False),
    (ValueError("a", 2), "InvalidRequest: ValueError: ('a', 2)", "ValueError", False),
    (InvalidArgument("boom"), "boom", None, False),
    (DynamoException("boom"), "Internal: boom", None, False),
    (Unknown("boom"), "Internal: boom", None, False),
    (RouterQueueLimitExceeded("boom"), "Internal: boom", None, False),
    (SelectionServiceError("boom"), "Internal: boom", None, False),
    (CannotConnect("boom"), "Unavailable: boom", None, False),
    (Disconnected("boom"), "Unavailable: boom", None, False),
    (ConnectionTimeout("boom"), "DeadlineExceeded: boom", None, False),
    (Cancelled("boom"), "Cancelled: boom", None, False),
    (EngineShutdown("boom"), "Unavailable: boom", None, True),
    (StreamIncomplete("boom"), "Unavailable: boom", None, True),
    (WorkerUnavailable("boom"), "Unavailable: boom", None, True),
    (HttpLike(404), 'NotFound: {"message":"m","code":404}', None, False),
    (HttpLike(408), 'DeadlineExceeded: {"message":"m","code":408}', None, False),
    (HttpLike(500), 'Internal: {"message":"m","code":500}', None, False),
]


@pytest.mark.parametrize("annotated", [True, False])
@pytest.mark.parametrize(
    "case",
    ERRORS,
    ids=[f"{type(case[0]).__name__}{i}" for i, case in enumerate(ERRORS)],
)
async def test_what_a_handler_raises_and_what_its_caller_gets(
    cluster: Cluster,
    case: tuple[BaseException, str, str | None, bool],
    annotated: bool,
):
    raised, text, remote_type, withdrawn = case

    async def handler(request):
        yield "before"
        raise raised

    worker = await cluster.worker(handler)
    client = await cluster.client()
    stream = await client.round_robin(None, annotated=annotated)
    item = await anext(stream)
    assert (item.data() if annotated else item) == "before"
    with pytest.raises((RemoteError, InvalidArgument)) as caught:
        await anext(stream)
    assert str(caught.value) == text
    assert isinstance(caught.value, InvalidArgument) is isinstance(
        raised, InvalidArgument
    )
    if isinstance(caught.value, RemoteError):
        assert caught.value.instance_id == worker.instance_id
        if remote_type is not None:
            assert caught.value.remote_type == remote_type
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    if withdrawn:
        with pytest.raises(NoInstances):
            await client.round_robin(None)
    else:
        assert await anext(await client.round_robin(None, annotated=False)) == "before"


async def test_a_plain_function_that_raises_does_not_withdraw_its_worker(
    cluster: Cluster,
):
    def handler(request):
        raise ValueError("bad request")

    await cluster.worker(handler)
    client = await cluster.client()
    for _ in range(2):
        stream = await client.round_robin(None)
        with pytest.raises(
            RemoteError, match="InvalidRequest: ValueError: bad request"
        ):
            await anext(stream)


async def not_a_generator(request):
    return request


async def two_parameters(request, other):
    yield request


@pytest.mark.parametrize(
    ("handler", "warning", "words"),
    [
        (not_a_generator, "use 'yield', not 'return'", "'coroutine' object has no"),
        (two_parameters, "missing a required argument", "TypeError: two_parameters()"),
        (None, "not callable", "TypeError: 'NoneType' object is not callable"),
    ],
)
async def test_handlers_that_cannot_work_get_one_warning_and_refuse_each_call(
    cluster: Cluster,
    caplog: pytest.LogCaptureFixture,
    handler: Any,
    warning: str,
    words: str,
):
    await cluster.worker(handler)
    assert [warning in one.getMessage() for one in caplog.records] == [True]
    caplog.clear()
    client = await cluster.client()
    with pytest.raises(HandlerRefused, match="Unavailable: Worker generate") as caught:
        await client.round_robin(None)
    assert words in str(caught.value)
    assert caught.value.phase == "start"
    assert caught.value.attempts == 1
    assert loads(client) == {}
    # A refusal withdraws: it will not be better the next time.
    with pytest.raises(NoInstances):
        await client.round_robin(None)


async def test_an_item_that_cannot_be_sent_ends_that_stream_alone(cluster: Cluster):
    async def handler(request):
        yield 1
        yield object() if request == "bad" else 2

    await cluster.worker(handler)
    client = await cluster.client()
    bad = await client.round_robin("bad", annotated=False)
    good = await client.round_robin("good", annotated=False)
    assert await anext(bad) == 1
    with pytest.raises(RemoteError, match="critical error: failed serializing Python"):
        await anext(bad)
    assert await read(good) == [1, 2]


async def test_a_request_over_the_limit_is_refused_before_it_is_sent(
    cluster: Cluster,
):
    await cluster.worker(echo)
    client = await cluster.client(max_message_bytes=10_000)
    with pytest.raises(MessageTooLarge) as caught:
        await client.round_robin(b"x" * 20_000)
    assert (caught.value.phase, caught.value.retryable) == ("send", False)
    assert await call(client, 1) == [1]
    assert loads(client) == {}


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "SystemExit"])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_exits_of_a_handler_reach_the_caller_and_end_the_worker(
    kind: str, plain: bool, loop: str
):
    program = f"""
        import asyncio, sys
        from dynamo.runtime import DistributedRuntime
        if {loop!r} == "uvloop":
            import uvloop
            asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())

        async def handler(request):
            yield 1
            raise {kind}("boom")

        def plain(request):
            raise {kind}("boom")

        async def main():
            runtime = DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp")
            endpoint = runtime.endpoint("ns.comp.gen")
            endpoint.serve_endpoint({"plain" if plain else "handler"})
            client = await endpoint.client()
            await client.wait_for_instances(timeout=5)
            try:
                async for item in await client.round_robin(None, annotated=False):
                    print(item, flush=True)
            except ValueError as error:
                print(error, flush=True)
                # uvloop runs on for a moment; ending by itself in it is another case.
                await asyncio.Event().wait()
            finally:
                print("left", flush=True)

        try:
            asyncio.run(main())
        except BaseException as error:
            print("ended:", repr(error), flush=True)
        """
    done = run_program(program)
    lines = done.stdout.splitlines()
    assert lines[-1] == f"ended: {kind}('boom')", done.stderr
    assert "left" in lines
    assert "bug of the runtime" not in done.stderr


def run_program(text: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=15,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCE), **variables},
    )


# ------------------------------------------------------------------ moving elsewhere


async def test_a_refused_connection_moves_the_call_to_another_instance(
    cluster: Cluster,
):
    await cluster.dead(1)
    worker = await cluster.worker(echo, 2)
    client = await cluster.client()
    stream = await client.round_robin(5, annotated=False)
    assert stream.instance_id == worker.instance_id
    assert await read(stream) == [5]
    assert loads(client) == {}
    # Not asked again by this client, nor by another of the same runtime.
    assert await client.wait_for_instances(timeout=0) == [2]
    other = await cluster.runtimes[-1].endpoint(PATH).client()
    assert await other.wait_for_instances(timeout=0) == [2]


async def test_direct_never_moves(cluster: Cluster):
    await cluster.dead(1)
    await cluster.worker(echo, 2)
    client = await cluster.client()
    with pytest.raises(ConnectionFailed, match=r"TCP connection to 127.*failed") as got:
        await client.direct(None, 1)
    error = got.value
    assert (error.phase, error.retryable, error.attempts) == ("connect", True, 1)
    assert error.instance_id == 1
    assert isinstance(error, ConnectionError)
    assert loads(client) == {}


async def test_with_every_connection_refused_the_error_tells_how_many(
    cluster: Cluster,
):
    for number in (1, 2, 3):
        await cluster.dead(number)
    client = await cluster.client()
    with pytest.raises(ConnectionFailed) as caught:
        await client.round_robin(None)
    assert caught.value.attempts == 3
    assert caught.value.instance_id in (1, 2, 3)
    # Not more than half of them are left out, and whoever is tried is not there.
    with pytest.raises(ConnectionFailed) as caught:
        await client.round_robin(None)
    assert caught.value.attempts == 2
    assert loads(client) == {}


async def test_a_full_worker_passes_its_calls_on(cluster: Cluster):
    silent = Silent()
    await cluster.worker(silent, 1, worker_pool_size=1, work_queue_size=1)
    await cluster.worker(echo, 2)
    client = await cluster.client()
    held = [client.direct(None, 1) for _ in range(3)]
    await until(lambda: silent.running == 1)
    with pytest.raises(Overloaded, match="Server overloaded: worker at cap") as caught:
        await client.direct(None, 1)
    assert (caught.value.retryable, caught.value.retry_after) == (True, 1.0)
    for _ in range(3):
        assert await call(client, "elsewhere") == ["elsewhere"]
    assert await client.wait_for_instances(timeout=0) == [1, 2]
    await (await held[0]).aclose()
    for one in held:
        one.cancel()
    await asyncio.wait(held)
    del held
    await until(lambda: silent.running == 0)
    await until(lambda: loads(client) == {})


async def test_a_draining_worker_finishes_and_passes_new_calls_on(cluster: Cluster):
    go = asyncio.Event()

    async def slow(request):
        yield 1
        await go.wait()
        yield 2

    worker = await cluster.worker(slow, 1)
    await cluster.worker(echo, 2)
    client = await cluster.client()
    stream = await client.direct(None, 1, annotated=False)
    assert await anext(stream) == 1
    # Draining, but not yet out of discovery for everybody.
    for life in worker.runtime._core._served:
        life.refuse_new()
    with pytest.raises(Refused, match="is draining") as caught:
        await client.direct(None, 1)
    assert caught.value.retryable
    assert await call(client, "elsewhere") == ["elsewhere"]
    worker.runtime.shutdown()
    go.set()
    assert await read(stream) == [2]
    assert await asyncio.wait_for(worker.serving, LIMIT_S) == ()
    await until(lambda: client.instance_ids() == [2])


async def test_a_draining_worker_takes_the_calls_it_was_sent(cluster: Cluster):
    """Queued there when it leaves discovery: their turn comes all the same."""
    go = asyncio.Event()

    async def slow(request):
        await go.wait()
        yield request

    worker = await cluster.worker(slow, 1, worker_pool_size=1, work_queue_size=10)
    client = await cluster.client()
    calls = [asyncio.create_task(call(client, number)) for number in range(5)]
    await until(lambda: worker.in_flight == 5)
    worker.runtime.shutdown()
    await until(lambda: client.instance_ids() == [])
    go.set()
    assert await asyncio.gather(*calls) == [[0], [1], [2], [3], [4]]


async def test_in_flight_is_exact_after_every_outcome(cluster: Cluster):
    async def handler(request, context):
        yield 1
        if request == "error":
            raise ValueError
        if request == "own stop":
            context.stop_generating()
        if request == "wait":
            await context.async_killed_or_stopped()

    await cluster.worker(handler, 7)
    client = await cluster.client(inhibited_s=0.0)
    context = Context()
    for request in ("end", "error", "own stop", "wait"):
        # After its own stop the worker is looked at before it is called again.
        await client.wait_for_instances(timeout=LIMIT_S)
        stream = await client.round_robin(
            request, context=context if request == "wait" else None
        )
        if request == "wait":
            assert loads(client) == {7: 1}
            context.stop_generating()
        with contextlib.suppress(ValueError):
            await read(stream)
        await until(lambda: loads(client) == {})
    streams = [await client.round_robin("wait") for _ in range(5)]
    assert loads(client) == {7: 5}
    for left in (4, 3, 2, 1):
        await streams.pop().aclose()
        assert loads(client) == {7: left}
    streams.clear()
    await until(lambda: loads(client) == {})


async def test_a_lost_worker_breaks_its_streams_and_is_left_out(cluster: Cluster):
    silent = Silent()
    worker = await cluster.worker(silent, 7)
    await cluster.dead(8)
    client = await cluster.client()
    stream = await client.direct(1, 7, annotated=False)
    assert await anext(stream) == 1
    client._home.lane.abort()
    with pytest.raises(StreamBroken) as caught:
        await anext(stream)
    assert str(caught.value) == "Unavailable: Stream ended before generation completed"
    assert caught.value.instance_id == worker.instance_id
    assert await client.wait_for_instances() == [8]
    # It was the connection alone: a new one brings it back.
    await until(lambda: client._chooser.routable()[0].instance_id == 7)
    await until(lambda: silent.running == 0)
    assert loads(client) == {}


async def test_rotation_over_real_workers(cluster: Cluster):
    for number in (3, 1, 2):
        await cluster.worker(echo, number)
    client = await cluster.client()
    await until(lambda: len(client.instance_ids()) == 3)
    numbers = []
    for _ in range(6):
        stream = await client.round_robin(None)
        numbers.append(stream.instance_id)
        await read(stream)
    assert numbers == [1, 2, 3, 1, 2, 3]
    streams = [await client.random(None) for _ in range(30)]
    assert sum(Counter(one.instance_id for one in streams).values()) == 30


# ------------------------------------------------------------------ serving


async def test_the_second_of_two_servings_replaces_the_first(cluster: Cluster):
    async def second(request):
        yield "second"

    worker = await cluster.worker(echo)
    client = await cluster.client()
    assert await call(client, "first") == ["first"]
    again = worker.endpoint.serve_endpoint(second)
    await until(lambda: len(worker.runtime._core._served) == 2)

    async def replaced() -> bool:
        return await call(client, "first") == ["second"]

    for _ in range(100):
        if await replaced():
            break
    assert await replaced()
    worker.serving.cancel()
    await asyncio.wait((worker.serving,))
    # What replaced it stays.
    assert await replaced()
    assert client.instance_ids() == [worker.instance_id]
    worker.runtime.shutdown()
    assert await asyncio.wait_for(again, LIMIT_S) == ()


async def test_cancelling_the_serving_unregisters_and_lets_calls_finish(
    cluster: Cluster,
):
    go = asyncio.Event()

    async def slow(request):
        yield 1
        await go.wait()
        yield 2

    worker = await cluster.worker(slow)
    client = await cluster.client()
    stream = await client.round_robin(None, annotated=False)
    assert await anext(stream) == 1
    worker.serving.cancel()
    await asyncio.wait((worker.serving,))
    assert worker.serving.cancelled()
    await until(lambda: client.instance_ids() == [])
    go.set()
    assert await read(stream) == [2]


async def test_a_shutdown_waits_for_calls_of_a_cancelled_serving(cluster: Cluster):
    go = asyncio.Event()

    async def slow(request):
        yield 1
        await go.wait()
        yield 2

    worker = await cluster.worker(slow)
    client = await cluster.client()
    stream = await client.round_robin(None, annotated=False)
    assert await anext(stream) == 1
    worker.serving.cancel()
    await asyncio.wait((worker.serving,))
    worker.runtime.shutdown()
    closing = asyncio.create_task(worker.runtime._core.closed())
    await asyncio.wait((closing,), timeout=0.05)
    assert not closing.done()
    go.set()
    assert await read(stream) == [2]
    await asyncio.wait_for(closing, LIMIT_S)
    assert worker.runtime._core._served == []


async def test_cancelling_after_unregistering_is_still_a_cancellation(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The file store complains about a record that is not there; nobody cares here."""
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
    monkeypatch.setenv("DYN_TCP_RESPONSE_STREAM_HOST", "127.0.0.1")
    runtime = DistributedRuntime(cluster.loop, "file", "tcp")
    cluster.runtimes.append(runtime)
    endpoint = runtime.endpoint(PATH)
    serving = endpoint.serve_endpoint(echo)
    client = await endpoint.client()
    await client.wait_for_instances(timeout=LIMIT_S)
    assert await endpoint.unregister_endpoint_instance() == ()
    serving.cancel()
    await asyncio.wait((serving,))
    assert serving.cancelled()


async def test_what_could_not_be_registered_says_why(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    runtime = cluster.runtime()
    error = DiscoveryError("the store is full")

    async def refuse(*_: object) -> None:
        raise error

    for name in ("register", "unregister"):
        monkeypatch.setattr(runtime._core.backend, name, refuse)
    serving = runtime.endpoint(PATH).serve_endpoint(echo)
    with pytest.raises(DiscoveryError, match="the store is full"):
        await asyncio.wait_for(serving, LIMIT_S)
    assert runtime._core._served == []


@pytest.mark.parametrize("closing", [True, False])
async def test_a_shutdown_while_it_registers_ends_the_serving_in_order(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, closing: bool
):
    runtime = cluster.runtime()
    registering, go = asyncio.Event(), asyncio.Event()

    async def too_late(*_: object) -> None:
        registering.set()
        await go.wait()
        raise RuntimeClosed("left")

    monkeypatch.setattr(runtime._core.backend, "register", too_late)
    serving = runtime.endpoint(PATH).serve_endpoint(echo)
    await asyncio.wait_for(registering.wait(), LIMIT_S)
    if closing:
        runtime.shutdown()
    go.set()
    if closing:
        assert await asyncio.wait_for(serving, LIMIT_S) == ()
    else:
        with pytest.raises(RuntimeClosed, match="left"):
            await asyncio.wait_for(serving, LIMIT_S)


async def test_a_port_that_is_taken_is_an_error_of_the_serving(cluster: Cluster):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        runtime = cluster.runtime(rpc_port=taken.getsockname()[1])
        serving = runtime.endpoint(PATH).serve_endpoint(echo)
        with pytest.raises(CannotListen, match="DYN_TCP_RPC_PORT"):
            await asyncio.wait_for(serving, LIMIT_S)


async def test_register_and_unregister_move_callers_not_calls(cluster: Cluster):
    worker = await cluster.worker(Silent())
    client = await cluster.client()
    stream = await client.round_robin(1, annotated=False)
    assert await anext(stream) == 1
    assert await worker.endpoint.unregister_endpoint_instance() == ()
    await until(lambda: client.instance_ids() == [])
    with pytest.raises(NoInstances):
        await client.round_robin(1)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(anext(stream), 0.02)
    assert await worker.endpoint.register_endpoint_instance() == ()
    assert await worker.endpoint.register_endpoint_instance() == ()
    assert await client.wait_for_instances(timeout=LIMIT_S) == [worker.instance_id]
    assert await anext(await client.round_robin(2, annotated=False)) == 2
    await stream.aclose()


async def test_registered_without_serving_refuses_calls(cluster: Cluster):
    endpoint = cluster.runtime(5).endpoint(PATH)
    await endpoint.register_endpoint_instance()
    client = await cluster.client()
    with pytest.raises(Refused, match="unknown endpoint 5/ns/comp/gen") as caught:
        await client.round_robin(None)
    assert (caught.value.phase, caught.value.retryable) == ("ack", True)


async def test_the_serving_ends_with_the_runtime(cluster: Cluster):
    worker = await cluster.worker(echo)
    worker.runtime.shutdown()
    worker.runtime.shutdown()
    assert await asyncio.wait_for(worker.serving, LIMIT_S) == ()
    endpoint = worker.runtime.endpoint(PATH)
    assert await asyncio.wait_for(endpoint.serve_endpoint(echo), LIMIT_S) == ()
    with pytest.raises(RuntimeClosed):
        await endpoint.client()
    with pytest.raises(RuntimeClosed):
        await endpoint.register_endpoint_instance()


async def test_a_client_of_a_closed_runtime_says_so(cluster: Cluster):
    await cluster.worker(echo)
    client = await cluster.client()
    assert await call(client, 1) == [1]
    runtime = cluster.runtimes[-1]
    runtime.shutdown()
    await asyncio.wait_for(runtime._core.closed(), LIMIT_S)
    with pytest.raises(RuntimeClosed):
        await client.round_robin(1)
    with pytest.raises((RuntimeClosed, NoInstances)):
        await client.wait_for_instances(timeout=0.1)


async def test_a_shutdown_lets_streams_in_progress_run_to_their_end(cluster: Cluster):
    go = asyncio.Event()

    async def slow(request):
        yield 1
        await go.wait()
        yield 2

    await cluster.worker(slow)
    client = await cluster.client()
    stream = await client.round_robin(None, annotated=False)
    assert await anext(stream) == 1
    runtime = cluster.runtimes[-1]
    runtime.shutdown()
    await asyncio.wait_for(runtime._core.closed(), LIMIT_S)
    go.set()
    assert await asyncio.wait_for(read(stream), LIMIT_S) == [2]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, TypeError),
        ({"generator": echo, "handler": echo}, TypeError),
        ({"handler": echo, "graceful_shutdown": 1}, TypeError),
        ({"handler": echo, "metrics_labels": "ab"}, TypeError),
        ({"handler": echo, "metrics_labels": ["ab"]}, TypeError),
        ({"handler": echo, "metrics_labels": [("a",)]}, ValueError),
        ({"handler": echo, "metrics_labels": [("a", 1)]}, TypeError),
        (
            {"handler": echo, "metrics_labels": [("a", "\ud800")]},
            UnicodeEncodeError,
        ),
        ({"handler": echo, "health_check_payload": []}, TypeError),
        ({"handler": echo, "health_check_payload": {1: 2}}, TypeError),
        ({"handler": echo, "health_check_payload": {"a": object()}}, TypeError),
    ],
)
async def test_bad_arguments_of_serving_are_refused_at_the_call(
    cluster: Cluster, arguments: dict[str, Any], error: type[Exception]
):
    endpoint = cluster.runtime().endpoint(PATH)
    with pytest.raises(error):
        endpoint.serve_endpoint(**arguments)


async def test_good_arguments_of_serving(cluster: Cluster):
    endpoint = cluster.runtime().endpoint(PATH)
    endpoint.serve_endpoint(
        handler=echo,
        graceful_shutdown=None,
        metrics_labels=[("a", "b")],
        health_check_payload={"a": {1, 2}},
    )
    client = await endpoint.client()
    await client.wait_for_instances(timeout=LIMIT_S)
    assert await call(client, 1) == [1]
    assert endpoint.metrics is not None
    for mode in ("RoundRobin", 0):
        with pytest.raises(TypeError, match="router_mode"):
            endpoint.client(mode)


async def test_a_plain_call_of_a_bidirectional_endpoint_is_an_error(cluster: Cluster):
    async def handler(requests):
        async for one in requests:
            yield one

    endpoint = cluster.runtime().endpoint(PATH)
    endpoint.serve_bidirectional_endpoint(handler)
    client = await endpoint.client()
    await client.wait_for_instances(timeout=LIMIT_S)
    stream = await asyncio.wait_for(client.round_robin(1), LIMIT_S)
    with pytest.raises(RemoteError, match="takes a stream of requests"):
        await anext(stream)


# ------------------------------------------------------------------ loops and threads


async def test_calls_from_another_loop_work_and_can_be_cancelled(cluster: Cluster):
    silent = Silent()
    worker = await cluster.worker(silent)
    client = await cluster.client()
    homes: set[Any] = set()

    async def elsewhere() -> list[Any]:
        assert await client.wait_for_instances(timeout=LIMIT_S) == [worker.instance_id]
        stream = await client.round_robin("x", annotated=False)
        got = [await anext(stream)]
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
        homes.add(asyncio.get_running_loop())
        async with stream:
            got.append("leaving")
        got += await read(stream)
        dropped = await client.round_robin("y")
        del dropped
        calling = client.round_robin("z")
        calling.cancel()
        await asyncio.wait((calling,))
        return got

    got = await asyncio.wait_for(asyncio.to_thread(asyncio.run, elsewhere()), LIMIT_S)
    assert got == ["x", "leaving"]
    assert cluster.loop not in homes
    await until(lambda: silent.running == 0 and loads(client) == {})


async def test_many_threads_call_at_once(cluster: Cluster):
    await cluster.worker(echo)
    client = await cluster.client()

    async def calls(first: int) -> list[list[Any]]:
        numbers = range(first, first + 25)
        return await asyncio.gather(*(call(client, number) for number in numbers))

    answers = await asyncio.gather(
        *(asyncio.to_thread(asyncio.run, calls(25 * n)) for n in range(4))
    )
    assert [one for some in answers for one in some] == [[n] for n in range(100)]
    assert loads(client) == {}


async def test_serving_from_another_loop_runs_the_handler_at_home(cluster: Cluster):
    runtime = cluster.runtime()
    loops: list[Any] = []

    async def handler(request):
        loops.append(asyncio.get_running_loop())
        yield request

    async def serve() -> Any:
        return await runtime.endpoint(PATH).serve_endpoint(handler)

    there = asyncio.create_task(asyncio.to_thread(asyncio.run, serve()))
    client = await cluster.client()
    await client.wait_for_instances(timeout=LIMIT_S)
    assert await call(client, 1) == [1]
    assert loops == [cluster.loop]
    runtime.shutdown()
    assert await asyncio.wait_for(there, LIMIT_S) == ()


def test_a_runtime_made_before_its_loop_runs():
    loop = asyncio.new_event_loop()
    runtime = DistributedRuntime(loop, "mem", "tcp")

    async def main() -> list[Any]:
        endpoint = runtime.endpoint(PATH)
        serving = endpoint.serve_endpoint(echo)
        client = await endpoint.client()
        await client.wait_for_instances(timeout=LIMIT_S)
        answer = await call(client, 1)
        runtime.shutdown()
        await asyncio.wait_for(serving, LIMIT_S)
        await asyncio.wait_for(runtime._core.closed(), LIMIT_S)
        return answer

    try:
        assert loop.run_until_complete(main()) == [1]
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def test_use_after_the_home_loop_closed_is_a_clear_error():
    kept: list[Any] = []

    async def first() -> None:
        runtime = DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp")
        kept.extend([runtime, await runtime.endpoint(PATH).client()])

    async def second() -> None:
        runtime, client = kept
        with pytest.raises(RuntimeClosed, match="loop"):
            await client.round_robin(None)
        with pytest.raises(RuntimeClosed, match="loop"):
            await runtime.endpoint(PATH).client()

    asyncio.run(first())
    asyncio.run(second())
    kept[0].shutdown()


MANY_RUNS = """
    import asyncio, gc, threading, time, warnings
    from dynamo.runtime import DistributedRuntime
    warnings.simplefilter("error")
    if {loop!r} == "uvloop":
        import uvloop
        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())

    async def handler(request):
        yield request
        if request is None:
            await asyncio.Event().wait()

    async def main(number):
        runtime = DistributedRuntime(asyncio.get_running_loop(), {backend!r}, "tcp")
        endpoint = runtime.endpoint("ns.comp.gen")
        serving = endpoint.serve_endpoint(handler)
        client = await endpoint.client()
        await client.wait_for_instances(timeout=5)
        stream = await client.round_robin(number, annotated=False)
        assert [item async for item in stream] == [number]
        {end}

    for number in range({count}):
        asyncio.run(main(number))

    ours = ("DistributedRuntime", "_Core", "ServedEndpoint", "OutgoingCall")

    def left():
        gc.collect()
        objects = sum(type(one).__name__ in ours for one in gc.get_objects())
        return threading.active_count(), objects

    until = time.monotonic() + 5  # the last threads may be on their way out
    while left() != (1, 0) and time.monotonic() < until:
        pass
    print(*left())
    """
ENDS = {
    "shut down": "runtime.shutdown(); await serving",
    "shutting down": "runtime.shutdown()",
    "forgotten": "pass",
    "forgotten in mid-stream": "await (await client.random(None)).__anext__()",
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_two_hundred_programs_in_one_process(end: str, loop: str):
    """However they end: nothing is complained about, nothing is left."""
    text = MANY_RUNS.format(end=ENDS[end], loop=loop, backend="mem", count=200)
    done = run_program(text)
    assert done.stderr == ""
    assert done.stdout == "1 0\n"


@pytest.mark.parametrize("end", ENDS)
def test_programs_in_one_process_leave_no_thread_of_the_file_store(
    end: str, tmp_path: Path
):
    text = MANY_RUNS.format(end=ENDS[end], loop="asyncio", backend="file", count=10)
    done = run_program(
        text,
        DYN_FILE_KV=str(tmp_path),
        DYN_TCP_RPC_HOST="127.0.0.1",
        DYN_TCP_RESPONSE_STREAM_HOST="127.0.0.1",
    )
    assert done.stderr == ""
    assert done.stdout == "1 0\n"
    assert [one for one in tmp_path.rglob("*") if one.is_file()] == []
