"""What the last `healthd validate` of this node measured: a test that failed, a part that is slow.

The check only reads what that left in the state directory, and costs nothing. By default nothing ever runs `healthd
validate` but a person: `before_resume` has healthd run it on a node that it drained and that is idle, before it resumes
it; `epilog` has Slurm's epilog run a quick one where no other job is on the node. What is measured, with what and
against what stands in docs/validation.md.

Rule: a test that a tool itself calls failed (a wrong result, an error of CUDA or NCCL) is evidence of a fault and
drains. A slow part only warns until the site says otherwise: how slow is too slow depends on its jobs. FALCON (arXiv
2410.12588, 4.3) validates in the same way, by GEMM and by transfers on rings, and calls 1.1 times the median slow.
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
    Host,
    Meaning,
    NothingToCheck,
    Observation,
    Past,
    Program,
    Severity,
    Times,
    between,
)

if TYPE_CHECKING:
    from healthd.validation.document import Result

USES = ""
AFTER_EVENTS = ("job_end",)  # an epilog may have validated
HOLDS_RESUME = False  # a document that cannot be read keeps no node: what failed before stands as it is

MOST_WORDS = 300  # of a message
MOST_SERIES = 64  # of tests and verdicts
LEAST_SECONDS, MOST_SECONDS = 10.0, 86400.0  # of what `healthd validate --seconds` takes; less measures nothing
ENDING_SECONDS = 30.0  # for the start of its programs, and their end
LONGEST_EPILOG_SECONDS = 30.0
TOOLS = ("python", "nvbandwidth", "all_reduce_perf", "sendrecv_perf", "ib_write_bw", "dcgmi")

DcgmLevel = Annotated[int, between(0, 4)]


class Config(CheckSettings, frozen=True):
    """before_resume   whether `healthd validate` is run on a drained, idle node before its resume
    before_resume_seconds   how long that may take
    epilog          whether the epilog runs a quick one
    epilog_seconds  how long that may take; HEALTHD_EPILOG_SECONDS of /etc/default/healthd must be 5 more
    floors          test -> the least that is well, in the test's unit; below it a part is slow
    tools           tool -> path of its program, where it is not found by itself: python, nvbandwidth, ib_write_bw, ...
    dcgm_level      of `dcgmi diag -r`; 0 = not at all
    clear_after     one clean look is enough: another one reads the same document
    """

    before_resume: bool = False
    before_resume_seconds: Annotated[float, between(LEAST_SECONDS, MOST_SECONDS, " seconds (a day)")] = 600.0
    epilog: bool = False
    epilog_seconds: Annotated[float, between(0.1, LONGEST_EPILOG_SECONDS, " seconds")] = 5.0
    floors: dict[str, Annotated[float, between(1e-6, 1e9)]] = field(default_factory=dict)
    tools: dict[str, AbsolutePath] = field(default_factory=dict)
    dcgm_level: DcgmLevel = 2
    clear_after: Times = 1


def validate(config: Config) -> str | None:
    for tool in config.tools:
        if tool not in TOOLS:
            return f'tools: there is no "{tool}", there is {", ".join(TOOLS)}'
    return None


def before_resume(config: Config) -> Program | None:
    if not config.before_resume:
        return None
    arguments = ("validate", "--why", "before_resume", "--seconds", f"{config.before_resume_seconds:g}")
    return Program(arguments, config.before_resume_seconds + ENDING_SECONDS)


def after_job(config: Config) -> Program | None:
    return Program(("validate", "--quick", "--why", "epilog"), config.epilog_seconds) if config.epilog else None


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation | NothingToCheck]:
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
    for test, verdict in sorted(counted)[:MOST_SERIES]:
        labels = (("test", test), ("verdict", verdict))
        yield Observation("validation_results", counted[test, verdict], labels=labels)
    for verdict, severity in (("failed", Severity.DEGRADED), ("slow", Severity.WARNING)):
        of_it = [result for result in found.results if result.verdict == verdict]
        for part in dict.fromkeys(result.part for result in of_it):
            yield _finding(f"validation/{verdict}", severity, part, [one for one in of_it if one.part == part])


def _finding(code: str, severity: Severity, part: str, results: Sequence[Result]) -> Finding:
    """One of a part: what each of its tests says. The words are evidence: the same ones again are no news to a person
    who has said "repaired", or has resumed the node."""
    message = "; ".join(f"{result.test}: {result.message}" for result in results)[:MOST_WORDS]
    evidence = f"{results[0].source}: {message}" if results[0].source else message
    return Finding(severity, code, part, message, evidence=evidence)


OBSERVATIONS = {
    "validation_ended_timestamp_seconds": Meaning(
        "When the last validation of this node ended, in seconds since the epoch."
    ),
    "validation_duration_seconds": Meaning("How long the last validation of this node took, in seconds."),
    "validation_results": Meaning(
        "How many results of a test the last validation of this node had with a verdict: ok, slow, failed, "
        "not_measured; a pair that did not occur has no series.",
        ("test", "verdict"),
    ),
}

EXPLAIN = {
    "validation/failed": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "In the last healthd validate a test of this part failed: a wrong result, an error of CUDA, NCCL or a port, or "
        "a tool that says so itself.",
        "A job would get the same error, or wrong numbers without one.",
        "healthd validate --show has all results and the tools. Run it again on the idle node: healthd validate. Look "
        "at what else healthd status says of the part. A later validation in which the test passes ends it, or "
        "healthd repaired validation/failed PART.",
    ),
    "validation/slow": Explain(
        Severity.WARNING,
        Clears.PASS,
        "In the last healthd validate this part was slower than its floor, its peers or its own history.",
        "A synchronous job goes at the pace of its slowest part: one slow GPU slows down all.",
        "healthd validate --show has the numbers. Look at clocks, heat, PCIe width and link errors of the part in "
        "healthd status, and run it again on the idle node: healthd validate. Where such parts are to drain: "
        'severity = { "validation/slow" = "degraded" } in [checks.validation].',
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.GPU)
ENDS_JOB = {"validation/slow": EndsJob.NEVER}
