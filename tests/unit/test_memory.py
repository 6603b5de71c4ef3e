from __future__ import annotations

import asyncio
import threading

import pytest

from dynamo.runtime._discovery import KeyChange
from dynamo.runtime._discovery.memory import MemoryBackend, MemoryStore
from dynamo.runtime.errors import RuntimeClosed

BUCKET = "v1/instances"


async def test_backends_are_alone_unless_they_share_a_store() -> None:
    store = MemoryStore()
    one, two, alone = MemoryBackend(store), MemoryBackend(store), MemoryBackend()
    await one.register(BUCKET, "a/1", b"x")
    assert await two.snapshot(BUCKET, "a") == {"a/1": b"x"}
    assert await alone.snapshot(BUCKET, "a") == {}
    assert len({one.connection_id, two.connection_id, alone.connection_id}) == 3


async def test_an_existing_key_keeps_its_value() -> None:
    store = MemoryStore()
    await MemoryBackend(store).register(BUCKET, "a/1", b"old")
    await MemoryBackend(store).register(BUCKET, "a/1", b"new")
    assert store.content(BUCKET) == {"a/1": b"old"}


async def test_unregistering_twice_is_fine() -> None:
    backend = MemoryBackend()
    await backend.register(BUCKET, "a/1", b"x")
    await backend.unregister(BUCKET, "a/1")
    await backend.unregister(BUCKET, "a/1")
    assert await backend.snapshot(BUCKET, "") == {}


async def test_a_watch_starts_with_the_content_and_goes_on_in_order() -> None:
    backend = MemoryBackend()
    await backend.register(BUCKET, "a/1", b"x")
    batches: list[list[KeyChange]] = []
    await backend.watch(BUCKET, "a/", batches.append)
    assert batches == [[KeyChange("a/1", b"x")]]
    await backend.register(BUCKET, "a/2", b"y")
    await backend.unregister(BUCKET, "a/1")
    await backend.register(BUCKET, "b/1", b"other")
    await asyncio.sleep(0)
    assert batches[1:] == [[KeyChange("a/2", b"y")], [KeyChange("a/1", None)]]


async def test_an_empty_content_is_delivered_too() -> None:
    batches: list[list[KeyChange]] = []
    await MemoryBackend().watch(BUCKET, "a", batches.append)
    assert batches == [[]]


async def test_closed_watches_do_not_pile_up() -> None:
    store = MemoryStore()
    backend = MemoryBackend(store)
    for _ in range(1000):
        (await backend.watch(BUCKET, "", lambda batch: None)).close()
    assert len(store._watches[BUCKET]) <= 1
    assert len(backend._watches) <= 1


async def test_leaving_removes_only_the_own_records_and_is_final() -> None:
    store = MemoryStore()
    stays, leaves = MemoryBackend(store), MemoryBackend(store)
    await stays.register(BUCKET, "a/1", b"x")
    await leaves.register(BUCKET, "a/2", b"y")
    leaves.leave(1.0)
    assert store.content(BUCKET) == {"a/1": b"x"}
    with pytest.raises(RuntimeClosed, match="left discovery"):
        await leaves.register(BUCKET, "a/2", b"y")


async def test_leaving_gives_up_on_a_store_that_stays_locked() -> None:
    store = MemoryStore()
    backend = MemoryBackend(store)
    await backend.register(BUCKET, "a/1", b"x")
    with store._lock:
        await asyncio.to_thread(backend.leave, 0.01)
    assert store.content(BUCKET) == {"a/1": b"x"}


async def test_closing_ends_the_watches_and_the_use() -> None:
    store = MemoryStore()
    backend = MemoryBackend(store)
    batches: list[list[KeyChange]] = []
    await backend.watch(BUCKET, "", batches.append)
    await backend.aclose()
    await backend.aclose()
    await MemoryBackend(store).register(BUCKET, "a/1", b"x")
    await asyncio.sleep(0)
    assert batches == [[]]
    with pytest.raises(RuntimeClosed):
        await backend.snapshot(BUCKET, "")


async def test_changes_made_in_other_threads_arrive_on_the_watching_loop() -> None:
    store = MemoryStore()
    seen: dict[str, bytes | None] = {}
    threads: set[int] = set()
    complete = asyncio.Event()

    def on_change(batch: list[KeyChange]) -> None:
        threads.add(threading.get_ident())
        seen.update(batch)
        if len(seen) == 40:
            complete.set()

    await MemoryBackend(store).watch(BUCKET, "", on_change)

    def register(number: int) -> None:
        asyncio.run(MemoryBackend(store).register(BUCKET, f"a/{number}", b"x"))

    await asyncio.gather(*(asyncio.to_thread(register, n) for n in range(40)))
    await asyncio.wait_for(complete.wait(), 5)
    assert threads == {threading.get_ident()}


async def test_a_child_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    backend = MemoryBackend(store)
    await backend.register(BUCKET, "a/1", b"x")
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(RuntimeClosed, match="after a fork"):
        await backend.register(BUCKET, "a/2", b"x")
    backend.leave(1.0)
    assert store.content(BUCKET) == {"a/1": b"x"}
