"""Streaming multiprocessors (SMs) on which kernels of different jobs raise exceptions.

Rules: an Xid 13 is usually a bug in the application, which tends to affect many SMs at once. If different jobs fail on
the same SM, the hardware may be broken. NVIDIA's catalogue then requires diagnostics (WORKFLOW_XID_13), and
NVSentinel's analyzer reacts if the same GPC and TPC appear twice in 24 h. Two jobs with the same bug look the same, so
the check names the SM and warns, but never drains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from healthd.api import (
    CheckSettings,
    Clears,
    Explain,
    FailureCause,
    Finding,
    Inventory,
    KernelEvent,
    Seconds,
    Severity,
)

USES = ""

XID = "13"
MANY_SMS = "many"  # replaces a list of more SMs than one broken part can explain (agent/kernel_log/coalesce.py)
MAX_LISTED = 4  # maximum number of SMs, and of jobs, in a message


class Config(CheckSettings, frozen=True):
    """window_seconds   warn if different jobs raise exceptions on the same SM within this time"""

    window_seconds: Seconds = 24 * 3600.0


def correlate(events: Sequence[KernelEvent], node: Inventory, config: Config) -> Iterator[Finding]:
    """Yield at most one finding for each GPU and MIG instance. Events without a known job are ignored."""
    by_gpu: dict[tuple[str, str], list[KernelEvent]] = {}
    for event in events:
        if event.kind == "xid" and event.code == XID and event.pci and event.field("job"):
            by_gpu.setdefault((event.pci, event.field("gpu_instance")), []).append(event)
    for (pci, instance), group in by_gpu.items():
        newest = max(event.last_time for event in group)
        recent = [event for event in group if event.last_time >= newest - config.window_seconds]
        by_sm: dict[str, list[KernelEvent]] = {}
        for event in recent:
            for sm in event.field("sm").split():
                by_sm.setdefault(sm, []).append(event)
        shared = {sm: sm_events for sm, sm_events in by_sm.items() if sm != MANY_SMS and _are_different_jobs(sm_events)}
        if shared:
            evidence = {event.sequence: event for sm_events in shared.values() for event in sm_events}
            yield Finding(
                Severity.WARNING,
                "gpu_sm/several_jobs",
                pci,
                _message(pci, instance, shared, list(evidence.values()), node),
                clears=Clears.WINDOW,
                window_seconds=config.window_seconds,
                events=tuple(sorted(evidence)),
            )


def _are_different_jobs(events: Sequence[KernelEvent]) -> bool:
    """Return True if no single job can have caused all events. On a shared GPU, any of the GPU's jobs may have caused
    an event.

    The events are read in a single pass, because a job can cause thousands of events and each kernel line calls this
    function again.
    """
    return not set.intersection(*(_jobs(named) for named in {event.field("job") for event in events}))


def _jobs(named: str) -> set[str]:
    return {*named.split(",")}


def _message(
    pci: str, instance: str, shared: dict[str, list[KernelEvent]], evidence: Sequence[KernelEvent], node: Inventory
) -> str:
    named = [f"({', '.join(map(' '.join, zip(('GPC', 'TPC', 'SM'), sm.split('.'), strict=False)))})" for sm in shared]
    jobs = sorted({job for event in evidence for job in _jobs(event.field("job"))}, key=lambda job: (len(job), job))
    gpu = next((gpu for gpu in node.gpus if gpu.pci == pci), None)
    where = f"GPU {gpu.index} ({gpu.uuid})" if gpu and gpu.uuid else f"GPU {gpu.index}" if gpu else f"GPU {pci}"
    where += f", MIG instance {instance}" if instance else ""
    return f"Xid 13 from different jobs (jobs {_shortened_list(jobs)}) on {_shortened_list(named)} of {where}"


def _shortened_list(items: Sequence[str]) -> str:
    omitted = len(items) - MAX_LISTED
    return ", ".join(items[:MAX_LISTED]) + (f" and {omitted} more" if omitted > 0 else "")


EXPLAIN = {
    "gpu_sm/several_jobs": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "Kernels of different jobs raised exceptions (Xid 13) on the same streaming multiprocessor (SM) of a GPU.",
        "The SM may be broken. A broken SM kills jobs or silently computes wrong results. Several jobs with the same "
        "bug cause the same exceptions.",
        "No action tonight. Ask the jobs' owners whether the same program fails on other GPUs as well. If the "
        "program fails only here, drain the node and run NVIDIA's field diagnostics and dcgmi diag -r 3. Report the "
        "GPU, GPC, TPC and SM to NVIDIA.",
        window="window_seconds",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.GPU)
