"""What Slurm calls: `healthd hook epilog` and `healthd hook healthcheck`. Small and bounded: they start on every
node of a job in the same second. The prolog is plain sh (packaging/slurm/prolog): it has no time for an interpreter.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import time
from typing import Any, NoReturn

from healthd.cli import flags
from healthd.cli.control import NoAnswer, RefusedByDaemon, ask
from healthd.cli.flags import Command, Parser
from healthd.cli.terminal import say

FIRST_PAUSE_SECONDS = 0.02
LAST_PAUSE_SECONDS = 0.25
HEALTHCHECK_SECONDS = 10.0  # slurmd would kill it after 60 s, and start the next one beside it before that
USABLE, DRAINED, NO_VERDICT = 0, 2, 3  # statuses of healthcheck


def end_after(seconds: float) -> None:
    """End this process after `seconds`, whatever it waits for, with status 0: a slow hook must not fail a node."""

    def end(_number: int, _frame: object) -> NoReturn:
        os._exit(0)

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def epilog(runtime_dir: str, job: str, wait_seconds: float) -> str:
    """Tell the daemon that `job` ended, and wait until it has looked. Returns one sentence on what came of it."""
    deadline = time.monotonic() + wait_seconds
    pause = FIRST_PAUSE_SECONDS
    try:
        answer = _ask(runtime_dir, {"command": "job-ended", "job": job}, deadline)
        while answer.get("left") and time.monotonic() + pause < deadline:
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_SECONDS)
            answer = _ask(runtime_dir, {"command": "looks-left", "asked": answer.get("asked")}, deadline)
    except (NoAnswer, RefusedByDaemon) as error:
        return str(error)
    left = answer.get("left") or []
    return f"not waited for: {', '.join(map(str, left))}" if left else "healthd has looked"


def _ask(runtime_dir: str, request: dict[str, Any], deadline: float) -> dict[str, Any]:
    return ask(runtime_dir, request, max(deadline - time.monotonic(), 0.01))


def healthcheck(runtime_dir: str, now: float) -> tuple[int, str]:
    """(status, sentence) from the verdict file alone: no socket, no check, no Slurm. slurmd starts the next
    one even while one hangs: that is no fault."""
    try:
        lock = os.open(os.path.join(runtime_dir, "verdict"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return NO_VERDICT, f"no verdict: {os.path.join(runtime_dir, 'verdict')}: {error.strerror}"
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        word, expires, why = (*os.read(lock, 4096).decode("ascii", "replace").strip().split(" ", 2), "", "", "")[:3]
    except BlockingIOError:
        return USABLE, "another one runs"
    finally:
        os.close(lock)
    if not expires.isdecimal() or now >= int(expires):
        return NO_VERDICT, "the verdict is old: healthd does not run, or hangs"
    return (DRAINED if word == "drain" else USABLE), f"{word}: {why}"


# --- the commands


def _hook_epilog_arguments(parser: Parser) -> None:
    parser.add_argument("--wait", metavar="SECONDS", type=float, default=10.0, help="at most so long (default: 10)")
    flags.client(parser)


def _hook_epilog(args: argparse.Namespace) -> int:
    end_after(args.wait + 1)
    return say(epilog(flags.runtime_dir(args), os.environ.get("SLURM_JOB_ID", ""), args.wait) + "\n")


def _hook_healthcheck(args: argparse.Namespace) -> int:
    end_after(HEALTHCHECK_SECONDS)
    status, sentence = healthcheck(flags.runtime_dir(args), time.time())
    return say(sentence + "\n", status)


COMMANDS = {
    "hook epilog": Command(
        _hook_epilog_arguments,
        _hook_epilog,
        "For Slurm's epilog: the job ended, look at the GPUs now; and wait for that. Exit status 0, always.",
    ),
    "hook healthcheck": Command(
        flags.client,
        _hook_healthcheck,
        "For HealthCheckProgram: what the daemon has decided. Exit status: 0 usable, 2 drained, 3 no daemon.",
    ),
}
