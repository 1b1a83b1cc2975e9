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
STANDING = Condition(
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
LIVE = Ledger(born=1.0, boot_id="b1", mode="act", trusted_since=1.0, conditions=(STANDING,))
READING = Observation("link_errors_total", 7, ObservationKind.COUNTER)
STORE = history.encode(history.update({}, [READING], NOW, "b1"))


class Disk:
    """The copy in the state directory. Counts how often it is read."""

    def __init__(self, **texts: str | None) -> None:
        self.texts = {f"{name}.json": text for name, text in texts.items()}
        self.reads = 0

    def __call__(self) -> dict[str, str | None]:
        self.reads += 1
        return self.texts


def recalled(
    directory: Path,
    disk: Disk | None = None,
    boot_id: str = "b1",
    mode: Mode = Mode.ACT,
    now: Callable[[], float] = lambda: NOW,
) -> ConditionStore:
    memory = ConditionStore(str(directory), now)
    memory.load(disk or Disk(), boot_id, mode)
    return memory


def remembered(memory: ConditionStore) -> Ledger:
    """Return the ledger without its event stream."""
    return replace(memory.ledger, outbox=Outbox(), emitted=Emitted())


def write(directory: Path, ledger: Ledger) -> None:
    (directory / store.FILE).write_bytes(values.encode(ledger))


# --- load


def test_the_live_ledger_is_taken_without_reading_the_copy(tmp_path: Path) -> None:
    write(tmp_path, LIVE)
    disk = Disk(ledger=values.encode(Ledger(born=2.0)).decode())
    assert remembered(recalled(tmp_path, disk)) == LIVE
    assert disk.reads == 0


def test_without_a_live_ledger_the_copy_is_taken_with_its_past(tmp_path: Path) -> None:
    before = ConditionStore(str(tmp_path), lambda: NOW)
    before.set_past("pcie_aer", STORE)
    disk = Disk(ledger=values.encode(LIVE).decode(), past=values.encode(before.past).decode())
    memory = recalled(tmp_path, disk)
    assert remembered(memory) == LIVE
    assert memory.past == before.past


def test_without_either_a_new_one_begins_and_trusts_only_what_it_sees_itself(tmp_path: Path) -> None:
    memory = recalled(tmp_path)
    assert (memory.ledger.born, memory.ledger.trusted_since, memory.ledger.boot_id) == (NOW, NOW, "b1")
    assert memory.ledger.conditions == ()
    assert memory.unsaved
    assert memory.uncopied


@pytest.mark.parametrize("text", ["garbage", "[]", '{"version": 99}', '{"conditions": 3}', "\0" * 100, "[" * 100_000])
def test_a_live_ledger_that_is_garbage_is_set_aside_and_the_copy_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    (tmp_path / store.FILE).write_text(text)
    memory = recalled(tmp_path, Disk(ledger=values.encode(LIVE).decode()))
    assert remembered(memory) == LIVE
    assert (tmp_path / f"{store.FILE}.unreadable").read_text() == text
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "\n" not in record.getMessage()
    assert f"{store.FILE}.unreadable" in record.getMessage()


@pytest.mark.parametrize("text", ["garbage", "", None, '{"version": 0}'])
def test_where_live_ledger_and_copy_are_both_garbage_a_new_one_begins(tmp_path: Path, text: str | None) -> None:
    (tmp_path / store.FILE).write_text("garbage")
    assert recalled(tmp_path, Disk(ledger=text)).ledger.born == NOW


def test_an_empty_live_ledger_is_none(tmp_path: Path) -> None:
    (tmp_path / store.FILE).write_text("")
    assert remembered(recalled(tmp_path, Disk(ledger=values.encode(LIVE).decode()))) == LIVE


def test_a_past_that_is_garbage_costs_only_the_past(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, LIVE)
    (tmp_path / store.PAST_FILE).write_text("garbage")
    memory = recalled(tmp_path)
    assert (remembered(memory), memory.past) == (LIVE, {})
    assert "counters start from new readings" in caplog.text


def test_another_boot_ends_what_waited_for_one_and_keeps_the_rest(tmp_path: Path) -> None:
    lasting = replace(STANDING, code="gpu_row_remap/failure", clears=Clears.OPERATOR)
    write(tmp_path, replace(LIVE, conditions=(STANDING, lasting)))
    memory = recalled(tmp_path, boot_id="b2")
    assert [c.code for c in memory.ledger.conditions] == ["gpu_row_remap/failure"]
    assert [(c.code, c.cleared_by, c.cleared_at) for c in memory.ledger.cleared] == [("gpu_xid/79", "reboot", NOW)]
    assert memory.ledger.boot_id == "b2"


@pytest.mark.parametrize(
    ("before", "now", "trusted_anew"),
    [
        ("observe", Mode.ACT, True),
        ("observe", Mode.DRAIN, True),
        ("observe", Mode.OBSERVE, False),
        ("drain", Mode.ACT, False),
        ("act", Mode.OBSERVE, False),
        ("act", Mode.ACT, False),
    ],
)
def test_what_was_only_observed_until_now_is_not_trusted_to_act(
    tmp_path: Path, before: str, now: Mode, trusted_anew: bool
) -> None:
    write(tmp_path, replace(LIVE, mode=before))
    memory = recalled(tmp_path, mode=now)
    assert memory.ledger.trusted_since == (NOW if trusted_anew else 1.0)
    assert memory.ledger.mode == now.value


# --- change


def test_conditions_of_checks_that_are_no_longer_configured_end(tmp_path: Path) -> None:
    data = replace(STANDING, check="mount", instance="/data", code="mount/missing", subject="/data")
    home = replace(data, instance="/home", subject="/home")
    write(tmp_path, replace(LIVE, conditions=(STANDING, data, home)))
    memory = recalled(tmp_path)
    memory.clear_unconfigured({("gpu_xid", ""), ("mount", "/data")})
    assert [c.subject for c in memory.ledger.conditions] == ["0000:61:00.0", "/data"]
    assert [(c.subject, c.ending, c.cleared_by) for c in memory.ledger.cleared] == [
        ("/home", Ending.UNCHECKED, "no longer configured")
    ]


def test_a_clock_that_is_set_moves_every_moment_with_it_and_no_other_number(tmp_path: Path) -> None:
    pause = Pause(NOW + 600, "driver upgrade", "root")
    write(tmp_path, replace(LIVE, born=NOW - 5, trusted_since=NOW - 5, pause=pause))
    memory = recalled(tmp_path)
    memory.set_past("pcie_aer", STORE)
    memory.apply_clock_step(3600.0)
    (condition,) = memory.ledger.conditions
    assert condition.last_event == STANDING.last_event + 3600
    assert condition.acknowledged_at == 0.0, "unset times stay unset"
    assert memory.ledger.pause == replace(pause, until=pause.until + 3600)
    assert memory.ledger.trusted_since == NOW - 5 + 3600
    (moved,) = history.decode(memory.past["pcie_aer"]).values()
    assert (moved.time, moved.value) == (NOW + 3600, READING.value)
    memory.apply_clock_step(-3600.0)
    assert memory.ledger.conditions == LIVE.conditions


def test_what_was_said_while_the_clock_stood_years_ahead_lasts_as_long_as_was_said_after_a_restart(
    tmp_path: Path,
) -> None:
    ahead = NOW + 10 * 365 * 86400.0
    ack = Ack(ahead + 7200, "known", "ann", Severity.CRITICAL, ahead)
    known = replace(STANDING, ack=ack)
    hold = FleetHold(ahead, ahead + 300, times=1)
    pause = Pause(ahead + 1800, "driver upgrade", "root", ahead)
    write(tmp_path, replace(LIVE, conditions=(known,), pause=pause, slurm=DrainRecord(hold=hold)))
    ledger = recalled(tmp_path).ledger
    assert ledger.pause == replace(pause, until=NOW + 1800, requested_at=NOW)
    assert ledger.conditions[0].ack == replace(ack, until=NOW + 7200, requested_at=NOW)
    assert ledger.slurm.hold == FleetHold(NOW, NOW + 300, times=1)

    again = FleetHold(NOW - 60, ahead + 300, times=2)
    write(tmp_path, replace(LIVE, slurm=DrainRecord(hold=again)))
    assert recalled(tmp_path).ledger.slurm.hold == replace(again, until=NOW + 2 * MAX_HOLD_SECONDS)


def test_what_was_said_before_a_restart_with_a_right_clock_stays_as_it_was_said(tmp_path: Path) -> None:
    known = replace(STANDING, ack=Ack(NOW + 7200, "known", "ann", Severity.CRITICAL, NOW - 60))
    slurm = DrainRecord(hold=FleetHold(NOW - 60, NOW + 3000, times=1))
    said = replace(LIVE, conditions=(known,), pause=Pause(NOW + 9, "upgrade", "root", NOW - 1), slurm=slurm)
    write(tmp_path, said)
    assert remembered(recalled(tmp_path)) == said


def test_a_clock_that_is_set_back_to_before_what_an_earlier_daemon_wrote_switches_draining_off_for_no_time(
    tmp_path: Path,
) -> None:
    """The clock was ahead when the earlier daemon became trusted, and is set back while this daemon runs."""
    step, clock = -2 * 86400.0, [NOW]
    pause = Pause(NOW - 60 + 600, "driver upgrade", "root", NOW - 60)
    write(tmp_path, replace(LIVE, trusted_since=NOW - 300, pause=pause))
    memory = recalled(tmp_path, now=lambda: clock[-1])
    clock.append(NOW + 30 + step)
    memory.apply_clock_step(step, since=NOW, until=NOW + 30)
    assert memory.ledger.trusted_since == clock[-1]
    assert memory.ledger.pause == replace(pause, until=pause.until + step, requested_at=clock[-1])
    (condition,) = memory.ledger.conditions
    found = replace(condition, last_event=clock[-1] + 1)
    assert may_drain(found, memory.ledger.trusted_since)


def test_what_an_operator_resumed_while_the_clock_stood_ahead_drains_again_when_it_is_seen_now(tmp_path: Path) -> None:
    resumed = tuple(acknowledged(condition, NOW + 86400.0) for condition in LIVE.conditions)
    write(tmp_path, replace(LIVE, trusted_since=NOW - 300, conditions=resumed))
    memory = recalled(tmp_path)
    (condition,) = memory.ledger.conditions
    seen = replace(condition, state=ConditionState.OPEN, last_event=NOW + 1)
    assert may_drain(seen, memory.ledger.trusted_since)


def test_a_machine_that_boots_in_the_year_2000_acts_before_and_after_the_time_server_answers(tmp_path: Path) -> None:
    write(tmp_path, replace(LIVE, trusted_since=NOW - 5, conditions=()))
    year_2000 = 946_684_800.0
    memory = recalled(tmp_path, now=lambda: year_2000)
    assert memory.ledger.trusted_since == year_2000
    born = memory.ledger.born
    memory.change(conditions=(replace(STANDING, last_event=year_2000 + 30),))
    memory.apply_clock_step(NOW - year_2000, since=year_2000, until=year_2000 + 60)
    (condition,) = memory.ledger.conditions
    assert condition.last_event == NOW + 30
    assert memory.ledger.trusted_since == NOW
    assert memory.ledger.born == born, "a time written with the correct clock stays"


def test_a_copy_that_could_not_be_read_is_to_be_kept(tmp_path: Path) -> None:
    memory = ConditionStore(str(tmp_path), lambda: NOW)
    memory.load(lambda: {"ledger.json": "{ cut o"}, "b1", Mode.ACT)
    assert memory.copy_unreadable


def test_the_log_says_what_opened_rose_and_cleared_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = recalled(tmp_path)
    key = (STANDING.code, STANDING.subject)
    degraded = replace(STANDING, severity=Severity.DEGRADED)
    with caplog.at_level(logging.INFO, "healthd"):
        for condition in (
            replace(degraded, state=ConditionState.PENDING, confirm_seconds=60),
            degraded,
            replace(degraded, last_seen=NOW),
            STANDING,
            replace(STANDING, state=ConditionState.CLEARED, cleared_by="reboot", cleared_at=NOW),
        ):
            memory.set_conditions({key: condition})
    assert [record.getMessage().removeprefix("gpu_xid/79 0000:61:00.0: ") for record in caplog.records] == [
        "the GPU has fallen off the bus (pending: opens if it lasts 60 s)",
        "degraded, open: the GPU has fallen off the bus",
        "now critical: the GPU has fallen off the bus",
        "cleared: reboot",
    ]


def test_time_that_only_passes_is_not_worth_a_save_but_a_window_that_ends_is(tmp_path: Path) -> None:
    windowed = replace(STANDING, clears=Clears.WINDOW, window_seconds=100.0)
    write(tmp_path, replace(LIVE, conditions=(windowed,)))
    memory = recalled(tmp_path)
    memory.save()
    memory.count_quiet_time(60.0, under_load=True)
    assert memory.ledger.conditions[0].quiet_seconds == 60.0
    assert not memory.unsaved
    memory.count_quiet_time(60.0, under_load=True)
    assert memory.ledger.conditions == ()
    assert memory.unsaved


def test_windows_count_time_by_the_second_and_lose_none_of_it(tmp_path: Path) -> None:
    windowed = replace(STANDING, clears=Clears.WINDOW, window_seconds=100.0)
    write(tmp_path, replace(LIVE, conditions=(windowed,)))
    memory = recalled(tmp_path)
    counted = []
    for _ in range(8):
        memory.count_quiet_time(0.25, under_load=True)
        counted.append(memory.ledger.conditions[0].quiet_seconds)
    assert counted == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 2.0]


def test_what_does_not_change_anything_is_not_saved(tmp_path: Path) -> None:
    write(tmp_path, LIVE)
    memory = recalled(tmp_path)
    memory.save()
    memory.uncopied = False
    memory.change(mode="act")
    memory.set_conditions(memory.ledger.by_key())
    assert not memory.unsaved
    assert not memory.uncopied


# --- save


def test_what_was_saved_is_recalled(tmp_path: Path) -> None:
    memory = recalled(tmp_path)
    memory.set_conditions({(STANDING.code, STANDING.subject): STANDING})
    memory.set_past("pcie_aer", STORE)
    memory.save(round_ended=True)
    assert not memory.unsaved
    assert memory.uncopied, "the disk copy is written separately"
    again = recalled(tmp_path)
    assert (remembered(again), again.past) == (remembered(memory), memory.past)


def test_a_save_replaces_the_file_whole_so_that_a_reader_never_sees_half(tmp_path: Path) -> None:
    memory = recalled(tmp_path)
    memory.save()
    with open(tmp_path / store.FILE, encoding="utf-8") as before:
        memory.change(mode="drain")
        memory.save()
        assert store.decode(before.read(), "").mode == "act", "an open file still has the old ledger"
    assert store.decode((tmp_path / store.FILE).read_text(), "").mode == "drain"
    assert sorted(os.listdir(tmp_path)) == [store.FILE, f"{store.FILE}.spare"]
    assert (tmp_path / store.FILE).stat().st_mode & 0o777 == 0o600


def test_a_directory_that_is_new_gets_all_of_it_although_it_was_saved(tmp_path: Path) -> None:
    memory = recalled(tmp_path)
    memory.set_past("pcie_aer", STORE)
    memory.save()
    for file in tmp_path.iterdir():
        file.unlink()
    memory.save_all()
    again = recalled(tmp_path)
    assert (remembered(again), again.past) == (remembered(memory), memory.past)


def test_a_save_that_fails_is_said_once_and_made_up_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    memory = recalled(directory)
    directory.rmdir()
    memory.save()
    memory.save()
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1
    assert memory.unsaved
    directory.mkdir()
    memory.save()
    assert not memory.unsaved
    assert remembered(recalled(directory)) == remembered(memory)


def test_lines_that_are_in_the_saved_ledger_stay_when_the_next_daemon_finds_no_room_for_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier daemon may have written these lines, so they must not be counted as dropped."""

    def full(path: str, text: bytes) -> None:
        if len(text) > most:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rewrite_file(path, text)

    memory = recalled(tmp_path)
    memory.save()
    saved, most = memory.ledger.outbox.lines, len(values.encode(memory.ledger)) + 100
    monkeypatch.setattr("healthd.agent.conditions.store.rewrite_file", full)
    after = recalled(tmp_path)
    after.save()
    assert not after.unsaved
    assert after.ledger.outbox.lines == saved
    assert after.ledger.outbox.dropped_from == json.loads(saved[-1])["seq"] + 1


def test_on_a_full_file_system_the_ledger_is_saved_without_the_stream_that_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str, text: bytes) -> None:
        if len(text) > most:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rewrite_file(path, text)

    memory = recalled(tmp_path)
    memory.save()
    saved = memory.ledger.outbox.lines
    for number in range(200):
        memory.stream.emit_stopped(f"{number}" * 20)
    memory.set_conditions({STANDING.key: STANDING})
    most = 4000
    monkeypatch.setattr("healthd.agent.conditions.store.rewrite_file", full)
    memory.save()
    assert not memory.unsaved
    assert (memory.ledger.outbox.lines, memory.stream.dropped) == (saved, 201)
    assert remembered(recalled(tmp_path)).conditions == (STANDING,)
    most = 10
    memory.change(mode="drain")
    memory.save()
    assert memory.save_failed


def test_a_mistake_in_the_words_of_the_log_costs_no_condition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(log_lines, "_condition_text", raises)
    memory = ConditionStore(str(tmp_path), lambda: NOW)
    memory.load(dict, "b1", Mode.ACT)
    memory.set_conditions({STANDING.key: STANDING})
    assert memory.ledger.conditions == (STANDING,)
    assert dict(guard.dropped) == {"log": 1}
