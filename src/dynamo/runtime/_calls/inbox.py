"""Hands items from the home loop to whoever reads, in whatever loop.

Owns the items that arrived and were not read yet, and the readers that wait for some.
Nothing is lost or overtaken by a reader that gives up.  Knows nothing of calls.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from dynamo.runtime._sealed import override
from dynamo.runtime.errors import RuntimeClosed

T = TypeVar("T")

# Beyond this the lane is asked to pause, below the lower mark to go on.  Bytes are
# counted as they came; the count starts anew whenever everything was read.
_FULL_ITEMS = 64
_FULL_BYTES = 1024 * 1024
_LOW_ITEMS = 16


def on_loop(
    loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object
) -> None:
    """Run a quick call on ``loop``: now if that is where we are, else soon."""
    if _running_loop() is loop:
        call(*args)
    else:
        soon_on_loop(loop, call, *args)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def soon_on_loop(
    loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object
) -> None:
    """Run a quick call in a later turn of ``loop``.

    A loop that was closed takes no calls; whatever it served has ended with it.
    """
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise


class Step(asyncio.Future[Any]):
    """A wait for the next item that loses none when the waiting task is cancelled.

    The task may be cancelled in the very turn in which the item arrived: the future is
    done, yet the task never sees the result.  Then the item goes back.

    While it waits it keeps the stream: ``await make_stream().__anext__()`` has no other
    reference to it.
    """

    inbox: Inbox
    stream: object = None
    # The place of its item among all that were handed over.
    number = 0

    @override
    def cancel(self, msg: Any | None = None) -> bool:
        self.stream = None
        cancelled = super().cancel(msg)
        if cancelled:
            self._gave_up()
        return cancelled

    def _gave_up(self) -> None:
        self.inbox.gave_up()

    @override
    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from super().__await__())
        except asyncio.CancelledError:
            if self.done() and not self.cancelled():
                self.inbox.take_back(self)
            raise
        finally:
            # An error that is raised here has this frame in its traceback, and is held
            # by the future: no cycle is left behind.
            del self

    __iter__ = __await__


class _FarStep(Step):
    """The same for a reader in another loop: a task at home waits in its place."""

    asking: asyncio.Task[None] | None = None
    # On its way to the reader.
    answer: tuple[int, object, Exception | None] | None = None

    @override
    def _gave_up(self) -> None:
        on_loop(self.inbox.home, self.inbox.ask_no_more, self)


class Inbox:
    """Items that arrived and were not read yet, or readers that wait for some.

    Everything but `step` and `take_back` belongs to the home loop.  Each item goes to
    one reader.
    """

    __slots__ = (
        "_bytes",
        "_dead",
        "_discarded",
        "_ended",
        "_error",
        "_full",
        "_handed",
        "_items",
        "_on_full",
        "_returned",
        "_starved",
        "_waiters",
        "home",
    )

    def __init__(
        self, home: asyncio.AbstractEventLoop, on_full: Callable[[bool], None]
    ) -> None:
        self.home = home
        self._on_full = on_full
        self._items: deque[Any] = deque()
        self._bytes = 0
        # Items whose readers never saw them, older than the others, by number.
        self._returned: list[tuple[int, Any]] = []
        self._handed = 0
        self._waiters: deque[Step] = deque()
        # How many of the waiters gave up.
        self._dead = 0
        self._ended = False
        self._discarded = False
        self._error: Exception | None = None
        self._full = False
        # Told once that a reader waits and nothing is left.
        self._starved: Callable[[], None] | None = None

    @property
    def ended(self) -> bool:
        return self._ended

    def put(self, item: object, size_bytes: int) -> None:
        """Hand an item to the first reader that still waits, or keep it."""
        if self._ended:
            return
        if self._waiters:
            self._handed += 1
            if self._hand(self._handed, item):
                return
        self._items.append(item)
        self._bytes += size_bytes
        if not self._full and (
            len(self._items) >= _FULL_ITEMS or self._bytes >= _FULL_BYTES
        ):
            self._full = True
            self._on_full(True)

    def when_read(self, starved: Callable[[], None]) -> None:
        """Call back once a reader waits and all that came was read."""
        self._starved = starved
        if len(self._waiters) > self._dead:
            self._tell_starved()

    def _tell_starved(self) -> None:
        starved, self._starved = self._starved, None
        if starved is not None:
            self.home.call_soon(starved)

    def _hand(self, number: int, item: object) -> bool:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.number = number
                waiter.set_result(item)
                waiter.stream = None
                return True
            self._dead -= 1
        return False

    def end(self, error: Exception | None, *, discard: bool = False) -> None:
        """No more items: after those that are here comes ``error`` once, or the end."""
        if discard:
            self._discarded = True
            self._items.clear()
            self._returned.clear()
        if self._ended:
            return
        self._ended = True
        self._starved = None
        self._error = error
        if discard or not self._full:
            # Whoever is told usually owns us: no cycle is left behind.
            self._on_full = _tell_nobody
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            if not waiter.done():
                _fail_waiting(waiter, self._next_end())

    def _next_end(self) -> Exception:
        error, self._error = self._error, None
        return error or StopAsyncIteration("Stream exhausted")

    def step(self) -> asyncio.Future[Any]:
        """A future of the next item, in the running loop.

        Raises:
            RuntimeError: no loop is running.
        """
        loop = asyncio.get_running_loop()
        if loop is not self.home:
            return self._step_elsewhere(loop)
        if self._returned:
            return _done(loop, self._returned.pop(0)[1])
        if self._items:
            future = _done(loop, self._items.popleft())
            self._made_room()
            return future
        if self._ended:
            return _fail(loop.create_future(), self._next_end())
        waiter = Step(loop=loop)
        waiter.inbox = self
        self._waiters.append(waiter)
        if self._starved is not None:
            self._tell_starved()
        return waiter

    def _made_room(self) -> None:
        if not self._items:
            self._bytes = 0
        if (
            self._full
            and len(self._items) <= _LOW_ITEMS
            and not self._bytes >= _FULL_BYTES
        ):
            self._full = False
            self._on_full(False)
            if self._ended:
                self._on_full = _tell_nobody

    def gave_up(self) -> None:
        """A waiter was cancelled: clear them away before they are the majority."""
        self._dead += 1
        if 2 * self._dead > len(self._waiters):
            self._waiters = deque(one for one in self._waiters if not one.done())
            self._dead = 0

    def take_back(self, step: Step) -> None:
        """Undo a hand-over that its reader never saw.  From any thread."""
        error = step.exception()
        item = None if error is not None else step.result()
        on_loop(self.home, self._take_back, step.number, item, error)

    def _take_back(
        self, number: int, item: object, error: BaseException | None
    ) -> None:
        if error is None:
            # Whoever waits has waited for this one.
            if not self._discarded and not self._hand(number, item):
                bisect.insort(self._returned, (number, item), key=_number_of)
        elif isinstance(error, Exception) and not isinstance(error, StopAsyncIteration):
            self._error = error

    # Readers in other loops.

    def _step_elsewhere(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Any]:
        """Ask at home, bring the answer here."""
        far = _FarStep(loop=loop)
        far.inbox = self
        try:
            self.home.call_soon_threadsafe(self._ask, far)
        except RuntimeError:
            return _fail(far, _home_closed())
        return far

    def _ask(self, far: _FarStep) -> None:
        if not far.done():
            far.asking = self.home.create_task(self._hand_over(far))

    def ask_no_more(self, far: _FarStep) -> None:
        """A reader gave up before its answer arrived.

        What is on its way goes back from here and not from there: the next question
        of the same reader must not overtake it.
        """
        if far.asking is not None:
            far.asking.cancel()
        answer, far.answer = far.answer, None
        if answer is not None:
            self._take_back(*answer)

    async def _hand_over(self, far: _FarStep) -> None:
        step = self.step()
        # One that was here already needs a number of its own to come back.
        self._handed += not isinstance(step, Step)
        number = self._handed
        item: object = None
        error: Exception | None = None
        try:
            item = await step
        except asyncio.CancelledError:
            # The reader gave up, or else this loop is being closed.
            _post(far, _fail_waiting, far, _home_closed())
            raise
        except Exception as raised:  # noqa: BLE001 - it is forwarded
            error = raised
        if isinstance(step, Step):
            number = step.number
        far.answer = number, item, error
        if not _post(far, _arrive, far, number, item, error):
            self.ask_no_more(far)


def _tell_nobody(full: bool) -> None:
    """Takes the place of the owner's call-back once there is nothing to pause."""


def _post(far: _FarStep, call: Callable[..., object], *args: object) -> bool:
    """Call in the reader's loop; False if it was closed without a word."""
    try:
        far.get_loop().call_soon_threadsafe(call, *args)
    except RuntimeError:
        return False
    return True


def _arrive(far: _FarStep, number: int, item: object, error: Exception | None) -> None:
    """In the reader's loop."""
    if far.done():
        return
    far.number = number
    if error is None:
        far.set_result(item)
        far.stream = None
    else:
        _fail_waiting(far, error)


def _number_of(returned: tuple[int, Any]) -> int:
    return returned[0]


def _home_closed() -> RuntimeClosed:
    return RuntimeClosed("the event loop of the runtime was closed")


def _fail_waiting(step: Step, error: Exception) -> None:
    if not step.done():
        _fail(step, error)
        step.stream = None


def _done(loop: asyncio.AbstractEventLoop, item: object) -> asyncio.Future[Any]:
    future = loop.create_future()
    future.set_result(item)
    return future


def _fail(future: asyncio.Future[T], error: BaseException) -> asyncio.Future[T]:
    """Set an error, and ask for it once: a reader that left is no reason to complain."""
    future.set_exception(error)
    future.exception()
    return future
