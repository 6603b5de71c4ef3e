"""One TCP connection as an asyncio.Protocol: batched writes, watermarks, closing.

Owns the border between asyncio's transports and everything above: OSError becomes a
typed error here and nowhere else.  Knows no protocol; subclasses feed their reader in
`received`, which must not raise.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import logging
import os
import socket
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

from dynamo.runtime._network import SOCKETS, Listening, Network
from dynamo.runtime._sealed import override
from dynamo.runtime._wire.framing import LARGE_BYTES, FrameReader, Memory
from dynamo.runtime.errors import (
    CallError,
    CannotListen,
    ConnectionFailed,
    ProtocolError,
    RuntimeClosed,
)

_log = logging.getLogger("dynamo.runtime.transport")

T = TypeVar("T")
P = TypeVar("P", bound="Connection")

# Descriptors come back when other connections end, perhaps in a moment.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS)
_RETRY_S = 0.02
# A loop that is later than this for an appointment stood still, and how often to look.
_STOOD_STILL_S = 0.05
_LOOKS = 4
# Small frames of one turn of the loop go out in one write; more than this many, or this
# much, do not wait for the end of the turn: the peer can start while we go on.
_EARLY_FRAMES = 16
_EARLY_BYTES = 64 * 1024
_HIGH_WATER = 256 * 1024
# How long room for large messages is kept for the next one.
_KEPT_S = 2.0
_SLICE_BYTES = 256 * 1024
# Never added to: an empty deque for each connection would take 600 bytes.
_NO_BACKLOG: deque[memoryview] = deque()
_TURNS_TO_ACCEPT = 3
_KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 3}


def spawn(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, T],
    context: contextvars.Context | None = None,
) -> asyncio.Task[T]:
    """A task in a context of its own; without one, in an empty context.

    Python 3.10 has no ``create_task(context=)``; a task copies the current context.
    """
    inside = contextvars.Context() if context is None else context
    return inside.run(loop.create_task, coroutine)


class Limit:
    """A bound on how long the other side may take.

    Time in which our own loop stood still does not count: what came meanwhile must be
    read, and what was queued be sent, before anybody is judged.  Therefore it looks at
    the clock several times.

    Args:
        loop: The home loop.
        delay_s: How long the other side has.
        expired: Called once it has not kept to that.

    Attributes:
        slack_s: By how much the bound was moved so far.
    """

    __slots__ = ("_at", "_expired", "_look_at", "_loop", "_step_s", "_timer", "slack_s")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        delay_s: float,
        expired: Callable[[], None],
    ) -> None:
        self.slack_s = 0.0
        self._loop = loop
        self._expired = expired
        self._step_s = max(delay_s, 0.0) / _LOOKS
        now = loop.time()
        self._at = now + max(delay_s, 0.0)
        self._look_at = now + self._step_s
        self._timer = loop.call_at(self._look_at, self._look)

    def cancel(self) -> None:
        """End it; nothing is called any more."""
        self._timer.cancel()
        # What it would have called usually owns it: no cycle is left behind.
        self._expired = _nothing

    def _look(self) -> None:
        now = self._loop.time()
        late_s = now - self._look_at
        if late_s > _STOOD_STILL_S:
            self.slack_s += late_s
            self._at += late_s
        elif self._look_at >= self._at:
            expired = self._expired
            self.cancel()
            expired()
            return
        self._look_at = min(self._at, now + self._step_s)
        self._timer = self._loop.call_at(self._look_at, self._look)


def _nothing() -> None:
    """Takes the place of a call-back that is not to be called any more."""


class SpareMemory(Memory):
    """Room for large messages that is kept while they come one after the other."""

    __slots__ = ("_loop", "_timer", "_used")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._used = False

    @override
    def give(self, room: bytearray) -> None:
        super().give(room)
        self._used = True
        if self._timer is None:
            self._timer = self._loop.call_later(_KEPT_S, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._used:
            self._used = False
            self._timer = self._loop.call_later(_KEPT_S, self._look)
        else:
            self.drop()


class _DirectReads(asyncio.BufferedProtocol):
    """Stands in for a connection while a large frame comes.

    The system writes the rest of it to where it is put together.  For small frames this
    way costs more than it saves.
    """

    def __init__(self, connection: Connection, frames: FrameReader[Any]) -> None:
        self._connection = connection
        self._frames = frames

    @override
    def get_buffer(self, sizehint: int) -> memoryview:
        return self._frames.space()

    @override
    def buffer_updated(self, nbytes: int) -> None:
        self._connection.buffer_updated(nbytes)

    @override
    def eof_received(self) -> bool:
        return self._connection.eof_received()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    @override
    def pause_writing(self) -> None:
        self._connection.pause_writing()

    @override
    def resume_writing(self) -> None:
        self._connection.resume_writing()


class Connection(asyncio.Protocol):
    """A connection that sends in batches.  One per socket; not reusable.

    Args:
        frames: The reader whose large frames are read to where they belong; then
            `received_directly` must be there.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        frames: FrameReader[Any] | None = None,
    ) -> None:
        self._frames = frames
        self._direct: asyncio.BufferedProtocol | None = None
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._flush_due = False
        # Slices of large frames, where the transport would copy all of them.
        self._backlog: deque[memoryview] = _NO_BACKLOG
        self._gathers = False
        self._closing = False
        self.paused = False
        self.reading = True

    # What subclasses override.

    def opened(self) -> None:
        """The connection stands."""

    def received(self, data: bytes) -> None:
        """Bytes arrived.  A `ProtocolError` closes the connection with a log line."""

    def received_directly(self, size: int) -> None:
        """So many bytes arrived in the `space` of our reader; the same applies."""

    def peer_finished(self) -> bool:
        """The peer sent FIN.  Return True to keep our half open."""
        return False

    def lost(self, error: Exception | None) -> None:
        """The connection has gone; called once, after `opened`.

        ``_out`` holds the frames that were never handed to the socket.
        """

    def writable(self) -> None:
        """``paused`` became False."""

    # What subclasses and owners call.

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._closing

    @property
    def peer(self) -> str:
        """The peer's address for log lines."""
        name = self._transport and self._transport.get_extra_info("peername")
        return f"{name[0]}:{name[1]}" if name else "a closed connection"

    @property
    def local(self) -> str:
        """Our own address, which is `peer` at the other end."""
        name = self._transport and self._transport.get_extra_info("sockname")
        return f"{name[0]}:{name[1]}" if name else ""

    def send(self, frame: bytes) -> None:
        """Queue a frame; it goes out at the end of this turn of the loop at the latest."""
        if self._closing:
            return
        self._out.append(frame)
        self._out_bytes += len(frame)
        if len(self._out) >= _EARLY_FRAMES or self._out_bytes >= _EARLY_BYTES:
            self.flush()
        elif not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush_at_end_of_turn)

    def send_pieces(self, pieces: tuple[bytes, ...]) -> None:
        """Queue one frame that is made of these; a large one is not copied."""
        if sum(map(len, pieces)) <= LARGE_BYTES:
            self.send(b"".join(pieces))
            return
        if self._closing:
            return
        self.flush()
        transport = self._transport
        if transport is None or transport.is_closing():
            # It counts among those that were never handed to the socket.
            self._out.append(b"".join(pieces))
            return
        if self._gathers:
            transport.writelines(pieces)
            return
        if not self._backlog:
            self._backlog = deque()
        for piece in pieces:
            self._backlog.extend(_slices(piece))
        self._write_backlog()

    def _write_backlog(self, *, whole: bool = False) -> None:
        """Write as far as the transport wants; its own buffer would be a copy of all."""
        transport = self._transport
        if transport is None or transport.is_closing():
            self._backlog.clear()
            return
        while self._backlog and (whole or not self.paused):
            transport.write(self._backlog.popleft())

    def _write_apart(self, pieces: Sequence[bytes]) -> None:
        """Write what is too much to be joined: in one call of the system, if possible."""
        transport = self._transport
        assert transport is not None
        if self._gathers:
            transport.writelines(pieces)
        else:
            for piece in pieces:
                transport.write(piece)

    def _flush_at_end_of_turn(self) -> None:
        self._flush_due = False
        self.flush()

    def flush(self) -> None:
        """Hand everything queued to the socket."""
        out = self._out
        if not out or self._transport is None:
            return
        if self._transport.is_closing():
            # A send has failed; `lost` follows.  Transports complain if one goes on.
            return
        data = out[0] if len(out) == 1 else b"".join(out)
        self._out = []
        self._out_bytes = 0
        if self._backlog:
            self._backlog.append(memoryview(data))
        else:
            self._transport.write(data)

    def pause_until_written(self) -> None:
        """Be ``paused`` from now on while anything at all is left in our buffer."""
        if self._transport is not None:
            self._transport.set_write_buffer_limits(high=0)

    def send_eof(self) -> None:
        """Send what is queued, then FIN; go on receiving."""
        self.flush()
        self._write_backlog(whole=True)
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()

    def pause_reading(self) -> None:
        """Take no more bytes from the socket."""
        if self.reading and self._transport is not None:
            self.reading = False
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Take bytes again."""
        if not self.reading and self._transport is not None:
            self.reading = True
            # The transport remembers the context in which it was resumed for all its
            # later call-backs: never that of the task which happened to make room.
            contextvars.Context().run(self._transport.resume_reading)

    def close(self) -> None:
        """Send what is queued, then close."""
        if self._transport is not None and not self._closing:
            self.flush()
            self._write_backlog(whole=True)
            self._closing = True
            self._transport.close()

    def abort(self) -> None:
        """Close at once; what is queued is lost."""
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    def let_go(self) -> None:
        """In a forked child: give up our share of the socket."""
        # One that is closing may be closed already, its number somebody else's.
        if self._transport is not None and not self._transport.is_closing():
            _let_go(self._transport.get_extra_info("socket"))

    # asyncio.Protocol

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # asyncio's own join the lines before Python 3.12, and some releases of 3.12 and
        # 3.13 then never say that they are full.
        self._gathers = not isinstance(transport, asyncio.Transport)
        # Not asserted: uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _keep_alive(sock)
        _connections.add(self)
        self.opened()

    @override
    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        try:
            self.received(data)
        except ProtocolError as error:
            self._broken_off(error)
        else:
            if self._frames is not None and self._frames.direct:
                self._read_directly()

    def buffer_updated(self, size: int) -> None:
        """In place of `data_received` while a large frame comes."""
        if self._closing:
            return
        try:
            self.received_directly(size)
        except ProtocolError as error:
            self._broken_off(error)
        else:
            if self._frames is not None and not self._frames.direct:
                self._read_through(self)

    def _broken_off(self, error: ProtocolError) -> None:
        _log.warning("closing the connection with %s: %s", self.peer, error)
        self.abort()

    def _read_directly(self) -> None:
        assert self._frames is not None
        if self._direct is None:
            self._direct = _DirectReads(self, self._frames)
        self._read_through(self._direct)

    def _read_through(self, protocol: asyncio.BaseProtocol) -> None:
        transport = self._transport
        if transport is None or self._closing or transport.is_closing():
            return
        # uvloop decides how it reads when it begins to.
        if self.reading:
            transport.pause_reading()
        transport.set_protocol(protocol)
        if self.reading:
            contextvars.Context().run(transport.resume_reading)

    @override
    def eof_received(self) -> bool:
        if self.peer_finished():
            return True
        # The transport closes now: what is still queued will never go out.
        self._closing = True
        return False

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        # Both hold each other: no cycle is left behind.
        self._transport = self._direct = None
        self.paused = False
        self.lost(exc)
        self._out.clear()
        self._backlog.clear()

    @override
    def pause_writing(self) -> None:
        self.paused = True

    @override
    def resume_writing(self) -> None:
        self.paused = False
        if self._backlog:
            self._write_backlog()
        if not self.paused:
            self.writable()


def _slices(piece: bytes) -> Iterator[memoryview]:
    view = memoryview(piece)
    return (view[at : at + _SLICE_BYTES] for at in range(0, len(view), _SLICE_BYTES))


def _keep_alive(sock: socket.socket) -> None:
    """Notice within a minute that the peer's machine, or the way there, is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        number = getattr(socket, option, None)
        if number is not None:
            sock.setsockopt(socket.IPPROTO_TCP, number, value)


# Everything open in this process, for the moment in which it is forked.
_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
_servers: weakref.WeakSet[Listening] = weakref.WeakSet()


def _after_fork() -> None:
    """A child that kept our sockets would hide the death of this process from peers."""
    for connection in list(_connections):
        connection.let_go()
    for server in list(_servers):
        let_go(server)
    _connections.clear()
    _servers.clear()


def let_go(server: Listening) -> None:
    """Give up the sockets of a server whose loop cannot close them any more."""
    for listener in server.sockets:
        _let_go(listener)


def _let_go(sock: Any) -> None:
    """Close a socket under its owner, who keeps a number that is safe to close."""
    if sock.fileno() < 0:
        return  # uvloop closes the servers of a loop with it
    nothing = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(nothing, sock.fileno(), inheritable=False)
    finally:
        os.close(nothing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


async def connect(
    loop: asyncio.AbstractEventLoop,
    factory: Callable[[], P],
    host: str,
    port: int,
    timeout_s: float,
    network: Network = SOCKETS,
) -> P:
    """Open a connection.

    Raises:
        ConnectionFailed: refused, unreachable, or not there within ``timeout_s``.
    """
    # A task of its own: its call-backs must not inherit the caller's context, and a
    # connection that stands just as the caller is cancelled must not leak.
    connecting = _create_connection(loop, factory, host, port, timeout_s, network)
    task = spawn(loop, connecting)
    expired: asyncio.Future[None] = loop.create_future()
    limit = Limit(loop, timeout_s, lambda: expired.set_result(None))
    try:
        await asyncio.wait((task, expired), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(_abandon)
        raise
    finally:
        limit.cancel()
    if task.done() and not task.cancelled() and task.exception() is None:
        return task.result()
    task.cancel()
    task.add_done_callback(_abandon)
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    cause = task.exception() if task.done() and not task.cancelled() else None
    reason = str(cause) if cause else f"no answer within {timeout_s:g} s"
    raise connection_failed(authority, reason) from cause


def connection_failed(
    authority: str,
    reason: str,
    *,
    phase: str = "connect",
    retryable: bool = True,
) -> ConnectionFailed:
    """The error of a connection that could not be made, or was lost.

    Args:
        authority: The address as host:port.
        reason: Why.
        phase: How far the call came that needed it.
        retryable: Whether that call certainly did not reach the worker.
    """
    return ConnectionFailed(
        f"Unavailable: TCP connection to {authority} failed",
        phase=phase,
        retryable=retryable,
        facts={"address": authority, "reason": reason},
    )


class SharedOpening(Generic[P]):
    """A connection that is opened once, whatever the number of calls that want it.

    Args:
        loop: The home loop.
        open_one: Opens one.
        opened: Told of the end of each try, before those who wait for it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        open_one: Callable[[], Coroutine[Any, Any, P]],
        opened: Callable[[asyncio.Task[P]], None],
    ) -> None:
        self._loop = loop
        self._open_one = open_one
        self._opened = opened
        self._task: asyncio.Task[P] | None = None

    @property
    def under_way(self) -> bool:
        return self._task is not None

    def begin(self) -> asyncio.Task[P]:
        """Open one, unless that is under way."""
        if self._task is None:
            self._task = spawn(self._loop, self._open_one())
            self._task.add_done_callback(self._ended)
        return self._task

    def _ended(self, task: asyncio.Task[P]) -> None:
        self._task = None
        self._opened(task)

    async def connection(self) -> P:
        """The connection that is under way, or a new one.

        Raises:
            CallError: it could not be made; an error of its own for each caller.
            RuntimeClosed: `cancel` was called meanwhile.
        """
        task = self.begin()
        await asyncio.wait((task,))
        if task.cancelled():
            raise RuntimeClosed("the runtime was shut down while connecting")
        error = task.exception()
        if isinstance(error, CallError):
            # To which each can add its facts.
            raise type(error)(str(error), facts=dict(error.facts)) from error
        if error is not None:
            raise error
        return task.result()

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


async def _create_connection(
    loop: asyncio.AbstractEventLoop,
    factory: Callable[[], P],
    host: str,
    port: int,
    timeout_s: float,
    network: Network,
) -> P:
    """Connect; while this process has no descriptor free, wait for one."""
    last_try = loop.time() + timeout_s - 2 * _RETRY_S
    while True:
        try:
            return await network.connect(loop, factory, host, port)
        except OSError as error:
            if error.errno not in _EXHAUSTED or loop.time() >= last_try:
                raise
        await asyncio.sleep(_RETRY_S)


def _abandon(task: asyncio.Task[P]) -> None:
    """Close a connection that came to stand after nobody waited for it any more."""
    if not task.cancelled() and task.exception() is None:
        task.result().abort()


async def listen(
    loop: asyncio.AbstractEventLoop,
    factory: Callable[[], Connection],
    host: str,
    port: int,
    *,
    backlog: int,
    settings: str,
    network: Network = SOCKETS,
) -> tuple[Listening, int]:
    """Listen on an address; returns what closes it and the real port.

    Args:
        settings: The names of the variables that choose the address, for the error.

    Raises:
        CannotListen: the address cannot be bound.
    """
    serving = network.listen(loop, factory, host, port, backlog)
    # Accepted connections inherit the context in which the server was made.
    task = spawn(loop, serving)
    try:
        # A server that comes to stand just as the caller is cancelled must not leak.
        server, real_port = await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_abandon_server)
        raise
    except OSError as error:
        raise CannotListen(
            f"cannot listen on {host}:{port} ({settings}): {error.strerror or error}"
        ) from error
    _servers.add(server)
    return server, real_port


async def stop_accepting(
    loop: asyncio.AbstractEventLoop, server: Listening | None
) -> None:
    """To be awaited before a server is closed.

    asyncio forgets a connection that it is just accepting when its server closes: the
    socket stays open, and nobody answers there.
    """
    for listener in () if server is None else server.sockets:
        # No loop but asyncio's with a selector knows this reader, or needs this.
        with contextlib.suppress(NotImplementedError):
            loop.remove_reader(listener.fileno())
    for _ in range(_TURNS_TO_ACCEPT):
        await asyncio.sleep(0)


def _abandon_server(task: asyncio.Task[tuple[Listening, int]]) -> None:
    """Close a server that nobody waited for any more."""
    if not task.cancelled() and task.exception() is None:
        task.result()[0].close()
