"""Log lines in the shape of the genuine runtime, on standard error.

Nothing is configured until `configure_dynamo_logging` (or one of its parts) is called;
from then on the records of the program and of `dynamo.runtime.*` are written by
`LogHandler`.  These environment variables are read when a handler is made:

* `DYN_LOG`: directives `level`, `target` or `target=level`, separated by commas.
  Levels are `off error warn info debug trace`, or 0 to 5; a target is the start of
  `module.function`.  Default: `info`.
* `DYN_LOGGING_CONFIG_PATH`: a TOML file with `log_level`, which counts without
  `DYN_LOG`, and a table `log_filters` of levels by target, which always counts.
* `DYN_LOGGING_CONSOLE_FORMAT=jsonl`, or `DYN_LOGGING_JSONL=1`: one JSON object a line.
* `DYN_SDK_DISABLE_ANSI_LOGGING=1`: no colours.  `DYN_LOG_USE_LOCAL_TZ=1`: local time.

And these by `configure_dynamo_logging`, for engines in the same process:

* `VLLM_LOGGING_LEVEL`: the level of vLLM's loggers.  Default: `INFO`.
* `DYN_SKIP_SGLANG_LOG_FORMATTING=1`: SGLang's loggers are left alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from datetime import datetime, timezone
from functools import lru_cache
from typing import NamedTuple, TypedDict

from dynamo.runtime._sealed import override

__all__ = [
    "LogHandler",
    "VllmColorFormatter",
    "configure_dynamo_logging",
    "configure_logger",
    "configure_sglang_logging",
    "configure_vllm_logging",
    "construct_formatter_prefix",
    "get_bool_env_var",
    "log_level_mapping",
    "log_message",
    "python_log_level_mapping",
]

_DEFAULT_CONFIG_FILE = "/opt/dynamo/etc/logging.toml"

# --- levels and filters of the native logger -------------------------------------------

_OFF, _ERROR, _WARN, _INFO, _DEBUG, _TRACE = range(6)
_LEVEL_WORDS = ("OFF", "ERROR", "WARN", "INFO", "DEBUG", "TRACE")
_LEVELS = {
    **{word.lower(): level for level, word in enumerate(_LEVEL_WORDS)},
    **{str(level): level for level in range(6)},
}
_MESSAGE_LEVELS = {
    "debug": _DEBUG,
    "warn": _WARN,
    "warning": _WARN,
    "error": _ERROR,
    # The genuine runtime prints these as INFO, and loses them at DYN_LOG=error.
    "critical": _ERROR,
}

# Always appended by the genuine runtime, so that one DYN_LOG serves a mixed cluster.
_NOISY_TARGETS = (
    "h2",
    "tower",
    "hyper_util",
    "neli",
    "async_nats",
    "rustls",
    "tokenizers",
    "axum",
    "tonic",
    "hf_hub",
    "opentelemetry",
    "opentelemetry-otlp",
    "opentelemetry_sdk",
)


class _Filter:
    """Decides which target may log at which level: the longest matching prefix wins."""

    def __init__(self, levels: dict[str, int]) -> None:
        self._rules = sorted(levels.items(), key=lambda rule: -len(rule[0]))

    def allows(self, target: str, level: int) -> bool:
        for prefix, finest in self._rules:
            if target.startswith(prefix):
                return level <= finest
        return False


def _parse_directives(text: str) -> tuple[dict[str, int], list[str]]:
    """Levels by target (`""` is every target), and notes on what was ignored.

    Blanks are not trimmed and an unknown lone word is a target: as in the genuine one.
    """
    levels: dict[str, int] = {}
    notes: list[str] = []
    for directive in filter(None, text.split(",")):
        target, equals, word = directive.partition("=")
        if "[" in directive:
            notes.append(f"ignoring `{directive}`: there are no spans to select")
        elif not equals:
            level = _LEVELS.get(directive.lower())
            if level is None:
                levels[directive] = _TRACE
            else:
                levels[""] = level
        elif word and word.lower() not in _LEVELS:
            notes.append(
                f"ignoring `{directive}`: expected one of "
                f"{', '.join(_LEVELS)} after the equals sign"
            )
        else:
            levels[target] = _LEVELS.get(word.lower(), _ERROR)
    return levels, notes


def _make_filter(text: str, config_path: str) -> tuple[_Filter, list[str]]:
    default, by_target = _read_config_files(config_path)
    levels, notes = _parse_directives(text)
    if not levels:
        levels, more = _parse_directives(default)
        notes += more
    levels.update(dict.fromkeys(_NOISY_TARGETS, _ERROR))
    for target, word in by_target.items():
        if word.lower() in _LEVELS:
            levels[target] = _LEVELS[word.lower()]
        else:
            notes.append(f"Failed parsing filter '{word}' for module '{target}'")
    # The genuine runtime's lines about requests; nothing can lower it there either.
    levels["request_span"] = _TRACE
    return _Filter(levels), notes


def _config_files(config_path: str) -> list[str]:
    """The logging files that exist; later ones override earlier ones."""
    return list(filter(os.path.isfile, (_DEFAULT_CONFIG_FILE, config_path)))


class _ConfigFile(TypedDict, total=False):
    log_level: str
    log_filters: dict[str, str]


def _read_config_files(config_path: str) -> tuple[str, dict[str, str]]:
    default, by_target = "info", dict[str, str]()
    for path in _config_files(config_path):
        import msgspec  # rarely needed here, and not cheap to import

        try:
            with open(path, "rb") as file:
                content = msgspec.toml.decode(file.read(), type=_ConfigFile)
        except (OSError, msgspec.DecodeError) as error:
            raise ValueError(
                f"DYN_LOGGING_CONFIG_PATH: cannot use {path!r} ({error}); give a TOML "
                "file with a text log_level and a table log_filters of texts"
            ) from error
        default = content.get("log_level", default)
        by_target.update(content.get("log_filters", {}))
    return default, by_target


# --- the native logger ------------------------------------------------------------------

_COLOURS = {
    _ERROR: "\x1b[31m",
    _WARN: "\x1b[33m",
    _INFO: "\x1b[32m",
    _DEBUG: "\x1b[34m",
}
_VISIBLE = {
    **{code: f"\\x{code:02x}" for code in (0x07, 0x08, 0x0C, 0x1B, 0x7F)},
    **{code: f"\\u{{{code:x}}}" for code in range(0x80, 0xA0)},
}


class _Settings(NamedTuple):
    """What the environment says about the lines."""

    filters: str
    config_path: str
    format: str
    jsonl: bool
    colour: bool
    local_time: bool


def _read_settings() -> _Settings:
    get = os.environ.get
    return _Settings(
        filters=get("DYN_LOG", ""),
        config_path=get("DYN_LOGGING_CONFIG_PATH", ""),
        format=get("DYN_LOGGING_CONSOLE_FORMAT", "").strip().lower(),
        jsonl=_is_truthy("DYN_LOGGING_JSONL"),
        colour=not _is_truthy("DYN_SDK_DISABLE_ANSI_LOGGING"),
        local_time=_is_truthy("DYN_LOG_USE_LOCAL_TZ"),
    )


def _is_truthy(variable: str) -> bool:
    value = os.environ.get(variable, "").strip().lower()
    return value in ("1", "true", "yes", "on")


class _Console:
    """Writes lines that pass the filter to standard error."""

    def __init__(self, settings: _Settings) -> None:
        self._filter, notes = _make_filter(settings.filters, settings.config_path)
        self.allows = self._filter.allows
        self._jsonl = settings.jsonl
        if settings.format in ("jsonl", "readable"):
            self._jsonl = settings.format == "jsonl"
        elif settings.format:
            notes.append(
                f"Invalid DYN_LOGGING_CONSOLE_FORMAT value '{settings.format}'; allowed "
                "are 'readable' and 'jsonl'"
            )
        self._colour = settings.colour
        self._local_time = settings.local_time
        for note in notes:
            _write(note + "\n")

    def write(
        self,
        when: datetime,
        level: int,
        target: str,
        message: str,
        file: str,
        line: int,
    ) -> None:
        time = _utc(when)
        if self._local_time:
            time = when.astimezone().isoformat(timespec="microseconds")
        if self._jsonl:
            _write(_json_line(time, level, target, message, file, line))
        else:
            _write(self._readable(time, level, target, message.translate(_VISIBLE)))

    def _readable(self, time: str, level: int, target: str, message: str) -> str:
        if self._colour:
            return (
                _coloured(time, _LEVEL_WORDS[level], _COLOURS[level], target, message)
                + "\n"
            )
        return f"{time} {_LEVEL_WORDS[level]:>5} {target}: {message}\n"


@lru_cache(maxsize=8)
def _console(settings: _Settings) -> _Console:
    return _Console(settings)


def _utc(when: datetime) -> str:
    return when.isoformat(timespec="microseconds")[: -len("+00:00")] + "Z"


def _coloured(time: str, word: str, colour: str, target: str, message: str) -> str:
    return (
        f"\x1b[2m{time}\x1b[0m {colour}{word:>5}\x1b[0m "
        f"\x1b[2m{target}\x1b[0m\x1b[2m:\x1b[0m {message}"
    )


def _json_line(
    time: str, level: int, target: str, message: str, file: str, line: int
) -> str:
    fields = {
        "time": time,
        "level": _LEVEL_WORDS[level],
        "target": "log",
        "message": message,
        "log.file": file,
        "log.line": line,
        "log.target": target,
    }
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")) + "\n"


def _write(text: str) -> None:
    stream = sys.stderr
    if stream is None or stream.closed:
        return
    # A reader of standard error that went away must not stop the program.
    with contextlib.suppress(OSError):
        stream.write(text)
        stream.flush()


def log_message(level: str, message: str, module: str, file: str, line: int) -> None:
    """Write one line, with the settings that the environment holds now.

    Args:
        level: `debug`, `info`, `warn`, `warning`, `error` or `critical` (as `error`);
            any other word counts as `info`.
        message: What to say.
        module: The line's target, which `DYN_LOG` selects by.
        file: Source file; shown in JSON lines.
        line: Line in that file, from 0 to 4294967295.

    Raises:
        TypeError: An argument has the wrong type.
        OverflowError: The line number is out of range.
        ValueError: The file that `DYN_LOGGING_CONFIG_PATH` names cannot be used.
    """
    texts = {"level": level, "message": message, "module": module, "file": file}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} must be str, not {type(value).__name__}")
    if not isinstance(line, int):
        raise TypeError(f"line must be int, not {type(line).__name__}")
    if not 0 <= line < 2**32:
        raise OverflowError(f"line must be from 0 to {2**32 - 1}, not {line}")
    console = _console(_read_settings())
    native = _MESSAGE_LEVELS.get(level, _INFO)
    if console.allows(module, native):
        console.write(datetime.now(timezone.utc), native, module, message, file, line)


# --- handlers and formatters -------------------------------------------------------------


class LogHandler(logging.Handler):
    """Writes records in the shape of the genuine runtime, to standard error.

    The target of a line is `module.function`, not the logger's name.

    Args:
        level: Lowest level to write, as in `logging`; `DYN_LOG` filters after that.

    Raises:
        ValueError: The file that `DYN_LOGGING_CONFIG_PATH` names cannot be used.
    """

    def __init__(self, level: int | str = logging.NOTSET) -> None:
        super().__init__(level)
        self._console = _console(_read_settings())

    @override
    def emit(self, record: logging.LogRecord) -> None:
        """Write one record.

        Args:
            record: The record.
        """
        target, level = _target(record), _native_level(record.levelno)
        if not self._console.allows(target, level):
            return
        try:
            when = datetime.fromtimestamp(record.created, timezone.utc)
            message = self.format(record)
            self._console.write(
                when, level, target, message, record.pathname, record.lineno
            )
        except Exception:  # noqa: BLE001 - the contract of logging handlers
            self.handleError(record)


def _target(record: logging.LogRecord) -> str:
    if not record.funcName or record.funcName == "<module>":
        return record.module
    return f"{record.module}.{record.funcName}"


def _native_level(levelno: int) -> int:
    """By number, so that critical and levels of one's own keep their severity."""
    if levelno >= logging.ERROR:
        return _ERROR
    if levelno >= logging.WARNING:
        return _WARN
    return _INFO if levelno >= logging.INFO else _DEBUG


_VLLM_COLOURS = {
    "DEBUG": "\x1b[2m",
    "INFO": "\x1b[32m",
    "WARNING": "\x1b[33m",
    "ERROR": "\x1b[31m",
}


class VllmColorFormatter(logging.Formatter):
    r"""Formats vLLM's records in the colours of the genuine runtime.

    Takes the arguments of `logging.Formatter` and ignores them.

    Example:
        >>> record = logging.LogRecord("n", 20, "/a/mod.py", 1, "hi", (), None, "f")
        >>> VllmColorFormatter().format(record).partition(" ")[2]
        '\x1b[32m INFO\x1b[0m \x1b[2mmod.f\x1b[0m\x1b[2m:\x1b[0m hi'
    """

    @override
    def format(self, record: logging.LogRecord) -> str:
        """Format one record.

        Args:
            record: The record.

        Returns:
            Time, level, place and message, and the traceback on further lines.
        """
        line = _coloured(
            _utc(datetime.fromtimestamp(record.created, timezone.utc)),
            record.levelname,
            _VLLM_COLOURS.get(record.levelname, ""),
            _target(record),
            record.getMessage(),
        )
        if record.exc_info and record.exc_info[0]:
            line += "\n" + self.formatException(record.exc_info)
        return line


# --- set-up ------------------------------------------------------------------------------


def configure_dynamo_logging(
    service_name: str | None = None, worker_id: int | None = None
) -> None:
    """Write the program's log records in the shape of the genuine runtime.

    Replaces the handlers of the root logger, and prepares the loggers of vLLM and
    SGLang.  May be called again.

    Args:
        service_name: Put before each message, in brackets.
        worker_id: Put behind the service name.

    Raises:
        ValueError: `VLLM_LOGGING_LEVEL` is no level, or the file that
            `DYN_LOGGING_CONFIG_PATH` names cannot be used.
    """
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    level = python_log_level_mapping(os.environ.get("DYN_LOG") or "info")
    configure_logger(service_name, worker_id, level)
    configure_vllm_logging(level)
    if not get_bool_env_var("DYN_SKIP_SGLANG_LOG_FORMATTING"):
        configure_sglang_logging(level)
    tag = logging.getLogger("tag")
    tag.handlers.clear()
    tag.setLevel(logging.ERROR)
    tag.propagate = True


def configure_logger(
    service_name: str | None, worker_id: int | None, level: int = logging.INFO
) -> None:
    """Add a `LogHandler` to the root logger and set both to a level.

    Args:
        service_name: Put before each message, in brackets.
        worker_id: Put behind the service name.
        level: Lowest level to write, as in `logging`.

    Raises:
        ValueError: The file that `DYN_LOGGING_CONFIG_PATH` names cannot be used.
    """
    prefix = construct_formatter_prefix(service_name, worker_id)
    handler = LogHandler(level)
    handler.setFormatter(
        logging.Formatter(f"[{prefix}] %(message)s" if prefix else "%(message)s")
    )
    root = logging.getLogger()
    root.setLevel(level)
    root.addHandler(handler)


def configure_vllm_logging(dyn_level: int) -> None:
    """Give vLLM's loggers our colours, and have vLLM leave them alone.

    Args:
        dyn_level: Not used: `VLLM_LOGGING_LEVEL` decides, else INFO.

    Raises:
        ValueError: `VLLM_LOGGING_LEVEL` is no level.
    """
    os.environ["VLLM_CONFIGURE_LOGGING"] = "1"
    level = os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper()
    for name in ("vllm", "gpu_memory_service"):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.handlers.clear()
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(VllmColorFormatter())
        logger.addHandler(handler)
        logger.propagate = False
    engine = logging.getLogger("vllm.v1.engine.async_llm")
    if not any(isinstance(one, _HealthCheckFilter) for one in engine.filters):
        engine.addFilter(_HealthCheckFilter())


class _HealthCheckFilter(logging.Filter):
    """Drops the line that vLLM writes at each health check."""

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        return record.funcName != "check_health" or record.levelno > logging.DEBUG


def configure_sglang_logging(dyn_level: int) -> None:
    """Write a logging configuration for SGLang and point SGLang to it.

    The file is a temporary one that stays, because SGLang's processes read it later.

    Args:
        dyn_level: Lowest level to write, as in `logging`.
    """
    import tempfile  # costs as much to import as the rest of this module

    level = logging.getLevelName(dyn_level)
    logger = {"handlers": ["dynamo"], "level": level, "propagate": False}
    configuration = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"simple": {"format": "%(message)s"}},
        "handlers": {
            "dynamo": {
                "class": "dynamo.runtime.logging.LogHandler",
                "formatter": "simple",
                "level": level,
            }
        },
        "loggers": {"sglang": logger, "gpu_memory_service": logger},
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(configuration, file)
    os.environ["SGLANG_LOGGING_CONFIG_PATH"] = file.name


def construct_formatter_prefix(service_name: str | None, worker_id: int | None) -> str:
    """Make the words that stand before each message.

    Args:
        service_name: Name of the service, if any.
        worker_id: Number of the worker, if any.

    Returns:
        Both with a colon between, or what there is.

    Example:
        >>> construct_formatter_prefix("decode", 3)
        'decode:3'
        >>> construct_formatter_prefix(None, 0)
        ':0'
    """
    prefix = f"{service_name}" if service_name else ""
    if worker_id is not None:
        prefix += f":{worker_id}"
    return prefix.strip()


# --- reading the environment -------------------------------------------------------------

_PYTHON_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


def log_level_mapping(level: str) -> int:
    """Turn a word into a level of `logging`.

    Args:
        level: `debug`, `info`, `warn`, `warning`, `error` or `critical`.

    Returns:
        The level; INFO for any other word, also for `trace`.

    Example:
        >>> log_level_mapping("warn"), log_level_mapping("loud")
        (30, 20)
    """
    return _PYTHON_LEVELS.get(level, logging.INFO)


def python_log_level_mapping(filters: str) -> int:
    """Find the level at which Python must log so that `DYN_LOG` can filter.

    Args:
        filters: Directives as in `DYN_LOG`.

    Returns:
        The lowest level that one of them names; DEBUG if a logging configuration file
        exists, because that may name any.

    Example:
        >>> python_log_level_mapping("error,noisy=debug")
        10
    """
    words = [part.rpartition("=")[2].strip().lower() for part in filters.split(",")]
    if _config_files(os.environ.get("DYN_LOGGING_CONFIG_PATH", "")):
        return logging.DEBUG
    levels = {**_PYTHON_LEVELS, "trace": logging.DEBUG}
    return min(levels.get(word, logging.INFO) for word in words)


def get_bool_env_var(name: str, default: str = "false") -> bool:
    """Read a switch from the environment.

    Args:
        name: The variable.
        default: Its value when it is not set.

    Returns:
        True for `true` and `1` in any case; False otherwise, with a warning if it is
        neither `false` nor `0`.

    Example:
        >>> get_bool_env_var("NOT_SET"), get_bool_env_var("NOT_SET", "1")
        (False, True)
    """
    value = os.environ.get(name, default).lower()
    if value not in ("true", "1", "false", "0"):
        logging.getLogger().warning(
            "The environment variable %s has an unrecognized value=%s, treating as false",
            name,
            value,
        )
    return value in ("true", "1")
