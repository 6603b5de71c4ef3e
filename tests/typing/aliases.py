"""Never run: mypy and basedpyright check that the public types stay usable."""

from __future__ import annotations

import dataclasses
import datetime
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypedDict

import msgspec
import numpy as np
import pydantic

from dynamo._core import ResponseSender
from dynamo.runtime import Context, JsonLike, RequestHandler


class Described(TypedDict):
    tokens: list[int]


@dataclasses.dataclass
class Data:
    tokens: list[int]


class Record(msgspec.Struct):
    tokens: list[int]


class Model(pydantic.BaseModel):
    tokens: list[int]


def values_that_can_travel(array: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    plain: list[JsonLike] = [None, True, 1, 1.5, "text", b"raw", bytearray(), ("a", 1)]
    described: Described = {"tokens": [1]}
    nested: dict[str, list[dict[int, str]]] = {"a": [{1: "b"}]}
    containers: list[JsonLike] = [described, nested, {1, 2}, frozenset("a"), [[1], 2]]
    times: list[JsonLike] = [datetime.datetime.now(datetime.timezone.utc), uuid.uuid4()]
    objects: list[JsonLike] = [Data([1]), Record([1]), Model(tokens=[1]), array]
    print(plain, containers, times, objects)


def values_that_cannot_travel() -> None:
    anything: JsonLike = object()  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    function: JsonLike = print  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    number: JsonLike = 1j  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    print(anything, function, number)


async def plain_handler(request: Described) -> AsyncIterator[Described]:
    yield {"tokens": request["tokens"][:1]}


async def handler_with_context(
    request: str, context: Context
) -> AsyncIterator[dict[str, int]]:
    yield {context.id() or request: 1}


async def pushing_handler(
    request: JsonLike, context: Context, response_sender: ResponseSender
) -> AsyncIterator[None]:
    response_sender.send(request)
    response_sender.close()
    yield None


def blocking_handler(request: dict[str, Any]) -> Iterator[str]:
    yield from request


class Engine:
    async def generate(self, request: Any) -> AsyncIterator[bytes]:
        yield b""

    def __call__(self, request: int) -> AsyncIterator[bytes]:
        return self.generate(request)


def handlers() -> list[RequestHandler]:
    engine = Engine()
    return [
        plain_handler,
        handler_with_context,
        pushing_handler,
        blocking_handler,
        engine,
        engine.generate,
    ]


async def coroutine(request: str) -> str:
    return request


async def handler_of_the_wrong_items(request: str) -> AsyncIterator[object]:
    yield request


async def handler_with_more(request: str, more: int) -> AsyncIterator[str]:
    yield request * more


def not_handlers() -> None:
    first: RequestHandler = coroutine  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    second: RequestHandler = handler_of_the_wrong_items  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    third: RequestHandler = handler_with_more  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    print(first, second, third)
