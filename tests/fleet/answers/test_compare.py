"""Tests of `compare`: equal sides do not differ, and real differences are found."""

from __future__ import annotations

import json
import re
from random import Random

import pytest
from fleet_history import history, write_parquet
from fleet_signals import BEGIN, DAY, END, HistoryBuilder, study
from fleet_views import text_of, view_of
from hypothesis import given
from hypothesis import strategies as st

from healthd.cli.main import main
from healthd.common.page import Page
from healthd.fleet.answers.document import Unanswerable, WrongChoice
from healthd.fleet.answers.study import Choice, open_study

pytestmark = pytest.mark.one_python

try:  # only .venv has numpy and scipy; the marked tests run nowhere else
    import numpy as np

    from healthd.fleet.answers import compare
    from healthd.fleet.answers.compare import Measure, Side, Units
    from healthd.fleet.statistics.intervals import share_ratio_interval, share_ratio_p_value
except ModuleNotFoundError as error:
    if error.name not in ("numpy", "scipy"):
        raise

AT = BEGIN + DAY
HOUR = 3600


def side(name, *measures, looked=None, begin=BEGIN):
    return Side(name, begin, begin + DAY, {}, measures, (), looked or {})


def node_measure(counts, name="all_codes", days=30.0):
    exposures = [days] * len(counts)
    return Measure(
        name, name, "per 1000 node-days", 1000.0, float(sum(counts)), sum(exposures), (Units(counts, exposures),)
    )


def differing_measures(answer):
    return [row["measure"] for row in answer["measures"] if row["differs"]]


COUNTS = st.lists(st.integers(0, 60), min_size=1, max_size=40)


@given(COUNTS)
def test_side_compared_with_itself_has_no_difference(counts):
    answer = compare.compare_sides(side("x", node_measure(counts)), side("x", node_measure(counts)))
    assert differing_measures(answer) == []
    for row in answer["measures"]:
        assert row["ratio"] == (None if not sum(counts) else pytest.approx(1))
        assert row["interval"] is None or row["interval"][0] <= 1
        assert row["interval"] is None or row["interval"][1] is None or row["interval"][1] >= 1


@given(COUNTS, COUNTS)
def test_swapped_sides_give_inverse_ratio_and_same_p(a, b):
    forward = compare.ratio_row(node_measure(a), node_measure(b))
    backward = compare.ratio_row(node_measure(b), node_measure(a))
    assert forward["p_value"] == pytest.approx(backward["p_value"])
    if sum(a) and sum(b):
        assert forward["ratio"] * backward["ratio"] == pytest.approx(1)
        low, high = forward["interval"][0], backward["interval"][1]
        # The inverse of a bound near zero is too large for a float.
        assert low * high == pytest.approx(1, rel=1e-6) if high is not None and high < 1e6 else low < 1e-5
    assert forward["dispersion"] >= 1


@pytest.mark.parametrize("dispersion", [1, 3, 7])
def test_equal_sides_differ_in_at_most_one_of_twenty_comparisons(dispersion):
    """Compare seven measures of 100 nodes each. The counts have 1, 3 or 7 times the variance of independent counts.

    LANL's failure counts have 3 to 7 times. A level of 5 % allows 15 false findings in 300 comparisons.
    """
    found = 0
    for seed in range(300):
        random = np.random.default_rng(10_000 * dispersion + seed)
        sides = [
            side(name, *(node_measure(draw_counts(random, dispersion), f"m{n}") for n in range(7))) for name in "AB"
        ]
        found += bool(differing_measures(compare.compare_sides(*sides)))
    assert found <= 15


def draw_counts(random, dispersion, mean=0.5, nodes=100):
    """Return negative binomial counts with variance / mean = dispersion."""
    if dispersion == 1:
        return [int(n) for n in random.poisson(mean, nodes)]
    return [int(n) for n in random.negative_binomial(mean / (dispersion - 1), 1 / dispersion, nodes)]


def test_doubled_failures_differ_but_loop_of_one_node_does_not():
    assert differing_measures(
        compare.compare_sides(side("A", node_measure([1] * 100)), side("B", node_measure([2] * 100)))
    ) == ["all_codes"]
    loop = [1] * 99 + [101]
    assert (
        differing_measures(compare.compare_sides(side("A", node_measure([1] * 100)), side("B", node_measure(loop))))
        == []
    )


def jobs(random, share, count=3000, users=300):
    """Return the measures of random jobs of 30 days. Each job completes with probability `share`."""
    ok = random.random(count) < share
    by_unit = []
    for units in (random.integers(0, 30, count), random.integers(0, users, count)):
        rows = []
        for unit in np.unique(units):
            unit_completed = ok[units == unit]
            completed = int(unit_completed.sum())
            ended = compare.EndedJobs(
                str(unit),
                len(unit_completed),
                completed,
                len(unit_completed) - completed,
                0,
                0,
                0,
                float(len(unit_completed)),
            )
            rows.append(ended)
        by_unit.append(rows)
    return compare.job_measures([], 100.0, by_unit)


def test_completed_shares_of_90_and_93_percent_differ():
    found = 0
    for seed in range(100):
        random = np.random.default_rng(seed)
        answer = compare.compare_sides(side("A", *jobs(random, 0.90)), side("B", *jobs(random, 0.93)))
        found += "completed" in differing_measures(answer)
    assert found >= 90


@pytest.mark.parametrize(
    ("a", "b", "completed"), [(3000, 3000, 0.9), (20, 20, 0.5), (2000, 20, 0.97), (300, 300, 0.02)]
)
def test_equal_shares_differ_in_at_most_one_of_twenty_pairs(a, b, completed):
    found = 0
    for seed in range(200):
        random = np.random.default_rng(1000 + seed)
        answer = compare.compare_sides(side("A", *jobs(random, completed, a)), side("B", *jobs(random, completed, b)))
        found += bool(differing_measures(answer))
    assert found <= 10


SHARES = st.integers(1, 400).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total)))


@given(SHARES, SHARES, st.floats(1, 9))
def test_share_interval_agrees_with_p_value(a, b, effect):
    def measure(found, total):
        return Measure("completed", "", "of all", 1.0, float(found), float(total), (Units([found], [total]),))

    row = compare.ratio_row(measure(*a), measure(*b))
    for side_key in "ab":
        low, high = row[side_key]["interval"]
        assert 0 <= low <= high <= 1
    interval, p_value = share_ratio_interval(*b, *a, effect), share_ratio_p_value(*b, *a, effect)
    assert share_ratio_p_value(*a, *b, effect) == pytest.approx(p_value)
    if interval is None:
        assert p_value == 1
        return
    low, high = interval
    assert low >= 0
    assert high is None or low <= high
    if abs(p_value - 0.05) > 1e-6:
        assert (p_value < 0.05) == (low > 1 or (high is not None and high < 1))


def test_measures_without_possible_difference_are_not_tested():
    def counted(*others):
        return compare.compare_sides(
            side("A", node_measure([1] * 100), *others), side("B", node_measure([2] * 100), *others)
        )

    nothing = [node_measure([0] * 100, f"m{number}") for number in range(9)]
    among = counted(*nothing, node_measure([0] * 100, "unexposed", days=0.0))
    assert among["measures"][0] == counted()["measures"][0]
    assert [row["adjusted"] for row in among["measures"][1:]] == [None] * 10
    assert text_of(among, Page())


def test_nodes_on_both_sides_are_noted():
    def side_of(nodes, chosen):
        return Side(chosen, BEGIN, END, {"partition": chosen}, (node_measure([1, 2]),), (), {}, frozenset(nodes))

    a, b = {("c1", "n1"), ("c1", "n2")}, {("c1", "n2"), ("c1", "n3")}
    (note,) = compare.compare_sides(side_of(a, "x"), side_of(b, "y"))["notes"]
    assert note.startswith("1 of the 3 nodes ")
    assert not compare.compare_sides(side_of(a, "x"), side_of(b - a, "y"))["notes"]


@pytest.mark.parametrize(
    ("a", "b"), [("2026-03", "2026-03"), ("2026-03", "2026-03-01..2026-04-01"), ("partition:x", "partition:x")]
)
def test_side_compared_with_itself_is_usage_error(a, b, tmp_path, capsys):
    assert main(["fleet", "compare", a, b, "--db", str(tmp_path)]) == 64
    assert "are the same" in capsys.readouterr().err


def test_dispersion_uses_grouping_with_largest_spread():
    def measure(count, users):
        each = [count // users] * users
        days = Units([count / 30] * 30, [100.0] * 30)
        return Measure("failed", "", "per 1000 jobs", 1000.0, count, 3000.0, (days, Units(each, [0.0] * users)))

    assert compare.dispersion(measure(100, 100), measure(100, 100)) == 1.0
    assert compare.dispersion(measure(100, 2), measure(100, 2)) > 50


def test_check_active_on_one_side_is_not_compared():
    def codes(flaps):
        return (
            node_measure([3 + flaps] * 20),
            node_measure([3] * 20, "code gpu_xid/79"),
            *([node_measure([flaps] * 20, "code ib_flap/link_downed")] if flaps else []),
        )

    before = side("A", *codes(0), looked={"gpu_xid": 600})
    after = side("B", *codes(9), looked={"gpu_xid": 600, "ib_flap": 600})
    answer = compare.compare_sides(before, after)
    assert differing_measures(answer) == []
    assert {row["measure"]: row["ratio"] for row in answer["measures"]} == {"all_codes": 1.0, "code gpu_xid/79": 1.0}
    assert any("ib_flap" in note for note in answer["notes"])
    everywhere = [
        side(entry.name, *entry.measures, looked={"gpu_xid": 600, "ib_flap": 600}) for entry in (before, after)
    ]
    assert differing_measures(compare.compare_sides(*everywhere)) == [
        "code ib_flap/link_downed"
    ]  # all_codes does not report the difference again


def test_code_missing_on_one_side_counts_as_zero():
    answer = compare.compare_sides(
        side("A", node_measure([0] * 40)),
        side("B", node_measure([1] * 40), node_measure([1] * 40, "code mount/missing")),
    )
    (row,) = [row for row in answer["measures"] if row["measure"] == "code mount/missing"]
    assert (row["a"]["amount"], row["a"]["rate"], row["ratio"], row["interval"][1], row["differs"]) == (
        0,
        0,
        None,
        None,
        True,
    )


def compare_halves(made, folder, chosen=None):
    half = BEGIN + (END - BEGIN) // 2
    with study(made, folder / "a", chosen, BEGIN, half) as a, study(made, folder / "b", chosen, half, END) as b:
        return compare.compare(a, b, "first", "second")


def history_with_node_fails():
    """Return 200 jobs in each half; in the second half every fifth job ends NODE_FAIL."""
    made = HistoryBuilder()
    nodes = [chr(ord("A") + at) for at in range(40)]
    made.alive("".join(nodes), BEGIN - DAY, END + DAY)
    half = BEGIN + (END - BEGIN) // 2
    for number in range(400):
        start = (BEGIN if number < 200 else half) + (number % 200) * 600
        ended = number >= 200 and number % 5 == 0
        made.job(
            nodes[number % 40],
            start,
            start + HOUR,
            "NODE_FAIL" if ended else "COMPLETED",
            gpus=256,
            user_name=f"u{number}",
        )
    return made


def test_half_with_node_fails_differs_in_r_f(tmp_path):
    answer = compare_halves(history_with_node_fails(), tmp_path)
    assert {"r_f", "node_fail"} <= set(differing_measures(answer))
    assert compare.has_findings(answer)
    text = text_of(answer, Page())
    assert re.search(r"(?m)^A is first, B is second\.$", text)
    assert re.search(r"128 GPUs \(r_f\), .*: B has", text)
    shares = {row["measure"]: row for row in answer["measures"]}
    for side_key in "ab":
        amounts = [shares[state][side_key]["amount"] for state in ("completed", "node_fail")]
        assert sum(amounts) == shares["completed"][side_key]["exposure"]


def test_unread_node_states_are_no_service_time(tmp_path):
    made, half = HistoryBuilder(), BEGIN + (END - BEGIN) // 2
    for node in "abcdefgh":
        made.node(node)
        made.outage(node, half + HOUR, half + DAY)
    made.alive("a")
    made.ingest("node_states", half, END)
    answer = compare_halves(made, tmp_path)
    unavailable = next(row for row in answer["measures"] if row["measure"] == "unavailable")
    assert (unavailable["a"]["exposure"], unavailable["a"]["rate"]) == (0, None)
    assert unavailable["b"]["exposure"] == pytest.approx(8 * (END - half) / DAY)
    assert unavailable["b"]["amount"] == pytest.approx(8 * (DAY - HOUR) / DAY)
    assert differing_measures(answer) == []


def test_sentence_without_ratio_names_both_values(tmp_path):
    made, half = HistoryBuilder(), BEGIN + (END - BEGIN) // 2
    for node in range(40):
        made.node(f"n{node}")
        made.outage(f"n{node}", half + HOUR, half + DAY)
    made.alive("a")
    made.ingest("node_states", BEGIN, END)
    answer = compare_halves(made, tmp_path)
    assert differing_measures(answer) == ["unavailable"]
    assert list(view_of(answer).sentences)[1].endswith("more than A's 0.0 %.")


def test_two_choices_of_one_period_can_be_compared(tmp_path):
    made = HistoryBuilder()
    for number in range(60):
        made.job(
            "a",
            AT,
            AT + HOUR,
            "FAILED" if number < 30 else "COMPLETED",
            partition="x" if number < 30 else "y",
            user_name=f"u{number}",
        )
    with (
        study(made, tmp_path / "x", Choice(partition="x")) as x,
        study(made, tmp_path / "y", Choice(partition="y")) as y,
    ):
        answer = compare.compare(x, y, "partition:x", "partition:y")
    assert (answer["filters"], answer["a"]["filters"], answer["b"]["filters"]) == (
        {},
        {"partition": "x"},
        {"partition": "y"},
    )
    rates = {row["measure"]: (row["a"]["rate"], row["b"]["rate"]) for row in answer["measures"]}
    assert (rates["failed"], rates["completed"]) == ((1.0, 0.0), (0.0, 1.0))


def test_compare_handles_empty_store_and_single_job(tmp_path):
    with pytest.raises(Unanswerable, match="the store has no jobs"):
        compare_halves(HistoryBuilder(), tmp_path / "empty")
    made = HistoryBuilder()
    made.job("a", AT, None, "RUNNING")
    answer = compare_halves(made, tmp_path / "one")
    assert differing_measures(answer) == []
    json.dumps(answer, allow_nan=False)


def test_compare_ignores_order_of_rows(tmp_path):
    for seed in range(2):
        made = history(Random(seed), 30)
        documents = []
        for turn in range(2):
            sides = []
            for begin, end in ((BEGIN, BEGIN + DAY), (BEGIN + DAY, END)):
                folder = tmp_path / f"{seed}-{turn}-{begin}"
                folder.mkdir()
                with open_study(write_parquet(made, folder, parts=1 + turn, random=Random(turn)), begin, end) as opened:
                    sides.append(compare.measure_side(opened, "x"))
            documents.append(json.dumps(compare.compare_sides(*sides), allow_nan=False))
        assert documents[0] == documents[1]


@pytest.mark.parametrize(
    ("word", "begin", "end"),
    [
        ("2026", "2026-01-01", "2027-01-01"),
        ("2024-02", "2024-02-01", "2024-03-01"),
        ("2026-12", "2026-12-01", "2027-01-01"),
        ("2026-02-28", "2026-02-28", "2026-03-01"),
        ("2026-03..2026-04", "2026-03-01", "2026-05-01"),
        ("2026-03..2026-03", "2026-03-01", "2026-04-01"),
        ("2026..2026", "2026-01-01", "2027-01-01"),
        ("2025-11..2026", "2025-11-01", "2027-01-01"),
        ("2026-03-15..2026-03", "2026-03-15", "2026-04-01"),
        ("2026-01-01T12:00:00..2026-01-02", "2026-01-01T12:00:00", "2026-01-02"),
    ],
)
def test_parse_period_accepts_years_months_days_and_ranges(word, begin, end):
    assert compare.parse_period(word) == compare.parse_period(f"{begin}..{end}")


@pytest.mark.parametrize(
    "word", ["", "..", "2026-13", "2026-02-30", "0000", "2026-03-05..2026-03-05", "2026-04..2026-03", "x:y", "9999"]
)
def test_parse_period_rejects_invalid_text(word):
    with pytest.raises(WrongChoice) as refused:
        compare.parse_period(word)
    assert "\n" not in str(refused.value)


@given(st.integers(1970, 2098), st.integers(1, 12))
def test_parse_period_range_of_one_unit_equals_unit(year: int, month: int) -> None:
    for word in (f"{year}", f"{year}-{month:02}"):
        assert compare.parse_period(f"{word}..{word}") == compare.parse_period(word)


@given(st.text())
def test_any_text_is_period_or_choice_or_rejected(word):
    if compare.parse_choice(word) is None:
        try:
            begin, end = compare.parse_period(word)
        except WrongChoice:
            return
        assert begin < end
