"""Callers that read slowly or not at all: nothing is lost, nothing is kept for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from linked import Link, closed, linked

from dynamo.runtime import errors
from dynamo.runtime._transports import callhome_worker
from dynamo.runtime.testing import Cut, until

SHORT = {"drain_timeout_s": 0.1, "close_timeout_s": 0.1, "call_home_timeout_s": 0.5}
# More than the sockets of a connection hold.
BIG = b"x" * 24 * 1024 * 1024


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
    monkeypatch.setenv("DYN_TCP_RESPONSE_STREAM_HOST", "127.0.0.1")


async def one_big(request: Any) -> AsyncIterator[bytes]:
    yield BIG


def unsent_bytes(link: Link) -> int:
    """What the worker's own buffers hold; the sockets have taken the rest."""
    runs = [run for life in link.worker._core._served for run in life._ingress._runs]
    transports = [run._reply._transport for run in runs]
    return sum(one.get_write_buffer_size() for one in transports if one is not None)


def in_flight(link: Link) -> int:
    return sum(life.in_flight for life in link.worker._core._served)


async def read(stream: Any) -> list[Any]:
    return [item async for item in stream]


class Flood:
    """Yields until the sockets are full, and ends with little left to be sent."""

    def __init__(self) -> None:
        self.sent = 0
        self.ended = asyncio.Event()
        self.link: Link | None = None

    async def handle(self, request: Any) -> AsyncIterator[bytes]:
        assert self.link is not None
        while unsent_bytes(self.link) == 0:
            yield b"x" * 32 * 1024
            self.sent += 1
            await asyncio.sleep(0)
        self.ended.set()


async def test_a_shutdown_waits_until_the_socket_took_the_end_of_the_stream() -> None:
    flood = Flood()
    async with linked(flood.handle) as flood.link:
        link = flood.link
        stream = await link.call()
        link.answers.stall()
        await asyncio.wait_for(flood.ended.wait(), 5)
        link.worker.shutdown()
        await asyncio.wait((link.serving,), timeout=0.3)
        assert not link.serving.done()
        link.answers.flow()
        items = await read(stream)
        assert len(items) == flood.sent
        await asyncio.wait_for(link.serving, 5)


async def test_the_end_of_a_stream_waits_for_a_slow_reader_as_long_as_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(callhome_worker, "_CLIENT_CLOSE_TIMEOUT_S", 0.1)
    flood = Flood()
    async with linked(flood.handle) as flood.link:
        link = flood.link
        stream = await link.call()
        link.answers.stall()
        await asyncio.wait_for(flood.ended.wait(), 5)
        await asyncio.wait((link.serving,), timeout=0.5)
        link.answers.flow()
        assert len(await read(stream)) == flood.sent


async def test_a_reader_that_takes_nothing_holds_a_shutdown_up_for_a_bounded_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with linked(one_big, **SHORT) as link:
        link.answers.stall()
        call = asyncio.create_task(link.call())
        await until(lambda: in_flight(link) == 1)
        await asyncio.wait_for(closed(link.worker), 2)
        # The handler was stopped and has ended; that its caller lags is no fault of it.
        assert not [one for one in caplog.records if one.levelname == "ERROR"]
        link.answers.break_all()
        with pytest.raises(errors.CallError):
            await read(await call)


async def test_a_shutdown_leaves_no_connection_that_waits_for_its_client() -> None:
    async def quick(request: Any) -> AsyncIterator[int]:
        yield 1

    async with linked(quick, call_home_timeout_s=0.1) as link:
        # The handshake and all that follows is swallowed: nobody ever closes.
        link.answers.cut = Cut(up=0, how="silent")
        with pytest.raises(errors.CallTimeout):
            await link.call()
        assert link.answers.accepted == 1
        await closed(link.worker)
        await until(lambda: len(link.answers._sides) <= 1, timeout=3)
