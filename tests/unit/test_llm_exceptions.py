from __future__ import annotations

import copy
import pickle

import pytest

from dynamo.llm import exceptions
from dynamo.llm.exceptions import HttpError
from dynamo.runtime import errors


def test_the_exceptions_are_those_of_the_runtime():
    others = [name for name in exceptions.__all__ if name != "HttpError"]
    assert len(others) == 12
    for name in others:
        cls = getattr(exceptions, name)
        assert cls is getattr(errors, name)
        assert cls.__module__ == "dynamo._core"
        assert cls is errors.DynamoException or cls.__bases__ == (
            errors.DynamoException,
        )


@pytest.mark.parametrize(("code", "message"), [(400, "m"), (599, ""), (0, "z")])
def test_http_error(code, message):
    error = HttpError(code, message)
    assert (error.code, error.message) == (code, message)
    assert str(error) == f"HTTP {code}: {message}"
    assert error.args == (str(error),)
    assert not isinstance(error, errors.DynamoException)


@pytest.mark.parametrize(
    "arguments", [(True, "m"), ("400", "m"), (600, "m"), (-1, "m"), (400, 5)]
)
def test_bad_arguments_are_value_errors(arguments):
    with pytest.raises(ValueError, match=r"HTTP|HttpError"):
        HttpError(*arguments)


def test_long_messages_are_cut_with_a_warning(caplog):
    assert HttpError(400, "x" * 8192).message == "x" * 8192
    assert not caplog.records
    assert HttpError(400, "x" * 8193).message == "x" * 8189 + "..."
    (record,) = caplog.records
    assert (record.levelname, record.name) == ("WARNING", "dynamo.llm.exceptions")


def test_http_errors_can_be_pickled_and_copied():
    error = HttpError(404, "gone")
    error.extra = 5
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (twin.code, twin.message, str(twin)) == (404, "gone", str(error))
        assert twin.extra == 5
