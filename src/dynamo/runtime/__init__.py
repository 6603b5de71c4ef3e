"""Distributed runtime: named, streaming endpoints, served by many processes.

A worker serves the endpoints of a `DistributedRuntime`; a `Client` finds their instances
and calls one of them by a routing policy.  Importing this configures no logging and
starts nothing.
"""

from __future__ import annotations

from importlib.util import find_spec as _find_spec
from os.path import dirname as _dirname
from os.path import join as _join

from dynamo.runtime._calls.context import Context
from dynamo.runtime._calls.handlers import RequestHandler
from dynamo.runtime._calls.streams import PyAsyncRequestStream
from dynamo.runtime._client import Client
from dynamo.runtime._decorators import dynamo_endpoint, dynamo_worker
from dynamo.runtime._endpoint import Endpoint
from dynamo.runtime._runtime import DistributedRuntime
from dynamo.runtime._unary import UnaryClient, serve_unary_endpoint
from dynamo.runtime._version import __version__
from dynamo.runtime._wire.payload import JsonLike

__all__ = [
    "Client",
    "Context",
    "DistributedRuntime",
    "Endpoint",
    "JsonLike",
    "PyAsyncRequestStream",
    "RequestHandler",
    "UnaryClient",
    "__version__",
    "dynamo_endpoint",
    "dynamo_worker",
    "serve_unary_endpoint",
]


def _refuse_a_mixed_installation() -> None:
    """Both distributions own these modules, and pip lets one overwrite the other."""
    ours = _join(_dirname(_dirname(__file__)), "_core", "__init__.py")
    found = _find_spec("dynamo._core")
    if found is None or found.origin != ours:
        raise ImportError(
            f"dynamo.runtime is that of dynamo-runtime-py ({__file__}), but dynamo._core "
            f"is not ({found and found.origin}): dynamo-runtime-py and "
            "ai-dynamo-runtime cannot be installed together. Uninstall both, then "
            "install one: pip uninstall dynamo-runtime-py ai-dynamo-runtime"
        )


_refuse_a_mixed_installation()
