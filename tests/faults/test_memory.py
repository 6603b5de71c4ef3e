"""A reader that pauses, and readers that go away: what they cost."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from pathlib import Path

import pytest
from programs import LIMIT_S, MakeRuntime, Program, Programs, eventually, resident_bytes

from dynamo.runtime import Client

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]

ITEMS = 200_000
ALLOWED_GROWTH_BYTES = 20 * 1024 * 1024
ABANDONED = 1_000

WORKER = """
sent = running = 0

async def handle(request):
    global sent, running
    running += 1
    try:
        for number in range(request["count"]):
            sent += 1
            yield number.to_bytes(8, "big") + bytes(992)
        if request["stay"]:
            await asyncio.Event().wait()
    finally:
        running -= 1

async def state(request):
    fds = len(os.listdir("/proc/self/fd"))
    yield [sent, running, len(asyncio.all_tasks()), fds]

@dynamo_worker()
async def main(runtime):
    serving = runtime.endpoint("ns.comp.gen").serve_endpoint(handle)
    await runtime.endpoint("ns.comp.state").serve_endpoint(state)

run(main)
"""


class Worker:
    """The worker, and what it tells of itself."""

    def __init__(self, program: Program, states: Client) -> None:
        self.program = program
        self._states = states

    async def state(self) -> list[int]:
        """Items sent, handlers running, tasks, descriptors."""
        stream = await self._states.random(None, annotated=False)
        (state,) = [item async for item in stream]
        return state

    async def settled(self, index: int) -> int:
        """One of these numbers once it no longer changes."""

        async def wait() -> int:
            before = -1
            while before != (before := (await self.state())[index]):
                await asyncio.sleep(0.2)
            return before

        return await asyncio.wait_for(wait(), LIMIT_S)


@pytest.fixture
async def worker(
    programs: Programs, make_runtime: MakeRuntime, client: Client
) -> Worker:
    program = await programs.start(WORKER)
    states = await make_runtime().endpoint("ns.comp.state").client()
    await client.wait_for_instances(timeout=LIMIT_S)
    await states.wait_for_instances(timeout=LIMIT_S)
    return Worker(program, states)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def warm_up(client: Client) -> None:
    """Once all through, so that what is allocated once is there before the measuring."""
    stream = await client.random({"count": 2_000, "stay": False}, annotated=False)
    assert sum([1 async for _ in stream]) == 2_000


def assert_flat(when: str, worker: Worker, before: tuple[int, int]) -> None:
    ours = resident_bytes(os.getpid()) - before[0]
    theirs = worker.program.memory_bytes() - before[1]
    print(f"{when}: grown by {ours / 2**20:.1f} and {theirs / 2**20:.1f} MB")
    assert max(ours, theirs) < ALLOWED_GROWTH_BYTES


async def test_a_paused_reader_stops_the_handler_and_memory_stays_flat(
    worker: Worker, client: Client
) -> None:
    await warm_up(client)
    (already, *_) = await worker.state()
    gc.collect()
    before = resident_bytes(os.getpid()), worker.program.memory_bytes()
    request = {"count": ITEMS, "stay": False}
    stream = await client.random(request, annotated=False)
    assert int.from_bytes((await stream.__anext__())[:8], "big") == 0
    sent = await worker.settled(0) - already
    assert sent < ITEMS / 2
    assert_flat(f"paused after {sent} items", worker, before)
    expected = 1
    async for item in stream:
        assert int.from_bytes(item[:8], "big") == expected
        expected += 1
    assert expected == ITEMS
    assert_flat("after all of them", worker, before)


async def test_abandoned_streams_leave_nothing(worker: Worker, client: Client) -> None:
    await warm_up(client)
    await worker.settled(3)
    _, _, tasks, files = await worker.state()
    own_tasks, own_files = len(asyncio.all_tasks()), descriptors()
    for _ in range(ABANDONED // 50):
        # One of each fifty never stops sending.
        requests = [{"count": 3, "stay": True}] * 49 + [{"count": ITEMS, "stay": True}]
        streams = [await client.random(one, annotated=False) for one in requests]
        for stream in streams[::2]:
            await stream.__anext__()
        del stream, streams
        gc.collect()
    assert await worker.settled(1) == 0
    await eventually(lambda: len(asyncio.all_tasks()) <= own_tasks)
    await eventually(lambda: descriptors() <= own_files + 2)
    after = await worker.state()
    assert after[2] <= tasks
    assert after[3] <= files + 2
    assert client._home.in_flight == {}
