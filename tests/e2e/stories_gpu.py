"""Rows of GPUs: what NVML and the driver's lines tell of them."""

from __future__ import annotations

from healthd_daemon import xid
from stories import GPU, NOT_YET, Row, gpu, gpus, kernel, rebooted, repaired, steps

BUS = GPU.removesuffix(".0")
REMAPPED = "remap_uncorrectable = 1"
NO_RECOVERY = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"

ROWS = [
    Row(
        "gpu_access/lost",
        GPU,
        fault=gpu("lost = true"),
        meanwhile=gpus(""),
        repair=rebooted,
    ),
    Row(
        "gpu_ecc/uncorrected",
        GPU,
        fault=gpu("ecc_volatile_uncorrected_dram = 2"),
        repair=gpu("ecc_volatile_uncorrected_dram = 0"),
    ),
    Row(
        "gpu_ecc/uncorrected",
        GPU,
        how="ends with a reboot",
        fault=gpu("ecc_volatile_uncorrected_sram = 1"),
        repair=steps(gpus(""), rebooted),
    ),
    Row(
        "gpu_nvlink/inactive",
        GPU,
        fault=gpu("nvlink_inactive = [4, 5]"),
        repair=gpus(""),
        settings={"gpu_nvlink": {"inactive_confirm_seconds": 1.0}},
    ),
    Row(
        "gpu_nvlink/replay",
        GPU,
        how="ends with a reset that another check sees",
        fault=gpu("recovery_action = 1\nnvlink_replay = {4 = 7}"),
        repair=gpu("recovery_action = 0"),
        checks=("gpu_recovery_action",),
        also=frozenset({"gpu_recovery_action/gpu_reset"}),
    ),
    Row(
        "gpu_row_remap/failure",
        GPU,
        fault=gpu("remap_failure = true"),
        meanwhile=gpus(""),
        repair=repaired,
    ),
    Row(
        "gpu_row_remap/pending",
        GPU,
        fault=gpu(f"{REMAPPED}\nremap_pending = true"),
        repair=gpu(REMAPPED),
    ),
    Row(
        "gpu_xid/48",
        GPU,
        how="ends with a reset that the ECC counts show",
        fault=steps(gpu("ecc_volatile_uncorrected_dram = 2"), kernel(xid(48, BUS, "DBE (double bit error)"))),
        repair=gpus(""),
        checks=("gpu_ecc",),
        also=frozenset({"gpu_ecc/uncorrected"}),
    ),
    Row(
        "gpu_xid/79",
        GPU,
        fault=kernel(xid(79, BUS)),
        repair=rebooted,
    ),
    Row(
        "gpu_xid/119",
        GPU,
        how="ends with a reset that Xid 154 tells",
        fault=kernel(xid(119, BUS, "Timeout after 6s of waiting for RPC response from GPU3 GSP!")),
        repair=kernel(xid(154, BUS, NO_RECOVERY)),
    ),
]

# Codes that drain and are not told here, and why.
LEFT = {
    "gpu_access/driver_mismatch": NOT_YET,
    "gpu_access/driver_not_loaded": NOT_YET,
    "gpu_access/hang": NOT_YET,
    "gpu_access/library_missing": NOT_YET,
    "gpu_access/no_answer": NOT_YET,
    "gpu_access/reset_required": NOT_YET,
    "gpu_clocks/slowed": NOT_YET,
    "gpu_count/dead": NOT_YET,
    "gpu_count/fewer_than_expected": NOT_YET,
    "gpu_count/missing": NOT_YET,
    "gpu_ecc/sram_threshold": NOT_YET,
    "gpu_fabric/manager": NOT_YET,
    "gpu_fabric/not_joined": NOT_YET,
    "gpu_fabric/unhealthy": NOT_YET,
    "gpu_mig/instances": NOT_YET,
    "gpu_mig/mode": NOT_YET,
    "gpu_nvlink/crc_rate": NOT_YET,
    "gpu_nvlink/recovery": NOT_YET,
    "gpu_pcie/lanes": NOT_YET,
    "gpu_processes/left": NOT_YET,
    "gpu_recovery_action/bus_reset": NOT_YET,
    "gpu_recovery_action/drain_and_reset": NOT_YET,
    "gpu_recovery_action/gpu_reset": NOT_YET,
    "gpu_recovery_action/node_reboot": NOT_YET,
    "gpu_recovery_action/system_reboot": NOT_YET,
    "gpu_retired_pages/pending": NOT_YET,
    "gpu_retired_pages/too_many": NOT_YET,
    "gpu_row_remap/too_many": NOT_YET,
    "gpu_row_remap/unrepairable": NOT_YET,
    "gpu_software/inforom": NOT_YET,
    "sxid/11001": NOT_YET,
}
