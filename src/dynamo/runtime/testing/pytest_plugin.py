"""Fixtures for pytest: ``pytest_plugins = ["dynamo.runtime.testing.pytest_plugin"]``.

Needs pytest, and pytest-asyncio or the plugin of anyio for what is asynchronous; none of
them is a dependency of the runtime.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from dynamo.runtime.testing import Cluster

try:
    from pytest_asyncio import fixture as _async_fixture
except ImportError:  # anyio's plugin takes ordinary ones
    _async_fixture: Callable[..., Any] = pytest.fixture  # type: ignore[no-redef]


@pytest.fixture
def cluster_env() -> dict[str, str]:
    """Settings of the fixture ``cluster``, by variable; define it to change them.

    Returns:
        An empty dict.
    """
    return {}


@_async_fixture
async def cluster(cluster_env: dict[str, str]) -> AsyncIterator[Cluster]:
    """A `Cluster` on the duplex lane, shut down after the test."""
    async with Cluster(env=cluster_env) as made:
        yield made


@_async_fixture
async def callhome_cluster(cluster_env: dict[str, str]) -> AsyncIterator[Cluster]:
    """A `Cluster` on the lane that genuine peers speak."""
    async with Cluster(lane="callhome", env=cluster_env) as made:
        yield made
