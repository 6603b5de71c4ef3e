"""Runs workloads against peers in alternating rounds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from benchmarks.peers import Cluster
from benchmarks.processes import Failed
from benchmarks.workloads import Workload

WARM_UP_S = 0.05
LEAST_ROUNDS = 2

# By workload, peer and round; a round that failed holds only the word "error".
Round = dict[str, float | str]
Results = dict[str, dict[str, list[Round]]]


class Bench:
    """The rounds of one run, all on the same processes but for fresh loads."""

    def __init__(
        self,
        cluster: Cluster,
        loop: str,
        quick: bool,
        tell: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._loop = loop
        self._quick = quick
        self._tell = tell
        self._warm: set[tuple[str, str, str]] = set()

    def run(
        self, workload: Workload, peers: list[str], rounds: int, limit_s: float
    ) -> dict[str, list[Round]]:
        """What each peer reached in each round.

        Args:
            workload: What to measure.
            peers: Who takes part, in the order of the first round.
            rounds: How many, if the time is enough.
            limit_s: No round begins later than that after the first ones.
        """
        late = time.monotonic() + limit_s
        results: dict[str, list[Round]] = {peer: [] for peer in peers}
        self._warm_up(workload, peers)
        for number in range(min(rounds, workload.max_rounds)):
            if number >= LEAST_ROUNDS and time.monotonic() > late:
                break
            # Who comes after whom changes, so that nobody always follows the same.
            order = peers if number % 2 == 0 else peers[::-1]
            for peer in order:
                result = self._one(workload, peer)
                results[peer].append(result)
                self._tell(f"{workload.name:<20} round {number + 1}  {peer:<14}")
        return results

    def _warm_up(self, workload: Workload, peers: list[str]) -> None:
        """Connections, caches and code paths, once per kind of load."""
        handler = str(workload.given.get("handler", workload.given.get("size_bytes")))
        for peer in peers:
            key = (peer, workload.load, handler)
            if not workload.fresh and key not in self._warm:
                self._warm.add(key)
                self._tell(f"{workload.name:<20} warm-up  {peer:<14}")
                self._one(workload, peer, seconds=WARM_UP_S)

    def _one(self, workload: Workload, peer: str, **changes: float) -> Round:
        with self._cluster_for(workload) as cluster:
            try:
                client, worker = cluster.client(peer)
                given = {**workload.numbers(self._quick), **changes}
                given["worker"] = worker
                measured = client.ask(workload.limit_s, load=workload.load, **given)
            except Failed as error:
                cluster.drop(peer)
                return {"error": str(error)}
            return dict(measured)

    @contextlib.contextmanager
    def _cluster_for(self, workload: Workload) -> Iterator[Cluster]:
        if not workload.fresh:
            yield self._cluster
            return
        fresh = Cluster(self._loop)
        try:
            yield fresh
        finally:
            fresh.close()
