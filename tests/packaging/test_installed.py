"""The package as pip installs it: it runs, it is small, it is imported quickly."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
LIMIT_BYTES = 20 * 1024 * 1024
PAIRS = 7
TIMED_IMPORT = """
import time
before = time.process_time()
import dynamo.runtime
print(time.process_time() - before)
"""

pytestmark = pytest.mark.slow


def run(command: list[str | Path], folder: Path, **environment: str) -> str:
    """Run a program outside the tree, with nothing of ours in its environment."""
    steering = ("DYN_", "PYTHON")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(steering)}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**inherited, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with our wheel, and a way to what we depend on."""
    folder = tmp_path_factory.mktemp("installed")
    run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        ROOT,
    )
    (wheel,) = folder.glob("*.whl")
    home = folder / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", home], folder)
    run(
        [
            *(sys.executable, "-m", "pip", "--python", home / "bin" / "python"),
            *("install", "--quiet", "--no-deps", "--no-index", wheel),
        ],
        folder,
    )
    (packages,) = home.glob("lib/python*/site-packages")
    # Its own .pth files are not read there: an editable install of ours stays out.
    dependencies = sysconfig.get_path("purelib")
    (packages / "dependencies.pth").write_text(f"{dependencies}\n")
    return packages


@pytest.fixture(scope="module")
def python(site: Path) -> Path:
    return site.parents[2] / "bin" / "python"


def test_the_installed_package_is_what_is_imported(python: Path, site: Path):
    program = "import dynamo.runtime as it; print(it.__file__)"
    where = run([python, "-c", program], site.parent)
    assert Path(where.strip()) == site / "dynamo" / "runtime" / "__init__.py"


def test_the_hello_example_runs_from_it(python: Path, tmp_path: Path):
    shutil.copytree(ROOT / "examples" / "hello", tmp_path / "hello")
    output = run(
        [python, "hello"], tmp_path, TMPDIR=str(tmp_path), XDG_RUNTIME_DIR=str(tmp_path)
    )
    assert output.endswith("It worked.\n")
    assert output.count("client: Hello, ") == 4


def needed_by(distribution: metadata.Distribution) -> Iterator[metadata.Distribution]:
    """What a distribution needs without extras, as installed in this environment."""
    for text in distribution.requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found = metadata.distribution(requirement.name)
            yield found
            yield from needed_by(found)


def size_of(distribution: metadata.Distribution) -> int:
    """Bytes of the files it installed, bytecode included where it was compiled."""
    paths = [Path(str(one.locate())) for one in distribution.files or []]
    return sum(path.stat().st_size for path in paths if path.is_file())


def test_it_takes_less_than_20_mb_with_all_it_needs(site: Path):
    (ours,) = metadata.distributions(path=[str(site)], name="dynamo-runtime-py")
    sizes = {ours.name: size_of(ours)}
    sizes |= {one.name: size_of(one) for one in needed_by(ours)}
    print({name: f"{size / 2**20:.1f} MB" for name, size in sizes.items()})
    assert all(size > 0 for size in sizes.values())
    assert sum(sizes.values()) < LIMIT_BYTES


@pytest.mark.interop
def test_it_is_imported_faster_than_the_genuine_wheel(
    python: Path, genuine_python: str, tmp_path: Path
):
    """Processor time, in turns: what else the machine does counts for both alike."""

    def import_s(interpreter: str | Path) -> float:
        return float(run([interpreter, "-c", TIMED_IMPORT], tmp_path))

    pairs = [(import_s(python), import_s(genuine_python)) for _ in range(PAIRS)]
    ours, genuine = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(f"import: ours {ours * 1e3:.0f} ms, genuine {genuine * 1e3:.0f} ms")
    assert ours < genuine
