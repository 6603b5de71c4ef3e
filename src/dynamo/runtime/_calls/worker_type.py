"""The stages of a request that a worker can handle, with the genuine names and numbers.

An `enum.IntEnum` would be more than the genuine class is: hashable, ordered, picklable.
"""

from __future__ import annotations

from typing import ClassVar

from dynamo.runtime._sealed import Numbered, override

__all__ = ["WorkerType"]


class WorkerType(Numbered):
    """Which stage of a request a worker handles; every worker has exactly one.

    Equal to its number, not hashable and not ordered.

    Example:
        >>> WorkerType.Decode, str(WorkerType.Decode), int(WorkerType.Decode)
        (WorkerType.Decode, 'decode', 2)
        >>> WorkerType.Decode == 2, WorkerType.Decode == WorkerType.Prefill
        (True, False)
    """

    __slots__ = ()

    Prefill: ClassVar[WorkerType]
    Decode: ClassVar[WorkerType]
    Encode: ClassVar[WorkerType]
    Aggregated: ClassVar[WorkerType]

    @override
    def __str__(self) -> str:
        return self._name.lower()


WorkerType._make_members(("Prefill", "Decode", "Encode", "Aggregated"), first=1)
