"""How long something took, several times, and whether that keeps to a bound.

A machine that is busy with other tests may be late now and then: the best of the tries
keeps to the bound, and in the long form, which runs alone, all of them.
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from dynamo.runtime.testing import until

TRIES = 5
LIMIT_S = 8.0
AT_ONCE_S = 0.0
ALL_COUNT = float(os.environ.get("DYN_TEST_SCALE", "1")) > 1


class Times:
    """How long it took each time.

    Args:
        what: What was waited for.
        bound_s: What `docs/semantics.md` promises, or a shorter one that was set.
        tries: How many times it is waited for, at least.
    """

    def __init__(self, what: str, bound_s: float, tries: int = TRIES) -> None:
        self.what = what
        self.bound_s = bound_s
        self.tries = tries
        self.took_s: list[float] = []

    async def error(
        self, wait: Any, kind: type[Exception], *, since: float = math.nan
    ) -> Any:
        """Wait for an error, and note how long that took from now or since then."""
        began = time.monotonic() if math.isnan(since) else since
        with pytest.raises(kind) as caught:
            await asyncio.wait_for(wait, LIMIT_S)
        self.took_s.append(time.monotonic() - began)
        assert type(caught.value) is kind
        return caught.value

    async def event(self, happened: Callable[[], object], *, since: float) -> None:
        """Wait until that is true, and note how long it took since then."""
        await until(happened, timeout=LIMIT_S)
        self.took_s.append(time.monotonic() - since)

    async def result(self, wait: Any, *, since: float = math.nan) -> Any:
        """Wait for a result, and note how long that took from now or since then."""
        began = time.monotonic() if math.isnan(since) else since
        result = await asyncio.wait_for(wait, LIMIT_S)
        self.took_s.append(time.monotonic() - began)
        return result

    def judge(self, *, not_before_s: float = 0.0) -> None:
        """Print what was measured, and assert twice the bound and 100 ms."""
        print(
            f"{self.what}: median {statistics.median(self.took_s) * 1e3:.1f} ms, "
            f"maximum {max(self.took_s) * 1e3:.1f} ms, bound {self.bound_s * 1e3:g} ms"
        )
        assert len(self.took_s) >= self.tries
        counts = max if ALL_COUNT else min
        assert counts(self.took_s) < 2 * self.bound_s + 0.1
        # Timers may come early by the resolution of a clock.
        assert min(self.took_s) > not_before_s - 0.02
