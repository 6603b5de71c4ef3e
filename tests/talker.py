"""A protocol that says what a test tells it and notes what happens to it."""

from __future__ import annotations

import asyncio
from typing import Any


class Talker(asyncio.Protocol):
    """Notes what happens to it."""

    def __init__(self, *, keeps_half: bool = False) -> None:
        self.events: list[Any] = []
        self.data = b""
        self.writable = True
        self.lost = False
        self.keeps_half = keeps_half
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data

    def eof_received(self) -> bool:
        self.events.append("eof")
        return self.keeps_half

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append(type(exc))
        self.lost = True

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
