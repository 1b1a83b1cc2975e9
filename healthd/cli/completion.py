"""`healthd completion SHELL`: what TAB offers in bash, zsh and fish, as a script made of the parsers themselves.

What stands in it is fixed when it is made: commands, options, the words that a value may be. The names of checks and
codes are asked of `healthd list` at each TAB, for a site has checks of its own. Nothing here is loaded otherwise.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from healthd.cli.flags import Command, Parser
from healthd.cli.terminal import say
from healthd.common.text import regex

# Offers: a word stands for itself, but for these. MANY: more values of the option may follow. OPEN: the codes of the
# conditions that are open, all codes if there are none; PARTS: the parts of the code that was typed.
FILES, FOLDERS, CHECKS, CODES, MANY = "@files", "@folders", "@checks", "@codes", "@many"
OPEN, PARTS = "@open", "@parts"
DURATIONS = ("30m", "2h", "8h", "1d", "7d")

_METAVARS = {"FILE": FILES, "FILE.sql": FILES, "PATH": FILES, "DIR": FOLDERS, "DB": FOLDERS, "CODE": CODES}
_OF_CONDITIONS = ("ack", "unack", "repaired")  # commands whose CODE is one of an open condition
_WORD = regex(r"[a-z][a-z-]*")
_GROUPS = {
    "config": "the settings, read and shown",
    "fleet": "the fleet, at the centre",
    "help": "what a command does",
    "hook": "what Slurm calls",
}


class Option(NamedTuple):
    """`offers`: what its value may be, () = nothing that is known; None = it takes no value. `may_lack`: the value may
    be left out."""

    names: tuple[str, ...]
    help: str
    value: str = ""
    offers: tuple[str, ...] | None = None
    may_lack: bool = False


class Place(NamedTuple):
    """What stands behind a command without an option. `many`: so do all that follow."""

    value: str
    offers: tuple[str, ...]
    many: bool


class Line(NamedTuple):
    """What may be typed behind the words of a command, or of a group ("config"): `next`, the commands in it."""

    words: str
    summary: str
    next: tuple[str, ...] = ()
    options: tuple[Option, ...] = ()
    places: tuple[Place, ...] = ()


def lines() -> list[Line]:
    """All that can be typed, from the parsers. The first line is that of `healthd` itself."""
    from healthd.cli.main import FAMILIES, command

    first = sorted({name.partition(" ")[0] for name in FAMILIES} | {"help"})
    own = (Option(("-h", "--help"), "every command"), Option(("-V", "--version"), "which healthd this is"))
    found = [Line("", "", tuple(first), own)]
    for word in first:
        below = tuple(name.partition(" ")[2] for name in FAMILIES if name.startswith(f"{word} "))
        if word not in FAMILIES:
            found.append(Line(word, _GROUPS[word], below))
        else:
            found.append(_line(word, command(word), below))
        found += [_line(f"{word} {name}", command(f"{word} {name}")) for name in below]
    return found


def _line(name: str, command: Command, below: tuple[str, ...] = ()) -> Line:
    parser = Parser(name, command.description, command.examples)
    command.flags(parser)
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    options = tuple(_option(action) for action in shown if action.option_strings)
    places = tuple(_place(name, action) for action in shown if not action.option_strings)
    return Line(name, command.summary, below, options, places)


def _option(action: argparse.Action) -> Option:
    names, words = tuple(action.option_strings), action.help or ""
    if action.nargs == 0:
        return Option(names, words)
    many = (MANY,) if action.nargs in ("*", "+", 2) else ()
    return Option(names, words, _metavar(action), (*_offers(action), *many), action.nargs == "?")


def _place(command: str, action: argparse.Action) -> Place:
    if action.dest == "names":
        offers: tuple[str, ...] = (CHECKS,)
    elif command == "explain":
        offers = (CHECKS, CODES)
    elif command in _OF_CONDITIONS and action.dest in ("code", "part"):
        offers = (OPEN,) if action.dest == "code" else (PARTS,)
    elif command == "fleet query":
        offers = _questions()
    else:
        offers = _offers(action)
    return Place(_metavar(action), offers, action.nargs in ("*", "+"))


def _offers(action: argparse.Action) -> tuple[str, ...]:
    """What its help calls the value says what it may be: "kmsg|journal|PATH|off"."""
    if action.choices is not None:
        return tuple(map(str, action.choices))
    named = {"fake_nvml": _machines, "profile": _profiles, "time": _durations}.get(action.dest, tuple)()
    words = _metavar(action).split("|")
    return (*named, *(_METAVARS.get(word, word) for word in words if word in _METAVARS or _WORD.fullmatch(word)))


def _metavar(action: argparse.Action) -> str:
    if isinstance(action.metavar, tuple):
        return " ".join(action.metavar)
    return action.metavar or action.dest.upper()


def _durations() -> tuple[str, ...]:
    return DURATIONS


def _machines() -> tuple[str, ...]:
    from healthd.nvidia import fake_machines

    return tuple(sorted(path.stem for path in Path(fake_machines.FOLDER).glob("*.toml")))


def _profiles() -> tuple[str, ...]:
    from healthd.agent.settings.layers import names

    return ("auto", "none", *names())


def _questions() -> tuple[str, ...]:
    from healthd.fleet.questions import built_in

    return (*built_in(), FILES)


# --- bash


def bash(known: Iterable[Line]) -> str:
    """For bash 4.4 and newer, with or without the package bash-completion."""
    rows = []
    for line in known:
        placed = [offer for place in line.places for offer in place.offers]
        rows.append((line.words, [*line.next, *dict.fromkeys(placed)]))
        rows.append((f"{line.words} -".lstrip(), [name for option in line.options for name in option.names]))
        for option in line.options:
            if option.offers is not None:
                rows += [(f"{line.words} {name}", list(option.offers)) for name in option.names]
    cases = "\n".join(f"    {shlex.quote(place)}) echo {shlex.quote(' '.join(offers))} ;;" for place, offers in rows)
    return _BASH.replace("CASES", cases)


_BASH = r"""# What TAB offers behind healthd in bash. Made by: healthd completion bash

_healthd_offers() { # COMMAND, "COMMAND -" or "COMMAND OPTION": what may stand there; 1: no such command, no value
  case "$1" in
CASES
    *) return 1 ;;
  esac
}

_healthd_open() { # PROGRAM and "code": the codes of open conditions; PROGRAM and a code: its parts, a line each
  "$1" status 2>/dev/null | awk -v code="$2" '
    !/^  (info|warning|degraded|critical) +[a-z0-9_]+\// { next }
    code == "code" { print $2; next }
    $2 == code && NF > 2 { sub(/^ +[a-z]+ +[^ ]+ /, ""); print }'
}

_healthd() {
  local healthd=$1 cur=${COMP_WORDS[COMP_CWORD]} command='' option='' offers='' words='' code='' word i
  local typed='' begun='' quote=''
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    word=${COMP_WORDS[i]}
    if [[ $i = 1 && $word = help ]]; then continue; fi
    if [[ $word = -* ]] || ! _healthd_offers "${command:+$command }$word" >/dev/null; then break; fi
    command=${command:+$command }$word
  done
  for ((i = COMP_CWORD - 1; i > 0; i--)); do
    if [[ ${COMP_WORDS[i]} = -* ]]; then
      option=${COMP_WORDS[i]}
      if [[ ${COMP_WORDS[i + 1]} = '=' ]]; then i=$((i + 1)); fi
      break
    fi
  done
  if [[ $cur = '=' ]]; then cur=''; fi
  if [[ $cur = -* ]]; then
    offers=$(_healthd_offers "${command:+$command }-")
  elif [[ $option ]] && offers=$(_healthd_offers "$command $option") &&
    { ((COMP_CWORD - i <= 1)) || [[ $offers = *@many* ]]; }; then
    :
  else
    offers=$(_healthd_offers "$command")
  fi
  for ((i = 1; i < COMP_CWORD; i++)); do
    if [[ ${COMP_WORDS[i]} = */* && ${COMP_WORDS[i - 1]} != -* ]]; then code=${COMP_WORDS[i]}; break; fi
  done
  for word in $offers; do
    case $word in
      @files) compopt -o filenames; mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -f -- "$cur") ;;
      @folders) compopt -o filenames; mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -d -- "$cur") ;;
      @checks) words+=" $("$healthd" list 2>/dev/null | awk 'NR > 1 { print $1 }')" ;;
      @codes) words+=" $("$healthd" list --codes 2>/dev/null | awk 'NR > 1 { print $1 }')" ;;
      @open)
        if [[ ! $code ]]; then
          word=$(_healthd_open "$healthd" code)
          words+=" ${word:-$("$healthd" list --codes 2>/dev/null | awk 'NR > 1 { print $1 }')}"
        fi
        ;;
      @parts)
        if [[ $code ]]; then
          # A part may hold blanks, and bash takes a ":" for the end of a word. What is already there: all since the
          # last blank that no backslash escapes, or since the quote that is open.
          [[ ${COMP_LINE:0:COMP_POINT} =~ ([^\\\ ]|\\.)*$ ]]
          typed=${BASH_REMATCH[0]}; begun=${typed%"${cur#:}"}; quote=''
          if [[ $cur = [\"\']* ]]; then quote=${cur:0:1}; typed=${cur:1}; begun=''; fi
          while IFS= read -r word; do
            if [[ ! $quote ]]; then printf -v word %q "$word"; fi
            if [[ $word = "$typed"* ]]; then COMPREPLY+=("${word#"$begun"}"); fi
          done < <(_healthd_open "$healthd" "$code")
        fi
        ;;
      @many) ;;
      *) words+=" $word" ;;
    esac
  done
  mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -W "$words" -- "$cur" | sort -u)
}

complete -F _healthd healthd
"""


# --- zsh


def zsh(known: Iterable[Line]) -> str:
    known = list(known)
    summaries = {line.words: line.summary for line in known}
    two = "|".join(shlex.quote(line.words) for line in known if " " in line.words)
    return _ZSH.replace("TWO", two).replace("CASES", "\n".join(_zsh_case(line, summaries) for line in known))


def _zsh_case(line: Line, summaries: Mapping[str, str]) -> str:
    specs = [spec for option in line.options for spec in _zsh_options(option)]
    for number, place in enumerate(line.places, 1):
        where = "*" if place.many else str(number)
        specs.append(f"{where}:{_escaped(place.value, ':')}: _healthd_offer {' '.join(place.offers)}".rstrip())
    told = f"_arguments {_quoted([*specs, *(['1:command:->next'] if line.next else [])])}"
    if line.next:
        summed = [(word, summaries[f"{line.words} {word}".strip()]) for word in line.next]
        also = " ".join(offer for place in line.places for offer in place.offers)
        told = (
            f"next=({_quoted(f'{word}:{summary}' for word, summary in summed)})\n      {told}\n"
            f"      if [[ $state = next ]]; then _describe command next; {also and f'_healthd_offer {also}; '}fi"
        )
    return f"    {shlex.quote(line.words)})\n      {told} ;;"


def _zsh_options(option: Option) -> Iterator[str]:
    text = _escaped(option.help, "[]")
    for name in option.names:
        if option.offers is None:
            yield f"{name}[{text}]"
            continue
        pattern = "*-*:" if MANY in option.offers else ":" if option.may_lack else ""
        equals = "=" if name.startswith("--") else ""
        offers = " ".join(offer for offer in option.offers if offer != MANY)
        yield f"*{name}{equals}[{text}]:{pattern}{_escaped(option.value, ':')}: _healthd_offer {offers}".rstrip()


def _quoted(words: Iterable[str]) -> str:
    return " ".join(map(shlex.quote, words))


def _escaped(text: str, special: str) -> str:
    return "".join(f"\\{one}" if one in special or one == "\\" else one for one in text)


_ZSH = r"""#compdef healthd
# What TAB offers behind healthd in zsh. Made by: healthd completion zsh

_healthd_open() { # "code": the codes of open conditions; a code: its parts, a line each
  "$_healthd_program" status 2>/dev/null | awk -v code="$1" '
    !/^  (info|warning|degraded|critical) +[a-z0-9_]+\// { next }
    code == "code" { print $2; next }
    $2 == code && NF > 2 { sub(/^ +[a-z]+ +[^ ]+ /, ""); print }' | sort -u
}

_healthd_offer() {
  local one
  local -a offered
  for one in "$@"; do
    case $one in
      @files) _files ;;
      @folders) _files -/ ;;
      @checks) offered+=(${(f)"$("$_healthd_program" list 2>/dev/null | awk 'NR > 1 { print $1 }')"}) ;;
      @codes) offered+=(${(f)"$("$_healthd_program" list --codes 2>/dev/null | awk 'NR > 1 { print $1 }')"}) ;;
      @open)
        offered+=(${(f)"$(_healthd_open code)"})
        if (( ! $#offered )); then _healthd_offer @codes; fi
        ;;
      @parts) offered+=(${(f)"$(_healthd_open "${words[(r)*/*]}")"}) ;;
      *) offered+=($one) ;;
    esac
  done
  if (( $#offered )); then compadd -a offered; fi
}

_healthd() {
  local curcontext=$curcontext state line command= _healthd_program=$words[1]
  local -a next
  local -A opt_args
  if [[ $words[2] = help ]] && (( CURRENT > 2 )); then shift words; (( CURRENT-- )); fi
  if (( CURRENT > 3 )) && [[ "$words[2] $words[3]" = (TWO) ]]; then
    command="$words[2] $words[3]"; shift 2 words; (( CURRENT -= 2 ))
  elif (( CURRENT > 2 )); then
    command=$words[2]; shift words; (( CURRENT-- ))
  fi
  case $command in
CASES
  esac
}

# Found in $fpath, this file is the body of the function _healthd, called at the first TAB; else it was read by source.
if [[ "$funcstack[1]" = _healthd ]]; then _healthd "$@"; else compdef _healthd healthd; fi
"""


# --- fish


def fish(known: Iterable[Line]) -> str:
    known = list(known)
    summaries = {line.words: line.summary for line in known}
    return _FISH + "".join(f"complete -c healthd {row}\n" for line in known for row in _fish_rows(line, summaries))


def _fish_rows(line: Line, summaries: Mapping[str, str]) -> Iterator[str]:
    here = f"__healthd_at {line.words}".strip()
    among = [f"; and not __healthd_at {line.words} {word}".replace("  ", " ") for word in line.next if line.words]
    where = f"-n {_fish_text(here + ''.join(among))}"
    for word in line.next:
        summary = summaries[f"{line.words} {word}".strip()]
        yield f"-n {_fish_text(f'__healthd_ends {line.words}'.strip())} -a {word} -d {_fish_text(summary)}"
    for option in line.options:
        names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
        value = (
            ""
            if option.offers is None
            else f"{'' if option.may_lack else ' -r'}{_fish_offers(option.offers, alone=' -f')}"
        )
        if not line.words:
            where = "-n __healthd_ends"
        yield f"{where} {names}{value} -d {_fish_text(option.help)}"
    for place in line.places:
        if offers := _fish_offers(place.offers):
            yield f"{where}{offers}"


def _fish_offers(offers: Sequence[str], alone: str = "") -> str:
    """`alone`: what is said where no file is offered."""
    asked = {
        FOLDERS: "(__fish_complete_directories)",
        CHECKS: "(__healthd_list)",
        CODES: "(__healthd_list --codes)",
        OPEN: "(__healthd_open)",
    }
    words = [asked.get(offer, offer) for offer in offers if offer not in (FILES, MANY, PARTS)]
    return (" -F" if FILES in offers else alone) + (f" -a {_fish_text(' '.join(words))}" if words else "")


def _fish_text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


_FISH = r"""# What TAB offers behind healthd in fish. Made by: healthd completion fish

function __healthd_words -d 'the words before this one, without options and "help"'
    set -l words (commandline -opc)
    set -e words[1]
    if test "$words[1]" = help
        set -e words[1]
    end
    printf '%s\n' $words
end

function __healthd_at -d 'whether the line begins with this command'
    set -l words (__healthd_words)
    set -l count (count $argv)
    test (count $words) -ge $count
    and test "$words[1..$count]" = "$argv"
end

function __healthd_ends -d 'whether these words, and no more, stand before this one'
    test "$(__healthd_words)" = "$(printf '%s\n' $argv)"
end

function __healthd_list -d 'the first column of healthd list'
    set -l words (commandline -opc)
    $words[1] list $argv 2>/dev/null | awk 'NR > 1 { print $1 }'
end

function __healthd_open -d 'the codes of open conditions, all codes if none is open; behind a code its parts'
    set -l words (commandline -opc)
    set -l code (string match -- '*/*' $words[2..])[1]
    set -l open '^  (?:info|warning|degraded|critical) +([a-z0-9_]+/.*)'
    set -l rows ($words[1] status 2>/dev/null | string replace -rf $open '$1')
    for row in $rows
        set -l fields (string split -m 1 ' ' -- $row)
        if test -z "$code"
            echo $fields[1]
        else if test "$fields[1]" = "$code"
            echo $fields[2]
        end
    end
    if test -z "$code" -a (count $rows) -eq 0
        $words[1] list --codes 2>/dev/null | awk 'NR > 1 { print $1 }'
    end
end

complete -c healthd -f
"""


# --- the command

SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}


def _arguments(parser: Parser) -> None:
    parser.add_argument("shell", metavar="|".join(SHELLS), choices=SHELLS, help="whose script is printed")


def _completion(args: argparse.Namespace) -> int:
    return say(SHELLS[args.shell](lines()))


COMMANDS = {
    "completion": Command(
        _arguments,
        _completion,
        "Print what makes TAB complete commands, options, names of checks and codes in your shell.",
        "  . <(healthd completion bash)      # in this shell\n"
        "  mkdir -p /usr/local/share/bash-completion/completions    # for all, as root\n"
        "  healthd completion bash > /usr/local/share/bash-completion/completions/healthd\n"
        "  healthd completion zsh > /usr/local/share/zsh/site-functions/_healthd\n"
        "  healthd completion fish > ~/.config/fish/completions/healthd.fish\n",
    ),
}
