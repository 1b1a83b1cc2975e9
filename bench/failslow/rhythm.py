"""Measure how accurately the iteration time is read from a stream of operations (FALCON 2.2, step 2: at most 1.2 %).

It also counts wrong times without a warning. The generated streams have the calls of a training loop in order: buckets,
sharded layers, tensor and pipeline parallel micro-batches. A call is named by its kind alone or with its communicator.
The streams include jitter, lost entries, a ring that begins anywhere, a start, logged losses, evaluations, checkpoints
and pauses.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from failslow.score import share
from healthd.failslow.period import PeriodNotFound, find_period

AIM, ENOUGH = 0.012, 0.99  # error of the time, and the share of streams within it; one without a period is outside
SURE = 0.5  # confidence
LOST = (0.0, 1e-3, 1e-2)
LONGEST = 4_000  # operations of an iteration


@dataclass(frozen=True, slots=True)
class Stream:
    kind: str
    lost: float
    operations: list[str]
    times: list[float]
    seconds: float  # the median of the iterations in the stream


def loop(kind: str, random: np.random.Generator) -> list[str]:
    """Return the operations of one iteration."""
    layers, batches = int(random.integers(4, 97)), int(random.choice((1, 2, 4, 8, 16)))
    gather, scatter, reduce = "all_gather", "reduce_scatter", "all_reduce"
    if kind == "buckets":
        return [reduce] * layers + ["broadcast"]
    if kind == "mixed":
        forward = [gather] * layers if random.random() < 0.5 else [gather, reduce] * layers
        backward = [gather, scatter] * layers if random.random() < 0.5 else [scatter] * layers
        return [*forward, *backward, reduce, "broadcast"]
    if kind == "sharded":
        return [gather, gather, scatter] * layers + [reduce]
    if kind == "sharded, in two passes":
        return [gather] * layers + [gather, scatter] * layers + [reduce]
    if kind == "sharded, accumulated":
        batch = [gather] * layers + [gather] * layers
        return batch * batches + [gather] * layers + [gather, scatter] * layers + [reduce, reduce]
    if kind == "tensor":
        return [gather, scatter] * (layers * batches) + [scatter, gather]
    if kind == "tensor, two passes":
        batch = [gather, scatter] * layers + [gather, scatter, gather] * layers
        return batch * batches + [reduce, scatter, gather]
    if kind == "pipeline":
        stages = int(random.integers(2, 9))
        steady = ["send", "recv", "send", "recv"] * int(random.integers(4, 65))
        return ["recv", "send"] * stages + steady + ["recv", "send"] * stages + [reduce, reduce]
    assert kind == "tensor and pipeline"
    stage = int(random.integers(4, 25))
    forward, backward = (
        ["recv", *[gather, scatter] * stage, "send"],
        ["recv", *[gather, scatter, gather] * stage, "send"],
    )
    return (forward + backward) * batches + [scatter, gather, reduce]


KINDS = (
    "buckets", "mixed", "sharded", "sharded, in two passes", "sharded, accumulated", "tensor", "tensor, two passes",
    "pipeline", "tensor and pipeline",
)  # fmt: skip


def stream(random: np.random.Generator, kind: str) -> Stream:
    usual = loop(kind, random)
    while len(usual) > LONGEST:
        usual = loop(kind, random)
    if random.random() < 0.5:  # with the communicator, which is another one for the last operations
        usual = [f"{one} dp" if at >= len(usual) - 2 else f"{one} tp" for at, one in enumerate(usual)]
    iterations = int(random.integers(40, 200))
    share_of = random.dirichlet(np.full(len(usual), 5.0))
    seconds = float(np.exp(random.uniform(np.log(0.3), np.log(20.0))))
    cv = random.uniform(0.02, 0.10)
    logs = int(random.choice((0, 10)))  # a loss, reduced every tenth iteration
    evaluates = int(random.choice((0, 0, 50)))
    saves = int(random.choice((0, 0, 30)))
    lost = float(random.choice(LOST))
    operations, times, begins, ends = list[str](), list[float](), list[float](), list[float]()
    now = 1.7e9
    for _ in range(int(random.choice((0, 0, 60)))):
        operations.append(str(random.choice(("broadcast", "barrier", "all_gather", "all_reduce"))))
        times.append(now)
        now += random.random()
    for iteration in range(iterations):
        begins.append(now)
        # The iteration varies as a whole, and each of its operations by itself.
        took = seconds * share_of * random.gamma(1 / cv**2, cv**2) * random.gamma(25.0, 0.04, len(usual))
        for operation, one in zip(usual, took, strict=True):
            operations.append(operation)
            times.append(now)
            now += float(one)
        ends.append(now)
        if logs and iteration % logs == logs - 1:
            operations.append("all_reduce_loss" if random.random() < 0.5 else "all_reduce")
            times.append(now)
            now += 1e-4 * seconds
        if evaluates and iteration % evaluates == evaluates - 1:
            for operation in usual[: len(usual) // 3] * 5:
                operations.append(operation)
                times.append(now)
                now += float(seconds * share_of[0])
        if saves and iteration % saves == saves - 1:
            operations.append("barrier")
            times.append(now)
            now += 3 * seconds
    kept = random.random(len(operations)) >= lost
    cut = int(random.integers(0, 2 * len(usual)))  # a ring begins anywhere
    kept[:cut] = False
    seen = [end - begin for begin, end in zip(begins, ends, strict=True) if begin >= times[cut]]
    return Stream(
        kind,
        lost,
        [one for one, keep in zip(operations, kept, strict=True) if keep],
        [one for one, keep in zip(times, kept, strict=True) if keep],
        float(np.median(seen)),
    )


def verdicts(seed: int, streams: int) -> list[tuple[bool | None, str]]:
    """Return (met, None without a target; sentence) for the errors of this many streams."""
    random = np.random.default_rng(seed)
    errors, none, sure_and_wrong, doubtful = list[float](), 0, 0, 0
    missed: dict[str, int] = {}
    count, spent = 0, 0.0
    for at in range(streams):
        one = stream(random, KINDS[at % len(KINDS)])
        begun = time.perf_counter()
        try:
            found = find_period(one.operations, one.times)
        except PeriodNotFound:
            none += 1
            missed[one.kind] = missed.get(one.kind, 0) + 1
            continue
        finally:
            spent += time.perf_counter() - begun
            count += len(one.operations)
        errors.append(abs(found.iteration_seconds / one.seconds - 1))
        if errors[-1] > AIM:
            missed[one.kind] = missed.get(one.kind, 0) + 1
            sure_and_wrong += found.confidence >= SURE
        else:
            doubtful += found.confidence < SURE
    median, p95, most = (float(np.quantile(errors, part)) if errors else np.inf for part in (0.5, 0.95, 1.0))
    good = sum(error <= AIM for error in errors)
    of = f"{streams} streams: median {median:.2%}, p95 {p95:.2%}, max {most:.2%}"
    near = f"at most {AIM:.1%} in {share(good, streams)}"
    where = ", ".join(f"{kind}: {number}" for kind, number in missed.items())
    return [
        (good >= ENOUGH * streams, f"error of the iteration time, {of}; {near}, aim {ENOUGH:.0%}"),
        (not sure_and_wrong, f"larger errors without a warning (confidence {SURE} or more): {sure_and_wrong}, aim 0"),
        (None, f"{none} streams without a period, {doubtful} correct with a warning; missed: {where or 'none'}"),
        (None, f"{spent / max(1, count) * 1e6:.0f} us per operation, {count:,} operations"),
    ]


if __name__ == "__main__":
    for met, sentence in verdicts(101, 198):
        print("MISSED:" if met is False else "met:" if met else " ", sentence)
