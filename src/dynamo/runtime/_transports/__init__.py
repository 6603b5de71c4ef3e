"""What a transport offers to the call machinery, whatever lane carries the call.

Client side: `egress` asks a lane to open a call and gets a `CallHandle`; the lane tells
it what arrives through `CallEvents`.  Worker side: a lane hands an `IncomingCall` to the
endpoint that serves its path; the endpoint answers through a `ReplyStream`, and the lane
tells it what the caller does through `ReplyEvents`.

Everything here runs on the runtime's home loop.  Events are plain calls: they never
block, never await, never raise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from dynamo.runtime._wire.faults import ErrorObject
    from dynamo.runtime._wire.payload import Envelope
    from dynamo.runtime._wire.propagation import TraceContext
    from dynamo.runtime._wire.records import EndpointRecord


class CallRequest(msgspec.Struct, kw_only=True):
    """One call as every lane carries it.

    ``packed`` is ``value`` in MessagePack, which nearly every instance takes; the value
    itself is there for the others.  With streamed input ``packed`` is None.  ``deadline``
    is a `time.monotonic()` value; infinity if there is none.
    """

    call_id: str
    value: object
    packed: bytes | None
    metadata: dict[str, str]
    trace: TraceContext | None = None
    deadline: float = math.inf


class Rejection(msgspec.Struct, frozen=True):
    """Why a worker does not take a request, which it certainly has not started.

    ``retry_after_s`` is set if the worker is full: seconds after which to come back.
    """

    text: str
    retry_after_s: float | None = None


class InputSink(Protocol):
    """Where the client's side sends streamed input."""

    @property
    def paused(self) -> bool:
        """Whether the worker is behind and the source should wait."""

    def encode(self, value: object) -> bytes:
        """A value as this worker reads it.  From any thread.

        Raises:
            TypeError: a type that cannot travel.
            ValueError: nested too deeply, containing itself, or no text.
            OverflowError: an integer beyond 64 bits.
            StreamError: this worker could not read it.
        """

    def send(self, body: bytes) -> None:
        """One encoded value."""

    def end(self) -> None:
        """No more values; no cancellation."""


class CallEvents(Protocol):
    """What the client's side of a call is told, in this order.

    The input events may come at any time before the last event.
    """

    def on_input_wanted(self, sink: InputSink) -> None:
        """The worker takes streamed input."""

    def on_input_room(self) -> None:
        """A sink that was ``paused`` takes values again."""

    def on_input_unwanted(self) -> None:
        """The worker takes no more input; the call goes on."""

    def on_reached(self) -> None:
        """The worker has taken the call and can be told to stop it.

        Left out if the handler runs already.
        """

    def on_started(self) -> None:
        """The handler runs; items may follow."""

    def on_refused(self, error: Exception, *, inhibits: bool) -> None:
        """There will be no stream.  The last event."""

    def on_items(self, items: Sequence[Envelope], size_bytes: int) -> None:
        """One or more items; together they had so many bytes."""

    def on_answer(self, item: Envelope) -> None:
        """`on_started`, `on_items` with this one, and `on_ended`.  The last event."""

    def on_failed(self, error: ErrorObject) -> None:
        """The handler failed.  The last event."""

    def on_ended(self) -> None:
        """The stream is complete.  The last event."""

    def on_lost(self, text: str) -> None:
        """The connection broke before the end.  The last event."""


class CallHandle(Protocol):
    """What the client's side of a call can do.  All may be called at any time."""

    def stop(self) -> None:
        """Tell the handler that nobody wants more; what is on its way still comes."""

    def kill(self) -> None:
        """Tell the handler that the caller has gone, and forget the call."""

    def pause(self) -> None:
        """Take no more items for now."""

    def resume(self) -> None:
        """Take items again."""


class ClientLane(Protocol):
    """One way to call instances.

    The events of a call come only after it was opened.
    """

    def open_now(
        self, record: EndpointRecord, request: CallRequest, events: CallEvents
    ) -> CallHandle | None:
        """Send a call if that needs no waiting, else return None: use `open`.

        Raises:
            CallError: it was not sent.
        """

    async def open(
        self, record: EndpointRecord, request: CallRequest, events: CallEvents
    ) -> CallHandle:
        """Send a call, over a connection that may have to be made first.

        Raises:
            CallError: it was not sent.
        """

    async def probe(self, record: EndpointRecord) -> bool:
        """Whether the instance can be connected to."""

    async def aclose(self) -> None:
        """Close every connection."""


class ReplyEvents(Protocol):
    """What the worker's side of a call is told."""

    def on_stop(self, *, killed: bool) -> None:
        """The caller wants no more (or, if ``killed``, has gone)."""

    def on_writable(self) -> None:
        """A reply stream that was ``paused`` takes items again."""


class ReplyStream(Protocol):
    """Where the worker's side of a call sends its answer."""

    @property
    def codec(self) -> str:
        """In what items are encoded."""

    @property
    def paused(self) -> bool:
        """Whether the caller is behind and the handler should wait.

        After `finish`: whether a part of the answer has not gone out yet.
        """

    def start(self) -> None:
        """The handler runs."""

    def refuse(self, text: str, error: ErrorObject) -> None:
        """The handler cannot run.  Ends the stream."""

    def item(self, annotated: bytes) -> bool:
        """One encoded annotated map; returns whether the stream is ``paused`` now."""

    def fail(self, error: ErrorObject) -> None:
        """The handler failed.  Ends the stream."""

    def finish(self) -> None:
        """The stream is complete."""

    def drop(self) -> None:
        """Close without an end mark: the caller stopped the call, or we failed it."""


class InputEvents(Protocol):
    """What the worker's side of a call with streamed input is told besides."""

    def on_input(self, value: object, size_bytes: int) -> None:
        """One value of the input."""

    def on_input_end(self) -> None:
        """The caller ended its input; no cancellation."""

    def on_stop(self, *, killed: bool) -> None:
        """The input was cut off or cancelled."""


class InputStream(Protocol):
    """Where streamed input comes from."""

    def pause(self) -> None:
        """Take no more input for now."""

    def resume(self) -> None:
        """Take input again."""

    def close(self) -> None:
        """Want no more input."""


class IncomingRequest(msgspec.Struct, kw_only=True):
    """A request as an endpoint sees it; ``body`` is None if the input is streamed."""

    call_id: str
    metadata: dict[str, str]
    codec: str
    body: bytes | memoryview | None
    trace: TraceContext | None
    ours: bool
    deadline: float | None = None


class IncomingCall(Protocol):
    """A request that a lane received and has not yet looked into."""

    @property
    def path(self) -> str:
        """The path it is for."""

    def decode(self) -> IncomingRequest:
        """Look into it.

        Raises:
            RemoteProtocolError: it makes no sense; the caller can still be answered
                through `open` if that works.
        """

    def open_now(self, events: ReplyEvents) -> ReplyStream | None:
        """The way back to the caller if it stands, else None: use `open`."""

    async def open(self, events: ReplyEvents) -> ReplyStream:
        """Open the way back to the caller.

        Raises:
            CallError: the caller cannot be reached.
        """

    async def open_input(self, events: InputEvents) -> InputStream:
        """Open the streamed input, before the way back.

        Raises:
            CallError: the caller cannot be reached.
        """
