"""Processes that stand still: what the other end of a duplex connection makes of it."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from programs import (
    ENDPOINT,
    LIMIT_S,
    MakeRuntime,
    Program,
    Programs,
    eventually,
)

from dynamo.runtime import Client, Context, DistributedRuntime
from dynamo.runtime.errors import StreamBroken

PING = {
    "DYN_RUNTIME_PING_INTERVAL_SECS": "0.1",
    "DYN_RUNTIME_PING_TIMEOUT_SECS": "1",
    "DYN_RUNTIME_INHIBITED_DURATION_SECS": "0.1",
}
PATIENT = {
    "DYN_RUNTIME_PING_INTERVAL_SECS": "0.1",
    "DYN_RUNTIME_PING_TIMEOUT_SECS": "60",
}
WORKER = """
async def handle(request, context):
    yield "begun"
    await context.async_killed_or_stopped()
    say("stopped")

async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    serving = runtime.endpoint("ns.comp.gen").serve_endpoint(handle)
    say("serving")
    await serving

run(main)
"""
CLIENT = """
async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    client = await runtime.endpoint("ns.comp.gen").client()
    await client.wait_for_instances()
    try:
        async for item in await client.round_robin(None, annotated=False):
            say(item)
    except ConnectionError as error:
        say(type(error).__name__)

run(main)
"""


@pytest.fixture
def impatient(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtimes of this process expect a sign of life every second."""
    for name, value in PING.items():
        monkeypatch.setenv(name, value)


async def begun(client: Client) -> Any:
    await client.wait_for_instances(timeout=LIMIT_S)
    stream = await client.random(None, annotated=False)
    assert await asyncio.wait_for(stream.__anext__(), LIMIT_S) == "begun"
    return stream


async def stand_still(program: Program) -> None:
    program.send(signal.SIGSTOP)
    stat = f"/proc/{program.pid}/stat"
    await eventually(lambda: _state(stat) == "T")


def _state(path: str) -> str:
    with open(path) as file:
        return file.read().rpartition(")")[2].split()[0]


@pytest.mark.usefixtures("impatient")
async def test_a_silent_stream_of_a_stopped_worker_breaks_in_time(
    programs: Programs, make_runtime: MakeRuntime
) -> None:
    worker = await programs.start(WORKER, **PATIENT)
    await worker.says("serving")
    client = await make_runtime().endpoint(ENDPOINT).client()
    stream = await begun(client)
    since = time.monotonic()
    await stand_still(worker)
    with pytest.raises(StreamBroken):
        await asyncio.wait_for(stream.__anext__(), LIMIT_S)
    assert time.monotonic() - since > 0.5
    # It learns of that as soon as it runs again, and is called again.
    worker.send(signal.SIGCONT)
    await worker.says("stopped")
    (await begun(client)).cancel()
    await worker.says("stopped")


@pytest.mark.usefixtures("impatient")
async def test_a_client_that_stands_still_is_given_up_and_learns_of_it(
    programs: Programs, make_runtime: MakeRuntime
) -> None:
    ended = asyncio.Event()

    async def handle(request: Any, context: Context) -> AsyncIterator[Any]:
        yield "begun"
        await context.async_killed_or_stopped()
        ended.set()

    runtime: DistributedRuntime = make_runtime()
    serving = runtime.endpoint(ENDPOINT).serve_endpoint(handle)
    client = await programs.start(CLIENT, **PATIENT)
    await client.says("begun")
    await stand_still(client)
    await asyncio.wait_for(ended.wait(), LIMIT_S)
    client.send(signal.SIGCONT)
    await client.says("StreamBroken")
    assert await client.ended() == 0
    runtime.shutdown()
    await asyncio.wait_for(serving, LIMIT_S)


@pytest.mark.usefixtures("impatient")
async def test_who_stood_still_reads_first_and_judges_then(
    programs: Programs, make_runtime: MakeRuntime
) -> None:
    """The client was away for longer than the worker may be silent for."""
    ended = asyncio.Event()

    async def handle(request: Any, context: Context) -> AsyncIterator[Any]:
        yield "begun"
        await context.async_killed_or_stopped()
        ended.set()

    runtime: DistributedRuntime = make_runtime()
    runtime._core.config = dataclasses.replace(
        runtime._core.config, ping_interval_s=20.0, ping_timeout_s=60.0
    )
    serving = runtime.endpoint(ENDPOINT).serve_endpoint(handle)
    client = await programs.start(CLIENT, **PING)
    await client.says("begun")
    server = runtime._core._server
    assert server is not None
    (connection,) = server._duplex_connections()
    for _ in range(2):
        await stand_still(client)
        away_until = time.monotonic() + 1.5
        await eventually(lambda until=away_until: time.monotonic() > until)
        heard_at = connection._heard_at
        client.send(signal.SIGCONT)
        await eventually(lambda at=heard_at: connection._heard_at > at + 0.5)
    assert client.running
    assert not ended.is_set()
    client.kill()
    await asyncio.wait_for(ended.wait(), LIMIT_S)
    runtime.shutdown()
    await asyncio.wait_for(serving, LIMIT_S)
