"""Places and turns of requests at a worker."""

from __future__ import annotations

import asyncio

from dynamo.runtime._calls.admission import Admission

LIMIT_S = 5.0


def test_reservations_end_at_running_plus_waiting_plus_one():
    admission = Admission(2, 1)
    assert [admission.reserve() for _ in range(5)] == [True] * 4 + [False]
    admission.release(ran=False)
    assert admission.reserve()
    assert not admission.reserve()


async def test_turns_come_in_the_order_of_arrival():
    admission = Admission(1, 10)
    order: list[int] = []

    async def work(number: int) -> None:
        assert admission.reserve()
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
