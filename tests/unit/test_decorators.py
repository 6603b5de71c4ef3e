from __future__ import annotations

import inspect
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from dynamo.runtime import _decorators as module
from dynamo.runtime._decorators import dynamo_endpoint


class Ask(BaseModel):
    a: int
    b: str = "x"


@dynamo_endpoint(Ask, Ask)
async def handler(request):
    "words"
    yield request


async def collect(stream):
    return [item async for item in stream]


@pytest.mark.parametrize(
    ("payload", "model"),
    [
        ({"a": 1}, Ask(a=1)),
        ('{"a": 1, "b": "q"}', Ask(a=1, b="q")),
        ({"a": "5"}, Ask(a=5)),
        ({"a": 1, "extra": 2}, Ask(a=1)),
    ],
)
async def test_payloads_become_models_without_a_warning(payload, model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert await collect(handler(payload)) == [model]


@pytest.mark.parametrize("payload", [{"a": "x"}, {}, '{"a": "x"}', "[1]"])
async def test_a_payload_that_does_not_fit_is_refused_at_the_first_step(payload):
    stream = handler(payload)
    with pytest.raises(ValueError, match=r"(?s)^Invalid request: .*Ask") as caught:
        await collect(stream)
    assert type(caught.value) is ValueError
    assert isinstance(caught.value.__context__, ValidationError)


@pytest.mark.parametrize("payload", ["not json", "", "[" * 100_000])
async def test_a_text_that_is_no_json_is_refused(payload):
    with pytest.raises(ValueError, match=r"^Invalid request: ") as caught:
        await collect(handler(payload))
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("payload", [None, 5, [1], b'{"a": 1}', Ask(a=1), ("a",)])
async def test_other_payloads_are_refused(payload):
    with pytest.raises(ValueError, match=r"^Invalid request: ") as caught:
        await collect(handler(payload))
    assert str(caught.value) == f"Invalid request: {payload}"


async def test_with_two_arguments_the_second_is_the_payload():
    class Worker:
        @dynamo_endpoint(Ask, Ask)
        async def generate(self, request, context=None):
            yield request, context

    assert await collect(Worker().generate({"a": 1}, context=5)) == [(Ask(a=1), 5)]


async def test_other_ways_to_call_pass_everything_on():
    @dynamo_endpoint(Ask, Ask)
    async def any_call(*args, **kwargs):
        yield args, kwargs

    assert await collect(any_call(1, 2, {})) == [((1, 2, {}), {})]
    assert await collect(any_call(request={})) == [((), {"request": {}})]
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        await collect(handler())


@pytest.mark.parametrize("model", [str, dict, object])
async def test_with_other_classes_requests_are_passed_on(model):
    @dynamo_endpoint(model, model)
    async def plain(request):
        yield request

    assert await collect(plain({"a": 1})) == [{"a": 1}]


@pytest.mark.parametrize("model", [5, "x", None])
async def test_a_model_that_is_no_class_is_a_type_error_at_the_first_step(model):
    @dynamo_endpoint(model, None)
    async def plain(request):
        yield request

    stream = plain({"a": 1})
    with pytest.raises(TypeError, match="needs a class as request_model"):
        await collect(stream)


def test_the_wrapper_looks_like_the_function():
    assert handler.__name__ == "handler"
    assert handler.__doc__ == "words"
    assert str(inspect.signature(handler)) == "(request)"
    assert inspect.isasyncgenfunction(handler)
    with pytest.raises(TypeError):
        dynamo_endpoint(Ask)


async def test_items_are_not_checked():
    @dynamo_endpoint(Ask, Ask)
    async def other_items(request):
        yield "not an Ask"
        yield None

    assert await collect(other_items({"a": 1})) == ["not an Ask", None]


async def test_a_plain_function_is_a_type_error():
    @dynamo_endpoint(Ask, Ask)
    def ordinary(request):
        return [1]

    with pytest.raises(TypeError, match="async for"):
        await collect(ordinary({"a": 1}))


def validation_error() -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        Ask(a="x")
    return caught.value


async def test_a_validation_error_of_the_function_passes_unchanged():
    error = validation_error()

    @dynamo_endpoint(Ask, Ask)
    async def late(request):
        yield 1
        raise error

    with pytest.raises(ValidationError) as caught:
        await collect(late({"a": 1}))
    assert caught.value is error


async def test_a_validation_error_thrown_in_means_an_invalid_response():
    stream = handler({"a": 1})
    await anext(stream)
    with pytest.raises(ValueError, match=r"^Invalid response: ") as caught:
        await stream.athrow(validation_error())
    assert type(caught.value) is ValueError


async def test_closing_the_wrapper_closes_the_function_at_once():
    closed = []

    @dynamo_endpoint(Ask, Ask)
    async def endless(request):
        try:
            while True:
                yield request
        finally:
            closed.append("closed")

    stream = endless({"a": 1})
    await anext(stream)
    await stream.aclose()
    assert closed == ["closed"]


def test_pydantic_is_never_imported_by_us():
    source = Path(module.__file__).parents[2]
    code = (
        "import sys, asyncio\n"
        "from dynamo.runtime._decorators import dynamo_endpoint\n"
        "@dynamo_endpoint(dict, dict)\n"
        "async def f(request):\n"
        "    yield request\n"
        "async def main():\n"
        "    return [x async for x in f({'a': 1})]\n"
        "assert asyncio.run(main()) == [{'a': 1}]\n"
        "assert 'pydantic' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
