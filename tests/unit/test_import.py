from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import dynamo.runtime
from dynamo import _core

SOURCE = Path(dynamo.runtime.__file__).parents[2]


def run(code: str, path: Path = SOURCE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_public_name_is_there():
    for module in (dynamo.runtime, _core):
        assert sorted(module.__all__) == sorted(set(module.__all__))
        for name in module.__all__:
            assert getattr(module, name) is not None


def test_both_modules_have_the_same_classes():
    shared = set(dynamo.runtime.__all__) & set(_core.__all__) - {"__version__"}
    assert len(shared) == 5
    for name in shared:
        assert getattr(dynamo.runtime, name) is getattr(_core, name)


def test_dynamo_and_dynamo_llm_are_namespaces():
    for name in ("dynamo", "dynamo.llm"):
        assert importlib.util.find_spec(name).origin is None


def test_importing_brings_nothing_heavy_and_configures_no_logging():
    done = run(
        "import sys, logging, dynamo.runtime, dynamo._core\n"
        "heavy = {'pydantic', 'numpy', 'uvloop', 'grpc', 'nats', 'starlette'}\n"
        "heavy |= {'pytest', 'dynamo.runtime.testing'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert not logging.getLogger().handlers\n"
        "assert not logging.getLogger('dynamo').handlers\n"
    )
    assert done.returncode == 0, done.stderr


def mixed(tmp_path: Path) -> Path:
    shutil.copytree(SOURCE / "dynamo" / "runtime", tmp_path / "dynamo" / "runtime")
    return tmp_path


def test_a_foreign_core_is_refused_with_both_names(tmp_path):
    path = mixed(tmp_path)
    (path / "dynamo" / "_core.py").write_text("raise SystemExit('imported')")
    done = run("import dynamo.runtime", path)
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith("ImportError: ")
    for word in ("dynamo-runtime-py", "ai-dynamo-runtime", "_core.py", "uninstall"):
        assert word in message


def test_a_missing_core_is_refused(tmp_path):
    done = run("import dynamo.runtime", mixed(tmp_path))
    assert "dynamo-runtime-py" in done.stderr.splitlines()[-1]
