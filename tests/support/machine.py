"""A whole DGX H100 as files below a folder, with a fake NVML and systemd: everything that the built-in checks read,
and settings that expect all of it. It is small: two network cards, one disk, one DIMM, four CPUs."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

from fake_gpus import fake_pci_gpus
from trees import PCI, FakeSystem, add_gpus, add_pci_device, aer_file, replace, write

from healthd.host.host import Host
from healthd.host.program import ProgramResult
from healthd.host.system import FileStat, FileSystem, KernelClock
from healthd.nvidia.fake_nvml import open_fake

GPUS = fake_pci_gpus("dgx-h100")
NICS = ("0000:18:00.0", "0000:29:00.0")
DISK = "0000:06:00.0"
PORT = "/sys/class/infiniband/mlx5_{}/ports/1/{}"
NVME = "/sys/class/nvme/nvme0"
EDAC = "/sys/devices/system/edac/mc/mc0"
REQUIRED, WANTED = ("slurmd", "munge"), ("chronyd",)
SHOW = ("systemctl", "show", "-p", "Id,ActiveState,SubState,LoadState,Result,Job,NRestarts")
ROOT = "22 1 8:2 / / rw - ext4 /dev/sda2 rw"
TMP = "23 22 8:3 / /tmp rw - ext4 /dev/sda3 rw"
DATA = "24 22 0:40 / /data rw,relatime - nfs4 fs:/data rw,hard"
KERNEL_COUNTERS = (
    *("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "local_link_integrity_errors"),
    "excessive_buffer_overrun_errors",
)
EXPECTED = {
    "gpu_count": {"expected": 8},
    "gpu_nvlink": {"links": 18},
    "gpu_mig": {"mode": "off"},
    "gpu_pcie": {"lanes": 16},
    "gpu_software": {"driver_version": "580.105.08", "vbios": "96.00.99.00.01"},
    "pcie_devices": {"expected": {**dict.fromkeys(NICS, "15b3:1021"), DISK: "144d:a80a"}},
    "ib_link": {"expected_gbps": {"mlx5_0/1": 400.0, "mlx5_1/1": 400.0}},
    "ib_flap": {"ports": ("mlx5_0/1", "mlx5_1/1")},
    "ib_errors": {"ports": ("mlx5_0/1", "mlx5_1/1")},
    "eth_link": {"expected_mbps": {"eth0": 100_000}},
    "block_device": {"expected": ("S64GNE0R000001",)},
    "memory_size": {"expected_bytes": 2 << 40},
    "cpu": {"expected": 4},
    "kernel_modules": {"expected": ("nvidia",)},
    "device_nodes": {"expected": {f"/dev/nvidia{name}": "0666" for name in ("ctl", *range(8))}},
    "services": {"required": REQUIRED, "wanted": WANTED},
    "mount": {"name": "/data", "fstype": "nfs"},
    "disk_space": {"paths": ("/", "/tmp")},
}


class System(FakeSystem):
    """A fake system: free space by mount point (half by default), and the errno of statvfs by mount point.

    Files below /dev are device files of mode 0666.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.free: dict[str, float] = {}
        self.fails: dict[str, int] = {}

    def stat(self, path: str) -> FileStat:
        found = super().stat(path)
        return found._replace(mode=stat.S_IFCHR | 0o666) if path.startswith("/dev/") else found

    def statvfs(self, path: str) -> FileSystem:
        if path in self.fails:
            raise OSError(self.fails[path], os.strerror(self.fails[path]))
        free = int(1e6 * self.free.get(path, 0.5))
        return FileSystem(1_000_000, free, 1_000_000, 500_000)


class Machine:
    """The node as it is now: change its parts, then `now()` returns a Host that reads them.

    fake: the fake machine with its GPUs, `count` of them. device: the PCI id of the GPUs in sysfs.
    """

    def __init__(self, folder: Path, fake: str = "dgx-h100", count: int = len(GPUS), device: str = "") -> None:
        self.fake, self.addresses = fake, fake_pci_gpus(fake)[:count]
        self.root = folder / "root"
        self.system = System(self.root)
        self.scenario = folder / "gpus.toml"
        self.up_seconds = 10 * 86400
        self.units = dict.fromkeys((*REQUIRED, *WANTED), "active running")
        self.clock = KernelClock(True, 0.0001, 0.01)
        self.gpus()
        add_gpus(self.root, self.addresses, **({"device": device} if device else {}))
        for pci in NICS:
            add_pci_device(self.root, pci, "0x020700", "0000:00:01.1", vendor="0x15b3", device="0x1021")
        add_pci_device(self.root, DISK, "0x010802", "0000:00:02.1", vendor="0x144d", device="0xa80a")
        for pci in (*self.addresses, *NICS, DISK, "0000:00:01.1", "0000:00:02.1"):
            self.aer(pci)
            link = {"width": "16\n", "speed": "32.0 GT/s PCIe\n"}
            self.write({f"{PCI}/{pci}/{which}_link_{n}": t for which in ("current", "max") for n, t in link.items()})
        for port in (0, 1):
            self.port(port)
            self.count(port, **dict.fromkeys(KERNEL_COUNTERS, 0))
        self.ethernet()
        self.memory()
        self.mounts()
        for point in ("data", "tmp"):
            (self.root / point).mkdir()
        cpu = "/sys/devices/system/cpu"
        self.write(
            {
                f"{cpu}/online": "0-3\n",
                **{f"{cpu}/cpufreq/policy{n}/scaling_governor": "performance\n" for n in range(4)},
                "/proc/1/stat": f"1 (systemd) S {' '.join(['0'] * 48)}\n",
                "/proc/sys/kernel/random/boot_id": "6e3c1f60-8d0e-4b60-9d2b-5f1f0c3c2a11\n",
                "/proc/sys/fs/file-nr": "9504\t0\t9223372036854775807\n",
                f"{NVME}/state": "live\n",
                f"{NVME}/serial": "S64GNE0R000001\n",
                "/sys/block/nvme0n1/wwid": "eui.1\n",
                "/sys/module/nvidia/refcnt": "300\n",
                **{f"/sys/module/{name}/initstate": "live\n" for name in ("nvidia", "nvidia_uvm")},
                **{f"/dev/nvidia{name}": "" for name in ("ctl", *range(8), "-uvm", "-uvm-tools")},
            }
        )

    def write(self, files: dict[str, str]) -> None:
        write(self.root, files)

    def now(self) -> Host:
        self.write({"/proc/uptime": f"{self.up_seconds}.00 1.00\n"})
        self.system._programs = {(*SHOW, *self.units): ProgramResult(0, self.systemctl_output(), "")}
        self.system._clock = self.clock
        return Host(str(self.root), lambda: open_fake(str(self.scenario)), system=self.system)

    def systemctl_output(self) -> str:
        """Return the output of systemctl for the units."""
        return "\n".join(
            f"Result=success\nNRestarts=0\nId={unit}.service\nLoadState=loaded\nActiveState={state.split()[0]}\n"
            f"SubState={state.split()[1]}\nJob={''.join(state.split()[2:])}\n"
            for unit, state in self.units.items()
        )

    # Parts of the node. Without arguments, each method makes its part healthy.

    def gpus(self, text: str = "") -> None:
        lines = f'profile = "{self.fake}"\npci = {json.dumps(self.addresses)}\n{text}\n'
        replace(self.scenario.with_suffix(".new"), self.scenario, lines.encode())

    def all_gpus(self, text: str) -> None:
        self.gpus("".join(f"[gpu.{index}]\n{text}\n" for index in range(len(self.addresses))))

    def aer(self, pci: str, **correctable: int) -> None:
        counts = {"correctable": correctable, "nonfatal": {}, "fatal": {}}
        self.write({f"{PCI}/{pci}/aer_dev_{kind}": aer_file(kind, **counts[kind]) for kind in counts})

    def port(self, number: int, up: bool = True) -> None:
        texts = ("4: ACTIVE", "5: LinkUp") if up else ("1: DOWN", "2: Polling")
        self.write({PORT.format(number, "state"): f"{texts[0]}\n", PORT.format(number, "phys_state"): f"{texts[1]}\n"})
        self.write({PORT.format(number, "rate"): "400 Gb/sec (4X NDR)\n"})

    def count(self, number: int, **counters: int) -> None:
        self.write({PORT.format(number, f"counters/{name}"): f"{value}\n" for name, value in counters.items()})

    def ethernet(self, up: bool = True, changes: int = 2) -> None:
        files = {"operstate": "up" if up else "down", "speed": "100000", "carrier_changes": str(changes)}
        self.write({f"/sys/class/net/eth0/{name}": f"{text}\n" for name, text in files.items()})

    def memory(self, gib: int = 2048, corrected: int = 0, uncorrected: int = 0) -> None:
        counts = {"ue_count": uncorrected, "ue_noinfo_count": 0, "ce_count": corrected, "ce_noinfo_count": 0}
        dimm = {"dimm_ce_count": str(corrected), "dimm_ue_count": str(uncorrected), "dimm_label": "A1"}
        self.write({f"{EDAC}/{name}": f"{count}\n" for name, count in counts.items()})
        self.write({f"{EDAC}/dimm0/{name}": f"{text}\n" for name, text in dimm.items()})
        self.write({"/proc/meminfo": f"MemTotal:       {gib << 20} kB\n"})

    def mounts(self, *lines: str) -> None:
        self.write({"/proc/self/mountinfo": "\n".join(lines or (ROOT, TMP, DATA)) + "\n"})
