"""The fragments in ``changes/``, which the next release's part of the changelog is made of."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FRAGMENT = re.compile(
    r"(\+[a-z0-9-]+|\d+)\.(added|changed|deprecated|removed|fixed|security)\.md"
)
FRAGMENTS = sorted((ROOT / "changes").glob("*.md"))
TEXTS = [path for path in FRAGMENTS if path.name != "README.md"]


def towncrier(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "towncrier", "build", "--version", "1.2.3", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of what towncrier reads and writes."""
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "changes").mkdir()
    shutil.copy(ROOT / "changes" / "template.md.jinja", tmp_path / "changes")
    return tmp_path


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_fragment_is_a_sentence_under_a_well_formed_name(path: Path) -> None:
    assert FRAGMENT.fullmatch(path.name)
    assert re.fullmatch(r"\S.*\.\n", path.read_text("utf-8"))


def test_release_goes_on_top_in_the_sections_of_keep_a_changelog(folder: Path) -> None:
    (folder / "changes" / "+one.fixed.md").write_text("One works.\n")
    (folder / "changes" / "7.added.md").write_text("Two is new.\n")
    head = (folder / "CHANGELOG.md").read_text("utf-8")
    done = towncrier(folder, "--yes", "--date", "2026-01-02")
    assert done.returncode == 0, done.stderr
    added = (folder / "CHANGELOG.md").read_text("utf-8").removeprefix(head)
    assert added == (
        "\n## 1.2.3 (2026-01-02)\n\n### Added\n\n* Two is new. (#7)\n\n"
        "### Fixed\n\n* One works.\n"
    )


def test_fragment_of_an_unknown_kind_is_refused(folder: Path) -> None:
    (folder / "changes" / "+one.feature.md").write_text("One is new.\n")
    done = towncrier(folder, "--draft")
    assert done.returncode == 1
    assert "Invalid news fragment name: +one.feature.md" in done.stderr
