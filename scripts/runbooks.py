"""Writes docs/runbooks: a page for each check, from the texts of `healthd explain`, and the list of the pages in their
README.md. Run it after a text, a severity or a time of a check changes; tests/docs/test_runbooks.py fails where a page
is older than the code.

Alert rules and `healthd explain --json` link to them. The rule of the links: the page is CHECK.md, the heading of a
code is the code, and its anchor is GitHub's: the code in lower case without its "/". `gpu_xid/79` is
`gpu_xid.md#gpu_xid79`; in a Prometheus rule:

    runbook_url: "URL/docs/runbooks/{{ $labels.check }}.md#{{ reReplaceAll "/" "" $labels.code }}"
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts"))

from checks_page import groups  # noqa: E402

from healthd.agent.reporting import explanation  # noqa: E402
from healthd.agent.settings import registry  # noqa: E402
from healthd.agent.settings.config import Loaded, Settings  # noqa: E402
from healthd.agent.settings.registry import Check  # noqa: E402
from healthd.common.duration import duration  # noqa: E402
from healthd.common.model import Explain, Mode  # noqa: E402

FOLDER = ROOT / "docs/runbooks"
LIST = re.compile(r"(?s)(?<=<!-- pages: scripts/runbooks.py -->\n).*?(?=<!-- end -->)")
ACT = explanation.NodeContext(Loaded(Settings(mode=Mode.ACT, node_name="node"), {}, {}, {}))
HEAD = """\
# {name}

{summary} `scripts/runbooks.py` wrote this page from the texts of `healthd explain`; on the node `healthd explain CODE`
says the same, and what the settings there make of it. *healthd* is what it does in mode `act` at its default settings.
The node is drained already? [My node is drained](../drained.md).
"""
LOOK = """\
## First look

```
healthd status                  # what stands, since when, what healthd wants and waits for
healthd events --since 1d       # what came before it
healthd check {name}{wide}# look now, without the daemon
```
"""
HEARD = """\
## First look

```
healthd status                  # what stands, since when, what healthd wants and waits for
healthd events --since 1d       # what came before it
journalctl -k --since -1d       # the kernel's own words; healthd scan - reads them
```
"""


def pages(checks: dict[str, Check]) -> dict[str, str]:
    """File name -> its text, without README.md."""
    return {f"{name}.md": page(check) for name, check in checks.items()}


def page(check: Check) -> str:
    known = [(code, text) for code in check.codes() if (text := check.explain(code)) is not None]
    summary = (check.summary if check.summary.endswith(".") else f"{check.summary}.").replace("<", r"\<")
    look = LOOK.format(name=check.name, wide=" " * max(1, 18 - len(check.name))) if check.has_run else HEARD
    parts = [HEAD.format(name=check.name, summary=summary), look]
    parts += [_section(code, text, check) for code, text in [*known, (f"{check.name}/others", registry.OTHERS_EXPLAIN)]]
    return "\n".join(parts)


def _section(code: str, text: Explain, check: Check) -> str:
    document = explanation.code_document(code, code, "", text, check, ACT)
    (run,) = document["here"]
    severity = document["severity"] + (f", if it lasts {document['worsens']}" if document["worsens"] else "")
    severity += f" (some of it {', '.join(document['also'])})" if document["also"] else ""
    told = [
        ("What it means", document["meaning"]),
        ("Why it matters", document["matters"]),
        ("What healthd does", " ".join(_does(run, check))),
        ("What ends it", document["ends"]),
        ("What to do", document["todo"]),
    ]
    steps = [f"{step['when']}: `{step['command']}`." for step in document["steps"]]
    if commands := " ".join(f"{step[:1].upper()}{step[1:]}" for step in steps):
        told.append(("Commands", commands))
    return "\n\n".join([f"## {code}", _text(f"{severity}."), *(f"**{title}.** {_text(w)}" for title, w in told), ""])


def _does(run: dict[str, Any], check: Check) -> Iterator[str]:
    """What it does, and by which times; not what the fleet limit does, which is the same everywhere."""
    yield from (words for words in explanation.sentences(run) if "of a partition (" not in words)
    for row in run["settings"]:
        if row["setting"].endswith("_seconds"):
            yield f"{row['setting']} = {duration(row['value'])}."
    if run["required_setting"]:
        setting = f"[checks.{check.name}] {run['required_setting']}"
        yield f"Only where {setting} says what should be there (healthd baseline --write)."


def _text(text: str) -> str:
    """A text as Markdown prints it; lines of a list stay apart."""
    lines = [" ".join(line.split()) for line in text.split("\n")]
    return re.sub(r"([*<\[\]])", r"\\\1", "\n".join(lines)).replace("\n", "\n\n")


def readme(checks: dict[str, Check], text: str) -> str:
    rows = ["| | page | looks at |", "| --- | --- | --- |"]
    for heading, names in groups().items():
        for name in names:
            title = heading if name == names[0] else ""
            rows.append(f"| {title} | [{name}]({name}.md) | {_text(checks[name].summary)} |")
    return LIST.sub(lambda _: "\n".join([*rows, ""]), text)


def main() -> int:
    checks = registry.built_in_checks()
    for name, text in pages(checks).items():
        (FOLDER / name).write_text(text, "utf-8")
    index = FOLDER / "README.md"
    index.write_text(readme(checks, index.read_text("utf-8")), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
