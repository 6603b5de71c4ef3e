"""The two-part message: a header and a body behind three big-endian 64-bit numbers.

Owns the layout ``header_len, body_len, checksum, header, body``.  The checksum is sent as
0 and never looked at, as between genuine release builds.
"""

from __future__ import annotations

import struct

import msgspec

from dynamo.runtime._sealed import override
from dynamo.runtime._wire.framing import FrameReader, Memory
from dynamo.runtime.errors import RemoteProtocolError

_PREFIX = struct.Struct(">QQQ")
_PREFIX_BYTES = _PREFIX.size

# Without a limit of the owner a length must still be one that a process can address.
_MAX_ADDRESSABLE_BYTES = 2**40


class TwoPart(msgspec.Struct, gc=False):
    """One message; both parts may be empty, and are views if it is large."""

    header: bytes | memoryview
    body: bytes | memoryview


def encode_two_part(
    header: bytes | memoryview = b"", body: bytes | memoryview = b""
) -> bytes:
    """The message as it travels."""
    return b"".join((two_part_prefix(len(header), len(body)), header, body))


def two_part_prefix(header_bytes: int, body_bytes: int) -> bytes:
    """What stands in front of header and body of these lengths."""
    return _PREFIX.pack(header_bytes, body_bytes, 0)


def decode_two_part(message: bytes | memoryview) -> TwoPart:
    """A message that is there as a whole; bytes after it are ignored.

    Raises:
        RemoteProtocolError: the bytes end before the message does.
    """
    if len(message) < _PREFIX_BYTES:
        raise RemoteProtocolError(
            f"a two-part message takes at least {_PREFIX_BYTES} bytes, not "
            f"{len(message)}"
        )
    header_len, body_len, _ = _PREFIX.unpack_from(message)
    header_end = _PREFIX_BYTES + header_len
    end = header_end + body_len
    if end > len(message):
        raise RemoteProtocolError(
            f"a two-part message announces {end} bytes and has {len(message)}"
        )
    return TwoPart(message[_PREFIX_BYTES:header_end], message[header_end:end])


class TwoPartReader(FrameReader[TwoPart]):
    """Cuts a response or request-stream connection into messages.

    Args:
        max_message_bytes: A longer message breaks the protocol, as soon as its lengths
            are there.  None: the genuine runtime has no limit on these connections.
        memory: As for every `FrameReader`.
    """

    __slots__ = ("_max_message_bytes",)

    def __init__(
        self, max_message_bytes: int | None = None, *, memory: Memory | None = None
    ) -> None:
        super().__init__(memory)
        self._max_message_bytes = (
            _MAX_ADDRESSABLE_BYTES if max_message_bytes is None else max_message_bytes
        )

    @override
    def _cut(self, data: bytes | memoryview, events: list[TwoPart]) -> tuple[int, int]:
        self._refuse_if_broken()
        at = 0
        size = len(data)
        while size - at >= _PREFIX_BYTES:
            header_len, body_len, _ = _PREFIX.unpack_from(data, at)
            needed = _PREFIX_BYTES + header_len + body_len
            if needed > self._max_message_bytes:
                raise RemoteProtocolError(
                    f"a two-part message of {needed} bytes is over the limit of "
                    f"{self._max_message_bytes}"
                )
            if size - at < needed:
                return at, needed
            header_at = at + _PREFIX_BYTES
            body_at = header_at + header_len
            at += needed
            events.append(TwoPart(data[header_at:body_at], data[body_at:at]))
        return at, _PREFIX_BYTES
