"""The client's pooled connections to workers' request ports, on the genuine lane.

Owns the connections, their order of acks and their ends.  Sends whole frames and hands
back acks; knows nothing of what is in them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from dynamo.runtime._sealed import override
from dynamo.runtime._transports.connection import (
    Connection,
    Limit,
    SharedOpening,
    connect,
    connection_failed,
)
from dynamo.runtime._wire.callhome import AckReader, AckReceived
from dynamo.runtime.errors import (
    CallError,
    CallTimeout,
    RemoteProtocolError,
    RuntimeClosed,
)

if TYPE_CHECKING:
    import asyncio

    from dynamo.runtime._config import RuntimeConfig
    from dynamo.runtime._wire.records import TcpAddress

_IDLE_CHECK_S = 30.0
# How early the clock of a loop may wake us.
_CLOCK_S = 0.002

OnAck = Callable[[AckReceived | CallError], None]


class RequestConnection(Connection):
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

    def submit(self, frame: tuple[bytes, ...], on_ack: OnAck) -> None:
        """Send a request; ``on_ack`` gets its ack, or the error that replaced it."""
        timeout_s = self._pool.config.request_timeout_s
        self._awaited.append((self._loop.time() + timeout_s, on_ack))
        self.send_pieces(frame)
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
                connection_failed(
                    self._pool.authority,
                    str(error or "closed by the worker"),
                    phase="ack" if position < written else "send",
                    retryable=position >= written,
                )
            )


def _ignore(ack: AckReceived | CallError) -> None:
    """Stands for a request that was given up before its ack came."""


class _HostPool:
    """The connections to one worker port."""

    def __init__(self, pools: RequestPools, address: TcpAddress) -> None:
        self.loop = pools.loop
        self.config = pools.config
        self.authority = address.authority
        self.used_at = self.loop.time()
        self._pools = pools
        self._host = address.host
        self._port = address.port
        self._connections: list[RequestConnection] = []
        self._turn = 0
        self._opening = SharedOpening(self.loop, self._open, _opened)
        self._wanting_room: list[asyncio.Future[None]] = []

    async def connection(self) -> RequestConnection:
        """A connection with room for one more request.

        Raises:
            ConnectionFailed: none could be made, or it was closed at once.
            RuntimeClosed: the runtime was shut down, perhaps meanwhile.
        """
        self.used_at = self.loop.time()
        while True:
            self._pools.check_open()
            ready = self._next_usable()
            if ready is not None:
                return ready
            if len(self._connections) < self.config.pool_size:
                opened = await self._opening.connection()
                if not opened.is_open:
                    # Whoever accepts and closes would be called again and again.
                    reason = "it was closed as soon as it stood"
                    raise connection_failed(self.authority, reason)
            else:
                await self._wait_for_room()

    def _next_usable(self) -> RequestConnection | None:
        count = len(self._connections)
        for step in range(count):
            candidate = self._connections[(self._turn + step) % count]
            if candidate.usable:
                self._turn = (self._turn + step + 1) % count
                return candidate
        return None

    async def _open(self) -> RequestConnection:
        async with self._pools.connecting:
            connection = await connect(
                self.loop,
                lambda: RequestConnection(self),
                self._host,
                self._port,
                self.config.connect_timeout_s,
                self.config.network,
            )
        if connection.is_open:
            self._connections.append(connection)
        return connection

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

    def remove(self, connection: RequestConnection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
        self.made_room()

    @property
    def connections(self) -> tuple[RequestConnection, ...]:
        return tuple(self._connections)

    @property
    def idle(self) -> bool:
        opening = self._opening.under_way
        return not opening and all(c.idle for c in self._connections)

    def close(self) -> None:
        self._opening.cancel()
        for connection in list(self._connections):
            connection.close()


def _opened(task: asyncio.Task[RequestConnection]) -> None:
    """Whoever waits sees the error; perhaps nobody does."""
    if not task.cancelled():
        task.exception()


class RequestPools:
    """One pool for each worker port that is in use."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        config: RuntimeConfig,
        connecting: asyncio.Semaphore,
    ) -> None:
        self.loop = loop
        self.config = config
        self.connecting = connecting
        self._pools: dict[tuple[str, int], _HostPool] = {}
        self._idle_timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def connection(self, address: TcpAddress) -> RequestConnection:
        """A connection with room for one more request.

        Raises:
            ConnectionFailed: none could be made, or it was closed at once.
            RuntimeClosed: the runtime was shut down, perhaps meanwhile.
        """
        key = (address.host, address.port)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = _HostPool(self, address)
            self._watch_idle()
        return await pool.connection()

    def addresses(self) -> set[str]:
        """Our own ends of all connections."""
        pools = self._pools.values()
        return {one.local for pool in pools for one in pool.connections}

    def check_open(self) -> None:
        """Raise RuntimeClosed after `close`."""
        if self._closed:
            raise RuntimeClosed("the runtime was shut down")

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

    def close(self) -> None:
        """Close every connection; no more are opened."""
        self._closed = True
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
