"""Which of the free instances gets the next call."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest

from dynamo.runtime._routing.policies import (
    RoundRobin,
    RouterMode,
    choose_device_aware,
    choose_least_loaded,
    choose_power_of_two,
    choose_random,
)


class Member(NamedTuple):
    instance_id: int
    device_type: str | None = None


ONE, TWO, THREE = Member(1), Member(2), Member(3)
ALL = (ONE, TWO, THREE)


def draws(*numbers: int) -> Callable[[int], int]:
    """Chance that comes out as said, and fails when it is asked for something else."""
    left = list(numbers)

    def below(limit: int) -> int:
        number = left.pop(0)
        assert 0 <= number < limit
        return number

    return below


# ---------------------------------------------------------------------- round robin


def test_rotation_starts_with_the_lowest_id_and_wraps() -> None:
    rotation = RoundRobin()
    assert [rotation.choose(ALL) for _ in range(4)] == [ONE, TWO, THREE, ONE]


def test_rotation_goes_on_when_members_come_and_go() -> None:
    # The genuine picks, recorded: 3 members, then without the first, then with it.
    rotation = RoundRobin()
    assert [rotation.choose(ALL) for _ in range(4)] == [ONE, TWO, THREE, ONE]
    assert [rotation.choose((TWO, THREE)) for _ in range(4)] == [TWO, THREE, TWO, THREE]
    assert [rotation.choose(ALL) for _ in range(4)] == [THREE, ONE, TWO, THREE]


def test_rotation_stands_still_when_there_is_nobody() -> None:
    rotation = RoundRobin()
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            rotation.choose(())
    assert rotation.choose(ALL) is ONE


def test_thirty_calls_on_three_instances_are_ten_each() -> None:
    rotation = RoundRobin()
    assert set(Counter(rotation.choose(ALL) for _ in range(30)).values()) == {10}


# ---------------------------------------------------------------------------- random


@pytest.mark.parametrize(("draw", "chosen"), [(0, ONE), (1, TWO), (2, THREE)])
def test_random_takes_the_one_drawn(draw: int, chosen: Member) -> None:
    assert choose_random(ALL, draws(draw)) is chosen


def test_random_is_uniform() -> None:
    below = random.Random(7).randrange
    counts = Counter(choose_random(ALL, below) for _ in range(3000))
    assert all(900 < counts[one] < 1100 for one in ALL)


# ---------------------------------------------------------------- power of two choices


def test_two_choices_of_one_member_draw_nothing() -> None:
    assert choose_power_of_two((ONE,), {1: 9}, draws()) is ONE


@pytest.mark.parametrize(
    ("first", "second", "pair"),
    [
        (0, 0, (ONE, TWO)),
        (0, 1, (ONE, THREE)),
        (1, 0, (TWO, ONE)),
        (1, 1, (TWO, THREE)),
        (2, 0, (THREE, ONE)),
        (2, 1, (THREE, TWO)),
    ],
)
def test_two_choices_are_different_and_a_tie_goes_to_the_first(
    first: int, second: int, pair: tuple[Member, Member]
) -> None:
    one, other = pair
    assert choose_power_of_two(ALL, {}, draws(first, second)) is one
    busy = {one.instance_id: 2, other.instance_id: 1}
    assert choose_power_of_two(ALL, busy, draws(first, second)) is other
    busy = {one.instance_id: 1, other.instance_id: 2}
    assert choose_power_of_two(ALL, busy, draws(first, second)) is one


def test_two_choices_take_an_uncounted_member_for_idle() -> None:
    assert choose_power_of_two(ALL, {1: 1}, draws(0, 0)) is TWO


# ------------------------------------------------------------------------ least loaded


def test_least_loaded_takes_the_one_with_fewest() -> None:
    assert choose_least_loaded(ALL, {1: 2, 2: 1, 3: 2}, draws(0)) is TWO


@pytest.mark.parametrize(("draw", "chosen"), [(0, ONE), (1, THREE)])
def test_least_loaded_draws_among_equals(draw: int, chosen: Member) -> None:
    assert choose_least_loaded(ALL, {2: 1}, draws(draw)) is chosen


def test_held_calls_fill_every_member_once_before_any_gets_a_second() -> None:
    below = random.Random(7).randrange
    load: Counter[int] = Counter()
    for turn in (1, 2, 3):
        for _ in ALL:
            load[choose_least_loaded(ALL, load, below).instance_id] += 1
        assert load == {1: turn, 2: turn, 3: turn}


# --------------------------------------------------------------- weighted by device


CPU, CUDA, OTHER = Member(1, "cpu"), Member(2, "cuda"), Member(3)


@pytest.mark.parametrize("members", [(CPU,), (CUDA,), (OTHER,), (CUDA, OTHER)])
def test_one_kind_of_device_is_chosen_by_load_alone(members: tuple[Member, ...]):
    first = members[0]
    busy = {one.instance_id: 5 for one in members[1:]}
    assert choose_device_aware(members, busy, 8, draws(0)) == first


def test_whatever_is_no_cpu_is_an_accelerator() -> None:
    both = (CPU, OTHER)
    assert choose_device_aware(both, {}, 8, draws(0)) == OTHER
    assert choose_device_aware(both, {3: 7}, 8, draws(0)) == OTHER
    assert choose_device_aware(both, {3: 8}, 8, draws(0)) == CPU


def test_ties_within_a_kind_are_drawn() -> None:
    both = (CPU, CUDA, OTHER)
    assert choose_device_aware(both, {}, 8, draws(0)) == CUDA
    assert choose_device_aware(both, {}, 8, draws(1)) == OTHER


def held(members: tuple[Member, ...], ratio: int, calls: int) -> list[Member]:
    """Who gets each of so many calls that never end."""
    load: Counter[int] = Counter()
    found = []
    for _ in range(calls):
        one = choose_device_aware(members, load, ratio, random.Random(5).randrange)
        load[one.instance_id] += 1
        found.append(one)
    return found


def test_the_seventeenth_held_call_goes_to_the_cpu() -> None:
    # As recorded: two accelerators, one CPU, ratio 8.
    found = held((CPU, CUDA, Member(4, "cuda")), 8, 35)
    assert [number for number, one in enumerate(found, 1) if one == CPU] == [17, 34]
    assert Counter(found)[CUDA] in (16, 17)


@pytest.mark.parametrize("accelerators", [1, 2, 3])
@pytest.mark.parametrize("cpus", [1, 2, 3])
@pytest.mark.parametrize("ratio", [1, 2, 8])
def test_the_rule_holds_at_every_moment(
    accelerators: int, cpus: int, ratio: int
) -> None:
    """``cpus' calls < floor(accelerators' calls * cpus / (ratio * accelerators))``."""
    members = tuple(
        Member(number, "cpu" if number < cpus else "cuda")
        for number in range(cpus + accelerators)
    )
    on_cpus = on_accelerators = 0
    for one in held(members, ratio, 200):
        wanted = on_cpus < on_accelerators * cpus // (ratio * accelerators)
        assert (one.device_type == "cpu") == wanted
        on_cpus += wanted
        on_accelerators += not wanted
    assert on_cpus > 0


# -------------------------------------------------------------------------- RouterMode

NAMES = (
    "RoundRobin",
    "Random",
    "PowerOfTwoChoices",
    "KV",
    "Direct",
    "LeastLoaded",
    "DeviceAwareWeighted",
)


@pytest.mark.parametrize(("number", "name"), list(enumerate(NAMES)))
def test_a_mode_has_its_genuine_number_and_text(number: int, name: str) -> None:
    mode = getattr(RouterMode, name)
    assert int(mode) == number
    assert repr(mode) == f"RouterMode.{name}"
    assert mode == number
    assert mode == getattr(RouterMode, name)


def test_a_mode_differs_from_other_modes_numbers_and_things() -> None:
    assert RouterMode.Random != RouterMode.KV
    assert RouterMode.Random != 0
    assert RouterMode.Random != "Random"


def test_a_mode_cannot_be_hashed_ordered_or_made() -> None:
    with pytest.raises(TypeError):
        hash(RouterMode.KV)
    with pytest.raises(TypeError):
        RouterMode.Direct > RouterMode.KV  # type: ignore[operator]  # noqa: B015
    with pytest.raises(TypeError):
        RouterMode()
