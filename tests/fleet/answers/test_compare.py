"""Tests of `compare`: equal sides do not differ, and real differences are found."""

from __future__ import annotations

import json
from random import Random

import pytest
from fleet_history import history, write
from fleet_signals import BEGIN, DAY, END, Made, study
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


def of_nodes(counts, name="all_codes", days=30.0):
    exposures = [days] * len(counts)
    return Measure(
        name, name, "per 1000 node-days", 1000.0, float(sum(counts)), sum(exposures), (Units(counts, exposures),)
    )


def differs(told):
    return [row["measure"] for row in told["measures"] if row["differs"]]


COUNTS = st.lists(st.integers(0, 60), min_size=1, max_size=40)


@given(COUNTS)
def test_a_side_compared_with_itself_has_the_ratio_one_and_nothing_differs(counts):
    told = compare.compare_sides(side("x", of_nodes(counts)), side("x", of_nodes(counts)))
    assert differs(told) == []
    for row in told["measures"]:
        assert row["ratio"] == (None if not sum(counts) else pytest.approx(1))
        assert row["interval"] is None or row["interval"][0] <= 1
        assert row["interval"] is None or row["interval"][1] is None or row["interval"][1] >= 1


@given(COUNTS, COUNTS)
def test_the_two_sides_exchanged_give_the_inverse_ratio_and_the_same_p(a, b):
    one = compare.ratio_row(of_nodes(a), of_nodes(b))
    other = compare.ratio_row(of_nodes(b), of_nodes(a))
    assert one["p_value"] == pytest.approx(other["p_value"])
    if sum(a) and sum(b):
        assert one["ratio"] * other["ratio"] == pytest.approx(1)
        low, high = one["interval"][0], other["interval"][1]
        # The inverse of a bound near zero is too large for a float.
        assert low * high == pytest.approx(1, rel=1e-6) if high is not None and high < 1e6 else low < 1e-5
    assert one["dispersion"] >= 1


@pytest.mark.parametrize("dispersion", [1, 3, 7])
def test_of_300_comparisons_in_which_nothing_differs_at_most_one_in_twenty_finds_something(dispersion):
    """Compare seven measures of 100 nodes each. The counts have 1, 3 or 7 times the variance of independent counts.

    LANL's failure counts have 3 to 7 times. A level of 5 % allows 15 false findings in 300 comparisons.
    """
    found = 0
    for seed in range(300):
        random = np.random.default_rng(10_000 * dispersion + seed)
        sides = [side(name, *(of_nodes(drawn(random, dispersion), f"m{n}") for n in range(7))) for name in "AB"]
        found += bool(differs(compare.compare_sides(*sides)))
    assert found <= 15


def drawn(random, dispersion, mean=0.5, nodes=100):
    """Return negative binomial counts with variance / mean = dispersion."""
    if dispersion == 1:
        return [int(n) for n in random.poisson(mean, nodes)]
    return [int(n) for n in random.negative_binomial(mean / (dispersion - 1), 1 / dispersion, nodes)]


def test_twice_as_many_failures_of_independent_nodes_are_found_and_a_loop_of_one_node_is_not():
    assert differs(compare.compare_sides(side("A", of_nodes([1] * 100)), side("B", of_nodes([2] * 100)))) == [
        "all_codes"
    ]
    loop = [1] * 99 + [101]
    assert differs(compare.compare_sides(side("A", of_nodes([1] * 100)), side("B", of_nodes(loop)))) == []


def jobs(random, share, count=3000, users=300):
    """Return the measures of random jobs of 30 days. Each job completes with probability `share`."""
    ok = random.random(count) < share
    by_unit = []
    for units in (random.integers(0, 30, count), random.integers(0, users, count)):
        rows = []
        for unit in np.unique(units):
            its = ok[units == unit]
            completed = int(its.sum())
            ended = compare.EndedJobs(str(unit), len(its), completed, len(its) - completed, 0, 0, 0, float(len(its)))
            rows.append(ended)
        by_unit.append(rows)
    return compare.job_measures([], 100.0, by_unit)


def test_ninety_and_ninety_three_of_a_hundred_of_3000_jobs_are_told_apart():
    found = 0
    for seed in range(100):
        random = np.random.default_rng(seed)
        told = compare.compare_sides(side("A", *jobs(random, 0.90)), side("B", *jobs(random, 0.93)))
        found += "completed" in differs(told)
    assert found >= 90


@pytest.mark.parametrize(
    ("a", "b", "completed"), [(3000, 3000, 0.9), (20, 20, 0.5), (2000, 20, 0.97), (300, 300, 0.02)]
)
def test_of_200_pairs_of_equal_shares_at_most_one_in_twenty_is_told_apart(a, b, completed):
    found = 0
    for seed in range(200):
        random = np.random.default_rng(1000 + seed)
        told = compare.compare_sides(side("A", *jobs(random, completed, a)), side("B", *jobs(random, completed, b)))
        found += bool(differs(told))
    assert found <= 10


SHARES = st.integers(1, 400).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total)))


@given(SHARES, SHARES, st.floats(1, 9))
def test_a_share_is_within_0_and_1_and_the_ratio_of_two_leaves_1_out_where_p_is_small(a, b, effect):
    def measure(found, of):
        return Measure("completed", "", "of all", 1.0, float(found), float(of), (Units([found], [of]),))

    row = compare.ratio_row(measure(*a), measure(*b))
    for which in "ab":
        low, high = row[which]["interval"]
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


def test_what_cannot_differ_is_shown_but_not_tested_and_makes_nothing_else_harder_to_tell():
    def counted(*others):
        return compare.compare_sides(side("A", of_nodes([1] * 100), *others), side("B", of_nodes([2] * 100), *others))

    nothing = [of_nodes([0] * 100, f"m{number}") for number in range(9)]
    among = counted(*nothing, of_nodes([0] * 100, "unexposed", days=0.0))
    assert among["measures"][0] == counted()["measures"][0]
    assert [row["adjusted"] for row in among["measures"][1:]] == [None] * 10
    assert text_of(among, Page())


def test_nodes_on_both_sides_are_named_as_what_hides_a_difference():
    def of(nodes, chosen):
        return Side(chosen, BEGIN, END, {"partition": chosen}, (of_nodes([1, 2]),), (), {}, frozenset(nodes))

    a, b = {("c1", "n1"), ("c1", "n2")}, {("c1", "n2"), ("c1", "n3")}
    (note,) = compare.compare_sides(of(a, "x"), of(b, "y"))["notes"]
    assert note.startswith("1 of the 3 nodes are on both sides")
    assert not compare.compare_sides(of(a, "x"), of(b - a, "y"))["notes"]


@pytest.mark.parametrize(
    ("a", "b"), [("2026-03", "2026-03"), ("2026-03", "2026-03-01..2026-04-01"), ("partition:x", "partition:x")]
)
def test_a_side_beside_itself_is_refused(a, b, tmp_path, capsys):
    assert main(["fleet", "compare", a, b, "--db", str(tmp_path)]) == 64
    assert "are the same" in capsys.readouterr().err


def test_of_several_groupings_the_one_that_spreads_most_counts():
    def measure(count, users):
        each = [count // users] * users
        days = Units([count / 30] * 30, [100.0] * 30)
        return Measure("failed", "", "per 1000 jobs", 1000.0, count, 3000.0, (days, Units(each, [0.0] * users)))

    assert compare.dispersion(measure(100, 100), measure(100, 100)) == 1.0
    assert compare.dispersion(measure(100, 2), measure(100, 2)) > 50


def test_a_check_that_looked_on_one_side_only_is_not_compared_nor_counted_in_the_sum():
    def codes(flaps):
        return (
            of_nodes([3 + flaps] * 20),
            of_nodes([3] * 20, "code gpu_xid/79"),
            *([of_nodes([flaps] * 20, "code ib_flap/link_downed")] if flaps else []),
        )

    before = side("A", *codes(0), looked={"gpu_xid": 600})
    after = side("B", *codes(9), looked={"gpu_xid": 600, "ib_flap": 600})
    told = compare.compare_sides(before, after)
    assert differs(told) == []
    assert {row["measure"]: row["ratio"] for row in told["measures"]} == {"all_codes": 1.0, "code gpu_xid/79": 1.0}
    assert any("ib_flap" in note for note in told["notes"])
    everywhere = [side(one.name, *one.measures, looked={"gpu_xid": 600, "ib_flap": 600}) for one in (before, after)]
    assert differs(compare.compare_sides(*everywhere)) == [
        "code ib_flap/link_downed"
    ]  # all_codes does not report the difference again


def test_a_code_that_one_side_never_saw_is_none_of_as_long_a_time():
    told = compare.compare_sides(
        side("A", of_nodes([0] * 40)), side("B", of_nodes([1] * 40), of_nodes([1] * 40, "code mount/missing"))
    )
    (row,) = [row for row in told["measures"] if row["measure"] == "code mount/missing"]
    assert (row["a"]["amount"], row["a"]["rate"], row["ratio"], row["interval"][1], row["differs"]) == (
        0,
        0,
        None,
        None,
        True,
    )


def periods(made, folder, chosen=None):
    half = BEGIN + (END - BEGIN) // 2
    with study(made, folder / "a", chosen, BEGIN, half) as a, study(made, folder / "b", chosen, half, END) as b:
        return compare.compare(a, b, "first", "second")


def crashing():
    """Return 200 jobs in each half; in the second half every fifth job ends NODE_FAIL."""
    made = Made()
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


def test_a_half_in_which_the_nodes_end_jobs_differs_in_r_f_and_says_so(tmp_path):
    told = periods(crashing(), tmp_path)
    assert {"r_f", "node_fail"} <= set(differs(told))
    assert compare.has_findings(told)
    text = text_of(told, Page())
    assert "A is first, B is second." in text
    assert "Failures of jobs > 128 GPUs (r_f), per 1000 node-days: B has" in text
    shares = {row["measure"]: row for row in told["measures"]}
    for which in "ab":
        amounts = [shares[state][which]["amount"] for state in ("completed", "node_fail")]
        assert sum(amounts) == shares["completed"][which]["exposure"]


def test_a_time_of_which_no_node_states_were_read_is_no_time_in_service(tmp_path):
    made, half = Made(), BEGIN + (END - BEGIN) // 2
    for node in "abcdefgh":
        made.node(node)
        made.out(node, half + HOUR, half + DAY)
    made.alive("a")
    made.read("node_states", half, END)
    told = periods(made, tmp_path)
    its = next(row for row in told["measures"] if row["measure"] == "unavailable")
    assert (its["a"]["exposure"], its["a"]["rate"]) == (0, None)
    assert its["b"]["exposure"] == pytest.approx(8 * (END - half) / DAY)
    assert its["b"]["amount"] == pytest.approx(8 * (DAY - HOUR) / DAY)
    assert differs(told) == []


def test_where_one_side_has_nothing_of_it_the_sentence_names_both_and_no_ratio(tmp_path):
    made, half = Made(), BEGIN + (END - BEGIN) // 2
    for node in range(40):
        made.node(f"n{node}")
        made.out(f"n{node}", half + HOUR, half + DAY)
    made.alive("a")
    made.read("node_states", BEGIN, END)
    told = periods(made, tmp_path)
    assert differs(told) == ["unavailable"]
    assert list(view_of(told).sentences)[1].endswith("more than A's 0.0 %.")


def test_two_choices_of_one_time_can_be_compared_too(tmp_path):
    made = Made()
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
        told = compare.compare(x, y, "partition:x", "partition:y")
    assert (told["filters"], told["a"]["filters"], told["b"]["filters"]) == ({}, {"partition": "x"}, {"partition": "y"})
    rates = {row["measure"]: (row["a"]["rate"], row["b"]["rate"]) for row in told["measures"]}
    assert (rates["failed"], rates["completed"]) == ((1.0, 0.0), (0.0, 1.0))


def test_an_empty_store_says_what_to_ingest_and_one_of_a_single_job_compares_nothing(tmp_path):
    with pytest.raises(Unanswerable, match="the store has no jobs"):
        periods(Made(), tmp_path / "empty")
    made = Made()
    made.job("a", AT, None, "RUNNING")
    told = periods(made, tmp_path / "one")
    assert differs(told) == []
    json.dumps(told, allow_nan=False)


def test_the_answer_is_the_same_whatever_the_order_of_the_rows(tmp_path):
    for seed in range(2):
        made = history(Random(seed), 30)
        documents = []
        for turn in range(2):
            sides = []
            for begin, end in ((BEGIN, BEGIN + DAY), (BEGIN + DAY, END)):
                folder = tmp_path / f"{seed}-{turn}-{begin}"
                folder.mkdir()
                with open_study(write(made, folder, parts=1 + turn, random=Random(turn)), begin, end) as one:
                    sides.append(compare.measure_side(one, "x"))
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
def test_a_period_is_a_year_a_month_a_day_or_from_to(word, begin, end):
    assert compare.parse_period(word) == compare.parse_period(f"{begin}..{end}")


@pytest.mark.parametrize(
    "word", ["", "..", "2026-13", "2026-02-30", "0000", "2026-03-05..2026-03-05", "2026-04..2026-03", "x:y", "9999"]
)
def test_what_is_no_period_is_refused_with_a_sentence(word):
    with pytest.raises(WrongChoice) as refused:
        compare.parse_period(word)
    assert "\n" not in str(refused.value)


@given(st.integers(1970, 2098), st.integers(1, 12))
def test_a_range_of_one_month_or_year_is_that_month_or_year(year: int, month: int) -> None:
    for word in (f"{year}", f"{year}-{month:02}"):
        assert compare.parse_period(f"{word}..{word}") == compare.parse_period(word)


@given(st.text())
def test_any_text_is_a_period_a_choice_or_refused(word):
    if compare.parse_choice(word) is None:
        try:
            begin, end = compare.parse_period(word)
        except WrongChoice:
            return
        assert begin < end
