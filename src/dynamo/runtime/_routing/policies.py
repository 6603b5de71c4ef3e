"""Routing policies: which of the free instances gets the next call.

Pure: instances come as a tuple sorted by id, loads as a mapping, chance as a function
``below(n)`` that draws a whole number from 0 to n - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol, TypeVar, final

from dynamo.runtime._sealed import Numbered

Below = Callable[[int], int]


class Candidate(Protocol):
    """What a policy looks at."""

    @property
    def instance_id(self) -> int: ...

    @property
    def device_type(self) -> str | None: ...


C = TypeVar("C", bound=Candidate)


@final
class RouterMode(Numbered):
    """How a client chooses among instances; given to `Endpoint.client`.

    Members: ``RoundRobin`` 0, ``Random`` 1, ``PowerOfTwoChoices`` 2, ``KV`` 3,
    ``Direct`` 4, ``LeastLoaded`` 5, ``DeviceAwareWeighted`` 6.  A member equals its
    number, has no order and cannot be hashed, like the genuine one.

    Example:
        >>> RouterMode.LeastLoaded, int(RouterMode.LeastLoaded), RouterMode.KV == 3
        (RouterMode.LeastLoaded, 5, True)
    """

    __slots__ = ()

    RoundRobin: ClassVar[RouterMode]
    Random: ClassVar[RouterMode]
    PowerOfTwoChoices: ClassVar[RouterMode]
    KV: ClassVar[RouterMode]
    Direct: ClassVar[RouterMode]
    LeastLoaded: ClassVar[RouterMode]
    DeviceAwareWeighted: ClassVar[RouterMode]


RouterMode._make_members(
    (
        "RoundRobin",
        "Random",
        "PowerOfTwoChoices",
        "KV",
        "Direct",
        "LeastLoaded",
        "DeviceAwareWeighted",
    ),
    first=0,
)


class RoundRobin:
    """Strict rotation over the ids in ascending order.

    The counter goes on when members come and go, and does not move when there is
    nobody to choose.
    """

    def __init__(self) -> None:
        self._next = 0

    def choose(self, free: Sequence[C]) -> C:
        chosen = free[self._next % len(free)]
        self._next += 1
        return chosen


def choose_random(free: Sequence[C], below: Below) -> C:
    """Uniform, independent draws."""
    return free[below(len(free))]


def choose_power_of_two(free: Sequence[C], load: Mapping[int, int], below: Below) -> C:
    """The less loaded of two different members; a tie goes to the first drawn."""
    if len(free) == 1:
        return free[0]
    first = below(len(free))
    second = below(len(free) - 1)
    second += second >= first
    one, other = free[first], free[second]
    if load.get(other.instance_id, 0) < load.get(one.instance_id, 0):
        return other
    return one


def choose_least_loaded(free: Sequence[C], load: Mapping[int, int], below: Below) -> C:
    """Fewest calls in flight; ``below`` decides among equals."""
    least = min(load.get(one.instance_id, 0) for one in free)
    ties = [one for one in free if load.get(one.instance_id, 0) == least]
    return ties[below(len(ties))]


def choose_device_aware(
    free: Sequence[C], load: Mapping[int, int], ratio: int, below: Below
) -> C:
    """The least loaded accelerator, or a CPU once the accelerators are busy enough.

    One accelerator counts as much as ``ratio`` CPUs.  Whatever is not a CPU is an
    accelerator.
    """
    cpus = [one for one in free if one.device_type == "cpu"]
    accelerators = [one for one in free if one.device_type != "cpu"]
    if not cpus or not accelerators:
        return choose_least_loaded(free, load, below)
    on_cpus = sum(load.get(one.instance_id, 0) for one in cpus)
    on_accelerators = sum(load.get(one.instance_id, 0) for one in accelerators)
    allowed = on_accelerators * len(cpus) // (ratio * len(accelerators))
    group = cpus if on_cpus < allowed else accelerators
    return choose_least_loaded(group, load, below)
