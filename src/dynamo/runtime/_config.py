"""Every setting of a runtime, read once from the environment when a runtime is made.

The only module that looks at environment variables (besides the public logging
functions).  A bad value is one error that names variable, value and what is allowed.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from dynamo.runtime._network import SOCKETS, Network

_MIB = 1024 * 1024
_LOOPBACK = "127.0.0.1"
_NO_DEVICE = ("", "-1", "none", "void")
_BACKENDS = ("file", "mem", "etcd", "kubernetes")
_PLANES = ("tcp", "nats")
# The lane within one process and loop.
LOCAL = "local"
# What an error shows of a value: Python reads no number of more than 4,300 digits.
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class RuntimeConfig:
    """The settings of one runtime.  Times in seconds, sizes in bytes."""

    discovery_backend: str
    request_plane: str
    embedded: bool
    file_root: Path

    rpc_host: str
    rpc_port: int
    response_host: str
    response_port: int
    listen_backlog: int
    max_message_bytes: int

    call_timeout_s: float
    first_item_timeout_s: float
    idle_timeout_s: float
    request_timeout_s: float
    connect_timeout_s: float
    call_home_timeout_s: float
    frame_timeout_s: float
    pool_size: int
    channel_buffer: int
    global_connect_limit: int
    host_idle_ttl_s: float
    lanes: tuple[str, ...]
    duplex_connections: int
    ping_interval_s: float
    ping_timeout_s: float

    worker_pool_size: int
    work_queue_size: int
    codec: str
    device_type: str

    inhibited_s: float
    ejection_failures: int
    ejection_first_s: float
    ejection_max_s: float
    device_ratio: int
    drain_timeout_s: float
    cancel_grace_s: float
    close_timeout_s: float
    blocked_loop_s: float

    status_port: int | None
    network: Network = SOCKETS

    @property
    def advertised_lanes(self) -> tuple[str, ...]:
        """Those of which other processes should know."""
        return tuple(lane for lane in self.lanes if lane != LOCAL)


class _Reader:
    """One environment, and how its variables become values."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env

    def text(self, name: str, default: str) -> str:
        return self._env.get(name) or default

    def present(self, name: str) -> bool:
        return bool(self._env.get(name))

    def choice(self, name: str, default: str, allowed: tuple[str, ...]) -> str:
        value = self.text(name, default)
        if value not in allowed:
            words = ", ".join(repr(word) for word in allowed)
            raise ValueError(f"{name}={value!r}: expected one of {words}")
        return value

    def whole(
        self, name: str, default: int, least: int = 0, most: int = 2**63 - 1
    ) -> int:
        text = self._env.get(name, "").strip()
        if not text:
            return default
        # int() alone would also take "1_000" and other scripts' digits, and of very many
        # digits it makes an error of its own.
        readable = text.isascii() and text.isdigit() and len(text) <= _SHOWN_CHARACTERS
        if not readable or not least <= int(text) <= most:
            raise ValueError(
                f"{name}={text[:_SHOWN_CHARACTERS]!r}: expected a whole number from "
                f"{least} to {most}"
            )
        return int(text)

    def seconds(self, name: str, default: float, least: float = 0.0) -> float:
        text = self._env.get(name, "").strip()
        if not text:
            return default
        try:
            # float() alone would also take "1_000" and other scripts' digits.
            value = float(text) if text.isascii() and "_" not in text else -1.0
        except ValueError:
            value = -1.0
        if not least <= value < float("inf"):
            raise ValueError(
                f"{name}={text[:_SHOWN_CHARACTERS]!r}: expected a number of seconds, "
                f"at least {least:g}"
            )
        return value

    def limit(self, name: str) -> float:
        """Seconds; infinity, which is no limit, if it is not set or 0."""
        return self.seconds(name, 0.0) or float("inf")

    def host(self, name: str, default: Callable[[], str]) -> str:
        """An IP literal, or the address of the interface of that name."""
        value = self._env.get(name, "").strip()
        if not value:
            return default()
        try:
            return str(ip_address(value))
        except ValueError:
            pass
        address = _address_of_interface(value)
        if address is None:
            raise ValueError(
                f"{name}={value!r}: expected an IP address such as 127.0.0.1 or ::1, "
                "or the name of a network interface such as eth0"
            )
        return address


def _address_of_interface(name: str) -> str | None:
    """The first IPv4 address of a network interface, or None if there is none."""
    try:
        import fcntl
    except ImportError:
        return None
    siocgifaddr = 0x8915
    request = struct.pack("256s", name.encode("utf-8", "surrogateescape")[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), siocgifaddr, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _routable_address(family: socket.AddressFamily = socket.AF_INET) -> str:
    """The local address from which other hosts would be reached; sends nothing."""
    far, here = ("192.0.2.1", _LOOPBACK)
    if family == socket.AF_INET6:
        far, here = ("2001:db8::1", "::1")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket only consults the routing table.
            probe.connect((far, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return here


def advertised_host(host: str) -> str:
    """The address to tell others for a listener on ``host``; never a wildcard."""
    address = ip_address(host)
    if not address.is_unspecified:
        return host
    # asyncio listens for one family only: nobody reaches "::" over IPv4.
    return _routable_address(
        socket.AF_INET if address.version == 4 else socket.AF_INET6
    )


def _temporary_folder(env: Mapping[str, str]) -> Path:
    """The system's folder, where the genuine runtime finds it too.

    `tempfile.gettempdir` follows further variables, and writes a file to try the folder:
    making a runtime does no I/O.
    """
    if sys.platform == "win32":
        import tempfile

        return Path(tempfile.gettempdir())
    return Path(env.get("TMPDIR") or "/tmp")


def _embedded_root(env: Mapping[str, str]) -> Path:
    """The folder of this user's own cluster on this machine."""
    base = env.get("XDG_RUNTIME_DIR")
    if base and Path(base).is_dir():
        return Path(base) / "dynamo-runtime-py"
    user = os.getuid() if hasattr(os, "getuid") else env.get("USERNAME", "user")
    return _temporary_folder(env) / f"dynamo-runtime-py-{user}"


def _file_root(env: Mapping[str, str]) -> Path:
    """The genuine rule: unset is the system's temporary folder, empty is here."""
    root = env.get("DYN_FILE_KV")
    if root is None:
        return _temporary_folder(env) / "dynamo_store_kv"
    return Path(root or ".")


def _device_type(env: Mapping[str, str]) -> str:
    """What the genuine worker registers; ``cuda`` also where there is no GPU."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and visible.strip().lower() in _NO_DEVICE
    if hidden or env.get("NVIDIA_VISIBLE_DEVICES", "").lower() in ("none", "void"):
        return "cpu"
    return "cuda"


def _admission(read: _Reader) -> tuple[int, int]:
    """How many requests may run, and how many more may wait."""
    if read.present("DYN_ENGINE_REQUEST_LIMIT"):
        limit = read.whole("DYN_ENGINE_REQUEST_LIMIT", 1)
        queue = read.whole("DYN_DYNAMO_REQUEST_QUEUE_LIMIT", 16)
        return max(limit, 1), max(queue - 1, 1)
    return (
        read.whole("DYN_TCP_WORKER_POOL_SIZE", 10_000, least=1),
        read.whole("DYN_TCP_WORK_QUEUE_SIZE", 40_000, least=1),
    )


def _lanes(read: _Reader) -> tuple[str, ...]:
    """The lanes beyond call-home, which is always there."""
    lanes = {"all": (LOCAL, "duplex"), "duplex": ("duplex",), "callhome": ()}
    return lanes[read.choice("DYN_RUNTIME_LANES", "all", tuple(lanes))]


def _pings(read: _Reader) -> tuple[float, float]:
    """After how much silence a peer is asked for a sign of life, and when it is dead."""
    interval_s = read.seconds("DYN_RUNTIME_PING_INTERVAL_SECS", 20.0, least=0.01)
    # The question goes out after one and a half intervals at the latest.
    timeout_s = read.seconds(
        "DYN_RUNTIME_PING_TIMEOUT_SECS",
        max(60.0, 3 * interval_s),
        least=2 * interval_s,
    )
    return interval_s, timeout_s


def _status_port(read: _Reader) -> int | None:
    """The port of the status server; a negative number is the genuine way to say off."""
    text = read.text("DYN_SYSTEM_PORT", "-1").strip()
    if text.startswith("-") and text[1:].isdigit():
        return None
    return read.whole("DYN_SYSTEM_PORT", 0, most=65535)


def chosen_backend(env: Mapping[str, str]) -> str | None:
    """The discovery backend that the environment names, or None for the embedded one.

    Raises:
        ValueError: it names one that does not exist.
    """
    if env.get("DYN_DISCOVERY_BACKEND"):
        return _Reader(env).choice("DYN_DISCOVERY_BACKEND", "", _BACKENDS)
    if "DYN_FILE_KV" in env:
        return "file"
    if env.get("ETCD_ENDPOINTS"):
        return "etcd"
    return None


def chosen_plane(env: Mapping[str, str]) -> str:
    """The request plane that the environment names.

    Raises:
        ValueError: it names one that does not exist.
    """
    lowered = {"DYN_REQUEST_PLANE": env.get("DYN_REQUEST_PLANE", "").lower()}
    return _Reader(lowered).choice("DYN_REQUEST_PLANE", "tcp", _PLANES)


def check_planes(
    env: Mapping[str, str], *, response_plane: str = "", event_plane: str = ""
) -> None:
    """Refuse planes that the environment names where no argument does.

    Raises:
        ValueError: a value that does not exist, or that this version lacks.
    """
    planes = {
        "DYN_RESPONSE_PLANE": response_plane or env.get("DYN_RESPONSE_PLANE", ""),
        "DYN_EVENT_PLANE": event_plane or env.get("DYN_EVENT_PLANE", "").lower(),
    }
    read = _Reader(planes)
    read.choice("DYN_EVENT_PLANE", "zmq", ("nats", "zmq"))
    if read.choice("DYN_RESPONSE_PLANE", "tcp", ("tcp", "quic")) == "quic":
        raise ValueError(
            "response plane 'quic' (DYN_RESPONSE_PLANE) is not supported: use 'tcp' on "
            "both sides"
        )


def from_env(
    env: Mapping[str, str],
    discovery_backend: str | None = None,
    request_plane: str | None = None,
) -> RuntimeConfig:
    """The settings of a runtime.

    Args:
        env: The environment, usually ``os.environ``.
        discovery_backend: The backend, or None for the embedded default: files in a
            folder of this user and every listener on the loopback interface.
        request_plane: ``"tcp"``, or None for what the environment says.

    Raises:
        ValueError: a variable has a value that cannot be used.
    """
    read = _Reader(env)
    embedded = discovery_backend is None
    # Nobody on another host can find the instances of these.
    local = embedded or discovery_backend == "mem"

    def default_host() -> str:
        return _LOOPBACK if local else _routable_address()

    running, waiting = _admission(read)
    ping_interval_s, ping_timeout_s = _pings(read)
    return RuntimeConfig(
        discovery_backend=discovery_backend or "file",
        request_plane=request_plane or chosen_plane(env),
        embedded=embedded,
        file_root=_embedded_root(env) if embedded else _file_root(env),
        rpc_host=read.host("DYN_TCP_RPC_HOST", default_host),
        rpc_port=read.whole("DYN_TCP_RPC_PORT", 0, most=65535),
        response_host=read.host("DYN_TCP_RESPONSE_STREAM_HOST", default_host),
        response_port=read.whole("DYN_TCP_RESPONSE_STREAM_PORT", 0, most=65535),
        listen_backlog=read.whole("DYN_TCP_LISTEN_BACKLOG", 4096, least=1),
        max_message_bytes=read.whole(
            "DYN_TCP_MAX_MESSAGE_SIZE", 32 * _MIB, least=1024, most=2**32 - 1
        ),
        call_timeout_s=read.limit("DYN_RUNTIME_CALL_TIMEOUT_SECS"),
        first_item_timeout_s=read.limit("DYN_RUNTIME_FIRST_ITEM_TIMEOUT_SECS"),
        idle_timeout_s=read.limit("DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS"),
        request_timeout_s=read.seconds("DYN_TCP_REQUEST_TIMEOUT", 5.0, least=0.001),
        connect_timeout_s=read.seconds("DYN_TCP_CONNECT_TIMEOUT", 5.0, least=0.001),
        call_home_timeout_s=10.0,
        frame_timeout_s=10.0,
        pool_size=read.whole("DYN_TCP_POOL_SIZE", 100, least=1),
        channel_buffer=read.whole("DYN_TCP_CHANNEL_BUFFER", 1024, least=1),
        global_connect_limit=read.whole("DYN_TCP_GLOBAL_CONNECT_LIMIT", 64, least=1),
        host_idle_ttl_s=read.seconds("DYN_TCP_HOST_IDLE_TTL_SECS", 300.0),
        lanes=_lanes(read),
        duplex_connections=read.whole(
            "DYN_RUNTIME_DUPLEX_CONNECTIONS", 1, least=1, most=1024
        ),
        ping_interval_s=ping_interval_s,
        ping_timeout_s=ping_timeout_s,
        worker_pool_size=running,
        work_queue_size=waiting,
        codec=read.choice("DYN_REQUEST_PLANE_CODEC", "msgpack", ("msgpack", "json")),
        device_type=_device_type(env),
        inhibited_s=read.seconds("DYN_RUNTIME_INHIBITED_DURATION_SECS", 5.0),
        ejection_failures=read.whole("DYN_RUNTIME_EJECTION_FAILURES", 3),
        ejection_first_s=read.seconds("DYN_RUNTIME_EJECTION_SECS", 0.1, least=0.001),
        ejection_max_s=read.seconds("DYN_RUNTIME_EJECTION_MAX_SECS", 10.0, least=0.001),
        device_ratio=read.whole("DYN_ENCODER_CUDA_TO_CPU_RATIO", 8, least=1),
        drain_timeout_s=read.seconds(
            "DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", 25.0
        ),
        cancel_grace_s=read.seconds("DYN_RUNTIME_CANCEL_GRACE_SECS", 5.0),
        close_timeout_s=5.0,
        blocked_loop_s=read.seconds("DYN_RUNTIME_BLOCKED_LOOP_SECS", 1.0),
        status_port=_status_port(read),
    )
