"""Tests of the blocks of Slurm's topology/block and of the largest job that they can run."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.common.slurm.blocks import BlockTopology, fits, largest_job, parse_topology

RACKS = "\n".join(f"BlockName=r{n} Nodes=n[{18 * n + 1}-{18 * n + 18}]" for n in range(4))


def topology(sizes: str = "", text: str = RACKS) -> BlockTopology:
    found = parse_topology(f"{text}\n{f'BlockSizes={sizes}' if sizes else ''}\n")
    assert found is not None
    return found


def test_topology_conf_and_scontrol_give_the_same_blocks() -> None:
    conf = "# racks\nblockname=b1 nodes=dev[0-1]\nBlockName=b2 \\\n  Nodes=dev[2-3] # second\nBlockSizes=2,4\n"
    scontrol = (
        "BlockName=b1 BlockIndex=0 Nodes=dev[0-1] BlockSize=2\n"
        "BlockName=b2 BlockIndex=1 Nodes=dev[2-3] BlockSize=2\n"
        "AggregatedBlock=b[1-2] BlockIndex=2 Nodes=dev[0-3] BlockSize=4\n"
    )
    found = parse_topology(conf)
    assert found == parse_topology(scontrol)
    assert found is not None
    assert (found.base_size, found.levels) == (2, (0, 1))
    assert [(block.name, sorted(block.nodes)) for block in found.blocks] == [
        ("b1", ["dev0", "dev1"]),
        ("b2", ["dev2", "dev3"]),
    ]


def test_topology_without_sizes_has_the_defaults_of_slurm() -> None:
    assert (topology().base_size, topology().levels) == (18, (0, 1, 2, 3, 4))


@pytest.mark.parametrize("text", ["", "SwitchName=s1 Nodes=n[1-2]\n", "# BlockName=b1 Nodes=n1\n"])
def test_text_without_blocks_is_no_topology(text: str) -> None:
    assert parse_topology(text) is None


@pytest.mark.parametrize(
    ("sizes", "available", "expected"),
    [
        ("18", (18, 0, 0, 0), 18),
        ("18", (16, 0, 0, 0), 16),  # one block: as many nodes as are available
        ("16", (18, 0, 0, 0), 18),  # more nodes than the base block size, in one block
        ("16", (17, 0, 0, 0), 17),
        ("18", (17, 18, 0, 0), 35),  # two blocks
        ("18", (6, 6, 6, 6), 6),  # a job of 7 to 18 nodes may use only one block
        ("16", (16, 16, 0, 0), 32),
        ("16", (8, 8, 8, 8), 8),
        ("18,36", (0, 18, 18, 0), 18),  # blocks 2 and 3 are in different pairs
        ("18,36", (18, 12, 18, 18), 66),  # more than a pair: anywhere
        ("18", (0, 0, 0, 0), 0),
    ],
)
def test_largest_job(sizes: str, available: tuple[int, ...], expected: int) -> None:
    assert largest_job(available, topology(sizes)) == expected


@given(st.lists(st.integers(0, 18), min_size=4, max_size=4), st.sampled_from(["", "18", "16", "18,36", "9,18,72"]))
def test_largest_job_is_between_the_largest_block_and_all_nodes(available: list[int], sizes: str) -> None:
    largest = largest_job(available, topology(sizes))
    assert max(available) <= largest <= sum(available)
    assert not largest or fits(largest, available, topology(sizes))


def test_scontrol_lines_may_have_any_order() -> None:
    assert parse_topology(
        "AggregatedBlock=b[1-2] BlockIndex=2 Nodes=dev[0-3] BlockSize=4\n"
        "BlockName=b1 BlockIndex=0 Nodes=dev[0-1] BlockSize=2\n"
        "BlockName=b2 BlockIndex=1 Nodes=dev[2-3] BlockSize=2\n"
    ) == topology("2,4", "BlockName=b1 Nodes=dev[0-1]\nBlockName=b2 Nodes=dev[2-3]")


@pytest.mark.parametrize("empty", ['BlockName=r Nodes=""', "BlockName=r", "BlockName=r BlockIndex=0 BlockSize=18"])
def test_block_without_nodes_keeps_its_place(empty: str) -> None:
    found = topology(text=f"{empty}\n{RACKS}")
    assert (found.base_size, len(found.blocks), found.blocks[0].nodes) == (18, 5, frozenset())


@pytest.mark.parametrize(
    "text",
    [
        "BlockName=b1 Nodes=n[1-4]\nBlockLevels=0-1",  # Slurm 23.11
        "BlockName=b1 BlockIndex=0 Nodes=n[1-4]",  # scontrol of Slurm 24.05
        "BlockName=b1 BlockIndex=0 Nodes=n[1-4] BlockSize=0",  # scontrol 24.11 with slurmctld 24.05
        'BlockName=b1 Nodes=""',
        "BlockName=b1",
        "BlockName=b1 Nodes=n[1-4]\nBlockSizes=4,2",
        "BlockName=b1 Nodes=n[1-4]\nBlockSizes=4,12",
        "BlockName=b1 Nodes=n[1-4]\nBlockSizes=x",
    ],
)
def test_topology_that_slurm_or_healthd_cannot_use_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"[Bb]lock"):
        parse_topology(text)


SCONTROL = (
    "BlockName={name}1 BlockIndex=0 Nodes={nodes}[1-2] BlockSize=2\n"
    "BlockName={name}2 BlockIndex=1 Nodes={nodes}[3-4] BlockSize=2\n"
    "AggregatedBlock={name}[1-2] BlockIndex=2 Nodes={nodes}[1-4] BlockSize=4\n"
)
SWITCHES = (
    "SwitchName=s0 Level=1 LinkSpeed=1 Nodes=n[1-8] Switches=s[1-2]\nSwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[1-4]\n"
)


def test_block_topology_beside_switches_is_read_alone() -> None:
    blocks = SCONTROL.format(name="b", nodes="n")
    assert parse_topology(SWITCHES + blocks) == parse_topology(blocks + SWITCHES) == parse_topology(blocks)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SCONTROL.format(name="b", nodes="n") + SCONTROL.format(name="c", nodes="m"), "BlockIndex=0"),
        (SCONTROL.format(name="b", nodes="n") * 2, "BlockIndex=0"),
        ("BlockName=b1 Nodes=n1\nBlockName=b1 Nodes=n2\n", "BlockName=b1 "),
        ("BlockName=b1 Nodes=n1\nBlockSizes=1\nBlockName=c1 Nodes=n2\nBlockSizes=2\n", "BlockSizes="),
        ("BlockName=b1 Nodes=n[1-4]\nBlockName=b2 Nodes=n[4-8]\nBlockSizes=4\n", "n4 is in the blocks b1 and b2"),
    ],
)
def test_several_topologies_or_blocks_of_a_node_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_topology(text)


@given(st.lists(st.sets(st.integers(0, 40)), min_size=1, max_size=6))
def test_each_node_of_a_topology_is_in_one_block(blocks: list[set[int]]) -> None:
    lines = [f"BlockName=b{at} Nodes={','.join(f'n{node}' for node in nodes)}" for at, nodes in enumerate(blocks)]
    text = "\n".join([*lines, "BlockSizes=1"])
    if sum(map(len, blocks)) > len(set().union(*blocks)):
        with pytest.raises(ValueError, match="is in the blocks"):
            parse_topology(text)
        return
    found = parse_topology(text)
    assert found is not None
    available = [len(block.nodes) for block in found.blocks]
    assert largest_job(available, found) <= len(set().union(*blocks))


def test_many_continuation_lines_are_one_line() -> None:
    found = topology(text="BlockName=b1 \\\n" + "\\\n" * 200_000 + "Nodes=n[1-4]")
    assert [sorted(block.nodes) for block in found.blocks] == [["n1", "n2", "n3", "n4"]]


WORDS = st.sampled_from(
    [
        *("BlockName=a", "BlockName=b", "AggregatedBlock=a", "BlockIndex=0", "BlockLevels=0-1", "# comment"),
        *('Nodes=""', "Nodes=dev[0-3]", "Nodes=dev[", "Nodes=", "BlockSizes=2,4", "BlockSizes=4", "BlockSizes=0"),
        *("BlockSize=2", "BlockSize=4", "BlockSize=0", "\\", "\n", "\n", "\n"),
    ]
)
TEXTS = st.lists(WORDS, max_size=30).map(" ".join) | st.text("BlockNameSizes=dev[0-9],# \\\n", max_size=200)


@given(TEXTS)
def test_any_text_is_a_topology_or_a_value_error(text: str) -> None:
    try:
        found = parse_topology(text)
    except ValueError:
        return
    assert found is None or (found.blocks and found.base_size > 0)
