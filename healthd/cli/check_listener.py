"""`healthd check NAME` of a check that only listens to the kernel log: what the running daemon has heard.

Such a check looks at nothing: "it found nothing" would be no word on the node's health. The daemon knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Document = Mapping[str, Any]

HEALTH = (
    "healthy",
    "warning",
    "unknown",
    "degraded",
    "unhealthy",
)  # the worse of two counts, as in agent/conditions/verdict.py
NO_DAEMON_THERE = "a recording and another machine's files have no daemon that listened"


def ask_daemon(names: Sequence[str], runtime_dir: str) -> Document:
    """What these checks have found, by the daemon's word. `trouble`: why it cannot tell, one sentence."""
    from healthd.agent.control import protocol
    from healthd.agent.control.client import NoAnswer, RefusedByDaemon, ask

    try:
        status = ask(runtime_dir, protocol.plain(protocol.STATUS))["status"]
        log = status["kernel_log"]
        return {
            "checks": list(names),
            "since": status["started"],
            "kernel_log": log,
            "conditions": [c for c in status["conditions"] if c["check"] in names],
            "trouble": "" if log["alive"] else f"the daemon reads no kernel log: {log.get('trouble') or log['source']}",
        }
    except (NoAnswer, RefusedByDaemon) as error:
        return unheard(names, str(error))
    except (KeyError, TypeError):
        return unheard(names, "the daemon is of another version, and answers what this one cannot read")


def unheard(names: Sequence[str], trouble: str) -> Document:
    return {"checks": list(names), "since": None, "kernel_log": None, "conditions": [], "trouble": trouble}


def together(document: Document, heard: Document) -> dict[str, Any]:
    """The document of the round with what the daemon heard. Without a daemon these checks are not known."""
    unknown = [f"{name} only listens to the kernel log: {heard['trouble']}" for name in heard["checks"]]
    health = [document["health"], _health(heard["conditions"]), *(["unknown"] if heard["trouble"] else [])]
    return {
        **document,
        "health": max(health, key=HEALTH.index),
        "unknown": [*document["unknown"], *(unknown if heard["trouble"] else [])],
        "listening": dict(heard),
    }


def _health(conditions: Sequence[Document]) -> str:
    """As agent/conditions/verdict.py has it."""
    acting = {c["severity"] for c in conditions if c["state"] == "open" and not c.get("observed")}
    if "critical" in acting:
        return "unhealthy"
    if "degraded" in acting:
        return "degraded"
    return "warning" if any(c["severity"] != "info" for c in conditions) else "healthy"
