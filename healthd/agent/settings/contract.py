"""Contract for a check module: the names that the module may declare, with types and defaults.

healthd reads nothing else from a module, and reads these names once, when it finds the check. A module needs `run` or
`correlate` (a site's file: `run`). tests/agent/settings/test_contract.py verifies each module of checks/ against the
types with mypy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, Generic, TypeVar

from msgspec import field

from healthd.agent.settings.config import CheckConfig
from healthd.common.codec import fields_of
from healthd.common.history import History
from healthd.common.job_failures import EndsJob, FailureCause
from healthd.common.model import (
    Baseline,
    Entry,
    Explain,
    Finding,
    Inventory,
    KernelEvent,
    LeftOut,
    Meaning,
    NothingToCheck,
    Observation,
    Program,
    Repair,
)
from healthd.common.values import Value
from healthd.host.host import Host

C = TypeVar("C", bound=CheckConfig)


class Contract(Value, Generic[C], frozen=True):
    """`run` and `baseline` are called in the worker, with a deadline; everything else is called in the daemon.

    Config         the check's settings, each with a default: a CheckConfig, or a site's dataclass (site_config.py)
    PER            "mount": one run for each [checks.mount.NAME]; "" = a single run
    USES           a resource in which a run may hang: "nvml", which all its users share; "" = not shared with other
                   checks
    WHEN           "idle": runs only while a drain is desired or set and Slurm shows the node drained and idle;
                   `healthd check` runs such a check only if it is named; "" = always
    AFTER_EVENTS   kinds of kernel events after which it runs at once; also "pci_remove" (a device was removed),
                   "job_end" (an epilog reported it), "nvml_trouble" (a GPU check found a lost GPU, or NVML did not
                   answer), "gpu_unavailable" and "gpu_recovery_action" (NVML's events)
    HOLDS_RESUME   False: a drained node is resumed even if the check fails to run. A check that can only warn, because
                   of its codes or the site's settings, never delays a resume
    run            yields findings, observations and repairs, or NothingToCheck with the reason. An exception means
                   that the check failed to run
    before_resume  a program that healthd runs once per drain, on the drained and idle node, when nothing else
                   prevents the resume. The resume waits until the program has ended and the check has run
    after_job      a program that Slurm's epilog runs after the last job on a node
    after_repair   like before_resume, but only after a step of a repair, if no check has a before_resume program
    validate       returns a sentence if the settings are invalid, otherwise None or ""
    overdue        returns the findings if a run has not answered for this many seconds
    correlate      returns the findings for a window of kernel events on a node; pure. Built-in checks only
    repairs        returns the repairs that kernel events prove; pure. With correlate, built-in checks only
    BASELINE       the settings that `healthd baseline` writes for the check, and the rank of the check's table
    baseline       yields the current values of those settings on this node. An exception omits the check, with the
                   reason
    OBSERVATIONS   description of each observation: the HELP text for its metric
    EXPLAIN        for each code: its meaning, why it matters, what to do
    explain        the same for codes with numbers; called before EXPLAIN
    known_codes    the codes that `explain` describes
    explain_more   returns the text for a name that only occurs in messages
    known_more     the names that `explain_more` describes
    CAUSES         for each code: the cause of a job's failure if the fault ended the job. The fleet answers use it. A
                   missing code is unknown
    cause          the same for codes with numbers that are not in CAUSES
    ENDS_JOB       for each code: when the fault ends a job. Default: when its condition is degraded or critical
    ends_job       the same for codes with numbers that are not in ENDS_JOB
    PERMANENT      codes for hardware faults that last until a part is replaced: neither a reset nor a reboot ends them
    """

    Config: type[C] = CheckConfig  # type: ignore[assignment]  # without a Config in the module, C is CheckConfig
    PER: str = ""
    USES: str = ""
    WHEN: str = ""
    AFTER_EVENTS: Sequence[str] = ()
    HOLDS_RESUME: bool = True
    run: Callable[[Host, C, History], Iterable[Finding | Observation | Repair | NothingToCheck]] | None = None
    before_resume: Callable[[C], Program | None] = lambda config: None
    after_job: Callable[[C], Program | None] = lambda config: None
    after_repair: Callable[[C], Program | None] = lambda config: None
    validate: Callable[[C], str | None] = lambda config: None
    overdue: Callable[[C, float], Iterable[Finding]] = lambda config, seconds: ()
    correlate: Callable[[Sequence[KernelEvent], Inventory, C], Iterable[Finding]] | None = None
    repairs: Callable[[Sequence[KernelEvent]], Iterable[Repair]] | None = None
    BASELINE: Baseline | None = None
    baseline: Callable[[Host, C], Iterable[Entry | LeftOut]] | None = None
    OBSERVATIONS: Mapping[str, Meaning] = field(default_factory=dict)
    EXPLAIN: Mapping[str, Explain] = field(default_factory=dict)
    explain: Callable[[str], Explain | None] | None = None
    known_codes: Callable[[], Iterable[str]] | None = None
    explain_more: Callable[[str], Explain | None] = lambda name: None
    known_more: Callable[[], Iterable[str]] = tuple
    CAUSES: Mapping[str, FailureCause] = field(default_factory=dict)
    cause: Callable[[str], FailureCause] = lambda code: FailureCause.OTHER
    ENDS_JOB: Mapping[str, EndsJob] = field(default_factory=dict)
    ends_job: Callable[[str], EndsJob] = lambda code: EndsJob.IF_ISOLATES
    PERMANENT: Collection[str] = ()


NAMES = tuple(f.name for f in fields_of(Contract))


def read_contract(module: ModuleType) -> Contract[Any]:
    """Return a module's declarations without validating them. A site's module may have wrong types."""
    return Contract(**{name: getattr(module, name) for name in NAMES if hasattr(module, name)})
