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
    defaults = {"check": "gpu_xid", "code": "gpu_xid/79", "subject": "0000:61:00.0", "severity": "critical"}
    return {**defaults, "clears": "reboot", "state": "open", "history": False, "observed": False, **changes}


def steps(slurm: tuple[str, ...] = (), flags: str = "", **changes: Any) -> list[tuple[str, str]]:
    c = condition(**changes)
    return list(next_steps(c, [c], slurm, flags))[:-1]


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
def test_next_steps_depend_on_ending_and_state(changes, expected):
    assert steps(**changes) == expected


def test_next_steps_end_with_explain():
    c = condition()
    assert list(next_steps(c, [c], ()))[-1] == ("details", "healthd explain gpu_xid/79 0000:61:00.0")


def test_repaired_command_for_whole_node_has_empty_part():
    node, part = condition(subject="", clears="operator"), condition(clears="operator")
    assert repaired_command(node, [node]) == "healthd repaired gpu_xid/79"
    assert repaired_command(node, [node, part]) == "healthd repaired gpu_xid/79 ''"


@given(st.text(max_size=30), st.text(max_size=30))
def test_condition_text_becomes_no_command_or_argument(code, subject):
    c = condition(code=f"a/{code}", subject=subject, clears="operator")
    for _, command in next_steps(c, [c], ()):
        assert command.isprintable()
        assert shlex.split(command)[0] == "healthd"
    reset = condition(code=f"a/{code}", subject=subject, clears="gpu_reset")
    assert [command for _, command in next_steps(reset, [reset], ())][-2].startswith("nvidia-smi --gpu-reset")
    parser = Parser("repaired", "", "")
    COMMANDS["repaired"].flags(parser)
    parsed = parser.parse_args(shlex.split(repaired_command(c))[2:])
    printable_subject = "".join(character if character.isprintable() else "?" for character in subject)
    assert (parsed.part or "") == printable_subject
    assert parsed.code == "a/" + "".join(character if character.isprintable() else "?" for character in code)


@pytest.mark.parametrize(
    "subject", ["/mnt/a b", "$(touch x)", "`id`", "a;b", "it's", '"', "-rf", "a\nb", "!x", "*", "#a"]
)
def test_shell_passes_part_as_single_argument(subject, tmp_path):
    c = condition(subject=subject, clears="operator")
    script = "healthd() { printf '%s\\n' \"$@\"; }\n" + repaired_command(c)
    completed = subprocess.run(["sh", "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert completed.stdout.splitlines()[-1] == subject.replace("\n", "?")
    assert list(tmp_path.iterdir()) == []


def test_saved_evidence_replaces_the_advice_to_record() -> None:
    c = condition(clears="gpu_reset")
    assert SAVE in next_steps(c, [c], ())
    with_evidence = list(next_steps(c, [c], (), evidence="20261129T060000Z-gpu_xid-79"))
    assert with_evidence[0] == ("evidence", "healthd evidence show 20261129T060000Z-gpu_xid-79")
    assert SAVE not in with_evidence
