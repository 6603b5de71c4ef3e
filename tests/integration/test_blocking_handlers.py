"""Plain generator functions that block, called over loopback sockets."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from raw_peers import PATH, make_runtime, shut_down, until, within

from dynamo._core import InvalidArgument
from dynamo.runtime import Client, Context, DistributedRuntime
from dynamo.runtime.errors import CallError, RemoteError

LIMIT_S = 5.0
Serve = Callable[..., Any]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serves a handler and makes a client of it."""
    runtimes: list[DistributedRuntime] = []
    serving = []

    async def serving_one(handler: Any, **settings: Any) -> Client:
        runtimes.append(make_runtime(**settings))
        endpoint = runtimes[-1].endpoint(PATH)
        serving.append(endpoint.serve_endpoint(handler))
        client = await endpoint.client()
        await client.wait_for_instances(timeout=LIMIT_S)
        return client

    yield serving_one
    for runtime in runtimes:
        await shut_down(runtime)
    for one in serving:
        await within(one)


async def read(stream: Any) -> list[Any]:
    async def reading() -> list[Any]:
        return [item async for item in stream]

    return await within(reading())


async def called(client: Client, request: Any = None) -> list[Any]:
    return await read(await client.random(request, annotated=False))


async def test_handlers_that_wait_for_each_other_block_nobody(serve: Serve):
    """Each is in a thread of its own: in one thread none would ever end."""
    together = threading.Barrier(5)

    def handler(request: Any) -> Iterator[Any]:
        together.wait(LIMIT_S)
        yield request

    client = await serve(handler)
    calls = [called(client, number) for number in range(5)]
    assert await within(asyncio.gather(*calls)) == [[number] for number in range(5)]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("mine"), "InvalidRequest: ValueError: mine"),
        (KeyError("mine"), "Internal: KeyError: 'mine'"),
        (TimeoutError("mine"), "DeadlineExceeded: TimeoutError: mine"),
        (ConnectionError("mine"), "Unavailable: ConnectionError: mine"),
        (asyncio.CancelledError("mine"), "Cancelled: CancelledError: mine"),
        (
            StopAsyncIteration(),
            "Internal: RuntimeError: generator raised StopAsyncIteration",
        ),
        (StopIteration(), "Internal: RuntimeError: generator raised StopIteration"),
    ],
)
async def test_errors_are_those_of_asynchronous_handlers(
    serve: Serve, error: BaseException, text: str
):
    def handler(request: Any) -> Iterator[Any]:
        yield "before"
        raise error

    client = await serve(handler)
    stream = await client.random(None, annotated=False)
    assert await within(anext(stream)) == "before"
    with pytest.raises(RemoteError) as caught:
        await within(anext(stream))
    assert str(caught.value) == text


async def test_a_bad_argument_stays_one(serve: Serve):
    def handler(request: Any) -> Iterator[Any]:
        raise InvalidArgument("mine")
        yield

    client = await serve(handler)
    with pytest.raises(InvalidArgument, match="mine"):
        await called(client)


async def test_a_signature_that_promises_too_much_is_an_error_and_no_silence(
    serve: Serve,
):
    def promising(request: Any, context: Context) -> Iterator[Any]:
        yield request

    @functools.wraps(promising)
    def handler(request: Any) -> Iterator[Any]:
        yield request

    client = await serve(handler)
    with pytest.raises(CallError, match="unexpected keyword argument 'context'"):
        await called(client)


@pytest.mark.parametrize("aware", [True, False])
async def test_a_stop_lets_the_step_in_progress_end_and_then_cleans_up_in_its_thread(
    serve: Serve, aware: bool
):
    release = threading.Event()
    events: list[tuple[str, threading.Thread]] = []

    def note(event: str) -> None:
        events.append((event, threading.current_thread()))

    def handler(request: Any, context: Context) -> Iterator[Any]:
        try:
            note("begun")
            yield 1
            release.wait(LIMIT_S)
            note("step")
            if aware and context.is_stopped():
                return
            yield 2
        finally:
            note("finally")

    client = await serve(handler)
    context = Context()
    stream = await client.random(None, annotated=False, context=context)
    assert await within(anext(stream)) == 1
    context.stop_generating()
    assert await read(stream) == []
    assert [event for event, _ in events] == ["begun"]
    release.set()
    await until(lambda: len(events) == 3)
    assert [event for event, _ in events] == ["begun", "step", "finally"]
    assert len({thread for _, thread in events}) == 1


async def test_a_step_that_does_not_end_is_reported_by_name(
    serve: Serve, caplog: pytest.LogCaptureFixture
):
    release = threading.Event()

    def stuck_handler(request: Any) -> Iterator[Any]:
        yield 1
        release.wait(LIMIT_S)

    client = await serve(stuck_handler, cancel_grace_s=0.1, close_timeout_s=0.1)
    stream = await client.random(None, annotated=False)
    assert await within(anext(stream)) == 1
    await stream.aclose()
    await until(lambda: "stuck_handler" in caplog.text)
    assert "does not end" in caplog.text
    release.set()
    await until(lambda: not handler_threads())


def handler_threads() -> list[threading.Thread]:
    every = threading.enumerate()
    return [one for one in every if one.name.startswith("dynamo-handler")]


async def test_a_caller_that_is_behind_holds_the_thread(serve: Serve):
    produced = 0

    def handler(request: Any) -> Iterator[bytes]:
        nonlocal produced
        for _ in range(800):
            produced += 1
            yield bytes(64 * 1024)

    client = await serve(handler)
    stream = await client.random(None, annotated=False)
    last, still = -1, 0
    while still < 200:
        still = still + 1 if produced == last else 0
        last = produced
        await asyncio.sleep(0.001)
    assert produced < 300
    assert len(await read(stream)) == 800
    assert not handler_threads()
