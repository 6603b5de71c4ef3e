"""The spans that handlers see, and the identity a traced call shows in its context.

Nothing here exports a span or imports a tracing library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from dynamo.runtime._sealed import Unconstructible

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

__all__ = ["SpanIdentity", "SpanProxy", "check_span_arguments"]


class SpanIdentity(NamedTuple):
    """What `Context` tells about the span of its call, in a process that traces.

    `headers` are those that continue the trace from this span; readers copy them.
    """

    trace_id: str
    span_id: str
    parent_span_id: str | None
    headers: Mapping[str, str]


class SpanProxy(Unconstructible):
    """A span that records nothing, given by `Context.current_span` and `start_span`.

    Endpoints served through `dynamo.runtime` have no engine span to write to, in the
    genuine runtime as here, so every method checks its arguments and does nothing else.

    Example:
        >>> from dynamo.runtime._calls.context import Context
        >>> with Context().start_span("prefill", {"tokens": 12}) as span:
        ...     span.set_attribute("cached", True)
        ...     span.add_event("first token")
        ...     span.set_status("ok")
    """

    __slots__ = ()

    @classmethod
    def _make(cls) -> SpanProxy:
        return cls.__new__(cls)

    def set_attribute(self, key: str, value: object) -> None:
        """Set one attribute.

        Args:
            key: The attribute's name.
            value: Any value.

        Raises:
            TypeError: The key is no text.
        """
        _check_str("key", key)

    def add_event(self, name: str, attrs: dict[str, object] | None = None) -> None:
        """Note that something happened now.

        Args:
            name: What happened.
            attrs: Attributes of the event; contents are not looked at.

        Raises:
            TypeError: The name is no text, or the attributes are no dict.
        """
        check_span_arguments(name, attrs)

    def set_status(self, status: str, description: str | None = None) -> None:
        """Say how the work of the span ended.

        Args:
            status: `"ok"` or `"error"`.
            description: Words to an error.

        Raises:
            TypeError: An argument is no text.
            ValueError: The status is another word.
        """
        _check_str("status", status)
        if description is not None:
            _check_str("description", description)
        if status not in ("ok", "error"):
            raise ValueError(f'set_status: expected "ok" or "error", got "{status}"')

    def close(self) -> None:
        """End the span; further calls are allowed and ignored."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: object = None,
        exc_value: object = None,
        traceback: object = None,
    ) -> Literal[False]:
        self.close()
        return False


def check_span_arguments(name: object, attrs: object) -> None:
    """Refuse a span or event name that is no text, or attributes that are no dict."""
    _check_str("name", name)
    if attrs is not None and not isinstance(attrs, dict):
        raise TypeError(f"attrs must be a dict or None, not {type(attrs).__name__}")


def _check_str(argument: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{argument} must be str, not {type(value).__name__}")
