"""Write the table of all metrics in docs/metrics.md from the code. The hand-written text around the table is kept.

Run it after a metric or the OBSERVATIONS of a check change. tests/docs/test_metrics_doc.py fails if the page is
outdated.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from healthd.agent.metrics.names import FAMILIES, PREFIX  # noqa: E402
from healthd.agent.settings import registry  # noqa: E402

PAGE = ROOT / "docs/metrics.md"
TABLES = re.compile(r"(?s)(?<=<!-- metrics: scripts/metrics_page.py -->\n).*(?=<!-- end -->)")
HEAD = "| Metric | Type | Labels | Unit | Value |\n| --- | --- | --- | --- | --- |\n"
UNITS = {
    "timestamp_seconds": "seconds since the epoch",
    "bytes_per_second": "bytes per second",
    "seconds": "seconds",
    "bytes": "bytes",
    "celsius": "degrees Celsius",
    "watts": "watts",
    "ratio": "0 to 1",
}


def unit(name: str) -> str:
    """Return the unit from the suffix of the name, as Prometheus names it; "" for a count or a flag."""
    plain = name.removesuffix("_total")
    return next((unit for end, unit in UNITS.items() if plain.endswith(f"_{end}")), "")


def rows(metrics: dict[str, tuple[tuple[str, ...], str]]) -> Iterator[str]:
    for name, (labels, text) in metrics.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        label_list = ", ".join(f"`{label}`" for label in labels)
        yield f"| `{PREFIX}{name}` | {kind} | {label_list} | {unit(name)} | {text.replace('|', '/')} |\n"


def tables() -> str:
    own = {name: (family.labels, family.text) for name, family in FAMILIES.items()}
    parts = ["### healthd itself\n\n", HEAD, *rows(own), "\n### Readings of the checks\n\n"]
    parts.append("A check without anything to read (no such part, no such driver) has no series.\n\n")
    for name, check in sorted(registry.built_in_checks().items()):
        if meanings := check.declares.OBSERVATIONS:
            read = {reading: (meaning.labels, meaning.text) for reading, meaning in meanings.items()}
            parts += [f"[`{name}`](checks.md#{name})\n\n", HEAD, *rows(read), "\n"]
    return "".join(parts).rstrip("\n") + "\n"


def page(text: str) -> str:
    return TABLES.sub(lambda _: tables(), text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
