"""A caller's stream of requests against a worker that a test plays: values, room, ends."""

from __future__ import annotations

import array
import asyncio
import contextlib
import contextvars
import logging
import threading
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import msgspec
import pytest

from dynamo.runtime._calls.pump import FarPump, Pump, iterator_of
from dynamo.runtime._wire.payload import encode_value
from dynamo.runtime.errors import RuntimeClosed, StreamError

LIMIT_S = 5.0


class Sink:
    """The worker: writes down what it is told."""

    def __init__(self, codec: str = "msgpack") -> None:
        self.codec = codec
        self.paused = False
        self.told: list[Any] = []
        self.threads: set[threading.Thread] = set()
        # Called with each value.
        self.on_value: Callable[[Any], object] = lambda value: None

    def encode(self, value: object) -> bytes:
        return encode_value(value, self.codec)

    def send(self, body: bytes) -> None:
        decode = msgspec.json.decode if self.codec == "json" else msgspec.msgpack.decode
        value = decode(body)
        self.told.append(value)
        self.threads.add(threading.current_thread())
        self.on_value(value)

    def end(self) -> None:
        self.told.append("end")


class Source:
    """An asynchronous iterator that counts how often it is closed."""

    def __init__(self, *values: Any) -> None:
        self.left = list(values)
        self.closed = 0

    def __aiter__(self) -> Source:
        return self

    async def __anext__(self) -> Any:
        if not self.left:
            raise StopAsyncIteration
        value = self.left.pop(0)
        if isinstance(value, BaseException):
            raise value
        if isinstance(value, asyncio.Event):
            await value.wait()
        return value

    async def aclose(self) -> None:
        self.closed += 1


class World:
    """One pump."""

    def __init__(self) -> None:
        self.sink = Sink()
        self.failures: list[Exception] = []
        self.pump: Any = None

    def make(self, requests: Any) -> Pump:
        self.pump = Pump(
            asyncio.get_running_loop(),
            iterator_of(requests),
            contextvars.copy_context(),
            self.failures.append,
        )
        return self.pump

    def start(self, requests: Any) -> Pump:
        self.make(requests).start(self.sink)
        return self.pump

    async def done(self) -> None:
        await asyncio.wait_for(asyncio.wait({self.pump._task}), LIMIT_S)

    async def sent(self, requests: Any) -> list[Any]:
        """All that the worker is told."""
        self.start(requests)
        await self.done()
        assert self.failures == []
        return self.sink.told


@pytest.fixture
def world() -> World:
    return World()


async def until(condition: Callable[[], object]) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(poll(), LIMIT_S)


# ------------------------------------------------------------------ what is a stream


async def numbers() -> AsyncIterator[int]:
    yield 1
    yield 2


def plain_numbers() -> Iterator[int]:
    yield 1
    yield 2


class OnlyIterable:
    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


class OnlyAsyncIterable:
    def __aiter__(self) -> AsyncIterator[int]:
        return numbers()


@pytest.mark.parametrize(
    "make",
    [
        numbers,
        plain_numbers,
        OnlyIterable,
        OnlyAsyncIterable,
        lambda: [1, 2],
        lambda: (1, 2),
        lambda: range(1, 3),
        lambda: dict.fromkeys([1, 2]).keys(),
        lambda: array.array("i", [1, 2]),
        lambda: Source(1, 2),
    ],
)
async def test_any_iterable_is_a_stream(world: World, make: Callable[[], Any]):
    assert await world.sent(make()) == [1, 2, "end"]


async def test_an_empty_stream_is_one_too(world: World):
    assert await world.sent([]) == ["end"]


@pytest.mark.parametrize(
    "single",
    [
        "text",
        b"bytes",
        bytearray(b"bytes"),
        memoryview(b"bytes"),
        {"a": 1},
        types.MappingProxyType({"a": 1}),
        5,
        None,
        1.5,
        numbers,
    ],
)
def test_one_request_is_no_stream(single: object):
    with pytest.raises(TypeError, match="'requests': expected an iterable") as caught:
        iterator_of(single)
    assert str(caught.value).endswith(type(single).__name__)


@pytest.mark.parametrize("codec", ["msgpack", "json"])
async def test_values_travel_in_the_codec_of_the_worker(world: World, codec: str):
    world.sink = Sink(codec)
    values = [None, 0, "", {"a": [1.5, True]}, "é"]
    assert await world.sent(values) == [*values, "end"]


async def test_the_source_runs_in_one_task_and_sees_the_callers_variables(world: World):
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("of the caller")
    tasks = set()

    async def source() -> AsyncIterator[str]:
        try:
            for _ in range(2):
                tasks.add(asyncio.current_task())
                yield variable.get()
                await asyncio.sleep(0)
        finally:
            tasks.add(asyncio.current_task())

    pump = world.make(source())
    variable.set("changed since")
    pump.start(world.sink)
    await world.done()
    assert world.sink.told == ["of the caller", "of the caller", "end"]
    assert len(tasks) == 1


# ------------------------------------------------------------------------------- room


async def test_a_worker_that_is_behind_is_waited_for(world: World):
    asked: list[int] = []

    async def source() -> AsyncIterator[int]:
        for number in range(5):
            asked.append(number)
            yield number

    def pause(value: int) -> None:
        world.sink.paused = value in (1, 3)

    world.sink.on_value = pause
    pump = world.start(source())
    for held in (1, 3):
        await until(lambda: world.sink.paused)
        for _ in range(20):
            await asyncio.sleep(0)
        assert asked == list(range(held + 1))
        pump.made_room()  # and yet none: one call too many is no harm
        world.sink.paused = False
        pump.made_room()
    await world.done()
    assert world.sink.told == [0, 1, 2, 3, 4, "end"]


async def test_room_that_nobody_waits_for_is_no_news(world: World):
    pump = world.make([1])
    pump.made_room()
    pump.start(world.sink)
    pump.made_room()
    await world.done()
    pump.made_room()
    assert world.sink.told == [1, "end"]


async def test_a_source_that_never_awaits_gives_way(world: World):
    turns = 0

    async def others() -> None:
        nonlocal turns
        while "end" not in world.sink.told:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(others())
    await asyncio.sleep(0)
    await world.sent(bytes(1024) for _ in range(640))
    await counting
    assert turns >= 9


# ---------------------------------------------------------------- ends and failures


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, TimeoutError, OSError])
async def test_what_the_source_raises_is_told(world: World, kind: type[Exception]):
    error = kind("mine")
    source = Source(1, error)
    world.start(source)
    await world.done()
    assert world.failures == [error]
    assert world.sink.told == [1]
    assert source.closed == 1


async def test_a_plain_generator_that_raises_is_told(world: World):
    def source() -> Iterator[int]:
        yield 1
        raise ValueError("mine")

    world.start(source())
    await world.done()
    assert [str(error) for error in world.failures] == ["mine"]
    assert world.sink.told == [1]


class RaisesTheEnd:
    def __iter__(self) -> RaisesTheEnd:
        return self

    def __next__(self) -> int:
        raise StopAsyncIteration


async def test_an_iterator_that_raises_the_wrong_end_has_failed(world: World):
    world.start(RaisesTheEnd())
    await world.done()
    assert [type(error) for error in world.failures] == [RuntimeError]
    assert world.sink.told == []


async def test_a_source_whose_own_work_was_cancelled_ends_the_call(world: World):
    """Nobody cancelled the call: it would wait for ever for more input."""
    world.start(Source(1, asyncio.CancelledError()))
    await world.done()
    (error,) = world.failures
    assert isinstance(error, StreamError)
    assert "CancelledError" in str(error)
    assert isinstance(error.__cause__, asyncio.CancelledError)
    assert world.sink.told == [1]


@pytest.mark.parametrize(
    ("value", "kind"),
    [(object(), TypeError), (2**64, OverflowError), ("\ud800", UnicodeEncodeError)],
)
async def test_a_value_that_cannot_be_sent_is_told_and_closes_the_source(
    world: World, value: object, kind: type[Exception]
):
    source = Source(1, value, 3)
    world.start(source)
    await world.done()
    assert [type(error) for error in world.failures] == [kind]
    assert world.sink.told == [1]
    assert source.left == [3]
    assert source.closed == 1


# --------------------------------------------------------------------------- closing


async def test_a_source_that_ended_is_closed_once(world: World):
    source = Source(1)
    pump = world.start(source)
    await world.done()
    pump.stop()
    pump.stop()
    await asyncio.sleep(0)
    assert source.closed == 1


async def test_a_call_that_ends_first_interrupts_the_source(world: World):
    ended: list[str] = []

    async def source() -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # a cleanup may take its time
            ended.append("finally")

    pump = world.start(source())
    await until(lambda: world.sink.told)
    pump.stop()
    pump.stop()
    await world.done()
    assert ended == ["finally"]
    assert world.sink.told == [1]
    assert world.failures == []


async def test_a_call_that_ends_while_there_is_no_room_closes_the_source(world: World):
    source = Source(1, 2)
    world.sink.paused = True
    pump = world.start(source)
    await until(lambda: world.sink.told)
    pump.stop()
    await world.done()
    assert source.closed == 1
    assert source.left == [2]


async def test_a_call_that_never_starts_closes_the_source(world: World):
    source = Source(1)
    pump = world.make(source)
    pump.stop()
    await world.done()
    assert source.closed == 1
    pump.start(world.sink)
    await asyncio.sleep(0)
    assert world.sink.told == []
    assert source.closed == 1


async def test_a_call_that_ends_before_the_first_step_closes_the_source(world: World):
    source = Source(1)
    pump = world.start(source)
    pump.stop()
    await world.done()
    assert source.closed == 1
    assert source.left == [1]
    assert world.sink.told == []


async def test_a_plain_generator_is_closed(world: World):
    ended: list[str] = []

    def source() -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            ended.append("finally")

    world.sink.paused = True
    pump = world.start(source())
    await until(lambda: world.sink.told)
    pump.stop()
    await world.done()
    assert ended == ["finally"]


@pytest.mark.parametrize("waits", [True, False])
async def test_a_source_that_ends_its_own_call_is_closed_in_order(
    world: World, waits: bool
):
    ended: list[str] = []

    async def source() -> AsyncIterator[int]:
        try:
            world.pump.stop()
            if waits:
                await asyncio.Event().wait()
            yield 1
        finally:
            await asyncio.sleep(0)
            ended.append("finally")

    world.start(source())
    await world.done()
    assert ended == ["finally"]
    assert world.sink.told == []


async def test_a_source_that_ignores_closing_is_left_behind(world: World):
    release = asyncio.Event()
    ignored: list[str] = []

    async def source() -> AsyncIterator[int]:
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()
            ignored.append("cancellation")
        yield 1

    pump = world.start(source())
    await asyncio.sleep(0)
    pump.stop()
    await until(lambda: ignored)
    assert not pump._task.done()
    release.set()
    await world.done()
    assert world.sink.told == []


async def test_a_value_that_comes_after_the_end_goes_nowhere(world: World):
    async def source() -> AsyncIterator[int]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            yield 1

    pump = world.start(source())
    await asyncio.sleep(0)
    pump.stop()
    await world.done()
    assert world.sink.told == []


async def test_a_failing_cleanup_is_logged_and_harms_nobody(
    world: World, caplog: pytest.LogCaptureFixture
):
    class Failing(Source):
        async def aclose(self) -> None:
            raise ValueError("in the cleanup")

    assert await world.sent(Failing(1)) == [1, "end"]
    (entry,) = caplog.records
    assert "failed while it was being closed" in entry.getMessage()
    assert entry.levelno == logging.ERROR
    assert world.pump._task.exception() is None


async def test_an_error_after_the_end_of_the_call_is_logged_and_not_told(
    world: World, caplog: pytest.LogCaptureFixture
):
    async def source() -> AsyncIterator[int]:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("too late")
        yield 1

    pump = world.start(source())
    await asyncio.sleep(0)
    pump.stop()
    await world.done()
    assert world.failures == []
    (entry,) = caplog.records
    assert "failed after the call had ended" in entry.getMessage()
    assert entry.exc_info is not None
    assert str(entry.exc_info[1]) == "too late"


async def test_started_means_that_a_value_may_have_been_taken(world: World):
    pump = world.make([1])
    assert not pump.started
    pump.start(world.sink)
    assert pump.started
    pump.start(Sink())  # again means nothing
    await world.done()
    assert world.sink.told == [1, "end"]


# ------------------------------------------------------------ sources of another loop


class Far:
    """A loop in a thread of its own, in which sources are made."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()
        self.loop.close()


@pytest.fixture
def far() -> Iterator[Far]:
    made = Far()
    yield made
    if not made.loop.is_closed():
        made.close()


async def far_pump(far: Far, world: World, source: Any) -> FarPump:
    home = asyncio.get_running_loop()

    async def make() -> FarPump:
        context = contextvars.copy_context()
        return FarPump(home, iterator_of(source), context, world.failures.append)

    return await far.run(make())


async def test_a_source_of_another_loop_runs_there(far: Far, world: World):
    threads = set()

    async def source() -> AsyncIterator[int]:
        try:
            for number in range(1000):
                threads.add(threading.current_thread())
                if number % 100 == 0:
                    await asyncio.sleep(0)
                yield number
        finally:
            threads.add(threading.current_thread())

    pump = await far_pump(far, world, source())
    assert not pump.started
    pump.start(world.sink)
    assert pump.started
    await until(lambda: "end" in world.sink.told)
    assert world.sink.told == [*range(1000), "end"]
    assert threads == {far.thread}
    assert world.sink.threads == {threading.current_thread()}


async def test_a_source_of_another_loop_waits_for_room_at_home(far: Far, world: World):
    produced = 0

    def source() -> Iterator[bytes]:
        nonlocal produced
        for _ in range(10_000):
            produced += 1
            yield bytes(1024)

    def pause(value: bytes) -> None:
        world.sink.paused = True

    world.sink.on_value = pause
    pump = await far_pump(far, world, source())
    pump.start(world.sink)
    waiting = pump._pump
    await until(lambda: world.sink.paused and waiting._room is not None)
    await until(lambda: waiting._room is not None and not waiting._room.done())
    assert produced < 200  # what was on its way when the worker fell behind
    world.sink.on_value = lambda value: None
    world.sink.paused = False
    pump.made_room()
    await until(lambda: "end" in world.sink.told)
    assert produced == 10_000
    assert len(world.sink.told) == 10_001


async def test_a_source_of_another_loop_that_fails_is_told_at_home(
    far: Far, world: World
):
    error = ValueError("mine")
    source = Source(1, error)
    pump = await far_pump(far, world, source)
    pump.start(world.sink)
    await until(lambda: world.failures)
    assert world.failures == [error]
    await until(lambda: source.closed)


@pytest.mark.parametrize("started", [True, False])
async def test_a_source_of_another_loop_is_closed_there(
    far: Far, world: World, started: bool
):
    closed_in = []

    class Noting(Source):
        async def aclose(self) -> None:
            closed_in.append(threading.current_thread())

    pump = await far_pump(far, world, Noting(1, asyncio.Event()))
    if started:
        pump.start(world.sink)
        await until(lambda: world.sink.told)
    pump.stop()
    await until(lambda: closed_in)
    pump.stop()
    assert closed_in == [far.thread]
    assert world.sink.told == ([1] if started else [])


async def test_a_source_whose_loop_was_closed_ends_the_call(far: Far, world: World):
    pump = await far_pump(far, world, [1])
    far.close()
    pump.start(world.sink)
    assert [type(error) for error in world.failures] == [RuntimeClosed]
    pump.made_room()
    pump.stop()
