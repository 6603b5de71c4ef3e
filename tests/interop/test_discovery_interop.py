"""Genuine processes and our file backend on one directory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from dynamo.runtime._discovery.file import FileBackend
from dynamo.runtime._discovery.instances import Instance, InstanceSet
from dynamo.runtime._wire.records import (
    INSTANCES,
    EndpointName,
    EndpointRecord,
    encode_record,
)

GENUINE = os.environ.get("DYN_GENUINE_PYTHON", "")
pytestmark = [
    pytest.mark.interop,
    pytest.mark.slow,
    pytest.mark.skipif(not GENUINE, reason="DYN_GENUINE_PYTHON names no interpreter"),
]

NAME = EndpointName("ns", "comp", "gen")
LIMIT_S = 30.0
LOOPBACK = dict.fromkeys(
    (
        "DYN_TCP_RPC_HOST",
        "DYN_TCP_RESPONSE_STREAM_HOST",
        "DYN_SYSTEM_HOST",
        "DYN_EVENT_PLANE_HOST",
    ),
    "127.0.0.1",
)

COMMON = """
import asyncio, sys
from dynamo.runtime import DistributedRuntime

async def echo(request):
    yield request

async def line():
    return (await asyncio.to_thread(sys.stdin.readline)).strip()
"""
WORKER = """
async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("ns.comp.gen")
    serving = asyncio.ensure_future(endpoint.serve_endpoint(echo))
    print(endpoint.connection_id(), flush=True)
    await line()
    runtime.shutdown()
    await serving

asyncio.run(main())
"""
CLIENT = """
async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    client = await runtime.endpoint("ns.comp.gen").client()
    print("ready", flush=True)
    last = []
    while True:
        now = sorted(client.instance_ids())
        if now != last:
            print(*now, flush=True)
            last = now
        await asyncio.sleep(0.005)

asyncio.run(main())
"""


class Genuine:
    """A genuine process that talks in lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def read(self, limit_s: float = LIMIT_S) -> str:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), limit_s)
        return line.decode().strip()

    def write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())


StartGenuine = Callable[[str], "asyncio.Future[Genuine]"]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[StartGenuine]:
    started: list[Genuine] = []
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    async def launch(script: str) -> Genuine:
        process = await asyncio.create_subprocess_exec(
            *(GENUINE, "-c", COMMON + script),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=tmp_path,
            env={
                **inherited,
                **LOOPBACK,
                "DYN_FILE_KV": str(tmp_path),
                "DYN_LOG": "error",
            },
        )
        started.append(Genuine(process))
        return started[-1]

    yield launch  # type: ignore[misc]
    for one in started:
        if one.process.returncode is None:
            one.process.kill()
        await one.process.communicate()


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[FileBackend]:
    made = FileBackend(tmp_path)
    yield made
    await made.aclose()


async def eventually(check: Callable[[], object], limit_s: float) -> float:
    started = time.monotonic()
    while not check():
        assert time.monotonic() < started + limit_s, f"not within {limit_s} s"
        await asyncio.sleep(0.005)
    return time.monotonic() - started


async def test_a_genuine_worker_is_seen_and_gone_after_its_shutdown(
    start: StartGenuine, backend: FileBackend
) -> None:
    view = await InstanceSet.open(backend, NAME)
    worker = await start(WORKER)
    instance_id = int(await worker.read())
    await eventually(lambda: view.get(instance_id), LIMIT_S)
    shown = Instance._make(view.records[0])
    assert str(shown) == f"ns/comp/gen/{instance_id}"
    assert shown.transport.kind == "tcp"
    assert shown.transport.address.endswith(f"/{instance_id:x}/ns/comp/gen")
    assert view.records[0].codec == "msgpack"
    assert not view.records[0].ours
    worker.write("shut down")
    await eventually(lambda: view.records == (), LIMIT_S)


async def test_our_record_is_seen_by_a_genuine_client_as_long_as_it_lasts(
    start: StartGenuine, backend: FileBackend
) -> None:
    client = await start(CLIENT)
    assert await client.read() == "ready"
    record = EndpointRecord(
        name=NAME,
        instance_id=backend.connection_id,
        transport_kind="tcp",
        address=f"127.0.0.1:1/{backend.connection_id:x}/ns/comp/gen",
        lanes=("duplex",),
        ours=True,
    )
    await backend.register(INSTANCES, record.key, encode_record(record))
    assert await client.read() == str(backend.connection_id)
    # The genuine sweeper would have removed it without our renewals: 10 s and a third.
    with pytest.raises(asyncio.TimeoutError):
        await client.read(limit_s=14)
    await backend.unregister(INSTANCES, record.key)
    assert await client.read() == ""


async def test_a_killed_genuine_worker_leaves_within_the_bounds(
    start: StartGenuine, backend: FileBackend
) -> None:
    view = await InstanceSet.open(backend, NAME)
    worker = await start(WORKER)
    instance_id = int(await worker.read())
    await eventually(lambda: view.get(instance_id), LIMIT_S)
    worker.process.kill()
    took_s = await eventually(lambda: view.records == (), LIMIT_S)
    assert 6 < took_s < 14


async def test_our_killed_record_leaves_a_genuine_client(
    start: StartGenuine, backend: FileBackend, tmp_path: Path
) -> None:
    client = await start(CLIENT)
    assert await client.read() == "ready"
    folder = tmp_path / "v1" / "instances"
    record = EndpointRecord(
        name=NAME, instance_id=7, transport_kind="tcp", address="127.0.0.1:1/x"
    )
    # Nobody renews what was put here by hand.
    (tmp_path / "staged").write_bytes(encode_record(record))
    (tmp_path / "staged").rename(folder / "ns%2Fcomp%2Fgen%2F7")
    assert await client.read() == "7"
    await backend.snapshot(INSTANCES, "")
    assert await client.read() == ""
    assert list(folder.iterdir()) == []


async def test_twenty_of_ours_and_genuine_ones_register_at_once(
    start: StartGenuine, backend: FileBackend, tmp_path: Path
) -> None:
    view = await InstanceSet.open(backend, NAME)
    genuine = await asyncio.gather(*(start(WORKER) for _ in range(3)))
    ours = [FileBackend(tmp_path) for _ in range(20)]

    async def register(one: FileBackend) -> None:
        record = EndpointRecord(
            name=NAME,
            instance_id=one.connection_id,
            transport_kind="tcp",
            address="127.0.0.1:1/x",
        )
        await one.register(INSTANCES, record.key, encode_record(record))

    await asyncio.gather(*(register(one) for one in ours))
    expected = {one.connection_id for one in ours}
    expected |= {int(await one.read()) for one in genuine}
    await eventually(lambda: {r.instance_id for r in view.records} == expected, LIMIT_S)
    await asyncio.gather(*(one.aclose() for one in ours))
