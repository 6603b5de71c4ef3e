"""The choice of an instance for each call of one client.

Owns whom this client leaves out, for how long, and what it says if nobody is left.  The
list of instances is shared; the policies are pure; the call itself is `egress`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from dynamo.runtime._calls.egress import Selection
from dynamo.runtime._discovery.model_cards import ModelCards
from dynamo.runtime._routing.policies import (
    RoundRobin,
    choose_device_aware,
    choose_least_loaded,
    choose_power_of_two,
    choose_random,
)
from dynamo.runtime.errors import (
    CallError,
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


class ClientHome:
    """What all clients of one endpoint in one runtime share.

    Args:
        loop: The home loop.
        lane: The way to the instances.
        instances: The live view of the endpoint.
        config: How long instances are avoided, how devices are weighed.
        run: Runs a coroutine on the home loop for whatever loop is running.

    Attributes:
        in_flight: Calls per instance id.
        cards: What the instances' model cards say, for those who wait for it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        lane: ClientLane,
        instances: InstanceSet,
        config: RuntimeConfig,
        run: Callable[[Coroutine[Any, Any, Any]], asyncio.Future[Any]],
    ) -> None:
        self.loop = loop
        self.lane = lane
        self.instances = instances
        self.cards = ModelCards(instances)
        self.in_flight: dict[int, int] = {}
        self.config = config
        self.run = run


class Avoided:
    """Instances that this client leaves out for a while, each with a time of its own.

    An instance that re-registers, also under its old id, starts with a clean slate.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._until: dict[int, tuple[float, EndpointRecord]] = {}

    def add(self, record: EndpointRecord | None, duration_s: float) -> None:
        self._forget_expired()
        if record is not None and duration_s > 0:
            self._until[record.instance_id] = (self._now() + duration_s, record)

    def __contains__(self, record: EndpointRecord) -> bool:
        if not self._until:
            return False
        until, avoided = self._until.get(record.instance_id, (0.0, record))
        if until > self._now() and avoided is record:
            return True
        self._until.pop(record.instance_id, None)
        return False

    def next_end_s(self) -> float | None:
        """Seconds until the first of them is back, or None if there is none."""
        self._forget_expired()
        if not self._until:
            return None
        return min(until for until, _ in self._until.values()) - self._now()

    def _forget_expired(self) -> None:
        """Also of instances that left: nobody will ask for them again."""
        now = self._now()
        self._until = {
            number: avoided
            for number, avoided in self._until.items()
            if avoided[0] > now
        }


class Chooser:
    """The choice of one client among the instances of its endpoint."""

    def __init__(self, home: ClientHome) -> None:
        self.home = home
        self.withdrawn = Avoided(home.loop.time)
        self.overloaded = Avoided(home.loop.time)
        self._rotation = RoundRobin()
        self._random = random.Random()

    def routable(self) -> list[EndpointRecord]:
        """Listed, answering as far as we know, and not withdrawn."""
        usable = self.home.instances.usable
        return [one for one in usable if one not in self.withdrawn]

    def free(self, tried: frozenset[int]) -> list[EndpointRecord]:
        """Those that may get a call now.

        Raises:
            Overloaded: the routable ones all asked to be left alone for a moment.
            NoInstances: there is nobody.
        """
        routable = [r for r in self.routable() if r.instance_id not in tried]
        free = [r for r in routable if r not in self.overloaded]
        if free:
            return free
        if routable and not tried:
            raise Overloaded(
                "CapacityExhausted: All workers are busy, please retry later",
                phase="choose",
                attempts=0,
                retry_after=self.overloaded.next_end_s(),
            )
        raise self._nobody()

    def _nobody(self) -> NoInstances:
        instances = self.home.instances
        listed = instances.records
        withdrawn = [r.instance_id for r in listed if r in self.withdrawn]
        suspect = [r.instance_id for r in listed if instances.is_suspect(r.instance_id)]
        detail = ""
        if listed:
            detail = (
                f" ({len(listed)} listed: {len(withdrawn)} withdrawn after a fault, "
                f"{len(suspect)} not answering)"
            )
        return NoInstances(
            f"Unavailable: No workers available for endpoint {instances.name}{detail}",
            attempts=0,
            facts={
                "listed": len(listed),
                "withdrawn": withdrawn,
                "suspect": suspect,
            },
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
            self.free(tried), self.home.in_flight, self._random.randrange
        )

    def device_aware(self, tried: frozenset[int]) -> EndpointRecord:
        return choose_device_aware(
            self.free(tried),
            self.home.in_flight,
            self.home.config.device_ratio,
            self._random.randrange,
        )

    def not_weighted(self, tried: frozenset[int]) -> EndpointRecord:
        """What `Client.device_aware_weighted` does in modes that weigh nothing."""
        raise CallError(
            "routing occupancy state not initialized for endpoint "
            f"{self.home.instances.name}: make the client with RouterMode."
            "DeviceAwareWeighted, LeastLoaded or PowerOfTwoChoices"
        )

    def exactly(self, instance_id: int) -> Callable[[frozenset[int]], EndpointRecord]:
        """That instance, also if it is being avoided."""

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

        return choose

    def selection(
        self, choose: Callable[[frozenset[int]], EndpointRecord], *, fixed: bool = False
    ) -> Selection:
        return Selection(
            choose,
            self.home.instances,
            self.home.in_flight,
            self._withdraw,
            self._overload,
            fixed=fixed,
        )

    def _withdraw(self, instance_id: int) -> None:
        record = self.home.instances.get(instance_id)
        self.withdrawn.add(record, self.home.config.inhibited_s)

    def _overload(self, instance_id: int, duration_s: float) -> None:
        self.overloaded.add(self.home.instances.get(instance_id), duration_s)

    async def wait_at_most(self, timeout_s: float | None) -> list[int]:
        """The routable ids, or an error that says who is there but cannot be called."""
        ready = self._ready()
        if ready:
            # Before any limit, so that 0 asks who is there now.
            return ready
        try:
            return await asyncio.wait_for(self._wait(), timeout_s)
        except asyncio.TimeoutError:
            nobody = self._nobody()
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
        back_s = self.withdrawn.next_end_s()
        timer = None
        if back_s is not None:
            timer = self.home.loop.call_later(max(back_s, 0.0) + 0.001, wake)
        try:
            await changed
        finally:
            unsubscribe()
            if timer is not None:
                timer.cancel()
