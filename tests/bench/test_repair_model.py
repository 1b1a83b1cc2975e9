"""The arithmetic of the model of a year with and without repair mode "act"."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.one_python

BENCH = str(Path(__file__).parents[2] / "bench")
if BENCH not in sys.path:
    sys.path.append(BENCH)

import repair_model as model  # noqa: E402
from repair_model import ORDER, PERSON, POWER_CYCLE, REBOOT, RESET, Fault  # noqa: E402

FRIDAY_EVENING = 4 * 24 + 20.0
SUCCESS = {"gsp": {RESET: 0.5, REBOOT: 0.8, POWER_CYCLE: 0.9}, "false_alarm": {REBOOT: 1.0}}
RESET_TAKES = model.STEP_HOURS[RESET] + model.VERIFY_HOURS
REBOOT_TAKES = model.STEP_HOURS[REBOOT] + model.VERIFY_HOURS
POWER_TAKES = model.STEP_HOURS[POWER_CYCLE] + model.VERIFY_HOURS
PERSON_TAKES = model.RESPONSE_HOURS + model.DIAGNOSIS_HOURS


def fault(luck: float, at: float = 0.0, node: int = 0, returns_after: float | None = None) -> Fault:
    return Fault(at, node, "gsp", RESET, luck, 10.0, returns_after)


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (0.0, 9.0),  # Monday 0:00
        (9.5, 9.5),
        (17.0, 24 + 9.0),
        (4 * 24 + 16.9, 4 * 24 + 16.9),
        (FRIDAY_EVENING, 7 * 24 + 9.0),
        (5 * 24 + 12.0, 7 * 24 + 9.0),
        (6 * 24 + 12.0, 7 * 24 + 9.0),
        (8 * 24 + 18.0, 9 * 24 + 9.0),
    ],
)
def test_office_hours_are_monday_to_friday(at: float, expected: float) -> None:
    assert model.office_hours(at) == expected


@given(st.floats(0, 8760))
def test_office_hours_are_never_before_the_moment_nor_a_weekend_after_it(at: float) -> None:
    start = model.office_hours(at)
    assert at <= start < at + 64.1
    assert start // 24 % 7 < 5
    assert 9.0 <= start % 24 < 17.0


def test_person_responds_within_working_time() -> None:
    assert model.person_starts(FRIDAY_EVENING, "24x7") == FRIDAY_EVENING + 0.5
    assert model.person_starts(FRIDAY_EVENING, "8x5") == 7 * 24 + 9.5
    assert model.person_starts(16.75, "8x5") == pytest.approx(24 + 9.25)  # 15 minutes of response remain


@pytest.mark.parametrize(
    ("luck", "hours"),
    [
        (0.4, RESET_TAKES),
        (0.7, RESET_TAKES + REBOOT_TAKES),
        (0.85, RESET_TAKES + REBOOT_TAKES + POWER_TAKES),
        (0.95, RESET_TAKES + REBOOT_TAKES + POWER_TAKES + 10.0),
    ],
)
def test_people_take_each_step_until_one_helps(luck: float, hours: float) -> None:
    assert model.by_people([fault(luck)], "24x7", SUCCESS).hours == pytest.approx(PERSON_TAKES + hours)


@pytest.mark.parametrize(
    ("luck", "hours", "alone", "steps"),
    [
        (0.4, RESET_TAKES, 1, 1),
        (0.7, RESET_TAKES + REBOOT_TAKES, 1, 2),
        (0.85, RESET_TAKES + REBOOT_TAKES + PERSON_TAKES + POWER_TAKES, 0, 2),
        (0.95, RESET_TAKES + REBOOT_TAKES + PERSON_TAKES + POWER_TAKES + 10.0, 0, 2),
    ],
)
def test_person_follows_the_last_step_of_healthd(luck: float, hours: float, alone: int, steps: int) -> None:
    result = model.by_healthd([fault(luck)], "24x7", SUCCESS, ORDER[:2], 1)
    assert result.hours == pytest.approx(model.PREPARE_HOURS + hours)
    assert (result.alone, result.steps, result.for_nothing) == (alone, steps, 0)


def test_fault_without_a_step_costs_the_same_under_both_policies() -> None:
    broken = Fault(FRIDAY_EVENING, 0, "ib_link", PERSON, 0.0, 1.0)
    without = model.by_people([broken], "8x5", SUCCESS)
    assert without.hours == pytest.approx(7 * 24 + 9.0 + PERSON_TAKES + 1.0 - FRIDAY_EVENING)
    assert model.by_healthd([broken], "8x5", SUCCESS, ORDER, 1).hours == without.hours


def test_repairs_wait_for_max_concurrent() -> None:
    faults = [fault(0.4, node=node) for node in range(3)]
    one = model.PREPARE_HOURS + RESET_TAKES
    assert model.by_healthd(faults, "24x7", SUCCESS, ORDER, 3).hours == pytest.approx(3 * one)
    assert model.by_healthd(faults, "24x7", SUCCESS, ORDER, 1).hours == pytest.approx((1 + 2 + 3) * one)


@pytest.mark.parametrize(("luck", "later"), [(0.1, REBOOT_TAKES), (0.45, REBOOT_TAKES + POWER_TAKES)])
def test_relapse_starts_at_the_next_step(luck: float, later: float) -> None:
    """With luck 0.1, the reboot ends the relapse: 0.5 + 0.5 * 0.1 / 0.5 = 0.6. With 0.45, no step does: 0.95."""
    result = model.by_people([fault(luck, returns_after=48.0)], "24x7", SUCCESS)
    part = 10.0 if luck > 0.4 else 0.0
    assert result.hours == pytest.approx(2 * PERSON_TAKES + RESET_TAKES + later + part)
    assert result.outages[0][1][0] == pytest.approx(PERSON_TAKES + RESET_TAKES + 48.0)


def test_false_alarms_are_counted_apart() -> None:
    false = Fault(0.0, 0, "false_alarm", REBOOT, 0.5, 1.0)
    result = model.by_healthd([false, fault(0.4, at=50.0)], "24x7", SUCCESS, ORDER, 1)
    assert (result.steps, result.for_nothing) == (2, 1)
    assert result.false_hours == pytest.approx(model.PREPARE_HOURS + REBOOT_TAKES)
    assert result.hours == pytest.approx(result.false_hours + model.PREPARE_HOURS + RESET_TAKES)


def test_overlapping_outages_of_a_node_count_once() -> None:
    assert model.union_hours([(0.0, 2.0), (1.0, 3.0), (1.5, 2.5), (5.0, 6.0)]) == 4.0
    assert model.union_hours([]) == 0.0


@pytest.mark.parametrize("share", [0.2, 0.32, 0.65])
def test_scaled_chances_end_this_share_of_the_gpus_faults(share: float) -> None:
    faults = [fault(0.0)._replace(cause=cause) for cause in ("gsp", "pcie", "pcie", "gpu_memory", "mount")]
    chances = model.scaled(share, faults)
    ended = [chances[f.cause][POWER_CYCLE] for f in faults if f.cause in model.GPU_CAUSES]
    assert sum(ended) / len(ended) == pytest.approx(share)
    assert chances["false_alarm"] == model.SUCCESS["false_alarm"]


@pytest.mark.parametrize(
    ("codes", "step"),
    [
        (("gpu_xid/119",), RESET),
        (("gpu_xid/95", "gpu_ecc/uncorrected", "gpu_row_remap/pending"), RESET),
        (("gpu_xid/79", "gpu_access/lost"), REBOOT),
        (("gpu_xid/79", "ipmi_sel/critical_interrupt"), PERSON),
        (("mount/missing",), PERSON),
        (("pcie_link/slow",), REBOOT),
    ],
)
def test_first_step_is_that_of_healthds_ladder(codes: tuple[str, ...], step: object) -> None:
    assert model.first_step(codes) is step


def test_year_is_equal_for_the_same_seed_and_has_the_expected_rates() -> None:
    faults = model.Year(200, 365, 7).faults()
    assert faults == model.Year(200, 365, 7).faults()
    assert faults != model.Year(200, 365, 8).faults()
    assert all(0 <= f.at < 365 * 24 and 0 <= f.node < 200 for f in faults)
    false = [f for f in faults if f.cause == "false_alarm"]
    assert len(false) == pytest.approx(model.FALSE_ALARMS * 200 * 365, rel=0.3)
    assert all(f.step is REBOOT for f in false)


def test_act_saves_more_against_office_hours_than_against_shifts() -> None:
    found = {(row.success, row.shift, row.order): row.saved for row in model.rows(model.Year(200, 365, 7).faults(), 1)}
    assert len(found) == 8
    for success in model.SHARES:
        for order in (ORDER[:2], ORDER):
            assert found[success, "8x5", order] > found[success, "24x7", order]
            assert found["many", "8x5", order] > found["few", "8x5", order]


def test_program_prints_one_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["repair_model.py", "--nodes", "40", "--days", "90"])
    assert model.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines[4:]) == 1 + 8
