"""One outgoing call: choose, send, wait for the stream, receive, move elsewhere.

Owns a call from the client's method to the end of its stream, on the home loop.  Knows
no lane's bytes; the list of instances and the choice among them are handed in.

States of a call::

    CHOOSING --open--> SENT --on_started--> STREAMING --on_ended/failed/lost--> OVER
        ^               |                       |
        |<--retryable---+--on_refused           +--stop: reads on, then OVER
        |                                       +--cancel: OVER at once
        +-- cancel, stop, removal of the instance: OVER
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import logging
import os
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from dynamo.runtime._calls.inbox import Inbox, on_loop, soon_on_loop
from dynamo.runtime._calls.pump import FarPump, Pump
from dynamo.runtime._calls.streams import Annotated
from dynamo.runtime._routing.ejection import Failure
from dynamo.runtime._wire.faults import exception_of_error, inhibits
from dynamo.runtime.errors import (
    CallError,
    CallTimeout,
    ConnectionFailed,
    NoInstances,
    Refused,
    StreamBroken,
    WorkerLost,
)

if TYPE_CHECKING:
    from dynamo.runtime._calls.context import ContextState
    from dynamo.runtime._discovery.health import Health
    from dynamo.runtime._discovery.instances import InstanceSet
    from dynamo.runtime._transports import (
        CallHandle,
        CallRequest,
        ClientLane,
        InputSink,
    )
    from dynamo.runtime._wire.faults import ErrorObject
    from dynamo.runtime._wire.payload import AnnotatedItem
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

Choose = Callable[[frozenset[int]], "EndpointRecord"]
"""Picks an instance that is not among those already tried, or raises CallError."""


class Selection:
    """How a call finds its instance: a choice, and what to tell of how it went.

    Args:
        choose: Picks an instance; raises `NoInstances` when there is none left.
        instances: The live view of the endpoint.
        health: Told what calls saw of the instances.
        in_flight: How many calls each instance has, by id; kept by the calls.
        withdraw: Told the id of an instance that said it is not to be called, and how.
        overload: Told the id and for how many seconds to leave it alone.
        fixed: The caller named the instance: never move elsewhere.
    """

    __slots__ = (
        "choose",
        "fixed",
        "health",
        "in_flight",
        "instances",
        "overload",
        "withdraw",
    )

    def __init__(
        self,
        choose: Choose,
        instances: InstanceSet,
        health: Health,
        in_flight: dict[int, int],
        withdraw: Callable[[int, str], None],
        overload: Callable[[int, float], None],
        *,
        fixed: bool = False,
    ) -> None:
        self.choose = choose
        self.instances = instances
        self.health = health
        self.in_flight = in_flight
        self.withdraw = withdraw
        self.overload = overload
        self.fixed = fixed

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
            self.overload(instance_id, error.retry_after)
        elif inhibits or isinstance(error, Refused):
            self.withdraw(instance_id, str(error))


def _failure_of(error: Exception, *, inhibits: bool) -> Failure | None:
    """What this runtime saw an instance not do, as opposed to what the worker said."""
    if isinstance(error, ConnectionFailed) and error.phase == "connect":
        return None if _is_ours(error) else Failure.NO_CONNECTION
    if isinstance(error, (ConnectionFailed, WorkerLost, StreamBroken)):
        return Failure.CONNECTION_LOST
    if isinstance(error, CallTimeout) and inhibits:
        return Failure.NO_ANSWER
    return None


def _is_ours(error: BaseException | None) -> bool:
    """Whether a connection failed for something that this process lacks."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _OURS:
            return True
        error = error.__cause__
    return False


class OutgoingCall:
    """The core of one call: what tables, tasks and futures hold.

    The user's `AsyncResponseStream` is a handle on it and can go at any time.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        lane: ClientLane,
        request: CallRequest,
        selection: Selection,
        context: ContextState | None,
        *,
        annotated: bool,
        source: AsyncIterator[Any] | None = None,
    ) -> None:
        self._loop = loop
        self._pump: Pump | FarPump | None = None
        if source is not None:
            self._pump = self._pump_of(source)
        self._lane = lane
        self._request = request
        self._selection = selection
        self._context = context
        self._annotated = annotated
        self._pid = os.getpid()
        self._inbox = Inbox(loop, self._on_full)
        self._handle: CallHandle | None = None
        self._sent = False
        self._record: EndpointRecord | None = None
        self._established: asyncio.Future[None] | None = None
        self._opening: asyncio.Task[Any] | None = None
        self._interrupted = False
        self._forget_removal: Callable[[], None] | None = None
        self._attempts = 0
        self._readers: set[asyncio.Task[Any]] = set()
        self._counted: int | None = None
        self._stop_timer: asyncio.TimerHandle | None = None
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

    async def start(self) -> None:
        """Find an instance that takes the call; returns when its handler runs.

        Raises:
            CallError: nobody took it.
        """
        if self._context is not None:
            self._context.subscribe(self._on_context)
        try:
            await self._start()
        except BaseException:
            self._cancel()
            raise
        if not self._sent:
            # Stopped before anything was sent: the caller gets an empty stream.
            self._cancel()

    async def _start(self) -> None:
        tried: set[int] = set()
        failure: CallError | None = None
        while not self._stopped:
            try:
                record = self._selection.choose(frozenset(tried))
            except NoInstances:
                if failure is None:
                    raise
                # Those that are left were tried: the first hand account says more.
                raise failure from failure.__cause__
            tried.add(record.instance_id)
            self._attempts = len(tried)
            try:
                await self._attempt(record)
            except CallError as error:
                self._note(error, record)
                if not error.retryable or self._selection.fixed:
                    raise
                if self._pump is not None and self._pump.started:
                    # What it took from the caller cannot be taken again.
                    raise
                failure = error
            else:
                return

    def _note(self, error: CallError, record: EndpointRecord) -> None:
        error.instance_id = record.instance_id
        error.attempts = self._attempts
        _log.debug("call %s: %s", self._request.call_id, error)

    async def _attempt(self, record: EndpointRecord) -> None:
        self._record = record
        self._count(record.instance_id)
        established = self._established = self._loop.create_future()
        try:
            self._handle = await self._open(record)
            self._sent = self._handle is not None
            if self._sent:
                self._forget_removal = self._selection.instances.watch_removal(
                    record.instance_id, self._on_removed
                )
                await established
        except BaseException:
            if self._handle is not None:
                self._handle.kill()
                self._handle = None
            self._count(None)
            raise
        finally:
            self._watch_no_more()
            self._established = None
            if established.done() and not established.cancelled():
                established.exception()

    async def _open(self, record: EndpointRecord) -> CallHandle | None:
        """Send the request; None if the call was stopped before it went out."""
        self._opening = asyncio.current_task()
        try:
            return await self._lane.open(record, self._request, self)
        except asyncio.CancelledError:
            if not self._interrupted or _others_cancelled(self._opening):
                raise
            return None
        except CallError as error:
            self._selection.blame(record.instance_id, error)
            raise
        finally:
            self._opening = None

    def _interrupt(self) -> None:
        """Do not wait for a connection that nobody needs any more."""
        if self._opening is not None and not self._interrupted:
            self._interrupted = True
            self._opening.cancel()

    def _watch_no_more(self) -> None:
        forget, self._forget_removal = self._forget_removal, None
        if forget is not None:
            forget()

    def _count(self, instance_id: int | None) -> None:
        """Count the call for this instance and no other."""
        if self._counted is not None:
            self._selection.give_back(self._counted)
        self._counted = instance_id
        if instance_id is not None:
            self._selection.take(instance_id)

    def _settle(self, error: Exception | None) -> None:
        """Let the awaited call go on."""
        established = self._established
        if established is None or established.done():
            return
        if error is None:
            established.set_result(None)
        else:
            established.set_exception(error)

    def _on_removed(self) -> None:
        """The instance left discovery with our request; it may still take it."""
        timer = self._loop.call_later(_LEFT_LIMIT_S, self._not_taken)
        self._forget_removal = timer.cancel

    def _not_taken(self) -> None:
        self._settle(
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
        # From here on the connection tells more than discovery.
        self._watch_no_more()

    def on_started(self) -> None:
        self._streaming = True
        health = self._selection.health
        if health.troubled and self._record is not None:
            health.answered(self._record.instance_id)
        self._settle(None)

    def on_refused(self, error: Exception, *, inhibits: bool) -> None:
        if self._record is not None:
            self._selection.blame(self._record.instance_id, error, inhibits=inhibits)
        self._settle(error)

    def on_item(self, item: AnnotatedItem, size_bytes: int) -> None:
        if self._annotated:
            self._inbox.put(Annotated._of(item), size_bytes)
        elif item.data is not None:
            self._inbox.put(item.data, size_bytes)

    def on_failed(self, error: ErrorObject) -> None:
        raised = exception_of_error(error, instance_id=self.instance_id)
        self._note_completed()
        if inhibits(error) and self.instance_id is not None:
            self._selection.blame(self.instance_id, raised, inhibits=True)
        self._finish(raised)

    def on_ended(self) -> None:
        self._note_completed()
        self._finish(None)

    def _note_completed(self) -> None:
        """The instance did its part, also if its handler failed."""
        health = self._selection.health
        if health.troubled and self._record is not None:
            health.completed(self._record.instance_id)

    def on_lost(self, text: str) -> None:
        if self._stopped:
            self._finish(None)
            return
        error: CallError
        if self._streaming:
            error = StreamBroken(f"Unavailable: {text}", instance_id=self.instance_id)
        else:
            error = WorkerLost(
                "Unavailable: Worker disconnected before response stream was "
                "established"
            )
        if self._record is not None:
            self._selection.blame(self._record.instance_id, error)
        if self._streaming:
            self._finish(error)
        else:
            self._settle(error)

    def _finish(self, error: Exception | None) -> None:
        """The stream is over; what was received can still be read."""
        if isinstance(error, CallError):
            error.attempts = self._attempts
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        self._over = True
        self._inbox.end(error)
        self._settle(None)
        self._release()

    def _release(self) -> None:
        self._count(None)
        # Both hold each other: no cycle is left behind.
        self._handle = None
        if self._pump is not None:
            self._pump.stop()
        if self._stop_timer is not None:
            self._stop_timer.cancel()
        if self._context is not None:
            self._context.unsubscribe(self._on_context)
        readers, self._readers = self._readers, set()
        for reader in readers:
            reader.remove_done_callback(self._on_reader_done)

    # Stopping and cancelling.

    def _on_context(self, killed: bool) -> None:
        """The context was stopped or killed, in whatever thread."""
        on_loop(self._loop, self.cancel if killed else self._stop)

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
            self._inbox.end(None, discard=True)
            return
        self._over = True
        self._stopped = True
        self._interrupt()
        if self._handle is not None:
            self._handle.kill()
        self._inbox.end(None, discard=True)
        self._settle(None)
        self._release()

    def dropped(self) -> None:
        """The user's last reference went; any thread, perhaps after the loop closed.

        Never cancels here and now: a finalizer may run in the middle of anything.
        """
        if not self._over and os.getpid() == self._pid:
            soon_on_loop(self._loop, self._cancel)

    # Reading.

    def step(self) -> asyncio.Future[Any]:
        """The next item; remembers who reads, for `_on_reader_done`."""
        if not self._over:
            reader = asyncio.current_task()
            if reader is not None and reader not in self._readers:
                self._readers.add(reader)
                reader.add_done_callback(self._on_reader_done)
        return self._inbox.step()

    def _on_reader_done(self, reader: asyncio.Task[Any]) -> None:
        self._readers.discard(reader)
        if reader.cancelled():
            self.cancel()

    def _on_full(self, full: bool) -> None:
        if self._handle is None or self._over:
            return
        if full:
            self._handle.pause()
        else:
            self._handle.resume()


def _others_cancelled(task: asyncio.Task[Any] | None) -> bool:
    """Whether somebody else cancelled a task that we cancelled as well."""
    # Up to Python 3.10 nobody counts.
    uncancel: Callable[[], int] | None = getattr(task, "uncancel", None)
    return uncancel is not None and uncancel() > 0
