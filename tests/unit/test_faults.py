"""Errors as they travel, beyond what the golden vectors show."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from dynamo.runtime import errors
from dynamo.runtime._wire import faults
from dynamo.runtime._wire.faults import (
    ErrorObject,
    error_of_exception,
    error_of_refusal,
    error_of_unsendable,
    exception_of_error,
    exception_of_prologue,
    inhibits,
    settled,
)


def backend(name: str) -> dict[str, str]:
    return {"Backend": name}


def read(**members: Any) -> ErrorObject:
    """An error object as a peer sent it."""
    return msgspec.convert(members, ErrorObject)


def raised(error: BaseException) -> str:
    """What the caller reads of an exception in the handler."""
    return str(exception_of_error(error_of_exception(error)))


class TestSettled:
    def test_consistent_error_is_as_sent(self) -> None:
        error = read(
            error_type=backend("Cancelled"),
            **{"class": "Cancelled"},
            reason="backend.cancelled",
            message="m",
        )
        assert settled(error) is error

    @pytest.mark.parametrize(
        ("error_type", "expected"),
        [
            ("InvalidArgument", ("InvalidRequest", "request.invalid_argument")),
            ("ResponseTimeout", ("DeadlineExceeded", "request.deadline_exceeded")),
            (backend("EngineShutdown"), ("Unavailable", "backend.engine_shutdown")),
            (backend("Martian"), ("Internal", "runtime.unclassified")),
            ({"Frontend": "Unknown"}, ("Internal", "runtime.unclassified")),
            ("Martian", ("Internal", "runtime.unclassified")),
        ],
    )
    @pytest.mark.parametrize(
        "rest", [{}, {"reason": "backend.unknown"}, {"class": "Internal"}]
    )
    def test_class_follows_from_the_type(
        self, error_type: Any, expected: tuple[str, str], rest: dict[str, str]
    ) -> None:
        error = settled(read(error_type=error_type, **rest))
        assert (error.error_class, error.reason) == expected

    @pytest.mark.parametrize(
        ("rest", "expected"),
        [
            ({"reason": "request.conflict"}, ("Conflict", "request.conflict")),
            ({"class": "NotFound"}, ("NotFound", "request.not_found")),
            ({"class": "Martian"}, ("Internal", "runtime.unclassified")),
            ({"reason": "martian"}, ("Internal", "runtime.unclassified")),
            ({}, ("Internal", "runtime.unclassified")),
        ],
    )
    def test_without_type_the_rest_counts(
        self, rest: dict[str, str], expected: tuple[str, str]
    ) -> None:
        error = settled(read(**rest))
        assert (error.error_class, error.reason) == expected

    @pytest.mark.parametrize("reason", ["backend.cancelled", "martian"])
    def test_contradiction_makes_it_internal_and_drops_the_public_part(
        self, reason: str
    ) -> None:
        sent = read(
            error_type=backend("InvalidArgument"),
            **{"class": "InvalidRequest"},
            reason=reason,
            diagnostic="d",
            public={"type": "message", "message": "p"},
        )
        error = settled(sent)
        assert (error.error_class, error.reason) == (
            "Internal",
            "runtime.invalid_error",
        )
        assert error.public is None
        assert str(exception_of_error(sent)) == "Internal: d"


class TestInhibits:
    @pytest.mark.parametrize(
        "error_type",
        [
            backend("EngineShutdown"),
            backend("StreamIncomplete"),
            "WorkerUnavailable",
            "CannotConnect",
            "Disconnected",
            "ConnectionTimeout",
        ],
    )
    def test_these_types_do(self, error_type: Any) -> None:
        assert inhibits(read(error_type=error_type))

    @pytest.mark.parametrize(
        "error_type",
        [
            None,
            "Unknown",
            "Unavailable",
            "ResourceExhausted",
            "Martian",
            backend("CannotConnect"),
            backend("Disconnected"),
            backend("ConnectionTimeout"),
            backend("ResponseTimeout"),
            backend("Unknown"),
            {},
        ],
    )
    def test_these_do_not(self, error_type: Any) -> None:
        assert not inhibits(read(error_type=error_type))

    def test_status_of_an_application_does_not(self) -> None:
        for code in (408, 504):
            assert not inhibits(error_of_exception(with_status(code)))
        assert not inhibits(read(error_type="ResponseTimeout"))

    def test_type_must_fit_the_rest(self) -> None:
        members = {"class": "Unavailable", "reason": "backend.engine_shutdown"}
        assert inhibits(read(error_type=backend("EngineShutdown"), **members))
        assert not inhibits(read(**members))
        other = {"class": "Cancelled", "reason": "backend.cancelled"}
        assert not inhibits(read(error_type=backend("EngineShutdown"), **other))
        wrong = {"class": "Unavailable", "reason": "backend.cancelled"}
        assert not inhibits(read(error_type=backend("EngineShutdown"), **wrong))

    def test_response_timeout_of_the_runtime_does(self) -> None:
        members = {"class": "DeadlineExceeded", "reason": "backend.response_timeout"}
        assert inhibits(read(error_type="ResponseTimeout", **members))

    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (errors.EngineShutdown("m"), True),
            (errors.StreamIncomplete("m"), True),
            (errors.WorkerUnavailable("m"), True),
            (GeneratorExit(), True),
            (errors.CannotConnect("m"), False),
            (errors.ConnectionTimeout("m"), False),
            (ConnectionError("m"), False),
            (TimeoutError("m"), False),
            (errors.NoInstances("Unavailable: m"), False),
            (errors.CallTimeout("DeadlineExceeded: m"), False),
        ],
    )
    def test_what_a_handler_raises(self, error: BaseException, expected: bool) -> None:
        assert inhibits(error_of_exception(error)) is expected


def with_status(code: int) -> Exception:
    error = Exception("other words")
    error.code, error.message = code, "m"  # type: ignore[attr-defined]
    return error


class TestErrorOfException:
    @pytest.mark.parametrize(
        ("codes", "expected"),
        [
            ([400, 402, 405, 407, 410, 412, 414, 416, 428, 430, 432, 498], "Invalid"),
            ([0, 200, 399, 500, 505, 528, 530, 999, 65535], "Internal"),
            ([413, 431], "PayloadTooLarge"),
            ([499], "Cancelled"),
        ],
    )
    def test_ranges_of_status_codes(self, codes: list[int], expected: str) -> None:
        for code in codes:
            error = error_of_exception(with_status(code))
            assert str(error.error_class).startswith(expected)

    @pytest.mark.parametrize("error_class", sorted(faults._FORM_OF_CLASS))
    def test_failure_of_a_call_passed_on_keeps_class_and_words(
        self, error_class: str
    ) -> None:
        error = error_of_exception(errors.CallError(f"{error_class}: the words: more"))
        assert settled(error) is error
        assert (error.error_class, error.words) == (error_class, "the words: more")
        assert not inhibits(error)
        again = raised(errors.RemoteError(f"{error_class}: ValueError: boom"))
        assert again == f"{error_class}: ValueError: boom"

    @pytest.mark.parametrize("text", ["no class", "Martian: words", ""])
    def test_failure_of_a_call_without_known_class(self, text: str) -> None:
        error = error_of_exception(errors.CallError(text))
        assert (error.error_class, error.words) == ("Internal", text)

    def test_public_message_passed_on_stays_public(self) -> None:
        first = exception_of_error(error_of_exception(errors.InvalidArgument("boom")))
        second = exception_of_error(error_of_exception(first))
        assert type(second) is errors.InvalidArgument
        assert str(second) == "boom"

    def test_asyncio_timeout_of_old_pythons(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class TimeoutError(Exception):  # noqa: A001 - as in Python 3.10
            pass

        TimeoutError.__qualname__ = "TimeoutError"
        monkeypatch.setattr("asyncio.exceptions.TimeoutError", TimeoutError)
        assert raised(TimeoutError("m")) == "DeadlineExceeded: TimeoutError: m"

    def test_program_without_asyncio(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(faults.sys.modules, "asyncio.exceptions")
        assert raised(RuntimeError("m")) == "Internal: RuntimeError: m"

    @pytest.mark.parametrize("character", ["x", "é", "€", "😀"])
    def test_long_text_is_cut_to_whole_characters(self, character: str) -> None:
        error = error_of_exception(errors.Unknown("ab" + character * 5000))
        text = error.words.encode()
        assert 4096 - 3 <= len(text) <= 4096
        assert text.endswith(character.encode() + b"...[truncated]")
        exact = error_of_exception(errors.Unknown("x" * 4096))
        assert exact.words == "x" * 4096


def test_unsendable_item_names_the_codec() -> None:
    text = "critical error: failed serializing Python response as "
    assert error_of_unsendable("why").words == text + "msgpack: why"
    assert error_of_unsendable("why \ud800", "json").words == text + "json: why " + (
        "\ufffd" * 3
    )
    assert str(exception_of_error(error_of_unsendable("why"))).startswith("Internal: ")


def test_refusal_has_text_and_object() -> None:
    text, error = error_of_refusal(errors.EngineShutdown("m"))
    assert text == "Generate Error: EngineShutdown: m"
    assert error == ErrorObject(
        "Unknown",
        "Internal",
        "runtime.unclassified",
        "EngineShutdown: m",
        "EngineShutdown: m",
    )


class TestExceptionOfError:
    @pytest.mark.parametrize(
        ("error", "remote_type"),
        [
            (ValueError("m"), "ValueError"),
            (TimeoutError("m"), "TimeoutError"),
            (BrokenPipeError("m"), "BrokenPipeError"),
            (asyncio.CancelledError("m"), "CancelledError"),
            (errors.Unknown("m"), None),
            (errors.Unknown("some words: m"), None),
            (GeneratorExit(), None),
        ],
    )
    def test_what_a_handler_raised_is_a_remote_error(
        self, error: BaseException, remote_type: str | None
    ) -> None:
        caught = exception_of_error(error_of_exception(error), instance_id=7)
        assert type(caught) is errors.RemoteError
        assert isinstance(caught, ValueError)
        # A handler's trouble with its peers is not this call's own.
        assert not isinstance(caught, (TimeoutError, ConnectionError))
        assert caught.instance_id == 7
        assert caught.remote_type == remote_type
        assert caught.phase == "stream"

    def test_remote_type_of_a_nested_class_is_its_own_name(self) -> None:
        error = read(error_type="Unknown", message="outer.<locals>.Inner: m")
        caught = exception_of_error(error)
        assert isinstance(caught, errors.RemoteError)
        assert caught.remote_type == "Inner"

    @pytest.mark.parametrize(
        ("members", "text"),
        [
            ({"diagnostic": "d", "message": "m"}, "Internal: d"),
            ({"message": "m"}, "Internal: m"),
            ({"diagnostic": ""}, "Internal: "),
            ({}, "Internal: runtime.unclassified"),
        ],
    )
    def test_words_come_from_the_best_text(
        self, members: dict[str, str], text: str
    ) -> None:
        assert str(exception_of_error(read(**members))) == text

    def test_words_of_an_empty_error(self) -> None:
        assert ErrorObject().words == "runtime.unclassified"

    @pytest.mark.parametrize(
        "public",
        [
            None,
            {},
            {"type": "size_limit", "message": "p"},
            {"type": "message"},
            {"type": "message", "message": 5},
        ],
    )
    def test_only_a_public_message_makes_it_invalid_argument(
        self, public: dict[str, Any] | None
    ) -> None:
        error = read(error_type=backend("InvalidArgument"), message="m", public=public)
        caught = exception_of_error(error)
        assert type(caught) is errors.RemoteError
        assert str(caught) == "InvalidRequest: m"

    def test_public_message_of_another_class_does_not(self) -> None:
        public = {"type": "message", "message": "p"}
        caught = exception_of_error(read(error_type="Unknown", public=public))
        assert type(caught) is errors.RemoteError


class TestExceptionOfPrologue:
    def test_failure_takes_the_instance_out(self) -> None:
        text, typed = error_of_refusal(ValueError("boom"))
        for given in (typed, None):
            error, inhibiting = exception_of_prologue(text, given, instance_id=7)
            assert type(error) is errors.HandlerRefused
            assert str(error) == (
                "Unavailable: Worker generate() failed before response stream: "
                "Generate Error: ValueError: boom"
            )
            assert error.instance_id == 7
            assert inhibiting

    def test_invalid_request_leaves_it_in(self) -> None:
        typed = error_of_exception(errors.InvalidArgument("boom"))
        error, inhibiting = exception_of_prologue("text", typed, instance_id=7)
        assert type(error) is errors.HandlerRefused
        assert str(error) == "InvalidRequest: boom"
        assert not inhibiting


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_program_passes_through_the_text_of_an_error(
    end: type[BaseException],
) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise end

    with pytest.raises(end):
        error_of_exception(Odd())
