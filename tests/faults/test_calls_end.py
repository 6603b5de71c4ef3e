"""Calls end, and cancels arrive, whatever stands in between (HG and CN rows)."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from programs import Program, Programs, eventually
from raw_peers import PATH, make_runtime, shut_down, until, within
from served import Served, served

from dynamo.runtime import Client, Context
from dynamo.runtime._discovery.memory import MemoryStore
from dynamo.runtime.errors import CallError, CallTimeout, StreamBroken, StreamError

LIMIT_S = 15.0

COUNTING = """
async def handle(request):
    for number in range(request[0]):
        yield number
        await asyncio.sleep(request[1])

async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("ns.comp.gen")
    say(endpoint.connection_id())
    await endpoint.serve_endpoint(handle)

run(main)
"""


class Silent:
    """A handler that says one thing and then nothing until it is stopped."""

    def __init__(self) -> None:
        self.running = 0
        self.ended = 0

    async def __call__(self, request: object, context: Context) -> AsyncIterator[Any]:
        self.running += 1
        try:
            yield "begun"
            await context.async_killed_or_stopped()
        finally:
            self.running -= 1
            self.ended += 1


async def begin(pair: Served, **options: Any) -> Any:
    stream = await pair.call(**options)
    assert await within(anext(stream)) == "begun"
    return stream


async def counted(client: Client, count: int, pause_s: float, **options: Any) -> int:
    stream = await client.round_robin([count, pause_s], annotated=False, **options)
    return len([item async for item in stream])


async def start_workers(
    programs: Programs, client: Client, count: int
) -> dict[int, Program]:
    workers = [await programs.start(COUNTING) for _ in range(count)]
    by_id = {int(await worker.line()): worker for worker in workers}
    await eventually(lambda: set(by_id) <= set(client.instance_ids()))
    return by_id


# ------------------------------------------------------------------ requests that end


@pytest.mark.slow
async def test_every_call_ends_while_workers_are_killed_and_replaced(
    programs: Programs, client: Client, scale: float
) -> None:
    """HG-01."""
    workers = await start_workers(programs, client, 3)
    over = asyncio.Event()
    outcomes: Counter[str] = Counter()

    async def call_on() -> None:
        while not over.is_set():
            try:
                assert await counted(client, 20, 0.005) == 20
            except CallError as error:
                outcomes[type(error).__name__] += 1
            else:
                outcomes["complete"] += 1
            await asyncio.sleep(0)

    callers = [asyncio.create_task(call_on()) for _ in range(30)]
    for _ in range(int(3 * scale)):
        _, worker = workers.popitem()
        worker.kill()
        await worker.ended()
        workers |= await start_workers(programs, client, 1)
    over.set()
    # All that are under way end by themselves.
    await asyncio.wait_for(asyncio.gather(*callers), LIMIT_S)
    print(dict(outcomes))
    assert outcomes["complete"] > 30
    assert set(outcomes) <= {
        "complete",
        "StreamBroken",
        "WorkerLost",
        "ConnectionFailed",
        "NoInstances",
        "Refused",
    }
    assert client._home.in_flight == {}


@pytest.mark.slow
@pytest.mark.may_block
async def test_a_client_that_holds_its_loop_again_and_again_misses_nothing(
    programs: Programs, client: Client, scale: float
) -> None:
    """HG-06."""
    await start_workers(programs, client, 1)
    calls = [
        asyncio.create_task(counted(client, 40, 0.001)) for _ in range(int(200 * scale))
    ]

    async def hold() -> None:
        for _ in range(3):
            time.sleep(0.2)
            await asyncio.sleep(0.05)

    holding = asyncio.create_task(hold())
    assert await asyncio.wait_for(asyncio.gather(*calls), 60) == [40] * len(calls)
    await holding


async def test_a_worker_that_stands_still_and_goes_on_is_called_again(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, make_runtime: Any
) -> None:
    """HG-09."""
    monkeypatch.setenv("DYN_TCP_REQUEST_TIMEOUT", "0.5")
    client = await make_runtime().endpoint("ns.comp.gen").client()
    ((instance_id, worker),) = (await start_workers(programs, client, 1)).items()

    async def call() -> int:
        stream = await client.direct([3, 0], instance_id, annotated=False)
        return len([item async for item in stream])

    assert await asyncio.wait_for(call(), LIMIT_S) == 3
    worker.send(signal.SIGSTOP)
    try:
        with pytest.raises(CallTimeout) as caught:
            await asyncio.wait_for(call(), LIMIT_S)
        assert caught.value.facts["limit"] == "DYN_TCP_REQUEST_TIMEOUT"
        assert caught.value.instance_id == instance_id
        assert client.instance_ids() == [instance_id]
    finally:
        worker.send(signal.SIGCONT)
    assert await asyncio.wait_for(call(), LIMIT_S) == 3


async def test_a_thread_that_works_beyond_the_deadline_keeps_its_place(
    each_lane: str,
) -> None:
    """HG-16: of a plain generator; what others start in threads is their own."""
    release = threading.Event()
    running: list[int] = []
    most: list[int] = []

    def handler(request: object) -> Any:
        running.append(1)
        most.append(len(running))
        if request == "block":
            release.wait(LIMIT_S)
        running.pop()
        yield "done"

    async with served(handler, worker={"worker_pool_size": 1}) as pair:
        for limit_s in (0.2, 0.4, 0.8, 1.6):
            with pytest.raises(TimeoutError):
                async for _ in await pair.call("block", timeout=limit_s):
                    pass
            if running:
                break
        assert running == [1]
        waiting = asyncio.create_task(pair.items("quick"))
        await until(lambda: pair.in_flight >= 2)
        assert running == [1]
        release.set()
        assert await within(waiting) == ["done"]
        await until(lambda: not pair.in_flight)
    assert max(most) == 1


async def test_streams_that_nobody_reads_hold_up_no_other(each_lane: str) -> None:
    """HG-19."""

    async def flood(request: int) -> AsyncIterator[bytes]:
        for _ in range(request):
            yield bytes(20_000)

    async with served(flood) as pair:
        unread = [await pair.call(200) for _ in range(49)]
        assert len(await pair.items(200)) == 200
        if each_lane == "all":
            # On the other lane the sockets of each may hold as much.
            assert pair.in_flight == len(unread)
        for stream in unread:
            stream.cancel()
        await until(lambda: not pair.in_flight)


# ------------------------------------------------------------------ cancels that arrive


async def test_the_place_of_a_client_that_has_gone_is_free_at_once(
    each_lane: str,
) -> None:
    """CN-04."""
    handler = Silent()
    store = MemoryStore()
    async with served(handler, worker={"worker_pool_size": 1}) as pair:
        store = pair.worker._core.backend._store
        other = make_runtime(store)
        client = await other.endpoint(PATH).client()
        await within(client.wait_for_instances())
        stream = await begin(pair)
        second = client.direct(None, pair.instance_id, annotated=False)
        await until(lambda: pair.in_flight == 2)
        pair.caller._core.lane.abort()
        begun = await within(second, 1)
        assert await within(anext(begun), 1) == "begun"
        with pytest.raises(StreamBroken):
            await within(anext(stream))
        begun.cancel()
        await shut_down(other)


@pytest.mark.may_block
async def test_a_cancel_while_a_thread_works_harms_no_other_call(
    each_lane: str,
) -> None:
    """CN-09."""
    release = threading.Event()
    started = threading.Event()

    def work() -> None:
        started.set()
        release.wait(LIMIT_S)

    async def handler(request: str) -> AsyncIterator[str]:
        if request == "thread":
            await asyncio.to_thread(work)
        for number in range(3):
            yield str(number)

    async with served(handler) as pair:
        calling = await pair.call("thread")
        await until(started.is_set)
        calling.cancel()
        assert await pair.items("plain") == ["0", "1", "2"]
        await until(lambda: not pair.in_flight)
        release.set()
        assert await pair.items("plain") == ["0", "1", "2"]


async def test_a_cancel_at_the_very_end_is_a_cancel_or_an_end(
    each_lane: str, scale: float
) -> None:
    """CN-10."""

    async def handler(request: int) -> AsyncIterator[int]:
        for number in range(request):
            yield number

    chance = random.Random(4)
    outcomes: Counter[str] = Counter()
    async with served(handler) as pair:
        for _ in range(int(300 * scale)):
            reader = asyncio.create_task(pair.items(3))
            for _ in range(chance.randrange(12)):
                await asyncio.sleep(0)
            reader.cancel()
            try:
                assert await reader == [0, 1, 2]
            except asyncio.CancelledError:
                outcomes["cancelled"] += 1
            else:
                outcomes["complete"] += 1
        await until(lambda: not pair.in_flight)
    assert outcomes["cancelled"] > 0


def test_a_cancel_just_before_the_loop_ends_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CN-21."""
    for lanes in ("all", "callhome"):
        monkeypatch.setenv("DYN_RUNTIME_LANES", lanes)
        handler = Silent()
        store = MemoryStore()
        ready, done = threading.Event(), threading.Event()

        async def work(handler: Silent = handler, store: MemoryStore = store) -> None:
            worker = make_runtime(store)
            serving = worker.endpoint(PATH).serve_endpoint(handler)
            watching = await worker.endpoint(PATH).client()
            await within(watching.wait_for_instances())
            ready.set()  # noqa: B023
            await until(lambda: handler.ended, LIMIT_S)
            await shut_down(worker)
            await serving
            done.set()  # noqa: B023

        kept: list[Any] = []

        async def call(store: MemoryStore = store, kept: list[Any] = kept) -> None:
            caller = make_runtime(store)
            kept.append(caller)
            client = await caller.endpoint(PATH).client()
            await within(client.wait_for_instances())
            stream = await client.random(None, annotated=False)
            assert await within(anext(stream)) == "begun"
            stream.cancel()

        thread = threading.Thread(target=lambda: asyncio.run(work()))
        thread.start()
        assert ready.wait(LIMIT_S)
        asyncio.run(call())
        assert done.wait(LIMIT_S)
        thread.join(LIMIT_S)
        assert handler.ended == 1


async def test_a_client_that_closes_ends_its_readers_with_an_error_of_ours(
    each_lane: str,
) -> None:
    """CN-24."""
    handler = Silent()
    async with served(handler) as pair:
        stream = await begin(pair)

        async def read() -> Any:
            return await anext(stream)

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        pair.caller._core.lane.abort()
        with pytest.raises(StreamError) as caught:
            await within(reader)
        assert isinstance(caught.value, ConnectionError)
        await until(lambda: not handler.running)


async def test_who_swallows_the_cancellation_is_named_and_others_go_on(
    each_lane: str, caplog: pytest.LogCaptureFixture
) -> None:
    release = asyncio.Event()

    async def deaf_handler(request: str) -> AsyncIterator[str]:
        yield "begun"
        while request == "deaf" and not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:  # noqa: PERF203 - the point of it
                continue

    async with served(deaf_handler, worker={"close_timeout_s": 0.1}) as pair:
        stream = await begin(pair, request="deaf")
        stream.cancel()
        await until(lambda: "does it swallow CancelledError" in caplog.text)
        assert "deaf_handler" in caplog.text
        assert await pair.items("other") == ["begun"]
        assert pair.in_flight == 1
        release.set()
        await until(lambda: not pair.in_flight)


async def test_a_context_that_was_stopped_before_the_call_reaches_no_worker(
    each_lane: str,
) -> None:
    handler = Silent()
    async with served(handler) as pair:
        context = Context()
        context.stop_generating()
        assert await pair.items(context=context) == []
        stream = await begin(pair)
        stream.cancel()
        await until(lambda: not pair.in_flight)
    assert handler.ended == 1
