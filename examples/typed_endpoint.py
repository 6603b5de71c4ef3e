"""Requests that are checked before the handler sees them, with pydantic.

Worker and client share this process to keep the example in one file; in two programs
the code is the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from pydantic import BaseModel, Field

from dynamo.runtime import DistributedRuntime, dynamo_endpoint, dynamo_worker
from dynamo.runtime.errors import RemoteError


class Order(BaseModel):
    """What the caller must send."""

    dish: str
    portions: int = Field(default=1, ge=1, le=4)


class Plate(BaseModel):
    """What the caller gets, once per portion."""

    dish: str
    number: int


# The decorator turns the plain dict that came over the wire into an Order, or refuses
# it.  Models are sent as they are: no .model_dump() is needed.
@dynamo_endpoint(Order, Plate)
async def cook(order: Order) -> AsyncIterator[Plate]:
    """Cook as many plates as were ordered."""
    for number in range(1, order.portions + 1):
        yield Plate(dish=order.dish, number=number)


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    """Serve, send one good and one bad order, shut down."""
    endpoint = runtime.endpoint("examples.typed.cook")
    serving = endpoint.serve_endpoint(cook)
    client = await endpoint.client()
    await client.wait_for_instances(timeout=10)

    order = {"dish": "soup", "portions": 2}
    async for item in await client.random(order, annotated=False):
        plate = Plate.model_validate(item)  # over the wire it is a dict again
        print(f"plate {plate.number}: {plate.dish}")

    try:
        stream = await client.random({"dish": "soup", "portions": 9})
        async for _ in stream:
            raise AssertionError("nine portions must be refused")
    except RemoteError as error:
        print(f"refused: {error.error_class}, raised as {error.remote_type}")

    runtime.shutdown()  # finishes what is in progress ...
    await serving  # ... and then the serve future resolves


if __name__ == "__main__":
    asyncio.run(main())
