"""Hands items from the home loop to whoever reads, in whatever loop.

Owns the items that arrived and were not read yet, and the readers that wait for some.
Nothing is lost or overtaken by a reader that gives up.  Knows nothing of calls.

Items are opened, which for most means decoded, only when a reader takes them: what
waits is bytes, and not a heap of objects that the garbage collector looks through again
and again.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from dynamo.runtime._sealed import override
from dynamo.runtime._wire.faults import error_of_unreadable, exception_of_error
from dynamo.runtime._wire.payload import UNREADABLE
from dynamo.runtime.errors import RuntimeClosed

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

# When so much has arrived and no reader has begun with it, the lane is asked to pause.
_FULL_ITEMS = 64
_FULL_BYTES = 1024 * 1024


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
    done, yet the task never sees the result.  Then the item goes back.  Whoever cancels
    a task asks what it waits for, so that this is known here, without a coroutine of
    our own around every wait.

    Attributes:
        reader: The task that asked.
        stream: What it reads, kept while it waits: ``await make_stream().__anext__()``
            has no other reference to it.
        number: The place of its item among all that were handed over.
    """

    __slots__ = ("inbox", "number", "reader", "stream")

    inbox: Inbox
    number: int
    reader: asyncio.Task[Any] | None
    stream: object

    @classmethod
    def make(
        cls,
        loop: asyncio.AbstractEventLoop,
        inbox: Inbox,
        reader: asyncio.Task[Any] | None,
        stream: object,
    ) -> Self:
        # No `__init__` of our own: that of the Future is compiled.
        step = cls(loop=loop)
        step.inbox = inbox
        step.number = 0
        step.reader = reader
        step.stream = stream
        return step

    @override
    def cancel(self, msg: Any | None = None) -> bool:
        self.stream = None
        if super().cancel(msg):
            self._gave_up()
            return True
        if not self.cancelled() and getattr(self.reader, "_fut_waiter", None) is self:
            self.inbox.take_back(self)
        return False

    def _gave_up(self) -> None:
        self.inbox.gave_up()


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

    Everything but `step`, `next` and `take_back` belongs to the home loop.  Each item
    goes to one reader.

    Args:
        home: That loop.
        on_full: Told when so much has come that the sender should pause, and when not.
        opener: Makes of an item what its reader gets, or None if that is nothing;
            raises `UNREADABLE`.  Without one they get the items themselves.
        on_unreadable: Told so if the stream has not ended, to end it with that error.

    Attributes:
        origin: The instance that the items come from, for such an error.
        thread: That in which the home loop was last known to run.
        ended: No more items arrive.
        skipped: How many items were nothing to their readers.
    """

    __slots__ = (
        "_bytes",
        "_dead",
        "_discarded",
        "_error",
        "_full",
        "_handed",
        "_items",
        "_on_full",
        "_on_unreadable",
        "_opener",
        "_reading",
        "_returned",
        "_starved",
        "_waiters",
        "ended",
        "home",
        "origin",
        "skipped",
        "thread",
    )

    def __init__(
        self,
        home: asyncio.AbstractEventLoop,
        on_full: Callable[[bool], None],
        opener: Callable[[Any], Any] | None = None,
        on_unreadable: Callable[[Exception], None] | None = None,
    ) -> None:
        self.home = home
        self.thread: int | None = None
        self.origin: int | None = None
        self._on_full = on_full
        self._opener = opener
        self._on_unreadable = on_unreadable
        # What arrived, and what a reader has taken of it at one go, the latest first.
        self._items: list[Any] = []
        self._reading: list[Any] = []
        self._bytes = 0
        # Items whose readers never saw them, older than the others, by number.
        self._returned: list[tuple[int, Any]] | None = None
        self._handed = 0
        self._waiters: list[Step] = []
        # How many of the waiters gave up.
        self._dead = 0
        self.ended = False
        self.skipped = 0
        self._discarded = False
        self._error: Exception | None = None
        self._full = False
        # Told once that a reader waits and nothing is left.
        self._starved: Callable[[], None] | None = None

    def put(self, item: object, size_bytes: int) -> None:
        """Hand an item to the first reader that still waits, or keep it."""
        self.put_all([item], size_bytes)

    def put_all(self, items: Sequence[Any], size_bytes: int) -> None:
        """The same with items that came together."""
        if self.ended:
            return
        if self._waiters:
            items = self._hand_all(items)
            if not items:
                return
        self._items += items
        self._bytes += size_bytes
        if not self._full and (
            len(self._items) >= _FULL_ITEMS or self._bytes >= _FULL_BYTES
        ):
            self._full = True
            self._on_full(True)

    def _hand_all(self, items: Sequence[Any]) -> Sequence[Any]:
        """Hand out as many as there are readers; what is left."""
        for at, item in enumerate(items):
            if not self._waiters:
                return items[at:]
            opened = item
            if self._opener is not None:
                try:
                    opened = self._opener(item)
                except UNREADABLE as error:
                    self._give_up_on(error)
                    return []
                if opened is None:
                    self.skipped += 1
                    continue
            self._handed += 1
            if not self._hand(self._handed, opened):
                self._hand_again(self._handed, opened)
        return []

    def _give_up_on(self, error: Exception) -> None:
        """An item cannot be read: what came behind it does not count either."""
        self._items.clear()
        self._reading.clear()
        failure = exception_of_error(
            error_of_unreadable(f"an item that is not msgpack: {error}"),
            instance_id=self.origin,
        )
        if self._on_unreadable is None:
            self._error = failure
        else:
            self._on_unreadable(failure)

    def sift(self) -> None:
        """Open what lies here: `skipped` counts all of it then."""
        while self._reading or self._take_all():
            item = self._reading[-1]
            try:
                opened = item if self._opener is None else self._opener(item)
            except UNREADABLE:
                return  # its reader will hear of it
            self._reading.pop()
            if opened is None:
                self.skipped += 1
            else:
                self._handed += 1
                self._returned = self._returned or []
                self._returned.append((self._handed, opened))

    def put_last(self, item: object) -> None:
        """The only item of a stream, and its end."""
        if self._waiters or self.ended:
            self.put_all([item], 0)
        else:
            self._items.append(item)
        self.end(None)

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
        """Hand an item to the first waiter; False if that one gave up."""
        waiter = self._waiters.pop(0)
        if waiter.done():
            self._dead -= 1
            return False
        waiter.number = number
        waiter.set_result(item)
        waiter.stream = None
        return True

    def end(self, error: Exception | None, *, discard: bool = False) -> None:
        """No more items: after those that are here comes ``error`` once, or the end."""
        if discard:
            self._discarded = True
            self._items.clear()
            self._reading.clear()
            self._returned = None
        if self.ended:
            return
        self.ended = True
        self._starved = None
        self._error = error
        if discard or not self._full:
            # Whoever is told usually owns us: no cycle is left behind.
            self._on_full = _tell_nobody
        self._on_unreadable = None
        waiters, self._waiters = self._waiters, []
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
        return self.next(loop, asyncio.current_task(loop), None)

    def next(
        self,
        loop: asyncio.AbstractEventLoop,
        reader: asyncio.Task[Any] | None,
        stream: object,
    ) -> asyncio.Future[Any]:
        """The same for who knows what loop is running, who reads, and of what."""
        if loop is not self.home:
            return self._step_elsewhere(loop, reader, stream)
        if self._returned:
            return _done(loop, self._returned.pop(0)[1])
        while self._reading or (self._items and self._take_all()):
            item = self._reading.pop()
            if self._opener is not None:
                try:
                    item = self._opener(item)
                except UNREADABLE as error:
                    self._give_up_on(error)
                    break
                if item is None:
                    self.skipped += 1
                    continue
            future: asyncio.Future[Any] = loop.create_future()
            future.set_result(item)
            return future
        if self.ended:
            return _fail(loop.create_future(), self._next_end())
        waiter = Step.make(loop, self, reader, stream)
        self._waiters.append(waiter)
        if self._starved is not None:
            self._tell_starved()
        return waiter

    def _take_all(self) -> bool:
        """Begin with what arrived meanwhile; whether there is any.

        One item after the other from a list that does not change costs least.
        """
        items = self._items
        if not items:
            return False
        items.reverse()
        self._items, self._reading = self._reading, items
        self._bytes = 0
        if self._full:
            self._full = False
            self._on_full(False)
            if self.ended:
                self._on_full = _tell_nobody
        return True

    def gave_up(self) -> None:
        """A waiter was cancelled: clear them away before they are the majority."""
        self._dead += 1
        if 2 * self._dead > len(self._waiters):
            self._waiters = [one for one in self._waiters if not one.done()]
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
            if not self._discarded:
                self._hand_again(number, item)
        elif isinstance(error, Exception) and not isinstance(error, StopAsyncIteration):
            self._error = error

    def _hand_again(self, number: int, item: object) -> None:
        """Whoever waits has waited for this one; else it lies in front of the others."""
        while self._waiters:
            if self._hand(number, item):
                return
        self._returned = self._returned or []
        bisect.insort(self._returned, (number, item), key=_number_of)

    # Readers in other loops.

    def _step_elsewhere(
        self,
        loop: asyncio.AbstractEventLoop,
        reader: asyncio.Task[Any] | None,
        stream: object,
    ) -> asyncio.Future[Any]:
        """Ask at home, bring the answer here."""
        far = _FarStep.make(loop, self, reader, stream)
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
