"""What may be sent again, and how often in all."""

from __future__ import annotations

import pytest

from dynamo.runtime._routing.retry import RetryBudget, may_be_sent_again
from dynamo.runtime.errors import (
    CallError,
    CallTimeout,
    ConnectionFailed,
    HandlerRefused,
    InstanceNotFound,
    MessageTooLarge,
    Overloaded,
    Refused,
    RemoteError,
    StreamBroken,
    WorkerLost,
)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionFailed("Unavailable: no connection"),
        Overloaded("CapacityExhausted: full"),
        Refused("Unavailable: draining"),
        InstanceNotFound("Unavailable: not there"),
    ],
)
def test_what_certainly_did_not_run_may_be_sent_again(error: CallError):
    assert may_be_sent_again(error, idempotent=False)
    assert may_be_sent_again(error, idempotent=True)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionFailed("Unavailable: cut", phase="ack", retryable=False),
        WorkerLost("Unavailable: gone"),
        StreamBroken("Unavailable: broken"),
        CallTimeout("DeadlineExceeded: no ack"),
    ],
)
def test_what_may_have_run_needs_the_callers_word(error: CallError):
    assert not may_be_sent_again(error, idempotent=False)
    assert may_be_sent_again(error, idempotent=True)


@pytest.mark.parametrize(
    "error",
    [
        RemoteError("Internal: boom"),
        HandlerRefused("Unavailable: no generator"),
        MessageTooLarge("InvalidRequest: too large"),
        CallError("Invalid TCP address"),
    ],
)
def test_what_would_fail_elsewhere_too_is_never_sent_again(error: CallError):
    assert not may_be_sent_again(error, idempotent=True)


def taken(budget: RetryBudget, now: float) -> int:
    return sum(budget.take(now) for _ in range(1000))


def test_ten_a_second_without_any_calls():
    budget = RetryBudget(100.0)
    assert taken(budget, 100.0) == 10
    assert taken(budget, 100.0) == 0
    assert taken(budget, 100.5) == 5
    assert taken(budget, 102.5) == 20


def test_a_fifth_of_the_calls_besides():
    budget = RetryBudget(0.0)
    assert taken(budget, 0.0) == 10
    for _ in range(200):
        budget.deposit()
    assert taken(budget, 0.0) == 40


def test_in_a_steady_storm_the_share_is_kept():
    budget = RetryBudget(0.0)
    retried = 0
    for call in range(10_000):
        budget.deposit()
        retried += budget.take(call / 10_000)
    # A fifth, and what one second and the beginning allow.
    assert 2_000 <= retried <= 2_000 + 21


def test_what_is_not_used_does_not_pile_up():
    budget = RetryBudget(0.0)
    for _ in range(100_000):
        budget.deposit()
    assert taken(budget, 3600.0) == 100
