"""Settings: what each variable means, and what is said when its value is no good."""

from __future__ import annotations

import dataclasses
import math
import socket
from pathlib import Path

import pytest

from dynamo.runtime import _config
from dynamo.runtime._config import (
    RuntimeConfig,
    advertised_host,
    chosen_backend,
    chosen_plane,
    from_env,
)

MIB = 1024 * 1024
HUGE = "9" * 5000


def named(**env: str) -> RuntimeConfig:
    """The settings of a runtime that names its backend."""
    return from_env(env, "file", "tcp")


def embedded(**env: str) -> RuntimeConfig:
    """The settings of a runtime for which nothing was named."""
    return from_env(env)


# -------------------------------------------------------------------- plain variables

NUMBERS = [
    # variable, attribute, default, a good text, its value
    ("DYN_TCP_RPC_PORT", "rpc_port", 0, "65535", 65535),
    ("DYN_TCP_RESPONSE_STREAM_PORT", "response_port", 0, "1", 1),
    ("DYN_TCP_LISTEN_BACKLOG", "listen_backlog", 4096, "1", 1),
    ("DYN_TCP_MAX_MESSAGE_SIZE", "max_message_bytes", 32 * MIB, "1024", 1024),
    ("DYN_TCP_POOL_SIZE", "pool_size", 100, "3", 3),
    ("DYN_TCP_CHANNEL_BUFFER", "channel_buffer", 1024, "1", 1),
    ("DYN_TCP_GLOBAL_CONNECT_LIMIT", "global_connect_limit", 64, " 2 ", 2),
    ("DYN_TCP_WORKER_POOL_SIZE", "worker_pool_size", 10_000, "1", 1),
    ("DYN_TCP_WORK_QUEUE_SIZE", "work_queue_size", 40_000, "7", 7),
    ("DYN_RUNTIME_DUPLEX_CONNECTIONS", "duplex_connections", 1, "4", 4),
    ("DYN_RUNTIME_EJECTION_FAILURES", "ejection_failures", 3, "0", 0),
]
SECONDS = [
    ("DYN_TCP_REQUEST_TIMEOUT", "request_timeout_s", 5.0, "2", 2.0),
    ("DYN_TCP_CONNECT_TIMEOUT", "connect_timeout_s", 5.0, "0.25", 0.25),
    ("DYN_TCP_HOST_IDLE_TTL_SECS", "host_idle_ttl_s", 300.0, "0", 0.0),
    ("DYN_RUNTIME_INHIBITED_DURATION_SECS", "inhibited_s", 5.0, "0", 0.0),
    ("DYN_RUNTIME_EJECTION_SECS", "ejection_first_s", 0.1, "2.5", 2.5),
    ("DYN_RUNTIME_EJECTION_MAX_SECS", "ejection_max_s", 10.0, "60", 60.0),
    (
        "DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",
        "drain_timeout_s",
        25.0,
        "1e2",
        100.0,
    ),
    ("DYN_RUNTIME_BLOCKED_LOOP_SECS", "blocked_loop_s", 1.0, "0", 0.0),
    ("DYN_RUNTIME_CANCEL_GRACE_SECS", "cancel_grace_s", 5.0, "0", 0.0),
    ("DYN_RUNTIME_PING_INTERVAL_SECS", "ping_interval_s", 20.0, "0.5", 0.5),
    ("DYN_RUNTIME_PING_TIMEOUT_SECS", "ping_timeout_s", 60.0, "40", 40.0),
    ("DYN_RUNTIME_CALL_TIMEOUT_SECS", "call_timeout_s", math.inf, "60", 60.0),
    (
        "DYN_RUNTIME_FIRST_ITEM_TIMEOUT_SECS",
        "first_item_timeout_s",
        math.inf,
        "0.5",
        0.5,
    ),
    ("DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS", "idle_timeout_s", math.inf, "1", 1.0),
]


def test_no_seconds_are_no_limit() -> None:
    assert named(DYN_RUNTIME_CALL_TIMEOUT_SECS="0") == named()


@pytest.mark.parametrize(
    ("variable", "attribute", "default", "text", "value"), NUMBERS + SECONDS
)
def test_a_variable_sets_its_value_and_only_that(
    variable: str, attribute: str, default: float, text: str, value: float
) -> None:
    plain = named()
    assert getattr(plain, attribute) == default
    assert getattr(named(**{variable: ""}), attribute) == default
    assert named(**{variable: text}) == dataclasses.replace(plain, **{attribute: value})


@pytest.mark.parametrize(
    ("variable", "limits"),
    [
        ("DYN_TCP_RPC_PORT", "from 0 to 65535"),
        ("DYN_TCP_RESPONSE_STREAM_PORT", "from 0 to 65535"),
        ("DYN_TCP_LISTEN_BACKLOG", "from 1 to"),
        ("DYN_TCP_MAX_MESSAGE_SIZE", "from 1024 to 4294967295"),
        ("DYN_TCP_POOL_SIZE", "from 1 to"),
        ("DYN_TCP_CHANNEL_BUFFER", "from 1 to"),
        ("DYN_TCP_GLOBAL_CONNECT_LIMIT", "from 1 to"),
        ("DYN_TCP_WORKER_POOL_SIZE", "from 1 to"),
        ("DYN_TCP_WORK_QUEUE_SIZE", "from 1 to"),
        ("DYN_RUNTIME_DUPLEX_CONNECTIONS", "from 1 to 1024"),
    ],
)
@pytest.mark.parametrize("text", ["-1", "ten", "1.5", "1_000", "٣", HUGE])
def test_a_bad_number_is_an_error_that_says_what_is_allowed(
    variable: str, limits: str, text: str
) -> None:
    with pytest.raises(ValueError, match=r"expected a whole number") as caught:
        named(**{variable: text})
    assert str(caught.value).startswith(f"{variable}='{text[:20]}")
    assert limits in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("DYN_TCP_RPC_PORT", "65536"),
        ("DYN_TCP_POOL_SIZE", "0"),
        ("DYN_TCP_WORK_QUEUE_SIZE", "0"),
        ("DYN_TCP_MAX_MESSAGE_SIZE", "1023"),
        ("DYN_TCP_MAX_MESSAGE_SIZE", "4294967296"),
        ("DYN_RUNTIME_DUPLEX_CONNECTIONS", "0"),
        ("DYN_RUNTIME_DUPLEX_CONNECTIONS", "1025"),
    ],
)
def test_a_number_just_outside_its_limits_is_refused(variable: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"{variable}='{text}'"):
        named(**{variable: text})


@pytest.mark.parametrize("variable", [row[0] for row in SECONDS])
@pytest.mark.parametrize("text", ["-1", "soon", "nan", "inf", "1_000", "٣"])
def test_a_bad_time_is_an_error_that_says_what_is_allowed(
    variable: str, text: str
) -> None:
    with pytest.raises(ValueError, match="expected a number of seconds") as caught:
        named(**{variable: text})
    assert str(caught.value).startswith(f"{variable}={text!r}: ")


@pytest.mark.parametrize(
    "variable", ["DYN_TCP_REQUEST_TIMEOUT", "DYN_TCP_CONNECT_TIMEOUT"]
)
def test_a_limit_of_no_time_at_all_is_refused(variable: str) -> None:
    with pytest.raises(ValueError, match=f"{variable}='0'.* at least 0.001"):
        named(**{variable: "0"})


def test_a_peer_may_be_silent_for_two_pings_at_least() -> None:
    """With less, a healthy peer would be dead before it was asked."""
    interval, limit = "DYN_RUNTIME_PING_INTERVAL_SECS", "DYN_RUNTIME_PING_TIMEOUT_SECS"
    assert named(**{interval: "5", limit: "10"}).ping_timeout_s == 10.0
    with pytest.raises(ValueError, match=f"{limit}='9.9'.* seconds, at least 10$"):
        named(**{interval: "5", limit: "9.9"})
    assert named(**{interval: "5"}).ping_timeout_s == 60.0
    assert named(**{interval: "30"}).ping_timeout_s == 90.0
    with pytest.raises(ValueError, match=f"{interval}='0'.* at least 0.01"):
        named(**{interval: "0"})


def test_the_codec_is_msgpack_unless_json_is_asked_for() -> None:
    assert named().codec == "msgpack"
    assert named(DYN_REQUEST_PLANE_CODEC="json").codec == "json"
    with pytest.raises(
        ValueError, match=r"DYN_REQUEST_PLANE_CODEC='JSON': .*'msgpack'"
    ):
        named(DYN_REQUEST_PLANE_CODEC="JSON")


@pytest.mark.parametrize(
    ("text", "port"),
    [(None, None), ("", None), ("-1", None), ("-7", None), ("0", 0), ("8081", 8081)],
)
def test_the_status_port_is_off_unless_a_port_is_named(
    text: str | None, port: int | None
) -> None:
    env = {} if text is None else {"DYN_SYSTEM_PORT": text}
    assert from_env(env, "file").status_port == port


@pytest.mark.parametrize("text", ["65536", "http", "-", "--1"])
def test_a_bad_status_port_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=f"DYN_SYSTEM_PORT='{text}'.*whole number"):
        named(DYN_SYSTEM_PORT=text)


# --------------------------------------------------------------------------- admission


@pytest.mark.parametrize(
    ("env", "running", "waiting"),
    [
        ({}, 10_000, 40_000),
        ({"DYN_ENGINE_REQUEST_LIMIT": "4"}, 4, 15),
        ({"DYN_ENGINE_REQUEST_LIMIT": "0"}, 1, 15),
        (
            {"DYN_ENGINE_REQUEST_LIMIT": "4", "DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "8"},
            4,
            7,
        ),
        (
            {"DYN_ENGINE_REQUEST_LIMIT": "4", "DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "0"},
            4,
            1,
        ),
        ({"DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "8"}, 10_000, 40_000),
        (
            {"DYN_ENGINE_REQUEST_LIMIT": "4", "DYN_TCP_WORKER_POOL_SIZE": "9"},
            4,
            15,
        ),
    ],
)
def test_admission_numbers_are_the_genuine_ones(
    env: dict[str, str], running: int, waiting: int
) -> None:
    config = from_env(env, "file")
    assert (config.worker_pool_size, config.work_queue_size) == (running, waiting)


@pytest.mark.parametrize(
    "variable", ["DYN_ENGINE_REQUEST_LIMIT", "DYN_DYNAMO_REQUEST_QUEUE_LIMIT"]
)
def test_a_bad_engine_limit_names_its_own_variable(variable: str) -> None:
    env = {"DYN_ENGINE_REQUEST_LIMIT": "4"} | {variable: "many"}
    with pytest.raises(ValueError, match=f"{variable}='many'"):
        from_env(env, "file")


# -------------------------------------------------------------------------- device type


@pytest.mark.parametrize(
    ("variable", "text", "device_type"),
    [
        ("CUDA_VISIBLE_DEVICES", None, "cuda"),
        *(("CUDA_VISIBLE_DEVICES", text, "cpu") for text in ("", "  ", "-1", "none")),
        *(("CUDA_VISIBLE_DEVICES", text, "cpu") for text in ("NONE", "void", " -1 ")),
        *(("CUDA_VISIBLE_DEVICES", text, "cuda") for text in ("0", "abc", "-1,0")),
        ("CUDA_VISIBLE_DEVICES", "NoDevFiles", "cuda"),
        *(("NVIDIA_VISIBLE_DEVICES", text, "cpu") for text in ("void", "none", "None")),
        *(("NVIDIA_VISIBLE_DEVICES", text, "cuda") for text in ("", "-1", "all", "0")),
    ],
)
def test_the_device_type_is_the_one_a_genuine_worker_registers(
    variable: str, text: str | None, device_type: str
) -> None:
    env = {} if text is None else {variable: text}
    assert from_env(env, "file").device_type == device_type


def test_a_container_without_gpu_wins_over_a_visible_one() -> None:
    env = {"NVIDIA_VISIBLE_DEVICES": "none", "CUDA_VISIBLE_DEVICES": "0"}
    assert from_env(env, "file").device_type == "cpu"


# ------------------------------------------------- the backend and where it keeps files


@pytest.mark.parametrize(
    ("env", "backend"),
    [
        ({}, None),
        ({"DYN_DISCOVERY_BACKEND": ""}, None),
        ({"DYN_DISCOVERY_BACKEND": "mem"}, "mem"),
        ({"DYN_FILE_KV": "/somewhere"}, "file"),
        ({"DYN_FILE_KV": ""}, "file"),
        ({"ETCD_ENDPOINTS": "http://127.0.0.1:2379"}, "etcd"),
        ({"ETCD_ENDPOINTS": ""}, None),
        ({"DYN_FILE_KV": "x", "ETCD_ENDPOINTS": "y"}, "file"),
        ({"DYN_DISCOVERY_BACKEND": "etcd", "DYN_FILE_KV": "x"}, "etcd"),
    ],
)
def test_the_environment_names_a_backend_or_none(
    env: dict[str, str], backend: str | None
) -> None:
    assert chosen_backend(env) == backend


def test_an_unknown_backend_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"DYN_DISCOVERY_BACKEND='zookeeper': .*'file'"
    ):
        chosen_backend({"DYN_DISCOVERY_BACKEND": "zookeeper"})


@pytest.mark.parametrize(
    ("env", "plane"),
    [
        ({}, "tcp"),
        ({"DYN_REQUEST_PLANE": ""}, "tcp"),
        ({"DYN_REQUEST_PLANE": "TCP"}, "tcp"),
        ({"DYN_REQUEST_PLANE": "nats"}, "nats"),
    ],
)
def test_the_environment_names_a_request_plane(env: dict[str, str], plane: str) -> None:
    assert chosen_plane(env) == plane
    assert from_env(env).request_plane == plane


def test_an_unknown_request_plane_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"DYN_REQUEST_PLANE='http': .*'tcp', 'nats'"):
        chosen_plane({"DYN_REQUEST_PLANE": "http"})


def test_the_argument_wins_over_the_request_plane_of_the_environment() -> None:
    assert from_env({"DYN_REQUEST_PLANE": "http"}, "file", "tcp").request_plane == "tcp"


def test_the_folder_of_a_named_file_backend_follows_the_genuine_rule(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "tempfile.gettempdir",
        lambda: pytest.fail("it tries whether it can write there"),
    )
    assert named(TMPDIR=str(tmp_path)).file_root == tmp_path / "dynamo_store_kv"
    assert named(TEMP=str(tmp_path)).file_root == Path("/tmp/dynamo_store_kv")
    assert named().file_root == Path("/tmp/dynamo_store_kv")
    assert named(DYN_FILE_KV="/some/where").file_root == Path("/some/where")
    assert named(DYN_FILE_KV="").file_root == Path()


def test_the_embedded_folder_belongs_to_this_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.getuid", lambda: 1234)
    temporary = {"TMPDIR": str(tmp_path)}
    inside = tmp_path / "run"
    inside.mkdir()
    assert (
        embedded(XDG_RUNTIME_DIR=str(inside)).file_root == inside / "dynamo-runtime-py"
    )
    of_user = tmp_path / "dynamo-runtime-py-1234"
    assert embedded(**temporary).file_root == of_user
    gone = str(tmp_path / "gone")
    assert embedded(XDG_RUNTIME_DIR=gone, **temporary).file_root == of_user
    monkeypatch.delattr("os.getuid")
    of_eve = tmp_path / "dynamo-runtime-py-eve"
    assert embedded(USERNAME="eve", **temporary).file_root == of_eve


# ------------------------------------------------------------------------- bind rules

ROUTABLE = "192.0.2.7"


@pytest.fixture
def _routable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose address towards others is known."""
    monkeypatch.setattr(_config, "_routable_address", lambda *family: ROUTABLE)


@pytest.mark.usefixtures("_routable")
@pytest.mark.parametrize(
    ("backend", "host"),
    [(None, "127.0.0.1"), ("mem", "127.0.0.1"), ("file", ROUTABLE), ("etcd", ROUTABLE)],
)
def test_listeners_are_on_loopback_unless_others_can_find_them(
    backend: str | None, host: str
) -> None:
    config = from_env({}, backend)
    assert (config.rpc_host, config.response_host) == (host, host)
    assert config.embedded == (backend is None)
    assert config.discovery_backend == (backend or "file")


@pytest.mark.usefixtures("_routable")
def test_each_listener_follows_its_own_variable() -> None:
    config = embedded(DYN_TCP_RPC_HOST="127.0.0.2")
    assert (config.rpc_host, config.response_host) == ("127.0.0.2", "127.0.0.1")
    config = named(DYN_TCP_RESPONSE_STREAM_HOST="::1")
    assert (config.rpc_host, config.response_host) == (ROUTABLE, "::1")


def test_a_host_may_be_the_name_of_an_interface() -> None:
    if "lo" not in {name for _, name in socket.if_nameindex()}:
        pytest.skip("there is no interface 'lo'")
    assert named(DYN_TCP_RPC_HOST="lo").rpc_host == "127.0.0.1"


@pytest.mark.parametrize("text", ["localhost", "127.0.0.1:80", "no-such-if", "1.2.3"])
@pytest.mark.parametrize(
    "variable", ["DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST"]
)
def test_any_other_host_is_an_error_that_says_what_is_allowed(
    variable: str, text: str
) -> None:
    with pytest.raises(ValueError, match=r"IP address .* network interface") as caught:
        embedded(**{variable: text})
    assert str(caught.value).startswith(f"{variable}={text!r}: ")


def test_without_interface_names_only_addresses_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As on Windows.
    monkeypatch.setitem(__import__("sys").modules, "fcntl", None)
    assert named(DYN_TCP_RPC_HOST="::1").rpc_host == "::1"
    with pytest.raises(ValueError, match="DYN_TCP_RPC_HOST='lo'"):
        named(DYN_TCP_RPC_HOST="lo")


@pytest.mark.usefixtures("_routable")
def test_a_wildcard_is_never_told_to_others() -> None:
    assert advertised_host("0.0.0.0") == ROUTABLE
    assert advertised_host("127.0.0.1") == "127.0.0.1"
    assert advertised_host("::1") == "::1"


def test_the_routable_address_is_one_of_this_machine() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((advertised_host("0.0.0.0"), 0))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_what_is_told_of_a_wildcard_listener_can_be_connected_to(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        if family == socket.AF_INET6:
            # Like asyncio, which never lets one socket listen for both families.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, 0))
        listener.listen()
        address = (advertised_host(host), listener.getsockname()[1])
        socket.create_connection(address, timeout=5).close()


@pytest.mark.parametrize(("host", "address"), [("0.0.0.0", "127.0.0.1"), ("::", "::1")])
def test_a_machine_without_routes_is_told_as_loopback(
    monkeypatch: pytest.MonkeyPatch, host: str, address: str
) -> None:
    class Unroutable(socket.socket):
        def connect(self, address: object) -> None:
            raise OSError("network is unreachable")

    monkeypatch.setattr("socket.socket", Unroutable)
    assert advertised_host(host) == address


# ------------------------------------------------------------------ the other planes


@pytest.mark.parametrize("value", ["", "tcp"])
def test_the_response_plane_is_tcp(value: str) -> None:
    _config.check_planes({"DYN_RESPONSE_PLANE": value})


def test_quic_is_refused_with_the_alternative() -> None:
    with pytest.raises(ValueError, match=r"'quic' \(DYN_RESPONSE_PLANE\).*use 'tcp'"):
        _config.check_planes({"DYN_RESPONSE_PLANE": "quic"})


def test_an_argument_wins_over_the_plane_of_the_environment() -> None:
    _config.check_planes({"DYN_RESPONSE_PLANE": "quic"}, response_plane="tcp")
    _config.check_planes({"DYN_EVENT_PLANE": "bogus"}, event_plane="zmq")


@pytest.mark.parametrize("name", ["DYN_RESPONSE_PLANE", "DYN_EVENT_PLANE"])
def test_an_unknown_plane_is_named_with_what_is_allowed(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='bogus': expected one of"):
        _config.check_planes({name: "bogus"})


def test_the_event_plane_may_be_written_in_any_case() -> None:
    _config.check_planes({"DYN_EVENT_PLANE": "NATS"})
