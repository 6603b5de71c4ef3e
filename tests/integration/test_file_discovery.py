from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from dynamo.runtime._discovery import KeyChange
from dynamo.runtime._discovery.directory import Clock
from dynamo.runtime._discovery.file import FileBackend
from dynamo.runtime._discovery.instances import Instance, InstanceSet
from dynamo.runtime._wire.records import (
    INSTANCES,
    EndpointName,
    EndpointRecord,
    encode_record,
    file_name_of_key,
    instance_key,
    parse_endpoint_path,
)
from dynamo.runtime.errors import DiscoveryError, RuntimeClosed

fcntl = pytest.importorskip("fcntl")

VECTORS = Path(__file__).parent.parent / "vectors"
NAME = EndpointName("ns", "comp", "gen")
KEY = "ns/comp/gen/7"
FILE = "ns%2Fcomp%2Fgen%2F7"
LIMIT_S = 8.0


def vectors(name: str) -> dict[str, list[dict[str, object]]]:
    return json.loads((VECTORS / f"discovery_{name}.json").read_text("utf-8"))


def record(number: int, address: str = "127.0.0.1:1/x") -> EndpointRecord:
    return EndpointRecord(
        name=NAME, instance_id=number, transport_kind="tcp", address=address
    )


async def eventually(check: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not check():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        await asyncio.sleep(0.005)


class Store:
    """A file store in a private directory, and the backends opened on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "v1" / "instances"
        self.backends: list[FileBackend] = []

    def backend(self, ttl_s: float = 10.0, clock: Clock | None = None) -> FileBackend:
        made = FileBackend(self.root, ttl_s=ttl_s, clock=clock)
        self.backends.append(made)
        return made

    def write(self, name: str, value: bytes, age_s: float = 0.0) -> Path:
        """Put a file as the genuine runtime does: staged, then in one step."""
        self.folder.mkdir(parents=True, exist_ok=True)
        staged = self.root / "staged"
        staged.write_bytes(value)
        then = time.time_ns() - int(age_s * 1e9)
        os.utime(staged, ns=(then, then))
        return staged.rename(self.folder / name)

    def names(self) -> list[str]:
        return sorted(os.listdir(self.folder)) if self.folder.exists() else []


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    made = Store(tmp_path)
    yield made
    for backend in made.backends:
        await backend.aclose()


def ids(view: InstanceSet) -> list[int]:
    return [one.instance_id for one in view.records]


# ------------------------------------------------------- what others can see


async def test_golden_files_are_reproduced(store: Store) -> None:
    rows = vectors("file")
    backend = store.backend()
    for row in rows["endpoint_records"] + rows["endpoint_record_variants"]:
        key = str(row["decoded_key"]).removeprefix("v1/instances/")
        value = bytes.fromhex(str(row["value_hex"]))
        await backend.register(INSTANCES, key, value)
        path = store.folder / str(row["file_name"])
        assert path.read_bytes() == value
        mask = os.umask(0)
        os.umask(mask)
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
        assert path.stat().st_nlink == 1
    assert len(store.names()) == 5, "nothing but the records is left"


async def test_odd_names_have_the_golden_file_names(store: Store) -> None:
    backend = store.backend()
    for row in vectors("names")["cases"]:
        if not row["accepted"] or row.get("file_name") is None:
            continue
        name = parse_endpoint_path(str(row["path"]))
        key = instance_key(name, int(str(row["instance_id_hex"]), 16))
        await backend.register(INSTANCES, key, b"{}")
        assert str(row["file_name"]) in store.names()
        await backend.unregister(INSTANCES, key)


def _file_of(case: dict[str, object]) -> tuple[str, bytes]:
    """File name and content of one row of the acceptance vectors."""
    given = case["input"]
    assert isinstance(given, dict)
    value = given.get("value", given)
    raw = given.get("raw")
    number = value.get("instance_id", 0x77)
    key = given.get("key", "ns/comp/gen/77")
    if "key_id_hex" in given or "key_id" in given:
        key = f"ns/comp/gen/{given.get('key_id_hex') or given['key_id']}"
    elif "key" not in given and isinstance(number, int) and number >= 0:
        key = f"ns/comp/gen/{number:x}"
    content = raw if raw is not None else json.dumps(value)
    return given.get("file_name", file_name_of_key(key)), content.encode()


ACCEPTANCE = vectors("acceptance")["endpoint_records"]


@pytest.mark.parametrize(
    "row", ACCEPTANCE, ids=[str(row["case"]) for row in ACCEPTANCE]
)
async def test_records_are_accepted_as_by_a_genuine_client(
    store: Store, row: dict[str, object]
) -> None:
    view = await InstanceSet.open(store.backend(), NAME)
    name, content = _file_of(row)
    result = str(row["result"])
    if result == "previous value kept":
        store.write(name, encode_record(record(0x77)))
        await eventually(lambda: view.records)
    path = store.write(name, content)
    # A later record shows that this one was processed.
    store.write("ns%2Fcomp%2Fgen%2Ffff", encode_record(record(0xFFF)))
    await eventually(lambda: view.get(0xFFF))
    (store.folder / "ns%2Fcomp%2Fgen%2Ffff").unlink()
    await eventually(lambda: view.get(0xFFF) is None)

    if result.startswith(("rejected", "not seen")):
        assert view.records == ()
        return
    (seen,) = view.records
    for attribute, expected in dict(row["seen_as"]).items():  # type: ignore[call-overload]
        shown = Instance._make(seen)
        source = shown if hasattr(shown, attribute) else shown.transport
        assert getattr(source, attribute) == expected
    path.unlink()
    store.write("ns%2Fcomp%2Fgen%2Ffff", encode_record(record(0xFFF)))
    await eventually(lambda: view.get(0xFFF))
    stays = "does not remove" in result or "deletion of the key is ignored" in result
    differs = "watcher of ns/comp/gen" in result  # the key names another namespace
    assert (view.get(seen.instance_id) is not None) is (stays or differs)


# ------------------------------------------------------------------ registration


async def test_a_record_comes_and_goes_within_the_poll(store: Store) -> None:
    view = await InstanceSet.open(store.backend(), NAME)
    worker = store.backend()
    await worker.register(INSTANCES, KEY, encode_record(record(7)))
    started = time.monotonic()
    await eventually(lambda: ids(view) == [7])
    await worker.unregister(INSTANCES, KEY)
    await eventually(lambda: ids(view) == [])
    assert time.monotonic() - started < 1.0


async def stop_watching(backend: FileBackend) -> None:
    backend._stop_watching()


async def test_own_changes_arrive_without_a_poll(store: Store) -> None:
    backend = store.backend()
    view = await InstanceSet.open(backend, NAME)
    await backend._in_thread(stop_watching(backend))
    await backend.register(INSTANCES, KEY, encode_record(record(7)))
    assert ids(view) == [7]
    await backend.unregister(INSTANCES, KEY)
    assert ids(view) == []


async def test_an_existing_key_keeps_its_value(store: Store) -> None:
    store.write(FILE, b"foreign")
    backend = store.backend()
    await backend.register(INSTANCES, KEY, b"ours")
    assert await backend.snapshot(INSTANCES, "ns/comp/gen") == {KEY: b"foreign"}
    assert store.names() == [FILE]


async def test_a_dead_record_of_an_earlier_life_is_replaced(store: Store) -> None:
    store.write(FILE, b"foreign", age_s=3600)
    await store.backend().register(INSTANCES, KEY, b"ours")
    assert (store.folder / FILE).read_bytes() == b"ours"


async def test_unregistering_what_is_not_there_fails_as_in_the_genuine_runtime(
    store: Store,
) -> None:
    with pytest.raises(
        DiscoveryError, match="Unable to unregister endpoint instance from discovery"
    ):
        await store.backend().unregister(INSTANCES, KEY)


async def test_a_name_that_no_file_can_have_is_refused(store: Store) -> None:
    backend = store.backend(ttl_s=0.1)
    with pytest.raises(DiscoveryError, match=r"cannot register in .*v1/instances"):
        await backend.register(INSTANCES, "n" * 300, b"{}")
    assert store.names() == []
    assert not backend._buckets[INSTANCES].own


async def test_a_directory_in_the_place_of_a_record_is_refused(store: Store) -> None:
    (store.folder / FILE).mkdir(parents=True)
    with pytest.raises(DiscoveryError, match="no plain file; remove it"):
        await store.backend().register(INSTANCES, KEY, b"{}")


async def test_a_root_that_is_no_directory_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "root").write_bytes(b"")
    store = Store(tmp_path / "root")
    backend = store.backend()
    for attempt in (
        backend.register(INSTANCES, KEY, b"{}"),
        backend.unregister(INSTANCES, KEY),
        backend.snapshot(INSTANCES, ""),
        backend.watch(INSTANCES, "", lambda batch: None),
    ):
        with pytest.raises(DiscoveryError, match="root"):
            await attempt
    await backend.aclose()


async def test_twenty_runtimes_register_at_once(store: Store) -> None:
    view = await InstanceSet.open(store.backend(), NAME)
    workers = [store.backend() for _ in range(20)]
    await asyncio.gather(
        *(
            worker.register(INSTANCES, record(n).key, encode_record(record(n)))
            for n, worker in enumerate(workers)
        )
    )
    await eventually(lambda: ids(view) == list(range(20)))
    await asyncio.gather(*(worker.aclose() for worker in workers))
    assert store.names() == []


async def test_a_lock_that_is_never_released_is_reported(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.runtime._discovery.file._LOCK_RETRY_S", 0.001)
    store.write(FILE, encode_record(record(7)))
    descriptor = os.open(store.folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    backend = store.backend()
    with pytest.raises(DiscoveryError, match=r"the lock of .*v1/instances was held"):
        await backend.register(INSTANCES, "ns/comp/gen/8", b"{}")
    # Reading needs no lock: records are published in one step.
    assert list(await backend.snapshot(INSTANCES, "ns")) == [KEY]
    os.close(descriptor)
    await backend.register(INSTANCES, "ns/comp/gen/8", b"{}")


async def test_registering_waits_for_a_lock_held_shortly(store: Store) -> None:
    store.folder.mkdir(parents=True)
    descriptor = os.open(store.folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    backend = store.backend()
    waiting = asyncio.create_task(backend.register(INSTANCES, KEY, b"{}"))
    await eventually(lambda: backend._buckets)
    assert store.names() == []
    os.close(descriptor)
    await waiting
    assert store.names() == [FILE]


# --------------------------------------------------------------- renewal, sweeping


async def test_a_record_is_renewed_without_touching_anything_else(store: Store) -> None:
    backend = store.backend(ttl_s=0.3)
    await backend.register(INSTANCES, KEY, b"{}")
    before = (store.folder / FILE).stat()
    await eventually(
        lambda: (store.folder / FILE).stat().st_mtime_ns > before.st_mtime_ns
    )
    after = (store.folder / FILE).stat()
    assert after.st_atime_ns == before.st_atime_ns
    assert after.st_ino == before.st_ino


async def test_renewals_are_no_news(store: Store) -> None:
    worker = store.backend(ttl_s=0.9)
    await worker.register(INSTANCES, KEY, b"{}")
    batches: list[list[KeyChange]] = []
    watcher = store.backend(ttl_s=0.9)
    await watcher.watch(INSTANCES, "", batches.append)
    path = store.folder / FILE
    for _ in range(3):
        before = path.stat().st_mtime_ns
        await eventually(lambda: path.stat().st_mtime_ns > before)  # noqa: B023
    assert batches == [[KeyChange(KEY, b"{}")]]


async def test_a_blocked_loop_keeps_its_record(store: Store) -> None:
    worker, client = store.backend(ttl_s=0.9), store.backend(ttl_s=0.9)
    stalled = threading.Event()

    async def serve() -> None:
        await worker.register(INSTANCES, KEY, encode_record(record(7)))
        stalled.wait(30)  # a handler that holds the loop

    serving = asyncio.create_task(asyncio.to_thread(asyncio.run, serve()))
    view = await InstanceSet.open(client, NAME)
    await eventually(lambda: ids(view) == [7])
    lost: list[float] = []
    view.subscribe(lambda: lost.append(time.monotonic()))
    until = time.monotonic() + 1.9
    await eventually(lambda: time.monotonic() > until)
    assert ids(view) == [7]
    assert not lost
    stalled.set()
    await serving


async def test_stale_files_are_swept_whoever_wrote_them(store: Store) -> None:
    old = store.write("ns%2Fcomp%2Fgen%2F1", b"{}")
    staged = store.write(".tmp_0123456789abcdef", b"{")
    link = store.folder / "link"
    link.symlink_to(old.name)
    (store.folder / "folder").mkdir()
    client = store.backend(ttl_s=0.3)
    started = time.monotonic()
    assert list(await client.snapshot(INSTANCES, "")) == ["ns/comp/gen/1"]
    await eventually(lambda: not old.exists() and not staged.exists())
    assert 0.15 < time.monotonic() - started < 3.0
    assert store.names() == ["folder", "link"]


async def test_stale_files_are_not_listed(store: Store) -> None:
    store.write("ns%2Fcomp%2Fgen%2F1", b"{}", age_s=11)
    store.write("ns%2Fcomp%2Fgen%2F2", b"{}", age_s=9)
    store.write(".tmp_0123456789abcdef", b"{}")
    assert list(await store.backend().snapshot(INSTANCES, "")) == ["ns/comp/gen/2"]


async def test_only_opened_buckets_are_swept(store: Store) -> None:
    other = store.root / "v1" / "mdc" / "x"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"")
    os.utime(other, (0, 0))
    mine = store.write("x", b"", age_s=3600)
    await store.backend(ttl_s=0.1).snapshot(INSTANCES, "")
    await eventually(lambda: not mine.exists())
    assert other.exists()


async def test_a_removed_file_of_a_live_worker_comes_back(store: Store) -> None:
    worker = store.backend(ttl_s=0.3)
    view = await InstanceSet.open(store.backend(ttl_s=0.3), NAME)
    await worker.register(INSTANCES, KEY, encode_record(record(7)))
    await eventually(lambda: ids(view) == [7])
    inode = (store.folder / FILE).stat().st_ino
    (store.folder / FILE).rename(store.root / "away")
    await eventually(lambda: store.names() == [FILE])
    assert (store.folder / FILE).stat().st_ino != inode
    await eventually(lambda: ids(view) == [7])


async def test_what_was_registered_last_comes_back(store: Store) -> None:
    worker = store.backend(ttl_s=0.3)
    await worker.register(INSTANCES, KEY, b"first")
    await worker.register(INSTANCES, KEY, b"second")
    path = store.folder / FILE
    assert path.read_bytes() == b"first"
    path.rename(store.root / "away")
    await eventually(path.exists)
    assert path.read_bytes() == b"second"


async def test_a_failed_registration_leaves_the_earlier_one(store: Store) -> None:
    worker = store.backend(ttl_s=0.3)
    await worker.register(INSTANCES, KEY, b"first")
    path = store.folder / FILE
    path.rename(store.root / "away")
    path.mkdir()
    with pytest.raises(DiscoveryError, match="no plain file"):
        await worker.register(INSTANCES, KEY, b"second")
    path.rmdir()
    await eventually(path.exists)
    assert path.read_bytes() == b"first"


async def test_a_removed_directory_comes_back(store: Store) -> None:
    worker = store.backend(ttl_s=0.3)
    view = await InstanceSet.open(store.backend(ttl_s=0.3), NAME)
    await worker.register(INSTANCES, KEY, encode_record(record(7)))
    await eventually(lambda: ids(view) == [7])
    gone: list[int] = []
    view.subscribe(lambda: gone.append(len(view.records)))
    store.folder.rename(store.root / "away")
    await eventually(lambda: gone[:1] == [0])
    await eventually(lambda: ids(view) == [7])


async def test_trouble_is_told_once_and_healed(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    worker = store.backend(ttl_s=0.15)
    view = await InstanceSet.open(worker, NAME)
    await worker.register(INSTANCES, KEY, encode_record(record(7)))
    with caplog.at_level(logging.WARNING, "dynamo.runtime.discovery"):
        store.folder.rename(store.root / "away")
        store.folder.write_bytes(b"in the way")
        await eventually(lambda: len(caplog.records) == 3)
        until = time.monotonic() + 0.3
        await eventually(lambda: time.monotonic() > until)
        store.folder.unlink()
        await eventually(lambda: store.names() == [FILE])
    await eventually(lambda: ids(view) == [7])
    actions = [one.args[0] for one in caplog.records if isinstance(one.args, tuple)]
    assert sorted(map(str, actions)) == ["renew", f"renew {KEY}", "watch"]


async def test_what_was_unregistered_stays_away(store: Store) -> None:
    worker = store.backend(ttl_s=0.15)
    await worker.register(INSTANCES, KEY, b"{}")
    await worker.register(INSTANCES, "ns/comp/gen/8", b"{}")
    await worker.unregister(INSTANCES, KEY)
    (store.folder / "ns%2Fcomp%2Fgen%2F8").unlink()
    await eventually(lambda: store.names() == ["ns%2Fcomp%2Fgen%2F8"])


# ------------------------------------------------------------------- bad files


async def test_one_bad_file_breaks_nothing_and_is_told_once(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.write("ns%2Fcomp%2Fgen%2F1", b'{"type":"Endp')
    store.write("ns%2Fcomp%2Fgen%2F7", encode_record(record(7)))
    store.write("bad%escape", b"{}")
    (store.folder / "ns%2Fcomp%2Fgen%2F2").mkdir()
    (store.folder / "ns%2Fcomp%2Fgen%2F3").symlink_to("ns%2Fcomp%2Fgen%2F7")
    with caplog.at_level(logging.WARNING, "dynamo.runtime.discovery"):
        backend = store.backend(ttl_s=0.6)
        view = await InstanceSet.open(backend, NAME)
        assert ids(view) == [7]
        store.write("ns%2Fcomp%2Fgen%2F8", encode_record(record(8)))
        await eventually(lambda: ids(view) == [7, 8])
        # Until everything has been swept, which takes several full looks.
        await eventually(lambda: ids(view) == [])
    texts = [one.getMessage() for one in caplog.records]
    for name in ("ns/comp/gen/1", "bad%escape", "gen%2F2", "gen%2F3"):
        assert len([text for text in texts if f"{name} is skipped" in text]) == 1
    assert len(texts) == 4


async def test_a_value_rewritten_in_place_is_noticed(store: Store) -> None:
    view = await InstanceSet.open(store.backend(ttl_s=3), NAME)
    path = store.write(FILE, encode_record(record(7, "127.0.0.1:1111/x")))
    await eventually(lambda: ids(view) == [7])
    path.write_bytes(encode_record(record(7, "127.0.0.1:2222/x")))
    await eventually(lambda: view.records[0].address == "127.0.0.1:2222/x")


# ---------------------------------------------------------------------- leaving


async def test_closing_removes_the_records_and_is_final(store: Store) -> None:
    backend = store.backend()
    batches: list[list[KeyChange]] = []
    await backend.watch(INSTANCES, "", batches.append)
    await backend.register(INSTANCES, KEY, b"{}")
    await asyncio.gather(backend.aclose(), backend.aclose())
    await backend.aclose()
    assert store.names() == []
    with pytest.raises(RuntimeClosed):
        await backend.register(INSTANCES, KEY, b"{}")


async def test_closing_an_unused_backend_starts_nothing(store: Store) -> None:
    await store.backend().aclose()
    assert store.names() == []


async def test_leaving_removes_the_records_and_watches_go_on(store: Store) -> None:
    backend, other = store.backend(ttl_s=0.15), store.backend()
    view = await InstanceSet.open(backend, NAME)
    await backend.register(INSTANCES, KEY, encode_record(record(7)))
    await asyncio.to_thread(backend.leave, 1.0)
    assert store.names() == []
    with pytest.raises(RuntimeClosed, match="left discovery"):
        await backend.register(INSTANCES, KEY, b"{}")
    await other.register(INSTANCES, record(8).key, encode_record(record(8)))
    await eventually(lambda: ids(view) == [8])


def test_leaving_works_after_the_loop_closed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    backend = store.backend()
    asyncio.run(backend.register(INSTANCES, KEY, b"{}"))
    assert store.names() == [FILE]
    backend.leave(1.0)
    backend.leave(1.0)
    assert store.names() == []
    asyncio.run(backend.aclose())


async def test_leaving_does_not_wait_for_ever_for_the_lock(store: Store) -> None:
    backend = store.backend()
    await backend.register(INSTANCES, KEY, b"{}")
    descriptor = os.open(store.folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    started = time.monotonic()
    await asyncio.to_thread(backend.leave, 0.05)
    assert time.monotonic() - started < 1.0
    assert store.names() == []
    os.close(descriptor)


# ------------------------------------------------------------ several processes

WORKER = """
import asyncio, os, sys
from pathlib import Path
from dynamo.runtime._discovery.file import FileBackend
from dynamo.runtime.errors import RuntimeClosed

backend = FileBackend(Path(sys.argv[1]), ttl_s=float(sys.argv[2]))
register = backend.register("v1/instances", "ns/comp/gen/7", b"{}")
"""
LIST_WITHOUT_PRIVILEGES = """
import ctypes

register.close()
if os.geteuid() == 0:
    # Root without any capability (version 3, this thread) may read what others may.
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, none) == 0

async def main():
    print(list(await backend.snapshot("v1/instances", "")))
    await backend.aclose()

asyncio.run(main())
"""
SERVE = """
async def main():
    await register
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
LEAVE_AT_EXIT = """
import atexit
atexit.register(backend.leave, 1.0)
asyncio.run(register)
"""
LEAVE_ON_SIGNAL = """
import signal

def leave(*_):
    backend.leave(1.0)
    os._exit(3)

signal.signal(signal.SIGTERM, leave)

async def main():
    await register
    print("ready", flush=True)
    while True:
        pass

asyncio.run(main())
"""
FORK = """
async def refused(awaitable):
    try:
        await asyncio.wait_for(awaitable, 5)
    except RuntimeClosed as error:
        return "fork" in str(error)
    return False

async def child():
    answers = [
        await refused(backend.register("v1/instances", "ns/comp/gen/8", b"{}")),
        await refused(backend.unregister("v1/instances", "ns/comp/gen/7")),
        await refused(backend.snapshot("v1/instances", "")),
        await refused(backend.watch("v1/instances", "", print)),
    ]
    backend.leave(1.0)
    await backend.aclose()
    return all(answers)

asyncio.run(register)
pid = os.fork()
if pid == 0:
    os._exit(0 if asyncio.run(child()) else 1)
_, status = os.waitpid(pid, 0)
print(os.waitstatus_to_exitcode(status), os.listdir(sys.argv[1] + "/v1/instances"))
"""


async def start(script: str, store: Store, ttl_s: float) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-W", "ignore::DeprecationWarning", "-c", WORKER + script),
        *(str(store.root), str(ttl_s)),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


async def first_line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    line: Awaitable[bytes] = process.stdout.readline()
    return (await asyncio.wait_for(line, LIMIT_S)).decode().strip()


async def test_an_unreadable_file_is_skipped(store: Store) -> None:
    store.write("ns%2Fcomp%2Fgen%2F1", b"{}").chmod(0)
    store.write("ns%2Fcomp%2Fgen%2F2", b"{}")
    reader = await start(LIST_WITHOUT_PRIVILEGES, store, ttl_s=10)
    assert await first_line(reader) == "['ns/comp/gen/2']"
    assert await asyncio.wait_for(reader.wait(), LIMIT_S) == 0


async def test_the_record_of_a_killed_process_is_swept(store: Store) -> None:
    worker = await start(SERVE, store, ttl_s=0.9)
    assert await first_line(worker) == "ready"
    client = store.backend(ttl_s=0.9)
    seen: dict[str, bytes | None] = {}
    await client.watch(INSTANCES, "", seen.update)
    assert seen == {KEY: b"{}"}
    worker.kill()
    await worker.wait()
    died = time.monotonic()
    await eventually(lambda: seen == {KEY: None})
    await eventually(lambda: store.names() == [])
    # A TTL from the last renewal, which was up to a third earlier; a third to notice.
    assert 0.5 < time.monotonic() - died < 2.5


async def test_leaving_works_in_an_exit_hook(store: Store) -> None:
    worker = await start(LEAVE_AT_EXIT, store, ttl_s=10)
    assert await asyncio.wait_for(worker.wait(), LIMIT_S) == 0
    assert store.names() == []


async def test_leaving_works_in_a_signal_handler_of_a_stuck_loop(store: Store) -> None:
    worker = await start(LEAVE_ON_SIGNAL, store, ttl_s=10)
    assert await first_line(worker) == "ready"
    assert store.names() == [FILE]
    worker.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(worker.wait(), LIMIT_S) == 3
    assert store.names() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
async def test_a_forked_child_is_refused_and_removes_nothing(store: Store) -> None:
    worker = await start(FORK, store, ttl_s=10)
    assert await first_line(worker) == f"0 ['{FILE}']"
    assert await asyncio.wait_for(worker.wait(), LIMIT_S) == 0


# ------------------------------------------------------------------------- size


@pytest.mark.slow
async def test_twenty_thousand_records_are_read_in_two_seconds(store: Store) -> None:
    store.folder.mkdir(parents=True)

    def write() -> None:
        for number in range(20_000):
            one = record(number)
            (store.folder / file_name_of_key(one.key)).write_bytes(encode_record(one))

    await asyncio.to_thread(write)
    # Processor time of all threads: the wall clock measures the neighbours too.
    started = time.process_time()
    view = await InstanceSet.open(store.backend(ttl_s=60), NAME)
    took_s = time.process_time() - started
    assert len(view.records) == 20_000
    assert took_s < 2.0


async def test_a_thousand_watches_leave_nothing_behind(store: Store) -> None:
    backend = store.backend()
    for _ in range(1000):
        (await backend.watch(INSTANCES, "", lambda batch: None)).close()
    await eventually(lambda: backend._checking is None)
    assert not backend._buckets[INSTANCES].watched
    seen: list[list[KeyChange]] = []
    await backend.watch(INSTANCES, "", seen.append)
    store.write(FILE, b"{}")
    await eventually(lambda: len(seen) == 2)


async def test_private_folder_is_for_its_user_alone(tmp_path: Path):
    root = tmp_path / "mine"
    root.mkdir(mode=0o777)
    backend = FileBackend(root, private=True)
    try:
        await backend.register(INSTANCES, "a/b/c/1", b"{}")
    finally:
        await backend.aclose()
    assert root.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(sys.platform == "win32", reason="files have no owner by number")
async def test_private_folder_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    root = tmp_path / "theirs"
    root.mkdir()
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    backend = FileBackend(root, private=True)
    try:
        with pytest.raises(
            DiscoveryError, match=r"not a folder of this user.*DYN_FILE_KV"
        ):
            await backend.register(INSTANCES, "a/b/c/1", b"{}")
    finally:
        await backend.aclose()
