"""Programs whose output is evidence, with their deadlines. All functions are pure.

`work` is the folder for their output. `python` is the start of a command that runs a module.
"""

from __future__ import annotations

from collections.abc import Iterator

from healthd.agent.evidence.request import Request
from healthd.common.values import Value

_BUG_REPORT = "nvidia-bug-report.log"
# Entries of the kernel and of NVIDIA's services, by fields that journald itself sets (systemd.journal-fields(7)).
VENDOR_JOURNAL = "journal-vendor.log"
_VENDOR_UNITS = ("nvidia-persistenced", "nvidia-fabricmanager", "nvidia-imex", "nvidia-dcgm", "dcgm", "nvlsm")


class Source(Value, frozen=True):
    """A program whose output is evidence.

    file         name in the archive
    argv         the command; the name is looked up in the system's folders
    seconds      deadline
    output       file that the program itself writes, or "" for its standard output
    is_optional  True if a missing program is not a problem
    """

    file: str
    argv: tuple[str, ...]
    seconds: float
    output: str = ""
    is_optional: bool = False


class Entry(Value, frozen=True):
    """What became of a source.

    status   exit status, the negative signal number, or None if the program did not run or end
    problem  why the file is missing or incomplete, or ""
    missing  True if the program is not installed
    """

    file: str
    argv: tuple[str, ...]
    status: int | None = None
    seconds: float = 0.0
    bytes: int = 0
    problem: str = ""
    missing: bool = False


def first_sources(request: Request, work: str, python: tuple[str, ...], now: float) -> tuple[Source, ...]:
    """Return the programs that may run while a job runs. None of them changes anything on the node."""
    recording = f"{work}/record.rec"
    return (
        Source("kernel.log", ("dmesg", "--decode", "--time-format", "iso"), 30.0),
        *_journals(min(request.fault_at, now) - request.settings.journal_before_seconds),
        Source("record.rec", (*python, "healthd", "record", *request.flags, "--force", recording), 300.0, recording),
        Source("system.json", (*python, "healthd.agent.evidence.identify", "--system-only"), 30.0),
    )


def _journals(since: float) -> Iterator[Source]:
    """Yield the sources of the journal. The newest entry is first, so that a limit or deadline cuts off the oldest."""
    options = ("--no-pager", "--quiet", "--reverse", "--output", "short-iso-precise")
    command = ("journalctl", *options, "--since", f"@{max(int(since), 0)}")
    units = (f"_SYSTEMD_UNIT={unit}.service" for unit in _VENDOR_UNITS)
    yield Source(VENDOR_JOURNAL, (*command, "_TRANSPORT=kernel", "+", *units), 60.0, is_optional=True)
    yield Source("journal.log", command, 120.0, is_optional=True)


def full_sources(request: Request, work: str, python: tuple[str, ...], now: float) -> tuple[Source, ...]:
    """Return the programs that run only on the idle node. The bug report is last, because it may hang.

    It is omitted if the cause of all faults may be outside this node: many nodes would then run it at the same time.
    """
    report = f"{work}/{_BUG_REPORT}"
    is_shared = bool(request.causes) and all(cause.shared_cause for cause in request.causes)
    bug_report = Source(
        f"{_BUG_REPORT}.gz",
        ("nvidia-bug-report.sh", "--safe-mode", "--output-file", report),
        request.settings.timeout_seconds,
        f"{report}.gz",
        is_optional=True,
    )
    return (
        Source("hardware.json", (*python, "healthd.agent.evidence.identify"), 60.0),
        Source("sel.txt", ("ipmitool", "sel", "elist"), 120.0, is_optional=True),
        Source("bmc.txt", ("ipmitool", "mc", "info"), 60.0, is_optional=True),
        Source("fru.txt", ("ipmitool", "fru", "print", "0"), 60.0, is_optional=True),
        Source("nvidia-smi.txt", ("nvidia-smi", "-q"), 120.0, is_optional=True),
        Source("nvidia-smi.xml", ("nvidia-smi", "-q", "-x"), 120.0, is_optional=True),
        Source("kernel-idle.log", ("dmesg", "--decode", "--time-format", "iso"), 30.0),
        *_journals(min(request.fault_at, now)),
        *((bug_report,) if request.settings.bug_report and not is_shared else ()),
    )
