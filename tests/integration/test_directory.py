"""One directory and the ages of its files, on clocks that the test moves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dynamo.runtime._discovery.directory import Clock, Directory

TTL_S = 10.0
HOUR_S = 3600.0
KEY = "a/1"


class World:
    """A directory, a monotonic clock, a wall clock and the owner of one record."""

    def __init__(self, path: Path) -> None:
        self.monotonic_s = 100.0
        self.wall_s = 1_700_000_000.0
        self.owner_wall_offset_s = 0.0
        clock = Clock(lambda: self.monotonic_s, lambda: int(self.wall_s * 1e9))
        self.directory = Directory(path, TTL_S, clock)
        self.file = path / "a%2F1"
        self.directory.ensure()

    def renew(self) -> None:
        """What the owner does every TTL / 3, by its own clock."""
        if not self.file.exists():
            self.file.write_bytes(b"{}")
        then = int((self.wall_s + self.owner_wall_offset_s) * 1e9)
        os.utime(self.file, ns=(then, then))

    def step(self, seconds: float = 1.0) -> None:
        self.monotonic_s += seconds
        self.wall_s += seconds

    def listed(self) -> bool:
        self.directory.look(full=True)
        self.directory.read_new()
        self.directory.changes()
        return KEY in self.directory.content

    def swept(self) -> bool:
        self.directory.look(full=True)
        self.directory.sweep(self.directory.stale())
        return not self.file.exists()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "bucket")


def test_a_record_is_listed_for_one_ttl_after_its_last_renewal(world: World) -> None:
    world.renew()
    assert world.listed()
    world.step(TTL_S - 0.1)
    assert world.listed()
    assert not world.swept()
    world.step(0.2)
    assert not world.listed()
    assert world.swept()


def test_time_before_the_first_look_counts(world: World) -> None:
    world.renew()
    world.step(6)
    assert world.listed()
    world.step(5)
    assert not world.listed()


@pytest.mark.parametrize("offset_s", [-HOUR_S, HOUR_S])
def test_a_live_owner_with_a_wrong_clock_is_listed(
    world: World, offset_s: float
) -> None:
    world.owner_wall_offset_s = offset_s
    world.renew()
    world.listed()
    for _ in range(20):
        world.step(3)
        world.renew()
        assert world.listed()
        assert not world.swept()


@pytest.mark.parametrize("offset_s", [-HOUR_S, HOUR_S])
def test_a_dead_owner_with_a_wrong_clock_goes_within_two_ttl(
    world: World, offset_s: float
) -> None:
    world.owner_wall_offset_s = offset_s
    world.renew()
    world.listed()
    world.step(TTL_S + 0.1)
    assert not world.listed()
    assert world.swept()


@pytest.mark.parametrize("jump_s", [-HOUR_S, HOUR_S])
def test_a_step_of_the_wall_clock_does_no_harm(world: World, jump_s: float) -> None:
    world.renew()
    assert world.listed()
    world.wall_s += jump_s
    world.step(3)
    assert world.listed(), "nothing happened but the step"
    assert not world.swept()
    world.renew()
    world.step(TTL_S - 0.1)
    assert world.listed()
    world.step(TTL_S)
    assert not world.listed()
    assert world.swept()


def test_an_old_file_is_hidden_at_once_but_swept_only_unrenewed(world: World) -> None:
    world.renew()
    world.step(HOUR_S)
    assert not world.listed()
    assert not world.swept()
    world.owner_wall_offset_s = -HOUR_S
    world.renew()
    assert not world.listed(), "the same mtime is no renewal"
    world.step(3)
    world.renew()
    assert world.listed()


def test_a_renewal_between_look_and_sweep_saves_the_file(world: World) -> None:
    world.renew()
    world.directory.look(full=True)
    world.step(TTL_S + 1)
    world.directory.look(full=True)
    doomed = world.directory.stale()
    assert doomed == ["a%2F1"]
    world.renew()
    world.directory.sweep(doomed)
    assert world.file.exists()


def test_nothing_expires_between_full_looks(world: World) -> None:
    world.renew()
    assert world.listed()
    world.step(TTL_S - 1)
    world.renew()
    world.step(2)
    world.directory.look(full=False)
    assert world.directory.changes() == []
    assert world.listed()


def test_an_observer_that_slept_judges_after_looking(world: World) -> None:
    world.renew()
    assert world.listed()
    world.step(60)
    world.renew()
    assert world.listed()
    assert not world.swept()


def test_a_lock_excludes_others_until_it_is_released(world: World) -> None:
    pytest.importorskip("fcntl")
    lock = world.directory.try_lock()
    assert lock is not None
    assert world.directory.try_lock() is None
    with lock:
        assert world.directory.try_lock() is None
    again = world.directory.try_lock()
    assert again is not None
    with again:
        pass


def test_a_giant_file_is_skipped_with_one_warning(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.renew()
    os.truncate(world.file, 2**30)
    world.renew()
    assert not world.listed()
    assert not world.listed()
    assert len(caplog.records) == 1
    assert "over the limit" in caplog.text


def test_only_some_renewed_files_are_read_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.runtime._discovery.directory._REREAD_LIMIT", 1)
    paths = [world.directory.path / name for name in "bcd"]
    for path in paths:
        path.write_bytes(b"old")
    world.listed()
    for path in paths:
        path.write_bytes(b"new")
        os.utime(path, (1, 1))
    values = []
    for _ in range(3):
        world.step()
        world.listed()
        values.append(sorted(world.directory.content.values()))
    assert values == [
        [b"new", b"old", b"old"],
        [b"new", b"new", b"old"],
        [b"new", b"new", b"new"],
    ]
