"""The wheel and the sdist: what is in them, and that the wheel imports."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "tests", "examples", "docs", "fuzz", "benchmarks", "changes", ".ci")
NOT_OURS = {"__pycache__", "_build", "findings"}
TOP_FILES = {
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
    "run-example",
    "run-tests",
}


def build(source: Path, into: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(into)],
        cwd=source,
        check=True,
        capture_output=True,
        timeout=60,
    )


def contents(wheel: Path) -> dict[str, bytes]:
    """What is in a wheel; RECORD, the list of it, follows from the rest."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/RECORD")]
        return {name: archive.read(name) for name in names}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def unpacked(built: Path) -> Path:
    """The folder of the sdist's tree."""
    (path,) = built.glob("*.tar.gz")
    # In another process: which arguments avoid a warning depends on the version.
    unpack = [sys.executable, "-m", "tarfile", "-e", str(path), str(built)]
    subprocess.run(unpack, check=True, capture_output=True, timeout=60)
    return path.with_name(path.name.removesuffix(".tar.gz"))


@pytest.fixture(scope="module")
def sdist_names(unpacked: Path) -> set[str]:
    files = [path for path in unpacked.rglob("*") if path.is_file()]
    return {path.relative_to(unpacked).as_posix() for path in files}


def test_wheel_is_for_every_platform(wheel: Path):
    assert wheel.name.startswith("dynamo_runtime_py-")
    assert wheel.name.endswith("-py3-none-any.whl")


def test_wheel_leaves_the_namespace_open(wheel_names: set[str]):
    assert "dynamo/runtime/errors.py" in wheel_names
    assert "dynamo/__init__.py" not in wheel_names
    assert "dynamo/py.typed" not in wheel_names


def test_wheel_has_nothing_but_the_package(wheel_names: set[str]):
    tops = {name.partition("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"dynamo"}
    suffixes = {Path(name).suffix for name in wheel_names if name.startswith("dynamo/")}
    assert suffixes <= {".py", ".typed", ".proto", ".pyi"}


def test_every_package_says_that_it_is_typed(wheel_names: set[str]):
    packages = {
        name.split("/")[1] for name in wheel_names if name.startswith("dynamo/")
    }
    typed = {name for name in wheel_names if name.endswith("/py.typed")}
    covered = {name.split("/")[1] for name in typed}
    assert packages == covered


def test_wheel_carries_the_licence(wheel_names: set[str]):
    assert any(name.endswith("/licenses/LICENSE") for name in wheel_names)


def test_wheel_imports_by_itself(wheel: Path, tmp_path: Path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = "import dynamo.runtime.errors as it; print(it.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)


def test_sdist_has_every_file_of_the_project(sdist_names: set[str]):
    ours = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not NOT_OURS.intersection(path.parts)
    }
    assert {name for name in sdist_names if "/" in name} == ours
    top = {name for name in sdist_names if "/" not in name}
    assert top - {".gitignore", "PKG-INFO"} == TOP_FILES


def test_sdist_keeps_the_commands_of_the_readme_executable(unpacked: Path):
    for name in ("run-example", "run-tests", ".ci/run", ".ci/setup"):
        assert os.access(unpacked / name, os.X_OK), name


def test_wheel_built_from_the_sdist_is_the_same(
    wheel: Path, unpacked: Path, tmp_path: Path
):
    build(unpacked, tmp_path)
    (again,) = tmp_path.glob("*.whl")
    assert again.name == wheel.name
    assert contents(again) == contents(wheel)
