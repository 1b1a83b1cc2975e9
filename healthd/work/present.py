"""What this node has now, as settings of the checks: the worker's side of `healthd baseline`, part by part.

What looks broken (a port that is down, a GPU that does not answer) is left out with a reason, never taken as normal.
What comes and goes (mounts of containers and users, virtual functions, ports that nobody uses) is left out silently.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from healthd.host import PCI_DEVICES, Host
from healthd.machine.inventory import device_kind
from healthd.machine.mountinfo import MOUNTINFO, Mount, parse_all
from healthd.nvml import NvmlError, NvmlGpu

SYSTEMCTL_SECONDS = 8.0  # less than a part has


@dataclass(frozen=True, slots=True)
class Entry:
    """One setting, or one `key` of a setting that is a table, or one item (the `key`) of a setting that is a list.
    `note`: what it is, for people."""

    check: str
    setting: str
    value: Any = True
    key: str = ""
    instance: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What is not said, and why. `key` "": the whole setting; `setting` "": the whole check."""

    check: str
    why: str
    setting: str = ""
    key: str = ""
    instance: str = ""


Found = Iterator["Entry | LeftOut"]


def look(host: Host, part: str, config: Mapping[str, Any]) -> list[Entry | LeftOut]:
    """One part. What it raises leaves the whole part out."""
    return list(PARTS[part].look(host, config))


# --- GPUs


def _gpus(host: Host, config: Mapping[str, Any]) -> Found:
    gpus = host.gpus()
    unreachable = [str(error) for error in host.nvml.unreachable] if host.nvml_is_open else []
    silent = sorted({*host.pci_gpus()} - {gpu.pci for gpu in gpus})
    if unreachable or silent:
        why = "; ".join(unreachable) or f"GPU {silent[0]} is on PCI and does not answer"
        yield LeftOut("gpu_count", f"{len(gpus)} GPUs answer, but {why}", "expected")
    elif gpus:
        models = ", ".join(sorted({gpu.name for gpu in gpus}))
        yield Entry("gpu_count", "expected", len(gpus), note=models)
    if gpus:
        for look in (_nvlinks, _mig, _software):
            try:
                yield from look(host, gpus)
            except NvmlError as error:
                yield LeftOut(CHECK_OF[look], str(error))


def _nvlinks(host: Host, gpus: Sequence[NvmlGpu]) -> Found:
    links = [gpu.nvlinks() or () for gpu in gpus if not gpu.mig_enabled()]
    active = sorted({sum(link.active for link in own) for own in links})
    if len(active) > 1:
        yield LeftOut("gpu_nvlink", f"some GPUs have {active[0]} active links, others {active[-1]}", "links")
    elif active and active[0] < max(map(len, links)):
        if active[0]:
            yield LeftOut("gpu_nvlink", f"{active[0]} of {max(map(len, links))} links are active", "links")
    elif active and active[0]:
        yield Entry("gpu_nvlink", "links", active[0], note="active, on each GPU")


def _mig(host: Host, gpus: Sequence[NvmlGpu]) -> Found:
    modes = {gpu.mig_mode() for gpu in gpus}
    mode = modes.pop()
    if modes or (mode and mode[0] != mode[1]):
        yield LeftOut("gpu_mig", "not all GPUs are in the same mode, or a change waits for a reset", "mode")
    elif mode:
        yield Entry("gpu_mig", "mode", "on" if mode[0] else "off", note="take it out if jobs change it")
    if not modes and mode and mode[0]:
        counts = {gpu.mig_instances() for gpu in gpus}
        if len(counts) == 1 and None not in counts:
            yield Entry("gpu_mig", "instances", counts.pop(), note="MIG devices on each GPU")
        else:
            yield LeftOut("gpu_mig", "GPUs have different numbers of MIG devices", "instances")


def _software(host: Host, gpus: Sequence[NvmlGpu]) -> Found:
    driver = host.nvml.driver_version()
    if driver:
        yield Entry("gpu_software", "driver_version", driver)
    versions = {gpu.vbios() for gpu in gpus}
    if len(versions) > 1 and len({gpu.name for gpu in gpus}) == 1:
        yield LeftOut("gpu_software", f"GPUs have different ones: {', '.join(map(str, versions))}", "vbios")
    elif len(versions) == 1 and (version := versions.pop()):
        yield Entry("gpu_software", "vbios", version)


CHECK_OF = {_nvlinks: "gpu_nvlink", _mig: "gpu_mig", _software: "gpu_software"}


# --- PCI, ports and interfaces


def _pci(host: Host, config: Mapping[str, Any]) -> Found:
    for function in host.pci_functions():
        kind = device_kind(function.vendor, function.pci_class)
        if kind == "other" or function.virtual:
            continue
        if _text(host, f"{PCI_DEVICES}/{function.pci}/revision") == "0xff":
            yield LeftOut("pcie_devices", "dead on the bus: reads give all ones", "expected", function.pci)
        else:
            model = f"{function.vendor[2:]}:{function.device[2:]}"
            yield Entry("pcie_devices", "expected", model, function.pci, note=kind)


def _infiniband(host: Host, config: Mapping[str, Any]) -> Found:
    from healthd.checks.ib_link import parse
    from healthd.machine.infiniband import DEVICES

    for device in host.list(DEVICES):
        if not _is_hardware(host, f"{DEVICES}/{device}"):
            continue
        for number in host.list(f"{DEVICES}/{device}/ports"):
            name, path = f"{device}/{number}", f"{DEVICES}/{device}/ports/{number}"
            try:
                port = parse(name, *((host.read(f"{path}/{file}") or "") for file in ("state", "phys_state", "rate")))
            except (OSError, ValueError) as error:
                yield LeftOut("ib_link", str(error), "expected_gbps", name)
                continue
            if port.active:
                told = _text(host, f"{path}/link_layer") if port.told else "a speed that this kernel has no name for"
                gbps = int(port.gbps) if port.gbps == int(port.gbps) else port.gbps
                yield Entry("ib_link", "expected_gbps", gbps if port.told else 0, name, note=told)
            else:
                yield LeftOut("ib_link", f"is {port.words}", "expected_gbps", name)


def _ethernet(host: Host, config: Mapping[str, Any]) -> Found:
    from healthd.checks.eth_link import COUNT, NAME, NET, SPEED_UNKNOWN, is_up

    entries = {name: host.list(f"{NET}/{name}") for name in host.list(NET)}
    bonds = {name for name, inside in entries.items() if "bonding" in inside}
    members = {entry[6:] for name in bonds for entry in entries[name] if entry.startswith("lower_")}
    for name in sorted(entries.keys() - members):  # eth_link looks at the members of a bond by itself
        path = f"{NET}/{name}"
        if name not in bonds and not _is_hardware(host, path):
            continue
        if (
            not NAME.fullmatch(name)
            or _text(host, f"{path}/type") != "1"
            or "f" in _text(host, f"{path}/phys_port_name")
        ):
            continue  # not Ethernet (ib_link has InfiniBand), or it stands for a virtual function ("pf0vf3", "pf0sf1")
        try:
            state = host.read(f"{path}/operstate") or ""
            if not is_up(host, name, state):
                yield LeftOut("eth_link", f"is {state}", "expected_mbps", name)
                continue
            speed = host.read(f"{path}/speed") or "0"
        except (OSError, ValueError) as error:
            yield LeftOut("eth_link", str(error), "expected_mbps", name)
            continue
        known = speed not in SPEED_UNKNOWN and speed.isascii() and speed.isdecimal()
        note = "" if known else "the driver does not tell the speed"
        yield Entry("eth_link", "expected_mbps", int(speed) if known else 0, name, note=note)
        mtu = _text(host, f"{path}/mtu")
        if COUNT.fullmatch(mtu) and int(mtu):
            yield Entry("eth_link", "expected_mtu", int(mtu), name)


def _is_hardware(host: Host, path: str) -> bool:
    """A device below PCI, virtio or the like. Not software (bridges, veth, rxe), not SR-IOV functions, not USB: the BMC
    has a network card there that comes and goes."""
    device = host.link_target(f"{path}/device")
    usb = device is not None and re.fullmatch(r"[0-9]+-[0-9.]+:[0-9.]+", device.rpartition("/")[2])
    return device is not None and not usb and host.link_target(f"{path}/device/physfn") is None


# --- memory, CPUs, disks


def _memory(host: Host, config: Mapping[str, Any]) -> Found:
    from healthd.checks.memory_size import MEMINFO, parse

    size = parse(host.read(MEMINFO) or "")
    yield Entry("memory_size", "expected_bytes", size, note=f"{size / 2**30:.1f} GiB")


def _cpus(host: Host, config: Mapping[str, Any]) -> Found:
    from healthd.checks.cpu import CPUS, parse

    online = parse(host.read(f"{CPUS}/online") or "", f"{CPUS}/online")
    offline = _text(host, f"{CPUS}/offline")
    yield Entry("cpu", "expected", len(online), note=f"online; offline: {offline}" if offline else "online")


def _disks(host: Host, config: Mapping[str, Any]) -> Found:
    from healthd.checks.block_device import BLOCK, NVME
    from healthd.machine.disks import ID_FILES, NO_DISKS

    named = set()
    for name in host.list(NVME):
        path = f"{NVME}/{name}"
        serial, state = _text(host, f"{path}/serial"), _text(host, f"{path}/state")
        if _text(host, f"{path}/transport") not in ("", "pcie") or not serial:
            continue  # over the network: the array's matter
        named.add(serial)
        if state == "live":
            yield Entry("block_device", "expected", key=serial, note=f"{name} {_text(host, f'{path}/model')}".strip())
        else:
            yield LeftOut("block_device", f"{name} is {state or 'of unknown state'}", "expected", serial)
    for name in host.list(BLOCK):
        path = f"{BLOCK}/{name}"
        comes_and_goes = _text(host, f"{path}/removable") == "1" or "/usb" in (host.link_target(path) or "")
        if name.startswith((*NO_DISKS, "nvme")) or comes_and_goes:
            continue
        told = (_text(host, f"{path}/{file}") for file in ID_FILES)
        known = next((text for text in told if text), "")
        if known and known not in named:
            named.add(known)  # of several paths to one disk the first
            note = f"{name} {_text(host, f'{path}/device/model')}".strip()
            yield Entry("block_device", "expected", key=known, note=note)


# --- mounts

NETWORK = re.compile(
    "afs|cifs|nfs4?|smb3|virtiofs|orangefs|pvfs2|panfs|gpfs|lustre|wekafs"
    "|(fuse[.])?(beegfs|ceph|daos|glusterfs|juicefs|mfs|weka)"
)
LOCAL = re.compile("bcachefs|btrfs|ext[234]|f2fs|xfs|zfs")
SHARES_DEVICES = ("btrfs", "zfs")  # one file system, mounted in several places
COMES_AND_GOES = re.compile(
    "/(proc|sys|dev|run|snap|media)(/.*)?"
    "|/(tmp|var/tmp|var/run)/.+"
    "|/var/lib/(containerd|containers|docker|enroot|kubelet|lxc|lxd|machines|nfs|rancher|snapd)(/.*)?"
    "|/var/spool/(slurm|slurmd)/.+"
    "|.*//deleted"
)


def _mounts(host: Host, config: Mapping[str, Any]) -> Found:
    mounts, wrong = parse_all(host.read(MOUNTINFO))
    if wrong:
        raise ValueError(wrong)
    yield from worth_watching(mounts)


def worth_watching(mounts: Sequence[Mount]) -> Found:
    """The mounts that jobs may need and that are there whenever the node is up."""
    uppermost = {mount.point: mount for mount in mounts}
    automounted = {mount.point for mount in mounts if mount.fstype == "autofs"}
    seen: set[str] = set()
    for mount in sorted(uppermost.values(), key=lambda mount: (len(mount.point), mount.point)):
        if not _is_lasting(mount) or not mount.point.isprintable() or mount.point != mount.point.strip():
            continue
        if any(above in automounted for above in _at_and_above(mount.point)):
            yield LeftOut("mount", "automounted: add it by hand if jobs need it", instance=mount.point)
            continue
        if LOCAL.fullmatch(mount.fstype) and mount.fstype not in SHARES_DEVICES:
            if mount.device in seen:
                continue  # a bind mount of a part of it
            seen.add(mount.device)
        if mount.turned:
            yield LeftOut("mount", f"the kernel has made it {mount.turned}", instance=mount.point)
            continue
        yield Entry("mount", "fstype", mount.fstype, instance=mount.point)
        if mount.read_only or "ro" in mount.options:
            yield Entry("mount", "read_only", True, instance=mount.point)


def _is_lasting(mount: Mount) -> bool:
    if not (NETWORK.fullmatch(mount.fstype) or LOCAL.fullmatch(mount.fstype)) or COMES_AND_GOES.fullmatch(mount.point):
        return False
    if LOCAL.fullmatch(mount.fstype) and mount.point.startswith("/etc/"):
        return False  # how containers get /etc/hosts
    is_loop = mount.device.startswith("7:")
    is_users = any(option.startswith("user_id=") and option != "user_id=0" for option in mount.options)
    return not is_loop and not is_users


def _at_and_above(point: str) -> Iterator[str]:
    while point:
        yield point
        point = point.rpartition("/")[0]
    yield "/"


# --- device nodes

# Without nvidia_uvm and its /dev/nvidia-uvm, -uvm-tools: where nvidia-modprobe loads it, that is with the first CUDA
# program. If it were expected, a node would be drained after its reboot, get no CUDA program, and stay drained.
NVIDIA_NODE = re.compile(r"nvidia([0-9]+|ctl|-nvswitchctl|-nvswitch[0-9]+)")
INFINIBAND_NODE = re.compile(r"uverbs[0-9]+|umad[0-9]+|rdma_cm")


def _device_nodes(host: Host, config: Mapping[str, Any]) -> Found:
    for directory, names in (("/dev", NVIDIA_NODE), ("/dev/infiniband", INFINIBAND_NODE)):
        for name in host.list(directory):
            found = host.stat(f"{directory}/{name}") if names.fullmatch(name) else None
            if found is None:
                continue
            path, mode = f"{directory}/{name}", stat.S_IMODE(found.mode)
            if stat.S_ISCHR(found.mode) and mode <= 0o777:
                yield Entry("device_nodes", "expected", f"{mode:04o}", path)
            else:
                yield LeftOut("device_nodes", "is no character device", "expected", path)


# --- kernel modules

WITH_THE_FIRST_CUDA_PROGRAM = ("nvidia_uvm",)  # as its device files above
USUAL = (
    *("nvidia", "nvidia_peermem", "nvidia_fs", "gdrdrv"),
    *("ib_umad", "ib_uverbs", "rdma_cm", "rdma_ucm"),
)


def _kernel_modules(host: Host, config: Mapping[str, Any]) -> Found:
    """Of the modules that the settings or a profile name, and of the usual ones, those that are loaded and were so
    since the boot."""
    from healthd.checks.kernel_modules import problem

    named = [name.replace("-", "_") for name in config.get("expected", ())]
    for name in dict.fromkeys((*named, *USUAL)):
        if name in WITH_THE_FIRST_CUDA_PROGRAM:
            continue
        try:
            wrong = problem(host, name)
        except (OSError, ValueError) as error:
            yield LeftOut("kernel_modules", str(error), "expected", name)
            continue
        if not wrong:
            yield Entry("kernel_modules", "expected", key=name)
        elif name in named:
            yield LeftOut("kernel_modules", wrong, "expected", name)


# --- services

REQUIRED = ("slurmd.service", "munge.service", "nvidia-fabricmanager.service")
WANTED = ("nvidia-persistenced.service",)


def _services(host: Host, config: Mapping[str, Any]) -> Found:
    """Of the units that the settings or a profile name, and of the usual ones, those that are active."""
    from healthd.checks.services import ACTIVE, MORE, PROPERTIES, parse

    named = {setting: [*config.get(setting, ())] for setting in ("required", "wanted")}
    usual = {"required": REQUIRED, "wanted": WANTED}
    whose = {_unit(unit): setting for group in (usual, named) for setting in group for unit in group[setting]}
    ran = host.run(("systemctl", "show", "-p", ",".join((*PROPERTIES, *MORE)), *whose), SYSTEMCTL_SECONDS)
    if ran is None:
        return
    if ran.status != 0:
        raise RuntimeError(f"systemctl: exit status {ran.status}: {ran.stderr.strip()[:200]}")
    asked_for = {_unit(unit) for units in named.values() for unit in units}
    for unit, shown in zip(whose, parse(ran.stdout, [*whose]), strict=True):
        if shown["ActiveState"] in ACTIVE:
            yield Entry("services", whose[unit], key=unit)
        elif shown["LoadState"] == "loaded" or unit in asked_for:
            state = shown["ActiveState"] if shown["LoadState"] == "loaded" else shown["LoadState"]
            yield LeftOut("services", f"is {state}", whose[unit], unit)


def _unit(name: str) -> str:
    return name if "." in name else f"{name}.service"


def _text(host: Host, path: str) -> str:
    """ "" where it cannot be read: for what is only told to people or passed over."""
    try:
        return host.read(path) or ""
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Part:
    """`checks`: those whose settings it finds. `uses`: what it may hang in. `config_of`: the check whose settings it is
    given."""

    look: Callable[[Host, Mapping[str, Any]], Found]
    checks: tuple[str, ...]
    uses: str = ""
    config_of: str = ""


PARTS = {
    "GPUs": Part(_gpus, ("gpu_count", "gpu_nvlink", "gpu_mig", "gpu_software"), uses="nvml"),
    "PCI": Part(_pci, ("pcie_devices",)),
    "InfiniBand": Part(_infiniband, ("ib_link",)),
    "Ethernet": Part(_ethernet, ("eth_link",)),
    "disks": Part(_disks, ("block_device",)),
    "memory": Part(_memory, ("memory_size",)),
    "CPUs": Part(_cpus, ("cpu",)),
    "device nodes": Part(_device_nodes, ("device_nodes",)),
    "kernel modules": Part(_kernel_modules, ("kernel_modules",), config_of="kernel_modules"),
    "services": Part(_services, ("services",), config_of="services"),
    "mounts": Part(_mounts, ("mount",)),
}
# What a baseline holds: check -> settings. Everything else in such a file is a person's.
SETTINGS = {
    "gpu_count": ("expected",),
    "gpu_nvlink": ("links",),
    "gpu_mig": ("mode", "instances"),
    "gpu_software": ("driver_version", "vbios"),
    "pcie_devices": ("expected",),
    "ib_link": ("expected_gbps",),
    "eth_link": ("expected_mbps", "expected_mtu"),
    "block_device": ("expected",),
    "memory_size": ("expected_bytes",),
    "cpu": ("expected",),
    "device_nodes": ("expected",),
    "kernel_modules": ("expected",),
    "services": ("required", "wanted"),
    "mount": ("fstype", "read_only"),
}
