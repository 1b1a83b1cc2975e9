"""GPU events of NVML as kernel events: a second source beside the kernel log, with the same codes.

The driver reports one occurrence in up to three places: a line in the kernel log, an event bit of NVML, and a GPU
Operational Event (nvidia/nvml_events.py). Each fault must count once, and none may be lost:

- An event of NVML waits HOLD_SECONDS for the line, because only the line has the registers and links that decide the
  severity of some Xids. If there is such a line, the event is dropped. If not, it becomes a kernel event with the code
  of its Xid, and the field "source".
- A line that comes later replaces that event (coalesce.py).

An operational event without an Xid gets the kind gpu_event. A requested recovery action, and Xid 154, which reports
one, only make the check gpu_recovery_action run at once, because NVML's event does not name the action. A GPU that is
unavailable makes gpu_access run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from healthd.agent.kernel_log.coalesce import NVML, SOURCE, WITHIN_SECONDS, is_at_same_time
from healthd.common.model import KernelEvent
from healthd.common.values import Value
from healthd.nvidia.gpu_event import OPERATIONAL, GpuEvent

HOLD_SECONDS = 2.0
RECOVERY_XID = 154
# Names in AFTER_EVENTS: the checks that run at once.
UNAVAILABLE, RECOVERY_ACTION = "gpu_unavailable", "gpu_recovery_action"
MAX_HELD = 1000  # a flood of different Xids; the oldest are then handled at once


class Held(Value, frozen=True):
    """An event that waits for its kernel line until `release` (epoch seconds), and is then handled.

    It occurred between `event.time`, when NVML had no event, and `event.last_time`.
    """

    event: KernelEvent
    release: float


def triggers(event: GpuEvent) -> tuple[str, ...]:
    """Return the names of the events that make checks run at once."""
    if event.ignored:
        return ()
    if event.overflow:
        return (UNAVAILABLE, RECOVERY_ACTION)
    if event.kind == "unavailable":
        return (UNAVAILABLE,)
    if event.kind == "recovery_action" or RECOVERY_XID in event.xids:
        return (RECOVERY_ACTION,)
    return ("gpu_event",) if event.kind == OPERATIONAL and not event.xids else ()


def hold(event: GpuEvent, since: float, now: float, boot_id: str) -> tuple[Held, ...]:
    """Return the kernel events of a GPU event, which wait for their lines."""
    if event.ignored:
        return ()
    events = [_xid_event(event, xid) for xid in event.xids if xid != RECOVERY_XID]
    if event.kind == OPERATIONAL and not event.xids:
        events = [_operational_event(event)]
    at = min(since, now)
    made = (
        KernelEvent(kind, code, event.pci, at, text, None, None, fields, boot_id, now)
        for kind, code, text, fields in events
    )
    return tuple(Held(entry, now + HOLD_SECONDS) for entry in made)


_Parts = tuple[str, str, str, tuple[tuple[str, str], ...]]


def _xid_event(event: GpuEvent, xid: int) -> _Parts:
    return "xid", str(xid), f"NVML: Xid {xid} of GPU {event.pci or '?'}{_detail(event)}", ((SOURCE, NVML),)


def _operational_event(event: GpuEvent) -> _Parts:
    fields = [(SOURCE, NVML), ("severity", event.severity or "unknown")]
    fields += [("primary", "true")] if event.primary else []
    fields += [("uncontained", "true")] if event.uncontained else []
    code = f"{event.module or 'unknown'}:{event.code}"
    return "gpu_event", code, f"NVML: event {code} of GPU {event.pci or '?'}{_detail(event)}", tuple(fields)


def _detail(event: GpuEvent) -> str:
    if event.kind != OPERATIONAL:
        return ""
    words = [event.severity or "unknown severity", "primary" if event.primary else "secondary"]
    words += ["uncontained"] if event.uncontained else []
    return f" ({', '.join(words)})"


def release(
    held: Sequence[Held], recorded: Iterable[KernelEvent], now: float
) -> tuple[tuple[Held, ...], tuple[KernelEvent, ...]]:
    """Return the events that still wait, and those whose time is over and that no recorded event covers."""
    due: list[Held] = []
    waiting: list[Held] = []
    for number, entry in enumerate(held):
        is_due = entry.release <= now or len(held) - number > MAX_HELD
        (due if is_due else waiting).append(entry)
    if not due:
        return tuple(held), ()
    newest: dict[tuple[str, ...], list[KernelEvent]] = {}
    for event in recorded:
        if event.kind in ("xid", "gpu_event") and not event.history:
            newest.setdefault(_key(event), []).append(event)
    return tuple(waiting), tuple(
        entry.event for entry in due if not _is_covered(entry, newest.get(_key(entry.event), ()))
    )


def _is_covered(held: Held, recorded: Iterable[KernelEvent]) -> bool:
    """Return True if an event with the same code and GPU was recorded at the time of the held event."""
    return any(is_at_same_time(held.event, event, WITHIN_SECONDS) for event in recorded if not event.observed)


def _key(event: KernelEvent) -> tuple[str, ...]:
    return (event.boot_id, event.kind, event.code, event.pci)
