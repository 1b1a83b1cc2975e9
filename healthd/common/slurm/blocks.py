"""Blocks of Slurm's topology/block: their nodes, and the largest job that fits into the available nodes.

    BlockName=rack1 Nodes=gpu-[001-018]                              topology.conf, Slurm 24.05 or later
    BlockSizes=18,36
    BlockName=rack1 BlockIndex=0 Nodes=gpu-[001-018] BlockSize=18    scontrol show topology, Slurm 24.11 or later
    AggregatedBlock=rack[1-2] BlockIndex=2 Nodes=gpu-[001-036] BlockSize=36    (also for topology.yaml)

Rules (topology.conf(5) of Slurm 24.11; github.com/SchedMD/slurm, src/plugins/topology/block: block_record.c
_read_topo_file() and block_record_validate(), topology_block.c _print_topo_record(), eval_nodes_block.c
eval_nodes_block(); CHANGELOG/slurm-24.05.md: "Replaced the BlockLevels with BlockSizes in topology.conf"):

- The first of BlockSizes is the planning base block size; without it, the size of the first block that has nodes. A
  block may have more nodes than the base block size, for example 18 nodes with a base block size of 16.
- A block without nodes counts as one of the blocks that follow each other.
- The other BlockSizes are base block sizes times a power of two, 2^level. They enable the aggregated blocks of this
  level: 2^level blocks that follow each other. Without BlockSizes, the levels 0 to 4 are enabled.
- A job of N nodes needs ceil(N / base block size) blocks. It runs in one aggregated block of the smallest enabled level
  with as many blocks, or anywhere if no level is large enough. There it uses at most as many blocks (of the next lower
  enabled level) as it would need if all their nodes were available.

So a job of at most the base block size fits if one block has as many available nodes.

Several topologies (topology.yaml, Slurm 25.05 or later): `scontrol show topology [NAME]` prints one topology, which is
the default one without a name, and does not print its name (src/scontrol/info_node.c, scontrol_print_topo()). Each
output counts its blocks from BlockIndex=0. Slurm accepts a node in two blocks, but the largest job would then count the
node twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from healthd.common.slurm.hostlist import expand
from healthd.common.text import is_decimal, printable, regex
from healthd.common.values import Value

_WORD = regex(r"(?<![A-Za-z_])([A-Za-z_]+)=(\"[^\"]*\"|\S+)")
_MAX_LEVEL = 15
_DEFAULT_LEVELS = (0, 1, 2, 3, 4)


class Block(Value, frozen=True):
    name: str
    nodes: frozenset[str]


class BlockTopology(Value, frozen=True):
    """The blocks in Slurm's order.

    Attributes:
        base_size: planning base block size, in nodes.
        levels: enabled levels, ascending; always with 0.
    """

    blocks: tuple[Block, ...]
    base_size: int
    levels: tuple[int, ...]


def parse_topology(text: str) -> BlockTopology | None:
    """Return the blocks in topology.conf or in the output of `scontrol show topology`, or None if there are none.

    Raises ValueError, also if the text has several block topologies, or a node is in two blocks. Switches are ignored,
    so the text may have other topologies beside the one with blocks.
    """
    blocks: list[Block] = []
    sizes: list[int] = []
    keys: list[str] = []
    is_scontrol = False
    for line in _lines(text):
        parameters = {name.lower(): value.strip('"') for name, value in _WORD.findall(line)}
        if "blocklevels" in parameters:
            raise ValueError("BlockLevels= is from Slurm 23.11; healthd needs BlockSizes= (Slurm 24.05 or later)")
        if "blockindex" in parameters:
            is_scontrol = True
            keys.append(f"BlockIndex={parameters['blockindex']}")
            if parameters.get("blocksize", "0") == "0":
                raise ValueError(
                    "scontrol show topology printed a block without BlockSize=; use topology.conf, or scontrol and "
                    "slurmctld 24.11 or later without SLURM_TOPO_LEN"
                )
            sizes.append(_size(parameters["blocksize"]))
        elif "blocksizes" in parameters:
            keys.append("BlockSizes=")
            sizes += [_size(size) for size in parameters["blocksizes"].split(",")]
        if "blockname" in parameters:
            keys.append(f"BlockName={parameters['blockname']}")
            blocks.append(Block(parameters["blockname"], frozenset(expand(parameters.get("nodes", "")))))
    if not blocks:
        return None
    _check_single(keys, blocks)
    if not sizes:
        base = next((len(block.nodes) for block in blocks if block.nodes), 0)
        if not base:
            raise ValueError("no block has nodes, and there is no BlockSizes=")
        return BlockTopology(tuple(blocks), base, _DEFAULT_LEVELS)
    base = min(sizes) if is_scontrol else sizes[0]
    levels = {_level(size, base) for size in sizes}
    return BlockTopology(tuple(blocks), base, tuple(sorted({0, *levels})))


def _check_single(keys: Sequence[str], blocks: Sequence[Block]) -> None:
    """Raise ValueError if one of the keys, which are unique in a topology, occurs twice, or a node is in two blocks."""
    repeated = next((key for key, count in Counter(keys).items() if count > 1), "")
    if repeated:
        raise ValueError(
            f"{printable(repeated)[:80]} occurs twice; healthd can read only one block topology: use topology.conf or "
            "the output of one scontrol show topology NAME"
        )
    block_by_node: dict[str, str] = {}
    for block in blocks:
        node = min(block.nodes & block_by_node.keys(), default="")
        if node:
            names = f"{printable(block_by_node[node])[:64]} and {printable(block.name)[:64]}"
            raise ValueError(f"node {node[:64]} is in the blocks {names}; list it in only one block")
        block_by_node |= dict.fromkeys(block.nodes, block.name)


def largest_job(available: Sequence[int], topology: BlockTopology) -> int:
    """Return the number of nodes of the largest job that fits, if each of the topology's blocks has this many available
    nodes."""
    return next((nodes for nodes in range(sum(available), 0, -1) if fits(nodes, available, topology)), 0)


def fits(nodes: int, available: Sequence[int], topology: BlockTopology) -> bool:
    """Return True if a job of this many nodes fits."""
    needed_level = math.ceil(math.log2(math.ceil(nodes / topology.base_size)))
    lower_level = max((level for level in topology.levels if level < needed_level), default=0)
    level = min((level for level in topology.levels if level >= needed_level), default=None)
    size = len(available) if level is None else 2**level
    lower_size = 2**lower_level
    max_lower_blocks = math.ceil(nodes / (lower_size * topology.base_size))
    for first in range(0, len(available), size):
        block = available[first : first + size]
        lower_blocks = sorted(
            (sum(block[at : at + lower_size]) for at in range(0, len(block), lower_size)), reverse=True
        )
        if sum(lower_blocks[:max_lower_blocks]) >= nodes:
            return True
    return False


def _lines(text: str) -> Iterator[str]:
    """Yield the lines without comments. A backslash at the end of a line joins it with the next line."""
    parts: list[str] = []
    for line in text.split("\n"):
        code = line.partition("#")[0].rstrip()
        parts.append(code.removesuffix("\\"))
        if not code.endswith("\\"):
            yield " ".join(parts)
            parts.clear()
    yield " ".join(parts)


def _size(text: str) -> int:
    if not is_decimal(text.strip()) or not 0 < len(text.strip()) <= 6 or int(text) == 0:
        raise ValueError(f"not a block size: {text[:40]!r}")
    return int(text)


def _level(size: int, base: int) -> int:
    blocks, rest = divmod(size, base)
    level = blocks.bit_length() - 1
    if rest or blocks != 2 ** max(level, 0) or level > _MAX_LEVEL:
        raise ValueError(f"block size {size} is not the base block size {base} times a power of two")
    return level
