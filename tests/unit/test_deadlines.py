"""Limits of calls: when somebody looks, and which limit is the one that passed."""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from typing import Any

import pytest

from dynamo.runtime._calls.context import Context
from dynamo.runtime._calls.deadlines import (
    NO_LIMITS,
    CallClock,
    Deadlines,
    DefaultLimits,
    Limits,
    inherited,
    seconds_of,
    timed_out,
)
from dynamo.runtime.errors import CallTimeout, StreamTimeout

LIMIT_S = 5.0


class Thing:
    """Something with a limit that notes when it was looked at."""

    def __init__(self, due_in_s: float) -> None:
        self.due_at = time.monotonic() + due_in_s
        self.was_due_at = self.due_at
        self.looked_at: list[float] = []
        self.seen = asyncio.Event()

    def look(self, now: float) -> None:
        self.looked_at.append(now)
        self.due_at = math.inf
        self.seen.set()


@pytest.fixture
async def deadlines():
    return Deadlines(asyncio.get_running_loop())


async def seen(*things: Thing) -> None:
    for thing in things:
        await asyncio.wait_for(thing.seen.wait(), LIMIT_S)


# ------------------------------------------------------------------- one timer for all


async def test_each_is_looked_at_when_it_is_due_and_not_before(deadlines: Deadlines):
    things = [Thing(due_in_s) for due_in_s in (0.06, 0.02, 0.04, 0.0, -1.0)]
    for thing in things:
        deadlines.watch(thing)
    await seen(*things)
    for thing in things:
        (looked_at,) = thing.looked_at
        assert looked_at >= thing.was_due_at - 0.002


async def test_an_earlier_one_moves_the_timer(deadlines: Deadlines):
    later, sooner = Thing(60), Thing(0.01)
    deadlines.watch(later)
    deadlines.watch(sooner)
    await seen(sooner)
    assert later.looked_at == []
    later.due_at = time.monotonic()
    deadlines.watch(later)
    await seen(later)


async def test_what_was_forgotten_is_not_looked_at(deadlines: Deadlines):
    gone, other = Thing(0.01), Thing(0.02)
    deadlines.watch(gone)
    deadlines.watch(other)
    deadlines.watched.discard(gone)
    await seen(other)
    assert gone.looked_at == []


async def test_one_that_another_ended_is_not_looked_at(deadlines: Deadlines):
    things = [Thing(0.0), Thing(0.0)]
    for thing in things:
        deadlines.watch(thing)

        def look(now: float, thing: Thing = thing) -> None:
            for one in things:
                deadlines.watched.discard(one)
            thing.seen.set()

        thing.look = look  # type: ignore[method-assign]
    end = Thing(0.03)
    deadlines.watch(end)
    await seen(end)
    assert sum(thing.seen.is_set() for thing in things) == 1


class CountedTimers:
    """A loop that counts the timers it sets."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.count = 0

    def call_later(self, *args: Any) -> asyncio.TimerHandle:
        self.count += 1
        return self._loop.call_later(*args)


async def test_calls_that_end_in_time_share_one_timer():
    loop = CountedTimers(asyncio.get_running_loop())
    deadlines = Deadlines(loop)  # type: ignore[arg-type]
    first = Thing(60)
    deadlines.watch(first)
    for _ in range(1000):
        thing = Thing(60)
        deadlines.watch(thing)
        deadlines.watched.discard(thing)
    assert loop.count == 1


async def test_many_limits_in_a_row_are_looked_at_a_few_at_a_time():
    loop = CountedTimers(asyncio.get_running_loop())
    deadlines = Deadlines(loop)  # type: ignore[arg-type]
    things = [Thing(0.05 + number / 20_000) for number in range(1000)]
    for thing in things:
        deadlines.watch(thing)
    await seen(*things)
    assert loop.count <= 60


async def test_nothing_is_kept_after_the_last_one_went():
    deadlines = Deadlines(asyncio.get_running_loop())
    thing = Thing(60)
    deadlines.watch(thing)
    deadlines.watched.discard(thing)
    gone = [weakref.ref(deadlines), weakref.ref(thing)]
    del deadlines, thing
    assert [one() for one in gone] == [None, None]


async def test_calls_one_after_the_other_need_no_timer_each():
    loop = CountedTimers(asyncio.get_running_loop())
    deadlines = Deadlines(loop)  # type: ignore[arg-type]
    for _ in range(100):
        thing = Thing(60)
        deadlines.watch(thing)
        deadlines.watched.discard(thing)
    assert loop.count == 1
    thing = Thing(0.02)
    deadlines.watch(thing)
    await seen(thing)


@pytest.mark.may_block
async def test_a_loop_that_stood_still_reads_before_it_judges(deadlines: Deadlines):
    loop = asyncio.get_running_loop()
    ours, theirs = await loop.run_in_executor(None, _pair)
    arrived: list[float] = []

    def answer() -> None:
        ours.send(ours.recv(1))

    def note() -> None:
        theirs.recv(1)
        arrived.append(time.monotonic())

    # What is read at once leads to more: a single turn of the loop is not enough.
    loop.add_reader(ours, answer)
    loop.add_reader(theirs, note)
    try:
        thing = Thing(0.05)
        deadlines.watch(thing)
        await asyncio.sleep(0)
        theirs.send(b"x")
        time.sleep(0.2)
        await seen(thing)
        assert arrived
        assert arrived[0] <= thing.looked_at[0]
    finally:
        loop.remove_reader(ours)
        loop.remove_reader(theirs)
        ours.close()
        theirs.close()


def _pair() -> tuple[Any, Any]:
    import socket

    pair = socket.socketpair()
    for one in pair:
        one.setblocking(False)
    return pair


# ------------------------------------------------------------------- one call


class Played:
    """A call whose time a test plays; no loop is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limits: Limits) -> None:
        self.now = 1000.0
        self.passed: list[tuple[str, float]] = []
        self.watched = set[CallClock]()
        monkeypatch.setattr(
            "dynamo.runtime._calls.deadlines.time.monotonic", lambda: self.now
        )
        self.clock = CallClock(self, limits, self._expired)  # type: ignore[arg-type]

    def watch(self, one: CallClock) -> None:
        self.watched.add(one)

    def _expired(self, limit: str, seconds: float) -> None:
        self.passed.append((limit, seconds))

    def at(self, moment: float) -> str | None:
        """What has passed by then, if anything; looks as `Deadlines` would."""
        self.now = 1000.0 + moment
        if self.clock.due_at <= self.now:
            self.clock.look(self.now)
        return self.passed[-1][0] if self.passed else None


def test_the_whole_call(monkeypatch: pytest.MonkeyPatch):
    call = Played(monkeypatch, Limits(1010.0, "timeout", 10.0))
    call.clock.started()
    call.clock.item()
    assert call.at(9.9) is None
    assert call.at(10.1) == "timeout"
    assert call.passed == [("timeout", 10.0)]


def test_the_first_item_counts_from_the_call_and_the_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
):
    call = Played(monkeypatch, Limits(first_item_s=2.0))
    call.at(1.9)
    call.clock.started()
    call.clock.item()
    assert call.at(100) is None
    call = Played(monkeypatch, Limits(first_item_s=2.0))
    call.at(1.9)
    call.clock.started()
    assert call.at(2.1) == "first_item_timeout"


def test_idle_counts_from_the_last_item(monkeypatch: pytest.MonkeyPatch):
    call = Played(monkeypatch, Limits(idle_s=2.0))
    assert call.at(50) is None
    call.clock.started()
    for moment in (51.9, 53.8, 55.7):
        assert call.at(moment) is None
        call.clock.item()
    assert call.at(57.6) is None
    assert call.at(57.8) == "idle_timeout"


def test_idle_counts_before_the_first_item_unless_that_has_a_limit(
    monkeypatch: pytest.MonkeyPatch,
):
    call = Played(monkeypatch, Limits(idle_s=2.0))
    call.clock.started()
    assert call.at(2.1) == "idle_timeout"
    call = Played(monkeypatch, Limits(idle_s=2.0, first_item_s=10.0))
    call.clock.started()
    assert call.at(9.9) is None
    call.clock.item()
    assert call.at(11.8) is None
    assert call.at(12.0) == "idle_timeout"


def test_a_reader_that_is_behind_is_no_idle_worker(monkeypatch: pytest.MonkeyPatch):
    call = Played(monkeypatch, Limits(idle_s=2.0))
    call.clock.started()
    call.clock.item()
    call.clock.reader_behind(True)
    # On its way when the lane was asked to pause.
    call.clock.item()
    assert call.at(60) is None
    call.clock.reader_behind(False)
    assert call.at(61.9) is None
    assert call.at(62.1) == "idle_timeout"


def test_the_whole_call_counts_on_while_another_worker_continues(
    monkeypatch: pytest.MonkeyPatch,
):
    limits = Limits(deadline=1003.0, timeout_s=3.0, idle_s=2.0)
    call = Played(monkeypatch, limits)
    call.clock.started()
    assert call.at(2.1) == "idle_timeout"
    call.watched.clear()
    call.clock.detached()
    assert call.watched, "the deadline is earlier than what was due"
    call.clock.check()
    call.clock.started()
    # The next idle moment, 4.1, comes after the deadline.
    assert call.clock.due_at == 1003.0
    assert call.at(3.1) == "timeout"


def test_who_continues_meets_a_reader_that_is_not_behind(
    monkeypatch: pytest.MonkeyPatch,
):
    call = Played(monkeypatch, Limits(idle_s=2.0))
    call.clock.started()
    call.clock.reader_behind(True)
    call.clock.detached()
    call.clock.started()
    assert call.at(2.1) == "idle_timeout"


def test_a_call_that_is_over_is_watched_no_more(monkeypatch: pytest.MonkeyPatch):
    call = Played(monkeypatch, Limits(1001.0, "timeout", 1.0))
    assert call.watched == {call.clock}
    call.clock.stop()
    assert not call.watched


# ------------------------------------------------------------------- numbers and texts


def test_the_earlier_of_timeout_and_deadline_holds():
    now = time.monotonic()
    none = DefaultLimits(math.inf, math.inf, math.inf)
    assert none.of_call(1, None, None, now + 60).deadline_name == "timeout"
    limits = none.of_call(60, None, None, now + 1)
    assert (limits.deadline, limits.deadline_name) == (now + 1, "deadline")
    assert none.of_call(math.inf, 1, 2, None) == Limits(first_item_s=1, idle_s=2)
    assert none.of_call(None, None, None, None) is NO_LIMITS


def test_what_a_call_does_not_name_is_as_configured():
    defaults = DefaultLimits(60.0, 20.0, math.inf)
    limits = defaults.of_call(None, None, 5, None)
    assert limits == Limits(limits.deadline, "timeout", 60.0, 20.0, 5.0)
    assert defaults.of_call(math.inf, math.inf, None, None) == Limits()


def test_more_seconds_than_there_are_floats_are_no_limit():
    assert seconds_of("timeout", 10**400) == math.inf


@pytest.mark.parametrize("value", ["1", None, True, [1]])
def test_seconds_are_a_number(value: Any):
    with pytest.raises(TypeError, match=r"argument 'timeout': expected a number"):
        seconds_of("timeout", value)


@pytest.mark.parametrize("value", [-1, -0.001, math.nan, -math.inf])
def test_seconds_are_not_negative(value: float):
    with pytest.raises(ValueError, match=r"argument 'timeout': .*0 or more"):
        seconds_of("timeout", value)


def test_an_error_says_which_limit_how_far_and_who():
    error = timed_out("timeout", 1.5, phase="ack", items=0, instance_id=31)
    assert type(error) is CallTimeout
    assert isinstance(error, TimeoutError)
    assert str(error) == (
        "DeadlineExceeded: the call did not end in time (timeout 1.5 s; phase ack, "
        "items 0, instance 1f)"
    )
    assert (error.phase, error.instance_id) == ("ack", 31)
    assert error.facts == {"limit": "timeout", "seconds": 1.5, "items": 0}
    assert not error.retryable
    error = timed_out("idle_timeout", 2, phase="stream", items=3, instance_id=None)
    assert type(error) is StreamTimeout
    assert isinstance(error, TimeoutError)
    assert isinstance(error, ValueError)
    assert str(error).startswith(
        "DeadlineExceeded: backend response inactivity timeout (idle_timeout 2 s;"
    )
    assert error.error_class == "DeadlineExceeded"


# ------------------------------------------------------------------- in contexts


def test_a_context_has_the_deadline_it_was_given():
    before = time.monotonic()
    deadline = Context(timeout=2).deadline
    assert deadline is not None
    assert before + 2 <= deadline <= time.monotonic() + 2
    assert Context().deadline is None
    assert Context(timeout=math.inf).deadline is None
    assert Context("a").detached("b").deadline is None


def test_a_context_made_in_a_handler_ends_no_later_than_the_handler():
    soon = time.monotonic() + 1
    token = inherited.set(soon)
    try:
        assert Context().deadline == soon
        assert Context(timeout=60).deadline == soon
        assert Context(timeout=math.inf).deadline == soon
        sooner = Context(timeout=0.5).deadline
        assert sooner is not None
        assert sooner < soon
        assert Context().detached("other").deadline is None
    finally:
        inherited.reset(token)


@pytest.mark.parametrize("value", [-1, math.nan])
def test_a_context_takes_no_negative_time(value: float):
    with pytest.raises(ValueError, match="argument 'timeout'"):
        Context(timeout=value)
