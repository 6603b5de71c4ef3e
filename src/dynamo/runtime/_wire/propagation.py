"""The headers of a request frame: ids, trace context, time left.

Owns their names and their validity.  Makes no ids and reads no clock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

REQUEST_ID = "request-id"
SENT_NS = "x-frontend-send-ts-ns"
ENDPOINT_PATH = "x-endpoint-path"
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
X_REQUEST_ID = "x-request-id"

# Tells a worker of ours that the caller reads our extensions; genuine ones ignore it.
_OURS = "x-dynamo-py"
# What is left of the call's time, in milliseconds; no clock of another host matters.
_REMAINING_MS = "x-dynamo-py-remaining-ms"
_MAX_REMAINING_DIGITS = 15

# As the genuine runtime reads it: version 00 has exactly four fields and flags up to 02,
# later versions may have more of both; ff and identifiers of zeros are invalid.
_TRACEPARENT = re.compile(
    r"(?:00-(?P<fixed>[0-9a-f]{32}-[0-9a-f]{16})-0[0-2]"
    r"|(?!00|ff)[0-9a-f]{2}-(?P<later>[0-9a-f]{32}-[0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?)",
    re.DOTALL,
)
_ZERO_TRACE = "0" * 32
_ZERO_SPAN = "0" * 16


class TraceContext(NamedTuple):
    """What a request carries of the trace it belongs to."""

    traceparent: str | None
    tracestate: str | None
    x_request_id: str | None


def request_headers(
    *,
    request_id: str,
    path: str,
    sent_ns: int,
    trace: TraceContext | None,
    remaining_ms: int | None = None,
) -> dict[str, str]:
    """The headers of one request.

    Args:
        request_id: The context's id.
        path: The endpoint path of the request frame.
        sent_ns: The time of sending in nanoseconds since the epoch.
        trace: What to pass on, or None with tracing off.
        remaining_ms: Until the deadline of the call, or None.
    """
    headers = {REQUEST_ID: request_id, SENT_NS: str(sent_ns), ENDPOINT_PATH: path}
    if trace is not None:
        names = (TRACEPARENT, TRACESTATE, X_REQUEST_ID)
        present = zip(names, trace, strict=True)
        headers.update((name, value) for name, value in present if value is not None)
    headers[_OURS] = "1"
    if remaining_ms is not None:
        headers[_REMAINING_MS] = str(remaining_ms)
    return headers


def read_remaining_ms(headers: Mapping[str, str]) -> int | None:
    """What was left of the call's time when it was sent; None if it has no deadline."""
    text = headers.get(_REMAINING_MS, "")
    if len(text) > _MAX_REMAINING_DIGITS or not (text.isascii() and text.isdigit()):
        return None
    return int(text)


def read_trace(headers: Mapping[str, str]) -> TraceContext | None:
    """The trace context of a request, or None when it carries none.

    A malformed ``traceparent`` is dropped; the other two are kept even then, as the
    genuine runtime does.
    """
    trace = TraceContext(
        _valid_traceparent(headers.get(TRACEPARENT)),
        headers.get(TRACESTATE),
        headers.get(X_REQUEST_ID),
    )
    return trace if any(value is not None for value in trace) else None


def sent_by_ours(headers: Mapping[str, str]) -> bool:
    """True if the caller runs this implementation."""
    return _OURS in headers


def _valid_traceparent(text: str | None) -> str | None:
    bare = (text or "").strip()
    match = _TRACEPARENT.fullmatch(bare)
    if match is None:
        return None
    trace_id, span_id = (match["fixed"] or match["later"]).split("-")
    return None if trace_id == _ZERO_TRACE or span_id == _ZERO_SPAN else bare
