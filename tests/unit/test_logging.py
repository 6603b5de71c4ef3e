from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo.runtime import logging as module
from dynamo.runtime.logging import (
    LogHandler,
    VllmColorFormatter,
    configure_dynamo_logging,
    configure_logger,
    configure_sglang_logging,
    configure_vllm_logging,
    construct_formatter_prefix,
    get_bool_env_var,
    log_level_mapping,
    log_message,
    python_log_level_mapping,
)

VECTORS = Path(__file__).parent.parent / "vectors"
FILTERS = json.loads((VECTORS / "obs_log_filters.json").read_text())["rows"]
TIME = re.compile(r"^\S+", re.MULTILINE)
LOGGERS = ("", "vllm", "gpu_memory_service", "tag", "vllm.v1.engine.async_llm")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No settings from outside, and loggers as they were."""
    for name in list(os.environ):
        if name.startswith(("DYN_", "VLLM_", "SGLANG_")):
            monkeypatch.delenv(name)
    before = os.environ.copy()
    loggers = [logging.getLogger(name) for name in LOGGERS]
    saved = [(x.level, x.propagate, x.handlers[:], x.filters[:]) for x in loggers]
    module._console.cache_clear()
    yield
    for logger, (level, propagate, handlers, filters) in zip(
        loggers, saved, strict=True
    ):
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = handlers
        logger.filters[:] = filters
    os.environ.clear()
    os.environ.update(before)


def record(level=20, message="hi", function="f", path="/a/b/mod.py", **fields):
    made = logging.LogRecord("n", level, path, 10, message, (), None, function)
    made.created = 1700000000.123456
    vars(made).update(fields)
    return made


def plain(text: str) -> str:
    return re.sub("\x1b\\[[0-9;]*m", "", text)


# --- filters ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row", FILTERS, ids=lambda row: f"{row['DYN_LOG']}-{'toml' in row}"
)
def test_filters_pass_what_the_genuine_ones_pass(row, monkeypatch, tmp_path, capsys):
    if row["DYN_LOG"] is not None:
        monkeypatch.setenv("DYN_LOG", row["DYN_LOG"])
    if "toml" in row:
        file = tmp_path / "logging.toml"
        file.write_text(row["toml"])
        monkeypatch.setenv("DYN_LOGGING_CONFIG_PATH", str(file))
    log_message("info", "first, to be rid of the notes", "request_span", "f", 1)
    capsys.readouterr()
    for target, words in row["passed"].items():
        for word in ("trace", "debug", "info", "warn", "error", "critical", "bogus"):
            log_message(word, word, target, "f", 1)
        seen = [line.rpartition(" ")[2] for line in capsys.readouterr().err.split("\n")]
        # The genuine runtime takes "critical" for INFO; here it is an error.
        expected = [word for word in words if word != "critical"]
        if "error" in words:
            expected.insert(expected.index("error") + 1, "critical")
        assert seen[:-1] == expected, target


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("foo=bogus,info", "ignoring `foo=bogus`: expected one of off, error, warn"),
        ("info,foo[span]=trace", "ignoring `foo[span]=trace`"),
    ],
)
def test_ignored_directives_are_told_once(text, note, monkeypatch, capsys):
    monkeypatch.setenv("DYN_LOG", text)
    LogHandler()
    LogHandler()
    assert capsys.readouterr().err.count(note) == 1


def test_a_bad_level_in_the_file_is_told(monkeypatch, tmp_path, capsys):
    file = tmp_path / "logging.toml"
    file.write_text('[log_filters]\nfoo = "loud"\n')
    monkeypatch.setenv("DYN_LOGGING_CONFIG_PATH", str(file))
    LogHandler()
    assert "'loud' for module 'foo'" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["not toml", "log_level = 5", "log_filters = 5"])
def test_a_bad_file_is_an_error_that_names_variable_and_file(
    content, monkeypatch, tmp_path
):
    file = tmp_path / "logging.toml"
    file.write_text(content)
    monkeypatch.setenv("DYN_LOGGING_CONFIG_PATH", str(file))
    with pytest.raises(ValueError, match=r"DYN_LOGGING_CONFIG_PATH: .*logging\.toml"):
        LogHandler()


# --- lines -----------------------------------------------------------------------------


def bridge_vector() -> tuple[str, list[str]]:
    text = (VECTORS / "obs_log_python_bridge.txt").read_text()
    readable, _, jsonl = text.partition("\n### JSONL\n")
    lines = [line for line in jsonl.splitlines() if '"target":"log"' in line]
    return readable.removeprefix("### readable\n").rstrip("\n"), lines


def emit_from_vector(lines: list[str]) -> None:
    handler = LogHandler()
    for line in lines:
        entry = json.loads(line)
        place, _, function = entry["log.target"].partition(".")
        level = {"WARN": "WARNING"}.get(entry["level"], entry["level"])
        made = record(getattr(logging, level), entry["message"], function, place)
        made.pathname, made.lineno = entry["log.file"], entry["log.line"]
        handler.emit(made)


def test_json_lines_are_the_genuine_ones(monkeypatch, capsys):
    monkeypatch.setenv("DYN_LOGGING_JSONL", "1")
    _, lines = bridge_vector()
    emit_from_vector(lines)
    written = capsys.readouterr().err.splitlines()
    assert len(written) == len(lines) == 11
    for ours, theirs in zip(written, lines, strict=True):
        time = json.loads(theirs)["time"]
        assert ours == theirs.replace(time, "2023-11-14T22:13:20.123456Z")


def test_readable_lines_are_the_genuine_ones(monkeypatch, capsys):
    monkeypatch.setenv("DYN_SDK_DISABLE_ANSI_LOGGING", "1")
    readable, lines = bridge_vector()
    emit_from_vector(lines)
    ours = capsys.readouterr().err.rstrip("\n")
    stamp = re.compile(r"^2\d{3}-\S+", re.MULTILINE)
    assert len(stamp.findall(ours)) == 11
    assert stamp.sub("T", ours) == stamp.sub("T", readable)


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        (10, "\x1b[34mDEBUG\x1b[0m"),
        (20, "\x1b[32m INFO\x1b[0m"),
        (25, "\x1b[32m INFO\x1b[0m"),
        (30, "\x1b[33m WARN\x1b[0m"),
        (40, "\x1b[31mERROR\x1b[0m"),
        (50, "\x1b[31mERROR\x1b[0m"),
        (60, "\x1b[31mERROR\x1b[0m"),
    ],
)
def test_colours(level, shown, monkeypatch, capsys):
    monkeypatch.setenv("DYN_LOG", "debug")
    LogHandler().emit(record(level))
    assert capsys.readouterr().err == (
        f"\x1b[2m2023-11-14T22:13:20.123456Z\x1b[0m {shown} "
        "\x1b[2mmod.f\x1b[0m\x1b[2m:\x1b[0m hi\n"
    )


def test_control_characters_are_shown_as_the_genuine_runtime_shows_them(capsys):
    text = "".join(map(chr, [*range(0x20), 0x7F, 0x80, 0x9F, 0xA0]))
    LogHandler().emit(record(message=text))
    written = capsys.readouterr().err.partition("\x1b[2m:\x1b[0m ")[2]
    assert written == (
        "".join(map(chr, range(7)))
        + r"\x07\x08"
        + "\t\n\x0b"
        + r"\x0c"
        + "".join(map(chr, range(0x0D, 0x1B)))
        + r"\x1b"
        + "\x1c\x1d\x1e\x1f"
        + r"\x7f\u{80}\u{9f}"
        + "\xa0\n"
    )


@pytest.mark.parametrize("jsonl", ["0", "on"])
def test_local_time_has_an_offset(jsonl, monkeypatch, capsys):
    monkeypatch.setenv("DYN_LOG_USE_LOCAL_TZ", "yes")
    monkeypatch.setenv("DYN_LOGGING_JSONL", jsonl)
    LogHandler().emit(record())
    written = plain(capsys.readouterr().err)
    assert re.search(r"2023-11-1\dT\d\d:\d\d:\d\d\.123456[+-]\d\d:\d\d\b", written)


@pytest.mark.parametrize(
    ("form", "jsonl", "is_json"),
    [
        (" JSONL ", "0", True),
        ("readable", "1", False),
        ("", "1", True),
        (" ", " TRUE ", True),
        ("bogus", "1", True),
        ("bogus", "y", False),
    ],
)
def test_the_format_variable_decides_before_jsonl(
    form, jsonl, is_json, monkeypatch, capsys
):
    monkeypatch.setenv("DYN_LOGGING_CONSOLE_FORMAT", form)
    monkeypatch.setenv("DYN_LOGGING_JSONL", jsonl)
    handler = LogHandler()
    assert ("bogus" in capsys.readouterr().err) == (form == "bogus")
    handler.emit(record())
    assert capsys.readouterr().err.startswith("{") == is_json


def test_json_lines_keep_text_outside_ascii(monkeypatch, capsys):
    monkeypatch.setenv("DYN_LOGGING_CONSOLE_FORMAT", "jsonl")
    log_message("error", 'é "q" \\ /\n', "m", "f", 3)
    written = capsys.readouterr().err
    assert r'"message":"é \"q\" \\ /\n"' in written
    assert written.count("\n") == 1


def test_a_closed_standard_error_is_ignored(monkeypatch):
    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    closed = io.StringIO()
    closed.close()
    handler = LogHandler()
    for stream in (None, closed, Broken()):
        monkeypatch.setattr(sys, "stderr", stream)
        handler.emit(record())


def test_a_record_that_cannot_be_formatted_goes_to_the_error_handler(monkeypatch):
    failed = []
    handler = LogHandler()
    monkeypatch.setattr(handler, "handleError", failed.append)
    bad = record(message="%d", args=("x",))
    handler.emit(bad)
    assert failed == [bad]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((1, "m", "x", "f", 1), TypeError),
        (("info", None, "x", "f", 1), TypeError),
        (("info", "m", "x", "f", "1"), TypeError),
        (("info", "m"), TypeError),
        (("info", "m", "x", "f", -1), OverflowError),
        (("info", "m", "x", "f", 2**32), OverflowError),
    ],
)
def test_log_message_checks_its_arguments(arguments, error, capsys):
    with pytest.raises(error):
        log_message(*arguments)
    assert capsys.readouterr().err == ""


def test_log_message_reads_the_environment_each_time(monkeypatch, capsys):
    for level, seen in (("error", 0), ("info", 1), ("off", 0)):
        monkeypatch.setenv("DYN_LOG", level)
        log_message("info", "m", "x", "f", True)
        assert capsys.readouterr().err.count("\n") == seen


# --- the formatter ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        (10, "\x1b[2mDEBUG"),
        (20, "\x1b[32m INFO"),
        (30, "\x1b[33mWARNING"),
        (40, "\x1b[31mERROR"),
        (50, "CRITICAL"),
        (5, "Level 5"),
    ],
)
def test_formatter_levels(level, shown):
    assert VllmColorFormatter().format(record(level)) == (
        f"\x1b[2m2023-11-14T22:13:20.123456Z\x1b[0m {shown}\x1b[0m "
        "\x1b[2mmod.f\x1b[0m\x1b[2m:\x1b[0m hi"
    )


def test_formatter_adds_the_traceback_and_nothing_else():
    try:
        raise KeyError("boom")
    except KeyError:
        info = sys.exc_info()
    formatted = VllmColorFormatter("%(name)s").format(
        record(exc_info=info, stack_info="STACK", exc_text="OLD")
    )
    first, _, rest = formatted.partition("\n")
    assert first.endswith(" hi")
    assert rest.startswith("Traceback (most recent call last):\n")
    assert rest.endswith("KeyError: 'boom'")
    assert "\n" not in VllmColorFormatter().format(record(exc_info=(None, None, None)))


@pytest.mark.parametrize("function", ["<module>", None, ""])
def test_module_level_shows_the_module_alone(function):
    assert "\x1b[2mmod\x1b[0m" in VllmColorFormatter().format(record(function=function))


# --- set-up ------------------------------------------------------------------------------


def shape(name: str):
    logger = logging.getLogger(name)
    return (
        logger.level,
        logger.propagate,
        [(type(h), h.level, type(h.formatter)) for h in logger.handlers],
    )


def test_configure_replaces_the_root_handlers(monkeypatch):
    monkeypatch.setenv("DYN_LOG", "error,x=debug")
    monkeypatch.setenv("DYN_SKIP_SGLANG_LOG_FORMATTING", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "warning")
    logging.getLogger("tag").addHandler(logging.StreamHandler())
    for _ in range(2):
        assert configure_dynamo_logging("s", 3) is None
    assert shape("") == (10, True, [(LogHandler, 10, logging.Formatter)])
    assert logging.getLogger().handlers[0].formatter._fmt == "[s:3] %(message)s"
    vllm = (30, False, [(logging.StreamHandler, 0, VllmColorFormatter)])
    assert shape("vllm") == shape("gpu_memory_service") == vllm
    assert shape("tag") == (40, True, [])
    assert len(logging.getLogger("vllm.v1.engine.async_llm").filters) == 1
    assert os.environ["VLLM_CONFIGURE_LOGGING"] == "1"
    assert "SGLANG_LOGGING_CONFIG_PATH" not in os.environ


def test_configure_prepares_sglang(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    configure_dynamo_logging()
    path = Path(os.environ["SGLANG_LOGGING_CONFIG_PATH"])
    assert path.parent == tmp_path
    if os.name == "posix":
        assert path.stat().st_mode & 0o777 == 0o600
    logger = {"handlers": ["dynamo"], "level": "INFO", "propagate": False}
    assert json.loads(path.read_text())["loggers"] == {
        "sglang": logger,
        "gpu_memory_service": logger,
    }


def test_the_sglang_file_works_as_a_logging_configuration(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    configure_sglang_logging(logging.ERROR)
    path = os.environ["SGLANG_LOGGING_CONFIG_PATH"]
    code = (
        "import json, logging.config, sys\n"
        "logging.config.dictConfig(json.load(open(sys.argv[1])))\n"
        "logging.getLogger('sglang.x').warning('lost')\n"
        "logging.getLogger('sglang.x').error('kept')\n"
    )
    source = str(Path(module.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code, path],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert TIME.sub("T", plain(done.stderr)) == "T ERROR <string>: kept\n"


def test_our_own_loggers_are_silent_until_configured_and_then_go_the_same_way(capsys):
    ours = logging.getLogger("dynamo.runtime.egress")
    assert not logging.getLogger("dynamo").handlers
    assert not logging.getLogger("dynamo.runtime").handlers
    configure_logger(None, None)
    ours.info("one call")
    assert plain(capsys.readouterr().err).endswith(
        " INFO test_logging."
        "test_our_own_loggers_are_silent_until_configured_and_then_go_the_same_way: "
        "one call\n"
    )


def test_configure_logger_adds_one_handler_each_time():
    before = len(logging.getLogger().handlers)
    configure_logger("s", 1)
    configure_logger(None, None, logging.DEBUG)
    added = logging.getLogger().handlers[before:]
    assert [h.formatter._fmt for h in added] == ["[s:1] %(message)s", "%(message)s"]
    assert [h.level for h in added] == [20, 10]
    assert logging.getLogger().level == 10


def test_an_unknown_vllm_level_is_an_error(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "loud")
    with pytest.raises(ValueError, match="LOUD"):
        configure_vllm_logging(20)


@pytest.mark.parametrize(
    ("level", "function", "passes"),
    [
        (10, "check_health", False),
        (5, "check_health", False),
        (20, "check_health", True),
        (10, "other", True),
    ],
)
def test_vllm_health_lines_are_dropped(level, function, passes):
    configure_vllm_logging(20)
    engine = logging.getLogger("vllm.v1.engine.async_llm")
    assert bool(engine.filter(record(level, function=function))) == passes


# --- small functions -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "prefix"),
    [
        ((None, None), ""),
        (("svc", None), "svc"),
        (("svc", 3), "svc:3"),
        (("", 3), ":3"),
        ((" s ", None), "s"),
        (("s", 0), "s:0"),
        ((5, 6), "5:6"),
    ],
)
def test_prefix(arguments, prefix):
    assert construct_formatter_prefix(*arguments) == prefix


@pytest.mark.parametrize(
    ("word", "level"),
    [("debug", 10), ("warn", 30), ("critical", 50), ("trace", 20), ("DEBUG", 20)],
)
def test_level_words(word, level):
    assert log_level_mapping(word) == level
    assert log_level_mapping(None) == 20


@pytest.mark.parametrize(
    ("filters", "level"),
    [
        ("", 20),
        ("trace", 10),
        (" DEBUG ", 10),
        ("error,", 20),
        ("off", 20),
        ("error,foo=warn", 30),
        ("a=b=debug", 10),
        ("critical,error", 40),
        ("[span{f=v}]=debug,error", 10),
    ],
)
def test_lowest_level_of_filters(filters, level):
    assert python_log_level_mapping(filters) == level


def test_an_existing_file_means_debug(monkeypatch, tmp_path):
    file = tmp_path / "logging.toml"
    for path, level in ((file, 40), (tmp_path, 40), ("", 40)):
        monkeypatch.setenv("DYN_LOGGING_CONFIG_PATH", str(path))
        assert python_log_level_mapping("error") == level
    file.touch()
    monkeypatch.setenv("DYN_LOGGING_CONFIG_PATH", str(file))
    assert python_log_level_mapping("error") == 10
    with pytest.raises(AttributeError):
        python_log_level_mapping(None)


@pytest.mark.parametrize(
    ("text", "value", "warned"),
    [
        ("TRUE", True, False),
        ("1", True, False),
        ("False", False, False),
        ("0", False, False),
        ("YES", False, True),
        ("", False, True),
        (" true", False, True),
    ],
)
def test_switches(text, value, warned, monkeypatch, caplog):
    monkeypatch.setenv("A_SWITCH", text)
    assert get_bool_env_var("A_SWITCH") is value
    expected = (
        f"The environment variable A_SWITCH has an unrecognized value={text.lower()}, "
        "treating as false"
    )
    assert caplog.record_tuples == ([("root", 30, expected)] if warned else [])


def test_switch_argument_errors():
    with pytest.raises(AttributeError):
        get_bool_env_var("NOT_SET", None)
    with pytest.raises(TypeError):
        get_bool_env_var(5)
