"""One outgoing call: choose, send, wait for the stream, receive, move elsewhere.

Owns a call from the client's method to the end of its stream, on the home loop.  Knows
no lane's bytes; the list of instances and the choice among them are handed in.

States of a call::

    CHOOSING --open--> SENT --on_started--> STREAMING --on_ended/failed/lost--> OVER
        ^               |                       |
        |<--retryable---+--on_refused           +--stop: reads on, then OVER
        |                                       +--cancel: OVER at once
        +-- cancel, stop, removal of the instance, a limit in time: OVER

    STREAMING --on_lost, going down, idle--> BROKEN --all was read--> CHOOSING
      (if no item came and that is allowed, or if the caller gives a request)

A call is no task: the events of its lane move it on.  Only until its request can be
sent it may need one: while a connection is made, and always on the call-home lane.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import functools
import inspect
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from dynamo.runtime._calls.deadlines import NO_LIMITS, CallClock, Limits, timed_out
from dynamo.runtime._calls.inbox import Inbox, on_loop, soon_on_loop
from dynamo.runtime._calls.pump import FarPump, Pump
from dynamo.runtime._calls.streams import AsyncResponseStream
from dynamo.runtime._routing.ejection import Failure
from dynamo.runtime._routing.retry import may_be_sent_again
from dynamo.runtime._sealed import override
from dynamo.runtime._transports.connection import spawn
from dynamo.runtime._wire.faults import exception_of_error, inhibits
from dynamo.runtime._wire.payload import encode_value, open_annotated, open_data
from dynamo.runtime.errors import (
    CallError,
    CallTimeout,
    ConnectionFailed,
    NoInstances,
    Refused,
    StreamBroken,
    StreamError,
    StreamTimeout,
    WorkerLost,
)

if TYPE_CHECKING:
    from dynamo.runtime._calls.context import ContextState
    from dynamo.runtime._calls.deadlines import Deadlines
    from dynamo.runtime._discovery.health import Health
    from dynamo.runtime._discovery.instances import InstanceSet
    from dynamo.runtime._routing.retry import RetryBudget
    from dynamo.runtime._transports import (
        CallHandle,
        CallRequest,
        ClientLane,
        InputSink,
    )
    from dynamo.runtime._wire.faults import ErrorObject
    from dynamo.runtime._wire.payload import Envelope
    from dynamo.runtime._wire.records import EndpointRecord

_log = logging.getLogger("dynamo.runtime.egress")

# A stopped worker closes the stream at once; one that does not is not waited for.
_STOP_LIMIT_S = 5.0
# What a connection may lack on this side: no fault of the instance.
_OURS = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
)
# A worker that drains leaves discovery before it takes its last calls.
_LEFT_LIMIT_S = 1.0
# One for all: each empty set takes 216 bytes.
_NOBODY: frozenset[int] = frozenset()

Choose = Callable[[frozenset[int]], "EndpointRecord"]
"""Picks an instance that is not among those already tried, or raises CallError."""


OnStreamLost = Callable[[int, StreamError], Any]
"""Told how many items were read and why no more come; gives a request that continues
them elsewhere, or None."""


class CallOptions(msgspec.Struct, frozen=True):
    """What the caller wants of a call besides an answer.

    Attributes:
        limits: How long it may take.
        idempotent: A handler may see the request twice.
        on_stream_lost: How to continue a stream that broke, or None.
    """

    limits: Limits = NO_LIMITS
    idempotent: bool = False
    on_stream_lost: OnStreamLost | None = None


NO_OPTIONS = CallOptions()


class Told(Protocol):
    """What one client keeps of what its instances said, and knows of who is there."""

    def withdraw(self, instance_id: int, reason: str) -> None:
        """An instance is not to be called for a while."""

    def overload(self, instance_id: int, duration_s: float) -> None:
        """An instance is to be left alone for so many seconds."""

    async def explained(self, error: NoInstances) -> NoInstances:
        """The same error, with what must be looked up first."""


class Selection:
    """How a call finds its instance: a choice, and what to tell of how it went.

    Args:
        choose: Picks an instance; raises `NoInstances` when there is none left.
        instances: The live view of the endpoint.
        health: Told what calls saw of the instances.
        in_flight: How many calls each instance has, by id; kept by the calls.
        client: Told what the instances said about themselves.
        budget: For moves beyond the first of a call.
        fixed: The caller named the instance: never move elsewhere.
    """

    __slots__ = (
        "budget",
        "choose",
        "client",
        "fixed",
        "health",
        "in_flight",
        "instances",
        "pid",
    )

    def __init__(
        self,
        choose: Choose,
        instances: InstanceSet,
        health: Health,
        in_flight: dict[int, int],
        client: Told,
        budget: RetryBudget,
        *,
        fixed: bool = False,
    ) -> None:
        self.choose = choose
        self.instances = instances
        self.health = health
        self.in_flight = in_flight
        self.client = client
        self.budget = budget
        self.fixed = fixed
        # Of the process that may end the calls.
        self.pid = os.getpid()

    def take(self, instance_id: int) -> None:
        """Count a call."""
        self.in_flight[instance_id] = self.in_flight.get(instance_id, 0) + 1
        if self.health.troubled:
            self.health.chosen(instance_id)

    def give_back(self, instance_id: int) -> None:
        """Count it no longer."""
        left = self.in_flight.pop(instance_id, 0) - 1
        if left > 0:
            self.in_flight[instance_id] = left
        if self.health.troubled:
            self.health.let_go(instance_id)

    def blame(
        self, instance_id: int, error: Exception, *, inhibits: bool = False
    ) -> None:
        """Draw the consequences of an error for the instance that it came from.

        Args:
            instance_id: That instance.
            error: What its caller gets.
            inhibits: The worker, or the lane, says that it will not be better soon.
        """
        failure = _failure_of(error, inhibits=inhibits)
        if failure is not None:
            self.health.failed(instance_id, failure)
        elif isinstance(error, CallError) and error.retry_after is not None:
            self.client.overload(instance_id, error.retry_after)
        elif inhibits or isinstance(error, Refused):
            self.client.withdraw(instance_id, str(error))


def _failure_of(error: Exception, *, inhibits: bool) -> Failure | None:
    """What this runtime saw an instance not do, as opposed to what the worker said."""
    if isinstance(error, ConnectionFailed) and error.phase == "connect":
        return None if _is_ours(error) else Failure.NO_CONNECTION
    if isinstance(error, (ConnectionFailed, WorkerLost, StreamBroken)):
        return Failure.CONNECTION_LOST
    if isinstance(error, CallTimeout) and inhibits:
        return Failure.NO_ANSWER
    if isinstance(error, (CallTimeout, StreamTimeout)):
        waited = error.facts.get("limit") in ("first_item_timeout", "idle_timeout")
        return Failure.NO_ITEM if waited else None
    return None


def _is_ours(error: BaseException | None) -> bool:
    """Whether a connection failed for something that this process lacks."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _OURS:
            return True
        error = error.__cause__
    return False


def _continuation(ask: OnStreamLost, items: int, error: StreamError) -> Any:
    request = ask(items, error)
    if inspect.isawaitable(request):
        if inspect.iscoroutine(request):
            request.close()
        raise TypeError(
            f"on_stream_lost returned a {type(request).__name__}: it must return the "
            "request itself, at once"
        )
    return request


def _for_reader(raised: BaseException, lost: StreamError) -> Exception:
    """What the caller's function raised, as something that a stream can raise."""
    unfit = isinstance(raised, (StopIteration, StopAsyncIteration))
    if unfit or not isinstance(raised, Exception):
        # The former would look like the end of the answer; a generator says the same.
        error = RuntimeError(f"on_stream_lost raised {type(raised).__name__}")
        error.__cause__ = raised
        return error
    if raised is not lost and raised.__context__ is None:
        raised.__context__ = lost
    return raised


class _Result(asyncio.Future[AsyncResponseStream]):
    """The awaited call: whoever cancels it cancels the call."""

    __slots__ = ("call",)

    call: OutgoingCall

    @override
    def cancel(self, msg: Any | None = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            self.call.cancel()
        return cancelled


class OutgoingCall:
    """The core of one call: what tables, tasks and futures hold.

    The user's `AsyncResponseStream` is a handle on it and can go at any time.
    """

    # Too many for the dicts of instances to share their keys.
    __slots__ = (
        "_annotated",
        "_attempts",
        "_broken",
        "_came",
        "_clock",
        "_context",
        "_counted",
        "_deadlines",
        "_failures",
        "_handle",
        "_lane",
        "_leaving",
        "_loop",
        "_moves",
        "_opening",
        "_options",
        "_over",
        "_pump",
        "_reached",
        "_readers",
        "_record",
        "_request",
        "_result",
        "_selection",
        "_stop_timer",
        "_stopped",
        "_streaming",
        "_tried",
        "_watching",
        "inbox",
        "reader",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        lane: ClientLane,
        request: CallRequest,
        selection: Selection,
        context: ContextState | None,
        deadlines: Deadlines,
        *,
        annotated: bool,
        options: CallOptions = NO_OPTIONS,
        source: AsyncIterator[Any] | None = None,
    ) -> None:
        self._loop = loop
        self._pump: Pump | FarPump | None = None
        if source is not None:
            self._pump = self._pump_of(source)
        self._lane = lane
        # None once it can no longer be sent again: it may be large, the stream long.
        self._request: CallRequest | None = request
        self._selection = selection
        self._context = context
        self._annotated = annotated
        self._options = options
        self._deadlines = deadlines
        self._clock: CallClock | None = None
        opener = open_annotated if annotated else open_data
        self.inbox = Inbox(loop, self._on_full, opener, self._on_unreadable)
        self._result: _Result | None = None
        self._handle: CallHandle | None = None
        self._record: EndpointRecord | None = None
        self._opening: asyncio.Task[None] | None = None
        self._watching = False
        self._leaving: asyncio.TimerHandle | None = None
        self._tried = _NOBODY
        self._attempts = 0
        self._moves = 0
        # Of the attempts that failed: whose they were, and why.
        self._failures: tuple[tuple[int, str], ...] = ()
        # How a stream that is being continued elsewhere broke.
        self._broken: StreamError | None = None
        # Items that came, with those that are nothing to the reader.
        self._came = 0
        # Of the tasks that have read, the latest.
        self.reader: asyncio.Task[Any] | None = None
        self._readers: tuple[asyncio.Task[Any], ...] = ()
        self._counted: int | None = None
        self._stop_timer: asyncio.TimerHandle | None = None
        self._reached = False
        self._streaming = False
        self._stopped = False
        self._over = False

    @property
    def instance_id(self) -> int | None:
        return self._record.instance_id if self._record else None

    def _pump_of(self, source: AsyncIterator[Any]) -> Pump | FarPump:
        caller = contextvars.copy_context()
        if asyncio.get_running_loop() is self._loop:
            return Pump(self._loop, source, caller, self._on_source_failed)
        return FarPump(self._loop, source, caller, self._on_source_failed)

    # Making the call.

    def start(self) -> asyncio.Future[AsyncResponseStream]:
        """Find an instance that takes the call.

        On the home loop.  Without a task where the lane needs nothing else: the request
        goes out at the end of this turn.  A connection that has to be made, and any
        request on the call-home lane, is waited for in one.

        Returns:
            A future of the stream, done when the handler runs; it raises a `CallError`
            if nobody took the call.  Cancelling it cancels the call.
        """
        result = self._result = _Result(loop=self._loop)
        result.call = self
        self.inbox.thread = get_ident()
        if self._context is not None:
            self._context.attach(self._on_context)
        self._selection.budget.deposit()
        limits = self._options.limits
        if limits is not NO_LIMITS and not self._over:
            self._clock = CallClock(self._deadlines, limits, self._on_limit)
            if limits.spent:
                # Nothing is sent that could not be answered in time.
                self._clock.check()
        self._go_on(None)
        return result

    def _go_on(self, failure: CallError | None) -> None:
        """Send the request to an instance that was not tried yet, or give up.

        Args:
            failure: Why the last one did not take it.
        """
        if failure is not None and self._clock is not None:
            self._clock.check()
        while not self._over:
            try:
                record = self._selection.choose(self._tried)
            except NoInstances as nobody:
                if failure is None:
                    self._opening = spawn(self._loop, self._explain(nobody))
                else:
                    # Those that are left were tried: the first hand account says more.
                    self._fail(failure)
                return
            except CallError as error:
                self._fail(error)
                return
            try:
                self._send_to(record)
            except Exception as error:  # noqa: BLE001 - it is forwarded to the caller
                if not self._may_move(error):
                    return
                failure = cast("CallError", error)
                if self._clock is not None:
                    self._clock.check()
            else:
                return

    def _send_to(self, record: EndpointRecord) -> None:
        self._record = record
        self.inbox.origin = record.instance_id
        assert self._request is not None
        self._attempts += 1
        self._counted = record.instance_id
        self._selection.take(record.instance_id)
        handle = self._lane.open_now(record, self._request, self)
        if handle is None:
            self._opening = spawn(self._loop, self._open(record))
            return
        self._handle = handle
        self._watching = True
        # Not `watch_removal`: it was chosen just now, so it is listed.
        self._selection.instances.removals[self] = record.instance_id

    async def _open(self, record: EndpointRecord) -> None:
        """Send the request where a connection must be made first."""
        assert self._request is not None
        try:
            handle = await self._lane.open(record, self._request, self)
        except asyncio.CancelledError:
            self._on_opening_cancelled()
            raise
        except Exception as error:  # noqa: BLE001 - it is forwarded to the caller
            self._opening = None
            self._not_taken(error)
        else:
            self._opening = None
            self._on_sent(handle)

    async def _explain(self, nobody: NoInstances) -> None:
        """Fail with an error that knows more than the choice did."""
        try:
            explained = await self._selection.client.explained(nobody)
        except asyncio.CancelledError:
            self._on_opening_cancelled()
            raise
        self._opening = None
        self._fail(explained)

    def _on_opening_cancelled(self) -> None:
        if self._opening is None:
            return  # by us
        # The program ends all tasks that it finds.
        if self._result is not None:
            self._result.cancel()
        else:
            self._cancel()

    def _on_sent(self, handle: CallHandle) -> None:
        assert self._record is not None
        if self._over:
            handle.kill()
            return
        self._handle = handle
        self._watching = True
        self._selection.instances.watch_removal(self._record.instance_id, self)

    def _not_taken(self, error: Exception, *, inhibits: bool = False) -> None:
        """There will be no stream from this instance; perhaps there is from another."""
        if not self._over and self._may_move(error, inhibits=inhibits):
            self._go_on(cast("CallError", error))

    def _may_move(self, error: Exception, *, inhibits: bool = False) -> bool:
        """Let go of an instance, and fail the call unless another may be tried."""
        assert self._record is not None
        late = isinstance(error, CallTimeout) and error.phase == "send"
        if late and self._clock is not None and self._clock.passes_now():
            # The lane knows when it should have been sent, but not whose limit that is.
            return False
        self._detach(error, inhibits=inhibits)
        if isinstance(error, CallError):
            self._note(error, self._record)
            if self._may_be_sent_again(error):
                self._tried |= {self._record.instance_id}
                return True
        self._fail(error)
        return False

    def _detach(self, error: Exception, *, inhibits: bool = False) -> None:
        """Let go of an instance for that reason; if it has the request, it hears so."""
        self._watch_no_more()
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.kill()
        if self._counted is not None:
            self._selection.blame(self._counted, error, inhibits=inhibits)
        self._count_no_more()
        self._reached = self._streaming = False

    def _may_be_sent_again(self, error: CallError) -> bool:
        # Who continues a broken answer elsewhere has said that it may run twice.
        idempotent = self._options.idempotent or self._broken is not None
        if not may_be_sent_again(error, idempotent=idempotent):
            return False
        if self._pump is not None and self._pump.started:
            # What was taken from the caller's stream cannot be taken again.
            return False
        return self._may_go_elsewhere(error)

    def _may_go_elsewhere(self, error: CallError) -> bool:
        if self._selection.fixed:
            return False
        self._moves += 1
        if self._moves == 1 or self._selection.budget.take(self._loop.time()):
            return True
        error.facts["retry_budget"] = "spent"
        return False

    def _note(self, error: CallError, record: EndpointRecord) -> None:
        error.instance_id = record.instance_id
        self._failures += ((record.instance_id, str(error)),)
        if self._request is not None:
            _log.debug("call %s: %s", self._request.call_id, error)

    def _fail(self, error: Exception) -> None:
        """The awaited call raises, or else the stream; nothing of the call is left."""
        result, self._result = self._result, None
        if result is None:
            if self._broken is not None and not isinstance(error, StreamError):
                self._broken.__cause__ = error
                error = self._broken
            self._finish(error)
            return
        self._describe(error)
        self._cancel()
        if not result.done():
            if isinstance(error, CallError):
                # Its frames hold the future that holds it: no cycle is left behind.
                error.__traceback__ = None
            result.set_exception(error)
            # A call whose result nobody looks at is no reason to complain.
            result.exception()

    def _describe(self, error: Exception) -> None:
        """Add what the call as a whole knows."""
        if isinstance(error, CallError):
            error.attempts = self._attempts
            if self._attempts > 1:
                error.facts["tried"] = list(self._failures)

    def _settle(self) -> None:
        """The awaited call returns the stream."""
        result, self._result = self._result, None
        if result is not None and not result.done():
            result.set_result(AsyncResponseStream._of(self))

    def _count_no_more(self) -> None:
        """The instance has one call less."""
        if self._counted is not None:
            self._selection.give_back(self._counted)
            self._counted = None

    def _interrupt(self) -> None:
        """Do not wait for a connection that nobody needs any more."""
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()

    # Limits in time.

    @property
    def _phase(self) -> str:
        if self._result is None:
            return "stream"
        if self._reached:
            return "start"
        if self._handle is not None:
            return "ack"
        return "choose" if self._record is None else "connect"

    def _on_limit(self, limit: str, seconds: float) -> None:
        """A limit of the caller has passed."""
        if self._stopped:
            self._give_up()
            return
        error = timed_out(
            limit,
            seconds,
            phase=self._phase,
            items=self._items_so_far(),
            instance_id=self.instance_id,
        )
        if limit == "idle_timeout":
            self._break_off(error)
        else:
            self._interrupt()
            self._detach(error)
            self._fail(error)

    # While the instance has the request, and nothing was heard of it.

    def _watch_no_more(self) -> None:
        if self._watching:
            self._watching = False
            self._selection.instances.removals.pop(self, None)
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None

    def on_removed(self) -> None:
        """The instance left discovery with our request; it may still take it."""
        if self._watching:
            self._leaving = self._loop.call_later(_LEFT_LIMIT_S, self._on_left)

    def _on_left(self) -> None:
        self._not_taken(
            WorkerLost(
                "Unavailable: Worker disconnected before response stream was "
                "established",
                facts={"reason": "the instance left discovery"},
            )
        )

    def _on_source_failed(self, error: Exception) -> None:
        """The caller's own stream of requests raised: its reader gets that error.

        Also when the handler has not started yet, so that it always comes from the
        stream and never from the awaited call.
        """
        if self._over:
            return
        if self._handle is not None:
            self._handle.kill()
        self._end(error)

    # CallEvents: what the lane reports.

    def on_input_wanted(self, sink: InputSink) -> None:
        if self._pump is not None:
            self._pump.start(sink)

    def on_input_room(self) -> None:
        if self._pump is not None:
            self._pump.made_room()

    def on_input_unwanted(self) -> None:
        if self._pump is not None:
            self._pump.stop()

    def on_reached(self) -> None:
        self._reached = True
        # From here on the connection tells more than discovery.
        self._watch_no_more()

    def on_started(self) -> None:
        if self._leaving is not None:
            self._watch_no_more()
        elif self._watching:
            self._watching = False
            self._selection.instances.removals.pop(self, None)
        if self._clock is not None:
            self._clock.started()
            if self._over:
                return
        self._reached = self._streaming = True
        options = self._options
        if not options.idempotent and options.on_stream_lost is None:
            self._request = None
        health = self._selection.health
        if health.troubled and self._record is not None:
            health.answered(self._record.instance_id)
        self._settle()

    def on_refused(self, error: Exception, *, inhibits: bool) -> None:
        self._not_taken(error, inhibits=inhibits)

    def on_items(self, items: Sequence[Envelope], size_bytes: int) -> None:
        if self._clock is not None and self._clock.minds_items:
            self._clock.item()
        self._came += len(items)
        self.inbox.put_all(items, size_bytes)

    def on_answer(self, item: Envelope) -> None:
        self.on_started()
        if self._over:
            return
        self._came += 1
        # As `on_ended`, with the item.
        if self._selection.health.troubled:
            self._note_completed()
        self._over = True
        self.inbox.put_last(item)
        self._release()

    def _items_so_far(self) -> int:
        """How many items came for the reader, whether it has read them or not."""
        if not self._annotated:
            self.inbox.sift()
        return self._came - self.inbox.skipped

    def _on_unreadable(self, failure: Exception) -> None:
        """An item whose turn has come makes no sense; the answer ends with it."""
        if self._handle is not None:
            self._handle.kill()
        self._finish(failure)

    def on_failed(self, error: ErrorObject) -> None:
        late = error.error_class == "DeadlineExceeded"
        if late and self._clock is not None and self._clock.passes_now():
            return
        failure = exception_of_error(error, instance_id=self.instance_id)
        self._note_completed()
        if inhibits(error):
            self._break_off(failure, inhibits=True)
        else:
            self._finish(failure)

    def on_ended(self) -> None:
        if self._selection.health.troubled:
            self._note_completed()
        self._end(None)

    def _note_completed(self) -> None:
        """The instance did its part, also if its handler failed."""
        health = self._selection.health
        if health.troubled and self._record is not None:
            health.completed(self._record.instance_id)

    def on_lost(self, text: str) -> None:
        if self._stopped:
            self._finish(None)
            return
        if self._streaming:
            self._break_off(
                StreamBroken(f"Unavailable: {text}", instance_id=self.instance_id)
            )
        else:
            self._not_taken(
                WorkerLost(
                    "Unavailable: Worker disconnected before response stream was "
                    "established"
                )
            )

    # Continuing a broken answer elsewhere.

    def _break_off(self, error: Exception, *, inhibits: bool = False) -> None:
        """The answer ends too early: have it continued, or raise the error."""
        self._detach(error, inhibits=inhibits)
        if self._clock is not None:
            self._clock.detached()
        if not isinstance(error, StreamError) or self._stopped:
            self._finish(error)
        elif not self._items_so_far() and self._may_be_sent_again(error):
            self._send_again(error)
        elif self._options.on_stream_lost is not None:
            # Who continues must know all that came, so that none comes twice.
            self.inbox.when_read(functools.partial(self._continue, error))
        else:
            self._finish(error)

    def _continue(self, error: StreamError) -> None:
        """All was read: have the caller say how to go on."""
        if self._over:
            return
        ask = self._options.on_stream_lost
        assert ask is not None
        if not self._may_go_elsewhere(error):
            self._finish(error)
            return
        try:
            request = _continuation(ask, self._items_so_far(), error)
            packed = None if request is None else encode_value(request, "msgpack")
        except BaseException as raised:
            # Whatever it is: nobody else would end the stream.
            self._finish(_for_reader(raised, error))
            if isinstance(raised, (KeyboardInterrupt, SystemExit)):
                raise
            return
        if packed is None:
            self._finish(error)
            return
        assert self._request is not None
        self._request = msgspec.structs.replace(
            self._request, value=request, packed=packed
        )
        self._send_again(error)

    def _send_again(self, error: StreamError) -> None:
        assert self._record is not None
        self._broken = error
        self._note(error, self._record)
        self._tried = frozenset((self._record.instance_id,))
        self._go_on(error)

    def _finish(self, error: Exception | None) -> None:
        """The stream is over; what was received can still be read."""
        if error is not None:
            self._describe(error)
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        self._over = True
        self.inbox.end(error)
        self._release()

    def _release(self) -> None:
        if self._result is not None:
            self._settle()
        if self._counted is not None:
            self._selection.give_back(self._counted)
            self._counted = None
        if self._watching:
            self._watch_no_more()
        if self._clock is not None:
            self._clock.stop()
        # Both hold each other: no cycle is left behind.
        self._handle = None
        if self._pump is not None:
            self._pump.stop()
        if self._stop_timer is not None:
            self._stop_timer.cancel()
        if self._context is not None:
            self._context.detach(self._on_context)
        self.reader = None
        readers, self._readers = self._readers, ()
        for reader in readers:
            reader.remove_done_callback(self._on_reader_done)

    # Stopping and cancelling.

    def _on_context(self, killed: bool) -> None:
        """The context was stopped or killed, in whatever thread."""
        on_loop(self._loop, self._cancel if killed else self._stop)

    def _stop(self) -> None:
        """Nobody wants more: end after what has arrived."""
        if self._stopped or self._over:
            return
        self._stopped = True
        if self._handle is not None:
            self._handle.stop()
        if self._pump is not None:
            self._pump.stop()
        if self._streaming:
            self._stop_timer = self._loop.call_later(_STOP_LIMIT_S, self._give_up)
        else:
            self._interrupt()
            # No stream yet, and none needed: the caller gets an empty one, and the lane
            # alone sees to it that the worker hears of the stop.
            self._finish(None)

    def _give_up(self) -> None:
        """The worker did not end a stopped stream: end it here."""
        if self._handle is not None:
            self._handle.kill()
        self._finish(None)

    def cancel(self) -> None:
        """End the call from whatever thread."""
        on_loop(self._loop, self._cancel)

    def _cancel(self) -> None:
        if self._over:
            self.inbox.end(None, discard=True)
            return
        self._over = True
        self._stopped = True
        self._interrupt()
        if self._handle is not None:
            self._handle.kill()
        self.inbox.end(None, discard=True)
        self._release()

    def dropped(self) -> None:
        """The user's last reference went; any thread, perhaps after the loop closed.

        Never cancels here and now: a finalizer may run in the middle of anything.
        """
        if not self._over and os.getpid() == self._selection.pid:
            soon_on_loop(self._loop, self._cancel)

    # Reading.

    def note_reader(self, reader: asyncio.Task[Any] | None) -> None:
        """Remember who reads, for `_on_reader_done`."""
        if self._over:
            return  # or a reader that fails would be held by what its error holds
        self.reader = reader
        if reader is not None and reader not in self._readers:
            self._readers += (reader,)
            reader.add_done_callback(self._on_reader_done)

    def _on_reader_done(self, reader: asyncio.Task[Any]) -> None:
        self.reader = None
        self._readers = tuple(one for one in self._readers if one is not reader)
        if reader.cancelled():
            self.cancel()

    def _on_full(self, full: bool) -> None:
        if self._handle is None or self._over:
            return
        if self._clock is not None:
            self._clock.reader_behind(full)
        if full:
            self._handle.pause()
        else:
            self._handle.resume()
