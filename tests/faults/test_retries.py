"""What moves to another instance when one is lost: real processes, killed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from programs import Program, Programs, eventually

from dynamo.runtime import Client
from dynamo.runtime.errors import CallError, StreamBroken, StreamError

LIMIT_S = 15.0

WORKER = """
async def handle(request):
    await asyncio.sleep(request.get("first", 0))
    for number in range(request.get("from", 0), request["to"]):
        yield number
        await asyncio.sleep(request.get("pause", 0))

async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("ns.comp.gen")
    say(endpoint.connection_id())
    await endpoint.serve_endpoint(handle)

run(main)
"""


async def start_workers(
    programs: Programs, client: Client, count: int
) -> dict[int, Program]:
    workers = [await programs.start(WORKER) for _ in range(count)]
    by_id = {int(await worker.line()): worker for worker in workers}
    await eventually(lambda: set(client.instance_ids()) == set(by_id))
    return by_id


async def begin(client: Client, request: dict[str, Any], **options: Any) -> Any:
    return await client.round_robin(request, annotated=False, **options)


async def test_calls_without_an_item_yet_survive_the_death_of_their_worker(
    programs: Programs, client: Client, scale: float
) -> None:
    """LC-12."""
    workers = await start_workers(programs, client, 2)
    request = {"first": 1.0, "to": 3}

    async def call() -> list[int]:
        return [item async for item in await begin(client, request, idempotent=True)]

    count = int(200 * scale)
    calls = [asyncio.create_task(call()) for _ in range(count)]
    dead = next(iter(workers))
    await eventually(lambda: client._home.in_flight.get(dead, 0) == count // 2)
    workers[dead].kill()
    answers = await asyncio.wait_for(asyncio.gather(*calls), LIMIT_S)
    assert answers == [[0, 1, 2]] * count


async def test_without_the_callers_word_they_fail_and_say_that_they_may_have_run(
    programs: Programs, client: Client
) -> None:
    workers = await start_workers(programs, client, 2)
    streams = [await begin(client, {"first": 60, "to": 3}) for _ in range(2)]
    dead = next(iter(workers))
    workers[dead].kill()
    (lost,) = [stream for stream in streams if stream.instance_id == dead]
    with pytest.raises(CallError) as caught:
        await asyncio.wait_for(anext(lost), LIMIT_S)
    assert type(caught.value) is StreamBroken
    assert (caught.value.retryable, caught.value.attempts) == (False, 1)
    assert caught.value.instance_id == dead


async def test_a_stream_goes_on_where_it_broke_off(
    programs: Programs, client: Client
) -> None:
    """Request migration: every item once, in order, from three workers in turn."""
    workers = await start_workers(programs, client, 3)
    received: list[int] = []
    breaks: list[str] = []

    def go_on(items: int, error: StreamError) -> dict[str, Any]:
        assert items == len(received)
        breaks.append(type(error).__name__)
        return {"from": len(received), "to": 60, "pause": 0.005}

    request = {"to": 60, "pause": 0.005}
    stream = await begin(client, request, on_stream_lost=go_on)

    async def read() -> None:
        async for item in stream:
            received.append(item)
            if item in (20, 40):
                workers.pop(stream.instance_id).kill()

    await asyncio.wait_for(read(), LIMIT_S)
    assert received == list(range(60))
    assert breaks == ["StreamBroken"] * 2
    assert len(workers) == 1
