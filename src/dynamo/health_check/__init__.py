"""The payload with which a worker's health checks call its own handler."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from dynamo.runtime._sealed import override

__all__ = ["HEALTH_CHECK_KEY", "HealthCheckPayload", "load_health_check_from_env"]

HEALTH_CHECK_KEY = "_HEALTH_CHECK"
"""Key by which a handler may recognise a health check's payload."""

logger = logging.getLogger("dynamo.health_check")


def load_health_check_from_env(
    env_var: str = "DYN_HEALTH_CHECK_PAYLOAD",
) -> dict[str, Any] | None:
    """Read a payload from the environment.

    Args:
        env_var: The variable: a JSON object, or `@` and the path of a file with one.

    Returns:
        The object; None if the variable is empty or not set, and None with a warning if
        it cannot be used.

    Example:
        >>> os.environ["MY_PAYLOAD"] = '{"prompt": "hi"}'
        >>> load_health_check_from_env("MY_PAYLOAD")
        {'prompt': 'hi'}
    """
    text = os.environ.get(env_var)
    if not text:
        return None
    try:
        payload = json.loads(_read_file(text[1:]) if text.startswith("@") else text)
    except (OSError, ValueError) as error:
        logger.warning(
            "Failed to parse %s: %s; give a JSON object, or @ and the path of a file "
            "with one",
            env_var,
            error,
        )
        return None
    if isinstance(payload, dict):
        return payload
    logger.warning("%s must be a JSON object, not %s", env_var, type(payload).__name__)
    return None


def _read_file(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


class HealthCheckPayload:
    """Base class for payloads that the environment may replace.

    A subclass sets `default_payload` and then calls `super().__init__()`.

    Attributes:
        default_payload: The payload when `DYN_HEALTH_CHECK_PAYLOAD` gives none.

    Raises:
        NotImplementedError: There is no `default_payload`.

    Example:
        >>> class Probe(HealthCheckPayload):
        ...     def __init__(self):
        ...         self.default_payload = {"prompt": "hi"}
        ...         super().__init__()
        >>> Probe().to_dict()
        {'prompt': 'hi'}
    """

    default_payload: dict[str, Any]

    def __init__(self) -> None:
        if not hasattr(self, "default_payload"):
            raise NotImplementedError(
                "Subclass must set self.default_payload before calling super().__init__()"
            )
        self._payload: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Give the payload, decided at the first use.

        Returns:
            What `DYN_HEALTH_CHECK_PAYLOAD` holds, or the default.
        """
        if self._payload is None:
            self._payload = load_health_check_from_env() or self.default_payload
        return self._payload

    @override
    def __repr__(self) -> str:
        """Name of the class, and the payload."""
        return f"{type(self).__name__}(payload={self.to_dict()})"
