"""Starts programs in processes of their own, reads their lines, ends them in time.

A program is the text of a module after `PRELUDE`; `run(main)` at its end runs a main
coroutine on the same kind of event loop as the test.  Whatever a test leaves running is
killed and reaped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from dynamo.runtime import Client, DistributedRuntime

MakeRuntime = Callable[[], DistributedRuntime]

SOURCE = Path(__file__).resolve().parent.parent / "src"
LIMIT_S = 15.0
POLL_S = 0.002
ENDPOINT = "ns.comp.gen"
LOOPBACK = dict.fromkeys(
    (
        "DYN_TCP_RPC_HOST",
        "DYN_TCP_RESPONSE_STREAM_HOST",
        "DYN_SYSTEM_HOST",
        "DYN_EVENT_PLANE_HOST",
    ),
    "127.0.0.1",
)
PRELUDE = """
import asyncio, os, signal, subprocess, sys, threading, time
from dynamo.runtime import DistributedRuntime, dynamo_worker

def say(*words):
    print(*words, flush=True)

def line():
    return asyncio.to_thread(sys.stdin.readline)

def run(main):
    factory, how = asyncio.new_event_loop, sys.argv[1:]
    if "uvloop" in how:
        import uvloop
        factory = uvloop.new_event_loop
    if "until_complete" in how:
        return factory().run_until_complete(main())
    if "uvloop" in how:
        return uvloop.run(main())
    return asyncio.run(main())
"""


def loop_kind() -> str:
    """The name of the kind of the running loop: asyncio or uvloop."""
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


async def eventually(check: Callable[[], object], limit_s: float = LIMIT_S) -> float:
    """Wait until ``check`` is true and return how long that took."""
    started = time.monotonic()
    while not check():
        assert time.monotonic() < started + limit_s, f"not within {limit_s} s"
        await asyncio.sleep(POLL_S)
    return time.monotonic() - started


class Program:
    """A running program.  What it prints is read as it comes, in a thread."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self.process = process
        self._errors = errors
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put("")

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def stderr(self) -> str:
        return self._errors.read_text(errors="replace")

    async def line(self, limit_s: float = LIMIT_S) -> str:
        """The next line of its output; empty at the end."""
        await eventually(lambda: not self._lines.empty(), limit_s)
        return self._lines.get()

    async def says(self, expected: str) -> None:
        """Read one line, which must be that."""
        line = await self.line()
        assert line == expected, f"{line!r} instead of {expected!r}\n{self.stderr}"

    def write_line(self, text: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def send(self, signum: signal.Signals) -> float:
        """Send a signal and return the moment."""
        sent_at = time.monotonic()
        self.process.send_signal(signum)
        return sent_at

    def kill(self) -> float:
        return self.send(signal.SIGKILL)

    async def ended(self, limit_s: float = LIMIT_S) -> int:
        """Wait for its end and return the exit code."""
        try:
            await eventually(lambda: not self.running, limit_s)
        except AssertionError as error:
            raise AssertionError(f"still running {error}: {self.stderr}") from None
        return self.process.returncode

    async def reaped(self) -> None:
        """End it if need be; leave nothing of it behind."""
        if self.running:
            self.kill()
        await self.ended()
        await eventually(lambda: not self._reader.is_alive())
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # a line that nobody read
                pipe.close()

    def memory_bytes(self) -> int:
        """Resident memory (Linux)."""
        return resident_bytes(self.pid)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process (Linux)."""
    for row in Path(f"/proc/{pid}/status").read_text().splitlines():
        if row.startswith("VmRSS:"):
            return int(row.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no memory: it has ended")


class Programs:
    """Starts programs that share one file store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "store"
        self._all: list[Program] = []

    @property
    def records(self) -> list[Path]:
        """The files of all registered instances."""
        folder = self.store / "v1" / "instances"
        return [path for path in folder.glob("*") if path.name[0] != "."]

    def environment(self, **extra: str) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("DYN_")}
        return {
            **inherited,
            **LOOPBACK,
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(self.store),
            "PYTHONPATH": str(SOURCE),
            **extra,
        }

    async def start(
        self,
        text: str,
        *arguments: str,
        command: tuple[str, ...] = (sys.executable,),
        **environment: str,
    ) -> Program:
        """Start a program with the test's kind of loop and further arguments."""
        whole = (*command, "-c", PRELUDE + text, loop_kind(), *arguments)
        return self._start(whole, self.environment(**environment))

    async def start_genuine(
        self, python: str, text: str, *arguments: str, **environment: str
    ) -> Program:
        """Start a program with the interpreter that has the genuine wheel."""
        whole = (python, "-c", PRELUDE + text, "asyncio", *arguments)
        return self._start(whole, self.environment(**environment, PYTHONPATH=""))

    def _start(self, command: tuple[str, ...], environment: dict[str, str]) -> Program:
        errors = self.folder / f"stderr-{len(self._all)}"
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=self.folder,
                env=environment,
            )
        program = Program(process, errors)
        self._all.append(program)
        return program

    async def aclose(self) -> None:
        for program in self._all:
            await program.reaped()


@pytest.fixture
async def programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Programs]:
    """Programs of one cluster, which the runtimes of the test itself join as well."""
    made = Programs(tmp_path)
    for name, value in made.environment().items():
        if name.startswith("DYN_"):
            monkeypatch.setenv(name, value)
    yield made
    await made.aclose()


@pytest.fixture
async def make_runtime(programs: Programs) -> AsyncIterator[MakeRuntime]:
    """Makes runtimes in the test's process, in the cluster of ``programs``."""
    made: list[DistributedRuntime] = []

    def make() -> DistributedRuntime:
        made.append(DistributedRuntime(asyncio.get_running_loop(), "file", "tcp"))
        return made[-1]

    yield make
    for runtime in made:
        runtime.shutdown()
    for runtime in made:
        await asyncio.wait_for(runtime._core.closed(), LIMIT_S)


@pytest.fixture
async def client(make_runtime: MakeRuntime) -> Client:
    """A client of the endpoint that the programs serve."""
    return await make_runtime().endpoint(ENDPOINT).client()
