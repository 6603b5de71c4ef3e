"""Endpoint: serve a name, register and unregister it, make clients for it.

Owns the public object and the life of one served endpoint.  What belongs to the whole
worker (port, discovery, admission) is handed in as `EndpointHome`.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol, final

from dynamo.runtime._calls.admission import EndpointAdmission
from dynamo.runtime._calls.first_token import FirstTokenSource
from dynamo.runtime._calls.handlers import Handler
from dynamo.runtime._calls.ingress import EndpointIngress
from dynamo.runtime._calls.worker_type import WorkerType
from dynamo.runtime._client import Client
from dynamo.runtime._observability.metrics import RuntimeMetrics
from dynamo.runtime._routing.policies import RouterMode
from dynamo.runtime._sealed import Unconstructible
from dynamo.runtime._transports.callhome_worker import CallhomeCall
from dynamo.runtime._wire.records import (
    INSTANCES,
    EndpointName,
    EndpointRecord,
    encode_record,
    endpoint_wire_path,
    instance_key,
    tcp_address,
)
from dynamo.runtime.errors import DiscoveryError, RuntimeClosed

if TYPE_CHECKING:
    from dynamo.runtime._calls.admission import Admission, Admits
    from dynamo.runtime._calls.choosing import ClientHome
    from dynamo.runtime._calls.context import Drain
    from dynamo.runtime._config import RuntimeConfig
    from dynamo.runtime._discovery import DiscoveryBackend
    from dynamo.runtime._transports import Rejection
    from dynamo.runtime._transports.direct_call import DirectCall
    from dynamo.runtime._transports.replies import Replies
    from dynamo.runtime._transports.tcp_server import RequestServer
    from dynamo.runtime._wire.callhome import RequestReceived

_log = logging.getLogger("dynamo.runtime.endpoint")

_MISSING: Any = object()


class EndpointHome(Protocol):
    """What an endpoint needs of its runtime; everything async runs on the home loop."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    @property
    def config(self) -> RuntimeConfig: ...
    @property
    def admission(self) -> Admission: ...
    @property
    def backend(self) -> DiscoveryBackend: ...
    @property
    def replies(self) -> Replies: ...
    @property
    def drain(self) -> Drain: ...
    @property
    def closing(self) -> bool: ...

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        """Run on the home loop for whatever loop is running."""

    async def request_server(self) -> tuple[RequestServer, str, int]:
        """The worker's port, opened on first use, with the address to advertise."""

    async def client_home(self, name: EndpointName) -> ClientHome:
        """What the clients of an endpoint share."""

    def on_register(self) -> None:
        """A record is about to be published: see that it will be removed."""

    def served(self, life: ServedEndpoint) -> None:
        """An endpoint is being served."""

    def unserved(self, life: ServedEndpoint) -> None:
        """It is no longer, and its last request has ended."""


class ServedEndpoint:
    """One call of ``serve_endpoint``: from registration to the last request."""

    def __init__(
        self,
        home: EndpointHome,
        name: EndpointName,
        handler: Handler,
        base: contextvars.Context,
        limits: tuple[int, int] | None,
        *,
        streamed: bool,
        graceful: bool,
    ) -> None:
        self.name = name
        self.graceful = graceful
        self._home = home
        self._path = endpoint_wire_path(name, home.backend.connection_id)
        admission: Admits = home.admission
        if limits is not None:
            admission = EndpointAdmission(*limits, home.admission, path=self._path)
        self._ingress = EndpointIngress(
            home.loop,
            self._path,
            handler,
            home.config,
            admission,
            base,
            home.drain,
            streamed=streamed,
        )
        self._server: RequestServer | None = None
        self._released: asyncio.Future[None] | None = None

    async def serve(self) -> tuple[()]:
        """Serve until the runtime is shut down, or until this is cancelled."""
        home = self._home
        if home.closing:
            return ()
        self._released = home.loop.create_future()
        home.served(self)
        try:
            await self._begin()
            await self._released
        except BaseException:
            await self._leave()
            raise
        finally:
            # A shutdown waits for the last request, also after a cancellation.
            self._ingress.when_idle().add_done_callback(lambda _: home.unserved(self))
        return ()

    async def _begin(self) -> None:
        home = self._home
        try:
            self._server, host, port = await home.request_server()
            self._server.serve(self._path, self)
            await register(home, self.name, host, port)
        except RuntimeClosed:
            # A shutdown that overtook the start ends serving like any other.
            if not home.closing:
                raise

    # `Taker`: what came over the port.

    def take_call(self, call: DirectCall) -> Rejection | None:
        call.replies = self._home.replies
        return self._ingress.offer(call)

    def take_request(self, request: RequestReceived) -> Rejection | None:
        call = CallhomeCall(
            self._home.loop,
            request,
            self._home.replies,
            self._home.config.connect_timeout_s,
            self._home.config.network,
        )
        return self._ingress.offer(call)

    async def _leave(self) -> None:
        """Cancelled or failed: leave discovery, take no more; what runs goes on."""
        self._ingress.refuse_new()
        if self._server is None:
            return
        replaced = not self._server.forget(self._path, self)
        if not replaced and not self._home.closing:
            # With a limit: the store may be what failed.
            leaving = unregister(self._home, self.name)
            try:
                await asyncio.wait_for(leaving, self._home.config.close_timeout_s)
            except (DiscoveryError, RuntimeClosed, asyncio.TimeoutError) as error:
                # Why we leave is what the caller must hear, not this.
                _log.info("no record of %s was taken back: %s", self.name, error)

    # What the runtime does at shutdown, in this order.

    def refuse_new(self) -> None:
        self._ingress.refuse_new()

    async def idle(self) -> None:
        await self._ingress.idle()

    def drives(self, task: asyncio.Task[Any]) -> bool:
        """Whether that task runs the handler; in any thread."""
        return self._ingress.drives(task)

    def stop_all(self, *, killed: bool) -> None:
        self._ingress.stop_all(killed=killed)

    def release(self) -> None:
        """Let ``serve`` return."""
        if self._server is not None:
            self._server.forget(self._path, self)
        if self._released is not None and not self._released.done():
            self._released.set_result(None)

    @property
    def in_flight(self) -> int:
        return self._ingress.in_flight

    @property
    def handler_name(self) -> str:
        return self._ingress.handler.name


async def register(
    home: EndpointHome, name: EndpointName, host: str, port: int
) -> None:
    """Publish the record of this worker for an endpoint; it may be there already."""
    instance_id = home.backend.connection_id
    record = EndpointRecord(
        name=name,
        instance_id=instance_id,
        transport_kind="tcp",
        address=tcp_address(host, port, endpoint_wire_path(name, instance_id)),
        device_type=home.config.device_type,
        codec=home.config.codec,
        lanes=home.config.advertised_lanes,
        ours=True,
    )
    home.on_register()
    await home.backend.register(INSTANCES, record.key, encode_record(record))


async def unregister(home: EndpointHome, name: EndpointName) -> None:
    """Take the record back."""
    key = instance_key(name, home.backend.connection_id)
    await home.backend.unregister(INSTANCES, key)


@final
class Endpoint(Unconstructible):
    """A named streaming endpoint; made by `DistributedRuntime.endpoint`.

    Example:
        Serve a handler and call it, in one process::

            endpoint = runtime.endpoint("demo.worker.generate")
            serving = endpoint.serve_endpoint(handler)
            client = await endpoint.client()
            await client.wait_for_instances()
    """

    __slots__ = ("_home", "_name", "_registry")

    _home: EndpointHome
    _name: EndpointName
    _registry: Any

    @classmethod
    def _of(cls, home: EndpointHome, name: EndpointName, registry: Any) -> Endpoint:
        self = cls.__new__(cls)
        self._home = home
        self._name = name
        self._registry = registry
        return self

    def serve_endpoint(
        self,
        generator: Any = _MISSING,
        graceful_shutdown: bool | None = True,
        metrics_labels: Sequence[tuple[str, str]] | None = None,
        health_check_payload: dict[str, Any] | None = None,
        *,
        handler: Any = _MISSING,
        max_concurrent_requests: int | None = None,
        max_queued_requests: int | None = None,
    ) -> asyncio.Future[tuple[()]]:
        """Serve requests with a handler until the runtime is shut down.

        Serving starts at the call; awaiting the result is optional.  Cancelling it
        leaves discovery and takes no more requests; those in flight go on.

        Args:
            generator: An async generator function, or a callable that returns an async
                iterator.  Called with the request, and with ``context=`` if it has a
                parameter of that name.  With a parameter ``response_sender`` (push
                mode) it gets both, sends its items there, and yields nothing.  A plain
                generator function may block: each of its calls runs in a thread of its
                own.
            graceful_shutdown: Whether a worker that is told to end by a signal waits
                for requests in flight.  False stops them, so that their callers can go
                on elsewhere, as soon as late callers were served and the requests of
                graceful endpoints have ended.  ``runtime.shutdown()`` waits for all, as
                in the genuine runtime.  None is True.
            metrics_labels: Pairs of text to label the endpoint's metrics; for the
                status server, which this version has not.
            health_check_payload: A request with which to probe the handler; for the
                status server, too.
            handler: The same as ``generator``, under its documented name.
            max_concurrent_requests: How many requests of this endpoint run at once; None
                for as many as the worker takes (``DYN_TCP_WORKER_POOL_SIZE``), which
                is a limit in any case.
            max_queued_requests: How many more wait for their turn; None for as many as
                may run.  Further ones are refused and go to other instances; callers
                leave this one alone for as long as the refusal says.

        Returns:
            A future that resolves to ``()`` after the shutdown.

        Raises:
            TypeError: an argument of the wrong type.
            ValueError: a label that is no pair, a limit that is too small, or
                ``max_queued_requests`` without ``max_concurrent_requests``.
            RuntimeError: no loop is running.
            RuntimeClosed: the runtime's loop was closed, or this is a forked child.
            CannotListen: the worker's port cannot be opened (from the future).
            DiscoveryError: the record cannot be published (from the future).
        """
        _check_payload(health_check_payload)
        return self._serve(
            _one_of(generator, handler),
            graceful_shutdown,
            metrics_labels,
            _limits(max_concurrent_requests, max_queued_requests),
            streamed=False,
        )

    def serve_bidirectional_endpoint(
        self,
        generator: Any = _MISSING,
        graceful_shutdown: bool | None = True,
        metrics_labels: Sequence[tuple[str, str]] | None = None,
        *,
        handler: Any = _MISSING,
        max_concurrent_requests: int | None = None,
        max_queued_requests: int | None = None,
    ) -> asyncio.Future[tuple[()]]:
        """Serve calls that send a stream of requests.

        Like `serve_endpoint`, but the handler is called with a `PyAsyncRequestStream`
        from which it reads the caller's values while it yields its own.

        Args:
            generator: An async generator function of the stream of requests.
            graceful_shutdown: As for `serve_endpoint`.
            metrics_labels: Pairs of text to label the endpoint's metrics; for the
                status server, which this version has not.
            handler: The same as ``generator``, under its documented name.
            max_concurrent_requests: How many requests of this endpoint run at once; None
                for as many as the worker takes (``DYN_TCP_WORKER_POOL_SIZE``), which
                is a limit in any case.
            max_queued_requests: How many more wait for their turn; None for as many as
                may run.  Further ones are refused and go to other instances; callers
                leave this one alone for as long as the refusal says.

        Returns:
            A future that resolves to ``()`` after the shutdown.

        Raises:
            TypeError: an argument of the wrong type.
            ValueError: a label that is no pair, a limit that is too small, or
                ``max_queued_requests`` without ``max_concurrent_requests``.
            RuntimeError: no loop is running.
            RuntimeClosed: the runtime's loop was closed, or this is a forked child.
            CannotListen: the worker's port cannot be opened (from the future).
            DiscoveryError: the record cannot be published (from the future).
        """
        return self._serve(
            _one_of(generator, handler),
            graceful_shutdown,
            metrics_labels,
            _limits(max_concurrent_requests, max_queued_requests),
            streamed=True,
        )

    def _serve(
        self,
        function: Any,
        graceful_shutdown: bool | None,
        metrics_labels: Sequence[tuple[str, str]] | None,
        limits: tuple[int, int] | None,
        *,
        streamed: bool,
    ) -> asyncio.Future[tuple[()]]:
        _check_bool("graceful_shutdown", graceful_shutdown)
        _check_labels(metrics_labels)
        asyncio.get_running_loop()
        wrapped = Handler(function, streamed=streamed)
        complaint = wrapped.complaint()
        if complaint is not None:
            _log.warning(
                "handler %s of %s cannot work, every call will be refused: %s",
                wrapped.name,
                self._name,
                complaint,
            )
        life = ServedEndpoint(
            self._home,
            self._name,
            wrapped,
            contextvars.copy_context(),
            limits,
            streamed=streamed,
            graceful=graceful_shutdown is not False,
        )
        return self._home.run(life.serve())

    def client(self, router_mode: RouterMode | None = None) -> asyncio.Future[Client]:
        """Make a client of this endpoint; there need not be a worker yet.

        Args:
            router_mode: How `Client.generate` chooses; None is round robin.

        Returns:
            A future of the client.

        Raises:
            TypeError: ``router_mode`` is no `RouterMode`.
            RuntimeError: no loop is running.
            DiscoveryError: the store cannot be read (from the future).
        """
        if router_mode is not None and not isinstance(router_mode, RouterMode):
            raise TypeError(
                "argument 'router_mode': expected a RouterMode, not "
                f"{type(router_mode).__name__}"
            )
        mode = RouterMode.RoundRobin if router_mode is None else router_mode
        return self._home.run(self._make_client(mode))

    async def _make_client(self, mode: RouterMode) -> Client:
        return Client._of(await self._home.client_home(self._name), mode)

    def connection_id(self) -> int:
        """The id of this runtime: the instance id of all its endpoints."""
        return self._home.backend.connection_id

    def register_endpoint_instance(self) -> asyncio.Future[tuple[()]]:
        """Publish this worker's record for the endpoint; again does nothing.

        Returns:
            A future that resolves to ``()``.

        Raises:
            RuntimeError: no loop is running.
            DiscoveryError: the store refused (from the future).
        """
        return self._home.run(self._register())

    async def _register(self) -> tuple[()]:
        _, host, port = await self._home.request_server()
        await register(self._home, self._name, host, port)
        return ()

    def unregister_endpoint_instance(self) -> asyncio.Future[tuple[()]]:
        """Remove this worker's record: callers stop coming, calls in flight go on.

        Returns:
            A future that resolves to ``()``.

        Raises:
            RuntimeError: no loop is running.
            DiscoveryError: there is no record, or the store refused (from the future).
        """
        return self._home.run(self._unregister())

    async def _unregister(self) -> tuple[()]:
        await unregister(self._home, self._name)
        return ()

    def first_token_source(
        self, worker_type: WorkerType
    ) -> asyncio.Future[FirstTokenSource | None]:
        """What tells of the first tokens that this worker makes.

        Args:
            worker_type: The stage of requests that this worker handles.

        Returns:
            A future of the source; of None for prefill and encode workers, which make
            no tokens.

        Raises:
            TypeError: ``worker_type`` is no `WorkerType`.
            RuntimeError: no loop is running.
        """
        if not isinstance(worker_type, WorkerType):
            raise TypeError(
                f"argument 'worker_type': '{type(worker_type).__name__}' object cannot "
                "be converted to 'WorkerType'"
            )
        future = asyncio.get_running_loop().create_future()
        makes_tokens = worker_type in (WorkerType.Decode, WorkerType.Aggregated)
        future.set_result(FirstTokenSource._make(worker_type) if makes_tokens else None)
        return future

    @property
    def metrics(self) -> RuntimeMetrics:
        """Where callbacks for the worker's metrics are registered."""
        return RuntimeMetrics._make(self._registry)


def _one_of(generator: Any, handler: Any) -> Any:
    if (generator is _MISSING) == (handler is _MISSING):
        raise TypeError(
            "serve_endpoint() takes exactly one handler: the first argument, also "
            "known as generator= or handler="
        )
    return handler if generator is _MISSING else generator


def _limits(running: int | None, waiting: int | None) -> tuple[int, int] | None:
    """How many requests of an endpoint may run and wait, if it has limits of its own."""
    if running is None:
        if waiting is not None:
            raise ValueError(
                "argument 'max_queued_requests' limits nothing without "
                "'max_concurrent_requests'"
            )
        return None
    running = _check_limit("max_concurrent_requests", running, 1)
    if waiting is None:
        return running, running
    return running, _check_limit("max_queued_requests", waiting, 0)


def _check_limit(name: str, value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(
            f"argument '{name}': expected an int or None, not {type(value).__name__}"
        )
    if value < least:
        raise ValueError(f"argument '{name}': {value} is less than {least}")
    return value


def _check_bool(name: str, value: object) -> None:
    if value is not None and not isinstance(value, bool):
        raise TypeError(
            f"argument '{name}': expected a bool or None, not {type(value).__name__}"
        )


def _check_labels(labels: object) -> None:
    if labels is None:
        return
    if not isinstance(labels, (list, tuple)):
        raise TypeError(
            "argument 'metrics_labels': expected a sequence of (name, value) pairs, "
            f"not {type(labels).__name__}"
        )
    for pair in labels:
        if not isinstance(pair, tuple):
            raise TypeError(
                f"argument 'metrics_labels': expected tuples, not {type(pair).__name__}"
            )
        if len(pair) != 2:
            raise ValueError(
                f"argument 'metrics_labels': {pair!r} has {len(pair)} parts, not 2"
            )
        if not all(isinstance(part, str) for part in pair):
            raise TypeError(f"argument 'metrics_labels': {pair!r} is not two texts")
        "".join(pair).encode()  # a lone surrogate raises here, not when they are sent


def _check_payload(payload: object) -> None:
    if payload is None:
        return
    if not isinstance(payload, dict):
        raise TypeError(
            "argument 'health_check_payload': expected a dict, not "
            f"{type(payload).__name__}"
        )
    if not all(isinstance(key, str) for key in payload):
        raise TypeError("argument 'health_check_payload': keys must be text")
    try:
        json.dumps(payload, default=_sets_as_lists)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"Failed to convert health_check_payload: {error}") from error


def _sets_as_lists(value: object) -> list[object]:
    if isinstance(value, (set, frozenset)):
        return list(value)
    raise TypeError(f"unsupported type {type(value).__name__}")
