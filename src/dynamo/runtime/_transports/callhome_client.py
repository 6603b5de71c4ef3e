"""The client's side of the genuine lane: calls.

A request goes out on a pooled connection to the worker's port and is acknowledged
there, in order; the answer comes on a connection that the worker opens to our response
listener, named by a random subject.  Knows nothing of choosing or retrying.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from dynamo.runtime._transports.connection import Connection, Limit, connect
from dynamo.runtime._transports.outgoing import (
    LOST_TEXT,
    EncodesInput,
    callable_address,
    encode_for,
    overloaded,
    remaining_ms,
    too_large_there,
)
from dynamo.runtime._transports.request_pool import RequestPools
from dynamo.runtime._transports.response_listener import (
    HomeConnection,
    ResponseListener,
    new_subject,
)
from dynamo.runtime._wire.callhome import (
    INVALID_PATH_TEXT,
    KILL,
    SENTINEL,
    STOP,
    AckReceived,
    ConnectionInfo,
    ControlHeader,
    ErrorReceived,
    PrologueReceived,
    ProtocolViolated,
    ResponseReceiver,
    StreamEnded,
    StreamLost,
    encode_payload_front,
    encode_request_front,
    input_frame_pieces,
)
from dynamo.runtime._wire.faults import exception_of_prologue
from dynamo.runtime._wire.payload import Annotated
from dynamo.runtime._wire.propagation import request_headers
from dynamo.runtime.errors import (
    CallError,
    CallTimeout,
    Refused,
    RuntimeClosed,
)

if TYPE_CHECKING:
    from dynamo.runtime._config import RuntimeConfig
    from dynamo.runtime._transports import CallEvents, CallRequest
    from dynamo.runtime._wire.callhome import ResponseEvent
    from dynamo.runtime._wire.records import EndpointRecord, TcpAddress
    from dynamo.runtime._wire.two_part import TwoPart

_log = logging.getLogger("dynamo.runtime.callhome")

# How long a stopped call is remembered so that a late call-home can be told of the stop.
_LATE_CALL_HOME_S = 60.0
# How long a stopped call waits for the worker to close; whoever reads waits less.
_STOPPED_LIMIT_S = 10.0


class _Gate:
    """Makes calls with one id to one genuine worker start one after another.

    Such a worker confuses calls of equal id that start together (they fail, and it looks
    broken); once their streams stand they may overlap.
    """

    def __init__(
        self,
        gates: dict[tuple[int, str], _Gate],
        key: tuple[int, str],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._gates = gates
        self._key = key
        self._opened: asyncio.Future[None] = loop.create_future()
        gates[key] = self

    async def wait(self) -> None:
        """Until the call that holds the gate has started, or is over."""
        await asyncio.wait((self._opened,))

    def open(self) -> None:
        del self._gates[self._key]
        self._opened.set_result(None)


class _Call:
    """One outgoing call: its subject, its response connection, its state machine."""

    def __init__(
        self,
        lane: CallhomeClientLane,
        record: EndpointRecord,
        authority: str,
        events: CallEvents,
        gate: _Gate | None,
    ) -> None:
        self.subject = new_subject()
        self.stream_type = "response"
        self.input: _Input | None = None
        self._lane = lane
        self._record = record
        self._authority = authority
        self._events = events
        self._receiver = ResponseReceiver(record.codec)
        self._gate = gate
        self._connection: HomeConnection | None = None
        self._call_home_timer: Limit | None = None
        self._stop_timer: asyncio.TimerHandle | None = None
        self._stop_due = False
        self._over = False

    # CallHandle

    def stop(self) -> None:
        if self._over or self._receiver.stopped:
            return
        if self._connection is not None:
            self._receiver.stopped = True
            self._connection.send(STOP)
            self._connection.flush()
            if self.input is not None:
                self.input.stop()
            self._close_in(_STOPPED_LIMIT_S)
        elif not self._stop_due:
            self._stop_due = True
            self._close_in(_LATE_CALL_HOME_S)

    def _close_in(self, limit_s: float) -> None:
        """Not to wait for ever for a worker that does nothing about a stop."""
        if self._stop_timer is not None:
            self._stop_timer.cancel()
        self._stop_timer = self._lane.loop.call_later(limit_s, self.close)

    def kill(self) -> None:
        if not self._over and self._connection is not None:
            self._connection.send(KILL)
        if not self._over and self.input is not None:
            self.input.close(KILL)
        self.close()

    def pause(self) -> None:
        if self._connection is not None:
            self._connection.pause_reading()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume_reading()

    def close(self) -> None:
        self._over = True
        if self._stop_timer is not None:
            self._stop_timer.cancel()
        self._pass_gate()
        self._lane.listener.forget(self.subject)
        if self._call_home_timer is not None:
            self._call_home_timer.cancel()
        if self._connection is not None:
            self._connection.close()
        if self.input is not None:
            self.input.close()

    def _pass_gate(self) -> None:
        """Let the next call with this id start."""
        if self._gate is not None:
            self._gate.open()
            self._gate = None

    # What the request connection reports.

    def on_ack(self, ack: AckReceived | CallError) -> None:
        if self._over or self._connection is not None:
            # A worker that has called home has accepted, whatever became of its ack.
            return
        refusal = _refusal_of(ack)
        if refusal is not None:
            error, inhibits = refusal
            self._refuse(error, inhibits=inhibits)
        elif self._record.ours:
            # Ours calls home at once, also when the request has to wait there.
            limit_s = self._lane.config.call_home_timeout_s
            self._call_home_timer = Limit(self._lane.loop, limit_s, self._no_call_home)

    def _no_call_home(self) -> None:
        limit = self._lane.config.call_home_timeout_s
        error = CallTimeout(
            f"DeadlineExceeded: worker {self._authority} acknowledged the request but "
            f"did not call home to {self._lane.listener.address} within {limit:g} s: "
            "can it reach that address?",
            phase="start",
            facts={"response_address": self._lane.listener.address},
        )
        self._refuse(error, inhibits=True)

    def give_up(self) -> None:
        """The runtime closes before the worker called home."""
        error = RuntimeClosed("the runtime was shut down during the call")
        self._refuse(error, inhibits=False)

    def _refuse(self, error: Exception, *, inhibits: bool) -> None:
        self.close()
        self._events.on_refused(error, inhibits=inhibits)

    # What the response connection reports.

    def called_home(self, connection: HomeConnection) -> None:
        self._connection = connection
        if self._call_home_timer is not None:
            self._call_home_timer.cancel()
        self._events.on_reached()
        if self._stop_due:
            self.stop()

    def writable(self) -> None:
        """Only stop and kill go this way."""

    def receive(self, frame: TwoPart) -> None:
        if not self._over:
            self._handle(self._receiver.receive(frame), len(frame.body))

    def receive_eof(self) -> None:
        if not self._over:
            self._handle(self._receiver.receive_eof(), 0)

    def _handle(self, event: ResponseEvent | None, size_bytes: int) -> None:
        if isinstance(event, Annotated):
            self._events.on_items((event,), size_bytes)
            if self._receiver.complete:
                # The final mark came with an item: there is nothing to wait for.
                self.close()
                self._events.on_ended()
        elif isinstance(event, PrologueReceived):
            self._begin(event)
        elif isinstance(event, ErrorReceived):
            self.close()
            self._events.on_failed(event.error)
        elif isinstance(event, StreamEnded):
            self.close()
            self._events.on_ended()
        elif isinstance(event, StreamLost):
            self.close()
            self._events.on_lost(LOST_TEXT)
        elif isinstance(event, ProtocolViolated):
            _log.warning("worker %s broke the protocol: %s", self._authority, event)
            self.kill()
            self._events.on_lost(LOST_TEXT)

    def _begin(self, prologue: PrologueReceived) -> None:
        self._pass_gate()
        if prologue.error is None:
            self._events.on_started()
            return
        error, inhibits = exception_of_prologue(
            prologue.error,
            prologue.typed_error,
            instance_id=self._record.instance_id,
        )
        self._refuse(error, inhibits=inhibits)


def _refusal_of(ack: AckReceived | CallError) -> tuple[CallError, bool] | None:
    """Why the worker does not take the call, and whether to avoid it for a while."""
    if isinstance(ack, CallError):
        return ack, True
    if ack.refusal == "overloaded":
        return overloaded(ack.text), False
    if ack.refusal == "unavailable" or ack.text == INVALID_PATH_TEXT:
        return Refused(f"Unavailable: {ack.text}"), True
    if ack.refusal == "unreadable":
        return too_large_there(ack.text), False
    return None


class _Input(EncodesInput):
    """The client's side of a request-stream connection (an `InputSink`)."""

    def __init__(
        self, lane: CallhomeClientLane, record: EndpointRecord, events: CallEvents
    ) -> None:
        self.subject = new_subject()
        self.stream_type = "request"
        self._lane = lane
        self._record = record
        self._events = events
        self._connection: HomeConnection | None = None
        self._over = False

    # InputSink

    @property
    def paused(self) -> bool:
        return self._connection is not None and self._connection.paused

    def send(self, body: bytes) -> None:
        if self._connection is not None:
            self._connection.send_pieces(input_frame_pieces(body))

    def end(self) -> None:
        self.close(SENTINEL)

    # What the call and the connection do with it.

    def stop(self) -> None:
        """Tell the worker that the input ends because the call is stopped."""
        if self._connection is not None and not self._over:
            self._connection.send(STOP)
            self._connection.flush()

    def close(self, last_word: bytes = b"") -> None:
        """Say a last word, if any, and close so that it arrives."""
        if self._over:
            return
        self._over = True
        self._lane.listener.forget(self.subject)
        if self._connection is not None:
            if last_word:
                self._connection.send(last_word)
            self._connection.close_in_order()

    def give_up(self) -> None:
        self.close()

    def called_home(self, connection: HomeConnection) -> None:
        self._connection = connection
        self._events.on_input_wanted(self)

    def receive(self, frame: TwoPart) -> None:
        """A worker writes nothing here; what a later version might is no news."""

    def receive_eof(self) -> None:
        if not self._over:
            self.close()
            self._events.on_input_unwanted()

    def writable(self) -> None:
        self._events.on_input_room()


class CallhomeClientLane:
    """Calls of one runtime over the genuine lane."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        config: RuntimeConfig,
        connecting: asyncio.Semaphore,
    ) -> None:
        self.loop = loop
        self.config = config
        self.listener = ResponseListener(loop, config)
        self._pools = RequestPools(loop, config, connecting)
        self._gates: dict[tuple[int, str], _Gate] = {}

    def addresses(self) -> set[str]:
        """Our own ends of the connections to workers."""
        return self._pools.addresses()

    async def open(
        self, record: EndpointRecord, request: CallRequest, events: CallEvents
    ) -> _Call:
        self._pools.check_open()
        address = callable_address(record)
        body = None
        if request.packed is not None:
            body = encode_for(record, request.value, request.packed, CallError)
        gate = await self._gate(record, request)
        call = _Call(self, record, address.authority, events, gate)
        if request.packed is None:
            call.input = _Input(self, record, events)
        try:
            await self.listener.start()
            connection = await self._pools.connection(address)
            # Only now, for it says how much time is left.
            front = self._front(address, record, request, call, len(body or b""))
        except BaseException:
            call.close()
            raise
        self.listener.expect(call)
        if call.input is not None:
            self.listener.expect(call.input)
        connection.submit((front, body or b""), call.on_ack)
        return call

    async def _gate(self, record: EndpointRecord, request: CallRequest) -> _Gate | None:
        if record.ours:
            return None
        key = (record.instance_id, request.call_id)
        while (held := self._gates.get(key)) is not None:
            await held.wait()
        return _Gate(self._gates, key, self.loop)

    def _front(
        self,
        address: TcpAddress,
        record: EndpointRecord,
        request: CallRequest,
        call: _Call,
        body_bytes: int,
    ) -> bytes:
        """The request frame up to the body of that length."""
        control = ControlHeader(
            id=request.call_id,
            codec=record.codec,
            metadata=request.metadata,
            response=self._way_to(call, request),
        )
        if call.input is not None:
            control.request_type = "many_in"
            control.request_stream = self._way_to(call.input, request)
        headers = request_headers(
            request_id=request.call_id,
            path=address.path,
            sent_ns=time.time_ns(),
            trace=request.trace,
            remaining_ms=remaining_ms(request),
        )
        inner = encode_payload_front(control, body_bytes)
        limit_bytes = self.config.max_message_bytes
        size = len(inner) + body_bytes
        return encode_request_front(address.path, headers, size, limit_bytes) + inner

    def _way_to(self, end: _Call | _Input, request: CallRequest) -> ConnectionInfo:
        """Where the worker is to connect to for one of the streams."""
        return ConnectionInfo(
            address=self.listener.address,
            subject=end.subject,
            context=request.call_id,
            stream_type=end.stream_type,
        )

    async def probe(self, record: EndpointRecord) -> bool:
        try:
            address = callable_address(record)
            connection = await connect(
                self.loop,
                lambda: Connection(self.loop),
                address.host,
                address.port,
                self.config.connect_timeout_s,
                self.config.network,
            )
        except CallError:
            return False
        connection.close()
        return True

    async def aclose(self) -> None:
        await self.listener.stop_accepting()
        self._pools.close()
        self.listener.close()
