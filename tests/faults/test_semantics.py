"""The bounds that `docs/semantics.md` promises, measured.

Each test provokes one failure several times and prints median and maximum of how long it
took until the one who waits knew.  Here one worker and one client; shutdowns and moves
to other workers are in `test_semantics_of_workers`, and what must be measured with a
program, a store or a chain of its own where that is.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from linked import Link, linked
from measured import AT_ONCE_S, LIMIT_S, TRIES, Times

from dynamo.runtime import Context
from dynamo.runtime._wire.records import INSTANCES
from dynamo.runtime.errors import (
    CallTimeout,
    ConnectionFailed,
    EngineShutdown,
    HandlerRefused,
    MessageTooLarge,
    NoInstances,
    NoInstancesInTime,
    Overloaded,
    Refused,
    RemoteError,
    StreamBroken,
    StreamTimeout,
    WorkerLost,
)
from dynamo.runtime.testing import Cut, until

SETTABLE_S = 0.25
STOPPED_S = 0.1
BRIEF = {"drain_timeout_s": 0.5, "cancel_grace_s": 0.2, "close_timeout_s": 0.3}

Lane = tuple[str, ...]
BOTH_LANES = pytest.mark.parametrize(
    "lane", [("duplex",), ()], ids=["duplex", "call-home"]
)
DUPLEX = pytest.mark.parametrize("lane", [("duplex",)], ids=["duplex"])
CALL_HOME = pytest.mark.parametrize("lane", [()], ids=["call-home"])


class Handler:
    """Does as the request says, and notes when it was stopped and when it ended."""

    def __init__(self) -> None:
        self.begun = 0
        self.running = 0
        self.stopped_at = 0.0
        self.ended_at = 0.0
        self.release = asyncio.Event()

    async def __call__(self, request: Any, context: Context) -> AsyncIterator[Any]:
        self.begun += 1
        self.running += 1
        try:
            if request not in ("hush", None):
                yield "begun"
            if request == "fail":
                raise RuntimeError("boom")
            if request == "down":
                raise EngineShutdown("down")
            if request == "unaware":
                await self.release.wait()
            await context.async_killed_or_stopped()
            self.stopped_at = time.monotonic()
            if request == "slow to leave":
                await self.release.wait()
        finally:
            self.running -= 1
            self.ended_at = time.monotonic()


@contextlib.asynccontextmanager
async def made(
    lane: Lane, **settings: Any
) -> AsyncIterator[tuple[Link, Handler, Callable[..., Any]]]:
    """A link, its handler, and what makes a call whose first item has come."""
    handler = Handler()
    async with linked(handler, lanes=lane, **(BRIEF | settings)) as link:

        async def begin(request: str = "begin", **options: Any) -> Any:
            stream = await asyncio.wait_for(link.call(request, **options), LIMIT_S)
            assert await asyncio.wait_for(anext(stream), LIMIT_S) == "begun"
            return stream

        yield link, handler, begin
        handler.release.set()


def cut(link: Link) -> None:
    link.requests.break_all()
    link.answers.break_all()


async def withdraw_record(link: Link) -> None:
    backend = link.caller._core.backend
    await backend.unregister(INSTANCES, link.record.key)
    await asyncio.sleep(0)


async def move(link: Link, port: int) -> None:
    """Have the worker's record name another port."""
    await withdraw_record(link)
    link.requests.port = port
    await link.publish()
    await link.client.wait_for_instances(timeout=LIMIT_S)


async def next_item(stream: Any) -> Any:
    return await anext(stream)


# ------------------------------------------------------------------ nobody takes the call


@BOTH_LANES
async def test_nobody_to_call(lane: Lane) -> None:
    refused = Times("nobody listed", AT_ONCE_S)
    waited = Times("nobody in time", SETTABLE_S)
    async with made(lane) as (link, _, _):
        client = await link.caller.endpoint("t.w.nobody").client()
        for _ in range(TRIES):
            error = await refused.error(client.random(None), NoInstances)
            assert error.facts["listed"] == 0
            wait = client.wait_for_instances(timeout=SETTABLE_S)
            await waited.error(wait, NoInstancesInTime)
    refused.judge()
    waited.judge(not_before_s=SETTABLE_S)


@BOTH_LANES
async def test_a_port_that_refuses(lane: Lane) -> None:
    times = Times("connection refused", AT_ONCE_S)
    async with made(lane) as (link, _, _):
        for _ in range(TRIES):
            # Another port each time: a way that failed before is not tried at once.
            with socket.socket() as closed:
                closed.bind(("127.0.0.1", 0))
                await move(link, closed.getsockname()[1])
                error = await times.error(link.call(), ConnectionFailed)
                assert error.retryable
    times.judge()


@BOTH_LANES
async def test_a_port_that_does_not_answer(lane: Lane) -> None:
    times = Times("no connection", SETTABLE_S)
    async with made(lane, connect_timeout_s=SETTABLE_S) as (link, _, _):
        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            await move(link, full.getsockname()[1])
            taken = [socket.socket() for _ in range(3)]
            for one in taken:
                one.setblocking(False)
                one.connect_ex(full.getsockname())
            for _ in range(TRIES):
                error = await times.error(link.call(), ConnectionFailed)
                assert error.retryable
            for one in taken:
                one.close()
    times.judge()


@BOTH_LANES
async def test_a_request_without_an_acknowledgement(lane: Lane) -> None:
    times = Times("no acknowledgement", SETTABLE_S)
    async with made(lane, request_timeout_s=SETTABLE_S) as (link, _, begin):
        for _ in range(TRIES):
            (await begin()).cancel()
            link.requests.stall()
            error = await times.error(link.call("hush"), CallTimeout)
            assert error.facts["limit"] == "DYN_TCP_REQUEST_TIMEOUT"
            assert not error.retryable
            link.requests.flow()
    times.judge()


@CALL_HOME
async def test_a_worker_that_does_not_call_home(lane: Lane) -> None:
    times = Times("no call home", SETTABLE_S)
    async with made(lane, call_home_timeout_s=SETTABLE_S) as (link, _, _):
        # Its connections are taken and nothing passes.
        link.answers.cut = Cut(up=0, down=0, how="silent")
        for _ in range(TRIES):
            error = await times.error(link.call("hush"), CallTimeout)
            assert error.phase == "start"
    times.judge()


@BOTH_LANES
async def test_a_full_worker(lane: Lane) -> None:
    times = Times("worker full", AT_ONCE_S)
    async with made(lane, worker_pool_size=1, work_queue_size=1) as (link, _, begin):
        link.worker._core.admission._running_limit = 1
        link.worker._core.admission._waiting_limit = 1
        running = await begin()
        queued = asyncio.create_task(link.call("hush"))
        await until(lambda: link.worker._core.admission._reserved == 2)
        for _ in range(TRIES):
            error = await times.error(link.call("hush"), Overloaded)
            assert error.retryable
            assert error.retry_after == 1.0
        running.cancel()
        (await asyncio.wait_for(queued, LIMIT_S)).cancel()
    times.judge()


@BOTH_LANES
async def test_a_worker_that_drains(lane: Lane) -> None:
    times = Times("worker drains", AT_ONCE_S)
    async with made(lane) as (link, _, begin):
        running = await begin()
        for life in link.worker._core._served:
            life.refuse_new()
        for _ in range(TRIES):
            error = await times.error(link.call("hush"), Refused)
            assert error.retryable
        running.cancel()
    times.judge()


@BOTH_LANES
async def test_a_request_that_is_too_large(lane: Lane) -> None:
    times = Times("request too large", AT_ONCE_S)
    async with made(lane, max_message_bytes=100_000) as (link, _, begin):
        (await begin()).cancel()
        for _ in range(TRIES):
            error = await times.error(link.call(bytes(200_000)), MessageTooLarge)
            assert error.phase == "send"
    times.judge()


# ------------------------------------------------------------------ a worker is lost


@BOTH_LANES
async def test_a_worker_that_dies_before_the_stream(lane: Lane) -> None:
    times = Times("worker dies before the stream", AT_ONCE_S)
    async with made(lane) as (link, _, begin):
        link.worker._core.admission._running_limit = 1
        for _ in range(TRIES):
            running = await begin()
            instance_id = link.record.instance_id
            queued = link.client.direct("hush", instance_id, annotated=False)
            # The caller knows that it is queued.
            await until(lambda call=queued.call: call._reached)
            since = time.monotonic()
            cut(link)
            error = await times.error(queued, WorkerLost, since=since)
            assert not error.retryable
            await until(lambda: not link.pooled)
            running.cancel()
            await until(lambda: link.worker._core.admission._reserved == 0)
    times.judge()


@BOTH_LANES
async def test_a_worker_that_dies_before_the_first_item(lane: Lane) -> None:
    times = Times("worker dies before the first item", AT_ONCE_S)
    async with made(lane) as (link, handler, _):
        for _ in range(TRIES):
            stream = await asyncio.wait_for(link.call("hush"), LIMIT_S)
            await until(lambda: handler.running == 1)
            since = time.monotonic()
            cut(link)
            error = await times.error(next_item(stream), StreamBroken, since=since)
            assert not error.retryable
            await until(lambda: not link.pooled and not handler.running)
    times.judge()


@BOTH_LANES
async def test_a_worker_that_dies_in_mid_stream(lane: Lane) -> None:
    times = Times("worker dies in mid-stream", AT_ONCE_S)
    async with made(lane) as (link, _, begin):
        for _ in range(TRIES):
            stream = await begin()
            since = time.monotonic()
            cut(link)
            error = await times.error(next_item(stream), StreamBroken, since=since)
            assert error.phase == "stream"
            await until(lambda: not link.pooled)
    times.judge()


@DUPLEX
async def test_a_worker_that_falls_silent(lane: Lane) -> None:
    times = Times("worker silent", SETTABLE_S)
    stopped = Times("its handler", SETTABLE_S)
    pings = {"ping_interval_s": SETTABLE_S / 4, "ping_timeout_s": SETTABLE_S}
    async with made(lane, **pings) as (link, handler, begin):
        for _ in range(TRIES):
            stream = await begin()
            since = time.monotonic()
            link.requests.stall()
            await times.error(next_item(stream), StreamBroken, since=since)
            await stopped.event(lambda: not handler.running, since=since)
            link.requests.flow()
    times.judge()
    stopped.judge()


@BOTH_LANES
async def test_a_worker_that_leaves_with_a_request(lane: Lane) -> None:
    times = Times("record gone, nothing heard", 1.0)
    async with made(lane) as (link, _, begin):
        for _ in range(TRIES):
            (await begin()).cancel()
            link.requests.stall()
            calling = asyncio.create_task(link.call("hush"))
            await asyncio.sleep(0)
            since = time.monotonic()
            await withdraw_record(link)
            error = await times.error(calling, WorkerLost, since=since)
            assert not error.retryable
            link.requests.flow()
            await link.publish()
            await link.client.wait_for_instances(timeout=LIMIT_S)
    times.judge()


# ------------------------------------------------------------------ limits of the caller


@BOTH_LANES
@pytest.mark.parametrize("limit", ["timeout", "first_item_timeout", "idle_timeout"])
async def test_a_limit_of_the_caller(lane: Lane, limit: str) -> None:
    times = Times(limit, SETTABLE_S)
    stopped = Times(f"{limit}, its handler", SETTABLE_S + STOPPED_S)
    request = "hush" if limit == "first_item_timeout" else "begin"
    async with made(lane) as (link, handler, _):

        async def read() -> None:
            async for _ in await link.call(request, **{limit: SETTABLE_S}):
                pass

        for _ in range(TRIES):
            since = time.monotonic()
            error = await times.error(read(), StreamTimeout, since=since)
            assert error.facts["limit"] == limit
            await stopped.event(lambda: not handler.running, since=since)
    times.judge(not_before_s=SETTABLE_S)
    stopped.judge()


@BOTH_LANES
@pytest.mark.parametrize("waits_for", ["acknowledgement", "turn"])
async def test_a_limit_before_the_stream(lane: Lane, waits_for: str) -> None:
    times = Times(f"timeout while it waits for its {waits_for}", SETTABLE_S)
    given_up = Times("its place", SETTABLE_S + STOPPED_S)
    async with made(lane) as (link, handler, begin):
        admission = link.worker._core.admission
        admission._running_limit = 1
        running = await begin()
        for _ in range(TRIES):
            if waits_for == "acknowledgement":
                link.requests.stall()
            since = time.monotonic()
            call = link.call("hush", timeout=SETTABLE_S)
            error = await times.error(call, CallTimeout, since=since)
            assert error.facts["limit"] == "timeout"
            assert not error.retryable
            link.requests.flow()
            await given_up.event(lambda: admission._reserved == 1, since=since)
            assert handler.begun == 1
        running.cancel()
    times.judge(not_before_s=SETTABLE_S)
    given_up.judge()


@BOTH_LANES
async def test_a_call_for_which_no_time_is_left(lane: Lane) -> None:
    times = Times("no time is left", AT_ONCE_S)
    async with made(lane) as (link, handler, begin):
        (await begin()).cancel()
        for _ in range(TRIES):
            error = await times.error(link.call(timeout=0), CallTimeout)
            assert (error.phase, error.attempts) == ("choose", 0)
        assert handler.begun == 1
    times.judge()


@BOTH_LANES
async def test_a_handler_that_works_in_a_thread(lane: Lane) -> None:
    times = Times("handler in a thread beyond the deadline", SETTABLE_S)
    place = Times("its place, once the thread is back", AT_ONCE_S)
    release = threading.Event()

    def work(request: object) -> Iterator[str]:
        release.wait(LIMIT_S)
        yield "too late"

    async with linked(work, lanes=lane, **BRIEF) as link:
        admission = link.worker._core.admission

        async def read() -> None:
            async for _ in await link.call(timeout=SETTABLE_S):
                pass

        for _ in range(TRIES):
            release.clear()
            await times.error(read(), StreamTimeout)
            assert admission._reserved == 1
            since = time.monotonic()
            release.set()
            await place.event(lambda: not admission._reserved, since=since)
    times.judge(not_before_s=SETTABLE_S)
    place.judge()


@BOTH_LANES
async def test_the_deadline_of_a_handler_whose_caller_is_silent(lane: Lane) -> None:
    late = Times("handler alone at its deadline", STOPPED_S)
    async with made(lane) as (link, handler, begin):
        for _ in range(TRIES):
            deadline = time.monotonic() + 2 * SETTABLE_S
            stream = await begin("unaware", timeout=2 * SETTABLE_S)
            link.requests.stall()
            link.answers.stall()
            with pytest.raises(StreamTimeout):
                await asyncio.wait_for(next_item(stream), LIMIT_S)
            await late.event(lambda: not handler.running, since=deadline)
            link.requests.flow()
            link.answers.flow()
    late.judge()


# ------------------------------------------------------------------ errors of handlers


@BOTH_LANES
@pytest.mark.parametrize("request_", ["fail", "down"])
async def test_a_handler_that_raises(lane: Lane, request_: str) -> None:
    times = Times(f"handler raises ({request_})", AT_ONCE_S)
    async with made(lane) as (_, _, begin):
        for _ in range(TRIES):
            stream = await begin(request_)
            error = await times.error(next_item(stream), RemoteError)
            assert not error.retryable
    times.judge()


@BOTH_LANES
async def test_a_handler_that_cannot_be_called(lane: Lane) -> None:
    times = Times("handler of the wrong shape", AT_ONCE_S)

    async def no_generator(request: object) -> object:
        return request

    async with linked(no_generator, lanes=lane, **BRIEF) as link:
        for _ in range(TRIES):
            error = await times.error(link.call(), HandlerRefused)
            assert not error.retryable
    times.judge()


# ------------------------------------------------------------------ the caller goes


@BOTH_LANES
@pytest.mark.parametrize("way", ["cancels", "dies"])
async def test_a_caller_that_goes(lane: Lane, way: str) -> None:
    told = Times(f"caller {way}, handler is told", STOPPED_S)
    ended = Times(f"caller {way}, handler knows nothing of it", STOPPED_S)
    async with made(lane) as (link, handler, begin):
        for times, request in ((told, "begin"), (ended, "unaware")) * TRIES:
            stream = await begin(request)
            since = time.monotonic()
            if way == "cancels":
                stream.cancel()
            else:
                cut(link)
            await times.event(lambda: not handler.running, since=since)
            if way == "dies":
                # So that the next call does not meet what is left of its connections.
                await until(lambda: not link.pooled)
                with pytest.raises(StreamBroken):
                    await asyncio.wait_for(next_item(stream), LIMIT_S)
    told.judge()
    ended.judge()


@BOTH_LANES
async def test_a_handler_that_takes_its_time_to_leave(lane: Lane) -> None:
    grace = Times("grace of a handler that knows", BRIEF["cancel_grace_s"])
    async with made(lane) as (_, handler, begin):
        for _ in range(TRIES):
            stream = await begin("slow to leave")
            since = time.monotonic()
            stream.cancel()
            await grace.event(lambda: not handler.running, since=since)
            assert handler.ended_at - handler.stopped_at > 0.1
    grace.judge()


@BOTH_LANES
async def test_a_handler_that_swallows_its_cancellation(
    lane: Lane, caplog: pytest.LogCaptureFixture
) -> None:
    limit_s = BRIEF["close_timeout_s"]
    named = Times("a deaf handler is named", STOPPED_S + limit_s)
    release = asyncio.Event()

    async def deaf(request: object) -> AsyncIterator[str]:
        yield "begun"
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()

    async with linked(deaf, lanes=lane, **BRIEF) as link:
        for _ in range(TRIES):
            caplog.clear()
            stream = await asyncio.wait_for(link.call(), LIMIT_S)
            assert await asyncio.wait_for(anext(stream), LIMIT_S) == "begun"
            since = time.monotonic()
            stream.cancel()
            await named.event(lambda: "does it swallow" in caplog.text, since=since)
            assert link.worker._core.admission._reserved == 1
            release.set()
            await until(lambda: not link.worker._core.admission._reserved)
            release.clear()
    named.judge(not_before_s=limit_s)


@BOTH_LANES
async def test_a_context_that_was_stopped_before_the_call(lane: Lane) -> None:
    times = Times("context stopped before the call", AT_ONCE_S)
    async with made(lane) as (link, handler, begin):
        (await begin()).cancel()
        context = Context()
        context.stop_generating()

        async def items() -> list[Any]:
            return [item async for item in await link.call(context=context)]

        for _ in range(TRIES):
            assert await times.result(items()) == []
        assert handler.begun == 1
    times.judge()


@BOTH_LANES
async def test_a_client_that_is_cut_off_while_it_reads(lane: Lane) -> None:
    times = Times("client cut off", AT_ONCE_S)
    ended = Times("its handlers", AT_ONCE_S + STOPPED_S)
    async with made(lane) as (link, handler, begin):
        streams = [await begin() for _ in range(TRIES)]
        readers = [asyncio.create_task(next_item(stream)) for stream in streams]
        await asyncio.sleep(0)
        since = time.monotonic()
        link.caller._core.lane.abort()
        for left, reader in zip(reversed(range(TRIES)), readers, strict=True):
            await times.error(reader, StreamBroken, since=since)
            await ended.event(lambda left=left: handler.running <= left, since=since)
    times.judge()
    ended.judge()
