"""Request headers and trace context."""

from __future__ import annotations

import pytest

from dynamo.runtime._wire.propagation import (
    TraceContext,
    read_remaining_ms,
    read_trace,
    request_headers,
    sent_by_ours,
)

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


def test_headers_without_trace() -> None:
    headers = request_headers(request_id="id", path="1/a/b/c", sent_ns=17, trace=None)
    assert headers == {
        "request-id": "id",
        "x-frontend-send-ts-ns": "17",
        "x-endpoint-path": "1/a/b/c",
        "x-dynamo-py": "1",
    }
    assert read_trace(headers) is None
    assert sent_by_ours(headers)
    assert not sent_by_ours({"request-id": "id"})


@pytest.mark.parametrize(
    "trace",
    [
        TraceContext(GOOD, None, None),
        TraceContext(GOOD, "vendor=1", "mine"),
        TraceContext(None, "vendor=1", None),
        TraceContext(None, None, "mine"),
    ],
)
def test_trace_survives_the_headers(trace: TraceContext) -> None:
    headers = request_headers(request_id="id", path="p", sent_ns=0, trace=trace)
    assert None not in headers.values()
    assert read_trace(headers) == trace


@pytest.mark.parametrize(
    "traceparent",
    [
        GOOD,
        f"00-{TRACE}-{SPAN}-00",
        f"00-{TRACE}-{SPAN}-02",
        f"01-{TRACE}-{SPAN}-ff",
        f"cc-{TRACE}-{SPAN}-01-later-fields",
    ],
)
def test_valid_traceparent_is_kept_without_blanks(traceparent: str) -> None:
    trace = read_trace({"traceparent": f" {traceparent}\t"})
    assert trace == TraceContext(traceparent, None, None)


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "junk",
        GOOD.upper(),
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-03",
        f"00-{TRACE}-{SPAN}-01-extra",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"01-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"0-{TRACE}-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01x",
    ],
)
def test_malformed_traceparent_is_dropped_and_the_rest_kept(traceparent: str) -> None:
    assert read_trace({"traceparent": traceparent}) is None
    headers = {"traceparent": traceparent, "tracestate": "v=1", "x-request-id": "me"}
    assert read_trace(headers) == TraceContext(None, "v=1", "me")


def test_the_time_left_travels_as_milliseconds() -> None:
    headers = request_headers(
        request_id="id", path="p", sent_ns=0, trace=None, remaining_ms=1500
    )
    assert headers["x-dynamo-py-remaining-ms"] == "1500"
    assert read_remaining_ms(headers) == 1500
    assert sent_by_ours(headers)


@pytest.mark.parametrize("text", ["", "-1", "1.5", "\u0661", "x", "1" * 16, " 1"])
def test_an_unreadable_time_left_is_none(text: str) -> None:
    assert read_remaining_ms({"x-dynamo-py-remaining-ms": text}) is None
    assert read_remaining_ms({}) is None
