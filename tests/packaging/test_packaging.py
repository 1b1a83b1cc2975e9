"""Tests of the files that are shipped with the program."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from healthd.agent.hooks.request import PROGRAM
from healthd.agent.settings.config import Settings
from healthd.host.separate_program import request_file, taken_file

pytestmark = pytest.mark.one_python

PACKAGING = Path(__file__).parents[2] / "packaging"
UNIT = PACKAGING / "systemd/healthd.service"
SETTINGS_SHA256 = "7804ffaf30453cd3a0e4c5c3e72a0acc1da8b037cf34fe0987144b556b265baa"


def unit_settings(unit: str) -> dict[str, str]:
    lines = (line.partition("=") for line in unit.splitlines() if "=" in line and not line.startswith("#"))
    return {name: value for name, _, value in lines}


def test_systemd_accepts_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze not found")
    units = [tmp_path / path.name for path in UNIT.parent.glob("healthd*") if path.suffix in (".service", ".path")]
    assert len(units) >= 3
    for unit in units:  # verify requires an existing program
        unit.write_text((UNIT.parent / unit.name).read_text().replace("/usr/bin/healthd", "/bin/true"))
    command = ["systemd-analyze", "verify", "--man=no", *map(str, units)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    complaints = [line for line in result.stderr.splitlines() if "healthd" in line]
    assert (result.returncode, complaints) == (0, []), result.stderr


def test_path_unit_watches_request_of_daemon() -> None:
    text = (PACKAGING / "systemd/healthd-hooks.path").read_text()
    path_unit, folder = unit_settings(text), Settings().runtime_dir
    watched = [line.partition("=")[2] for line in text.splitlines() if line.startswith("PathExists=")]
    assert watched == [request_file(folder, PROGRAM), taken_file(folder, PROGRAM)]
    assert path_unit["PartOf"] == "healthd.service"
    assert "healthd-hooks.path" in unit_settings(UNIT.read_text())["Wants"].split()


def test_hooks_service_survives_failed_starts_and_keeps_runtime_directory() -> None:
    service = unit_settings((PACKAGING / "systemd/healthd-hooks.service").read_text())
    # systemd 239 (EL 8) refuses a unit of type "oneshot" with Restart=, and does not have the type "exec".
    assert (service["Type"], service["Restart"], service["OOMPolicy"]) == ("simple", "on-failure", "continue")
    # Failed starts alone do not reach the limit.
    assert service["StartLimitIntervalSec"] == "10min"
    assert int(service["StartLimitBurst"]) * int(service["RestartSec"]) > 600
    assert "RuntimeDirectory" not in service, "systemd would remove the daemon's directory"


def test_unit_stop_does_not_kill_workers() -> None:
    assert unit_settings(UNIT.read_text())["KillMode"] == "process"


def test_unit_keeps_runtime_directory_on_restart() -> None:
    assert unit_settings(UNIT.read_text())["RuntimeDirectoryPreserve"] == "yes"


def test_unit_protects_daemon_from_oom_killer() -> None:
    assert int(unit_settings(UNIT.read_text())["OOMScoreAdjust"]) < 0


def test_settings_file_of_package_never_changes() -> None:
    """If it and the administrator's file both differ from the last version's, dpkg prompts, or aborts without a
    terminal."""
    shipped = (PACKAGING / "debian/healthd.toml").read_bytes()
    assert hashlib.sha256(shipped).hexdigest() == SETTINGS_SHA256
    assert all(line.startswith(b"#") for line in shipped.splitlines())


def test_package_scripts_parse_in_their_shell() -> None:
    scripts = [*PACKAGING.glob("debian/healthd.p*"), PACKAGING / "tree.sh"]
    assert len(scripts) == 4
    for script in scripts:
        shell = script.read_text().partition("\n")[0].removeprefix("#!")
        result = subprocess.run([shell, "-n", script], capture_output=True, text=True, timeout=240)
        assert (result.returncode, result.stderr) == (0, "")


def test_package_script_reads_maintainer_from_pyproject() -> None:
    """scripts/package.sh writes it into debian/control, so the placeholder is replaced in one place."""
    project = (PACKAGING.parent / "pyproject.toml").read_text()
    pattern = re.search(
        r"(?m)^  maintainer=\$\(sed -n '(.*)' pyproject", (PACKAGING.parent / "scripts/package.sh").read_text()
    )
    assert pattern is not None
    result = subprocess.run(["sed", "-n", pattern[1]], input=project, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"[^<>]+ <[^<>@ ]+@[^<>@ ]+>\n", result.stdout)


def test_installation_acts_on_the_daemon_only() -> None:
    """A restart of healthd-repair.service would end a repair step in the middle of its work."""
    rules = (PACKAGING / "debian/rules").read_text()
    commands = re.findall(r"(?m)^override_dh_installsystemd:\n((?:\t.*\n)+)", rules)
    assert [command.split() for command in commands] == [["dh_installsystemd", "healthd.service"]]
    tasks = "".join(path.read_text() for path in (PACKAGING / "ansible/roles/healthd/tasks").glob("*.yml"))
    changed = re.findall(r"systemctl (?:re)?(?:start|stop|try-restart|reload-or-restart) (\S+)", tasks)
    assert set(changed) == {"healthd"}
    for service in (PACKAGING / "systemd").glob("healthd-*.service"):
        assert "PartOf" not in unit_settings(service.read_text()), "a restart of healthd would restart it"
