"""When calls must have ended: their limits, and one timer for all that have some.

Owns the moment at which somebody looks.  What then becomes of a call is for its owner;
calls without limits never come here.  All times are those of `time.monotonic`.
"""

from __future__ import annotations

import contextvars
import math
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from dynamo.runtime.errors import CallError, CallTimeout, StreamTimeout

if TYPE_CHECKING:
    import asyncio

inherited: contextvars.ContextVar[float | None] = contextvars.ContextVar(
    "dynamo_deadline", default=None
)
"""The deadline of the handler that is running, for the calls that it makes."""

# Limits that pass within this time are looked at together.
_PAUSE_S = 0.002
# Timers may come early by the resolution of the loop's clock.
_EARLY_S = 0.001
_SAME_MOMENT_S = 0.05
# A loop that is later than this for an appointment stood still: what came meanwhile is
# read first.
_STOOD_STILL_S = 0.05
_READING_S = 0.005


class Watched(Protocol):
    """Something with a limit."""

    due_at: float
    """When to look at it next; infinity for never."""

    def look(self, now: float) -> None:
        """The moment has come: end it, or set a later ``due_at``."""


class Deadlines:
    """Looks at what is due, with one timer for the earliest.

    Most of what is watched ends long before it is due.  So the timer is only ever set
    for an earlier moment, and finds the next one when it comes, also if nothing is left
    meanwhile: watching and forgetting cost next to nothing.  It holds us weakly.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.watched: set[Watched] = set()
        """Whatever needs no look any more is taken off."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._looked_at = -math.inf

    def watch(self, one: Watched) -> None:
        """Look at it when it is due; call again when ``due_at`` has become earlier."""
        self.watched.add(one)
        if one.due_at < self._timer_at:
            self._set_timer(one.due_at)

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        at = max(at, self._looked_at + _PAUSE_S)
        delay_s = max(0.0, at - time.monotonic())
        self._timer = self._loop.call_later(delay_s, _wake, weakref.ref(self))
        self._timer_at = at

    def on_timer(self) -> None:
        """The moment for which the timer was set."""
        if time.monotonic() - self._timer_at > _STOOD_STILL_S:
            self._timer = self._loop.call_later(_READING_S, self._look)
        else:
            self._look()

    def _look(self) -> None:
        self._timer = None
        self._timer_at = math.inf
        self._looked_at = now = time.monotonic()
        due = [one for one in self.watched if one.due_at <= now + _EARLY_S]
        for one in due:
            # Looking at one may have ended another.
            if one in self.watched:
                one.look(now)
        next_at = min((one.due_at for one in self.watched), default=math.inf)
        if next_at < self._timer_at:
            self._set_timer(next_at)


def _wake(sleeping: weakref.ref[Deadlines]) -> None:
    deadlines = sleeping()
    if deadlines is not None:
        deadlines.on_timer()


def seconds_of(name: str, value: float) -> float:
    """A number of seconds that a caller gave; infinity is allowed.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative, or not a number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"argument '{name}': expected a number of seconds, not "
            f"{type(value).__name__}"
        )
    if not value >= 0:
        raise ValueError(
            f"argument '{name}': {value!r}: expected a number of seconds, 0 or more"
        )
    try:
        return float(value)
    except OverflowError:
        return math.inf  # an int beyond all floats


class Limits(msgspec.Struct, frozen=True, gc=False):
    """How long a call may take; infinity is no limit.

    Attributes:
        deadline: When it must have ended.
        deadline_name: Where that comes from: ``timeout``, or ``deadline`` for that of a
            context or of the handler that makes the call.
        timeout_s: How long that was from the beginning.
        first_item_s: From the beginning to the first item.
        idle_s: Without an item while the reader has room for one.
    """

    deadline: float = math.inf
    deadline_name: str = "timeout"
    timeout_s: float = math.inf
    first_item_s: float = math.inf
    idle_s: float = math.inf

    @property
    def spent(self) -> bool:
        """Whether there is no time at all, or less than a lane can tell its worker."""
        # Whoever was told of a deadline by a timer may come before it.
        return self.timeout_s <= _EARLY_S or self.first_item_s <= 0


NO_LIMITS = Limits()


class DefaultLimits:
    """The limits of calls that name none of their own.

    Args:
        timeout_s: For a whole call; infinity is no limit, as for the others.
        first_item_s: To the first item.
        idle_s: Between items.
    """

    __slots__ = ("_first_item_s", "_idle_s", "_none", "_timeout_s")

    def __init__(self, timeout_s: float, first_item_s: float, idle_s: float) -> None:
        self._timeout_s = timeout_s
        self._first_item_s = first_item_s
        self._idle_s = idle_s
        self._none = timeout_s == first_item_s == idle_s == math.inf

    def of_call(
        self,
        timeout: float | None,
        first_item_timeout: float | None,
        idle_timeout: float | None,
        deadline: float | None,
    ) -> Limits:
        """The limits of a call that begins now; `NO_LIMITS` if it has none.

        Args:
            timeout: What the caller gave, or None, as for the others.
            first_item_timeout: To the first item.
            idle_timeout: Between items.
            deadline: That of the context, or of the running handler.

        Raises:
            TypeError: one of them is no number.
            ValueError: one of them is negative, or not a number.
        """
        nothing = (
            timeout is None and first_item_timeout is None and idle_timeout is None
        )
        if nothing and deadline is None and self._none:
            return NO_LIMITS
        timeout_s, first_item_s, idle_s = (
            self._timeout_s,
            self._first_item_s,
            self._idle_s,
        )
        if timeout is not None:
            timeout_s = seconds_of("timeout", timeout)
        if first_item_timeout is not None:
            first_item_s = seconds_of("first_item_timeout", first_item_timeout)
        if idle_timeout is not None:
            idle_s = seconds_of("idle_timeout", idle_timeout)
        now = time.monotonic()
        if deadline is not None and deadline <= now + timeout_s:
            left_s = deadline - now
            return Limits(deadline, "deadline", left_s, first_item_s, idle_s)
        return Limits(now + timeout_s, "timeout", timeout_s, first_item_s, idle_s)


class CallClock:
    """Watches the limits of one call and says which one has passed.

    The limit to the first item counts from the making of the call.  The idle limit
    counts from the start of the handler or the last item, not while the reader is
    behind, and before the first item only if that has no limit of its own.

    Args:
        deadlines: Who looks.
        limits: At least one of them finite.
        expired: Called once, with the name of the limit and its seconds.

    Attributes:
        minds_items: Whether `item` has anything to do.
    """

    __slots__ = (
        "_behind",
        "_deadlines",
        "_expired",
        "_first_at",
        "_idle_from",
        "_idle_s",
        "_limits",
        "due_at",
        "minds_items",
    )

    def __init__(
        self,
        deadlines: Deadlines,
        limits: Limits,
        expired: Callable[[str, float], None],
    ) -> None:
        self._deadlines = deadlines
        self._limits = limits
        self._expired = expired
        self._first_at = time.monotonic() + limits.first_item_s
        self._idle_s = limits.idle_s
        self._idle_from = math.inf
        self._behind = False
        self.minds_items = limits.first_item_s != math.inf or limits.idle_s != math.inf
        self.due_at = min(limits.deadline, self._first_at)
        deadlines.watch(self)

    def stop(self) -> None:
        """The call is over."""
        self._deadlines.watched.discard(self)
        # What it would have told usually owns it: no cycle is left behind.
        self._expired = _nobody

    def check(self) -> None:
        """Look now: a limit may have passed, or be about to."""
        self.look(time.monotonic())

    def passes_now(self) -> bool:
        """Whether the deadline passes in this moment; its owner is told then.

        A handler knows the deadline too, and what it calls in turn: their reports that
        it passed may come just before we see it ourselves.
        """
        if self._limits.deadline - time.monotonic() > _SAME_MOMENT_S:
            return False
        self._expired(self._limits.deadline_name, self._limits.timeout_s)
        return True

    def started(self) -> None:
        """The handler runs: from now on items may come, unless it is too late."""
        now = time.monotonic()
        if self.due_at <= now + _EARLY_S:
            self.look(now)
        if self._first_at == math.inf and self._idle_s != math.inf:
            self._expect_item()

    def item(self) -> None:
        """An item came."""
        self._first_at = math.inf
        if self._idle_from != math.inf:
            self._idle_from = time.monotonic()
        else:
            self._expect_item()

    def reader_behind(self, behind: bool) -> None:
        """Items are held back, or no longer, because nobody reads them."""
        self._behind = behind
        if behind:
            self._idle_from = math.inf
        else:
            self._expect_item()

    def detached(self) -> None:
        """Nobody answers for now: no item is expected until `started`.

        Whoever is asked next meets a reader that has read all there was.
        """
        self._behind = False
        self._idle_from = math.inf
        self.due_at = min(self._limits.deadline, self._first_at)
        self._deadlines.watch(self)

    def _expect_item(self) -> None:
        over = self._expired is _nobody
        if over or self._behind or self._idle_s == math.inf:
            return
        self._idle_from = time.monotonic()
        due_at = self._idle_from + self._idle_s
        if due_at < self.due_at:
            self.due_at = due_at
            self._deadlines.watch(self)

    def look(self, now: float) -> None:
        """Something may be due; the idle limit has moved on with each item."""
        limits = self._limits
        idle_at = self._idle_from + self._idle_s
        due_at = min(limits.deadline, self._first_at, idle_at)
        if due_at > now + _EARLY_S:
            self.due_at = due_at
            return
        self.due_at = math.inf
        if due_at == limits.deadline:
            self._expired(limits.deadline_name, limits.timeout_s)
        elif due_at == self._first_at:
            self._expired("first_item_timeout", limits.first_item_s)
        else:
            self._expired("idle_timeout", limits.idle_s)


def _nobody(limit: str, seconds: float) -> None:
    """Takes the place of the owner's call-back once the call is over."""


def timed_out(
    limit: str,
    seconds: float,
    *,
    phase: str,
    items: int,
    instance_id: int | None,
) -> CallError:
    """The error of a call whose limit has passed.

    Args:
        limit: Its name.
        seconds: How long it was.
        phase: How far the call came.
        items: How many items came.
        instance_id: Who was called, if anybody.
    """
    words = "backend response inactivity timeout"  # as the genuine client says
    if limit != "idle_timeout":
        words = "the call did not end in time"
    if limit == "first_item_timeout":
        words = "no item came in time"
    where = "no instance" if instance_id is None else f"instance {instance_id:x}"
    kind = StreamTimeout if phase == "stream" else CallTimeout
    return kind(
        f"DeadlineExceeded: {words} ({limit} {max(seconds, 0):.3g} s; phase {phase}, "
        f"items {items}, {where})",
        phase=phase,
        instance_id=instance_id,
        facts={"limit": limit, "seconds": seconds, "items": items},
    )
