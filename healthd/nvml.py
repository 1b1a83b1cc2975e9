"""NVML as the checks see it: "not supported" is None, every other error is one classified NvmlError.

`Nvml` works on anything with pynvml's functions: pynvml itself (`open_real`) or `fake_nvml.FakeLibrary`. It is
opened for one round and closed after it: an agent that holds the driver open makes `nvidia-smi --gpu-reset` fail
("In use by another client"). Any call can block in the kernel for minutes, so this runs in the worker only.

Numbers of errors, fields and structures are those of nvml.h; a function that the driver (FunctionNotFound) or the
installed binding (no such attribute) is too old to have is "not supported" as well.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from typing import Any, Protocol, cast


class NvmlErrorKind(enum.Enum):
    """What an error means, by NVML's number for it."""

    LIBRARY_NOT_FOUND = 12  # no libnvidia-ml.so.1 that can be loaded
    DRIVER_NOT_LOADED = 9
    MISMATCH = 18  # the kernel has another driver version than the library that this process loaded
    GPU_LOST = 15  # fell off the bus
    RESET_REQUIRED = 16
    NO_PERMISSION = 4
    TIMEOUT = 10
    OTHER = 999


NO_DRIVER = (NvmlErrorKind.LIBRARY_NOT_FOUND, NvmlErrorKind.DRIVER_NOT_LOADED)
NOT_SUPPORTED, FUNCTION_NOT_FOUND = 3, 13
INVALID_ARGUMENT, NO_PERMISSION, ARGUMENT_VERSION_MISMATCH = 2, 4, 25
UNKNOWN_ERROR = 999
ABSENT = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND})

UNCORRECTED, CORRECTED = 1, 0  # nvmlMemoryErrorType_t
VOLATILE, AGGREGATE = 0, 1  # nvmlEccCounterType_t: since the driver was loaded, and for life
LOCATIONS = {"dram": 2, "sram": 7}  # nvmlMemoryLocation_t, what Ampere and later answer
GPU_SENSOR = 0

FIELD_NVLINK_LINK_COUNT = 91
FIELDS_NVLINK_ERRORS = (161, 162, 163)  # replay, recovery, CRC with scopeId = link: Hopper, driver >= 525
FIELD_RECOVERY_ACTION = 230  # driver >= 570
LINK_COUNTERS = (0, 1, 2, 3)  # nvmlNvLinkErrorCounter_t: replay, recovery, CRC of flits, CRC of data

# nvmlValueType_t -> the member of the union nvmlValue_t that holds the value
UNION_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class NvmlError(Exception):
    """One NVML call failed. `number` is NVML's own, `pci` is "" unless it is about one GPU whose address is known.

    `index` is NVML's index of that GPU (None: not about one GPU).
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
    """The part of pynvml that is used, with pynvml's names, arguments, results and errors."""

    NVMLError: type[Exception]
    NVML_NVLINK_MAX_LINKS: int
    c_nvmlEccSramErrorStatus_v1_t: Any

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetName(self, handle: Any) -> str: ...
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...
    def nvmlDeviceGetVbiosVersion(self, handle: Any) -> str: ...
    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int: ...
    def nvmlDeviceGetMigMode(self, device: Any) -> list[int]: ...
    def nvmlDeviceGetEccMode(self, handle: Any) -> list[int]: ...
    def nvmlDeviceGetTotalEccErrors(self, handle: Any, errorType: int, counterType: int) -> int: ...
    def nvmlDeviceGetMemoryErrorCounter(
        self, handle: Any, errorType: int, counterType: int, locationType: int
    ) -> int: ...
    def nvmlDeviceGetSramEccErrorStatus(self, device: Any, status: Any) -> int: ...
    def nvmlDeviceGetRemappedRows(self, device: Any) -> tuple[int, int, int, int]: ...
    def nvmlDeviceGetRowRemapperHistogram(self, device: Any) -> Any: ...
    def nvmlDeviceGetFieldValues(self, handle: Any, fieldIds: Sequence[Any]) -> Any: ...
    def nvmlDeviceGetNvLinkState(self, device: Any, link: int) -> int: ...
    def nvmlDeviceGetNvLinkErrorCounter(self, device: Any, link: int, counter: int) -> int: ...
    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: Any) -> int: ...
    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: Any) -> int: ...
    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any) -> int: ...
    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any) -> int: ...


@dataclass(frozen=True, slots=True)
class RemappedRows:
    """Rows replaced after corrected and uncorrectable errors. `failure` is sticky: a remap failed at some time."""

    correctable: int
    uncorrectable: int
    pending: bool
    failure: bool


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many memory banks have all, many, some, few and no spare rows left."""

    max: int
    high: int
    partial: int
    low: int
    none: int


@dataclass(frozen=True, slots=True)
class NvlinkErrors:
    """Error counters of one link since the driver was loaded; None where this GPU does not count that."""

    replay: int | None
    recovery: int | None
    crc: int | None


@dataclass(frozen=True, slots=True)
class PcieLink:
    """PCIe generation and lanes, now and at most. An idle GPU lowers the generation; that is no fault."""

    generation: int | None
    width: int | None
    max_generation: int | None
    max_width: int | None


def kind_of(number: int) -> NvmlErrorKind:
    """What NVML's number means. Newer drivers have numbers that nobody here knows: OTHER."""
    try:
        return NvmlErrorKind(number)
    except ValueError:
        return NvmlErrorKind.OTHER


def sysfs_address(domain: int, bus: int, device: int) -> str:
    """The address as the kernel writes it. NVML's own text has eight digits of domain, in upper case."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def ask(
    library: NvmlLibrary,
    call: str,
    *arguments: Any,
    pci: str = "",
    index: int | None = None,
    absent: frozenset[int] = ABSENT,
) -> Any:
    """What `call` answers; None where it fails with one of the numbers in `absent`. Raises NvmlError."""
    function = getattr(library, call, None)
    if function is None:
        number, message = FUNCTION_NOT_FOUND, "not in the installed nvidia-ml-py"
    else:
        try:
            return function(*arguments)
        except library.NVMLError as error:
            number, message = cast(Any, error).value, str(error)
        except UnicodeDecodeError:
            number, message = UNKNOWN_ERROR, "answered with text that is not UTF-8"
    if number in absent:
        return None
    raise NvmlError(kind_of(number), call, message, pci, index, number)


class NvmlGpu:
    """One GPU that answers. Every method asks the driver anew; None = this GPU or driver does not have that."""

    def __init__(self, library: NvmlLibrary, handle: Any, pci: str, index: int, uuid: str, name: str) -> None:
        self._library = library
        self._handle = handle
        self.pci = pci
        self.index = index
        self.uuid = uuid
        self.name = name

    def _ask(self, call: str, *arguments: Any, absent: frozenset[int] = ABSENT) -> Any:
        return ask(self._library, call, self._handle, *arguments, pci=self.pci, index=self.index, absent=absent)

    def vbios(self) -> str | None:
        return cast("str | None", self._ask("nvmlDeviceGetVbiosVersion"))

    def temperature(self) -> int | None:
        """Degrees Celsius."""
        return cast("int | None", self._ask("nvmlDeviceGetTemperature", GPU_SENSOR))

    def mig_enabled(self) -> bool | None:
        mode = self._ask("nvmlDeviceGetMigMode")
        return None if mode is None else bool(mode[0])

    # ECC

    def ecc_mode(self) -> bool | None:
        """Whether ECC is on now (a change that waits for a reset is not looked at)."""
        mode = self._ask("nvmlDeviceGetEccMode")
        return None if mode is None else bool(mode[0])

    def ecc_total(self, uncorrected: bool, volatile: bool) -> int | None:
        """Memory errors since the driver was loaded (`volatile`) or for the life of the GPU."""
        return cast("int | None", self._ask("nvmlDeviceGetTotalEccErrors", *_ecc_arguments(uncorrected, volatile)))

    def ecc_count(self, location: str, uncorrected: bool, volatile: bool) -> int | None:
        """The same for one `location`: "sram" or "dram"."""
        arguments = (*_ecc_arguments(uncorrected, volatile), LOCATIONS[location])
        return cast("int | None", self._ask("nvmlDeviceGetMemoryErrorCounter", *arguments))

    def sram_threshold_exceeded(self) -> bool | None:
        """Whether SRAM had so many uncorrected errors that NVIDIA replaces the GPU. None too without root.

        nvml.h asks for root for this call alone: that must not blind the rest of an unprivileged `healthd check`.
        """
        make = getattr(self._library, "c_nvmlEccSramErrorStatus_v1_t", None)
        if make is None:
            return None
        status = make()
        absent = ABSENT | {NO_PERMISSION, ARGUMENT_VERSION_MISMATCH}
        if self._ask("nvmlDeviceGetSramEccErrorStatus", byref(status), absent=absent) is None:
            return None
        return bool(status.bThresholdExceeded)

    def remapped_rows(self) -> RemappedRows | None:
        """None before Ampere and while MIG instances exist."""
        rows = self._ask("nvmlDeviceGetRemappedRows")
        return None if rows is None else RemappedRows(rows[0], rows[1], bool(rows[2]), bool(rows[3]))

    def row_remap_histogram(self) -> Histogram | None:
        banks = self._ask("nvmlDeviceGetRowRemapperHistogram")
        if banks is None:
            return None
        return Histogram(banks.max, banks.high, banks.partial, banks.low, banks.none)

    def recovery_action(self) -> int | None:
        """What the driver wants done: 0 nothing, 1 GPU reset, 2 reboot, 3 drain P2P, 4 drain and reset."""
        action = self._field(FIELD_RECOVERY_ACTION)
        return None if action is None else int(action)

    # NVLink

    def nvlink_states(self) -> tuple[bool, ...] | None:
        """For each link that this GPU has, by link number, whether it is active. None: it has none.

        Where the driver does not tell how many there are, links are asked for until one is not there; the
        binding's NVML_NVLINK_MAX_LINKS is no GPU's number of links.
        """
        count = self._field(FIELD_NVLINK_LINK_COUNT)
        most = self._library.NVML_NVLINK_MAX_LINKS if count is None else int(count)
        states = []
        for link in range(most):
            state = self._ask("nvmlDeviceGetNvLinkState", link, absent=ABSENT | {INVALID_ARGUMENT})
            if state is None:
                break
            states.append(state != 0)
        return tuple(states) or None

    def nvlink_errors(self, link: int) -> NvlinkErrors | None:
        """By fields on Hopper, whose links 12 to 17 the older call does not know; by that call before it.

        Blackwell counts neither way (nvml.h documents 161 and 162 as unsupported there).
        """
        fields = self._fields([(field, link) for field in FIELDS_NVLINK_ERRORS])
        if any(value is not None for value in fields):
            replay, recovery, crc = (None if value is None else int(value) for value in fields)
            return NvlinkErrors(replay, recovery, crc)
        replay, recovery, flits, data = (self._link_counter(link, counter) for counter in LINK_COUNTERS)
        crc = None if flits is None else flits + (data or 0)
        if replay is None and recovery is None and crc is None:
            return None
        return NvlinkErrors(replay, recovery, crc)

    def _link_counter(self, link: int, counter: int) -> int | None:
        absent = ABSENT | {INVALID_ARGUMENT}
        return cast("int | None", self._ask("nvmlDeviceGetNvLinkErrorCounter", link, counter, absent=absent))

    # PCI Express

    def pcie_link(self) -> PcieLink:
        return PcieLink(
            self._ask("nvmlDeviceGetCurrPcieLinkGeneration"),
            self._ask("nvmlDeviceGetCurrPcieLinkWidth"),
            self._ask("nvmlDeviceGetMaxPcieLinkGeneration"),
            self._ask("nvmlDeviceGetMaxPcieLinkWidth"),
        )

    # field values

    def _field(self, field: int) -> float | None:
        return self._fields([field])[0]

    def _fields(self, fields: Sequence[int | tuple[int, int]]) -> list[float | None]:
        """The values of `fields` (an id, or an id and its scope), None for each that is not there.

        The call succeeds although single values failed: each has its own return code, and its type says which
        member of the union holds it. An id or link that the driver does not know is an invalid argument.
        """
        values = self._ask("nvmlDeviceGetFieldValues", fields, absent=ABSENT | {INVALID_ARGUMENT})
        return [None] * len(fields) if values is None else [self._value(value) for value in values]

    def _value(self, value: Any) -> float | None:
        number = value.nvmlReturn
        if number == INVALID_ARGUMENT or number in ABSENT:
            return None
        if number != 0:
            call = f"nvmlDeviceGetFieldValues field {value.fieldId}"
            message = str(cast(Any, self._library.NVMLError)(number))
            raise NvmlError(kind_of(number), call, message, self.pci, self.index, number)
        kind = value.valueType
        if not 0 <= kind < len(UNION_MEMBERS):
            call = f"nvmlDeviceGetFieldValues field {value.fieldId}"
            message = f"answered with a value of the unknown type {kind}"
            raise NvmlError(NvmlErrorKind.OTHER, call, message, self.pci, self.index)
        return cast(float, getattr(value.value, UNION_MEMBERS[kind]))


def _ecc_arguments(uncorrected: bool, volatile: bool) -> tuple[int, int]:
    return UNCORRECTED if uncorrected else CORRECTED, VOLATILE if volatile else AGGREGATE


class Nvml:
    """An open NVML. `gpus` and `unreachable` come from one enumeration, made when first asked for."""

    def __init__(self, library: NvmlLibrary) -> None:
        self._library = library

    @classmethod
    def open(cls, library: NvmlLibrary) -> Nvml:
        """nvmlInit. After a failure it may be tried again in the same process, but for MISMATCH: the library
        that was loaded stays loaded, so the process must be replaced."""
        ask(library, "nvmlInit", absent=frozenset())
        return cls(library)

    def close(self) -> None:
        """nvmlShutdown. A failure is raised, since then the driver stays open in this process."""
        ask(self._library, "nvmlShutdown")

    def driver_version(self) -> str | None:
        return cast("str | None", ask(self._library, "nvmlSystemGetDriverVersion"))

    def gpus(self) -> tuple[NvmlGpu, ...]:
        """The GPUs that answer, in NVML's order (not stable across boots: key by `pci`)."""
        return self._enumeration[0]

    @property
    def unreachable(self) -> tuple[NvmlError, ...]:
        """Why each of the other GPUs does not answer."""
        return self._enumeration[1]

    @functools.cached_property
    def _enumeration(self) -> tuple[tuple[NvmlGpu, ...], tuple[NvmlError, ...]]:
        gpus, unreachable = [], []
        for index in range(ask(self._library, "nvmlDeviceGetCount", absent=frozenset())):
            try:
                gpus.append(_reach(self._library, index))
            except NvmlError as error:
                if error.number == FUNCTION_NOT_FOUND:
                    raise  # a driver too old for this binding: nothing is wrong with this one GPU
                unreachable.append(error)
        return tuple(gpus), tuple(unreachable)


def _reach(library: NvmlLibrary, index: int) -> NvmlGpu:
    """Identify one GPU and make sure that it answers. Raises NvmlError with all that is known of it.

    NVML answers from memory who a GPU is, even when it is gone from the bus; its temperature must be read from
    it. Of that question only "lost" and "reset required" count: a broken sensor is no lost GPU.
    """
    pci = ""
    try:
        handle = ask(library, "nvmlDeviceGetHandleByIndex", index, index=index, absent=frozenset())
        info = ask(library, "nvmlDeviceGetPciInfo", handle, index=index, absent=frozenset())
        pci = sysfs_address(info.domain, info.bus, info.device)
        uuid = ask(library, "nvmlDeviceGetUUID", handle, pci=pci, index=index) or ""
        name = ask(library, "nvmlDeviceGetName", handle, pci=pci, index=index) or ""
    except NvmlError as error:
        raise _lost_if_unknown(error) from None
    try:
        ask(library, "nvmlDeviceGetTemperature", handle, GPU_SENSOR, pci=pci, index=index)
    except NvmlError as error:
        if error.kind in (NvmlErrorKind.GPU_LOST, NvmlErrorKind.RESET_REQUIRED):
            raise
    return NvmlGpu(library, handle, pci, index, uuid, name)


def _lost_if_unknown(error: NvmlError) -> NvmlError:
    """ "Unknown Error" for the handle of a GPU that was counted is how many drivers say that it is lost:
    "Unable to determine the device handle for GPU0: 0000:01:00.0: Unknown Error".
    """
    if error.number != UNKNOWN_ERROR or error.call != "nvmlDeviceGetHandleByIndex":
        return error
    return NvmlError(NvmlErrorKind.GPU_LOST, error.call, error.message, error.pci, error.index, error.number)


def open_real() -> Nvml:
    """The NVML of this node: whichever libnvidia-ml.so.1 the loader finds. Raises NvmlError."""
    import pynvml

    return Nvml.open(cast(NvmlLibrary, pynvml))
