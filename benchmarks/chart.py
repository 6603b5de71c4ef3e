"""The chart for the README: how many times the genuine wheel each peer reaches."""

from __future__ import annotations

from pathlib import Path

from benchmarks.report import reached
from benchmarks.rounds import Results
from benchmarks.workloads import REFERENCE, WORKLOADS, Workload

LOADS = ("streams", "pace", "calls", "payloads", "first_warm")
PEERS = {
    "ours": "#1f6f4a",
    "ours-callhome": "#7fb89a",
    "grpc": "#5577aa",
    "nats": "#b08a3e",
}


def _times_better(results: Results, workload: Workload, peer: str) -> float | None:
    found = reached(results, workload.name, workload.metric, peer, REFERENCE)
    if found is None or not found.median:
        return None
    return found.median if workload.better == "high" else 1 / found.median


def draw(results: Results, caption: str, path: Path) -> bool:
    """Write the chart; False if there is nothing to show or nothing to draw with."""
    shown = [
        one
        for one in WORKLOADS
        if one.load in LOADS and _times_better(results, one, "ours")
    ]
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    if not shown:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.5 * len(shown)))
    peers = {one for workload in shown for one in results[workload.name]}
    colors = {peer: color for peer, color in PEERS.items() if peer in peers}
    height = 0.8 / len(colors)
    for place, (peer, color) in enumerate(colors.items()):
        times = [_times_better(results, one, peer) for one in shown]
        rows = [row + place * height for row, one in enumerate(times) if one]
        # From the line of the genuine wheel: on this axis nothing begins at zero.
        lengths = [one - 1 for one in times if one]
        axes.barh(rows, lengths, height, left=1, color=color, label=peer)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks(
        [row + 0.4 - height / 2 for row in range(len(shown))],
        [f"{one.name}\n({one.metric})" for one in shown],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("times better than the genuine wheel (line: equal)")
    axes.legend(fontsize=8)
    figure.text(0.01, 0.01, caption, fontsize=7)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
