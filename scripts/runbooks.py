"""Write docs/runbooks: one page per check, from the texts of `healthd explain`, and the list of pages in README.md.

Run it after a text, severity or time of a check changes; tests/docs/test_runbooks.py fails if a page is out of date.

Alert rules and `healthd explain --json` link to the pages. The page of a check is CHECK.md, and the heading of a code
is the code. The anchor is the one that GitHub makes: the code in lower case without its "/". `gpu_xid/79` becomes
`gpu_xid.md#gpu_xid79`. In a Prometheus rule:

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

{summary}

This page is generated from the texts of `healthd explain` by `scripts/runbooks.py`. On a node, `healthd explain CODE`
also applies the settings of that node. "What healthd does" below is for mode `act` with default settings. If the node
is already drained, start with [My node is drained](../drained.md).
"""
FIRST_RUN = """\
## First look

```
healthd status                  # open conditions, since when, and what healthd decided
healthd events --since 1d       # what happened before
healthd check {name}{wide}# run the check now, without the daemon
```
"""
FIRST_LOG = """\
## First look

```
healthd status                  # open conditions, since when, and what healthd decided
healthd events --since 1d       # what happened before
journalctl -k --since -1d       # the kernel log; pipe it to healthd scan -
```
"""


def pages(checks: dict[str, Check]) -> dict[str, str]:
    """Return the text of each page by file name, without README.md."""
    return {f"{name}.md": page(check) for name, check in checks.items()}


def page(check: Check) -> str:
    explained_codes = [(code, text) for code in check.codes() if (text := check.explain(code)) is not None]
    summary = (check.summary if check.summary.endswith(".") else f"{check.summary}.").replace("<", r"\<")
    first_steps = (
        FIRST_RUN.format(name=check.name, wide=" " * max(1, 18 - len(check.name))) if check.has_run else FIRST_LOG
    )
    parts = [HEAD.format(name=check.name, summary=summary), first_steps]
    parts += [
        _section(code, text, check)
        for code, text in [*explained_codes, (f"{check.name}/others", registry.OTHERS_EXPLAIN)]
    ]
    return "\n".join(parts)


def _section(code: str, text: Explain, check: Check) -> str:
    document = explanation.code_document(code, code, "", text, check, ACT)
    (run,) = document["here"]
    severity = document["severity"] + (f", {document['worsens']} if it lasts" if document["worsens"] else "")
    severity += f" (some findings: {', '.join(document['also'])})" if document["also"] else ""
    parts = [
        ("Meaning", document["meaning"]),
        ("Why it matters", document["matters"]),
        ("What healthd does", " ".join(_reactions(run, check))),
        ("When it clears", document["ends"]),
        ("What to do", document["todo"]),
    ]
    steps = [f"{step['when']}: `{step['command']}`." for step in document["steps"]]
    if commands := " ".join(f"{step[:1].upper()}{step[1:]}" for step in steps):
        parts.append(("Commands", commands))
    return "\n\n".join([f"## {code}", _text(f"{severity}."), *(f"**{title}.** {_text(w)}" for title, w in parts), ""])


def _reactions(run: dict[str, Any], check: Check) -> Iterator[str]:
    """Yield what healthd does, with its times. The fleet limit is left out, because it is the same for all codes."""
    yield from (sentence for sentence in explanation.sentences(run) if "of a partition (" not in sentence)
    for row in run["settings"]:
        if row["setting"].endswith("_seconds"):
            yield f"{row['setting']} = {duration(row['value'])}."
    if run["required_setting"]:
        setting = f"[checks.{check.name}] {run['required_setting']}"
        yield f"Checked only if {setting} is set (healthd baseline --write sets it)."


def _text(text: str) -> str:
    """Escape a text for Markdown. Lines of a list become paragraphs."""
    lines = [" ".join(line.split()) for line in text.split("\n")]
    return re.sub(r"([*<\[\]])", r"\\\1", "\n".join(lines)).replace("\n", "\n\n")


def readme(checks: dict[str, Check], text: str) -> str:
    rows = ["| | page | subject |", "| --- | --- | --- |"]
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
