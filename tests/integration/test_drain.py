"""The drain of a runtime, step by step: leave, serve stragglers, refuse, wait, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from raw_peers import make_runtime, until, within
from served import Served, served

from dynamo.runtime import Context
from dynamo.runtime._transports.tcp_server import RequestServer, _RequestConnection
from dynamo.runtime.errors import Refused, StreamBroken

pytestmark = pytest.mark.usefixtures("each_lane")

# What a drain may take beyond its budget, on a busy machine.
SLACK_S = 5.0
TRIES = 3


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
    monkeypatch.setenv("DYN_TCP_RESPONSE_STREAM_HOST", "127.0.0.1")


class Held:
    """A handler that goes on when it is told to, or when it is stopped."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.contexts: list[Context] = []

    async def handle(self, request: Any, context: Context) -> AsyncIterator[Any]:
        self.contexts.append(context)
        yield "begun"
        await self.go_on.wait()
        yield request


async def begun(pair: Served, request: Any = None) -> Any:
    stream = await pair.call(request)
    assert await within(stream.__anext__()) == "begun"
    return stream


def hears_nothing(pair: Served) -> None:
    """From now on the caller's list is that of before the shutdown."""
    pair.client._home.instances._watch.close()


async def left(pair: Served) -> None:
    """Until the worker has left discovery."""
    await until(lambda: pair.worker._core._left_at)


def refuses(pair: Served) -> bool:
    return all(life._ingress._draining for life in pair.worker._core._served)


async def test_a_caller_who_has_not_heard_of_the_shutdown_is_served() -> None:
    held = Held()
    async with served(held.handle, worker={"drain_timeout_s": 5.0}) as pair:
        hears_nothing(pair)
        first = await begun(pair, 1)
        pair.worker.shutdown()
        await left(pair)
        assert not refuses(pair)
        second = await begun(pair, 2)
        held.go_on.set()
        assert [item async for item in first] == [1]
        assert [item async for item in second] == [2]


async def test_later_calls_are_refused_and_may_be_sent_again() -> None:
    held = Held()
    async with served(held.handle, worker={"drain_timeout_s": 5.0}) as pair:
        hears_nothing(pair)
        stream = await begun(pair, 1)
        pair.worker.shutdown()
        await until(lambda: refuses(pair))
        with pytest.raises(Refused, match="is draining") as caught:
            await pair.call()
        assert caught.value.retryable
        held.go_on.set()
        assert [item async for item in stream] == [1]


async def outcome(pair: Served) -> Any:
    """The items of a call, or whether a refused one may be sent again."""
    try:
        return await pair.items(1)
    except Refused as error:
        return error.retryable


async def test_callers_who_never_hear_of_it_hold_up_no_shutdown() -> None:
    """They are served for a second at most, and then refused."""

    async def echo(request: Any) -> AsyncIterator[Any]:
        yield request

    async with served(echo, worker={"drain_timeout_s": 0.3}) as pair:
        hears_nothing(pair)
        assert await pair.items(0) == [0]
        pair.worker.shutdown()
        outcomes = []
        with contextlib.suppress(ConnectionError):
            while not pair.serving.done():
                outcomes.append(await outcome(pair))
        assert outcomes.count([1]) > 1
        assert all(one in ([1], True) for one in outcomes)
        await within(pair.serving)


@pytest.mark.parametrize("each_lane", ["callhome"], indirect=True)
async def test_who_never_hears_of_it_is_refused_until_the_budget_is_spent() -> None:
    """A closed port would leave it open whether the request has run.

    On the duplex lane the client is told that the worker goes away, and leaves first.
    """

    async def echo(request: Any) -> AsyncIterator[Any]:
        yield request

    refused_s = []
    for _ in range(TRIES):
        async with served(echo, worker={"drain_timeout_s": 0.6}) as pair:
            hears_nothing(pair)
            assert await pair.items(0) == [0]
            began = latest = time.monotonic()
            pair.worker.shutdown()
            with contextlib.suppress(ConnectionError):
                while not pair.serving.done():
                    if await outcome(pair) is True:
                        latest = time.monotonic()
            refused_s.append(latest - began)
            await within(pair.serving)
    # Served for half of the budget, and refused for the rest, unless nobody came for a
    # moment because the machine is busy.
    assert max(refused_s) > 0.5


async def test_the_budget_counts_from_the_shutdown_on() -> None:
    held = Held()
    async with served(held.handle, worker={"drain_timeout_s": 0.4}) as pair:
        stream = await begun(pair)
        began = time.monotonic()
        pair.worker.shutdown()
        with pytest.raises(StreamBroken):
            await within(stream.__anext__())
        took_s = time.monotonic() - began
        assert 0.4 <= took_s < 0.4 + SLACK_S
        await within(pair.serving)


async def test_no_budget_means_no_waiting() -> None:
    held = Held()
    async with served(held.handle, worker={"drain_timeout_s": 0.0}) as pair:
        stream = await begun(pair)
        pair.worker.shutdown()
        with pytest.raises(StreamBroken):
            await within(stream.__anext__())
        await within(pair.serving)


async def test_a_handler_learns_of_the_drain_and_is_not_stopped_by_it() -> None:
    held = Held()
    async with served(held.handle, worker={"drain_timeout_s": 5.0}) as pair:
        stream = await begun(pair, 1)
        (context,) = held.contexts
        assert not context.is_draining()
        pair.worker.shutdown()
        await until(lambda: refuses(pair))
        assert context.is_draining()
        assert context.detached("another").is_draining()
        assert not context.is_stopped()
        held.go_on.set()
        assert [item async for item in stream] == [1]
    assert not Context().is_draining()


async def test_what_does_not_end_when_stopped_is_cancelled_without_its_grace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A handler that looks at its context has seconds to end, but not in a drain."""
    ended = asyncio.Event()

    async def aware(request: Any, context: Context) -> AsyncIterator[Any]:
        yield "begun"
        try:
            await context.async_killed_or_stopped()
            await asyncio.Event().wait()
        finally:
            ended.set()

    settings = {"drain_timeout_s": 0.1, "cancel_grace_s": 60.0}
    async with served(aware, worker=settings) as pair:
        await begun(pair)
        pair.worker.shutdown()
        await within(pair.serving)
        assert ended.is_set()
    assert "did not end" not in caplog.text


@pytest.mark.parametrize("ending", [False, True], ids=["shutdown", "process ends"])
async def test_only_a_process_that_ends_does_not_wait_for_endpoints_that_ask_for_it(
    ending: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dynamo.runtime")
    held, hasty = Held(), Held()
    async with served(held.handle, worker={"drain_timeout_s": 5.0}) as pair:
        endpoint = pair.worker.endpoint("some.where.hasty")
        serving = endpoint.serve_endpoint(hasty.handle, graceful_shutdown=False)
        client = await pair.caller.endpoint("some.where.hasty").client()
        await within(client.wait_for_instances())
        patient = await begun(pair, "patient")
        stream = await within(client.random("hasty", annotated=False))
        assert await within(stream.__anext__()) == "begun"
        pair.worker._core.shutdown(ending=ending)
        await until(lambda: refuses(pair))
        assert not hasty.contexts[0].is_stopped()
        held.go_on.set()
        assert [item async for item in patient] == ["patient"]
        if ending:
            with pytest.raises(StreamBroken):
                await within(stream.__anext__())
            assert "not to be waited for: some/where/hasty" in caplog.text
        else:
            hasty.go_on.set()
            assert await within(stream.__anext__()) == "hasty"
        assert await within(serving) == ()


async def test_a_second_wish_to_end_skips_the_wait() -> None:
    held = Held()
    async with served(held.handle, worker={"drain_timeout_s": 60.0}) as pair:
        stream = await begun(pair)
        pair.worker.shutdown()
        await until(lambda: refuses(pair))
        pair.worker._core.shutdown(hurry=True)
        with pytest.raises(StreamBroken):
            await within(stream.__anext__())
        await within(pair.serving)


async def test_a_worker_sleeps_and_wakes_under_the_same_id() -> None:
    held = Held()
    async with served(held.handle) as pair:
        open_streams = [await begun(pair, number) for number in range(5)]
        endpoint = pair.worker.endpoint("some.where.gen")
        for _ in range(2):
            await endpoint.unregister_endpoint_instance()
            await until(lambda: pair.client.instance_ids() == [])
            await endpoint.register_endpoint_instance()
            await within(pair.client.wait_for_instances())
            assert pair.client.instance_ids() == [pair.instance_id]
            assert not held.contexts[0].is_draining()
            assert await begun(pair)
        held.go_on.set()
        for number, stream in enumerate(open_streams):
            assert [item async for item in stream] == [number]


async def test_a_connection_that_was_accepted_as_the_port_closed_is_cut_off() -> None:
    """Its client would wait for an answer otherwise."""
    server = RequestServer(asyncio.get_running_loop(), make_runtime()._core.config)
    server.close()
    loop = asyncio.get_running_loop()
    port = await loop.create_server(lambda: _RequestConnection(server), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*port.sockets[0].getsockname())
    with contextlib.suppress(ConnectionError):
        assert await within(reader.read(1)) == b""
    writer.close()
    port.close()


@pytest.mark.parametrize("turns", range(6))
async def test_who_connects_as_the_port_closes_is_not_left_waiting(turns: int) -> None:
    """The system has the connection, and the loop at each stage of accepting it."""
    loop = asyncio.get_running_loop()
    server = RequestServer(loop, make_runtime()._core.config)
    port = await server.start("127.0.0.1", 0)
    clients = [socket.socket() for _ in range(20)]
    for one in clients:
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            one.connect(("127.0.0.1", port))
    for _ in range(turns):
        await asyncio.sleep(0)
    await server.stop_accepting()
    server.close()
    for one in clients:
        with contextlib.suppress(ConnectionError), one:
            assert await within(loop.sock_recv(one, 1)) == b""
