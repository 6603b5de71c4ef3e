"""What a caller sees when something goes wrong, and how to tell the cases apart.

Every exception derives from ``DynamoException``; ``dynamo.runtime.errors`` shows the
tree.  Facts are attributes, so no text has to be parsed.  On the worker's side, here on
standard error, each failure of a handler is logged with its traceback.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from dynamo.runtime import Client, DistributedRuntime, dynamo_worker
from dynamo.runtime.errors import InvalidArgument, NoInstances, RemoteError


async def work(request: str) -> AsyncIterator[str]:
    """Yield one item and then fail as requested."""
    yield "first item"
    if request == "bad argument":
        raise InvalidArgument("the request is wrong")
    if request == "bug":
        raise ValueError("no such thing")
    if request == "database":
        raise ConnectionRefusedError("database is down")


async def call(client: Client, request: str) -> None:
    """Print what arrives; items before an error are always delivered."""
    print(f"--- {request}")
    async for item in await client.random(request, annotated=False):
        print("item:", item)


async def try_wrong_request(client: Client) -> None:
    """The only class that comes back as itself: the caller's own mistake."""
    try:
        await call(client, "bad argument")
    except InvalidArgument as error:
        print("InvalidArgument:", error)


async def try_handler_error(client: Client, request: str) -> None:
    """Anything else that the handler raised.  The runtime never retries these."""
    try:
        await call(client, request)
    except RemoteError as error:  # also a ValueError, as in the genuine runtime
        print("RemoteError:", error)
        print("its class:", error.error_class)
        print("the handler raised:", error.remote_type)
        # About the handler's own connections, so never a ConnectionError here.
        print("a ConnectionError:", isinstance(error, ConnectionError))


async def try_nobody_there(runtime: DistributedRuntime) -> None:
    """An error before any worker saw the call: trying again later is safe."""
    print("--- nobody serves this")
    client = await runtime.endpoint("examples.errors.nobody").client()
    try:
        await client.random("anything")
    except NoInstances as error:
        print("NoInstances, retryable:", error.retryable)


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    """Serve, provoke each kind of error, shut down."""
    endpoint = runtime.endpoint("examples.errors.work")
    serving = endpoint.serve_endpoint(work)
    client = await endpoint.client()
    await client.wait_for_instances(timeout=10)
    await try_wrong_request(client)
    await try_handler_error(client, "bug")
    await try_handler_error(client, "database")
    await try_nobody_there(runtime)
    runtime.shutdown()
    await serving


if __name__ == "__main__":
    asyncio.run(main())
