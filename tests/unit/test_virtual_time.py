from __future__ import annotations

import _thread
import asyncio
import threading
import time
from pathlib import Path

import pytest

from dynamo.runtime.testing import (
    Cluster,
    VirtualTimeLoop,
    in_virtual_time,
    run_in_virtual_time,
)

HOUR_S = 3600.0


@pytest.fixture
def quick() -> object:
    """Fail a test that took as long as it says."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < HOUR_S / 60


@pytest.mark.usefixtures("quick")
@in_virtual_time
async def test_waiting_takes_its_time_on_the_clock_and_none_of_ours() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.sleep(HOUR_S)
    assert loop.time() - began == pytest.approx(HOUR_S, abs=1e-6)


@in_virtual_time
async def test_timers_run_in_their_order_and_at_their_time() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    rang: list[float] = []

    async def ring(after_s: float) -> None:
        await asyncio.sleep(after_s)
        rang.append(loop.time() - began)

    await asyncio.gather(*map(ring, (30, 10, 20, 10)))
    assert rang == pytest.approx([10, 10, 20, 30], abs=1e-6)


@in_virtual_time
async def test_a_time_limit_is_kept_exactly() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), 100)
    assert loop.time() - began == pytest.approx(100, abs=1e-6)


@in_virtual_time
async def test_the_monotonic_clock_goes_along_in_this_thread_only() -> None:
    here, there = time.monotonic(), await asyncio.to_thread(time.monotonic)
    await asyncio.sleep(HOUR_S)
    assert time.monotonic() - here == pytest.approx(HOUR_S, abs=1)
    assert await asyncio.to_thread(time.monotonic) - there < HOUR_S / 2


def test_the_clock_is_given_back() -> None:
    before = time.monotonic, _thread.start_new_thread
    run_in_virtual_time(asyncio.sleep(1))
    with pytest.raises(ZeroDivisionError):
        run_in_virtual_time(fails())
    assert (time.monotonic, _thread.start_new_thread) == before


async def fails() -> None:
    raise ZeroDivisionError


@in_virtual_time
async def test_the_clock_does_not_run_ahead_of_threads() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    allowed = threading.Event()
    job = loop.run_in_executor(None, allowed.wait, HOUR_S)
    loop.call_later(0.02, allowed.set)
    assert await asyncio.wait_for(job, HOUR_S)
    assert loop.time() - began < HOUR_S / 2


@in_virtual_time
async def test_a_bare_thread_is_waited_for_too() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    done = asyncio.Event()
    begun, allowed = threading.Event(), threading.Event()

    def work(text: str) -> None:
        assert text == "argument"
        begun.set()
        allowed.wait(HOUR_S)
        loop.call_soon_threadsafe(done.set)

    _thread.start_new_thread(work, ("argument",))
    loop.call_later(0.02, allowed.set)
    await asyncio.wait_for(done.wait(), HOUR_S)
    assert begun.is_set()
    assert loop.time() - began < HOUR_S / 2


@in_virtual_time
async def test_fixtures_reach_the_test(tmp_path: Path) -> None:
    assert tmp_path.is_dir()


@in_virtual_time
async def test_sockets_of_this_process_work() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(100))
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"hello")
    assert await asyncio.wait_for(reader.read(), HOUR_S) == b"hello"
    writer.close()
    server.close()


@in_virtual_time
async def test_handlers_in_threads_get_real_time() -> None:
    """A plain generator of the runtime blocks its thread, not the clock."""
    allowed = threading.Event()

    def blocking(request: object) -> object:
        assert allowed.wait(HOUR_S)
        yield request

    async with Cluster() as cluster:
        await cluster.serve("a.b.c", blocking)
        client = await cluster.client("a.b.c")
        asyncio.get_running_loop().call_later(0.02, allowed.set)
        stream = await client.random("x", annotated=False)
        assert [item async for item in stream] == ["x"]


def test_what_is_left_running_is_cancelled() -> None:
    ended: list[str] = []

    async def linger() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def main() -> str:
        main.task = asyncio.create_task(linger())  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        return "result"

    assert run_in_virtual_time(main()) == "result"
    assert ended == ["cancelled"]


def test_the_clock_begins_as_the_real_one() -> None:
    loop = VirtualTimeLoop()
    assert abs(loop.time() - time.monotonic()) < HOUR_S / 60
    loop.close()
