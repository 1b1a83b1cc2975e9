"""Tests of `links`: episodes, outliers, switch events, and false findings among equal links."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest
from fleet_history import history, write
from fleet_signals import BEGIN, DAY, END, Made, study
from fleet_views import text_of
from hypothesis import given
from hypothesis import strategies as st

from healthd.common.page import Page
from healthd.fleet.answers.document import Unanswerable
from healthd.fleet.answers.study import open_study
from healthd.fleet.statistics.multiplicity import benjamini_hochberg, holm

pytestmark = pytest.mark.one_python

try:  # only .venv has numpy and scipy; the marked tests run nowhere else
    import numpy as np

    from healthd.fleet.answers import links
except ModuleNotFoundError as error:
    if error.name not in ("numpy", "scipy"):
        raise

AT = BEGIN + DAY
P_VALUES = st.lists(st.floats(0, 1), max_size=30)


def asked(made, folder):
    with study(made, folder) as one:
        return links.links(one)


def sight(node, port, code, time):
    return links.Sighting("c1", node, port, code, time)


def fleet(nodes, switch_of=lambda at: f"leaf{at // 10}", days=30.0):
    return [links.ObservedNode("c1", f"n{at:03}", "h", switch_of(at), days) for at in range(nodes)]


def ports(nodes, each=8):
    return {("c1", row.node, inside): each for row in nodes for inside in (False, True)}


def test_what_a_port_tells_within_the_hour_is_one_episode_and_other_ports_and_kinds_are_others():
    flap, slow = "ib_flap/link_downed", "ib_link/slow"
    its = [sight("a", "p1", flap, time) for time in (7201, 0, 3600)]
    its += [sight("a", "p2", flap, 5), sight("a", "p1", slow, 5), sight("b", "p1", "eth_link/flapping", 5)]
    found = links.count_episodes(its)
    assert found["flaps"] == Counter({("c1", "a", "p1"): 2, ("c1", "a", "p2"): 1, ("c1", "b", "p1"): 1})
    assert found["downgrades"] == Counter({("c1", "a", "p1"): 1})
    assert found["errors"] == Counter()


@given(st.lists(st.builds(sight, st.sampled_from("ab"), st.just("p"), st.sampled_from(["ib_link/down"]),
                          st.integers(0, 50_000)), max_size=20), st.randoms())  # fmt: skip
def test_the_order_of_the_sights_says_nothing_and_episodes_are_no_more_than_they(its, random):
    found = links.count_episodes(its)
    assert links.count_episodes(random.sample(its, len(its))) == found
    assert sum(found["down"].values()) <= len(its)
    assert len(found["down"]) == len({row.node for row in its})


def test_a_port_that_flaps_ten_times_as_often_stands_out_and_one_that_did_twice_of_many_does_not():
    nodes = fleet(100)
    random = Random(1)
    its = Counter({("c1", f"n{random.randrange(100):03}", f"p{random.randrange(8)}"): 1 for _ in range(300)})
    its["c1", "n000", "p0"], its["c1", "n001", "p1"] = 10, 2
    found = links.worst_ports({"flaps": its}, nodes, ports(nodes))
    standing = [(row["node"], row["port"]) for row in found if row["outlier"]]
    assert standing == [("n000", "p0")]
    assert found[0]["expected"] == pytest.approx(sum(its.values()) / 800)


def test_one_bad_node_is_no_evidence_against_its_switch_and_eight_are():
    nodes = fleet(200)
    random = Random(2)
    base = Counter({("c1", f"n{random.randrange(200):03}", "p0"): 1 for _ in range(30)})
    one, many = Counter(base), Counter(base)
    one["c1", "n005", "p0"] = 40
    for at in range(50, 58):
        many["c1", f"n{at:03}", "p1"] = 5
    assert [row for row in links.worst_switches({"flaps": one}, nodes) if row["outlier"]] == []
    standing = [row["switch"] for row in links.worst_switches({"flaps": many}, nodes) if row["outlier"]]
    assert standing == ["leaf5"]


def test_of_fleets_whose_links_are_all_alike_at_most_one_in_twelve_names_a_port_or_a_switch():
    """At a level of 5 %, three of 60 fleets are expected to have one; more than seven occur in 2 % of trials."""
    nodes, named = fleet(60), 0
    for seed in range(60):
        random = np.random.default_rng(1000 + seed)
        its = Counter()
        for row in nodes:
            for port in range(8):
                if times := int(random.poisson(0.15)):
                    its["c1", row.node, f"p{port}"] = times
        found = [
            *links.worst_ports({"errors": its}, nodes, ports(nodes)),
            *links.worst_switches({"errors": its}, nodes),
        ]
        named += any(row["outlier"] for row in found)
    assert named <= 7


def test_three_nodes_of_a_switch_within_a_minute_are_an_event_of_the_switch_and_two_are_none():
    switch_of = {("c1", node): "leaf1" if node != "z" else "leaf2" for node in "abcz"}
    down = "ib_link/down"
    its = [
        sight("a", "p1", down, 100),
        sight("b", "p1", down, 160),
        sight("c", "p1", down, 161),
        sight("z", "p1", down, 130),
    ]
    assert links.switch_events(its, switch_of) == []
    its[2] = its[2]._replace(time=159)
    assert links.switch_events(its, switch_of) == [
        {"cluster": "c1", "switch": "leaf1", "time": 100, "nodes": ["a", "b", "c"]}
    ]


def test_a_fleet_is_told_by_kind_with_the_days_on_which_it_was_observed(tmp_path):
    made = Made()
    made.alive("ab", BEGIN - DAY, END + DAY)
    for node in "ab":
        made.node(node, gpu_model="h", switch="leaf1")
    made.seen("a", "ib_flap/link_downed", AT, "degraded", "level", subject="mlx5_0/1")
    made.seen("a", "ib_errors/symbol_rate", AT, "warning", subject="mlx5_1/1")
    made.seen("b", "pcie_link/slow", AT, "degraded", "level", subject="0000:07:00.0")
    told = asked(made, tmp_path)
    kinds = {row["kind"]: row for row in told["kinds"]}
    days = 2 * (END - BEGIN) / DAY
    assert kinds["flaps"]["port_days"] == pytest.approx(2 * days)
    assert kinds["pcie_downgrades"]["port_days"] == pytest.approx(days)
    assert kinds["errors"]["per_1000_port_days"] == pytest.approx(1000 / (2 * days))
    low, high = kinds["errors"]["interval"]
    assert low < kinds["errors"]["per_1000_port_days"] < high
    assert not links.has_findings(told)
    assert "No port and no switch has more problems than chance explains." in text_of(told, Page())


def test_an_empty_store_says_what_to_ingest_and_a_quiet_or_unobserved_one_has_no_rate(tmp_path):
    with pytest.raises(Unanswerable, match="no events"):
        asked(Made(), tmp_path / "empty")
    made = Made()
    made.line("a", AT, "alive")
    told = asked(made, tmp_path / "quiet")
    assert {(row["episodes"], row["per_1000_port_days"]) for row in told["kinds"]} == {(0, None)}
    assert (told["ports"], told["switches"], told["together"]) == ([], [], [])
    assert "No link had a problem" in text_of(told, Page())


def test_the_answer_is_the_same_whatever_the_order_of_the_rows(tmp_path):
    for seed in range(2):
        made = history(Random(seed), 30)
        documents = []
        for turn in range(2):
            folder = tmp_path / f"{seed}-{turn}"
            folder.mkdir()
            with open_study(write(made, folder, parts=1 + turn, random=Random(turn)), BEGIN, END) as one:
                documents.append(json.dumps(links.links(one), allow_nan=False))
        assert documents[0] == documents[1]


@given(P_VALUES)
def test_adjusted_values_keep_the_order_and_never_fall_and_holms_are_the_larger(p_values):
    for method in (holm, benjamini_hochberg):
        adjusted = method(p_values)
        assert all(p <= q <= 1 or q == pytest.approx(p) for p, q in zip(p_values, adjusted, strict=True))
        order = sorted(range(len(p_values)), key=lambda at: p_values[at])
        ranked = [adjusted[at] for at in order]
        assert ranked == sorted(ranked)
    assert all(a <= b + 1e-12 for a, b in zip(benjamini_hochberg(p_values), holm(p_values), strict=True))


def test_the_methods_find_what_their_papers_find():
    # Benjamini and Hochberg (1995), section 2.3: of 15 p-values, four pass their method at 5 % and three Bonferroni's.
    p_values = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262, 0.5719, 0.6528,
                0.7590, 1.0]  # fmt: skip
    assert sum(p < 0.05 for p in benjamini_hochberg(p_values)) == 4
    assert sum(p < 0.05 for p in holm(p_values)) == 3
    assert benjamini_hochberg([0.01], tests=10) == [0.1]


@pytest.mark.parametrize("named", [True, False])
def test_a_bad_node_stands_out_with_and_without_port_names(tmp_path, named: bool) -> None:
    made = Made()
    for number in range(60):
        node = f"n{number:02}"
        made.alive([node], BEGIN, END)
        for episode in range(12 if number == 7 else number % 4 == 0):
            made.seen(node, "ib_flap/link_downed", AT + episode * 5000, "degraded", subject="mlx5_0" if named else "")
    found = asked(made, tmp_path)
    assert [row["node"] for row in found["ports"] if row["outlier"]] == ["n07"]
    assert any("no port name" in note for note in found["notes"]) == (not named)
    assert "n07" in text_of(found, Page())
