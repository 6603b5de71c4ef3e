"""The guards of conftest.py and conformance.py: each must catch what it is there for."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import conformance
import pytest
from blockbuster import BlockingError

ROOT = Path(__file__).resolve().parents[2]
PRETENDED_SOURCE = str(ROOT / "src" / "dynamo" / "runtime" / "_pretended.py")


def run_code_of_ours(text: str) -> None:
    """Execute text as if it stood in a file of the package."""
    exec(compile(text, PRETENDED_SOURCE, "exec"))


SUITE = {
    "leaving": """
        import asyncio
        import pytest
        @pytest.mark.asyncio(loop_factories=["asyncio"])
        async def test_it():
            global kept
            kept = asyncio.create_task(asyncio.Event().wait(), name="lingerer")
        """,
    "skipping": """
        import pytest
        def test_it():
            pytest.skip("no luck")
        """,
    "skipping_module": """
        import pytest
        pytest.skip("no luck at all", allow_module_level=True)
        """,
    "expected_failure": """
        import pytest
        @pytest.mark.xfail
        def test_it():
            assert 0
        """,
    "interop": """
        import pytest
        @pytest.mark.interop
        def test_it():
            assert 0
        """,
    "environment": """
        import os
        def test_it():
            assert "DYN_LOG" not in os.environ
        """,
}


def run_suite(folder: Path, **environment: str) -> str:
    """Run the files of SUITE under this project's conftest in another process."""
    for name, text in SUITE.items():
        (folder / f"test_{name}.py").write_text(textwrap.dedent(text))
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "-rA"]
    settings += ["--continue-on-collection-errors", "-p", "conftest"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *settings, "."],
        cwd=folder,
        env={**os.environ, **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What such a run prints where skips are ``allowed`` and where ``forbidden``."""
    variables = {"DYN_LOG": "debug", "DYN_GENUINE_PYTHON": ""}
    return {
        word: run_suite(
            tmp_path_factory.mktemp(word), DYN_TESTS_FORBID_SKIPS=flag, **variables
        )
        for word, flag in (("allowed", "0"), ("forbidden", "1"))
    }


async def test_each_async_test_runs_on_both_loops(request: pytest.FixtureRequest):
    pytest.importorskip("uvloop")
    kind = type(asyncio.get_running_loop()).__module__.partition(".")[0]
    assert f"[{kind}]" in request.node.name


async def test_blocking_call_of_ours_is_caught():
    with pytest.raises(BlockingError, match=r"time\.sleep"):
        run_code_of_ours("import time\ntime.sleep(0)")


@pytest.mark.may_block
async def test_blocking_call_passes_where_it_is_meant():
    run_code_of_ours("import time\ntime.sleep(0)")


def test_left_task_fails_its_test(outputs: dict[str, str]):
    assert "tasks left behind" in outputs["allowed"]
    assert "lingerer" in outputs["allowed"]


def test_skips_are_skips(outputs: dict[str, str]):
    assert "3 skipped" in outputs["allowed"]
    assert "interop: DYN_GENUINE_PYTHON names no interpreter" in outputs["allowed"]


@pytest.mark.parametrize(
    "line",
    [
        "FAILED test_skipping.py::test_it",
        "ERROR test_interop.py::test_it",
        "ERROR test_skipping_module.py",
    ],
)
def test_skips_can_be_forbidden(outputs: dict[str, str], line: str):
    assert line not in outputs["allowed"]
    assert line in outputs["forbidden"]
    assert "no luck at all" in outputs["forbidden"]


@pytest.mark.parametrize("word", ["allowed", "forbidden"])
def test_expected_failure_is_no_skip(outputs: dict[str, str], word: str):
    assert "XFAIL test_expected_failure.py::test_it" in outputs[word]


def test_variables_that_steer_the_runtime_are_removed(outputs: dict[str, str]):
    assert "PASSED test_environment.py::test_it" in outputs["allowed"]


# ---------------------------------------------------------------------- conformance

KNOWN_CASE, KNOWN_LINES = next(iter(conformance.KNOWN.items()))


def judge(name: str, *details: str) -> list[str]:
    """The words for a run of one failed case and a passed one after it."""
    output = [f"FAIL  0.01s {name}\n", *(f"      {one}\n" for one in details)]
    output += ["ok    0.02s errors.words\n", "1 passed, 1 failed in 1 s\n"]
    return [one.word for one in conformance.results(output)]


def test_malformed_expectation_is_known_where_it_differs_as_it_must():
    assert judge(KNOWN_CASE, *KNOWN_LINES) == ["", "known", "ok"]


@pytest.mark.parametrize(
    ("name", "details"),
    [
        (KNOWN_CASE, KNOWN_LINES[:-1]),
        (KNOWN_CASE, (*KNOWN_LINES, "$[2]: unexpected 1")),
        (KNOWN_CASE, ()),
        ("responses.another", KNOWN_LINES),
    ],
)
def test_any_other_difference_is_a_failure(name: str, details: tuple[str, ...]):
    assert judge(name, *details) == ["", "FAIL", "ok"]


def test_the_runner_of_the_conformance_suite_must_come_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program = "print('ok    0.01s errors.words'); raise SystemExit(3)"
    (tmp_path / "runner.py").write_text(program)
    monkeypatch.setattr(conformance, "SUITE", tmp_path)
    counts = conformance.total(conformance.run_pair("ours", "ours"))
    assert counts == {"passed": 1, "failed": 1}
