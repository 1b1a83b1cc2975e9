"""Inventory of this node: PCI devices, disks and their mounts from sysfs, GPUs from NVML, names from udev if it is
running.

Faults are keyed by PCI address. The other data is for display and for rules that need a port or a model. PCI classes:
0300 and 0302 GPU, 0680 (NVIDIA's) NVSwitch, 02xx network (0207 InfiniBand), 0108 NVMe (PCI Code and ID Assignment
Specification).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from healthd.common import mountinfo
from healthd.common.errors import HealthdError
from healthd.common.model import Disk, Gpu, Inventory, LocalMount, PciDevice
from healthd.common.text import regex
from healthd.host.disks import ID_FILES, NO_DISKS, whole_disk
from healthd.host.host import PCI_ADDRESS, PCI_DEVICES, Host

if TYPE_CHECKING:
    from healthd.nvidia.nvml import NvmlGpu

SLOTS = "/sys/bus/pci/slots"
UDEV_DATABASE = "/run/udev/data"
NVIDIA = "0x10de"
NVME = "/sys/class/nvme"
BLOCK = "/sys/block"
BLOCK_NUMBERS = "/sys/dev/block"
BLOCK_NAMES = "/sys/class/block"
MD_WITH_COPIES = ("raid1", "raid4", "raid5", "raid6", "raid10")  # not raid0, linear
LVM_COPY = regex(r"_(?:rmeta|mimage)_\d+$")  # an LVM raid0 has no rmeta
JOINING, JOINED = (1, 2), 3  # a GPU's state in its NVLink fabric (nvidia/nvml.py)
LAYERS = 8  # maximum depth of stacked device mapper and RAID devices, which no machine reaches


def collect(host: Host, gpus: bool) -> Inventory:
    """Return the current inventory. Call this in the worker, because NVML may hang. With `gpus`, NVML is also queried.
    If the query fails, the inventory has no GPUs.

    Devices that no check needs (bridges, USB, ...) are left out.
    """
    found, driver_version, domain = _read_nvml(host) if gpus else ((), "", None)
    return Inventory(
        gpus=found,
        devices=tuple(_devices(host)),
        driver_version=driver_version or host.read_or_empty("/sys/module/nvidia/version"),
        dmi_product=host.read_or_empty("/sys/class/dmi/id/product_name"),
        disks=tuple(_disks(host)),
        mounts=tuple(_mounts(host)),
        domain=domain,
    )


def _read_nvml(host: Host) -> tuple[tuple[Gpu, ...], str, str | None]:
    try:
        gpus = tuple(
            Gpu(gpu.pci, gpu.index, gpu.uuid, gpu.name, _minor(gpu), _mig(gpu), _serial(gpu)) for gpu in host.gpus()
        )
        return gpus, (host.nvml.driver_version() or "") if gpus else "", _domain(host.gpus()) if gpus else None
    except HealthdError:  # an NvmlError, whose import would load nvml, with ctypes, whenever a profile is chosen
        return (), "", None  # gpu_access reports the error


def _domain(gpus: Iterable[NvmlGpu]) -> str | None:
    """Return the UUID of the NVLink domain that these GPUs have joined, "" if there is none or they disagree, or None
    if a GPU is still joining or cannot be read.

    A GPU without a fabric (with MIG, or left out by its fabric) does not count. The key is the domain's UUID, because
    several racks can form one domain.
    """
    clusters = set()
    for gpu in gpus:
        try:
            fabric = gpu.fabric()
        except HealthdError:
            return None  # gpu_fabric reports the error
        if fabric is not None and fabric.state in JOINING:
            return None
        if fabric is not None and fabric.state == JOINED and fabric.status == 0 and fabric.cluster:
            clusters.add(fabric.cluster)
    return clusters.pop() if len(clusters) == 1 else ""


def _minor(gpu: NvmlGpu) -> int | None:
    try:
        return gpu.minor()
    except HealthdError:
        return None  # the jobs that use this GPU are then unknown


def _mig(gpu: NvmlGpu) -> tuple[str, ...]:
    try:
        return gpu.mig_uuids() if gpu.mig_enabled() else ()
    except HealthdError:
        return ()  # a job's MIG devices are then unknown, because their numbers differ from Slurm's


def _serial(gpu: NvmlGpu) -> str:
    try:
        return gpu.serial() or ""
    except HealthdError:
        return ""  # complete_gpus keeps the number that was read earlier


def complete_gpus(previous: tuple[Gpu, ...], current: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Return the complete node's GPUs: `previous` while some of these GPUs are missing from `current`, otherwise
    `current`.

    Another GPU in one of the slots is included even while a third GPU is missing, with the slot's numbers, which shift
    if a GPU is missing. If a serial number could not be read, the previous number of the same GPU is kept.
    """
    old, new = ({gpu.pci: gpu for gpu in gpus} for gpus in (previous, current))
    if new.keys() < old.keys():
        return tuple(_with_identity(gpu, new.get(gpu.pci, gpu)) for gpu in previous)
    return tuple(replace(gpu, serial=_with_identity(old.get(gpu.pci, gpu), gpu).serial) for gpu in current)


def _with_identity(slot: Gpu, gpu: Gpu) -> Gpu:
    """Return `slot` with this GPU in it."""
    if gpu.uuid == slot.uuid:
        return replace(slot, serial=gpu.serial or (slot.serial if gpu.uuid else ""))
    return replace(slot, uuid=gpu.uuid, name=gpu.name, mig=gpu.mig, serial=gpu.serial)


def _devices(host: Host) -> Iterator[PciDevice]:
    slots = {host.read_or_empty(f"{SLOTS}/{slot}/address"): slot for slot in host.list(SLOTS)}
    model_name = _udev_names() if host.root == "" and host.exists(UDEV_DATABASE) else lambda pci: ""
    for function in host.pci_functions():
        kind = device_kind(function.vendor, function.pci_class)
        if kind != "other":
            yield PciDevice(
                pci=function.pci,
                vendor=function.vendor,
                device=function.device,
                pci_class=function.pci_class,
                kind=kind,
                upstream=function.upstream,
                slot=slots.get(function.pci.partition(".")[0], ""),
                name=model_name(function.pci),
            )


def _disks(host: Host) -> Iterator[Disk]:
    for name in host.list(NVME):
        is_local = (host.read_or_empty(f"{NVME}/{name}/transport") or "pcie") == "pcie"
        pci = host.read_or_empty(f"{NVME}/{name}/address") if is_local else ""
        yield Disk(name, pci, _ids(host, f"{NVME}/{name}", ("serial",)))
    for name in host.list(BLOCK):
        if not name.startswith(NO_DISKS):
            pci = pci_address(host.link_target(f"{BLOCK}/{name}") or "")
            yield Disk(name, pci, _ids(host, f"{BLOCK}/{name}", ID_FILES))


def _ids(host: Host, path: str, files: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for file in files if (text := host.read_or_empty(f"{path}/{file}"))))


def _mounts(host: Host) -> Iterator[LocalMount]:
    """Yield each file system on the node's own disks once: the root as "/", and others with their first mount point."""
    mounts, _ = mountinfo.parse_all(host.read_or_empty(mountinfo.MOUNTINFO) or None)
    found: dict[str, mountinfo.Mount] = {}
    for mount in mounts:
        is_own = mountinfo.is_host_file_system(mount) and not mountinfo.is_loop_device(mount)
        if is_own and (mount.device not in found or mount.point == "/"):
            found[mount.device] = mount
    for mount in found.values():
        device = _device_name(host, mount)
        disks = _disks_below(host, device)
        redundant = tuple(sorted(disk for disk, has_copy in disks.items() if has_copy))
        yield LocalMount(mount.point, mount.fstype, device, tuple(sorted(disks)), redundant)


def _device_name(host: Host, mount: mountinfo.Mount) -> str:
    """Return the device's name in the kernel log. Btrfs and others have their own device numbers, so use the mount's
    source."""
    link = host.link_target(f"{BLOCK_NUMBERS}/{mount.device}")
    return (link or host.link_target(mount.source) or mount.source).rpartition("/")[2]


def _disks_below(host: Host, device: str, layers: int = LAYERS) -> dict[str, bool]:
    """Return a dict of the disks below a device.

    A disk's value is True if the device does not depend on that disk, because other disks have copies of its data.
    """
    below = host.list(f"{BLOCK_NAMES}/{device}/slaves") if device and layers else []
    if not below:
        return {whole_disk(device): False}
    found: dict[str, bool] = {}
    for part in below:
        for disk, redundant in _disks_below(host, part, layers - 1).items():
            found[disk] = redundant and found.get(disk, True)
    return dict.fromkeys(found, True) if len(found) > 1 and _has_copies(host, device, below) else found


def _has_copies(host: Host, device: str, below: list[str]) -> bool:
    """Return True if the device survives the failure of one of its parts.

    This is the case for md, multipath, LVM RAID and LVM mirrors (recognised by LVM's names). This includes degraded
    arrays, because md and the file system report the loss of one part too many.
    """
    if host.read_or_empty(f"{BLOCK_NAMES}/{device}/md/level") in MD_WITH_COPIES:
        return True
    if host.read_or_empty(f"{BLOCK_NAMES}/{device}/dm/uuid").startswith("mpath-"):
        return True
    return any(LVM_COPY.search(host.read_or_empty(f"{BLOCK_NAMES}/{part}/dm/name")) for part in below)


def device_kind(vendor: str, pci_class: str) -> str:
    """Return the kind of device: gpu, nvswitch, nic, nvme or other. `vendor` ("0x10de") and `pci_class` ("0x030200")
    are as in sysfs."""
    if vendor == NVIDIA and pci_class.startswith(("0x0300", "0x0302")):
        return "gpu"
    if vendor == NVIDIA and pci_class.startswith("0x0680"):
        return "nvswitch"
    if pci_class.startswith("0x02"):
        return "nic"
    return "nvme" if pci_class.startswith("0x0108") else "other"


def pci_address(device_path: str) -> str:
    """Return the PCI address for a path below /sys (".../0000:3b:00.0/net/ens1"), or "" if there is none."""
    parts = [part for part in device_path.split("/") if PCI_ADDRESS.fullmatch(part)]
    return parts[-1] if parts else ""


def _udev_names() -> Callable[[str], str]:
    """Return a function that looks up model names in udev's database. Without libudev, all names are ""."""
    try:
        import pyudev

        context = pyudev.Context()
    except (ImportError, OSError):
        return lambda pci: ""

    def name(pci: str) -> str:
        try:
            device = pyudev.Devices.from_path(context, f"{PCI_DEVICES}/{pci}")
        except (pyudev.DeviceNotFoundError, OSError):
            return ""
        return str(device.properties.get("ID_MODEL_FROM_DATABASE", ""))

    return name
