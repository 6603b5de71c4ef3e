"""Waits for conditions, with a limit; knows nothing of what they are about."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable

_POLL_S = 0.002


async def until(condition: Callable[[], object], timeout: float = 5.0) -> None:
    """Wait until something holds, for what tells nobody when it happens.

    Args:
        condition: Called again and again, and awaited if it is asynchronous; the truth
            of its result is what counts.
        timeout: How many seconds it may take at most, in the time of the loop.

    Raises:
        AssertionError: it did not become true in time.

    Example:
        >>> import asyncio
        >>> from dynamo.runtime.testing import until
        >>> async def main():
        ...     done = []
        ...     asyncio.get_running_loop().call_later(0.01, done.append, "yes")
        ...     await until(lambda: done)
        ...     print(done)
        >>> asyncio.run(main())
        ['yes']
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout
    while True:
        result = condition()
        if inspect.isawaitable(result):
            result = await result
        if result:
            return
        if loop.time() > end:
            raise AssertionError(f"it did not become true within {timeout:g} s")
        await asyncio.sleep(_POLL_S)
