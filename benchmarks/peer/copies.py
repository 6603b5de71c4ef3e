"""Many instances of one worker: copies of its record that lead to the same address."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

# Whoever sweeps the folder takes records for dead that were not touched for 10 s.
FUTURE_S = 3600.0


class Copies:
    """The one record of an endpoint in a store, and more and more copies of it."""

    def __init__(self, store: Path, endpoint: str) -> None:
        self._store = store
        (self._original,) = store.rglob(f"*%2F{endpoint}%2F*")
        self._count = 1

    def grow_to(self, count: int) -> None:
        """Add copies until there are ``count`` records."""
        prefix, _, number = self._original.name.rpartition("%2F")
        record = json.loads(self._original.read_bytes())
        future = time.time() + FUTURE_S  # noqa: TID251 - compared with file times
        for step in range(self._count, count):
            other = (int(number, 16) + step) % 2**63
            record["instance_id"] = other
            draft = self._store / f"draft-{step}"
            draft.write_text(json.dumps(record), encoding="utf-8")
            os.utime(draft, (future, future))
            draft.rename(self._original.with_name(f"{prefix}%2F{other:x}"))
        self._count = count
