"""`healthd check` and `healthd record`: one round of the checks, without a daemon."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from msgspec.structs import replace

from healthd.cli import flags
from healthd.cli.flags import Command, Parser, load_settings, require_scenario, wrong_settings_are_wrong_use
from healthd.cli.terminal import OF_HEALTH, REFUSED, Stop, as_json, complain, page, say

if TYPE_CHECKING:
    from healthd.agent.scheduler.one_round import KernelLog, Look
    from healthd.agent.settings.config import Loaded, Settings
    from healthd.agent.settings.registry import Check
    from healthd.agent.worker.client import Runner
    from healthd.agent.worker.process import Setup

Document = Mapping[str, Any]

WORKER_SECONDS = 1.0  # how long an idle worker may take to end
WORKER_WORDS = 64 << 10
SLURM_SECONDS = 10.0  # for Slurm's record of this node, as `healthd doctor`
DAEMON_SECONDS = 2.0  # for the answer of a daemon, or of a file server with the kernel log
HEALTH = ("healthy", "warning", "unknown", "degraded", "unhealthy")  # from best to worst


# --- check


def _check_arguments(parser: Parser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these checks (default: all enabled checks)")
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")
    parser.add_argument("--replay", metavar="FILE", help="evaluate a recording of healthd record")
    flags.look(parser)
    parser.add_argument(
        "--runtime-dir", metavar="DIR", help="runtime directory of the daemon, for checks that only read the kernel log"
    )


def _check(args: argparse.Namespace) -> int:
    from healthd.agent.scheduler import one_round

    if args.replay is not None:
        found, checks = _replay(args)
        runtime_dir = None
    else:
        from healthd.agent.worker.process import setup_of

        loaded, checks, kernel_log = _to_look_at(args, "check", heard=True)
        settings = loaded.settings
        with runner_of(setup_of(settings), checks) as runner:
            found = one_round.look(loaded, checks, runner, kernel_log)._replace(limits=_limits(settings))
        runtime_dir = settings.runtime_dir if settings.root == "/" else None
    document = one_round.look_json(found)
    if only_listen := [name for name in dict.fromkeys(args.names) if not checks[name].runs]:
        heard = (
            ask_daemon(only_listen, runtime_dir)
            if runtime_dir is not None
            else unheard(only_listen, "a recording and another machine's files have no daemon that listened")
        )
        document = together(document, heard)
    status = OF_HEALTH[document["health"]]
    if args.json:
        return say(as_json(document), status)
    from healthd.agent.reporting import render

    return say(render.check(document, page(), replayed=args.replay is not None), status)


def _limits(settings: Settings) -> tuple[str, ...]:
    """Return what the daemon of this machine needs and does not have. The checks that read the kernel's own log or the
    journal report it themselves. In the modes that need Slurm, a running daemon is asked, else slurmctld.
    """
    from healthd.agent.conditions.impairments import limits, needs_slurm

    if settings.root != "/":
        return ()
    slurm = needs_slurm(settings.mode)
    of_the_daemon = _limits_of_the_daemon(settings) if slurm else None
    if of_the_daemon is not None:
        return of_the_daemon
    problem = _slurm_problem(settings.node_name) if slurm else ""
    log = _log_trouble(settings.kernel_log.source)
    return limits(settings.mode, settings.kernel_log.source, not log, log, problem)


def _limits_of_the_daemon(settings: Settings) -> tuple[str, ...] | None:
    """Return the limits in the status of a daemon with these settings. None: no daemon answers, or another mode."""
    from healthd.agent.control import protocol
    from healthd.agent.control.client import NoAnswer, RefusedByDaemon, ask

    try:
        status = ask(settings.runtime_dir, protocol.plain(protocol.STATUS), DAEMON_SECONDS).get("status", {})
    except (NoAnswer, RefusedByDaemon):
        return None
    same = status.get("mode") == settings.mode.value
    return tuple(map(str, status["limits"])) if same and "limits" in status else None


def _log_trouble(source: str) -> str:
    """Return why a file that is followed as the kernel log cannot be read; "" = it can. It waits for no file server."""
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
    """Return why the daemon could not use Slurm here, "" if it could."""
    import shutil

    from healthd.agent.conditions.impairments import missing_programs
    from healthd.agent.slurm.blocking import trouble_of_node

    if missing := missing_programs(shutil.which):
        return f"no {', '.join(missing)} on PATH"
    return trouble_of_node(node_name, SLURM_SECONDS)


def _to_look_at(
    args: argparse.Namespace, command: str, heard: bool = False
) -> tuple[Loaded, dict[str, Check], KernelLog | None]:
    """What to look at: this machine, as in the settings."""
    from healthd.agent.scheduler import one_round

    with wrong_settings_are_wrong_use():
        loaded, checks = (_of_the_daemon(args) if heard else None) or load_settings(args)
        require_scenario(loaded)
    kernel_log = one_round.kernel_log_of(loaded.settings)
    return _only(args.names, loaded, checks, kernel_log, heard=heard, command=command), checks, kernel_log


def _of_the_daemon(args: argparse.Namespace) -> tuple[Loaded, dict[str, Check]] | None:
    """Where the settings are wrong, and only checks that come with healthd and only listen were asked for: the defaults
    at the daemon's runtime_dir. What it has heard it knows, whatever the file has become since."""

    from healthd.agent.settings import layers, registry
    from healthd.agent.settings.config import ConfigError
    from healthd.agent.settings.effective import settle

    if not args.names:
        return None
    checks = registry.built_in()
    if any(name not in checks or checks[name].runs for name in args.names):
        return None
    try:
        load_settings(args)
    except ConfigError:
        loaded = settle({}, "the defaults", flags.overrides(args), checks, layers.without_baseline)
        settings = replace(loaded.settings, runtime_dir=flags.runtime_dir(args))
        return replace(loaded, settings=settings), checks
    return None


def _replay(args: argparse.Namespace) -> tuple[Look, Mapping[str, Check]]:
    from healthd.agent.recording import recording
    from healthd.agent.scheduler import one_round
    from healthd.agent.worker.process import setup_of
    from healthd.cli import replay

    for flag in ("--root", "--fake-nvml", "--profile", "--baseline"):
        if getattr(args, flag[2:].replace("-", "_")) is not None:
            settings = "; for other settings: --config" if flag in ("--profile", "--baseline") else ""
            raise Stop(f"healthd check: {flag} does not go with --replay: the recording has its own{settings}")
    try:
        recorded = recording.read(args.replay)
        kernel_log = replay.kernel_log_of(recorded)
    except recording.RecordingError as error:
        raise Stop(f"healthd check: {error}") from None
    with wrong_settings_are_wrong_use():
        given, checks = flags.settings_elsewhere(args, recorded.node, lambda *asked: replay.below(recorded, *asked))
    loaded, lost = replay.settings_of(recorded, checks) if given is None else (replay.at_that_node(given, recorded), [])
    lost = [result for result in lost if not args.names or result.check in args.names]
    if args.names or given is not None:
        loaded = _only(args.names, loaded, checks, kernel_log, {run.check for run in recorded.runs})
    setup = replace(setup_of(loaded.settings), root="/", fake_nvml="", replay=os.path.abspath(args.replay))
    with runner_of(setup, checks) as runner:
        return one_round.look(loaded, checks, runner, kernel_log, recorded, lost), checks


def _only(
    names: Sequence[str],
    loaded: Loaded,
    checks: Mapping[str, Check],
    kernel_log: KernelLog | None,
    recorded: Collection[str] = (),
    heard: bool = False,
    command: str = "check",
) -> Loaded:
    """The settings with only these checks. Raises Stop if there is nothing to run; `heard`: the daemon of this machine
    is asked what those that only listen have heard."""

    from healthd.agent.scheduler.one_round import names_to_run
    from healthd.common.codec import nearest

    for name in names:
        if name not in checks:
            hint = nearest(name.partition("/")[0], checks)  # a code begins with its check
            raise Stop(f'healthd {command}: there is no check "{name}"{hint}')
        if not any(check == name for check, _ in loaded.checks):
            raise Stop(f"healthd {command}: {name}: {_why_not(checks[name])}")
    # The others run only by their names, here or when it was recorded.
    asked = names or [name for name, check in checks.items() if not check.when or name in recorded]
    wanted = {key: config for key, config in loaded.checks.items() if key[0] in asked}
    chosen = replace(loaded, checks=wanted)
    if not names_to_run(chosen, checks, kernel_log) and not (heard and names and loaded.settings.root == "/"):
        listening = "they only listen to the kernel log, and there is none to read here"
        raise Stop(f"healthd check: nothing to run: {listening if wanted else 'no check is enabled'}")
    return chosen


def _why_not(check: Check) -> str:
    if check.per:
        return f"nothing to check: no table [checks.{check.name}.NAME] is in the settings, or none is enabled"
    return "is switched off in the settings (enabled = false)"


# --- checks that only listen to the kernel log: they read nothing, so the running daemon reports what it received


def ask_daemon(names: Sequence[str], runtime_dir: str) -> Document:
    """Return the open conditions of these checks as the daemon has them. `trouble`: why it has none, one sentence."""
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
            "problem": "" if log["alive"] else f"the daemon reads no kernel log: {log.get('problem') or log['source']}",
        }
    except (NoAnswer, RefusedByDaemon) as error:
        return unheard(names, str(error))
    except (KeyError, TypeError):
        return unheard(names, "the daemon is of another version, and answers what this one cannot read")


def unheard(names: Sequence[str], problem: str) -> Document:
    return {"checks": list(names), "since": None, "kernel_log": None, "conditions": [], "problem": problem}


def together(document: Document, heard: Document) -> dict[str, Any]:
    """Return the document of the round with the daemon's answer. Without a daemon these checks are unknown."""
    unknown = [f"{name} only listens to the kernel log: {heard['problem']}" for name in heard["checks"]]
    health = [document["health"], _health(heard["conditions"]), *(["unknown"] if heard["problem"] else [])]
    return {
        **document,
        "health": max(health, key=HEALTH.index),
        "unknown": [*document["unknown"], *(unknown if heard["problem"] else [])],
        "from_daemon": dict(heard),
    }


def _health(conditions: Sequence[Document]) -> str:
    """Return the health for these conditions, as in agent/conditions/verdict.py."""
    acting = {c["severity"] for c in conditions if c["state"] == "open" and not c.get("observed")}
    if "critical" in acting:
        return "unhealthy"
    if "degraded" in acting:
        return "degraded"
    return "warning" if any(c["severity"] != "info" for c in conditions) else "healthy"


# --- record


def _record_arguments(parser: Parser) -> None:
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="output file, mode 0600 (default: NODE-TIME.rec in this directory)"
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these checks (default: all enabled checks)")
    parser.add_argument("--force", action="store_true", help="replace an existing FILE")
    flags.look(parser)


def _record(args: argparse.Namespace) -> int:
    import tempfile

    from healthd.agent.recording import recording
    from healthd.agent.reporting import render
    from healthd.agent.scheduler import one_round
    from healthd.agent.worker.process import setup_of
    from healthd.cli import replay

    with wrong_settings_are_wrong_use():
        loaded, checks = load_settings(args)
    if args.file in checks:  # a file of that name is ./NAME
        args.names, args.file = [args.file, *args.names], None
    place = args.file if args.file is not None else _usual_name(loaded.settings.node_name)
    _require_place(place, args.force)
    loaded, checks, kernel_log = _to_look_at(args, "record")
    settings = loaded.settings
    with tempfile.TemporaryDirectory(prefix="healthd-record.") as notes:
        setup = setup_of(settings, notes)
        with runner_of(setup, checks) as runner:
            found = one_round.look(loaded, checks, runner, kernel_log)
        recorded = replay.record(loaded, found, recording.read_notes(notes))
    try:
        size = recording.write(place, recorded)
    except OSError as error:
        raise Stop(f"healthd record: {place}: cannot be written: {error.strerror}", REFUSED) from None
    answers, silent = replay.told(recorded)
    return say(render.recorded(one_round.look_json(found), place, size, answers, silent, page()))


def _usual_name(node_name: str) -> str:
    """ "gpu-042-20261122T224501Z.rec": which node it was, and when (UTC)."""
    import time

    return f"{node_name}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.rec"


def _require_place(path: str, force: bool) -> None:
    """Raises Stop, before any check looks, if the recording may not be written there."""
    if not path:
        raise Stop("healthd record: the name of the file is empty")
    if os.path.lexists(path):
        if not os.path.isfile(path):
            raise Stop(f"healthd record: {path}: is there, and is not a file", REFUSED)
        if not force:
            raise Stop(f"healthd record: {path}: is there already; --force replaces it", REFUSED)
    folder = os.path.dirname(path) or "."
    if not os.access(folder, os.W_OK | os.X_OK):
        why = "cannot be written to" if os.path.isdir(folder) else "there is no such directory"
        raise Stop(f"healthd record: {folder}: {why}", REFUSED)


# --- the worker of a command


@contextmanager
def runner_of(setup: Setup, checks: Mapping[str, Check]) -> Iterator[Runner]:
    """A Runner for these checks, whose workers are copies of this process where they can be (docs/adr/0032). What they
    write to standard error is shown at the end."""
    import time
    from functools import partial

    from healthd.agent.worker import forked
    from healthd.agent.worker.client import Runner

    # Some builds of Python have no memfd_create (python-build-standalone, conda): their C library was older than it.
    with open(os.memfd_create("words"), "w+b") if hasattr(os, "memfd_create") else _nameless_file() as words:
        # A worker that hangs outlives us: a reader of our standard error must not wait for its end.
        with _standard_error_to(words):
            begin = partial(forked.start, checks) if forked.can_serve() else None
            runner = Runner(setup, "", time.monotonic, begin=begin)
            try:
                yield runner
            finally:
                runner.close(WORKER_SECONDS)
        words.seek(0)
        for line in words.read(WORKER_WORDS).decode("utf-8", "replace").splitlines():
            complain(line)


def _nameless_file() -> IO[bytes]:
    import tempfile

    return tempfile.TemporaryFile()


@contextmanager
def _standard_error_to(file: IO[bytes]) -> Iterator[None]:
    """Meanwhile this process and its children write standard error into that file."""
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
        "In mode drain or act, the result is at best a warning if Slurm's state of the node cannot be read.\n"
        "For a NAME that only reads the kernel log, the running daemon is queried.\n"
        "Exit status: 0 healthy, 1 warning, 2 degraded or critical, 3 unknown or no answer from the daemon, 64 usage "
        "error.",
        "  healthd check\n  healthd check gpu_ecc gpu_nvlink\n  healthd check --json | jq -r '.conditions[].message'\n"
        "  healthd check --replay gpu-042.rec\n",
    ),
    "record": Command(
        _record_arguments,
        _record,
        "Run the checks once and save everything that they read in FILE: files, NVML answers, program output, "
        "relevant lines of the kernel log. healthd check --replay FILE evaluates the recording on any machine, "
        "with the recorded settings or with those of --config.\n"
        "The file contains the node's name, serial numbers of its parts, and process names, but no environment "
        "variables and no user files.\n"
        "Exit status: 0 written, whatever was found; 1 not written; 64 usage error.",
        "  healthd record\n  healthd record gpu-042.rec\n  healthd record --force hang.rec mount gpu_access\n",
    ),
}
