"""What a yielded value becomes on the wire."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from envelopes import received

from dynamo.runtime._calls.items import ItemError, encode_item
from dynamo.runtime._wire.payload import Annotated

CODECS = ("msgpack", "json")


def decode(codec: str, raw: bytes) -> Any:
    return msgspec.msgpack.decode(raw) if codec == "msgpack" else json.loads(raw)


class Marked(dict):
    pass


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (5, {"data": 5}),
        ({"data": 1, "event": "error"}, {"data": {"data": 1, "event": "error"}}),
        ({"_dynamo_annotated": False, "data": 1}, None),
        ({"_dynamo_annotated": True, "data": 1, "other": 2}, {"data": 1}),
        (Marked(_dynamo_annotated=1, data=1), {"data": 1}),
        (
            {
                "_dynamo_annotated": True,
                "id": "i",
                "event": "e",
                "comment": ("a", "b"),
                "error": {"message": "ignored"},
            },
            {"id": "i", "event": "e", "comment": ["a", "b"]},
        ),
        ({"_dynamo_annotated": True}, {}),
        (Annotated({"x": 1}), {"data": {"x": 1}}),
        (
            received(event="e", id="i", comment=["c"]),
            {"id": "i", "event": "e", "comment": ["c"]},
        ),
    ],
)
def test_values_envelopes_and_received_items(codec: str, value: Any, expected: Any):
    if expected is None:
        expected = {"data": value}
    sent = decode(codec, encode_item(codec, value))
    assert {key: part for key, part in sent.items() if part is not None} == expected


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"event": 5}, "'int' object cannot be converted to 'PyString'"),
        ({"id": b"x"}, "'bytes' object cannot be converted to 'PyString'"),
        ({"comment": "text"}, "comment must be a list of str, not str"),
        ({"comment": [1]}, "comment must be a list of str"),
    ],
)
def test_invalid_envelopes_end_the_stream(
    codec: str, fields: dict[str, Any], words: str
):
    with pytest.raises(ItemError) as caught:
        encode_item(codec, {"_dynamo_annotated": True, "data": 1, **fields})
    assert caught.value.error.error_class == "Internal"
    assert caught.value.error.words.startswith("critical error: invalid response")
    assert caught.value.error.words.endswith(words)


@pytest.mark.parametrize(
    ("fields", "error_class", "words"),
    [
        ({"comment": ["a", "b"]}, "Internal", "a, b"),
        ({}, "Internal", "unknown error"),
        ({"error": {"message": "m"}, "comment": ["c"]}, "Internal", "m"),
        ({"error": {"message": "m", "class": "NotFound"}}, "NotFound", "m"),
        ({"error": {"message": 5, "class": "Odd"}}, "Internal", "unknown error"),
        ({"error": "text"}, "Internal", "unknown error"),
    ],
)
def test_an_envelope_can_spell_out_an_error(
    fields: dict[str, Any], error_class: str, words: str
):
    with pytest.raises(ItemError, match=words) as caught:
        encode_item(
            "msgpack",
            {"_dynamo_annotated": True, "event": "error", "data": 1, **fields},
        )
    assert caught.value.error.error_class == error_class


def cycle() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


class Refuses:
    def __bool__(self) -> bool:
        raise ValueError("no truth in this")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "value",
    [
        object(),
        2**64,
        "\ud800",
        {"_dynamo_annotated": True, "data": object()},
        {"_dynamo_annotated": Refuses(), "data": 1},
        Annotated(object()),
        cycle(),
        {"_dynamo_annotated": True, "data": cycle()},
    ],
)
def test_what_cannot_be_sent_says_so(codec: str, value: Any):
    if codec == "json" and value == 2**64:
        value = 1j
    with pytest.raises(ItemError) as caught:
        encode_item(codec, value)
    text = caught.value.error.words
    assert text.startswith(
        f"critical error: failed serializing Python response as {codec}"
    )
    assert caught.value.__cause__ is not None
