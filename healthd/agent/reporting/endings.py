"""Endings and remedies of conditions. Status, check, explain, list, runbooks and docs all use this module.

The functions are pure. Values are spelt as in the JSON documents (docs/json.md): `clears` "reboot", `severity`
"critical".
"""

from __future__ import annotations

from healthd.common.duration import duration

DRAINS = ("degraded", "critical")
_ENDING_TEXTS = {
    "pass": "clean runs of the check",
    "gpu_reset": "a GPU reset or a reboot",
    "reboot": "a reboot",
    "operator": "healthd repaired CODE PART",
}
_DEFAULT_REMEDIES = {
    "pass": "check",
    "gpu_reset": "gpu_reset",
    "reboot": "reboot",
    "operator": "repaired",
    "window": "nothing",
}


def ending_text(clears: str, window_seconds: float = 0.0, clear_after: int = 0, repaired: str = "") -> str:
    """Return the ending of a condition as text, such as "24 h without a repeat, or a reboot".

    Args:
            clears: the event that clears the condition.
            window_seconds: time without a repeat that also clears it; 0 = none.
            clear_after: number of clean runs of its check that clear it; 0 = unknown.
            repaired: the `healthd repaired` command for this condition; "" = the general form.
    """
    cause = _ENDING_TEXTS.get(clears, "")
    if clears == "pass" and clear_after:
        cause = f"{clear_after} clean {'run' if clear_after == 1 else 'runs'} of the check"
    if clears == "operator" and repaired:
        cause = repaired
    quiet_text = f"{duration(window_seconds)} without a repeat" if window_seconds else ""
    return ", or ".join(filter(None, (quiet_text, cause))) or "time without a repeat"


def condition_remedy(clears: str, severity: str, declared: str = "") -> str:
    """Return the remedy for a condition (`model.Remedy`).

    A code's declared remedy applies only while the condition drains and does not wait for an operator. A part that
    failed again must be repaired, and a warning leaves the node in service.
    """
    if clears == "operator":
        return "repaired"
    if declared and (severity in DRAINS or declared == "nothing"):
        return declared
    if clears in ("gpu_reset", "reboot") and severity not in DRAINS:
        return "nothing"
    return _DEFAULT_REMEDIES[clears]
