"""Limits in time towards genuine workers, which know nothing of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from measured import Times
from programs import LIMIT_S, MakeRuntime, Programs

from dynamo.runtime import Client
from dynamo.runtime.errors import CallTimeout, StreamTimeout

pytestmark = [pytest.mark.interop, pytest.mark.slow]

WORKER = """
async def handle(request, context):
    yield request
    if request == "silent":
        while not context.is_stopped():
            await asyncio.sleep(0.005)
        say("stopped", context.is_killed())

async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("ns.comp.gen")
    serving = asyncio.ensure_future(endpoint.serve_endpoint(handle))
    await (await endpoint.client()).wait_for_instances()
    say("ready")
    await serving

run(main)
"""


@pytest.fixture
async def worker(programs: Programs, genuine_python: str, request: Any) -> Any:
    limits = getattr(request, "param", {})
    made = await programs.start_genuine(genuine_python, WORKER, **limits)
    await made.says("ready")
    return made


@pytest.fixture
async def client(worker: Any, make_runtime: MakeRuntime) -> Client:
    made = await make_runtime().endpoint("ns.comp.gen").client()
    await made.wait_for_instances(timeout=LIMIT_S)
    return made


async def items(client: Client, request: str, **options: Any) -> list[Any]:
    stream = await client.round_robin(request, annotated=False, **options)
    return [item async for item in stream]


async def test_a_genuine_worker_ignores_the_time_that_is_left(client: Client) -> None:
    assert await items(client, "echo", timeout=60) == ["echo"]


async def test_its_handler_is_stopped_at_the_deadline(
    client: Client, worker: Any
) -> None:
    with pytest.raises(StreamTimeout) as caught:
        await items(client, "silent", timeout=1.0)
    assert caught.value.facts["items"] == 1
    await worker.says("stopped True")


@pytest.mark.parametrize(
    "worker", [{"DYN_ENGINE_REQUEST_LIMIT": "1"}], indirect=True, ids=["one place"]
)
async def test_a_call_that_waits_there_is_bounded_by_the_callers_deadline_alone(
    client: Client, worker: Any
) -> None:
    limit_s, tries = 0.4, 3
    first = await client.round_robin("silent", annotated=False)
    assert await anext(first) == "silent"
    # It has been acknowledged: nothing else ends it, and it keeps its place in the queue.
    waiting = asyncio.create_task(items(client, "echo", timeout=60))
    times = Times("a call that waits at a genuine worker", limit_s, tries)
    for _ in range(tries):
        call = items(client, "echo", timeout=limit_s)
        error = await times.error(call, CallTimeout)
        assert error.facts["limit"] == "timeout"
    times.judge(not_before_s=limit_s)
    assert not waiting.done()
    first.cancel()
    assert await asyncio.wait_for(waiting, LIMIT_S) == ["echo"]
