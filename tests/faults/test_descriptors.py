"""A process that has no descriptor left waits for one; it does not fail its calls."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from linked import linked

from dynamo.runtime import errors


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
    monkeypatch.setenv("DYN_TCP_RESPONSE_STREAM_HOST", "127.0.0.1")


async def echo(request: Any) -> AsyncIterator[Any]:
    yield request


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_call_goes_on_when_a_descriptor_is_free_again() -> None:
    async with linked(echo) as link:
        with no_descriptor_left():
            call = asyncio.create_task(link.call("late"))
            await asyncio.wait((call,), timeout=0.2)
            assert not call.done()
        stream = await asyncio.wait_for(call, 4)
        assert [item async for item in stream] == ["late"]


async def test_a_call_without_any_descriptor_ends_with_an_error_that_says_so() -> None:
    async with linked(echo, connect_timeout_s=0.2) as link:
        with no_descriptor_left(), pytest.raises(errors.ConnectionFailed) as caught:
            await asyncio.wait_for(link.call(), 4)
        assert "Too many open files" in str(caught.value.facts["reason"])
