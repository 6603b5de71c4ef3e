"""Places and turns of requests at a worker."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.runtime._calls.admission import Admission, EndpointAdmission
from dynamo.runtime._transports import Rejection

LIMIT_S = 5.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_reservations_end_at_running_plus_waiting_plus_one():
    admission = Admission(2, 1)
    full = Rejection("Server overloaded: worker at capacity", 1.0)
    assert [admission.reserve() for _ in range(5)] == [None] * 4 + [full]
    admission.release(ran=False)
    assert admission.reserve() is None
    assert admission.reserve() == full


async def test_turns_come_in_the_order_of_arrival():
    admission = Admission(1, 10)
    order: list[int] = []

    async def work(number: int) -> None:
        assert admission.reserve() is None
        await admission.run()
        order.append(number)
        await asyncio.sleep(0)
        admission.release(ran=True)

    await asyncio.gather(*(work(number) for number in range(5)))
    assert order == [0, 1, 2, 3, 4]
    assert (admission._reserved, admission._running) == (0, 0)


async def test_a_request_that_leaves_the_queue_leaves_nothing():
    admission = Admission(1, 3)
    admission.reserve()
    await admission.run()
    steady = asyncio.create_task(admission.run())
    await asyncio.sleep(0)
    for _ in range(1000):
        gone = asyncio.create_task(admission.run())
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait((gone,))
    assert len(admission._waiting) == 1
    admission.release(ran=True)
    await asyncio.wait_for(steady, LIMIT_S)


async def test_a_turn_that_comes_in_the_moment_of_a_cancellation_is_passed_on():
    admission = Admission(1, 3)
    admission.reserve()
    await admission.run()
    gone, steady = (asyncio.create_task(admission.run()) for _ in range(2))
    await asyncio.sleep(0)
    admission.release(ran=True)
    gone.cancel()
    await asyncio.wait_for(steady, LIMIT_S)
    assert gone.cancelled()
    assert admission._running == 1


# ------------------------------------------------------------------ of one endpoint


def endpoint(
    running: int, waiting: int, worker: Admission | None = None
) -> tuple[EndpointAdmission, Admission, Clock]:
    clock = Clock()
    worker = worker or Admission(100, 100)
    return EndpointAdmission(running, waiting, worker, clock), worker, clock


def test_a_line_of_refusals_says_whose_places_are_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Admission(2, 0)
    endpoint = EndpointAdmission(1, 0, worker, path="1/ns/comp/gen")
    assert endpoint.reserve() is None
    assert endpoint.reserve() is not None
    assert caplog.messages[-1].startswith("endpoint 1/ns/comp/gen full, requests")
    assert worker.reserve_all() > 0
    assert worker.reserve() is not None
    assert caplog.messages[-1].startswith("worker full, requests refused: 1")


def counts(*admissions: Admission) -> list[tuple[int, int, int]]:
    return [(one._reserved, one._running, len(one._waiting)) for one in admissions]


def pause_s(admission: EndpointAdmission) -> float:
    rejection = admission.reserve()
    assert rejection is not None
    assert rejection.retry_after_s is not None
    return rejection.retry_after_s


def test_an_endpoint_holds_exactly_as_many_as_it_was_told() -> None:
    admission, worker, _ = endpoint(2, 0)
    assert [admission.reserve() for _ in range(2)] == [None, None]
    rejection = admission.reserve()
    assert rejection is not None
    assert rejection.text == (
        "Server overloaded: 2 run and 0 wait at this endpoint (max_concurrent_requests "
        "and max_queued_requests of serve_endpoint)"
    )
    assert counts(worker) == [(2, 0, 0)]


def test_a_full_worker_refuses_what_the_endpoint_would_take() -> None:
    admission, worker, _ = endpoint(50, 50, Admission(1, 1))
    assert [admission.reserve() for _ in range(3)] == [None] * 3
    assert admission.reserve() == Rejection("Server overloaded: worker at capacity", 1)
    assert counts(admission, worker) == [(3, 0, 0), (3, 0, 0)]


async def test_a_turn_of_the_endpoint_waits_for_one_of_the_worker() -> None:
    worker = Admission(1, 5)
    worker.reserve()
    await worker.run()
    admission, _, _ = endpoint(1, 5, worker)
    tasks = []
    for _ in range(3):
        assert admission.reserve() is None
        tasks.append(asyncio.create_task(admission.run()))
    await asyncio.sleep(0)
    assert counts(admission, worker) == [(3, 1, 2), (4, 1, 1)]
    # The first gives up while it waits for the worker: the next one does instead.
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    admission.release(ran=False)
    await asyncio.sleep(0)
    assert counts(admission, worker) == [(2, 1, 1), (3, 1, 1)]
    worker.release(ran=True)
    await asyncio.wait_for(tasks[1], LIMIT_S)
    admission.release(ran=True)
    await asyncio.wait_for(tasks[2], LIMIT_S)
    admission.release(ran=True)
    assert counts(admission, worker) == [(0, 0, 0), (0, 0, 0)]


async def take(admission: EndpointAdmission, count: int) -> list[asyncio.Task[None]]:
    tasks = []
    for _ in range(count):
        assert admission.reserve() is None
        tasks.append(asyncio.create_task(admission.run()))
    await asyncio.sleep(0)
    return tasks


async def test_a_refusal_says_when_half_the_queue_has_had_its_turn() -> None:
    admission, _, clock = endpoint(2, 10)
    tasks = await take(admission, 12)
    assert pause_s(admission) == 0.1, "nothing is known yet"
    for _ in range(200):
        clock.now_s += 0.05
        admission.release(ran=True)
        tasks += await take(admission, 1)
    assert pause_s(admission) == pytest.approx(5 * 0.05)
    # Slower from now on.
    for _ in range(100):
        clock.now_s += 0.2
        admission.release(ran=True)
        tasks += await take(admission, 1)
    assert pause_s(admission) == pytest.approx(5 * 0.2, rel=0.01)
    for _ in range(12):
        admission.release(ran=True)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert counts(admission) == [(0, 0, 0)]


@pytest.mark.parametrize(("step_s", "expected"), [(1e-9, 0.001), (1e6, 5.0)])
async def test_the_pause_has_bounds(step_s: float, expected: float) -> None:
    admission, _, clock = endpoint(1, 1)
    tasks = await take(admission, 2)
    for _ in range(3):
        clock.now_s += step_s
        admission.release(ran=True)
        tasks += await take(admission, 1)
    assert pause_s(admission) == expected
    for _ in range(2):
        admission.release(ran=True)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)


async def test_idle_times_say_nothing_about_the_pace() -> None:
    admission, _, clock = endpoint(1, 0)
    for _ in range(10):
        (task,) = await take(admission, 1)
        await task
        clock.now_s += 3600
        admission.release(ran=True)
    (task,) = await take(admission, 1)
    assert pause_s(admission) == 0.1
    admission.release(ran=True)
    await task


@given(
    st.integers(1, 3),
    st.integers(0, 3),
    st.lists(st.tuples(st.sampled_from("nncce"), st.integers(0, 9)), max_size=40),
)
def test_whatever_comes_and_goes_all_places_are_free_in_the_end(
    running: int, waiting: int, steps: list[tuple[str, int]]
) -> None:
    """New requests, callers that leave, requests that end, in any order."""

    async def play() -> None:
        admission, worker, _ = endpoint(running, waiting, Admission(2, 2))
        tasks: list[asyncio.Task[None]] = []

        async def leave(task: asyncio.Task[None], cancel: bool) -> None:
            if cancel:
                task.cancel()
                await asyncio.wait((task,))
            admission.release(ran=task.done() and not task.cancelled())

        for kind, which in steps:
            if kind == "n" and admission.reserve() is None:
                tasks.append(asyncio.create_task(admission.run()))
            elif tasks and kind == "c":
                await leave(tasks.pop(which % len(tasks)), cancel=True)
            elif kind == "e":
                done = [one for one in tasks if one.done()]
                if done:
                    tasks.remove(done[which % len(done)])
                    await leave(done[which % len(done)], cancel=False)
            await asyncio.sleep(0)
            assert admission._running <= running
            assert worker._running <= 2
        while tasks:
            done, _ = await asyncio.wait(
                tasks, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED
            )
            assert done, "somebody waits for a turn that nobody gives"
            for task in done:
                tasks.remove(task)
                await leave(task, cancel=False)
        assert counts(admission, worker) == [(0, 0, 0), (0, 0, 0)]

    asyncio.run(play())


async def test_a_turn_that_is_there_is_taken_without_waiting():
    worker = Admission(1, 5)
    endpoint = EndpointAdmission(2, 5, worker)
    for _ in range(2):
        assert endpoint.reserve() is None
    assert endpoint.run_now()
    assert not endpoint.run_now(), "the worker is full"
    assert (endpoint._running, worker._running) == (1, 1)
    second = asyncio.create_task(endpoint.run())
    await asyncio.sleep(0)
    endpoint.release(ran=True)
    await second
    assert not endpoint.run_now(), "the turn went to the one that waited"
    endpoint.release(ran=True)
    assert (endpoint._running, worker._running) == (0, 0)
