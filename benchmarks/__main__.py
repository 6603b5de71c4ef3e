"""``python -m benchmarks``: measures, prints tables, writes a JSON file and a chart."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path

from benchmarks import chart, report
from benchmarks.peers import ROOT, Cluster, missing
from benchmarks.rounds import Bench, Results
from benchmarks.workloads import Workload, chosen

CALLHOME = "ours-callhome"


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME")
    parser.add_argument("--rounds", type=int, help="5; 2 with --quick")
    parser.add_argument(
        "--seconds", type=float, help="after which rounds are left out; 340, quick 80"
    )
    parser.add_argument("--quick", action="store_true", help="under 90 s")
    parser.add_argument("--loop", choices=["uvloop", "asyncio"], default="uvloop")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench")
    options = parser.parse_args(words)
    if options.seconds is None:
        options.seconds = 80 if options.quick else 340
    if options.rounds is None:
        options.rounds = 2 if options.quick else 5
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    try:
        options.workloads = chosen(options.only, options.quick)
    except ValueError as error:
        parser.error(str(error))
    return options


def machine() -> str:
    """The machine in a few words."""
    model = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2] for line in lines if "model name" in line]
        model = names[0].strip() if names else model
    return f"{os.cpu_count()} x {model}, {platform.system()} {platform.release()}"


def usable(workloads: list[Workload], wanted: list[str], loop: str) -> set[str]:
    """The peers that can be measured; says why the others cannot."""
    peers = {peer for one in workloads for peer in one.peers}
    if wanted:
        peers &= set(wanted)
    if loop == "asyncio":
        peers.discard("ours-asyncio")  # would be "ours" once more
    for peer in sorted(peers):
        if reason := missing(peer):
            print(f"not measured: {peer}: {reason}")
            peers.discard(peer)
    return peers


def measure(options: argparse.Namespace, cluster: Cluster) -> Results:
    """Run what was chosen, with a line of progress that is overwritten."""
    started = time.monotonic()
    shows = sys.stdout.isatty()

    def tell(words: str) -> None:
        if shows:
            print(f"\r{time.monotonic() - started:4.0f} s  {words}", end="", flush=True)

    peers = usable(options.workloads, options.peer, options.loop)
    if {"ours", CALLHOME} <= peers and not cluster.advertises_lanes("ours"):
        print(f"not measured: {CALLHOME}: ours has no other lane")
        peers.discard(CALLHOME)
    bench = Bench(cluster, options.loop, options.quick, tell)
    results: Results = {}
    for number, workload in enumerate(options.workloads, 1):
        of_this = [peer for peer in workload.peers if peer in peers]
        left_s = started + options.seconds - time.monotonic()
        share_s = 2 * left_s / (len(options.workloads) - number + 2)
        if of_this:
            results[workload.name] = bench.run(
                workload, of_this, options.rounds, share_s
            )
        elapsed = time.monotonic() - started
        place = f"[{number}/{len(options.workloads)}]"
        line = f"{elapsed:4.0f} s  {place} {workload.name}"
        print(f"\r{line:<60}" if shows else line, flush=True)
    return results


def main(words: list[str]) -> int:
    options = parse(words)
    # As for Ctrl-C: what was started is stopped on the way out.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    cluster = Cluster(options.loop)
    try:
        results = measure(options, cluster)
        lanes = cluster.lanes("ours") if "ours" in cluster.versions else "not measured"
    finally:
        cluster.close()
    about = {
        "machine": machine(),
        "loop": options.loop,
        "rounds": str(options.rounds),
        "lane of ours": lanes,
        **{f"versions, {name}": text for name, text in cluster.versions.items()},
    }
    print("\n" + report.results_table(results))
    if growth := report.growth_table(results):
        print("\n" + growth)
    print("\n" + report.bars_table(results) + "\n")
    for name, text in about.items():
        print(f"{name}: {text}")
    write(options.out, about, results)
    return 0


def write(folder: Path, about: dict[str, str], results: Results) -> None:
    """The JSON file and the chart."""
    folder.mkdir(parents=True, exist_ok=True)
    bars = [
        {
            **dataclasses.asdict(bar),
            "reached": found and dataclasses.asdict(found),
            "verdict": report.verdict(bar, found),
        }
        for bar, found in report.bars(results)
    ]
    text = json.dumps({"about": about, "bars": bars, "results": results}, indent=1)
    (folder / "bench.json").write_text(text + "\n", encoding="utf-8")
    print(f"written: {folder / 'bench.json'}")
    python = about.get("versions, ours", platform.python_version())
    caption = f"{about['machine']}; {about['loop']}; {python}"
    if chart.draw(results, caption, folder / "bench.png"):
        print(f"written: {folder / 'bench.png'}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
