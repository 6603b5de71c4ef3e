"""Programs whose own code holds the event loop: nobody else is blamed for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from linked import linked

from dynamo.runtime import errors

pytestmark = pytest.mark.may_block

LIMITS = {
    "request_timeout_s": 0.2,
    "connect_timeout_s": 0.2,
    "call_home_timeout_s": 0.2,
    "frame_timeout_s": 0.2,
}


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
    monkeypatch.setenv("DYN_TCP_RESPONSE_STREAM_HOST", "127.0.0.1")


async def echo(request: Any) -> AsyncIterator[Any]:
    yield request


def hold_the_loop(seconds: float = 0.35) -> None:
    time.sleep(seconds)


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("turns", range(1, 9))
async def test_a_caller_that_holds_its_loop_over_every_limit_still_gets_its_answer(
    turns: int, warm: bool
) -> None:
    async with linked(echo, **LIMITS) as link:
        if warm:
            assert [item async for item in await link.call(0)] == [0]
        call = asyncio.create_task(link.call(turns))
        for _ in range(turns):
            await asyncio.sleep(0)
        hold_the_loop()
        assert [item async for item in await call] == [turns]


async def test_a_limit_that_was_missed_by_the_other_side_still_counts() -> None:
    async with linked(echo, **LIMITS) as link:
        link.requests.stall()
        call = asyncio.create_task(link.call())
        await asyncio.sleep(0)
        hold_the_loop()
        with pytest.raises(errors.CallError):
            await asyncio.wait_for(call, 3)
