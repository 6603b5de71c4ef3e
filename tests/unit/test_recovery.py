"""One outgoing call in trouble: limits in time, other instances, a broken answer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
from memory_lane import Opened, World, silent
from msgspec.structs import replace

from dynamo.runtime._calls import deadlines
from dynamo.runtime._calls.context import ContextState
from dynamo.runtime._calls.deadlines import Limits
from dynamo.runtime._calls.egress import CallOptions
from dynamo.runtime.errors import (
    CallError,
    CallTimeout,
    ConnectionFailed,
    EngineShutdown,
    Overloaded,
    Refused,
    RemoteError,
    StreamBroken,
    StreamError,
    StreamTimeout,
)

LIMIT_S = 5.0
SOON_S = 0.03
TWICE = CallOptions(idempotent=True)


@pytest.fixture(params=[False, True], ids=["connects", "connected"])
async def world(request: pytest.FixtureRequest):
    made = World(stands=request.param)
    await made.open()
    yield made
    made.instances.close()
    await made.health.aclose()
    await made.backend.aclose()
    # Whatever became of the calls.
    assert made.in_flight == {}
    assert not made.deadlines.watched


def whole(seconds: float) -> CallOptions:
    return CallOptions(Limits(time.monotonic() + seconds, "timeout", seconds))


async def read(stream: Any) -> list[Any]:
    return [item async for item in stream]


async def failure(awaited: Any, kind: type[CallError]) -> Any:
    with pytest.raises(kind) as caught:
        await asyncio.wait_for(awaited, LIMIT_S)
    assert type(caught.value) is kind
    return caught.value


async def until(condition: Callable[[], object]) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(poll(), LIMIT_S)


def facts(error: CallError) -> tuple[Any, ...]:
    return error.facts["limit"], error.facts["items"], error.phase, error.instance_id


# ------------------------------------------------------------------ limits in time


async def test_a_call_that_nobody_acknowledges_ends_at_its_limit(world: World):
    world.lane.scripts[1] = silent
    error = await failure(world.call(options=whole(SOON_S)).start(), CallTimeout)
    assert facts(error) == ("timeout", 0, "ack", 1)
    assert world.lane.opened[0].done == ["kill"]


async def test_a_call_that_is_taken_and_does_not_start_ends_at_its_limit(world: World):
    world.lane.scripts[1] = lambda opened: opened.events.on_reached()
    error = await failure(world.call(options=whole(SOON_S)).start(), CallTimeout)
    assert facts(error) == ("timeout", 0, "start", 1)
    assert world.lane.opened[0].done == ["kill"]


async def test_a_connection_that_does_not_come_to_stand_ends_at_the_limit():
    world = World()
    await world.open()
    world.lane.hold = asyncio.Event()
    error = await failure(world.call(options=whole(SOON_S)).start(), CallTimeout)
    assert facts(error) == ("timeout", 0, "connect", 1)
    assert world.lane.opened == []
    assert world.in_flight == {}
    world.instances.close()
    await world.health.aclose()
    await world.backend.aclose()


@pytest.mark.parametrize("left_s", [0, 0.0005])
async def test_nothing_is_sent_when_nothing_is_left(world: World, left_s: float):
    error = await failure(world.call(options=whole(left_s)).start(), CallTimeout)
    assert facts(error) == ("timeout", 0, "choose", None)
    assert error.attempts == 0
    assert world.lane.opened == []


async def test_no_second_attempt_is_made_when_nothing_is_left(world: World):
    refused: list[float] = []

    def refuse_late(opened: Opened) -> None:
        while time.monotonic() < call._options.limits.deadline:
            pass
        refused.append(time.monotonic())
        opened.events.on_refused(Refused("Unavailable: draining"), inhibits=False)

    world.lane.scripts[1] = refuse_late
    call = world.call(options=whole(SOON_S))
    error = await failure(call.start(), CallTimeout)
    assert error.facts["limit"] == "timeout"
    assert error.attempts == 1
    assert len(refused) == len(world.lane.opened) == 1


async def test_a_handler_that_starts_too_late_is_not_waited_for(world: World):
    def start_late(opened: Opened) -> None:
        while time.monotonic() < call._options.limits.deadline:
            pass
        opened.events.on_started()

    world.lane.scripts[1] = start_late
    limits = whole(SOON_S).limits
    call = world.call(options=CallOptions(replace(limits, idle_s=60.0)))
    error = await failure(call.start(), CallTimeout)
    assert error.facts["limit"] == "timeout"
    assert world.lane.opened[0].done == ["kill"]


async def test_items_that_came_in_time_are_read_and_then_the_error(world: World):
    stream, opened = await world.stream(options=whole(SOON_S))
    opened.item("a")
    opened.item("b")
    await until(lambda: opened.done == ["kill"])
    assert [await anext(stream), await anext(stream)] == ["a", "b"]
    error = await failure(anext(stream), StreamTimeout)
    assert facts(error) == ("timeout", 2, "stream", 1)
    assert await read(stream) == []


@pytest.mark.parametrize(
    ("left_s", "error", "kind"),
    [
        (30, TimeoutError("late"), StreamTimeout),
        (3600, TimeoutError("late"), RemoteError),
        (30, RuntimeError("boom"), RemoteError),
    ],
)
async def test_a_handler_that_saw_the_deadline_first_is_not_blamed(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    left_s: float,
    error: Exception,
    kind: type[CallError],
):
    # A moment that no busy machine is late for.
    monkeypatch.setattr(deadlines, "_SAME_MOMENT_S", 60.0)
    stream, opened = await world.stream(options=whole(left_s))
    opened.fail(error)
    raised = await failure(anext(stream), kind)
    assert ("limit" in raised.facts) is (kind is StreamTimeout)


async def test_the_first_item_has_a_limit_of_its_own(world: World):
    options = CallOptions(Limits(first_item_s=SOON_S))
    stream, opened = await world.stream(options=options)
    error = await failure(anext(stream), StreamTimeout)
    assert facts(error) == ("first_item_timeout", 0, "stream", 1)
    assert opened.done == ["kill"]


@pytest.mark.parametrize(
    ("limits", "items"),
    [(Limits(idle_s=SOON_S), 1), (Limits(first_item_s=SOON_S), 0)],
    ids=["idle", "first item"],
)
async def test_a_worker_that_lets_its_callers_wait_is_left_out(
    world: World, limits: Limits, items: int
):
    for _ in range(3):
        assert world.usable == [1, 2]
        stream, opened = await world.stream(options=CallOptions(limits))
        for _ in range(items):
            opened.item("a")
            assert await anext(stream) == "a"
        error = await failure(anext(stream), StreamTimeout)
        assert error.facts["items"] == items
        assert opened.done == ["kill"]
    assert world.usable == [2]


async def test_a_limit_of_the_whole_call_is_no_fault_of_its_instance(world: World):
    for _ in range(3):
        stream, _ = await world.stream(options=whole(SOON_S))
        await failure(anext(stream), StreamTimeout)
    assert world.usable == [1, 2]


async def test_a_reader_that_is_behind_is_no_idle_worker(world: World):
    stream, opened = await world.stream(options=CallOptions(Limits(idle_s=SOON_S)))
    for number in range(100):
        opened.item(number)
    assert opened.done == ["pause"]
    # So long does another call take to reach its limit.
    world.lane.scripts[1] = silent
    await failure(world.call(options=whole(3 * SOON_S)).start(), CallTimeout)
    assert opened.done == ["pause"]
    for _ in range(100):
        await anext(stream)
    await failure(anext(stream), StreamTimeout)
    assert opened.done == ["pause", "resume", "kill"]


async def test_a_stopped_call_that_does_not_end_ends_without_error(world: World):
    context = ContextState("id", {})
    stream, opened = await world.stream(context, options=whole(SOON_S))
    context.stop()
    assert await asyncio.wait_for(read(stream), LIMIT_S) == []
    assert opened.done == ["stop", "kill"]


async def test_a_call_that_ends_in_time_is_watched_no_more(world: World):
    stream, opened = await world.stream(options=whole(60))
    assert world.deadlines.watched
    opened.events.on_ended()
    assert not world.deadlines.watched
    assert await read(stream) == []


async def test_a_context_that_is_stopped_before_the_call_sends_nothing(world: World):
    context = ContextState("id", {})
    context.stop()
    stream = await world.call(context, options=whole(60)).start()
    assert await read(stream) == []
    assert world.lane.opened == []


# ------------------------------------------------------------------ other instances


LOST: list[tuple[str, Callable[[Opened], None]]] = [
    ("lost", lambda opened: opened.events.on_lost("gone")),
    (
        "unacknowledged",
        lambda opened: opened.events.on_refused(
            CallTimeout("DeadlineExceeded: no ack"), inhibits=True
        ),
    ),
    (
        "cut",
        lambda opened: opened.events.on_refused(
            ConnectionFailed("Unavailable: cut", phase="ack", retryable=False),
            inhibits=True,
        ),
    ),
]


@pytest.mark.parametrize(("name", "script"), LOST, ids=[name for name, _ in LOST])
async def test_what_may_have_run_is_sent_again_only_if_it_may_run_twice(
    world: World, name: str, script: Callable[[Opened], None]
):
    world.lane.scripts[1] = script
    error: CallError
    with pytest.raises(CallError) as caught:
        await world.call().start()
    error = caught.value
    assert (error.attempts, error.instance_id) == (1, 1)
    assert "tried" not in error.facts
    stream, opened = await world.stream(options=TWICE)
    assert opened.instance_id == 2
    # The abandoned one is told, should it wake up.
    assert world.lane.opened[1].done == ["kill"]
    opened.events.on_ended()
    assert await read(stream) == []


async def test_a_stream_that_breaks_before_its_first_item_begins_elsewhere(
    world: World,
):
    stream, opened = await world.stream(options=TWICE)
    opened.events.on_lost("gone")
    await until(lambda: len(world.lane.opened) == 2)
    opened = world.lane.opened[-1]
    assert stream.instance_id == opened.instance_id == 2
    assert world.in_flight == {2: 1}
    opened.item("a")
    opened.events.on_ended()
    assert await read(stream) == ["a"]


async def test_it_does_not_after_its_first_item(world: World):
    stream, opened = await world.stream(options=TWICE)
    opened.item("a")
    opened.events.on_lost("gone")
    assert await anext(stream) == "a"
    await failure(anext(stream), StreamBroken)
    assert len(world.lane.opened) == 1


@pytest.mark.parametrize("error", [RuntimeError("boom"), EngineShutdown("down")])
async def test_an_error_of_a_handler_is_never_sent_elsewhere(
    world: World, error: Exception
):
    stream, opened = await world.stream(options=TWICE)
    opened.fail(error)
    assert isinstance(await failure(anext(stream), RemoteError), StreamError)
    assert len(world.lane.opened) == 1


async def test_one_who_names_the_instance_stays_with_it(world: World):
    stream, opened = await world.stream(options=TWICE, fixed=True)
    opened.events.on_lost("gone")
    await failure(anext(stream), StreamBroken)
    assert len(world.lane.opened) == 1


async def test_the_error_tells_of_every_attempt(world: World):
    world.lane.failures = {
        1: ConnectionFailed("Unavailable: one"),
        2: Overloaded("CapacityExhausted: two", retry_after=1.0),
    }
    with pytest.raises(Overloaded) as caught:
        await world.call().start()
    assert caught.value.attempts == 2
    assert caught.value.facts["tried"] == [
        (1, "Unavailable: one"),
        (2, "CapacityExhausted: two"),
    ]


async def test_moves_beyond_the_first_draw_on_the_budget(world: World):
    while world.budget.take(world.loop.time()):
        pass
    world.budget._at = math.inf  # no time passes
    world.lane.failures[1] = Refused("Unavailable: one")
    stream, opened = await world.stream()
    # The first move was free.
    assert opened.instance_id == 2
    opened.events.on_ended()
    assert await read(stream) == []
    world.lane.failures[2] = Refused("Unavailable: two")
    with pytest.raises(Refused, match="two") as caught:
        await world.call().start()
    assert caught.value.facts["retry_budget"] == "spent"


# ------------------------------------------------------------------ a broken answer


class Asked:
    """What `on_stream_lost` was told, and what it answers."""

    def __init__(self, *answers: Any) -> None:
        self.told: list[tuple[int, str]] = []
        self.answers = list(answers)
        self.options = CallOptions(on_stream_lost=self)

    def __call__(self, items: int, error: StreamError) -> Any:
        self.told.append((items, type(error).__name__))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


async def test_a_broken_answer_is_continued_elsewhere(world: World):
    asked = Asked({"after": 2})
    stream, first = await world.stream(options=asked.options)
    first.item("a")
    first.item("b")
    first.events.on_lost("gone")
    reading = asyncio.create_task(read(stream))
    await until(lambda: len(world.lane.opened) == 2)
    assert asked.told == [(2, "StreamBroken")]
    second = world.lane.opened[-1]
    assert second.request.value == {"after": 2}
    assert second.request.packed == b"\x81\xa5after\x02"
    assert stream.instance_id == 2
    second.item("c")
    second.events.on_ended()
    assert await asyncio.wait_for(reading, LIMIT_S) == ["a", "b", "c"]


async def test_nobody_is_asked_before_all_that_came_was_read(world: World):
    asked = Asked("go on")
    stream, first = await world.stream(options=asked.options)
    first.item("a")
    first.item("b")
    first.events.on_lost("gone")
    assert await anext(stream) == "a"
    assert await anext(stream) == "b"
    for _ in range(10):
        await asyncio.sleep(0)
    # Whoever has "b" may still be about to write it down.
    assert asked.told == []
    last = stream.__anext__()
    await until(lambda: len(world.lane.opened) == 2)
    assert asked.told == [(2, "StreamBroken")]
    world.lane.opened[-1].item("c")
    assert await asyncio.wait_for(last, LIMIT_S) == "c"
    world.lane.opened[-1].events.on_ended()
    assert await read(stream) == []


@pytest.mark.parametrize(
    ("breaks", "kind"),
    [
        (lambda opened: opened.events.on_lost("gone"), "StreamBroken"),
        (lambda opened: opened.fail(EngineShutdown("down")), "RemoteError"),
        (lambda opened: None, "StreamTimeout"),
    ],
    ids=["lost", "going down", "idle"],
)
async def test_it_is_asked_for_what_is_worth_another_worker(
    world: World, breaks: Callable[[Opened], None], kind: str
):
    asked = Asked(None)
    options = replace(asked.options, limits=Limits(idle_s=SOON_S))
    stream, opened = await world.stream(options=options)
    opened.item("a")
    breaks(opened)
    assert await anext(stream) == "a"
    with pytest.raises(StreamError) as caught:
        await asyncio.wait_for(anext(stream), LIMIT_S)
    assert asked.told == [(1, kind)]
    assert type(caught.value).__name__ == kind
    assert len(world.lane.opened) == 1


async def test_an_ordinary_error_is_not_asked_about(world: World):
    asked = Asked()
    stream, opened = await world.stream(options=asked.options)
    opened.fail(RuntimeError("boom"))
    await failure(anext(stream), RemoteError)
    assert asked.told == []


@pytest.mark.parametrize("answer", [LookupError("no"), object()])
async def test_what_the_caller_does_wrong_is_raised_to_the_reader(
    world: World, answer: object
):
    asked = Asked(answer)
    stream, opened = await world.stream(options=asked.options)
    opened.events.on_lost("gone")
    with pytest.raises((LookupError, TypeError)):
        await asyncio.wait_for(anext(stream), LIMIT_S)
    assert await read(stream) == []


class Odd(BaseException):
    """Neither an error nor the end of anything."""


@pytest.mark.parametrize(
    "raised",
    [StopIteration(), StopAsyncIteration(), asyncio.CancelledError(), Odd()],
    ids=repr,
)
async def test_what_no_stream_can_raise_neither_ends_it_nor_leaves_it_open(
    world: World, raised: BaseException
):
    asked = Asked(raised)
    stream, opened = await world.stream(options=asked.options)
    opened.events.on_lost("gone")
    with pytest.raises(RuntimeError, match="on_stream_lost raised ") as caught:
        await asyncio.wait_for(anext(stream), LIMIT_S)
    assert caught.value.__cause__ is raised
    assert await read(stream) == []


async def test_an_error_of_the_caller_does_not_hide_that_the_stream_broke(world: World):
    asked = Asked(LookupError("no"))
    stream, opened = await world.stream(options=asked.options)
    opened.events.on_lost("gone")
    error = await failure(anext(stream), LookupError)
    assert isinstance(error.__context__, StreamBroken)


async def test_a_continuation_must_be_there_at_once(world: World):
    async def later() -> str:
        return "go on"

    asked = Asked(later())
    stream, opened = await world.stream(options=asked.options)
    opened.events.on_lost("gone")
    error = await failure(anext(stream), TypeError)
    assert "returned a coroutine: it must return the request itself" in str(error)


async def test_where_nobody_is_left_the_first_error_is_raised(world: World):
    asked = Asked("go on")
    world.lane.failures[2] = ConnectionFailed("Unavailable: two")
    stream, opened = await world.stream(options=asked.options)
    opened.item("a")
    opened.events.on_lost("gone")
    assert await anext(stream) == "a"
    error = await failure(anext(stream), StreamBroken)
    assert str(error) == "Unavailable: gone"
    assert error.attempts == 2
    assert error.facts["tried"] == [(1, "Unavailable: gone"), (2, "Unavailable: two")]


async def test_a_continuation_that_is_lost_before_it_starts_moves_on(world: World):
    await world.add(3)
    asked = Asked("go on")
    world.lane.scripts[2] = lambda opened: opened.events.on_lost("gone too")
    stream, opened = await world.stream(options=asked.options)
    opened.events.on_lost("gone")
    reading = asyncio.create_task(read(stream))
    await until(lambda: len(world.lane.opened) == 3)
    third = world.lane.opened[-1]
    assert third.instance_id == 3
    third.events.on_ended()
    assert await asyncio.wait_for(reading, LIMIT_S) == []
    assert len(asked.told) == 1


async def test_it_may_break_again(world: World):
    asked = Asked("second", "third")
    stream, opened = await world.stream(options=asked.options)
    reading = asyncio.create_task(read(stream))
    for number in (1, 2):
        opened.item(number)
        opened.events.on_lost("gone")
        await until(lambda: len(world.lane.opened) == number + 1)  # noqa: B023
        opened = world.lane.opened[-1]
    assert [one.instance_id for one in world.lane.opened] == [1, 2, 1]
    opened.item(3)
    opened.events.on_ended()
    assert await asyncio.wait_for(reading, LIMIT_S) == [1, 2, 3]
    assert asked.told == [(1, "StreamBroken"), (2, "StreamBroken")]


@pytest.mark.parametrize("way", ["cancel", "drop", "stop"])
async def test_a_broken_answer_that_nobody_wants_any_more_ends(world: World, way: str):
    asked = Asked("go on")
    context = ContextState("id", {})
    stream, opened = await world.stream(context, options=asked.options)
    opened.item("a")
    opened.events.on_lost("gone")
    if way == "cancel":
        stream.cancel()
    elif way == "stop":
        context.stop()
        assert await read(stream) == ["a"]
    del stream
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert asked.told == []
    assert world.in_flight == {}
    assert context._on_stop == {}


async def test_the_limit_of_the_whole_call_holds_for_all_attempts(world: World):
    asked = Asked("go on")
    world.lane.scripts[2] = silent
    # Not so soon that a busy machine has not come to the second one by then.
    options = replace(asked.options, limits=whole(10 * SOON_S).limits)
    stream, opened = await world.stream(options=options)
    opened.item("a")
    opened.events.on_lost("gone")
    assert await anext(stream) == "a"
    error = await failure(anext(stream), StreamTimeout)
    assert facts(error) == ("timeout", 1, "stream", 2)
    assert error.attempts == 2
    assert world.lane.opened[-1].done == ["kill"]


async def test_the_idle_limit_begins_anew_with_the_next_worker(world: World):
    asked = Asked("go on", None)
    options = replace(asked.options, limits=Limits(idle_s=SOON_S))
    stream, opened = await world.stream(options=options)
    opened.item("a")
    assert await anext(stream) == "a"
    error = await failure(anext(stream), StreamTimeout)
    assert [one.instance_id for one in world.lane.opened] == [1, 2]
    assert error.facts["limit"] == "idle_timeout"
    assert [one.done for one in world.lane.opened] == [["kill"], ["kill"]]
