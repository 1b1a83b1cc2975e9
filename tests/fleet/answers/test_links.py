"""Tests of `links`: episodes, outliers, switch events, and false findings among equal links."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest
from fleet_history import history, write_parquet
from fleet_signals import BEGIN, DAY, END, HistoryBuilder, study
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


def links_of(made, folder):
    with study(made, folder) as opened:
        return links.links(opened)


def sighting(node, port, code, time):
    return links.Sighting("c1", node, port, code, time)


def fleet(nodes, switch_of=lambda at: f"leaf{at // 10}", days=30.0):
    return [links.ObservedNode("c1", f"n{at:03}", "h", switch_of(at), days) for at in range(nodes)]


def ports(nodes, each=8):
    return {("c1", row.node, inside): each for row in nodes for inside in (False, True)}


def test_count_episodes_merges_sightings_of_port_within_one_hour():
    flap, slow = "ib_flap/link_downed", "ib_link/slow"
    sightings = [sighting("a", "p1", flap, time) for time in (7201, 0, 3600)]
    sightings += [
        sighting("a", "p2", flap, 5),
        sighting("a", "p1", slow, 5),
        sighting("b", "p1", "eth_link/flapping", 5),
    ]
    found = links.count_episodes(sightings)
    assert found["flaps"] == Counter({("c1", "a", "p1"): 2, ("c1", "a", "p2"): 1, ("c1", "b", "p1"): 1})
    assert found["downgrades"] == Counter({("c1", "a", "p1"): 1})
    assert found["errors"] == Counter()


@given(st.lists(st.builds(sighting, st.sampled_from("ab"), st.just("p"), st.sampled_from(["ib_link/down"]),
                          st.integers(0, 50_000)), max_size=20), st.randoms())  # fmt: skip
def test_count_episodes_ignores_order_and_never_exceeds_sightings(sightings, random):
    found = links.count_episodes(sightings)
    assert links.count_episodes(random.sample(sightings, len(sightings))) == found
    assert sum(found["down"].values()) <= len(sightings)
    assert len(found["down"]) == len({row.node for row in sightings})


def test_worst_ports_marks_only_clear_outlier():
    nodes = fleet(100)
    random = Random(1)
    counts = Counter({("c1", f"n{random.randrange(100):03}", f"p{random.randrange(8)}"): 1 for _ in range(300)})
    counts["c1", "n000", "p0"], counts["c1", "n001", "p1"] = 10, 2
    found = links.worst_ports({"flaps": counts}, nodes, ports(nodes))
    outliers = [(row["node"], row["port"]) for row in found if row["outlier"]]
    assert outliers == [("n000", "p0")]
    assert found[0]["expected"] == pytest.approx(sum(counts.values()) / 800)


def test_worst_switches_needs_several_bad_nodes():
    nodes = fleet(200)
    random = Random(2)
    base = Counter({("c1", f"n{random.randrange(200):03}", "p0"): 1 for _ in range(30)})
    single_bad_node, eight_bad_nodes = Counter(base), Counter(base)
    single_bad_node["c1", "n005", "p0"] = 40
    for at in range(50, 58):
        eight_bad_nodes["c1", f"n{at:03}", "p1"] = 5
    assert [row for row in links.worst_switches({"flaps": single_bad_node}, nodes) if row["outlier"]] == []
    outliers = [row["switch"] for row in links.worst_switches({"flaps": eight_bad_nodes}, nodes) if row["outlier"]]
    assert outliers == ["leaf5"]


def test_equal_links_yield_outliers_in_at_most_7_of_60_fleets():
    """At a level of 5 %, three of 60 fleets are expected to have one; more than seven occur in 2 % of trials."""
    nodes, named = fleet(60), 0
    for seed in range(60):
        random = np.random.default_rng(1000 + seed)
        counts = Counter()
        for row in nodes:
            for port in range(8):
                if times := int(random.poisson(0.15)):
                    counts["c1", row.node, f"p{port}"] = times
        found = [
            *links.worst_ports({"errors": counts}, nodes, ports(nodes)),
            *links.worst_switches({"errors": counts}, nodes),
        ]
        named += any(row["outlier"] for row in found)
    assert named <= 7


def test_switch_event_needs_three_nodes_within_one_minute():
    switch_of = {("c1", node): "leaf1" if node != "z" else "leaf2" for node in "abcz"}
    down = "ib_link/down"
    sightings = [
        sighting("a", "p1", down, 100),
        sighting("b", "p1", down, 160),
        sighting("c", "p1", down, 161),
        sighting("z", "p1", down, 130),
    ]
    assert links.switch_events(sightings, switch_of) == []
    sightings[2] = sightings[2]._replace(time=159)
    assert links.switch_events(sightings, switch_of) == [
        {"cluster": "c1", "switch": "leaf1", "time": 100, "nodes": ["a", "b", "c"]}
    ]


def test_links_has_rates_by_kind_and_observed_days(tmp_path):
    made = HistoryBuilder()
    made.alive("ab", BEGIN - DAY, END + DAY)
    for node in "ab":
        made.node(node, gpu_model="h", switch="leaf1")
    made.condition("a", "ib_flap/link_downed", AT, "degraded", "level", subject="mlx5_0/1")
    made.condition("a", "ib_errors/symbol_rate", AT, "warning", subject="mlx5_1/1")
    made.condition("b", "pcie_link/slow", AT, "degraded", "level", subject="0000:07:00.0")
    answer = links_of(made, tmp_path)
    kinds = {row["kind"]: row for row in answer["kinds"]}
    days = 2 * (END - BEGIN) / DAY
    assert kinds["flaps"]["port_days"] == pytest.approx(2 * days)
    assert kinds["pcie_downgrades"]["port_days"] == pytest.approx(days)
    assert kinds["errors"]["per_1000_port_days"] == pytest.approx(1000 / (2 * days))
    low, high = kinds["errors"]["interval"]
    assert low < kinds["errors"]["per_1000_port_days"] < high
    assert not links.has_findings(answer)
    assert "No port or switch" in text_of(answer, Page())


def test_links_handles_empty_quiet_and_unobserved_store(tmp_path):
    with pytest.raises(Unanswerable, match="no events"):
        links_of(HistoryBuilder(), tmp_path / "empty")
    made = HistoryBuilder()
    made.line("a", AT, "alive")
    answer = links_of(made, tmp_path / "quiet")
    assert {(row["episodes"], row["per_1000_port_days"]) for row in answer["kinds"]} == {(0, None)}
    assert (answer["ports"], answer["switches"], answer["together"]) == ([], [], [])
    assert "No link " in text_of(answer, Page())


def test_links_ignores_order_of_rows(tmp_path):
    for seed in range(2):
        made = history(Random(seed), 30)
        documents = []
        for turn in range(2):
            folder = tmp_path / f"{seed}-{turn}"
            folder.mkdir()
            with open_study(write_parquet(made, folder, parts=1 + turn, random=Random(turn)), BEGIN, END) as opened:
                documents.append(json.dumps(links.links(opened), allow_nan=False))
        assert documents[0] == documents[1]


@given(P_VALUES)
def test_adjusted_p_values_keep_order_and_holm_is_larger(p_values):
    for method in (holm, benjamini_hochberg):
        adjusted = method(p_values)
        assert all(p <= q <= 1 or q == pytest.approx(p) for p, q in zip(p_values, adjusted, strict=True))
        order = sorted(range(len(p_values)), key=lambda at: p_values[at])
        ranked = [adjusted[at] for at in order]
        assert ranked == sorted(ranked)
    assert all(a <= b + 1e-12 for a, b in zip(benjamini_hochberg(p_values), holm(p_values), strict=True))


def test_adjustments_match_published_example():
    # Benjamini and Hochberg (1995), section 2.3: of 15 p-values, four pass their method at 5 % and three Bonferroni's.
    p_values = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262, 0.5719, 0.6528,
                0.7590, 1.0]  # fmt: skip
    assert sum(p < 0.05 for p in benjamini_hochberg(p_values)) == 4
    assert sum(p < 0.05 for p in holm(p_values)) == 3
    assert benjamini_hochberg([0.01], tests=10) == [0.1]


@pytest.mark.parametrize("named", [True, False])
def test_bad_node_is_outlier_with_and_without_port_names(tmp_path, named: bool) -> None:
    made = HistoryBuilder()
    for number in range(60):
        node = f"n{number:02}"
        made.alive([node], BEGIN, END)
        for episode in range(12 if number == 7 else number % 4 == 0):
            made.condition(
                node, "ib_flap/link_downed", AT + episode * 5000, "degraded", subject="mlx5_0" if named else ""
            )
    found = links_of(made, tmp_path)
    assert [row["node"] for row in found["ports"] if row["outlier"]] == ["n07"]
    assert any("no port name" in note for note in found["notes"]) == (not named)
    assert "n07" in text_of(found, Page())
