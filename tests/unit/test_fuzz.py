"""The fuzzing itself: each reader has a target, and what a target finds is reported."""

from __future__ import annotations

import importlib
import os
import pkgutil
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dynamo.runtime import _wire
from fuzz import engines, seeds
from fuzz.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ["mutate", *(["atheris"] if engines.has_atheris() else [])]
READING = ("decode_", "parse_", "read_", "split_", "key_of_")
MUTATIONS_PER_TARGET = 300

BROKEN_TARGETS = """
    import dataclasses
    import time

    kept = []

    def wrong(data):
        return {b"good": 1}.get(data[:4]) or {}[data[:1]]

    def growing(data):
        kept.extend([object() for _ in range(20)])

    def hanging(data):
        time.sleep(60)

    def right(data):
        return len(data)

    @dataclasses.dataclass
    class Target:
        run: object
        seeds: str = "addresses"

    TARGETS = {one.__name__: Target(one) for one in (wrong, growing, hanging, right)}
    """


def names_of_readers() -> set[str]:
    """Public functions and classes of ``_wire`` that read what a peer wrote."""
    found = set()
    for info in pkgutil.iter_modules(_wire.__path__):
        module = importlib.import_module(f"{_wire.__name__}.{info.name}")
        for name, each in vars(module).items():
            reads = name.startswith(READING) or name.endswith(("Reader", "Receiver"))
            if reads and each.__module__ == module.__name__:
                found.add(f"{info.name}.{name}")
    return found - {"framing.FrameReader"}  # the base of the others


def fuzz(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), str(folder)])
    return subprocess.run(
        [sys.executable, "-m", "fuzz", "--findings", str(folder), *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for findings, with a module of targets that are broken on purpose."""
    folder = tmp_path_factory.mktemp("findings")
    (folder / "broken_targets.py").write_text(textwrap.dedent(BROKEN_TARGETS))
    return folder


def test_every_reader_of_the_wire_has_a_target() -> None:
    covered = {name for target in TARGETS.values() for name in target.covers}
    assert (
        covered >= names_of_readers() > {"callhome.AckReader", "records.decode_record"}
    )


@pytest.mark.parametrize("name", TARGETS)
def test_good_input_and_what_is_near_it_finds_nothing(name: str) -> None:
    target = TARGETS[name]
    chance = random.Random(name)
    good = seeds.seeds_of(target.seeds)
    assert len(good) > 2
    outcomes = {target.run(seed) for seed in good}
    for _ in range(MUTATIONS_PER_TARGET):
        outcomes.add(target.run(engines.mutated(chance, good)))
    assert len(outcomes) > 1


@pytest.mark.parametrize("engine", ENGINES)
def test_undocumented_exception_fails_the_run_and_can_be_replayed(
    engine: str, folder: Path
) -> None:
    broken = ["--module", "broken_targets", "wrong"]
    done = fuzz("--seconds", "5", "--engine", engine, *broken, folder=folder)
    assert done.returncode == 1
    assert "KeyError" in done.stdout
    assert done.stdout.endswith("0 passed, 1 failed\n")
    (*_, finding) = sorted(folder.glob("wrong-crash-*"))
    again = fuzz("--replay", str(finding), *broken, folder=folder)
    assert again.returncode != 0
    assert "KeyError" in again.stderr


@pytest.mark.parametrize("engine", ENGINES)
def test_target_that_keeps_memory_fails_the_run(engine: str, folder: Path) -> None:
    broken = ["--module", "broken_targets", "growing"]
    done = fuzz("--seconds", "10", "--engine", engine, *broken, folder=folder)
    assert done.returncode == 1
    assert "objects more are alive" in done.stdout


def test_hanging_target_is_ended_and_fails_the_run(folder: Path) -> None:
    broken = ["--module", "broken_targets", "hanging"]
    done = fuzz("--seconds", "0.1", "--extra", "1", *broken, folder=folder)
    assert done.returncode == 1
    assert "killed: still running after 1.1 s" in done.stdout


@pytest.mark.parametrize("engine", ENGINES)
def test_target_without_findings_passes(engine: str, folder: Path) -> None:
    broken = ["--module", "broken_targets", "right"]
    done = fuzz("--seconds", "1", "--engine", engine, *broken, folder=folder)
    assert done.returncode == 0
    assert done.stdout.endswith("1 passed, 0 failed\n")
