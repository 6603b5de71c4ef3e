"""Start, sleep, drain and end of workers and clients, and what is left of them.

Rows LC-04, LC-05, LC-09, LC-10, LC-14, LC-17, LC-19 to LC-22 and TH-05.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from measured import TRIES, Times
from programs import LIMIT_S, Program, Programs, eventually
from raw_peers import (
    PATH,
    make_runtime,
    open_descriptors,
    shut_down,
    until,
    within,
)
from served import served

from dynamo.runtime import Client, DistributedRuntime
from dynamo.runtime._discovery.file import FileBackend
from dynamo.runtime._discovery.memory import MemoryStore
from dynamo.runtime.errors import CallError, Refused, RuntimeClosed, StreamBroken

SOON_S = 3.0


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
    monkeypatch.setenv("DYN_TCP_RESPONSE_STREAM_HOST", "127.0.0.1")


async def echo(request: Any) -> AsyncIterator[Any]:
    yield request


class Held:
    """A handler that goes on when it is told to."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def handle(self, request: Any) -> AsyncIterator[Any]:
        yield "begun"
        await self.go_on.wait()
        yield request


# ----------------------------------------------------------------------------- LC-04

WITH_A_THREAD = """
def busy():
    threading.Event().wait(60)

def lasting():
    main = threading.main_thread()
    return [t.name for t in threading.enumerate() if not t.daemon and t is not main]

async def handle(request):
    yield request

@dynamo_worker()
async def main(runtime):
    threading.Thread(target=busy, name="of the user").start()
    endpoint = runtime.endpoint("ns.comp.gen")
    serving = endpoint.serve_endpoint(handle)
    client = await endpoint.client()
    await client.wait_for_instances()
    async for item in await client.random("answer", annotated=False):
        say(item)
    say(lasting())
    END

run(main)
say("over", lasting())
"""


async def test_only_threads_of_the_program_keep_a_worker_that_returned(
    programs: Programs,
) -> None:
    """What keeps it then is the interpreter, which any signal ends."""
    worker = await programs.start(WITH_A_THREAD.replace("END", "return"))
    await worker.says("answer")
    await worker.says("['of the user']")
    await worker.says("over ['of the user']")
    worker.send(signal.SIGTERM)
    assert await worker.ended(SOON_S) == -signal.SIGTERM
    assert programs.records == []


async def test_a_thread_of_the_program_does_not_keep_a_worker_that_was_told_to_end(
    programs: Programs,
) -> None:
    worker = await programs.start(WITH_A_THREAD.replace("END", "await serving"))
    await worker.says("answer")
    await worker.says("['of the user']")
    worker.send(signal.SIGTERM)
    await worker.says("over ['of the user']")
    assert await worker.ended() == 0
    assert "thread of the user in wait" in worker.stderr


# ----------------------------------------------------------------------------- LC-05

WITH_A_CHILD = """
async def handle(request):
    yield "begun"
    await asyncio.Event().wait()

@dynamo_worker()
async def main(runtime):
    sleep = "import time; print(flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", sleep], stdout=subprocess.PIPE,
                             stderr=subprocess.DEVNULL)
    child.stdout.readline()
    endpoint = runtime.endpoint("ns.comp.gen")
    serving = endpoint.serve_endpoint(handle)
    await (await endpoint.client()).wait_for_instances()
    say("serving")
    say("child", await asyncio.to_thread(child.wait))
    await serving

run(main)
"""


async def test_an_interrupt_from_the_terminal_drains_and_a_second_one_ends_at_once(
    programs: Programs, client: Client
) -> None:
    """Ctrl-C goes to the whole foreground group: to the worker and to its children."""
    worker = await programs.start(WITH_A_CHILD, command=("setsid", sys.executable))
    await worker.says("serving")
    await client.wait_for_instances(timeout=LIMIT_S)
    stream = await client.random("", annotated=False)
    assert await stream.__anext__() == "begun"
    os.killpg(worker.pid, signal.SIGINT)
    await worker.says(f"child {-signal.SIGINT}")
    await eventually(lambda: not programs.records)
    assert worker.running
    os.killpg(worker.pid, signal.SIGINT)
    with pytest.raises(StreamBroken):
        await within(stream.__anext__())
    assert await worker.ended(SOON_S) == 0, worker.stderr


# --------------------------------------------------------------------- LC-09 and LC-10


async def test_a_second_handler_of_a_name_answers_after_the_first_was_unregistered(
    each_lane: str,
) -> None:
    async def second(request: Any) -> AsyncIterator[Any]:
        yield "second"

    async with served(echo) as pair:
        assert await pair.items("first") == ["first"]
        endpoint = pair.worker.endpoint(PATH)
        await endpoint.unregister_endpoint_instance()
        await until(lambda: pair.client.instance_ids() == [])
        again = endpoint.serve_endpoint(second)
        await within(pair.client.wait_for_instances())
        assert await pair.items("first") == ["second"]
        await shut_down(pair.worker)
        assert await within(again) == ()


async def test_a_caller_with_an_old_list_is_served_after_an_unregistration(
    each_lane: str,
) -> None:
    async with served(echo) as pair:
        pair.client._home.instances._watch.close()
        await pair.worker.endpoint(PATH).unregister_endpoint_instance()
        for number in range(20):
            assert await pair.items(number) == [number]


# ----------------------------------------------------------------------------- LC-14


async def test_calls_in_flight_when_their_client_closes_are_complete_or_fail(
    each_lane: str, scale: float
) -> None:
    calls = int(200 * scale)
    held = Held()
    async with served(held.handle) as pair:

        async def outcome(number: int) -> str:
            try:
                items = await pair.items(number)
            except (CallError, RuntimeClosed) as error:
                return type(error).__name__
            assert items == ["begun", number]
            return "complete"

        loop = asyncio.get_running_loop()
        running = [loop.create_task(outcome(number)) for number in range(calls)]
        await until(lambda: pair.in_flight >= calls / 2)
        pair.caller.shutdown()
        held.go_on.set()
        outcomes = Counter(await asyncio.wait_for(asyncio.gather(*running), LIMIT_S))
        print(f"of {calls} calls in flight: {dict(outcomes)}")
        assert outcomes.total() == calls
        assert outcomes["complete"] >= calls / 2
        await until(lambda: pair.in_flight == 0)


# ----------------------------------------------------------------------------- LC-17


async def test_whoever_waited_for_an_instance_can_call_it(
    each_lane: str, scale: float
) -> None:
    for number in range(int(30 * scale)):
        async with served(echo) as pair:
            stream = await pair.client.random(number, annotated=False)
            assert [item async for item in stream] == [number]


async def test_a_client_made_after_the_registration_calls_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: float
) -> None:
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    loop = asyncio.get_running_loop()
    for number in range(int(10 * scale)):
        worker, caller = (DistributedRuntime(loop, "file", "tcp") for _ in range(2))
        serving = worker.endpoint(PATH).serve_endpoint(echo)
        await worker.endpoint(PATH).register_endpoint_instance()
        client = await caller.endpoint(PATH).client()
        stream = await client.random(number, annotated=False)
        assert [item async for item in stream] == [number]
        await shut_down(caller)
        await shut_down(worker)
        await within(serving)


# --------------------------------------------------------------------- LC-19 and LC-20


async def test_idle_connections_do_not_hold_a_shutdown(each_lane: str) -> None:
    """From Python 3.12 a server's `wait_closed` waits for all of them."""
    took = []
    for _ in range(3):
        async with served(echo) as pair:
            assert await pair.items(1) == [1]
            _, host, port = await pair.worker._core.request_server()
            idle = [socket.create_connection((host, port)) for _ in range(20)]
            began = time.monotonic()
            await shut_down(pair.worker)
            took.append(time.monotonic() - began)
            for one in idle:
                one.close()
    print(f"a shutdown with idle connections takes {min(took) * 1e3:.0f} ms")
    assert min(took) < 1


class Storm:
    """Clients that connect to a port, one after the other, until it closes."""

    def __init__(self, host: str, port: int) -> None:
        self.connected = 0
        self._address = host, port
        loop = asyncio.get_running_loop()
        self._clients = [loop.create_task(self._connect()) for _ in range(10)]

    async def _connect(self) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                _, writer = await asyncio.open_connection(*self._address)
                self.connected += 1
                writer.write(b"\xff\xff\xf5")
                writer.close()

    async def over(self) -> None:
        await asyncio.wait_for(asyncio.gather(*self._clients), LIMIT_S)


async def test_connections_that_come_during_a_shutdown_leave_nothing(
    each_lane: str, scale: float, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    complaints: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    descriptors = []
    for _ in range(1 + max(1, int(scale))):
        worker = make_runtime()
        serving = worker.endpoint(PATH).serve_endpoint(echo)
        _, host, port = await worker._core.request_server()
        storm = Storm(host, port)
        await until(lambda storm=storm: storm.connected >= 50)
        await shut_down(worker)
        await storm.over()
        assert await within(serving) == ()
        # The first round has what the loop keeps for itself.
        limit = descriptors[0] if descriptors else 10_000
        await until(lambda limit=limit: open_descriptors() <= limit)
        descriptors.append(open_descriptors())
    assert not complaints
    assert not [one for one in caplog.records if one.exc_info]


# ----------------------------------------------------------------------------- LC-21


async def test_a_worker_that_lost_its_record_is_listed_again_and_its_streams_go_on(
    tmp_path: Path, each_lane: str
) -> None:
    refresh_s = 0.2
    held = Held()
    worker, caller = make_runtime(), make_runtime()
    for runtime in (worker, caller):
        runtime._core.backend = FileBackend(tmp_path, ttl_s=2.0, refresh_s=refresh_s)
    serving = worker.endpoint(PATH).serve_endpoint(held.handle)
    client = await caller.endpoint(PATH).client()
    (instance_id,) = await within(client.wait_for_instances())
    stream = await within(client.random("to the end", annotated=False))
    assert await within(stream.__anext__()) == "begun"
    listed: list[list[int]] = []
    client._home.instances.subscribe(lambda: listed.append(client.instance_ids()))
    back = Times("a lost record is listed again", refresh_s)
    for _ in range(TRIES):
        listed.clear()
        (record,) = (tmp_path / "v1" / "instances").glob("[!.]*")
        since = time.monotonic()
        record.unlink()
        await back.event(
            lambda: listed[-1:] == [[instance_id]] and [] in listed, since=since
        )
    back.judge()
    held.go_on.set()
    assert [item async for item in stream] == ["to the end"]
    assert [item async for item in await within(client.random(2, annotated=False))] == [
        "begun",
        2,
    ]
    await shut_down(caller)
    await shut_down(worker)
    await within(serving)


# ----------------------------------------------------------------------------- LC-22

ON_A_PORT = """
async def handle(request):
    yield runtime_id
    if request == "for ever":
        await asyncio.Event().wait()

@dynamo_worker()
async def main(runtime):
    global runtime_id
    endpoint = runtime.endpoint("ns.comp.gen")
    runtime_id = endpoint.connection_id()
    say(runtime_id)
    await endpoint.serve_endpoint(handle)

run(main)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def start_on(programs: Programs, port: int, lanes: str) -> tuple[int, Program]:
    settings = {"DYN_TCP_RPC_PORT": str(port), "DYN_RUNTIME_LANES": lanes}
    worker = await programs.start(ON_A_PORT, **settings)
    return int(await worker.line()), worker


@pytest.mark.parametrize("each_lane", ["duplex", "callhome"], indirect=True)
async def test_a_worker_on_the_port_of_a_killed_one_gets_nothing_that_was_meant_for_it(
    programs: Programs, each_lane: str, client: Client
) -> None:
    port = free_port()
    old, killed = await start_on(programs, port, each_lane)
    await eventually(lambda: client.instance_ids() == [old])
    stream = await client.direct("for ever", old, annotated=False)
    assert await within(stream.__anext__()) == old
    killed.kill()
    with pytest.raises(StreamBroken):
        await within(stream.__anext__())
    await killed.ended()
    new, _ = await start_on(programs, port, each_lane)
    await eventually(lambda: new in client.instance_ids())
    with pytest.raises(Refused, match="unknown endpoint"):
        await client.direct("", old)
    for _ in range(10):
        answer = await client.round_robin("", annotated=False)
        assert [item async for item in answer] == [new]


# ----------------------------------------------------------------------------- TH-05


async def test_a_thread_calls_through_the_home_loop_and_a_handler_through_its_own(
    each_lane: str,
) -> None:
    store = MemoryStore()
    runtime = make_runtime(store)
    loop = asyncio.get_running_loop()
    serving = [runtime.endpoint("a.b.echo").serve_endpoint(echo)]
    client = await runtime.endpoint("a.b.echo").client()

    async def call(request: Any) -> list[Any]:
        return [item async for item in await client.random(request, annotated=False)]

    def from_a_thread(request: Any) -> list[Any]:
        return asyncio.run_coroutine_threadsafe(call(request), loop).result(LIMIT_S)

    async def passes_on(request: Any) -> AsyncIterator[Any]:
        for item in await call(request):
            yield item
        for item in await asyncio.to_thread(from_a_thread, request + 1):
            yield item

    serving.append(runtime.endpoint("a.b.pass").serve_endpoint(passes_on))
    outer = await runtime.endpoint("a.b.pass").client()
    await within(client.wait_for_instances())
    await within(outer.wait_for_instances())
    stream = await within(outer.random(1, annotated=False))
    assert [item async for item in stream] == [1, 2]
    assert await asyncio.to_thread(from_a_thread, 3) == [3]
    await shut_down(runtime)
    await within(asyncio.gather(*serving))
