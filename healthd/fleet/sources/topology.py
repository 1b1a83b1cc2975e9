"""Leaf switch of each node, from topology.conf or `scontrol show topology` (also for topology.yaml).

    SwitchName=leaf1 Nodes=gpu-[001-032]        topology/tree: the switch that names the node is its leaf
    SwitchName=spine Switches=leaf[1-4]
    BlockName=block1 Nodes=gpu-[001-018]        topology/block: the block
    RingName=ring1 Nodes=gpu-[001-008]          topology/ring

(topology.conf(5) of Slurm 22.05 to 26.05; github.com/SchedMD/slurm, src/api/topo_info.c, slurm_print_topo_record(), and
src/plugins/topology/). In scontrol's output, each line has a Level, and the line of a higher switch also names the
nodes below it; the leaf is the switch with level 0. Parameter names are case-insensitive, as in Slurm; "#" begins a
comment, "\\" at the end of a line joins it with the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from healthd.common.slurm.hostlist import expand
from healthd.common.text import regex
from healthd.fleet.ingest import Run, Source
from healthd.fleet.sources.node_facts import Facts, ingest_command, ingest_files
from healthd.fleet.sources.reading import Reading

_WORD = regex(r"(?<![A-Za-z_])([A-Za-z_]+)=(\"[^\"]*\"|\S+)")
_LEAVES = ("switchname", "blockname", "ringname")
# Lines that name no nodes: sizes, blocks of blocks, separators between topologies, and other settings.
_LINES_WITHOUT_LEAF = ("blocksizes", "aggregatedblock", "include", "topology", "topologyname")


def command() -> list[str]:
    """Return the command. Run it without SLURM_TOPO_LEN, which would truncate lines."""
    return ["scontrol", "show", "topology"]


def parse(lines: Iterable[tuple[int, str]], reading: Reading) -> Iterator[tuple[str, Facts]]:
    """Yield (node, leaf).

    If two leaves name the same node, both are yielded. The last one wins, as in Slurm (topology_tree.c).
    """
    for number, line in _joined(lines):
        parameters = {name.lower(): value.strip('"') for name, value in _WORD.findall(line)}
        leaf = next((parameters[name] for name in _LEAVES if name in parameters), "")
        if not leaf:
            if line.strip() and not any(name in parameters for name in _LINES_WITHOUT_LEAF):
                reading.unread(number, "has no SwitchName=, BlockName= or RingName=")
            continue
        if parameters.get("level", "0") != "0" or "nodes" not in parameters:
            continue
        try:
            nodes = expand(parameters["nodes"])
        except ValueError as error:
            reading.unread(number, str(error))
            continue
        reading.read(1)
        yield from ((node, Facts(switch=leaf)) for node in nodes)


def _joined(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    parts: list[str] = []
    first = 0
    for number, line in lines:
        code = line.partition("#")[0].rstrip()
        first = first or number
        parts.append(code.removesuffix("\\"))
        if not code.endswith("\\"):
            yield first, " ".join(parts)
            parts.clear()
            first = 0
    if parts:
        yield first, " ".join(parts)


def ingest(run: Run, files: list[str]) -> None:
    ingest_files(run, files, parse)
    if not files:
        ingest_command(run, command(), parse)


SOURCE = Source(
    "topology",
    "--topology",
    "FILE",
    "topology.conf, or `scontrol show topology`, which is run without FILE",
    ingest,
    runs_without_files=True,
)
