"""`healthd doctor`: show what works on this node, and how to fix what does not."""

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
from healthd.cli.terminal import as_json, page, write_output
from healthd.common.paths import RUNTIME_DIR

if TYPE_CHECKING:
    from healthd.agent.doctor.result import Line
    from healthd.agent.doctor.visibility import Environment
    from healthd.agent.settings.config import Loaded
    from healthd.agent.settings.registry import Check

SECONDS = 15.0  # maximum time for the queries about one area
SLURM_SECONDS = 60.0  # maximum time for all of Slurm's commands, which run one after another
PATIENCE_SECONDS = 5.0


def _arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")
    parser.add_argument(
        "--runtime-dir", metavar="DIR", help="the daemon's runtime directory (default: from the settings)"
    )
    flags.add_target_flags(parser)


def _doctor(args: argparse.Namespace) -> int:
    from healthd.agent.doctor import result as lines
    from healthd.agent.doctor.result import text

    node, lines_found = _node(args)
    lines_found = [*lines_found, *_area_lines(node, args)]
    document = {
        "version": healthd.__version__,
        "node": node.loaded.settings.node_name,
        "user": _user(),
        "mode": node.loaded.settings.mode.value,
        "time": time.time(),
        "lines": [lines.line_json(line) for line in lines_found],
    }
    status = lines.status(lines_found)
    if args.json:
        return write_output(as_json(document), status)
    return write_output(text(document, page()), status)


class _Node(NamedTuple):
    """Input for all areas.

    `status` is the running daemon's document, or None, in which case `why_not` has the reason. `pids` are all `healthd
    run` processes.
    """

    loaded: Loaded
    checks: Mapping[str, Check]
    status: dict[str, Any] | None
    why_not: str
    pids: Sequence[int]
    around: Environment


def _node(args: argparse.Namespace) -> tuple[_Node, list[Line]]:
    """Return the node's settings and running daemons, and the output lines about the settings.

    A file may be on a mount that does not answer, so each file is first opened in a separate process that may hang.
    """
    from healthd.agent.doctor import parallel, visibility
    from healthd.cli import daemons
    from healthd.common.model import Mode

    directory = functools.partial(flags.runtime_dir, args)
    can_load, daemon, pids = parallel.call_all(
        [
            (SECONDS, lambda: _settings(args) is not None),
            (SECONDS, lambda: _daemon_status(directory)),
            (SECONDS, lambda: [process.pid for process in daemons.find_daemons()]),
        ]
    )
    if isinstance(can_load, parallel.Unanswered):
        hang = _hanging_files(args)
        loaded, checks = _default_settings()
        message = f"{', '.join(hang) or _file(args)}: {can_load.why}; the next lines assume the default settings"
        settings_line, is_valid = replace(can_load, why=message).line("settings"), False
        if hang == [_file(args)]:  # without the settings, the daemon's directory is unknown too
            directory = functools.partial(_path_or_default, args.runtime_dir, RUNTIME_DIR)
            (daemon,) = parallel.call_all([(SECONDS, lambda: _daemon_status(directory))])
    else:
        loaded, checks, settings_line, is_valid = _settings(args)
    lines = [settings_line]
    if isinstance(daemon, parallel.Unanswered):
        daemon = None, f"{_runtime_dir_text(args, loaded)}: {daemon.why}"
    status, why_not = daemon
    if isinstance(pids, parallel.Unanswered):
        lines.append(pids.line("processes"))
        pids = []
    (around,) = parallel.call_all([(SECONDS, functools.partial(_around, loaded.settings.root))])
    if isinstance(around, parallel.Unanswered):
        lines.append(around.line("devices"))
        around = visibility.Environment(ipmi_device=False, ipmitool=False, is_root=os.geteuid() == 0)
    if not is_valid and status and status.get("mode") in {mode.value for mode in Mode}:
        # The daemon still uses its earlier settings, so their mode determines whether it needs Slurm.
        loaded = replace(loaded, settings=replace(loaded.settings, mode=Mode(status["mode"])))
    return _Node(loaded, checks, status, why_not, pids, around), lines


def _settings(args: argparse.Namespace) -> tuple[Loaded, Mapping[str, Check], Line, bool]:
    """Return the settings, the checks, the output line, and whether the settings are valid.

    If the settings are invalid, return the defaults, so that the other areas can still be tested.
    """
    from healthd.agent.doctor.result import failed_line, limited_line, ok_line
    from healthd.agent.settings import layers, registry
    from healthd.agent.settings.config import ConfigError
    from healthd.agent.settings.configured import Configured
    from healthd.agent.settings.effective import resolve_settings
    from healthd.agent.settings.round_budget import warnings

    file = _file(args)
    try:
        loaded, checks = load_settings(args)
        flags.require_scenario(loaded)
    except ConfigError as error:
        message = failed_line(
            "settings", f"{error}; the next lines assume the default settings", f"healthd config check {file}"
        )
        checks = registry.built_in_checks()
        try:
            return resolve_settings({}, "the defaults", {}, checks, layers.lower_layers), checks, message, False
        except ConfigError:  # the default baseline is invalid
            return (
                resolve_settings({}, "the defaults", {}, checks, layers.layers_without_baseline),
                checks,
                message,
                False,
            )
    late = warnings(Configured(loaded, checks))
    if late:
        return loaded, checks, limited_line("settings", late[0], f"healthd config check {file}"), True
    mode = loaded.settings.mode.value
    if args.config is None and not os.path.exists(file):
        sentence = f"{file} does not exist: all settings are at their defaults, mode {mode}"
        return loaded, checks, ok_line("settings", sentence), True
    return loaded, checks, ok_line("settings", f"{file} has no errors; mode {mode}"), True


def _default_settings() -> tuple[Loaded, Mapping[str, Check]]:
    """Return the built-in defaults without reading any of the site's files."""
    from healthd.agent.settings import layers, registry
    from healthd.agent.settings.effective import resolve_settings

    checks = registry.built_in_checks()
    loaded = resolve_settings({}, "the defaults", {}, checks, layers.layers_without_baseline)
    return replace(loaded, settings=replace(loaded.settings, checks_dir="")), checks


def _hanging_files(args: argparse.Namespace) -> list[str]:
    """Return the site's files on mounts that do not answer, each with the setting that names it."""
    from healthd.agent.doctor import parallel
    from healthd.agent.settings import config
    from healthd.agent.settings.settings_file import read_file

    file = _file(args)
    (table,) = parallel.call_all([(PATIENCE_SECONDS, lambda: read_file(file, required=False))])
    if isinstance(table, parallel.Unanswered):
        return [file] if table.pid else []
    options = {"baseline_file": args.baseline, "nvml.fake": args.fake_nvml, "profile": args.profile, "root": args.root}
    defaults = config.Settings()
    files = {
        "checks_dir": table.get("checks_dir", defaults.checks_dir),
        "baseline_file": table.get("baseline_file", defaults.baseline_file),
        **{name: value for name, value in table.items() if name in ("profile", "root")},
        **{name: value for name, value in options.items() if value is not None},
    }
    paths = [(name, path) for name, path in files.items() if isinstance(path, str) and "/" in path]
    answers = parallel.call_all([(PATIENCE_SECONDS, functools.partial(os.path.exists, path)) for _, path in paths])
    return [
        f"{path} ({name})"
        for (name, path), answer in zip(paths, answers, strict=True)
        if isinstance(answer, parallel.Unanswered)
    ]


def _file(args: argparse.Namespace) -> str:
    return str(args.config or flags.DEFAULT_FILE)


def _path_or_default(path: str | None, default: str) -> str:
    return default if path is None else os.path.abspath(path)


def _runtime_dir_text(args: argparse.Namespace, loaded: Loaded) -> str:
    """Describe the runtime directory that was queried."""
    return f"{_path_or_default(args.runtime_dir, loaded.settings.runtime_dir)} (runtime_dir)"


def _daemon_status(runtime_dir: Callable[[], str]) -> tuple[dict[str, Any] | None, str]:
    from healthd.agent.control import protocol
    from healthd.agent.control.client import DaemonUnreachable, RefusedByDaemon, send_request
    from healthd.cli.terminal import Stop

    try:
        return send_request(runtime_dir(), protocol.simple_request(protocol.STATUS), PATIENCE_SECONDS)["status"], ""
    except (DaemonUnreachable, RefusedByDaemon, Stop) as error:
        return None, str(error)


def _around(root: str) -> Environment:
    import shutil

    from healthd.agent.doctor import visibility
    from healthd.host.host import Host
    from healthd.host.program import ENVIRONMENT

    return visibility.Environment(
        ipmi_device=any(name.startswith("ipmi") for name in Host(root).names("/dev")),
        ipmitool=shutil.which("ipmitool", path=ENVIRONMENT["PATH"]) is not None,
        is_root=os.geteuid() == 0,
    )


def _area_lines(node: _Node, args: argparse.Namespace) -> list[Line]:
    """Return the lines for every area, including check results from a separate worker."""
    from healthd.agent.doctor import parallel, repair, service, slurm
    from healthd.cli.daemons import running_processes

    loaded, settings = node.loaded, node.loaded.settings
    status, pids = node.status, node.pids
    areas: list[parallel.Area] = [
        ("daemon", SECONDS, lambda: list(service.daemon(settings, status, node.why_not, running_processes(pids)))),
        ("unit", SECONDS, lambda: list(service.unit())),
        ("kernel log", SECONDS, lambda: list(service.kernel_log(settings))),
        ("Slurm", SLURM_SECONDS, lambda: list(slurm.lines(settings))),
        ("repair", SLURM_SECONDS, lambda: list(repair.lines(settings))),
        ("baseline", SECONDS, lambda: list(service.baseline(settings, time.time()))),
        ("metrics", SECONDS, lambda: list(service.page(settings, status is not None, running_processes(pids)))),
        ("hooks", SECONDS, lambda: list(service.hooks(settings))),
        ("files", SECONDS, lambda: list(service.files(loaded, _file(args)))),
        ("room", SECONDS, lambda: list(service.room(settings.state_dir, settings.runtime_dir))),
    ]
    return [*parallel.run_areas(areas), *_visibility_lines(node)]


def _visibility_lines(node: _Node) -> list[Line]:
    """Run the enabled checks once, each within its own deadline, and return lines with the results."""
    from healthd.agent.doctor import visibility
    from healthd.agent.scheduler import one_round
    from healthd.agent.worker.process import worker_setup
    from healthd.cli.check import worker_client

    settings = node.loaded.settings
    with worker_client(worker_setup(settings), node.checks) as client:
        found = one_round.run_round(round_settings(node.loaded, node.checks), node.checks, client, None)
    return list(visibility.lines(found.results, node.around))


def round_settings(loaded: Loaded, checks: Mapping[str, Check]) -> Loaded:
    """Return the settings without the checks that run only on a drained, idle node. `healthd check` omits them too."""
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
        "Show what works on this node and what does not, with the command that fixes each problem. This "
        "changes nothing and needs no daemon. Run it as root for complete results.\n"
        "Exit status: 0 everything works, 1 something is limited, 2 something that healthd needs does not work, 64 "
        "usage error.",
        "  healthd doctor\n  healthd doctor --json | jq -r '.lines[] | select(.state==\"failed\") | .message'\n",
    ),
}
