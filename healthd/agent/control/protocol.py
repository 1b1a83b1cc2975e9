"""Protocol for RUNTIME_DIR/healthd.sock, shared by the client and the server.

Each side sends one line with a JSON object. Then the daemon closes the connection.

    {"command": "status"}                                        -> {"status": {...as status_json...}}
    {"command": "repaired", "code": "gpu_xid/79", "part": null}  -> {"done": "repaired: ..."}
    {"command": "ack", "code": "gpu_xid/79", "part": null, "seconds": 7200, "why": "..."} -> {"done": "..."}
    {"command": "unack", "code": "gpu_xid/79", "part": null}     -> {"done": "..."}
    {"command": "pause", "seconds": 1800, "why": "..."}          -> {"done": "..."}
    {"command": "unpause"}                                       -> {"done": "..."}
    {"command": "repair-now"}                                    -> {"done": "..."}
    {"command": "repair-stop"}                                   -> {"done": "..."}
    {"command": "failslow-pause", "seconds": 7200, "why": "..."} -> {"done": "..."}
    {"command": "failslow-unpause"}                              -> {"done": "..."}
    {"command": "reload"}                                        -> {"done": "settings reloaded: ..."}
    {"command": "job-ended"}           -> {"done": "...", "requested_at": 17e8, "pending": ["gpu_ecc"]}
        and, if the epilog must run programs: "then": [{"argv": [...], "seconds": 5.0}]
    {"command": "pending-runs", "requested_at": 17e8}            -> {"requested_at": 17e8, "pending": []}
    a refused request                                            -> {"error": "one sentence"}
    this user has too many connections                           -> {"error": "one sentence", "again": true}

Every user may query; only root and the daemon's own user may send commands. This module has no large imports, because
each job's epilog imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healthd.common.errors import HealthdError

MAX_TIME = 1e12  # maximum time in seconds since the epoch, beyond any clock

STATUS, PENDING_RUNS = "status", "pending-runs"  # every user may query
JOB_ENDED, RELOAD = "job-ended", "reload"
ACK, UNACK, REPAIRED, PAUSE, UNPAUSE = "ack", "unack", "repaired", "pause", "unpause"
REPAIR_NOW, REPAIR_STOP = "repair-now", "repair-stop"
FAILSLOW_PAUSE, FAILSLOW_UNPAUSE = "failslow-pause", "failslow-unpause"
CLI_NAMES = {
    FAILSLOW_PAUSE: "failslow pause",
    FAILSLOW_UNPAUSE: "failslow unpause",
    JOB_ENDED: "hook epilog",
    REPAIR_NOW: "repair now",
    REPAIR_STOP: "repair stop",
}
QUERIES = (STATUS, PENDING_RUNS)
COMMANDS = (
    *(JOB_ENDED, RELOAD, ACK, UNACK, REPAIRED, PAUSE, UNPAUSE, REPAIR_NOW, REPAIR_STOP),
    *(FAILSLOW_PAUSE, FAILSLOW_UNPAUSE),
)

Request = dict[str, Any]


class RequestRefused(HealthdError):
    """Raised if a request is refused. The message is one sentence."""


# --- requests from the client


def simple_request(command: str) -> Request:
    """Return a request without arguments: STATUS, RELOAD, UNPAUSE, REPAIR_NOW, REPAIR_STOP or FAILSLOW_UNPAUSE."""
    return {"command": command}


def pending_runs(requested_at: object) -> Request:
    """Return a request for the runs that are still pending. `requested_at` comes from the answer to `job_ended`."""
    return {"command": PENDING_RUNS, "requested_at": requested_at}


def job_ended(job: str) -> Request:
    return {"command": JOB_ENDED, "job": job}


def repaired(code: str, part: str | None, why: str | None) -> Request:
    """Return a `repaired` request. If `part` is None, the request covers every part with that code."""
    return {"command": REPAIRED, "code": code, "part": part, "why": why}


def ack(code: str, part: str | None, seconds: float, why: str) -> Request:
    return {"command": ACK, "code": code, "part": part, "seconds": seconds, "why": why}


def unack(code: str, part: str | None) -> Request:
    """Return an `unack` request. If `part` is None, the request covers every part with that code."""
    return {"command": UNACK, "code": code, "part": part}


def pause(seconds: float, why: str, command: str = PAUSE) -> Request:
    """Return a pause request. `command` is PAUSE or FAILSLOW_PAUSE."""
    return {"command": command, "seconds": seconds, "why": why}


# --- parsing in the daemon


def parse_command(request: Mapping[str, Any], user: str, may_command: bool) -> str:
    """Return the command's name. Raises RequestRefused if the command is unknown or `user` ("root (uid 0)") may not
    send it.
    """
    name = request.get("command")
    if not isinstance(name, str):
        raise RequestRefused("command: must be text")
    if name not in (*QUERIES, *COMMANDS):
        raise RequestRefused(f"unknown command {name!r:.40}")
    if name in COMMANDS and not may_command:
        raise RequestRefused(
            f"permission denied for {user}: run it as root (sudo healthd {CLI_NAMES.get(name, name)} ...)"
        )
    return name


def parse_requested_at(request: Mapping[str, Any]) -> float:
    """Return the time in a PENDING_RUNS request, in epoch seconds. Raises RequestRefused if the time is invalid."""
    requested_at = request.get("requested_at")
    if (
        not isinstance(requested_at, int | float) or not 0 <= requested_at < MAX_TIME
    ):  # Python would read JSON's true as a time in 1970
        raise RequestRefused("requested_at: must be seconds since the epoch")
    return requested_at
