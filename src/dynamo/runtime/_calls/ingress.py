"""One incoming request: admit, decode, run the handler, stream its items, end.

Owns the tasks that drive handlers.  Only the task that drives a handler closes it::

    stop, kill, or the deadline of the call
                 --> the context says so, the reply is closed
                 --> grace: the handler may end by itself
                 --> its task is cancelled, the generator closed, bounded
                 --> what does not end is reported by name

Knows no lane's bytes; answers through a `ReplyStream`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from types import AsyncGeneratorType
from typing import TYPE_CHECKING, Any

from dynamo.runtime._calls.context import Context, ContextState
from dynamo.runtime._calls.deadlines import Deadlines, inherited
from dynamo.runtime._calls.handlers import Handler, ShapeError
from dynamo.runtime._calls.inbox import Inbox, on_loop
from dynamo.runtime._calls.items import ItemError, encode_item, has_data
from dynamo.runtime._calls.streams import PyAsyncRequestStream, ResponseSender
from dynamo.runtime._transports import Rejection
from dynamo.runtime._transports.connection import spawn
from dynamo.runtime._wire.faults import (
    error_of_envelope,
    error_of_exception,
    error_of_refusal,
)
from dynamo.runtime._wire.payload import decode_value
from dynamo.runtime.errors import CallError, InvalidArgument, RemoteProtocolError

if TYPE_CHECKING:
    import contextvars

    from dynamo.runtime._calls.admission import Admits
    from dynamo.runtime._calls.context import Drain
    from dynamo.runtime._config import RuntimeConfig
    from dynamo.runtime._transports import (
        IncomingCall,
        IncomingRequest,
        InputStream,
        ReplyStream,
    )
    from dynamo.runtime._wire.faults import ErrorObject

_log = logging.getLogger("dynamo.runtime.ingress")

# A handler that never awaits gives way to the loop after this many bytes of items.
_GIVE_WAY_BYTES = 64 * 1024
# What a small value costs beyond its bytes.
_FRAME_BYTES = 64
# These are reported like any other and go on.  Raised where they were caught: a frame
# that raised what it was given would hold it, which holds the frame.
_GOING_ON = (asyncio.CancelledError, KeyboardInterrupt, SystemExit)
# The caller ends a call at its deadline itself; we do if nothing of that has come.
_DEADLINE_SLACK_S = 0.02
# A handler that has not looked at its context since it was stopped does not know.
_UNAWARE_GRACE_S = 0.05


class EndpointIngress:
    """All requests of one served endpoint.

    Args:
        loop: The home loop, on which handlers run.
        path: What the requests name; for log lines and refusals.
        handler: The user's callable.
        admission: Who decides how many run and wait.
        base: The context variables with which every call starts.
        drain: Tells handlers that the worker is on its way out.
        streamed: Whether the handler takes a stream of requests instead of one.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        path: str,
        handler: Handler,
        config: RuntimeConfig,
        admission: Admits,
        base: contextvars.Context,
        drain: Drain | None = None,
        *,
        streamed: bool,
    ) -> None:
        self.loop = loop
        self.path = path
        self.handler = handler
        self.streamed = streamed
        self.config = config
        self.admission = admission
        self.drain = drain
        self.deadlines = Deadlines(loop)
        self._base = base
        # A handler of another endpoint may be the one who serves this one.
        base.run(inherited.set, None)
        self._runs: set[_Run] = set()
        # What can be told without a call was told when the endpoint was served.
        self._shape_told = handler.complaint() is not None
        self._draining = False
        self._idle: list[asyncio.Future[None]] = []

    @property
    def in_flight(self) -> int:
        return len(self._runs)

    def offer(self, call: IncomingCall) -> Rejection | None:
        """Take a request, or say why not."""
        if self._draining:
            return Rejection(f"Server unavailable: endpoint {self.path} is draining")
        rejection = self.admission.reserve()
        if rejection is not None:
            return rejection
        run = _Run(self, call)
        self._runs.add(run)
        run.begin(self._base)
        return None

    def ended(self, run: _Run) -> None:
        """A request is over, whatever way."""
        self._runs.discard(run)
        if not self._runs:
            waiting, self._idle = self._idle, []
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(None)

    def refused(self, error: ShapeError) -> None:
        """The callable returned something that is no asynchronous iterator."""
        if not self._shape_told:
            self._shape_told = True
            _log.warning(
                "handler %s of %s cannot work, calls are refused (told once): %s",
                self.handler.name,
                self.path,
                error,
            )

    def refuse_new(self) -> None:
        """Take no more requests; those in flight go on."""
        self._draining = True

    async def idle(self) -> None:
        """Wait until no request is in flight."""
        await self.when_idle()

    def when_idle(self) -> asyncio.Future[None]:
        """Done as soon as no request is in flight."""
        waiter: asyncio.Future[None] = self.loop.create_future()
        if self._runs:
            self._idle.append(waiter)
        else:
            waiter.set_result(None)
        return waiter

    def drives(self, task: asyncio.Task[Any]) -> bool:
        """Whether that task runs one of our requests; in any thread."""
        return any(run.runs_in(task) for run in list(self._runs))

    def stop_all(self, *, killed: bool) -> None:
        """Stop every request in flight; ``killed`` leaves them no grace."""
        for run in list(self._runs):
            if killed:
                run.cut()
            else:
                run.on_stop(killed=False)


class _Run:
    """One request from its ack to the end of its answer.

    The lane's `ReplyEvents` and `InputEvents`, and the `ItemSink` of a push-mode
    handler.
    """

    __slots__ = (
        "_call",
        "_codec",
        "_endpoint",
        "_inbox",
        "_input",
        "_loop",
        "_over",
        "_ran",
        "_reply",
        "_started",
        "_state",
        "_task",
        "_timer",
        "_writable",
        "due_at",
    )

    def __init__(self, endpoint: EndpointIngress, call: IncomingCall) -> None:
        self.due_at = math.inf
        self._endpoint = endpoint
        self._loop = endpoint.loop
        self._call = call
        self._state: ContextState | None = None
        self._reply: ReplyStream | None = None
        self._input: InputStream | None = None
        self._inbox: Inbox | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._writable: asyncio.Future[None] | None = None
        self._codec = "msgpack"
        self._ran = False
        self._started = False
        # Nothing more is sent: complete, failed, refused, stopped or lost.
        self._over = False

    def begin(self, base: contextvars.Context) -> None:
        self._task = spawn(self._loop, self._run(), base)
        # A task that is cancelled before its first step never takes it.
        self._task.add_done_callback(self._not_begun)

    def _not_begun(self, task: asyncio.Task[None]) -> None:
        self._end()

    def runs_in(self, task: asyncio.Task[Any]) -> bool:
        return self._task is task

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.due_at != math.inf:
            self._endpoint.deadlines.watched.discard(self)
        self._endpoint.admission.release(ran=self._ran)
        if self._state is not None:
            self._state.owner = None
        if self._inbox is not None:
            self._inbox.end(None)
        if self._input is not None:
            self._input.close()
        if self._reply is not None and not self._over:
            # Reached only when the task was cut off before it could end the stream.
            self._reply.drop()
        # They hold us: no cycle is left behind.  A task that was cancelled holds the
        # frames of the handler, and with them its last item.
        self._input = self._reply = self._task = None
        self._endpoint.ended(self)

    # ReplyEvents and InputEvents

    def on_stop(self, *, killed: bool) -> None:
        if self._state is None:
            if self._task is not None:
                self._task.cancel()
        elif killed:
            self._state.kill()
        else:
            self._state.stop()

    def cut(self) -> None:
        """The worker ends: no more time to end by itself, or for a cleanup."""
        self.on_stop(killed=True)
        if self._ran:
            if self._timer is not None:
                self._timer.cancel()
            self._cancel()

    def on_writable(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def on_input(self, value: object, size_bytes: int) -> None:
        if self._inbox is not None:
            self._inbox.put(value, size_bytes)

    def on_input_end(self) -> None:
        if self._inbox is not None:
            self._inbox.end(None)

    def _on_input_full(self, full: bool) -> None:
        if self._input is not None:
            if full:
                self._input.pause()
            else:
                self._input.resume()

    # Stopping

    def _on_context(self, killed: bool) -> None:
        """The context was stopped: by the caller, by a parent call, by the handler."""
        on_loop(self._loop, self._stop)

    def _stop(self) -> None:
        if self._task is None:
            return  # told in another thread, it comes after the end
        self.on_input_end()
        if not self._over:
            self._over = True
            if self._reply is not None:
                self._reply.drop()
        self.on_writable()
        if self._timer is not None:
            return  # it is on its way out, with a limit
        if self._ran:
            self._timer = self._loop.call_later(_UNAWARE_GRACE_S, self._grace_over)
        else:
            self._task.cancel()

    def _obey(self, deadline: float) -> None:
        """End at the deadline, also if the caller does not say so."""
        inherited.set(deadline)
        self.due_at = deadline + _DEADLINE_SLACK_S
        self._endpoint.deadlines.watch(self)

    def look(self, now: float) -> None:
        """The deadline has passed, and the caller has not ended the call."""
        self.due_at = math.inf
        self._endpoint.deadlines.watched.discard(self)
        assert self._state is not None
        if self._reply is not None:
            late = TimeoutError("the deadline of the call has passed")
            self._fail(self._reply, error_of_exception(late))
        self._state.kill()

    def _grace_over(self) -> None:
        """Cancel a handler that does not know; leave time to one that does."""
        assert self._state is not None
        rest_s = self._endpoint.config.cancel_grace_s - _UNAWARE_GRACE_S
        if self._state.noticed and rest_s > 0:
            self._timer = self._loop.call_later(rest_s, self._cancel)
        else:
            self._cancel()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._timer = self._loop.call_later(
            self._endpoint.config.close_timeout_s, self._report_stubborn
        )

    def _report_stubborn(self) -> None:
        _log.error(
            "handler %s of %s does not end: it was cancelled or closed, and %g s later "
            "still runs; does it swallow CancelledError, or wait in a 'finally'?",
            self._endpoint.handler.name,
            self._endpoint.path,
            self._endpoint.config.close_timeout_s,
        )
        if self._task is not None:
            self._task.cancel()

    # Running

    async def _run(self) -> None:
        """The task of the request; one coroutine, for each takes part in every step."""
        assert self._task is not None
        self._task.remove_done_callback(self._not_begun)
        try:
            try:
                request = self._look_into()
            except RemoteProtocolError as error:
                await self._answer_unreadable(error)
                return
            if not (self._open_now() or await self._open()):
                return
            if not self._endpoint.admission.run_now():
                await self._endpoint.admission.run()
            self._ran = True
            assert self._reply is not None
            iterator = self._call_handler(request, self._reply)
            if iterator is None:
                return
            # The request may be large, and the handler may let go of it.
            del request
            try:
                await self._stream(iterator, self._reply)
            finally:
                # A generator that has ended has nothing left to close.
                if type(iterator) is not AsyncGeneratorType or iterator.ag_frame:
                    await self._close(iterator)
        except Exception:  # noqa: BLE001 - a task that nobody waits for
            _log.exception(
                "request on %s ended in a bug of the runtime", self._endpoint.path
            )
        finally:
            self._end()

    def _look_into(self) -> IncomingRequest:
        """Read the request, and have a context for it.

        Raises:
            RemoteProtocolError: it makes no sense.
        """
        request = self._call.decode()
        self._check_kind(request)
        self._codec = request.codec
        self._state = ContextState(
            request.call_id,
            request.metadata,
            request.trace,
            deadline=request.deadline,
            owner=self._on_context,
            drain=self._endpoint.drain,
        )
        if request.deadline is not None:
            self._obey(request.deadline)
        return request

    def _check_kind(self, request: IncomingRequest) -> None:
        if self._endpoint.streamed == (request.body is None):
            return
        takes, sends = "a single request", "a stream of requests"
        if self._endpoint.streamed:
            takes, sends = sends, takes
        raise RemoteProtocolError(
            f"endpoint {self._endpoint.path} takes {takes}, the call sends {sends}"
        )

    def _open_now(self) -> bool:
        """Have the way back, if it stands; a stopped call takes the slow one."""
        if self._endpoint.streamed:
            return False
        self._reply = self._call.open_now(self)
        return self._reply is not None and not self._over

    async def _open(self) -> bool:
        """Reach the caller: first its input, then the way back."""
        try:
            if self._endpoint.streamed:
                self._inbox = Inbox(self._loop, self._on_input_full)
                self._input = await self._call.open_input(self)
            self._reply = await self._call.open(self)
        except CallError as error:
            self._over = True
            _log.warning(
                "cannot answer a request on %s: %s (%s); is the address that the "
                "client announced reachable from here? "
                "DYN_TCP_RESPONSE_STREAM_HOST sets it there",
                self._endpoint.path,
                error,
                error.facts.get("reason"),
            )
            return False
        if self._over:
            # Stopped before there was a way back; the caller still waits for the end.
            self._reply.drop()
        return not self._over

    async def _answer_unreadable(self, error: RemoteProtocolError) -> None:
        """A request that makes no sense gets an error, not silence."""
        _log.warning("unreadable request on %s: %s", self._endpoint.path, error)
        self._state = ContextState("", {})
        try:
            reply = self._reply = await self._call.open(self)
        except CallError as unreachable:
            self._over = True
            _log.warning("and its sender cannot be told: %s", unreachable)
            return
        self._codec = reply.codec
        self._fail(reply, error_of_exception(ValueError(str(error))))

    def _call_handler(
        self, request: IncomingRequest, reply: ReplyStream
    ) -> AsyncIterator[Any] | None:
        """The handler's iterator, or None after saying why there is none."""
        if self._over:
            return None
        assert self._state is not None
        handler = self._endpoint.handler
        try:
            return handler.call(
                self._argument(request),
                Context._of(self._state) if handler.takes_context else None,
                ResponseSender._of(self) if handler.pushes else None,
            )
        except RemoteProtocolError as error:
            _log.warning("unreadable request on %s: %s", self._endpoint.path, error)
            self._fail(reply, error_of_exception(ValueError(str(error))))
        except ShapeError as error:
            self._endpoint.refused(error)
            self._refuse(reply, error.cause)
        except _GOING_ON as error:
            self._handler_failed(reply, error)
            raise
        except BaseException as error:  # noqa: BLE001 - whatever the user's code raises
            self._handler_failed(reply, error)
        return None

    def _argument(self, request: IncomingRequest) -> object:
        if self._inbox is not None:
            return PyAsyncRequestStream._of(self._inbox)
        body, request.body = request.body, None
        assert body is not None
        return decode_value(body, request.codec)

    async def _stream(self, iterator: AsyncIterator[Any], reply: ReplyStream) -> None:
        """Send what the handler yields until it ends, fails, or nobody wants more."""
        unseen_bytes = 0
        told = False
        silent = True
        codec = self._codec
        self._start(reply)
        encode = self._refuse_yielded if self._endpoint.handler.pushes else encode_item
        try:
            async for value in iterator:
                if self._over:
                    if told:
                        return
                    # As the genuine worker does: one more step in which a handler that
                    # looks at its context can end by itself.
                    told = True
                    continue
                body = encode(codec, value)
                if silent:
                    silent = self._note_first_token(value)
                if reply.item(body):
                    await self._until_writable(reply)
                unseen_bytes += len(body) + _FRAME_BYTES
                if unseen_bytes >= _GIVE_WAY_BYTES:
                    unseen_bytes = 0
                    await asyncio.sleep(0)
        except ItemError as error:
            self._log_unsendable(error)
            self._fail(reply, error.error)
        except _GOING_ON as error:
            self._handler_failed(reply, error)
            raise
        except BaseException as error:  # noqa: BLE001 - whatever the user's code raises
            self._handler_failed(reply, error)
        else:
            self._finish(reply)

    def _note_first_token(self, value: object) -> bool:
        """Whether the first item with data is still to come."""
        assert self._state is not None
        if not self._state.has_first_token and has_data(value):
            self._state.first_token()
        return not self._state.has_first_token

    def _refuse_yielded(self, codec: str, value: object) -> bytes:
        name = self._endpoint.handler.name
        text = f"critical error: push-mode handler yielded: {name} has a parameter "
        text += "response_sender, so it sends through that and yields nothing"
        raise ItemError(error_of_envelope(None, [text]))

    def _log_unsendable(self, error: ItemError) -> None:
        _log.error(
            "handler %s of %s: %s",
            self._endpoint.handler.name,
            self._endpoint.path,
            error,
        )

    async def _until_writable(self, reply: ReplyStream) -> None:
        while reply.paused and not self._over:
            self._writable = self._loop.create_future()
            await self._writable

    async def _close(self, iterator: AsyncIterator[Any]) -> None:
        """Let a generator run its ``finally`` here and now, in the task that drove it."""
        aclose: Callable[[], Any] | None = getattr(iterator, "aclose", None)
        if aclose is None:
            return
        if self._timer is not None:
            # What is left of a grace must not cut a cleanup short.
            self._timer.cancel()
        self._timer = self._loop.call_later(
            self._endpoint.config.close_timeout_s, self._report_stubborn
        )
        try:
            await aclose()
        except Exception:  # noqa: BLE001 - the user's cleanup may raise anything
            _log.exception(
                "handler %s of %s failed while it was being closed",
                self._endpoint.handler.name,
                self._endpoint.path,
            )

    # Starting and ending the answer

    def _start(self, reply: ReplyStream) -> None:
        """A function that pushes may begin before it has returned an iterator."""
        if not self._started and not self._over:
            self._started = True
            reply.start()

    def _refuse(self, reply: ReplyStream, cause: Exception) -> None:
        text, error = error_of_refusal(cause)
        if self._started:
            self._fail(reply, error)
        elif not self._over:
            self._over = True
            reply.refuse(text, error)

    def _handler_failed(self, reply: ReplyStream, error: BaseException) -> None:
        """Report what the handler raised."""
        if not self._over:
            self._log_failure(error)
            self._fail(reply, error_of_exception(error))

    def _log_failure(self, error: BaseException) -> None:
        name, path = self._endpoint.handler.name, self._endpoint.path
        if isinstance(error, asyncio.CancelledError):
            # As a rule the program ends, with any number of calls in flight.
            _log.info("handler %s of %s was cancelled", name, path)
        elif isinstance(error, InvalidArgument):
            # The caller's mistake, in the words that the caller gets.
            _log.warning("handler %s of %s refused a request: %s", name, path, error)
        else:
            _log.error("handler %s of %s failed", name, path, exc_info=error)

    def _fail(self, reply: ReplyStream, error: ErrorObject) -> None:
        if not self._over:
            self._start(reply)
            self._over = True
            reply.fail(error)

    def _finish(self, reply: ReplyStream) -> None:
        if not self._over:
            self._start(reply)
            self._over = True
            reply.finish()

    # ItemSink

    def push(self, value: object) -> None:
        if self._over or self._reply is None:
            raise RuntimeError("the stream is closed: nothing more can be sent")
        try:
            body = encode_item(self._codec, value)
        except ItemError as error:
            raise ValueError(str(error)) from error
        self._note_first_token(value)
        self._start(self._reply)
        self._reply.item(body)

    def push_end(self, message: str | None) -> None:
        if self._reply is None:
            return
        if message is None:
            self._finish(self._reply)
        else:
            self._fail(self._reply, error_of_envelope({"message": message}, None))
