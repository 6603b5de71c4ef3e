"""From results to ratios, and from ratios to tables."""

from __future__ import annotations

import dataclasses
import statistics

from benchmarks.rounds import Results, Round
from benchmarks.workloads import (
    BARS,
    OURS,
    REFERENCE,
    WORKLOADS,
    Bar,
    Workload,
    metric_of,
)


@dataclasses.dataclass(frozen=True)
class Spread:
    """The median of a figure over the rounds, with the extremes."""

    median: float
    least: float
    most: float

    @property
    def text(self) -> str:
        return f"{figure(self.median)} [{figure(self.least)}..{figure(self.most)}]"


def figure(value: float) -> str:
    """Three digits are more than a noisy machine gives."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(values: list[float]) -> Spread | None:
    """None where there is nothing to take a median of."""
    if not values:
        return None
    return Spread(statistics.median(values), min(values), max(values))


def values(rounds: list[Round], metric: str) -> list[float | None]:
    """The metric of each round; None where the round failed."""
    found = (one.get(metric) for one in rounds)
    return [one if isinstance(one, (int, float)) else None for one in found]


def reached(
    results: Results, workload: str, metric: str, peer: str, against: str | None
) -> Spread | None:
    """The metric of a peer, over that of another in the same round."""
    of_peers = results.get(workload, {})
    mine = values(of_peers.get(peer, []), metric)
    if against is None:
        return spread([one for one in mine if one is not None])
    theirs = values(of_peers.get(against, []), metric)
    pairs = zip(mine, theirs, strict=False)  # a round may have been lost
    return spread([a / b for a, b in pairs if a is not None and b])


def _errors(rounds: list[Round]) -> str:
    words = {str(one["error"]) for one in rounds if "error" in one}
    return "; ".join(sorted(words))[:70]


def _rows_of(results: Results, workload: Workload) -> list[list[str]]:
    rows = []
    for peer, rounds in results[workload.name].items():
        mine = reached(results, workload.name, workload.metric, peer, None)
        ratio = reached(results, workload.name, workload.metric, peer, REFERENCE)
        p99 = reached(results, workload.name, "p99_ms", peer, None)
        cpu = reached(results, workload.name, "cpu_us", peer, None)
        rows.append(
            [
                workload.name,
                peer,
                mine.text if mine else "failed",
                ratio.text if ratio and peer != REFERENCE else "",
                figure(p99.median) if p99 else "",
                figure(cpu.median) if cpu else "",
                f"{len(rounds)} {_errors(rounds)}",
            ]
        )
    return rows


def results_table(results: Results) -> str:
    """What every peer reached, and that over the genuine wheel.

    CPU is the processor time of both sides for one item, call or payload.
    """
    rows = [
        [
            *("workload", "peer", "figure [min..max]", "over genuine"),
            *("p99 ms", "CPU us", "rounds"),
        ]
    ]
    for workload in WORKLOADS:
        if workload.name in results:
            rows += _rows_of(results, workload)
            rows[-len(results[workload.name])][2] += f" {workload.metric}"
    return _table(rows)


def growth_table(results: Results) -> str:
    """The figures that some loads take at several sizes, as METRIC@SIZE."""
    rows = [["workload", "peer", "at", "figure [min..max]"]]
    for name, peers in results.items():
        for peer, rounds in peers.items():
            metrics = dict.fromkeys(key for one in rounds for key in one if "@" in key)
            for metric in metrics:
                found = reached(results, name, metric, peer, None)
                what, _, size = metric.partition("@")
                rows.append([name, peer, size, f"{found.text} {what}" if found else ""])
    return _table(rows) if len(rows) > 1 else ""


def verdict(bar: Bar, found: Spread | None) -> str:
    """Whether the bar is held."""
    if found is None:
        return "not measured"
    return "pass" if bar.holds(found.median) else "MISS"


def bars(results: Results) -> list[tuple[Bar, Spread | None]]:
    """The bars of the workloads that were run, with what was reached."""
    return [
        (bar, reached(results, bar.workload, metric_of(bar), bar.peer, bar.against))
        for bar in BARS
        if bar.workload in results and (bar.peer not in OURS or _has_ours(results))
    ]


def _has_ours(results: Results) -> bool:
    return any("ours" in peers for peers in results.values())


def bars_table(results: Results) -> str:
    """Each bar with the figure reached."""
    rows = [["bar", "workload", "must", "goal", "reached [min..max]", ""]]
    rows += [
        [
            bar.line,
            bar.workload,
            f"{'>=' if bar.limit == 'least' else '<='} {figure(bar.must)}",
            figure(bar.goal),
            found.text if found else "",
            verdict(bar, found),
        ]
        for bar, found in bars(results)
    ]
    return _table(rows)


def _table(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
