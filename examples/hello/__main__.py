"""The whole example: two workers and a client, each a process of its own.

::

    python examples/hello

This program only starts the processes, waits for the client, asks the workers to stop
and reports how each of them ended; worker.py and client.py are the ones to read.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CLIENT_LIMIT_S = 60
STOP_LIMIT_S = 30


def start(program: str, *args: str) -> subprocess.Popen[bytes]:
    """Start one of the programs beside this file, with the same interpreter."""
    return subprocess.Popen([sys.executable, str(HERE / program), *args])


def stop(name: str, worker: subprocess.Popen[bytes]) -> int:
    """Ask a worker to drain (SIGTERM on POSIX) and return its exit code."""
    worker.terminate()
    code = worker.wait(STOP_LIMIT_S)
    print(f"{name}: ended with exit code {code}", flush=True)
    return code


def main() -> int:
    """Return 0 if the client got its answers and every worker stopped cleanly."""
    workers = {name: start("worker.py", name) for name in ("anna", "bert")}
    client = start("client.py", str(len(workers)))
    try:
        codes = [client.wait(CLIENT_LIMIT_S)]
        print("Asking the workers to stop (SIGTERM)", flush=True)
        codes += [stop(name, worker) for name, worker in workers.items()]
    finally:
        for process in (client, *workers.values()):
            if process.poll() is None:
                process.kill()
                process.wait()
    print("It worked." if not any(codes) else f"It failed: exit codes {codes}")
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
