"""Simulated machines with NVIDIA GPUs: profiles of healthy machines, and scenario files (TOML) that add faults.

    profile = "dgx-h100"              # the healthy machine to start from, in healthd/nvidia/fake_machines
    pci = ["0000:1b:00.0"]            # replaces the profile's addresses, and so the number of GPUs
    library = "mismatch"              # or "driver_not_loaded", "library_not_found", "fine"
    missing_functions = ["nvmlDeviceGetMigMode"]    # functions that the driver lacks
    hang = "nvmlDeviceGetTemperature" # this call sleeps for hang_seconds (default: an hour), then answers
    crash = "nvmlInit"                # the process is killed in this call
    random_failures = 0.01            # this share of the queries to GPUs fails with "Unknown Error" ...
    seed = 7                          # ... chosen anew in each round, but the same in each run of the process

    [gpu.3]                           # by index; all settings of `Gpu` below are allowed
    lost = true
    [gpu.4.errors]
    nvmlDeviceGetEccMode = "Unknown"  # the call raises pynvml's NVMLError_Unknown

    [[at]]                            # changes from this time on; without `gpu`, settings of the whole machine
    seconds = 30
    gpu = 5
    ecc_volatile_uncorrected_sram = 2

Seconds are counted from `start` (seconds since the epoch) or, if it is not set, from the file's last modification. A
timeline therefore continues when the worker is replaced, and restarts when the file is rewritten. The file is read each
time NVML is opened, once per round. Errors in the file raise ConvertError with a sentence that names the file and the
setting.
"""

from __future__ import annotations

import enum
import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import field

from healthd.common import ownership, toml
from healthd.common.codec import ConvertError, fields_of, load, spelling_hint
from healthd.common.codec import number as show_number
from healthd.common.text import regex
from healthd.common.values import Value
from healthd.nvidia import fake_machines
from healthd.nvidia.nvml_binding import pynvml

PROFILES = fake_machines.FOLDER
CALLS = frozenset(  # the functions of FakeLibrary
    [
        *("nvmlInit", "nvmlShutdown", "nvmlSystemGetDriverVersion", "nvmlDeviceGetClockInfo"),
        *("nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetCount"),
        *("nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetCurrPcieLinkGeneration"),
        *("nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetCurrentClocksEventReasons"),
        *("nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetDefaultEccMode", "nvmlDeviceGetEccMode"),
        *("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetFieldValues", "nvmlDeviceGetGpuFabricInfo"),
        *("nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetGpuFabricInfo_v4", "nvmlDeviceGetC2cModeInfoV"),
        *("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByPciBusId", "nvmlDeviceGetMarginTemperature"),
        *("nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkWidth"),
        *("nvmlDeviceGetMemoryErrorCounter", "nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetMigMode"),
        *("nvmlDeviceGetMinorNumber", "nvmlDeviceGetName", "nvmlDeviceGetNvLinkErrorCounter"),
        *("nvmlDeviceGetNvLinkState", "nvmlDeviceGetPciInfo", "nvmlDeviceGetPcieReplayCounter"),
        *("nvmlDeviceGetPersistenceMode", "nvmlDeviceGetPowerManagementDefaultLimit", "nvmlDeviceGetRemappedRows"),
        *("nvmlDeviceGetRetiredPages", "nvmlDeviceGetRetiredPagesPendingStatus", "nvmlDeviceGetRowRemapperHistogram"),
        *("nvmlDeviceGetSerial", "nvmlDeviceGetGpuUptime_v1", "nvmlDeviceGetPlatformInfo"),
        "nvmlDeviceGetRepairStatus",
        *("nvmlDeviceGetSramEccErrorStatus", "nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureThreshold"),
        *("nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetUUID", "nvmlDeviceGetUnrepairableMemoryFlag_v1"),
        *("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetVbiosVersion", "nvmlDeviceGetVirtualizationMode"),
        "nvmlDeviceValidateInforom",
        *("nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents", "nvmlEventSetCreate", "nvmlEventSetFree"),
        *("nvmlEventSetWait_v2", "nvmlEventSetWait_v3", "nvmlEventSetRegisterGpuOperationalEvents_v1"),
        *("nvmlEventSetGetContextCount_v1", "nvmlEventSetGetContextInfo_v1"),
        "nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1",
    ]
)
ERRORS = frozenset(name.removeprefix("NVMLError_") for name in vars(pynvml()) if name.startswith("NVMLError_"))
ADDRESS = regex(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.0")
MAX_COUNT = 2**32 - 1
MAX_SECONDS = 10.0 * 365 * 24 * 3600
MAX_LINKS = 64  # NVML_NVLINK_MAX_LINKS of the newest binding is 36
LIMITS = {
    "nvlinks": MAX_LINKS,
    "mig_devices": 7,
    "utilization_percent": 100,
    "power_limit_watts": 10_000,
    "power_default_watts": 10_000,
    "slowdown_hw_thermal_seconds": int(MAX_SECONDS),
    "slowdown_hw_power_brake_seconds": int(MAX_SECONDS),
}
SIGNED = ("temperature_margin", "temperature_slowdown_margin")
LINK_SETTINGS = (
    "nvlink_inactive",
    "nvlink_traffic_disabled",
    "nvlink_unreported",
    "nvlink_replay",
    "nvlink_recovery",
    "nvlink_recovery_failed",
    "nvlink_crc",
    "nvlink_packet_errors",
    "nvlink_ber",
    "nvlink_symbol_ber",
    "nvlink_speeds",
)


class Library(enum.Enum):
    """Result of nvmlInit on the machine."""

    FINE = "fine"
    LIBRARY_NOT_FOUND = "LibraryNotFound"
    DRIVER_NOT_LOADED = "DriverNotLoaded"
    MISMATCH = "LibRmVersionMismatch"


class LinkCounters(enum.Enum):
    """The calls or fields that count a GPU's NVLink errors."""

    NONE = "none"
    CALLS = "calls"  # before Hopper: nvmlDeviceGetNvLinkErrorCounter
    FIELDS = "fields"  # Hopper: fields 161 to 163
    NVLINK5 = "nvlink5"  # Blackwell: fields 206 to 222


class FakePlatform(Value, frozen=True):
    """Answer of nvmlDeviceGetPlatformInfo (nvml.Platform)."""

    peer_type: int
    serial: str = ""
    slot: int = 0
    tray: int = 0
    host: int = 0
    module: int = 0


class EventKind(enum.Enum):
    """Kind of an event: a bit of nvmlEventType*, or a GPU Operational Event."""

    XID = "xid"
    UNAVAILABLE = "unavailable"
    RECOVERY_ACTION = "recovery_action"
    OPERATIONAL = "operational"


class OperationalSeverity(enum.Enum):
    INFORMATIONAL = "informational"
    CORRECTED = "corrected"
    RECOVERABLE = "recoverable"
    FATAL = "fatal"


class FakeEvent(Value, frozen=True):
    """An event that NVML reports once after its registration (nvml_events.GpuEvent). An operational event of xid 0 has
    no Xid."""

    kind: EventKind = EventKind.OPERATIONAL
    xid: int = 0
    severity: OperationalSeverity = OperationalSeverity.FATAL
    module: str = "GPU"
    code: int = 0
    primary: bool = True
    uncontained: bool = False
    overflow: bool = False
    simulated: bool = False


class Gpu(Value, frozen=True):
    """One GPU's answers. None means that this model does not support the query.

    gone        NVML does not count the GPU
    unreachable   the GPU's handle gives "Unknown Error"
    lost, requires_reset   NVML lists the GPU, but every query to it fails with GpuIsLost or ResetRequired
    lost_after  each time NVML is opened, the GPU answers this many queries and is then lost
    serial      the board's serial number, and so another GPU: its UUID differs too (not set: a number for the slot)
    compute_capability   [9, 0] is GH100
    virtualization   1 in a virtual machine, 3 on a vGPU host
    ecc_default   whether the factory default of ECC is on (false: RTX A6000, RTX 4090)
    ecc_*       counters. They are not supported without ECC (`ecc = false`); with `mig`, the volatile counters and
                those for rows are not supported either. `ecc_sram = false` for Volta and before, where SRAM errors are
                included only in the total
    remap_histogram   number of banks with all, many, some, few and no spare rows left
    unrepairable_memory   the flag of drivers 590 and later
    retired_single_bit, retired_double_bit   number of retired pages, before Ampere
    fabric_health, fabric_summary   if not set, the driver rejects the newer versions of the structure
    fabric_cluster, fabric_clique   UUID of the NVLink domain ("" = zeros), and number of the partition
    fabric_cliques   type and number of each clique: [[0, 2], [1, 2]] (drivers 615 and later; not set: an older driver)
    platform    position in the chassis: serial, peer_type (SWITCH_CONNECTED in nvml.py), slot, tray, host and module
    c2c_links   number of chip-to-chip links; c2c_inactive, c2c_unreported, c2c_errors, c2c_replays as for NVLinks
    c2c_enabled   whether C2C is on (not set: on if there are links)
    repair_pending_channel, repair_pending_tpc   repairs that wait for a reset (both not set: not supported)
    temperature_margin   degrees left until the driver begins to slow down the GPU
    temperature_slowdown_margin   value of temperature_margin at which the hardware slows down
    iteration_seconds   NVLink, PCIe and energy counters grow as for a job whose iterations take this long
    utilization_percent, power_limit_watts, power_default_watts, sm_clock_mhz, slowdown_*_seconds   as named
    inforom     false if its checksums are wrong
    processes   ids of the processes with a context
    mig, mig_devices   whether MIG is on now; number of MIG devices
    mig_pending   whether MIG is on after the next reset (if not set, as now)
    nvlink_unreported   links for which no call reports anything
    nvlink_replay, nvlink_recovery, nvlink_crc, nvlink_packet_errors   counts by link: {4 = 7}
    nvlink_recovery_failed   count by link; on Blackwell nvlink_recovery counts successful recoveries
    nvlink_ber, nvlink_symbol_ber   effective and symbol bit error rates by link: {4 = 1e-5}
    nvlink_speed   speed of each link in MB/s; nvlink_speeds   of single links: {4 = 26562}
    events      events after the registration: [{kind = "xid", xid = 79}, {severity = "fatal", xid = 63}]
    unsupported, unsupported_fields   calls and field ids that fail with NotSupported
    errors      calls that fail with other errors
    """

    name: str = ""
    serial: str = ""
    vbios: str = ""
    compute_capability: tuple[int, int] | None = None
    virtualization: int = 0
    temperature: int | None = None
    temperature_slowdown: int | None = None
    temperature_memory_max: int | None = None
    temperature_slowdown_margin: int | None = None
    temperature_margin: int | None = None
    temperature_memory: int | None = None
    utilization_percent: int | None = None
    persistence: bool | None = None
    inforom: bool | None = None
    power_limit_watts: float | None = None
    power_default_watts: float | None = None
    sm_clock_mhz: int | None = None
    iteration_seconds: float | None = None
    clock_event_reasons: int | None = None
    slowdown_hw_thermal_seconds: float | None = None
    slowdown_hw_power_brake_seconds: float | None = None
    processes: tuple[int, ...] | None = None
    pcie_replays: int | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_max_generation: int | None = None
    pcie_max_width: int | None = None
    mig: bool | None = None
    mig_pending: bool | None = None
    mig_devices: int = 0
    gone: bool = False
    unreachable: bool = False
    lost: bool = False
    lost_after: int | None = None
    requires_reset: bool = False
    recovery_action: int | None = None
    uptime_seconds: int | None = None
    ecc: bool | None = None
    ecc_default: bool = True
    ecc_sram: bool = True
    ecc_volatile_corrected_sram: int = 0
    ecc_volatile_corrected_dram: int = 0
    ecc_volatile_uncorrected_sram: int = 0
    ecc_volatile_uncorrected_dram: int = 0
    ecc_aggregate_corrected_sram: int = 0
    ecc_aggregate_corrected_dram: int = 0
    ecc_aggregate_uncorrected_sram: int = 0
    ecc_aggregate_uncorrected_dram: int = 0
    sram_threshold_exceeded: bool | None = None
    remap_correctable: int | None = None
    remap_uncorrectable: int | None = None
    remap_pending: bool = False
    remap_failure: bool = False
    remap_histogram: tuple[int, int, int, int, int] | None = None
    unrepairable_memory: bool | None = None
    retired_single_bit: int | None = None
    retired_double_bit: int | None = None
    retired_pending: bool = False
    fabric_state: int | None = None
    fabric_status: int = 0
    fabric_health: int | None = None
    fabric_summary: int | None = None
    fabric_cluster: str = ""
    fabric_clique: int = 0
    fabric_cliques: tuple[tuple[int, int], ...] | None = None
    platform: FakePlatform | None = None
    c2c_links: int = 0
    c2c_enabled: bool | None = None
    c2c_inactive: tuple[int, ...] = ()
    c2c_unreported: tuple[int, ...] = ()
    c2c_errors: dict[str, int] = field(default_factory=dict)
    c2c_replays: dict[str, int] = field(default_factory=dict)
    repair_pending_channel: bool | None = None
    repair_pending_tpc: bool | None = None
    nvlinks: int = 0
    nvlink_inactive: tuple[int, ...] = ()
    nvlink_traffic_disabled: tuple[int, ...] = ()
    nvlink_unreported: tuple[int, ...] = ()
    nvlink_counters: LinkCounters = LinkCounters.NONE
    nvlink_replay: dict[str, int] = field(default_factory=dict)
    nvlink_recovery: dict[str, int] = field(default_factory=dict)
    nvlink_recovery_failed: dict[str, int] = field(default_factory=dict)
    nvlink_crc: dict[str, int] = field(default_factory=dict)
    nvlink_packet_errors: dict[str, int] = field(default_factory=dict)
    nvlink_ber: dict[str, float] = field(default_factory=dict)
    nvlink_symbol_ber: dict[str, float] = field(default_factory=dict)
    nvlink_speed: int | None = None
    nvlink_speeds: dict[str, int] = field(default_factory=dict)
    events: tuple[FakeEvent, ...] = ()
    unsupported: tuple[str, ...] = ()
    unsupported_fields: tuple[int, ...] = ()
    errors: dict[str, str] = field(default_factory=dict)
    hang: str = ""
    hang_seconds: float = 3600.0
    crash: str = ""


class Machine(Value, frozen=True):
    """Settings for the whole machine (see the module docstring)."""

    driver_version: str = ""
    library: Library = Library.FINE
    missing_functions: tuple[str, ...] = ()
    hang: str = ""
    hang_seconds: float = 3600.0
    crash: str = ""
    random_failures: float = 0.0
    seed: int = 0


class Scenario(Machine, frozen=True):
    """A scenario file. Tables are kept as written, and missing settings come from the profile."""

    profile: str = ""
    pci: tuple[str, ...] = ()
    start: float | None = None
    gpu: dict[str, dict[str, Any]] = field(default_factory=dict)
    at: tuple[dict[str, Any], ...] = ()


class Profile(Value, frozen=True):
    """A healthy machine. All GPUs (at the addresses in `pci`) have the settings in `gpu`."""

    driver_version: str
    pci: tuple[str, ...]
    gpu: dict[str, Any]


class When(Value, frozen=True):
    """The time from which an [[at]] entry applies, and its GPU (None for the whole machine)."""

    seconds: float
    gpu: int | None = None


def profiles() -> list[str]:
    """Return the names of healthd's built-in machines."""
    return toml.names_in(PROFILES)


@functools.cache
def profile(name: str) -> Profile:
    """Return a profile. Raises ConvertError if there is no profile with this name."""
    if name not in profiles():
        raise ConvertError(f'profile: there is no "{name}"{spelling_hint(name, profiles())}')
    with open(os.path.join(PROFILES, f"{name}.toml"), encoding="utf-8") as file:
        return load(Profile, toml.parse(file.read()), name)


def read(profile_or_file: str) -> tuple[Scenario, float]:
    """Return the checked scenario for a profile name or a file, and its start time in epoch seconds."""
    if profile_or_file in profiles():
        return Scenario(profile=profile_or_file), 0.0
    try:
        with ownership.open_file(profile_or_file) as file:
            modified = os.fstat(file).st_mtime
            text = ownership.read_all(file).decode("utf-8")
    except FileNotFoundError:
        hint = spelling_hint(profile_or_file, profiles())
        raise ConvertError(f'there is no profile or file "{profile_or_file}"{hint}') from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConvertError(f"{profile_or_file}: cannot be read: {error}") from None
    try:
        scenario = parse(text)
    except ConvertError as error:
        raise ConvertError(f"{profile_or_file}: {error}") from None
    return scenario, modified if scenario.start is None else scenario.start


def parse(text: str) -> Scenario:
    """Parse and check a scenario file's text. Raises ConvertError if it is invalid; the message is one sentence."""
    try:
        data = toml.parse(text)
    except ConvertError as error:
        raise ConvertError(f"is not TOML: {error}") from None
    return check(data)


def check(data: object) -> Scenario:
    """Check a scenario that was already read as plain data, like `parse`."""
    scenario = load(Scenario, data)
    if not scenario.profile:
        raise ConvertError(f'missing profile; write profile = "{profiles()[0]}"')
    for problem in _problems(scenario):
        raise ConvertError(problem)
    return scenario


def addresses(scenario: Scenario) -> tuple[str, ...]:
    """Return the PCI addresses of the machine's GPUs, including GPUs that NVML does not show."""
    return scenario.pci or profile(scenario.profile).pci


def state(scenario: Scenario, elapsed: float) -> tuple[Machine, tuple[Gpu, ...]]:
    """Return the machine and its GPUs after `elapsed` seconds. GPUs that do not differ from the profile share one
    object."""
    base = profile(scenario.profile)
    machine = {name: getattr(scenario, name) for name in _names(Machine)}
    machine["driver_version"] = machine["driver_version"] or base.driver_version
    gpus = [{**base.gpu, **scenario.gpu.get(str(i), {})} for i in range(len(addresses(scenario)))]
    for when, settings, _ in sorted(_timeline(scenario), key=lambda entry: entry[0].seconds):
        if when.seconds <= elapsed and when.gpu is None:
            changed = load(Machine, settings)
            machine.update({name: getattr(changed, name) for name in settings})
        elif when.seconds <= elapsed and when.gpu is not None:
            gpus[when.gpu].update(settings)
    untouched = load(Gpu, base.gpu)
    return Machine(**machine), tuple(untouched if gpu == base.gpu else load(Gpu, gpu) for gpu in gpus)


def _names(settings: type) -> list[str]:
    return [f.name for f in fields_of(settings)]


def _timeline(scenario: Scenario) -> Iterator[tuple[When, dict[str, Any], str]]:
    """Yield (time and GPU, changes, position in the file) for each [[at]] entry."""
    for number, entry in enumerate(scenario.at):
        when = load(When, {k: v for k, v in entry.items() if k in ("seconds", "gpu")}, f"at[{number}]")
        settings = {k: v for k, v in entry.items() if k not in ("seconds", "gpu")}
        yield when, settings, f"at[{number}]"


def _problems(scenario: Scenario) -> Iterator[str]:
    """Yield problems that a check of the types does not find. Raises ConvertError for wrong types."""
    for number, address in enumerate(scenario.pci):
        if not ADDRESS.fullmatch(address) or address in scenario.pci[:number]:
            yield f'pci[{number}]: must be a unique address like "0000:1b:00.0", got "{address}"'
    count = len(addresses(scenario))
    yield from _machine_problems(scenario, "")
    for index, table in scenario.gpu.items():
        if index not in {str(i) for i in range(count)}:
            yield f"gpu.{index}: this machine has GPUs 0 to {count - 1}"
        yield from _gpu_problems(table, f"gpu.{index}", _links(scenario, ""))
    for when, settings, where in _timeline(scenario):
        if not 0 <= when.seconds <= MAX_SECONDS:
            yield f"{where}.seconds: must be between 0 and {MAX_SECONDS:.0f}, got {when.seconds:g}"
        if when.gpu is None:
            yield from _machine_problems(load(Machine, settings, where), f"{where}.")
        elif not 0 <= when.gpu < count:
            yield f"{where}.gpu: this machine has GPUs 0 to {count - 1}"
        else:
            yield from _gpu_problems(settings, where, _links(scenario, str(when.gpu)))


def _machine_problems(machine: Machine, where: str) -> Iterator[str]:
    yield from _unknown_calls(machine.missing_functions, f"{where}missing_functions")
    yield from _fault_problems(machine, where)
    if not 0 <= machine.random_failures <= 1:
        yield f"{where}random_failures: must be between 0 and 1, got {machine.random_failures:g}"


def _gpu_problems(table: Mapping[str, Any], where: str, links_before: int) -> Iterator[str]:
    """Yield problems in a GPU's settings. `links_before` is the number of NVLinks if this table does not set it."""
    gpu = load(Gpu, table, where)
    yield from _fault_problems(gpu, f"{where}.")
    yield from _unknown_calls(gpu.unsupported, f"{where}.unsupported")
    yield from _unknown_calls(gpu.errors, f"{where}.errors")
    for call, error in gpu.errors.items():
        if error not in ERRORS:
            yield f"{where}.errors.{call}: pynvml has no NVMLError_{error}{spelling_hint(error, ERRORS)}"
    for name, setting in _numbers(gpu):
        minimum, maximum = (-1000, 1000) if name in SIGNED else (0, LIMITS.get(name, MAX_COUNT))
        if not minimum <= setting <= maximum:
            yield f"{where}.{name}: must be between {minimum} and {maximum}, got {show_number(setting)}"
    for number, event in enumerate(gpu.events):
        for name, value in (("xid", event.xid), ("code", event.code)):
            if not 0 <= value <= MAX_COUNT:
                yield f"{where}.events[{number}].{name}: must be between 0 and {MAX_COUNT}, got {value}"
    for link, rate in gpu.nvlink_ber.items():
        if not 0 <= rate <= 1:
            yield f"{where}.nvlink_ber: the rate of link {link} must be between 0 and 1, got {rate:g}"
    links = int(table.get("nvlinks", links_before))
    link_names = {str(link) for link in range(links)}
    for name in LINK_SETTINGS:
        for link in getattr(gpu, name):
            if str(link) not in link_names:
                yield f"{where}.{name}: there is no link {link}; this GPU has {links}"


def _links(scenario: Scenario, index: str) -> int:
    default = profile(scenario.profile).gpu.get("nvlinks", 0)
    return int(scenario.gpu.get(index, {}).get("nvlinks", default))


def _numbers(gpu: Gpu) -> Iterator[tuple[str, float]]:
    """Yield the name and number of each numeric setting in a GPU, except those that have their own limits."""
    for f in fields_of(type(gpu)):
        value = getattr(gpu, f.name)
        items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
        if f.name not in ("hang_seconds", "nvlink_ber", "nvlink_symbol_ber"):
            yield from ((f.name, item) for item in items if isinstance(item, int | float))


def _fault_problems(part: Machine | Gpu, where: str) -> Iterator[str]:
    yield from _unknown_calls([part.hang] if part.hang else [], f"{where}hang")
    yield from _unknown_calls([part.crash] if part.crash else [], f"{where}crash")
    if not 0 <= part.hang_seconds <= MAX_SECONDS:
        yield f"{where}hang_seconds: must be between 0 and {MAX_SECONDS:.0f}, got {part.hang_seconds:g}"


def _unknown_calls(names: Iterable[str], where: str) -> Iterator[str]:
    for name in names:
        if name not in CALLS:
            yield f'{where}: healthd does not call "{name}"{spelling_hint(name, CALLS)}'
