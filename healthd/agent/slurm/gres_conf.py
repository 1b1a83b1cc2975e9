"""Whether gres.conf numbers a node's GPUs as their device files ascend: /dev/nvidia0 is 0, and so on. Pure.

slurmd numbers them in the order of its list: the lines of gres.conf as they stand, or, with AutoDetect, the GPUs that
it found, sorted by the text of their device files (in which nvidia10 comes before nvidia2), then by NVLinks
(github.com/SchedMD/slurm, src/plugins/gres/gpu/gres_gpu.c: _merge_system_gres_conf()). Where lines name several types
slurmctld numbers by type, and in slurm.conf's order. The grammar is that of src/common/parse_config.c. What is not
understood here, and may matter to this node, counts as another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from healthd.common.slurm.gres import in_hostlist, numbers_in
from healthd.common.text import regex

MOST_BYTES = 256 << 10
MOST_DETECTED = 10  # /dev/nvidia0 to 9: their order as text is that of their numbers
DETECTED = frozenset({"nvml", "nvidia"})
_PAIR = regex(r"[ \t]*([A-Za-z_]{1,32})[ \t]*=[ \t]*(?:\"([^\"]*)\"|([^\"\s]+))(?=[ \t]|$)")
_FILE = regex(r"(?:/[^\[\],/]{1,255}){1,32}/nvidia(?:([0-9]{1,4})|\[([0-9,-]{1,100})\])")
_PART = regex(r"(?:[^,\[\]]|\[[^\[\]]*\])+")


def ascends(text: str, node: str, gpus: int) -> bool:
    """`text`: gres.conf, "" = there is none. `gpus`: how many the node has, MIG devices not counted."""
    if len(text) >= MOST_BYTES or "\\" in text:  # cut off; a line that goes on in the next one
        return False
    files: list[int] = []
    types, detect = set(), set()
    for line in text.split("\n"):
        if not (line := line.partition("#")[0].strip()):
            continue
        pairs = _pairs(line)
        if pairs is None:  # also "include FILE"
            return False
        if "nodename" in pairs and not in_hostlist(node, pairs["nodename"]):
            continue
        if "autodetect" in pairs:
            detect.add(pairs["autodetect"].lower())
        if pairs.get("name", "").lower() == "gpu":
            if "multiplefiles" in pairs or "file" not in pairs:
                return False
            if not (found := _numbers(pairs["file"])):
                return False
            types.add(pairs.get("type", ""))
            files.extend(found)
    found_out = bool(detect & DETECTED)
    if len(types) > 1 or not detect <= DETECTED | {"off"} or (found_out and gpus > MOST_DETECTED):
        return False
    # AutoDetect of a node's own line goes before that of all: without a list both must find the GPUs
    return files == list(range(gpus)) or (not files and found_out and "off" not in detect)


def _pairs(line: str) -> Mapping[str, str] | None:
    """The words "Key=Value" of a line, by the keys in small letters; None: it is not made of such words only."""
    found = dict(_each(line))
    return None if "" in found else found


def _each(line: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(line):
        match = _PAIR.match(line, at)
        if match is None:
            yield "", ""
            return
        yield match[1].lower(), match[2] or match[3] or ""
        at = match.end()


def _numbers(files: str) -> list[int] | None:
    """ "/dev/nvidia[0-3],/dev/nvidia4": 0 to 4; None: they are not all device files of GPUs, or in another order."""
    found: list[int] = []
    parts = _PART.findall(files)
    if ",".join(parts) != files:
        return None
    for part in parts:
        match = _FILE.fullmatch(part)
        for words in (match[1] or match[2]).split(",") if match else [""]:
            numbers = numbers_in(words)
            if not numbers:
                return None
            found.extend(sorted(numbers))
    return found
