"""Tests of node facts: a site's table, scontrol and sinfo, topology.conf, and the exclusions of squeue."""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path

import pytest
from fleet_reading import RecordedReading, numbered_lines, store_rows
from hypothesis import given
from hypothesis import strategies as st
from slurm_text import TYPED

from healthd.fleet.ingest import IngestError, IngestOptions, ingest
from healthd.fleet.sources import exclusions, node_facts, topology
from healthd.fleet.sources.lines import iterate_lines
from healthd.fleet.sources.node_facts import Facts, merge_facts, parse_gres


def parse_text(parse, text: str) -> tuple[list[tuple], RecordedReading]:
    noted = RecordedReading()
    return list(parse(numbered_lines(text), noted.reading)), noted


def test_table_expands_host_lists():
    found, noted = parse_text(
        node_facts.parse_any,
        "Node;GPU_model;gpus;partitions;rack\nn[1-2];H100;8;gpu,long;r1\nn3;;;;\n;H100;8;;\nn4;;eight;;\n",
    )
    same = Facts("H100", 8, "gpu,long", None, "r1")
    assert found == [("n1", same), ("n2", same), ("n3", Facts())]
    assert noted.unread_lines == [4, 5]


# src/api/node_info.c of Slurm 22.05 to 26.05 prints these fields in this order.
SCONTROL = """\
NodeName=gpu-1 Arch=x86_64 CoresPerSocket=16
   CPUAlloc=0 CPUEfctv=16 CPUTot=16 CPULoad=0.10
   AvailableFeatures=(null)
   ActiveFeatures=(null)
   Gres=gpu:h100:8(S:0-1),shard:32
   NodeAddr=10.0.0.1 NodeHostName=gpu-1 Version=22.05.8
   Partitions=gpu,long
   Comment=was Gres=gpu:a100:4 Partitions=old

NodeName=cpu-1 Arch=x86_64 CoresPerSocket=16 Gres=(null) NodeAddr=10.0.0.2 State=IDLE
"""


def test_scontrol_is_read_in_both_layouts():
    found, noted = parse_text(node_facts.parse_any, SCONTROL)
    assert found == [("gpu-1", Facts("h100", 8, "gpu,long")), ("cpu-1", Facts())]
    assert noted.unread == []
    one_line = SCONTROL.replace("\n   ", " ").replace("\n\n", "\n")
    assert parse_text(node_facts.parse_any, one_line)[0] == found


def test_invalid_record_is_unread():
    found, noted = parse_text(node_facts.parse_scontrol, "slurm_load_node error\n\nNodeName=n1 Arch=x\n")
    assert (found, noted.unread_lines) == ([], [1, 3])


def test_parse_scontrol_continues_record_after_blank_line():
    """Slurm 24.05 prints one before Reason= (github.com/awslabs/awsome-distributed-ai issue 195)."""
    text = (Path(__file__).parents[2] / "data/scontrol_show_node_24.05.txt").read_text()
    facts = Facts("nvidia-rtx-3090", 1, "compute100")
    found, noted = parse_text(node_facts.parse_scontrol, text)
    assert (found, noted.unread) == ([("dev-102-68", facts)], [])
    found, noted = parse_text(node_facts.parse_scontrol, f"{text}\n{text.replace('dev-102-68', 'n2')}")
    assert (found, noted.unread) == ([("dev-102-68", facts), ("n2", facts)], [])


def test_features_similar_to_gres_are_unread():
    text = SCONTROL.replace("AvailableFeatures=(null)", "AvailableFeatures=x Gres=gpu:a100:4")
    found, noted = parse_text(node_facts.parse_scontrol, text.replace("\n   ", " "))
    assert ([name for name, _ in found], noted.unread_lines) == (["cpu-1"], [1])


# Text that a user may type into a field of scontrol. A line with NodeName= at its start would begin a record.
IMITATION = [b" Gres=gpu:a100:4 ", b"NodeName=x", b"\n\n", b"\n   \n", b"\x85", b"\r"]


def typed_text(*imitation: bytes) -> st.SearchStrategy[bytes]:
    typed = st.lists(TYPED | st.sampled_from(imitation), max_size=4).map(b"".join)
    return typed.filter(lambda text: b"\nNodeName=" not in text)


BEFORE_GRES, AFTER_GRES = typed_text(*IMITATION), typed_text(*IMITATION, b" Partitions=old ")


@pytest.mark.parametrize("separator", [b"\n   ", b" "], ids=["lines", "oneliner"])
@given(
    features=BEFORE_GRES,
    comment=AFTER_GRES,
    extra=AFTER_GRES,
    reason=AFTER_GRES,
    partition=st.sampled_from(["gpu", "gro\u00dfer"]),
)
def test_typed_text_does_not_change_facts(separator, features, comment, extra, reason, partition):
    """The typed node is between two other nodes. Its facts are correct, or its lines are counted as unread."""
    nodes = []
    for name, typed in (("n1", b"x"), ("n2", None), ("n3", b"x")):
        fields = [
            b"NodeName=" + name.encode() + b" Arch=x86_64 CoresPerSocket=16",
            b"AvailableFeatures=" + (features if typed is None else typed),
            b"ActiveFeatures=" + (features if typed is None else typed),
            b"Gres=gpu:h100:8(S:0-1)",
            b"NodeAddr=10.0.0.1 NodeHostName=h Version=24.11.5",
            b"Partitions=" + partition.encode(),
            b"BootTime=2026-11-20T20:48:09",
            b"Reason=" + (reason if typed is None else typed) + b" [root@2026-11-22T10:00:00]",
            b"Comment=" + (comment if typed is None else typed),
            b"Extra=" + (extra if typed is None else typed),
        ]
        nodes.append(separator.join(fields) + b"\n")
    noted = RecordedReading()
    found = list(node_facts.parse_scontrol(iterate_lines(io.BytesIO(b"\n".join(nodes)), noted.reading), noted.reading))
    whole = Facts("h100", 8, partition)
    assert [name for name, _ in found if name != "n2"] == ["n1", "n3"]
    assert all(facts == whole for name, facts in found if name != "n2")
    typed_facts = [facts for name, facts in found if name == "n2"]
    assert typed_facts == [whole] or noted.unread


def test_sinfo_joins_partitions_of_node():
    found, _ = parse_text(
        node_facts.parse_any, "NODELIST|GRES|PARTITION\nn[1-2]|gpu:h100:4|gpu*\nn2|gpu:h100:4|long\nn3|(null)|cpu\n"
    )
    assert found == [
        ("n1", Facts("h100", 4, "gpu")),
        ("n2", Facts("h100", 4, "gpu,long")),
        ("n3", Facts(None, None, "cpu")),
    ]


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:h100:8(S:0-1)", ("h100", 8)),
        ("gpu:8", (None, 8)),
        ("gpu", (None, 1)),
        ("gpu:a100:4,gpu:v100:2", (None, 6)),
        ("gpu:h100:4(S:0,2),nic:2", ("h100", 4)),
        ("(null)", (None, None)),
        ("shard:h100:8,gpu_mem:80", (None, None)),
    ],
)
def test_parse_gres_gives_model_and_count(gres, gpus):
    assert parse_gres(gres) == gpus


def test_merge_facts_keeps_values_of_other_sources():
    known = {"n1": Facts("h100", 8, "gpu"), "n9": Facts("a100")}
    more = [("n1", Facts(switch="leaf1")), ("n2", Facts(rack="r2")), ("n1", Facts(gpus=7))]
    assert merge_facts(known, more) == {"n1": Facts("h100", 7, "gpu", "leaf1"), "n2": Facts(rack="r2")}


def test_switch_table_sets_racks_of_nodes():
    found, noted = parse_text(node_facts.parse_any, "switch,rack\nleaf[1-2],r1\nleaf3,\n,r9\nleaf[2,r1\n")
    assert found == [("", Facts(switch="leaf1", rack="r1")), ("", Facts(switch="leaf2", rack="r1"))]
    assert noted.unread_lines == [3, 4, 5]
    known = {"n1": Facts(switch="leaf1"), "n2": Facts(switch="leaf9"), "n3": Facts(switch="leaf2", rack="old")}
    assert merge_facts(known, found) == {"n1": Facts(switch="leaf1", rack="r1"), "n3": Facts(switch="leaf2", rack="r1")}


TREE = """\
# leaves   (topology.conf(5))
SwitchName=s0 Nodes=dev[0-1] LinkSpeed=100
switchname=s1 \\
   nodes=dev[2-3]  # the second
SwitchName=s3 Switches=s[0-1]
"""
# slurm_print_topo_record() of src/api/topo_info.c: a higher switch has all nodes below it.
PRINTED_TREE = """\
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=dev[0-1]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=dev[2-3]
SwitchName=s3 Level=1 LinkSpeed=1 Nodes=dev[0-3] Switches=s[0-1]
"""
BLOCKS = "BlockName=b1 BlockIndex=0 Nodes=dev[0-1] BlockSize=2\nBlockName=b2 Nodes=dev[2-3]\nBlockSizes=2,4\n"


@pytest.mark.parametrize(("text", "leaves"), [(TREE, "s0 s1"), (PRINTED_TREE, "s0 s1"), (BLOCKS, "b1 b2")])
def test_topology_gives_leaf_of_each_node(text, leaves):
    found, noted = parse_text(topology.parse, text)
    first, second = leaves.split()
    assert {node: facts.switch for node, facts in found} == {
        "dev0": first,
        "dev1": first,
        "dev2": second,
        "dev3": second,
    }
    assert noted.unread == []


def test_topology_counts_other_lines():
    assert parse_text(topology.parse, "NodeName=n1 CPUs=4\nSwitchName=s1 Nodes=n[2-1]\n")[1].unread_lines == [1, 2]


# `squeue -o '%A|%V|%x'` and `squeue -O JobID,SubmitTime,ExcNodes:30`, src/squeue/print.c
SQUEUE = "JOBID|SUBMIT_TIME|EXC_NODES\n7|1700000000|n[1-2]\n8|1700000000|\n9|1700000000|(null)\n10_2|1700000000|n1\n"


def test_squeue_names_excluded_nodes():
    found, noted = parse_text(exclusions.parse, SQUEUE)
    assert found == [("c1", None, 1700000000, node, "squeue", 7) for node in ("n1", "n2")]
    assert noted.unread_lines == [5]


def test_padded_columns_are_read_unless_possibly_cut():
    def padded(*cells: str) -> str:
        return f"{cells[0]:20}{cells[1]:20}{cells[2]:30}\n"

    text = padded("JOBID", "SUBMIT_TIME", "EXC_NODES") + padded("7", "2026-11-22T12:00:00", "n1,n5")
    found, noted = parse_text(exclusions.parse, text + padded("8", "2026-11-22T12:00:00", "n" * 30))
    assert found == [("c1", None, 1795348800, node, "squeue", 7) for node in ("n1", "n5")]
    assert noted.unread_lines == [3]


@given(st.text(max_size=200), st.sampled_from([node_facts.parse_any, topology.parse, exclusions.parse]))
def test_any_text_is_read_or_one_sentence(text, parse):
    with suppress(IngestError):
        parse_text(parse, text)


NAME = st.text("abcxyz019-", min_size=1, max_size=8).filter(lambda name: name[0] not in "-")


@given(st.dictionaries(NAME, st.lists(NAME, min_size=1, max_size=5, unique=True), max_size=5))
def test_any_tree_is_read_unchanged(leaves):
    text = "".join(f"SwitchName={leaf} Nodes={','.join(nodes)}\n" for leaf, nodes in leaves.items())
    found, _ = parse_text(topology.parse, text)
    assert [(node, facts.switch) for node, facts in found] == [
        (n, leaf) for leaf, nodes in leaves.items() for n in nodes
    ]


@pytest.mark.one_python
def test_facts_of_several_sources_join_in_any_order(tmp_path):
    (tmp_path / "nodes.csv").write_text("node,gpu_model,gpus\ndev[0-3],H100,8\n")
    (tmp_path / "topology.conf").write_text(TREE)
    rows = []
    for order in (1, -1):
        sources = [
            (node_facts.SOURCE, [str(tmp_path / "nodes.csv")]),
            (topology.SOURCE, [str(tmp_path / "topology.conf")]),
        ][::order]
        store = tmp_path / f"db{order}"
        result = ingest(str(store), sources, IngestOptions(1795400000, "c1"))
        assert (result.failed, result.unread.unread) == ([], {})
        rows.append(store_rows(store, "nodes"))
        assert ingest(str(store), sources, IngestOptions(1795400001, "c1")).unread.rows == {}, "a rerun adds nothing"
    assert rows[0] == rows[1]
    assert [(row["node"], row["gpus"], row["switch"]) for row in rows[0]] == [
        ("dev0", 8, "s0"),
        ("dev1", 8, "s0"),
        ("dev2", 8, "s1"),
        ("dev3", 8, "s1"),
    ]
