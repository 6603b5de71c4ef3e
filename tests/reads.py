"""Feeds a reader as a connection does: what is the rest of a large frame, directly."""

from __future__ import annotations

from typing import TypeVar

from dynamo.runtime._wire.framing import FrameReader

Event = TypeVar("Event")


def read(reader: FrameReader[Event], data: bytes) -> list[Event]:
    """The events of these bytes, all of which are there to be read at once.

    Raises:
        RemoteProtocolError: they break the protocol.
    """
    events: list[Event] = []
    while data and reader.direct:
        space = reader.space()
        taken = data[: len(space)]
        space[: len(taken)] = taken
        events += reader.filled(len(taken))
        data = data[len(taken) :]
        reader.check()
    if data:
        events += reader.feed(data)
    return events
