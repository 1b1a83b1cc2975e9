"""What Slurm calls: `healthd hook epilog` and `healthd hook healthcheck`. Small and bounded: they start on every
node of a job in the same second. The prolog is plain sh (packaging/slurm/prolog): it has no time for an interpreter.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from contextlib import suppress
from typing import Any, NoReturn

from healthd.agent.control import protocol
from healthd.agent.control.client import Answer, NoAnswer, RefusedByDaemon, ask_with_uid
from healthd.cli import flags
from healthd.cli.flags import Command, Parser
from healthd.cli.terminal import Stop, complain, say
from healthd.common.paths import VERDICT_FILE
from healthd.common.text import is_decimal

MOST_WAIT_SECONDS = 3600.0
FIRST_PAUSE_SECONDS = 0.02
LAST_PAUSE_SECONDS = 0.25
# A validation in the epilog: what it needs at least, is given to end its programs, and what is left for the end of us.
LEAST_SECONDS, ENDING_SECONDS, LAST_SECONDS = 2.0, 4.0, 0.5
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HEALTHCHECK_SECONDS = 10.0  # slurmd would kill it after 60 s, and may start the next one beside it before that
# A verdict holds for three rounds, and an interval is a week at most (plausible.Period); it ends in seconds since 1970.
LONGEST_SECONDS, EPOCH_DIGITS = 3 * 7 * 86400.0, 11
USABLE, DRAINED, NO_VERDICT = 0, 2, 3  # statuses of healthcheck


def end_after(seconds: float) -> None:
    """End this process after `seconds`, whatever it waits for, with status 0: a slow hook must not fail a node."""

    def end(_number: int, _frame: object) -> NoReturn:
        os._exit(0)

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def epilog(runtime_dir: str, job: str, wait_seconds: float) -> str:
    """Tell the daemon that `job` ended, and wait until it has looked. Returns one sentence on what came of it."""
    began = time.monotonic()
    deadline = began + wait_seconds
    pause = FIRST_PAUSE_SECONDS
    then: object = None
    try:
        answer, uid = _ask(runtime_dir, protocol.job_ended(job), deadline)
        then = answer.get("then")
        while answer.get("left") and time.monotonic() + pause < deadline:
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_SECONDS)
            answer = _ask(runtime_dir, protocol.looks_left(answer.get("asked")), deadline).table
    except (NoAnswer, RefusedByDaemon) as error:
        return str(error)
    left = answer.get("left") or []
    looked = f"not waited for: {', '.join(map(str, left))}" if left else "healthd has looked"
    if not then or left:
        return looked
    if not may_run(uid, os.geteuid()):
        return f"{looked}; its request to run a validation is ignored: the daemon runs as uid {uid}"
    from healthd.common.slurm.slurm_conf import epilog_timeout

    return f"{looked}; {_run_then(then, min(deadline, began + epilog_timeout('/')), runtime_dir, job)}"


def _run_then(then: object, deadline: float, runtime_dir: str, job: str) -> str:
    """What the daemon wants run after the last job: a validation. It is over ENDING_SECONDS before the deadline, which
    it needs to end its programs; then the daemon looks at what it left."""
    words = []
    for item in then if isinstance(then, list) else []:
        argv, seconds = (item.get("argv"), item.get("seconds")) if isinstance(item, dict) else (None, None)
        if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
            return "what it wants run is none"
        left = deadline - time.monotonic() - ENDING_SECONDS
        seconds = min(float(seconds), left) if isinstance(seconds, int | float) else left
        if seconds < LEAST_SECONDS:
            return "no time is left to validate"
        words.append(_run_one((*argv, "--seconds", f"{seconds:.0f}"), deadline - LAST_SECONDS))
    with suppress(NoAnswer, RefusedByDaemon):
        _ask(runtime_dir, protocol.job_ended(job), deadline)
    return ", ".join(words)


def _run_one(argv: tuple[str, ...], deadline: float) -> str:
    """At the deadline it is told to end, and left."""
    import subprocess

    program = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
        env={**os.environ, "PATH": os.environ.get("PATH") or PATH},
    )
    try:
        status = program.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        program.terminate()
        program.returncode = 0  # it ends by itself: nobody waits for it
        return "the validation took too long"
    return f"validated (status {status})"


def may_run(daemon_uid: int, own_uid: int) -> bool:
    """Return True if commands sent by a daemon of `daemon_uid` may be run by a process of `own_uid`: they gain nothing
    if the daemon is root's, or runs as the same user."""
    return daemon_uid in (0, own_uid)


def _ask(runtime_dir: str, request: dict[str, Any], deadline: float) -> Answer:
    return ask_with_uid(runtime_dir, request, max(deadline - time.monotonic(), 0.01))


def healthcheck(runtime_dir: str, now: float) -> tuple[int, str]:
    """(status, sentence) from the verdict file alone: no socket, no check, no Slurm. slurmd may start the next while
    this one hangs. No lock keeps it from that: everybody may read the verdict, so everybody could hold the lock."""
    path = os.path.join(runtime_dir, VERDICT_FILE)
    try:
        with open(path, "rb", buffering=0) as file:
            text = file.read(4096) or b""
    except OSError as error:
        return NO_VERDICT, f"no verdict: {path}: {error.strerror}"
    word, expires, why = (*text.decode("ascii", "replace").strip().split(" ", 2), "", "", "")[:3]
    if not is_decimal(expires[:EPOCH_DIGITS]) or (ends := int(expires[:EPOCH_DIGITS])) <= now:
        return NO_VERDICT, "the verdict is old: healthd does not run, or hangs"
    if len(expires) > EPOCH_DIGITS or ends > now + LONGEST_SECONDS:
        return NO_VERDICT, f"no verdict: no daemon writes one that holds so long as that in {path}"
    return (DRAINED if word == "drain" else USABLE), f"{word}: {why}"


# --- the commands


def _hook_epilog_arguments(parser: Parser) -> None:
    parser.add_argument("--wait", metavar="SECONDS", default="10", help="maximum wait (default: 10)")
    flags.client(parser)


def _hook_epilog(args: argparse.Namespace) -> int:
    wait = _wait_seconds(args.wait)
    end_after(wait + 1)
    try:
        return say(epilog(flags.runtime_dir(args), os.environ.get("SLURM_JOB_ID", ""), wait) + "\n")
    except Stop as stop:  # Slurm drains a node whose epilog fails
        return complain(str(stop))


def _wait_seconds(text: str) -> float:
    """What --wait says. Where that is no time, a slip of the pen must not fail the epilog: the default."""
    with suppress(ValueError):
        if 0.0 <= (seconds := float(text)) <= MOST_WAIT_SECONDS:
            return seconds
    complain(f'healthd hook epilog: --wait: must be 0 to {MOST_WAIT_SECONDS:.0f} seconds, got "{text}": taken as 10')
    return 10.0


def _hook_healthcheck(args: argparse.Namespace) -> int:
    end_after(HEALTHCHECK_SECONDS)
    status, sentence = healthcheck(flags.runtime_dir(args), time.time())
    return say(sentence + "\n", status)


COMMANDS = {
    "hook epilog": Command(
        _hook_epilog_arguments,
        _hook_epilog,
        "Check the GPUs after a job and wait for the result, for Slurm's epilog. Exit status: always 0.",
    ),
    "hook healthcheck": Command(
        flags.client,
        _hook_healthcheck,
        "Print the daemon's decision, for HealthCheckProgram. Exit status: 0 usable, 2 drained, 3 no daemon.",
    ),
}
