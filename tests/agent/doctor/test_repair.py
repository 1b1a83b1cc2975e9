"""Tests of the doctor's lines about repair: the requirements of mode "act", and other owners of this node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from healthd.agent.doctor import repair
from healthd.agent.doctor.result import Line, State, failed_line
from healthd.agent.repair.journal import JOURNAL_FILE, Journal
from healthd.agent.repair.journal_file import machine_identity
from healthd.agent.settings.config import RepairConfig, Settings
from healthd.common.model import RepairMode, RepairStep
from healthd.common.slurm.commands import CommandResult
from healthd.common.values import encode
from healthd.host.program import ENVIRONMENT

PLAIN = """\
HealthCheckProgram      = (null)
RebootProgram           = (null)
SuspendProgram          = (null)
SuspendTime             = INFINITE
"""


DEFAULT_STEPS = (RepairStep.GPU_RESET, RepairStep.REBOOT)
BOOT = "1f6e7e6e-0000-4000-8000-000000000001"


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


# --- mode "act"


class ActingNode:
    """A node in mode "act" without systemd. `lines` returns the doctor's lines by topic."""

    def __init__(self, folder: Path) -> None:
        self.root, self.state_dir = folder / "root", folder / "state"
        self.state_dir.mkdir()
        boot_id = self.root / "proc/sys/kernel/random/boot_id"
        boot_id.parent.mkdir(parents=True)
        boot_id.write_text(f"{BOOT}\n")
        (self.root / "etc").mkdir()
        (self.root / "etc/machine-id").write_text("0c7d3ae0b6d24c6fb7c6b8f1d6a1e5a3\n")
        (self.root / "proc/locks").write_text("")
        self.systemd_dir = folder / "systemd"

    def write_journal(self, first_boot: str, node: str = "n1") -> None:
        journal = Journal(first_boot, node=node, machine=machine_identity(str(self.root)))
        (self.state_dir / JOURNAL_FILE).write_bytes(encode(journal))

    def lines(
        self, config: str = PLAIN, order: tuple[RepairStep, ...] = DEFAULT_STEPS, **settings: tuple[str, ...]
    ) -> dict[str, Line]:
        repair_config = RepairConfig(RepairMode.ACT, order, **settings)  # type: ignore[arg-type]
        loaded = Settings(node_name="n1", repair=repair_config, root=str(self.root), state_dir=str(self.state_dir))
        answer = CommandResult(0 if config else 1, config.encode())
        found = repair.lines(loaded, lambda argv: answer, str(self.systemd_dir))
        return {line.topic: line for line in found}


@pytest.fixture
def node(tmp_path: Path) -> ActingNode:
    return ActingNode(tmp_path)


def test_act_requires_a_journal_of_an_earlier_boot(node: ActingNode) -> None:
    assert node.lines()["repair journal"].state is State.LIMITED
    node.write_journal(BOOT)
    assert node.lines()["repair journal"].state is State.LIMITED
    node.write_journal("1f6e7e6e-0000-4000-8000-000000000000")
    assert node.lines()["repair journal"].state is State.OK
    (node.state_dir / JOURNAL_FILE).write_text("{")
    assert node.lines()["repair journal"].state is State.FAILED


def test_act_rejects_journal_of_another_node(node: ActingNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair.os, "geteuid", lambda: 0)
    node.write_journal("1f6e7e6e-0000-4000-8000-000000000000", node="n2")
    line = node.lines()["repair journal"]
    assert (line.state, bool(line.fix)) == (State.FAILED, True)


def test_act_rejects_journal_that_others_may_write(node: ActingNode) -> None:
    node.write_journal("1f6e7e6e-0000-4000-8000-000000000000")
    (node.state_dir / JOURNAL_FILE).chmod(0o666)
    assert node.lines()["repair journal"].state is State.FAILED


def test_act_requires_nvidia_smi_if_a_driver_is_loaded(node: ActingNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "PATH", str(node.root))
    assert node.lines()["GPU reset"].state is State.ABSENT
    (node.root / "proc/driver/nvidia").mkdir(parents=True)
    assert node.lines()["GPU reset"].state is State.FAILED
    (node.root / "nvidia-smi").touch(0o755)
    assert node.lines()["GPU reset"].state is State.OK
    assert "GPU reset" not in node.lines(order=(RepairStep.REBOOT,))


def slurm_config(program: str, version: str, returns: str) -> str:
    return f"RebootProgram = {program}\nSLURM_VERSION = {version}\nReturnToService = {returns}\n"


@pytest.mark.parametrize(
    ("config", "state"),
    [
        (slurm_config("/sbin/reboot", "24.11.5", "2"), State.OK),
        (slurm_config("/sbin/reboot", "22.05.8", "1"), State.OK),
        (slurm_config("/sbin/reboot", "22.05.8", "2"), State.FAILED),
        (slurm_config("(null)", "22.05.8", "2"), State.FAILED),
        ("", State.LIMITED),
    ],
)
def test_act_requires_a_reboot_that_keeps_the_drain(node: ActingNode, config: str, state: State) -> None:
    assert node.lines(config)["reboot"].state is state
    assert "reboot" not in node.lines(config, (RepairStep.GPU_RESET,))


def test_act_reboots_with_systemd_without_reboot_program(node: ActingNode, monkeypatch: pytest.MonkeyPatch) -> None:
    node.systemd_dir.mkdir()
    monkeypatch.setattr(repair, "unit_line", lambda topic, unit, consequence: failed_line(topic, consequence))
    found = node.lines(slurm_config("(null)", "22.05.8", "2"))
    assert (found["reboot"].state, found["repair unit"].state) == (State.OK, State.FAILED)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can read DMI")
def test_act_requires_proof_of_the_bmc_for_a_power_cycle(node: ActingNode, tmp_path: Path) -> None:
    program = tmp_path / "ipmitool"
    program.write_text(f"#!/bin/sh\n[ $1 = fru ] || touch {tmp_path}/cycled\necho Board Serial : QTFCOU2230021\n")
    program.chmod(0o755)
    commands = {"power_cycle_command": (str(program), "power", "cycle"), "bmc_command": (str(program), "fru")}
    found = node.lines(order=(RepairStep.POWER_CYCLE,), **commands)
    assert found["power cycle"].state is State.FAILED
    dmi = node.root / "sys/class/dmi/id"
    dmi.mkdir(parents=True)
    (dmi / "board_serial").write_text("QTFCOU2230021\n")
    found = node.lines(order=(RepairStep.POWER_CYCLE,), **commands)
    assert found["power cycle"].state is State.OK
    assert not (tmp_path / "cycled").exists()


def test_act_requires_that_the_state_of_the_node_can_be_read(node: ActingNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair.os, "geteuid", lambda: 0)
    assert node.lines()["requirements"].state is State.OK
    (node.root / "proc/locks").unlink()
    assert node.lines()["requirements"].state is State.FAILED
    monkeypatch.setattr(repair.os, "geteuid", lambda: 1000)
    assert node.lines()["requirements"].state is State.LIMITED


def test_command_line_of_a_process_that_hangs_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("healthd.agent.repair.node_reading.STATE_SECONDS", 0.0)
    for pid, state in (("7", "S"), ("8", "D")):
        thread = tmp_path / f"proc/{pid}/task/{pid}"
        thread.mkdir(parents=True)
        (thread / "stat").write_text(f"{pid} (gpud) {state} 1 1\n")
    (tmp_path / "proc/7/cmdline").write_text("gpud")
    os.mkfifo(tmp_path / "proc/8/cmdline")  # to open it would wait without end
    expected = ["gpud"] if os.geteuid() == 0 else []
    assert list(repair.command_lines(str(tmp_path))) == expected


def test_advice_needs_none_of_the_requirements_of_act() -> None:
    assert set(lines(PLAIN)) == {"repair", "other owners"}


# --- other owners


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
