"""What drives ejection: time, probes, discovery; who may be called, and what is logged."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar

import pytest
from memory_lane import NAME, record
from msgspec.structs import replace

from dynamo.runtime._discovery import health as health_module
from dynamo.runtime._discovery.health import Health
from dynamo.runtime._discovery.instances import InstanceSet
from dynamo.runtime._discovery.memory import MemoryBackend
from dynamo.runtime._routing.ejection import EjectionPolicy, Failure
from dynamo.runtime._wire.records import INSTANCES, EndpointRecord, encode_record

LIMIT_S = 5.0
# Comes back in no time where that is meant, and never where it would disturb.
QUICK = EjectionPolicy(first_s=0.001, max_s=0.002)
SLOW = EjectionPolicy(first_s=1000.0, max_s=1000.0)


async def never_well(_: EndpointRecord) -> bool:
    return False


async def always_well(_: EndpointRecord) -> bool:
    return True


class Cluster:
    """Instances of one endpoint, and their health."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.backend = MemoryBackend()

    async def open(
        self,
        *numbers: int,
        probe: health_module.Probe = never_well,
        policy: EjectionPolicy = SLOW,
    ) -> Health:
        for number in numbers:
            await self.put(number)
        self.instances = await InstanceSet.open(self.backend, NAME)
        self.health = Health(self.loop, self.instances, probe, policy)
        return self.health

    async def put(self, number: int) -> None:
        one = record(number)
        await self.backend.register(INSTANCES, one.key, encode_record(one))
        await asyncio.sleep(0)

    async def delete(self, number: int) -> None:
        await self.backend.unregister(INSTANCES, record(number).key)
        await asyncio.sleep(0)

    @property
    def usable(self) -> list[int]:
        return [one.instance_id for one in self.health.usable]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for announcements only: what changes must be announced."""
        announced = asyncio.Event()
        unsubscribe = self.instances.subscribe(announced.set)
        while not condition():
            await asyncio.wait_for(announced.wait(), LIMIT_S)
            announced.clear()
        unsubscribe()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    yield made
    made.instances.close()
    if hasattr(made, "health"):
        await made.health.aclose()
    await made.backend.aclose()


async def test_an_ejected_instance_is_listed_and_not_usable(cluster: Cluster) -> None:
    health = await cluster.open(1, 2)
    announced: list[list[int]] = []
    cluster.instances.subscribe(lambda: announced.append(cluster.usable))
    health.failed(1, Failure.NO_CONNECTION)
    health.failed(7, Failure.NO_CONNECTION)
    assert cluster.usable == [2]
    assert [one.instance_id for one in cluster.instances.records] == [1, 2]
    assert announced == [[2]]
    assert health.reason(1) == "no connection could be made"
    assert health.reason(2) == health.reason(7) == ""
    assert health.usable is health.usable, "made once per change"


async def test_never_the_last_one(cluster: Cluster) -> None:
    health = await cluster.open(1)
    health.failed(1, Failure.NO_CONNECTION)
    assert cluster.usable == [1]
    await cluster.put(2)
    assert cluster.usable == [2]
    await cluster.delete(2)
    assert cluster.usable == [1]


async def test_never_more_than_half_and_that_is_said_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    health = await cluster.open(1, 2, 3, 4, 5)
    with caplog.at_level(logging.INFO, "dynamo.runtime.health"):
        for number in (1, 2, 3, 4):
            health.failed(number, Failure.NO_CONNECTION)
    assert cluster.usable == [3, 4, 5]
    levels = [one.levelno for one in caplog.records]
    assert levels.count(logging.WARNING) == 1
    assert levels.count(logging.INFO) == 4
    (warning,) = (one for one in caplog.records if one.levelno == logging.WARNING)
    assert "3 of 5 instances of ns/comp/gen fail" in warning.getMessage()


async def test_among_some_candidates_the_last_one_is_not_left_out(
    cluster: Cluster,
) -> None:
    health = await cluster.open(1, 2, 3, 4)
    for number in (1, 2):
        health.failed(number, Failure.NO_CONNECTION)
    one, two, three, four = cluster.instances.records
    assert health.without_ejected((one, two)) == (two,)
    assert health.without_ejected((one,)) == (one,)
    assert health.without_ejected(()) == ()
    assert health.without_ejected((one, three)) == (three,)
    assert health.without_ejected((three, four)) == (three, four)


async def test_a_probe_and_one_call_bring_an_instance_back(cluster: Cluster) -> None:
    answers = [False, False, True]
    probed: list[EndpointRecord] = []

    async def probe(one: EndpointRecord) -> bool:
        probed.append(one)
        return answers.pop(0)

    health = await cluster.open(1, 2, probe=probe, policy=QUICK)
    health.failed(1, Failure.NO_CONNECTION)
    await cluster.until(lambda: cluster.usable == [1, 2])
    assert probed == [record(1)] * 3
    health.chosen(1)
    assert cluster.usable == [2]
    health.let_go(1)
    assert cluster.usable == [1, 2]
    health.chosen(1)
    health.answered(1)
    assert cluster.usable == [1, 2]
    assert not health.troubled


async def test_a_lost_connection_is_probed_at_once(cluster: Cluster) -> None:
    health = await cluster.open(1, 2, probe=always_well)
    health.failed(1, Failure.CONNECTION_LOST)
    assert cluster.usable == [2]
    await cluster.until(lambda: cluster.usable == [1, 2])
    health.completed(1)
    assert not health.troubled


async def test_probes_that_raise_are_failed_ones(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes: list[Exception | None] = [OSError("refused"), ValueError("bug"), None]

    async def probe(_: EndpointRecord) -> bool:
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome
        return True

    health = await cluster.open(1, 2, probe=probe, policy=QUICK)
    with caplog.at_level(logging.WARNING, "dynamo.runtime.health"):
        health.failed(1, Failure.NO_CONNECTION)
        await cluster.until(lambda: cluster.usable == [1, 2])
    assert len(caplog.records) == 1, "a refused connection is what probes are for"


async def test_a_hanging_probe_is_ended(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_module, "_PROBE_LIMIT_S", 0.01)
    hangs = [cluster.loop.create_future()]

    async def probe(_: EndpointRecord) -> bool:
        if hangs:
            await hangs.pop()
        return True

    health = await cluster.open(1, 2, probe=probe, policy=QUICK)
    health.failed(1, Failure.NO_CONNECTION)
    await cluster.until(lambda: cluster.usable == [1, 2])
    assert not hangs


async def test_a_second_probe_ends_the_first(cluster: Cluster) -> None:
    begun: list[asyncio.Task[None] | None] = []

    async def probe(_: EndpointRecord) -> bool:
        begun.append(asyncio.current_task())  # type: ignore[arg-type]
        await asyncio.Event().wait()
        return True

    health = await cluster.open(1, 2, probe=probe, policy=QUICK)
    health.failed(1, Failure.CONNECTION_LOST)
    while not begun:
        await asyncio.sleep(0)
    # A call had its answer before the probe.
    health.failed(1, Failure.NO_CONNECTION)
    await cluster.until(lambda: len(health._probes) == 1 and bool(begun[0]))
    while len(begun) < 2:
        await asyncio.sleep(0.001)
    assert begun[0] is not None
    await asyncio.wait_for(asyncio.wait((begun[0],)), LIMIT_S)
    assert begun[0].cancelled()


async def test_a_change_of_discovery_is_a_clean_slate(cluster: Cluster) -> None:
    health = await cluster.open(1, 2)
    health.failed(1, Failure.NO_CONNECTION)
    told: list[list[int]] = []
    cluster.instances.subscribe(lambda: told.append(cluster.usable))
    await cluster.delete(1)
    await cluster.put(1)
    assert told == [[2], [1, 2]]
    assert not health.troubled


async def test_the_same_id_at_another_address_is_a_clean_slate(
    cluster: Cluster,
) -> None:
    health = await cluster.open(1, 2)
    health.failed(1, Failure.NO_CONNECTION)
    assert cluster.usable == [2]
    moved = replace(record(1), address="127.0.0.1:2/x")
    # As a store that looks now and then tells it: that it was gone is not seen.
    cluster.instances.apply([(moved.key, encode_record(moved))])
    assert cluster.usable == [1, 2]
    assert not health.troubled


async def test_probes_run_in_no_callers_context(cluster: Cluster) -> None:
    request: ContextVar[str] = ContextVar("request", default="none")
    seen: list[str] = []

    async def probe(_: EndpointRecord) -> bool:
        seen.append(request.get())
        return len(seen) > 2

    health = await cluster.open(1, 2, probe=probe, policy=QUICK)
    request.set("mine")
    health.failed(1, Failure.CONNECTION_LOST)
    await cluster.until(lambda: cluster.usable == [1, 2])
    assert seen == ["none"] * 3


async def test_failures_after_the_end_are_nobodys(cluster: Cluster) -> None:
    health = await cluster.open(1, 2)
    cluster.instances.close()
    health.failed(1, Failure.NO_CONNECTION)
    assert not health.troubled


async def test_calls_that_end_after_the_end_start_no_timer_and_no_probe(
    cluster: Cluster,
) -> None:
    asked: list[EndpointRecord] = []

    async def probe(one: EndpointRecord) -> bool:
        asked.append(one)
        return False

    health = await cluster.open(1, 2, probe=probe, policy=QUICK)
    health.failed(1, Failure.NO_CONNECTION)
    await cluster.until(lambda: bool(asked))
    cluster.instances.close()
    await health.aclose()
    asked.clear()
    health.chosen(1)
    health.let_go(1)
    health.on_time()
    assert health._timer is None
    assert not health._probes
    await asyncio.sleep(0)
    assert asked == []


async def test_closing_waits_for_the_probes(cluster: Cluster) -> None:
    asked, ended = asyncio.Event(), asyncio.Event()

    async def probe(_: EndpointRecord) -> bool:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()
        return True

    health = await cluster.open(1, 2, probe=probe)
    health.failed(1, Failure.CONNECTION_LOST)
    await asyncio.wait_for(asked.wait(), LIMIT_S)
    await health.aclose()
    assert ended.is_set()


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_dropping_the_last_reference_ends_the_probes(
    cluster: Cluster, elsewhere: bool
) -> None:
    asked = asyncio.Event()

    async def probe(_: EndpointRecord) -> bool:
        asked.set()
        await asyncio.Event().wait()
        return True

    held = [await cluster.open(1, 2, 3, probe=probe)]
    del cluster.health
    held[0].failed(1, Failure.CONNECTION_LOST)
    held[0].failed(2, Failure.NO_CONNECTION)  # with a timer of its own
    await asyncio.wait_for(asked.wait(), LIMIT_S)
    (task,) = held[0]._probes.values()
    gone = weakref.ref(held[0])
    if elsewhere:
        await asyncio.to_thread(held.clear)
    else:
        held.clear()
    assert gone() is None, "only weak references may be left"
    await asyncio.wait_for(asyncio.wait((task,)), LIMIT_S)
    assert task.cancelled()
