"""A small TCP relay between two parties, which can cut, stall and swallow.

Runs on the loop of the test.  Directions are named from the view of whoever connects:
``up`` goes to the target, ``down`` comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import cast

_RESET = struct.pack("ii", 1, 0)


@dataclass
class Cut:
    """Let so many bytes pass in each direction of each connection, then cut.

    Attributes:
        up: Bytes towards the target; None never cuts.
        down: Bytes from the target.
        reset: With RST; otherwise both sides see a FIN.
        silent: Not at all: what follows is swallowed and the connection stays open.
    """

    up: int | None = None
    down: int | None = None
    reset: bool = False
    silent: bool = False


class Relay:
    """Listens on ``port`` and connects every connection on to the target.

    Attributes:
        port: Where to connect to.
        cut: What happens to connections made from now on.
        passed: The total of bytes that passed, by direction.
        accepted: How many connections were made.
        record: A list to which what is sent is added as (direction, bytes), or None.
    """

    def __init__(self, host: str, target_port: int) -> None:
        self.port = 0
        self.cut = Cut()
        self.passed = {"up": 0, "down": 0}
        self.accepted = 0
        self.record: list[tuple[str, bytes]] | None = None
        self._host = host
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._sides: set[_Side] = set()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, self._host, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def _accept(self) -> _Side:
        self.accepted += 1
        near = _Side(self, "up", self.cut)
        near.dialling = asyncio.get_running_loop().create_task(self._dial(near))
        return near

    async def _dial(self, near: _Side) -> None:
        loop = asyncio.get_running_loop()
        far = _Side(self, "down", near.cut)
        near.other, far.other = far, near
        try:
            await loop.create_connection(lambda: far, self._host, self._target_port)
        except OSError:
            near.end(reset=True)

    def track(self, side: _Side) -> None:
        self._sides.add(side)

    def untrack(self, side: _Side) -> None:
        self._sides.discard(side)

    def stall(self) -> None:
        """Relay nothing until `flow`; the senders feel it once the buffers are full."""
        self._flowing.clear()
        for side in self._sides:
            side.hold()

    def flow(self) -> None:
        self._flowing.set()
        for side in list(self._sides):
            side.go_on()

    @property
    def flowing(self) -> bool:
        return self._flowing.is_set()

    def break_all(self, *, reset: bool = True) -> None:
        """Cut every connection now."""
        for side in list(self._sides):
            side.end(reset=reset)

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
        dials = [side.dialling for side in self._sides if side.dialling is not None]
        self.break_all()
        for dial in dials:
            dial.cancel()
        await asyncio.gather(*dials, return_exceptions=True)
        await until(lambda: not self._sides, 2)


class _Side(asyncio.Protocol):
    """One of the two sockets of a relayed connection; sends what the other received."""

    def __init__(self, relay: Relay, direction: str, cut: Cut) -> None:
        self.cut = cut
        self.other: _Side | None = None
        self.dialling: asyncio.Task[None] | None = None
        self._relay = relay
        self._direction = direction
        self._left = cut.up if direction == "up" else cut.down
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self._finished = False
        self._ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an instance of anything: the transports of uvloop have no asyncio bases.
        transport = cast("asyncio.Transport", transport)
        self._transport = transport
        self._relay.track(self)
        transport.get_extra_info("socket").setsockopt(
            socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
        )
        if not self._relay.flowing:
            self.hold()
        if self.other is not None:
            if self.other._ended:
                self.end(reset=True)
            self.other.go_on()

    def data_received(self, data: bytes) -> None:
        self._early.append(data)
        if not self._relay.flowing:
            # uvloop begins to read after connection_made, whatever that decided.
            self.hold()
        self.go_on()

    def eof_received(self) -> bool:
        self._finished = True
        self.go_on()
        return True

    def go_on(self) -> None:
        """Pass on what has come in, if somebody is there to take it."""
        other = self.other
        if not self._relay.flowing or other is None or other._transport is None:
            return
        if self._transport is not None:
            self._transport.resume_reading()
        early, self._early = self._early, []
        for data in early:
            self._pass(other._transport, data)
        if self._left == 0:
            self._cut_now()
        elif self._finished and not other._transport.is_closing():
            other._transport.write_eof()

    def _pass(self, transport: asyncio.Transport, data: bytes) -> None:
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
        self._relay.passed[self._direction] += len(data)
        if self._relay.record is not None:
            self._relay.record.append((self._direction, data))
        if data and not transport.is_closing():
            transport.write(data)

    def _cut_now(self) -> None:
        if self.cut.silent:
            if self._finished:
                # The sender may go; the other side hears nothing of it.
                self.end(reset=False)
            return
        assert self.other is not None
        self.other.end(reset=self.cut.reset)
        self.end(reset=self.cut.reset)

    def hold(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def end(self, *, reset: bool) -> None:
        self._ended = True
        if self._transport is None:
            return
        if reset:
            self._transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, _RESET
            )
            self._transport.abort()
        else:
            self._transport.close()

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.hold()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.go_on()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._relay.untrack(self)
        if self.other is not None and not self._ended:
            self.other.end(reset=error is not None)
        self._ended = True


@contextlib.asynccontextmanager
async def relay_to(port: int, host: str = "127.0.0.1") -> AsyncIterator[Relay]:
    """A running relay to a port of this machine."""
    relay = Relay(host, port)
    await relay.start()
    try:
        yield relay
    finally:
        await relay.aclose()


async def until(condition: Callable[[], object], limit_s: float = 5) -> None:
    """Poll until something holds; fail when it does not within the limit."""
    loop = asyncio.get_running_loop()
    end = loop.time() + limit_s
    while not condition():
        if loop.time() > end:
            raise AssertionError(f"it did not become true within {limit_s:g} s")
        await asyncio.sleep(0.002)
