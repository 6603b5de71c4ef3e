"""The port to which workers call home with the streams of calls, on the genuine lane.

Owns the listener and the connections until each is claimed by its subject.  Knows
nothing of calls beyond the small interface `Expected`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from typing import TYPE_CHECKING, Protocol

from dynamo.runtime._config import advertised_host
from dynamo.runtime._sealed import override
from dynamo.runtime._transports.connection import (
    Connection,
    Limit,
    SpareMemory,
    listen,
    stop_accepting,
)
from dynamo.runtime._wire.callhome import decode_handshake
from dynamo.runtime._wire.records import TcpAddress
from dynamo.runtime._wire.two_part import TwoPart, TwoPartReader
from dynamo.runtime.errors import RemoteProtocolError, RuntimeClosed

if TYPE_CHECKING:
    from dynamo.runtime._config import RuntimeConfig
    from dynamo.runtime._network import Listening

_HANDSHAKE_TIMEOUT_S = 10.0
# A stranger may not make us keep more than this.
_MAX_HANDSHAKE_BYTES = 64 * 1024
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_FIN_ON_CLOSE = struct.pack("ii", 0, 0)


def new_subject() -> str:
    """A random version-4 UUID in text."""
    raw = bytearray(os.urandom(16))
    raw[6] = raw[6] & 0x0F | 0x40
    raw[8] = raw[8] & 0x3F | 0x80
    text = raw.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


class Expected(Protocol):
    """One stream of a call, for which a worker is to connect."""

    subject: str
    stream_type: str

    def called_home(self, connection: HomeConnection) -> None:
        """The worker has connected."""

    def receive(self, frame: TwoPart) -> None:
        """A frame came."""

    def receive_eof(self) -> None:
        """The connection has gone."""

    def writable(self) -> None:
        """The connection takes bytes again."""

    def give_up(self) -> None:
        """Nobody will connect any more."""


class HomeConnection(Connection):
    """A connection that a worker opened to our listener."""

    def __init__(self, listener: ResponseListener) -> None:
        self._reader = TwoPartReader(memory=listener.memory)
        super().__init__(listener.loop, self._reader)
        self._listener = listener
        self._call: Expected | None = None
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
        if self._listener.closed:
            # Accepted in the turn in which the port was closed: nobody expects it.
            self.abort()

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
        self._arrived(self._reader.feed(data), len(data))

    @override
    def received_directly(self, size: int) -> None:
        self._arrived(self._reader.filled(size), size)

    def _arrived(self, frames: list[TwoPart], size: int) -> None:
        for frame in frames:
            if self._call is not None:
                self._call.receive(frame)
            elif not self._handshake(frame):
                return
        self._reader.check()
        if self._call is None:
            self._strange_bytes += size
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
        call, self._call = self._call, None
        if call is not None:
            call.receive_eof()


class ResponseListener:
    """The port to which workers call home; one per runtime, opened on first use."""

    def __init__(self, loop: asyncio.AbstractEventLoop, config: RuntimeConfig) -> None:
        self.loop = loop
        self.address = ""
        self.connections: set[HomeConnection] = set()
        self.memory = SpareMemory(loop)
        self._config = config
        self._waiting: dict[str, Expected] = {}
        self._server: Listening | None = None
        self._starting = asyncio.Lock()
        self.closed = False

    async def start(self) -> None:
        """Listen, if not done before.

        Raises:
            CannotListen: the address cannot be bound.
            RuntimeClosed: the runtime was shut down.
        """
        async with self._starting:
            if self.closed:
                raise RuntimeClosed("the runtime was shut down")
            if self._server is not None:
                return
            self._server, port = await listen(
                self.loop,
                lambda: HomeConnection(self),
                self._config.response_host,
                self._config.response_port,
                backlog=self._config.listen_backlog,
                settings="DYN_TCP_RESPONSE_STREAM_HOST, DYN_TCP_RESPONSE_STREAM_PORT",
                network=self._config.network,
            )
            host = advertised_host(self._config.response_host)
            self.address = TcpAddress(host, port, "").authority

    def expect(self, call: Expected) -> None:
        self._waiting[call.subject] = call

    def take(self, subject: str) -> Expected | None:
        return self._waiting.pop(subject, None)

    def forget(self, subject: str) -> None:
        self._waiting.pop(subject, None)

    def abort(self) -> None:
        """Cut off the streams in progress: nobody will read them."""
        for connection in list(self.connections):
            connection.abort()

    async def stop_accepting(self) -> None:
        """Before `close`: let connections that are being accepted come to stand."""
        await stop_accepting(self.loop, self._server)

    def close(self) -> None:
        """Take no more calls home.  Streams in progress run to their end."""
        self.closed = True
        if self._server is not None:
            self._server.close()
            self._server = None
        for call in list(self._waiting.values()):
            call.give_up()
