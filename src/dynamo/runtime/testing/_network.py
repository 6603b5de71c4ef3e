"""Connections in the memory of one event loop: hosts, their ports, and what can befall them.

`Host` is a `Network` for runtimes of the same loop.  Its transports behave like those of
TCP sockets (order, flow control, half-closing, resets) and know nothing of what travels.
Nothing here waits for a clock.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import itertools
import socket
import struct
from collections import deque
from ipaddress import IPv4Address
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dynamo.runtime._sealed import override

if TYPE_CHECKING:
    from collections.abc import Callable

P = TypeVar("P", bound=asyncio.BaseProtocol)

Address = tuple[str, int]

# Addresses for tests of networks (RFC 2544): nothing on a real network answers there.
_FIRST_HOST = IPv4Address("198.18.0.1")
_FIRST_PORT = 1024
# What a sender is rid of before the other side reads: the buffers of two kernels.
_CAPACITY_BYTES = 256 * 1024
_CHUNK_BYTES = 256 * 1024
_DEFAULT_HIGH_WATER = 64 * 1024


class MemoryNetwork:
    """All hosts that can reach each other."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._detours: dict[Address, Address] = {}
        self.listeners: dict[Address, _Listener] = {}

    def host(self) -> Host:
        """A new host with an address of its own."""
        return Host(self, str(_FIRST_HOST + next(self._numbers)))

    def detour(self, to: Address, via: Address) -> None:
        """Let new connections to an address go to another one."""
        self._detours[to] = via

    def route(self, address: Address, start: Host) -> Address:
        """Where a connection from a host really goes."""
        via = self._detours.get(address, address)
        # Whoever stands in the way has to reach the address itself.
        return address if via[0] == start.address else via


class Host:
    """One member of the network; a `Network` for the runtime that lives there.

    Attributes:
        address: An IPv4 address.
        frozen: Whether everything that comes here or was sent from here is held.
    """

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self.address = address
        self.frozen = False
        self._network = network
        self._down = False
        self._ports = itertools.count(_FIRST_PORT)
        self._transports: dict[MemoryTransport, None] = {}

    async def connect(
        self,
        loop: asyncio.AbstractEventLoop,
        factory: Callable[[], P],
        host: str,
        port: int,
    ) -> P:
        """Open a connection.

        Raises:
            ConnectionRefusedError: nobody listens there.
        """
        await asyncio.sleep(0)
        listener = self._network.listeners.get(self._network.route((host, port), self))
        if listener is None or self._down:
            code = errno.ECONNREFUSED
            raise ConnectionRefusedError(
                code, f"nobody listens on {host}:{port} of the network in memory"
            )
        own = (self.address, next(self._ports))
        near = MemoryTransport(loop, self, own, (host, port))
        far = MemoryTransport(loop, listener.host, (host, port), own)
        near.join(far)
        far.accept(listener.factory)
        return cast("P", near.begin(factory))

    async def listen(
        self,
        loop: asyncio.AbstractEventLoop,
        factory: Callable[[], asyncio.BaseProtocol],
        host: str,
        port: int,
        backlog: int,
    ) -> tuple[_Listener, int]:
        """Accept connections to this host, on a port of its choice if ``port`` is 0.

        Raises:
            OSError: the port is taken.
        """
        address = (self.address, port or next(self._ports))
        if address in self._network.listeners:
            raise OSError(errno.EADDRINUSE, f"port {port} is in use")
        listener = _Listener(self._network, self, address, factory)
        self._network.listeners[address] = listener
        return listener, address[1]

    def add(self, transport: MemoryTransport) -> None:
        """A connection has one of its ends here."""
        self._transports[transport] = None

    def remove(self, transport: MemoryTransport) -> None:
        """It has gone."""
        self._transports.pop(transport, None)

    def freeze(self) -> None:
        """Hold everything, as if the process were stopped; connections stay."""
        self.frozen = True

    def thaw(self) -> None:
        """Let what was held go on."""
        self.frozen = False
        for transport in list(self._transports):
            transport.thaw()

    def fall(self) -> None:
        """Reset every connection and answer no more, as if the process had died."""
        self._down = True
        for address, listener in list(self._network.listeners.items()):
            if listener.host is self:
                del self._network.listeners[address]
        self.thaw()
        for transport in list(self._transports):
            transport.reset()


class _Listener:
    """An address that accepts connections."""

    sockets: tuple[()] = ()

    def __init__(
        self,
        network: MemoryNetwork,
        host: Host,
        address: Address,
        factory: Callable[[], asyncio.BaseProtocol],
    ) -> None:
        self.host = host
        self.factory = factory
        self._network = network
        self._address = address

    def close(self) -> None:
        if self._network.listeners.get(self._address) is self:
            del self._network.listeners[self._address]


class _Socket:
    """What protocols ask of the socket under a transport."""

    family = socket.AF_UNSPEC

    def __init__(self) -> None:
        self.resets_on_close = False

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_LINGER):
            assert isinstance(value, bytes)
            self.resets_on_close = struct.unpack("ii", value) == (1, 0)

    def fileno(self) -> int:
        return -1


class MemoryTransport(asyncio.Transport):
    """One end of a connection.

    What was written lies at the other end, in `incoming`, until it is read there; what
    exceeds the capacity of two kernels counts as the writer's buffer.  An end goes
    through these states, each of which includes those before::

        open -> finished (FIN sent) -> closing (reads no more) -> closed (told so)
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, host: Host, own: Address, peer: Address
    ) -> None:
        self._socket = _Socket()
        super().__init__({"sockname": own, "peername": peer, "socket": self._socket})
        self._loop = loop
        self.host = host
        self._context = contextvars.Context()
        self._protocol: asyncio.BaseProtocol | None = None
        self._factory: Callable[[], asyncio.BaseProtocol] | None = None
        self._other: MemoryTransport = self
        self.incoming: deque[bytes] = deque()
        self.incoming_bytes = 0
        self._error: OSError | None = None
        self._reading = True
        self._due = False
        self._heard_end = False
        self.finished = False
        self._closing = False
        self.closed = False
        self._paused = False
        self._high = _DEFAULT_HIGH_WATER
        self._low = _DEFAULT_HIGH_WATER // 4

    # The life of a connection

    def join(self, other: MemoryTransport) -> None:
        """Become the two ends of one connection."""
        self._other, other._other = other, self
        self.host.add(self)
        other.host.add(other)

    def begin(
        self, factory: Callable[[], asyncio.BaseProtocol]
    ) -> asyncio.BaseProtocol:
        """The connection stands."""
        return self._context.run(self._begin, factory)

    def _begin(
        self, factory: Callable[[], asyncio.BaseProtocol]
    ) -> asyncio.BaseProtocol:
        protocol = self._protocol = factory()
        protocol.connection_made(self)
        self.go_on()
        return protocol

    def accept(self, factory: Callable[[], asyncio.BaseProtocol]) -> None:
        """Let the protocol be made by the process there, when it gets to it."""
        self._factory = factory
        self.go_on()

    def go_on(self) -> None:
        """Look, in a later turn of the loop, at what there is to be told."""
        if not self._due and not self.closed:
            self._due = True
            self._loop.call_soon(self._turn, context=self._context)

    def _turn(self) -> None:
        self._due = False
        if self.closed or self.host.frozen:
            return
        if self._factory is not None:
            factory, self._factory = self._factory, None
            self._begin(factory)
        elif self._closing:
            if self.get_write_buffer_size() == 0:
                self._end(None)
        elif self._reading and not self._other.host.frozen:
            self._read()

    def thaw(self) -> None:
        """One of the two hosts is no longer frozen."""
        self.go_on()
        self._other.go_on()

    def _read(self) -> None:
        if self.incoming:
            self._deliver(self._take())
            self._other.made_room()
            self.go_on()
        elif self._error is not None:
            self._end(self._error)
        elif self._other.finished and not self._heard_end:
            self._heard_end = True
            protocol = cast("asyncio.Protocol", self._protocol)
            if not protocol.eof_received():
                self.close()

    def _take(self) -> bytes:
        """What one read of a socket gives."""
        chunk = self.incoming.popleft()
        if len(chunk) > _CHUNK_BYTES:
            self.incoming.appendleft(chunk[_CHUNK_BYTES:])
            chunk = chunk[:_CHUNK_BYTES]
        parts = [chunk]
        size = len(chunk)
        while self.incoming and size + len(self.incoming[0]) <= _CHUNK_BYTES:
            parts.append(self.incoming.popleft())
            size += len(parts[-1])
        self.incoming_bytes -= size
        return b"".join(parts)

    def _deliver(self, data: bytes) -> None:
        protocol = self._protocol
        if not isinstance(protocol, asyncio.BufferedProtocol):
            cast("asyncio.Protocol", protocol).data_received(data)
            return
        rest = memoryview(data)
        while rest:
            buffer = memoryview(cast("Any", protocol.get_buffer(len(rest)))).cast("B")
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            protocol.buffer_updated(count)
            rest = rest[count:]

    def _end(self, error: OSError | None) -> None:
        """The last thing that happens to this end."""
        unread = bool(self.incoming)
        self.closed = self._closing = self.finished = True
        self._drop_unread()
        self.host.remove(self)
        if self._socket.resets_on_close or unread:
            self._other.break_off(
                ConnectionResetError(errno.ECONNRESET, "reset by peer")
            )
        self._other.go_on()
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(error)

    def _drop_unread(self) -> None:
        self.incoming.clear()
        self.incoming_bytes = 0

    def break_off(self, error: OSError) -> None:
        """The other side reset the connection; what has arrived can still be read."""
        if not self.closed:
            self._error = error
            self.go_on()

    def reset(self) -> None:
        """Reset the connection; this side is told in a later turn."""
        self._socket.resets_on_close = True
        self.abort()

    # asyncio.Transport

    @override
    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self.finished and not self._closing:
            raise RuntimeError("cannot write after write_eof()")
        if self._closing or not data:
            return
        if self._error is None and self._other.closed:
            self._error = BrokenPipeError(errno.EPIPE, "the other side has closed")
        if self._error is not None:
            # A transport that cannot send gives up, whatever there is to be read.
            self._drop_unread()
            self._reading = True
            self.go_on()
            return
        other = self._other
        other.incoming.append(bytes(data))
        other.incoming_bytes += len(data)
        other.go_on()
        if not self._paused and self.get_write_buffer_size() > self._high:
            self._paused = True
            assert self._protocol is not None
            self._protocol.pause_writing()

    def made_room(self) -> None:
        if self.closed:
            return
        if self._closing:
            self.go_on()
        elif self._paused and self.get_write_buffer_size() <= self._low:
            self._paused = False
            assert self._protocol is not None
            # Not in the context of the other end, which reads at the moment.
            self._context.copy().run(self._protocol.resume_writing)

    @override
    def write_eof(self) -> None:
        self.finished = True
        self._other.go_on()

    @override
    def can_write_eof(self) -> bool:
        return True

    @override
    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self.go_on()

    @override
    def abort(self) -> None:
        self._drop_unsent()
        self._closing = True
        self.go_on()

    def _drop_unsent(self) -> None:
        other = self._other
        while self.get_write_buffer_size() > 0:
            last = other.incoming.pop()
            kept = last[: max(0, len(last) - self.get_write_buffer_size())]
            other.incoming_bytes -= len(last) - len(kept)
            if kept:
                other.incoming.append(kept)

    @override
    def is_closing(self) -> bool:
        return self._closing

    @override
    def pause_reading(self) -> None:
        self._reading = False

    @override
    def resume_reading(self) -> None:
        self._reading = True
        self.go_on()

    @override
    def is_reading(self) -> bool:
        return self._reading and not self._closing

    @override
    def set_write_buffer_limits(
        self, high: int | None = None, low: int | None = None
    ) -> None:
        if high is None:
            high = _DEFAULT_HIGH_WATER if low is None else 4 * low
        self._high = high
        self._low = high // 4 if low is None else low

    @override
    def get_write_buffer_size(self) -> int:
        return max(0, self._other.incoming_bytes - _CAPACITY_BYTES)

    @override
    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    @override
    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    @override
    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol
