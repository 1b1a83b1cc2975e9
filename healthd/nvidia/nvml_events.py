"""GPU events from NVML: event bits, and GPU Operational Events (driver 615 and later, a preview).

An operational event is a record of the driver with a severity and, if there is one, the Xid that the kernel log has for
the same occurrence (docs.nvidia.com/deploy/gpu-operational-events, "Events that have a legacy Xid equivalent continue
to produce NVRM: Xid kernel log lines"). The same fault may also set an event bit (NVML: "may generate both").
Structures and numbers: the binding of nvidia-ml-py 13.615.71, and nvml.h of CUDA 13.5.

NVML reports only events that occur after the registration, so it never repeats an old fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from ctypes import c_void_p, cast, sizeof
from typing import Any

from healthd.common.text import printable
from healthd.nvidia.gpu_event import OPERATIONAL, GpuEvent
from healthd.nvidia.nvml import (
    NOT_SUPPORTED,
    Nvml,
    NvmlError,
    NvmlErrorKind,
    NvmlLibrary,
    call_nvml,
    raw,
    sysfs_address,
)

# nvmlEventType*: the bits that healthd registers, if the GPU supports them. The other bits are about clocks, MIG and
# counters that the checks read.
XID, GPU_UNAVAILABLE, RECOVERY_ACTION = 0x8, 0x4000, 0x8000
EVENT_KINDS = {XID: "xid", GPU_UNAVAILABLE: "unavailable", RECOVERY_ACTION: "recovery_action"}
WANTED = XID | GPU_UNAVAILABLE | RECOVERY_ACTION
OPERATIONAL_DATA = 1  # NVML_EVENT_DATA_TYPE_GPU_OPERATIONAL_EVENT
NOTICE = 30  # NVML_GPU_OPERATIONAL_EVENT_LOG_LEVEL_NOTICE; lower levels are telemetry and diagnostics
LEGACY_XID = 1  # NVML_GPU_OPERATIONAL_EVENT_CONTEXT_TYPE_LEGACY_XID
SEVERITIES = {10: "informational", 20: "corrected", 30: "recoverable", 40: "fatal"}  # nvmlOperationalEventSeverity_t
UNCONTAINED, PRIMARY, OVERFLOW = 1 << 0, 1 << 5, 1 << 6  # NVML_OPERATIONAL_EVENT_ATTR_*
# NVML_OPERATIONAL_EVENT_GROUP_ATTR_PREVERR and _SIMULATED: a fault from before, and a test of the driver
PREVIOUS_ERROR, SIMULATED = 1 << 1, 1 << 2
MAX_CONTEXTS = 16


def open_events(nvml: Nvml, pcis: Iterable[str]) -> EventSet:
    """Register the events of the GPUs at these addresses. Raises NvmlError if none of them has events."""
    return EventSet(*nvml.handles(pcis))


class EventSet:
    """A set of events that NVML reports to this process while it is open.

    `operational` is True if at least one GPU reports operational events. NVML must stay open while the set is open.
    """

    def __init__(self, library: NvmlLibrary, handles: Sequence[tuple[Any, str, str]]) -> None:
        """Register the events of GPUs, each with its handle, PCI address and UUID.

        Raises NvmlError if no GPU supports any of the events.
        """
        self._library: Any = library
        self._pci_by_uuid = {uuid: pci for _, pci, uuid in handles}
        self._pci_by_handle = {address: pci for handle, pci, _ in handles if (address := _address(handle))}
        self._set = call_nvml(library, "nvmlEventSetCreate", absent=frozenset())
        self._refusal: NvmlError | None = None  # a GPU that does not answer must not prevent the others' events
        self.operational = False
        try:
            registered = [self._register(handle, pci) for handle, pci, _ in handles]
            operational = [self._register_operational(uuid, pci) for _, pci, uuid in handles]
            self.operational = any(operational)
            if not self.operational and not any(registered):
                message = "no GPU supports events"
                none = NvmlError(NvmlErrorKind.OTHER, "nvmlDeviceRegisterEvents", message, number=NOT_SUPPORTED)
                raise self._refusal or none
        except NvmlError:
            self.close()
            raise

    def close(self) -> None:
        call_nvml(self._library, "nvmlEventSetFree", self._set)

    def wait(self, milliseconds: int) -> GpuEvent | None:
        """Return the next event, or None if there was none in time. Raises NvmlError."""
        if self.operational:
            data = self._library.c_nvmlEventSetWait_v3_t()
            data.timeoutMs = milliseconds
            if not self._is_received("nvmlEventSetWait_v3", data):
                return None
            return self._operational(data) if data.dataType == OPERATIONAL_DATA else self._bits(data)
        try:
            data = call_nvml(self._library, "nvmlEventSetWait_v2", self._set, milliseconds, absent=frozenset())
        except NvmlError as error:
            if error.kind is NvmlErrorKind.TIMEOUT:
                return None
            raise
        return self._event(data.eventType, data.eventData, self._pci_of(data.device))

    # --- registration

    def _register(self, handle: Any, pci: str) -> bool:
        try:
            supported = call_nvml(self._library, "nvmlDeviceGetSupportedEventTypes", handle, pci=pci)
            wanted = (supported or 0) & WANTED
            if not wanted:
                return False
            call_nvml(self._library, "nvmlDeviceRegisterEvents", handle, wanted, self._set, pci=pci, absent=frozenset())
        except NvmlError as error:
            self._refusal = error
            return False
        return True

    def _register_operational(self, uuid: str, pci: str) -> bool:
        """Return False if the binding, the driver or the GPU is too old."""
        config = getattr(self._library, "c_nvmlGpuOperationalEventConfig_v1_t", None)
        call = "nvmlEventSetRegisterGpuOperationalEvents_v1"
        if config is None or not uuid:
            return False
        try:
            call_nvml(self._library, call, self._set, config(uuid, NOTICE), pci=pci, absent=frozenset())
        except NvmlError as error:
            self._refusal = error
            return False
        return True

    # --- events

    def _is_received(self, call: str, data: Any) -> bool:
        try:
            call_nvml(self._library, call, self._set, data, absent=frozenset())
        except NvmlError as error:
            if error.kind is NvmlErrorKind.TIMEOUT:
                return False
            raise
        return True

    def _bits(self, data: Any) -> GpuEvent:
        return self._event(data.eventType, data.eventData, self._pci_by_uuid.get(_text(raw(data, "uuid")), ""))

    def _event(self, bit: int, number: int, pci: str) -> GpuEvent:
        kind = EVENT_KINDS.get(bit, "other")
        return GpuEvent(kind, pci, (number,) if kind == "xid" else ())

    def _operational(self, data: Any) -> GpuEvent:
        attributes, group_attributes = data.attributes, data.groupAttributes
        return GpuEvent(
            OPERATIONAL,
            self._pci_by_uuid.get(_text(raw(data, "uuid")), ""),
            tuple(dict.fromkeys(self._legacy_xids())),
            SEVERITIES.get(data.severity, ""),
            _text(raw(data, "sourceModule")),
            data.moduleEventCode,
            data.categoryId,
            bool(attributes & PRIMARY),
            bool(attributes & UNCONTAINED),
            bool(attributes & OVERFLOW),
            bool(group_attributes & (PREVIOUS_ERROR | SIMULATED)),
        )

    def _legacy_xids(self) -> Iterator[int]:
        """Yield the Xids of the event that the last wait returned. Other contexts have no public format."""
        library = self._library
        count = library.c_nvmlEventSetGetContextCount_v1_t()
        if not self._is_filled("nvmlEventSetGetContextCount_v1", count):
            return
        for index in range(min(count.count, MAX_CONTEXTS)):
            info = library.c_nvmlEventSetGetContextInfo_v1_t(index=index)
            if not self._is_filled("nvmlEventSetGetContextInfo_v1", info):
                continue
            if info.nvmlGpuOperationalEventContextType == LEGACY_XID:
                name = "nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1"
                xid = getattr(library, f"c_{name}_t")(index=index)
                if self._is_filled(name, xid):
                    yield xid.xidCode

    def _is_filled(self, call: str, structure: Any) -> bool:
        """Return False if this context cannot be read. The event itself remains valid."""
        try:
            call_nvml(self._library, call, self._set, structure, absent=frozenset())
        except NvmlError:
            return False
        return True

    def _pci_of(self, handle: Any) -> str:
        if (known := self._pci_by_handle.get(_address(handle))) is not None:
            return known
        try:
            info = call_nvml(self._library, "nvmlDeviceGetPciInfo", handle)
        except NvmlError:
            return ""
        return "" if info is None else sysfs_address(info.domain, info.bus, info.device)


def _address(handle: Any) -> int:
    """Return the address that a handle points to, or 0 for a handle of the fake NVML."""
    try:
        return cast(handle, c_void_p).value or 0 if sizeof(handle) else 0
    except (TypeError, ValueError):
        return 0


def _text(value: bytes | str) -> str:
    text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
    return printable(text.partition("\0")[0])[:96]
