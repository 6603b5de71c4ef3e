"""nats-py request and reply, for calls with one answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import nats
from nats.aio.client import Client as Connection
from nats.aio.msg import Msg

from benchmarks.peer import channel
from benchmarks.peer.caller import METADATA, TIMEOUT_S, Caller, override

SUBJECT = "bench.echo"
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder().decode


async def _echo(message: Msg) -> None:
    await message.respond(encode(decode(message.data)))


async def work(address: str) -> None:
    """Answer until the input ends; the address is that of the server."""
    connection = await nats.connect(address)
    await connection.subscribe(SUBJECT, cb=_echo)
    await connection.flush()
    channel.say_ready(address=address)
    async for _ in channel.commands():
        pass
    await connection.close()


class NatsCaller(Caller):
    """One connection to the server."""

    unwrap = staticmethod(decode)

    def __init__(self, address: str, connection: Connection) -> None:
        self._address = address
        self._connection = connection

    @override
    async def open(self, handler: str, request: Any) -> AsyncIterator[Any]:
        raise NotImplementedError("a request over NATS has one answer, not a stream")

    @override
    async def call(self, request: Any) -> Any:
        answer = await self._connection.request(
            SUBJECT, encode(request), timeout=TIMEOUT_S, headers=METADATA
        )
        return decode(answer.data)

    @override
    async def fresh(self) -> NatsCaller:
        return await connect(self._address)

    @override
    async def aclose(self) -> None:
        await self._connection.close()


async def connect(address: str) -> NatsCaller:
    """A connected caller."""
    return NatsCaller(address, await nats.connect(address))
