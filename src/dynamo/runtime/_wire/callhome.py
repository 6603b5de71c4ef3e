"""The genuine lane: request frames and acks one way, a response connection per call back.

Owns every byte on these connections and the state machines that read them.  Dials
nobody, waits for nothing, and decides nothing about retries.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from dynamo.runtime._sealed import override
from dynamo.runtime._wire.faults import (
    ErrorObject,
    error_of_unreadable,
    is_of_known_form,
    settled,
)
from dynamo.runtime._wire.framing import FrameReader, Memory
from dynamo.runtime._wire.payload import (
    UNREADABLE,
    Annotated,
    decode_value,
    error_in,
)
from dynamo.runtime._wire.two_part import (
    TwoPart,
    decode_two_part,
    encode_two_part,
    two_part_prefix,
)
from dynamo.runtime.errors import MessageTooLarge, RemoteProtocolError

MAX_CONTROL_BYTES = 131072

OVERLOADED_TEXT = "Server overloaded: worker at capacity"
INVALID_PATH_TEXT = "Invalid endpoint path"
TOO_LARGE_TEXT = "Read error: message too large"

# The empty frame: every client's reader ignores it, and writing it notices a dead peer.
PROBE = encode_two_part()
STOP = encode_two_part(b'"stop"')
KILL = encode_two_part(b'"kill"')
SENTINEL = encode_two_part(b'"sentinel"')

_U16 = struct.Struct(">H")
_U32 = struct.Struct(">I")
_MAX_U16 = 0xFFFF
_MAX_ACK_BYTES = 65536
_TRANSPORT = "tcp_server"

_encode_json = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder().decode
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode


# --------------------------------------------------------------- request frames and acks


class RequestReceived(msgspec.Struct, gc=False):
    """A whole request frame.

    Attributes:
        path: The endpoint path, or None if it is not UTF-8.
        headers: Empty when they are not a JSON object of strings.
        payload: A two-part message for `decode_request_payload`; a view if it is large.
    """

    path: str | None
    headers: dict[str, str]
    payload: bytes | memoryview


class RequestTooLarge(msgspec.Struct, gc=False):
    """A frame over the limit.  The last event of a reader, which ignores what follows."""

    size_bytes: int
    max_bytes: int


class RequestReader(FrameReader[RequestReceived | RequestTooLarge]):
    """Cuts the worker's side of a request connection into requests.

    Args:
        max_message_bytes: Limit of a whole frame with all its fields.
        memory: As for every `FrameReader`.
    """

    __slots__ = ("_max_message_bytes", "_over")

    def __init__(self, max_message_bytes: int, *, memory: Memory | None = None) -> None:
        super().__init__(memory)
        self._max_message_bytes = max_message_bytes
        self._over = False

    @override
    def _cut(
        self,
        data: bytes | memoryview,
        events: list[RequestReceived | RequestTooLarge],
    ) -> tuple[int, int]:
        at = 0
        size = len(data)
        while not self._over:
            if size < at + 2:
                return at, 2
            path_end = at + 2 + _U16.unpack_from(data, at)[0]
            if size < path_end + 2:
                return at, path_end + 2 - at
            headers_end = path_end + 2 + _U16.unpack_from(data, path_end)[0]
            if size < headers_end + 4:
                return at, headers_end + 4 - at
            payload_at = headers_end + 4
            end = payload_at + _U32.unpack_from(data, headers_end)[0]
            if end - at > self._max_message_bytes:
                events.append(RequestTooLarge(end - at, self._max_message_bytes))
                self._over = True
            elif size < end:
                return at, end - at
            else:
                path = _utf8_or_none(data[at + 2 : path_end])
                headers = _read_headers(data[path_end + 2 : headers_end])
                events.append(RequestReceived(path, headers, data[payload_at:end]))
                at = end
        return size, 0


def _utf8_or_none(raw: bytes | memoryview) -> str | None:
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError:
        return None


def _read_headers(raw: bytes | memoryview) -> dict[str, str]:
    """As tolerant as the genuine worker: rubbish is no reason to refuse a request."""
    try:
        return _decode_headers(raw)
    except UNREADABLE:
        return {}


def encode_request_frame(
    path: str,
    headers: Mapping[str, str],
    payload: bytes | memoryview,
    *,
    max_message_bytes: int,
) -> bytes:
    """One request as the client sends it.

    Raises:
        MessageTooLarge: path, headers or the whole frame are over their limit.
    """
    front = encode_request_front(path, headers, len(payload), max_message_bytes)
    return front + payload


def encode_request_front(
    path: str, headers: Mapping[str, str], payload_bytes: int, max_message_bytes: int
) -> bytes:
    """The frame of a request up to its payload of that length.

    Raises:
        MessageTooLarge: path, headers or the whole frame are over their limit.
    """
    raw_path = path.encode()
    raw_headers = _encode_json(dict(headers))
    check_headers(len(raw_path), "a path")
    check_headers(len(raw_headers))
    size = 8 + len(raw_path) + len(raw_headers) + payload_bytes
    check_message(size, max_message_bytes)
    return b"".join(
        (
            _U16.pack(len(raw_path)),
            raw_path,
            _U16.pack(len(raw_headers)),
            raw_headers,
            _U32.pack(payload_bytes),
        )
    )


def check_headers(size: int, what: str = "headers") -> None:
    """Refuse to send a header, or a path, that a genuine peer could not be sent.

    Raises:
        MessageTooLarge: it is over its limit.
    """
    if size > _MAX_U16:
        raise MessageTooLarge(
            "InvalidRequest: Request cannot be encoded for this deployment. Reduce the "
            f"metadata size and retry. ({what} of {size} bytes, limit {_MAX_U16})"
        )


def check_message(size: int, max_message_bytes: int) -> None:
    """Refuse to send a request that is too large.

    Raises:
        MessageTooLarge: it is over the limit.
    """
    if size > max_message_bytes:
        raise MessageTooLarge(
            "InvalidRequest: Request payload is too large for this deployment. Reduce "
            f"the input size or metadata size and retry. ({size} bytes, limit "
            f"{max_message_bytes}: DYN_TCP_MAX_MESSAGE_SIZE)"
        )


def check_control(size: int) -> None:
    """Refuse to send a request that says too much about itself.

    Raises:
        MessageTooLarge: it is over the limit.
    """
    if size > MAX_CONTROL_BYTES:
        raise MessageTooLarge(
            f"Generic error: request control message too large: {size} bytes "
            f"exceeds limit {MAX_CONTROL_BYTES} (shorten the id or the metadata of the "
            "context)"
        )


def encode_ack(text: str = "") -> bytes:
    """The answer to one request frame; an empty text accepts it."""
    raw = text.encode()
    return _U32.pack(len(raw)) + raw


def unknown_endpoint_text(path: str) -> str:
    """The ack for a path without handler."""
    return f"Server unavailable: unknown endpoint {path}"


def too_large_text(size_bytes: int, max_bytes: int) -> str:
    """The ack for a frame over the limit, after which the connection is closed."""
    return f"{TOO_LARGE_TEXT}: {size_bytes} bytes (max: {max_bytes} bytes)"


class AckReceived(msgspec.Struct, gc=False):
    """The worker's answer to the oldest unanswered request of the connection."""

    text: str

    @property
    def refusal(self) -> Literal["overloaded", "unavailable", "unreadable"] | None:
        """Why the request was refused.  Any other text means accepted.

        The genuine client takes the last one for accepted, too, and waits for ever.
        """
        if self.text.startswith("Server overloaded:"):
            return "overloaded"
        if self.text.startswith("Server unavailable:"):
            return "unavailable"
        if self.text.startswith("Read error:"):
            return "unreadable"
        return None


class AckReader(FrameReader[AckReceived]):
    """Cuts the client's side of a request connection into acks."""

    __slots__ = ()

    @override
    def _cut(
        self, data: bytes | memoryview, events: list[AckReceived]
    ) -> tuple[int, int]:
        self._refuse_if_broken()
        at = 0
        size = len(data)
        while size - at >= 4:
            length = _U32.unpack_from(data, at)[0]
            if length > _MAX_ACK_BYTES:
                raise RemoteProtocolError(
                    f"an ack of {length} bytes is over the limit of {_MAX_ACK_BYTES}"
                )
            if size - at < 4 + length:
                return at, 4 + length
            text_at = at + 4
            at = text_at + length
            events.append(AckReceived(str(data[text_at:at], "utf-8", "replace")))
        return at, 4


# -------------------------------------------------------------- the payload of a request


class ConnectionInfo(msgspec.Struct, gc=False):
    """Where the worker dials in for one stream, and what it says there."""

    address: str
    subject: str
    context: str
    stream_type: str


class ControlHeader(msgspec.Struct):
    """What a request says about itself, in front of its body.

    Attributes:
        id: The context's id.
        codec: Of the body, of all items and of the input.
        response: The stream on which the caller wants the answer.
        request_type: ``single_in``, or ``many_in`` for a stream of input.
        request_stream: Where the input of a ``many_in`` call comes from.
    """

    id: str
    codec: str
    response: ConnectionInfo
    metadata: dict[str, str] = {}
    request_type: str = "single_in"
    request_stream: ConnectionInfo | None = None


class BadRequest(RemoteProtocolError):
    """A payload that cannot be served.

    Attributes:
        control: What could be read of it, enough to dial the caller and tell it; or None.
    """

    def __init__(self, text: str = "", *, control: ControlHeader | None = None) -> None:
        super().__init__(text)
        self.control = control


class _Carrier(msgspec.Struct):
    """A connection info as it travels: JSON in a string."""

    transport: str
    info: str


class _WrittenControl(msgspec.Struct):
    id: str
    connection_info: _Carrier
    request_type: str = "single_in"
    payload_codec: str = "json"
    metadata: dict[str, str] | None = None
    request_stream_connection_info: _Carrier | None = None


class _WayBack(msgspec.Struct):
    """The least that must be readable for an answer."""

    connection_info: _Carrier


_decode_control_header = msgspec.json.Decoder(_WrittenControl).decode
_decode_way_back = msgspec.json.Decoder(_WayBack).decode
_decode_connection = msgspec.json.Decoder(ConnectionInfo).decode


def encode_request_payload(
    control: ControlHeader, body: bytes | memoryview | None
) -> bytes:
    """The two-part message of a request; None sends the control header only.

    Raises:
        MessageTooLarge: id and metadata make the control header too long.
    """
    value = body or b""
    return encode_payload_front(control, len(value)) + value


def encode_payload_front(control: ControlHeader, body_bytes: int) -> bytes:
    """That message up to its body of that length.

    Raises:
        MessageTooLarge: id and metadata make the control header too long.
    """
    members: dict[str, object] = {
        "id": control.id,
        "request_type": control.request_type,
        "response_type": "many_out",
        "payload_codec": control.codec,
        "connection_info": _carried(control.response),
    }
    if control.metadata:
        members["metadata"] = dict(sorted(control.metadata.items()))
    if control.request_stream is not None:
        members["request_stream_connection_info"] = _carried(control.request_stream)
    header = _encode_json(members)
    check_control(len(header))
    return two_part_prefix(len(header), body_bytes) + header


def _carried(connection: ConnectionInfo) -> _Carrier:
    return _Carrier(_TRANSPORT, _encode_json(connection).decode())


def decode_request_payload(
    payload: bytes | memoryview,
) -> tuple[ControlHeader, bytes | memoryview | None]:
    """Control header and body of a request; the body is None when there is none.

    Raises:
        BadRequest: it cannot be served; the text names what is wrong.
    """
    try:
        message = decode_two_part(payload)
    except RemoteProtocolError as error:
        raise BadRequest(str(error)) from error
    written = _read_control(message.header)
    control = ControlHeader(
        id=written.id,
        codec=written.payload_codec,
        response=_read_connection(written.connection_info),
        metadata=written.metadata or {},
        request_type=written.request_type,
    )
    _check_control(control)
    if written.request_stream_connection_info is not None:
        control.request_stream = _read_connection(
            written.request_stream_connection_info, control
        )
    return control, message.body or None


def _read_control(header: bytes | memoryview) -> _WrittenControl:
    try:
        return _decode_control_header(header)
    except UNREADABLE as error:
        raise BadRequest(
            f"invalid request control message: {error}", control=_way_back(header)
        ) from error


def _way_back(header: bytes | memoryview) -> ControlHeader | None:
    """A control header that is good for an error answer and nothing else."""
    try:
        response = _read_connection(_decode_way_back(header).connection_info)
    except (*UNREADABLE, BadRequest):
        return None
    return ControlHeader(id=response.context, codec="json", response=response)


def _read_connection(
    carrier: _Carrier, control: ControlHeader | None = None
) -> ConnectionInfo:
    if carrier.transport != _TRANSPORT:
        raise BadRequest(
            f"unsupported response transport '{carrier.transport}'", control=control
        )
    try:
        return _decode_connection(carrier.info)
    except UNREADABLE as error:
        raise BadRequest(
            f"invalid connection info: {error}", control=control
        ) from error


def _check_control(control: ControlHeader) -> None:
    if control.codec not in ("msgpack", "json"):
        unknown, control.codec = control.codec, "json"
        raise BadRequest(f"unknown payload codec '{unknown}'", control=control)
    if control.response.context != control.id:
        raise BadRequest(
            f"the connection info is for context '{control.response.context}', the "
            f"request for '{control.id}'",
            control=control,
        )


# --------------------------------------------------------------------- opening a stream


class Handshake(msgspec.Struct):
    """The first frame on a connection that a worker opens to a client."""

    subject: str
    stream_type: Literal["response", "request"]


class _Prologue(msgspec.Struct):
    """The second; the typed error is Raw, because an unreadable one is ignored."""

    error: str | None = None
    typed_error: msgspec.Raw = msgspec.Raw(b"null")


_decode_handshake = msgspec.json.Decoder(Handshake).decode
_decode_prologue = msgspec.json.Decoder(_Prologue).decode
_decode_error = msgspec.json.Decoder(ErrorObject | None).decode


def encode_handshake(
    subject: str, stream_type: Literal["response", "request"] = "response"
) -> bytes:
    """What the worker says first on a connection that it opened to the client."""
    return encode_two_part(_encode_json(Handshake(subject, stream_type)))


def decode_handshake(frame: TwoPart) -> Handshake:
    """Which stream a connection is for.

    Raises:
        RemoteProtocolError: this is no handshake.
    """
    if frame.body:
        raise RemoteProtocolError("a handshake has no body")
    try:
        return _decode_handshake(frame.header)
    except UNREADABLE as error:
        raise RemoteProtocolError(f"invalid handshake: {error}") from error


def encode_prologue(
    error: str | None = None, typed_error: ErrorObject | None = None
) -> bytes:
    """The answer of the handler's call as such: no error, or why there is no stream."""
    members: dict[str, object] = {"error": error}
    if typed_error is not None:
        members["typed_error"] = typed_error
    return encode_two_part(_encode_json(members))


def encode_item_frame(annotated: bytes, codec: str) -> bytes:
    """A frame around an envelope of `encode_annotated`, glued and not encoded again."""
    return b"".join(item_frame_pieces(annotated, codec))


def item_frame_pieces(annotated: bytes, codec: str) -> tuple[bytes, bytes, bytes]:
    """What the frame is glued from; a large envelope is sent without a copy."""
    head, tail = _AROUND_JSON if codec == "json" else _AROUND_MSGPACK
    size = len(head) + len(annotated) + len(tail)
    return two_part_prefix(0, size) + head, annotated, tail


def encode_final_frame(codec: str) -> bytes:
    """The mark that all items were sent."""
    return _FINAL_JSON if codec == "json" else _FINAL_MSGPACK


_AROUND_JSON = b'{"data":', b',"complete_final":false}'
_AROUND_MSGPACK = b"\x82\xa4data", b"\xaecomplete_final\xc2"
_FINAL_JSON = encode_two_part(body=b'{"complete_final":true}')
_FINAL_MSGPACK = encode_two_part(body=b"\x81\xaecomplete_final\xc3")


# -------------------------------------------------- the response stream, client's side


class PrologueReceived(msgspec.Struct):
    """The handler was called, or `error` says why not."""

    error: str | None
    typed_error: ErrorObject | None


class ErrorReceived(msgspec.Struct):
    """The stream failed; nothing of it follows."""

    error: ErrorObject


class StreamEnded(msgspec.Struct):
    """The stream is complete, or ended because it was stopped."""


class StreamLost(msgspec.Struct):
    """The worker went away before the stream was complete."""


class ProtocolViolated(msgspec.Struct):
    """The worker sent what it may not: send `KILL`, close, treat the stream as lost."""

    text: str


ResponseEvent = (
    PrologueReceived
    | Annotated
    | ErrorReceived
    | StreamEnded
    | StreamLost
    | ProtocolViolated
)


class _State(enum.Enum):
    PROLOGUE = enum.auto()
    ITEMS = enum.auto()
    ENDING = enum.auto()
    ENDED = enum.auto()
    OVER = enum.auto()


class _Body(msgspec.Struct, gc=False):
    """The body of a data frame, decoded once together with the item in it."""

    complete_final: bool
    data: Annotated | None = None


_BODY_DECODERS = {
    "msgpack": msgspec.msgpack.Decoder(_Body).decode,
    "json": msgspec.json.Decoder(_Body).decode,
}


class ResponseReceiver:
    """What the frames of a response connection, after the handshake, mean to the client.

    States, and what leaves them (everything unnamed changes nothing; the empty frame
    is ignored in all of them)::

        PROLOGUE  a header-only object without error  -> ITEMS, PrologueReceived
                  one with error, or anything else    -> OVER, PrologueReceived(error)
        ITEMS     data                                -> Annotated
                  data of an error item, not readable,
                  or empty                            -> OVER, ErrorReceived
                  the final mark                      -> ENDED, StreamEnded
                  the final mark with data            -> ENDING, Annotated
                  "sentinel"                          -> OVER, StreamLost
                  any other header                    -> OVER, ProtocolViolated
        ENDING    "sentinel"                          -> OVER, StreamEnded
        ENDING and ENDED
                  data                                -> OVER, ErrorReceived
                  a header other than "sentinel"      -> OVER, ProtocolViolated

    End of file is StreamLost in PROLOGUE and ITEMS, StreamEnded in ENDING, nothing later.

    StreamEnded comes with the final mark already, for a worker that then keeps silent
    would otherwise hold the caller for ever.  The owner closes the connection on it, and
    need not look at the sentinel; if it has more frames in hand, it may go on feeding them.
    No genuine worker puts data beside the final mark, hence the detour over ENDING;
    `complete` tells an owner who wants to close at once.

    Args:
        codec: Of the request, and so of the items.

    Attributes:
        stopped: Set by the owner once it has sent `STOP`: then a worker closes without
            more ado, and the end of file or a lone sentinel is StreamEnded.
    """

    __slots__ = ("_decode", "_state", "stopped")

    def __init__(self, codec: str) -> None:
        self._decode = _BODY_DECODERS[codec]
        self._state = _State.PROLOGUE
        self.stopped = False

    @property
    def complete(self) -> bool:
        """True once the final mark was seen."""
        return self._state in (_State.ENDING, _State.ENDED)

    def receive(self, frame: TwoPart) -> ResponseEvent | None:
        """What one frame means, if anything."""
        if not frame.header:
            if not frame.body:
                return None
            if self._state is _State.ITEMS:
                return self._receive_item(frame.body)
        if self._state is _State.PROLOGUE:
            return self._receive_prologue(frame)
        if self._state is _State.OVER:
            return None
        if frame.header:
            return self._receive_header(frame)
        self._state = _State.OVER
        return _internal_error(
            "Response received after generation ended - this should never happen"
        )

    def receive_eof(self) -> StreamEnded | StreamLost | None:
        """What the end of the connection means, if anything."""
        state, self._state = self._state, _State.OVER
        if state in (_State.ENDED, _State.OVER):
            return None
        if state is _State.ENDING or self.stopped:
            return StreamEnded()
        return StreamLost()

    def _receive_prologue(self, frame: TwoPart) -> PrologueReceived:
        event = _read_prologue(frame)
        self._state = _State.ITEMS if event.error is None else _State.OVER
        return event

    def _receive_item(self, raw: bytes | memoryview) -> ResponseEvent:
        try:
            body = self._decode(raw)
        except UNREADABLE as error:
            return self._fail(_internal_error(str(error)))
        item = body.data
        if body.complete_final:
            self._state = _State.ENDED if item is None else _State.ENDING
            if item is None:
                return StreamEnded()
        elif item is None:
            return self._fail(
                _internal_error("Empty response received - this should never happen")
            )
        if item.event() == "error":
            return self._fail(_error_of_item(item))
        return item

    def _fail(self, event: ErrorReceived) -> ErrorReceived:
        self._state = _State.OVER
        return event

    def _receive_header(self, frame: TwoPart) -> ResponseEvent | None:
        state = self._state
        if _word(frame) == "sentinel":
            if state is _State.ITEMS or state is _State.ENDING:
                return self.receive_eof()
            return None
        self._state = _State.OVER
        shown = str(frame.header[:80], "utf-8", "replace")
        extra = f" with {len(frame.body)} bytes of data" if frame.body else ""
        return ProtocolViolated(f"unexpected header {shown!r}{extra} in a stream")


def _word(frame: TwoPart) -> object:
    """The control word of a header-only frame; None for anything else."""
    if frame.body:
        return None
    try:
        word: object = _decode_json(frame.header)
    except UNREADABLE:
        return None
    return word


def _read_prologue(frame: TwoPart) -> PrologueReceived:
    if frame.body:
        return PrologueReceived(
            "malformed prologue: expected HeaderOnly ControlMessage", None
        )
    try:
        prologue = _decode_prologue(frame.header)
    except UNREADABLE as error:
        return PrologueReceived(f"malformed prologue: {error}", None)
    return PrologueReceived(prologue.error, _read_typed_error(prologue.typed_error))


def _read_typed_error(raw: msgspec.Raw) -> ErrorObject | None:
    """A typed error of a form that we do not know is as good as none."""
    try:
        error = _decode_error(raw)
    except UNREADABLE:
        return None
    return settled(error) if error is not None and is_of_known_form(error) else None


def _error_of_item(item: Annotated) -> ErrorReceived:
    error = error_in(item)
    if error is not None:
        return ErrorReceived(settled(error))
    return _internal_error(", ".join(item.comments() or ()) or "unknown error")


def _internal_error(text: str) -> ErrorReceived:
    return ErrorReceived(error_of_unreadable(text))


# ------------------------------------------------------------------ the worker's side


class Control(enum.Enum):
    """What a client tells a worker about a running call."""

    STOP = "stop"
    KILL = "kill"


def decode_control(frame: TwoPart) -> Control:
    """What a worker makes of a frame on its response connection: rubbish kills."""
    return Control.STOP if _word(frame) == "stop" else Control.KILL


class InputReceived(msgspec.Struct, gc=False):
    """The next value of the caller's input."""

    value: Any


class InputEnded(msgspec.Struct):
    """The caller has no more input."""


class RequestStreamReceiver:
    """What the frames of a request-stream connection mean to the worker.

    Open: a data frame is InputReceived; ``"sentinel"`` is InputEnded, ``"stop"`` is STOP;
    everything else, the empty frame, an unreadable value and the end of the connection
    included, is KILL.  The last three close it, and nothing means anything then.

    Args:
        codec: Of the request, and so of the input.
    """

    __slots__ = ("_codec", "_open")

    def __init__(self, codec: str) -> None:
        self._codec = codec
        self._open = True

    def receive(self, frame: TwoPart) -> InputReceived | InputEnded | Control | None:
        """What one frame means; None after the end."""
        if not self._open:
            return None
        if frame.body and not frame.header:
            try:
                return InputReceived(decode_value(frame.body, self._codec))
            except RemoteProtocolError:
                return self.receive_eof()
        self._open = False
        return InputEnded() if _word(frame) == "sentinel" else decode_control(frame)

    def receive_eof(self) -> Control | None:
        """KILL if the connection ended before the input did: the caller is gone."""
        was_open, self._open = self._open, False
        return Control.KILL if was_open else None


def encode_input_frame(value_bytes: bytes) -> bytes:
    """One value of the input, as `encode_value` made it."""
    return b"".join(input_frame_pieces(value_bytes))


def input_frame_pieces(value_bytes: bytes) -> tuple[bytes, bytes]:
    """What the frame is glued from; a large value is sent without a copy."""
    return two_part_prefix(0, len(value_bytes)), value_bytes
