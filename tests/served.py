"""A worker runtime and a client runtime of one process, joined by a store in memory.

Everything between them is real: ports, frames, both lanes of a call.  Where a test must
disturb the connections in between, see `linked`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from raw_peers import PATH, make_runtime, shut_down, within

from dynamo.runtime import Client, DistributedRuntime
from dynamo.runtime._discovery.memory import MemoryStore


class Served:
    """What `served` hands out."""

    worker: DistributedRuntime
    caller: DistributedRuntime
    client: Client
    serving: asyncio.Future[tuple[()]]

    @property
    def instance_id(self) -> int:
        return self.worker._core.backend.connection_id

    @property
    def in_flight(self) -> int:
        """Requests that the worker has taken and not ended."""
        return sum(life.in_flight for life in self.worker._core._served)

    async def call(self, request: object = None, **options: Any) -> Any:
        """Call the worker, also while the client avoids it; items come bare."""
        options = {"annotated": False} | options
        return await within(self.client.direct(request, self.instance_id, **options))

    async def items(self, request: object = None, **options: Any) -> list[Any]:
        """All items of one call."""

        async def read() -> list[Any]:
            return [item async for item in await self.call(request, **options)]

        return await within(read())


@contextlib.asynccontextmanager
async def served(
    handler: Any,
    *,
    worker: dict[str, Any] | None = None,
    caller: dict[str, Any] | None = None,
) -> AsyncIterator[Served]:
    """Serve the handler, and have a client of it in a runtime of its own.

    Args:
        handler: What is served.
        worker: Members of the worker's `RuntimeConfig` to replace.
        caller: Members of the client's.
    """
    store = MemoryStore()
    pair = Served()
    pair.worker = make_runtime(store, **(worker or {}))
    pair.caller = make_runtime(store, **(caller or {}))
    pair.serving = pair.worker.endpoint(PATH).serve_endpoint(handler)
    try:
        pair.client = await pair.caller.endpoint(PATH).client()
        await within(pair.client.wait_for_instances())
        yield pair
    finally:
        await shut_down(pair.caller)
        await shut_down(pair.worker)
        await within(pair.serving)
