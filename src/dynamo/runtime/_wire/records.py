"""Names and records of discovery: endpoint paths, keys, file names, addresses, records.

Owns every text and every JSON value that an instance writes into a discovery store.
Does no I/O and knows no store; stores keep bytes under keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from dynamo.runtime._sealed import override
from dynamo.runtime.errors import LocalProtocolError, RemoteProtocolError

INSTANCES = "v1/instances"
MODEL_CARDS = "v1/mdc"

MAX_INSTANCE_ID = 2**64 - 1
# A path of 65,535 bytes announces the duplex lane, so that no real one may come near.
MAX_PATH_BYTES = 4096

_PREFIX = "dyn://"
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_FILE_NAME_SAFE = frozenset(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
)


class EndpointName(NamedTuple):
    """The three names that make an endpoint path."""

    namespace: str
    component: str
    endpoint: str

    @override
    def __str__(self) -> str:
        return f"{self.namespace}/{self.component}/{self.endpoint}"


def parse_endpoint_path(path: str) -> EndpointName:
    """``"ns.comp.ep"``, with any number of leading ``dyn://``, as three names.

    Raises:
        ValueError: there are not exactly three parts.
    """
    bare = path
    while bare.startswith(_PREFIX):
        bare = bare[len(_PREFIX) :]
    parts = bare.split(".")
    if len(parts) != 3:
        raise ValueError(
            f"Invalid endpoint path '{path}'. Expected format: "
            "'namespace.component.endpoint' or "
            "'dyn://namespace.component.endpoint'"
        )
    return EndpointName(*parts)


def endpoint_prefix(name: EndpointName) -> str:
    """The relative key under which all instances of an endpoint stand, with ``/``."""
    return f"{name}/"


def instance_key(name: EndpointName, instance_id: int) -> str:
    """The relative key of one instance: ``ns/comp/ep/{hex id}``."""
    return f"{name}/{instance_id:x}"


def parse_instance_key(key: str) -> tuple[EndpointName, int] | None:
    """What `instance_key` was made from, or None where a genuine reader ignores it."""
    parts = key.split("/")
    if len(parts) != 4 or not parts[3] or not _HEX_DIGITS.issuperset(parts[3]):
        return None
    instance_id = int(parts[3], 16)
    if instance_id > MAX_INSTANCE_ID:
        return None
    return EndpointName(*parts[:3]), instance_id


def file_name_of_key(key: str) -> str:
    """A relative key as the name of one plain file."""
    return "".join(
        chr(byte) if byte in _FILE_NAME_SAFE else f"%{byte:02X}"
        for byte in key.encode("utf-8")
    )


def key_of_file_name(name: str) -> str | None:
    """The key that a file name stands for, or None if it is no valid name."""
    try:
        raw = name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a character, which Windows allows in names
        return None
    head, *escaped = raw.split(b"%")
    out = bytearray(head)
    for piece in escaped:
        digits = piece[:2].decode("latin-1")
        if len(digits) != 2 or not _HEX_DIGITS.issuperset(digits):
            return None
        out.append(int(digits, 16))
        out += piece[2:]
    try:
        return out.decode("utf-8")
    except UnicodeDecodeError:
        return None


def endpoint_wire_path(name: EndpointName, instance_id: int) -> str:
    """The path under which a worker's port knows an endpoint of one instance.

    Raises:
        LocalProtocolError: the names are too long.
    """
    names = "/".join(part.replace("%", "%25").replace("/", "%2F") for part in name)
    path = f"{instance_id:x}/{names}"
    size = len(path.encode("utf-8", "surrogatepass"))
    if size > MAX_PATH_BYTES:
        raise LocalProtocolError(
            f"the path of endpoint {name} takes {size} bytes, over the limit of "
            f"{MAX_PATH_BYTES}: use shorter names"
        )
    return path


def tcp_address(host: str, port: int, wire_path: str) -> str:
    """``host:port/path`` as it stands in a record; IPv6 in brackets."""
    bracketed = f"[{host}]" if ":" in host else host
    return f"{bracketed}:{port}/{wire_path}"


class TcpAddress(NamedTuple):
    """Where a worker listens, and the path that names the endpoint there."""

    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """``host:port`` as error texts show it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def split_host_port(text: str) -> tuple[str, int]:
    """``127.0.0.1:80`` or ``[::1]:80`` as host and port.

    Raises:
        RemoteProtocolError: it is neither.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    bare = bool(host) and "[" not in host and "]" not in host
    if not (colon and bare and port.isascii() and port.isdigit()):
        raise RemoteProtocolError(
            f"Invalid TCP address '{text}': invalid socket address syntax"
        )
    # By length first: Python refuses to read numbers of thousands of digits.
    number = int(port) if len(port) <= 5 else 65536
    if number > 65535:
        raise RemoteProtocolError(
            f"Invalid TCP address '{text}': the port is over 65535"
        )
    return host, number


def split_tcp_address(address: str) -> TcpAddress:
    """The parts of a record's ``tcp`` address.

    Raises:
        RemoteProtocolError: no ``host:port/path``.
    """
    bare = address.removeprefix("tcp://")
    authority, slash, path = bare.partition("/")
    host, port = split_host_port(authority)
    if not slash:
        raise RemoteProtocolError(
            f"Invalid TCP address '{address}': the endpoint path after '/' is missing"
        )
    return TcpAddress(host, port, path)


class EndpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What discovery says about one instance of one endpoint.

    ``lanes`` are those beyond call-home that the worker's port speaks; ``ours`` tells
    whether the worker runs this implementation.
    """

    name: EndpointName
    instance_id: int
    transport_kind: str
    address: str
    device_type: str | None = None
    codec: str = "json"
    lanes: tuple[str, ...] = ()
    ours: bool = False

    @property
    def key(self) -> str:
        return instance_key(self.name, self.instance_id)


class _Written(msgspec.Struct, kw_only=True):
    """The record's members in the order in which they are written."""

    type: Literal["Endpoint"]
    component: str
    endpoint: str
    namespace: str
    instance_id: int
    transport: dict[str, str]
    device_type: Literal["cpu", "cuda"] | None = None
    request_plane_codec: Literal["json", "msgpack"] | None = None
    dynamo_py: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Lanes(msgspec.Struct):
    v: int
    lanes: tuple[str, ...] = ()


_decode_written = msgspec.json.Decoder(_Written).decode
_decode_lanes = msgspec.json.Decoder(_Lanes).decode
_encode_json = msgspec.json.Encoder().encode

_LANES_VERSION = 1


def encode_record(record: EndpointRecord) -> bytes:
    """The bytes a store keeps for a record, as the genuine runtime writes them."""
    dynamo_py: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    if record.ours:
        lanes = _Lanes(v=_LANES_VERSION, lanes=record.lanes)
        dynamo_py = msgspec.Raw(_encode_json(lanes))
    return _encode_json(
        {
            "type": "Endpoint",
            "component": record.name.component,
            "endpoint": record.name.endpoint,
            "namespace": record.name.namespace,
            "instance_id": record.instance_id,
            "transport": {record.transport_kind: record.address},
            "device_type": record.device_type,
            "request_plane_codec": record.codec,
        }
        | ({} if dynamo_py is msgspec.UNSET else {"dynamo_py": dynamo_py})
    )


def decode_record(value: bytes) -> EndpointRecord:
    """The record that a store's value holds; unknown members are ignored.

    Raises:
        RemoteProtocolError: a genuine reader would drop it too; the text says why.
    """
    try:
        written = _decode_written(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not an endpoint record: {error}") from error
    _check_instance_id("an endpoint record", written.instance_id)
    kind, address = _only_transport(written.transport)
    lanes = _read_lanes(written.dynamo_py)
    return EndpointRecord(
        name=EndpointName(written.namespace, written.component, written.endpoint),
        instance_id=written.instance_id,
        transport_kind=kind,
        address=address,
        device_type=written.device_type,
        codec=written.request_plane_codec or "json",
        lanes=lanes or (),
        ours=lanes is not None,
    )


def _check_instance_id(what: str, instance_id: int) -> None:
    if not 0 <= instance_id <= MAX_INSTANCE_ID:
        raise RemoteProtocolError(
            f"not {what}: instance_id {instance_id} is not an unsigned 64-bit number"
        )


def _only_transport(transport: Mapping[str, str]) -> tuple[str, str]:
    kinds = list(transport.items())
    if len(kinds) != 1 or kinds[0][0] not in ("tcp", "nats_tcp"):
        raise RemoteProtocolError(
            "not an endpoint record: transport must have exactly one member, tcp or "
            f"nats_tcp, not {sorted(transport)}"
        )
    return kinds[0]


def _read_lanes(
    raw: msgspec.Raw | msgspec.UnsetType,
) -> tuple[str, ...] | None:
    """The lanes of one of our workers; () for a version that we do not know yet."""
    if raw is msgspec.UNSET:
        return None
    try:
        read = _decode_lanes(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return read.lanes if read.v == _LANES_VERSION else ()


class ModelCard(NamedTuple):
    """What waits need of a model card: whose it is, and the texts it was given."""

    name: EndpointName
    instance_id: int
    texts: dict[str, str]
    suffix: str | None
    """Names the adapter if the card describes one; None for the model itself."""


class _RuntimeConfig(msgspec.Struct):
    runtime_data: dict[str, object] | None = None


class _CardJson(msgspec.Struct):
    """Without the first six a genuine reader drops the card."""

    display_name: str
    slug: str
    kv_cache_block_size: int
    migration_limit: int
    model_type: msgspec.Raw
    model_input: msgspec.Raw
    runtime_config: _RuntimeConfig | None = None


class _WrittenCard(msgspec.Struct):
    type: Literal["Model"]
    namespace: str
    component: str
    endpoint: str
    instance_id: int
    card_json: _CardJson
    model_suffix: str | None = None


_decode_card = msgspec.json.Decoder(_WrittenCard).decode


def decode_model_card(value: bytes) -> ModelCard:
    """The card that a store's value holds; members that nobody here needs are ignored.

    Raises:
        RemoteProtocolError: a genuine reader would drop it too; the text says why.
    """
    try:
        written = _decode_card(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not a model card: {error}") from error
    _check_instance_id("a model card", written.instance_id)
    config = written.card_json.runtime_config
    data = (config and config.runtime_data) or {}
    return ModelCard(
        name=EndpointName(written.namespace, written.component, written.endpoint),
        instance_id=written.instance_id,
        texts={key: text for key, text in data.items() if isinstance(text, str)},
        suffix=written.model_suffix,
    )
