"""Waits for instances of one endpoint by what their model cards say.

Owns the one watch of the cards that all these waits share, and only while there are any.
Belongs to one loop.  Which members a card must have is decided by ``_wire.records``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from typing import TYPE_CHECKING, NamedTuple

from dynamo.runtime._sealed import override
from dynamo.runtime._wire.records import (
    ModelCard,
    decode_model_card,
    parse_instance_key,
)
from dynamo.runtime.errors import NoMatchInTime, RemoteProtocolError, RuntimeClosed

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo.runtime._discovery import KeyChange, Watch
    from dynamo.runtime._discovery.instances import InstanceSet

_log = logging.getLogger("dynamo.runtime.discovery")

# A wait of 0 s looks once, for which the cards must be read.
_READ_LIMIT_S = 2.0


class Wanted(NamedTuple):
    """Which instances somebody waits for."""

    key: str
    value: str
    min_count: int | None = None
    """None stands for exactly one."""

    def is_met_by(self, matching: list[int]) -> bool:
        if self.min_count is None:
            return len(matching) == 1
        return len(matching) >= self.min_count

    @override
    def __str__(self) -> str:
        who = "one endpoint instance"
        if self.min_count is not None:
            who = f"{self.min_count} endpoint instances"
        key, value = (
            json.dumps(text, ensure_ascii=False) for text in (self.key, self.value)
        )
        return f"{who} with runtime_data[{key}] == {value}"


class ModelCards:
    """The cards of the instances of one endpoint.

    Unlike in the genuine runtime, a card that changes under a wait counts as it is now.
    """

    def __init__(self, instances: InstanceSet) -> None:
        self._instances = instances
        self._texts: dict[int, dict[str, str]] = {}
        self._unreadable: set[str] = set()
        self._waits = 0
        self._sleeping: set[asyncio.Future[None]] = set()
        self._opening = asyncio.Lock()
        self._watch: Watch | None = None
        self._unsubscribe: Callable[[], None] | None = None

    async def wait(self, wanted: Wanted, timeout_s: float | None) -> list[int]:
        """The ids of all that match, ordered, as soon as they are what is wanted.

        Raises:
            ValueError: the limit is no number of seconds.
            NoMatchInTime: they were not within the limit.
            RuntimeClosed: the runtime was shut down.
            DiscoveryError: the store cannot be read.
        """
        if timeout_s is not None and not 0 <= timeout_s < math.inf:
            raise ValueError("timeout_s must be a finite non-negative number")
        deadline = _now() + (math.inf if timeout_s is None else timeout_s)
        self._waits += 1
        try:
            await self._read(wanted, timeout_s)
            while not wanted.is_met_by(matching := self._matching(wanted)):
                if self._instances.closed:
                    raise RuntimeClosed("channel closed: the runtime was shut down")
                if _now() >= deadline:
                    raise _too_late(wanted, matching)
                await self._change(deadline)
            return matching
        finally:
            self._waits -= 1
            if not self._waits:
                self._close()

    # -- the watch ---------------------------------------------------------------

    async def _read(self, wanted: Wanted, timeout_s: float | None) -> None:
        limit_s = None if timeout_s is None else max(timeout_s, _READ_LIMIT_S)
        # Unlike `wait_for` of Python 3.11, this loses no cancellation.
        opening = asyncio.get_running_loop().create_task(self._open())
        try:
            done, _ = await asyncio.wait((opening,), timeout=limit_s)
        finally:
            opening.cancel()
            await asyncio.wait((opening,))
        if not done:
            raise _too_late(wanted, self._matching(wanted))
        await opening

    async def _open(self) -> None:
        async with self._opening:
            if self._watch is None:
                self._watch = await self._instances.watch_model_cards(self._apply)
                self._unsubscribe = self._instances.subscribe(self._wake)

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._watch = self._unsubscribe = None
        self._texts.clear()
        self._unreadable.clear()

    def _apply(self, batch: list[KeyChange]) -> None:
        for key, value in batch:
            if value is None:
                self._apply_delete(key)
            else:
                self._apply_put(key, value)
        self._wake()

    def _apply_put(self, key: str, value: bytes) -> None:
        """The value says whose card it is; one that cannot be read keeps the old."""
        try:
            card = decode_model_card(value)
        except RemoteProtocolError as error:
            if key not in self._unreadable:
                self._unreadable.add(key)
                _log.warning("model card %s is skipped: %s", key, error)
            return
        self._unreadable.discard(key)
        if self._concerns(card):
            self._texts[card.instance_id] = card.texts

    def _concerns(self, card: ModelCard) -> bool:
        return card.suffix is None and card.name == self._instances.name

    def _apply_delete(self, key: str) -> None:
        self._unreadable.discard(key)
        identity = parse_instance_key(key)
        if identity is not None and identity[0] == self._instances.name:
            self._texts.pop(identity[1], None)

    # -- waiting -----------------------------------------------------------------

    def _matching(self, wanted: Wanted) -> list[int]:
        return sorted(
            number
            for number, texts in self._texts.items()
            if texts.get(wanted.key) == wanted.value and self._is_listed(number)
        )

    def _is_listed(self, instance_id: int) -> bool:
        record = self._instances.get(instance_id)
        return record is not None and record.name == self._instances.name

    async def _change(self, deadline: float) -> None:
        """Until cards or instances change, or the deadline has passed."""
        loop = asyncio.get_running_loop()
        news: asyncio.Future[None] = loop.create_future()
        self._sleeping.add(news)
        timer = None
        if deadline < math.inf:
            timer = loop.call_at(deadline, _wake, news)
        try:
            await news
        finally:
            self._sleeping.discard(news)
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        for news in self._sleeping:
            _wake(news)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _wake(news: asyncio.Future[None]) -> None:
    if not news.done():
        news.set_result(None)


def _too_late(wanted: Wanted, matching: list[int]) -> NoMatchInTime:
    return NoMatchInTime(
        f"Timed out waiting for {wanted}; last_match_count={len(matching)}, "
        f"matching_ids={matching}",
        attempts=0,
        facts={"matching": matching},
    )
