"""What a worker takes and what it refuses: pool, queue, sizes, depth, metadata.

The limits are set by the genuine variables, and every refusal names value, limit, remedy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from raw_peers import (
    PATH,
    RawClient,
    address_of,
    body_of,
    make_runtime,
    shut_down,
    until,
    within,
)
from served import Served, served

from dynamo.runtime import Context, DistributedRuntime, errors
from dynamo.runtime._discovery.memory import MemoryStore
from dynamo.runtime._transports import IncomingCall, Rejection
from dynamo.runtime._wire.callhome import (
    MAX_CONTROL_BYTES,
    encode_request_frame,
    encode_request_payload,
)
from dynamo.runtime.errors import MessageTooLarge, Overloaded, Refused


async def echo(request: Any) -> AsyncIterator[Any]:
    yield request


class Gate:
    """A handler that waits until it is let through."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.running = 0
        self.served: list[Any] = []

    async def handle(self, request: Any) -> AsyncIterator[Any]:
        self.running += 1
        try:
            await self.open.wait()
            self.served.append(request)
            yield request
        finally:
            self.running -= 1


@contextlib.asynccontextmanager
async def from_environment(handler: Any) -> AsyncIterator[Served]:
    """One runtime that serves and calls, with the settings of the environment."""
    one = Served()
    one.worker = one.caller = DistributedRuntime(
        asyncio.get_running_loop(), "mem", "tcp"
    )
    endpoint = one.worker.endpoint(PATH)
    one.serving = endpoint.serve_endpoint(handler)
    one.client = await endpoint.client()
    await within(one.client.wait_for_instances())
    try:
        yield one
    finally:
        await shut_down(one.worker)
        await within(one.serving)


@contextlib.asynccontextmanager
async def worker_by_hand(handler: Any) -> AsyncIterator[RawClient]:
    """A client by hand of a worker that serves the handler."""
    worker = make_runtime()
    serving = worker.endpoint(PATH).serve_endpoint(handler)
    client = RawClient(await within(address_of(worker)))
    try:
        yield client
    finally:
        client.close()
        await shut_down(worker)
        await within(serving)


async def fill(pair: Served, count: int) -> list[asyncio.Task[list[Any]]]:
    """Make so many calls; the worker has taken all of them on return."""
    loop = asyncio.get_running_loop()
    calls = [loop.create_task(pair.items(number)) for number in range(count)]
    await until(lambda: pair.in_flight == count)
    return calls


# ------------------------------------------------------------------ pool and queue


@pytest.mark.parametrize(
    ("settings", "running", "waiting"),
    [
        ({"DYN_TCP_WORKER_POOL_SIZE": "1", "DYN_TCP_WORK_QUEUE_SIZE": "1"}, 1, 2),
        ({"DYN_TCP_WORKER_POOL_SIZE": "3", "DYN_TCP_WORK_QUEUE_SIZE": "2"}, 3, 3),
        ({"DYN_ENGINE_REQUEST_LIMIT": "2"}, 2, 16),
        ({"DYN_ENGINE_REQUEST_LIMIT": "0"}, 1, 16),
        (
            {"DYN_ENGINE_REQUEST_LIMIT": "2", "DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "4"},
            2,
            4,
        ),
        (
            {"DYN_ENGINE_REQUEST_LIMIT": "2", "DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "1"},
            2,
            2,
        ),
        (
            {
                "DYN_TCP_WORKER_POOL_SIZE": "1",
                "DYN_TCP_WORK_QUEUE_SIZE": "1",
                "DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "9",
            },
            1,
            2,
        ),
        (
            {
                "DYN_TCP_WORKER_POOL_SIZE": "5",
                "DYN_TCP_WORK_QUEUE_SIZE": "5",
                "DYN_ENGINE_REQUEST_LIMIT": "2",
                "DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "2",
            },
            2,
            2,
        ),
    ],
    ids=lambda value: (
        ",".join(f"{k[4:]}={v}" for k, v in value.items())
        if isinstance(value, dict)
        else None
    ),
)
async def test_a_worker_runs_and_queues_as_many_as_its_settings_say(
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    running: int,
    waiting: int,
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    gate = Gate()
    async with from_environment(gate.handle) as pair:
        calls = await fill(pair, running + waiting)
        await until(lambda: gate.running == running)
        with pytest.raises(Overloaded):
            await pair.call("one more")
        assert gate.running == running
        gate.open.set()
        answers = await within(asyncio.gather(*calls))
        assert answers == [[number] for number in range(running + waiting)]
        assert await pair.items("there is room again") == ["there is room again"]


FULL = {"worker_pool_size": 1, "work_queue_size": 1}


async def test_the_refusal_of_a_full_worker_says_what_to_do() -> None:
    gate = Gate()
    async with served(gate.handle, worker=FULL) as pair:
        calls = await fill(pair, 3)
        with pytest.raises(Overloaded) as caught:
            await pair.call()
        error = caught.value
        assert str(error) == "CapacityExhausted: Server overloaded: worker at capacity"
        assert error.retryable
        assert error.retry_after == 1.0
        assert error.instance_id == pair.instance_id
        assert "DYN_TCP_WORKER_POOL_SIZE" in str(error.facts["limit"])
        # The client leaves the worker alone now, and says so without asking it.
        with pytest.raises(Overloaded) as caught:
            await pair.client.random(None)
        assert str(caught.value) == (
            "CapacityExhausted: All workers are busy, please retry later"
        )
        assert caught.value.retry_after is not None
        assert 0 < caught.value.retry_after <= 1
        gate.open.set()
        await within(asyncio.gather(*calls))


async def test_many_refusals_are_few_lines_that_name_limits_and_settings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = Gate()
    async with served(gate.handle, worker=FULL) as pair:
        calls = await fill(pair, 3)
        for _ in range(50):
            with pytest.raises(Overloaded):
                await pair.call()
        (record,) = (r for r in caplog.records if r.levelno >= logging.WARNING)
        assert "1 run and 2 wait" in record.getMessage()
        for name in (
            "DYN_TCP_WORKER_POOL_SIZE",
            "DYN_TCP_WORK_QUEUE_SIZE",
            "DYN_ENGINE_REQUEST_LIMIT",
            "DYN_DYNAMO_REQUEST_QUEUE_LIMIT",
        ):
            assert name in record.getMessage()
        # Time passes: the next line counts those that were not told.
        pair.worker._core.admission._silent_until = 0.0
        with pytest.raises(Overloaded):
            await pair.call()
        assert "requests refused: 50;" in caplog.records[-1].getMessage()
        gate.open.set()
        await within(asyncio.gather(*calls))


async def test_a_call_refused_by_a_full_worker_goes_to_another_one() -> None:
    gate = Gate()
    async with served(gate.handle, worker=FULL) as pair:
        calls = await fill(pair, 3)
        other = make_runtime()
        other._core.backend = type(other._core.backend)(store_of(pair))
        serving = other.endpoint(PATH).serve_endpoint(echo)
        await until(lambda: len(pair.client.instance_ids()) == 2)
        for number in range(10):
            stream = await within(pair.client.random(number, annotated=False))
            assert [item async for item in stream] == [number]
        await shut_down(other)
        await within(serving)
        gate.open.set()
        await within(asyncio.gather(*calls))


def store_of(pair: Served) -> MemoryStore:
    return pair.worker._core.backend._store  # type: ignore[attr-defined, no-any-return]


# CN-20


async def test_whoever_stays_in_a_queue_that_all_others_left_is_next(
    scale: float,
) -> None:
    gate = Gate()
    leaving = int(100 * scale)
    limits = {"worker_pool_size": 1, "work_queue_size": leaving + 5}
    async with served(gate.handle, worker=limits) as pair:
        (first,) = await fill(pair, 1)
        loop = asyncio.get_running_loop()
        queued = [loop.create_task(pair.items("leaves")) for _ in range(leaving)]
        await until(lambda: pair.in_flight == 1 + leaving)
        stays = loop.create_task(pair.items("stays"))
        await until(lambda: pair.in_flight == 2 + leaving)
        for call in queued:
            call.cancel()
        await asyncio.wait(queued)
        await until(lambda: pair.in_flight == 2)
        gate.open.set()
        assert await within(stays) == ["stays"]
        assert await within(first) == [0]
        assert gate.served == [0, "stays"]


# ---------------------------------------------------------------------- unavailable


async def test_a_worker_that_does_not_serve_the_endpoint_says_its_name() -> None:
    async with served(echo) as pair:
        other = pair.worker.endpoint("some.where.unserved")
        await other.register_endpoint_instance()
        client = await pair.caller.endpoint("some.where.unserved").client()
        await within(client.wait_for_instances())
        with pytest.raises(Refused) as caught:
            await client.direct(None, pair.instance_id)
        assert str(caught.value) == (
            "Unavailable: Server unavailable: unknown endpoint "
            f"{pair.instance_id:x}/some/where/unserved"
        )
        assert caught.value.retryable
        # It is avoided from now on, and the next error says why.
        with pytest.raises(errors.NoInstances, match=r"1 withdrawn.*unknown endpoint"):
            await client.random(None)


async def test_a_draining_worker_refuses_retryably_and_says_that_it_drains() -> None:
    gate = Gate()
    async with served(gate.handle, worker={"drain_timeout_s": 5.0}) as pair:
        (call,) = await fill(pair, 1)
        # The caller's list is older than the shutdown: it is no longer told of changes.
        pair.client._home.instances._watch.close()
        pair.worker.shutdown()
        (life,) = pair.worker._core._served
        await until(lambda: life._ingress._draining)
        with pytest.raises(Refused, match="is draining") as caught:
            await pair.call()
        assert caught.value.retryable
        gate.open.set()
        assert await within(call) == [0]


# --------------------------------------------------------------------- sizes (TR-01)


EXACT = 1_000_000


@pytest.mark.usefixtures("each_lane")
async def test_a_request_of_exactly_the_limit_passes_and_one_byte_more_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DYN_TCP_MAX_MESSAGE_SIZE", str(EXACT))
    async with from_environment(echo) as pair:
        with pytest.raises(MessageTooLarge) as caught:
            await pair.call(bytes(EXACT), context=Context("same-id"))
        whole = int(re.findall(r"\((\d+) bytes", str(caught.value))[0])
        fits = bytes(EXACT - (whole - EXACT))
        assert await pair.items(fits, context=Context("same-id")) == [fits]
        with pytest.raises(MessageTooLarge) as caught:
            await pair.call(fits + b"x", context=Context("same-id"))
        text = str(caught.value)
        assert text.startswith("InvalidRequest: Request payload is too large for this")
        assert text.endswith(
            f"({EXACT + 1} bytes, limit {EXACT}: DYN_TCP_MAX_MESSAGE_SIZE)"
        )
        assert not caught.value.retryable
        assert await pair.items(1) == [1]


@pytest.mark.usefixtures("each_lane")
async def test_a_request_over_the_default_limit_is_refused_before_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(echo) as pair:
        (life,) = pair.worker._core._served
        offer = life._ingress.offer
        received: list[str] = []

        def note(call: IncomingCall) -> Rejection | None:
            received.append(call.path)
            return offer(call)

        monkeypatch.setattr(life._ingress, "offer", note)
        with pytest.raises(MessageTooLarge, match=r"limit 33554432: DYN_TCP_MAX"):
            await pair.call(bytes(33_554_432))
        assert received == []
        assert await pair.items("next") == ["next"]
        assert len(received) == 1


@pytest.mark.usefixtures("each_lane")
async def test_a_worker_that_allows_less_than_its_client_says_so_at_once() -> None:
    """A genuine client would wait for ever for such a call."""
    async with served(
        echo,
        worker={"max_message_bytes": 100_000},
        caller={"max_message_bytes": 10_000_000},
    ) as pair:
        with pytest.raises(MessageTooLarge) as caught:
            await pair.call(bytes(200_000))
        text = str(caught.value)
        assert text.startswith("InvalidRequest: Read error: message too large: 200")
        assert "(max: 100000 bytes)" in text
        assert "DYN_TCP_MAX_MESSAGE_SIZE of the worker" in text
        assert not caught.value.retryable
        # The worker is not to blame: it is called again, on another connection.
        assert await within(pair.client.wait_for_instances(timeout=0))
        stream = await within(pair.client.random("next", annotated=False))
        assert [item async for item in stream] == ["next"]


# ------------------------------------------------------------- metadata and headers


@pytest.mark.usefixtures("each_lane")
async def test_metadata_over_its_limit_is_refused_before_it_is_sent() -> None:
    async with served(echo) as pair:
        fits = Context("id", {"k": "v" * (MAX_CONTROL_BYTES - 1000)})
        assert await pair.items(1, context=fits) == [1]
        over = Context("id", {"k": "v" * MAX_CONTROL_BYTES})
        with pytest.raises(MessageTooLarge) as caught:
            await pair.call(1, context=over)
        text = str(caught.value)
        assert f"exceeds limit {MAX_CONTROL_BYTES}" in text
        assert "metadata of the context" in text
        assert await pair.items(1) == [1]


@pytest.mark.parametrize("each_lane", ["callhome"], indirect=True)
@pytest.mark.usefixtures("each_lane")
async def test_headers_over_their_limit_are_refused_before_they_are_sent() -> None:
    """Only a trace that is passed on can be that long."""
    said: list[str] = []
    async with served(echo) as pair:

        async def pass_on(request: Any, context: Context) -> AsyncIterator[Any]:
            with pytest.raises(MessageTooLarge) as caught:
                await pair.call(request, context=context)
            said.append(str(caught.value))
            yield "refused"

        async with worker_by_hand(pass_on) as client:
            frame = encode_request_frame(
                client.worker.path,
                {"tracestate": "a=" + "b" * 65_500},
                encode_request_payload(client.control(), b"\x01"),
                max_message_bytes=1_000_000,
            )
            await (await client.connect()).send(frame)
            home = await client.home()
            _, _, item = await home.frames(3)
            assert body_of(item)["data"] == {"data": "refused"}
        assert await pair.items(1) == [1]
    assert said[0].startswith("InvalidRequest: Request cannot be encoded for this")
    assert "limit 65535" in said[0]
    assert "Reduce the metadata size" in said[0]


# -------------------------------------------------------------------------- depth


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


async def test_a_request_nested_too_deeply_is_refused_by_the_call() -> None:
    async with served(echo) as pair:
        deep = nested(sys.getrecursionlimit() * 200)
        with pytest.raises(
            ValueError, match=r"nested more deeply than .* limit of \d+"
        ):
            pair.client.random(deep)
        del deep
        assert await pair.items(nested(100)) == [nested(100)]


async def test_an_item_nested_too_deeply_is_an_error_in_its_place() -> None:
    async def deep(request: Any) -> AsyncIterator[Any]:
        yield "first"
        yield nested(sys.getrecursionlimit() * 200)

    async with served(deep) as pair:
        stream = await pair.call()
        assert await within(stream.__anext__()) == "first"
        with pytest.raises(errors.RemoteError) as caught:
            await within(stream.__anext__())
        assert "nested more deeply than Python's recursion limit" in str(caught.value)


async def test_a_body_nested_too_deeply_is_answered_with_an_error() -> None:
    """No peer of ours sends it, and decoding it must not end the worker."""
    async with worker_by_hand(echo) as client:
        body = b"\x91" * 1_000_000 + b"\x01"
        payload = encode_request_payload(client.control(), body)
        await (await client.connect()).send(client.frame(payload))
        home = await client.home()
        _, _, item = await home.frames(3)
        error = body_of(item)["data"]["error"]
        assert error["class"] == "InvalidRequest"
        assert "not msgpack" in error["message"]
        home = await client.call("next")
        assert body_of(await home.frame())["data"]["data"] == "next"
