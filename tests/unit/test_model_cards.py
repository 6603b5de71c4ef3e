"""Model cards, and waits for instances by what their cards say."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import pickle
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo.runtime import Client, DistributedRuntime
from dynamo.runtime._discovery import KeyChange, model_cards
from dynamo.runtime._discovery.instances import InstanceSet
from dynamo.runtime._discovery.memory import MemoryBackend, MemoryStore
from dynamo.runtime._discovery.model_cards import ModelCards, Wanted
from dynamo.runtime._wire.records import (
    INSTANCES,
    MODEL_CARDS,
    EndpointName,
    EndpointRecord,
    ModelCard,
    decode_model_card,
    encode_record,
)
from dynamo.runtime.errors import (
    DynamoException,
    NoMatchInTime,
    RemoteProtocolError,
    RuntimeClosed,
)

VECTORS = Path(__file__).parent.parent / "vectors"
GOLDEN = json.loads((VECTORS / "discovery_file.json").read_text("utf-8"))
ACCEPTANCE = json.loads((VECTORS / "discovery_acceptance.json").read_text("utf-8"))
NAME = EndpointName("ns", "comp", "gen")
LIMIT_S = 5.0


def card(number: int, runtime_data: object = None, **changes: Any) -> dict[str, Any]:
    """A card as the genuine runtime writes it, with that runtime data."""
    made = json.loads(GOLDEN["model_cards_before_taint_update"][0]["value_utf8"])
    made["instance_id"] = number
    made["card_json"]["runtime_config"]["runtime_data"] = runtime_data
    return made | changes


# ---------------------------------------------------------------------- the record


def test_golden_cards_are_read() -> None:
    cards = [
        decode_model_card(bytes.fromhex(row["value_hex"]))
        for row in GOLDEN["model_cards_before_taint_update"]
    ]
    number = int(GOLDEN["connection_id"])
    assert cards == [
        ModelCard(NAME, number, {"role": "prefill"}, None),
        ModelCard(EndpointName("ns", "comp", "gen2"), number, {}, None),
        ModelCard(EndpointName("ns", "comp", "gen2"), number, {}, "lora_a_b"),
    ]


def _card_of(case: str) -> dict[str, Any]:
    made = card(7, {"role": "p"})
    if case == "full+unknown field":
        made["card_json"]["surprise"] = [1]
    elif case == "only display_name+slug":
        kept = ("display_name", "slug", "runtime_config")
        made["card_json"] = {name: made["card_json"][name] for name in kept}
    else:
        made["card_json"].pop(case.removeprefix("without "), None)
    return made


MEMBERS = ACCEPTANCE["model_card_members"]["cases"]


@pytest.mark.parametrize("case", MEMBERS)
def test_cards_are_accepted_as_by_a_genuine_reader(case: str) -> None:
    value = json.dumps(_card_of(case)).encode()
    if MEMBERS[case] == "ok":
        assert decode_model_card(value).texts == {"role": "p"}
    else:
        with pytest.raises(RemoteProtocolError, match="not a model card"):
            decode_model_card(value)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"[]",
        json.dumps(card(7, ["no", "object"])).encode(),
        json.dumps(card(-1)).encode(),
        json.dumps(card(2**64)).encode(),
        json.dumps(card(7, type="Endpoint")).encode(),
        json.dumps(card(7, model_suffix=5)).encode(),
    ],
    ids=lambda value: value[:12].decode("latin-1") + str(len(value)),
)
def test_what_is_no_card_says_so(value: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="not a model card"):
        decode_model_card(value)


@pytest.mark.parametrize("config", [None, {}, {"runtime_data": None}])
def test_a_card_without_runtime_data_has_no_texts(config: object) -> None:
    made = card(7)
    made["card_json"]["runtime_config"] = config
    assert decode_model_card(json.dumps(made).encode()).texts == {}


# ----------------------------------------------------------------------- the waits


class Cluster:
    """One store in memory, and the cards of one endpoint as one runtime sees them."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.backend = MemoryBackend(self.store)
        self.tasks: list[asyncio.Task[list[int]]] = []

    async def open(self) -> None:
        self.instances = await InstanceSet.open(self.backend, NAME)
        self.cards = ModelCards(self.instances)

    async def instance(self, number: int, name: EndpointName = NAME) -> None:
        one = EndpointRecord(
            name=name, instance_id=number, transport_kind="tcp", address="127.0.0.1:1/x"
        )
        await self.put(INSTANCES, one.key, encode_record(one))

    async def card(self, number: int, runtime_data: object, **changes: Any) -> None:
        value = json.dumps(card(number, runtime_data, **changes)).encode()
        await self.put(MODEL_CARDS, f"ns/comp/gen/{number:x}", value)

    async def put(self, bucket: str, key: str, value: bytes) -> None:
        # Over an existing value too, which somebody else may have written.
        self.store._buckets.setdefault(bucket, {}).pop(key, None)
        await self.backend.register(bucket, key, value)
        await asyncio.sleep(0)

    async def both(self, number: int, runtime_data: object) -> None:
        await self.instance(number)
        await self.card(number, runtime_data)

    async def delete(self, bucket: str, number: int) -> None:
        await self.backend.unregister(bucket, f"ns/comp/gen/{number:x}")
        await asyncio.sleep(0)

    async def look(self, key: str, value: str, count: int = 1) -> list[int]:
        """Who matches now, of at least so many."""
        return await self.cards.wait(Wanted(key, value, count), 0)

    async def waiting(
        self, key: str, value: str, count: int | None = 1
    ) -> asyncio.Task[list[int]]:
        """A wait that has begun and found too few."""
        wanted = Wanted(key, value, count)
        task = asyncio.get_running_loop().create_task(self.cards.wait(wanted, LIMIT_S))
        self.tasks.append(task)
        sleeping = len(self.cards._sleeping)
        while len(self.cards._sleeping) == sleeping:
            await asyncio.sleep(0)
        return task


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    await made.open()
    yield made
    for task in made.tasks:
        task.cancel()
    if made.tasks:
        await asyncio.wait(made.tasks)
    made.instances.close()
    await made.backend.aclose()


DATA_CASES = [row for row in ACCEPTANCE["runtime_data_matching"] if "key" in row]


@pytest.mark.parametrize("row", DATA_CASES, ids=json.dumps)
async def test_runtime_data_matches_as_for_a_genuine_client(
    cluster: Cluster, row: dict[str, Any]
) -> None:
    await cluster.both(7, row["runtime_data"])
    if row["match"]:
        assert await cluster.look(row["key"], row["value"]) == [7]
    else:
        with pytest.raises(NoMatchInTime):
            await cluster.look(row["key"], row["value"])


async def test_a_card_without_a_live_instance_matches_nothing(cluster: Cluster) -> None:
    await cluster.card(7, {"role": "p"})
    with pytest.raises(NoMatchInTime):
        await cluster.look("role", "p")


async def test_the_card_of_an_adapter_matches_nothing(cluster: Cluster) -> None:
    await cluster.instance(7)
    await cluster.card(7, {"role": "p"}, model_suffix="lora_a_b")
    with pytest.raises(NoMatchInTime):
        await cluster.look("role", "p")


async def test_the_card_of_another_endpoint_matches_nothing(cluster: Cluster) -> None:
    await cluster.instance(7)
    await cluster.card(7, {"role": "p"}, endpoint="gen2")
    with pytest.raises(NoMatchInTime):
        await cluster.look("role", "p")


async def test_an_instance_under_another_name_is_not_live_here(
    cluster: Cluster,
) -> None:
    other = encode_record(
        EndpointRecord(
            name=EndpointName("ns", "comp", "gen2"),
            instance_id=7,
            transport_kind="tcp",
            address="127.0.0.1:1/x",
        )
    )
    await cluster.put(INSTANCES, "ns/comp/gen/7", other)
    await cluster.card(7, {"role": "p"})
    with pytest.raises(NoMatchInTime):
        await cluster.look("role", "p")


@pytest.mark.parametrize("card_first", [True, False])
async def test_whichever_half_arrives_last_ends_the_wait(
    cluster: Cluster, card_first: bool
) -> None:
    task = await cluster.waiting("role", "p")
    if card_first:
        await cluster.card(7, {"role": "p"})
    else:
        await cluster.instance(7)
    assert not task.done()
    await cluster.both(7, {"role": "p"})
    assert await task == [7]


async def test_all_that_match_are_returned_in_order(cluster: Cluster) -> None:
    task = await cluster.waiting("role", "p", 3)
    for number in (2**64 - 1, 3):
        await cluster.both(number, {"role": "p"})
    await cluster.both(5, {"role": "q"})
    assert not task.done()
    await cluster.both(4, {"role": "p"})
    assert await task == [3, 4, 2**64 - 1]


async def test_exactly_one_is_waited_for_also_if_there_are_two(
    cluster: Cluster,
) -> None:
    await cluster.both(7, {"role": "p"})
    await cluster.both(8, {"role": "p"})
    task = await cluster.waiting("role", "p", None)
    await cluster.delete(INSTANCES, 7)
    assert await task == [8]


async def test_a_card_that_changes_under_a_wait_counts_as_it_is_now(
    cluster: Cluster,
) -> None:
    await cluster.both(7, {"role": "p"})
    await cluster.both(8, {"role": "q"})
    becoming = await cluster.waiting("role", "q", 2)
    leaving = await cluster.waiting("role", "p", 2)
    await cluster.card(7, {"role": "q"})
    assert await becoming == [7, 8]
    await cluster.both(9, {"role": "p"})
    assert not leaving.done()


async def test_a_card_deleted_and_put_in_one_batch_counts_as_it_is_now(
    cluster: Cluster,
) -> None:
    await cluster.both(7, {"role": "p"})
    task = await cluster.waiting("role", "q")
    value = json.dumps(card(7, {"role": "q"})).encode()
    cluster.cards._apply(
        [KeyChange("ns/comp/gen/7", None), KeyChange("ns/comp/gen/7", value)]
    )
    assert await task == [7]


async def test_a_deleted_card_matches_no_more(cluster: Cluster) -> None:
    await cluster.both(7, {"role": "p"})
    task = await cluster.waiting("role", "p", 2)
    await cluster.delete(MODEL_CARDS, 7)
    await cluster.both(8, {"role": "p"})
    assert not task.done()
    await cluster.both(9, {"role": "p"})
    assert await task == [8, 9]


async def test_the_end_of_an_adapters_card_leaves_the_models(cluster: Cluster) -> None:
    await cluster.both(7, {"role": "p"})
    task = await cluster.waiting("role", "p", 2)
    cluster.cards._apply([KeyChange("ns/comp/gen/7/lora_a_b", None)])
    await cluster.both(8, {"role": "p"})
    assert await task == [7, 8]


async def test_an_unreadable_card_keeps_the_old_one_and_warns_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.both(7, {"role": "p"})
    task = await cluster.waiting("role", "p", 2)
    with caplog.at_level(logging.WARNING, "dynamo.runtime.discovery"):
        for _ in range(2):
            cluster.cards._apply([KeyChange("ns/comp/gen/7", b"{")])
    assert len(caplog.records) == 1
    assert "ns/comp/gen/7 is skipped" in caplog.text
    await cluster.both(8, {"role": "p"})
    assert await task == [7, 8]


async def test_all_waits_share_one_watch_that_ends_with_the_last(
    cluster: Cluster,
) -> None:
    def watches() -> int:
        return sum(
            not watch.closed for watch in cluster.store._watches.get(MODEL_CARDS, [])
        )

    tasks = [await cluster.waiting("role", "p") for _ in range(20)]
    assert watches() == 1
    for task in tasks[1:]:
        task.cancel()
    await asyncio.wait(tasks[1:])
    assert watches() == 1
    await cluster.both(7, {"role": "p"})
    assert await tasks[0] == [7]
    assert watches() == 0
    assert not cluster.cards._texts


async def test_a_shutdown_ends_the_waits(cluster: Cluster) -> None:
    task = await cluster.waiting("role", "p")
    cluster.instances.close()
    with pytest.raises(RuntimeClosed, match="channel closed"):
        await task


async def test_a_store_that_does_not_answer_ends_the_wait_in_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(cluster.backend, "watch", never)
    monkeypatch.setattr(model_cards, "_READ_LIMIT_S", 0.01)
    with pytest.raises(NoMatchInTime):
        await cluster.look("role", "p")


async def test_an_unreadable_store_is_reported(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise DynamoException("no such store")

    monkeypatch.setattr(cluster.backend, "watch", fail)
    with pytest.raises(DynamoException, match="no such store"):
        await cluster.look("role", "p")
    monkeypatch.undo()
    await cluster.both(7, {"role": "p"})
    assert await cluster.look("role", "p") == [7]


# --------------------------------------------------------------------------- the API


@pytest.fixture
async def runtime() -> AsyncIterator[DistributedRuntime]:
    made = DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp")
    yield made
    made.shutdown()
    await made._core.closed()


@pytest.fixture
async def client(runtime: DistributedRuntime) -> Client:
    return await runtime.endpoint("ns.comp.gen").client()


NEGATIVE = "can't convert negative int to unsigned"


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda c: c.wait_for_instance_by_runtime_data(1, "v"),
            TypeError,
            "'key': 'int'",
        ),
        (
            lambda c: c.wait_for_instance_by_runtime_data("k", None),
            TypeError,
            "'value': 'NoneType' object cannot be converted to 'PyString'",
        ),
        (
            lambda c: c.wait_for_instance_by_runtime_data("k", "\ud800"),
            UnicodeEncodeError,
            "surrogates not allowed",
        ),
        (
            lambda c: c.wait_for_instance_by_runtime_data("k", "v", "1"),
            TypeError,
            "argument 'timeout_s': must be real number, not str",
        ),
        (
            lambda c: c.wait_for_instance_by_runtime_data("k", "v", 10**400),
            OverflowError,
            "int too large to convert to float",
        ),
        (
            lambda c: c.wait_for_instances_by_runtime_data("k", "v", 1.0),
            TypeError,
            "'min_count': 'float' object cannot be interpreted as an integer",
        ),
        (
            lambda c: c.wait_for_instances_by_runtime_data("k", "v", -1),
            OverflowError,
            NEGATIVE,
        ),
        (
            lambda c: c.wait_for_instances_by_runtime_data("k", "v", 2**64),
            OverflowError,
            "int too big to convert",
        ),
        (
            lambda c: c.wait_for_instances_by_runtime_data("k", "v", 0, -1),
            ValueError,
            "min_count must be positive",
        ),
    ],
)
async def test_arguments_are_checked_at_the_call(
    client: Client, call: Callable[[Client], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call(client)


@pytest.mark.parametrize("timeout_s", [-1, -0.001, math.nan, math.inf])
async def test_a_limit_that_is_none_is_told_by_the_future(
    client: Client, timeout_s: float
) -> None:
    future = client.wait_for_instance_by_runtime_data("k", "v", timeout_s)
    text = "timeout_s must be a finite non-negative number"
    with pytest.raises(ValueError, match=text):
        await future


async def test_waiting_needs_a_loop(client: Client) -> None:
    def outside() -> None:
        client.wait_for_instance_by_runtime_data("k", "v", 0)

    with pytest.raises(RuntimeError):
        await asyncio.to_thread(outside)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, 'one endpoint instance with runtime_data["a\\"b"] == "é\\n"'),
        (1, '1 endpoint instances with runtime_data["a\\"b"] == "é\\n"'),
        (2, '2 endpoint instances with runtime_data["a\\"b"] == "é\\n"'),
    ],
)
async def test_a_limit_that_passed_has_the_genuine_text(
    client: Client, count: int | None, text: str
) -> None:
    future: asyncio.Future[Any]
    if count is None:
        future = client.wait_for_instance_by_runtime_data('a"b', "é\n", 0)
    else:
        future = client.wait_for_instances_by_runtime_data('a"b', "é\n", count, 0)
    with pytest.raises(TimeoutError) as caught:
        await future
    error = caught.value
    assert str(error) == (
        f"Timed out waiting for {text}; last_match_count=0, matching_ids=[]"
    )
    assert isinstance(error, NoMatchInTime)
    assert error.facts == {"matching": []}
    assert error.retryable
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


async def test_ids_are_returned_and_named_in_errors(
    runtime: DistributedRuntime, client: Client
) -> None:
    endpoint = runtime.endpoint("ns.comp.gen")
    number = endpoint.connection_id()
    await endpoint.register_endpoint_instance()
    value = json.dumps(card(number, {"role": "p"})).encode()
    key = f"ns/comp/gen/{number:x}"
    await runtime._core.backend.register(MODEL_CARDS, key, value)
    assert await client.wait_for_instance_by_runtime_data("role", "p", 1e300) == number
    many = client.wait_for_instances_by_runtime_data(
        key="role", value="p", min_count=True, timeout_s=True
    )
    assert await many == [number]
    with pytest.raises(NoMatchInTime, match=rf"count=1, matching_ids=\[{number}\]"):
        await client.wait_for_instances_by_runtime_data("role", "p", 2, 0.01)


async def test_a_thousand_waits_in_vain_leave_nothing(
    runtime: DistributedRuntime, client: Client
) -> None:
    tasks = asyncio.all_tasks()

    async def in_vain() -> None:
        with pytest.raises(NoMatchInTime):
            await client.wait_for_instance_by_runtime_data("k", "v", timeout_s=0.01)

    await asyncio.gather(*(in_vain() for _ in range(500)))
    for _ in range(10):
        await asyncio.gather(*(in_vain() for _ in range(50)))
    cards = client._home.cards
    assert asyncio.all_tasks() == tasks
    assert not cards._sleeping
    assert not client._home.instances._subscribers
    store = runtime._core.backend._store
    assert all(watch.closed for watch in store._watches[MODEL_CARDS])


async def test_a_shutdown_ends_the_wait_of_a_client_that_was_dropped(
    runtime: DistributedRuntime,
) -> None:
    client = await runtime.endpoint("ns.comp.gen").client()
    cards = client._home.cards
    future = client.wait_for_instance_by_runtime_data("role", "p")
    while not cards._sleeping:
        await asyncio.sleep(0)
    del client, cards
    gc.collect()
    runtime.shutdown()
    with pytest.raises(RuntimeClosed):
        await asyncio.wait_for(future, LIMIT_S)


async def test_waiting_works_from_another_loop(
    runtime: DistributedRuntime, client: Client
) -> None:
    endpoint = runtime.endpoint("ns.comp.gen")
    number = endpoint.connection_id()
    await endpoint.register_endpoint_instance()

    async def elsewhere() -> int:
        return await client.wait_for_instance_by_runtime_data("role", "p", LIMIT_S)

    waiting = asyncio.get_running_loop().run_in_executor(None, asyncio.run, elsewhere())
    while not client._home.cards._sleeping:
        await asyncio.sleep(0.001)
    value = json.dumps(card(number, {"role": "p"})).encode()
    key = f"ns/comp/gen/{number:x}"
    await runtime._core.backend.register(MODEL_CARDS, key, value)
    assert await waiting == number
