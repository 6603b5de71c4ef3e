"""The exceptions: bases that existing code catches, facts that survive a pickle."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
from typing import Any

import pytest

from dynamo.runtime import errors
from dynamo.runtime.errors import CallError, DynamoException

ALL = [getattr(errors, name) for name in errors.__all__]
OF_CALLS = [kind for kind in ALL if issubclass(kind, CallError)]
FACTS: dict[str, Any] = {
    "phase": "ack",
    "retryable": True,
    "retry_after": 1.5,
    "instance_id": 7,
    "attempts": 3,
    "remote_type": "Odd",
    "remote_traceback": "Traceback ...",
    "facts": {"listed": 2},
}


def test_every_exception_is_exported():
    here = {
        name
        for name, kind in vars(errors).items()
        if not name.startswith("_")
        and inspect.isclass(kind)
        and issubclass(kind, BaseException)
    }
    assert here == set(errors.__all__)
    assert sorted(errors.__all__) == errors.__all__


@pytest.mark.parametrize("kind", ALL)
def test_everything_is_a_dynamo_exception_and_no_cancellation(kind: type):
    assert issubclass(kind, DynamoException)
    assert not issubclass(kind, asyncio.CancelledError)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("copied", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_a_copy_has_class_and_arguments(kind: type[Exception], copied: Any):
    made = copied(kind("Unavailable: two words"))
    assert type(made) is kind
    assert made.args == ("Unavailable: two words",)
    assert str(made) == "Unavailable: two words"


@pytest.mark.parametrize("kind", OF_CALLS)
@pytest.mark.parametrize("copied", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_a_copy_of_a_call_error_has_its_facts(kind: type[CallError], copied: Any):
    made = copied(kind("Unavailable: gone", **FACTS))
    assert {name: getattr(made, name) for name in FACTS} == FACTS
    assert made.error_class == "Unavailable"


@pytest.mark.parametrize("kind", OF_CALLS)
def test_facts_have_defaults_and_are_given_by_name(kind: type[CallError]):
    made = kind()
    assert str(made) == ""
    assert made.error_class == ""
    assert made.facts == {}
    assert made.retry_after is made.instance_id is made.remote_type is None
    # A second positional argument is one of the exception's, as anywhere in Python,
    # and does not become an errno where the class is a ConnectionError.
    assert kind("a", "b").args == ("a", "b")


def test_facts_of_two_errors_are_not_shared():
    one, two = CallError("a"), CallError("b")
    one.facts["x"] = 1
    assert two.facts == {}


@pytest.mark.parametrize(
    ("text", "error_class"),
    [
        ("Unavailable: gone", "Unavailable"),
        ("Internal: KeyError: 'x'", "Internal"),
        ("no class at all", ""),
        ("two words: no class", ""),
        ("Invalid TCP address 'X': syntax", ""),
        ("", ""),
    ],
)
def test_the_class_word_of_a_text(text: str, error_class: str):
    assert CallError(text).error_class == error_class


@pytest.mark.parametrize(
    ("kind", "bases"),
    [
        (errors.NoInstancesInTime, (errors.NoInstances, TimeoutError)),
        (errors.ConnectionFailed, (CallError, ConnectionError)),
        (errors.WorkerLost, (CallError, ConnectionError)),
        (errors.CallTimeout, (CallError, TimeoutError)),
        (errors.StreamError, (CallError, ValueError)),
        (errors.RemoteError, (errors.StreamError,)),
        (errors.StreamBroken, (errors.StreamError, ConnectionError)),
    ],
)
def test_bases_that_except_clauses_rely_on(kind: type, bases: tuple[type, ...]):
    assert kind.__bases__ == bases


@pytest.mark.parametrize("kind", [errors.RemoteError, errors.HandlerRefused])
def test_a_handlers_trouble_with_others_is_not_ours(kind: type):
    assert not issubclass(kind, (TimeoutError, ConnectionError))


@pytest.mark.parametrize(
    "kind",
    [
        errors.NoInstances,
        errors.InstanceNotFound,
        errors.ConnectionFailed,
        errors.Overloaded,
        errors.Refused,
    ],
)
def test_what_certainly_did_not_run_may_be_tried_again(kind: type[CallError]):
    assert kind("x").retryable is True


@pytest.mark.parametrize(
    "kind",
    [
        errors.WorkerLost,
        errors.CallTimeout,
        errors.HandlerRefused,
        errors.MessageTooLarge,
        errors.RemoteError,
        errors.StreamBroken,
    ],
)
def test_what_may_have_run_or_will_never_work_is_not(kind: type[CallError]):
    assert kind("x").retryable is False


def test_the_genuine_classes_have_their_genuine_module_and_base():
    genuine = [kind for kind in ALL if kind.__module__ == "dynamo._core"]
    assert len(genuine) == 12
    for kind in genuine:
        base = Exception if kind is DynamoException else DynamoException
        assert kind.__bases__ == (base,)
