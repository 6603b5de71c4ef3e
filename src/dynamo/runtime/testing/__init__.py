"""Tests of services: a cluster in one event loop, faults on demand, time that jumps.

For the tests of programs that use `dynamo.runtime`; the runtime itself never imports it.
`Cluster` starts workers and clients without ports or files, a `Worker` can be killed,
frozen, overloaded and cut off from discovery, a `FaultProxy` does to connections what
networks do, and on a `VirtualTimeLoop` time limits cost no time.  Fixtures for pytest are
in `dynamo.runtime.testing.pytest_plugin`.  ``docs/how-to/test-your-service.md`` shows a
worked example.
"""

from __future__ import annotations

from dynamo.runtime.testing._cluster import Cluster, Worker
from dynamo.runtime.testing._recording import RecordedCall
from dynamo.runtime.testing._relay import Cut, FaultProxy, Pace
from dynamo.runtime.testing._virtual_time import (
    VirtualTimeLoop,
    in_virtual_time,
    run_in_virtual_time,
)
from dynamo.runtime.testing._waiting import until

__all__ = [
    "Cluster",
    "Cut",
    "FaultProxy",
    "Pace",
    "RecordedCall",
    "VirtualTimeLoop",
    "Worker",
    "in_virtual_time",
    "run_in_virtual_time",
    "until",
]
