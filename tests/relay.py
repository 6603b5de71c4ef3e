"""Earlier names of `FaultProxy`, `Cut` and `until`; new tests import those themselves."""

from __future__ import annotations

from collections.abc import Callable

from dynamo.runtime import testing
from dynamo.runtime.testing import FaultProxy as Relay


def Cut(  # noqa: N802 - it was a class
    up: int | None = None,
    down: int | None = None,
    reset: bool = False,
    silent: bool = False,
) -> testing.Cut:
    how = "silent" if silent else "reset" if reset else "fin"
    return testing.Cut(up, down, how)


def relay_to(port: int, host: str = "127.0.0.1") -> Relay:
    return Relay(port, target_host=host)


async def until(condition: Callable[[], object], limit_s: float = 5) -> None:
    await testing.until(condition, timeout=limit_s)
