"""The bounds of `docs/semantics.md` where workers leave, sleep, and take over.

As in `test_semantics`: median and maximum of several tries are printed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from measured import AT_ONCE_S, LIMIT_S, TRIES, Times
from raw_peers import PATH, make_runtime, shut_down, until, within
from served import Served, served

from dynamo.runtime import Context
from dynamo.runtime._discovery.file import FileBackend
from dynamo.runtime.errors import (
    EngineShutdown,
    Refused,
    RemoteError,
    StreamBroken,
    StreamError,
)
from dynamo.runtime.testing import Cluster

NAME = "t.w.e"
BUDGET_S = 0.4
# Each is a life of a worker.
LIVES = 3
IDLE_S = 0.25


async def next_item(stream: Any) -> Any:
    return await asyncio.wait_for(anext(stream), LIMIT_S)


# ------------------------------------------------------------------ a worker shuts down


class Silent:
    """A handler that goes on for ever, and notes when it ended."""

    def __init__(self) -> None:
        self.running = 0

    async def __call__(self, request: object, context: Context) -> AsyncIterator[Any]:
        self.running += 1
        try:
            yield "begun"
            if request == "hush":
                await asyncio.Event().wait()
        finally:
            self.running -= 1


async def call_until_refused(pair: Served) -> None:
    """What comes just after the shutdown is served; whoever calls on is refused."""
    while True:
        assert await pair.items() == ["begun"]


async def test_a_shutdown_step_by_step(each_lane: str) -> None:
    served_for = Times("callers with an old list are served", BUDGET_S / 2, LIVES)
    refused = Times("later callers are refused", AT_ONCE_S, LIVES)
    broken = Times("the budget is spent, caller", BUDGET_S, LIVES)
    stopped = Times("the budget is spent, handler", BUDGET_S + 2, LIVES)
    over = Times("all is over", BUDGET_S + 2, LIVES)
    for _ in range(LIVES):
        handler = Silent()
        async with served(handler, worker={"drain_timeout_s": BUDGET_S}) as pair:
            # From now on its list is that of before the shutdown.
            pair.client._home.instances._watch.close()
            stream = await pair.call("hush")
            assert await next_item(stream) == "begun"
            since = time.monotonic()
            pair.worker.shutdown()
            error = await served_for.error(
                call_until_refused(pair), Refused, since=since
            )
            assert error.retryable
            assert (await refused.error(pair.call(), Refused)).retryable
            await broken.error(next_item(stream), StreamBroken, since=since)
            await stopped.event(lambda h=handler: not h.running, since=since)
            await over.event(pair.serving.done, since=since)
    served_for.judge()
    refused.judge()
    broken.judge(not_before_s=BUDGET_S)
    stopped.judge(not_before_s=BUDGET_S)
    over.judge(not_before_s=BUDGET_S)


async def test_a_worker_sleeps_and_wakes(tmp_path: Path) -> None:
    away = Times("asleep, not called any more", AT_ONCE_S)
    back = Times("awake, called again", AT_ONCE_S)
    worker, caller = make_runtime(), make_runtime()
    for runtime in (worker, caller):
        runtime._core.backend = FileBackend(tmp_path, ttl_s=10.0)
    endpoint = worker.endpoint(PATH)
    serving = endpoint.serve_endpoint(Silent())
    client = await caller.endpoint(PATH).client()
    ids = await within(client.wait_for_instances())
    for _ in range(TRIES):
        await endpoint.unregister_endpoint_instance()
        since = time.monotonic()
        await away.event(lambda: client.instance_ids() == [], since=since)
        await endpoint.register_endpoint_instance()
        since = time.monotonic()
        await back.event(lambda: client.instance_ids() == ids, since=since)
    away.judge()
    back.judge()
    await shut_down(caller)
    await shut_down(worker)
    await within(serving)


# ------------------------------------------------------------------ going on elsewhere


async def handle(request: dict[str, Any]) -> AsyncIterator[int]:
    """Numbers its items, and after the first one does as the request says."""
    number = request["from"]
    yield number
    if request["then"] == "down":
        raise EngineShutdown("down")
    if request["then"] == "fail":
        raise RuntimeError("boom")
    if request["then"] == "hush":
        await asyncio.Event().wait()
    yield number + 1


class Caller:
    """A client with always two workers, and streams that may go on elsewhere."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.client: Any = None
        self.workers: dict[int, Any] = {}
        self.dead: list[Any] = []
        self.asked = 0

    async def begin(self, then: str, ask: Any = None, workers: int = 2) -> Any:
        """A stream whose first item has come; what it goes on with is up to ``ask``."""
        while len(self.workers) < workers:
            worker = await self.cluster.serve(NAME, handle)
            self.workers[worker.instance_id] = worker
        if self.client is None:
            self.client = await self.cluster.client(NAME)
        request = {"from": 0, "then": then}
        stream = await asyncio.wait_for(
            self.client.round_robin(
                request,
                annotated=False,
                on_stream_lost=ask or self.go_on,
                idle_timeout=IDLE_S,
            ),
            LIMIT_S,
        )
        assert await next_item(stream) == 0
        return stream

    def go_on(self, items: int, error: StreamError) -> dict[str, Any]:
        self.asked += 1
        return {"from": items, "then": "end"}

    async def retire(self, instance_id: int) -> None:
        """Kill it; its record stays, as ever."""
        self.dead.append(self.workers.pop(instance_id))
        await self.dead[-1].kill()

    async def forget_the_dead(self) -> None:
        for worker in self.dead:
            worker.lose_lease()
        await until(lambda: self.client.instance_ids() == list(self.workers))


BOTH_LANES = pytest.mark.parametrize("lane", ["duplex", "callhome"])


@BOTH_LANES
@pytest.mark.parametrize(
    ("then", "bound_s"), [("lost", AT_ONCE_S), ("down", AT_ONCE_S), ("hush", IDLE_S)]
)
async def test_a_stream_that_goes_on_elsewhere(
    lane: Any, then: str, bound_s: float
) -> None:
    times = Times(f"next item from another worker ({then})", bound_s)
    async with Cluster(lane=lane) as cluster:
        caller = Caller(cluster)
        for _ in range(TRIES):
            stream = await caller.begin("hush" if then == "lost" else then)
            first = stream.instance_id
            since = time.monotonic()
            if then == "lost":
                await caller.retire(first)
            assert await times.result(next_item(stream), since=since) == 1
            assert [item async for item in stream] == [2]
            assert stream.instance_id != first
            if then != "lost":
                # What it did is remembered: the next stream gets another one.
                await caller.retire(first)
        assert caller.asked == TRIES
    times.judge(not_before_s=bound_s)


@BOTH_LANES
async def test_a_stream_that_does_not_go_on(lane: Any) -> None:
    ordinary = Times("an ordinary error of the handler", AT_ONCE_S)
    raised = Times("the function of the caller raises", AT_ONCE_S)
    unfit = Times("what it returns cannot be sent", AT_ONCE_S)

    def refuse(items: int, error: StreamError) -> Any:
        raise KeyError("mine")

    def unsendable(items: int, error: StreamError) -> Any:
        return object()

    async with Cluster(lane=lane) as cluster:
        caller = Caller(cluster)
        for _ in range(TRIES):
            stream = await caller.begin("fail")
            await ordinary.error(next_item(stream), RemoteError)
            for times, ask, kind in (
                (raised, refuse, KeyError),
                (unfit, unsendable, TypeError),
            ):
                stream = await caller.begin("down", ask)
                await times.error(next_item(stream), kind)
                await caller.retire(stream.instance_id)
        assert caller.asked == 0
    for times in (ordinary, raised, unfit):
        times.judge()


@BOTH_LANES
async def test_a_stream_for_which_nobody_is_left(lane: Any) -> None:
    times = Times("nobody is left to go on", AT_ONCE_S)
    async with Cluster(lane=lane) as cluster:
        caller = Caller(cluster)
        for number in range(1, TRIES + 1):
            stream = await caller.begin("hush", workers=1)
            since = time.monotonic()
            await caller.retire(stream.instance_id)
            await times.error(next_item(stream), StreamBroken, since=since)
            assert caller.asked == number
            await caller.forget_the_dead()
    times.judge()
