"""Workers that are restarted, killed or put to sleep while calls go on.

No call may fail for it.  Rows LC-07, LC-11 and LC-12.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter

import pytest
from programs import LIMIT_S, Program, Programs, eventually

from dynamo.runtime import Client
from dynamo.runtime.errors import CallError

CALLS_PER_S = 200
ITEMS = ["1", "2", "3"]
WORKER = """
async def handle(request):
    for item in "123":
        await asyncio.sleep(0.005)
        yield item

@dynamo_worker()
async def main(runtime):
    endpoint = runtime.endpoint("ns.comp.gen")
    say(endpoint.connection_id())
    await endpoint.serve_endpoint(handle)

run(main)
"""

# Does what it reads: a method of its endpoint, or nothing but to tell.
SLEEPER = """
begun = 0

async def handle(request):
    global begun
    begun += 1
    for item in "123":
        await asyncio.sleep(0.005)
        yield item

@dynamo_worker()
async def main(runtime):
    endpoint = runtime.endpoint("ns.comp.gen")
    say(endpoint.connection_id())
    serving = endpoint.serve_endpoint(handle)
    while order := (await line()).strip():
        if order != "tell":
            await getattr(endpoint, order)()
        say(begun)
    await serving

run(main)
"""


class Load:
    """Calls at a steady rate, each in a task of its own, and how they ended."""

    def __init__(self, client: Client) -> None:
        self.outcomes: Counter[str] = Counter()
        self.errors: list[CallError] = []
        self.last_begin_of_a_failure = 0.0
        self.first_failure = float("inf")
        self._client = client
        self._calls: set[asyncio.Task[None]] = set()
        self._pacing = asyncio.get_running_loop().create_task(self._pace())

    async def _pace(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            call = loop.create_task(self._call())
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            due += 1 / CALLS_PER_S
            await asyncio.sleep(due - loop.time())

    async def _call(self) -> None:
        began = time.monotonic()
        try:
            stream = await self._client.round_robin({}, annotated=False)
            items = [item async for item in stream]
        except CallError as error:
            self.errors.append(error)
            self.last_begin_of_a_failure = max(self.last_begin_of_a_failure, began)
            self.first_failure = min(self.first_failure, time.monotonic())
            outcome = f"{error!r} in phase {error.phase}"
        else:
            outcome = "complete" if items == ITEMS else f"incomplete: {items}"
        self.outcomes[outcome] += 1

    async def passes(self, calls: int) -> None:
        """Wait for so many more calls."""
        enough = self.outcomes.total() + calls
        await eventually(lambda: self.outcomes.total() >= enough)

    async def end(self) -> None:
        self._pacing.cancel()
        await asyncio.wait((self._pacing, *self._calls), timeout=LIMIT_S)
        assert not self._calls


async def start(
    programs: Programs, client: Client, lanes: str, text: str = WORKER
) -> tuple[int, Program]:
    worker = await programs.start(text, DYN_RUNTIME_LANES=lanes)
    instance_id = int(await worker.line())
    await eventually(lambda: instance_id in client.instance_ids())
    return instance_id, worker


@pytest.mark.slow
@pytest.mark.parametrize("each_lane", ["duplex", "callhome"], indirect=True)
async def test_a_rolling_restart_under_load_fails_no_call(
    programs: Programs, each_lane: str, client: Client, scale: float
) -> None:
    workers = [(await start(programs, client, each_lane))[1] for _ in range(4)]
    load = Load(client)
    await load.passes(50)
    for _ in range(max(1, round(scale / 2))):
        for position, worker in enumerate(workers):
            worker.send(signal.SIGTERM)
            assert await worker.ended() == 0, worker.stderr
            assert worker.stderr == ""
            await load.passes(20)
            workers[position] = (await start(programs, client, each_lane))[1]
            await load.passes(20)
    await load.end()
    print(f"{load.outcomes.total()} calls while {len(workers)} workers were restarted")
    assert set(load.outcomes) == {"complete"}


@pytest.mark.parametrize("each_lane", ["duplex", "callhome"], indirect=True)
async def test_a_kill_under_load_fails_no_call_that_was_not_sent(
    programs: Programs, each_lane: str, client: Client, scale: float
) -> None:
    """What the dead worker may have begun fails, and everything else is complete."""
    for _ in range(max(1, round(scale))):
        first, second = [await start(programs, client, each_lane) for _ in range(2)]
        load = Load(client)
        await load.passes(50)
        first[1].kill()
        await load.passes(200)
        await load.end()
        begun = {(error.instance_id, error.retryable) for error in load.errors}
        assert begun <= {(first[0], False)}, load.outcomes
        assert {error.attempts for error in load.errors} <= {1, 2}
        # Once it is known to be dead nobody is sent there.
        assert load.last_begin_of_a_failure <= load.first_failure
        assert load.outcomes["complete"] == load.outcomes.total() - len(load.errors)
        print(f"{len(load.errors)} of {load.outcomes.total()} calls had begun there")
        second[1].kill()


async def ask(worker: Program, order: str) -> int:
    """Have a sleeper do that, and learn how many calls it has begun so far."""
    worker.write_line(order)
    return int(await worker.line())


@pytest.mark.slow
@pytest.mark.parametrize("each_lane", ["duplex", "callhome"], indirect=True)
async def test_a_worker_that_sleeps_and_wakes_under_load_fails_no_call(
    programs: Programs, each_lane: str, client: Client, scale: float
) -> None:
    """It is the same instance afterwards, and rests in between."""
    await start(programs, client, each_lane)
    instance_id, sleeper = await start(programs, client, each_lane, SLEEPER)
    load = Load(client)
    await load.passes(20)
    for _ in range(max(2, round(3 * scale))):
        await ask(sleeper, "unregister_endpoint_instance")
        await eventually(lambda: instance_id not in client.instance_ids())
        # The last ones were under way.
        await load.passes(20)
        asleep = await ask(sleeper, "tell")
        await load.passes(40)
        assert await ask(sleeper, "tell") == asleep
        await ask(sleeper, "register_endpoint_instance")
        await eventually(lambda: instance_id in client.instance_ids())
        await load.passes(40)
        assert await ask(sleeper, "tell") > asleep
    await load.end()
    assert set(load.outcomes) == {"complete"}
