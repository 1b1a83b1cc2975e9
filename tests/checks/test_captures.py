"""Captures of real, healthy machines give no finding above INFO, so no check knows hardware only from its manual."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import BOOT, NOW
from smi_capture import CAPTURES, host
from trees import DATA, PCI, FakeSystem, add_pci_device, captured_files, captured_text, write

from healthd.agent.settings.registry import built_in_checks
from healthd.common.codec import load
from healthd.common.history import History, Series, update
from healthd.common.model import Finding, Observation, Severity
from healthd.common.mountinfo import is_local, parse_all
from healthd.host.host import Host
from healthd.host.system import FileSystem
from healthd.nvidia import fake_scenario
from healthd.nvidia.fake_nvml import open_fake

pytestmark = pytest.mark.one_python

GPU_CHECKS = sorted(name for name, check in built_in_checks().items() if check.uses == "nvml" and check.has_run)

# Findings that are true for these machines and deserve a warning.
TRUE_FINDINGS = {
    "gpu_persistence/off": "persistence mode is off on half of the machines, which run no jobs",
}


@pytest.mark.parametrize("check", GPU_CHECKS)
@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.stem)
def test_nvml_capture_of_healthy_machine_gives_nothing_above_info(capture: Path, check: str) -> None:
    module = built_in_checks()[check].module
    results = list(module.run(host(capture), module.Config(), History({}, NOW, BOOT)))
    unexpected = [item for item in results if isinstance(item, Finding) and item.severity > Severity.INFO]
    assert [finding for finding in unexpected if finding.code not in TRUE_FINDINGS] == []


@pytest.mark.parametrize("check", GPU_CHECKS)
@pytest.mark.parametrize("machine", fake_scenario.profiles())
def test_fake_machine_gives_nothing_above_info(machine: str, check: str) -> None:
    module, node = built_in_checks()[check].module, Host("/nonexistent", lambda: open_fake(machine))
    results = list(module.run(node, module.Config(), History({}, NOW, BOOT)))
    assert [item for item in results if isinstance(item, Finding) and item.severity > Severity.INFO] == []


# --- files of /sys and /proc


class HalfFull(FakeSystem):
    """A system without the disks and file servers of a capture: each file system is half full."""

    def statvfs(self, path: str) -> FileSystem:
        return FileSystem(1000, 500, 1000, 500)


def above_info(root: Path, check: str, settings: dict[str, object] | None = None) -> list[Finding]:
    """Return what a check finds above INFO on the files below `root` in three runs."""
    module = built_in_checks()[check].module
    config = load(built_in_checks()[check].config, settings or {}, check)
    store: dict[str, Series] = {}
    found = []
    for clock in (NOW, NOW + 60, NOW + 3600):
        node = Host(str(root), system=HalfFull(str(root)))
        results = list(module.run(node, config, History(store, clock, BOOT)))
        store = update(store, [item for item in results if isinstance(item, Observation)], clock, BOOT)
        found += [item for item in results if isinstance(item, Finding) and item.severity > Severity.INFO]
    return found


@pytest.mark.parametrize("check", ["ib_link", "ib_flap", "ib_errors"])
@pytest.mark.parametrize("capture", sorted(path.name for path in DATA.glob("infiniband_*.tsv")))
def test_ports_of_real_machines_give_nothing_above_info(tmp_path: Path, capture: str, check: str) -> None:
    files = {path: f"{text}\n" for path, text in captured_files(capture).items()}
    if capture == "infiniband_procfs.tsv":  # no kernel has this file: a mistake in the capture
        assert files.pop("/sys/class/infiniband/mlx5_0/ports/1/state") == "4: ACTIVE\n"
        assert files.pop("/sys/class/infiniband/mlx5_0/ports/1/phys_state") == "4: ACTIVE\n"
    active = [path.split("/") for path, text in files.items() if path.endswith("/state") and text == "4: ACTIVE\n"]
    ports = [f"{device}/{number}" for *_, device, _, number, _ in active]
    assert ports
    write(tmp_path, {**files, "/proc/uptime": "864000.00 1.00\n"})
    rated = any(path.endswith("/rate") for path in files)
    expected = {"expected_gbps": dict.fromkeys(ports, 0.0)} if rated else {}
    assert above_info(tmp_path, check, expected if check == "ib_link" else {"ports": ports}) == []


@pytest.mark.parametrize("kind", ["correctable", "nonfatal", "fatal"])
def test_pcie_errors_of_real_machines_give_nothing_above_info(tmp_path: Path, kind: str) -> None:
    add_pci_device(tmp_path, "0000:1b:00.0", "0x030200", "0000:00:01.1")
    write(tmp_path, {f"{PCI}/0000:1b:00.0/aer_dev_{kind}": captured_text(f"aer_dev_{kind}_procfs.txt")})
    if kind == "correctable":
        write(tmp_path, {f"{PCI}/0000:00:01.1/aer_dev_{kind}": captured_text(f"aer_dev_{kind}_4.19.txt")})
    assert above_info(tmp_path, "pcie_aer") == []


def edac(capture: str) -> dict[str, str]:
    """Parse the output of `grep . FILES`, or lines of a path followed by a line with its text."""
    lines = captured_text(capture).split()
    pairs = [line.rsplit(":", 1) for line in lines] if ":" in lines[0] else zip(lines[::2], lines[1::2], strict=True)
    return {path: f"{text}\n" for path, text in pairs}


@pytest.mark.parametrize("capture", sorted(path.name for path in DATA.glob("edac_*.txt")))
def test_edac_counts_of_real_machines_give_nothing_above_info(tmp_path: Path, capture: str) -> None:
    files = edac(capture)
    controllers = {path.partition("/mc/")[2].partition("/")[0] for path in files}
    always = [
        f"/sys/devices/system/edac/mc/{mc}/{name}" for mc in controllers for name in ("ue_count", "ce_noinfo_count")
    ]
    write(tmp_path, {**dict.fromkeys(always, "0\n"), **files})
    assert above_info(tmp_path, "memory_edac") == []


@pytest.mark.parametrize("capture", sorted(path.name for path in DATA.glob("mountinfo_*.txt")))
def test_mounts_of_real_machines_give_nothing_above_info(tmp_path: Path, capture: str) -> None:
    lines = captured_text(capture).splitlines()
    text = "\n".join(line for line in lines if not line.startswith("1 1 0:5 /  /root"))  # a space that no kernel writes
    mounts, garbled = parse_all(text)
    assert (bool(mounts), garbled) == (True, "")
    write(tmp_path, {"/proc/self/mountinfo": text})
    for check in ("disk_space", "block_device"):
        assert above_info(tmp_path, check, {"paths": [m.point for m in mounts]} if check == "disk_space" else {}) == []
    for mount in {mount.point: mount for mount in mounts if not is_local(mounts, mount.point)}.values():
        settings = {"name": mount.point, "fstype": mount.fstype, "read_only": "ro" in mount.options}
        assert above_info(tmp_path, "mount", settings) == []
