"""Waits by runtime data on a file store."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from dynamo.runtime._discovery import file
from dynamo.runtime._discovery.file import FileBackend
from dynamo.runtime._discovery.instances import InstanceSet
from dynamo.runtime._discovery.model_cards import ModelCards, Wanted
from dynamo.runtime._wire.records import (
    INSTANCES,
    MODEL_CARDS,
    EndpointName,
    EndpointRecord,
    encode_record,
)
from dynamo.runtime.errors import NoMatchInTime

VECTORS = Path(__file__).parent.parent / "vectors"
GOLDEN = json.loads((VECTORS / "discovery_file.json").read_text("utf-8"))
NAME = EndpointName("ns", "comp", "gen")
LIMIT_S = 8.0


async def eventually(check: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not check():
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s"
        await asyncio.sleep(0.001)


@pytest.fixture
async def backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FileBackend]:
    # How long a watch that nobody has any more may keep its descriptor.
    monkeypatch.setattr(file, "_FULL_LOOK_S", 0.05)
    made = FileBackend(tmp_path)
    yield made
    await made.aclose()


async def test_the_golden_card_of_a_live_instance_is_found(
    backend: FileBackend, tmp_path: Path
) -> None:
    number = int(GOLDEN["connection_id"])
    instances = await InstanceSet.open(backend, NAME)
    cards = ModelCards(instances)
    wanted = Wanted("role", "prefill")
    waiting = asyncio.get_running_loop().create_task(cards.wait(wanted, LIMIT_S))
    await eventually(lambda: cards._sleeping)
    one = EndpointRecord(
        name=NAME, instance_id=number, transport_kind="tcp", address="127.0.0.1:1/x"
    )
    await backend.register(INSTANCES, one.key, encode_record(one))
    assert not waiting.done()
    row = GOLDEN["model_cards_before_taint_update"][0]
    staged = tmp_path / "staged"
    staged.write_bytes(bytes.fromhex(row["value_hex"]))
    staged.rename(tmp_path / row["bucket"] / row["file_name"])
    assert await waiting == [number]
    instances.close()


async def test_a_thousand_waits_in_vain_leave_nothing(backend: FileBackend) -> None:
    instances = await InstanceSet.open(backend, NAME)
    cards = ModelCards(instances)
    wanted = Wanted("role", "prefill")
    descriptors = len(os.listdir("/proc/self/fd"))
    tasks = asyncio.all_tasks()

    async def in_vain() -> None:
        with pytest.raises(NoMatchInTime):
            await cards.wait(wanted, 0.01)

    for _ in range(20):
        await asyncio.gather(*(in_vain() for _ in range(50)))
    assert asyncio.all_tasks() == tasks
    assert not instances._subscribers
    bucket = backend._buckets[MODEL_CARDS]
    await eventually(lambda: not bucket.watched and bucket.following is None)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    instances.close()
