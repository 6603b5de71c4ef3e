"""One port for both lanes: a genuine client and one of ours call a worker of ours at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from programs import ENDPOINT, LIMIT_S, MakeRuntime, Programs

from dynamo.runtime._transports.duplex_worker import DuplexWorkerConnection

pytestmark = [pytest.mark.interop, pytest.mark.slow]

CALLS, AT_ONCE = 300, 20
CLIENT = """
async def main():
    name, calls, at_once = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    client = await runtime.endpoint("ns.comp.gen").client()
    await client.wait_for_instances()
    say("ready")
    await line()

    async def call(number):
        stream = await client.round_robin([name, number], annotated=False)
        items = [item async for item in stream]
        assert items == [[name, number, step] for step in range(5)], items

    for first in range(0, calls, at_once):
        await asyncio.gather(*map(call, range(first, first + at_once)))
        say("round")
    say("over")

run(main)
"""


async def test_both_kinds_of_clients_are_answered_on_one_port_at_once(
    programs: Programs, make_runtime: MakeRuntime, genuine_python: str
) -> None:
    called: Counter[str] = Counter()

    async def handle(request: Any) -> AsyncIterator[Any]:
        called[request[0]] += 1
        for step in range(5):
            yield [*request, step]
            await asyncio.sleep(0)

    runtime = make_runtime()
    serving = runtime.endpoint(ENDPOINT).serve_endpoint(handle)
    words = (str(CALLS), str(AT_ONCE))
    ours = await programs.start(CLIENT, "ours", *words)
    genuine = await programs.start_genuine(genuine_python, CLIENT, "genuine", *words)
    for client in (ours, genuine):
        await client.says("ready")
    for client in (ours, genuine):
        client.write_line("go")
    await ours.says("round")
    await genuine.says("round")
    server = runtime._core._server
    assert server is not None
    kinds = Counter(
        isinstance(one, DuplexWorkerConnection)
        for one in server._connections
        if one.is_open
    )
    # One of ours, and the genuine client's pool.
    assert kinds[True] == 1
    assert kinds[False] >= 1
    for client in (ours, genuine):
        while (line := await client.line()) == "round":
            pass
        assert line == "over", client.stderr
    assert called == {"ours": CALLS, "genuine": CALLS}
    runtime.shutdown()
    await asyncio.wait_for(serving, LIMIT_S)
