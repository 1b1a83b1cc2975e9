"""What the person means who types `healthd explain WORDS`: a code, the name of a check, an Xid's number, a line of the
kernel log, a Reason from Slurm.

Whatever was cut or copied with too much around it is read where it can mean one thing only; where it can mean several,
all of them are named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from typing import TYPE_CHECKING, NamedTuple

from healthd.agent.settings import registry
from healthd.agent.slurm import foreign_reasons
from healthd.common.model import Finding, Inventory, KernelEvent
from healthd.common.slurm.drain_reason import PREFIX, parse_reason
from healthd.common.text import regex
from healthd.nvidia import codes

if TYPE_CHECKING:
    from healthd.agent.kernel_log.prefix import Stripped
    from healthd.agent.settings.registry import Check

Correlate = Callable[[Sequence[KernelEvent], Inventory], "list[Finding]"]
MOST_NEAR = 3
UNREAD = "No rule of healthd reads this line of the kernel log: it is none of the faults that healthd knows."
SINFO_SHOWS = 20 - len(PREFIX)  # characters of what stands behind the prefix: sinfo -R's format is %20E


class Code(NamedTuple):
    """`line`: what the kernel line that was typed is found to be, None for other words."""

    code: str
    part: str = ""
    line: Finding | None = None


class OfCheck(NamedTuple):
    name: str


class OthersReason(NamedTuple):
    meaning: foreign_reasons.Foreign


class Several(NamedTuple):
    """The words may mean any of these codes; `why`, in a sentence."""

    codes: tuple[str, ...]
    why: str


class HarmlessLine(NamedTuple):
    """A line of the kernel log that is no fault; `says`: a sentence."""

    message: str


class Unknown(NamedTuple):
    """`near`: the codes and names that are most like it."""

    near: tuple[str, ...]


Asked = Code | OfCheck | OthersReason | Several | HarmlessLine | Unknown

# A Reason as Slurm's commands print it: "Reason=TEXT [root@2026-11-22T10:00:00]" (scontrol), or with the columns of
# sinfo -R behind it (user, time stamp, nodes). What is blank before it is left to strip().
_STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"
_BEHIND = regex(
    rf"\[[^\[\]]{{1,80}}@(?:{_STAMP}|Unknown)\]\s*$|\s[\w.-]{{1,40}}\s{{1,40}}{_STAMP}\s{{1,40}}\S{{1,500}}\s*$"
)
_CODE = regex(r"[a-z0-9_]{1,60}/[A-Za-z0-9_.:-]{1,60}")
_XID = regex(r"xid[\s:#=(_]{0,3}(\d{1,4})(?!\d)(?:\s{0,3}[.:]\s{0,3}(\d{1,3})(?!\d))?\)?", 2)
_SXID = regex(r"sxid[\s:#=(_]{0,3}(\d{1,6})(?!\d)\)?", 2)
_NUMBER = regex(r"(\d{1,6})(?:[.:](\d{1,3}))?")
_ZEROS = regex(r"/0{1,20}(?=\d)")
_NO_REASON = ("", "none", "(null)", "n/a")  # sinfo -R, scontrol and squeue write these where there is none
# How the kernel's lines begin without a time stamp (dmesg -t, journalctl -o cat), beside those of healthd.scan.quoted:
# "mce: ", "EDAC sbridge: ", "XFS (sda1): ". nvidia-smi is a program.
_AS_THE_KERNELS = regex(
    r"(?:kernel|NVRM|nvidia(?!-smi)[a-z_-]{0,20}\d{0,3}|mlx[45]_\w{1,10}|EXT[234]-fs|XFS|BTRFS|LNet|LustreError|Lustre"
    r"|pcieport|pci|nvme\w{0,10}|EDAC|mce|ACPI|DMAR|AMD-Vi|usb|scsi|sd"
    r"|arm-smmu(?:-v3)?)(?: \([^()]{1,60}\)| [^\s:]\S{0,60})?: "
    r"|[\w-]{1,40} [0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]: "
)


def asked(words: str, checks: Mapping[str, Check], correlate: Correlate) -> Asked:
    """`correlate`: what the checks that listen find in kernel events, with this node's settings."""
    words = words.strip()
    return (
        _known(words, checks)
        or _number(words)
        or _reason(words, checks)
        or _kernel_line(words, checks, correlate)
        or _code_within(words, checks)
        or _others(words, checks)
        or Unknown(near(words, checks))
    )


def _known(words: str, checks: Mapping[str, Check]) -> Asked | None:
    """Also in capitals, and with zeros before a number: "GPU_XID/079"."""
    for name in (_ZEROS.sub("/", words), words, _ZEROS.sub("/", words.lower()), words.lower()):
        if name in checks:
            return OfCheck(name)
        if registry.explain(checks, name) is not None:
            return Code(name)
    return None


def _number(words: str) -> Asked | None:
    """ "79", "Xid 79", "149:4", "sxid 12028"."""
    if found := _SXID.fullmatch(words):
        return Code(f"sxid/{int(found[1])}")
    if found := _XID.fullmatch(words):
        return _of_xid(int(found[1]), found[2])
    if found := _NUMBER.fullmatch(words):
        number = int(found[1])
        if len(found[1]) < 5 and (found[2] or codes.xid(number) or not codes.sxid(number)):
            return _of_xid(number, found[2])
        return Code(f"sxid/{number}") if codes.sxid(number) else None
    return None


def _of_xid(number: int, sub_code: str | None) -> Code:
    return Code(f"nvlink5/{number}:{int(sub_code)}" if sub_code else f"gpu_xid/{number}")


def _reason(words: str, checks: Mapping[str, Check]) -> Asked | None:
    """A Reason as healthd writes it, also cut as by `sinfo -R`, which shows 20 characters of it."""
    text = _BEHIND.sub("", regex(r"^Reason\s?=\s?").sub("", words)).strip().strip('"')
    if text.lower() in _NO_REASON:
        return OthersReason(foreign_reasons.NONE)
    if not text.startswith(PREFIX.strip()):
        return OthersReason(found) if (found := foreign_reasons.known(text)) else None
    if (found_words := parse_reason(text)) is not None:
        code, part = found_words
        if registry.explain(checks, code) is not None:
            return Code(code, part)
    rest = text.removeprefix(PREFIX.strip()).split()
    return _cut(rest[0].rstrip(":"), len(rest) > 1, checks) if rest else None


def _cut(code: str, goes_on: bool, checks: Mapping[str, Check]) -> Asked | None:
    """A code that may have lost its end; not if a word follows."""
    begin = tuple(name for name in registry.all_codes(checks) if name.startswith(code))
    is_whole = registry.explain(checks, code) is not None
    if is_whole and (goes_on or len(code) < SINFO_SHOWS or begin in ((), (code,))):
        return Code(code)
    if len(begin) == 1:
        return Code(begin[0])
    if begin:
        return Several(begin, f'"{PREFIX}{code}" is cut: healthd status, or scontrol show node, has the whole Reason.')
    return Code(code) if is_whole else None


def _kernel_line(words: str, checks: Mapping[str, Check], correlate: Correlate) -> Asked | None:
    """Of several lines, or several findings, the worst. What has the kernel's prefix and is not read is no fault."""
    import time

    from healthd.scan.events import events
    from healthd.scan.findings import judged
    from healthd.scan.lines import Block, Tally
    from healthd.scan.prefixes import stripped

    lines = [line.encode("utf-8", "replace") for line in words.splitlines()]
    found_in = events([Block.of(1, lines)] if lines else [], time.time(), Tally())
    every = list(judged(found_in, correlate))
    if not every:
        return HarmlessLine(UNREAD) if any(_is_kernels(line, stripped(line, 0.0)) for line in lines) else None
    one = max(every, key=lambda each: each.severity)
    event = one.seen.event
    found = max(_findings(event, one.code, correlate), key=lambda each: each.severity, default=None)
    if registry.explain(checks, one.code) is not None:
        return Code(one.code, found.subject if found else event.pci, found)
    return HarmlessLine(f"healthd reads this line ({one.code}), and no check makes a finding of it: it is recorded.")


def _is_kernels(line: bytes, stripped: Stripped | None) -> bool:
    """Whether it has a prefix of the kernel's: it was read from a log, and is nobody's Reason."""
    return stripped is not None and (stripped.uptime is not None or b" kernel: " in line)


def _findings(event: KernelEvent, code: str, correlate: Correlate) -> list[Finding]:
    from msgspec.structs import replace

    return [found for found in correlate((replace(event, sequence=1),), Inventory()) if found.code == code]


def _code_within(words: str, checks: Mapping[str, Check]) -> Asked | None:
    """A line as `healthd status`, an alert or a log has it: "critical  gpu_xid/79 0000:61:00.0"."""
    every = words.split()
    for place, word in enumerate(every):
        bare = word.strip("\"',;()[]{}.").rstrip(":")
        if _CODE.fullmatch(bare) and registry.explain(checks, bare) is not None:
            behind = every[place + 1].rstrip(":,;") if place + 1 < len(every) and not word.endswith(":") else ""
            is_part = bool(regex(r"[0-9a-f]{4,8}:.*|/.*|[a-z0-9_-]+\d[/.\d]*").fullmatch(behind))
            return Code(bare, behind if is_part else "")
    if found := _SXID.search(words):
        return Code(f"sxid/{int(found[1])}")
    if found := _XID.search(words):
        return _of_xid(int(found[1]), found[2])
    return None


def _others(words: str, checks: Mapping[str, Check]) -> Asked | None:
    """Several words that are nobody's known: a person's Reason, or a kernel line without a time stamp. One word is a
    misspelt code."""
    text = _BEHIND.sub("", words).removeprefix("Reason=").strip()
    if text.startswith(PREFIX) and (code := text.removeprefix(PREFIX).split()[:1]):
        return OthersReason(foreign_reasons.of_another_version(_nearest(code[0].rstrip(":"), checks)))
    if text != words:
        return OthersReason(foreign_reasons.SOMEBODYS)
    if _begins_as_a_kernel_line(words):
        return HarmlessLine(UNREAD)
    return OthersReason(foreign_reasons.PERHAPS_SOMEBODYS) if len(words.split()) > 2 else None


def _begins_as_a_kernel_line(words: str) -> bool:
    from healthd.scan.quoted import begins_as_the_kernels

    return bool(_AS_THE_KERNELS.match(words)) or begins_as_the_kernels(words.encode("utf-8", "replace"))


def _nearest(code: str, checks: Mapping[str, Check]) -> str:
    names = near(code, checks)
    return f"; nearest: {', '.join(names)}" if names else ""


def near(words: str, checks: Mapping[str, Check]) -> tuple[str, ...]:
    """The few codes and checks that are most like it."""
    names = [*checks, *registry.all_names(checks)]
    word = words.split()[0].lower() if words.split() else ""
    part = [name for name in checks if word in name.split("_")]
    inside = [name for name in names if word and name.partition("/")[2].startswith(word)]
    close = get_close_matches(word, names, n=MOST_NEAR, cutoff=0.6)
    close = [name for name in close if _alike(word, name) > _alike(word, close[0]) - 0.1]
    check = word.partition("/")[0]
    own = [name for name in names if name.startswith(f"{check}/")] if check in checks else []
    return tuple(dict.fromkeys([*part, *(close or [*inside, *own])]))[:MOST_NEAR]


def _alike(word: str, name: str) -> float:
    return SequenceMatcher(a=name, b=word).ratio()
