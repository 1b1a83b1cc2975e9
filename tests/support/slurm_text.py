"""Output of Slurm's commands for tests (22.05.8 unless noted), and strategies for arbitrary text."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from healthd.common.slurm.commands import JOB_COLUMNS, NODE_COLUMNS, CommandResult

NOW = 1_795_207_900.0
XID = "healthd: gpu_xid/79 0000:1b:00.0: fell off the bus"


def columns(values: Sequence[str | bytes], widths: tuple[tuple[str, int], ...]) -> bytes:
    """Return a record as Slurm prints it: each value is cut and padded by bytes, even inside a character."""
    row = b""
    for value, (_, width) in zip(values, widths, strict=True):
        cell = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
        row += cell[:width] + b" " * max(0, width - len(cell))
    return row + b"\n"


def sinfo(state: str, reason: str | bytes = "none", since: float = NOW - 60, gres: str = "(null)") -> CommandResult:
    """Return a node that is in one of two partitions."""
    stamp, user = ("Unknown", "Unknown") if reason == "none" else (f"{since:.0f}", "root(0)")
    elsewhere = columns(("full", "0", "n/a", "Unknown", "Unknown", "none", "(null)"), NODE_COLUMNS)
    return CommandResult(0, elsewhere + columns(("gpu", "1", state, stamp, user, reason, gres), NODE_COLUMNS))


def squeue(
    job: str = "12",
    name: str = "",
    state: str = "RUNNING",
    batch: str = "1",
    start: float = NOW - 100,
    restarts: int = 0,
    requeue: str = "1",
    comment: str | bytes = "(null)",
) -> CommandResult:
    row = (job, name or job, state, batch, f"{start:.0f}", str(restarts), requeue, comment)
    return CommandResult(0, columns(row, JOB_COLUMNS))


def listpids(*jobs: str) -> CommandResult:
    if not jobs:
        return CommandResult(1, b"PID      JOBID    STEPID   LOCALID GLOBALID\n", "No job steps exist on this node.\n")
    rows = "".join(f"{pid}    {job}        batch    0       0       \n" for pid, job in enumerate(jobs, 100))
    return CommandResult(0, f"PID      JOBID    STEPID   LOCALID GLOBALID\n{rows}".encode())


# Arbitrary characters, including lone surrogates and NUL, and fragments of Slurm output.
WORDS = st.sampled_from(
    [
        *(
            "9" * 5000,
            "9" * 400,
            "9" * 20,
            "12",
            "1",
            "0",
            "-1",
            "\u0663" * 3,
            "\u00b2",
            "2026-11-20T20:48:09",
            "0001-01-01",
        ),
        *(
            "PID JOBID\n",
            "BOOT_TIME = ",
            "TotalNodes=",
            "gpu",
            "idle+drain",
            "RUNNING",
            "\n",
            " ",
            "\0",
            "\ud800",
            "\udcff",
        ),
        *("healthd: gpu_xid/79%FF%00 0000:1b:00.0: x", "healthd:"),
    ]
)
ANY_TEXT = st.lists(WORDS | st.text(st.characters(codec=None), max_size=5), max_size=12).map("".join)

# Arbitrary bytes, and arbitrary characters as bytes.
ANY_BYTES = st.binary(max_size=300) | ANY_TEXT.map(lambda text: text.encode("utf-8", "surrogatepass"))
# Text that an operator can type into a field of Slurm: any bytes except NUL.
TYPED = (st.binary(max_size=300) | st.text(st.characters(codec="utf-8"), max_size=300).map(str.encode)).map(
    lambda typed: typed.replace(b"\0", b"")
)
