"""What each code of a check means for a job that ended: which cause, of which domain, and whether it ends a job at all.

The domains are those of arXiv 2410.21680 (Kokolis, Kuchnik et al., HPCA 2025, Table I): user program, system software
(driver, operating system, services), hardware; hardware is transient (an ECC error, a link that flaps) or permanent
(the vendor must exchange it). The paper does not publish which code is of which cause, nor its order: both are ours.

The order of CAUSES is the written order in which a cause is preferred: what isolates the node first. It begins with
the paper's high class of checks (GPU inaccessible, NVLink, uncorrectable ECC, failed remaps, PCIe and IB link, block
device, mount), PCIe in front since it is why a GPU is inaccessible; then what only drains; what a program did to itself
is the last.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from healthd.common.model import Severity
from healthd.common.text import is_decimal
from healthd.nvidia import codes, xid_table

USER_PROGRAM, SYSTEM_SOFTWARE, HARDWARE = "user_program", "system_software", "hardware"
USER, OTHER = "user", "other"


@dataclass(frozen=True, slots=True)
class Cause:
    """`words`: for people. `domain`: None = not known, a site's own check."""

    name: str
    domain: str | None
    words: str


# In the written order.
CAUSES = {
    cause.name: cause
    for cause in (
        Cause("pcie", HARDWARE, "PCI Express"),
        # Before a GPU's: a GPU that falls off the bus beside a failed link is told by the paper as the link's failure.
        Cause("ib_link", HARDWARE, "InfiniBand"),
        Cause("gpu_lost", HARDWARE, "a lost GPU"),
        Cause("nvlink", HARDWARE, "NVLink and NVSwitch"),
        Cause("gpu_memory", HARDWARE, "GPU memory"),
        # "GSP timeouts came from a code regression, fixed by a driver patch": the paper's section on them.
        Cause("gsp", SYSTEM_SOFTWARE, "GPU firmware (GSP)"),
        Cause("gpu", HARDWARE, "another GPU fault"),
        Cause("disk", HARDWARE, "disks"),
        Cause("mount", SYSTEM_SOFTWARE, "network file systems"),
        Cause("memory", HARDWARE, "host memory and CPUs"),
        Cause("power", HARDWARE, "host power and heat"),
        Cause("kernel", SYSTEM_SOFTWARE, "the kernel"),
        Cause("driver", SYSTEM_SOFTWARE, "GPU driver and setup"),
        Cause("ethernet", HARDWARE, "Ethernet"),
        Cause("services", SYSTEM_SOFTWARE, "node services"),
        Cause("disk_space", SYSTEM_SOFTWARE, "full disks"),
        Cause(OTHER, None, "site and unknown checks"),
        Cause(USER, USER_PROGRAM, "the user's program"),
    )
}
ORDER = {name: place for place, name in enumerate(CAUSES)}

# One fault speaks in several codes. What is seen on one node belongs to the first of these causes that is seen there
# too: {PCIe, Xid 79, IPMI critical interrupt} is one incident (the paper, section on co-occurrence), and what the
# driver asks for (Xid 154, a reset) follows from another Xid, which says why (docs/severity.md).
BELONGS_TO = {"gpu_lost": ("pcie",), "gpu": ("pcie", "gpu_lost", "nvlink", "gpu_memory", "gsp")}
# A program of one node does not talk over them. Storage does; a file system that is gone is seen as such.
BETWEEN_NODES = frozenset({"ib_link", "ethernet"})
# Of one GPU: what names the jobs at its source has not ended another one.
OF_ONE_GPU = frozenset({"pcie", "gpu_lost", "nvlink", "gpu_memory", "gsp", "gpu", USER})

# How a code speaks. ENDS: its usual severity drains or requeues (docs/checks.md), also where the site lets it only
# warn. TOLD: as its condition says, degraded or critical. NAMED: only where the condition names the job (Xid 94: "only
# the process that used the memory was stopped"). NEVER: it slows, waits or is bookkeeping, and ends no program.
ENDS, TOLD, NAMED, NEVER = "!", "", "?", "-"

# Cause -> its codes, each with the mark above behind it. The numbers of Xids and SXids are below. A code ENDS where
# docs/checks.md has it as degraded or critical and `healthd explain CODE` says that jobs die of it.
_WORDS = {
    "pcie": """
        pcie_aer/fatal! pcie_aer/not_recovered! pcie_aer/nonfatal_repeated! pcie_aer/nonfatal pcie_aer/correctable
        pcie_hotplug/link_down! pcie_hotplug/power_fault! pcie_hotplug/inaccessible pcie_hotplug/no_link
        iommu/dma_fault iommu/interrupt_fault iommu/stuck pcie_link/no_answer! pcie_link/narrow-
        pcie_link/slow- pcie_devices/gone! pcie_devices/another
        gpu_pcie/generation- gpu_pcie/lanes- gpu_pcie/replays mlx5/pci_error mlx5/pcie_limited- mlx5/slot_power-
        ipmi_sel/critical_interrupt! ipmi_sel/bus_fatal! memory_edac/pci_parity""",
    "gpu_lost": """
        gpu_access/lost! gpu_access/no_answer! gpu_access/hang gpu_count/dead! gpu_count/missing!
        gpu_count/fewer_than_expected! gpu_xid/fallen_off_bus! gpu_xid/gpu_is_lost""",
    "nvlink": """
        gpu_xid/nvlink gpu_nvlink/inactive! gpu_nvlink/recovery! gpu_nvlink/replay! gpu_nvlink/crc_rate! gpu_nvlink/crc
        gpu_nvlink/recovery_failed! gpu_nvlink/recovered gpu_nvlink/bit_errors gpu_nvlink/packet
        gpu_fabric/not_joined! gpu_fabric/unhealthy! gpu_fabric/left_out!
        gpu_fabric/degraded- gpu_fabric/partition gpu_recovery_action/drain_p2p
        gpu_recovery_action/recover_imex_domain""",
    "gpu_memory": """
        gpu_ecc/uncorrected! gpu_ecc/sram_threshold! gpu_ecc/corrected gpu_ecc/aggregate- gpu_ecc/disabled-
        gpu_row_remap/pending! gpu_row_remap/failure! gpu_row_remap/too_many! gpu_row_remap/unrepairable!
        gpu_row_remap/no_spare_rows gpu_retired_pages/pending! gpu_retired_pages/too_many!""",
    "gsp": "gpu_xid/gsp!",
    "gpu": """
        gpu_access/reset_required! gpu_xid/rc_watchdog gpu_xid/rm_init_failed! gpu_recovery_action/bus_reset!
        gpu_recovery_action/gpu_reset! gpu_recovery_action/node_reboot! gpu_recovery_action/system_reboot!
        gpu_recovery_action/drain_and_reset! gpu_recovery_action/unknown gpu_sm/several_jobs gpu_software/inforom
        gpu_clocks/slowed- gpu_clocks/slowed_briefly- gpu_temperature/hot- gpu_temperature/memory_hot-
        gpu_power/limited- validation/failed validation/slow- failslow/gpu-""",
    "ib_link": """
        ib_link/down! ib_link/missing! ib_link/slow- ib_link/rate_unknown- ib_flap/link_downed! ib_flap/carrier_lost!
        ib_flap/counter_full- ib_errors/symbols! ib_errors/link_integrity! ib_errors/buffer_overrun!
        ib_errors/symbol_rate ib_errors/recovery_rate ib_errors/receive_rate ib_errors/ack_timeout_rate
        ib_errors/slow_restart_rate ib_errors/counter_full- mlx5/health_fatal! mlx5/command_timeout!
        mlx5/health_recovery mlx5/health_warning mlx5/load_failed mlx5/link_down mlx5/port_failed mlx5/module_error
        mlx5/module_power- mlx5/module_temperature- mlx5/temperature- mlx5/request_failed mlx5/tx_timeout
        nic/firmware_failed! nic/command_timeout! nic/recovery nic/rdma_failed nic/link_down nic/port_failed
        nic/request_failed nic/tx_timeout""",
    "disk": """
        block_device/root_stopped! block_device/stopped! block_device/nvme! block_device/io_error!
        block_device/medium_error! block_device/missing! block_device/raid_failed! block_device/raid_degraded-
        block_device/raid_disk block_device/adapter block_device/path- block_device/nvme_path block_device/trouble
        filesystem/errors""",
    "mount": """
        mount/missing! mount/stale! mount/failing! mount/read_only! mount/wrong_type! mount/hang-
        filesystem/not_responding filesystem/evicted filesystem/lustre_bug filesystem/mount_failed
        filesystem/volume_stopped""",
    "memory": """
        memory_edac/uncorrected! memory_edac/machine_check! memory_edac/page_recovered memory_edac/deferred
        memory_edac/corrected memory_edac/left_over- memory_edac/uncorrected_at_boot- memory_size/less!
        ipmi_sel/uncorrectable! cpu/missing!""",
    "power": """
        ipmi_sel/power_supply! kernel/too_hot kernel/cpu_throttled- cpu/throttled- cpu/governor-""",
    "kernel": """
        kernel/panic! kernel/oops! kernel/hard_lockup! kernel/soft_lockup! kernel/rcu_stall kernel/hung_task
        kernel/workqueue kernel/file_max kernel/netdevice- kernel/unread kernel/pattern processes/unkillable!
        processes/zombies-""",
    "driver": """
        gpu_access/driver_mismatch! gpu_access/driver_not_loaded! gpu_access/library_missing! gpu_xid/probe_failed
        gpu_xid/peermem gpu_mig/instances! gpu_mig/mode! gpu_software/driver- gpu_software/vbios-
        gpu_persistence/off- gpu_persistence/not_held- gpu_processes/left device_nodes/missing!
        device_nodes/wrong_mode! kernel_modules/not_loaded!""",
    "ethernet": """
        eth_link/down! eth_link/missing! eth_link/flapping eth_link/member_down- eth_link/slow- eth_link/mtu-
        mlx5/bond_down""",
    "services": """
        services/inactive! services/changing- services/restarting services/wanted_inactive- gpu_fabric/manager!
        clock/offset- clock/slow_source- clock/uncertain- clock/unsynchronised-""",
    "disk_space": "disk_space/no_space! disk_space/no_inodes! disk_space/low_space- disk_space/low_inodes-",
    OTHER: "exec/critical exec/warning match/missing match/found failslow/job- failslow/counters- failslow/loss",
    USER: "kernel/oom_kill! processes/user_file_system-",
}

# Xids, by NVIDIA's Xid catalogue (healthd/nvidia/facts/xid.csv: names, words and immediate actions). An Xid that is not
# listed here is the program's where NVIDIA's action is to restart the program, else a GPU's.
_XIDS = {
    "pcie": (18, 167, 176),
    "gpu_lost": (79,),
    "nvlink": (74, 121, 136, *xid_table.NVLINK5, 155, 166, 170, 173),
    "gpu_memory": (48, 57, 58, 63, 64, 92, 94, 95, 140, 160, 161, 168, 171, 172),
    "gsp": (119, 120, 175),
    "driver": (78,),
    "power": (54,),
}
_XID_CAUSE = {number: cause for cause, numbers in _XIDS.items() for number in numbers}
_CONTAINED = 94
# The program's without being its action in the catalogue: 43 (the driver stopped its channel after a fault of its own),
# 45 (its work was removed: it was killed, or another Xid came before). They follow from something else.
FOLLOWS_OF_PROGRAM = frozenset({"gpu_xid/43", "gpu_xid/45"})

# Hardware that does not come back by itself, a reset or a reboot: NVIDIA's criteria for a replacement (row remapping
# failures, used-up spares, the SRAM threshold, retired pages: NVIDIA GPU memory error management), and what is gone
# or dead after the boot. All other hardware is transient: an ECC error or a link that flaps is, by the paper.
PERMANENT = frozenset(
    {
        *("gpu_row_remap/failure", "gpu_row_remap/too_many", "gpu_row_remap/unrepairable", "gpu_ecc/sram_threshold"),
        *("gpu_row_remap/no_spare_rows", "gpu_retired_pages/too_many", "gpu_xid/64", "gpu_software/inforom"),
        *("block_device/medium_error", "block_device/missing", "block_device/raid_failed", "block_device/raid_disk"),
        *("block_device/raid_degraded", "pcie_devices/gone", "pcie_hotplug/power_fault", "ib_link/missing"),
        *("eth_link/missing", "ipmi_sel/power_supply", "memory_size/less", "cpu/missing", "gpu_xid/54"),
    }
)


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a code means.

    cause      a name in CAUSES
    ends       ENDS, TOLD, NAMED or NEVER
    transient  None: not hardware, or not known
    known      False: no table names the code
    """

    cause: str
    ends: str
    transient: bool | None
    known: bool = True

    @property
    def domain(self) -> str | None:
        return CAUSES[self.cause].domain


@functools.lru_cache(maxsize=4096)
def meaning(code: str) -> Meaning:
    """What a code means, also one that no table names: a newer check's, or a site's own. `CHECK/others` counts several
    codes as one; which, it does not say."""
    if code in _IN_WORDS:
        cause, ends = _IN_WORDS[code]
        return _meaning(code, cause, ends)
    check, _, number = code.partition("/")
    if check == "gpu_xid" and is_decimal(number):
        return _meaning(code, *_of_xid(int(number)))
    if check == "sxid" and is_decimal(number):
        fact = codes.sxid(int(number))
        # The Fabric Manager guide's class; of what may be fatal or is not there the driver's word counts.
        return _meaning(code, "nvlink", ENDS if fact is not None and fact.category == "always fatal" else TOLD)
    return Meaning(OTHER, TOLD, None, known=False)


def _of_xid(number: int) -> tuple[str, str]:
    worst = xid_table.worst(number)
    fact = codes.xid(number)
    isolates = worst.severity >= Severity.DEGRADED
    if number == _CONTAINED:
        return "gpu_memory", NAMED
    if number in _XID_CAUSE:
        return _XID_CAUSE[number], ENDS if isolates else TOLD
    if f"gpu_xid/{number}" in FOLLOWS_OF_PROGRAM or (fact is not None and fact.action == "RESTART_APP"):
        return USER, ENDS
    if worst.of_application:
        return USER, NEVER
    return "gpu", ENDS if isolates else TOLD


def _meaning(code: str, cause: str, ends: str) -> Meaning:
    hardware = CAUSES[cause].domain == HARDWARE
    return Meaning(cause, ends, code not in PERMANENT if hardware else None)


def _in_words() -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for cause, words in _WORDS.items():
        for word in words.split():
            code = word.rstrip("!?-")
            if code in found:
                raise AssertionError(f"{code} has two causes")
            found[code] = cause, word[len(code) :]
    return found


_IN_WORDS = _in_words()
# The built-in checks, also those whose codes a site chooses.
CHECKS = frozenset({"exec", "gpu_xid", "match", "sxid", *(code.partition("/")[0] for code in _IN_WORDS)})
