"""The worker's side of the genuine lane: a received request and the way back.

Opens the response connection to the client, speaks the response stream on it, and
reports what the client sends there.  Knows nothing of handlers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

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
    encode_item_frame,
    encode_prologue,
)
from dynamo.runtime._wire.propagation import read_trace, sent_by_ours
from dynamo.runtime._wire.records import split_host_port
from dynamo.runtime._wire.two_part import TwoPartReader
from dynamo.runtime.errors import ConnectionFailed

if TYPE_CHECKING:
    import asyncio

    from dynamo.runtime._transports import InputEvents, ReplyEvents
    from dynamo.runtime._wire.faults import ErrorObject

_log = logging.getLogger("dynamo.runtime.callhome")

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
        connect_timeout_s: float,
    ) -> None:
        assert request.path is not None
        self.path = request.path
        self.headers: Mapping[str, str] = request.headers
        self._loop = loop
        self._payload = request.payload
        self._connect_timeout_s = connect_timeout_s
        self._control: ControlHeader | None = None

    def decode(self) -> IncomingRequest:
        payload, self._payload = self._payload, b""
        try:
            control, body = decode_request_payload(payload)
        except BadRequest as error:
            self._control = error.control
            raise
        self._control = control
        return IncomingRequest(
            call_id=control.id,
            metadata=control.metadata,
            codec=control.codec,
            body=body,
            trace=read_trace(self.headers),
            ours=sent_by_ours(self.headers),
        )

    async def open(self, events: ReplyEvents) -> ReplyConnection:
        if self._control is None:
            raise ConnectionFailed("the request does not say where the answer goes")
        where = self._control.response
        host, port = split_host_port(where.address)
        codec = self._control.codec
        return await connect(
            self._loop,
            lambda: ReplyConnection(self._loop, where.subject, codec, events),
            host,
            port,
            self._connect_timeout_s,
        )

    async def open_input(self, events: InputEvents) -> InputConnection:
        control = self._control
        if control is None or control.request_stream is None:
            raise ConnectionFailed(
                "the request does not say where its input comes from"
            )
        host, port = split_host_port(control.request_stream.address)
        subject, codec = control.request_stream.subject, control.codec
        return await connect(
            self._loop,
            lambda: InputConnection(self._loop, subject, codec, events),
            host,
            port,
            self._connect_timeout_s,
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
        super().__init__(loop)
        self._subject = subject
        self._events = events
        self._reader = TwoPartReader()
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
        for frame in self._reader.feed(data):
            self._handle(self._receiver.receive(frame), len(frame.body))

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
        subject: str,
        codec: str,
        events: ReplyEvents,
    ) -> None:
        super().__init__(loop)
        self._subject = subject
        self._codec = codec
        self._events = events
        self._reader = TwoPartReader(_MAX_CONTROL_BYTES)
        self._started = False
        self._finished = False
        self._timer: asyncio.TimerHandle | None = None

    # ReplyStream

    def start(self) -> None:
        self._started = True
        self.send(encode_prologue())

    def refuse(self, text: str, error: ErrorObject) -> None:
        self.send(encode_prologue(text, error))
        self._end()

    def item(self, annotated: bytes) -> None:
        self.send(encode_item_frame(annotated, self._codec))

    def finish(self) -> None:
        self.send(encode_final_frame(self._codec))
        self._end()

    def _end(self) -> None:
        self.send(SENTINEL)
        self.flush()
        self._finished = True
        self._again_in(_CLIENT_CLOSE_TIMEOUT_S, self.abort)

    def drop(self) -> None:
        self._finished = True
        self.close()
        # A client that reads nothing would keep a half-sent stream for ever.
        self._again_in(_CLOSE_TIMEOUT_S, self.abort)

    # Connection

    @override
    def opened(self) -> None:
        self.send(encode_handshake(self._subject))

    @override
    def received(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            if not self._finished:
                self._events.on_stop(killed=decode_control(frame) is Control.KILL)

    @override
    def peer_finished(self) -> bool:
        if self._finished:
            return False
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
        self._timer = self._loop.call_later(pause_s, call, *args)  # type: ignore[arg-type]

    @override
    def lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._finished:
            self._events.on_stop(killed=True)
        self._events.on_writable()

    @override
    def writable(self) -> None:
        self._events.on_writable()
