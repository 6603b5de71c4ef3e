"""Two-part messages, whole and out of a stream."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.runtime._wire.two_part import (
    TwoPart,
    TwoPartReader,
    decode_two_part,
    encode_two_part,
)
from dynamo.runtime.errors import RemoteProtocolError

messages = st.builds(TwoPart, st.binary(max_size=60), st.binary(max_size=60))


def in_pieces(stream: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(stream[:size])
        stream = stream[size:]
    return [*pieces, stream]


@given(st.lists(messages), st.lists(st.integers(0, 40)))
def test_any_split_gives_the_same_messages(
    sent: list[TwoPart], sizes: list[int]
) -> None:
    stream = b"".join(encode_two_part(each.header, each.body) for each in sent)
    reader = TwoPartReader()
    got = [each for piece in in_pieces(stream, sizes) for each in reader.feed(piece)]
    reader.feed_eof()
    assert got == sent


@given(messages, st.binary(max_size=5))
def test_whole_message_round_trip_ignores_what_follows(
    message: TwoPart, extra: bytes
) -> None:
    raw = encode_two_part(message.header, message.body)
    assert decode_two_part(raw + extra) == message


def test_truncation_at_every_byte_is_an_error() -> None:
    raw = encode_two_part(b"head", b"body")
    for size in range(1, len(raw)):
        reader = TwoPartReader()
        assert reader.feed(raw[:size]) == []
        assert reader.mid_frame
        with pytest.raises(RemoteProtocolError, match="ended inside a frame"):
            reader.feed_eof()
        with pytest.raises(RemoteProtocolError, match="two-part message"):
            decode_two_part(raw[:size])
    with pytest.raises(RemoteProtocolError, match="at least 24 bytes, not 0"):
        decode_two_part(b"")


def test_checksum_is_ignored() -> None:
    raw = struct.pack(">QQQ", 1, 1, 2**64 - 1) + b"hb"
    assert TwoPartReader().feed(raw) == [TwoPart(b"h", b"b")]
    assert decode_two_part(raw) == TwoPart(b"h", b"b")


def test_limit_counts_the_whole_message() -> None:
    raw = encode_two_part(b"12", b"345")
    assert TwoPartReader(len(raw)).feed(raw) == [TwoPart(b"12", b"345")]
    with pytest.raises(RemoteProtocolError, match="29 bytes is over the limit of 28"):
        TwoPartReader(len(raw) - 1).feed(raw[:24])


@pytest.mark.parametrize("lengths", [(2**64 - 1, 0), (0, 2**64 - 1), (2**40, 0)])
def test_absurd_length_is_refused_before_anything_is_kept(
    lengths: tuple[int, int],
) -> None:
    reader = TwoPartReader()
    with pytest.raises(RemoteProtocolError, match="over the limit"):
        reader.feed(struct.pack(">QQQ", *lengths, 0))
    assert not reader.mid_frame
    with pytest.raises(RemoteProtocolError):
        reader.feed(b"more")


def test_large_message_in_small_chunks_is_joined_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Linear, counted in bytes looked at and not in seconds."""
    looked_at = 0
    cut = TwoPartReader._cut

    def counting(
        self: TwoPartReader, data: bytes, events: list[TwoPart]
    ) -> tuple[int, int]:
        nonlocal looked_at
        looked_at += len(data)
        return cut(self, data, events)

    monkeypatch.setattr(TwoPartReader, "_cut", counting)
    body = bytes(8 * 1024 * 1024)
    raw = encode_two_part(b"", body)
    reader = TwoPartReader()
    got = []
    for at in range(0, len(raw), 65536):
        got += reader.feed(raw[at : at + 65536])
    assert got == [TwoPart(b"", body)]
    assert looked_at <= len(raw) + 65536
