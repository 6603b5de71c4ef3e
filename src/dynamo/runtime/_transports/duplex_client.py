"""The client's end of the duplex lane: connections per worker process, and their calls.

A connection is opened on first use, re-opened with a back-off, and closed when it is
idle.  Knows nothing of choosing or retrying; says which calls were never started.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from dynamo.runtime._sealed import override
from dynamo.runtime._transports.connection import (
    Limit,
    SharedOpening,
    SpareMemory,
    connect,
    connection_failed,
)
from dynamo.runtime._transports.duplex import DuplexConnection
from dynamo.runtime._transports.outgoing import (
    LOST_TEXT,
    EncodesInput,
    callable_address,
    draining,
    overloaded,
    pack_request,
    too_large_there,
)
from dynamo.runtime._wire.duplex import ANSWER, STARTED, WRITABLE, ClientSide
from dynamo.runtime._wire.duplex_frames import (
    CHUNK_BYTES,
    END,
    ERROR,
    HANDLER_REFUSED,
    INPUT,
    ITEM,
    OVERLOADED,
    QUEUED,
    REFUSED,
    REQUEST,
    TOO_LARGE,
    Hello,
)
from dynamo.runtime._wire.faults import (
    error_of_unreadable,
    exception_of_prologue,
    settled,
)
from dynamo.runtime._wire.payload import (
    decode_annotated,
)
from dynamo.runtime.errors import (
    CallError,
    CallTimeout,
    ConnectionFailed,
    RemoteProtocolError,
    RuntimeClosed,
)

if TYPE_CHECKING:
    from dynamo.runtime._config import RuntimeConfig
    from dynamo.runtime._transports import CallEvents, CallRequest
    from dynamo.runtime._wire.duplex import Event, Stream
    from dynamo.runtime._wire.duplex_frames import HandlerRefusal, Refusal
    from dynamo.runtime._wire.faults import ErrorObject
    from dynamo.runtime._wire.records import EndpointRecord, TcpAddress

_log = logging.getLogger("dynamo.runtime.duplex")

_BACKOFF_FIRST_S = 0.05
_BACKOFF_MAX_S = 0.2
_CLOSED_AT_ONCE = "it was closed as soon as it stood"


class NoDuplex(CallError):
    """The worker's port does not speak the lane; nothing was sent."""

    phase = "connect"
    retryable = True


class _Call(EncodesInput):
    """One outgoing call: a `CallHandle`, and the `InputSink` of its input."""

    __slots__ = (
        "_acknowledged",
        "_connection",
        "_events",
        "_over",
        "_record",
        "_stream",
        "_streamed",
    )

    def __init__(
        self,
        connection: _WorkerConnection,
        record: EndpointRecord,
        events: CallEvents,
        front: bytes,
        value: bytes | None,
    ) -> None:
        self._connection = connection
        self._record = record
        self._events = events
        self._streamed = value is None
        self._acknowledged = False
        self._over = False
        self._stream = connection.side.open(front, value or b"")
        self._stream.owner = self

    # CallHandle

    def stop(self) -> None:
        if self._over:
            return
        if not self._connection.side.stop(self._stream):
            self.close()
        self._connection.touch()

    def kill(self) -> None:
        self.close()

    def pause(self) -> None:
        self._connection.side.withhold(self._stream)

    def resume(self) -> None:
        self._connection.side.release(self._stream)
        self._connection.touch()

    def close(self) -> None:
        if not self._over:
            self._let_go()
            self._connection.end(self, self._stream)

    # InputSink

    @property
    def paused(self) -> bool:
        return bool(self._stream.queue) or self._connection.paused

    def send(self, body: bytes) -> None:
        if not self._over:
            self._connection.side.send(self._stream, INPUT, body)
            self._connection.touch()

    def end(self) -> None:
        if not self._over:
            self._connection.side.end_input(self._stream)
            self._connection.touch()

    # What the connection reports.

    def on_items(self, bodies: list[bytes | memoryview]) -> None:
        self._stream.items = None
        size_bytes = sum(map(len, bodies))
        if size_bytes > CHUNK_BYTES or self._record.codec != "msgpack":
            self._decode_now(bodies)
        else:
            self._events.on_items(bodies, size_bytes)

    def _decode_now(self, bodies: list[bytes | memoryview]) -> None:
        """The memory of large items is wanted again; their bytes cannot wait."""
        for body in bodies:
            try:
                item = decode_annotated(body, self._record.codec)
            except RemoteProtocolError as error:
                # Those before it still count.
                self.close()
                self._events.on_failed(error_of_unreadable(str(error)))
                return
            self._events.on_items([item], len(body))

    def on_answer(self, body: bytes | memoryview) -> None:
        """The whole answer is one item, and the first that is heard of the call."""
        plain = type(body) is bytes and self._record.codec == "msgpack"
        if self._streamed or self._acknowledged or not plain:
            self._on_answer_in_steps(body)
            return
        self._acknowledged = self._over = True
        self._stream.owner = None
        del self._connection.unacknowledged[self]
        self._events.on_answer(body)

    def _on_answer_in_steps(self, body: bytes | memoryview) -> None:
        """What is told of one step may end the call before the next."""
        self.on_started()
        if not self._over:
            self.on_items([body])
        if not self._over:
            self.on_event(END, None)

    def on_started(self) -> None:
        self._acknowledge(STARTED)
        self._events.on_started()

    def on_event(self, kind: int, payload: Any) -> None:
        """Everything but items and their beginning."""
        if kind == WRITABLE:
            if not self._acknowledged:
                self._connection.gone_out(self)
            self.on_writable()
            return
        self._acknowledge(kind)
        if kind == QUEUED:
            self._events.on_reached()
        elif not self._over:
            self._let_go()
            if kind == END:
                self._events.on_ended()
            else:
                self._on_last(kind, payload)

    def _acknowledge(self, kind: int) -> None:
        if self._acknowledged:
            return
        self._acknowledged = True
        del self._connection.unacknowledged[self]
        if self._streamed and kind in (QUEUED, STARTED):
            # The worker has the request and does not refuse it.
            self._events.on_input_wanted(self)

    def _let_go(self) -> None:
        """The call is over.  Both hold each other: no cycle is left behind."""
        self._over = True
        self._stream.owner = None

    def on_writable(self) -> None:
        if self._streamed and self._acknowledged and not self._over:
            self._events.on_input_room()

    @property
    def sending(self) -> bool:
        """Whether a part of the request waits for credit."""
        queue = self._stream.queue
        return bool(queue) and queue[0][0] == REQUEST

    def _on_last(self, kind: int, payload: Any) -> None:
        if kind == ERROR:
            self._on_error(payload)
        elif kind == HANDLER_REFUSED:
            self._on_handler_refused(payload)
        elif kind == REFUSED:
            self._on_refused(payload)
        else:
            self._events.on_lost(LOST_TEXT)

    def _on_error(self, error: ErrorObject) -> None:
        self._events.on_failed(settled(error))

    def _on_handler_refused(self, refusal: HandlerRefusal) -> None:
        error, inhibits = exception_of_prologue(
            refusal.text, refusal.error, instance_id=self._record.instance_id
        )
        self._events.on_refused(error, inhibits=inhibits)

    def _on_refused(self, refusal: Refusal) -> None:
        error: CallError
        if refusal.code == OVERLOADED:
            error = overloaded(refusal.text, (refusal.retry_after_ms or 1000) / 1000)
        elif refusal.code == TOO_LARGE:
            error = too_large_there(refusal.text)
        else:
            error = draining(self._record, refusal.text)
        inhibits = refusal.code not in (OVERLOADED, TOO_LARGE)
        self._events.on_refused(error, inhibits=inhibits)

    def refuse(self, error: CallError | RuntimeClosed, *, inhibits: bool) -> None:
        """The call fails before its stream began, for a reason of our own."""
        if not self._over:
            self.close()
            self._events.on_refused(error, inhibits=inhibits)

    def on_lost(self, error: ConnectionFailed, *, never_left: bool) -> None:
        """The connection has gone."""
        if self._over:
            return
        self._let_go()
        if never_left or not self._acknowledged:
            self._events.on_refused(error, inhibits=True)
        else:
            self._events.on_lost(LOST_TEXT)


class _WorkerConnection(DuplexConnection):
    """The client's end of a connection to one worker process."""

    side: ClientSide

    def __init__(self, link: _Link) -> None:
        self.side = ClientSide(Hello(), link.memory)
        super().__init__(link.loop, link.config, self.side)
        self.greeted: asyncio.Future[None] = link.loop.create_future()
        self._link = link
        self._used_at = link.loop.time()
        self.unacknowledged: dict[_Call, float] = {}
        """The calls that have not been, and until when: in the order of these limits."""
        self._timer: Limit | None = None
        self._retiring = False

    def call(
        self,
        record: EndpointRecord,
        path: str,
        request: CallRequest,
        events: CallEvents,
    ) -> _Call:
        """Send a request.

        Raises:
            MessageTooLarge: it is over a limit, of ours or of the worker.
            CallTimeout: its deadline has passed.
            CallError: the instance cannot read the value.
        """
        assert self.side.peer is not None
        limit = self._config.max_message_bytes
        limit_there = self.side.peer.max_message_bytes or limit
        _, front, body = pack_request(record, path, request, limit, limit_there)
        call = _Call(self, record, events, front, body)
        limit_at = self._loop.time() + self._config.request_timeout_s
        self.unacknowledged[call] = limit_at
        if self._timer is None:
            self._set_timer(limit_at)
        if len(self.side.out) >= self.flush_at:
            self.touch()
        return call

    def gone_out(self, call: _Call) -> None:
        """Its request had to wait for credit: the time of the call begins now."""
        del self.unacknowledged[call]
        limit_at = self._loop.time() + self._config.request_timeout_s
        self.unacknowledged[call] = limit_at

    def end(self, call: _Call, stream: Stream) -> None:
        """Forget a call, and tell the worker if it may know of it."""
        self.unacknowledged.pop(call, None)
        self.side.kill(stream)
        self.touch()
        self._close_if_done()

    def retire(self) -> None:
        """Close when the last call has ended."""
        self._retiring = True
        self._close_if_done()

    def shut_down(self) -> None:
        """Retire; the calls that were not acknowledged fail."""
        self.retire()
        for call in list(self.unacknowledged):
            error = RuntimeClosed("the runtime was shut down during the call")
            call.refuse(error, inhibits=False)

    @property
    def takes_calls(self) -> bool:
        opened = self._transport is not None and not self._closing
        return opened and self.side.usable

    @property
    def idle(self) -> bool:
        return not self.side.streams and not self.side.waiting

    def _close_if_done(self) -> None:
        if self.idle:
            self._used_at = self._loop.time()
            if self._retiring or self.side.going_away:
                self.close()

    # The limit for acknowledgements

    def _set_timer(self, at: float) -> None:
        self._timer = Limit(self._loop, at - self._loop.time(), self._expire)

    def _expire(self) -> None:
        assert self._timer is not None
        unacknowledged, slack_s = self.unacknowledged, self._timer.slack_s
        for call in unacknowledged:
            unacknowledged[call] += slack_s
        now = self._loop.time()
        while unacknowledged:
            call, limit_at = next(iter(unacknowledged.items()))
            if limit_at > now:
                self._set_timer(limit_at)
                return
            if call.sending:
                # Its time begins when it has gone out.
                self.gone_out(call)
            else:
                call.refuse(self._no_answer(), inhibits=True)
        self._timer = None

    def _no_answer(self) -> CallTimeout:
        return CallTimeout(
            f"DeadlineExceeded: TCP request to {self._link.authority} timed out",
            facts={"limit": "DYN_TCP_REQUEST_TIMEOUT"},
        )

    # DuplexConnection

    @override
    def received(self, data: bytes) -> None:
        try:
            super().received(data)
        except RemoteProtocolError as error:
            if self.greeted.done():
                raise
            self.greeted.set_exception(
                NoDuplex(
                    f"Unavailable: {self._link.authority} does not speak the duplex "
                    "lane",
                    facts={"reason": str(error)},
                )
            )
            self.abort()

    @override
    def handle(self, events: list[Event]) -> None:
        # Large items go as they are read: all of them twice would be too much.
        events.reverse()
        while events:
            kind, stream, payload = events.pop()
            if stream is None:
                # HELLO: the only one about the connection itself.
                self.greeted.set_result(None)
                continue
            call = stream.owner
            if call is None:
                # It ended while the events before this one were handled.
                continue
            if kind == ITEM:
                call.on_items(payload)
            elif kind == ANSWER:
                call.on_answer(payload)
            elif kind == STARTED:
                call.on_started()
            else:
                call.on_event(kind, payload)
        self._close_if_done()

    @override
    def writable(self) -> None:
        for stream in list(self.side.streams.values()):
            if stream.owner is not None:
                stream.owner.on_writable()

    @override
    def checked(self, now: float) -> None:
        if self.idle and now - self._used_at >= self._config.host_idle_ttl_s:
            self.close()

    @override
    def lost(self, error: Exception | None) -> None:
        super().lost(error)
        if self._timer is not None:
            self._timer.cancel()
        self._link.forget(self)
        reason = self.loss or str(error or "closed by the worker")
        if not self.greeted.done():
            self.greeted.set_exception(connection_failed(self._link.authority, reason))
        # Nobody may be waiting for it.
        self.greeted.exception()
        never_left = self.side.never_left()
        self.unacknowledged.clear()
        for stream in self.side.lost():
            left = stream not in never_left
            if stream.owner is not None:
                failed = connection_failed(
                    self._link.authority,
                    reason,
                    phase="ack" if left else "send",
                    retryable=not left,
                )
                stream.owner.on_lost(failed, never_left=not left)


class _Link:
    """The way to one worker process: its connections, or how to make one.

    Usually one.  With ``DYN_RUNTIME_DUPLEX_CONNECTIONS`` more of them, another is opened
    when each that is there has a call; that call does not wait for it.
    """

    def __init__(self, lane: DuplexClientLane, address: TcpAddress) -> None:
        self.loop = lane.loop
        self.config = lane.config
        self.memory = lane.memory
        self.authority = address.authority
        self._lane = lane
        self._host = address.host
        self._port = address.port
        # Those that take calls, and all.
        self._ready: list[_WorkerConnection] = []
        self._connections: set[_WorkerConnection] = set()
        self._opening = SharedOpening(self.loop, self._open, self._on_opened)
        self._failures = 0
        self._not_before = 0.0
        self._last_failure = ""

    async def connection(self, record: EndpointRecord) -> _WorkerConnection:
        """A connection that takes a call, made if there is none.

        Raises:
            NoDuplex: the port does not speak the lane.
            ConnectionFailed: there is none, and none could be made.
            Refused: the worker takes no new calls.
        """
        connection = self.standing(record)
        if connection is None:
            connection = await self._opened()
            if connection.side.going_away:
                raise draining(record)
            if not connection.is_open:
                # Lost between the turn in which it stood and this one.
                raise connection_failed(self.authority, _CLOSED_AT_ONCE)
        return connection

    def standing(self, record: EndpointRecord) -> _WorkerConnection | None:
        """The connection that takes a call now, or None.

        Raises:
            Refused: the worker takes no new calls.
        """
        ready = self._ready
        if len(ready) == self.config.duplex_connections == 1 and ready[0].takes_calls:
            # As nearly always.
            return ready[0]
        connection = self._least_busy()
        if connection is not None and connection.side.going_away:
            raise draining(record)
        return connection

    def _least_busy(self) -> _WorkerConnection | None:
        """The best there is; sees to it that there will be enough."""
        ready = self._ready
        for connection in ready:
            if not connection.takes_calls:
                return self._retired(connection)
        if not ready:
            return None
        least = ready[0] if len(ready) == 1 else min(ready, key=_calls_on)
        if len(ready) < self.config.duplex_connections and _calls_on(least):
            self._open_another()
        return least

    def _open_another(self) -> None:
        """Beside the call that would have liked it."""
        if self.loop.time() >= self._not_before:
            self._opening.begin()

    def _retired(self, connection: _WorkerConnection) -> _WorkerConnection | None:
        """One that takes no calls gives way to others."""
        if connection.is_open and connection.side.going_away:
            # The worker drains, and says so on all of them.
            return connection
        self._ready.remove(connection)
        if connection.is_open:
            # It has come near the end of its ids.
            connection.retire()
        return self._least_busy()

    async def _opened(self) -> _WorkerConnection:
        """One more connection, unless that has failed just now."""
        if self.loop.time() < self._not_before:
            # Nobody waits to hear what is known: another instance may take the call.
            reason = f"{self._last_failure} (a moment ago)"
            raise connection_failed(self.authority, reason)
        return await self._opening.connection()

    async def _open(self) -> _WorkerConnection:
        limit_s = self.config.connect_timeout_s
        began = self.loop.time()
        async with self._lane.connecting:
            connection = await connect(
                self.loop,
                lambda: _WorkerConnection(self),
                self._host,
                self._port,
                limit_s,
                self.config.network,
            )
        if connection.is_open:
            self._connections.add(connection)
        try:
            await self._greeting(connection, began + limit_s - self.loop.time())
        except BaseException:
            connection.abort()
            raise
        return connection

    async def _greeting(self, connection: _WorkerConnection, limit_s: float) -> None:
        await asyncio.wait((connection.greeted,), timeout=max(limit_s, 0.001))
        if not connection.greeted.done():
            raise NoDuplex(
                f"Unavailable: {self.authority} does not answer on the duplex lane",
                facts={
                    "reason": f"no preface within {self.config.connect_timeout_s:g} s"
                },
            )
        connection.greeted.result()
        if not connection.is_open:
            raise connection_failed(self.authority, _CLOSED_AT_ONCE)

    def _on_opened(self, task: asyncio.Task[_WorkerConnection]) -> None:
        if task.cancelled():
            return
        if task.exception() is None:
            self._failures = 0
            self._not_before = 0.0
            self._ready.append(task.result())
            return
        error = task.exception()
        facts = error.facts if isinstance(error, CallError) else {}
        self._last_failure = str(facts.get("reason", error))
        # The first failure is followed by a try at once: a worker may have come back.
        if self._failures:
            pause_s = _BACKOFF_FIRST_S * 2 ** min(self._failures - 1, 10)
            self._not_before = self.loop.time() + min(pause_s, _BACKOFF_MAX_S)
        self._failures += 1

    def forget(self, connection: _WorkerConnection) -> None:
        self._connections.discard(connection)
        if connection in self._ready:
            self._ready.remove(connection)

    @property
    def connections(self) -> tuple[_WorkerConnection, ...]:
        return tuple(self._connections)

    @property
    def unused(self) -> bool:
        """Whether nothing is lost by forgetting it."""
        waits = self._not_before > self.loop.time()
        return not (self._opening.under_way or self._connections or waits)

    def close(self) -> None:
        self._opening.cancel()
        for connection in list(self._connections):
            connection.shut_down()

    def abort(self) -> None:
        for connection in list(self._connections):
            connection.abort()


def _calls_on(connection: _WorkerConnection) -> int:
    return len(connection.side.streams)


class DuplexClientLane:
    """Calls of one runtime over the duplex lane."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        config: RuntimeConfig,
        connecting: asyncio.Semaphore,
    ) -> None:
        self.loop = loop
        self.config = config
        self.connecting = connecting
        self.memory = SpareMemory(loop)
        self._links: dict[tuple[str, int], _Link] = {}
        # By the addresses in records, which take time to read.
        self._routes: dict[str, tuple[TcpAddress, _Link]] = {}
        self._closed = False

    def open_now(
        self, record: EndpointRecord, request: CallRequest, events: CallEvents
    ) -> _Call | None:
        """Send a call over a connection that stands; None if there is none.

        Raises:
            CallError: it was not sent.
        """
        # Closed lanes have no routes.
        address, link = self._routes.get(record.address) or self._route(record)
        connection = link.standing(record)
        if connection is None:
            return None
        return connection.call(record, address.path, request, events)

    async def open(
        self, record: EndpointRecord, request: CallRequest, events: CallEvents
    ) -> _Call:
        """Send a call.

        Raises:
            NoDuplex: the worker's port does not speak the lane; nothing was sent.
            CallError: it was not sent.
        """
        address, link = self._route(record)
        connection = await link.connection(record)
        return connection.call(record, address.path, request, events)

    def _route(self, record: EndpointRecord) -> tuple[TcpAddress, _Link]:
        if self._closed:
            raise RuntimeClosed("the runtime was shut down")
        address = callable_address(record)
        key = (address.host, address.port)
        link = self._links.get(key) or self._new_link(key, address)
        route = self._routes[record.address] = (address, link)
        return route

    def _new_link(self, key: tuple[str, int], address: TcpAddress) -> _Link:
        self._routes.clear()
        for old_key, old in list(self._links.items()):
            if old.unused:
                del self._links[old_key]
        link = self._links[key] = _Link(self, address)
        return link

    def addresses(self) -> set[str]:
        """Our own ends of all connections."""
        links = self._links.values()
        return {one.local for link in links for one in link.connections}

    async def aclose(self) -> None:
        """Make no more calls; those in progress run to their end."""
        self._closed = True
        self._routes.clear()
        for link in list(self._links.values()):
            link.close()

    def abort(self) -> None:
        """Close every connection now, with the calls on it."""
        for link in list(self._links.values()):
            link.abort()
