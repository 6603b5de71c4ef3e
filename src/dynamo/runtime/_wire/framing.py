"""Cuts length-prefixed frames out of a stream of bytes.

Owns the unfinished tail of a stream.  Knows no protocol: a reader says where its frames
end.  Whole frames are sliced from the chunk they came in; only the tail is kept, as a
list of chunks that is joined when the frame in it is complete, and now and then before,
because a chunk of few bytes takes many times as much memory.  A large frame is put
together in memory that was used before: fresh memory costs several times what copying
into it does, because the system has to find and clear each page of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from dynamo.runtime.errors import RemoteProtocolError

__all__ = ["LARGE_BYTES", "Event", "FrameReader", "Memory"]

Event = TypeVar("Event")

LARGE_BYTES = 64 * 1024
"""What is longer is not copied to be sent, and put together in one piece of memory."""

AHEAD_BYTES = 16
"""So much of what comes behind a large frame can be read together with its end."""

_MAX_LOOSE_PARTS = 512
# A rest of this length is worth to be read to where it belongs.
_DIRECT_BYTES = 32 * 1024
# From this length on a frame is put together while it comes, not joined in the end.
_ASSEMBLED_BYTES = 2 * LARGE_BYTES
# Room for what is announced: all of it if that is not so much, else at first this much,
# and so many times more whenever it is full; the length may be a lie.
_FIRST_ROOM_BYTES = 1024 * 1024
_GROWTH = 4
_ALL_ROOM_SHARE = 8


class Memory:
    """Room for large messages; the last piece that was given back is used again.

    Whoever gives one back may still have views of it: it is used again only after the
    last one has gone.
    """

    __slots__ = ("_spare",)

    def __init__(self) -> None:
        self._spare: bytearray | None = None

    @property
    def held_bytes(self) -> int:
        """How much is kept for the next message."""
        return 0 if self._spare is None else len(self._spare)

    def take(self, total: int) -> bytearray:
        """Room in which a message of that length may begin; perhaps for only a part."""
        spare = self._spare
        if spare is not None and len(spare) >= total and not _is_viewed(spare):
            self._spare = None
            return spare
        return _new_room(_room_for(total, _FIRST_ROOM_BYTES))

    def larger(self, room: bytearray, total: int) -> bytearray:
        """More room for a message of that length, with all that is there of it."""
        larger = _new_room(_room_for(total, _GROWTH * len(room)))
        with memoryview(larger) as view:
            view[: len(room)] = room
        return larger

    def give(self, room: bytearray) -> None:
        """Give room back; the larger of two pieces is kept."""
        if len(room) >= self.held_bytes or self._is_in_use():
            self._spare = room

    def drop(self) -> None:
        """Keep nothing."""
        self._spare = None

    def _is_in_use(self) -> bool:
        return self._spare is not None and _is_viewed(self._spare)


def _room_for(total: int, room: int) -> int:
    """A last step must not be a small one: it would leave a hole of the whole size."""
    return total if _ALL_ROOM_SHARE * room >= total else room


def _new_room(size: int) -> bytearray:
    """With a byte to spare for `_is_viewed`."""
    room = bytearray(size + AHEAD_BYTES + 1)
    room.pop()
    return room


def _is_viewed(room: bytearray) -> bool:
    """Whether anybody still looks into it: then its length cannot be changed."""
    try:
        room.append(0)
    except BufferError:
        return True
    room.pop()
    return False


class Assembly:
    """One large message that is put together in one piece of memory.

    Its parts would leave holes in the heap that no later message fits in.

    Args:
        total: The length that was announced.
    """

    __slots__ = ("_memory", "_room", "filled", "total")

    def __init__(self, memory: Memory, total: int) -> None:
        self._memory = memory
        self._room = memory.take(total)
        self.filled = 0
        self.total = total

    @property
    def missing(self) -> int:
        """How many bytes are still to come."""
        return self.total - self.filled

    def add(self, data: bytes | memoryview) -> None:
        """The next bytes; not more than are missing."""
        end = self.filled + len(data)
        while end > len(self._room):
            self._grow()
        self._room[self.filled : end] = data
        self.filled = end

    def space(self, size: int) -> memoryview:
        """Where some of the next ``size`` bytes go, at least one of them.

        May be asked for `AHEAD_BYTES` more than are missing.
        """
        if self.filled == len(self._room):
            self._grow()
        return memoryview(self._room)[self.filled : self.filled + size]

    def _grow(self) -> None:
        self._room = self._memory.larger(self._room, self.total)

    def whole(self) -> memoryview:
        """The message, when nothing is missing.

        The memory is used again as soon as the last view of it has gone.
        """
        self._memory.give(self._room)
        return memoryview(self._room)[: self.total]


class FrameReader(ABC, Generic[Event]):
    """Base of the readers: feed it the bytes of a connection, in any pieces.

    After a `RemoteProtocolError` the reader is of no more use.  Frames of the same piece
    that stood before the broken one are delivered first; then `check` raises.

    Args:
        memory: Where large frames are put together.  What the events say of those are
            views, which are to be let go of soon.
    """

    __slots__ = (
        "_ahead",
        "_broken",
        "_error",
        "_held_bytes",
        "_into",
        "_joined_parts",
        "_memory",
        "_needed_bytes",
        "_parts",
        "_rest_bytes",
        "direct",
    )

    def __init__(self, memory: Memory | None = None) -> None:
        self._memory = Memory() if memory is None else memory
        self.direct = False
        """The next bytes are best read into `space`, and `filled` told of them."""
        # Where the next bytes go, and how many: the rest of a large frame.
        self._into: Assembly | None = None
        self._rest_bytes = 0
        self._ahead: bytearray | None = None
        self._parts: list[bytes] = []
        self._joined_parts = 0
        self._held_bytes = 0
        self._needed_bytes = 0
        self._broken = False
        self._error: RemoteProtocolError | None = None

    @property
    def mid_frame(self) -> bool:
        """True while a frame has begun and is not complete."""
        return bool(self._parts) or self._into is not None

    @property
    def held_bytes(self) -> int:
        """How much of the unfinished frame has come."""
        if self._into is not None:
            return self._needed_bytes - self._rest_bytes
        return self._held_bytes if self._parts else 0

    def feed(self, data: bytes) -> list[Event]:
        """The events that are complete with these bytes.

        Raises:
            RemoteProtocolError: the peer broke the protocol, now or earlier.
        """
        if self._into is not None:
            return self._feed_into(self._into, data)
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
        self._cut_all(data, events)
        return events

    def _feed_into(self, into: Assembly, data: bytes) -> list[Event]:
        rest = self._rest_bytes
        if len(data) < rest:
            into.add(data)
            self._rest_bytes -= len(data)
            return []
        into.add(memoryview(data)[:rest])
        return self._end_of_large(into, data[rest:])

    def space(self) -> memoryview:
        """Where the next bytes may be read to, before `filled`: never empty."""
        if self._into is not None:
            return self._into.space(self._rest_bytes)
        if self._ahead is None:
            self._ahead = bytearray(AHEAD_BYTES)
        return memoryview(self._ahead)

    def filled(self, size: int) -> list[Event]:
        """Like `feed`, of bytes that were read into `space`.

        Raises:
            RemoteProtocolError: the peer broke the protocol.
        """
        self.direct = False
        into = self._into
        if into is None:
            assert self._ahead is not None
            return self.feed(bytes(self._ahead[:size]))
        rest = self._rest_bytes
        into.filled += min(size, rest)
        if size < rest:
            self._rest_bytes -= size
            self.direct = True
            return []
        behind = bytes(into.space(size - rest)) if size > rest else b""
        return self._end_of_large(into, behind)

    def _end_of_large(self, into: Assembly, behind: bytes) -> list[Event]:
        """A large frame is complete, and this came behind it."""
        self._into = None
        self.direct = False
        events: list[Event] = []
        self._complete(into, events)
        if not behind or self._broken:
            return events
        self.direct = False
        try:
            events += self.feed(behind)
        except RemoteProtocolError as error:
            if not events:
                raise
            self._error = error
        return events

    def _complete(self, into: Assembly, events: list[Event]) -> None:
        """The rest of a large frame has come."""
        self._cut_all(into.whole(), events)

    def _cut_all(self, data: bytes | memoryview, events: list[Event]) -> None:
        try:
            at, self._needed_bytes = self._cut(data, events)
        except RemoteProtocolError as error:
            self._broken = True
            if not events:
                raise
            self._error = error
            return
        if at < len(data):
            self._keep(data, at)

    def _keep(self, data: bytes | memoryview, at: int) -> None:
        """The frame that begins there is not complete."""
        self._held_bytes = len(data) - at
        if self._needed_bytes >= _ASSEMBLED_BYTES:
            into = Assembly(self._memory, self._needed_bytes)
            into.add(memoryview(data)[at:])
            self._read_into(into, into.missing)
        else:
            self._parts.append(bytes(data[at:]))

    def _read_into(self, into: Assembly, rest_bytes: int) -> None:
        """So many of the next bytes belong there."""
        self._into = into
        self._rest_bytes = rest_bytes
        self.direct = rest_bytes >= _DIRECT_BYTES

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
        if self.mid_frame:
            raise RemoteProtocolError(
                f"the connection ended inside a frame, after {self.held_bytes} of at "
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
    def _cut(self, data: bytes | memoryview, events: list[Event]) -> tuple[int, int]:
        """Append the events of all whole frames in `data`, a view if one is large.

        Returns:
            Where the unfinished frame begins, and how many bytes from there on are
            needed at least before another look is worth while.
        """
