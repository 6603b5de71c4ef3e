"""Plain generators in threads: steps, errors, closing, and loops that go away."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo.runtime._calls.threads import ThreadedGenerator

LIMIT_S = 5.0
SOURCE = Path(__file__).resolve().parents[2] / "src"


def threaded(make: Callable[..., Any], *arguments: Any) -> ThreadedGenerator:
    return ThreadedGenerator(functools.partial(make, *arguments), "test")


async def step(items: ThreadedGenerator) -> Any:
    return await asyncio.wait_for(items.__anext__(), LIMIT_S)


async def close(items: ThreadedGenerator) -> None:
    await asyncio.wait_for(items.aclose(), LIMIT_S)


async def items_of(items: ThreadedGenerator) -> list[Any]:
    async def read() -> list[Any]:
        return [item async for item in items]

    found = await asyncio.wait_for(read(), LIMIT_S)
    await close(items)
    return found


def count(limit: int) -> Iterator[int]:
    yield from range(limit)


async def test_values_come_in_order():
    assert await items_of(threaded(count, 100)) == list(range(100))


async def test_a_generator_without_values_ends_at_once():
    assert await items_of(threaded(count, 0)) == []


async def test_the_end_stays_the_end():
    items = threaded(count, 1)
    assert await step(items) == 0
    for _ in range(3):
        with pytest.raises(StopAsyncIteration):
            await step(items)
        await close(items)


async def test_one_thread_and_one_context_for_the_whole_call():
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")
    variable.set(1)
    threads = []

    def handler() -> Iterator[int]:
        try:
            for _ in range(3):
                threads.append(threading.current_thread())
                yield variable.get()
                variable.set(variable.get() + 1)
        finally:
            threads.append(threading.current_thread())

    first, second = threaded(handler), threaded(handler)
    variable.set(100)  # of no concern to calls that were made before
    found = []
    for _ in range(3):
        found += [await step(first), await step(second)]
    assert found == [1, 1, 2, 2, 3, 3]
    await close(first)
    await close(second)
    assert len(set(threads)) == 2
    assert threading.current_thread() not in threads
    assert variable.get() == 100


async def test_the_thread_is_a_daemon_with_a_name_and_ends_with_the_call():
    def handler() -> Iterator[threading.Thread]:
        yield threading.current_thread()

    items = threaded(handler)
    thread = await step(items)
    assert thread.daemon
    assert thread.name == "dynamo-handler-test"
    await close(items)
    thread.join(LIMIT_S)
    assert not thread.is_alive()


async def test_steps_that_block_leave_the_loop_free():
    release = threading.Event()

    def handler() -> Iterator[bool]:
        yield release.wait(LIMIT_S)

    items = threaded(handler)
    waiting = asyncio.create_task(items.__anext__())
    for _ in range(50):
        await asyncio.sleep(0)
    assert not waiting.done()
    release.set()
    assert await asyncio.wait_for(waiting, LIMIT_S) is True
    await close(items)


# ----------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "kind",
    [ValueError, asyncio.CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit],
)
async def test_what_a_step_raises_is_raised_where_it_is_awaited(
    kind: type[BaseException],
):
    def handler() -> Iterator[int]:
        yield 1
        raise kind("mine")

    items = threaded(handler)
    assert await step(items) == 1
    with pytest.raises(kind, match="mine"):
        # Not in a task: some of these would end the loop.
        await items.__anext__()
    await close(items)
    with pytest.raises(StopAsyncIteration):
        await step(items)


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration])
async def test_the_wrong_end_is_an_error(kind: type[Exception]):
    def handler() -> Iterator[int]:
        yield 1
        raise kind

    items = threaded(handler)
    assert await step(items) == 1
    with pytest.raises(
        RuntimeError, match=f"generator raised {kind.__name__}"
    ) as error:
        await step(items)
    assert type(error.value.__cause__) is kind
    await close(items)


async def test_a_call_that_fails_is_the_error_of_the_first_step():
    """As with a signature that promises more than the function takes."""
    items = threaded(count, 1, 2, 3)
    with pytest.raises(TypeError, match="positional argument"):
        await step(items)
    await close(items)


# ---------------------------------------------------------------------------- closing


async def test_closing_runs_the_finally_in_the_thread():
    ended_in = []

    def handler() -> Iterator[threading.Thread]:
        try:
            yield threading.current_thread()
        finally:
            ended_in.append(threading.current_thread())

    items = threaded(handler)
    thread = await step(items)
    await close(items)
    assert ended_in == [thread]
    await close(items)
    assert ended_in == [thread]


async def test_closing_waits_for_the_step_in_progress():
    release = threading.Event()
    events = []

    def handler() -> Iterator[int]:
        try:
            yield 1
            release.wait(LIMIT_S)
            events.append("step")
            yield 2
        finally:
            events.append("finally")

    items = threaded(handler)
    assert await step(items) == 1
    stepping = asyncio.create_task(items.__anext__())
    await asyncio.sleep(0)
    stepping.cancel()
    closing = asyncio.create_task(items.aclose())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not closing.done()
    release.set()
    await asyncio.wait_for(closing, LIMIT_S)
    assert events == ["step", "finally"]
    assert stepping.cancelled()


async def test_a_close_that_is_given_up_goes_on_in_the_thread():
    release = threading.Event()
    ended = threading.Event()

    def handler() -> Iterator[int]:
        try:
            yield 1
        finally:
            release.wait(LIMIT_S)
            ended.set()

    items = threaded(handler)
    assert await step(items) == 1
    closing = asyncio.create_task(items.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing})
    assert closing.cancelled()
    release.set()
    await close(items)
    assert ended.is_set()


async def test_what_closing_raises_is_raised():
    def handler() -> Iterator[int]:
        try:
            yield 1
        finally:
            raise ValueError("in the cleanup")

    items = threaded(handler)
    assert await step(items) == 1
    with pytest.raises(ValueError, match="in the cleanup"):
        await close(items)


async def test_a_generator_that_goes_on_when_closed_is_an_error():
    def handler() -> Iterator[int]:
        try:
            yield 1
        except GeneratorExit:
            yield 2

    items = threaded(handler)
    assert await step(items) == 1
    with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
        await close(items)


async def test_a_call_that_never_began_starts_no_thread():
    before = threading.active_count()
    begun = []

    def handler() -> Iterator[int]:
        begun.append(1)
        yield 1

    items = threaded(handler)
    await close(items)
    with pytest.raises(StopAsyncIteration):
        await step(items)
    assert begun == []
    assert threading.active_count() == before


async def test_a_thousand_calls_leave_nothing():
    before = threading.active_count()
    last: weakref.ref[ThreadedGenerator] | None = None
    for number in range(1000):
        items = threaded(count, 3)
        assert await step(items) == 0
        await close(items)
        last = weakref.ref(items) if number == 999 else None
    del items
    assert last is not None
    await asyncio.sleep(0)
    for _ in range(1000):
        if threading.active_count() == before:
            break
        await asyncio.sleep(0.001)
    assert threading.active_count() == before
    gc.collect()
    assert last() is None


def test_a_loop_that_was_closed_ends_the_thread_with_its_finally():
    release = threading.Event()
    ended = threading.Event()
    threads = []

    def handler() -> Iterator[int]:
        try:
            threads.append(threading.current_thread())
            yield 1
            release.wait(LIMIT_S)
            yield 2
        finally:
            ended.set()

    async def begin() -> None:
        items = threaded(handler)
        assert await step(items) == 1
        stepping = asyncio.create_task(items.__anext__())
        await asyncio.sleep(0)
        stepping.cancel()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    release.set()
    assert ended.wait(LIMIT_S)
    threads[0].join(LIMIT_S)
    assert not threads[0].is_alive()


STUCK = """
import asyncio, threading
from dynamo.runtime._calls.threads import ThreadedGenerator

def stuck():
    yield 1
    threading.Event().wait()

async def main():
    items = ThreadedGenerator(stuck, "stuck")
    print(await items.__anext__(), flush=True)
    asyncio.create_task(items.__anext__())
    await asyncio.sleep(0)

asyncio.run(main())
"""


def test_a_stuck_thread_does_not_hold_the_process():
    done = subprocess.run(
        [sys.executable, "-c", STUCK],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=15,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
