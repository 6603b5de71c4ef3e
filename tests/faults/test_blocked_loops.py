"""Programs whose own code holds the event loop: nobody else is blamed for it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from linked import closed, linked
from measured import TRIES, Times

from dynamo.runtime import DistributedRuntime, errors
from dynamo.runtime._observability.watchdog import LoopWatchdog
from dynamo.runtime.testing import until

pytestmark = pytest.mark.may_block

LIMITS = {
    "request_timeout_s": 0.2,
    "connect_timeout_s": 0.2,
    "call_home_timeout_s": 0.2,
    "frame_timeout_s": 0.2,
}


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
    monkeypatch.setenv("DYN_TCP_RESPONSE_STREAM_HOST", "127.0.0.1")


async def echo(request: Any) -> AsyncIterator[Any]:
    yield request


def hold_the_loop(seconds: float = 0.35) -> None:
    time.sleep(seconds)


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("turns", range(1, 9))
async def test_a_caller_that_holds_its_loop_over_every_limit_still_gets_its_answer(
    turns: int, warm: bool
) -> None:
    async with linked(echo, **LIMITS) as link:
        if warm:
            assert [item async for item in await link.call(0)] == [0]
        call = asyncio.create_task(link.call(turns))
        for _ in range(turns):
            await asyncio.sleep(0)
        hold_the_loop()
        assert [item async for item in await call] == [turns]


async def test_a_limit_that_was_missed_by_the_other_side_still_counts() -> None:
    async with linked(echo, **LIMITS) as link:
        link.requests.stall()
        call = asyncio.create_task(link.call())
        await asyncio.sleep(0)
        hold_the_loop()
        with pytest.raises(errors.CallError):
            await asyncio.wait_for(call, 3)


# ------------------------------------------------------------------------ the watchdog


class Told(logging.Handler):
    """What the watchdog says, as it says it."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.warned = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        if record.levelno == logging.WARNING:
            self.warned.set()


@pytest.fixture
def told() -> Iterator[Told]:
    handler = Told()
    log = logging.getLogger("dynamo.runtime.watchdog")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)


@pytest.fixture
def file_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], DistributedRuntime]:
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    return lambda: DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")


async def test_a_handler_that_blocks_the_loop_is_named_once_with_its_place(
    told: Told,
    file_runtime: Callable[[], DistributedRuntime],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def tokenize(request: Any) -> AsyncIterator[Any]:
        yield told.warned.wait(10)
        # Long enough for another look or two.
        told.warned.clear()
        yield told.warned.wait(0.5)

    monkeypatch.setenv("DYN_RUNTIME_BLOCKED_LOOP_SECS", "0.2")
    runtime = file_runtime()
    endpoint = runtime.endpoint("ns.comp.gen")
    serving = endpoint.serve_endpoint(tokenize)
    client = await endpoint.client()
    await client.wait_for_instances(timeout=5)
    stream = await client.random("", annotated=False)
    assert [item async for item in stream] == [True, False]
    await until(lambda: len(told.records) == 2)
    warning, info = told.records
    assert "now by handler " in warning.getMessage()
    assert "tokenize of ns/comp/gen; " in warning.getMessage()
    assert "told.warned.wait" in warning.getMessage()
    assert "goes on after" in info.getMessage()
    await closed(runtime)
    await serving


async def test_who_blocks_the_loop_is_named_within_one_and_a_half_limits(
    told: Told,
    file_runtime: Callable[[], DistributedRuntime],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_s = 0.2
    times = Times("who blocks the loop is named", 1.5 * limit_s)
    monkeypatch.setenv("DYN_RUNTIME_BLOCKED_LOOP_SECS", str(limit_s))
    runtime = file_runtime()
    await runtime.endpoint("ns.comp.gen").client()
    for number in range(TRIES):
        told.warned.clear()
        since = time.monotonic()
        assert told.warned.wait(10)
        times.took_s.append(time.monotonic() - since)
        # It goes on, which is said as well.
        await until(lambda said=2 * number + 2: len(told.records) == said)
    times.judge(not_before_s=limit_s)
    await closed(runtime)


async def test_code_of_a_client_that_blocks_the_loop_is_named_too(
    told: Told,
    file_runtime: Callable[[], DistributedRuntime],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DYN_RUNTIME_BLOCKED_LOOP_SECS", "0.2")
    runtime = file_runtime()
    await runtime.endpoint("ns.comp.gen").client()
    assert told.warned.wait(10)
    assert "test_code_of_a_client" in told.records[0].getMessage()
    await closed(runtime)


async def test_the_watchdog_can_be_turned_off_and_a_mem_runtime_has_none(
    file_runtime: Callable[[], DistributedRuntime],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched: list[object] = []
    monkeypatch.setattr(LoopWatchdog, "__init__", lambda *_: watched.append(1))
    monkeypatch.setenv("DYN_RUNTIME_BLOCKED_LOOP_SECS", "0")
    in_memory = DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp")
    for runtime in (file_runtime(), in_memory):
        await runtime.endpoint("ns.comp.gen").client()
        await closed(runtime)
    assert not watched
