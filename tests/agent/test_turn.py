"""Tests of one turn of the daemon's loop: the order of its steps, and GPU events."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from healthd.agent.conditions.ledger import Pause
from healthd.agent.kernel_log.gpu_events import RECOVERY_ACTION, UNAVAILABLE, hold
from healthd.agent.kernel_log.parse import parse
from healthd.agent.scheduler.gpu_event_process import Received as GpuEvents
from healthd.agent.scheduler.replies import Received
from healthd.agent.slurm.affected_jobs import requeuing
from healthd.common.model import Clears, Condition, ConditionState, Gpu, Inventory, Severity
from healthd.nvidia.gpu_event import GpuEvent
from tests.agent.test_daemon_guards import daemon_with_check


def test_turn_applies_clock_step_before_reading_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a run would get the new time and the ledger keep the old one, so the step would cut a confirm time."""
    offsets = [0.0]
    with daemon_with_check(tmp_path, "disk_space", now=lambda: time.time() + offsets[-1]) as daemon:
        first_time = daemon.now()
        daemon.store.change(trusted_since=first_time)
        trusted_times: list[float] = []

        def record_trusted_since() -> Received:
            trusted_times.append(daemon.store.ledger.trusted_since)
            return Received()

        monkeypatch.setattr(daemon, "read_inputs", record_trusted_since)
        monkeypatch.setattr(daemon.replies, "step", record_trusted_since)
        offsets.append(3600.0)
        daemon.turn()
        assert trusted_times == [pytest.approx(first_time + 3600.0, abs=1.0)] * 2
        daemon.turn()
        assert trusted_times[2:] == trusted_times[:2], "applied once"


def test_clock_step_within_turn_ends_no_pause(tmp_path: Path) -> None:
    offsets = [0.0]
    with daemon_with_check(tmp_path, "disk_space", now=lambda: time.time() + offsets[-1]) as daemon:
        pause = Pause(daemon.now() + 60.0, "the clock", "ann", daemon.now())
        daemon.store.change(pause=pause)
        daemon.follow_clock()
        offsets.append(3600.0)
        daemon.pass_time()
        assert daemon.store.ledger.pause == pause
        daemon.follow_clock()
        daemon.pass_time()
        moved_pause = daemon.store.ledger.pause
        assert moved_pause
        assert moved_pause.until == pytest.approx(pause.until + 3600.0, abs=1.0)


@pytest.mark.parametrize(("trigger", "check"), [(UNAVAILABLE, "gpu_access"), (RECOVERY_ACTION, "gpu_recovery_action")])
def test_event_of_nvml_makes_its_check_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trigger: str, check: str
) -> None:
    with daemon_with_check(tmp_path, check) as daemon:
        requested: list[str] = []
        monkeypatch.setattr(daemon.scheduler.queue, "run_after_event", lambda runs: requested.extend(map(str, runs)))
        monkeypatch.setattr(daemon.gpu_events, "step", lambda _recorded: GpuEvents((), (trigger,)))
        daemon.read_gpu_events()
        assert requested == [check]


def test_xid_of_nvml_opens_the_condition_of_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line about the same fault comes later, and the condition remains the same."""
    with daemon_with_check(tmp_path, "gpu_xid") as daemon:
        now, boot, pci = daemon.now(), daemon.boot_id, "0000:61:00.0"
        (held,) = hold(GpuEvent("xid", pci, (79,)), now, now, boot)
        monkeypatch.setattr(daemon.gpu_events, "step", lambda _recorded: GpuEvents((held.event,)))
        daemon.read_gpu_events()
        (condition,) = daemon.store.ledger.conditions
        assert (condition.code, condition.subject, condition.severity) == ("gpu_xid/79", pci, Severity.CRITICAL)
        line = parse("NVRM: Xid (PCI:0000:61:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
        assert line is not None
        daemon.kernel_events.take_events([replace(line, time=now + 3, last_time=now + 3, boot_id=boot)])
        assert [event.text for event in daemon.store.ledger.events] == [line.text]
        assert [(c.code, c.first_seen) for c in daemon.store.ledger.conditions] == [
            ("gpu_xid/79", condition.first_seen)
        ]


def test_stopping_daemon_keeps_events_that_wait_for_their_line(tmp_path: Path) -> None:
    with daemon_with_check(tmp_path, "gpu_xid") as daemon:
        now = daemon.now()
        daemon.gpu_events._held = hold(GpuEvent("xid", "0000:61:00.0", (79,)), now, now, daemon.boot_id)
    assert [event.code for event in daemon.store.ledger.events] == ["79"]


def test_daemon_remembers_that_all_gpus_of_a_tray_showed_the_fault_of_a_link(tmp_path: Path) -> None:
    gpus = (Gpu("0000:1b:00.0", 0), Gpu("0000:43:00.0", 1))
    with daemon_with_check(tmp_path, "disk_space") as daemon:
        now = daemon.now()
        fault, other = (
            Condition(
                *("gpu_xid", "", "gpu_xid/149", gpu.pci, severity, "link down", Clears.GPU_RESET, ConditionState.OPEN),
                *(now, now, 1, daemon.boot_id),
                last_event=now,
                critical_at=now,
            )
            for gpu, severity in zip(gpus, (Severity.CRITICAL, Severity.INFO), strict=True)
        )
        daemon.store.change(inventory=Inventory(gpus, domain="00000001-0000-0000-0000-000000000001"))
        daemon.store.set_conditions({c.key: c for c in (fault, other)})
        daemon.judge()
        daemon.store.set_conditions({key: c for key, c in daemon.store.conditions.items() if key == fault.key})
        daemon.judge()
        (cause,) = daemon.verdict.causes
        assert cause.switch_side_at == now
        assert requeuing(daemon.verdict.causes, [gpu.pci for gpu in gpus], now + 3600.0) == []
