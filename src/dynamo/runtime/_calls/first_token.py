"""First tokens: who made one, told to whoever listens in this process.

Owns the binding of a request to a source.  When a first token is there is said by the
context: by the handler, or by the runtime at the first item with data.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, final

from dynamo.runtime._calls.context import Context
from dynamo.runtime._sealed import Unconstructible

if TYPE_CHECKING:
    from dynamo.runtime._calls.worker_type import WorkerType

_log = logging.getLogger("dynamo.runtime.ingress")

_MAX_DP_RANK = 2**32 - 1


class FirstToken(NamedTuple):
    """A request has its first token."""

    request_id: str
    worker_type: WorkerType
    dp_rank: int | None


@final
class FirstTokenSource(Unconstructible):
    """Tells when bound requests have their first token; from `Endpoint`.

    Example:
        In a handler of a decode worker::

            source.bind(context, dp_rank=0)
            ...
            context.notify_first_token()  # or simply yield the first item
    """

    __slots__ = ("_listeners", "_worker_type")

    _worker_type: WorkerType
    _listeners: list[Callable[[FirstToken], None]]

    @classmethod
    def _make(cls, worker_type: WorkerType) -> FirstTokenSource:
        self = cls.__new__(cls)
        self._worker_type = worker_type
        self._listeners = []
        return self

    def bind(self, context: Context, dp_rank: int | None = None) -> None:
        """Report the first token of a request, once.

        Args:
            context: The context of the request's handler.
            dp_rank: Which data-parallel rank works on it, or None.

        Raises:
            TypeError: an argument of the wrong type.
            OverflowError: a rank that is negative or over 32 bits.
        """
        if not isinstance(context, Context):
            raise TypeError(
                f"argument 'context': expected a Context, not {type(context).__name__}"
            )
        if dp_rank is not None:
            dp_rank = _checked(dp_rank)
        state = context._state
        told = FirstToken(state.id, self._worker_type, dp_rank)
        state.on_first_token(lambda: self._tell(told))

    def subscribe(self, listener: Callable[[FirstToken], None]) -> Callable[[], None]:
        """Have ``listener`` called for each first token, where it is noticed.

        What it raises is logged: it is no affair of the request.

        Returns:
            What ends the subscription.
        """
        self._listeners.append(listener)

        def unsubscribe() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return unsubscribe

    def _tell(self, first_token: FirstToken) -> None:
        for listener in list(self._listeners):
            _call(listener, first_token)


def _call(listener: Callable[[FirstToken], None], first_token: FirstToken) -> None:
    try:
        listener(first_token)
    except Exception:  # noqa: BLE001 - a listener may raise anything
        _log.exception(
            "a listener failed at the first token of request %s", first_token.request_id
        )


def _checked(dp_rank: Any) -> int:
    try:
        number = operator.index(dp_rank)
    except TypeError:
        raise TypeError(
            f"argument 'dp_rank': expected an int, not {type(dp_rank).__name__}"
        ) from None
    if not 0 <= number <= _MAX_DP_RANK:
        raise OverflowError(f"dp_rank {number} is not from 0 to {_MAX_DP_RANK}")
    return number
