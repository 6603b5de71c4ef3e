"""Carries changes from the thread of a store to the loop of whoever watches.

Knows prefixes and loops, no store.  Takes no lock: `LoopWatch.close` is called from
finalizers, which may run in any thread and at any point.
"""

from __future__ import annotations

from contextvars import Context
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from dynamo.runtime._discovery import KeyChange, OnChange


class Prefix:
    """Selects the keys under a path prefix with a ``/`` boundary."""

    __slots__ = ("_bare", "_inner")

    def __init__(self, prefix: str) -> None:
        # Only one slash is ours: endpoint names may be empty or end in one.
        self._bare = prefix.removesuffix("/")
        self._inner = f"{self._bare}/"

    def __contains__(self, key: str) -> bool:
        return not self._bare or key == self._bare or key.startswith(self._inner)


class LoopWatch:
    """A watch as its caller holds it; delivers on the loop on which it was made."""

    __slots__ = ("_loop", "_on_change", "_prefix")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, prefix: str, on_change: OnChange
    ) -> None:
        self._loop = loop
        self._prefix = Prefix(prefix)
        self._on_change: OnChange | None = on_change

    @property
    def closed(self) -> bool:
        return self._on_change is None

    def close(self) -> None:
        self._on_change = None

    def select(self, content: dict[str, bytes]) -> dict[str, bytes]:
        """The part of a store's content that this watch is about."""
        return {key: value for key, value in content.items() if key in self._prefix}

    def post(self, changes: Iterable[KeyChange]) -> None:
        """Deliver what concerns this watch; callable from any thread."""
        batch = [change for change in changes if change.key in self._prefix]
        if batch:
            self.post_all(batch)

    def post_all(self, batch: list[KeyChange]) -> None:
        """Deliver a batch as it is, also an empty one."""
        try:
            # A context of its own: the caller's variables are none of the watcher's.
            self._loop.call_soon_threadsafe(self._deliver, batch, context=Context())
        except RuntimeError:
            # The loop was closed under the watch; nobody is left to be told.
            self.close()

    def _deliver(self, batch: list[KeyChange]) -> None:
        on_change = self._on_change
        if on_change is not None:
            on_change(batch)
