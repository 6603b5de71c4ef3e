from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import os
import pickle
import threading
import uuid
import weakref
from collections import Counter
from functools import partial

import pytest

from dynamo.runtime._calls import context as module
from dynamo.runtime._calls.context import (
    Context,
    ContextMetadata,
    ContextState,
    new_id,
)
from dynamo.runtime._observability.metrics import MetricsCallbacks, RuntimeMetrics
from dynamo.runtime._observability.tracing import SpanIdentity, SpanProxy
from dynamo.runtime._wire.propagation import TraceContext

HANDLES = [
    Context("a"),
    Context("a").metadata,
    Context("a").current_span(),
    RuntimeMetrics._make(MetricsCallbacks()),
]


class Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "not the text"


# --- ids -----------------------------------------------------------------------------


def test_new_ids_are_version_4_uuids_and_differ():
    ids = [new_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    for text in ids:
        parsed = uuid.UUID(text)
        assert str(parsed) == text
        assert parsed.version == 4
        assert parsed.variant == uuid.RFC_4122


def test_all_four_variants_occur():
    assert {new_id()[19] for _ in range(500)} == set("89ab")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_makes_other_ids():
    new_id()  # leaves spare ids behind, which the child must not use
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - runs in the child
        os.write(write_end, new_id().encode())
        os._exit(0)
    os.close(write_end)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        theirs = os.read(read_end, 100).decode()
    finally:
        os.close(read_end)
    assert uuid.UUID(theirs).version == 4
    assert theirs not in {new_id() for _ in range(module._IDS_PER_REFILL * 2)}


def test_threads_never_share_an_id():
    seen: list[str] = []

    def make() -> None:
        seen.extend([new_id() for _ in range(2000)])

    run_together([make] * 4)
    assert len(set(seen)) == len(seen) == 8000


@pytest.mark.parametrize("text", ["", "k w", "hé \n x", "x" * 5000])
def test_a_given_id_is_kept(text):
    assert Context(text).id() == text


def test_a_str_subclass_becomes_its_own_text():
    context = Context(Text("q"), {Text("k"): Text("v")})
    assert type(context.id()) is str
    assert context.id() == "q"
    assert context.metadata.items() == [("k", "v")]
    assert type(context.metadata["k"]) is str


# --- arguments -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        (5,),
        (b"x",),
        ("a", {"k": 1}),
        ("a", {1: "v"}),
        ("a", [("k", "v")]),
        ("a", Context().metadata),
        ("a", {}, 1),
    ],
)
def test_wrong_arguments_are_type_errors(arguments):
    with pytest.raises(TypeError):
        Context(*arguments)


@pytest.mark.parametrize(
    "arguments", [("\ud800",), ("a", {"k": "\ud800"}), ("a", {"\ud800": "v"})]
)
def test_a_lone_surrogate_is_refused(arguments):
    with pytest.raises(UnicodeEncodeError):
        Context(*arguments)


def test_a_failed_assignment_changes_nothing():
    context = Context("a", {"k": "v"})
    for value in (None, 5, {"k": 1}, {1: "v"}, context.metadata):
        with pytest.raises(TypeError, match="metadata"):
            context.metadata = value
    assert context.metadata.copy() == {"k": "v"}


# --- metadata ------------------------------------------------------------------------


def test_metadata_is_copied_in_and_every_view_is_live():
    source = {"k": "v"}
    context = Context("a", source)
    source["k"] = "changed"
    before = context.metadata
    context.metadata = {"b": "2", "a": "1"}
    assert before.copy() == {"a": "1", "b": "2"}
    before["c"] = "3"
    assert list(context.metadata) == ["a", "b", "c"]


def test_metadata_is_always_sorted():
    metadata = Context("a", {"b": "2", "a": "1", "é": "4", "c": "3"}).metadata
    assert list(metadata) == metadata.keys() == ["a", "b", "c", "é"]
    assert metadata.values() == ["1", "2", "3", "4"]
    assert list(metadata.copy()) == list(dict(metadata)) == list(dict(**metadata))


def test_metadata_iteration_is_over_a_snapshot():
    metadata = Context("a", {"a": "1", "b": "2"}).metadata
    for key in metadata:
        del metadata[key]
    assert not metadata
    assert len(metadata) == 0


def test_metadata_pop_with_none_returns_none():
    metadata = Context("a", {"k": "v"}).metadata
    assert metadata.pop("absent", None) is None
    assert metadata.pop("absent", "d") == "d"
    assert metadata.pop("k", None) == "v"
    with pytest.raises(KeyError, match="k"):
        metadata.pop("k")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda m: m["z"], KeyError),
        (lambda m: m[1], TypeError),
        (lambda m: m.__delitem__("z"), KeyError),
        (lambda m: m.__setitem__("k", 1), TypeError),
        (lambda m: m.__setitem__(1, "v"), TypeError),
        (lambda m: m.__setitem__("k", "\udfff"), UnicodeEncodeError),
        (lambda m: m.get(1), TypeError),
        (lambda m: m.get("z", 5), TypeError),
        (lambda m: m.pop("k", 5), TypeError),
        (lambda m: 1 in m, TypeError),
        (lambda m: m | {}, TypeError),
        (lambda m: m.update({}), AttributeError),
    ],
)
def test_metadata_errors(call, error):
    metadata = Context("a", {"k": "v"}).metadata
    with pytest.raises(error):
        call(metadata)
    assert metadata.copy() == {"k": "v"}


def test_metadata_compares_by_identity():
    context = Context("a", {"k": "v"})
    assert context.metadata != {"k": "v"}
    assert context.metadata != context.metadata
    assert hash(context.metadata) is not None


def test_metadata_repr_escapes_as_the_genuine_runtime_does():
    controls = "".join(map(chr, range(0x10)))
    rest = "\x7f\x80\xa0é\u0301'\"\\\u200b\U0001f600\ue000x\u0301"
    metadata = Context("a", {"k": controls + rest, "a": "1"}).metadata
    # Recorded from the genuine wheel.
    expected = (
        r'{"a": "1", "k": "\0\u{1}\u{2}\u{3}\u{4}\u{5}\u{6}\u{7}\u{8}\t\n\u{b}\u{c}\r'
        r"\u{e}\u{f}\u{7f}\u{80}\u{a0}" + "é" + r"\u{301}'\"\\\u{200b}"
        "\U0001f600" + r'\u{e000}x\u{301}"}'
    )
    assert repr(metadata) == str(metadata) == expected
    assert repr(Context().metadata) == "{}"


# --- identity of the handles ----------------------------------------------------------


@pytest.mark.parametrize("handle", HANDLES, ids=lambda h: type(h).__name__)
def test_handles_are_sealed(handle):
    for refused in (copy.copy, copy.deepcopy, pickle.dumps, weakref.ref):
        with pytest.raises(TypeError):
            refused(handle)
    with pytest.raises(AttributeError):
        handle.anything = 1
    with pytest.raises(TypeError, match="base type"):
        type("Sub", (type(handle),), {})
    assert not hasattr(handle, "__dict__")


@pytest.mark.parametrize("cls", [ContextMetadata, SpanProxy, RuntimeMetrics])
def test_some_classes_have_no_constructor(cls):
    with pytest.raises(TypeError, match=f"No constructor defined for {cls.__name__}"):
        cls()


def test_contexts_are_equal_only_to_themselves():
    a, b = Context("x"), Context("x")
    assert a == a
    assert a != b
    assert len({a, b}) == 2


def test_signatures_are_the_published_ones():
    *published, ours = inspect.signature(Context).parameters.values()
    assert [one.name for one in published] == ["id", "metadata"]
    assert (ours.name, ours.kind, ours.default) == ("timeout", ours.KEYWORD_ONLY, None)
    pop = inspect.signature(ContextMetadata.pop).parameters["default"]
    assert pop.default is not pop.empty


# --- stopping and listeners ------------------------------------------------------------


def state() -> ContextState:
    return ContextState("id", {})


def test_stop_then_kill_tells_both_once():
    heard: list[bool] = []
    one = state()
    one.subscribe(heard.append)
    one.stop()
    one.stop()
    assert heard == [False]
    assert (one.stopped, one.killed) == (True, False)
    one.kill()
    one.kill()
    assert heard == [False, True]
    assert (one.stopped, one.killed) == (True, True)


def test_kill_alone_tells_once():
    heard: list[bool] = []
    one = state()
    one.subscribe(heard.append)
    one.kill()
    one.stop()
    assert heard == [True]


@pytest.mark.parametrize(("end", "told"), [("stop", False), ("kill", True)])
def test_subscribing_late_tells_at_once(end, told):
    one = state()
    getattr(one, end)()
    heard: list[bool] = []
    one.subscribe(heard.append)
    assert heard == [told]


def test_unsubscribed_listeners_hear_nothing():
    heard: list[bool] = []
    one = state()
    one.unsubscribe(heard.append)  # absent: no error
    one.subscribe(heard.append)
    one.unsubscribe(heard.append)
    one.kill()
    assert heard == []


def test_a_listener_may_unsubscribe_others_and_itself():
    one = state()
    heard: list[str] = []

    def first(killed: bool) -> None:
        heard.append("first")
        one.unsubscribe(first)
        one.unsubscribe(second)

    def second(killed: bool) -> None:
        heard.append("second")

    one.subscribe(first)
    one.subscribe(second)
    one.stop()
    one.kill()
    assert heard == ["first"]


def test_100_000_subscriptions_leave_nothing_behind():
    one = state()
    for _ in range(100_000):
        listener = [].append
        one.subscribe(listener)
        one.unsubscribe(listener)
    assert len(one._on_stop) == len(one._on_kill) == 0
    assert one._on_stop.__sizeof__() < 1000


def test_stopping_from_a_finalizer_inside_subscribe_is_safe():
    one = state()
    heard: list[bool] = []

    class Dropped:
        def __del__(self) -> None:
            one.stop()

        def __call__(self, killed: bool) -> None:
            """Never called: it goes before the stop that its end causes."""

    one.subscribe(heard.append)
    listener = Dropped()
    one.subscribe(listener)
    one.unsubscribe(listener)
    del listener
    gc.collect()
    assert heard == [False]


def run_together(bodies) -> None:
    barrier = threading.Barrier(len(bodies))
    failures: list[BaseException] = []

    def run(body) -> None:
        barrier.wait(5)
        try:
            body()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def subscribe_all(one: ContextState, told: list, numbers: range) -> None:
    for number in numbers:
        one.subscribe(lambda killed, number=number: told.append((number, killed)))


def test_racing_stops_and_subscriptions_tell_every_listener_exactly_once():
    for _ in range(100):
        one = state()
        told: list[tuple[int, bool]] = []
        first, second = (
            partial(subscribe_all, one, told, numbers)
            for numbers in (range(10), range(10, 20))
        )
        run_together([first, second, one.stop, one.stop])
        assert Counter(told) == {(number, False): 1 for number in range(20)}


def test_racing_stop_and_kill_tell_the_kill_once_and_the_stop_at_most_once():
    for _ in range(100):
        one = state()
        told: list[tuple[int, bool]] = []
        subscribe_all(one, told, range(10))
        run_together([one.stop, one.kill])
        counts = Counter(told)
        assert max(counts.values()) == 1
        assert all(counts[number, True] == 1 for number in range(10))


# --- waiting ---------------------------------------------------------------------------


async def one_turn() -> None:
    """Let the loop run what is due now."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.call_soon(done.set_result, None)
    await done


async def test_waiters_wake_when_the_context_stops():
    context = Context("a")
    waiters = [context.async_killed_or_stopped() for _ in range(3)]
    assert all(asyncio.isfuture(w) and not w.done() for w in waiters)
    context.stop_generating()
    assert await asyncio.wait_for(asyncio.gather(*waiters), 2) == [True] * 3
    late = context.async_killed_or_stopped()
    assert late.done()
    assert late.result() is True


async def test_waiters_wake_from_another_thread():
    context = Context("a")
    waiter = context.async_killed_or_stopped()
    thread = threading.Thread(target=context._state.kill)
    thread.start()
    assert await asyncio.wait_for(waiter, 2) is True
    thread.join(5)
    assert context.is_killed()


async def test_stop_and_kill_before_the_loop_turns_complete_the_waiter_once():
    context = Context("a")
    waiter = context.async_killed_or_stopped()
    context._state.stop()
    context._state.kill()
    assert await asyncio.wait_for(waiter, 2) is True


async def test_finished_waiters_leave_nothing_behind():
    context = Context("a")
    for _ in range(50):
        context.async_killed_or_stopped().cancel()
    kept = context.async_killed_or_stopped()
    await one_turn()
    assert len(context._state._on_stop) == len(context._state._on_kill) == 1
    assert not context.is_stopped()
    context.stop_generating()
    assert await asyncio.wait_for(kept, 2) is True
    await one_turn()
    assert len(context._state._on_kill) == 0


async def test_a_waiter_that_timed_out_leaves_the_context_alone():
    context = Context("a")
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(context.async_killed_or_stopped(), 0.01)
    assert not context.is_stopped()


def test_waiting_needs_a_running_loop():
    with pytest.raises(RuntimeError, match="no running event loop"):
        Context("a").async_killed_or_stopped()


def test_stopping_after_the_loop_closed_is_quiet():
    context = Context("a")

    async def leave_a_waiter() -> None:
        context.async_killed_or_stopped()

    asyncio.run(leave_a_waiter())
    context.stop_generating()
    assert context.is_stopped()


# --- detached, traces, spans ------------------------------------------------------------


def test_detached_copies_the_metadata_and_not_the_stop():
    old = Context("a", {"k": "v"})
    old._state.deadline = 5.0
    old.stop_generating()
    new = old.detached("b")
    old.metadata["k"] = "changed"
    assert (new.id(), new.metadata.copy()) == ("b", {"k": "v"})
    assert not new.is_stopped()
    assert (old.deadline, new.deadline) == (5.0, None)


@pytest.mark.parametrize("arguments", [(), (None,), (5,)])
def test_detached_needs_an_id(arguments):
    with pytest.raises(TypeError):
        Context("a").detached(*arguments)


def test_without_tracing_there_is_no_trace():
    context = Context("a", {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"})
    # A trace that only passes through is not shown either.
    context._state.trace = TraceContext("00-1-2-01", None, None)
    assert context.trace_id is None
    assert context.span_id is None
    assert context.parent_span_id is None
    assert context.trace_headers() is None
    with pytest.raises(AttributeError):
        context.trace_id = "x"
    with pytest.raises(AttributeError):
        del context.metadata


def test_with_tracing_the_span_is_shown_and_kept_by_detached():
    one = state()
    one.span = SpanIdentity("t" * 32, "s" * 16, None, {"traceparent": "x"})
    for context in (Context._of(one), Context._of(one).detached("b")):
        assert context.trace_id == "t" * 32
        assert context.span_id == "s" * 16
        assert context.parent_span_id is None
        headers = context.trace_headers()
        assert headers == {"traceparent": "x"}
        headers["traceparent"] = "changed"
        assert context.trace_headers() == {"traceparent": "x"}


def test_spans_take_everything_and_keep_nothing():
    context = Context("a")
    assert context.notify_first_token() is None
    span = context.current_span()
    assert span.set_attribute("k", object()) is None
    assert span.add_event("e", {1: 2}) is None
    assert span.set_status("error", "why") is None
    assert span.close() is None
    assert span.close() is None
    assert span.__exit__() is False
    with context.start_span("child", {}) as child:
        assert isinstance(child, SpanProxy)


def test_spans_let_exceptions_through():
    span = Context("a").start_span("child")
    with pytest.raises(KeyError), span:
        raise KeyError("through")


@pytest.mark.parametrize(
    ("method", "arguments", "error"),
    [
        ("set_attribute", (1, 1), TypeError),
        ("add_event", (1,), TypeError),
        ("add_event", ("a", []), TypeError),
        ("set_status", (1,), TypeError),
        ("set_status", ("ok", 5), TypeError),
        ("set_status", ("OK",), ValueError),
    ],
)
def test_spans_check_their_arguments(method, arguments, error):
    with pytest.raises(error):
        getattr(Context().current_span(), method)(*arguments)


@pytest.mark.parametrize("arguments", [(), (5,), ("a", [])])
def test_start_span_checks_its_arguments(arguments):
    with pytest.raises(TypeError):
        Context().start_span(*arguments)


def test_metrics_callbacks_are_kept_in_order_and_unchecked():
    callbacks = MetricsCallbacks()
    metrics = RuntimeMetrics._make(callbacks)
    metrics.register_prometheus_expfmt_callback("not even callable")
    metrics.register_prometheus_expfmt_callback(None)
    metrics.register_prometheus_typed_callback(5)
    assert callbacks.expfmt == ["not even callable", None]
    assert callbacks.typed == [5]
