"""Items as they come from a worker, and what there is to see of them."""

from __future__ import annotations

from typing import Any

from dynamo.runtime._wire.payload import (
    Annotated,
    decode_annotated,
    encode_annotated,
    error_in,
)


def received(data: object = None, **rest: Any) -> Annotated:
    """An item that came over the wire; without data if that is None."""
    sent = encode_annotated("msgpack", data, has_data=data is not None, **rest)
    return decode_annotated(sent, "msgpack")


def seen(item: object) -> tuple[object, ...]:
    """All that an item has: it equals no other."""
    assert type(item) is Annotated
    return item.data(), item.id(), item.event(), item.comments(), error_in(item)
