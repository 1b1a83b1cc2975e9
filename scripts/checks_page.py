"""Write docs/checks.md, the number of checks in README.md, and docs/peers.md's list of checks without a comparison.

Run it after a check changes. Order and headings are those of conf/healthd.toml. tests/docs/test_checks_page.py fails if
a page is outdated.
"""

from __future__ import annotations

import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from healthd.agent.reporting.explanation import finding_ending  # noqa: E402
from healthd.agent.reporting.fault_timeline import possible_findings  # noqa: E402
from healthd.agent.settings import registry  # noqa: E402
from healthd.agent.settings.config import CheckConfig  # noqa: E402
from healthd.agent.settings.limits import Seconds  # noqa: E402
from healthd.agent.settings.registry import Check  # noqa: E402
from healthd.common.codec import Rule, fields_of  # noqa: E402
from healthd.common.duration import duration  # noqa: E402
from healthd.common.model import Explain  # noqa: E402

SAMPLE, PAGE, README = ROOT / "conf/healthd.toml", ROOT / "docs/checks.md", ROOT / "README.md"
PEERS = ROOT / "docs/peers.md"
COUNT = re.compile(r"(?m)^\d+ checks; ")
HEAD = """\
# Checks

Look up what a check does, what it finds, and its settings. For each code, `healthd explain CODE` also prints why the
fault matters and what to do. `scripts/checks_page.py` writes this page from the code.

There are {checks} checks: {run} run by themselves ({idle} of them only while the node is drained and idle), {listen}
only read the kernel log. `mount`, `exec` and `match` run once for each of their tables, and not at all without one.
`healthd status` counts the same checks: those that passed, those with nothing to check here, and the others by reason.

**Severity** is the usual severity of the code ([severity.md](severity.md)): a warning never touches Slurm, degraded
drains, critical also requeues. Some findings are milder at first, and the settings can change the severity.

**Clears after** is what `healthd status` prints. "Clean runs": the check finds nothing `clear_after` times in a row.
Time without a repeat does not count while the node is drained, unless the part was reset or the node rebooted. `healthd
repaired CODE PART` ends every condition. A milder finding of a code may end differently: see `healthd explain`.

**Settings.** All checks have `enabled`, `interval_seconds` (the daemon's, 300), `timeout_seconds` (10), `clear_after`
(2), `enforce` and `severity`. The blocks below show the other settings with their defaults, as in
[conf/healthd.toml](../conf/healthd.toml). Seconds are accepted up to a year (31622400); the limits of other numbers are
listed below each block. `healthd config check FILE` reports values that are not accepted.
"""


def groups() -> dict[str, list[str]]:
    """Return the names of the checks by heading."""
    found: dict[str, list[str]] = {}
    for heading, name in re.findall(r"(?m)^# --- (.*)$|^\[checks\.(\w+)\]", SAMPLE.read_text("utf-8")):
        if heading:
            group = found.setdefault(heading[:1].upper() + heading[1:], [])
        else:
            group.append(name)
    return {heading: names for heading, names in found.items() if names}


def page(checks: dict[str, Check]) -> str:
    runs = [check for check in checks.values() if check.has_run]
    idle = sum(check.when == "idle" for check in runs)
    parts = [HEAD.format(checks=len(checks), run=len(runs), idle=idle, listen=len(checks) - len(runs))]
    for heading, names in groups().items():
        parts.append(f"## {heading}\n")
        parts += [_section(checks[name]) for name in names]
    return "\n".join(parts)


def _section(check: Check) -> str:
    summary, _, rules = (check.module.__doc__ or "").strip().partition("\n")
    rows = [(code, found) for code in check.codes() if (found := check.explain(code)) is not None]
    codes = [
        f"| `{code}` | {text.severity.name.lower()} | {_ending(code, text, check)} | {_cell(text.meaning)} |"
        for code, text in rows
    ]
    return "\n".join(
        [
            f"### {check.name}\n",
            f"{_text(summary)} {_when(check)}".rstrip() + "\n",
            f"{_text(rules.strip())}\n",
            "| code | severity | clears after | meaning |",
            "| --- | --- | --- | --- |",
            *codes,
            "",
            *_settings(check.name),
            *_accepted_values(check),
        ]
    )


def _when(check: Check) -> str:
    usual = check.config().interval_seconds
    if not check.has_run:
        return "Runs on each line of the kernel log."
    if check.when == "idle":
        return "Runs only while healthd has decided or made a drain and Slurm shows the node drained and idle."
    return f"Runs every {duration(usual)}." if usual else ""


def _settings(name: str) -> list[str]:
    """Return the table of the check in the sample settings, as a Markdown block."""
    _, _, after_heading = SAMPLE.read_text("utf-8").partition(f"[checks.{name}]")
    lines = after_heading.partition("\n\n")[0].splitlines()[1:]
    common = ("enabled", "interval_seconds", "timeout_seconds", "clear_after", "enforce", "severity")
    own_lines = [line for line in lines if not line.startswith(tuple(f"#{word} = " for word in common))]
    shown = [line.removeprefix("#") for line in (own_lines if name == "gpu_access" else lines)]
    return ["```toml", f"[checks.{name}]", *shown, "```\n"] if shown else []


def _accepted_values(check: Check) -> list[str]:
    """Return the accepted ranges of the check's own numbers, without seconds, in the words of the error message."""
    common = {field.name for field in fields_of(CheckConfig)}
    hints = typing.get_type_hints(check.config, include_extras=True)
    (seconds,) = _rules(Seconds)
    ranges = {
        name: rule.problem(rule.maximum + 1).removeprefix("must be ").rpartition(", got ")[0]
        for name, hint in hints.items()
        if name not in common
        for rule in _rules(hint)
        if rule.maximum is not None and rule is not seconds
    }
    same: dict[str, list[str]] = {}
    for name, accepted in ranges.items():
        same.setdefault(accepted, []).append(f"`{name}`")
    text = "; ".join(f"{', '.join(names)}: {accepted}" for accepted, names in same.items())
    return [f"Accepted: {text}.\n"] if text else []


def _rules(hint: object) -> Iterator[Rule]:
    yield from (rule for rule in getattr(hint, "__metadata__", ()) if isinstance(rule, Rule))
    for inner in typing.get_args(hint):
        yield from _rules(inner)


def _ending(code: str, text: Explain, check: Check) -> str:
    return finding_ending(possible_findings(code, text, check.config())[0])


def _cell(text: str) -> str:
    return _text(" ".join(text.split())).replace("|", r"\|")


def _text(text: str) -> str:
    return re.sub(r"([*<])", r"\\\1", text)


def readme(checks: dict[str, Check], text: str) -> str:
    """Return README.md with the current number of checks."""
    return COUNT.sub(f"{len(checks)} checks; ", text)


UNLISTED = re.compile(r"(?s)(?<=<!-- not compared: scripts/checks_page.py -->\n).*?(?=<!-- end -->)")


def peers(checks: dict[str, Check], text: str) -> str:
    compared = UNLISTED.sub("", text)
    unlisted = [f"`{name}`" for name in checks if not re.search(rf"`{name}[`/.]", compared)]
    missing = f"Checks that no table below lists yet: {', '.join(unlisted)}."
    sentence = missing if unlisted else "Each check of healthd is in a table."
    return UNLISTED.sub(lambda _: f"{sentence}\n", text)


def main() -> int:
    checks = registry.built_in_checks()
    PAGE.write_text(page(checks), "utf-8")
    README.write_text(readme(checks, README.read_text("utf-8")), "utf-8")
    PEERS.write_text(peers(checks, PEERS.read_text("utf-8")), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
