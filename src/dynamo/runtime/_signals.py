"""What our processes do on SIGTERM, SIGINT and at interpreter exit.

Owns the process-wide hooks: installed only in the main thread and only where the
program has none of its own, put back afterwards.  Handlers are plain Python signal
handlers and not the loop's: they run also while a handler blocks the loop.  What they
do is handed in.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

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
