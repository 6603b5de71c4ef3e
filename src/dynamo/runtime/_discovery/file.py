"""Records as files in directories that several processes share; bytes as the genuine.

Owns what this runtime registered and who watches.  All of it happens in the liveness
thread; `FileBackend.leave` alone works in the caller's.  System calls are `directory`'s.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dynamo.runtime._discovery import KeyChange
from dynamo.runtime._discovery.directory import (
    TMP_PREFIX,
    Clock,
    Directory,
    Lock,
    keep_private,
)
from dynamo.runtime._discovery.liveness import LEFT, Liveness
from dynamo.runtime._discovery.watching import LoopWatch, Prefix
from dynamo.runtime.errors import DiscoveryError, RuntimeClosed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator
    from pathlib import Path

    from dynamo.runtime._discovery import OnChange, Watch
    from dynamo.runtime._discovery.inotify import Following, Notifier

_T = TypeVar("_T")

_log = logging.getLogger("dynamo.runtime.discovery")

_LOCK_ATTEMPTS = 100
_LOCK_RETRY_S = 0.011
# Where the system does not tell of changes; where it does, nothing is polled.
_POLL_S = 0.025
# File times can be coarse: a change just after a listing may leave the same stamp.
_SETTLE_S = 0.05
_FULL_LOOK_S = 2.0
# A listing may take this part of the thread's time, so that churn in a directory of
# 20,000 files does not keep a core busy.
_LISTING_SHARE = 0.2


class FileBackend:
    """One runtime's access to a file store.

    Args:
        root: Directory that holds the bucket directories.
        ttl_s: Seconds after which a record that nobody renews is dead.  All processes
            of a cluster must agree; genuine ones have 10.
        refresh_s: Seconds between renewals; None means a third of the TTL.
        connection_id: The identity; None draws 64 random bits.
        liveness: The thread for all of it; None makes one.
        clock: Where time comes from.
    """

    kind: Final = "file"

    def __init__(
        self,
        root: Path,
        *,
        ttl_s: float = 10.0,
        refresh_s: float | None = None,
        connection_id: int | None = None,
        clock: Clock | None = None,
        liveness: Liveness | None = None,
        private: bool = False,
    ) -> None:
        self.connection_id = (
            secrets.randbits(64) if connection_id is None else connection_id
        )
        self._root = root
        self._private = private
        self._ttl_s = ttl_s
        self._refresh_s = ttl_s / 3 if refresh_s is None else refresh_s
        self._full_look_s = min(_FULL_LOOK_S, self._refresh_s)
        self._clock = clock or Clock()
        self._liveness = liveness or Liveness()
        self._buckets: dict[str, _Bucket] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None
        self._notifier: Notifier | None = None
        self._left = False

    # -- called from anywhere ----------------------------------------------------

    async def register(self, bucket: str, key: str, value: bytes) -> None:
        await self._in_thread(self._register(bucket, key, value))

    async def unregister(self, bucket: str, key: str) -> None:
        await self._in_thread(self._unregister(bucket, key))

    async def snapshot(self, bucket: str, prefix: str) -> dict[str, bytes]:
        under = Prefix(prefix)
        content = await self._in_thread(self._content(bucket))
        return {key: value for key, value in content.items() if key in under}

    async def watch(self, bucket: str, prefix: str, on_change: OnChange) -> Watch:
        watch = LoopWatch(asyncio.get_running_loop(), prefix, on_change)
        try:
            # The content is posted before the thread answers, hence delivered before.
            await self._in_thread(self._attach(bucket, watch))
        except BaseException:
            watch.close()
            raise
        return watch

    async def aclose(self) -> None:
        if self._liveness.forked:
            return
        self._left = True
        try:
            self._liveness.submit(self._close())
        except RuntimeClosed:
            _log.debug("discovery is being closed already; waiting for the same end")
        await asyncio.wrap_future(self._liveness.ended)

    def leave(self, timeout_s: float) -> None:
        if self._liveness.forked:
            return
        self._left = True
        deadline = time.monotonic() + timeout_s
        for bucket in list(self._buckets.values()):
            bucket.withdraw(deadline)

    # -- in the liveness thread --------------------------------------------------

    async def _in_thread(self, job: Coroutine[Any, Any, _T]) -> _T:
        return await asyncio.wrap_future(self._liveness.submit(job))

    async def _register(self, bucket: str, key: str, value: bytes) -> None:
        place = self._open(bucket)
        previous = place.own.get(key)
        # Before the file exists, so that leaving meanwhile finds it.
        place.own[key] = value
        try:
            await place.publish([key])
        except BaseException as error:
            place.own.pop(key, None)
            if previous is not None:
                place.own[key] = previous
            if isinstance(error, OSError):
                raise place.failure("register", error) from error
            raise
        if self._left:
            raise RuntimeClosed(LEFT)

    async def _unregister(self, bucket: str, key: str) -> None:
        place = self._open(bucket)
        # First of all: from now on nobody brings the record back.
        place.own.pop(key, None)
        try:
            async with place.locked():
                existed = place.directory.remove(key)
            place.look_if_watched()
        except OSError as error:
            raise place.failure("unregister", error) from error
        if not existed:
            raise DiscoveryError(
                "Unable to unregister endpoint instance from discovery. "
                "Check discovery service status"
            )

    async def _content(self, bucket: str) -> dict[str, bytes]:
        place = self._open(bucket)
        try:
            place.directory.ensure()
            place.look(full=True)
        except OSError as error:
            raise place.failure("read", error) from error
        return place.directory.content

    async def _attach(self, bucket: str, watch: LoopWatch) -> None:
        place = self._open(bucket)
        if not place.watched:
            # Before reading, so that nothing can come between.
            self._follow(place)
        content = watch.select(await self._content(bucket))
        watch.post_all([KeyChange(*item) for item in content.items()])
        place.watches.append(watch)
        if self._checking is None:
            self._checking = self._liveness.every(self._full_look_s, self._check)
        self._poll_if_needed()

    def _open(self, name: str) -> _Bucket:
        """The bucket of a name, which is swept from now on, also by pure clients."""
        if self._renewing is None:
            self._renewing = self._liveness.every(self._refresh_s, self._renew)
        bucket = self._buckets.get(name)
        if bucket is None:
            if self._private:
                keep_private(self._root)
            path = self._root.joinpath(*name.split("/"))
            directory = Directory(path, self._ttl_s, self._clock)
            bucket = _Bucket(directory, self._clock)
            self._buckets[name] = bucket
        # After the insertion: `leave` sets the mark first and lists the buckets then.
        bucket.withdrawn = bucket.withdrawn or self._left
        return bucket

    async def _renew(self) -> None:
        for bucket in list(self._buckets.values()):
            with bucket.reporting("renew"):
                await bucket.renew()

    async def _check(self) -> None:
        """Look at everything that is watched, whatever we were told of it."""
        for bucket in self._buckets.values():
            if not bucket.watched:
                bucket.unfollow()
                continue
            with bucket.reporting("watch"):
                if not bucket.is_followed():
                    self._follow(bucket)
                bucket.look(full=True)
        self._poll_if_needed()
        if not any(bucket.watches for bucket in self._buckets.values()):
            self._stop_watching()

    async def _poll(self) -> None:
        for bucket in self._buckets.values():
            if bucket.watched and bucket.needs_polling:
                with bucket.reporting("watch"):
                    bucket.poll()
        self._poll_if_needed()

    def _poll_if_needed(self) -> None:
        needed = any(
            bucket.watched and bucket.needs_polling for bucket in self._buckets.values()
        )
        if needed and self._polling is None:
            self._polling = self._liveness.every(_POLL_S, self._poll)
        elif not needed and self._polling is not None:
            self._polling.cancel()
            self._polling = None

    def _follow(self, bucket: _Bucket) -> None:
        """Be told what changes in a bucket, if possible."""
        from dynamo.runtime._discovery.inotify import NotFollowed, Notifier

        bucket.unfollow()
        try:
            # A genuine worker cannot register before somebody makes it again.
            bucket.directory.ensure()
            if self._notifier is None:
                self._notifier = Notifier()
            told = partial(self._told, bucket)
            bucket.following = self._notifier.follow(bucket.directory.path, told)
        except (NotFollowed, OSError) as error:
            path = bucket.directory.path
            _log.debug("%s is polled instead of followed: %s", path, error)

    def _told(self, bucket: _Bucket, names: set[str] | None) -> None:
        if not bucket.watched:
            bucket.unfollow()
            return
        with bucket.reporting("watch"):
            if bucket.following is None or bucket.following.lost:
                self._follow(bucket)
            bucket.told(names)
        self._poll_if_needed()

    def _stop_watching(self) -> None:
        for task in (self._checking, self._polling):
            if task is not None:
                task.cancel()
        self._checking = self._polling = None
        if self._notifier is not None:
            self._notifier.close()
            self._notifier = None

    async def _close(self) -> None:
        try:
            for bucket in self._buckets.values():
                for watch in bucket.watches:
                    watch.close()
            self._stop_watching()
            self.leave(_LOCK_ATTEMPTS * _LOCK_RETRY_S)
        finally:
            self._liveness.stop()


class _Bucket:
    """A directory with our records in it and our watches on it."""

    def __init__(self, directory: Directory, clock: Clock) -> None:
        self.directory = directory
        self.following: Following | None = None
        # `withdraw` works in other threads: on these two, with atomic operations only.
        self.own: dict[str, bytes] = {}
        self.withdrawn = False
        self.watches: list[LoopWatch] = []
        self._now = clock.monotonic
        self._stamp: tuple[int, int] | None = None
        self._settle_at = float("inf")
        self._quiet_until = 0.0
        self._news: set[str] = set()
        self._later: asyncio.TimerHandle | None = None
        self._look_failed = False
        self._failing: set[str] = set()

    @property
    def watched(self) -> bool:
        self.watches = [watch for watch in self.watches if not watch.closed]
        return bool(self.watches)

    # -- writing -----------------------------------------------------------------

    async def publish(self, keys: list[str]) -> None:
        """Write those own records that are still to be there."""
        async with self.locked():
            for key in keys:
                value = self.own.get(key)
                if value is None or self.withdrawn:
                    continue
                self.directory.publish(key, value)
                if self.withdrawn:
                    # `withdraw` did not get the lock and came past before the file.
                    self.directory.remove(key)
        self.look_if_watched()

    def withdraw(self, deadline: float) -> None:
        """Remove the own records, blocking; in any thread, at any point."""
        self.withdrawn = True
        own = list(self.own)
        self.own.clear()
        if not own:
            return
        with self._lock_until(deadline):
            for key in own:
                with self.reporting(f"remove {key}"):
                    self.directory.remove(key)

    async def renew(self) -> None:
        """Touch our records, bring back those that others removed, sweep the dead."""
        lost = []
        for key in list(self.own):
            with self.reporting(f"renew {key}"):
                if not self.directory.touch(key):
                    lost.append(key)
        if lost:
            with self.reporting("bring back a removed record"):
                await self.publish(lost)
        self.directory.look(full=True)
        doomed = self.directory.stale()
        if doomed:
            async with self.locked():
                self.directory.sweep(doomed)
        self.look_if_watched()

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Hold the directory's lock; the body must not wait."""
        for _ in range(_LOCK_ATTEMPTS):
            lock = self.directory.try_lock()
            if lock is not None:
                break
            await asyncio.sleep(_LOCK_RETRY_S)
        else:
            raise DiscoveryError(
                f"the lock of {self.directory.path} was held by another process for "
                f"{_LOCK_ATTEMPTS * _LOCK_RETRY_S:.1f} s: find it, for example with "
                "lsof, and end it"
            )
        with lock:
            yield

    def _lock_until(self, deadline: float) -> Lock:
        """The lock, or none: removal is atomic, and better unlocked than not at all."""
        with self.reporting("lock"):
            while True:
                lock = self.directory.try_lock()
                if lock is not None:
                    return lock
                if time.monotonic() + _LOCK_RETRY_S > deadline:
                    break
                time.sleep(_LOCK_RETRY_S)
        return Lock(None)

    # -- watching ----------------------------------------------------------------

    @property
    def needs_polling(self) -> bool:
        """Nobody tells of changes, or we could not look at them."""
        followed = self.following is not None and not self.following.lost
        return not followed or self._look_failed

    def is_followed(self) -> bool:
        """Also False if the directory was replaced in silence, with the one above it."""
        if self.following is None or self.following.lost:
            return False
        stamp = self.directory.stamp()
        return stamp is not None and stamp[0] == self.following.inode

    def unfollow(self) -> None:
        self._news.clear()
        if self.following is not None:
            self.following.close()
            self.following = None
        if self._later is not None:
            self._later.cancel()
            self._later = None

    def told(self, names: set[str] | None) -> None:
        """Something changed; None stands for anything."""
        if names is None:
            self.look(full=True)
            return
        self._news |= {name for name in names if not name.startswith(TMP_PREFIX)}
        if not self._news or self._later is not None:
            return
        quiet_s = self._quiet_until - self._now()
        if quiet_s <= 0:
            self.look(full=False)
        else:
            loop = asyncio.get_running_loop()
            self._later = loop.call_later(quiet_s, self._look_later)

    def _look_later(self) -> None:
        self._later = None
        if self._news:
            with self.reporting("watch"):
                self.look(full=False)

    def poll(self) -> None:
        """Look if something may have changed since the last look."""
        stamp = self.directory.stamp()
        if stamp is None:
            # A genuine worker cannot register before somebody makes it again.
            self.directory.ensure()
        now = self._now()
        if self._look_failed:
            self.look(full=True)
        elif now >= self._quiet_until and (
            stamp != self._stamp or now >= self._settle_at
        ):
            self.look(full=False)

    def look_if_watched(self) -> None:
        if self.watched:
            self.look(full=False)

    def look(self, *, full: bool) -> None:
        """Bring the view up to date and tell the watches what changed."""
        self._look_failed = True
        started = self._now()
        # The stamp first: what changes from here on will be seen to differ from it.
        stamp = self.directory.stamp()
        self._settle_at = float("inf") if stamp == self._stamp else started + _SETTLE_S
        self._stamp = stamp
        news, self._news = self._news, set()
        self.directory.look(full=full, written=news)
        self.directory.read_new()
        changes = self.directory.changes()
        if changes:
            for watch in self.watches:
                watch.post(changes)
        self._look_failed = False
        ended = self._now()
        self._quiet_until = ended + (ended - started) * (1 / _LISTING_SHARE - 1)

    # -- trouble -----------------------------------------------------------------

    def failure(self, verb: str, error: OSError) -> DiscoveryError:
        return DiscoveryError(
            f"cannot {verb} in {self.directory.path}: {error}; check that the "
            "directory is writable and its disk not full"
        )

    @contextmanager
    def reporting(self, action: str) -> Iterator[None]:
        """Warn of a failure that the next round may heal, once until it is healed."""
        try:
            yield
        except (OSError, DiscoveryError) as error:
            if action not in self._failing:
                self._failing.add(action)
                path = self.directory.path
                _log.warning("discovery cannot %s in %s: %s", action, path, error)
        else:
            self._failing.discard(action)
