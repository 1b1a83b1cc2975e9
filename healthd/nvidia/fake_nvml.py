"""An NVML without GPUs: answers like pynvml, call for call, from a profile or a scenario file (fake_scenario).

It raises pynvml's own NVMLError_* classes, NotSupported for what a model lacks, and can hang or die in a call.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from healthd.common.values import Value
from healthd.nvidia import fake_scenario, nvml_binding
from healthd.nvidia.fake_scenario import Gpu, Library, LinkCounters, Machine
from healthd.nvidia.nvml import (
    FIELD_LINK_RECOVERIES,
    FIELD_LINK_STATE,
    FIELD_MEMORY_TEMPERATURE,
    FIELD_NVLINK_LINK_COUNT,
    FIELD_RECOVERY_ACTION,
    FIELD_SLOWDOWN_MARGIN,
    FIELDS_COUNTED,
    FIELDS_LINK,
    FIELDS_LINK_BER,
    FIELDS_LINK_ERRORS,
    FIELDS_LINK_PACKET_ERRORS,
    FIELDS_LINK_RECOVERY_KINDS,
    FIELDS_SLOWDOWN,
    LOCATIONS,
    VOLATILE,
    Nvml,
    raw,
)

T = TypeVar("T")
pynvml = nvml_binding.pynvml()

put = object.__setattr__  # see nvml.raw

# NVML answers these from what it noted when it was opened: they work for a GPU that is gone from the bus, too.
FROM_MEMORY = frozenset(
    {
        "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetPciInfo",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetName",
    }
)

NO_BIT_ERRORS = 0xFFF  # 15e-255
COUNTED = [field for fields in FIELDS_COUNTED.values() for field, _ in fields]
COUNTED_EACH = 1_000_000  # of an iteration
# Field -> the setting that holds its counts by link; "" counts nothing.
LINK_FIELDS = {
    LinkCounters.FIELDS: dict(zip(FIELDS_LINK_ERRORS, ("nvlink_replay", "nvlink_recovery", "nvlink_crc"), strict=True)),
    LinkCounters.NVLINK5: {
        **dict.fromkeys(FIELDS_LINK_PACKET_ERRORS.values(), ""),
        FIELDS_LINK_PACKET_ERRORS["receive errors"]: "nvlink_packet_errors",
        **dict(zip(FIELDS_LINK_RECOVERY_KINDS, ("nvlink_recovery", "nvlink_recovery_failed"), strict=True)),
    },
}

_opens = itertools.count()  # random failures differ from round to round


def open_fake(profile_or_file: str, now: Callable[[], float] = time.time) -> Nvml:
    """NVML as the scenario has it at this moment. Raises ConvertError, or NvmlError if nvmlInit fails."""
    return Nvml.open(library(profile_or_file, now))


def library(profile_or_file: str, now: Callable[[], float] = time.time) -> FakeLibrary:
    """The functions of that NVML, before nvmlInit."""
    scenario, start = fake_scenario.read(profile_or_file)
    machine, gpus = fake_scenario.state(scenario, now() - start)
    return FakeLibrary(machine, fake_scenario.addresses(scenario), gpus)


class Handle(Value, frozen=True):
    """Stands for NVML's pointer to a device: index is its place on the machine. `mig`: one of its MIG devices."""

    index: int
    mig: int | None = None


class FakeLibrary:
    """The functions of pynvml that healthd calls, over one machine. State does not change while it is open."""

    NVMLError: type[Exception] = pynvml.NVMLError
    NVML_NVLINK_MAX_LINKS: int = pynvml.NVML_NVLINK_MAX_LINKS
    c_nvmlEccSramErrorStatus_v1_t: Any = pynvml.c_nvmlEccSramErrorStatus_v1_t
    c_nvmlGpuFabricInfo_t: Any = pynvml.c_nvmlGpuFabricInfo_t
    c_nvmlGpuFabricInfo_v2_t: Any = pynvml.c_nvmlGpuFabricInfo_v2_t
    c_nvmlGpuFabricInfo_v3_t: Any = pynvml.c_nvmlGpuFabricInfo_v3_t

    def __init__(self, machine: Machine, pci: Sequence[str], gpus: Sequence[Gpu]) -> None:
        self._machine = machine
        self._pci = pci
        self._gpus = gpus
        self._counted = [index for index, gpu in enumerate(gpus) if not gpu.gone]
        self._opened = 0
        self._fine = [gpu if _stops_nothing(machine, gpu) else None for gpu in gpus]
        self._values: dict[tuple[int, tuple[int | tuple[int, int], ...]], Any] = {}
        self._asked: Counter[int] = Counter()  # questions that a GPU itself must answer
        self._random = random.Random(f"{machine.seed} {next(_opens)}")

    # what every call goes through

    def _enter(self, call: str) -> None:
        _trouble(self._machine, call)
        if self._machine.library is not Library.FINE:
            _fail(self._machine.library.value)
        if call in self._machine.missing_functions:
            _fail("FunctionNotFound")
        if call != "nvmlInit" and not self._opened:
            _fail("Uninitialized")

    def _ask(self, call: str, handle: Handle) -> Gpu:
        if self._opened and (fine := self._fine[handle.index]) is not None:
            return fine  # a round asks hundreds of questions, mostly of these
        self._enter(call)
        gpu = self._gpus[handle.index]
        _trouble(gpu, call)
        if call in gpu.errors:
            _fail(gpu.errors[call])
        if gpu.unreachable and call == "nvmlDeviceGetHandleByIndex":
            _fail("Unknown")
        if call not in FROM_MEMORY:
            self._asked[handle.index] += 1
            if gpu.lost or (gpu.lost_after is not None and self._asked[handle.index] > gpu.lost_after):
                _fail("GpuIsLost")
            if gpu.requires_reset:
                _fail("ResetRequired")
            if self._random.random() < self._machine.random_failures:
                _fail("Unknown")
        if call in gpu.unsupported:
            _fail("NotSupported")
        return gpu

    # the library

    def nvmlInit(self) -> None:
        self._enter("nvmlInit")
        self._opened += 1

    def nvmlShutdown(self) -> None:
        self._enter("nvmlShutdown")
        self._opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        self._enter("nvmlSystemGetDriverVersion")
        return self._machine.driver_version

    # who the GPUs are

    def nvmlDeviceGetCount(self) -> int:
        self._enter("nvmlDeviceGetCount")
        return len(self._counted)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        if not 0 <= index < len(self._counted):
            _fail("InvalidArgument")
        handle = Handle(self._counted[index])
        self._ask("nvmlDeviceGetHandleByIndex", handle)
        return handle

    def nvmlDeviceGetPciInfo(self, handle: Handle) -> Any:
        self._ask("nvmlDeviceGetPciInfo", handle)
        domain, bus, device = _address(self._pci[handle.index])
        return pynvml.nvmlPciInfo_t(
            domain=domain,
            bus=bus,
            device=device,
            busId=b"%08X:%02X:%02X.0" % (domain, bus, device),
            busIdLegacy=b"%04X:%02X:%02X.0" % (domain & 0xFFFF, bus, device),
        )

    def nvmlDeviceGetName(self, handle: Handle) -> str:
        return self._ask("nvmlDeviceGetName", handle).name

    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        self._ask("nvmlDeviceGetUUID", handle)
        domain, bus, device = _address(self._pci[handle.index])
        kind, part = ("GPU", 0) if handle.mig is None else ("MIG", handle.mig)
        return f"{kind}-{handle.index:08x}-{part:04x}-4000-8000-{domain & 0xFFFF:04x}{bus:04x}{device:04x}"

    def nvmlDeviceGetMinorNumber(self, handle: Handle) -> int:
        """Numbers in the order of the PCI addresses, as the driver gives them."""
        self._ask("nvmlDeviceGetMinorNumber", handle)
        return handle.index

    def nvmlDeviceGetVbiosVersion(self, handle: Handle) -> str:
        return self._ask("nvmlDeviceGetVbiosVersion", handle).vbios

    def nvmlDeviceGetCudaComputeCapability(self, handle: Handle) -> tuple[int, int]:
        return _supported(self._ask("nvmlDeviceGetCudaComputeCapability", handle).compute_capability)

    def nvmlDeviceGetVirtualizationMode(self, handle: Handle) -> int:
        return self._ask("nvmlDeviceGetVirtualizationMode", handle).virtualization

    # what they say

    def nvmlDeviceGetTemperature(self, handle: Handle, sensor: int) -> int:
        gpu = self._ask("nvmlDeviceGetTemperature", handle)
        if sensor != pynvml.NVML_TEMPERATURE_GPU:
            _fail("InvalidArgument")
        return _supported(gpu.temperature)

    def nvmlDeviceGetTemperatureThreshold(self, handle: Handle, threshold: int) -> int:
        gpu = self._ask("nvmlDeviceGetTemperatureThreshold", handle)
        return _supported({1: gpu.temperature_slowdown, 2: gpu.temperature_memory_max}.get(threshold))

    def nvmlDeviceGetMarginTemperature(self, handle: Handle) -> int:
        return _supported(self._ask("nvmlDeviceGetMarginTemperature", handle).temperature_margin)

    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> Any:
        gpu = self._ask("nvmlDeviceGetUtilizationRates", handle)
        return pynvml.c_nvmlUtilization_t(gpu=_supported(None if gpu.mig else gpu.utilization_percent))

    def nvmlDeviceGetClockInfo(self, handle: Handle, type: int) -> int:
        gpu = self._ask("nvmlDeviceGetClockInfo", handle)
        if type != pynvml.NVML_CLOCK_SM:
            _fail("NotSupported")
        return _supported(gpu.sm_clock_mhz)

    def nvmlDeviceGetPersistenceMode(self, handle: Handle) -> int:
        return int(_supported(self._ask("nvmlDeviceGetPersistenceMode", handle).persistence))

    def nvmlDeviceValidateInforom(self, handle: Handle) -> None:
        if not _supported(self._ask("nvmlDeviceValidateInforom", handle).inforom):
            _fail("CorruptedInforom")

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Handle) -> int:
        return int(1000 * _supported(self._ask("nvmlDeviceGetEnforcedPowerLimit", handle).power_limit_watts))

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: Handle) -> int:
        gpu = self._ask("nvmlDeviceGetPowerManagementDefaultLimit", handle)
        return int(1000 * _supported(gpu.power_default_watts))

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Handle) -> int:
        return _supported(self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle).clock_event_reasons)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Handle) -> int:
        return _supported(self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle).clock_event_reasons)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Handle) -> list[Any]:
        return _processes(self._ask("nvmlDeviceGetComputeRunningProcesses_v3", handle))

    def nvmlDeviceGetComputeRunningProcesses_v2(self, handle: Handle) -> list[Any]:
        return _processes(self._ask("nvmlDeviceGetComputeRunningProcesses_v2", handle))

    def nvmlDeviceGetMigMode(self, device: Handle) -> list[int]:
        gpu = self._ask("nvmlDeviceGetMigMode", device)
        mig = int(_supported(gpu.mig))
        return [mig, mig if gpu.mig_pending is None else int(gpu.mig_pending)]

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Handle) -> int:
        return fake_scenario.LIMITS["mig_devices"] if self._ask("nvmlDeviceGetMaxMigDeviceCount", device).mig else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Handle, index: int) -> Handle:
        gpu = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", device)
        if not gpu.mig or index >= gpu.mig_devices:
            _fail("NotFound")
        return Handle(device.index, mig=index)

    def nvmlDeviceGetEccMode(self, handle: Handle) -> list[int]:
        ecc = int(_supported(self._ask("nvmlDeviceGetEccMode", handle).ecc))
        return [ecc, ecc]

    def nvmlDeviceGetDefaultEccMode(self, handle: Handle) -> list[int]:
        gpu = self._ask("nvmlDeviceGetDefaultEccMode", handle)
        _supported(gpu.ecc)
        return [int(gpu.ecc_default)]

    def nvmlDeviceGetTotalEccErrors(self, handle: Handle, errorType: int, counterType: int) -> int:
        gpu = self._ask("nvmlDeviceGetTotalEccErrors", handle)
        return sum(_ecc(gpu, errorType, counterType, location) for location in (2, 7))

    def nvmlDeviceGetMemoryErrorCounter(
        self, handle: Handle, errorType: int, counterType: int, locationType: int
    ) -> int:
        gpu = self._ask("nvmlDeviceGetMemoryErrorCounter", handle)
        if locationType == LOCATIONS["sram"] and not gpu.ecc_sram:
            _fail("NotSupported")
        return _ecc(gpu, errorType, counterType, locationType)

    def nvmlDeviceGetSramEccErrorStatus(self, device: Handle, status: Any) -> int:
        gpu = self._ask("nvmlDeviceGetSramEccErrorStatus", device)
        struct = status._obj  # what byref() points at
        struct.volatileUncParity = gpu.ecc_volatile_uncorrected_sram
        struct.aggregateUncParity = gpu.ecc_aggregate_uncorrected_sram
        struct.volatileCor = gpu.ecc_volatile_corrected_sram
        struct.aggregateCor = gpu.ecc_aggregate_corrected_sram
        struct.bThresholdExceeded = _supported(gpu.sram_threshold_exceeded if gpu.ecc else None)
        return 0

    def nvmlDeviceGetRemappedRows(self, device: Handle) -> tuple[int, int, int, int]:
        gpu = self._ask("nvmlDeviceGetRemappedRows", device)
        if gpu.mig:
            _fail("NotSupported")
        corrected, uncorrected = _supported(gpu.remap_correctable), _supported(gpu.remap_uncorrectable)
        return corrected, uncorrected, int(gpu.remap_pending), int(gpu.remap_failure)

    def nvmlDeviceGetRowRemapperHistogram(self, device: Handle) -> Any:
        gpu = self._ask("nvmlDeviceGetRowRemapperHistogram", device)
        return pynvml.c_nvmlRowRemapperHistogramValues(*_supported(None if gpu.mig else gpu.remap_histogram))

    def nvmlDeviceGetUnrepairableMemoryFlag_v1(self, device: Handle) -> int:
        return int(_supported(self._ask("nvmlDeviceGetUnrepairableMemoryFlag_v1", device).unrepairable_memory))

    def nvmlDeviceGetRetiredPages(self, device: Handle, sourceFilter: int) -> list[int]:
        gpu = self._ask("nvmlDeviceGetRetiredPages", device)
        return list(range(_supported((gpu.retired_single_bit, gpu.retired_double_bit)[sourceFilter])))

    def nvmlDeviceGetRetiredPagesPendingStatus(self, device: Handle) -> int:
        gpu = self._ask("nvmlDeviceGetRetiredPagesPendingStatus", device)
        _supported(gpu.retired_double_bit)
        return int(gpu.retired_pending)

    def nvmlDeviceGetGpuFabricInfoV(self, device: Handle, gpuFabricInfo: Any) -> int:
        gpu = self._ask("nvmlDeviceGetGpuFabricInfoV", device)
        struct = gpuFabricInfo._obj  # what byref() points at
        version = struct.version >> 24
        if gpu.fabric_state is not None and (gpu.fabric_health if version == 2 else gpu.fabric_summary) is None:
            _fail("ArgumentVersionMismatch")
        _fill_fabric(gpu, struct)
        struct.healthMask = gpu.fabric_health or 0
        if version == 3:
            struct.healthSummary = gpu.fabric_summary
        return 0

    def nvmlDeviceGetGpuFabricInfo(self, device: Handle, gpuFabricInfo: Any) -> int:
        _fill_fabric(self._ask("nvmlDeviceGetGpuFabricInfo", device), gpuFabricInfo._obj)
        return 0

    def nvmlDeviceGetNvLinkState(self, device: Handle, link: int) -> int:
        gpu = self._ask("nvmlDeviceGetNvLinkState", device)
        _require_link(gpu, link)
        return int(link not in gpu.nvlink_inactive)

    def nvmlDeviceGetNvLinkErrorCounter(self, device: Handle, link: int, counter: int) -> int:
        gpu = self._ask("nvmlDeviceGetNvLinkErrorCounter", device)
        if gpu.nvlink_counters is not LinkCounters.CALLS:
            _fail("NotSupported")
        _require_link(gpu, link)
        counts: tuple[dict[str, int], ...] = (gpu.nvlink_replay, gpu.nvlink_recovery, gpu.nvlink_crc, {})
        if not 0 <= counter < len(counts):
            _fail("NotSupported")
        return counts[counter].get(str(link), 0)

    def nvmlDeviceGetFieldValues(self, handle: Handle, fieldIds: Sequence[int | tuple[int, int]]) -> Any:
        gpu = self._ask("nvmlDeviceGetFieldValues", handle)
        asked = (id(gpu), tuple(fieldIds))  # equal GPUs are one object, and answer alike
        if asked not in self._values or gpu.iteration_seconds:
            self._values[asked] = _values(gpu, fieldIds)
        values = self._values[asked]
        return type(values).from_buffer_copy(values)

    def nvmlDeviceGetPcieReplayCounter(self, handle: Handle) -> int:
        return _supported(self._ask("nvmlDeviceGetPcieReplayCounter", handle).pcie_replays)

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: Handle) -> int:
        return _supported(self._ask("nvmlDeviceGetCurrPcieLinkGeneration", handle).pcie_generation)

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: Handle) -> int:
        return _supported(self._ask("nvmlDeviceGetCurrPcieLinkWidth", handle).pcie_width)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Handle) -> int:
        return _supported(self._ask("nvmlDeviceGetMaxPcieLinkGeneration", handle).pcie_max_generation)

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Handle) -> int:
        return _supported(self._ask("nvmlDeviceGetMaxPcieLinkWidth", handle).pcie_max_width)


def _stops_nothing(machine: Machine, gpu: Gpu) -> bool:
    """Whether every call, once the machine was opened, reaches what this GPU says, and nothing counts the questions."""
    away = gpu.gone or gpu.unreachable or gpu.lost or gpu.lost_after is not None or gpu.requires_reset
    problem = machine.hang or machine.crash or gpu.hang or gpu.crash or machine.random_failures
    return not (away or problem or machine.missing_functions or gpu.errors or gpu.unsupported)


def _fail(error: str) -> None:
    """Raise pynvml's NVMLError_`error`."""
    raise getattr(pynvml, f"NVMLError_{error}")()


def _supported(value: T | None) -> T:
    if value is None:
        raise pynvml.NVMLError_NotSupported()
    return value


def _trouble(part: Machine | Gpu, call: str) -> None:
    """Sleep or die, if the scenario says so for this call."""
    if part.hang == call:
        time.sleep(part.hang_seconds)
    if part.crash == call:
        os.kill(os.getpid(), signal.SIGKILL)


def _address(pci: str) -> tuple[int, int, int]:
    domain, bus, rest = pci.split(":")
    return int(domain, 16), int(bus, 16), int(rest.split(".")[0], 16)


def _ecc(gpu: Gpu, error_type: int, counter_type: int, location: int) -> int:
    """One ECC counter, by nvml.h's numbers. Ampere and later do not support most locations; with MIG the GPU does not
    tell what it counted since the driver was loaded."""
    if not gpu.ecc or location not in (2, 7) or (gpu.mig and counter_type == VOLATILE):
        _fail("NotSupported")
    counter = ("volatile", "aggregate")[counter_type]
    error = ("corrected", "uncorrected")[error_type]
    count: int = getattr(gpu, f"ecc_{counter}_{error}_{'dram' if location == 2 else 'sram'}")
    return count


def _require_link(gpu: Gpu, link: int) -> None:
    if gpu.nvlinks == 0:
        _fail("NotSupported")
    if not 0 <= link < gpu.nvlinks:
        _fail("InvalidArgument")
    if link in gpu.nvlink_untold:
        _fail("NotSupported")


def _processes(gpu: Gpu) -> list[Any]:
    return [pynvml.c_nvmlProcessInfo_v3_t(pid=pid) for pid in _supported(gpu.processes)]


def _fill_fabric(gpu: Gpu, struct: Any) -> None:
    struct.state, struct.status = _supported(gpu.fabric_state), gpu.fabric_status


def _values(gpu: Gpu, fields: Sequence[int | tuple[int, int]]) -> Any:
    values = (pynvml.c_nvmlFieldValue_t * len(fields))()
    for value, field in zip(values, fields, strict=True):
        number, scope = field if isinstance(field, tuple) else (field, 0)
        put(value, "fieldId", number)
        put(value, "scopeId", scope)
        _answer(gpu, value, number, scope)
    return values


def _answer(gpu: Gpu, value: Any, field: int, scope: int) -> None:
    """Fill one value of a field: each has its own return code and type, as in the real call."""
    number: int | None = None
    if field in gpu.unsupported_fields:
        pass
    elif field in (*FIELDS_LINK, *FIELDS_LINK_RECOVERY_KINDS):
        number = _link_field(gpu, field, scope)
        if number is not None and scope >= gpu.nvlinks:
            value.nvmlReturn = pynvml.NVML_ERROR_INVALID_ARGUMENT
            return
    else:
        number = _field(gpu, field)
    if number is None:
        put(value, "nvmlReturn", pynvml.NVML_ERROR_NOT_SUPPORTED)
        return
    if number < 0:
        value.valueType, value.value.siVal = pynvml.NVML_VALUE_TYPE_SIGNED_INT, number
    else:
        put(value, "valueType", pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG)
        put(raw(value, "value"), "ullVal", number)


def _field(gpu: Gpu, field: int) -> int | None:
    slowdown = zip(
        FIELDS_SLOWDOWN.values(), (gpu.slowdown_hw_thermal_seconds, gpu.slowdown_hw_power_brake_seconds), strict=True
    )
    return {
        FIELD_NVLINK_LINK_COUNT: gpu.nvlinks or None,
        FIELD_RECOVERY_ACTION: gpu.recovery_action,
        FIELD_MEMORY_TEMPERATURE: gpu.temperature_memory,
        FIELD_SLOWDOWN_MARGIN: gpu.temperature_slowdown_margin,
        **(dict.fromkeys(COUNTED, _counted(gpu.iteration_seconds, time.time())) if gpu.iteration_seconds else {}),
        **{field: None if seconds is None else int(seconds * 1e9) for field, seconds in slowdown},
    }.get(field)


def _counted(iteration_seconds: float, now: float) -> int:
    """What a job has counted that talks in the last third of each iteration."""
    done, part = divmod(now, iteration_seconds)
    return int(COUNTED_EACH * (done + max(0.0, 3 * part / iteration_seconds - 2)))


def _link_field(gpu: Gpu, field: int, link: int) -> int | None:
    counters = LINK_FIELDS.get(gpu.nvlink_counters)
    if counters is None or link in gpu.nvlink_untold:
        return None
    if field == FIELD_LINK_STATE:
        return int(link not in gpu.nvlink_inactive)
    if gpu.nvlink_counters is LinkCounters.NVLINK5:
        if field in FIELDS_LINK_BER:
            rates = (gpu.nvlink_ber, gpu.nvlink_symbol_ber)[FIELDS_LINK_BER.index(field)]
            return _packed_ber(rates.get(str(link), 0.0))
        if field == FIELD_LINK_RECOVERIES:
            return gpu.nvlink_recovery.get(str(link), 0) + gpu.nvlink_recovery_failed.get(str(link), 0)
    setting = counters.get(field)
    return None if setting is None else getattr(gpu, setting).get(str(link), 0) if setting else 0


def _packed_ber(rate: float) -> int:
    """A mantissa of 1 to 15 above the exponent's absolute value, as nvml.h has it."""
    if not rate:
        return NO_BIT_ERRORS
    exponent = min(255, max(0, -math.floor(math.log10(rate))))
    return max(1, min(15, round(rate * 10.0**exponent))) << 8 | exponent
