"""Tests of the commands printed for a condition: ready to paste, and for this condition alone, with any text in it."""

from __future__ import annotations

import shlex
import subprocess
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.reporting.next_steps import next_steps, repaired_command
from healthd.cli.control import COMMANDS
from healthd.cli.flags import Parser

SAVE = ("first, save the evidence", "healthd record")


def condition(**changes: Any) -> dict[str, Any]:
    told = {"check": "gpu_xid", "code": "gpu_xid/79", "subject": "0000:61:00.0", "severity": "critical"}
    return {**told, "clears": "reboot", "state": "open", "history": False, "observed": False, **changes}


def steps(slurm: tuple[str, ...] = (), flags: str = "", **changes: Any) -> list[tuple[str, str]]:
    c = condition(**changes)
    return list(next_steps(c, [c], slurm, flags))[1:]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [SAVE, ("once no job runs here", "systemctl reboot")]),
        ({"slurm": ("IDLE", "DRAIN")}, [SAVE, ("now that no job runs here", "systemctl reboot")]),
        ({"slurm": ("IDLE", "DRAIN", "COMPLETING")}, [SAVE, ("once no job runs here", "systemctl reboot")]),
        ({"slurm": ("ALLOCATED", "DRAIN")}, [SAVE, ("once no job runs here", "systemctl reboot")]),
        ({"remedy": "power_cycle"},
         [SAVE, ("once no job runs here (power on again at the BMC)", "systemctl poweroff")]),
        ({"remedy": "power_cycle", "severity": "warning"}, []),
        ({"remedy": "power_cycle", "clears": "operator"},
         [SAVE, ("after the repair", "healthd repaired gpu_xid/79 0000:61:00.0")]),
        ({"severity": "warning"}, []),
        ({"clears": "gpu_reset"}, [SAVE, ("once no job runs here", "nvidia-smi --gpu-reset -i 0000:61:00.0")]),
        ({"clears": "gpu_reset", "subject": ""}, [SAVE, ("once no job runs here", "nvidia-smi --gpu-reset")]),
        ({"clears": "gpu_reset", "severity": "warning"}, []),
        ({"clears": "window"}, []),
        ({"clears": "pass", "check": "mount"}, [("to verify the repair", "healthd check mount")]),
        ({"clears": "operator"}, [SAVE, ("after the repair", "healthd repaired gpu_xid/79 0000:61:00.0")]),
        ({"clears": "operator", "severity": "warning"},
         [("after the repair", "healthd repaired gpu_xid/79 0000:61:00.0")]),
        ({"clears": "operator", "state": "acknowledged"},
         [SAVE, ("after the repair", "healthd repaired gpu_xid/79 0000:61:00.0")]),
        ({"clears": "operator", "flags": "--runtime-dir 'a b'"},
         [SAVE, ("after the repair", "healthd repaired --runtime-dir 'a b' gpu_xid/79 0000:61:00.0")]),
        ({"clears": "operator", "state": "pending"}, []),
        ({"clears": "operator", "history": True}, []),
        ({"observed": True}, []),
    ],
)  # fmt: skip
def test_what_ends_a_condition_says_what_is_typed_after_its_explanation(changes, expected):
    assert steps(**changes) == expected


def test_the_explanation_comes_first():
    c = condition()
    assert next(iter(next_steps(c, [c], ()))) == ("next", "healthd explain gpu_xid/79 0000:61:00.0")


def test_of_several_with_one_code_the_one_of_the_whole_node_is_named_as_such():
    node, part = condition(subject="", clears="operator"), condition(clears="operator")
    assert repaired_command(node, [node]) == "healthd repaired gpu_xid/79"
    assert repaired_command(node, [node, part]) == "healthd repaired gpu_xid/79 ''"


@given(st.text(max_size=30), st.text(max_size=30))
def test_no_text_of_a_condition_becomes_a_command_or_another_argument(code, subject):
    c = condition(code=f"a/{code}", subject=subject, clears="operator")
    for _, command in next_steps(c, [c], ()):
        assert command.isprintable()
        assert shlex.split(command)[0] == "healthd"
    reset = condition(code=f"a/{code}", subject=subject, clears="gpu_reset")
    assert [command for _, command in next_steps(reset, [reset], ())][-1].startswith("nvidia-smi --gpu-reset")
    parser = Parser("repaired", "", "")
    COMMANDS["repaired"].flags(parser)
    typed = parser.parse_args(shlex.split(repaired_command(c))[2:])
    told = "".join(x if x.isprintable() else "?" for x in subject)
    assert (typed.part or "") == told
    assert typed.code == "a/" + "".join(x if x.isprintable() else "?" for x in code)


@pytest.mark.parametrize(
    "subject", ["/mnt/a b", "$(touch x)", "`id`", "a;b", "it's", '"', "-rf", "a\nb", "!x", "*", "#a"]
)
def test_a_shell_gets_the_part_as_one_word(subject, tmp_path):
    c = condition(subject=subject, clears="operator")
    script = "healthd() { printf '%s\\n' \"$@\"; }\n" + repaired_command(c)
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert done.stdout.splitlines()[-1] == subject.replace("\n", "?")
    assert list(tmp_path.iterdir()) == []
