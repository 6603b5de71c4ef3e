"""Never run: the public types of `dynamo.runtime.testing` stay usable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

from typing_extensions import assert_type

from dynamo.runtime import Client, DistributedRuntime
from dynamo.runtime.testing import (
    Cluster,
    Cut,
    FaultProxy,
    Pace,
    RecordedCall,
    VirtualTimeLoop,
    Worker,
    in_virtual_time,
    run_in_virtual_time,
    until,
)


async def echo(request: object) -> AsyncIterator[object]:
    yield request


async def uses_a_cluster() -> None:
    async with Cluster(lane="callhome", env={"DYN_TCP_POOL_SIZE": "1"}) as cluster:
        assert_type(cluster, Cluster)
        worker = await cluster.serve("a.b.c", echo)
        assert_type(worker, Worker)
        await cluster.serve("a.b.d", echo, worker=worker, bidirectional=False)
        runtime = cluster.runtime(env={})
        assert_type(runtime, DistributedRuntime)
        assert_type(await cluster.client("a.b.c", runtime=runtime), Client)
        await cluster.ready(timeout=1)
        assert_type(cluster.calls, list[RecordedCall])
        await uses_faults(worker)


async def uses_faults(worker: Worker) -> None:
    proxy = await worker.fault_proxy()
    assert_type(proxy, FaultProxy)
    proxy.cut = Cut(up=1, how="half")
    proxy.pace = Pace(delay_s=1, chunk_bytes=2, interval_s=0.5)
    proxy.half_close("down")
    with worker.overloaded():
        assert_type(worker.in_flight, int)
    worker.freeze()
    worker.thaw()
    worker.lose_lease()
    await worker.renew_lease()
    await worker.kill()
    call = worker.calls[0]
    assert_type(
        await call.ended(timeout=1),
        Literal["running", "completed", "stopped", "failed", "cancelled"],
    )
    assert_type(call.items, list[Any])


async def uses_a_proxy_alone() -> None:
    async with FaultProxy(80, target_host="127.0.0.1") as proxy:
        assert_type(proxy, FaultProxy)
        assert_type(proxy.port, int)
        await until(lambda: proxy.accepted, timeout=1)


@in_virtual_time
async def test_waits() -> None:
    await asyncio.sleep(1)


async def number() -> int:
    return 1


test_waits()
assert_type(run_in_virtual_time(number()), int)
assert_type(VirtualTimeLoop().time(), float)
