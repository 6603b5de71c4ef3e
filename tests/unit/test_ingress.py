"""One incoming request, with a caller in memory: admission, running, stopping, ending."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import gc
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from dynamo.runtime import Context
from dynamo.runtime._calls import ingress
from dynamo.runtime._calls.admission import Admission
from dynamo.runtime._calls.deadlines import inherited
from dynamo.runtime._calls.handlers import Handler
from dynamo.runtime._calls.ingress import EndpointIngress
from dynamo.runtime._config import RuntimeConfig, from_env
from dynamo.runtime._transports import IncomingRequest, Rejection
from dynamo.runtime._wire.faults import ErrorObject
from dynamo.runtime.errors import ConnectionFailed, RemoteProtocolError

LIMIT_S = 5.0


def config(**changes: Any) -> RuntimeConfig:
    quick = {"cancel_grace_s": 0.2, "close_timeout_s": 0.1, **changes}
    return dataclasses.replace(from_env({}, "mem", "tcp"), **quick)


class Reply:
    """The way back: writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.codec = "msgpack"
        self.paused = False
        self.codec = "msgpack"
        self.events: Any = None

    def start(self) -> None:
        self.told.append("start")

    def refuse(self, text: str, error: ErrorObject) -> None:
        self.told.append(("refuse", text, error.error_class))

    def item(self, annotated: bytes) -> bool:
        self.told.append(msgspec.msgpack.decode(annotated).get("data"))
        return self.paused

    def fail(self, error: ErrorObject) -> None:
        self.told += [f"{error.error_class}: {error.diagnostic}", "finish"]

    def finish(self) -> None:
        self.told.append("finish")

    def drop(self) -> None:
        self.told.append("drop")


class Input:
    def __init__(self) -> None:
        self.told: list[str] = []
        self.events: Any = None

    def pause(self) -> None:
        self.told.append("pause")

    def resume(self) -> None:
        self.told.append("resume")

    def close(self) -> None:
        self.told.append("close")


class Call:
    """An `IncomingCall`."""

    path = "7/ns/comp/gen"

    def __init__(self, body: bytes | None = None, call_id: str = "id") -> None:
        self.request: IncomingRequest | Exception = IncomingRequest(
            call_id=call_id,
            metadata={"k": "v"},
            codec="msgpack",
            body=msgspec.msgpack.encode("request") if body is None else body,
            trace=None,
            ours=True,
        )
        self.reply = Reply()
        self.input = Input()
        self.unreachable: Exception | None = None
        self.opening: asyncio.Event | None = None

    def decode(self) -> IncomingRequest:
        if isinstance(self.request, Exception):
            raise self.request
        return self.request

    def open_now(self, events: Any) -> Reply | None:
        return None

    async def open(self, events: Any) -> Reply:
        if self.opening is not None:
            await self.opening.wait()
        if self.unreachable is not None:
            raise self.unreachable
        self.reply.events = events
        return self.reply

    async def open_input(self, events: Any) -> Input:
        self.input.events = events
        return self.input

    # What the caller does.

    def stop(self) -> None:
        self.reply.events.on_stop(killed=False)

    def kill(self) -> None:
        self.reply.events.on_stop(killed=True)


def limited(left_s: float) -> Call:
    """A call that must have ended so many seconds from now."""
    call = Call()
    assert isinstance(call.request, IncomingRequest)
    call.request.deadline = time.monotonic() + left_s
    return call


def streamed() -> Call:
    call = Call()
    assert isinstance(call.request, IncomingRequest)
    call.request.body = None
    return call


class Worker:
    """One served endpoint."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.endpoint: EndpointIngress | None = None

    def serve(
        self,
        handler: Any,
        *,
        admission: Admission | None = None,
        streamed: bool = False,
        **changes: Any,
    ) -> EndpointIngress:
        self.endpoint = EndpointIngress(
            self.loop,
            Call.path,
            Handler(handler),
            config(**changes),
            admission or Admission(100, 100),
            contextvars.copy_context(),
            streamed=streamed,
        )
        return self.endpoint

    async def answer(self, call: Call | None = None) -> list[Any]:
        """What the caller gets of one call, up to its end."""
        assert self.endpoint is not None
        call = call or Call()
        assert self.endpoint.offer(call) is None
        await asyncio.wait_for(self.endpoint.idle(), LIMIT_S)
        return call.reply.told


@pytest.fixture
async def worker():
    made = Worker()
    yield made
    if made.endpoint is not None and made.endpoint.in_flight:
        made.endpoint.stop_all(killed=True)
        await asyncio.wait_for(made.endpoint.idle(), LIMIT_S)


async def until(condition: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(poll(), LIMIT_S)


def elapsed_since(start: float) -> float:
    return asyncio.get_running_loop().time() - start


# ------------------------------------------------------------------ admission


async def test_a_full_worker_refuses_and_takes_again_afterwards(worker: Worker):
    go = asyncio.Event()

    async def handler(request):
        await go.wait()
        yield request

    endpoint = worker.serve(handler, admission=Admission(1, 1))
    calls = [Call() for _ in range(4)]
    rejections = [endpoint.offer(call) for call in calls]
    assert rejections[:3] == [None] * 3
    assert rejections[3] == Rejection("Server overloaded: worker at capacity", 1.0)
    assert endpoint.in_flight == 3
    go.set()
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    assert [call.reply.told for call in calls] == [
        ["start", "request", "finish"]
    ] * 3 + [[]]
    assert await worker.answer() == ["start", "request", "finish"]


async def test_a_queued_request_that_is_stopped_never_runs(worker: Worker):
    go = asyncio.Event()
    ran: list[str] = []

    async def handler(request, context):
        ran.append(context.id())
        await go.wait()
        yield request

    admission = Admission(1, 5)
    endpoint = worker.serve(handler, admission=admission)
    first, second, third = (Call(call_id=name) for name in "abc")
    for call in (first, second, third):
        endpoint.offer(call)
    await until(lambda: ran == ["a"] and third.reply.events is not None)
    second.stop()
    await until(lambda: endpoint.in_flight == 2)
    assert second.reply.told == ["drop"]
    go.set()
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    assert ran == ["a", "c"]
    assert (admission._reserved, admission._running) == (0, 0)


async def test_a_draining_endpoint_finishes_what_it_has(worker: Worker):
    go = asyncio.Event()

    async def handler(request):
        await go.wait()
        yield request

    endpoint = worker.serve(handler)
    call = Call()
    endpoint.offer(call)
    endpoint.refuse_new()
    assert endpoint.offer(Call()) == Rejection(
        f"Server unavailable: endpoint {Call.path} is draining"
    )
    go.set()
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    assert call.reply.told == ["start", "request", "finish"]


# ------------------------------------------------------------------ running


async def test_several_may_wait_for_the_endpoint_to_be_idle(worker: Worker):
    async def handler(request):
        yield request

    endpoint = worker.serve(handler)
    await endpoint.idle()
    endpoint.offer(Call())
    waits = [asyncio.create_task(endpoint.idle()) for _ in range(3)]
    await asyncio.sleep(0)
    waits[0].cancel()
    await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), LIMIT_S)
    assert endpoint.in_flight == 0


async def test_a_task_that_never_takes_its_first_step_leaves_nothing(worker: Worker):
    async def handler(request):
        yield request

    admission = Admission(1, 5)
    endpoint = worker.serve(handler, admission=admission)
    before = asyncio.all_tasks()
    endpoint.offer(Call())
    (task,) = asyncio.all_tasks() - before
    task.cancel()
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    assert (admission._reserved, admission._running) == (0, 0)
    assert await worker.answer() == ["start", "request", "finish"]


async def test_one_task_and_one_context_per_call(worker: Worker):
    seen = contextvars.ContextVar("seen", default="nothing")
    tasks: set[Any] = set()

    async def handler(request):
        for step in range(3):
            tasks.add(asyncio.current_task())
            yield seen.get()
            seen.set(f"step {step}")

    seen.set("serving")
    worker.serve(handler)
    seen.set("later")
    items = ["start", "serving", "step 0", "step 1", "finish"]
    assert await worker.answer() == items
    assert await worker.answer() == items
    assert len(tasks) == 2
    assert seen.get() == "later"


async def test_a_time_limit_may_span_several_items(worker: Worker):
    async def handler(request):
        task = asyncio.current_task()
        assert task is not None
        timer = worker.loop.call_later(0.01, task.cancel)
        try:
            yield 1
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            getattr(task, "uncancel", int)()
            yield "timed out"
        finally:
            timer.cancel()

    worker.serve(handler)
    assert await worker.answer() == ["start", 1, "timed out", "finish"]


async def test_a_handler_that_never_awaits_gives_way(worker: Worker):
    turns: list[int] = []

    async def handler(request):
        for number in range(40):
            turns.append(number)
            yield b"x" * 8192

    worker.serve(handler)
    call = Call()
    assert worker.endpoint is not None
    worker.endpoint.offer(call)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert 0 < len(turns) < 40
    call.stop()
    await asyncio.wait_for(worker.endpoint.idle(), LIMIT_S)
    assert len(turns) < 40


async def test_a_caller_that_is_behind_makes_the_handler_wait(worker: Worker):
    made: list[int] = []

    async def handler(request):
        for number in range(3):
            made.append(number)
            yield number

    endpoint = worker.serve(handler)
    call = Call()
    call.reply.paused = True
    endpoint.offer(call)
    await until(lambda: made == [0])
    call.reply.events.on_writable()
    await asyncio.sleep(0)
    assert made == [0]
    call.reply.paused = False
    call.reply.events.on_writable()
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    assert call.reply.told == ["start", 0, 1, 2, "finish"]


async def test_a_handler_that_waits_for_its_caller_is_woken_by_the_stop(
    worker: Worker,
):
    closed: list[str] = []

    async def handler(request, context):
        try:
            while not context.is_stopped():
                yield 1
        finally:
            closed.append("closed")

    endpoint = worker.serve(handler, cancel_grace_s=60)
    call = Call()
    call.reply.paused = True
    endpoint.offer(call)
    await until(lambda: call.reply.told == ["start", 1])
    call.stop()
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    assert closed == ["closed"]


# ------------------------------------------------------------------ errors


async def test_an_error_comes_after_the_items(worker: Worker):
    async def handler(request):
        yield 1
        raise ValueError("boom")

    worker.serve(handler)
    assert await worker.answer() == [
        "start",
        1,
        "InvalidRequest: ValueError: boom",
        "finish",
    ]


async def test_a_plain_function_that_raises_fails_at_its_first_step(worker: Worker):
    def handler(request):
        raise ValueError("boom")

    worker.serve(handler)
    assert await worker.answer() == [
        "start",
        "InvalidRequest: ValueError: boom",
        "finish",
    ]


async def test_a_callable_of_the_wrong_shape_is_refused_before_the_stream(
    worker: Worker,
):
    async def handler(request):
        return request

    worker.serve(handler)
    text = (
        "Generate Error: AttributeError: 'coroutine' object has no attribute "
        "'__anext__'"
    )
    assert await worker.answer() == [("refuse", text, "Internal")]


class OddSteps:
    def __anext__(self):
        return 5


async def test_a_step_that_cannot_be_awaited_is_an_error(worker: Worker):
    worker.serve(lambda request: OddSteps())
    told = await worker.answer()
    assert told[0] == "start"
    assert told[1].startswith("InvalidRequest: TypeError: ")
    assert told[2] == "finish"


async def test_an_item_that_cannot_be_sent_closes_the_handler(
    worker: Worker, caplog: pytest.LogCaptureFixture
):
    closed: list[str] = []

    async def handler(request):
        try:
            yield 1
            yield object()
            yield 3
        finally:
            await asyncio.sleep(0)
            closed.append("closed")

    worker.serve(handler)
    told = await worker.answer()
    assert told[:2] == ["start", 1]
    assert told[2].startswith("Internal: critical error: failed serializing")
    assert told[3:] == ["finish"]
    assert closed == ["closed"]
    assert "handler test_an_item_that_cannot_be_sent" in caplog.text


async def test_cancelling_oneself_is_an_error_of_that_name(worker: Worker):
    async def handler(request):
        yield 1
        raise asyncio.CancelledError("boom")

    worker.serve(handler)
    told = await worker.answer()
    assert told[:2] == ["start", 1]
    assert told[2].startswith("Cancelled: CancelledError: ")
    assert told[3:] == ["finish"]


async def test_being_cancelled_from_outside_is_told_and_no_alarm(
    worker: Worker, caplog: pytest.LogCaptureFixture
):
    """`asyncio.run` cancels every task at its end."""
    tasks: list[asyncio.Task[Any]] = []

    async def handler(request):
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        yield 1
        await asyncio.Event().wait()

    endpoint = worker.serve(handler)
    call = Call()
    endpoint.offer(call)
    await until(lambda: call.reply.told == ["start", 1])
    tasks[0].cancel()
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    assert call.reply.told[2:] == ["Cancelled: CancelledError: ", "finish"]
    assert caplog.text == ""


async def test_a_base_exception_is_an_error_too(worker: Worker):
    class Odd(BaseException):
        pass

    async def handler(request):
        yield 1
        raise Odd("boom")

    worker.serve(handler)
    told = await worker.answer()
    assert told[1] == 1
    assert told[2].endswith("Odd: boom")
    assert told[3] == "finish"


async def test_a_failing_cleanup_is_logged_and_harms_nobody(
    worker: Worker, caplog: pytest.LogCaptureFixture
):
    async def handler(request):
        try:
            yield object()
        finally:
            raise KeyError("in the cleanup")

    worker.serve(handler)
    assert (await worker.answer())[-1] == "finish"
    assert "failed while it was being closed" in caplog.text
    assert "in the cleanup" in caplog.text


async def test_a_cleanup_that_hangs_is_reported_by_name_and_cut_off(
    worker: Worker, caplog: pytest.LogCaptureFixture
):
    async def stubborn_cleanup(request):
        try:
            yield object()
        finally:
            await asyncio.Event().wait()

    worker.serve(stubborn_cleanup)
    start = worker.loop.time()
    assert (await worker.answer())[-1] == "finish"
    assert 0.09 < elapsed_since(start) < 2
    assert "stubborn_cleanup of 7/ns/comp/gen does not end" in caplog.text


@pytest.mark.parametrize(
    ("request_error", "words"),
    [
        (RemoteProtocolError("no control header"), "no control header"),
        (None, "takes a single request, the call sends a stream of requests"),
    ],
)
async def test_a_request_that_makes_no_sense_gets_an_error(
    worker: Worker, request_error: Exception | None, words: str
):
    async def handler(request):
        yield request

    worker.serve(handler)
    call = streamed()
    if request_error is not None:
        call.request = request_error
    told = await worker.answer(call)
    assert told[0] == "start"
    assert words in told[1]
    assert told[2] == "finish"


async def test_a_body_that_cannot_be_read_gets_an_error(worker: Worker):
    async def handler(request):
        yield request

    worker.serve(handler)
    told = await worker.answer(Call(b"\xc1"))
    assert told[0] == "start"
    assert told[1].startswith("InvalidRequest: ValueError: ")
    assert told[2] == "finish"


@pytest.mark.parametrize("readable", [True, False])
async def test_a_caller_that_cannot_be_reached_is_logged(
    worker: Worker, caplog: pytest.LogCaptureFixture, readable: bool
):
    ran: list[str] = []

    async def handler(request):
        ran.append(request)
        yield request

    worker.serve(handler)
    call = Call()
    if not readable:
        call.request = RemoteProtocolError("junk")
    call.unreachable = ConnectionFailed("Unavailable: no route", facts={"reason": "r"})
    assert await worker.answer(call) == []
    assert ran == []
    assert "Unavailable: no route" in caplog.text


async def test_one_bad_handler_never_harms_another_call(worker: Worker):
    go = asyncio.Event()

    async def handler(request):
        if request == "bad":
            raise RuntimeError("boom")
        await go.wait()
        yield request

    endpoint = worker.serve(handler)
    good, bad = (
        Call(msgspec.msgpack.encode("good")),
        Call(msgspec.msgpack.encode("bad")),
    )
    endpoint.offer(good)
    endpoint.offer(bad)
    await until(lambda: endpoint.in_flight == 1)
    go.set()
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    assert good.reply.told == ["start", "good", "finish"]
    assert bad.reply.told == ["start", "Internal: RuntimeError: boom", "finish"]


async def test_a_bug_of_ours_is_logged_as_one(
    worker: Worker, caplog: pytest.LogCaptureFixture
):
    async def handler(request):
        yield request

    worker.serve(handler)
    call = Call()
    call.request = LookupError("a bug")
    assert await worker.answer(call) == []
    assert "ended in a bug of the runtime" in caplog.text


# ------------------------------------------------------------------ stopping


async def test_an_unaware_handler_is_cancelled_soon_after_the_stop(worker: Worker):
    seen: list[str] = []

    async def handler(request, context):
        try:
            yield 1
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        finally:
            await asyncio.sleep(0.01)
            seen.append(f"cleaned up, stopped {context.is_stopped()}")

    endpoint = worker.serve(handler, cancel_grace_s=60)
    call = Call()
    endpoint.offer(call)
    await until(lambda: call.reply.told == ["start", 1])
    start = worker.loop.time()
    call.stop()
    assert call.reply.told == ["start", 1, "drop"]
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    assert 0.04 < elapsed_since(start) < 1
    assert seen == ["cancelled", "cleaned up, stopped True"]
    assert call.reply.told == ["start", 1, "drop"]


@pytest.mark.parametrize("killed", [False, True])
async def test_a_handler_that_looked_gets_its_grace(worker: Worker, killed: bool):
    seen: list[object] = []

    async def handler(request, context):
        yield 1
        await context.async_killed_or_stopped()
        seen.append(context.is_killed())
        await asyncio.sleep(0.1)
        seen.append("done")

    endpoint = worker.serve(handler, cancel_grace_s=60)
    call = Call()
    endpoint.offer(call)
    await until(lambda: call.reply.told == ["start", 1])
    call.reply.events.on_stop(killed=killed)
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    assert seen == [killed, "done"]


async def test_the_grace_ends(worker: Worker):
    seen: list[str] = []

    async def handler(request, context):
        yield 1
        await context.async_killed_or_stopped()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    endpoint = worker.serve(handler, cancel_grace_s=0.2)
    call = Call()
    endpoint.offer(call)
    await until(lambda: call.reply.told == ["start", 1])
    start = worker.loop.time()
    call.stop()
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    assert 0.19 < elapsed_since(start) < 2
    assert seen == ["cancelled"]


async def test_a_short_grace_is_no_longer_than_that_of_the_unaware(worker: Worker):
    async def handler(request, context):
        yield context.is_stopped()
        await context.async_killed_or_stopped()
        await asyncio.Event().wait()

    endpoint = worker.serve(handler, cancel_grace_s=0)
    call = Call()
    endpoint.offer(call)
    await until(lambda: call.reply.told == ["start", False])
    call.stop()
    await asyncio.wait_for(endpoint.idle(), 1)


async def test_a_handler_that_swallows_its_cancellation_is_reported_by_name(
    worker: Worker, caplog: pytest.LogCaptureFixture
):
    release = asyncio.Event()

    async def stubborn(request):
        yield 1
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()

    endpoint = worker.serve(stubborn)
    call = Call()
    endpoint.offer(call)
    await until(lambda: call.reply.told == ["start", 1])
    call.stop()
    await until(lambda: "stubborn of 7/ns/comp/gen does not end" in caplog.text)
    assert "swallow CancelledError" in caplog.text
    release.set()
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)


async def test_after_a_stop_there_is_one_more_step_to_look_around(worker: Worker):
    stopped: list[bool] = []

    async def handler(request, context):
        try:
            while True:
                yield 1
                await asyncio.sleep(0)
                stopped.append(context.is_stopped())
        finally:
            stopped.append(True)

    endpoint = worker.serve(handler, cancel_grace_s=60)
    call = Call()
    endpoint.offer(call)
    await until(lambda: len(stopped) > 1)
    call.stop()
    before = len(stopped)
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    assert stopped[before - 1] is False
    assert len(stopped) - before <= 3
    assert call.reply.told[-1] == "drop"


async def test_the_generator_is_closed_in_the_task_that_drove_it(worker: Worker):
    tasks: list[Any] = []

    async def handler(request):
        tasks.append(asyncio.current_task())
        try:
            while True:
                yield 1
                await asyncio.sleep(0)
        finally:
            await asyncio.sleep(0)
            tasks.append(asyncio.current_task())

    endpoint = worker.serve(handler)
    call = Call()
    endpoint.offer(call)
    await until(lambda: len(call.reply.told) > 2)
    call.stop()
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    assert len(tasks) == 2
    assert tasks[0] is tasks[1]


async def test_an_error_after_the_stop_is_nobodys_business(
    worker: Worker, caplog: pytest.LogCaptureFixture
):
    async def handler(request, context):
        yield 1
        await context.async_killed_or_stopped()
        raise ValueError("boom")

    endpoint = worker.serve(handler)
    call = Call()
    endpoint.offer(call)
    await until(lambda: call.reply.told == ["start", 1])
    call.stop()
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    assert call.reply.told == ["start", 1, "drop"]
    assert caplog.text == ""


async def test_a_handler_may_stop_its_own_context(worker: Worker):
    async def handler(request, context):
        yield 1
        context.stop_generating()
        yield 2

    worker.serve(handler)
    assert await worker.answer() == ["start", 1, "drop"]


async def test_a_stop_after_the_end_means_nothing(worker: Worker):
    async def handler(request):
        yield 1

    worker.serve(handler)
    call = Call()
    assert await worker.answer(call) == ["start", 1, "finish"]
    call.kill()
    assert call.reply.told == ["start", 1, "finish"]


async def test_a_stop_that_comes_late_from_another_thread_accuses_nobody(
    worker: Worker, caplog: pytest.LogCaptureFixture
):
    """It was on its way while the call was refused."""
    endpoint = worker.serve(lambda request: [request], close_timeout_s=0.01)
    assert endpoint.offer(Call()) is None
    (run,) = endpoint._runs
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    caplog.clear()
    await asyncio.to_thread(run._on_context, False)
    later = worker.loop.time() + 0.15
    await until(lambda: worker.loop.time() > later)
    assert caplog.records == []


async def test_killed_while_the_caller_is_being_reached(worker: Worker):
    ran: list[str] = []

    async def handler(request):
        ran.append(request)
        yield request

    endpoint = worker.serve(handler)
    early, later = Call(), Call()
    later.opening = asyncio.Event()
    endpoint.offer(later)
    await asyncio.sleep(0)
    endpoint.offer(early)
    # One has not even been looked at, the other is being connected.
    endpoint.stop_all(killed=True)
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    assert ran == []
    assert early.reply.told == later.reply.told == []


@pytest.mark.parametrize("kind", ["single", "streamed"])
async def test_a_request_that_came_with_its_stop_ends_at_both_sides(
    worker: Worker, kind: str
):
    """On a lane where both may come in one read, the call knows before it is opened."""

    class Stopped(Call):
        async def open(self, events: Any) -> Reply:
            reply = await super().open(events)
            self.stop()
            return reply

    async def handler(request: Any):
        raise AssertionError("nobody wants an answer")
        yield

    call = Stopped()
    if kind == "streamed":
        assert isinstance(call.request, IncomingRequest)
        call.request.body = None
    worker.serve(handler, streamed=kind == "streamed")
    assert await worker.answer(call) == ["drop"]


async def test_a_thousand_stops_at_all_moments_leave_nothing(worker: Worker):
    closed = 0
    opened = 0

    async def handler(request):
        nonlocal opened, closed
        opened += 1
        try:
            for number in range(5):
                yield number
                await asyncio.sleep(0)
        finally:
            closed += 1

    admission = Admission(50, 10_000)
    endpoint = worker.serve(handler, admission=admission)
    for number in range(1000):
        call = Call()
        assert endpoint.offer(call) is None
        if number % 10 == 9:
            await asyncio.sleep(0)
        if call.reply.events is not None:
            call.reply.events.on_stop(killed=number % 2 == 0)
        else:
            worker.loop.call_later(
                number % 7 / 1000,
                lambda call=call: (
                    call.reply.events and call.reply.events.on_stop(killed=True)
                ),
            )
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    assert opened == closed > 0
    assert (admission._reserved, admission._running) == (0, 0)
    gc.collect()


# ------------------------------------------------------------------ streamed input


async def test_streamed_input_is_read_while_items_are_sent(worker: Worker):
    async def handler(requests, context):
        async for one in requests:
            yield one * 2
        yield context.is_stopped()

    endpoint = worker.serve(handler, streamed=True)
    call = streamed()
    endpoint.offer(call)
    await until(lambda: call.reply.told == ["start"])
    call.input.events.on_input(1, 1)
    call.input.events.on_input(2, 1)
    call.input.events.on_input_end()
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    assert call.reply.told == ["start", 2, 4, False, "finish"]
    assert call.input.told == ["close"]


async def test_input_that_nobody_reads_is_held_back(worker: Worker):
    go = asyncio.Event()

    async def handler(requests):
        await go.wait()
        yield len([one async for one in requests])

    endpoint = worker.serve(handler, streamed=True)
    call = streamed()
    endpoint.offer(call)
    await until(lambda: call.reply.told == ["start"])
    for number in range(100):
        call.input.events.on_input(number, 1)
    assert call.input.told == ["pause"]
    call.input.events.on_input_end()
    go.set()
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    assert call.input.told == ["pause", "resume", "close"]
    assert call.reply.told == ["start", 100, "finish"]


async def test_a_stop_ends_the_input(worker: Worker):
    async def handler(requests, context):
        yield "reading"
        async for _ in requests:
            yield "never"
        assert context.is_stopped()

    endpoint = worker.serve(handler, streamed=True, cancel_grace_s=60)
    call = streamed()
    endpoint.offer(call)
    await until(lambda: call.reply.told == ["start", "reading"])
    call.input.events.on_stop(killed=True)
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    assert call.reply.told == ["start", "reading", "drop"]


async def test_a_single_request_to_a_streaming_handler_is_an_error(worker: Worker):
    async def handler(requests):
        yield 1

    worker.serve(handler, streamed=True)
    told = await worker.answer(Call())
    assert "takes a stream of requests, the call sends a single request" in told[1]


async def test_input_before_the_handler_reads_or_without_one_is_no_harm(
    worker: Worker,
):
    async def handler(request):
        yield 1

    endpoint = worker.serve(handler)
    call = Call()
    endpoint.offer(call)
    await until(lambda: call.reply.events is not None)
    call.reply.events.on_input(1, 1)
    call.reply.events.on_input_end()
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    assert call.reply.told == ["start", 1, "finish"]


# ------------------------------------------------------------------ push mode


async def test_a_pushing_handler_sends_through_its_sender(worker: Worker):
    cycle: list[Any] = []
    cycle.append(cycle)

    async def handler(request, context, response_sender):
        response_sender.send(1)
        response_sender.send({"_dynamo_annotated": True, "data": 2})
        with pytest.raises(ValueError, match="failed serializing"):
            response_sender.send(object())
        with pytest.raises(ValueError, match="failed serializing"):
            response_sender.send(cycle)
        response_sender.send(3)
        return
        yield

    worker.serve(handler)
    assert await worker.answer() == ["start", 1, 2, 3, "finish"]


async def test_nothing_can_be_pushed_after_the_close(worker: Worker):
    errors: list[str] = []

    async def handler(request, context, response_sender):
        response_sender.close()
        response_sender.close()
        response_sender.close_with_error("too late")
        try:
            response_sender.send(1)
        except RuntimeError as error:
            errors.append(str(error))
        return
        yield

    worker.serve(handler)
    assert await worker.answer() == ["start", "finish"]
    assert errors == ["the stream is closed: nothing more can be sent"]


async def test_pushing_can_end_in_an_error(worker: Worker):
    async def handler(request, context, response_sender):
        response_sender.send(1)
        response_sender.close_with_error("why")
        return
        yield

    worker.serve(handler)
    assert await worker.answer() == ["start", 1, "Internal: why", "finish"]


async def test_a_pushing_handler_that_yields_is_told_so(worker: Worker):
    async def handler(request, context, response_sender):
        response_sender.send(1)
        yield 2

    worker.serve(handler)
    told = await worker.answer()
    assert told[:2] == ["start", 1]
    assert "push-mode handler yielded" in told[2]
    assert told[3:] == ["finish"]


async def nothing():
    return
    yield


async def test_a_plain_function_may_push_before_it_returns(worker: Worker):
    def handler(request, context, response_sender):
        response_sender.send(1)
        return nothing()

    worker.serve(handler)
    assert await worker.answer() == ["start", 1, "finish"]


async def test_a_plain_function_may_even_close_before_it_returns(worker: Worker):
    def handler(request, context, response_sender):
        response_sender.close_with_error("why")
        return nothing()

    worker.serve(handler)
    assert await worker.answer() == ["start", "Internal: why", "finish"]


async def test_a_function_that_pushed_cannot_be_refused_any_more(worker: Worker):
    def handler(request, context, response_sender):
        response_sender.send(1)
        return 5

    worker.serve(handler)
    told = await worker.answer()
    assert told[:2] == ["start", 1]
    assert told[2] == (
        "Internal: AttributeError: 'int' object has no attribute '__anext__'"
    )
    assert told[3:] == ["finish"]


@pytest.mark.parametrize("killed", [False, True])
async def test_a_handler_that_goes_on_after_its_close_is_stopped_at_the_shutdown(
    worker: Worker, killed: bool
):
    ended: list[str] = []

    async def handler(request, context, response_sender):
        response_sender.close()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("ended")
        yield

    endpoint = worker.serve(handler)
    call = Call()
    endpoint.offer(call)
    await until(lambda: call.reply.told == ["start", "finish"])
    endpoint.stop_all(killed=killed)
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    assert ended == ["ended"]
    assert call.reply.told == ["start", "finish"]


async def test_a_stop_while_a_handler_is_closed_makes_no_second_report(
    worker: Worker, caplog: pytest.LogCaptureFixture
):
    closing = asyncio.Event()

    async def handler(request):
        try:
            yield object()
        finally:
            closing.set()
            await asyncio.sleep(0.08)

    endpoint = worker.serve(handler)
    call = Call()
    endpoint.offer(call)
    await asyncio.wait_for(closing.wait(), LIMIT_S)
    caplog.clear()
    endpoint.stop_all(killed=True)
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    run_out = asyncio.Event()
    worker.loop.call_later(0.15, run_out.set)
    await run_out.wait()
    assert caplog.text == ""


def test_the_unaware_are_told_within_the_promise():
    assert ingress._UNAWARE_GRACE_S < 0.1
    assert logging.getLogger("dynamo.runtime.ingress") is ingress._log


# ------------------------------------------------------------------ deadlines


LATE = ["start", "DeadlineExceeded: TimeoutError: the deadline of the call has passed"]


async def test_a_handler_ends_at_the_deadline_without_a_word_of_its_caller(
    worker: Worker,
):
    ended: list[Any] = []

    async def handler(request, context):
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            ended.append((time.monotonic() - context.deadline, context.is_killed()))

    worker.serve(handler)
    assert await worker.answer(limited(0.05)) == [LATE[0], 1, LATE[1], "finish"]
    ((late_s, killed),) = ended
    assert late_s > 0
    assert killed


async def test_a_request_that_waits_for_its_turn_beyond_its_deadline_never_runs(
    worker: Worker,
):
    go = asyncio.Event()
    ran: list[Any] = []

    async def handler(request):
        ran.append(request)
        await go.wait()
        yield request

    endpoint = worker.serve(handler, admission=Admission(1, 5))
    first, second = Call(), limited(0.02)
    assert endpoint.offer(first) is endpoint.offer(second) is None
    await until(lambda: endpoint.in_flight == 1)
    assert second.reply.told == [*LATE, "finish"]
    go.set()
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    assert ran == ["request"]


async def test_a_deadline_ends_a_request_whose_caller_cannot_be_reached_yet(
    worker: Worker,
):
    async def handler(request):
        yield request

    endpoint = worker.serve(handler)
    call = limited(0.02)
    call.opening = asyncio.Event()
    assert endpoint.offer(call) is None
    await asyncio.wait_for(endpoint.idle(), LIMIT_S)
    assert call.reply.told == []


async def test_a_call_that_ends_in_time_is_watched_no_more(worker: Worker):
    async def handler(request):
        yield request

    endpoint = worker.serve(handler)
    assert await worker.answer(limited(60)) == ["start", "request", "finish"]
    assert not endpoint.deadlines.watched


async def test_what_a_handler_starts_has_its_deadline(worker: Worker):
    seen: list[Any] = []

    async def note() -> None:
        seen.append(Context().deadline)

    async def handler(request, context):
        seen.append(context.deadline)
        seen.append(Context().deadline)
        await asyncio.create_task(note())
        await asyncio.to_thread(lambda: seen.append(Context().deadline))
        seen.append(context.detached("other").deadline)
        yield request

    worker.serve(handler)
    call = limited(60)
    await worker.answer(call)
    assert isinstance(call.request, IncomingRequest)
    assert seen == [call.request.deadline] * 4 + [None]
    seen.clear()
    await worker.answer()
    assert seen == [None] * 5


async def test_a_plain_generator_has_the_deadline_in_its_thread(worker: Worker):
    seen: list[float | None] = []

    def handler(request):
        seen.append(Context().deadline)
        yield request

    worker.serve(handler)
    call = limited(60)
    await worker.answer(call)
    assert isinstance(call.request, IncomingRequest)
    assert seen == [call.request.deadline]


async def test_an_endpoint_served_by_a_handler_has_no_deadline_of_that_handler(
    worker: Worker,
):
    seen: list[float | None] = []

    async def handler(request):
        seen.append(Context().deadline)
        yield request

    token = inherited.set(time.monotonic() + 60)
    try:
        worker.serve(handler)
    finally:
        inherited.reset(token)
    await worker.answer()
    assert seen == [None]
