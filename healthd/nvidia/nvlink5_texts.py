"""Texts for `healthd explain nvlink5/149:4`: NVIDIA's table of NVLink 5 errors (Xids 144 to 150).

In 149:4, 149 is the Xid and 4 the sub-code: bits 25 to 20 of the first register word in the Xid's kernel line. Other
tools write "149.4". Table rows with the same sub-code differ in the unit and in bits of the second word (the status).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from healthd.common.model import Clears, Explain, Severity
from healthd.common.text import regex
from healthd.nvidia import codes
from healthd.nvidia.codes import Nvlink5Fact
from healthd.nvidia.xid_table import NVLINK5, title

_CODE = regex(r"nvlink5(?:/(14[4-9]|150)(?:[:.](\d{1,2}))?)?")
_MATTERS = (
    "If the row requests a GPU reset and the line contains Fatal, the link is lost. Collective operations over it hang "
    "or fail, and healthd drains the node. All other errors only warn. They have no lasting effect, or another Xid "
    "(48, 94, 95, 154) reports the effect."
)
_FIND = (
    "The message of the condition gpu_xid/{xid} names the unit, sub-code and link. The status is the second word in "
    "parentheses in the kernel line (journalctl -k)."
)
_RESET = (
    "reset the GPU after the drain if the line contains Fatal (run healthd record, then nvidia-smi --gpu-reset -i PCI)"
)
_LINKS = (
    "On an NVL72, if HealthdNvlinkDomainFault fires, or if all GPUs of the node have NVLink Xids, do not reset the "
    "node before the NVLink switches have been checked. If healthd only warns, no action is needed tonight. "
    "nvidia-smi nvlink -s and -e show the links. If the error recurs on the same link, check the cable, the switch "
    "and the GPUs at both ends."
)
# NVIDIA's immediate actions and follow-up investigations. `todo_text` lists the immediate actions in this order.
_IMMEDIATE_ACTIONS = {
    "RESET_GPU": "reset the GPU",
    "IGNORE": "no immediate action",
    "XID_154_EVAL": "do the action that Xid 154 requests",
}
_FOLLOW_UPS = {
    "IGNORE": "",
    "CONTACT_SUPPORT": "open a case with NVIDIA",
    "CHECK_NVLINK_FAILURE_FLOW": "follow NVIDIA's flow for NVLink failures",
    "SYMPATHETIC_REPORT_SOLO": "it is a consequence of another error; if it occurs alone, report it to NVIDIA",
    "INVESTIGATE_LINK_SI": "check the link's signal",
    "INVESTIGATE_LINK_SI_AND_CABLES": "check the link's signal and its cables",
    "INVESTIGATE_SW_USER": "check for actions by software or an operator",
    "INVESTIGATE_SW/USER": "check for actions by software or an operator",
    "INVESTIGATE_SW_USER_LINK_SI": "check for actions by software or an operator, and check the link's signal",
    "INVESTIGATE_PEER_DEVICE": "check the device at the other end",
    "INVESTIGATE_HOST": "check the host",
    "REPORT_ISSUE (if seen >1 per day)": "report it to NVIDIA if it occurs more than once a day",
}

_REPLACEMENTS = (
    (r"PacketLoss\**\s*", "packets lost "),
    (r"\*+", ""),
    ("posible", "possible"),
    ("XC/AppCrash", "the channel or application crashes"),
    ("AppCrash", "the application crashes"),
    (r"X[Ii][Dd] ?(?=\d)", "Xid "),
    (r"\s+", " "),
)


def explain(code: str) -> Explain | None:
    """Return the text for "nvlink5/149:4" (a sub-code), "nvlink5/149" (an Xid) or "nvlink5" (all Xids). Return None for
    anything else."""
    match = _CODE.fullmatch(code)
    if match is None:
        return None
    if match[1] is None:
        return _xids()
    xid = int(match[1])
    if match[2] is None:
        return _sub_codes(xid)
    return _rows(xid, int(match[2])) if int(match[2]) < 64 else None


def all_names() -> list[str]:
    """Return all names that `explain` handles."""
    subs = sorted({(row.code, row.sub_code) for row in codes.nvlink5_rows()})
    return ["nvlink5", *(f"nvlink5/{xid}" for xid in NVLINK5), *(f"nvlink5/{xid}:{sub}" for xid, sub in subs)]


def todo_text(xid: int) -> str:
    """Return text about what to do for an Xid whose table row is unknown. The text has one line for each immediate
    action, with the rows to which it applies.
    """
    lines = []
    for action, text in _IMMEDIATE_ACTIONS.items():
        if rows := _rows_with_action(xid, action):
            action_text = _RESET if action == "RESET_GPU" else text
            lines.append(f"- {action_text[:1].upper()}{action_text[1:]}: {rows}.")
    head = f"The action depends on the row in NVIDIA's table. {_FIND.format(xid=xid)}"
    return "\n".join([head, *lines, f"{_LINKS} healthd explain nvlink5/{xid} lists the follow-up investigations."])


def _rows_with_action(xid: int, action: str) -> str:
    """Return text that lists the rows with this immediate action, such as "RLW_REMAP 145:0 with status 0x40 or 0x80;
    RLW_CTRL 145:0"."""
    rows = _xid_rows(xid)
    statuses: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        if row.action == action:
            statuses.setdefault((_units([row]), row.sub_code), []).extend(f"{status:#x}" for status in row.statuses)
    mixed = {(_units([row]), row.sub_code) for row in rows if row.action != action}
    named: dict[tuple[str, str], list[str]] = {}
    for (unit, sub), status_list in statuses.items():
        status_text = f" with status {_joined(status_list)}" if status_list and (unit, sub) in mixed else ""
        named.setdefault((unit, status_text), []).append(f"{xid}:{sub}")
    return "; ".join(f"{unit} {_joined(subs, 'and')}{status_text}" for (unit, status_text), subs in named.items())


def _xids() -> Explain:
    lines = [f"- nvlink5/{xid}: {_units(_xid_rows(xid))}" for xid in NVLINK5]
    meaning = "NVLink 5 errors (Blackwell and later) are Xids 144 to 150, one for each group of units:"
    return _explain_rows("\n".join([meaning, *lines]), codes.nvlink5_rows(), "NUMBER")


def _sub_codes(xid: int) -> Explain:
    rows = _xid_rows(xid)
    by_text: dict[str, list[str]] = {}
    for sub in sorted({row.sub_code for row in rows}):
        group = [row for row in rows if row.sub_code == sub]
        actions = list(dict.fromkeys(_action(row) for row in group))
        action_text = (
            actions[0] if len(actions) == 1 else f"depends on unit and status, see healthd explain nvlink5/{xid}:{sub}"
        )
        by_text.setdefault(f"{_units(group)}: {action_text}", []).append(f"{xid}:{sub}")
    lines = [f"- {_joined(subs, 'and')}: {text}." for text, subs in by_text.items()]
    head = f"{title(xid)}. The sub-codes in NVIDIA's table (each has its own text: nvlink5/{xid}:{rows[0].sub_code}):"
    return _explain_rows("\n".join([head, *lines]), rows, xid)


def _rows(xid: int, sub: int) -> Explain:
    rows = [row for row in _xid_rows(xid) if row.sub_code == sub]
    if not rows:
        meaning = f"{title(xid)}. Sub-code {sub} is not in the table that this version of healthd has."
        return _explain_rows(meaning, rows, xid)
    head = f"{title(xid)}. Sub-code {sub}, by unit and status:"
    return _explain_rows("\n".join([head, *_lines(rows)]), rows, xid)


def _lines(rows: Iterable[Nvlink5Fact]) -> list[str]:
    """Return lines of text for the rows. Rows that differ only in their status share one line."""
    statuses: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        same = (_units([row]), _severity(row), _action(row), _impact(row))
        statuses.setdefault(same, []).extend(f"{status:#x}" for status in row.statuses)
    found = []
    for (units, severity, action, impact), status_list in statuses.items():
        where = f"{units}, status {_joined(status_list)}" if status_list else f"{units}, any status"
        found.append(f"- {where}: {severity}; {action}.{impact}")
    return found


def _xid_rows(xid: int) -> list[Nvlink5Fact]:
    return [row for row in codes.nvlink5_rows() if row.code == xid]


def _explain_rows(meaning: str, rows: Iterable[Nvlink5Fact], xid: int | str) -> Explain:
    """Return the text for these rows, with the severity of the worst row."""
    actions = {row.action for row in rows}
    reset_text = ""
    if "RESET_GPU" in actions:
        reset_text = f" {'If' if len(actions) > 1 else 'Because'} the row requests a reset, {_RESET}."
    severity = Severity.CRITICAL if reset_text else Severity.WARNING
    return Explain(severity, Clears.GPU_RESET, meaning, _MATTERS, f"{_FIND.format(xid=xid)}{reset_text} {_LINKS}")


def _units(rows: Iterable[Nvlink5Fact]) -> str:
    """Return the units' names. If the name depends on the driver version, the text is, for example, "NETIR_LINK_EVT (or
    NETIR_LINK_DOWN)"."""
    named = dict.fromkeys(
        f"{row.units[0]} (or {' or '.join(row.units[1:])})" if len(row.units) > 1 else row.units[0] for row in rows
    )
    return ", ".join(named)


def _severity(row: Nvlink5Fact) -> str:
    return row.severity.rstrip("*?").lower()


def _action(row: Nvlink5Fact) -> str:
    at_once, follow_up = (
        _IMMEDIATE_ACTIONS.get(row.action, row.action),
        _FOLLOW_UPS.get(row.investigate, row.investigate),
    )
    if row.action == "IGNORE" and follow_up:
        return follow_up if follow_up.startswith("it ") else f"no immediate action, but {follow_up}"
    return (
        f"{at_once}, then {follow_up}"
        if follow_up and not follow_up.startswith("it ")
        else "; ".join(filter(None, (at_once, follow_up)))
    )


def _impact(row: Nvlink5Fact) -> str:
    """Return text about an error's effects (" Here: packets lost. At the other end: possible packet loss.")."""
    texts = []
    for part in row.impact:
        where, _, text = part.partition(":")
        end = {"Local": "Here", "Remote": "At the other end"}.get(where)
        text = text if end else part
        for pattern, replacement in _REPLACEMENTS:
            text = regex(pattern).sub(replacement, text)
        text = regex("^(Fatal|Will)").sub(lambda match: match[0].lower(), text.strip())
        if text.lower() != "none":
            texts.append(f" {end}: {text}." if end else f" {text}.")
    return "".join(texts)


def _joined(items: Sequence[str], conjunction: str = "or") -> str:
    return f"{', '.join(items[:-1])} {conjunction} {items[-1]}" if len(items) > 1 else items[0]
