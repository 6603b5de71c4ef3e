"""Ejection: who is left out because calls to it failed, for how long, and its way back.

Pure: failures and successes are reported, time comes as an argument, and connections are
tried by whoever asks `Ejections.due`.

States of an instance that has failed (of all others nothing is kept)::

    COUNTED    called as before; too few failures in a row to mean anything
    EJECTED    left out until a time
    PROBED     left out while a connection to it is tried
    HALF_OPEN  may have one call, which decides
    TRIED      left out while that call is on its way

    (nothing) --failure--> COUNTED
    COUNTED   --too many in a row, or no connection--> EJECTED
              --a connection lost--> EJECTED for no time, that is until it was probed
    EJECTED   --its time is over--> PROBED
    PROBED    --no connection--> EJECTED, twice as long
              --well--> HALF_OPEN, or COUNTED after a loss alone
    HALF_OPEN --chosen--> TRIED
    TRIED     --success--> (nothing)      --failure--> EJECTED, twice as long
              --no outcome--> HALF_OPEN
    any       --registered again, gone--> (nothing)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

# Doubling more often than this changes nothing.
_MAX_DOUBLINGS = 30


class Failure(Enum):
    """What an instance did not do; the value says it in an error's words.

    What a handler raises is none: that is an answer.
    """

    NO_CONNECTION = "no connection could be made"
    CONNECTION_LOST = "a connection was lost with calls on it"
    NO_ANSWER = "a request was not acknowledged in time"
    NO_ITEM = "an item did not come in time"


# A request that was acknowledged disproves these; the others, only a stream that came
# to its end.
_UP_TO_ANSWER = frozenset((Failure.NO_CONNECTION, Failure.NO_ANSWER))


@dataclass(frozen=True)
class EjectionPolicy:
    """How fast an instance is left out, and for how long.

    Attributes:
        failures: So many in a row eject an instance; 0 switches ejection off.
        first_s: How long the first time.
        max_s: Each time in a row is twice as long, up to this.
        trial_s: After so long without an outcome of the one call that an ejected
            instance may have, it may have another one.
    """

    failures: int = 3
    first_s: float = 0.1
    max_s: float = 10.0
    trial_s: float = 5.0


class _State(Enum):
    COUNTED = 0
    EJECTED = 1
    PROBED = 2
    HALF_OPEN = 3
    TRIED = 4


_LEFT_OUT = frozenset((_State.EJECTED, _State.PROBED, _State.TRIED))


class _Trouble:
    """What is known of an instance that failed."""

    __slots__ = ("ejections", "failures", "kinds", "latest", "state", "until")

    def __init__(self) -> None:
        self.state = _State.COUNTED
        self.until = 0.0
        # Both in a row, without a success in between.
        self.failures = 0
        self.ejections = 0
        self.latest = Failure.NO_CONNECTION
        self.kinds: set[Failure] = set()

    def note(self, failure: Failure) -> None:
        self.failures += 1
        self.latest = failure
        self.kinds.add(failure)

    @property
    def left_out(self) -> bool:
        return self.state in _LEFT_OUT


class Ejections:
    """The instances of one endpoint that failed, by id.

    Methods that report something return whether it changed who is left out.
    """

    def __init__(self, policy: EjectionPolicy) -> None:
        self._policy = policy
        self.troubled: dict[int, _Trouble] = {}
        """Who has failed since its last success; empty as a rule."""

    # What was seen

    def failed(self, instance_id: int, failure: Failure, now: float) -> bool:
        """An instance failed."""
        if not self._policy.failures:
            return False
        trouble = self.troubled.setdefault(instance_id, _Trouble())
        if trouble.state in (_State.EJECTED, _State.PROBED):
            # Of a call that was sent before.  That nobody listens settles the probe.
            settled = trouble.state is _State.PROBED
            if not (settled and failure is Failure.NO_CONNECTION):
                return False
        trouble.note(failure)
        if self._is_enough(trouble, failure):
            self._eject(trouble, now)
        elif failure is Failure.CONNECTION_LOST:
            trouble.state = _State.EJECTED
            trouble.until = now
        return trouble.left_out

    def _is_enough(self, trouble: _Trouble, failure: Failure) -> bool:
        return (
            failure is Failure.NO_CONNECTION
            or trouble.failures >= self._policy.failures
            or trouble.state in (_State.HALF_OPEN, _State.TRIED)
        )

    def _eject(self, trouble: _Trouble, now: float) -> None:
        trouble.state = _State.EJECTED
        doublings = min(trouble.ejections, _MAX_DOUBLINGS)
        duration_s = min(self._policy.first_s * 2**doublings, self._policy.max_s)
        trouble.until = now + duration_s
        trouble.ejections += 1

    def answered(self, instance_id: int) -> bool:
        """A request was acknowledged and its handler runs."""
        trouble = self.troubled.get(instance_id)
        if trouble is None or not trouble.kinds <= _UP_TO_ANSWER:
            return False
        return self.forget(instance_id)

    def completed(self, instance_id: int) -> bool:
        """A stream came to its end."""
        trouble = self.troubled.get(instance_id)
        if trouble is None:
            return False
        older = trouble.state in (_State.EJECTED, _State.PROBED)
        if older and trouble.latest is Failure.NO_CONNECTION:
            # Of a connection from before; that there is no new one stays true.
            return False
        return self.forget(instance_id)

    def chosen(self, instance_id: int, now: float) -> bool:
        """A call goes to that instance."""
        trouble = self.troubled.get(instance_id)
        if trouble is None or trouble.state is not _State.HALF_OPEN:
            return False
        trouble.state = _State.TRIED
        trouble.until = now + self._policy.trial_s
        return True

    def let_go(self, instance_id: int) -> bool:
        """A call ended; if that was the one that decides, the next one does."""
        trouble = self.troubled.get(instance_id)
        if trouble is None or trouble.state is not _State.TRIED:
            return False
        trouble.state = _State.HALF_OPEN
        return True

    def probed(self, instance_id: int, *, well: bool, now: float) -> bool:
        """A connection to an instance that was `due` was tried."""
        trouble = self.troubled.get(instance_id)
        if trouble is None or trouble.state is not _State.PROBED:
            return False
        if not well:
            return self.failed(instance_id, Failure.NO_CONNECTION, now)
        trouble.state = _State.HALF_OPEN if trouble.ejections else _State.COUNTED
        return True

    def forget(self, instance_id: int) -> bool:
        """It is well, registered again, or gone: nothing is held against it."""
        trouble = self.troubled.pop(instance_id, None)
        return trouble is not None and trouble.left_out

    # Time

    def next_due(self) -> float | None:
        """When to ask `due` the next time, or None if nobody waits for anything."""
        waiting = (_State.EJECTED, _State.TRIED)
        return min(
            (one.until for one in self.troubled.values() if one.state in waiting),
            default=None,
        )

    def due(self, now: float) -> list[int]:
        """Those to which a connection is to be tried now; tell `probed` the outcome."""
        over = [
            (number, one) for number, one in self.troubled.items() if one.until <= now
        ]
        for _, one in over:
            if one.state is _State.TRIED:
                one.state = _State.HALF_OPEN
        due = [(number, one) for number, one in over if one.state is _State.EJECTED]
        for _, one in due:
            one.state = _State.PROBED
        return [number for number, _ in due]

    # Who is left out

    def left_out(self, candidates: Iterable[int], most: int) -> frozenset[int]:
        """The candidates that get no call, at most so many: the worst of them."""
        out = [
            number
            for number in candidates
            if number in self.troubled and self.troubled[number].left_out
        ]
        if len(out) > most:
            out.sort(key=self._badness, reverse=True)
        return frozenset(out[: max(most, 0)])

    def _badness(self, instance_id: int) -> tuple[int, int]:
        trouble = self.troubled[instance_id]
        return trouble.ejections, trouble.failures

    def reason(self, instance_id: int) -> str:
        """Why an instance is left out, or would be but for the limit; or nothing."""
        trouble = self.troubled.get(instance_id)
        if trouble is None or not trouble.left_out:
            return ""
        many = f", {trouble.failures} in a row" if trouble.failures > 1 else ""
        return f"{trouble.latest.value}{many}"

    def times(self, instance_id: int) -> int:
        """How many times in a row an instance was ejected."""
        trouble = self.troubled.get(instance_id)
        return 0 if trouble is None else trouble.ejections
