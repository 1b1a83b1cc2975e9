"""What is typed after a command: its flags, and the settings that flags and file give together."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from healthd.cli.terminal import Stop, complain
from healthd.common.paths import RUNTIME_DIR, STATE_DIR
from healthd.common.text import regex

if TYPE_CHECKING:
    from healthd.agent.settings.config import Below, Layer, Loaded, Settings
    from healthd.agent.settings.registry import Check

DEFAULT_FILE = "/etc/healthd/healthd.toml"
# As in config.py, which a client should not have to load.

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
        self._columns = 80  # argparse would ask the terminal, by shutil, for each flag that it is told of
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
        """Each line of the description is a paragraph, as wide as the terminal."""
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
            from healthd.common.codec import nearest

            message = f"there is no {unknown[1]}{nearest(unknown[1], regex(r'--[a-z-]+').findall(self.format_usage()))}"
        raise Stop(f"{self.prog}: {message}")


class Command(NamedTuple):
    """What a command is. `run` returns the exit status."""

    flags: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]
    description: str
    examples: str = ""

    @property
    def summary(self) -> str:
        """The first sentence of the description, without its full stop."""
        return " ".join(self.description.split()).partition(". ")[0].rstrip(".")


# --- groups of flags


def config(parser: Parser) -> None:
    """The settings' file."""
    parser.add_argument("--config", metavar="FILE", help=f"settings file (default: {DEFAULT_FILE}, if it exists)")


def look(parser: Parser) -> None:
    """What to look at."""
    config(parser)
    parser.add_argument("--root", metavar="DIR", help="read /proc, /sys and the mounts below DIR")
    parser.add_argument(
        "--fake-nvml", metavar="MACHINE|FILE", help="simulate a machine like dgx-h100, or a scenario file"
    )
    parser.add_argument("--profile", metavar="NAME|FILE", help="expected hardware: auto (default), none, dgx-h100, ...")
    parser.add_argument("--baseline", metavar="FILE", help='baseline of this node ("": none)')


def daemon(parser: Parser) -> None:
    """All flags of the daemon."""
    look(parser)
    parser.add_argument("--state-dir", metavar="DIR", help="directory of the event stream and the copy of the ledger")
    parser.add_argument("--runtime-dir", metavar="DIR", help="directory of socket, verdict file and live ledger")
    parser.add_argument(
        "--kernel-log",
        metavar="kmsg|journal|PATH|off",
        help="source of kernel messages; PATH: a file or FIFO to follow",
    )
    parser.add_argument(
        "--mode", metavar="observe|drain|act", help="what healthd may change in Slurm (default: observe)"
    )
    parser.add_argument("--node-name", metavar="NAME", help="NodeName in Slurm (default: the host name)")
    parser.add_argument("--interval", metavar="SECONDS", type=_seconds, help="interval of the checks")
    parser.add_argument("--listen", metavar="ADDR:PORT|off", help="address of the metrics page")


def client(parser: Parser) -> None:
    """Where the running daemon is."""
    parser.add_argument(
        "--runtime-dir", metavar="DIR", help="runtime directory of the daemon (default: as in the settings)"
    )
    parser.add_argument("--config", metavar="FILE", help=f"settings file (default: {DEFAULT_FILE}, if it exists)")


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'must be a number of seconds, got "{text}"') from None


def duration(text: str) -> float | None:
    """Seconds of "90s", "30m", "1.5h", "1h30m", "2d"; None if it is none of these, or nothing at all."""
    if not regex(r"([0-9]{1,9}(\.[0-9]{1,9})?[smhd])+").fullmatch(text):
        return None
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    return sum(float(number) * units[unit] for number, unit in regex(r"([0-9.]{1,19})([smhd])").findall(text)) or None


# --- what they make


def settings_file(args: argparse.Namespace) -> tuple[str, bool]:
    """The path of the settings, and whether it was named, so that there must be such a file."""
    given: str | None = getattr(args, "config", None)
    if given == "":
        raise Stop("healthd: the settings: a file must be named, the name is empty")
    return given or DEFAULT_FILE, given is not None


def load_settings(
    args: argparse.Namespace, below: Below | None = None, checks_dir: str | None = None
) -> tuple[Loaded, dict[str, Check]]:
    """The effective settings and all checks. `below`: gives other layers than the usual ones under the file.
    `checks_dir`: where to find the site's checks, instead of where the file says.

    Raises ConfigError, one sentence.
    """
    from healthd.agent.settings import config, layers, registry
    from healthd.agent.settings.effective import require_what_is_named, settle
    from healthd.agent.settings.settings_file import read_file

    file, given = settings_file(args)
    table = read_file(file, required=given)
    checks = registry.find(config.checks_dir(table) if checks_dir is None else checks_dir)
    loaded = settle(table, file, overrides(args), checks, below or layers.below)
    require_what_is_named(loaded)
    return loaded, checks


def load_settings_of(args: argparse.Namespace, checks: dict[str, Check]) -> Loaded | None:
    """What load_settings() gives for these checks, which come with healthd, without importing the others: only those
    that a layer of the settings names are found, too, and put beside them. None where the site has checks of its own.

    Raises ConfigError where load_settings() does; its sentence knows only these checks.
    """
    from healthd.agent.settings import config, layers, registry
    from healthd.agent.settings.effective import require_what_is_named, settle
    from healthd.agent.settings.settings_file import read_file

    file, given = settings_file(args)
    table = read_file(file, required=given)
    if registry.site_files(config.checks_dir(table)):
        return None

    def below(settings: Settings) -> Sequence[Layer]:
        found = layers.below(settings)
        tables = [table.get("checks"), *_checks_of_sections(table), *(layer.checks for layer in found)]
        named = {name for one in tables if isinstance(one, Mapping) for name in one}
        checks.update(registry.built_in(named - {*checks}))
        return found

    loaded = settle(table, file, overrides(args), checks, below)
    require_what_is_named(loaded)
    return loaded


def _checks_of_sections(table: Mapping[str, Any]) -> list[Any]:
    """The [node.checks.*] of each [[node]] section."""
    sections = table.get("node", [])
    return [section.get("checks", {}) for section in sections] if isinstance(sections, list) else []


def settings_elsewhere(
    args: argparse.Namespace, node: str, below: Callable[[Settings, Mapping[str, Check]], Sequence[Layer]]
) -> tuple[Loaded | None, dict[str, Check]]:
    """The settings file that was named, for another `node`: so over its profile and baseline (`below`); None if none
    was named. And the checks of this node. Raises ConfigError."""
    from healthd.agent.settings import config, registry
    from healthd.agent.settings.effective import settle
    from healthd.agent.settings.settings_file import read_file

    file, given = settings_file(args)
    table = read_file(file, required=given)
    checks = registry.find(config.checks_dir(table))
    if not given:
        return None, checks
    named = {"node_name": ("the recording", node)}
    return settle(table, file, named, checks, lambda settings: below(settings, checks)), checks


def overrides(args: argparse.Namespace) -> dict[str, tuple[str, Any]]:
    """setting -> (flag, value) of the flags given. A relative path becomes absolute: the worker, which reads it, has
    another current directory. (A fake machine, a profile or a kernel log may be a name instead.)
    """
    from healthd.agent.settings.limits import KERNEL_LOGS

    given = {}
    for flag, setting in SETTINGS.items():
        value = getattr(args, flag[2:].replace("-", "_"), None)
        if value is not None:
            is_path = value != "" and (flag in PATHS or (flag in NAMES_OR_PATHS and ("/" in value or "." in value)))
            is_path |= flag == "--kernel-log" and value not in ("", *KERNEL_LOGS)
            given[setting] = (flag, os.path.abspath(value) if is_path else value)
    return given


def runtime_dir(args: argparse.Namespace, default: str = RUNTIME_DIR) -> str:
    """Where the daemon's socket is. Other errors in the file do not matter: the daemon may run all the same, with what
    it read before. Where the file cannot be read this says so, and gives the default. Raises Stop."""
    return _directory(args, "runtime_dir", default)


def state_dir(args: argparse.Namespace) -> str:
    """Where the daemon keeps what it remembers; the same of errors."""
    return _directory(args, "state_dir", STATE_DIR)


def _directory(args: argparse.Namespace, name: str, default: str) -> str:
    given = getattr(args, name, None)
    if given is not None:
        return os.path.abspath(str(given))
    file, required = settings_file(args)
    if not required and not os.path.exists(file):
        return default
    from healthd.agent.settings import config
    from healthd.agent.settings.settings_file import read_file

    with wrong_settings_are_wrong_use():
        try:
            table = read_file(file, required=True)
        except config.ConfigError as error:
            if required and _is_missing(file):  # mistyped: another daemon may be meant than the default one
                raise
            complain(f"healthd: note: the settings have an error ({error}); assuming {name} {default}")
            return default
        return config.directory(table, file, name)


def _is_missing(file: str) -> bool:
    try:
        os.stat(file)
    except FileNotFoundError:
        return True
    except OSError:
        pass  # something is there, which we may not look at
    return False


@contextmanager
def wrong_settings_are_wrong_use() -> Iterator[None]:
    from healthd.agent.settings.config import ConfigError

    try:
        yield
    except ConfigError as error:
        raise Stop(f"healthd: {error}") from None


def require_scenario(loaded: Loaded) -> None:
    """A wrong scenario file is wrong use rather than a failure of every GPU check."""
    if loaded.settings.nvml.fake:
        from healthd.agent.settings.config import ConfigError
        from healthd.common.codec import ConvertError
        from healthd.nvidia.fake_scenario import read

        try:
            read(loaded.settings.nvml.fake)
        except ConvertError as error:
            raise ConfigError(f"{loaded.origins['nvml.fake']}: {error}") from None
