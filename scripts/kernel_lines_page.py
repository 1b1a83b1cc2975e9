"""Write docs/kernel-lines.md: the recognised kernel lines, and how many of the captured lines the rules recognise.

Run it after a rule changes; tests/docs/test_kernel_lines_page.py fails if the page is outdated.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from healthd.agent.kernel_log import parse as kernel_parse  # noqa: E402
from healthd.agent.kernel_log.rules.rule import pci_address  # noqa: E402
from healthd.agent.reporting.endings import ending_text  # noqa: E402
from healthd.agent.reporting.explanation import finding_ending  # noqa: E402
from healthd.agent.reporting.fault_timeline import possible_findings  # noqa: E402
from healthd.agent.settings import registry  # noqa: E402
from healthd.cli.scan import correlate_all  # noqa: E402
from healthd.common.model import KernelEvent  # noqa: E402
from healthd.scan import events as scan  # noqa: E402
from healthd.scan import findings as scan_judged  # noqa: E402
from healthd.scan.lines import Block, Tally  # noqa: E402

PAGE = ROOT / "docs/kernel-lines.md"
DATA = sorted((ROOT / "tests/data").glob("kernel_lines*.jsonl"))
NOW = 1_795_000_000.0  # an arbitrary time, needed to date lines without a year
CHECKS = registry.built_in_checks()
# A program's own log that quotes an Xid is not the driver's line.
QUOTED = {"k0023"}
HEAD = """\
# Recognised kernel lines

Look up which kernel lines healthd recognises and how it judges them. A rule of `healthd/agent/kernel_log/rules/`
matches from the start of the kernel's message; all other lines are ignored. `healthd scan FILE` lists the faults in a
log, and `healthd explain CODE` prints what a code means. `scripts/kernel_lines_page.py` writes this page from the code.
"""
CAPTURED = """\
## Captured lines

`tests/data/kernel_lines*.jsonl` contain lines that machines of others printed, each with its public source. The rules
were written from the first file; the lines of the other files were collected afterwards, without regard to the rules.

| column | meaning |
| --- | --- |
| as that kind | an event of that kind, for (S)Xids with the right code, address, pid and name; for benign: nothing |
| as meant | a program's log that quotes an Xid is not the kernel's: nothing was read, or it was marked as unproven |
| another | only events of other kinds; for benign: any event |
| wrong | an Xid or SXid with a wrong code, address, pid or name |
| missed | nothing was read |
"""
RULES = """\
## Lines of each kind

The severity is that of a single line in a log of an unknown machine (`healthd scan`). The daemon
knows the node and judges some lines more severely ([checks.md](checks.md)). *-* means that no check reports this line
by itself. The example is a captured line; not every code has one.
"""


class Captured(NamedTuple):
    id: str
    kind: str
    text: str
    provenance: str
    expected: Mapping[str, Any]

    def events(self) -> list[tuple[KernelEvent, scan_judged.Judged]]:
        blocks = [Block.from_lines(1, [line.encode() for line in self.text.split("\n")])]
        return [
            (judged.log_event.event, judged)
            for judged in scan_judged.judge(scan.events(blocks, NOW, Tally()), CORRELATE)
        ]


CORRELATE = correlate_all()


def captured() -> list[Captured]:
    rows = (json.loads(line) for data in DATA for line in data.read_text("utf-8").splitlines())
    return [Captured(r["id"], r["kind"], r["text"], r["provenance"], r["expected"] or {}) for r in rows]


def outcome(row: Captured) -> str:
    """Classify a captured line.

    Returns "right", "meant" (ignored on purpose), "wrong" (an Xid with another code, address, pid or name), "other" or
    "missed".
    """
    found = [event for event, judged in row.events() if not judged.unproven]
    if row.kind == "benign":
        return "right" if not found else "other"
    if row.id in QUOTED:
        return "meant" if not found else "wrong"
    same = [event for event in found if event.kind == row.kind]
    if not same:
        return "other" if found else "missed"
    if row.kind in ("xid", "sxid"):
        return "right" if len(same) == 1 and _matches_expected(same[0], row) else "wrong"
    return "right"


def _matches_expected(event: KernelEvent, row: Captured) -> bool:
    expected = row.expected
    unknown = (None, "<unknown>")
    pid = None if expected.get("pid") in unknown else int(expected["pid"])
    name = None if expected.get("name") in unknown else expected["name"]
    address = pci_address(expected["pci"] or "")
    if (event.code, event.pci) != (str(expected[row.kind]), address):
        return False
    return row.kind == "sxid" or (event.pid, event.process) == (pid, name)


def tally(rows: Sequence[Captured]) -> dict[tuple[str, str], Counter[str]]:
    """Count the outcomes of the lines by (kind, provenance)."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for row in rows:
        found.setdefault((row.kind, row.provenance), Counter())[outcome(row)] += 1
    return dict(sorted(found.items(), key=lambda item: (item[0][0] == "benign", item[0])))


def table(found: Mapping[tuple[str, str], Counter[str]]) -> list[str]:
    head = ("kind", "from", "lines", "as that kind", "as meant", "another", "wrong", "missed")
    columns = ("right", "meant", "other", "wrong", "missed")
    lines = [_row(head), _row(["---"] * 2 + ["---:"] * 6)]
    for (kind, provenance), counts in found.items():
        lines.append(_row([kind, provenance, str(counts.total()), *(str(counts[word] or "") for word in columns)]))
    total: Counter[str] = sum(found.values(), Counter())
    lines.append(_row(["all", "", str(total.total()), *(str(total[word] or "") for word in columns)]))
    return lines


def kinds(rows: Sequence[Captured]) -> Iterator[str]:
    """Yield the section of each kind: its codes as captured, and how healthd judges each."""
    examples: dict[tuple[str, str], tuple[scan_judged.Judged, int]] = {}
    for row in rows:
        for event, judged in row.events():
            if judged.unproven:
                continue
            key = (event.kind, event.code)
            previous = examples.get(key)
            examples[key] = (previous[0] if previous else judged, (previous[1] if previous else 0) + 1)
    for kind in dict.fromkeys(rule.kind for rule in kernel_parse.RULES):
        number = sum(rule.kind == kind for rule in kernel_parse.RULES)
        yield f"### {kind}\n"
        yield f"{number} rule{'s' if number > 1 else ''}.\n"
        examples_of_kind = sorted((key, value) for key, value in examples.items() if key[0] == kind)
        if not examples_of_kind:
            yield "No line of this kind was captured.\n"
            continue
        yield _row(("code of the line", "`explain`", "severity", "clears after", "example"))
        yield _row(["---"] * 5)
        for (_, code), (judged, _) in sorted(examples_of_kind, key=lambda item: item[0][1].zfill(6)):
            severity = judged.severity.name.lower()
            clears_after = _ending(judged) if judged.clears else "-"
            explain = f"`{judged.code}`" if judged.clears else "-"
            yield _row((code, explain, severity, clears_after, f"`{_cell(judged.log_event.event.text)}`"))
        yield ""


def _ending(judged: scan_judged.Judged) -> str:
    """Return what ends the finding about a line, from the code, the severity and the default settings."""
    check = CHECKS[judged.code.partition("/")[0]]
    explain = check.explain(judged.code)
    assert explain is not None
    assert judged.clears is not None
    for finding in possible_findings(judged.code, explain, check.config()):
        if (finding.severity, finding.clears) == (judged.severity, judged.clears):
            return finding_ending(finding)
    return ending_text(judged.clears.name.lower())


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(text: str) -> str:
    short = " ".join(text.split())
    return (short if len(short) <= 110 else f"{short[:107]}...").replace("|", r"\|").replace("`", "'")


def page() -> str:
    rows = captured()
    return "\n".join([HEAD, CAPTURED, *table(tally(rows)), "", RULES, *kinds(rows)]).rstrip("\n") + "\n"


def main() -> int:
    PAGE.write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
