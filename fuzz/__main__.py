"""Runs the targets, each in a process of its own, and says how it went.

``python -m fuzz [--seconds N] [NAME ...]``; a finding is run again by
``python -m fuzz --replay FILE NAME``.  The last line counts targets as pytest counts tests.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

from fuzz import engines, seeds

ROOT = Path(__file__).resolve().parent.parent
FINDINGS = ROOT / "fuzz" / "findings"
# For the start of the interpreter, the seeds, and an engine that ends a little late.
EXTRA_S = 30.0

_RUNS = re.compile(r"stat::number_of_executed_units: (\d+)")


@dataclasses.dataclass
class Outcome:
    """How the run of one target ended."""

    name: str
    runs: int
    duration_s: float
    finding: str = ""

    @property
    def row(self) -> str:
        verdict = "FAILED" if self.finding else "ok"
        return f"{self.name:<34}{self.runs:>12}{self.duration_s:>8.1f}s  {verdict}"


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="targets; all if none")
    parser.add_argument("--seconds", type=float, default=5, help="per target")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--engine", choices=["auto", "atheris", "mutate"])
    parser.add_argument("--random-seed", type=int, help="of the engine 'mutate'")
    parser.add_argument("--module", default="fuzz.targets", help="that has TARGETS")
    parser.add_argument("--findings", type=Path, default=FINDINGS, help="a folder")
    parser.add_argument("--extra", type=float, default=EXTRA_S, help="seconds to hang")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run one input")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.engine in (None, "auto"):
        options.engine = "atheris" if engines.has_atheris() else "mutate"
    return options


# ------------------------------------------------------------- in a target's own process


def load(options: argparse.Namespace) -> ModuleType:
    """The module of the targets, and with it what they test, instrumented if need be."""
    if options.child and options.engine == "atheris":
        atheris = importlib.import_module("atheris")  # not everywhere installed
        with atheris.instrument_imports(include=["dynamo.runtime"]):
            return importlib.import_module(options.module)
    return importlib.import_module(options.module)


def run_child(options: argparse.Namespace) -> int:
    (name,) = options.names
    target = load(options).TARGETS[name]
    good = seeds.seeds_of(target.seeds)
    prefix = f"{options.findings}{os.sep}{name}-"
    if options.engine == "atheris":
        engines.run_atheris(target.run, good, options.seconds, prefix)
    seed = options.random_seed
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    print(f"--random-seed {seed}")
    chance = random.Random(seed)
    return engines.run_mutations(target.run, good, options.seconds, prefix, chance)


def replay(options: argparse.Namespace) -> int:
    (name,) = options.names
    print(load(options).TARGETS[name].run(options.replay.read_bytes()))
    return 0


# ----------------------------------------------------------------- in the one over them


def run_target(name: str, options: argparse.Namespace) -> Outcome:
    command = [sys.executable, "-m", "fuzz", "--child", name]
    for word in ("seconds", "engine", "module", "findings", "random_seed"):
        value = getattr(options, word)
        if value is not None:
            command += [f"--{word.replace('_', '-')}", str(value)]
    started = time.monotonic()
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=options.seconds + options.extra,
            check=False,
        )
        output, finding = done.stdout, done.stdout if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        output = str(error.output or "")
        finding = f"{output}\nkilled: still running after {error.timeout:g} s\n"
    counted = _RUNS.findall(output)
    runs = int(counted[-1]) if counted else 0
    if not finding and runs == 0:
        finding = f"{output}\nthe target was never run\n"
    return Outcome(name, runs, time.monotonic() - started, finding)


def run_all(options: argparse.Namespace) -> int:
    names = options.names or list(load(options).TARGETS)
    options.findings.mkdir(parents=True, exist_ok=True)
    print(f"{len(names)} targets, {options.seconds:g} s each, by {options.engine}")
    print(f"{'target':<34}{'runs':>12}{'time':>9}", flush=True)
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(max(1, options.jobs)) as pool:
        futures = [pool.submit(run_target, name, options) for name in names]
        for future in concurrent.futures.as_completed(futures):
            outcome = future.result()
            failed += bool(outcome.finding)
            print(outcome.row, flush=True)
            if outcome.finding:
                print(outcome.finding, flush=True)
    print(f"{len(names) - failed} passed, {failed} failed")
    return 1 if failed else 0


def main(words: list[str]) -> int:
    options = parse(words)
    if options.child:
        return run_child(options)
    return replay(options) if options.replay else run_all(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
