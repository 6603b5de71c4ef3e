"""One bucket directory of the file store: its lock, its files, and which are alive.

Owns every system call of the file backend and the rule when a record is stale.  Knows no
event loop and waits for nothing.  All methods but the stateless ones (`try_lock`,
`publish`, `remove`) belong to one thread.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from dynamo.runtime._discovery import KeyChange
from dynamo.runtime._wire.records import file_name_of_key, key_of_file_name
from dynamo.runtime.errors import DiscoveryError

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet
    from pathlib import Path

if sys.platform != "win32":
    import fcntl

_log = logging.getLogger("dynamo.runtime.discovery")

TMP_PREFIX = ".tmp_"
# A record takes some hundred bytes and a model card some thousand.
_MAX_RECORD_BYTES = 16 * 2**20
# Files re-read per full look although only their mtime changed: heals what somebody
# rewrote in place, without reading 20,000 refreshed records every two seconds.
_REREAD_LIMIT = 100
_FOLLOW = os.utime not in os.supports_follow_symlinks
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)


class Clock(NamedTuple):
    """Where time comes from: intervals in seconds, and the clock of file times."""

    monotonic: Callable[[], float] = time.monotonic
    wall_ns: Callable[[], int] = time.time_ns


def keep_private(root: Path) -> None:
    """Make a folder that only this user can enter.

    Its name is known and the place is everybody's: records planted there by somebody
    else would be called.

    Raises:
        DiscoveryError: it belongs to somebody else.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not hasattr(os, "getuid"):
        return
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise DiscoveryError(
            f"{root} is not a folder of this user (uid {os.getuid()}, but the owner is "
            f"{status.st_uid}): remove it, or name another place with DYN_FILE_KV"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        root.chmod(0o700)


class Lock:
    """The held lock of a bucket directory."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc_info: object) -> None:
        if self._descriptor is not None and sys.platform != "win32":
            # Closing alone would leave the lock with a child forked in between.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None


class _File:
    """What the last look told about one file."""

    __slots__ = (
        "inode",
        "key",
        "live",
        "live_until",
        "mtime_ns",
        "read_at",
        "read_mtime_ns",
        "seen_at",
        "size",
        "sweep_from",
        "value",
    )

    def __init__(self, key: str | None, status: os.stat_result, now: float) -> None:
        self.key = key
        self.inode = status.st_ino
        self.size = status.st_size
        self.mtime_ns = status.st_mtime_ns
        self.seen_at = now
        self.live = False
        self.live_until = self.sweep_from = now
        self.value: bytes | None = None
        self.read_at = -1.0
        self.read_mtime_ns = -1


class Directory:
    """A bucket directory as this process sees it.

    A record is alive while its owner goes on changing the mtime.  The age is the wall
    clock's, bounded by what we saw ourselves on a monotonic clock: a change noticed now
    happened after the look before.  So a stepped or skewed clock makes no record
    immortal and takes none away for longer than one TTL.

    Args:
        path: The directory; `ensure` makes it.
        ttl_s: Age in seconds after which a record counts as dead.
        clock: Where time comes from.
    """

    def __init__(self, path: Path, ttl_s: float, clock: Clock) -> None:
        self.path = path
        self._root = str(path)
        self._ttl_s = ttl_s
        self._clock = clock
        self._files: dict[str, _File] = {}
        self._looked_at: float | None = None
        self._warned: set[str] = set()
        self._content: dict[str, tuple[int, bytes]] = {}

    # -- writing -----------------------------------------------------------------

    def ensure(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def try_lock(self) -> Lock | None:
        """Make the directory if needed and lock it, or None if somebody else holds it.

        Without ``fcntl`` (Windows) there is no lock: publication and removal are atomic
        by themselves, only the check in front of them is not.
        """
        self.ensure()
        if sys.platform == "win32":
            return Lock(None)
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        return Lock(descriptor)

    def publish(self, key: str, value: bytes) -> None:
        """Create the file of a key in one step, or keep the one that exists; locked.

        Raises:
            DiscoveryError: something that is no plain file has its name.
        """
        target = self.path / file_name_of_key(key)
        self._make_room(target)
        staged = self.path / f"{TMP_PREFIX}{secrets.token_hex(8)}"
        descriptor = os.open(staged, _CREATE, 0o666)
        try:
            try:
                os.write(descriptor, value)
            finally:
                os.close(descriptor)
            os.link(staged, target)
        except FileExistsError:
            # Create-if-absent: whoever wrote the record, it stays as it is.
            _log.debug("%s exists and keeps its value", target)
        finally:
            staged.unlink(missing_ok=True)

    def _make_room(self, target: Path) -> None:
        """Take away a dead record of an earlier life; refuse what we cannot replace."""
        try:
            status = target.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISREG(status.st_mode):
            raise DiscoveryError(
                f"cannot register: {target} exists and is no plain file; remove it"
            )
        if self._age_s(status) > self._ttl_s:
            target.unlink(missing_ok=True)

    def remove(self, key: str) -> bool:
        """Delete the file of a key, locked; False if there is none."""
        try:
            (self.path / file_name_of_key(key)).unlink()
        except FileNotFoundError:
            return False
        return True

    def touch(self, key: str) -> bool:
        """Renew the mtime and nothing else; False if the file is gone."""
        path = self.path / file_name_of_key(key)
        try:
            times = (path.lstat().st_atime_ns, self._clock.wall_ns())
            os.utime(path, ns=times, follow_symlinks=_FOLLOW)
        except FileNotFoundError:
            return False
        return True

    def sweep(self, names: list[str]) -> None:
        """Unlink stale files that nobody renewed meanwhile; locked."""
        for name in names:
            path = self.path / name
            try:
                if path.lstat().st_mtime_ns == self._files[name].mtime_ns:
                    path.unlink()
            except FileNotFoundError:
                continue
            except OSError as error:
                self._warn_once(name, error)

    # -- looking -----------------------------------------------------------------

    def stamp(self) -> tuple[int, int] | None:
        """Changes when a file came or went (coarsely); None without a directory."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def look(self, *, full: bool, written: AbstractSet[str] = frozenset()) -> None:
        """Take note of new and removed files; a full look examines all of them.

        Those of the names ``written`` are examined too, and read again.
        """
        now = self._clock.monotonic()
        names: set[str] = set()
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    names.add(entry.name)
                    known = self._files.get(entry.name)
                    again = full or entry.name in written
                    if again or known is None or known.inode != entry.inode():
                        self._examine(entry, now)
        except FileNotFoundError:
            names.clear()
        for name in self._files.keys() - names:
            del self._files[name]
        for name in self._files.keys() & written:
            self._files[name].value = None
        self._warned &= names
        self._looked_at = now

    def read_new(self) -> None:
        """Read the files that are new or changed since they were read."""
        touched: list[tuple[float, str]] = []
        for name, file in self._files.items():
            if file.key is None:
                continue
            if file.value is None:
                self._read(name, file)
            elif file.read_mtime_ns != file.mtime_ns:
                touched.append((file.read_at, name))
        for _, name in sorted(touched)[:_REREAD_LIMIT]:
            self._read(name, self._files[name])

    def changes(self) -> list[KeyChange]:
        """What differs in the live records from the last call; updates `content`."""
        current = {
            file.key: (file.inode, file.value)
            for file in self._files.values()
            if file.live and file.key is not None and file.value is not None
        }
        old, self._content = self._content, current
        gone = [KeyChange(key, None) for key in old.keys() - current.keys()]
        # A new file with an old value is told as well: its owner registered again.
        put = [
            KeyChange(key, seen[1])
            for key, seen in current.items()
            if old.get(key) != seen
        ]
        return gone + put

    @property
    def content(self) -> dict[str, bytes]:
        """The live records as of the last `changes`."""
        return {key: value for key, (_, value) in self._content.items()}

    def stale(self) -> list[str]:
        """Names of the files to sweep, whoever owns them, temporary ones included."""
        now = self._clock.monotonic()
        return [name for name, file in self._files.items() if file.sweep_from < now]

    def _examine(self, entry: os.DirEntry[str], now: float) -> None:
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return
        if not stat.S_ISREG(status.st_mode):
            self._files.pop(entry.name, None)
            self._warn_once(entry.name, "it is no plain file")
            return
        file = self._files.get(entry.name)
        if file is None:
            file = _File(self._key_of(entry.name), status, now)
            self._files[entry.name] = file
            self._judge_new(file, status, now)
        else:
            self._judge_again(file, status, now)
        # Only here: a file must not expire before somebody looked for its renewal.
        file.live = file.live_until > now

    def _judge_new(self, file: _File, status: os.stat_result, now: float) -> None:
        age_s = self._age_s(status)
        if self._looked_at is not None:
            age_s = min(age_s, now - self._looked_at)
        file.live_until = file.sweep_from = now + self._ttl_s - age_s
        if age_s > self._ttl_s:
            # Old at first sight: not listed, but perhaps its owner's clock is behind.
            # The next renewal would tell, so that it is not deleted before.
            file.sweep_from = now + self._ttl_s

    def _judge_again(self, file: _File, status: os.stat_result, now: float) -> None:
        if (file.inode, file.size) != (status.st_ino, status.st_size):
            file.value = None
        if (file.inode, file.mtime_ns) != (status.st_ino, status.st_mtime_ns):
            age_s = min(self._age_s(status), now - file.seen_at)
            file.live_until = file.sweep_from = now + self._ttl_s - age_s
        file.inode, file.size = status.st_ino, status.st_size
        file.mtime_ns = status.st_mtime_ns
        file.seen_at = now

    def _age_s(self, status: os.stat_result) -> float:
        return max(0.0, (self._clock.wall_ns() - status.st_mtime_ns) / 1e9)

    def _key_of(self, name: str) -> str | None:
        if name.startswith(TMP_PREFIX):
            return None
        key = key_of_file_name(name)
        if key is None:
            self._warn_once(name, "its name stands for no key")
        return key

    def _read(self, name: str, file: _File) -> None:
        if not file.size:
            # Just made by somebody who writes it in place, which is about to follow.
            return
        if file.size > _MAX_RECORD_BYTES:
            self._warn_once(
                name, f"it has {file.size} bytes, over the limit of {_MAX_RECORD_BYTES}"
            )
            return
        try:
            descriptor = os.open(os.path.join(self._root, name), _READ)
            try:
                file.value = os.read(descriptor, file.size)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            return
        except OSError as error:
            self._warn_once(name, error)
            return
        file.read_at = self._clock.monotonic()
        file.read_mtime_ns = file.mtime_ns

    def _warn_once(self, name: str, reason: object) -> None:
        if name not in self._warned:
            self._warned.add(name)
            _log.warning("%s is skipped: %s", self.path / name, reason)
