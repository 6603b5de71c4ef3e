"""Records in the memory of this process: for tests, and for runtimes that stay alone.

Nothing expires.  By default every backend has a store of its own, which is the scope of
the genuine ``mem``: two runtimes of one process do not see each other.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from typing import TYPE_CHECKING, Final

from dynamo.runtime._discovery import KeyChange
from dynamo.runtime._discovery.liveness import FORKED, LEFT, STOPPED
from dynamo.runtime._discovery.watching import LoopWatch, Prefix
from dynamo.runtime.errors import RuntimeClosed

if TYPE_CHECKING:
    from dynamo.runtime._discovery import OnChange, Watch


class MemoryStore:
    """Buckets of records, shared by any number of backends in any threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[str, dict[str, bytes]] = {}
        self._watches: dict[str, list[LoopWatch]] = {}

    def create(self, bucket: str, key: str, value: bytes) -> None:
        """Put a record unless the key exists."""
        with self._lock:
            records = self._buckets.setdefault(bucket, {})
            if key not in records:
                records[key] = value
                self._tell(bucket, [KeyChange(key, value)])

    def delete(self, keys: list[tuple[str, str]], timeout_s: float = -1) -> None:
        """Delete what exists of some (bucket, key), unless the store stays locked."""
        # A signal handler may have interrupted the very thread that holds the lock.
        if not self._lock.acquire(timeout=timeout_s):
            return
        try:
            for bucket, key in keys:
                if self._buckets.get(bucket, {}).pop(key, None) is not None:
                    self._tell(bucket, [KeyChange(key, None)])
        finally:
            self._lock.release()

    def content(self, bucket: str) -> dict[str, bytes]:
        """A copy of all records of a bucket."""
        with self._lock:
            return dict(self._buckets.get(bucket, {}))

    def attach(self, bucket: str, watch: LoopWatch) -> None:
        """Post the content to a watch, and every change from now on."""
        with self._lock:
            content = watch.select(self._buckets.get(bucket, {}))
            watch.post_all([KeyChange(*item) for item in content.items()])
            self._watches.setdefault(bucket, []).append(watch)
            self._prune(bucket)

    def _tell(self, bucket: str, changes: list[KeyChange]) -> None:
        self._prune(bucket)
        for watch in self._watches[bucket]:
            watch.post(changes)

    def _prune(self, bucket: str) -> None:
        """Drop closed watches; closing takes no lock and so cannot do it."""
        watches = self._watches.get(bucket, [])
        self._watches[bucket] = [watch for watch in watches if not watch.closed]


class MemoryBackend:
    """One runtime's access to a memory store.

    Args:
        store: The store; None makes a private one.
        connection_id: The identity; None draws 64 random bits.
    """

    kind: Final = "mem"

    def __init__(
        self, store: MemoryStore | None = None, *, connection_id: int | None = None
    ) -> None:
        self.connection_id = (
            secrets.randbits(64) if connection_id is None else connection_id
        )
        self._store = MemoryStore() if store is None else store
        self._pid = os.getpid()
        self._own: dict[tuple[str, str], None] = {}
        self._watches: list[LoopWatch] = []
        self._left = False
        self._closed = False

    async def register(self, bucket: str, key: str, value: bytes) -> None:
        self._check_open()
        if self._left:
            raise RuntimeClosed(LEFT)
        self._own[bucket, key] = None
        self._store.create(bucket, key, value)

    async def unregister(self, bucket: str, key: str) -> None:
        self._check_open()
        self._own.pop((bucket, key), None)
        self._store.delete([(bucket, key)])

    async def snapshot(self, bucket: str, prefix: str) -> dict[str, bytes]:
        self._check_open()
        under = Prefix(prefix)
        content = self._store.content(bucket)
        return {key: value for key, value in content.items() if key in under}

    async def watch(self, bucket: str, prefix: str, on_change: OnChange) -> Watch:
        self._check_open()
        watch = LoopWatch(asyncio.get_running_loop(), prefix, on_change)
        self._watches = [held for held in self._watches if not held.closed]
        self._watches.append(watch)
        self._store.attach(bucket, watch)
        try:
            # One turn of the loop delivers the content that was just posted.
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            watch.close()
            raise
        return watch

    async def aclose(self) -> None:
        self._closed = True
        self.leave(-1)
        for watch in self._watches:
            watch.close()

    def leave(self, timeout_s: float) -> None:
        if self._forked():
            return
        self._left = True
        own, self._own = self._own, {}
        self._store.delete(list(own), timeout_s)

    def _check_open(self) -> None:
        if self._forked():
            raise RuntimeClosed(FORKED)
        if self._closed:
            raise RuntimeClosed(STOPPED)

    def _forked(self) -> bool:
        # Asked before the store's lock, which a child may have inherited locked.
        return os.getpid() != self._pid
