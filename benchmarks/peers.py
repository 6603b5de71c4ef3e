"""Who is measured: the workers, the clients, and how their processes are started."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.processes import START_LIMIT_S, Failed, NatsServer, Process

ROOT = Path(__file__).resolve().parent.parent
LOOPBACK = dict.fromkeys(
    (
        "DYN_TCP_RPC_HOST",
        "DYN_TCP_RESPONSE_STREAM_HOST",
        "DYN_SYSTEM_HOST",
        "DYN_EVENT_PLANE_HOST",
    ),
    "127.0.0.1",
)
# Debian keeps servers in a folder that is not on every user's PATH.
PROGRAM_PATH = os.pathsep.join(
    [os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin"]
)
LANES = re.compile(rb'"dynamo_py":\{.*"lanes":\[([^\]]*)\]')


@dataclasses.dataclass(frozen=True)
class Side:
    """How a worker or a client is started."""

    kind: str
    genuine: bool = False
    loop: str = ""
    environment: tuple[tuple[str, str], ...] = ()


_CALLHOME = (("DYN_RUNTIME_LANES", "callhome"),)
WORKERS = {
    "genuine": Side("dynamo", genuine=True),
    "ours": Side("dynamo"),
    "ours-callhome": Side("dynamo", environment=_CALLHOME),
    "ours-asyncio": Side("dynamo", loop="asyncio"),
    "grpc": Side("grpc"),
    "nats": Side("nats"),
    "floor": Side("floor"),
}
# The client and the name of its worker.
PEERS = {
    **{name: (side, name) for name, side in WORKERS.items()},
    "floor-codec": (Side("floor"), "floor"),
    "genuine>ours": (WORKERS["genuine"], "ours"),
    "ours>genuine": (WORKERS["ours"], "genuine"),
}


def missing(peer: str) -> str:
    """Why a peer cannot be measured here; empty if it can."""
    client, worker = PEERS[peer]
    if client.genuine or WORKERS[worker].genuine:
        named = os.environ.get("DYN_GENUINE_PYTHON", "")
        return "" if shutil.which(named) else "DYN_GENUINE_PYTHON names no interpreter"
    if client.kind in ("grpc", "nats") and not importlib.util.find_spec(client.kind):
        return f"the module {client.kind} is not installed (dependency group 'bench')"
    if client.kind == "nats" and not shutil.which("nats-server", path=PROGRAM_PATH):
        return "there is no program nats-server"
    return ""


class Cluster:
    """Running workers and clients, started when they are first needed."""

    def __init__(self, loop: str) -> None:
        self._loop = loop
        self._folder = Path(tempfile.mkdtemp(prefix="bench-"))
        self._workers: dict[str, tuple[Process, str]] = {}
        self._clients: dict[str, Process] = {}
        self._nats: NatsServer | None = None
        self.versions: dict[str, str] = {}

    def _start(self, side: Side, role: str, worker: str, address: str) -> Process:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("DYN_")}
        path = [ROOT] if side.genuine else [ROOT, ROOT / "src"]
        environment = {
            **inherited,
            **LOOPBACK,
            "DYN_FILE_KV": str(self.store_of(worker)),
            # One line per call of the genuine client cannot be switched off at all.
            "DYN_LOG": "off",
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            **dict(side.environment),
        }
        python = os.environ["DYN_GENUINE_PYTHON"] if side.genuine else sys.executable
        errors = self._folder / f"{worker}-{role}.log"
        return Process(
            [
                *(python, "-m", "benchmarks.peer", side.kind, role),
                *(side.loop or self._loop, address),
            ],
            environment,
            Path(os.devnull) if side.genuine else errors,
        )

    def store_of(self, worker: str) -> Path:
        """The folder in which that worker is registered."""
        return self._folder / worker

    def _worker(self, name: str) -> tuple[Process, str]:
        if name not in self._workers:
            address = self._nats_address() if name == "nats" else ""
            process = self._start(WORKERS[name], "work", name, address)
            try:
                ready = process.answer(START_LIMIT_S)
            except Failed:
                process.stop()
                raise
            self._note(name, ready["versions"])
            self._workers[name] = process, ready["address"]
        return self._workers[name]

    def _note(self, name: str, versions: dict[str, str]) -> None:
        self.versions[name] = ", ".join(f"{k} {v}" for k, v in versions.items())

    def _nats_address(self) -> str:
        if self._nats is None:
            program = shutil.which("nats-server", path=PROGRAM_PATH)
            assert program is not None, "see missing()"
            self._nats = NatsServer(program)
        return self._nats.address

    def client(self, peer: str) -> tuple[Process, int]:
        """The client of a peer, connected, and the process id of its worker.

        Raises:
            Failed: one of them did not start.
        """
        side, worker_name = PEERS[peer]
        worker, address = self._worker(worker_name)
        if peer not in self._clients:
            suffix = " codec" if peer == "floor-codec" else ""
            process = self._start(side, "call", worker_name, address + suffix)
            try:
                process.answer(START_LIMIT_S)
            except Failed:
                process.stop()
                raise
            self._clients[peer] = process
        return self._clients[peer], worker.pid

    def advertises_lanes(self, worker: str) -> bool:
        """Whether a worker of ours, started for the answer, speaks more than one.

        Raises:
            Failed: it did not start.
        """
        return self.lanes(worker) != "callhome"

    def lanes(self, worker: str) -> str:
        """The lanes that a worker of ours advertises, call-home apart.

        Raises:
            Failed: it did not start, perhaps again.
        """
        self._worker(worker)
        found = LANES.search(self._record_of(worker))
        return found[1].decode().replace('"', "") if found and found[1] else "callhome"

    def _record_of(self, worker: str) -> bytes:
        """A worker says that it is ready before it is registered."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            for record in self.store_of(worker).rglob("*echo*"):
                if text := record.read_bytes():
                    return text
            time.sleep(0.02)
        raise Failed(f"{worker} is not registered after {START_LIMIT_S:g} s")

    def drop(self, peer: str) -> None:
        """Stop both sides of a peer; they start again when they are needed."""
        _, worker_name = PEERS[peer]
        users = [name for name in self._clients if PEERS[name][1] == worker_name]
        for name in users:
            self._clients.pop(name).stop()
        if worker_name in self._workers:
            self._workers.pop(worker_name)[0].stop()

    def close(self) -> None:
        """Stop everything and remove what it wrote."""
        for client in self._clients.values():
            client.stop()
        for worker, _ in self._workers.values():
            worker.stop()
        if self._nats is not None:
            self._nats.stop()
        shutil.rmtree(self._folder, ignore_errors=True)
