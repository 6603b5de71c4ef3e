"""Our waits by runtime data on cards that a genuine worker registers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynamo.runtime import Client, DistributedRuntime
from dynamo.runtime.errors import NoMatchInTime

pytestmark = [pytest.mark.interop, pytest.mark.slow]

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

WORKER = """
import asyncio, json, sys
from dynamo.llm import (
    ModelInput, ModelRuntimeConfig, ModelType, register_model, unregister_model,
    update_model_taints,
)
from dynamo._core import WorkerType
from dynamo.runtime import DistributedRuntime

async def echo(request):
    yield request

async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("ns.comp.gen")
    serving = asyncio.ensure_future(endpoint.serve_endpoint(echo))
    print(endpoint.connection_id(), flush=True)
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        if line == "register":
            config = ModelRuntimeConfig()
            config.set_engine_specific("role", json.dumps("prefill"))
            config.set_engine_specific("n", "3")
            await register_model(
                ModelInput.Tokens, ModelType.Chat, endpoint, "my/model", "served",
                worker_type=WorkerType.Aggregated, runtime_config=config,
                skip_model_assets=True,
            )
        elif line == "taint":
            await update_model_taints(endpoint, {"t1"})
        else:
            await unregister_model(endpoint)
        print(line, flush=True)
    runtime.shutdown()
    await serving

asyncio.run(main())
"""


class Worker:
    """A genuine worker that does what it is told."""

    def __init__(self, python: str, root: Path) -> None:
        self.process = subprocess.Popen(
            [python, "-c", WORKER],
            env=os.environ | LOOPBACK | {"DYN_FILE_KV": str(root)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def line(self) -> str:
        assert self.process.stdout is not None
        reading = asyncio.to_thread(self.process.stdout.readline)
        return (await asyncio.wait_for(reading, LIMIT_S)).strip()

    async def does(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        assert await self.line() == order

    def end(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        try:
            self.process.wait(LIMIT_S)
        finally:
            self.process.kill()
            self.process.wait(LIMIT_S)


@pytest.fixture
async def worker(genuine_python: str, tmp_path: Path) -> AsyncIterator[Worker]:
    made = await asyncio.to_thread(Worker, genuine_python, tmp_path)
    yield made
    await asyncio.to_thread(made.end)


@pytest.fixture
async def client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Client]:
    for name, host in LOOPBACK.items():
        monkeypatch.setenv(name, host)
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    yield await runtime.endpoint("ns.comp.gen").client()
    runtime.shutdown()
    await runtime._core.closed()


async def test_the_card_of_a_genuine_worker_is_found_until_it_is_unregistered(
    worker: Worker, client: Client
) -> None:
    number = int(await worker.line())
    waiting = client.wait_for_instance_by_runtime_data("role", "prefill", LIMIT_S)
    await worker.does("register")
    assert await waiting == number

    with pytest.raises(NoMatchInTime, match="last_match_count=0"):
        await client.wait_for_instance_by_runtime_data("n", json.dumps(3), 0)
    await worker.does("taint")
    many = client.wait_for_instances_by_runtime_data("role", "prefill", 1, 0)
    assert await many == [number]

    await worker.does("unregister")
    with pytest.raises(NoMatchInTime, match="last_match_count=0"):
        await client.wait_for_instance_by_runtime_data("role", "prefill", 0)
