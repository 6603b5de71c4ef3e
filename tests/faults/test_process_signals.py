"""Signals and exits: what becomes of calls, records and exit codes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from measured import AT_ONCE_S, Times
from programs import (
    LIMIT_S,
    MakeRuntime,
    Program,
    Programs,
    eventually,
    loop_kind,
)

from dynamo._core import AsyncResponseStream
from dynamo.runtime import Client
from dynamo.runtime.errors import Refused, StreamBroken

SIGNALS = [signal.SIGTERM, signal.SIGINT]
RUNNERS = ["run", "until_complete"]
SOON_S = 3.0
# Each is a life of a program.
MEASURED = 3

# What a handler does after its first item, by request.
HANDLERS = """
async def handle(request):
    yield "begun"
    if request == "line":
        await line()
    elif request == "for ever":
        await asyncio.Event().wait()
    elif request == "stubborn":
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                say("ignored")
    elif request == "block":
        await asyncio.sleep(0.01)  # the first item leaves
        time.sleep(20)
    yield "finished"
"""
WORKER = (
    HANDLERS
    + """
@dynamo_worker()
async def main(runtime):
    endpoint = runtime.endpoint("ns.comp.gen")
    serving = endpoint.serve_endpoint(handle)
    await (await endpoint.client()).wait_for_instances()
    say("serving")
    await serving
    say("returned")

run(main)
say("over")
"""
)


async def started(
    programs: Programs, text: str, *arguments: str, **environment: str
) -> Program:
    worker = await programs.start(text, *arguments, **environment)
    await worker.says("serving")
    return worker


async def begun(client: Client, request: str) -> AsyncResponseStream:
    await client.wait_for_instances(timeout=LIMIT_S)
    stream = await client.random(request, annotated=False)
    assert await stream.__anext__() == "begun"
    return stream


async def client_with_an_old_list(
    programs: Programs,
    make_runtime: MakeRuntime,
    monkeypatch: pytest.MonkeyPatch,
) -> Client:
    """A client that does not learn of what happens in the store."""
    copied = programs.folder / "copy"
    shutil.copytree(programs.store, copied)
    monkeypatch.setenv("DYN_FILE_KV", str(copied))
    client = await make_runtime().endpoint("ns.comp.gen").client()
    await client.wait_for_instances(timeout=LIMIT_S)
    return client


async def refusal(client: Client) -> Refused:
    """Call an instance that drains; it may serve those who come in time."""
    while True:
        try:
            stream = await client.direct("", client.instance_ids()[0], annotated=False)
        except Refused as error:
            return error
        assert [item async for item in stream] == ["begun", "finished"]


# ------------------------------------------------------------- dynamo_worker drains


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("signum", SIGNALS)
async def test_a_signal_drains_a_worker(
    programs: Programs,
    client: Client,
    make_runtime: MakeRuntime,
    monkeypatch: pytest.MonkeyPatch,
    signum: signal.Signals,
    runner: str,
) -> None:
    worker = await started(programs, WORKER, runner)
    old = await client_with_an_old_list(programs, make_runtime, monkeypatch)
    stream = await begun(client, "line")
    worker.send(signum)
    await eventually(lambda: not programs.records, SOON_S)
    assert (await refusal(old)).retryable
    assert worker.running
    worker.write_line()
    assert [item async for item in stream] == ["finished"]
    await worker.says("returned")
    await worker.says("over")
    assert await worker.ended() == 0
    assert "Traceback" not in worker.stderr


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("signum", SIGNALS)
async def test_a_second_signal_skips_the_wait(
    programs: Programs, client: Client, signum: signal.Signals, runner: str
) -> None:
    worker = await started(programs, WORKER, runner)
    await begun(client, "for ever")
    worker.send(signum)
    await eventually(lambda: not programs.records, SOON_S)
    worker.send(signum)
    assert await worker.ended(SOON_S) == 0, worker.stderr


async def test_a_second_signal_leaves_a_stubborn_handler_behind(
    programs: Programs, client: Client
) -> None:
    worker = await started(programs, WORKER)
    await begun(client, "stubborn")
    for _ in range(2):
        worker.send(signal.SIGTERM)
        await eventually(lambda: not programs.records, SOON_S)
    assert await worker.ended() == 0


async def test_a_second_signal_counts_although_the_coroutine_has_returned(
    programs: Programs, client: Client
) -> None:
    worker = await started(
        programs,
        HANDLERS
        + """
@dynamo_worker()
async def main(runtime):
    endpoint = runtime.endpoint("ns.comp.gen")
    endpoint.serve_endpoint(handle)
    await (await endpoint.client()).wait_for_instances()
    say("serving")
    await line()

run(main)
say("over")
""",
    )
    await begun(client, "for ever")
    worker.send(signal.SIGTERM)
    await eventually(lambda: not programs.records, SOON_S)
    worker.write_line()
    worker.send(signal.SIGTERM)
    await worker.says("over")
    assert await worker.ended(SOON_S) == 0, worker.stderr


@pytest.mark.parametrize("runner", RUNNERS)
async def test_a_drain_ends_within_its_budget(
    programs: Programs, client: Client, runner: str
) -> None:
    worker = await started(
        programs, WORKER, runner, DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS="0.5"
    )
    stream = await begun(client, "for ever")
    sent_at = worker.send(signal.SIGTERM)
    with pytest.raises(StreamBroken):
        await stream.__anext__()
    assert 0.5 <= time.monotonic() - sent_at < SOON_S
    assert await worker.ended(SOON_S) == 0, worker.stderr
    assert "ns/comp/gen (handle): 1" in worker.stderr


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("signum", SIGNALS)
async def test_a_signal_while_a_worker_waits_for_others_ends_it_without_an_error(
    programs: Programs, signum: signal.Signals, runner: str
) -> None:
    worker = await programs.start(
        """
@dynamo_worker()
async def main(runtime):
    client = await runtime.endpoint("ns.comp.nobody").client()
    say("waiting")
    await client.wait_for_instances()

run(main)
say("over")
""",
        runner,
    )
    await worker.says("waiting")
    worker.send(signum)
    await worker.says("over")
    assert await worker.ended(SOON_S) == 0
    assert "Traceback" not in worker.stderr


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("signum", SIGNALS)
async def test_a_signal_before_anything_is_served_ends_the_worker(
    programs: Programs, signum: signal.Signals, runner: str
) -> None:
    worker = await programs.start(
        """
@dynamo_worker()
async def main(runtime):
    say("starting")
    await asyncio.Event().wait()

run(main)
say("over")
""",
        runner,
    )
    await worker.says("starting")
    worker.send(signum)
    await worker.says("over")
    assert await worker.ended(SOON_S) == 0, worker.stderr


@pytest.mark.parametrize("signum", SIGNALS)
async def test_a_signal_ends_a_worker_that_waits_for_another(
    programs: Programs, signum: signal.Signals
) -> None:
    worker = await programs.start(
        """
@dynamo_worker()
async def main(runtime):
    client = await runtime.endpoint("ns.comp.nobody").client()
    say("waiting")
    await client.wait_for_instances()

run(main)
say("over")
"""
    )
    await worker.says("waiting")
    worker.send(signum)
    await worker.says("over")
    assert await worker.ended(SOON_S) == 0, worker.stderr


async def test_an_error_of_the_program_after_a_signal_stays_one(
    programs: Programs,
) -> None:
    worker = await started(
        programs,
        HANDLERS
        + """
@dynamo_worker()
async def main(runtime):
    endpoint = runtime.endpoint("ns.comp.gen")
    serving = endpoint.serve_endpoint(handle)
    await (await endpoint.client()).wait_for_instances()
    say("serving")
    await serving
    raise RuntimeError("wanted")

run(main)
""",
    )
    worker.send(signal.SIGTERM)
    assert await worker.ended(SOON_S) == 1
    assert "RuntimeError: wanted" in worker.stderr


@pytest.mark.parametrize("runner", RUNNERS)
async def test_a_signal_during_a_long_start_up_ends_the_worker(
    programs: Programs, runner: str
) -> None:
    worker = await programs.start(
        """
@dynamo_worker()
async def main(runtime):
    say("loading")
    await asyncio.to_thread(time.sleep, 60)

run(main)
""",
        runner,
    )
    await worker.says("loading")
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0
    assert f"thread {loop_kind()}_0" in worker.stderr


@pytest.mark.parametrize("runner", RUNNERS)
async def test_a_handler_that_ignores_everything_is_named_and_left_behind(
    programs: Programs, client: Client, runner: str
) -> None:
    worker = await started(
        programs, WORKER, runner, DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS="0.2"
    )
    await begun(client, "stubborn")
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0
    assert "stopped and cancelled: ns/comp/gen (handle): 1" in worker.stderr


async def test_a_second_signal_breaks_streams_at_once(
    programs: Programs, client: Client
) -> None:
    times = Times("a second signal", AT_ONCE_S, MEASURED)
    for _ in range(MEASURED):
        worker = await started(programs, WORKER)
        stream = await begun(client, "for ever")
        worker.send(signal.SIGTERM)
        await eventually(lambda: not programs.records, SOON_S)
        since = worker.send(signal.SIGTERM)
        await times.error(anext(stream), StreamBroken, since=since)
        assert await worker.ended(SOON_S) == 0, worker.stderr
    times.judge()


async def test_a_signal_stops_what_is_not_to_be_waited_for_within_a_second(
    programs: Programs, client: Client
) -> None:
    """Those who have not heard that it leaves are served first."""
    times = Times("requests that are not to be waited for", 1.0, MEASURED)
    text = WORKER.replace("(handle)", "(handle, graceful_shutdown=False)")
    for _ in range(MEASURED):
        worker = await started(programs, text)
        stream = await begun(client, "for ever")
        since = worker.send(signal.SIGTERM)
        await times.error(anext(stream), StreamBroken, since=since)
        assert await worker.ended(SOON_S) == 0, worker.stderr
    times.judge()


async def test_a_worker_ends_in_time_whatever_its_handler_does(
    programs: Programs, client: Client
) -> None:
    budget_s = 0.2
    times = Times("a deaf handler is left behind", budget_s + 2 + 1.5, MEASURED)
    streams: list[AsyncResponseStream] = []
    setting = {"DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": str(budget_s)}
    workers = [await started(programs, WORKER, **setting) for _ in range(MEASURED)]
    await eventually(lambda: len(client.instance_ids()) == MEASURED)
    for _ in workers:
        stream = await client.round_robin("stubborn", annotated=False)
        assert await anext(stream) == "begun"
        streams.append(stream)
    sent = [(worker, worker.send(signal.SIGTERM)) for worker in workers]
    for worker, since in sent:
        await times.event(lambda one=worker: not one.running, since=since)
        assert worker.process.returncode == 0
    assert len(streams) == MEASURED
    times.judge(not_before_s=budget_s)


async def test_a_program_with_a_handler_of_its_own_keeps_it(
    programs: Programs, client: Client
) -> None:
    worker = await started(
        programs,
        HANDLERS
        + """
def mine(number, frame):
    say("mine")

signal.signal(signal.SIGTERM, mine)

@dynamo_worker()
async def main(runtime):
    endpoint = runtime.endpoint("ns.comp.gen")
    serving = endpoint.serve_endpoint(handle)
    await (await endpoint.client()).wait_for_instances()
    say("serving")
    await line()
    runtime.shutdown()
    await serving

run(main)
assert signal.getsignal(signal.SIGTERM) is mine
""",
    )
    worker.send(signal.SIGTERM)
    await worker.says("mine")
    assert len(programs.records) == 1
    stream = await begun(client, "")
    assert [item async for item in stream] == ["finished"]
    worker.write_line()
    assert await worker.ended() == 0


@pytest.mark.parametrize("runner", RUNNERS)
async def test_a_program_may_drain_from_a_signal_handler_of_its_loop(
    programs: Programs, client: Client, runner: str
) -> None:
    """What programs for the genuine runtime do; ours gives way also when it was first."""
    worker = await started(
        programs,
        WORKER.replace(
            "    await serving\n",
            """
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, runtime.shutdown)
    say("mine")
    await serving
""",
        ),
        runner,
    )
    await worker.says("mine")
    stream = await begun(client, "line")
    worker.send(signal.SIGTERM)
    await eventually(lambda: not programs.records, SOON_S)
    worker.write_line()
    assert [item async for item in stream] == ["finished"]
    await worker.says("returned")
    await worker.says("over")
    assert await worker.ended() == 0, worker.stderr


async def test_requests_that_are_not_to_be_waited_for_are_stopped_by_a_signal(
    programs: Programs, client: Client
) -> None:
    text = WORKER.replace("(handle)", "(handle, graceful_shutdown=False)")
    worker = await started(programs, text)
    stream = await begun(client, "for ever")
    worker.send(signal.SIGTERM)
    with pytest.raises(StreamBroken):
        await stream.__anext__()
    await worker.says("returned")
    await worker.says("over")
    assert await worker.ended(SOON_S) == 0, worker.stderr


async def test_handlers_are_put_back_after_the_worker(programs: Programs) -> None:
    program = await programs.start(
        """
before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]

@dynamo_worker()
async def main(runtime):
    pass

run(main)
assert before == [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
"""
    )
    assert await program.ended() == 0, program.stderr


async def test_a_blocked_loop_keeps_its_record_until_a_signal_removes_it(
    programs: Programs, client: Client
) -> None:
    worker = await started(programs, WORKER)
    await begun(client, "block")
    (record,) = programs.records
    before = record.stat().st_mtime_ns
    await eventually(lambda: record.stat().st_mtime_ns != before)
    worker.send(signal.SIGTERM)
    await eventually(lambda: not programs.records, SOON_S)
    assert worker.running


# --------------------------------------------------------- programs without a worker

PLAIN = (
    HANDLERS
    + """
async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("ns.comp.gen")
    serving = endpoint.serve_endpoint(handle)
    await (await endpoint.client()).wait_for_instances()
    say("serving")
    await leave()

async def leave():
    LEAVE

run(main)
"""
)


async def test_sigterm_ends_a_plain_program_as_ever_but_for_the_record(
    programs: Programs,
) -> None:
    program = await started(programs, PLAIN.replace("LEAVE", "await asyncio.Future()"))
    assert len(programs.records) == 1
    program.send(signal.SIGTERM)
    assert await program.ended(SOON_S) == -signal.SIGTERM
    assert programs.records == []


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("leave", "code"),
    [
        ("return", 0),
        ("raise RuntimeError('wanted')", 1),
        ("sys.exit(3)", 3),
    ],
)
async def test_every_exit_of_a_program_removes_its_record(
    programs: Programs, leave: str, code: int, runner: str
) -> None:
    text = PLAIN.replace("LEAVE", f"await line(); {leave}")
    program = await started(programs, text, runner)
    assert len(programs.records) == 1
    program.write_line()
    assert await program.ended(SOON_S) == code
    assert programs.records == []


async def test_a_shutdown_removes_the_record_while_all_threads_are_busy(
    programs: Programs,
) -> None:
    leave = """
    loop = asyncio.get_running_loop()
    for _ in range(64):
        loop.run_in_executor(None, time.sleep, 60)
    runtime.shutdown()
    await serving
    say("shut down")
    os._exit(0)
"""
    text = PLAIN.replace("await leave()", leave).replace("LEAVE", "pass")
    program = await started(programs, text)
    await eventually(lambda: not programs.records, 1)
    await program.says("shut down")


async def test_a_signal_may_come_while_a_thread_is_being_started(
    programs: Programs,
) -> None:
    """Starting one more in the signal handler would wait for a lock for ever."""
    worker = await started(
        programs,
        WORKER.replace(
            "await serving",
            """
    with threading._active_limbo_lock:
        os.kill(os.getpid(), signal.SIGTERM)
    await serving
""",
        ),
    )
    await worker.says("returned")
    await worker.says("over")
    assert await worker.ended(SOON_S) == 0, worker.stderr
    assert programs.records == []


# ----------------------------------------------------------- children and containers


async def test_a_child_process_is_neither_signalled_nor_waited_for(
    programs: Programs,
) -> None:
    worker = await programs.start(
        WORKER.replace(
            'say("serving")',
            """
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    say(child.pid)
""",
        )
    )
    child = int(await worker.line())
    worker.send(signal.SIGTERM)
    assert await worker.ended(SOON_S) == 0, worker.stderr
    os.kill(child, signal.SIGKILL)  # fails if there is no such process


@pytest.fixture
def as_pid_1() -> tuple[str, ...]:
    """A command that makes what follows the first process of a container."""
    command = ("unshare", "--pid", "--fork", "--kill-child")
    if shutil.which("unshare") is None or subprocess.run([*command, "true"]).returncode:
        pytest.skip("unshare --pid is not permitted here: run the tests as root")
    return (*command, sys.executable)


def inside(program: Program) -> int:
    """The pid, as seen from here, of what unshare started."""
    for status in Path("/proc").glob("[0-9]*/status"):
        if f"PPid:\t{program.pid}\n" in status.read_text():
            return int(status.parent.name)
    raise AssertionError("unshare has started nothing")


@pytest.mark.parametrize("signum", SIGNALS)
async def test_a_worker_drains_as_the_first_process_of_a_container(
    programs: Programs,
    client: Client,
    as_pid_1: tuple[str, ...],
    signum: signal.Signals,
) -> None:
    worker = await programs.start("say(os.getpid())\n" + WORKER, command=as_pid_1)
    await worker.says("1")
    await worker.says("serving")
    stream = await begun(client, "line")
    os.kill(inside(worker), signum)
    await eventually(lambda: not programs.records, SOON_S)
    worker.write_line()
    assert [item async for item in stream] == ["finished"]
    assert await worker.ended(SOON_S) == 0, worker.stderr


async def test_sigterm_ends_a_plain_program_as_the_first_process_of_a_container(
    programs: Programs, as_pid_1: tuple[str, ...]
) -> None:
    """There the kernel ignores a signal that nobody handles: exit as a shell says it."""
    text = PLAIN.replace("LEAVE", "await asyncio.Future()")
    program = await programs.start(text, command=as_pid_1)
    await program.says("serving")
    os.kill(inside(program), signal.SIGTERM)
    assert await program.ended(SOON_S) == 128 + signal.SIGTERM
    assert programs.records == []
