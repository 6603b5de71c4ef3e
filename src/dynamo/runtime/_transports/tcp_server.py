"""The worker's request port: accepts connections, tells the lanes apart, sends acks.

Owns the listener and the table from endpoint paths to those who serve them.  Decides
nothing about a request: whoever serves the path answers with the text of the ack.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import weakref
from typing import TYPE_CHECKING, ClassVar, Protocol

from dynamo.runtime._sealed import override
from dynamo.runtime._transports.connection import (
    Connection,
    Limit,
    SpareMemory,
    let_go,
    listen,
    stop_accepting,
)
from dynamo.runtime._transports.direct_call import CallTaker
from dynamo.runtime._transports.duplex_worker import DuplexWorkerConnection
from dynamo.runtime._transports.local import withdraw
from dynamo.runtime._wire.callhome import (
    INVALID_PATH_TEXT,
    OVERLOADED_TEXT,
    RequestReader,
    RequestReceived,
    RequestTooLarge,
    encode_ack,
    too_large_text,
    unknown_endpoint_text,
)
from dynamo.runtime._wire.duplex_frames import PREFACE

if TYPE_CHECKING:
    from dynamo.runtime._config import RuntimeConfig
    from dynamo.runtime._network import Listening
    from dynamo.runtime._transports import Rejection
    from dynamo.runtime._transports.local import LocalLane

_log = logging.getLogger("dynamo.runtime.server")

# The genuine backlog; it cannot be set there either.
_BACKLOG = 128
# A frame under way must bring this much per interval, or its sender is given up.
_PROGRESS_BYTES = 64 * 1024
_TLS_CLIENT_HELLO = b"\x16\x03"
_HTTP_VERBS = (b"GET ", b"POST", b"PUT ", b"HEAD", b"PRI ", b"OPTI", b"DELE", b"PATC")


class Taker(CallTaker, Protocol):
    """Who serves a path: takes requests of either lane."""

    def take_request(self, request: RequestReceived) -> Rejection | None:
        """Take a request of the genuine lane, or say why not."""


class RequestServer:
    """The request port of one or more runtimes of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, config: RuntimeConfig) -> None:
        self.loop = loop
        self.config = config
        self.memory = SpareMemory(loop)
        self._served: dict[str, Taker] = {}
        self._server: Listening | None = None
        self._port = 0
        self._starting = asyncio.Lock()
        self._asked_at = 0.0
        self._hung_up = asyncio.Event()
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._neighbours: weakref.WeakSet[LocalLane] = weakref.WeakSet()
        self._closed = False

    async def start(self, host: str, port: int) -> int:
        """Listen, if not done before, and return the real port.

        Raises:
            CannotListen: the address cannot be bound.
        """
        async with self._starting:
            if self._server is None:
                self._server, self._port = await listen(
                    self.loop,
                    lambda: _RequestConnection(self),
                    host,
                    port,
                    backlog=_BACKLOG,
                    settings="DYN_TCP_RPC_HOST, DYN_TCP_RPC_PORT",
                    network=self.config.network,
                )
        return self._port

    def serve(self, path: str, taker: Taker) -> None:
        """Send requests for ``path`` there; a later one replaces an earlier."""
        self._served[path] = taker

    def forget(self, path: str, taker: Taker) -> bool:
        """Serve ``path`` no longer; False if somebody else took it over meanwhile."""
        if self._served.get(path) is not taker:
            return False
        del self._served[path]
        return True

    def taker(self, path: str) -> Taker | None:
        """Who serves that path, for a request that has come."""
        self._asked_at = self.loop.time()
        return self._served.get(path)

    def answer(self, request: RequestReceived) -> str:
        """The text of the ack for a request."""
        if request.path is None:
            return INVALID_PATH_TEXT
        taker = self.taker(request.path)
        if taker is None:
            return unknown_endpoint_text(request.path)
        rejection = taker.take_request(request)
        if rejection is None:
            return ""
        # This lane has no place for what else a full endpoint may have to say.
        full = rejection.retry_after_s is not None
        return OVERLOADED_TEXT if full else rejection.text

    def _duplex_connections(self) -> list[DuplexWorkerConnection]:
        every = list(self._connections)
        return [one for one in every if isinstance(one, DuplexWorkerConnection)]

    def go_away(self) -> None:
        """Tell the clients on the duplex lane that no new calls are taken."""
        for connection in self._duplex_connections():
            connection.go_away()

    async def written(self) -> None:
        """Wait until the clients on the duplex lane were sent all that was said."""
        for connection in self._duplex_connections():
            await connection.written()

    async def quiet(self, since: float, pause_s: float, own: set[str]) -> None:
        """Wait until nobody is connected, or no request has come for so long.

        Args:
            since: The moment from which on the pause counts at the earliest.
            pause_s: How long.
            own: Addresses that are nobody's to wait for.
        """
        while self._has_callers(own):
            rest_s = max(since, self._asked_at) + pause_s - self.loop.time()
            if rest_s <= 0:
                return
            self._hung_up.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._hung_up.wait(), rest_s)

    def _has_callers(self, own: set[str]) -> bool:
        callers: list[Connection | LocalLane] = [*self._connections, *self._neighbours]
        return any(one.is_open and one.peer not in own for one in callers)

    def called_by(self, neighbour: LocalLane) -> None:
        """A runtime of this loop calls without a connection."""
        self._neighbours.add(neighbour)

    def hung_up(self) -> None:
        """A connection has gone."""
        self._hung_up.set()

    async def stop_accepting(self) -> None:
        """Before `close`: let connections that are being accepted come to stand."""
        await stop_accepting(self.loop, self._server)

    def close(self) -> None:
        """Stop listening and close every connection."""
        self._closed = True
        if self._server is not None:
            self._server.close()
            self._server = None
        withdraw(self)
        for connection in list(self._connections):
            connection.close()

    def abandon(self) -> None:
        """Give the port free after the loop was closed, which cannot do it any more."""
        if self._server is not None and os.name == "posix":
            let_go(self._server)
            self._server = None

    def track(self, connection: Connection) -> None:
        """Remember an open connection until it is closed."""
        self._connections.add(connection)
        if self._closed:
            # Accepted in the turn in which the port was closed: its client would wait.
            connection.abort()


class SharedServers:
    """The fixed ports of this process, each opened once and shared by its runtimes.

    The only state of the process that outlives a runtime: with ``DYN_TCP_RPC_PORT`` set
    a second runtime of the same loop could not bind otherwise.
    """

    _open: ClassVar[dict[tuple[int, str, int], tuple[RequestServer, int]]] = {}

    @classmethod
    async def open(
        cls,
        loop: asyncio.AbstractEventLoop,
        host: str,
        port: int,
        config: RuntimeConfig,
    ) -> tuple[RequestServer, int]:
        """A server on that address and its real port; give it back with `release`.

        Raises:
            CannotListen: the address cannot be bound.
        """
        cls._forget_closed()
        key = (id(loop), host, port)
        server, users = cls._open.get(key, (None, 0))
        if server is None:
            server = RequestServer(loop, config)
        if port != 0:
            # Before it listens: a second runtime may come meanwhile.
            cls._open[key] = (server, users + 1)
        try:
            return server, await server.start(host, port)
        except BaseException:
            cls.release(server)
            raise

    @classmethod
    def _forget_closed(cls) -> None:
        """Programs may close a loop without a shutdown, and go on with another."""
        for key, (server, _) in list(cls._open.items()):
            if server.loop.is_closed():
                del cls._open[key]
                server.abandon()

    @classmethod
    def is_shared(cls, server: RequestServer) -> bool:
        """Whether more than one runtime uses the server."""
        return any(one is server and users > 1 for one, users in cls._open.values())

    @classmethod
    def release(cls, server: RequestServer) -> None:
        """Close the server, unless another runtime still uses it."""
        for key, (shared, users) in list(cls._open.items()):
            if shared is server:
                if users > 1:
                    cls._open[key] = (server, users - 1)
                    return
                del cls._open[key]
        server.close()


class _RequestConnection(Connection):
    """One client's connection to the request port."""

    def __init__(self, server: RequestServer) -> None:
        self._reader = RequestReader(
            server.config.max_message_bytes, memory=server.memory
        )
        super().__init__(server.loop, self._reader)
        self._owner = server
        self._received_bytes = 0
        # What came before it was clear which lane this is; None once it is.
        self._head: bytes | None = b""
        self._deadline: asyncio.TimerHandle | Limit | None = None

    @override
    def opened(self) -> None:
        self._owner.track(self)

    @override
    def received(self, data: bytes) -> None:
        if self._head is not None:
            data = self._head + data
            if not self._is_callhome(data):
                return
        self._arrived(self._reader.feed(data), len(data))

    @override
    def received_directly(self, size: int) -> None:
        self._arrived(self._reader.filled(size), size)

    def _arrived(
        self, events: list[RequestReceived | RequestTooLarge], size: int
    ) -> None:
        self._received_bytes += size
        if events:
            self._stop_watching()
        for event in events:
            if isinstance(event, RequestTooLarge):
                self._refuse_too_large(event)
                return
            self.send(encode_ack(self._owner.answer(event)))
        if self.paused:
            # A client that reads no acks sends no further requests either.
            self.pause_reading()
        self._watch_frame()

    def _is_callhome(self, data: bytes) -> bool:
        """Whether the first bytes are those of the genuine lane; else sees to them."""
        if self._is_foreign(data):
            return False
        duplex = "duplex" in self._owner.config.lanes
        if duplex and data.startswith(PREFACE):
            self._become_duplex(data[len(PREFACE) :])
            return False
        if duplex and PREFACE.startswith(data):
            self._head = data
            self._watch_frame()
            return False
        self._head = None
        return True

    def _become_duplex(self, rest: bytes) -> None:
        """Hand the socket over to the other lane."""
        self._stop_watching()
        transport, self._transport = self._transport, None
        assert transport is not None
        owner = self._owner
        successor = DuplexWorkerConnection(self._loop, owner.config, owner)
        transport.set_protocol(successor)
        successor.connection_made(transport)
        owner.track(successor)
        if rest:
            successor.data_received(rest)

    @override
    def writable(self) -> None:
        self.resume_reading()

    def _is_foreign(self, data: bytes) -> bool:
        """Close what is plainly another protocol, with one line for the operator."""
        if data.startswith(_TLS_CLIENT_HELLO):
            what = "TLS, but this port is plain: set DYN_TCP_TLS_* alike on both sides"
        elif data.startswith(_HTTP_VERBS):
            what = "HTTP, but this is the request port of a worker"
        else:
            return False
        _log.warning("closing the connection with %s: it speaks %s", self.peer, what)
        self.abort()
        return True

    def _refuse_too_large(self, event: RequestTooLarge) -> None:
        """Answer and close our half; the reader ignores what still comes.

        Closing at once, with the rest of the frame unread, would be a reset, which can
        overtake the answer.
        """
        text = too_large_text(event.size_bytes, event.max_bytes)
        _log.warning("request from %s refused: %s", self.peer, text)
        self.send(encode_ack(text))
        self.send_eof()
        self._deadline = self._loop.call_later(
            self._owner.config.frame_timeout_s, self.abort
        )

    def _watch_frame(self) -> None:
        """Time frames from their first byte: pools connect long before they send."""
        begun = self._head or self._reader.mid_frame
        if begun and self._deadline is None:
            before_bytes = self._received_bytes
            self._deadline = Limit(
                self._loop,
                self._owner.config.frame_timeout_s,
                lambda: self._check_frame(before_bytes),
            )

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _check_frame(self, before_bytes: int) -> None:
        self._deadline = None
        if self._received_bytes - before_bytes >= _PROGRESS_BYTES:
            self._watch_frame()
            return
        _log.warning(
            "closing the connection with %s: a request frame was not completed within "
            "%g s",
            self.peer,
            self._owner.config.frame_timeout_s,
        )
        self.abort()

    @override
    def lost(self, error: Exception | None) -> None:
        self._stop_watching()
        self._owner.hung_up()
