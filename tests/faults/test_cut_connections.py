"""Connections that are cut, stall or swallow: a right result or a typed error, in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from linked import Link, linked

from dynamo.runtime import errors
from dynamo.runtime.testing import Cut, until

ITEMS = ["first", {"second": 2}, b"third"]
# Above every bound of a cut connection; each single wait below must end before.
LIMIT_S = 4.0


BOUNDS = {
    "request_timeout_s": 0.05,
    "connect_timeout_s": 0.5,
    "call_home_timeout_s": 0.05,
}


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
    monkeypatch.setenv("DYN_TCP_RESPONSE_STREAM_HOST", "127.0.0.1")


async def three(request: Any) -> AsyncIterator[Any]:
    for item in ITEMS:
        yield item


async def outcome(link: Link) -> list[Any] | BaseException:
    """What a caller sees: all items, or the error after some of them."""
    got: list[Any] = []
    try:
        async for item in await link.call("go"):
            got.append(item)  # noqa: PERF401 - what came before an error counts too
    except errors.CallError as error:
        assert got == ITEMS[: len(got)]
        return error
    return got


async def bytes_of_one_call(link: Link) -> tuple[dict[str, int], dict[str, int]]:
    before = dict(link.requests.passed), dict(link.answers.passed)
    assert await outcome(link) == ITEMS
    await until(lambda: link.answers.passed["up"] > before[1]["up"])
    requests = {k: v - before[0][k] for k, v in link.requests.passed.items()}
    answers = {k: v - before[1][k] for k, v in link.answers.passed.items()}
    return requests, answers


async def each_cut(
    link: Link, relay: str, direction: str, count: int, **how: Any
) -> None:
    """Cut after every number of bytes; never a hang, never a silently short stream."""
    for after in range(count + 1):
        cut = Cut(**{direction: after}, **how)
        getattr(link, relay).cut = cut
        await link.cut_requests()
        result = await asyncio.wait_for(outcome(link), LIMIT_S)
        assert result == ITEMS or isinstance(result, errors.CallError), (after, result)
    getattr(link, relay).cut = Cut()
    await link.cut_requests()
    assert await asyncio.wait_for(outcome(link), LIMIT_S) == ITEMS


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fin", "reset"])
@pytest.mark.parametrize(
    ("relay", "direction"),
    [("requests", "up"), ("requests", "down"), ("answers", "up"), ("answers", "down")],
)
async def test_a_call_cut_after_any_number_of_bytes_ends_with_all_items_or_an_error(
    relay: str, direction: str, how: str
) -> None:
    async with linked(three, **BOUNDS) as link:
        requests, answers = await bytes_of_one_call(link)
        count = (requests if relay == "requests" else answers)[direction]
        await each_cut(link, relay, direction, count, how=how)
