"""Bodies of requests and items, in MessagePack or JSON, and the annotated envelope.

Owns which Python values can travel and how they look in bytes.  Imports no library of
the user's: numpy and pydantic are looked up among the modules that are there already.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import enum
import inspect
import json
import math
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import NoneType
from typing import Any, ClassVar, Literal, NoReturn, Protocol, TypeAlias, Union, final

import msgspec

from dynamo.runtime._sealed import Sealed, override

# At run time too: msgspec reads the annotations.
from dynamo.runtime._wire.faults import ErrorObject  # noqa: TC001
from dynamo.runtime.errors import RemoteProtocolError

Codec = Literal["msgpack", "json"]


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


class _Model(Protocol):
    """A pydantic model."""

    def model_dump(self) -> dict[str, Any]: ...


class _Array(Protocol):
    """A numpy array, or one of its scalars."""

    def tolist(self) -> Any: ...


JsonLike: TypeAlias = Union[  # noqa: UP007 - one per line
    bool,
    int,
    float,
    str,
    bytes,
    bytearray,
    memoryview,
    datetime.datetime,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    uuid.UUID,
    enum.Enum,
    msgspec.Struct,
    Mapping[Any, object],
    Sequence[object],
    AbstractSet[object],
    _Dataclass,
    _Model,
    _Array,
    None,
]
"""A request or an item: any value that can travel.

The members of containers are ``object``, because a TypedDict, which is the usual way to
describe them, fits no narrower mapping; they are checked when the value is sent.
"""

# What the decoders raise for bytes that are not what they should be.  TypeError: a map as
# the key of a map, in older releases of msgspec.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError)

_MIN_INT = -(2**63)
_MAX_INT = 2**64 - 1
# From here on it pays to look at the value before its bytes.
_LARGE_BYTES = 4096
_SCALARS = frozenset((NoneType, bool, int, float, str, bytes))
_CONTAINERS = (dict, list, tuple, set, frozenset)
# A genuine reader gives up on lists inside lists beyond this.
_GENUINE_DEPTH = 1023
# The data of an item whose maker said that it is None: it is printed as such.
_GIVEN_NONE = object()


class _OfData(type(msgspec.Struct)):  # type: ignore[misc]
    """Makes `Annotated` out of data alone; the decoder asks nobody."""

    __signature__ = inspect.Signature(
        (inspect.Parameter("data", inspect.Parameter.POSITIONAL_OR_KEYWORD),)
    )

    def __call__(cls, data: object) -> Any:
        return super().__call__(_GIVEN_NONE if data is None else data)


def _on_the_wire(name: str) -> str:
    return name.removeprefix("_")


@final
class Annotated(
    Sealed,
    msgspec.Struct,
    metaclass=_OfData,
    rename=_on_the_wire,
    frozen=True,
    eq=False,
    gc=False,
):
    """One item of a response stream with its envelope, as it is decoded.

    Args:
        data: The payload.

    Example:
        >>> item = Annotated({"token": 5})
        >>> item.data(), item.event(), item.is_error()
        ({'token': 5}, None, False)
    """

    _data: Any = None
    _id: str | None = None
    _event: str | None = None
    _comment: list[str] | None = None
    _error: ErrorObject | None = None

    def data(self) -> Any:
        """The payload, the same object each time; None if the item has none."""
        data = self._data
        return None if data is _GIVEN_NONE else data

    def event(self) -> str | None:
        """The name of the event, or None."""
        return self._event

    def comments(self) -> list[str] | None:
        """The comments, or None."""
        return self._comment

    def id(self) -> str | None:
        """The id of the item, or None."""
        return self._id

    def is_error(self) -> bool:
        """Always False: an error is raised by the stream, never delivered."""
        return False

    def __copy__(self) -> NoReturn:
        """As for the others of its kind; a struct would be copied."""
        self.__reduce__()

    @override
    def __repr__(self) -> str:
        if self._data is None:
            data = "<no_data>"
        else:
            try:
                data = repr(self.data())
            except Exception:  # noqa: BLE001 - repr of a user's object may do anything
                data = "<failed_repr>"
        comments = json.dumps(self._comment or [], ensure_ascii=False)
        return (
            f"Annotated(data={data}, event={self._event}, "
            f"comment={comments}, id={self._id})"
        )


Envelope: TypeAlias = Union[Annotated, bytes, memoryview]  # noqa: UP007 - at run time
"""An item, or its bytes in MessagePack: it need not be decoded before it is read."""


def encode_value(value: object, codec: str) -> bytes:
    """A request or an item as bytes.

    Raises:
        TypeError: a type that cannot travel; ``unsupported type NAME``.
        OverflowError: an integer beyond 64 bits.
        UnicodeEncodeError: text with a lone surrogate.
        ValueError: nested too deeply, or containing itself.
    """
    try:
        if codec == "json":
            return _encode_json_value(value)
        encoded = _encode_msgpack(value)
        if 0xFF in encoded and _may_hold_timestamp(encoded, value):
            with contextlib.suppress(
                TypeError
            ):  # of an Ext, which no genuine peer reads
                encoded = _encode_msgpack(_to_builtins(value))
        return encoded
    except RecursionError as error:
        raise ValueError(
            "the value contains itself, or is nested more deeply than Python's recursion "
            f"limit of {sys.getrecursionlimit()} allows"
        ) from error


def encode_data(codec: str, data: object) -> bytes:
    """The envelope of an item with nothing but data: that of nearly every item.

    Raises:
        TypeError, OverflowError, UnicodeEncodeError, ValueError: as `encode_value`.
    """
    if codec == "json":
        return encode_annotated(codec, data)
    # In one go: gluing would copy the value, which may be large, into fresh memory.
    envelope = {"data": data}
    try:
        encoded = _encode_msgpack(envelope)
    except RecursionError:
        return encode_value(envelope, codec)
    if 0xFF in encoded and _may_hold_timestamp(encoded, data):
        return encode_value(envelope, codec)
    return encoded


def decode_value(data: bytes | bytearray | memoryview, codec: str) -> Any:
    """The value of a request or an input frame.

    Raises:
        RemoteProtocolError: the bytes are not in the codec.
    """
    decode = _decode_json if codec == "json" else _decode_msgpack
    try:
        return decode(data)
    except UNREADABLE as error:
        raise RemoteProtocolError(f"a value that is not {codec}: {error}") from error


def encode_annotated(
    codec: str,
    data: object = None,
    *,
    id: str | None = None,  # noqa: A002 - the name on the wire
    event: str | None = None,
    comment: list[str] | None = None,
    error: ErrorObject | None = None,
    has_data: bool = True,
) -> bytes:
    """The envelope of one item; members that are None are left out.

    Raises:
        TypeError, OverflowError, UnicodeEncodeError, ValueError: as `encode_value`.
    """
    members: dict[str, object] = {}
    if has_data:
        is_json = codec == "json"
        members["data"] = msgspec.Raw(encode_value(data, codec)) if is_json else data
    if id is not None or event is not None or comment is not None or error is not None:
        rest = {"id": id, "event": event, "comment": comment, "error": error}
        members.update((key, value) for key, value in rest.items() if value is not None)
    if codec == "json":
        return _encode_json(members)
    # In one go: gluing would copy the value, which may be large.
    return encode_value(members, codec)


def decode_annotated(data: bytes | bytearray | memoryview, codec: str) -> Annotated:
    """The item in an envelope.

    Raises:
        RemoteProtocolError: the bytes are no envelope.
    """
    try:
        return (_decode_json_item if codec == "json" else _decode_msgpack_item)(data)
    except UNREADABLE as error:
        raise RemoteProtocolError(f"an item that is not {codec}: {error}") from error


def open_annotated(item: Envelope) -> Annotated:
    """The item in it, for a reader who wants all of it; raises `UNREADABLE`."""
    return item if type(item) is Annotated else _decode_msgpack_item(item)


def open_data(item: Envelope) -> Any:
    """Its data alone, None if there is none; raises `UNREADABLE`."""
    item = item if type(item) is Annotated else _decode_msgpack_item(item)
    return item._data  # noqa: SLF001 - the path of every item


def error_in(item: Annotated) -> ErrorObject | None:
    """What the item says of an error; it is one only if its event says so, too."""
    return item._error  # noqa: SLF001 - for us, not for users


def genuine_can_decode(value: object) -> str | None:
    """Why a genuine peer could not decode this value, or None if it can.

    It knows no maps with lists or maps as keys, and has a limit of nesting; a request that
    breaks either is never answered, so that it must not be sent.
    """
    try:
        layer = _containers((value,))
        for _ in range(_GENUINE_DEPTH + 1):
            if not layer:
                return None
            layer = _next_layer(layer)
    except TypeError as error:
        return f"a genuine peer cannot read it: {error}"
    return f"a genuine peer cannot read more than {_GENUINE_DEPTH} levels of nesting"


def _next_layer(layer: list[Any]) -> list[Any]:
    """The containers directly inside those of a layer, each once.

    Without that, containers that are shared would double the work from layer to layer.

    Raises:
        TypeError: a key that a genuine peer cannot read.
    """
    inner: dict[int, object] = {}
    for container in layer:
        members = container
        if isinstance(container, dict):
            for key in _containers(container):
                raise TypeError(f"a dict key of type {type(key).__name__}")
            members = container.values()
        inner.update((id(each), each) for each in _containers(members))
    return list(inner.values())


def _containers(values: Iterable[Any]) -> list[Any]:
    """Those of the values that hold others; for a flat list almost free."""
    if _SCALARS.issuperset(map(type, values)):
        return []
    found = []
    for value in values:
        known = type(value) in _SCALARS or isinstance(value, _CONTAINERS)
        plain = value if known else _to_builtins(value)
        if isinstance(plain, _CONTAINERS):
            found.append(plain)
    return found


def _as_builtin(value: Any) -> object:
    """What stands for a value that msgspec does not know; its ``enc_hook``."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, bytes):
        return bytes.__getitem__(value, slice(None))
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    return _as_builtin_of_libraries(value)


def _as_builtin_of_libraries(value: Any) -> object:
    if _is_a(value, "numpy", "ndarray"):
        return value.tolist()
    if _is_a(value, "numpy", "generic"):
        return _plain_scalar(value)
    if _is_a(value, "pydantic.main", "BaseModel"):
        return value.model_dump()
    raise _unsupported(value)


def _plain_scalar(value: Any) -> object:
    item = value.item()
    if type(item) is type(value):  # a long double is its own item
        raise _unsupported(value)
    return item


def _unsupported(value: object) -> TypeError:
    return TypeError(f"unsupported type {type(value).__name__}")


def _is_a(value: object, module: str, name: str) -> bool:
    """Whether it is of a class in a module that the program may have imported."""
    return isinstance(value, getattr(sys.modules.get(module), name, ()))


def _to_builtins(value: object) -> Any:
    """The value made of builtin containers and scalars, with times as ISO text."""
    return msgspec.to_builtins(
        value, builtin_types=(bytes, bytearray, memoryview), enc_hook=_as_builtin
    )


def _may_hold_timestamp(encoded: bytes, value: object) -> bool:
    """True if an aware datetime may be inside: msgspec writes those as an extension.

    Looks for the three lengths of the extension type -1.  Other values may contain these
    bytes; unless they plainly cannot be one, they are merely encoded twice.
    """
    if len(encoded) >= _LARGE_BYTES and _is_plain(value):
        return False
    return (
        b"\xd7\xff" in encoded or b"\xd6\xff" in encoded or b"\xc7\x0c\xff" in encoded
    )


def _is_plain(value: object) -> bool:
    """Whether it plainly holds no datetime: scalars in dicts, however they are nested."""
    while isinstance(value, dict):
        if not _SCALARS.issuperset(map(type, value)):
            return False
        inner = [one for one in value.values() if type(one) not in _SCALARS]
        if len(inner) != 1:
            return not inner
        (value,) = inner
    return type(value) in _SCALARS


def _encode_json_value(value: object) -> bytes:
    return _encode_json(_json_form(_to_builtins(value)))


def _json_form(value: Any) -> Any:
    """Builtins as the genuine runtime puts them in JSON."""
    if isinstance(value, dict):
        return {_json_key(key): _json_form(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_form(member) for member in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return list(bytes(value))
    if isinstance(value, float):
        return msgspec.Raw(_json_float(value)) if math.isfinite(value) else None
    if isinstance(value, int):
        return _in_64_bits(value)
    return value


def _json_key(key: object) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, bool):
        return "true" if key else "false"
    if isinstance(key, int):
        return str(_in_64_bits(key))
    if isinstance(key, float) and math.isfinite(key):
        return _json_float(key).decode()
    raise TypeError("key must be a string")


def _json_float(value: float) -> bytes:
    """Like msgspec's, but large exponents have their sign as the genuine runtime's have."""
    text = _encode_json(value)
    return text if b"e-" in text else text.replace(b"e", b"e+")


def _in_64_bits(value: int) -> int:
    if _MIN_INT <= value <= _MAX_INT:
        return value
    raise OverflowError("can't serialize ints < -2**63 or > 2**64 - 1")


_encode_msgpack = msgspec.msgpack.Encoder(enc_hook=_as_builtin).encode
_encode_json = msgspec.json.Encoder().encode
_decode_msgpack = msgspec.msgpack.Decoder().decode
_decode_json = msgspec.json.Decoder().decode
_decode_msgpack_item = msgspec.msgpack.Decoder(Annotated).decode
_decode_json_item = msgspec.json.Decoder(Annotated).decode
