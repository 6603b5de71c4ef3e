"""The loads: each takes a connected `Caller` and returns what it measured.

Every load checks the answers: a peer that lost an item has no rate.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.peer.caller import Caller
from benchmarks.peer.copies import Copies
from benchmarks.peer.handlers import ITEM_PERIOD_S

Measured = dict[str, float]
Load = Callable[[Caller, dict[str, Any]], Awaitable[Measured]]

SMALL = {"x": 1}
AT_ONCE = 100
SETTLING_TURNS = 10


class WrongAnswer(Exception):
    """The peer did not deliver what was asked for."""


def _check(got: object, wanted: object) -> None:
    if got != wanted:
        raise WrongAnswer(f"got {str(got)[:80]}, not {str(wanted)[:80]}")


def _cpu_s(pid: int) -> float:
    """The processor time of all threads of any process (Linux: its CPU clock)."""
    return time.clock_gettime(~pid << 3 | 2)


class _Cpu:
    """The processor time of client and worker together since it was made.

    Unlike the time on the wall it hardly depends on what else the machine does.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self._pids = (os.getpid(), given["worker"])
        self._started = self._now_s()

    def _now_s(self) -> float:
        return sum(map(_cpu_s, self._pids))

    def us_per(self, count: int) -> float:
        return (self._now_s() - self._started) / count * 1e6


def _memory_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


async def streams(caller: Caller, given: dict[str, Any]) -> Measured:
    """The same work, set-up of the streams included, until the time is over."""
    handler, n, count = given["handler"], given["items"], given["streams"]
    items = 0
    cpu = _Cpu(given)
    started = time.perf_counter()
    while (elapsed := time.perf_counter() - started) < given["seconds"]:
        reading = (caller.read(handler, n) for _ in range(count))
        counts = await asyncio.gather(*reading)
        _check(counts, [n] * count)
        items += n * count
    return {"items_per_s": items / elapsed, "cpu_us": cpu.us_per(items)}


async def pace(caller: Caller, given: dict[str, Any]) -> Measured:
    """Streams with an item every 10 ms: the gaps, and the processor time per item."""
    n = round(given["seconds"] / ITEM_PERIOD_S)
    gaps: list[float] = []

    async def read() -> None:
        last, count = 0.0, 0
        async for item in await caller.open("timed", {"n": n}):
            caller.unwrap(item)
            now = time.perf_counter()
            if last:
                gaps.append(now - last)
            last = now
            count += 1
        _check(count, n)

    cpu = _Cpu(given)
    await asyncio.gather(*(read() for _ in range(given["streams"])))
    cpu_us = cpu.us_per(n * given["streams"])
    return {"gap_p99_ms": _percentile(gaps, 0.99) * 1e3, "cpu_us": cpu_us}


async def calls(caller: Caller, given: dict[str, Any]) -> Measured:
    """Small echo calls, each lane of concurrency busy with one after the other."""
    latencies: list[float] = []
    cpu = _Cpu(given)
    started = time.perf_counter()
    end = started + given["seconds"]

    async def lane() -> None:
        begin = time.perf_counter()
        while begin < end:
            _check(await caller.call(SMALL), SMALL)
            now = time.perf_counter()
            latencies.append(now - begin)
            begin = now

    await asyncio.gather(*(lane() for _ in range(given["concurrent"])))
    return {
        "calls_per_s": len(latencies) / (time.perf_counter() - started),
        "p50_ms": _percentile(latencies, 0.5) * 1e3,
        "p99_ms": _percentile(latencies, 0.99) * 1e3,
        "cpu_us": cpu.us_per(len(latencies)),
    }


async def payloads(caller: Caller, given: dict[str, Any]) -> Measured:
    """A large text echoed, one after the other."""
    text = {"text": "x" * given["size_bytes"]}
    count = 0
    cpu = _Cpu(given)
    started = time.perf_counter()
    while (elapsed := time.perf_counter() - started) < given["seconds"]:
        _check(await caller.call(text), text)
        count += 1
    rate = count * given["size_bytes"] / elapsed / 1e6
    return {"mb_per_s": rate, "cpu_us": cpu.us_per(count)}


async def _first_item_s(caller: Caller) -> float:
    """From the call to its first item."""
    started = time.perf_counter()
    stream = await caller.open("yielding", {"n": 3})
    caller.unwrap(await stream.__anext__())
    elapsed = time.perf_counter() - started
    async for item in stream:
        caller.unwrap(item)
    return elapsed


async def first_warm(caller: Caller, given: dict[str, Any]) -> Measured:
    """Time to the first item for a client that has called before."""
    times = [await _first_item_s(caller) for _ in range(given["times"])]
    return {"first_ms": statistics.median(times) * 1e3}


async def first_cold(caller: Caller, given: dict[str, Any]) -> Measured:
    """The same for a client made for the one call: discovery and connection included."""
    times = []
    for _ in range(given["times"]):
        started = time.perf_counter()
        cold = await caller.fresh()
        await _first_item_s(cold)
        times.append(time.perf_counter() - started)
        await cold.aclose()
    return {"first_ms": statistics.median(times) * 1e3}


async def lateness(caller: Caller, given: dict[str, Any]) -> Measured:
    """How much later than usual small calls end while one large item is in transit."""
    size, latencies = given["size_bytes"], []

    async def small_calls() -> None:
        while True:
            started = time.perf_counter()
            _check(await caller.call(SMALL), SMALL)
            latencies.append(time.perf_counter() - started)

    task = asyncio.create_task(small_calls())
    try:
        while len(latencies) < given["before"] and not task.done():  # noqa: ASYNC110 - paced
            await asyncio.sleep(0)
        usual = statistics.median(latencies)
        latencies.clear()
        async for item in await caller.open("blob", {"n": size}):
            _check(len(caller.unwrap(item)), size)
        # The call that began in the transit must end to be counted.
        ended = len(latencies)
        while len(latencies) == ended and not task.done():  # noqa: ASYNC110 - paced
            await asyncio.sleep(0)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return {"late_ms": (max(latencies) - usual) * 1e3}


async def crowd(caller: Caller, given: dict[str, Any]) -> Measured:
    """The cost of an item with more and more streams, and with most against few."""
    measured = {}
    for count, items in given["sizes"]:
        found = await streams(caller, {**given, "streams": count, "items": items})
        measured[f"items_per_s@{count}"] = found["items_per_s"]
    few, many = (measured[f"items_per_s@{count}"] for count in given["compared"])
    return {**measured, "cost_ratio": few / many}


async def cancelled(caller: Caller, given: dict[str, Any]) -> Measured:
    """What calls leave behind that are cancelled at whatever stage, on both sides."""
    pids = (os.getpid(), given["worker"])

    async def abandon(number: int) -> None:
        stream = await caller.open("idle", SMALL)
        if number % 2:
            await stream.__anext__()
        # The last reference goes, and so does the call.

    async def many(count: int) -> None:
        for first in range(0, count, AT_ONCE):
            numbers = range(first, first + AT_ONCE)
            tasks = [asyncio.create_task(abandon(number)) for number in numbers]
            await asyncio.sleep(0)
            for task in tasks[::3]:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            for end in ends:
                if isinstance(end, Exception):
                    raise end

    async def alive() -> int:
        """Tasks and descriptors of both sides."""
        (theirs,) = [
            caller.unwrap(item) async for item in await caller.open("alive", SMALL)
        ]
        descriptors = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
        return len(asyncio.all_tasks()) + int(theirs) + descriptors

    async def settled() -> int:
        """The same when what is being closed is closed."""
        counts = [await alive()]
        for _ in range(SETTLING_TURNS):
            await asyncio.sleep(0.02)
            counts.append(await alive())
        return min(counts)

    await many(given["before"])
    before, memory_before = await settled(), sum(map(_memory_bytes, pids))
    started = time.perf_counter()
    await many(given["count"])
    elapsed = time.perf_counter() - started
    left = await settled() - before
    grown = sum(map(_memory_bytes, pids)) - memory_before
    return {
        "left": left,
        "grown_kb": grown / 1024,
        "calls_per_s": given["count"] / elapsed,
    }


async def memory(caller: Caller, given: dict[str, Any]) -> Measured:
    """Memory per stream that is open and silent, the reading task included."""
    pids = {"client_kb": os.getpid(), "worker_kb": given["worker"]}
    first_items = 0
    enough = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []

    async def read() -> None:
        nonlocal first_items
        async for item in await caller.open("idle", SMALL):
            _check(caller.unwrap(item), SMALL)
            first_items += 1
            if first_items == len(tasks):
                enough.set()

    async def grow_to(count: int) -> dict[str, int]:
        """Open more streams, not more at once than a listener takes."""
        while len(tasks) < count:
            enough.clear()
            batch = min(100, count - len(tasks))
            tasks.extend(asyncio.create_task(read()) for _ in range(batch))
            done, _ = await asyncio.wait(
                [asyncio.create_task(enough.wait()), *tasks[-batch:]],
                return_when=asyncio.FIRST_COMPLETED,
            )
            for failed in done:
                failed.result()
        return {name: _memory_bytes(pid) for name, pid in pids.items()}

    low = await grow_to(given["low"])
    high = await grow_to(given["high"])
    more = given["high"] - given["low"]
    return {name: (high[name] - low[name]) / more / 1024 for name in pids}


async def instances(caller: Caller, given: dict[str, Any]) -> Measured:
    """Calls with one registered instance, then new clients and calls with more."""
    alone = await calls(caller, given)
    measured = {"calls_per_s@1": alone["calls_per_s"]}
    copies, listed_s = Copies(Path(os.environ["DYN_FILE_KV"]), "echo"), 0.0
    for count in given["counts"]:
        copies.grow_to(count)
        started = time.perf_counter()
        other = await caller.fresh()
        await other.find("echo", count)
        listed_s = time.perf_counter() - started
        many = await calls(other, given)
        await other.aclose()
        measured[f"calls_per_s@{count}"] = many["calls_per_s"]
    most = measured[f"calls_per_s@{max(given['counts'])}"]
    return {
        **measured,
        "listed_ms": listed_s * 1e3,
        "speed_kept": most / alone["calls_per_s"],
    }


LOADS: dict[str, Load] = {
    one.__name__: one
    for one in (
        streams,
        pace,
        calls,
        payloads,
        first_warm,
        first_cold,
        lateness,
        crowd,
        cancelled,
        memory,
        instances,
    )
}
