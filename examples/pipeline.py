"""Two stages: a front end that calls a back end, item by item.

The front end passes its own context on, and with it the request id and the
metadata; when the caller stops the first call, the second one stops too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from dynamo.runtime import Client, Context, DistributedRuntime, dynamo_worker

WORDS = ("named", "streaming", "endpoints")


async def generate(request: dict[str, int], context: Context) -> AsyncIterator[str]:
    """Back end: the first few words."""
    print(f"back end: request {context.id()} for {context.metadata['user']}")
    for word in WORDS[: request["count"]]:
        yield word


class FrontEnd:
    """A handler that needs something else, here the client of the back end."""

    def __init__(self, back_end: Client) -> None:
        self.back_end = back_end

    async def shout(
        self, request: dict[str, int], context: Context
    ) -> AsyncIterator[str]:
        """Pass each word on as soon as it is there, in capitals."""
        print(f"front end: request {context.id()}")
        words = await self.back_end.round_robin(
            request, annotated=False, context=context
        )
        async for word in words:
            yield word.upper()


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    """Serve both stages, make one call through them, shut down."""
    back = runtime.endpoint("examples.pipeline.generate")
    serving = [back.serve_endpoint(generate)]
    back_client = await back.client()

    front = runtime.endpoint("examples.pipeline.shout")
    serving.append(front.serve_endpoint(FrontEnd(back_client).shout))
    client = await front.client()
    for each in (back_client, client):
        await each.wait_for_instances(timeout=10)

    context = Context("request-1", {"user": "ada"})
    stream = await client.random({"count": 3}, annotated=False, context=context)
    async for word in stream:
        print("client:", word)

    runtime.shutdown()
    await asyncio.gather(*serving)


if __name__ == "__main__":
    asyncio.run(main())
