"""The bytes of the genuine runtime: read, and written again to the same bytes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo.runtime import errors
from dynamo.runtime._wire import callhome, faults, payload, propagation, records
from dynamo.runtime._wire.two_part import TwoPart, TwoPartReader, decode_two_part

VECTORS = Path(__file__).parent.parent / "vectors"
MAX_MESSAGE_BYTES = 32 * 1024 * 1024


def load(name: str) -> dict[str, Any]:
    return json.loads((VECTORS / f"{name}.json").read_text("utf-8"))


def captured_frames() -> list[Any]:
    """Every frame of every capture that is there as a whole."""
    frames = []
    for path in sorted(VECTORS.glob("tcp_*.json")):
        content = json.loads(path.read_text("utf-8"))
        for number, connection in enumerate(content["connections"]):
            for place, event in enumerate(connection["events"]):
                if "hex" in event:
                    name = f"{path.stem}-{number}-{place}-{event['frame']}"
                    frames.append(pytest.param(event, id=name.replace(" ", "_")))
        for place, event in enumerate(content.get("frames", ())):
            frames.append(pytest.param(event, id=f"{path.stem}-{place}"))
    return frames


def codec_of(event: dict[str, Any]) -> str:
    named = re.search(r"data \((\w+)\)", json.dumps(event["fields"]))
    return named[1] if named else "json"


def one_frame(raw: bytes) -> TwoPart:
    (frame,) = TwoPartReader().feed(raw)
    return frame


def rewrite_request(raw: bytes, event: dict[str, Any]) -> bytes:
    (request,) = callhome.RequestReader(MAX_MESSAGE_BYTES).feed(raw)
    assert request.path is not None
    control, body = callhome.decode_request_payload(request.payload)
    assert request.headers[propagation.REQUEST_ID] == control.id
    assert request.headers[propagation.ENDPOINT_PATH] == request.path
    assert callhome.encode_request_payload(control, body) == request.payload
    if body is not None:
        value = payload.decode_value(body, control.codec)
        assert payload.encode_value(value, control.codec) == body
    return callhome.encode_request_frame(
        request.path,
        request.headers,
        request.payload,
        max_message_bytes=MAX_MESSAGE_BYTES,
    )


def rewrite_ack(raw: bytes, event: dict[str, Any]) -> bytes:
    (ack,) = callhome.AckReader().feed(raw)
    return callhome.encode_ack(ack.text)


def rewrite_handshake(raw: bytes, event: dict[str, Any]) -> bytes:
    handshake = callhome.decode_handshake(one_frame(raw))
    return callhome.encode_handshake(handshake.subject, handshake.stream_type)


def rewrite_prologue(raw: bytes, event: dict[str, Any]) -> bytes:
    prologue = callhome.ResponseReceiver("json").receive(one_frame(raw))
    assert isinstance(prologue, callhome.PrologueReceived)
    return callhome.encode_prologue(prologue.error, prologue.typed_error)


def rewrite_item(raw: bytes, event: dict[str, Any]) -> bytes:
    codec = codec_of(event)
    if event["dir"] == "client->worker":
        received = callhome.RequestStreamReceiver(codec).receive(one_frame(raw))
        assert isinstance(received, callhome.InputReceived)
        return callhome.encode_input_frame(payload.encode_value(received.value, codec))
    item = started(codec).receive(one_frame(raw))
    assert isinstance(item, payload.Annotated)
    return callhome.encode_item_frame(
        payload.encode_annotated(codec, item.data()), codec
    )


def rewrite_error(raw: bytes, event: dict[str, Any]) -> bytes:
    codec = codec_of(event)
    received = started(codec).receive(one_frame(raw))
    assert isinstance(received, callhome.ErrorReceived)
    annotated = payload.encode_annotated(
        codec, event="error", error=received.error, has_data=False
    )
    return callhome.encode_item_frame(annotated, codec)


def rewrite_final(raw: bytes, event: dict[str, Any]) -> bytes:
    receiver = started(codec_of(event))
    assert receiver.receive(one_frame(raw)) == callhome.StreamEnded()
    return callhome.encode_final_frame(codec_of(event))


def started(codec: str) -> callhome.ResponseReceiver:
    receiver = callhome.ResponseReceiver(codec)
    receiver.receive(one_frame(callhome.encode_prologue()))
    return receiver


REWRITE = {
    "request frame": rewrite_request,
    "ack frame": rewrite_ack,
    "call-home handshake": rewrite_handshake,
    "prologue": rewrite_prologue,
    "data item frame": rewrite_item,
    "error item frame": rewrite_error,
    "complete-final frame": rewrite_final,
    'control "stop"': lambda raw, event: callhome.STOP,
    'control "kill"': lambda raw, event: callhome.KILL,
    'control "sentinel"': lambda raw, event: callhome.SENTINEL,
}


@pytest.mark.parametrize("event", captured_frames())
def test_captured_frame_is_written_again_as_it_was(event: dict[str, Any]) -> None:
    raw = bytes.fromhex(event["hex"])
    assert REWRITE[event["frame"]](raw, event) == raw


def test_large_item_has_the_recorded_hash() -> None:
    events = load("tcp_large_item")["connections"][1]["events"]
    recorded = next(event for event in events if "sha256" in event)
    annotated = payload.encode_annotated("msgpack", {"b": "a" * 5_000_000})
    frame = callhome.encode_item_frame(annotated, "msgpack")
    assert len(frame) == recorded["bytes"]
    assert frame.startswith(bytes.fromhex(recorded["hex_head"]))
    assert hashlib.sha256(frame).hexdigest() == recorded["sha256"]


@pytest.mark.parametrize("case", load("tcp_acks")["cases"], ids=lambda c: c["case"])
def test_ack_of_the_genuine_worker_is_ours_too(case: dict[str, Any]) -> None:
    texts = case["ack_text"]
    texts = texts if isinstance(texts, list) else [texts]
    raw = bytes.fromhex(case["ack_hex"])
    assert [ack.text for ack in callhome.AckReader().feed(raw)] == texts
    assert b"".join(map(callhome.encode_ack, texts)) == raw

    served = {"ca5fd886655302c9/ns/comp/gen"}
    answers = []
    for event in callhome.RequestReader(MAX_MESSAGE_BYTES).feed(
        bytes.fromhex(case["request_hex"])
    ):
        if isinstance(event, callhome.RequestTooLarge):
            answers.append(callhome.too_large_text(event.size_bytes, event.max_bytes))
        elif event.path is None:
            answers.append(callhome.INVALID_PATH_TEXT)
        elif event.path not in served:
            answers.append(callhome.unknown_endpoint_text(event.path))
        else:
            answers.append("")
    assert answers == texts


def test_overload_has_the_recorded_text() -> None:
    assert load("tcp_overload")["acks"][-1] == callhome.OVERLOADED_TEXT


def test_trace_headers_are_read() -> None:
    raw = bytes.fromhex(load("tcp_trace_headers")["connections"][0]["events"][0]["hex"])
    (request,) = callhome.RequestReader(MAX_MESSAGE_BYTES).feed(raw)
    assert isinstance(request, callhome.RequestReceived)
    trace = propagation.read_trace(request.headers)
    assert trace is not None
    assert trace.traceparent == request.headers["traceparent"]
    assert not propagation.sent_by_ours(request.headers)


# What the genuine worker cannot send or garbles, and we send better (msgpack, JSON).
BETTER_VALUES = {
    "memoryview(b'ab')": ("c4026162", "[97,98]"),
    "bytearray(b'ab')": ("c4026162", "[97,98]"),
}
# What the genuine worker sends as something else without a word, and we refuse.
REFUSED_VALUES = {"2**64": OverflowError}


@pytest.mark.parametrize("codec", ["msgpack", "json"])
@pytest.mark.parametrize(
    "case", load("tcp_values")["cases"], ids=lambda c: c["python_expression_yielded"]
)
def test_value_is_encoded_as_by_the_genuine_worker(
    case: dict[str, Any], codec: str
) -> None:
    expression = case["python_expression_yielded"]
    value = eval(expression)
    if expression in REFUSED_VALUES:
        with pytest.raises(REFUSED_VALUES[expression]):
            payload.encode_value(value, codec)
        return
    expected = case[codec]
    if expression in BETTER_VALUES:
        expected = BETTER_VALUES[expression][codec == "json"]
    if isinstance(expected, dict):
        with pytest.raises(TypeError) as caught:
            payload.encode_value(value, codec)
        sent = msgspec.to_builtins(faults.error_of_unsendable(str(caught.value), codec))
        assert sent == expected["error_item"]
        return
    encoded = payload.encode_value(value, codec)
    shown = encoded.decode() if codec == "json" else encoded.hex()
    abbreviated = re.fullmatch(r"(.*)\.\.\.\((\d+) bytes\)", expected)
    if abbreviated:
        assert shown.startswith(abbreviated[1])
        assert len(encoded) == int(abbreviated[2])
    else:
        assert shown == expected


@pytest.mark.parametrize(
    "case", load("tcp_floats")["cases"], ids=lambda c: c["python_expression_yielded"]
)
def test_float_is_written_in_json_as_by_the_genuine_worker(
    case: dict[str, Any],
) -> None:
    value = eval(case["python_expression_yielded"])
    assert payload.encode_value(value, "json").decode() == case["json"]


def make_exception(expression: str) -> BaseException:
    if expression == "json_err":
        return json.JSONDecodeError("m", "", 0)
    status = re.search(r"code=(\d+), message='(\w+)'", expression)
    if status:
        error = Exception("other words")
        error.code, error.message = int(status[1]), status[2]  # type: ignore[attr-defined]
        return error
    names = {"_core": errors, "asyncio": asyncio}
    made: BaseException = eval(expression, names)
    return made


def raised_by_handler(error: BaseException) -> BaseException:
    """The exception as it leaves an async generator that raises it."""

    async def handler() -> Any:
        raise error
        yield

    try:
        handler().asend(None).send(None)
    except BaseException as caught:
        return caught
    raise AssertionError("the handler must raise")


EXCEPTIONS = load("tcp_exceptions")["cases"] + load("tcp_exceptions_more")["cases"]


@pytest.mark.parametrize("case", EXCEPTIONS, ids=lambda c: c["raised"])
def test_exception_becomes_the_error_item_of_the_genuine_worker(
    case: dict[str, Any],
) -> None:
    error = faults.error_of_exception(raised_by_handler(make_exception(case["raised"])))
    encoded = payload.encode_annotated(
        "json", event="error", error=error, has_data=False
    )
    expected = json.dumps(case["item_data"], separators=(",", ":"), ensure_ascii=False)
    assert encoded == expected.encode()


def test_error_prologue_is_made_from_the_exception() -> None:
    event = load("tcp_error_prologue")["connections"][1]["events"][1]
    text, typed = faults.error_of_refusal(ValueError("sync boom"))
    assert callhome.encode_prologue(text, typed) == bytes.fromhex(event["hex"])


def endpoint_files() -> list[dict[str, Any]]:
    content = load("discovery_file")
    return content["endpoint_records"] + content["endpoint_record_variants"]


@pytest.mark.parametrize("file", endpoint_files(), ids=lambda f: f["file_name"])
def test_endpoint_record_is_written_again_as_it_was(file: dict[str, Any]) -> None:
    raw = bytes.fromhex(file["value_hex"])
    record = records.decode_record(raw)
    assert records.encode_record(record) == raw
    assert not record.ours
    assert record.lanes == ()
    assert f"{file['bucket']}/{record.key}" == file["decoded_key"]
    assert records.file_name_of_key(record.key) == file["file_name"]
    assert records.key_of_file_name(file["file_name"]) == record.key
    assert records.parse_instance_key(record.key) == (record.name, record.instance_id)
    if record.transport_kind == "tcp":
        address = records.split_tcp_address(record.address)
        assert address.path == records.endpoint_wire_path(
            record.name, record.instance_id
        )
        assert record.address == records.tcp_address(*address)


@pytest.mark.parametrize(
    "case", load("discovery_names")["cases"], ids=lambda c: repr(c["path"])
)
def test_endpoint_path_makes_the_names_of_the_genuine_worker(
    case: dict[str, Any],
) -> None:
    if not case["accepted"]:
        with pytest.raises(ValueError, match="Invalid endpoint path"):
            records.parse_endpoint_path(case["path"])
        return
    name = records.parse_endpoint_path(case["path"])
    instance_id = int(case["instance_id_hex"], 16)
    assert name == (case["namespace"], case["component"], case["endpoint"])
    key = records.instance_key(name, instance_id)
    assert records.file_name_of_key(key) == case["file_name"]
    wire_path = records.endpoint_wire_path(name, instance_id)
    host, port = records.split_host_port(case["tcp_address"].partition("/")[0])
    assert records.tcp_address(host, port, wire_path) == case["tcp_address"]


@pytest.mark.parametrize(
    "case", load("discovery_acceptance")["endpoint_records"], ids=lambda c: c["case"]
)
def test_record_is_accepted_or_not_as_by_the_genuine_client(
    case: dict[str, Any],
) -> None:
    given = case["input"]
    if "raw" in given:
        value = given["raw"].encode()
    else:
        value = json.dumps(given.get("value", given)).encode()
    if case["result"].startswith(("rejected", "previous value kept")):
        with pytest.raises(errors.RemoteProtocolError):
            records.decode_record(value)
        return
    record = records.decode_record(value)
    seen = {
        "device_type": record.device_type,
        "kind": record.transport_kind,
        "address": record.address,
        "instance_id": record.instance_id,
    }
    assert case["seen_as"].items() <= seen.items()


@pytest.mark.parametrize(
    "record", load("discovery_events")["records"], ids=lambda r: r["file_name"]
)
def test_event_keys_have_the_file_names_of_the_genuine_worker(
    record: dict[str, Any],
) -> None:
    key = record["relative_key"]
    assert records.file_name_of_key(key) == record["file_name"]
    assert records.key_of_file_name(record["file_name"]) == key


def test_whole_payload_and_stream_reader_agree() -> None:
    raw = bytes.fromhex(load("tcp_control_frames")["frames"][1]["hex"])
    assert decode_two_part(raw) == one_frame(raw)
