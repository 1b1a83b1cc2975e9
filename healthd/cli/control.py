"""What people ask of the running daemon, and tell it. `ask` never waits longer than it says (protocol: status.py)."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import struct
import time
from contextlib import suppress
from typing import Any

from healthd.cli import flags
from healthd.cli.flags import DEFAULT_RUNTIME_DIR, Command, Parser
from healthd.cli.terminal import OF_HEALTH, REFUSED, UNKNOWN, Stop, as_json, page, say
from healthd.errors import HealthdError

SOCKET = "healthd.sock"  # as in status.py, which loads far more than a client needs
PATIENCE_SECONDS = 5.0
RELOAD_PATIENCE_SECONDS = 120.0  # each new file of the site is tried first, in a process of its own
AGAIN_SECONDS = 0.1
MAX_ANSWER_BYTES = 64 << 20
SHORTEST_PERIOD_SECONDS = 0.5  # of --watch: each look costs the daemon some milliseconds


class NoAnswer(HealthdError):
    """One sentence: why there is no answer of a daemon."""


class RefusedByDaemon(HealthdError):
    """One sentence of the daemon: why it does not do what was asked."""


def ask(runtime_dir: str, request: dict[str, Any], patience_seconds: float = PATIENCE_SECONDS) -> dict[str, Any]:
    """The daemon's answer to one request; who is turned away tries again. Raises NoAnswer, RefusedByDaemon."""
    deadline = time.monotonic() + patience_seconds
    answer: dict[str, Any] = {}
    while True:
        try:
            answer = _asked(os.path.join(runtime_dir, SOCKET), request, deadline, patience_seconds)
        except NoAnswer:
            if not answer:
                raise
            break  # it answers, and has no time for us: what it said before stands
        if not answer.get("again") or time.monotonic() + AGAIN_SECONDS > deadline:
            break
        time.sleep(AGAIN_SECONDS)
    if "error" in answer:
        raise RefusedByDaemon(str(answer["error"]))
    return answer


def _asked(path: str, request: dict[str, Any], deadline: float, patience_seconds: float) -> dict[str, Any]:
    """One answer, a refusal too. Raises NoAnswer."""
    try:
        line = _exchange(path, json.dumps(request).encode() + b"\n", deadline)
    except FileNotFoundError:
        raise NoAnswer(f"healthd does not answer: there is no {path}") from None
    except ConnectionRefusedError:
        raise NoAnswer(f"healthd does not answer: nobody listens at {path}") from None
    except (TimeoutError, BlockingIOError):
        raise NoAnswer(f"healthd does not answer: nothing came from {path} within {patience_seconds:g} s") from None
    except OSError as error:
        raise NoAnswer(f"healthd cannot be asked at {path}: {error.strerror or error}") from None
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        what = "nonsense" if line else "nothing: it may be stopping"
        raise NoAnswer(f"healthd at {path} answered {what}")
    return answer


def _exchange(path: str, request: bytes, deadline: float) -> bytes:
    """Send, and read to the stream's end. Raises OSError; TimeoutError at the deadline, even if the answer drips in."""
    answer = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        # Blocking, so that where the daemon's queue is full the kernel lets us wait for a place, in turn; a Python
        # time-out makes it fail at once instead (unix(7): EAGAIN).
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_left(deadline)))
        stream.connect(path)
        stream.settimeout(_left(deadline))
        with suppress(ConnectionError):  # it hung up on us before we had said all; why, can be read all the same
            stream.sendall(request)
        with suppress(ConnectionError):
            while len(answer) < MAX_ANSWER_BYTES:
                stream.settimeout(_left(deadline))
                chunk = stream.recv(1 << 16)
                if not chunk:
                    break
                answer += chunk
    return bytes(answer)


def _timeval(seconds: float) -> bytes:
    """As setsockopt(2) wants it. 0 would mean: for ever."""
    return struct.pack("ll", int(seconds), max(1, int(seconds % 1 * 1_000_000)))


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


# --- the commands


def _answer(
    args: argparse.Namespace,
    request: dict[str, Any],
    runtime_dir: str | None = None,
    patience_seconds: float = PATIENCE_SECONDS,
) -> dict[str, Any]:
    try:
        return ask(runtime_dir or flags.runtime_dir(args), request, patience_seconds)
    except NoAnswer as error:
        from healthd.cli import running

        there = running.daemons() or "no process of it is to be seen"
        raise Stop(f"{error}; {there}", UNKNOWN) from None
    except RefusedByDaemon as error:
        raise Stop(f"healthd: {error}", REFUSED) from None


def _status_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs (docs/json.md)")
    parser.add_argument(
        "--watch", metavar="SECONDS", nargs="?", const="2", help="again and again, each 2 s or so many, until Ctrl-C"
    )
    flags.client(parser)


def _status(args: argparse.Namespace) -> int:
    if args.watch is not None:
        return _watch(args)
    text, status = _shown(args, _answer(args, {"command": "status"}).get("status", {}))
    return say(text, status)


def _watch(args: argparse.Namespace) -> int:
    """The daemon may come and go meanwhile: what it said last stays below the sentence that says so."""
    from healthd.cli.watch import Seen, watch
    from healthd.say.render import ago

    period = flags.duration(args.watch) or flags.duration(f"{args.watch}s")
    if period is None or period < SHORTEST_PERIOD_SECONDS:
        must = f"must be seconds, or a time like 1m, at least {SHORTEST_PERIOD_SECONDS:g}s"
        raise Stop(f'healthd status: --watch: {must}, is "{args.watch}"')
    runtime_dir = flags.runtime_dir(args)
    last: dict[str, Any] = {}

    def look() -> Seen:
        nonlocal last
        try:
            last = document = ask(runtime_dir, {"command": "status"}, min(period, PATIENCE_SECONDS)).get("status", {})
            _, status = _shown(args, document)
            return Seen(status, lambda: _shown(args, document)[0])
        except (NoAnswer, RefusedByDaemon, Stop) as error:
            sentence = str(error)
            if args.json:
                return Seen(UNKNOWN, lambda: as_json({"error": sentence}))
            before = last
            when = f"\n\nAs it was {ago(before['time'], time.time())}:\n\n" if before else "\n"
            return Seen(UNKNOWN, lambda: f"{sentence}{when}{_shown(args, before)[0] if before else ''}")

    return watch(look, period, f"healthd status, each {period:g} s", plain=args.json)


def _shown(args: argparse.Namespace, document: dict[str, Any]) -> tuple[str, int]:
    """The text of a status, and the exit status. Raises Stop."""
    from healthd.say import render

    given = [(f"--{name.replace('_', '-')}", getattr(args, name)) for name in ("config", "runtime_dir")]
    reached_with = shlex.join(word for flag, value in given if value is not None for word in (flag, value))
    try:
        status = OF_HEALTH[document["health"]]
        text = as_json(document) if args.json else render.status(document, time.time(), page(), reached_with)
    except (KeyError, TypeError, ValueError) as error:
        from healthd import __version__

        there = document.get("version", "unknown") if isinstance(document, dict) else "unknown"
        raise Stop(
            f"healthd: the daemon (version {there}) answered something that this version ({__version__}) cannot show: "
            f"{type(error).__name__} {error}",
            UNKNOWN,
        ) from None
    return text, status


def _repaired_arguments(parser: Parser) -> None:
    parser.add_argument("code", metavar="CODE", help="gpu_xid/79, as status shows it")
    parser.add_argument("part", metavar="PART", nargs="?", help="0000:1b:00.0 (default: every part with that code)")
    parser.add_argument("--why", metavar="TEXT", help="what was done: for the log, and for status")
    flags.client(parser)


def _repaired(args: argparse.Namespace) -> int:
    request = {"command": "repaired", "code": args.code, "part": args.part, "why": args.why}
    return say(_answer(args, request)["done"] + "\n")


def _ack_arguments(parser: Parser) -> None:
    parser.add_argument("code", metavar="CODE", help="ib_link/down, as status shows it")
    parser.add_argument("part", metavar="PART", nargs="?", help="mlx5_3/1 (default: every part with that code)")
    _pause_arguments(parser)


def _ack(args: argparse.Namespace) -> int:
    request = {"command": "ack", "code": args.code, "part": args.part}
    return say(_answer(args, {**request, "seconds": _seconds(args, "ack"), "why": args.why})["done"] + "\n")


def _pause_arguments(parser: Parser) -> None:
    parser.add_argument("--for", metavar="TIME", dest="time", required=True, help="30m, 2h, 1d, 90s; at most a week")
    parser.add_argument("--why", metavar="TEXT", required=True, help="for whoever looks at the node meanwhile")
    flags.client(parser)


def _pause(args: argparse.Namespace) -> int:
    request = {"command": "pause", "seconds": _seconds(args, "pause"), "why": args.why}
    return say(_answer(args, request)["done"] + "\n")


def _pause_detection(args: argparse.Namespace) -> int:
    request = {"command": "pause-detection", "seconds": _seconds(args, "failslow pause"), "why": args.why}
    return say(_answer(args, request)["done"] + "\n")


def _resume_detection(args: argparse.Namespace) -> int:
    return say(_answer(args, {"command": "resume-detection"})["done"] + "\n")


def _seconds(args: argparse.Namespace, command: str) -> float:
    seconds = flags.duration(args.time)
    if seconds is None:
        must = "must be a time like 30m, 2h or 1h30m (units s, m, h, d)"
        raise Stop(f'healthd {command}: --for: {must}, is "{args.time}"')
    return seconds


def _resume_checks(args: argparse.Namespace) -> int:
    return say(_answer(args, {"command": "resume-checks"})["done"] + "\n")


def _reload(args: argparse.Namespace) -> int:
    default = os.environ.get("RUNTIME_DIRECTORY", DEFAULT_RUNTIME_DIR)  # systemd.exec(5)
    try:
        directory = flags.runtime_dir(args, default)
    except Stop:  # what is wrong with the file, the daemon says: its status and its metrics tell of it then
        directory = default
    answer = _answer(args, {"command": "reload"}, directory, RELOAD_PATIENCE_SECONDS)
    return say(answer["done"] + "\n")


COMMANDS = {
    "status": Command(
        _status_arguments,
        _status,
        "What the running daemon believes: health, conditions with the next command to type, the last round, and what "
        "Slurm has.\n"
        "Exit status: 0 healthy, 1 warning, 2 degraded or critical, 3 unknown or not running, 64 wrong use; with "
        "--watch that of the last look.",
        "  healthd status\n  healthd status --watch\n"
        "  healthd status --json | jq '.conditions[] | {code, subject, job}'\n",
    ),
    "ack": Command(
        _ack_arguments,
        _ack,
        "Tell the daemon that you know of something. It does not drain for that until the time is over, lifts a drain "
        "that it made for nothing else, and shows who knows and why. It counts again when the time is over, or as soon "
        "as it is worse. A new ack takes the place of the old one: --for 1s ends it.",
        '  healthd ack ib_link/down mlx5_3/1 --for 2h --why "cable is on its way"\n',
    ),
    "repaired": Command(
        _repaired_arguments,
        _repaired,
        "Tell the daemon that something is repaired. It ends the condition, looks at everything again, and "
        "resumes the node in Slurm once every check has passed.",
        '  healthd repaired gpu_xid/79 0000:1b:00.0 --why "reseated, ticket 12"\n',
    ),
    "pause": Command(
        _pause_arguments,
        _pause,
        "Leave Slurm alone for a while. Checks go on; what opens meanwhile acts only if a check still finds it "
        "afterwards.",
        '  healthd pause --for 30m --why "driver upgrade"\n',
    ),
    "reload": Command(
        flags.client,
        _reload,
        "The daemon reads the settings and the site's checks again, as `systemctl reload healthd` does. If something "
        "is wrong with them, the old ones stay in force, and the exit status is 1.",
        "  healthd config check /etc/healthd/healthd.toml && healthd reload\n",
    ),
    "resume-checks": Command(flags.client, _resume_checks, "End the pause now. All checks look at once."),
    "failslow pause": Command(
        _pause_arguments,
        _pause_detection,
        "Say nothing new of slow jobs on this node for a while: a benchmark that is meant to be slow, a job that is "
        "debugged. What is said already stays until it is over; faults, and what they do in Slurm, stay as they are. "
        "It outlives a restart of the daemon, not a reboot.",
        '  healthd failslow pause --for 2h --why "a benchmark that throttles"\n',
    ),
    "failslow resume-detection": Command(
        flags.client, _resume_detection, "Slow jobs on this node are told again from now on."
    ),
}
