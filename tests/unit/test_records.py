"""Names and records of discovery, beyond what the golden vectors show."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.runtime._wire import records
from dynamo.runtime._wire.records import EndpointName, EndpointRecord, TcpAddress
from dynamo.runtime.errors import LocalProtocolError, RemoteProtocolError

NAME = EndpointName("ns", "comp", "gen")
text = st.text(st.characters(exclude_categories=["Cs"]))


def ours(**changes: Any) -> EndpointRecord:
    facts: dict[str, Any] = {
        "name": NAME,
        "instance_id": 7,
        "transport_kind": "tcp",
        "address": "127.0.0.1:1/7/ns/comp/gen",
        "device_type": "cpu",
        "codec": "msgpack",
        "lanes": ("duplex",),
        "ours": True,
    }
    return EndpointRecord(**facts | changes)


def written(**changes: Any) -> bytes:
    return json.dumps(json.loads(records.encode_record(ours())) | changes).encode()


def test_our_record_round_trip_stays_small() -> None:
    raw = records.encode_record(ours())
    assert records.decode_record(raw) == ours()
    assert len(raw) < 400


def test_genuine_record_has_no_lanes() -> None:
    raw = records.encode_record(ours(ours=False, lanes=()))
    assert b"dynamo_py" not in raw
    assert records.decode_record(raw) == ours(ours=False, lanes=())


@pytest.mark.parametrize(
    ("member", "lanes", "is_ours"),
    [
        ({"v": 1}, (), True),
        ({"v": 1, "lanes": ["duplex", "later"], "more": 1}, ("duplex", "later"), True),
        ({"v": 2, "lanes": ["duplex"]}, (), True),
        ({"v": "1"}, (), False),
        ({}, (), False),
        (5, (), False),
        (None, (), False),
    ],
)
def test_lanes_of_other_versions_are_not_used(
    member: object, lanes: tuple[str, ...], is_ours: bool
) -> None:
    record = records.decode_record(written(dynamo_py=member))
    assert (record.lanes, record.ours) == (lanes, is_ours)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"instance_id": 2**64}, "not an unsigned 64-bit number"),
        ({"transport": {}}, "exactly one member"),
        ({"transport": {"quic": "x"}}, "exactly one member"),
        ({"transport": "tcp"}, "not an endpoint record"),
        ({"namespace": 1}, "not an endpoint record"),
    ],
)
def test_record_that_is_none_says_why(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        records.decode_record(written(**changes))


@pytest.mark.parametrize("raw", [b"", b"\xff", b"[" * 100_000, b'{"a":"\xff"}'])
def test_bytes_that_are_no_json_are_no_record(raw: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="not an endpoint record"):
        records.decode_record(raw)


def test_unreadable_lanes_do_not_hide_the_record() -> None:
    raw = written(dynamo_py="X").replace(b'"X"', b'{"v":1,"lanes":["\xff"]}')
    assert records.decode_record(raw).ours is False


def test_codec_defaults_to_json() -> None:
    content = json.loads(written())
    del content["request_plane_codec"], content["device_type"]
    record = records.decode_record(json.dumps(content).encode())
    assert (record.codec, record.device_type) == ("json", None)


@pytest.mark.parametrize(
    "key",
    [
        "ns/comp/gen",
        "ns/comp/gen/1/lora",
        "ns/comp/gen/",
        "ns/comp/gen/xyz",
        "ns/comp/gen/0x1f",
        "ns/comp/gen/+1",
        "ns/comp/gen/1_0",
        "ns/comp/gen/ 1",
        "ns/comp/gen/\u0661",
        "ns/comp/gen/10000000000000000",
    ],
)
def test_key_of_no_instance(key: str) -> None:
    assert records.parse_instance_key(key) is None


@given(st.integers(0, records.MAX_INSTANCE_ID))
def test_key_round_trip(instance_id: int) -> None:
    key = records.instance_key(NAME, instance_id)
    assert key.startswith(records.endpoint_prefix(NAME))
    assert records.parse_instance_key(key) == (NAME, instance_id)
    assert records.parse_instance_key(key.upper()) == (
        EndpointName("NS", "COMP", "GEN"),
        instance_id,
    )


@given(text)
def test_file_name_round_trip(key: str) -> None:
    name = records.file_name_of_key(key)
    assert name.isascii()
    assert "/" not in name
    assert records.key_of_file_name(name) == key


@pytest.mark.parametrize(
    "name",
    ["%", "a%2", "a%2gb", "%+1", "% 1", "%_1", "%FF", "\udcff", "x\ud800", "%1é"],
)
def test_file_name_of_no_key(name: str) -> None:
    assert records.key_of_file_name(name) is None


def test_path_over_the_limit_is_refused() -> None:
    longest = "e" * (records.MAX_PATH_BYTES - len("7/a/b/"))
    path = records.endpoint_wire_path(EndpointName("a", "b", longest), 7)
    assert len(path) == records.MAX_PATH_BYTES
    with pytest.raises(LocalProtocolError, match="4097 bytes, over the limit of 4096"):
        records.endpoint_wire_path(EndpointName("a", "b", longest + "e"), 7)


@pytest.mark.parametrize(
    ("address", "expected", "authority"),
    [
        ("127.0.0.1:80/p/q", TcpAddress("127.0.0.1", 80, "p/q"), "127.0.0.1:80"),
        ("tcp://[::1]:80/p", TcpAddress("::1", 80, "p"), "[::1]:80"),
        ("h:65535/", TcpAddress("h", 65535, ""), "h:65535"),
        ("h:0/a//b?c", TcpAddress("h", 0, "a//b?c"), "h:0"),
    ],
)
def test_address_is_split(address: str, expected: TcpAddress, authority: str) -> None:
    assert records.split_tcp_address(address) == expected
    assert expected.authority == authority
    assert records.tcp_address(*expected) == address.removeprefix("tcp://")


@pytest.mark.parametrize(
    "address",
    [
        "",
        "h/p",
        ":80/p",
        "h:/p",
        "::1:80/p",
        "[]:80/p",
        "[[::1]]:80/p",
        "[h:80/p",
        "h]:80/p",
        "h:8a/p",
        "h:-1/p",
        "h:\u0661/p",
        "h:65536/p",
        f"h:{'0' * 5000}80/p",
        "h:80",
    ],
)
def test_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(RemoteProtocolError, match="Invalid TCP address"):
        records.split_tcp_address(address)
