"""Tests of `healthd baseline`: it records the hardware of a node as settings and omits parts that look broken."""

from __future__ import annotations

import json
import re
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_gpus import fake_pci_gpus
from fakes import findings
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace
from story import Story
from trees import FakeSystem, add_gpus, add_pci_device, captured_text, write

from healthd.agent.settings.config import Layer, Loaded
from healthd.agent.settings.effective import resolve_settings
from healthd.agent.settings.registry import baseline_checks, built_in_checks
from healthd.agent.worker.process import baseline_items
from healthd.checks import services
from healthd.checks.mount import baseline_mounts
from healthd.cli import baseline_settings
from healthd.cli.baseline_settings import Present, as_toml, find_changes, manual_settings
from healthd.cli.main import main
from healthd.common.codec import dump, fields_of, load
from healthd.common.model import Entry, LeftOut, Severity
from healthd.common.mountinfo import parse_all
from healthd.host.host import Host
from healthd.host.program import ProgramResult
from healthd.host.system import FileStat
from healthd.nvidia import fake_scenario
from healthd.nvidia.fake_nvml import open_fake

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KNOWN = built_in_checks()
BASELINE_CHECKS = baseline_checks(KNOWN)
ADDRESSES = [
    *("0000:1b:00.0", "0000:43:00.0", "0000:52:00.0", "0000:61:00.0"),
    *("0000:9d:00.0", "0000:c3:00.0", "0000:d1:00.0", "0000:df:00.0"),
]
MOUNTS = """\
21 0 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
22 21 0:5 / /proc rw,nosuid - proc proc rw
23 21 0:25 / /run/user/1000 rw,nosuid - tmpfs tmpfs rw,size=1k
24 21 0:60 / /data rw,relatime shared:9 - nfs4 server:/data rw,vers=4.2,hard
25 21 0:61 / /software ro,relatime shared:9 - nfs server:/software ro,vers=3,hard
26 21 9:0 / /raid rw,relatime - xfs /dev/md0 rw
"""


class Node(FakeSystem):
    """A tree whose files below /dev are device files of mode 0666."""

    def stat(self, path: str) -> FileStat:
        found = super().stat(path)
        return found._replace(mode=stat.S_IFCHR | 0o666) if path.startswith("/dev/") else found


def systemctl(**states: str) -> dict[tuple[str, ...], ProgramResult | OSError]:
    """Return the answers of systemctl for the orders in which the usual units are queried."""
    from healthd.checks.services import OPTIONAL_PROPERTIES, PROPERTIES

    def show_output(units: tuple[str, ...]) -> str:
        blocks = []
        for unit in units:
            state = states.get(unit.partition(".")[0].replace("-", "_"), "active")
            found = "not-found" if state == "not-found" else "loaded"
            active = "inactive" if state == "not-found" else state
            blocks.append(
                f"Id={unit}\nActiveState={active}\nSubState=x\nLoadState={found}\nResult=success\nNRestarts=0"
            )
        return "\n\n".join(blocks) + "\n"

    properties = ",".join((*PROPERTIES, *OPTIONAL_PROPERTIES))
    usual = (*services.REQUIRED_UNITS, *services.WANTED_UNITS)
    queries = [
        usual,
        services.REQUIRED_UNITS,
        services.REQUIRED_UNITS[:2],
        (*services.REQUIRED_UNITS[:2], *services.WANTED_UNITS),
    ]
    return {
        ("systemctl", "show", "-p", properties, *units): ProgramResult(0, show_output(units), "") for units in queries
    }


def node(root: Path, scenario: str = "", states: Mapping[str, str] | None = None) -> Host:
    """A DGX H100 with two InfiniBand ports, a bond, NVMe and mounts."""
    if not (root / "sys").exists():
        add_gpus(root, ADDRESSES, device="0x2330")
        add_pci_device(root, "0000:18:00.0", "0x020700", vendor="0x15b3", device="0x1021", revision="0x00")
        add_pci_device(root, "0000:02:00.0", "0x010802", vendor="0x144d", device="0xa80a", revision="0x00")
        for port in ("mlx5_0", "mlx5_3"):
            infiniband(root, port)
        for name in ("eth0", "eth1", "bond0"):
            interface(root, name)
        (root / "sys/class/net/bond0/bonding").mkdir()
        (root / "sys/class/net/bond0/device").unlink()
        for member in ("eth0", "eth1"):
            (root / f"sys/class/net/bond0/lower_{member}").symlink_to(f"../{member}")
        write(
            root,
            {
                "/proc/meminfo": "MemTotal:       2113447480 kB\nMemFree: 1 kB\n",
                "/sys/devices/system/cpu/online": "0-223\n",
                "/sys/devices/system/cpu/offline": "\n",
                "/proc/self/mountinfo": MOUNTS,
                **disk(
                    "/sys/class/nvme/nvme0", serial="S64GNE0R700123", state="live", model="SAMSUNG MZQL23T8HCLS-00A07"
                ),
                **disk("/sys/class/nvme/nvme7", serial="X", state="live", transport="tcp"),
                **disk("/sys/block/nvme0n1", wwid="eui.3634473052700123"),
                **disk("/sys/block/sda", wwid="naa.5000c500a1b2c3d4"),
                **disk("/sys/block/sdb", wwid="naa.5000c500a1b2c3d4"),
                **disk("/sys/block/sdc", wwid="t10.stick", removable="1"),
                **disk("/sys/block/vda", serial=""),
                **disk("/sys/block/loop0", wwid="no disk"),
                **{f"/dev/nvidia{number}": "" for number in range(8)},
                **{f"/sys/module/{name}/initstate": "live\n" for name in ("nvidia", "nvidia_uvm", "ib_uverbs", "xfs")},
                "/sys/module/rdma_cm/parameters/x": "1\n",
                "/sys/module/nvidia_peermem/initstate": "going\n",
                **{f"/dev/{name}": "" for name in ("nvidiactl", "nvidia-uvm", "null", "infiniband/uverbs0")},
            },
        )
        for point in ("data", "software", "raid"):
            (root / point).mkdir()
    path = root / "scenario.toml"
    path.write_text(f'profile = "dgx-h100"\n{scenario}\n')
    return Host(str(root), lambda: open_fake(str(path)), system=Node(str(root), systemctl(**(states or {}))))


def disk(path: str, **files: str) -> dict[str, str]:
    return {f"{path}/{name}": f"{text}\n" for name, text in files.items()}


def infiniband(root: Path, device: str, state: str = "4: ACTIVE", physical: str = "5: LinkUp") -> None:
    ports = f"/sys/class/infiniband/{device}/ports/1"
    text = {"state": state, "phys_state": physical, "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
    write(root, {f"{ports}/{name}": f"{value}\n" for name, value in text.items()})
    link = root / f"sys/class/infiniband/{device}/device"
    if not link.is_symlink():
        link.symlink_to("../../../0000:18:00.0")


def interface(root: Path, name: str, state: str = "up", speed: str = "100000", device: str = "0000:18:00.0") -> None:
    path = f"/sys/class/net/{name}"
    files = {"type": "1", "operstate": state, "speed": speed, "mtu": "9000"}
    write(root, {f"{path}/{name}": f"{text}\n" for name, text in files.items()})
    (root / path.lstrip("/") / "device").symlink_to(f"../../../{device}")


def collect(host: Host) -> Present:
    """Collect the baseline of every check as the worker does, through the plain data that it sends."""
    items: list[Entry | LeftOut] = []
    for name in BASELINE_CHECKS:
        items += items_of_check(host, name)
    host.close_nvml()
    assert [load(type(item), dump(item)) for item in items] == items
    return Present(
        tuple(item for item in items if isinstance(item, Entry)),
        tuple(item for item in items if isinstance(item, LeftOut)),
    )


def items_of_check(host: Host, name: str, **settings: Any) -> list[Entry | LeftOut]:
    return baseline_items(host, KNOWN[name], KNOWN[name].config(**settings))


def text_of(found: Present) -> str:
    return as_toml(found, KNOWN, "heading")


def tables_of(found: Present) -> Any:
    return tomllib.loads(text_of(found)).get("checks", {})


def settings_with_baseline(found: Present) -> Loaded:
    return resolve_settings({}, "healthd.toml", {}, KNOWN, lambda _settings: [Layer("baseline", tables_of(found))])


def settings_of_node(root: Path) -> Loaded:
    return settings_with_baseline(collect(node(root)))


# --- content


def test_baseline_records_hardware_of_node(tmp_path):
    tables = tables_of(collect(node(tmp_path)))
    assert tables["gpu_count"] == {"expected": 8}
    assert tables["gpu_nvlink"] == {"links": 18}
    assert tables["gpu_mig"] == {"mode": "off"}
    assert tables["gpu_software"] == {"driver_version": "580.105.08", "vbios": "96.00.99.00.01"}
    assert tables["ib_link"] == {"expected_gbps": {"mlx5_0/1": 400, "mlx5_3/1": 400}}
    assert tables["eth_link"] == {"expected_mbps": {"bond0": 100000}, "expected_mtu": {"bond0": 9000}}
    assert tables["memory_size"] == {"expected_bytes": 2113447480 * 1024}
    assert tables["cpu"] == {"expected": 224}
    assert tables["block_device"] == {"expected": ["S64GNE0R700123", "naa.5000c500a1b2c3d4"]}
    assert len(tables["pcie_devices"]["expected"]) == 10
    assert tables["pcie_devices"]["expected"]["0000:18:00.0"] == "15b3:1021"
    assert tables["services"]["required"] == ["slurmd.service", "munge.service", "nvidia-fabricmanager.service"]
    assert tables["services"]["wanted"] == ["nvidia-persistenced.service"]
    assert tables["kernel_modules"] == {"expected": ["nvidia", "ib_uverbs", "rdma_cm"]}
    assert tables["mount"] == {
        "/": {"fstype": "ext4"},
        "/data": {"fstype": "nfs4"},
        "/raid": {"fstype": "xfs"},
        "/software": {"fstype": "nfs", "read_only": True},
    }
    assert tables["device_nodes"]["expected"] == dict.fromkeys(
        [*(f"/dev/nvidia{n}" for n in range(8)), "/dev/nvidiactl", "/dev/infiniband/uverbs0"],
        "0666",
    )


def test_baseline_declares_only_existing_settings():
    for check, (settings, _) in BASELINE_CHECKS.items():
        own = {field.name for field in fields_of(KNOWN[check].config)}
        assert {*settings} <= own, check
    assert {name for name, check in KNOWN.items() if check.declares.baseline} == {*BASELINE_CHECKS}


def test_baseline_is_empty_without_hardware(tmp_path):
    write(
        tmp_path, {"/proc/self/mountinfo": "1 1 0:5 / / rw - overlay overlay rw\n", "/proc/meminfo": "MemTotal: 9 kB"}
    )
    write(tmp_path, {"/sys/devices/system/cpu/online": "0"})
    found = collect(Host(str(tmp_path)))
    assert tables_of(found) == {"memory_size": {"expected_bytes": 9216}, "cpu": {"expected": 1}}
    assert found.left_out == ()


def test_baseline_file_describes_each_entry(tmp_path):
    text = text_of(collect(node(tmp_path)))
    assert text.startswith("# heading\n")
    assert re.search(r"(?m)^expected = 8 +# NVIDIA H100 80GB HBM3$", text)
    assert re.search(r'(?m)^"mlx5_0/1" = 400 +# InfiniBand$', text)
    assert re.search(r'(?m)^"0000:02:00.0" = "144d:a80a" +# nvme$', text)
    assert max(map(len, text.splitlines())) <= 120


# --- round trip


def serious_codes(loaded: Loaded, host: Host) -> list[str]:
    """Return the codes above INFO that the checks of a baseline report."""
    reported = []
    for (name, instance), config in loaded.checks.items():
        if name in BASELINE_CHECKS and (KNOWN[name].per == "" or instance):
            reported += [f for f in findings(KNOWN[name].module, host, config) if f.severity > Severity.INFO]
    host.close_nvml()
    return sorted(finding.code for finding in reported)


def test_baseline_keeps_its_own_node_healthy(tmp_path):
    assert serious_codes(settings_of_node(tmp_path), node(tmp_path)) == []


PCI_IDS = {  # pci.ids
    "dgx-a100": "0x20b2",
    "dgx-b200": "0x2901",
    "dgx-h100": "0x2330",
    "dgx-h200": "0x2335",
    "gb200-nvl72": "0x2941",
    "gb300-nvl72": "0x31c2",
    "gh200": "0x2342",
    "hgx-b300": "0x3182",
    "rtx-pro-6000": "0x2bb5",
}


@pytest.mark.parametrize("fake", fake_scenario.profiles())
def test_baseline_of_machine_keeps_it_healthy_and_detects_losses(tmp_path, fake):
    addresses, gpu = fake_pci_gpus(fake), fake_scenario.profile(fake).gpu
    add_gpus(tmp_path, addresses, device=PCI_IDS[fake], current_link_width=f"{gpu.get('pcie_width', 16)}")
    write(tmp_path, {"/sys/devices/system/cpu/online": "0-143\n", "/proc/meminfo": "MemTotal: 1006632960 kB\n"})
    write(tmp_path, {"/proc/self/mountinfo": "1 1 0:5 / / rw - overlay overlay rw\n"})

    def machine(faults: str = "") -> Host:
        scenario = tmp_path / "scenario.toml"
        scenario.write_text(f'profile = "{fake}"\n{faults}\n')
        return Host(str(tmp_path), lambda: open_fake(str(scenario)))

    found = collect(machine())
    tables = tables_of(found)
    assert tables["gpu_count"] == {"expected": len(addresses)}
    assert tables.get("gpu_nvlink") == ({"links": gpu["nvlinks"]} if "nvlinks" in gpu else None)
    assert tables.get("gpu_pcie") == ({"lanes": gpu["pcie_width"]} if "pcie_width" in gpu else None)
    assert tables["gpu_software"].get("vbios") == gpu.get("vbios")
    assert len(tables["pcie_devices"]["expected"]) == len(addresses)
    assert found.left_out == ()
    loaded = settings_with_baseline(found)
    assert serious_codes(loaded, machine()) == []
    if "nvlinks" in gpu:
        down = "".join(f"gpu.{index}.nvlink_inactive = [7]\n" for index in range(len(addresses)))
        assert set(serious_codes(loaded, machine(down))) == {"gpu_nvlink/inactive"}
    (tmp_path / f"sys/bus/pci/devices/{addresses[0]}").unlink()
    assert serious_codes(loaded, machine("gpu.0.gone = true")) == ["gpu_count/fewer_than_expected", "pcie_devices/gone"]


def unlink(*names: str) -> Callable[[Path], None]:
    def remove(root: Path) -> None:
        for name in names:
            (root / name).unlink()

    return remove


def rewrite(path: str, old: str, new: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        file = root / path
        file.write_text(file.read_text().replace(old, new))

    return change


LOSSES = {  # removed part -> the check that drains the node for it, and its code
    "a GPU": ("gpu_count", "", "fewer_than_expected", unlink("sys/bus/pci/devices/0000:61:00.0")),
    "a NIC": ("pcie_devices", "", "gone", unlink("sys/bus/pci/devices/0000:18:00.0")),
    "an NVMe": ("pcie_devices", "", "gone", unlink("sys/bus/pci/devices/0000:02:00.0")),
    "a port": ("ib_link", "", "down", lambda root: infiniband(root, "mlx5_0", "1: DOWN", "3: Disabled")),
    "a bond": ("eth_link", "", "down", rewrite("sys/class/net/bond0/operstate", "up", "down")),
    "half the bond": ("eth_link", "", "slow", rewrite("sys/class/net/bond0/speed", "100000", "50000")),
    "a disk": ("block_device", "", "missing", unlink("sys/block/sda/wwid", "sys/block/sdb/wwid")),
    "a DIMM": ("memory_size", "", "too_small", rewrite("proc/meminfo", "2113447480", "2046338616")),
    "CPUs": ("cpu", "", "missing", rewrite("sys/devices/system/cpu/online", "0-223", "0-111")),
    "a mount": ("mount", "/data", "missing", rewrite("proc/self/mountinfo", " /data ", " /other ")),
    "a device file": ("device_nodes", "", "missing", unlink("dev/nvidia3")),
    "a module": ("kernel_modules", "", "not_loaded", rewrite("sys/module/nvidia/initstate", "live", "going")),
}


@pytest.mark.parametrize("lost_part", LOSSES)
def test_baseline_drains_for_lost_part_and_resumes_after_return(tmp_path, lost_part):
    check, instance, code, remove_part = LOSSES[lost_part]
    loaded = settings_of_node(tmp_path)
    story = Story(KNOWN[check].module, loaded.checks[check, instance]).run_checks(node(tmp_path), 2)
    assert (story.codes, story.drained) == ([], False)
    remove_part(tmp_path)
    broken = node(tmp_path, "gpu.3.gone = true" if lost_part == "a GPU" else "")
    story.run_checks(broken, 3)
    assert story.codes == [f"{check}/{code}"]
    assert story.drained
    assert story.run_checks(broken, 5).drained
    repaired_root = tmp_path / "repaired"
    repaired_root.mkdir()
    assert not story.run_checks(node(repaired_root), 3).drained


def test_baseline_drains_for_failed_service(tmp_path):
    loaded = settings_of_node(tmp_path)
    config = replace(loaded.checks["services", ""], wanted=())  # type: ignore[call-arg]
    story = Story(KNOWN["services"].module, config).run_checks(node(tmp_path), 2)
    assert not story.drained
    assert story.run_checks(node(tmp_path, states={"slurmd": "failed"}), 3).codes == ["services/inactive"]
    assert story.drained


# --- parts that look broken are omitted, with the reason


def left_out(found: Present, check: str) -> list[tuple[str, str]]:
    return [(left.key or left.setting or left.instance, left.why) for left in found.left_out if left.check == check]


def test_gpu_count_is_omitted_if_gpu_does_not_respond(tmp_path):
    found = collect(node(tmp_path, "gpu.3.lost = true"))
    assert "gpu_count" not in tables_of(found) or tables_of(found)["gpu_count"] == {}
    ((setting, why),) = left_out(found, "gpu_count")
    assert setting == "expected"
    assert "7 GPUs respond, but" in why
    assert f"# left out: expected: {why}" in text_of(found).splitlines()


def test_gpu_count_is_omitted_if_nvml_lacks_gpu(tmp_path):
    found = collect(node(tmp_path, "gpu.3.gone = true"))
    ((setting, why),) = left_out(found, "gpu_count")
    assert (setting, "7 GPUs" in why, "0000:61:00.0 is on PCI" in why) == ("expected", True, True)


def test_failing_nvml_leaves_other_checks_readable(tmp_path):
    host = node(tmp_path, 'library = "mismatch"')
    with pytest.raises(Exception, match=r"[Mm]ismatch"):
        items_of_check(host, "gpu_count")
    assert items_of_check(host, "pcie_devices")


@pytest.mark.parametrize(
    ("scenario", "check"),
    [
        ("gpu.2.nvlink_inactive = [3]", "gpu_nvlink"),
        ("gpu.2.mig = true", "gpu_mig"),
        ('gpu.2.vbios = "1.2.3"', "gpu_software"),
    ],
)
def test_setting_is_omitted_if_gpus_differ(tmp_path, scenario, check):
    assert len(left_out(collect(node(tmp_path, scenario)), check)) >= 1


@pytest.mark.parametrize("call", ["nvmlDeviceGetVbiosVersion", "nvmlDeviceGetMigMode"])
def test_setting_is_omitted_if_nvml_call_fails(tmp_path, call):
    found = collect(node(tmp_path, f'gpu.2.errors = {{ {call} = "Unknown" }}'))
    check = "gpu_software" if "Vbios" in call else "gpu_mig"
    assert "Unknown" in left_out(found, check)[0][1]
    assert tables_of(found)["gpu_count"] == {"expected": 8}


def test_unreadable_mtu_is_omitted_but_speed_is_kept(tmp_path):
    node(tmp_path)
    write(tmp_path, {"/sys/class/net/bond0/mtu": "N/A\n"})
    assert tables_of(collect(node(tmp_path)))["eth_link"]["expected_mbps"] == {"bond0": 100000}
    assert not tables_of(collect(node(tmp_path)))["eth_link"]["expected_mtu"]


def test_unloaded_configured_module_is_omitted_with_reason(tmp_path):
    node(tmp_path)
    write(tmp_path, {"/sys/module/nvidia/initstate": "N/A\n"})
    found = items_of_check(node(tmp_path), "kernel_modules", expected=("nvidia-peermem", "mlx5_ib", "nvidia-uvm"))
    assert [item.key for item in found if isinstance(item, Entry)] == ["ib_uverbs", "rdma_cm"]
    why = {item.key: item.why for item in found if isinstance(item, LeftOut)}
    assert list(why) == ["nvidia_peermem", "mlx5_ib", "nvidia"]
    assert (why["nvidia_peermem"], why["mlx5_ib"]) == ("is being unloaded", "is not loaded")
    assert "initstate" in why["nvidia"]
    assert "'N/A'" in why["nvidia"]


def test_failing_systemctl_omits_services(tmp_path):
    from healthd.checks.services import OPTIONAL_PROPERTIES, PROPERTIES

    argv = (
        "systemctl",
        "show",
        "-p",
        ",".join((*PROPERTIES, *OPTIONAL_PROPERTIES)),
        *services.REQUIRED_UNITS,
        *services.WANTED_UNITS,
    )
    host = Host(str(tmp_path), system=FakeSystem(str(tmp_path), {argv: ProgramResult(1, "", "no bus\n")}))
    with pytest.raises(RuntimeError, match="exit status 1: no bus"):
        items_of_check(host, "services")


def test_services_of_settings_match_with_and_without_suffix(tmp_path):
    from healthd.checks.services import OPTIONAL_PROPERTIES, PROPERTIES

    units = (*services.REQUIRED_UNITS, *services.WANTED_UNITS, "data.mount", "chrony.service")
    blocks = "\n\n".join(f"Id={unit}\nActiveState=active\nSubState=x\nLoadState=loaded\nResult=" for unit in units)
    argv = ("systemctl", "show", "-p", ",".join((*PROPERTIES, *OPTIONAL_PROPERTIES)), *units)
    host = Host(str(tmp_path), system=FakeSystem(str(tmp_path), {argv: ProgramResult(0, blocks, "")}))
    found = items_of_check(host, "services", wanted=("chrony", "slurmd"), required=("data.mount",))
    by_setting = {(item.setting, item.key) for item in found}
    assert {("wanted", "chrony.service"), ("required", "data.mount"), ("required", "munge.service")} <= by_setting
    assert ("wanted", "slurmd.service") in by_setting  # the site's setting takes precedence over our default


def test_nvlinks_are_omitted_if_link_is_down_on_every_gpu(tmp_path):
    scenario = "\n".join(f"gpu.{number}.nvlink_inactive = [3]" for number in range(8))
    ((setting, why),) = left_out(collect(node(tmp_path, scenario)), "gpu_nvlink")
    assert (setting, why.startswith("17 of 18 ")) == ("links", True)


def test_mig_mode_on_is_recorded(tmp_path):
    scenario = "\n".join(f"gpu.{number}.mig = true" for number in range(8))
    assert tables_of(collect(node(tmp_path, scenario)))["gpu_mig"]["mode"] == "on"


@pytest.mark.parametrize(
    ("state", "physical", "why"),
    [
        ("1: DOWN", "2: Polling", "is DOWN/Polling"),
        ("2: INIT", "5: LinkUp", "is INIT/LinkUp"),
        ("N/A", "5: LinkUp", "mlx5_0/1: not a state: 'N/A'"),
    ],
)
def test_port_is_omitted_unless_up(tmp_path, state, physical, why):
    node(tmp_path)
    infiniband(tmp_path, "mlx5_0", state, physical)
    found = collect(node(tmp_path))
    assert tables_of(found)["ib_link"]["expected_gbps"] == {"mlx5_3/1": 400}
    assert left_out(found, "ib_link") == [("mlx5_0/1", why)]


def test_down_interface_is_omitted_and_virtual_one_ignored(tmp_path):
    node(tmp_path)
    interface(tmp_path, "eth2", "down")
    interface(tmp_path, "eth3", "nonsense")
    interface(tmp_path, "usb0", device="1-14.3:1.0")
    interface(tmp_path, "rep0")
    write(tmp_path, {"/sys/class/net/rep0/phys_port_name": "pf0vf3\n", "/sys/class/net/lo/type": "772\n"})
    write(tmp_path, {"/sys/class/net/docker0/type": "1\n", "/sys/class/net/docker0/operstate": "up\n"})
    interface(tmp_path, "ib0")
    write(tmp_path, {"/sys/class/net/ib0/type": "32\n"})
    found = collect(node(tmp_path))
    assert tables_of(found)["eth_link"]["expected_mbps"] == {"bond0": 100000}
    assert [name for name, _ in left_out(found, "eth_link")] == ["eth2", "eth3"]


@pytest.mark.parametrize("speed", ["-1", "4294967295", "N/A"])
def test_unreported_interface_speed_is_recorded_as_0(tmp_path, speed):
    node(tmp_path)
    interface(tmp_path, "ens3", speed=speed)
    assert tables_of(collect(node(tmp_path)))["eth_link"]["expected_mbps"]["ens3"] == 0


def test_dead_pci_device_is_omitted(tmp_path):
    node(tmp_path)
    (tmp_path / "sys/bus/pci/devices/0000:02:00.0/revision").write_text("0xff\n")
    found = collect(node(tmp_path))
    assert "0000:02:00.0" not in tables_of(found)["pcie_devices"]["expected"]
    ((address, why),) = left_out(found, "pcie_devices")
    assert (address, why.startswith("dead ")) == ("0000:02:00.0", True)


def test_disk_is_omitted_if_controller_is_not_live(tmp_path):
    node(tmp_path)
    (tmp_path / "sys/class/nvme/nvme0/state").write_text("dead\n")
    found = collect(node(tmp_path))
    assert tables_of(found)["block_device"] == {"expected": ["naa.5000c500a1b2c3d4"]}
    assert left_out(found, "block_device") == [("S64GNE0R700123", "nvme0 is dead")]


def test_failed_service_is_omitted_and_uninstalled_one_ignored(tmp_path):
    found = collect(node(tmp_path, states={"slurmd": "failed", "nvidia_fabricmanager": "not-found"}))
    assert tables_of(found)["services"]["required"] == ["munge.service"]
    assert left_out(found, "services") == [("slurmd.service", "is failed")]


def test_device_file_of_wrong_type_is_omitted(tmp_path):
    host = Host(str(tmp_path), system=FakeSystem(str(tmp_path)))
    write(tmp_path, {"/dev/nvidia0": ""})
    left_out = LeftOut("device_nodes", "is not a character device", "expected", "/dev/nvidia0")
    assert items_of_check(host, "device_nodes") == [left_out]


# --- mounts


def mounts(text: str) -> dict[str, str]:
    found = baseline_mounts(parse_all(text.strip())[0])
    return {item.instance: item.value for item in found if isinstance(item, Entry) and item.setting == "fstype"}


def line(point: str, fstype: str, device: str = "0:77", options: str = "rw", flags: str = "rw") -> str:
    return f"36 35 {device} / {point} {flags},noatime shared:1 - {fstype} source {options}"


@pytest.mark.parametrize(
    "transient",
    [
        line("/run/user/1000", "tmpfs"),
        line("/run/media/ann/stick", "ext4", "8:17"),
        line("/media/stick", "ext4", "8:17"),
        line("/var/lib/docker/overlay2/abc/merged", "overlay"),
        line("/var/lib/docker/volumes/x/_data", "nfs4"),
        line("/var/lib/kubelet/pods/1/volumes/x", "nfs4"),
        line("/var/lib/containers/storage/overlay", "xfs", "253:0"),
        line("/proc", "proc"),
        line("/sys/fs/cgroup", "cgroup2"),
        line("/dev/shm", "tmpfs"),
        line("/proc/fs/nfsd", "nfsd"),
        line("/var/lib/nfs/rpc_pipefs", "rpc_pipefs"),
        line("/snap/core/1", "squashfs", "7:3"),
        line("/mnt/image", "ext4", "7:4"),
        line("/home/ann/there", "fuse.sshfs", options="rw,user_id=1000,group_id=1000"),
        line("/home/ann/ceph", "fuse.ceph", options="rw,user_id=1000,group_id=1000"),
        line("/tmp/job.4711", "ext4", "8:9"),
        line("/boot/efi", "vfat", "8:1"),
        line("/gone//deleted", "nfs"),
        line("/home", "autofs"),
        line("/proc/sys/fs/binfmt_misc", "autofs"),
        line("/etc/hosts", "ext4", "8:5"),
        line("/misc", "ext4", "8:1") + "\n" + line("/", "ext4", "8:1"),
    ],
)
def test_temporary_mount_is_not_recorded(transient):
    assert set(mounts(transient)) <= {"/"}


@pytest.mark.parametrize(
    "fstype",
    ["nfs", "nfs4", "lustre", "gpfs", "beegfs", "wekafs", "ceph", "cifs", "fuse.juicefs", "ext4", "xfs", "zfs"],
)
def test_lasting_mount_is_recorded(fstype):
    assert mounts(line("/data", fstype)) == {"/data": fstype}


def test_automounted_file_system_is_left_to_operator():
    (left,) = baseline_mounts(parse_all(f"{line('/home', 'autofs')}\n{line('/home/ann', 'nfs4')}")[0])
    assert left == LeftOut("mount", left.why, instance="/home/ann")
    assert left.why.startswith("automounted")


def test_mounts_after_automounted_one_are_recorded():
    text = f"{line('/home', 'autofs')}\n{line('/home/ann', 'nfs4')}\n{line('/scratch/data', 'lustre')}"
    assert mounts(text) == {"/scratch/data": "lustre"}


def test_mount_below_etc_is_recorded():
    assert mounts(line("/etc/slurm", "nfs4")) == {"/etc/slurm": "nfs4"}


def test_btrfs_subvolumes_are_not_bind_mounts():
    text = f"{line('/', 'btrfs', '0:30')}\n{line('/home', 'btrfs', '0:30')}"
    assert mounts(text) == {"/": "btrfs", "/home": "btrfs"}


def test_read_only_remount_by_kernel_is_omitted():
    (left,) = baseline_mounts(parse_all(line("/raid", "ext4", "9:0", options="ro"))[0])
    assert left == LeftOut("mount", left.why, instance="/raid")
    assert "read-only" in left.why


def test_last_mount_of_point_is_recorded():
    assert mounts(f"{line('/data', 'ext4', '8:1')}\n{line('/data', 'nfs4')}") == {"/data": "nfs4"}


CAPTURED = ["mountinfo_gpu_node.txt", "mountinfo_nfs.txt", "mountinfo_nfs_clients.txt"]
EXPECTED = {
    "mountinfo_gpu_node.txt": {"/": "ext4"},
    "mountinfo_nfs.txt": {"/": "ext4", "/mnt/nfs/test": "nfs"},
    "mountinfo_nfs_clients.txt": {"/logs": "nfs", "/le/cmd": "nfs", "/public": "nfs"},
}


@pytest.mark.parametrize("name", CAPTURED)
def test_lasting_mounts_of_captured_nodes_are_recorded(name):
    found = mounts(captured_text(name))
    assert EXPECTED[name].items() <= found.items()
    assert not [point for point in found if point.startswith(("/run", "/proc", "/sys", "/dev", "/var/lib"))]


LINES = [each for name in CAPTURED for each in captured_text(name).splitlines()]
FIELDS = sorted({field for each in LINES for field in each.split()})


@given(
    st.lists(
        st.sampled_from(LINES)
        | st.builds(
            line,
            st.sampled_from(["/", "/data", "/run/user/1", "/home/a", "/a b"]) | st.text(),
            st.sampled_from(["nfs", "ext4", "autofs", "overlay", "tmpfs", "squashfs", "fuse.x", "zfs"]),
        )
        | st.lists(st.sampled_from(FIELDS), min_size=6, max_size=12).map(" ".join),
        max_size=30,
    )
)
def test_baseline_accepts_any_list_of_mounts(mount_lines):
    found = list(baseline_mounts(parse_all("\n".join(mount_lines))[0]))
    entries = tuple(item for item in found if isinstance(item, Entry))
    loaded = settings_with_baseline(Present(entries, tuple(item for item in found if isinstance(item, LeftOut))))
    for (check, point), config in loaded.checks.items():
        if check == "mount":
            assert not re.match("/(run|proc|sys|dev|snap)(/|$)", point)
            assert config.fstype not in ("", "autofs", "overlay", "tmpfs", "squashfs")  # type: ignore[attr-defined]


# --- the file with arbitrary content


TEXTS = st.text() | st.sampled_from(['"', "\\", "\x7f", "\n", "\ud800", "# x", "é😀", "'''"])


@given(st.dictionaries(TEXTS, st.text()), TEXTS, TEXTS)
def test_baseline_file_preserves_any_text(devices, note, why):
    def clean(text: str) -> str:
        return text.encode("utf-8", "replace").decode()

    assume(len({*map(clean, devices)}) == len(devices))
    entries = [Entry("device_nodes", "expected", mode, path, note=note) for path, mode in devices.items()]
    left_out_items = (LeftOut("device_nodes", why, "expected", note), LeftOut("gpu_count", why))
    text = as_toml(Present(tuple(entries), left_out_items), KNOWN, "a\nb")
    read_back = tomllib.loads(text.encode("utf-8", "replace").decode())["checks"]["device_nodes"]["expected"]
    assert read_back == {clean(path): clean(mode) for path, mode in devices.items()}


# --- changes


def changes(before: Present, after: Present) -> dict[str, tuple[str, str]]:
    return {change.setting: (change.was, change.now) for change in find_changes(tables_of(before), after, KNOWN)}


def test_diff_is_empty_on_same_node(tmp_path):
    assert changes(collect(node(tmp_path)), collect(node(tmp_path))) == {}


def test_diff_reports_old_and_new_value(tmp_path):
    before = collect(node(tmp_path))
    for lost_part in ("a NIC", "a port", "half the bond", "CPUs", "a mount", "a device file"):
        LOSSES[lost_part][3](tmp_path)
    infiniband(tmp_path, "mlx5_9")
    after = collect(node(tmp_path, "gpu.3.lost = true", {"slurmd": "failed"}))
    found = changes(before, after)
    assert found.pop("checks.gpu_count.expected")[0] == "8"
    assert found == {
        "checks.pcie_devices.expected 0000:18:00.0": ('"15b3:1021"', "missing"),
        "checks.ib_link.expected_gbps mlx5_0/1": ("400", "is DOWN/Disabled"),
        "checks.ib_link.expected_gbps mlx5_9/1": ("", "400"),
        "checks.eth_link.expected_mbps bond0": ("100000", "50000"),
        "checks.cpu.expected": ("224", "112"),
        'checks.mount."/data".fstype': ('"nfs4"', "missing"),
        'checks.mount."/other".fstype': ("", '"nfs4"'),
        "checks.device_nodes.expected /dev/nvidia3": ('"0666"', "missing"),
        "checks.services.required slurmd.service": ("present", "is failed"),
    }


def test_diff_tolerates_small_change_of_memory_size(tmp_path):
    before = collect(node(tmp_path))
    rewrite("proc/meminfo", "2113447480", "2113000000")(tmp_path)
    assert changes(before, collect(node(tmp_path))) == {}


def test_diff_ignores_manual_settings_but_lists_them(tmp_path):
    found = collect(node(tmp_path))
    tables = tables_of(found)
    tables["gpu_count"]["enforce"] = False
    tables["mount"]["/data"]["hang_degraded_seconds"] = 60.0
    tables["ib_flap"] = {"ports": ["mlx5_0/1"]}
    assert find_changes(tables, found, KNOWN) == []
    assert [change.setting for change in manual_settings(tables, KNOWN)] == [
        "checks.gpu_count.enforce",
        "checks.ib_flap.ports mlx5_0/1",
        'checks.mount."/data".hang_degraded_seconds',
    ]


def test_diff_reports_unreadable_part_as_unknown(tmp_path):
    before = collect(node(tmp_path))
    readable = tuple(entry for entry in before.entries if entry.check != "ib_link")
    (first, second) = find_changes(
        tables_of(before), Present(readable, (LeftOut("ib_link", "no answer within 10 s"),)), KNOWN
    )
    assert (first.now, first.unknown, second.unknown) == ("no answer within 10 s", True, True)


# --- the command


@pytest.fixture
def tree(tmp_path: Path) -> list[str]:
    """Return the flags for a node on a tree. The tree has no systemctl, and its device files are regular files."""
    node(tmp_path / "node")
    return [
        "--root",
        str(tmp_path / "node"),
        "--fake-nvml",
        "dgx-h100",
        "--baseline",
        str(tmp_path / "b/baseline.toml"),
    ]


def file_of(flags: list[str]) -> Path:
    return Path(flags[-1])


def test_command_prints_baseline_without_writing(tree, capsys):
    assert main(["baseline", *tree]) == 0
    text = capsys.readouterr().out
    assert tomllib.loads(text)["checks"]["gpu_count"] == {"expected": 8}
    assert re.search(r"(?m)^# left out: /dev/nvidia0: ", text)
    assert not file_of(tree).exists()


def test_write_creates_file_used_by_checks(tree, capsys):
    assert main(["baseline", *tree, "--write"]) == 0
    assert stat.S_IMODE(file_of(tree).stat().st_mode) == 0o644
    assert [path.name for path in file_of(tree).parent.iterdir()] == ["baseline.toml"]
    out, err = capsys.readouterr()
    assert out == f"{file_of(tree)}: written\n"
    assert "device_nodes /dev/nvidia0: " in err
    assert main(["config", "show", *tree]) == 0
    assert re.search(rf"checks\.gpu_count\.expected +8 +{file_of(tree)}", capsys.readouterr().out)
    assert main(["check", *tree, "gpu_count", "ib_link", "pcie_devices", "mount"]) == 0
    infiniband(Path(tree[1]), "mlx5_0", "1: DOWN", "3: Disabled")
    assert main(["check", *tree, "ib_link"]) == 2


def test_diff_exits_0_without_changes_and_1_with_changes(tree, capsys):
    assert main(["baseline", *tree, "--write"]) == 0
    assert main(["baseline", *tree, "--diff"]) == 0
    assert capsys.readouterr().out.endswith(f"{file_of(tree)}: nothing has changed\n")
    infiniband(Path(tree[1]), "mlx5_0", "1: DOWN", "3: Disabled")
    assert main(["baseline", *tree, "--diff"]) == 1
    assert re.search(r"checks\.ib_link\.expected_gbps mlx5_0/1 +400 +is DOWN/Disabled", capsys.readouterr().out)


def test_write_refuses_to_replace_file_without_force(tree, capsys):
    assert main(["baseline", *tree, "--write"]) == 0
    before = file_of(tree).read_text()
    infiniband(Path(tree[1]), "mlx5_9")
    assert main(["baseline", *tree, "--write"]) == 1
    out, err = capsys.readouterr()
    assert "mlx5_9/1" in out
    assert re.search(rf"(?m)^healthd baseline: {file_of(tree)}: .*--force", err)
    assert file_of(tree).read_text() == before
    assert main(["baseline", *tree, "--write", "--force"]) == 0
    assert "mlx5_9/1" in file_of(tree).read_text()


def test_invalid_file_is_rejected_and_replaced_only_with_force(tree, capsys):
    file_of(tree).parent.mkdir()
    file_of(tree).write_text("[checks.gpu_cont]\n")
    for flags in (["--diff"], ["--write"]):
        assert main(["baseline", *tree, *flags]) == 64
        assert '"gpu_cont"' in capsys.readouterr().err
    assert main(["baseline", *tree, "--write", "--force"]) == 0
    assert main(["baseline", *tree, "--diff"]) == 0


def test_diff_exits_3_without_file(tree, capsys):
    assert main(["baseline", *tree, "--diff"]) == 3
    assert capsys.readouterr().err.startswith(f"healthd baseline: {file_of(tree)}: ")


def test_write_fails_if_directory_cannot_be_created(tree, capsys):
    assert main(["baseline", *tree[:-1], "/proc/nowhere/b.toml", "--write"]) == 1
    assert "/proc/nowhere/b.toml: " in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--write"], ["--diff"]])
def test_other_root_requires_explicit_baseline_file(tree, capsys, flags):
    assert main(["baseline", *tree[:-2], *flags]) == 64
    assert "--baseline" in capsys.readouterr().err


def test_conflicting_flags_are_rejected(tree, capsys):
    assert main(["baseline", *tree, "--write", "--diff"]) == 64
    assert main(["baseline", *tree, "--force"]) == 64
    assert main(["baseline", *tree[:-1], "", "--diff"]) == 64


# --- unreadable parts


FAILING_NVML = 'library = "mismatch"'  # NVML fails for every caller
UNREADABLE = "left out: gpu_count: could not be read: "


def without_nvml(flags: list[str], tmp_path: Path) -> list[str]:
    (tmp_path / "silent.toml").write_text(f'profile = "dgx-h100"\n{FAILING_NVML}\n')
    return [*flags[:3], str(tmp_path / "silent.toml"), *flags[4:]]


def test_write_refuses_first_file_with_unreadable_parts(tree, tmp_path, capsys):
    failing_flags = without_nvml(tree, tmp_path)
    assert main(["baseline", *failing_flags, "--write"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{file_of(tree)}: not written" in err
    assert UNREADABLE in err
    assert err.endswith("; --force skips them\n")
    assert err.count("\n") == 1
    assert not file_of(tree).exists()
    assert main(["baseline", *failing_flags, "--write", "--force"]) == 0
    assert UNREADABLE in capsys.readouterr().err
    assert "expected" not in tomllib.loads(file_of(tree).read_text())["checks"]["gpu_count"]


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_write_keeps_entries_of_unreadable_part_and_reports_them(tree, tmp_path, capsys, force):
    assert main(["baseline", *tree, "--write"]) == 0
    before = tomllib.loads(file_of(tree).read_text())
    capsys.readouterr()
    assert main(["baseline", *without_nvml(tree, tmp_path), "--write", *force]) == 0
    out, err = capsys.readouterr()
    assert out == f"{file_of(tree)}: written\n"
    assert UNREADABLE in err
    assert "kept: checks.gpu_count.expected = 8\n" in err
    assert tomllib.loads(file_of(tree).read_text()) == before


def test_write_keeps_unreadable_port_and_drops_down_port(tree, capsys):
    infiniband(Path(tree[1]), "mlx5_9")
    assert main(["baseline", *tree, "--write"]) == 0
    infiniband(Path(tree[1]), "mlx5_0", "no state at all")
    infiniband(Path(tree[1]), "mlx5_9", "1: DOWN", "3: Disabled")
    assert main(["baseline", *tree, "--write", "--force"]) == 0
    ports = tomllib.loads(file_of(tree).read_text())["checks"]["ib_link"]["expected_gbps"]
    assert ports == {"mlx5_0/1": 400, "mlx5_3/1": 400}
    assert "kept: checks.ib_link.expected_gbps mlx5_0/1 = 400" in capsys.readouterr().err


def test_json_output_has_entries_changes_and_kept_entries(tree, tmp_path, capsys):
    def run_json(*words: str) -> Any:
        main(["baseline", *words, "--json"])
        return json.loads(capsys.readouterr().out)

    printed = run_json(*tree)
    assert (printed["file"], printed["written"], printed["kept"], printed["changes"]) == (None, False, [], [])
    count = {"check": "gpu_count", "instance": "", "setting": "expected", "key": "", "value": 8, "note": ""}
    assert [{**entry, "note": ""} for entry in printed["entries"] if entry["check"] == "gpu_count"] == [count]
    assert all(left["unseen"] is False for left in printed["left_out"])
    written = run_json(*tree, "--write")
    assert (written["file"], written["written"]) == (str(file_of(tree)), True)
    failing_flags = without_nvml(tree, tmp_path)
    (change,) = [
        c for c in run_json(*failing_flags, "--diff")["changes"] if c["setting"] == "checks.gpu_count.expected"
    ]
    assert (change["was"], change["unknown"]) == ("8", True)
    kept = run_json(*failing_flags, "--write")["kept"]
    assert ("gpu_count", 8) in [(entry["check"], entry["value"]) for entry in kept]


# --- hanging calls


def test_hanging_nvml_omits_only_gpu_checks(tree, monkeypatch, tmp_path, capsys):
    (tmp_path / "hang.toml").write_text('profile = "dgx-h100"\nhang = "nvmlDeviceGetName"\nhang_seconds = 20\n')
    monkeypatch.setattr(baseline_settings, "GPU_SECONDS", 1.0)
    assert main(["baseline", *tree[:2], "--fake-nvml", str(tmp_path / "hang.toml")]) == 0
    text = capsys.readouterr().out
    assert "left out" in text.partition("[checks.gpu_count]")[2].split("[")[0]
    tables = tomllib.loads(text)["checks"]
    assert tables["gpu_count"] == {}
    assert tables["ib_link"]["expected_gbps"]


def test_unmounted_or_slow_mount_is_omitted(tree, monkeypatch, capsys):
    root = Path(tree[1])
    (root / "data").rmdir()
    assert main(["baseline", *tree]) == 0
    text = capsys.readouterr().out
    assert "# left out: mount /data: " in text
    assert set(tomllib.loads(text)["checks"]["mount"]) == {"/", "/raid", "/software"}
    monkeypatch.setattr(baseline_settings, "INSTANCES_SECONDS", 0.0)
    assert main(["baseline", *tree]) == 0
    assert "# left out: mount /raid: not read: " in capsys.readouterr().out


# --- checks of a site


SITE_CHECK = """
import time
from dataclasses import dataclass
from healthd.api import CheckConfig
from healthd.common.model import Baseline, Entry, LeftOut

PER = "shelf"
BASELINE = Baseline(("disks",))


@dataclass(frozen=True, slots=True)
class Config(CheckConfig):
    disks: int = 0


def baseline(host, config):
    yield Entry("shelf", "disks", 24, instance="front", note="in the rack")
    yield Entry("shelf", "disks", 12, instance="rear")
    yield LeftOut("shelf", "is dark", instance="side")


def run(host, config, past):
    if config.name == "rear":
        time.sleep(600)
    yield from ()
"""


@pytest.fixture
def site_flags(tree, tmp_path) -> Callable[[str], list[str]]:
    """Return a function that installs a site check with this text and returns the flags for it."""

    def install(text: str) -> list[str]:
        folder = tmp_path / "checks.d"
        folder.mkdir(mode=0o755, exist_ok=True)
        (folder / "shelf.py").write_text(text)
        (folder / "shelf.py").chmod(0o644)
        (tmp_path / "healthd.toml").write_text(f'checks_dir = "{folder}"\n')
        return [*tree, "--config", str(tmp_path / "healthd.toml")]

    tmp_path.chmod(0o755)
    return install


def test_site_check_is_listed_last_and_its_timeout_is_omitted(site_flags, monkeypatch, capsys):
    monkeypatch.setattr(baseline_settings, "INSTANCE_SECONDS", 10.0)
    assert main(["baseline", *site_flags(SITE_CHECK)]) == 0
    text = capsys.readouterr().out
    assert list(tomllib.loads(text)["checks"])[-2:] == ["mount", "shelf"]
    assert tomllib.loads(text)["checks"]["shelf"] == {"front": {"disks": 24}}
    side, rear = re.findall(r"(?m)^# left out: shelf (.*)", text)
    assert side == "side: is dark"
    assert re.fullmatch(r"rear: .* 10 s", rear)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('Entry("shelf", "disks", 24', 'Entry("mount", "fstype", 24', "must be an Entry or a LeftOut of its BASELINE"),
        ('Entry("shelf", "disks", 24', 'Entry("shelf", "enforce", 24', "must be an Entry or a LeftOut"),
        ("24,", "b'24',", "bytes is not JSON serializable"),
        ('yield LeftOut("shelf", "is dark", instance="side")', "raise OSError(5, 'no shelf')", "no shelf"),
    ],
)
def test_wrong_baseline_of_site_check_omits_only_that_check(site_flags, capsys, old, new, why):
    assert main(["baseline", *site_flags(SITE_CHECK.replace(old, new))]) == 0
    text = capsys.readouterr().out
    assert re.search(f"# left out: shelf: .*{why}", text)
    assert tomllib.loads(text)["checks"]["mount"]


def test_name_baseline_of_other_type_is_ignored(site_flags, capsys):
    source = (
        "BASELINE = 0.9\ndef baseline(points):\n    return 1 / 0\ndef run(host, config, past):\n    yield from ()\n"
    )
    assert main(["baseline", *site_flags(source)]) == 0
    assert "shelf" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("def baseline", "def base", "has BASELINE but no baseline(host, config)"),
        ('("disks",)', '("discs",)', 'BASELINE names "discs", which Config does not have'),
    ],
)
def test_invalid_baseline_declaration_is_rejected_on_load(site_flags, capsys, old, new, why):
    assert main(["baseline", *site_flags(SITE_CHECK.replace(old, new))]) == 64
    assert capsys.readouterr().err.endswith(f"shelf.py: {why}\n")
