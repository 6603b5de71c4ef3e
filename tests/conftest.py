"""What holds for every test: which copy is imported, loops, guards, skip rules.

* ``dynamo.runtime`` must come from this tree: an installed genuine wheel would win
  without a word.
* Each async test runs on asyncio and, where it exists, on uvloop.
* Code of ours may not block the event loop (mark ``may_block`` where that is meant)
  and may not leave tasks or threads behind (``may_leave``).
* Variables of the user's shell that would steer the runtime are removed.
* ``DYN_TESTS_FORBID_SKIPS=1`` turns every skip into a failure.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import hypothesis
import pytest
from blockbuster import BlockBuster

import dynamo.runtime

try:
    import uvloop
except ImportError:  # not made for Windows
    uvloop = None

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "dynamo" / "runtime"
if {Path(entry).resolve() for entry in dynamo.runtime.__path__} != {SOURCE}:
    raise RuntimeError(
        f"dynamo.runtime was imported from {list(dynamo.runtime.__path__)} instead of "
        f"{SOURCE}: uninstall the other copy (ai-dynamo-runtime?) from this environment"
    )

OURS_TO_KEEP = ("DYN_TEST", "DYN_GENUINE_PYTHON", "DYN_CONFORMANCE_DIR")
SKIPS_FORBIDDEN = os.environ.get("DYN_TESTS_FORBID_SKIPS") == "1"
SCALE = float(os.environ.get("DYN_TEST_SCALE", "1"))
SLOW_LIMIT_S = 120
# The time of one example says how busy the machine is; the limit is that of the test.
hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")
LEAVING_LIMIT_S = 5
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell does that to what it runs in the background, and children inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Debian keeps servers in a folder that is not on every user's PATH.
PROGRAM_PATH = os.pathsep.join(
    [os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin"]
)


def program(name: str) -> str | None:
    return shutil.which(name, path=PROGRAM_PATH)


def genuine_interpreter() -> str | None:
    named = os.environ.get("DYN_GENUINE_PYTHON", "")
    return shutil.which(named) if named else None


NEEDS: dict[str, tuple[Callable[[], str | None], str]] = {
    "etcd": (lambda: program("etcd"), "no program etcd (Debian: etcd-server)"),
    "nats": (lambda: program("nats-server"), "no program nats-server"),
    "interop": (
        genuine_interpreter,
        "DYN_GENUINE_PYTHON names no interpreter (./run-tests sets the wheel up)",
    ),
}


# ------------------------------------------------------------------ skips and limits


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {marker: why for marker, (find, why) in NEEDS.items() if find() is None}
    for item in items:
        for marker, why in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"{marker}: {why}"))
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S * SCALE))
    # One process is busy with it while the others go on.
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if SKIPS_FORBIDDEN and report.skipped and not hasattr(report, "wasxfail"):
        where = report.longrepr
        reason = where[2] if isinstance(where, tuple) else str(where)
        report.outcome = "failed"
        report.longrepr = f"DYN_TESTS_FORBID_SKIPS=1, but {report.nodeid}: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    report = yield
    _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    report = yield
    _forbid_skip(report)
    return report


# -------------------------------------------------------------------- event loops


def pytest_asyncio_loop_factories() -> Mapping[
    str, Callable[[], asyncio.AbstractEventLoop]
]:
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
        "asyncio": asyncio.new_event_loop
    }
    if uvloop is not None:
        factories["uvloop"] = uvloop.new_event_loop
    return factories


LANES = {"local": "all", "duplex": "duplex", "callhome": "callhome"}


@pytest.fixture(params=LANES)
def each_lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """``DYN_RUNTIME_LANES`` of the runtimes that the test makes; its name is the lane.

    Between processes "local" is "duplex" once more.

    For tests of what holds on every lane; those that need one of them name it::

        @pytest.mark.parametrize("each_lane", ["callhome"], indirect=True)
    """
    lanes = LANES[request.param]
    monkeypatch.setenv("DYN_RUNTIME_LANES", lanes)
    return lanes


# ------------------------------------------------------------------------- guards


@pytest.fixture(autouse=True, scope="session")
def _clean_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            steers = name.startswith(("DYN_", "ETCD_", "NATS_", "OTEL_", "VLLM_"))
            if steers and not name.startswith(OURS_TO_KEEP):
                patch.delenv(name)
        yield


@pytest.fixture(autouse=True, scope="session")
def _blockbuster() -> Iterator[BlockBuster]:
    # What runs there is the test itself.
    guard = BlockBuster("dynamo.runtime", excluded_modules=["dynamo.runtime.testing"])
    for function in guard.functions.values():
        # The liveness thread has a loop of its own, made for blocking file I/O.
        function.can_block_in("_discovery/liveness.py", "_run")
        # Connecting a datagram socket sends nothing.
        function.can_block_in("runtime/_config.py", "_routable_address")
    guard.activate()
    yield guard
    guard.deactivate()


@pytest.fixture(autouse=True)
def _blocking_guard(
    request: pytest.FixtureRequest, _blockbuster: BlockBuster
) -> Iterator[None]:
    if request.node.get_closest_marker("may_block") is None:
        yield
        return
    _blockbuster.deactivate()
    yield
    _blockbuster.activate()


def _threads_of_ours() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name.startswith("dynamo")}


@pytest.fixture(autouse=True)
def _no_leftovers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves tasks on its loop or threads of the runtime behind."""
    if request.node.get_closest_marker("may_leave") is not None:
        yield
        return
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("_no_tasks_left")
    before = _threads_of_ours()
    yield
    left = _threads_of_ours() - before
    for thread in left:
        thread.join(LEAVING_LIMIT_S)
    alive = sorted(thread.name for thread in left if thread.is_alive())
    assert not alive, f"threads left behind: {alive}"


@pytest.fixture
async def _no_tasks_left() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:  # what is being cancelled may need a few turns of the loop
        _, left = await asyncio.wait(left, timeout=LEAVING_LIMIT_S)
    assert not left, f"tasks left behind: {[repr(task) for task in left]}"


# ---------------------------------------------------------- what tests may ask for


@pytest.fixture(scope="session")
def scale() -> float:
    """Factor for the amount of work in long forms; 1 in CI (``DYN_TEST_SCALE``)."""
    return SCALE


def _found(marker: str) -> str:
    find, why = NEEDS[marker]
    found = find()
    if found is None:
        pytest.skip(f"{marker}: {why}")
    return found


@pytest.fixture(scope="session")
def etcd_program() -> str:
    """Path of the etcd server; for tests marked ``etcd``."""
    return _found("etcd")


@pytest.fixture(scope="session")
def nats_program() -> str:
    """Path of the NATS server; for tests marked ``nats``."""
    return _found("nats")


@pytest.fixture(scope="session")
def genuine_python() -> str:
    """Interpreter that has the genuine wheel; for tests marked ``interop``."""
    return _found("interop")
