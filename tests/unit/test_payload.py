"""Values and annotated items: what travels, what does not, what a genuine peer reads."""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import itertools
import math
import pathlib
import subprocess
import sys
import tracemalloc
import types
import uuid
from typing import Any

import msgspec
import numpy as np
import pydantic
import pytest
from envelopes import received, seen
from hypothesis import given
from hypothesis import strategies as st

from dynamo.runtime._wire import payload
from dynamo.runtime._wire.faults import ErrorObject
from dynamo.runtime._wire.payload import (
    decode_annotated,
    decode_value,
    encode_annotated,
    encode_value,
    genuine_can_decode,
)
from dynamo.runtime.errors import RemoteProtocolError

UTC = datetime.timezone.utc
NOON = datetime.datetime(2020, 1, 2, 12, tzinfo=UTC)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
msgpack_values = st.recursive(
    scalars | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(scalars | st.binary(), inner),
    max_leaves=20,
)
json_values = st.recursive(
    scalars.filter(lambda value: not (isinstance(value, float) and math.isinf(value))),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=20,
)


class Text(str):  # noqa: SLOT000 - as users write them
    def __str__(self) -> str:
        return "overridden"


class Key(str):
    __slots__ = ()


class Number(int):
    pass


class Real(float):
    pass


class Raw(bytes):
    pass


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Name(str, enum.Enum):
    A = "a"


@dataclasses.dataclass
class Point:
    x: int
    when: Any = None


class Record(msgspec.Struct):
    x: int


class Model(pydantic.BaseModel):
    x: int
    tags: set[str] = set()


def sent(value: object, codec: str = "msgpack") -> Any:
    return decode_value(encode_value(value, codec), codec)


@given(msgpack_values)
def test_msgpack_round_trip(value: object) -> None:
    assert sent(value) == value


@given(json_values)
def test_json_round_trip(value: object) -> None:
    assert sent(value, "json") == value


# Both codecs see the same plain values, but for bytes and keys.
CONVERTED = [
    (Text("a"), "a"),
    (Number(5), 5),
    (Real(1.5), 1.5),
    ([Text("a"), {Key("k"): Number(1)}], ["a", {"k": 1}]),
    (Colour.RED, "red"),
    (Level.HIGH, 3),
    (Name.A, "a"),
    (collections.deque([1, 2]), [1, 2]),
    (range(3), [0, 1, 2]),
    (array.array("i", [1, 2]), [1, 2]),
    (collections.UserList([1]), [1]),
    (collections.UserDict(a=1), {"a": 1}),
    (types.MappingProxyType({"a": 1}), {"a": 1}),
    (collections.ChainMap({"a": 1}, {"b": 2}), {"a": 1, "b": 2}),
    (collections.Counter("aab"), {"a": 2, "b": 1}),
    (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    (collections.defaultdict(int, a=1), {"a": 1}),
    (collections.namedtuple("P", "x y")(1, 2), [1, 2]),  # noqa: PYI024
    ({1}, [1]),
    (frozenset([1]), [1]),
    (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
    (np.float64(0.5), 0.5),
    (np.float32(0.5), 0.5),
    (np.int64(-3), -3),
    (np.bool_(True), True),
    (np.str_("s"), "s"),
    (Point(1), {"x": 1, "when": None}),
    (Record(1), {"x": 1}),
    (Model(x=1, tags={"t"}), {"x": 1, "tags": ["t"]}),
    (decimal.Decimal("1.5"), "1.5"),
    (uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005"),
    (datetime.datetime(2020, 1, 2), "2020-01-02T00:00:00"),  # noqa: DTZ001
    (datetime.date(2020, 1, 2), "2020-01-02"),
    (NOON, "2020-01-02T12:00:00Z"),
    ({"t": [NOON]}, {"t": ["2020-01-02T12:00:00Z"]}),
    (Point(1, NOON), {"x": 1, "when": "2020-01-02T12:00:00Z"}),
]


@pytest.mark.parametrize("codec", ["msgpack", "json"])
@pytest.mark.parametrize(("value", "arrives"), CONVERTED)
def test_value_arrives_as(value: object, arrives: object, codec: str) -> None:
    got = sent(value, codec)
    assert got == arrives
    assert type(got) is type(arrives)


@pytest.mark.parametrize(
    "value",
    [b"ab", Raw(b"ab"), bytearray(b"ab"), memoryview(b"ab"), np.bytes_(b"ab")],
    ids=lambda value: type(value).__name__,
)
def test_bytes_arrive_as_bytes_or_as_numbers(value: object) -> None:
    assert sent([value]) == [b"ab"]
    assert sent([value], "json") == [[97, 98]]


class Sized:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, at: int) -> int:
        return [5][at]


UNSUPPORTED = [
    ((each for each in [1]), "generator"),
    ({"a": 1}.keys(), "dict_keys"),
    (Sized(), "Sized"),
    (1j, "complex"),
    (np.complex128(1j), "complex"),
    (np.longdouble(1), "longdouble"),
    (fractions.Fraction(1, 2), "Fraction"),
    (pathlib.PurePosixPath("/x"), "PurePosixPath"),
    (int, "type"),
    (len, "builtin_function_or_method"),
    (..., "ellipsis"),
    (ValueError("x"), "ValueError"),
    (object(), "object"),
]


@pytest.mark.parametrize("codec", ["msgpack", "json"])
@pytest.mark.parametrize(("value", "name"), UNSUPPORTED)
def test_unsupported_type_is_named(value: object, name: str, codec: str) -> None:
    with pytest.raises(TypeError, match=f"^unsupported type {name}$"):
        encode_value({"deep": [value]}, codec)


@pytest.mark.parametrize("codec", ["msgpack", "json"])
@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, Number(2**64)])
def test_integer_beyond_64_bits_is_refused(value: int, codec: str) -> None:
    assert sent([2**64 - 1, -(2**63)], codec) == [2**64 - 1, -(2**63)]
    for holder in (value, [value]):
        with pytest.raises(OverflowError):
            encode_value(holder, codec)


def test_integer_key_beyond_64_bits_is_refused_in_json() -> None:
    with pytest.raises(OverflowError):
        encode_value({2**64: 1}, "json")


@pytest.mark.parametrize("codec", ["msgpack", "json"])
@pytest.mark.parametrize("value", ["a\ud800", {"\udfff": 1}, [Text("\ud800")]])
def test_lone_surrogate_is_refused(value: object, codec: str) -> None:
    with pytest.raises(UnicodeEncodeError):
        encode_value(value, codec)


def nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("codec", ["msgpack", "json"])
def test_deep_and_cyclic_values_are_refused(codec: str) -> None:
    ring: list[Any] = []
    ring.append(ring)
    wrapped = collections.UserList([])
    wrapped.append(wrapped)
    assert sent(nested(100), codec) == nested(100)
    for value in (nested(20_000), ring, wrapped):
        with pytest.raises(ValueError, match="contains itself, or is nested"):
            encode_value(value, codec)


# Values whose bytes hold what looks like a timestamp although nothing is one.
LOOK_ALIKES = [b"\xd6\xff", b"\xd7\xff1", b"\xc7\x0c\xff", {b"\xd7\xff": {1: b"\xff"}}]


@pytest.mark.parametrize("value", LOOK_ALIKES, ids=repr)
def test_bytes_that_look_like_a_timestamp_stay_bytes(value: object) -> None:
    assert sent({"a": value, 1: -1, None: 1.5}) == {"a": value, 1: -1, None: 1.5}


LARGE = b"\xd7\xff\xd6\xff" * 2000


@pytest.mark.parametrize("value", [LARGE, {"a": {"b": LARGE, "c": 1}}])
def test_a_large_plain_look_alike_is_not_encoded_twice(
    value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(payload, "_to_builtins")
    assert sent(value) == value
    with pytest.raises(NameError):
        sent([value])


@pytest.mark.parametrize("value", ["x" * 4_000_000, {"a": b"\xd7\xff" * 2_000_000}])
def test_a_large_item_is_encoded_into_one_piece_of_memory(value: object) -> None:
    """Fresh memory is what large bodies cost; the encoder takes half as much again."""
    tracemalloc.start()
    try:
        encoded = payload.encode_data("msgpack", value)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.8 * len(encoded)


@pytest.mark.parametrize(
    "around",
    [
        lambda time: {"a": {"b": LARGE, "t": time}},
        lambda time: {"l": LARGE, "a": {"b": {"c": time}}},
        lambda time: {"l": LARGE, "a": {"b": {time: 1}}},
        lambda time: {"a": [LARGE, {"t": time}]},
        lambda time: {"l": LARGE, "a": {"b": 1}, "c": {"t": time}},
        lambda time: {time: LARGE},
    ],
)
def test_time_inside_what_is_nearly_plain_travels_as_text(around: Any) -> None:
    assert sent(around(NOON)) == around("2020-01-02T12:00:00Z")


@given(msgpack_values)
def test_time_beside_anything_travels_as_text(value: object) -> None:
    assert sent([value, NOON]) == [value, "2020-01-02T12:00:00Z"]


@pytest.mark.parametrize(
    "when",
    [
        NOON,
        NOON.replace(microsecond=1),
        NOON.replace(year=1900),
        NOON.replace(year=2600),
        NOON.replace(year=2600, microsecond=1),
    ],
    ids=str,
)
def test_time_of_every_wire_length_travels_as_text(when: datetime.datetime) -> None:
    assert sent(when) == when.isoformat().replace("+00:00", "Z")
    assert sent({when: 1}) == {when.isoformat().replace("+00:00", "Z"): 1}


def test_keys_stay_what_they_are_in_msgpack() -> None:
    value = {1: "a", "1": "b", None: 2, 1.5: 3, b"k": 4, (1, (2,)): 5}
    assert sent(value) == value
    assert sent({Number(2): 1, np.int64(3): 1}) == {2: 1, 3: 1}


def test_keys_become_text_in_json() -> None:
    value = {True: 1, False: 0, 1.5: 3, 1e16: 4, Number(7): 5, "é": 6}
    assert encode_value(value, "json").decode() == (
        '{"true":1,"false":0,"1.5":3,"1e+16":4,"7":5,"é":6}'
    )


@pytest.mark.parametrize("key", [None, b"k", (1, 2), math.nan, math.inf])
def test_other_keys_are_refused_in_json(key: object) -> None:
    with pytest.raises(TypeError, match=r"^key must be a string$"):
        encode_value({key: 1}, "json")


def test_numbers_without_json_form_become_null() -> None:
    assert encode_value([math.nan, math.inf, -math.inf], "json") == b"[null,null,null]"


@pytest.mark.parametrize(
    ("codec", "raw"),
    [
        ("msgpack", b""),
        ("msgpack", b"\xc1"),
        ("msgpack", b"\xc0\xc0"),
        ("msgpack", b"\xa2a"),
        ("msgpack", b"\xa1\xff"),
        ("msgpack", b"\x81\x81\x01\x02\x03"),
        ("msgpack", b"\xd7\xff" + b"\xff" * 8),
        ("msgpack", b"\xdd\xff\xff\xff\xff"),
        ("msgpack", b"\x91" * 100_000),
        ("json", b""),
        ("json", b"\xff"),
        ("json", b"nul"),
        ("json", b"NaN"),
        ("json", b"1 2"),
        ("json", b'"\xff"'),
        ("json", b"[" * 100_000),
    ],
)
def test_unreadable_value_is_an_error_of_the_peer(codec: str, raw: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match=f"not {codec}"):
        decode_value(raw, codec)


@given(st.binary(max_size=40), st.sampled_from(["msgpack", "json"]))
def test_any_bytes_are_a_value_or_a_protocol_error(raw: bytes, codec: str) -> None:
    for decode in (decode_value, decode_annotated):
        with contextlib.suppress(RemoteProtocolError):
            decode(raw, codec)


def test_extension_types_are_read() -> None:
    assert decode_value(b"\xd4\x05x", "msgpack") == msgspec.msgpack.Ext(5, b"x")
    assert decode_value(memoryview(b"\xd6\xff\0\0\0\0"), "msgpack") == (
        datetime.datetime(1970, 1, 1, tzinfo=UTC)
    )


ENVELOPES = [
    {"data": {"data": 1, "event": "x"}},
    {"data": None},
    {"data": [1], "id": "i", "event": "e", "comment": ["a", "b"]},
    {"has_data": False, "event": "note"},
    {"has_data": False},
    {
        "has_data": False,
        "event": "error",
        "error": ErrorObject("Unknown", "Internal", "runtime.internal", "m", "m"),
    },
]


@pytest.mark.parametrize("codec", ["msgpack", "json"])
@pytest.mark.parametrize("members", ENVELOPES, ids=repr)
def test_envelope_round_trip(members: dict[str, Any], codec: str) -> None:
    raw = encode_annotated(codec, **members)
    expected = {key: each for key, each in members.items() if key != "has_data"}
    names = ("data", "id", "event", "comment", "error")
    wanted = tuple(expected.get(name) for name in names)
    assert seen(decode_annotated(raw, codec)) == wanted
    assert list(decode_value(raw, codec)) == list(expected)


@pytest.mark.parametrize("codec", ["msgpack", "json"])
def test_envelope_needs_its_types(codec: str) -> None:
    raw = encode_value({"data": 1, "later": 2}, codec)
    assert seen(decode_annotated(raw, codec)) == seen(received(1))
    with pytest.raises(RemoteProtocolError, match="an item that is not"):
        decode_annotated(encode_value({"id": 1}, codec), codec)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, "a", b"b", 1.5, True, None],
        {"a": {1: 2, None: 3, 1.5: 4, b"b": 5, False: {}}},
        [[]] * 1000,
        {Colour.RED: 1, Text("t"): Number(1), NOON: 1, uuid.UUID(int=1): 2},
        nested(1023),
        collections.UserDict(a=collections.UserList([1])),
        np.zeros((2, 2)),
        bytearray(b"x"),
        Point(1, NOON),
    ],
)
def test_genuine_peer_can_decode(value: object) -> None:
    assert genuine_can_decode(value) is None


Pair = collections.namedtuple("Pair", "a b")  # noqa: PYI024


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({(1, 2): 3}, "a dict key of type tuple"),
        ([{"a": [{frozenset([1]): 1}]}], "a dict key of type"),
        ({Pair(1, 2): 3}, "a dict key of type Pair"),
        (collections.UserDict({(): 1}), "a dict key of type tuple"),
        (Point(1, {(1,): 1}), "a dict key of type tuple"),
        (nested(1024), "more than 1023 levels"),
        (msgspec.msgpack.Ext(5, b"x"), "unsupported type Ext"),
    ],
)
def test_genuine_peer_cannot_decode(value: object, reason: str) -> None:
    told = genuine_can_decode(value)
    assert told is not None
    assert reason in told


def test_shared_containers_do_not_multiply_the_work() -> None:
    value: list[Any] = []
    for _ in range(200):
        value = [value, value]
    assert genuine_can_decode(value) is None
    ring: list[Any] = []
    ring += [ring, ring]
    assert "levels" in str(genuine_can_decode(ring))


def test_libraries_of_the_user_are_not_imported() -> None:
    program = (
        "import sys; from dynamo.runtime._wire import payload\n"
        "payload.encode_value(range(3), 'msgpack')\n"
        "try: payload.encode_value(object(), 'json')\n"
        "except TypeError: print([m for m in ('numpy', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.strip() == b"[]"


@pytest.mark.parametrize("codec", ["msgpack", "json"])
def test_values_of_every_length_form(codec: str) -> None:
    for size in itertools.chain(range(40), (255, 256, 65535, 65536)):
        assert sent("x" * size, codec) == "x" * size
        assert sent([0] * size, codec) == [0] * size


@pytest.mark.parametrize("data", [b"ab", b"\xd7\xff", b"\xd6\xff", b"\xc7\x0c\xff"])
def test_extension_travels_whatever_its_bytes_look_like(data: bytes) -> None:
    value = [msgspec.msgpack.Ext(5, data)]
    assert decode_value(encode_value(value, "msgpack"), "msgpack") == value
