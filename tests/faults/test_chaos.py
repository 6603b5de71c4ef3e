"""A fault a second under load: workers are killed, frozen, drained and replaced.

Replacements are forked from a warm process that has imported everything and never made
a runtime.  Every second worker speaks the call-home lane, the others the duplex lane.
Row HG-01.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from programs import ENDPOINT, LIMIT_S, MakeRuntime, Program, Programs, eventually

from dynamo.runtime import Client, DistributedRuntime
from dynamo.runtime.errors import (
    CallError,
    CallTimeout,
    ConnectionFailed,
    StreamBroken,
    StreamError,
    WorkerLost,
)

SEED = 20_240_229
FAULTS = 60
# Three minutes of it show what there is to see.
MAX_FAULTS = 180
PING_TIMEOUT_S = 3.0
# Well above the time for which a busy machine lets a worker starve.
FROZEN_S = {"blink": 0.3, "freeze": PING_TIMEOUT_S + 1}
CALL_LIMIT_S = 30.0
SETTINGS = {
    "DYN_RUNTIME_PING_INTERVAL_SECS": "0.5",
    "DYN_RUNTIME_PING_TIMEOUT_SECS": str(PING_TIMEOUT_S),
    "DYN_RUNTIME_EJECTION_MAX_SECS": "1",
}
WORKERS = """
import contextlib, gc, json

live = 0
lifeline, held = os.pipe()

async def handle(request):
    global live
    live += 1
    try:
        await asyncio.sleep(request["first"])
        for number in range(request["from"], request["to"]):
            yield number
            await asyncio.sleep(request["pause"])
    finally:
        live -= 1

@dynamo_worker()
async def work(runtime):
    loop = asyncio.get_running_loop()
    # Whatever becomes of the test, no worker outlives the process that forked it.
    loop.add_reader(lifeline, os._exit, 1)

    def tell():
        gc.collect()
        say("state", os.getpid(), json.dumps({
            "handlers": live,
            "in flight": runtime._core.in_flight,
            "tasks": len(asyncio.all_tasks()),
            "descriptors": len(os.listdir("/proc/self/fd")),
        }))

    loop.add_signal_handler(signal.SIGUSR1, tell)
    endpoint = runtime.endpoint("ns.comp.gen")
    say("serving", os.getpid(), endpoint.connection_id())
    await endpoint.serve_endpoint(handle)

def become_worker(lanes):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.close(held)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(f"worker-{os.getpid()}", os.O_WRONLY | os.O_CREAT), 2)
    os.environ["DYN_RUNTIME_LANES"] = lanes
    run(work)

def reap(*_):
    # Not `say`: this may come in the middle of one.
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            os.write(1, b"ended %d %d\\n" % (pid, os.waitstatus_to_exitcode(status)))

signal.signal(signal.SIGCHLD, reap)
for lanes in iter(sys.stdin.readline, ""):
    if os.fork() == 0:
        become_worker(lanes.strip())
        break
"""


class Fleet:
    """The workers by process id, alive and dead, and what was done to them."""

    def __init__(self, server: Program, client: Client) -> None:
        self.server = server
        self.client = client
        self.instances: dict[int, int] = {}
        self.lanes: dict[int, str] = {}
        self.exits: dict[int, int] = {}
        self.states: dict[int, dict[str, int]] = {}
        self.healthy: set[int] = set()
        self.killed: set[int] = set()
        # At others no call may fail.
        self.may_fail: set[int] = set()
        self._next_lanes = itertools.cycle(["all", "callhome"])
        self._spawning = asyncio.Lock()
        self._listening = asyncio.get_running_loop().create_task(self._listen())

    @property
    def alive(self) -> set[int]:
        return set(self.instances) - set(self.exits)

    async def _listen(self) -> None:
        while line := await self.server.line(limit_s=float("inf")):
            word, pid, value = line.split(" ", 2)
            if word == "serving":
                self.instances[int(pid)] = int(value)
            elif word == "ended":
                self.exits[int(pid)] = int(value)
            else:
                self.states[int(pid)] = json.loads(value)

    async def spawn(self, lanes: str = "") -> int:
        """Start a worker; when this returns it has been heard of."""
        lanes = lanes or next(self._next_lanes)
        async with self._spawning:
            before = set(self.instances)
            self.server.write_line(lanes)
            await eventually(lambda: len(self.instances) > len(before))
        (pid,) = set(self.instances) - before
        self.lanes[pid] = lanes
        await eventually(lambda: self.instances[pid] in self.client.instance_ids())
        self.healthy.add(pid)
        return pid

    async def ended(self, pid: int) -> None:
        await eventually(lambda: pid in self.exits)

    async def state(self, pid: int) -> dict[str, int]:
        self.states.pop(pid, None)
        os.kill(pid, signal.SIGUSR1)
        await eventually(lambda: pid in self.states)
        return self.states[pid]

    async def aclose(self) -> None:
        for pid in self.alive:
            os.kill(pid, signal.SIGKILL)
        assert self.server.process.stdin is not None
        self.server.process.stdin.close()
        await self.server.ended()
        await asyncio.wait_for(self._listening, LIMIT_S)

    # ------------------------------------------------------------------- the faults

    async def kill(self, pid: int) -> None:
        self.may_fail.add(self.instances[pid])
        self.killed.add(pid)
        os.kill(pid, signal.SIGKILL)
        await self.ended(pid)
        await self.spawn()

    async def freeze(self, pid: int, time_s: float) -> None:
        self.may_fail.add(self.instances[pid])
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(time_s)
        os.kill(pid, signal.SIGCONT)
        self.healthy.add(pid)

    async def drain(self, pid: int) -> None:
        os.kill(pid, signal.SIGTERM)
        await self.ended(pid)
        await self.spawn()

    async def restart(self, pid: int) -> None:
        await self.spawn()
        os.kill(pid, signal.SIGTERM)
        await self.ended(pid)

    async def strike(self, chance: random.Random, fault: str) -> asyncio.Task[None]:
        """Begin a fault at a worker to which nothing happens, and leave two such."""
        await eventually(lambda: len(self.healthy) > 2)
        pid = chance.choice(sorted(self.healthy))
        self.healthy.remove(pid)
        if fault in FROZEN_S:
            struck = self.freeze(pid, FROZEN_S[fault])
        else:
            struck = getattr(self, fault)(pid)
        return asyncio.get_running_loop().create_task(struck)


class Load:
    """So many streams at all times, and how they ended."""

    def __init__(self, fleet: Fleet, streams: int) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.wrong: list[str] = []
        self.longest_s = 0.0
        self._fleet = fleet
        self._chance = random.Random(SEED)
        self._over = False
        self._callers = [
            asyncio.get_running_loop().create_task(self._call_on())
            for _ in range(streams)
        ]

    async def end(self) -> None:
        """No more calls; those that run end by themselves."""
        self._over = True
        await asyncio.wait_for(asyncio.gather(*self._callers), 2 * CALL_LIMIT_S)

    async def _call_on(self) -> None:
        while not self._over:
            began = time.monotonic()
            kind = self._chance.choice(["plain", "idempotent", "resumed", "cancelled"])
            outcome = await self._call(kind)
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.outcomes[kind, outcome] += 1
            await asyncio.sleep(0)

    async def _call(self, kind: str) -> str:
        chance, received = self._chance, list[int]()
        request = {
            "first": chance.choice([0, 0.2]),
            "from": 0,
            "to": chance.randrange(1, 30),
            "pause": chance.uniform(0.02, 0.06),
        }
        reading = asyncio.get_running_loop().create_task(
            self._read(request, received, **self._options(kind, request, received))
        )
        if kind == "cancelled":
            await asyncio.wait((reading,), timeout=chance.uniform(0, 0.5))
            reading.cancel()
        await asyncio.wait((reading,))
        if reading.cancelled():
            return "cancelled"
        error = reading.exception()
        if error is None:
            assert received == list(range(request["to"]))
            return "complete"
        if not self._allowed(kind, error, received):
            self.wrong.append(
                f"{kind} after {len(received)} items at {time.monotonic():.3f}: "
                f"{error!r} {getattr(error, '__dict__', {})}"
            )
        return type(error).__name__

    def _options(
        self, kind: str, request: dict[str, Any], received: list[int]
    ) -> dict[str, Any]:
        def go_on(items: int, error: StreamError) -> dict[str, Any]:
            assert items == len(received)
            return {**request, "from": items}

        if kind == "plain":
            return {}
        return {
            "idempotent": True,
            "on_stream_lost": go_on if kind == "resumed" else None,
        }

    async def _read(
        self, request: dict[str, Any], received: list[int], **options: Any
    ) -> None:
        client = self._fleet.client
        choose = self._chance.choice([client.round_robin, client.random])
        stream = await choose(request, annotated=False, timeout=CALL_LIMIT_S, **options)
        async for item in stream:
            assert item == len(received)
            received.append(item)

    def _allowed(self, kind: str, error: BaseException, received: list[int]) -> bool:
        """Whether nobody could have spared the caller this.

        There always was a healthy instance.
        """
        if not isinstance(error, CallError) or error.retryable or kind == "resumed":
            return False
        if error.instance_id not in self._fleet.may_fail:
            return False
        if received:
            return type(error) is StreamBroken
        lost = (StreamBroken, WorkerLost, ConnectionFailed, CallTimeout)
        return kind == "plain" and isinstance(error, lost)


async def of_this_process() -> dict[str, int]:
    """Tasks are looked at after each test."""
    gc.collect()
    return {"descriptors": len(os.listdir("/proc/self/fd"))}


async def listen_once() -> None:
    """The first listener of a uvloop opens a descriptor that stays in reserve."""
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(asyncio.Protocol, "127.0.0.1")
    listener.close()
    await listener.wait_closed()


@pytest.fixture
async def server(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> Program:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    return await programs.start(WORKERS, **SETTINGS)


async def strike_each_second(fleet: Fleet, count: int) -> None:
    loop = asyncio.get_running_loop()
    chance = random.Random(SEED)
    faults: Iterator[str] = itertools.cycle(
        ["kill", "blink", "drain", "restart", "freeze"]
    )
    struck = []
    for fault in itertools.islice(faults, count):
        due = loop.time() + 1
        struck.append(await fleet.strike(chance, fault))
        await asyncio.sleep(due - loop.time())
    await asyncio.gather(*struck)


async def settles(
    look: Callable[[], Awaitable[dict[str, int]]], wanted: dict[str, int]
) -> None:
    """Wait until what ``look`` finds is no more than that."""
    give_up_at = time.monotonic() + LIMIT_S
    while True:
        seen = await look()
        if all(seen[name] <= wanted[name] for name in wanted):
            return
        assert time.monotonic() < give_up_at, f"left behind: {seen}, wanted {wanted}"
        await asyncio.sleep(0.1)


async def assert_as_before_the_first_call(
    fleet: Fleet, runtime: DistributedRuntime, ours: dict[str, int]
) -> None:
    """Once the caller's runtime is closed, here and in all workers."""
    survivors = sorted(fleet.alive)
    fresh = {lanes: await fleet.spawn(lanes) for lanes in set(fleet.lanes.values())}
    assert fleet.client._home.in_flight == {}
    runtime.shutdown()
    await asyncio.wait_for(runtime._core.closed(), LIMIT_S)
    await settles(of_this_process, ours)
    for pid in survivors:
        new = await fleet.state(fresh[fleet.lanes[pid]])
        assert (new["handlers"], new["in flight"]) == (0, 0)
        await settles(lambda pid=pid: fleet.state(pid), new)


async def assert_all_end(fleet: Fleet, programs: Programs) -> None:
    for pid in fleet.alive:
        os.kill(pid, signal.SIGTERM)
    await eventually(lambda: not fleet.alive)
    codes = {pid: -signal.SIGKILL if pid in fleet.killed else 0 for pid in fleet.exits}
    assert fleet.exits == codes
    for pid in fleet.exits:
        said = (programs.folder / f"worker-{pid}").read_text()
        assert "Traceback" not in said, said
        assert "never retrieved" not in said, said


async def chaos(fleet: Fleet, scale: float) -> Load:
    count, streams = (4, 60) if scale <= 1 else (8, 200)
    for _ in range(count):
        await fleet.spawn()
    load = Load(fleet, streams)
    await strike_each_second(fleet, min(int(FAULTS * scale), MAX_FAULTS))
    await load.end()
    print(
        f"{load.outcomes.total()} calls, {len(fleet.exits)} workers lost, the longest "
        f"took {load.longest_s:.1f} s: {dict(sorted(load.outcomes.items()))}"
    )
    return load


# The processes are what takes its time; one kind of loop is enough.
@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.slow
@pytest.mark.first
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
async def test_a_fault_a_second_fails_no_call_that_could_have_gone_elsewhere(
    programs: Programs, server: Program, make_runtime: MakeRuntime, scale: float
) -> None:
    await listen_once()
    before = await of_this_process()
    runtime = make_runtime()
    fleet = Fleet(server, await runtime.endpoint(ENDPOINT).client())
    try:
        load = await chaos(fleet, scale)
        assert load.wrong == []
        assert load.longest_s < CALL_LIMIT_S
        assert load.outcomes["plain", "complete"] > load.outcomes.total() / 8
        assert load.outcomes["cancelled", "cancelled"] > 0
        await assert_as_before_the_first_call(fleet, runtime, before)
        await assert_all_end(fleet, programs)
    finally:
        await fleet.aclose()
