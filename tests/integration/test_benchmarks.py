"""The benchmark itself, in its smallest form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("ours", "ours-callhome", "floor")
WORKLOADS = {"calls-32": "calls_per_s", "streams-32-plain": "items_per_s"}
LIMIT_S = 90

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux", reason="reads clocks of other processes"
    ),
]


def processes_that_know(folder: Path) -> list[str]:
    """Processes with the folder in their environment."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = environment.read_bytes()
        except OSError:  # ended meanwhile, or of another user
            continue
        if os.fsencode(folder) in text:
            found.append(environment.parent.name)
    return found


def test_a_quick_round_measures_judges_and_leaves_nothing(tmp_path: Path) -> None:
    out, temporary = tmp_path / "out", tmp_path / "temporary"
    temporary.mkdir()
    options = ["--quick", "--rounds", "1", "--loop", "asyncio", "--out", str(out)]
    options += [word for name in WORKLOADS for word in ("--only", name)]
    options += [word for name in PEERS for word in ("--peer", name)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *options],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = json.loads((out / "bench.json").read_text())
    for workload, metric in WORKLOADS.items():
        rounds = written["results"][workload]
        assert {"ours", "floor"} <= set(rounds) <= set(PEERS)
        for peer, (measured,) in rounds.items():
            assert measured.get(metric, 0) > 0, (workload, peer, measured)
    (share,) = [one for one in written["bars"] if "framed floor" in one["line"]]
    assert 0 < share["reached"]["median"] < 1
    assert share["verdict"] in done.stdout
    assert list(temporary.iterdir()) == []
    assert processes_that_know(temporary) == []
