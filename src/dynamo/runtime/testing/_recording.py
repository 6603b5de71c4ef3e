"""Remembers which instance got which request, what it answered and how that ended.

Stands between the runtime and a user's handler without changing what either sees.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Literal

from dynamo.runtime._calls.handlers import Handler
from dynamo.runtime._calls.streams import PyAsyncRequestStream, ResponseSender
from dynamo.runtime._sealed import override

if TYPE_CHECKING:
    from dynamo.runtime._calls.context import Context, ContextState

Outcome = Literal["running", "completed", "stopped", "failed", "cancelled"]


class RecordedCall:
    """One call that a handler of a `Cluster` got.

    Attributes:
        endpoint: Path of the endpoint.
        instance_id: The instance that got it.
        request_id: The id of the call's context.
        request: What the handler got; for streamed input a list of the values that it
            has read.
        metadata: A copy of the context's metadata when the call came.
        items: What was yielded or sent so far, the objects themselves.
        outcome: ``"running"``, then ``"completed"``, ``"failed"`` (`error` says with
            what), ``"stopped"`` (its context was stopped or killed before it ended: the
            caller left, a deadline passed, a drain ran out of time) or ``"cancelled"``
            (it was cut off for another reason, as for an item that cannot be sent).
        error: What the handler raised, or None.
    """

    def __init__(
        self, endpoint: str, instance_id: int, request: object, context: Context
    ) -> None:
        self.endpoint = endpoint
        self.instance_id = instance_id
        self.request_id = context.id()
        self.request = request
        self.metadata = dict(context.metadata)
        self.items: list[Any] = []
        self.outcome: Outcome = "running"
        self.error: BaseException | None = None
        self._state = _Progress(context._state)

    async def ended(self, *, timeout: float = 5.0) -> Outcome:
        """Wait until the handler has ended.

        Args:
            timeout: How many seconds it may take at most.

        Returns:
            The outcome.

        Raises:
            TimeoutError: it still runs (``asyncio.TimeoutError``).
        """
        await asyncio.wait_for(self._state.ended.wait(), timeout)
        return self.outcome

    @override
    def __repr__(self) -> str:
        return (
            f"<RecordedCall {self.endpoint} at {self.instance_id:x}: {self.request!r} "
            f"-> {len(self.items)} items, {self.outcome}>"
        )


class _Progress:
    """What a `RecordedCall` is waited for with, and judged by."""

    def __init__(self, context: ContextState) -> None:
        self.context = context
        self.ended = asyncio.Event()


def _end(call: RecordedCall, error: BaseException | None) -> None:
    # Not through the context itself, which notes that its handler has looked.
    if call._state.context.stopped:
        call.outcome = "stopped"
    elif error is None:
        call.outcome = "completed"
    elif isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        call.outcome = "cancelled"
    else:
        call.outcome = "failed"
        call.error = error
    call._state.ended.set()


def recorded(
    handler: Any,
    *,
    streamed: bool,
    note: Callable[[object, Context], RecordedCall],
) -> Any:
    """The same handler, each of whose calls is noted.

    Args:
        handler: What is to be served; anything.
        streamed: Whether it takes a stream of requests.
        note: Makes the record of a call from its request and context.
    """
    inner = Handler(handler, streamed=streamed)
    if inner.complaint() is not None:
        return handler  # it answers nothing: let the runtime say so

    def plain(request: Any, *, context: Context) -> AsyncIterator[Any]:
        return begin(request, context, None)

    def pushing(
        request: Any, *, context: Context, response_sender: ResponseSender
    ) -> AsyncIterator[Any]:
        return begin(request, context, response_sender)

    def begin(request: Any, context: Context, sender: Any) -> AsyncIterator[Any]:
        values: list[Any] = []
        call = note(values if streamed else request, context)
        if streamed:
            inbox = _RecordedInput(request._inbox, values)  # noqa: SLF001
            request = PyAsyncRequestStream._of(inbox)
        if sender is not None:
            sink = _RecordedSink(sender._sink, call.items)  # noqa: SLF001
            sender = ResponseSender._of(sink)
        try:
            iterator = inner.call(request, context, sender)
        except BaseException as error:
            _end(call, error)
            raise
        return _followed(iterator, call)

    wrapper = pushing if inner.pushes else plain
    wrapper.__qualname__ = inner.name
    return wrapper


async def _followed(
    iterator: AsyncIterator[Any], call: RecordedCall
) -> AsyncIterator[Any]:
    """The items of a call, noted; its end, too."""
    error: BaseException | None = None
    try:
        async for item in iterator:
            call.items.append(item)
            yield item
    except BaseException as raised:
        error = raised
        raise
    finally:
        try:
            aclose: Callable[[], Any] | None = getattr(iterator, "aclose", None)
            if aclose is not None:
                await aclose()
        finally:
            _end(call, error)


class _RecordedInput:
    """The values of a streamed input, noted as they are read."""

    def __init__(self, inbox: Any, values: list[Any]) -> None:
        self._inbox = inbox
        self._values = values

    def step(self) -> asyncio.Future[Any]:
        step: asyncio.Future[Any] = self._inbox.step()
        step.add_done_callback(self._note)
        return step

    def _note(self, step: asyncio.Future[Any]) -> None:
        if not step.cancelled() and step.exception() is None:
            self._values.append(step.result())


class _RecordedSink:
    """Where a push-mode handler sends its items, noted."""

    def __init__(self, sink: Any, items: list[Any]) -> None:
        self._sink = sink
        self._items = items

    def push(self, value: object) -> None:
        self._sink.push(value)
        self._items.append(value)

    def push_end(self, message: str | None) -> None:
        self._sink.push_end(message)
