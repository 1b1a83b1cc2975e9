"""Interprets the words in `healthd explain WORDS`: a code, a check, an Xid number, a kernel log line or a Reason.

Truncated text, and text with extra words around it, is accepted if only one meaning is possible. If there are several,
all are listed.
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
MAX_SUGGESTIONS = 3
NO_RULE = "healthd has no rule for this kernel log line: it is not one of the faults that healthd detects."
SINFO_SHOWS = 20 - len(PREFIX)  # characters after the prefix: sinfo -R's format is %20E


class Code(NamedTuple):
    """A code. `line` is the finding for a kernel line, or None for other queries."""

    code: str
    part: str = ""
    line: Finding | None = None


class CheckQuery(NamedTuple):
    name: str


class ForeignReasonQuery(NamedTuple):
    meaning: foreign_reasons.ForeignReason


class AmbiguousQuery(NamedTuple):
    """Several codes that the words may mean. `why` is the reason, as a sentence."""

    codes: tuple[str, ...]
    why: str


class HarmlessLine(NamedTuple):
    """A kernel log line that is not a fault. `message` is one sentence."""

    message: str


class Unknown(NamedTuple):
    """Words without a meaning in healthd. `near` are the most similar codes and names."""

    near: tuple[str, ...]


Query = Code | CheckQuery | ForeignReasonQuery | AmbiguousQuery | HarmlessLine | Unknown

# A Reason as Slurm's commands print it: "Reason=TEXT [root@2026-11-22T10:00:00]" (scontrol), or followed by the columns
# of sinfo -R (user, time stamp, nodes). strip() removes leading blanks.
_STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"
_REASON_SUFFIX = regex(
    rf"\[[^\[\]]{{1,80}}@(?:{_STAMP}|Unknown)\]\s*$|\s[\w.-]{{1,40}}\s{{1,40}}{_STAMP}\s{{1,40}}\S{{1,500}}\s*$"
)
_CODE = regex(r"[a-z0-9_]{1,60}/[A-Za-z0-9_.:-]{1,60}")
_XID = regex(r"xid[\s:#=(_]{0,3}(\d{1,4})(?!\d)(?:\s{0,3}[.:]\s{0,3}(\d{1,3})(?!\d))?\)?", 2)
_SXID = regex(r"sxid[\s:#=(_]{0,3}(\d{1,6})(?!\d)\)?", 2)
_NUMBER = regex(r"(\d{1,6})(?:[.:](\d{1,3}))?")
_ZEROS = regex(r"/0{1,20}(?=\d)")
_NO_REASON = ("", "none", "(null)", "n/a")  # sinfo -R, scontrol and squeue print these without a Reason
# How kernel lines without a time stamp (dmesg -t, journalctl -o cat) begin, in addition to healthd.scan.quoted:
# "mce: ", "EDAC sbridge: ", "XFS (sda1): ". nvidia-smi is excluded because it is a program.
_AS_THE_KERNELS = regex(
    r"(?:kernel|NVRM|nvidia(?!-smi)[a-z_-]{0,20}\d{0,3}|mlx[45]_\w{1,10}|EXT[234]-fs|XFS|BTRFS|LNet|LustreError|Lustre"
    r"|pcieport|pci|nvme\w{0,10}|EDAC|mce|ACPI|DMAR|AMD-Vi|usb|scsi|sd"
    r"|arm-smmu(?:-v3)?)(?: \([^()]{1,60}\)| [^\s:]\S{0,60})?: "
    r"|[\w-]{1,40} [0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]: "
)


def parse_query(words: str, checks: Mapping[str, Check], correlate: Correlate) -> Query:
    """Interpret a query.

    `correlate` returns the checks' findings for kernel events with this node's settings.
    """
    words = words.strip()
    return (
        _check_or_code(words, checks)
        or _number(words)
        or _reason(words, checks)
        or _kernel_line(words, checks, correlate)
        or _code_within(words, checks)
        or _foreign_reason(words, checks)
        or Unknown(suggestions(words, checks))
    )


def _check_or_code(words: str, checks: Mapping[str, Check]) -> Query | None:
    """Match a code or check, even in capitals or with leading zeros, such as "GPU_XID/079"."""
    for name in (_ZEROS.sub("/", words), words, _ZEROS.sub("/", words.lower()), words.lower()):
        if name in checks:
            return CheckQuery(name)
        if registry.explain(checks, name) is not None:
            return Code(name)
    return None


def _number(words: str) -> Query | None:
    """Match "79", "Xid 79", "149:4" or "sxid 12028"."""
    if found := _SXID.fullmatch(words):
        return Code(f"sxid/{int(found[1])}")
    if found := _XID.fullmatch(words):
        return _xid_code(int(found[1]), found[2])
    if found := _NUMBER.fullmatch(words):
        number = int(found[1])
        if len(found[1]) < 5 and (found[2] or codes.xid(number) or not codes.sxid(number)):
            return _xid_code(number, found[2])
        return Code(f"sxid/{number}") if codes.sxid(number) else None
    return None


def _xid_code(number: int, sub_code: str | None) -> Code:
    return Code(f"nvlink5/{number}:{int(sub_code)}" if sub_code else f"gpu_xid/{number}")


def _reason(words: str, checks: Mapping[str, Check]) -> Query | None:
    """Match a Reason written by healthd, even if truncated by `sinfo -R`, which shows 20 characters."""
    text = _REASON_SUFFIX.sub("", regex(r"^Reason\s?=\s?").sub("", words)).strip().strip('"')
    if text.lower() in _NO_REASON:
        return ForeignReasonQuery(foreign_reasons.NO_REASON)
    if not text.startswith(PREFIX.strip()):
        return ForeignReasonQuery(found) if (found := foreign_reasons.find_meaning(text)) else None
    if (parsed := parse_reason(text)) is not None:
        code, part = parsed
        if registry.explain(checks, code) is not None:
            return Code(code, part)
    remaining = text.removeprefix(PREFIX.strip()).split()
    return _truncated_code(remaining[0].rstrip(":"), len(remaining) > 1, checks) if remaining else None


def _truncated_code(code: str, goes_on: bool, checks: Mapping[str, Check]) -> Query | None:
    """Match a code that may be truncated, unless another word follows."""
    matching = tuple(name for name in registry.all_codes(checks) if name.startswith(code))
    is_whole = registry.explain(checks, code) is not None
    if is_whole and (goes_on or len(code) < SINFO_SHOWS or matching in ((), (code,))):
        return Code(code)
    if len(matching) == 1:
        return Code(matching[0])
    if matching:
        return AmbiguousQuery(
            matching, f'"{PREFIX}{code}" is truncated: scontrol show node NODE prints the full Reason.'
        )
    return Code(code) if is_whole else None


def _kernel_line(words: str, checks: Mapping[str, Check], correlate: Correlate) -> Query | None:
    """Match kernel lines, and return the worst finding.

    A line that has a kernel prefix but matches no rule is harmless.
    """
    import time

    from healthd.scan.events import events
    from healthd.scan.findings import judge
    from healthd.scan.lines import Block, Tally
    from healthd.scan.prefixes import stripped

    lines = [line.encode("utf-8", "replace") for line in words.splitlines()]
    found_in = events([Block.from_lines(1, lines)] if lines else [], time.time(), Tally())
    judgements = list(judge(found_in, correlate))
    if not judgements:
        return HarmlessLine(NO_RULE) if any(_is_kernels(line, stripped(line, 0.0)) for line in lines) else None
    worst = max(judgements, key=lambda each: each.severity)
    event = worst.log_event.event
    found = max(_findings(event, worst.code, correlate), key=lambda each: each.severity, default=None)
    if registry.explain(checks, worst.code) is not None:
        return Code(worst.code, found.subject if found else event.pci, found)
    return HarmlessLine(
        f"healthd has a rule for this line ({worst.code}), but no check reports it. The line is only recorded."
    )


def _is_kernels(line: bytes, stripped: Stripped | None) -> bool:
    """Return True if the line has a kernel log prefix and so cannot be a Reason."""
    return stripped is not None and (stripped.uptime is not None or b" kernel: " in line)


def _findings(event: KernelEvent, code: str, correlate: Correlate) -> list[Finding]:
    from msgspec.structs import replace

    return [found for found in correlate((replace(event, sequence=1),), Inventory()) if found.code == code]


def _code_within(words: str, checks: Mapping[str, Check]) -> Query | None:
    """Match a code inside a line from `healthd status`, an alert or a log: "critical  gpu_xid/79 0000:61:00.0"."""
    tokens = words.split()
    for index, word in enumerate(tokens):
        token = word.strip("\"',;()[]{}.").rstrip(":")
        if _CODE.fullmatch(token) and registry.explain(checks, token) is not None:
            following = tokens[index + 1].rstrip(":,;") if index + 1 < len(tokens) and not word.endswith(":") else ""
            is_part = bool(regex(r"[0-9a-f]{4,8}:.*|/.*|[a-z0-9_-]+\d[/.\d]*").fullmatch(following))
            return Code(token, following if is_part else "")
    if found := _SXID.search(words):
        return Code(f"sxid/{int(found[1])}")
    if found := _XID.search(words):
        return _xid_code(int(found[1]), found[2])
    return None


def _foreign_reason(words: str, checks: Mapping[str, Check]) -> Query | None:
    """Match several unknown words: a Reason written by a person, or a kernel line without a time stamp.

    A single unknown word is treated as a misspelt code.
    """
    text = _REASON_SUFFIX.sub("", words).removeprefix("Reason=").strip()
    if text.startswith(PREFIX) and (code := text.removeprefix(PREFIX).split()[:1]):
        return ForeignReasonQuery(foreign_reasons.unknown_code(_nearest(code[0].rstrip(":"), checks)))
    if text != words:
        return ForeignReasonQuery(foreign_reasons.SITE_REASON)
    if _is_kernel_line_start(words):
        return HarmlessLine(NO_RULE)
    return ForeignReasonQuery(foreign_reasons.SITE_REASON_OR_KERNEL_LINE) if len(words.split()) > 2 else None


def _is_kernel_line_start(words: str) -> bool:
    from healthd.scan.quoted import begins_as_the_kernels

    return bool(_AS_THE_KERNELS.match(words)) or begins_as_the_kernels(words.encode("utf-8", "replace"))


def _nearest(code: str, checks: Mapping[str, Check]) -> str:
    names = suggestions(code, checks)
    return f"; nearest: {', '.join(names)}" if names else ""


def suggestions(words: str, checks: Mapping[str, Check]) -> tuple[str, ...]:
    """Return the few most similar codes and checks."""
    names = [*checks, *registry.all_names(checks)]
    word = words.split()[0].lower() if words.split() else ""
    part = [name for name in checks if word in name.split("_")]
    inside = [name for name in names if word and name.partition("/")[2].startswith(word)]
    close = get_close_matches(word, names, n=MAX_SUGGESTIONS, cutoff=0.6)
    close = [name for name in close if _alike(word, name) > _alike(word, close[0]) - 0.1]
    check = word.partition("/")[0]
    check_codes = [name for name in names if name.startswith(f"{check}/")] if check in checks else []
    return tuple(dict.fromkeys([*part, *(close or [*inside, *check_codes])]))[:MAX_SUGGESTIONS]


def _alike(word: str, name: str) -> float:
    return SequenceMatcher(a=name, b=word).ratio()
