"""Retries: which failed attempts may be followed by another, and how many in all.

Pure: knows no call and reads no clock.  A request is never sent again after the first
item of its answer, nor after an error of its handler; that is for the call to see to,
which may continue an answer with another request if its caller gives one.
"""

from __future__ import annotations

from dynamo.runtime.errors import (
    CallError,
    CallTimeout,
    ConnectionFailed,
    StreamBroken,
    WorkerLost,
)

# After these nobody knows whether the handler ran.
_MAY_HAVE_RUN = (ConnectionFailed, WorkerLost, StreamBroken, CallTimeout)

_SHARE_OF_CALLS = 0.2
_PER_SECOND = 10.0
# What is not used is kept for about ten seconds, not for a storm an hour later.
_MOST = 100.0


def may_be_sent_again(error: CallError, *, idempotent: bool) -> bool:
    """Whether a request that failed so may go to another instance.

    Args:
        error: How the attempt failed, before any item of its answer.
        idempotent: The caller allows that a handler sees the request twice.
    """
    return error.retryable or (idempotent and isinstance(error, _MAY_HAVE_RUN))


class RetryBudget:
    """How many attempts beyond the second all calls of an endpoint may make.

    A fifth of the calls plus ten a second: enough for any ordinary trouble, and no
    multiplication of the load in a general one.  The first move of a call is free: it
    leaves an instance that is lost, drains or refuses, so that others stay away from it
    too.

    Args:
        now: The time in seconds, monotonic.

    Example:
        >>> budget = RetryBudget(now=0.0)
        >>> sum(budget.take(0.0) for _ in range(100))
        10
        >>> for _ in range(50):
        ...     budget.deposit()
        >>> sum(budget.take(0.0) for _ in range(100))
        10
        >>> sum(budget.take(0.5) for _ in range(100))
        5
    """

    __slots__ = ("_at", "_left")

    def __init__(self, now: float) -> None:
        self._at = now
        self._left = _PER_SECOND

    def deposit(self) -> None:
        """A call is made."""
        if self._left < _MOST:
            self._left += _SHARE_OF_CALLS

    def take(self, now: float) -> bool:
        """Whether one more attempt may be made; it is counted then."""
        self._left = min(_MOST, self._left + (now - self._at) * _PER_SECOND)
        self._at = now
        # Shares that add up to a whole may fall short of it by a rounding.
        if self._left < 1 - 1e-9:
            return False
        self._left -= 1
        return True
