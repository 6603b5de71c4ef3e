"""Notices when the home loop stands still, and says who holds it: once each time.

Looks from another thread, which the loop's owner provides.  An idle loop is left alone:
only while it is busy with something is it asked, once per look, for a sign of life.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType
    from typing import Any

_log = logging.getLogger("dynamo.runtime.watchdog")

_LOOKS = 2
_LEAST_INTERVAL_S = 0.02
# Looks come a little early or late: the one at the limit is not to be just too soon.
_EARLY_SHARE = 0.1
_SHOWN_FRAMES = 20
# Where asyncio's own loops wait for something to happen.
_WAITS = ("select", "_poll")
_RUN_ONCE: CodeType = asyncio.BaseEventLoop._run_once.__code__  # type: ignore[attr-defined]  # noqa: SLF001


class LoopWatchdog:
    """Watches one loop; made in the loop's thread, used in another.

    Args:
        loop: The loop.
        limit_s: How long it may stand still.
        who: Names what a task is for, or gives an empty text.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limit_s: float,
        who: Callable[[asyncio.Task[Any]], str],
    ) -> None:
        self.interval_s = max(limit_s / _LOOKS, _LEAST_INTERVAL_S)
        """How often to look."""
        self._loop = loop
        self._limit_s = limit_s
        self._enough_s = limit_s - _EARLY_SHARE * self.interval_s
        self._who = who
        self._thread_id = threading.get_ident()
        # What other loops than asyncio's have on top when no Python code runs in them.
        self._base: CodeType | None = None
        self._looked_at: float | None = None
        self._asked_at: float | None = None
        self._told = False

    async def look(self) -> None:
        """To be called every `interval_s` seconds."""
        now = time.monotonic()
        before, self._looked_at = self._looked_at, now
        if before is None or now - before > 2 * self.interval_s:
            # We were late ourselves: the process was stopped, or the machine is busy.
            self._begin_anew(now)
        elif self._asked_at is None:
            self._ask_if_busy(now)
        elif not self._told and now - self._asked_at >= self._enough_s:
            self._tell(now - self._asked_at)

    def _begin_anew(self, now: float) -> None:
        if self._asked_at is not None and not self._told:
            self._asked_at = now

    def _ask_if_busy(self, now: float) -> None:
        if not self._loop.is_running() or self._is_idle(self._frame()):
            return
        self._asked_at = now
        try:
            self._loop.call_soon_threadsafe(self._answer)
        except RuntimeError:
            # Closed in this very moment.
            self._asked_at = None

    def _answer(self) -> None:
        """Runs on the loop, which therefore goes on."""
        self._thread_id = threading.get_ident()
        caller = sys._getframe(1)  # noqa: SLF001 - public in spite of its name
        if not isinstance(self._loop, asyncio.BaseEventLoop):
            self._base = caller.f_code
        asked_at, self._asked_at = self._asked_at, None
        if self._told and asked_at is not None:
            self._told = False
            blocked_s = time.monotonic() - asked_at
            _log.info("the event loop goes on after %.1f s", blocked_s)

    def _frame(self) -> FrameType | None:
        """Where the loop's thread is."""
        return sys._current_frames().get(self._thread_id)  # noqa: SLF001

    def _is_idle(self, frame: FrameType | None) -> bool:
        if frame is None or frame.f_code is self._base:
            return True
        top = frame
        while frame is not None and frame.f_code.co_name in _WAITS:
            frame = frame.f_back
        return frame is not None and frame is not top and frame.f_code is _RUN_ONCE

    def _tell(self, blocked_s: float) -> None:
        frame = self._frame()
        holder = self._holder()
        if self._asked_at is None or not self._loop.is_running():
            return  # it went on in this very moment, or nobody runs it
        self._told = True
        _log.warning(
            "the event loop is blocked for %.1f s now by %s; meanwhile nothing else is "
            "received, answered or cancelled: move such work to a thread "
            "(asyncio.to_thread) or a process (DYN_RUNTIME_BLOCKED_LOOP_SECS=%g):\n%s",
            blocked_s,
            holder,
            self._limit_s,
            "".join(traceback.format_stack(frame)[-_SHOWN_FRAMES:]).rstrip(),
        )

    def _holder(self) -> str:
        task = asyncio.current_task(self._loop)
        if task is None:
            return "a call-back"
        return self._who(task) or f"task {task.get_name()} ({_coroutine_name(task)})"


def _coroutine_name(task: asyncio.Task[Any]) -> str:
    coroutine = task.get_coro()
    return getattr(coroutine, "__qualname__", None) or repr(coroutine)
