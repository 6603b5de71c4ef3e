"""What went wrong in other discovery layers, tried on ours with files.

The rows are those of the family DI that concern a store without a server.  Elsewhere:
many records at the start (DI-05), watches that leave descriptors (DI-19), a loop that is
held up (DI-20), bad files (DI-25) in ``test_file_discovery`` and ``test_inotify``; clocks
that are wrong or step (DI-26) in ``test_directory``; waits in vain (DI-11) in
``test_model_cards_in_files``.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo.runtime import Client, DistributedRuntime
from dynamo.runtime._discovery.file import FileBackend
from dynamo.runtime._discovery.instances import InstanceSet
from dynamo.runtime._wire.records import (
    INSTANCES,
    EndpointName,
    EndpointRecord,
    encode_record,
    file_name_of_key,
    instance_key,
)

NAME = EndpointName("ns", "comp", "gen")
LIMIT_S = 8.0


async def eventually(check: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not check():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        await asyncio.sleep(0.002)


def record(number: int, address: str = "127.0.0.1:1/x") -> EndpointRecord:
    return EndpointRecord(
        name=NAME, instance_id=number, transport_kind="tcp", address=address
    )


class Folder:
    """The bucket directory, as somebody else writes it."""

    def __init__(self, root: Path) -> None:
        self.path = root / "v1" / "instances"
        self.path.mkdir(parents=True, exist_ok=True)
        self._staged = root / "staged"

    def put(self, one: EndpointRecord) -> None:
        self._staged.write_bytes(encode_record(one))
        self._staged.rename(self.path / file_name_of_key(one.key))

    def delete(self, number: int) -> None:
        (self.path / file_name_of_key(instance_key(NAME, number))).unlink()


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[FileBackend]:
    made = FileBackend(tmp_path)
    yield made
    await made.aclose()


@pytest.fixture
async def runtimes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[[], DistributedRuntime]]:
    """Makes runtimes that share a store, each with a worker's port of its own."""
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
    monkeypatch.setenv("DYN_TCP_RESPONSE_STREAM_HOST", "127.0.0.1")
    made: list[DistributedRuntime] = []

    def make() -> DistributedRuntime:
        made.append(DistributedRuntime(asyncio.get_running_loop(), "file", "tcp"))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()
        await one._core.closed()


def saying(word: str) -> Any:
    async def handler(request: object) -> AsyncIterator[str]:
        yield word

    return handler


async def answer(client: Client, instance_id: int) -> list[str]:
    stream = await client.direct(None, instance_id, annotated=False)
    return [item async for item in stream]


async def test_a_worker_back_under_its_id_at_another_place_gets_the_next_call(
    runtimes: Callable[[], DistributedRuntime], folder: Folder
) -> None:
    """DI-06: a watcher compares keys, not values."""
    client = await runtimes().endpoint("ns.comp.gen").client()
    old = runtimes().endpoint("ns.comp.gen")
    new = runtimes().endpoint("ns.comp.other")
    serving = [
        old.serve_endpoint(saying("old")),
        new.serve_endpoint(saying("new")),
    ]
    others = await new.client()
    await asyncio.wait_for(others.wait_for_instances(), LIMIT_S)
    await asyncio.wait_for(client.wait_for_instances(), LIMIT_S)
    number = old.connection_id()
    assert await answer(client, number) == ["old"]

    (moved_to,) = others.instances()
    address = moved_to.transport.address
    folder.put(record(number, address))
    await eventually(lambda: client.instances()[0].transport.address == address)
    assert client.instance_ids() == [number]
    assert await answer(client, number) == ["new"]
    assert not any(one.done() for one in serving)


async def test_a_worker_that_comes_and_goes_is_listed_as_it_is_in_the_end(
    backend: FileBackend, folder: Folder, scale: float
) -> None:
    """DI-10: a removed worker re-appears."""
    view = await InstanceSet.open(backend, NAME)
    for number in range(int(1000 * scale)):
        other = await InstanceSet.open(backend, NAME)
        folder.put(record(7, f"127.0.0.1:{number + 1}/x"))
        if number % 3:
            await asyncio.sleep(0)
        folder.delete(7)
        del other
    folder.put(record(8))
    await eventually(lambda: [one.instance_id for one in view.records] == [8])
    folder.put(record(7, "127.0.0.1:9/last"))
    await eventually(lambda: view.get(7) == record(7, "127.0.0.1:9/last"))
    watched = backend._buckets[INSTANCES]
    await eventually(lambda: watched.watched and len(watched.watches) == 1)


async def test_the_list_is_whole_at_any_moment(
    runtimes: Callable[[], DistributedRuntime], folder: Folder
) -> None:
    """DI-12: the list is read in the middle of an update."""
    client = await runtimes().endpoint("ns.comp.gen").client()
    over = threading.Event()
    rounds = 10  # the reader and the writer take the interpreter from each other

    def churn() -> None:
        for round_ in range(rounds):
            for number in range(20):
                folder.put(record(number, f"127.0.0.1:{round_ + 1}/x"))
            for number in range(0, 20, 2):
                folder.delete(number)
        over.set()

    churning = asyncio.get_running_loop().run_in_executor(None, churn)
    lengths = set()
    while not over.is_set():
        ids = client.instance_ids()
        assert ids == [one.instance_id for one in client.instances()]
        assert ids == sorted(set(ids))
        assert set(ids) <= set(range(20))
        lengths.add(len(ids))
        await asyncio.sleep(0)
    await churning
    assert len(lengths) > 1, "the list did change meanwhile"
    await eventually(lambda: client.instance_ids() == list(range(1, 20, 2)))
    ends = {one.transport.address for one in client.instances()}
    assert ends == {f"127.0.0.1:{rounds}/x"}


ALONE = """
import asyncio, sys
from dynamo.runtime import DistributedRuntime

connected = []

def note(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo"):
        connected.append(args[0] if event == "socket.getaddrinfo" else args[1][0])

sys.addaudithook(note)

async def echo(request):
    yield request

async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("ns.comp.gen")
    serving = endpoint.serve_endpoint(echo)
    client = await endpoint.client()
    await client.wait_for_instances(timeout=5)
    print([item async for item in await client.random("hi", annotated=False)])
    runtime.shutdown()
    await serving

asyncio.run(main())
print(sorted(set(connected)))
"""


async def test_with_files_nothing_but_the_own_machine_is_asked(tmp_path: Path) -> None:
    """DI-24: a service that is not used is required."""
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ALONE),
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "DYN_FILE_KV": str(tmp_path),
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
            # Else nobody would be asked at all.
            "DYN_RUNTIME_LANES": "duplex",
        },
    )
    out, _ = await asyncio.wait_for(worker.communicate(), LIMIT_S)
    assert out.decode().splitlines() == ["['hi']", "['127.0.0.1']"]


HOLDS_THE_INTERPRETER = """
import asyncio, sys, time
from pathlib import Path
from dynamo.runtime._discovery.file import FileBackend

def hold(seconds):
    digits = 200_000
    number = 7 ** digits
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        # One long operation after the other, with the lock that threads share.
        number * number

async def main():
    sys.setswitchinterval(1000)
    backend = FileBackend(Path(sys.argv[1]), ttl_s=0.9)
    await backend.register("v1/instances", "ns/comp/gen/7", sys.argv[2].encode())
    print("ready", flush=True)
    sys.stdin.readline()
    hold(2.5)
    print("released", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await backend.aclose()

asyncio.run(main())
"""


async def test_code_that_holds_the_interpreter_loses_the_record_for_its_time_only(
    backend: FileBackend, tmp_path: Path
) -> None:
    """DI-21: the renewing thread cannot run either; the record is put back after."""
    worker = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", HOLDS_THE_INTERPRETER, str(tmp_path)),
        encode_record(record(7)).decode(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    impatient = FileBackend(tmp_path, ttl_s=0.9)
    try:
        await asyncio.wait_for(worker.stdout.readline(), LIMIT_S)
        view = await InstanceSet.open(impatient, NAME)
        assert view.get(7) == record(7)
        worker.stdin.write(b"hold\n")
        await eventually(lambda: not view.records)
        released = await asyncio.wait_for(worker.stdout.readline(), LIMIT_S)
        assert released == b"released\n"
        await eventually(lambda: view.get(7) == record(7), limit_s=1.0)
    finally:
        await impatient.aclose()
        worker.stdin.close()
        await asyncio.wait_for(worker.wait(), LIMIT_S)
