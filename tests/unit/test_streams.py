"""The hand-over of items to whoever reads, in whatever loop."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import pickle
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from envelopes import received

from dynamo.runtime._calls.inbox import _FULL_BYTES, Inbox, on_loop
from dynamo.runtime._calls.streams import (
    AsyncResponseStream,
    PyAsyncRequestStream,
    ResponseSender,
)
from dynamo.runtime._wire.payload import Annotated
from dynamo.runtime.errors import RemoteError, RuntimeClosed

LIMIT_S = 5.0


class Home:
    """An inbox in the running loop, with what it said about being full."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.marks: list[bool] = []
        self.inbox = Inbox(self.loop, self.marks.append)

    def put(self, *items: object, size_bytes: int = 1) -> None:
        for item in items:
            self.inbox.put(item, size_bytes)

    async def read(self) -> Any:
        return await self.inbox.step()

    async def rest(self) -> list[Any]:
        """Everything up to the end."""
        return [item async for item in PyAsyncRequestStream._of(self.inbox)]

    def waiting(self) -> int:
        return len(self.inbox._waiters)


@pytest.fixture
async def home() -> Home:
    return Home()


class Opening(Home):
    """An inbox that opens its items: None is nothing, bytes cannot be read."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[Any] = []
        self.told: list[str] = []
        self.inbox = Inbox(self.loop, self.marks.append, self._open, self._unreadable)

    def _open(self, item: Any) -> Any:
        if isinstance(item, bytes):
            raise UnicodeDecodeError("utf-8", item, 0, 1, "no")
        self.opened.append(item)
        return item

    def _unreadable(self, failure: Exception) -> None:
        self.told.append(str(failure))
        self.inbox.end(failure)


@pytest.fixture
async def opening() -> Opening:
    return Opening()


async def test_items_are_opened_when_their_turn_comes(opening: Opening):
    opening.put(1, 2)
    assert opening.opened == []
    assert await opening.read() == 1
    assert opening.opened == [1]
    assert await opening.read() == 2
    reading = asyncio.create_task(opening.read())
    await asyncio.sleep(0)
    opening.put(3, 4)
    assert opening.opened == [1, 2, 3]
    assert await reading == 3


async def test_what_is_nothing_to_the_reader_holds_nobody_up(opening: Opening):
    """Also when so much of it has come that the sender pauses."""
    opening.put(None, size_bytes=2 * _FULL_BYTES)
    assert opening.marks == [True]
    reading = asyncio.create_task(opening.read())
    await asyncio.sleep(0)
    assert opening.marks == [True, False]
    opening.inbox.put_all([None, "a", None], 1)
    assert await reading == "a"
    opening.inbox.end(None)
    assert await opening.rest() == []
    assert opening.inbox.skipped == 3


@pytest.mark.parametrize("ended", [False, True])
async def test_an_item_that_cannot_be_read_ends_the_stream_in_its_place(
    opening: Opening, ended: bool
):
    opening.put("a", b"bad", "never")
    if ended:
        opening.inbox.end(None)
    assert await opening.read() == "a"
    assert opening.told == []
    with pytest.raises(RemoteError, match=r"not msgpack.*no"):
        await opening.read()
    assert await opening.rest() == []
    assert len(opening.told) == (0 if ended else 1)
    assert opening.opened == ["a"]


async def test_a_reader_that_waits_hears_of_an_item_that_cannot_be_read(
    opening: Opening,
):
    reading = asyncio.create_task(opening.read())
    await asyncio.sleep(0)
    opening.inbox.put_all([b"bad", "never"], 1)
    with pytest.raises(RemoteError, match=r"not msgpack.*no"):
        await reading
    assert await opening.rest() == []
    assert opening.opened == []


async def test_sifting_counts_what_is_nothing_and_loses_nothing(opening: Opening):
    opening.put(None, 1, None, 2)
    assert await opening.read() == 1
    opening.put(3, None)
    opening.inbox.sift()
    assert opening.inbox.skipped == 3
    assert opening.opened == [None, 1, None, 2, 3, None]
    opening.put(4, b"bad")
    opening.inbox.sift()
    opening.inbox.end(None)
    assert [await opening.read() for _ in range(3)] == [2, 3, 4]
    with pytest.raises(RemoteError, match=r"not msgpack.*no"):
        await opening.read()


class Elsewhere:
    """Another thread with a loop of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="elsewhere")
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    def start(self, work: Awaitable[Any]) -> asyncio.Future[Any]:
        async def awaited() -> Any:
            return await work

        return asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(awaited(), self.loop)
        )

    async def call(self, function: Callable[[], Any]) -> Any:
        """The result of a function that needs the other loop to be running."""

        async def called() -> Any:
            return function()

        return await asyncio.wait_for(self.start(called()), LIMIT_S)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    there = Elsewhere()
    yield there
    there.close()


async def until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(poll(), limit_s)


# ------------------------------------------------------------------ order and the end


async def test_items_come_in_order_whether_they_waited_or_were_waited_for(home: Home):
    home.put(1, 2)
    assert [await home.read(), await home.read()] == [1, 2]
    reading = asyncio.create_task(home.read())
    await asyncio.sleep(0)
    home.put(3, 4)
    assert await reading == 3
    home.inbox.end(None)
    assert await home.rest() == [4]


async def test_each_item_goes_to_one_reader_in_the_order_in_which_they_asked(
    home: Home,
):
    readers = [asyncio.create_task(home.read()) for _ in range(5)]
    await asyncio.sleep(0)
    home.put(*range(7))
    assert await asyncio.gather(*readers) == [0, 1, 2, 3, 4]
    home.inbox.end(None)
    assert await home.rest() == [5, 6]


async def test_error_is_raised_once_after_the_items_then_the_stream_is_exhausted(
    home: Home,
):
    home.put("last")
    home.inbox.end(ValueError("broken"))
    assert await home.read() == "last"
    with pytest.raises(ValueError, match="broken"):
        await home.read()
    for _ in range(2):
        with pytest.raises(StopAsyncIteration, match="Stream exhausted"):
            await home.read()


async def test_of_several_waiting_readers_one_gets_the_error(home: Home):
    readers = [asyncio.create_task(home.read()) for _ in range(3)]
    await asyncio.sleep(0)
    home.inbox.end(ValueError("broken"))
    outcomes = await asyncio.gather(*readers, return_exceptions=True)
    assert [type(one) for one in outcomes] == [
        ValueError,
        StopAsyncIteration,
        StopAsyncIteration,
    ]


async def test_what_comes_after_the_end_counts_for_nothing(home: Home):
    home.inbox.end(None)
    assert home.inbox.ended
    home.put("late")
    home.inbox.end(ValueError("late"))
    assert await home.rest() == []


async def test_discarding_drops_items_that_were_not_read(home: Home):
    home.put(1, 2)
    home.inbox.end(None, discard=True)
    assert await home.rest() == []


async def test_no_step_without_a_running_loop(home: Home):
    with pytest.raises(RuntimeError, match="no running event loop"):
        await asyncio.to_thread(home.inbox.step)


# ------------------------------------------------------------------ cancelled waits


@pytest.mark.parametrize("readers", [1, 2, 3])
async def test_cancelled_waits_leave_nothing(home: Home, readers: int):
    """Also when the waits of several readers overlap, so that one is always alive."""
    alive = [home.inbox.step() for _ in range(readers)]
    for _ in range(100_000 // readers):
        alive.append(home.inbox.step())
        alive.pop(0).cancel()
    assert home.waiting() <= 2 * readers + 1
    home.put(*range(readers))
    assert [await one for one in alive] == list(range(readers))
    assert home.waiting() == 0


async def cancel_task(home: Home) -> None:
    reading = asyncio.create_task(home.read())
    await asyncio.sleep(0)
    home.put("first")
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def cancel_nested(home: Home) -> None:
    async def outer() -> Any:
        return await asyncio.create_task(home.read())

    reading = asyncio.create_task(outer())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    home.put("first")
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def cancel_by_timeout(home: Home) -> None:
    async def reading() -> None:
        async with asyncio.timeout(None) as limit:
            home.loop.call_soon(home.put, "first")
            home.loop.call_soon(limit.reschedule, home.loop.time() - 1)
            home.loop.call_soon(limit._on_timeout)
            await home.read()

    with pytest.raises(TimeoutError):
        await reading()


@pytest.mark.parametrize(
    "cancel",
    [
        cancel_task,
        cancel_nested,
        # asyncio.timeout came with Python 3.11.
        *([cancel_by_timeout] if hasattr(asyncio, "timeout") else []),
    ],
)
async def test_item_that_arrives_in_the_turn_of_a_cancellation_is_not_lost(
    home: Home, cancel: Callable[[Home], Awaitable[None]]
):
    await cancel(home)
    home.put("second")
    home.inbox.end(None)
    assert await home.rest() == ["first", "second"]


async def test_a_wait_that_is_over_and_cancelled_by_hand_keeps_its_item(home: Home):
    """Its result can still be asked for: the item must not come a second time."""
    step = home.inbox.step()
    home.put("first", "second")
    assert not step.cancel()
    assert await step == "first"
    assert await home.read() == "second"


async def test_wait_for_in_the_turn_of_the_item_delivers_or_keeps_it(home: Home):
    got: list[Any] = []

    async def reading() -> None:
        got.append(await asyncio.wait_for(home.inbox.step(), LIMIT_S))

    task = asyncio.create_task(reading())
    await asyncio.sleep(0)
    home.put("first")
    task.cancel()
    # Older versions of wait_for return the item in spite of the cancellation.
    await asyncio.wait((task,))
    home.inbox.end(None)
    assert got + await home.rest() == ["first"]


async def test_timed_out_waits_lose_nothing(home: Home):
    for number in range(50):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(home.inbox.step(), 0.0001)
        home.put(number)
        assert await home.read() == number
    assert home.waiting() == 0


async def test_returned_item_goes_to_a_reader_that_waits(home: Home):
    """It must not lie there while somebody waits, nor be overtaken by the next."""
    gave_up, waits = (asyncio.create_task(home.read()) for _ in range(2))
    await asyncio.sleep(0)
    home.put("first")
    gave_up.cancel()
    assert await asyncio.wait_for(waits, LIMIT_S) == "first"
    assert gave_up.cancelled()


async def test_returned_items_keep_their_order(home: Home):
    readers = [asyncio.create_task(home.read()) for _ in range(3)]
    await asyncio.sleep(0)
    home.put(1, 2, 3)
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    home.put(4)
    home.inbox.end(None)
    assert await home.rest() == [1, 2, 3, 4]


async def test_returned_item_does_not_come_back_to_a_closed_stream(home: Home):
    reading = asyncio.create_task(home.read())
    await asyncio.sleep(0)
    home.put("first")
    home.inbox.end(None, discard=True)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert await home.rest() == []


async def test_error_lost_in_a_cancelled_wait_comes_back(home: Home):
    reading = asyncio.create_task(home.read())
    await asyncio.sleep(0)
    home.inbox.end(ValueError("broken"))
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    with pytest.raises(ValueError, match="broken"):
        await home.read()
    assert await home.rest() == []


async def test_end_lost_in_a_cancelled_wait_is_still_the_end(home: Home):
    reading = asyncio.create_task(home.read())
    await asyncio.sleep(0)
    home.inbox.end(None)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert await home.rest() == []


# ------------------------------------------------------------------ full and low marks


async def test_full_is_said_once_and_room_when_reading_begins_anew(home: Home):
    home.put(*range(63))
    assert home.marks == []
    home.put(63, 64, 65)
    assert home.marks == [True]
    await home.read()
    assert home.marks == [True, False]
    home.put(*range(66, 130))
    assert home.marks == [True, False, True]
    assert [await home.read() for _ in range(65)] == [*range(1, 66)]
    assert home.marks == [True, False, True]
    assert await home.read() == 66
    assert home.marks == [True, False, True, False]


async def test_a_few_large_items_fill_it_too(home: Home):
    home.put("a", "b", size_bytes=600_000)
    assert home.marks == [True]
    await home.read()
    assert home.marks == [True, False]
    home.put("c", size_bytes=600_000)
    assert home.marks == [True, False]
    home.put("d", size_bytes=600_000)
    assert home.marks == [True, False, True]


async def test_items_that_come_together_go_to_those_who_wait_and_the_rest_stays(
    home: Home,
):
    readers = [asyncio.create_task(home.read()) for _ in range(2)]
    await asyncio.sleep(0)
    home.inbox.put_all(["a", "b", "c", "d"], 4)
    assert await asyncio.gather(*readers) == ["a", "b"]
    home.inbox.put_all(["e"], 1)
    home.inbox.end(None)
    assert await home.rest() == ["c", "d", "e"]


# ------------------------------------------------------------------ other loops


async def test_items_reach_a_reader_in_another_loop(home: Home, elsewhere: Elsewhere):
    async def reading() -> list[Any]:
        return [await home.inbox.step() for _ in range(3)]

    home.put(1)
    there = elsewhere.start(reading())
    await until(lambda: home.waiting() == 1)
    home.put(2, 3)
    assert await asyncio.wait_for(there, LIMIT_S) == [1, 2, 3]


@pytest.mark.parametrize("error", [ValueError("broken"), None])
async def test_the_end_reaches_a_reader_in_another_loop(
    home: Home, elsewhere: Elsewhere, error: Exception | None
):
    async def reading() -> str:
        try:
            await home.inbox.step()
        except (ValueError, StopAsyncIteration) as raised:
            return repr(raised)
        raise AssertionError("there is no item")

    there = elsewhere.start(reading())
    await until(lambda: home.waiting() == 1)
    home.inbox.end(error)
    expected = repr(error or StopAsyncIteration("Stream exhausted"))
    assert await asyncio.wait_for(there, LIMIT_S) == expected


async def test_cancelling_in_another_loop_ends_the_wait_at_home(
    home: Home, elsewhere: Elsewhere
):
    step = await elsewhere.call(home.inbox.step)
    await until(lambda: home.waiting() == 1)
    elsewhere.loop.call_soon_threadsafe(step.cancel)
    await until(lambda: home.waiting() == 0)
    home.put("kept")
    assert await home.read() == "kept"


async def test_items_survive_cancellations_in_another_loop(
    home: Home, elsewhere: Elsewhere
):
    """Whichever comes first, the item or the cancellation: it arrives exactly once."""
    total = 500

    async def reading() -> list[Any]:
        got: list[Any] = []
        while len(got) < total:
            task = asyncio.create_task(read_one())
            elsewhere.loop.call_later(0.0001, task.cancel)
            await asyncio.wait((task,))
            if not task.cancelled():
                got.append(task.result())
        return got

    async def read_one() -> Any:
        return await home.inbox.step()

    there = elsewhere.start(reading())
    for number in range(total):
        home.put(number)
        await asyncio.sleep(0.0001)
    assert await asyncio.wait_for(there, LIMIT_S) == list(range(total))


async def test_cancelled_before_home_heard_of_it_leaves_nothing(
    home: Home, elsewhere: Elsewhere
):
    def asked_and_gave_up() -> None:
        home.inbox.step().cancel()

    await elsewhere.call(asked_and_gave_up)
    home.put("kept")
    await asyncio.sleep(0)
    assert await home.read() == "kept"
    assert home.waiting() == 0


def test_wait_in_another_loop_ends_with_the_home_loop(elsewhere: Elsewhere):
    async def leave_a_reader() -> asyncio.Future[Any]:
        home = Home()

        async def reading() -> Any:
            return await home.inbox.step()

        there = asyncio.run_coroutine_threadsafe(reading(), elsewhere.loop)
        await until(lambda: home.waiting() == 1)
        return there

    there = asyncio.run(leave_a_reader())
    with pytest.raises(RuntimeClosed, match="loop"):
        there.result(LIMIT_S)


def test_reading_after_the_home_loop_closed_is_a_clear_error():
    async def make() -> Inbox:
        return Home().inbox

    async def read(inbox: Inbox) -> Any:
        return await inbox.step()

    inbox = asyncio.run(make())
    with pytest.raises(RuntimeClosed, match="loop"):
        asyncio.run(read(inbox))


async def test_answer_for_a_loop_that_closed_meanwhile_is_kept(home: Home):
    async def ask_and_leave() -> None:
        home.inbox.step()

    await asyncio.to_thread(asyncio.run, ask_and_leave())
    await until(lambda: home.waiting() == 1)
    home.put("kept")
    home.inbox.end(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await home.rest() == ["kept"]


# ------------------------------------------------------------------ on_loop


async def test_on_loop_calls_at_once_at_home_and_soon_from_elsewhere(
    elsewhere: Elsewhere,
):
    here = asyncio.get_running_loop()
    calls: list[int] = []
    on_loop(here, calls.append, 1)
    assert calls == [1]
    await elsewhere.call(lambda: on_loop(here, calls.append, 2))
    await until(lambda: calls == [1, 2])
    await asyncio.to_thread(on_loop, here, calls.append, 3)
    await until(lambda: calls == [1, 2, 3])


def test_on_loop_forgives_a_closed_loop():
    loop = asyncio.new_event_loop()
    loop.close()
    calls: list[int] = []
    on_loop(loop, calls.append, 1)
    assert calls == []


# ------------------------------------------------------------------ the public handles


class Core:
    """A call that only counts."""

    instance_id = 7

    def __init__(self, inbox: Inbox) -> None:
        self.inbox = inbox
        self.reader: asyncio.Task[Any] | None = None
        self.cancelled = 0
        self.drops = 0

    def note_reader(self, reader: asyncio.Task[Any] | None) -> None:
        self.reader = reader

    def cancel(self) -> None:
        self.cancelled += 1

    def dropped(self) -> None:
        self.drops += 1


async def test_stream_is_closed_by_aclose_cancel_and_leaving_async_with(home: Home):
    core = Core(home.inbox)
    stream = AsyncResponseStream._of(core)
    assert stream.instance_id == 7
    assert aiter(stream) is stream
    await stream.aclose()
    assert core.cancelled == 1
    stream.cancel()
    assert core.cancelled == 2
    async with stream as entered:
        assert entered is stream
    assert core.cancelled == 3
    with pytest.raises(KeyError):
        async with stream:
            raise KeyError
    assert core.cancelled == 4


async def test_dropping_the_last_reference_is_told_once(home: Home):
    core = Core(home.inbox)
    stream = AsyncResponseStream._of(core)
    assert core.drops == 0
    del stream
    gc.collect()
    assert core.drops == 1


async def test_pending_step_keeps_the_stream_and_lets_go_afterwards(home: Home):
    core = Core(home.inbox)
    step = AsyncResponseStream._of(core).__anext__()
    gc.collect()
    assert core.drops == 0
    home.put("item")
    assert await step == "item"
    assert core.drops == 1
    step = AsyncResponseStream._of(core).__anext__()
    step.cancel()
    assert core.drops == 2
    step = AsyncResponseStream._of(core).__anext__()
    home.inbox.end(None)
    assert step.stream is None  # type: ignore[attr-defined]
    assert core.drops == 2, "there is nothing left to end"
    with pytest.raises(StopAsyncIteration):
        await step


async def test_pending_step_in_another_loop_keeps_the_stream(
    home: Home, elsewhere: Elsewhere
):
    core = Core(home.inbox)

    async def reading() -> Any:
        return await AsyncResponseStream._of(core).__anext__()

    there = elsewhere.start(reading())
    await until(lambda: home.waiting() == 1)
    gc.collect()
    assert core.drops == 0
    home.put("item")
    assert await asyncio.wait_for(there, LIMIT_S) == "item"
    await until(lambda: core.drops == 1)


async def test_stream_that_was_never_made_is_dropped_silently():
    AsyncResponseStream.__new__(AsyncResponseStream).__del__()


async def test_request_stream_is_read_like_a_response(home: Home):
    requests = PyAsyncRequestStream._of(home.inbox)
    assert aiter(requests) is requests
    home.put(1, None, 3)
    home.inbox.end(None)
    assert [one async for one in requests] == [1, None, 3]
    with pytest.raises(StopAsyncIteration):
        await anext(requests)


def test_response_sender_passes_on():
    class Sink:
        def __init__(self) -> None:
            self.told: list[object] = []

        def push(self, value: object) -> None:
            self.told.append(value)

        def push_end(self, message: str | None) -> None:
            self.told.append(("end", message))

    sink = Sink()
    sender = ResponseSender._of(sink)
    sender.send(1)
    sender.close()
    sender.close_with_error("why")
    assert sink.told == [1, ("end", None), ("end", "why")]


@pytest.mark.parametrize(
    "kind", [AsyncResponseStream, PyAsyncRequestStream, ResponseSender]
)
def test_handles_cannot_be_made_by_users(kind: type):
    with pytest.raises(TypeError, match="No constructor defined"):
        kind()


# ------------------------------------------------------------------ Annotated


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (
            Annotated({"x": 1}),
            "Annotated(data={'x': 1}, event=None, comment=[], id=None)",
        ),
        (Annotated(None), "Annotated(data=None, event=None, comment=[], id=None)"),
        (
            received(event="e", id="i", comment=["ä", 'b"']),
            'Annotated(data=<no_data>, event=e, comment=["ä", "b\\""], id=i)',
        ),
        (
            Annotated(Unprintable()),
            "Annotated(data=<failed_repr>, event=None, comment=[], id=None)",
        ),
    ],
)
def test_annotated_prints_like_the_genuine_one(item: Annotated, text: str):
    assert repr(item) == str(item) == text


def test_annotated_shows_what_came():
    item = received({"x": 1}, event="e", id="i", comment=["c"])
    assert item.data() == {"x": 1}
    assert item.data() is item.data()
    assert item.event() == "e"
    assert item.id() == "i"
    assert item.comments() == ["c"]
    assert item.is_error() is False


def test_annotated_is_compared_by_identity_and_not_copied():
    assert Annotated(1) != Annotated(1)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot copy or pickle"):
            attempt(Annotated(1))


def test_annotated_is_made_of_data_alone_and_stays_as_it_is():
    data: dict[str, int] = {}
    item = Annotated(data)
    assert item.data() is data
    assert Annotated(None).data() is None
    assert str(inspect.signature(Annotated)) == "(data)"
    with pytest.raises(TypeError):
        Annotated(1, "id")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Annotated()  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        item.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="not an acceptable base type"):
        type(Annotated)("Mine", (Annotated,), {})
