"""Lines of JSON between a measured process and the one over it, and the loop's choice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import sys
from collections.abc import AsyncIterator, Coroutine
from importlib import metadata
from typing import Any

DISTRIBUTIONS = {
    "uvloop": "uvloop",
    "msgspec": "msgspec",
    "grpc": "grpcio",
    "nats": "nats-py",
    "dynamo._core": "ai-dynamo-runtime",
}


def run(main: Coroutine[Any, Any, None], loop_name: str) -> None:
    """Run to the end in the kind of loop that was asked for."""
    if loop_name == "uvloop":
        import uvloop

        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    else:
        loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()


def say(**words: Any) -> None:
    """Write one line to the process over this one."""
    print(json.dumps(words), flush=True)


def say_ready(**words: Any) -> None:
    """Tell who is there and that the loads may begin."""
    versions = {"python": platform.python_version()}
    for module, distribution in DISTRIBUTIONS.items():
        if module in sys.modules:
            # Ours may be imported from a tree that nobody installed.
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[distribution] = metadata.version(distribution)
    say(pid=os.getpid(), versions=versions, **words)


async def commands() -> AsyncIterator[dict[str, Any]]:
    """What the process over this one asks for, until it closes our input."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        yield json.loads(line)
