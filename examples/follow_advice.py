"""A training loop that follows healthd's advice: where one rank is slow it moves micro-batches to the others.

    python examples/follow_advice.py --ranks 4 --micro-batches 32 --slow 2

Four processes stand for four data-parallel groups, sleeping for computing, a barrier for the all-reduce of gradients.
From iteration --slow-from on one of them takes --times as long for a micro-batch. healthd must run on the node with

    [checks.failslow]
    client = true

and the loop must run in a Slurm job. Each rank reports its steps, rank 0 reads the advice every ADVICE_SECONDS, and all
ranks divide their micro-batches anew (healthd/failslow/mitigation/micro_batches.py, which needs only Python).

In a real loop `seconds` is gathered by torch.distributed.all_gather, and the new counts hold from the next iteration on
all ranks. Gradients are then the sum over all samples divided by how many there are, not the mean of the ranks' means.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkContext
from typing import Any, NamedTuple

from healthd.client import advice, step
from healthd.failslow.mitigation.micro_batches import split

MICRO_BATCH_SECONDS = 0.01
ADVICE_SECONDS = 1.0  # between two reads of the advice
REMEDY = ("s2", "s3", "s4")  # micro-batches can be moved where more than that is advised, too


class Job(NamedTuple):
    """slow: the rank that becomes slow at iteration slow_from; iterations: at most so many."""

    ranks: int = 4
    micro_batches: int = 32
    slow: int = 2
    slow_from: int = 100
    times: float = 4.0
    iterations: int = 1000
    after: int = 30  # iterations after a move; then the loop ends


class Shared(NamedTuple):
    """What the ranks have in common: here memory, in a real job what they send each other."""

    barrier: Any
    counts: Any  # micro-batches of each rank
    seconds: Any  # of one micro-batch of each rank
    moved_at: Any  # iteration of the first move, -1 = none
    took: Any  # seconds of each iteration


def share(job: Job, context: ForkContext) -> Shared:
    each, more = divmod(job.micro_batches, job.ranks)
    return Shared(
        context.Barrier(job.ranks),
        context.Array("i", [each + (rank < more) for rank in range(job.ranks)], lock=False),
        context.Array("d", job.ranks, lock=False),
        context.Value("i", -1, lock=False),
        context.Array("d", job.iterations, lock=False),
    )


def train(rank: int, job: Job, shared: Shared, begin: Callable[[], None]) -> None:
    """One rank. begin: what it does first, such as joining the process group."""
    begin()
    written: object = None  # when healthd wrote the advice that was read last
    read_at = time.perf_counter() + ADVICE_SECONDS
    for iteration in range(job.iterations):
        started = time.perf_counter()
        slow = rank == job.slow and iteration >= job.slow_from
        for _ in range(shared.counts[rank]):
            time.sleep(MICRO_BATCH_SECONDS * (job.times if slow else 1.0))  # forward and backward
        busy = time.perf_counter() - started
        shared.seconds[rank] = busy / shared.counts[rank]
        shared.barrier.wait()  # all-reduce
        took = time.perf_counter() - started
        step(busy=busy, wait=took - busy)
        if rank == 0:
            shared.took[iteration] = took
            if time.perf_counter() >= read_at:
                read_at = time.perf_counter() + ADVICE_SECONDS
                found = advice()
                if found is not None and found.get("written") != written:
                    written = found.get("written")
                    follow(found, iteration, job, shared)
        shared.barrier.wait()  # all see the same counts in the next iteration
        if 0 <= shared.moved_at.value <= iteration - job.after:
            return


def follow(found: Mapping[str, object], iteration: int, job: Job, shared: Shared) -> None:
    """Divide the micro-batches by how long one took in this iteration.

    They are not moved back when nothing is slow any more: the move may be the reason. Later advice is followed again.
    """
    if found.get("action") not in REMEDY:
        return
    shared.counts[:] = split(list(shared.seconds), job.micro_batches).micro_batches
    if shared.moved_at.value < 0:
        shared.moved_at.value = iteration
    print(f"iteration {iteration}: {found['message']}: {list(shared.counts)}", flush=True)


def run(job: Job, begin: Callable[[], None] = lambda: None) -> Shared:
    """All ranks, to their end."""
    context = multiprocessing.get_context("fork")
    shared = share(job, context)
    ranks = [context.Process(target=train, args=(rank, job, shared, begin)) for rank in range(job.ranks)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    return shared


def main() -> None:
    parser = argparse.ArgumentParser(description="a training loop that follows healthd's advice")
    for name, default in Job()._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    run(Job(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
