"""The trace context of a request."""

from __future__ import annotations

from typing import NamedTuple


class TraceContext(NamedTuple):
    """The tracing headers of one request, as they came or are to be sent."""

    traceparent: str | None
    tracestate: str | None
    x_request_id: str | None
