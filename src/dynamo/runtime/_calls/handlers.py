"""How a user's callable is called for a request, and which callables cannot work.

Looks at signatures once, when an endpoint is served; runs nothing by itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from types import AsyncGeneratorType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, Union

from dynamo.runtime._calls.threads import ThreadedGenerator
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

    async def aclose(self) -> None:
        close: Callable[[], Any] | None = getattr(self._source, "aclose", None)
        if close is not None:
            await close()


class Handler:
    """A callable that answers requests with an async iterator.

    Args:
        function: What the user gave; anything.
        streamed: Whether it is called with a stream of requests.

    Attributes:
        takes_context: It has a parameter of that name.
        pushes: It has a parameter ``response_sender``.
    """

    def __init__(self, function: Any, *, streamed: bool = False) -> None:
        self.function = function
        self.name = getattr(function, "__qualname__", None) or type(function).__name__
        self._refusal: ShapeError | None = None
        self.takes_context = False
        self.pushes = False
        self._threaded = False
        self._look()
        # A thread could neither wait for an asynchronous stream nor push.
        if not streamed and not self.pushes:
            self._threaded = inspect.isgeneratorfunction(self._code())

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
        self.takes_context = self.pushes or "context" in signature.parameters
        keywords = dict.fromkeys(["context"] if self.takes_context else [])
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
        code = self._code()
        if inspect.iscoroutinefunction(code):
            return "it is a coroutine function: use 'yield', not 'return'"
        if inspect.isgeneratorfunction(code) and not self._threaded:
            return "it is a plain generator function: use 'async def'"
        return None

    def _code(self) -> Callable[..., Any]:
        """The function that runs when the callable is called, as far as one can see."""
        code: Callable[..., Any] = self.function
        while isinstance(code, functools.partial):
            code = code.func
        if not inspect.isroutine(code) and not inspect.isclass(code):
            code = type(code).__call__
        return code

    def call(
        self,
        request: object,
        context: Context | None,
        sender: ResponseSender | None,
    ) -> AsyncIterator[Any]:
        """The iterator that answers a request.

        Args:
            request: The decoded request, or the stream of them.
            context: For a callable that ``takes_context``.
            sender: For a callable that ``pushes``.

        Raises:
            ShapeError: the callable cannot serve, or returned no async iterator.
            BaseException: whatever the callable itself raised.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._threaded:
            return self._in_thread(request, context)
        if self.pushes:
            result = self.function(request, context=context, response_sender=sender)
        elif self.takes_context:
            result = self.function(request, context=context)
        else:
            result = self.function(request)
        return result if type(result) is AsyncGeneratorType else _iterator(result)

    def _in_thread(self, request: object, context: Context | None) -> ThreadedGenerator:
        keywords = {"context": context} if self.takes_context else {}
        make = functools.partial(self.function, request, **keywords)
        return ThreadedGenerator(make, self.name)


def _iterator(result: Any) -> AsyncIterator[Any]:
    if not hasattr(type(result), "__anext__"):
        if inspect.iscoroutine(result):
            result.close()
        kind = type(result).__name__
        raise ShapeError(
            AttributeError(f"'{kind}' object has no attribute '__anext__'")
        )
    return _StepsOnly(result)
