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

from dynamo.runtime._calls.inbox import on_loop


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
        # What closing the generator raised, or None.
        self._ended: asyncio.Future[BaseException | None] = self._loop.create_future()
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
        if self._thread.ident is None:
            self._thread.start()
        step = self._loop.create_future()
        self._steps.put(step)
        return await step

    async def aclose(self) -> None:
        """Close the generator in its thread, once the step in progress is back."""
        self._steps.put(None)
        if self._thread.ident is None:
            _settle(self._ended, None, None)
        error = await asyncio.shield(self._ended)
        if error is not None:
            raise error

    # In the thread

    def _items(self) -> Generator[Any, Any, None]:
        # The call itself may fail: then the first step does.
        yield from self._make()

    def _work(self) -> None:
        failure: BaseException | None = None
        generator = self._items()
        try:
            while (step := self._steps.get()) is not None:
                if not self._take(generator, step):
                    break
            generator.close()
        except BaseException as error:  # noqa: BLE001 - it is raised where one waits
            failure = error
        on_loop(self._loop, _settle, self._ended, failure, None)

    def _take(
        self, generator: Generator[Any, Any, Any], step: asyncio.Future[Any]
    ) -> bool:
        """One step; False if it was the last."""
        value: Any = None
        failure: BaseException | None = None
        try:
            value = next(generator)
        except StopIteration:
            failure = StopAsyncIteration()
        except StopAsyncIteration as error:
            # It must not look like a normal end; a coroutine would say the same.
            failure = RuntimeError("generator raised StopAsyncIteration")
            failure.__cause__ = error
        except BaseException as error:  # noqa: BLE001 - the user's code raises anything
            failure = error
        on_loop(self._loop, _settle, step, value, failure)
        # A loop that was closed in the meantime will ask for no more.
        return failure is None and not self._loop.is_closed()


def _settle(
    future: asyncio.Future[Any], value: Any, error: BaseException | None
) -> None:
    if future.done():
        return  # whoever waited was cancelled
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
