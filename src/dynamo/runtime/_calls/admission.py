"""How many requests run at once, how many more may wait, and who is next.

Counts and turns only: knows no request, no handler, no lane.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

_log = logging.getLogger("dynamo.runtime.ingress")

# Between two lines about refused requests.
_REPORT_PAUSE_S = 10.0


class Admission:
    """How many requests of a worker run at once, and how many more may wait."""

    def __init__(self, running: int, waiting: int) -> None:
        self._running_limit = running
        # The genuine worker holds one more than its queue: the one next in turn.
        self._waiting_limit = waiting + 1
        self._running = 0
        # In order, and quick to leave from the middle.
        self._waiting: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._reserved = 0
        self._untold_refusals = 0
        self._silent_until = 0.0

    def reserve(self) -> bool:
        """Take a place for a new request; False if the worker is full."""
        room = self._running_limit + self._waiting_limit
        if self._reserved >= room:
            return False
        self._reserved += 1
        return True

    def report_refusal(self, now: float) -> None:
        """Tell the operator, in a line now and then however many are refused."""
        self._untold_refusals += 1
        if now < self._silent_until:
            return
        _log.warning(
            "worker full, requests refused: %d; %d run and %d wait, the most that are "
            "allowed (DYN_TCP_WORKER_POOL_SIZE and DYN_TCP_WORK_QUEUE_SIZE, or "
            "DYN_ENGINE_REQUEST_LIMIT and DYN_DYNAMO_REQUEST_QUEUE_LIMIT)",
            self._untold_refusals,
            self._running_limit,
            self._waiting_limit,
        )
        self._untold_refusals = 0
        self._silent_until = now + _REPORT_PAUSE_S

    def release(self, *, ran: bool) -> None:
        """Give the place back; ``ran`` if the request had got to run."""
        self._reserved -= 1
        if not ran:
            return
        while self._waiting:
            waiter, _ = self._waiting.popitem(last=False)
            if not waiter.done():
                waiter.set_result(None)
                return
        self._running -= 1

    async def run(self) -> None:
        """Wait for the turn of a request that has a place."""
        if self._running < self._running_limit:
            self._running += 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = None
        try:
            await waiter
        except asyncio.CancelledError:
            self._waiting.pop(waiter, None)
            if waiter.done() and not waiter.cancelled():
                # The turn came in the same moment: pass it on.
                self._reserved += 1
                self.release(ran=True)
            raise
