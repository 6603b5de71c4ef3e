"""Who is left out after failures, for how long, and how an instance comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.runtime._routing.ejection import EjectionPolicy, Ejections, Failure

POLICY = EjectionPolicy(failures=3, first_s=1.0, max_s=8.0, trial_s=5.0)
ONE = (1,)


def ejections(**changes: float) -> Ejections:
    return Ejections(EjectionPolicy(**{**vars(POLICY), **changes}))  # type: ignore[arg-type]


def out(made: Ejections, *candidates: int, most: int = 100) -> set[int]:
    return set(made.left_out(candidates or ONE, most))


def ejected(now: float = 0.0, **changes: float) -> Ejections:
    """Instance 1 has failed as often as it takes."""
    made = ejections(**changes)
    for _ in range(POLICY.failures):
        made.failed(1, Failure.NO_ANSWER, now)
    assert out(made) == {1}
    return made


def half_open(now: float = 1.0) -> Ejections:
    made = ejected()
    assert made.due(now) == [1]
    assert made.probed(1, well=True, now=now)
    assert out(made) == set()
    return made


# ------------------------------------------------------------------ failing


@pytest.mark.parametrize("failure", [Failure.NO_ANSWER, Failure.NO_ITEM])
def test_so_many_failures_in_a_row_eject(failure: Failure) -> None:
    made = ejections()
    assert [made.failed(1, failure, 0.0) for _ in range(3)] == [False, False, True]
    assert out(made) == {1}
    assert made.reason(1) == f"{failure.value}, 3 in a row"
    assert made.times(1) == 1
    assert made.next_due() == 1.0


def test_a_success_in_between_makes_it_a_new_row() -> None:
    made = ejections()
    for _ in range(100):
        assert not made.failed(1, Failure.NO_ANSWER, 0.0)
        assert not made.failed(1, Failure.NO_ANSWER, 0.0)
        assert not made.answered(1)
    assert out(made) == set()
    assert not made.troubled


def test_without_a_connection_once_is_enough() -> None:
    made = ejections()
    assert made.failed(1, Failure.NO_CONNECTION, 0.0)
    assert out(made) == {1}
    assert made.reason(1) == "no connection could be made"


def test_switched_off_nothing_ejects() -> None:
    made = ejections(failures=0)
    for failure in Failure:
        assert not made.failed(1, failure, 0.0)
    assert not made.troubled
    assert out(made) == set()


def test_a_lost_connection_leaves_out_until_another_was_tried() -> None:
    made = ejections()
    assert made.failed(1, Failure.CONNECTION_LOST, 7.0)
    assert out(made) == {1}
    assert made.due(7.0) == [1]
    assert made.due(7.0) == [], "asked once"
    assert made.probed(1, well=True, now=7.1)
    assert out(made) == set()
    assert made.times(1) == 0
    assert made.next_due() is None


def test_connections_that_are_lost_again_and_again_eject() -> None:
    made = ejections()
    for _ in range(2):
        made.failed(1, Failure.CONNECTION_LOST, 0.0)
        assert made.due(0.0) == [1]
        made.probed(1, well=True, now=0.0)
        # That requests are acknowledged says nothing about their streams.
        assert not made.answered(1)
    made.failed(1, Failure.CONNECTION_LOST, 0.0)
    assert made.due(0.0) == []
    assert made.times(1) == 1


def test_a_lost_connection_and_no_new_one_ejects() -> None:
    made = ejections()
    made.failed(1, Failure.CONNECTION_LOST, 0.0)
    made.due(0.0)
    assert made.probed(1, well=False, now=0.5)
    assert out(made) == {1}
    assert made.next_due() == 1.5


def test_a_call_that_cannot_connect_settles_the_probe() -> None:
    made = ejections()
    made.failed(1, Failure.CONNECTION_LOST, 0.0)
    made.due(0.0)
    assert made.failed(1, Failure.NO_CONNECTION, 0.5)
    assert made.times(1) == 1
    assert not made.probed(1, well=True, now=0.6), "it was asked before"
    assert out(made) == {1}


@pytest.mark.parametrize("failure", list(Failure))
def test_calls_that_were_sent_before_change_nothing(failure: Failure) -> None:
    made = ejected()
    for _ in range(10):
        assert not made.failed(1, failure, 0.5)
    assert made.next_due() == 1.0
    assert made.times(1) == 1


# ------------------------------------------------------------------ coming back


def test_the_time_is_doubled_up_to_a_limit() -> None:
    made = ejected()
    now, times = 0.0, []
    for _ in range(6):
        due = made.next_due()
        assert due is not None
        times.append(due - now)
        assert made.due(due - 0.01) == []
        assert made.due(due) == [1]
        assert made.probed(1, well=False, now=due)
        now = due
    assert times == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_the_time_stays_finite_however_often() -> None:
    made = ejected(max_s=1e30)
    for _ in range(5000):
        made.due(1e30)
        made.probed(1, well=False, now=0.0)
    assert made.next_due() == 2.0**30


def test_half_open_has_one_call() -> None:
    made = half_open()
    assert made.chosen(1, 2.0)
    assert out(made) == {1}
    assert not made.chosen(1, 2.0)


def test_a_call_that_is_answered_brings_it_back() -> None:
    made = half_open()
    made.chosen(1, 2.0)
    assert made.answered(1)
    assert out(made) == set()
    assert not made.troubled


def test_a_call_that_fails_ejects_for_longer() -> None:
    made = half_open()
    made.chosen(1, 2.0)
    assert made.failed(1, Failure.NO_ANSWER, 7.0)
    assert out(made) == {1}
    assert made.next_due() == 9.0


def test_a_call_without_an_outcome_makes_way_for_the_next() -> None:
    made = half_open()
    made.chosen(1, 2.0)
    assert made.let_go(1)
    assert out(made) == set()
    assert not made.let_go(1)
    assert made.chosen(1, 3.0)
    # Nor does one that lasts keep it out.
    assert made.next_due() == 8.0
    assert made.due(8.0) == []
    assert out(made) == set()


def test_without_first_items_only_a_stream_that_came_so_far_brings_it_back() -> None:
    made = ejections()
    for _ in range(3):
        made.failed(1, Failure.NO_ITEM, 0.0)
        assert not made.answered(1)
    assert out(made) == {1}
    made.due(1.0)
    made.probed(1, well=True, now=1.0)
    made.chosen(1, 1.0)
    assert not made.answered(1)
    assert out(made) == {1}
    assert made.completed(1)
    assert not made.troubled


def test_a_late_answer_brings_back_one_that_did_not_answer() -> None:
    made = ejected()
    assert made.completed(1)
    assert out(made) == set()


def test_a_stream_on_an_old_connection_says_nothing_about_new_ones() -> None:
    made = ejections()
    made.failed(1, Failure.NO_CONNECTION, 0.0)
    assert not made.completed(1)
    assert out(made) == {1}
    # One that begins now, because this instance is the last one or was named, does.
    assert made.answered(1)
    assert not made.troubled


def test_registered_again_is_a_clean_slate() -> None:
    made = ejected()
    assert made.forget(1)
    assert not made.forget(1)
    assert not made.troubled
    made.failed(1, Failure.NO_ANSWER, 0.0)
    assert not made.forget(1)


def test_of_an_instance_that_never_failed_nothing_is_known() -> None:
    made = ejections()
    for report in (made.answered, made.completed, made.let_go, made.forget):
        assert not report(1)
    assert not made.chosen(1, 0.0)
    assert not made.probed(1, well=False, now=0.0)
    assert made.reason(1) == ""
    assert made.times(1) == 0
    assert made.next_due() is None
    assert made.due(1e9) == []
    made.failed(1, Failure.NO_ANSWER, 0.0)
    assert made.reason(1) == "", "it is called as before"
    assert not made.chosen(1, 0.0)


# ------------------------------------------------------------------ the limit


def test_of_too_many_the_worst_are_left_out() -> None:
    made = ejections()
    for number in (1, 2, 3, 4):
        made.failed(number, Failure.NO_CONNECTION, 0.0)
    for number in (2, 4):
        made.due(1.0)
        made.probed(number, well=False, now=1.0)
    assert out(made, 1, 2, 3, 4, most=2) == {2, 4}
    assert out(made, 1, 2, 3, 4, most=0) == set()
    assert out(made, 1, 2, 3, 4, most=-1) == set()
    assert out(made, 1, 3, 5, most=2) == {1, 3}


EVENTS = st.one_of(
    st.tuples(st.just("failed"), st.integers(1, 4), st.sampled_from(Failure)),
    st.tuples(
        st.sampled_from(["answered", "completed", "let_go", "forget"]),
        st.integers(1, 4),
    ),
    st.tuples(st.just("chosen"), st.integers(1, 4)),
    st.tuples(st.just("probed"), st.integers(1, 4), st.booleans()),
    st.tuples(st.just("passes"), st.floats(0, 20)),
)


@given(st.lists(EVENTS, max_size=60))
def test_whatever_happens_everybody_comes_back(events: list[tuple]) -> None:
    """No sequence leaves an instance out for good: time and one success are enough."""
    made = ejections()
    now = 0.0
    for name, *arguments in events:
        if name == "passes":
            now += arguments[0]
            made.due(now)
        elif name == "failed":
            made.failed(*arguments, now)
        elif name == "chosen":
            made.chosen(arguments[0], now)
        elif name == "probed":
            made.probed(arguments[0], well=arguments[1], now=now)
        else:
            getattr(made, name)(*arguments)
        assert len(out(made, 1, 2, 3, 4, most=2)) <= 2
    now += POLICY.max_s + POLICY.trial_s
    made.due(now)
    for number in (1, 2, 3, 4):
        made.probed(number, well=True, now=now)
    assert out(made, 1, 2, 3, 4) == set()
    for number in (1, 2, 3, 4):
        made.chosen(number, now)
        made.completed(number)
    assert not made.troubled
    assert made.next_due() is None
