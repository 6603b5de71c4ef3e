"""The call-home lane: frames both ways, and the state machines of both sides."""

from __future__ import annotations

import pickle
import struct
from typing import Any

import msgspec
import pytest
from envelopes import received, seen
from hypothesis import example, given
from hypothesis import strategies as st

from dynamo.runtime._wire import callhome
from dynamo.runtime._wire.callhome import (
    KILL,
    PROBE,
    SENTINEL,
    STOP,
    AckReader,
    AckReceived,
    BadRequest,
    ConnectionInfo,
    Control,
    ControlHeader,
    ErrorReceived,
    Handshake,
    InputEnded,
    InputReceived,
    PrologueReceived,
    ProtocolViolated,
    RequestReader,
    RequestReceived,
    RequestStreamReceiver,
    RequestTooLarge,
    ResponseReceiver,
    StreamEnded,
    StreamLost,
    decode_control,
    decode_handshake,
    decode_request_payload,
    encode_ack,
    encode_final_frame,
    encode_handshake,
    encode_input_frame,
    encode_item_frame,
    encode_prologue,
    encode_request_frame,
    encode_request_payload,
)
from dynamo.runtime._wire.faults import ErrorObject, error_of_refusal
from dynamo.runtime._wire.payload import encode_annotated, encode_value
from dynamo.runtime._wire.two_part import TwoPart, TwoPartReader, encode_two_part
from dynamo.runtime.errors import MessageTooLarge, RemoteProtocolError

MAX = 1 << 20
CODECS = ["msgpack", "json"]

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
requests = st.builds(
    RequestReceived,
    text,
    st.dictionaries(text, text, max_size=3),
    st.binary(max_size=40),
)
sizes = st.lists(st.integers(0, 30))


def in_pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    pieces = []
    for size in cuts:
        pieces.append(stream[:size])
        stream = stream[size:]
    return [*pieces, stream]


def frame_of(raw: bytes) -> TwoPart:
    (frame,) = TwoPartReader().feed(raw)
    return frame


def request_frame(request: RequestReceived, limit: int = MAX) -> bytes:
    assert request.path is not None
    return encode_request_frame(
        request.path, request.headers, request.payload, max_message_bytes=limit
    )


# --------------------------------------------------------------- request frames and acks


@given(st.lists(requests, max_size=4), sizes)
def test_any_split_gives_the_same_requests(
    sent: list[RequestReceived], cuts: list[int]
) -> None:
    reader = RequestReader(MAX)
    got: list[object] = []
    for piece in in_pieces(b"".join(map(request_frame, sent)), cuts):
        got += reader.feed(piece)
    reader.feed_eof()
    assert got == sent


def test_request_cut_at_every_byte_is_mid_frame() -> None:
    raw = request_frame(RequestReceived("path", {"a": "b"}, b"payload"))
    for size in range(1, len(raw)):
        reader = RequestReader(MAX)
        assert reader.feed(raw[:size]) == []
        assert reader.mid_frame
        with pytest.raises(RemoteProtocolError, match=f"after {size} of at least"):
            reader.feed_eof()
        (request,) = reader.feed(raw[size:])
        assert request == RequestReceived("path", {"a": "b"}, b"payload")


@given(sizes)
def test_request_over_the_limit_is_the_last_event(cuts: list[int]) -> None:
    small = RequestReceived("p", {}, b"1234")
    raw = request_frame(small)
    large = request_frame(RequestReceived("p", {}, b"12345"))
    reader = RequestReader(len(raw))
    got: list[object] = []
    for piece in in_pieces(raw + large + raw, cuts):
        got += reader.feed(piece)
    assert got == [small, RequestTooLarge(len(raw) + 1, len(raw))]
    assert reader.feed(raw) == []
    assert not reader.mid_frame
    reader.feed_eof()


def test_size_is_judged_before_the_payload_comes() -> None:
    head = struct.pack(">H1sH2sI", 1, b"p", 2, b"{}", 2**32 - 1)
    assert RequestReader(MAX).feed(head) == [RequestTooLarge(2**32 + 8 + 2, MAX)]


@pytest.mark.parametrize(
    "headers", [b"", b"{", b"[]", b'{"a":1}', b'{"a":null}', b"\xff", b"[" * 60_000]
)
def test_rubbish_headers_are_no_headers(headers: bytes) -> None:
    raw = struct.pack(">H1sH", 1, b"p", len(headers)) + headers + struct.pack(">I", 0)
    assert RequestReader(MAX).feed(raw) == [RequestReceived("p", {}, b"")]


def test_path_that_is_not_utf8_is_none() -> None:
    (request,) = RequestReader(MAX).feed(bytes.fromhex("0002fffe00027b7d00000000"))
    assert isinstance(request, RequestReceived)
    assert request.path is None


def test_frame_of_exactly_the_limit_is_sent() -> None:
    request = RequestReceived("p", {}, b"x" * 100)
    size = len(request_frame(request))
    assert len(request_frame(request, size)) == size
    with pytest.raises(MessageTooLarge) as caught:
        request_frame(request, size - 1)
    assert str(caught.value) == (
        "InvalidRequest: Request payload is too large for this deployment. Reduce the "
        f"input size or metadata size and retry. ({size} bytes, limit {size - 1}: "
        "DYN_TCP_MAX_MESSAGE_SIZE)"
    )
    assert caught.value.error_class == "InvalidRequest"


def test_headers_and_path_have_limits_of_their_own() -> None:
    fits = RequestReceived("p" * 65535, {"a": "x" * (65535 - len('{"a":""}'))}, b"")
    assert RequestReader(MAX).feed(request_frame(fits)) == [fits]
    for path, value in (("p" * 65536, ""), ("p", "x" * 65528)):
        with pytest.raises(MessageTooLarge, match=r"cannot be encoded.*65536 bytes"):
            request_frame(RequestReceived(path, {"a": value}, b""))


@given(st.lists(text, max_size=5), sizes)
def test_any_split_gives_the_same_acks(texts: list[str], cuts: list[int]) -> None:
    reader = AckReader()
    got: list[AckReceived] = []
    for piece in in_pieces(b"".join(map(encode_ack, texts)), cuts):
        got += reader.feed(piece)
    reader.feed_eof()
    assert [ack.text for ack in got] == texts


@pytest.mark.parametrize(
    ("ack", "refusal"),
    [
        ("", None),
        (callhome.OVERLOADED_TEXT, "overloaded"),
        ("Server overloaded: anything", "overloaded"),
        (callhome.unknown_endpoint_text("a/b"), "unavailable"),
        ("Server unavailable: worker pool channel closed", "unavailable"),
        (callhome.INVALID_PATH_TEXT, None),
        (callhome.too_large_text(2, 1), "unreadable"),
        ("Server", None),
    ],
)
def test_refusal_is_read_from_the_text(ack: str, refusal: str | None) -> None:
    assert AckReceived(ack).refusal == refusal


def test_ack_cut_at_every_byte_is_mid_frame() -> None:
    raw = encode_ack("text")
    for size in range(1, len(raw)):
        reader = AckReader()
        assert reader.feed(raw[:size]) == []
        assert reader.mid_frame
        with pytest.raises(RemoteProtocolError):
            reader.feed_eof()
        assert reader.feed(raw[size:]) == [AckReceived("text")]


def test_ack_over_the_limit_breaks_the_connection() -> None:
    reader = AckReader()
    assert reader.feed(encode_ack("x" * 65536)) == [AckReceived("x" * 65536)]
    with pytest.raises(RemoteProtocolError, match="65537 bytes is over the limit"):
        reader.feed(struct.pack(">I", 65537))
    with pytest.raises(RemoteProtocolError, match="broke the protocol"):
        reader.feed(encode_ack())


def test_ack_that_is_not_utf8_is_still_text() -> None:
    assert AckReader().feed(b"\0\0\0\1\xff") == [AckReceived("\ufffd")]


# -------------------------------------------------------------- the payload of a request


def connection(**changes: str) -> ConnectionInfo:
    facts = {
        "address": "127.0.0.1:1",
        "subject": "s",
        "context": "c",
        "stream_type": "response",
    }
    return ConnectionInfo(**facts | changes)


def control(**changes: Any) -> ControlHeader:
    facts: dict[str, Any] = {"id": "c", "codec": "msgpack", "response": connection()}
    return ControlHeader(**facts | changes)


@pytest.mark.parametrize(
    ("sent", "body"),
    [
        (control(), b"\xc0"),
        (control(codec="json", metadata={"b": "1", "a": "é"}), b"null"),
        (control(id="", response=connection(context="")), b"x"),
        (control(id='é"\n', response=connection(context='é"\n')), b"x"),
        (
            control(
                request_type="many_in",
                request_stream=connection(subject="r", stream_type="request"),
            ),
            None,
        ),
    ],
)
def test_request_payload_round_trip(sent: ControlHeader, body: bytes | None) -> None:
    assert decode_request_payload(encode_request_payload(sent, body)) == (sent, body)


def test_metadata_is_sorted_and_absent_when_empty() -> None:
    raw = encode_request_payload(control(metadata={"b": "1", "a": "2"}), b"x")
    assert b'"metadata":{"a":"2","b":"1"}' in raw
    assert b"metadata" not in encode_request_payload(control(), b"x")


def test_control_header_has_a_limit() -> None:
    bare = len(encode_request_payload(control(metadata={"k": ""}), None)) - 24
    room = callhome.MAX_CONTROL_BYTES - bare
    encode_request_payload(control(metadata={"k": "x" * room}), None)
    with pytest.raises(MessageTooLarge) as caught:
        encode_request_payload(control(metadata={"k": "x" * (room + 1)}), None)
    assert str(caught.value) == (
        "Generic error: request control message too large: 131073 bytes exceeds limit "
        "131072 (shorten the id or the metadata of the context)"
    )


def written(**changes: Any) -> dict[str, Any]:
    """A control header as JSON members; None as a change removes one."""
    info = {
        "address": "127.0.0.1:1",
        "subject": "s",
        "context": "c",
        "stream_type": "response",
    }
    members = {
        "id": "c",
        "request_type": "single_in",
        "response_type": "many_out",
        "payload_codec": "msgpack",
        "connection_info": carried(info),
    }
    return {k: v for k, v in (members | changes).items() if v is not None}


def carried(info: object, transport: str = "tcp_server") -> dict[str, str]:
    return {"transport": transport, "info": msgspec.json.encode(info).decode()}


def payload_of(members: object) -> bytes:
    return encode_two_part(msgspec.json.encode(members), b"x")


@pytest.mark.parametrize(
    "changes",
    [
        {"request_type": None},
        {"response_type": "single_out"},
        {"frontend_send_ts_ns": 5, "later": [1]},
        {"metadata": {}},
    ],
)
def test_control_header_is_read_tolerantly(changes: dict[str, Any]) -> None:
    read, body = decode_request_payload(payload_of(written(**changes)) + b"extra")
    assert (read, body) == (control(), b"x")


def test_codec_defaults_to_json() -> None:
    read, _ = decode_request_payload(payload_of(written(payload_codec=None)))
    assert read.codec == "json"


QUIC = {"version": 3, "address": "127.0.0.1:1"}

# The control header with which the caller can be told, if any.
BAD_REQUESTS: list[tuple[object, str, ControlHeader | None]] = [
    (
        written(payload_codec="cbor"),
        "unknown payload codec 'cbor'",
        control(codec="json"),
    ),
    (
        written(id="other"),
        "for context 'c', the request for 'other'",
        control(id="other"),
    ),
    (written(id=None), "missing required field `id`", control(codec="json")),
    (written(metadata={"a": 1}), "metadata", control(codec="json")),
    (written(payload_codec=5), "payload_codec", control(codec="json")),
    (
        written(request_stream_connection_info=carried({})),
        "invalid connection info",
        control(),
    ),
    (
        written(request_stream_connection_info=carried({}, "quic-response")),
        "unsupported response transport 'quic-response'",
        control(),
    ),
    (written(connection_info=None), "missing required field `connection_info`", None),
    (
        written(connection_info=carried(QUIC, "quic-response")),
        "unsupported response transport 'quic-response'",
        None,
    ),
    (written(connection_info=carried(QUIC)), "missing required field `subject`", None),
    (written(connection_info=carried(5), id=None), "missing required field `id`", None),
    (written(connection_info={"transport": "tcp_server"}), "`info`", None),
    ({"a": 1}, "invalid request control message", None),
    ([], "invalid request control message", None),
]


@pytest.mark.parametrize(("members", "reason", "answerable"), BAD_REQUESTS)
def test_bad_request_says_why_and_whom_to_tell(
    members: object, reason: str, answerable: ControlHeader | None
) -> None:
    with pytest.raises(BadRequest) as caught:
        decode_request_payload(payload_of(members))
    assert reason in str(caught.value)
    assert caught.value.control == answerable


@pytest.mark.parametrize(
    "payload",
    [b"", b"zzz", PROBE, encode_two_part(b"\xff"), encode_two_part(b"[" * 9999)],
)
def test_payload_that_is_none(payload: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        decode_request_payload(payload)
    assert caught.value.control is None


def test_bad_request_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(BadRequest("text", control=None)))
    assert (type(error), str(error)) == (BadRequest, "text")


@given(st.binary(max_size=80))
def test_any_payload_is_a_request_or_a_bad_one(payload: bytes) -> None:
    with pytest.raises(BadRequest):
        decode_request_payload(payload)


# --------------------------------------------------------------------- opening a stream


@pytest.mark.parametrize("stream_type", ["response", "request"])
def test_handshake_round_trip(stream_type: Any) -> None:
    frame = frame_of(encode_handshake("subject", stream_type))
    assert decode_handshake(frame) == Handshake("subject", stream_type)


@pytest.mark.parametrize(
    "frame",
    [
        TwoPart(b"", b""),
        TwoPart(b"", b"x"),
        TwoPart(b'{"subject":"s","stream_type":"response"}', b"x"),
        TwoPart(b"{", b""),
        TwoPart(b"\xff", b""),
        TwoPart(b"[" * 9999, b""),
        TwoPart(b'{"subject":"s"}', b""),
        TwoPart(b'{"subject":1,"stream_type":"response"}', b""),
        TwoPart(b'{"subject":"s","stream_type":"sideways"}', b""),
    ],
)
def test_frame_that_is_no_handshake(frame: TwoPart) -> None:
    with pytest.raises(RemoteProtocolError, match="handshake"):
        decode_handshake(frame)


def test_prologue_round_trip() -> None:
    for error, typed in ((None, None), ("why", None), error_of_refusal(KeyError("k"))):
        event = ResponseReceiver("json").receive(
            frame_of(encode_prologue(error, typed))
        )
        assert event == PrologueReceived(error, typed)


@pytest.mark.parametrize("header", [b"{}", b'{"nope":1}', b'{"error":null,"more":1}'])
def test_prologue_without_error_is_good(header: bytes) -> None:
    event = ResponseReceiver("json").receive(TwoPart(header, b""))
    assert event == PrologueReceived(None, None)


@pytest.mark.parametrize(
    "typed",
    [
        b"5",
        b"null",
        b"[]",
        b'"text"',
        b'{"class":5}',
        b"{}",
        b'{"error_type":"Martian"}',
        b'{"error_type":{"Backend":"Martian"},"reason":"backend.unknown"}',
    ],
)
def test_typed_error_of_unknown_form_is_ignored(typed: bytes) -> None:
    raw = b'{"error":"why","typed_error":' + typed + b"}"
    event = ResponseReceiver("json").receive(TwoPart(raw, b""))
    assert event == PrologueReceived("why", None)


def test_typed_error_of_an_older_peer_gets_its_class() -> None:
    raw = b'{"error":"why","typed_error":{"error_type":"InvalidArgument"}}'
    event = ResponseReceiver("json").receive(TwoPart(raw, b""))
    assert isinstance(event, PrologueReceived)
    assert event.typed_error is not None
    assert event.typed_error.error_class == "InvalidRequest"


@pytest.mark.parametrize(
    "frame",
    [
        TwoPart(b"", b"x"),
        TwoPart(b'{"error":null}', b"x"),
        TwoPart(b'"stop"', b""),
        TwoPart(b'"sentinel"', b""),
        TwoPart(b'{"error":5}', b""),
        TwoPart(b"{", b""),
    ],
)
def test_malformed_prologue_is_a_failed_one(frame: TwoPart) -> None:
    receiver = ResponseReceiver("json")
    event = receiver.receive(frame)
    assert isinstance(event, PrologueReceived)
    assert event.error is not None
    assert event.error.startswith("malformed prologue: ")
    assert receiver.receive(frame_of(SENTINEL)) is None
    assert receiver.receive_eof() is None


# -------------------------------------------------- the response stream, client's side


def receiver_of(codec: str, *, stopped: bool = False) -> ResponseReceiver:
    receiver = ResponseReceiver(codec)
    assert receiver.receive(frame_of(encode_prologue())) == PrologueReceived(None, None)
    receiver.stopped = stopped
    return receiver


def item(codec: str, data: object = 1, **rest: Any) -> TwoPart:
    annotated = encode_annotated(codec, data, **rest)
    return frame_of(encode_item_frame(annotated, codec))


def final(codec: str) -> TwoPart:
    return frame_of(encode_final_frame(codec))


def body(codec: str, members: object) -> TwoPart:
    return TwoPart(b"", encode_value(members, codec))


@pytest.mark.parametrize("codec", CODECS)
class TestStream:
    def test_good_stream(self, codec: str) -> None:
        receiver = receiver_of(codec)
        first = receiver.receive(item(codec, {"a": [1]}))
        assert seen(first) == seen(received({"a": [1]}))
        second = receiver.receive(item(codec, None, event="note"))
        assert seen(second) == seen(received(event="note"))
        assert receiver.receive(frame_of(PROBE)) is None
        assert not receiver.complete
        assert receiver.receive(final(codec)) == StreamEnded()
        assert receiver.complete
        assert receiver.receive(frame_of(PROBE)) is None
        assert receiver.receive(frame_of(SENTINEL)) is None
        assert receiver.receive_eof() is None

    def test_close_after_final_is_no_second_end(self, codec: str) -> None:
        receiver = receiver_of(codec)
        assert receiver.receive(final(codec)) == StreamEnded()
        assert receiver.receive_eof() is None
        assert receiver.receive_eof() is None

    def test_probe_is_ignored_before_the_prologue(self, codec: str) -> None:
        receiver = ResponseReceiver(codec)
        assert receiver.receive(frame_of(PROBE)) is None
        assert receiver.receive(frame_of(encode_prologue())) is not None

    @pytest.mark.parametrize("by_sentinel", [True, False])
    def test_final_with_data_is_an_item_and_then_the_end(
        self, codec: str, by_sentinel: bool
    ) -> None:
        receiver = receiver_of(codec)
        last = body(codec, {"data": {"data": 5}, "complete_final": True})
        assert seen(receiver.receive(last)) == seen(received(5))
        assert receiver.complete
        if by_sentinel:
            assert receiver.receive(frame_of(SENTINEL)) == StreamEnded()
        else:
            assert receiver.receive_eof() == StreamEnded()
        assert receiver.receive_eof() is None

    @pytest.mark.parametrize("has_data", [True, False])
    def test_item_after_final_is_an_error(self, codec: str, has_data: bool) -> None:
        receiver = receiver_of(codec)
        members: dict[str, Any] = {"complete_final": True}
        receiver.receive(body(codec, members | ({"data": {}} if has_data else {})))
        event = receiver.receive(item(codec))
        assert isinstance(event, ErrorReceived)
        assert event.error.words == (
            "Response received after generation ended - this should never happen"
        )
        assert event.error.error_class == "Internal"
        assert receiver.receive(item(codec)) is None
        assert receiver.receive_eof() is None

    def test_end_of_file_without_final_is_a_loss(self, codec: str) -> None:
        receiver = receiver_of(codec)
        receiver.receive(item(codec))
        assert receiver.receive_eof() == StreamLost()
        assert receiver.receive_eof() is None
        assert receiver.receive(item(codec)) is None

    def test_sentinel_without_final_is_a_loss(self, codec: str) -> None:
        receiver = receiver_of(codec)
        assert receiver.receive(frame_of(SENTINEL)) == StreamLost()
        assert receiver.receive_eof() is None

    def test_end_of_file_before_the_prologue_is_a_loss(self, codec: str) -> None:
        assert ResponseReceiver(codec).receive_eof() == StreamLost()

    def test_after_a_stop_the_end_of_file_is_the_end(self, codec: str) -> None:
        receiver = receiver_of(codec, stopped=True)
        assert seen(receiver.receive(item(codec))) == seen(received(1))
        assert receiver.receive_eof() == StreamEnded()
        receiver = receiver_of(codec, stopped=True)
        assert receiver.receive(frame_of(SENTINEL)) == StreamEnded()
        early = ResponseReceiver(codec)
        early.stopped = True
        assert early.receive_eof() == StreamEnded()

    @pytest.mark.parametrize(
        "frame",
        [
            frame_of(STOP),
            frame_of(KILL),
            TwoPart(b"junk", b""),
            TwoPart(b'"sentinel"', b"data"),
            TwoPart(b"h" * 1000, b"data"),
        ],
    )
    @pytest.mark.parametrize("ended", [True, False])
    def test_any_other_header_breaks_the_protocol(
        self, codec: str, frame: TwoPart, ended: bool
    ) -> None:
        receiver = receiver_of(codec)
        if ended:
            receiver.receive(final(codec))
        event = receiver.receive(frame)
        assert isinstance(event, ProtocolViolated)
        assert "unexpected header" in event.text
        assert ("with 4 bytes of data" in event.text) is (frame.body == b"data")
        assert len(event.text) < 200
        assert receiver.receive_eof() is None

    def test_sentinel_may_be_any_json_of_it(self, codec: str) -> None:
        receiver = receiver_of(codec)
        receiver.receive(final(codec))
        assert receiver.receive(TwoPart(b' "sentine\\u006c" ', b"")) is None

    @pytest.mark.parametrize(
        "members",
        [
            {"data": {"data": 1}},
            {"complete_final": 1, "data": {}},
            {"complete_final": False, "data": 5},
            {"complete_final": False, "data": {"id": 5}},
            {"complete_final": False, "data": {"event": "error", "error": "text"}},
            [],
        ],
    )
    def test_body_of_another_form_is_an_error(
        self, codec: str, members: object
    ) -> None:
        receiver = receiver_of(codec)
        event = receiver.receive(body(codec, members))
        assert isinstance(event, ErrorReceived)
        assert event.error.error_class == "Internal"
        assert receiver.receive(final(codec)) is None

    def test_undecodable_body_is_an_error(self, codec: str) -> None:
        for raw in (b"\xc1", b"\x91" * 9999, b"[" * 9999):
            event = receiver_of(codec).receive(TwoPart(b"", raw))
            assert isinstance(event, ErrorReceived)

    @pytest.mark.parametrize("data", [{}, {"data": None}])
    def test_empty_body_is_an_error(self, codec: str, data: dict[str, None]) -> None:
        event = receiver_of(codec).receive(
            body(codec, data | {"complete_final": False})
        )
        assert isinstance(event, ErrorReceived)
        assert event.error.words == (
            "Empty response received - this should never happen"
        )

    @pytest.mark.parametrize(
        ("comment", "words"),
        [(["a", "b"], "a, b"), ([], "unknown error"), (None, "unknown error")],
    )
    def test_error_without_object_has_the_comments(
        self, codec: str, comment: list[str] | None, words: str
    ) -> None:
        receiver = receiver_of(codec)
        event = receiver.receive(item(codec, 1, event="error", comment=comment))
        assert event == ErrorReceived(
            ErrorObject("Unknown", "Internal", "runtime.unclassified", words, words)
        )
        assert receiver.receive(final(codec)) is None

    def test_error_object_is_settled(self, codec: str) -> None:
        sent = ErrorObject("InvalidArgument", message="m")
        event = receiver_of(codec).receive(item(codec, event="error", error=sent))
        assert isinstance(event, ErrorReceived)
        assert event.error.error_class == "InvalidRequest"

    def test_error_object_without_error_event_is_no_error(self, codec: str) -> None:
        sent = ErrorObject("Unknown", message="m")
        event = receiver_of(codec).receive(item(codec, 1, event="note", error=sent))
        assert seen(event) == seen(received(1, event="note", error=sent))

    def test_unknown_members_are_ignored(self, codec: str) -> None:
        members = {"complete_final": False, "data": {"data": 1, "z": 2}, "z": [3]}
        event = receiver_of(codec).receive(body(codec, members))
        assert seen(event) == seen(received(1))


def test_worker_and_client_agree_over_any_split() -> None:
    """Both sides against each other in memory."""

    @given(
        st.lists(st.integers() | st.text(max_size=5), max_size=5),
        sizes,
        st.sampled_from(CODECS),
    )
    def agree(values: list[Any], cuts: list[int], codec: str) -> None:
        values = [v for v in values if not isinstance(v, int) or abs(v) < 2**63]
        values = [v for v in values if not isinstance(v, str) or v.isprintable()]
        stream = encode_handshake("s") + encode_prologue()
        for value in values:
            annotated = encode_annotated(codec, value)
            stream += encode_item_frame(annotated, codec) + PROBE
        stream += encode_final_frame(codec) + SENTINEL
        reader = TwoPartReader()
        frames = [f for piece in in_pieces(stream, cuts) for f in reader.feed(piece)]
        assert decode_handshake(frames[0]).subject == "s"
        receiver = ResponseReceiver(codec)
        events = [receiver.receive(frame) for frame in frames[1:]]
        first, *items, last = [event for event in events if event is not None]
        assert (first, last) == (PrologueReceived(None, None), StreamEnded())
        assert [seen(one)[0] for one in items] == values

    agree()


@given(
    st.lists(st.builds(TwoPart, st.binary(max_size=20), st.binary(max_size=20))),
    st.sampled_from(CODECS),
)
@example([frame_of(encode_final_frame("msgpack")), TwoPart(b"\0", b"")], "msgpack")
@example([frame_of(encode_final_frame("json")), TwoPart(b"", b"1")], "json")
def test_any_frames_end_a_stream_at_most_once(
    frames: list[TwoPart], codec: str
) -> None:
    """Behind the end only a breach of the protocol is news, and it is the last one."""
    receiver = receiver_of(codec)
    events = [receiver.receive(frame) for frame in frames]
    events.append(receiver.receive_eof())
    told = [event for event in events if event is not None]
    ends, breaches = (StreamEnded, StreamLost), (ProtocolViolated, ErrorReceived)
    assert sum(isinstance(event, ends) for event in told) <= 1
    assert not any(isinstance(event, breaches) for event in told[:-1])
    assert isinstance(told[-1], (*ends, *breaches))
    assert receiver.receive_eof() is None


# ------------------------------------------------------------------ the worker's side


@pytest.mark.parametrize(
    ("frame", "means"),
    [
        (frame_of(STOP), Control.STOP),
        (TwoPart(b' "stop"', b""), Control.STOP),
        (frame_of(KILL), Control.KILL),
        (frame_of(SENTINEL), Control.KILL),
        (frame_of(PROBE), Control.KILL),
        (TwoPart(b'"stop"', b"x"), Control.KILL),
        (TwoPart(b"", b"x"), Control.KILL),
        (TwoPart(b"junk", b""), Control.KILL),
        (TwoPart(b"[" * 9999, b""), Control.KILL),
    ],
)
def test_everything_but_stop_kills(frame: TwoPart, means: Control) -> None:
    assert decode_control(frame) is means


@pytest.mark.parametrize("codec", CODECS)
class TestInput:
    def test_values_and_clean_end(self, codec: str) -> None:
        receiver = RequestStreamReceiver(codec)
        for value in ({"a": 1}, None, [2]):
            frame = frame_of(encode_input_frame(encode_value(value, codec)))
            assert receiver.receive(frame) == InputReceived(value)
        assert receiver.receive(frame_of(SENTINEL)) == InputEnded()
        assert receiver.receive(frame_of(STOP)) is None
        assert receiver.receive_eof() is None

    @pytest.mark.parametrize(
        ("frame", "means"),
        [
            (frame_of(STOP), Control.STOP),
            (frame_of(KILL), Control.KILL),
            (frame_of(PROBE), Control.KILL),
            (TwoPart(b"junk", b""), Control.KILL),
            (TwoPart(b'"sentinel"', b"x"), Control.KILL),
            (TwoPart(b"", b"\xc1"), Control.KILL),
        ],
    )
    def test_everything_else_cancels_once(
        self, codec: str, frame: TwoPart, means: Control
    ) -> None:
        receiver = RequestStreamReceiver(codec)
        assert receiver.receive(frame) is means
        assert receiver.receive(frame) is None
        assert receiver.receive_eof() is None

    def test_end_of_file_before_the_end_of_input_kills(self, codec: str) -> None:
        receiver = RequestStreamReceiver(codec)
        assert receiver.receive_eof() is Control.KILL
        assert receiver.receive_eof() is None
