"""Our worker leaves while a genuine client calls: it sends no refused call elsewhere."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest
from programs import ENDPOINT, LIMIT_S, MakeRuntime, Programs, eventually

pytestmark = [pytest.mark.interop, pytest.mark.slow]

CLIENT = """
async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    client = await runtime.endpoint("ns.comp.gen").client()
    await client.wait_for_instances()
    say("calling")
    while True:
        try:
            stream = await client.round_robin("", annotated=False)
            assert [item async for item in stream] == ["answer"]
        except Exception as error:
            say(error)
            break
    runtime.shutdown()

run(main)
"""


async def test_a_genuine_client_that_has_not_heard_of_a_shutdown_is_served(
    programs: Programs, make_runtime: MakeRuntime, genuine_python: str
) -> None:
    """For a second at most; what it does not survive is a refusal at once."""
    runtime = make_runtime()
    late = 0

    async def answer(request: Any) -> AsyncIterator[str]:
        nonlocal late
        late += runtime._core._left_at > 0
        yield "answer"

    serving = runtime.endpoint(ENDPOINT).serve_endpoint(answer)
    await eventually(lambda: programs.records)
    copied = programs.folder / "copy"
    shutil.copytree(programs.store, copied)
    client = await programs.start_genuine(
        genuine_python, CLIENT, DYN_FILE_KV=str(copied)
    )
    await client.says("calling")
    runtime.shutdown()
    await asyncio.wait_for(serving, LIMIT_S)
    assert "is draining" in await client.line()
    # One by one: of a refusal at once it would see none or one.
    assert late > 2
    assert programs.records == []
