"""A way to call instances that are nowhere: tests play the workers.

`MemoryLane` is a `ClientLane`; each call that it opens is an `Opened`, through which a
test says what the worker does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from envelopes import received

from dynamo.runtime._calls.context import ContextState
from dynamo.runtime._calls.deadlines import Deadlines
from dynamo.runtime._calls.egress import (
    NO_OPTIONS,
    CallOptions,
    OutgoingCall,
    Selection,
)
from dynamo.runtime._calls.streams import AsyncResponseStream
from dynamo.runtime._discovery.health import Health
from dynamo.runtime._discovery.instances import InstanceSet
from dynamo.runtime._discovery.memory import MemoryBackend, MemoryStore
from dynamo.runtime._routing.ejection import EjectionPolicy
from dynamo.runtime._routing.retry import RetryBudget
from dynamo.runtime._transports import CallEvents, CallRequest
from dynamo.runtime._wire.faults import error_of_exception
from dynamo.runtime._wire.records import (
    INSTANCES,
    EndpointName,
    EndpointRecord,
    encode_record,
)
from dynamo.runtime.errors import NoInstances

NAME = EndpointName("ns", "comp", "gen")


def record(number: int) -> EndpointRecord:
    return EndpointRecord(
        name=NAME, instance_id=number, transport_kind="tcp", address="127.0.0.1:1/x"
    )


class Opened:
    """One opened call: the `CallHandle`, and the events to play to its owner."""

    def __init__(
        self, instance_id: int, request: CallRequest, events: CallEvents
    ) -> None:
        self.instance_id = instance_id
        self.request = request
        self.events = events
        self.done: list[str] = []

    def stop(self) -> None:
        self.done.append("stop")

    def kill(self) -> None:
        self.done.append("kill")

    def pause(self) -> None:
        self.done.append("pause")

    def resume(self) -> None:
        self.done.append("resume")

    def close(self) -> None:
        self.done.append("close")

    def item(self, data: object = None, size_bytes: int = 1) -> None:
        self.events.on_items([received(data)], size_bytes)

    def fail(self, error: BaseException) -> None:
        self.events.on_failed(error_of_exception(error))


class MemoryLane:
    """A `ClientLane` whose instances do what a test tells them.

    Args:
        stands: Whether its connections need not be made first.
    """

    def __init__(self, *, stands: bool = False) -> None:
        self.stands = stands
        self.failures: dict[int, Exception] = {}
        self.scripts: dict[int, Callable[[Opened], None]] = {}
        self.opened: list[Opened] = []
        self.connecting = asyncio.Event()
        self.hold: asyncio.Event | None = None

    def open_now(
        self, record: EndpointRecord, request: CallRequest, events: CallEvents
    ) -> Opened | None:
        if not self.stands or self.hold is not None:
            return None
        return self._opened(record, request, events)

    async def open(
        self, record: EndpointRecord, request: CallRequest, events: CallEvents
    ) -> Opened:
        self.connecting.set()
        if self.hold is not None:
            await self.hold.wait()
        return self._opened(record, request, events)

    def _opened(
        self, record: EndpointRecord, request: CallRequest, events: CallEvents
    ) -> Opened:
        failure = self.failures.get(record.instance_id)
        if failure is not None:
            raise failure
        opened = Opened(record.instance_id, request, events)
        self.opened.append(opened)
        script = self.scripts.get(record.instance_id, started)
        asyncio.get_running_loop().call_soon(script, opened)
        return opened

    async def probe(self, record: EndpointRecord) -> bool:
        return record.instance_id not in self.failures

    async def aclose(self) -> None:
        """Nothing is open."""


def started(opened: Opened) -> None:
    opened.events.on_reached()
    opened.events.on_started()


def silent(opened: Opened) -> None:
    """Acknowledged, and nothing more."""


class World:
    """Instances 1 and 2, a lane, and what was noted about them."""

    def __init__(self, *, stands: bool = False) -> None:
        self.loop = asyncio.get_running_loop()
        self.lane = MemoryLane(stands=stands)
        self.backend = MemoryBackend(MemoryStore())
        self.in_flight: dict[int, int] = {}
        self.withdrawn: list[int] = []
        self.budget = RetryBudget(self.loop.time())
        self.deadlines = Deadlines(self.loop)
        self.overloaded: list[tuple[int, float]] = []

    async def open(self) -> None:
        for number in (1, 2):
            await self.add(number)
        self.instances = await InstanceSet.open(self.backend, NAME)
        policy = EjectionPolicy(first_s=1000.0, max_s=1000.0)
        self.health = Health(self.loop, self.instances, self.lane.probe, policy)

    @property
    def usable(self) -> list[int]:
        return [one.instance_id for one in self.health.usable]

    async def add(self, number: int) -> None:
        one = record(number)
        await self.backend.register(INSTANCES, one.key, encode_record(one))
        await asyncio.sleep(0)

    async def remove(self, number: int) -> None:
        await self.backend.unregister(INSTANCES, record(number).key)
        await asyncio.sleep(0)

    def choose(self, tried: frozenset[int]) -> EndpointRecord:
        for one in self.instances.records:
            if one.instance_id not in tried:
                return one
        raise NoInstances("Unavailable: nobody")

    def withdraw(self, instance_id: int, reason: str) -> None:
        self.withdrawn.append(instance_id)

    def overload(self, instance_id: int, duration_s: float) -> None:
        self.overloaded.append((instance_id, duration_s))

    async def explained(self, error: NoInstances) -> NoInstances:
        return error

    def call(
        self,
        context: ContextState | None = None,
        *,
        annotated: bool = False,
        fixed: bool = False,
        options: CallOptions = NO_OPTIONS,
    ) -> OutgoingCall:
        selection = Selection(
            self.choose,
            self.instances,
            self.health,
            self.in_flight,
            self,
            self.budget,
            fixed=fixed,
        )
        request = CallRequest(call_id="id", value=None, packed=b"\xc0", metadata={})
        return OutgoingCall(
            self.loop,
            self.lane,
            request,
            selection,
            context,
            self.deadlines,
            annotated=annotated,
            options=options,
        )

    async def stream(
        self, context: ContextState | None = None, **options: Any
    ) -> tuple[AsyncResponseStream, Opened]:
        stream = await self.call(context, **options).start()
        return stream, self.lane.opened[-1]
