"""A stream in both directions: the caller sends while the handler answers.

The handler gets an iterator of requests instead of one request.  ``Client.bidirectional``
takes an iterable and reads it only as fast as the handler takes its values: a source
without end is no problem, and neither is a slow handler.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

from dynamo.runtime import (
    Client,
    DistributedRuntime,
    PyAsyncRequestStream,
    dynamo_worker,
)


async def running_mean(requests: PyAsyncRequestStream) -> AsyncIterator[float]:
    """Answer each number with the mean of all so far."""
    total = count = 0
    async for number in requests:
        total += number
        count += 1
        yield total / count
        if number < 0:
            return  # a handler may leave before its input ends
    # The end of the input is not the end of the call: there may be more to say.
    yield float(total)


async def whole_input(client: Client) -> None:
    """Any iterable will do; its end is the end of the handler's input."""
    async for mean in await client.bidirectional([1, 2, 6], annotated=False):
        print(f"mean or total: {mean}")


async def conversation(client: Client) -> None:
    """An async generator can wait for an answer before it asks again."""
    answers: asyncio.Queue[float] = asyncio.Queue()

    async def questions() -> AsyncIterator[int]:
        for number in (10, 20):
            print(f"asked: {number}")
            yield number
            print(f"answered: {await answers.get()}")

    stream = await client.bidirectional(questions(), annotated=False)
    async for mean in stream:
        answers.put_nowait(mean)


async def endless_input(client: Client) -> None:
    """When the call ends first, for whatever reason, the source is closed."""
    closed = asyncio.Event()

    async def downwards() -> AsyncIterator[int]:
        try:
            for number in itertools.count(2, -1):
                yield number
        finally:
            closed.set()  # here one gives back what the source needs

    stream = await client.bidirectional(downwards(), annotated=False)
    means = [mean async for mean in stream]
    await asyncio.wait_for(closed.wait(), 10)
    print(f"{len(means)} means, and the source was closed")


async def failing_input(client: Client) -> None:
    """What the source raises is raised to the reader of the stream, as it is."""

    async def sensor() -> AsyncIterator[int]:
        yield 5
        raise OSError("the sensor was unplugged")

    try:
        async for _ in await client.bidirectional(sensor(), annotated=False):
            pass
    except OSError as error:
        print(f"the caller's own error: {error}")


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    """Serve, call in four ways, shut down."""
    endpoint = runtime.endpoint("examples.stream.mean")
    serving = endpoint.serve_bidirectional_endpoint(running_mean)
    client = await endpoint.client()
    await client.wait_for_instances(timeout=10)

    for call in (whole_input, conversation, endless_input, failing_input):
        await asyncio.wait_for(call(client), 20)

    runtime.shutdown()
    await serving


if __name__ == "__main__":
    asyncio.run(main())
