"""NVML for the checks. "Not supported" is returned as None, and all other errors are raised as NvmlError with a kind.

`Nvml` works with any object that has pynvml's functions: pynvml itself (`open_real`) or `fake_nvml.FakeLibrary`. NVML
is opened for one round and then closed, because `nvidia-smi --gpu-reset` fails while an agent keeps the driver open
("In use by another client"). Any call can block in the kernel for minutes, so NVML is used only in the worker.

The numbers of errors, fields and structures are from nvml.h. A function is also "not supported" if the driver
(FunctionNotFound) or the installed binding (no such attribute) is too old for it.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import CDLL, Array, byref, c_uint
from itertools import islice
from typing import Any, Protocol, TypeAlias, cast

from msgspec import field

from healthd.common.errors import HealthdError
from healthd.common.values import Value


class NvmlErrorKind(enum.Enum):
    """The kind of an error, according to NVML's error number."""

    LIBRARY_NOT_FOUND = 12  # libnvidia-ml.so.1 cannot be loaded
    DRIVER_NOT_LOADED = 9
    MISMATCH = 18  # the driver's version differs from that of the library loaded by this process
    GPU_LOST = 15  # the GPU fell off the bus
    RESET_REQUIRED = 16
    NO_PERMISSION = 4
    TIMEOUT = 10
    OTHER = 999


NO_DRIVER = (NvmlErrorKind.LIBRARY_NOT_FOUND, NvmlErrorKind.DRIVER_NOT_LOADED)
UNUSABLE_KINDS = (NvmlErrorKind.GPU_LOST, NvmlErrorKind.RESET_REQUIRED)  # every query fails until a reboot or a reset
NOT_SUPPORTED, FUNCTION_NOT_FOUND = 3, 13
INVALID_ARGUMENT, NO_PERMISSION, NOT_FOUND, CORRUPTED_INFOROM, ARGUMENT_VERSION_MISMATCH = 2, 4, 6, 14, 25
UNKNOWN_ERROR = 999
ABSENT = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND})

UNCORRECTED, CORRECTED = 1, 0  # nvmlMemoryErrorType_t
VOLATILE, AGGREGATE = 0, 1  # nvmlEccCounterType_t: since the driver was loaded, and over the GPU's life
LOCATIONS = {"dram": 2, "sram": 7}  # nvmlMemoryLocation_t: the locations that Ampere and later support
GPU_SENSOR = 0
SLOWDOWN_THRESHOLD, MEMORY_MAX_THRESHOLD = 1, 2  # nvmlTemperatureThresholds_t
MULTIPLE_SINGLE_BIT, DOUBLE_BIT = 0, 1  # nvmlPageRetirementCause_t

LIBRARY = "libnvidia-ml.so.1"

FIELD_MEMORY_TEMPERATURE = 82
FIELD_POWER_AVERAGE = 185  # milliwatts over the last second: Ampere (except GA100) and newer (nvml.h)
FIELD_NVLINK_LINK_COUNT = 91
FIELD_SLOWDOWN_MARGIN = 194  # Ada and later
FIELD_RECOVERY_ACTION = 230  # driver >= 570
# Nanoseconds since the driver was loaded, in late 580 drivers and newer. (575 and the first 580 drivers had them as 252
# and 253, which are power smoothing settings in other drivers and are therefore never queried. Fields 270 and 271 of
# those drivers do not grow.)
FIELDS_SLOWDOWN = {"hw_thermal": 270, "hw_power_brake": 271}

# For one link (scopeId = link). Hopper, driver >= 525:
FIELD_LINK_STATE = 165
# 0 inactive, 1 active, 2 sleep, and since 615 also 3 (NVML_NVLINK_STATE_ACTIVE_TRAFFIC_DISABLED in NVML's change log)
LINK_TRAFFIC_DISABLED = 3
FIELDS_LINK_ERRORS = (161, 162, 163)  # replay, recovery, CRC
# Blackwell, driver >= 560:
FIELDS_LINK_PACKET_ERRORS = {
    "malformed packets": 206,
    "buffer overruns": 207,
    "receive errors": 208,
    "remote receive errors": 209,
    "general receive errors": 210,
    "link integrity errors": 211,
    "transmit discards": 212,
}
FIELD_LINK_RECOVERIES = 215  # successful and failed recoveries together
FIELDS_LINK_RECOVERY_KINDS = (213, 214)  # successful, failed; queried only if there were any
FIELDS_LINK_BER = (220, 222)  # effective, symbol
FIELD_LINK_SPEED = 164  # MB/s: Hopper and later, driver >= 525 (NVML_FI_DEV_NVLINK_GET_SPEED)
# Chip-to-chip links of Grace, with scopeId = link: driver >= 535, the counters >= 570.
FIELD_C2C_COUNT, FIELD_C2C_STATUS = 170, 171
FIELDS_C2C_COUNTERS = (231, 232, 233, 234)  # error interrupts, replays, back-to-back replays, power state (0 = full)
# Counters that grow only while a job computes and communicates: (field, scope) by name. Units since the driver was
# loaded: KiB over all links of a GPU (scope UINT_MAX is the sum over the links), bytes, millijoules.
ALL_LINKS = 0xFFFFFFFF
FIELDS_ACTIVITY: Mapping[str, tuple[tuple[int, int], ...]] = {
    "nvlink": ((138, ALL_LINKS), (139, ALL_LINKS)),
    "pcie": ((197, 0), (198, 0)),
    "power": ((83, 0),),
}
# nvmlPlatformInfo_t.peerType, which nvml.h describes without numbers. nvidia-smi shows 1 as "Switch Connected" and 0 as
# "Direct Connected": github.com/NVIDIA/k8s-test-infra@3b2b865d, pkg/gpu/mocknvml/engine/platform.go.
SWITCH_CONNECTED = 1
WIDE_TYPES = (2, 3)  # nvmlValueType_t: unsigned long, unsigned long long
SM_CLOCK = 1  # nvmlClockType_t
FIELDS_LINK = (
    FIELD_LINK_STATE,
    FIELD_LINK_SPEED,
    *FIELDS_LINK_ERRORS,
    FIELD_LINK_RECOVERIES,
    *FIELDS_LINK_BER,
    *FIELDS_LINK_PACKET_ERRORS.values(),
)
LINK_COUNTERS = (0, 1, 2, 3)  # nvmlNvLinkErrorCounter_t: replay, recovery, CRC of flits, CRC of data

# Versions of the fabric structure, newest first, with the call that takes it. A driver rejects versions that it does
# not know (ArgumentVersionMismatch). Driver >= 615, 580, 550, 525.
FABRIC_VERSIONS = (
    ("nvmlDeviceGetGpuFabricInfo_v4", "c_nvmlGpuFabricInfo_v4_t"),
    ("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v3_t"),
    ("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v2_t"),
    ("nvmlDeviceGetGpuFabricInfo", "c_nvmlGpuFabricInfo_t"),
)

# Version 4 lists a GPU's cliques by type. This type replaces the clique of the older versions: GPUs in it reach each
# other's memory over NVLink (NVML_GPU_FABRIC_CLIQUE_TYPE_UNICAST_POINTER).
UNICAST_POINTER = 0

# nvmlFieldValue_t: the field, its value's type, its own return code and the value's bytes (scope, timestamp and latency
# are skipped). All members are unpacked at once, because reading a single member through ctypes costs as much.
FIELD_VALUE = struct.Struct("I20xII8s")
RawField: TypeAlias = tuple[int, int, int, bytes]
# format of the bytes in the union nvmlValue_t, by nvmlValueType_t
VALUE_TYPES = tuple(map(struct.Struct, "dILQqiH"))

# Reads a structure member without pynvml's text conversion, which takes ten times as long.
raw = object.__getattribute__


class NvmlError(HealthdError):
    """A failed NVML call. `number` is NVML's error number.

    `pci` is the GPU's address, or "" if the error is not about one GPU or the address is unknown. `index` is NVML's
    index of that GPU, or None if the error is not about one GPU.
    """

    def __init__(
        self,
        kind: NvmlErrorKind,
        call: str,
        message: str,
        pci: str = "",
        index: int | None = None,
        number: int = UNKNOWN_ERROR,
    ) -> None:
        part = f"GPU {pci}" if pci else "" if index is None else f"the GPU with index {index}"
        super().__init__(f"{call}{' of ' if part else ''}{part}: {message}")
        self.kind = kind
        self.call = call
        self.message = message
        self.pci = pci
        self.index = index
        self.number = number


class NvmlLibrary(Protocol):
    """pynvml, or an object with the same functions, structures and errors. `call_nvml` finds functions by name."""

    @property
    def NVMLError(self) -> type[Exception]: ...
    @property
    def NVML_NVLINK_MAX_LINKS(self) -> int: ...


class RemappedRows(Value, frozen=True):
    """Counts of rows replaced after correctable and uncorrectable errors. `failure` stays set after one failed
    remap."""

    correctable: int
    uncorrectable: int
    pending: bool
    failure: bool


class Histogram(Value, frozen=True):
    """Number of memory banks with all, many, some, few and no spare rows left."""

    max: int
    high: int
    partial: int
    low: int
    none: int


class RetiredPages(Value, frozen=True):
    """Counts of memory pages retired after several single-bit errors or a double-bit error, and whether more pages wait
    for a reboot."""

    single_bit: int
    double_bit: int
    pending: bool


class Fabric(Value, frozen=True):
    """State of a GPU in its NVLink fabric (NVSwitch systems, Hopper and later).

    state         0 not supported, 1 not started, 2 in progress, 3 completed
    status        NVML's error number for joining the fabric; valid only in state 3
    health_mask   bit fields, see NVML_GPU_FABRIC_HEALTH_MASK_* in nvml.h; None before driver 550
    summary       0 not supported, 1 healthy, 2 unhealthy, 3 limited capacity; None before driver 580
    cluster       UUID of the NVLink domain ("00000001-0000-0000-0000-000000000001"), or "" if it is all zeros, as on
                  a GPU whose fabric ends at its own baseboard. Valid only in state 3
    clique        number of the partition within the domain. GPUs in the same clique reach each other over NVLink
    """

    state: int
    status: int
    health_mask: int | None
    summary: int | None
    cluster: str = ""
    clique: int = 0


class Platform(Value, frozen=True):
    """Position of a GPU in its chassis (driver >= 570; HGX B200, GB200, GB300; not H100).

    peer_type        SWITCH_CONNECTED if the GPU's NVLinks lead to switches: on a tray of an NVL72, but also on an
                     HGX B200, whose cluster is all zeros (qx-b200.xml, qx-gb200.xml in k8s-test-infra@3b2b865d)
    chassis_serial   serial number of the chassis, or "" if none is set, as on HGX B200; on an NVL72, of the rack
    slot, tray       slot in the chassis (switches count) and index among the compute slots (they do not)
    host, module     index of the node in the slot, and of the GPU in the node
    """

    peer_type: int
    chassis_serial: str
    slot: int
    tray: int
    host: int
    module: int

    @property
    def is_in_rack(self) -> bool:
        """Return True if the GPU's NVLinks lead to switches outside the node, as on an NVL72."""
        return self.peer_type == SWITCH_CONNECTED and bool(self.chassis_serial)


class C2cLink(Value, frozen=True):
    """A chip-to-chip link between a GPU and its Grace CPU, with its counters since the driver was loaded (None if the
    driver does not report them; driver >= 570). `active` is None if the driver does not report the link's state."""

    active: bool | None
    error_interrupts: int | None
    replays: int | None
    back_to_back_replays: int | None
    is_full_power: bool | None


class PendingRepair(Value, frozen=True):
    """Repairs that the GPU makes at its next reset: of a memory channel, and of a TPC (texture processing cluster)."""

    channel: bool
    tpc: bool


class TemperatureLimits(Value, frozen=True):
    """The temperature at which the GPU slows down and the maximum for its memory, in degrees Celsius, or None if not
    reported.

    Ada and later report a margin instead. `slowdown_margin` is the `temperature_margin` at which the GPU slows down (-2
    on an H100). An A100 slows down at 89, and its memory's maximum is 95.
    """

    slowdown: int | None
    memory_max: int | None
    slowdown_margin: int | None


class Nvlink(Value, frozen=True):
    """A link with its counters since the driver was loaded. A counter is None if the GPU lacks it or the link is down.

    active                        None if no call reports the link's state, which does not mean that it is down
    replay, recovery, crc         before Blackwell
    recovered, recovery_failed    Blackwell: successful and failed recoveries
    effective_ber, symbol_ber     Blackwell: share of the bits that are wrong after forward error correction, and of the
                                  bits that are still wrong after retransmission
    packet_errors                 Blackwell: counts by name (see FIELDS_LINK_PACKET_ERRORS)
    speed                         speed of an active link in MB/s (53125 for NVLink 5, 26562 for NVLink 4), or None
    is_traffic_disabled           the link is active, but carries no traffic (driver 615)
    """

    active: bool | None
    replay: int | None = None
    recovery: int | None = None
    crc: int | None = None
    recovered: int | None = None
    recovery_failed: int | None = None
    effective_ber: float | None = None
    symbol_ber: float | None = None
    packet_errors: Mapping[str, int] = field(default_factory=dict)
    speed: int | None = None
    is_traffic_disabled: bool = False


class PcieLink(Value, frozen=True):
    """Current and maximum PCIe generation and lanes. An idle GPU lowers its generation, which is not a fault."""

    generation: int | None
    width: int | None
    max_generation: int | None
    max_width: int | None


def error_kind(number: int) -> NvmlErrorKind:
    """Return the kind of an NVML error number, or OTHER for unknown numbers from newer drivers."""
    try:
        return NvmlErrorKind(number)
    except ValueError:
        return NvmlErrorKind.OTHER


def sysfs_address(domain: int, bus: int, device: int) -> str:
    """Return the address as the kernel writes it. NVML's own text has eight domain digits and upper-case letters."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _nothing() -> None:
    return None


# Called before each NVML call. The worker sets it to a function that ends the process once the daemon has given up on
# it. Without this, a driver that takes seconds for each call would keep NVML blocked for the whole check.
before_call: Callable[[], None] = _nothing


def call_nvml(
    library: NvmlLibrary,
    call: str,
    *arguments: Any,
    pci: str = "",
    index: int | None = None,
    absent: frozenset[int] = ABSENT,
) -> Any:
    """Return the result of `call`, or None if it fails with one of the numbers in `absent`. Raises NvmlError."""
    function = getattr(library, call, None)
    if function is None:
        number, message = FUNCTION_NOT_FOUND, "not in the installed nvidia-ml-py"
    else:
        before_call()
        try:
            return function(*arguments)
        except library.NVMLError as error:
            number, message = cast(Any, error).value, str(error)
        except UnicodeDecodeError:
            number, message = UNKNOWN_ERROR, "returned text that is not UTF-8"
    if number in absent:
        return None
    raise NvmlError(error_kind(number), call, message, pci, index, number)


class NvmlGpu:
    """A GPU that responds. Each method call queries the driver, and returns None if this GPU or driver does not support
    the query. `on_lost` is called for an error that reports the GPU as lost or as requiring a reset.
    """

    def __init__(
        self,
        library: NvmlLibrary,
        handle: Any,
        pci: str,
        index: int,
        uuid: str,
        name: str,
        on_lost: Callable[[NvmlError], None],
    ) -> None:
        self._library = library
        self._handle = handle
        self.pci = pci
        self.index = index
        self.uuid = uuid
        self.name = name
        self._on_lost = on_lost

    def _call(self, call: str, *arguments: Any, absent: frozenset[int] = ABSENT) -> Any:
        try:
            return call_nvml(
                self._library, call, self._handle, *arguments, pci=self.pci, index=self.index, absent=absent
            )
        except NvmlError as error:
            raise self._note_if_lost(error) from None

    def _note_if_lost(self, error: NvmlError) -> NvmlError:
        if error.kind in UNUSABLE_KINDS:
            self._on_lost(error)
        return error

    def minor(self) -> int | None:
        """Return the N in the GPU's device file /dev/nvidiaN, which is not always its index."""
        return cast("int | None", self._call("nvmlDeviceGetMinorNumber"))

    def serial(self) -> str | None:
        """Return the serial number of the GPU's board, as printed on its label. Both GPUs of a dual-GPU board have the
        same number (nvml.h, nvmlDeviceGetHandleBySerial). None for products without an InfoROM."""
        return cast("str | None", self._call("nvmlDeviceGetSerial"))

    def vbios(self) -> str | None:
        return cast("str | None", self._call("nvmlDeviceGetVbiosVersion"))

    def compute_capability(self) -> tuple[int, int] | None:
        """Return the compute capability, such as (9, 0) for GH100. It distinguishes chips of one architecture, such as
        GA100 (8, 0) and GA10x (8, 6)."""
        capability = self._call("nvmlDeviceGetCudaComputeCapability")
        return None if capability is None else (int(capability[0]), int(capability[1]))

    def virtualization(self) -> int | None:
        """Return 0 for none, 1 if passed through to this virtual machine, 2 for a vGPU, or 3 or 4 if shared by this
        host."""
        return cast("int | None", self._call("nvmlDeviceGetVirtualizationMode"))

    def temperature(self) -> int | None:
        """Return the temperature in degrees Celsius."""
        return cast("int | None", self._call("nvmlDeviceGetTemperature", GPU_SENSOR))

    def temperature_limits(self) -> TemperatureLimits:
        """Return the limits. For Ada and later, which may lack the thresholds, nvml.h recommends the margin."""
        margin = self._field(FIELD_SLOWDOWN_MARGIN)
        return TemperatureLimits(
            self._threshold(SLOWDOWN_THRESHOLD),
            self._threshold(MEMORY_MAX_THRESHOLD),
            None if margin is None else int(margin),
        )

    def _threshold(self, threshold: int) -> int | None:
        absent = ABSENT | {INVALID_ARGUMENT, ARGUMENT_VERSION_MISMATCH}
        return cast("int | None", self._call("nvmlDeviceGetTemperatureThreshold", threshold, absent=absent))

    def temperature_margin(self) -> int | None:
        """Return the degrees Celsius left until the driver begins to slow down the GPU (T.LIMIT in nvidia-smi).

        The value is negative if the GPU is hotter. The hardware slows down at `temperature_limits().slowdown_margin`.
        Driver >= 570.
        """
        absent = ABSENT | {ARGUMENT_VERSION_MISMATCH}
        return cast("int | None", self._call("nvmlDeviceGetMarginTemperature", absent=absent))

    def memory_temperature(self) -> int | None:
        """Return the memory temperature in degrees Celsius, or None on GPUs without HBM."""
        celsius = self._field(FIELD_MEMORY_TEMPERATURE)
        return None if celsius is None else int(celsius)

    def utilization(self) -> float | None:
        """Return the share of time (0 to 1) that the GPU was busy in the last sample, which covers at most a second.
        None with MIG."""
        rates = self._call("nvmlDeviceGetUtilizationRates")
        return None if rates is None else rates.gpu / 100

    def persistence_mode(self) -> bool | None:
        """Return True if the driver keeps the GPU initialised while it is unused."""
        mode = self._call("nvmlDeviceGetPersistenceMode")
        return None if mode is None else bool(mode)

    def inforom_valid(self) -> bool | None:
        """Return True if the InfoROM's checksums are correct."""
        try:
            self._call("nvmlDeviceValidateInforom", absent=frozenset())
        except NvmlError as error:
            if error.number == CORRUPTED_INFOROM:
                return False
            if error.number in ABSENT:
                return None
            raise
        return True

    def enforced_power_limit_watts(self) -> float | None:
        """Return the lowest of all power limits now in force."""
        milliwatts = self._call("nvmlDeviceGetEnforcedPowerLimit")
        return None if milliwatts is None else milliwatts / 1000

    def default_power_limit_watts(self) -> float | None:
        milliwatts = self._call("nvmlDeviceGetPowerManagementDefaultLimit")
        return None if milliwatts is None else milliwatts / 1000

    def clock_event_reasons(self) -> int | None:
        """Return the current reasons for reduced clocks, as NVML_CLOCKS_EVENT_REASON_* bits.

        0x1 idle, 0x2 application clocks, 0x4 software power cap, 0x8 hardware slowdown, 0x10 sync boost, 0x20 software
        thermal, 0x40 hardware thermal, 0x80 hardware power brake, 0x100 display. Drivers before 535 have an older call.
        """
        for call in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            reasons = self._call(call)
            if reasons is not None:
                return cast(int, reasons)
        return None

    def sm_clock_mhz(self) -> int | None:
        """Return the current clock of the multiprocessors."""
        return cast("int | None", self._call("nvmlDeviceGetClockInfo", SM_CLOCK))

    def slowdown_seconds(self) -> dict[str, float] | None:
        """Return the seconds of hardware slowdowns since the driver was loaded, by reason. They never decrease.

        hw_thermal is heat, hw_power_brake the power supply's power brake. None before the late 580 drivers, because the
        violation times of older drivers (nvmlDeviceGetViolationStatus) include software slowdowns, which are normal.
        """
        values = self._fields([*FIELDS_SLOWDOWN.values()])
        seconds = {name: value / 1e9 for name, value in zip(FIELDS_SLOWDOWN, values, strict=True) if value is not None}
        return seconds or None

    def compute_processes(self) -> tuple[int, ...] | None:
        """Return the ids of processes with a context on this GPU, including its MIG devices (needs root).

        The call takes a lock in the driver, so do not make it in every round.
        """
        for call in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"):
            processes = self._call(call)  # v3: driver >= 510
            if processes is not None:
                return tuple(sorted({process.pid for process in processes}))
        return None

    # MIG

    def mig_enabled(self) -> bool | None:
        mode = self.mig_mode()
        return None if mode is None else mode[0]

    def mig_mode(self) -> tuple[bool, bool] | None:
        """Return whether MIG is on now, and whether it will be on after the next reset. Return None if the GPU does not
        have MIG."""
        mode = self._call("nvmlDeviceGetMigMode")
        return None if mode is None else (bool(mode[0]), bool(mode[1]))

    def mig_instances(self) -> int | None:
        """Return the current number of MIG devices (compute instances) on this GPU."""
        maximum = self._call("nvmlDeviceGetMaxMigDeviceCount")
        return None if maximum is None else len(self._mig_devices(maximum))

    def mig_uuids(self) -> tuple[str, ...]:
        """Return the UUIDs of the GPU's MIG devices, in NVML's order. If a device has no UUID, return "" for it."""
        devices = self._mig_devices(self._call("nvmlDeviceGetMaxMigDeviceCount") or 0)
        return tuple(str(call_nvml(self._library, "nvmlDeviceGetUUID", mig, pci=self.pci) or "") for mig in devices)

    def _mig_devices(self, maximum: int) -> list[Any]:
        absent = ABSENT | {NOT_FOUND, INVALID_ARGUMENT}  # the numbers have gaps
        devices = (self._call("nvmlDeviceGetMigDeviceHandleByIndex", index, absent=absent) for index in range(maximum))
        return [device for device in devices if device is not None]

    # ECC

    def ecc_is_on_by_default(self) -> bool | None:
        """Return the factory default of the ECC mode, or None if the driver (before 515) lacks the call."""
        default = self._call("nvmlDeviceGetDefaultEccMode")
        return None if default is None else bool(default[0])

    def ecc_mode(self) -> bool | None:
        """Return True if ECC is on now. A change that waits for a reset is ignored."""
        mode = self._call("nvmlDeviceGetEccMode")
        return None if mode is None else bool(mode[0])

    def ecc_total(self, uncorrected: bool, volatile: bool) -> int | None:
        """Return the number of memory errors since the driver was loaded (`volatile`) or over the GPU's life."""
        return cast("int | None", self._call("nvmlDeviceGetTotalEccErrors", *_ecc_arguments(uncorrected, volatile)))

    def ecc_count(self, location: str, uncorrected: bool, volatile: bool) -> int | None:
        """Return the number of memory errors in one `location`, "sram" or "dram". The other arguments are as for
        `ecc_total`."""
        arguments = (*_ecc_arguments(uncorrected, volatile), LOCATIONS[location])
        return cast("int | None", self._call("nvmlDeviceGetMemoryErrorCounter", *arguments))

    def sram_threshold_exceeded(self) -> bool | None:
        """Return True if uncorrected SRAM errors exceeded NVIDIA's threshold for a replacement; None also without root.

        Only this call needs root (nvml.h), and an unprivileged `healthd check` must still run the rest.
        """
        make = getattr(self._library, "c_nvmlEccSramErrorStatus_v1_t", None)
        if make is None:
            return None
        status = make()
        absent = ABSENT | {NO_PERMISSION, ARGUMENT_VERSION_MISMATCH}
        if self._call("nvmlDeviceGetSramEccErrorStatus", byref(status), absent=absent) is None:
            return None
        return bool(status.bThresholdExceeded)

    def remapped_rows(self) -> RemappedRows | None:
        """Return the remapped rows, or None before Ampere or while MIG instances exist."""
        rows = self._call("nvmlDeviceGetRemappedRows")
        return None if rows is None else RemappedRows(rows[0], rows[1], bool(rows[2]), bool(rows[3]))

    def row_remap_histogram(self) -> Histogram | None:
        banks = self._call("nvmlDeviceGetRowRemapperHistogram")
        if banks is None:
            return None
        return Histogram(banks.max, banks.high, banks.partial, banks.low, banks.none)

    def unrepairable_memory(self) -> bool | None:
        """Return True if there is memory that no spare row can replace. Hopper and later report this with driver >=
        590, even with MIG.
        """
        flag = self._call("nvmlDeviceGetUnrepairableMemoryFlag_v1", absent=ABSENT | {ARGUMENT_VERSION_MISMATCH})
        return None if flag is None else bool(flag)

    def retired_pages(self) -> RetiredPages | None:
        """Return the retired pages, or None on Ampere and later, which remap rows."""
        single = self._call("nvmlDeviceGetRetiredPages", MULTIPLE_SINGLE_BIT)
        double = self._call("nvmlDeviceGetRetiredPages", DOUBLE_BIT)
        if single is None or double is None:
            return None
        return RetiredPages(len(single), len(double), bool(self._call("nvmlDeviceGetRetiredPagesPendingStatus")))

    def recovery_action(self) -> int | None:
        """Return the requested recovery action: 0 none, 1 GPU reset, 2 reboot, 3 drain P2P, 4 drain and reset."""
        action = self._field(FIELD_RECOVERY_ACTION)
        return None if action is None else int(action)

    def uptime_seconds(self) -> int | None:
        """Return the seconds since the driver initialised the GPU: at a GPU reset, a reboot or a reload of the driver.

        With MIG, this is the uptime of the whole GPU. Drivers before CUDA 13.5 do not report it (nvml.h).
        """
        seconds = c_uint()
        return None if self._call("nvmlDeviceGetGpuUptime_v1", byref(seconds)) is None else seconds.value

    # NVLink

    def fabric(self) -> Fabric | None:
        """Return the fabric state, or None if there is no NVSwitch."""
        for call, structure in FABRIC_VERSIONS:
            make = getattr(self._library, structure, None)
            if make is None:
                continue
            info = make()
            if self._call(call, byref(info), absent=ABSENT | {ARGUMENT_VERSION_MISMATCH}) is not None:
                mask, summary = getattr(info, "healthMask", None), getattr(info, "healthSummary", None)
                cluster = _uuid_text(bytes(raw(info, "clusterUuid")))
                return Fabric(info.state, info.status, mask, summary, cluster, _clique(info))
        return None

    def platform(self) -> Platform | None:
        """Return the GPU's position in its chassis, or None if the platform does not report it."""
        make = getattr(self._library, "c_nvmlPlatformInfo_v2_t", None)
        if make is None:
            return None
        info = make()
        absent = ABSENT | {ARGUMENT_VERSION_MISMATCH}
        if self._call("nvmlDeviceGetPlatformInfo", byref(info), absent=absent) is None:
            return None
        serial = raw(info, "chassisSerialNumber").decode("utf-8", "replace").strip()
        serial = "" if serial == "N/A" or not serial.strip("0") else serial
        slot, tray, host, peer, module = (
            raw(info, name)[0] for name in ("slotNumber", "trayIndex", "hostId", "peerType", "moduleId")
        )
        return Platform(peer, serial, slot, tray, host, module)

    def c2c_links(self) -> tuple[C2cLink, ...]:
        """Return the chip-to-chip links to the Grace CPU in the order of their numbers, or () if there are none."""
        fields = (FIELD_C2C_STATUS, *FIELDS_C2C_COUNTERS)
        count = int(self._field(FIELD_C2C_COUNT) or 0)
        values = self._fields([(field, link) for link in range(count) for field in fields])
        links = []
        for link in range(count):
            status, *counts = values[link * len(fields) : (link + 1) * len(fields)]
            interrupts, replays, repeated, power = (None if value is None else int(value) for value in counts)
            is_active = None if status is None else bool(status)
            links.append(C2cLink(is_active, interrupts, replays, repeated, None if power is None else power == 0))
        return tuple(links)

    def c2c_enabled(self) -> bool | None:
        """Return True if C2C is on (C2C Mode in nvidia-smi -q), or None if the GPU has no such mode."""
        mode = self._call("nvmlDeviceGetC2cModeInfoV", absent=ABSENT | {ARGUMENT_VERSION_MISMATCH})
        return None if mode is None else bool(mode.isC2cEnabled)

    def pending_repair(self) -> PendingRepair | None:
        """Return the repairs that wait for a GPU reset, or None if the driver (before 580) does not report them."""
        found = self._call("nvmlDeviceGetRepairStatus", absent=ABSENT | {ARGUMENT_VERSION_MISMATCH})
        return None if found is None else PendingRepair(bool(found[0]), bool(found[1]))

    def nvlinks(self) -> tuple[Nvlink, ...] | None:
        """Return this GPU's links in the order of their numbers, or None if it has none.

        Hopper and later need three queries: the number of links, all fields of the first link, and for the other links
        the fields that the first link supports. Everything else, and before Hopper all data, is queried link by link.
        Before Hopper, or if the driver does not report the number of links, links are queried until one is missing. The
        binding's NVML_NVLINK_MAX_LINKS does not help, because it is not the number of any GPU's links. If the driver
        reports the number of links, all of them are returned, also those whose state it does not report.
        """
        count = self._field(FIELD_NVLINK_LINK_COUNT)
        maximum = self._library.NVML_NVLINK_MAX_LINKS if count is None else int(count)
        links: list[Nvlink] = []
        previous: dict[int, float | NvmlError | None] | None = None
        answer: Nvlink | None = None
        for link, values in enumerate(self._link_fields(maximum)):
            if values is not previous:
                answer = self._nvlink(link, values)
                previous = values if _needs_no_calls(values) else None
            if answer is None and count is None:
                break
            links.append(answer or Nvlink(active=None))
        return tuple(links) or None

    def _link_fields(self, maximum: int) -> Iterator[dict[int, float | NvmlError | None]]:
        """Yield a dict with each link's fields. Fields that an active link lacks (usually three of four) are queried
        only once. If a link has the same values as the previous one, like most of 144, the same dict is yielded
        again."""
        fields, queried = FIELDS_LINK, 0
        while queried < maximum and len(fields) == len(FIELDS_LINK):
            values = dict(zip(fields, self._results([(field, queried) for field in fields]), strict=True))
            yield values
            queried += 1
            present = tuple(field for field in fields if values[field] is not None)
            if values[FIELD_LINK_STATE] or not present:
                fields = present
        raw_values = iter(self._raw_values([(field, link) for link in range(queried, maximum) for field in fields]))
        previous: list[RawField] | None = None
        for _ in range(queried, maximum):
            link_values = list(islice(raw_values, len(fields)))
            if link_values != previous:
                previous, values = link_values, dict(zip(fields, map(self._value, link_values), strict=True))
            yield values

    def _nvlink(self, link: int, values: dict[int, float | NvmlError | None]) -> Nvlink | None:
        """Return a link, made from its field values. Older calls replace missing fields.

        A link that is down has no counts, and errors from its counters must not hide that it is down.
        """
        state = _value_or_raise(values.get(FIELD_LINK_STATE))
        if state is None:
            state = self._call("nvmlDeviceGetNvLinkState", link, absent=ABSENT | {INVALID_ARGUMENT})
        if state is None:
            return None
        if not state:
            return Nvlink(active=False)
        counts = {field: int(value) for field in values if (value := _value_or_raise(values[field])) is not None}
        replay, recovery, crc = (counts.get(field) for field in FIELDS_LINK_ERRORS)
        recovered, failed = self._recoveries(link, counts.get(FIELD_LINK_RECOVERIES))
        if replay is None and recovery is None and crc is None and recovered is None:
            replay, recovery, flits, data = (self._link_counter(link, counter) for counter in LINK_COUNTERS)
            crc = None if flits is None else flits + (data or 0)
        effective, symbol = (_unpacked_ber(counts.get(field)) for field in FIELDS_LINK_BER)
        packets = {name: counts[field] for name, field in FIELDS_LINK_PACKET_ERRORS.items() if field in counts}
        speed = counts.get(FIELD_LINK_SPEED)
        is_traffic_disabled = state == LINK_TRAFFIC_DISABLED
        return Nvlink(
            True, replay, recovery, crc, recovered, failed, effective, symbol, packets, speed, is_traffic_disabled
        )

    def _recoveries(self, link: int, total: int | None) -> tuple[int | None, int | None]:
        """Return the numbers of a link's successful and failed recoveries."""
        if not total:
            return total, total
        recovered, failed = self._fields([(field, link) for field in FIELDS_LINK_RECOVERY_KINDS])
        if recovered is None or failed is None:
            return total, 0  # this driver reports only the sum; a failed recovery also takes the link down
        return int(recovered), int(failed)

    def _link_counter(self, link: int, counter: int) -> int | None:
        absent = ABSENT | {INVALID_ARGUMENT}
        return cast("int | None", self._call("nvmlDeviceGetNvLinkErrorCounter", link, counter, absent=absent))

    # PCI Express

    def pcie_replays(self) -> int | None:
        """Return the number of packets resent since the driver was loaded."""
        return cast("int | None", self._call("nvmlDeviceGetPcieReplayCounter"))

    def pcie_link(self) -> PcieLink:
        return PcieLink(
            self._call("nvmlDeviceGetCurrPcieLinkGeneration"),
            self._call("nvmlDeviceGetCurrPcieLinkWidth"),
            self._call("nvmlDeviceGetMaxPcieLinkGeneration"),
            self._call("nvmlDeviceGetMaxPcieLinkWidth"),
        )

    # activity counters

    def mean_power_milliwatts(self) -> float | None:
        """Return the mean power over the last second, or None if the driver does not report it."""
        return self._field(FIELD_POWER_AVERAGE)

    def activity_counters(self, names: Sequence[str]) -> dict[str, int]:
        """Return the counters by name (see FIELDS_ACTIVITY), as the sum of both directions, in one query. Unsupported
        counters are omitted. 32-bit counters are omitted too, because PCIe traffic overflows one in a tenth of a
        second."""
        fields = [field for name in names for field in FIELDS_ACTIVITY[name]]
        if not fields:
            return {}
        counts, remaining = dict[str, int](), iter(self._raw_values(fields))
        for name in names:
            parts = [next(remaining) for _ in FIELDS_ACTIVITY[name]]
            if all(number == 0 and kind in WIDE_TYPES for _, kind, number, _ in parts):
                counts[name] = sum(cast(int, _number(kind, value)) for _, kind, _, value in parts)
        return counts

    # field values

    def _field(self, field: int) -> float | None:
        return self._fields([field])[0]

    def _fields(self, fields: Sequence[int | tuple[int, int]]) -> list[float | None]:
        """Return the values of `fields`, with None for missing ones. A field is an id, or an id and its scope.

        The call succeeds even if single values failed. Each value has its own return code, and its type selects the
        union member. An id or link that the driver does not know causes an invalid argument error.
        """
        return [_value_or_raise(answer) for answer in self._results(fields)]

    def _results(self, fields: Sequence[int | tuple[int, int]]) -> list[float | NvmlError | None]:
        """Return the values of `fields` like `_fields`, but with the errors of fields that failed."""
        return [self._value(raw_field) for raw_field in self._raw_values(fields)]

    def _raw_values(self, fields: Sequence[int | tuple[int, int]]) -> list[RawField]:
        """Return the values of `fields` like `_results`, but in the driver's raw form."""
        values = self._call("nvmlDeviceGetFieldValues", fields, absent=ABSENT | {INVALID_ARGUMENT}) if fields else ()
        if values is None:
            return [(0, 0, NOT_SUPPORTED, b"")] * len(fields)
        return [*FIELD_VALUE.iter_unpack(values if isinstance(values, Array) else b"".join(values))]  # replayed: a list

    def _value(self, raw_field: RawField) -> float | NvmlError | None:
        field, kind, number, value = raw_field
        if number == 0 and kind < len(VALUE_TYPES):
            return _number(kind, value)
        if number == INVALID_ARGUMENT or number in ABSENT:
            return None
        call = f"nvmlDeviceGetFieldValues field {field}"
        if number != 0:
            message = str(cast(Any, self._library.NVMLError)(number))
            return self._note_if_lost(NvmlError(error_kind(number), call, message, self.pci, self.index, number))
        message = f"returned a value of unknown type {kind}"
        return NvmlError(NvmlErrorKind.OTHER, call, message, self.pci, self.index)


def _number(kind: int, value: bytes) -> float:
    number: float = VALUE_TYPES[kind].unpack_from(value)[0]
    return number


def _needs_no_calls(values: Mapping[int, float | NvmlError | None]) -> bool:
    """Return True if a link with these field values needs no further queries."""
    has_counters = any(field in values for field in (*FIELDS_LINK_ERRORS, FIELD_LINK_RECOVERIES))
    if values.get(FIELD_LINK_RECOVERIES):
        return False
    return has_counters and FIELD_LINK_STATE in values and None not in values.values()


def _value_or_raise(result: float | NvmlError | None) -> float | None:
    if isinstance(result, NvmlError):
        raise result
    return result


def _unpacked_ber(packed: int | None) -> float | None:
    """Decode a bit error rate: the exponent's absolute value is in bits 7:0, the mantissa in bits 11:8 (nvml.h,
    NVML_NVLINK_ERROR_COUNTER_BER_GET). A link without errors has 0xfff, 15e-255.
    """
    return None if packed is None else float(f"{packed >> 8 & 0xF}e-{packed & 0xFF}")


def _uuid_text(uuid: bytes) -> str:
    """Return a UUID of 16 bytes as text, or "" for zeros."""
    digits = uuid.hex()
    return "-".join(digits[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))) if any(uuid) else ""


def _clique(info: Any) -> int:
    """Return the number of the GPU's clique, or 0 if it is in none."""
    if not hasattr(info, "numCliques"):
        return int(info.cliqueId)
    cliques = islice(info.cliques, info.numCliques)
    return next((int(clique.id) for clique in cliques if clique.type == UNICAST_POINTER), 0)


def _ecc_arguments(uncorrected: bool, volatile: bool) -> tuple[int, int]:
    return UNCORRECTED if uncorrected else CORRECTED, VOLATILE if volatile else AGGREGATE


class Nvml:
    """NVML after nvmlInit. `gpus` and `unreachable` come from a single enumeration on first use. If a GPU is later
    reported as lost or as requiring a reset, it moves from `gpus` to `unreachable`."""

    def __init__(self, library: NvmlLibrary) -> None:
        self._library = library
        self._found: tuple[tuple[NvmlGpu, ...], tuple[NvmlError, ...]] | None = None
        self.lost_since_open = 0  # number of GPUs that responded during the enumeration and were lost later

    @classmethod
    def open(cls, library: NvmlLibrary) -> Nvml:
        """Call nvmlInit. After a failure the call may be repeated in the same process, except after MISMATCH. In that
        case the wrong library stays loaded, so the process must be replaced."""
        call_nvml(library, "nvmlInit", absent=frozenset())
        return cls(library)

    def close(self) -> None:
        """Call nvmlShutdown. Raises NvmlError if it fails, because the driver is then still open in this process."""
        call_nvml(self._library, "nvmlShutdown")

    def driver_version(self) -> str | None:
        return cast("str | None", call_nvml(self._library, "nvmlSystemGetDriverVersion"))

    def gpus(self) -> tuple[NvmlGpu, ...]:
        """Return the GPUs that respond, in NVML's order. The order may differ after a boot, so use `pci` as the key."""
        return self._enumerated()[0]

    @property
    def unreachable(self) -> tuple[NvmlError, ...]:
        """Return the errors of the GPUs that do not respond."""
        return self._enumerated()[1]

    def handles(self, pcis: Iterable[str]) -> tuple[NvmlLibrary, list[tuple[Any, str, str]]]:
        """Return the library, and the handle, address and UUID of each of these GPUs that responds (for
        nvml_events.py). Raises NvmlError if none responds.

        The other GPUs stay closed: nvmlDeviceGetHandleByPciBusId_v2 "causes NVML to initialize the target GPU", and
        others only with SLI (nvml.h).
        """
        found, error = [], None
        for pci in sorted(pcis):
            try:
                handle = call_nvml(self._library, "nvmlDeviceGetHandleByPciBusId", pci, pci=pci, absent=frozenset())
                uuid = call_nvml(self._library, "nvmlDeviceGetUUID", handle, pci=pci) or ""
                found.append((handle, pci, uuid))
            except NvmlError as raised:
                error = raised
        if not found and error is not None:
            raise error
        return self._library, found

    def _enumerated(self) -> tuple[tuple[NvmlGpu, ...], tuple[NvmlError, ...]]:
        if self._found is None:
            self._found = self._enumerate()
        return self._found

    def _move_to_unreachable(self, error: NvmlError) -> None:
        gpus, unreachable = self._enumerated()
        if any(gpu.index == error.index for gpu in gpus):
            self._found = (tuple(gpu for gpu in gpus if gpu.index != error.index), (*unreachable, error))
            self.lost_since_open += 1

    def _enumerate(self) -> tuple[tuple[NvmlGpu, ...], tuple[NvmlError, ...]]:
        gpus, unreachable = [], []
        for index in range(call_nvml(self._library, "nvmlDeviceGetCount", absent=frozenset())):
            try:
                gpus.append(_reach(self._library, index, self._move_to_unreachable))
            except NvmlError as error:
                if error.number == FUNCTION_NOT_FOUND:
                    raise  # the driver is too old for this binding, which is not a fault of this GPU
                unreachable.append(error)
        return tuple(gpus), tuple(unreachable)


def _reach(library: NvmlLibrary, index: int, on_lost: Callable[[NvmlError], None]) -> NvmlGpu:
    """Identify a GPU and check that it responds. Raises NvmlError with all available details.

    NVML returns a GPU's identity from memory even if the GPU is gone from the bus. Its temperature must be read from
    the GPU itself. Only "lost" and "reset required" are treated as errors of that read, because a broken sensor does
    not mean a lost GPU.
    """
    pci = ""
    try:
        handle = call_nvml(library, "nvmlDeviceGetHandleByIndex", index, index=index, absent=frozenset())
        info = call_nvml(library, "nvmlDeviceGetPciInfo", handle, index=index, absent=frozenset())
        pci = sysfs_address(info.domain, info.bus, info.device)
        uuid = call_nvml(library, "nvmlDeviceGetUUID", handle, pci=pci, index=index) or ""
        name = call_nvml(library, "nvmlDeviceGetName", handle, pci=pci, index=index) or ""
    except NvmlError as error:
        raise _lost_if_unknown(error) from None
    try:
        call_nvml(library, "nvmlDeviceGetTemperature", handle, GPU_SENSOR, pci=pci, index=index)
    except NvmlError as error:
        if error.kind in UNUSABLE_KINDS:
            raise
    return NvmlGpu(library, handle, pci, index, uuid, name, on_lost)


def _lost_if_unknown(error: NvmlError) -> NvmlError:
    """Return the error as GPU_LOST if an unknown error occurred when the handle of a counted GPU was requested. Many
    drivers report a lost GPU like this: "Unable to determine the device handle for GPU0: 0000:01:00.0: Unknown
    Error"."""
    if error.number != UNKNOWN_ERROR or error.call != "nvmlDeviceGetHandleByIndex":
        return error
    return NvmlError(NvmlErrorKind.GPU_LOST, error.call, error.message, error.pci, error.index, error.number)


def open_real() -> Nvml:
    """Open this node's NVML, which is the libnvidia-ml.so.1 that the loader finds. Raises NvmlError."""
    try:
        CDLL(LIBRARY)
    except OSError:  # pynvml would raise the same error, but importing its 250 classes takes 10 ms
        kind = NvmlErrorKind.LIBRARY_NOT_FOUND
        raise NvmlError(kind, "nvmlInit", "NVML Shared Library Not Found", number=kind.value) from None
    from healthd.nvidia.nvml_binding import pynvml

    return Nvml.open(pynvml())
