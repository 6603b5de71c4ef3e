"""What the clients of an endpoint share, and the choice of an instance for each call.

`ClientHome` is the former, with the names of endpoints to be told when nobody is there.
`Chooser` owns whom one client leaves out, for how long, and what it says if nobody is left.  The
list of instances is shared; the policies are pure; the call itself is `egress`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from dynamo.runtime._calls.deadlines import Deadlines, DefaultLimits
from dynamo.runtime._calls.egress import Choose, Selection
from dynamo.runtime._discovery.health import Health
from dynamo.runtime._discovery.model_cards import ModelCards
from dynamo.runtime._routing.avoided import Avoided
from dynamo.runtime._routing.ejection import EjectionPolicy
from dynamo.runtime._routing.policies import (
    RoundRobin,
    RouterMode,
    choose_device_aware,
    choose_least_loaded,
    choose_power_of_two,
    choose_random,
)
from dynamo.runtime._routing.retry import RetryBudget
from dynamo.runtime.errors import (
    CallError,
    DiscoveryError,
    InstanceNotFound,
    NoInstances,
    NoInstancesInTime,
    Overloaded,
    RuntimeClosed,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo.runtime._config import RuntimeConfig
    from dynamo.runtime._discovery.instances import InstanceSet
    from dynamo.runtime._transports import ClientLane
    from dynamo.runtime._wire.records import EndpointRecord


_log = logging.getLogger("dynamo.runtime.client")

# How many endpoint names, and reasons, an error has in its text; all are in its facts.
_NAMES_TOLD = 10
_REASONS_TOLD = 3
_NAMES_KEPT_S = 1.0
_NAMES_LIMIT_S = 1.0


class ClientHome:
    """What all clients of one endpoint in one runtime share.

    Args:
        loop: The home loop.
        lane: The way to the instances.
        instances: The live view of the endpoint.
        config: How long instances are avoided, how devices are weighed.
        run: Runs a coroutine on the home loop for whatever loop is running.
        check: Raises if the runtime cannot be used in this process.

    Attributes:
        health: Which instances may be called, after what was seen of them.
        in_flight: Calls per instance id.
        deadlines: Who looks at calls with limits.
        limits: Those of calls that name none.
        budget: For moves beyond the first of a call.
        cards: What the instances' model cards say, for those who wait for it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        lane: ClientLane,
        instances: InstanceSet,
        config: RuntimeConfig,
        run: Callable[[Coroutine[Any, Any, Any]], asyncio.Future[Any]],
        check: Callable[[], None],
    ) -> None:
        self.loop = loop
        self.lane = lane
        self.instances = instances
        self.cards = ModelCards(instances)
        self.health = Health(loop, instances, lane.probe, _policy(config))
        self.in_flight: dict[int, int] = {}
        self.deadlines = Deadlines(loop)
        self.limits = DefaultLimits(
            config.call_timeout_s, config.first_item_timeout_s, config.idle_timeout_s
        )
        self.budget = RetryBudget(loop.time())
        self.config = config
        self.run = run
        self.check = check
        self._names: list[str] = []
        self._names_until = 0.0
        self._looking = asyncio.Lock()

    async def aclose(self) -> None:
        """End the watch of the endpoint, and what tries connections to its instances."""
        self.instances.close()
        await self.health.aclose()

    async def explained(self, error: NoInstances) -> NoInstances:
        """The same error; with nobody listed it says whether somebody was, and who is."""
        if error.facts.get("listed"):
            return error
        left_at = self.instances.left_at
        left_s = None if left_at is None else self.loop.time() - left_at
        none = "none listed"
        if left_s is not None:
            none += f" any more, the last one left {left_s:.3g} s ago"
        names = await self._registered_names()
        told = ", ".join(names[:_NAMES_TOLD])
        if len(names) > _NAMES_TOLD:
            told += f" and {len(names) - _NAMES_TOLD} more"
        return NoInstances(
            f"{error} ({none}; registered endpoints: {told or 'none'})",
            attempts=0,
            facts={**error.facts, "endpoints": tuple(names), "left_s": left_s},
        )

    async def _registered_names(self) -> list[str]:
        """Looked up now and then: callers may well try in a loop."""
        # Those who come meanwhile wait for the same answer.
        async with self._looking:
            if self.loop.time() < self._names_until:
                return self._names
            looking = self.instances.registered_names()
            try:
                self._names = await asyncio.wait_for(looking, _NAMES_LIMIT_S)
            except (DiscoveryError, RuntimeClosed, asyncio.TimeoutError) as reason:
                # That nobody is there is what the caller must hear, not this.
                _log.info("the registered endpoints are not known: %s", reason)
                self._names = []
            self._names_until = self.loop.time() + _NAMES_KEPT_S
            return self._names


def _policy(config: RuntimeConfig) -> EjectionPolicy:
    return EjectionPolicy(
        failures=config.ejection_failures,
        first_s=config.ejection_first_s,
        max_s=config.ejection_max_s,
        trial_s=config.request_timeout_s,
    )


class Chooser:
    """The choice of one client among the instances of its endpoint.

    Who is *listed* in discovery and not left out gets calls.  Left out are those that

    * are *withdrawn*: they said that they are not to be called (also everybody);
    * are *ejected*: calls of this runtime saw them fail (see `Health`; never everybody);
    * are *overloaded*: they asked to be left alone for a moment (also everybody).

    The first two make an instance not routable, the last one only not free.
    """

    def __init__(self, home: ClientHome) -> None:
        self.home = home
        self.withdrawn: Avoided[EndpointRecord] = Avoided()
        self.overloaded: Avoided[EndpointRecord] = Avoided()
        self.now = home.loop.time
        self._rotation = RoundRobin()
        self._random = random.Random()
        self._turn = self._random.randrange(2**16)

    def routable(self) -> Sequence[EndpointRecord]:
        """Listed, not withdrawn, not ejected."""
        usable = self.home.health.usable
        if not self.withdrawn.until:
            return usable
        listed = self.home.instances.records
        rest = self.withdrawn.without(listed, self.now())
        return usable if rest is listed else self.home.health.without_ejected(rest)

    def free(self, tried: frozenset[int]) -> Sequence[EndpointRecord]:
        """Those that may get a call now.

        Raises:
            Overloaded: the routable ones all asked to be left alone for a moment.
            NoInstances: there is nobody.
        """
        if not (tried or self.withdrawn.until or self.overloaded.until):
            # As nearly always.
            usable = self.home.health.usable
            if usable:
                return usable
        free = routable = self.routable()
        if self.overloaded.until:
            free = self.overloaded.without(routable, self.now())
        if tried:
            free = self._others(free, tried)
        if free:
            return free
        if routable and not tried:
            raise Overloaded(
                "CapacityExhausted: All workers are busy, please retry later",
                phase="choose",
                attempts=0,
                retry_after=self.overloaded.next_end_s(self.now()),
                facts=self._facts(),
            )
        raise self._nobody()

    def _others(
        self, free: Sequence[EndpointRecord], tried: frozenset[int]
    ) -> Sequence[EndpointRecord]:
        """Where a call may go next: to one that fails nobody, if there is any.

        When most are ejected some of them are called all the same, but no call is to
        meet one after the other until it may not try any more.
        """
        troubled = self.home.health.troubled
        others = [one for one in free if one.instance_id not in tried]
        return [one for one in others if one.instance_id not in troubled] or others

    def _facts(self) -> dict[str, object]:
        """Who is listed, and who of them is left out for what reason."""
        now, health = self.now(), self.home.health
        left_out: dict[str, dict[int, str]] = {
            "withdrawn": {},
            "ejected": {},
            "overloaded": {},
        }
        for record in self.home.instances.records:
            number = record.instance_id
            left_out["withdrawn"][number] = self.withdrawn.reason(record, now)
            left_out["ejected"][number] = health.reason(number)
            left_out["overloaded"][number] = self.overloaded.reason(record, now)
        facts: dict[str, object] = {
            why: {number: reason for number, reason in who.items() if reason}
            for why, who in left_out.items()
        }
        return {"listed": len(self.home.instances.records), **facts}

    def _nobody(self) -> NoInstances:
        facts = self._facts()
        name = self.home.instances.name
        detail = f" ({_told(facts)})" if facts["listed"] else ""
        return NoInstances(
            f"Unavailable: No workers available for endpoint {name}{detail}",
            attempts=0,
            facts=facts,
        )

    # The policies, each as a `Choose`.

    def round_robin(self, tried: frozenset[int]) -> EndpointRecord:
        return self._rotation.choose(self.free(tried))

    def random(self, tried: frozenset[int]) -> EndpointRecord:
        return choose_random(self.free(tried), self._random.randrange)

    def power_of_two(self, tried: frozenset[int]) -> EndpointRecord:
        return choose_power_of_two(
            self.free(tried), self.home.in_flight, self._random.randrange
        )

    def least_loaded(self, tried: frozenset[int]) -> EndpointRecord:
        return choose_least_loaded(
            self.free(tried), self.home.in_flight, self._next_turn
        )

    def device_aware(self, tried: frozenset[int]) -> EndpointRecord:
        return choose_device_aware(
            self.free(tried),
            self.home.in_flight,
            self.home.config.device_ratio,
            self._next_turn,
        )

    def _next_turn(self, limit: int) -> int:
        """One after the other instead of chance: equals get equally many calls."""
        self._turn += 1
        return self._turn % limit

    def not_weighted(self, tried: frozenset[int]) -> EndpointRecord:
        """What `Client.device_aware_weighted` does in modes that weigh nothing."""
        raise CallError(
            "routing occupancy state not initialized for endpoint "
            f"{self.home.instances.name}: make the client with RouterMode."
            "DeviceAwareWeighted, LeastLoaded or PowerOfTwoChoices"
        )

    def of_mode(self, mode: RouterMode) -> Choose:
        """The policy of `Client.generate`; random where another cannot be followed."""
        return {
            int(RouterMode.RoundRobin): self.round_robin,
            int(RouterMode.Direct): self.round_robin,
            int(RouterMode.PowerOfTwoChoices): self.power_of_two,
            int(RouterMode.LeastLoaded): self.least_loaded,
            int(RouterMode.DeviceAwareWeighted): self.device_aware,
        }.get(int(mode), self.random)

    def exactly(self, instance_id: int) -> Selection:
        """That instance, also if it is being avoided, and no other."""

        def choose(tried: frozenset[int]) -> EndpointRecord:
            record = self.home.instances.get(instance_id)
            if record is None:
                raise InstanceNotFound(
                    f"Unavailable: instance_id={instance_id} not found for endpoint "
                    f"{self.home.instances.name}",
                    attempts=0,
                    instance_id=instance_id,
                )
            return record

        return self.selection(choose, fixed=True)

    def selection(self, choose: Choose, *, fixed: bool = False) -> Selection:
        """What calls that choose in this way share; it is not held here."""
        return Selection(
            choose,
            self.home.instances,
            self.home.health,
            self.home.in_flight,
            self,
            self.home.budget,
            fixed=fixed,
        )

    # `Told`: what the calls hear of the instances.

    def withdraw(self, instance_id: int, reason: str) -> None:
        self._avoid(self.withdrawn, instance_id, self.home.config.inhibited_s, reason)

    def overload(self, instance_id: int, duration_s: float) -> None:
        reason = f"asked to be left alone for {duration_s:g} s"
        self._avoid(self.overloaded, instance_id, duration_s, reason)

    async def explained(self, error: NoInstances) -> NoInstances:
        return await self.home.explained(error)

    def _avoid(
        self,
        avoided: Avoided[EndpointRecord],
        instance_id: int,
        duration_s: float,
        reason: str,
    ) -> None:
        record = self.home.instances.get(instance_id)
        if record is not None:
            now = self.now()
            avoided.add(record, now + duration_s, reason, now)

    async def wait_at_most(self, timeout_s: float | None) -> list[int]:
        """The routable ids, or an error that says who is there but cannot be called."""
        ready = self._ready()
        if ready:
            # Before any limit, so that 0 asks who is there now.
            return ready
        try:
            return await asyncio.wait_for(self._wait(), timeout_s)
        except asyncio.TimeoutError:
            nobody = await self.home.explained(self._nobody())
            raise NoInstancesInTime(
                f"{nobody}: waited {timeout_s:g} s", attempts=0, facts=nobody.facts
            ) from None

    async def _wait(self) -> list[int]:
        while not (ready := self._ready()):
            await self._change()
        return ready

    def _ready(self) -> list[int]:
        """The routable ids.

        Raises:
            RuntimeClosed: nobody keeps the list up to date any more.
        """
        if self.home.instances.closed:
            raise RuntimeClosed("channel closed: the runtime was shut down")
        return [one.instance_id for one in self.routable()]

    async def _change(self) -> None:
        """Until the list changes or somebody who was withdrawn is back."""
        changed = self.home.loop.create_future()

        def wake() -> None:
            if not changed.done():
                changed.set_result(None)

        unsubscribe = self.home.instances.subscribe(wake)
        back_s = self.withdrawn.next_end_s(self.now())
        timer = None
        if back_s is not None:
            timer = self.home.loop.call_later(max(back_s, 0.0) + 0.001, wake)
        try:
            await changed
        finally:
            unsubscribe()
            if timer is not None:
                timer.cancel()


def _told(facts: dict[str, object]) -> str:
    """Facts about those that are left out, in words."""
    counts, reasons = [], []
    for why, who in facts.items():
        if isinstance(who, dict):
            counts.append(f"{len(who)} {why}")
            reasons += [f"{number}: {reason}" for number, reason in who.items()]
    text = f"{facts['listed']} listed: {', '.join(counts)}"
    return "; ".join((text, *reasons[:_REASONS_TOLD]))
