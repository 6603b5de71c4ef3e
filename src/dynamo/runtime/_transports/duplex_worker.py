"""The worker's end of a duplex connection: its calls, their answers, their input.

Hands requests to those who serve their paths, and tells them what the caller does.
Knows nothing of handlers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dynamo.runtime._sealed import override
from dynamo.runtime._transports import Rejection
from dynamo.runtime._transports.direct_call import CallTaker, DirectCallSide
from dynamo.runtime._transports.duplex import DuplexConnection
from dynamo.runtime._wire.callhome import unknown_endpoint_text
from dynamo.runtime._wire.duplex import WRITABLE, WorkerSide
from dynamo.runtime._wire.duplex_frames import (
    CHUNK_BYTES,
    ERROR,
    HANDLER_REFUSED,
    INPUT,
    INPUT_END,
    ITEM,
    KILL,
    OVERLOADED,
    REQUEST,
    STOP,
    UNAVAILABLE,
    Hello,
    Refusal,
    encode_error,
    encode_handler_refusal,
)

if TYPE_CHECKING:
    import asyncio

    from dynamo.runtime._config import RuntimeConfig
    from dynamo.runtime._wire.duplex import Event, Stream
    from dynamo.runtime._wire.duplex_frames import RequestHead
    from dynamo.runtime._wire.faults import ErrorObject
    from dynamo.runtime._wire.framing import Memory


class DuplexServer(Protocol):
    """What a connection needs of the port that it came in on."""

    @property
    def memory(self) -> Memory:
        """Where large messages are put together."""

    def taker(self, path: str) -> CallTaker | None:
        """Who serves that path, for a request that has come."""

    def hung_up(self) -> None:
        """A connection has gone."""


class DuplexCall(DirectCallSide):
    """One call on a duplex connection.

    At once the `IncomingCall`, its `ReplyStream` and its `InputStream`: all three are
    faces of one stream of frames.
    """

    __slots__ = ("_connection", "_finished", "_said", "_started", "_stream")

    def __init__(
        self,
        connection: DuplexWorkerConnection,
        stream: Stream,
        head: RequestHead,
        body: bytes | memoryview,
    ) -> None:
        super().__init__(head, body)
        self._connection = connection
        self._stream = stream
        self._started = False
        # Something was said that acknowledges the request.
        self._said = False
        self._finished = False

    # ReplyStream

    @property
    def paused(self) -> bool:
        return bool(self._stream.queue) or self._connection.paused

    @property
    def undelivered(self) -> bool:
        """Complete, and a part of it waits for the caller to read."""
        return self._finished and bool(self._stream.queue)

    def start(self) -> None:
        # Said only if the handler is silent for now: an item says it too.
        self._started = True
        if self._said:
            self._connection.side.accept(self._stream)
            self._connection.touch()

    def acknowledge(self) -> None:
        """The first steps were taken: tell the caller if they said nothing."""
        if self._said or self._finished or self._gone is not None:
            return
        self._said = True
        if self._started:
            self._connection.side.accept(self._stream)
        else:
            self._connection.side.queued(self._stream)
        self._connection.touch()

    def item(self, annotated: bytes) -> bool:
        if self._gone:
            return False
        if not self._said:
            self._say(annotated)
        connection, stream = self._connection, self._stream
        side = connection.side
        side.send(stream, ITEM, annotated)
        if len(side.out) >= connection.flush_at:
            connection.touch()
        return connection.paused or bool(stream.queue)

    def _say(self, message: bytes) -> None:
        """What acknowledges the request may not take long to arrive as a whole."""
        self._said = True
        if len(message) > CHUNK_BYTES:
            self._connection.side.accept(self._stream)

    def finish(self) -> None:
        if not self._gone:
            self._connection.side.finish(self._stream)
            self._ended()

    def fail(self, error: ErrorObject) -> None:
        payload = encode_error(error)
        if not self._said and not self._gone:
            self._say(payload)
        self._end_with(ERROR, payload)

    def refuse(self, text: str, error: ErrorObject) -> None:
        self._end_with(HANDLER_REFUSED, encode_handler_refusal(text, error))

    def _end_with(self, kind: int, payload: bytes) -> None:
        if not self._gone:
            self._connection.side.end_with(self._stream, kind, payload)
            self._ended()

    def _ended(self) -> None:
        self._let_go()
        connection = self._connection
        if len(connection.side.out) >= connection.flush_at:
            connection.touch()
        if self._stream.queue and self.replies is not None:
            self.replies.add(self)

    def drop(self) -> None:
        self._connection.side.reset(self._stream)
        self._let_go()
        self._connection.touch()

    @override
    def _let_go(self) -> None:
        self._finished = True
        self._events = self._input = None
        if not self._stream.queue:
            self._stream.owner = None

    def abort(self) -> None:
        """The worker closes; nobody waits for the rest to be read."""
        self.drop()

    # InputStream

    def pause(self) -> None:
        self._connection.side.withhold(self._stream)

    def resume(self) -> None:
        self._connection.side.release(self._stream)
        self._connection.touch()

    # What the connection reports.

    @override
    def on_stop(self, *, killed: bool) -> None:
        super().on_stop(killed=killed)
        self._forget_if_delivered()

    @override
    def on_writable(self) -> None:
        super().on_writable()
        self._forget_if_delivered()

    def _forget_if_delivered(self) -> None:
        if self._finished and not self._stream.queue:
            self._stream.owner = None
            if self.replies is not None:
                self.replies.discard(self)


class DuplexWorkerConnection(DuplexConnection):
    """The worker's end of a duplex connection."""

    side: WorkerSide

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        config: RuntimeConfig,
        server: DuplexServer,
    ) -> None:
        hello = Hello(max_message_bytes=config.max_message_bytes)
        self.side = WorkerSide(hello, server.memory)
        super().__init__(loop, config, self.side)
        self._server = server
        self._new: list[DuplexCall] = []
        self._written: list[asyncio.Future[None]] = []

    def go_away(self) -> None:
        """Take no new calls on this connection."""
        self.side.go_away()
        self.touch()

    async def written(self) -> None:
        """Wait until all that was said has gone to the socket."""
        self.flush()
        self.pause_until_written()
        while self.paused and self.is_open:
            waiter = self._loop.create_future()
            self._written.append(waiter)
            await waiter

    @override
    def handle(self, events: list[Event]) -> None:
        for kind, stream, payload in events:
            if kind == REQUEST:
                assert stream is not None
                self._begin(stream, *payload)
            elif stream is not None and stream.owner is not None:
                self._tell(kind, stream.owner, payload)
        if self._new:
            # Behind the first steps of the handlers that were started just now.
            self._loop.call_soon(self._acknowledge)

    def _begin(
        self, stream: Stream, head: RequestHead, body: bytes | memoryview
    ) -> None:
        taker = self._server.taker(head.path)
        if taker is None:
            self._refuse(stream, Rejection(unknown_endpoint_text(head.path)))
            return
        call = stream.owner = DuplexCall(self, stream, head, body)
        rejection = taker.take_call(call)
        if rejection is None:
            self._new.append(call)
        else:
            stream.owner = None
            self._refuse(stream, rejection)

    def _refuse(self, stream: Stream, rejection: Rejection) -> None:
        pause_s = rejection.retry_after_s
        if pause_s is None:
            refusal = Refusal(UNAVAILABLE, rejection.text)
        else:
            pause_ms = max(round(pause_s * 1000), 1)
            refusal = Refusal(OVERLOADED, rejection.text, pause_ms)
        self.side.refuse(stream, refusal)

    def _tell(self, kind: int, call: DuplexCall, payload: bytes | memoryview) -> None:
        if kind == INPUT:
            call.on_input(payload)
        elif kind == INPUT_END:
            call.on_input_end()
        elif kind in (STOP, KILL):
            call.on_stop(killed=kind == KILL)
        elif kind == WRITABLE:
            call.on_writable()

    def _acknowledge(self) -> None:
        new, self._new = self._new, []
        for call in new:
            call.acknowledge()
        self.flush()

    @override
    def writable(self) -> None:
        for stream in list(self.side.streams.values()):
            if stream.owner is not None:
                stream.owner.on_writable()
        self._wake()

    def _wake(self) -> None:
        written, self._written = self._written, []
        for waiter in written:
            if not waiter.done():
                waiter.set_result(None)

    @override
    def lost(self, error: Exception | None) -> None:
        super().lost(error)
        for stream in self.side.lost():
            if stream.owner is not None:
                stream.owner.on_stop(killed=True)
        self._wake()
        self._server.hung_up()
