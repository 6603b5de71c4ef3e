"""grpc.aio: the handlers as unary-stream methods, bytes on the wire made by msgspec."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec

from benchmarks.peer import channel
from benchmarks.peer.caller import METADATA, TIMEOUT_S, Caller, override
from benchmarks.peer.handlers import HANDLERS

SERVICE = "bench"
UNLIMITED = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder().decode


async def work(address: str) -> None:
    """Serve every handler until the input ends."""
    server = grpc.aio.server(options=UNLIMITED)
    methods = {
        name: grpc.unary_stream_rpc_method_handler(handler, decode, encode)
        for name, handler in HANDLERS.items()
    }
    handlers = grpc.method_handlers_generic_handler(SERVICE, methods)
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel.say_ready(address=f"127.0.0.1:{port}")
    async for _ in channel.commands():
        pass
    await server.stop(0)


class GrpcCaller(Caller):
    """One channel."""

    unwrap = staticmethod(decode)

    def __init__(self, address: str) -> None:
        # Channels to one address share a connection unless told otherwise.
        own = [("grpc.use_local_subchannel_pool", 1)]
        self._address = address
        self._channel = grpc.aio.insecure_channel(address, options=UNLIMITED + own)
        self._methods = {
            name: self._channel.unary_stream(f"/{SERVICE}/{name}", encode)
            for name in HANDLERS
        }
        self._metadata = tuple(METADATA.items())

    async def connected(self) -> GrpcCaller:
        await self._channel.channel_ready()
        return self

    @override
    async def open(self, handler: str, request: Any) -> AsyncIterator[Any]:
        call = self._methods[handler](
            request, metadata=self._metadata, timeout=TIMEOUT_S
        )
        items: AsyncIterator[Any] = call.__aiter__()
        return items

    @override
    async def fresh(self) -> GrpcCaller:
        return GrpcCaller(self._address)

    @override
    async def aclose(self) -> None:
        await self._channel.close()


async def connect(address: str) -> GrpcCaller:
    """A caller whose channel is ready."""
    return await GrpcCaller(address).connected()
