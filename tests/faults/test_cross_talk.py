"""Every answer belongs to its own request, whatever happens to others beside it.

Rows TR-19, TR-20, TR-21, CN-22 and HG-02.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from raw_peers import until
from served import Served, served

from dynamo.runtime import Context, errors

pytestmark = pytest.mark.slow

SEED = 19
ROUNDS = 3
AT_ONCE = 200
TOO_LARGE = 200_000


async def echo(request: Any) -> AsyncIterator[Any]:
    """Two answers, so that a stream can be in the middle when others end."""
    if request["fail"]:
        raise RuntimeError(f"no {request['id']}")
    yield request["id"]
    await asyncio.sleep(0)
    yield request["id"]


class Callers:
    """Makes calls of all kinds and counts what became of them."""

    def __init__(self, pair: Served) -> None:
        self.pair = pair
        self.random = random.Random(SEED)
        self.outcomes: Counter[str] = Counter()

    async def call(self, number: int, way: str) -> None:
        task = asyncio.get_running_loop().create_task(self._call(number, way))
        if way == "cancelled":
            await asyncio.wait((task,), timeout=self.random.uniform(0, 0.05))
            task.cancel()
            await asyncio.wait((task,))
        if task.cancelled():
            self.outcomes["cancelled"] += 1
        else:
            self.outcomes[await task] += 1

    async def _call(self, number: int, way: str) -> str:
        request = {"id": number, "fail": way == "failing", "filling": b""}
        if way == "oversize":
            request["filling"] = bytes(TOO_LARGE)
        try:
            stream = await self.pair.call(request)
            assert [item async for item in stream] == [number, number]
        except errors.MessageTooLarge:
            assert way == "oversize"
            return "oversize"
        except errors.RemoteError as error:
            if str(error) != f"Internal: RuntimeError: no {number}":
                raise
            assert way == "failing"
            return "failing"
        return "complete"

    async def all(self, calls: int, shares: dict[str, float]) -> None:
        ways = [*shares, "plain"]
        weights = [*shares.values(), 1 - sum(shares.values())]
        drawn = self.random.choices(ways, weights, k=calls)
        for start in range(0, calls, AT_ONCE):
            batch = enumerate(drawn[start : start + AT_ONCE], start)
            await asyncio.gather(*(self.call(*one) for one in batch))


@pytest.mark.parametrize(
    "shares",
    [
        pytest.param({}, id="all complete"),
        pytest.param({"cancelled": 0.3}, id="a third cancelled"),
        pytest.param({"failing": 0.1, "oversize": 0.05}, id="some fail"),
        pytest.param(
            {"cancelled": 0.3, "failing": 0.1, "oversize": 0.05}, id="everything"
        ),
    ],
)
async def test_no_call_gets_what_belongs_to_another(
    shares: dict[str, float], scale: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "dynamo.runtime")
    calls = int(ROUNDS * AT_ONCE * scale)
    async with served(echo, caller={"max_message_bytes": TOO_LARGE}) as pair:
        callers = Callers(pair)
        await callers.all(calls, shares)
        outcomes = callers.outcomes
        assert outcomes.total() == calls
        for way in shares:
            assert outcomes[way] > 0
        assert set(outcomes) == {"complete", *shares}
        await until(lambda: not pair.in_flight)
        assert pair.client._home.in_flight == {}


async def test_an_id_that_was_just_cancelled_may_be_used_again(scale: float) -> None:
    """With 406 hung calls and 170 refused ids another runtime became known for this."""
    chance = random.Random(SEED)
    calls = int(200 * scale)
    async with served(echo) as pair:

        async def call(number: int) -> int:
            request = {"id": number, "fail": False}
            for attempt in range(3):
                items = pair.items(request, context=Context(f"id-{number % 50}"))
                task = asyncio.get_running_loop().create_task(items)
                if attempt < 2 and number % 3 == 0:
                    await asyncio.wait((task,), timeout=chance.uniform(0, 0.02))
                    task.cancel()
                    await asyncio.wait((task,))
                    continue
                assert await task == [number, number]
            return number

        numbers = range(calls)
        assert await asyncio.gather(*map(call, numbers)) == [*numbers]
        await until(lambda: not pair.in_flight)
