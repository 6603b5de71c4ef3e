"""What becomes of an exception between a handler and its caller (family ER)."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from programs import LIMIT_S, Programs, eventually
from raw_peers import until
from served import Served, served

from dynamo.runtime import errors
from dynamo.runtime.errors import CallError, HandlerRefused, RemoteError


class Custom(Exception):
    """Of no kind that anybody else knows."""


class CustomValue(ValueError):
    """Of a kind that others know."""


class HttpLike(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


class Bench:
    """A handler that yields some items and then raises what a test has put here."""

    def __init__(self) -> None:
        self.error: BaseException = Custom()

    async def handle(self, before: int) -> AsyncIterator[int]:
        for number in range(before):
            yield number
        raise self.error


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
async def pair(bench: Bench) -> AsyncIterator[Served]:
    async with served(bench.handle) as pair:
        yield pair


async def read(pair: Served, request: object) -> tuple[list[Any], Exception | None]:
    """The items of a call and what its stream raised; the call itself must succeed."""
    stream = await pair.call(request)
    items: list[Any] = []
    try:
        async for item in stream:
            items.append(item)  # noqa: PERF401 - what came before an error counts too
    except Exception as error:
        return items, error
    finally:
        # Whatever came, nothing more comes.
        with pytest.raises(StopAsyncIteration):
            await stream.__anext__()
    return items, None


# ER-01, ER-02

RAISED = [
    (KeyError("k"), "Internal", "KeyError: 'k'"),
    (ValueError("v"), "InvalidRequest", "ValueError: v"),
    (TypeError("t"), "InvalidRequest", "TypeError: t"),
    (RuntimeError("r"), "Internal", "RuntimeError: r"),
    (ZeroDivisionError("z"), "Internal", "ZeroDivisionError: z"),
    (OSError(5, "io"), "Internal", "OSError: [Errno 5] io"),
    (ConnectionRefusedError("c"), "Unavailable", "ConnectionRefusedError: c"),
    (ConnectionResetError("c"), "Unavailable", "ConnectionResetError: c"),
    (TimeoutError("late"), "DeadlineExceeded", "TimeoutError: late"),
    (Custom("mine"), "Internal", "Custom: mine"),
    (CustomValue("mine"), "InvalidRequest", "CustomValue: mine"),
    (asyncio.CancelledError(), "Cancelled", "CancelledError: "),
    (HttpLike(404, "no such"), "NotFound", '{"message":"no such","code":404}'),
    (errors.Unknown("words"), "Internal", "words"),
    (errors.EngineShutdown("words"), "Unavailable", "words"),
]


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize(
    ("raised", "error_class", "words"),
    [pytest.param(*row, id=type(row[0]).__name__) for row in RAISED],
)
async def test_an_error_of_a_handler_reaches_the_caller_after_its_items(
    bench: Bench,
    pair: Served,
    raised: BaseException,
    error_class: str,
    words: str,
    before: int,
) -> None:
    bench.error = raised
    items, error = await read(pair, before)
    assert items == list(range(before))
    # The genuine client raises a ValueError; code that catches one goes on working.
    assert isinstance(error, RemoteError)
    assert isinstance(error, ValueError)
    assert str(error) == f"{error_class}: {words}"
    named = words.startswith(f"{type(raised).__name__}: ")
    assert error.remote_type == (type(raised).__name__ if named else None)
    assert error.instance_id == pair.instance_id
    # What went wrong over there is not this call's own limit or connection.
    assert not isinstance(error, (TimeoutError, ConnectionError))


# ER-04


@pytest.mark.parametrize("before", [0, 1])
async def test_a_bad_request_is_an_error_of_its_own_class(
    bench: Bench, pair: Served, before: int
) -> None:
    bench.error = errors.InvalidArgument("temperature must not be negative")
    items, error = await read(pair, before)
    assert items == list(range(before))
    assert type(error) is errors.InvalidArgument
    assert str(error) == "temperature must not be negative"
    assert not isinstance(error, ValueError)


# ER-05

FAILING_WORKER = """
async def boom(request):
    yield 1
    raise RuntimeError("engine on fire")

async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp")
    endpoint = runtime.endpoint("ns.comp.gen")
    serving = endpoint.serve_endpoint(boom)
    client = await endpoint.client()
    await client.wait_for_instances()
    try:
        async for item in await client.random(None):
            pass
    except ValueError as error:
        say(error)
    runtime.shutdown()
    await serving

run(main)
"""


async def test_a_worker_that_configures_no_logging_shows_the_traceback_of_a_failure(
    programs: Programs,
) -> None:
    worker = await programs.start(FAILING_WORKER)
    await worker.says("Internal: RuntimeError: engine on fire")
    assert await worker.ended() == 0
    lines = worker.stderr.splitlines()
    assert lines[0] == "handler boom of " + lines[0].split()[3] + " failed"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-2].endswith("in boom")
    assert lines[-1] == "RuntimeError: engine on fire"
    assert worker.stderr.count("engine on fire") == 1


async def test_each_failure_is_one_record_with_the_exception(
    bench: Bench, pair: Served, caplog: pytest.LogCaptureFixture
) -> None:
    bench.error = RuntimeError("engine on fire")
    await read(pair, 1)
    (record,) = (r for r in caplog.records if r.levelno >= logging.WARNING)
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert record.exc_info[1] is bench.error


# ER-06

ENDS = [StopAsyncIteration("e"), StopIteration("e"), GeneratorExit("e")]


def raising_as_generator(error: BaseException) -> Callable[..., Any]:
    async def handler(request: Any) -> AsyncIterator[int]:
        yield 1
        raise error

    return handler


def raising_in_a_thread(error: BaseException) -> Callable[..., Any]:
    def handler(request: Any) -> Iterator[int]:
        yield 1
        raise error

    return handler


def raising_in_a_step(error: BaseException) -> Callable[..., Any]:
    class Steps:
        def __init__(self) -> None:
            self.step = 0

        async def __anext__(self) -> int:
            self.step += 1
            if self.step == 1:
                return 1
            raise error

    return lambda request: Steps()


@pytest.mark.parametrize(
    "make", [raising_as_generator, raising_in_a_thread, raising_in_a_step]
)
@pytest.mark.parametrize("error", ENDS, ids=lambda error: type(error).__name__)
async def test_an_exception_that_means_an_end_elsewhere_is_an_error_here(
    make: Callable[[BaseException], Any], error: BaseException
) -> None:
    async with served(make(error)) as pair:
        items, raised = await read(pair, None)
    assert items == [1]
    if make is raising_in_a_step and isinstance(error, StopAsyncIteration):
        # The one place where it is how an iterator says that it has ended.
        assert raised is None
    else:
        assert isinstance(raised, RemoteError)


@pytest.mark.parametrize("error", ENDS, ids=lambda error: type(error).__name__)
async def test_it_is_an_error_too_when_calling_the_function_raises_it(
    error: BaseException,
) -> None:
    def handler(request: Any) -> Any:
        raise error

    async with served(handler) as pair:
        items, raised = await read(pair, None)
    assert items == []
    assert isinstance(raised, RemoteError)


# ER-07


async def test_failures_that_nobody_looks_at_make_no_noise(
    bench: Bench, pair: Served, scale: float
) -> None:
    complaints: list[dict[str, Any]] = []
    tasks = len(asyncio.all_tasks())
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    logging.getLogger("dynamo.runtime.ingress").disabled = True
    try:
        for number in range(int(200 * scale)):
            # Some fail in the call, some in the stream; some streams are dropped.
            target = pair.instance_id if number % 2 else 1
            call = pair.client.direct(0, target)
            if number % 4 == 1:
                await asyncio.wait((call,))
                stream = call.result()
                await asyncio.wait((stream.__anext__(),))
                del stream
            del call
        await until(lambda: not pair.in_flight)
        await until(lambda: len(asyncio.all_tasks()) == tasks)
        gc.collect()
        await asyncio.sleep(0)
    finally:
        logging.getLogger("dynamo.runtime.ingress").disabled = False
        loop.set_exception_handler(None)
    assert complaints == []


# ER-09


@pytest.mark.parametrize("before", [0, 1])
async def test_an_exception_without_a_text_is_told_by_its_class(
    bench: Bench, pair: Served, before: int
) -> None:
    bench.error = Unprintable()
    items, error = await read(pair, before)
    assert items == list(range(before))
    assert isinstance(error, RemoteError)
    assert str(error) == "Internal: Unprintable: <exception str() failed>"
    bench.error = Custom("and the next one is told as usual")
    _, error = await read(pair, before)
    assert str(error) == "Internal: Custom: and the next one is told as usual"


# ER-10


async def returns_a_value(request: Any) -> int:
    return 1


def returns_a_list(request: Any) -> list[int]:
    return [1]


async def names_it_otherwise(request: Any, ctx: Any) -> AsyncIterator[int]:
    yield 1


async def takes_nothing() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("handler", "said", "answer"),
    [
        pytest.param(
            returns_a_value,
            "it is a coroutine function: use 'yield', not 'return'",
            "AttributeError: 'coroutine' object has no attribute '__anext__'",
            id="coroutine function",
        ),
        pytest.param(
            returns_a_list,
            "'list' object has no attribute '__anext__'",
            "AttributeError: 'list' object has no attribute '__anext__'",
            id="returns a list",
        ),
        pytest.param(
            7,
            "'int' object is not callable",
            "TypeError: 'int' object is not callable",
            id="not callable",
        ),
        pytest.param(
            names_it_otherwise,
            "names_it_otherwise() missing a required argument: 'ctx'",
            "TypeError: names_it_otherwise() missing a required argument: 'ctx'",
            id="other parameter",
        ),
        pytest.param(
            takes_nothing,
            "takes_nothing() too many positional arguments",
            "TypeError: takes_nothing() too many positional arguments",
            id="no parameter",
        ),
    ],
)
async def test_a_handler_of_the_wrong_shape_is_named_once_and_refused_by_each_call(
    handler: Any, said: str, answer: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(handler) as pair:
        for _ in range(3):
            with pytest.raises(HandlerRefused) as caught:
                await pair.call(None)
            assert str(caught.value) == (
                "Unavailable: Worker generate() failed before response stream: "
                f"Generate Error: {answer}"
            )
            assert isinstance(caught.value, CallError)
            assert caught.value.instance_id == pair.instance_id
    (record,) = (r for r in caplog.records if r.levelno >= logging.WARNING)
    assert record.levelno == logging.WARNING
    name = getattr(handler, "__qualname__", "int")
    assert f"handler {name} of " in record.getMessage()
    assert said in record.getMessage()


async def test_the_shape_is_named_before_the_first_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served(returns_a_value):
        await eventually(lambda: caplog.records, LIMIT_S)
        assert "it is a coroutine function" in caplog.records[0].getMessage()
