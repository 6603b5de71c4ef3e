"""Memory, tasks and watches after chains, bursts, peers that vanish, and many clients.

Rows RS-01, RS-02, RS-07, RS-09, RS-10, RS-15.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import sys

import pytest
from programs import LIMIT_S, MakeRuntime, Program, Programs, eventually
from raw_peers import PATH, RawClient, make_runtime, shut_down, until

from dynamo.runtime import Client
from dynamo.runtime._discovery.memory import MemoryStore
from dynamo.runtime._wire.records import INSTANCES, split_tcp_address

needs_proc = pytest.mark.skipif(
    sys.platform != "linux", reason="memory is read from /proc"
)
MIB = 2**20
# Pages that the allocator keeps for the next time.
ALLOWED_BYTES = 12 * MIB
BODY = bytes(MIB)

PROGRAM = """
import json

live = 0

async def echo(request):
    global live
    live += 1
    try:
        yield request
    finally:
        live -= 1

async def huge(request):
    global live
    live += 1
    try:
        for _ in range(100):
            yield bytes(request)
    finally:
        live -= 1

async def main():
    loop = asyncio.get_running_loop()
    runtimes = [DistributedRuntime(loop, "file", "tcp") for _ in range(4)]
    names = ["ns.comp.gen", "ns.comp.two", "ns.comp.three", "ns.comp.huge"]
    endpoints = [one.endpoint(name) for one, name in zip(runtimes, names)]

    async def forward(client, request):
        async for item in await client.random(request, annotated=False):
            yield item

    two = await runtimes[0].endpoint(names[1]).client()
    three = await runtimes[1].endpoint(names[2]).client()
    servings = [
        endpoints[0].serve_endpoint(lambda request: forward(two, request)),
        endpoints[1].serve_endpoint(lambda request: forward(three, request)),
        endpoints[2].serve_endpoint(echo),
        endpoints[3].serve_endpoint(huge),
    ]
    await two.wait_for_instances()
    await three.wait_for_instances()
    say("serving")
    while await line():
        say(json.dumps([live, len(asyncio.all_tasks())]))
    for runtime in runtimes:
        runtime.shutdown()
    await asyncio.gather(*servings)

run(main)
"""


class Worker:
    """The program: a chain of two proxies and a worker, and another worker."""

    def __init__(self, program: Program) -> None:
        self.program = program

    async def state(self) -> list[int]:
        """Handlers that run, and tasks."""
        self.program.write_line("state")
        found: list[int] = json.loads(await self.program.line())
        return found

    async def at_rest(self) -> tuple[int, int]:
        """Tasks and memory once no handler runs."""
        while (state := await self.state())[0]:
            await asyncio.sleep(0.01)
        return state[1], self.program.memory_bytes()

    async def has_shrunk_to(self, limit_bytes: int) -> None:
        def small() -> bool:
            nonlocal latest
            latest = self.program.memory_bytes()
            return latest <= limit_bytes

        latest = 0
        try:
            await eventually(small)
        finally:
            print(f"{latest / MIB:.0f} MB, allowed {limit_bytes / MIB:.0f} MB")


async def started(programs: Programs, **environment: str) -> Worker:
    program = await programs.start(PROGRAM, **environment)
    await program.says("serving")
    return Worker(program)


@pytest.fixture
async def worker(programs: Programs) -> Worker:
    return await started(programs)


@pytest.fixture
async def thrifty_worker(programs: Programs) -> Worker:
    """A worker whose allocator gives back at once what it is given back.

    By itself glibc keeps it for the next burst (the variable is its own), and nothing
    could be said about what the runtime keeps.
    """
    return await started(programs, MALLOC_TRIM_THRESHOLD_="131072")


async def through(client: Client, body: bytes = BODY) -> None:
    async for item in await client.random(body, annotated=False):
        assert len(item) == len(body)


# RS-01


@needs_proc
@pytest.mark.slow
async def test_large_requests_through_a_chain_leave_memory_flat(
    worker: Worker, client: Client, scale: float
) -> None:
    await client.wait_for_instances(timeout=LIMIT_S)
    for _ in range(30):
        await through(client)
    tasks, before = await worker.at_rest()
    for _ in range(int(100 * scale)):
        await asyncio.wait_for(through(client), LIMIT_S)
    tasks_after, after = await worker.at_rest()
    print(f"grown by {(after - before) / MIB:.1f} MB")
    assert after - before < ALLOWED_BYTES
    assert tasks_after <= tasks


# RS-02


@needs_proc
@pytest.mark.slow
async def test_the_memory_of_a_burst_is_given_back(
    thrifty_worker: Worker,
    make_runtime: MakeRuntime,
    monkeypatch: pytest.MonkeyPatch,
    scale: float,
) -> None:
    # A busy machine may take longer than the usual 5 s for the last of them.
    monkeypatch.setenv("DYN_TCP_REQUEST_TIMEOUT", str(LIMIT_S * scale))
    client = await make_runtime().endpoint("ns.comp.three").client()
    await client.wait_for_instances(timeout=LIMIT_S)
    for _ in range(20):
        await through(client)
    _, base = await thrifty_worker.at_rest()
    for _ in range(max(int(scale), 1)):
        await asyncio.gather(*(through(client) for _ in range(100)))
    await thrifty_worker.at_rest()
    limit = max(int(1.2 * base), base + ALLOWED_BYTES)
    await thrifty_worker.has_shrunk_to(limit)


# RS-07


@needs_proc
@pytest.mark.slow
async def test_what_peers_that_vanish_did_not_read_is_freed(
    thrifty_worker: Worker, make_runtime: MakeRuntime, scale: float
) -> None:
    endpoint = make_runtime().endpoint("ns.comp.huge")
    client = await endpoint.client()
    await client.wait_for_instances(timeout=LIMIT_S)
    (instance,) = client.instances()
    # More would need more memory than a machine may have.
    peers, item_bytes = min(int(20 * scale), 60), 6 * MIB
    _, base = await thrifty_worker.at_rest()
    address = split_tcp_address(instance.transport.address)
    with contextlib.closing(RawClient(address, 4096)) as raw:
        homes = [await raw.call(item_bytes) for _ in range(peers)]
        # Each handler has made an item, and most of it is nowhere but with the worker.
        grown = peers * item_bytes // 4
        await eventually(lambda: thrifty_worker.program.memory_bytes() > base + grown)
        for home in homes:
            home.reset()
        await thrifty_worker.at_rest()
        await thrifty_worker.has_shrunk_to(base + ALLOWED_BYTES)


# RS-09


@needs_proc
@pytest.mark.slow
async def test_calls_of_one_item_leave_nothing(
    worker: Worker, make_runtime: MakeRuntime, scale: float
) -> None:
    client = await make_runtime().endpoint("ns.comp.three").client()
    await client.wait_for_instances(timeout=LIMIT_S)
    for _ in range(1000):
        await through(client, b"small")
    tasks, before = await worker.at_rest()
    ours = len(asyncio.all_tasks())
    for _ in range(int(3000 * scale)):
        await through(client, b"small")
    tasks_after, after = await worker.at_rest()
    assert after - before < ALLOWED_BYTES / 4
    assert tasks_after <= tasks
    assert len(asyncio.all_tasks()) <= ours
    assert client._home.in_flight == {}
    lane = client._home.lane.duplex  # type: ignore[attr-defined]
    for link in lane._links.values():
        for connection in link._connections:
            assert not connection.side.streams
            assert not connection.unacknowledged


# RS-10 and RS-15


async def test_many_clients_share_one_watch_and_leave_nothing(scale: float) -> None:
    store = MemoryStore()
    runtime = make_runtime(store)
    endpoint = runtime.endpoint(PATH)
    kept = await endpoint.client()
    tasks = len(asyncio.all_tasks())
    for _ in range(int(1000 * scale)):
        clients = [await endpoint.client() for _ in range(10)]
        assert len(store._watches[INSTANCES]) == 1
        assert len(runtime._core._homes) == 1
    assert clients[0]._home is kept._home
    del clients, kept
    gc.collect()
    await until(lambda: not runtime._core._homes)
    await until(lambda: not [w for w in store._watches[INSTANCES] if not w.closed])
    assert len(asyncio.all_tasks()) <= tasks
    await shut_down(runtime)
