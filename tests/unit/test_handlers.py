"""Which callables can serve, how they are called, and what is said of the others."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from dynamo.runtime._calls.context import Context
from dynamo.runtime._calls.handlers import Handler, ShapeError
from dynamo.runtime._calls.streams import ResponseSender
from dynamo.runtime._calls.threads import ThreadedGenerator

CONTEXT = Context("id")
SENDER = ResponseSender._of(Mock())


async def plain(request):
    yield request


async def with_context(request, context):
    yield request, context


async def keyword_only(request, *, context=None):
    yield request, context


async def anything(*args, **kwargs):
    yield args, kwargs


async def pushing(request, response_sender, context):
    yield request, response_sender, context


class Methods:
    async def method(self, request, context):
        yield request, context

    @staticmethod
    async def static(request):
        yield request

    @classmethod
    async def of_class(cls, request):
        yield request

    async def __call__(self, request):
        yield request


def returns_generator(request):
    return plain(request)


class Steps:
    """An iterator by ``__anext__`` alone."""

    def __init__(self, request: Any) -> None:
        self.left = [request]
        self.closed = 0

    async def __anext__(self):
        if not self.left:
            raise StopAsyncIteration
        return self.left.pop()

    async def aclose(self):
        self.closed += 1


class BareSteps:
    def __init__(self, request: Any) -> None:
        self.left = [request]

    __anext__ = Steps.__anext__


async def items(handler: Handler, request: Any = "r") -> list[Any]:
    return [item async for item in handler.call(request, CONTEXT, SENDER)]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (plain, "r"),
        (with_context, ("r", CONTEXT)),
        (keyword_only, ("r", CONTEXT)),
        (anything, (("r",), {})),
        (functools.partial(with_context, context=1), ("r", CONTEXT)),
        (functools.partial(functools.partial(plain)), "r"),
        (Methods().method, ("r", CONTEXT)),
        (Methods.static, "r"),
        (Methods.of_class, "r"),
        (Methods(), "r"),
        (returns_generator, "r"),
        (lambda request: plain(request), "r"),
        (Steps, "r"),
        (BareSteps, "r"),
    ],
)
async def test_what_can_serve_serves_without_complaint(function: Any, expected: Any):
    handler = Handler(function)
    assert handler.complaint() is None
    assert handler.pushes is False
    assert await items(handler) == [expected]


async def test_push_mode_gets_the_sender_and_the_context():
    handler = Handler(pushing)
    assert handler.pushes is True
    assert await items(handler) == [("r", SENDER, CONTEXT)]


async def coroutine(request):
    return request


def generator(request):
    yield request


def returns_value(request):
    return [request]


class ReturnsCoroutine:
    async def __call__(self, request):
        return request


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (coroutine, "coroutine function: use 'yield'"),
        (functools.partial(coroutine), "coroutine function: use 'yield'"),
        (ReturnsCoroutine(), "coroutine function: use 'yield'"),
        (returns_value, None),
        (Mock(return_value=5), None),
    ],
)
def test_a_callable_that_returns_something_else_is_refused_per_call(
    function: Any, complaint: str | None
):
    handler = Handler(function)
    if complaint is None:
        assert handler.complaint() is None
    else:
        assert complaint in (handler.complaint() or "")
    with pytest.raises(ShapeError, match="has no attribute '__anext__'") as caught:
        handler.call("r", CONTEXT, SENDER)
    assert type(caught.value.cause) is AttributeError


def plain_with_context(request, context):
    yield request, context


class PlainMethods:
    def method(self, request, context):
        yield request, context

    @staticmethod
    def static(request):
        yield request

    def __call__(self, request):
        yield request


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (generator, "r"),
        (plain_with_context, ("r", CONTEXT)),
        (functools.partial(plain_with_context, context=1), ("r", CONTEXT)),
        (functools.partial(functools.partial(generator)), "r"),
        (PlainMethods().method, ("r", CONTEXT)),
        (PlainMethods.static, "r"),
        (PlainMethods(), "r"),
    ],
)
async def test_plain_generator_functions_serve_in_a_thread(
    function: Any, expected: Any
):
    handler = Handler(function)
    assert handler.complaint() is None
    iterator: Any = handler.call("r", CONTEXT, SENDER)
    assert isinstance(iterator, ThreadedGenerator)
    assert [item async for item in iterator] == [expected]
    await iterator.aclose()


def plain_pushing(request, response_sender, context):
    yield request


@pytest.mark.parametrize(
    ("function", "streamed"), [(plain_pushing, False), (generator, True)]
)
def test_a_thread_can_neither_push_nor_read_a_stream(function: Any, streamed: bool):
    handler = Handler(function, streamed=streamed)
    assert "use 'async def'" in (handler.complaint() or "")
    with pytest.raises(ShapeError, match="has no attribute '__anext__'"):
        handler.call("r", CONTEXT, SENDER)


def returns_plain_generator(request):
    return generator(request)


def test_a_plain_generator_that_a_function_returns_is_refused():
    """Its first part has run already, and not in a thread."""
    handler = Handler(returns_plain_generator)
    with pytest.raises(ShapeError, match="'generator' object has no attribute"):
        handler.call("r", CONTEXT, SENDER)


async def needs_two(request, other):
    yield request


async def needs_none():
    yield 1


async def context_by_position(request, context, /):
    yield request


async def pushes_without_context(request, response_sender):
    yield request


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (needs_two, "needs_two() missing a required argument: 'other'"),
        (needs_none, "needs_none() too many positional arguments"),
        (context_by_position, "context_by_position()"),
        (pushes_without_context, "got an unexpected keyword argument 'context'"),
        (None, "'NoneType' object is not callable"),
        (5, "'int' object is not callable"),
    ],
)
def test_wrong_signatures_are_complained_about_and_refused(function: Any, words: str):
    handler = Handler(function)
    assert words in (handler.complaint() or "")
    with pytest.raises(ShapeError) as caught:
        handler.call("r", CONTEXT, SENDER)
    assert words in str(caught.value)
    assert type(caught.value.cause) is TypeError


def test_a_callable_without_a_signature_is_called_with_the_request_alone():
    handler = Handler(type("Odd", (), {"__call__": dict.fromkeys})())
    assert handler.complaint() is None
    strange = Handler(max)
    assert strange.complaint() is None
    with pytest.raises(ShapeError, match="'int' object"):
        strange.call([1, 2], CONTEXT, SENDER)


@pytest.mark.parametrize(
    "kind", [ValueError, KeyboardInterrupt, asyncio.CancelledError]
)
def test_what_the_callable_itself_raises_passes(kind: type[BaseException]):
    def raising(request):
        raise kind("boom")

    with pytest.raises(kind):
        Handler(raising).call("r", CONTEXT, SENDER)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (plain, "plain"),
        (Methods().method, "Methods.method"),
        (Methods(), "Methods"),
        (functools.partial(plain), "partial"),
        (None, "NoneType"),
    ],
)
def test_the_name_for_log_lines(function: Any, name: str):
    assert Handler(function).name == name


async def test_an_iterator_that_can_be_closed_is_closed_through_its_wrapper():
    made: list[Steps] = []

    def handler(request: Any) -> Steps:
        made.append(Steps(request))
        return made[0]

    iterator: Any = Handler(handler).call("r", CONTEXT, SENDER)
    await iterator.aclose()
    assert made[0].closed == 1
    bare: Any = Handler(BareSteps).call("r", CONTEXT, SENDER)
    await bare.aclose()


def test_looking_at_a_mock_ends():
    """A mock has every attribute, also ``func``, without end."""
    look: Callable[[], str | None] = Handler(Mock()).complaint
    assert look() is None
