"""How many requests run at once, how many more may wait, and who is next.

Counts and turns only: knows no request, no handler, no lane.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from dynamo.runtime._sealed import override
from dynamo.runtime._transports import Rejection
from dynamo.runtime._wire.callhome import OVERLOADED_TEXT

_log = logging.getLogger("dynamo.runtime.ingress")

# Between two lines about refused requests.
_REPORT_PAUSE_S = 10.0
# For how long a genuine client leaves a full worker alone, whatever that says.
_GENUINE_PAUSE_S = 1.0
# What a full endpoint suggests before it has seen how fast it is, and within which bounds.
_FIRST_PAUSE_S = 0.1
_LEAST_PAUSE_S = 0.001
_MOST_PAUSE_S = 5.0
# How much the newest interval counts for the mean of them.
_NEWEST = 0.1

Clock = Callable[[], float]


def _monotonic() -> float:
    # Looked up at each call: tests steer it.
    return time.monotonic()


class Admits(Protocol):
    """What decides about the requests of an endpoint."""

    def reserve(self) -> Rejection | None:
        """Take a place for a new request, or say why there is none."""

    def run_now(self) -> bool:
        """Whether it is the turn of a request that has a place; else `run` waits."""

    async def run(self) -> None:
        """Wait for the turn of a request that has a place."""

    def release(self, *, ran: bool) -> None:
        """Give the place back; ``ran`` if the request had got to run."""


class Admission:
    """The places and turns of all requests of a worker, within the genuine limits."""

    _who = "worker"
    _settings = (
        "DYN_TCP_WORKER_POOL_SIZE and DYN_TCP_WORK_QUEUE_SIZE, or "
        "DYN_ENGINE_REQUEST_LIMIT and DYN_DYNAMO_REQUEST_QUEUE_LIMIT"
    )

    def __init__(self, running: int, waiting: int, now: Clock = _monotonic) -> None:
        self._running_limit = running
        # The genuine worker holds one more than its queue: the one next in turn.
        self._waiting_limit = waiting + 1
        self._now = now
        self._running = 0
        # In order, and quick to leave from the middle.
        self._waiting: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._reserved = 0
        self._untold_refusals = 0
        self._silent_until = 0.0

    def reserve(self) -> Rejection | None:
        """Take a place for a new request, or say why there is none."""
        if self._reserved >= self._running_limit + self._waiting_limit:
            self._report_refusal(self._now())
            return self._rejection()
        self._reserved += 1
        return None

    def reserve_all(self) -> int:
        """Take every place that is left, each to be released; returns how many."""
        left = self._running_limit + self._waiting_limit - self._reserved
        self._reserved += left
        return left

    def _rejection(self) -> Rejection:
        return Rejection(OVERLOADED_TEXT, _GENUINE_PAUSE_S)

    def _report_refusal(self, now: float) -> None:
        """Tell the operator, in a line now and then however many are refused."""
        self._untold_refusals += 1
        if now < self._silent_until:
            return
        _log.warning(
            "%s full, requests refused: %d; %s, the most that are allowed (%s)",
            self._who,
            self._untold_refusals,
            self._limits(),
            self._settings,
        )
        self._untold_refusals = 0
        self._silent_until = now + _REPORT_PAUSE_S

    def _limits(self) -> str:
        return f"{self._running_limit} run and {self._waiting_limit} wait"

    def release(self, *, ran: bool) -> None:
        """Give the place back; ``ran`` if the request had got to run."""
        self._reserved -= 1
        if ran:
            self.pass_on()

    def pass_on(self) -> None:
        """A request that had its turn does not run any more: the next one does."""
        while self._waiting:
            waiter, _ = self._waiting.popitem(last=False)
            if not waiter.done():
                waiter.set_result(None)
                return
        self._running -= 1

    def run_now(self) -> bool:
        """Whether it is the turn of a request that has a place; else `run` waits."""
        if self._running >= self._running_limit:
            return False
        self._running += 1
        return True

    async def run(self) -> None:
        """Wait for the turn of a request that has a place."""
        # Its own, also where a subclass asks others besides.
        if Admission.run_now(self):
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = None
        try:
            await waiter
        except asyncio.CancelledError:
            self._waiting.pop(waiter, None)
            if waiter.done() and not waiter.cancelled():
                # The turn came in the same moment.
                self.pass_on()
            raise


class EndpointAdmission(Admission):
    """The places and turns of one endpoint, within limits of its own and the worker's.

    What it refuses says when to come back: so soon that its queue has not run empty by
    then, and so late that it is no longer full.

    Args:
        running: How many requests of this endpoint run at once.
        waiting: How many more wait.
        worker: The places of the whole worker.
        path: Whose places these are, for log lines.
    """

    _settings = "max_concurrent_requests and max_queued_requests of serve_endpoint"

    def __init__(
        self,
        running: int,
        waiting: int,
        worker: Admits,
        now: Clock = _monotonic,
        *,
        path: str = "",
    ) -> None:
        super().__init__(running, waiting, now)
        self._who = f"endpoint {path}"
        self._waiting_limit = waiting
        self._worker = worker
        self._interval_s: float | None = None
        self._freed_at: float | None = None

    @override
    def reserve(self) -> Rejection | None:
        rejection = super().reserve()
        if rejection is None:
            rejection = self._worker.reserve()
            if rejection is not None:
                super().release(ran=False)
        return rejection

    @override
    def _rejection(self) -> Rejection:
        text = (
            f"Server overloaded: {self._limits()} at this endpoint ({self._settings})"
        )
        return Rejection(text, self._pause_s())

    def _pause_s(self) -> float:
        """Until about half of those that wait have got their turn."""
        if self._interval_s is None:
            return _FIRST_PAUSE_S
        pause_s = self._interval_s * max(self._waiting_limit / 2, 1.0)
        return min(max(pause_s, _LEAST_PAUSE_S), _MOST_PAUSE_S)

    @override
    def release(self, *, ran: bool) -> None:
        super().release(ran=ran)
        self._worker.release(ran=ran)

    @override
    def pass_on(self) -> None:
        self._measure()
        super().pass_on()

    def _measure(self) -> None:
        """How fast turns follow each other, which shows only while somebody waits."""
        now = self._now()
        if self._freed_at is not None:
            sample_s = now - self._freed_at
            known_s = self._interval_s
            if known_s is None:
                self._interval_s = sample_s
            else:
                self._interval_s = known_s + _NEWEST * (sample_s - known_s)
        full = self._running >= self._running_limit and bool(self._waiting)
        self._freed_at = now if full else None

    @override
    def run_now(self) -> bool:
        if self._running >= self._running_limit or not self._worker.run_now():
            return False
        self._running += 1
        return True

    @override
    async def run(self) -> None:
        await super().run()
        try:
            await self._worker.run()
        except BaseException:
            # It counts as one that never ran, for both.
            self.pass_on()
            raise
