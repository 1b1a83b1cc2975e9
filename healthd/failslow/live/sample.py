"""One sample of a running job, from whichever source: the word between those who measure and who judges."""

from __future__ import annotations

from typing import NamedTuple

from healthd.failslow.model import Kind


class Sample(NamedTuple):
    """How long an iteration of a job took, as one source saw it.

    job     as Slurm numbers it ("4711")
    series  who it is of, within the job and the source: a rank's connection, a kind of counter ("ib")
    time    when it ended, epoch seconds
    value   seconds, more than 0
    kind    ITERATION, or BUSY for a rank's own work in it
    steps   of so many iterations it is the mean
    """

    job: str
    series: str
    time: float
    value: float
    kind: Kind = Kind.ITERATION
    steps: int = 1
