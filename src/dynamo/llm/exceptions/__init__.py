"""Exceptions that handlers raise for their callers, under their published names."""

from __future__ import annotations

import logging

from dynamo.runtime._sealed import override
from dynamo.runtime.errors import (
    Cancelled,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoException,
    EngineShutdown,
    InvalidArgument,
    RouterQueueLimitExceeded,
    SelectionServiceError,
    StreamIncomplete,
    Unknown,
    WorkerUnavailable,
)

__all__ = [
    "Cancelled",
    "CannotConnect",
    "ConnectionTimeout",
    "Disconnected",
    "DynamoException",
    "EngineShutdown",
    "HttpError",
    "InvalidArgument",
    "RouterQueueLimitExceeded",
    "SelectionServiceError",
    "StreamIncomplete",
    "Unknown",
    "WorkerUnavailable",
]

logger = logging.getLogger("dynamo.llm.exceptions")

_MAX_MESSAGE_CHARS = 8192
_HIGHEST_CODE = 599


class HttpError(Exception):
    """An error with the status code that an HTTP front end should answer with.

    Args:
        code: Status code from 0 to 599.
        message: Words for the caller; cut to 8192 characters, with a warning.

    Raises:
        ValueError: The code is no such number, or the message is no text.

    Example:
        >>> error = HttpError(400, "no prompt")
        >>> str(error), error.code, error.message
        ('HTTP 400: no prompt', 400, 'no prompt')
    """

    def __init__(self, code: int, message: str) -> None:
        if not isinstance(code, int) or isinstance(code, bool):
            raise ValueError(f"HttpError status code must be an integer, not {code!r}")
        if not 0 <= code <= _HIGHEST_CODE:
            raise ValueError(
                f"HTTP status code must be an integer between 0 and 599, not {code}"
            )
        if not isinstance(message, str):
            raise ValueError(f"HttpError message must be a string, not {message!r}")
        self.code = code
        self.message = _shortened(message)
        super().__init__(f"HTTP {code}: {self.message}")

    @override
    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by code and message, which are not the base class's arguments."""
        return type(self), (self.code, self.message), self.__dict__


def _shortened(message: str) -> str:
    if len(message) <= _MAX_MESSAGE_CHARS:
        return message
    logger.warning(
        "HttpError message of %d characters is cut to %d",
        len(message),
        _MAX_MESSAGE_CHARS,
    )
    return message[: _MAX_MESSAGE_CHARS - len("...")] + "..."
