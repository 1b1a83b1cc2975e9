"""`healthd completion SHELL`, and what TAB offers: argcomplete asks healthd, which answers from its own parsers.

At each TAB the shell's script runs `healthd` with _ARGCOMPLETE=1, and the line in COMP_LINE and COMP_POINT. `main` then
calls `complete`, which imports only the family of the typed command. argcomplete (the extra healthd[completion]) splits
and quotes words as the shell does. Its scripts discard standard output and standard error.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple

from healthd.cli import flags
from healthd.cli.flags import Command, Parser
from healthd.cli.terminal import UNKNOWN, Stop, say
from healthd.common.text import regex

SHELLS = ("bash", "zsh", "fish")
DURATIONS = ("30m", "2h", "8h", "1d", "7d")
DAEMON_SECONDS = 1.0  # how long a TAB waits for the daemon
_FILES, _FOLDERS = {"FILE", "FILE.sql", "PATH"}, {"DIR", "DB"}  # metavars
_WORD = regex(r"[a-z][a-z-]*")  # of a metavar: such a word is a value, as in "kmsg|journal|PATH|off"
_PROGRAM = regex(r"(?<!\S)(?:\S*/)?healthd(?=\s)")


class Typed(NamedTuple):
    """A line up to the cursor: its command, or group of commands, "" if none is complete; and the text after that."""

    command: str
    rest: str


def complete() -> int:
    """Print the completions of the line in COMP_LINE for the shell's script, and exit. Raises Stop."""
    argcomplete = _argcomplete()
    typed = split(os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])])
    line = f"healthd{typed.rest}"
    os.environ.update(COMP_LINE=line, COMP_POINT=str(len(line)))
    nothing = argcomplete.SuppressCompleter()
    argcomplete.autocomplete(parser(typed.command), always_complete_options=False, default_completer=nothing)
    return UNKNOWN  # autocomplete has exited


def _after_program(line: str) -> str:
    """Return the text after the word "healthd", in the last command of the line that has it; empty if none has.

    zsh passes "cd /tmp && sudo healthd ack" whole."""
    programs = list(_PROGRAM.finditer(line))
    if not programs:
        return ""
    command = max(line.rfind(separator, 0, programs[-1].start()) for separator in ";|&")
    return line[next(program.end() for program in programs if program.start() > command) :]


def split(line: str) -> Typed:
    from healthd.cli.main import FAMILIES, TWO_WORDS

    rest = _after_program(line)
    words = rest.split() if rest[-1:].isspace() else rest.split()[:-1]
    command = ""
    for word in words:
        name = f"{command} {word}".lstrip()
        if name in FAMILIES or name in TWO_WORDS:
            command = name
        elif name != "help":
            break
        rest = rest.lstrip()[len(word) :]
    return Typed(command, rest)


def parser(name: str) -> Parser:
    """Return the parser that completes a command, or the names of the commands of a group."""
    from healthd.cli.main import FAMILIES, command

    made = Parser(name, "", "")
    if name in FAMILIES:
        command(name).flags(made)
    else:
        made.add_argument("command")
    if not name:
        made.add_argument("-V", "--version", action="store_true", help="print the version")
    for action in made._actions:
        if action.choices is None and action.nargs != 0:
            action.completer = _completer(name, action)  # type: ignore[attr-defined]
    return made


def _completer(command: str, action: argparse.Action) -> Any:
    def completer(prefix: str, parsed_args: argparse.Namespace, **_: object) -> Iterable[str]:
        return values(command, action, prefix, parsed_args)

    return completer


def values(command: str, action: argparse.Action, prefix: str, args: argparse.Namespace) -> list[str]:
    """Return what may be the value of an option, or stand at a place, of a command. `args`: the words before it."""
    names = (action.metavar,) if isinstance(action.metavar, str) else action.metavar or (action.dest.upper(),)
    words = "|".join(names).split("|")
    found = [*_of_place(command, action, args), *filter(_WORD.fullmatch, words)]
    argcomplete = _argcomplete()
    if _FILES & set(words):
        found += argcomplete.FilesCompleter()(prefix)
    if _FOLDERS & set(words):
        found += argcomplete.DirectoriesCompleter()(prefix)
    return found


def _of_place(command: str, action: argparse.Action, args: argparse.Namespace) -> Iterable[str]:
    if action.dest == "time":
        return DURATIONS
    if action.dest == "fake_nvml":
        from healthd.nvidia.fake_scenario import profiles

        return profiles()
    if action.dest == "profile":
        from healthd.agent.settings.layers import names

        return ("auto", "none", *names())
    if action.option_strings:
        return ()
    if command in ("ack", "unack", "repaired"):
        return _open_codes(args) if action.dest == "code" else _open_parts(args)
    if command == "explain":
        return (*_checks(args), *_codes(args))
    if action.dest == "names":
        return _checks(args)
    if command == "fleet query":
        from healthd.fleet.questions import built_in

        return built_in()
    return _commands_of(command)


def _commands_of(group: str) -> Iterable[str]:
    """Return the next words of the commands that begin with the words of `group`."""
    from healthd.cli.main import FAMILIES

    start = f"{group} ".lstrip()
    found = {name.removeprefix(start).partition(" ")[0] for name in FAMILIES if name.startswith(start)}
    return found if group else {*found, "help"}


def _checks(args: argparse.Namespace) -> Iterable[str]:
    with flags.wrong_settings_are_wrong_use():
        return flags.load_settings(args)[1]


def _codes(args: argparse.Namespace) -> Iterable[str]:
    from healthd.agent.settings import registry

    with flags.wrong_settings_are_wrong_use():
        return registry.explained(flags.load_settings(args)[1])


def _open_codes(args: argparse.Namespace) -> Iterable[str]:
    return [condition["code"] for condition in _conditions(args)] or _codes(args)


def _open_parts(args: argparse.Namespace) -> Iterable[str]:
    return [condition["subject"] for condition in _conditions(args) if condition["code"] == args.code]


def _conditions(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the daemon's open conditions (docs/json.md); none if it does not answer."""
    from healthd.agent.control import protocol
    from healthd.agent.control.client import NoAnswer, RefusedByDaemon, ask

    try:
        answer = ask(flags.runtime_dir(args), protocol.plain(protocol.STATUS), DAEMON_SECONDS)
    except (NoAnswer, RefusedByDaemon):
        return []
    found: list[dict[str, Any]] = answer["status"]["conditions"]
    return found


def _argcomplete() -> ModuleType:
    try:
        import argcomplete
    except ImportError:
        raise Stop('healthd completion: argcomplete is missing: pip install "healthd[completion]"', UNKNOWN) from None
    return argcomplete


# --- the command


def _arguments(parser: Parser) -> None:
    parser.add_argument("shell", metavar="|".join(SHELLS), choices=SHELLS, help="shell to print the script for")


def _completion(args: argparse.Namespace) -> int:
    script: str = _argcomplete().shellcode(["healthd"], shell=args.shell, complete_arguments=["-o", "nospace"])
    return say(script)


COMMANDS = {
    "completion": Command(
        _arguments,
        _completion,
        "Print the shell script that completes commands, options, check names and codes.\n"
        'It needs argcomplete: pip install "healthd[completion]". The packages include it and install the scripts.',
        "  . <(healthd completion bash)      # in this shell\n"
        "  mkdir -p /usr/local/share/bash-completion/completions    # all users, as root\n"
        "  healthd completion bash > /usr/local/share/bash-completion/completions/healthd\n"
        "  healthd completion zsh > /usr/local/share/zsh/site-functions/_healthd\n"
        "  healthd completion fish > ~/.config/fish/completions/healthd.fish\n",
    ),
}
