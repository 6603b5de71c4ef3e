"""The processes of a run: each is asked with a limit and reaped with a limit."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STOP_LIMIT_S = 5.0
START_LIMIT_S = 30.0


class Failed(Exception):
    """A process did not answer, ended, or said why it could not do what was asked."""


class Process:
    """One measured process, spoken to in lines of JSON."""

    def __init__(
        self, command: list[str], environment: Mapping[str, str], errors: Path
    ) -> None:
        self._errors = errors
        with errors.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                bufsize=1,
            )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    @property
    def pid(self) -> int:
        return self._process.pid

    def answer(self, limit_s: float) -> dict[str, Any]:
        """The next line that the process writes.

        Raises:
            Failed: nothing came within the limit, or the process ended.
        """
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            raise Failed(f"no answer within {limit_s:g} s") from None
        if not line:
            tail = self._errors.read_text(errors="replace")[-500:]
            raise Failed(f"ended without an answer: {tail.strip() or 'no words'}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, limit_s: float, **command: Any) -> dict[str, float]:
        """Have a load run and return what it measured.

        Raises:
            Failed: no answer, or the load failed.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise Failed(f"the process is gone: {error}") from error
        answer = self.answer(limit_s)
        if "error" in answer:
            raise Failed(answer["error"])
        measured: dict[str, float] = answer["measured"]
        return measured

    def stop(self) -> None:
        """Close its input, which asks it to end; kill it if it does not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(STOP_LIMIT_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait(STOP_LIMIT_S)
        self._reader.join(STOP_LIMIT_S)
        self._process.stdout.close()


class NatsServer:
    """A nats-server on a free loopback port."""

    def __init__(self, program: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"nats://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [program, "-a", "127.0.0.1", "-p", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._wait_for(port)
        except Failed:
            self.stop()
            raise

    def _wait_for(self, port: int) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError):
                return socket.create_connection(("127.0.0.1", port), 1).close()
            time.sleep(0.02)
        raise Failed("nats-server does not listen")

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_LIMIT_S)
