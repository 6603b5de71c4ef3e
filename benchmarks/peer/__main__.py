"""``python -m benchmarks.peer KIND work|call LOOP [ADDRESS]``: one measured process."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from benchmarks.peer import channel
from benchmarks.peer.loads import LOADS


async def serve_commands(connect: Any, address: str) -> None:
    """Run the loads that are asked for, until the input ends."""
    caller = await connect(address)
    channel.say_ready()
    async for command in channel.commands():
        try:
            measured = await LOADS[command["load"]](caller, command)
        except Exception as error:  # noqa: BLE001 - goes into the report
            channel.say(error=f"{type(error).__name__}: {error}")
        else:
            channel.say(measured=measured)
    await caller.aclose()


def main(kind: str, role: str, loop_name: str, address: str = "") -> None:
    """Be a worker or a client of that kind."""
    peer = importlib.import_module(f"benchmarks.peer.{kind}_peer")
    main = (
        peer.work(address) if role == "work" else serve_commands(peer.connect, address)
    )
    channel.run(main, loop_name)


if __name__ == "__main__":
    main(*sys.argv[1:])
