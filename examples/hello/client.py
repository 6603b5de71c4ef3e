"""A client: finds the workers of an endpoint and calls them in turn.

::

    python examples/hello/client.py 2        # waits until there are two workers
"""

from __future__ import annotations

import asyncio
import sys

from dynamo.runtime import DistributedRuntime, dynamo_worker

WORKERS = int(sys.argv[1]) if len(sys.argv) > 1 else 1
PEOPLE = ("Ada", "Grace", "Barbara", "Frances")


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    """Greet four people, each through the next worker."""
    client = await runtime.endpoint("examples.hello.greet").client()
    await client.wait_for_instances(timeout=30)
    while len(client.instance_ids()) < WORKERS:  # noqa: ASYNC110 - the list is live
        await asyncio.sleep(0.05)
    print(f"client: found {len(client.instance_ids())} worker(s)", flush=True)
    for name in PEOPLE:
        # The call is accepted when this returns; the items come while we iterate.
        # With annotated=True (the default) each item would be an envelope that can
        # also carry an event name, comments and an id.
        stream = await client.round_robin({"name": name}, annotated=False)
        words = [word async for word in stream]
        print("client:", *words, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
