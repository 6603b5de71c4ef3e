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
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dynamo.runtime._discovery import KeyChange
from dynamo.runtime._discovery.directory import Clock, Directory, Lock
from dynamo.runtime._discovery.liveness import LEFT, Liveness
from dynamo.runtime._discovery.watching import LoopWatch, Prefix
from dynamo.runtime.errors import DiscoveryError, RuntimeClosed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator
    from pathlib import Path

    from dynamo.runtime._discovery import OnChange, Watch

_T = TypeVar("_T")

_log = logging.getLogger("dynamo.runtime.discovery")

_LOCK_ATTEMPTS = 100
_LOCK_RETRY_S = 0.011
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
    ) -> None:
        self.connection_id = (
            secrets.randbits(64) if connection_id is None else connection_id
        )
        self._root = root
        self._ttl_s = ttl_s
        self._refresh_s = ttl_s / 3 if refresh_s is None else refresh_s
        self._clock = clock or Clock()
        self._liveness = Liveness()
        self._buckets: dict[str, _Bucket] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None
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
        content = watch.select(await self._content(bucket))
        watch.post_all([KeyChange(*item) for item in content.items()])
        self._buckets[bucket].watches.append(watch)
        if self._polling is None:
            self._polling = self._liveness.every(_POLL_S, self._poll)

    def _open(self, name: str) -> _Bucket:
        """The bucket of a name, which is swept from now on, also by pure clients."""
        if self._renewing is None:
            self._renewing = self._liveness.every(self._refresh_s, self._renew)
        bucket = self._buckets.get(name)
        if bucket is None:
            path = self._root.joinpath(*name.split("/"))
            directory = Directory(path, self._ttl_s, self._clock)
            full_look_s = min(_FULL_LOOK_S, self._refresh_s)
            bucket = _Bucket(directory, full_look_s, self._clock)
            self._buckets[name] = bucket
        # After the insertion: `leave` sets the mark first and lists the buckets then.
        bucket.withdrawn = bucket.withdrawn or self._left
        return bucket

    async def _renew(self) -> None:
        for bucket in list(self._buckets.values()):
            with bucket.reporting("renew"):
                await bucket.renew()

    async def _poll(self) -> None:
        watched = [bucket for bucket in self._buckets.values() if bucket.watched]
        for bucket in watched:
            with bucket.reporting("watch"):
                bucket.poll()
        if not watched and self._polling is not None:
            self._polling.cancel()
            self._polling = None

    async def _close(self) -> None:
        try:
            for bucket in self._buckets.values():
                for watch in bucket.watches:
                    watch.close()
            self.leave(_LOCK_ATTEMPTS * _LOCK_RETRY_S)
        finally:
            self._liveness.stop()


class _Bucket:
    """A directory with our records in it and our watches on it."""

    def __init__(self, directory: Directory, full_look_s: float, clock: Clock) -> None:
        self.directory = directory
        # `withdraw` works in other threads: on these two, with atomic operations only.
        self.own: dict[str, bytes] = {}
        self.withdrawn = False
        self.watches: list[LoopWatch] = []
        self._full_look_s = full_look_s
        self._now = clock.monotonic
        self._stamp: tuple[int, int] | None = None
        self._settle_at = float("inf")
        self._full_look_at = 0.0
        self._quiet_until = 0.0
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

    def poll(self) -> None:
        """Look if something may have changed since the last look."""
        now = self._now()
        stamp = self.directory.stamp()
        if stamp is None:
            # A genuine worker cannot register before somebody makes it again.
            self.directory.ensure()
        if now >= self._full_look_at:
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
        started = self._now()
        # The stamp first: what changes from here on will be seen to differ from it.
        stamp = self.directory.stamp()
        self._settle_at = float("inf") if stamp == self._stamp else started + _SETTLE_S
        self._stamp = stamp
        self.directory.look(full=full)
        self.directory.read_new()
        changes = self.directory.changes()
        if changes:
            for watch in self.watches:
                watch.post(changes)
        ended = self._now()
        self._quiet_until = ended + (ended - started) * (1 / _LISTING_SHARE - 1)
        if full:
            self._full_look_at = started + self._full_look_s

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
