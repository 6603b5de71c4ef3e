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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
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
    "decorators", "runtime", "logging_module", "bidirectional", "push", "unary",
)  # fmt: skip
WITHOUT = "status-server,tracing"
PAIRS = (("ours", "ours"), ("genuine", "ours"), ("ours", "genuine"))
LINE = re.compile(r"(ok|FAIL|skip)\s+(?:[\d.]+s )?((\w+)\.\S+)")
TOTALS = re.compile(r"\d+ passed.* in \d+ s$")
# "left out": the suite says that the case is not about this pair of implementations.
WORDS = {"ok": "passed", "FAIL": "failed", "known": "known", "skip": "left out"}
# Expectations that nobody can meet, with the differences that the right answer shows.
# This one lacks the list around the values of all steps; the four lines leave no
# other observation than [[[["<"], true], [["<"], true]]].
KNOWN = {
    "responses.integers-too-big": (
        '$[0][0][0]: expected "<", got ["<"]',
        "$[0][0][1]: unexpected true",
        '$[0][1]: expected true, got [["<"], true]',
        '$[1]: missing, expected [["<"], true]',
    )
}
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


@dataclass
class Result:
    """How a case ended (a key of WORDS), and the lines the runner printed for it."""

    word: str
    name: str
    area: str
    lines: list[str] = field(default_factory=list)

    def judged(self) -> Result:
        """The same, or "known" if it differs just as it must."""
        details = tuple(line.strip() for line in self.lines if line.startswith("  "))
        if self.word == "FAIL" and details == KNOWN.get(self.name):
            return Result("known", self.name, self.area)
        return self

    def print(self) -> None:
        if self.word == "FAIL":
            print("FAIL", self.name)
            print("".join(self.lines), end="", flush=True)
        elif self.word == "known":
            print("known: expectation malformed:", self.name, flush=True)


def results(output: Iterable[str]) -> Iterator[Result]:
    """The cases in what the runner prints; first a nameless one: what comes before."""
    current = Result("", "", "")
    for line in output:
        case = LINE.match(line)
        if case is None:
            current.lines.append(line)
            continue
        yield current.judged()
        current = Result(case[1], case[2], case[3])
    yield current.judged()


def run_pair(server: str, client: str) -> dict[str, Counter[str]]:
    """Run one pair, print what fails as it happens, and count the results by area."""
    areas = [f"{area}." for area in AREAS]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    last = Result("", "", "")
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
        for last in results(process.stdout):
            last.print()
            if last.word:
                counts[last.area][WORDS[last.word]] += 1
    if not any(TOTALS.match(line) for line in last.lines):
        print("".join(last.lines), end="", flush=True)
        counts["(the runner itself)"]["failed"] += 1
    return counts


def total(counts: dict[str, Counter[str]]) -> Counter[str]:
    return sum(counts.values(), Counter())


def sentence(numbers: Counter[str]) -> str:
    words = ["passed", "failed", *sorted(set(numbers) - {"passed", "failed"})]
    return ", ".join(f"{numbers[word]} {word}" for word in words)


def print_table(title: str, counts: dict[str, Counter[str]]) -> None:
    print(f"\n{title}: {sentence(total(counts))}")
    print(" " * 24 + "".join(f"{word:>9}" for word in WORDS.values()))
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
