"""Who is there: the interface of the discovery stores; no store, no I/O.

The discovery plane is a small key-value store.  A *bucket* (``v1/instances``) is a
top-level prefix, a *key* (``ns/comp/ep/{hex id}``) is relative to it, a *value* is a
record in JSON.  A backend moves bytes: what a record means, and which instance it
belongs to, is decided by ``instances``.

A *prefix* ends at a ``/``: ``a/b`` selects ``a/b`` and ``a/b/c``, never ``a/bc``.  One
trailing ``/`` makes no difference, and the empty prefix selects everything.

Modules: ``memory`` and ``file`` are backends (``directory`` is what ``file`` knows about
one directory, ``inotify`` tells that there is news), ``liveness`` is the thread that
keeps records alive, ``watching`` carries changes to the loop that asked for them,
``instances`` is the live view of one endpoint, ``model_cards`` waits for what its
instances' cards say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

__all__ = ["DiscoveryBackend", "KeyChange", "OnChange", "Watch"]


class KeyChange(NamedTuple):
    """A key that was put, or deleted (``value`` is None)."""

    key: str
    value: bytes | None


OnChange = Callable[[list[KeyChange]], None]


class Watch(Protocol):
    """A running watch.  Nothing is delivered after `close` on the watch's own loop."""

    def close(self) -> None:
        """End the watch: from any thread, any number of times, taking no lock."""


class DiscoveryBackend(Protocol):
    """One runtime's access to a discovery store, and its identity there.

    Construction does no I/O.  The methods may be awaited on any loop; after `aclose`,
    and in a forked child, they raise `RuntimeClosed`.
    """

    @property
    def kind(self) -> str:
        """``"file"`` or ``"mem"``."""

    @property
    def connection_id(self) -> int:
        """Instance id of everything this runtime registers; it never changes."""

    async def register(self, bucket: str, key: str, value: bytes) -> None:
        """Create the record unless the key exists, and keep it alive from now on.

        An existing key is a success and keeps its value, whoever wrote it.  A call that
        is cancelled may have registered all the same.

        Raises:
            DiscoveryError: the store refused.
        """

    async def unregister(self, bucket: str, key: str) -> None:
        """Delete the record for good.

        Raises:
            DiscoveryError: the store refused; with ``file`` also: there is none.
        """

    async def snapshot(self, bucket: str, prefix: str) -> dict[str, bytes]:
        """The live records under a prefix.

        Raises:
            DiscoveryError: the store cannot be read.
        """

    async def watch(self, bucket: str, prefix: str, on_change: OnChange) -> Watch:
        """Follow the live records under a prefix.

        ``on_change`` runs on the calling loop, in an empty context: once with the
        current content (perhaps empty) before this method returns, then with every
        difference, in order.

        Raises:
            DiscoveryError: the store cannot be read.
        """

    async def aclose(self) -> None:
        """Remove the own records, end all watches and threads.  Idempotent."""

    def leave(self, timeout_s: float) -> None:
        """Remove the own records and register no more, blocking the calling thread.

        For exit hooks and signal handlers: works from any thread, also while the loop
        is stuck or closed.  Watches go on.  Does nothing in a forked child.
        """
