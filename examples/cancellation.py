"""Three ways to stop a call that is no longer wanted; each reaches the handler.

The handler counts for ever.  Whatever ends the call, its ``finally`` runs promptly: the
place to give back a slot, a file or a part of a GPU.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

from dynamo.runtime import Client, Context, DistributedRuntime, dynamo_worker


class Counter:
    """A handler that reports when it has been stopped."""

    def __init__(self) -> None:
        self.stopped: asyncio.Queue[str] = asyncio.Queue()

    async def count(self, request: str, context: Context) -> AsyncIterator[int]:
        """Yield 0, 1, 2 ... until the caller has had enough."""
        try:
            for number in itertools.count():
                # A handler that computes for long asks now and then, and returns.
                if context.is_stopped():
                    return
                yield number
                await asyncio.sleep(0.005)
        finally:
            self.stopped.put_nowait(request)

    async def report(self) -> None:
        """Wait until the handler was stopped and say so."""
        request = await asyncio.wait_for(self.stopped.get(), 10)
        print(f"the handler was stopped: {request}")


async def by_leaving(client: Client) -> None:
    """Leaving ``async with`` closes the stream; so does ``await stream.aclose()``."""
    stream = await client.random("by leaving", annotated=False)
    async with stream:
        async for number in stream:
            if number == 3:
                break  # by itself a break changes nothing: reading could go on


async def by_context(client: Client) -> None:
    """A context may be stopped from anywhere, by whoever holds it."""
    context = Context()
    stream = await client.random("by context", annotated=False, context=context)
    async for number in stream:  # ends by itself, without an error
        if number == 3:
            context.stop_generating()


async def read_for_ever(client: Client) -> None:
    """Read to the end; whatever interrupts this closes the stream on the way out."""
    async with await client.random("by time limit", annotated=False) as stream:
        async for _ in stream:
            pass


async def by_time_limit(client: Client) -> None:
    """Cancelling who reads, as ``wait_for`` does when the time is over."""
    try:
        await asyncio.wait_for(read_for_ever(client), 0.2)
    except asyncio.TimeoutError:  # before Python 3.11 not the built-in TimeoutError
        print("the caller had a time limit")


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    """Serve, stop three calls in three ways, shut down."""
    counter = Counter()
    endpoint = runtime.endpoint("examples.cancellation.count")
    serving = endpoint.serve_endpoint(counter.count)
    client = await endpoint.client()
    await client.wait_for_instances(timeout=10)
    for call_and_stop in (by_leaving, by_context, by_time_limit):
        await call_and_stop(client)
        await counter.report()
    runtime.shutdown()
    await serving


if __name__ == "__main__":
    asyncio.run(main())
