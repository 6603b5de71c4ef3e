"""A worker runtime and a client runtime of one process, with a proxy each way between.

The client finds the worker behind ``link.requests`` and announces an address behind
``link.answers``, so that a test can disturb either connection of a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from dynamo.runtime import Client, DistributedRuntime
from dynamo.runtime._wire.records import (
    INSTANCES,
    EndpointName,
    EndpointRecord,
    encode_record,
    tcp_address,
)
from dynamo.runtime.testing import FaultProxy, until

NAME = EndpointName("t", "w", "e")
PATH = "t.w.e"


class Link:
    """What `linked` hands out.

    Attributes:
        worker: Its runtime.
        caller: The client's runtime.
        client: A client of the one endpoint.
        lanes: What the worker advertises beyond the genuine lane.
        requests: The proxy on the way to the worker's port.
        answers: The proxy on the way to the client's response listener.
    """

    worker: DistributedRuntime
    caller: DistributedRuntime
    client: Client
    requests: FaultProxy
    answers: FaultProxy
    serving: asyncio.Future[tuple[()]]
    lanes: tuple[str, ...] = ()

    @property
    def record(self) -> EndpointRecord:
        """The worker as the client finds it."""
        core = self.worker._core
        instance_id = core.backend.connection_id
        path = f"{instance_id:x}/t/w/e"
        return EndpointRecord(
            name=NAME,
            instance_id=instance_id,
            transport_kind="tcp",
            address=tcp_address("127.0.0.1", self.requests.port, path),
            device_type="cpu",
            codec="msgpack",
            lanes=self.lanes,
            ours=True,
        )

    async def publish(self) -> None:
        backend = self.caller._core.backend
        record = self.record
        await backend.register(INSTANCES, record.key, encode_record(record))
        # Its watchers are told in the next turn.
        await asyncio.sleep(0)

    async def call(self, request: object = None, **options: Any) -> Any:
        """Call the worker, also while the client avoids it after a fault."""
        instance_id = self.record.instance_id
        return await self.client.direct(
            request, instance_id, annotated=False, **options
        )

    @property
    def pooled(self) -> int:
        """How many request connections the client has, or is making."""
        pools = self.caller._core.lane.callhome._pools._pools.values()
        return sum(len(one._connections) + one._opening.under_way for one in pools)

    async def cut_requests(self, *, reset: bool = True) -> None:
        """Cut the pooled request connections; the client has noticed on return."""

        def all_cut() -> bool:
            # Again, for one may have been on its way.
            self.requests.break_all(reset=reset)
            return not self.pooled and not self.requests.connections

        await until(all_cut)
        loop = asyncio.get_running_loop()
        links = self.caller._core.lane.duplex._links.values()
        # The client has failed to connect, perhaps, and would not try again at once.
        await until(lambda: all(one._not_before <= loop.time() for one in links))


async def closed(runtime: DistributedRuntime) -> None:
    runtime.shutdown()
    await asyncio.wait_for(runtime._core.closed(), 5)


@contextlib.asynccontextmanager
async def linked(
    handler: Any, *, lanes: tuple[str, ...] = (), **settings: Any
) -> AsyncIterator[Link]:
    """Serve the handler, and have a client that calls it through two proxies.

    Args:
        handler: What is served.
        lanes: What the worker's record names; all on ``link.requests`` if it is one.
        settings: Members of both runtimes' `RuntimeConfig` to replace.
    """
    loop = asyncio.get_running_loop()
    link = Link()
    link.lanes = lanes
    link.worker = DistributedRuntime(loop, "mem", "tcp")
    link.caller = DistributedRuntime(loop, "mem", "tcp")
    for runtime in (link.worker, link.caller):
        core = runtime._core
        core.config = dataclasses.replace(core.config, **settings)
    link.serving = link.worker.endpoint(PATH).serve_endpoint(handler)
    _, _, worker_port = await link.worker._core.request_server()
    listener = link.caller._core.lane.callhome.listener
    await listener.start()
    answer_port = int(listener.address.rpartition(":")[2])
    async with FaultProxy(worker_port) as requests, FaultProxy(answer_port) as answers:
        link.requests, link.answers = requests, answers
        listener.address = f"127.0.0.1:{answers.port}"
        await link.publish()
        link.client = await link.caller.endpoint(PATH).client()
        await link.client.wait_for_instances(timeout=5)
        try:
            yield link
        finally:
            await closed(link.caller)
            await closed(link.worker)
            await link.serving
