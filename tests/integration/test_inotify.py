"""Changes of a file store are told, not polled; and what happens where they cannot be."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NoReturn

import pytest

from dynamo.runtime._discovery import KeyChange, file
from dynamo.runtime._discovery.file import FileBackend
from dynamo.runtime._wire.records import INSTANCES

if sys.platform != "linux":
    pytest.skip("inotify is Linux only", allow_module_level=True)

from dynamo.runtime._discovery import inotify
from dynamo.runtime._discovery.inotify import (
    NotFollowed,
    Notifier,
    kind_of_device,
    shared_kind,
)

# The loop of a test stands for the liveness thread's, which is made for file I/O.
pytestmark = pytest.mark.may_block

KEY = "ns/comp/gen/7"
FILE = "ns%2Fcomp%2Fgen%2F7"
LIMIT_S = 8.0
NEVER_S = 3600.0


async def eventually(check: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not check():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        await asyncio.sleep(0.001)


class Watcher:
    """A backend that watches one bucket in a directory, and what it was told."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "v1" / "instances"
        self.backend = FileBackend(root)
        self.changes: list[KeyChange] = []
        self.content: dict[str, bytes] = {}

    async def start(self) -> Watcher:
        await self.backend.watch(INSTANCES, "", self.take)
        return self

    def take(self, batch: list[KeyChange]) -> None:
        self.changes += batch
        for key, value in batch:
            if value is None:
                self.content.pop(key, None)
            else:
                self.content[key] = value

    @property
    def followed(self) -> bool:
        return self.backend._buckets[INSTANCES].is_followed()

    def put(self, value: bytes, name: str = FILE) -> Path:
        """As the genuine runtime does: staged, then in one step."""
        self.folder.mkdir(parents=True, exist_ok=True)
        staged = self.folder / ".tmp_0123456789abcdef"
        staged.write_bytes(value)
        target = self.folder / name
        target.unlink(missing_ok=True)
        os.link(staged, target)
        staged.unlink()
        return target


@pytest.fixture
async def watchers(tmp_path: Path) -> AsyncIterator[Callable[[], Watcher]]:
    made: list[Watcher] = []

    def make() -> Watcher:
        made.append(Watcher(tmp_path))
        return made[-1]

    yield make
    for one in made:
        await one.backend.aclose()


@pytest.fixture
def only_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off whatever would find a change by looking."""
    monkeypatch.setattr(file, "_POLL_S", NEVER_S)
    monkeypatch.setattr(file, "_FULL_LOOK_S", NEVER_S)
    # It sweeps, and looks at everything for it.
    monkeypatch.setattr(FileBackend, "_renew", _nothing)


async def _nothing(self: FileBackend) -> None:
    return


# ------------------------------------------------------------------ being told


@pytest.mark.usefixtures("only_told")
async def test_what_is_put_and_deleted_is_seen_within_milliseconds(
    watchers: Callable[[], Watcher],
) -> None:
    watcher = await watchers().start()
    took: list[float] = []
    for number in range(15):
        value = b"%d" % number
        started = time.monotonic()
        path = watcher.put(value)
        await eventually(lambda value=value: watcher.content.get(KEY) == value)
        took.append(time.monotonic() - started)
        started = time.monotonic()
        path.unlink()
        await eventually(lambda: not watcher.content)
        took.append(time.monotonic() - started)
    # The median, as the neighbours' load has a part in the worst.
    assert statistics.median(took) < 0.05


@pytest.mark.usefixtures("only_told")
async def test_what_was_put_during_a_look_is_seen_after_it(
    watchers: Callable[[], Watcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each look is followed by a rest of a hundred times its length.
    monkeypatch.setattr(file, "_LISTING_SHARE", 0.01)
    watcher = await watchers().start()
    for number in range(20):
        watcher.put(b"{}", f"a%2F{number}")
    await eventually(lambda: len(watcher.content) == 20)


@pytest.mark.usefixtures("only_told")
async def test_a_file_written_in_place_is_read_when_it_is_closed(
    watchers: Callable[[], Watcher],
) -> None:
    watcher = await watchers().start()
    path = watcher.put(b"one")
    await eventually(lambda: watcher.content == {KEY: b"one"})
    status = path.stat()
    with path.open("r+b") as opened:
        opened.write(b"two")
        opened.flush()
        # Neither size nor time tell.
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    await eventually(lambda: watcher.content == {KEY: b"two"})


@pytest.mark.usefixtures("only_told")
async def test_a_file_created_and_then_written_is_listed_once_it_is_written(
    watchers: Callable[[], Watcher],
) -> None:
    watcher = await watchers().start()
    with (watcher.folder / FILE).open("wb") as opened:
        # Whoever sees this one has been told of the other, still empty one before.
        watcher.put(b"{}", "b%2F1")
        await eventually(lambda: watcher.content == {"b/1": b"{}"})
        opened.write(b"whole")
    await eventually(lambda: watcher.content == {"b/1": b"{}", KEY: b"whole"})
    assert [one.value for one in watcher.changes if one.key == KEY] == [b"whole"]


@pytest.mark.usefixtures("only_told")
async def test_a_file_moved_away_or_over_another_is_noticed(
    watchers: Callable[[], Watcher], tmp_path: Path
) -> None:
    watcher = await watchers().start()
    path = watcher.put(b"one")
    await eventually(lambda: watcher.content == {KEY: b"one"})
    other = tmp_path / "other"
    other.write_bytes(b"two")
    other.rename(path)
    await eventually(lambda: watcher.content == {KEY: b"two"})
    path.rename(tmp_path / "away")
    await eventually(lambda: not watcher.content)


async def test_renewals_are_no_news(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_bytes(b"{}")
    told: list[set[str] | None] = []
    notifier = Notifier()
    notifier.follow(tmp_path, told.append)
    for _ in range(100):
        os.utime(path)
    (tmp_path / "last").symlink_to(path)
    await eventually(lambda: told)
    notifier.close()
    assert told == [{"last"}]


async def test_dropped_events_mean_that_anything_may_have_changed(
    tmp_path: Path,
) -> None:
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 100_000:
        pytest.skip(f"the queue holds {limit} events")
    told: list[set[str] | None] = []
    notifier = Notifier()
    notifier.follow(tmp_path, told.append)
    for _ in range(limit // 2 + 1):
        os.symlink("x", tmp_path / "a")
        os.unlink(tmp_path / "a")
    await eventually(lambda: told)
    assert told == [None]
    (tmp_path / "b").symlink_to("x")
    await eventually(lambda: told == [None, {"b"}])
    notifier.close()


@pytest.mark.usefixtures("only_told")
async def test_after_dropped_events_everything_is_compared(
    watchers: Callable[[], Watcher],
) -> None:
    watcher = await watchers().start()
    bucket = watcher.backend._buckets[INSTANCES]
    missed: list[set[str] | None] = []
    assert bucket.following is not None
    tell, bucket.following.on_names = bucket.following.on_names, missed.append
    watcher.put(b"{}")
    await eventually(lambda: any(names and FILE in names for names in missed))
    assert not watcher.content
    await watcher.backend._in_thread(_call(tell))
    await eventually(lambda: watcher.content == {KEY: b"{}"})


async def _call(tell: Callable[[set[str] | None], None]) -> None:
    tell(None)


# ----------------------------------------------------- the directory itself


@pytest.mark.usefixtures("only_told")
@pytest.mark.parametrize("moved", [True, False], ids=["moved", "deleted"])
async def test_a_lost_directory_is_made_again_and_followed(
    watchers: Callable[[], Watcher], tmp_path: Path, moved: bool
) -> None:
    watcher = await watchers().start()
    path = watcher.put(b"one")
    await eventually(lambda: watcher.content == {KEY: b"one"})
    if moved:
        watcher.folder.rename(tmp_path / "away")
    else:
        path.unlink()
        watcher.folder.rmdir()
    await eventually(lambda: not watcher.content)
    await eventually(lambda: watcher.folder.exists() and watcher.followed)
    watcher.put(b"two")
    await eventually(lambda: watcher.content == {KEY: b"two"})
    if moved:
        # What happens in the old one concerns nobody any more.
        (tmp_path / "away" / "c%2F1").write_bytes(b"{}")
        watcher.put(b"{}", "b%2F1")
        await eventually(lambda: len(watcher.content) == 2)
        assert set(watcher.content) == {KEY, "b/1"}


async def test_a_directory_moved_with_the_one_above_is_found_by_the_next_check(
    watchers: Callable[[], Watcher],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(file, "_POLL_S", NEVER_S)
    monkeypatch.setattr(file, "_FULL_LOOK_S", 0.1)
    watcher = await watchers().start()
    watcher.put(b"one")
    await eventually(lambda: watcher.content == {KEY: b"one"})
    (tmp_path / "v1").rename(tmp_path / "v0")
    await eventually(lambda: not watcher.content)
    assert watcher.followed
    watcher.put(b"two")
    await eventually(lambda: watcher.content == {KEY: b"two"})


# --------------------------------------------------------- where it cannot be


def exhausted(*args: object, **kwargs: object) -> NoReturn:
    raise OSError(errno.EMFILE, "Too many open files")


async def test_without_inotify_changes_are_polled_until_there_is_one(
    watchers: Callable[[], Watcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "_FULL_LOOK_S", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(inotify, "Inotify", exhausted)
        watcher = await watchers().start()
        path = watcher.put(b"{}")
        await eventually(lambda: watcher.content == {KEY: b"{}"})
        path.unlink()
        await eventually(lambda: not watcher.content)
        assert not watcher.followed
        assert watcher.backend._polling is not None
    await eventually(lambda: watcher.backend._polling is None)
    assert watcher.followed


async def test_without_watches_left_changes_are_polled(
    watchers: Callable[[], Watcher],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(inotify.Inotify, "add_watch", exhausted)
    with caplog.at_level(logging.DEBUG, "dynamo.runtime.discovery"):
        watcher = await watchers().start()
    watcher.put(b"{}")
    await eventually(lambda: watcher.content == {KEY: b"{}"})
    assert not watcher.followed
    assert "fs.inotify.max_user_watches" in caplog.text


async def test_a_file_system_of_several_hosts_is_polled(
    watchers: Callable[[], Watcher], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = Path(inotify._MOUNTS).read_text("utf-8").splitlines()
    here = kind_of_device(mounts, tmp_path.stat().st_dev)
    if not here:
        pytest.skip("the file system of the temporary directory has no name")
    monkeypatch.setattr(inotify, "_SHARED_KINDS", {here.partition(".")[0]})
    assert shared_kind(tmp_path) == here
    watcher = await watchers().start()
    watcher.put(b"{}")
    await eventually(lambda: watcher.content == {KEY: b"{}"})
    assert not watcher.followed


MOUNTS = """\
36 35 98:0 / / rw,noatime - ext4 /dev/root rw,errors=continue
40 36 0:52 / /data rw shared:1 master:2 - nfs4 server:/export rw
41 36 0:53 / /home\\040of rw - fuse.sshfs host: rw
"""


@pytest.mark.parametrize(
    ("device", "kind"),
    [((98, 0), "ext4"), ((0, 52), "nfs4"), ((0, 53), "fuse.sshfs"), ((9, 9), "")],
)
def test_the_kind_of_a_file_system_is_found_by_its_device(
    device: tuple[int, int], kind: str
) -> None:
    assert kind_of_device(MOUNTS.splitlines(), os.makedev(*device)) == kind


def test_without_a_list_of_mounts_every_file_system_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inotify, "_MOUNTS", str(tmp_path / "none"))
    assert shared_kind(tmp_path) is None


async def test_a_missing_directory_cannot_be_followed(tmp_path: Path) -> None:
    notifier = Notifier()
    with pytest.raises(NotFollowed, match="No such file"):
        notifier.follow(tmp_path / "none", print)
    notifier.close()


async def test_another_system_has_no_notifier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(NotFollowed, match="no inotify"):
        Notifier()


# ----------------------------------------------------------------- what is left


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_thousand_watches_leave_no_descriptor(
    watchers: Callable[[], Watcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "_FULL_LOOK_S", 0.05)
    watcher = watchers()
    await watcher.backend.snapshot(INSTANCES, "")
    before = descriptors()
    for _ in range(1000):
        watch = await watcher.backend.watch(INSTANCES, "", watcher.take)
        watch.close()
    await eventually(lambda: watcher.backend._notifier is None)
    assert descriptors() == before
    assert not watcher.backend._buckets[INSTANCES].watched


async def test_watching_starts_no_thread_and_stops_with_the_backend(
    watchers: Callable[[], Watcher],
) -> None:
    before = descriptors()
    threads = threading.active_count()
    watcher = await watchers().start()
    assert watcher.followed
    assert threading.active_count() == threads + 1
    await watcher.backend.aclose()
    await eventually(lambda: threading.active_count() == threads)
    assert descriptors() == before
