"""Withdrawal and overload: whom one client leaves out because a worker said so.

Pure: time comes as an argument.  May leave out everybody, other than `ejection`, which
goes by what was seen and not by what was said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar


class Named(Protocol):
    """What is avoided: the record of an instance."""

    @property
    def instance_id(self) -> int: ...


R = TypeVar("R", bound=Named)


class Avoided(Generic[R]):
    """Instances that are left out for a while, each with a time of its own.

    An instance that registers again, also under its old id, starts with a clean slate.
    """

    def __init__(self) -> None:
        self.until: dict[int, tuple[float, R, str]] = {}
        """Until when, and why.  Empty: nobody is avoided; otherwise `without` knows."""
        self._all_back_at = -math.inf

    def add(self, record: R, until: float, reason: str, now: float) -> None:
        """Leave an instance out until then."""
        # Also those that have left: nobody will ask for them again.
        self.until = {
            number: avoided
            for number, avoided in self.until.items()
            if avoided[0] > now
        }
        if until > now:
            self.until[record.instance_id] = (until, record, reason)
        self._all_back_at = max(
            (until for until, _, _ in self.until.values()), default=-math.inf
        )

    def without(self, records: Sequence[R], now: float) -> Sequence[R]:
        """The others, in the same order; the same object if nobody is left out."""
        if now >= self._all_back_at:
            self.until.clear()
            return records
        return [one for one in records if self.remaining_s(one, now) <= 0]

    def remaining_s(self, record: R, now: float) -> float:
        """How long an instance is still left out; 0 if it is not."""
        until, avoided, _ = self.until.get(record.instance_id, (0.0, record, ""))
        return max(until - now, 0.0) if avoided is record else 0.0

    def reason(self, record: R, now: float) -> str:
        """Why an instance is left out; nothing if it is not."""
        if self.remaining_s(record, now) <= 0:
            return ""
        return self.until[record.instance_id][2]

    def next_end_s(self, now: float) -> float | None:
        """Seconds until the first of them is back, or None if there is none."""
        ends = [until for until, _, _ in self.until.values() if until > now]
        return min(ends) - now if ends else None
