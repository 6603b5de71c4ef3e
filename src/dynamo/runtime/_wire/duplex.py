"""The duplex lane: many calls on one connection, both ways, with credit.

Owns the state machine of each side; docs/design/duplex.md describes them.  A side is fed
what arrived and returns events; what it has to say lies in `out`, for its owner to send.
Knows no socket, no time, and not what a value means.

The life of a stream, at the client (C) and at the worker (W)::

    C  NEW --first frame out--> SENT --QUEUED--> WAITING --ACCEPT, item--> STARTED
       any but NEW --a final frame, KILL of ours--> gone from the table
    W  OPENING --REQUEST whole--> OPEN --a final frame of ours, KILL--> gone

Frames of a stream that is gone are counted for credit and ignored.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeAlias

from dynamo.runtime._sealed import override
from dynamo.runtime._wire.callhome import too_large_text
from dynamo.runtime._wire.duplex_frames import (
    ACCEPT,
    CHUNK_BYTES,
    CREDIT,
    END,
    ERROR,
    FIRST_TO_IGNORE,
    GOAWAY,
    HANDLER_REFUSED,
    HEADER_BYTES,
    HELLO,
    INPUT,
    INPUT_END,
    ITEM,
    ITEM_END,
    KILL,
    MAX_CREDIT,
    PART,
    PART_BYTES,
    PART_HEAD_BYTES,
    PING,
    PONG,
    PREFACE,
    QUEUED,
    REFUSED,
    REQUEST,
    RESET,
    STOP,
    TOO_LARGE,
    UNAVAILABLE,
    Hello,
    Refusal,
    decode_error,
    decode_handler_refusal,
    decode_hello,
    decode_number,
    decode_refusal,
    decode_request,
    encode_frame,
    encode_hello,
    encode_number,
    encode_refusal,
    pack_header,
    unpack_header,
)
from dynamo.runtime._wire.framing import Assembly, FrameReader, Memory
from dynamo.runtime.errors import RemoteProtocolError

# No stream is opened beyond this id: what waits for credit still needs some.
LAST_ID_TO_OPEN = 2**31
# Not frames, only events.
STARTED, WRITABLE, ANSWER = 0x100, 0x101, 0x102

_FINAL_MESSAGES = frozenset((ITEM_END, ERROR, HANDLER_REFUSED))
_MAX_PING_BYTES = 8
# While messages come in parts, their senders may together be so far ahead of what has
# arrived; each of them at least by the credit of a stream.
_WINDOW_BYTES = 1024 * 1024
# What stands in front of the bytes of a PART.
_NEXT_BYTES = HEADER_BYTES + PART_HEAD_BYTES

# States of a stream: of the client's side, then of the worker's.
_NEW, _SENT, _WAITING, _STARTED, _OPENING, _OPEN = range(6)


class Stream:
    """One call on a connection, as one side sees it.

    Only `owner` is for others to set, and `items` for them to take.

    Attributes:
        id: 0 until the first frame of it went out.
        owner: Whatever the owner of the connection keeps with it.
        items: What the latest event `ITEM` carries, until whoever handles it takes them
            and leaves None.
        queue: What waits for credit, in order: type, what is left of it, its length,
            and what stands in front of what is left.
        withheld: Credit is not given back: its reader is behind.
        state: Where it is in its life, as its side sees it.
        credit: Bytes that may be sent.
        room: Bytes that the peer may still send.
        parts: What is there of a message that comes in parts.
        input_open: The client may send input; only the worker's side keeps it.
        last_header: The very object that stands in front of the latest message.
    """

    __slots__ = (
        "credit",
        "id",
        "input_open",
        "items",
        "last_header",
        "owner",
        "parts",
        "queue",
        "room",
        "state",
        "withheld",
    )

    def __init__(self, credit: int, room: int, state: int) -> None:
        self.id = 0
        self.owner: Any = None
        self.items: list[Any] | None = None
        # A deque while something waits: an empty one takes 600 bytes.
        self.queue: Any = ()
        self.withheld = False
        self.state = state
        self.credit = credit
        self.room = room
        self.parts: Assembly | None = None
        self.input_open = False
        self.last_header: bytes | None = None


Event: TypeAlias = "tuple[int, Stream | None, Any]"
"""A type of frame (or STARTED, WRITABLE, ANSWER), its stream, and what it carries."""

_Handlers: TypeAlias = (
    "dict[int, Callable[[Any, int, bytes | memoryview, list[Event]], None]]"
)


class _Side(FrameReader[Event]):
    """What both sides have in common: cutting, credit, messages in parts.

    Args:
        ours: What this side says in its HELLO.
        memory: As for every `FrameReader`.
    """

    # Messages of this type, on a stream in the state STARTED, are plain events.
    _plain = 0

    def __init__(self, ours: Hello, memory: Memory | None = None) -> None:
        super().__init__(memory)
        self.out: list[bytes] = [PREFACE, encode_frame(HELLO, 0, encode_hello(ours))]
        self.has_parts = False
        """Parts of large messages are in `out`: set here, cleared by the owner."""
        self.peer: Hello | None = None
        self.streams: dict[int, Stream] = {}
        self.last_id = 0
        self.waiting: dict[Stream, None] = {}
        """The streams with a queue."""
        self._ours = ours
        # The message that the next bytes belong to.
        self._message_into: tuple[int, Stream] | None = None
        self._credit = 0
        self._room = ours.connection_credit

    # Sending

    def send(self, stream: Stream, kind: int, body: bytes) -> None:
        """Send a message now, or when there is credit."""
        size = len(body)
        if (
            stream.queue
            or stream.credit <= 0
            or self._credit <= 0
            or size > CHUNK_BYTES
            or not stream.id
        ):
            self._send_later(stream, kind, body, b"")
            return
        cost = HEADER_BYTES + size
        stream.credit -= cost
        self._credit -= cost
        header = stream.last_header = pack_header(size, kind, stream.id)
        self.out += (header, body)

    def _send_later(self, stream: Stream, kind: int, body: bytes, front: bytes) -> None:
        if not stream.queue:
            stream.queue = deque()
            self.waiting[stream] = None
        # Without a copy for each part.
        view: Any = memoryview(body) if len(body) > CHUNK_BYTES else body
        stream.queue.append((kind, view, len(front) + len(body), front))
        self._drain(stream)

    def _drain(self, stream: Stream) -> None:
        """Send what waits as far as the credit goes."""
        while stream.queue and self._may_send(stream):
            self._send_next(stream)

    def _may_send(self, stream: Stream) -> bool:
        queue = stream.queue
        return (stream.credit > 0 and self._credit > 0) or queue[0][0] > HELLO

    def _send_next(self, stream: Stream) -> None:
        """Send one frame of what waits."""
        queue = stream.queue
        kind, body, total, front = queue[0]
        if not stream.id:
            self._announce(stream)
        size = len(front) + len(body)
        if size > CHUNK_BYTES:
            end = CHUNK_BYTES - len(front)
            queue[0] = (kind, body[end:], total, b"")
            kind, size = PART, PART_BYTES
            header = pack_header(size, PART, stream.id) + encode_number(total)
            self.out += (header + front, body[:end])
            self.has_parts = True
        else:
            queue.popleft()
            self.out += (pack_header(size, kind, stream.id), body)
        if kind < HELLO:
            cost = HEADER_BYTES + size
            stream.credit -= cost
            self._credit -= cost
        if not queue:
            self._unqueue(stream)
        self._sent(stream, kind)

    def _announce(self, stream: Stream) -> None:
        """Give a client's stream its id: not before, for ids must come in order."""

    def _sent(self, stream: Stream, kind: int) -> None:
        """A frame that had waited went out."""

    def _unqueue(self, stream: Stream) -> None:
        stream.queue = ()
        self.waiting.pop(stream, None)

    def _forget(self, stream: Stream) -> None:
        """The stream is over: what waits is not sent."""
        if stream.queue:
            self._unqueue(stream)
        self.streams.pop(stream.id, None)

    def lost(self) -> list[Stream]:
        """The connection has gone, and with it every stream and what waits."""
        streams = list(dict.fromkeys((*self.streams.values(), *self.waiting)))
        for stream in streams:
            self._forget(stream)
        return streams

    # Receiving

    def withhold(self, stream: Stream) -> None:
        """Give no credit back: the reader is behind."""
        stream.withheld = True

    def release(self, stream: Stream) -> None:
        """Give credit back again."""
        stream.withheld = False
        if 2 * stream.room <= self._ours.stream_credit and stream.id in self.streams:
            self._give_back(stream)

    def _room_is_low(self, stream: Stream, cost: int, kind: int) -> None:
        if not stream.withheld:
            if kind not in _FINAL_MESSAGES:
                self._give_back(stream)
        elif stream.room + cost <= 0:
            raise RemoteProtocolError(f"a message beyond the credit of {stream.id}")

    def _give_back(self, stream: Stream) -> None:
        full = self._ours.stream_credit
        if stream.parts is not None:
            # There is room for all of it: no need to stand still for every credit.
            share = _WINDOW_BYTES // max(1, len(self.streams))
            full = max(full, min(stream.parts.missing, share))
        amount = encode_number(full - stream.room)
        stream.room = full
        self.out.append(encode_frame(CREDIT, stream.id, amount))

    @override
    def _cut(self, data: bytes | memoryview, events: list[Event]) -> tuple[int, int]:
        self._refuse_if_broken()
        at = self._cut_preface(data)
        if at is None:
            return 0, len(PREFACE)
        size = len(data)
        streams = self.streams
        full = self._ours.stream_credit
        needed = HEADER_BYTES
        counted = 0
        while size - at >= HEADER_BYTES:
            length, kind, number = unpack_header(data, at)
            if length > CHUNK_BYTES:
                _check_length(length, kind)
            start = at + HEADER_BYTES
            end = start + length
            if kind == PART or end > size:
                more = self._put(data, start, length, kind, number)
                if end > size:
                    at, needed = (at, more) if more else (size, HEADER_BYTES + length)
                    break
                if not more:
                    at = end
                    continue
            at = end
            if kind >= HELLO:
                self._control(kind, number, data[start:end], events)
                continue
            # As in `_count`, inline for speed: this is the path of every item.
            cost = HEADER_BYTES + length
            counted += cost
            stream = streams.get(number) or self._unknown(number, kind)
            if stream is None:
                continue
            room = stream.room = stream.room - cost
            if 2 * room <= full:
                self._room_is_low(stream, cost, kind)
            if kind == self._plain and stream.state == _STARTED and not stream.parts:
                if stream.items is None:
                    stream.items = [data[start:end]]
                    events.append((ITEM, stream, stream.items))
                else:
                    stream.items.append(data[start:end])
            else:
                body = self._whole(stream, data[start:end])
                self._message(kind, stream, body, events)
        self._count_all(counted)
        return at, needed

    def _cut_preface(self, data: bytes | memoryview) -> int | None:
        """Where the frames begin; None if that is not known yet."""
        return 0

    def _count_all(self, cost: int) -> None:
        """Message frames take from the connection's credit."""
        self._room -= cost
        if 2 * self._room <= self._ours.connection_credit:
            self._give_all_back()

    def _give_all_back(self) -> None:
        full = self._ours.connection_credit
        self.out.append(encode_frame(CREDIT, 0, encode_number(full - self._room)))
        self._room = full

    def _unknown(self, number: int, kind: int) -> Stream | None:
        """The stream that a message opens; None if it belongs to one that is gone."""
        self._check_gone(number)
        return None

    def _check_gone(self, number: int) -> None:
        if not 0 < number <= self.last_id:
            raise RemoteProtocolError(f"a frame of stream {number}, which is not open")

    def _put(
        self, data: bytes | memoryview, start: int, length: int, kind: int, number: int
    ) -> int:
        """Put a PART, or a last frame that is not complete, where its message is.

        What has come of it is there then, and what is missing will be read to there.

        Returns:
            0, or if nothing was done, how much of the frame another look needs.
        """
        body = memoryview(data)[start : start + length]
        stream = self.streams.get(number)
        whole = HEADER_BYTES + length
        if kind == PART:
            if length != PART_BYTES:
                raise RemoteProtocolError(f"a PART of {length} bytes")
            if len(body) < PART_HEAD_BYTES:
                return _NEXT_BYTES
            stream = stream or self._unknown(number, kind)
            if stream is None:
                return whole
            total = decode_number(body[:PART_HEAD_BYTES], "PART")
            if not self._make_room(stream, total):
                return whole
            body = body[PART_HEAD_BYTES:]
        elif stream is None or not _is_last_part(stream, kind, length):
            return whole
        self._count(stream, whole, kind)
        self._add(stream, kind, body, start + length - len(data))
        return 0

    def _make_room(self, stream: Stream, total: int) -> bool:
        """For the next PART of a message of that length; False if it is not taken."""
        parts = stream.parts
        expected, missing = (parts.total, parts.missing) if parts else (total, total)
        if total != expected or missing <= CHUNK_BYTES:
            raise RemoteProtocolError(f"a PART that does not fit into {total} bytes")
        if parts is None:
            if self._refuses(stream, total):
                return False
            stream.parts = Assembly(self._memory, total)
        return True

    def _refuses(self, stream: Stream, total: int) -> bool:
        """Whether a message of that length, which begins, is not taken."""
        return False

    def _add(self, stream: Stream, kind: int, body: memoryview, rest: int) -> None:
        assert stream.parts is not None
        stream.parts.add(body)
        if rest > 0:
            self._message_into = kind, stream
            self._read_into(stream.parts, rest)

    def _count(self, stream: Stream, cost: int, kind: int) -> None:
        """A message frame takes from the credit that was given."""
        self._count_all(cost)
        stream.room -= cost
        if 2 * stream.room <= self._ours.stream_credit:
            self._room_is_low(stream, cost, kind)

    @override
    def space(self) -> memoryview:
        into = self._into
        if into is None or self._message_into is None:
            return super().space()
        kind, _ = self._message_into
        # With the next header, so that nobody has to look for it in between.
        ahead = _NEXT_BYTES if kind == PART else 0
        return into.space(self._rest_bytes + ahead)

    @override
    def _complete(self, into: Assembly, events: list[Event]) -> None:
        message, self._message_into = self._message_into, None
        if message is None:
            super()._complete(into, events)
            return
        kind, stream = message
        if kind == PART:
            self.direct = True
            return
        stream.parts = None
        whole = into.whole()
        if self.streams.get(stream.id) is stream:
            self._handle_last(kind, stream, whole, events)

    def _handle_last(
        self, kind: int, stream: Stream, whole: memoryview, events: list[Event]
    ) -> None:
        try:
            self._message(kind, stream, whole, events)
        except RemoteProtocolError as error:
            self._broken = True
            if not events:
                raise
            self._error = error

    def _whole(self, stream: Stream, last: bytes | memoryview) -> bytes | memoryview:
        parts, stream.parts = stream.parts, None
        if parts is None:
            return last
        if len(last) != parts.missing:
            raise RemoteProtocolError(f"a message of not {parts.total} bytes")
        parts.add(last)
        return parts.whole()

    @abstractmethod
    def _message(
        self, kind: int, stream: Stream, body: bytes | memoryview, events: list[Event]
    ) -> None:
        """A whole message of an open stream."""

    def _control(
        self, kind: int, number: int, payload: bytes | memoryview, events: list[Event]
    ) -> None:
        if self.peer is None and kind != HELLO:
            raise RemoteProtocolError(f"a frame of type {kind:#04x} before HELLO")
        handle = self.on_control.get(kind)
        if handle is not None:
            handle(self, number, payload, events)
        elif kind < FIRST_TO_IGNORE:
            raise RemoteProtocolError(f"a frame of type {kind:#04x} is not expected")

    def _on_hello(
        self, number: int, payload: bytes | memoryview, events: list[Event]
    ) -> None:
        if self.peer is not None or number != 0:
            raise RemoteProtocolError("HELLO in a wrong place")
        peer = decode_hello(payload)
        version = min(peer.highest, self._ours.highest)
        if version < max(peer.lowest, self._ours.lowest):
            raise RemoteProtocolError(
                f"no common version: the peer speaks {peer.lowest} to {peer.highest}, "
                f"we {self._ours.lowest} to {self._ours.highest}"
            )
        self.peer = peer
        self._credit = peer.connection_credit
        events.append((HELLO, None, peer))

    def _on_ping(
        self, number: int, payload: bytes | memoryview, events: list[Event]
    ) -> None:
        _check_ping(number, payload, "PING")
        self.out.append(encode_frame(PONG, 0, payload))

    def _on_pong(
        self, number: int, payload: bytes | memoryview, events: list[Event]
    ) -> None:
        """That something arrived is all there is to it."""
        _check_ping(number, payload, "PONG")

    def _on_credit(
        self, number: int, payload: bytes | memoryview, events: list[Event]
    ) -> None:
        amount = decode_number(payload, "CREDIT")
        if number == 0:
            self._credit = _more(self._credit, amount)
            self._drain_all(events)
            return
        stream = self.streams.get(number)
        if stream is None:
            self._check_gone(number)
            return
        stream.credit = _more(stream.credit, amount)
        if stream.queue:
            self._drain(stream)
            self._tell_if_drained(stream, events)

    def _drain_all(self, events: list[Event]) -> None:
        """One frame per stream in turn, as far as the connection's credit goes."""
        ready: Iterable[Stream] = list(self.waiting)
        while ready:
            ready = [stream for stream in ready if self._step(stream, events)]

    def _step(self, stream: Stream, events: list[Event]) -> bool:
        """Send one frame; whether another may follow."""
        if not self._may_send(stream):
            return False
        self._send_next(stream)
        self._tell_if_drained(stream, events)
        return bool(stream.queue)

    def _tell_if_drained(self, stream: Stream, events: list[Event]) -> None:
        if not stream.queue:
            events.append((WRITABLE, stream, None))

    def ping(self) -> None:
        """Ask for a sign of life."""
        self.out.append(encode_frame(PING, 0))

    def _open_stream(
        self, number: int, payload: bytes | memoryview, what: str
    ) -> Stream | None:
        """The stream of a frame without payload; None if it is gone."""
        if payload:
            raise RemoteProtocolError(f"{what} with a payload")
        stream = self.streams.get(number)
        if stream is None:
            self._check_gone(number)
        return stream

    # Who handles the frames that are no messages, by their types.
    on_control: ClassVar[_Handlers] = {
        HELLO: _on_hello,
        PING: _on_ping,
        PONG: _on_pong,
        CREDIT: _on_credit,
    }


def _check_length(length: int, kind: int) -> None:
    limit = PART_BYTES if kind == PART else CHUNK_BYTES
    if length > limit:
        raise RemoteProtocolError(
            f"a frame of type {kind:#04x} and {length} bytes is over its limit of "
            f"{limit}"
        )


def _check_ping(number: int, payload: bytes | memoryview, what: str) -> None:
    if number != 0 or len(payload) > _MAX_PING_BYTES:
        raise RemoteProtocolError(f"a {what} with a stream or too much in it")


def _is_last_part(stream: Stream, kind: int, length: int) -> bool:
    parts = stream.parts
    return parts is not None and kind < HELLO and length == parts.missing


def _more(credit: int, amount: int) -> int:
    credit += amount
    if credit > MAX_CREDIT:
        raise RemoteProtocolError(f"a credit of {credit} bytes")
    return credit


# ----------------------------------------------------------------- the client's side


class ClientSide(_Side):
    """The client's side of a connection.

    Events: HELLO; QUEUED, STARTED, ITEM (a list of payloads), ERROR (an `ErrorObject`),
    HANDLER_REFUSED (a `HandlerRefusal`), REFUSED (a `Refusal`), END, RESET; WRITABLE when
    a queue has drained.  ERROR, HANDLER_REFUSED, REFUSED, END and RESET are the last of
    their stream; STARTED comes once before items, ERROR and END.  ANSWER (a payload) is
    STARTED, one ITEM and END at once, when nothing else was said.
    """

    _plain = ITEM

    def __init__(self, ours: Hello, memory: Memory | None = None) -> None:
        super().__init__(ours, memory)
        self.going_away = False
        self._greeted = False

    @property
    def usable(self) -> bool:
        """Whether new calls may be made."""
        ready = self.peer is not None and not self.going_away
        return ready and self.last_id < LAST_ID_TO_OPEN

    def open(self, front: bytes, value: bytes) -> Stream:
        """Begin a call with what `encode_request_front` made, and the value."""
        assert self.peer is not None
        stream = Stream(self.peer.stream_credit, self._ours.stream_credit, _NEW)
        size = len(front) + len(value)
        if self._credit > 0 and size <= CHUNK_BYTES:
            self._announce(stream)
            # As `send` does; nothing can wait on a new stream.
            cost = HEADER_BYTES + size
            stream.credit -= cost
            self._credit -= cost
            self.out += (pack_header(size, REQUEST, stream.id), front + value)
        elif len(value) > CHUNK_BYTES >= len(front):
            # Without a copy.
            self._send_later(stream, REQUEST, value, front)
        else:
            self._send_later(stream, REQUEST, front + value, b"")
        return stream

    @override
    def _announce(self, stream: Stream) -> None:
        self.last_id += 1
        stream.id = self.last_id
        stream.state = _SENT
        self.streams[stream.id] = stream

    def end_input(self, stream: Stream) -> None:
        """No more input; behind what waits."""
        if stream.queue:
            stream.queue.append((INPUT_END, b"", 0, b""))
        elif stream.id in self.streams:
            self.out.append(pack_header(0, INPUT_END, stream.id))

    def stop(self, stream: Stream) -> bool:
        """Ask for the end; False if the worker never hears of the call at all."""
        self._unqueue(stream)
        if stream.id in self.streams:
            self.out.append(pack_header(0, STOP, stream.id))
        return stream.id != 0

    def kill(self, stream: Stream) -> None:
        """End the stream here and now."""
        if stream.id in self.streams:
            self.out.append(pack_header(0, KILL, stream.id))
        self._forget(stream)

    def never_left(self) -> set[Stream]:
        """When the connection is lost: the streams whose request is not out as a whole.

        What is left in `out` was never handed to the socket.
        """
        left = {one for one in self.waiting if one.queue and one.queue[0][0] == REQUEST}
        out = b"".join(self.out)
        at = len(PREFACE) if out.startswith(PREFACE) else 0
        while at < len(out):
            length, kind, number = unpack_header(out, at)
            at += HEADER_BYTES + length
            if kind == REQUEST and number in self.streams:
                left.add(self.streams[number])
        return left

    @override
    def _cut_preface(self, data: bytes | memoryview) -> int | None:
        if self._greeted:
            return 0
        if not PREFACE.startswith(data[: len(PREFACE)]):
            raise RemoteProtocolError("the worker does not answer the preface")
        if len(data) < len(PREFACE):
            return None
        self._greeted = True
        return len(PREFACE)

    @override
    def _message(
        self, kind: int, stream: Stream, body: bytes | memoryview, events: list[Event]
    ) -> None:
        if kind not in (ITEM, ITEM_END):
            self._other_message(kind, stream, body, events)
            return
        if kind == ITEM_END and stream.state != _STARTED:
            self._forget(stream)
            events.append((ANSWER, stream, body))
            return
        self._start(stream, events)
        if stream.items is None:
            stream.items = [body]
            events.append((ITEM, stream, stream.items))
        else:
            stream.items.append(body)
        if kind == ITEM_END:
            self._last(END, stream, None, events)

    def _other_message(
        self, kind: int, stream: Stream, body: bytes | memoryview, events: list[Event]
    ) -> None:
        if kind == HANDLER_REFUSED:
            self._not_started(stream, "HANDLER_REFUSED")
            self._last(kind, stream, decode_handler_refusal(body), events)
        elif kind == ERROR:
            self._start(stream, events)
            self._last(kind, stream, decode_error(body), events)
        else:
            raise RemoteProtocolError(f"a message of type {kind:#04x} from a worker")

    def _start(self, stream: Stream, events: list[Event]) -> None:
        if stream.state != _STARTED:
            stream.state = _STARTED
            events.append((STARTED, stream, None))

    def _not_started(self, stream: Stream, what: str) -> None:
        if stream.state == _STARTED:
            raise RemoteProtocolError(f"{what} for a call whose handler runs")

    def _last(
        self, kind: int, stream: Stream, payload: object, events: list[Event]
    ) -> None:
        self._forget(stream)
        events.append((kind, stream, payload))

    def _on_queued(
        self, number: int, payload: bytes | memoryview, events: list[Event]
    ) -> None:
        stream = self._open_stream(number, payload, "QUEUED")
        if stream is None:
            return
        if stream.state != _SENT:
            raise RemoteProtocolError("QUEUED for a call that was acknowledged")
        stream.state = _WAITING
        events.append((QUEUED, stream, None))

    def _on_accept(
        self, number: int, payload: bytes | memoryview, events: list[Event]
    ) -> None:
        stream = self._open_stream(number, payload, "ACCEPT")
        if stream is not None:
            self._not_started(stream, "ACCEPT")
            self._start(stream, events)

    def _on_end(
        self, number: int, payload: bytes | memoryview, events: list[Event]
    ) -> None:
        stream = self._open_stream(number, payload, "END")
        if stream is not None:
            self._start(stream, events)
            self._last(END, stream, None, events)

    def _on_reset(
        self, number: int, payload: bytes | memoryview, events: list[Event]
    ) -> None:
        stream = self._open_stream(number, payload, "RESET")
        if stream is not None:
            self._last(RESET, stream, None, events)

    def _on_refused(
        self, number: int, payload: bytes | memoryview, events: list[Event]
    ) -> None:
        refusal = decode_refusal(payload)
        stream = self._open_stream(number, b"", "REFUSED")
        if stream is not None:
            self._not_started(stream, "REFUSED")
            self._last(REFUSED, stream, refusal, events)

    def _on_goaway(
        self, number: int, payload: bytes | memoryview, events: list[Event]
    ) -> None:
        last = decode_number(payload, "GOAWAY")
        if number != 0:
            raise RemoteProtocolError("GOAWAY with a stream")
        self.going_away = True
        unsent = [stream for stream in self.waiting if not stream.id]
        above = [stream for stream in self.streams.values() if stream.id > last]
        for stream in above + unsent:
            refusal = Refusal(UNAVAILABLE, "")
            self._last(REFUSED, stream, refusal, events)

    on_control = _Side.on_control | {
        GOAWAY: _on_goaway,
        QUEUED: _on_queued,
        ACCEPT: _on_accept,
        END: _on_end,
        RESET: _on_reset,
        REFUSED: _on_refused,
    }


# ----------------------------------------------------------------- the worker's side


class WorkerSide(_Side):
    """The worker's side of a connection, behind the client's preface.

    Events: HELLO; REQUEST (head and value, as `decode_request` returns them), INPUT (the
    payload), INPUT_END, STOP, KILL; WRITABLE when a queue has drained.  After KILL the
    stream is gone; after STOP it is open until it is ended here.
    """

    def __init__(self, ours: Hello, memory: Memory | None = None) -> None:
        super().__init__(ours, memory)
        self._going_away = False

    # Answering

    def queued(self, stream: Stream) -> None:
        """The request waits for its turn."""
        self.out.append(pack_header(0, QUEUED, stream.id))

    def accept(self, stream: Stream) -> None:
        """The handler runs, and has nothing to say yet."""
        self.out.append(pack_header(0, ACCEPT, stream.id))

    def finish(self, stream: Stream) -> None:
        """The stream is complete.  The mark rides on the last item if that is still here."""
        if stream.queue:
            # Only items wait here, the last of them perhaps in part.
            stream.queue[-1] = (ITEM_END, *stream.queue[-1][1:])
            return
        out = self.out
        # The header and not the body: short bodies may be one and the same object.
        if len(out) > 1 and out[-2] is stream.last_header:
            out[-2] = pack_header(len(out[-1]), ITEM_END, stream.id)
        else:
            out.append(pack_header(0, END, stream.id))
        self._forget(stream)

    def end_with(self, stream: Stream, kind: int, payload: bytes) -> None:
        """End with ERROR or HANDLER_REFUSED."""
        self.send(stream, kind, payload)
        if not stream.queue:
            self._forget(stream)

    def refuse(self, stream: Stream, refusal: Refusal) -> None:
        """Never started.  Ends the stream."""
        self.out.append(encode_frame(REFUSED, stream.id, encode_refusal(refusal)))
        self._forget(stream)

    def reset(self, stream: Stream) -> None:
        """End a stream that is not complete."""
        if stream.id in self.streams:
            self.out.append(pack_header(0, RESET, stream.id))
            self._forget(stream)

    def go_away(self) -> None:
        """Take no new streams from now on."""
        if not self._going_away:
            self._going_away = True
            self.out.append(encode_frame(GOAWAY, 0, encode_number(self.last_id)))

    @override
    def _sent(self, stream: Stream, kind: int) -> None:
        if kind in _FINAL_MESSAGES:
            self._forget(stream)

    # Receiving

    @override
    def _unknown(self, number: int, kind: int) -> Stream | None:
        if number <= self.last_id or kind not in (PART, REQUEST):
            return super()._unknown(number, kind)
        self.last_id = number
        if self._going_away:
            return None
        if self.peer is None:
            raise RemoteProtocolError("a message before HELLO")
        credit = self.peer.stream_credit
        stream = Stream(credit, self._ours.stream_credit, _OPENING)
        stream.id = number
        self.streams[number] = stream
        return stream

    @override
    def _refuses(self, stream: Stream, total: int) -> bool:
        return stream.state == _OPENING and self._is_too_large(stream, total)

    def _is_too_large(self, stream: Stream, size: int) -> bool:
        limit = self._ours.max_message_bytes
        if not limit or size <= limit:
            return False
        self.refuse(stream, Refusal(TOO_LARGE, too_large_text(size, limit)))
        return True

    @override
    def _message(
        self, kind: int, stream: Stream, body: bytes | memoryview, events: list[Event]
    ) -> None:
        if kind == REQUEST and stream.state == _OPENING:
            if self._is_too_large(stream, len(body)):
                return
            request = decode_request(body)
            stream.state = _OPEN
            stream.input_open = request[0].streamed
            events.append((REQUEST, stream, request))
        elif kind == INPUT and stream.input_open:
            events.append((INPUT, stream, body))
        else:
            raise RemoteProtocolError(
                f"a message of type {kind:#04x} out of place, on stream {stream.id}"
            )

    def _on_input_end(
        self, number: int, payload: bytes | memoryview, events: list[Event]
    ) -> None:
        stream = self._open_stream(number, payload, "INPUT_END")
        if stream is None:
            return
        if not stream.input_open:
            raise RemoteProtocolError("INPUT_END for a call without open input")
        stream.input_open = False
        events.append((INPUT_END, stream, None))

    def _on_stop(
        self, number: int, payload: bytes | memoryview, events: list[Event]
    ) -> None:
        stream = self._open_stream(number, payload, "STOP")
        if stream is None:
            return
        if stream.state == _OPENING:
            self.reset(stream)
        else:
            events.append((STOP, stream, None))

    def _on_kill(
        self, number: int, payload: bytes | memoryview, events: list[Event]
    ) -> None:
        stream = self._open_stream(number, payload, "KILL")
        if stream is None:
            return
        self._forget(stream)
        if stream.state == _OPEN:
            events.append((KILL, stream, None))

    on_control = _Side.on_control | {
        INPUT_END: _on_input_end,
        STOP: _on_stop,
        KILL: _on_kill,
    }
