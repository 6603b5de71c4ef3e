"""The live view of one endpoint: which instances discovery lists.

Owns how one change of a store is applied and what the application sees of an instance.
Knows no store, no transport, and not how the instances are doing: that is `health`.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from typing import TYPE_CHECKING, ClassVar, Protocol, final

from dynamo.runtime._sealed import Unconstructible, override
from dynamo.runtime._wire.records import (
    INSTANCES,
    MODEL_CARDS,
    EndpointName,
    EndpointRecord,
    decode_record,
    endpoint_prefix,
    parse_instance_key,
)
from dynamo.runtime.errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo.runtime._discovery import DiscoveryBackend, KeyChange, OnChange, Watch

    Identity = tuple[EndpointName, int]

_log = logging.getLogger("dynamo.runtime.discovery")


@final
class TransportType(Unconstructible):
    """How an instance is reached.  Read-only, compared by value, hashable.

    Example:
        >>> transport = TransportType._make("tcp", "127.0.0.1:8000/7/ns/comp/gen")
        >>> transport
        TransportType(kind="tcp", address="127.0.0.1:8000/7/ns/comp/gen")
        >>> transport.kind
        'tcp'
    """

    __slots__ = ("_address", "_kind")

    _kind: str
    _address: str

    @classmethod
    def _make(cls, kind: str, address: str) -> TransportType:
        made = object.__new__(cls)
        made._kind = kind
        made._address = address
        return made

    @property
    def kind(self) -> str:
        """``"tcp"`` or ``"nats_tcp"``."""
        return self._kind

    @property
    def address(self) -> str:
        """``host:port/path`` for ``tcp``, the subject for ``nats_tcp``."""
        return self._address

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TransportType):
            return NotImplemented
        return (self._kind, self._address) == (other._kind, other._address)

    @override
    def __hash__(self) -> int:
        return hash((self._kind, self._address))

    @override
    def __repr__(self) -> str:
        return f'TransportType(kind="{self._kind}", address="{self._address}")'


@final
class Instance(Unconstructible):
    """One registered instance of an endpoint, as discovery listed it at one moment.

    Read-only, compared by value, neither hashable nor ordered.  ``client.instances()``
    returns these; there is no constructor.

    Example:
        >>> from dynamo.runtime._wire.records import EndpointName, EndpointRecord
        >>> instance = Instance._make(
        ...     EndpointRecord(
        ...         name=EndpointName("ns", "comp", "gen"),
        ...         instance_id=7,
        ...         transport_kind="tcp",
        ...         address="127.0.0.1:8000/7/ns/comp/gen",
        ...     )
        ... )
        >>> instance
        Instance(ns/comp/gen/7)
        >>> instance.instance_id, instance.transport.kind, instance.device_type
        (7, 'tcp', None)
    """

    __slots__ = ("_record",)

    _record: EndpointRecord

    @classmethod
    def _make(cls, record: EndpointRecord) -> Instance:
        made = object.__new__(cls)
        made._record = record
        return made

    @property
    def instance_id(self) -> int:
        """The unsigned 64-bit number that ``direct`` takes."""
        return self._record.instance_id

    @property
    def namespace(self) -> str:
        """First part of the endpoint path."""
        return self._record.name.namespace

    @property
    def component(self) -> str:
        """Second part of the endpoint path."""
        return self._record.name.component

    @property
    def endpoint(self) -> str:
        """Third part of the endpoint path."""
        return self._record.name.endpoint

    @property
    def transport(self) -> TransportType:
        """How the instance is reached."""
        return TransportType._make(self._record.transport_kind, self._record.address)

    @property
    def device_type(self) -> str | None:
        """``"cuda"``, ``"cpu"``, or None where the record does not say."""
        return self._record.device_type

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Instance):
            return NotImplemented
        return self._visible() == other._visible()

    __hash__: ClassVar[None]  # type: ignore[assignment]

    @override
    def __str__(self) -> str:
        return f"{self._record.name}/{self._record.instance_id}"

    @override
    def __repr__(self) -> str:
        return f"Instance({self})"

    def _visible(self) -> tuple[object, ...]:
        record = self._record
        return (
            record.name,
            record.instance_id,
            record.transport_kind,
            record.address,
            record.device_type,
        )


class Leaves(Protocol):
    """Whoever waits for an instance to leave."""

    def on_removed(self) -> None:
        """It has left."""


class InstanceSet:
    """The instances of one endpoint, shared by all its clients in one runtime.

    Belongs to the loop on which it was opened.  The store's watch holds it weakly:
    dropping the last reference ends the watch, in whatever thread that happens.
    """

    def __init__(self, backend: DiscoveryBackend, name: EndpointName) -> None:
        # First, because the finalizer needs it.
        self._watch: Watch | None = None
        self._loop = asyncio.get_running_loop()
        self._backend = backend
        self.name = name
        self.closed = False
        self.left_at: float | None = None
        """When the last instance left, on the loop's clock; None if none ever did."""
        self._known: dict[Identity, EndpointRecord] = {}
        self._by_id: dict[int, EndpointRecord] = {}
        self.records: tuple[EndpointRecord, ...] = ()
        """All that are listed, ordered by id."""
        self._unreadable: set[str] = set()
        self._subscribers: dict[object, Callable[[], None]] = {}
        self.removals: dict[Leaves, int] = {}
        """Who is told that an instance leaves, once; anybody may take themselves off."""

    @classmethod
    async def open(cls, backend: DiscoveryBackend, name: EndpointName) -> InstanceSet:
        """Watch an endpoint; what is listed now is there when this returns.

        Raises:
            DiscoveryError: the store cannot be read.
        """
        made = cls(backend, name)
        prefix = endpoint_prefix(name)
        made._watch = await backend.watch(INSTANCES, prefix, _weakly(made))
        return made

    async def watch_model_cards(self, on_change: OnChange) -> Watch:
        """Follow the model cards of this endpoint, in the same store.

        Raises:
            DiscoveryError: the store cannot be read.
        """
        prefix = endpoint_prefix(self.name)
        return await self._backend.watch(MODEL_CARDS, prefix, on_change)

    async def registered_names(self) -> list[str]:
        """The names of all endpoints in the store that somebody serves, ordered.

        Raises:
            DiscoveryError: the store cannot be read.
        """
        keys = await self._backend.snapshot(INSTANCES, "")
        identities = [parse_instance_key(key) for key in keys]
        return sorted({str(one[0]) for one in identities if one is not None})

    def get(self, instance_id: int) -> EndpointRecord | None:
        """The record of one instance, if it is listed."""
        return self._by_id.get(instance_id)

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back on the loop after every change; returns what ends that."""
        token = object()
        self._subscribers[token] = callback
        return lambda: _forget(self._subscribers, token)

    def watch_removal(self, instance_id: int, watcher: Leaves) -> None:
        """Put a watcher among the `removals`.

        If the instance is not listed (any more), it is told in the next turn of the loop.
        """
        if instance_id in self._by_id:
            self.removals[watcher] = instance_id
        else:
            self._loop.call_soon(watcher.on_removed)

    def close(self) -> None:
        """End the watch; on the loop of this set.  Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self._watch is not None:
            self._watch.close()
        self.removals.clear()
        self.announce()

    def __del__(self) -> None:
        # In any thread, perhaps without a loop: no lock, no waiting.
        if self._watch is not None:
            self._watch.close()

    # -- applying changes --------------------------------------------------------

    def apply(self, batch: list[KeyChange]) -> None:
        """Take over what changed in the store; for the watch alone."""
        if self.closed:
            return
        for key, value in batch:
            if value is None:
                self._apply_delete(key)
            else:
                self._apply_put(key, value)
        if batch:
            self._rebuild()
            self.announce()

    def _apply_put(self, key: str, value: bytes) -> None:
        """The value says which instance it is, as for a genuine watcher."""
        try:
            record = decode_record(value)
        except RemoteProtocolError as error:
            if key not in self._unreadable:
                self._unreadable.add(key)
                _log.warning("discovery record %s is skipped: %s", key, error)
            return
        self._unreadable.discard(key)
        self._known[record.name, record.instance_id] = record

    def _apply_delete(self, key: str) -> None:
        """A deletion has no value; a key that cannot be parsed is ignored."""
        self._unreadable.discard(key)
        identity = parse_instance_key(key)
        if identity is not None:
            self._known.pop(identity, None)

    def _rebuild(self) -> None:
        by_id = {record.instance_id: record for record in self._known.values()}
        # Of two records with one id (odd, but possible) the one of our name counts.
        by_id.update(
            (record.instance_id, record)
            for (name, _), record in self._known.items()
            if name == self.name
        )
        left = [told for told, number in self.removals.items() if number not in by_id]
        if self._by_id and not by_id:
            self.left_at = self._loop.time()
        self._by_id = by_id
        self.records = tuple(by_id[number] for number in sorted(by_id))
        for watcher in left:
            if self.removals.pop(watcher, None) is not None:
                watcher.on_removed()

    def announce(self) -> None:
        """Tell the subscribers that something about the instances changed."""
        for callback in tuple(self._subscribers.values()):
            callback()


def _weakly(instances: InstanceSet) -> Callable[[list[KeyChange]], None]:
    """What a store may hold of a set: applies changes while somebody needs them."""
    reference = weakref.ref(instances)

    def on_change(batch: list[KeyChange]) -> None:
        target = reference()
        if target is not None:
            target.apply(batch)

    return on_change


def _forget(callbacks: dict[object, Callable[[], None]], token: object) -> None:
    callbacks.pop(token, None)
