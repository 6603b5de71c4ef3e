"""One outgoing call against a lane in memory: choosing, moving on, ending, cancelling."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from envelopes import received
from memory_lane import Opened, World, silent, started

from dynamo.runtime._calls import egress
from dynamo.runtime._calls.context import ContextState
from dynamo.runtime._calls.deadlines import Limits
from dynamo.runtime._calls.egress import CallOptions
from dynamo.runtime._calls.streams import AsyncResponseStream
from dynamo.runtime._wire.payload import Annotated
from dynamo.runtime.errors import (
    CallError,
    ConnectionFailed,
    EngineShutdown,
    HandlerRefused,
    InvalidArgument,
    NoInstances,
    Overloaded,
    Refused,
    RemoteError,
    StreamBroken,
    WorkerLost,
)

LIMIT_S = 5.0


@pytest.fixture(params=[False, True], ids=["connects", "connected"])
async def world(request: pytest.FixtureRequest):
    made = World(stands=request.param)
    await made.open()
    yield made
    made.instances.close()
    await made.health.aclose()
    await made.backend.aclose()


async def until(condition: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(poll(), LIMIT_S)


async def read(stream: AsyncResponseStream) -> list[Any]:
    return [item async for item in stream]


# ------------------------------------------------------------------ the normal course


async def test_items_are_delivered_and_the_call_is_counted_until_its_end(world: World):
    stream, opened = await world.stream()
    assert stream.instance_id == 1
    assert world.in_flight == {1: 1}
    opened.item("a")
    opened.item(None)
    opened.item("b")
    opened.events.on_ended()
    assert world.in_flight == {}
    assert await read(stream) == ["a", "b"]
    assert opened.done == []


async def test_annotated_items_come_with_their_envelope_also_without_data(world: World):
    stream, opened = await world.stream(annotated=True)
    opened.events.on_items([received(event="e")], 1)
    opened.events.on_ended()
    (item,) = await read(stream)
    assert type(item) is Annotated
    assert (item.data(), item.event()) == (None, "e")


async def test_a_reader_that_is_behind_pauses_the_lane(world: World):
    stream, opened = await world.stream()
    for number in range(100):
        opened.item(number)
    assert opened.done == ["pause"]
    for _ in range(100):
        await anext(stream)
    assert opened.done == ["pause", "resume"]
    for number in range(100):
        opened.item(number)
    opened.events.on_ended()
    assert await read(stream) == list(range(100))
    assert opened.done == ["pause", "resume", "pause"]


async def test_counts_of_two_calls_are_kept_apart(world: World):
    one, first = await world.stream()
    two, second = await world.stream()
    assert world.in_flight == {1: 2}
    first.events.on_ended()
    assert world.in_flight == {1: 1}
    second.events.on_ended()
    assert world.in_flight == {}
    assert await read(one) == await read(two) == []


# ------------------------------------------------------------------ moving on


@pytest.mark.parametrize(
    ("failure", "withdrawn", "usable"),
    [
        (ConnectionFailed("Unavailable: no"), [], [2]),
        (Refused("Unavailable: draining"), [1], [1, 2]),
    ],
)
async def test_a_call_that_was_not_taken_moves_to_another_instance(
    world: World, failure: CallError, withdrawn: list[int], usable: list[int]
):
    world.lane.failures[1] = failure
    stream, opened = await world.stream()
    assert opened.instance_id == stream.instance_id == 2
    assert world.in_flight == {2: 1}
    assert world.withdrawn == withdrawn
    assert world.usable == usable
    opened.events.on_ended()
    assert world.in_flight == {}


async def test_what_this_process_lacks_is_no_fault_of_the_instance(world: World):
    failure = ConnectionFailed("Unavailable: no")
    failure.__cause__ = ConnectionFailed("the same of the connection")
    failure.__cause__.__cause__ = OSError(errno.EMFILE, "too many open files")
    world.lane.failures[1] = failure
    _, opened = await world.stream()
    assert opened.instance_id == 2
    assert world.usable == [1, 2]


async def test_an_overloaded_worker_is_left_alone_as_long_as_it_asks(world: World):
    def full(opened: Opened) -> None:
        error = Overloaded("CapacityExhausted: full", retry_after=1.5)
        opened.events.on_refused(error, inhibits=False)

    world.lane.scripts[1] = full
    _, opened = await world.stream()
    assert opened.instance_id == 2
    assert world.overloaded == [(1, 1.5)]
    assert world.withdrawn == []


async def test_a_refusal_that_inhibits_withdraws_the_instance(world: World):
    world.lane.scripts[1] = lambda opened: opened.events.on_refused(
        Refused("Unavailable: unknown endpoint"), inhibits=True
    )
    _, opened = await world.stream()
    assert opened.instance_id == 2
    assert world.withdrawn == [1]


async def test_when_nobody_takes_it_the_last_account_is_raised(world: World):
    world.lane.failures = {n: ConnectionFailed(f"Unavailable: {n}") for n in (1, 2)}
    with pytest.raises(ConnectionFailed, match="Unavailable: 2") as caught:
        await world.stream()
    assert caught.value.instance_id == 2
    assert caught.value.attempts == 2
    assert world.in_flight == {}


async def test_a_named_instance_is_the_only_one_tried(world: World):
    world.lane.failures[1] = ConnectionFailed("Unavailable: no")
    with pytest.raises(ConnectionFailed) as caught:
        await world.stream(fixed=True)
    assert (caught.value.instance_id, caught.value.attempts) == (1, 1)
    assert world.lane.opened == []


async def test_what_may_have_run_is_not_sent_again(world: World):
    world.lane.scripts[1] = lambda opened: opened.events.on_refused(
        ConnectionFailed("Unavailable: lost", retryable=False), inhibits=True
    )
    with pytest.raises(ConnectionFailed) as caught:
        await world.stream()
    assert caught.value.retryable is False
    assert [one.instance_id for one in world.lane.opened] == [1]


async def test_a_handler_that_cannot_be_called_is_an_error_of_the_call(world: World):
    world.lane.scripts[1] = lambda opened: opened.events.on_refused(
        HandlerRefused("Unavailable: no generator"), inhibits=True
    )
    with pytest.raises(HandlerRefused) as caught:
        await world.stream()
    assert caught.value.phase == "start"
    assert world.withdrawn == [1]
    assert world.in_flight == {}


async def test_with_nobody_there_nothing_was_tried(world: World):
    await world.remove(1)
    await world.remove(2)
    with pytest.raises(NoInstances) as caught:
        await world.stream()
    assert (caught.value.instance_id, world.lane.opened) == (None, [])


# ------------------------------------------------------------------ errors and losses


async def test_a_failed_handler_is_a_remote_error_after_its_items(world: World):
    world.lane.failures[1] = Refused("Unavailable: draining")
    stream, opened = await world.stream()
    opened.item("a")
    opened.fail(ValueError("boom"))
    assert await anext(stream) == "a"
    with pytest.raises(RemoteError, match="InvalidRequest: ValueError: boom") as caught:
        await anext(stream)
    error = caught.value
    assert (error.remote_type, error.instance_id) == ("ValueError", 2)
    assert (error.phase, error.retryable, error.attempts) == ("stream", False, 2)
    assert world.withdrawn == [1], "the one that drains, not the one that failed"
    assert await read(stream) == []


async def test_an_invalid_argument_comes_as_itself(world: World):
    stream, opened = await world.stream()
    opened.fail(InvalidArgument("boom"))
    with pytest.raises(InvalidArgument, match=r"^boom$"):
        await anext(stream)


async def test_a_worker_that_says_it_ends_is_withdrawn(world: World):
    stream, opened = await world.stream()
    opened.fail(EngineShutdown("bye"))
    with pytest.raises(RemoteError, match="Unavailable: bye"):
        await anext(stream)
    assert world.withdrawn == [1]


async def test_a_broken_stream_is_an_error_after_its_items(world: World):
    stream, opened = await world.stream()
    opened.item("a")
    opened.events.on_lost("Stream ended before generation completed")
    assert await anext(stream) == "a"
    with pytest.raises(StreamBroken) as caught:
        await anext(stream)
    error = caught.value
    assert str(error) == "Unavailable: Stream ended before generation completed"
    assert (error.instance_id, error.attempts, error.retryable) == (1, 1, False)
    assert isinstance(error, ValueError)
    assert isinstance(error, ConnectionError)
    assert world.withdrawn == []
    assert world.usable == [2]
    assert world.in_flight == {}


async def test_lost_before_it_started_is_an_error_of_the_call(world: World):
    def go_away(opened: Opened) -> None:
        # Nor can it be connected to, or it might be usable again already.
        world.lane.failures[1] = ConnectionFailed("Unavailable: gone")
        opened.events.on_lost("gone")

    world.lane.scripts[1] = go_away
    with pytest.raises(WorkerLost, match="before response stream") as caught:
        await world.stream()
    assert caught.value.instance_id == 1
    assert (caught.value.phase, caught.value.retryable) == ("start", False)
    assert world.usable == [2]
    assert world.in_flight == {}


async def test_an_instance_that_leaves_ends_a_call_it_has_not_taken(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(egress, "_LEFT_LIMIT_S", 0.01)
    world.lane.scripts[1] = silent
    calling = asyncio.create_task(world.stream())
    await until(lambda: len(world.lane.opened) == 1)
    await world.remove(1)
    with pytest.raises(WorkerLost, match="Worker disconnected before") as caught:
        await calling
    assert caught.value.facts == {"reason": "the instance left discovery"}
    assert world.lane.opened[0].done == ["kill"]
    assert world.in_flight == {}


async def test_an_instance_that_leaves_may_still_take_what_was_sent(world: World):
    """A draining worker leaves discovery first and serves stragglers."""
    world.lane.scripts[1] = silent
    calling = asyncio.create_task(world.stream())
    await until(lambda: len(world.lane.opened) == 1)
    await world.remove(1)
    started(world.lane.opened[0])
    stream, opened = await calling
    opened.item("a")
    opened.events.on_ended()
    assert await read(stream) == ["a"]


async def test_a_call_that_reached_its_worker_may_wait_there(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """Its turn comes during the drain; the connection would tell of the death."""
    monkeypatch.setattr(egress, "_LEFT_LIMIT_S", 0.01)
    world.lane.scripts[1] = lambda opened: opened.events.on_reached()
    calling = asyncio.create_task(world.stream())
    await until(lambda: len(world.lane.opened) == 1)
    await world.remove(1)
    await asyncio.wait((calling,), timeout=0.05)
    assert not calling.done()
    world.lane.opened[0].events.on_started()
    _, opened = await calling
    assert opened.done == []


async def test_an_instance_that_leaves_while_we_connect_is_tried_all_the_same(
    world: World,
):
    world.lane.hold = asyncio.Event()
    calling = asyncio.create_task(world.stream())
    await world.lane.connecting.wait()
    await world.remove(1)
    world.lane.failures[1] = ConnectionFailed("Unavailable: closed")
    world.lane.hold.set()
    _, opened = await calling
    assert opened.instance_id == 2


# ------------------------------------------------------------------ cancelling


async def close(stream: AsyncResponseStream) -> None:
    await stream.aclose()


async def cancel(stream: AsyncResponseStream) -> None:
    stream.cancel()


async def leave(stream: AsyncResponseStream) -> None:
    async with stream:
        await anext(stream)


async def cancel_in_a_thread(stream: AsyncResponseStream) -> None:
    await asyncio.to_thread(stream.cancel)
    await asyncio.sleep(0)


@pytest.mark.parametrize("end", [close, cancel, leave, cancel_in_a_thread])
async def test_closing_the_stream_kills_the_call(
    world: World, end: Callable[[AsyncResponseStream], Any]
):
    stream, opened = await world.stream()
    opened.item("read by some")
    opened.item("unread")
    await end(stream)
    assert opened.done == ["kill"]
    assert world.in_flight == {}
    assert await read(stream) == []
    await stream.aclose()
    assert opened.done == ["kill"]


async def test_closing_a_complete_stream_drops_what_was_not_read(world: World):
    stream, opened = await world.stream()
    opened.item("unread")
    opened.events.on_ended()
    await stream.aclose()
    assert await read(stream) == []
    assert opened.done == []


async def test_dropping_the_stream_kills_the_call_but_never_in_the_middle_of_things(
    world: World,
):
    """A finalizer may run anywhere, also inside the lane that it would call."""
    stream, opened = await world.stream()
    del stream
    gc.collect()
    assert opened.done == []
    await until(lambda: opened.done == ["kill"])
    assert world.in_flight == {}


async def test_dropping_in_another_thread_kills_the_call(world: World):
    stream, opened = await world.stream()
    handed_over = [stream]
    del stream
    thread = threading.Thread(target=handed_over.clear)
    thread.start()
    thread.join(LIMIT_S)
    await until(lambda: opened.done == ["kill"])


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (CallOptions(), False),
        (CallOptions(idempotent=True), True),
        (CallOptions(on_stream_lost=lambda items, error: None), True),
    ],
)
async def test_a_request_that_cannot_be_sent_again_is_let_go_when_the_handler_runs(
    world: World, options: CallOptions, kept: bool
):
    """It may be large, and its stream long."""
    call = world.call(options=options)
    world.lane.scripts[1] = silent
    starting = call.start()
    await until(lambda: bool(world.lane.opened))
    (opened,) = world.lane.opened
    opened.events.on_reached()
    assert call._request is opened.request
    opened.events.on_started()
    stream = await starting
    assert (call._request is not None) == kept
    opened.events.on_ended()
    assert await read(stream) == []


@pytest.mark.parametrize("rest", ["read", "left"])
@pytest.mark.parametrize("end", ["ended", "answered", "failed", "cancelled"])
async def test_a_call_that_is_over_leaves_nothing_to_the_collector(
    world: World, end: str, rest: str
):
    """Thousands of calls a second would keep it busy otherwise."""

    async def call() -> None:
        stream, opened = await world.stream(options=CallOptions(Limits(timeout_s=9.0)))
        if end == "answered":
            opened.events.on_answer(received(1))
        else:
            opened.item(1)
        if end == "ended":
            opened.events.on_ended()
        elif end == "failed":
            opened.fail(ValueError("no"))
        elif end == "cancelled":
            stream.cancel()
        world.lane.opened.clear()
        with contextlib.suppress(RemoteError):
            while rest == "read":
                await anext(stream)

    with contextlib.suppress(StopAsyncIteration):
        await call()
    gc.collect()
    # What it finds again and again is not of calls.
    stays = gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with contextlib.suppress(StopAsyncIteration):
                await call()
        await asyncio.sleep(0)
        assert gc.collect() == stays
    finally:
        gc.enable()


async def test_dropping_in_a_collected_cycle_kills_the_call(world: World):
    stream, opened = await world.stream()
    cycle: list[object] = [stream]
    cycle.append(cycle)
    del stream, cycle
    gc.collect()
    await until(lambda: opened.done == ["kill"])


async def test_dropping_a_complete_stream_does_nothing(world: World):
    stream, opened = await world.stream()
    opened.events.on_ended()
    del stream
    gc.collect()
    await asyncio.sleep(0)
    assert opened.done == []


def test_dropping_after_the_loop_closed_is_silent(recwarn: pytest.WarningsRecorder):
    async def make() -> AsyncResponseStream:
        world = World()
        await world.open()
        stream, _ = await world.stream()
        world.instances.close()
        return stream

    stream = asyncio.run(make())
    del stream
    gc.collect()
    assert recwarn.list == []


async def test_a_forked_child_does_not_cancel_its_parents_call(world: World):
    stream, opened = await world.stream()
    stream._core._selection.pid += 1
    del stream
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert opened.done == []


async def test_a_reading_task_that_is_cancelled_kills_the_call(world: World):
    stream, opened = await world.stream()
    reading = asyncio.create_task(read(stream))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait((reading,))
    await until(lambda: opened.done == ["kill"])
    assert await read(stream) == []


async def test_a_reading_task_that_ends_otherwise_changes_nothing(world: World):
    stream, opened = await world.stream()

    async def one() -> Any:
        return await anext(stream)

    for number in range(3):
        opened.item(number)
        assert await asyncio.create_task(one()) == number
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(anext(stream), 0.001)
    opened.item("still")
    async for item in stream:
        assert item == "still"
        break
    assert opened.done == []
    assert stream._core._readers == (asyncio.current_task(),)
    opened.events.on_ended()
    assert stream._core._readers == ()
    assert await read(stream) == []
    assert stream._core.reader is None


async def test_a_call_cancelled_while_connecting_is_not_counted(world: World):
    world.lane.hold = asyncio.Event()
    calling = asyncio.create_task(world.stream())
    await world.lane.connecting.wait()
    assert world.in_flight == {1: 1}
    calling.cancel()
    await asyncio.wait((calling,))
    assert calling.cancelled()
    assert world.in_flight == {}
    assert world.lane.opened == []


async def test_a_call_cancelled_before_it_started_is_killed(world: World):
    world.lane.scripts[1] = silent
    calling = asyncio.create_task(world.stream())
    await until(lambda: len(world.lane.opened) == 1)
    calling.cancel()
    await asyncio.wait((calling,))
    assert calling.cancelled()
    assert world.lane.opened[0].done == ["kill"]
    assert world.in_flight == {}


# ------------------------------------------------------------------ contexts


async def test_stopped_before_the_call_nothing_is_sent(world: World):
    context = ContextState("id", {})
    context.stop()
    stream = await world.call(context).start()
    assert await read(stream) == []
    assert stream.instance_id is None
    assert world.lane.opened == []
    assert world.in_flight == {}
    assert not context._on_stop
    assert not context._on_kill


async def test_stopped_while_connecting_ends_at_once_and_sends_nothing(world: World):
    context = ContextState("id", {})
    world.lane.hold = asyncio.Event()
    calling = world.call(context).start()
    await world.lane.connecting.wait()
    context.stop()
    assert await read(await asyncio.wait_for(calling, LIMIT_S)) == []
    world.lane.hold.set()
    await asyncio.sleep(0)
    assert world.lane.opened == []
    assert world.in_flight == {}


async def test_cancelled_then_stopped_while_connecting_is_cancelled(world: World):
    context = ContextState("id", {})
    world.lane.hold = asyncio.Event()
    calling = world.call(context).start()
    await world.lane.connecting.wait()
    calling.cancel()
    context.stop()
    assert calling.cancelled()
    assert world.in_flight == {}
    assert world.lane.opened == []


async def test_killed_while_connecting_ends_at_once(world: World):
    context = ContextState("id", {})
    world.lane.hold = asyncio.Event()
    calling = world.call(context).start()
    await world.lane.connecting.wait()
    context.kill()
    await asyncio.wait_for(calling, LIMIT_S)
    assert world.lane.opened == []
    assert world.in_flight == {}


async def test_stopped_before_it_started_the_lane_is_told_and_the_stream_is_empty(
    world: World,
):
    context = ContextState("id", {})
    world.lane.scripts[1] = silent
    calling = world.call(context).start()
    await until(lambda: len(world.lane.opened) == 1)
    context.stop()
    stream = await asyncio.wait_for(calling, LIMIT_S)
    assert world.lane.opened[0].done == ["stop"]
    # It calls home after all: nobody is interested.
    started(world.lane.opened[0])
    world.lane.opened[0].item("late")
    world.lane.opened[0].events.on_lost("closed by the worker")
    assert await read(stream) == []
    assert world.in_flight == {}
    assert world.withdrawn == []


async def test_stopped_in_mid_stream_what_arrived_is_delivered_then_the_end(
    world: World,
):
    context = ContextState("id", {})
    stream, opened = await world.stream(context)
    opened.item("a")
    context.stop()
    context.stop()
    assert opened.done == ["stop"]
    opened.item("b")
    opened.events.on_lost("closed by the worker")
    assert await read(stream) == ["a", "b"]
    assert world.withdrawn == []
    assert world.in_flight == {}


async def test_a_worker_that_ignores_the_stop_is_not_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(egress, "_STOP_LIMIT_S", 0.01)
    context = ContextState("id", {})
    stream, opened = await world.stream(context)
    context.stop()
    assert await asyncio.wait_for(read(stream), LIMIT_S) == []
    assert opened.done == ["stop", "kill"]
    assert world.in_flight == {}


async def test_killing_the_context_kills_the_call(world: World):
    context = ContextState("id", {})
    stream, opened = await world.stream(context)
    opened.item("lost")
    context.kill()
    assert opened.done == ["kill"]
    assert await read(stream) == []
    context.kill()
    assert opened.done == ["kill"]


async def test_killed_while_a_call_waits_for_its_start(world: World):
    context = ContextState("id", {})
    world.lane.scripts[1] = silent
    calling = world.call(context).start()
    await until(lambda: len(world.lane.opened) == 1)
    context.kill()
    stream = await asyncio.wait_for(calling, LIMIT_S)
    assert world.lane.opened[0].done == ["kill"]
    assert await read(stream) == []
    assert world.in_flight == {}


async def test_stopped_in_another_thread(world: World):
    context = ContextState("id", {})
    stream, opened = await world.stream(context)
    await asyncio.to_thread(context.stop)
    await until(lambda: opened.done == ["stop"])
    opened.events.on_ended()
    assert await read(stream) == []


async def test_a_context_forgets_calls_that_ended(world: World):
    context = ContextState("id", {})
    stream, opened = await world.stream(context)
    other, second = await world.stream(context)
    assert context.owner is not None
    assert len(context._on_stop) == len(context._on_kill) == 1
    opened.events.on_ended()
    second.events.on_ended()
    assert context.owner is None
    assert not context._on_stop
    assert not context._on_kill
    context.stop()
    assert opened.done == second.done == []
    assert await read(stream) == await read(other) == []


async def test_refused_after_a_stop_is_no_error(world: World):
    context = ContextState("id", {})

    def refuse(opened: Opened) -> None:
        context.stop()
        opened.events.on_refused(Refused("Unavailable: draining"), inhibits=False)

    world.lane.scripts[1] = refuse
    assert await read(await world.call(context).start()) == []
    assert [one.instance_id for one in world.lane.opened] == [1]


async def test_each_failed_attempt_is_logged_for_the_curious(
    world: World, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG, "dynamo.runtime.egress")
    world.lane.failures[1] = Refused("Unavailable: draining")
    await world.stream()
    assert [one.getMessage() for one in caplog.records] == [
        "call id: Unavailable: draining"
    ]
