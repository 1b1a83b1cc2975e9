"""What people ask of the running daemon, and tell it. `ask` never waits longer than it says (protocol: status.py)."""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from typing import Any

from healthd.cli import flags
from healthd.cli.flags import Command, Parser
from healthd.cli.terminal import OF_HEALTH, REFUSED, UNKNOWN, Stop, as_json, page, say
from healthd.errors import HealthdError

SOCKET = "healthd.sock"  # as in status.py, which loads far more than a client needs
PATIENCE_SECONDS = 5.0
MAX_ANSWER_BYTES = 64 << 20


class NoAnswer(HealthdError):
    """One sentence: why there is no answer of a daemon."""


class RefusedByDaemon(HealthdError):
    """One sentence of the daemon: why it does not do what was asked."""


def ask(runtime_dir: str, request: dict[str, Any], patience_seconds: float = PATIENCE_SECONDS) -> dict[str, Any]:
    """The daemon's answer to one request. Raises NoAnswer, RefusedByDaemon."""
    path = os.path.join(runtime_dir, SOCKET)
    try:
        line = _exchange(path, json.dumps(request).encode() + b"\n", time.monotonic() + patience_seconds)
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
    if "error" in answer:
        raise RefusedByDaemon(str(answer["error"]))
    return answer


def _exchange(path: str, request: bytes, deadline: float) -> bytes:
    """Send, and read to the stream's end. Raises OSError; TimeoutError at the deadline, even if the answer drips in."""
    answer = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.settimeout(_left(deadline))
        stream.connect(path)
        stream.sendall(request)
        while len(answer) < MAX_ANSWER_BYTES:
            stream.settimeout(_left(deadline))
            chunk = stream.recv(1 << 16)
            if not chunk:
                break
            answer += chunk
    return bytes(answer)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


# --- the commands


def _answer(args: argparse.Namespace, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return ask(flags.runtime_dir(args), request)
    except NoAnswer as error:
        from healthd.cli import running

        there = running.daemons() or "no process of it is to be seen"
        raise Stop(f"{error}; {there}", UNKNOWN) from None
    except RefusedByDaemon as error:
        raise Stop(f"healthd: {error}", REFUSED) from None


def _status_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs (docs/json.md)")
    flags.client(parser)


def _status(args: argparse.Namespace) -> int:
    from healthd.say import render

    document = _answer(args, {"command": "status"}).get("status", {})
    try:
        status = OF_HEALTH[document["health"]]
        text = as_json(document) if args.json else render.status(document, time.time(), page())
    except (KeyError, TypeError, ValueError) as error:
        from healthd import __version__

        there = document.get("version", "unknown") if isinstance(document, dict) else "unknown"
        raise Stop(
            f"healthd: the daemon (version {there}) answered something that this version ({__version__}) cannot show: "
            f"{type(error).__name__} {error}",
            UNKNOWN,
        ) from None
    return say(text, status)


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


def _seconds(args: argparse.Namespace, command: str) -> float:
    seconds = flags.duration(args.time)
    if seconds is None:
        must = "must be a time like 30m, 2h or 1h30m (units s, m, h, d)"
        raise Stop(f'healthd {command}: --for: {must}, is "{args.time}"')
    return seconds


def _resume_checks(args: argparse.Namespace) -> int:
    return say(_answer(args, {"command": "resume-checks"})["done"] + "\n")


COMMANDS = {
    "status": Command(
        _status_arguments,
        _status,
        "What the running daemon believes: health, conditions, the last round, and what Slurm has.\n"
        "Exit status: 0 healthy, 1 warning, 2 degraded or critical, 3 unknown or not running, 64 wrong use.",
        "  healthd status\n  healthd status --json | jq '.conditions[] | {code, subject, job}'\n",
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
    "resume-checks": Command(flags.client, _resume_checks, "End the pause now. All checks look at once."),
}
