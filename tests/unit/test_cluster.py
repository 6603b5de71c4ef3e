"""`Cluster`, its workers and its records of calls, on both lanes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from dynamo.runtime import Client, Context, PyAsyncRequestStream, errors
from dynamo.runtime._calls.streams import ResponseSender
from dynamo.runtime.testing import Cluster, Cut, Pace, RecordedCall, Worker, until

NAME = "ns.comp.ep"


@pytest.fixture(params=["duplex", "callhome"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    async with Cluster(lane=request.param) as made:
        yield made


async def echo(request: Any) -> AsyncIterator[Any]:
    yield request


async def hush(request: Any, context: Context) -> AsyncIterator[Any]:
    """An item, and then silence until the call is stopped."""
    yield "first"
    await context.async_killed_or_stopped()


async def read(stream: Any) -> list[Any]:
    return [item async for item in stream]


async def ask(client: Client, request: object, **options: Any) -> list[Any]:
    return await read(await client.random(request, annotated=False, **options))


# ------------------------------------------------------------------------- the cluster


async def test_a_call_reaches_its_handler_and_comes_back(cluster: Cluster) -> None:
    await cluster.serve(NAME, echo)
    client = await cluster.client(NAME)
    for request in ("text", {"a": [1, None]}, b"bytes", list(range(100_000))):
        assert await ask(client, request) == [request]


async def test_no_port_is_opened_and_no_file_written(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*args: object, **keywords: object) -> None:
        raise AssertionError(f"a socket for {args}")

    loop_class = type(asyncio.get_running_loop())
    if loop_class.__module__.startswith("asyncio"):
        monkeypatch.setattr(loop_class, "create_server", refuse)
        monkeypatch.setattr(loop_class, "create_connection", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    await cluster.serve(NAME, echo)
    assert await ask(await cluster.client(NAME), 1) == [1]


async def test_several_workers_share_the_calls(cluster: Cluster) -> None:
    workers = [await cluster.serve(NAME, echo) for _ in range(3)]
    client = await cluster.client(NAME)
    assert sorted(client.instance_ids()) == sorted(one.instance_id for one in workers)
    for number in range(6):
        await read(await client.round_robin(number))
    assert [len(one.calls) for one in workers] == [2, 2, 2]


async def test_whoever_comes_later_is_known_to_all_at_once(cluster: Cluster) -> None:
    client = await cluster.client(NAME)
    other = await cluster.client(NAME, runtime=cluster.runtime())
    assert client.instance_ids() == other.instance_ids() == []
    worker = await cluster.serve(NAME, echo)
    assert client.instance_ids() == other.instance_ids() == [worker.instance_id]


async def test_one_worker_may_serve_several_endpoints(cluster: Cluster) -> None:
    worker = await cluster.serve("ns.comp.one", echo)
    assert await cluster.serve("ns.comp.two", hush, worker=worker) is worker
    one = await cluster.client("ns.comp.one")
    two = await cluster.client("ns.comp.two")
    assert one.instance_ids() == two.instance_ids() == [worker.instance_id]
    assert await ask(one, 1) == [1]


async def test_settings_go_by_the_names_of_their_variables() -> None:
    env = {"DYN_ENGINE_REQUEST_LIMIT": "1", "DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "1"}
    async with Cluster(env={"DYN_TCP_REQUEST_TIMEOUT": "3"}) as cluster:
        worker = await cluster.serve(NAME, echo, env=env)
        config = worker.runtime._core.config
        assert (config.worker_pool_size, config.request_timeout_s) == (1, 3.0)
        assert cluster.runtime()._core.config.request_timeout_s == 3.0
    with pytest.raises(ValueError, match="DYN_TCP_REQUEST_TIMEOUT='soon'"):
        Cluster(env={"DYN_TCP_REQUEST_TIMEOUT": "soon"}).runtime()
    with pytest.raises(ValueError, match=r"lane='pigeon'.*'duplex' or 'callhome'"):
        Cluster(lane="pigeon")  # type: ignore[arg-type]


async def test_the_real_environment_plays_no_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DYN_TCP_REQUEST_TIMEOUT", "soon")
    async with Cluster() as cluster:
        assert cluster.runtime()._core.config.request_timeout_s == 5.0


async def test_a_name_that_is_none_is_refused_at_once(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="two\\.parts"):
        await cluster.serve("two.parts", echo)
    with pytest.raises(ValueError, match="two\\.parts"):
        await cluster.client("two.parts")


async def test_ready_names_who_cannot_be_called(cluster: Cluster) -> None:
    async def goes_down(request: Any) -> AsyncIterator[Any]:
        raise errors.EngineShutdown("for now")
        yield

    worker = await cluster.serve(NAME, goes_down)
    client = await cluster.client(NAME)
    await cluster.ready()
    with pytest.raises(errors.CallError):
        await ask(client, "x")
    expected = f"within 0.05 s clients could not call {worker.instance_id:x} of ns/comp"
    with pytest.raises(AssertionError, match=expected):
        await cluster.ready(timeout=0.05)


async def test_a_worker_that_has_gone_serves_no_more(cluster: Cluster) -> None:
    worker = await cluster.serve(NAME, echo)
    await worker.stop()
    with pytest.raises(errors.RuntimeClosed, match="serve with another"):
        await cluster.serve("ns.comp.other", echo, worker=worker)
    await cluster.ready()


async def test_a_serving_that_was_cancelled_is_no_failure(cluster: Cluster) -> None:
    worker = await cluster.serve(NAME, echo)
    client = await cluster.client(NAME)
    worker._state._serving[0].cancel()
    await until(lambda: not client.instance_ids())


async def test_a_stream_left_open_does_not_hold_the_end_of_a_test() -> None:
    patience = {"DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "3600"}
    async with Cluster(env=patience) as cluster:
        await cluster.serve(NAME, hush)
        stream = await (await cluster.client(NAME)).random("x")
    assert cluster.calls[0].outcome == "stopped"
    with pytest.raises(errors.CallError):
        await read(stream)


# --------------------------------------------------------------------------- the calls


async def test_calls_are_recorded(cluster: Cluster) -> None:
    worker = await cluster.serve(NAME, echo)
    client = await cluster.client(NAME)
    context = Context("call-1", {"tenant": "blue"})
    await ask(client, {"n": 1}, context=context)
    (call,) = cluster.calls
    assert await call.ended() == "completed"
    assert call.endpoint == NAME
    assert call.instance_id == worker.instance_id
    assert call.request_id == "call-1"
    assert call.metadata == {"tenant": "blue"}
    assert (call.request, call.items, call.error) == ({"n": 1}, [{"n": 1}], None)
    assert repr(call) == (
        f"<RecordedCall {NAME} at {worker.instance_id:x}: {{'n': 1}} "
        "-> 1 items, completed>"
    )


async def test_a_failure_is_recorded_and_reaches_the_caller(cluster: Cluster) -> None:
    async def fails(request: Any) -> AsyncIterator[Any]:
        yield "first"
        raise ValueError("no more")

    await cluster.serve(NAME, fails)
    with pytest.raises(errors.RemoteError, match="no more"):
        await ask(await cluster.client(NAME), "x")
    (call,) = cluster.calls
    assert await call.ended() == "failed"
    assert repr(call.error) == "ValueError('no more')"
    assert call.items == ["first"]


async def test_a_function_that_fails_before_it_yields(cluster: Cluster) -> None:
    def fails(request: Any) -> AsyncIterator[Any]:
        raise KeyError("nothing")

    await cluster.serve(NAME, fails)
    with pytest.raises(errors.CallError, match="nothing"):
        await ask(await cluster.client(NAME), "x")
    assert await cluster.calls[0].ended() == "failed"


async def test_a_caller_that_left_stops_the_handler(cluster: Cluster) -> None:
    worker = await cluster.serve(NAME, hush)
    stream = await (await cluster.client(NAME)).random("x")
    await stream.__anext__()
    assert cluster.calls[0].outcome == "running"
    assert worker.in_flight == 1
    with pytest.raises(asyncio.TimeoutError):
        await cluster.calls[0].ended(timeout=0.01)
    await stream.aclose()
    assert await cluster.calls[0].ended() == "stopped"
    await until(lambda: worker.in_flight == 0)


async def test_an_item_that_cannot_be_sent_cuts_the_handler_off(
    cluster: Cluster,
) -> None:
    async def unsendable(request: Any) -> AsyncIterator[Any]:
        yield object()
        yield "never"

    await cluster.serve(NAME, unsendable)
    with pytest.raises(errors.CallError):
        await ask(await cluster.client(NAME), "x")
    assert await cluster.calls[0].ended() == "cancelled"
    assert len(cluster.calls[0].items) == 1


async def test_streamed_input_is_recorded_as_it_is_read(cluster: Cluster) -> None:
    async def two(stream: PyAsyncRequestStream) -> AsyncIterator[Any]:
        seen = 0
        async for value in stream:
            yield value
            seen += 1
            if seen == 2:
                return

    await cluster.serve(NAME, two, bidirectional=True)
    client = await cluster.client(NAME)
    stream = await client.bidirectional(["a", "b", "c"], annotated=False)
    assert await read(stream) == ["a", "b"]
    assert cluster.calls[0].request == ["a", "b"]


async def test_streamed_input_is_recorded_to_its_end(cluster: Cluster) -> None:
    async def every(stream: PyAsyncRequestStream) -> AsyncIterator[Any]:
        async for value in stream:
            yield value

    await cluster.serve(NAME, every, bidirectional=True)
    client = await cluster.client(NAME)
    stream = await client.bidirectional(["a", "b"], annotated=False)
    assert await read(stream) == cluster.calls[0].request == ["a", "b"]


async def test_pushed_items_are_recorded(cluster: Cluster) -> None:
    async def push(
        request: Any, context: Context, response_sender: ResponseSender
    ) -> AsyncIterator[None]:
        response_sender.send("one")
        response_sender.send("two")
        response_sender.close()
        return
        yield

    await cluster.serve(NAME, push)
    assert await ask(await cluster.client(NAME), "x") == ["one", "two"]
    assert cluster.calls[0].items == ["one", "two"]
    assert await cluster.calls[0].ended() == "completed"


async def test_a_plain_generator_is_recorded(cluster: Cluster) -> None:
    def plain(request: int, context: Context) -> Iterator[int]:
        yield from range(request)

    await cluster.serve(NAME, plain)
    assert await ask(await cluster.client(NAME), 3) == [0, 1, 2]
    assert cluster.calls[0].items == [0, 1, 2]


async def test_a_handler_that_cannot_work_is_left_to_the_runtime(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async def returns(request: Any) -> str:
        return "not a stream"

    await cluster.serve(NAME, returns)
    assert "test_cluster" not in caplog.text
    assert "it is a coroutine function: use 'yield'" in caplog.text
    with pytest.raises(errors.HandlerRefused):
        await ask(await cluster.client(NAME), "x")
    assert cluster.calls == []


async def test_the_cleanup_of_a_handler_runs_before_its_end_is_told(
    cluster: Cluster,
) -> None:
    steps: list[str] = []

    async def careful(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            yield "first"
            await context.async_killed_or_stopped()
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned up")

    await cluster.serve(NAME, careful)
    async with await (await cluster.client(NAME)).random("x") as stream:
        await stream.__anext__()
    await cluster.calls[0].ended()
    assert steps == ["cleaned up"]


# -------------------------------------------------------------------------- the faults


async def two_workers(cluster: Cluster, handler: Any) -> tuple[Worker, Worker, Client]:
    first = await cluster.serve(NAME, handler)
    second = await cluster.serve(NAME, handler)
    return first, second, await cluster.client(NAME)


async def test_a_killed_worker_breaks_its_streams_and_stays_listed(
    cluster: Cluster,
) -> None:
    first, second, client = await two_workers(cluster, hush)
    stream = await client.direct("x", first.instance_id, annotated=False)
    assert await stream.__anext__() == "first"
    await first.kill()
    with pytest.raises(errors.StreamBroken):
        await stream.__anext__()
    assert first.instance_id in client.instance_ids()
    assert await cluster.calls[0].ended() == "stopped"
    for _ in range(4):
        stream = await client.round_robin("x", annotated=False)
        assert stream.instance_id == second.instance_id
        await stream.aclose()
    first.lose_lease()
    await until(lambda: client.instance_ids() == [second.instance_id])


async def test_a_stopped_worker_drains_and_leaves(cluster: Cluster) -> None:
    more = asyncio.Event()

    async def patient(request: Any) -> AsyncIterator[Any]:
        yield "first"
        await more.wait()
        yield "last"

    first, second, client = await two_workers(cluster, patient)
    stream = await client.direct("x", first.instance_id, annotated=False)
    await stream.__anext__()
    stopping = asyncio.create_task(first.stop())
    await until(lambda: client.instance_ids() == [second.instance_id])
    more.set()
    assert await read(stream) == ["last"]
    await stopping


async def test_a_frozen_worker_answers_after_it_thawed(cluster: Cluster) -> None:
    worker = await cluster.serve(NAME, echo)
    client = await cluster.client(NAME)
    assert await ask(client, "before") == ["before"]
    worker.freeze()
    waiting = asyncio.create_task(ask(client, "meanwhile"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    assert worker.instance_id in client.instance_ids()
    worker.thaw()
    assert await waiting == ["meanwhile"]


async def test_a_frozen_worker_does_not_hold_the_end_of_a_test() -> None:
    async with Cluster() as cluster:
        worker = await cluster.serve(NAME, hush)
        stream = await (await cluster.client(NAME)).random("x")
        worker.freeze()
        await stream.aclose()
    assert cluster.calls[0].outcome == "stopped"


async def test_an_overloaded_worker_refuses_and_recovers(cluster: Cluster) -> None:
    first, second, client = await two_workers(cluster, hush)
    running = await client.direct("x", first.instance_id, annotated=False)
    with first.overloaded():
        with pytest.raises(errors.Overloaded) as caught:
            await client.direct("x", first.instance_id)
        assert caught.value.retryable
        stream = await client.round_robin("x", annotated=False)
        assert stream.instance_id == second.instance_id
        assert await running.__anext__() == "first"
    await client.direct("x", first.instance_id)


async def test_a_lost_lease_hides_a_worker_that_goes_on(cluster: Cluster) -> None:
    worker = await cluster.serve(NAME, hush)
    client = await cluster.client(NAME)
    stream = await client.random("x", annotated=False)
    worker.lose_lease()
    await until(lambda: not client.instance_ids())
    with pytest.raises(errors.NoInstances):
        await client.random("x")
    assert await stream.__anext__() == "first"
    await worker.renew_lease()
    assert client.instance_ids() == [worker.instance_id]
    await client.random("x")


async def test_a_proxy_stands_between_clients_and_a_worker(cluster: Cluster) -> None:
    worker = await cluster.serve(NAME, echo)
    proxy = await worker.fault_proxy()
    client = await cluster.client(NAME)
    assert await ask(client, "x") == ["x"]
    assert proxy.accepted == 1
    assert proxy.passed["up"] > 0
    proxy.refuse()
    proxy.break_all()
    await until(lambda: not proxy.connections)
    with pytest.raises(errors.ConnectionFailed):
        await client.direct("x", worker.instance_id)
    await proxy.start()
    assert await read(
        await client.direct("y", worker.instance_id, annotated=False)
    ) == ["y"]


async def test_a_proxy_stands_before_the_answers() -> None:
    async with Cluster(lane="callhome") as cluster:
        worker = await cluster.serve(NAME, echo)
        proxy = await cluster.answer_proxy()
        client = await cluster.client(NAME)
        proxy.pace = Pace(delay_s=0.02)
        assert await ask(client, "x") == ["x"]
        assert proxy.accepted == 1
        proxy.pace = Pace()
        proxy.cut = Cut(up=100)
        with pytest.raises(errors.CallError):
            await read(await client.direct("x", worker.instance_id))


async def test_a_runtime_of_ones_own_has_its_own_answers() -> None:
    async with Cluster(lane="callhome") as cluster:
        await cluster.serve(NAME, echo)
        runtime = cluster.runtime()
        proxy = await cluster.answer_proxy(runtime)
        await ask(await cluster.client(NAME), "x")
        assert proxy.accepted == 0
        await ask(await cluster.client(NAME, runtime=runtime), "x")
        assert proxy.accepted == 1


def test_a_record_is_made_by_the_cluster_alone() -> None:
    call = RecordedCall(NAME, 1, "x", Context("id"))
    assert (call.outcome, call.items, call.request_id) == ("running", [], "id")
