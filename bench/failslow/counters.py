"""Generate rates of a link: rates with the known period of a job's iterations, and rates without a training job."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple


class Signal(NamedTuple):
    """A generated rate. `rate` has the value at each sample; `period` is in samples, 0 without a rhythm."""

    kind: str
    rate: list[float]
    period: float


def bursts(rng: random.Random, count: int, period: float, duty: float, jitter: float, micro: int = 1) -> list[float]:
    """Return bursts of communication for a share `duty` of each iteration, with `micro` shorter bursts before each."""
    edges: list[tuple[float, float, float]] = []
    at = -rng.uniform(0, period)
    while at < count + period:
        length = period * max(0.2, rng.gauss(1, jitter))
        if micro > 1:
            part = length * (1 - duty) / micro
            edges += [
                (at + index * part, at + index * part + 0.4 * part, rng.gauss(0.5, 0.03)) for index in range(micro)
            ]
        edges.append((at + length * (1 - duty), at + length, rng.gauss(1, 0.05)))
        at += length
    return shares(edges, count)


def shares(edges: Sequence[tuple[float, float, float]], count: int) -> list[float]:
    """Return, for each sample, the mean height of the stretches (begin, end, height) in it."""
    rate = [0.0] * count
    for begin, end, height in edges:
        for at in range(max(0, math.floor(begin)), min(count, math.ceil(end))):
            rate[at] += height * max(0.0, min(end, at + 1) - max(begin, at))
    return rate


def noisy(rng: random.Random, rate: Sequence[float], noise: float) -> list[float]:
    return [max(0.0, value + rng.gauss(0, noise)) for value in rate]


def training(rng: random.Random, count: int, noise: float) -> Iterator[Signal]:
    period = rng.uniform(20, 40)
    duty, jitter = rng.uniform(0.08, 0.7), rng.uniform(0, 0.03)
    plain = bursts(rng, count, period, duty, jitter)
    yield Signal("bursts", noisy(rng, plain, noise), period)
    yield Signal(
        "micro-batches", noisy(rng, bursts(rng, count, period, duty, jitter, rng.choice((2, 4))), noise), period
    )
    begin = rng.randrange(count - 30)
    paused = [0.0 if begin <= at < begin + rng.randint(8, 30) else value for at, value in enumerate(plain)]
    yield Signal("pause", noisy(rng, paused, noise), period)
    stored = [value + (6.0 if begin <= at < begin + 6 else 0.0) for at, value in enumerate(plain)]
    yield Signal("checkpoint", noisy(rng, stored, noise), period)
    evaluation = bursts(rng, count, period / 3.3, 0.3, 0.05)
    evaluated = [evaluation[at] if begin <= at < begin + 30 else value for at, value in enumerate(plain)]
    yield Signal("evaluation", noisy(rng, evaluated, noise), period)


def no_training(rng: random.Random, count: int, noise: float) -> Iterator[Signal]:
    yield Signal("constant", noisy(rng, [1.0] * count, noise / 10), 0)
    yield Signal("noise", [max(0.0, rng.gauss(1, max(noise, 0.05))) for _ in range(count)], 0)
    for memory in (0.7, 0.95, 0.99):
        at, rate = 0.0, []
        for _ in range(count):
            at = memory * at + rng.gauss(0, 0.2)
            rate.append(max(0.0, 1 + at))
        yield Signal(f"memory {memory}", rate, 0)
    at, walk = 5.0, []
    for _ in range(count):
        at += rng.gauss(0, 0.2)
        walk.append(abs(at))
    yield Signal("random walk", walk, 0)
    yield Signal("requests at random times", noisy(rng, shares(list(requests(rng, count)), count), noise), 0)
    edges, on = [], 0.0
    while on < count:
        off = on + rng.expovariate(1 / 15)
        edges.append((on, off, 1.0))
        on = off + rng.expovariate(1 / 15)
    yield Signal("transfers on and off", noisy(rng, shares(edges, count), noise), 0)
    step = rng.randrange(count)
    yield Signal("one step", noisy(rng, [1.0 if at < step else 3.0 for at in range(count)], noise), 0)
    yield Signal("ramp", noisy(rng, [at / count for at in range(count)], noise), 0)
    single = rng.randrange(count)
    yield Signal("single burst", noisy(rng, [5.0 if 0 <= at - single < 10 else 0.0 for at in range(count)], noise), 0)


def requests(rng: random.Random, count: int) -> Iterator[tuple[float, float, float]]:
    at = 0.0
    while at < count:
        at += rng.expovariate(1 / 12)
        yield at, at + rng.uniform(1, 5), rng.uniform(0.5, 1.5)


MAKERS: dict[str, Callable[[random.Random, int, float], Iterator[Signal]]] = {
    "training": training,
    "no training": no_training,
}
