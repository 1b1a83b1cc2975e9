"""Lines of known drivers that no rule recognises. `healthd scan` counts them, so that "no fault" hides none. Pure.

A known driver is one that healthd has rules for. NVIDIA's driver prints hardly anything but errors: each of its lines
counts that is not in its list of harmless lines. The other drivers also report what they do: of these only lines count
that have a word of trouble ("failed", "timeout"), and are not known to be harmless.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from healthd.agent.kernel_log.rules.network import CARD_DRIVERS
from healthd.common.text import regex


class Unrecognised(NamedTuple):
    """A line that no rule recognises, without its prefix. `driver`: as people call it ("NVRM", "mlx5")."""

    driver: str
    text: str


_PCI = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
# What stands first in a driver's lines -> the driver. The first that fits counts.
_DRIVERS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (driver, regex(begins))
    for driver, begins in (
        ("NVRM", r"NVRM: "),
        ("nvidia", r"nvidia-(?:nvlink|nvswitch\d{0,3}|peermem|modeset|uvm)\b|nvidia " + _PCI),
        ("mlx5", r"mlx5_core\b|mlx5_ib\b|infiniband mlx5_"),
        ("mlx4", r"mlx4_(?:core|en|ib)\b"),
        ("network", rf"(?:{'|'.join((*CARD_DRIVERS, 'efa'))}) {_PCI}|infiniband \w"),
        ("NVMe", r"nvme (?:nvme\d|" + _PCI + ")|nvme\\d{1,5}(?:c\\d{1,5})?n\\d{1,9}: "),
        ("PCIe", rf"(?:pcieport|aer|pciehp|dpc) {_PCI}"),
        ("EDAC", r"EDAC "),
        ("machine check", r"mce: |(?:\{\d{1,10}\})?\[Hardware Error\]: "),
        ("IOMMU", r"DMAR: |(?:iommu ivhd\d{1,3}: )?AMD-Vi: |arm-smmu(?:-v3)? |[\w-]{1,32} " + _PCI + ": AMD-Vi: "),
        ("file system", r"(?:EXT[234]-fs|XFS|BTRFS|JBD2|F2FS-fs)[ :(]"),
        ("file server", r"(?:Lustre|LustreError|LNet|LNetError|CIFS|libceph|ceph|beegfs|NFS4?): "),
    )
)
_TROUBLE = regex(
    r"(?i)\b(?:fail\w*|errors?|time(?:d|s)? ?-?outs?|fatal|lost|dead|locked|stuck|hung|hangs?|corrupt\w*|unable|cannot"
    r"|could ?n[o']t|can't|abort\w*|broken|not respond\w*|unresponsive|halt\w*|exception|violation|overrun|overflow\w*"
    r"|uncorrect\w*|degraded|crash\w*|panic\w*|unrecover\w*|bad state|UE)\b|Event logged \["
)
# NVIDIA's driver while it starts and ends, and further lines of its messages of several lines.
_HARMLESS_NVRM = regex(
    r"NVRM: (?:GPU (?:at )?\S{7,24}:? (?:GPU-|GPU serial number is|GPU is on Board|has software scheduler"
    r"|is already bound to vfio-pci|PreserveVideoMemory)|GPU Board Serial Number|loading NVIDIA UNIX"
    r"|NVLink link training completed"
    r"|The NVIDIA GPU |\(PCI ID: |This can occur when |nouveau, rivafb|was loaded and obtained|obtained ownership"
    r"|installed in|nvidia\.ko because|System Processor \(GSP\)|has the version|the version |kernel module and all"
    r"|this kernel module|have the same version|make sure that|components have|A GPU crash dump has been"
    r"|nvidia-bug-report\.sh as root|the NVIDIA kernel module is unloaded"
    r"|nv(?:Assert|Check)\w{0,20}: [^\n]{0,40}Out of memory|_iovaspaceCreate"
    r"|os_(?:pci_init_handle|schedule): |failed to copy vbios|nvidia_frontend_open: |testIfDsm|CPUID: "
    r"|GPU\d{1,3} (?:kbifCacheVFInfo|gpuClearFbhubPoisonIntr)|Attempting to remove |Xid \(\d{1,4}, pid: )"
)
_HARMLESS = regex(
    r"(?:mlx5_core[^\n]{0,80}|mlx5_)[^\n]{0,80}(?:ACCESS_REG|QUERY_\w{1,40})\b"  # a firmware does not know the request
    r"|mlx5_core [^\n]{1,40}: (?:Failed to add post action rule|Successfully (?:un)?registered panic handler)"
    r"|EXT[234]-fs \([^)\n]{1,40}\): (?:VFS: Can't find|couldn't mount as|re-?mounted)"
    r"|EDAC \w{1,20}: Failed to register device with error -\d"
    r"|nvme \S{1,24}: Shutdown timeout set to|nvme nvme\d{1,5}: Does your device have a faulty"
    r"|pcieport [^\n]{1,40}: (?:AER|DPC): (?:enabled|error containment capabilities|broadcast)"
    r"|NFS: nfs_\w{1,40}: |[\w-]{1,24} [^\n]{1,40}: aer_inject: "
    r"|\{?[^\n]{0,24}\[Hardware Error\]: (?: *It has been corrected| *Error \d|  )"  # the body of a firmware's record
)


def unrecognised_driver(text: str) -> str:
    """Return the driver whose line this is if a rule should have read it, "" if not. `text` has no prefix."""
    driver = next((name for name, begins in _DRIVERS if begins.match(text)), "")
    if not driver:
        return ""
    if driver == "NVRM":
        return "" if _HARMLESS_NVRM.match(text) else driver
    return driver if _TROUBLE.search(text) and not _HARMLESS.match(text) else ""
