"""Failed tests and slow hardware in this node's last `healthd validate`.

The check only reads the result file in the state directory, which costs nothing. By default `healthd validate` is run
only by hand. With `before_resume`, healthd runs it before it resumes an idle node that it drained. With `epilog`,
Slurm's epilog runs a quick validation if no other job is on the node. docs/validation.md lists the tests, their tools
and their references.

Rule: a test that a tool itself reports as failed (a wrong result, a CUDA or NCCL error) is evidence of a fault and
drains the node. A slow GPU, link or other part is only a warning, because the site's jobs determine which speed is too
low. A site can raise the severity. FALCON (arXiv 2410.12588, 4.3) validates in the same way, by GEMM and by transfers
on rings. There, 1.1 times the median is slow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from msgspec import field

from healthd.api import (
    AbsolutePath,
    CheckSettings,
    Clears,
    EndsJob,
    Explain,
    FailureCause,
    Finding,
    History,
    Host,
    Meaning,
    NothingToCheck,
    Observation,
    Program,
    Severity,
    Times,
    between,
)

if TYPE_CHECKING:
    from healthd.validation.document import Result

USES = ""
AFTER_EVENTS = ("job_end",)  # an epilog may have run a validation meanwhile
HOLDS_RESUME = False  # an unreadable document must not keep a node drained; earlier failures remain open anyway

MAX_MESSAGE = 300  # maximum length in characters
MAX_SERIES = 64  # pairs of test and verdict
MIN_SECONDS, MAX_SECONDS = 10.0, 86400.0  # range of `healthd validate --seconds`; a shorter time measures nothing
QUICK_SECONDS = 30.0  # time limit of `healthd validate --quick`
ENDING_SECONDS = 30.0  # for starting and ending the programs
MAX_EPILOG_SECONDS = 30.0
TOOLS = ("python", "nvbandwidth", "all_reduce_perf", "sendrecv_perf", "ib_write_bw", "dcgmi")

DcgmLevel = Annotated[int, between(0, 4)]


class Config(CheckSettings, frozen=True):
    """before_resume   run `healthd validate` on a drained, idle node before its resume
    before_resume_seconds   time limit for the validation before a resume
    epilog          run a quick validation in the epilog
    epilog_seconds  time limit for the epilog's validation; HEALTHD_EPILOG_SECONDS in /etc/default/healthd must be 5 s
                    longer
    floors          lowest accepted value of each test, in the test's unit; a lower value counts as slow
    tools           program paths for tools that healthd does not find: python, nvbandwidth, ib_write_bw, ...
    dcgm_level      level for `dcgmi diag -r`; 0 = do not run it
    clear_after     the default is 1: one clean run is enough, because a second run would read the same document
    """

    before_resume: bool = False
    before_resume_seconds: Annotated[float, between(MIN_SECONDS, MAX_SECONDS, " seconds (a day)")] = 600.0
    epilog: bool = False
    epilog_seconds: Annotated[float, between(0.1, MAX_EPILOG_SECONDS, " seconds")] = 5.0
    floors: dict[str, Annotated[float, between(1e-6, 1e9)]] = field(default_factory=dict)
    tools: dict[str, AbsolutePath] = field(default_factory=dict)
    dcgm_level: DcgmLevel = 2
    clear_after: Times = 1


def validate(config: Config) -> str | None:
    for tool in config.tools:
        if tool not in TOOLS:
            return f'tools: there is no "{tool}"; known tools: {", ".join(TOOLS)}'
    return None


def before_resume(config: Config) -> Program | None:
    if not config.before_resume:
        return None
    arguments = ("validate", "--why", "before_resume", "--seconds", f"{config.before_resume_seconds:g}")
    return Program(arguments, config.before_resume_seconds + ENDING_SECONDS)


def after_repair(config: Config) -> Program | None:
    """After a step of a repair, a quick validation runs in any case."""
    return Program(("validate", "--quick", "--why", "repair"), QUICK_SECONDS + ENDING_SECONDS)


def after_job(config: Config) -> Program | None:
    return Program(("validate", "--quick", "--why", "epilog"), config.epilog_seconds) if config.epilog else None


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    from healthd.validation import document

    path = f"{host.state_dir}/{document.FILE}"
    text = host.read(path)
    if text is None:
        yield NothingToCheck("no validation yet", "healthd validate")
        return
    try:
        found = document.parse(text)
    except document.NotAValidation as error:
        raise ValueError(f"{path}: {error}") from None
    yield Observation("validation_ended_timestamp_seconds", found.ended)
    yield Observation("validation_duration_seconds", max(found.ended - found.began, 0.0))
    counted = Counter((result.test, result.verdict) for result in found.results)
    for test, verdict in sorted(counted)[:MAX_SERIES]:
        labels = (("test", test), ("verdict", verdict))
        yield Observation("validation_results", counted[test, verdict], labels=labels)
    for verdict, severity in (("failed", Severity.DEGRADED), ("slow", Severity.WARNING)):
        matching = [result for result in found.results if result.verdict == verdict]
        for part in dict.fromkeys(result.part for result in matching):
            yield _finding(
                f"validation/{verdict}", severity, part, [result for result in matching if result.part == part]
            )


def _finding(code: str, severity: Severity, part: str, results: Sequence[Result]) -> Finding:
    """Return the finding for a part, with all its test results. The text is also the evidence. Identical text therefore
    does not reopen a condition after `healthd repaired` or a manual resume.
    """
    message = "; ".join(f"{result.test}: {result.message}" for result in results)[:MAX_MESSAGE]
    evidence = f"{results[0].source}: {message}" if results[0].source else message
    return Finding(severity, code, part, message, evidence=evidence)


OBSERVATIONS = {
    "validation_ended_timestamp_seconds": Meaning(
        "Time at which this node's last validation ended, in seconds since the epoch."
    ),
    "validation_duration_seconds": Meaning("Duration of this node's last validation, in seconds."),
    "validation_results": Meaning(
        "Number of results in this node's last validation, by test and verdict (ok, slow, failed, not_measured). A "
        "pair without results has no series.",
        ("test", "verdict"),
    ),
}

EXPLAIN = {
    "validation/failed": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A test failed on this GPU, port or other part in the last healthd validate. The test produced a wrong "
        "result or an error from CUDA, NCCL or a port, or its tool reported another failure.",
        "A job would get the same error, or wrong results without any error.",
        "healthd validate --show lists all results and the tools. Run healthd validate again on the idle node. "
        "healthd status lists other open conditions of the same part. The condition clears when the test passes in a "
        "later validation, or after healthd repaired validation/failed PART.",
    ),
    "validation/slow": Explain(
        Severity.WARNING,
        Clears.PASS,
        "This GPU, link or other part was slower in the last healthd validate than its floor, its peers or its own "
        "history.",
        "A synchronous job runs only as fast as its slowest GPU or link, so one slow GPU slows down all others.",
        "No action tonight. healthd validate --show lists the numbers. Look in healthd status for problems with the "
        "part's clocks, heat, PCIe width or links. Run healthd validate again on the idle node. To drain the node "
        'for slow parts, set severity = { "validation/slow" = "degraded" } in [checks.validation].',
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.GPU)
ENDS_JOB = {"validation/slow": EndsJob.NEVER}
