"""GPUs of this node and its jobs, from data on the node itself. Except for two injected readers, the functions are
pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from healthd.agent.slurm.affected_jobs import JobGpus
from healthd.common.model import Gpu, Inventory
from healthd.common.slurm.gres import AllocatedGpus, parse_prolog_file, pci_addresses, pci_by_uuid, slurm_gpu_order
from healthd.common.values import Value

CLOCK_SKEW_SECONDS = 2.0  # start times come from slurmctld's clock, in whole seconds

PrologReader = Callable[[str], "tuple[str, float]"]
OpenGpusReader = Callable[[Mapping[int, str]], "tuple[Mapping[str, frozenset[int]], bool]"]


def no_prolog_file(_job: str) -> tuple[str, float]:
    return "", 0.0


def no_open_gpus(_processes: Mapping[int, str]) -> tuple[dict[str, frozenset[int]], bool]:
    return {}, False


class NodeGpus(Value, frozen=True):
    """This node's GPUs.

    inventory    the current inventory
    complete     the GPUs at a time when none was missing
    read_prolog  returns the prolog's text about a job, and the time at which it was written
    find_open    takes a dict of pids and jobs, and returns the N of each /dev/nvidiaN that a job has open, and whether
                 all processes were inspected
    """

    inventory: Inventory = Inventory()
    complete: tuple[Gpu, ...] = ()
    read_prolog: PrologReader = no_prolog_file
    find_open: OpenGpusReader = no_open_gpus

    @property
    def all_gpus(self) -> tuple[Gpu, ...]:
        """All GPUs that this node has or had, without duplicates."""
        return (*self.inventory.gpus, *_without(self.complete, self.inventory.gpus))

    def allocation(self, job: str, started: float) -> AllocatedGpus | None:
        """Return the GPUs that the prolog recorded for this run of the job, or None if it recorded none."""
        text, written = self.read_prolog(job)
        return parse_prolog_file(text, job) if written >= started - CLOCK_SKEW_SECONDS else None

    def opened_by(self, processes: Mapping[int, str]) -> Callable[[str], JobGpus]:
        """Return a function that maps a job to the GPUs that it has open."""
        found, is_complete = self.find_open(processes)
        names = {
            gpu.minor: gpu.pci for gpu in reversed(self.all_gpus)
        }  # a present GPU takes precedence over a lost one

        def job_gpus(job: str) -> JobGpus:
            minors = found.get(job, frozenset())
            opened = frozenset(names.get(n, f"/dev/nvidia{n}") for n in minors)
            return JobGpus(opened=opened, is_complete=is_complete and job in found)

        return job_gpus

    def with_allocation(
        self,
        job: JobGpus,
        allocated: AllocatedGpus | None,
        slurm_count: int | None,
        is_ascending: Callable[[int], bool],
    ) -> JobGpus:
        """Return the job with the GPUs that Slurm allocated to it.

        `slurm_count` is the number of the node's GPUs in Slurm, or None if they have several types. `is_ascending`
        returns True if gres.conf lists this many GPUs in the order of their device files.
        """
        if allocated is None:
            return job
        lists = (gpus for gpus in (self.inventory.gpus, self.complete) if is_ascending(len(gpus)))
        orders = (slurm_gpu_order(slurm_count, gpus) for gpus in lists)
        order = next((order for order in orders if order), None)
        return replace(
            job, has_allocation=bool(allocated), allocated=pci_addresses(allocated, order, pci_by_uuid(self.all_gpus))
        )


UNKNOWN_GPUS = NodeGpus()


def _without(gpus: Sequence[Gpu], excluded: Sequence[Gpu]) -> list[Gpu]:
    addresses = {gpu.pci for gpu in excluded}
    return [gpu for gpu in gpus if gpu.pci not in addresses]
