"""The worker's side of the genuine lane: a received request and the way back.

Opens the response connection to the client, speaks the response stream on it, and
reports what the client sends there.  Knows nothing of handlers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from dynamo.runtime._network import SOCKETS
from dynamo.runtime._sealed import override
from dynamo.runtime._transports import IncomingRequest
from dynamo.runtime._transports.connection import Connection, connect
from dynamo.runtime._wire.callhome import (
    PROBE,
    SENTINEL,
    BadRequest,
    Control,
    ControlHeader,
    InputEnded,
    InputReceived,
    RequestReceived,
    RequestStreamReceiver,
    decode_control,
    decode_request_payload,
    encode_final_frame,
    encode_handshake,
    encode_prologue,
    item_frame_pieces,
)
from dynamo.runtime._wire.payload import encode_annotated
from dynamo.runtime._wire.propagation import (
    read_remaining_ms,
    read_trace,
    sent_by_ours,
)
from dynamo.runtime._wire.records import split_host_port
from dynamo.runtime._wire.two_part import TwoPart, TwoPartReader
from dynamo.runtime.errors import ConnectionFailed, RemoteProtocolError

if TYPE_CHECKING:
    import asyncio

    from dynamo.runtime._network import Network
    from dynamo.runtime._transports import InputEvents, ReplyEvents
    from dynamo.runtime._transports.replies import Replies
    from dynamo.runtime._wire.faults import ErrorObject

_log = logging.getLogger("dynamo.runtime.callhome")

P = TypeVar("P", bound=Connection)

# How long a complete stream waits for the client to close, as in the genuine runtime:
# closing at once while a late "stop" lies unread would reset items not yet read.
_CLIENT_CLOSE_TIMEOUT_S = 10.0
# A client that closed its half may have gone altogether; only writing tells.
_FIRST_PROBES_S = 0.05
_LATER_PROBES_S = 1.0
_MAX_CONTROL_BYTES = 1024 * 1024
_CLOSE_TIMEOUT_S = 5.0


class CallhomeCall:
    """One request that came over a worker's port (an `IncomingCall`)."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        request: RequestReceived,
        replies: Replies,
        connect_timeout_s: float,
        network: Network = SOCKETS,
    ) -> None:
        assert request.path is not None
        self.path = request.path
        self._headers = request.headers
        self._loop = loop
        self._replies = replies
        self._payload = request.payload
        self._connect_timeout_s = connect_timeout_s
        self._network = network
        self._control: ControlHeader | None = None

    def decode(self) -> IncomingRequest:
        payload, self._payload = self._payload, b""
        try:
            control, body = decode_request_payload(payload)
        except BadRequest as error:
            self._control = error.control
            raise
        self._control = control
        remaining_ms = read_remaining_ms(self._headers)
        return IncomingRequest(
            call_id=control.id,
            metadata=control.metadata,
            codec=control.codec,
            body=body,
            trace=read_trace(self._headers),
            ours=sent_by_ours(self._headers),
            deadline=(
                None if remaining_ms is None else time.monotonic() + remaining_ms / 1000
            ),
        )

    def open_now(self, events: ReplyEvents) -> ReplyConnection | None:
        return None

    async def open(self, events: ReplyEvents) -> ReplyConnection:
        if self._control is None:
            raise ConnectionFailed("the request does not say where the answer goes")
        where, codec = self._control.response, self._control.codec
        return await self._dial(
            where.address,
            lambda: ReplyConnection(
                self._loop, self._replies, where.subject, codec, events
            ),
        )

    async def open_input(self, events: InputEvents) -> InputConnection:
        control = self._control
        if control is None or control.request_stream is None:
            raise ConnectionFailed(
                "the request does not say where its input comes from"
            )
        where, codec = control.request_stream, control.codec
        return await self._dial(
            where.address,
            lambda: InputConnection(self._loop, where.subject, codec, events),
        )

    async def _dial(self, address: str, factory: Callable[[], P]) -> P:
        try:
            host, port = split_host_port(address)
        except RemoteProtocolError as error:
            raise ConnectionFailed(
                str(error), facts={"reason": "the client announced no host:port"}
            ) from error
        return await connect(
            self._loop, factory, host, port, self._connect_timeout_s, self._network
        )


class InputConnection(Connection):
    """The connection on which a caller streams its input (an `InputStream`)."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        subject: str,
        codec: str,
        events: InputEvents,
    ) -> None:
        self._reader = TwoPartReader()
        super().__init__(loop, self._reader)
        self._subject = subject
        self._events = events
        self._receiver = RequestStreamReceiver(codec)
        self._over = False

    def pause(self) -> None:
        self.pause_reading()

    def resume(self) -> None:
        self.resume_reading()

    @override
    def close(self) -> None:
        self._over = True
        super().close()

    @override
    def opened(self) -> None:
        self.send(encode_handshake(self._subject, "request"))

    @override
    def received(self, data: bytes) -> None:
        self._arrived(self._reader.feed(data))

    @override
    def received_directly(self, size: int) -> None:
        self._arrived(self._reader.filled(size))

    def _arrived(self, frames: list[TwoPart]) -> None:
        for frame in frames:
            self._handle(self._receiver.receive(frame), len(frame.body))
        self._reader.check()

    def _handle(self, event: object, size_bytes: int) -> None:
        if self._over or event is None:
            return
        if isinstance(event, InputReceived):
            self._events.on_input(event.value, size_bytes)
        elif isinstance(event, InputEnded):
            self._over = True
            self._events.on_input_end()
        else:
            self._over = True
            self._events.on_stop(killed=event is Control.KILL)

    @override
    def lost(self, error: Exception | None) -> None:
        self._handle(self._receiver.receive_eof(), 0)


class ReplyConnection(Connection):
    """The connection home: a `ReplyStream` towards one client."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        replies: Replies,
        subject: str,
        codec: str,
        events: ReplyEvents,
    ) -> None:
        super().__init__(loop)
        self._subject = subject
        self._codec = codec
        self._replies = replies
        self._events = events
        self._reader = TwoPartReader(_MAX_CONTROL_BYTES)
        self._started = False
        # Nothing more is sent; if it is complete too, what was sent has an end mark.
        self._finished = False
        self._complete = False
        self._peer_finished = False
        self._timer: asyncio.TimerHandle | None = None

    # ReplyStream

    @property
    def codec(self) -> str:
        return self._codec

    @property
    def undelivered(self) -> bool:
        """Complete, and not yet handed to the socket as a whole."""
        return self._complete and self.paused

    def start(self) -> None:
        self._started = True
        self.send(encode_prologue())

    def refuse(self, text: str, error: ErrorObject) -> None:
        self.send(encode_prologue(text, error))
        self._end()

    def item(self, annotated: bytes) -> bool:
        self.send_pieces(item_frame_pieces(annotated, self._codec))
        return self.paused

    def fail(self, error: ErrorObject) -> None:
        self.item(
            encode_annotated(self._codec, event="error", error=error, has_data=False)
        )
        self.finish()

    def finish(self) -> None:
        self.send(encode_final_frame(self._codec))
        self._end()

    def _end(self) -> None:
        self.send(SENTINEL)
        self.flush()
        self._finished = self._complete = True
        # A slow reader may need any time for what lies in our buffer.
        self.pause_until_written()
        if self._peer_finished:
            self.close()
        else:
            self._await_client()

    def _await_client(self) -> None:
        if not self.paused:
            self._again_in(_CLIENT_CLOSE_TIMEOUT_S, self.abort)

    def drop(self) -> None:
        self._finished = True
        self.close()
        # A client that reads nothing would keep a half-sent stream for ever.
        self._again_in(_CLOSE_TIMEOUT_S, self.abort)

    # Connection

    @override
    def opened(self) -> None:
        self._replies.add(self)
        self.send(encode_handshake(self._subject))

    @override
    def received(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            if not self._finished:
                self._events.on_stop(killed=decode_control(frame) is Control.KILL)
        self._reader.check()

    @override
    def peer_finished(self) -> bool:
        if self._finished:
            return False
        self._peer_finished = True
        # FIN is no cancellation: a client may have nothing more to say.  But if it has
        # gone, a silent handler would never know; an empty frame, which every reader
        # skips, makes the kernel of a vanished client answer with a reset.
        self._probe(_FIRST_PROBES_S)
        return True

    def _probe(self, pause_s: float) -> None:
        if self._finished:
            return
        if self._started:
            self.send(PROBE)
            self.flush()
        self._again_in(pause_s, self._probe, _LATER_PROBES_S)

    def _again_in(self, pause_s: float, call: object, *args: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is None:
            # Lost: there is nothing to wait for, and a timer would keep the request.
            return
        self._timer = self._loop.call_later(pause_s, call, *args)  # type: ignore[arg-type]

    @override
    def lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._finished:
            self._events.on_stop(killed=True)
        self._replies.discard(self)
        self._events.on_writable()

    @override
    def writable(self) -> None:
        if self._finished and self.is_open:
            self._await_client()
            self._replies.look_again()
        self._events.on_writable()
