"""A call whose answer goes back the way on which its request came.

What the worker's sides of such lanes have in common: looking into the request, the
caller's input, its stops.  Knows neither frames nor who serves the path.
"""

from __future__ import annotations

import abc
import sys
import time
from typing import TYPE_CHECKING, Protocol

from dynamo.runtime._transports import IncomingCall, IncomingRequest, Rejection
from dynamo.runtime._wire.payload import decode_value
from dynamo.runtime._wire.propagation import (
    TRACEPARENT,
    TRACESTATE,
    X_REQUEST_ID,
    read_trace,
)
from dynamo.runtime.errors import RemoteProtocolError

if TYPE_CHECKING:
    from typing_extensions import Self

    from dynamo.runtime._transports import InputEvents, ReplyEvents
    from dynamo.runtime._transports.replies import Replies
    from dynamo.runtime._wire.duplex_frames import RequestHead
    from dynamo.runtime._wire.propagation import TraceContext


class DirectCall(IncomingCall, Protocol):
    """A request whose answer needs no connection of its own."""

    replies: Replies | None
    """Where an answer that is complete and not yet out is known; set by who takes the
    call."""


class CallTaker(Protocol):
    """Who serves a path."""

    def take_call(self, call: DirectCall) -> Rejection | None:
        """Take a call, or say why not."""


class DirectCallSide(abc.ABC):
    """The `IncomingCall` of such a lane, and what the caller does with it.

    The lane's own class adds the `ReplyStream` and the rest of the `InputStream`.
    """

    __slots__ = (
        "_events",
        "_gone",
        "_input",
        "_request",
        "codec",
        "path",
        "replies",
    )

    def __init__(self, head: RequestHead, body: bytes | memoryview) -> None:
        # As the endpoint has it: one text for all its calls.
        self.path = sys.intern(head.path)
        self.codec = "json" if head.codec == "json" else "msgpack"
        self.replies: Replies | None = None
        # Until it was looked into.
        self._request: tuple[RequestHead, bytes | memoryview] | None = (head, body)
        self._events: ReplyEvents | None = None
        self._input: InputEvents | None = None
        # The caller has stopped the call (False), or has gone (True).
        self._gone: bool | None = None

    @abc.abstractmethod
    def _let_go(self) -> None:
        """Nothing more is told.  They hold us: no cycle is left behind."""

    # IncomingCall

    def decode(self) -> IncomingRequest:
        assert self._request is not None
        (head, body), self._request = self._request, None
        if head.codec not in ("msgpack", "json"):
            raise RemoteProtocolError(f"unknown payload codec '{head.codec}'")
        return IncomingRequest(
            call_id=head.id,
            metadata=head.metadata or {},
            codec=head.codec,
            body=None if head.streamed else body,
            trace=_trace_of(head),
            ours=True,
            deadline=_deadline_of(head),
        )

    def open_now(self, events: ReplyEvents) -> Self:
        if not self._tell_if_gone(events):
            self._events = events
        return self

    async def open(self, events: ReplyEvents) -> Self:
        return self.open_now(events)

    async def open_input(self, events: InputEvents) -> Self:
        if not self._tell_if_gone(events):
            self._input = events
        return self

    def _tell_if_gone(self, events: ReplyEvents | InputEvents) -> bool:
        """The end may have come before the first step; whether that was all."""
        if self._gone is not None:
            events.on_stop(killed=self._gone)
        return self._gone is True

    # InputStream

    def close(self) -> None:
        """No more input is wanted; the end of the answer tells the caller."""
        self._input = None

    # What the caller does.

    def on_input(self, body: bytes | memoryview) -> None:
        if self._input is None:
            return
        try:
            value = decode_value(body, self.codec)
        except RemoteProtocolError:
            # As on every lane: an unreadable value ends the call.
            self._input.on_stop(killed=True)
        else:
            self._input.on_input(value, len(body))

    def on_input_end(self) -> None:
        if self._input is not None:
            self._input.on_input_end()

    def on_stop(self, *, killed: bool) -> None:
        self._gone = killed
        events = self._events or self._input
        if killed:
            self._let_go()
        if events is not None:
            events.on_stop(killed=killed)

    def on_writable(self) -> None:
        if self._events is not None:
            self._events.on_writable()


def _deadline_of(head: RequestHead) -> float | None:
    """When the time of a request that is read now is over."""
    if head.remaining_ms is None:
        return None
    return time.monotonic() + head.remaining_ms / 1000


def _trace_of(head: RequestHead) -> TraceContext | None:
    if head.trace is None:
        return None
    names = (TRACEPARENT, TRACESTATE, X_REQUEST_ID)
    pairs = zip(names, head.trace, strict=True)
    return read_trace({name: value for name, value in pairs if value is not None})
