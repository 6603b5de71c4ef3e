"""The watchdog of a loop: whom it names, when it is silent, whom it leaves alone."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import dynamo.runtime._observability.watchdog as watchdog_module
from dynamo.runtime._observability.watchdog import LoopWatchdog

pytestmark = pytest.mark.may_block

LIMIT_S = 0.2
PATIENCE_S = 10.0


def nobody(task: asyncio.Task[Any]) -> str:
    return ""


def look(watchdog: LoopWatchdog, times: int = 1, every_s: float | None = None) -> None:
    """What the liveness thread does; to be run in another thread than the loop's."""
    pause = threading.Event()
    for _ in range(times):
        pause.wait(watchdog.interval_s if every_s is None else every_s)
        coroutine = watchdog.look()
        with pytest.raises(StopIteration):
            coroutine.send(None)


@pytest.fixture(autouse=True)
def _everything_is_recorded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dynamo.runtime.watchdog")


def blocked_until(told: Callable[[], object], watchdog: LoopWatchdog) -> None:
    """Block the calling thread, which is the loop's, while another one looks."""

    def looks() -> None:
        for _ in range(int(PATIENCE_S / watchdog.interval_s)):
            look(watchdog)
            if told():
                look(watchdog, 4)
                return

    thread = threading.Thread(target=looks)
    thread.start()
    thread.join()


async def answered(watchdog: LoopWatchdog) -> None:
    for _ in range(1000):
        if watchdog._asked_at is None:
            return
        await asyncio.sleep(0.001)
    pytest.fail("the loop was not asked")


async def test_who_blocks_the_loop_is_named_once_with_the_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = asyncio.get_running_loop()
    watchdog = LoopWatchdog(loop, LIMIT_S, nobody)

    async def crunch_numbers() -> None:
        blocked_until(lambda: caplog.records, watchdog)

    await loop.create_task(crunch_numbers(), name="crunching")
    await answered(watchdog)
    levels = [one.levelno for one in caplog.records]
    assert levels == [logging.WARNING, logging.INFO]
    text = caplog.records[0].getMessage()
    assert "task crunching" in text
    assert "in crunch_numbers" in text
    assert "in blocked_until" in text
    assert f"DYN_RUNTIME_BLOCKED_LOOP_SECS={LIMIT_S}" in text
    assert "goes on after" in caplog.records[-1].getMessage()


async def test_each_blockage_is_told(caplog: pytest.LogCaptureFixture) -> None:
    watchdog = LoopWatchdog(asyncio.get_running_loop(), LIMIT_S, lambda _: "us")
    for number in (1, 3):
        blocked_until(lambda number=number: len(caplog.records) >= number, watchdog)
        await answered(watchdog)
    levels = [one.levelno for one in caplog.records]
    assert levels == [logging.WARNING, logging.INFO] * 2
    assert "now by us;" in caplog.records[0].getMessage()


async def test_a_call_back_has_no_task(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    watchdog = LoopWatchdog(loop, LIMIT_S, nobody)
    done = loop.create_future()

    def call_back() -> None:
        blocked_until(lambda: caplog.records, watchdog)
        done.set_result(None)

    loop.call_soon(call_back)
    await done
    assert "by a call-back" in caplog.records[0].getMessage()


async def test_an_idle_loop_is_not_woken(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    watchdog = LoopWatchdog(loop, LIMIT_S, nobody)
    # uvloop looks idle only once it is known what is on top then.
    await asyncio.to_thread(look, watchdog, 3, 0.0)
    await answered(watchdog)
    asked = []
    watchdog._answer = lambda: asked.append(1)  # type: ignore[method-assign]
    await asyncio.to_thread(look, watchdog, 20, 0.001)
    assert not asked
    assert not caplog.records


async def test_a_loop_that_answers_is_never_accused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Busy without a pause, but with turns for everybody."""
    loop = asyncio.get_running_loop()
    watchdog = LoopWatchdog(loop, LIMIT_S, nobody)
    looking = loop.run_in_executor(None, look, watchdog, 12)
    while not looking.done():
        await asyncio.sleep(0)
    assert not caplog.records


async def test_nobody_is_accused_while_the_process_itself_stood_still(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watchdog = LoopWatchdog(asyncio.get_running_loop(), LIMIT_S, nobody)

    def late() -> None:
        look(watchdog, 2)
        assert watchdog._asked_at is not None
        look(watchdog, 1, 1.5 * LIMIT_S)

    thread = threading.Thread(target=late)
    thread.start()
    thread.join()
    assert not caplog.records


def test_a_loop_that_nobody_runs_is_not_accused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = asyncio.new_event_loop()
    watchdog = LoopWatchdog(loop, LIMIT_S, nobody)
    thread = threading.Thread(target=look, args=(watchdog, 4))
    thread.start()
    thread.join()
    loop.close()
    assert not caplog.records


async def test_a_look_that_comes_a_little_early_is_the_one_at_the_limit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would be told half a limit later, as often as not."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(watchdog_module, "time", clock)
    watchdog = LoopWatchdog(asyncio.get_running_loop(), LIMIT_S, nobody)
    told: list[int] = []

    def looks() -> None:
        for _ in range(4):
            clock.now += 0.98 * watchdog.interval_s
            look(watchdog, every_s=0.0)
            told.append(len(caplog.records))

    thread = threading.Thread(target=looks)
    thread.start()
    thread.join()
    # The first begins, the second asks.
    assert told == [0, 0, 0, 1]
    await answered(watchdog)
