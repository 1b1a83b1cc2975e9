"""Golden decisions: the decision of healthd for every captured line, recording, fake machine and explained code.

    .venv/bin/python tests/support/golden.py --write

rewrites tests/data/golden_decisions.txt. A change that is meant to change no decision leaves the file as it is. HEAD
explains the format.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import golden_machines
import golden_slurm
from fakes import NOW
from golden_node import ADDRESSES, CHECKS, GPU_DEVICES, GPUS, NONE, Node, condition_text, decision_suffix, seconds
from msgspec.structs import replace

from healthd.agent.conditions import absorb, endings
from healthd.agent.kernel_log.prefix import strip_prefix
from healthd.agent.kernel_log.rules.rule import pci_address
from healthd.agent.kernel_log.source import RawLine, make_event
from healthd.agent.reporting.fault_timeline import possible_findings
from healthd.agent.settings.config import CheckConfig
from healthd.agent.settings.registry import Check
from healthd.cli.scan import correlate_all
from healthd.common.model import (
    Ack,
    Condition,
    Disk,
    Explain,
    Finding,
    Gpu,
    Inventory,
    KernelEvent,
    LocalMount,
    Outcome,
    PciDevice,
    RunName,
    Severity,
)
from healthd.scan.events import events
from healthd.scan.findings import judge
from healthd.scan.lines import Block, Tally

DATA = Path(__file__).parents[1] / "data"
FILE = DATA / "golden_decisions.txt"
LINES = [*sorted(DATA.glob("kernel_lines*.jsonl")), DATA / "peer_lines.jsonl"]
# Tests of gpud put a date in brackets before a host. Only scan reads that form.
HEAD = """\
# What healthd decides. Made by golden.py; do not edit.
# A case: CODE PART SEVERITY STATE ENDING, then the decision in mode "act" ("leave", if there is none) and the jobs that
# are requeued. Job 101 runs on GPU 0, job 102 on the other GPUs, job 103 on none; job 104 starts after the fault.
# [gpu], [switch], [nic]: the part that a kernel line names is one; [other]: the machine has no such part; [unknown]:
# nothing is known of the machine. "again": the same lines ten minutes later. "scan": only where scan differs.
# Explained codes: what ends a condition (":ack": it stays, acknowledged); "paused": it was not seen since a pause;
# "relapse": what ends it if it comes back after a reboot.
"""
SCAN_ONLY_PREFIX = "] ny2g1r12hh2 kernel: "
EVENT_CHECKS = [(check, check.config()) for check in CHECKS.values() if check.reads_kernel_log]
CHUNK = 60  # lines that are also read as one log
DAY = 86400.0
Event = Callable[[Node, Check, CheckConfig, Finding], object]  # something that happens to a node with a finding


# --- kernel lines


def cases() -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each captured line and log."""
    for file in LINES:
        for number, row in enumerate(file.read_text("utf-8").splitlines(), 1):
            yield json.loads(row).get("id", f"peer{number:03}"), json.loads(row)["text"]
    for path in sorted((DATA / "golden").glob("*.txt")):
        yield path.stem, path.read_text("utf-8").partition("\n")[2].rstrip("\n")


def texts(text: str) -> list[str]:
    return [line.rpartition(SCAN_ONLY_PREFIX)[2] for line in text.split("\n")]


def parse_events(text: str) -> list[KernelEvent]:
    stripped = [strip_prefix(line, NOW) for line in texts(text)]
    read = [
        make_event(RawLine(NOW, stripped_line.text), "b") for stripped_line in stripped if stripped_line is not None
    ]
    return [event for event in read if event is not None]


def inventories(events_found: list[KernelEvent]) -> Iterator[tuple[str, Inventory]]:
    """Yield inventories in which the part of the lines is GPU 0, an NVSwitch, a NIC, another part, or unknown."""
    values = [value for event in events_found for value in (event.pci, *(value for _, value in event.fields))]
    addresses = list(dict.fromkeys(pci for value in values if (pci := pci_address(value))))
    names = {"disk", "device", "controller", "array", "md"}
    disks = list(dict.fromkeys(v for e in events_found for name, v in e.fields if name in names and v.isalnum()))
    slot = next((event.field("slot") for event in events_found if event.field("slot")), "")
    other_devices = tuple(PciDevice(pci, "0x8086", "0x0000", "0x060400", "other") for pci in addresses[1:])
    above = addresses[1] if len(addresses) > 1 else ""
    mounts = tuple(LocalMount(f"/local/{disk}", "xfs", disk, (disk,)) for disk in disks)
    disk_records = tuple(Disk(disk, "", ()) for disk in disks)

    def device(kind: str, pci_class: str) -> tuple[PciDevice, ...]:
        named = (PciDevice(pci, "0x10de", "0x2330", pci_class, kind, above, slot) for pci in addresses[:1])
        return (*GPU_DEVICES[1:], *named, *other_devices)

    if addresses:
        gpus = (Gpu(addresses[0], 0, "GPU-0", minor=0), *(gpu for gpu in GPUS[1:] if gpu.pci != addresses[0]))
        yield "gpu", Inventory(gpus, device("gpu", "0x030200"), disks=disk_records, mounts=mounts)
        yield "switch", Inventory(GPUS, device("nvswitch", "0x068000"), disks=disk_records, mounts=mounts)
        yield "nic", Inventory(GPUS, device("nic", "0x020700"), disks=disk_records, mounts=mounts)
    yield "other", Inventory(GPUS, GPU_DEVICES, disks=disk_records, mounts=mounts)
    yield "unknown", Inventory()


def line_cases(name: str, text: str) -> Iterator[str]:
    kernel_events = parse_events(text)
    outcomes: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for machine, inventory in inventories(kernel_events):
        node = Node(EVENT_CHECKS, inventory).log_lines(texts(text))
        first = outcome(node)
        node.now += 600.0
        second = outcome(node.log_lines(texts(text)))
        outcomes.setdefault((first, second), []).append(machine)
    for (first, second), inventory_names in outcomes.items():
        places = (
            "" if len(inventory_names) == len(list(inventories(kernel_events))) else f" [{','.join(inventory_names)}]"
        )
        yield from (f"{name}{places} {line}" for line in first)
        yield from (f"{name}{places} again: {line}" for line in second if line not in first)
    scanned = sorted(scan_findings(text))
    if scanned != [
        f"{c.code} {c.subject or '-'} {c.severity.name.lower()} {c.clears.value}"
        for c in conditions_without_inventory(text)
    ]:
        yield from (f"{name} scan: {line}" for line in scanned or ["nothing"])


def outcome(node: Node) -> tuple[str, ...]:
    lines = node.outcome()
    return () if lines == (NONE,) else lines


def conditions_without_inventory(text: str) -> list[Condition]:
    """Return the conditions on a machine with an unknown inventory."""
    return sorted(Node(EVENT_CHECKS, Inventory()).log_lines(texts(text)).ledger.conditions, key=lambda c: c.key)


def scan_findings(text: str) -> Counter[str]:
    block = Block.from_lines(1, [line.encode() for line in text.split("\n")])
    lines: Counter[str] = Counter()
    for item in judge(events([block], NOW, Tally()), correlate_all()):
        ends = item.clears.value if item.clears else "-"
        unproven = " unproven" if item.unproven else ""
        lines[f"{item.code} {item.meaning.part or '-'} {item.severity.name.lower()} {ends}{unproven}"] += (
            item.log_event.count
        )
    return lines


def log_cases(texts_of_log: list[str]) -> Iterator[str]:
    """Read many lines as one log, one line per second: yield which lines are one fault and the overall result."""
    for source in ("live", "history", "observed"):
        node = Node(EVENT_CHECKS)
        for text in texts_of_log:
            node.now += 1.0
            node.log_lines(texts(text), history=source == "history", observed=source == "observed")
        counted = sorted((c.code, c.subject, c.count, c.severity.name.lower()) for c in node.ledger.conditions)
        if source == "live":
            yield from (f"{code} {subject or '-'} {severity} x{count}" for code, subject, count, severity in counted)
            yield f"{len(node.ledger.events)} events of {sum(event.lines for event in node.ledger.events)} lines"
        else:
            worst = max((severity for *_, severity in counted), default="none", key=lambda name: Severity[name.upper()])
            yield f"as {source}: {len(counted)} conditions, worst {worst}"
        yield f"{source} {node.health()} -> {node.decide()}"
    yield from (f"scan: {line} x{count}" for line, count in sorted(scan_findings("\n".join(texts_of_log)).items()))


def all_log_cases() -> Iterator[str]:
    for file in LINES:
        rows = [json.loads(row)["text"] for row in file.read_text("utf-8").splitlines()]
        for begin in range(0, len(rows), CHUNK):
            yield from (f"{file.stem}+{begin} {line}" for line in log_cases(rows[begin : begin + CHUNK]))


# --- explained codes


def code_cases(check: Check, code: str, explain: Explain) -> Iterator[str]:
    """Yield the course of a finding of each severity as explained, with default settings, from a run and from the
    log."""
    config = check.config(name="part") if check.per else check.config()
    for finding in possible_findings(code, explain, config):
        finding = replace(finding, subject=ADDRESSES[0] if check.name.startswith("gpu_") else finding.subject)
        sources = [
            source for source, is_supported in (("run", check.has_run), ("log", check.reads_kernel_log)) if is_supported
        ]
        for source in sources:
            yield f"{code} {finding.severity.name.lower()} {source}: " + "; ".join(
                finding_course(check, config, finding, source)
            )


def finding_course(check: Check, config: CheckConfig, finding: Finding, source: str) -> Iterator[str]:
    """Yield the decision at each relevant time, then the effect of each event at the last of these times."""
    worsens_after = finding.worsens.after_seconds if finding.worsens else 0.0
    moments = {
        0.0,
        *(
            seconds_after - margin
            for seconds_after in (finding.confirm_seconds, worsens_after)
            if seconds_after
            for margin in (1.0, 0.0)
        ),
    }
    last = ""
    for seconds_after in sorted(moments) if source == "run" else [0.0]:
        node = node_with_finding(check, config, finding, source, seconds_after)
        shown = condition_text(node.ledger.conditions[0])
        state_text = f"{' '.join(shown.split()[3:])}{decision_suffix(shown, node.decide())}"
        if state_text != last:
            yield f"{seconds(seconds_after)} {state_text}"
        last = state_text
    longest = max(moments) if source == "run" else 0.0
    ends = []
    for name, event in EVENTS.items():
        node = node_with_finding(check, config, finding, source, longest)
        node.decide()
        usual = "resume" if node.drained else "leave"
        event(node, check, config, finding)
        remaining = node.ledger.conditions
        if remaining and remaining[0].state.value == "open":
            continue
        state = ":ack" if remaining else ""
        if check.has_run:  # a resume waits for a clean run
            node.result(RunName(check.name, config.name), config)
        decision = node.decide()
        ends.append(name + state + (f" -> {decision}" if decision != usual else ""))
    yield "ended by " + (", ".join(ends) or "nothing")
    node = node_with_finding(check, config, finding, source, longest)
    node.decide()
    if node.drained:
        node.trusted_since = node.now + 1.0
        first = node.decide()
        if check.has_run:
            node.result(RunName(check.name, config.name), config)
        yield f"paused -> {first}, clean -> {node.decide()}"
    node = node_with_finding(check, config, finding, source, longest).reboot()
    if not node.ledger.conditions:
        report_finding(node, check, config, finding, source)
        yield f"relapse until {node.ledger.conditions[0].clears.value}"


def node_with_finding(check: Check, config: CheckConfig, finding: Finding, source: str, duration: float) -> Node:
    """Return a node that has had the finding for `lasted` seconds."""
    node = Node([(check, config)])
    report_finding(node, check, config, finding, source)
    if duration:
        node.now += duration
        report_finding(node, check, config, finding, source)
    return node


def report_finding(node: Node, check: Check, config: CheckConfig, finding: Finding, source: str) -> None:
    if source == "run":
        node.result(RunName(check.name, config.name), config, (finding,))
        return
    node.now += 1.0
    event = KernelEvent("", time=node.now, last_time=node.now, sequence=node.ledger.next_sequence, boot_id="b")
    kernel_finding = replace(absorb.as_configured(finding, config), events=(event.sequence,))
    before, touched = node.ledger, frozenset({event.sequence})
    node.set_conditions(
        absorb.absorb_events(
            before.by_key(),
            check.name,
            [kernel_finding],
            {event.sequence: event},
            touched,
            before.boot_id,
            before.cleared,
        )
    )
    node.ledger = replace(node.ledger, next_sequence=event.sequence + 1)


def clean_runs(times: int) -> Event:
    def apply(node: Node, check: Check, config: CheckConfig, _finding: Finding) -> None:
        for _ in range(times or config.clear_after):
            node.now += 1.0
            node.result(RunName(check.name, config.name), config)

    return apply


def quiet_window(margin: float, loaded: bool) -> Event:
    """Return an event: one clean run, then the window of the finding passes, less `less` seconds."""

    def apply(node: Node, check: Check, config: CheckConfig, finding: Finding) -> None:
        clean_runs(1)(node, check, config, finding)
        node.wait(max(finding.window_seconds - margin, 0.0), loaded)

    return apply


def resume_by_operator(node: Node, _check: Check, _config: CheckConfig, _finding: Finding) -> None:
    """An operator resumes the node."""
    node.now += 1.0
    node.set_conditions(endings.acknowledge_resumed(node.ledger.by_key(), node.now, node.now))


def acknowledge(node: Node, _check: Check, _config: CheckConfig, finding: Finding) -> None:
    ack = Ack(node.now + DAY, "", "", finding.severity)
    node.set_conditions(endings.acknowledge(node.ledger.by_key(), finding.code, None, ack))


EVENTS: dict[str, Event] = {
    "clean1": clean_runs(1),
    "clean": clean_runs(0),
    "reboot": lambda node, _check, _config, _finding: node.reboot(),
    "reset": lambda node, _check, _config, finding: node.reset(finding.subject),
    "old_reset": lambda node, _check, _config, finding: node.reset(finding.subject, node.now - 1.0),
    "window-1s": quiet_window(1.0, True),
    "window": quiet_window(0.0, True),
    "window_unloaded": quiet_window(0.0, False),
    "repaired": lambda node, _check, _config, finding: node.repaired(finding.code, None),
    "resumed": resume_by_operator,
    "ack": acknowledge,
}


def all_code_cases() -> Iterator[str]:
    for check in CHECKS.values():
        for code in sorted(check.codes()):
            explain = check.explain(code)
            assert explain is not None
            yield from code_cases(check, code, explain)
        yield from silence_cases(check)


def silence_cases(check: Check) -> Iterator[str]:
    """Yield the effect of a run of the check that does not end."""
    config = check.config(name="part") if check.per else check.config()
    node, last = Node([(check, config)]), ""
    for silent_seconds in (10.0, 249.0, 250.0, 609.0, 610.0):
        node.now = NOW + silent_seconds
        for finding in check.overdue(config, silent_seconds):
            node.result(RunName(check.name, config.name), config, (finding,), outcome=Outcome.TIMED_OUT)
            state_text = "; ".join(node.outcome())
            if state_text != last:
                yield f"{finding.code} silent for {seconds(silent_seconds)}: {state_text}"
            last = state_text


# --- the file


def text() -> str:
    """Return the golden decisions of this code."""
    memory_dir = (
        "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    )  # thousands of small files, one machine at a time
    with tempfile.TemporaryDirectory(prefix="golden.", dir=memory_dir) as path:
        folder = Path(path)
        sections: dict[str, Iterable[str]] = {
            "kernel lines": (line for name, case_text in cases() for line in line_cases(name, case_text)),
            "logs of many lines": all_log_cases(),
            "recordings": golden_machines.run_recordings(),
            "fake machines": golden_machines.scenarios(folder),
            "stories": golden_machines.stories(folder),
            "explained codes": all_code_cases(),
            "drains of others": golden_slurm.policies(),
            "jobs that a fault hits": golden_slurm.affected_jobs(),
            "settings": golden_machines.settings(),
        }
        return HEAD + "".join(
            f"\n== {title}\n" + "".join(f"{line}\n" for line in section_lines)
            for title, section_lines in sections.items()
        )


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: tests/support/golden.py --write")
    FILE.write_text(text(), "utf-8")
