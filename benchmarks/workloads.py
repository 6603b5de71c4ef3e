"""What is measured, between whom, and the bars that ours must reach."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

# The peer that all others are compared with.
REFERENCE = "genuine"
MIXED = ("genuine>ours", "ours>genuine")
OURS = ("ours", "ours-callhome", "ours-asyncio")
PAIRS = (REFERENCE, *OURS)


@dataclasses.dataclass(frozen=True)
class Workload:
    """One load with its numbers, run against some peers in alternating rounds.

    ``metric`` is the one that the table and the chart show.  A ``fresh`` load gets
    processes of its own, and runs in at most ``max_rounds`` rounds.  One round takes no
    more than ``limit_s``.
    """

    name: str
    load: str
    given: dict[str, Any]
    peers: tuple[str, ...]
    metric: str
    better: Literal["high", "low"] = "high"
    quick: dict[str, Any] | None = None
    fresh: bool = False
    max_rounds: int = 99
    limit_s: float = 20.0

    def numbers(self, quick: bool) -> dict[str, Any]:
        """What the load is given; smaller numbers for a quick look."""
        return {**self.given, **(self.quick or {})} if quick else self.given


def _streams(count: int, items: int, handler: str) -> Workload:
    mixed = MIXED if count == 32 else ()
    codec = ("floor-codec",) if handler == "yielding" else ()
    return Workload(
        f"streams-{count}-{handler}",
        "streams",
        {"handler": handler, "items": items, "streams": count, "seconds": 0.2},
        (*PAIRS, *mixed, "grpc", "floor", *codec),
        "items_per_s",
        quick={"seconds": 0.1} if count == 32 else None,
    )


def _calls(concurrent: int) -> Workload:
    mixed = MIXED if concurrent == 32 else ()
    return Workload(
        f"calls-{concurrent}",
        "calls",
        {"concurrent": concurrent, "seconds": 0.4},
        (*PAIRS, *mixed, "grpc", "nats", "floor"),
        "calls_per_s",
        quick={"seconds": 0.2} if concurrent == 32 else None,
    )


def _payloads(mb: int) -> Workload:
    return Workload(
        f"payloads-{mb}mb",
        "payloads",
        {"size_bytes": mb * 1_000_000, "seconds": 0.3},
        (*PAIRS, *MIXED, "grpc", "floor"),
        "mb_per_s",
        quick={"seconds": 0.1} if mb == 1 else None,
    )


def _lateness(mib: int) -> Workload:
    return Workload(
        f"late-{mib}mib",
        "lateness",
        {"size_bytes": mib << 20, "before": 50},
        (REFERENCE, "ours", "ours-callhome"),
        "late_ms",
        "low",
    )


WORKLOADS = [
    *(
        _streams(count, items, handler)
        for handler in ("plain", "yielding")
        for count, items in ((1, 2000), (32, 300), (256, 100))
    ),
    Workload(
        "pace-256",
        "pace",
        {"streams": 256, "seconds": 0.8},
        (*PAIRS, "grpc"),
        "gap_p99_ms",
        "low",
    ),
    _calls(1),
    _calls(32),
    _calls(256),
    _payloads(1),
    _payloads(16),
    Workload(
        "first-warm",
        "first_warm",
        {"times": 50},
        (*PAIRS, *MIXED, "grpc"),
        "first_ms",
        "low",
        quick={"times": 20},
    ),
    Workload(
        "first-cold",
        "first_cold",
        {"times": 3},
        (*PAIRS, *MIXED, "grpc"),
        "first_ms",
        "low",
        quick={"times": 2},
    ),
    _lateness(4),
    _lateness(64),
    Workload(
        "crowd-4000",
        "crowd",
        {
            "handler": "plain",
            # Streams, and items of each.
            "sizes": [(1, 2000), (64, 200), (256, 50), (1000, 50), (4000, 50)],
            "compared": (256, 4000),
            "seconds": 0.01,
        },
        ("ours", "ours-callhome"),
        "cost_ratio",
        "low",
        max_rounds=3,
    ),
    Workload(
        "cancelled-100000",
        "cancelled",
        {"before": 30_000, "count": 100_000},
        ("ours",),
        "left",
        "low",
        fresh=True,
        max_rounds=1,
        limit_s=90,
    ),
    Workload(
        "memory-4000",
        "memory",
        {"low": 1000, "high": 4000},
        ("ours", "ours-callhome"),
        "worker_kb",
        "low",
        fresh=True,
        max_rounds=1,
    ),
    Workload(
        "instances-1000",
        "instances",
        {"counts": [10, 100, 1000], "concurrent": 32, "seconds": 0.2},
        (REFERENCE, "ours"),
        "speed_kept",
        fresh=True,
        max_rounds=2,
    ),
]


@dataclasses.dataclass(frozen=True)
class Bar:
    """A promise: the peer's metric over that of another (or absolute) and its limit.

    ``goal`` is what was hoped for beyond what must be reached.
    """

    line: str
    workload: str
    must: float
    goal: float
    against: str | None = REFERENCE
    metric: str = ""
    peer: str = "ours"
    limit: Literal["least", "most"] = "least"

    def holds(self, reached: float) -> bool:
        """Whether the figure reached is on the right side."""
        return reached >= self.must if self.limit == "least" else reached <= self.must


def _most(
    line: str,
    workload: str,
    must: float,
    goal: float,
    metric: str,
    against: str | None = None,
) -> Bar:
    return Bar(line, workload, must, goal, against, metric, limit="most")


def _of_both(
    line: str, kind: str, must: float, goal: float, against: str = REFERENCE
) -> list[Bar]:
    """The same bar at 32 and at 256."""
    return [
        Bar(f"{line}, {count}", kind.format(count), must, goal, against)
        for count in (32, 256)
    ]


BARS = [
    *_of_both("streams, no await: x genuine", "streams-{}-plain", 20, 30),
    *_of_both("streams, no await: x grpc.aio", "streams-{}-plain", 18, 27, "grpc"),
    *_of_both("streams, yields: x genuine", "streams-{}-yielding", 17, 23),
    *_of_both("streams, yields: x grpc.aio", "streams-{}-yielding", 10, 15, "grpc"),
    *_of_both("share of the framed floor", "streams-{}-plain", 0.15, 0.22, "floor"),
    *_of_both("share of the task floor", "streams-{}-yielding", 0.4, 0.6, "floor"),
    Bar("stream 1, yields: x genuine", "streams-1-yielding", 10, 16),
    Bar("stream 1, no await: x genuine", "streams-1-plain", 40, 75),
    _most(
        "10 ms items: gap p99 / genuine",
        "pace-256",
        1 / 3,
        1 / 3,
        "gap_p99_ms",
        REFERENCE,
    ),
    _most("10 ms items: CPU / genuine", "pace-256", 1 / 5, 1 / 10, "cpu_us", REFERENCE),
    *_of_both("calls: x genuine", "calls-{}", 20, 30),
    *_of_both("calls: x grpc.aio", "calls-{}", 20, 30, "grpc"),
    _most("calls: p99 / genuine, 32", "calls-32", 1 / 15, 1 / 30, "p99_ms", REFERENCE),
    _most(
        "calls: p99 / genuine, 256", "calls-256", 1 / 15, 1 / 30, "p99_ms", REFERENCE
    ),
    Bar("calls, 1: x genuine", "calls-1", 4, 5.5),
    Bar("1 MB payloads: x genuine", "payloads-1mb", 4, 5.5),
    Bar("1 MB payloads: share of the bytes floor", "payloads-1mb", 0.35, 0.45, "floor"),
    Bar("16 MB payloads: x genuine", "payloads-16mb", 2, 3),
    _most("idle stream: KB in the client", "memory-4000", 4, 3, "client_kb"),
    _most("idle stream: KB in the worker", "memory-4000", 4, 3.6, "worker_kb"),
    _most("4,000 streams: cost per item / 256", "crowd-4000", 3, 2, "cost_ratio"),
    _most("calls late by ms, 4 MiB item", "late-4mib", 10, 10, "late_ms"),
    _most("calls late by ms, 64 MiB item", "late-64mib", 150, 20, "late_ms"),
    _most("cancelled calls: tasks, descriptors left", "cancelled-100000", 0, 0, "left"),
    # No object is as small as 20 bytes; heaps are never quite as they were.
    _most("cancelled calls: KB left", "cancelled-100000", 2000, 0, "grown_kb"),
    *(
        Bar("uvloop / asyncio's own loop", one, 1.8, 1.4, "ours-asyncio", limit="most")
        for one in ("streams-32-plain", "streams-32-yielding", "calls-32")
    ),
    *(
        Bar(f"{pair}: x genuine", one, 1, 1, peer=pair)
        for pair in MIXED
        for one in (
            *("streams-32-plain", "streams-32-yielding", "calls-32"),
            *("payloads-1mb", "payloads-16mb"),
        )
    ),
]


def metric_of(bar: Bar) -> str:
    """The metric of a bar: its own, or the main one of the workload."""
    return bar.metric or workload_named(bar.workload).metric


def workload_named(name: str) -> Workload:
    """The workload of that name.

    Raises:
        KeyError: there is none.
    """
    return {one.name: one for one in WORKLOADS}[name]


def chosen(prefixes: list[str], quick: bool) -> list[Workload]:
    """Those whose name begins with one of the prefixes; none given means all.

    Raises:
        ValueError: a prefix fits no name.
    """
    for prefix in prefixes:
        if not any(one.name.startswith(prefix) for one in WORKLOADS):
            names = ", ".join(one.name for one in WORKLOADS)
            raise ValueError(f"no workload is called '{prefix}'; there are {names}")
    if prefixes:
        return [one for one in WORKLOADS if one.name.startswith(tuple(prefixes))]
    return [one for one in WORKLOADS if one.quick or not quick]
