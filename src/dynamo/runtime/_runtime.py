"""DistributedRuntime: puts the parts together, starts them, shuts them down in order.

The composition root: the only module that picks a discovery backend; `Lanes` picks the
lane of each call.  Owns the home loop's parts of one runtime and the ordered shutdown;
the parts own themselves.
"""

from __future__ import annotations

import _thread
import asyncio
import atexit
import logging
import os
import signal
import warnings
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, final

from dynamo.runtime import _signals
from dynamo.runtime._calls.admission import Admission
from dynamo.runtime._calls.choosing import ClientHome
from dynamo.runtime._calls.context import Drain
from dynamo.runtime._calls.inbox import on_loop
from dynamo.runtime._config import (
    LOCAL,
    RuntimeConfig,
    advertised_host,
    check_planes,
    chosen_backend,
    chosen_plane,
    from_env,
)
from dynamo.runtime._discovery.instances import InstanceSet
from dynamo.runtime._endpoint import Endpoint, ServedEndpoint
from dynamo.runtime._observability.metrics import MetricsCallbacks
from dynamo.runtime._observability.watchdog import LoopWatchdog
from dynamo.runtime._sealed import Sealed, text_argument
from dynamo.runtime._transports.connection import spawn
from dynamo.runtime._transports.lanes import Lanes
from dynamo.runtime._transports.local import announce
from dynamo.runtime._transports.replies import Replies
from dynamo.runtime._transports.tcp_server import RequestServer, SharedServers
from dynamo.runtime._wire.records import EndpointName, TcpAddress, parse_endpoint_path
from dynamo.runtime.errors import RuntimeClosed

if TYPE_CHECKING:
    from dynamo.runtime._discovery import DiscoveryBackend
    from dynamo.runtime._discovery.liveness import Liveness

_log = logging.getLogger("dynamo.runtime")

T = TypeVar("T")

_BACKENDS = ("kubernetes", "etcd", "file", "mem")
_PLANES = ("nats", "tcp")
_LEAVE_TIMEOUT_S = 2.0
# Callers hear of our leaving within this time; then nobody asks any more.
_STRAGGLERS_S = 0.1
_STRAGGLERS_TIMEOUT_S = 1.0
_TURNS_TO_CLOSE = 3
# After a drain in vain: to end when stopped, then when killed.  With the default budget
# of 25 s, and what `dynamo_worker` adds, all is over before Kubernetes' 30.
_STOPPED_TIMEOUT_S = 1.5
_KILLED_TIMEOUT_S = 0.5
_BACKEND_TIMEOUT_S = 2.0


def _new_backend(config: RuntimeConfig) -> tuple[DiscoveryBackend, Liveness | None]:
    """The discovery backend and its thread, if any; imported only when it is used."""
    if config.discovery_backend == "file":
        from dynamo.runtime._discovery.file import FileBackend
        from dynamo.runtime._discovery.liveness import Liveness

        liveness = Liveness()
        backend = FileBackend(
            config.file_root, liveness=liveness, private=config.embedded
        )
        return backend, liveness
    if config.discovery_backend == "mem":
        from dynamo.runtime._discovery.memory import MemoryBackend

        return MemoryBackend(), None
    raise ValueError(
        f"discovery backend {config.discovery_backend!r} is not part of this version: "
        "use 'file' (workers of one machine) or 'mem' (one process); "
        "DYN_DISCOVERY_BACKEND sets it for dynamo_worker"
    )


class _Core:
    """One runtime, without the user's handle: what endpoints, clients and tasks hold."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None,
        config: RuntimeConfig,
        backend: DiscoveryBackend | None = None,
    ) -> None:
        self.config = config
        made = _new_backend(config) if backend is None else (backend, None)
        self.backend, self._liveness = made
        self.admission = Admission(config.worker_pool_size, config.work_queue_size)
        self.metrics = MetricsCallbacks()
        self.replies = Replies()
        self.drain = Drain()
        self.closing = False
        self._home = loop
        self._pid = os.getpid()
        self._lane: Lanes | None = None
        self._server: RequestServer | None = None
        self._server_lock = asyncio.Lock()
        self._port = 0
        self._homes: weakref.WeakValueDictionary[EndpointName, ClientHome] = (
            weakref.WeakValueDictionary()
        )
        self._homes_lock = asyncio.Lock()
        self._served: list[ServedEndpoint] = []
        self._unhook: Callable[[], None] | None = None
        self._closing_task: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._ending = asyncio.Event()
        self._left_at = 0.0
        self._sentinel: AsyncGenerator[None, None] | None = None

    # Loops

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._home is None:
            # Made outside any loop: home is where it is first used.
            self._home = asyncio.get_running_loop()
        return self._home

    def run(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        try:
            running = asyncio.get_running_loop()
            self.check_alive()
        except BaseException:
            work.close()
            raise
        home = self.loop
        if running is home:
            task = home.create_task(work)
            # A call whose result nobody looks at is no reason to complain.
            task.add_done_callback(_retrieve)
            return task
        # The slow way, for other loops: there and back.
        try:
            there = asyncio.run_coroutine_threadsafe(work, home)
        except RuntimeError as error:
            work.close()
            raise RuntimeClosed(
                "the event loop of this runtime was closed: make a new runtime"
            ) from error
        return asyncio.wrap_future(there, loop=running)

    def check_alive(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeClosed(
                "this runtime belongs to the parent process: make a new one after fork"
            )

    # Parts that are made on first use

    @property
    def lane(self) -> Lanes:
        if self._lane is None:
            self._lane = Lanes(self.loop, self.config)
        return self._lane

    async def request_server(self) -> tuple[RequestServer, str, int]:
        if self.closing:
            raise RuntimeClosed("the runtime was shut down")
        await self._close_with_loop()
        async with self._server_lock:
            if self._server is None:
                self._server, self._port = await SharedServers.open(
                    self.loop,
                    self.config.rpc_host,
                    self.config.rpc_port,
                    self.config,
                )
                if self.closing:
                    # It may have come too late to be closed with the rest.
                    late, self._server = self._server, None
                    SharedServers.release(late)
                    raise RuntimeClosed("the runtime was shut down")
            host = advertised_host(self.config.rpc_host)
            if LOCAL in self.config.lanes:
                announce(TcpAddress(host, self._port, "").authority, self._server)
        return self._server, host, self._port

    async def client_home(self, name: EndpointName) -> ClientHome:
        if self.closing:
            raise RuntimeClosed("the runtime was shut down")
        await self._close_with_loop()
        async with self._homes_lock:
            home = self._homes.get(name)
            if home is None or home.instances.closed:
                instances = await InstanceSet.open(self.backend, name)
                home = ClientHome(
                    self.loop,
                    self.lane,
                    instances,
                    self.config,
                    self.run,
                    self.check_alive,
                )
                self._homes[name] = home
        return home

    # Serving

    def served(self, life: ServedEndpoint) -> None:
        self._served.append(life)

    def unserved(self, life: ServedEndpoint) -> None:
        if life in self._served:
            self._served.remove(life)

    @property
    def in_flight(self) -> int:
        """Requests that were taken and have not ended."""
        return sum(life.in_flight for life in self._served)

    def stop_all(self, *, killed: bool) -> None:
        """Stop, or kill, every request in flight."""
        for life in list(self._served):
            life.stop_all(killed=killed)

    def on_register(self) -> None:
        """From now on a record must be removed, however the process ends."""
        if self._unhook is not None:
            return
        restore = _signals.install((signal.SIGTERM,), self._leave_and_die)
        atexit.register(self.leave)

        def unhook() -> None:
            restore()
            atexit.unregister(self.leave)

        self._unhook = unhook

    def leave(self) -> None:
        """Remove our records now, from whatever thread, with the loop in any state."""
        if os.getpid() == self._pid:
            self.backend.leave(_LEAVE_TIMEOUT_S)

    def leave_soon(self, then: Callable[[], object] = bool) -> None:
        """The same without waiting for it; ``then`` is called in another thread.

        Safe in a signal handler.  Not in the loop's executor, whose threads may all be
        busy with the user's work.
        """

        def leave() -> None:
            try:
                self.leave()
            finally:
                then()

        # `threading.Thread` takes a lock, which the interrupted code may hold.
        _thread.start_new_thread(leave, ())

    def _leave_and_die(self, signum: signal.Signals) -> None:
        """SIGTERM in a program that does not handle it: callers learn of it first."""
        self.leave()
        _signals.die_by(signum)

    # Shutting down

    def shutdown(self, *, hurry: bool = False, ending: bool = False) -> None:
        """Begin to shut down.

        Args:
            hurry: Skip every wait, also of a shutdown under way.
            ending: The process is about to end: stop what is not to be waited for.
        """
        home = self._home
        if home is None or home.is_closed():
            self.closing = True
            self.leave()
            return
        try:
            here = asyncio.get_running_loop() is home
        except RuntimeError:
            here = False
        if here:
            self._begin_shutdown(hurry, ending)
        else:
            home.call_soon_threadsafe(self._begin_shutdown, hurry, ending)

    def _begin_shutdown(self, hurry: bool, ending: bool) -> None:
        if hurry:
            self._hurry.set()
        if ending:
            self._ending.set()
        if self._closing_task is None:
            self.closing = True
            self.drain.begun = True
            self._closing_task = spawn(self.loop, self._shut_down())

    async def closed(self) -> None:
        """Wait until a shutdown has come to its end."""
        if self._closing_task is not None:
            await asyncio.wait((self._closing_task,))

    async def _shut_down(self) -> None:
        # One budget for all that is waited for.
        deadline = self.loop.time() + self.config.drain_timeout_s
        try:
            await self._leave_discovery()
            self._left_at = self.loop.time()
            await self._serve_stragglers(deadline)
            self._refuse_new()
            await self._drain(deadline)
            await self._refuse_stragglers(deadline)
        finally:
            for life in list(self._served):
                life.release()
            await self._close_parts()

    async def _leave_discovery(self) -> None:
        """Before anything else: nobody new should find us."""
        left = asyncio.Event()
        self.leave_soon(lambda: on_loop(self.loop, left.set))
        await self._unless((self._hurry,), left.wait(), _LEAVE_TIMEOUT_S + 1)

    async def _serve_stragglers(self, deadline: float) -> None:
        """Callers who have not heard yet that we left are served like any other.

        Genuine clients do not send a refused call elsewhere.
        """
        # Never all of the budget: those in flight need the rest.
        await self._no_stragglers((deadline - self.loop.time()) / 2)

    async def _no_stragglers(self, limit_s: float) -> None:
        """Wait until nobody comes any more, but for ourselves."""
        if self._server is not None:
            own = self._lane.addresses() if self._lane is not None else set()
            quiet = self._server.quiet(self._left_at, _STRAGGLERS_S, own)
            limit_s = min(limit_s, _STRAGGLERS_TIMEOUT_S)
            await self._unless((self._hurry,), quiet, limit_s)

    def _refuse_new(self) -> None:
        for life in self._served:
            life.refuse_new()
        if self._server is not None and not SharedServers.is_shared(self._server):
            self._server.go_away()

    async def _drain(self, deadline: float) -> None:
        """Let work in flight end; then stop it, then kill it, each for a bounded time."""
        if await self._finished(deadline):
            return
        busy = self._busy()
        if not busy:
            _log.warning("callers have not read the end of their answers: closing")
            return
        self._tell_stopping(busy, deadline)
        self.stop_all(killed=False)
        if await self._all_idle(_STOPPED_TIMEOUT_S) or not self._busy():
            return
        self.stop_all(killed=True)
        # Also in a hurry: what is cancelled takes a few turns of the loop to end.
        await self._unless((), self._idle(), _KILLED_TIMEOUT_S)
        if busy := self._busy():
            _log.error(
                "requests did not end after they were stopped and cancelled: %s", busy
            )

    async def _finished(self, deadline: float) -> bool:
        """Whether everything was answered in time.

        When the process ends, only graceful endpoints are waited for.
        """
        rest_s = deadline - self.loop.time()
        patient = self._idle(only_graceful=True)
        if not await self._unless((self._hurry,), patient, rest_s):
            return False
        rest_s = deadline - self.loop.time()
        return await self._unless((self._hurry, self._ending), self._idle(), rest_s)

    def _tell_stopping(self, busy: str, deadline: float) -> None:
        if self._hurry.is_set():
            _log.warning("stopping requests without waiting for them: %s", busy)
        elif self.loop.time() < deadline:
            _log.info("stopping requests that are not to be waited for: %s", busy)
        else:
            _log.warning(
                "still busy after %g s (DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS), "
                "stopping requests: %s",
                self.config.drain_timeout_s,
                busy,
            )

    def _busy(self) -> str:
        return ", ".join(
            f"{life.name} ({life.handler_name}): {life.in_flight}"
            for life in self._served
            if life.in_flight
        )

    async def _refuse_stragglers(self, deadline: float) -> None:
        """Answer callers who have not heard yet that we left, before the port closes.

        A request that meets a closed connection may have run, for all its caller knows,
        and is not sent again; one that is refused goes elsewhere.
        """
        await self._no_stragglers(max(deadline - self.loop.time(), _STRAGGLERS_S))

    async def _all_idle(self, timeout_s: float) -> bool:
        return await self._unless((self._hurry,), self._idle(), timeout_s)

    async def _unless(
        self,
        events: tuple[asyncio.Event, ...],
        work: Coroutine[Any, Any, object],
        timeout_s: float,
    ) -> bool:
        """Whether the work was done in time; one of the events ends the wait."""
        done = spawn(self.loop, work)
        interrupts = [spawn(self.loop, event.wait()) for event in events]
        try:
            await asyncio.wait(
                (done, *interrupts),
                timeout=max(timeout_s, 0.0),
                return_when=asyncio.FIRST_COMPLETED,
            )
            return done.done()
        finally:
            for task in (done, *interrupts):
                task.cancel()
            await asyncio.gather(done, *interrupts, return_exceptions=True)

    async def _idle(self, *, only_graceful: bool = False) -> None:
        for life in list(self._served):
            if life.graceful or not only_graceful:
                await life.idle()
        await self.replies.delivered()
        if self._server is not None:
            await self._server.written()

    async def _close_with_loop(self) -> None:
        """See that nothing stays open if the program forgets to shut down."""
        if self._sentinel is None:
            self._sentinel = _sentinel_of(weakref.ref(self))
            await anext(self._sentinel)
            self._watch_loop()

    def _watch_loop(self) -> None:
        """Have it reported when somebody blocks our loop.

        With ``mem`` there is no thread to look from, and none is started for this.
        """
        if self._liveness is None or self.config.blocked_loop_s == 0:
            return
        watchdog = LoopWatchdog(
            self.loop, self.config.blocked_loop_s, _weakly(self._doing)
        )
        self._liveness.submit(_look_again_and_again(self._liveness, watchdog))

    def _doing(self, task: asyncio.Task[Any]) -> str:
        """What a task does for us; asked in another thread."""
        for life in list(self._served):
            if life.drives(task):
                return f"handler {life.handler_name} of {life.name}"
        return ""

    async def loop_ends(self) -> None:
        """The program closes the loop; every task has been cancelled before."""
        if self._closing_task is None:
            self.closing = True
            await self._leave_discovery()
            for life in list(self._served):
                life.release()
        if self._closing_task is None or self._closing_task.cancelled():
            await self._close_parts()
        if self._lane is not None:
            self._lane.abort()
        # Transports close their sockets in a later turn.
        for _ in range(_TURNS_TO_CLOSE):
            await asyncio.sleep(0)

    async def _close_parts(self) -> None:
        if self._unhook is not None:
            self._unhook()
        for home in list(self._homes.values()):
            await home.aclose()
        if self._lane is not None:
            await self._lane.aclose()
        await self._close_server()
        self.replies.abort()
        closing = spawn(self.loop, self.backend.aclose())
        await asyncio.wait((closing,), timeout=_BACKEND_TIMEOUT_S)
        if not closing.done():
            # A file system that hangs; its thread is a daemon and holds up nobody.
            closing.cancel()
            _log.warning(
                "the %s discovery store did not close within %g s",
                self.config.discovery_backend,
                _BACKEND_TIMEOUT_S,
            )

    async def _close_server(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        try:
            if not SharedServers.is_shared(server):
                await server.stop_accepting()
        finally:
            SharedServers.release(server)


async def _look_again_and_again(liveness: Liveness, watchdog: LoopWatchdog) -> None:
    """In the liveness thread, which ends it."""
    liveness.every(watchdog.interval_s, watchdog.look)


def _weakly(
    method: Callable[[asyncio.Task[Any]], str],
) -> Callable[[asyncio.Task[Any]], str]:
    """The same without holding its object, which a program may just drop."""
    reference = weakref.WeakMethod(method)

    def call(task: asyncio.Task[Any]) -> str:
        target = reference()
        return "" if target is None else target(task)

    return call


async def _sentinel_of(reference: weakref.ref[_Core]) -> AsyncGenerator[None, None]:
    """Suspended while its loop lives: `asyncio.run` closes such generators at last."""
    try:
        yield
    finally:
        core = reference()
        if core is not None:
            await core.loop_ends()


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


def _check_plane(name: str, value: object, allowed: tuple[str, str]) -> str:
    if value is None or value == "":
        return ""
    if text_argument(name, value) not in allowed:
        raise ValueError(
            f"Invalid {name} value '{value}'. Valid values: '{allowed[0]}', "
            f"'{allowed[1]}'"
        )
    return str(value)


@final
class DistributedRuntime(Sealed):
    """One member of a cluster: it can serve endpoints and call those of others.

    Args:
        event_loop: The loop on which handlers run, usually the running one.
        discovery_backend: Where instances find each other: ``"file"`` (processes of
            one machine, ``DYN_FILE_KV``) or ``"mem"`` (this runtime alone).
        request_plane: How requests travel: ``"tcp"``.
        enable_nats: Deprecated and without effect.
        event_plane: ``"zmq"`` or ``"nats"``; None or ``""`` for the default.
        response_plane: ``"tcp"``; None or ``""`` for the default.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a value that is not known, or not part of this version; a setting in
            the environment that cannot be used.

    The constructor does no I/O.  `dynamo_worker` makes a runtime from the environment.

    Example:
        >>> import asyncio
        >>> from dynamo.runtime import DistributedRuntime
        >>> async def main():
        ...     runtime = DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp")
        ...     async def double(request):
        ...         yield 2 * request
        ...     endpoint = runtime.endpoint("demo.worker.double")
        ...     serving = endpoint.serve_endpoint(double)
        ...     client = await endpoint.client()
        ...     await client.wait_for_instances(timeout=5)
        ...     async for item in await client.round_robin(21, annotated=False):
        ...         print(item)
        ...     runtime.shutdown()
        ...     await serving
        >>> asyncio.run(main())
        42
    """

    __slots__ = ("_core", "_event_loop", "_ready", "_routes")

    _core: _Core
    _event_loop: Any
    _ready: bool
    _routes: dict[str, tuple[Any, asyncio.AbstractEventLoop]]

    def __init__(
        self,
        event_loop: Any,
        discovery_backend: str,
        request_plane: str,
        enable_nats: bool | None = None,
        *,
        event_plane: str | None = None,
        response_plane: str | None = None,
    ) -> None:
        text_argument("discovery_backend", discovery_backend)
        plane = text_argument("request_plane", request_plane).lower()
        if enable_nats is not None:
            deprecate_enable_nats(enable_nats)
        events = _check_plane("event_plane", event_plane, ("nats", "zmq"))
        response = _check_plane("response_plane", response_plane, ("tcp", "quic"))
        check_planes(os.environ, response_plane=response, event_plane=events)
        _refuse_unavailable(discovery_backend, plane)
        self._start(event_loop, from_env(os.environ, discovery_backend, plane))

    def _start(
        self,
        event_loop: Any,
        config: RuntimeConfig,
        backend: DiscoveryBackend | None = None,
    ) -> None:
        self._event_loop = event_loop
        self._core = _Core(_home_of(event_loop), config, backend)
        self._ready = False
        self._routes = {}
        if config.status_port is not None:
            _log.warning(
                "DYN_SYSTEM_PORT=%d: this version has no status server",
                config.status_port,
            )

    @classmethod
    def _make(
        cls,
        event_loop: Any,
        config: RuntimeConfig,
        backend: DiscoveryBackend | None = None,
    ) -> DistributedRuntime:
        """One with these settings, whatever the environment says."""
        self = cls.__new__(cls)
        self._start(event_loop, config, backend)
        return self

    @classmethod
    def _from_env(cls, event_loop: Any) -> DistributedRuntime:
        """What `dynamo_worker` and `detached` make: all from the environment."""
        backend = chosen_backend(os.environ)
        if backend is not None:
            return cls(event_loop, backend, chosen_plane(os.environ))
        check_planes(os.environ)
        config = from_env(os.environ)
        _refuse_unavailable("file", config.request_plane)
        self = cls._make(event_loop, config)
        _log.info(
            "no discovery backend named: using files in %s and the loopback interface, "
            "for processes of this user on this machine; set DYN_DISCOVERY_BACKEND "
            "(and DYN_FILE_KV) to join others",
            config.file_root,
        )
        return self

    @staticmethod
    def detached() -> DistributedRuntime:
        """A runtime made from the environment; its home is the first loop that uses it.

        Returns:
            The runtime; `event_loop` gives None.

        Raises:
            ValueError: a setting in the environment cannot be used.
        """
        return DistributedRuntime._from_env(None)

    def endpoint(self, path: str) -> Endpoint:
        """The endpoint of that name, whether or not anybody serves it.

        Args:
            path: ``"namespace.component.endpoint"``, with any number of ``dyn://`` in
                front.

        Returns:
            A new `Endpoint`.

        Raises:
            TypeError: ``path`` is no text.
            ValueError: it does not have three parts, or holds a lone surrogate (a
                `UnicodeEncodeError`).
        """
        name = parse_endpoint_path(text_argument("path", path))
        return Endpoint._of(self._core, name, self._core.metrics)

    def shutdown(self) -> None:
        """Leave the cluster in order; returns at once, again does nothing.

        Records leave discovery first.  Requests of callers who have not heard of it yet
        are served for a moment, later ones are refused, those in flight may end.  All
        that takes at most ``DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS`` (25 s); what
        still runs then is stopped.  At last the futures of ``serve_endpoint`` resolve.
        """
        self._core.shutdown()

    def event_loop(self) -> Any:
        """The object given to the constructor."""
        return self._event_loop

    def set_health_status(self, ready: bool) -> None:
        """Say whether this worker is ready to take requests.

        Raises:
            TypeError: ``ready`` is no bool.
        """
        if not isinstance(ready, bool):
            raise TypeError(
                f"argument 'ready': '{type(ready).__name__}' object cannot be converted "
                "to 'PyBool'"
            )
        self._ready = ready

    def register_engine_route(self, route_name: str, callback: Any) -> None:
        """Keep a callback to be offered at ``/engine/ROUTE_NAME``.

        Args:
            route_name: The path below ``/engine/``; a second registration replaces the
                first.
            callback: A coroutine function of one argument, the decoded JSON body.  Runs
                in the loop that is running now.

        Raises:
            TypeError: ``route_name`` is no text.
            RuntimeError: no loop is running.
        """
        text_argument("route_name", route_name)
        self._routes[route_name] = (callback, asyncio.get_running_loop())

    def system_status_server_url(self) -> str | None:
        """The address of the status server, or None if there is none."""
        return None

    def to_capsule(self) -> NoReturn:
        """Refused: there is no native runtime inside to point to.

        Raises:
            TypeError: always; pass the runtime object itself, or make a second runtime
                in the native module: both find each other through discovery.
        """
        raise TypeError(
            "this runtime is pure Python and has no native capsule: make a runtime of "
            "its own in the native module, discovery connects the two"
        )


def _home_of(event_loop: Any) -> asyncio.AbstractEventLoop | None:
    """The loop to live on: the one given if it is one, else the running one."""
    if isinstance(event_loop, asyncio.AbstractEventLoop):
        return event_loop
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def deprecate_enable_nats(enable_nats: object) -> None:
    """Check the argument and warn whoever called the function that has it."""
    if not isinstance(enable_nats, bool):
        raise TypeError(
            f"argument 'enable_nats': '{type(enable_nats).__name__}' object cannot be "
            "converted to 'PyBool'"
        )
    warnings.warn(
        "enable_nats is deprecated and has no effect: request_plane decides",
        DeprecationWarning,
        stacklevel=3,
    )


def _refuse_unavailable(backend: str, plane: str) -> None:
    if backend not in _BACKENDS:
        raise ValueError(f"Unknown key-value store type '{backend}'")
    if plane not in _PLANES:
        raise ValueError(
            f"Invalid request plane mode: '{plane}'. Valid options are: 'nats', 'tcp'"
        )
    if plane == "nats":
        raise ValueError("request plane 'nats' is not part of this version: use 'tcp'")
