"""The decorators around handlers and workers.

pydantic is never imported here: who hands in a model has imported it already.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import threading
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from dynamo.runtime import _signals
from dynamo.runtime._runtime import DistributedRuntime, deprecate_enable_nats
from dynamo.runtime.errors import RuntimeClosed

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine

__all__ = ["dynamo_endpoint", "dynamo_worker"]

_log = logging.getLogger("dynamo.runtime.worker")

_Item = TypeVar("_Item")

# How long the worker's own coroutine may take to return once everything has drained.
_RETURN_TIMEOUT_S = 1.0
# How long after it the loop, and threads, may keep the process; less in a hurry.
_END_TIMEOUT_S = 1.5
_HURRIED_END_TIMEOUT_S = 0.5
# What a drain and the return may take beyond the budget.  All of these together end a
# worker with the default budget of 25 s before Kubernetes does, which gives it 30.
_DRAIN_OVERHEAD_S = 3.25


def dynamo_worker(
    enable_nats: bool | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Coroutine[Any, Any, None]]]:
    """Make a worker's main coroutine: it gets a runtime and drains on SIGTERM.

    The runtime is made from the environment: ``DYN_DISCOVERY_BACKEND`` and
    ``DYN_REQUEST_PLANE``, or, with nothing set, files of this user on this machine and
    the loopback interface.

    On SIGTERM and SIGINT the worker leaves discovery, serves those who have not heard of
    it, refuses later requests, lets those in flight end, and returns normally.  All
    waiting together takes at most ``DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS`` (25 s);
    what still runs then is stopped, and a second signal skips the waiting.  Requests of
    endpoints served with ``graceful_shutdown=False`` are not waited for.  This holds in
    the main thread and for signals that the program does not handle itself.  Handlers
    and threads that do not end are named in the log and left behind; the exit code is 0
    all the same.  Child processes belong to the program: they are neither signalled nor
    waited for.

    Args:
        enable_nats: Deprecated and without effect.

    Returns:
        A decorator for coroutine functions whose first argument is the runtime; the
        result takes the other arguments and returns None.

    Raises:
        TypeError: ``enable_nats`` is no bool.

    Example:
        >>> import asyncio
        >>> from dynamo.runtime import dynamo_worker
        >>> @dynamo_worker()
        ... async def main(runtime, greeting):
        ...     print(greeting, runtime.endpoint("demo.worker.hello").connection_id() > 0)
        >>> asyncio.run(main("hello"))
        hello True
    """
    if enable_nats is not None:
        deprecate_enable_nats(enable_nats)

    def decorate(
        function: Callable[..., Any],
    ) -> Callable[..., Coroutine[Any, Any, None]]:
        @wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> None:
            runtime = DistributedRuntime._from_env(asyncio.get_running_loop())
            await _Worker(runtime).run(lambda: function(runtime, *args, **kwargs))

        return wrapper

    return decorate


class _Worker:
    """A worker's main coroutine and what signals do to it.

    First signal: drain, then let the coroutine return, then cancel it.  Second signal:
    the same without waiting.  A third one finds the handlers gone and ends the process.
    What keeps the process for too long after that is named and left behind.
    """

    def __init__(self, runtime: DistributedRuntime) -> None:
        self._core = runtime._core
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._working = True
        self._signals = 0
        self._drain: asyncio.Task[None] | None = None
        self._cancelled = False
        self._over = threading.Event()
        self._restore = _signals.install(
            (signal.SIGTERM, signal.SIGINT), self._on_signal
        )

    async def run(self, begin: Callable[[], Any]) -> None:
        try:
            try:
                await begin()
            except asyncio.CancelledError:
                if not self._cancelled:
                    raise
            except RuntimeClosed as error:
                # What the coroutine was waiting for will not come: it was told to end.
                if not self._signals:
                    raise
                _log.info("the worker ended while it was draining: %s", error)
            finally:
                # From here on there is nobody to cancel, only a drain to wait for.
                self._working = False
                if self._drain is not None:
                    await self._finish_drain(self._drain)
        finally:
            self._restore()
            self._over.set()

    async def _finish_drain(self, drain: asyncio.Task[None]) -> None:
        """The coroutine may return before the drain has come to its end."""
        await self._core.closed()
        drain.cancel()
        await asyncio.wait((drain,))

    def _on_signal(self, signum: signal.Signals) -> None:
        """Runs in the main thread between two bytecodes, perhaps in a stuck loop."""
        self._signals += 1
        if self._signals == 1:
            self._core.leave_soon()
            self._see_it_end(self._core.config.drain_timeout_s, _END_TIMEOUT_S)
        else:
            self._restore()
            self._see_it_end(0.0, _HURRIED_END_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._react, signum, self._signals)

    def _see_it_end(self, drain_s: float, grace_s: float) -> None:
        assert self._task is not None
        watch = _signals.EndWatch(self._over, self._task, self._loop)
        watch.start(drain_s + _DRAIN_OVERHEAD_S, grace_s)

    def _react(self, signum: signal.Signals, count: int) -> None:
        if count > 1:
            _log.warning("%s again: not waiting any longer", signum.name)
            self._core.shutdown(hurry=True)
            self._cancel_main()
            return
        _log.info("%s: draining", signum.name)
        self._core.shutdown(ending=True)
        self._drain = self._loop.create_task(self._drain_then_cancel())

    async def _drain_then_cancel(self) -> None:
        await self._core.closed()
        await asyncio.sleep(_RETURN_TIMEOUT_S)
        self._cancel_main()

    def _cancel_main(self) -> None:
        if self._working and self._task is not None:
            self._cancelled = True
            self._task.cancel()


def dynamo_endpoint(
    request_model: type[Any], response_model: type[Any]
) -> Callable[
    [Callable[..., AsyncIterator[_Item]]], Callable[..., AsyncGenerator[_Item, None]]
]:
    """Hand a handler its request as a pydantic model.

    The last of one or two positional arguments (with two, the first is `self`) is the
    request: a dict is validated as it is, a text as JSON.  Everything happens at the
    first step of the handler, so that a wrong request is an error of that call.

    Args:
        request_model: Subclass of `pydantic.BaseModel`; with any other class requests
            are passed on as they are.
        response_model: What the handler yields; not checked.

    Returns:
        A decorator for async generator functions.

    Raises:
        ValueError: At the first step: the request does not fit the model.
        TypeError: At the first step: the model is no class.

    Example:
        >>> import asyncio
        >>> from pydantic import BaseModel
        >>> class Ask(BaseModel):
        ...     count: int
        >>> @dynamo_endpoint(Ask, int)
        ... async def numbers(request):
        ...     for number in range(request.count):
        ...         yield number
        >>> async def main():
        ...     return [item async for item in numbers({"count": 3})]
        >>> asyncio.run(main())
        [0, 1, 2]
    """

    def decorate(
        handler: Callable[..., AsyncIterator[_Item]],
    ) -> Callable[..., AsyncGenerator[_Item, None]]:
        @wraps(handler)
        async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[_Item, None]:
            if len(args) in (1, 2) and _is_pydantic_model(request_model):
                args = (*args[:-1], _parse_request(request_model, args[-1]))
            stream = handler(*args, **kwargs)
            try:
                async for item in stream:
                    try:
                        yield item
                    except _validation_errors() as error:
                        raise ValueError(f"Invalid response: {error}") from error
            finally:
                # Leaving an `async for` does not close what it iterates over.
                if hasattr(stream, "aclose"):
                    await stream.aclose()

        return wrapper

    return decorate


def _is_pydantic_model(model: object) -> bool:
    if not isinstance(model, type):
        raise TypeError(
            f"dynamo_endpoint needs a class as request_model, not {model!r}"
        )
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and issubclass(model, pydantic.BaseModel)


def _validation_errors() -> tuple[type[Exception], ...]:
    pydantic = sys.modules.get("pydantic")
    return () if pydantic is None else (pydantic.ValidationError,)


def _parse_request(model: Any, payload: object) -> Any:
    if not isinstance(payload, (dict, str)):
        raise ValueError(f"Invalid request: {payload}")
    try:
        if isinstance(payload, str):
            payload = json.loads(payload)
        return model.model_validate(payload)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"Invalid request: {error}") from error
