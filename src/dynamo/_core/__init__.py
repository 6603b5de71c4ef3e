"""The names of the genuine, compiled module, for code that was written against it."""

from __future__ import annotations

from dynamo.runtime._calls.context import Context, ContextMetadata
from dynamo.runtime._calls.first_token import FirstTokenSource
from dynamo.runtime._calls.streams import (
    AsyncResponseStream,
    PyAsyncRequestStream,
    ResponseSender,
)
from dynamo.runtime._calls.worker_type import WorkerType
from dynamo.runtime._client import Client
from dynamo.runtime._discovery.instances import Instance, TransportType
from dynamo.runtime._endpoint import Endpoint
from dynamo.runtime._observability.metrics import RuntimeMetrics
from dynamo.runtime._observability.tracing import SpanProxy
from dynamo.runtime._routing.policies import RouterMode
from dynamo.runtime._runtime import DistributedRuntime
from dynamo.runtime.errors import (
    Cancelled,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoException,
    EngineShutdown,
    InvalidArgument,
    RouterQueueLimitExceeded,
    SelectionServiceError,
    StreamIncomplete,
    Unknown,
    WorkerUnavailable,
)
from dynamo.runtime.logging import log_message

__all__ = [
    "AsyncResponseStream",
    "Cancelled",
    "CannotConnect",
    "Client",
    "ConnectionTimeout",
    "Context",
    "ContextMetadata",
    "Disconnected",
    "DistributedRuntime",
    "DynamoException",
    "Endpoint",
    "EngineShutdown",
    "FirstTokenSource",
    "Instance",
    "InvalidArgument",
    "PyAsyncRequestStream",
    "ResponseSender",
    "RouterMode",
    "RouterQueueLimitExceeded",
    "RuntimeMetrics",
    "SelectionServiceError",
    "SpanProxy",
    "StreamIncomplete",
    "TransportType",
    "Unknown",
    "WorkerType",
    "WorkerUnavailable",
    "__version__",
    "log_message",
]

__version__ = "1.6.1"
"""The version of the genuine runtime whose API this is; see `dynamo.runtime` for ours."""
