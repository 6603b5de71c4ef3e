"""Clusters whose workers freeze and die, in the memory of one loop and in virtual time.

Bounds are exact there, whatever the machine does; the limits are those of production.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest

from dynamo.runtime import Client, errors
from dynamo.runtime.testing import Cluster, Worker, run_in_virtual_time, until

Lane = Literal["duplex", "callhome"]
LANES = pytest.mark.parametrize("lane", ["duplex", "callhome"])
REQUEST_TIMEOUT_S = 5.0
PING_TIMEOUT_S = 60.0
PING_INTERVAL_S = 20.0
SLACK_S = 0.1
ITEMS = 50
PAUSE_S = 0.01


async def count(request: Any) -> AsyncIterator[int]:
    for number in range(ITEMS):
        yield number
        await asyncio.sleep(PAUSE_S)


async def items_of(client: Client) -> list[int]:
    return [item async for item in await client.round_robin(0, annotated=False)]


# ------------------------------------------------------------------------------ HG-09


@LANES
def test_a_frozen_worker_is_given_up_in_time_and_called_again_once_it_thaws(
    lane: Lane,
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with Cluster(lane=lane) as cluster:
            worker = await cluster.serve("a.b.c", count)
            client = await cluster.client("a.b.c")
            assert await items_of(client) == list(range(ITEMS))
            worker.freeze()
            began = loop.time()
            with pytest.raises(errors.CallTimeout) as caught:
                await items_of(client)
            assert loop.time() - began == pytest.approx(REQUEST_TIMEOUT_S, abs=SLACK_S)
            assert not caught.value.retryable
            await asyncio.sleep(3)
            worker.thaw()
            await cluster.ready(timeout=1)
            assert await items_of(client) == list(range(ITEMS))
            assert await client.wait_for_instances() == client.instance_ids()

    run_in_virtual_time(main())


def test_a_stream_of_a_worker_that_froze_for_good_is_lost_in_time() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with Cluster(lane="duplex") as cluster:
            worker = await cluster.serve("a.b.c", count)
            client = await cluster.client("a.b.c")
            stream = await client.random(0, annotated=False)
            assert await stream.__anext__() == 0
            worker.freeze()
            began = loop.time()
            with pytest.raises(errors.StreamBroken):
                async for _ in stream:
                    pass
            limit_s = PING_TIMEOUT_S + PING_INTERVAL_S / 2
            assert PING_TIMEOUT_S - SLACK_S <= loop.time() - began <= limit_s + SLACK_S

    run_in_virtual_time(main())


# ------------------------------------------------------------------------------ HG-01


class Churn:
    """Workers that are killed and replaced under callers that never pause."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.ended: Counter[str] = Counter()
        self.workers: list[Worker] = []
        self._cluster = cluster
        self._random = random.Random(seed)

    async def one_dies_and_another_comes(self) -> None:
        victim = self.workers.pop(self._random.randrange(len(self.workers)))
        await victim.kill()
        victim.lose_lease()
        await self.one_comes()

    async def one_comes(self) -> None:
        self.workers.append(await self._cluster.serve("a.b.c", count))

    async def call(self, client: Client) -> None:
        """One call, of which all items came, or else an error after the first ones."""
        got: list[int] = []
        try:
            stream = await client.round_robin(0, annotated=False)
            async for item in stream:
                got.append(item)  # noqa: PERF401 - what came before an error counts
        except errors.CallError as error:
            assert got == list(range(len(got)))
            self.ended[type(error).__name__] += 1
        else:
            assert got == list(range(ITEMS)), "a silently short stream"
            self.ended["complete"] += 1


@pytest.mark.slow
@LANES
def test_every_stream_ends_while_workers_die_and_come(lane: Lane, scale: float) -> None:
    callers, duration_s = 60, 3.0 * scale
    # A stream needs half a second; nothing that happens to it may take much longer.
    limit_s = 5.0

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with Cluster(lane=lane) as cluster:
            churn = Churn(cluster, seed=1)
            for _ in range(8):
                await churn.one_comes()
            client = await cluster.client("a.b.c")
            end = loop.time() + duration_s

            async def caller() -> None:
                while loop.time() < end:
                    await asyncio.wait_for(churn.call(client), limit_s)

            calling = [asyncio.create_task(caller()) for _ in range(callers)]
            while loop.time() < end:
                await asyncio.sleep(0.3)
                await churn.one_dies_and_another_comes()
            await asyncio.gather(*calling)
            await until(lambda: not any(one.in_flight for one in churn.workers))
            assert {call.outcome for call in cluster.calls} <= {"completed", "stopped"}
        # Those that were cut off in the middle are told; nobody else fails.
        assert set(churn.ended) <= {"complete", "StreamBroken", "WorkerLost"}
        assert churn.ended["complete"] > 5 * churn.ended.total() / 10
        assert churn.ended["StreamBroken"]

    run_in_virtual_time(main())
