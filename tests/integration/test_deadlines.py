"""Limits in time between two runtimes: what the caller gets, what the handler sees."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from raw_peers import PATH, make_runtime, shut_down, until, within
from served import served

from dynamo.runtime import Client, Context, DistributedRuntime, UnaryClient
from dynamo.runtime._discovery.memory import MemoryStore
from dynamo.runtime.errors import CallTimeout, StreamTimeout

# The first that is long enough for a call to begin; the machine may be busy.
LIMITS_S = (0.15, 0.3, 0.6, 1.2, 2.4)
BOUND_S = 0.1
TRIES = 5


class Silent:
    """A handler that says nothing after its first items, and notes how it ends."""

    def __init__(self, items: int = 0) -> None:
        self.items = items
        self.seen: list[float | None] = []
        self.stopped_at: list[float] = []

    async def __call__(self, request: object, context: Context) -> AsyncIterator[int]:
        self.seen.append(context.deadline)
        for number in range(self.items):
            yield number
        await context.async_killed_or_stopped()
        self.stopped_at.append(time.monotonic())


async def timed_out(attempt: Callable[[float], Awaitable[Any]]) -> StreamTimeout:
    """The error of a stream whose limit was as long as it must be for a stream.

    Args:
        attempt: Makes a call with that limit, and returns its stream.
    """
    for limit_s in LIMITS_S:
        try:
            stream = await within(attempt(limit_s))
        except CallTimeout:
            continue
        with pytest.raises(StreamTimeout) as caught:
            await within(_drain(stream))
        return caught.value
    raise AssertionError("no call began within any limit")


@pytest.mark.parametrize("items", [0, 2])
async def test_at_the_deadline_the_caller_gets_an_error_and_the_handler_stops(
    each_lane: str, items: int
):
    handler = Silent(items)
    late_s: list[float] = []
    async with served(handler) as pair:
        for _ in range(TRIES):
            error = await timed_out(lambda limit_s: pair.call(timeout=limit_s))
            assert error.facts["limit"] == "timeout"
            assert error.facts["items"] == items
            assert error.instance_id == pair.instance_id
            await until(lambda: not pair.in_flight)
            deadline = handler.seen[-1]
            assert deadline is not None
            late_s.append(handler.stopped_at[-1] - deadline)
    # Its own clock began a moment after the caller's.
    assert -0.05 < min(late_s) < BOUND_S


async def _drain(stream: Any) -> None:
    async for _ in stream:
        pass


async def test_a_call_that_waits_for_its_turn_ends_at_the_deadline(each_lane: str):
    handler = Silent()
    async with served(handler, worker={"worker_pool_size": 1}) as pair:
        first = await pair.call()
        with pytest.raises(CallTimeout) as caught:
            await pair.call(timeout=LIMITS_S[0])
        assert caught.value.facts["limit"] == "timeout"
        await until(lambda: pair.in_flight == 1)
        first.cancel()
    assert len(handler.seen) == 1


async def test_limits_that_do_not_pass_change_nothing(each_lane: str):
    async def count(request: int) -> AsyncIterator[int]:
        for number in range(request):
            yield number

    limits = {"timeout": 60, "first_item_timeout": 30, "idle_timeout": 20}
    async with served(count) as pair:
        assert await pair.items(500, **limits) == list(range(500))
        assert not pair.client._home.deadlines.watched


async def test_the_limits_of_the_configuration_hold_for_calls_that_name_none(
    each_lane: str,
):
    handler = Silent(1)
    async with served(handler, caller={"idle_timeout_s": LIMITS_S[0]}) as pair:
        error = await timed_out(lambda _: pair.call())
        assert "backend response inactivity timeout" in str(error)
        assert error.facts["limit"] == "idle_timeout"
        assert handler.seen == [None]
        await until(lambda: handler.stopped_at)


async def test_a_limit_to_the_first_item_is_met_by_it(each_lane: str):
    handler = Silent(1)
    async with served(handler) as pair:
        error = await timed_out(
            lambda limit_s: pair.call(first_item_timeout=limit_s, timeout=2 * limit_s)
        )
        assert (error.facts["limit"], error.facts["items"]) == ("timeout", 1)


async def test_streamed_input_ends_with_the_call(each_lane: str):
    closed = asyncio.Event()

    async def source() -> AsyncIterator[int]:
        try:
            for number in range(10**9):
                yield number
                await asyncio.sleep(0)
        finally:
            closed.set()

    async def swallow(stream: AsyncIterator[int]) -> AsyncIterator[int]:
        async for _ in stream:
            pass
        yield 0

    runtime = make_runtime()
    serving = runtime.endpoint(PATH).serve_bidirectional_endpoint(swallow)
    client = await runtime.endpoint(PATH).client()
    await within(client.wait_for_instances())
    await timed_out(lambda limit_s: client.bidirectional(source(), timeout=limit_s))
    await within(closed.wait())
    await shut_down(runtime)
    await serving


async def test_a_call_from_another_loop_has_its_limits(each_lane: str):
    handler = Silent()

    async def call(client: Client) -> StreamTimeout:
        return await timed_out(lambda limit_s: client.random(None, timeout=limit_s))

    async with served(handler) as pair:
        in_thread = asyncio.to_thread(lambda: asyncio.run(call(pair.client)))
        assert (await within(in_thread)).facts["limit"] == "timeout"
        await until(lambda: handler.stopped_at)


@pytest.mark.parametrize("value", ["1", [], -1, float("nan")])
@pytest.mark.parametrize("name", ["timeout", "first_item_timeout", "idle_timeout"])
async def test_what_is_no_number_of_seconds_is_refused_by_the_call(
    name: str, value: Any
):
    async with served(Silent()) as pair:
        with pytest.raises((TypeError, ValueError), match=f"argument '{name}'"):
            pair.client.random(None, **{name: value})


# ------------------------------------------------------------------ in handlers


class Chain:
    """A worker whose handler calls the endpoint of another, in any of some ways."""

    def __init__(self, far: Client) -> None:
        self.far = far
        self.seen: list[float | None] = []
        self.threads: list[threading.Thread] = []

    async def __call__(self, request: str, context: Context) -> AsyncIterator[object]:
        self.seen.append(context.deadline)
        call = getattr(self, request)
        yield await call(context)

    async def _first(self, **options: Any) -> object:
        stream = await self.far.random(None, annotated=False, **options)
        (deadline,) = await anext(stream)
        return [deadline]

    async def plainly(self, context: Context) -> object:
        return await self._first()

    async def with_its_context(self, context: Context) -> object:
        return await self._first(context=context)

    async def with_a_context_of_its_own(self, context: Context) -> object:
        return await self._first(context=Context("own"))

    async def in_a_task(self, context: Context) -> object:
        return await asyncio.create_task(self._first())

    async def in_a_thread(self, context: Context) -> object:
        return await asyncio.to_thread(lambda: asyncio.run(self._first()))

    async def unary(self, context: Context) -> object:
        return await UnaryClient(self.far).complete(None)

    async def with_more_time_than_it_has(self, context: Context) -> object:
        return await self._first(timeout=3600)

    async def detached(self, context: Context) -> object:
        return await self._first(context=context.detached("free"))


async def tell(request: object, context: Context) -> AsyncIterator[object]:
    yield [context.deadline]  # None alone would be no item


@contextlib.asynccontextmanager
async def chain() -> AsyncIterator[tuple[Client, Chain]]:
    store = MemoryStore()
    runtimes: list[DistributedRuntime] = [make_runtime(store) for _ in range(3)]
    last, middle, caller = runtimes
    serving = [last.endpoint("t.last.e").serve_endpoint(tell)]
    far = await middle.endpoint("t.last.e").client()
    handler = Chain(far)
    serving.append(middle.endpoint("t.middle.e").serve_endpoint(handler))
    client = await caller.endpoint("t.middle.e").client()
    try:
        await within(far.wait_for_instances())
        await within(client.wait_for_instances())
        yield client, handler
    finally:
        for runtime in reversed(runtimes):
            await shut_down(runtime)
        await within(asyncio.gather(*serving))


WAYS = [
    "plainly",
    "with_its_context",
    "with_a_context_of_its_own",
    "in_a_task",
    "in_a_thread",
    "unary",
    "with_more_time_than_it_has",
]


async def test_calls_made_by_a_handler_inherit_its_deadline(each_lane: str):
    async with chain() as (client, handler):
        for way in WAYS:
            stream = await within(client.random(way, annotated=False, timeout=60))
            (far,) = await within(anext(stream))
            near = handler.seen[-1]
            assert near is not None
            # One millisecond is gained in the number, the rest on the way.
            assert 0 <= far - near < 1, way
            stream.cancel()


async def test_a_detached_call_does_not(each_lane: str):
    async with chain() as (client, _):
        stream = await within(client.random("detached", annotated=False, timeout=60))
        assert await within(anext(stream)) == [None]
        stream.cancel()


async def test_no_deadline_is_inherited_where_there_is_none(each_lane: str):
    async with chain() as (client, _):
        for way in WAYS:
            stream = await within(client.random(way, annotated=False))
            (far,) = await within(anext(stream))
            own = way == "with_more_time_than_it_has"
            assert (far is None) is not own, way
            stream.cancel()


async def test_a_handler_whose_time_is_over_can_only_make_detached_calls(
    each_lane: str,
):
    told: list[object] = []

    async def handler(request: object, context: Context) -> AsyncIterator[object]:
        yield 1
        await context.async_killed_or_stopped()
        if request == "inner":
            return
        await until(lambda: time.monotonic() > (context.deadline or 0))
        try:
            await pair.call("inner")
        except CallTimeout as error:
            told.append((error.facts["limit"], error.phase))
        free = context.detached("free")
        told.append(await anext(await pair.call("inner", context=free)))

    async with served(handler) as pair:
        await timed_out(lambda limit_s: pair.call(timeout=limit_s))
        await until(lambda: len(set(told)) == 2)
    assert set(told) == {("deadline", "choose"), 1}


async def test_a_context_lends_its_deadline_to_all_its_calls(each_lane: str):
    handler = Silent()
    async with served(handler) as pair:
        contexts: list[Context] = []

        async def call_twice(limit_s: float) -> Any:
            contexts.append(Context(timeout=limit_s))
            await pair.call(context=contexts[-1])
            return await pair.call(context=contexts[-1])

        error = await timed_out(call_twice)
        assert error.facts["limit"] == "deadline"
        with pytest.raises(CallTimeout) as refused:
            await pair.call(context=contexts[-1])
        assert refused.value.phase == "choose"
        await until(lambda: not pair.in_flight)
    assert len(handler.seen) >= 2


LANES = [(), ("duplex",), ("local", "duplex")]
LANE_NAMES = ["callhome", "duplex", "local"]


@pytest.mark.parametrize("lanes", LANES, ids=LANE_NAMES)
@pytest.mark.parametrize("timeout", [10**18, 1e300, sys.float_info.max, 10**400])
async def test_a_limit_beyond_all_bounds_travels_too(
    lanes: tuple[str, ...], timeout: float
) -> None:
    async def once(request: object, context: Context) -> AsyncIterator[bool]:
        yield context.deadline is None or context.deadline > time.monotonic() + 1e9

    settings = {"lanes": lanes}
    async with served(once, worker=settings, caller=settings) as pair:
        assert await pair.items(timeout=timeout) == [True]
        assert await pair.items(context=Context(timeout=timeout)) == [True]


@pytest.mark.parametrize("lanes", LANES, ids=LANE_NAMES)
async def test_an_error_names_the_limit_that_passes_before_anything_is_sent(
    lanes: tuple[str, ...],
) -> None:
    settings = {"lanes": lanes}
    async with served(Silent(), worker=settings, caller=settings) as pair:
        with pytest.raises(CallTimeout, match=r"\(timeout 1e-09 s; phase ") as caught:
            await pair.call(timeout=1e-9)
        assert caught.value.facts["limit"] == "timeout"
        assert caught.value.facts["seconds"] == 1e-9
