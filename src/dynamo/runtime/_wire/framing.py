"""Cuts length-prefixed frames out of a stream of bytes.

Owns the unfinished tail of a stream.  Knows no protocol: a reader says where its frames
end.  Whole frames are sliced from the chunk they came in; only the tail is kept, as a
list of chunks that is joined when the frame in it is complete, and now and then before,
because a chunk of few bytes takes many times as much memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from dynamo.runtime.errors import RemoteProtocolError

__all__ = ["Event", "FrameReader"]

Event = TypeVar("Event")

_MAX_LOOSE_PARTS = 512


class FrameReader(ABC, Generic[Event]):
    """Base of the readers: feed it the bytes of a connection, in any pieces.

    After a `RemoteProtocolError` the reader is of no more use.  Frames of the same piece
    that stood before the broken one are delivered first; then `check` raises.
    """

    __slots__ = (
        "_broken",
        "_error",
        "_held_bytes",
        "_joined_parts",
        "_needed_bytes",
        "_parts",
    )

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._joined_parts = 0
        self._held_bytes = 0
        self._needed_bytes = 0
        self._broken = False
        self._error: RemoteProtocolError | None = None

    @property
    def mid_frame(self) -> bool:
        """True while a frame has begun and is not complete."""
        return bool(self._parts)

    def feed(self, data: bytes) -> list[Event]:
        """The events that are complete with these bytes.

        Raises:
            RemoteProtocolError: the peer broke the protocol, now or earlier.
        """
        if self._parts:
            self._parts.append(data)
            self._held_bytes += len(data)
            if self._held_bytes < self._needed_bytes:
                if len(self._parts) - self._joined_parts > _MAX_LOOSE_PARTS:
                    self._join_loose_parts()
                return []
            data = b"".join(self._parts)
            self._parts.clear()
            self._joined_parts = 0
        events: list[Event] = []
        try:
            at, self._needed_bytes = self._cut(data, events)
        except RemoteProtocolError as error:
            self._broken = True
            if not events:
                raise
            self._error = error
            return events
        if at < len(data):
            self._parts.append(data[at:])
            self._held_bytes = len(data) - at
        return events

    def check(self) -> None:
        """For the owner, after it has handled the events of `feed`.

        Raises:
            RemoteProtocolError: the frame behind them broke the protocol.
        """
        if self._error is not None:
            raise self._error

    def feed_eof(self) -> None:
        """Tell the reader that no more bytes will come.

        Raises:
            RemoteProtocolError: they ended inside a frame.
        """
        if self._parts:
            raise RemoteProtocolError(
                f"the connection ended inside a frame, after {self._held_bytes} of at "
                f"least {self._needed_bytes} bytes"
            )

    def _join_loose_parts(self) -> None:
        """Make one part of the latest ones; each byte is copied only once by this."""
        at = self._joined_parts
        self._parts[at:] = [b"".join(self._parts[at:])]
        self._joined_parts += 1

    def _refuse_if_broken(self) -> None:
        """For the cutters of readers that can break: bytes after rubbish are rubbish."""
        if self._broken:
            raise RemoteProtocolError("bytes after a frame that broke the protocol")

    @abstractmethod
    def _cut(self, data: bytes, events: list[Event]) -> tuple[int, int]:
        """Append the events of all whole frames in `data`.

        Returns:
            Where the unfinished frame begins, and how many bytes from there on are
            needed at least before another look is worth while.
        """
