"""Sends a caller's stream of requests: reads its iterator, encodes, waits for room.

Owns the caller's iterator from the moment the worker asks for input until it is closed.
Knows no lane; what becomes of the call is told to its owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

from dynamo.runtime._transports.connection import spawn
from dynamo.runtime._wire.payload import encode_value

if TYPE_CHECKING:
    import contextvars
    from collections.abc import Callable

    from dynamo.runtime._transports import InputSink

Requests = AsyncIterable[Any] | Iterable[Any]

# A source that never awaits gives way to the loop after this many bytes.
_GIVE_WAY_BYTES = 64 * 1024
# What a small value costs beyond its bytes.
_FRAME_BYTES = 64


class _InTurn:
    """A plain iterable as an asynchronous one; its items are there already."""

    def __init__(self, source: Iterable[Any]) -> None:
        self._iterator = iter(source)

    def __aiter__(self) -> _InTurn:
        return self

    async def __anext__(self) -> Any:
        for value in self._iterator:
            return value
        raise StopAsyncIteration

    async def aclose(self) -> None:
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()


def iterator_of(requests: object) -> AsyncIterator[Any]:
    """The values of an asynchronous or a plain iterable.

    Raises:
        TypeError: it is neither, or a text, a mapping or bytes: one request, not many.
    """
    if isinstance(requests, AsyncIterable):
        return requests.__aiter__()
    single = isinstance(requests, (str, bytes, bytearray, memoryview, dict))
    if single or not isinstance(requests, Iterable):
        raise TypeError(
            "argument 'requests': expected an iterable or asynchronous iterable of "
            f"requests, not {type(requests).__name__}"
        )
    return _InTurn(requests)


class Pump:
    """Moves values from one caller's iterator to one worker.

    Args:
        source: The caller's values.
        codec: How the worker reads them.
        context: The caller's context variables, which its generator expects.
        failed: Told what the source raised, or the value that cannot be sent.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        source: AsyncIterator[Any],
        context: contextvars.Context,
        failed: Callable[[Exception], None],
    ) -> None:
        self._loop = loop
        self._source = source
        self._context = context
        self._failed = failed
        self._sink: InputSink | None = None
        self._room: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._over = False

    @property
    def started(self) -> bool:
        """Whether a value may have been taken: then the call cannot move elsewhere."""
        return self._task is not None

    def start(self, sink: InputSink, codec: str) -> None:
        """The worker takes input now."""
        if not self._over and self._task is None:
            self._sink = sink
            self._task = spawn(self._loop, self._run(sink, codec), self._context)

    def made_room(self) -> None:
        """The worker caught up."""
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def stop(self) -> None:
        """Nobody takes more input: let go of the source, which runs its ``finally``."""
        if self._over:
            return
        self._over = True
        if self._task is None:
            self._task = spawn(self._loop, self._close(), self._context)
        elif self._task is not asyncio.current_task(self._loop):
            self._task.cancel()

    async def _run(self, sink: InputSink, codec: str) -> None:
        try:
            await self._move(sink, codec)
        except Exception as error:  # noqa: BLE001 - the caller's generator raises anything
            if not self._over:
                self._failed(error)
        else:
            if not self._over:
                sink.end()
        finally:
            self._over = True
            await self._close()

    async def _move(self, sink: InputSink, codec: str) -> None:
        unseen_bytes = 0
        async for value in self._source:
            body = encode_value(value, codec)
            if self._over:
                return
            sink.send(body)
            while sink.paused and not self._over:
                self._room = self._loop.create_future()
                await self._room
            unseen_bytes += len(body) + _FRAME_BYTES
            if unseen_bytes >= _GIVE_WAY_BYTES:
                unseen_bytes = 0
                await asyncio.sleep(0)

    async def _close(self) -> None:
        aclose = getattr(self._source, "aclose", None)
        if aclose is not None:
            await aclose()
