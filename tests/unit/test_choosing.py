"""Calls in flight are counted exactly, whatever becomes of the calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_lane import NAME, MemoryLane, Opened, record

from dynamo.runtime._calls.choosing import ClientHome
from dynamo.runtime._calls.context import Context
from dynamo.runtime._calls.streams import AsyncResponseStream
from dynamo.runtime._client import Client
from dynamo.runtime._config import from_env
from dynamo.runtime._discovery.instances import InstanceSet
from dynamo.runtime._discovery.memory import MemoryBackend
from dynamo.runtime._routing.ejection import Failure
from dynamo.runtime._routing.policies import RouterMode
from dynamo.runtime._wire.records import INSTANCES, encode_record
from dynamo.runtime.errors import (
    CallTimeout,
    ConnectionFailed,
    EngineShutdown,
    HandlerRefused,
    Overloaded,
    Refused,
)

# After so many turns of the loop everything that was begun has come to rest.
TURNS = 15
NUMBERS = (1, 2, 3)
MODES = (
    RouterMode.RoundRobin,
    RouterMode.Random,
    RouterMode.PowerOfTwoChoices,
    RouterMode.LeastLoaded,
    RouterMode.DeviceAwareWeighted,
)
METHODS = (
    "random",
    "round_robin",
    "generate",
    "device_aware_weighted",
    "direct",
    "bidirectional",
)
REFUSALS = {
    "full": (Overloaded("CapacityExhausted: full", retry_after=0.001), False),
    "draining": (Refused("Unavailable: draining"), True),
    "no handler": (HandlerRefused("Unavailable: no"), True),
    "late": (CallTimeout("DeadlineExceeded: late"), True),
}
BEHAVIOURS = (
    *REFUSALS,
    "starts",
    "starts",
    "starts",
    "silent",
    "lost",
    "no connection",
)
FROM_THE_WORKER = ("ended", "failed", "gone", "broken")
FROM_THE_CALLER = ("cancel", "stop", "kill", "close", "drop")


class World:
    """Instances that do what they are told, clients of all modes, and their calls."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.lane = MemoryLane()
        self.backend = MemoryBackend()
        self.calls: list[tuple[asyncio.Future[AsyncResponseStream], Context]] = []
        self.started: set[Opened] = set()
        self.over: set[Opened] = set()

    async def open(self) -> None:
        for number in NUMBERS:
            self.behave(number, "starts")
            await self.join(number)
        instances = await InstanceSet.open(self.backend, NAME)
        config = from_env({"DYN_RUNTIME_INHIBITED_DURATION_SECS": "0.001"}, "mem")
        self.home = ClientHome(
            self.loop, self.lane, instances, config, self.loop.create_task, lambda: None
        )
        self.clients = [Client._of(self.home, mode) for mode in MODES]

    async def aclose(self) -> None:
        await self.home.aclose()
        await self.backend.aclose()

    async def join(self, number: int) -> None:
        one = record(number)
        await self.backend.register(INSTANCES, one.key, encode_record(one))

    async def leave(self, number: int) -> None:
        await self.backend.unregister(INSTANCES, record(number).key)

    def behave(self, number: int, behaviour: str) -> None:
        """What the instance does with the next calls."""
        self.lane.failures.pop(number, None)
        if behaviour == "no connection":
            self.lane.failures[number] = ConnectionFailed("Unavailable: no")
        self.lane.scripts[number] = lambda opened: self._answer(opened, behaviour)

    def _answer(self, opened: Opened, behaviour: str) -> None:
        if "kill" in opened.done or behaviour == "silent":
            return
        if behaviour == "starts":
            opened.events.on_reached()
            opened.events.on_started()
            self.started.add(opened)
            return
        self.over.add(opened)
        if behaviour == "lost":
            opened.events.on_lost("lost")
        else:
            # Each call gets an error of its own, as from a real lane.
            error, inhibits = REFUSALS[behaviour]
            own = type(error)(str(error), retry_after=error.retry_after)
            opened.events.on_refused(own, inhibits=inhibits)

    def call(self, method: str, which: int) -> None:
        client = self.clients[which % len(self.clients)]
        context = Context()
        if method == "bidirectional":
            call = client.bidirectional([1, 2], context=context)
        elif method == "direct":
            call = client.direct(None, 1 + which % 4, context=context)
        else:
            call = getattr(client, method)(None, context=context)
        self.calls.append((call, context))

    @property
    def open_calls(self) -> list[Opened]:
        """What the workers have and nobody has ended.

        A call that is stopped before it starts is over for its caller.
        """
        return [
            one
            for one in self.lane.opened
            if one not in self.over
            and "kill" not in one.done
            and (one in self.started or "stop" not in one.done)
        ]

    def worker_ends(self, kind: str, which: int) -> None:
        if not self.open_calls:
            return
        opened = self.open_calls[which % len(self.open_calls)]
        self.over.add(opened)
        ways: dict[str, Callable[[], None]] = {
            "ended": opened.events.on_ended,
            "failed": lambda: opened.fail(RuntimeError("boom")),
            "gone": lambda: opened.fail(EngineShutdown("bye")),
            "broken": lambda: opened.events.on_lost("broken"),
        }
        ways[kind]()

    async def caller_ends(self, kind: str, which: int) -> None:
        if not self.calls:
            return
        call, context = self.calls[which % len(self.calls)]
        if kind == "cancel":
            call.cancel()
        elif kind == "stop":
            context.stop_generating()
        elif kind == "kill":
            context._state.kill()
        elif kind == "drop":
            del self.calls[which % len(self.calls)]
        elif call.done() and not call.cancelled() and call.exception() is None:
            await call.result().aclose()

    async def rest(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)


STEPS = st.one_of(
    st.tuples(st.sampled_from(METHODS), st.integers(0, 30)),
    st.tuples(st.sampled_from(METHODS), st.integers(0, 30)),
    st.tuples(st.sampled_from(BEHAVIOURS), st.integers(0, 2)),
    st.tuples(st.sampled_from(("leaves", "joins")), st.integers(0, 2)),
    st.tuples(st.sampled_from(FROM_THE_WORKER), st.integers(0, 30)),
    st.tuples(st.sampled_from(FROM_THE_CALLER), st.integers(0, 30)),
)


async def take(world: World, kind: str, which: int) -> None:
    number = NUMBERS[which % len(NUMBERS)]
    if kind in METHODS:
        world.call(kind, which)
    elif kind in BEHAVIOURS:
        world.behave(number, kind)
    elif kind in FROM_THE_WORKER:
        world.worker_ends(kind, which)
    elif kind in FROM_THE_CALLER:
        await world.caller_ends(kind, which)
    elif kind == "joins":
        await world.join(number)
    else:
        await world.leave(number)


@given(st.lists(st.tuples(STEPS, st.booleans()), max_size=50))
def test_calls_in_flight_are_counted_exactly(
    steps: list[tuple[tuple[str, int], bool]],
) -> None:
    async def play() -> None:
        world = World()
        await world.open()
        for (kind, which), rests in steps:
            await take(world, kind, which)
            if rests:
                await world.rest()
                there = Counter(one.instance_id for one in world.open_calls)
                assert world.home.in_flight == there
        for call, _ in world.calls:
            call.cancel()
        world.calls.clear()
        await world.rest()
        for _ in range(len(world.open_calls)):
            world.worker_ends("ended", 0)
        assert world.home.in_flight == {}
        await world.aclose()

    asyncio.run(play())


@pytest.mark.parametrize("tried", NUMBERS)
async def test_a_call_that_met_a_dead_instance_goes_to_a_living_one(tried: int) -> None:
    """Half of the dead are called all the same; no call is to meet two of them."""
    world = World()
    await world.open()
    await world.join(4)
    await world.rest()
    for number in NUMBERS:
        world.home.health.failed(number, Failure.NO_CONNECTION)
    chooser = world.clients[0]._chooser
    dead, living = chooser.free(frozenset())
    assert living.instance_id == 4
    assert list(chooser.free(frozenset((tried,)))) == [living]
    rather = list(chooser.free(frozenset((4,))))
    assert rather == [dead], "than nobody"
    await world.aclose()


# RT-01


@pytest.mark.parametrize(
    "mode", [RouterMode.LeastLoaded, RouterMode.DeviceAwareWeighted]
)
async def test_idle_instances_get_equally_many_calls(mode: RouterMode) -> None:
    world = World()
    await world.open()
    await world.join(4)
    await world.rest()
    client = world.clients[MODES.index(mode)]
    numbers: Counter[int | None] = Counter()
    for _ in range(1000):
        stream = await client.generate(None)
        numbers[stream.instance_id] += 1
        world.lane.opened[-1].events.on_ended()
    assert numbers == {1: 250, 2: 250, 3: 250, 4: 250}
    await world.aclose()
