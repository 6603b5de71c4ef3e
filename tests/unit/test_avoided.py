"""Whom a client leaves out because a worker said so."""

from __future__ import annotations

import pytest

from dynamo.runtime._routing.avoided import Avoided


class Member:
    def __init__(self, number: int) -> None:
        self.instance_id = number


ONE, TWO = Member(1), Member(2)


def test_each_is_avoided_until_a_time_of_its_own() -> None:
    avoided: Avoided[Member] = Avoided()
    assert not avoided.until
    avoided.add(ONE, 5.0, "bye", 0.0)
    avoided.add(TWO, 8.0, "later", 3.0)
    assert avoided.until
    assert avoided.without((ONE, TWO), 4.9) == []
    assert avoided.without((ONE, TWO), 5.0) == [ONE]
    assert avoided.next_end_s(4.0) == pytest.approx(1.0)
    assert avoided.next_end_s(5.0) == pytest.approx(3.0)
    assert avoided.remaining_s(TWO, 5.0) == pytest.approx(3.0)
    assert avoided.reason(TWO, 5.0) == "later"
    assert avoided.reason(ONE, 5.0) == ""
    assert avoided.next_end_s(8.0) is None


def test_for_no_time_is_not_avoided() -> None:
    avoided: Avoided[Member] = Avoided()
    avoided.add(ONE, 3.0, "bye", 3.0)
    assert not avoided.until
    assert list(avoided.without((ONE,), 3.0)) == [ONE]
    assert avoided.next_end_s(3.0) is None


def test_registered_again_under_the_same_id_is_a_clean_slate() -> None:
    avoided: Avoided[Member] = Avoided()
    avoided.add(ONE, 5.0, "bye", 0.0)
    again = Member(1)
    assert avoided.without((again,), 0.0) == [again]
    assert avoided.reason(again, 0.0) == ""


def test_instances_that_never_come_back_are_forgotten() -> None:
    avoided: Avoided[Member] = Avoided()
    for number in range(1000):
        avoided.add(Member(number), 5.0, "bye", 0.0)
    avoided.add(Member(5000), 9.0, "bye", 6.0)
    assert len(avoided.until) == 1


def test_once_all_are_back_nobody_is_asked_about_again() -> None:
    avoided: Avoided[Member] = Avoided()
    avoided.add(ONE, 8.0, "bye", 0.0)
    avoided.add(TWO, 5.0, "bye", 0.0)
    members = (ONE, TWO)
    assert avoided.without(members, 7.9) == [TWO]
    assert avoided.until
    assert avoided.without(members, 8.0) is members
    assert not avoided.until
