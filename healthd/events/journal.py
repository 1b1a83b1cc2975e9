"""The same lines as entries of the journal, for whoever collects that. Only the worker sends them: journald may hang.

`journalctl SYSLOG_IDENTIFIER=healthd-events HEALTHD_EVENT=opened` finds them.
"""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any

from healthd.host import journald

IDENTIFIER = "healthd-events"
PATIENCE_SECONDS = 2.0  # for all lines of a call together
INFO = 6  # as in syslog(3)
ENABLED = "check_enabled"


def send(lines: Iterable[str], path: str = journald.SOCKET) -> int:
    """Send each line as an entry; successive check_enabled lines, which a start has by the dozen, are one entry. Return
    how many lines journald did not take."""
    until, lost = time.monotonic() + PATIENCE_SECONDS, 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for event, same in itertools.groupby(map(json.loads, lines), key=lambda said: str(said.get("event"))):
            group = list(same)
            entries = [_enabled(group)] if event == ENABLED and len(group) > 1 else list(map(entry, group))
            for fields in entries:
                sender.settimeout(max(until - time.monotonic(), 0.0))
                try:
                    sender.sendto(journald.journal_entry(fields), path)
                except OSError:
                    lost += len(group) // len(entries)
    return lost


def _enabled(group: list[dict[str, Any]]) -> dict[str, object]:
    """Return the one entry of several check_enabled lines. Their fields are in the stream's file."""
    names = ", ".join(f"{said.get('check')} {said.get('instance') or ''}".strip() for said in group)
    message = f"{ENABLED}: {len(group)} checks: {names}"
    return {"MESSAGE": message, "PRIORITY": INFO, "SYSLOG_IDENTIFIER": IDENTIFIER, "HEALTHD_EVENT": ENABLED}


def entry(said: Mapping[str, Any]) -> dict[str, object]:
    """The fields of a line's entry: HEALTHD_ and the field's name; texts as they are, ids with blanks between them."""
    fields = {f"HEALTHD_{name.upper()}": _text(value) for name, value in said.items()}
    return {"MESSAGE": words(said), "PRIORITY": INFO, "SYSLOG_IDENTIFIER": IDENTIFIER, **fields}


def words(said: Mapping[str, Any]) -> str:
    """A line in words: "opened gpu_xid/79 0000:1b:00.0: Xid 79: ..."."""
    what = " ".join(str(said[name]) for name in ("event", "stage", "check", "code", "subject", "job") if said.get(name))
    why = next((str(said[name]) for name in ("error", "message", "words", "reason", "why") if said.get(name)), "")
    return f"{what}: {why}" if why else what


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return " ".join(value)
    return "" if value is None else json.dumps(value, separators=(",", ":"))
