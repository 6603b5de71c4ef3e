"""Several runtimes, loops and threads in one process, under load."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from programs import Programs
from raw_peers import PATH, make_runtime, shut_down, until, within
from served import served

from dynamo.runtime import DistributedRuntime
from dynamo.runtime._discovery.memory import MemoryStore
from dynamo.runtime._transports.tcp_server import SharedServers
from dynamo.runtime.errors import CannotListen

THREADS, CALLS = 4, 25


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def count(request: int) -> AsyncIterator[int]:
    for number in range(request):
        yield number


def answering(name: int) -> Any:
    async def handler(request: Any) -> AsyncIterator[Any]:
        yield name

    return handler


# ---------------------------------------------------------------------- a fixed port


async def test_runtimes_of_one_loop_answer_on_one_fixed_port() -> None:
    port = free_port()
    store = MemoryStore()
    workers = [make_runtime(store, rpc_port=port) for _ in range(3)]
    serving = [
        worker.endpoint(PATH).serve_endpoint(answering(number))
        for number, worker in enumerate(workers)
    ]
    caller = make_runtime(store)
    client = await caller.endpoint(PATH).client()
    await until(lambda: len(client.instance_ids()) == 3)
    addresses = {one.transport.address.partition("/")[0] for one in client.instances()}
    assert addresses == {f"127.0.0.1:{port}"}

    async def who(worker: DistributedRuntime) -> list[int]:
        instance_id = worker._core.backend.connection_id
        stream = await client.direct(None, instance_id, annotated=False)
        return [item async for item in stream]

    for number, worker in enumerate(workers):
        assert await within(who(worker)) == [number]
    # One leaves: the port stays for the others, until the last of them has gone.
    await shut_down(workers[0])
    await until(lambda: len(client.instance_ids()) == 2)
    assert await within(who(workers[1])) == [1]
    await shut_down(workers[1])
    assert await within(who(workers[2])) == [2]
    await shut_down(workers[2])
    await shut_down(caller)
    await within(asyncio.gather(*serving))
    assert not SharedServers._open
    again = make_runtime(store, rpc_port=port)
    await within(again._core.request_server())
    await shut_down(again)


async def test_a_fixed_port_belongs_to_one_loop_and_the_error_names_the_setting() -> (
    None
):
    """A request could not be run on another loop than the one that reads it."""
    port = free_port()
    refused: list[str] = []

    async def elsewhere() -> None:
        second = make_runtime(rpc_port=port)
        try:
            await second.endpoint(PATH).serve_endpoint(count)
        except CannotListen as error:
            refused.append(str(error))
        await shut_down(second)

    first = make_runtime(rpc_port=port)
    await within(first._core.request_server())
    await within(asyncio.to_thread(asyncio.run, elsewhere()))
    await shut_down(first)
    assert len(refused) == 1
    assert f"127.0.0.1:{port}" in refused[0]
    assert "DYN_TCP_RPC_PORT" in refused[0]


TWO_LIVES = """
async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp")
    endpoint = runtime.endpoint("a.b.c")

    async def echo(request):
        yield request

    serving = endpoint.serve_endpoint(echo)
    client = await endpoint.client()
    await client.wait_for_instances()
    async for item in await client.random("served", annotated=False):
        say(item)

for _ in range(3):
    # Closed without a shutdown, without a last turn of the loop.
    factory = asyncio.new_event_loop
    if "uvloop" in sys.argv:
        import uvloop
        factory = uvloop.new_event_loop
    loop = factory()
    loop.run_until_complete(main())
    loop.close()
say("over")
"""


async def test_a_fixed_port_is_free_again_when_its_loop_was_closed(
    programs: Programs,
) -> None:
    program = await programs.start(TWO_LIVES, DYN_TCP_RPC_PORT=str(free_port()))
    for _ in range(3):
        await program.says("served")
    await program.says("over")


# ---------------------------------------------------------------- other loops, threads


@pytest.mark.slow
async def test_threads_with_loops_of_their_own_call_while_the_home_loop_is_busy(
    scale: float,
) -> None:
    calls = int(CALLS * scale)
    async with served(count) as pair:
        stop = asyncio.Event()
        home_calls = 0

        async def at_home() -> None:
            nonlocal home_calls
            while not stop.is_set():
                assert await pair.items(3) == [0, 1, 2]
                home_calls += 1

        async def call(number: int) -> None:
            stream = await pair.client.random(number % 7, annotated=False)
            assert [item async for item in stream] == [*range(number % 7)]

        async def early(number: int) -> None:
            """A few are left early: by closing, and by cancelling the reader."""
            stream = await pair.client.random(1000, annotated=False)
            assert await stream.__anext__() == 0
            if number % 2:
                await stream.aclose()
            else:
                reader = asyncio.create_task(read_all(stream))
                await asyncio.sleep(0)
                reader.cancel()
                await asyncio.wait((reader,))

        async def elsewhere() -> None:
            for number in range(calls):
                await call(number)
                if number % 5 == 0:
                    await early(number)
            await asyncio.gather(*map(call, range(calls)))

        failures: list[BaseException] = []

        def thread() -> None:
            try:
                asyncio.run(elsewhere())
            except BaseException as error:
                failures.append(error)

        homes = [asyncio.create_task(at_home()) for _ in range(10)]
        threads = [threading.Thread(target=thread) for _ in range(THREADS)]
        for one in threads:
            one.start()
        await until(lambda: not any(one.is_alive() for one in threads), 30 * scale)
        stop.set()
        await within(asyncio.gather(*homes))
        assert failures == []
        assert home_calls > 10
        await until(lambda: not pair.in_flight)
        assert pair.client._home.in_flight == {}


async def read_all(stream: Any) -> list[Any]:
    return [item async for item in stream]
