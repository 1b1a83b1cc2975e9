"""The Reason for healthd's drains: `healthd: CODE PART: message (+N more)`.

On a node in an NVLink domain with other nodes, it ends with the domain's short id, such as ` (domain 1a2b3c4d)`. The
nodes of the domain count these drains in Slurm (fleet_limit.py). During a repair, a note follows that claims the step,
such as ` (repair: gpu_reset)`. All nodes count these claims in Slurm. After the last step has failed, the note is
` (repair failed: a person must act)`.

It is one line of at most 255 printable ASCII characters: slurmdbd truncates at 255, a newline breaks `scontrol show
node`, and bad UTF-8 breaks `--json`. If the parts are too long together, the message is shortened first, then the note
about an operator. The domain is left out if a cause of almost 200 characters leaves no room for it beside a claim. The
cause and the claim are never shortened. `sinfo -R` shows the first 20 characters; "healthd: gpu_xid/79" has 19.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from healthd.common.model import Condition, RepairStep
from healthd.common.slurm.builtin_reasons import strip_appended
from healthd.common.text import regex

MAX_CHARACTERS = 255
_FOUND = "found"  # the message if the condition has none
PREFIX = "healthd: "
# For `healthd fleet lemons --apply`: a different prefix, so that no daemon mistakes the drain for its own and lifts it.
LEMON = "lemon: "
_HEAD = regex(r"healthd: (?P<code>[!-~]+/[!-~]*[!-9;-~])(?: (?P<part>[!-~]+))?: ")
_DOMAIN = regex(r" \(domain (?P<id>[0-9a-f]{8})\)\Z")


def domain_id(uuid: str | None) -> str:
    """Return the short id of an NVLink domain: 8 hexadecimal digits, or "" without a domain.

    The whole UUID does not fit into a Reason beside a long cause. The id is the CRC-32 of the UUID as text, and not a
    part of the UUID, because the domains of a site may share any part ("00000001-0000-0000-0000-000000000001" in public
    captures). Two UUIDs that differ only in up to four adjacent digits never have the same CRC-32. With 1,000 random
    UUIDs, the probability that any two have the same id is 1 in 8,600. Two such domains would share one limit.
    """
    return f"{zlib.crc32(uuid.lower().encode()):08x}" if uuid else ""


def reason(causes: Sequence[Condition], note: str = "", domain: str = "") -> str:
    """Return the Reason for these causes, worst first.

    A changed Reason resets Slurm's time stamp. Call `names_worst_cause` first, and set a new Reason only if the worst
    cause has changed. `note` is text to append, and is shortened if the cause leaves too little room. `domain` is the
    short id of the node's NVLink domain, or "".
    """
    start = reason_start(causes[0])
    suffix, end = f" (+{len(causes) - 1} more)" if len(causes) > 1 else "", _domain_note(domain)
    if note:
        room = MAX_CHARACTERS - len(start) - len(suffix) - len(end) - len(_FOUND) - len(" ()")
        suffix += f" ({_truncate(note, room)})"
    suffix += end
    room = MAX_CHARACTERS - len(start) - len(suffix)
    return start + (_truncate(_ascii_line(causes[0].message), room) or _FOUND) + suffix


def reason_start(cause: Condition) -> str:
    """Return the beginning of the Reason, which names the cause: "healthd: gpu_xid/79 0000:1b:00.0: "."""
    code, subject = _truncate(_escape(cause.code), 80), _truncate(_escape(cause.subject), 120)
    return f"healthd: {code}{' ' if cause.subject else ''}{subject}: "


def parse_reason(text: str) -> tuple[str, str] | None:
    """Return (code, part) from a Reason that was made by `reason`, or None for any other Reason."""
    found = _HEAD.match(text)
    return (_unescape(found["code"]), _unescape(found["part"] or "")) if found else None


def parse_domain(text: str) -> str:
    """Return the short id of the NVLink domain in a Reason in healthd's format, or "". A claim and the suffixes that
    Slurm appended are ignored."""
    found = _DOMAIN.search(with_claim(text, None)) if _HEAD.match(text) else None
    return str(found["id"]) if found else ""


def _domain_note(domain: str) -> str:
    return f" (domain {domain})" if domain else ""


def claim_note(step: RepairStep) -> str:
    """Return the note at the end of the Reason that claims this step."""
    return "repair failed: a person must act" if step is RepairStep.PERSON else f"repair: {step.value}"


def parse_claim(text: str) -> RepairStep | None:
    """Return the step that a Reason in healthd's format claims, or None. Suffixes that Slurm appended are ignored."""
    text = strip_appended(text)
    if _HEAD.match(text) is None:
        return None
    return next((step for step in RepairStep if text.endswith(f" ({claim_note(step)})")), None)


def with_claim(text: str, step: RepairStep | None) -> str:
    """Return a Reason in healthd's format that claims this step and no other, without the suffixes that Slurm appended.
    None removes the claim. The message is shortened if the result would be too long, and the domain is left out if that
    does not suffice.
    """
    text = strip_appended(text)
    while previous := parse_claim(text):
        text = strip_appended(text.removesuffix(f" ({claim_note(previous)})"))
    if step is None:
        return text
    note, head, domain = f" ({claim_note(step)})", _HEAD.match(text), _DOMAIN.search(text)
    end, body = (domain[0], text[: domain.start()]) if domain else ("", text)
    if head and head.end() + len("...") + len(end) + len(note) > MAX_CHARACTERS:
        end = ""
    return _truncate(body, MAX_CHARACTERS - len(end) - len(note)) + end + note


def names_worst_cause(text: str, causes: Sequence[Condition]) -> bool:
    """Return True if the Reason names one of the worst causes, so that it does not have to change."""
    worst = max((cause.severity for cause in causes), default=None)
    return any(text.startswith(reason_start(cause)) for cause in causes if cause.severity == worst)


def _ascii_line(text: str) -> str:
    """Return the text as one line of printable ASCII. scontrol strips a double quote at either end."""
    ascii_only = text.encode("ascii", "replace").decode().replace('"', "'")
    return regex(r"[^!-~]+").sub(" ", ascii_only).strip()


def _escape(text: str) -> str:
    """Return the text with blanks and quotes escaped (%20 and the like). The escaping can be reversed."""
    return "".join(c if "!" <= c <= "~" and c not in '%"' else _percent(c) for c in text)


def _percent(character: str) -> str:
    errors = "surrogateescape" if "\udc80" <= character <= "\udcff" else "surrogatepass"
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", errors))


def _unescape(text: str) -> str:
    escaped = regex(r"%([0-9A-F]{2})").sub(lambda m: chr(int(m[1], 16)), text)
    return escaped.encode("latin-1", "replace").decode("utf-8", "surrogateescape")


def _truncate(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 3] + "..."
