"""Life cycle of the package on Debian 12 and 13 under a real systemd.

Covers installation, reload, hang, kill, upgrade, rollback, removal, purge and the takeover of a manual installation.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packages import OLD_VERSION, PYTHONS, RELEASES, built_package, older_package, package_node, set_old_version
from systemd_container import CHECKOUT, SystemdContainer

SETTINGS = """\
# the site's own
baseline_file = ""
[kernel_log]
source = "/srv/kernel.log"
[metrics]
listen = "off"
"""
XID = "NVRM: Xid (PCI:fffe:1f:1f): 79, pid=1, name=job, GPU has fallen off the bus."
QUIET = "DEBIAN_FRONTEND=noninteractive"
# Files that other programs keep about installed packages, and that systemd keeps about itself.
EXCLUDED_PATHS = (
    "/proc",
    "/sys",
    "/dev",
    "/run",
    "/tmp",
    "/var/tmp",
    "/var/log",
    "/var/cache",
    "/var/lib/apt",
    "/var/lib/dpkg",
)
SECONDS = 180.0


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def packages(release: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with new.deb and older.deb."""
    folder = tmp_path_factory.mktemp(release)
    new = folder / "new.deb"
    new.write_bytes(built_package(release).read_bytes())
    older_package(new, release, folder)
    return folder


@pytest.fixture
def box(release: str, packages: Path) -> Iterator[SystemdContainer]:
    with package_node(release, packages) as running:
        running.write("/srv/kernel.log", "")
        yield running


@pytest.mark.parametrize("script", ["preinst", "postinst", "prerm", "postrm"])
def test_scripts_of_the_package_start_and_stop_the_daemon_only(packages: Path, script: str) -> None:
    """A restart of healthd-repair.service would end a repair step in the middle of its work."""
    command = ["dpkg-deb", "--info", str(packages / "new.deb"), script]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout
    invoked = re.findall(r"deb-systemd-invoke (.*)", text)
    units = {unit for line in invoked for unit in re.findall(r"healthd[a-z-]*\.(?:service|path)", line)}
    assert units == ({"healthd.service"} if invoked else set())
    assert bool(invoked) is (script in ("postinst", "prerm"))


def apt(box: SystemdContainer, *words: str) -> str:
    """Run apt-get as a script does, without questions. Return its output and that of the package's scripts."""
    completed = box.exec("env", QUIET, "apt-get", "-q", "-y", "--no-install-recommends", *words)
    return completed.stdout + completed.stderr


def wait_for_status(
    box: SystemdContainer, is_reached: Callable[[dict[str, Any]], bool], expectation: str
) -> dict[str, Any]:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        completed = box.exec("healthd", "status", "--json", check=False)
        if completed.stdout.startswith("{") and is_reached(status := json.loads(completed.stdout)):
            return status
        time.sleep(0.2)
    raise TimeoutError(
        f"not within {SECONDS} s: {expectation}\n{completed.stdout}{completed.stderr}\n{box.log('healthd')[-3000:]}"
    )


def xid_condition(status: dict[str, Any]) -> tuple[str, float] | None:
    """Return (state, first seen) of the condition that XID opens."""
    for condition in status["conditions"]:
        if condition["code"] == "gpu_xid/79":
            return condition["state"], condition["first_seen"]
    return None


def inject_fault(box: SystemdContainer) -> tuple[str, float]:
    with open(box.path("/srv/kernel.log"), "a") as log:
        log.write(f"{XID}\n")
    known = xid_condition(
        wait_for_status(box, lambda found: xid_condition(found) is not None, "the Xid opens a condition")
    )
    assert known is not None
    return known


def main_pid(box: SystemdContainer) -> str:
    return box.show("healthd", "MainPID")


def wait_until_restarted(box: SystemdContainer, old_pid: str) -> None:
    """Wait until systemd has restarted the daemon and it is ready."""
    deadline = time.monotonic() + SECONDS
    while main_pid(box) in ("0", old_pid) or box.show("healthd", "ActiveState") != "active":
        assert time.monotonic() < deadline, box.log("healthd")[-3000:]
        time.sleep(0.2)
    assert int(box.show("healthd", "NRestarts")) >= 1


def healthd_files(box: SystemdContainer) -> set[str]:
    prune = " -o ".join(f"-path {path}" for path in EXCLUDED_PATHS)
    found = box.exec("bash", "-c", f"find / \\( {prune} \\) -prune -o -print").stdout.splitlines()
    return {path for path in found if "healthd" in path}


def test_install_makes_node_monitored_without_compiler_or_pip(
    box: SystemdContainer, packages: Path, release: str
) -> None:
    assert "default" not in box.exec("cat", "/proc/net/route").stdout
    apt(box, "install", f"{packages}/new.deb")
    assert box.systemctl("is-active", "healthd") == "active"
    assert box.systemctl("is-enabled", "healthd") == "enabled"
    assert "slurmd.service" in box.show("healthd", "Before").split()
    status = box.exec("healthd", "status", check=False)
    assert "mode observe" in status.stdout, status.stdout + status.stderr

    interpreter = box.exec("readlink", "-f", "/opt/healthd/bin/python").stdout.strip()
    assert interpreter == f"/usr/bin/{PYTHONS[release]}"
    assert "No module named pip" in box.exec("/opt/healthd/bin/python", "-m", "pip", check=False).stderr
    for command in (("list",), ("explain", "gpu_xid/79"), ("fleet", "--help")):
        box.exec("healthd", *command)
    # dpkg owns all files, and no file has changed.
    assert box.exec("dpkg", "--verify", "healthd").stdout == ""
    owned = set(box.exec("dpkg", "-L", "healthd").stdout.splitlines())
    assert set(box.exec("find", "/opt/healthd").stdout.splitlines()) <= owned
    for name in ("bash-completion/completions/healthd", "zsh/vendor-completions/_healthd"):
        assert f"/usr/share/{name}" in owned
    for name in ("tmpfiles.d/healthd.conf", "systemd/system-preset/80-healthd.preset"):
        assert f"/usr/lib/{name}" in owned
    depends = box.exec("dpkg-query", "-W", "-f", "${Depends}", "healthd").stdout
    assert [name for name in re.split(r"[, |]+", depends) if name.startswith("python")] == [PYTHONS[release]]
    for name in ("man/man8/healthd.8.gz", "man/man5/healthd.toml.5.gz", "healthd/healthd.toml", "healthd/slurm/prolog"):
        assert f"/usr/share/{name}" in owned
    box.exec("test", "-x", "/opt/healthd/share/healthd/slurm/prolog")


def test_existing_settings_are_kept_and_reloaded_or_rejected(box: SystemdContainer, packages: Path) -> None:
    """Some deployment tools write the files before they install packages."""
    box.write("/etc/healthd/healthd.toml", SETTINGS)
    apt(box, "install", f"{packages}/new.deb")
    assert box.path("/etc/healthd/healthd.toml").read_text() == SETTINGS
    daemon_pid = main_pid(box)

    changed = SETTINGS.replace("# the site's own", 'mode = "drain"')
    box.write("/etc/healthd/healthd.toml", changed)
    box.systemctl("reload", "healthd")
    wait_for_status(box, lambda found: found["mode"] == "drain", "the new settings are in force")
    box.write("/etc/healthd/healthd.toml", changed.replace("drain", "demolish"))
    box.systemctl("reload", "healthd", check=False)
    deadline = time.monotonic() + SECONDS
    while "demolish" not in box.log("healthd"):
        assert time.monotonic() < deadline, box.log("healthd")
        time.sleep(0.2)
    assert box.status()["mode"] == "drain"
    assert main_pid(box) == daemon_pid

    # Rejected settings are reported where the administrator looks.
    output = apt(box, "install", "--reinstall", f"{packages}/new.deb")
    assert "its settings are refused" in output
    assert "demolish" in output
    assert "systemctl restart healthd" in output
    assert "deb-systemd-invoke" not in output
    assert (box.status()["mode"], main_pid(box)) == (
        "drain",
        daemon_pid,
    )  # the daemon with the valid settings keeps running


def test_killed_or_hung_daemon_restarts_with_its_conditions(box: SystemdContainer, packages: Path) -> None:
    box.write("/etc/healthd/healthd.toml", SETTINGS)
    apt(box, "install", f"{packages}/new.deb")
    known_condition = inject_fault(box)
    first_pid = main_pid(box)
    box.exec("kill", "-KILL", first_pid)
    wait_until_restarted(box, first_pid)
    assert xid_condition(box.status()) == known_condition

    box.write("/etc/systemd/system/healthd.service.d/site.conf", "[Service]\nWatchdogSec=20\n")
    box.systemctl("daemon-reload")
    box.systemctl("restart", "healthd")
    hung_pid = main_pid(box)
    box.exec("kill", "-STOP", hung_pid)
    wait_until_restarted(box, hung_pid)
    assert "Watchdog timeout" in box.log("healthd")
    assert xid_condition(box.status()) == known_condition


def test_upgrade_and_rollback_need_no_answer_and_keep_state(box: SystemdContainer, packages: Path) -> None:
    apt(box, "install", f"{packages}/older.deb")
    box.write("/etc/healthd/healthd.toml", SETTINGS)
    box.systemctl("restart", "healthd")
    assert box.status()["version"] == OLD_VERSION
    known_condition = inject_fault(box)
    for package, options in (("new.deb", ()), ("older.deb", ("--allow-downgrades",))):
        old_pid = main_pid(box)
        apt(box, "install", *options, f"{packages}/{package}")
        assert (box.status()["version"] == OLD_VERSION) == (package == "older.deb")
        assert main_pid(box) != old_pid
        assert xid_condition(box.status()) == known_condition
        assert box.path("/etc/healthd/healthd.toml").read_text() == SETTINGS
        assert box.systemctl("is-enabled", "healthd") == "enabled"
    box.systemctl("disable", "--now", "healthd")
    apt(box, "install", f"{packages}/new.deb")
    assert box.systemctl("is-enabled", "healthd", check=False) == "disabled"
    assert box.systemctl("is-active", "healthd", check=False) == "inactive"


def test_remove_keeps_state_and_purge_deletes_everything(box: SystemdContainer, packages: Path) -> None:
    files_before = healthd_files(box)
    apt(box, "install", f"{packages}/new.deb")
    box.write("/etc/healthd/healthd.toml", SETTINGS)
    box.write("/etc/healthd/notes", "the site's own")
    box.systemctl("restart", "healthd")
    known_condition = inject_fault(box)
    apt(box, "remove", "healthd")
    assert not box.path("/opt/healthd").exists()
    assert box.show("healthd", "LoadState") == "not-found"
    assert box.exec("pgrep", "-f", "healthd run", check=False).stdout == ""
    apt(box, "install", f"{packages}/new.deb")
    assert box.path("/etc/healthd/healthd.toml").read_text() == SETTINGS
    assert xid_condition(box.status()) == known_condition
    apt(box, "purge", "healthd")
    assert healthd_files(box) - files_before == set()
    assert box.path("/opt").is_dir()
    assert not box.path("/run/healthd").exists()
    apt(box, "install", f"{packages}/new.deb")
    assert xid_condition(box.status()) is None

    # Settings that are a symbolic link stay one, and the target belongs to the site.
    box.write("/srv/site.toml", SETTINGS)
    box.exec("ln", "-sf", "/srv/site.toml", "/etc/healthd/healthd.toml")
    for files_before in (["install", "--reinstall", f"{packages}/new.deb"], ["remove", "healthd"]):
        apt(box, *files_before)
        apt(box, "install", f"{packages}/new.deb")
        assert box.exec("readlink", "/etc/healthd/healthd.toml").stdout.strip() == "/srv/site.toml"
        assert box.exec("ls", "/etc/healthd").stdout.split() == ["healthd.toml"]
    apt(box, "purge", "healthd")
    assert not box.path("/etc/healthd").exists()
    assert box.path("/srv/site.toml").read_text() == SETTINGS


def test_manual_installation_is_taken_over(box: SystemdContainer, packages: Path, release: str) -> None:
    """An older version, installed as docs/deploy.md describes, with a unit that would override that of the package."""
    manual_tree = packages / "by-hand"
    box.exec("dpkg-deb", "--extract", f"{packages}/new.deb", str(manual_tree))
    set_old_version(manual_tree, release)
    box.exec("cp", "-a", f"{manual_tree}/opt/healthd", "/opt/healthd")
    box.exec("rm", "-r", str(manual_tree))
    box.exec("ln", "-s", "/opt/healthd/bin/healthd", "/usr/bin/healthd")
    box.write("/etc/healthd/healthd.toml", SETTINGS)
    unit = (CHECKOUT / "packaging/systemd/healthd.service").read_text()
    box.install_unit("healthd.service", unit.replace("[Service]", "[Service]\nEnvironment=BY=hand"))
    box.write("/opt/healthd/lib/leftover", "")
    box.systemctl("enable", "--now", "healthd")
    assert box.status()["version"] == OLD_VERSION
    known_condition, old_pid = inject_fault(box), main_pid(box)

    output = apt(box, "install", f"{packages}/new.deb")
    assert "/etc/systemd/system/healthd.service was not this package's" in output
    assert "/opt/healthd was not this package's" in output
    assert box.status()["version"] != OLD_VERSION
    assert main_pid(box) != old_pid
    assert xid_condition(box.status()) == known_condition
    assert box.show("healthd", "Environment") == ""
    assert box.show("healthd", "FragmentPath").endswith("/lib/systemd/system/healthd.service")
    assert box.systemctl("is-enabled", "healthd") == "enabled"
    assert box.path("/etc/healthd/healthd.toml").read_text() == SETTINGS
    assert not box.path("/opt/healthd/lib/leftover").exists()
    # The manual installation can be restored, and taken over again.
    apt(box, "remove", "healthd")
    box.exec("bash", "-c", "cd /opt && mv healthd.by-hand-* healthd && healthd/bin/healthd --version")
    box.exec("bash", "-c", "cd /etc/systemd/system && mv healthd.service.by-hand-* healthd.service")
    apt(box, "install", f"{packages}/new.deb")
    assert box.show("healthd", "FragmentPath").endswith("/lib/systemd/system/healthd.service")
    assert box.status()["version"] != OLD_VERSION


def test_linked_unit_is_taken_over_and_restored_when_package_fails(box: SystemdContainer, packages: Path) -> None:
    tree = packages / "linked"
    box.exec("dpkg-deb", "--extract", f"{packages}/new.deb", str(tree))
    box.exec("mkdir", "-p", "/opt")
    box.exec("cp", "-a", f"{tree}/opt/healthd", "/opt/healthd")
    box.exec("rm", "-r", str(tree))
    box.exec("rm", "/opt/healthd/share/healthd")
    unit = (CHECKOUT / "packaging/systemd/healthd.service").read_text()
    box.write("/opt/healthd/share/healthd/healthd.service", unit)
    box.write("/opt/healthd/BY-HAND", "")
    box.exec("ln", "-s", "/opt/healthd/bin/healthd", "/usr/bin/healthd")
    box.write("/etc/healthd/healthd.toml", SETTINGS)
    box.systemctl("enable", "--now", "/opt/healthd/share/healthd/healthd.service")
    linked_unit = "/etc/systemd/system/healthd.service"
    assert box.path(linked_unit).is_symlink()

    def is_manual_installation() -> bool:
        return (
            box.path("/opt/healthd/BY-HAND").exists()
            and box.path(linked_unit).is_symlink()
            and box.path("/etc/healthd/healthd.toml").read_text() == SETTINGS
            and box.exec("healthd", "--version", check=False).returncode == 0
            and box.systemctl("is-enabled", "healthd", check=False) in ("enabled", "linked")
        )

    package_bytes = (packages / "new.deb").read_bytes()
    (packages / "broken.deb").write_bytes(package_bytes[: len(package_bytes) * 3 // 4])
    assert box.exec("dpkg", "-i", f"{packages}/broken.deb", check=False).returncode != 0
    assert is_manual_installation()
    daemon_pid = main_pid(box)
    box.exec("dpkg", "--unpack", f"{packages}/new.deb")
    assert not box.path("/opt/healthd/BY-HAND").exists()
    box.exec("dpkg", "--remove", "healthd")
    assert is_manual_installation()
    assert main_pid(box) == daemon_pid

    apt(box, "install", f"{packages}/new.deb")
    assert not box.path(linked_unit).is_symlink()
    assert box.systemctl("is-enabled", "healthd") == "enabled"
    assert box.show("healthd", "FragmentPath").endswith("/lib/systemd/system/healthd.service")
    assert main_pid(box) not in ("0", daemon_pid)
