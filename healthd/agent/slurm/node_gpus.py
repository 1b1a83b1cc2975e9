"""GPUs of this node and of its jobs, from data on the node itself. Pure except for two injected readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from healthd.agent.slurm.affected_jobs import OnGpus
from healthd.common.model import Gpu, Inventory
from healthd.common.slurm.gres import Given, in_slurms_order, parents, pci_of, told_by_prolog
from healthd.common.values import Value

CLOCK_SKEW_SECONDS = 2.0  # start times come from slurmctld's clock, in whole seconds

Told = Callable[[str], "tuple[str, float]"]
Open = Callable[[Mapping[int, str]], "tuple[Mapping[str, frozenset[int]], bool]"]


def told_nothing(_job: str) -> tuple[str, float]:
    return "", 0.0


def seen_nothing(_processes: Mapping[int, str]) -> tuple[dict[str, frozenset[int]], bool]:
    return {}, False


class NodeGpus(Value, frozen=True):
    """GPUs of this node.

    inventory    the current inventory
    complete     its GPUs when none was missing
    read_prolog  job -> the prolog's text about it, and when it was written
    find_open    pid -> job: the N of each /dev/nvidiaN that a job has open, and whether all processes were inspected
    """

    inventory: Inventory = Inventory()
    whole: tuple[Gpu, ...] = ()
    told: Told = told_nothing
    have_open: Open = seen_nothing

    @property
    def known(self) -> tuple[Gpu, ...]:
        """All GPUs that this node has or had, each once."""
        return (*self.inventory.gpus, *_without(self.whole, self.inventory.gpus))

    def given(self, job: str, started: float) -> Given | None:
        """Return the GPUs that the prolog wrote for this run of the job; None: not written."""
        text, written = self.told(job)
        return told_by_prolog(text, job) if written >= started - CLOCK_SKEW_SECONDS else None

    def open_by(self, processes: Mapping[int, str]) -> Callable[[str], OnGpus]:
        """Return a function that returns the GPUs that a job has open."""
        found, all_seen = self.have_open(processes)
        names = {gpu.minor: gpu.pci for gpu in reversed(self.known)}  # a present GPU takes precedence over a lost one

        def of(job: str) -> OnGpus:
            minors = found.get(job, frozenset())
            has_open = frozenset(names.get(n, f"/dev/nvidia{n}") for n in minors)
            return OnGpus(has_open=has_open, all_seen=all_seen and job in found)

        return of

    def with_given(
        self, job: OnGpus, given: Given | None, slurms: int | None, is_ascending: Callable[[int], bool]
    ) -> OnGpus:
        """Return the job with the GPUs that Slurm allocated to it.

        `slurm_count`: the node's GPUs in Slurm, None if they have several types; `is_ascending`: returns True if
        gres.conf lists this many GPUs in the order of their device files.
        """
        if given is None:
            return job
        lists = (gpus for gpus in (self.inventory.gpus, self.whole) if is_ascending(len(gpus)))
        orders = (in_slurms_order(slurms, gpus) for gpus in lists)
        order = next((order for order in orders if order), None)
        return replace(job, has_given=bool(given), given=pci_of(given, order, parents(self.known)))


NOT_TOLD = NodeGpus()


def _without(gpus: Sequence[Gpu], others: Sequence[Gpu]) -> list[Gpu]:
    here = {gpu.pci for gpu in others}
    return [gpu for gpu in gpus if gpu.pci not in here]
