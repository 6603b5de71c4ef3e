"""A relay between two parties of a connection, which can do to it what networks do.

Works on any `Network` and knows nothing of what passes.  Directions are named from the
view of whoever connects: ``up`` goes to the target, ``down`` comes back.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from dynamo.runtime._network import SOCKETS, Network
from dynamo.runtime._sealed import override
from dynamo.runtime.testing._waiting import until

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from dynamo.runtime._network import Listening

Direction = Literal["up", "down"]

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_CLOSE_LIMIT_S = 2.0
_BACKLOG = 128
# The relay holds no more than this of a direction that it slows down.
_MOST_HELD_BYTES = 256 * 1024


@dataclass(frozen=True)
class Cut:
    """Lets so many bytes pass in each direction of each connection, then cuts.

    Attributes:
        up: Bytes towards the target; None never cuts.
        down: Bytes from the target; None never cuts.
        how: ``"fin"`` closes the connection on both sides, ``"reset"`` resets it,
            ``"half"`` sends FIN on in this direction alone, and ``"silent"`` swallows
            what follows while the connection stays open.

    Example:
        >>> Cut(down=100, how="reset")
        Cut(up=None, down=100, how='reset')
    """

    up: int | None = None
    down: int | None = None
    how: Literal["fin", "reset", "half", "silent"] = "fin"


@dataclass(frozen=True)
class Pace:
    """How slowly bytes pass.

    Attributes:
        delay_s: Seconds by which everything is late.
        chunk_bytes: How much passes at a time; None does not split anything.
        interval_s: Seconds between two of these.

    Example:
        A byte every 10 ms, the first after a second:

        >>> Pace(delay_s=1, chunk_bytes=1, interval_s=0.01)
        Pace(delay_s=1, chunk_bytes=1, interval_s=0.01)
    """

    delay_s: float = 0.0
    chunk_bytes: int | None = None
    interval_s: float = 0.0


class FaultProxy:
    """Passes connections on to a port, as badly as it is told.

    Args:
        target_port: The port to which connections go on.
        target_host: Its address.
        host: The address on which the proxy itself listens.
        network: How connections are made; sockets by default.  `Worker.fault_proxy` and
            `Cluster.answer_proxy` make proxies in the memory of a cluster.

    Attributes:
        target: Address and port to which connections go on.
        host: Where to connect to.
        port: Where to connect to; 0 before `start`.
        cut: What happens to connections made from now on; a `Cut`.
        pace: How slowly what comes from now on passes; a `Pace`.
        passed: The total of bytes that passed, by direction.
        accepted: How many connections were made.
        record: A list to which what passes is added as (direction, bytes), or None.

    Example:
        >>> import asyncio
        >>> from dynamo.runtime.testing import Cut, FaultProxy
        >>> async def greet(reader, writer):
        ...     writer.write(b"Hello, world")
        ...     writer.close()
        >>> async def main():
        ...     server = await asyncio.start_server(greet, "127.0.0.1", 0)
        ...     port = server.sockets[0].getsockname()[1]
        ...     async with FaultProxy(port) as proxy:
        ...         proxy.cut = Cut(down=5)
        ...         reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
        ...         print(await reader.read())
        ...         writer.close()
        ...     server.close()
        >>> asyncio.run(main())
        b'Hello'
    """

    def __init__(
        self,
        target_port: int,
        *,
        target_host: str = "127.0.0.1",
        host: str = "127.0.0.1",
        network: Network = SOCKETS,
    ) -> None:
        self.host = host
        self.port = 0
        self.cut = Cut()
        self.pace = Pace()
        self.passed: dict[Direction, int] = {"up": 0, "down": 0}
        self.accepted = 0
        self.record: list[tuple[Direction, bytes]] | None = None
        self.target = (target_host, target_port)
        self._network = network
        self._listening: Listening | None = None
        self._flowing = True
        self._sides: set[_Side] = set()

    async def start(self) -> None:
        """Accept connections; after `refuse` on the same port as before."""
        self._listening, self.port = await self._network.listen(
            asyncio.get_running_loop(), self._accept, self.host, self.port, _BACKLOG
        )

    def refuse(self) -> None:
        """Accept no more connections, until `start`; those there are go on."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    async def aclose(self) -> None:
        """Accept no more connections and reset those there are."""
        self.refuse()
        dials = [side.dialling for side in self._sides if side.dialling is not None]
        self.break_all()
        if dials:
            # Not cancelled at once: uvloop then forgets a connection that just stands.
            _, late = await asyncio.wait(dials, timeout=_CLOSE_LIMIT_S)
            for dial in late:
                dial.cancel()
        await until(lambda: not self._sides, timeout=_CLOSE_LIMIT_S)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return sum(side.direction == "up" for side in self._sides)

    @property
    def flowing(self) -> bool:
        """False between `stall` and `flow`."""
        return self._flowing

    def stall(self) -> None:
        """Pass nothing on until `flow`, and read no more; nobody is told."""
        self._flowing = False
        for side in self._sides:
            side.hold()

    def flow(self) -> None:
        """Go on after `stall`."""
        self._flowing = True
        for side in list(self._sides):
            side.go_on()

    def break_all(self, *, reset: bool = True) -> None:
        """Cut every connection now.

        Args:
            reset: With RST; otherwise both sides see a FIN.
        """
        for side in list(self._sides):
            side.end(reset=reset)

    def half_close(self, direction: Direction) -> None:
        """End one direction of every connection now, as if its sender had finished.

        Args:
            direction: ``"up"``: the target sees the end; ``"down"``: whoever connected.
        """
        for side in list(self._sides):
            if side.direction == direction:
                side.finish()

    def _accept(self) -> _Side:
        self.accepted += 1
        near = _Side(self, self._sides, "up", self.cut)
        if self._listening is None:
            near.end(reset=True)  # it was on its way when we closed
        else:
            loop = asyncio.get_running_loop()
            near.dialling = loop.create_task(self._dial(near))
        return near

    async def _dial(self, near: _Side) -> None:
        far = _Side(self, self._sides, "down", near.cut)
        near.other, far.other = far, near
        loop = asyncio.get_running_loop()
        try:
            await self._network.connect(loop, lambda: far, *self.target)
        except OSError:
            near.end(reset=True)


class _Side(asyncio.Protocol):
    """One of the two ends of a relayed connection: receives what goes to the other.

    Bytes wait in `_waiting`, each piece with the moment from which it may pass.
    """

    def __init__(
        self, proxy: FaultProxy, sides: set[_Side], direction: Direction, cut: Cut
    ) -> None:
        self.direction: Direction = direction
        self.cut = cut
        self.other: _Side | None = None
        self.dialling: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport | None = None
        self.ended = False
        self.full = False
        self.end_passed = False
        self._proxy = proxy
        self._sides = sides
        self._loop = asyncio.get_running_loop()
        self._left = cut.up if direction == "up" else cut.down
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._waiting_bytes = 0
        self._free_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._finished = False
        self._cut_done = False
        self._resets = False
        self._aborted = False

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an instance of anything: the transports of uvloop have no asyncio bases.
        self.transport = cast("asyncio.Transport", transport)
        self._sides.add(self)
        sock = transport.get_extra_info("socket")
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.ended or (self.other is not None and self.other.ended):
            # Not at once: uvloop tells nobody of what is aborted in this call-back.
            reset = self._resets or not self.ended
            self._loop.call_soon(lambda: self.end(reset=reset))
            return
        if not self._proxy.flowing:
            self.hold()
        if self.other is not None:
            self.other.go_on()

    @override
    def data_received(self, data: bytes) -> None:
        self._enqueue(data)
        if not self._proxy.flowing:
            # uvloop begins to read after connection_made, whatever that decided.
            self.hold()
        self.go_on()

    @override
    def eof_received(self) -> bool:
        self._finished = True
        self.go_on()
        return True

    def _enqueue(self, data: bytes) -> None:
        pace = self._proxy.pace
        size = pace.chunk_bytes or len(data)
        due = self._loop.time() + pace.delay_s
        for begin in range(0, len(data), size):
            # Also a piece without a delay comes after those before it.
            due = self._free_at = max(due, self._free_at)
            self._waiting.append((due, data[begin : begin + size]))
            self._free_at += pace.interval_s
        self._waiting_bytes += len(data)

    def finish(self) -> None:
        """Behave as if the sender had sent FIN, after what waits."""
        self._finished = True
        self.go_on()

    def go_on(self) -> None:
        """Pass on what is due, if somebody is there to take it."""
        other = self.other
        if not self._proxy.flowing or other is None or other.transport is None:
            return
        while self._waiting and self._waiting[0][0] <= self._loop.time():
            _, data = self._waiting.popleft()
            self._waiting_bytes -= len(data)
            self._pass(other.transport, data)
        if self._left == 0 and not self._cut_done:
            self._cut_now(other)
        if self._waiting:
            self._come_back()
        elif self._finished:
            self._pass_end(other)
        self._read_on()

    def _come_back(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._waiting[0][0], self.go_on)

    def _read_on(self) -> None:
        if self.transport is None:
            return
        if self.full or self._waiting_bytes > _MOST_HELD_BYTES:
            self.hold()
        else:
            self.transport.resume_reading()

    def _pass(self, transport: asyncio.Transport, data: bytes) -> None:
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
        # What comes after an end that was passed on is lost, as on a real way.
        if data and not self.end_passed and not transport.is_closing():
            self._note(data)
            transport.write(data)

    def _note(self, data: bytes) -> None:
        proxy = self._proxy
        proxy.passed[self.direction] += len(data)
        if proxy.record is not None:
            proxy.record.append((self.direction, data))

    def _pass_end(self, other: _Side) -> None:
        """The sender has finished; the other side hears of it unless it must not."""
        if self._left == 0 and self.cut.how == "silent":
            # The sender may go; the other side hears nothing of it.
            self.end(reset=False)
        elif not self.end_passed:
            self._send_end(other)

    def _send_end(self, other: _Side) -> None:
        self.end_passed = True
        if other.transport is not None and not other.transport.is_closing():
            other.transport.write_eof()
        if other.end_passed:
            # Both directions are done: nothing is left to wait for.
            other.end(reset=False)
            self.end(reset=False)

    def _cut_now(self, other: _Side) -> None:
        self._cut_done = True
        if self.cut.how == "half":
            self._send_end(other)
        elif self.cut.how != "silent":
            reset = self.cut.how == "reset"
            other.end(reset=reset)
            self.end(reset=reset)

    def hold(self) -> None:
        """Read no more for now."""
        if self.transport is not None:
            self.transport.pause_reading()

    def end(self, *, reset: bool) -> None:
        """Close this side, also if it has yet to come to stand."""
        self.ended = True
        self._resets = reset
        if self._timer is not None:
            self._timer.cancel()
        if self.transport is None or self._aborted:
            return
        self._aborted = reset
        if reset:
            self.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE
            )
            self.transport.abort()
        else:
            self.transport.close()

    @override
    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.full = True
            self.other.hold()

    @override
    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.full = False
            self.other.go_on()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._sides.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self.other is not None and not self.ended:
            self.other.end(reset=exc is not None)
        self.ended = True
