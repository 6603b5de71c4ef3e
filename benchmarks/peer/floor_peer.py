"""The floors: the same bytes on the same loop without any call machinery.

*framed*: headers packed and cut per item, no coroutine (handler ``plain``).  *task*: one
coroutine per stream and side, one future and one turn of the loop per item, no codec
(``yielding``); *codec*: the same with each item encoded and decoded, out of an async
generator.  *call*: a framed request answered in the read callback, one future per call.
*bytes*: a large payload stored and sent back, no frames.

A frame is u32 length of the body, u32 stream, u8 kind, body.  One write per turn.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import msgspec

from benchmarks.peer import channel
from benchmarks.peer.caller import Caller, override
from benchmarks.peer.handlers import yielding

HEADER = struct.Struct(">IIB")
COUNT = struct.Struct(">I")
SIZE = struct.Struct(">Q")
CALL, FRAMED, TASK, CODEC, ITEM, END = range(6)
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder().decode
# As an item travels: the wrapper around it is the same map in every peer of ours.
ITEM_BODY = encode({"data": {"token_ids": [5], "index": 0, "text": "hello"}})
FRAMES_PER_TURN = 64


class Framed(asyncio.Protocol):
    """Writes frames once per turn of the loop, and keeps the rest of what arrived."""

    def __init__(self) -> None:
        self._tail = b""
        self._out: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self.room = asyncio.Event()
        self.room.set()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    @override
    def pause_writing(self) -> None:
        self.room.clear()

    @override
    def resume_writing(self) -> None:
        self.room.set()

    def send(self, stream: int, kind: int, body: bytes = b"") -> None:
        """Write a frame at the end of this turn of the loop."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out += (HEADER.pack(len(body), stream, kind), body)

    def _flush(self) -> None:
        data = b"".join(self._out)
        self._out.clear()
        self.transport.write(data)


class Worker(Framed):
    """Answers every kind of request."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks: set[asyncio.Task[None]] = set()

    @override
    def data_received(self, data: bytes) -> None:
        if self._tail:
            data = self._tail + data
        position, end, unpack, take = 0, len(data), HEADER.unpack_from, self._take
        while position + HEADER.size <= end:
            length, stream, kind = unpack(data, position)
            start = position + HEADER.size
            if start + length > end:
                break
            position = start + length
            take(stream, kind, data[start:position])
        self._tail = data[position:]

    def _take(self, stream: int, kind: int, body: bytes) -> None:
        if kind == CALL:
            self.send(stream, END, body)
            return
        (n,) = COUNT.unpack(body)
        if kind == FRAMED:
            self._emit(stream, n)
        else:
            run = self._task if kind == TASK else self._codec
            task = self._loop.create_task(run(stream, n))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _emit(self, stream: int, n: int) -> None:
        """Some items of one stream, then the turn of the others."""
        if self.room.is_set():
            now = min(n, FRAMES_PER_TURN)
            self._send_items(stream, now)
            n -= now
        if n:
            self._loop.call_soon(self._emit, stream, n)
        else:
            self.send(stream, END)

    def _send_items(self, stream: int, count: int) -> None:
        """As `send` does, with no call per item: a floor must be low."""
        if not self._out:
            self._loop.call_soon(self._flush)
        out, pack, length = self._out, HEADER.pack, len(ITEM_BODY)
        for _ in range(count):
            out.append(pack(length, stream, ITEM))
            out.append(ITEM_BODY)

    async def _task(self, stream: int, n: int) -> None:
        for _ in range(n):
            await asyncio.sleep(0)
            self.send(stream, ITEM, ITEM_BODY)
            if not self.room.is_set():
                await self.room.wait()
        self.send(stream, END)

    async def _codec(self, stream: int, n: int) -> None:
        async for item in yielding({"n": n}, None):
            self.send(stream, ITEM, encode({"data": item}))
            if not self.room.is_set():
                await self.room.wait()
        self.send(stream, END)


class Stream:
    """What arrived for one request, and who waits for it."""

    __slots__ = ("bodies", "end", "ended", "waiter")

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.ended = False
        # For a reader of single items, and for one that only waits for the end.
        self.waiter: asyncio.Future[None] | None = None
        self.end: asyncio.Future[None] | None = None


class Client(Framed):
    """Puts what arrives where its reader looks for it, and wakes the reader."""

    def __init__(self) -> None:
        super().__init__()
        self._ids = itertools.count(1)
        self._streams: dict[int, Stream] = {}

    @override
    def data_received(self, data: bytes) -> None:
        # The loop of the worker with no call per frame: a floor must be low.
        if self._tail:
            data = self._tail + data
        position, end, size, unpack = 0, len(data), HEADER.size, HEADER.unpack_from
        streams = self._streams
        while position + size <= end:
            length, number, kind = unpack(data, position)
            start = position + size
            if start + length > end:
                break
            position = start + length
            stream = streams[number]
            if kind == ITEM:
                stream.bodies.append(data[start:position])
                waiter = stream.waiter
            else:
                waiter = self._end(number, data[start:position])
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        self._tail = data[position:]

    def _end(self, number: int, body: bytes) -> asyncio.Future[None] | None:
        stream = self._streams.pop(number)
        stream.ended = True
        if body:
            stream.bodies.append(body)
        return stream.end or stream.waiter

    def _request(self, kind: int, body: bytes) -> Stream:
        stream = Stream()
        number = next(self._ids)
        self._streams[number] = stream
        self.send(number, kind, body)
        return stream

    async def call(self, body: bytes) -> bytes:
        stream = self._request(CALL, body)
        stream.waiter = self._loop.create_future()
        await stream.waiter
        return stream.bodies[0]

    async def count(self, n: int) -> int:
        """The items of a stream that no coroutine reads."""
        stream = self._request(FRAMED, COUNT.pack(n))
        stream.end = self._loop.create_future()
        await stream.end
        return len(stream.bodies)

    async def read(self, kind: int, n: int) -> int:
        """The items of a stream, one by one in this coroutine."""
        stream = self._request(kind, COUNT.pack(n))
        items = 0
        while True:
            if not stream.bodies and not stream.ended:
                stream.waiter = self._loop.create_future()
                await stream.waiter
            bodies, stream.bodies = stream.bodies, []
            for body in bodies:
                if kind == CODEC:
                    decode(body)
                items += 1
            if stream.ended:
                return items


class Whole(asyncio.BufferedProtocol):
    """Receives payloads of an announced size into one buffer that is used again."""

    def __init__(self, arrived: Callable[[Whole], None]) -> None:
        self._arrived = arrived
        self._buffer = bytearray(SIZE.size)
        self._filled = 0

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    @override
    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._filled :]

    @override
    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled < SIZE.size:
            return
        size = SIZE.size + SIZE.unpack_from(self._buffer)[0]
        if size > len(self._buffer):
            larger = bytearray(size)
            larger[: self._filled] = self._buffer[: self._filled]
            self._buffer = larger
        if self._filled == size:
            self._filled = 0
            self.body = memoryview(self._buffer)[:size]
            self._arrived(self)


async def work(address: str) -> None:
    """Serve both ports until the input ends."""
    loop = asyncio.get_running_loop()

    def send_back(whole: Whole) -> None:
        whole.transport.write(whole.body)

    framed = await loop.create_server(Worker, "127.0.0.1", 0)
    whole = await loop.create_server(lambda: Whole(send_back), "127.0.0.1", 0)
    ports = (one.sockets[0].getsockname()[1] for one in (framed, whole))
    channel.say_ready(address=" ".join(map(str, ports)))
    async for _ in channel.commands():
        pass


class FloorCaller(Caller):
    """A connection for frames and one for whole payloads."""

    def __init__(self, address: str, yielding_kind: int = TASK) -> None:
        self._ports = [int(port) for port in address.split()]
        self._yielding_kind = yielding_kind
        self._echoed: asyncio.Future[int] | None = None
        self._bodies: dict[int, bytes] = {}

    async def connect(self) -> FloorCaller:
        connect = asyncio.get_running_loop().create_connection
        _, self._framed = await connect(Client, "127.0.0.1", self._ports[0])
        _, self._whole = await connect(
            lambda: Whole(self._arrived), "127.0.0.1", self._ports[1]
        )
        return self

    def _arrived(self, whole: Whole) -> None:
        assert self._echoed is not None
        self._echoed.set_result(len(whole.body) - SIZE.size)

    @override
    async def open(self, handler: str, request: Any) -> AsyncIterator[Any]:
        raise NotImplementedError("a floor has no streams that could be opened")

    @override
    async def read(self, handler: str, n: int) -> int:
        if handler == "plain":
            return await self._framed.count(n)
        return await self._framed.read(self._yielding_kind, n)

    @override
    async def call(self, request: Any) -> Any:
        if "text" not in request:
            return decode(await self._framed.call(encode(request)))
        text = request["text"]
        self._echoed = asyncio.get_running_loop().create_future()
        self._whole.transport.write(SIZE.pack(len(text)))
        self._whole.transport.write(self._body(text))
        return request if await self._echoed == len(text) else None

    def _body(self, text: str) -> bytes:
        """The bytes of a text, made once: no codec is part of this floor."""
        if len(text) not in self._bodies:
            self._bodies[len(text)] = text.encode()
        return self._bodies[len(text)]

    @override
    async def fresh(self) -> FloorCaller:
        return await FloorCaller(" ".join(map(str, self._ports))).connect()

    @override
    async def aclose(self) -> None:
        self._framed.transport.close()
        self._whole.transport.close()


async def connect(address: str) -> FloorCaller:
    """A connected caller; the last word of the address may say ``codec``."""
    ports = address.removesuffix(" codec")
    kind = CODEC if ports != address else TASK
    return await FloorCaller(ports, kind).connect()
