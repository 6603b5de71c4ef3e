"""The runner of steps, .ci/steps.py: when it runs tests again, and what it says then."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The runner of steps, in a project that has one folder of tests."""
    spec = importlib.util.spec_from_file_location("steps", ROOT / ".ci" / "steps.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    monkeypatch.setitem(sys.modules, "steps", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    # These tests themselves may run beside others.
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return module


CROWDED = """
import os
import pytest

@pytest.mark.parametrize("number", range({tests}))
def test_it(number):
    beside = "PYTEST_XDIST_WORKER" in os.environ
    assert not (beside if {alone} else True) or number >= {failing}
"""


def run_crowded(
    steps: ModuleType, folder: Path, failing: int, *, alone: bool
) -> tuple[Any, int]:
    """The outcome of a step whose first tests fail, or fail where others run too."""
    text = CROWDED.format(tests=8, failing=failing, alone=alone)
    (folder / "test_crowded.py").write_text(text)
    step = steps.tests("crowded", "-p", "no:asyncio", "-n", "1", ".", limit_s=60)
    outcome = steps.run_step(step, "1/1")
    return outcome, steps.summarize([outcome])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failing", "alone", "verdict", "numbers"),
    [
        (0, True, "ok", (8, 0)),
        (2, True, "ok, 2 of them only when run alone", (8, 0)),
        (2, False, "FAILED", (6, 2)),
        (6, True, "FAILED", (2, 6)),
    ],
)
def test_only_a_few_tests_may_fail_beside_others_and_pass_alone(
    steps: ModuleType,
    tmp_path: Path,
    failing: int,
    alone: bool,
    verdict: str,
    numbers: tuple[int, int],
):
    outcome, code = run_crowded(steps, tmp_path, failing, alone=alone)
    assert outcome.verdict == verdict
    assert (outcome.passed, outcome.failed) == numbers
    assert code == (0 if verdict.startswith("ok") else 1)
