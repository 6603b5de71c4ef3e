"""The worker's request port and its way back, against a client made by hand."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from raw_peers import (
    GOOD_PROLOGUE,
    PATH,
    SENTINEL,
    Peer,
    RawClient,
    address_of,
    body_of,
    make_runtime,
    open_descriptors,
    shut_down,
    until,
    within,
)

from dynamo.runtime import Context, DistributedRuntime
from dynamo.runtime._calls.ingress import _Run
from dynamo.runtime._transports.callhome_worker import ReplyConnection
from dynamo.runtime._transports.tcp_server import RequestServer
from dynamo.runtime._wire.callhome import (
    KILL,
    STOP,
    encode_input_frame,
    encode_request_payload,
)
from dynamo.runtime._wire.payload import encode_value
from dynamo.runtime._wire.two_part import TwoPart, encode_two_part

Handler = Callable[..., AsyncIterator[Any]]
Start = Callable[..., Awaitable[RawClient]]

FINAL = {"complete_final": True}


class Worker:
    """Our worker of the test and the client by hand in front of it."""

    runtime: DistributedRuntime
    client: RawClient
    serving: asyncio.Future[tuple[()]]

    @property
    def server(self) -> RequestServer:
        server = self.runtime._core._server
        assert server is not None
        return server

    @property
    def in_flight(self) -> int:
        return sum(life.in_flight for life in self.runtime._core._served)

    async def start(
        self,
        handler: Handler,
        receive_buffer_bytes: int,
        streamed: bool,
        settings: Any,
    ) -> None:
        self.runtime = make_runtime(**settings)
        endpoint = self.runtime.endpoint(PATH)
        if streamed:
            self.serving = endpoint.serve_bidirectional_endpoint(handler)
        else:
            self.serving = endpoint.serve_endpoint(handler)
        address = await within(address_of(self.runtime))
        self.client = RawClient(address, receive_buffer_bytes)

    async def close(self) -> None:
        self.client.close()
        await shut_down(self.runtime)
        await within(self.serving)


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker()
    yield worker
    await worker.close()


@pytest.fixture
def start(worker: Worker) -> Start:
    async def starting(
        handler: Handler = echo,
        *,
        receive_buffer_bytes: int = 0,
        streamed: bool = False,
        **settings: Any,
    ) -> RawClient:
        await worker.start(handler, receive_buffer_bytes, streamed, settings)
        return worker.client

    return starting


async def echo(request: Any) -> AsyncIterator[Any]:
    yield request


async def count(request: Any) -> AsyncIterator[Any]:
    for number in range(request):
        yield number


async def assert_serves(client: RawClient) -> None:
    home = await client.call("still here")
    assert body_of(await home.frame())["data"] == {"data": "still here"}
    assert [body_of(await home.frame()), await home.frame()] == [FINAL, SENTINEL]
    home.close()


# -------------------------------------------------------------- request frames and acks


async def test_pipelined_requests_are_acknowledged_in_their_order(start: Start) -> None:
    client = await start()
    connection = await client.connect()
    not_utf8 = struct.pack(">H", 2) + b"\xff\xfe" + struct.pack(">HI", 0, 0)
    await connection.send(
        client.request(1),
        client.frame(b"", "no/such/endpoint"),
        not_utf8,
        client.frame(b"", ""),
        client.request(2),
    )
    acks = [ack.text for ack in await connection.frames(5)]
    assert acks == [
        "",
        "Server unavailable: unknown endpoint no/such/endpoint",
        "Invalid endpoint path",
        "Server unavailable: unknown endpoint ",
        "",
    ]
    values = []
    for _ in range(2):
        home = await client.home()
        values.append(body_of((await home.frames(3))[2])["data"]["data"])
    assert sorted(values) == [1, 2]


async def test_a_frame_may_come_byte_by_byte(start: Start) -> None:
    client = await start()
    connection = await client.connect()
    for byte in client.request("slowly"):
        await connection.send(bytes([byte]))
        await asyncio.sleep(0)
    assert (await connection.frames(1))[0].text == ""
    home = await client.home()
    assert body_of((await home.frames(3))[2])["data"] == {"data": "slowly"}


async def test_a_frame_of_the_largest_size_passes(start: Start) -> None:
    client = await start(max_message_bytes=4096)
    connection = await client.connect()
    room = 4096 - len(client.request(b""))
    frame = client.request(b"x" * (room - 1))  # bin 16 takes one byte more than bin 8
    assert len(frame) == 4096
    await connection.send(frame)
    assert (await connection.frames(1))[0].text == ""


@pytest.mark.parametrize("sent_bytes", [0, 100_000])
async def test_a_frame_over_the_limit_is_refused_as_soon_as_its_lengths_are_there(
    start: Start, sent_bytes: int
) -> None:
    client = await start(max_message_bytes=4096)
    other = await client.connect()
    connection = await client.connect()
    frame = client.frame(bytes(1_000_000))
    await connection.send(frame[: len(frame) - 1_000_000 + sent_bytes])
    (ack,) = await connection.frames(1)
    assert ack.text == (
        f"Read error: message too large: {len(frame)} bytes (max: 4096 bytes)"
    )
    assert await connection.ended()
    await other.send(client.request())
    assert (await other.frames(1))[0].text == ""


async def test_the_refusal_of_a_large_frame_reaches_a_client_that_is_still_sending(
    start: Start,
) -> None:
    client = await start(max_message_bytes=4096)
    connection = await client.connect()
    await connection.send(client.frame(bytes(20_000_000)))
    (ack,) = await connection.frames(1)
    assert ack.text.startswith("Read error: message too large")
    connection.close()


async def test_a_client_that_stays_after_its_large_frame_is_cut_off_in_time(
    start: Start, worker: Worker
) -> None:
    client = await start(max_message_bytes=4096, frame_timeout_s=0.1)
    connection = await client.connect()
    await connection.send(client.frame(bytes(8192)))
    await connection.frames(1)
    await until(lambda: not worker.server._connections)


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "speaks TLS"),
        (b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n", "speaks HTTP"),
        (b"POST /v1/chat HTTP/1.1\r\n\r\n", "speaks HTTP"),
    ],
)
async def test_another_protocol_is_closed_at_once_with_one_line_for_the_operator(
    start: Start, caplog: pytest.LogCaptureFixture, greeting: bytes, words: str
) -> None:
    client = await start()
    connection = await client.connect()
    await connection.send(greeting)
    assert await connection.ended()
    (line,) = [one.getMessage() for one in caplog.records]
    assert words in line
    assert "127.0.0.1:" in line
    await assert_serves(client)


async def test_a_frame_that_stops_is_given_up_and_idle_connections_stay(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    client = await start(frame_timeout_s=0.1)
    idle = await client.connect()
    used = await client.connect()
    await used.send(client.request())
    await used.frames(1)
    stopped = await client.connect()
    await stopped.send(b"\x00")
    began = asyncio.get_running_loop().time()
    assert await stopped.ended()
    assert 0.09 < asyncio.get_running_loop().time() - began < 1
    assert "not completed within 0.1 s" in caplog.text
    for connection in (idle, used):
        await connection.send(client.request())
        assert (await connection.frames(1))[0].text == ""


async def test_a_large_frame_may_take_long_while_it_makes_progress(
    start: Start, worker: Worker
) -> None:
    client = await start(frame_timeout_s=0.1)
    connection = await client.connect()
    frame = client.request(bytes(200_000))
    await connection.send(frame[:1])
    await until(lambda: worker.server._connections)
    (served,) = worker.server._connections
    await until(lambda: served._deadline)
    first = served._deadline
    await connection.send(frame[1:100_000])
    await until(lambda: served._deadline is not first)
    assert served._deadline is not None
    await connection.send(frame[100_000:])
    assert (await connection.frames(1))[0].text == ""


async def test_a_client_that_reads_no_acks_is_not_read_from(
    start: Start, worker: Worker
) -> None:
    client = await start()
    connection = await client.connect()
    await until(lambda: worker.server._connections)
    (served,) = worker.server._connections
    assert served._transport is not None
    served._transport.set_write_buffer_limits(0)
    # Asks for acks of 10 KB each, so that their way back fills soon.
    refused = client.frame(b"", "x" * 10_000)

    async def send_all() -> None:
        for _ in range(40):
            await connection.send(refused * 100)

    sending = asyncio.get_running_loop().create_task(send_all())
    await until(lambda: not served.reading)
    acks = await connection.frames(4000)
    assert {ack.text for ack in acks} == {
        f"Server unavailable: unknown endpoint {'x' * 10_000}"
    }
    await within(sending)


async def test_a_thousand_half_open_connections_do_not_keep_others_out(
    start: Start, worker: Worker
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    try:
        client = await start()
        for _ in range(1000):
            await (await client.connect()).send(b"\x00")
        await until(lambda: len(worker.server._connections) == 1000)
        await assert_serves(client)
        client.close()
        await until(lambda: not worker.server._connections)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --------------------------------------------------------------------- the way back


@pytest.mark.parametrize("codec", ["msgpack", "json"])
async def test_an_answer_is_these_bytes(start: Start, codec: str) -> None:
    client = await start()
    connection = await client.connect()
    await connection.send(client.request({"i": 0, "s": "x"}, codec=codec))
    home = await client.home()

    def header(text: bytes) -> bytes:
        return struct.pack(">QQQ", len(text), 0, 0) + text

    def body(raw: bytes) -> bytes:
        return struct.pack(">QQQ", 0, len(raw), 0) + raw

    item = bytes.fromhex(
        "82a464617461 81a464617461 82a16900a173a178 ae636f6d706c6574655f66696e616cc2"
    )
    final = bytes.fromhex("81ae636f6d706c6574655f66696e616cc3")
    if codec == "json":
        item = b'{"data":{"data":{"i":0,"s":"x"}},"complete_final":false}'
        final = b'{"complete_final":true}'
    expected = (
        header(b'{"subject":"subject-of-call-0","stream_type":"response"}')
        + header(b'{"error":null}')
        + body(item)
        + body(final)
        + header(b'"sentinel"')
    )
    assert await home.bytes(len(expected)) == expected


async def test_the_worker_leaves_closing_a_complete_stream_to_the_client(
    start: Start, worker: Worker
) -> None:
    client = await start()
    home = await client.call(1)
    await home.frames(3)
    await home.send(STOP, KILL)  # late; must not turn into a reset of what was sent
    home.finish()
    assert await home.rest() == []
    await until(lambda: worker.in_flight == 0)


async def test_the_worker_closes_a_complete_stream_that_the_client_leaves_open(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dynamo.runtime._transports.callhome_worker._CLIENT_CLOSE_TIMEOUT_S", 0.05
    )
    client = await start()
    home = await client.call(1)
    assert len(await home.rest()) == 3


def until_some_is_left_unwritten(worker: Worker) -> Handler:
    """A handler whose answer fills the way to a reader that stalls, and a bit more."""

    async def fill(request: Any) -> AsyncIterator[Any]:
        yield "first"
        (reply,) = replies_of(worker)
        assert reply._transport is not None
        while not reply._transport.get_write_buffer_size():
            yield bytes(20_000)
            await asyncio.sleep(0)

    return fill


async def pass_time(duration_s: float) -> None:
    loop = asyncio.get_running_loop()
    later = loop.time() + duration_s
    await until(lambda: loop.time() >= later)


async def test_a_slow_reader_gets_the_end_of_a_stream_however_long_it_takes(
    start: Start, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time to close begins when all was written, not when it was queued."""
    monkeypatch.setattr(
        "dynamo.runtime._transports.callhome_worker._CLIENT_CLOSE_TIMEOUT_S", 0.05
    )
    client = await start(
        until_some_is_left_unwritten(worker), receive_buffer_bytes=65536
    )
    home = await client.call()
    await until(lambda: worker.in_flight == 0)
    await pass_time(0.2)
    *items, final, sentinel = await home.rest()
    assert len(items) > 2
    assert [body_of(final), sentinel] == [FINAL, SENTINEL]


async def test_a_shutdown_waits_until_a_slow_reader_has_the_end_of_its_stream(
    start: Start, worker: Worker
) -> None:
    client = await start(
        until_some_is_left_unwritten(worker),
        receive_buffer_bytes=65536,
        drain_timeout_s=5.0,
    )
    home = await client.call()
    await until(lambda: worker.in_flight == 0)
    worker.runtime.shutdown()
    await pass_time(0.1)
    assert not worker.serving.done()
    *_, final, sentinel = await home.rest()
    assert [body_of(final), sentinel] == [FINAL, SENTINEL]
    await within(worker.serving)


async def test_a_shutdown_does_not_wait_for_ever_for_a_reader_that_stalls(
    start: Start, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    client = await start(
        until_some_is_left_unwritten(worker),
        receive_buffer_bytes=65536,
        drain_timeout_s=0.1,
    )
    await client.call()
    await until(lambda: worker.in_flight == 0)
    worker.runtime.shutdown()
    await within(worker.serving, 1)
    assert "have not read the end of their answers" in caplog.text


async def test_a_shutdown_closes_complete_streams_that_clients_leave_open(
    start: Start, worker: Worker
) -> None:
    client = await start()
    home = await client.call(1)
    await home.frames(3)
    await until(lambda: worker.in_flight == 0)
    worker.runtime.shutdown()
    await within(worker.serving, 1)
    assert await home.rest() == []


# ----------------------------------------------------------- requests that make no sense


async def assert_answered_with(
    client: RawClient, frame: bytes, words: str, codec: str = "msgpack"
) -> None:
    """An error item, and the stream is complete."""
    connection = await client.connect()
    await connection.send(frame)
    assert (await connection.frames(1))[0].text == ""
    home = await client.home()
    _, prologue, item, final, sentinel = await home.frames(5)
    assert prologue == GOOD_PROLOGUE
    answer = body_of(item, codec)
    assert answer["complete_final"] is False
    assert answer["data"]["event"] == "error"
    assert answer["data"]["error"]["class"] == "InvalidRequest"
    assert words in answer["data"]["error"]["message"]
    assert [body_of(final, codec), sentinel] == [FINAL, SENTINEL]


@pytest.mark.parametrize("codec", ["msgpack", "json"])
async def test_a_request_for_another_context_is_answered_with_an_error(
    start: Start, codec: str
) -> None:
    client = await start()
    frame = client.request(codec=codec, response={"context": "somebody else's"})
    await assert_answered_with(client, frame, "somebody else's", codec)


async def test_a_request_in_an_unknown_codec_is_answered_in_json(start: Start) -> None:
    client = await start()
    frame = client.request(codec="pickle")
    await assert_answered_with(client, frame, "pickle", "json")


@pytest.mark.parametrize(("codec", "body"), [("msgpack", b"\xc1"), ("json", b"{]")])
async def test_a_body_that_cannot_be_decoded_is_answered_with_an_error(
    start: Start, codec: str, body: bytes
) -> None:
    client = await start()
    payload = encode_request_payload(client.control(codec=codec), body)
    await assert_answered_with(client, client.frame(payload), "", codec)


@pytest.mark.parametrize("codec", ["msgpack", "json"])
async def test_streamed_input_for_a_plain_endpoint_is_answered_with_an_error(
    start: Start, codec: str
) -> None:
    client = await start()
    control = client.control(codec=codec, request_type="many_in")
    payload = encode_request_payload(control, None)
    await assert_answered_with(
        client, client.frame(payload), "takes a single request", codec
    )


async def test_a_control_header_without_an_id_is_answered_with_an_error(
    start: Start,
) -> None:
    client = await start()
    payload = encode_request_payload(client.control(), b"\xc0")
    size = struct.unpack(">Q", payload[:8])[0]
    control = msgspec.json.decode(payload[24 : 24 + size])
    del control["id"]
    broken = encode_two_part(msgspec.json.encode(control), b"\xc0")
    await assert_answered_with(client, client.frame(broken), "id", "json")


@pytest.mark.parametrize(
    "payload",
    [b"", b"\x00" * 23, b"\xff" * 24, encode_two_part(b"{]", b""), encode_two_part()],
    ids=["empty", "short", "junk", "bad-json", "no-header"],
)
async def test_a_request_that_names_no_way_back_is_logged(
    start: Start, worker: Worker, caplog: pytest.LogCaptureFixture, payload: bytes
) -> None:
    client = await start()
    connection = await client.connect()
    await connection.send(client.frame(payload))
    assert (await connection.frames(1))[0].text == ""
    await until(lambda: worker.in_flight == 0)
    assert "unreadable request" in caplog.text
    assert "does not say where the answer goes" in caplog.text
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
    await assert_serves(client)


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:CLOSED",
        "tcp://127.0.0.1:1",
        "nowhere",
        "127.0.0.1:99999",
        "",
    ],
)
@pytest.mark.parametrize("readable", [True, False])
async def test_an_unreachable_client_is_named_in_a_warning_and_nothing_leaks(
    start: Start,
    worker: Worker,
    caplog: pytest.LogCaptureFixture,
    address: str,
    readable: bool,
) -> None:
    client = await start()
    connection = await client.connect()
    await until(lambda: worker.server._connections)
    before = open_descriptors()
    address = address.replace("CLOSED", str(closed_port()))
    response = {"address": address}
    if not readable:
        response["context"] = "another"
    await connection.send(client.request(response=response))
    assert (await connection.frames(1))[0].text == ""
    await until(lambda: worker.in_flight == 0)
    warned = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert address in warned[-1].getMessage()
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert open_descriptors() == before


async def test_a_client_whose_host_has_a_name_is_found(start: Start) -> None:
    client = await start()
    port = client.address.rpartition(":")[2]
    home = await client.call("named", response={"address": f"localhost:{port}"})
    assert body_of(await home.frame())["data"] == {"data": "named"}


# ------------------------------------------------------------------------ cancellation


class Watched:
    """A handler that sends one item, then keeps silent until its context is stopped."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.killed = False

    async def __call__(self, request: Any, context: Context) -> AsyncIterator[Any]:
        yield "first"
        try:
            await context.async_killed_or_stopped()
        finally:
            self.killed = context.is_killed()
            self.ended.set()


@pytest.mark.parametrize(
    ("signal", "killed"),
    [
        (STOP, False),
        (KILL, True),
        (encode_two_part(b'"sentinel"'), True),
        (encode_two_part(b'"who knows"'), True),
        (encode_two_part(body=b"data"), True),
        (encode_two_part(b'"stop"', b"data"), True),
        (encode_two_part(), True),
        (b"\xff" * 24, True),
        (struct.pack(">QQQ", 2**21, 0, 0), True),
    ],
    ids=[
        "stop",
        "kill",
        "sentinel",
        "unknown-word",
        "data",
        "stop-with-data",
        "empty-frame",
        "junk",
        "very-long-frame",
    ],
)
async def test_a_word_from_the_client_stops_or_kills_and_closes_at_once(
    start: Start, signal: bytes, killed: bool
) -> None:
    watched = Watched()
    client = await start(watched.__call__)
    home = await client.call()
    await home.frames(1)
    await home.send(signal)
    assert await home.ended()  # no final mark, no sentinel
    await within(watched.ended.wait())
    assert watched.killed is killed


async def test_a_reset_kills(start: Start) -> None:
    watched = Watched()
    client = await start(watched.__call__)
    home = await client.call()
    await home.frames(1)
    home.reset()
    await within(watched.ended.wait())
    assert watched.killed


async def test_nothing_is_kept_of_a_request_whose_caller_went(
    start: Start, worker: Worker
) -> None:
    def runs() -> list[_Run]:
        gc.collect()
        found = [one for one in gc.get_objects() if type(one) is _Run]
        return [one for one in found if all(one is not old for old in before)]

    # Those of other tests, whose loops were closed before their timers were due.
    before: list[_Run] = []
    before = runs()
    client = await start(Watched().__call__)
    home = await client.call()
    await home.frames(1)
    assert runs()
    home.reset()
    # Far sooner than the limit of a connection that is being closed.
    await until(lambda: not worker.in_flight and not runs(), 4)


async def test_a_client_that_went_without_a_word_is_noticed_by_a_silent_handler(
    start: Start,
) -> None:
    watched = Watched()
    client = await start(watched.__call__)
    home = await client.call()
    await home.frames(1)
    home.close()
    await within(watched.ended.wait(), 0.2)


async def test_a_client_that_closed_its_half_gets_the_whole_stream_and_then_the_end(
    start: Start,
) -> None:
    go_on = asyncio.Event()

    async def in_two_parts(request: Any, context: Context) -> AsyncIterator[Any]:
        yield 1
        await go_on.wait()
        yield context.is_stopped()

    client = await start(in_two_parts)
    home = await client.call()
    await home.frames(1)
    home.finish()
    probe = await home.frame()  # what tells a closed client from a half closed one
    assert probe == TwoPart(b"", b"")
    go_on.set()
    began = asyncio.get_running_loop().time()
    rest = [frame for frame in await home.rest() if frame != probe]
    assert [body_of(frame)["data"]["data"] for frame in rest[:-2]] == [False]
    assert [body_of(rest[-2]), rest[-1]] == [FINAL, SENTINEL]
    assert asyncio.get_running_loop().time() - began < 2


async def test_a_half_closed_client_of_a_call_that_waits_is_not_probed_too_early(
    start: Start, worker: Worker
) -> None:
    """Before the prologue a genuine client takes an empty frame for a malformed one."""
    go_on = asyncio.Event()

    async def wait(request: Any) -> AsyncIterator[Any]:
        yield request
        await go_on.wait()

    client = await start(wait, worker_pool_size=1)
    await client.call("runs")
    connection = await client.connect()
    await connection.send(client.request("waits"))
    home = await client.home()
    await home.frames(1)
    home.finish()
    await until(lambda: any(one._timer for one in replies_of(worker)))
    go_on.set()
    prologue, item, *_ = await home.frames(4)
    assert prologue == GOOD_PROLOGUE
    assert body_of(item)["data"] == {"data": "waits"}


def replies_of(worker: Worker) -> list[ReplyConnection]:
    runs = [run for life in worker.runtime._core._served for run in life._ingress._runs]
    return [run._reply for run in runs if isinstance(run._reply, ReplyConnection)]


# ---------------------------------------------------------------------- streamed input


class Duplex:
    """A handler that sends back what it gets, and remembers how its input ended."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.stopped = self.killed = False

    async def __call__(self, requests: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async for value in requests:
                yield value
        finally:
            self.stopped, self.killed = context.is_stopped(), context.is_killed()
            self.ended.set()


async def call_streamed(
    client: RawClient, codec: str = "msgpack"
) -> tuple[Peer[TwoPart], Peer[TwoPart]]:
    """A call with streamed input: the input's connection, and that of the answer."""
    connection = await client.connect()
    await connection.send(client.streamed_request(codec=codec))
    found = await client.home()
    assert await found.frames(1) == [
        TwoPart(b'{"subject":"the-input","stream_type":"request"}', b"")
    ]
    answer = await client.home()
    _, prologue = await answer.frames(2)
    assert prologue == GOOD_PROLOGUE
    return found, answer


def value(of: Any, codec: str = "msgpack") -> bytes:
    return encode_input_frame(encode_value(of, codec))


@pytest.mark.parametrize("codec", ["msgpack", "json"])
async def test_streamed_input_reaches_the_handler_and_ends_cleanly(
    start: Start, codec: str
) -> None:
    duplex = Duplex()
    client = await start(duplex.__call__, streamed=True)
    source, answer = await call_streamed(client, codec)
    await source.send(value(1, codec), value("two", codec))
    items = [body_of(frame, codec) for frame in await answer.frames(2)]
    assert [one["data"]["data"] for one in items] == [1, "two"]
    await source.send(value(3, codec), encode_two_part(b'"sentinel"'))
    assert body_of(await answer.frame(), codec)["data"] == {"data": 3}
    assert [body_of(await answer.frame(), codec), await answer.frame()] == [
        FINAL,
        SENTINEL,
    ]
    assert not duplex.stopped
    assert await source.ended()


@pytest.mark.parametrize(
    ("said", "killed"),
    [
        (STOP, False),
        (KILL, True),
        (encode_two_part(b'"what"'), True),
        (encode_two_part(), True),
        (encode_two_part(body=b"\xc1"), True),
        (encode_two_part(b"{}", b"\xc0"), True),
        (b"\xff" * 24, True),
        (None, True),
    ],
    ids=["stop", "kill", "word", "empty", "undecodable", "both", "junk", "fin"],
)
async def test_input_that_is_cancelled_or_cut_stops_the_call(
    start: Start, said: bytes | None, killed: bool
) -> None:
    duplex = Duplex()
    client = await start(duplex.__call__, streamed=True)
    source, answer = await call_streamed(client)
    await source.send(value(1))
    await answer.frames(1)
    if said is None:
        source.finish()
    else:
        await source.send(said)
    await within(duplex.ended.wait())
    assert (duplex.stopped, duplex.killed) == (True, killed)
    assert await answer.ended()  # no final mark, no sentinel
    assert await source.ended()


async def test_input_that_nobody_reads_is_not_taken_from_the_socket(
    start: Start, worker: Worker
) -> None:
    go_on = asyncio.Event()

    async def late(requests: Any) -> AsyncIterator[Any]:
        await go_on.wait()
        count = 0
        async for _ in requests:
            count += 1
        yield count

    client = await start(late, streamed=True)
    source, answer = await call_streamed(client)
    sent = 0

    async def flood() -> None:
        nonlocal sent
        for _ in range(300):
            await source.send(value(bytes(100_000)))
            sent += 1
        await source.send(encode_two_part(b'"sentinel"'))

    flooding = asyncio.get_running_loop().create_task(flood())
    assert await stands_still(lambda: sent) < 200
    go_on.set()
    assert body_of(await answer.frame())["data"] == {"data": 300}
    await within(flooding)


async def test_a_single_request_for_a_streamed_endpoint_is_answered_with_an_error(
    start: Start,
) -> None:
    client = await start(Duplex().__call__, streamed=True)
    await assert_answered_with(client, client.request(1), "takes a stream of requests")


async def test_streamed_input_without_an_address_is_logged(
    start: Start, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    client = await start(Duplex().__call__, streamed=True)
    connection = await client.connect()
    control = client.control(request_type="many_in")
    await connection.send(client.frame(encode_request_payload(control, None)))
    assert (await connection.frames(1))[0].text == ""
    await until(lambda: "where its input comes from" in caplog.text)
    await until(lambda: worker.in_flight == 0)


# ------------------------------------------------------------------------ back-pressure


async def stands_still(number: Callable[[], int]) -> int:
    """A number that does not change for a while."""
    loop = asyncio.get_running_loop()
    last, since = number(), loop.time()

    def still() -> bool:
        nonlocal last, since
        if number() != last:
            last, since = number(), loop.time()
        return loop.time() - since > 0.2

    await until(still)
    return last


async def test_a_reader_that_stalls_stops_the_handler_and_can_go_on(
    start: Start, worker: Worker
) -> None:
    produced = 0

    async def flood(request: Any) -> AsyncIterator[Any]:
        nonlocal produced
        while True:
            produced += 1
            yield bytes(100_000)

    client = await start(flood, receive_buffer_bytes=65536)
    home = await client.call()
    stopped_at = await stands_still(lambda: produced)
    assert 2 <= stopped_at <= 150
    (reply,) = replies_of(worker)
    assert reply._transport is not None
    assert reply._transport.get_write_buffer_size() <= 256 * 1024 + 100_100
    await home.frames(stopped_at)
    await until(lambda: produced > stopped_at)
    await home.send(STOP)
    await until(lambda: worker.in_flight == 0)


async def test_a_handler_that_waits_for_a_stalled_reader_is_woken_by_a_stop(
    start: Start, worker: Worker
) -> None:
    closed = asyncio.Event()

    async def flood(request: Any) -> AsyncIterator[Any]:
        try:
            while True:
                yield bytes(100_000)
        finally:
            closed.set()

    client = await start(flood, receive_buffer_bytes=65536)
    home = await client.call()
    await until(lambda: any(reply.paused for reply in replies_of(worker)))
    await home.send(STOP)
    await within(closed.wait())
    await until(lambda: worker.in_flight == 0)


# -------------------------------------------------------------------------- many calls


async def test_nothing_is_left_of_many_calls(start: Start, worker: Worker) -> None:
    client = await start(count)
    connection = await client.connect()
    await until(lambda: worker.server._connections)
    before = open_descriptors()

    async def read(home: Peer[TwoPart]) -> int:
        frames = await home.frames(7)
        home.close()
        return len(frames)

    for _ in range(5):
        await connection.send(*(client.request(3) for _ in range(40)))
        await connection.frames(40)
        homes = [await client.home() for _ in range(40)]
        assert await asyncio.gather(*map(read, homes)) == [7] * 40
    await until(lambda: worker.in_flight == 0)
    await until(lambda: open_descriptors() == before)


async def test_runtimes_of_one_loop_share_a_fixed_port_also_when_started_together() -> (
    None
):
    port = closed_port()
    runtimes = [make_runtime(rpc_port=port) for _ in range(3)]
    serving = [one.endpoint(PATH).serve_endpoint(echo) for one in runtimes]
    clients = []
    for runtime in runtimes:
        address = await within(address_of(runtime))
        assert address.port == port
        client = RawClient(address)
        clients.append(client)
    for runtime, client in zip(runtimes, clients, strict=True):
        await assert_serves(client)
        client.close()
        await shut_down(runtime)
    await within(asyncio.gather(*serving))
    with pytest.raises(ConnectionRefusedError):
        await clients[0].connect()


async def test_a_port_that_is_taken_is_an_error_that_names_the_settings() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        runtime = make_runtime(rpc_port=port)
        serving = runtime.endpoint(PATH).serve_endpoint(echo)
        with pytest.raises(Exception, match="DYN_TCP_RPC_HOST, DYN_TCP_RPC_PORT"):
            await within(serving)
        await shut_down(runtime)
