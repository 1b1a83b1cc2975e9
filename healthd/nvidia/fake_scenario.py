"""Simulated machines with NVIDIA GPUs: profiles, and scenario files (TOML) that break them.

    profile = "dgx-h100"              # one of healthd/nvidia/fake_machines, the healthy machine to start from
    pci = ["0000:1b:00.0"]            # other addresses than the profile's: another number of GPUs
    library = "mismatch"              # or "driver_not_loaded", "library_not_found", "fine"
    missing_functions = ["nvmlDeviceGetMigMode"]    # functions that an old driver lacks
    hang = "nvmlDeviceGetTemperature" # this call sleeps for hang_seconds (default an hour), then answers
    crash = "nvmlInit"                # the process is killed in this call
    random_failures = 0.01            # this share of the queries to a GPU returns "Unknown Error" ...
    seed = 7                          # ... chosen again in each round, the same ones in each run of the process

    [gpu.3]                           # by index; every setting of `Gpu` below
    lost = true
    [gpu.4.errors]
    nvmlDeviceGetEccMode = "Unknown"  # a pynvml error: NVMLError_Unknown

    [[at]]                            # from then on; without `gpu` it takes the settings of the whole machine
    seconds = 30
    gpu = 5
    ecc_volatile_uncorrected_sram = 2

Seconds count from `start` (seconds since the epoch) or, without it, from the last modification of the file. A timeline
therefore continues when the worker is replaced, and rewriting the file restarts it. The file is read at every open,
once a round. An error in it is one ConvertError sentence that names the file and the setting.
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
CALLS = frozenset(  # of FakeLibrary
    [
        *("nvmlInit", "nvmlShutdown", "nvmlSystemGetDriverVersion", "nvmlDeviceGetClockInfo"),
        *("nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetCount"),
        *("nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetCurrPcieLinkGeneration"),
        *("nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetCurrentClocksEventReasons"),
        *("nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetDefaultEccMode", "nvmlDeviceGetEccMode"),
        *("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetFieldValues", "nvmlDeviceGetGpuFabricInfo"),
        *("nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMarginTemperature"),
        *("nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkWidth"),
        *("nvmlDeviceGetMemoryErrorCounter", "nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetMigMode"),
        *("nvmlDeviceGetMinorNumber", "nvmlDeviceGetName", "nvmlDeviceGetNvLinkErrorCounter"),
        *("nvmlDeviceGetNvLinkState", "nvmlDeviceGetPciInfo", "nvmlDeviceGetPcieReplayCounter"),
        *("nvmlDeviceGetPersistenceMode", "nvmlDeviceGetPowerManagementDefaultLimit", "nvmlDeviceGetRemappedRows"),
        *("nvmlDeviceGetRetiredPages", "nvmlDeviceGetRetiredPagesPendingStatus", "nvmlDeviceGetRowRemapperHistogram"),
        *("nvmlDeviceGetSramEccErrorStatus", "nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureThreshold"),
        *("nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetUUID", "nvmlDeviceGetUnrepairableMemoryFlag_v1"),
        *("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetVbiosVersion", "nvmlDeviceGetVirtualizationMode"),
        "nvmlDeviceValidateInforom",
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
    "nvlink_untold",
    "nvlink_replay",
    "nvlink_recovery",
    "nvlink_recovery_failed",
    "nvlink_crc",
    "nvlink_packet_errors",
    "nvlink_ber",
    "nvlink_symbol_ber",
)


class Library(enum.Enum):
    """Result of nvmlInit."""

    FINE = "fine"
    LIBRARY_NOT_FOUND = "LibraryNotFound"
    DRIVER_NOT_LOADED = "DriverNotLoaded"
    MISMATCH = "LibRmVersionMismatch"


class LinkCounters(enum.Enum):
    """How a GPU counts errors of its NVLinks."""

    NONE = "none"
    CALLS = "calls"  # before Hopper: nvmlDeviceGetNvLinkErrorCounter
    FIELDS = "fields"  # Hopper: fields 161 to 163
    NVLINK5 = "nvlink5"  # Blackwell: fields 206 to 222


class Gpu(Value, frozen=True):
    """Answers of one GPU. None: this model does not support it.

    gone, unreachable, lost, requires_reset   NVML does not count it; "Unknown Error" for its handle; NVML lists it, but
                every query to it returns GpuIsLost; or ResetRequired
    lost_after  it answers this many queries each time that NVML is opened, and then it is lost
    compute_capability, virtualization   [9, 0] is GH100; 1: this is a virtual machine, 3: a host of vGPUs
    ecc_default   whether ECC is on by factory default (false: RTX A6000, RTX 4090)
    ecc_*       counters. They are not supported without ECC (`ecc = false`); with `mig` the volatile counters and those
                of rows are not supported either. `ecc_sram = false`: Volta and before, where SRAM counts in the total
                only
    remap_histogram   banks with all, many, some, few, no spare rows
    unrepairable_memory   the driver's flag (590 and later)
    retired_single_bit, retired_double_bit   pages, before Ampere
    fabric_health, fabric_summary   if these are not set the driver refuses the newer versions of the structure
    temperature_margin, temperature_slowdown_margin   degrees left; the margin at which the hardware slows down
    iteration_seconds   its links, PCIe and energy count like a job whose iterations take this long
    utilization_percent, power_limit_watts, power_default_watts, sm_clock_mhz, slowdown_*_seconds   as named
    inforom     false: its checksums are wrong
    processes   ids of the processes that hold a context
    mig, mig_pending, mig_devices   whether MIG is on now; after the next reset (not set: as now); number of devices
    nvlink_untold   links about which no call reports anything
    nvlink_replay, nvlink_recovery, nvlink_crc, nvlink_packet_errors   by link: {4 = 7}
    nvlink_recovery_failed   by link; nvlink_recovery counts the successful ones on Blackwell
    nvlink_ber, nvlink_symbol_ber   effective and symbol bit error rates by link: {4 = 1e-5}
    unsupported, unsupported_fields, errors   calls and field ids that return NotSupported, and any other error
    """

    name: str = ""
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
    nvlinks: int = 0
    nvlink_inactive: tuple[int, ...] = ()
    nvlink_untold: tuple[int, ...] = ()
    nvlink_counters: LinkCounters = LinkCounters.NONE
    nvlink_replay: dict[str, int] = field(default_factory=dict)
    nvlink_recovery: dict[str, int] = field(default_factory=dict)
    nvlink_recovery_failed: dict[str, int] = field(default_factory=dict)
    nvlink_crc: dict[str, int] = field(default_factory=dict)
    nvlink_packet_errors: dict[str, int] = field(default_factory=dict)
    nvlink_ber: dict[str, float] = field(default_factory=dict)
    nvlink_symbol_ber: dict[str, float] = field(default_factory=dict)
    unsupported: tuple[str, ...] = ()
    unsupported_fields: tuple[int, ...] = ()
    errors: dict[str, str] = field(default_factory=dict)
    hang: str = ""
    hang_seconds: float = 3600.0
    crash: str = ""


class Machine(Value, frozen=True):
    """Settings of the whole machine (see the top of this file)."""

    driver_version: str = ""
    library: Library = Library.FINE
    missing_functions: tuple[str, ...] = ()
    hang: str = ""
    hang_seconds: float = 3600.0
    crash: str = ""
    random_failures: float = 0.0
    seed: int = 0


class Scenario(Machine, frozen=True):
    """Scenario file. Tables are kept as written: missing settings come from the profile."""

    profile: str = ""
    pci: tuple[str, ...] = ()
    start: float | None = None
    gpu: dict[str, dict[str, Any]] = field(default_factory=dict)
    at: tuple[dict[str, Any], ...] = ()


class Profile(Value, frozen=True):
    """Healthy machine: every GPU at the addresses `pci` has the settings `gpu`."""

    driver_version: str
    pci: tuple[str, ...]
    gpu: dict[str, Any]


class When(Value, frozen=True):
    """Time and GPU of an [[at]] entry. gpu: None for the machine. seconds: the time from which it applies."""

    seconds: float
    gpu: int | None = None


def profiles() -> list[str]:
    """Return the names of the machines that are part of healthd."""
    return toml.names_in(PROFILES)


@functools.cache
def profile(name: str) -> Profile:
    """Return a profile. Raises ConvertError if there is none of this name."""
    if name not in profiles():
        raise ConvertError(f'profile: there is no "{name}"{spelling_hint(name, profiles())}')
    with open(os.path.join(PROFILES, f"{name}.toml"), encoding="utf-8") as file:
        return load(Profile, toml.parse(file.read()), name)


def read(profile_or_file: str) -> tuple[Scenario, float]:
    """Return the checked scenario of a profile's name or a file, and the epoch from which its seconds count."""
    if profile_or_file in profiles():
        return Scenario(profile=profile_or_file), 0.0
    try:
        with ownership.open_file(profile_or_file) as file:
            modified = os.fstat(file).st_mtime
            text = ownership.read_all(file).decode("utf-8")
    except FileNotFoundError:
        hint = spelling_hint(profile_or_file, profiles())
        raise ConvertError(f'there is no profile and no file "{profile_or_file}"{hint}') from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConvertError(f"{profile_or_file}: cannot be read: {error}") from None
    try:
        scenario = parse(text)
    except ConvertError as error:
        raise ConvertError(f"{profile_or_file}: {error}") from None
    return scenario, modified if scenario.start is None else scenario.start


def parse(text: str) -> Scenario:
    """Parse and check the text of a scenario file. Raises ConvertError with one sentence."""
    try:
        data = toml.parse(text)
    except ConvertError as error:
        raise ConvertError(f"is not TOML: {error}") from None
    return check(data)


def check(data: object) -> Scenario:
    """Check a scenario, like `parse`, from the plain data of a file."""
    scenario = load(Scenario, data)
    if not scenario.profile:
        raise ConvertError(f'missing profile; write profile = "{profiles()[0]}"')
    for problem in _problems(scenario):
        raise ConvertError(problem)
    return scenario


def addresses(scenario: Scenario) -> tuple[str, ...]:
    """Return the PCI addresses of the machine's GPUs, by NVML's index, including those that NVML does not show."""
    return scenario.pci or profile(scenario.profile).pci


def state(scenario: Scenario, elapsed: float) -> tuple[Machine, tuple[Gpu, ...]]:
    """Return the machine and its GPUs after `elapsed` seconds. GPUs that equal the profile share one object."""
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
    """Yield each [[at]] entry: its time and GPU, its changes, and its place in the file."""
    for number, entry in enumerate(scenario.at):
        when = load(When, {k: v for k, v in entry.items() if k in ("seconds", "gpu")}, f"at[{number}]")
        settings = {k: v for k, v in entry.items() if k not in ("seconds", "gpu")}
        yield when, settings, f"at[{number}]"


def _problems(scenario: Scenario) -> Iterator[str]:
    """Yield the problems that types do not show. Raises ConvertError for problems of types."""
    for number, address in enumerate(scenario.pci):
        if not ADDRESS.fullmatch(address) or address in scenario.pci[:number]:
            yield f'pci[{number}]: must be another address like "0000:1b:00.0", got "{address}"'
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
    """`links_before`: number of NVLinks of the GPU if this table does not set it."""
    gpu = load(Gpu, table, where)
    yield from _fault_problems(gpu, f"{where}.")
    yield from _unknown_calls(gpu.unsupported, f"{where}.unsupported")
    yield from _unknown_calls(gpu.errors, f"{where}.errors")
    for call, error in gpu.errors.items():
        if error not in ERRORS:
            yield f"{where}.errors.{call}: pynvml has no NVMLError_{error}{spelling_hint(error, ERRORS)}"
    for name, number in _numbers(gpu):
        minimum, maximum = (-1000, 1000) if name in SIGNED else (0, LIMITS.get(name, MAX_COUNT))
        if not minimum <= number <= maximum:
            yield f"{where}.{name}: must be between {minimum} and {maximum}, got {show_number(number)}"
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
    """Yield (name, number) of a GPU's settings, except those with their own limits."""
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
