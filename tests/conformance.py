"""Runs the black-box conformance suite in its three pairs and prints a table for each.

The suite lies beside this project, or where DYN_CONFORMANCE_DIR says; where it is
absent there is nothing to run, and that is no failure.  The pairs with the genuine
runtime need DYN_GENUINE_PYTHON.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUITE = Path(
    os.environ.get("DYN_CONFORMANCE_DIR") or ROOT.parent / "shared" / "conformance"
)
GENUINE = os.environ.get("DYN_GENUINE_PYTHON")
SKIPS_FORBIDDEN = os.environ.get("DYN_TESTS_FORBID_SKIPS") == "1"
AREAS = (
    "surface", "handlers", "requests", "responses", "envelope", "routing",
    "cancellation", "errors", "context", "remote_context", "concurrency",
    "decorators", "runtime", "logging_module",
)  # fmt: skip
WITHOUT = "status-server,tracing"
PAIRS = (("ours", "ours"), ("genuine", "ours"), ("ours", "genuine"))
LINE = re.compile(r"(ok|FAIL|skip)\s+(?:[\d.]+s )?(\w+)\.\S+")
WORDS = {"ok": "passed", "FAIL": "failed", "skip": "skipped"}
LOOPBACK_ONLY = (
    "DYN_TCP_RPC_HOST",
    "DYN_TCP_RESPONSE_STREAM_HOST",
    "DYN_SYSTEM_HOST",
    "DYN_EVENT_PLANE_HOST",
)


def pair_environment(server: str, client: str) -> dict[str, str]:
    """The environment of the suite's runner for one pair of implementations."""
    # The genuine interpreter would import ours from an inherited PYTHONPATH.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["DYN_CONFORM_WITHOUT"] = WITHOUT
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    env.update({f"DYN_CONFORM_ENV_{name}": "127.0.0.1" for name in LOOPBACK_ONLY})
    for side, kind in (("SERVER", server), ("CLIENT", client)):
        if kind == "ours":
            env[f"DYN_CONFORM_{side}_PYTHON"] = sys.executable
            env[f"DYN_CONFORM_{side}_ENV_PYTHONPATH"] = str(ROOT / "src")
        else:
            env[f"DYN_CONFORM_{side}_PYTHON"] = GENUINE or ""
    return env


def run_pair(server: str, client: str) -> dict[str, Counter[str]]:
    """Run one pair, print what fails as it happens, and count the results by area."""
    areas = [f"{area}." for area in AREAS]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    with subprocess.Popen(
        [sys.executable, "runner.py", "-v", *areas],
        cwd=SUITE,
        env=pair_environment(server, client),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            case = LINE.match(line)
            if case:
                counts[case[2]][WORDS[case[1]]] += 1
            if case is None or case[1] == "FAIL":
                print(line, end="", flush=True)
    if process.returncode and not total(counts)["failed"]:
        counts["(the runner itself)"]["failed"] += 1
    return counts


def total(counts: dict[str, Counter[str]]) -> Counter[str]:
    return sum(counts.values(), Counter())


def sentence(numbers: Counter[str]) -> str:
    return ", ".join(f"{numbers[word]} {word}" for word in WORDS.values())


def print_table(title: str, counts: dict[str, Counter[str]]) -> None:
    print(f"\n{title}: {sentence(total(counts))}")
    for area, numbers in sorted(counts.items()):
        cells = "".join(f"{numbers[word]:>9}" for word in WORDS.values())
        print(f"  {area:<22}{cells}")
    print(flush=True)


def main() -> int:
    if not (SUITE / "runner.py").exists():
        print(
            f"conformance: no suite at {SUITE} (see DYN_CONFORMANCE_DIR), nothing run"
        )
        return 0
    everything: Counter[str] = Counter()
    for server, client in PAIRS:
        title = f"server {server}, client {client}"
        if "genuine" in (server, client) and not GENUINE:
            print(f"{title}: DYN_GENUINE_PYTHON is not set, see ./run-tests")
            everything["failed" if SKIPS_FORBIDDEN else "skipped"] += 1
            continue
        print(f"-- {title}", flush=True)
        counts = run_pair(server, client)
        print_table(title, counts)
        everything += total(counts)
    print(f"conformance: {sentence(everything)}")
    return 1 if everything["failed"] or not everything["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
