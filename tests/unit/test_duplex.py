"""The state machines of the duplex lane, driven against each other in memory."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reads import read

from dynamo.runtime._sealed import override
from dynamo.runtime._wire.callhome import MAX_CONTROL_BYTES
from dynamo.runtime._wire.duplex import (
    ANSWER,
    LAST_ID_TO_OPEN,
    STARTED,
    WRITABLE,
    ClientSide,
    Stream,
    WorkerSide,
)
from dynamo.runtime._wire.duplex_frames import (
    ACCEPT,
    CHUNK_BYTES,
    CREDIT,
    END,
    ERROR,
    GOAWAY,
    HANDLER_REFUSED,
    HEADER_BYTES,
    HELLO,
    INPUT,
    INPUT_END,
    ITEM,
    ITEM_END,
    KILL,
    OVERLOADED,
    PART,
    PART_BYTES,
    PING,
    PONG,
    PREFACE,
    QUEUED,
    REFUSED,
    REQUEST,
    RESET,
    STOP,
    TOO_LARGE,
    UNAVAILABLE,
    Hello,
    Refusal,
    RequestHead,
    decode_request,
    encode_error,
    encode_frame,
    encode_handler_refusal,
    encode_hello,
    encode_number,
    encode_refusal,
    encode_request_front,
    pack_header,
    unpack_header,
)
from dynamo.runtime._wire.faults import error_of_exception
from dynamo.runtime._wire.framing import Memory
from dynamo.runtime.errors import MessageTooLarge, RemoteProtocolError

PLAIN = Hello()
STREAMED = RequestHead("id", "path", flags=1)
SINGLE = RequestHead("id", "path")


def request(
    value: bytes = b"\x01", head: RequestHead = SINGLE, limit: int = 1 << 30
) -> tuple[bytes, bytes]:
    """The two pieces of the payload of REQUEST."""
    return encode_request_front(head, len(value), limit), value


def taken(side: ClientSide | WorkerSide) -> bytes:
    """What a side has to say, as its owner would send it."""
    data = b"".join(side.out)
    side.out.clear()
    return data


class Pair:
    """Both sides of one connection; `move` carries what they say, and keeps events."""

    def __init__(
        self, client: Hello = PLAIN, worker: Hello = PLAIN, seed: int | None = None
    ) -> None:
        self.client = ClientSide(client)
        self.worker = WorkerSide(worker)
        self.at_client: list[Any] = []
        self.at_worker: list[Any] = []
        self._pieces = random.Random(seed) if seed is not None else None
        greeting = taken(self.client)
        assert greeting.startswith(PREFACE)
        self.at_worker += self.worker.feed(greeting[len(PREFACE) :])
        self.move()
        assert [kind for kind, *_ in self.at_client + self.at_worker] == [HELLO] * 2
        self.clear()

    def clear(self) -> None:
        self.at_client.clear()
        self.at_worker.clear()

    def move(self) -> None:
        while self.client.out or self.worker.out:
            self.at_worker += self.feed(self.worker, taken(self.client))
            self.at_client += self.feed(self.client, taken(self.worker))

    def feed(self, side: ClientSide | WorkerSide, data: bytes) -> list[Any]:
        events: list[Any] = []
        while data:
            size = self._size() if self._pieces else len(data)
            feed = side.feed if self._pieces and self._pieces.random() < 0.1 else None
            piece = data[:size]
            events += one_by_one(feed(piece) if feed else read(side, piece))
            data = data[size:]
        return events

    def _size(self) -> int:
        assert self._pieces is not None
        return self._pieces.choice([self._pieces.randint(1, 200), 5000, 400_000])

    def call(self, value: bytes = b"\x01", head: RequestHead = SINGLE) -> Any:
        """A call and the stream that it is at the worker."""
        stream = self.client.open(*request(value, head))
        self.move()
        (kind, there, (read, body)) = self.at_worker.pop()
        assert (kind, read, body) == (REQUEST, head, value)
        return stream, there

    def client_events(self) -> list[tuple[int, Any]]:
        self.move()
        events = [(kind, payload) for kind, _, payload in self.at_client]
        self.at_client.clear()
        return events

    def worker_events(self) -> list[tuple[int, Any]]:
        self.move()
        events = [(kind, payload) for kind, _, payload in self.at_worker]
        self.at_worker.clear()
        return events


def one_by_one(events: list[Any]) -> list[Any]:
    """The events with one for each item; takes them, as whoever handles them must."""
    each: list[Any] = []
    for kind, stream, payload in events:
        if kind == ITEM:
            assert stream.items is payload
            stream.items = None
            each += [(ITEM, stream, body) for body in payload]
        else:
            each.append((kind, stream, payload))
    return each


def fed(side: ClientSide | WorkerSide, data: bytes) -> list[Any]:
    """The events, or the error, which comes behind those that stood before it."""
    events = side.feed(data)
    side.check()
    return events


def frames_in(data: bytes) -> list[tuple[int, int, bytes]]:
    found = []
    while data:
        length, kind, number = unpack_header(data)
        found.append((kind, number, data[HEADER_BYTES : HEADER_BYTES + length]))
        data = data[HEADER_BYTES + length :]
    return found


# ---------------------------------------------------------------------------- greeting


def test_each_side_opens_with_these_bytes() -> None:
    hello = "95 01 01 ce00040000 ce01000000 00"
    assert taken(ClientSide(Hello())) == bytes.fromhex(
        "ffff f5 64796e f5 31" + "0000000e 10 00000000" + hello
    )


def test_a_request_is_these_bytes() -> None:
    trace = ("00-x", None, None)
    head = RequestHead("a", "p", {"k": "v"}, trace, 250, "json", 1)
    assert b"".join(request(b"{}", head, 100)) == bytes.fromhex(
        "0000001a 97 a161 a170 81a16ba176 93a430302d78c0c0 ccfa a46a736f6e 01" + "7b7d"
    )


@pytest.mark.parametrize("answer", [b"\x00\x00\x00\x00", b"\xff\xff\xf5dyn\xf52"])
def test_a_worker_without_the_lane_is_known_by_its_answer(answer: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="does not answer the preface"):
        ClientSide(Hello()).feed(answer)


def test_the_greeting_may_come_byte_by_byte() -> None:
    client = ClientSide(PLAIN)
    greeting = taken(WorkerSide(PLAIN))
    (*before, events) = [
        client.feed(greeting[at : at + 1]) for at in range(len(greeting))
    ]
    assert not any(before)
    assert [kind for kind, *_ in events] == [HELLO]


def test_the_version_is_the_highest_that_both_speak() -> None:
    Pair(Hello(lowest=1, highest=3), Hello(lowest=1, highest=1))
    with pytest.raises(RemoteProtocolError, match="the peer speaks 2 to 3, we 1 to 1"):
        Pair(Hello(lowest=2, highest=3), Hello())


@pytest.mark.parametrize("credit", [0, -1, 2**31 + 1])
def test_hello_with_unusable_credit_is_refused(credit: int) -> None:
    hello = encode_frame(HELLO, 0, encode_hello(Hello(stream_credit=credit)))
    with pytest.raises(RemoteProtocolError, match="HELLO with a credit"):
        WorkerSide(Hello()).feed(hello)


def test_elements_of_later_versions_are_ignored() -> None:
    later = b"\x97" + encode_hello(Hello())[1:] + b"\xc0\xc0"
    ((kind, _, peer),) = WorkerSide(Hello()).feed(encode_frame(HELLO, 0, later))
    assert (kind, peer) == (HELLO, Hello())


# ------------------------------------------------------------------------------- calls


def test_a_call_is_answered_and_its_end_rides_on_the_last_item() -> None:
    pair = Pair()
    _, there = pair.call()
    pair.worker.send(there, ITEM, b"one")
    pair.worker.send(there, ITEM, b"two")
    pair.worker.finish(there)
    data = taken(pair.worker)
    assert frames_in(data) == [(ITEM, 1, b"one"), (ITEM_END, 1, b"two")]
    pair.at_client += pair.feed(pair.client, data)
    assert pair.client_events() == [
        (STARTED, None),
        (ITEM, b"one"),
        (ITEM, b"two"),
        (END, None),
    ]
    assert not pair.client.streams
    assert not pair.worker.streams


def test_an_answer_of_one_item_is_one_event_unless_something_was_said_before() -> None:
    pair = Pair()
    (_, first), (_, second) = pair.call(), pair.call()
    pair.worker.accept(second)
    for there in (first, second):
        pair.worker.send(there, ITEM, b"x")
        pair.worker.finish(there)
    pair.move()
    assert [(kind, stream.id, payload) for kind, stream, payload in pair.at_client] == [
        (STARTED, 2, None),
        (ANSWER, 1, b"x"),
        (ITEM, 2, b"x"),
        (END, 2, None),
    ]
    assert not pair.client.streams


def test_items_of_one_read_are_one_event_for_each_stream() -> None:
    pair = Pair()
    (_, first), (_, second) = pair.call(), pair.call()
    for there, body in ((first, b"1"), (second, b"2"), (first, b"3"), (second, b"4")):
        pair.worker.send(there, ITEM, body)
    events = pair.client.feed(taken(pair.worker))
    assert [(kind, stream.id, said) for kind, stream, said in events] == [
        (STARTED, 1, None),
        (ITEM, 1, [b"1", b"3"]),
        (STARTED, 2, None),
        (ITEM, 2, [b"2", b"4"]),
    ]


def test_the_end_goes_alone_when_the_last_item_has_left() -> None:
    pair = Pair()
    _, there = pair.call()
    pair.worker.send(there, ITEM, b"x")
    pair.move()
    pair.worker.finish(there)
    assert pair.client_events() == [(STARTED, None), (ITEM, b"x"), (END, None)]


def test_the_end_never_rides_on_the_item_of_another_stream() -> None:
    pair = Pair()
    _, first = pair.call()
    _, second = pair.call()
    pair.worker.send(first, ITEM, b"")
    pair.worker.finish(second)
    pair.move()
    assert [(kind, stream.id) for kind, stream, _ in pair.at_client] == [
        (STARTED, 1),
        (ITEM, 1),
        (STARTED, 2),
        (END, 2),
    ]


def test_a_silent_handler_is_announced_and_then_answers() -> None:
    pair = Pair()
    _, there = pair.call()
    pair.worker.queued(there)
    pair.worker.accept(there)
    pair.worker.send(there, ITEM, b"x")
    pair.worker.finish(there)
    assert [kind for kind, _ in pair.client_events()] == [QUEUED, STARTED, ITEM, END]


def test_an_empty_stream_starts_and_ends() -> None:
    pair = Pair()
    _, there = pair.call()
    pair.worker.finish(there)
    assert pair.client_events() == [(STARTED, None), (END, None)]


def test_a_failed_handler_ends_the_stream_with_its_error() -> None:
    pair = Pair()
    _, there = pair.call()
    error = error_of_exception(ValueError("no"))
    pair.worker.send(there, ITEM, b"x")
    pair.worker.end_with(there, ERROR, encode_error(error))
    assert pair.client_events() == [(STARTED, None), (ITEM, b"x"), (ERROR, error)]
    assert not pair.client.streams
    assert not pair.worker.streams


def test_a_handler_that_cannot_be_called_ends_the_stream_unstarted() -> None:
    pair = Pair()
    _, there = pair.call()
    error = error_of_exception(TypeError("no"))
    pair.worker.queued(there)
    pair.worker.end_with(there, HANDLER_REFUSED, encode_handler_refusal("text", error))
    (_, (kind, refusal)) = pair.client_events()
    assert (kind, refusal.text, refusal.error) == (HANDLER_REFUSED, "text", error)


def test_a_refused_request_was_never_started() -> None:
    pair = Pair()
    _, there = pair.call()
    refusal = Refusal(OVERLOADED, "full", 1000)
    pair.worker.refuse(there, refusal)
    assert pair.client_events() == [(REFUSED, refusal)]


def test_a_stream_can_end_incomplete() -> None:
    pair = Pair()
    _, there = pair.call()
    pair.worker.send(there, ITEM, b"x")
    pair.worker.reset(there)
    pair.worker.reset(there)
    assert pair.client_events() == [(STARTED, None), (ITEM, b"x"), (RESET, None)]


def test_input_travels_in_order_and_ends_once() -> None:
    pair = Pair()
    here, _ = pair.call(b"", STREAMED)
    pair.client.send(here, INPUT, b"a")
    pair.client.send(here, INPUT, b"b")
    pair.client.end_input(here)
    assert pair.worker_events() == [(INPUT, b"a"), (INPUT, b"b"), (INPUT_END, None)]


def test_input_of_a_call_that_is_over_goes_nowhere() -> None:
    pair = Pair()
    here, there = pair.call(b"", STREAMED)
    pair.client.send(here, INPUT, b"late")
    pair.worker.finish(there)
    pair.move()
    pair.client.end_input(here)
    assert pair.worker_events() == []


def test_stop_is_heard_and_the_stream_reads_on() -> None:
    pair = Pair()
    here, there = pair.call()
    assert pair.client.stop(here)
    pair.worker.send(there, ITEM, b"on its way")
    assert pair.worker_events() == [(STOP, None)]
    pair.worker.reset(there)
    assert [kind for kind, _ in pair.client_events()] == [STARTED, ITEM, RESET]


def test_kill_ends_both_sides_at_once_and_what_still_comes_is_ignored() -> None:
    pair = Pair()
    here, there = pair.call()
    pair.client.kill(here)
    for kind in (ACCEPT, QUEUED, END, RESET):
        pair.at_client += pair.feed(pair.client, encode_frame(kind, there.id))
    refused = encode_frame(REFUSED, there.id, encode_refusal(Refusal(1, "")))
    pair.at_client += pair.feed(pair.client, refused)
    pair.worker.send(there, ITEM, b"too late")
    assert pair.worker_events() == [(KILL, None)]
    assert pair.client_events() == []
    assert not pair.worker.streams
    pair.client.kill(here)
    assert not pair.client.out


def test_stop_and_kill_and_credit_after_the_end_are_no_ops() -> None:
    pair = Pair()
    here, there = pair.call(b"", STREAMED)
    pair.worker.finish(there)
    late = [encode_frame(kind, here.id) for kind in (STOP, KILL, INPUT_END)]
    late.append(encode_frame(CREDIT, here.id, encode_number(1)))
    pair.at_worker += pair.worker.feed(b"".join(late))
    assert pair.worker_events() == []


def test_request_and_kill_in_one_read_leave_nothing() -> None:
    pair = Pair()
    for _ in range(1000):
        pair.client.kill(pair.client.open(*request()))
    assert [kind for kind, _ in pair.worker_events()] == [REQUEST, KILL] * 1000
    assert not pair.worker.streams
    assert not pair.client.streams


# -------------------------------------------------------------------- large and limited


def test_a_large_message_comes_in_parts_and_lets_others_pass() -> None:
    pair = Pair()
    _, large = pair.call()
    _, small = pair.call()
    body = random.Random(1).randbytes(9_000_000)
    pair.worker.send(large, ITEM, body)
    pair.worker.finish(large)
    pair.worker.send(small, ITEM, b"quick")
    first = taken(pair.worker)
    assert (ITEM, 2, b"quick") in frames_in(first)
    assert len(first) < 400_000
    pair.at_client += pair.feed(pair.client, first)
    pair.move()
    items = {
        stream.id: body for kind, stream, body in pair.at_client if kind != STARTED
    }
    assert items == {1: body, 2: b"quick"}
    assert pair.at_client[-1][0] == ANSWER
    assert not pair.worker.streams or list(pair.worker.streams) == [2]
    assert (WRITABLE, None) in pair.worker_events()


def test_an_item_and_its_end_may_wait_behind_another() -> None:
    pair = Pair()
    _, there = pair.call()
    for body in (bytes(300_000), b"short"):
        pair.worker.send(there, ITEM, body)
    pair.worker.finish(there)
    kinds = [kind for kind, _ in pair.client_events()]
    assert kinds == [STARTED, ITEM, ITEM, END]


def test_a_large_request_and_large_input_come_whole() -> None:
    pair = Pair()
    value = random.Random(2).randbytes(700_000)
    here, _ = pair.call(value, STREAMED)
    pair.client.send(here, INPUT, value)
    pair.client.end_input(here)
    assert pair.worker_events() == [(INPUT, value), (INPUT_END, None)]
    assert (WRITABLE, None) in pair.client_events()


def test_a_large_error_is_the_end_also_when_it_waits_for_credit() -> None:
    pair = Pair()
    _, there = pair.call()
    error = error_of_exception(ValueError("x"))
    error.public = {"detail": "y" * 500_000}
    pair.worker.end_with(there, ERROR, encode_error(error))
    assert there.id in pair.worker.streams
    assert pair.client_events()[-1] == (ERROR, error)
    assert not pair.worker.streams


@pytest.mark.parametrize("size", [5_000, 600_000])
def test_a_request_over_the_limit_is_refused_and_the_connection_goes_on(
    size: int,
) -> None:
    pair = Pair(worker=Hello(max_message_bytes=4096))
    pair.client.open(*request(bytes(size)))
    ((kind, refusal),) = pair.client_events()
    assert (kind, refusal.code) == (REFUSED, TOO_LARGE)
    assert "max: 4096 bytes" in refusal.text
    pair.call()


def test_no_room_is_made_for_a_request_over_the_limit() -> None:
    class NoMemory(Memory):
        @override
        def take(self, total: int) -> bytearray:
            raise AssertionError(f"room for {total} bytes")

    worker = WorkerSide(Hello(max_message_bytes=4096), NoMemory())
    worker.feed(encode_frame(HELLO, 0, encode_hello(PLAIN)))
    taken(worker)
    credit = worker._room
    frame = encode_frame(PART, 1, part(1 << 30))
    assert fed(worker, frame) == []
    assert [(kind, number) for kind, number, _ in frames_in(taken(worker))] == [
        (REFUSED, 1)
    ]
    assert worker._room == credit - len(frame)
    assert not worker.streams


def test_no_id_or_trace_is_longer_than_call_home_carries() -> None:
    most = "\x01" * 8100
    request(head=RequestHead(most, "path", trace=(most[:40], None, None)))
    for head in (
        RequestHead("i" * 70_000, "path"),
        RequestHead("id", "path", trace=("00-x", "s" * 70_000, None)),
    ):
        with pytest.raises(MessageTooLarge, match="headers of 70"):
            request(head=head)
    request(head=RequestHead("i" * 60_000, "path"))


def test_the_sender_refuses_what_is_too_large() -> None:
    exact = len(b"".join(request(bytes(1000))))
    request(bytes(1000), limit=exact)
    with pytest.raises(MessageTooLarge, match=f"limit {exact - 1}"):
        request(bytes(1000), limit=exact - 1)
    head = RequestHead("id", "path", {"k": "v" * MAX_CONTROL_BYTES})
    with pytest.raises(MessageTooLarge, match="control message too large"):
        request(b"", head)


# ------------------------------------------------------------------------------ credit


def test_a_stream_that_is_not_read_stands_still_and_holds_up_nobody() -> None:
    small = Hello(stream_credit=1000, connection_credit=5000)
    pair = Pair(client=small)
    calls = [pair.call() for _ in range(50)]
    for here, _ in calls[1:]:
        pair.client.withhold(here)
    for number in range(100):
        for _, there in calls:
            pair.worker.send(there, ITEM, bytes([number]) * 50)
        pair.move()
    received: dict[int, int] = {}
    for kind, stream, _ in pair.at_client:
        if kind == ITEM:
            received[stream.id] = received.get(stream.id, 0) + 1
    assert received.pop(calls[0][0].id) == 100
    assert set(received.values()) == {-(-1000 // 59)}
    assert all(there.queue for _, there in calls[1:])
    for here, _ in calls:
        pair.client.release(here)
    pair.move()
    assert sum(kind == ITEM for kind, *_ in pair.at_client) == 5000
    assert not pair.worker.waiting


def test_streams_that_wait_for_the_connections_credit_take_turns() -> None:
    pair = Pair(client=Hello(connection_credit=1000))
    streams = [pair.call()[1] for _ in range(3)]
    for there in streams:
        for _ in range(100):
            pair.worker.send(there, ITEM, bytes(50))
    pair.client.feed(taken(pair.worker))
    pair.worker.feed(taken(pair.client))
    turns = [
        number for kind, number, _ in frames_in(taken(pair.worker)) if kind == ITEM
    ]
    assert len(turns) > 6
    assert turns == ([1, 2, 3] * len(turns))[: len(turns)]


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("cut", [0, 100])
def test_the_last_frame_of_a_stream_brings_it_no_more_credit(
    chunks: int, cut: int
) -> None:
    pair = Pair(client=Hello(stream_credit=1000))
    _, there = pair.call()
    pair.worker.send(there, ITEM, bytes(chunks * CHUNK_BYTES))
    pair.worker.finish(there)
    given: list[tuple[int, int]] = []
    while pair.worker.out:
        data = taken(pair.worker)
        for piece in (data[:cut], data[cut:]):
            fed(pair.client, piece)
        said = taken(pair.client)
        given += [(kind, number) for kind, number, _ in frames_in(said)]
        fed(pair.worker, said)
    assert given == [(CREDIT, 1)] * (chunks - 1)
    assert not pair.client.streams


@pytest.mark.slow
def test_no_credit_is_lost_over_100_000_cancelled_calls() -> None:
    pair = Pair()
    for number in range(100_000):
        here = pair.client.open(*request())
        pair.at_worker += pair.worker.feed(taken(pair.client))
        for kind, there, _ in pair.at_worker:
            if kind == REQUEST:
                pair.worker.send(there, ITEM, b"x" * 100)
        pair.at_worker.clear()
        pair.client.kill(here)
        if number % 100 == 0:
            pair.move()
            pair.clear()
    pair.move()
    assert pair.client._credit > Hello().connection_credit // 2 - 1
    assert pair.worker._credit > Hello().connection_credit // 2 - 1
    assert not pair.worker.streams
    assert not pair.client.streams
    assert not pair.worker.waiting


def test_requests_wait_for_the_connections_credit_and_keep_their_order() -> None:
    pair = Pair(worker=Hello(connection_credit=100))
    for number in range(40):
        pair.client.open(*request(bytes([number]) * 30))
    assert [stream.id for stream in pair.client.waiting][-1] == 0
    pair.move()
    values = [payload[1][0] for kind, _, payload in pair.at_worker]
    ids = [stream.id for _, stream, _ in pair.at_worker]
    assert sorted(values) == list(range(40))
    assert ids == sorted(ids)


def test_a_call_that_never_left_is_stopped_without_a_word() -> None:
    pair = Pair(worker=Hello(connection_credit=100))
    first = pair.client.open(*request(bytes(200)))
    second = pair.client.open(*request())
    third = pair.client.open(*request())
    assert (first.id, second.id) == (1, 0)
    assert not pair.client.stop(second)
    pair.client.kill(third)
    assert [kind for kind, _ in pair.worker_events()] == [REQUEST]


def test_half_a_request_that_is_stopped_is_forgotten_by_both() -> None:
    pair = Pair(worker=Hello(stream_credit=1000))
    for end in (pair.client.stop, pair.client.kill):
        here = pair.client.open(*request(bytes(300_000)))
        pair.at_worker += pair.worker.feed(taken(pair.client))
        end(here)
        assert pair.worker_events() == []
        assert not pair.worker.streams
    assert pair.client_events() == [(RESET, None)]


def test_a_sender_that_ignores_the_credit_breaks_the_protocol() -> None:
    pair = Pair(client=Hello(stream_credit=1000))
    here, there = pair.call()
    pair.client.withhold(here)
    item = encode_frame(ITEM, there.id, bytes(991))
    pair.client.feed(item)
    with pytest.raises(RemoteProtocolError, match="beyond the credit"):
        pair.client.feed(item)


@pytest.mark.parametrize("number", [0, 1])
def test_credit_beyond_reason_breaks_the_protocol(number: int) -> None:
    with pytest.raises(RemoteProtocolError, match="a credit of"):
        opened().worker.feed(encode_frame(CREDIT, number, encode_number(2**31)))


# ------------------------------------------------------------------- draining, liveness


def test_calls_above_the_last_that_was_taken_go_elsewhere() -> None:
    pair = Pair()
    here, there = pair.call()
    pair.worker.go_away()
    pair.worker.go_away()
    late = pair.client.open(*request(bytes(200_000)))
    pair.at_worker += pair.worker.feed(taken(pair.client))
    pair.move()
    ((kind, stream, refusal),) = pair.at_client
    assert (kind, stream, refusal.code) == (REFUSED, late, UNAVAILABLE)
    assert pair.at_worker == []
    assert not pair.client.usable
    pair.clear()
    pair.worker.finish(there)
    assert [kind for kind, _ in pair.client_events()] == [STARTED, END]
    assert here.id not in pair.client.streams


def test_calls_that_wait_for_credit_go_elsewhere_too() -> None:
    pair = Pair(worker=Hello(connection_credit=100))
    pair.client.open(*request(bytes(200)))
    waiting = pair.client.open(*request())
    pair.at_client += pair.feed(pair.client, encode_frame(GOAWAY, 0, encode_number(1)))
    assert [(kind, stream) for kind, stream, _ in pair.at_client] == [
        (REFUSED, waiting)
    ]


def test_ids_come_to_their_end_in_good_time() -> None:
    pair = Pair()
    assert pair.client.usable
    pair.client.last_id = LAST_ID_TO_OPEN
    assert not pair.client.usable
    assert not ClientSide(Hello()).usable


def test_a_ping_is_answered_with_its_own_bytes() -> None:
    pair = Pair()
    pair.client.ping()
    assert frames_in(taken(pair.client)) == [(PING, 0, b"")]
    pair.worker.feed(encode_frame(PING, 0, b"12345678"))
    assert frames_in(b"".join(pair.worker.out)) == [(PONG, 0, b"12345678")]
    pair.move()


def test_what_was_never_handed_to_the_socket_is_known() -> None:
    pair = Pair(worker=Hello(stream_credit=1000))
    pair.call()
    partly = pair.client.open(*request(bytes(300_000)))
    taken(pair.client)
    here = pair.client.open(*request())
    gone = pair.client.open(*request())
    pair.client.kill(gone)
    assert pair.client.never_left() == {partly, here}
    assert ClientSide(Hello()).never_left() == set()


def test_nothing_waits_on_a_connection_that_is_lost() -> None:
    pair = Pair(worker=Hello(stream_credit=1000, connection_credit=2000))
    here, there = pair.call()
    pair.worker.send(there, ITEM, bytes(600_000))
    partly = pair.client.open(*request(bytes(300_000)))
    never = pair.client.open(*request())
    assert (never.id, bool(there.queue)) == (0, True)
    assert pair.client.lost() == [here, partly, never]
    assert pair.worker.lost() == [there]
    for side in (pair.client, pair.worker):
        assert not side.streams
        assert not side.waiting
    assert not any(one.queue for one in (there, partly, never))


# ----------------------------------------------------------------------- out of place


def opened() -> Pair:
    pair = Pair()
    pair.call()
    return pair


def started() -> Pair:
    pair = opened()
    (there,) = pair.worker.streams.values()
    pair.worker.send(there, ITEM, b"x")
    pair.move()
    return pair


def part(total: int) -> bytes:
    return encode_number(total) + bytes(CHUNK_BYTES)


def half() -> Pair:
    """The first of two chunks of an item has come."""
    pair = opened()
    pair.client.feed(encode_frame(PART, 1, part(2 * CHUNK_BYTES)))
    return pair


FROM_WORKER = {
    "ITEM of a stream that was never opened": (opened, ITEM, 2, b""),
    "ITEM without stream": (opened, ITEM, 0, b""),
    "END of a stream that was never opened": (opened, END, 2, b""),
    "CREDIT of a stream that was never opened": (opened, CREDIT, 2, encode_number(1)),
    "QUEUED after an item": (started, QUEUED, 1, b""),
    "ACCEPT after an item": (started, ACCEPT, 1, b""),
    "HANDLER_REFUSED after an item": (started, HANDLER_REFUSED, 1, b"\x91\xa0"),
    "REFUSED after an item": (started, REFUSED, 1, b"\x92\x01\xa0"),
    "REQUEST from a worker": (opened, REQUEST, 1, b""),
    "INPUT from a worker": (opened, INPUT, 1, b""),
    "STOP from a worker": (opened, STOP, 1, b""),
    "a second HELLO": (opened, HELLO, 0, encode_hello(Hello())),
    "GOAWAY of a stream": (opened, GOAWAY, 1, encode_number(1)),
    "GOAWAY of three bytes": (opened, GOAWAY, 0, b"123"),
    "CREDIT of five bytes": (opened, CREDIT, 0, b"12345"),
    "PING with nine bytes": (opened, PING, 0, b"123456789"),
    "PING of a stream": (opened, PING, 1, b""),
    "PONG with nine bytes": (opened, PONG, 0, b"123456789"),
    "PONG of a stream": (opened, PONG, 1, b""),
    "END with a payload": (opened, END, 1, b"x"),
    "a type that must be understood": (opened, 0x7F, 0, b""),
    "an error that is unreadable": (opened, ERROR, 1, b"\xc1"),
    "a refusal that is unreadable": (opened, REFUSED, 1, b"\xc1"),
    "a short PART": (opened, PART, 1, b"x"),
    "a PART of a short message": (opened, PART, 1, part(CHUNK_BYTES)),
    "a PART of another message": (half, PART, 1, part(2 * CHUNK_BYTES + 1)),
    "a PART too many": (half, PART, 1, part(2 * CHUNK_BYTES)),
    "an end that is too long": (half, ITEM, 1, bytes(CHUNK_BYTES + 1)),
    "an end that is too short": (half, ITEM, 1, b"x"),
}
FROM_CLIENT = {
    "ITEM from a client": (opened, ITEM, 1, b""),
    "INPUT of a single request": (opened, INPUT, 1, b""),
    "INPUT_END of a single request": (opened, INPUT_END, 1, b""),
    "a second REQUEST": (opened, REQUEST, 1, b"".join(request())),
    "STOP of a stream that was never opened": (opened, STOP, 2, b""),
    "INPUT of a stream that was never opened": (opened, INPUT, 2, b""),
    "ACCEPT from a client": (opened, ACCEPT, 1, b""),
    "a request without head": (opened, REQUEST, 2, b"\x00"),
    "a request with a head that is cut": (opened, REQUEST, 2, b"\0\0\0\x09\x90"),
    "a request with an unreadable head": (opened, REQUEST, 2, b"\0\0\0\x01\xc1"),
    "a request with unknown flags": (
        opened,
        REQUEST,
        2,
        b"".join(request(head=RequestHead("", "", flags=2))),
    ),
}


@pytest.mark.parametrize("case", FROM_WORKER)
def test_frame_out_of_place_from_a_worker_is_a_connection_error(case: str) -> None:
    make, kind, number, payload = FROM_WORKER[case]
    with pytest.raises(RemoteProtocolError):
        fed(make().client, encode_frame(kind, number, payload))


@pytest.mark.parametrize("case", FROM_CLIENT)
def test_frame_out_of_place_from_a_client_is_a_connection_error(case: str) -> None:
    make, kind, number, payload = FROM_CLIENT[case]
    with pytest.raises(RemoteProtocolError):
        fed(make().worker, encode_frame(kind, number, payload))


# An item of two chunks, whose first one has come.
LAST = encode_frame(ITEM, 1, bytes(CHUNK_BYTES))


def test_a_part_of_a_stream_that_is_gone_is_counted_and_dropped() -> None:
    pair = opened()
    (here,) = pair.client.streams.values()
    pair.client.kill(here)
    credit = pair.client._room
    frame = encode_frame(PART, 1, part(2 * CHUNK_BYTES))
    assert fed(pair.client, frame) == []
    assert pair.client._room == credit - len(frame)


def test_an_item_whose_stream_is_killed_while_it_is_read_directly_is_dropped() -> None:
    pair = half()
    (here,) = pair.client.streams.values()
    assert fed(pair.client, LAST[:100]) == []
    assert pair.client.direct
    pair.client.kill(here)
    assert read(pair.client, LAST[100:] + encode_frame(PING, 0, bytes(8))) == []
    assert not pair.client.direct
    assert PONG in [kind for kind, *_ in frames_in(taken(pair.client))]


@pytest.mark.parametrize(
    ("last", "behind"),
    [
        (encode_frame(REQUEST, 1, bytes(CHUNK_BYTES)), b""),
        (encode_frame(PART, 1, part(3 * CHUNK_BYTES)), b"\x7f" * 9),
    ],
    ids=["no message of a worker", "no frame behind it"],
)
def test_what_is_read_directly_may_break_the_protocol(
    last: bytes, behind: bytes
) -> None:
    pair = opened()
    chunks = 3 if behind else 2
    fed(pair.client, encode_frame(PART, 1, part(chunks * CHUNK_BYTES)))
    assert fed(pair.client, last[:100]) == []
    assert pair.client.direct
    with pytest.raises(RemoteProtocolError):
        read(pair.client, last[100:] + behind)
    with pytest.raises(RemoteProtocolError):
        pair.client.feed(LAST)


@pytest.mark.parametrize(
    ("last", "behind", "told"),
    [
        (encode_frame(ERROR, 1, b"\xc1" * CHUNK_BYTES), b"", [STARTED]),
        (LAST, b"\x7f" * 9, [STARTED, ITEM]),
    ],
    ids=["an error that is unreadable", "no frame behind an item"],
)
def test_what_stands_before_a_mistake_is_told_before_it(
    last: bytes, behind: bytes, told: list[int]
) -> None:
    pair = half()
    assert fed(pair.client, last[:100]) == []
    assert pair.client.direct
    events = pair.client.feed(last[100:] + behind)
    assert [kind for kind, *_ in events] == told
    with pytest.raises(RemoteProtocolError):
        pair.client.check()


@pytest.mark.parametrize("kind", [PING, REQUEST, PART, INPUT, 0x90])
def test_nothing_may_come_before_hello(kind: int) -> None:
    with pytest.raises(RemoteProtocolError):
        WorkerSide(Hello()).feed(encode_frame(kind, 1))


@pytest.mark.parametrize(
    ("kind", "limit"), [(ITEM, CHUNK_BYTES), (PING, CHUNK_BYTES), (PART, PART_BYTES)]
)
def test_a_frame_over_the_limit_breaks_the_protocol_at_once(
    kind: int, limit: int
) -> None:
    assert fed(opened().client, pack_header(limit, kind, 1)) == []
    with pytest.raises(RemoteProtocolError, match=f"over its limit of {limit}"):
        opened().client.feed(pack_header(limit + 1, kind, 1))


def test_types_of_later_versions_are_skipped() -> None:
    pair = started()
    pair.at_client += pair.feed(pair.client, encode_frame(0x80, 77, b"whatever"))
    pair.at_client += pair.feed(pair.client, encode_frame(ITEM, 1, b"y"))
    assert pair.client_events()[-1] == (ITEM, b"y")


def test_after_rubbish_a_side_takes_nothing() -> None:
    pair = opened()
    for _ in range(2):
        with pytest.raises(RemoteProtocolError):
            pair.client.feed(encode_frame(STOP, 1))


# ------------------------------------------------------------------------- properties

SIZES = st.integers(0, 1_000_000) | st.integers(0, 200)
ACTIONS = st.sampled_from(["call", "input", "item", "end", "move"])


class Talk:
    """Calls, values and items in any order, and what should have come of them."""

    def __init__(self, credit: Hello, seed: int, draw: Any) -> None:
        self.pair = Pair(credit, credit, seed)
        self.chance = random.Random(seed)
        self.draw = draw
        self.sent: dict[Stream, list[bytes]] = {}
        self.answered: dict[int, list[bytes]] = {}
        self.finished: set[int] = set()

    def do(self, action: str) -> None:
        body = self.chance.randbytes(self.draw(SIZES))
        there = self.pair.worker.streams
        asked = [one.id for one in there.values() if one.input_open]
        answering = [number for number in asked if number not in self.finished]
        asking = [one for one in self.sent if one.id not in self.finished]
        if action == "call":
            self.sent[self.pair.client.open(*request(body, STREAMED))] = [body]
        elif action == "move":
            self.pair.move()
        elif action == "input" and asking:
            stream = self.draw(st.sampled_from(asking))
            self.pair.client.send(stream, INPUT, body)
            self.sent[stream].append(body)
        elif action in ("item", "end") and answering:
            number = self.draw(st.sampled_from(answering))
            self.answer(there[number], body, last=action == "end")

    def answer(self, stream: Stream, body: bytes, *, last: bool) -> None:
        items = self.answered.setdefault(stream.id, [])
        if last:
            self.finished.add(stream.id)
            self.pair.worker.finish(stream)
        else:
            self.pair.worker.send(stream, ITEM, body)
            items.append(body)

    def arrived(self) -> tuple[dict[int, list[bytes]], dict[int, list[bytes]]]:
        """What the worker and the client received, by stream."""
        there: dict[int, list[bytes]] = {}
        here: dict[int, list[bytes]] = {}
        for kind, stream, payload in self.pair.at_worker:
            if kind == REQUEST:
                there[stream.id] = [payload[1]]
            elif kind == INPUT:
                there[stream.id].append(payload)
        for kind, stream, payload in self.pair.at_client:
            if kind == STARTED:
                here[stream.id] = []
            elif kind == ITEM:
                here[stream.id].append(payload)
            elif kind == ANSWER:
                assert stream.id not in here
                here[stream.id] = [payload]
        return there, here


@settings(deadline=None, max_examples=60)
@given(
    data=st.data(),
    seed=st.integers(0, 2**32),
    stream_credit=st.integers(1, 400_000),
    connection_credit=st.integers(1, 400_000),
)
def test_any_interleaving_and_any_cut_gives_the_right_streams(
    data: st.DataObject, seed: int, stream_credit: int, connection_credit: int
) -> None:
    credit = Hello(stream_credit=stream_credit, connection_credit=connection_credit)
    talk = Talk(credit, seed, data.draw)
    for action in data.draw(st.lists(ACTIONS, max_size=25)):
        talk.do(action)
    pair = talk.pair
    pair.move()
    there, here = talk.arrived()
    for stream, values in talk.sent.items():
        # Input of a stream that has ended does not get through, or not whole.
        received = there[stream.id]
        assert received == values[: len(received)]
        assert received == values or stream.id in talk.finished
    assert here == talk.answered
    ended = {stream.id for kind, stream, _ in pair.at_client if kind in (END, ANSWER)}
    assert ended == talk.finished
    assert set(pair.client.streams) == set(pair.worker.streams) == set(there) - ended
    assert not pair.client.waiting
    assert not pair.worker.waiting


@given(head=st.builds(RequestHead, st.text(), st.text()), value=st.binary())
def test_what_is_written_is_read(head: RequestHead, value: bytes) -> None:
    assert decode_request(b"".join(request(value, head))) == (head, value)
