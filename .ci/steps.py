"""Runs steps of the checks by name, one after the other, and says how it went.

The only place that knows what a step runs: the Makefile and ./run-tests call this.
Every step has a time limit; what it leaves running is killed.  DYN_TEST_SCALE is the
factor of the long forms: more work, and as much more time.  DYN_FUZZ_SECONDS is the time
for each target of fuzz/.  The step ``soak`` begins with long forms of both.

Many tests measure time, memory or threads, and where several run side by side they take
the processors from each other.  A few that failed there are run once more, alone; what
they say then counts, both outputs are shown, and the table says how many it were.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = Path(sys.executable).parent
LONG = "soak" in sys.argv[1:]
SCALE = float(os.environ.get("DYN_TEST_SCALE", "10" if LONG else "1"))
FUZZ_S = float(os.environ.get("DYN_FUZZ_SECONDS", "600" if LONG else "5"))
MAX_FUZZ_TARGETS = 40
# More failures than this are no matter of a busy machine.
MAX_ALONE = 5
TESTS_FAILED = 1  # pytest's exit code: all ran, some failed
COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


@dataclasses.dataclass
class Step:
    """A command with a limit; ``counts`` says whether it prints numbers of tests."""

    name: str
    command: list[str]
    limit_s: float
    counts: bool = False

    @property
    def alone(self) -> Step | None:
        """Those tests that failed in it, one after the other; None if they were so."""
        if "-n" not in self.command:
            return None
        at = self.command.index("-n")
        command = self.command[:at] + self.command[at + 2 :]
        command += ["--last-failed", "--last-failed-no-failures=none"]
        if "--cov-branch" in command:
            command.append("--cov-append")
        return dataclasses.replace(self, name=f"{self.name}, alone", command=command)


@dataclasses.dataclass
class Outcome:
    """How a step ended; the numbers are of tests, or the step itself counts as one."""

    step: Step
    verdict: str
    duration_s: float
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    @property
    def is_ok(self) -> bool:
        return self.verdict.startswith("ok")


def tool(name: str, *args: str, limit_s: float = 60) -> Step:
    return Step(name, [str(TOOLS / name), *args], limit_s)


def named(name: str, step: Step) -> Step:
    return dataclasses.replace(step, name=name)


def tests(name: str, *args: str, limit_s: float) -> Step:
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short"]
    command += [f"--timeout={20 * SCALE:g}", *args]
    return Step(name, command, limit_s * SCALE, counts=True)


BUILD = Step("build", [sys.executable, "-m", "hatchling", "build", "-d", "dist"], 60)
CONFORMANCE = Step(
    "conformance", [sys.executable, "tests/conformance.py"], 420, counts=True
)
FUZZ = Step(
    "fuzz",
    [sys.executable, "-m", "fuzz", "--seconds", f"{FUZZ_S:g}"],
    60 + MAX_FUZZ_TARGETS * (FUZZ_S + 2),
    counts=True,
)
CHANGES = named("changes", tool("towncrier", "build", "--draft", "--version", "NEXT"))
CHECK = [
    named("format", tool("ruff", "format", "--check", ".")),
    named("lint", tool("ruff", "check", ".")),
    named("layers", tool("lint-imports")),
    named("spelling", tool("codespell")),
    named("dependencies", tool("deptry", "src")),
    named("types", tool("mypy", limit_s=120)),
    named(
        "public types",
        tool("basedpyright", "--pythonpath", sys.executable, limit_s=120),
    ),
    CHANGES,
    tests("unit", "tests/unit", "src", "--doctest-modules", "-n", "2", limit_s=120),
]
DIST = [BUILD, tests("packaging", "tests/packaging", limit_s=120)]
TEST_FOLDERS = {
    "integration": tests("integration", "tests/integration", "-n", "auto", limit_s=240),
    "faults": tests("faults", "tests/faults", "-n", "2", limit_s=480),
    # These wait for records to expire far more than they compute.
    "interop": tests("interop", "tests/interop", "-n", "4", limit_s=240),
    "examples": tests("examples", "tests/test_examples.py", limit_s=240),
}
# Branches of the tests that run inside pytest; programs of their own are not counted.
COVERAGE = [
    tests(
        "covered",
        "tests/unit",
        "tests/integration",
        "-n",
        "auto",
        "--cov=dynamo",
        "--cov-branch",
        "--cov-report=",
        limit_s=600,
    ),
    named("cover 90 %", tool("coverage", "report", "--fail-under=90")),
    named(
        "wire 100 %",
        tool("coverage", "report", "--include=*/_wire/*", "--fail-under=100"),
    ),
]
GROUPS: dict[str, list[Step]] = {
    "check": CHECK,
    "dist": DIST,
    "conformance": [CONFORMANCE],
    "fuzz": [FUZZ],
    "changes": [CHANGES],
    "coverage": COVERAGE,
    **{name: [step] for name, step in TEST_FOLDERS.items()},
    "ci": [
        *CHECK,
        *DIST,
        *COVERAGE,
        *(step for name, step in TEST_FOLDERS.items() if name != "integration"),
        FUZZ,
        CONFORMANCE,
    ],
    "soak": [TEST_FOLDERS["integration"], TEST_FOLDERS["faults"], FUZZ],
}


def kill_group(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # the usual case: nothing was left running


def run_command(step: Step) -> tuple[int, list[str]]:
    """Run a step in a process group of its own; return its exit code and output."""
    process = subprocess.Popen(
        step.command,
        cwd=ROOT,
        env={**os.environ, "DYN_TEST_SCALE": f"{SCALE:g}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    limit = threading.Timer(step.limit_s, kill_group, [process])
    limit.start()
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line)
            if step.counts:  # the long ones show that they are moving
                print(line, end="", flush=True)
        return process.wait(), lines
    finally:
        limit.cancel()
        kill_group(process)
        process.stdout.close()


def count_tests(lines: list[str]) -> dict[str, int]:
    """The numbers in the last line that has some: "3 passed, 1 skipped in 2.1s"."""
    for line in reversed(lines):
        found = COUNT.findall(line)
        if found:
            return {word.rstrip("s"): int(number) for number, word in found}
    return {}


def run_step(step: Step, place: str) -> Outcome:
    print(f"== [{place}] {step.name}", flush=True)
    started = time.monotonic()
    code, lines = run_command(step)
    duration_s = time.monotonic() - started
    if duration_s >= step.limit_s:
        verdict = f"FAILED: over its limit of {step.limit_s:g} s"
    else:
        verdict = "FAILED" if code else "ok"
    if code and not step.counts:
        print("".join(lines), end="", flush=True)
    numbers = count_tests(lines) if step.counts else {}
    failed = numbers.get("failed", 0) + numbers.get("error", 0)
    outcome = Outcome(
        step,
        verdict,
        duration_s,
        passed=numbers.get("passed", 0),
        failed=max(failed, 1) if verdict != "ok" else 0,
        skipped=numbers.get("skipped", 0),
    )
    alone = step.alone if code == TESTS_FAILED and 0 < failed <= MAX_ALONE else None
    return add_second_run(outcome, run_step(alone, place)) if alone else outcome


def add_second_run(first: Outcome, second: Outcome) -> Outcome:
    """A step in which some tests failed, and what they did alone."""
    verdict = second.verdict
    if verdict == "ok":
        verdict = f"ok, {first.failed} of them only when run alone"
    return dataclasses.replace(
        second,
        step=first.step,
        verdict=verdict,
        duration_s=first.duration_s + second.duration_s,
        passed=first.passed + second.passed,
        skipped=first.skipped,
    )


def summarize(outcomes: list[Outcome]) -> int:
    """Print the table and the line with the totals; return the exit code."""
    print(f"\n{'step':<14}{'time':>8}{'passed':>8}{'failed':>8}{'skipped':>8}")
    for one in outcomes:
        numbers = f"{one.passed:>8}{one.failed:>8}{one.skipped:>8}"
        if not one.step.counts:
            numbers = " " * 24
        print(f"{one.step.name:<14}{one.duration_s:>7.1f}s{numbers}  {one.verdict}")
    broken = [one.step.name for one in outcomes if not one.is_ok]
    print(f"\nFailed: {', '.join(broken)}" if broken else "\nAll steps passed.")
    passed = sum(one.passed for one in outcomes)
    failed = sum(one.failed for one in outcomes)
    skipped = sum(one.skipped for one in outcomes)
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return 1 if broken else 0


def exists(step: Step) -> bool:
    """False, with a line, for a folder of tests that nobody has begun yet."""
    folders = [arg for arg in step.command if arg.startswith("tests/")]
    missing = [folder for folder in folders if not (ROOT / folder).exists()]
    for folder in missing:
        print(f"== {step.name}: there is no {folder} yet", flush=True)
    return not missing


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in GROUPS]
    if unknown or not names:
        print(f"usage: steps.py NAME ...; known: {', '.join(GROUPS)}", file=sys.stderr)
        return 2
    steps = [step for name in names for step in GROUPS[name] if exists(step)]
    return summarize(
        [
            run_step(step, f"{number}/{len(steps)}")
            for number, step in enumerate(steps, 1)
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
