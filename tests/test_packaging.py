"""What is shipped beside the program is valid."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[1] / "packaging/systemd/healthd.service"


def settings(unit: str) -> dict[str, str]:
    lines = (line.partition("=") for line in unit.splitlines() if "=" in line and not line.startswith("#"))
    return {name: value for name, _, value in lines}


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze not found")
    unit = tmp_path / "healthd.service"
    unit.write_text(UNIT.read_text().replace("/usr/bin/healthd", "/bin/true"))  # verify looks for the program
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    complaints = [line for line in done.stderr.splitlines() if "healthd" in line]
    assert (done.returncode, complaints) == (0, []), done.stderr


def test_a_stop_never_reaches_the_workers() -> None:
    assert settings(UNIT.read_text())["KillMode"] == "process"


def test_the_live_ledger_outlives_a_restart() -> None:
    assert settings(UNIT.read_text())["RuntimeDirectoryPreserve"] == "yes"
