"""The cutter that all readers share, driven with the smallest frame there is."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reads import read

from dynamo.runtime._sealed import override
from dynamo.runtime._wire.framing import AHEAD_BYTES, FrameReader, Memory
from dynamo.runtime._wire.two_part import TwoPart, TwoPartReader, encode_two_part
from dynamo.runtime.errors import RemoteProtocolError


class ByteCounted(FrameReader[bytes]):
    """One byte of length, then that many bytes; 255 breaks the protocol."""

    @override
    def _cut(self, data: bytes | memoryview, events: list[bytes]) -> tuple[int, int]:
        self._refuse_if_broken()
        at = 0
        while at < len(data):
            if data[at] == 255:
                raise RemoteProtocolError("255")
            end = at + 1 + data[at]
            if end > len(data):
                return at, end - at
            events.append(bytes(data[at + 1 : end]))
            at = end
        return at, 1


@given(st.lists(st.binary(max_size=20)), st.data())
def test_any_split_gives_the_same_events(
    bodies: list[bytes], drawn: st.DataObject
) -> None:
    stream = b"".join(bytes([len(body)]) + body for body in bodies)
    reader = ByteCounted()
    events = []
    while stream:
        size = drawn.draw(st.integers(0, len(stream)))
        events += reader.feed(stream[:size])
        stream = stream[size:]
        if size == 0:
            events += reader.feed(stream[:1])
            stream = stream[1:]
    reader.feed_eof()
    assert events == bodies
    assert not reader.mid_frame


def test_end_of_stream_inside_a_frame_names_what_is_missing() -> None:
    reader = ByteCounted()
    assert reader.feed(b"\x01a\x05bc") == [b"a"]
    assert reader.mid_frame
    with pytest.raises(RemoteProtocolError, match="after 3 of at least 6 bytes"):
        reader.feed_eof()


def test_frames_before_a_broken_one_are_delivered_however_they_came() -> None:
    whole, pieces = ByteCounted(), ByteCounted()
    assert whole.feed(b"\x01a\x01b\xff") == [b"a", b"b"]
    with pytest.raises(RemoteProtocolError, match="255"):
        whole.check()
    assert pieces.feed(b"\x01a\x01b") == [b"a", b"b"]
    pieces.check()
    with pytest.raises(RemoteProtocolError, match="255"):
        pieces.feed(b"\xff")


def test_broken_reader_stays_broken() -> None:
    reader = ByteCounted()
    with pytest.raises(RemoteProtocolError, match="255"):
        reader.feed(b"\xff\x01a")
    with pytest.raises(RemoteProtocolError, match="broke the protocol"):
        reader.feed(b"\x01b")
    assert not reader.mid_frame


def test_frame_that_trickles_in_takes_little_more_than_its_bytes() -> None:
    size = 200_000
    frame = encode_two_part(body=bytes(range(250)) * (size // 250))
    reader = TwoPartReader()
    tracemalloc.start()
    try:
        for at in range(0, size, 2):
            assert reader.feed(frame[at : at + 2]) == []
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1.5 * size
    (message,) = reader.feed(frame[size:])
    assert message.body == frame[24:]


# ---------------------------------------------------------------------- large frames

LARGE = st.integers(0, 500_000) | st.integers(0, 300)


@settings(max_examples=40)
@given(
    sizes=st.lists(st.tuples(LARGE, LARGE), max_size=6),
    cuts=st.lists(st.integers(1, 300_000) | st.integers(1, 50)),
    direct=st.booleans(),
)
def test_large_messages_are_the_same_however_they_are_read(
    sizes: list[tuple[int, int]], cuts: list[int], direct: bool
) -> None:
    sent = [
        TwoPart(bytes([number]) * header, bytes([255 - number]) * body)
        for number, (header, body) in enumerate(sizes)
    ]
    stream = b"".join(encode_two_part(one.header, one.body) for one in sent)
    reader = TwoPartReader()
    got = []
    for size in [*cuts, len(stream)]:
        piece, stream = stream[:size], stream[size:]
        got += read(reader, piece) if direct else reader.feed(piece)
    # Kept to the end: no message is put where somebody still looks into another.
    assert got == sent
    reader.feed_eof()
    assert not reader.mid_frame
    assert not reader.direct


def test_the_rest_of_a_large_frame_is_read_to_where_it_belongs() -> None:
    frame = encode_two_part(body=bytes(1_000_000))
    reader = TwoPartReader()
    assert not reader.direct
    assert reader.feed(frame[:100_000]) == []
    assert reader.direct
    assert len(reader.space()) == len(frame) - 100_000
    assert read(reader, frame[100_000:] + frame[:10]) == [TwoPart(b"", frame[24:])]
    assert not reader.direct
    with pytest.raises(RemoteProtocolError, match="after 10 of at least 24 bytes"):
        reader.feed_eof()


def test_the_end_inside_a_large_frame_names_what_is_missing() -> None:
    frame = encode_two_part(body=bytes(1_000_000))
    reader = TwoPartReader()
    assert read(reader, frame[:500]) == read(reader, frame[500:1000]) == []
    with pytest.raises(RemoteProtocolError, match="after 1000 of at least 1000024"):
        reader.feed_eof()


@pytest.mark.parametrize("direct", [False, True])
def test_a_length_that_is_a_lie_takes_little_memory(direct: bool) -> None:
    front = encode_two_part()[:8] + (2**39).to_bytes(8, "big") + bytes(8)
    reader = TwoPartReader()
    tracemalloc.start()
    try:
        reader.feed(front)
        for _ in range(200):
            piece = bytes(10_000)
            assert (read(reader, piece) if direct else reader.feed(piece)) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Room is made in steps: a quarter of it may be there, and both for a moment.
    assert peak < 6 * 2_000_000


# --------------------------------------------------------------------------- memory


def test_memory_is_used_again_and_not_while_somebody_looks_into_it() -> None:
    memory = Memory()
    first = memory.take(1000)
    memory.give(first)
    view = memoryview(first)[5:10]
    other = memory.take(1000)
    assert other is not first
    view.release()
    assert memory.take(1000) is first


def test_of_two_pieces_the_larger_is_kept_unless_it_is_looked_into() -> None:
    memory = Memory()
    small, large = memory.take(100), memory.take(5000)
    memory.give(large)
    memory.give(small)
    assert memory.held_bytes == 5000 + AHEAD_BYTES
    with memoryview(large):
        memory.give(small)
        assert memory.held_bytes == 100 + AHEAD_BYTES
    memory.drop()
    assert memory.held_bytes == 0


def test_messages_that_are_let_go_of_take_turns_in_one_piece_of_memory() -> None:
    frame = encode_two_part(body=bytes(300_000))
    memory = Memory()
    readers = [TwoPartReader(memory=memory) for _ in range(2)]
    rooms = set()
    for turn in range(6):
        reader = readers[turn % 2]
        reader.feed(frame[:200_000])
        assert memory.held_bytes == 0
        (message,) = reader.feed(frame[200_000:])
        assert isinstance(message.body, memoryview)
        rooms.add(id(message.body.obj))
        del message
    assert len(rooms) == 1
