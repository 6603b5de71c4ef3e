"""Our client, its pool and its response listener, against a worker made by hand."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from raw_peers import (
    NAME,
    PATH,
    Peer,
    RawRequest,
    RawWorker,
    data_frame,
    item,
    listening_socket,
    make_runtime,
    open_descriptors,
    shut_down,
    until,
    within,
)

from dynamo.runtime import Client, Context, DistributedRuntime
from dynamo.runtime._calls.streams import AsyncResponseStream
from dynamo.runtime._discovery.memory import MemoryStore
from dynamo.runtime._transports.callhome_client import CallhomeClientLane
from dynamo.runtime._transports.request_pool import RequestConnection
from dynamo.runtime._wire.callhome import (
    KILL,
    PROBE,
    SENTINEL,
    STOP,
    encode_final_frame,
    encode_handshake,
    encode_prologue,
)
from dynamo.runtime._wire.records import INSTANCES, EndpointRecord, encode_record
from dynamo.runtime._wire.two_part import TwoPart, encode_two_part
from dynamo.runtime.errors import (
    CallError,
    CallTimeout,
    ConnectionFailed,
    HandlerRefused,
    InvalidArgument,
    MessageTooLarge,
    Overloaded,
    Refused,
    RemoteError,
    RuntimeClosed,
    StreamBroken,
    WorkerLost,
)

TRANSPORTS = "dynamo.runtime._transports"
FINAL = encode_final_frame("msgpack")
GOOD = encode_prologue()


class Cluster:
    """Our client of the test, and workers by hand."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.workers: list[RawWorker] = []
        self.runtime: DistributedRuntime
        self.client: Client

    async def start(self, **settings: Any) -> None:
        self.runtime = make_runtime(self.store, **settings)
        self.client = await self.runtime.endpoint(PATH).client()

    def worker(
        self, instance_id: int = 1, *, codec: str = "msgpack", ours: bool = False
    ) -> RawWorker:
        worker = RawWorker(self.store, instance_id=instance_id, codec=codec, ours=ours)
        self.workers.append(worker)
        return worker

    async def started(self, instance_id: int = 1, **more: Any) -> RawWorker:
        """A worker that the client has seen."""
        worker = self.worker(instance_id, **more)
        worker.start()
        await until(lambda: instance_id in self.client.instance_ids())
        return worker

    @property
    def lane(self) -> CallhomeClientLane:
        return self.runtime._core.lane.callhome

    def call(
        self, request: Any = None, **more: Any
    ) -> asyncio.Future[AsyncResponseStream]:
        return self.client.round_robin(request, annotated=False, **more)

    async def close(self) -> None:
        for worker in self.workers:
            await worker.close()
        await shut_down(self.runtime)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.close()


async def items_of(stream: AsyncResponseStream) -> list[Any]:
    return [one async for one in stream]


async def outcome_of(
    call: asyncio.Future[AsyncResponseStream],
) -> tuple[list[Any], ValueError | None]:
    """The items of a stream, and the error in which it ended."""
    stream = await within(call)
    found: list[Any] = []
    try:
        while True:
            found.append(await within(stream.__anext__()))
    except StopAsyncIteration:
        return found, None
    except ValueError as error:
        return found, error


async def read_all(call: asyncio.Future[AsyncResponseStream]) -> list[Any]:
    return await within(items_of(await within(call)))


async def error_of(call: asyncio.Future[AsyncResponseStream]) -> CallError:
    with pytest.raises(CallError) as caught:
        await within(call)
    return caught.value


async def serve_one(cluster: Cluster, worker: RawWorker, value: Any = "fine") -> None:
    """A call that goes as it should."""
    call = cluster.call(context=Context("as it should be"))
    while (request := await worker.request()).control.id != "as it should be":
        pass  # of a call that was given up before
    await request.accept(item(value), FINAL, SENTINEL)
    assert await read_all(call) == [value]


# ---------------------------------------------------------------- acks and calls home


async def test_the_request_says_where_the_answer_is_wanted(cluster: Cluster) -> None:
    await cluster.start()
    worker = await cluster.started()
    call = cluster.call({"a": 1}, context=Context("the id", metadata={"k": "v"}))
    request = await worker.request()
    assert request.path == "1/gen"
    assert request.headers["request-id"] == "the id"
    control = request.control
    assert (control.id, control.response.context) == ("the id", "the id")
    assert control.metadata == {"k": "v"}
    assert control.codec == "msgpack"
    assert msgspec.msgpack.decode(request.body or b"") == {"a": 1}
    assert control.response.address == cluster.lane.listener.address
    assert control.response.stream_type == "response"
    await request.accept(FINAL)
    assert await read_all(call) == []


async def test_a_worker_may_call_home_before_it_acknowledges(cluster: Cluster) -> None:
    await cluster.start()
    worker = await cluster.started()
    call = cluster.call()
    first = await worker.request()
    await first.dial(GOOD, item(1), FINAL, SENTINEL)
    assert await read_all(call) == [1]
    # The ack is owed still, and is not taken for that of the next request.
    call = cluster.call()
    second = await worker.request()
    await first.ack("Server overloaded: worker at capacity")
    await second.accept(item(2), FINAL)
    assert await read_all(call) == [2]
    assert len(worker.connections) == 1


async def test_the_call_home_may_come_long_after_the_ack(cluster: Cluster) -> None:
    await cluster.start(request_timeout_s=0.05)
    worker = await cluster.started()
    call = cluster.call()
    request = await worker.request()
    await request.ack()
    done, _ = await asyncio.wait({call}, timeout=0.15)
    assert not done
    await request.dial(GOOD, item(1), FINAL)
    assert await read_all(call) == [1]


async def test_an_ack_that_never_comes_fails_the_call_and_retires_the_connection(
    cluster: Cluster,
) -> None:
    await cluster.start(request_timeout_s=0.1, inhibited_s=0)
    worker = await cluster.started()
    error = await error_of(cluster.call())
    assert isinstance(error, CallTimeout)
    assert str(error) == (
        f"DeadlineExceeded: TCP request to 127.0.0.1:{worker.port} timed out"
    )
    assert (error.phase, error.retryable) == ("ack", False)
    first = await worker.request()
    await worker.gone(first.connection)
    await serve_one(cluster, worker)


async def test_a_worker_that_has_called_home_owes_no_ack(cluster: Cluster) -> None:
    await cluster.start(request_timeout_s=0.1)
    worker = await cluster.started()
    call = cluster.call()
    request = await worker.request()
    home = await request.dial(GOOD, item(1))
    stream = await within(call)
    assert await within(anext(stream)) == 1
    # Its time is up, and the connection is given up for that.
    await worker.gone(request.connection)
    await home.send(item(2), FINAL)
    assert await within(items_of(stream)) == [2]


async def test_after_a_late_ack_no_ack_is_credited_to_the_wrong_request(
    cluster: Cluster,
) -> None:
    await cluster.start(request_timeout_s=0.2, inhibited_s=0)
    worker = await cluster.started()
    lost = cluster.call("lost")
    first = await worker.request()
    await asyncio.wait({lost}, timeout=0.1)
    other = cluster.call("other")
    second = await worker.request()
    assert second.connection is first.connection
    assert isinstance(await error_of(lost), CallTimeout)
    await first.ack("Server overloaded: worker at capacity")  # late, for the first
    await second.ack()
    await second.dial(GOOD, item("mine"), FINAL)
    assert await read_all(other) == ["mine"]
    # Nothing is awaited on it any more, and nothing new was sent on it.
    await worker.gone(first.connection)
    await serve_one(cluster, worker)


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (
            "Server overloaded: worker at capacity",
            Overloaded,
            "CapacityExhausted: Server overloaded: worker at capacity",
        ),
        (
            "Server unavailable: unknown endpoint x",
            Refused,
            "Unavailable: Server unavailable: unknown endpoint x",
        ),
        ("Invalid endpoint path", Refused, "Unavailable: Invalid endpoint path"),
        (
            "Read error: message too large: 9 bytes (max: 8 bytes)",
            MessageTooLarge,
            "InvalidRequest: .* message too large: 9 bytes",
        ),
    ],
)
async def test_a_refusal_fails_the_call(
    cluster: Cluster, text: str, kind: type[CallError], words: str
) -> None:
    await cluster.start()
    worker = await cluster.started()
    call = cluster.call()
    request = await worker.request()
    await request.ack(text)
    with pytest.raises(kind, match=words) as caught:
        await within(call)
    assert caught.value.instance_id == 1
    # The subject is forgotten.
    assert await (await request.dial()).is_reset()


async def test_any_other_text_of_an_ack_means_accepted(cluster: Cluster) -> None:
    await cluster.start()
    worker = await cluster.started()
    call = cluster.call()
    request = await worker.request()
    await request.ack("how do you do")
    await request.dial(GOOD, item(1), FINAL)
    assert await read_all(call) == [1]


async def test_a_refused_call_goes_to_another_instance(cluster: Cluster) -> None:
    await cluster.start()
    full, free = await cluster.started(1), await cluster.started(2)
    call = cluster.call()
    await (await full.request()).ack("Server overloaded: worker at capacity")
    await (await free.request()).accept(item("free"), FINAL)
    assert await read_all(call) == ["free"]


async def test_a_call_to_a_closed_port_goes_to_another_instance(
    cluster: Cluster,
) -> None:
    await cluster.start()
    gone, there = await cluster.started(1), await cluster.started(2)
    await gone.stop_listening()
    call = cluster.call()
    await (await there.request()).accept(item("there"), FINAL)
    assert await read_all(call) == ["there"]


async def test_a_call_to_nobody_but_a_closed_port_names_it(cluster: Cluster) -> None:
    await cluster.start()
    worker = await cluster.started()
    await worker.stop_listening()
    error = await error_of(cluster.call())
    assert isinstance(error, ConnectionFailed)
    address = f"127.0.0.1:{worker.port}"
    assert str(error) == f"Unavailable: TCP connection to {address} failed"
    assert error.facts["address"] == address
    assert error.retryable


async def test_a_connect_that_hangs_is_given_up(cluster: Cluster) -> None:
    await cluster.start(connect_timeout_s=0.1)
    # A port whose queue is full answers no more.
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    waiting = [socket.socket() for _ in range(4)]
    try:
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        worker = cluster.worker()
        worker.register(f"127.0.0.1:{listener.getsockname()[1]}/1/gen")
        await until(cluster.client.instance_ids)
        error = await error_of(cluster.call())
        assert isinstance(error, ConnectionFailed)
        assert error.facts["reason"] == "no answer within 0.1 s"
    finally:
        for one in (listener, *waiting):
            one.close()


async def test_a_worker_of_ours_that_does_not_call_home_is_given_up(
    cluster: Cluster,
) -> None:
    await cluster.start(call_home_timeout_s=0.1)
    worker = await cluster.started(ours=True)
    call = cluster.call()
    request = await worker.request()
    await request.ack()
    error = await error_of(call)
    assert isinstance(error, CallTimeout)
    assert cluster.lane.listener.address in str(error)
    assert error.phase == "start"
    assert await (await request.dial()).is_reset()


async def test_a_worker_of_ours_that_calls_home_in_time_is_not_given_up(
    cluster: Cluster,
) -> None:
    await cluster.start(call_home_timeout_s=0.1)
    worker = await cluster.started(ours=True)
    call = cluster.call()
    request = await worker.request()
    await request.ack()
    home = await request.dial()
    done, _ = await asyncio.wait({call}, timeout=0.2)
    assert not done
    await home.send(GOOD, item(1), FINAL)
    assert await read_all(call) == [1]


async def test_only_the_caller_limits_the_wait_for_a_genuine_worker(
    cluster: Cluster,
) -> None:
    await cluster.start(call_home_timeout_s=0.01, request_timeout_s=0.01)
    worker = await cluster.started()
    call = cluster.call()
    request = await worker.request()
    await request.ack()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(call, 0.1)
    # A worker that still calls home learns that nobody waits.
    assert await (await request.dial()).is_reset()


async def test_a_call_without_a_stream_ends_when_its_instance_leaves_discovery(
    cluster: Cluster,
) -> None:
    await cluster.start()
    worker = await cluster.started()
    call = cluster.call()
    request = await worker.request()
    await request.ack()
    worker.unregister()
    error = await error_of(call)
    assert isinstance(error, WorkerLost)
    assert str(error) == (
        "Unavailable: Worker disconnected before response stream was established"
    )
    assert await (await request.dial()).is_reset()


async def test_an_established_stream_outlives_the_record_of_its_instance(
    cluster: Cluster,
) -> None:
    await cluster.start()
    worker = await cluster.started()
    call = cluster.call()
    home = await (await worker.request()).accept()
    stream = await within(call)
    worker.unregister()
    await until(lambda: not cluster.client.instance_ids())
    await home.send(item(1), FINAL)
    assert await within(items_of(stream)) == [1]


# ------------------------------------------------------------- what a worker may send

BROKEN = "Unavailable: Stream ended before generation completed"
AFTER_END = "Internal: Response received after generation ended"
EMPTY = "Internal: Empty response received"
WITH_FINAL = data_frame({"data": {"data": 1}, "complete_final": True})
JUNK_BODY = encode_two_part(body=b"\xc1")
NO_FINAL_KEY = data_frame({"data": {"data": 1}})
ERROR_ITEM = item(None, event="error", error={"error_type": "Unknown", "class": "Internal",
    "reason": "runtime.internal", "message": "why", "diagnostic": "why"})  # fmt: skip
CHECKED = bytearray(item(1))
CHECKED[16:24] = b"\x01" * 8


@pytest.mark.parametrize(
    ("sent", "closes", "items", "error"),
    [
        pytest.param([item(1), FINAL, SENTINEL], False, [1], None, id="good"),
        pytest.param([item(1), FINAL], True, [1], None, id="no-sentinel"),
        pytest.param([item(1), FINAL], False, [1], None, id="final-and-silence"),
        pytest.param([FINAL, SENTINEL], False, [], None, id="no-items"),
        pytest.param([item(1), SENTINEL], False, [1], BROKEN, id="sentinel-alone"),
        pytest.param([item(1)], True, [1], BROKEN, id="closed"),
        pytest.param([], True, [], BROKEN, id="closed-at-once"),
        pytest.param([WITH_FINAL], False, [1], None, id="item-with-final"),
        pytest.param([item(1), JUNK_BODY], False, [1], "Internal: ", id="junk"),
        pytest.param([NO_FINAL_KEY], False, [], "complete_final", id="no-final-key"),
        pytest.param(
            [data_frame({"data": None, "complete_final": False})],
            False,
            [],
            EMPTY,
            id="no-data",
        ),
        pytest.param([PROBE, item(1), PROBE, FINAL], False, [1], None, id="empty"),
        pytest.param([item(1), STOP], False, [1], BROKEN, id="stop"),
        pytest.param([item(1), KILL], False, [1], BROKEN, id="kill"),
        pytest.param(
            [encode_two_part(b'"what"'), item(1)], False, [], BROKEN, id="junk-header"
        ),
        pytest.param(
            [encode_two_part(b'"sentinel"', b"x")], False, [], BROKEN, id="with-data"
        ),
        pytest.param([bytes(CHECKED), FINAL], False, [1], None, id="checksum"),
        pytest.param([ERROR_ITEM, item(2)], False, [], "Internal: why", id="error"),
        pytest.param([b"\xff" * 24], False, [], BROKEN, id="absurd-length"),
        pytest.param([item(1)[:-1]], True, [], BROKEN, id="cut-in-an-item"),
    ],
)
async def test_what_a_worker_sends_is_what_the_reader_gets(
    cluster: Cluster, sent: list[bytes], closes: bool, items: list[Any], error: Any
) -> None:
    await cluster.start()
    worker = await cluster.started()
    call = cluster.call()
    home = await (await worker.request()).accept(*sent)
    if closes:
        home.close()
    found, raised = await outcome_of(call)
    assert found == items
    if error is None:
        assert raised is None
    else:
        assert error in str(raised)
        assert type(raised) is (StreamBroken if error == BROKEN else RemoteError)
    if not closes:
        words = [frame.header for frame in await heard(home)]
        violated = any(one in (STOP, KILL) or b"what" in one for one in sent)
        violated = violated or any(one[24:] == b'"sentinel"x' for one in sent)
        assert words == ([b'"kill"'] if violated else [])


async def heard(home: Peer[TwoPart]) -> list[TwoPart]:
    """What the client says before it closes or resets."""
    found = []
    try:
        while (frame := await home.frame()) is not None:
            found.append(frame)
    except ConnectionResetError:
        pass
    return found


async def test_a_reset_in_the_middle_breaks_the_stream(cluster: Cluster) -> None:
    await cluster.start()
    worker = await cluster.started()
    call = cluster.call()
    home = await (await worker.request()).accept(item(1))
    stream = await within(call)
    assert await within(stream.__anext__()) == 1
    home.reset()
    with pytest.raises(StreamBroken, match=BROKEN):
        await within(stream.__anext__())


async def test_items_may_come_byte_by_byte_and_many_at_once(cluster: Cluster) -> None:
    await cluster.start()
    worker = await cluster.started()
    call = cluster.call()
    home = await (await worker.request()).accept()
    for byte in item("slow"):
        await home.send(bytes([byte]))
        await asyncio.sleep(0)
    await home.send(*(item(number) for number in range(500)), FINAL, SENTINEL)
    assert await read_all(call) == ["slow", *range(500)]


async def test_a_large_item_passes(cluster: Cluster) -> None:
    await cluster.start()
    worker = await cluster.started()
    call = cluster.call()
    home = await (await worker.request()).accept()
    reading = asyncio.get_running_loop().create_task(read_all(call))
    await home.send(item(bytes(40_000_000)), FINAL)
    (found,) = await within(reading)
    assert len(found) == 40_000_000


async def test_a_reader_that_stalls_stops_the_worker_and_can_go_on(
    cluster: Cluster,
) -> None:
    await cluster.start()
    worker = await cluster.started()
    call = cluster.call()
    home = await (await worker.request()).accept()
    stream = await within(call)
    sent = 0

    async def flood() -> None:
        nonlocal sent
        while sent < 400:
            await home.send(item(bytes(100_000)))
            sent += 1
        await home.send(FINAL)

    flooding = asyncio.get_running_loop().create_task(flood())
    (ours,) = cluster.lane.listener.connections
    await until(lambda: not ours.reading)
    await asyncio.wait({flooding}, timeout=0.2)
    assert sent < 200
    assert len(await within(items_of(stream))) == 400
    await within(flooding)


# --------------------------------------------------------------------------- prologues

TYPED: dict[str, Any] = {
    "error_type": "Unknown",
    "class": "Internal",
    "reason": "runtime.unclassified",
    "message": "TypeError: no",
    "diagnostic": "TypeError: no",
}
INVALID = TYPED | {"class": "InvalidRequest", "reason": "request.invalid"}
FAILED = "Unavailable: Worker generate() failed before response stream: "


def prologue(**members: Any) -> bytes:
    return encode_two_part(msgspec.json.encode(members))


@pytest.mark.parametrize(
    ("sent", "text", "avoided"),
    [
        (prologue(error="bad day"), FAILED + "bad day", True),
        (prologue(error="bad day", typed_error=None), FAILED + "bad day", True),
        (prologue(error="bad day", typed_error=TYPED), FAILED + "bad day", True),
        (prologue(error="bad day", typed_error="?"), FAILED + "bad day", True),
        (
            prologue(error="bad day", typed_error=INVALID),
            "InvalidRequest: TypeError: no",
            False,
        ),
        (
            item(1),
            FAILED + "malformed prologue: expected HeaderOnly ControlMessage",
            True,
        ),
        (encode_two_part(b"{]"), FAILED + "malformed prologue: ", True),
        (SENTINEL, FAILED + "malformed prologue: ", True),
    ],
    ids=[
        "untyped",
        "null-type",
        "typed",
        "unknown-type",
        "invalid-request",
        "item",
        "bad-json",
        "sentinel",
    ],
)
async def test_an_error_prologue_fails_the_call(
    cluster: Cluster, sent: bytes, text: str, avoided: bool
) -> None:
    await cluster.start()
    worker = await cluster.started()
    call = cluster.call()
    request = await worker.request()
    await request.ack()
    home = await request.dial(sent, SENTINEL)
    error = await error_of(call)
    assert isinstance(error, HandlerRefused)
    assert str(error).startswith(text)
    assert not error.retryable
    assert await home.ended()
    chooser = cluster.client._chooser
    assert (not chooser.routable()) is avoided


@pytest.mark.parametrize("sent", [b'{"error":null}', b'{"nope":1}', b"{}"])
async def test_any_object_without_an_error_is_a_good_prologue(
    cluster: Cluster, sent: bytes
) -> None:
    await cluster.start()
    worker = await cluster.started()
    call = cluster.call()
    request = await worker.request()
    await request.ack()
    await request.dial(encode_two_part(sent), item(1), FINAL)
    assert await read_all(call) == [1]


async def test_a_public_message_is_raised_as_an_invalid_argument(
    cluster: Cluster,
) -> None:
    await cluster.start()
    worker = await cluster.started()
    call = cluster.call()
    error = INVALID | {"public": {"type": "message", "message": "too long"}}
    await (await worker.request()).accept(item(None, event="error", error=error))
    with pytest.raises(InvalidArgument, match=r"^too long$"):
        await read_all(call)


@pytest.mark.parametrize("reset", [True, False])
async def test_a_worker_that_goes_before_the_prologue_is_lost(
    cluster: Cluster, reset: bool
) -> None:
    await cluster.start()
    worker = await cluster.started()
    call = cluster.call()
    request = await worker.request()
    await request.ack()
    home = await request.dial()
    await until(lambda: cluster.lane.listener.connections)
    if reset:
        home.reset()
    else:
        home.close()
    error = await error_of(call)
    assert isinstance(error, WorkerLost)
    assert "before response stream was established" in str(error)


# ----------------------------------------------------------------- strangers who dial in


@pytest.mark.parametrize(
    "said",
    [
        encode_handshake("nobody waits for this"),
        encode_two_part(b'{"subject":1}'),
        encode_two_part(b"{]"),
        encode_two_part(body=b"data"),
        encode_two_part(),
        SENTINEL,
        b"GET / HTTP/1.1\r\n\r\n" + bytes(24),
        (2**39).to_bytes(8, "big") + bytes(16) + bytes(200_000),
    ],
    ids=[
        "unknown-subject",
        "no-text",
        "no-json",
        "data",
        "empty",
        "no-object",
        "http",
        "endless",
    ],
)
async def test_a_stranger_is_reset_and_calls_go_on(
    cluster: Cluster, said: bytes
) -> None:
    await cluster.start()
    worker = await cluster.started()
    await serve_one(cluster, worker)
    stranger = await worker.dial(cluster.lane.listener.address)
    await stranger.send(said)
    assert await stranger.is_reset()
    await serve_one(cluster, worker)


async def test_a_subject_is_good_for_one_response_connection(cluster: Cluster) -> None:
    await cluster.start()
    worker = await cluster.started()
    call = cluster.call()
    request = await worker.request()
    wrong = await worker.dial(request.control.response.address)
    await wrong.send(encode_handshake("x", "request"))
    assert await wrong.is_reset()
    home = await request.accept()
    await within(call)
    assert await (await request.dial()).is_reset()
    await home.send(item(1), FINAL)
    assert await read_all(call) == [1]


async def test_a_connection_that_says_nothing_is_closed_in_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{TRANSPORTS}.response_listener._HANDSHAKE_TIMEOUT_S", 0.05)
    await cluster.start()
    worker = await cluster.started()
    await serve_one(cluster, worker)
    silent = await worker.dial(cluster.lane.listener.address)
    slow = await worker.dial(cluster.lane.listener.address)
    await slow.send(encode_handshake("x")[:-1])
    assert await silent.ended()
    assert await slow.ended()
    # In a stream there is no such limit.
    call = cluster.call()
    home = await (await worker.request()).accept()
    stream = await within(call)
    next_item = asyncio.get_running_loop().create_task(items_of(stream))
    done, _ = await asyncio.wait({next_item}, timeout=0.1)
    assert not done
    await home.send(FINAL)
    assert await within(next_item) == []


# -------------------------------------------------------------------------------- pool


async def test_many_first_calls_open_one_connection(cluster: Cluster) -> None:
    await cluster.start()
    worker = await cluster.started()
    calls = [cluster.call(number) for number in range(200)]
    requests = [await worker.request() for _ in calls]
    assert len(worker.connections) == 1
    for request in requests:
        await request.accept(item(msgspec.msgpack.decode(request.body or b"")), FINAL)
    assert [await read_all(call) for call in calls] == [[n] for n in range(200)]


async def test_a_full_pool_makes_the_surplus_wait(cluster: Cluster) -> None:
    await cluster.start(channel_buffer=1, pool_size=3)
    worker = await cluster.started()
    calls = [cluster.call(number) for number in range(6)]
    first = [await worker.request() for _ in range(3)]
    assert len({request.connection for request in first}) == 3
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(worker._requests.get(), 0.05)
    for request in first:
        await request.accept(FINAL)
    for _ in range(3):
        await (await worker.request()).accept(FINAL)
    assert [await read_all(call) for call in calls] == [[]] * 6
    assert len(worker.connections) == 3


async def test_a_call_that_is_cancelled_while_the_pool_is_full_leaves_no_trace(
    cluster: Cluster,
) -> None:
    await cluster.start(channel_buffer=1, pool_size=1)
    worker = await cluster.started()
    running, waiting, last = (cluster.call(number) for number in range(3))
    request = await worker.request()
    waiting.cancel()
    await asyncio.wait({waiting})
    await request.accept(FINAL)
    await (await worker.request()).accept(item("last"), FINAL)
    assert await read_all(running) == []
    assert await read_all(last) == ["last"]


async def test_usable_connections_take_turns(cluster: Cluster) -> None:
    await cluster.start(channel_buffer=1, pool_size=2)
    worker = await cluster.started()
    calls = [cluster.call() for _ in range(2)]
    for _ in calls:
        await (await worker.request()).accept(FINAL)
    for call in calls:
        await read_all(call)
    used = []
    for _ in range(4):
        call = cluster.call()
        request = await worker.request()
        used.append(request.connection)
        await request.accept(FINAL)
        await read_all(call)
    assert used[0] is not used[1]
    assert used[:2] == used[2:]


@pytest.mark.parametrize("reset", [True, False])
async def test_a_connection_that_went_while_idle_is_not_used_again(
    cluster: Cluster, reset: bool
) -> None:
    await cluster.start()
    worker = await cluster.started()
    await serve_one(cluster, worker)
    (pool,) = cluster.lane._pools._pools.values()
    await worker.drop(worker.connections[0], reset=reset)
    await until(lambda: not pool._connections)
    await serve_one(cluster, worker)
    assert len(worker.connections) == 2


async def test_a_request_that_was_written_may_have_run_when_its_connection_goes(
    cluster: Cluster,
) -> None:
    await cluster.start()
    worker = await cluster.started()
    call = cluster.call()
    request = await worker.request()
    await worker.drop(request.connection)
    error = await error_of(call)
    assert isinstance(error, ConnectionFailed)
    assert (error.phase, error.retryable) == ("ack", False)


async def test_a_request_that_was_not_written_certainly_did_not_run(
    cluster: Cluster,
) -> None:
    """The end of the connection comes between submitting and the end of the turn."""
    await cluster.start()
    worker = await cluster.started()
    await serve_one(cluster, worker)
    (pool,) = cluster.lane._pools._pools.values()
    (connection,) = pool._connections
    acks: list[Any] = []
    connection.submit((b"written",), acks.append)
    connection.flush()
    connection.submit((b"queued",), acks.append)
    connection.submit((b"queued too",), acks.append)
    assert connection._transport is not None
    assert connection.eof_received() is False
    connection._transport.close()  # as every loop does after that answer
    assert not connection.usable
    await until(lambda: len(acks) == 3)
    assert [one.retryable for one in acks] == [False, True, True]
    assert [one.phase for one in acks] == ["ack", "send", "send"]


@pytest.mark.parametrize(
    "said", [bytes(4), b"\xff" * 4], ids=["an-ack-too-many", "an-ack-too-long"]
)
async def test_a_worker_that_breaks_the_order_of_acks_is_left(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, said: bytes
) -> None:
    await cluster.start()
    worker = await cluster.started()
    await serve_one(cluster, worker)
    await worker.connections[0].send(said)
    await worker.gone(worker.connections[0])
    assert f"closing the connection with 127.0.0.1:{worker.port}" in caplog.text
    await serve_one(cluster, worker)


async def test_hosts_that_are_not_used_are_dropped(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{TRANSPORTS}.request_pool._IDLE_CHECK_S", 0.05)
    await cluster.start(host_idle_ttl_s=0.1)
    worker, busy = await cluster.started(1), await cluster.started(2)
    await serve_one(cluster, worker)
    call = cluster.call()
    request = await busy.request()
    await worker.gone(worker.connections[0])
    assert len(cluster.lane._pools._pools) == 1
    await request.accept(item("still there"), FINAL)
    assert await read_all(call) == ["still there"]
    await busy.gone(request.connection)
    assert not cluster.lane._pools._pools


async def test_connections_are_kept_alive_by_the_kernel(cluster: Cluster) -> None:
    await cluster.start()
    worker = await cluster.started()
    call = cluster.call()
    await (await worker.request()).accept()
    stream = await within(call)
    (pool,) = cluster.lane._pools._pools.values()
    for connection in (*pool._connections, *cluster.lane.listener.connections):
        assert connection._transport is not None
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        if hasattr(socket, "TCP_KEEPIDLE"):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3
    await stream.aclose()


# ------------------------------------------------------------------------ cancellation


def turns(count: int) -> asyncio.Future[None]:
    """Done after so many turns of the loop."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def turn(left: int) -> None:
        if left:
            loop.call_soon(turn, left - 1)
        else:
            done.set_result(None)

    turn(count)
    return done


@pytest.mark.parametrize("warm", [False, True], ids=["first-call", "later-call"])
async def test_a_call_cancelled_at_any_moment_leaves_nothing(
    cluster: Cluster, warm: bool
) -> None:
    """Also in the very turn in which its connection, or the listener, stands."""
    await cluster.start()
    worker = await cluster.started()
    for count in range(25):
        other = Cluster()
        other.store = cluster.store
        await other.start()
        if warm:
            await serve_one(other, worker)
        call = other.call(count)
        await turns(count)
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled()
        assert not other.lane.listener._waiting
        assert other.client._home.in_flight == {}
        await shut_down(other.runtime)
    for connection in worker.connections:
        await worker.gone(connection)


async def test_a_listener_that_stands_as_its_caller_is_cancelled_is_closed(
    cluster: Cluster,
) -> None:
    await cluster.start()
    # The first server of a uvloop opens one descriptor more, for good.
    loop = asyncio.get_running_loop()
    (await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)).close()
    for count in range(6):
        before = open_descriptors()
        starting = loop.create_task(cluster.lane.listener.start())
        await turns(count)
        if starting.cancel():
            await asyncio.wait({starting})
            await until(lambda before=before: open_descriptors() == before)


async def test_a_stop_before_the_call_home_is_told_when_it_comes(
    cluster: Cluster,
) -> None:
    await cluster.start()
    worker = await cluster.started()
    context = Context()
    call = cluster.call(context=context)
    request = await worker.request()
    await request.ack()
    context.stop_generating()
    assert await read_all(call) == []
    home = await request.dial()
    assert [frame.header for frame in await home.frames(1)] == [b'"stop"']
    home.close()
    await until(lambda: not cluster.lane.listener.connections)


async def test_a_stopped_call_is_forgotten_in_the_end(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{TRANSPORTS}.callhome_client._LATE_CALL_HOME_S", 0.05)
    await cluster.start()
    worker = await cluster.started()
    context = Context()
    call = cluster.call(context=context)
    request = await worker.request()
    await request.ack()
    context.stop_generating()
    assert await read_all(call) == []
    await until(lambda: not cluster.lane.listener._waiting)
    assert await (await request.dial()).is_reset()


async def test_a_stop_is_told_once_and_the_rest_is_still_read(cluster: Cluster) -> None:
    await cluster.start()
    worker = await cluster.started()
    context = Context()
    call = cluster.call(context=context)
    home = await (await worker.request()).accept()
    stream = await within(call)
    context.stop_generating()
    assert (await home.frames(1))[0].header == b'"stop"'
    await home.send(item("on its way"))
    home.finish()
    assert await within(items_of(stream)) == ["on its way"]
    assert await heard(home) == []


async def test_a_stream_that_is_closed_is_killed(cluster: Cluster) -> None:
    await cluster.start()
    worker = await cluster.started()
    call = cluster.call()
    home = await (await worker.request()).accept()
    stream = await within(call)
    await stream.aclose()
    assert [frame.header for frame in await heard(home)] == [b'"kill"']


# ------------------------------------------------- calls of one id to a genuine worker


async def test_calls_of_one_id_to_a_genuine_worker_start_one_by_one(
    cluster: Cluster,
) -> None:
    await cluster.start()
    worker = await cluster.started()
    calls = [cluster.call(number, context=Context("same")) for number in range(3)]
    homes = []
    for number in range(3):
        request = await worker.request()
        assert request.body == msgspec.msgpack.encode(number)
        assert worker._requests.empty()
        await turns(5)
        assert worker._requests.empty()
        homes.append(await request.accept())
    for number, home in enumerate(homes):  # started, they overlap
        await home.send(item(number), FINAL)
    assert [await read_all(call) for call in calls] == [[0], [1], [2]]


async def test_the_next_call_of_one_id_starts_when_the_one_before_fails(
    cluster: Cluster,
) -> None:
    await cluster.start(request_timeout_s=0.1, inhibited_s=0)
    worker = await cluster.started()
    first = cluster.call("first", context=Context("same"))
    second = cluster.call("second", context=Context("same"))
    await worker.request()
    assert isinstance(await error_of(first), CallTimeout)
    await (await worker.request()).accept(item(2), FINAL)
    assert await read_all(second) == [2]


# ----------------------------------------------------------------- what cannot be sent


async def test_a_worker_that_reads_json_is_spoken_to_in_json(cluster: Cluster) -> None:
    await cluster.start()
    worker = await cluster.started(codec="json")
    call = cluster.call({"a": [1, 2.5, None]})
    request = await worker.request()
    assert request.control.codec == "json"
    assert request.body == b'{"a":[1,2.5,null]}'
    final = encode_final_frame("json")
    await request.accept(item({"b": 1}, "json"), final, SENTINEL)
    assert await read_all(call) == [{"b": 1}]


async def test_what_json_cannot_carry_is_refused_before_sending(
    cluster: Cluster,
) -> None:
    await cluster.start()
    await cluster.started(codec="json")
    error = await error_of(cluster.call({(1, 2): 3}))
    assert str(error).startswith(
        "InvalidRequest: the request cannot be encoded as json"
    )
    assert (error.phase, error.instance_id) == ("send", 1)


async def test_what_a_genuine_worker_cannot_read_is_refused_before_sending(
    cluster: Cluster,
) -> None:
    await cluster.start()
    await cluster.started()
    error = await error_of(cluster.call({(1, 2): 3}))
    assert "InvalidRequest: the worker cannot decode this request" in str(error)
    assert error.phase == "send"


async def test_a_request_over_the_size_limit_is_refused_before_sending(
    cluster: Cluster,
) -> None:
    await cluster.start(max_message_bytes=4096)
    worker = await cluster.started()
    error = await error_of(cluster.call(bytes(4096)))
    assert isinstance(error, MessageTooLarge)
    assert "DYN_TCP_MAX_MESSAGE_SIZE" in str(error)
    await serve_one(cluster, worker)


@pytest.mark.parametrize(
    ("kind", "address", "words"),
    [
        ("tcp", "localhost:1", "path .* is missing"),
        ("tcp", "nonsense/x", "invalid socket address syntax"),
        ("tcp", "127.0.0.1:99999/x", "the port is over 65535"),
        ("nats_tcp", "some_where.gen-1", "serves on nats_tcp.*calls on tcp"),
    ],
)
async def test_a_record_that_cannot_be_called_is_an_error_that_says_why(
    cluster: Cluster, kind: str, address: str, words: str
) -> None:
    await cluster.start()
    record = EndpointRecord(
        name=NAME, instance_id=5, transport_kind=kind, address=address
    )
    cluster.store.create(INSTANCES, record.key, encode_record(record))
    await until(cluster.client.instance_ids)
    with pytest.raises(CallError, match=words) as caught:
        await within(cluster.call())
    assert caught.value.instance_id == 5
    assert await cluster.lane.probe(record) is False


async def test_a_probe_connects_and_hangs_up(cluster: Cluster) -> None:
    await cluster.start()
    worker = await cluster.started()
    assert await cluster.lane.probe(worker.record) is True
    await until(lambda: worker.connections)
    await worker.gone(worker.connections[0])
    await worker.stop_listening()
    assert await cluster.lane.probe(worker.record) is False


# ---------------------------------------------------------------------------- shutdown


async def waits_for_the_call_home(cluster: Cluster, worker: RawWorker) -> None:
    await (await worker.request()).ack()


async def waits_for_the_ack(cluster: Cluster, worker: RawWorker) -> None:
    await worker.request()


@pytest.mark.parametrize("until_waiting", [waits_for_the_ack, waits_for_the_call_home])
async def test_a_shutdown_ends_a_call_that_waits(
    cluster: Cluster, until_waiting: Callable[..., Any]
) -> None:
    await cluster.start()
    worker = await cluster.started()
    call = cluster.call()
    await until_waiting(cluster, worker)
    await shut_down(cluster.runtime)
    with pytest.raises(RuntimeClosed):
        await within(call)


async def test_a_shutdown_ends_calls_that_wait_for_their_turn(cluster: Cluster) -> None:
    """None of them opens a connection, or the listener, once more."""
    await cluster.start(channel_buffer=1, pool_size=1)
    worker = await cluster.started()
    sent = cluster.call(context=Context("a"))
    for_room = cluster.call(context=Context("b"))
    for_gate = cluster.call(context=Context("a"))
    request = await worker.request()
    await turns(10)
    await shut_down(cluster.runtime)
    for call in (sent, for_room, for_gate):
        with pytest.raises(RuntimeClosed):
            await within(call)
    await worker.gone(request.connection)
    assert len(worker.connections) == 1
    with pytest.raises(ConnectionRefusedError):
        await worker.dial(request.control.response.address)


async def test_a_shutdown_ends_a_call_that_is_connecting(cluster: Cluster) -> None:
    await cluster.start()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    waiting = [socket.socket() for _ in range(4)]
    try:
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        worker = cluster.worker()
        worker.register(f"127.0.0.1:{listener.getsockname()[1]}/1/gen")
        await until(cluster.client.instance_ids)
        call = cluster.call()
        await until(
            lambda: any(
                p._opening.under_way for p in cluster.lane._pools._pools.values()
            )
        )
        await shut_down(cluster.runtime)
        with pytest.raises(RuntimeClosed):
            await within(call)
    finally:
        for one in (listener, *waiting):
            one.close()


async def test_nothing_can_be_called_after_a_shutdown(cluster: Cluster) -> None:
    await cluster.start()
    worker = await cluster.started()
    await serve_one(cluster, worker)
    await shut_down(cluster.runtime)
    with pytest.raises((RuntimeClosed, CallError)):
        await within(cluster.call())
    with pytest.raises(RuntimeClosed):
        await cluster.lane.listener.start()
    with pytest.raises(RuntimeClosed):
        cluster.lane._pools.check_open()


async def test_a_stream_in_progress_outlives_a_shutdown(cluster: Cluster) -> None:
    await cluster.start()
    worker = await cluster.started()
    call = cluster.call()
    home = await (await worker.request()).accept()
    stream = await within(call)
    await shut_down(cluster.runtime)
    await home.send(item("to the end"), FINAL)
    assert await within(items_of(stream)) == ["to the end"]


async def test_a_fixed_response_port_that_is_taken_names_the_settings(
    cluster: Cluster,
) -> None:
    taken = listening_socket()
    try:
        await cluster.start(response_port=taken.getsockname()[1])
        await cluster.started()
        with pytest.raises(Exception, match="DYN_TCP_RESPONSE_STREAM_PORT"):
            await within(cluster.call())
    finally:
        taken.close()


async def test_nothing_is_left_of_many_calls(cluster: Cluster) -> None:
    await cluster.start()
    worker = await cluster.started()
    await serve_one(cluster, worker)
    lane = cluster.lane

    async def answer(request: RawRequest, number: int) -> None:
        if number % 3 == 0:
            await request.ack("Server overloaded: worker at capacity")
        elif number % 3 == 1:
            (await request.accept(item(1))).close()
        else:
            await request.accept(item(1), FINAL)

    for _ in range(5):
        calls = [cluster.client.direct(n, 1, annotated=False) for n in range(30)]
        for number in range(30):
            await answer(await worker.request(), number)
        ends = await asyncio.gather(*map(outcome_of, calls), return_exceptions=True)
        kinds = [type(end) for end in ends]
        assert kinds == [Overloaded, tuple, tuple] * 10
    del calls, ends
    gc.collect()
    await until(lambda: not lane.listener.connections)
    assert not lane.listener._waiting
    assert not lane._gates
    assert cluster.client._home.in_flight == {}
    alive = [one for one in gc.get_objects() if isinstance(one, RequestConnection)]
    assert len([one for one in alive if one.is_open]) == 1
