"""What makes the input: Atheris where it is installed, else mutations of our own.

Atheris is guided by coverage, but has wheels for few platforms.  `mutate` needs nothing:
it changes and combines seeds, and keeps what had a new outcome.  Both run in a process of
their own, end at the first finding with `FOUND`, and write the input to a file.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

# The exit code for a finding, that of Atheris.
FOUND = 77
MAX_INPUT_BYTES = 16384
MAX_KEPT_INPUTS = 2000

_CHECK_EVERY_RUNS = 4096
_MAX_GROWTH_BLOCKS = 20_000

Run = Callable[[bytes], object]


class KeptMemory(AssertionError):
    """A target keeps objects from one run to the next."""


class Watched:
    """A target that is also watched for growth, and counted.

    Objects are counted, not bytes: an engine's own corpus would hide bytes.  `kept` is
    the number of those that the engine itself holds.
    """

    def __init__(self, run: Run, kept: Callable[[], int] = lambda: 0) -> None:
        self.runs = 0
        self._run = run
        self._kept = kept
        self._baseline: int | None = None

    def __call__(self, data: bytes) -> object:
        self.runs += 1
        if self.runs % _CHECK_EVERY_RUNS == 0:
            self._check_growth()
        return self._run(data)

    def _check_growth(self) -> None:
        gc.collect()
        blocks = sys.getallocatedblocks() - self._kept()
        if self._baseline is None:  # by now all caches are filled
            self._baseline = blocks
        grown = blocks - self._baseline
        if grown > _MAX_GROWTH_BLOCKS:
            raise KeptMemory(f"{grown} objects more are alive after {self.runs} runs")


def has_atheris() -> bool:
    """Whether the engine ``atheris`` can be used here."""
    return importlib.util.find_spec("atheris") is not None


def run_atheris(run: Run, seeds: list[bytes], seconds: float, prefix: str) -> None:
    """Fuzz with Atheris; does not return.  Modules must be imported instrumented."""
    atheris = importlib.import_module("atheris")  # not everywhere installed
    watched = Watched(run)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as corpus:
        for number, seed in enumerate(seeds):
            Path(corpus, f"seed-{number}").write_bytes(seed)
        options = [
            f"-max_total_time={max(1, round(seconds))}",
            f"-max_len={MAX_INPUT_BYTES}",
            f"-artifact_prefix={prefix}",
            "-timeout=20",
            "-print_final_stats=1",
            "-verbosity=0",
        ]
        atheris.Setup([sys.argv[0], *options, corpus], lambda data: void(watched(data)))
        atheris.Fuzz()


def void(result: object) -> None:
    """Atheris wants targets to return nothing."""


def run_mutations(
    run: Run, seeds: list[bytes], seconds: float, prefix: str, chance: random.Random
) -> int:
    """Fuzz with mutations; return the exit code."""
    inputs = [b"", *seeds]
    outcomes: set[object] = set()
    watched = Watched(run, lambda: 2 * (len(inputs) + len(outcomes)))
    end = time.monotonic() + seconds
    while watched.runs < len(seeds) or time.monotonic() < end:
        fresh = watched.runs < len(seeds)
        data = seeds[watched.runs] if fresh else mutated(chance, inputs)
        try:
            outcome = watched(data)
        except Exception:  # noqa: BLE001 - whatever it is, it is what we look for
            report(data, prefix)
            return FOUND
        if outcome not in outcomes and len(outcomes) < MAX_KEPT_INPUTS:
            outcomes.add(outcome)
            inputs.append(data)
    print(f"stat::number_of_executed_units: {watched.runs}")
    return 0


def report(data: bytes, prefix: str) -> None:
    """Say what the current exception is, and keep the input that led to it."""
    traceback.print_exc()
    path = f"{prefix}crash-{hashlib.sha1(data, usedforsecurity=False).hexdigest()}"
    Path(path).write_bytes(data)
    print(f"Test unit written to {path}", file=sys.stderr)


# ----------------------------------------------------------------------- mutations

TOKENS = [
    # lengths and integers at their limits
    *(bytes(n) for n in (1, 2, 4, 8, 24)),
    *(b"\xff" * n for n in (1, 2, 4, 8)),
    *(b"\x7f" + b"\xff" * n for n in (0, 1, 3, 7)),
    *(b"\x80" + b"\x00" * n for n in (0, 1, 3, 7)),
    # MessagePack: containers, strings, extensions (-1 is the time), floats
    *b"\xdf\0\0\0\2|\xdd\0\0\0\2|\xc1|\xd6\xff|\xd7\xff|\xc7\x0c\xff|\xd4\5|\x82".split(
        b"|"
    ),
    *b"\xcb\x7f\xf8\0\0\0\0\0\0|\xcb\x7f\xf0\0\0\0\0\0\0|\xa1\xff|\xc4\2\0\0".split(
        b"|"
    ),
    # JSON
    *rb'{|}|[|]|"|:|,|null|true|1e999|-0.0|1e-400|18446744073709551616|0.1'.split(b"|"),
    *rb'"\ud800"|"\udcff\ud800"|"\u0000"|{"a":1,"a":2}|{}|[]|""'.split(b"|"),
    # words of the protocols
    *b'"sentinel"|"stop"|"kill"|error|typed_error|data|event|complete_final'.split(
        b"|"
    ),
    *b'"class"|"reason"|"public"|"caused_by"|{"Backend":"Unknown"}'.split(b"|"),
    # names and addresses
    *b"[[|]]|[|]:80|:65536|tcp://|dyn://|.|/|%2F|%zz|%|\xed\xa0\x80|\xed\xb3\xbf".split(
        b"|"
    ),
    b"[" * 2000,
    b"\x91" * 2000,
    b'{"caused_by":' * 500,
]


def mutated(chance: random.Random, inputs: list[bytes]) -> bytes:
    """One of the inputs after a few changes."""
    data = bytearray(chance.choice(inputs))
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        chance.choice(MUTATIONS)(chance, data, inputs)
    return bytes(data[:MAX_INPUT_BYTES])


def _place(chance: random.Random, data: bytearray) -> int:
    return chance.randrange(len(data) + 1)


def _flip_bit(chance: random.Random, data: bytearray, inputs: list[bytes]) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _set_byte(chance: random.Random, data: bytearray, inputs: list[bytes]) -> None:
    if data:
        data[chance.randrange(len(data))] = chance.randrange(256)


def _count_up(chance: random.Random, data: bytearray, inputs: list[bytes]) -> None:
    """Lengths that are off by a little."""
    if data:
        at = chance.randrange(len(data))
        data[at] = (data[at] + chance.choice((-8, -1, 1, 8))) % 256


def _remove(chance: random.Random, data: bytearray, inputs: list[bytes]) -> None:
    at = _place(chance, data)
    del data[at : at + chance.choice((1, 2, 8, 64))]


def _cut(chance: random.Random, data: bytearray, inputs: list[bytes]) -> None:
    del data[_place(chance, data) :]


def _repeat(chance: random.Random, data: bytearray, inputs: list[bytes]) -> None:
    at = _place(chance, data)
    data[at:at] = data[at : at + chance.choice((1, 4, 32, 256))] * chance.choice((1, 3))


def _insert_token(chance: random.Random, data: bytearray, inputs: list[bytes]) -> None:
    at = _place(chance, data)
    data[at:at] = chance.choice(TOKENS)


def _put_token(chance: random.Random, data: bytearray, inputs: list[bytes]) -> None:
    at = _place(chance, data)
    token = chance.choice(TOKENS)
    data[at : at + len(token)] = token


def _splice(chance: random.Random, data: bytearray, inputs: list[bytes]) -> None:
    other = chance.choice(inputs)
    data[_place(chance, data) :] = other[chance.randrange(len(other) + 1) :]


MUTATIONS = [
    _flip_bit,
    _set_byte,
    _count_up,
    _remove,
    _cut,
    _repeat,
    _insert_token,
    _put_token,
    _splice,
]
