"""Good input to begin with, by kind: golden bytes, and some of our own.

The golden bytes are those of ``tests/vectors``; frames of our own lane, and some cases
that no recording has, are made here.  Where a target reads more than the bytes of the
wire, the seeds have it in front.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dynamo.runtime._wire import duplex_frames as frames
from dynamo.runtime._wire.faults import ErrorObject

VECTORS = Path(__file__).resolve().parent.parent / "tests" / "vectors"
# Large values make slow seeds and nothing new.
MAX_SEED_BYTES = 8192
# The parts of a message on the duplex lane, in these targets.
CHUNK_BYTES = 64

_CUTS = bytes([0, 6, 30, 254])
_PREFIX_BYTES = 24


def load(name: str) -> Any:
    return json.loads((VECTORS / f"{name}.json").read_text("utf-8"))


def _captures() -> Iterator[dict[str, Any]]:
    for path in sorted(VECTORS.glob("tcp_*.json")):
        yield json.loads(path.read_text("utf-8"))


def _events() -> Iterator[dict[str, Any]]:
    for capture in _captures():
        for connection in capture["connections"]:
            yield from (one for one in connection["events"] if "hex" in one)
        yield from capture.get("frames", ())


def _frames(kind: str) -> Iterator[bytes]:
    return (bytes.fromhex(one["hex"]) for one in _events() if one["frame"] == kind)


def _streams(direction: str) -> Iterator[bytes]:
    """Everything that one side said on a connection of a call, without its handshake."""
    for capture in _captures():
        for connection in capture["connections"]:
            said = [
                bytes.fromhex(one["hex"])
                for one in connection["events"]
                if "hex" in one
                and one["dir"] == direction
                and one["frame"] not in ("call-home handshake", "request frame")
            ]
            yield b"".join(said)


def _payloads() -> Iterator[bytes]:
    for raw in _frames("request frame"):
        path_end = 2 + int.from_bytes(raw[:2], "big")
        headers_end = path_end + 2 + int.from_bytes(raw[path_end:][:2], "big")
        yield raw[headers_end + 4 :]


def _headers() -> Iterator[bytes]:
    for raw in _frames("request frame"):
        path_end = 2 + int.from_bytes(raw[:2], "big")
        yield raw[path_end + 2 :][: int.from_bytes(raw[path_end:][:2], "big")]


def _values(codec: str) -> Iterator[bytes]:
    for case in load("tcp_values")["cases"]:
        shown = case[codec]
        if isinstance(shown, str) and "..." not in shown:
            yield shown.encode() if codec == "json" else bytes.fromhex(shown)


def _items(codec: str) -> Iterator[bytes]:
    start = b"{" if codec == "json" else b"\x82"
    for kind in ("data item frame", "error item frame"):
        bodies = (raw[_PREFIX_BYTES:] for raw in _frames(kind))
        # {"data": ENVELOPE, "complete_final": false} in either codec.
        for body in bodies:
            if body.startswith(start):
                ends = (8, -24) if codec == "json" else (6, -16)
                yield body[slice(*ends)]


def _records() -> Iterator[bytes]:
    yield (
        b'{"type":"Endpoint","component":"c","endpoint":"e","namespace":"n",'
        b'"instance_id":1,"transport":{"tcp":"127.0.0.1:80/1/n/c/e"},'
        b'"dynamo_py":{"v":1,"lanes":["duplex"]}}'
    )
    files = load("discovery_file")
    for one in [*files["endpoint_records"], *files["endpoint_record_variants"]]:
        yield bytes.fromhex(one["value_hex"])
    for case in load("discovery_acceptance")["endpoint_records"]:
        given = case["input"]
        raw = given.get("raw") or json.dumps(given.get("value", given))
        yield raw.encode()


def _names() -> Iterator[bytes]:
    yield b"half\xed\xa0\x80"  # half a character, as Windows allows it
    for case in load("discovery_names")["cases"]:
        yield case["path"].encode()
        yield case.get("file_name", "").encode()
    for one in load("discovery_events")["records"]:
        yield one["file_name"].encode()


def _cards() -> Iterator[bytes]:
    stored = load("discovery_file")
    for moment in ("model_cards_before_taint_update", "model_card_after_taint_update"):
        for one in stored[moment]:
            yield one["value_utf8"].encode()


def _addresses() -> Iterator[bytes]:
    yield from (b"[::1]:9999/1/ns/comp/ep", b"[::1]:9999", b"127.0.0.1:80")
    for case in load("discovery_names")["cases"]:
        yield case.get("tcp_address", "").encode()


def _acks() -> Iterator[bytes]:
    yield from _frames("ack frame")
    yield from (bytes.fromhex(one["ack_hex"]) for one in load("tcp_acks")["cases"])


def _requests() -> Iterator[bytes]:
    yield from _frames("request frame")
    yield from (bytes.fromhex(one["request_hex"]) for one in load("tcp_acks")["cases"])


def _in_parts(kind: int, stream: int, message: bytes, between: bytes = b"") -> bytes:
    """A message cut as the targets expect it, and what comes before its end."""
    total = frames.encode_number(len(message))
    out = b""
    while len(message) > CHUNK_BYTES:
        part, message = message[:CHUNK_BYTES], message[CHUNK_BYTES:]
        out += frames.encode_frame(frames.PART, stream, total + part)
    return out + between + frames.encode_frame(kind, stream, message)


def _duplex_client_says() -> Iterator[bytes]:
    """Streams of frames of our own making: no genuine peer speaks this lane."""
    hello = frames.encode_frame(frames.HELLO, 0, frames.encode_hello(frames.Hello()))
    yield hello
    head = frames.RequestHead("id", "a/b/c", {"k": "v"}, flags=frames.STREAMED_INPUT)
    request = frames.encode_request_front(head, 4, MAX_SEED_BYTES) + b"\x81\xa1x\x01"
    asked = hello + frames.encode_frame(frames.REQUEST, 1, request)
    yield asked
    for kind in (frames.STOP, frames.KILL, frames.INPUT_END):
        value = frames.encode_frame(frames.INPUT, 1, b"\x05")
        yield asked + value + frames.encode_frame(kind, 1)
    credit = frames.encode_number(65536)
    yield asked + frames.encode_frame(frames.CREDIT, 1, credit)
    yield asked + frames.encode_frame(frames.CREDIT, 0, credit)
    yield hello + frames.encode_frame(frames.PING, 0, b"12345678")
    value = request + bytes(2 * CHUNK_BYTES)
    yield hello + _in_parts(frames.REQUEST, 1, value)
    stop = frames.encode_frame(frames.KILL, 1)
    yield asked + _in_parts(frames.INPUT, 1, bytes(3 * CHUNK_BYTES), between=stop)


def _duplex_worker_says() -> Iterator[bytes]:
    item = frames.encode_frame(frames.ITEM, 1, b"\x81\xa4data\x05")
    error = ErrorObject("Unknown", "Internal", "runtime.internal", "m", "d")
    refusal = frames.Refusal(frames.OVERLOADED, "full", 1000)
    refused = frames.encode_handler_refusal("no", error)
    yield from (item, item * 3)
    for kind in (frames.QUEUED, frames.ACCEPT, frames.END, frames.RESET):
        yield frames.encode_frame(kind, 2) + item
    yield item + frames.encode_frame(frames.ITEM_END, 1, b"\x80")
    yield item + frames.encode_frame(frames.ERROR, 1, frames.encode_error(error))
    yield frames.encode_frame(frames.HANDLER_REFUSED, 1, refused)
    yield frames.encode_frame(frames.REFUSED, 2, frames.encode_refusal(refusal))
    yield frames.encode_frame(frames.CREDIT, 0, frames.encode_number(300)) + item
    yield frames.encode_frame(frames.GOAWAY, 0, frames.encode_number(1))
    large = b"\x81\xa4data\xc5\0\xf0" + bytes(240)
    yield _in_parts(frames.ITEM, 1, large) + _in_parts(frames.ITEM_END, 2, large)
    yield _in_parts(frames.ITEM, 1, large, between=item.replace(b"\1", b"\2"))


_FROM_WORKER, _FROM_CLIENT = "worker->client", "client->worker"

# What stands in front, and what follows.
_KINDS: dict[str, tuple[bytes, Callable[[], Iterator[bytes]]]] = {
    "requests": (_CUTS, _requests),
    "acks": (_CUTS, _acks),
    "frames": (_CUTS, lambda: _streams(_FROM_WORKER)),
    "responses_msgpack": (b"\0", lambda: _streams(_FROM_WORKER)),
    "responses_json": (b"\0", lambda: _streams(_FROM_WORKER)),
    "inputs_msgpack": (b"\0", lambda: _streams(_FROM_CLIENT)),
    "inputs_json": (b"\0", lambda: _streams(_FROM_CLIENT)),
    "controls": (b"", lambda: _streams(_FROM_CLIENT)),
    "handshakes": (b"", lambda: _frames("call-home handshake")),
    "payloads": (b"", _payloads),
    "values_msgpack": (b"", lambda: _values("msgpack")),
    "values_json": (b"", lambda: _values("json")),
    "items_msgpack": (b"", lambda: _items("msgpack")),
    "items_json": (b"", lambda: _items("json")),
    "records": (b"", _records),
    "cards": (b"", _cards),
    "addresses": (b"", _addresses),
    "names": (b"", _names),
    "headers": (b"", _headers),
    "duplex_client": (_CUTS, _duplex_worker_says),
    "duplex_worker": (_CUTS, _duplex_client_says),
}


def seeds_of(kind: str) -> list[bytes]:
    """The seeds of a kind, each once, shortest first."""
    front, make = _KINDS[kind]
    found = {front + seed for seed in make() if 0 < len(seed) <= MAX_SEED_BYTES}
    return sorted(found, key=lambda seed: (len(seed), seed))
