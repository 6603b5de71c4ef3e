from __future__ import annotations

import copy
import pickle

import pytest

from dynamo.runtime._calls.worker_type import WorkerType


@pytest.mark.parametrize(
    ("name", "number"),
    [("Prefill", 1), ("Decode", 2), ("Encode", 3), ("Aggregated", 4)],
)
def test_names_and_numbers_are_the_genuine_ones(name, number):
    kind = getattr(WorkerType, name)
    assert (repr(kind), str(kind)) == (f"WorkerType.{name}", name.lower())
    assert int(kind) == number
    assert kind == number
    assert number == kind
    assert kind == getattr(WorkerType, name)
    assert kind != name.lower()
    assert kind != number + 1


def test_kinds_differ_and_are_neither_hashable_nor_ordered_nor_copied():
    assert WorkerType.Prefill != WorkerType.Decode
    for refused in (
        WorkerType,
        lambda: hash(WorkerType.Prefill),
        lambda: WorkerType.Prefill < WorkerType.Decode,
        lambda: copy.copy(WorkerType.Prefill),
        lambda: pickle.dumps(WorkerType.Prefill),
        lambda: type("Sub", (WorkerType,), {}),
    ):
        with pytest.raises(TypeError):
            refused()
