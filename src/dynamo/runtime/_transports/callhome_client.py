"""The client's side of the genuine lane: request pool, response listener, calls.

A request goes out on a pooled connection to the worker's port and is acknowledged
there, in order; the answer comes on a connection that the worker opens to our response
listener, named by a random subject.  Knows nothing of choosing or retrying.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from dynamo.runtime._config import advertised_host
from dynamo.runtime._sealed import override
from dynamo.runtime._transports.connection import (
    Connection,
    Limit,
    connect,
    listen,
    spawn,
)
from dynamo.runtime._wire.callhome import (
    INVALID_PATH_TEXT,
    KILL,
    SENTINEL,
    STOP,
    AckReader,
    AckReceived,
    ConnectionInfo,
    ControlHeader,
    ErrorReceived,
    PrologueReceived,
    ProtocolViolated,
    ResponseReceiver,
    StreamEnded,
    StreamLost,
    decode_handshake,
    encode_input_frame,
    encode_request_frame,
    encode_request_payload,
)
from dynamo.runtime._wire.faults import exception_of_prologue
from dynamo.runtime._wire.payload import encode_value, genuine_can_decode
from dynamo.runtime._wire.propagation import request_headers
from dynamo.runtime._wire.records import TcpAddress, split_tcp_address
from dynamo.runtime._wire.two_part import TwoPart, TwoPartReader
from dynamo.runtime.errors import (
    CallError,
    CallTimeout,
    ConnectionFailed,
    MessageTooLarge,
    Overloaded,
    Refused,
    RemoteProtocolError,
    RuntimeClosed,
    StreamError,
)

if TYPE_CHECKING:
    from dynamo.runtime._config import RuntimeConfig
    from dynamo.runtime._transports import CallEvents, CallRequest
    from dynamo.runtime._wire.records import EndpointRecord

_log = logging.getLogger("dynamo.runtime.callhome")

_HANDSHAKE_TIMEOUT_S = 10.0
# A stranger may not make us keep more than this.
_MAX_HANDSHAKE_BYTES = 64 * 1024
_IDLE_CHECK_S = 30.0
# How long a stopped call is remembered so that a late call-home can be told of the stop.
_LATE_CALL_HOME_S = 60.0
# How early the clock of a loop may wake us.
_CLOCK_S = 0.002
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_FIN_ON_CLOSE = struct.pack("ii", 0, 0)

OnAck = Callable[[AckReceived | CallError], None]


def _subject() -> str:
    """A random version-4 UUID in text."""
    raw = bytearray(os.urandom(16))
    raw[6] = raw[6] & 0x0F | 0x40
    raw[8] = raw[8] & 0x3F | 0x80
    text = raw.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


class _RequestConnection(Connection):
    """One pooled connection to a worker's port; acks come in the order of requests."""

    def __init__(self, pool: _HostPool) -> None:
        super().__init__(pool.loop)
        self._pool = pool
        self._reader = AckReader()
        self._awaited: deque[tuple[float, OnAck]] = deque()
        self._timer: Limit | None = None
        self._retired = False

    @property
    def usable(self) -> bool:
        room = len(self._awaited) < self._pool.config.channel_buffer
        return self.is_open and room and not self._retired

    @property
    def idle(self) -> bool:
        return not self._awaited

    def submit(self, frame: bytes, on_ack: OnAck) -> None:
        """Send a request; ``on_ack`` gets its ack, or the error that replaced it."""
        timeout_s = self._pool.config.request_timeout_s
        self._awaited.append((self._loop.time() + timeout_s, on_ack))
        self.send(frame)
        if self._timer is None:
            self._timer = Limit(self._loop, timeout_s, self._expire)

    @override
    def received(self, data: bytes) -> None:
        for ack in self._reader.feed(data):
            if not self._awaited:
                raise RemoteProtocolError("an ack came that no request waits for")
            self._awaited.popleft()[1](ack)
        self._reader.check()
        self._pool.made_room()
        self._close_if_retired()

    def _expire(self) -> None:
        """Fail the requests whose time is up; later ones keep their place in the order."""
        assert self._timer is not None
        now = self._loop.time()
        slack_s, self._timer = self._timer.slack_s, None
        kept: deque[tuple[float, OnAck]] = deque()
        for first_limit, on_ack in self._awaited:
            limit = first_limit + slack_s
            if limit > now + _CLOCK_S or on_ack is _ignore:
                kept.append((limit, on_ack))
                continue
            # The worker owes this ack still: without its place in the order every
            # later ack would be credited to the request before it.
            kept.append((limit, _ignore))
            self._retired = True
            on_ack(
                CallTimeout(
                    f"DeadlineExceeded: TCP request to {self._pool.authority} timed out",
                    facts={"limit": "DYN_TCP_REQUEST_TIMEOUT"},
                )
            )
        self._awaited = kept
        waiting = [limit for limit, on_ack in kept if on_ack is not _ignore]
        if waiting:
            self._timer = Limit(self._loop, waiting[0] - now, self._expire)
        self._close_if_retired()

    def _close_if_retired(self) -> None:
        if self._retired and all(on_ack is _ignore for _, on_ack in self._awaited):
            self.abort()

    @override
    def lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._pool.remove(self)
        awaited, self._awaited = self._awaited, deque()
        # One frame is one request, and the last ones are those that were not written.
        # The others the worker may have begun to run.
        written = len(awaited) - len(self._out)
        for position, (_, on_ack) in enumerate(awaited):
            on_ack(
                ConnectionFailed(
                    f"Unavailable: TCP connection to {self._pool.authority} failed",
                    phase="ack" if position < written else "send",
                    retryable=position >= written,
                    facts={"reason": str(error or "closed by the worker")},
                )
            )


def _ignore(ack: AckReceived | CallError) -> None:
    """Stands for a request that was given up before its ack came."""


class _HostPool:
    """The connections to one worker port."""

    def __init__(
        self, lane: CallhomeClientLane, config: RuntimeConfig, address: TcpAddress
    ) -> None:
        self.loop = lane.loop
        self.config = config
        self.authority = address.authority
        self.used_at = self.loop.time()
        self._lane = lane
        self._host = address.host
        self._port = address.port
        self._connections: list[_RequestConnection] = []
        self._turn = 0
        self._opening: asyncio.Task[_RequestConnection] | None = None
        self._wanting_room: list[asyncio.Future[None]] = []

    async def connection(self) -> _RequestConnection:
        """A connection with room for one more request.

        Raises:
            ConnectionFailed: none could be made, or it was closed at once.
            RuntimeClosed: the runtime was shut down, perhaps meanwhile.
        """
        self.used_at = self.loop.time()
        while True:
            self._lane.check_open()
            ready = self._next_usable()
            if ready is not None:
                return ready
            if len(self._connections) < self.config.pool_size:
                opened = await self._open_one()
                if not opened.is_open:
                    # Whoever accepts and closes would be called again and again.
                    raise self._failed("it was closed as soon as it stood")
            else:
                await self._wait_for_room()

    def _failed(self, reason: str) -> ConnectionFailed:
        return ConnectionFailed(
            f"Unavailable: TCP connection to {self.authority} failed",
            facts={"address": self.authority, "reason": reason},
        )

    def _next_usable(self) -> _RequestConnection | None:
        count = len(self._connections)
        for step in range(count):
            candidate = self._connections[(self._turn + step) % count]
            if candidate.usable:
                self._turn = (self._turn + step + 1) % count
                return candidate
        return None

    async def _open_one(self) -> _RequestConnection:
        """Open one connection, whatever the number of callers that want it."""
        if self._opening is None:
            self._opening = spawn(self.loop, self._open())
            self._opening.add_done_callback(self._opened)
        opening = self._opening
        await asyncio.wait((opening,))
        if opening.cancelled():
            raise RuntimeClosed("the runtime was shut down while connecting")
        error = opening.exception()
        if isinstance(error, ConnectionFailed):
            # Each caller gets an error of its own, to which its facts can be added.
            raise ConnectionFailed(str(error), facts=dict(error.facts)) from error
        if error is not None:
            raise error
        return opening.result()

    async def _open(self) -> _RequestConnection:
        async with self._lane.connecting:
            connection = await connect(
                self.loop,
                lambda: _RequestConnection(self),
                self._host,
                self._port,
                self.config.connect_timeout_s,
            )
        if connection.is_open:
            self._connections.append(connection)
        return connection

    def _opened(self, task: asyncio.Task[_RequestConnection]) -> None:
        self._opening = None
        if not task.cancelled():
            task.exception()

    async def _wait_for_room(self) -> None:
        waiter = self.loop.create_future()
        self._wanting_room.append(waiter)
        await waiter

    def made_room(self) -> None:
        """An ack came or a connection left: let the waiting look again."""
        waiting, self._wanting_room = self._wanting_room, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def remove(self, connection: _RequestConnection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
        self.made_room()

    @property
    def idle(self) -> bool:
        return self._opening is None and all(c.idle for c in self._connections)

    def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        for connection in list(self._connections):
            connection.close()


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
        self.subject = _subject()
        self.stream_type = "response"
        self.input: _Input | None = None
        self._lane = lane
        self._record = record
        self._authority = authority
        self._events = events
        self._receiver = ResponseReceiver(record.codec)
        self._gate = gate
        self._connection: _HomeConnection | None = None
        self._call_home_timer: Limit | None = None
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
        elif not self._stop_due:
            self._stop_due = True
            self._lane.loop.call_later(_LATE_CALL_HOME_S, self._forget_if_unreached)

    def _forget_if_unreached(self) -> None:
        if self._connection is None:
            self.close()

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

    def called_home(self, connection: _HomeConnection) -> None:
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

    def _handle(self, event: object, size_bytes: int) -> None:
        if event is None:
            return
        if isinstance(event, PrologueReceived):
            self._begin(event)
        elif isinstance(event, ErrorReceived):
            self.close()
            self._events.on_failed(event.error)
        elif isinstance(event, StreamEnded):
            self.close()
            self._events.on_ended()
        elif isinstance(event, StreamLost):
            self.close()
            self._events.on_lost("Stream ended before generation completed")
        elif isinstance(event, ProtocolViolated):
            _log.warning("worker %s broke the protocol: %s", self._authority, event)
            self.kill()
            self._events.on_lost("Stream ended before generation completed")
        else:
            self._events.on_item(event, size_bytes)  # type: ignore[arg-type]
            if self._receiver.complete:
                # The final mark came with an item: there is nothing to wait for.
                self.close()
                self._events.on_ended()

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
        return _overloaded(ack.text), False
    if ack.refusal == "unavailable" or ack.text == INVALID_PATH_TEXT:
        return Refused(f"Unavailable: {ack.text}"), True
    if ack.refusal == "unreadable":
        return _too_large_there(ack.text), False
    return None


def _overloaded(text: str) -> Overloaded:
    settings = "DYN_TCP_WORKER_POOL_SIZE, DYN_TCP_WORK_QUEUE_SIZE (of the worker)"
    return Overloaded(
        f"CapacityExhausted: {text}", retry_after=1.0, facts={"limit": settings}
    )


def _too_large_there(text: str) -> MessageTooLarge:
    """The worker allows less than we do."""
    return MessageTooLarge(
        f"InvalidRequest: {text}: reduce the request, or raise "
        "DYN_TCP_MAX_MESSAGE_SIZE of the worker",
        phase="ack",
    )


class _Input:
    """The client's side of a request-stream connection (an `InputSink`)."""

    def __init__(
        self, lane: CallhomeClientLane, record: EndpointRecord, events: CallEvents
    ) -> None:
        self.subject = _subject()
        self.stream_type = "request"
        self._lane = lane
        self._record = record
        self._events = events
        self._connection: _HomeConnection | None = None
        self._over = False

    # InputSink

    @property
    def paused(self) -> bool:
        return self._connection is not None and self._connection.paused

    def encode(self, value: object) -> bytes:
        packed = encode_value(value, "msgpack")
        return _encode_for(self._record, value, packed, StreamError)

    def send(self, body: bytes) -> None:
        if self._connection is not None:
            self._connection.send(encode_input_frame(body))

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

    def called_home(self, connection: _HomeConnection) -> None:
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


class _HomeConnection(Connection):
    """A connection that a worker opened to our listener."""

    def __init__(self, listener: ResponseListener) -> None:
        super().__init__(listener.loop)
        self._listener = listener
        self._reader = TwoPartReader()
        self._call: _Call | _Input | None = None
        self._strange_bytes = 0
        self._handshake_timer: Limit | None = None

    @override
    def opened(self) -> None:
        assert self._transport is not None
        sock = self._transport.get_extra_info("socket")
        # Our death must reach a silent genuine worker as a reset; a FIN is no news to it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._handshake_timer = Limit(self._loop, _HANDSHAKE_TIMEOUT_S, self.abort)
        self._listener.connections.add(self)

    def close_in_order(self) -> None:
        """Close after all that was sent has arrived, not with a reset."""
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _FIN_ON_CLOSE)
        self.close()

    @override
    def writable(self) -> None:
        if self._call is not None:
            self._call.writable()

    @override
    def received(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            if self._call is not None:
                self._call.receive(frame)
            elif not self._handshake(frame):
                return
        self._reader.check()
        if self._call is None:
            self._strange_bytes += len(data)
            if self._strange_bytes > _MAX_HANDSHAKE_BYTES:
                raise RemoteProtocolError(
                    f"no handshake in the first {self._strange_bytes} bytes"
                )

    def _handshake(self, frame: TwoPart) -> bool:
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
        handshake = decode_handshake(frame)
        call = self._listener.take(handshake.subject)
        if call is None or handshake.stream_type != call.stream_type:
            # Given up meanwhile, or never ours: the reset tells the worker so.
            self.abort()
            return False
        self._call = call
        call.called_home(self)
        return True

    @override
    def lost(self, error: Exception | None) -> None:
        self._listener.connections.discard(self)
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
        if self._call is not None:
            self._call.receive_eof()


class ResponseListener:
    """The port to which workers call home; one per runtime, opened on first use."""

    def __init__(self, loop: asyncio.AbstractEventLoop, config: RuntimeConfig) -> None:
        self.loop = loop
        self.address = ""
        self.connections: set[_HomeConnection] = set()
        self._config = config
        self._waiting: dict[str, _Call | _Input] = {}
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._closed = False

    async def start(self) -> None:
        """Listen, if not done before.

        Raises:
            CannotListen: the address cannot be bound.
            RuntimeClosed: the runtime was shut down.
        """
        async with self._starting:
            if self._closed:
                raise RuntimeClosed("the runtime was shut down")
            if self._server is not None:
                return
            self._server, port = await listen(
                self.loop,
                lambda: _HomeConnection(self),
                self._config.response_host,
                self._config.response_port,
                backlog=self._config.listen_backlog,
                settings="DYN_TCP_RESPONSE_STREAM_HOST, DYN_TCP_RESPONSE_STREAM_PORT",
            )
            host = advertised_host(self._config.response_host)
            self.address = TcpAddress(host, port, "").authority

    def expect(self, call: _Call | _Input) -> None:
        self._waiting[call.subject] = call

    def take(self, subject: str) -> _Call | _Input | None:
        return self._waiting.pop(subject, None)

    def forget(self, subject: str) -> None:
        self._waiting.pop(subject, None)

    def abort(self) -> None:
        """Cut off the streams in progress: nobody will read them."""
        for connection in list(self.connections):
            connection.abort()

    def close(self) -> None:
        """Take no more calls home.  Streams in progress run to their end."""
        self._closed = True
        if self._server is not None:
            self._server.close()
            self._server = None
        for call in list(self._waiting.values()):
            call.give_up()


class CallhomeClientLane:
    """Calls of one runtime over the genuine lane."""

    def __init__(self, loop: asyncio.AbstractEventLoop, config: RuntimeConfig) -> None:
        self.loop = loop
        self.config = config
        self.listener = ResponseListener(loop, config)
        self.connecting = asyncio.Semaphore(config.global_connect_limit)
        self._gates: dict[tuple[int, str], _Gate] = {}
        self._pools: dict[tuple[str, int], _HostPool] = {}
        self._idle_timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def open(
        self, record: EndpointRecord, request: CallRequest, events: CallEvents
    ) -> _Call:
        self.check_open()
        address = _callable_address(record)
        body = None
        if request.packed is not None:
            body = _encode_for(record, request.value, request.packed, CallError)
        gate = await self._gate(record, request)
        call = _Call(self, record, address.authority, events, gate)
        if request.packed is None:
            call.input = _Input(self, record, events)
        try:
            await self.listener.start()
            frame = self._frame(address, record, request, call, body)
            connection = await self._pool(address).connection()
        except BaseException:
            call.close()
            raise
        self.listener.expect(call)
        if call.input is not None:
            self.listener.expect(call.input)
        connection.submit(frame, call.on_ack)
        return call

    def check_open(self) -> None:
        if self._closed:
            raise RuntimeClosed("the runtime was shut down")

    async def _gate(self, record: EndpointRecord, request: CallRequest) -> _Gate | None:
        if record.ours:
            return None
        key = (record.instance_id, request.call_id)
        while (held := self._gates.get(key)) is not None:
            await held.wait()
        return _Gate(self._gates, key, self.loop)

    def _frame(
        self,
        address: TcpAddress,
        record: EndpointRecord,
        request: CallRequest,
        call: _Call,
        body: bytes | None,
    ) -> bytes:
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
        )
        return encode_request_frame(
            address.path,
            headers,
            encode_request_payload(control, body),
            max_message_bytes=self.config.max_message_bytes,
        )

    def _way_to(self, end: _Call | _Input, request: CallRequest) -> ConnectionInfo:
        """Where the worker is to connect to for one of the streams."""
        return ConnectionInfo(
            address=self.listener.address,
            subject=end.subject,
            context=request.call_id,
            stream_type=end.stream_type,
        )

    def _pool(self, address: TcpAddress) -> _HostPool:
        key = (address.host, address.port)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = _HostPool(self, self.config, address)
            self._watch_idle()
        return pool

    def _watch_idle(self) -> None:
        if self._idle_timer is None and self._pools and not self._closed:
            pause = max(_IDLE_CHECK_S, self.config.host_idle_ttl_s / 2)
            self._idle_timer = self.loop.call_later(pause, self._drop_idle)

    def _drop_idle(self) -> None:
        self._idle_timer = None
        limit = self.loop.time() - self.config.host_idle_ttl_s
        for key, pool in list(self._pools.items()):
            if pool.idle and pool.used_at <= limit:
                pool.close()
                del self._pools[key]
        self._watch_idle()

    async def probe(self, record: EndpointRecord) -> bool:
        try:
            address = _callable_address(record)
            connection = await connect(
                self.loop,
                lambda: Connection(self.loop),
                address.host,
                address.port,
                self.config.connect_timeout_s,
            )
        except CallError:
            return False
        connection.close()
        return True

    async def aclose(self) -> None:
        self._closed = True
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        self.listener.close()


def _callable_address(record: EndpointRecord) -> TcpAddress:
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


def _encode_for(
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
