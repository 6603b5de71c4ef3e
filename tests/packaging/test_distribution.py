"""The wheel and the sdist: what is in them, and that the wheel imports."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=60,
    )
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
def sdist_names(built: Path) -> set[str]:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


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


def test_sdist_has_what_a_packager_needs(sdist_names: set[str]):
    wanted = {"pyproject.toml", "README.md", "LICENSE", "Makefile", "run-tests"}
    assert wanted | {"tests/conftest.py", "src/dynamo/runtime/errors.py"} <= sdist_names


def test_sdist_has_no_stray_folders(sdist_names: set[str]):
    tops = {name.partition("/")[0] for name in sdist_names if "/" in name}
    assert tops <= {"src", "tests", "examples", "docs", "fuzz", "changes", ".ci"}
