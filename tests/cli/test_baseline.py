"""`healthd baseline`: what a node has becomes settings that the checks hold it to; what looks broken never does."""

from __future__ import annotations

import json
import re
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes import findings
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace
from story import Story
from trees import FakeSystem, captured, gpus, pci_device, write

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
from healthd.nvidia.fake_nvml import open_fake

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KNOWN = built_in_checks()
WANTS = baseline_checks(KNOWN)
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
    """The answer of systemctl for any order in which the usual units are asked for."""
    from healthd.checks.services import OPTIONAL_PROPERTIES, PROPERTIES

    def shown(units: tuple[str, ...]) -> str:
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
    asked = [
        usual,
        services.REQUIRED_UNITS,
        services.REQUIRED_UNITS[:2],
        (*services.REQUIRED_UNITS[:2], *services.WANTED_UNITS),
    ]
    return {("systemctl", "show", "-p", properties, *units): ProgramResult(0, shown(units), "") for units in asked}


def node(root: Path, scenario: str = "", states: Mapping[str, str] | None = None) -> Host:
    """A DGX H100 with two InfiniBand ports, a bond, NVMe and mounts."""
    if not (root / "sys").exists():
        gpus(root, ADDRESSES, device="0x2330")
        pci_device(root, "0000:18:00.0", "0x020700", vendor="0x15b3", device="0x1021", revision="0x00")
        pci_device(root, "0000:02:00.0", "0x010802", vendor="0x144d", device="0xa80a", revision="0x00")
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
    told = {"type": "1", "operstate": state, "speed": speed, "mtu": "9000"}
    write(root, {f"{path}/{name}": f"{text}\n" for name, text in told.items()})
    (root / path.lstrip("/") / "device").symlink_to(f"../../../{device}")


def seen(host: Host) -> Present:
    """Every check, as the worker looks at them, through the plain data that it sends."""
    found: list[Entry | LeftOut] = []
    for name in WANTS:
        found += look(host, name)
    host.close_nvml()
    assert [load(type(item), dump(item)) for item in found] == found
    return Present(
        tuple(item for item in found if isinstance(item, Entry)),
        tuple(item for item in found if isinstance(item, LeftOut)),
    )


def look(host: Host, name: str, **settings: Any) -> list[Entry | LeftOut]:
    return baseline_items(host, KNOWN[name], KNOWN[name].config(**settings))


def text_of(found: Present) -> str:
    return as_toml(found, KNOWN, "heading")


def tables_of(found: Present) -> Any:
    return tomllib.loads(text_of(found)).get("checks", {})


def settled(found: Present) -> Loaded:
    return resolve_settings({}, "healthd.toml", {}, KNOWN, lambda _settings: [Layer("baseline", tables_of(found))])


def baselined(root: Path) -> Loaded:
    return settled(seen(node(root)))


# --- what is written


def test_a_node_becomes_settings(tmp_path):
    tables = tables_of(seen(node(tmp_path)))
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


def test_every_setting_that_a_baseline_may_hold_exists():
    for check, (settings, _) in WANTS.items():
        own = {field.name for field in fields_of(KNOWN[check].config)}
        assert {*settings} <= own, check
    assert {name for name, check in KNOWN.items() if check.declares.baseline} == {*WANTS}


def test_nothing_of_a_node_is_nothing_in_the_file(tmp_path):
    write(
        tmp_path, {"/proc/self/mountinfo": "1 1 0:5 / / rw - overlay overlay rw\n", "/proc/meminfo": "MemTotal: 9 kB"}
    )
    write(tmp_path, {"/sys/devices/system/cpu/online": "0"})
    found = seen(Host(str(tmp_path)))
    assert tables_of(found) == {"memory_size": {"expected_bytes": 9216}, "cpu": {"expected": 1}}
    assert found.left_out == ()


def test_the_file_says_what_each_thing_is(tmp_path):
    text = text_of(seen(node(tmp_path)))
    assert text.startswith("# heading\n")
    assert re.search(r"(?m)^expected = 8 +# NVIDIA H100 80GB HBM3$", text)
    assert re.search(r'(?m)^"mlx5_0/1" = 400 +# InfiniBand$', text)
    assert re.search(r'(?m)^"0000:02:00.0" = "144d:a80a" +# nvme$', text)
    assert max(map(len, text.splitlines())) <= 120


# --- round trip


def worst(loaded: Loaded, host: Host) -> list[str]:
    """What the checks of a baseline find above INFO."""
    found = []
    for (name, instance), config in loaded.checks.items():
        if name in WANTS and (KNOWN[name].per == "" or instance):
            found += [f for f in findings(KNOWN[name].module, host, config) if f.severity > Severity.INFO]
    host.close_nvml()
    return sorted(finding.code for finding in found)


def test_with_its_own_baseline_a_node_is_healthy(tmp_path):
    assert worst(baselined(tmp_path), node(tmp_path)) == []


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


LOSSES = {  # what is taken away -> the check that drains for it, and its code
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


@pytest.mark.parametrize("what", LOSSES)
def test_what_is_taken_away_drains_the_node_and_its_return_clears_that(tmp_path, what):
    check, instance, code, lose = LOSSES[what]
    loaded = baselined(tmp_path)
    story = Story(KNOWN[check].module, loaded.checks[check, instance]).looks(node(tmp_path), 2)
    assert (story.codes, story.drained) == ([], False)
    lose(tmp_path)
    broken = node(tmp_path, "gpu.3.gone = true" if what == "a GPU" else "")
    story.looks(broken, 3)
    assert story.codes == [f"{check}/{code}"]
    assert story.drained
    assert story.looks(broken, 5).drained
    whole = tmp_path / "repaired"
    whole.mkdir()
    assert not story.looks(node(whole), 3).drained


def test_a_service_that_is_gone_drains_the_node(tmp_path):
    loaded = baselined(tmp_path)
    config = replace(loaded.checks["services", ""], wanted=())  # type: ignore[call-arg]
    story = Story(KNOWN["services"].module, config).looks(node(tmp_path), 2)
    assert not story.drained
    assert story.looks(node(tmp_path, states={"slurmd": "failed"}), 3).codes == ["services/inactive"]
    assert story.drained


# --- what looks broken is left out, with the reason


def left_out(found: Present, check: str) -> list[tuple[str, str]]:
    return [(left.key or left.setting or left.instance, left.why) for left in found.left_out if left.check == check]


def test_a_gpu_that_does_not_answer_leaves_the_count_out(tmp_path):
    found = seen(node(tmp_path, "gpu.3.lost = true"))
    assert "gpu_count" not in tables_of(found) or tables_of(found)["gpu_count"] == {}
    ((setting, why),) = left_out(found, "gpu_count")
    assert setting == "expected"
    assert "7 GPUs respond, but" in why
    assert f"# left out: expected: {why}" in text_of(found).splitlines()


def test_a_gpu_that_nvml_does_not_show_leaves_the_count_out(tmp_path):
    found = seen(node(tmp_path, "gpu.3.gone = true"))
    assert left_out(found, "gpu_count")[0][1] == "7 GPUs respond, but GPU 0000:61:00.0 is on PCI and does not respond"


def test_a_driver_that_does_not_answer_leaves_nothing_else_out(tmp_path):
    host = node(tmp_path, 'library = "mismatch"')
    with pytest.raises(Exception, match=r"[Mm]ismatch"):
        look(host, "gpu_count")
    assert look(host, "pcie_devices")


@pytest.mark.parametrize(
    ("scenario", "check"),
    [
        ("gpu.2.nvlink_inactive = [3]", "gpu_nvlink"),
        ("gpu.2.mig = true", "gpu_mig"),
        ('gpu.2.vbios = "1.2.3"', "gpu_software"),
    ],
)
def test_gpus_that_differ_are_no_norm(tmp_path, scenario, check):
    assert len(left_out(seen(node(tmp_path, scenario)), check)) >= 1


@pytest.mark.parametrize("call", ["nvmlDeviceGetVbiosVersion", "nvmlDeviceGetMigMode"])
def test_a_question_that_fails_leaves_out_what_it_was_for(tmp_path, call):
    found = seen(node(tmp_path, f'gpu.2.errors = {{ {call} = "Unknown" }}'))
    check = "gpu_software" if "Vbios" in call else "gpu_mig"
    assert "Unknown" in left_out(found, check)[0][1]
    assert tables_of(found)["gpu_count"] == {"expected": 8}


def test_an_mtu_that_cannot_be_read_is_left_out_and_the_speed_is_not(tmp_path):
    node(tmp_path)
    write(tmp_path, {"/sys/class/net/bond0/mtu": "N/A\n"})
    assert tables_of(seen(node(tmp_path)))["eth_link"]["expected_mbps"] == {"bond0": 100000}
    assert not tables_of(seen(node(tmp_path)))["eth_link"]["expected_mtu"]


def test_a_module_that_the_settings_name_and_that_is_not_loaded_is_left_out_with_the_reason(tmp_path):
    node(tmp_path)
    write(tmp_path, {"/sys/module/nvidia/initstate": "N/A\n"})
    found = look(node(tmp_path), "kernel_modules", expected=("nvidia-peermem", "mlx5_ib", "nvidia-uvm"))
    assert [item.key for item in found if isinstance(item, Entry)] == ["ib_uverbs", "rdma_cm"]
    assert [(item.key, item.why) for item in found if isinstance(item, LeftOut)] == [
        ("nvidia_peermem", "is being unloaded"),
        ("mlx5_ib", "is not loaded"),
        ("nvidia", "/sys/module/nvidia/initstate: not a state: 'N/A'"),
    ]


def test_a_systemctl_that_fails_leaves_the_services_out(tmp_path):
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
        look(host, "services")


def test_services_that_a_profile_wants_are_asked_for_by_either_name(tmp_path):
    from healthd.checks.services import OPTIONAL_PROPERTIES, PROPERTIES

    units = (*services.REQUIRED_UNITS, *services.WANTED_UNITS, "data.mount", "chrony.service")
    blocks = "\n\n".join(f"Id={u}\nActiveState=active\nSubState=x\nLoadState=loaded\nResult=" for u in units)
    argv = ("systemctl", "show", "-p", ",".join((*PROPERTIES, *OPTIONAL_PROPERTIES)), *units)
    host = Host(str(tmp_path), system=FakeSystem(str(tmp_path), {argv: ProgramResult(0, blocks, "")}))
    found = look(host, "services", wanted=("chrony", "slurmd"), required=("data.mount",))
    by_setting = {(item.setting, item.key) for item in found}
    assert {("wanted", "chrony.service"), ("required", "data.mount"), ("required", "munge.service")} <= by_setting
    assert ("wanted", "slurmd.service") in by_setting  # the settings' word goes before ours


def test_a_link_that_is_down_on_every_gpu_is_no_norm(tmp_path):
    scenario = "\n".join(f"gpu.{number}.nvlink_inactive = [3]" for number in range(8))
    assert left_out(seen(node(tmp_path, scenario)), "gpu_nvlink") == [("links", "17 of 18 links are active")]


def test_mig_devices_are_counted(tmp_path):
    scenario = "\n".join(f"gpu.{number}.mig = true" for number in range(8))
    assert tables_of(seen(node(tmp_path, scenario)))["gpu_mig"]["mode"] == "on"


@pytest.mark.parametrize(
    ("state", "physical", "why"),
    [
        ("1: DOWN", "2: Polling", "is DOWN/Polling"),
        ("2: INIT", "5: LinkUp", "is INIT/LinkUp"),
        ("N/A", "5: LinkUp", "mlx5_0/1: not a state: 'N/A'"),
    ],
)
def test_a_port_that_is_not_up_is_left_out(tmp_path, state, physical, why):
    node(tmp_path)
    infiniband(tmp_path, "mlx5_0", state, physical)
    found = seen(node(tmp_path))
    assert tables_of(found)["ib_link"]["expected_gbps"] == {"mlx5_3/1": 400}
    assert left_out(found, "ib_link") == [("mlx5_0/1", why)]


def test_an_interface_that_is_down_is_left_out_and_what_is_no_hardware_is_not_mentioned(tmp_path):
    node(tmp_path)
    interface(tmp_path, "eth2", "down")
    interface(tmp_path, "eth3", "nonsense")
    interface(tmp_path, "usb0", device="1-14.3:1.0")
    interface(tmp_path, "rep0")
    write(tmp_path, {"/sys/class/net/rep0/phys_port_name": "pf0vf3\n", "/sys/class/net/lo/type": "772\n"})
    write(tmp_path, {"/sys/class/net/docker0/type": "1\n", "/sys/class/net/docker0/operstate": "up\n"})
    interface(tmp_path, "ib0")
    write(tmp_path, {"/sys/class/net/ib0/type": "32\n"})
    found = seen(node(tmp_path))
    assert tables_of(found)["eth_link"]["expected_mbps"] == {"bond0": 100000}
    assert [name for name, _ in left_out(found, "eth_link")] == ["eth2", "eth3"]


@pytest.mark.parametrize("speed", ["-1", "4294967295", "N/A"])
def test_a_speed_that_is_not_told_is_any(tmp_path, speed):
    node(tmp_path)
    interface(tmp_path, "ens3", speed=speed)
    assert tables_of(seen(node(tmp_path)))["eth_link"]["expected_mbps"]["ens3"] == 0


def test_a_dead_device_is_left_out(tmp_path):
    node(tmp_path)
    (tmp_path / "sys/bus/pci/devices/0000:02:00.0/revision").write_text("0xff\n")
    found = seen(node(tmp_path))
    assert "0000:02:00.0" not in tables_of(found)["pcie_devices"]["expected"]
    assert left_out(found, "pcie_devices") == [("0000:02:00.0", "dead on the bus: reads return all ones")]


def test_a_disk_whose_controller_is_not_live_is_left_out(tmp_path):
    node(tmp_path)
    (tmp_path / "sys/class/nvme/nvme0/state").write_text("dead\n")
    found = seen(node(tmp_path))
    assert tables_of(found)["block_device"] == {"expected": ["naa.5000c500a1b2c3d4"]}
    assert left_out(found, "block_device") == [("S64GNE0R700123", "nvme0 is dead")]


def test_a_service_that_failed_is_left_out_and_one_that_is_not_installed_is_not_mentioned(tmp_path):
    found = seen(node(tmp_path, states={"slurmd": "failed", "nvidia_fabricmanager": "not-found"}))
    assert tables_of(found)["services"]["required"] == ["munge.service"]
    assert left_out(found, "services") == [("slurmd.service", "is failed")]


def test_a_device_file_that_is_none_is_left_out(tmp_path):
    host = Host(str(tmp_path), system=FakeSystem(str(tmp_path)))
    write(tmp_path, {"/dev/nvidia0": ""})
    left_out = LeftOut("device_nodes", "is not a character device", "expected", "/dev/nvidia0")
    assert look(host, "device_nodes") == [left_out]


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
def test_a_mount_that_comes_and_goes_is_never_written(transient):
    assert set(mounts(transient)) <= {"/"}


@pytest.mark.parametrize(
    "fstype",
    ["nfs", "nfs4", "lustre", "gpfs", "beegfs", "wekafs", "ceph", "cifs", "fuse.juicefs", "ext4", "xfs", "zfs"],
)
def test_a_mount_that_jobs_may_need_is_written(fstype):
    assert mounts(line("/data", fstype)) == {"/data": fstype}


def test_what_is_automounted_is_left_to_a_person():
    found = list(baseline_mounts(parse_all(f"{line('/home', 'autofs')}\n{line('/home/ann', 'nfs4')}")[0]))
    assert found == [LeftOut("mount", "automounted: add it manually if jobs need it", instance="/home/ann")]


def test_worth_watching_goes_on_after_an_automounted_file_system():
    text = f"{line('/home', 'autofs')}\n{line('/home/ann', 'nfs4')}\n{line('/scratch/data', 'lustre')}"
    assert mounts(text) == {"/scratch/data": "lustre"}


def test_settings_may_be_mounted_from_a_server():
    assert mounts(line("/etc/slurm", "nfs4")) == {"/etc/slurm": "nfs4"}


def test_subvolumes_are_no_bind_mounts():
    text = f"{line('/', 'btrfs', '0:30')}\n{line('/home', 'btrfs', '0:30')}"
    assert mounts(text) == {"/": "btrfs", "/home": "btrfs"}


def test_a_file_system_that_the_kernel_made_read_only_is_left_out():
    found = list(baseline_mounts(parse_all(line("/raid", "ext4", "9:0", options="ro"))[0]))
    assert found == [LeftOut("mount", "the kernel has made it read-only", instance="/raid")]


def test_a_point_that_is_mounted_over_is_what_it_is_last():
    assert mounts(f"{line('/data', 'ext4', '8:1')}\n{line('/data', 'nfs4')}") == {"/data": "nfs4"}


CAPTURED = ["mountinfo_gpu_node.txt", "mountinfo_nfs.txt", "mountinfo_nfs_clients.txt"]
EXPECTED = {
    "mountinfo_gpu_node.txt": {"/": "ext4"},
    "mountinfo_nfs.txt": {"/": "ext4", "/mnt/nfs/test": "nfs"},
    "mountinfo_nfs_clients.txt": {"/logs": "nfs", "/le/cmd": "nfs", "/public": "nfs"},
}


@pytest.mark.parametrize("name", CAPTURED)
def test_of_captured_nodes_the_lasting_mounts_are_written(name):
    found = mounts(captured(name))
    assert EXPECTED[name].items() <= found.items()
    assert not [point for point in found if point.startswith(("/run", "/proc", "/sys", "/dev", "/var/lib"))]


LINES = [each for name in CAPTURED for each in captured(name).splitlines()]
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
def test_any_list_of_mounts_gives_tables_that_can_be_used(lines):
    found = list(baseline_mounts(parse_all("\n".join(lines))[0]))
    entries = tuple(item for item in found if isinstance(item, Entry))
    loaded = settled(Present(entries, tuple(item for item in found if isinstance(item, LeftOut))))
    for (check, point), config in loaded.checks.items():
        if check == "mount":
            assert not re.match("/(run|proc|sys|dev|snap)(/|$)", point)
            assert config.fstype not in ("", "autofs", "overlay", "tmpfs", "squashfs")  # type: ignore[attr-defined]


# --- the file, whatever is in it


TEXTS = st.text() | st.sampled_from(['"', "\\", "\x7f", "\n", "\ud800", "# x", "é😀", "'''"])


@given(st.dictionaries(TEXTS, st.text()), TEXTS, TEXTS)
def test_any_text_comes_back_from_the_file(devices, note, why):
    def clean(text: str) -> str:
        return text.encode("utf-8", "replace").decode()

    assume(len({*map(clean, devices)}) == len(devices))
    entries = [Entry("device_nodes", "expected", mode, path, note=note) for path, mode in devices.items()]
    left = (LeftOut("device_nodes", why, "expected", note), LeftOut("gpu_count", why))
    text = as_toml(Present(tuple(entries), left), KNOWN, "a\nb")
    got = tomllib.loads(text.encode("utf-8", "replace").decode())["checks"]["device_nodes"]["expected"]
    assert got == {clean(path): clean(mode) for path, mode in devices.items()}


# --- what has changed


def changes(before: Present, after: Present) -> dict[str, tuple[str, str]]:
    return {change.setting: (change.was, change.now) for change in find_changes(tables_of(before), after, KNOWN)}


def test_nothing_has_changed_on_the_same_node(tmp_path):
    assert changes(seen(node(tmp_path)), seen(node(tmp_path))) == {}


def test_what_has_changed_is_said_with_what_was_and_what_is(tmp_path):
    before = seen(node(tmp_path))
    for what in ("a NIC", "a port", "half the bond", "CPUs", "a mount", "a device file"):
        LOSSES[what][3](tmp_path)
    infiniband(tmp_path, "mlx5_9")
    after = seen(node(tmp_path, "gpu.3.lost = true", {"slurmd": "failed"}))
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


def test_memory_may_differ_a_little(tmp_path):
    before = seen(node(tmp_path))
    rewrite("proc/meminfo", "2113447480", "2113000000")(tmp_path)
    assert changes(before, seen(node(tmp_path))) == {}


def test_what_a_person_wrote_there_is_no_drift_but_is_named_before_it_is_lost(tmp_path):
    found = seen(node(tmp_path))
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


def test_what_could_not_be_looked_at_is_unknown_and_not_gone(tmp_path):
    before = seen(node(tmp_path))
    kept = tuple(entry for entry in before.entries if entry.check != "ib_link")
    (first, second) = find_changes(
        tables_of(before), Present(kept, (LeftOut("ib_link", "no answer within 10 s"),)), KNOWN
    )
    assert (first.now, first.unknown, second.unknown) == ("no answer within 10 s", True, True)


# --- the command


@pytest.fixture
def tree(tmp_path: Path) -> list[str]:
    """Flags for a node on a tree. In a tree there is no systemctl, and its device files are none."""
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


def test_it_prints_a_baseline_and_writes_nothing(tree, capsys):
    assert main(["baseline", *tree]) == 0
    text = capsys.readouterr().out
    assert tomllib.loads(text)["checks"]["gpu_count"] == {"expected": 8}
    assert "# left out: /dev/nvidia0: is not a character device" in text
    assert not file_of(tree).exists()


def test_it_writes_whole_readable_files_and_checks_then_use_them(tree, capsys):
    assert main(["baseline", *tree, "--write"]) == 0
    assert stat.S_IMODE(file_of(tree).stat().st_mode) == 0o644
    assert [path.name for path in file_of(tree).parent.iterdir()] == ["baseline.toml"]
    out, err = capsys.readouterr()
    assert out == f"{file_of(tree)}: written\n"
    assert "left out: device_nodes /dev/nvidia0: " in err
    assert main(["config", "show", *tree]) == 0
    assert re.search(rf"checks\.gpu_count\.expected +8 +{file_of(tree)}", capsys.readouterr().out)
    assert main(["check", *tree, "gpu_count", "ib_link", "pcie_devices", "mount"]) == 0
    infiniband(Path(tree[1]), "mlx5_0", "1: DOWN", "3: Disabled")
    assert main(["check", *tree, "ib_link"]) == 2


def test_diff_is_0_without_and_1_with_changes(tree, capsys):
    assert main(["baseline", *tree, "--write"]) == 0
    assert main(["baseline", *tree, "--diff"]) == 0
    assert capsys.readouterr().out.endswith(f"{file_of(tree)}: nothing has changed\n")
    infiniband(Path(tree[1]), "mlx5_0", "1: DOWN", "3: Disabled")
    assert main(["baseline", *tree, "--diff"]) == 1
    assert re.search(r"checks\.ib_link\.expected_gbps mlx5_0/1 +400 +is DOWN/Disabled", capsys.readouterr().out)


def test_it_replaces_nothing_without_force(tree, capsys):
    assert main(["baseline", *tree, "--write"]) == 0
    before = file_of(tree).read_text()
    infiniband(Path(tree[1]), "mlx5_9")
    assert main(["baseline", *tree, "--write"]) == 1
    out, err = capsys.readouterr()
    assert "mlx5_9/1" in out
    assert "exists and differs; --force replaces it" in err
    assert file_of(tree).read_text() == before
    assert main(["baseline", *tree, "--write", "--force"]) == 0
    assert "mlx5_9/1" in file_of(tree).read_text()


def test_a_wrong_file_is_named_and_replaced_only_with_force(tree, capsys):
    file_of(tree).parent.mkdir()
    file_of(tree).write_text("[checks.gpu_cont]\n")
    for more in (["--diff"], ["--write"]):
        assert main(["baseline", *tree, *more]) == 64
        assert 'there is no check "gpu_cont"' in capsys.readouterr().err
    assert main(["baseline", *tree, "--write", "--force"]) == 0
    assert main(["baseline", *tree, "--diff"]) == 0


def test_without_a_file_there_is_nothing_to_compare(tree, capsys):
    assert main(["baseline", *tree, "--diff"]) == 3
    assert "no such file; healthd baseline --write creates it" in capsys.readouterr().err


def test_it_cannot_write_where_there_is_no_directory_to_be_had(tree, capsys):
    assert main(["baseline", *tree[:-1], "/proc/nowhere/b.toml", "--write"]) == 1
    assert "/proc/nowhere/b.toml: cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--write"], ["--diff"]])
def test_the_file_of_this_machine_is_not_touched_for_another_tree(tree, capsys, words):
    assert main(["baseline", *tree[:-2], *words]) == 64
    assert "name a file with --baseline" in capsys.readouterr().err


def test_what_goes_together_is_said(tree, capsys):
    assert main(["baseline", *tree, "--write", "--diff"]) == 64
    assert main(["baseline", *tree, "--force"]) == 64
    assert main(["baseline", *tree[:-1], "", "--diff"]) == 64


# --- what could not be read


SILENT = 'library = "mismatch"'  # NVML answers nobody
UNREAD = "left out: gpu_count: could not be read: "


def without_nvml(flags: list[str], tmp_path: Path) -> list[str]:
    (tmp_path / "silent.toml").write_text(f'profile = "dgx-h100"\n{SILENT}\n')
    return [*flags[:3], str(tmp_path / "silent.toml"), *flags[4:]]


def test_no_first_file_is_written_without_a_part_that_could_not_be_looked_at(tree, tmp_path, capsys):
    silent = without_nvml(tree, tmp_path)
    assert main(["baseline", *silent, "--write"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{file_of(tree)}: not written, because some parts could not be read: " in err
    assert UNREAD in err
    assert err.endswith("; --force omits them\n")
    assert err.count("\n") == 1
    assert not file_of(tree).exists()
    assert main(["baseline", *silent, "--write", "--force"]) == 0
    assert UNREAD in capsys.readouterr().err
    assert "expected" not in tomllib.loads(file_of(tree).read_text())["checks"]["gpu_count"]


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_what_the_file_says_of_such_a_part_is_kept_and_told(tree, tmp_path, capsys, force):
    assert main(["baseline", *tree, "--write"]) == 0
    before = tomllib.loads(file_of(tree).read_text())
    capsys.readouterr()
    assert main(["baseline", *without_nvml(tree, tmp_path), "--write", *force]) == 0
    out, err = capsys.readouterr()
    assert out == f"{file_of(tree)}: written\n"
    assert UNREAD in err
    assert "kept: checks.gpu_count.expected = 8\n" in err
    assert tomllib.loads(file_of(tree).read_text()) == before


def test_a_port_that_cannot_be_read_is_kept_and_one_that_is_down_is_not(tree, capsys):
    infiniband(Path(tree[1]), "mlx5_9")
    assert main(["baseline", *tree, "--write"]) == 0
    infiniband(Path(tree[1]), "mlx5_0", "no state at all")
    infiniband(Path(tree[1]), "mlx5_9", "1: DOWN", "3: Disabled")
    assert main(["baseline", *tree, "--write", "--force"]) == 0
    ports = tomllib.loads(file_of(tree).read_text())["checks"]["ib_link"]["expected_gbps"]
    assert ports == {"mlx5_0/1": 400, "mlx5_3/1": 400}
    assert "kept: checks.ib_link.expected_gbps mlx5_0/1 = 400" in capsys.readouterr().err


def test_a_baseline_is_for_programs_too(tree, tmp_path, capsys):
    def asked(*words: str) -> Any:
        main(["baseline", *words, "--json"])
        return json.loads(capsys.readouterr().out)

    shown = asked(*tree)
    assert (shown["file"], shown["written"], shown["kept"], shown["changes"]) == (None, False, [], [])
    count = {"check": "gpu_count", "instance": "", "setting": "expected", "key": "", "value": 8, "note": ""}
    assert [{**entry, "note": ""} for entry in shown["entries"] if entry["check"] == "gpu_count"] == [count]
    assert all(left["unseen"] is False for left in shown["left_out"])
    written = asked(*tree, "--write")
    assert (written["file"], written["written"]) == (str(file_of(tree)), True)
    silent = without_nvml(tree, tmp_path)
    (change,) = [c for c in asked(*silent, "--diff")["changes"] if c["setting"] == "checks.gpu_count.expected"]
    assert (change["was"], change["unknown"]) == ("8", True)
    kept = asked(*silent, "--write")["kept"]
    assert ("gpu_count", 8) in [(entry["check"], entry["value"]) for entry in kept]


# --- what hangs


def test_a_driver_that_hangs_costs_its_own_part_only(tree, monkeypatch, tmp_path, capsys):
    (tmp_path / "hang.toml").write_text('profile = "dgx-h100"\nhang = "nvmlDeviceGetName"\nhang_seconds = 20\n')
    monkeypatch.setattr(baseline_settings, "GPU_SECONDS", 1.0)
    assert main(["baseline", *tree[:2], "--fake-nvml", str(tmp_path / "hang.toml")]) == 0
    text = capsys.readouterr().out
    assert "# left out: could not be read: " in text
    tables = tomllib.loads(text)["checks"]
    assert tables["gpu_count"] == {}
    assert tables["ib_link"]["expected_gbps"]


def test_a_mount_that_does_not_answer_is_left_out(tree, monkeypatch, capsys):
    root = Path(tree[1])
    (root / "data").rmdir()
    assert main(["baseline", *tree]) == 0
    text = capsys.readouterr().out
    assert "# left out: mount /data: /data is not mounted" in text
    assert set(tomllib.loads(text)["checks"]["mount"]) == {"/", "/raid", "/software"}
    monkeypatch.setattr(baseline_settings, "INSTANCES_SECONDS", 0.0)
    assert main(["baseline", *tree]) == 0
    assert "# left out: mount /raid: not read: other instances took too long" in capsys.readouterr().out


# --- a site's check


SITE = """
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
def site(tree, tmp_path) -> Callable[[str], list[str]]:
    """Flags for a site with one check, by its text."""

    def make(text: str) -> list[str]:
        folder = tmp_path / "checks.d"
        folder.mkdir(mode=0o755, exist_ok=True)
        (folder / "shelf.py").write_text(text)
        (folder / "shelf.py").chmod(0o644)
        (tmp_path / "healthd.toml").write_text(f'checks_dir = "{folder}"\n')
        return [*tree, "--config", str(tmp_path / "healthd.toml")]

    tmp_path.chmod(0o755)
    return make


def test_a_sites_check_has_its_tables_behind_ours_and_what_does_not_answer_it_is_left_out(site, monkeypatch, capsys):
    monkeypatch.setattr(baseline_settings, "INSTANCE_SECONDS", 10.0)
    assert main(["baseline", *site(SITE)]) == 0
    text = capsys.readouterr().out
    assert list(tomllib.loads(text)["checks"])[-2:] == ["mount", "shelf"]
    assert tomllib.loads(text)["checks"]["shelf"] == {"front": {"disks": 24}}
    assert "# left out: shelf side: is dark\n# left out: shelf rear: no answer within 10 s\n" in text


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('Entry("shelf", "disks", 24', 'Entry("mount", "fstype", 24', "must be an Entry or a LeftOut of its BASELINE"),
        ('Entry("shelf", "disks", 24', 'Entry("shelf", "enforce", 24', "must be an Entry or a LeftOut"),
        ("24,", "b'24',", "bytes is not JSON serializable"),
        ('yield LeftOut("shelf", "is dark", instance="side")', "raise OSError(5, 'no shelf')", "no shelf"),
    ],
)
def test_what_a_sites_check_says_wrongly_leaves_it_out_and_no_other(site, capsys, old, new, why):
    assert main(["baseline", *site(SITE.replace(old, new))]) == 0
    text = capsys.readouterr().out
    assert re.search(f"# left out: shelf: could not be read: .*{why}", text)
    assert tomllib.loads(text)["checks"]["mount"]


def test_a_name_of_a_sites_own_is_no_wish_for_a_baseline(site, capsys):
    own = "BASELINE = 0.9\ndef baseline(points):\n    return 1 / 0\ndef run(host, config, past):\n    yield from ()\n"
    assert main(["baseline", *site(own)]) == 0
    assert "shelf" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("def baseline", "def base", "has BASELINE but no baseline(host, config)"),
        ('("disks",)', '("discs",)', 'BASELINE names "discs", which Config does not have'),
    ],
)
def test_a_baseline_that_cannot_be_is_refused_when_the_check_is_loaded(site, capsys, old, new, why):
    assert main(["baseline", *site(SITE.replace(old, new))]) == 64
    assert capsys.readouterr().err.endswith(f"shelf.py: {why}\n")
