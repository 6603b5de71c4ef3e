"""The callbacks through which user code adds metrics of its own.

Keeps them; calling them is the job of whoever answers a scrape or exports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynamo.runtime._sealed import Unconstructible

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MetricsCallbacks", "RuntimeMetrics"]


class MetricsCallbacks:
    """What was registered for one endpoint, in order of registration.

    `expfmt` callbacks return text in the Prometheus exposition format, `typed` ones
    serve the OTLP export.  As in the genuine runtime nothing is checked when they are
    registered, so whoever calls them must expect anything.
    """

    __slots__ = ("expfmt", "typed")

    def __init__(self) -> None:
        self.expfmt: list[Callable[[], str]] = []
        self.typed: list[Callable[[], Any]] = []


class RuntimeMetrics(Unconstructible):
    """Adds an endpoint's own metrics to those of the runtime; see `Endpoint.metrics`.

    Example:
        >>> callbacks = MetricsCallbacks()
        >>> metrics = RuntimeMetrics._make(callbacks)
        >>> metrics.register_prometheus_expfmt_callback(lambda: "queue_length 3")
        >>> [callback() for callback in callbacks.expfmt]
        ['queue_length 3']
    """

    __slots__ = ("_callbacks",)

    _callbacks: MetricsCallbacks

    @classmethod
    def _make(cls, registry: MetricsCallbacks) -> RuntimeMetrics:
        self = cls.__new__(cls)
        self._callbacks = registry
        return self

    def register_prometheus_expfmt_callback(self, callback: Callable[[], str]) -> None:
        """Append what a callback returns to each scrape of `/metrics`.

        Args:
            callback: Returns metrics in the Prometheus text format.  It is called on
                each scrape, outside the event loop, and should return quickly.
        """
        self._callbacks.expfmt.append(callback)

    def register_prometheus_typed_callback(self, callback: Callable[[], Any]) -> None:
        """Offer metrics to the OTLP export.

        Args:
            callback: Returns the metrics; called on each export.
        """
        self._callbacks.typed.append(callback)
