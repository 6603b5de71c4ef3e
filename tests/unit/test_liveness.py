from __future__ import annotations

import asyncio
import contextvars
import logging
import threading

import pytest

from dynamo.runtime._discovery.liveness import Liveness
from dynamo.runtime.errors import RuntimeClosed


async def _thread() -> int:
    return threading.get_ident()


async def _stop(liveness: Liveness) -> None:
    liveness.stop()
    await asyncio.wait_for(asyncio.wrap_future(liveness.ended), 5)


async def test_work_runs_in_one_daemon_thread() -> None:
    liveness = Liveness()
    first = await asyncio.wrap_future(liveness.submit(_thread()))
    second = await asyncio.wrap_future(liveness.submit(_thread()))
    running = {thread.ident: thread for thread in threading.enumerate()}
    assert first == second != threading.get_ident()
    assert running[first].daemon
    await _stop(liveness)


async def test_no_thread_starts_before_the_first_work() -> None:
    before = threading.active_count()
    liveness = Liveness()
    assert threading.active_count() == before
    await _stop(liveness)
    assert threading.active_count() == before


async def test_work_does_not_inherit_the_callers_context() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("v", default="")
    variable.set("the caller's")

    async def read() -> str:
        return variable.get()

    liveness = Liveness()
    assert await asyncio.wrap_future(liveness.submit(read())) == ""
    await _stop(liveness)


async def test_after_the_stop_work_is_refused() -> None:
    liveness = Liveness()
    await asyncio.wrap_future(liveness.submit(_thread()))
    await _stop(liveness)
    liveness.stop()
    with pytest.raises(RuntimeClosed, match="make a new runtime"):
        liveness.submit(_thread())


async def test_work_that_the_stop_interrupts_ends_as_closed_not_as_cancelled() -> None:
    liveness = Liveness()
    parked = asyncio.wrap_future(liveness.submit(asyncio.Event().wait()))
    await _stop(liveness)
    with pytest.raises(RuntimeClosed):
        await parked


async def test_a_failing_job_is_reported_once_and_repeated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runs = 0
    enough = threading.Event()

    async def job() -> None:
        nonlocal runs
        runs += 1
        if runs == 4:
            enough.set()
        raise ZeroDivisionError

    async def start(liveness: Liveness) -> None:
        liveness.every(0.001, job)

    liveness = Liveness()
    with caplog.at_level(logging.ERROR, "dynamo.runtime.discovery"):
        await asyncio.wrap_future(liveness.submit(start(liveness)))
        assert await asyncio.to_thread(enough.wait, 5)
        await _stop(liveness)
    assert len(caplog.records) == 1


async def test_jobs_end_with_the_thread() -> None:
    liveness = Liveness()

    async def job() -> None:
        return None

    async def start() -> asyncio.Task[None]:
        return liveness.every(3600, job)

    task = await asyncio.wrap_future(liveness.submit(start()))
    await _stop(liveness)
    assert task.cancelled()


async def test_a_child_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    liveness = Liveness()
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: -1)
        assert liveness.forked
        with pytest.raises(RuntimeClosed, match="after a fork"):
            liveness.submit(_thread())
        with pytest.raises(RuntimeClosed, match="after a fork"):
            liveness.stop()
    await _stop(liveness)
