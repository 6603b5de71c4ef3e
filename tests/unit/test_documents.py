"""What README.md, architecture.md and the table of faults say is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "dynamo" / "runtime"
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs/design/architecture.md").read_text(encoding="utf-8")
SEMANTICS = (ROOT / "docs/semantics.md").read_text(encoding="utf-8")
FAULTS = (ROOT / "tests/faults/README.md").read_text(encoding="utf-8")


def section(document: str, title: str) -> str:
    return document.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def blocks(language: str) -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, README, re.MULTILINE | re.DOTALL)


def test_readme_first_screen_has_two_commands_and_nothing_else_to_type():
    screen = README.partition("\n## ")[0]
    assert blocks("bash") == ["./run-example\n", "./run-tests\n"]
    assert screen.count("```") == 4
    assert len(screen.splitlines()) <= 24


def test_readme_first_program_is_short():
    code = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(code) <= 20


def test_readme_names_no_file_that_is_missing():
    named = set(re.findall(r"`((?:src|tests|examples|docs)/[\w./-]*)`", README))
    named |= set(re.findall(r"\]\(([\w./-]+)\)", README))
    assert named
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_readme_explains_every_setting_and_no_other():
    rows = section(README, "Settings")
    first_cells = "\n".join(re.findall(r"^\| ([^|]+) \|", rows, re.MULTILINE))
    source = (SOURCE / "_config.py").read_text(encoding="utf-8")
    read = set(re.findall(r'"([A-Z]+(?:_[A-Z]+)+)"', source))
    # Where the store lies for which no setting was made.
    read -= {"XDG_RUNTIME_DIR"}
    assert set(re.findall(r"`([A-Z_]+)`", first_cells)) == read


def test_architecture_names_files_that_exist():
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", ARCHITECTURE)) - {"__init__.py"}
    assert len(named) > 20
    assert {name for name in named if not (SOURCE / name).exists()} == {
        "src/dynamo/runtime/"
    }


def test_architecture_names_classes_and_methods_that_exist():
    sources = [path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")]
    named = re.findall(r"`(_?[A-Z]\w*[a-z]\w*)(?:\.(\w+))?`", ARCHITECTURE)
    assert len(named) > 15
    for name, method in named:
        begins = re.compile(rf"^class {name}\b", re.MULTILINE)
        (owner,) = [text for text in sources if begins.search(text)]
        assert not method or re.search(
            rf"^    (async )?def {method}\b", owner, re.MULTILINE
        )


def test_architecture_names_every_room_of_the_package():
    rooms = {one.name for one in SOURCE.iterdir() if not one.name.startswith("__")}
    rooms -= {"py.typed", "_version.py"}
    table = section(ARCHITECTURE, "Layers")
    assert {room for room in rooms if f"`{room}" not in table} == set()


def test_table_of_faults_names_tests_that_exist():
    rows = re.findall(
        r"^\| ([^-|][^|]*) \| ([^|]*) \| ([^|]*) \|", FAULTS, re.MULTILINE
    )
    rows = [row for row in rows if row[0] != "Row"]
    assert len(rows) > 60
    for name, _, tests in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
        assert named or tests.startswith("Cannot apply: "), f"{name} has no test"
        for path, test in named:
            text = (ROOT / "tests" / path).read_text(encoding="utf-8")
            assert f"def {test}(" in text, f"{name} names {path}::{test}"


def test_each_row_of_the_semantics_names_tests_that_exist():
    rows = [row for row in SEMANTICS.splitlines() if row.startswith("| ")]
    rows = [row for row in rows if not row.startswith("| What happens |")]
    assert len(rows) > 35
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row.rsplit(" | ", 1)[1])
        assert named, row
        for path, test in named:
            text = (ROOT / "tests" / path).read_text(encoding="utf-8")
            assert f"def {test}(" in text, f"{path}::{test} is named by {row}"


def test_each_bound_of_the_semantics_is_measured():
    rows = [row for row in SEMANTICS.splitlines() if row.startswith("| ")]
    rows = [row for row in rows if not row.startswith("| What happens |")]
    bound = [row for row in rows if row.split(" | ")[-2] not in ("-", "as above")]
    assert len(bound) > 40
    for row in bound:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row.rsplit(" | ", 1)[1])
        texts = [body_of(path, test) for path, test in named]
        measured = any(".judge(" in text for text in texts)
        # Nobody waits a minute for the kernel.
        assert measured or "TCP keep-alive" in row, row


def body_of(path: str, test: str) -> str:
    text = (ROOT / "tests" / path).read_text(encoding="utf-8")
    body = text.partition(f"def {test}(")[2]
    return re.split(
        r"^(?:async )?def |^@|^class ", body, maxsplit=1, flags=re.MULTILINE
    )[0]


def test_the_semantics_name_settings_that_are_read():
    source = (SOURCE / "_config.py").read_text(encoding="utf-8")
    named = set(re.findall(r"`(DYN_[A-Z_]+)`", SEMANTICS))
    assert len(named) > 6
    assert {name for name in named if f'"{name}"' not in source} == set()
