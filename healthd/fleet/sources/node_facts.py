"""Reads facts about nodes (GPUs, partitions, switch and rack) from a site's table, `scontrol show node` or `sinfo`.

Several sources may each provide some facts. A missing value (an empty cell, no GPU in Gres) is unknown and does not
replace a value from another source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

from healthd.common.slurm.hostlist import expand
from healthd.common.text import is_decimal, redacted, regex
from healthd.fleet.ingest import Run, Source
from healthd.fleet.sources.columns import Columns, rows
from healthd.fleet.sources.common import Lines, check_and_track, command_lines, ingest_file, local_reading
from healthd.fleet.sources.lines import read_lines
from healthd.fleet.sources.reading import Reading

if TYPE_CHECKING:
    from healthd.fleet.step import Step


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a node, with None for unknown ones. Names and order are as in the table `nodes`."""

    gpu_model: str | None = None
    gpus: int | None = None
    partitions: str | None = None
    switch: str | None = None
    rack: str | None = None


ALL_NODES_OF_SWITCH = ""  # key for facts that apply to all nodes on this switch; used instead of a node's name


def merge_facts(recorded: Mapping[str, Facts], received: Iterable[tuple[str, Facts]]) -> dict[str, Facts]:
    """Return the merged facts of the nodes in `received`, by node."""
    after: dict[str, Facts] = {}
    for name, facts in received:
        nodes = [name]
        if name == ALL_NODES_OF_SWITCH:
            nodes = [node for node, before in {**recorded, **after}.items() if before.switch == facts.switch]
        new_values = {f.name: value for f in fields(Facts) if (value := getattr(facts, f.name)) is not None}
        for node in nodes:
            after[node] = replace(after.get(node) or recorded.get(node, Facts()), **new_values)
    return after


TABLE = Columns(("node",), ("gpu_model", "gpus", "partitions", "switch", "rack"))


def parse_table(lines: Iterable[tuple[int, str]], reading: Reading) -> Iterator[tuple[str, Facts]]:
    """Parse CSV: node (a host list), gpu_model, gpus, partitions (separated by commas or blanks), switch, rack."""
    for number, row in rows(lines, TABLE, reading):
        gpus = row.get("gpus", "")
        if gpus and not (is_decimal(gpus) and len(gpus) <= 4):
            reading.unread(number, f"gpus: not a number of GPUs: {redacted(gpus)}")
            continue
        try:
            nodes = expand(row["node"])
        except ValueError as error:
            reading.unread(number, str(error))
            continue
        if not nodes:
            reading.unread(number, "no node is named")
            continue
        reading.read(1)
        facts = Facts(
            gpu_model=row.get("gpu_model") or None,
            gpus=int(gpus) if gpus else None,
            partitions=",".join(row.get("partitions", "").replace(",", " ").split()) or None,
            switch=row.get("switch") or None,
            rack=row.get("rack") or None,
        )
        yield from ((node, facts) for node in nodes)


SWITCHES = Columns(("switch", "rack"))


def parse_switches(lines: Iterable[tuple[int, str]], reading: Reading) -> Iterator[tuple[str, Facts]]:
    """Parse CSV with the columns `switch` (a host list of leaf switches) and `rack` (of the nodes on these
    switches)."""
    for number, row in rows(lines, SWITCHES, reading):
        try:
            switches = expand(row["switch"])
        except ValueError as error:
            reading.unread(number, str(error))
            continue
        if not switches or not row["rack"]:
            reading.unread(number, "no switch or rack is named")
            continue
        reading.read(1)
        yield from ((ALL_NODES_OF_SWITCH, Facts(switch=switch, rack=row["rack"])) for switch in switches)


def command() -> list[str]:
    """Return the command. It prints one line per node; -a includes hidden partitions.

    Every Slurm version supports `--oneliner`.
    """
    return ["scontrol", "--all", "--oneliner", "show", "node"]


# The free texts Comment, Extra and Reason come after Gres= and Partitions=, so the first Gres= and Partitions= are
# Slurm's own (github.com/SchedMD/slurm, src/api/node_info.c, slurm_sprint_node_table()). Features come before them: if
# features contain another Gres=, it cannot be distinguished from Slurm's own.
_NAME = regex(r"NodeName=(\S+)")
_GRES = regex(r"(?:^| )Gres=(\S+)")
_PARTITIONS = regex(r"(?:^| )Partitions=(\S+)")
_GPU = regex(r"gpu(?::([A-Za-z][^:,()]*))?(?::([0-9]{1,4}))?(?:\([^()]*\))?")
_ENTRY = regex(r"(?:[^,()]|\([^()]*\))+")


def parse_scontrol(lines: Iterable[tuple[int, str]], reading: Reading) -> Iterator[tuple[str, Facts]]:
    """Parse `scontrol show node`, with or without -o. A record extends to the next line that begins with NodeName=."""
    for number, record in _records(lines):
        name = _NAME.match(record)
        if not name:
            reading.unread(number, "does not begin with NodeName=")
            continue
        partitions = _PARTITIONS.search(record)
        gres = set(_GRES.findall(record, 0, partitions.start() if partitions else len(record)))
        if len(gres) != 1:
            reading.unread(number, f"the node {name[1]} has {'several' if gres else 'no'} Gres=")
            continue
        reading.read(1)
        model, gpus = parse_gres(gres.pop())
        yield name[1], Facts(gpu_model=model, gpus=gpus, partitions=partitions[1] if partitions else None)


SINFO = Columns(("nodelist", "gres"), ("partition",), {"hostnames": "nodelist", "partition_name": "partition"})


def parse_sinfo(lines: Iterable[tuple[int, str]], reading: Reading) -> Iterator[tuple[str, Facts]]:
    """Parse `sinfo -a -o '%N|%G|%R'`: host list, Gres, partition. A partition has one line for each kind of node."""
    facts_by_node: dict[str, Facts] = {}
    partitions: dict[str, dict[str, None]] = {}
    for number, row in rows(lines, SINFO, reading, "|"):
        try:
            nodes = expand(row["nodelist"])
        except ValueError as error:
            reading.unread(number, str(error))
            continue
        reading.read(1)
        model, gpus = parse_gres(row["gres"])
        for node in nodes:
            facts_by_node[node] = Facts(gpu_model=model, gpus=gpus)
            if partition := row.get("partition", "").rstrip("*"):
                partitions.setdefault(node, {})[partition] = None
    for node, facts in facts_by_node.items():
        yield node, replace(facts, partitions=",".join(partitions.get(node, {})) or None)


def parse_gres(gres: str) -> tuple[str | None, int | None]:
    """Return (model, number) for text such as "gpu:h100:8(S:0-1),shard:32".

    The model is None if no model or more than one model is named. The number is None if no GPU is listed: a node that
    lost all its GPUs looks like a node that never had any.
    """
    models: dict[str, None] = {}
    total = 0
    for entry in _ENTRY.findall(gres):
        if found := _GPU.fullmatch(entry):
            models[found[1] or ""] = None
            total += int(found[2] or 1)
    return (next(iter(models)) or None) if len(models) == 1 else None, total or None


def _records(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Join the lines that belong to the same node.

    Only NodeName= begins a record. 24.05 prints a blank line inside a record, before Reason=, and a Reason may contain
    an empty line.
    """
    first, parts = 0, list[str]()
    for number, line in lines:
        if line.startswith("NodeName=") and parts:
            yield first, " ".join(parts)
            parts = []
        if line.strip():
            first = number if not parts else first
            parts.append(line.strip())
    if parts:
        yield first, " ".join(parts)


NodeFacts: TypeAlias = "Iterable[tuple[str, Facts]]"


def ingest_files(run: Run, files: Sequence[str], parse: Callable[[Lines, Reading], NodeFacts]) -> None:
    def stage(step: Step, reading: Reading) -> None:
        stage_facts(step, reading, parse(read_lines(reading.name, reading), reading))

    for path in check_and_track(run, files):
        with run.guard():
            ingest_file(run, path, stage)


def stage_facts(step: Step, reading: Reading, received: NodeFacts) -> None:
    """Stage facts about nodes, merged with the facts in the store."""
    cluster = reading.resolve_cluster()
    names = ", ".join(field.name for field in fields(Facts))
    live = step.execute(f"SELECT node, {names} FROM {step.live('nodes')} WHERE cluster = ?", [cluster]).fetchall()
    recorded = {node: Facts(*values) for node, *values in live}
    step.stage("nodes", ((cluster, node, *astuple(facts)) for node, facts in merge_facts(recorded, received).items()))


def ingest_command(run: Run, argv: list[str], parse: Callable[[Lines, Reading], NodeFacts]) -> None:
    """Ingest the facts that a local command prints."""
    reading = local_reading(run, " ".join(argv))
    with run.step(reading.name, run.now, run.now, reading.cluster) as step:
        stage_facts(step, reading, parse(command_lines(argv, reading), reading))


def parse_any(lines: Lines, reading: Reading) -> Iterator[tuple[str, Facts]]:
    """Parse a file. Its first line shows the format."""
    remaining = iter(lines)
    first = next(((number, line) for number, line in remaining if line.strip()), None)
    if first is None:
        return iter(())
    return _parser_for(first[1].upper())(chain([first], remaining), reading)


def _parser_for(first: str) -> Callable[[Lines, Reading], Iterator[tuple[str, Facts]]]:
    if first.startswith("NODENAME="):
        return parse_scontrol
    if "NODELIST|" in first:
        return parse_sinfo
    return parse_table if "NODE" in first or "RACK" not in first else parse_switches


def ingest(run: Run, files: list[str]) -> None:
    ingest_files(run, files, parse_any)
    if not files:
        ingest_command(run, command(), parse_scontrol)


SOURCE = Source(
    "nodes",
    "--nodes",
    "FILE",
    "node models: CSV node,gpu_model,gpus,partitions,switch,rack; or output of `scontrol show node` (run "
    "here without FILE) or `sinfo -a -o '%N|%G|%R'`",
    ingest,
    runs_without_files=True,
)
