"""inventory: hardware of a simulated DGX and of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import scenarios
from hypothesis import given
from hypothesis import strategies as st
from trees import add_pci_device, write

from healthd.common.model import Disk, Gpu, LocalMount, PciDevice
from healthd.host.disks import nvme_controller, whole_disk
from healthd.host.host import PCI_ADDRESS, Host, upstream_port
from healthd.host.inventory import collect, complete_gpus, device_kind, pci_address


@pytest.fixture
def dgx(tmp_path: Path) -> str:
    root = tmp_path / "tree"
    add_pci_device(root, "0000:1b:00.0", "0x030200", port="0000:1a:01.0", device="0x2330")
    add_pci_device(root, "0000:07:00.0", "0x068000", device="0x22a3")
    add_pci_device(root, "0000:18:00.0", "0x020700", vendor="0x15b3", device="0x1021")
    add_pci_device(root, "0000:29:00.0", "0x020000", vendor="0x15b3", device="0x101d")
    add_pci_device(root, "0000:ab:00.0", "0x010802", vendor="0x144d", device="0xa824")
    write(
        root,
        {
            "/sys/bus/pci/slots/1/address": "0000:1b:00\n",
            "/sys/bus/pci/slots/2/address": "0000:cc:00\n",
            "/sys/class/dmi/id/product_name": "DGXH100\n",
            "/sys/module/nvidia/version": "550.54.15\n",
        },
    )
    return str(root)


def test_collect_returns_devices_with_address_kind_port_and_slot(dgx: str) -> None:
    inventory = collect(Host(dgx), gpus=False)
    assert {device.pci: device.kind for device in inventory.devices} == {
        "0000:07:00.0": "nvswitch",
        "0000:18:00.0": "nic",
        "0000:1b:00.0": "gpu",
        "0000:29:00.0": "nic",
        "0000:ab:00.0": "nvme",
    }
    gpu = next(device for device in inventory.devices if device.kind == "gpu")
    assert gpu == PciDevice("0000:1b:00.0", "0x10de", "0x2330", "0x030200", "gpu", "0000:1a:01.0", "1", "")
    assert inventory.dmi_product == "DGXH100"


def test_collect_without_gpus_does_not_open_nvml(dgx: str) -> None:
    def refuse() -> None:
        raise AssertionError("NVML was opened")

    inventory = collect(Host(dgx, refuse), gpus=False)  # type: ignore[arg-type]
    assert inventory.gpus == ()
    assert inventory.driver_version == "550.54.15"


def test_collect_returns_gpus_with_names_from_nvml(dgx: str, tmp_path: Path) -> None:
    inventory = collect(scenarios(tmp_path)(root=dgx), gpus=True)
    assert len(inventory.gpus) == 8
    assert all(isinstance(gpu, Gpu) and gpu.uuid.startswith("GPU-") and gpu.name for gpu in inventory.gpus)
    assert [gpu.minor for gpu in inventory.gpus] == list(range(8))
    assert inventory.driver_version


def test_collect_skips_unreadable_minor_number_of_one_gpu(dgx: str, tmp_path: Path) -> None:
    broken = '[gpu.3.errors]\nnvmlDeviceGetMinorNumber = "Unknown"\n'
    found = collect(scenarios(tmp_path)(broken, root=dgx), gpus=True).gpus
    assert [gpu.minor for gpu in found] == [0, 1, 2, None, 4, 5, 6, 7]


def test_collect_returns_a_distinct_serial_number_for_each_gpu(dgx: str, tmp_path: Path) -> None:
    found = [gpu.serial for gpu in collect(scenarios(tmp_path)(root=dgx), gpus=True).gpus]
    assert len(set(found)) == 8
    assert all(len(serial) == 13 and serial.isdecimal() for serial in found)


@pytest.mark.parametrize(
    "setting", ['unsupported = ["nvmlDeviceGetSerial"]', 'errors = {nvmlDeviceGetSerial = "Unknown"}']
)
def test_collect_leaves_out_a_serial_number_that_cannot_be_read(dgx: str, tmp_path: Path, setting: str) -> None:
    found = collect(scenarios(tmp_path)(f"[gpu.3]\n{setting}\n", root=dgx), gpus=True).gpus
    assert [gpu.index for gpu in found if not gpu.serial] == [3]
    assert all(gpu.uuid for gpu in found)


def test_collect_with_mig_returns_the_serial_number_of_the_whole_gpu(dgx: str, tmp_path: Path) -> None:
    before = collect(scenarios(tmp_path)(root=dgx), gpus=True).gpus
    found = collect(scenarios(tmp_path)("[gpu.3]\nmig = true\nmig_devices = 2\n", root=dgx), gpus=True).gpus
    assert [gpu.serial for gpu in found] == [gpu.serial for gpu in before]
    assert len(found[3].mig) == 2


def test_complete_gpus_keeps_a_serial_number_only_for_the_same_gpu() -> None:
    known = (Gpu("0000:1b:00.0", 0, "GPU-a", serial="1"), Gpu("0000:43:00.0", 1, serial="2"))
    unread = (Gpu("0000:1b:00.0", 0, "GPU-a", name="H100"), Gpu("0000:43:00.0", 1))
    assert [gpu.serial for gpu in complete_gpus(known, unread)] == ["1", ""]
    assert complete_gpus(known, unread)[0].name == "H100"
    assert complete_gpus(known, (Gpu("0000:1b:00.0", 0, "GPU-b"), known[1]))[0].serial == ""
    assert complete_gpus(known, (Gpu("0000:1b:00.0", 0, "GPU-b", serial="3"), known[1]))[0].serial == "3"


def test_complete_gpus_includes_a_swap_while_another_gpu_is_missing() -> None:
    previous = tuple(Gpu(f"0000:{n}1:00.0", n, f"GPU-{n}", "H100", n, serial=str(n)) for n in range(3))
    swapped = Gpu("0000:21:00.0", 1, "GPU-9", "H200", 1, serial="9")
    found = complete_gpus(previous, (previous[0], swapped))
    assert found[:2] == previous[:2]
    assert found[2] == Gpu("0000:21:00.0", 2, "GPU-9", "H200", 2, serial="9")


def test_collect_without_nvml_returns_the_other_devices(dgx: str, tmp_path: Path) -> None:
    host = scenarios(tmp_path)('library = "driver_not_loaded"', root=dgx)
    inventory = collect(host, gpus=True)
    assert inventory.gpus == ()
    assert len(inventory.devices) == 5


def test_collect_returns_empty_inventory_of_empty_tree(tmp_path: Path) -> None:
    inventory = collect(Host(str(tmp_path)), gpus=True)
    assert (inventory.gpus, inventory.devices, inventory.driver_version) == ((), (), "")


def test_collect_reads_this_machine() -> None:
    inventory = collect(Host("/"), gpus=True)
    assert all(PCI_ADDRESS.fullmatch(device.pci) for device in inventory.devices)


def test_collect_omits_device_that_vanishes_during_read(dgx: str) -> None:
    Path(dgx, "sys/bus/pci/devices/0000:29:00.0/class").unlink()
    assert "0000:29:00.0" not in {device.pci for device in collect(Host(dgx), gpus=False).devices}


MOUNTS = """\
21 0 253:0 / / rw,relatime shared:1 - ext4 /dev/mapper/vg-root rw
22 21 259:2 / /boot rw,relatime - ext4 /dev/nvme0n1p2 rw
23 21 0:45 / /scratch rw,relatime - btrfs /dev/sda rw
24 21 0:45 /home /home rw,relatime - btrfs /dev/sda rw
25 21 9:0 / /local rw,relatime - xfs /dev/md0 rw
26 21 253:9 / /var/lib/kubelet/pods/1/mount rw,relatime - ext4 /dev/mapper/pvc rw
27 21 7:5 / /mnt/test rw,relatime - xfs /dev/loop5 rw
28 21 0:50 / /data rw,relatime - nfs4 nas:/data rw
"""


@pytest.fixture
def host_with_disks(tmp_path: Path) -> Host:
    """A host with the root on LVM on an NVMe partition, a RAID of two disks, a SATA disk and a network disk."""
    root = tmp_path / "tree"
    nvme, block, names = "/sys/class/nvme", "/sys/block", "/sys/class/block"
    files = {
        "/proc/self/mountinfo": MOUNTS,
        f"{nvme}/nvme9/transport": "tcp",
        f"{nvme}/nvme9/address": "traddr=10.0.0.1",
    }
    for number in range(3):
        files[f"{nvme}/nvme{number}/transport"] = "pcie\n"
        files[f"{nvme}/nvme{number}/address"] = f"0000:5{number}:00.0\n"
        files[f"{nvme}/nvme{number}/serial"] = f"S{number}   \n"
    files |= {f"{block}/md0/size": "8", f"{block}/loop5/size": "8", f"{block}/dm-0/size": "8"}
    files |= {f"{names}/dm-0/slaves/nvme0n1p3/size": "8", f"{names}/md0/slaves/nvme1n1/size": "8"}
    files |= {f"{names}/md0/slaves/nvme2n1/size": "8"}
    host = write(root, files)
    links = {
        f"{block}/sda": "../devices/pci0000:00/0000:00:17.0/ata1/host0/target0:0:0/0:0:0:0/block/sda",
        f"{block}/nvme0n1": "../devices/pci0000:00/0000:00:01.0/0000:50:00.0/nvme/nvme0/nvme0n1",
        "/sys/dev/block/253:0": "../../devices/virtual/block/dm-0",
        "/sys/dev/block/259:2": "../../devices/pci0000:00/0000:50:00.0/nvme/nvme0/nvme0n1/nvme0n1p2",
        "/sys/dev/block/9:0": "../../devices/virtual/block/md0",
    }
    write(
        root, {"/sys/devices/pci0000:00/0000:00:17.0/ata1/host0/target0:0:0/0:0:0:0/block/sda/device/wwid": "naa.5\n"}
    )
    for path, target in links.items():
        (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        (root / path[1:]).symlink_to(target)
    return host


def test_collect_returns_disks_with_name_card_and_serial(host_with_disks: Host) -> None:
    assert collect(host_with_disks, gpus=False).disks == (
        Disk("nvme0", "0000:50:00.0", ("S0",)),
        Disk("nvme1", "0000:51:00.0", ("S1",)),
        Disk("nvme2", "0000:52:00.0", ("S2",)),
        Disk("nvme9"),
        Disk("nvme0n1", "0000:50:00.0"),
        Disk("sda", "0000:00:17.0", ("naa.5",)),
    )


def test_collect_returns_own_mounts_with_disks(host_with_disks: Host) -> None:
    assert collect(host_with_disks, gpus=False).mounts == (
        LocalMount("/", "ext4", "dm-0", ("nvme0n1",)),
        LocalMount("/boot", "ext4", "nvme0n1p2", ("nvme0n1",)),
        LocalMount("/scratch", "btrfs", "sda", ("sda",)),
        LocalMount("/local", "xfs", "md0", ("nvme1n1", "nvme2n1")),
    )


def redundant_disks(root: Path, device: str, files: dict[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (disks, redundant disks) of "/" on `device`. `files`: paths below /sys/class/block."""
    mounts = {"/proc/self/mountinfo": f"21 0 0:45 / / rw - ext4 /dev/{device} rw\n"}
    host = write(root, mounts | {f"/sys/class/block/{path}": text for path, text in files.items()})
    (mount,) = collect(host, gpus=False).mounts
    return mount.disks, mount.redundant


def layers(device: str, *below: str) -> dict[str, str]:
    return {f"{device}/slaves/{name}/size": "8" for name in below}


@pytest.mark.parametrize("level", ["raid1", "raid4", "raid5", "raid6", "raid10"])
def test_disks_of_raid_with_copies_are_redundant(tmp_path: Path, level: str) -> None:
    files = layers("md0", "sda1", "sdb1") | {"md0/md/level": f"{level}\n", "md0/md/degraded": "1\n"}
    assert redundant_disks(tmp_path, "md0", files) == (("sda", "sdb"), ("sda", "sdb"))


@pytest.mark.parametrize("level", ["raid0", "linear", ""])
def test_disks_of_raid_without_copies_are_not_redundant(tmp_path: Path, level: str) -> None:
    files = layers("md0", "sda1", "sdb1") | {"md0/md/level": level}
    assert redundant_disks(tmp_path, "md0", files) == (("sda", "sdb"), ())


def test_multipath_is_redundant_with_several_paths(tmp_path: Path) -> None:
    uuid = {"dm-1/dm/uuid": "mpath-3600508b400105e210000900000490000\n"}
    files = layers("dm-0", "dm-1") | layers("dm-1", "sda", "sdb") | uuid | {"dm-0/dm/uuid": "LVM-x\n"}
    assert redundant_disks(tmp_path / "two", "dm-0", files) == (("sda", "sdb"), ("sda", "sdb"))
    assert redundant_disks(tmp_path / "one", "dm-1", layers("dm-1", "sda") | uuid) == (("sda",), ())


@pytest.mark.parametrize(("part", "copies"), [("rmeta", True), ("mimage", True), ("rimage", False), ("data", False)])
def test_lvm_raid_and_mirror_are_redundant_and_plain_volume_is_not(tmp_path: Path, part: str, copies: bool) -> None:
    files = layers("dm-0", "dm-1", "dm-2") | layers("dm-1", "sda") | layers("dm-2", "sdb")
    files |= {"dm-1/dm/name": f"vg-lv_{part}_0\n", "dm-2/dm/name": f"vg-lv_{part}_1\n"}
    assert redundant_disks(tmp_path, "dm-0", files) == (("sda", "sdb"), ("sda", "sdb") if copies else ())


def test_disk_used_alone_by_one_layer_is_not_redundant(tmp_path: Path) -> None:
    files = layers("dm-0", "md0", "sda2") | layers("md0", "sda1", "sdb1") | {"md0/md/level": "raid1"}
    assert redundant_disks(tmp_path, "dm-0", files) == (("sda", "sdb"), ("sdb",))


def test_two_parts_of_one_disk_are_no_copies(tmp_path: Path) -> None:
    files = layers("md0", "sda1", "sda2") | {"md0/md/level": "raid1"}
    assert redundant_disks(tmp_path, "md0", files) == (("sda",), ())


def test_circular_layers_end(tmp_path: Path) -> None:
    mounts = "21 0 253:0 / / rw - ext4 /dev/dm-0 rw\n"
    files = {"/proc/self/mountinfo": mounts, "/sys/class/block/dm-0/slaves/dm-0/size": "8"}
    assert collect(write(tmp_path, files), gpus=False).mounts == (LocalMount("/", "ext4", "dm-0", ("dm-0",)),)


@pytest.mark.parametrize(
    ("name", "disk", "card"),
    [
        ("nvme0n1p1", "nvme0n1", "nvme0"),
        ("nvme10n2", "nvme10n2", "nvme10"),
        ("nvme0c1n1", "nvme0n1", "nvme0"),
        ("sda3", "sda", ""),
        ("sdaa", "sdaa", ""),
        ("vda1", "vda", ""),
        ("mmcblk0p2", "mmcblk0", ""),
        ("md127p1", "md127", ""),
        ("dm-17", "dm-17", ""),
        ("", "", ""),
    ],
)
def test_whole_disk_and_nvme_controller_of_a_name(name: str, disk: str, card: str) -> None:
    assert (whole_disk(name), nvme_controller(name)) == (disk, card)


@pytest.mark.parametrize(
    ("link", "port"),
    [
        ("../../../devices/pci0000:00/0000:00:01.0/0000:01:00.0", "0000:00:01.0"),
        ("../../../devices/pci0000:00/0000:00:01.0", ""),
        ("../../../devices/pci0000:64/0000:64:00.5/pci10000:01/10000:01:00.0/10000:02:00.0", "10000:01:00.0"),
        ("", ""),
    ],
)
def test_upstream_port_is_the_directory_above(link: str, port: str) -> None:
    assert upstream_port(link) == port


@pytest.mark.parametrize(
    ("path", "pci"),
    [
        ("/devices/pci0000:00/0000:00:01.0/0000:3b:00.0", "0000:3b:00.0"),
        ("/devices/pci0000:00/0000:00:01.0/0000:3b:00.0/net/ens1", "0000:3b:00.0"),
        ("/devices/pci0000:00/0000:00:03.0/virtio1/net/eth0", "0000:00:03.0"),
        ("/devices/virtual/net/veth1", ""),
    ],
)
def test_pci_address_of_a_device_path(path: str, pci: str) -> None:
    assert pci_address(path) == pci


@given(st.text(), st.text())
def test_device_kind_accepts_any_text(vendor: str, pci_class: str) -> None:
    assert device_kind(vendor, pci_class) in ("gpu", "nvswitch", "nic", "nvme", "other")


DOMAIN = "4f9a1b2c-0000-0000-0000-00000000000a"
IN_DOMAIN = f'fabric_state = 3\nfabric_cluster = "{DOMAIN}"\n'
FABRIC_CALLS = ("nvmlDeviceGetGpuFabricInfo", "nvmlDeviceGetGpuFabricInfoV")


@pytest.mark.parametrize(
    ("all_gpus", "third_gpu", "expected"),
    [
        (IN_DOMAIN, IN_DOMAIN, DOMAIN),
        ("fabric_state = 3\n", "fabric_state = 3\n", ""),  # the fabric ends at the baseboard
        ("fabric_state = 0\n", "fabric_state = 0\n", ""),
        (IN_DOMAIN, "fabric_state = 2\n", None),
        (IN_DOMAIN, "fabric_state = 0\n", DOMAIN),
        (IN_DOMAIN, f"{IN_DOMAIN}fabric_status = 23\n", DOMAIN),
        (IN_DOMAIN, IN_DOMAIN.replace(DOMAIN, DOMAIN[:-1] + "b"), ""),
        (IN_DOMAIN, "errors = {" + ", ".join(f'{call} = "Unknown"' for call in FABRIC_CALLS) + "}\n", None),
    ],
)
def test_collect_returns_nvlink_domain_of_its_gpus(
    dgx: str, tmp_path: Path, all_gpus: str, third_gpu: str, expected: str | None
) -> None:
    scenario = "".join(f"[gpu.{n}]\n{third_gpu if n == 2 else all_gpus}" for n in range(8))
    assert collect(scenarios(tmp_path)(scenario, root=dgx), gpus=True).domain == expected


def test_collect_without_driver_or_gpus_returns_no_domain(dgx: str, tmp_path: Path) -> None:
    assert collect(scenarios(tmp_path)('library = "driver_not_loaded"', root=dgx), gpus=True).domain is None
    assert collect(Host(dgx), gpus=False).domain is None
