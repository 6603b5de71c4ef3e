"""An event loop whose clock jumps: minutes of waiting pass in no time.

Owns the clock of that loop and, in the thread in which it runs, `time.monotonic`.
Knows nothing of the runtime but the names of the threads in which it runs handlers.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import functools
import inspect
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from dynamo.runtime._sealed import override

T = TypeVar("T")

# What is sent to a socket of this process arrives at once, or a moment later.
_SOCKET_PATIENCE_S = 0.001
# Between two looks at threads that are at work.
_THREAD_POLL_S = 0.002
_HANDLER_THREADS = "dynamo-handler-"
_CLOSE_LIMIT_S = 5.0


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still while code runs and jumps when all wait.

    When nothing is ready, the clock jumps to the next timer instead of waiting for it:
    every time limit is kept exactly, however busy the machine is, and costs nothing.
    While it runs, `time.monotonic` follows its clock in its thread, so that deadlines
    mean the same everywhere.

    Limits: while jobs of ``asyncio.to_thread`` or threads of plain generator handlers
    are at work, real time passes instead; other threads and other processes go by the
    real clock, so that a peer in another process seems to answer late.  Sockets between
    parts of one process work.  Code that spins until ``time.monotonic()`` has advanced
    never ends.  There is no such loop for uvloop.

    Example:
        >>> import asyncio
        >>> from dynamo.runtime.testing import VirtualTimeLoop
        >>> loop = VirtualTimeLoop()
        >>> began = loop.time()
        >>> loop.run_until_complete(asyncio.sleep(3600))
        >>> round(loop.time() - began)
        3600
        >>> loop.close()
    """

    def __init__(self) -> None:
        self._now = time.monotonic()
        self._jobs: set[object] = set()
        super().__init__(_JumpingSelector(self._jump, self._threads_at_work))

    @override
    def time(self) -> float:
        """The virtual time in seconds; at first that of `time.monotonic`."""
        return self._now

    @override
    def run_forever(self) -> None:
        """Run until `stop` is called, with the time of this thread in our hands."""
        with self._steered():
            super().run_forever()

    @override
    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """As usual; real time passes until the job is done."""
        job = super().run_in_executor(executor, func, *args)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job

    def _jump(self, duration_s: float) -> None:
        self._now += duration_s

    def _threads_at_work(self) -> bool:
        return bool(self._jobs) or any(
            thread.name.startswith(_HANDLER_THREADS) for thread in threading.enumerate()
        )

    @contextlib.contextmanager
    def _steered(self) -> Iterator[None]:
        real, start = time.monotonic, _thread.start_new_thread
        here = threading.get_ident()

        def monotonic() -> float:
            return self._now if threading.get_ident() == here else real()

        def start_new_thread(
            function: Callable[..., object], args: tuple[Any, ...], *more: Any
        ) -> int:
            # What runs to its end without a Thread object, as leaving discovery does.
            job = object()
            self._jobs.add(job)

            def work(*args: Any, **keywords: Any) -> None:
                try:
                    function(*args, **keywords)
                finally:
                    self._jobs.discard(job)

            return start(work, args, *more)

        time.monotonic = monotonic
        _thread.start_new_thread = start_new_thread
        try:
            yield
        finally:
            time.monotonic = real
            _thread.start_new_thread = start


class _JumpingSelector(selectors.DefaultSelector):
    """Says that time has passed instead of letting it pass.

    Args:
        jump: Moves the clock.
        threads_at_work: Whether somebody needs real time.
    """

    def __init__(
        self, jump: Callable[[float], None], threads_at_work: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._jump = jump
        self._threads_at_work = threads_at_work

    @override
    def select(
        self, timeout: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select()  # no timer: only the world outside can go on
        ready = super().select(0)
        if ready or timeout <= 0:
            return ready
        if self._threads_at_work():
            return self._wait(min(timeout, _THREAD_POLL_S))
        # One is the loop's own, with which other threads wake it.
        if len(self.get_map()) > 1:
            ready = super().select(_SOCKET_PATIENCE_S)
        if not ready:
            self._jump(timeout)
        return ready

    def _wait(self, timeout_s: float) -> list[tuple[selectors.SelectorKey, int]]:
        began = time.perf_counter()
        ready = super().select(timeout_s)
        self._jump(time.perf_counter() - began)
        return ready


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run a program on a `VirtualTimeLoop`, as `asyncio.run` would.

    Args:
        main: The coroutine to run.

    Returns:
        What it returns.

    Raises:
        BaseException: what it raises.

    Example:
        >>> import asyncio
        >>> from dynamo.runtime.testing import run_in_virtual_time
        >>> async def main():
        ...     await asyncio.sleep(86400)
        ...     return "a day later"
        >>> run_in_virtual_time(main())
        'a day later'
    """
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(_cancel_what_is_left())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


async def _cancel_what_is_left() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=_CLOSE_LIMIT_S)


def in_virtual_time(
    test: Callable[..., Coroutine[Any, Any, None]],
) -> Callable[..., None]:
    """Make a plain test function of an asynchronous one that runs in virtual time.

    Args:
        test: A coroutine function; its parameters stay the names of fixtures, which
            must not be asynchronous.

    Returns:
        A function that runs it with `run_in_virtual_time`.

    Example:
        >>> import asyncio
        >>> from dynamo.runtime.testing import in_virtual_time
        >>> @in_virtual_time
        ... async def test_patience():
        ...     await asyncio.sleep(3600)
        >>> test_patience()
    """

    @functools.wraps(test)
    def run(*args: Any, **keywords: Any) -> None:
        run_in_virtual_time(test(*args, **keywords))

    # pytest would see the coroutine function behind it, and await what is no awaitable.
    run.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    del run.__wrapped__
    return run
