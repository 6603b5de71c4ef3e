"""The lane within one process: whom it reaches, and that nothing is shared on it.

That calls end, cancel, wait and fail on it as on every lane is under test where
``each_lane`` is asked for.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import gc
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from raw_peers import PATH, make_runtime, refusal_of, shut_down, until, within
from served import Served, served

from dynamo.runtime import Client, Context, DistributedRuntime
from dynamo.runtime._calls.streams import ResponseSender
from dynamo.runtime._discovery.memory import MemoryStore
from dynamo.runtime._transports import CallRequest, local
from dynamo.runtime._wire.records import EndpointRecord
from dynamo.runtime.errors import (
    ConnectionFailed,
    DynamoException,
    RuntimeClosed,
    StreamBroken,
)


@pytest.fixture(autouse=True)
def _local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_RUNTIME_LANES", "all")


async def echo(request: Any) -> AsyncIterator[Any]:
    yield request


def record_of(client: Client) -> EndpointRecord:
    (record,) = client._home.instances.records
    return record


def links_of(runtime: DistributedRuntime) -> int:
    return len(runtime._core.lane.duplex._links)


# --------------------------------------------------------------------- who is reached


async def test_neighbours_are_called_without_a_socket_and_advertise_the_others() -> (
    None
):
    async with served(echo) as pair:
        assert await pair.items([1, 2]) == [[1, 2]]
        assert links_of(pair.caller) == 0
        assert pair.caller._core.lane.callhome.listener.address == ""
        server = pair.worker._core._server
        assert server is not None
        assert not list(server._connections)
        assert record_of(pair.client).lanes == ("duplex",)


@pytest.mark.parametrize("told", ["worker", "caller"])
@pytest.mark.parametrize(("lanes", "links"), [(("duplex",), 1), ((), 0)])
async def test_either_side_can_be_told_to_use_sockets(
    told: str, lanes: tuple[str, ...], links: int
) -> None:
    async with served(echo, **{told: {"lanes": lanes}}) as pair:
        assert await pair.items(1) == [1]
        assert links_of(pair.caller) == links
        listens = pair.caller._core.lane.callhome.listener.address != ""
        assert listens == (not links)


async def test_an_address_that_is_not_quite_the_port_is_somebody_elses() -> None:
    """Behind a relay, or on another machine, the path may be the same."""
    async with served(echo) as pair:
        loop = asyncio.get_running_loop()
        record = record_of(pair.client)
        server = pair.worker._core._server
        assert local.neighbour(record, loop) is server

        def found(**changes: Any) -> object:
            fields = {**_fields(record), **changes}
            return local.neighbour(EndpointRecord(**fields), loop)

        host, _, rest = record.address.partition(":")
        port, _, path = rest.partition("/")
        assert found(address=f"tcp://{record.address}") is server
        assert found(address=f"{host}:{int(port) ^ 1}/{path}") is None
        assert found(address=f"127.0.0.2:{port}/{path}") is None
        assert found(transport_kind="nats_tcp") is None
        other = asyncio.new_event_loop()
        assert local.neighbour(record, other) is None
        other.close()


def _fields(record: EndpointRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


async def test_a_worker_on_another_loop_of_the_process_is_called_over_sockets() -> None:
    store = MemoryStore()
    caller = make_runtime(store)
    ready, over = threading.Event(), threading.Event()

    async def elsewhere() -> None:
        worker = make_runtime(store)
        serving = worker.endpoint(PATH).serve_endpoint(echo)
        ready.set()
        while not over.is_set():
            await asyncio.sleep(0.005)
        await shut_down(worker)
        await serving

    thread = threading.Thread(target=asyncio.run, args=(elsewhere(),))
    thread.start()
    await until(ready.is_set)
    client = await caller.endpoint(PATH).client()
    await within(client.wait_for_instances())
    assert [i async for i in await client.random(5, annotated=False)] == [5]
    assert links_of(caller) == 1
    await shut_down(caller)
    over.set()
    await until(lambda: not thread.is_alive())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
async def test_a_forked_child_finds_no_port_of_its_parent() -> None:
    async with served(echo):
        assert len(local.ports) == 1
        child = os.fork()
        if child == 0:
            os._exit(len(local.ports))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(local.ports) == 1


async def test_a_port_that_is_closed_is_not_found_any_more() -> None:
    async with served(echo) as pair:
        record = record_of(pair.client)
        await shut_down(pair.worker)
        request = CallRequest(call_id="i", value=None, packed=b"\xc0", metadata={})
        with pytest.raises(ConnectionFailed) as caught:
            await pair.caller._core.lane.open(record, request, None)  # type: ignore[arg-type]
        assert caught.value.retryable
    assert not local.ports


# ------------------------------------------------------------------ nothing is shared


@pytest.mark.parametrize("codec", ["msgpack", "json"])
async def test_handler_and_caller_share_no_object(codec: str) -> None:
    seen: list[Any] = []

    async def keep(request: Any, context: Context) -> AsyncIterator[Any]:
        seen.append((request, context.metadata))
        request["list"].append("mine")
        context.metadata["handler"] = "was here"
        yield request
        request["list"].append("after the yield")
        yield request

    async with served(keep, worker={"codec": codec}) as pair:
        request: dict[str, Any] = {"list": [1, {"deep": []}]}
        context = Context("id", {"tenant": "blue"})
        stream = await pair.call(request, context=context)
        items = [item async for item in stream]
    assert request == {"list": [1, {"deep": []}]}
    assert dict(context.metadata) == {"tenant": "blue"}
    assert items[0] == {"list": [1, {"deep": []}, "mine"]}
    assert items[1]["list"][-1] == "after the yield"
    assert items[0] is not seen[0][0]
    assert items[0]["list"] is not items[1]["list"]


async def test_values_become_what_they_become_on_a_wire() -> None:
    @dataclasses.dataclass
    class Point:
        x: int

    async def answer(request: Any) -> AsyncIterator[Any]:
        yield [type(request).__name__, request]
        yield (Point(2), bytearray(b"raw"))

    async with served(answer) as pair:
        assert await pair.items(Point(1)) == [["dict", {"x": 1}], [{"x": 2}, b"raw"]]


async def test_context_variables_of_the_caller_do_not_reach_the_handler() -> None:
    who = contextvars.ContextVar("who", default="nobody")
    ended = asyncio.Event()

    async def look(request: Any, context: Context) -> AsyncIterator[Any]:
        yield who.get()
        who.set("handler")
        await context.async_killed_or_stopped()
        yield who.get()
        ended.set()

    async with served(look) as pair:
        who.set("caller")
        stream = await pair.call()
        assert await stream.__anext__() == "nobody"
        assert who.get() == "caller"
        stream.cancel()
        await within(ended.wait())


async def test_an_error_is_another_object_with_the_same_words() -> None:
    raised = ValueError("no good")

    async def boom(request: Any) -> AsyncIterator[Any]:
        yield 1
        raise raised

    async with served(boom) as pair:
        stream = await pair.call()
        assert await stream.__anext__() == 1
        with pytest.raises(DynamoException, match="no good") as caught:
            await stream.__anext__()
        causes = {caught.value.__cause__, caught.value.__context__}
        assert raised not in causes


# -------------------------------------------------------------- one after the other


async def test_the_handler_begins_after_the_call_was_made_and_its_end_comes_after() -> (
    None
):
    order: list[str] = []

    async def note(request: Any) -> AsyncIterator[Any]:
        order.append("handler")
        return
        yield

    async with served(note) as pair:
        future = pair.client.random(None)
        order.append("called")
        stream = await within(future)
        assert [item async for item in stream] == []
    assert order == ["called", "handler"]


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("way", ["cancel", "stop", "kill"])
async def test_a_call_that_is_ended_at_any_turn_leaves_nothing(
    turns: int, way: str
) -> None:
    ended = begun = 0

    async def hush(request: Any, context: Context) -> AsyncIterator[Any]:
        nonlocal ended, begun
        begun += 1
        try:
            yield 1
            await context.async_killed_or_stopped()
        finally:
            ended += 1

    async with served(hush) as pair:
        context = Context()
        future = pair.client.random(None, annotated=False, context=context)
        for _ in range(turns):
            await asyncio.sleep(0)
        if way == "cancel":
            # Too late for the call, in time for its stream.
            if not future.cancel():
                future.result().cancel()
        elif way == "stop":
            context.stop_generating()
        else:
            context._state.kill()
        await until(lambda: ended == begun and not pair.in_flight)
        lane = pair.caller._core.lane.local
        await until(lambda: not lane._calls)
        assert begun == (0 if turns == 0 else begun)


async def test_a_push_handler_is_held_by_nobody_and_loses_nothing() -> None:
    async def push(
        request: Any, context: Context, response_sender: ResponseSender
    ) -> AsyncIterator[Any]:
        for number in range(request):
            response_sender.send(number)
        return
        yield

    async with served(push) as pair:
        assert await pair.items(10_000) == list(range(10_000))


async def test_a_reader_that_pauses_holds_the_handler_and_only_that() -> None:
    sent = 0

    async def flood(request: Any) -> AsyncIterator[Any]:
        nonlocal sent
        for number in range(request):
            sent += 1
            yield number

    async with served(flood) as pair:
        paused = await pair.call(100_000)
        assert await pair.items(1000) == list(range(1000))
        assert sent < 1000 + 200
        assert [item async for item in paused] == list(range(100_000))


async def test_input_that_nobody_reads_holds_its_source() -> None:
    go_on = asyncio.Event()
    taken = 0

    async def slow(requests: Any) -> AsyncIterator[Any]:
        await go_on.wait()
        yield sum([value async for value in requests])

    def source() -> Any:
        nonlocal taken
        for _ in range(10_000):
            taken += 1
            yield 1

    runtime = make_runtime()
    endpoint = runtime.endpoint(PATH)
    serving = endpoint.serve_bidirectional_endpoint(slow)
    client = await endpoint.client()
    await client.wait_for_instances(timeout=5)
    stream = await client.bidirectional(source(), annotated=False)
    await until(lambda: taken > 50)
    for _ in range(20):
        await asyncio.sleep(0)
    assert taken < 200
    go_on.set()
    assert [item async for item in stream] == [10_000]
    await shut_down(runtime)
    await within(serving)


# --------------------------------------------------------------------------- the ends


def halves() -> int:
    """How many halves of calls there are in this process."""
    kinds = (local.LocalCall, local.LocalHandle)
    return sum(isinstance(one, kinds) for one in gc.get_objects())


async def test_calls_leave_nothing_for_the_cyclic_collector() -> None:
    async def either(request: Any, context: Context) -> AsyncIterator[Any]:
        yield 1
        if request == "silent":
            await context.async_killed_or_stopped()

    async with served(either) as pair:

        async def call(request: str) -> None:
            stream = await pair.call(request)
            assert await stream.__anext__() == 1
            if request == "silent":
                stream.cancel()
                return
            with pytest.raises(StopAsyncIteration):
                await stream.__anext__()

        await call("whole")
        await until(lambda: not pair.in_flight)
        gc.collect()
        # Records of the log of other tests may still hold some.
        before = halves()
        gc.disable()
        try:
            for _ in range(20):
                await call("whole")
                await call("silent")
            await until(lambda: halves() == before)
        finally:
            gc.enable()


async def test_a_shut_down_client_makes_no_calls_and_lets_streams_end() -> None:
    go_on = asyncio.Event()

    async def wait(request: Any) -> AsyncIterator[Any]:
        yield 1
        await go_on.wait()
        yield 2

    async with served(wait) as pair:
        stream = await pair.call()
        assert await stream.__anext__() == 1
        record = record_of(pair.client)
        await shut_down(pair.caller)
        request = CallRequest(call_id="i", value=None, packed=b"\xc0", metadata={})
        with pytest.raises(RuntimeClosed):
            pair.caller._core.lane.open_now(record, request, None)  # type: ignore[arg-type]
        go_on.set()
        assert [item async for item in stream] == [2]


async def test_breaking_off_ends_both_sides() -> None:
    async with silent_pair() as (pair, stream, ended):
        pair.caller._core.lane.local.abort()
        with pytest.raises(StreamBroken):
            await within(stream.__anext__())
        await within(ended.wait())
        assert not pair.caller._core.lane.local._calls


async def test_a_draining_worker_refuses_its_neighbours_too() -> None:
    async with silent_pair() as (pair, stream, ended):
        record = record_of(pair.client)
        pair.worker.shutdown()
        error = await within(refusal_of(pair.caller, record))
        assert error.retryable
        assert "is draining" in str(error)
        stream.cancel()
        await within(ended.wait())
        await within(pair.serving)


class silent_pair:  # noqa: N801 - used like a function
    """A pair with one call in progress that is silent after its first item."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()

    async def __aenter__(self) -> tuple[Served, Any, asyncio.Event]:
        async def hush(request: Any, context: Context) -> AsyncIterator[Any]:
            yield 1
            await context.async_killed_or_stopped()
            self._ended.set()

        self._pair = served(hush)
        pair = await self._pair.__aenter__()
        stream = await pair.call()
        assert await stream.__anext__() == 1
        return pair, stream, self._ended

    async def __aexit__(self, *raised: object) -> None:
        await self._pair.__aexit__(None, None, None)
