"""What a client process must offer so that the loads can be run against its peer."""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import override as override
else:

    def override(method):
        return method


# Sent with every call by every peer that knows such things.
METADATA = {
    "tenant": "bench",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
}
TIMEOUT_S = 30.0


class Caller(abc.ABC):
    """A client connected to the worker of its peer."""

    unwrap: Callable[[Any], Any]
    """Makes the value that a user works with out of what the stream delivers."""

    @abc.abstractmethod
    async def open(self, handler: str, request: Any) -> AsyncIterator[Any]:
        """Start a stream."""

    @abc.abstractmethod
    async def fresh(self) -> Caller:
        """A client that shares nothing with this one, connected as if just started."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Leave nothing open."""

    async def find(self, handler: str, count: int) -> None:
        """Wait until that many instances are known; only where there is discovery."""
        raise NotImplementedError("this peer has no discovery")

    async def read(self, handler: str, n: int) -> int:
        """Read a whole stream of ``n`` items and return how many came."""
        unwrap = self.unwrap
        count = 0
        async for item in await self.open(handler, {"n": n}):
            unwrap(item)
            count += 1
        return count

    async def call(self, request: Any) -> Any:
        """Have the request echoed, as the one item of a stream read to its end."""
        answer = None
        async for item in await self.open("echo", request):
            answer = self.unwrap(item)
        return answer
