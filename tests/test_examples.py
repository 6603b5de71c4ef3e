"""Runs every example, every how-to, and what the README has of programs and commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text(encoding="utf-8")
LIMIT_S = 60
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# What an example must print: these lines, in this order, others may stand between.
EXPECTED = {
    "hello": [
        "client: found 2 worker(s)",
        "client: Hello, Ada from (anna|bert)",
        "client: Hello, Grace from (anna|bert)",
        "client: Hello, Barbara from (anna|bert)",
        "client: Hello, Frances from (anna|bert)",
        "anna: ended with exit code 0",
        "bert: ended with exit code 0",
        "It worked.",
    ],
    "typed_endpoint.py": [
        "plate 1: soup",
        "plate 2: soup",
        "refused: InvalidRequest, raised as ValueError",
    ],
    "errors.py": [
        "--- bad argument",
        "item: first item",
        "InvalidArgument: the request is wrong",
        "--- bug",
        "item: first item",
        "RemoteError: InvalidRequest: ValueError: no such thing",
        "its class: InvalidRequest",
        "the handler raised: ValueError",
        "a ConnectionError: False",
        "--- database",
        "item: first item",
        "RemoteError: Unavailable: ConnectionRefusedError: database is down",
        "its class: Unavailable",
        "the handler raised: ConnectionRefusedError",
        "a ConnectionError: False",
        "--- nobody serves this",
        "NoInstances, retryable: True",
    ],
    "cancellation.py": [
        "the handler was stopped: by leaving",
        "the handler was stopped: by context",
        "the caller had a time limit",
        "the handler was stopped: by time limit",
    ],
    "streamed_input.py": [
        "mean or total: 1.0",
        "mean or total: 1.5",
        "mean or total: 3.0",
        "mean or total: 9.0",
        "asked: 10",
        "answered: 10.0",
        "asked: 20",
        "answered: 15.0",
        "4 means, and the source was closed",
        "the caller's own error: the sensor was unplugged",
    ],
    "unary.py": [
        "4 words: ['one', 'answer', 'is', 'enough']",
        "['in', 'time']",
        "refused: InvalidRequest: ValueError: nothing to tokenize",
        "not unary: unary endpoint returned multiple responses",
    ],
    "blocking_handler.py": [
        "8 calls, 40 tokens",
        "faster than one after another: True",
        "token 0",
        "the model was released: True",
    ],
    "pipeline.py": [
        "front end: request request-1",
        "back end: request request-1 for ada",
        "client: NAMED",
        "client: STREAMING",
        "client: ENDPOINTS",
    ],
}
README_EXPECTED = {"./run-example": EXPECTED["hello"]}
# How many failures of its handler an example provokes; the worker logs each.
FAILURES = {"errors.py": 3, "typed_endpoint.py": 1, "unary.py": 1}
README_FAILURES = (0, 1, 0)
# How many tests a how-to has beyond those it writes out: one is made for eight places.
HOW_TOS = {"test-your-service.md": 7, "resume-a-broken-stream.md": 0}
LOGGED_FAILURE = re.compile(
    r"^handler \w+ of \S+ (failed$|refused a request: )", re.MULTILINE
)

pytestmark = pytest.mark.slow


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(README) if kind == language]


def commands() -> list[str]:
    return [line for text in blocks("bash") for line in text.splitlines()]


@pytest.fixture
def private(tmp_path: Path) -> dict[str, str]:
    """An environment in which the default backend keeps its files in tmp_path."""
    names = ("TMPDIR", "HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "XDG_STATE_HOME")
    return {
        **os.environ,
        **dict.fromkeys(names, str(tmp_path)),
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONUNBUFFERED": "1",
        "DYN_EXAMPLE_PYTHON": sys.executable,
    }


def run(command: list[str], environment: dict[str, str], failures: int = 0) -> str:
    """Run a program to its end and return its output.

    It must succeed, and complain of nothing but that many failures of its handler.
    """
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    if failures:
        assert len(LOGGED_FAILURE.findall(done.stderr)) == failures, done.stderr
    else:
        assert done.stderr == ""
    return done.stdout


def assert_lines_in_order(output: str, patterns: list[str]) -> None:
    lines = iter(output.splitlines())
    for pattern in patterns:
        literal = re.escape(pattern).replace(r"\(anna\|bert\)", "(anna|bert)")
        found = any(re.fullmatch(literal, line) for line in lines)
        assert found, f"no line {pattern!r} (in this place) in:\n{output}"


def test_every_example_is_tested():
    found = {path.name for path in EXAMPLES.iterdir() if path.name[0] not in "_."}
    assert found == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_example_prints_what_it_promises(name: str, private: dict[str, str]):
    command = [sys.executable, str(EXAMPLES / name)]
    output = run(command, private, FAILURES.get(name, 0))
    assert_lines_in_order(output, EXPECTED[name])


def test_hello_uses_both_workers(private: dict[str, str]):
    output = run([sys.executable, str(EXAMPLES / "hello")], private)
    assert output.count("from anna") == output.count("from bert") == 2


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_readme_program_prints_what_the_readme_says(
    number: int, private: dict[str, str], tmp_path: Path
):
    program = tmp_path / "program.py"
    program.write_text(blocks("python")[number], encoding="utf-8")
    output = run([sys.executable, str(program)], private, README_FAILURES[number])
    assert output == blocks("text")[number]


@pytest.mark.parametrize("command", sorted(README_EXPECTED))
def test_readme_command_works(command: str, private: dict[str, str]):
    assert command in commands()
    assert_lines_in_order(run([command], private), README_EXPECTED[command])


def test_every_how_to_is_tested():
    found = {path.name for path in (ROOT / "docs/how-to").iterdir()}
    assert found == set(HOW_TOS)


@pytest.mark.parametrize("name", sorted(HOW_TOS))
def test_how_to_is_a_suite_that_passes(name: str, tmp_path: Path) -> None:
    how_to = (ROOT / "docs/how-to" / name).read_text(encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    files = [text for kind, text in BLOCK.findall(how_to) if kind == "python"]
    for text in files:
        file_name, _, code = text.removeprefix("# ").partition("\n")
        with (tmp_path / file_name).open("a", encoding="utf-8") as file:
            file.write(f"{code}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    tests = sum(text.count("async def test_") for text in files) + HOW_TOS[name]
    assert f"{tests} passed" in done.stdout, done.stdout
    assert done.returncode == 0


def test_readme_has_no_command_that_nobody_tries():
    # ./run-tests is what runs this test.
    assert set(commands()) == {*README_EXPECTED, "./run-tests"}
