"""What TAB offers is made of the parsers: nothing that can be typed is missing, and each script is one of its shell."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from healthd.cli.completion import CHECKS, CODES, DURATIONS, FILES, FOLDERS, MANY, OPEN, PARTS, SHELLS, Line, lines
from healthd.cli.flags import Parser
from healthd.cli.main import FAMILIES, command, main
from healthd.nvidia.fake_scenario import profiles

LINES = lines()
BY_WORDS = {line.words: line for line in LINES}


def option(words: str, name: str) -> tuple[str, ...] | None:
    (found,) = [option for option in BY_WORDS[words].options if name in option.names]
    return found.offers


def test_every_command_can_be_reached_word_by_word():
    for name in FAMILIES:
        first, _, second = name.partition(" ")
        assert first in BY_WORDS[""].next
        assert not second or second in BY_WORDS[first].next
        assert BY_WORDS[name].summary == command(name).summary


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_flag_that_the_help_shows_is_offered(name):
    parser = Parser(name, "", "")
    command(name).flags(parser)
    offered = {flag for option in BY_WORDS[name].options for flag in option.names}
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    assert offered == {flag for action in shown for flag in action.option_strings}


@pytest.mark.parametrize(
    ("words", "name", "offers"),
    [
        ("run", "--mode", ("observe", "drain", "act")),
        ("run", "--kernel-log", ("kmsg", "journal", FILES, "off")),
        ("run", "--listen", ("off",)),
        ("run", "--state-dir", (FOLDERS,)),
        ("run", "--interval", ()),
        ("check", "--json", None),
        ("check", "--fake-nvml", (*profiles(), FILES)),
        ("fleet ingest", "--users", ("keep", "drop", "hash")),
        ("fleet ingest", "--events", (FOLDERS, MANY)),
        ("ack", "--for", DURATIONS),
        ("pause", "--for", DURATIONS),
    ],
)
def test_a_value_is_what_its_help_calls_it(words, name, offers):
    assert option(words, name) == offers


@pytest.mark.parametrize(
    ("words", "offers"),
    [
        ("check", [(CHECKS,)]),
        ("record", [(FILES,), (CHECKS,)]),
        ("explain", [(CHECKS, CODES)]),
        ("repaired", [(OPEN,), (PARTS,)]),
        ("ack", [(OPEN,), (PARTS,)]),
        ("unack", [(OPEN,), (PARTS,)]),
        ("config check", [(FILES,)]),
        ("completion", [("bash", "zsh", "fish")]),
        ("status", []),
    ],
)
def test_what_stands_behind_a_command_is_offered(words, offers):
    assert [place.offers for place in BY_WORDS[words].places] == offers


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_names_every_command_and_flag(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for line in LINES:
        assert line.words in script
        for name in (name for option in line.options for name in option.names):
            assert (f"-l {name[2:]} " if shell == "fish" and name.startswith("--") else name.lstrip("-")) in script


@pytest.mark.parametrize("shell", SHELLS)
def test_a_text_with_signs_of_the_shell_stays_a_text(shell):
    strange = 'it\'s $(touch x) `y` \\ [z]: "w"'
    line = Line("", "", ("run",)), Line("run", strange)
    script = SHELLS[shell](line)
    assert shell == "bash" or "touch x" in script
    quoted = [word for word in _words(script, shell) if "touch x" in word]
    assert all("$(touch x) `y`" in word for word in quoted)


def _words(script: str, shell: str) -> list[str]:
    """The words of the lines that have the summary, as a POSIX shell reads their quotes; fish has \\' in them."""
    mine = [line for line in script.splitlines() if "touch x" in line]
    if shell == "fish":
        return [line.partition(" -d ")[2].strip().strip("'").replace("\\'", "'") for line in mine]
    return [word for line in mine for word in shlex.split(line.strip().removeprefix("next=(").rstrip(")"))]


def test_bash_accepts_its_script(tmp_path: Path):
    script = tmp_path / "script"
    script.write_text(SHELLS["bash"](LINES))
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")


STATUS = """n1: unhealthy

Conditions
  critical  gpu_xid/79 0000:61:00.0
    Xid 79: GPU has fallen off the bus
  degraded  gpu_xid/79 0000:1b:00.0
    warning x/y is text of the line above
  warning   ib_link/down mlx5_3/1
  degraded  exec/critical nhc: check_fs_free /tmp 3%
  degraded  exec/critical nhc: check_hw_eth eth1
  warning   kernel/taint

Slurm
  wants: drain
"""


@pytest.fixture
def healthd(tmp_path):
    """A program that prints what a daemon with open conditions does; with a file "silent" no daemon answers."""
    (tmp_path / "status").write_text(STATUS)
    program = tmp_path / "healthd"
    program.write_text(
        f"#!/bin/sh\nif [ $1 = status ]; then [ ! -e {tmp_path}/silent ] && cat {tmp_path}/status\n"
        "else printf 'code x\\nmount/missing x\\n'; fi\n"
    )
    program.chmod(0o755)
    return program


def bash_words(line):
    """Return COMP_WORDS of a line as bash makes them: a blank or ":" ends a word, but not if escaped or quoted."""
    words = []
    for word in re.findall(r"(?:\\.|'[^']*'?|[^ \\'])+", line):
        words += [word] if "'" in word else filter(None, re.split("(:)", word))
    return [*words, ""] if re.search(r"(?<!\\) $", line) and line.count("'") % 2 == 0 else words


def bash_offers(healthd, line):
    script = healthd.parent / "script"
    script.write_text(SHELLS["bash"](LINES))
    words = bash_words(line)
    array = " ".join(map(shlex.quote, words))
    program = (
        f". {script}; COMP_LINE={shlex.quote(line)}; COMP_POINT={len(line)}; COMP_WORDS=({array}); "
        f'COMP_CWORD={len(words) - 1}; _healthd {healthd}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=240)
    assert done.stderr == ""
    return sorted(filter(None, done.stdout.splitlines()))


OPEN_CODES = ["exec/critical", "gpu_xid/79", "ib_link/down", "kernel/taint"]


def test_bash_offers_open_conditions_and_their_parts(healthd):
    assert bash_offers(healthd, "healthd ack ") == OPEN_CODES
    assert bash_offers(healthd, "healthd unack ib") == ["ib_link/down"]
    assert bash_offers(healthd, "healthd ack gpu_xid/79 ") == ["0000:1b:00.0", "0000:61:00.0"]
    assert bash_offers(healthd, "healthd ack gpu_xid/79 0000:6") == ["61:00.0"]
    assert bash_offers(healthd, "healthd ack gpu_xid/79 0000:") == ["1b:00.0", "61:00.0"]
    assert bash_offers(healthd, "healthd ack kernel/taint ") == []
    assert bash_offers(healthd, "healthd ack gpu_xid/79 --for ") == sorted(DURATIONS)
    (healthd.parent / "silent").touch()
    assert bash_offers(healthd, "healthd ack ") == ["mount/missing"]


@pytest.mark.parametrize(
    ("typed", "offers"),
    [
        ("", ["nhc:\\ check_fs_free\\ /tmp\\ 3%", "nhc:\\ check_hw_eth\\ eth1"]),
        ("nh", ["nhc:\\ check_fs_free\\ /tmp\\ 3%", "nhc:\\ check_hw_eth\\ eth1"]),
        ("nhc:", ["\\ check_fs_free\\ /tmp\\ 3%", "\\ check_hw_eth\\ eth1"]),
        ("nhc:\\ check_h", ["\\ check_hw_eth\\ eth1"]),
        ("'nhc: check_h", ["nhc: check_hw_eth eth1"]),
    ],
)
def test_bash_quotes_a_part_that_holds_blanks(healthd, typed, offers):
    assert bash_offers(healthd, f"healthd ack exec/critical {typed}") == offers


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_offers_open_conditions_and_their_parts(healthd):
    script = healthd.parent / "script.fish"
    script.write_text(SHELLS["fish"](LINES))

    def offers(line):
        program = f"set -x PATH {healthd.parent} $PATH; source {script}; complete -C {shlex.quote(line)}"
        done = subprocess.run(["fish", "-N", "-c", program], capture_output=True, text=True, timeout=240)
        return sorted({row.partition("\t")[0] for row in done.stdout.splitlines()})

    assert offers("healthd ack ") == OPEN_CODES
    assert offers("healthd ack gpu_xid/79 ") == ["0000:1b:00.0", "0000:61:00.0"]
    assert offers("healthd ack exec/critical ") == ["nhc: check_fs_free /tmp 3%", "nhc: check_hw_eth eth1"]
    assert offers("healthd ack exec/critical nhc:\\ check_h") == ["nhc: check_hw_eth eth1"]
    assert offers("healthd ack kernel/taint ") == []
    assert offers("healthd ack gpu_xid/79 --for ") == sorted(DURATIONS)
    (healthd.parent / "silent").touch()
    assert offers("healthd ack ") == ["mount/missing"]


def test_nobody_else_loads_it():
    program = "import sys, healthd.cli.main as m\nm.main(['list'])\nprint('healthd.cli.completion' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines()[-1] == "False"
