"""Ours and the genuine wheel: one program, whichever ``dynamo.runtime`` is imported."""

from __future__ import annotations

import asyncio
import inspect
import operator
from collections.abc import AsyncIterator
from typing import Any

import dynamo.runtime
from benchmarks.peer import channel
from benchmarks.peer.caller import METADATA, TIMEOUT_S, Caller, override
from benchmarks.peer.handlers import HANDLERS
from dynamo.runtime import Client, Context, DistributedRuntime

PREFIX = "bench.load."


def _runtime() -> DistributedRuntime:
    return DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")


async def work(address: str) -> None:
    """Serve every handler until the input ends."""
    runtime = _runtime()
    serving = [
        runtime.endpoint(PREFIX + name).serve_endpoint(handler)
        for name, handler in HANDLERS.items()
    ]
    channel.say_ready(address="", module=dynamo.runtime.__file__)
    async for _ in channel.commands():
        pass
    runtime.shutdown()
    await asyncio.gather(*serving)


class DynamoCaller(Caller):
    """One runtime with a client per handler."""

    unwrap = operator.methodcaller("data")

    def __init__(self) -> None:
        self._runtime = _runtime()
        self._clients: dict[str, Client] = {}
        # The genuine client knows no time limit for a call.
        known = inspect.signature(Client.round_robin).parameters
        self._options: dict[str, Any] = (
            {"timeout": TIMEOUT_S} if "timeout" in known else {}
        )

    @override
    async def find(self, handler: str, count: int = 1) -> None:
        client = await self._client(handler)
        while len(client.instance_ids()) < count:  # noqa: ASYNC110 - the list is live
            await asyncio.sleep(0.001)

    async def _client(self, handler: str) -> Client:
        client = await self._runtime.endpoint(PREFIX + handler).client()
        await client.wait_for_instances()
        self._clients[handler] = client
        return client

    @override
    async def open(self, handler: str, request: Any) -> AsyncIterator[Any]:
        client = self._clients.get(handler) or await self._client(handler)
        stream: AsyncIterator[Any] = await client.round_robin(
            request, context=Context(metadata=METADATA), **self._options
        )
        return stream

    @override
    async def fresh(self) -> DynamoCaller:
        return DynamoCaller()

    @override
    async def aclose(self) -> None:
        self._runtime.shutdown()


async def connect(address: str) -> DynamoCaller:
    """A caller whose worker has been found."""
    caller = DynamoCaller()
    await asyncio.gather(*(caller.find(name) for name in HANDLERS))
    return caller
