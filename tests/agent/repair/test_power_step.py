"""The step "power cycle": no command without a proof, and the meaning of each result."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from healthd.agent.repair.journal import Outcome, Request
from healthd.agent.repair.power_step import prepare_power_cycle, read_board_serial
from healthd.agent.repair.step_result import StepResult, run_command, take_prepared
from healthd.agent.settings.config import RepairConfig
from healthd.common.model import RepairStep
from healthd.host.program import ENVIRONMENT

SERIAL = "QTFCOU2230021"


class Machine:
    """A machine whose board is `SERIAL`. Its BMC is a script: "fru" prints a serial number, "power" runs `cycle`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / "ipmitool"
        self.cycled = folder / "cycled"
        dmi = folder / "sys/class/dmi/id"
        dmi.mkdir(parents=True)
        (dmi / "board_serial").write_text(f"{SERIAL}\n")
        self.set_bmc()

    def set_bmc(self, serial: str = SERIAL, fru: str = "", cycle: str = "") -> None:
        script = f"#!/bin/sh\nif [ $1 = fru ]; then echo 'Board Serial : {serial}'; {fru or ':'}; exit; fi\n"
        self.program.write_text(f"{script}echo cycle >>{self.cycled}\n{cycle}\n")
        self.program.chmod(0o755)

    def take(self, settings: dict[str, tuple[str, ...]] | None = None, seconds: float = 30.0) -> StepResult:
        commands = {
            "power_cycle_command": (str(self.program), "power", "cycle"),
            "bmc_command": (str(self.program), "fru"),
        }
        request = Request(
            "20261129T120000Z-power_cycle",
            str(self.folder),
            "n1",
            "boot",
            RepairStep.POWER_CYCLE,
            command_timeout_seconds=seconds,
            root=str(self.folder),
            settings=RepairConfig(**{**commands, **(settings or {})}),  # type: ignore[arg-type]
        )
        before = self.cycles
        step = prepare_power_cycle(request)
        assert self.cycles == before
        return step if isinstance(step, StepResult) else take_prepared(step, seconds, lambda: "", run_command)

    @property
    def cycles(self) -> int:
        return len(self.cycled.read_text().splitlines()) if self.cycled.exists() else 0


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_power_cycle_with_proof_is_under_way(machine: Machine) -> None:
    result = machine.take()
    assert (result.outcome, result.problem, SERIAL in result.proof) == (None, "", True)
    assert machine.cycles == 1


def test_other_board_is_impossible(machine: Machine) -> None:
    machine.set_bmc(serial="QTFCOU2230022")
    result = machine.take()
    assert (result.outcome, bool(result.problem), machine.cycles) == (Outcome.IMPOSSIBLE, True, 0)


@pytest.mark.parametrize(
    "settings",
    [
        {"power_cycle_command": ()},
        {"bmc_command": ()},
        {"power_cycle_command": ("/nonexistent/bmc", "cycle")},
        {"bmc_command": ("/nonexistent/bmc", "fru")},
        {"bmc_command": ("/bin/false",)},
        {"bmc_command": ("/bin/true",)},
    ],
)
def test_without_proof_nothing_is_run(machine: Machine, settings: dict[str, tuple[str, ...]]) -> None:
    result = machine.take(settings)
    assert (result.outcome, bool(result.problem), machine.cycles) == (Outcome.IMPOSSIBLE, True, 0)


def test_bmc_that_does_not_answer_is_impossible(machine: Machine) -> None:
    machine.set_bmc(fru="sleep 1000")
    result = machine.take(seconds=0.5)
    assert (result.outcome, machine.cycles) == (Outcome.IMPOSSIBLE, 0)


def test_program_that_others_may_write_is_impossible(machine: Machine) -> None:
    machine.program.chmod(0o777)
    result = machine.take()
    assert (result.outcome, machine.cycles) == (Outcome.IMPOSSIBLE, 0)


def test_command_that_fails_is_a_failed_step(machine: Machine) -> None:
    machine.set_bmc(cycle="echo 'Unable to establish session' >&2; exit 1")
    result = machine.take()
    assert (result.outcome, machine.cycles) == (Outcome.FAILED, 1)
    assert "Unable to establish session" in result.problem


def test_command_that_does_not_end_may_still_act(machine: Machine) -> None:
    machine.set_bmc(cycle="sleep 1000")
    result = machine.take(seconds=2.0)
    assert (result.outcome, bool(result.problem), machine.cycles) == (None, True, 1)


def test_board_serial_of_a_machine_without_dmi_is_empty(tmp_path: Path) -> None:
    assert read_board_serial(str(tmp_path)) == ""


def test_programs_that_are_verified_are_those_that_run(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor's PATH is that of the daemon. A program is looked for in healthd's own directories only."""
    other = machine.folder / "other"
    other.mkdir()
    (other / "ipmitool").write_text("#!/bin/sh\necho 'IP Address : 10.0.0.7'\n")
    (other / "ipmitool").chmod(0o755)
    trusted = machine.folder / "trusted"
    trusted.mkdir()
    (trusted / "ipmitool").write_text("#!/bin/sh\necho 'IP Address : 10.0.0.8'\n")
    (trusted / "ipmitool").chmod(0o755)
    monkeypatch.setenv("PATH", f"{other}:{os.environ['PATH']}")
    monkeypatch.setitem(ENVIRONMENT, "PATH", str(trusted))
    site = machine.folder / "site"
    site.write_text(machine.program.read_text())
    site.chmod(0o755)
    assert machine.take({"power_cycle_command": (str(site), "10.0.0.7")}).outcome is Outcome.IMPOSSIBLE
    assert machine.cycles == 0
    assert machine.take({"power_cycle_command": (str(site), "10.0.0.8")}).outcome is None
    assert machine.cycles == 1
    (trusted / "ipmitool").chmod(0o777)
    assert machine.take({"power_cycle_command": (str(site), "10.0.0.8")}).outcome is Outcome.IMPOSSIBLE
    assert machine.cycles == 1
