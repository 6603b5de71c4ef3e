"""What both ends of a duplex connection have in common: sending in batches, signs of life.

Owns when the frames that a side has to say go out, and the judgement that a peer is
dead.  What the frames mean is in `_wire.duplex`; calls are in the modules of the ends.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dynamo.runtime._sealed import override
from dynamo.runtime._transports.connection import Connection
from dynamo.runtime._wire.framing import LARGE_BYTES

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

    from dynamo.runtime._config import RuntimeConfig
    from dynamo.runtime._wire.duplex import ClientSide, Event, WorkerSide

_log = logging.getLogger("dynamo.runtime.duplex")

# Header and payload of 16 frames do not wait for the end of the turn of the loop: the
# peer can work while we go on.  It has the more to do the more it was sent: each further
# write of the turn waits for twice as much, within a limit.
_EARLY_PIECES = 32
_MOST_PIECES = 1024
# A peer that makes us say so much and reads nothing of it.
_MAX_UNREAD_BYTES = 32 * 1024 * 1024
# A loop that is late by more than this share of the interval has not read its sockets.
_LATE_SHARE = 0.25


def _pieces(out: list[bytes]) -> Iterator[bytes]:
    """What is there to be sent, the parts of large messages by themselves.

    Joining all of it would copy those, into fresh memory.
    """
    begin = 0
    for at, piece in enumerate(out):
        if len(piece) >= LARGE_BYTES:
            if at > begin:
                yield b"".join(out[begin:at])
            yield piece
            begin = at + 1
    if begin < len(out):
        yield b"".join(out[begin:])


class DuplexConnection(Connection):
    """One end of a duplex connection.

    Args:
        side: Its state machine.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        config: RuntimeConfig,
        side: ClientSide | WorkerSide,
    ) -> None:
        super().__init__(loop, side)
        self.loss: str | None = None
        """Why we gave the connection up, for those who ask."""
        self._config = config
        self._duplex = side
        self.flush_at = 0
        """`touch` has nothing to do before so many pieces wait."""
        self._heard_at = loop.time()
        self._pulse: asyncio.TimerHandle | None = None
        self._pulse_at = 0.0

    # What the ends define.

    def handle(self, events: list[Event]) -> None:
        """Something happened to the calls."""

    def checked(self, now: float) -> None:
        """Called now and then, with the time."""

    # Sending

    def touch(self) -> None:
        """Something is there to be sent, at the end of this turn at the latest."""
        if not self.flush_at:
            self.flush_at = _EARLY_PIECES
            self._loop.call_soon(self._flush_at_end_of_turn)
        elif len(self._duplex.out) >= self.flush_at:
            self.flush_at = min(2 * self.flush_at, _MOST_PIECES)
            self.flush()

    @override
    def _flush_at_end_of_turn(self) -> None:
        self.flush_at = 0
        self.flush()

    @override
    def flush(self) -> None:
        out = self._duplex.out
        transport = self._transport
        if not out or transport is None or transport.is_closing():
            return
        if self._duplex.has_parts:
            self._duplex.has_parts = False
            self._write_apart(list(_pieces(out)))
        else:
            transport.write(b"".join(out))
        out.clear()
        if self.paused and transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            self.give_up(f"{self.peer} does not read what it is sent")

    def give_up(self, reason: str) -> None:
        """Close at once, with one line for the operator."""
        if not self._closing:
            self.loss = reason
            _log.warning("closing a connection: %s", reason)
            self.abort()

    # Receiving

    @override
    def opened(self) -> None:
        self.flush()
        self._heard_at = self._loop.time()
        self._schedule_pulse(self._config.ping_interval_s / 2)

    @override
    def received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        self._arrived(self._duplex.feed(data))

    @override
    def received_directly(self, size: int) -> None:
        self._heard_at = self._loop.time()
        self._arrived(self._duplex.filled(size))

    def _arrived(self, events: list[Event]) -> None:
        if events:
            self.handle(events)
        self._duplex.check()
        if self._duplex.out:
            self.touch()

    @override
    def lost(self, error: Exception | None) -> None:
        if self._pulse is not None:
            self._pulse.cancel()
            self._pulse = None

    # Signs of life

    def _schedule_pulse(self, delay_s: float) -> None:
        self._pulse_at = self._loop.time() + delay_s
        self._pulse = self._loop.call_at(self._pulse_at, self._check)

    def _check(self) -> None:
        now = self._loop.time()
        interval_s = self._config.ping_interval_s
        late_s = now - self._pulse_at
        if late_s > _LATE_SHARE * interval_s:
            # We stood still ourselves: that is no silence of the peer, and what arrived
            # meanwhile is still in the socket.
            self._heard_at = min(now, self._heard_at + late_s)
            self._schedule_pulse(_LATE_SHARE * interval_s)
            return
        silence_s = now - self._heard_at
        if silence_s >= self._config.ping_timeout_s:
            self.give_up(
                f"{self.peer} has given no sign of life for {silence_s:.3g} s "
                "(DYN_RUNTIME_PING_TIMEOUT_SECS)"
            )
            return
        if silence_s >= interval_s:
            self._duplex.ping()
            self.touch()
        self.checked(now)
        if not self._closing:
            self._schedule_pulse(interval_s / 2)
