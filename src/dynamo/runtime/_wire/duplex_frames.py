"""The frames of the duplex lane: their types and payloads.

docs/design/duplex.md describes them byte by byte.  Knows no order among them: that is
`duplex`, the state machines.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec

from dynamo.runtime._wire.callhome import (
    MAX_CONTROL_BYTES,
    check_control,
    check_headers,
    check_message,
)

# At run time too: msgspec reads the annotations.
from dynamo.runtime._wire.faults import ErrorObject
from dynamo.runtime._wire.payload import UNREADABLE
from dynamo.runtime._wire.propagation import TraceContext, request_headers
from dynamo.runtime.errors import RemoteProtocolError

PREFACE = b"\xff\xff\xf5dyn\xf51"
VERSION = 1
CHUNK_BYTES = 256 * 1024
# A PART: the length of the whole message, and a chunk of it.
PART_HEAD_BYTES = 4
PART_BYTES = PART_HEAD_BYTES + CHUNK_BYTES
STREAM_CREDIT = 256 * 1024
CONNECTION_CREDIT = 16 * 1024 * 1024
MAX_CREDIT = 2**31

# Types of frames; those below HELLO are messages.
PART, REQUEST, INPUT, ITEM, ITEM_END, ERROR, HANDLER_REFUSED = range(1, 8)
HELLO, PING, PONG, CREDIT, GOAWAY = range(0x10, 0x15)
INPUT_END, STOP, KILL = range(0x20, 0x23)
QUEUED, ACCEPT, END, RESET, REFUSED = range(0x28, 0x2D)
FIRST_TO_IGNORE = 0x80

# Codes of REFUSED.
OVERLOADED, UNAVAILABLE, TOO_LARGE = 1, 2, 3
STREAMED_INPUT = 1

# So many characters fit into headers whatever they are, with six bytes for each.
_SHORT_CHARS = 8192

_HEADER = struct.Struct(">IBI")
HEADER_BYTES = _HEADER.size
pack_header = _HEADER.pack
unpack_header = _HEADER.unpack_from
_U32 = struct.Struct(">I")


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """What a side speaks and takes; also its own settings."""

    lowest: int = VERSION
    highest: int = VERSION
    stream_credit: int = STREAM_CREDIT
    connection_credit: int = CONNECTION_CREDIT
    max_message_bytes: int = 0


class RequestHead(msgspec.Struct, array_like=True):
    """What a request says about itself, in front of its value."""

    id: str
    path: str
    metadata: dict[str, str] | None = None
    trace: tuple[str | None, str | None, str | None] | None = None
    remaining_ms: int | None = None
    codec: str = "msgpack"
    flags: int = 0

    @property
    def streamed(self) -> bool:
        return bool(self.flags & STREAMED_INPUT)


class Refusal(msgspec.Struct, array_like=True):
    """Why a request was never started."""

    code: int
    text: str
    retry_after_ms: int | None = None


class HandlerRefusal(msgspec.Struct, array_like=True):
    """Why a handler could not be called."""

    text: str
    error: ErrorObject | None = None


_encode = msgspec.msgpack.Encoder().encode
_hello_in = msgspec.msgpack.Decoder(Hello).decode
_head_in = msgspec.msgpack.Decoder(RequestHead).decode
_refusal_in = msgspec.msgpack.Decoder(Refusal).decode
_handler_refusal_in = msgspec.msgpack.Decoder(HandlerRefusal).decode
_error_in = msgspec.msgpack.Decoder(ErrorObject).decode


def _read(decode: Callable[[Any], Any], payload: bytes | memoryview, what: str) -> Any:
    try:
        return decode(payload)
    except UNREADABLE as error:
        raise RemoteProtocolError(f"unreadable {what}: {error}") from error


def decode_hello(payload: bytes | memoryview) -> Hello:
    """The payload of HELLO.

    Raises:
        RemoteProtocolError: it is none, or its credit is not usable.
    """
    hello: Hello = _read(_hello_in, payload, "HELLO")
    for credit in (hello.stream_credit, hello.connection_credit):
        if not 0 < credit <= MAX_CREDIT:
            raise RemoteProtocolError(f"HELLO with a credit of {credit} bytes")
    return hello


def encode_request_front(
    head: RequestHead, value_bytes: int, max_message_bytes: int
) -> bytes:
    """The payload of REQUEST up to its value of that length.

    Raises:
        MessageTooLarge: the head, or all of it, is over its limit.
    """
    if head.trace is not None or len(head.id) + len(head.path) > _SHORT_CHARS:
        _check_as_headers(head)
    raw_head = _encode(head)
    front = _U32.pack(len(raw_head)) + raw_head
    size = len(front) + value_bytes
    if size > max_message_bytes or size > MAX_CONTROL_BYTES:
        check_control(len(raw_head))
        check_message(size, max_message_bytes)
    return front


def _check_as_headers(head: RequestHead) -> None:
    """No lane carries more than the other.

    Raises:
        MessageTooLarge: as headers of a call-home request it would be over their limit.
    """
    trace = head.trace or ()
    texts = (head.id, head.path, *(text for text in trace if text is not None))
    if sum(map(len, texts)) <= _SHORT_CHARS:
        return
    headers = request_headers(
        request_id=head.id,
        path=head.path,
        sent_ns=10**18,
        trace=TraceContext(*trace) if trace else None,
        remaining_ms=head.remaining_ms,
    )
    check_headers(len(msgspec.json.encode(headers)))


def decode_request(
    payload: bytes | memoryview,
) -> tuple[RequestHead, bytes | memoryview]:
    """Head and value of a request; the value of a large one is a view.

    Raises:
        RemoteProtocolError: the head is unreadable, too long, or has unknown flags.
    """
    if len(payload) < 4:
        raise RemoteProtocolError(f"a request of {len(payload)} bytes")
    end = 4 + _U32.unpack_from(payload)[0]
    if end > len(payload) or end > 4 + MAX_CONTROL_BYTES:
        raise RemoteProtocolError(
            f"a request of {len(payload)} bytes with a head of {end - 4}"
        )
    head: RequestHead = _read(_head_in, payload[4:end], "head of a request")
    if head.flags & ~STREAMED_INPUT:
        raise RemoteProtocolError(f"a request with unknown flags {head.flags:#x}")
    return head, payload[end:]


def encode_hello(hello: Hello) -> bytes:
    """The payload of HELLO."""
    return _encode(hello)


def encode_refusal(refusal: Refusal) -> bytes:
    """The payload of REFUSED."""
    return _encode(refusal)


def encode_error(error: ErrorObject) -> bytes:
    """The payload of ERROR."""
    return _encode(error)


def decode_error(payload: bytes | memoryview) -> ErrorObject:
    """The payload of ERROR.

    Raises:
        RemoteProtocolError: it is no error object.
    """
    error: ErrorObject = _read(_error_in, payload, "ERROR")
    return error


def encode_handler_refusal(text: str, error: ErrorObject | None) -> bytes:
    """The payload of HANDLER_REFUSED."""
    return _encode(HandlerRefusal(text, error))


def decode_handler_refusal(payload: bytes | memoryview) -> HandlerRefusal:
    """The payload of HANDLER_REFUSED.

    Raises:
        RemoteProtocolError: it is unreadable.
    """
    refusal: HandlerRefusal = _read(_handler_refusal_in, payload, "HANDLER_REFUSED")
    return refusal


def decode_refusal(payload: bytes | memoryview) -> Refusal:
    """The payload of REFUSED.

    Raises:
        RemoteProtocolError: it is unreadable.
    """
    refusal: Refusal = _read(_refusal_in, payload, "REFUSED")
    return refusal


def encode_number(number: int) -> bytes:
    """The payload of CREDIT and GOAWAY."""
    return _U32.pack(number)


def decode_number(payload: bytes | memoryview, what: str) -> int:
    """The payload of CREDIT and GOAWAY.

    Raises:
        RemoteProtocolError: it is of another length.
    """
    if len(payload) != 4:
        raise RemoteProtocolError(f"{what} with {len(payload)} bytes instead of 4")
    return int(_U32.unpack(payload)[0])


def encode_frame(kind: int, stream_id: int, payload: bytes | memoryview = b"") -> bytes:
    """A frame with its payload."""
    return pack_header(len(payload), kind, stream_id) + payload
