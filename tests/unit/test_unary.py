from __future__ import annotations

import functools

import pytest

from dynamo.runtime._calls.context import Context
from dynamo.runtime._calls.handlers import Handler
from dynamo.runtime._unary import UnaryClient, serve_unary_endpoint


class Caller:
    """Answers each call with the items it was given, then with an error if any."""

    def __init__(self, items, error: Exception | None = None) -> None:
        self.items = items
        self.error = error
        self.calls: list[tuple[object, bool, object]] = []
        self.closed = 0

    async def round_robin(self, request, *, annotated, context, **options):
        self.calls.append((request, annotated, context))
        self.options = options
        return self.answers()

    async def answers(self):
        try:
            for item in self.items:
                yield item
            if self.error:
                raise self.error
        finally:
            self.closed += 1


class Endpoint:
    """Keeps the handler it is told to serve."""

    async def serve_endpoint(self, generator):
        self.generator = generator
        return ()


async def test_the_one_item_is_the_answer():
    caller, context = Caller(["a"]), Context("c")
    assert await UnaryClient(caller).complete([1], context=context) == "a"
    assert await UnaryClient(caller).complete(request=7) == "a"
    assert caller.calls == [([1], False, context), (7, False, None)]
    assert caller.closed == 2


async def test_only_options_that_were_given_are_passed_on():
    caller = Caller(["a"])
    await UnaryClient(caller).complete(1)
    assert caller.options == {}
    await UnaryClient(caller).complete(1, timeout=2.5, idempotent=True)
    assert caller.options == {"timeout": 2.5, "idempotent": True}


async def named_by_the_user(request, *, context):
    return request


@pytest.mark.parametrize(
    ("handler", "name"),
    [
        (named_by_the_user, "named_by_the_user"),
        (functools.partial(named_by_the_user), "partial"),
    ],
)
async def test_log_lines_name_the_function_of_the_user(handler, name: str):
    endpoint = Endpoint()
    await serve_unary_endpoint(endpoint, handler)
    assert Handler(endpoint.generator).name == name


@pytest.mark.parametrize(
    ("items", "words"), [([], "no response"), ([1, 2], "multiple responses")]
)
async def test_another_number_of_items_is_an_error(items, words):
    caller = Caller(items)
    with pytest.raises(RuntimeError, match=f"unary endpoint returned {words}") as error:
        await UnaryClient(caller).complete(1)
    assert isinstance(error.value.__cause__, StopAsyncIteration) == (not items)
    assert caller.closed == 1


@pytest.mark.parametrize("items", [[], [1]])
async def test_errors_of_the_stream_pass_through(items):
    caller = Caller(items, KeyError("k"))
    with pytest.raises(KeyError, match="k"):
        await UnaryClient(caller).complete(1)
    assert caller.closed == 1


async def test_an_iterator_without_aclose_will_do():
    class Plain:
        def __init__(self) -> None:
            self.items = ["a"]

        def __aiter__(self):
            return self

        async def __anext__(self):
            if not self.items:
                raise StopAsyncIteration
            return self.items.pop()

    class PlainCaller:
        async def round_robin(self, request, *, annotated, context):
            return Plain()

    assert await UnaryClient(PlainCaller()).complete(1) == "a"


@pytest.mark.parametrize("arguments", [(), (1, Context("x"))])
def test_wrong_arguments_are_refused_by_the_call(arguments):
    with pytest.raises(TypeError):
        UnaryClient(Caller([])).complete(*arguments)


async def test_serving_gives_the_result_as_the_one_item():
    async def echo(request, *, context):
        return request, context.id()

    endpoint = Endpoint()
    assert await serve_unary_endpoint(endpoint, echo) is None
    stream = endpoint.generator("hi", context=Context("c"))
    assert [item async for item in stream] == [("hi", "c")]


async def test_errors_of_the_handler_come_at_the_first_step():
    async def refuse(request, *, context):
        raise ValueError("no")

    endpoint = Endpoint()
    await serve_unary_endpoint(endpoint, refuse)
    stream = endpoint.generator("hi", context=None)
    with pytest.raises(ValueError, match="no"):
        await anext(stream)


async def test_a_plain_function_is_a_type_error_at_the_first_step():
    endpoint = Endpoint()
    await serve_unary_endpoint(endpoint, lambda request, *, context: 5)
    stream = endpoint.generator("hi", context=None)
    with pytest.raises(TypeError, match="await"):
        await anext(stream)
