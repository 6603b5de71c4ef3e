"""Whom a client calls, whom it avoids and for how long, and what it says if nobody is."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from memory_lane import NAME, MemoryLane, Opened, record, silent, started

from dynamo.runtime._calls.choosing import ClientHome
from dynamo.runtime._calls.context import Context
from dynamo.runtime._calls.streams import AsyncResponseStream
from dynamo.runtime._client import Client
from dynamo.runtime._config import from_env
from dynamo.runtime._discovery.instances import InstanceSet
from dynamo.runtime._discovery.memory import MemoryBackend
from dynamo.runtime._routing.policies import RouterMode
from dynamo.runtime._wire.records import INSTANCES, encode_record
from dynamo.runtime.errors import (
    CallError,
    CallTimeout,
    ConnectionFailed,
    DiscoveryError,
    EngineShutdown,
    InstanceNotFound,
    NoInstances,
    NoInstancesInTime,
    Overloaded,
    Refused,
    RemoteError,
    RuntimeClosed,
    StreamTimeout,
)
from dynamo.runtime.testing import until

LIMIT_S = 5.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Cluster:
    """Instances of one endpoint, and clients of it with a clock that tests move."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.lane = MemoryLane()
        self.backend = MemoryBackend()
        self.clock = Clock()
        self.streams: list[AsyncResponseStream] = []

    async def open(self, **settings: Any) -> None:
        self.instances = await InstanceSet.open(self.backend, NAME)
        # Nobody who is ejected comes back by itself within a test.
        slow = {"ejection_first_s": 1000.0, "ejection_max_s": 1000.0, **settings}
        config = dataclasses.replace(from_env({}, "mem"), **slow)
        self.home = ClientHome(
            self.loop, self.lane, self.instances, config, self._run, lambda: None
        )

    def _run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        return self.loop.create_task(work)

    def client(self, mode: RouterMode = RouterMode.RoundRobin) -> Client:
        made = Client._of(self.home, mode)
        made._chooser.now = self.clock
        return made

    async def join(self, *numbers: int) -> None:
        for number in numbers:
            one = record(number)
            await self.backend.register(INSTANCES, one.key, encode_record(one))
        await asyncio.sleep(0)

    async def leave(self, number: int) -> None:
        await self.backend.unregister(INSTANCES, record(number).key)
        await asyncio.sleep(0)

    async def chosen(self, call: Callable[..., Any], count: int) -> list[int]:
        """The instances of some calls made one after another, each to its end."""
        numbers = []
        for _ in range(count):
            stream = await call(None)
            numbers.append(stream.instance_id)
            self.lane.opened[-1].events.on_ended()
        return numbers

    async def held(self, call: Callable[..., Any], count: int) -> list[int]:
        """The same, with streams that stay open."""
        for _ in range(count):
            self.streams.append(await call(None))
        return [stream.instance_id or 0 for stream in self.streams[-count:]]


@pytest.fixture
async def cluster():
    made = Cluster()
    await made.open()
    yield made
    for opened in made.lane.opened:
        opened.events.on_ended()
    await made.home.aclose()
    await made.backend.aclose()


# ------------------------------------------------------------------ rotation


async def test_rotation_starts_at_the_lowest_id_for_each_client(cluster: Cluster):
    await cluster.join(2**64 - 1, 7, 3)
    for _ in range(2):
        client = cluster.client()
        assert await cluster.chosen(client.round_robin, 4) == [3, 7, 2**64 - 1, 3]


async def test_rotation_goes_on_when_members_come_and_go(cluster: Cluster):
    await cluster.join(1, 2, 3)
    client = cluster.client()
    assert await cluster.chosen(client.round_robin, 4) == [1, 2, 3, 1]
    await cluster.leave(1)
    assert await cluster.chosen(client.round_robin, 4) == [2, 3, 2, 3]
    await cluster.join(1)
    assert await cluster.chosen(client.round_robin, 4) == [3, 1, 2, 3]


async def test_a_call_that_finds_nobody_does_not_move_the_rotation(cluster: Cluster):
    client = cluster.client()
    for _ in range(5):
        with pytest.raises(NoInstances):
            await client.round_robin(None)
    await cluster.join(1, 2, 3)
    assert await cluster.chosen(client.round_robin, 2) == [1, 2]


async def test_calls_made_together_are_spread_evenly(cluster: Cluster):
    await cluster.join(1, 2, 3)
    client = cluster.client()
    streams = await asyncio.gather(*(client.round_robin(None) for _ in range(30)))
    assert Counter(one.instance_id for one in streams) == {1: 10, 2: 10, 3: 10}
    cluster.streams += streams


async def test_other_methods_do_not_move_the_rotation(cluster: Cluster):
    await cluster.join(1, 2, 3)
    client = cluster.client()
    await cluster.chosen(client.random, 5)
    assert await cluster.chosen(client.round_robin, 2) == [1, 2]


# ------------------------------------------------------------------ modes


@pytest.mark.parametrize("mode", [RouterMode.RoundRobin, RouterMode.Direct])
async def test_generate_rotates_by_default(cluster: Cluster, mode: RouterMode):
    await cluster.join(1, 2, 3)
    assert await cluster.chosen(cluster.client(mode).generate, 4) == [1, 2, 3, 1]


async def test_generate_at_random_calls_everybody(cluster: Cluster):
    await cluster.join(1, 2, 3)
    numbers = await cluster.chosen(cluster.client(RouterMode.Random).generate, 300)
    # Fails once in 10**25 runs: each count is binomial(300, 1/3), 50 is 6 sigma off.
    assert min(Counter(numbers).values()) > 50
    assert len(set(numbers)) == 3


@pytest.mark.parametrize(
    "mode", [RouterMode.LeastLoaded, RouterMode.DeviceAwareWeighted]
)
async def test_least_loaded_fills_all_before_it_fills_one_twice(
    cluster: Cluster, mode: RouterMode
):
    await cluster.join(1, 2, 3)
    client = cluster.client(mode)
    for _ in range(3):
        assert sorted(await cluster.held(client.generate, 3)) == [1, 2, 3]
    assert cluster.home.in_flight == {1: 3, 2: 3, 3: 3}
    for opened in cluster.lane.opened:
        if opened.instance_id == 2:
            opened.events.on_ended()
    assert await cluster.held(client.generate, 3) == [2, 2, 2]


async def test_power_of_two_never_takes_the_fullest_of_three(cluster: Cluster):
    await cluster.join(1, 2, 3)
    client = cluster.client(RouterMode.PowerOfTwoChoices)
    for number in (1, 1, 1, 1, 1):
        await cluster.held(lambda _, number=number: client.direct(None, number), 1)
    assert 1 not in await cluster.chosen(client.generate, 50)
    await cluster.leave(2)
    await cluster.leave(3)
    assert await cluster.chosen(client.generate, 2) == [1, 1]


async def test_weighted_calls_fill_the_least_loaded_first(cluster: Cluster):
    await cluster.join(1, 2, 3)
    for mode in (RouterMode.LeastLoaded, RouterMode.DeviceAwareWeighted):
        client = cluster.client(mode)
        assert sorted(await cluster.held(client.device_aware_weighted, 3)) == [1, 2, 3]


async def test_weighted_calls_with_two_choices_avoid_the_fullest(cluster: Cluster):
    await cluster.join(1, 2)
    client = cluster.client(RouterMode.PowerOfTwoChoices)
    cluster.home.in_flight[1] = 5
    assert await cluster.chosen(client.device_aware_weighted, 5) == [2] * 5


@pytest.mark.parametrize(
    "mode",
    [RouterMode.RoundRobin, RouterMode.Random, RouterMode.Direct, RouterMode.KV],
)
async def test_a_mode_that_weighs_nothing_makes_no_weighted_calls(
    cluster: Cluster, mode: RouterMode
):
    await cluster.join(1)
    calling = cluster.client(mode).device_aware_weighted(None)
    with pytest.raises(CallError, match="not initialized for endpoint") as caught:
        await calling
    assert not caught.value.retryable
    assert cluster.lane.opened == []


async def test_loads_are_shared_by_the_clients_of_an_endpoint(cluster: Cluster):
    await cluster.join(1, 2)
    await cluster.held(cluster.client().round_robin, 1)
    busy = cluster.client(RouterMode.LeastLoaded)
    assert await cluster.chosen(busy.generate, 5) == [2] * 5


async def test_mode_kv_warns_once_and_chooses_at_random(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
):
    await cluster.join(1, 2)
    client = cluster.client(RouterMode.KV)
    numbers = await cluster.chosen(client.generate, 100)
    assert set(numbers) == {1, 2}
    warnings = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "model card" in warnings[0].getMessage()


# ------------------------------------------------------------------ avoiding


def ending(opened: Opened) -> None:
    opened.events.on_started()
    opened.fail(EngineShutdown("bye"))


async def test_a_withdrawn_instance_is_left_out_by_this_client_for_its_time(
    cluster: Cluster,
):
    await cluster.join(1, 2)
    cluster.lane.scripts[1] = ending
    client, other = cluster.client(), cluster.client()
    stream = await client.round_robin(None)
    with pytest.raises(ValueError, match="Unavailable: bye"):
        await anext(stream)
    del cluster.lane.scripts[1]
    assert await cluster.chosen(client.round_robin, 3) == [2, 2, 2]
    assert await cluster.chosen(other.round_robin, 2) == [1, 2]
    assert client.instance_ids() == [1, 2]
    assert [one.instance_id for one in client.instances()] == [1, 2]
    assert await client.wait_for_instances() == [2]
    assert await cluster.chosen(lambda _: client.direct(None, 1), 1) == [1]
    cluster.clock.now_s += 4.9
    assert await cluster.chosen(client.round_robin, 1) == [2]
    cluster.clock.now_s += 0.2
    assert set(await cluster.chosen(client.round_robin, 2)) == {1, 2}


async def test_no_time_means_no_withdrawal(cluster: Cluster):
    cluster.home.config = dataclasses.replace(cluster.home.config, inhibited_s=0)
    await cluster.join(1)
    cluster.lane.scripts[1] = ending
    client = cluster.client()
    for _ in range(2):
        stream = await client.round_robin(None)
        with pytest.raises(ValueError, match="Unavailable: bye"):
            await anext(stream)


async def test_with_all_withdrawn_the_error_says_who_is_there(cluster: Cluster):
    await cluster.join(1, 2)
    client = cluster.client()
    cluster.lane.scripts = {1: ending, 2: ending}
    for _ in range(2):
        stream = await client.round_robin(None)
        with pytest.raises(ValueError, match="bye"):
            await anext(stream)
    with pytest.raises(NoInstances) as caught:
        await client.round_robin(None)
    error = caught.value
    assert str(error) == (
        "Unavailable: No workers available for endpoint ns/comp/gen (2 listed: 2 "
        "withdrawn, 0 ejected, 0 overloaded; 1: Unavailable: bye; 2: Unavailable: bye)"
    )
    assert error.facts == {
        "listed": 2,
        "withdrawn": {1: "Unavailable: bye", 2: "Unavailable: bye"},
        "ejected": {},
        "overloaded": {},
    }
    assert (error.attempts, error.instance_id, error.retryable) == (0, None, True)
    assert error.phase == "choose"


async def test_of_many_reasons_the_text_has_a_few(cluster: Cluster):
    await cluster.join(*range(1, 9))
    client = cluster.client()
    for number in range(1, 9):
        client._chooser.withdraw(number, f"bye {number}")
    with pytest.raises(NoInstances, match=r"8 withdrawn.*3: bye 3\)$") as caught:
        await client.round_robin(None)
    assert len(caught.value.facts["withdrawn"]) == 8  # type: ignore[arg-type]


async def test_with_nobody_listed_the_error_names_the_endpoints_there_are(
    cluster: Cluster,
):
    with pytest.raises(NoInstances) as caught:
        await cluster.client().random(None)
    assert str(caught.value) == (
        "Unavailable: No workers available for endpoint ns/comp/gen (none listed; "
        "registered endpoints: none)"
    )
    assert caught.value.facts["listed"] == 0
    assert caught.value.facts["endpoints"] == ()
    assert caught.value.facts["left_s"] is None
    for number in range(12):
        await cluster.backend.register(INSTANCES, f"a/b/c{number:02}/1", b"any")
    # Not looked up for each of many calls, but again after a while.
    with pytest.raises(NoInstances, match="endpoints: none"):
        await cluster.client().round_robin(None)
    cluster.home._names_until = 0.0
    with pytest.raises(NoInstances, match=r"a/b/c00, .*a/b/c09 and 2 more") as caught:
        await cluster.client().generate(None)
    assert caught.value.facts["endpoints"] == tuple(
        f"a/b/c{number:02}" for number in range(12)
    )


async def test_a_store_that_cannot_be_read_does_not_hide_that_nobody_is_there(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    async def broken(bucket: str, prefix: str) -> dict[str, bytes]:
        raise DiscoveryError("no")

    monkeypatch.setattr(cluster.backend, "snapshot", broken)
    with pytest.raises(NoInstances, match="registered endpoints: none"):
        await cluster.client().random(None)


# ------------------------------------------------------------------ ejection


async def test_an_instance_that_fails_is_left_out_by_all_clients_of_the_runtime(
    cluster: Cluster,
):
    await cluster.join(1, 2)
    cluster.lane.failures[1] = ConnectionFailed("Unavailable: no")
    client, other = cluster.client(), cluster.client()
    assert await cluster.chosen(client.round_robin, 3) == [2, 2, 2]
    assert await other.wait_for_instances() == [2]
    assert await cluster.chosen(other.round_robin, 2) == [2, 2]
    assert client.instance_ids() == [1, 2]
    with pytest.raises(ConnectionFailed):
        await client.direct(None, 1)


async def test_the_last_instance_is_called_however_often_it_failed(cluster: Cluster):
    await cluster.join(1)
    client = cluster.client()
    cluster.lane.failures[1] = ConnectionFailed("Unavailable: no")
    for _ in range(10):
        with pytest.raises(ConnectionFailed):
            await client.random(None)
    cluster.lane.failures.clear()
    assert await cluster.chosen(client.random, 1) == [1]


async def test_the_last_that_is_not_withdrawn_is_called_too(cluster: Cluster):
    await cluster.join(1, 2)
    client = cluster.client()
    cluster.lane.failures[1] = ConnectionFailed("Unavailable: no")
    assert await cluster.chosen(client.round_robin, 1) == [2]
    client._chooser.withdraw(2, "bye")
    with pytest.raises(ConnectionFailed):
        await client.round_robin(None)
    client._chooser.withdraw(1, "bye")
    with pytest.raises(NoInstances) as caught:
        await client.round_robin(None)
    assert caught.value.facts["ejected"] == {1: "no connection could be made"}


async def test_what_handlers_raise_ejects_nobody(cluster: Cluster):
    await cluster.join(1, 2)
    client = cluster.client()
    for _ in range(100):
        stream = await client.direct(None, 1)
        cluster.lane.opened[-1].fail(RuntimeError("boom"))
        with pytest.raises(RemoteError):
            await anext(stream)
    assert await client.wait_for_instances() == [1, 2]
    assert not cluster.home.health.troubled


async def test_one_failure_in_a_hundred_keeps_an_instance_in_its_turn(
    cluster: Cluster,
):
    """RT-04: requests that are not acknowledged, among others that are."""
    await cluster.join(1, 2)
    client = cluster.client()
    made = 0

    def now_and_then(opened: Opened) -> None:
        nonlocal made
        made += 1
        if made % 100 == 0:
            late = CallTimeout("DeadlineExceeded: timed out")
            opened.events.on_refused(late, inhibits=True)
        else:
            started(opened)

    cluster.lane.scripts[1] = now_and_then
    numbers: Counter[int] = Counter()
    for _ in range(1000):
        with contextlib.suppress(CallTimeout):
            numbers.update(await cluster.chosen(client.round_robin, 1))
    assert numbers == {1: 495, 2: 500}


async def test_first_items_that_do_not_come_in_time_eject(cluster: Cluster):
    await cluster.join(1, 2)
    client = cluster.client()
    for _ in range(3):
        assert await client.wait_for_instances() == [1, 2]
        stream = await client.direct(None, 1, first_item_timeout=0.01)
        with pytest.raises(StreamTimeout):
            await anext(stream)
    assert await client.wait_for_instances() == [2]
    assert cluster.home.health.reason(1) == ("an item did not come in time, 3 in a row")
    # A stream that comes to its end is what brings it back.
    stream = await client.direct(None, 1)
    assert await client.wait_for_instances() == [2]
    cluster.lane.opened[-1].events.on_ended()
    assert await client.wait_for_instances() == [1, 2]


async def test_an_answer_brings_back_who_could_not_be_reached(cluster: Cluster):
    await cluster.join(1, 2)
    client = cluster.client()
    cluster.lane.failures[1] = ConnectionFailed("Unavailable: no")
    with pytest.raises(ConnectionFailed):
        await client.direct(None, 1)
    assert await client.wait_for_instances() == [2]
    del cluster.lane.failures[1]
    stream = await client.direct(None, 1)
    # Its handler runs: there is no need to wait for the end.
    assert await client.wait_for_instances() == [1, 2]
    stream.cancel()


async def test_the_one_call_of_an_ejected_instance_is_given_back(cluster: Cluster):
    """Whoever cancels it has learnt nothing: the next call may try."""
    await cluster.open(ejection_first_s=0.0, ejection_max_s=0.0)
    await cluster.join(1, 2)
    client = cluster.client()
    cluster.lane.failures[1] = ConnectionFailed("Unavailable: no")
    with pytest.raises(ConnectionFailed):
        await client.direct(None, 1)
    del cluster.lane.failures[1]
    cluster.lane.scripts[1] = silent

    async def usable() -> bool:
        return await client.wait_for_instances() == [1, 2]

    for _ in range(3):
        await until(usable)
        call = client.direct(None, 1)
        assert await client.wait_for_instances() == [2]
        call.cancel()
    assert await usable()


async def test_switched_off_a_dead_instance_keeps_its_turn(cluster: Cluster):
    await cluster.open(ejection_failures=0)
    await cluster.join(1, 2)
    client = cluster.client()
    cluster.lane.failures[1] = ConnectionFailed("Unavailable: no")
    assert await cluster.chosen(client.round_robin, 5) == [2] * 5
    assert await client.wait_for_instances() == [1, 2]


async def test_an_instance_not_listed_cannot_be_named(cluster: Cluster):
    await cluster.join(1)
    with pytest.raises(InstanceNotFound) as caught:
        await cluster.client().direct(None, 2)
    error = caught.value
    text = "Unavailable: instance_id=2 not found for endpoint ns/comp/gen"
    assert str(error) == text
    assert (error.attempts, error.instance_id, error.retryable) == (0, 2, True)


def full(opened: Opened) -> None:
    error = Overloaded("CapacityExhausted: Server overloaded: full", retry_after=1.0)
    opened.events.on_refused(error, inhibits=False)


async def test_an_overloaded_instance_is_left_alone_for_a_second(cluster: Cluster):
    await cluster.join(1, 2)
    cluster.lane.scripts[1] = full
    client = cluster.client()
    assert await cluster.chosen(client.round_robin, 4) == [2, 2, 2, 2]
    assert [one.instance_id for one in cluster.lane.opened].count(1) == 1
    del cluster.lane.scripts[1]
    cluster.clock.now_s += 1.01
    assert set(await cluster.chosen(client.round_robin, 2)) == {1, 2}


async def test_with_everybody_overloaded_nothing_is_sent(cluster: Cluster):
    await cluster.join(1, 2)
    cluster.lane.scripts = {1: full, 2: full}
    client = cluster.client()
    with pytest.raises(Overloaded, match="Server overloaded") as caught:
        await client.round_robin(None)
    assert caught.value.attempts == 2
    cluster.clock.now_s += 0.4
    with pytest.raises(Overloaded) as caught:
        await client.round_robin(None)
    error = caught.value
    assert str(error) == ("CapacityExhausted: All workers are busy, please retry later")
    assert (error.phase, error.attempts) == ("choose", 0)
    assert error.retry_after == pytest.approx(0.6)
    assert len(cluster.lane.opened) == 2
    # They are listed and not at fault.
    assert await client.wait_for_instances() == [1, 2]


async def test_the_first_refusal_moves_on_to_one_that_is_free(cluster: Cluster):
    await cluster.join(1, 2, 3)
    cluster.lane.scripts[1] = full
    cluster.lane.failures[2] = Refused("Unavailable: draining")
    stream = await cluster.client().round_robin(None)
    assert stream.instance_id == 3
    assert cluster.home.in_flight == {3: 1}
    cluster.streams.append(stream)


# ------------------------------------------------------------------ waiting


async def test_waiting_returns_those_that_are_there(cluster: Cluster):
    await cluster.join(2, 1)
    client = cluster.client()
    assert await client.wait_for_instances() == [1, 2]
    assert await client.wait_for_instances(timeout=0) == [1, 2]


async def test_calls_that_fail_at_one_time_are_all_told_the_endpoints(cluster: Cluster):
    await cluster.backend.register(INSTANCES, "a/b/c/1", b"any")
    client = cluster.client()
    calls = [client.random(None) for _ in range(3)]
    calls[0].cancel()
    errors = await asyncio.gather(*calls[1:], return_exceptions=True)
    told = [error.facts["endpoints"] for error in errors]  # type: ignore[union-attr]
    assert told == [("a/b/c",)] * 2


async def test_once_withdrawn_is_not_on_a_slower_path_for_ever(cluster: Cluster):
    await cluster.join(1, 2)
    chooser = cluster.client()._chooser
    usable = cluster.home.health.usable
    assert chooser.routable() is usable
    chooser.now = lambda: 0.0
    chooser._avoid(chooser.withdrawn, 1, 5.0, "bye")
    assert [one.instance_id for one in chooser.routable()] == [2]
    chooser.now = lambda: 5.0
    assert chooser.routable() is usable


async def test_that_nobody_is_left_differs_from_that_nobody_ever_came(cluster: Cluster):
    """DI-09: and whoever waits is there when somebody comes back."""
    await cluster.join(1)
    client = cluster.client()
    await cluster.leave(1)
    with pytest.raises(
        NoInstances, match=r"\(none listed any more, the last one left \S+ s ago; reg"
    ) as caught:
        await client.random(None)
    left_s = caught.value.facts["left_s"]
    assert isinstance(left_s, float)
    assert 0 <= left_s < LIMIT_S
    waiting = client.wait_for_instances(timeout=LIMIT_S)
    await asyncio.sleep(0)
    await cluster.join(1)
    assert await waiting == [1]


async def test_waiting_ends_when_somebody_comes(cluster: Cluster):
    waiting = cluster.client().wait_for_instances(timeout=LIMIT_S)
    await asyncio.sleep(0)
    await cluster.join(1)
    assert await waiting == [1]


@pytest.mark.parametrize("timeout", [0, 0.01])
async def test_waiting_has_a_limit(cluster: Cluster, timeout: float):
    with pytest.raises(NoInstancesInTime) as caught:
        await cluster.client().wait_for_instances(timeout=timeout)
    assert str(caught.value) == (
        "Unavailable: No workers available for endpoint ns/comp/gen (none listed; "
        f"registered endpoints: none): waited {timeout:g} s"
    )
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.facts["listed"] == 0


@pytest.mark.parametrize(
    ("timeout", "error"),
    [
        (math.nan, ValueError),
        (-1, ValueError),
        ("1", TypeError),
        (True, TypeError),
    ],
)
async def test_a_limit_that_is_none_is_refused_whoever_is_there(
    cluster: Cluster, timeout: Any, error: type[Exception]
):
    client = cluster.client()
    for _ in range(2):
        with pytest.raises(error, match=r"argument 'timeout': .*a number of seconds"):
            client.wait_for_instances(timeout=timeout)
        await cluster.join(1)


async def test_waiting_ends_when_a_withdrawn_instance_is_back(cluster: Cluster):
    await cluster.join(1)
    client = cluster.client()
    client._chooser.now = cluster.loop.time
    client._chooser._avoid(client._chooser.withdrawn, 1, 0.05, "bye")
    start = cluster.loop.time()
    assert await client.wait_for_instances(timeout=LIMIT_S) == [1]
    assert 0.04 < cluster.loop.time() - start < 2


async def test_waiting_does_not_spin_over_instances_that_left(cluster: Cluster):
    await cluster.join(1)
    client = cluster.client()
    client._chooser._avoid(client._chooser.withdrawn, 1, 5, "bye")
    await cluster.leave(1)
    cluster.clock.now_s += 6
    looks = 0

    def count() -> list[Any]:
        nonlocal looks
        looks += 1
        return []

    client._chooser.routable = count  # type: ignore[method-assign]
    with pytest.raises(NoInstancesInTime):
        await client.wait_for_instances(timeout=0.1)
    assert looks < 10


async def test_waiting_ends_with_the_runtime(cluster: Cluster):
    waiting = cluster.client().wait_for_instances()
    await asyncio.sleep(0)
    cluster.instances.close()
    with pytest.raises(RuntimeClosed, match="channel closed"):
        await waiting


async def test_a_cancelled_wait_leaves_nothing(cluster: Cluster):
    for _ in range(100):
        waiting = cluster.client().wait_for_instances()
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait((waiting,))
    assert not cluster.instances._subscribers


# ------------------------------------------------------------------ arguments


async def _later(items: int, error: Exception) -> str:
    return "go on"


async def _one_after_the_other(items: int, error: Exception) -> AsyncIterator[str]:
    yield "go on"


@pytest.mark.parametrize("method", ["random", "round_robin", "generate"])
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"annotated": 1}, TypeError),
        ({"annotated": "yes"}, TypeError),
        ({"context": "id"}, TypeError),
        ({"request": object()}, TypeError),
        ({"request": 2**64}, OverflowError),
        ({"idempotent": "no"}, TypeError),
        ({"idempotent": None}, TypeError),
        ({"on_stream_lost": True}, TypeError),
        ({"on_stream_lost": _later}, TypeError),
        ({"on_stream_lost": _one_after_the_other}, TypeError),
    ],
)
async def test_bad_arguments_are_refused_at_the_call(
    cluster: Cluster,
    method: str,
    arguments: dict[str, Any],
    error: type[Exception],
):
    await cluster.join(1)
    with pytest.raises(error):
        getattr(cluster.client(), method)(**{"request": None, **arguments})
    assert cluster.lane.opened == []


@pytest.mark.parametrize(
    ("instance_id", "error"),
    [("1", TypeError), (None, TypeError), (-1, OverflowError), (2**64, OverflowError)],
)
async def test_bad_ids_are_refused_at_the_call(
    cluster: Cluster, instance_id: Any, error: type[Exception]
):
    with pytest.raises(error):
        cluster.client().direct(None, instance_id)


class Index:
    """Whole numbers of other libraries are like this."""

    def __index__(self) -> int:
        return 7


async def test_whatever_is_a_whole_number_names_an_instance(cluster: Cluster):
    await cluster.join(3, 7)
    stream = await cluster.client().direct(None, Index())  # type: ignore[arg-type]
    assert stream.instance_id == 7


@pytest.mark.parametrize("annotated", [None, False])
async def test_annotated_none_means_bare_data(cluster: Cluster, annotated: bool | None):
    await cluster.join(1)
    stream = await cluster.client().random(None, annotated=annotated)
    cluster.lane.opened[-1].item(5)
    assert await anext(stream) == 5
    cluster.streams.append(stream)


async def test_the_request_carries_what_the_context_says_now(cluster: Cluster):
    await cluster.join(1)
    sent = []
    opening = cluster.lane.open

    async def noted(record, request, events):
        sent.append(request)
        return await opening(record, request, events)

    cluster.lane.open = noted  # type: ignore[method-assign]
    context = Context("mine", {"a": "1"})
    calling = cluster.client().random({"x": 1}, context=context)
    context.metadata["b"] = "2"
    cluster.streams += [await calling, await cluster.client().random(None)]
    assert sent[0].call_id == "mine"
    assert sent[0].metadata == {"a": "1"}
    assert sent[0].value == {"x": 1}
    assert len(sent[1].call_id) == 36
    assert sent[1].metadata == {}


async def test_without_a_running_loop_there_is_no_call(cluster: Cluster):
    with pytest.raises(RuntimeError, match="no running event loop"):
        await asyncio.to_thread(cluster.client().random, None)
