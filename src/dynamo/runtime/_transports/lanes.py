"""The choice of the lane for each call of a runtime.

An instance on the loop of its caller is called without a socket.  A worker that advertises
the duplex lane is called on it; one whose port turns out not to answer there is called on
the genuine lane until its record changes.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dynamo.runtime._config import LOCAL
from dynamo.runtime._transports.callhome_client import CallhomeClientLane
from dynamo.runtime._transports.duplex_client import DuplexClientLane, NoDuplex
from dynamo.runtime._transports.local import LocalLane, neighbour, ports

if TYPE_CHECKING:
    from dynamo.runtime._config import RuntimeConfig
    from dynamo.runtime._transports import CallEvents, CallHandle, CallRequest
    from dynamo.runtime._wire.records import EndpointRecord

_log = logging.getLogger("dynamo.runtime.lanes")

# Instances without the lane they advertise are rare; more are forgotten, oldest first.
_MAX_FALLEN_BACK = 1024


class Lanes:
    """The `ClientLane` of a runtime, made of the lanes it speaks."""

    def __init__(self, loop: asyncio.AbstractEventLoop, config: RuntimeConfig) -> None:
        # Whatever the lane, so many connections may be under way.
        connecting = asyncio.Semaphore(config.global_connect_limit)
        self.callhome = CallhomeClientLane(loop, config, connecting)
        self.duplex = DuplexClientLane(loop, config, connecting)
        self.local = LocalLane(loop, config)
        self._loop = loop
        self._stays_local = LOCAL in config.lanes
        self._speaks_duplex = "duplex" in config.lanes
        # By address; a record that was written again is another object.
        self._fallen_back: dict[str, EndpointRecord] = {}

    def open_now(
        self, record: EndpointRecord, request: CallRequest, events: CallEvents
    ) -> CallHandle | None:
        if self._stays_local and ports:
            server = neighbour(record, self._loop)
            if server is not None:
                return self.local.open_now(server, record, request, events)
        if self._uses_duplex(record):
            return self.duplex.open_now(record, request, events)
        return None

    async def open(
        self, record: EndpointRecord, request: CallRequest, events: CallEvents
    ) -> CallHandle:
        server = neighbour(record, self._loop) if self._stays_local else None
        if server is not None:
            return self.local.open_now(server, record, request, events)
        if self._uses_duplex(record):
            try:
                return await self.duplex.open(record, request, events)
            except NoDuplex as error:
                self._fall_back(record, error)
        return await self.callhome.open(record, request, events)

    def _uses_duplex(self, record: EndpointRecord) -> bool:
        if not self._speaks_duplex or "duplex" not in record.lanes:
            return False
        fallen_back = self._fallen_back
        return not fallen_back or fallen_back.get(record.address) is not record

    def _fall_back(self, record: EndpointRecord, error: NoDuplex) -> None:
        _log.info(
            "instance %x is called back from now on, not on the duplex lane: %s (%s)",
            record.instance_id,
            error,
            error.facts.get("reason"),
        )
        self._fallen_back[record.address] = record
        while len(self._fallen_back) > _MAX_FALLEN_BACK:
            del self._fallen_back[next(iter(self._fallen_back))]

    def addresses(self) -> set[str]:
        """Our own ends of the connections to workers: they may be to our own port."""
        sockets = self.callhome.addresses() | self.duplex.addresses()
        return sockets | {self.local.peer}

    async def probe(self, record: EndpointRecord) -> bool:
        return await self.callhome.probe(record)

    async def aclose(self) -> None:
        self.local.close()
        await self.duplex.aclose()
        await self.callhome.aclose()

    def abort(self) -> None:
        """Close at once what `aclose` leaves to end by itself."""
        self.local.abort()
        self.duplex.abort()
        self.callhome.listener.abort()
