"""Client: the public methods that call an endpoint.

Owns their arguments and what they return.  Who gets a call is `choosing`, the call
itself is `egress`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import operator
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, final

from dynamo.runtime._calls.choosing import Chooser
from dynamo.runtime._calls.context import Context, new_id
from dynamo.runtime._calls.deadlines import NO_LIMITS, inherited, seconds_of
from dynamo.runtime._calls.egress import NO_OPTIONS, CallOptions, OutgoingCall
from dynamo.runtime._calls.pump import Requests, iterator_of
from dynamo.runtime._discovery.instances import Instance
from dynamo.runtime._discovery.model_cards import Wanted
from dynamo.runtime._routing.policies import RouterMode
from dynamo.runtime._sealed import Unconstructible, text_argument
from dynamo.runtime._transports import CallRequest
from dynamo.runtime._wire.payload import encode_value

if TYPE_CHECKING:
    from dynamo.runtime._calls.choosing import ClientHome
    from dynamo.runtime._calls.egress import OnStreamLost, Selection
    from dynamo.runtime._calls.streams import AsyncResponseStream

_log = logging.getLogger("dynamo.runtime.client")

_MAX_ID = 2**64 - 1
# Read and never written.
_NO_METADATA: dict[str, str] = {}


@final
class Client(Unconstructible):
    """Calls one endpoint; made by `Endpoint.client`.

    Every request method takes the request, whether items come with their envelope
    (``annotated``, True by default; None means False) and optionally a `Context`, and
    returns a future of an `AsyncResponseStream`.  The future resolves when the handler
    has been started, before its first item.

    A call that certainly did not reach a handler (no connection, refused) goes to
    another instance by itself; `direct` never does.

    All methods may be called from any running loop; the loop on which the runtime was
    made is the fast one.
    """

    __slots__ = ("_by_mode", "_chooser", "_home", "_mode", "_random", "_round_robin")

    _home: ClientHome
    _chooser: Chooser
    _mode: RouterMode
    # Made once: all calls share them.
    _by_mode: Selection
    _random: Selection
    _round_robin: Selection

    @classmethod
    def _of(cls, home: ClientHome, mode: RouterMode) -> Client:
        self = cls.__new__(cls)
        self._home = home
        chooser = self._chooser = Chooser(home)
        self._mode = mode
        self._by_mode = chooser.selection(chooser.of_mode(mode))
        self._random = chooser.selection(chooser.random)
        self._round_robin = chooser.selection(chooser.round_robin)
        if mode == RouterMode.KV:
            _log.warning(
                "router mode KV needs a model card, which a plain client has not: "
                "generate() chooses at random"
            )
        return self

    def instance_ids(self) -> list[int]:
        """The ids of all listed instances, also of those being avoided; a snapshot."""
        return [record.instance_id for record in self._home.instances.records]

    def instances(self) -> list[Instance]:
        """All listed instances, in the order of `instance_ids`; a snapshot."""
        return [Instance._make(record) for record in self._home.instances.records]

    def wait_for_instances(
        self, *, timeout: float | None = None
    ) -> asyncio.Future[list[int]]:
        """Wait until an instance can be called.

        Args:
            timeout: How many seconds to wait at most, 0 looks once; None waits without
                limit.

        Returns:
            A future of the ids that can be called: listed and not being avoided.

        Raises:
            TypeError: ``timeout`` is no number.
            ValueError: ``timeout`` is negative or not a number.
            RuntimeError: no loop is running.
            NoInstances: there was none within ``timeout`` (a TimeoutError too; from the
                future).
            RuntimeClosed: the runtime was shut down (from the future).
        """
        if timeout is not None:
            timeout = seconds_of("timeout", timeout)
        return self._home.run(self._chooser.wait_at_most(timeout))

    def wait_for_instance_by_runtime_data(
        self, key: str, value: str, timeout_s: float | None = None
    ) -> asyncio.Future[int]:
        """Wait until exactly one instance has a model card with that runtime data.

        An instance matches while it is listed and its card's ``runtime_data`` holds the
        text ``value`` under ``key``; other kinds of values never match.

        Args:
            key: Name of an entry; dots have no meaning.
            value: The text it must be equal to.
            timeout_s: How many seconds to wait at most; None waits without limit, 0
                looks once.

        Returns:
            A future of the instance's id, for ``direct``.

        Raises:
            TypeError: an argument of the wrong type.
            RuntimeError: no loop is running.
            ValueError: ``timeout_s`` is negative or not finite (from the future).
            NoMatchInTime: none, or more than one, matched until then (a TimeoutError
                too; from the future).
            RuntimeClosed: the runtime was shut down (from the future).

        Example:
            >>> import asyncio
            >>> from dynamo.runtime import DistributedRuntime
            >>> async def main():
            ...     runtime = DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp")
            ...     client = await runtime.endpoint("demo.engine.generate").client()
            ...     try:
            ...         await client.wait_for_instance_by_runtime_data(
            ...             "role", "prefill", timeout_s=0
            ...         )
            ...     except TimeoutError as error:
            ...         print(error.facts)
            ...     runtime.shutdown()
            >>> asyncio.run(main())
            {'matching': []}
        """
        wanted = Wanted(text_argument("key", key), text_argument("value", value))
        timeout_s = _check_seconds("timeout_s", timeout_s)
        return self._home.run(_only_match(self._home, wanted, timeout_s))

    def wait_for_instances_by_runtime_data(
        self, key: str, value: str, min_count: int, timeout_s: float | None = None
    ) -> asyncio.Future[list[int]]:
        """Wait until a number of instances have model cards with that runtime data.

        What matches: see `wait_for_instance_by_runtime_data`.

        Args:
            key: Name of an entry; dots have no meaning.
            value: The text it must be equal to.
            min_count: How many there must be, at least 1.
            timeout_s: How many seconds to wait at most; None waits without limit, 0
                looks once.

        Returns:
            A future of the ids of all that match, ordered.

        Raises:
            TypeError: an argument of the wrong type.
            OverflowError: ``min_count`` is negative or over 64 bits.
            RuntimeError: no loop is running.
            ValueError: ``min_count`` is 0, or (from the future) ``timeout_s`` is
                negative or not finite.
            NoMatchInTime: fewer matched until then (a TimeoutError too; from the
                future).
            RuntimeClosed: the runtime was shut down (from the future).

        Example:
            Two prefill workers before the first request::

                ids = await client.wait_for_instances_by_runtime_data(
                    "role", "prefill", min_count=2, timeout_s=60
                )
        """
        wanted = Wanted(
            text_argument("key", key),
            text_argument("value", value),
            _check_count("min_count", min_count),
        )
        timeout_s = _check_seconds("timeout_s", timeout_s)
        if not wanted.min_count:
            raise ValueError("min_count must be positive")
        return self._home.run(_matches(self._home, wanted, timeout_s))

    def random(
        self,
        request: Any,
        annotated: bool | None = True,
        context: Context | None = None,
        *,
        timeout: float | None = None,
        first_item_timeout: float | None = None,
        idle_timeout: float | None = None,
        idempotent: bool = False,
        on_stream_lost: OnStreamLost | None = None,
    ) -> asyncio.Future[AsyncResponseStream]:
        """Call an instance chosen uniformly at random.

        Args:
            request: Any value that MessagePack can carry.
            annotated: Whether items come as `Annotated`; None means False.
            context: Id, metadata, deadline and cancellation of the call; linked to it.
            timeout: Seconds for the whole call, to the end of its stream.  None is what
                ``DYN_RUNTIME_CALL_TIMEOUT_SECS`` says; ``math.inf`` is no limit, here
                and below.  The deadline of the context, or without a context that
                of the handler that makes the call, holds in any case.
            first_item_timeout: Seconds from now to the first item
                (``DYN_RUNTIME_FIRST_ITEM_TIMEOUT_SECS``).
            idle_timeout: Seconds without an item while the stream is read
                (``DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS``).  Counts before the first item
                too, from the start of the handler, unless that has a limit of its own.
            idempotent: A handler may see the request twice: also send it elsewhere if it
                may have run, but never after an item came.
            on_stream_lost: Called as ``on_stream_lost(items_so_far, error)`` when the
                stream breaks, or its handler goes down, once all items that came have
                been read: with a request that continues the answer elsewhere, to be
                sent there, or None to have the error raised.  Runs on the runtime's loop
                and must return at once.

        Returns:
            A future of the response stream.

        Raises:
            TypeError: an argument of the wrong type, or a value that cannot be sent.
            ValueError: a limit that is negative or not a number; a request that is
                nested too deeply, contains itself, or has text that cannot be encoded.
            OverflowError: an integer beyond 64 bits in the request.
            RuntimeError: no loop is running.
            RuntimeClosed: the runtime's loop was closed, or this is a forked child; or
                the runtime is shut down meanwhile (from the future).
            CallError: nobody took the call (from the future).
            CallTimeout: a limit passed before the stream began (a TimeoutError too; from
                the future).  Afterwards the stream raises a `StreamTimeout`.
        """
        options = self._options(
            context,
            timeout,
            first_item_timeout,
            idle_timeout,
            idempotent,
            on_stream_lost,
        )
        return self._call(self._random, request, annotated, context, options)

    def round_robin(
        self,
        request: Any,
        annotated: bool | None = True,
        context: Context | None = None,
        *,
        timeout: float | None = None,
        first_item_timeout: float | None = None,
        idle_timeout: float | None = None,
        idempotent: bool = False,
        on_stream_lost: OnStreamLost | None = None,
    ) -> asyncio.Future[AsyncResponseStream]:
        """Call the next instance in the order of ids.

        Like `random` otherwise, with what it raises.
        """
        options = self._options(
            context,
            timeout,
            first_item_timeout,
            idle_timeout,
            idempotent,
            on_stream_lost,
        )
        return self._call(self._round_robin, request, annotated, context, options)

    def generate(
        self,
        request: Any,
        annotated: bool | None = True,
        context: Context | None = None,
        *,
        timeout: float | None = None,
        first_item_timeout: float | None = None,
        idle_timeout: float | None = None,
        idempotent: bool = False,
        on_stream_lost: OnStreamLost | None = None,
    ) -> asyncio.Future[AsyncResponseStream]:
        """Call an instance chosen by the client's router mode.

        The default mode is round robin.  KV, which needs a model card, falls back to a
        random choice.  Like `random` otherwise.
        """
        options = self._options(
            context,
            timeout,
            first_item_timeout,
            idle_timeout,
            idempotent,
            on_stream_lost,
        )
        return self._call(self._by_mode, request, annotated, context, options)

    def direct(
        self,
        request: Any,
        instance_id: int,
        annotated: bool | None = True,
        context: Context | None = None,
        *,
        timeout: float | None = None,
        first_item_timeout: float | None = None,
        idle_timeout: float | None = None,
    ) -> asyncio.Future[AsyncResponseStream]:
        """Call that instance, also if it is being avoided, and no other.

        Args:
            request: Any value that MessagePack can carry.
            instance_id: One of `instance_ids`.
            annotated: Whether items come as `Annotated`; None means False.
            context: Id, metadata, deadline and cancellation of the call; linked to it.
            timeout: As for `random`, and the other two as well.
            first_item_timeout: See there.
            idle_timeout: See there.

        Returns:
            A future of the response stream.

        Raises:
            TypeError: as for `random`, or an id that is no int.
            ValueError: as for `random`; so are RuntimeError, RuntimeClosed, CallError.
            OverflowError: as for `random`, or an id that is negative or over 64 bits.
            InstanceNotFound: it is not listed (from the future).
        """
        selection = self._chooser.exactly(_check_id(instance_id))
        options = self._options(context, timeout, first_item_timeout, idle_timeout)
        return self._call(selection, request, annotated, context, options)

    def device_aware_weighted(
        self,
        request: Any,
        annotated: bool | None = True,
        context: Context | None = None,
        *,
        timeout: float | None = None,
        first_item_timeout: float | None = None,
        idle_timeout: float | None = None,
        idempotent: bool = False,
        on_stream_lost: OnStreamLost | None = None,
    ) -> asyncio.Future[AsyncResponseStream]:
        """Call an instance chosen by load, for clients made with such a router mode.

        ``DeviceAwareWeighted`` prefers accelerators, each worth as much as
        ``DYN_ENCODER_CUDA_TO_CPU_RATIO`` CPUs; ``LeastLoaded`` and
        ``PowerOfTwoChoices`` go by calls in flight alone.  Like `random` otherwise.

        Raises:
            CallError: as for `random`, with all else that it raises, or the client has
                another mode (from the future).
        """
        weighs = self._mode in (
            RouterMode.PowerOfTwoChoices,
            RouterMode.LeastLoaded,
            RouterMode.DeviceAwareWeighted,
        )
        selection = self._by_mode
        if not weighs:
            selection = self._chooser.selection(self._chooser.not_weighted)
        options = self._options(
            context,
            timeout,
            first_item_timeout,
            idle_timeout,
            idempotent,
            on_stream_lost,
        )
        return self._call(selection, request, annotated, context, options)

    def bidirectional(
        self,
        requests: Requests,
        annotated: bool | None = True,
        context: Context | None = None,
        *,
        instance_id: int | None = None,
        timeout: float | None = None,
        first_item_timeout: float | None = None,
        idle_timeout: float | None = None,
    ) -> asyncio.Future[AsyncResponseStream]:
        """Call an endpoint that takes a stream of requests.

        The values are read when the worker takes them, in the loop of the caller, and
        only as fast as the worker does; the end of the iterable ends the handler's
        input, not the call.  An exception that the iterable raises, or a value that
        cannot be sent, ends the call and is raised to the reader of the stream.  In the
        end the iterable is closed (``aclose()`` or ``close()``, if it has one), also
        when the call ends first or never begins.

        As long as no value was taken, the call goes to another instance like any other;
        after that it does not.

        Args:
            requests: An iterable, or asynchronous iterable, of values that MessagePack
                can carry.
            annotated: Whether items come as `Annotated`; None means False.
            context: Id, metadata and cancellation of the call; linked to it.
            instance_id: That instance and no other; None chooses as `generate` does.
            timeout: As for `random`, and the other two as well.
            first_item_timeout: See there.
            idle_timeout: See there.

        Returns:
            A future of the response stream.

        Raises:
            TypeError: an argument of the wrong type.
            ValueError: a limit that is negative or not a number.
            OverflowError: an id that is negative or over 64 bits.
            RuntimeError: no loop is running.
            RuntimeClosed: as for `random`.
            CallError: nobody took the call (from the future).

        Example:
            >>> import asyncio
            >>> from dynamo.runtime import DistributedRuntime
            >>> async def running_sum(stream):
            ...     total = 0
            ...     async for number in stream:
            ...         total += number
            ...         yield total
            >>> async def main():
            ...     runtime = DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp")
            ...     endpoint = runtime.endpoint("demo.math.sum")
            ...     serving = endpoint.serve_bidirectional_endpoint(running_sum)
            ...     client = await endpoint.client()
            ...     await client.wait_for_instances(timeout=5)
            ...     stream = await client.bidirectional([1, 2, 3], annotated=False)
            ...     print([total async for total in stream])
            ...     runtime.shutdown()
            ...     await serving
            >>> asyncio.run(main())
            [1, 3, 6]
        """
        selection = self._by_mode
        if instance_id is not None:
            selection = self._chooser.exactly(_check_id(instance_id))
        options = self._options(context, timeout, first_item_timeout, idle_timeout)
        source = iterator_of(requests)
        return self._call(selection, None, annotated, context, options, source)

    def _options(
        self,
        context: Context | None,
        timeout: float | None,
        first_item_timeout: float | None,
        idle_timeout: float | None,
        idempotent: bool = False,
        on_stream_lost: OnStreamLost | None = None,
    ) -> CallOptions:
        if context is None:
            deadline = inherited.get()
        elif isinstance(context, Context):
            deadline = context._state.deadline
        else:
            raise TypeError(
                f"argument 'context': expected a Context, not {type(context).__name__}"
            )
        limits = self._home.limits.of_call(
            timeout, first_item_timeout, idle_timeout, deadline
        )
        if limits is NO_LIMITS and idempotent is False and on_stream_lost is None:
            return NO_OPTIONS
        if not isinstance(idempotent, bool):
            raise TypeError(
                "argument 'idempotent': expected a bool, not "
                f"{type(idempotent).__name__}"
            )
        if on_stream_lost is not None:
            _check_plain("on_stream_lost", on_stream_lost)
        return CallOptions(limits, idempotent, on_stream_lost)

    def _call(
        self,
        selection: Selection,
        request: object,
        annotated: bool | None,
        context: Context | None,
        options: CallOptions,
        source: AsyncIterator[Any] | None = None,
    ) -> asyncio.Future[AsyncResponseStream]:
        if annotated is not None and not isinstance(annotated, bool):
            raise TypeError(
                f"argument 'annotated': expected a bool, not {type(annotated).__name__}"
            )
        running = asyncio.get_running_loop()
        state = None if context is None else context._state
        packed = None if source is not None else encode_value(request, "msgpack")
        sent = CallRequest(
            call_id=new_id() if state is None else state.id,
            value=request,
            packed=packed,
            metadata=_NO_METADATA if state is None else state.metadata.copy(),
            trace=None if state is None else state.trace,
            deadline=options.limits.deadline,
        )
        call = OutgoingCall(
            self._home.loop,
            self._home.lane,
            sent,
            selection,
            state,
            self._home.deadlines,
            annotated=bool(annotated),
            options=options,
            source=source,
        )
        if running is self._home.loop:
            self._home.check()
            return call.start()
        future = self._home.run(_started(call))
        if source is not None:
            future.add_done_callback(functools.partial(_let_go, call))
        return future


def _let_go(call: OutgoingCall, future: asyncio.Future[AsyncResponseStream]) -> None:
    """A call that was cancelled before it began has a source to close nevertheless."""
    if future.cancelled():
        call.cancel()


async def _matches(
    home: ClientHome, wanted: Wanted, timeout_s: float | None
) -> list[int]:
    # Holds the home, which a shutdown closes, also when the client is dropped.
    return await home.cards.wait(wanted, timeout_s)


async def _only_match(home: ClientHome, wanted: Wanted, timeout_s: float | None) -> int:
    (only,) = await home.cards.wait(wanted, timeout_s)
    return only


def _check_count(name: str, value: int) -> int:
    try:
        count = operator.index(value)
    except TypeError as error:
        raise TypeError(f"argument '{name}': {error}") from None
    if count < 0:
        raise OverflowError("can't convert negative int to unsigned")
    if count > _MAX_ID:
        raise OverflowError("int too big to convert: counts have 64 bits")
    return count


def _check_seconds(name: str, value: float | None) -> float | None:
    try:
        # Converts as float() does, but no text.
        return None if value is None else math.ldexp(value, 0)
    except TypeError as error:
        raise TypeError(f"argument '{name}': {error}") from None


async def _started(call: OutgoingCall) -> AsyncResponseStream:
    """For callers in other loops."""
    return await call.start()


def _check_plain(name: str, function: object) -> None:
    """Refuse at the call what would only fail when a stream has broken."""
    if not callable(function):
        raise TypeError(
            f"argument '{name}': expected a callable, not {type(function).__name__}"
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"argument '{name}': expected a plain function, not 'async def': it must "
            "return at once"
        )


def _check_id(instance_id: Any) -> int:
    try:
        number = operator.index(instance_id)
    except TypeError:
        raise TypeError(
            f"argument 'instance_id': expected an int, not {type(instance_id).__name__}"
        ) from None
    if number < 0:
        raise OverflowError("can't convert negative int to unsigned")
    if number > _MAX_ID:
        raise OverflowError("int too big to convert: ids have 64 bits")
    return number
