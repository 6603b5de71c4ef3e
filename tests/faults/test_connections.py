"""Connections that are lost, stuck, refused or odd, and streams that must not lose items.

Rows TR-05, TR-06, TR-09, TR-10, TR-12, TR-14 and TR-17.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from linked import linked
from raw_peers import PATH, make_runtime, shut_down, until, within
from served import served

from dynamo.runtime import PyAsyncRequestStream, errors
from dynamo.runtime._discovery.memory import MemoryStore
from dynamo.runtime._transports.connection import Connection
from dynamo.runtime.testing import Cut


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
    monkeypatch.setenv("DYN_TCP_RESPONSE_STREAM_HOST", "127.0.0.1")


async def echo(request: Any) -> AsyncIterator[Any]:
    yield request


async def count(request: int) -> AsyncIterator[int]:
    for number in range(request):
        yield number


# ----------------------------------------------------------------------------- TR-05


@pytest.mark.parametrize("each_lane", ["duplex", "callhome"], indirect=True)
async def test_no_socket_waits_to_fill_a_packet(
    each_lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[Any, int] = {}
    made = Connection.connection_made

    def look(self: Connection, transport: asyncio.BaseTransport) -> None:
        made(self, transport)
        sock = transport.get_extra_info("socket")
        ends = sock.getsockname(), sock.getpeername()
        options[ends] = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    monkeypatch.setattr(Connection, "connection_made", look)
    async with served(echo) as pair:
        assert await pair.items(1) == [1]
    # Dialled and accepted; the answer has a connection of its own on one lane.
    assert len(options) == (4 if each_lane == "callhome" else 2)
    assert all(options.values())


async def test_small_frames_go_back_and_forth_without_delay(scale: float) -> None:
    """A delayed acknowledgement takes 40 ms, and would show in every other turn."""
    turns = int(200 * scale)

    async def pong(stream: PyAsyncRequestStream) -> AsyncIterator[int]:
        async for number in stream:
            yield number
            yield -number

    worker = make_runtime()
    endpoint = worker.endpoint(PATH)
    serving = endpoint.serve_bidirectional_endpoint(pong)
    client = await endpoint.client()
    await within(client.wait_for_instances())
    go_on: asyncio.Queue[int | None] = asyncio.Queue()

    async def ping() -> AsyncIterator[int]:
        while (number := await go_on.get()) is not None:
            yield number

    stream = await within(client.bidirectional(ping(), annotated=False))
    took = []
    for number in range(1, turns + 1):
        started = time.monotonic()
        go_on.put_nowait(number)
        assert await within(stream.__anext__()) == number
        assert await within(stream.__anext__()) == -number
        took.append(time.monotonic() - started)
    go_on.put_nowait(None)
    assert [item async for item in stream] == []
    await shut_down(worker)
    await within(serving)
    print(f"a turn takes {statistics.median(took) * 1e3:.2f} ms")
    assert statistics.median(took) < 0.01


# ----------------------------------------------------------------------------- TR-06


async def test_a_worker_and_its_client_meet_on_ipv6(each_lane: str) -> None:
    ipv6 = {"rpc_host": "::1", "response_host": "::1"}
    async with served(echo, worker=ipv6, caller=ipv6) as pair:
        (instance,) = pair.client.instances()
        assert instance.transport.address.startswith("[::1]:")
        assert await pair.items("over IPv6") == ["over IPv6"]
        if each_lane == "callhome":
            listener = pair.caller._core.lane.callhome.listener
            assert listener.address.startswith("[::1]:")


async def test_a_worker_on_ipv6_answers_a_client_that_listens_on_ipv4() -> None:
    async with served(echo, worker={"rpc_host": "::1"}) as pair:
        assert await pair.items("mixed") == ["mixed"]


async def test_an_ipv6_address_nobody_answers_at_is_named_in_brackets() -> None:
    async with served(echo, worker={"rpc_host": "::1"}) as pair:
        server, _, port = await pair.worker._core.request_server()
        server.close()
        with pytest.raises(errors.ConnectionFailed) as caught:
            await pair.call()
        assert f"[::1]:{port}" in str(caught.value)


# ----------------------------------------------------------------------------- TR-09


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "reset"])
async def test_connections_closed_while_idle_are_replaced_without_a_failed_call(
    scale: float, reset: bool
) -> None:
    async with linked(echo) as link:
        for number in range(int(50 * scale)):
            stream = await within(link.call(number))
            assert [item async for item in stream] == [number]
            await link.cut_requests(reset=reset)
        assert link.requests.accepted == int(50 * scale)


# ----------------------------------------------------------------------------- TR-10


async def test_calls_go_on_while_instances_come_and_go(scale: float) -> None:
    """Only a worker that leaves may refuse, and then another one takes the call."""
    store = MemoryStore()
    callers = make_runtime(store)
    client = await callers.endpoint(PATH).client()
    steady = make_runtime(store)
    serving = [steady.endpoint(PATH).serve_endpoint(count)]
    await within(client.wait_for_instances())
    changes_left = int(5 * scale)

    async def calls() -> int:
        done = 0
        while changes_left or done < 3:
            stream = await client.random(5, annotated=False)
            assert [item async for item in stream] == [0, 1, 2, 3, 4]
            done += 1
        return done

    callings = [asyncio.get_running_loop().create_task(calls()) for _ in range(50)]
    while changes_left:
        passing = make_runtime(store)
        called = asyncio.Event()

        def told(request: int, called: asyncio.Event = called) -> AsyncIterator[int]:
            called.set()
            return count(request)

        serving.append(passing.endpoint(PATH).serve_endpoint(told))
        await within(called.wait())
        await shut_down(passing)
        await until(lambda: len(client.instance_ids()) == 1)
        changes_left -= 1
    assert min(await within(asyncio.gather(*callings), 10)) >= 3
    await shut_down(callers)
    await shut_down(steady)
    await within(asyncio.gather(*serving))


# ----------------------------------------------------------------------------- TR-12


async def test_a_silent_connection_is_given_up_and_not_waited_for() -> None:
    """A close would wait for a peer that takes nothing; the next call uses another."""
    async with linked(echo, request_timeout_s=0.2) as link:
        await link.call("opens the connection")
        link.requests.cut = Cut(how="silent")
        link.requests.stall()
        started = time.monotonic()
        with pytest.raises(errors.CallTimeout) as caught:
            # More than the sockets take, so that a close would have to wait.
            await link.call(bytes(24 * 1024 * 1024))
        assert caught.value.facts["limit"] == "DYN_TCP_REQUEST_TIMEOUT"
        await until(lambda: not link.pooled)
        link.requests.cut = Cut()
        link.requests.flow()
        stream = await within(link.call("another connection"))
        assert [item async for item in stream] == ["another connection"]
        assert time.monotonic() - started < 3


# ----------------------------------------------------------------------------- TR-14


async def test_an_outage_fails_calls_early_and_keeps_nothing(scale: float) -> None:
    calls = int(1000 * scale)
    async with linked(echo, request_timeout_s=5.0) as link:
        await link.call("before")
        # Nobody listens, and nothing is left of the connections.
        link.requests.refuse()
        await link.cut_requests()
        started = time.monotonic()
        failed = await asyncio.gather(
            *(link.call(number) for number in range(calls)), return_exceptions=True
        )
        assert time.monotonic() - started < 5 * max(scale, 1)
        assert {type(error) for error in failed} == {errors.ConnectionFailed}
        assert all(error.retryable for error in failed)
        assert not link.caller._core.lane.callhome.listener._waiting
        assert not link.pooled
        assert link.client._home.health.reason(link.record.instance_id)


# ----------------------------------------------------------------------------- TR-17


@pytest.mark.parametrize("pause_every", [1000, 97])
async def test_a_slow_consumer_gets_every_item(scale: float, pause_every: int) -> None:
    items = int(10_000 * scale)
    async with served(count) as pair:
        stream = await pair.call(items)
        expected = 0
        async for number in stream:
            assert number == expected
            expected += 1
            if number % pause_every == 0:
                # The producer gets ahead until it is held.
                for _ in range(20):
                    await asyncio.sleep(0)
        assert expected == items


async def test_a_consumer_that_is_cut_off_is_told_so() -> None:
    """Items that cannot be sent any more end in an error, never in a shorter stream."""

    async def endless(request: Any) -> AsyncIterator[bytes]:
        while True:
            yield bytes(1000)

    async with linked(endless) as link:
        stream = await link.call()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stream.__anext__(), 5)
        link.answers.break_all()
        with pytest.raises(errors.StreamBroken):
            async for _ in stream:
                pass
