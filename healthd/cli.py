"""The command line: `healthd COMMAND ...`. Each command loads only what it uses.

Exit status: 0 done or healthy, 1 warning or refused, 2 degraded or critical, 3 unknown or no answer, 64 wrong use.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from healthd.config import Loaded
    from healthd.model import Explain
    from healthd.registry import Check
    from healthd.render import Page

OK, REFUSED, UNKNOWN, WRONG_USE, INTERRUPTED = 0, 1, 3, 64, 130
EXIT_OF_HEALTH = {"healthy": 0, "warning": 1, "degraded": 2, "unhealthy": 2, "unknown": 3}
DEFAULT_FILE = "/etc/healthd/healthd.toml"  # as in config.py, which a client need not load
WORKER_SECONDS = 1.0  # how long an idle worker may take to end
WORKER_WORDS = 64 << 10

HELP = """\
healthd: is this GPU node well, and may Slurm use it?

usage: healthd COMMAND [...]        healthd COMMAND --help says more

look
  check [NAME ...]            run the checks once, now, without the daemon
  status                      what the running daemon believes, and what it wants of Slurm
  explain CODE                what a code means, why it matters, and what to do
  list                        the checks: what they look at, how often

tell the running daemon
  repaired CODE [PART]        it is repaired: look again, and resume the node if all is well
  pause --for 30m --why TEXT  leave Slurm alone for a while (driver upgrade, GPU reset)
  resume-checks               the pause is over

set up
  run                         the daemon, in the foreground (systemd starts it like this)
  config check FILE           is this settings file right?
  config show                 every setting that holds, and where it comes from

examples
  healthd check                                     # a table; exit status 0 healthy, 1 warning,
  healthd check --json | jq .health                 #   2 degraded or critical, 3 unknown
  healthd check --fake-nvml dgx-h100                # without a GPU: a fake DGX H100
  healthd explain gpu_xid/79
  healthd repaired gpu_xid/79 0000:1b:00.0
  healthd run --mode observe --runtime-dir /tmp/h --state-dir /tmp/h/state

settings: /etc/healthd/healthd.toml                 manual: README.md, docs/
"""


class WrongUse(Exception):
    """One sentence for who typed it; exit status 64."""


class Failed(Exception):
    """One sentence and an exit status."""

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = re.fullmatch(r"unrecognized arguments: (-\S*?)(=.*)?( .*)?", message)
        if unknown:
            from healthd.convert import nearest

            message = f"there is no {unknown[1]}{nearest(unknown[1], re.findall(r'--[a-z-]+', self.format_help()))}"
        raise WrongUse(f"{self.prog}: {message}")


class Command(NamedTuple):
    arguments: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]
    description: str
    examples: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status; what goes wrong is one sentence on standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # LANG=C: a question mark rather than a traceback
    try:
        return _dispatch(arguments)
    except WrongUse as error:
        return _complain(str(error), WRONG_USE)
    except Failed as error:
        return _complain(str(error), error.status)
    except KeyboardInterrupt:
        return INTERRUPTED


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        return say(HELP)
    if arguments[0] in ("-V", "--version"):
        from healthd import __version__

        return say(f"healthd {__version__}\n")
    words = 2 if arguments[0] == "config" else 1
    name = " ".join(arguments[:words])
    if name == "config" or name in ("config -h", "config --help"):
        return say(_config_help())
    if name not in COMMANDS:
        from healthd.convert import nearest

        what = "write the command first, then its options" if name.startswith("-") else nearest(name, COMMANDS)[2:]
        raise WrongUse(f'healthd: there is no command "{name}"; {what}')
    command = COMMANDS[name]
    parser = Parser(
        prog=f"healthd {name}",
        description=command.description,
        epilog=f"examples\n{command.examples}" if command.examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="this text")
    command.arguments(parser)
    if {"-h", "--help"} & set(arguments):
        return say(parser.format_help())
    return command.run(parser.parse_args(arguments[words:]))


def _config_help() -> str:
    return f"""\
usage: healthd config check FILE     {COMMANDS["config check"].description}
       healthd config show           {COMMANDS["config show"].description}
"""


def say(text: str, status: int = OK) -> int:
    """Write to standard output; `status` comes back. Who stopped reading wants no more of it, and no complaint."""
    if sys.stdout is None:
        return status
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the interpreter's end
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise Failed(f"healthd: standard output cannot be written: {error.strerror}", UNKNOWN) from None
    return status


def _complain(sentence: str, status: int) -> int:
    from healthd.render import plain

    with suppress(OSError):  # nobody reads it: the status says it too
        print(plain(sentence), file=sys.stderr, flush=True)
    return status


def _page() -> Page:
    """Standard output: as wide as the terminal; colour on a terminal that was not told otherwise."""
    import shutil

    from healthd.render import Page

    terminal = sys.stdout is not None and sys.stdout.isatty()
    colour = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Page(shutil.get_terminal_size((100, 24)).columns, colour)


def _json(document: Any) -> str:
    import json

    return json.dumps(document, indent=2) + "\n"


# --- settings


def _settings_arguments(parser: Parser) -> None:
    parser.add_argument("--config", metavar="FILE", help=f"the settings (default: {DEFAULT_FILE}, if there is one)")
    parser.add_argument("--root", metavar="DIR", help="look at the files below DIR instead of this machine's")
    parser.add_argument(
        "--fake-nvml", metavar="PROFILE|FILE", help="instead of GPUs: a machine like dgx-h100, or a scenario file"
    )


def load_settings(args: argparse.Namespace) -> tuple[Loaded, dict[str, Check]]:
    """The effective settings and the checks there are. Raises ConfigError, one sentence."""
    from healthd import config, registry
    from healthd.config import ConfigError

    file = args.config or DEFAULT_FILE
    table = config.read_file(file, required=args.config is not None)
    checks_dir = table.get("checks_dir", config.Settings().checks_dir)
    checks = registry.find(checks_dir if isinstance(checks_dir, str) else "")
    loaded = config.settle(table, file, _flags(args), checks)
    if not os.path.isdir(loaded.settings.root):
        raise ConfigError(f"{loaded.origins['root']}: {loaded.settings.root}: there is no such directory")
    return loaded, checks


# flag -> (attribute, setting)
_FLAGS = {
    "--root": ("root", "root"),
    "--fake-nvml": ("fake_nvml", "nvml.fake"),
    "--state-dir": ("state_dir", "state_dir"),
    "--runtime-dir": ("runtime_dir", "runtime_dir"),
    "--kernel-log": ("kernel_log", "kernel_log.source"),
    "--mode": ("mode", "mode"),
    "--node-name": ("node_name", "node_name"),
    "--interval": ("interval", "interval_seconds"),
    "--listen": ("listen", "metrics.listen"),
}
_DIRECTORIES = ("--root", "--state-dir", "--runtime-dir")


def _flags(args: argparse.Namespace) -> dict[str, tuple[str, Any]]:
    """setting -> (flag, value) of what was given; a directory may be written relative to the current one."""
    given = {}
    for flag, (attribute, setting) in _FLAGS.items():
        value = getattr(args, attribute, None)
        if value is not None:
            given[setting] = (flag, os.path.abspath(value) if flag in _DIRECTORIES else value)
    return given


@contextmanager
def _wrong_settings_are_wrong_use() -> Iterator[None]:
    from healthd.config import ConfigError

    try:
        yield
    except ConfigError as error:
        raise WrongUse(f"healthd: {error}") from None


# --- run


def _run_arguments(parser: Parser) -> None:
    _settings_arguments(parser)
    parser.add_argument("--state-dir", metavar="DIR", help="where the ledger's copy is kept")
    parser.add_argument("--runtime-dir", metavar="DIR", help="socket, verdict file and live ledger; one daemon each")
    parser.add_argument("--kernel-log", metavar="kmsg|journal|PATH|off", help="PATH: a file or fifo to follow")
    parser.add_argument("--mode", metavar="observe|drain|act", help="what it may do in Slurm (default: observe)")
    parser.add_argument("--node-name", metavar="NAME", help="this node's name in Slurm (default: the host's)")
    parser.add_argument("--interval", metavar="SECONDS", type=_seconds, help="how often the checks run")
    parser.add_argument("--listen", metavar="ADDR:PORT|off", help="where the metrics page is")


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'must be a number of seconds, is "{text}"') from None


def _run(args: argparse.Namespace) -> int:
    from healthd import daemon

    with _wrong_settings_are_wrong_use():
        try:
            return daemon.run(lambda: load_settings(args)[0])
        except OSError as error:
            raise Failed(f"healthd run: {error}", REFUSED) from None


# --- check


def _check_arguments(parser: Parser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these checks (default: all that are enabled)")
    parser.add_argument("--json", action="store_true", help="for programs (docs/json.md)")
    _settings_arguments(parser)


def _check(args: argparse.Namespace) -> int:
    import tempfile
    import time

    from healthd import once
    from healthd.runner import Runner
    from healthd.worker import Setup

    with _wrong_settings_are_wrong_use():
        loaded, checks = load_settings(args)
        _require_scenario(loaded)
    loaded = _only(args.names, loaded, checks)
    settings = loaded.settings
    with tempfile.TemporaryFile() as words:
        # A worker that hangs outlives us: who reads our standard error must not wait for its end.
        with _standard_error_to(words):
            runner = Runner(Setup(settings.root, settings.nvml.fake, settings.checks_dir), "", time.monotonic)
            try:
                found = once.look(loaded, checks, runner)
            finally:
                runner.close(WORKER_SECONDS)
        words.seek(0)
        sys.stderr.write(words.read(WORKER_WORDS).decode("utf-8", "replace"))
    document = once.look_json(found)
    status = EXIT_OF_HEALTH[document["health"]]
    if args.json:
        return say(_json(document), status)
    from healthd import render

    return say(render.check(document, _page()), status)


def _only(names: Sequence[str], loaded: Loaded, checks: Mapping[str, Check]) -> Loaded:
    """The settings with these checks alone. Raises WrongUse where there is nothing to run."""
    import dataclasses

    from healthd.convert import nearest
    from healthd.once import names_to_run

    for name in names:
        if name not in checks:
            raise WrongUse(f'healthd check: there is no check "{name}"{nearest(name, checks)}')
        if not any(check == name for check, _ in loaded.checks):
            raise WrongUse(f"healthd check: {name}: {_why_not(checks[name])}")
    wanted = {key: config for key, config in loaded.checks.items() if not names or key[0] in names}
    chosen = dataclasses.replace(loaded, checks=wanted)
    if not names_to_run(chosen, checks):
        listening = "they only listen to the kernel log, and there is none to read here"
        raise WrongUse(f"healthd check: nothing to run: {listening if wanted else 'no check is enabled'}")
    return chosen


def _why_not(check: Check) -> str:
    if check.per:
        return f"nothing to check: no table [checks.{check.name}.NAME] is in the settings, or none is enabled"
    return "is switched off in the settings (enabled = false)"


def _require_scenario(loaded: Loaded) -> None:
    """A wrong scenario file is wrong use rather than a failure of every GPU check."""
    if loaded.settings.nvml.fake:
        from healthd.config import ConfigError
        from healthd.convert import ConvertError
        from healthd.fake_scenario import read

        try:
            read(loaded.settings.nvml.fake)
        except ConvertError as error:
            raise ConfigError(f"{loaded.origins['nvml.fake']}: {error}") from None


@contextmanager
def _standard_error_to(file: IO[bytes]) -> Iterator[None]:
    """What this process and its children write to standard error goes there meanwhile."""
    sys.stderr.flush()
    saved = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)


# --- status, and what the daemon is told


def _client_arguments(parser: Parser) -> None:
    parser.add_argument("--runtime-dir", metavar="DIR", help="the daemon's (default: as in the settings)")
    parser.add_argument("--config", metavar="FILE", help=f"its settings (default: {DEFAULT_FILE}, if there is one)")


def _ask(args: argparse.Namespace, request: dict[str, Any]) -> dict[str, Any]:
    from healthd import control

    try:
        return control.ask(_runtime_dir(args), request)
    except control.NoAnswer as error:
        raise Failed(str(error), UNKNOWN) from None
    except control.Refused as error:
        raise Failed(f"healthd: {error}", REFUSED) from None


def _runtime_dir(args: argparse.Namespace) -> str:
    """Where the daemon's socket is. A file that is wrong elsewhere does not matter: the daemon may still run."""
    if args.runtime_dir is not None:
        return os.path.abspath(str(args.runtime_dir))
    if args.config is None and not os.path.exists(DEFAULT_FILE):
        return "/run/healthd"
    from healthd import config

    file = args.config or DEFAULT_FILE
    with _wrong_settings_are_wrong_use():
        return config.runtime_dir(config.read_file(file, required=args.config is not None), file)


def _status_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs (docs/json.md)")
    _client_arguments(parser)


def _status(args: argparse.Namespace) -> int:
    import time

    from healthd import render

    document = _ask(args, {"command": "status"}).get("status", {})
    try:
        status = EXIT_OF_HEALTH[document["health"]]
        text = _json(document) if args.json else render.status(document, time.time(), _page())
    except (KeyError, TypeError, ValueError) as error:
        from healthd import __version__

        there = document.get("version", "unknown") if isinstance(document, dict) else "unknown"
        raise Failed(
            f"healthd: the daemon (version {there}) answered something that this version ({__version__}) cannot show: "
            f"{type(error).__name__} {error}",
            UNKNOWN,
        ) from None
    return say(text, status)


def _repaired_arguments(parser: Parser) -> None:
    parser.add_argument("code", metavar="CODE", help="gpu_xid/79, as status shows it")
    parser.add_argument("part", metavar="PART", nargs="?", help="0000:1b:00.0 (default: every part with that code)")
    _client_arguments(parser)


def _repaired(args: argparse.Namespace) -> int:
    return say(_ask(args, {"command": "repaired", "code": args.code, "part": args.part})["done"] + "\n")


def _pause_arguments(parser: Parser) -> None:
    parser.add_argument("--for", metavar="TIME", dest="time", required=True, help="30m, 2h, 1d, 90s; at most a week")
    parser.add_argument("--why", metavar="TEXT", required=True, help="for whoever looks at the node meanwhile")
    _client_arguments(parser)


def _pause(args: argparse.Namespace) -> int:
    seconds = duration(args.time)
    if seconds is None:
        raise WrongUse(
            f'healthd pause: --for: must be a time like 30m, 2h or 1h30m (units s, m, h, d), is "{args.time}"'
        )
    return say(_ask(args, {"command": "pause", "seconds": seconds, "why": args.why})["done"] + "\n")


def duration(text: str) -> float | None:
    """Seconds of "90s", "30m", "1.5h", "1h30m", "2d"; None if it is none of these, or nothing at all."""
    if not re.fullmatch(r"([0-9]{1,9}(\.[0-9]{1,9})?[smhd])+", text):
        return None
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([0-9.]+)([smhd])", text)) or None


def _resume_checks(args: argparse.Namespace) -> int:
    return say(_ask(args, {"command": "resume-checks"})["done"] + "\n")


# --- settings, checks and codes


def _config_check_arguments(parser: Parser) -> None:
    parser.add_argument("config", metavar="FILE")


def _config_check(args: argparse.Namespace) -> int:
    with _wrong_settings_are_wrong_use():
        loaded, _ = load_settings(args)
        _require_scenario(loaded)
    return say(f"{args.config}: right; mode {loaded.settings.mode.value}, {len(loaded.checks)} checks\n")


def _config_show(args: argparse.Namespace) -> int:
    from healthd import config, render

    with _wrong_settings_are_wrong_use():
        loaded, _ = load_settings(args)
    return say(render.settings(config.effective(loaded), _page()))


def _explain_arguments(parser: Parser) -> None:
    parser.add_argument("code", metavar="CODE", help="gpu_xid/79, mount/missing, ... (healthd list --codes)")
    parser.add_argument("--config", metavar="FILE", help=argparse.SUPPRESS)


def _explain(args: argparse.Namespace) -> int:
    from healthd import registry, render
    from healthd.convert import nearest

    with _wrong_settings_are_wrong_use():
        _, checks = load_settings(args)
    found = registry.explain(checks, args.code)
    if found is None:
        raise WrongUse(
            f'healthd explain: there is no code "{args.code}"{nearest(args.code, registry.all_codes(checks))}'
        )
    texts = (found.meaning, found.matters, found.todo)
    return say(render.explain(args.code, found.severity.name.lower(), found.clears.name.lower(), texts, _page()))


def _list_arguments(parser: Parser) -> None:
    parser.add_argument("--codes", action="store_true", help="the codes of findings instead")
    parser.add_argument("--config", metavar="FILE", help=f"the settings (default: {DEFAULT_FILE}, if there is one)")


def _list(args: argparse.Namespace) -> int:
    from healthd import render

    with _wrong_settings_are_wrong_use():
        loaded, checks = load_settings(args)
    if args.codes:
        from healthd import registry

        return say(render.codes(_code_rows(registry.explained(checks)), _page()))
    return say(render.checks(_check_rows(loaded, checks), _page()))


def _code_rows(explained: Mapping[str, Explain]) -> Iterator[tuple[str, str, str, str]]:
    for code, text in explained.items():
        meaning = text.meaning.partition(". ")[0].rstrip(".")
        yield code, text.severity.name.lower(), text.clears.name.lower().replace("_", " "), meaning


def _check_rows(loaded: Loaded, checks: Mapping[str, Check]) -> Iterator[tuple[str, str, str, str]]:
    from healthd.render import duration as words

    for name, check in checks.items():
        mine = {instance: config for (owner, instance), config in loaded.checks.items() if owner == name}
        if not mine:
            yield name, f"no [checks.{name}.NAME]" if check.per else "off", "", check.summary
        for instance, config in mine.items():
            every = words(config.interval_seconds or loaded.settings.interval_seconds)
            timing = (every, words(config.timeout_seconds)) if check.runs else ("each kernel line", "")
            yield (f"{name} {instance}".strip(), *timing, check.summary)


COMMANDS = {
    "run": Command(
        _run_arguments,
        _run,
        "The daemon, in the foreground, until SIGTERM. SIGHUP reads the settings again. A flag wins over the file.",
        "  healthd run                                              # as systemd does\n"
        "  healthd run --fake-nvml dgx-h100 --kernel-log /tmp/log --runtime-dir /tmp/h --state-dir /tmp/h/state\n"
        "                                                           # a second one beside it, to play with\n",
    ),
    "check": Command(
        _check_arguments,
        _check,
        "Run the checks once, now. Needs no daemon and changes nothing: findings count at face value.\n"
        "Exit status: 0 healthy, 1 warning, 2 degraded or critical, 3 unknown, 64 wrong use.",
        "  healthd check\n  healthd check gpu_ecc gpu_nvlink\n  healthd check --json | jq -r '.conditions[].message'\n",
    ),
    "status": Command(
        _status_arguments,
        _status,
        "What the running daemon believes: health, conditions, the last round, and what Slurm has.\n"
        "Exit status: 0 healthy, 1 warning, 2 degraded or critical, 3 unknown or not running, 64 wrong use.",
        "  healthd status\n  healthd status --json | jq '.conditions[] | {code, subject, job}'\n",
    ),
    "repaired": Command(
        _repaired_arguments,
        _repaired,
        "Tell the daemon that something is repaired. It ends the condition, looks at everything again, and\n"
        "resumes the node in Slurm once every check has passed.",
        "  healthd repaired gpu_xid/79 0000:1b:00.0\n",
    ),
    "pause": Command(
        _pause_arguments,
        _pause,
        "Leave Slurm alone for a while. Checks go on; what opens meanwhile acts only if a check still finds it\n"
        "afterwards.",
        '  healthd pause --for 30m --why "driver upgrade"\n',
    ),
    "resume-checks": Command(_client_arguments, _resume_checks, "End the pause now. All checks look at once."),
    "config check": Command(
        _config_check_arguments, _config_check, "Read a settings file; say in one sentence what is wrong with it."
    ),
    "config show": Command(_run_arguments, _config_show, "Every setting that holds, and where it comes from."),
    "explain": Command(
        _explain_arguments,
        _explain,
        "What a code means, why it matters, what healthd does, what ends it, and what an engineer should do.",
        "  healthd explain gpu_xid/79\n  healthd explain mount/missing\n",
    ),
    "list": Command(
        _list_arguments, _list, "The checks: what they look at, how often they run, how long they may take."
    ),
}
