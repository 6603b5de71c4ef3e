"""What a handler does after its caller has gone: it may clean up, within limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from linked import linked

from dynamo.runtime.testing import until


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
    monkeypatch.setenv("DYN_TCP_RESPONSE_STREAM_HOST", "127.0.0.1")


async def test_the_grace_after_a_stop_does_not_cut_the_cleanup_of_a_handler_short() -> (
    None
):
    steps: list[str] = []
    go_on = asyncio.Event()

    async def handler(request: Any) -> AsyncIterator[int]:
        try:
            while True:
                yield 1
                await asyncio.sleep(0.001)
        finally:
            steps.append("cleaning")
            await go_on.wait()
            steps.append("clean")

    async with linked(handler) as link:
        stream = await link.call()
        await anext(stream)
        await stream.aclose()
        await until(lambda: steps)
        # Longer than the 50 ms after which a handler that knows nothing is cancelled.
        await asyncio.wait((link.serving,), timeout=0.15)
        go_on.set()
        await until(lambda: len(steps) == 2)
        assert steps == ["cleaning", "clean"]
