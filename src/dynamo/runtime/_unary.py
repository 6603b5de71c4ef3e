"""One request, one answer, over endpoints that stream.

Knows nothing of a client or an endpoint but the one method it calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

    from dynamo.runtime._calls.context import Context

__all__ = ["UnaryClient", "serve_unary_endpoint"]


class _CanCall(Protocol):
    def round_robin(
        self, request: Any, *, annotated: bool, context: Context | None
    ) -> Awaitable[AsyncIterator[Any]]: ...


class _CanServe(Protocol):
    def serve_endpoint(self, generator: Callable[..., Any]) -> Awaitable[object]: ...


class UnaryClient:
    """Calls endpoints that give exactly one answer.

    Args:
        client: A `Client`, or anything with such a `round_robin`.

    Example:
        >>> import asyncio
        >>> class Echo:
        ...     async def round_robin(self, request, *, annotated, context):
        ...         async def answers():
        ...             yield request
        ...         return answers()
        >>> asyncio.run(UnaryClient(Echo()).complete("hi"))
        'hi'
    """

    def __init__(self, client: _CanCall) -> None:
        self._client = client

    async def complete(
        self,
        request: Any,
        *,
        context: Context | None = None,
        timeout: float | None = None,
        idempotent: bool = False,
    ) -> Any:
        """Call the endpoint, round robin, and wait for its answer.

        Args:
            request: What to send.
            context: Id, metadata, deadline and cancellation of the call.
            timeout: Seconds in which the answer must have come, or None; as for
                `Client.random`.
            idempotent: The handler may see the request twice; see there.

        Returns:
            The one item of the response.

        Raises:
            RuntimeError: There was no item, or more than one.
            CallError: The call failed; the stream's own errors pass through as well.
        """
        options: dict[str, Any] = {}
        if timeout is not None:
            options["timeout"] = timeout
        if idempotent:
            options["idempotent"] = True
        # What was not asked for is not named: any client with such a method will do.
        call: Callable[..., Awaitable[AsyncIterator[Any]]] = self._client.round_robin
        stream = await call(request, annotated=False, context=context, **options)
        iterator = aiter(stream)
        try:
            return await _only_item(iterator)
        finally:
            if hasattr(iterator, "aclose"):
                await iterator.aclose()


async def _only_item(iterator: AsyncIterator[Any]) -> Any:
    try:
        item = await anext(iterator)
    except StopAsyncIteration as end:
        raise RuntimeError("unary endpoint returned no response") from end
    try:
        await anext(iterator)
    except StopAsyncIteration:
        return item
    raise RuntimeError("unary endpoint returned multiple responses")


async def serve_unary_endpoint(
    endpoint: _CanServe, handler: Callable[..., Awaitable[Any]]
) -> None:
    """Serve a coroutine function that gives one answer.

    Args:
        endpoint: The endpoint to serve.
        handler: Called as `handler(request, context=context)`; what it returns is the
            answer.  An answer of None counts as none.

    Returns:
        None, once the endpoint is no longer served.

    Example:
        >>> import asyncio
        >>> class Endpoint:
        ...     async def serve_endpoint(self, generator):
        ...         async for item in generator({"n": 1}, context=None):
        ...             print(item)
        >>> async def double(request, *, context):
        ...     return request["n"] * 2
        >>> asyncio.run(serve_unary_endpoint(Endpoint(), double))
        2
    """

    async def one_item(request: Any, context: Context) -> AsyncGenerator[Any, None]:
        yield await handler(request, context=context)

    # Log lines name the user's function, not this one.
    one_item.__qualname__ = getattr(handler, "__qualname__", type(handler).__name__)
    await endpoint.serve_endpoint(one_item)
