"""Tests of the condition store: loading, reboots, mode changes, clock steps, changed settings and saving."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from healthd.agent.conditions import log_lines, store
from healthd.agent.conditions.condition import acknowledged, may_drain
from healthd.agent.conditions.durable_file import rewrite_file
from healthd.agent.conditions.ledger import Ledger, Pause
from healthd.agent.conditions.store import ConditionStore
from healthd.common import guard, history, values
from healthd.common.model import (
    MAX_HOLD_SECONDS,
    Ack,
    Clears,
    Condition,
    ConditionState,
    DrainRecord,
    Ending,
    FleetHold,
    Mode,
    Observation,
    ObservationKind,
    Severity,
)
from healthd.events.emitted import Emitted
from healthd.events.outbox import Outbox

NOW = 1_800_000_000.0
OPEN_XID = Condition(
    check="gpu_xid",
    instance="",
    code="gpu_xid/79",
    subject="0000:61:00.0",
    severity=Severity.CRITICAL,
    message="the GPU has fallen off the bus",
    clears=Clears.REBOOT,
    state=ConditionState.OPEN,
    first_seen=NOW - 60,
    last_seen=NOW - 60,
    count=1,
    boot_id="b1",
    last_event=NOW - 60,
    opened_at=NOW - 60,
    critical_at=NOW - 60,
)
LIVE = Ledger(born=1.0, boot_id="b1", mode="act", trusted_since=1.0, conditions=(OPEN_XID,))
READING = Observation("link_errors_total", 7, ObservationKind.COUNTER)
STORE = history.encode(history.update({}, [READING], NOW, "b1"))


class DiskCopy:
    """The copy in the state directory. Counts how often it is read."""

    def __init__(self, **texts: str | None) -> None:
        self.texts = {f"{name}.json": text for name, text in texts.items()}
        self.reads = 0

    def __call__(self) -> dict[str, str | None]:
        self.reads += 1
        return self.texts


def load_store(
    directory: Path,
    disk: DiskCopy | None = None,
    boot_id: str = "b1",
    mode: Mode = Mode.ACT,
    now: Callable[[], float] = lambda: NOW,
) -> ConditionStore:
    condition_store = ConditionStore(str(directory), now)
    condition_store.load(disk or DiskCopy(), boot_id, mode)
    return condition_store


def ledger_without_stream(condition_store: ConditionStore) -> Ledger:
    """Return the ledger without its event stream."""
    return replace(condition_store.ledger, outbox=Outbox(), emitted=Emitted())


def write(directory: Path, ledger: Ledger) -> None:
    (directory / store.FILE).write_bytes(values.encode(ledger))


# --- load


def test_load_takes_live_ledger_without_reading_disk_copy(tmp_path: Path) -> None:
    write(tmp_path, LIVE)
    disk = DiskCopy(ledger=values.encode(Ledger(born=2.0)).decode())
    assert ledger_without_stream(load_store(tmp_path, disk)) == LIVE
    assert disk.reads == 0


def test_load_without_live_ledger_takes_disk_copy_with_past(tmp_path: Path) -> None:
    earlier_store = ConditionStore(str(tmp_path), lambda: NOW)
    earlier_store.set_past("pcie_aer", STORE)
    disk = DiskCopy(ledger=values.encode(LIVE).decode(), past=values.encode(earlier_store.past).decode())
    condition_store = load_store(tmp_path, disk)
    assert ledger_without_stream(condition_store) == LIVE
    assert condition_store.past == earlier_store.past


def test_load_without_any_ledger_starts_untrusted(tmp_path: Path) -> None:
    condition_store = load_store(tmp_path)
    assert (condition_store.ledger.born, condition_store.ledger.trusted_since, condition_store.ledger.boot_id) == (
        NOW,
        NOW,
        "b1",
    )
    assert condition_store.ledger.conditions == ()
    assert condition_store.unsaved
    assert condition_store.uncopied


@pytest.mark.parametrize("text", ["garbage", "[]", '{"version": 99}', '{"conditions": 3}', "\0" * 100, "[" * 100_000])
def test_load_sets_unreadable_ledger_aside_and_takes_disk_copy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    (tmp_path / store.FILE).write_text(text)
    condition_store = load_store(tmp_path, DiskCopy(ledger=values.encode(LIVE).decode()))
    assert ledger_without_stream(condition_store) == LIVE
    assert (tmp_path / f"{store.FILE}.unreadable").read_text() == text
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "\n" not in record.getMessage()
    assert f"{store.FILE}.unreadable" in record.getMessage()


@pytest.mark.parametrize("text", ["garbage", "", None, '{"version": 0}'])
def test_load_starts_empty_if_ledger_and_copy_are_unreadable(tmp_path: Path, text: str | None) -> None:
    (tmp_path / store.FILE).write_text("garbage")
    assert load_store(tmp_path, DiskCopy(ledger=text)).ledger.born == NOW


def test_load_treats_empty_ledger_as_missing(tmp_path: Path) -> None:
    (tmp_path / store.FILE).write_text("")
    assert ledger_without_stream(load_store(tmp_path, DiskCopy(ledger=values.encode(LIVE).decode()))) == LIVE


def test_load_with_unreadable_past_keeps_ledger(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, LIVE)
    (tmp_path / store.PAST_FILE).write_text("garbage")
    condition_store = load_store(tmp_path)
    assert (ledger_without_stream(condition_store), condition_store.past) == (LIVE, {})
    assert "counters start from new readings" in caplog.text


def test_load_after_reboot_clears_only_reboot_conditions(tmp_path: Path) -> None:
    operator_condition = replace(OPEN_XID, code="gpu_row_remap/failure", clears=Clears.OPERATOR)
    write(tmp_path, replace(LIVE, conditions=(OPEN_XID, operator_condition)))
    condition_store = load_store(tmp_path, boot_id="b2")
    assert [c.code for c in condition_store.ledger.conditions] == ["gpu_row_remap/failure"]
    assert [(c.code, c.cleared_by, c.cleared_at) for c in condition_store.ledger.cleared] == [
        ("gpu_xid/79", "reboot", NOW)
    ]
    assert condition_store.ledger.boot_id == "b2"


@pytest.mark.parametrize(
    ("old_mode", "new_mode", "is_trust_reset"),
    [
        ("observe", Mode.ACT, True),
        ("observe", Mode.DRAIN, True),
        ("observe", Mode.OBSERVE, False),
        ("drain", Mode.ACT, False),
        ("act", Mode.OBSERVE, False),
        ("act", Mode.ACT, False),
    ],
)
def test_load_resets_trusted_since_after_observe_mode(
    tmp_path: Path, old_mode: str, new_mode: Mode, is_trust_reset: bool
) -> None:
    write(tmp_path, replace(LIVE, mode=old_mode))
    condition_store = load_store(tmp_path, mode=new_mode)
    assert condition_store.ledger.trusted_since == (NOW if is_trust_reset else 1.0)
    assert condition_store.ledger.mode == new_mode.value


# --- change


def test_clear_unconfigured_clears_removed_checks(tmp_path: Path) -> None:
    data = replace(OPEN_XID, check="mount", instance="/data", code="mount/missing", subject="/data")
    home = replace(data, instance="/home", subject="/home")
    write(tmp_path, replace(LIVE, conditions=(OPEN_XID, data, home)))
    condition_store = load_store(tmp_path)
    condition_store.clear_unconfigured({("gpu_xid", ""), ("mount", "/data")})
    assert [c.subject for c in condition_store.ledger.conditions] == ["0000:61:00.0", "/data"]
    assert [(c.subject, c.ending, c.cleared_by) for c in condition_store.ledger.cleared] == [
        ("/home", Ending.UNCHECKED, "no longer configured")
    ]


def test_apply_clock_step_moves_only_moments(tmp_path: Path) -> None:
    pause = Pause(NOW + 600, "driver upgrade", "root")
    write(tmp_path, replace(LIVE, born=NOW - 5, trusted_since=NOW - 5, pause=pause))
    condition_store = load_store(tmp_path)
    condition_store.set_past("pcie_aer", STORE)
    condition_store.apply_clock_step(3600.0)
    (condition,) = condition_store.ledger.conditions
    assert condition.last_event == OPEN_XID.last_event + 3600
    assert condition.acknowledged_at == 0.0, "unset times stay unset"
    assert condition_store.ledger.pause == replace(pause, until=pause.until + 3600)
    assert condition_store.ledger.trusted_since == NOW - 5 + 3600
    (series,) = history.decode(condition_store.past["pcie_aer"]).values()
    assert (series.time, series.value) == (NOW + 3600, READING.value)
    condition_store.apply_clock_step(-3600.0)
    assert condition_store.ledger.conditions == LIVE.conditions


def test_load_limits_expiry_times_written_with_clock_ahead(
    tmp_path: Path,
) -> None:
    ahead = NOW + 10 * 365 * 86400.0
    ack = Ack(ahead + 7200, "known", "ann", Severity.CRITICAL, ahead)
    acked = replace(OPEN_XID, ack=ack)
    hold = FleetHold(ahead, ahead + 300, times=1)
    pause = Pause(ahead + 1800, "driver upgrade", "root", ahead)
    write(tmp_path, replace(LIVE, conditions=(acked,), pause=pause, slurm=DrainRecord(hold=hold)))
    ledger = load_store(tmp_path).ledger
    assert ledger.pause == replace(pause, until=NOW + 1800, requested_at=NOW)
    assert ledger.conditions[0].ack == replace(ack, until=NOW + 7200, requested_at=NOW)
    assert ledger.slurm.hold == FleetHold(NOW, NOW + 300, times=1)

    repeated_hold = FleetHold(NOW - 60, ahead + 300, times=2)
    write(tmp_path, replace(LIVE, slurm=DrainRecord(hold=repeated_hold)))
    assert load_store(tmp_path).ledger.slurm.hold == replace(repeated_hold, until=NOW + 2 * MAX_HOLD_SECONDS)


def test_load_keeps_expiry_times_written_with_correct_clock(tmp_path: Path) -> None:
    acked = replace(OPEN_XID, ack=Ack(NOW + 7200, "known", "ann", Severity.CRITICAL, NOW - 60))
    slurm = DrainRecord(hold=FleetHold(NOW - 60, NOW + 3000, times=1))
    ledger = replace(LIVE, conditions=(acked,), pause=Pause(NOW + 9, "upgrade", "root", NOW - 1), slurm=slurm)
    write(tmp_path, ledger)
    assert ledger_without_stream(load_store(tmp_path)) == ledger


def test_clock_step_back_does_not_disable_draining(
    tmp_path: Path,
) -> None:
    """The clock was ahead when the earlier daemon became trusted, and is set back while this daemon runs."""
    step, clock = -2 * 86400.0, [NOW]
    pause = Pause(NOW - 60 + 600, "driver upgrade", "root", NOW - 60)
    write(tmp_path, replace(LIVE, trusted_since=NOW - 300, pause=pause))
    condition_store = load_store(tmp_path, now=lambda: clock[-1])
    clock.append(NOW + 30 + step)
    condition_store.apply_clock_step(step, since=NOW, until=NOW + 30)
    assert condition_store.ledger.trusted_since == clock[-1]
    assert condition_store.ledger.pause == replace(pause, until=pause.until + step, requested_at=clock[-1])
    (condition,) = condition_store.ledger.conditions
    seen_again = replace(condition, last_event=clock[-1] + 1)
    assert may_drain(seen_again, condition_store.ledger.trusted_since)


def test_resume_with_clock_ahead_does_not_hide_new_event(tmp_path: Path) -> None:
    acked = tuple(acknowledged(condition, NOW + 86400.0) for condition in LIVE.conditions)
    write(tmp_path, replace(LIVE, trusted_since=NOW - 300, conditions=acked))
    condition_store = load_store(tmp_path)
    (condition,) = condition_store.ledger.conditions
    seen_again = replace(condition, state=ConditionState.OPEN, last_event=NOW + 1)
    assert may_drain(seen_again, condition_store.ledger.trusted_since)


def test_boot_in_year_2000_can_drain_before_and_after_clock_step(tmp_path: Path) -> None:
    write(tmp_path, replace(LIVE, trusted_since=NOW - 5, conditions=()))
    year_2000 = 946_684_800.0
    condition_store = load_store(tmp_path, now=lambda: year_2000)
    assert condition_store.ledger.trusted_since == year_2000
    born = condition_store.ledger.born
    condition_store.change(conditions=(replace(OPEN_XID, last_event=year_2000 + 30),))
    condition_store.apply_clock_step(NOW - year_2000, since=year_2000, until=year_2000 + 60)
    (condition,) = condition_store.ledger.conditions
    assert condition.last_event == NOW + 30
    assert condition_store.ledger.trusted_since == NOW
    assert condition_store.ledger.born == born, "a time written with the correct clock stays"


def test_load_reports_unreadable_disk_copy(tmp_path: Path) -> None:
    condition_store = ConditionStore(str(tmp_path), lambda: NOW)
    condition_store.load(lambda: {"ledger.json": "{ cut o"}, "b1", Mode.ACT)
    assert condition_store.copy_unreadable


def test_log_has_single_line_per_condition_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    condition_store = load_store(tmp_path)
    key = (OPEN_XID.code, OPEN_XID.subject)
    degraded = replace(OPEN_XID, severity=Severity.DEGRADED)
    with caplog.at_level(logging.INFO, "healthd"):
        for condition in (
            replace(degraded, state=ConditionState.PENDING, confirm_seconds=60),
            degraded,
            replace(degraded, last_seen=NOW),
            OPEN_XID,
            replace(OPEN_XID, state=ConditionState.CLEARED, cleared_by="reboot", cleared_at=NOW),
        ):
            condition_store.set_conditions({key: condition})
    assert [record.getMessage().removeprefix("gpu_xid/79 0000:61:00.0: ") for record in caplog.records] == [
        "the GPU has fallen off the bus (pending: opens if it lasts 60 s)",
        "degraded, open: the GPU has fallen off the bus",
        "now critical: the GPU has fallen off the bus",
        "cleared: reboot",
    ]


def test_quiet_time_is_saved_only_when_condition_clears(tmp_path: Path) -> None:
    windowed = replace(OPEN_XID, clears=Clears.WINDOW, window_seconds=100.0)
    write(tmp_path, replace(LIVE, conditions=(windowed,)))
    condition_store = load_store(tmp_path)
    condition_store.save()
    condition_store.count_quiet_time(60.0, under_load=True)
    assert condition_store.ledger.conditions[0].quiet_seconds == 60.0
    assert not condition_store.unsaved
    condition_store.count_quiet_time(60.0, under_load=True)
    assert condition_store.ledger.conditions == ()
    assert condition_store.unsaved


def test_count_quiet_time_sums_fractions_to_seconds(tmp_path: Path) -> None:
    windowed = replace(OPEN_XID, clears=Clears.WINDOW, window_seconds=100.0)
    write(tmp_path, replace(LIVE, conditions=(windowed,)))
    condition_store = load_store(tmp_path)
    counted = []
    for _ in range(8):
        condition_store.count_quiet_time(0.25, under_load=True)
        counted.append(condition_store.ledger.conditions[0].quiet_seconds)
    assert counted == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 2.0]


def test_unchanged_ledger_is_not_saved(tmp_path: Path) -> None:
    write(tmp_path, LIVE)
    condition_store = load_store(tmp_path)
    condition_store.save()
    condition_store.uncopied = False
    condition_store.change(mode="act")
    condition_store.set_conditions(condition_store.ledger.by_key())
    assert not condition_store.unsaved
    assert not condition_store.uncopied


# --- save


def test_load_restores_saved_ledger_and_past(tmp_path: Path) -> None:
    condition_store = load_store(tmp_path)
    condition_store.set_conditions({(OPEN_XID.code, OPEN_XID.subject): OPEN_XID})
    condition_store.set_past("pcie_aer", STORE)
    condition_store.save(round_ended=True)
    assert not condition_store.unsaved
    assert condition_store.uncopied, "the disk copy is written separately"
    restored = load_store(tmp_path)
    assert (ledger_without_stream(restored), restored.past) == (
        ledger_without_stream(condition_store),
        condition_store.past,
    )


def test_save_replaces_file_atomically(tmp_path: Path) -> None:
    condition_store = load_store(tmp_path)
    condition_store.save()
    with open(tmp_path / store.FILE, encoding="utf-8") as open_file:
        condition_store.change(mode="drain")
        condition_store.save()
        assert store.decode(open_file.read(), "").mode == "act", "an open file still has the old ledger"
    assert store.decode((tmp_path / store.FILE).read_text(), "").mode == "drain"
    assert sorted(os.listdir(tmp_path)) == [store.FILE, f"{store.FILE}.spare"]
    assert (tmp_path / store.FILE).stat().st_mode & 0o777 == 0o600


def test_save_all_writes_into_new_directory(tmp_path: Path) -> None:
    condition_store = load_store(tmp_path)
    condition_store.set_past("pcie_aer", STORE)
    condition_store.save()
    for file in tmp_path.iterdir():
        file.unlink()
    condition_store.save_all()
    restored = load_store(tmp_path)
    assert (ledger_without_stream(restored), restored.past) == (
        ledger_without_stream(condition_store),
        condition_store.past,
    )


def test_save_failure_is_logged_once_and_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    condition_store = load_store(directory)
    directory.rmdir()
    condition_store.save()
    condition_store.save()
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1
    assert condition_store.unsaved
    directory.mkdir()
    condition_store.save()
    assert not condition_store.unsaved
    assert ledger_without_stream(load_store(directory)) == ledger_without_stream(condition_store)


def test_load_keeps_saved_lines_when_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier daemon may have written these lines, so they must not be counted as dropped."""

    def write_if_small(path: str, text: bytes) -> None:
        if len(text) > max_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rewrite_file(path, text)

    condition_store = load_store(tmp_path)
    condition_store.save()
    saved, max_bytes = condition_store.ledger.outbox.lines, len(values.encode(condition_store.ledger)) + 100
    monkeypatch.setattr("healthd.agent.conditions.store.rewrite_file", write_if_small)
    reloaded = load_store(tmp_path)
    reloaded.save()
    assert not reloaded.unsaved
    assert reloaded.ledger.outbox.lines == saved
    assert reloaded.ledger.outbox.dropped_from == json.loads(saved[-1])["seq"] + 1


def test_save_on_full_disk_drops_unwritten_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_if_small(path: str, text: bytes) -> None:
        if len(text) > max_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rewrite_file(path, text)

    condition_store = load_store(tmp_path)
    condition_store.save()
    saved = condition_store.ledger.outbox.lines
    for number in range(200):
        condition_store.stream.emit_stopped(f"{number}" * 20)
    condition_store.set_conditions({OPEN_XID.key: OPEN_XID})
    max_bytes = 4000
    monkeypatch.setattr("healthd.agent.conditions.store.rewrite_file", write_if_small)
    condition_store.save()
    assert not condition_store.unsaved
    assert (condition_store.ledger.outbox.lines, condition_store.stream.dropped) == (saved, 201)
    assert ledger_without_stream(load_store(tmp_path)).conditions == (OPEN_XID,)
    max_bytes = 10
    condition_store.change(mode="drain")
    condition_store.save()
    assert condition_store.save_failed


def test_error_in_log_text_does_not_lose_condition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(log_lines, "_condition_text", fail)
    condition_store = ConditionStore(str(tmp_path), lambda: NOW)
    condition_store.load(dict, "b1", Mode.ACT)
    condition_store.set_conditions({OPEN_XID.key: OPEN_XID})
    assert condition_store.ledger.conditions == (OPEN_XID,)
    assert dict(guard.dropped) == {"log": 1}
