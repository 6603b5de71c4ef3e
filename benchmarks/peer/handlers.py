"""The handlers, the same functions in every peer that runs handlers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

ITEM_PERIOD_S = 0.01

Handler = Callable[[Any, Any], AsyncIterator[Any]]


async def plain(request: Any, context: Any) -> AsyncIterator[Any]:
    """Items as fast as they are taken; gives way to nobody by itself."""
    for number in range(request["n"]):
        yield {"token_ids": [number], "index": 0, "text": "hello"}


async def yielding(request: Any, context: Any) -> AsyncIterator[Any]:
    """As `plain`, but the loop turns before each item, as in a real engine."""
    for number in range(request["n"]):
        await asyncio.sleep(0)
        yield {"token_ids": [number], "index": 0, "text": "hello"}


async def timed(request: Any, context: Any) -> AsyncIterator[Any]:
    """An item every 10 ms, the pace of a model."""
    for number in range(request["n"]):
        await asyncio.sleep(ITEM_PERIOD_S)
        yield {"token_ids": [number], "index": 0, "text": "hello"}


async def echo(request: Any, context: Any) -> AsyncIterator[Any]:
    """The request as the only item."""
    yield request


@functools.cache
def _text(size: int) -> str:
    """Kept: filling fresh memory would be the larger part of what is measured."""
    return "x" * size


async def blob(request: Any, context: Any) -> AsyncIterator[Any]:
    """One large item."""
    yield _text(request["n"])


async def idle(request: Any, context: Any) -> AsyncIterator[Any]:
    """One item, then a stream that stays open and silent."""
    yield request
    await asyncio.Event().wait()


async def alive(request: Any, context: Any) -> AsyncIterator[Any]:
    """How many tasks there are on the worker's loop."""
    yield len(asyncio.all_tasks())


HANDLERS: dict[str, Handler] = {
    one.__name__: one for one in (plain, yielding, timed, echo, blob, idle, alive)
}
