"""GPUs in Slurm: a node's number of GPUs, and a job's GPUs. The functions are pure and accept any text.

Slurm numbers a node's GPUs from 0 in the order of its own list. With AutoDetect=nvml that is NVML's order, by PCI
address; otherwise it is the order in gres.conf (github.com/SchedMD/slurm, src/plugins/gres/gpu/gres_gpu.c:
_sort_gpu_by_links_order(); src/interfaces/gres.c: _foreach_fill_in_gres_devices()). It is not the N of /dev/nvidiaN
("this isn't always the same order as the device file names": src/plugins/gres/common/gres_common.c). When slurmd
starts, it numbers the GPUs again and skips missing GPUs. A number is therefore used only if it is unambiguous
(`slurm_gpu_order`), and if gres.conf lists the GPUs in that order (`lists_gpus_in_order`). MIG devices are numbered
individually, mps and shards by their GPU (gres_c_s.c: "must match the order in which SHARINGs are defined").
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

from healthd.common.model import Gpu
from healthd.common.slurm.hostlist import HostListError, contains, expand, expand_all
from healthd.common.text import is_decimal, regex

# This node's GPUs that Slurm allocated to a job, or (). "3" is Slurm's number; "GPU-..." and "MIG-..." are UUIDs.
AllocatedGpus: TypeAlias = "tuple[str, ...]"

MAX_GPUS = 1024  # more than any node has, including MIG devices
SHARES = ("mps", "shard")
_ENTRY = regex(r"([^:,()]+)((?::[^:,()]*)*)(?:\(([^()]*)\))?(?:,|$)")
# src/api/job_info.c: slurm_sprint_job_info()
_RECORD = regex(r"^JobId=[0-9]+ ((?:Array|Het)JobId=[0-9]+ )?", re.MULTILINE)
_DETAIL = regex(r" Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
_NUMBERS = regex(r"[0-9,-]+")
_UUID = regex(r"(?:GPU|MIG)-[0-9A-Za-z/-]{1,100}")


def count_gpus(gres: str) -> int | None:
    """Return the number of gres/gpu that Slurm allocates to jobs, from sinfo's Gres ("gpu:h100:8(S:0-1),shard:32").

    GPUs marked no_consume are not counted, because every job gets them. Return None if the text is not a Gres or has no
    number.
    """
    if gres == "(null)":
        return 0
    total = 0
    entries = list(_entries(gres))
    for name, parts, _ in entries:
        if name == "gpu":
            if "no_consume" in parts:
                continue
            if not parts or not regex("[0-9]{1,4}").fullmatch(parts[-1]):
                return None
            total += int(parts[-1])
    return total if entries else None


def count_single_type_gpus(gres: str) -> int | None:
    """Return the number of GPUs if one entry covers all GPUs, or None.

    If there are several types, sinfo does not show which type Slurm numbers first, and slurm.conf and gres.conf may
    list the types in different orders.
    """
    return count_gpus(gres) if sum(name == "gpu" for name, _, _ in _entries(gres)) == 1 else None


def parse_job_gpus(text: str, job_id: str, node: str) -> AllocatedGpus | None:
    """Return the job's GPUs on this node from `scontrol -d -o show job`, or None if they are missing or ambiguous.

    A job's name, comment and features are in the same record. They may contain newlines and any text, which can make
    the record ambiguous. A job has one record; only an array's tasks and a heterogeneous job's components have several.
    """
    heads = list(_RECORD.finditer(text))
    groups = {head[1] for head in heads}
    if len(heads) > 1 and (len(groups) > 1 or None in groups):
        return None
    records = [text[start:end] for start, end in pairwise([*(head.start() for head in heads), len(text)])]
    job_records = [record for record in records if record.startswith(f"JobId={job_id} ")]
    if len(job_records) != 1:
        return None
    node_gres = [gres for hosts, gres in _DETAIL.findall(job_records[0]) if _is_named(node, hosts)]
    return _numbers(node_gres[0]) if len(node_gres) == 1 else None


def parse_prolog_file(text: str, job_id: str) -> AllocatedGpus | None:
    """Parse the prolog's file: "JOB NUMBERS [UUIDS]", such as "4711 0,3" or "4711 0 GPU-2f3a...". Return None if the
    file is empty or about another job.

    Without numbers the GPUs are unknown, because Slurm passes no number for a GPU without a device file in gres.conf.
    """
    parts = text.split()
    if not 2 <= len(parts) <= 3 or parts[0] != job_id:
        return None
    numbers = parts[1].split(",")
    uuids = parts[2].split(",") if len(parts) == 3 else []
    if len(numbers) > MAX_GPUS or not all(regex("[0-9]{1,4}").fullmatch(number) for number in numbers):
        return None
    # With AutoDetect=nvml, CUDA_VISIBLE_DEVICES has UUIDs (gres_common_prep_set_env()), which need no order.
    has_uuids = len(uuids) == len(numbers) and all(_UUID.fullmatch(uuid) for uuid in uuids)
    return tuple(uuids if has_uuids else numbers)


def _entries(gres: str) -> Iterator[tuple[str, list[str], str | None]]:
    """Yield the name, the values after colons, and the text in parentheses.

    Yield nothing if the text is not such a list.
    """
    found, offset = [], 0
    while match := _ENTRY.match(gres, offset):
        found.append((match[1], match[2].split(":")[1:], match[3]))
        if match.end() == len(gres) and not gres.endswith(","):
            yield from found
            return
        offset = match.end()


def _numbers(gres: str) -> AllocatedGpus | None:
    """Parse the GPU numbers in a job's GRES.

    Two whole GPUs are written "gpu:h100:2(IDX:0,3)". A share of GPU 3 is written "shard:2(IDX:3)" in 22.05 and
    "shard:2(0/4,0/4,0/4,2/4)" in 24.11 (gres_ctld_job_build_details(), gres_stepmgr_job_build_details()).
    """
    if gres in ("", "(null)"):
        return ()
    numbers: set[int] = set()
    entries = list(_entries(gres))
    for name, parts, detail in entries:
        if name not in ("gpu", *SHARES) or parts[-1:] == ["0"]:
            continue
        found = _parse_detail(detail or "")
        if not found:
            return None
        numbers |= found
    return tuple(map(str, sorted(numbers))) if entries else None


def _parse_detail(detail: str) -> set[int] | None:
    if detail.startswith("IDX:"):
        return parse_numbers(detail.removeprefix("IDX:"))
    if regex("[0-9]{1,9}/[0-9]{1,9}(?:,[0-9]{1,9}/[0-9]{1,9})*").fullmatch(detail):
        return {i for i, share in enumerate(detail.split(",")) if int(share.partition("/")[0])}
    return None


def parse_numbers(text: str) -> set[int] | None:
    """Return the numbers in "0,3-5", or None if the text has another form or a number that no node reaches."""
    if not _NUMBERS.fullmatch(text):
        return None
    try:
        found = set(map(int, expand(f"[{text}]", MAX_GPUS)))
    except HostListError:
        return None
    return found if max(found) < MAX_GPUS else None


def _is_named(node: str, hosts: str) -> bool:
    """Return True if the host list names this node. Return False for text that is not a host list."""
    try:
        return contains(hosts, node)
    except HostListError:
        return False


# --- the matching GPUs of the inventory


def slurm_gpu_order(slurm_count: int | None, gpus: Sequence[Gpu]) -> tuple[str, ...] | None:
    """Return the PCI address for each of Slurm's GPU numbers, or None if a number is ambiguous.

    The order is known if Slurm has as many GPUs as the inventory, and if all orders that Slurm may use are the same.
    Slurm may use the order by PCI address, NVML's order, or the order by device file from /dev/nvidia0 on
    (SLURM_JOB_GPUS has the N of a file if Slurm knows it: gres_common_prep_set_env()). gres.conf must confirm that
    Slurm uses this order. MIG must be on for all GPUs or for none, because Slurm lists whole GPUs before all MIG
    devices from 24.11 on, but between them in 22.05 (_get_system_gpu_list_nvml()).
    """
    by_pci = sorted(gpus, key=lambda gpu: gpu.pci)
    if [gpu.minor for gpu in by_pci] != list(range(len(gpus))):
        return None
    if [gpu.index for gpu in by_pci] != sorted({gpu.index for gpu in gpus}):
        return None
    if len({bool(gpu.mig) for gpu in gpus}) > 1:
        return None
    order = tuple(gpu.pci for gpu in by_pci for _ in range(max(len(gpu.mig), 1)))
    return order if order and len(order) == slurm_count else None


def pci_by_uuid(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return a dict that maps the UUID of each GPU or MIG device to the GPU's PCI address."""
    return {uuid: gpu.pci for gpu in gpus for uuid in (gpu.uuid, *gpu.mig) if uuid}


def pci_addresses(
    allocated: AllocatedGpus, order: Sequence[str] | None, by_uuid: Mapping[str, str]
) -> frozenset[str] | None:
    """Return the PCI addresses of allocated GPUs, MIG devices and shares, or None if one is unknown."""
    found = set()
    for word in allocated:
        if is_decimal(word):
            pci = order[int(word)] if order is not None and int(word) < len(order) else ""
        else:  # drivers before R470 name a MIG device MIG-GPU-.../INSTANCE/INSTANCE (gpu_nvml.c: _nvml_use_mig_uuid())
            pci = by_uuid.get(word) or by_uuid.get(word.removeprefix("MIG-").partition("/")[0], "")
        if not pci:
            return None
        found.add(pci)
    return frozenset(found)


# --- gres.conf

GRES_CONF_BYTES = 256 << 10
MAX_DETECTED = 10  # /dev/nvidia0 to 9, which sort equally as text and as numbers
DETECTED = frozenset({"nvml", "nvidia"})
_PAIR = regex(r"[ \t]*([A-Za-z_]{1,32})[ \t]*=[ \t]*(?:\"([^\"]*)\"|([^\"\s]+))(?=[ \t]|$)")
_FILE = regex(r"(?:/[^/]{1,255}){1,32}/nvidia([0-9]{1,4})")


def lists_gpus_in_order(text: str, node: str, gpus: int) -> bool:
    """Return True if gres.conf numbers the GPUs in the order of their device files (/dev/nvidia0 is 0, and so on).

    slurmd numbers GPUs in the order of its list: the lines of gres.conf or, with AutoDetect, the detected GPUs sorted
    by the text of their device files (nvidia10 before nvidia2), then by NVLinks (github.com/SchedMD/slurm,
    src/plugins/gres/gpu/gres_gpu.c: _merge_system_gres_conf()). If lines name several types, slurmctld numbers by type
    and in the order of slurm.conf. src/common/parse_config.c defines the grammar. A line that cannot be parsed and may
    concern this node is treated as a different order.

    Args:
        text: gres.conf; empty if the file does not exist.
        gpus: the node's number of GPUs, not counting MIG devices.
    """
    if len(text) >= GRES_CONF_BYTES or "\\" in text:  # truncated, or a line that continues on the next line
        return False
    files: list[int] = []
    types, detect = set(), set()
    for line in text.split("\n"):
        if not (line := line.partition("#")[0].strip()):
            continue
        pairs = _pairs(line)
        if pairs is None:  # the line is not made of pairs; "include FILE" is such a line
            return False
        if "nodename" in pairs and not _is_named(node, pairs["nodename"]):
            continue
        if "autodetect" in pairs:
            detect.add(pairs["autodetect"].lower())
        if pairs.get("name", "").lower() == "gpu":
            if "multiplefiles" in pairs or "file" not in pairs:
                return False
            if not (found := _device_numbers(pairs["file"])):
                return False
            types.add(pairs.get("type", ""))
            files.extend(found)
    is_detected = bool(detect & DETECTED)
    if len(types) > 1 or not detect <= DETECTED | {"off"} or (is_detected and gpus > MAX_DETECTED):
        return False
    # AutoDetect in this node's line overrides the global setting. Without device files, both must detect the GPUs.
    return files == list(range(gpus)) or (not files and is_detected and "off" not in detect)


def _pairs(line: str) -> Mapping[str, str] | None:
    """Return a line's "Key=Value" words by lower-case key, or None if the line has any other word."""
    found = dict(_words(line))
    return None if "" in found else found


def _words(line: str) -> Iterator[tuple[str, str]]:
    offset = 0
    while offset < len(line):
        match = _PAIR.match(line, offset)
        if match is None:
            yield "", ""
            return
        yield match[1].lower(), match[2] or match[3] or ""
        offset = match.end()


def _device_numbers(files: str) -> list[int] | None:
    """Return 0 to 4 for "/dev/nvidia[0-3],/dev/nvidia4". Return None if any of the files is not a GPU's device file."""
    try:
        names = expand_all(files, MAX_GPUS)
    except HostListError:
        return None
    if not all(files.split(",")):
        return None
    found = [match[1] for match in map(_FILE.fullmatch, names) if match]
    return list(map(int, found)) if len(found) == len(names) else None
