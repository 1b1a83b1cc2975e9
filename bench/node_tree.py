"""A DGX H100 as files below a folder: what sysfs and procfs of such a node show, as far as healthd looks.

8 GPUs, 10 InfiniBand adapters and 10 NVMe disks, each behind a port of its own with AER counters; slots, mounts. PCI
addresses of the GPUs are those of the profile dgx-h100; texts as in the captures that tests/data names.
"""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from trees import PCI, aer, pci_device, write  # noqa: E402

GPUS = tuple(f"0000:{bus}:00.0" for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df"))
NICS = tuple(f"0000:{bus}:00.0" for bus in ("18", "29", "40", "4f", "5e", "82", "9a", "aa", "c0", "ce"))
DISKS = tuple(f"0000:{bus}:00.0" for bus in ("06", "07", "2a", "2b", "88", "89", "ab", "ac", "0b", "0c"))
MOUNTS = {"/data": "lustre", "/home": "nfs4"}
CONFIG = (
    """\
[checks.ib_link.expected_gbps]
"""
    + "".join(f'"mlx5_{i}/1" = 400\n' for i in range(len(NICS)))
    + "".join(f'[checks.mount."{point}"]\nfstype = "{fstype}"\n' for point, fstype in MOUNTS.items())
    + '[checks.exec.site]\ncommand = ["/bin/true"]\n'
)


def build(root: Path) -> None:
    for number, pci in enumerate((*GPUS, *NICS, *DISKS)):
        above = f"0000:{number // 6:02x}:{number % 6 + 1:02x}.1"
        if pci in GPUS:
            pci_device(root, pci, "0x030200", above, device="0x2330", revision="0xa1", power_state="D0")
            (root / PCI.lstrip("/") / pci / "driver").symlink_to("../../../../bus/pci/drivers/nvidia")
        elif pci in NICS:
            pci_device(root, pci, "0x020700", above, vendor="0x15b3", device="0x1021")
        else:
            pci_device(root, pci, "0x010802", above, vendor="0x144d", device="0xa80a")
        for device in (above, pci):
            write(root, {f"{PCI}/{device}/aer_dev_{kind}": aer(kind) for kind in ("correctable", "nonfatal", "fatal")})
            write(root, {f"{PCI}/{device}/current_link_width": "16\n", f"{PCI}/{device}/max_link_width": "16\n"})
        write(root, {f"/sys/bus/pci/slots/{number + 1}/address": f"{pci.partition('.')[0]}\n"})
    for number in range(400):  # bridges, uncore and the like, of which a node has hundreds
        pci_device(root, f"0001:{number // 32:02x}:{number % 32:02x}.0", "0x088000", vendor="0x8086")
    for number in range(len(NICS)):
        port = f"/sys/class/infiniband/mlx5_{number}/ports/1"
        write(root, {f"{port}/state": "4: ACTIVE\n", f"{port}/phys_state": "5: LinkUp\n"})
        write(root, {f"{port}/rate": "400 Gb/sec (4X NDR)\n", f"{port}/link_layer": "InfiniBand\n"})
    system = [f"{n} 22 0:{n} / /run/containers/{n} rw,relatime shared:{n} - overlay overlay rw" for n in range(40, 120)]
    wanted = [f"{200 + n} 22 0:{90 + n} / {at} rw,relatime - {MOUNTS[at]} fs rw" for n, at in enumerate(MOUNTS)]
    for point in MOUNTS:
        (root / point.lstrip("/")).mkdir(parents=True)
    write(
        root,
        {
            "/proc/self/mountinfo": "\n".join(["22 1 8:2 / / rw - ext4 /dev/sda2 rw", *system, *wanted]) + "\n",
            "/proc/sys/kernel/random/boot_id": "6e3c1f60-8d0e-4b60-9d2b-5f1f0c3c2a11\n",
            "/sys/module/nvidia/version": "580.105.08\n",
            "/sys/module/nvidia/refcnt": "300\n",
            "/sys/class/dmi/id/product_name": "DGXH100\n",
        },
    )
