"""What goes out for a call, on whatever lane, and the errors that all of them have.

Owns how a request is packed for its instance and measured, and the words of refusals.
Knows no connection.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from dynamo.runtime._wire.callhome import OVERLOADED_TEXT, too_large_text
from dynamo.runtime._wire.duplex_frames import (
    STREAMED_INPUT,
    RequestHead,
    encode_request_front,
)
from dynamo.runtime._wire.payload import encode_value, genuine_can_decode
from dynamo.runtime._wire.records import TcpAddress, split_tcp_address
from dynamo.runtime.errors import (
    CallError,
    CallTimeout,
    MessageTooLarge,
    Overloaded,
    Refused,
    RemoteProtocolError,
    StreamError,
)

if TYPE_CHECKING:
    from dynamo.runtime._transports import CallRequest
    from dynamo.runtime._wire.records import EndpointRecord

LOST_TEXT = "Stream ended before generation completed"

# The wire knows no less.
_LEAST_LEFT_S = 0.001
# In milliseconds it has 15 digits, which is what readers take.
_MOST_LEFT_S = 999_999_999_999


def callable_address(record: EndpointRecord) -> TcpAddress:
    """Where an instance is called, on whatever lane.

    Raises:
        CallError: it cannot be called over TCP.
    """
    if record.transport_kind != "tcp":
        raise CallError(
            f"Invalid TCP address '{record.address}': invalid socket address syntax "
            f"(the instance serves on {record.transport_kind}, this client calls on "
            "tcp: use the same request plane on both sides)",
            instance_id=record.instance_id,
        )
    try:
        return split_tcp_address(record.address)
    except RemoteProtocolError as error:
        raise CallError(str(error), instance_id=record.instance_id) from error


def remaining_ms(request: CallRequest) -> int | None:
    """What a call that is sent now says of its time; None if it has no deadline.

    Raises:
        CallTimeout: nothing is left.
    """
    if request.deadline == math.inf:
        return None
    left_s = request.deadline - time.monotonic()
    if left_s < _LEAST_LEFT_S:
        raise CallTimeout(
            "DeadlineExceeded: the deadline of the call passed before it was sent",
            phase="send",
            facts={"limit": "deadline", "seconds": left_s, "items": 0},
        )
    # Rounded up: the caller is to be the first to know.
    return math.ceil(min(left_s, _MOST_LEFT_S) * 1000)


def encode_for(
    record: EndpointRecord, value: object, packed: bytes, kind: type[CallError]
) -> bytes:
    """A request or a value of streamed input for this instance.

    Args:
        packed: The value in MessagePack.
        kind: What to raise.

    Raises:
        CallError: the instance cannot read the value.
    """
    if record.codec == "msgpack":
        reason = None if record.ours else genuine_can_decode(value)
        if reason is not None:
            raise kind(
                f"InvalidRequest: the worker cannot decode this request: {reason}",
                phase="send",
                instance_id=record.instance_id,
            )
        return packed
    try:
        return encode_value(value, record.codec)
    except (TypeError, ValueError, OverflowError) as error:
        raise kind(
            f"InvalidRequest: the request cannot be encoded as {record.codec}, which "
            f"instance {record.instance_id:x} asks for: {error}",
            phase="send",
            instance_id=record.instance_id,
        ) from error


class EncodesInput:
    """The part of an `InputSink` that is the same on every lane."""

    __slots__ = ()

    _record: EndpointRecord

    def encode(self, value: object) -> bytes:
        packed = encode_value(value, "msgpack")
        return encode_for(self._record, value, packed, StreamError)


def pack_request(
    record: EndpointRecord,
    path: str,
    request: CallRequest,
    limit_bytes: int,
    limit_there_bytes: int,
) -> tuple[RequestHead, bytes, bytes | None]:
    """A request on the lanes that are our own.

    Args:
        path: The path of the record's address.
        limit_bytes: How large it may be, as we say.
        limit_there_bytes: How large it may be, as the worker says.

    Returns:
        Its head, the payload up to the value, and the value; None if it is streamed.

    Raises:
        MessageTooLarge: it is over one of the limits.
        CallTimeout: its deadline has passed.
        CallError: the instance cannot read the value.
    """
    body = request.packed
    if body is not None and not (record.ours and record.codec == "msgpack"):
        body = encode_for(record, request.value, body, CallError)
    head = RequestHead(
        request.call_id,
        path,
        request.metadata or None,
        request.trace,
        remaining_ms(request),
        record.codec,
        STREAMED_INPUT if body is None else 0,
    )
    body_bytes = len(body or b"")
    front = encode_request_front(head, body_bytes, limit_bytes)
    size = len(front) + body_bytes
    if size > limit_there_bytes:
        raise too_large_there(too_large_text(size, limit_there_bytes))
    return head, front, body


def overloaded(text: str, retry_after_s: float = 1.0) -> Overloaded:
    """The worker is full, or one of its endpoints, which says so."""
    settings = "DYN_TCP_WORKER_POOL_SIZE, DYN_TCP_WORK_QUEUE_SIZE (of the worker)"
    if text != OVERLOADED_TEXT:
        settings = text.partition(": ")[2]
    return Overloaded(
        f"CapacityExhausted: {text}",
        retry_after=retry_after_s,
        facts={"limit": settings},
    )


def too_large_there(text: str) -> MessageTooLarge:
    """The worker allows less than we do."""
    return MessageTooLarge(
        f"InvalidRequest: {text}: reduce the request, or raise "
        "DYN_TCP_MAX_MESSAGE_SIZE of the worker",
        phase="ack",
    )


def draining(record: EndpointRecord, text: str = "") -> Refused:
    """The worker takes no new calls, or not this one."""
    path = callable_address(record).path
    text = text or f"Server unavailable: endpoint {path} is draining"
    return Refused(f"Unavailable: {text}", instance_id=record.instance_id)
