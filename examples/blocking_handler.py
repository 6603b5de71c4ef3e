"""A handler that blocks: write a plain generator function, and it runs in a thread.

Models, databases and drivers often have no asynchronous interface.  In an ``async def``
handler such a call would stop every other request of the worker; a plain ``def`` with
``yield`` gets a thread of its own for each of its calls, and the loop stays free.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

from dynamo.runtime import Client, Context, DistributedRuntime, dynamo_worker

STEP_S = 0.05  # what stands here for a blocking computation


class Model:
    """An engine that can only be called and waited for."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def generate(self, request: int, context: Context) -> Iterator[str]:
        """One token per step; every step blocks."""
        try:
            for number in range(request):
                # A step cannot be interrupted from outside, so ask between steps.
                if context.is_stopped():
                    return
                time.sleep(STEP_S)
                yield f"token {number}"
        finally:
            # Runs in the same thread, also when the caller has left.
            self.released.set()


async def tokens(client: Client, count: int) -> list[str]:
    """All tokens of one call."""
    stream = await client.random(count, annotated=False)
    return [token async for token in stream]


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    """Serve, make calls at the same time, leave one of them, shut down."""
    model = Model()
    endpoint = runtime.endpoint("examples.blocking.generate")
    serving = endpoint.serve_endpoint(model.generate)
    client = await endpoint.client()
    await client.wait_for_instances(timeout=10)

    started = time.monotonic()
    calls = asyncio.gather(*(tokens(client, 5) for _ in range(8)))
    answers = await asyncio.wait_for(calls, 20)
    took_s = time.monotonic() - started
    print(f"{len(answers)} calls, {sum(map(len, answers))} tokens")
    one_by_one_s = 8 * 5 * STEP_S
    print(f"faster than one after another: {took_s < one_by_one_s}")

    model.released.clear()
    async with await client.random(1000, annotated=False) as stream:
        print(await anext(stream))
    # The step in progress comes to its end; then the generator is closed.
    released = await asyncio.to_thread(model.released.wait, 10)
    print(f"the model was released: {released}")

    runtime.shutdown()
    await serving


if __name__ == "__main__":
    asyncio.run(main())
