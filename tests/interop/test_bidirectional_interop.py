"""Streamed input with genuine peers.

Our caller against a genuine worker; and since the genuine wheel has no caller, one made
by hand, which treats a genuine worker and ours the same and expects the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import ENDPOINT, LIMIT_S, MakeRuntime, Program, Programs, eventually
from raw_peers import Peer, RawClient, body_of

from dynamo.runtime import Client, Context
from dynamo.runtime._wire.callhome import (
    KILL,
    SENTINEL,
    STOP,
    ConnectionInfo,
    encode_input_frame,
    encode_request_payload,
)
from dynamo.runtime._wire.payload import encode_value
from dynamo.runtime._wire.records import TcpAddress, split_tcp_address
from dynamo.runtime._wire.two_part import TwoPart, encode_two_part
from dynamo.runtime.errors import RemoteError

pytestmark = [pytest.mark.interop, pytest.mark.slow]

WORKER = """
async def handle(requests, context):
    yield "ready"
    seen = 0
    async for value in requests:
        if value == "return":
            return
        if value == "raise":
            raise ValueError("mine")
        seen += 1
        yield value
    say("input ended:", seen, context.is_stopped(), context.is_killed())
    if not context.is_stopped():
        for number in range(20):
            await asyncio.sleep(0.002)
            yield number

async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("ns.comp.gen")
    serving = endpoint.serve_bidirectional_endpoint(handle)
    await (await endpoint.client()).wait_for_instances()
    say("serving")
    await asyncio.to_thread(sys.stdin.readline)
    runtime.shutdown()
    await serving

asyncio.run(main())
"""
AFTER_THE_END = list(range(20))


async def start(programs: Programs, interpreter: str | None, **more: str) -> Program:
    """A worker: a genuine one with that interpreter, or one of ours."""
    if interpreter is None:
        worker = await programs.start(WORKER, **more)
    else:
        command = (interpreter,)
        worker = await programs.start(WORKER, command=command, PYTHONPATH="", **more)
    await worker.says("serving")
    return worker


async def read(stream: Any) -> list[Any]:
    async def reading() -> list[Any]:
        return [item async for item in stream]

    return await asyncio.wait_for(reading(), LIMIT_S)


# ---------------------------------------------------- our caller and a genuine worker


@pytest.fixture
async def worker(programs: Programs, genuine_python: str) -> Program:
    return await start(programs, genuine_python)


@pytest.fixture
async def client(worker: Program, make_runtime: MakeRuntime) -> Client:
    made = await make_runtime().endpoint(ENDPOINT).client()
    await made.wait_for_instances(timeout=LIMIT_S)
    return made


class Source:
    """Values, then silence; notes that it was closed."""

    def __init__(self, *values: Any) -> None:
        self.closed = asyncio.Event()
        self._values = values

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            for value in self._values:
                yield value
            await asyncio.Event().wait()
        finally:
            self.closed.set()


async def within(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), LIMIT_S)


async def test_the_end_of_input_does_not_end_a_genuine_handler(
    client: Client, worker: Program
):
    values = ["text", 1.5, [None, True], {"a": {"b": -1}}, b"bytes"]
    stream = await client.bidirectional(values, annotated=False)
    assert await read(stream) == ["ready", *values, *AFTER_THE_END]
    await worker.says("input ended: 5 False False")


async def test_many_values_pass_through_a_genuine_worker(
    client: Client, worker: Program
):
    def values() -> Iterator[list[Any]]:
        for number in range(3000):
            yield [number, bytes(1024)]

    stream = await client.bidirectional(values(), annotated=False)
    found = await read(stream)
    assert [value[0] for value in found[1:-20]] == list(range(3000))
    await worker.says("input ended: 3000 False False")


async def test_a_genuine_handler_is_stopped(client: Client, worker: Program):
    source = Source(1)
    context = Context()
    stream = await client.bidirectional(source, annotated=False, context=context)
    assert [await anext(stream) for _ in range(2)] == ["ready", 1]
    context.stop_generating()
    await within(source.closed)
    await worker.says("input ended: 1 True False")
    assert await read(stream) == []


async def test_a_genuine_handler_is_told_that_the_caller_left(
    client: Client, worker: Program
):
    source = Source(1)
    async with await client.bidirectional(source, annotated=False) as stream:
        assert [await anext(stream) for _ in range(2)] == ["ready", 1]
    await within(source.closed)
    await worker.says("input ended: 1 True True")


async def test_a_genuine_handler_that_returns_early_closes_the_source(client: Client):
    source = Source(1, "return", 3)
    stream = await client.bidirectional(source, annotated=False)
    assert await read(stream) == ["ready", 1]
    await within(source.closed)


async def test_an_error_of_a_genuine_handler_closes_the_source(client: Client):
    source = Source(1, "raise", 3)
    stream = await client.bidirectional(source, annotated=False)
    assert [await anext(stream) for _ in range(2)] == ["ready", 1]
    with pytest.raises(RemoteError, match="InvalidRequest: ValueError: mine"):
        await read(stream)
    await within(source.closed)


async def test_an_error_of_the_source_ends_a_genuine_handler(
    client: Client, worker: Program
):
    error = LookupError("mine")
    answered = asyncio.Event()

    async def source() -> AsyncIterator[int]:
        yield 1
        await answered.wait()
        raise error

    stream = await client.bidirectional(source(), annotated=False)
    assert [await anext(stream) for _ in range(2)] == ["ready", 1]
    answered.set()
    with pytest.raises(LookupError) as caught:
        await read(stream)
    assert caught.value is error
    await worker.says("input ended: 1 True True")


async def test_a_genuine_worker_takes_json(
    programs: Programs, genuine_python: str, make_runtime: MakeRuntime
):
    await start(programs, genuine_python, DYN_REQUEST_PLANE_CODEC="json")
    client = await make_runtime().endpoint(ENDPOINT).client()
    await client.wait_for_instances(timeout=LIMIT_S)
    values = ["é", 1.5, [None, True], {"a": {"b": -1}}]
    stream = await client.bidirectional(values, annotated=False)
    assert await read(stream) == ["ready", *values, *AFTER_THE_END]


# ------------------------------------------------- a caller by hand and either worker


class RawCall:
    """One call with streamed input, made by hand.

    Attributes:
        inputs: Where the worker takes input.
        answers: Where it answers.
    """

    inputs: Peer[TwoPart]
    answers: Peer[TwoPart]

    def __init__(self, client: RawClient) -> None:
        self._client = client

    async def open(self) -> None:
        """Send the request; the worker first connects for the input."""
        subject = "input"
        control = self._client.control(request_type="many_in")
        control.request_stream = ConnectionInfo(
            address=self._client.address,
            subject=subject,
            context=control.id,
            stream_type="request",
        )
        connection = await self._client.connect()
        await connection.send(self._client.frame(encode_request_payload(control, None)))
        self.inputs, self.answers = await self._client.home(), await self._client.home()
        (handshake,) = await self.inputs.frames(1)
        said = json.loads(handshake.header)
        assert (said["subject"], said["stream_type"]) == (subject, "request")
        handshake, prologue = await self.answers.frames(2)
        assert json.loads(handshake.header)["stream_type"] == "response"
        assert json.loads(prologue.header)["error"] is None
        assert await self.item() == "ready"

    async def send(self, value: object) -> None:
        await self.inputs.send(encode_input_frame(encode_value(value, "msgpack")))

    async def item(self) -> Any:
        """The data of the next item."""
        return body_of(await self.answers.frame())["data"]["data"]

    async def rest(self) -> list[Any]:
        """All items, and how the answer ends.

        After the sentinel a worker leaves closing to the caller.
        """
        found: list[Any] = []
        try:
            while found[-1:] != ['"sentinel"']:
                frame = await self.answers.frame()
                if frame is None:
                    break
                body = {} if frame.header else body_of(frame)
                if frame.header or body.get("complete_final"):
                    found.append(frame.header.decode() or "final")
                elif "data" in body["data"]:
                    found.append(body["data"]["data"])
        except ConnectionResetError:
            found.append("reset")
        return found


@pytest.fixture(params=["ours", "genuine"])
def interpreter(request: pytest.FixtureRequest, genuine_python: str) -> str | None:
    return genuine_python if request.param == "genuine" else None


class Hand:
    """A worker, and a caller by hand."""

    def __init__(self, worker: Program, address: TcpAddress) -> None:
        self.worker = worker
        self.client = RawClient(address)

    async def call(self) -> RawCall:
        call = RawCall(self.client)
        await asyncio.wait_for(call.open(), LIMIT_S)
        return call


def address_in(record: Path) -> TcpAddress:
    return split_tcp_address(json.loads(record.read_text())["transport"]["tcp"])


@pytest.fixture
async def hand(programs: Programs, interpreter: str | None) -> AsyncIterator[Hand]:
    worker = await start(programs, interpreter)
    await eventually(lambda: programs.records)
    made = Hand(worker, address_in(programs.records[0]))
    yield made
    made.client.close()


async def test_a_clean_end_of_input_leaves_the_handler_its_time(hand: Hand):
    call = await hand.call()
    values = ["a", None, [1, {"b": 2.5}]]
    for value in values:
        await call.send(value)
    await call.inputs.send(SENTINEL)
    call.inputs.finish()
    found = await call.rest()
    assert found == [*values, *AFTER_THE_END, "final", '"sentinel"']
    await hand.worker.says("input ended: 3 False False")


async def test_a_handler_that_returns_early_ends_the_answer_in_order(hand: Hand):
    call = await hand.call()
    await call.send("return")
    await call.send("nobody reads this")
    assert await call.rest() == ["final", '"sentinel"']


# What a caller does on the connection for the input, and whether that kills.
CUTS = {
    "stop": (STOP, False),
    "kill": (KILL, True),
    "an unknown word": (encode_two_part(b'"pause"'), True),
    "an empty frame": (encode_two_part(), True),
    "a value with a header": (encode_two_part(b"{}", b"\x01"), True),
    "a value that cannot be decoded": (encode_two_part(body=b"\xc1"), True),
    "nothing but FIN": (b"", True),
}


async def test_every_cut_of_the_input_ends_the_call(hand: Hand):
    for name, (frame, killed) in CUTS.items():
        call = await hand.call()
        await call.send(1)
        assert await call.item() == 1
        await call.inputs.send(frame)
        call.inputs.finish()
        rest = await call.rest()
        assert "final" not in rest, name
        line = await hand.worker.line()
        assert line == f"input ended: 1 True {killed}", name


async def test_a_word_on_the_answers_ends_the_input_too(hand: Hand):
    for word, killed in ((STOP, False), (KILL, True)):
        call = await hand.call()
        await call.answers.send(word)
        assert "final" not in await call.rest()
        await hand.worker.says(f"input ended: 0 True {killed}")
