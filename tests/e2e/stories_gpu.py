"""Rows of GPUs: faults that NVML and lines of the driver report."""

from __future__ import annotations

from collections.abc import Iterable

from fake_gpus import fake_pci_gpus
from healthd_daemon import xid_line
from machine import GPUS
from stories import (
    GPU,
    PCI,
    WINDOW_SECONDS,
    Row,
    Step,
    gpu,
    gpus,
    kernel,
    nothing,
    prints,
    put_back,
    rebooted,
    repaired,
    restarted,
    rounds,
    steps,
    taken_out,
    wait_until_resumed,
    writes,
)

from healthd.common.model import Severity
from healthd.validation.document import FILE, Result, Validation, as_text

BUS = GPU.removesuffix(".0")
SWITCH = "0000:85:00.0"
REMAPPED = "remap_uncorrectable = 1"
NO_RECOVERY = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
WELL = gpus("")
OLDER_DRIVER = gpu("unsupported_fields = [230]")  # it does not report the required recovery
RESET = steps(WELL, kernel(xid_line(154, BUS, NO_RECOVERY)))
UNIT_STATE = "LoadState=loaded\nActiveState={}"
IMEX_UP = '{"nodes": {"0": {"status": "READY", "host": "10.0.0.1"}}, "status": "UP"}'
GRACE = "".join(f"[gpu.{n}]\nc2c_links = 10\n" for n in (0, 1, 2, 4, 5, 6, 7))
GRACE_GPU = f"{GRACE}[gpu.3]\nc2c_links = 10\n"
IN_DOMAIN = 'fabric_cluster = "00000001-0000-0000-0000-000000000001"'
QUICK_FABRIC = {"gpu_fabric": {"join_seconds": 1.0, "confirm_seconds": 1.0}}
ANY_NUMBER = {"gpu_count": {"expected": 0}}  # otherwise gpu_count reports it too
SLICED = {"gpu_mig": {"mode": "on", "instances": 7}}
SLOWED = {"gpu_clocks": {"within_seconds": 3.0, "clean_seconds": 2.0}}
SLOW_SECONDS = 60  # longer than the story takes up to its repair
A10 = "compute_capability = [8, 6]\n"  # this GPU contains no errors
LEFT_OVER = "processes = [4711]"
A100, B200 = fake_pci_gpus("dgx-a100")[3], fake_pci_gpus("dgx-b200")[3]


def gpu_tables(texts: Iterable[str]) -> Step:
    """Set GPU 0, 1, ... to these texts."""
    return gpus("".join(f"[gpu.{index}]\n{text}\n" for index, text in enumerate(texts)))


def mig_instances(instances: int) -> Step:
    """Enable MIG, with this number of instances on GPU 3 and 7 on the others."""
    counts = (instances if pci == GPU else 7 for pci in GPUS)
    return gpu_tables(f"mig = true\nmig_devices = {count}" for count in counts)


def retired_pages(single: int = 0, double: int = 0, pending: bool = False) -> Step:
    """Set GPUs that retire pages, as those before Ampere did: these counts on GPU 3, none on the others."""
    well = "retired_single_bit = 0\nretired_double_bit = 0"
    bad = f"retired_single_bit = {single}\nretired_double_bit = {double}\nretired_pending = {str(pending).lower()}"
    return gpu_tables(bad if index == 3 else well for index in range(8))


def slow_clocks() -> Step:
    """The driver counts the next seconds as time in which GPU 3 was too hot for full clocks."""
    quarters = (quarter / 4 for quarter in range(4 * SLOW_SECONDS + 1))
    counts = "".join(
        f"[[at]]\nseconds = {second}\ngpu = 3\nslowdown_hw_thermal_seconds = {second}\n" for second in quarters
    )
    return gpu(f"clock_event_reasons = 0x48\n{counts}")


def warns(
    code: str,
    bad: str,
    good: Step = WELL,
    part: str = GPU,
    fake: str = "dgx-h100",
    **settings: float,
) -> Row:
    """Return a row that warns while GPU 3 is in this state, or for some time after."""
    check_settings = {code.partition("/")[0]: settings} if settings else {}
    return Row(code, part, fault=gpu(bad), repair=good, settings=check_settings, severity=Severity.WARNING, fake=fake)


ACCESS = [
    Row(
        "gpu_access/lost",
        GPU,
        fault=gpu("lost = true"),
        meanwhile=WELL,
        repair=rebooted,
    ),
    Row(
        "gpu_access/lost",
        GPU,
        how="lasts longer than a reset",
        well=writes({"/proc/4242/comm": "slurmd\n"}),
        fault=gpu("lost = true"),
        meanwhile=WELL,
        repair=rebooted,
        settings={"gpu_access": {"confirm_seconds": 1.0}},
    ),
    *(
        Row(code, "", fault=gpus(text), meanwhile=rebooted, repair=WELL)
        for code, text in (
            ("gpu_access/driver_mismatch", 'library = "mismatch"'),
            ("gpu_access/driver_not_loaded", 'library = "driver_not_loaded"'),
            ("gpu_access/library_missing", 'library = "library_not_found"'),
            ("gpu_access/no_answer", 'gpu.3.errors = { nvmlDeviceGetHandleByIndex = "InsufficientPower" }'),
        )
    ),
    *(
        Row(
            "gpu_access/reset_required",
            GPU,
            how=f"ends {how}",
            fault=gpu("requires_reset = true"),
            meanwhile=answers,
            repair=repair,
            checks=("gpu_xid",),
        )
        for how, answers, repair in (
            ("with a reset that Xid 154 reports", OLDER_DRIVER, kernel(xid_line(154, BUS, NO_RECOVERY))),
            ("with a reset after which no recovery is required", gpu("recovery_action = 1"), WELL),
            ("with a reboot", OLDER_DRIVER, rebooted),
            ("with healthd repaired", OLDER_DRIVER, repaired),
        )
    ),
    Row(
        "gpu_access/hang",
        "",
        fault=gpus('hang = "nvmlDeviceGetCount"\nhang_seconds = 12'),
        repair=WELL,
        settings={"gpu_access": {"timeout_seconds": 1.0}},
        how="is short",
    ),
    Row(
        "gpu_access/hang",
        "",
        fault=gpus('hang = "nvmlDeviceGetCount"\nhang_seconds = 20'),
        repair=WELL,
        settings={"gpu_access": {"timeout_seconds": 1.0, "hang_degraded_seconds": 3.0}},
        severity=Severity.DEGRADED,
        how="lasts",
    ),
    Row(
        "gpu_count/missing",
        GPU,
        fault=gpu("gone = true"),
        meanwhile=WELL,
        repair=rebooted,
        settings=ANY_NUMBER,
    ),
    Row(
        "gpu_count/dead",
        GPU,
        fault=steps(gpu("lost = true"), writes({f"{PCI}/{GPU}/current_link_width": "63\n"})),
        meanwhile=steps(WELL, writes({f"{PCI}/{GPU}/current_link_width": "16\n"})),
        repair=rebooted,
        settings=ANY_NUMBER,
    ),
    Row(
        "gpu_count/fewer_than_expected",
        "",
        fault=steps(gpu("gone = true"), taken_out(GPU)),
        meanwhile=rebooted,
        repair=steps(WELL, put_back(GPU)),
    ),
]

MEMORY = [
    Row(
        "gpu_ecc/uncorrected",
        GPU,
        how="is contained",
        fault=gpu("ecc_volatile_uncorrected_dram = 2"),
        repair=gpu("ecc_volatile_uncorrected_dram = 0"),
        severity=Severity.DEGRADED,
    ),
    Row(
        "gpu_ecc/uncorrected",
        GPU,
        how="is not contained",
        fault=gpu(f"{A10}ecc_volatile_uncorrected_dram = 2"),
        repair=gpu("ecc_volatile_uncorrected_dram = 0"),
    ),
    Row(
        "gpu_ecc/uncorrected",
        GPU,
        how="ends with a reboot",
        fault=gpu(f"{A10}ecc_volatile_uncorrected_sram = 1"),
        repair=steps(WELL, rebooted),
    ),
    Row(
        "gpu_ecc/sram_threshold",
        GPU,
        fault=gpu("sram_threshold_exceeded = true"),
        meanwhile=rebooted,
        repair=steps(repaired, wait_until_resumed, rounds(), WELL),  # acknowledged until the GPU is replaced
    ),
    warns("gpu_ecc/corrected", "ecc_volatile_corrected_sram = 10001"),
    warns("gpu_ecc/disabled", "ecc = false"),
    Row(
        "gpu_row_remap/failure",
        GPU,
        fault=gpu("remap_failure = true"),
        meanwhile=WELL,
        repair=repaired,
    ),
    Row(
        "gpu_row_remap/pending",
        GPU,
        fault=gpu(f"{REMAPPED}\nremap_pending = true"),
        repair=gpu(REMAPPED),
    ),
    Row(
        "gpu_row_remap/repair_pending",
        GPU,
        fault=gpu("repair_pending_channel = true"),
        repair=gpu("repair_pending_channel = false"),
    ),
    Row(
        "gpu_row_remap/too_many",
        GPU,
        fault=gpu("remap_uncorrectable = 600"),
        meanwhile=rebooted,
        repair=steps(repaired, wait_until_resumed, rounds(), WELL),
    ),
    Row(
        "gpu_row_remap/unrepairable",
        GPU,
        fault=gpu("unrepairable_memory = true"),
        meanwhile=WELL,
        repair=repaired,
    ),
    warns("gpu_row_remap/no_spare_rows", "remap_histogram = [2558, 1, 0, 0, 1]"),
    Row(
        "gpu_retired_pages/pending",
        A100,
        well=retired_pages(),
        fault=retired_pages(double=1, pending=True),
        meanwhile=retired_pages(double=1),
        repair=rebooted,
        fake="dgx-a100",
    ),
    Row(
        "gpu_retired_pages/too_many",
        A100,
        well=retired_pages(),
        fault=retired_pages(single=20, double=40),
        meanwhile=rebooted,
        repair=steps(repaired, wait_until_resumed, rounds(), retired_pages()),
        fake="dgx-a100",
    ),
]

LINKS = [
    *(
        Row(code, GPU, fault=gpu(bad), repair=WELL, settings=QUICK_FABRIC)
        for code, bad in (
            ("gpu_fabric/not_joined", "fabric_state = 2"),
            ("gpu_fabric/unhealthy", "fabric_health = 16"),
            ("gpu_fabric/degraded", "fabric_health = 1\nfabric_summary = 3"),
            ("gpu_fabric/no_fabric", "fabric_state = 0"),
        )
    ),
    Row(
        "gpu_fabric/other_domain",
        GPU,
        well=gpu_tables([IN_DOMAIN] * 8),
        fault=gpu_tables(f"{IN_DOMAIN}\nfabric_clique = {int(pci == GPU)}" for pci in GPUS),
        repair=gpu_tables([IN_DOMAIN] * 8),
        settings=QUICK_FABRIC,
    ),
    warns("gpu_fabric/no_domain", 'platform = {peer_type = 1, serial = "1820000000001"}', join_seconds=1.0),
    Row(
        "gpu_fabric/manager_lost",
        GPU,
        fault=gpu("fabric_health = 0x8000\nfabric_summary = 2"),
        repair=WELL,
        settings=QUICK_FABRIC,
    ),
    Row(
        "gpu_fabric/manager",
        "",
        well=prints("systemctl", UNIT_STATE.format("active")),
        fault=steps(prints("systemctl", UNIT_STATE.format("failed")), gpu("fabric_state = 2")),
        repair=steps(prints("systemctl", UNIT_STATE.format("active")), WELL),
        also=frozenset({"gpu_fabric/not_joined"}),
        settings=QUICK_FABRIC,
        programs=("systemctl",),
    ),
    Row(
        "gpu_c2c/inactive",
        GPU,
        well=gpus(GRACE_GPU),
        fault=gpus(f"{GRACE_GPU}c2c_inactive = [4]"),
        repair=gpus(GRACE_GPU),
        settings={"gpu_c2c": {"inactive_confirm_seconds": 1.0}},
    ),
    Row(
        "gpu_c2c/errors",
        GPU,
        well=gpus(GRACE_GPU),
        fault=gpus(f"{GRACE_GPU}c2c_replays = {{4 = 7}}"),
        repair=nothing,
        settings={"gpu_c2c": {"clean_seconds": WINDOW_SECONDS}},
        severity=Severity.WARNING,
    ),
    Row(
        "imex/daemon",
        "",
        well=steps(prints("systemctl", UNIT_STATE.format("active")), prints("nvidia-imex-ctl", IMEX_UP)),
        fault=prints("systemctl", UNIT_STATE.format("failed")),
        repair=prints("systemctl", UNIT_STATE.format("active")),
        settings={"imex": {"expected": True, "confirm_seconds": 1.0}},
        programs=("systemctl", "nvidia-imex-ctl"),
    ),
    Row(
        "gpu_nvlink/inactive",
        GPU,
        fault=gpu("nvlink_inactive = [4, 5]"),
        repair=WELL,
        settings={"gpu_nvlink": {"inactive_confirm_seconds": 1.0}},
    ),
    Row(
        "gpu_nvlink/unreported",
        GPU,
        fault=gpu_tables(["nvlink_unreported = [17]"] * 8),
        repair=WELL,
        settings={"gpu_nvlink": {"links": 18, "inactive_confirm_seconds": 1.0}},
        severity=Severity.WARNING,
    ),
    Row(
        "gpu_nvlink/traffic_disabled",
        GPU,
        fault=gpu("nvlink_traffic_disabled = [17]"),
        repair=WELL,
        settings={"gpu_nvlink": {"inactive_confirm_seconds": 1.0}},
        severity=Severity.WARNING,
    ),
    Row(
        "gpu_nvlink/slow",
        B200,
        well=gpu("nvlink_speed = 53125"),
        fault=gpu("nvlink_speed = 53125\nnvlink_speeds = {4 = 26562}"),
        repair=gpu("nvlink_speed = 53125"),
        fake="dgx-b200",
        settings={"gpu_nvlink": {"inactive_confirm_seconds": 1.0}},
    ),
    Row(
        "gpu_nvlink/replay",
        GPU,
        how="ends with a reset that another check detects",
        fault=gpu("recovery_action = 1\nnvlink_replay = {4 = 7}"),
        repair=gpu("recovery_action = 0"),
        checks=("gpu_recovery_action",),
        also=frozenset({"gpu_recovery_action/gpu_reset"}),
    ),
    Row(
        "gpu_nvlink/recovery",
        GPU,
        fault=gpu("nvlink_recovery = {4 = 7}"),
        repair=RESET,
        checks=("gpu_xid",),
    ),
    Row(
        "gpu_nvlink/crc_rate",
        GPU,
        fault=gpu("nvlink_crc = {4 = 90000}"),
        repair=steps(WELL, rebooted),
    ),
    warns("gpu_nvlink/crc", "nvlink_crc = {4 = 20}", nothing, clean_seconds=WINDOW_SECONDS),
    warns(
        "gpu_nvlink/packet",
        "nvlink_packet_errors = {4 = 20}",
        nothing,
        B200,
        "dgx-b200",
        clean_seconds=WINDOW_SECONDS,
    ),
    warns(
        "gpu_nvlink/bit_errors", "nvlink_ber = {4 = 1e-5}", part=B200, fake="dgx-b200", bit_errors_confirm_seconds=1.0
    ),
    warns("gpu_nvlink/recovered", "nvlink_recovery = {4 = 2}", nothing, B200, "dgx-b200", clean_seconds=WINDOW_SECONDS),
    Row(
        "gpu_nvlink/recovery_failed",
        B200,
        fault=gpu("nvlink_recovery_failed = {4 = 1}"),
        repair=steps(WELL, rebooted),
        fake="dgx-b200",
    ),
    Row(
        "gpu_pcie/lanes",
        GPU,
        fault=gpu("pcie_width = 8"),
        meanwhile=WELL,
        repair=rebooted,
        settings={"gpu_pcie": {"confirm_seconds": 1.0}},
    ),
    warns(
        "gpu_pcie/generation",
        "pcie_generation = 3\nutilization_percent = 100",
        confirm_seconds=1.0,
        clean_seconds=2.0,
    ),
    warns("gpu_pcie/replays", "pcie_replays = 2000", nothing, clean_seconds=WINDOW_SECONDS),
    Row(
        "sxid/11001",
        SWITCH,
        fault=kernel(f"nvidia-nvswitch2: SXid (PCI:{SWITCH}): 11001, Fatal, Link 60 ingress invalid command"),
        repair=rebooted,
    ),
    Row(
        "sxid/26006",
        SWITCH,
        how="has no severity word, but its controller halted",
        fault=kernel(f"nvidia-nvswitch2: SXid (PCI:{SWITCH}): 26006, SOE HALTED"),
        repair=rebooted,
    ),
]

XIDS = [
    Row(
        "gpu_xid/48",
        GPU,
        how="ends with a reset that the ECC counts show",
        fault=steps(gpu("ecc_volatile_uncorrected_dram = 2"), kernel(xid_line(48, BUS, "DBE (double bit error)"))),
        repair=WELL,
        checks=("gpu_ecc",),
        also=frozenset({"gpu_ecc/uncorrected"}),
    ),
    Row(
        "gpu_xid/173",
        GPU,
        how="drains without a requeue",
        fault=kernel(xid_line(173, BUS, "C2C link failure")),
        repair=rebooted,
    ),
    Row(
        "gpu_xid/79",
        GPU,
        fault=kernel(xid_line(79, BUS)),
        repair=rebooted,
    ),
    Row(
        "gpu_xid/119",
        GPU,
        how="ends with a reset that Xid 154 reports",
        fault=kernel(xid_line(119, BUS, "Timeout after 6s of waiting for RPC response from GPU3 GSP!")),
        repair=kernel(xid_line(154, BUS, NO_RECOVERY)),
    ),
]

STATE = [
    *(
        Row(
            f"gpu_recovery_action/{what}",
            GPU,
            fault=gpu(f"recovery_action = {number}"),
            meanwhile=rebooted if number == 1 else nothing,
            repair=WELL,
        )
        for number, what in (
            (1, "gpu_reset"),
            (2, "node_reboot"),
            (3, "drain_p2p"),
            (4, "drain_and_reset"),
            (5, "recover_imex_domain"),
            (6, "bus_reset"),
            (7, "system_reboot"),
            (8, "unknown"),
        )
    ),
    Row(
        "gpu_clocks/slowed",
        GPU,
        fault=slow_clocks(),
        repair=gpu(f"slowdown_hw_thermal_seconds = {SLOW_SECONDS}"),  # the shared cause ends by itself
        also=frozenset({"gpu_clocks/slowed_briefly"}),
        settings=SLOWED,
        how="by heat",
    ),
    Row(
        "gpu_clocks/slowed",
        GPU,
        fault=gpu("clock_event_reasons = 0x8"),
        meanwhile=WELL,  # without load there is no slowdown
        repair=rebooted,
        also=frozenset({"gpu_clocks/slowed_briefly"}),
        settings=SLOWED,
        how="without a reason",
    ),
    warns("gpu_clocks/slowed_briefly", "clock_event_reasons = 0x48", clean_seconds=2.0),
    Row(
        "gpu_mig/mode",
        GPU,
        fault=gpu("mig = true"),
        meanwhile=rebooted,
        repair=WELL,
    ),
    Row(
        "gpu_mig/instances",
        GPU,
        well=mig_instances(7),
        fault=mig_instances(6),
        meanwhile=rebooted,
        repair=mig_instances(7),
        settings=SLICED,
    ),
    Row(
        "gpu_processes/leftover",
        GPU,
        fault=steps(
            writes({"/proc/4711/comm": "python3\n", "/proc/4711/status": "Uid:\t1000\t1000\t1000\t1000\n"}),
            gpu(f"{LEFT_OVER}\n{A10}ecc_volatile_uncorrected_dram = 2"),  # the job ends and leaves it behind
        ),
        meanwhile=steps(gpu(LEFT_OVER), rounds()),
        repair=WELL,
        checks=("gpu_ecc",),
        also=frozenset({"gpu_ecc/uncorrected"}),
        settings={"gpu_processes": {"confirm_seconds": 1.0}},
    ),
    Row(
        "gpu_software/inforom",
        GPU,
        fault=steps(gpu("inforom = false"), restarted),  # an intact InfoROM is read again after an hour
        meanwhile=rebooted,
        repair=WELL,
    ),
    Row(
        "gpu_software/driver",
        "",
        fault=gpus('driver_version = "570.148.08"'),
        repair=WELL,
    ),
    warns("gpu_software/vbios", 'vbios = "96.00.74.00.01"'),
    warns("gpu_power/limited", "power_limit_watts = 500"),
    warns("gpu_persistence/off", "persistence = false"),
    Row(
        "gpu_persistence/not_held",
        "",
        fault=writes({"/sys/module/nvidia/refcnt": "0\n"}),
        repair=writes({"/sys/module/nvidia/refcnt": "300\n"}),
    ),
    warns("gpu_temperature/hot", "temperature_margin = -4"),
    warns("gpu_temperature/memory_hot", "temperature_memory_max = 95\ntemperature_memory = 99"),
]


def validation_result(verdict: str) -> Step:
    """Write a result of `healthd validate` for GPU 3."""
    result = Result("gemm_bf16", GPU, None, "TFLOPS", verdict, "", None, "the product is wrong", "PyTorch 2.5.1")
    text = as_text(Validation("", "", 1.0, 2.0, "manual", "", (result,), ()))
    return lambda scene: scene.machine.write({f"{scene.daemon.directory}/state/{FILE}": text})


VALIDATED = [
    Row(
        "validation/failed",
        GPU,
        fault=validation_result("failed"),
        meanwhile=restarted,
        repair=validation_result("ok"),
    ),
    Row("validation/slow", GPU, fault=validation_result("slow"), repair=validation_result("ok")),
]

ROWS = [*ACCESS, *MEMORY, *LINKS, *XIDS, *STATE, *VALIDATED]

# Codes that drain and have no story, and why.
UNTESTED: dict[str, str] = {}
