"""One target per reader of ``_wire``: any input, only documented exceptions.

A target takes bytes and returns what came of them, in a few words: an engine without
coverage takes a new outcome for a sign of new code.  What a target raises is a finding:
an exception that the reader does not document, or an invariant that does not hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from dynamo.runtime._sealed import override
from dynamo.runtime._wire import (
    callhome,
    duplex,
    duplex_frames,
    faults,
    framing,
    payload,
    propagation,
    records,
)
from dynamo.runtime._wire.framing import FrameReader
from dynamo.runtime._wire.two_part import (
    TwoPart,
    TwoPartReader,
    decode_two_part,
    encode_two_part,
)
from dynamo.runtime.errors import (
    LocalProtocolError,
    MessageTooLarge,
    RemoteProtocolError,
)
from fuzz.seeds import CHUNK_BYTES

MAX_MESSAGE_BYTES = 4096
# A request's fields are read before its size is known: two lengths of 16 bits each.
MAX_HELD_BYTES: dict[type, int] = {
    callhome.RequestReader: 2 + 0xFFFF + 2 + 0xFFFF + 4,
    callhome.AckReader: 4 + 65536,
    TwoPartReader: MAX_MESSAGE_BYTES,
}
_CUTS_BYTES = 4

Event = TypeVar("Event")


@dataclasses.dataclass(frozen=True)
class Target:
    """What is called, the names that it covers, and the kind of seeds it begins with.

    Attributes:
        covers: ``module.name`` of each reader below ``_wire`` that it exercises.
        seeds: A kind of `fuzz.seeds`.
    """

    name: str
    run: Callable[[bytes], str]
    covers: tuple[str, ...]
    seeds: str


TARGETS: dict[str, Target] = {}


def target(
    seeds: str, *covers: str
) -> Callable[[Callable[[bytes], str]], Callable[[bytes], str]]:
    """Register a function under its own name."""

    def register(run: Callable[[bytes], str]) -> Callable[[bytes], str]:
        TARGETS[run.__name__] = Target(run.__name__, run, covers, seeds)
        return run

    return register


def require(holds: bool, *facts: object) -> None:
    """Like assert, also with ``python -O``."""
    if not holds:
        raise AssertionError(" | ".join(map(repr, facts)))


# ------------------------------------------------------------------ readers of streams


def pieces_of(stream: bytes, sizes: bytes) -> Iterator[bytes]:
    """The stream cut into pieces of these sizes, over and over."""
    at = turn = 0
    while at < len(stream):
        size = 1 + sizes[turn % len(sizes)]
        yield stream[at : at + size]
        at += size
        turn += 1


@contextlib.contextmanager
def small_is_large() -> Iterator[None]:
    """Messages of a few bytes take the ways of large ones."""
    small = {
        (framing, "_ASSEMBLED_BYTES"): 40,
        (framing, "_DIRECT_BYTES"): 8,
        (framing, "_FIRST_ROOM_BYTES"): 16,
        (duplex, "CHUNK_BYTES"): CHUNK_BYTES,
        (duplex, "PART_BYTES"): duplex_frames.PART_HEAD_BYTES + CHUNK_BYTES,
    }
    usual = {(module, name): getattr(module, name) for module, name in small}
    try:
        for (module, name), size in small.items():
            setattr(module, name, size)
        yield
    finally:
        for (module, name), size in usual.items():
            setattr(module, name, size)


def read(reader: FrameReader[Event], data: bytes, events: list[Event]) -> None:
    """As a connection does: the rest of a large frame is read to where it belongs."""
    while data and reader.direct:
        space = reader.space()
        require(len(space) > 0, "nowhere to read to")
        taken = data[: len(space)]
        space[: len(taken)] = taken
        data = data[len(taken) :]
        events += reader.filled(len(taken))
        reader.check()
    if data:
        events += reader.feed(data)
        reader.check()


def feed(
    reader: FrameReader[Event], pieces: Iterator[bytes]
) -> tuple[list[Event], str]:
    """The events, and the error that ended them or that the end of file raised."""
    events: list[Event] = []
    fed = 0
    try:
        for piece in pieces:
            fed += len(piece)
            read(reader, piece, events)
            check_held(reader, fed)
        reader.feed_eof()
    except RemoteProtocolError as error:
        return events, str(error)
    return events, ""


def check_held(reader: FrameReader[Any], fed: int) -> None:
    held = reader.held_bytes
    require(held <= fed, "more is kept than was fed", held, fed)
    limit = MAX_HELD_BYTES[type(reader)]
    require(held < limit, "an unfinished frame is kept beyond the limit", held, limit)
    if len(reader._parts) == 1:  # counting all of them each time would be quadratic
        require(len(reader._parts[0]) == held, "kept is not what is counted", held)


def read_stream(make: Callable[[], FrameReader[Event]], data: bytes) -> list[Event]:
    """The events of a stream, which are the same in one piece, many, and single bytes."""
    sizes, stream = data[:_CUTS_BYTES] or b"\0", data[_CUTS_BYTES:]
    whole, error = feed(make(), iter([stream] if stream else []))
    for each in (sizes, b"\0") if len(stream) < 1024 else (sizes,):
        events, other_error = feed(make(), pieces_of(stream, each))
        require(error == other_error, "errors depend on the pieces", error, other_error)
        # What stood before the broken frame in the same piece is not delivered.
        same = events == whole or (error and events[: len(whole)] == whole)
        require(bool(same), "events depend on the pieces", whole, events)
        whole = events
    return whole


def read_both_ways(make: Callable[[], FrameReader[Event]], data: bytes) -> list[Event]:
    """As `read_stream`, and the same if all frames but the shortest are large."""
    usual = read_stream(make, data)
    with small_is_large():
        large = read_stream(make, data)
    require(usual == large, "other events when large", usual, large)
    return usual


def kinds(events: list[Any]) -> str:
    return " ".join(type(event).__name__ for event in events[:4])


@target("requests", "callhome.RequestReader")
def request_reader(data: bytes) -> str:
    """The worker's side of a request connection."""
    events = read_both_ways(lambda: callhome.RequestReader(MAX_MESSAGE_BYTES), data)
    for event in events[:-1]:
        require(isinstance(event, callhome.RequestReceived), "goes on after", event)
    again = b"".join(map(_frame_of, events))
    if again:
        reread = callhome.RequestReader(2 * MAX_MESSAGE_BYTES).feed(again)
        wanted = [event for event in events if _frame_of(event)]
        require(reread == wanted, "another request when sent on", wanted, reread)
    return kinds(events)


def _frame_of(event: object) -> bytes:
    """A request sent on; nothing for one whose path cannot be."""
    if not isinstance(event, callhome.RequestReceived) or event.path is None:
        return b""
    return callhome.encode_request_frame(
        event.path,
        event.headers,
        event.payload,
        max_message_bytes=2 * MAX_MESSAGE_BYTES,
    )


@target("acks", "callhome.AckReader")
def ack_reader(data: bytes) -> str:
    """The client's side of a request connection."""
    events = read_stream(callhome.AckReader, data)
    texts = [event.text for event in events]
    (*_, refusal) = [None, *(event.refusal for event in events)]
    again = callhome.AckReader().feed(b"".join(map(callhome.encode_ack, texts[:8])))
    require([event.text for event in again] == texts[:8], "other texts", texts, again)
    return f"{kinds(events)} {refusal}"


@target("frames", "two_part.TwoPartReader", "two_part.decode_two_part")
def two_part_reader(data: bytes) -> str:
    """Response and request-stream connections; a whole message reads the same."""
    events = read_both_ways(lambda: TwoPartReader(MAX_MESSAGE_BYTES), data)
    again = b"".join(encode_two_part(event.header, event.body) for event in events)
    require(TwoPartReader().feed(again) == events, "other messages", events)
    stream = data[_CUTS_BYTES:]
    try:
        message = decode_two_part(stream)
    except RemoteProtocolError as error:
        require(not events, "whole in the stream, but not alone", str(error))
        return "error"
    size = 24 + len(message.header) + len(message.body)
    if size <= MAX_MESSAGE_BYTES:
        alone = TwoPartReader(MAX_MESSAGE_BYTES).feed(stream[:size])
        require(alone == [message], "another message alone", message, alone)
    return kinds(events)


# -------------------------------------------------------------------- the duplex lane

SMALL_CREDIT = duplex_frames.Hello(
    stream_credit=64, connection_credit=256, max_message_bytes=MAX_MESSAGE_BYTES
)


def named(side: duplex.ClientSide | duplex.WorkerSide, events: list[Any]) -> list[Any]:
    """The events with numbers for streams, so that those of two readers compare."""
    for stream in side.waiting:
        known = side.streams.get(stream.id) is stream or not stream.id
        require(known, "something waits on a stream that is gone", stream.id)
    require(len(side.streams) <= side.last_id, "more streams than ids", side.last_id)
    each: list[Any] = []
    for kind, one, said in events:
        # What was read directly may have been named before.
        number = getattr(one, "id", one)
        if kind == duplex_frames.ITEM and one is not number:
            one.items = None
            each += [(kind, number, body) for body in said]
        else:
            each.append((kind, number, said))
    return each


class Worker(duplex.WorkerSide):
    """A worker's side behind the client's preface."""

    def __init__(self) -> None:
        super().__init__(SMALL_CREDIT)

    @override
    def feed(self, data: bytes) -> list[Any]:
        return named(self, super().feed(data))

    @override
    def filled(self, size: int) -> list[Any]:
        return named(self, super().filled(size))


class Client(duplex.ClientSide):
    """A client's side that was greeted, and has made calls."""

    def __init__(self) -> None:
        super().__init__(SMALL_CREDIT)
        super().feed(b"".join(duplex.WorkerSide(SMALL_CREDIT).out))
        for number in range(3):
            head = duplex_frames.RequestHead("id", "path", flags=number % 2)
            front = duplex_frames.encode_request_front(head, 1, MAX_MESSAGE_BYTES)
            self.open(front, b"x")

    @override
    def feed(self, data: bytes) -> list[Any]:
        return named(self, super().feed(data))

    @override
    def filled(self, size: int) -> list[Any]:
        return named(self, super().filled(size))


# The longest frame is a PART of the chunks that these targets have.
for _side in (Worker, Client):
    MAX_HELD_BYTES[_side] = (
        duplex_frames.HEADER_BYTES + duplex_frames.PART_HEAD_BYTES + CHUNK_BYTES
    )


@target(
    "duplex_worker",
    "duplex_frames.decode_hello",
    "duplex_frames.decode_number",
    "duplex_frames.decode_request",
)
def duplex_worker_side(data: bytes) -> str:
    """What a client says."""
    with small_is_large():
        return " ".join(f"{kind:x}" for kind, *_ in read_stream(Worker, data)[:6])


@target(
    "duplex_client",
    "duplex_frames.decode_error",
    "duplex_frames.decode_handler_refusal",
    "duplex_frames.decode_refusal",
)
def duplex_client_side(data: bytes) -> str:
    """What a worker says to a client with three calls."""
    with small_is_large():
        return " ".join(f"{kind:x}" for kind, *_ in read_stream(Client, data)[:6])


# ----------------------------------------------------------- state machines of frames


def frames_of(data: bytes) -> list[TwoPart]:
    """The messages at the head of a stream, whatever stands behind them."""
    reader, frames = TwoPartReader(MAX_MESSAGE_BYTES), []
    with contextlib.suppress(RemoteProtocolError):
        for at in range(0, len(data), 24):
            frames += reader.feed(data[at : at + 24])
            reader.check()
    return frames


def receive_response(data: bytes, codec: str) -> str:
    """A response connection: a prologue first, and nothing after the end."""
    receiver = callhome.ResponseReceiver(codec)
    receiver.stopped = bool(data) and data[0] % 2 == 1
    events: list[callhome.ResponseEvent] = []
    for frame in frames_of(data[1:]):
        event = receiver.receive(frame)
        if event is not None:
            events.append(event)
            check_response_event(event, first=len(events) == 1)
    last = receiver.receive_eof()
    ended = receiver.receive_eof(), receiver.receive(TwoPart(b"", b"\x80"))
    require(ended == (None, None), "something after the end of file", ended)
    closing = [one for one in [*events, last] if isinstance(one, callhome.StreamEnded)]
    require(len(closing) <= 1, "ended twice", events)
    return f"{kinds(events)} {type(last).__name__}"


def check_response_event(event: callhome.ResponseEvent, *, first: bool) -> None:
    is_prologue = isinstance(event, callhome.PrologueReceived)
    require(is_prologue == first, "a prologue is first, and nothing else is", event)
    if isinstance(event, callhome.PrologueReceived):
        if event.error is not None:
            faults.exception_of_prologue(event.error, event.typed_error)
        if event.typed_error is not None:
            check_error(event.typed_error)
    elif isinstance(event, callhome.ErrorReceived):
        check_error(event.error)


def check_error(error: faults.ErrorObject) -> None:
    """A received error is settled, can be raised, sent on and judged."""
    require(faults.settled(error) == error, "not settled", error)
    str(faults.exception_of_error(error))
    faults.inhibits(error)
    raised = faults.exception_of_error(error)
    sent_on = faults.error_of_exception(raised)
    require(len(sent_on.words.encode()) <= 4096, "a text over the limit", sent_on)


@target("responses_msgpack", "callhome.ResponseReceiver")
def response_receiver_msgpack(data: bytes) -> str:
    """Items in MessagePack."""
    return receive_response(data, "msgpack")


@target("responses_json", "callhome.ResponseReceiver")
def response_receiver_json(data: bytes) -> str:
    """Items in JSON."""
    return receive_response(data, "json")


def receive_input(data: bytes, codec: str) -> str:
    """A request stream: values, then one end, then nothing."""
    receiver = callhome.RequestStreamReceiver(codec)
    events = [receiver.receive(frame) for frame in frames_of(data[1:])]
    events.append(receiver.receive_eof())
    present = [event for event in events if event is not None]
    require(present == events[: len(present)], "something after the end", events)
    values, ends = present[:-1], present[-1:]
    good = all(isinstance(value, callhome.InputReceived) for value in values)
    require(good and not isinstance(ends[0], callhome.InputReceived), "order", events)
    return f"{kinds(values)} {ends}"


@target("inputs_msgpack", "callhome.RequestStreamReceiver")
def request_stream_receiver_msgpack(data: bytes) -> str:
    """Input in MessagePack."""
    return receive_input(data, "msgpack")


@target("inputs_json", "callhome.RequestStreamReceiver")
def request_stream_receiver_json(data: bytes) -> str:
    """Input in JSON."""
    return receive_input(data, "json")


@target("controls", "callhome.decode_control")
def control(data: bytes) -> str:
    """What a client tells a worker; rubbish kills."""
    return " ".join(callhome.decode_control(frame).name for frame in frames_of(data))


@target("handshakes", "callhome.decode_handshake")
def handshake(data: bytes) -> str:
    """The first frame of a connection that a worker opens."""
    outcome = ""
    for frame in frames_of(data)[:1]:
        try:
            read = callhome.decode_handshake(frame)
        except RemoteProtocolError as error:
            return str(error)[:24]
        raw = callhome.encode_handshake(read.subject, read.stream_type)
        (again,) = TwoPartReader().feed(raw)
        require(callhome.decode_handshake(again) == read, "another handshake", read)
        outcome = read.stream_type
    return outcome


# --------------------------------------------------------------------------- values


@target("payloads", "callhome.decode_request_payload")
def request_payload(data: bytes) -> str:
    """Control header and body of a request."""
    try:
        read = callhome.decode_request_payload(data)
    except callhome.BadRequest as error:
        return f"{error.control is None} {str(error)[:24]}"
    try:
        raw = callhome.encode_request_payload(*read)
    except MessageTooLarge:
        return "too large"
    require(callhome.decode_request_payload(raw) == read, "another request", read)
    return f"{read[0].codec} {read[0].request_type == 'many_in'} {read[1] is None}"


def value_in(data: bytes, codec: str) -> str:
    """A value that was read can be written, and reads as itself from then on."""
    try:
        value = payload.decode_value(data, codec)
    except RemoteProtocolError as error:
        return str(error)[:40]
    payload.genuine_can_decode(value)
    try:
        raw = payload.encode_value(value, codec)
    except OverflowError:
        require(
            codec == "json", "an integer that MessagePack itself cannot hold", value
        )
        return "OverflowError"
    except ValueError as error:  # reading goes deeper than writing
        require("nested more deeply" in str(error), "cannot be written", value, error)
        return "nested"
    again = payload.encode_value(payload.decode_value(raw, codec), codec)
    require(again == raw, "written differently the second time", raw, again)
    return type(value).__name__


@target("values_msgpack", "payload.decode_value")
def value_msgpack(data: bytes) -> str:
    """A request's body or an input in MessagePack."""
    return value_in(data, "msgpack")


@target("values_json", "payload.decode_value")
def value_json(data: bytes) -> str:
    """A request's body or an input in JSON."""
    return value_in(data, "json")


def annotated_in(data: bytes, codec: str) -> str:
    """An envelope; its members are strings, so that all but the data can be written."""
    try:
        item = payload.decode_annotated(data, codec)
    except RemoteProtocolError as error:
        return str(error)[:40]
    spelt = payload.error_in(item)
    if spelt is not None:
        check_error(faults.settled(spelt))
        if spelt.public is not None:
            return "public part"  # any value
    members = members_of(item)
    raw = payload.encode_annotated(codec, has_data=False, **members)
    again = members_of(payload.decode_annotated(raw, codec))
    require(again == members, "another envelope", item)
    return " ".join(name for name, value in members.items() if value is not None)


def members_of(item: payload.Annotated) -> dict[str, Any]:
    """All but the data."""
    return {
        "id": item.id(),
        "event": item.event(),
        "comment": item.comments(),
        "error": payload.error_in(item),
    }


@target("items_msgpack", "payload.decode_annotated")
def annotated_msgpack(data: bytes) -> str:
    """An envelope in MessagePack."""
    return annotated_in(data, "msgpack")


@target("items_json", "payload.decode_annotated")
def annotated_json(data: bytes) -> str:
    """An envelope in JSON."""
    return annotated_in(data, "json")


@target("records", "records.decode_record", "records.split_tcp_address")
def record(data: bytes) -> str:
    """What a discovery store holds."""
    try:
        read = records.decode_record(data)
    except RemoteProtocolError as error:
        return str(error)[:40]
    again = records.decode_record(records.encode_record(read))
    require(again == read, "another record", read, again)
    parsed = records.parse_instance_key(read.key)
    plain = not any("/" in part for part in read.name)
    require(not plain or parsed == (read.name, read.instance_id), "key", read, parsed)
    return f"{read.codec} {read.ours} {address_in(read.address)}"


@target("cards", "records.decode_model_card")
def model_card(data: bytes) -> str:
    """What a discovery store holds of a model."""
    try:
        card = records.decode_model_card(data)
    except RemoteProtocolError as error:
        return str(error)[:40]
    texts = all(isinstance(one, str) for one in card.texts.values())
    require(texts, "a value that is no text", card)
    require(0 <= card.instance_id <= records.MAX_INSTANCE_ID, "id", card)
    return f"{len(card.texts)} {card.suffix is None}"


def address_in(text: str) -> str:
    try:
        address = records.split_tcp_address(text)
    except RemoteProtocolError as error:
        return str(error)[-24:]
    again = records.split_tcp_address(records.tcp_address(*address))
    require(again == address, "another address", address, again)
    return "address"


@target("addresses", "records.split_tcp_address", "records.split_host_port")
def tcp_address(data: bytes) -> str:
    """The address in a record, and the one in a request's connection info."""
    text = text_of(data)
    outcome = address_in(text)
    try:
        host, port = records.split_host_port(text)
    except RemoteProtocolError as error:
        return f"{outcome} {str(error)[-24:]}"
    authority = records.TcpAddress(host, port, "").authority
    require(records.split_host_port(authority) == (host, port), "host", text)
    return outcome


@target(
    "names",
    "records.key_of_file_name",
    "records.parse_instance_key",
    "records.parse_endpoint_path",
)
def names(data: bytes) -> str:
    """Names of files, keys and endpoint paths; also those that no UTF-8 can carry."""
    text = text_of(data)
    key = records.key_of_file_name(text)
    if key is not None:
        name = records.file_name_of_key(key)
        require(records.key_of_file_name(name) == key, "another key", key)
    parsed = records.parse_instance_key(key or text)
    if parsed is not None:
        again = records.parse_instance_key(records.instance_key(*parsed))
        require(again == parsed, "another instance", parsed, again)
    return f"{key is None} {parsed is None} {endpoint_in(text)}"


def endpoint_in(text: str) -> str:
    try:
        name = records.parse_endpoint_path(text)
        path = records.endpoint_wire_path(name, 1)
    except (ValueError, LocalProtocolError) as error:
        return type(error).__name__
    require(path.count("/") == 3, "names that are not escaped", path)
    return "path"


def text_of(data: bytes) -> str:
    """Text as operating systems hand out names: bytes or half characters escaped."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("utf-8", "surrogateescape")


@target(
    "headers",
    "propagation.read_trace",
    "propagation.sent_by_ours",
    "propagation.read_remaining_ms",
)
def trace_headers(data: bytes) -> str:
    """The headers of a request; trace and time left are passed on unchanged."""
    raw_headers = data[:0xFFFF]
    size = len(raw_headers).to_bytes(2, "big")
    frame = b"\0\0" + size + raw_headers + bytes(4)
    (request,) = callhome.RequestReader(len(frame)).feed(frame)
    require(isinstance(request, callhome.RequestReceived), "no request", request)
    headers: dict[str, str] = getattr(request, "headers")  # noqa: B009
    trace = propagation.read_trace(headers)
    remaining_ms = propagation.read_remaining_ms(headers)
    sent = propagation.request_headers(
        request_id="id",
        path="path",
        sent_ns=0,
        trace=trace,
        remaining_ms=remaining_ms,
    )
    require(propagation.read_remaining_ms(sent) == remaining_ms, "another time", sent)
    require(propagation.read_trace(sent) == trace, "another trace", trace, sent)
    require(propagation.sent_by_ours(sent), "not known as ours", sent)
    fields = [] if trace is None else [value is not None for value in trace]
    return f"{bool(headers)} {fields} {propagation.sent_by_ours(headers)} {remaining_ms is not None}"
