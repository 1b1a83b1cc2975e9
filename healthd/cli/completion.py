"""`healthd completion SHELL`, and the completions that argcomplete requests when the user presses TAB.

At each TAB, the shell's script runs `healthd` with _ARGCOMPLETE=1 and the line in COMP_LINE and COMP_POINT. `main` then
calls `complete`, which imports only the module for the typed command. argcomplete (the extra healthd[completion])
splits and quotes words as the shell does. Its scripts discard standard output and standard error.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple

from healthd.cli import flags
from healthd.cli.flags import Command, Parser
from healthd.cli.terminal import UNKNOWN, Stop, write_output
from healthd.common.text import regex

SHELLS = ("bash", "zsh", "fish")
DURATIONS = ("30m", "2h", "8h", "1d", "7d")
DAEMON_SECONDS = 1.0  # maximum time that a completion waits for the daemon
_FILES, _FOLDERS = {"FILE", "FILE.sql", "PATH"}, {"DIR", "DB"}  # metavars
_WORD = regex(r"[a-z][a-z-]*")  # a literal value in a metavar: in "kmsg|journal|PATH|off", all words except PATH
_PROGRAM = regex(r"(?<!\S)(?:\S*/)?healthd(?=\s)")


class Typed(NamedTuple):
    """A command line up to the cursor.

    `command` is the complete command or command group, or "" if there is none. `remainder` is the text after the
    command.
    """

    command: str
    remainder: str


def complete() -> int:
    """Print the completions for the line in COMP_LINE for the shell's script, and exit. Raises Stop."""
    argcomplete = _argcomplete()
    typed = split(os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])])
    line = f"healthd{typed.remainder}"
    os.environ.update(COMP_LINE=line, COMP_POINT=str(len(line)))
    nothing = argcomplete.SuppressCompleter()
    argcomplete.autocomplete(parser(typed.command), always_complete_options=False, default_completer=nothing)
    return UNKNOWN  # autocomplete exits the process


def _after_program(line: str) -> str:
    """Return the text after the word "healthd" in the last command that contains it, or "" if no command does.

    zsh passes the whole line, such as "cd /tmp && sudo healthd ack".
    """
    programs = list(_PROGRAM.finditer(line))
    if not programs:
        return ""
    command = max(line.rfind(separator, 0, programs[-1].start()) for separator in ";|&")
    return line[next(program.end() for program in programs if program.start() > command) :]


def split(line: str) -> Typed:
    from healthd.cli.main import FAMILIES, GROUPS

    remainder = _after_program(line)
    typed_words = remainder.split() if remainder[-1:].isspace() else remainder.split()[:-1]
    command = ""
    for word in typed_words:
        name = f"{command} {word}".lstrip()
        if name in FAMILIES or name in GROUPS:
            command = name
        elif name != "help":
            break
        remainder = remainder.lstrip()[len(word) :]
    return Typed(command, remainder)


def parser(name: str) -> Parser:
    """Return the parser that completes a command, or the commands in a group."""
    from healthd.cli.main import FAMILIES, command

    completion_parser = Parser(name, "", "")
    if name in FAMILIES:
        command(name).flags(completion_parser)
    has_place = any(not action.option_strings for action in completion_parser._actions)
    if not has_place and (name not in FAMILIES or any(other.startswith(f"{name} ") for other in FAMILIES)):
        completion_parser.add_argument("command")
    if not name:
        completion_parser.add_argument("-V", "--version", action="store_true", help="print the version")
    for action in completion_parser._actions:
        if action.choices is None and action.nargs != 0:
            action.completer = _completer(name, action)  # type: ignore[attr-defined]
    return completion_parser


def _completer(command: str, action: argparse.Action) -> Any:
    def completer(prefix: str, parsed_args: argparse.Namespace, **_: object) -> Iterable[str]:
        return values(command, action, prefix, parsed_args)

    return completer


def values(command: str, action: argparse.Action, prefix: str, args: argparse.Namespace) -> list[str]:
    """Return the completions for the value of an option or positional argument. `args` are the parsed words before the
    value.
    """
    names = (action.metavar,) if isinstance(action.metavar, str) else action.metavar or (action.dest.upper(),)
    placeholders = "|".join(names).split("|")
    found = [*_value_choices(command, action, args), *filter(_WORD.fullmatch, placeholders)]
    argcomplete = _argcomplete()
    if _FILES & set(placeholders):
        found += argcomplete.FilesCompleter()(prefix)
    if _FOLDERS & set(placeholders):
        found += argcomplete.DirectoriesCompleter()(prefix)
    return found


def _value_choices(command: str, action: argparse.Action, args: argparse.Namespace) -> Iterable[str]:
    if action.dest == "time":
        return DURATIONS
    if action.dest == "fake_nvml":
        from healthd.nvidia.fake_scenario import profiles

        return profiles()
    if action.dest == "profile":
        from healthd.agent.settings.layers import profile_names

        return ("auto", "none", *profile_names())
    if action.option_strings:
        return ()
    if command in ("ack", "unack", "repaired"):
        return _open_codes(args) if action.dest == "code" else _open_parts(args)
    if command in ("evidence show", "evidence path"):
        return ("latest", *_evidence_ids(args))
    if command == "explain":
        return (*_checks(args), *_codes(args))
    if action.dest == "names":
        return _checks(args)
    if command == "fleet query":
        from healthd.fleet.queries import builtin_queries

        return builtin_queries()
    return _subcommands(command)


def _subcommands(group: str) -> Iterable[str]:
    """Return the words that may follow the words in `group`."""
    from healthd.cli.main import FAMILIES

    start = f"{group} ".lstrip()
    found = {name.removeprefix(start).partition(" ")[0] for name in FAMILIES if name.startswith(start)}
    return found if group else {*found, "help"}


def _checks(args: argparse.Namespace) -> Iterable[str]:
    with flags.settings_errors_as_usage():
        return flags.load_settings(args)[1]


def _codes(args: argparse.Namespace) -> Iterable[str]:
    from healthd.agent.settings import registry

    with flags.settings_errors_as_usage():
        return registry.explained(flags.load_settings(args)[1])


def _evidence_ids(args: argparse.Namespace) -> Iterable[str]:
    from healthd.agent.evidence import archive

    with suppress(OSError):  # only root can read the evidence
        return [found.id for found in archive.list_archives(flags.state_dir(args))]
    return ()


def _open_codes(args: argparse.Namespace) -> Iterable[str]:
    return [condition["code"] for condition in _conditions(args)] or _codes(args)


def _open_parts(args: argparse.Namespace) -> Iterable[str]:
    return [condition["subject"] for condition in _conditions(args) if condition["code"] == args.code]


def _conditions(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the daemon's open conditions (docs/json.md), or an empty list if the daemon does not answer."""
    from healthd.agent.control import protocol
    from healthd.agent.control.client import DaemonUnreachable, RefusedByDaemon, send_request

    try:
        answer = send_request(flags.runtime_dir(args), protocol.simple_request(protocol.STATUS), DAEMON_SECONDS)
    except (DaemonUnreachable, RefusedByDaemon):
        return []
    found: list[dict[str, Any]] = answer["status"]["conditions"]
    return found


def _argcomplete() -> ModuleType:
    try:
        import argcomplete
    except ImportError:
        raise Stop(
            "healthd completion: argcomplete is not installed (extra completion): pip install argcomplete", UNKNOWN
        ) from None
    return argcomplete


# --- the command


def _arguments(parser: Parser) -> None:
    parser.add_argument("shell", metavar="|".join(SHELLS), choices=SHELLS, help="shell for which to print the script")


def _completion(args: argparse.Namespace) -> int:
    script: str = _argcomplete().shellcode(["healthd"], shell=args.shell, complete_arguments=["-o", "nospace"])
    return write_output(script)


COMMANDS = {
    "completion": Command(
        _arguments,
        _completion,
        "Print a shell script that completes commands, options, check names and codes.\n"
        "The script needs argcomplete: pip install argcomplete. The Debian packages include it and the scripts.",
        "  . <(healthd completion bash)      # in this shell\n"
        "  mkdir -p /usr/local/share/bash-completion/completions    # all users, as root\n"
        "  healthd completion bash > /usr/local/share/bash-completion/completions/healthd\n"
        "  healthd completion zsh > /usr/local/share/zsh/site-functions/_healthd\n"
        "  healthd completion fish > ~/.config/fish/completions/healthd.fish\n",
    ),
}
