"""Tests of the doctor's lines about repair: other programs that may drain or reboot this node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from healthd.agent.doctor import repair
from healthd.agent.doctor.result import Line, State
from healthd.agent.settings.config import RepairConfig, Settings
from healthd.common.model import RepairMode
from healthd.common.slurm.commands import CommandResult

PLAIN = """\
HealthCheckProgram      = (null)
RebootProgram           = (null)
SuspendProgram          = (null)
SuspendTime             = INFINITE
"""


def with_setting(name: str, value: str, config: str = PLAIN) -> str:
    return "".join(
        f"{name:24}= {value}\n" if line.startswith(name) else line for line in config.splitlines(keepends=True)
    )


def lines(config: str, mode: RepairMode = RepairMode.ADVISE) -> dict[str, Line]:
    settings = replace(Settings(node_name="n1"), repair=RepairConfig(mode))
    answer = CommandResult(0 if config else 1, config.encode(), "", 0.0, 0.0)
    return {line.topic: line for line in repair.lines(settings, lambda argv: answer)}


def test_node_without_other_owners_is_fine() -> None:
    found = lines(PLAIN)
    assert (found["repair"].state, found["other owners"].state) == (State.OK, State.OK)


def test_repair_that_is_off_is_absent() -> None:
    assert lines(PLAIN, RepairMode.OFF)["repair"].state is State.ABSENT


def test_slurm_without_answer_is_reported_elsewhere() -> None:
    assert {line.state for line in lines("").values()} == {State.OK}


@pytest.mark.parametrize(
    ("name", "value", "count"),
    [
        ("HealthCheckProgram", "/usr/sbin/nhc", 1),
        ("HealthCheckProgram", "/usr/share/healthd/slurm/healthcheck", 0),
        ("RebootProgram", "/sbin/reboot", 0),
    ],
)
def test_programs_in_slurm_conf_are_owners(name: str, value: str, count: int) -> None:
    assert len(list(repair.slurm_owners(with_setting(name, value)))) == count


@pytest.mark.parametrize(("seconds", "count"), [("600 sec", 1), ("INFINITE", 0), ("NONE", 0), ("-1 sec", 0)])
def test_power_saving_needs_program_and_time(seconds: str, count: int) -> None:
    config = with_setting("SuspendTime", seconds, with_setting("SuspendProgram", "/opt/off"))
    assert len(list(repair.slurm_owners(config))) == count
    assert list(repair.slurm_owners(with_setting("SuspendTime", seconds))) == []


@pytest.mark.parametrize(
    ("command", "count"),
    [
        ("/cm/local/apps/cmd/sbin/cmd\0-s\0", 1),
        ("/usr/local/bin/gpu-health-monitor\0", 1),
        ("gpud\0run", 1),
        ("/home/ann/cmd\0", 0),
        ("vi\0gpud", 0),
        ("", 0),
    ],
)
def test_running_programs_are_owners(command: str, count: int) -> None:
    assert len(list(repair.program_owners([command]))) == count


@given(st.text(), st.lists(st.text(), max_size=5))
def test_owners_of_any_text_raise_nothing(config: str, commands: list[str]) -> None:
    list(repair.slurm_owners(config))
    list(repair.program_owners(commands))


def test_command_lines_of_this_machine_include_this_process() -> None:
    assert any("pytest" in command for command in repair.command_lines("/"))
