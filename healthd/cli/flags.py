"""What is typed after a command: its flags, and the settings that flags and file give together."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from healthd.cli.terminal import Stop

if TYPE_CHECKING:
    from healthd.config import Below, Loaded
    from healthd.settings.registry import Check

DEFAULT_FILE = "/etc/healthd/healthd.toml"
DEFAULT_RUNTIME_DIR = "/run/healthd"  # as in config.py, which a client should not have to load

# flag -> the setting that it overrides
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
    """Wrong use raises Stop. `--help` is an ordinary flag: main.py prints the text."""

    def __init__(self, name: str, description: str, examples: str) -> None:
        super().__init__(
            prog=f"healthd {name}",
            description=description,
            epilog=f"examples\n{examples}" if examples else None,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=36),
            allow_abbrev=False,
            add_help=False,
        )
        self.add_argument("-h", "--help", action="store_true", help="this text")

    def format_help(self) -> str:
        """Each line of the description is a paragraph, as wide as the terminal."""
        import shutil
        import textwrap

        width = max(min(shutil.get_terminal_size((80, 24)).columns, 100), 40)
        lines = (self.description or "").splitlines()
        self.description = "\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in lines)
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        unknown = re.fullmatch(r"unrecognized arguments: (-[^\s=]*).*", message)
        if unknown:
            from healthd.convert import nearest

            message = f"there is no {unknown[1]}{nearest(unknown[1], re.findall(r'--[a-z-]+', self.format_usage()))}"
        raise Stop(f"{self.prog}: {message}")


class Command(NamedTuple):
    """What a command is. `run` returns the exit status."""

    flags: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]
    description: str
    examples: str = ""


# --- groups of flags


def look(parser: Parser) -> None:
    """What to look at."""
    parser.add_argument("--config", metavar="FILE", help=f"the settings (default: {DEFAULT_FILE}, if there is one)")
    parser.add_argument("--root", metavar="DIR", help="look at the files below DIR instead of this machine's")
    parser.add_argument(
        "--fake-nvml", metavar="MACHINE|FILE", help="instead of GPUs: a machine like dgx-h100, or a scenario file"
    )
    parser.add_argument(
        "--profile", metavar="NAME|FILE", help="what such machines have: auto (default), none, dgx-h100, ..."
    )
    parser.add_argument("--baseline", metavar="FILE", help='what this node has ("": nothing is known)')


def daemon(parser: Parser) -> None:
    """All flags of the daemon."""
    look(parser)
    parser.add_argument("--state-dir", metavar="DIR", help="where the ledger's copy is kept")
    parser.add_argument("--runtime-dir", metavar="DIR", help="socket, verdict file and live ledger; one daemon each")
    parser.add_argument("--kernel-log", metavar="kmsg|journal|PATH|off", help="PATH: a file or fifo to follow")
    parser.add_argument("--mode", metavar="observe|drain|act", help="what it may do in Slurm (default: observe)")
    parser.add_argument("--node-name", metavar="NAME", help="this node's name in Slurm (default: the host's)")
    parser.add_argument("--interval", metavar="SECONDS", type=_seconds, help="how often the checks run")
    parser.add_argument("--listen", metavar="ADDR:PORT|off", help="where the metrics page is")


def client(parser: Parser) -> None:
    """Where the running daemon is."""
    parser.add_argument("--runtime-dir", metavar="DIR", help="the daemon's (default: as in the settings)")
    parser.add_argument("--config", metavar="FILE", help=f"its settings (default: {DEFAULT_FILE}, if there is one)")


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'must be a number of seconds, is "{text}"') from None


def duration(text: str) -> float | None:
    """Seconds of "90s", "30m", "1.5h", "1h30m", "2d"; None if it is none of these, or nothing at all."""
    if not re.fullmatch(r"([0-9]{1,9}(\.[0-9]{1,9})?[smhd])+", text):
        return None
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([0-9.]+)([smhd])", text)) or None


# --- what they make


def load_settings(
    args: argparse.Namespace, below: Below | None = None, checks_dir: str | None = None
) -> tuple[Loaded, dict[str, Check]]:
    """The effective settings and all checks. `below`: gives other layers than the usual ones under the file.
    `checks_dir`: where to find the site's checks, instead of where the file says.

    Raises ConfigError, one sentence.
    """
    from healthd import config
    from healthd.settings import layers, registry
    from healthd.settings.settle import require_what_is_named, settle

    given = getattr(args, "config", None)
    file = given or DEFAULT_FILE
    table = config.read_file(file, required=given is not None)
    checks = registry.find(config.checks_dir(table) if checks_dir is None else checks_dir)
    loaded = settle(table, file, overrides(args), checks, below or layers.below)
    require_what_is_named(loaded)
    return loaded, checks


def settings_elsewhere(args: argparse.Namespace) -> tuple[Loaded | None, dict[str, Check]]:
    """The settings file that was named, for another node: so without this node's profile and baseline; None if none was
    named. And the checks of this node. Raises ConfigError."""
    from healthd import config
    from healthd.settings import registry
    from healthd.settings.settle import settle

    file = args.config or DEFAULT_FILE
    table = config.read_file(file, required=args.config is not None)
    checks = registry.find(config.checks_dir(table))
    return settle(table, file, {}, checks) if args.config is not None else None, checks


def overrides(args: argparse.Namespace) -> dict[str, tuple[str, Any]]:
    """setting -> (flag, value) of the flags given. A relative path becomes absolute: the worker, which reads it, has
    another current directory. (A fake machine or a profile may be a name instead.)
    """
    given = {}
    for flag, setting in SETTINGS.items():
        value = getattr(args, flag[2:].replace("-", "_"), None)
        if value is not None:
            is_path = value != "" and (flag in PATHS or (flag in NAMES_OR_PATHS and ("/" in value or "." in value)))
            given[setting] = (flag, os.path.abspath(value) if is_path else value)
    return given


def runtime_dir(args: argparse.Namespace) -> str:
    """Where the daemon's socket is. Other errors in the file do not matter: the daemon may run all the same."""
    if args.runtime_dir is not None:
        return os.path.abspath(str(args.runtime_dir))
    file = args.config or DEFAULT_FILE
    if args.config is None and not os.path.exists(file):
        return DEFAULT_RUNTIME_DIR
    from healthd import config

    with wrong_settings_are_wrong_use():
        return config.runtime_dir(config.read_file(file, required=True), file)


@contextmanager
def wrong_settings_are_wrong_use() -> Iterator[None]:
    from healthd.config import ConfigError

    try:
        yield
    except ConfigError as error:
        raise Stop(f"healthd: {error}") from None


def require_scenario(loaded: Loaded) -> None:
    """A wrong scenario file is wrong use rather than a failure of every GPU check."""
    if loaded.settings.nvml.fake:
        from healthd.config import ConfigError
        from healthd.convert import ConvertError
        from healthd.nvidia.fake_scenario import read

        try:
            read(loaded.settings.nvml.fake)
        except ConvertError as error:
            raise ConfigError(f"{loaded.origins['nvml.fake']}: {error}") from None
