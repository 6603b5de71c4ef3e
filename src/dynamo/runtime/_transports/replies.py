"""The answers of a worker that are complete and not yet out, on whatever lane.

Owns waiting for them, and breaking them off.  Knows no connection.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Reply(Protocol):
    """An answer that may outlive its request."""

    @property
    def undelivered(self) -> bool:
        """Complete, and not gone out as a whole."""

    def abort(self) -> None:
        """Close at once."""


class Replies:
    """The open answers of one worker, which outlive their requests.

    A complete answer may still wait for a slow reader, and then for the client to close.
    """

    def __init__(self) -> None:
        self._open: set[Reply] = set()
        self._waiting: list[asyncio.Future[None]] = []

    def add(self, reply: Reply) -> None:
        self._open.add(reply)

    def discard(self, reply: Reply) -> None:
        self._open.discard(reply)
        self.look_again()

    def look_again(self) -> None:
        """Something was written, or cannot be any more."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def delivered(self) -> None:
        """Wait until every complete answer has gone out."""
        while any(reply.undelivered for reply in self._open):
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter

    def abort(self) -> None:
        """Close all of them at once."""
        for reply in list(self._open):
            reply.abort()
