"""The context of one call: who it is, what travels with it, and whether to go on.

`ContextState` is what tables, tasks and calls hold; `Context` is the user's handle on
it.  Stopping takes no lock and may happen in any thread, also inside `__del__`.
Nothing here knows a transport or runs user code other than the listeners.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any, TypeAlias

from dynamo.runtime._calls.deadlines import inherited, seconds_of
from dynamo.runtime._observability.tracing import SpanProxy, check_span_arguments
from dynamo.runtime._sealed import Sealed, Unconstructible, override

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dynamo.runtime._observability.tracing import SpanIdentity
    from dynamo.runtime._wire.propagation import TraceContext

__all__ = ["Context", "ContextMetadata", "ContextState", "Drain", "new_id"]

_ABSENT: Any = ...  # as the default of `pop`: no default


class _Ids:
    """Version-4 UUIDs in text, at a fraction of the cost of `uuid.uuid4`.

    Random for each process, and from there on counted: unique, but not secret.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Begin anew; a forked child would go on with the ids of its parent."""
        text = str(uuid.UUID(bytes=os.urandom(16), version=4))
        self._prefix = text[:24]
        self._next = itertools.count(int(text[24:], 16) >> 1).__next__

    def new(self) -> str:
        """The next one, from any thread."""
        return f"{self._prefix}{self._next():012x}"


_ids = _Ids()
new_id = _ids.new

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ids.renew)


_Listeners: TypeAlias = "dict[Callable[[bool], None], Callable[[bool], None]]"
# Of a context that has none, or only its owner; stays empty.
_NO_LISTENERS: _Listeners = {}
_making_tables = threading.Lock()


class Drain:
    """Whether a worker is on its way out; shared by the contexts of its calls."""

    __slots__ = ("begun",)

    def __init__(self) -> None:
        self.begun = False


class ContextState:
    """Identity, metadata and cancellation of one call.

    Two tables of listeners, one per signal.  A listener is told by whoever pops it from
    the table, and a pop is atomic: so it hears each signal at most once, whichever
    threads stop, kill and subscribe at the same time.  Subscribing enters the tables
    first and looks at the flags after, stopping does it the other way round: so it
    hears each signal at least once.

    Attributes:
        id: The request id.
        metadata: Text by text; sent along with calls made with this context.
        trace: Tracing headers to pass on, or None.
        span: What the context shows of its span, or None in a process without tracing.
        has_first_token: True once the first token of the answer was noticed.
        deadline: `time.monotonic()` value by which the call must have ended, or None.
        owner: The one listener that nearly every context has, or None.  It is told each
            time that somebody stops or kills, and must not mind.
        drain: The worker on which the call runs, or None.
        noticed: True once the user's code has seen that the call should end.
        stopped: True once the call should end.
        killed: True once it should end at once; `stopped` is then true as well.
    """

    __slots__ = (
        "_on_first_token",
        "_on_kill",
        "_on_stop",
        "_unowned",
        "deadline",
        "drain",
        "has_first_token",
        "id",
        "killed",
        "metadata",
        "noticed",
        "owner",
        "span",
        "stopped",
        "trace",
    )

    def __init__(
        self,
        request_id: str,
        metadata: dict[str, str],
        trace: TraceContext | None = None,
        *,
        span: SpanIdentity | None = None,
        deadline: float | None = None,
        owner: Callable[[bool], None] | None = None,
        drain: Drain | None = None,
    ) -> None:
        self.id = request_id
        self.metadata = metadata
        self.trace = trace
        self.span = span
        self.deadline = deadline
        self.owner = owner
        if owner is None:
            self._unowned = True
        self.drain = drain
        self.has_first_token = False
        self._on_first_token: tuple[Callable[[], None], ...] = ()
        self.noticed = False
        self.stopped = False
        self.killed = False
        self._on_stop = self._on_kill = _NO_LISTENERS

    def stop(self) -> None:
        """Ask for an orderly end.  From any thread; again does nothing."""
        self.stopped = True
        owner = self.owner
        if owner is not None:
            owner(False)
        _tell(self._on_stop, killed=False)

    def kill(self) -> None:
        """Ask for an end at once.  From any thread; again does nothing."""
        self.stopped = True
        self.killed = True
        owner = self.owner
        if owner is not None:
            owner(True)
        self._on_stop.clear()  # the kill tells them more
        _tell(self._on_kill, killed=True)

    def first_token(self) -> None:
        """The answer has begun.  Again does nothing."""
        if not self.has_first_token:
            self.has_first_token = True
            waiting, self._on_first_token = self._on_first_token, ()
            for listener in waiting:
                listener()

    def on_first_token(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called once the answer has begun, or now if it has."""
        if self.has_first_token:
            listener()
        else:
            self._on_first_token += (listener,)

    def attach(self, listener: Callable[[bool], None]) -> None:
        """Make a listener the owner, or `subscribe` it if there is one already.

        It may hear the same more than once.
        """
        try:
            # Atomic: of several threads one succeeds.
            del self._unowned
        except AttributeError:
            self.subscribe(listener)
            return
        self.owner = listener
        if self.stopped:
            listener(self.killed)

    def detach(self, listener: Callable[[bool], None]) -> None:
        """Undo `attach`."""
        if self.owner == listener:
            self.owner = None
            self._unowned = True
        else:
            self.unsubscribe(listener)

    def subscribe(self, listener: Callable[[bool], None]) -> None:
        """Have `listener(killed)` called when the state stops, or now if it has.

        It runs in the thread that stops, must return at once and must not raise.  A
        kill after a stop calls it again, with True.  When two threads stop and kill at
        the same moment the False may come last; `killed` then is already true.
        """
        if self._on_stop is _NO_LISTENERS:
            self._make_tables()
        self._on_stop[listener] = listener
        self._on_kill[listener] = listener
        if self.killed:
            self.kill()
        elif self.stopped:
            self.stop()

    def _make_tables(self) -> None:
        """Nearly all contexts do without; nobody who stops waits for this lock."""
        with _making_tables:
            if self._on_stop is _NO_LISTENERS:
                self._on_kill, self._on_stop = {}, {}

    def unsubscribe(self, listener: Callable[[bool], None]) -> None:
        """Forget a listener; nothing happens if it is not there."""
        self._on_stop.pop(listener, None)
        self._on_kill.pop(listener, None)


def _tell(waiting: _Listeners, *, killed: bool) -> None:
    for key in list(waiting):
        listener = waiting.pop(key, None)
        if listener is not None:
            listener(killed)


class _Waiter:
    """Listener that completes one future in that future's loop."""

    __slots__ = ("_future", "_state")

    def __init__(self, future: asyncio.Future[bool], state: ContextState) -> None:
        self._future = future
        self._state = state

    def __call__(self, killed: bool) -> None:
        self._state.noticed = True
        try:
            self._future.get_loop().call_soon_threadsafe(self._complete)
        except RuntimeError:
            return  # the loop is closed, so nobody waits there any more

    def _complete(self) -> None:
        if not self._future.done():
            self._future.set_result(True)


class Context(Sealed):
    """Travels with a call: its id, its metadata, and the wish to end it.

    A client may make one and pass it to calls, to stop them and to hand metadata to the
    handler.  A handler that takes a parameter named `context` gets the one of its call;
    given to further calls, it links them: they stop when it stops.

    A context made in a handler has the deadline of that handler's call, `detached` ones
    excepted.

    Args:
        id: Request id; a new version-4 UUID by default.
        metadata: Text by text, copied.
        timeout: Seconds from now in which all calls with this context must end, or None.

    Raises:
        TypeError: The id is no text, the metadata no dict of text by text, or the
            time-out no number.
        ValueError: The time-out is negative or not a number.
        UnicodeEncodeError: A text holds a lone surrogate.

    Example:
        >>> context = Context("request-1", {"tenant": "blue"})
        >>> context.id(), context.metadata["tenant"], context.is_stopped()
        ('request-1', 'blue', False)
        >>> context.stop_generating()
        >>> context.is_stopped(), context.is_killed()
        (True, False)
    """

    __slots__ = ("_state",)

    _state: ContextState

    def __init__(
        self,
        id: str | None = None,  # noqa: A002 - the published name
        metadata: dict[str, str] | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        self._state = ContextState(
            new_id() if id is None else _text("id", id),
            {} if metadata is None else _text_dict(metadata),
            deadline=inherited.get() if timeout is None else _deadline_in(timeout),
        )

    @classmethod
    def _of(cls, state: ContextState) -> Context:
        self = cls.__new__(cls)
        self._state = state
        return self

    def id(self) -> str:
        """The request id, the same on both sides of a call.

        Returns:
            The id as it was given, or a version-4 UUID.
        """
        return self._state.id

    def is_stopped(self) -> bool:
        """Whether the call should end.

        Returns:
            True after a stop or a kill.
        """
        state = self._state
        if state.stopped:
            state.noticed = True
        return state.stopped

    def is_killed(self) -> bool:
        """Whether the call should end without finishing what it is doing.

        Returns:
            True after a kill; a context one made oneself is never killed.
        """
        return self._state.killed

    def is_draining(self) -> bool:
        """Whether the worker that runs this call has begun to shut down.

        The call goes on; a handler that could go on for long may use the chance to end.

        Returns:
            True from the shutdown of the worker's runtime on; always False outside a
            handler.
        """
        drain = self._state.drain
        return drain is not None and drain.begun

    def stop_generating(self) -> None:
        """Ask for the end of every call that uses this context.

        From any thread, and as often as one likes.
        """
        self._state.stop()

    def async_killed_or_stopped(self) -> asyncio.Future[bool]:
        """Wait for the end of the call to be asked for.

        Returns:
            A future of True on the running loop.  Cancelling it does not touch the
            context.

        Raises:
            RuntimeError: No event loop is running in this thread.

        Example:
            >>> async def main():
            ...     context = Context()
            ...     stopped = context.async_killed_or_stopped()
            ...     context.stop_generating()
            ...     return await stopped
            >>> asyncio.run(main())
            True
        """
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        state = self._state
        if state.stopped:
            state.noticed = True
            future.set_result(True)
            return future
        waiter = _Waiter(future, state)
        future.add_done_callback(lambda _: state.unsubscribe(waiter))
        state.subscribe(waiter)
        return future

    def notify_first_token(self) -> None:
        """Say that the first token was made, for a `FirstTokenSource` bound to this.

        May be repeated.  The runtime does it at the first item with data.
        """
        self._state.first_token()

    def detached(self, id: str) -> Context:  # noqa: A002 - the published name
        """Make a context that goes on when this one is stopped.

        Args:
            id: Request id of the new context.

        Returns:
            A context with a copy of the metadata and the same trace; without a
            deadline, and not stopped even if this one is.

        Raises:
            TypeError: The id is no text.

        Example:
            >>> context = Context("a", {"tenant": "blue"})
            >>> other = context.detached("b")
            >>> context.stop_generating()
            >>> other.id(), other.metadata["tenant"], other.is_stopped()
            ('b', 'blue', False)
        """
        old = self._state
        request_id = _text("id", id)
        return Context._of(
            ContextState(
                request_id,
                old.metadata.copy(),
                old.trace,
                span=old.span,
                drain=old.drain,
            )
        )

    @property
    def metadata(self) -> ContextMetadata:
        """The metadata: a live view, which may also be replaced by a dict.

        Example:
            >>> context = Context()
            >>> context.metadata["a"] = "1"
            >>> context.metadata = {"b": "2"}
            >>> context.metadata.copy()
            {'b': '2'}
        """
        return ContextMetadata._of(self._state)

    @metadata.setter
    def metadata(self, value: dict[str, str]) -> None:
        self._state.metadata = _text_dict(value)

    @property
    def deadline(self) -> float | None:
        """When the call must have ended, as `time.monotonic()` in seconds, or None."""
        return self._state.deadline

    @property
    def trace_id(self) -> str | None:
        """32 hex digits, or None in a process that does not trace."""
        span = self._state.span
        return None if span is None else span.trace_id

    @property
    def span_id(self) -> str | None:
        """16 hex digits, or None in a process that does not trace."""
        span = self._state.span
        return None if span is None else span.span_id

    @property
    def parent_span_id(self) -> str | None:
        """16 hex digits, or None without a parent or in a process that does not trace."""
        span = self._state.span
        return None if span is None else span.parent_span_id

    def trace_headers(self) -> dict[str, str] | None:
        """Headers that continue this trace elsewhere.

        Returns:
            A new dict with `traceparent` and what else belongs to the trace, or None in
            a process that does not trace.
        """
        span = self._state.span
        return None if span is None else dict(span.headers)

    def current_span(self) -> SpanProxy:
        """The span of this call.

        Returns:
            A span that takes everything and records nothing.
        """
        return SpanProxy._make()

    def start_span(
        self, name: str, attrs: dict[str, object] | None = None
    ) -> SpanProxy:
        """Start a span below the current one.

        Args:
            name: What the span measures.
            attrs: Attributes of the span; contents are not looked at.

        Returns:
            A span that takes everything and records nothing.

        Raises:
            TypeError: The name is no text, or the attributes are no dict.
        """
        check_span_arguments(name, attrs)
        return SpanProxy._make()


class ContextMetadata(Unconstructible):
    """Live view of a context's metadata: text by text, always in the order of the keys.

    Behaves like a dict where it has the same method; compares by identity.

    Example:
        >>> metadata = Context("a", {"b": "2", "a": "1"}).metadata
        >>> metadata["c"] = "3"
        >>> metadata
        {"a": "1", "b": "2", "c": "3"}
        >>> metadata.pop("b"), metadata.pop("b", None), metadata.keys()
        ('2', None, ['a', 'c'])
    """

    __slots__ = ("_state",)

    _state: ContextState

    @classmethod
    def _of(cls, state: ContextState) -> ContextMetadata:
        self = cls.__new__(cls)
        self._state = state
        return self

    def __getitem__(self, key: str) -> str:
        return self._state.metadata[_text("key", key)]

    def __setitem__(self, key: str, value: str) -> None:
        self._state.metadata[_text("key", key)] = _text("value", value)

    def __delitem__(self, key: str) -> None:
        del self._state.metadata[_text("key", key)]

    def __contains__(self, key: str) -> bool:
        return _text("key", key) in self._state.metadata

    def __len__(self) -> int:
        return len(self._state.metadata)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    @override
    def __repr__(self) -> str:
        pairs = (f"{_quoted(key)}: {_quoted(value)}" for key, value in self.items())
        return "{" + ", ".join(pairs) + "}"

    def get(self, key: str, default: str | None = None) -> str | None:
        """Look a key up.

        Args:
            key: The key.
            default: What to return if it is absent.

        Returns:
            The value or the default.

        Raises:
            TypeError: The key is no text, or the default neither text nor None.
        """
        return self._state.metadata.get(_text("key", key), _text_or_none(default))

    def pop(self, key: str, default: str | None = _ABSENT) -> str | None:
        """Remove a key.

        Args:
            key: The key.
            default: What to return if it is absent; without one, that is an error.

        Returns:
            The value or the default.

        Raises:
            KeyError: The key is absent and no default was given.
            TypeError: The key is no text, or the default neither text nor None.
        """
        if default is _ABSENT:
            return self._state.metadata.pop(_text("key", key))
        return self._state.metadata.pop(_text("key", key), _text_or_none(default))

    def keys(self) -> list[str]:
        """List the keys.

        Returns:
            A new list, sorted.
        """
        return sorted(self._state.metadata)

    def values(self) -> list[str]:
        """List the values.

        Returns:
            A new list, in the order of the keys.
        """
        return [value for _, value in self.items()]

    def items(self) -> list[tuple[str, str]]:
        """List keys and values.

        Returns:
            A new list of pairs, in the order of the keys.
        """
        return sorted(self._state.metadata.copy().items())

    def copy(self) -> dict[str, str]:
        """Copy the metadata.

        Returns:
            A new dict, in the order of the keys.
        """
        return dict(self.items())

    def clear(self) -> None:
        """Remove everything."""
        self._state.metadata.clear()


def _deadline_in(timeout: float) -> float | None:
    """So many seconds from now, or the deadline of the running handler, if sooner."""
    timeout_s = seconds_of("timeout", timeout)
    outer = inherited.get()
    if timeout_s == math.inf:
        return outer
    deadline = time.monotonic() + timeout_s
    return deadline if outer is None else min(deadline, outer)


def _text(argument: str, value: object) -> str:
    """The value as an exact `str` that can be sent; the genuine runtime's rule."""
    if not isinstance(value, str):
        raise TypeError(f"{argument} must be str, not {type(value).__name__}")
    if not value.isascii():
        value.encode()  # a lone surrogate raises here, not later on the wire
    return str.__str__(value)


def _text_or_none(value: object) -> str | None:
    return None if value is None else _text("default", value)


def _text_dict(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise TypeError(
            f"metadata must be a dict of str to str, not {type(value).__name__}"
        )
    if type(value) is dict:
        texts = (*value, *value.values())
        if _ONLY_STR.issuperset(map(type, texts)) and "".join(texts).isascii():
            # As nearly always.
            return value.copy()
    return {
        _text("metadata key", key): _text("metadata value", item)
        for key, item in value.items()
    }


_ONLY_STR = frozenset((str,))


_ESCAPES = {"\0": r"\0", "\t": r"\t", "\n": r"\n", "\r": r"\r", '"': r"\"", "\\": r"\\"}


def _quoted(text: str) -> str:
    """The text as the genuine runtime shows it."""
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    if char.isascii() and char.isprintable():
        return char
    from unicodedata import category  # a table of a megabyte that few programs need

    if char.isprintable() and category(char) not in ("Mn", "Me"):
        return char
    return f"\\u{{{ord(char):x}}}"
