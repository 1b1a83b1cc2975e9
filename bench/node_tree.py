"""A large DGX H100 as files below a folder, with the contents that healthd reads from sysfs and procfs on such a node.

8 GPUs, 10 InfiniBand adapters and 16 NVMe disks, each behind its own port with AER counters; 256 CPUs, 32 DIMMs,
2,000 processes of which 1,400 are kernel threads, mounts, an Ethernet bond. PCI addresses of the GPUs are those of the
fake machine dgx-h100. Texts are those of the captures that tests/data names.
"""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests/support")]

from trees import PCI, add_pci_device, aer_file, write  # noqa: E402

GPUS = tuple(f"0000:{bus}:00.0" for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df"))
NICS = tuple(f"0000:{bus}:00.0" for bus in ("18", "29", "40", "4f", "5e", "82", "9a", "aa", "c0", "ce"))
DISK_BUSES = ("06", "07", "2a", "2b", "88", "89", "ab", "ac", "0b", "0c", "31", "32", "71", "72", "b1", "b2")
DISKS = tuple(f"0000:{bus}:00.0" for bus in DISK_BUSES)
CPUS, DIMMS, PROCESSES, KERNEL_THREADS = 256, 32, 2000, 1400
MOUNTS = {"/data": "lustre", "/home": "nfs4"}
CONFIG = (
    """\
[checks.ib_link.expected_gbps]
"""
    + "".join(f'"mlx5_{i}/1" = 400\n' for i in range(len(NICS)))
    + "".join(f'[checks.mount."{point}"]\nfstype = "{fstype}"\n' for point, fstype in MOUNTS.items())
    + '[checks.exec.site]\ncommand = ["/bin/true"]\n'
)


IB_COUNTERS = (
    *("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "local_link_integrity_errors"),
    "excessive_buffer_overrun_errors",
)
STAT = (  # a sleeping process, as Linux 6 prints it: pid, name, parent
    "{} ({}) S {} 1 1 0 -1 4194560 9153 105 0 0 12 8 0 0 20 0 1 0 {} 23040000 3192 18446744073709551615 "
    "1 1 0 0 0 0 0 4096 671173123 0 0 0 17 3 0 0 0 0 0 0 0 0 0 0 0 0 0\n"
)


def gpus(number: int) -> tuple[str, ...]:
    """Return this many PCI addresses. The first addresses are those of a DGX H100."""
    return (*GPUS, *(f"0002:{more:02x}:00.0" for more in range(number)))[:number]


def build(root: Path, gpu_count: int = len(GPUS), disks: int = len(DISKS), process_count: int = PROCESSES) -> None:
    """Build the tree. Seven tenths of the `process_count` processes are kernel threads. 0 means no processes."""
    gpu_addresses = gpus(gpu_count)
    disk_addresses = (*DISKS, *(f"0003:{more:02x}:00.0" for more in range(disks)))[:disks]
    for number, pci in enumerate((*gpu_addresses, *NICS, *disk_addresses)):
        parent_port = f"0000:{number // 6:02x}:{number % 6 + 1:02x}.1"
        if pci in gpu_addresses:
            add_pci_device(root, pci, "0x030200", parent_port, device="0x2330", revision="0xa1", power_state="D0")
            (root / PCI.lstrip("/") / pci / "driver").symlink_to("../../../../bus/pci/drivers/nvidia")
        elif pci in NICS:
            add_pci_device(root, pci, "0x020700", parent_port, vendor="0x15b3", device="0x1021")
        else:
            add_pci_device(root, pci, "0x010802", parent_port, vendor="0x144d", device="0xa80a")
        for device in (parent_port, pci):
            write(
                root,
                {f"{PCI}/{device}/aer_dev_{kind}": aer_file(kind) for kind in ("correctable", "nonfatal", "fatal")},
            )
            for link_state in ("current", "max"):
                link = {"width": "16\n", "speed": "32.0 GT/s PCIe\n"}
                write(root, {f"{PCI}/{device}/{link_state}_link_{name}": text for name, text in link.items()})
        write(root, {f"/sys/bus/pci/slots/{number + 1}/address": f"{pci.partition('.')[0]}\n"})
    for number in range(400):  # bridges, uncore devices and others; a node has hundreds
        add_pci_device(root, f"0001:{number // 32:02x}:{number % 32:02x}.0", "0x088000", vendor="0x8086")
    for number in range(len(NICS)):
        port = f"/sys/class/infiniband/mlx5_{number}/ports/1"
        write(root, {f"{port}/state": "4: ACTIVE\n", f"{port}/phys_state": "5: LinkUp\n"})
        write(root, {f"{port}/rate": "400 Gb/sec (4X NDR)\n", f"{port}/link_layer": "InfiniBand\n"})
        write(root, {f"{port}/counters/{name}": "0\n" for name in IB_COUNTERS})
        (root / f"sys/class/infiniband/mlx5_{number}/device").symlink_to(root / PCI.lstrip("/") / NICS[number])
    container_lines = [
        f"{n} 22 0:{n} / /run/containers/{n} rw,relatime shared:{n} - overlay overlay rw" for n in range(40, 120)
    ]
    mount_lines = [f"{200 + n} 22 0:{90 + n} / {at} rw,relatime - {MOUNTS[at]} fs rw" for n, at in enumerate(MOUNTS)]
    for point in MOUNTS:
        (root / point.lstrip("/")).mkdir(parents=True)
    write(
        root,
        {
            "/proc/self/mountinfo": "\n".join(["22 1 8:2 / / rw - ext4 /dev/sda2 rw", *container_lines, *mount_lines])
            + "\n",
            "/proc/sys/kernel/random/boot_id": "6e3c1f60-8d0e-4b60-9d2b-5f1f0c3c2a11\n",
            "/sys/module/nvidia/version": "580.105.08\n",
            "/sys/module/nvidia/refcnt": "300\n",
            "/sys/class/dmi/id/product_name": "DGXH100\n",
        },
    )
    write_host(root, disks)
    processes(root, process_count)


def write_host(root: Path, disks: int = len(DISKS)) -> None:
    """Write CPUs, DIMMs, disks, network interfaces and memory."""
    cpu, edac = "/sys/devices/system/cpu", "/sys/devices/system/edac/mc"
    files = {f"{cpu}/online": f"0-{CPUS - 1}\n", "/proc/meminfo": "MemTotal:       2113451320 kB\n"}
    for number in range(CPUS):
        first = 0 if number % (CPUS // 2) < CPUS // 4 else CPUS // 4  # two packages, two threads per core
        second = first + CPUS // 2
        last = CPUS // 4 - 1
        files[f"{cpu}/cpu{number}/topology/core_siblings_list"] = f"{first}-{first + last},{second}-{second + last}\n"
        files[f"{cpu}/cpu{number}/thermal_throttle/package_throttle_count"] = "0\n"
        files[f"{cpu}/cpufreq/policy{number}/scaling_governor"] = "performance\n"
    for number in range(DIMMS):
        controller = f"{edac}/mc{number // 2}"
        files |= {
            f"{controller}/{name}": "0\n" for name in ("ue_count", "ce_count", "ue_noinfo_count", "ce_noinfo_count")
        }
        files |= {f"{controller}/dimm{number % 2}/{name}": "0\n" for name in ("dimm_ce_count", "dimm_ue_count")}
        files[f"{controller}/dimm{number % 2}/dimm_label"] = f"CPU_SrcID#{number // 16}_MC#{number // 2 % 8}\n"
    for number in range(disks):
        files[f"/sys/class/nvme/nvme{number}/state"] = "live\n"
        files[f"/sys/class/nvme/nvme{number}/serial"] = f"S64GNE0R{number:06}\n"
        files[f"/sys/block/nvme{number}n1/wwid"] = f"eui.36344730523{number:05}\n"
    for name, mbps in (("bond0", 200_000), ("ens6f0", 100_000), ("ens6f1", 100_000)):
        net = {"operstate": "up", "carrier": "1", "speed": str(mbps), "carrier_changes": "2"}
        files |= {f"/sys/class/net/{name}/{file}": f"{text}\n" for file, text in net.items()}
    files["/sys/class/net/bond0/bonding/slaves"] = "ens6f0 ens6f1\n"
    files["/proc/uptime"] = "864000.00 200000000.00\n"
    write(root, files)


def processes(root: Path, count: int = PROCESSES) -> None:
    if not count:
        return
    kernel_thread_count = count * KERNEL_THREADS // PROCESSES
    files = {"/proc/2/stat": STAT.format(2, "kthreadd", 0, 0)}
    files["/proc/2/task/2/children"] = " ".join(map(str, range(3, 3 + kernel_thread_count))) + " \n"
    for pid in (1, *range(3, count + 1)):
        is_kernel_thread = 2 < pid < 3 + kernel_thread_count
        name, parent = (f"kworker/{pid}:1", 2) if is_kernel_thread else (f"python3 {pid}", 1)
        files[f"/proc/{pid}/stat"] = STAT.format(pid, name, parent, pid * 10)
    write(root, files)
