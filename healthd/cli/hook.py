"""Commands called by Slurm: `healthd hook epilog` and `healthd hook healthcheck`.

The commands are small and run for a bounded time, because they start on all nodes of a job in the same second. The
prolog is a plain sh script (packaging/slurm/prolog), because starting Python would take too long.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from contextlib import suppress
from typing import Any, NoReturn

from healthd.agent.control import protocol
from healthd.agent.control.client import Answer, DaemonUnreachable, RefusedByDaemon, send_request_with_uid
from healthd.cli import flags
from healthd.cli.flags import Command, Parser
from healthd.cli.terminal import Stop, write_error, write_output
from healthd.common.paths import VERDICT_FILE
from healthd.common.text import is_decimal

MAX_WAIT_SECONDS = 3600.0
FIRST_PAUSE_SECONDS = 0.02
MAX_PAUSE_SECONDS = 0.25
# For a validation in the epilog: its minimum time, the time to end its programs, and the time for this process to exit.
MIN_SECONDS, ENDING_SECONDS, EXIT_SECONDS = 2.0, 4.0, 0.5
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HEALTHCHECK_SECONDS = 10.0  # slurmd kills the process after 60 s, and may start the next one before that
# A verdict is valid for three rounds, and an interval is at most a week (limits.Period). It expires at epoch seconds.
MAX_VERDICT_SECONDS, EPOCH_DIGITS = 3 * 7 * 86400.0, 11
USABLE, DRAINED, NO_VERDICT = 0, 2, 3  # exit statuses of healthcheck


def end_after(seconds: float) -> None:
    """End this process with status 0 after `seconds`, even if it hangs, so that a slow hook does not take a node out of
    service.
    """

    def end(_number: int, _frame: object) -> NoReturn:
        os._exit(0)

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def epilog(runtime_dir: str, job: str, wait_seconds: float) -> str:
    """Report the end of `job` to the daemon and wait for its checks. Return the result as one sentence."""
    began = time.monotonic()
    deadline = began + wait_seconds
    pause = FIRST_PAUSE_SECONDS
    programs: object = None
    try:
        answer, uid = _query(runtime_dir, protocol.job_ended(job), deadline)
        programs = answer.get("then")
        while answer.get("pending") and time.monotonic() + pause < deadline:
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)
            answer = _query(runtime_dir, protocol.pending_runs(answer.get("requested_at")), deadline).document
    except (DaemonUnreachable, RefusedByDaemon) as error:
        return str(error)
    remaining = answer.get("pending") or []
    result = f"still running: {', '.join(map(str, remaining))}" if remaining else "the checks have run"
    if not programs or remaining:
        return result
    if not is_trusted_request(uid, os.geteuid()):
        return f"{result}; the request for a validation is ignored, because the daemon runs as uid {uid}"
    from healthd.common.slurm.slurm_conf import epilog_timeout

    return f"{result}; {_run_programs(programs, min(deadline, began + epilog_timeout('/')), runtime_dir, job)}"


def _run_programs(programs: object, deadline: float, runtime_dir: str, job: str) -> str:
    """Run the programs that the daemon requests after the last job, such as a validation, and report the job end again.

    The programs get SIGTERM ENDING_SECONDS before the deadline, so that they can end their own child processes. The
    daemon then checks the result.
    """
    results = []
    for item in programs if isinstance(programs, list) else []:
        argv, seconds = (item.get("argv"), item.get("seconds")) if isinstance(item, dict) else (None, None)
        if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
            return "the requested program is invalid"
        seconds_left = deadline - time.monotonic() - ENDING_SECONDS
        seconds = min(float(seconds), seconds_left) if isinstance(seconds, int | float) else seconds_left
        if seconds < MIN_SECONDS:
            return "not enough time left for a validation"
        results.append(_run_program((*argv, "--seconds", f"{seconds:.0f}"), deadline - EXIT_SECONDS))
    with suppress(DaemonUnreachable, RefusedByDaemon):
        _query(runtime_dir, protocol.job_ended(job), deadline)
    return ", ".join(results)


def _run_program(argv: tuple[str, ...], deadline: float) -> str:
    """Run one program. At the deadline, send SIGTERM and do not wait for the program to end."""
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
        program.returncode = 0  # the program ends on its own; this suppresses subprocess's warning
        return "the validation took too long"
    return f"validated (status {status})"


def is_trusted_request(daemon_uid: int, own_uid: int) -> bool:
    """Return True if a process with `own_uid` may run commands from a daemon with `daemon_uid`.

    Commands from root or from the same user gain no rights.
    """
    return daemon_uid in (0, own_uid)


def _query(runtime_dir: str, request: dict[str, Any], deadline: float) -> Answer:
    return send_request_with_uid(runtime_dir, request, max(deadline - time.monotonic(), 0.01))


def healthcheck(runtime_dir: str, now: float) -> tuple[int, str]:
    """Return (status, sentence) from the verdict file, without using the socket, running checks or calling Slurm.

    slurmd may start the next process while this process hangs. A lock cannot prevent that: every user may read the
    verdict, so every user could take the lock.
    """
    path = os.path.join(runtime_dir, VERDICT_FILE)
    try:
        with open(path, "rb", buffering=0) as file:
            text = file.read(4096) or b""
    except OSError as error:
        return NO_VERDICT, f"no verdict: {path}: {error.strerror}"
    word, expires, why = (*text.decode("ascii", "replace").strip().split(" ", 2), "", "", "")[:3]
    if not is_decimal(expires[:EPOCH_DIGITS]) or (ends := int(expires[:EPOCH_DIGITS])) <= now:
        return NO_VERDICT, "the verdict has expired: healthd is not running, or it hangs"
    if len(expires) > EPOCH_DIGITS or ends > now + MAX_VERDICT_SECONDS:
        return NO_VERDICT, f"no verdict: {path} expires too far in the future, so no daemon wrote it"
    return (DRAINED if word == "drain" else USABLE), f"{word}: {why}"


# --- the commands


def _hook_epilog_arguments(parser: Parser) -> None:
    parser.add_argument("--wait", metavar="SECONDS", default="10", help="maximum wait (default: 10)")
    flags.add_client_flags(parser)


def _hook_epilog(args: argparse.Namespace) -> int:
    wait = _wait_seconds(args.wait)
    end_after(wait + 1)
    try:
        return write_output(epilog(flags.runtime_dir(args), os.environ.get("SLURM_JOB_ID", ""), wait) + "\n")
    except Stop as stop:  # Slurm drains a node if its epilog fails
        return write_error(str(stop))


def _wait_seconds(text: str) -> float:
    """Return --wait in seconds. For an invalid value, return the default, so that a typo does not fail the epilog."""
    with suppress(ValueError):
        if 0.0 <= (seconds := float(text)) <= MAX_WAIT_SECONDS:
            return seconds
    write_error(f'healthd hook epilog: --wait: must be 0 to {MAX_WAIT_SECONDS:.0f} seconds, got "{text}"; using 10')
    return 10.0


def _hook_healthcheck(args: argparse.Namespace) -> int:
    end_after(HEALTHCHECK_SECONDS)
    status, sentence = healthcheck(flags.runtime_dir(args), time.time())
    return write_output(sentence + "\n", status)


COMMANDS = {
    "hook epilog": Command(
        _hook_epilog_arguments,
        _hook_epilog,
        "Check the GPUs after a job and wait for the result (for Slurm's Epilog). Exit status: always 0.",
    ),
    "hook healthcheck": Command(
        flags.add_client_flags,
        _hook_healthcheck,
        "Print the daemon's decision (for HealthCheckProgram). Exit status: 0 usable, 2 drained, 3 no daemon.",
    ),
}
