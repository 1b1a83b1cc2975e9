"""AdminComment for a job that a fault hit. `sacct -o AdminComment` shows it:

    healthd: node n1: gpu_xid/79 0000:61:00.0: Xid 79: GPU has fallen off the bus at 2026-11-21T15:00:00Z

Text by others is kept and comes before healthd's. Each of the job's nodes has its own entry. Entries from an earlier
run of the job are replaced.
"""

from __future__ import annotations

import re
from datetime import datetime, timezone

from healthd.common.text import regex

SEPARATOR = "; "
MAX_BYTES = 999  # maximum length that is read back; a longer comment is neither written nor changed
_TIME = "%Y-%m-%dT%H:%M:%SZ"


def admin_comment(current: str, node: str, reason: str, fault_time: float, job_start: float) -> str:
    """Return the new comment for a job whose comment is `current`.

    Return `current` if it already has an entry for this run, or if there is no room. `reason` is the drain's Reason,
    "healthd: ...". The times are epoch seconds.
    """
    own_pattern = regex(
        rf"(?:^|{SEPARATOR})healthd: node {re.escape(node)}: .*? at (\d{{4}}-\d\d-\d\dT[\d:]{{8}}Z)(?={SEPARATOR}|$)"
    )
    last = own_pattern.search(current)
    if last and _seconds(last[1]) >= int(job_start):
        return current
    foreign_text = own_pattern.sub("", current).removeprefix(SEPARATOR)
    when = datetime.fromtimestamp(fault_time, timezone.utc).strftime(_TIME)
    text = f"healthd: node {node}: {reason.removeprefix('healthd: ')} at {when}"
    new = f"{foreign_text}{SEPARATOR}{text}" if foreign_text else text
    return new if len(new.encode()) <= MAX_BYTES else current


def _seconds(text: str) -> float:
    try:
        return datetime.strptime(text, _TIME).replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return 0.0
