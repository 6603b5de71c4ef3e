"""Processes that die without a word: what the other side learns, and when."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from programs import (
    ENDPOINT,
    LIMIT_S,
    POLL_S,
    MakeRuntime,
    Program,
    Programs,
    eventually,
)

from dynamo._core import AsyncResponseStream
from dynamo.runtime import Client, Context
from dynamo.runtime.errors import CallError, ConnectionFailed, NoInstances, StreamBroken

NOTICED_S = 0.1

WORKER = """
async def handle(request):
    yield "begun"
    await asyncio.Event().wait()

async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("ns.comp.gen")
    say(endpoint.connection_id())
    await endpoint.serve_endpoint(handle)

run(main)
"""
FORKING_WORKER = WORKER.replace(
    'yield "begun"',
    """
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    yield child
""",
)
CLIENT = """
async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    client = await runtime.endpoint("ns.comp.gen").client()
    await client.wait_for_instances()
    async for item in await client.round_robin(sys.argv[2]):
        say("item")

run(main)
"""


async def start_workers(
    programs: Programs, client: Client, count: int
) -> dict[int, Program]:
    """Workers by instance id, all of them known to the client."""
    workers = [await programs.start(WORKER) for _ in range(count)]
    by_id = {int(await worker.line()): worker for worker in workers}
    await eventually(lambda: set(client.instance_ids()) == set(by_id))
    return by_id


async def begun(client: Client, instance_id: int) -> AsyncResponseStream:
    stream = await client.direct({}, instance_id, annotated=False)
    assert await stream.__anext__() == "begun"
    return stream


async def broken_after(stream: AsyncResponseStream, since: float) -> float:
    with pytest.raises(StreamBroken) as caught:
        await asyncio.wait_for(stream.__anext__(), LIMIT_S)
    assert isinstance(caught.value, ConnectionError)
    assert caught.value.error_class == "Unavailable"
    return time.monotonic() - since


async def test_streams_of_a_killed_worker_break_at_once(
    programs: Programs, client: Client
) -> None:
    workers = await start_workers(programs, client, 5)
    took = []
    for instance_id, worker in workers.items():
        stream = await begun(client, instance_id)
        took.append(await broken_after(stream, worker.kill()))
    print(f"a killed worker is noticed after {statistics.median(took) * 1e3:.1f} ms")
    assert statistics.median(took) < NOTICED_S


async def test_a_killed_worker_is_not_chosen_again(
    programs: Programs, client: Client
) -> None:
    workers = await start_workers(programs, client, 2)
    dead, living = workers
    stream = await begun(client, dead)
    await broken_after(stream, workers[dead].kill())
    # It is still listed, and will be until its record expires.
    assert len(programs.records) == 2
    assert await client.wait_for_instances(timeout=LIMIT_S) == [living]
    for _ in range(20):
        async with await client.round_robin({}, annotated=False) as answer:
            assert await answer.__anext__() == "begun"


async def test_calls_move_away_from_a_worker_that_was_killed_while_idle(
    programs: Programs, client: Client
) -> None:
    workers = await start_workers(programs, client, 2)
    dead, living = workers
    for one in workers:
        await (await begun(client, one)).aclose()
    workers[dead].kill()
    await workers[dead].ended()
    for _ in range(20):
        async with await client.round_robin({}, annotated=False) as answer:
            assert await answer.__anext__() == "begun"
    assert await client.wait_for_instances(timeout=LIMIT_S) == [living]


async def test_calls_fail_at_once_after_the_only_worker_was_killed(
    programs: Programs, client: Client
) -> None:
    (instance_id, worker), *_ = (await start_workers(programs, client, 1)).items()
    await broken_after(await begun(client, instance_id), worker.kill())
    started = time.monotonic()
    for _ in range(10):
        # It may come back at its address: the last one is asked in any case.
        with pytest.raises(ConnectionFailed) as caught:
            await client.random({})
        assert caught.value.retryable
    with pytest.raises(ConnectionFailed):
        await client.direct({}, instance_id)
    assert time.monotonic() - started < NOTICED_S


async def test_a_worker_that_was_killed_while_idle_and_alone_gives_a_typed_error(
    programs: Programs, client: Client
) -> None:
    (instance_id, worker), *_ = (await start_workers(programs, client, 1)).items()
    await (await begun(client, instance_id)).aclose()
    killed_at = worker.kill()
    await worker.ended()
    with pytest.raises(CallError) as caught:
        await client.random({})
    assert isinstance(caught.value, (NoInstances, ConnectionFailed))
    assert time.monotonic() - killed_at < LIMIT_S / 3


async def test_a_killed_worker_is_noticed_although_its_forked_child_lives(
    programs: Programs, client: Client
) -> None:
    worker = await programs.start(FORKING_WORKER)
    await worker.line()
    await client.wait_for_instances(timeout=LIMIT_S)
    stream = await client.random({}, annotated=False)
    child = await stream.__anext__()
    try:
        # The child gives our sockets up in its own first moments.
        await broken_after(stream, worker.kill())
        await worker.ended()
        await until_refused(client)
    finally:
        os.kill(child, signal.SIGKILL)


async def until_refused(client: Client) -> None:
    """Wait until nobody listens at the address of the only instance."""
    (instance,) = client.instances()
    host, port = instance.transport.address.partition("/")[0].split(":")
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except ConnectionRefusedError:
            return
        writer.close()
        await asyncio.sleep(POLL_S)
    pytest.fail("somebody still listens")


class Watched:
    """A handler that notes when its caller was found to be gone."""

    def __init__(self) -> None:
        self.contexts: asyncio.Queue[Context] = asyncio.Queue()

    async def handle(self, request: str, context: Context) -> AsyncIterator[Any]:
        yield "begun"
        self.contexts.put_nowait(context)
        while request == "talking":
            yield "more"
            await asyncio.sleep(0.01)
        await context.async_killed_or_stopped()


@pytest.mark.parametrize("manner", ["silent", "talking"])
async def test_the_handler_of_a_killed_client_is_stopped_at_once(
    programs: Programs, make_runtime: MakeRuntime, manner: str
) -> None:
    watched = Watched()
    make_runtime().endpoint(ENDPOINT).serve_endpoint(watched.handle)
    clients = [await programs.start(CLIENT, manner) for _ in range(3)]
    took = []
    for program in clients:
        await program.says("item")
    contexts = [await watched.contexts.get() for _ in clients]
    for program in clients:
        alive = sum(not context.is_killed() for context in contexts)
        killed_at = program.kill()
        await eventually(
            lambda alive=alive: sum(not c.is_killed() for c in contexts) < alive
        )
        took.append(time.monotonic() - killed_at)
    assert all(context.is_stopped() for context in contexts)
    print(f"a killed client is noticed after {statistics.median(took) * 1e3:.1f} ms")
    assert statistics.median(took) < NOTICED_S
