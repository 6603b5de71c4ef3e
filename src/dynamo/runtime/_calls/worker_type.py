"""The stages of a request that a worker can handle, with the genuine names and numbers.

An `enum.IntEnum` would be more than the genuine class is: hashable, ordered, picklable.
"""

from __future__ import annotations

from typing import ClassVar

from dynamo.runtime._sealed import Unconstructible, override

__all__ = ["WorkerType"]


class WorkerType(Unconstructible):
    """Which stage of a request a worker handles; every worker has exactly one.

    Equal to its number, not hashable and not ordered.

    Example:
        >>> WorkerType.Decode, str(WorkerType.Decode), int(WorkerType.Decode)
        (WorkerType.Decode, 'decode', 2)
        >>> WorkerType.Decode == 2, WorkerType.Decode == WorkerType.Prefill
        (True, False)
    """

    __slots__ = ("_name", "_number")

    Prefill: ClassVar[WorkerType]
    Decode: ClassVar[WorkerType]
    Encode: ClassVar[WorkerType]
    Aggregated: ClassVar[WorkerType]

    _name: str
    _number: int

    @classmethod
    def _make(cls, name: str, number: int) -> WorkerType:
        self = cls.__new__(cls)
        self._name = name
        self._number = number
        return self

    def __int__(self) -> int:
        return self._number

    @override
    def __eq__(self, other: object) -> bool:
        if isinstance(other, WorkerType):
            return self is other
        return isinstance(other, int) and self._number == other

    __hash__ = None  # type: ignore[assignment]

    @override
    def __repr__(self) -> str:
        return f"WorkerType.{self._name}"

    @override
    def __str__(self) -> str:
        return self._name.lower()


for _number, _name in enumerate(("Prefill", "Decode", "Encode", "Aggregated"), 1):
    setattr(WorkerType, _name, WorkerType._make(_name, _number))
