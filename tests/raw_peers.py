"""Clients and workers by hand: sockets and frames, nothing of the call machinery.

They hold one end of the genuine lane in the test's own loop and do exactly what a test
says, also what no well-behaved peer would do.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Coroutine
from typing import Any, Generic, TypeVar

import msgspec

from dynamo.runtime import DistributedRuntime
from dynamo.runtime._config import from_env
from dynamo.runtime._discovery.memory import MemoryBackend, MemoryStore
from dynamo.runtime._transports import CallRequest
from dynamo.runtime._wire.callhome import (
    AckReader,
    AckReceived,
    ConnectionInfo,
    ControlHeader,
    RequestReader,
    RequestReceived,
    RequestTooLarge,
    decode_request_payload,
    encode_ack,
    encode_handshake,
    encode_prologue,
    encode_request_frame,
    encode_request_payload,
)
from dynamo.runtime._wire.framing import FrameReader
from dynamo.runtime._wire.payload import encode_value
from dynamo.runtime._wire.records import (
    INSTANCES,
    EndpointName,
    EndpointRecord,
    TcpAddress,
    decode_record,
    encode_record,
    split_host_port,
    split_tcp_address,
)
from dynamo.runtime._wire.two_part import TwoPart, TwoPartReader, encode_two_part
from dynamo.runtime.errors import Refused
from dynamo.runtime.testing import until as until

T = TypeVar("T")
Frame = TypeVar("Frame")

LIMIT_S = 5.0
PATH = "some.where.gen"
NAME = EndpointName("some", "where", "gen")
MAX_BYTES = 1 << 26
RESET_ON_CLOSE = struct.pack("ii", 1, 0)

SENTINEL = TwoPart(b'"sentinel"', b"")
GOOD_PROLOGUE = TwoPart(b'{"error":null}', b"")


async def within(work: Awaitable[T], limit_s: float = LIMIT_S) -> T:
    return await asyncio.wait_for(work, limit_s)


def open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def make_runtime(
    store: MemoryStore | None = None, **settings: Any
) -> DistributedRuntime:
    """A runtime on the running loop, in a store that can be shared.

    Nothing but the lanes comes from the environment.  Without, calls between runtimes of
    the test's process go over sockets.
    """
    lanes = {"DYN_RUNTIME_LANES": os.environ.get("DYN_RUNTIME_LANES", "duplex")}
    brief = {"drain_timeout_s": 0.5, "cancel_grace_s": 0.2, "close_timeout_s": 1.0}
    config = dataclasses.replace(from_env(lanes, "mem", "tcp"), **(brief | settings))
    runtime = DistributedRuntime.__new__(DistributedRuntime)
    runtime._start(asyncio.get_running_loop(), config)
    if store is not None:
        runtime._core.backend = MemoryBackend(store)
    return runtime


async def shut_down(runtime: DistributedRuntime) -> None:
    runtime.shutdown()
    await within(runtime._core.closed())


async def address_of(runtime: DistributedRuntime) -> TcpAddress:
    """Where the one endpoint that a runtime serves is found."""
    while True:
        records = await runtime._core.backend.snapshot(INSTANCES, "")
        if records:
            return split_tcp_address(decode_record(*records.values()).address)
        await asyncio.sleep(0.002)


def body_of(frame: TwoPart | None, codec: str = "msgpack") -> Any:
    """What the body of a data frame says."""
    assert frame is not None
    assert frame.header == b""
    decode = msgspec.json.decode if codec == "json" else msgspec.msgpack.decode
    return decode(frame.body)


async def refusal_of(caller: DistributedRuntime, record: EndpointRecord) -> Refused:
    """What one hears who has not heard yet that an instance leaves.

    At first he is served.
    """
    told: asyncio.Queue[Exception | None] = asyncio.Queue()

    class Asking:
        def on_reached(self) -> None:
            told.put_nowait(None)

        def on_started(self) -> None:
            # Then it may not have been told that it was reached.
            told.put_nowait(None)

        def on_lost(self, text: str) -> None:
            told.put_nowait(None)

        def on_refused(self, error: Exception, *, inhibits: bool) -> None:
            told.put_nowait(error)

    while True:
        request = CallRequest(call_id="late", value=None, packed=b"\xc0", metadata={})
        handle = await caller._core.lane.open(record, request, Asking())  # type: ignore[arg-type]
        error = await told.get()
        if isinstance(error, Refused):
            return error
        handle.kill()


class Peer(Generic[Frame]):
    """One end of a connection that speaks in frames; reads only when it is asked to."""

    def __init__(self, sock: socket.socket, frames: FrameReader[Frame]) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._loop = asyncio.get_running_loop()
        self._frames = frames
        self._ready: deque[Frame] = deque()

    async def send(self, *pieces: bytes) -> None:
        await within(self._loop.sock_sendall(self.socket, b"".join(pieces)))

    async def bytes(self, count: int) -> bytes:
        """So many bytes as they come."""
        found = b""
        while len(found) < count:
            data = await within(self._loop.sock_recv(self.socket, count - len(found)))
            assert data, f"the connection ended after {found!r}"
            found += data
        return found

    async def frame(self, limit_s: float | None = LIMIT_S) -> Frame | None:
        """The next frame, or None at the end of the connection."""
        while not self._ready:
            receiving = self._loop.sock_recv(self.socket, 65536)
            data = await asyncio.wait_for(receiving, limit_s)
            if not data:
                return None
            self._ready.extend(self._frames.feed(data))
        return self._ready.popleft()

    async def frames(self, count: int) -> list[Frame]:
        """So many frames."""
        found: list[Frame] = []
        while len(found) < count:
            frame = await self.frame()
            assert frame is not None, f"the connection ended after {found}"
            found.append(frame)
        return found

    async def rest(self) -> list[Frame]:
        """All frames to the end of the connection."""
        found = []
        while (frame := await self.frame()) is not None:
            found.append(frame)
        return found

    async def ended(self) -> bool:
        """Whether the other side closes, in whatever way, without another frame."""
        try:
            return await self.frame() is None
        except ConnectionError:
            return True

    async def is_reset(self) -> bool:
        """Whether the other side closes with a reset, without another frame."""
        try:
            await self.frame()
        except ConnectionResetError:
            return True
        return False

    def finish(self) -> None:
        """Close our half."""
        self.socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.close()

    def close(self) -> None:
        self.socket.close()


def listening_socket(port: int = 0, receive_buffer_bytes: int = 0) -> socket.socket:
    sock = socket.socket()
    if receive_buffer_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen(128)
    sock.setblocking(False)
    return sock


async def connected_socket(host: str, port: int) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    try:
        await within(asyncio.get_running_loop().sock_connect(sock, (host, port)))
    except BaseException:
        sock.close()
        raise
    return sock


class RawClient:
    """Request connections to one worker, and a listener to which it calls home."""

    def __init__(self, worker: TcpAddress, receive_buffer_bytes: int = 0) -> None:
        self.worker = worker
        self._listener = listening_socket(0, receive_buffer_bytes)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._peers: list[Peer[Any]] = []
        self._numbers = itertools.count()

    async def connect(self) -> Peer[AckReceived]:
        sock = await connected_socket(self.worker.host, self.worker.port)
        peer = Peer(sock, AckReader())
        self._peers.append(peer)
        return peer

    def control(self, **changes: Any) -> ControlHeader:
        call_id = changes.pop("id", f"call-{next(self._numbers)}")
        response = {
            "address": self.address,
            "subject": f"subject-of-{call_id}",
            "context": call_id,
            "stream_type": "response",
        }
        response |= changes.pop("response", {})
        fields: dict[str, Any] = {
            "id": call_id,
            "codec": "msgpack",
            "response": ConnectionInfo(**response),
        }
        return ControlHeader(**(fields | changes))

    def request(self, value: object = None, **changes: Any) -> bytes:
        """A request frame; keywords change its control header."""
        control = self.control(**changes)
        body = encode_value(value, "json" if control.codec == "json" else "msgpack")
        return self.frame(encode_request_payload(control, body))

    def streamed_request(self, **changes: Any) -> bytes:
        """A request whose input comes on a connection of its own."""
        control = self.control(request_type="many_in", **changes)
        control.request_stream = ConnectionInfo(
            self.address, "the-input", control.id, "request"
        )
        return self.frame(encode_request_payload(control, None))

    def frame(self, payload: bytes, path: str | None = None) -> bytes:
        """A request frame around whatever payload."""
        path = self.worker.path if path is None else path
        return encode_request_frame(path, {}, payload, max_message_bytes=MAX_BYTES)

    async def home(self) -> Peer[TwoPart]:
        """The next connection on which the worker calls home."""
        loop = asyncio.get_running_loop()
        sock, _ = await within(loop.sock_accept(self._listener))
        peer = Peer(sock, TwoPartReader())
        self._peers.append(peer)
        return peer

    async def call(self, value: object = None, **changes: Any) -> Peer[TwoPart]:
        """Make a call; returns its response connection behind the good prologue."""
        connection = await self.connect()
        await connection.send(self.request(value, **changes))
        home = await self.home()
        handshake, prologue = await home.frames(2)
        assert b"subject-of-" in handshake.header
        assert prologue == GOOD_PROLOGUE
        return home

    def close(self) -> None:
        self._listener.close()
        for peer in self._peers:
            peer.close()


class RawWorker:
    """A worker's port; what comes there is answered by the test.

    Attributes:
        connections: Every request connection that was opened, in order.
    """

    def __init__(
        self, store: MemoryStore, *, instance_id: int, codec: str, ours: bool
    ) -> None:
        self.connections: list[Peer[RequestReceived | RequestTooLarge]] = []
        self.instance_id = instance_id
        self._store = store
        self._codec = codec
        self._ours = ours
        self._requests: asyncio.Queue[RawRequest] = asyncio.Queue()
        self._peers: list[Peer[TwoPart]] = []
        self._listener: socket.socket | None = None
        self._tasks: dict[object, asyncio.Task[None]] = {}
        self.port = 0

    def start(self) -> None:
        """Listen (again, on the same port), and be found."""
        self.listen()
        self.register(f"127.0.0.1:{self.port}/{self.instance_id:x}/gen")

    def listen(self) -> None:
        self._listener = listening_socket(self.port)
        self.port = self._listener.getsockname()[1]
        loop = asyncio.get_running_loop()
        # Not `sock_accept`, which loses what it accepted while it is being cancelled.
        loop.add_reader(self._listener, self._accept, self._listener)

    @property
    def record(self) -> EndpointRecord:
        return EndpointRecord(
            name=NAME,
            instance_id=self.instance_id,
            transport_kind="tcp",
            address=self._address,
            codec=self._codec,
            ours=self._ours,
        )

    def register(self, address: str) -> None:
        self._address = address
        self._store.create(INSTANCES, self.record.key, encode_record(self.record))

    def unregister(self) -> None:
        self._store.delete([(INSTANCES, self.record.key)])

    def _spawn(self, key: object, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[key] = asyncio.get_running_loop().create_task(work)

    def _accept(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        sock.setblocking(False)
        peer = Peer(sock, RequestReader(MAX_BYTES))
        self.connections.append(peer)
        self._spawn(peer, self._read(peer))

    async def _read(self, peer: Peer[RequestReceived | RequestTooLarge]) -> None:
        try:
            while (event := await peer.frame(None)) is not None:
                assert isinstance(event, RequestReceived)
                self._requests.put_nowait(RawRequest(self, peer, event))
        except ConnectionError:
            pass

    async def request(self) -> RawRequest:
        """The next request."""
        return await within(self._requests.get())

    async def dial(self, address: str) -> Peer[TwoPart]:
        """A connection to a client's listener, without a word."""
        peer = Peer(await connected_socket(*split_host_port(address)), TwoPartReader())
        self._peers.append(peer)
        return peer

    async def drop(self, connection: Peer[Any], *, reset: bool = False) -> None:
        """Close a request connection."""
        await self._end(connection)
        if reset:
            connection.reset()
        connection.close()

    async def gone(self, connection: Peer[Any]) -> None:
        """Wait until the client has closed a request connection."""
        await within(asyncio.wait({self._tasks[connection]}))

    async def stop_listening(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    async def _end(self, key: object) -> None:
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def close(self) -> None:
        await self.stop_listening()
        for connection in self.connections:
            await self.drop(connection)
        for peer in self._peers:
            peer.close()


class RawRequest:
    """A request that reached a worker by hand."""

    def __init__(
        self, worker: RawWorker, connection: Peer[Any], event: RequestReceived
    ) -> None:
        self.path = event.path
        self.headers = event.headers
        self.control, self.body = decode_request_payload(event.payload)
        self._worker = worker
        self.connection = connection

    async def ack(self, text: str = "") -> None:
        await self.connection.send(encode_ack(text))

    async def dial(self, *after: bytes) -> Peer[TwoPart]:
        """Call home with the handshake, and whatever comes after it."""
        home = await self._worker.dial(self.control.response.address)
        handshake = encode_handshake(self.control.response.subject)
        await home.send(handshake, *after)
        return home

    async def accept(self, *after: bytes) -> Peer[TwoPart]:
        """Acknowledge, call home, and start the stream."""
        await self.ack()
        return await self.dial(encode_prologue(), *after)


def item(value: object, codec: str = "msgpack", **more: object) -> bytes:
    """The frame of one plain item; keywords go beside its data."""
    return data_frame({"data": {"data": value} | more, "complete_final": False}, codec)


def data_frame(body: object, codec: str = "msgpack") -> bytes:
    """A frame with whatever body."""
    encode = msgspec.json.encode if codec == "json" else msgspec.msgpack.encode
    return encode_two_part(body=encode(body))
