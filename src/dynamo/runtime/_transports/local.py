"""The lane of calls within one process and loop: no socket, and the same bytes.

Values travel encoded, so that caller and handler share nothing; what remains of a wire
is that whoever ends a call never runs the other side's code before its own goes on.
Owns the table of the ports of this process.  Knows nothing of choosing and of handlers.
"""

from __future__ import annotations

import contextvars
import functools
import os
import weakref
from typing import TYPE_CHECKING, Protocol

from dynamo.runtime._sealed import override
from dynamo.runtime._transports import Rejection
from dynamo.runtime._transports.direct_call import DirectCallSide
from dynamo.runtime._transports.outgoing import (
    LOST_TEXT,
    EncodesInput,
    callable_address,
    draining,
    overloaded,
    pack_request,
)
from dynamo.runtime._wire.callhome import unknown_endpoint_text
from dynamo.runtime._wire.duplex_frames import (
    decode_error,
    decode_handler_refusal,
    encode_error,
    encode_handler_refusal,
)
from dynamo.runtime._wire.faults import (
    error_of_unreadable,
    exception_of_prologue,
    settled,
)
from dynamo.runtime._wire.payload import decode_annotated
from dynamo.runtime.errors import (
    RemoteProtocolError,
    RuntimeClosed,
)

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from dynamo.runtime._config import RuntimeConfig
    from dynamo.runtime._transports import (
        CallEvents,
        CallRequest,
    )
    from dynamo.runtime._transports.direct_call import CallTaker
    from dynamo.runtime._wire.duplex_frames import RequestHead
    from dynamo.runtime._wire.faults import ErrorObject
    from dynamo.runtime._wire.records import EndpointRecord


class LocalServer(Protocol):
    """A port of this process, as its neighbours see it."""

    loop: asyncio.AbstractEventLoop
    config: RuntimeConfig

    def taker(self, path: str) -> CallTaker | None:
        """Who serves that path, for a request that has come."""

    def called_by(self, neighbour: LocalLane) -> None:
        """A runtime of this loop calls: it may do so again."""

    def hung_up(self) -> None:
        """It will not."""


ports: dict[str, weakref.ref[LocalServer]] = {}
"""By host:port as in the records.  A port that is closed or forgotten is not there."""
if hasattr(os, "register_at_fork"):
    # The ports of the parent are not the child's.
    os.register_at_fork(after_in_child=ports.clear)


def announce(authority: str, server: LocalServer) -> None:
    """Let runtimes of this process find the port without its socket."""
    ports[authority] = weakref.ref(server, functools.partial(_forget, authority))


def _forget(authority: str, gone: weakref.ref[LocalServer]) -> None:
    """Nobody closed it; another may have taken its place since."""
    if ports.get(authority) is gone:
        del ports[authority]


def withdraw(server: LocalServer) -> None:
    """The port closes: its neighbours are told what everybody is told."""
    for authority, other in list(ports.items()):
        if other() is server:
            del ports[authority]


def neighbour(
    record: EndpointRecord, loop: asyncio.AbstractEventLoop
) -> LocalServer | None:
    """The port of a record, if it is one of this process on that loop."""
    if not ports or record.transport_kind != "tcp":
        return None
    authority, _, _ = record.address.removeprefix("tcp://").partition("/")
    known = ports.get(authority)
    server = None if known is None else known()
    return server if server is not None and server.loop is loop else None


class LocalLane:
    """Calls of one runtime to instances on its own loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, config: RuntimeConfig) -> None:
        self._loop = loop
        self._config = config
        # As the call-backs of a socket: in nobody's context.
        self._context = contextvars.Context()
        self._calls: set[LocalHandle] = set()
        self._servers: weakref.WeakSet[LocalServer] = weakref.WeakSet()
        self._last: LocalServer | None = None
        self.is_open = True

    def open_now(
        self,
        server: LocalServer,
        record: EndpointRecord,
        request: CallRequest,
        events: CallEvents,
    ) -> LocalHandle:
        """Send a call.

        Raises:
            CallError: it was not sent.
        """
        if not self.is_open:
            raise RuntimeClosed("the runtime was shut down")
        path = callable_address(record).path
        limit = self._config.max_message_bytes
        limit_there = server.config.max_message_bytes
        head, _, body = pack_request(record, path, request, limit, limit_there)
        handle = LocalHandle(self, record, events, streamed=body is None)
        call = LocalCall(handle, head, body)
        handle.call = call
        self._calls.add(handle)
        if server is not self._last:
            self._meet(server)
        self.soon(call.arrive, server)
        return handle

    def _meet(self, server: LocalServer) -> None:
        self._last = server
        self._servers.add(server)
        server.called_by(self)

    @property
    def peer(self) -> str:
        """What a server knows its caller by, as the address of a connection."""
        return f"local:{id(self):x}"

    def soon(self, event: Callable[..., object], *args: object) -> None:
        """Tell the other side in a later turn of the loop."""
        self._loop.call_soon(event, *args, context=self._context)

    def ended(self, handle: LocalHandle) -> None:
        """A call is over."""
        self._calls.discard(handle)

    def close(self) -> None:
        """Make no more calls; those in progress run to their end."""
        self.is_open = False
        self._last = None
        for server in list(self._servers):
            server.hung_up()

    def abort(self) -> None:
        """Break every call off."""
        for handle in list(self._calls):
            handle.break_off()


class LocalHandle(EncodesInput):
    """The client's half of a call: a `CallHandle`, and the `InputSink` of its input."""

    __slots__ = ("_events", "_reached", "_record", "_streamed", "call", "lane")

    def __init__(
        self,
        lane: LocalLane,
        record: EndpointRecord,
        events: CallEvents,
        *,
        streamed: bool,
    ) -> None:
        self.call: LocalCall | None = None
        """The other half; None once the call is over."""
        self.lane = lane
        self._record = record
        self._events = events
        self._streamed = streamed
        self._reached = False

    # CallHandle

    def stop(self) -> None:
        call = self.call
        if call is None:
            return
        if not call.arrived:
            self.close()
        else:
            self.lane.soon(functools.partial(call.on_stop, killed=False))

    def kill(self) -> None:
        self.close()

    def pause(self) -> None:
        if self.call is not None:
            self.call.paused = True

    def resume(self) -> None:
        if self.call is not None:
            self.call.on_writable()

    def close(self) -> None:
        call = self._let_go()
        if call is not None and call.arrived:
            self.lane.soon(functools.partial(call.on_stop, killed=True))

    def _let_go(self) -> LocalCall | None:
        """The call is over.  Both halves hold each other: no cycle is left behind."""
        call, self.call = self.call, None
        self.lane.ended(self)
        if call is not None:
            call.handle = None
        return call

    # InputSink

    @property
    def paused(self) -> bool:
        return self.call is not None and self.call.input_paused

    def send(self, body: bytes) -> None:
        if self.call is not None:
            self.call.on_input(body)

    def end(self) -> None:
        if self.call is not None:
            self.call.on_input_end()

    # What the other half reports; each only as long as the call is not over.

    def on_reached(self) -> None:
        if not self._reached:
            self._reached = True
            self._events.on_reached()
            if self._streamed:
                self._events.on_input_wanted(self)

    def on_input_room(self) -> None:
        self._events.on_input_room()

    def on_started(self) -> None:
        self.on_reached()
        self._events.on_started()

    def on_item(self, body: bytes) -> None:
        if self._record.codec == "msgpack":
            self._events.on_items([body], len(body))
            return
        try:
            item = decode_annotated(body, self._record.codec)
        except RemoteProtocolError as error:
            self.close()
            self._events.on_failed(error_of_unreadable(str(error)))
        else:
            self._events.on_items([item], len(body))

    def on_ended(self) -> None:
        self._let_go()
        self._events.on_ended()

    # What may lead to a call elsewhere is told in no handler's context.

    def on_failed(self, payload: bytes) -> None:
        self._last(self._failed, payload)

    def on_handler_refused(self, payload: bytes) -> None:
        self._last(self._handler_refused, payload)

    def on_refused(self, rejection: Rejection) -> None:
        self._last(self._refused, rejection)

    def on_lost(self) -> None:
        self._last(self._lost)

    def _last(self, event: Callable[..., object], *args: object) -> None:
        """Of a call that is killed meanwhile nobody wants to hear."""
        if self.call is not None:
            self.call.handle = None
            self.lane.soon(self._tell_last, event, *args)

    def _tell_last(self, event: Callable[..., object], *args: object) -> None:
        if self.call is not None:
            self._let_go()
            event(*args)

    def _failed(self, payload: bytes) -> None:
        self._events.on_failed(settled(decode_error(payload)))

    def _handler_refused(self, payload: bytes) -> None:
        refusal = decode_handler_refusal(payload)
        error, inhibits = exception_of_prologue(
            refusal.text, refusal.error, instance_id=self._record.instance_id
        )
        self._events.on_refused(error, inhibits=inhibits)

    def _refused(self, rejection: Rejection) -> None:
        text, pause_s = rejection.text, rejection.retry_after_s
        if pause_s is None:
            self._events.on_refused(draining(self._record, text), inhibits=True)
        else:
            self._events.on_refused(overloaded(text, pause_s), inhibits=False)

    def _lost(self) -> None:
        self._events.on_lost(LOST_TEXT)

    def break_off(self) -> None:
        """The lane closes: as if a connection had been lost."""
        call = self._let_go()
        if call is not None and call.arrived:
            call.on_stop(killed=True)
        self._lost()


class LocalCall(DirectCallSide):
    """The worker's half: `IncomingCall`, `ReplyStream` and `InputStream` in one."""

    __slots__ = ("arrived", "handle", "input_paused", "paused")

    def __init__(
        self, handle: LocalHandle, head: RequestHead, body: bytes | None
    ) -> None:
        # The caller may send the same ones to another instance: never shared.
        head.metadata = dict(head.metadata or {})
        super().__init__(head, body or b"")
        self.handle: LocalHandle | None = handle
        """The other half; None once nothing more is sent."""
        self.arrived = False
        self.paused = False
        self.input_paused = False

    def arrive(self, server: LocalServer) -> None:
        """What a worker does with a request that it has read."""
        handle = self.handle
        if handle is None:
            # Stopped before: the worker never hears of it.
            return
        self.arrived = True
        taker = server.taker(self.path)
        if taker is None:
            handle.on_refused(Rejection(unknown_endpoint_text(self.path)))
            return
        rejection = taker.take_call(self)
        if rejection is None:
            # Behind the first step of the handler.
            handle.lane.soon(self._acknowledge)
        else:
            handle.on_refused(rejection)

    def _acknowledge(self) -> None:
        if self.handle is not None and self._gone is None:
            self.handle.on_reached()

    # ReplyStream

    def start(self) -> None:
        if self.handle is not None:
            self.handle.on_started()

    def item(self, annotated: bytes) -> bool:
        if self.handle is not None:
            self.handle.on_item(annotated)
        return self.paused

    def finish(self) -> None:
        if self.handle is not None:
            self.handle.on_ended()
        self._let_go()

    def fail(self, error: ErrorObject) -> None:
        if self.handle is not None:
            self.handle.on_failed(encode_error(error))
        self._let_go()

    def refuse(self, text: str, error: ErrorObject) -> None:
        if self.handle is not None:
            self.handle.on_handler_refused(encode_handler_refusal(text, error))
        self._let_go()

    def drop(self) -> None:
        if self.handle is not None:
            self.handle.on_lost()
        self._let_go()

    @override
    def _let_go(self) -> None:
        self._events = self._input = None

    # InputStream

    def pause(self) -> None:
        self.input_paused = True

    def resume(self) -> None:
        self.input_paused = False
        if self.handle is not None:
            self.handle.on_input_room()

    # What the other half reports.

    @override
    def on_writable(self) -> None:
        self.paused = False
        super().on_writable()
