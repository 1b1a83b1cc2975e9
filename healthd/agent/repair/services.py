"""Stop and start the services that keep the GPUs open, for a reset."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from healthd.agent.repair.gpu_reset import ResetImpossible
from healthd.host.program import ProgramResult, run_program

SERVICE_SECONDS = 150.0  # systemd's own limit for one service is 90 s
MAX_UNITS = 100
_RUNNING = frozenset({"active", "activating", "reloading", "refreshing", "deactivating"})
# Dependencies by which systemd also stops other units (systemd.unit(5)).
_STOPPED_TOO = ("RequiredBy", "RequisiteOf", "BoundBy", "ConsistsOf", "PropagatesStopTo")


def has_systemd(root: str) -> bool:
    return os.path.isdir(os.path.join(root, "run/systemd/system"))


def running(units: Iterable[str]) -> tuple[str, ...]:
    """Return the running units, by systemd's names for them. Raises OSError if systemd does not answer."""
    shown = [_show(unit) for unit in units]
    return tuple(dict.fromkeys(unit["Id"] for unit in shown if _runs(unit)))


def _runs(unit: Mapping[str, str]) -> bool:
    return unit.get("ActiveState") in _RUNNING and bool(unit.get("Id"))


def _show(unit: str) -> dict[str, str]:
    properties = ",".join(("Id", "Type", "ActiveState", *_STOPPED_TOO))
    result = run_program(("systemctl", "show", f"--property={properties}", "--", unit), SERVICE_SECONDS)
    if result.status != 0:
        raise OSError(0, f"systemctl show {unit}: {last_line(result)}")
    return dict(line.partition("=")[::2] for line in result.stdout.splitlines())


def require_no_other_stops(units: Iterable[str]) -> None:
    """Raise ResetImpossible if systemd would also stop a unit that runs and is not in `units`, or OSError.

    A site allows only its stop_services. For example, a slurmd with `Requires=nvidia-persistenced` would stop too.
    """
    allowed = set(units)
    waiting, seen = list(allowed), set(allowed)
    while waiting:
        name = waiting.pop()
        for other in (word for kind in _STOPPED_TOO for word in _show(name).get(kind, "").split()):
            if other in seen:
                continue
            seen.add(other)
            if len(seen) > MAX_UNITS:
                raise ResetImpossible(f"too many units depend on {', '.join(sorted(allowed))}")
            if _runs(_show(other)):
                raise ResetImpossible(
                    f"systemd would stop {other} with {name}, and repair.stop_services does not name it"
                )
            waiting.append(other)


def stop(units: tuple[str, ...]) -> str:
    """Stop the units. Return why one may still run, or ""."""
    return _change("stop", units)


def start(units: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Start the units. Return those that do not run now, and why.

    A started service may end at once, or stop because another one stops. A oneshot service may already have ended.
    """
    problem = _change("start", units)
    try:
        left = tuple(unit for unit in units if not _has_started(_show(unit), is_sure=not problem))
    except OSError as error:
        return units, problem or str(error.strerror or error)
    return left, problem or (f"{', '.join(left)} stopped again after the start" if left else "")


def _has_started(unit: Mapping[str, str], is_sure: bool) -> bool:
    return _runs(unit) or (is_sure and unit.get("Type") == "oneshot" and unit.get("ActiveState") == "inactive")


def _change(verb: str, units: tuple[str, ...]) -> str:
    if not units:
        return ""
    try:
        result = run_program(("systemctl", verb, "--", *units), SERVICE_SECONDS)
    except OSError as error:
        return f"systemctl {verb} {' '.join(units)}: {error.strerror or error}"
    return "" if result.status == 0 else f"systemctl {verb} {' '.join(units)}: {last_line(result)}"


def last_line(result: ProgramResult) -> str:
    """Return the last line that the program printed, or its exit status."""
    lines = [line.strip() for line in (result.stderr or result.stdout).split("\n") if line.strip()]
    return lines[-1][:200] if lines else f"ended with status {result.status}"
