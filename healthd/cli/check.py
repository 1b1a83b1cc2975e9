"""`healthd check` and `healthd record`: run one round of checks without a daemon."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from msgspec.structs import replace

from healthd.cli import flags
from healthd.cli.flags import Command, Parser, load_settings, require_scenario, settings_errors_as_usage
from healthd.cli.terminal import HEALTH_STATUS, REFUSED, Stop, as_json, page, write_error, write_output

if TYPE_CHECKING:
    from healthd.agent.scheduler.one_round import KernelLogReader, RoundResult
    from healthd.agent.settings.config import Loaded, Settings
    from healthd.agent.settings.registry import Check
    from healthd.agent.worker.client import WorkerClient
    from healthd.agent.worker.process import Setup

Document = Mapping[str, Any]

WORKER_SECONDS = 1.0  # how long an idle worker may take to exit
WORKER_OUTPUT_BYTES = 64 << 10
SLURM_SECONDS = 10.0  # maximum wait for Slurm's record of this node
DAEMON_SECONDS = 2.0  # maximum wait for the daemon, or for a file server that has the kernel log
HEALTH = ("healthy", "warning", "unknown", "degraded", "unhealthy")  # from best to worst


# --- check


def _check_arguments(parser: Parser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these checks (default: all enabled checks)")
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")
    parser.add_argument("--replay", metavar="FILE", help="evaluate a recording made by healthd record")
    flags.add_target_flags(parser)
    parser.add_argument(
        "--runtime-dir", metavar="DIR", help="the daemon's runtime directory, for checks that only read the kernel log"
    )


def _check(args: argparse.Namespace) -> int:
    from healthd.agent.scheduler import one_round

    if args.replay is not None:
        found, checks = _replay(args)
        runtime_dir = None
    else:
        from healthd.agent.worker.process import worker_setup

        loaded, checks, kernel_log = _load_target(args, "check", use_daemon=True)
        settings = loaded.settings
        with worker_client(worker_setup(settings), checks) as client:
            found = one_round.run_round(loaded, checks, client, kernel_log)._replace(limits=_limits(settings))
        runtime_dir = settings.runtime_dir if settings.root == "/" else None
    document = one_round.round_json(found)
    if event_checks := [name for name in dict.fromkeys(args.names) if not checks[name].has_run]:
        daemon_report = (
            query_daemon(event_checks, runtime_dir)
            if runtime_dir is not None
            else no_daemon_report(event_checks, "there is no running daemon for a recording or another machine's files")
        )
        document = merge_daemon_report(document, daemon_report)
    status = HEALTH_STATUS[document["health"]]
    if args.json:
        return write_output(as_json(document), status)
    from healthd.agent.reporting import render

    return write_output(render.check(document, page(), replayed=args.replay is not None), status)


def _limits(settings: Settings) -> tuple[str, ...]:
    """Return the daemon's limits on this machine.

    Checks that read the kernel log or the journal themselves report their own limits. In a mode that needs Slurm, query
    a running daemon, or slurmctld if no daemon is running.
    """
    from healthd.agent.conditions.impairments import limits, needs_slurm

    if settings.root != "/":
        return ()
    slurm = needs_slurm(settings.mode)
    daemon_limits = _daemon_limits(settings) if slurm else None
    if daemon_limits is not None:
        return daemon_limits
    problem = _slurm_problem(settings.node_name) if slurm else ""
    log = _log_problem(settings.kernel_log.source)
    return limits(settings.mode, settings.kernel_log.source, not log, log, problem)


def _daemon_limits(settings: Settings) -> tuple[str, ...] | None:
    """Return the limits that a daemon with these settings reports, or None if no daemon answers or its mode differs."""
    from healthd.agent.control import protocol
    from healthd.agent.control.client import DaemonUnreachable, RefusedByDaemon, send_request

    try:
        status = send_request(settings.runtime_dir, protocol.simple_request(protocol.STATUS), DAEMON_SECONDS).get(
            "status", {}
        )
    except (DaemonUnreachable, RefusedByDaemon):
        return None
    is_same_mode = status.get("mode") == settings.mode.value
    return tuple(map(str, status["limits"])) if is_same_mode and "limits" in status else None


def _log_problem(source: str) -> str:
    """Return the reason why the kernel log file cannot be read, or "" if it can. This function does not hang when a
    file server is down.
    """
    from healthd.agent.settings.limits import KERNEL_LOGS
    from healthd.host.program import run_program

    if source in KERNEL_LOGS:
        return ""
    try:
        readable = run_program(("test", "-r", source), DAEMON_SECONDS).status == 0
    except TimeoutError:
        return f"{source} cannot be read: no answer within {DAEMON_SECONDS:g} s"
    return "" if readable else f"{source} is missing or cannot be read"


def _slurm_problem(node_name: str) -> str:
    """Return the reason why the daemon could not use Slurm here, or "" if it could."""
    import shutil

    from healthd.agent.conditions.impairments import missing_programs
    from healthd.agent.slurm.blocking import node_problem

    if missing := missing_programs(shutil.which):
        return f"no {', '.join(missing)} on PATH"
    return node_problem(node_name, SLURM_SECONDS)


def _load_target(
    args: argparse.Namespace, command: str, use_daemon: bool = False
) -> tuple[Loaded, dict[str, Check], KernelLogReader | None]:
    """Return this machine's settings, checks and kernel log."""
    from healthd.agent.scheduler import one_round

    with settings_errors_as_usage():
        loaded, checks = (_daemon_defaults(args) if use_daemon else None) or load_settings(args)
        require_scenario(loaded)
    kernel_log = one_round.kernel_log_reader(loaded.settings)
    return (
        _select_checks(args.names, loaded, checks, kernel_log, use_daemon=use_daemon, command=command),
        checks,
        kernel_log,
    )


def _daemon_defaults(args: argparse.Namespace) -> tuple[Loaded, dict[str, Check]] | None:
    """Return the default settings with the daemon's runtime_dir, or None if they cannot be used.

    The defaults can be used only if the settings are invalid and only built-in event checks are selected. The daemon's
    own results do not depend on the current file.
    """

    from healthd.agent.settings import layers, registry
    from healthd.agent.settings.config import ConfigError
    from healthd.agent.settings.effective import resolve_settings

    if not args.names:
        return None
    checks = registry.built_in_checks()
    if any(name not in checks or checks[name].has_run for name in args.names):
        return None
    try:
        load_settings(args)
    except ConfigError:
        loaded = resolve_settings({}, "the defaults", flags.overrides(args), checks, layers.layers_without_baseline)
        settings = replace(loaded.settings, runtime_dir=flags.runtime_dir(args))
        return replace(loaded, settings=settings), checks
    return None


def _replay(args: argparse.Namespace) -> tuple[RoundResult, Mapping[str, Check]]:
    from healthd.agent.recording import recording
    from healthd.agent.scheduler import one_round
    from healthd.agent.worker.process import worker_setup
    from healthd.cli import replay

    for flag in ("--root", "--fake-nvml", "--profile", "--baseline"):
        if getattr(args, flag[2:].replace("-", "_")) is not None:
            settings = "; use --config for other settings" if flag in ("--profile", "--baseline") else ""
            raise Stop(f"healthd check: {flag} cannot be used with --replay; the recording has its own{settings}")
    try:
        recorded = recording.read(args.replay)
        kernel_log = replay.recorded_kernel_log(recorded)
    except recording.RecordingError as error:
        raise Stop(f"healthd check: {error}") from None
    with settings_errors_as_usage():
        loaded_here, checks = flags.load_settings_at(
            args, recorded.node, lambda *arguments: replay.lower_layers(recorded, *arguments)
        )
    loaded, lost = (
        replay.recorded_settings(recorded, checks)
        if loaded_here is None
        else (replay.at_that_node(loaded_here, recorded), [])
    )
    lost = [result for result in lost if not args.names or result.check in args.names]
    if args.names or loaded_here is not None:
        loaded = _select_checks(args.names, loaded, checks, kernel_log, {run.check for run in recorded.runs})
    setup = replace(worker_setup(loaded.settings), root="/", fake_nvml="", replay=os.path.abspath(args.replay))
    with worker_client(setup, checks) as client:
        return one_round.run_round(loaded, checks, client, kernel_log, recorded, lost), checks


def _select_checks(
    names: Sequence[str],
    loaded: Loaded,
    checks: Mapping[str, Check],
    kernel_log: KernelLogReader | None,
    recorded: Collection[str] = (),
    use_daemon: bool = False,
    command: str = "check",
) -> Loaded:
    """Return the settings with only these checks enabled. Raises Stop if there is nothing to run.

    With `use_daemon`, this machine's daemon provides the results of checks that read only the kernel log.
    """

    from healthd.agent.scheduler.one_round import names_to_run
    from healthd.common.codec import spelling_hint

    for name in names:
        if name not in checks:
            hint = spelling_hint(name.partition("/")[0], checks)  # a code begins with its check's name
            raise Stop(f'healthd {command}: no check is called "{name}"{hint}')
        if not any(check == name for check, _ in loaded.checks):
            raise Stop(f"healthd {command}: {name}: {_not_run_reason(checks[name])}")
    # A check with `when` runs only if it is named on the command line or is in the recording.
    selected = names or [name for name, check in checks.items() if not check.when or name in recorded]
    configs = {key: config for key, config in loaded.checks.items() if key[0] in selected}
    chosen = replace(loaded, checks=configs)
    if not names_to_run(chosen, checks, kernel_log) and not (use_daemon and names and loaded.settings.root == "/"):
        explanation = "the checks only read the kernel log, and no kernel log is available here"
        raise Stop(f"healthd check: nothing to run: {explanation if configs else 'no check is enabled'}")
    return chosen


def _not_run_reason(check: Check) -> str:
    if check.per:
        return f"nothing to check: no [checks.{check.name}.NAME] table is enabled in the settings"
    return "is disabled in the settings (enabled = false)"


# --- checks that only read the kernel log: the running daemon reports their results


def query_daemon(names: Sequence[str], runtime_dir: str) -> Document:
    """Return the daemon's open conditions for these checks.

    If the daemon cannot report them, `problem` is a sentence with the reason.
    """
    from healthd.agent.control import protocol
    from healthd.agent.control.client import DaemonUnreachable, RefusedByDaemon, send_request

    try:
        status = send_request(runtime_dir, protocol.simple_request(protocol.STATUS))["status"]
        log = status["kernel_log"]
        return {
            "checks": list(names),
            "since": status["started"],
            "kernel_log": log,
            "conditions": [c for c in status["conditions"] if c["check"] in names],
            "problem": "" if log["alive"] else f"the daemon reads no kernel log: {log.get('problem') or log['source']}",
        }
    except (DaemonUnreachable, RefusedByDaemon) as error:
        return no_daemon_report(names, str(error))
    except (KeyError, TypeError):
        return no_daemon_report(names, "the daemon runs a different version, whose answer this version cannot read")


def no_daemon_report(names: Sequence[str], problem: str) -> Document:
    return {"checks": list(names), "since": None, "kernel_log": None, "conditions": [], "problem": problem}


def merge_daemon_report(document: Document, daemon_report: Document) -> dict[str, Any]:
    """Return the round's document with the daemon's report added.

    Without a daemon, the results of these checks are unknown.
    """
    unknown = [f"{name} only reads the kernel log: {daemon_report['problem']}" for name in daemon_report["checks"]]
    health = [
        document["health"],
        _health(daemon_report["conditions"]),
        *(["unknown"] if daemon_report["problem"] else []),
    ]
    return {
        **document,
        "health": max(health, key=HEALTH.index),
        "unknown": [*document["unknown"], *(unknown if daemon_report["problem"] else [])],
        "from_daemon": dict(daemon_report),
    }


def _health(conditions: Sequence[Document]) -> str:
    """Return the health that follows from these conditions, as in agent/conditions/verdict.py."""
    acting = {c["severity"] for c in conditions if c["state"] == "open" and not c.get("observed")}
    if "critical" in acting:
        return "unhealthy"
    if "degraded" in acting:
        return "degraded"
    return "warning" if any(c["severity"] != "info" for c in conditions) else "healthy"


# --- record


def _record_arguments(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", nargs="?", help="output file, mode 0600 (default: ./NODE-TIME.rec)")
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these checks (default: all enabled checks)")
    parser.add_argument("--force", action="store_true", help="replace an existing FILE")
    flags.add_target_flags(parser)


def _record(args: argparse.Namespace) -> int:
    import tempfile

    from healthd.agent.recording import recording
    from healthd.agent.reporting import render
    from healthd.agent.scheduler import one_round
    from healthd.agent.worker.process import worker_setup
    from healthd.cli import replay

    with settings_errors_as_usage():
        loaded, checks = load_settings(args)
    if args.file in checks:  # for a file with that name, use ./NAME
        args.names, args.file = [args.file, *args.names], None
    path = args.file if args.file is not None else _default_name(loaded.settings.node_name)
    _require_writable(path, args.force)
    loaded, checks, kernel_log = _load_target(args, "record")
    settings = loaded.settings
    with tempfile.TemporaryDirectory(prefix="healthd-record.") as notes:
        setup = worker_setup(settings, notes)
        with worker_client(setup, checks) as client:
            found = one_round.run_round(loaded, checks, client, kernel_log)
        recorded = replay.record(loaded, found, recording.read_notes(notes))
    try:
        size = recording.write(path, recorded)
    except OSError as error:
        raise Stop(f"healthd record: {path}: cannot be written: {error.strerror}", REFUSED) from None
    answers, silent = replay.count_answers(recorded)
    return write_output(render.recorded(one_round.round_json(found), path, size, answers, silent, page()))


def _default_name(node_name: str) -> str:
    """Return a default file name with the node's name and the UTC time, like "gpu-042-20261122T224501Z.rec"."""
    import time

    return f"{node_name}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.rec"


def _require_writable(path: str, force: bool) -> None:
    """Raise Stop, before any check runs, if the recording cannot be written to `path`."""
    if not path:
        raise Stop("healthd record: the file name is empty")
    if os.path.lexists(path):
        if not os.path.isfile(path):
            raise Stop(f"healthd record: {path}: exists and is not a file", REFUSED)
        if not force:
            raise Stop(f"healthd record: {path}: already exists; --force replaces it", REFUSED)
    folder = os.path.dirname(path) or "."
    if not os.access(folder, os.W_OK | os.X_OK):
        why = "is not writable" if os.path.isdir(folder) else "no such directory"
        raise Stop(f"healthd record: {folder}: {why}", REFUSED)


# --- worker


@contextmanager
def worker_client(setup: Setup, checks: Mapping[str, Check]) -> Iterator[WorkerClient]:
    """Yield a WorkerClient for these checks. Its workers are forks of this process if possible (docs/adr/0032).

    The workers' standard error is printed at the end.
    """
    import time
    from functools import partial

    from healthd.agent.worker import forked
    from healthd.agent.worker.client import WorkerClient

    # Some Python builds (python-build-standalone, conda) have no memfd_create: they were built with an older C library.
    with open(os.memfd_create("words"), "w+b") if hasattr(os, "memfd_create") else _nameless_file() as output:
        # A hanging worker outlives this process. It must not keep our standard error open; otherwise a reader of our
        # standard error would wait.
        with _standard_error_to(output):
            begin = partial(forked.start, checks) if forked.can_fork() else None
            client = WorkerClient(setup, "", time.monotonic, start_process=begin)
            try:
                yield client
            finally:
                client.close(WORKER_SECONDS)
        output.seek(0)
        for line in output.read(WORKER_OUTPUT_BYTES).decode("utf-8", "replace").splitlines():
            write_error(line)


def _nameless_file() -> IO[bytes]:
    import tempfile

    return tempfile.TemporaryFile()


@contextmanager
def _standard_error_to(file: IO[bytes]) -> Iterator[None]:
    """Redirect the standard error of this process and its children to the file."""
    saved = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


COMMANDS = {
    "check": Command(
        _check_arguments,
        _check,
        "Run the checks once. This needs no daemon and changes nothing. Findings are reported without confirmation.\n"
        "In mode drain or act, the result is at least a warning if the node's state in Slurm cannot be read.\n"
        "If NAME is a check that only reads the kernel log, healthd queries the running daemon.\n"
        "Exit status: 0 healthy, 1 warning, 2 degraded or critical, 3 unknown or no answer from the daemon, 64 usage "
        "error.",
        "  healthd check\n  healthd check gpu_ecc gpu_nvlink\n  healthd check --json | jq -r '.conditions[].message'\n"
        "  healthd check --replay gpu-042.rec\n",
    ),
    "record": Command(
        _record_arguments,
        _record,
        "Run the checks once and save everything they read in FILE: files, NVML answers, program output and relevant "
        "kernel log lines. On any machine, healthd check --replay FILE evaluates the recording with the recorded "
        "settings, or with the settings in --config.\n"
        "The file contains the node's name, its parts' serial numbers and process names, but no environment "
        "variables or user files.\n"
        "Exit status: 0 written, regardless of the findings; 1 not written; 64 usage error.",
        "  healthd record\n  healthd record gpu-042.rec\n  healthd record --force hang.rec mount gpu_access\n",
    ),
}
