"""Forked children of a worker: they end as they like, the worker goes on."""

from __future__ import annotations

import os
import signal

import pytest
from programs import LIMIT_S, Program, Programs, eventually

from dynamo.runtime import Client

# In main: `fork(what)` runs that in a child, which ends with code 7 as one does: with the
# exit hooks, but not through the frames of its parent, whose loop it cannot run.
WORKER = """
import atexit, traceback
from dynamo.runtime.errors import RuntimeClosed

async def handle(request):
    yield "answer"

def fork(child):
    pid = os.fork()
    if pid == 0:
        try:
            child()
            atexit._run_exitfuncs()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(7)
    return pid

async def ended(pid):
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    return os.waitstatus_to_exitcode(status)

DECORATOR
async def main(runtime):
    endpoint = runtime.endpoint("ns.comp.gen")
    client = await endpoint.client()
    serving = endpoint.serve_endpoint(handle)
    await client.wait_for_instances()
    BODY
    await serving

run(main)
"""
PLAIN = """
def with_runtime(main):
    async def made():
        await main(DistributedRuntime(asyncio.get_running_loop(), "file", "tcp"))
    return made

@with_runtime"""
KINDS = {"dynamo_worker": "@dynamo_worker()", "plain": PLAIN}


async def start(programs: Programs, kind: str, body: str) -> Program:
    text = WORKER.replace("DECORATOR", KINDS[kind]).replace("BODY", body)
    return await programs.start(text)


async def assert_serves(programs: Programs, client: Client) -> None:
    await client.wait_for_instances(timeout=LIMIT_S)
    assert len(programs.records) == 1
    for _ in range(3):
        stream = await client.random("", annotated=False)
        assert [item async for item in stream] == ["answer"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_child_that_exits_leaves_the_record_of_its_parent(
    programs: Programs, client: Client, kind: str
) -> None:
    worker = await start(programs, kind, "say(await ended(fork(bool)))")
    await worker.says("7")
    await assert_serves(programs, client)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_child_that_uses_the_runtime_is_told_so(
    programs: Programs, client: Client, kind: str
) -> None:
    worker = await start(
        programs,
        kind,
        """
    def child():
        for use in (
            lambda: client.random(""),
            lambda: client.wait_for_instances(),
            lambda: endpoint.client(),
            lambda: endpoint.serve_endpoint(handle),
            lambda: endpoint.register_endpoint_instance(),
            lambda: endpoint.unregister_endpoint_instance(),
        ):
            asyncio.run(refused(use))
        runtime.shutdown()

    async def refused(use):
        try:
            await use()
        except RuntimeClosed:
            return
        raise AssertionError("the child could use the runtime")

    say(await ended(fork(child)))
""",
    )
    await worker.says("7")
    await assert_serves(programs, client)


@pytest.mark.parametrize("kind", KINDS)
async def test_sigterm_ends_the_child_and_nothing_else(
    programs: Programs, client: Client, kind: str
) -> None:
    worker = await start(
        programs,
        kind,
        """
    def child():
        say(os.getpid())
        time.sleep(60)

    say(await ended(fork(child)))
""",
    )
    os.kill(int(await worker.line()), signal.SIGTERM)
    await worker.says(str(-signal.SIGTERM))
    await assert_serves(programs, client)


async def test_a_handler_may_fork_and_replace_its_child(
    programs: Programs, client: Client
) -> None:
    """Streams of the parent go on: the child shares none of what watches its sockets."""
    worker = await programs.start(
        """
async def handle(request):
    yield "begun"
    if request == "fork":
        pid = os.fork()
        if pid == 0:
            os.execv(sys.executable, [sys.executable, "-c", "raise SystemExit(7)"])
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
        yield os.waitstatus_to_exitcode(status)
    else:
        await line()
        yield "finished"

async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    await runtime.endpoint("ns.comp.gen").serve_endpoint(handle)

run(main)
"""
    )
    await client.wait_for_instances(timeout=LIMIT_S)
    steady = await client.random("", annotated=False)
    assert await steady.__anext__() == "begun"
    for _ in range(3):
        stream = await client.random("fork", annotated=False)
        assert [item async for item in stream] == ["begun", 7]
    worker.write_line()
    assert [item async for item in steady] == ["finished"]


async def test_a_child_may_run_a_runtime_of_its_own(
    programs: Programs, client: Client
) -> None:
    worker = await start(
        programs,
        "dynamo_worker",
        """
    @dynamo_worker()
    async def call(runtime):
        client = await runtime.endpoint("ns.comp.gen").client()
        await client.wait_for_instances()
        async for item in await client.random("", annotated=False):
            say(item)

    say(await ended(fork(lambda: asyncio.run(call()))))
""",
    )
    await worker.says("answer")
    await worker.says("7")
    await assert_serves(programs, client)


async def test_processes_of_multiprocessing_do_not_disturb(
    programs: Programs, client: Client
) -> None:
    worker = await start(
        programs,
        "dynamo_worker",
        """
    import concurrent.futures, multiprocessing
    forking = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=forking) as pool:
        loop = asyncio.get_running_loop()
        say(await loop.run_in_executor(pool, abs, -5))
        say("working")
        await line()
""",
    )
    await worker.says("5")
    await worker.says("working")
    await assert_serves(programs, client)
    worker.write_line()
    worker.send(signal.SIGTERM)
    assert await worker.ended(LIMIT_S) == 0
    await eventually(lambda: not programs.records)
