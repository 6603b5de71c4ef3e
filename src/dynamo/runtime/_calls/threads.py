"""Runs a plain generator in a thread of its own, as an asynchronous iterator.

One thread per call and for the whole call, so that the generator sees one thread and
one context; a daemon, so that a stuck one never holds the process.  A step that blocks
cannot be interrupted: it sees its stopped context, and is closed once it comes back.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable, Generator
from typing import Any

from dynamo.runtime._calls.streams import on_loop


class ThreadedGenerator:
    """The items of ``make()``, a generator, each step taken in the thread.

    Args:
        make: Calls the generator function.
        name: For the thread.
    """

    def __init__(self, make: Callable[[], Generator[Any, Any, Any]], name: str) -> None:
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._steps: queue.SimpleQueue[asyncio.Future[Any] | None] = queue.SimpleQueue()
        self._ended = self._loop.create_future()
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._work,),
            name=f"dynamo-handler-{name}",
            daemon=True,
        )

    def __aiter__(self) -> ThreadedGenerator:
        return self

    async def __anext__(self) -> Any:
        if self._ended.done():
            raise StopAsyncIteration
        if not self._thread.is_alive():
            self._thread.start()
        step = self._loop.create_future()
        self._steps.put(step)
        return await step

    async def aclose(self) -> None:
        """Close the generator in its thread, once the step in progress is back."""
        self._steps.put(None)
        if self._thread.is_alive():
            await asyncio.wait((self._ended,))

    # In the thread

    def _work(self) -> None:
        generator = self._make()
        try:
            while (step := self._steps.get()) is not None:
                if not self._take(generator, step):
                    break
        finally:
            try:
                generator.close()
            finally:
                on_loop(self._loop, self._settle, self._ended, None, None)

    def _take(self, generator: Generator[Any, Any, Any], step: Any) -> bool:
        """One step; False if it was the last."""
        try:
            value = next(generator)
        except StopIteration:
            on_loop(self._loop, self._settle, step, None, StopAsyncIteration())
            return False
        except BaseException as error:  # noqa: BLE001 - the user's code raises anything
            on_loop(self._loop, self._settle, step, None, error)
            return False
        on_loop(self._loop, self._settle, step, value, None)
        return True

    def _settle(
        self, future: asyncio.Future[Any], value: Any, error: BaseException | None
    ) -> None:
        if future.done():
            return  # whoever waited was cancelled
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
