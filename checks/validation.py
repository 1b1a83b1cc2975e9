"""Results of the last `healthd validate` of this node: failed tests and slow parts.

The check only reads the result file in the state directory, and costs nothing. By default only a person runs `healthd
validate`. With `before_resume` healthd runs it on a node that it drained and that is idle, before the resume; with
`epilog` Slurm's epilog runs a quick validation if no other job is on the node. docs/validation.md lists the tests,
their tools and their references.

Rule: a test that a tool itself reports as failed (a wrong result, an error of CUDA or NCCL) is evidence of a fault and
drains. A slow part only warns unless the site raises the severity: how slow is too slow depends on its jobs. FALCON
(arXiv 2410.12588, 4.3) validates in the same way, by GEMM and by transfers on rings, and calls 1.1 times the median
slow.
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
AFTER_EVENTS = ("job_end",)  # an epilog may have validated
HOLDS_RESUME = False  # an unreadable document keeps no node drained: earlier failures remain open

MAX_MESSAGE = 300  # of a message
MAX_SERIES = 64  # of tests and verdicts
MIN_SECONDS, MAX_SECONDS = 10.0, 86400.0  # range of `healthd validate --seconds`; less measures nothing
ENDING_SECONDS = 30.0  # for the start and the end of its programs
MAX_EPILOG_SECONDS = 30.0
TOOLS = ("python", "nvbandwidth", "all_reduce_perf", "sendrecv_perf", "ib_write_bw", "dcgmi")

DcgmLevel = Annotated[int, between(0, 4)]


class Config(CheckSettings, frozen=True):
    """before_resume   run `healthd validate` on a drained, idle node before its resume
    before_resume_seconds   how long that may take
    epilog          run a quick validation in the epilog
    epilog_seconds  how long that may take; HEALTHD_EPILOG_SECONDS of /etc/default/healthd must be 5 more
    floors          test -> the lowest accepted value, in the test's unit; below it a part is slow
    tools           tool -> path of its program, if healthd does not find it: python, nvbandwidth, ib_write_bw, ...
    dcgm_level      level of `dcgmi diag -r`; 0 = not at all
    clear_after     one clean run is enough: another one reads the same document
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
    """Return the finding of a part with the results of all its tests. The text is also the evidence: the same text
    again does not reopen a condition after `healthd repaired` or a manual resume."""
    message = "; ".join(f"{result.test}: {result.message}" for result in results)[:MAX_MESSAGE]
    evidence = f"{results[0].source}: {message}" if results[0].source else message
    return Finding(severity, code, part, message, evidence=evidence)


OBSERVATIONS = {
    "validation_ended_timestamp_seconds": Meaning(
        "Time at which the last validation of this node ended, in seconds since the epoch."
    ),
    "validation_duration_seconds": Meaning("Duration of the last validation of this node, in seconds."),
    "validation_results": Meaning(
        "Number of results of the last validation of this node, by test and verdict (ok, slow, failed, "
        "not_measured); a pair that did not occur has no series.",
        ("test", "verdict"),
    ),
}

EXPLAIN = {
    "validation/failed": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "In the last healthd validate a test of this part failed: a wrong result, an error of CUDA, NCCL or a port, "
        "or a failure that the tool itself reports.",
        "A job would get the same error, or wrong numbers without an error.",
        "healthd validate --show lists all results and the tools. Run it again on the idle node: healthd validate. "
        "healthd status lists other open conditions of the part. The condition clears with a later validation in which "
        "the test passes, or with healthd repaired validation/failed PART.",
    ),
    "validation/slow": Explain(
        Severity.WARNING,
        Clears.PASS,
        "In the last healthd validate this part was slower than its floor, its peers or its own history.",
        "A synchronous job runs at the pace of its slowest part: one slow GPU slows down all.",
        "No action tonight. healthd validate --show lists the numbers. Check clocks, heat, PCIe width and link errors "
        "of the part in healthd status, and run it again on the idle node: healthd validate. To drain for such parts: "
        'severity = { "validation/slow" = "degraded" } in [checks.validation].',
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.GPU)
ENDS_JOB = {"validation/slow": EndsJob.NEVER}
