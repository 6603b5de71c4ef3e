"""The life of a served endpoint: registering, cancelling, draining, shutting down."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dynamo.runtime import DistributedRuntime, dynamo_worker, errors
from dynamo.runtime.testing import until

PATH = "t.w.e"


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
    monkeypatch.setenv("DYN_TCP_RESPONSE_STREAM_HOST", "127.0.0.1")
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / "store"))


@pytest.fixture
async def new_runtime() -> AsyncIterator[Callable[[str], DistributedRuntime]]:
    made: list[DistributedRuntime] = []

    def make(backend: str) -> DistributedRuntime:
        made.append(DistributedRuntime(asyncio.get_running_loop(), backend, "tcp"))
        return made[-1]

    yield make
    for runtime in made:
        await closed(runtime)


async def closed(runtime: DistributedRuntime) -> None:
    runtime.shutdown()
    await asyncio.wait_for(runtime._core.closed(), 5)


async def echo(request: Any) -> AsyncIterator[Any]:
    yield request


class Held:
    """A handler that answers when it is told to."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.go_on = asyncio.Event()

    async def handle(self, request: Any) -> AsyncIterator[Any]:
        self.started.set()
        await self.go_on.wait()
        yield request


async def listed(client: Any) -> None:
    await asyncio.wait_for(client.wait_for_instances(), 5)


def records(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


@pytest.mark.parametrize("path", ["\ud800.b.c", "a.\ud800.c", "a.b.\ud800"])
async def test_a_name_that_cannot_be_sent_is_refused_before_anybody_serves_it(
    new_runtime: Callable[[str], DistributedRuntime], path: str
):
    runtime = new_runtime("mem")
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        runtime.endpoint(path)
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        runtime.register_engine_route(path, echo)


async def test_serving_on_a_broken_store_says_that_it_cannot_register(
    new_runtime: Callable[[str], DistributedRuntime], tmp_path: Path
) -> None:
    (tmp_path / "store").write_text("a file where the directory should be")
    runtime = new_runtime("file")
    with pytest.raises(errors.DiscoveryError, match="cannot register"):
        await runtime.endpoint(PATH).serve_endpoint(echo)


async def test_cancelling_a_server_that_was_unregistered_by_hand_only_cancels_it(
    new_runtime: Callable[[str], DistributedRuntime], tmp_path: Path
) -> None:
    runtime = new_runtime("file")
    endpoint = runtime.endpoint(PATH)
    serving = endpoint.serve_endpoint(echo)
    await until(lambda: records(tmp_path))
    await endpoint.unregister_endpoint_instance()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving


@pytest.mark.parametrize("turns", range(12))
@pytest.mark.parametrize("backend", ["mem", "file"])
async def test_a_shutdown_at_any_moment_of_the_start_ends_serving_without_an_error(
    new_runtime: Callable[[str], DistributedRuntime], backend: str, turns: int
) -> None:
    runtime = new_runtime(backend)
    serving = runtime.endpoint(PATH).serve_endpoint(echo)
    for _ in range(turns):
        await asyncio.sleep(0)
    runtime.shutdown()
    assert await asyncio.wait_for(serving, 5) == ()


async def test_a_shutdown_waits_for_requests_of_a_server_that_was_cancelled(
    new_runtime: Callable[[str], DistributedRuntime],
) -> None:
    runtime = new_runtime("mem")
    endpoint = runtime.endpoint(PATH)
    held = Held()
    serving = endpoint.serve_endpoint(held.handle)
    client = await endpoint.client()
    await listed(client)
    stream = await client.random("late", annotated=False)
    await held.started.wait()
    serving.cancel()
    await asyncio.wait((serving,))
    runtime.shutdown()
    ending = asyncio.create_task(runtime._core.closed())
    await asyncio.wait((ending,), timeout=0.3)
    assert not ending.done()
    held.go_on.set()
    assert [item async for item in stream] == ["late"]
    await asyncio.wait_for(ending, 5)
    assert not runtime._core._served


async def test_a_cancelled_server_is_forgotten_after_its_last_request(
    new_runtime: Callable[[str], DistributedRuntime],
) -> None:
    runtime = new_runtime("mem")
    for _ in range(3):
        serving = runtime.endpoint(PATH).serve_endpoint(echo)
        client = await runtime.endpoint(PATH).client()
        await listed(client)
        assert [i async for i in await client.random(1, annotated=False)] == [1]
        serving.cancel()
        await asyncio.wait((serving,))
    await until(lambda: not runtime._core._served)


async def test_a_shutdown_removes_the_records_although_every_thread_is_busy(
    new_runtime: Callable[[str], DistributedRuntime], tmp_path: Path
) -> None:
    release = threading.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    busy = loop.run_in_executor(None, release.wait, 10)
    held = Held()
    runtime = new_runtime("file")
    endpoint = runtime.endpoint(PATH)
    serving = endpoint.serve_endpoint(held.handle)
    client = await endpoint.client()
    await listed(client)
    call = await client.random(1, annotated=False)
    await held.started.wait()
    try:
        runtime.shutdown()
        await until(lambda: not records(tmp_path), timeout=1)
        assert not serving.done()
    finally:
        release.set()
        held.go_on.set()
        await busy
    assert [item async for item in call] == [1]


def test_a_runtime_whose_loop_was_closed_says_so_in_another_loop() -> None:
    async def make() -> DistributedRuntime:
        return DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp")

    async def use(runtime: DistributedRuntime) -> None:
        with pytest.raises(errors.RuntimeClosed, match="loop"):
            await runtime.endpoint(PATH).client()

    runtime = asyncio.run(make())
    asyncio.run(use(runtime))


async def test_a_worker_that_cannot_be_called_leaves_no_signal_handler() -> None:
    import signal

    @dynamo_worker()
    async def main(runtime: DistributedRuntime, name: str) -> None:
        raise AssertionError("it was called without its argument")

    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(TypeError, match="name"):
        await main()
    after = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    assert after == before
