"""What our processes do on SIGTERM, SIGINT and at interpreter exit.

Owns the process-wide hooks: installed only in the main thread and only where the
program has none of its own, put back afterwards.  Handlers are plain Python signal
handlers and not the loop's: they run also while a handler blocks the loop.  What they
do is handed in.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import functools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

_log = logging.getLogger("dynamo.runtime.worker")

Restore = Callable[[], None]


def _is_default(signum: signal.Signals, handler: Any) -> bool:
    """Whether nobody has decided yet what a signal does."""
    if signum is signal.SIGINT:
        # From Python 3.11 asyncio.run has a handler that only cancels the main task.
        runner = getattr(asyncio, "Runner", None)
        if isinstance(handler, functools.partial) and runner is not None:
            return getattr(handler.func, "__func__", None) is getattr(
                runner, "_on_sigint", None
            )
        return handler is signal.default_int_handler
    return handler is signal.SIG_DFL


def install(
    signums: tuple[signal.Signals, ...], react: Callable[[signal.Signals], None]
) -> Restore:
    """Have ``react(signum)`` called in the main thread, between two bytecodes.

    Does nothing outside the main thread, and nothing for a signal that the program
    handles itself.

    Returns:
        What puts the previous handlers back where ours are still in place.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    previous: dict[signal.Signals, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        react(signal.Signals(number))

    def restore() -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for signum, before in previous.items():
            if signal.getsignal(signum) is handle:
                signal.signal(signum, before)
        previous.clear()
        _installed.discard(restore)

    for signum in signums:
        before = signal.getsignal(signum)
        if _is_default(signum, before):
            previous[signum] = before
            signal.signal(signum, handle)
    if previous:
        _installed.add(restore)
    return restore


# What puts handlers back that are in place now, for the moment of a fork.
_installed: set[Restore] = set()


def _after_fork() -> None:
    """A forked child has the handlers, but not the runtime behind them."""
    if _installed:
        # Else the loop of the parent hears of the child's signals (before 3.12).
        signal.set_wakeup_fd(-1)
    for restore in list(_installed):
        restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def die_by(signum: signal.Signals) -> None:
    """Let the signal do what it does by default: end the process, tell the parent."""
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    # Only PID 1 of a container comes here: the kernel keeps such signals from it.
    os._exit(128 + signum)


class EndWatch:
    """Ends a process that was told to end, and whose worker is over, but which stays.

    A handler that swallows its cancellation keeps `asyncio.run` for ever, a thread of
    ``to_thread`` the interpreter.  Code of the program after the worker is left alone.

    Args:
        over: Set when the worker's coroutine has ended.
        task: The task that ran it.
        loop: The loop of that task.
    """

    def __init__(
        self,
        over: threading.Event,
        task: asyncio.Task[Any],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._over = over
        self._task = task
        self._loop = loop

    def start(self, worker_s: float, grace_s: float) -> None:
        """Watch in a thread; safe in a signal handler.

        Args:
            worker_s: How long the worker may take to end.
            grace_s: How long the process may go on after that.
        """
        _thread.start_new_thread(self._watch, (worker_s, grace_s))

    def _watch(self, worker_s: float, grace_s: float) -> None:
        self._over.wait(worker_s)
        time.sleep(grace_s)
        if self._stuck():
            _log.critical(
                "ending the process, which was told to end and does not: %s",
                self._unfinished(),
            )
            _exit_now()

    def _stuck(self) -> bool:
        if not self._over.is_set():
            return True
        return (self._task.done() and self._loop.is_running()) or _waits_at_exit()

    def _unfinished(self) -> str:
        """Tasks and threads, each with what is known of its place."""
        tasks = asyncio.all_tasks(self._loop)
        places = _frames()
        return "; ".join(
            [f"task {task.get_name()}: {task.get_coro()}" for task in tasks]
            + [
                f"thread {thread.name} in {_place(places.get(thread.ident or 0))}"
                for thread in threading.enumerate()
                if not thread.daemon
            ]
        )


def _frames() -> dict[int, FrameType]:
    return sys._current_frames()  # noqa: SLF001 - public in spite of its name


def _waits_at_exit() -> bool:
    """Whether the interpreter has come to its end, but for threads it waits for."""
    frame = _frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is not None and frame.f_globals is vars(threading)


def _place(frame: FrameType | None) -> str:
    if frame is None:
        return "no Python code"
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _exit_now() -> None:
    """End the process with code 0, whatever goes on in it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)
