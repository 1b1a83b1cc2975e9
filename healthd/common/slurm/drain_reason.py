"""The Reason for healthd's drains: `healthd: CODE PART: message (+N more)`.

During a repair, it ends with a note that claims the step, such as ` (repair: gpu_reset)`. All nodes count these claims
in Slurm. After the last step has failed, the note is ` (repair failed: a person must act)`.

It is one line of at most 255 printable ASCII characters: slurmdbd truncates at 255, a newline breaks `scontrol show
node`, and bad UTF-8 breaks `--json`. If the parts are too long together, the message is shortened first, then the note
about an operator. The cause and the claim are never shortened. `sinfo -R` shows the first 20 characters;
"healthd: gpu_xid/79" has 19.
"""

from __future__ import annotations

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


def reason(causes: Sequence[Condition], note: str = "") -> str:
    """Return the Reason for these causes, worst first.

    A changed Reason resets Slurm's time stamp. Call `names_worst_cause` first, and set a new Reason only if the worst
    cause has changed. `note` is text to append, and is shortened if the cause leaves too little room.
    """
    start = reason_start(causes[0])
    suffix = f" (+{len(causes) - 1} more)" if len(causes) > 1 else ""
    if note:
        suffix += f" ({_truncate(note, MAX_CHARACTERS - len(start) - len(suffix) - len(_FOUND) - len(' ()'))})"
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
    None removes the claim. The message is shortened if the result would be too long.
    """
    text = strip_appended(text)
    while previous := parse_claim(text):
        text = strip_appended(text.removesuffix(f" ({claim_note(previous)})"))
    if step is None:
        return text
    note = f" ({claim_note(step)})"
    return _truncate(text, MAX_CHARACTERS - len(note)) + note


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
