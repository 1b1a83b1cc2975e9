"""The Reason that our drains carry: `healthd: CODE PART: what (+N more)`.

One line of at most 255 printable ASCII characters: slurmdbd cuts at 255, a newline breaks `scontrol show node`,
bad UTF-8 breaks `--json`. `sinfo -R` shows the first 20: "healthd: gpu_xid/79" is 19.
"""

from __future__ import annotations

from collections.abc import Sequence

from healthd.common.model import Condition
from healthd.common.text import regex

MAX_CHARACTERS = 255
PREFIX = "healthd: "
# Of `healthd fleet lemons --apply`: another word, so that no daemon takes the drain for its own and lifts it.
LEMON = "lemon: "
_HEAD = regex(r"healthd: (?P<code>[!-~]+/[!-~]*[!-9;-~])(?: (?P<part>[!-~]+))?: ")


def reason(causes: Sequence[Condition], note: str = "") -> str:
    """The text for these causes, worst first. A changed text resets Slurm's time stamp, so ask
    `still_says` first: the text is sent anew only for another worst cause. `note`: words for its end.
    """
    more = (f" (+{len(causes) - 1} more)" if len(causes) > 1 else "") + (f" ({note})" if note else "")
    start = head(causes[0])
    room = MAX_CHARACTERS - len(start) - len(more)
    return start + (_cut(_line(causes[0].message), room) or "found") + more


def head(cause: Condition) -> str:
    """The beginning, which names the cause: "healthd: gpu_xid/79 0000:1b:00.0: "."""
    return f"healthd: {_cut(_word(cause.code), 80)}{' ' if cause.subject else ''}{_cut(_word(cause.subject), 120)}: "


def parse_reason(text: str) -> tuple[str, str] | None:
    """(code, part) of a text that `reason` made, None for any other."""
    found = _HEAD.match(text)
    return (_unword(found["code"]), _unword(found["part"] or "")) if found else None


def still_says(text: str, causes: Sequence[Condition]) -> bool:
    """Whether a text of ours names one of the worst of these causes: then it need not change."""
    worst = max((cause.severity for cause in causes), default=None)
    return any(text.startswith(head(cause)) for cause in causes if cause.severity == worst)


def _line(text: str) -> str:
    """Printable ASCII on one line; scontrol strips a double quote at either end."""
    ascii_only = text.encode("ascii", "replace").decode().replace('"', "'")
    return regex(r"[^!-~]+").sub(" ", ascii_only).strip()


def _word(text: str) -> str:
    """The text without blanks and quotes, which become %20 and the like; reversible."""
    return "".join(c if "!" <= c <= "~" and c not in '%"' else _percent(c) for c in text)


def _percent(character: str) -> str:
    errors = "surrogateescape" if "\udc80" <= character <= "\udcff" else "surrogatepass"
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", errors))


def _unword(word: str) -> str:
    escaped = regex(r"%([0-9A-F]{2})").sub(lambda m: chr(int(m[1], 16)), word)
    return escaped.encode("latin-1", "replace").decode("utf-8", "surrogateescape")


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 3] + "..."
