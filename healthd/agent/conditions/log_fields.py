"""The fields of a line in healthd's log that tells of a condition, or of what was done to the node for one. Pure.

    journalctl -u healthd CODE=gpu_xid/79
    journalctl -u healthd NODE_ACTION=drain

Names without a prefix, since people type them (systemd.journal-fields(7): a client's own fields are in capitals). The
lines of the stream have theirs with the prefix HEALTHD_ (events/writer.py).
"""

from __future__ import annotations

from healthd.common.model import Condition, Decision, Leave

DRAIN = "drain"  # Slurm shows the node drained in our words
WITHHELD = "withheld"  # a drain is wanted and not sent: mode observe, a pause, the fleet limit, Slurm is away
REQUEUE = "requeue"  # a job, named in JOB=
RESUME = "resume"  # our drain is over by our own resume
OPERATOR_RESUME = "operator_resume"  # ... by somebody else's

Fields = dict[str, str]


def of_condition(c: Condition) -> Fields:
    return {
        "CODE": c.code,
        "SUBJECT": c.subject,
        "SEVERITY": c.severity.name.lower(),
        **({"JOB": c.job} if c.job else {}),
    }


def of_decision(decision: Decision, causes: tuple[Condition, ...]) -> Fields:
    """Of a drain that is wanted and not sent; none of any other decision: what is done is told when it is done."""
    if not (isinstance(decision, Leave) and decision.would.startswith(DRAIN)):
        return {}
    return {"NODE_ACTION": WITHHELD, **(of_condition(causes[0]) if causes else {})}
