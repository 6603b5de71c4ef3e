"""Never run: the public types of waits by runtime data."""

from __future__ import annotations

from dynamo.runtime import Client
from dynamo.runtime.errors import CallError, NoMatchInTime


async def ids_are_ints(client: Client) -> None:
    one: int = await client.wait_for_instance_by_runtime_data("role", "p")
    many: list[int] = await client.wait_for_instances_by_runtime_data(
        "role", "p", 2, timeout_s=1.5
    )
    print(one, many)


def a_limit_that_passed_is_both(error: NoMatchInTime) -> tuple[CallError, TimeoutError]:
    return error, error
