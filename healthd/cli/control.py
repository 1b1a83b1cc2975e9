"""Commands for the running daemon: status, ack, unack, repaired, pause, unpause, reload."""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Callable
from typing import Any

from healthd.agent.control import protocol
from healthd.agent.control.client import TIMEOUT_SECONDS, DaemonUnreachable, RefusedByDaemon, send_request
from healthd.cli import flags
from healthd.cli.flags import Command, Parser
from healthd.cli.terminal import HEALTH_STATUS, REFUSED, UNKNOWN, Stop, as_json, page, write_output
from healthd.common.paths import RUNTIME_DIR

RELOAD_PATIENCE_SECONDS = 120.0  # long, because each new site file is first tested in another process
NEXT_COMMANDS = "systemctl status healthd; journalctl -u healthd -n 20"
SHORTEST_PERIOD_SECONDS = 0.5  # for --watch, because each refresh costs the daemon a few milliseconds


def send(
    args: argparse.Namespace,
    request: dict[str, Any],
    runtime_dir: str | None = None,
    patience_seconds: float = TIMEOUT_SECONDS,
) -> dict[str, Any]:
    """Send a request to the daemon and return its answer. Raises Stop."""
    try:
        return send_request(runtime_dir or flags.runtime_dir(args), request, patience_seconds)
    except DaemonUnreachable as error:
        from healthd.cli import daemons

        running = daemons.describe_daemons()
        note = f". Running on this machine: {running}" if running else ""
        raise Stop(f"{error}. Try: {NEXT_COMMANDS}{note}", UNKNOWN) from None
    except RefusedByDaemon as error:
        raise Stop(f"healthd: {error}", REFUSED) from None


def _status_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")
    parser.add_argument(
        "--watch", metavar="SECONDS", nargs="?", const="2", help="refresh every 2 s, or SECONDS, until Ctrl-C"
    )
    flags.add_client_flags(parser)


def _status(args: argparse.Namespace) -> int:
    if args.watch is not None:
        return _watch(args)
    text, status = _render_status(args, send(args, protocol.simple_request(protocol.STATUS)).get("status", {}))
    return write_output(text, status)


def _watch(args: argparse.Namespace) -> int:
    """Show the status until Ctrl-C. If the daemon stops answering, show the last status below the error."""
    from healthd.cli.watch import Refresh, watch
    from healthd.common.page import ago

    period = flags.parse_duration(args.watch) or flags.parse_duration(f"{args.watch}s")
    if period is None or period < SHORTEST_PERIOD_SECONDS:
        must = f"must be a number of seconds, or a duration like 1m, at least {SHORTEST_PERIOD_SECONDS:g}s"
        raise Stop(f'healthd status: --watch: {must}, got "{args.watch}"')
    runtime_dir = flags.runtime_dir(args)
    last: dict[str, Any] = {}

    def refresh() -> Refresh:
        nonlocal last
        try:
            answer = send_request(runtime_dir, protocol.simple_request(protocol.STATUS), min(period, TIMEOUT_SECONDS))
            last = document = answer.get("status", {})
            _, status = _render_status(args, document)
            return Refresh(status, lambda: _render_status(args, document)[0])
        except (DaemonUnreachable, RefusedByDaemon, Stop) as error:
            sentence = f"{error}. Try: {NEXT_COMMANDS}" if isinstance(error, DaemonUnreachable) else str(error)
            if args.json:
                return Refresh(UNKNOWN, lambda: as_json({"error": sentence}))
            before = last
            when = f"\n\nLast status, {ago(before['time'], time.time())}:\n\n" if before else "\n"
            return Refresh(UNKNOWN, lambda: f"{sentence}{when}{_render_status(args, before)[0] if before else ''}")

    return watch(refresh, period, f"healthd status, every {period:g} s", plain=args.json)


def _render_status(args: argparse.Namespace, document: dict[str, Any]) -> tuple[str, int]:
    """Return a status as text, and the exit status. Raises Stop."""
    from healthd.agent.reporting import render

    options = [(f"--{name.replace('_', '-')}", getattr(args, name)) for name in ("config", "runtime_dir")]
    reached_with = shlex.join(word for flag, value in options if value is not None for word in (flag, value))
    try:
        status = HEALTH_STATUS[document["health"]]
        text = as_json(document) if args.json else render.status(document, time.time(), page(), reached_with)
    except (KeyError, TypeError, ValueError) as error:
        from healthd import __version__

        daemon_version = document.get("version", "unknown") if isinstance(document, dict) else "unknown"
        raise Stop(
            f"healthd: the daemon (version {daemon_version}) sent an answer that this version ({__version__}) "
            f"cannot show: {type(error).__name__} {error}",
            UNKNOWN,
        ) from None
    return text, status


def _command_runner(request: Callable[[argparse.Namespace], dict[str, Any]]) -> Callable[[argparse.Namespace], int]:
    """Return a command function that sends one request and prints the daemon's answer."""
    return lambda args: write_output(send(args, request(args))["done"] + "\n")


def _code_arguments(parser: Parser, code: str = "ib_link/down", part: str = "mlx5_3/1") -> None:
    parser.add_argument("code", metavar="CODE", help=f"code from healthd status, such as {code}")
    parser.add_argument(
        "part", metavar="PART", nargs="?", help=f"part, such as {part} (default: every part with that code)"
    )


def _repaired_arguments(parser: Parser) -> None:
    _code_arguments(parser, "gpu_xid/79", "0000:1b:00.0")
    parser.add_argument("--why", metavar="TEXT", help="what was repaired, for the log and healthd status")
    flags.add_client_flags(parser)


def _ack_arguments(parser: Parser) -> None:
    _code_arguments(parser)
    _pause_arguments(parser)


def _unack_arguments(parser: Parser) -> None:
    _code_arguments(parser)
    flags.add_client_flags(parser)


def _pause_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--for", metavar="TIME", dest="time", required=True, help="duration: 30m, 2h, 1d, 90s; at most 7d"
    )
    parser.add_argument("--why", metavar="TEXT", required=True, help="reason, shown by healthd status")
    flags.add_client_flags(parser)


def _seconds(args: argparse.Namespace, command: str) -> float:
    seconds = flags.parse_duration(args.time)
    if seconds is None:
        must = "must be a duration like 30m, 2h or 1h30m (units s, m, h, d)"
        raise Stop(f'healthd {command}: --for: {must}, got "{args.time}"')
    return seconds


def _reload(args: argparse.Namespace) -> int:
    default = os.environ.get("RUNTIME_DIRECTORY", RUNTIME_DIR)  # systemd.exec(5)
    try:
        directory = flags.runtime_dir(args, default)
    except Stop:  # ignored here: the daemon reports errors in the file, also in its status and metrics
        directory = default
    answer = send(args, protocol.simple_request(protocol.RELOAD), directory, RELOAD_PATIENCE_SECONDS)
    return write_output(answer["done"] + "\n")


COMMANDS = {
    "status": Command(
        _status_arguments,
        _status,
        "Show the node's health, open conditions with the next command to run, the last round of checks and the node's "
        "state in Slurm.\n"
        "Exit status: 0 healthy, 1 warning, 2 degraded or critical, 3 unknown or not running, 64 usage error; "
        "with --watch, the status of the last refresh.",
        "  healthd status\n  healthd status --watch\n"
        "  healthd status --json | jq '.conditions[] | {code, subject, job}'\n",
    ),
    "ack": Command(
        _ack_arguments,
        _command_runner(lambda args: protocol.ack(args.code, args.part, _seconds(args, "ack"), args.why)),
        "Acknowledge a condition: healthd does not drain the node for it during this time, and lifts a drain that it "
        "made for this condition alone. healthd status shows who acknowledged it and why. The condition takes full "
        "effect again after this time, if it gets worse, or after healthd unack. A new ack replaces the old one.",
        '  healthd ack ib_link/down mlx5_3/1 --for 2h --why "cable is on its way"\n',
    ),
    "unack": Command(
        _unack_arguments,
        _command_runner(lambda args: protocol.unack(args.code, args.part)),
        "End an acknowledgement early. The condition takes full effect again: if it is degraded or critical, the "
        "node is drained.",
        "  healthd unack ib_link/down mlx5_3/1\n",
    ),
    "repaired": Command(
        _repaired_arguments,
        _command_runner(lambda args: protocol.repaired(args.code, args.part, args.why)),
        "Report a repair. healthd clears the condition, runs all checks, and resumes the node in Slurm once all "
        "checks have passed.",
        '  healthd repaired gpu_xid/79 0000:1b:00.0 --why "reseated, ticket 12"\n',
    ),
    "pause": Command(
        _pause_arguments,
        _command_runner(lambda args: protocol.pause(_seconds(args, "pause"), args.why)),
        "Change nothing in Slurm for a while. Checks continue. Conditions that open during the pause take effect only "
        "if a check still finds them when the pause ends.",
        '  healthd pause --for 30m --why "driver upgrade"\n',
    ),
    "reload": Command(
        flags.add_client_flags,
        _reload,
        "Reload the settings and the site's checks, as `systemctl reload healthd` does. If they contain an error, the "
        "daemon keeps the old ones, and the exit status is 1.",
        "  healthd config check /etc/healthd/healthd.toml && healthd reload\n",
    ),
    "unpause": Command(
        flags.add_client_flags,
        _command_runner(lambda _: protocol.simple_request(protocol.UNPAUSE)),
        "End the pause now and run all checks.",
    ),
    "failslow pause": Command(
        _pause_arguments,
        _command_runner(
            lambda args: protocol.pause(_seconds(args, "failslow pause"), args.why, protocol.FAILSLOW_PAUSE)
        ),
        "Report no new slow jobs on this node for a while, for example during a benchmark or a debugging session. Slow "
        "jobs that are already reported stay until they end. Faults and their effects in Slurm do not change. The "
        "pause survives a daemon restart, but not a reboot.",
        '  healthd failslow pause --for 2h --why "benchmark that throttles"\n',
    ),
    "failslow unpause": Command(
        flags.add_client_flags,
        _command_runner(lambda _: protocol.simple_request(protocol.FAILSLOW_UNPAUSE)),
        "Report slow jobs on this node again.",
    ),
}
