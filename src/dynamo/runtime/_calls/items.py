"""What a value that a handler yields becomes on the wire: item, envelope, or error.

Pure: values in, encoded annotated maps out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynamo.runtime._wire.faults import error_of_envelope, error_of_unsendable
from dynamo.runtime._wire.payload import Annotated, encode_annotated, encode_data

if TYPE_CHECKING:
    from dynamo.runtime._wire.faults import ErrorObject

_MARK = "_dynamo_annotated"
_BAD_ENVELOPE = (
    "critical error: invalid response object from Python async generator; "
    "application-logic-mismatch: TypeError: "
)


class ItemError(Exception):
    """The value ends the stream with ``error`` in its place."""

    def __init__(self, error: ErrorObject) -> None:
        super().__init__(error.words)
        self.error = error


def encode_item(codec: str, value: object) -> bytes:
    """The annotated map of a yielded value.

    A dict with a true value under ``_dynamo_annotated`` is an envelope, and so is an
    item received from another call; anything else is data.

    Raises:
        ItemError: it cannot be sent, is no valid envelope, or spells out an error.
    """
    try:
        if isinstance(value, dict):
            if value.get(_MARK):
                return _encode_envelope(codec, value)
        elif type(value) is Annotated:
            return _encode_received(codec, value)
        return encode_data(codec, value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ItemError(error_of_unsendable(str(error), codec)) from error


def has_data(value: object) -> bool:
    """Whether a yielded value carries a payload, in an envelope or not."""
    if type(value) is Annotated:
        return value.data() is not None
    if isinstance(value, dict) and value.get(_MARK):
        return value.get("data") is not None
    return value is not None


def _encode_received(codec: str, value: Annotated) -> bytes:
    data = value.data()
    return encode_annotated(
        codec,
        data,
        id=value.id(),
        event=value.event(),
        comment=value.comments(),
        has_data=data is not None,
    )


def _encode_envelope(codec: str, envelope: dict[str, Any]) -> bytes:
    event = envelope.get("event")
    comment = envelope.get("comment")
    complaint = _complaint(event, comment, envelope.get("id"))
    if complaint is not None:
        raise ItemError(error_of_envelope(None, [_BAD_ENVELOPE + complaint]))
    if event == "error":
        raise ItemError(error_of_envelope(envelope.get("error"), comment))
    data = envelope.get("data")
    return encode_annotated(
        codec,
        data,
        id=envelope.get("id"),
        event=event,
        comment=None if comment is None else list(comment),
        has_data=data is not None,
    )


def _complaint(event: object, comment: object, item_id: object) -> str | None:
    """What is wrong with the fields of an envelope, in the genuine runtime's words."""
    for value in (event, item_id):
        if value is not None and not isinstance(value, str):
            kind = type(value).__name__
            return f"'{kind}' object cannot be converted to 'PyString'"
    if comment is None:
        return None
    if not isinstance(comment, (list, tuple)):
        return f"comment must be a list of str, not {type(comment).__name__}"
    if not all(isinstance(line, str) for line in comment):
        return "comment must be a list of str"
    return None
