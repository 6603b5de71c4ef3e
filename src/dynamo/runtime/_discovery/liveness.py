"""One daemon thread with an event loop of its own: renewals and all store I/O.

A handler that blocks the user's loop for minutes must not lose its registration.
Registers no exit hook and handles no signal; after a fork the child has no such thread,
and every use of it there is refused instead of waiting for ever.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from concurrent.futures import Future
from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeVar

from dynamo.runtime.errors import RuntimeClosed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

_T = TypeVar("_T")

_log = logging.getLogger("dynamo.runtime.discovery")

STOPPED = "discovery was shut down with its runtime: make a new runtime"
LEFT = "this runtime has left discovery: make a new runtime"
FORKED = (
    "this runtime belongs to the parent process and cannot be used after a fork: make "
    "a new runtime in the child"
)

_WIND_UP_S = 5.0


class Liveness:
    """The thread; it starts with the first `submit` and ends with `stop`."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self.ended: Future[None] = Future()
        """Done when the thread has cleaned up after `stop`."""
        # Running futures cannot be cancelled, so that no awaiter of it can end it.
        self.ended.set_running_or_notify_cancel()

    @property
    def forked(self) -> bool:
        """True in a child process, where the thread does not exist."""
        return os.getpid() != self._pid

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run a coroutine in the thread.

        Raises:
            RuntimeClosed: the thread was stopped, or belongs to the parent process.
        """
        try:
            # The fork first: a child may have inherited the lock in locked state.
            self._refuse_fork()
            with self._lock:
                # Under the lock, so that no stop comes between start and scheduling.
                loop = self._running()
                # In an empty context: tasks made there outlive the causing call.
                return Context().run(
                    asyncio.run_coroutine_threadsafe, self._guard(coroutine), loop
                )
        except BaseException:
            coroutine.close()
            raise

    def every(
        self, interval_s: float, job: Callable[[], Awaitable[None]]
    ) -> asyncio.Task[None]:
        """Run a job again and again; to be called in the thread, which owns the task.

        A job that raises is reported, once per row of failures, and repeated.
        """
        return asyncio.get_running_loop().create_task(_repeat(interval_s, job))

    def stop(self) -> None:
        """Ask the thread to end, without waiting; idempotent."""
        self._refuse_fork()
        with self._lock:
            if not self._stopping:
                self._stopping = True
                if self._loop is None:
                    self.ended.set_result(None)
                else:
                    self._loop.call_soon_threadsafe(self._loop.stop)

    async def _guard(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        try:
            return await coroutine
        except asyncio.CancelledError:
            # The stop cancels what still runs; to its caller that is no cancellation.
            if self._stopping:
                raise RuntimeClosed(STOPPED) from None
            raise

    def _refuse_fork(self) -> None:
        if self.forked:
            raise RuntimeClosed(FORKED)

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._stopping:
            raise RuntimeClosed(STOPPED)
        if self._loop is None:
            self._loop = self._start()
        return self._loop

    def _start(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(
            target=self._run, args=(loop,), name="dynamo-liveness", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            loop.close()
            raise
        return loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_forever()
        finally:
            try:
                loop.run_until_complete(_wind_up())
            finally:
                loop.close()
                self.ended.set_result(None)


async def _repeat(interval_s: float, job: Callable[[], Awaitable[None]]) -> None:
    """Start a job every interval, counted from start to start, without catching up."""
    failing = False
    due = time.monotonic() + interval_s
    while True:
        await asyncio.sleep(due - time.monotonic())
        due = max(due, time.monotonic() - interval_s) + interval_s
        try:
            await job()
        except Exception:  # noqa: BLE001 - the top of this task; it reports
            if not failing:
                _log.exception("a periodic job of discovery failed; it is repeated")
            failing = True
        else:
            failing = False


async def _wind_up() -> None:
    """Cancel and await what still runs on this loop."""
    # What was submitted just before the stop must begin, or it could not report its end.
    await asyncio.sleep(0)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_WIND_UP_S)
