"""Never run: mypy and basedpyright check that the public types stay usable."""

from __future__ import annotations

from dynamo.runtime.errors import CallError, StreamError


def facts_of_an_error_are_typed(error: CallError) -> None:
    phase: str = error.phase
    retryable: bool = error.retryable
    retry_after: float | None = error.retry_after
    instance_id: int | None = error.instance_id
    facts: dict[str, object] = error.facts
    print(phase, retryable, retry_after, instance_id, facts)


def stream_errors_are_caught_as_value_errors(error: StreamError) -> ValueError:
    return error
