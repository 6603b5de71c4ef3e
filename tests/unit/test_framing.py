"""The cutter that all readers share, driven with the smallest frame there is."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.runtime._sealed import override
from dynamo.runtime._wire.framing import FrameReader
from dynamo.runtime._wire.two_part import TwoPartReader, encode_two_part
from dynamo.runtime.errors import RemoteProtocolError


class ByteCounted(FrameReader[bytes]):
    """One byte of length, then that many bytes; 255 breaks the protocol."""

    @override
    def _cut(self, data: bytes, events: list[bytes]) -> tuple[int, int]:
        self._refuse_if_broken()
        at = 0
        while at < len(data):
            if data[at] == 255:
                raise RemoteProtocolError("255")
            end = at + 1 + data[at]
            if end > len(data):
                return at, end - at
            events.append(data[at + 1 : end])
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
