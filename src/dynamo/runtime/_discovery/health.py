"""The health of one endpoint's instances as this runtime saw it, shared by its clients.

Drives `_routing.ejection`: gives it the time, tries connections for it, and forgets what
was held against an instance when its record changes.  What it means to try a connection
is handed in.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from contextvars import Context
from typing import TYPE_CHECKING

from dynamo.runtime._routing.ejection import EjectionPolicy, Ejections, Failure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from dynamo.runtime._discovery.instances import InstanceSet
    from dynamo.runtime._wire.records import EndpointRecord

    Probe = Callable[[EndpointRecord], Awaitable[bool]]

_log = logging.getLogger("dynamo.runtime.health")

# A probe that hangs must not keep a healthy instance out for longer.
_PROBE_LIMIT_S = 5.0


class Health:
    """Which of the listed instances may be called.

    Belongs to the loop of the instances.  Timers and probes hold it weakly: dropping the
    last reference ends them, in whatever thread that happens.

    Args:
        loop: That loop.
        instances: The live view of the endpoint.
        probe: Whether an instance can be connected to.
        policy: When instances are ejected, and for how long.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        instances: InstanceSet,
        probe: Probe,
        policy: EjectionPolicy,
    ) -> None:
        # First what the finalizer needs.
        self._probes: dict[int, asyncio.Task[None]] = {}
        self._loop = loop
        self._instances = instances
        self._probe = probe
        self._ejections = Ejections(policy)
        self.troubled = self._ejections.troubled
        """Empty as long as all is well: look here before telling of a success."""
        # Whose failures are remembered: another record starts with a clean slate.
        self._records: dict[int, EndpointRecord] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._usable: tuple[EndpointRecord, ...] = ()
        self._usable_of: tuple[EndpointRecord, ...] | None = None
        self._over_limit = False

    # Who may be called

    @property
    def usable(self) -> tuple[EndpointRecord, ...]:
        """The listed instances that are not ejected, ordered by id."""
        listed = self._instances.records
        if self._usable_of is not listed:
            self._forget_changed()
            self._usable_of = listed
            self._usable = self.without_ejected(listed)
        return self._usable

    def without_ejected(
        self, candidates: Sequence[EndpointRecord]
    ) -> tuple[EndpointRecord, ...]:
        """Those of some listed instances that are not ejected.

        Never leaves out more than half of all that are listed, nor the last candidate:
        many failures at a time are as a rule our own, or a sign of too much load, of
        which those that are left would get even more.
        """
        if not self.troubled:
            return tuple(candidates)
        most = min(len(self._instances.records) // 2, len(candidates) - 1)
        numbers = [one.instance_id for one in candidates]
        out = self._ejections.left_out(numbers, most)
        return tuple(one for one in candidates if one.instance_id not in out)

    def reason(self, instance_id: int) -> str:
        """Why an instance is ejected; nothing if it is not."""
        return self._ejections.reason(instance_id)

    # What calls report

    def failed(self, instance_id: int, failure: Failure) -> None:
        """A call saw an instance fail."""
        record = self._instances.get(instance_id)
        if record is None or self._instances.closed:
            return
        self._forget_changed()
        self._records[instance_id] = record
        before = self._ejections.times(instance_id)
        if self._ejections.failed(instance_id, failure, self._loop.time()):
            self._tell_ejected(instance_id, before)
            self._changed()

    def answered(self, instance_id: int) -> None:
        """An instance acknowledged a call and started its handler."""
        if self._ejections.answered(instance_id):
            self._changed()

    def completed(self, instance_id: int) -> None:
        """A stream of an instance came to its end."""
        if self._ejections.completed(instance_id):
            self._changed()

    def chosen(self, instance_id: int) -> None:
        """A call goes to an instance."""
        if self._ejections.chosen(instance_id, self._loop.time()):
            self._changed()

    def let_go(self, instance_id: int) -> None:
        """A call to an instance ended, whatever way."""
        if self._ejections.let_go(instance_id):
            self._changed()

    # Driving

    def _forget_changed(self) -> None:
        """Instances that left, changed or registered again belong to the past."""
        for number, record in list(self._records.items()):
            if self._instances.get(number) is not record:
                del self._records[number]
                self._end_probe(number)
                self._ejections.forget(number)

    def _end_probe(self, instance_id: int) -> None:
        probing = self._probes.pop(instance_id, None)
        if probing is not None:
            probing.cancel()

    def _changed(self) -> None:
        self._usable_of = None
        self._drive()
        self._tell_over_limit()
        self._instances.announce()

    def _drive(self) -> None:
        """Try the connections that are due, and come back for the next ones."""
        if self._instances.closed:
            return  # by `aclose` too, though calls go on to report
        for instance_id in self._ejections.due(self._loop.time()):
            record = self._records[instance_id]
            self._end_probe(instance_id)
            probing = _probing(weakref.ref(self), self._probe, record)
            # The task outlives the call that reported a failure: no part of its context.
            task = Context().run(self._loop.create_task, probing)
            self._probes[instance_id] = task
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_due = self._ejections.next_due()
        if next_due is not None:
            self._timer = self._loop.call_at(
                next_due, _on_time, weakref.ref(self), context=Context()
            )

    def on_time(self) -> None:
        """Something is due; for the timer alone."""
        self._timer = None
        self._forget_changed()
        self._changed()

    def probed(self, record: EndpointRecord, *, well: bool) -> None:
        """A probe has its answer; for the probe alone."""
        number = record.instance_id
        self._probes.pop(number, None)
        before = self._ejections.times(number)
        if self._ejections.probed(number, well=well, now=self._loop.time()):
            self._tell_ejected(number, before)
            self._changed()

    # Log lines

    def _tell_ejected(self, instance_id: int, times_before: int) -> None:
        if not times_before and self._ejections.times(instance_id):
            _log.info(
                "instance %d of %s is ejected, that is not called for a while: %s",
                instance_id,
                self._instances.name,
                self._ejections.reason(instance_id),
            )

    def _tell_over_limit(self) -> None:
        listed = self._instances.records
        failing = [one for one in listed if self.reason(one.instance_id)]
        over = len(failing) > len(listed) // 2
        if over and not self._over_limit and len(listed) > 1:
            _log.warning(
                "%d of %d instances of %s fail; half of them are called all the same "
                "(the last failure: %s)",
                len(failing),
                len(listed),
                self._instances.name,
                self.reason(failing[-1].instance_id),
            )
        self._over_limit = over

    # The end

    async def aclose(self) -> None:
        """End the timer and the probes, and wait until they have ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        probes = list(self._probes.values())
        for task in probes:
            task.cancel()
        if probes:
            await asyncio.wait(probes, timeout=_PROBE_LIMIT_S)

    def __del__(self) -> None:
        # In any thread, perhaps without a loop: no lock, no waiting.
        tasks = list(self._probes.values())
        if tasks and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(_cancel, tasks)
            except RuntimeError:
                # Closed in this very moment, and the tasks with it.
                return


def _on_time(reference: weakref.ref[Health]) -> None:
    health = reference()
    if health is not None:
        health.on_time()


async def _probing(
    reference: weakref.ref[Health], probe: Probe, record: EndpointRecord
) -> None:
    """Holds nothing that could not be dropped meanwhile."""
    well = await _ask(probe, record)
    health = reference()
    if health is not None:
        health.probed(record, well=well)


async def _ask(probe: Probe, record: EndpointRecord) -> bool:
    try:
        return await asyncio.wait_for(probe(record), _PROBE_LIMIT_S)
    except (OSError, asyncio.TimeoutError) as error:
        _log.debug("probe of instance %d failed: %r", record.instance_id, error)
    except Exception:  # noqa: BLE001 - a faulty probe must not end the probing
        _log.exception("the probe of instance %d raised", record.instance_id)
    return False


def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
