from __future__ import annotations

import asyncio
import copy
import logging
import operator
import pickle
import weakref

import msgspec
import pytest

from dynamo.runtime._discovery.instances import Instance, InstanceSet, TransportType
from dynamo.runtime._discovery.memory import MemoryBackend, MemoryStore
from dynamo.runtime._wire.records import (
    INSTANCES,
    EndpointName,
    EndpointRecord,
    encode_record,
)

NAME = EndpointName("ns", "comp", "gen")


def record(number: int, address: str = "127.0.0.1:1/x") -> EndpointRecord:
    return EndpointRecord(
        name=NAME, instance_id=number, transport_kind="tcp", address=address
    )


class Cluster:
    """One store, one observed endpoint."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.backend = MemoryBackend(self.store)

    async def put(self, one: EndpointRecord, key: str | None = None) -> None:
        await self.put_bytes(key or one.key, encode_record(one))

    async def put_bytes(self, key: str, value: bytes) -> None:
        # A put over an existing value, which a foreign writer may do.
        self.store._buckets.setdefault(INSTANCES, {}).pop(key, None)
        await self.backend.register(INSTANCES, key, value)
        await asyncio.sleep(0)

    async def delete(self, key: str) -> None:
        await self.backend.unregister(INSTANCES, key)
        await asyncio.sleep(0)

    async def open(self) -> InstanceSet:
        return await InstanceSet.open(self.backend, NAME)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def ids(view: InstanceSet) -> list[int]:
    return [one.instance_id for one in view.records]


# ------------------------------------------------------------- applying changes


async def test_what_is_listed_is_there_when_open_returns(cluster: Cluster) -> None:
    await cluster.put(record(9))
    await cluster.put(record(3))
    view = await cluster.open()
    assert ids(view) == [3, 9]
    assert view.get(9) == record(9)
    assert view.get(4) is None


async def test_the_list_is_built_only_when_something_changed(cluster: Cluster) -> None:
    await cluster.put(record(1))
    view = await cluster.open()
    assert view.records is view.records
    announced: list[list[int]] = []
    view.subscribe(lambda: announced.append(ids(view)))
    await cluster.put(record(2))
    assert announced == [[1, 2]]
    assert ids(view) == [1, 2]


async def test_another_address_under_the_same_id_replaces(cluster: Cluster) -> None:
    await cluster.put(record(1))
    view = await cluster.open()
    await cluster.put(record(1, "127.0.0.1:2/x"))
    assert [one.address for one in view.records] == ["127.0.0.1:2/x"]


async def test_the_identity_comes_from_the_value(cluster: Cluster) -> None:
    view = await cluster.open()
    await cluster.put(record(0x55), key="ns/comp/gen/5")
    assert ids(view) == [0x55]
    await cluster.delete("ns/comp/gen/5")
    assert ids(view) == [0x55], "the key names an instance that is not listed"


async def test_a_deletion_is_identified_by_the_key(cluster: Cluster) -> None:
    await cluster.put(record(171), key="ns/comp/gen/00AB")
    await cluster.put(record(20), key="ns/comp/gen")
    view = await cluster.open()
    assert ids(view) == [20, 171]
    await cluster.delete("ns/comp/gen/00AB")
    await cluster.delete("ns/comp/gen")
    assert ids(view) == [20], "three parts name no instance"


async def test_endpoints_with_a_common_beginning_are_others(cluster: Cluster) -> None:
    view = await cluster.open()
    await cluster.put(record(15), key="ns/comp/genx/f")
    assert ids(view) == []


async def test_a_bad_value_keeps_the_old_one_and_warns_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.put(record(1))
    view = await cluster.open()
    with caplog.at_level(logging.WARNING, "dynamo.runtime.discovery"):
        await cluster.put_bytes(record(1).key, b'{"type":"Endp')
        await cluster.put_bytes(record(1).key, b"garbage")
    assert view.records == (record(1),)
    assert [r.args and r.args[0] for r in caplog.records] == ["ns/comp/gen/1"]


async def test_one_id_under_two_names_is_listed_once(cluster: Cluster) -> None:
    view = await cluster.open()
    other = msgspec.structs.replace(
        record(6), name=EndpointName("zz", "comp", "gen"), address="elsewhere:1/x"
    )
    await cluster.put(other, key="ns/comp/gen/6f")
    assert view.records == (other,)
    await cluster.put(record(6))
    assert view.records == (record(6),)


# -------------------------------------------------------------------- listeners


async def test_subscribers_are_called_after_each_batch(cluster: Cluster) -> None:
    view = await cluster.open()
    seen: list[list[int]] = []
    unsubscribe = view.subscribe(lambda: seen.append(ids(view)))
    await cluster.put(record(1))
    await cluster.delete(record(1).key)
    unsubscribe()
    unsubscribe()
    await cluster.put(record(2))
    assert seen == [[1], []]


class Watcher:
    def __init__(self, told: list[int], number: int) -> None:
        self._told = told
        self._number = number

    def on_removed(self) -> None:
        self._told.append(self._number)


async def test_a_removal_is_told_once(cluster: Cluster) -> None:
    await cluster.put(record(1))
    await cluster.put(record(2))
    view = await cluster.open()
    told: list[int] = []
    view.watch_removal(1, Watcher(told, 1))
    forgotten = Watcher(told, 2)
    view.watch_removal(2, forgotten)
    del view.removals[forgotten]
    await cluster.delete(record(2).key)
    await cluster.put(record(1, "127.0.0.1:2/x"))
    assert told == [], "a replaced record has not left"
    for _ in range(2):
        await cluster.delete(record(1).key)
        await cluster.put(record(1))
    assert told == [1]


async def test_a_removal_before_the_watch_is_told_too(cluster: Cluster) -> None:
    view = await cluster.open()
    told: list[int] = []
    view.watch_removal(1, Watcher(told, 1))
    assert told == []
    await asyncio.sleep(0)
    assert told == [1]


# -------------------------------------------------------------------------- end


async def test_close_ends_everything_and_tells_subscribers(cluster: Cluster) -> None:
    await cluster.put(record(1))
    view = await cluster.open()
    told: list[bool] = []
    view.subscribe(lambda: told.append(view.closed))
    view.close()
    view.close()
    assert told == [True]
    await cluster.put(record(2))
    assert ids(view) == [1]


async def test_dropping_the_last_reference_ends_the_watch(cluster: Cluster) -> None:
    await cluster.put(record(1))
    view = await cluster.open()
    (watch,) = cluster.backend._watches
    gone = weakref.ref(view)
    del view
    assert gone() is None, "only weak references may be left"
    assert watch.closed


async def test_the_last_reference_may_go_in_another_thread(cluster: Cluster) -> None:
    await cluster.put(record(1))
    held = [await cluster.open()]
    await asyncio.to_thread(held.clear)
    assert cluster.backend._watches[0].closed


def test_the_last_reference_may_go_after_the_loop_closed(cluster: Cluster) -> None:
    async def make() -> InstanceSet:
        await cluster.put(record(1))
        return await cluster.open()

    view = asyncio.run(make())
    del view
    assert cluster.backend._watches[0].closed


async def test_the_names_of_all_endpoints_can_be_asked_for(cluster: Cluster) -> None:
    await cluster.put(record(1))
    await cluster.put(record(2))
    view = await cluster.open()
    await cluster.backend.register(INSTANCES, "a/b/c/7", b"whatever")
    await cluster.backend.register(INSTANCES, "no-endpoint", b"whatever")
    assert await view.registered_names() == ["a/b/c", str(view.name)]
    view.close()


async def test_an_id_added_and_removed_a_thousand_times(cluster: Cluster) -> None:
    view = await cluster.open()
    for _ in range(1000):
        other = await cluster.open()
        await cluster.put(record(1))
        await cluster.delete(record(1).key)
        del other
    assert ids(view) == []
    await cluster.put(record(1))
    assert ids(view) == [1]
    assert len(cluster.store._watches[INSTANCES]) == 1


# ------------------------------------------------------ what applications see


def shown(number: int = 7) -> Instance:
    return Instance._make(record(number))


def test_an_instance_shows_its_record() -> None:
    one = shown(2**64 - 1)
    assert one.instance_id == 2**64 - 1
    assert (one.namespace, one.component, one.endpoint) == NAME
    assert one.device_type is None
    assert str(one) == "ns/comp/gen/18446744073709551615"
    assert repr(one) == "Instance(ns/comp/gen/18446744073709551615)"
    assert repr(one.transport) == 'TransportType(kind="tcp", address="127.0.0.1:1/x")'
    assert str(one.transport) == repr(one.transport)


def test_instances_compare_by_value_and_only_with_instances() -> None:
    assert shown() == shown()
    assert shown() != shown(8)
    assert shown() != "ns/comp/gen/7"
    assert shown().transport == shown(8).transport
    assert hash(shown().transport) == hash(shown(8).transport)
    assert shown().transport != TransportType._make("nats_tcp", "127.0.0.1:1/x")
    assert shown().transport != "tcp"


@pytest.mark.parametrize("one", [shown(), shown().transport], ids=repr)
def test_public_views_cannot_be_made_copied_or_changed(one: object) -> None:
    with pytest.raises(
        TypeError, match=f"No constructor defined for {type(one).__name__}"
    ):
        type(one)()
    with pytest.raises(TypeError):
        pickle.dumps(one)
    with pytest.raises(TypeError):
        copy.copy(one)
    with pytest.raises(TypeError):
        operator.lt(one, one)
    for name in ("instance_id", "kind", "anything"):
        with pytest.raises(AttributeError):
            setattr(one, name, 1)


def test_instances_are_not_hashable() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(shown())
