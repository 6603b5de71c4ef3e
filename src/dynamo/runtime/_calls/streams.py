"""What users iterate and send through: response streams, request streams, items.

The public objects; each is a thin handle on an inbox or on the core of a call, of which
it knows a small interface.
"""

from __future__ import annotations

import asyncio
from asyncio import current_task
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol, final

from dynamo.runtime._sealed import Unconstructible

if TYPE_CHECKING:
    from types import TracebackType

    from dynamo.runtime._calls.inbox import Inbox


class StreamCore(Protocol):
    """What a response stream needs of its call.

    Attributes:
        inbox: Its items.
        reader: The task that read last, as long as the call cares; any other is told of
            by `note_reader`.
    """

    inbox: Inbox
    reader: asyncio.Task[Any] | None

    @property
    def instance_id(self) -> int | None: ...

    def note_reader(self, reader: asyncio.Task[Any] | None) -> None: ...

    def cancel(self) -> None: ...

    def dropped(self) -> None: ...


@final
class AsyncResponseStream(Unconstructible):
    """The items of one call, in order; made by the request methods of a `Client`.

    Iterate it with ``async for``.  Each item is an `Annotated`, or the bare data if the
    call was made with ``annotated=False``.  An error of the handler or of the
    connection is raised in the place where the next item would be; after it, and after
    the end, the stream is exhausted.

    The call is cancelled, and the handler told so at once, when the stream is closed
    (`aclose`, `cancel`, the end of ``async with``), when the last reference to it goes,
    or when a task that reads it ends as cancelled.  Leaving a loop with ``break`` alone
    changes nothing: reading may go on.
    """

    __slots__ = ("_core",)

    _core: StreamCore

    @classmethod
    def _of(cls, core: StreamCore) -> AsyncResponseStream:
        self = cls.__new__(cls)
        self._core = core
        return self

    @property
    def instance_id(self) -> int | None:
        """The instance that answers, or None if the call was stopped before."""
        return self._core.instance_id

    def __aiter__(self) -> AsyncResponseStream:
        return self

    def __anext__(self) -> asyncio.Future[Any]:
        core = self._core
        inbox = core.inbox
        loop, reader = inbox.home, None
        if get_ident() == inbox.thread:
            # Only if that loop is running, here and now; to ask for the running loop
            # would ask the system for the process, too.
            reader = current_task(loop)
        if reader is None:
            loop = asyncio.get_running_loop()
            reader = current_task(loop)
        if reader is not core.reader and not inbox.ended:
            core.note_reader(reader)
        return inbox.next(loop, reader, self)

    def cancel(self) -> None:
        """Cancel the call now.  Items that were not read are lost.  Any thread."""
        self._core.cancel()

    async def aclose(self) -> None:
        """Cancel the call; the stream is exhausted afterwards."""
        self._core.cancel()

    async def __aenter__(self) -> AsyncResponseStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is not None and not core.inbox.ended:
            core.dropped()


class Steps(Protocol):
    """Where a `PyAsyncRequestStream` gets its values."""

    def step(self) -> asyncio.Future[Any]: ...


@final
class PyAsyncRequestStream(Unconstructible):
    """The values that a caller streams to a bidirectional handler, in order.

    Iterate it with ``async for``; it ends when the caller ends its input, and when the
    call is stopped (then the context says so).
    """

    __slots__ = ("_inbox",)

    _inbox: Steps

    @classmethod
    def _of(cls, inbox: Steps) -> PyAsyncRequestStream:
        self = cls.__new__(cls)
        self._inbox = inbox
        return self

    def __aiter__(self) -> PyAsyncRequestStream:
        return self

    def __anext__(self) -> asyncio.Future[Any]:
        return self._inbox.step()


class ItemSink(Protocol):
    """Where a `ResponseSender` puts what a push-mode handler sends."""

    def push(self, value: object) -> None: ...

    def push_end(self, message: str | None) -> None: ...


@final
class ResponseSender(Unconstructible):
    """Sends the items of a push-mode handler: one with a ``response_sender`` parameter.

    Such a handler is an async generator that yields nothing.
    """

    __slots__ = ("_sink",)

    _sink: ItemSink

    @classmethod
    def _of(cls, sink: ItemSink) -> ResponseSender:
        self = cls.__new__(cls)
        self._sink = sink
        return self

    def send(self, obj: Any) -> None:
        """Send one item, as if it were yielded.

        Raises:
            ValueError: it cannot be sent; the stream goes on.
            RuntimeError: after `close`, and when the caller has gone.
        """
        self._sink.push(obj)

    def close(self) -> None:
        """End the stream; again does nothing.  The end of the handler does it too."""
        self._sink.push_end(None)

    def close_with_error(self, msg: str) -> None:
        """End the stream with an error of class ``Internal`` for the caller."""
        self._sink.push_end(msg)
