"""The protocol of RUNTIME_DIR/healthd.sock, for both its ends.

One JSON object a line each way, then the daemon closes.

    {"command": "status"}                                        -> {"status": {...as status_json...}}
    {"command": "repaired", "code": "gpu_xid/79", "part": null}  -> {"done": "repaired: ..."}
    {"command": "ack", "code": "gpu_xid/79", "part": null, "seconds": 7200, "why": "..."} -> {"done": "..."}
    {"command": "unack", "code": "gpu_xid/79", "part": null}     -> {"done": "..."}
    {"command": "pause", "seconds": 1800, "why": "..."}          -> {"done": "..."}
    {"command": "unpause"}                                 -> {"done": "..."}
    {"command": "failslow-pause", "seconds": 7200, "why": "..."} -> {"done": "..."}
    {"command": "failslow-unpause"}                              -> {"done": "..."}
    {"command": "reload"}                                        -> {"done": "settings read again: ..."}
    {"command": "job-ended"}                                     -> {"done": "...", "asked": 17e8, "left": ["gpu_ecc"]}
        and, where the epilog is to run something: "then": [{"argv": [...], "seconds": 5.0}]
    {"command": "looks-left", "asked": 17e8}                     -> {"asked": 17e8, "left": []}
    anything refused                                             -> {"error": "one sentence"}
    no place for another connection of this user                 -> {"error": "one sentence", "again": true}

Anyone may ask for the status; only root (or the user that healthd runs as) may command.
Nothing heavy is loaded here: the epilog of each job imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healthd.common.errors import HealthdError

LATEST = 1e12  # seconds since the epoch: later than any clock

STATUS, LOOKS_LEFT = "status", "looks-left"  # anyone may ask
JOB_ENDED, RELOAD = "job-ended", "reload"
ACK, UNACK, REPAIRED, PAUSE, UNPAUSE = "ack", "unack", "repaired", "pause", "unpause"
FAILSLOW_PAUSE, FAILSLOW_UNPAUSE = "failslow-pause", "failslow-unpause"
CLI = {FAILSLOW_PAUSE: "failslow pause", FAILSLOW_UNPAUSE: "failslow unpause", JOB_ENDED: "hook epilog"}
QUESTIONS = (STATUS, LOOKS_LEFT)
COMMANDS = (JOB_ENDED, RELOAD, ACK, UNACK, REPAIRED, PAUSE, UNPAUSE, FAILSLOW_PAUSE, FAILSLOW_UNPAUSE)

Request = dict[str, Any]


class Refused(HealthdError):
    """One sentence: why a request is not answered."""


# --- requests, as a client makes them


def plain(command: str) -> Request:
    """Of what has no more to say: STATUS, RELOAD, UNPAUSE, FAILSLOW_UNPAUSE."""
    return {"command": command}


def looks_left(asked: object) -> Request:
    """`asked`: as the answer to `job_ended` has it."""
    return {"command": LOOKS_LEFT, "asked": asked}


def job_ended(job: str) -> Request:
    return {"command": JOB_ENDED, "job": job}


def repaired(code: str, part: str | None, why: str | None) -> Request:
    """`part`: None = every part with that code."""
    return {"command": REPAIRED, "code": code, "part": part, "why": why}


def ack(code: str, part: str | None, seconds: float, why: str) -> Request:
    return {"command": ACK, "code": code, "part": part, "seconds": seconds, "why": why}


def unack(code: str, part: str | None) -> Request:
    """`part`: None = every part with that code."""
    return {"command": UNACK, "code": code, "part": part}


def pause(seconds: float, why: str, command: str = PAUSE) -> Request:
    """`command`: PAUSE or FAILSLOW_PAUSE."""
    return {"command": command, "seconds": seconds, "why": why}


# --- requests, as the daemon takes them


def command_of(request: Mapping[str, Any], who: str, may_command: bool) -> str:
    """Raises Refused where there is no such command, or `who` ("root (uid 0)") may not give it."""
    name = request.get("command")
    if not isinstance(name, str):
        raise Refused("command: must be text")
    if name not in (*QUESTIONS, *COMMANDS):
        raise Refused(f"there is no command {name!r:.40}")
    if name in COMMANDS and not may_command:
        raise Refused(f"permission denied for {who}: run it as root (sudo healthd {CLI.get(name, name)} ...)")
    return name


def asked_of(request: Mapping[str, Any]) -> float:
    """The time (epoch) of a LOOKS_LEFT. Raises Refused."""
    asked = request.get("asked")
    if not isinstance(asked, int | float) or not 0 <= asked < LATEST:  # JSON's true would be a moment in 1970
        raise Refused("asked: must be a time, in seconds since the epoch")
    return asked
