"""A worker: serves one endpoint until it is told to stop.

Start it as often as you like; each process is one more instance of the endpoint::

    python examples/hello/worker.py anna
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator

from dynamo.runtime import DistributedRuntime, dynamo_worker

NAME = sys.argv[1] if len(sys.argv) > 1 else f"worker {os.getpid()}"


async def greet(request: dict[str, str]) -> AsyncIterator[str]:
    """Answer one call: an async generator, every item travels when it is yielded."""
    for word in ("Hello,", request["name"], "from", NAME):
        yield word


# Without any DYN_ variable set, workers and clients of one user on one machine find
# each other through files, and nothing listens beyond the loopback interface.
# SIGTERM and Ctrl-C let calls in progress finish and then end the program with code 0.
@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    """Serve ``greet`` under the path namespace.component.endpoint."""
    endpoint = runtime.endpoint("examples.hello.greet")
    print(f"{NAME}: serving examples.hello.greet", flush=True)
    await endpoint.serve_endpoint(greet)


if __name__ == "__main__":
    asyncio.run(main())
