from __future__ import annotations

import asyncio

import pytest

from dynamo.runtime._discovery import KeyChange
from dynamo.runtime._discovery.watching import LoopWatch, Prefix


@pytest.mark.parametrize(
    ("prefix", "key", "selected"),
    [
        ("a/b", "a/b", True),
        ("a/b", "a/b/c", True),
        ("a/b/", "a/b/c", True),
        ("a/b/", "a/b", True),
        ("a/b", "a/bc", False),
        ("a/b/", "a/bc/d", False),
        ("a/b//", "a/b//c", True),
        ("a/b//", "a/b/c", False),
        ("", "anything", True),
    ],
)
def test_a_prefix_ends_at_a_slash(prefix: str, key: str, selected: bool) -> None:
    assert (key in Prefix(prefix)) is selected


def test_posting_to_a_closed_loop_ends_the_watch() -> None:
    loop = asyncio.new_event_loop()
    watch = LoopWatch(loop, "", lambda batch: None)
    loop.close()
    watch.post([KeyChange("a", b"1")])
    assert watch.closed


async def test_nothing_is_delivered_after_close() -> None:
    seen: list[list[KeyChange]] = []
    watch = LoopWatch(asyncio.get_running_loop(), "a", seen.append)
    watch.post([KeyChange("a/1", b"1"), KeyChange("b/1", b"1")])
    await asyncio.sleep(0)
    watch.post([KeyChange("a/1", None)])
    watch.close()
    await asyncio.sleep(0)
    assert seen == [[KeyChange("a/1", b"1")]]
