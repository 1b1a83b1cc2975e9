"""Fake NVML for machines without GPUs. It answers pynvml's calls from a profile or a scenario file (fake_scenario).

It raises pynvml's own NVMLError_* classes (NotSupported for features that a model lacks), and can hang or die in a
call.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from healthd.common.values import Value
from healthd.nvidia import fake_scenario, nvml_binding
from healthd.nvidia.fake_scenario import EventKind, FakeEvent, Gpu, Library, LinkCounters, Machine
from healthd.nvidia.nvml import (
    FIELD_C2C_COUNT,
    FIELD_C2C_STATUS,
    FIELD_LINK_RECOVERIES,
    FIELD_LINK_SPEED,
    FIELD_LINK_STATE,
    FIELD_MEMORY_TEMPERATURE,
    FIELD_NVLINK_LINK_COUNT,
    FIELD_RECOVERY_ACTION,
    FIELD_SLOWDOWN_MARGIN,
    FIELDS_ACTIVITY,
    FIELDS_C2C_COUNTERS,
    FIELDS_LINK,
    FIELDS_LINK_BER,
    FIELDS_LINK_ERRORS,
    FIELDS_LINK_PACKET_ERRORS,
    FIELDS_LINK_RECOVERY_KINDS,
    FIELDS_SLOWDOWN,
    LINK_TRAFFIC_DISABLED,
    LOCATIONS,
    VOLATILE,
    Nvml,
    raw,
)
from healthd.nvidia.nvml_events import (
    EVENT_KINDS,
    LEGACY_XID,
    OPERATIONAL_DATA,
    OVERFLOW,
    PRIMARY,
    SEVERITIES,
    SIMULATED,
    UNCONTAINED,
    WANTED,
)

T = TypeVar("T")
pynvml = nvml_binding.pynvml()

put = object.__setattr__  # see nvml.raw

# NVML answers these calls from data recorded when it was opened, so they also work for a GPU that is gone from the bus.
CACHED_CALLS = frozenset(
    {
        "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetHandleByPciBusId",
        "nvmlDeviceGetPciInfo",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetName",
    }
)

NO_BIT_ERRORS = 0xFFF  # 15e-255
ACTIVITY_FIELDS = [field for fields in FIELDS_ACTIVITY.values() for field, _ in fields]
COUNT_PER_ITERATION = 1_000_000  # for each iteration
# For each field, the name of the setting with its counts by link; "" for a counter that is always 0.
LINK_FIELDS = {
    LinkCounters.FIELDS: dict(zip(FIELDS_LINK_ERRORS, ("nvlink_replay", "nvlink_recovery", "nvlink_crc"), strict=True)),
    LinkCounters.NVLINK5: {
        **dict.fromkeys(FIELDS_LINK_PACKET_ERRORS.values(), ""),
        FIELDS_LINK_PACKET_ERRORS["receive errors"]: "nvlink_packet_errors",
        **dict(zip(FIELDS_LINK_RECOVERY_KINDS, ("nvlink_recovery", "nvlink_recovery_failed"), strict=True)),
    },
}

_opens = itertools.count()  # number of opens, so that random failures differ between rounds


def open_fake(profile_or_file: str, now: Callable[[], float] = time.time) -> Nvml:
    """Open a fake NVML in the scenario's current state. Raises ConvertError, or NvmlError if nvmlInit fails."""
    return Nvml.open(library(profile_or_file, now))


def library(profile_or_file: str, now: Callable[[], float] = time.time) -> FakeLibrary:
    """Return the fake pynvml for a profile or scenario file, before nvmlInit."""
    scenario, start = fake_scenario.read(profile_or_file)
    machine, gpus = fake_scenario.state(scenario, now() - start)
    return FakeLibrary(machine, fake_scenario.addresses(scenario), gpus)


class Handle(Value, frozen=True):
    """A fake of NVML's pointer to a device. `index` is the GPU's position on the machine. `mig`, if set, is one of the
    GPU's MIG devices.
    """

    index: int
    mig: int | None = None


class FakeEventData(NamedTuple):
    """Members of nvmlEventData_t that healthd reads."""

    device: Handle
    eventType: int
    eventData: int


class FakeLibrary:
    """The pynvml functions that healthd calls, for one machine. The machine's state does not change while NVML is
    open.
    """

    NVMLError: type[Exception] = pynvml.NVMLError
    NVML_NVLINK_MAX_LINKS: int = pynvml.NVML_NVLINK_MAX_LINKS
    c_nvmlEccSramErrorStatus_v1_t: Any = pynvml.c_nvmlEccSramErrorStatus_v1_t
    c_nvmlGpuFabricInfo_t: Any = pynvml.c_nvmlGpuFabricInfo_t
    c_nvmlGpuFabricInfo_v2_t: Any = pynvml.c_nvmlGpuFabricInfo_v2_t
    c_nvmlGpuFabricInfo_v3_t: Any = pynvml.c_nvmlGpuFabricInfo_v3_t
    c_nvmlGpuFabricInfo_v4_t: Any = getattr(pynvml, "c_nvmlGpuFabricInfo_v4_t", None)  # nvidia-ml-py 13.615
    c_nvmlPlatformInfo_v2_t: Any = pynvml.c_nvmlPlatformInfo_v2_t
    c_nvmlGpuOperationalEventConfig_v1_t: Any = pynvml.c_nvmlGpuOperationalEventConfig_v1_t
    c_nvmlEventSetWait_v3_t: Any = pynvml.c_nvmlEventSetWait_v3_t
    c_nvmlEventSetGetContextCount_v1_t: Any = pynvml.c_nvmlEventSetGetContextCount_v1_t
    c_nvmlEventSetGetContextInfo_v1_t: Any = pynvml.c_nvmlEventSetGetContextInfo_v1_t
    c_nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1_t: Any = (
        pynvml.c_nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1_t
    )

    def __init__(self, machine: Machine, pci: Sequence[str], gpus: Sequence[Gpu]) -> None:
        self._machine = machine
        self._pci = pci
        self._gpus = gpus
        self._counted_gpus = [index for index, gpu in enumerate(gpus) if not gpu.gone]
        self._opened = 0
        self._healthy = [gpu if _has_no_fault(machine, gpu) else None for gpu in gpus]
        self._values: dict[tuple[int, tuple[int | tuple[int, int], ...]], Any] = {}
        self._queries: Counter[int] = Counter()  # number of queries that the GPU itself must answer
        self._random = random.Random(f"{machine.seed} {next(_opens)}")

    # common to all calls

    def _enter(self, call: str) -> None:
        _apply_fault(self._machine, call)
        if self._machine.library is not Library.FINE:
            _fail(self._machine.library.value)
        if call in self._machine.missing_functions:
            _fail("FunctionNotFound")
        if call != "nvmlInit" and not self._opened:
            _fail("Uninitialized")

    def _gpu_for_call(self, call: str, handle: Handle) -> Gpu:
        if self._opened and (healthy := self._healthy[handle.index]) is not None:
            return healthy  # a round makes hundreds of calls, most of them for healthy GPUs
        self._enter(call)
        gpu = self._gpus[handle.index]
        _apply_fault(gpu, call)
        if call in gpu.errors:
            _fail(gpu.errors[call])
        if gpu.unreachable and call in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByPciBusId"):
            _fail("Unknown")
        if call not in CACHED_CALLS:
            self._queries[handle.index] += 1
            if gpu.lost or (gpu.lost_after is not None and self._queries[handle.index] > gpu.lost_after):
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

    # identity

    def nvmlDeviceGetCount(self) -> int:
        self._enter("nvmlDeviceGetCount")
        return len(self._counted_gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        if not 0 <= index < len(self._counted_gpus):
            _fail("InvalidArgument")
        handle = Handle(self._counted_gpus[index])
        self._gpu_for_call("nvmlDeviceGetHandleByIndex", handle)
        return handle

    def nvmlDeviceGetHandleByPciBusId(self, pciBusId: str) -> Handle:
        handles = [Handle(index) for index in self._counted_gpus if _address(self._pci[index]) == _address(pciBusId)]
        if not handles:
            _fail("NotFound")
        self._gpu_for_call("nvmlDeviceGetHandleByPciBusId", handles[0])
        return handles[0]

    def nvmlDeviceGetPciInfo(self, handle: Handle) -> Any:
        self._gpu_for_call("nvmlDeviceGetPciInfo", handle)
        domain, bus, device = _address(self._pci[handle.index])
        return pynvml.nvmlPciInfo_t(
            domain=domain,
            bus=bus,
            device=device,
            busId=b"%08X:%02X:%02X.0" % (domain, bus, device),
            busIdLegacy=b"%04X:%02X:%02X.0" % (domain & 0xFFFF, bus, device),
        )

    def nvmlDeviceGetName(self, handle: Handle) -> str:
        return self._gpu_for_call("nvmlDeviceGetName", handle).name

    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        gpu = self._gpu_for_call("nvmlDeviceGetUUID", handle)
        domain, bus, device = _address(self._pci[handle.index])
        kind, part = ("GPU", 0) if handle.mig is None else ("MIG", handle.mig)
        first = zlib.crc32(gpu.serial.encode()) if gpu.serial else handle.index
        return f"{kind}-{first:08x}-{part:04x}-4000-8000-{domain & 0xFFFF:04x}{bus:04x}{device:04x}"

    def nvmlDeviceGetGpuUptime_v1(self, device: Handle, uptime: Any) -> int:
        """Fill in the uptime. `uptime` is a ctypes reference, as for the driver."""
        uptime._obj.value = _supported(self._gpu_for_call("nvmlDeviceGetGpuUptime_v1", device).uptime_seconds)
        return 0

    def nvmlDeviceGetSerial(self, handle: Handle) -> str:
        """Return 13 digits, as on current boards, which differ for each GPU of the machine."""
        gpu = self._gpu_for_call("nvmlDeviceGetSerial", handle)
        domain, bus, device = _address(self._pci[handle.index])
        return gpu.serial or f"16{domain % 10000:04d}{bus:03d}{device:02d}{handle.index % 100:02d}"

    def nvmlDeviceGetMinorNumber(self, handle: Handle) -> int:
        """Return the GPU's index, because the driver numbers GPUs in the order of their PCI addresses."""
        self._gpu_for_call("nvmlDeviceGetMinorNumber", handle)
        return handle.index

    def nvmlDeviceGetVbiosVersion(self, handle: Handle) -> str:
        return self._gpu_for_call("nvmlDeviceGetVbiosVersion", handle).vbios

    def nvmlDeviceGetCudaComputeCapability(self, handle: Handle) -> tuple[int, int]:
        return _supported(self._gpu_for_call("nvmlDeviceGetCudaComputeCapability", handle).compute_capability)

    def nvmlDeviceGetVirtualizationMode(self, handle: Handle) -> int:
        return self._gpu_for_call("nvmlDeviceGetVirtualizationMode", handle).virtualization

    # readings

    def nvmlDeviceGetTemperature(self, handle: Handle, sensor: int) -> int:
        gpu = self._gpu_for_call("nvmlDeviceGetTemperature", handle)
        if sensor != pynvml.NVML_TEMPERATURE_GPU:
            _fail("InvalidArgument")
        return _supported(gpu.temperature)

    def nvmlDeviceGetTemperatureThreshold(self, handle: Handle, threshold: int) -> int:
        gpu = self._gpu_for_call("nvmlDeviceGetTemperatureThreshold", handle)
        return _supported({1: gpu.temperature_slowdown, 2: gpu.temperature_memory_max}.get(threshold))

    def nvmlDeviceGetMarginTemperature(self, handle: Handle) -> int:
        return _supported(self._gpu_for_call("nvmlDeviceGetMarginTemperature", handle).temperature_margin)

    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> Any:
        gpu = self._gpu_for_call("nvmlDeviceGetUtilizationRates", handle)
        return pynvml.c_nvmlUtilization_t(gpu=_supported(None if gpu.mig else gpu.utilization_percent))

    def nvmlDeviceGetClockInfo(self, handle: Handle, type: int) -> int:
        gpu = self._gpu_for_call("nvmlDeviceGetClockInfo", handle)
        if type != pynvml.NVML_CLOCK_SM:
            _fail("NotSupported")
        return _supported(gpu.sm_clock_mhz)

    def nvmlDeviceGetPersistenceMode(self, handle: Handle) -> int:
        return int(_supported(self._gpu_for_call("nvmlDeviceGetPersistenceMode", handle).persistence))

    def nvmlDeviceValidateInforom(self, handle: Handle) -> None:
        if not _supported(self._gpu_for_call("nvmlDeviceValidateInforom", handle).inforom):
            _fail("CorruptedInforom")

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Handle) -> int:
        return int(1000 * _supported(self._gpu_for_call("nvmlDeviceGetEnforcedPowerLimit", handle).power_limit_watts))

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: Handle) -> int:
        gpu = self._gpu_for_call("nvmlDeviceGetPowerManagementDefaultLimit", handle)
        return int(1000 * _supported(gpu.power_default_watts))

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Handle) -> int:
        return _supported(self._gpu_for_call("nvmlDeviceGetCurrentClocksEventReasons", handle).clock_event_reasons)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Handle) -> int:
        return _supported(self._gpu_for_call("nvmlDeviceGetCurrentClocksThrottleReasons", handle).clock_event_reasons)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Handle) -> list[Any]:
        return _processes(self._gpu_for_call("nvmlDeviceGetComputeRunningProcesses_v3", handle))

    def nvmlDeviceGetComputeRunningProcesses_v2(self, handle: Handle) -> list[Any]:
        return _processes(self._gpu_for_call("nvmlDeviceGetComputeRunningProcesses_v2", handle))

    def nvmlDeviceGetMigMode(self, device: Handle) -> list[int]:
        gpu = self._gpu_for_call("nvmlDeviceGetMigMode", device)
        mig = int(_supported(gpu.mig))
        return [mig, mig if gpu.mig_pending is None else int(gpu.mig_pending)]

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Handle) -> int:
        return (
            fake_scenario.LIMITS["mig_devices"]
            if self._gpu_for_call("nvmlDeviceGetMaxMigDeviceCount", device).mig
            else 0
        )

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Handle, index: int) -> Handle:
        gpu = self._gpu_for_call("nvmlDeviceGetMigDeviceHandleByIndex", device)
        if not gpu.mig or index >= gpu.mig_devices:
            _fail("NotFound")
        return Handle(device.index, mig=index)

    def nvmlDeviceGetEccMode(self, handle: Handle) -> list[int]:
        ecc = int(_supported(self._gpu_for_call("nvmlDeviceGetEccMode", handle).ecc))
        return [ecc, ecc]

    def nvmlDeviceGetDefaultEccMode(self, handle: Handle) -> list[int]:
        gpu = self._gpu_for_call("nvmlDeviceGetDefaultEccMode", handle)
        _supported(gpu.ecc)
        return [int(gpu.ecc_default)]

    def nvmlDeviceGetTotalEccErrors(self, handle: Handle, errorType: int, counterType: int) -> int:
        gpu = self._gpu_for_call("nvmlDeviceGetTotalEccErrors", handle)
        return sum(_ecc(gpu, errorType, counterType, location) for location in (2, 7))

    def nvmlDeviceGetMemoryErrorCounter(
        self, handle: Handle, errorType: int, counterType: int, locationType: int
    ) -> int:
        gpu = self._gpu_for_call("nvmlDeviceGetMemoryErrorCounter", handle)
        if locationType == LOCATIONS["sram"] and not gpu.ecc_sram:
            _fail("NotSupported")
        return _ecc(gpu, errorType, counterType, locationType)

    def nvmlDeviceGetSramEccErrorStatus(self, device: Handle, status: Any) -> int:
        gpu = self._gpu_for_call("nvmlDeviceGetSramEccErrorStatus", device)
        struct = status._obj  # the target of byref()
        struct.volatileUncParity = gpu.ecc_volatile_uncorrected_sram
        struct.aggregateUncParity = gpu.ecc_aggregate_uncorrected_sram
        struct.volatileCor = gpu.ecc_volatile_corrected_sram
        struct.aggregateCor = gpu.ecc_aggregate_corrected_sram
        struct.bThresholdExceeded = _supported(gpu.sram_threshold_exceeded if gpu.ecc else None)
        return 0

    def nvmlDeviceGetRemappedRows(self, device: Handle) -> tuple[int, int, int, int]:
        gpu = self._gpu_for_call("nvmlDeviceGetRemappedRows", device)
        if gpu.mig:
            _fail("NotSupported")
        corrected, uncorrected = _supported(gpu.remap_correctable), _supported(gpu.remap_uncorrectable)
        return corrected, uncorrected, int(gpu.remap_pending), int(gpu.remap_failure)

    def nvmlDeviceGetRowRemapperHistogram(self, device: Handle) -> Any:
        gpu = self._gpu_for_call("nvmlDeviceGetRowRemapperHistogram", device)
        return pynvml.c_nvmlRowRemapperHistogramValues(*_supported(None if gpu.mig else gpu.remap_histogram))

    def nvmlDeviceGetUnrepairableMemoryFlag_v1(self, device: Handle) -> int:
        return int(_supported(self._gpu_for_call("nvmlDeviceGetUnrepairableMemoryFlag_v1", device).unrepairable_memory))

    def nvmlDeviceGetRetiredPages(self, device: Handle, sourceFilter: int) -> list[int]:
        gpu = self._gpu_for_call("nvmlDeviceGetRetiredPages", device)
        return list(range(_supported((gpu.retired_single_bit, gpu.retired_double_bit)[sourceFilter])))

    def nvmlDeviceGetRetiredPagesPendingStatus(self, device: Handle) -> int:
        gpu = self._gpu_for_call("nvmlDeviceGetRetiredPagesPendingStatus", device)
        _supported(gpu.retired_double_bit)
        return int(gpu.retired_pending)

    def nvmlDeviceGetGpuFabricInfoV(self, device: Handle, gpuFabricInfo: Any) -> int:
        gpu = self._gpu_for_call("nvmlDeviceGetGpuFabricInfoV", device)
        struct = gpuFabricInfo._obj  # the target of byref()
        version = struct.version >> 24
        if gpu.fabric_state is not None and (gpu.fabric_health if version == 2 else gpu.fabric_summary) is None:
            _fail("ArgumentVersionMismatch")
        _fill_fabric(gpu, struct)
        struct.healthMask = gpu.fabric_health or 0
        if version == 3:
            struct.healthSummary = gpu.fabric_summary
        return 0

    def nvmlDeviceGetGpuFabricInfo_v4(self, device: Handle, gpuFabricInfo: Any) -> int:
        gpu = self._gpu_for_call("nvmlDeviceGetGpuFabricInfo_v4", device)
        cliques = gpu.fabric_cliques
        if cliques is None:
            raise pynvml.NVMLError_FunctionNotFound()
        struct = gpuFabricInfo._obj  # the target of byref()
        _fill_fabric(gpu, struct)
        struct.healthMask, struct.healthSummary = gpu.fabric_health or 0, gpu.fabric_summary or 0
        struct.numCliques = min(len(cliques), len(struct.cliques))
        for clique, (kind, number) in zip(struct.cliques, cliques, strict=False):
            clique.type, clique.id = kind, number
        return 0

    def nvmlDeviceGetC2cModeInfoV(self, handle: Handle) -> Any:
        gpu = self._gpu_for_call("nvmlDeviceGetC2cModeInfoV", handle)
        enabled = _supported((gpu.c2c_links > 0 or None) if gpu.c2c_enabled is None else gpu.c2c_enabled)
        return pynvml.c_nvmlC2cModeInfo_v1_t(isC2cEnabled=int(enabled))

    def nvmlDeviceGetGpuFabricInfo(self, device: Handle, gpuFabricInfo: Any) -> int:
        _fill_fabric(self._gpu_for_call("nvmlDeviceGetGpuFabricInfo", device), gpuFabricInfo._obj)
        return 0

    def nvmlDeviceGetPlatformInfo(self, device: Handle, platformInfo: Any) -> int:
        platform = _supported(self._gpu_for_call("nvmlDeviceGetPlatformInfo", device).platform)
        struct = platformInfo._obj  # the target of byref()
        put(struct, "chassisSerialNumber", platform.serial.encode())
        numbers = {"slotNumber": platform.slot, "trayIndex": platform.tray, "hostId": platform.host}
        numbers |= {"peerType": platform.peer_type, "moduleId": platform.module}
        for name, number in numbers.items():
            put(struct, name, bytes([number]))
        return 0

    def nvmlDeviceGetRepairStatus(self, device: Handle) -> list[int]:
        gpu = self._gpu_for_call("nvmlDeviceGetRepairStatus", device)
        if gpu.repair_pending_channel is None and gpu.repair_pending_tpc is None:
            _fail("NotSupported")
        return [int(gpu.repair_pending_channel or False), int(gpu.repair_pending_tpc or False)]

    # events

    def nvmlEventSetCreate(self) -> FakeEventSet:
        self._enter("nvmlEventSetCreate")
        return FakeEventSet()

    def nvmlEventSetFree(self, eventSet: FakeEventSet) -> None:
        self._enter("nvmlEventSetFree")

    def nvmlDeviceGetSupportedEventTypes(self, handle: Handle) -> int:
        self._gpu_for_call("nvmlDeviceGetSupportedEventTypes", handle)
        return WANTED

    def nvmlDeviceRegisterEvents(self, handle: Handle, eventTypes: int, eventSet: FakeEventSet) -> None:
        self._gpu_for_call("nvmlDeviceRegisterEvents", handle)
        eventSet.masks[handle.index] = eventTypes

    def nvmlEventSetRegisterGpuOperationalEvents_v1(self, eventSet: FakeEventSet, config: Any) -> None:
        call = "nvmlEventSetRegisterGpuOperationalEvents_v1"
        self._enter(call)
        uuid = raw(config, "uuid").decode()
        for index in self._counted_gpus:
            if self.nvmlDeviceGetUUID(Handle(index)) == uuid:
                self._gpu_for_call(call, Handle(index))
                eventSet.operational[uuid] = index
                return
        _fail("NotFound")

    def nvmlEventSetWait_v2(self, eventSet: FakeEventSet, timeoutms: int) -> FakeEventData:
        self._enter("nvmlEventSetWait_v2")
        index, event = self._next_event(eventSet, timeoutms, operational=False)
        return FakeEventData(Handle(index), EVENT_BITS[event.kind], event.xid)

    def nvmlEventSetWait_v3(self, eventSet: FakeEventSet, params: Any) -> None:
        self._enter("nvmlEventSetWait_v3")
        data = params
        index, event = self._next_event(eventSet, data.timeoutMs, operational=True)
        put(data, "uuid", self.nvmlDeviceGetUUID(Handle(index)).encode())
        is_operational = event.kind is EventKind.OPERATIONAL
        data.dataType = OPERATIONAL_DATA if is_operational else 0
        if not is_operational:
            data.eventType, data.eventData = EVENT_BITS[event.kind], event.xid
            return
        put(data, "sourceModule", event.module.encode()[:16])
        data.severity = next(number for number, name in SEVERITIES.items() if name == event.severity.value)
        data.moduleEventCode = event.code
        flags = ((event.primary, PRIMARY), (event.uncontained, UNCONTAINED), (event.overflow, OVERFLOW))
        data.attributes = sum(bit for is_set, bit in flags if is_set)
        data.groupAttributes = SIMULATED if event.simulated else 0

    def nvmlEventSetGetContextCount_v1(self, eventSet: FakeEventSet, params: Any) -> None:
        self._enter("nvmlEventSetGetContextCount_v1")
        has_xid = eventSet.last is not None and eventSet.last.kind is EventKind.OPERATIONAL and eventSet.last.xid
        params.count = 2 if has_xid else 1  # the first context has the module's own format

    def nvmlEventSetGetContextInfo_v1(self, eventSet: FakeEventSet, params: Any) -> None:
        self._enter("nvmlEventSetGetContextInfo_v1")
        params.nvmlGpuOperationalEventContextType = LEGACY_XID if params.index == 1 else 0

    def nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1(self, eventSet: FakeEventSet, params: Any) -> None:
        self._enter("nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1")
        if params.index != 1 or eventSet.last is None:
            _fail("InvalidArgument")
        else:
            params.xidCode = eventSet.last.xid

    def _next_event(self, event_set: FakeEventSet, milliseconds: int, operational: bool) -> tuple[int, FakeEvent]:
        """Return the next registered event that was not yet reported. Without one, raise Timeout after the time."""
        for index in self._counted_gpus:
            for number, event in enumerate(self._gpus[index].events):
                if event.kind is EventKind.OPERATIONAL:
                    is_registered = operational and index in event_set.operational.values()
                else:
                    is_registered = bool(event_set.masks.get(index, 0) & EVENT_BITS[event.kind])
                if is_registered and (index, number) not in event_set.delivered:
                    event_set.delivered.add((index, number))
                    event_set.last = event
                    return index, event
        time.sleep(milliseconds / 1000)
        raise pynvml.NVMLError_Timeout()

    def nvmlDeviceGetNvLinkState(self, device: Handle, link: int) -> int:
        gpu = self._gpu_for_call("nvmlDeviceGetNvLinkState", device)
        _require_link(gpu, link)
        return _link_state(gpu, link)

    def nvmlDeviceGetNvLinkErrorCounter(self, device: Handle, link: int, counter: int) -> int:
        gpu = self._gpu_for_call("nvmlDeviceGetNvLinkErrorCounter", device)
        if gpu.nvlink_counters is not LinkCounters.CALLS:
            _fail("NotSupported")
        _require_link(gpu, link)
        counts: tuple[dict[str, int], ...] = (gpu.nvlink_replay, gpu.nvlink_recovery, gpu.nvlink_crc, {})
        if not 0 <= counter < len(counts):
            _fail("NotSupported")
        return counts[counter].get(str(link), 0)

    def nvmlDeviceGetFieldValues(self, handle: Handle, fieldIds: Sequence[int | tuple[int, int]]) -> Any:
        gpu = self._gpu_for_call("nvmlDeviceGetFieldValues", handle)
        key = (id(gpu), tuple(fieldIds))  # identical GPUs are one object and give the same answers
        if key not in self._values or gpu.iteration_seconds:
            self._values[key] = _values(gpu, fieldIds)
        values = self._values[key]
        return type(values).from_buffer_copy(values)

    def nvmlDeviceGetPcieReplayCounter(self, handle: Handle) -> int:
        return _supported(self._gpu_for_call("nvmlDeviceGetPcieReplayCounter", handle).pcie_replays)

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: Handle) -> int:
        return _supported(self._gpu_for_call("nvmlDeviceGetCurrPcieLinkGeneration", handle).pcie_generation)

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: Handle) -> int:
        return _supported(self._gpu_for_call("nvmlDeviceGetCurrPcieLinkWidth", handle).pcie_width)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Handle) -> int:
        return _supported(self._gpu_for_call("nvmlDeviceGetMaxPcieLinkGeneration", handle).pcie_max_generation)

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Handle) -> int:
        return _supported(self._gpu_for_call("nvmlDeviceGetMaxPcieLinkWidth", handle).pcie_max_width)


def _has_no_fault(machine: Machine, gpu: Gpu) -> bool:
    """Return True if all calls after nvmlInit return this GPU's data and no query needs to be counted."""
    is_away = gpu.gone or gpu.unreachable or gpu.lost or gpu.lost_after is not None or gpu.requires_reset
    problem = machine.hang or machine.crash or gpu.hang or gpu.crash or machine.random_failures
    return not (is_away or problem or machine.missing_functions or gpu.errors or gpu.unsupported)


def _fail(error: str) -> None:
    """Raise pynvml's exception NVMLError_`error`."""
    raise getattr(pynvml, f"NVMLError_{error}")()


def _supported(value: T | None) -> T:
    if value is None:
        raise pynvml.NVMLError_NotSupported()
    return value


def _apply_fault(part: Machine | Gpu, call: str) -> None:
    """Sleep or die if the scenario requires this for the call."""
    if part.hang == call:
        time.sleep(part.hang_seconds)
    if part.crash == call:
        os.kill(os.getpid(), signal.SIGKILL)


def _address(pci: str) -> tuple[int, int, int]:
    domain, bus, device_text = pci.split(":")
    return int(domain, 16), int(bus, 16), int(device_text.split(".")[0], 16)


def _ecc(gpu: Gpu, error_type: int, counter_type: int, location: int) -> int:
    """Return one ECC counter, selected by the numbers in nvml.h. Ampere and later do not support most locations. With
    MIG, the GPU does not report its counts since the driver was loaded."""
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
    if link in gpu.nvlink_unreported:
        _fail("NotSupported")


def _processes(gpu: Gpu) -> list[Any]:
    return [pynvml.c_nvmlProcessInfo_v3_t(pid=pid) for pid in _supported(gpu.processes)]


def _fill_fabric(gpu: Gpu, struct: Any) -> None:
    struct.state, struct.status = _supported(gpu.fabric_state), gpu.fabric_status
    if hasattr(struct, "cliqueId"):
        struct.cliqueId = gpu.fabric_clique
    if gpu.fabric_cluster:
        struct.clusterUuid[:] = bytes.fromhex(gpu.fabric_cluster.replace("-", ""))


def _values(gpu: Gpu, fields: Sequence[int | tuple[int, int]]) -> Any:
    values = (pynvml.c_nvmlFieldValue_t * len(fields))()
    for value, field in zip(values, fields, strict=True):
        number, scope = field if isinstance(field, tuple) else (field, 0)
        put(value, "fieldId", number)
        put(value, "scopeId", scope)
        _answer(gpu, value, number, scope)
    return values


def _answer(gpu: Gpu, value: Any, field: int, scope: int) -> None:
    """Fill in one field value, with its own return code and type as in the real call."""
    number: int | None = None
    if field in gpu.unsupported_fields:
        pass
    elif field in (FIELD_C2C_STATUS, *FIELDS_C2C_COUNTERS):
        number = _c2c_field(gpu, field, scope)
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
        FIELD_C2C_COUNT: gpu.c2c_links or None,
        FIELD_RECOVERY_ACTION: gpu.recovery_action,
        FIELD_MEMORY_TEMPERATURE: gpu.temperature_memory,
        FIELD_SLOWDOWN_MARGIN: gpu.temperature_slowdown_margin,
        **(
            dict.fromkeys(ACTIVITY_FIELDS, _activity_count(gpu.iteration_seconds, time.time()))
            if gpu.iteration_seconds
            else {}
        ),
        **{field: None if seconds is None else int(seconds * 1e9) for field, seconds in slowdown},
    }.get(field)


def _activity_count(iteration_seconds: float, now: float) -> int:
    """Return the activity count for a job that communicates in the last third of each iteration."""
    done, part = divmod(now, iteration_seconds)
    return int(COUNT_PER_ITERATION * (done + max(0.0, 3 * part / iteration_seconds - 2)))


class FakeEventSet:
    """A fake of NVML's event set. `masks` has the registered bits by GPU, `operational` the UUIDs of GPUs with
    operational events, and `last` the last event."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        self.operational: dict[str, int] = {}
        self.delivered: set[tuple[int, int]] = set()
        self.last: FakeEvent | None = None


EVENT_BITS = {EventKind(kind): bit for bit, kind in EVENT_KINDS.items()}


def _link_state(gpu: Gpu, link: int) -> int:
    return LINK_TRAFFIC_DISABLED if link in gpu.nvlink_traffic_disabled else int(link not in gpu.nvlink_inactive)


def _link_field(gpu: Gpu, field: int, link: int) -> int | None:
    counters = LINK_FIELDS.get(gpu.nvlink_counters)
    if counters is None or link in gpu.nvlink_unreported:
        return None
    if field == FIELD_LINK_STATE:
        return _link_state(gpu, link)
    if field == FIELD_LINK_SPEED:
        return gpu.nvlink_speeds.get(str(link), gpu.nvlink_speed)
    if gpu.nvlink_counters is LinkCounters.NVLINK5:
        if field in FIELDS_LINK_BER:
            rates = (gpu.nvlink_ber, gpu.nvlink_symbol_ber)[FIELDS_LINK_BER.index(field)]
            return _packed_ber(rates.get(str(link), 0.0))
        if field == FIELD_LINK_RECOVERIES:
            return gpu.nvlink_recovery.get(str(link), 0) + gpu.nvlink_recovery_failed.get(str(link), 0)
    setting = counters.get(field)
    return None if setting is None else getattr(gpu, setting).get(str(link), 0) if setting else 0


def _c2c_field(gpu: Gpu, field: int, link: int) -> int | None:
    if link >= gpu.c2c_links or link in gpu.c2c_unreported:
        return None
    errors, replays, repeated, power = FIELDS_C2C_COUNTERS
    counts = {errors: gpu.c2c_errors, replays: gpu.c2c_replays}
    return {FIELD_C2C_STATUS: int(link not in gpu.c2c_inactive), repeated: 0, power: 0}.get(
        field, counts.get(field, {}).get(str(link), 0)
    )


def _packed_ber(rate: float) -> int:
    """Pack a bit error rate as in nvml.h, with the mantissa (1 to 15) in the bits above the exponent's absolute
    value."""
    if not rate:
        return NO_BIT_ERRORS
    exponent = min(255, max(0, -math.floor(math.log10(rate))))
    return max(1, min(15, round(rate * 10.0**exponent))) << 8 | exponent
