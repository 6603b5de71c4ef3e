"""Sends a caller's stream of requests: reads its iterator, encodes, waits for room.

Owns the caller's iterator until it is closed, which happens once, in the loop of the
caller.  Knows no lane; what becomes of the call is told to its owner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dynamo.runtime._calls.inbox import on_loop, soon_on_loop
from dynamo.runtime._transports.connection import spawn
from dynamo.runtime.errors import RuntimeClosed, StreamError

if TYPE_CHECKING:
    import contextvars

    from dynamo.runtime._transports import InputSink

_log = logging.getLogger("dynamo.runtime.egress")

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
        try:
            for value in self._iterator:
                return value
        except StopAsyncIteration as error:
            # It must not look like the end; a generator would say the same.
            raise RuntimeError("iterator raised StopAsyncIteration") from error
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
    single = isinstance(requests, (str, bytes, bytearray, memoryview, Mapping))
    if single or not isinstance(requests, Iterable):
        raise TypeError(
            "argument 'requests': expected an iterable or asynchronous iterable of "
            f"requests, not {type(requests).__name__}"
        )
    return _InTurn(requests)


class Pump:
    """Moves values from one caller's iterator to one worker, in one task.

    Args:
        loop: Where the iterator runs, and where every method is called.
        source: The caller's values.
        context: The caller's context variables, which its generator expects.
        failed: Told what the source raised, or why a value cannot be sent.
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
        self._room: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._started = False
        # Its source is being asked for a value, or there is no room for one.
        self._moving = False
        # Nothing more is sent.
        self._over = False

    @property
    def started(self) -> bool:
        """Whether a value may have been taken: then the call cannot move elsewhere."""
        return self._started

    def start(self, sink: InputSink) -> None:
        """The worker takes input now."""
        if not self._over and not self._started:
            self._started = True
            self._task = spawn(self._loop, self._run(sink), self._context)

    def made_room(self) -> None:
        """The worker caught up."""
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def stop(self) -> None:
        """Nobody takes more input: let go of the source, which runs its ``finally``."""
        if self._over:
            return
        self._be_over()
        if not self._started:
            self._started = True
            self._task = spawn(self._loop, self._close(), self._context)
        elif self._task in (None, asyncio.current_task(self._loop)):
            # The source itself has ended the call.  If it gives a value now it can be
            # closed like any other; only if it waits must it be interrupted.
            self._loop.call_soon(self._interrupt)
        else:
            self._interrupt()

    def _interrupt(self) -> None:
        # Never a task that has not begun: it would not get to close the source.
        if self._moving and self._task is not None:
            self._task.cancel()

    async def _run(self, sink: InputSink) -> None:
        try:
            self._moving = True
            if not self._over:
                await self._move(sink)
        except Exception as error:  # noqa: BLE001 - the caller's generator raises anything
            self._fail(error)
        except BaseException as error:
            # Not by us if the call goes on: it must not wait for more.
            if not self._over:
                self._fail(_cut_off(error))
            raise
        else:
            self._end(sink)
        finally:
            self._moving = False
            await self._close()

    async def _move(self, sink: InputSink) -> None:
        unseen_bytes = 0
        async for value in self._source:
            if self._over:
                return
            body = sink.encode(value)
            sink.send(body)
            while sink.paused and not self._over:
                self._room = self._loop.create_future()
                await self._room
            unseen_bytes += len(body) + _FRAME_BYTES
            if unseen_bytes >= _GIVE_WAY_BYTES:
                unseen_bytes = 0
                await asyncio.sleep(0)

    def _end(self, sink: InputSink) -> None:
        if not self._over:
            self._be_over()
            sink.end()

    def _fail(self, error: Exception) -> None:
        if self._over:
            _log.warning(
                "the stream of requests of a call failed after the call had ended",
                exc_info=error,
            )
        else:
            failed = self._failed
            self._be_over()
            failed(error)

    def _be_over(self) -> None:
        self._over = True
        # Whoever was to be told owns us: no cycle is left behind.
        self._failed = _tell_nobody

    async def _close(self) -> None:
        aclose = getattr(self._source, "aclose", None)
        if aclose is None:
            return
        try:
            await aclose()
        except Exception:  # noqa: BLE001 - the caller's cleanup may raise anything
            _log.exception(
                "the stream of requests of a call failed while it was being closed"
            )


def _tell_nobody(error: Exception) -> None:
    """Takes the place of the owner's call-back once the call is over."""


def _cut_off(cause: BaseException) -> StreamError:
    error = StreamError(
        f"Cancelled: the stream of requests ended in {type(cause).__name__}"
    )
    error.__cause__ = cause
    return error


class FarPump:
    """A pump for a source of another loop: it runs there, its owner and the worker here.

    Made in that loop.

    Args:
        home: Where every method is called, and where the sink belongs.
        source: The caller's values.
        context: The caller's context variables.
        failed: As for `Pump`; called at home.
    """

    def __init__(
        self,
        home: asyncio.AbstractEventLoop,
        source: AsyncIterator[Any],
        context: contextvars.Context,
        failed: Callable[[Exception], None],
    ) -> None:
        self._home = home
        self._failed = failed
        self._there = asyncio.get_running_loop()
        self._pump = Pump(self._there, source, context, self._failed_there)
        self.started = False

    def start(self, sink: InputSink) -> None:
        self.started = True
        far = _FarSink(self._home, sink, self._there, self._pump)
        try:
            self._there.call_soon_threadsafe(self._pump.start, far)
        except RuntimeError:
            self._failed(RuntimeClosed("the loop of the stream of requests was closed"))

    def made_room(self) -> None:
        soon_on_loop(self._there, self._pump.made_room)

    def stop(self) -> None:
        # Whoever asks may be in that loop: a call that ends before it is started.
        on_loop(self._there, self._pump.stop)

    def _failed_there(self, error: Exception) -> None:
        soon_on_loop(self._home, self._failed, error)


class _FarSink:
    """A sink of the home loop as the pump sees it from another one."""

    def __init__(
        self,
        home: asyncio.AbstractEventLoop,
        sink: InputSink,
        there: asyncio.AbstractEventLoop,
        pump: Pump,
    ) -> None:
        self._home = home
        self._sink = sink
        self._there = there
        self._pump = pump
        # On their way home.
        self._travelling_bytes = 0

    @property
    def paused(self) -> bool:
        return self._travelling_bytes >= _GIVE_WAY_BYTES or self._sink.paused

    def encode(self, value: object) -> bytes:
        return self._sink.encode(value)

    def send(self, body: bytes) -> None:
        self._travelling_bytes += len(body) + _FRAME_BYTES
        soon_on_loop(self._home, self._send, body)

    def end(self) -> None:
        soon_on_loop(self._home, self._sink.end)

    def _send(self, body: bytes) -> None:
        """At home."""
        self._sink.send(body)
        soon_on_loop(self._there, self._arrived, len(body) + _FRAME_BYTES)

    def _arrived(self, size_bytes: int) -> None:
        self._travelling_bytes -= size_bytes
        if not self.paused:
            self._pump.made_room()
