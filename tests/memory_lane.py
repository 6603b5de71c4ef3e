"""A way to call instances that are nowhere: tests play the workers.

`MemoryLane` is a `ClientLane`; each call that it opens is an `Opened`, through which a
test says what the worker does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dynamo.runtime._transports import CallEvents, CallRequest
from dynamo.runtime._wire.faults import error_of_exception
from dynamo.runtime._wire.payload import AnnotatedItem
from dynamo.runtime._wire.records import EndpointName, EndpointRecord

NAME = EndpointName("ns", "comp", "gen")


def record(number: int) -> EndpointRecord:
    return EndpointRecord(
        name=NAME, instance_id=number, transport_kind="tcp", address="127.0.0.1:1/x"
    )


class Opened:
    """One opened call: the `CallHandle`, and the events to play to its owner."""

    def __init__(self, instance_id: int, events: CallEvents) -> None:
        self.instance_id = instance_id
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
        self.events.on_item(AnnotatedItem(data=data), size_bytes)

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
        return self._opened(record, events)

    async def open(
        self, record: EndpointRecord, request: CallRequest, events: CallEvents
    ) -> Opened:
        self.connecting.set()
        if self.hold is not None:
            await self.hold.wait()
        return self._opened(record, events)

    def _opened(self, record: EndpointRecord, events: CallEvents) -> Opened:
        failure = self.failures.get(record.instance_id)
        if failure is not None:
            raise failure
        opened = Opened(record.instance_id, events)
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
