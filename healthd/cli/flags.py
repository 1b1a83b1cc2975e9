"""Defines the command-line flags, and reads the settings from the flags and the settings file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from healthd.cli.terminal import Stop, write_error
from healthd.common.paths import RUNTIME_DIR, STATE_DIR
from healthd.common.text import regex

if TYPE_CHECKING:
    from healthd.agent.settings.config import Layer, LayerLoader, Loaded, Settings
    from healthd.agent.settings.registry import Check

DEFAULT_FILE = "/etc/healthd/healthd.toml"
# Copies of values in config.py, which takes a client too long to import.

# Maps each flag to the setting that it overrides.
SETTINGS = {
    "--root": "root",
    "--fake-nvml": "nvml.fake",
    "--profile": "profile",
    "--baseline": "baseline_file",
    "--state-dir": "state_dir",
    "--runtime-dir": "runtime_dir",
    "--kernel-log": "kernel_log.source",
    "--mode": "mode",
    "--node-name": "node_name",
    "--interval": "interval_seconds",
    "--listen": "metrics.listen",
}
PATHS = ("--root", "--state-dir", "--runtime-dir", "--baseline")
NAMES_OR_PATHS = ("--fake-nvml", "--profile")


class Parser(argparse.ArgumentParser):
    """Argument parser that raises Stop for a usage error.

    `--help` is an ordinary flag; main.py prints the help.
    """

    def __init__(self, name: str, description: str, examples: str) -> None:
        self._columns = 80  # otherwise argparse queries the terminal for each added flag
        super().__init__(
            prog=f"healthd {name}",
            description=description,
            epilog=f"examples\n{examples}" if examples else None,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
                prog, max_help_position=36, width=self._columns - 2
            ),
            allow_abbrev=False,
            add_help=False,
        )
        self.add_argument("-h", "--help", action="store_true", help="print this help")

    def format_help(self) -> str:
        """Return the help. Each line of the description becomes a paragraph, wrapped to the terminal's width."""
        import shutil
        import textwrap

        self._columns = shutil.get_terminal_size((80, 24)).columns
        width = max(min(self._columns, 100), 40)
        lines = (self.description or "").splitlines()
        self.description = "\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in lines)
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        unknown = regex(r"unrecognized arguments: (-[^\s=]*).*").fullmatch(message)
        if unknown:
            from healthd.common.codec import spelling_hint

            message = (
                f"no option {unknown[1]}{spelling_hint(unknown[1], regex(r'--[a-z-]+').findall(self.format_usage()))}"
            )
        raise Stop(f"{self.prog}: {message}")


class Command(NamedTuple):
    """A command of the CLI. `run` returns the exit status."""

    flags: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]
    description: str
    examples: str = ""

    @property
    def summary(self) -> str:
        """The first sentence of the description, without its full stop."""
        return " ".join(self.description.split()).partition(". ")[0].rstrip(".")


# --- groups of flags


def add_config_flag(parser: Parser) -> None:
    """Add the flag for the settings file."""
    parser.add_argument("--config", metavar="FILE", help=f"settings file (default: {DEFAULT_FILE}, if it exists)")


def add_target_flags(parser: Parser) -> None:
    """Add the flags that select which machine is inspected."""
    add_config_flag(parser)
    parser.add_argument("--root", metavar="DIR", help="read /proc, /sys and the mounts under DIR")
    parser.add_argument(
        "--fake-nvml", metavar="MACHINE|FILE", help="simulate a machine (such as dgx-h100) or a scenario file"
    )
    parser.add_argument("--profile", metavar="NAME|FILE", help="expected hardware: auto (default), none, dgx-h100, ...")
    parser.add_argument("--baseline", metavar="FILE", help='baseline file for this node ("": none)')


def add_daemon_flags(parser: Parser) -> None:
    """Add all flags of the daemon."""
    add_target_flags(parser)
    parser.add_argument("--state-dir", metavar="DIR", help="directory for the event stream and the ledger copy")
    parser.add_argument(
        "--runtime-dir", metavar="DIR", help="directory for the socket, the verdict file and the live ledger"
    )
    parser.add_argument(
        "--kernel-log",
        metavar="kmsg|journal|PATH|off",
        help="where to read kernel messages; PATH: a file or FIFO to follow",
    )
    parser.add_argument(
        "--mode", metavar="observe|drain|act", help="what healthd may change in Slurm (default: observe)"
    )
    parser.add_argument("--node-name", metavar="NAME", help="NodeName in Slurm (default: the host name)")
    parser.add_argument("--interval", metavar="SECONDS", type=_seconds, help="interval between checks")
    parser.add_argument("--listen", metavar="ADDR:PORT|off", help="address for the metrics page")


def add_client_flags(parser: Parser) -> None:
    """Add the flags that locate the running daemon."""
    parser.add_argument(
        "--runtime-dir", metavar="DIR", help="the daemon's runtime directory (default: from the settings)"
    )
    parser.add_argument("--config", metavar="FILE", help=f"settings file (default: {DEFAULT_FILE}, if it exists)")


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'must be a number of seconds, got "{text}"') from None


def parse_duration(text: str) -> float | None:
    """Return the seconds in a duration like "90s", "30m", "1.5h", "1h30m" or "2d"; None for other text and for zero."""
    if not regex(r"([0-9]{1,9}(\.[0-9]{1,9})?[smhd])+").fullmatch(text):
        return None
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    return sum(float(number) * units[unit] for number, unit in regex(r"([0-9.]{1,19})([smhd])").findall(text)) or None


# --- settings


def settings_file(args: argparse.Namespace) -> tuple[str, bool]:
    """Return the path of the settings file, and True if the file must exist because the user named it."""
    path: str | None = getattr(args, "config", None)
    if path == "":
        raise Stop("healthd: --config needs a file name, got an empty string")
    return path or DEFAULT_FILE, path is not None


def load_settings(
    args: argparse.Namespace, lower_layers: LayerLoader | None = None, checks_dir: str | None = None
) -> tuple[Loaded, dict[str, Check]]:
    """Return the effective settings and all checks.

    `lower_layers` returns the layers below the file, in place of the usual layers. `checks_dir` is the directory of the
    site's checks, in place of the directory in the file. Raises ConfigError; the message is one sentence.
    """
    from healthd.agent.settings import config, layers, registry
    from healthd.agent.settings.effective import require_named_files, resolve_settings
    from healthd.agent.settings.settings_file import read_file

    file, is_named = settings_file(args)
    table = read_file(file, required=is_named)
    checks = registry.find_checks(config.checks_dir(table) if checks_dir is None else checks_dir)
    loaded = resolve_settings(table, file, overrides(args), checks, lower_layers or layers.lower_layers)
    require_named_files(loaded)
    return loaded, checks


def load_settings_for(args: argparse.Namespace, checks: dict[str, Check]) -> Loaded | None:
    """Return the settings for these built-in checks without importing other checks, or None if the site has its own
    checks.

    Further checks that a settings layer names are added to `checks`. Raises ConfigError like load_settings(), but the
    message can suggest only these checks.
    """
    from healthd.agent.settings import config, layers, registry
    from healthd.agent.settings.effective import require_named_files, resolve_settings
    from healthd.agent.settings.settings_file import read_file

    file, is_named = settings_file(args)
    table = read_file(file, required=is_named)
    if registry.site_files(config.checks_dir(table)):
        return None

    def lower_layers(settings: Settings) -> Sequence[Layer]:
        found = layers.lower_layers(settings)
        tables = [table.get("checks"), *_section_checks(table), *(layer.checks for layer in found)]
        named = {name for checks_table in tables if isinstance(checks_table, Mapping) for name in checks_table}
        checks.update(registry.built_in_checks(named - {*checks}))
        return found

    loaded = resolve_settings(table, file, overrides(args), checks, lower_layers)
    require_named_files(loaded)
    return loaded


def _section_checks(table: Mapping[str, Any]) -> list[Any]:
    """Return the [node.checks.*] tables from each [[node]] section."""
    sections = table.get("node", [])
    return [section.get("checks", {}) for section in sections] if isinstance(sections, list) else []


def load_settings_at(
    args: argparse.Namespace, node: str, lower_layers: Callable[[Settings, Mapping[str, Check]], Sequence[Layer]]
) -> tuple[Loaded | None, dict[str, Check]]:
    """Return the settings for another `node` from the named file, and this node's checks.

    The layers below the file are the other node's profile and baseline. If the user named no file, the settings are
    None. Raises ConfigError.
    """
    from healthd.agent.settings import config, registry
    from healthd.agent.settings.effective import resolve_settings
    from healthd.agent.settings.settings_file import read_file

    file, is_named = settings_file(args)
    table = read_file(file, required=is_named)
    checks = registry.find_checks(config.checks_dir(table))
    if not is_named:
        return None, checks
    named = {"node_name": ("the recording", node)}
    return resolve_settings(table, file, named, checks, lambda settings: lower_layers(settings, checks)), checks


def overrides(args: argparse.Namespace) -> dict[str, tuple[str, Any]]:
    """Return a dict that maps each setting that a flag overrides to (flag, value).

    A relative path becomes absolute, because the worker that reads it has a different current directory. (A fake
    machine, a profile or a kernel log may also be a name.)
    """
    from healthd.agent.settings.limits import KERNEL_LOGS

    found = {}
    for flag, setting in SETTINGS.items():
        value = getattr(args, flag[2:].replace("-", "_"), None)
        if value is not None:
            is_path = value != "" and (flag in PATHS or (flag in NAMES_OR_PATHS and ("/" in value or "." in value)))
            is_path |= flag == "--kernel-log" and value not in ("", *KERNEL_LOGS)
            found[setting] = (flag, os.path.abspath(value) if is_path else value)
    return found


def runtime_dir(args: argparse.Namespace, default: str = RUNTIME_DIR) -> str:
    """Return the directory with the daemon's socket. Raises Stop.

    Errors in other settings are ignored, because the daemon may still run with its earlier settings. If the file cannot
    be read, print a note and return the default.
    """
    return _directory(args, "runtime_dir", default)


def state_dir(args: argparse.Namespace) -> str:
    """Return the daemon's state directory. Errors are handled as in `runtime_dir`."""
    return _directory(args, "state_dir", STATE_DIR)


def _directory(args: argparse.Namespace, name: str, default: str) -> str:
    option = getattr(args, name, None)
    if option is not None:
        return os.path.abspath(str(option))
    file, required = settings_file(args)
    if not required and not os.path.exists(file):
        return default
    from healthd.agent.settings import config
    from healthd.agent.settings.settings_file import read_file

    with settings_errors_as_usage():
        try:
            table = read_file(file, required=True)
        except config.ConfigError as error:
            if required and _is_missing(file):  # a typo; the user may mean a daemon other than the default
                raise
            write_error(f"healthd: note: the settings contain an error ({error}); using {name} {default}")
            return default
        return config.read_directory(table, file, name)


def _is_missing(file: str) -> bool:
    try:
        os.stat(file)
    except FileNotFoundError:
        return True
    except OSError:
        pass  # the file exists, but is not accessible
    return False


@contextmanager
def settings_errors_as_usage() -> Iterator[None]:
    from healthd.agent.settings.config import ConfigError

    try:
        yield
    except ConfigError as error:
        raise Stop(f"healthd: {error}") from None


def require_scenario(loaded: Loaded) -> None:
    """Raise ConfigError if the scenario file is invalid. Otherwise every GPU check would fail."""
    if loaded.settings.nvml.fake:
        from healthd.agent.settings.config import ConfigError
        from healthd.common.codec import ConvertError
        from healthd.nvidia.fake_scenario import read

        try:
            read(loaded.settings.nvml.fake)
        except ConvertError as error:
            raise ConfigError(f"{loaded.origins['nvml.fake']}: {error}") from None
