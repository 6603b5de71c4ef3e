"""Never run: mypy and basedpyright check that the public types stay usable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

from pydantic import BaseModel
from typing_extensions import assert_type

from dynamo._core import (
    AsyncResponseStream,
    ContextMetadata,
    FirstTokenSource,
    Instance,
    ResponseSender,
    RouterMode,
    RuntimeMetrics,
    SpanProxy,
    TransportType,
    WorkerType,
)
from dynamo.health_check import HealthCheckPayload, load_health_check_from_env
from dynamo.llm.exceptions import HttpError
from dynamo.runtime import (
    Client,
    Context,
    DistributedRuntime,
    Endpoint,
    PyAsyncRequestStream,
    UnaryClient,
    dynamo_endpoint,
    dynamo_worker,
    serve_unary_endpoint,
)
from dynamo.runtime.errors import (
    CallError,
    CallTimeout,
    ConnectionFailed,
    DynamoException,
    NoInstancesInTime,
    RemoteError,
    StreamBroken,
    StreamError,
    WorkerLost,
)
from dynamo.runtime.logging import (
    LogHandler,
    configure_dynamo_logging,
    configure_logger,
    get_bool_env_var,
    log_level_mapping,
)

# ---------------------------------------------------------------------------- workers


class Order(BaseModel):
    portions: int


async def plain(request: dict[str, str]) -> AsyncIterator[str]:
    yield request["name"]


async def with_context(request: object, context: Context) -> AsyncGenerator[int, None]:
    if not context.is_stopped():
        yield 1


async def push_mode(
    request: object, response_sender: ResponseSender
) -> AsyncIterator[None]:
    response_sender.send({"token": 1})
    response_sender.close()
    response_sender.close_with_error("why")
    return
    yield  # makes it an async generator


async def streamed(requests: PyAsyncRequestStream) -> AsyncIterator[object]:
    async for value in requests:
        yield value


def blocking(request: object, context: Context) -> Iterator[str]:
    if not context.is_stopped():
        yield "from a thread"


async def tells_of_first_tokens(endpoint: Endpoint, context: Context) -> None:
    source = await endpoint.first_token_source(WorkerType.Decode)
    assert_type(source, FirstTokenSource | None)
    if source is not None:
        source.bind(context, dp_rank=0)
        source.bind(context)
        unsubscribe = source.subscribe(print)
        unsubscribe()
    context.notify_first_token()


@dynamo_endpoint(Order, int)
async def typed(order: Order) -> AsyncIterator[int]:
    for number in range(order.portions):
        yield number


async def typed_handler_yields_what_it_promises() -> None:
    async for number in typed({"portions": 2}):
        assert_type(number, int)


async def unary(request: int, *, context: Context) -> int:
    return 2 * request


@dynamo_worker()
async def worker(runtime: DistributedRuntime, name: str) -> None:
    runtime.set_health_status(True)
    endpoint = runtime.endpoint("a.b.c")
    assert_type(endpoint, Endpoint)
    await endpoint.serve_endpoint(plain)
    await endpoint.serve_endpoint(
        with_context,
        graceful_shutdown=True,
        metrics_labels=[("model", name)],
        health_check_payload={"prompt": "hi"},
    )
    await endpoint.serve_endpoint(handler=push_mode)
    await endpoint.serve_endpoint(
        plain, max_concurrent_requests=4, max_queued_requests=8
    )
    await endpoint.serve_endpoint(typed)
    await endpoint.serve_endpoint(blocking)
    await endpoint.serve_bidirectional_endpoint(streamed)
    await serve_unary_endpoint(endpoint, unary)


def a_worker_is_run_like_any_coroutine() -> None:
    asyncio.run(worker("name"))


async def runtimes_are_made_in_two_ways() -> None:
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "file", "tcp", event_plane="zmq")
    assert_type(DistributedRuntime.detached(), DistributedRuntime)
    assert_type(runtime.system_status_server_url(), str | None)
    runtime.register_engine_route("route", unary)
    runtime.shutdown()


async def endpoints_do_more_than_serve(endpoint: Endpoint) -> None:
    assert_type(endpoint.connection_id(), int)
    assert_type(await endpoint.register_endpoint_instance(), tuple[()])
    assert_type(await endpoint.unregister_endpoint_instance(), tuple[()])
    assert_type(endpoint.metrics, RuntimeMetrics)
    endpoint.metrics.register_prometheus_expfmt_callback(lambda: "queue_length 3")
    assert_type(await endpoint.client(), Client)
    assert_type(await endpoint.client(RouterMode.LeastLoaded), Client)


# ---------------------------------------------------------------------------- clients


async def calls_give_streams(client: Client, context: Context) -> None:
    assert_type(await client.random("request"), AsyncResponseStream)
    await client.round_robin({"a": [1, None]}, annotated=False)
    await client.generate(b"bytes", context=context)
    await client.direct("request", client.instance_ids()[0])


async def calls_have_limits(client: Client) -> None:
    def go_on(items_so_far: int, error: StreamError) -> list[int] | None:
        return [items_so_far] if isinstance(error, TimeoutError) else None

    context = Context(timeout=1.5)
    stream = await client.random("request", context=context, on_stream_lost=go_on)
    assert_type(stream, AsyncResponseStream)
    await client.round_robin(1, timeout=5, first_item_timeout=1.5, idle_timeout=1)
    await client.generate(1, idempotent=True)
    await client.direct(1, 7, timeout=1)
    await client.bidirectional([1], timeout=1)
    await client.device_aware_weighted(1, idle_timeout=1)
    await UnaryClient(client).complete(1, timeout=1, idempotent=True)


async def endless() -> AsyncIterator[dict[str, int]]:
    yield {"a": 1}


async def calls_take_streams(client: Client, context: Context) -> None:
    assert_type(await client.bidirectional([1, "two", None]), AsyncResponseStream)
    await client.bidirectional(endless(), annotated=False, context=context)
    await client.bidirectional(range(3), instance_id=client.instance_ids()[0])
    await client.bidirectional(iter([b"bytes"]), None)


async def calls_are_weighted(client: Client, context: Context) -> None:
    stream = await client.device_aware_weighted("request", False, context)
    assert_type(stream, AsyncResponseStream)


async def streams_are_iterated_and_closed(client: Client) -> None:
    async with await client.random("request") as stream:
        assert_type(stream, AsyncResponseStream)
        assert_type(stream.instance_id, int | None)
        async for item in stream:
            print(item)
    await asyncio.wait_for(stream.__anext__(), 1)
    await anext(stream)
    stream.cancel()
    await stream.aclose()


async def instances_are_described(client: Client) -> None:
    assert_type(await client.wait_for_instances(timeout=5), list[int])
    assert_type(client.instances(), list[Instance])
    for one in client.instances():
        assert_type(one.instance_id, int)
        assert_type(one.transport, TransportType)
        assert_type(one.transport.address, str)
        assert_type(one.device_type, str | None)
        path: str = f"{one.namespace}.{one.component}.{one.endpoint}"
        print(path)


async def a_client_serves_unary_calls(client: Client) -> None:
    answer: int = await UnaryClient(client).complete(21, context=Context())
    print(answer)


async def contexts_carry_text_and_stop(context: Context) -> None:
    made = Context("id", {"user": "ada"})
    assert_type(made.id(), str)
    assert_type(made.metadata, ContextMetadata)
    assert_type(made.metadata["user"], str)
    assert_type(made.metadata.get("user"), str | None)
    assert_type(made.detached("other"), Context)
    assert_type(await context.async_killed_or_stopped(), bool)
    assert_type(context.trace_headers(), dict[str, str] | None)
    assert_type(context.deadline, float | None)
    with context.start_span("prefill", {"tokens": 12}) as span:
        assert_type(span, SpanProxy)
    context.stop_generating()


# ----------------------------------------------------------------------------- errors


def facts_of_an_error_are_typed(error: CallError) -> None:
    assert_type(error.phase, str)
    assert_type(error.retryable, bool)
    assert_type(error.retry_after, float | None)
    assert_type(error.instance_id, int | None)
    assert_type(error.attempts, int)
    assert_type(error.error_class, str)
    assert_type(error.remote_type, str | None)
    assert_type(error.remote_traceback, str | None)
    assert_type(error.facts, dict[str, object])


def errors_are_caught_by_old_names(
    stream: StreamError,
    remote: RemoteError,
    broken: StreamBroken,
    lost: WorkerLost | ConnectionFailed,
    late: CallTimeout | NoInstancesInTime,
) -> None:
    values: list[ValueError] = [stream, remote, broken]
    connections: list[ConnectionError] = [broken, lost]
    timeouts: list[TimeoutError] = [late]
    everything: list[DynamoException] = [stream, remote, broken, lost, late]
    print(values, connections, timeouts, everything)


# --------------------------------------------------------------------- logging and more


def logging_is_configured_by_the_program() -> None:
    configure_dynamo_logging(service_name="worker", worker_id=3)
    configure_logger("worker", 3)
    handler: logging.Handler = LogHandler()
    assert_type(log_level_mapping("info"), int)
    assert_type(get_bool_env_var("X"), bool)
    print(handler)


class Probe(HealthCheckPayload):
    def __init__(self) -> None:
        self.default_payload = {"prompt": "hi"}
        super().__init__()


def other_modules_are_typed() -> None:
    payload: dict[str, Any] = Probe().to_dict()
    assert_type(load_health_check_from_env(), dict[str, Any] | None)
    error: Exception = HttpError(404, "not found")
    stage: int = int(WorkerType.Decode)
    print(payload, error, stage)
