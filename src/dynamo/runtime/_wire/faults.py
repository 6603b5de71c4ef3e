"""Exceptions of handlers as error objects, and error objects as exceptions of callers.

Owns the catalogue of error classes and reasons, and every text that an error object or
an error prologue carries.  Decides nothing about retries.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.runtime import errors
from dynamo.runtime.errors import CallError, DynamoException

_MAX_TEXT_BYTES = 4096
_CUT_MARK = "...[truncated]"

# Every reason belongs to one class.
_CLASS_OF_REASON = {
    "request.invalid": "InvalidRequest",
    "request.invalid_argument": "InvalidRequest",
    "backend.invalid_argument": "InvalidRequest",
    "request.unauthenticated": "Unauthenticated",
    "request.permission_denied": "PermissionDenied",
    "request.not_found": "NotFound",
    "request.conflict": "Conflict",
    "request.payload_too_large": "PayloadTooLarge",
    "request.unsupported_media": "UnsupportedMedia",
    "request.rate_limited": "RateLimited",
    "capacity.exhausted": "CapacityExhausted",
    "capacity.pool_exhausted": "CapacityExhausted",
    "capacity.worker_overloaded": "CapacityExhausted",
    "request.cancelled": "Cancelled",
    "backend.cancelled": "Cancelled",
    "backend.unavailable": "Unavailable",
    "backend.worker_unavailable": "Unavailable",
    "backend.cannot_connect": "Unavailable",
    "backend.disconnected": "Unavailable",
    "backend.engine_shutdown": "Unavailable",
    "backend.stream_incomplete": "Unavailable",
    "transport.cannot_connect": "Unavailable",
    "transport.disconnected": "Unavailable",
    "request.deadline_exceeded": "DeadlineExceeded",
    "backend.connection_timeout": "DeadlineExceeded",
    "backend.response_timeout": "DeadlineExceeded",
    "transport.connection_timeout": "DeadlineExceeded",
    "backend.protocol": "BackendProtocol",
    "runtime.not_implemented": "NotImplemented",
    "runtime.internal": "Internal",
    "runtime.unclassified": "Internal",
    "runtime.invalid_error": "Internal",
    "backend.unknown": "Internal",
}
# The older category, which peers still send first: plain, or of the backend.
_REASON_OF_TYPE = {
    "Unknown": "runtime.unclassified",
    "InvalidArgument": "request.invalid_argument",
    "CannotConnect": "transport.cannot_connect",
    "Disconnected": "transport.disconnected",
    "ConnectionTimeout": "transport.connection_timeout",
    "ResponseTimeout": "request.deadline_exceeded",
    "Cancelled": "request.cancelled",
    "Unavailable": "backend.unavailable",
    "WorkerUnavailable": "backend.worker_unavailable",
    "ResourceExhausted": "capacity.exhausted",
}
_REASON_OF_BACKEND_TYPE = {
    "Unknown": "backend.unknown",
    "InvalidArgument": "backend.invalid_argument",
    "CannotConnect": "backend.cannot_connect",
    "Disconnected": "backend.disconnected",
    "ConnectionTimeout": "backend.connection_timeout",
    "ResponseTimeout": "backend.response_timeout",
    "Cancelled": "backend.cancelled",
    "EngineShutdown": "backend.engine_shutdown",
    "StreamIncomplete": "backend.stream_incomplete",
}
# The types after which a caller avoids the instance, by the reasons that they stand for.
_INHIBITING_TYPES = frozenset(
    (
        "transport.cannot_connect",
        "transport.disconnected",
        "transport.connection_timeout",
        "request.deadline_exceeded",
        "backend.worker_unavailable",
        "backend.engine_shutdown",
        "backend.stream_incomplete",
    )
)

# How an error that has only a class is sent: type and reason.  Where a class has several,
# the ones that do not make the caller avoid a healthy worker.
_FORM_OF_CLASS: dict[str, tuple[str | dict[str, str], str]] = {
    "InvalidRequest": ("InvalidArgument", "request.invalid"),
    "Unauthenticated": ("Unknown", "request.unauthenticated"),
    "PermissionDenied": ("Unknown", "request.permission_denied"),
    "NotFound": ("Unknown", "request.not_found"),
    "Conflict": ("Unknown", "request.conflict"),
    "PayloadTooLarge": ("InvalidArgument", "request.payload_too_large"),
    "UnsupportedMedia": ("InvalidArgument", "request.unsupported_media"),
    "RateLimited": ("ResourceExhausted", "request.rate_limited"),
    "CapacityExhausted": ("ResourceExhausted", "capacity.exhausted"),
    "Cancelled": ("Cancelled", "request.cancelled"),
    "Unavailable": ("Unavailable", "backend.unavailable"),
    "DeadlineExceeded": (
        {"Backend": "ConnectionTimeout"},
        "backend.connection_timeout",
    ),
    "BackendProtocol": ("Unknown", "backend.protocol"),
    "NotImplemented": ("Unknown", "runtime.not_implemented"),
    "Internal": ("Unknown", "runtime.internal"),
}
_CLASS_OF_STATUS = {
    401: "Unauthenticated",
    403: "PermissionDenied",
    404: "NotFound",
    408: "DeadlineExceeded",
    409: "Conflict",
    413: "PayloadTooLarge",
    415: "UnsupportedMedia",
    429: "RateLimited",
    431: "PayloadTooLarge",
    499: "Cancelled",
    501: "NotImplemented",
    502: "BackendProtocol",
    503: "Unavailable",
    504: "DeadlineExceeded",
    529: "CapacityExhausted",
}
_MAX_STATUS = 65535

# The first match counts, so that kinds stand before their bases.
_TYPE_OF_DYNAMO: tuple[tuple[type[DynamoException], str | dict[str, str]], ...] = (
    (errors.InvalidArgument, {"Backend": "InvalidArgument"}),
    (errors.CannotConnect, {"Backend": "CannotConnect"}),
    (errors.Disconnected, {"Backend": "Disconnected"}),
    (errors.ConnectionTimeout, {"Backend": "ConnectionTimeout"}),
    (errors.Cancelled, {"Backend": "Cancelled"}),
    (errors.EngineShutdown, {"Backend": "EngineShutdown"}),
    (errors.StreamIncomplete, {"Backend": "StreamIncomplete"}),
    (errors.WorkerUnavailable, "WorkerUnavailable"),
    (DynamoException, {"Backend": "Unknown"}),
)
_BACKEND_OF_BUILTIN: tuple[tuple[type[BaseException], str], ...] = (
    (ValueError, "InvalidArgument"),
    (TypeError, "InvalidArgument"),
    (ConnectionRefusedError, "CannotConnect"),
    (ConnectionError, "Disconnected"),
    (TimeoutError, "ConnectionTimeout"),
)

# With the enclosing classes and functions, if any, in front.
_REMOTE_TYPE = re.compile(r"(?:[\w<>]+\.)*([A-Z]\w*): ")


class ErrorObject(msgspec.Struct, omit_defaults=True):
    """An error as it travels, in an error item or beside an error prologue.

    Anything may be missing in what peers send; `settled` fills the gaps.
    """

    error_type: str | dict[str, str] | None = None
    error_class: str | None = msgspec.field(default=None, name="class")
    reason: str | None = None
    message: str | None = None
    diagnostic: str | None = None
    public: dict[str, Any] | None = None
    caused_by: ErrorObject | None = None

    @property
    def words(self) -> str:
        """The text for people, without the class."""
        for text in (self.diagnostic, self.message, self.reason):
            if text is not None:
                return text
        return "runtime.unclassified"


def settled(error: ErrorObject) -> ErrorObject:
    """The error with a class and a reason that belong together.

    A contradiction makes it ``Internal`` and drops the public part, as in the genuine
    reader; what older peers leave out follows from the rest.
    """
    given_class, given_reason = error.error_class, error.reason
    if given_class is None or given_reason is None:
        reason = _reason_of_type(error.error_type) or _reason_of_rest(error)
        return msgspec.structs.replace(
            error, error_class=_CLASS_OF_REASON[reason], reason=reason
        )
    if _CLASS_OF_REASON.get(given_reason) != given_class:
        return msgspec.structs.replace(
            error, error_class="Internal", reason="runtime.invalid_error", public=None
        )
    return error


def is_of_known_form(error: ErrorObject) -> bool:
    """False for an object without class whose type nobody knows."""
    return (
        error.error_class is not None or _reason_of_type(error.error_type) is not None
    )


def _reason_of_type(error_type: str | dict[str, str] | None) -> str | None:
    if isinstance(error_type, str):
        return _REASON_OF_TYPE.get(error_type)
    backend = (error_type or {}).get("Backend")
    return None if backend is None else _REASON_OF_BACKEND_TYPE.get(backend)


def _reason_of_rest(error: ErrorObject) -> str:
    if error.error_type is None:
        if error.reason in _CLASS_OF_REASON:
            return error.reason
        if error.error_class in _FORM_OF_CLASS:
            return _FORM_OF_CLASS[error.error_class][1]
    return "runtime.unclassified"


def inhibits(error: ErrorObject) -> bool:
    """True if a caller avoids the instance for a while after this error.

    An application's own time-out status does not count, although it does in the genuine
    client: the worker that reports it is healthy.
    """
    type_reason = _reason_of_type(error.error_type)
    if type_reason is None or type_reason not in _INHIBITING_TYPES:
        return False
    error = settled(error)
    # A type that contradicts the class says nothing.
    fits = error.error_class == _CLASS_OF_REASON[type_reason]
    return fits and error.reason != "request.deadline_exceeded"


def error_of_exception(error: BaseException) -> ErrorObject:
    """What a worker sends when a handler raised."""
    if isinstance(error, CallError) and error.error_class in _FORM_OF_CLASS:
        # A handler that passes on the failure of a call it made itself.
        words = _text_of(error).removeprefix(f"{error.error_class}: ")
        return _of_class(error.error_class, words)
    if isinstance(error, DynamoException):
        return _of_dynamo(error)
    status, message = _http_like(error)
    if status is not None:
        return _of_status(status, message)
    if isinstance(error, GeneratorExit):
        return _of_type({"Backend": "EngineShutdown"}, "engine shutting down")
    return _of_type({"Backend": _backend_of(error)}, _named_text_of(error))


def error_of_unsendable(text: str, codec: str = "msgpack") -> ErrorObject:
    """What a worker sends when an item cannot be encoded; `text` says why."""
    return _of_type(
        "Unknown",
        "critical error: failed serializing Python response as "
        f"{codec}: {_readable(text)}",
    )


def error_of_unreadable(text: str) -> ErrorObject:
    """What a caller's stream ends with when an item cannot be read."""
    return ErrorObject("Unknown", "Internal", "runtime.unclassified", text, text)


def error_of_envelope(error: object, comment: Sequence[str] | None) -> ErrorObject:
    """What a handler spelled out in an envelope with the event ``error``."""
    spelled = error if isinstance(error, Mapping) else {}
    message = spelled.get("message")
    if not isinstance(message, str):
        message = ", ".join(comment or ()) or "unknown error"
    error_class = spelled.get("class")
    if not isinstance(error_class, str) or error_class not in _FORM_OF_CLASS:
        error_class = "Internal"
    return _of_class(error_class, _limited(_readable(message)))


def error_of_refusal(error: BaseException) -> tuple[str, ErrorObject]:
    """Text and error object of the prologue when calling the handler itself failed."""
    text = _named_text_of(error)
    return f"Generate Error: {text}", _of_type("Unknown", text)


def exception_of_error(
    error: ErrorObject, *, instance_id: int | None = None
) -> Exception:
    """What a caller's stream raises for an error item."""
    error = settled(error)
    if error.error_class == "InvalidRequest":
        public = error.public or {}
        message = public.get("message")
        if public.get("type") == "message" and isinstance(message, str):
            return errors.InvalidArgument(message)
    named = _REMOTE_TYPE.match(error.words)
    return errors.RemoteError(
        f"{error.error_class}: {error.words}",
        instance_id=instance_id,
        remote_type=named and named[1],
    )


def exception_of_prologue(
    error: str, typed: ErrorObject | None, *, instance_id: int | None = None
) -> tuple[Exception, bool]:
    """What a call raises for an error prologue, and whether it inhibits the instance."""
    if typed is not None:
        typed = settled(typed)
        if typed.error_class == "InvalidRequest":
            text = f"InvalidRequest: {typed.words}"
            return errors.HandlerRefused(text, instance_id=instance_id), False
    text = f"Unavailable: Worker generate() failed before response stream: {error}"
    return errors.HandlerRefused(text, instance_id=instance_id), True


def _of_type(error_type: str | dict[str, str], text: str) -> ErrorObject:
    reason = _reason_of_type(error_type) or "runtime.unclassified"
    return _with_text(error_type, reason, text)


def _of_class(error_class: str, text: str) -> ErrorObject:
    error_type, reason = _FORM_OF_CLASS[error_class]
    return _with_text(error_type, reason, text)


def _with_text(error_type: str | dict[str, str], reason: str, text: str) -> ErrorObject:
    text = _limited(text)
    return ErrorObject(error_type, _CLASS_OF_REASON[reason], reason, text, text)


def _of_dynamo(error: DynamoException) -> ErrorObject:
    error_type = next(form for kind, form in _TYPE_OF_DYNAMO if isinstance(error, kind))
    sent = _of_type(error_type, _text_of(error))
    if isinstance(error, errors.InvalidArgument):
        sent.public = {"type": "message", "message": sent.message}
    return sent


def _of_status(status: int, message: str) -> ErrorObject:
    text = msgspec.json.encode({"message": message, "code": status}).decode()
    usual = "InvalidRequest" if 400 <= status < 499 else "Internal"
    error_class = _CLASS_OF_STATUS.get(status, usual)
    if error_class == "DeadlineExceeded":
        return _with_text("ResponseTimeout", "request.deadline_exceeded", text)
    return _of_class(error_class, text)


def _http_like(error: BaseException) -> tuple[int | None, str]:
    """Status and message of an exception that carries both."""
    try:
        message, codes = error.message, _codes_of(error)  # type: ignore[attr-defined]
        str.encode(message)  # neither another type nor a lone surrogate will do
    except Exception:  # noqa: BLE001 - attributes run the user's code
        return None, ""
    for status in codes:
        if isinstance(status, int) and 0 <= status <= _MAX_STATUS:
            return int(status), message
    return None, ""


def _codes_of(error: BaseException) -> tuple[object, object]:
    return getattr(error, "code", None), getattr(error, "status", None)


def _backend_of(error: BaseException) -> str:
    for kind, name in _BACKEND_OF_BUILTIN:
        if isinstance(error, kind):
            return name
    if isinstance(error, _asyncio_class("CancelledError")):
        return "Cancelled"
    # Up to Python 3.10 this one is no TimeoutError.
    if isinstance(error, _asyncio_class("TimeoutError")):
        return "ConnectionTimeout"
    return "Unknown"


def _asyncio_class(name: str) -> type[BaseException] | tuple[()]:
    """A class of asyncio if the program uses asyncio; pure code may not import it."""
    found: type[BaseException] | tuple[()]
    found = getattr(sys.modules.get("asyncio.exceptions"), name, ())
    return found


def _named_text_of(error: BaseException) -> str:
    return _limited(f"{_readable(type(error).__qualname__)}: {_text_of(error)}")


def _text_of(error: BaseException) -> str:
    try:
        return _readable(str(error))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # noqa: BLE001 - str() runs the user's code: it may do anything
        return "<exception str() failed>"


def _readable(text: str) -> str:
    """The text with what UTF-8 cannot carry replaced, byte by byte as the genuine does."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _limited(text: str) -> str:
    raw = text.encode()
    if len(raw) <= _MAX_TEXT_BYTES:
        return text
    kept = raw[: _MAX_TEXT_BYTES - len(_CUT_MARK)]
    return kept.decode("utf-8", "ignore") + _CUT_MARK
