"""How a runtime opens connections: the interface, and the sockets that are the default.

`_transports` uses whatever network the configuration of a runtime names; `testing` has
one in memory.  Knows nothing of what travels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

P = TypeVar("P", bound="asyncio.BaseProtocol")


class Listening(Protocol):
    """An address on which connections are accepted."""

    @property
    def sockets(self) -> Sequence[Any]:
        """The sockets behind it, which a forked child must give up."""

    def close(self) -> None:
        """Accept no more; connections go on."""


class Network(Protocol):
    """Where connections come from.  Failures are OSErrors, as of sockets."""

    async def connect(
        self,
        loop: asyncio.AbstractEventLoop,
        factory: Callable[[], P],
        host: str,
        port: int,
    ) -> P:
        """Open a connection; returns its protocol once it stands."""

    async def listen(
        self,
        loop: asyncio.AbstractEventLoop,
        factory: Callable[[], asyncio.BaseProtocol],
        host: str,
        port: int,
        backlog: int,
    ) -> tuple[Listening, int]:
        """Accept connections; returns what closes it and the real port."""


class Sockets:
    """The network of the machine."""

    async def connect(
        self,
        loop: asyncio.AbstractEventLoop,
        factory: Callable[[], P],
        host: str,
        port: int,
    ) -> P:
        _, protocol = await loop.create_connection(factory, host, port)
        return protocol

    async def listen(
        self,
        loop: asyncio.AbstractEventLoop,
        factory: Callable[[], asyncio.BaseProtocol],
        host: str,
        port: int,
        backlog: int,
    ) -> tuple[Listening, int]:
        server = await loop.create_server(factory, host, port, backlog=backlog)
        return server, int(server.sockets[0].getsockname()[1])


SOCKETS = Sockets()
