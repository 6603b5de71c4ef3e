"""Calls made by handlers: what ends the first one ends them all."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from measured import Times
from raw_peers import make_runtime, shut_down, until, within

from dynamo.runtime import Client, Context, DistributedRuntime
from dynamo.runtime._discovery.memory import MemoryStore
from dynamo.runtime.errors import StreamTimeout

TRIES = 7
LINKED_S = 0.1
# For the last of three workers, each of which needs its own time to notice.
UNLINKED_S = 0.2
# Not one after the other: each knows the deadline itself.
DEADLINE_S = 0.1


class Hop:
    """A handler that passes on what the next one says, or says one thing itself."""

    def __init__(self, next_one: Client | None, *, linked: bool, fan: int = 1) -> None:
        self.next_one = next_one
        self.linked = linked
        self.fan = fan
        self.running = 0
        self.ended_at = 0.0

    async def __call__(self, request: object, context: Context) -> AsyncIterator[Any]:
        self.running += 1
        try:
            if self.next_one is None:
                yield "begun"
                await asyncio.Event().wait()
            else:
                async for item in self._of_the_next(request, context):
                    yield item
        finally:
            self.running -= 1
            self.ended_at = time.monotonic()

    async def _of_the_next(
        self, request: object, context: Context
    ) -> AsyncIterator[Any]:
        assert self.next_one is not None
        options = {"context": context} if self.linked else {}
        streams = [
            await self.next_one.random(request, annotated=False, **options)
            for _ in range(self.fan)
        ]
        for stream in streams[1:]:
            await anext(stream)
        async for item in streams[0]:
            yield item


@contextlib.asynccontextmanager
async def hops(
    count: int, *, linked: bool, fan: int = 1
) -> AsyncIterator[tuple[Client, list[Hop]]]:
    """A client of the first of so many workers, each of which calls the next."""
    store = MemoryStore()
    runtimes: list[DistributedRuntime] = []
    handlers: list[Hop] = []
    serving = []
    client: Client | None = None
    for number in reversed(range(count)):
        handlers.insert(0, Hop(client, linked=linked, fan=fan if number == 0 else 1))
        runtimes.insert(0, make_runtime(store))
        endpoint = runtimes[0].endpoint(f"t.hop{number}.e")
        serving.append(endpoint.serve_endpoint(handlers[0]))
        caller = make_runtime(store)
        runtimes.insert(0, caller)
        client = await caller.endpoint(f"t.hop{number}.e").client()
        await within(client.wait_for_instances())
    assert client is not None
    try:
        yield client, handlers
    finally:
        for runtime in runtimes:
            await shut_down(runtime)
        await within(asyncio.gather(*serving))


async def begin(client: Client, **options: Any) -> Any:
    stream = await within(client.random(None, annotated=False, **options))
    assert await within(anext(stream)) == "begun"
    return stream


async def read_on(stream: Any) -> None:
    async for _ in stream:
        pass


@pytest.mark.parametrize("linked", [True, False], ids=["linked", "on their own"])
@pytest.mark.parametrize("way", ["cancel", "drop", "reader", "stop"])
async def test_a_chain_of_silent_handlers_ends_with_its_first_call(
    each_lane: str, linked: bool, way: str
):
    bound_s = LINKED_S if linked else UNLINKED_S
    times = Times(f"the last of three handlers ({way})", bound_s, TRIES)
    async with hops(3, linked=linked) as (client, handlers):
        for _ in range(TRIES):
            context = Context()
            stream = await begin(client, context=context)
            reader = asyncio.create_task(read_on(stream))
            await asyncio.sleep(0)
            since = time.monotonic()
            if way == "reader":
                reader.cancel()
            elif way == "stop":
                context.stop_generating()
            elif way == "cancel":
                stream.cancel()
            else:
                reader.cancel()
                del stream
            await until(lambda: not any(handler.running for handler in handlers))
            times.took_s.append(max(handler.ended_at for handler in handlers) - since)
            await asyncio.wait((reader,))
            del reader
    times.judge()
    assert min(times.took_s) < UNLINKED_S


async def test_a_chain_ends_at_the_deadline_of_its_first_call(each_lane: str):
    limits_s = (0.3, 0.6, 1.2)
    late = Times("the last of three handlers, beyond", DEADLINE_S, len(limits_s))
    async with hops(3, linked=False) as (client, handlers):
        for limit_s in limits_s:
            since = time.monotonic()
            stream = await begin(client, timeout=limit_s)
            with pytest.raises(StreamTimeout):
                await within(read_on(stream))
            await until(lambda: not any(handler.running for handler in handlers))
            ended_at = max(handler.ended_at for handler in handlers)
            late.took_s.append(ended_at - since - limit_s)
    late.judge()
    assert min(late.took_s) < UNLINKED_S


@pytest.mark.parametrize("linked", [True, False], ids=["linked", "on their own"])
async def test_all_calls_of_a_fan_end_with_the_handler_that_made_them(
    each_lane: str, linked: bool
):
    bound_s = LINKED_S if linked else UNLINKED_S
    times = Times("four calls of a handler", bound_s, TRIES)
    async with hops(2, linked=linked, fan=4) as (client, handlers):
        for _ in range(TRIES):
            stream = await begin(client)
            assert handlers[1].running == 4
            since = time.monotonic()
            stream.cancel()
            await until(lambda: not handlers[1].running)
            times.took_s.append(handlers[1].ended_at - since)
    times.judge()
    assert min(times.took_s) < UNLINKED_S


async def test_a_handler_in_the_middle_may_finish_its_work_elsewhere(each_lane: str):
    """A call without the context, or with a detached one, is not stopped with it."""
    done: list[str] = []
    store = MemoryStore()
    worker, caller = make_runtime(store), make_runtime(store)

    async def note(request: str) -> AsyncIterator[str]:
        done.append(request)
        yield request

    async def work(request: object, context: Context) -> AsyncIterator[str]:
        try:
            yield "begun"
            await context.async_killed_or_stopped()
        finally:
            await anext(await far.random("plain", annotated=False))
            detached = context.detached("free")
            await anext(await far.random("detached", annotated=False, context=detached))
            linked = await far.random("linked", annotated=False, context=context)
            assert [item async for item in linked] == []

    serving = [
        worker.endpoint("t.note.e").serve_endpoint(note),
        worker.endpoint("t.work.e").serve_endpoint(work),
    ]
    far = await worker.endpoint("t.note.e").client()
    client = await caller.endpoint("t.work.e").client()
    await within(far.wait_for_instances())
    await within(client.wait_for_instances())
    stream = await begin(client)
    stream.cancel()
    await until(lambda: len(done) == 2)
    await shut_down(caller)
    await shut_down(worker)
    await within(asyncio.gather(*serving))
    assert done == ["plain", "detached"]
