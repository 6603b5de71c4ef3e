"""The decorators around handlers and workers.

pydantic is never imported here: who hands in a model has imported it already.
"""

from __future__ import annotations

import json
import sys
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

__all__ = ["dynamo_endpoint"]

_Item = TypeVar("_Item")


def dynamo_endpoint(
    request_model: type[Any], response_model: type[Any]
) -> Callable[
    [Callable[..., AsyncIterator[_Item]]], Callable[..., AsyncGenerator[_Item, None]]
]:
    """Hand a handler its request as a pydantic model.

    The last of one or two positional arguments (with two, the first is `self`) is the
    request: a dict is validated as it is, a text as JSON.  Everything happens at the
    first step of the handler, so that a wrong request is an error of that call.

    Args:
        request_model: Subclass of `pydantic.BaseModel`; with any other class requests
            are passed on as they are.
        response_model: What the handler yields; not checked.

    Returns:
        A decorator for async generator functions.

    Raises:
        ValueError: At the first step: the request does not fit the model.
        TypeError: At the first step: the model is no class.

    Example:
        >>> import asyncio
        >>> from pydantic import BaseModel
        >>> class Ask(BaseModel):
        ...     count: int
        >>> @dynamo_endpoint(Ask, int)
        ... async def numbers(request):
        ...     for number in range(request.count):
        ...         yield number
        >>> async def main():
        ...     return [item async for item in numbers({"count": 3})]
        >>> asyncio.run(main())
        [0, 1, 2]
    """

    def decorate(
        handler: Callable[..., AsyncIterator[_Item]],
    ) -> Callable[..., AsyncGenerator[_Item, None]]:
        @wraps(handler)
        async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[_Item, None]:
            if len(args) in (1, 2) and _is_pydantic_model(request_model):
                args = (*args[:-1], _parse_request(request_model, args[-1]))
            stream = handler(*args, **kwargs)
            try:
                async for item in stream:
                    try:
                        yield item
                    except _validation_errors() as error:
                        raise ValueError(f"Invalid response: {error}") from error
            finally:
                # Leaving an `async for` does not close what it iterates over.
                if hasattr(stream, "aclose"):
                    await stream.aclose()

        return wrapper

    return decorate


def _is_pydantic_model(model: object) -> bool:
    if not isinstance(model, type):
        raise TypeError(
            f"dynamo_endpoint needs a class as request_model, not {model!r}"
        )
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and issubclass(model, pydantic.BaseModel)


def _validation_errors() -> tuple[type[Exception], ...]:
    pydantic = sys.modules.get("pydantic")
    return () if pydantic is None else (pydantic.ValidationError,)


def _parse_request(model: Any, payload: object) -> Any:
    if not isinstance(payload, (dict, str)):
        raise ValueError(f"Invalid request: {payload}")
    try:
        if isinstance(payload, str):
            payload = json.loads(payload)
        return model.model_validate(payload)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"Invalid request: {error}") from error
