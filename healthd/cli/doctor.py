"""`healthd doctor`: what of healthd works on this node, and what mends the rest."""

from __future__ import annotations

import argparse
import functools
import getpass
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

import healthd
from healthd.cli import flags
from healthd.cli.flags import Command, Parser, load_settings
from healthd.cli.terminal import as_json, page, say
from healthd.common.paths import RUNTIME_DIR

if TYPE_CHECKING:
    from healthd.agent.doctor.result import Line
    from healthd.agent.doctor.visibility import Around
    from healthd.agent.settings.config import Loaded
    from healthd.agent.settings.registry import Check

SECONDS = 15.0  # for what one area asks
SLURM_SECONDS = 60.0  # ... and for Slurm's commands, one after another
PATIENCE_SECONDS = 5.0


def _arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")
    parser.add_argument(
        "--runtime-dir", metavar="DIR", help="runtime directory of the daemon (default: as in the settings)"
    )
    flags.look(parser)


def _doctor(args: argparse.Namespace) -> int:
    from healthd.agent.doctor import result as lines
    from healthd.agent.doctor.result import text

    node, said = _node(args)
    said = [*said, *_asked(node, args)]
    document = {
        "version": healthd.__version__,
        "node": node.loaded.settings.node_name,
        "user": _user(),
        "mode": node.loaded.settings.mode.value,
        "time": time.time(),
        "lines": [lines.line_json(line) for line in said],
    }
    status = lines.status(said)
    if args.json:
        return say(as_json(document), status)
    return say(text(document, page()), status)


class _Node(NamedTuple):
    """What the areas look with. status: the running daemon's document, None for the reason `why_not`. pids: of all
    `healthd run`."""

    loaded: Loaded
    checks: Mapping[str, Check]
    status: dict[str, Any] | None
    why_not: str
    pids: Sequence[int]
    around: Around


def _node(args: argparse.Namespace) -> tuple[_Node, list[Line]]:
    """What this node is set to, and what runs there. Any of the files asked for may be on a mount that does not answer:
    each is touched first by a process that may hang."""
    from healthd.agent.doctor import parallel, visibility
    from healthd.cli import daemons
    from healthd.common.model import Mode

    directory = functools.partial(flags.runtime_dir, args)
    can_load, daemon, pids = parallel.values(
        [
            (SECONDS, lambda: _settings(args) is not None),
            (SECONDS, lambda: _status_of_the_daemon(directory)),
            (SECONDS, lambda: [process.pid for process in daemons.found()]),
        ]
    )
    if isinstance(can_load, parallel.Unanswered):
        hang = _what_hangs(args)
        loaded, checks = _untouched()
        message = f"{', '.join(hang) or _file(args)}: {can_load.why}: what follows is for the defaults"
        settings_line, is_right = replace(can_load, why=message).line("settings"), False
        if hang == [_file(args)]:  # so it was not asked where the daemon is, either
            directory = functools.partial(_given_or, args.runtime_dir, RUNTIME_DIR)
            (daemon,) = parallel.values([(SECONDS, lambda: _status_of_the_daemon(directory))])
    else:
        loaded, checks, settings_line, is_right = _settings(args)
    said = [settings_line]
    if isinstance(daemon, parallel.Unanswered):
        daemon = None, f"{_where(args, loaded)}: {daemon.why}"
    status, why_not = daemon
    if isinstance(pids, parallel.Unanswered):
        said.append(pids.line("processes"))
        pids = []
    (around,) = parallel.values([(SECONDS, functools.partial(_around, loaded.settings.root))])
    if isinstance(around, parallel.Unanswered):
        said.append(around.line("devices"))
        around = visibility.Around(ipmi_device=False, ipmitool=False, is_root=os.geteuid() == 0)
    if not is_right and status and status.get("mode") in {mode.value for mode in Mode}:
        # The daemon goes on with what it read before: its mode decides what it needs of Slurm.
        loaded = replace(loaded, settings=replace(loaded.settings, mode=Mode(status["mode"])))
    return _Node(loaded, checks, status, why_not, pids, around), said


def _settings(args: argparse.Namespace) -> tuple[Loaded, Mapping[str, Check], Line, bool]:
    """The settings, and whether they are right; where they are wrong the defaults, by which the rest is looked at."""
    from healthd.agent.doctor.result import fails, limited, works
    from healthd.agent.settings import layers, registry
    from healthd.agent.settings.config import ConfigError
    from healthd.agent.settings.configured import Configured
    from healthd.agent.settings.effective import settle
    from healthd.agent.settings.round_budget import warnings

    file = _file(args)
    try:
        loaded, checks = load_settings(args)
        flags.require_scenario(loaded)
    except ConfigError as error:
        message = fails("settings", f"{error}: what follows is for the defaults", f"healthd config check {file}")
        checks = registry.built_in()
        try:
            return settle({}, "the defaults", {}, checks, layers.below), checks, message, False
        except ConfigError:  # the default baseline is what is wrong
            return settle({}, "the defaults", {}, checks, layers.without_baseline), checks, message, False
    late = warnings(Configured(loaded, checks))
    if late:
        return loaded, checks, limited("settings", late[0], f"healthd config check {file}"), True
    mode = loaded.settings.mode.value
    if args.config is None and not os.path.exists(file):
        return loaded, checks, works("settings", f"no {file}: all is at its default, mode {mode}"), True
    return loaded, checks, works("settings", f"{file} is right: mode {mode}"), True


def _untouched() -> tuple[Loaded, Mapping[str, Check]]:
    """The built-in defaults, for which no file of the site is read."""
    from healthd.agent.settings import layers, registry
    from healthd.agent.settings.effective import settle

    checks = registry.built_in()
    loaded = settle({}, "the defaults", {}, checks, layers.without_baseline)
    return replace(loaded, settings=replace(loaded.settings, checks_dir="")), checks


def _what_hangs(args: argparse.Namespace) -> list[str]:
    """The files of the site that do not answer, each with its setting."""
    from healthd.agent.doctor import parallel
    from healthd.agent.settings import config
    from healthd.agent.settings.settings_file import read_file

    file = _file(args)
    (table,) = parallel.values([(PATIENCE_SECONDS, lambda: read_file(file, required=False))])
    if isinstance(table, parallel.Unanswered):
        return [file] if table.pid else []
    given = {"baseline_file": args.baseline, "nvml.fake": args.fake_nvml, "profile": args.profile, "root": args.root}
    defaults = config.Settings()
    asked = {
        "checks_dir": table.get("checks_dir", defaults.checks_dir),
        "baseline_file": table.get("baseline_file", defaults.baseline_file),
        **{name: value for name, value in table.items() if name in ("profile", "root")},
        **{name: value for name, value in given.items() if value is not None},
    }
    paths = [(name, path) for name, path in asked.items() if isinstance(path, str) and "/" in path]
    answers = parallel.values([(PATIENCE_SECONDS, functools.partial(os.path.exists, path)) for _, path in paths])
    return [
        f"{path} ({name})"
        for (name, path), answer in zip(paths, answers, strict=True)
        if isinstance(answer, parallel.Unanswered)
    ]


def _file(args: argparse.Namespace) -> str:
    return str(args.config or flags.DEFAULT_FILE)


def _given_or(given: str | None, default: str) -> str:
    return default if given is None else os.path.abspath(given)


def _where(args: argparse.Namespace, loaded: Loaded) -> str:
    """Where the daemon was asked, in words."""
    return f"{_given_or(args.runtime_dir, loaded.settings.runtime_dir)} (runtime_dir)"


def _status_of_the_daemon(runtime_dir: Callable[[], str]) -> tuple[dict[str, Any] | None, str]:
    from healthd.agent.control import protocol
    from healthd.agent.control.client import NoAnswer, RefusedByDaemon, ask
    from healthd.cli.terminal import Stop

    try:
        return ask(runtime_dir(), protocol.plain(protocol.STATUS), PATIENCE_SECONDS)["status"], ""
    except (NoAnswer, RefusedByDaemon, Stop) as error:
        return None, str(error)


def _around(root: str) -> Around:
    import shutil

    from healthd.agent.doctor import visibility
    from healthd.host.host import Host
    from healthd.host.program import ENVIRONMENT

    return visibility.Around(
        ipmi_device=any(name.startswith("ipmi") for name in Host(root).names("/dev")),
        ipmitool=shutil.which("ipmitool", path=ENVIRONMENT["PATH"]) is not None,
        is_root=os.geteuid() == 0,
    )


def _asked(node: _Node, args: argparse.Namespace) -> list[Line]:
    """What every area says, and what the checks can see, by a worker of their own."""
    from healthd.agent.doctor import parallel, service, slurm
    from healthd.cli.daemons import of_pids

    loaded, settings = node.loaded, node.loaded.settings
    status, pids = node.status, node.pids
    areas: list[parallel.Area] = [
        ("daemon", SECONDS, lambda: list(service.daemon(settings, status, node.why_not, of_pids(pids)))),
        ("unit", SECONDS, lambda: list(service.unit())),
        ("kernel log", SECONDS, lambda: list(service.kernel_log(settings))),
        ("Slurm", SLURM_SECONDS, lambda: list(slurm.lines(settings))),
        ("baseline", SECONDS, lambda: list(service.baseline(settings, time.time()))),
        ("metrics", SECONDS, lambda: list(service.page(settings, status is not None, of_pids(pids)))),
        ("files", SECONDS, lambda: list(service.files(loaded, _file(args)))),
        ("room", SECONDS, lambda: list(service.room(settings.state_dir, settings.runtime_dir))),
    ]
    return [*parallel.ask(areas), *_sight(node)]


def _sight(node: _Node) -> list[Line]:
    """Return what the checks can see: one round of those that are on, each within its own deadline."""
    from healthd.agent.doctor import visibility
    from healthd.agent.scheduler import one_round
    from healthd.agent.worker.process import setup_of
    from healthd.cli.check import runner_of

    settings = node.loaded.settings
    with runner_of(setup_of(settings), node.checks) as runner:
        found = one_round.look(of_a_round(node.loaded, node.checks), node.checks, runner, None)
    return list(visibility.lines(found.results, node.around))


def of_a_round(loaded: Loaded, checks: Mapping[str, Check]) -> Loaded:
    """Return the settings without the checks that run only on a drained, idle node, as `healthd check` has them."""
    return replace(loaded, checks={run: config for run, config in loaded.checks.items() if not checks[run.check].when})


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())


COMMANDS = {
    "doctor": Command(
        _arguments,
        _doctor,
        "Show which functions of healthd work on this node, which do not, and the command that fixes each problem. It "
        "changes nothing and needs no daemon; run it as root for complete results.\n"
        "Exit status: 0 everything works, 1 something is limited, 2 something that healthd needs does not work, 64 "
        "usage error.",
        "  healthd doctor\n  healthd doctor --json | jq -r '.lines[] | select(.state==\"failed\") | .message'\n",
    ),
}
