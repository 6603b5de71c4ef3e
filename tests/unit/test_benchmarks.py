"""What the benchmark makes of its figures, and how it treats a process that fails."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.peers import PEERS
from benchmarks.processes import Failed, Process
from benchmarks.rounds import Results
from benchmarks.workloads import BARS, WORKLOADS, Bar, chosen, metric_of

BAR = Bar("small calls", "calls-32", 20, 30)
PROGRAM = "import sys, time; print('{\"pid\": 1}', flush=True); "


def results(ours: list[object], genuine: list[object]) -> Results:
    def rounds(words: list[object]) -> list[dict[str, float | str]]:
        return [
            {"calls_per_s": one} if isinstance(one, float) else {"error": str(one)}
            for one in words
        ]

    return {"calls-32": {"genuine": rounds(genuine), "ours": rounds(ours)}}


def reached(found: Results) -> report.Spread | None:
    return report.reached(found, "calls-32", "calls_per_s", "ours", "genuine")


@pytest.fixture
def start(tmp_path: Path) -> Callable[[str], Process]:
    def start(text: str) -> Process:
        return Process([sys.executable, "-c", text], os.environ, tmp_path / "errors")

    return start


def test_a_ratio_is_the_median_of_the_ratios_of_the_rounds() -> None:
    # The machine was slow in the second round: the ratio of medians would be 30.
    found = reached(results([300.0, 60.0, 900.0], [10.0, 3.0, 20.0]))
    assert found == report.Spread(30, 20, 45)


def test_a_round_that_failed_on_one_side_has_no_ratio() -> None:
    found = reached(results([300.0, "cut", 90.0], [10.0, 3.0, "cut"]))
    assert found == report.Spread(30, 30, 30)


def test_a_peer_that_always_failed_is_named_and_holds_no_bar() -> None:
    found = results(["cut", "cut"], [10.0, 10.0])
    assert reached(found) is None
    assert report.verdict(BAR, reached(found)) == "not measured"
    lines = report.results_table(found).splitlines()
    assert any("ours" in line and "failed" in line and "cut" in line for line in lines)


@pytest.mark.parametrize(("ours", "verdict"), [(200.0, "pass"), (199.0, "MISS")])
def test_a_bar_is_judged_by_the_median(ours: float, verdict: str) -> None:
    found = results([1.0, ours, 900.0], [10.0, 10.0, 10.0])
    (line,) = [
        line
        for line in report.bars_table(found).splitlines()
        if "x genuine, 32" in line and "calls: x" in line
    ]
    assert line.endswith(verdict)


def test_a_bar_with_an_upper_limit_is_missed_above_it() -> None:
    late = Bar("late", "late-4mib", 10, 5, None, limit="most")
    assert late.holds(10)
    assert not late.holds(10.1)


def test_every_bar_speaks_of_peers_that_its_workload_measures() -> None:
    by_name = {one.name: one for one in WORKLOADS}
    for bar in BARS:
        named = {bar.peer, bar.against or bar.peer}
        assert named <= set(by_name[bar.workload].peers), bar
        assert metric_of(bar)


def test_no_goal_asks_for_less_than_must_be_reached() -> None:
    assert all(bar.holds(bar.goal) for bar in BARS)


def test_figures_at_several_sizes_have_a_table_of_their_own() -> None:
    rounds = [{"rate@1": 10.0, "rate@1000": 4.0, "ratio": 3.0}, {"error": "cut"}]
    found: Results = {"crowd-4000": {"ours": [*rounds, {"rate@1": 30.0}]}}
    lines = [line.split() for line in report.growth_table(found).splitlines()]
    assert lines[1:] == [
        ["crowd-4000", "ours", "1", "20", "[10..30]", "rate"],
        ["crowd-4000", "ours", "1000", "4", "[4..4]", "rate"],
    ]
    assert report.growth_table(results([1.0], [1.0])) == ""


def test_every_peer_of_a_workload_can_be_started() -> None:
    assert {peer for one in WORKLOADS for peer in one.peers} == set(PEERS)


def test_workloads_are_chosen_by_how_their_names_begin() -> None:
    assert [one.name for one in chosen(["calls-3", "late-4"], quick=False)] == [
        "calls-32",
        "late-4mib",
    ]


def test_an_unknown_workload_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no workload is called 'cals'.*calls-32"):
        chosen(["cals"], quick=True)


def test_a_process_that_ends_says_why(start: Callable[[str], Process]) -> None:
    process = start("import sys; sys.exit('no such thing')")
    with pytest.raises(Failed, match="no such thing"):
        process.answer(10)
    process.stop()


def test_a_process_that_does_not_answer_fails_within_its_limit(
    start: Callable[[str], Process],
) -> None:
    process = start(PROGRAM + "sys.stdin.read()")
    assert process.answer(10) == {"pid": 1}
    with pytest.raises(Failed, match=r"no answer within 0\.1 s"):
        process.ask(0.1, load="calls")
    process.stop()


def test_a_process_that_does_not_end_is_killed(
    start: Callable[[str], Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.processes.STOP_LIMIT_S", 0.1)
    process = start(PROGRAM + "time.sleep(60)")
    process.answer(10)
    process.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
