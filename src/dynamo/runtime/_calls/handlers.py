"""How a user's callable is called for a request, and which callables cannot work.

Looks at signatures once, when an endpoint is served; runs nothing by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, Union

from dynamo.runtime._wire.payload import JsonLike

if TYPE_CHECKING:
    from dynamo.runtime._calls.context import Context
    from dynamo.runtime._calls.streams import ResponseSender


class _WithContext(Protocol):
    def __call__(
        self, request: Any, /, *, context: Context
    ) -> AsyncIterator[JsonLike] | Iterator[JsonLike]: ...


class _Pushing(Protocol):
    def __call__(
        self, request: Any, /, *, context: Context, response_sender: ResponseSender
    ) -> AsyncIterator[JsonLike]: ...


RequestHandler: TypeAlias = Union[  # noqa: UP007 - one per line
    Callable[[Any], AsyncIterator[JsonLike] | Iterator[JsonLike]],
    _WithContext,
    _Pushing,
]
"""What `Endpoint.serve_endpoint` and its kind take.

A function that is called with a request, of whatever type it expects, and that returns an
iterator of items: as a rule an (async) generator function.  It may have parameters
``context`` and, to push its items, also ``response_sender``.
"""


class ShapeError(Exception):
    """The callable cannot serve; ``cause`` is the error to answer with."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _StepsOnly:
    """An iterator for objects that have ``__anext__`` but do not return themselves."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __aiter__(self) -> _StepsOnly:
        return self

    def __anext__(self) -> Any:
        return self._source.__anext__()


class Handler:
    """A callable that answers requests with an async iterator.

    Args:
        function: What the user gave; anything.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.name = getattr(function, "__qualname__", None) or type(function).__name__
        self._refusal: ShapeError | None = None
        self._takes_context = False
        self.pushes = False
        self._look()

    def _look(self) -> None:
        if not callable(self.function):
            kind = type(self.function).__name__
            self._refusal = ShapeError(TypeError(f"'{kind}' object is not callable"))
            return
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):
            return
        self.pushes = "response_sender" in signature.parameters
        # A push-mode handler gets both, whether it asks for the context or not.
        self._takes_context = self.pushes or "context" in signature.parameters
        keywords = dict.fromkeys(["context"] if self._takes_context else [])
        if self.pushes:
            keywords["response_sender"] = None
        try:
            signature.bind(None, **keywords)
        except TypeError as error:
            self._refusal = ShapeError(TypeError(f"{self.name}() {error}"))

    def complaint(self) -> str | None:
        """Why calls will be refused, as far as it can be told without a call."""
        if self._refusal is not None:
            return str(self._refusal)
        call: Callable[..., Any] = self.function
        while hasattr(call, "func"):
            call = call.func
        if not inspect.isroutine(call) and not inspect.isclass(call):
            call = type(call).__call__
        if inspect.iscoroutinefunction(call):
            return "it is a coroutine function: use 'yield', not 'return'"
        if inspect.isgeneratorfunction(call):
            return "it is a plain generator function: use 'async def'"
        return None

    def call(
        self, request: object, context: Context, sender: ResponseSender
    ) -> AsyncIterator[Any]:
        """The iterator that answers a request.

        Args:
            request: The decoded request, or the stream of them.
            context: Passed on if the callable has a parameter of that name.
            sender: Passed on to a callable that pushes.

        Raises:
            ShapeError: the callable cannot serve, or returned no async iterator.
            BaseException: whatever the callable itself raised.
        """
        if self._refusal is not None:
            raise self._refusal
        if self.pushes:
            result = self.function(request, context=context, response_sender=sender)
        elif self._takes_context:
            result = self.function(request, context=context)
        else:
            result = self.function(request)
        if not hasattr(type(result), "__anext__"):
            if inspect.iscoroutine(result):
                result.close()
            kind = type(result).__name__
            raise ShapeError(
                AttributeError(f"'{kind}' object has no attribute '__anext__'")
            )
        if inspect.isasyncgen(result):
            return result
        return _StepsOnly(result)
