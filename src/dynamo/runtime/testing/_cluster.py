"""A cluster in one event loop: runtimes, what they serve, and what befalls them.

Owns runtimes, their hosts in a network in memory and their records in a store in
memory.  Everything between is the real thing: frames, lanes, credit, drains.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from dynamo.runtime._config import from_env
from dynamo.runtime._discovery.memory import MemoryBackend, MemoryStore
from dynamo.runtime._runtime import DistributedRuntime
from dynamo.runtime._sealed import override
from dynamo.runtime._wire.records import (
    INSTANCES,
    instance_key,
    parse_endpoint_path,
)
from dynamo.runtime.errors import NoInstancesInTime, RuntimeClosed
from dynamo.runtime.testing._network import MemoryNetwork
from dynamo.runtime.testing._recording import RecordedCall, recorded
from dynamo.runtime.testing._relay import FaultProxy
from dynamo.runtime.testing._waiting import until

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from dynamo.runtime import Client, Context
    from dynamo.runtime._routing.policies import RouterMode
    from dynamo.runtime._wire.records import EndpointName

    _Named = tuple[EndpointName, Client]

Lane = Literal["duplex", "callhome"]

# A test that forgot a stream should not wait as long as a production drain.
_PATIENCE = {
    "DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "1",
    "DYN_RUNTIME_CANCEL_GRACE_SECS": "0.2",
}
_CLOSE_LIMIT_S = 10.0
_READY_LIMIT_S = 5.0


class _Records(MemoryBackend):
    """The records of one member, which may outlive it, or be lost while it lives."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self._values: dict[tuple[str, str], bytes] = {}

    @override
    async def register(self, bucket: str, key: str, value: bytes) -> None:
        self._values[bucket, key] = value
        await super().register(bucket, key, value)

    def abandon(self) -> None:
        """Leave the records behind, whatever comes."""
        self._own.clear()
        self._left = True

    def expire(self) -> None:
        """Lose the records, as with a lease that was not renewed in time."""
        self._store.delete(list(self._values))

    def renew(self) -> None:
        """Write those that are still wanted again."""
        for bucket, key in self._own:
            self._store.create(bucket, key, self._values[bucket, key])


class _Member:
    """One runtime of the cluster, where it lives, its records and what it serves."""

    def __init__(self, core: _Core, env: Mapping[str, str]) -> None:
        self.host = core.network.host()
        self.backend = _Records(core.store)
        self.gone = False
        self._store = core.store
        self._serving: list[asyncio.Future[tuple[()]]] = []
        config = dataclasses.replace(
            from_env(_PATIENCE | core.env | dict(env), "mem", "tcp"),
            rpc_host=self.host.address,
            response_host=self.host.address,
            lanes=() if core.lane == "callhome" else ("duplex",),
            network=self.host,
        )
        self.runtime = DistributedRuntime._make(
            asyncio.get_running_loop(), config, self.backend
        )

    async def serve(
        self, name: EndpointName, serving: asyncio.Future[tuple[()]]
    ) -> None:
        """Wait until an endpoint is registered, or serving it has failed."""
        self._serving.append(serving)
        await until(lambda: serving.done() or self.serves(name))
        if serving.done():
            await serving
            raise RuntimeClosed("this worker was stopped or killed: serve with another")

    def serves(self, name: EndpointName) -> bool:
        """Whether clients of the endpoint are meant to find it."""
        key = instance_key(name, self.backend.connection_id)
        return not self.gone and key in self._store.content(INSTANCES)

    async def stop(self) -> None:
        self.gone = True
        self.runtime.shutdown()
        await asyncio.wait_for(self.runtime._core.closed(), _CLOSE_LIMIT_S)

    async def kill(self) -> None:
        self.gone = True
        self.backend.abandon()
        self.host.fall()
        self.runtime._core.stop_all(killed=True)
        await self.stop()

    async def hang_up(self) -> None:
        """End the runtime of clients, with whatever streams a test left open."""
        await self.stop()
        self.host.fall()

    async def close(self) -> None:
        """End a worker."""
        self.host.thaw()
        await self.stop()
        for serving in self._serving:
            # What ended it too early is not to pass unseen.
            if not serving.cancelled():
                await serving


class _Core:
    """What a cluster and its workers share.

    Attributes:
        callers: Members made for clients; the first is shared by most of them.
        clients: Each with the name of its endpoint.
    """

    def __init__(self, lane: Lane, env: dict[str, str]) -> None:
        self.lane = lane
        self.env = env
        self.network = MemoryNetwork()
        self.store = MemoryStore()
        self.calls: list[RecordedCall] = []
        self.servers: list[_Member] = []
        self.callers: list[_Member] = []
        self.clients: list[_Named] = []
        self.proxies: list[FaultProxy] = []

    async def routed(
        self, members: list[_Member], clients: list[_Named], timeout_s: float
    ) -> None:
        """Wait until these clients can call these members."""
        missing: list[str] = []

        async def complete() -> bool:
            missing.clear()
            for name, client in clients:
                routable = await _routable(client)
                missing.extend(
                    f"{member.backend.connection_id:x} of {name}"
                    for member in members
                    if member.serves(name)
                    and member.backend.connection_id not in routable
                )
            return not missing

        try:
            await until(complete, timeout=timeout_s)
        except AssertionError:
            raise AssertionError(
                f"within {timeout_s:g} s clients could not call {', '.join(missing)}"
            ) from None

    def caller(self, runtime: DistributedRuntime | None = None) -> DistributedRuntime:
        """That runtime, or the one that clients share."""
        if runtime is not None:
            return runtime
        if not self.callers:
            self.callers.append(_Member(self, {}))
        return self.callers[0].runtime

    async def proxy(self, host: str, port: int) -> FaultProxy:
        """A proxy at which new connections to that address arrive."""
        place = self.network.host()
        proxy = FaultProxy(port, target_host=host, host=place.address, network=place)
        await proxy.start()
        self.network.detour((host, port), (proxy.host, proxy.port))
        self.proxies.append(proxy)
        return proxy

    async def aclose(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for proxy in self.proxies:
                stack.push_async_callback(proxy.aclose)
            for member in self.servers:
                stack.push_async_callback(member.close)
            for member in self.callers:
                stack.push_async_callback(member.hang_up)


async def _routable(client: Client) -> list[int]:
    try:
        return await client.wait_for_instances(timeout=0)
    except NoInstancesInTime:
        return []


class Worker:
    """One runtime of a `Cluster` that serves; made by `Cluster.serve`.

    Example:
        >>> import asyncio
        >>> from dynamo.runtime.errors import Overloaded
        >>> from dynamo.runtime.testing import Cluster
        >>> async def echo(request):
        ...     yield request
        >>> async def main():
        ...     async with Cluster() as cluster:
        ...         worker = await cluster.serve("demo.echo.echo", echo)
        ...         client = await cluster.client("demo.echo.echo")
        ...         with worker.overloaded():
        ...             try:
        ...                 await client.random("hello")
        ...             except Overloaded as error:
        ...                 print(error.retryable)
        >>> asyncio.run(main())
        True
    """

    def __init__(self, core: _Core, member: _Member) -> None:
        self._core = core
        self._state = member

    @property
    def runtime(self) -> DistributedRuntime:
        """Its runtime."""
        return self._state.runtime

    @property
    def instance_id(self) -> int:
        """The id under which all its endpoints are found."""
        return self._state.backend.connection_id

    @property
    def calls(self) -> list[RecordedCall]:
        """The calls that its handlers got, in order."""
        own = self.instance_id
        return [call for call in self._core.calls if call.instance_id == own]

    @property
    def in_flight(self) -> int:
        """Requests that it has taken and not ended."""
        return self.runtime._core.in_flight

    async def stop(self) -> None:
        """Shut it down in order: leave discovery, drain, close.

        Raises:
            asyncio.TimeoutError: that took longer than 10 s.
        """
        await self._state.stop()

    async def kill(self) -> None:
        """End it as ``kill -9`` does: connections are reset, its records stay.

        Records of the dead expire after a while: `lose_lease` does that now.  Its
        handlers, which no dying process takes along, are cancelled, unheard.

        Raises:
            asyncio.TimeoutError: they did not end within 10 s.
        """
        await self._state.kill()

    def freeze(self) -> None:
        """Stop it as SIGSTOP does, until `thaw`: nothing comes in or goes out.

        Connections stand and new ones are made, but nobody answers; its records stay.
        Handlers share the loop with the test and so run on, unheard.
        """
        self._state.host.freeze()

    def thaw(self) -> None:
        """Let it go on after `freeze`."""
        self._state.host.thaw()

    @contextlib.contextmanager
    def overloaded(self) -> Iterator[None]:
        """For the time of a ``with`` block: every place for requests is taken.

        What runs goes on; whatever comes is refused, retryable.
        """
        admission = self.runtime._core.admission
        taken = admission.reserve_all()
        try:
            yield
        finally:
            for _ in range(taken):
                admission.release(ran=False)

    def lose_lease(self) -> None:
        """Let its records expire while it lives: clients stop coming, calls go on."""
        self._state.backend.expire()

    async def renew_lease(self) -> None:
        """Register again after `lose_lease`; returns when every client knows.

        Raises:
            AssertionError: a client did not know within 5 s.
        """
        self._state.backend.renew()
        await self._core.routed([self._state], self._core.clients, _READY_LIMIT_S)

    async def fault_proxy(self) -> FaultProxy:
        """Put a proxy between all clients and this worker; before their first call.

        Connections that are open already go around it.

        Returns:
            The running proxy; it ends with the cluster.
        """
        _, host, port = await self.runtime._core.request_server()
        return await self._core.proxy(host, port)


class Cluster:
    """Workers and clients of one event loop, without ports or files.

    Every worker is a runtime of its own, with a host of its own in a network in memory.
    Frames, flow control, time limits, drains and discovery are those of production.  To
    be used in ``async with``, which shuts everything down.

    Args:
        lane: The protocol in between: ``"duplex"``, that of our own processes, or
            ``"callhome"``, that with genuine peers.
        env: Settings of every runtime in it, under the names of their environment
            variables; the real environment plays no part.  If they do not say otherwise
            a drain takes at most 1 s, and a handler has 0.2 s to end by itself after a
            stop.  Discovery, lane and addresses are the cluster's own in any case.

    Attributes:
        calls: What handlers got, in order; see `RecordedCall`.

    Raises:
        ValueError: a lane that does not exist.

    Example:
        >>> import asyncio
        >>> from dynamo.runtime.testing import Cluster
        >>> async def double(request):
        ...     yield 2 * request
        >>> async def main():
        ...     async with Cluster() as cluster:
        ...         await cluster.serve("demo.math.double", double)
        ...         client = await cluster.client("demo.math.double")
        ...         stream = await client.random(21, annotated=False)
        ...         print([item async for item in stream])
        ...         print(cluster.calls[0].request, cluster.calls[0].outcome)
        >>> asyncio.run(main())
        [42]
        21 completed
    """

    def __init__(
        self, *, lane: Lane = "duplex", env: Mapping[str, str] | None = None
    ) -> None:
        if lane not in ("duplex", "callhome"):
            raise ValueError(f"lane={lane!r}: expected 'duplex' or 'callhome'")
        self._core = _Core(lane, dict(env or {}))
        self.calls = self._core.calls

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Shut all runtimes down, those of clients first; open streams are cut off.

        Raises:
            DynamoException: the one with which a serving had ended too early.
            asyncio.TimeoutError: a runtime did not end within 10 s.
        """
        await self._core.aclose()

    def runtime(self, *, env: Mapping[str, str] | None = None) -> DistributedRuntime:
        """Make a further runtime in the cluster, for whatever a test does with it.

        Args:
            env: Settings of its own, added to those of the cluster.

        Returns:
            The runtime; it ends with the cluster.

        Raises:
            ValueError: a setting that cannot be used.
        """
        member = _Member(self._core, env or {})
        self._core.caller()
        self._core.callers.append(member)
        return member.runtime

    async def serve(
        self,
        endpoint: str,
        handler: Any,
        *,
        worker: Worker | None = None,
        bidirectional: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> Worker:
        """Serve a handler; returns when every client of the endpoint can call it.

        Args:
            endpoint: ``"namespace.component.endpoint"``.
            handler: What ``serve_endpoint`` takes, or ``serve_bidirectional_endpoint``.
            worker: A worker that is to serve it besides; None makes a new one.
            bidirectional: Whether the handler takes a stream of requests.
            env: Settings of the new worker, added to those of the cluster.

        Returns:
            The worker.

        Raises:
            ValueError: the name of an endpoint, or a setting, that is none.
            RuntimeClosed: ``worker`` was stopped or killed.
            AssertionError: it was not registered, or a client could not call it, within
                5 s.
        """
        name = parse_endpoint_path(endpoint)
        if worker is None:
            worker = Worker(self._core, _Member(self._core, env or {}))
            self._core.servers.append(worker._state)
        noted = self._noted(endpoint, worker.instance_id, handler, bidirectional)
        place = worker.runtime.endpoint(endpoint)
        if bidirectional:
            serving = place.serve_bidirectional_endpoint(noted)
        else:
            serving = place.serve_endpoint(noted)
        await worker._state.serve(name, serving)
        await self._core.routed([worker._state], self._core.clients, _READY_LIMIT_S)
        return worker

    def _noted(
        self, endpoint: str, instance_id: int, handler: Any, streamed: bool
    ) -> Any:
        def note(request: object, context: Context) -> RecordedCall:
            call = RecordedCall(endpoint, instance_id, request, context)
            self.calls.append(call)
            return call

        return recorded(handler, streamed=streamed, note=note)

    async def client(
        self,
        endpoint: str,
        router_mode: RouterMode | None = None,
        *,
        runtime: DistributedRuntime | None = None,
    ) -> Client:
        """Make a client that can call every worker of an endpoint at once.

        Args:
            endpoint: ``"namespace.component.endpoint"``.
            router_mode: How ``generate`` chooses; None is round robin.
            runtime: From `runtime`; None takes one that all such clients share.

        Returns:
            The client.  There need not be a worker yet.

        Raises:
            ValueError: the name of an endpoint, or a setting, that is none.
            AssertionError: it could not call one of the workers within 5 s.
        """
        place = self._core.caller(runtime).endpoint(endpoint)
        named = (parse_endpoint_path(endpoint), await place.client(router_mode))
        self._core.clients.append(named)
        await self._core.routed(self._core.servers, [named], _READY_LIMIT_S)
        return named[1]

    async def ready(self, *, timeout: float = _READY_LIMIT_S) -> None:
        """Wait until every client can call every worker of its endpoint.

        `serve`, `client` and `Worker.renew_lease` have done it for theirs already.

        Args:
            timeout: How many seconds it may take at most.

        Raises:
            AssertionError: a client does not find a worker, or avoids it.
        """
        await self._core.routed(self._core.servers, self._core.clients, timeout)

    async def answer_proxy(
        self, runtime: DistributedRuntime | None = None
    ) -> FaultProxy:
        """Put a proxy before the port to which answers come on the lane ``"callhome"``.

        Args:
            runtime: Whose answers; None is the runtime that clients share.

        Returns:
            The running proxy; it ends with the cluster.
        """
        listener = self._core.caller(runtime)._core.lane.callhome.listener
        await listener.start()
        host, _, port = listener.address.rpartition(":")
        return await self._core.proxy(host, int(port))
