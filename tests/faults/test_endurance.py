"""Many calls, cancelled at random moments: what is there afterwards is what was before.

Rows RS-05, RS-11, CN-05, CN-07, HG-05, and ten thousand calls in two processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from programs import LIMIT_S, Program, Programs, eventually, resident_bytes
from raw_peers import PATH, make_runtime, shut_down, within
from served import Served, served

from dynamo.runtime import Client, Context, PyAsyncRequestStream, errors

SEED = 20_240_229
SEQUENTIAL, CONCURRENT = 1_000, 200
AT_ONCE = 100
CANCELLED_WITHIN_S = 0.005

WORKER = """
import concurrent.futures, gc, json

# One thread that reads: asyncio's own pool may make another one at any line.
reader = concurrent.futures.ThreadPoolExecutor(1)
live = 0

async def handle(request):
    global live
    live += 1
    try:
        for number in range(request["count"]):
            yield {"id": request["id"], "number": number}
            await asyncio.sleep(0)
        if request["hush"]:
            await asyncio.Event().wait()
    finally:
        live -= 1

def state():
    gc.collect()
    return {
        "live": live,
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }

async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    serving = runtime.endpoint("ns.comp.gen").serve_endpoint(handle)
    say("serving")
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(reader, sys.stdin.readline):
        say(json.dumps(state()))
    runtime.shutdown()
    await serving

run(main)
"""


class Sides:
    """The worker's process and this one, and what is alive in each."""

    def __init__(self, worker: Program, client: Client) -> None:
        self.worker = worker
        self.client = client
        self.random = random.Random(SEED)
        self.outcomes: Counter[str] = Counter()

    async def alive(self) -> dict[str, int]:
        self.worker.write_line("state")
        theirs = json.loads(await self.worker.line())
        gc.collect()
        return {
            **theirs,
            "our tasks": len(asyncio.all_tasks()),
            "our threads": threading.active_count(),
            "our descriptors": len(os.listdir("/proc/self/fd")),
        }

    async def settled(self) -> dict[str, int]:
        """The same once no handler is left and it no longer changes."""

        async def settle() -> dict[str, int]:
            before: dict[str, int] = {}
            while before != (before := await self.alive()) or before["live"]:
                await asyncio.sleep(0.1)
            return before

        return await asyncio.wait_for(settle(), LIMIT_S)

    def memory(self) -> dict[str, int]:
        return {
            "theirs": self.worker.memory_bytes(),
            "ours": resident_bytes(os.getpid()),
        }

    async def call(self, number: int) -> None:
        """One call; every third is cancelled somewhere on its way."""
        cancelled = number % 3 == 0
        # Of those that are cancelled some would never end by themselves.
        request = {"id": number, "count": 5, "hush": cancelled and number % 2 == 0}
        task = asyncio.get_running_loop().create_task(self._read(request))
        if cancelled:
            moment = self.random.uniform(0, CANCELLED_WITHIN_S)
            await asyncio.wait((task,), timeout=moment)
            task.cancel()
        await asyncio.wait((task,), timeout=LIMIT_S)
        assert task.done(), f"call {number} does not end"
        if task.cancelled():
            self.outcomes["cancelled"] += 1
        else:
            assert task.result() == 5
            self.outcomes["complete"] += 1

    async def _read(self, request: dict[str, Any]) -> int:
        count = 0
        async for item in await self.client.random(request, annotated=False):
            assert item == {"id": request["id"], "number": count}
            count += 1
        return count

    async def load(self, sequential: int, concurrent: int) -> None:
        for number in range(sequential):
            await self.call(number)
        for start in range(0, concurrent, AT_ONCE * 10):
            numbers = range(start, min(start + AT_ONCE * 10, concurrent))
            await asyncio.gather(*map(self.call, numbers))


@pytest.fixture
async def sides(programs: Programs, client: Client) -> Sides:
    worker = await programs.start(WORKER)
    await worker.says("serving")
    await client.wait_for_instances(timeout=LIMIT_S)
    return Sides(worker, client)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
async def test_many_calls_a_third_of_them_cancelled_leave_everything_as_it_was(
    sides: Sides, scale: float
) -> None:
    sequential, concurrent = int(SEQUENTIAL * scale), int(CONCURRENT * scale)
    # The same at a size that fills pools and caches.
    await sides.load(min(300, sequential), concurrent)
    before, memory = await sides.settled(), sides.memory()
    sides.outcomes.clear()
    await sides.load(sequential, concurrent)
    assert await sides.settled() == before
    after = sides.memory()
    grown = {side: after[side] / memory[side] for side in memory}
    print(f"memory afterwards: {grown}; outcomes {dict(sides.outcomes)}")
    assert max(grown.values()) < 1.1
    calls = sequential + concurrent
    assert sides.outcomes.total() == calls
    # Those with a hush can end in no other way.
    assert calls / 6 <= sides.outcomes["cancelled"] <= calls / 3 + 1
    assert sides.client._home.in_flight == {}


# ------------------------------------------------------------------ cancelled anywhere


class Varied:
    """A handler that ends, fails or falls silent after some items, as it is asked to."""

    def __init__(self) -> None:
        self.running = 0
        self.begun = 0

    async def __call__(self, request: dict[str, Any]) -> AsyncIterator[int]:
        self.running += 1
        self.begun += 1
        try:
            for number in range(request["count"]):
                yield number
                await asyncio.sleep(0)
            if request["end"] == "raise":
                raise ValueError("as it was asked to")
            if request["end"] == "hush":
                await asyncio.Event().wait()
        finally:
            self.running -= 1


class Canceller:
    """Calls that are cut short at a random moment, each in one of several ways."""

    WAYS = ("cancel", "stop", "limit", "aclose", "drop")

    def __init__(self, client: Client) -> None:
        self.client = client
        self.chance = random.Random(SEED)
        self.outcomes: Counter[str] = Counter()

    async def call(self) -> None:
        way, context = self.chance.choice(self.WAYS), Context()
        moment = self.chance.uniform(0, 0.03)
        options = {"timeout": max(moment, 0.001)} if way == "limit" else {}
        reading = asyncio.get_running_loop().create_task(
            self._read(way, context, **options)
        )
        await asyncio.wait((reading,), timeout=moment)
        if way == "cancel":
            reading.cancel()
        elif way == "stop":
            context.stop_generating()
        await asyncio.wait((reading,), timeout=LIMIT_S)
        assert reading.done(), f"a call does not end after {way}"
        self.outcomes[_outcome(reading)] += 1

    async def _read(self, way: str, context: Context, **options: Any) -> None:
        # Who leaves by itself has to get to it.
        leaves = way in ("aclose", "drop")
        request = {
            "count": self.chance.randrange(5),
            "end": self.chance.choice(["", "raise", "" if leaves else "hush"]),
        }
        stream = await self.client.random(
            request, annotated=False, context=context, **options
        )
        left = self.chance.randrange(3)
        async for _ in stream:
            left -= 1
            if leaves and left < 0:
                break
        if way == "aclose":
            await stream.aclose()


def _outcome(call: asyncio.Task[None]) -> str:
    if call.cancelled():
        return "cancelled"
    error = call.exception()
    # Whatever else comes is a failure of the test.
    if isinstance(
        error, (errors.RemoteError, errors.StreamTimeout, errors.CallTimeout)
    ):
        return type(error).__name__
    call.result()
    return "ended"


@pytest.mark.slow
async def test_calls_cut_short_at_random_moments_leave_all_counts_at_zero(
    each_lane: str, scale: float
) -> None:
    """Also those of calls that wait for their turn, of which there always are some."""
    count = int(1_000 if scale <= 1 else 3_400 * scale)
    handler = Varied()
    async with served(handler, worker={"worker_pool_size": AT_ONCE // 3}) as pair:
        canceller = Canceller(pair.client)

        async def call_on() -> None:
            for _ in range(count // AT_ONCE):
                await canceller.call()

        await asyncio.gather(*(call_on() for _ in range(AT_ONCE)))
        admission = pair.worker._core.admission

        def counts() -> dict[str, Any]:
            return {
                "at the client": sum(pair.client._home.in_flight.values()),
                "at the worker": pair.in_flight,
                "handlers": handler.running,
                "places": admission._reserved,
                "turns": admission._running,
                "waiting": len(admission._waiting),
                "limits": len(pair.client._home.deadlines.watched),
            }

        with contextlib.suppress(AssertionError):  # told better below
            await eventually(lambda: not any(counts().values()))
        assert counts() == dict.fromkeys(counts(), 0)
        assert pair.client._home.in_flight == {}
        print(f"{handler.begun} handlers began: {dict(canceller.outcomes)}")
    assert canceller.outcomes.total() == count
    assert {"cancelled", "ended", "RemoteError"} <= set(canceller.outcomes)


# ----------------------------------------------------------------------------- RS-11


async def count(request: int) -> AsyncIterator[int]:
    for number in range(request):
        yield number


async def plain(pair: Served) -> None:
    await pair.items(3)


async def with_context(pair: Served) -> None:
    await pair.items(3, context=Context("id", {"k": "v"}))


async def closed_early(pair: Served) -> None:
    stream = await pair.call(3)
    await stream.aclose()


async def dropped(pair: Served) -> None:
    await pair.call(3)


async def cancelled(pair: Served) -> None:
    call = pair.client.direct(3, pair.instance_id)
    await asyncio.sleep(0)
    call.cancel()


async def stopped(pair: Served) -> None:
    context = Context()
    stream = await pair.call(3, context=context)
    context.stop_generating()
    assert len([item async for item in stream]) <= 3


async def failed(pair: Served) -> None:
    stream = await pair.call("no number")
    # Not in `wait_for`, which keeps the error that passes through it.
    with contextlib.suppress(errors.RemoteError):
        async for _ in stream:
            pass


async def refused(pair: Served) -> None:
    with contextlib.suppress(errors.CallError):
        await pair.client.direct(3, 1)


def ours() -> Counter[str]:
    """The objects of our classes, by class."""
    kinds = (type(one) for one in gc.get_objects())
    return Counter(
        kind.__qualname__
        for kind in kinds
        if str(kind.__module__).startswith("dynamo.runtime")
    )


async def grown(call: Callable[[], Coroutine[Any, Any, None]], calls: int) -> Any:
    """What is left of so many calls with the cyclic collector off."""
    for _ in range(5):
        await call()
    gc.collect()
    gc.disable()
    try:
        before = ours()
        for _ in range(calls):
            await call()

        def left() -> dict[str, int]:
            # Something may be under way in any moment; what grows is per call.
            return {k: n for k, n in (ours() - before).items() if n > calls / 4}

        with contextlib.suppress(AssertionError):
            await eventually(lambda: not left(), 2)
        return left()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "way",
    [plain, with_context, closed_early, dropped, cancelled, stopped, failed, refused],
)
async def test_calls_leave_nothing_for_the_cyclic_collector(
    way: Callable[[Served], Coroutine[Any, Any, None]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    # A record of a failure that is kept would keep the frames of its traceback.
    caplog.set_level(logging.CRITICAL, "dynamo.runtime")
    async with served(count) as pair:
        assert await grown(lambda: way(pair), 40) == {}


@pytest.mark.parametrize("where", ["its own wait", "ours, for a caller that is behind"])
async def test_handlers_that_are_cancelled_leave_nothing_for_it(where: str) -> None:
    """Not even what they were about to send: that may be large."""

    async def hush(request: str) -> AsyncIterator[bytes]:
        yield bytes(1000)
        if request == "its own wait":
            await asyncio.Event().wait()
        while True:
            yield bytes(100_000)

    async with served(hush) as pair:

        async def call() -> None:
            stream = await pair.call(where)
            await within(stream.__anext__())
            await stream.aclose()

        assert await grown(call, 40) == {}


async def test_calls_with_streamed_input_leave_nothing_for_it_either() -> None:
    async def total(stream: PyAsyncRequestStream) -> AsyncIterator[int]:
        yield sum([number async for number in stream])

    worker = make_runtime()
    endpoint = worker.endpoint(PATH)
    serving = endpoint.serve_bidirectional_endpoint(total)
    client = await endpoint.client()
    await within(client.wait_for_instances())

    async def call() -> None:
        stream = await within(client.bidirectional([1, 2, 3], annotated=False))
        assert [item async for item in stream] == [6]

    assert await grown(call, 40) == {}
    await shut_down(worker)
    await within(serving)
