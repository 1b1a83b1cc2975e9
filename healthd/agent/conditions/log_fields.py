"""Fields for log lines about a condition or about an action on the node. All functions are pure.

    journalctl -u healthd CODE=gpu_xid/79
    journalctl -u healthd NODE_ACTION=drain

The names have no prefix, because people type them (systemd.journal-fields(7): a client's own fields are in upper case).
Fields of the event stream have the prefix HEALTHD_ (events/writer.py).
"""

from __future__ import annotations

from healthd.common.model import Condition, Decision, Leave

DRAIN = "drain"  # Slurm shows the node drained with healthd's reason
WITHHELD = "withheld"  # a drain is due but not sent: mode observe, a pause, the fleet limit, Slurm unreachable
REQUEUE = "requeue"  # JOB= names the job
RESUME = "resume"  # healthd resumed the node
OPERATOR_RESUME = "operator_resume"  # an operator or another tool resumed the node

Fields = dict[str, str]


def condition_fields(c: Condition) -> Fields:
    return {
        "CODE": c.code,
        "SUBJECT": c.subject,
        "SEVERITY": c.severity.name.lower(),
        **({"JOB": c.job} if c.job else {}),
    }


def decision_fields(decision: Decision, causes: tuple[Condition, ...]) -> Fields:
    """Return the fields for a withheld drain, or no fields for other decisions.

    Actions are logged only after they are done.
    """
    if not (isinstance(decision, Leave) and decision.would.startswith(DRAIN)):
        return {}
    return {"NODE_ACTION": WITHHELD, **(condition_fields(causes[0]) if causes else {})}
