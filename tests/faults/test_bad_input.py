"""Rubbish on both ports: worker and client survive, go on serving, and keep nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from linked import Link, linked

from dynamo.runtime.testing import until

ROUNDS = 15
AT_ONCE = 16
ITEMS = [{"a": [1, 2.5, b"x"]}, "last"]
# Lengths that mean trouble: nothing, all bits, the largest signed, one.
LENGTHS = [bytes(8), b"\xff" * 8, b"\x7f" + b"\xff" * 7, bytes(7) + b"\x01"]


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
    monkeypatch.setenv("DYN_TCP_RESPONSE_STREAM_HOST", "127.0.0.1")


async def answer(request: Any) -> AsyncIterator[Any]:
    for item in ITEMS:
        yield item


class Mutator:
    """Makes bad bytes out of good ones, and sends them in odd pieces."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def noise(self) -> bytes:
        return self._random.randbytes(self._random.choice([1, 2, 10, 100, 5000]))

    def mutated(self, good: bytes) -> bytes:
        data = bytearray(good)
        for _ in range(self._random.choice([1, 1, 2, 8])):
            at = self._random.randrange(len(data) + 1)
            size = self._random.choice([1, 2, 8, 100])
            change = self._random.choice(["flip", "insert", "remove", "length", "cut"])
            if change == "flip" and at < len(data):
                data[at] ^= 1 << self._random.randrange(8)
            elif change == "insert":
                data[at:at] = self._random.randbytes(size)
            elif change == "remove":
                del data[at : at + size]
            elif change == "length":
                data[at : at + 8] = self._random.choice(LENGTHS)
            elif change == "cut":
                del data[at:]
        return bytes(data)

    def bad(self, good: bytes) -> bytes:
        return self.noise() if self._random.random() < 0.2 else self.mutated(good)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        size = self._random.choice([1, 7, 100, 100_000])
        size = max(size, len(data) // 200)
        for at in range(0, len(data), size):
            yield data[at : at + size]

    async def send(self, port: int, data: bytes) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for piece in self.pieces(data):
                writer.write(piece)
                await writer.drain()
            if self._random.random() < 0.5:
                writer.write_eof()
        except OSError:
            pass  # closed in the face of the rubbish, which is right
        finally:
            if self._random.random() < 0.5:
                writer.transport.abort()
            writer.close()


async def good_bytes(link: Link) -> tuple[bytes, bytes]:
    """What one call sends to the worker's port and to the client's."""
    link.requests.record, link.answers.record = [], []
    assert [item async for item in await link.call({"x": 1})] == ITEMS
    sent = [
        b"".join(data for direction, data in record if direction == "up")
        for record in (link.requests.record, link.answers.record)
    ]
    link.requests.record = link.answers.record = None
    return sent[0], sent[1]


def nothing_left(link: Link) -> bool:
    worker, caller = link.worker._core, link.caller._core
    busy = [life for life in worker._served if life.in_flight]
    listener = caller.lane.callhome.listener
    return not (busy or listener._waiting or listener.connections)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_rubbish_on_either_port_harms_no_call_and_leaves_nothing_behind(
    seed: int, scale: float
) -> None:
    mutator = Mutator(seed)
    failures: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context))
    async with linked(answer, frame_timeout_s=0.2, connect_timeout_s=1) as link:
        good = await good_bytes(link)
        ports = (link.requests.target[1], link.answers.target[1])
        for number in range(int(ROUNDS * scale)):
            sends = [
                mutator.send(ports[n % 2], mutator.bad(good[n % 2]))
                for n in range(AT_ONCE)
            ]
            await asyncio.gather(*sends)
            stream = await asyncio.wait_for(link.call(number), 5)
            assert [item async for item in stream] == ITEMS
        # A stranger that says nothing has ten seconds for its handshake.
        await until(lambda: nothing_left(link), timeout=12)
    assert not failures
