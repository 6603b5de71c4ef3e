"""A call cut at every byte: a right result or a typed error, in time, and nothing left.

In the memory of one loop and in virtual time every cut is cheap and every bound exact;
some cuts are made on real sockets as well.  The first tests of each kind count the bytes
of the exchange in which they cut.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from linked import Link, linked

from dynamo.runtime import Client, PyAsyncRequestStream, errors
from dynamo.runtime.testing import (
    Cluster,
    Cut,
    FaultProxy,
    Worker,
    run_in_virtual_time,
    until,
)

ITEMS = ["first", {"second": 2}, b"third"]
# How many places in an exchange are tried in CI; the long form tries all.
CI_CUTS = 60
CI_CUTS_ON_SOCKETS = 25
REQUEST_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0
CALL_HOME_TIMEOUT_S = 10.0
PING_TIMEOUT_S = 60.0
PING_INTERVAL_S = 20.0
# When nobody can know that a connection has died, the caller has a limit of its own.
CALLERS_LIMIT_S = 100.0
SLACK_S = 0.1
RECOVERY_LIMIT_S = 1.0
WORKERS_LIMIT_S = 2.0


async def three(request: Any) -> AsyncIterator[Any]:
    for item in ITEMS:
        yield item


async def echo(stream: PyAsyncRequestStream) -> AsyncIterator[Any]:
    async for value in stream:
        yield value


def places(count: int, limit: int, scale: float) -> range:
    """After how many bytes to cut: everywhere, or in CI at even distances."""
    step = 1 if scale > 1 else count // limit + 1
    return range(random.randrange(step), count + 1, step)


# -------------------------------------------------------- in memory, in virtual time


@dataclass(frozen=True)
class Case:
    """What is cut, and how."""

    lane: Any
    streamed: bool
    proxied: str
    direction: Any
    how: Any

    def cut(self, after: int) -> Cut:
        return Cut(**{self.direction: after}, how=self.how)

    @property
    def bound_s(self) -> float:
        """Within what time the call must have ended."""
        if self.callers_limit_s is not None:
            return self.callers_limit_s
        if self.how in ("fin", "reset"):
            return max(CONNECT_TIMEOUT_S, CALL_HOME_TIMEOUT_S)
        if self.lane == "duplex":
            return PING_TIMEOUT_S + PING_INTERVAL_S / 2
        return REQUEST_TIMEOUT_S + CALL_HOME_TIMEOUT_S

    @property
    def callers_limit_s(self) -> float | None:
        """On the genuine lane nobody can tell silence from a slow handler."""
        silent = self.lane == "callhome" and self.how == "silent"
        return CALLERS_LIMIT_S if silent else None


CASES = [
    Case(lane, streamed, proxied, direction, how)
    for lane, proxied in [
        ("duplex", "requests"),
        ("callhome", "requests"),
        ("callhome", "answers"),
    ]
    for streamed in (False, True)
    for direction in ("up", "down")
    for how in ("fin", "reset", "half", "silent")
]


def call(client: Client, worker: Worker, case: Case) -> asyncio.Future[Any]:
    number, limit_s = worker.instance_id, case.callers_limit_s
    if case.streamed:
        return client.bidirectional(
            ITEMS, annotated=False, instance_id=number, timeout=limit_s
        )
    return client.direct("go", number, annotated=False, timeout=limit_s)


async def read(calling: asyncio.Future[Any]) -> Any:
    """All items, or the error after some of them."""
    got: list[Any] = []
    try:
        async for item in await calling:
            got.append(item)  # noqa: PERF401 - what came before an error counts too
    except errors.CallError as error:
        assert got == ITEMS[: len(got)]
        return error
    assert got == ITEMS, "a silently short stream"
    return got


async def exchange(case: Case, cut: Cut) -> FaultProxy:
    """One call of a cluster of its own; checks all that must hold however it is cut."""
    loop = asyncio.get_running_loop()
    async with Cluster(lane=case.lane) as cluster:
        handler = echo if case.streamed else three
        worker = await cluster.serve("a.b.c", handler, bidirectional=case.streamed)
        if case.proxied == "requests":
            proxy = await worker.fault_proxy()
        else:
            proxy = await cluster.answer_proxy()
        client = await cluster.client("a.b.c")
        proxy.cut = cut
        began = loop.time()
        calling = read(call(client, worker, case))
        result = await asyncio.wait_for(calling, 2 * CALLERS_LIMIT_S)
        assert loop.time() - began <= case.bound_s + SLACK_S, f"{cut}: {result!r}"
        if isinstance(result, errors.CallError) and result.retryable:
            assert not worker.calls, f"{cut}: {result!r}, but the handler ran"
        await until(lambda: not worker.in_flight, timeout=WORKERS_LIMIT_S)
        # The worker and the client go on: without the cut calls work.
        proxy.cut = Cut()
        proxy.break_all()
        await until(lambda: not proxy.connections)
        # Not the very next one, perhaps: the client may not have heard of the cut yet.

        async def works() -> bool:
            result: Any = await read(call(client, worker, case))
            return bool(result == ITEMS)

        await until(works, timeout=RECOVERY_LIMIT_S)
    return proxy


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda case: "-".join(
        [
            case.lane,
            "streamed" if case.streamed else "single",
            case.proxied,
            case.direction,
            case.how,
        ]
    ),
)
def test_a_call_cut_after_any_number_of_bytes_ends_with_all_items_or_an_error(
    case: Case, scale: float
) -> None:
    async def main() -> None:
        proxy = await exchange(case, Cut())
        # Two calls were made; and an id of a byte more may be drawn another time.
        count = proxy.passed[case.direction] // 2 + 2
        for after in places(count, CI_CUTS, scale):
            await exchange(case, case.cut(after))

    run_in_virtual_time(main())


# ------------------------------------------------------------------------ on sockets

# Above every bound of a cut connection; each single wait below must end before.
LIMIT_S = 4.0
BOUNDS = {
    "request_timeout_s": 0.05,
    "connect_timeout_s": 0.5,
    "call_home_timeout_s": 0.05,
}


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


async def bytes_of_one_call(link: Link, proxy: FaultProxy, direction: Any) -> int:
    """How much passes with a first call; every later one is on new connections, too."""
    assert await outcome(link) == ITEMS
    await until(lambda: link.answers.passed["up"] or link.lanes)
    await link.cut_requests()
    return proxy.passed[direction]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fin", "reset"])
@pytest.mark.parametrize(
    ("lanes", "proxied", "direction"),
    [
        (("duplex",), "requests", "up"),
        (("duplex",), "requests", "down"),
        ((), "requests", "up"),
        ((), "requests", "down"),
        ((), "answers", "up"),
        ((), "answers", "down"),
    ],
)
async def test_a_call_cut_on_sockets_ends_with_all_items_or_an_error(
    lanes: tuple[str, ...], proxied: str, direction: Any, how: Any, scale: float
) -> None:
    async with linked(three, lanes=lanes, **BOUNDS) as link:
        proxy = link.requests if proxied == "requests" else link.answers
        count = await bytes_of_one_call(link, proxy, direction)
        for after in places(count, CI_CUTS_ON_SOCKETS, scale):
            proxy.cut = Cut(**{direction: after}, how=how)
            await link.cut_requests()
            result = await asyncio.wait_for(outcome(link), LIMIT_S)
            right = result == ITEMS or isinstance(result, errors.CallError)
            assert right, (after, result)
        proxy.cut = Cut()
        await link.cut_requests()

        async def works() -> bool:
            return await asyncio.wait_for(outcome(link), LIMIT_S) == ITEMS

        await until(works, timeout=LIMIT_S)
