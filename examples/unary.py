"""One answer for one request, without a stream in sight.

``serve_unary_endpoint`` takes a coroutine function and sends what it returns;
``UnaryClient`` wraps any client and insists on exactly one answer.  Both are a thin layer
over streams, so either side may also talk to a plain handler or client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from dynamo.runtime import (
    Context,
    DistributedRuntime,
    UnaryClient,
    dynamo_worker,
    serve_unary_endpoint,
)
from dynamo.runtime.errors import CallError


async def tokenize(request: str, *, context: Context) -> list[str]:
    """Return the words; the context is always passed, by its name."""
    if not request:
        raise ValueError("nothing to tokenize")
    return request.split()


async def letters(request: str) -> AsyncIterator[str]:
    """A handler with several items, to show what the client says of it."""
    for letter in request:
        yield letter


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    """Serve, ask, make two mistakes, shut down."""
    endpoint = runtime.endpoint("examples.unary.tokenize")
    # A coroutine, not a future as from `serve_endpoint`: it serves once it is a task.
    serving = asyncio.create_task(serve_unary_endpoint(endpoint, tokenize))
    client = await endpoint.client()
    await client.wait_for_instances(timeout=10)
    unary = UnaryClient(client)

    words = await unary.complete("one answer is enough")
    print(f"{len(words)} words: {words}")

    # A limit on time is that of any coroutine; on its way out it stops the handler.
    print(await asyncio.wait_for(unary.complete("in time"), 10))

    try:
        await unary.complete("")
    except CallError as error:
        print(f"refused: {error}")

    streaming = runtime.endpoint("examples.unary.letters")
    serving_too = streaming.serve_endpoint(letters)
    many = await streaming.client()
    await many.wait_for_instances(timeout=10)
    try:
        await UnaryClient(many).complete("abc")
    except RuntimeError as error:
        print(f"not unary: {error}")

    runtime.shutdown()
    await serving
    await serving_too


if __name__ == "__main__":
    asyncio.run(main())
