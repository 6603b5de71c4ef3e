"""Many instances of one worker: copies of its record that lead to the same address."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

# Whoever sweeps the folder takes records for dead that were not touched for 10 s.
FUTURE_S = 3600.0


def register_copies(store: Path, endpoint: str, count: int) -> None:
    """Add records to the one of the endpoint until there are ``count``."""
    (original,) = store.rglob(f"*%2F{endpoint}%2F*")
    prefix, _, number = original.name.rpartition("%2F")
    record = json.loads(original.read_bytes())
    future = time.time() + FUTURE_S  # noqa: TID251 - compared with file times
    for step in range(1, count):
        other = (int(number, 16) + step) % 2**63
        record["instance_id"] = other
        draft = store / f"draft-{step}"
        draft.write_text(json.dumps(record), encoding="utf-8")
        os.utime(draft, (future, future))
        draft.rename(original.with_name(f"{prefix}%2F{other:x}"))
