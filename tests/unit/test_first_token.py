"""First tokens: who is told, when, and how often."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from dynamo._core import WorkerType
from dynamo.runtime import Client, Context, DistributedRuntime
from dynamo.runtime._calls.first_token import FirstToken, FirstTokenSource
from dynamo.runtime._wire.payload import Annotated

LIMIT_S = 5.0


def source_for(
    worker_type: WorkerType = WorkerType.Decode,
) -> tuple[FirstTokenSource, list[FirstToken]]:
    """A source, and the list of what it tells."""
    source = FirstTokenSource._make(worker_type)
    told: list[FirstToken] = []
    source.subscribe(told.append)
    return source, told


def test_the_handler_says_it_and_once_is_enough():
    source, told = source_for()
    context = Context("request-1")
    source.bind(context, dp_rank=3)
    assert told == []
    context.notify_first_token()
    context.notify_first_token()
    assert told == [FirstToken("request-1", WorkerType.Decode, 3)]


def test_a_rank_is_optional():
    source, told = source_for(WorkerType.Aggregated)
    context = Context("id")
    source.bind(context)
    context.notify_first_token()
    assert told == [FirstToken("id", WorkerType.Aggregated, None)]


def test_who_binds_late_is_told_at_once():
    source, told = source_for()
    context = Context("id")
    context.notify_first_token()
    source.bind(context, 1)
    assert told == [FirstToken("id", WorkerType.Decode, 1)]


def test_requests_do_not_mix():
    source, told = source_for()
    one, other = Context("one"), Context("other")
    source.bind(one, 1)
    source.bind(other, 2)
    other.notify_first_token()
    assert [token.request_id for token in told] == ["other"]
    one.notify_first_token()
    assert [token.request_id for token in told] == ["other", "one"]


class Index:
    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


@pytest.mark.parametrize(
    ("rank", "told_rank"),
    [(None, None), (0, 0), (2**32 - 1, 2**32 - 1), (True, 1), (Index(7), 7)],
)
def test_ranks_that_fit_are_taken(rank: Any, told_rank: int | None):
    source, told = source_for()
    context = Context("id")
    source.bind(context, rank)
    context.notify_first_token()
    assert [token.dp_rank for token in told] == [told_rank]


# As the genuine wheel answers each of them.
@pytest.mark.parametrize(
    ("rank", "kind"),
    [
        (-1, OverflowError),
        (2**32, OverflowError),
        (2**70, OverflowError),
        (-(2**70), OverflowError),
        (1.0, TypeError),
        ("1", TypeError),
    ],
)
def test_other_ranks_are_refused_and_bind_nothing(rank: Any, kind: type[Exception]):
    source, told = source_for()
    context = Context("id")
    with pytest.raises(kind, match="dp_rank"):
        source.bind(context, rank)
    context.notify_first_token()
    assert told == []


@pytest.mark.parametrize("context", [None, 1, "id"])
def test_only_a_context_can_be_bound(context: Any):
    source, _ = source_for()
    with pytest.raises(TypeError, match="argument 'context'"):
        source.bind(context)


def test_a_subscription_ends():
    source, told = source_for()
    more: list[FirstToken] = []
    unsubscribe = source.subscribe(more.append)
    for number in range(2):
        context = Context(str(number))
        source.bind(context)
        context.notify_first_token()
        unsubscribe()
    assert [token.request_id for token in more] == ["0"]
    assert [token.request_id for token in told] == ["0", "1"]


def test_a_listener_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture):
    source = FirstTokenSource._make(WorkerType.Decode)
    told: list[FirstToken] = []

    def failing(token: FirstToken) -> None:
        raise ValueError("in the listener")

    source.subscribe(failing)
    source.subscribe(told.append)
    context = Context("request-1")
    source.bind(context)
    context.notify_first_token()
    assert len(told) == 1
    (entry,) = caplog.records
    assert entry.levelno == logging.ERROR
    assert "request-1" in entry.getMessage()


# ------------------------------------------------------------------------- in a worker


@contextlib.asynccontextmanager
async def served(
    make: Callable[[FirstTokenSource], Any],
) -> AsyncIterator[tuple[Client, list[FirstToken]]]:
    """A client of ``make(source)``, and what the source tells."""
    runtime = DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp")
    endpoint = runtime.endpoint("ns.comp.gen")
    source = await endpoint.first_token_source(WorkerType.Decode)
    assert source is not None
    told: list[FirstToken] = []
    source.subscribe(told.append)
    serving = endpoint.serve_endpoint(make(source))
    client = await endpoint.client()
    await client.wait_for_instances(timeout=LIMIT_S)
    yield client, told
    runtime.shutdown()
    await asyncio.wait_for(serving, LIMIT_S)


async def read(client: Client, request: Any = None) -> list[Any]:
    stream = await client.random(request, annotated=False, context=Context("request-1"))
    return [item async for item in stream]


NO_DATA: list[Any] = [
    None,
    {"_dynamo_annotated": True, "event": "ping"},
    {"_dynamo_annotated": True, "data": None},
]
WITH_DATA: list[Any] = [
    0,
    "",
    {},
    {"_dynamo_annotated": True, "data": 1},
    Annotated("received from another call"),
]


@pytest.mark.parametrize("item", range(len(WITH_DATA)))
async def test_the_first_item_with_data_says_it(item: int):
    moments: list[int] = []

    def make(source: FirstTokenSource) -> Any:
        async def handler(request: Any, context: Context) -> AsyncIterator[Any]:
            source.bind(context, dp_rank=0)
            for value in NO_DATA:
                yield value
                moments.append(len(told))
            yield WITH_DATA[item]
            moments.append(len(told))
            yield "another"
            moments.append(len(told))

        return handler

    async with served(make) as (client, told):
        await read(client)
        assert moments == [0, 0, 0, 1, 1]
        assert told == [FirstToken("request-1", WorkerType.Decode, 0)]


async def test_a_handler_that_said_it_is_not_repeated_by_its_items():
    def make(source: FirstTokenSource) -> Any:
        async def handler(request: Any, context: Context) -> AsyncIterator[int]:
            source.bind(context)
            context.notify_first_token()
            yield 1

        return handler

    async with served(make) as (client, told):
        assert await read(client) == [1]
        assert len(told) == 1


async def test_an_answer_without_data_has_no_first_token():
    def make(source: FirstTokenSource) -> Any:
        async def handler(request: Any, context: Context) -> AsyncIterator[None]:
            source.bind(context)
            yield None

        return handler

    async with served(make) as (client, told):
        assert await read(client) == []
        assert told == []


async def test_a_thread_says_it_too():
    def make(source: FirstTokenSource) -> Any:
        def handler(request: Any, context: Context) -> Iterator[int]:
            source.bind(context)
            context.notify_first_token()
            yield 1

        return handler

    async with served(make) as (client, told):
        assert await read(client) == [1]
        assert [token.request_id for token in told] == ["request-1"]


async def test_pushed_items_say_it_too():
    def make(source: FirstTokenSource) -> Any:
        async def handler(
            request: Any, context: Context, response_sender: Any
        ) -> AsyncIterator[None]:
            source.bind(context)
            response_sender.send(None)
            assert told == []
            response_sender.send("token")
            assert len(told) == 1
            return
            yield

        return handler

    async with served(make) as (client, told):
        assert await read(client) == ["token"]


@pytest.mark.parametrize(
    ("worker_type", "makes_tokens"),
    [
        (WorkerType.Prefill, False),
        (WorkerType.Encode, False),
        (WorkerType.Decode, True),
        (WorkerType.Aggregated, True),
    ],
)
async def test_only_stages_that_make_tokens_have_a_source(
    worker_type: WorkerType, makes_tokens: bool
):
    runtime = DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp")
    source = await runtime.endpoint("a.b.c").first_token_source(worker_type)
    assert isinstance(source, FirstTokenSource) is makes_tokens
    with pytest.raises(TypeError, match="'int' object cannot be converted"):
        runtime.endpoint("a.b.c").first_token_source(2)  # type: ignore[arg-type]
    runtime.shutdown()
    await asyncio.wait_for(runtime._core.closed(), LIMIT_S)
