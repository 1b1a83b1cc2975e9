"""Write a new check: copy the example of docs/development.md under another name, with its test, settings and pages.

    .venv/bin/python scripts/new_check.py NAME [--under HEADING]

HEADING is a heading of conf/healthd.toml. The result is complete and its tests pass; edit it from there. Exits with 64
and one sentence if the name or the heading is invalid.
"""

from __future__ import annotations

import argparse
import contextlib
import keyword
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "conf/healthd.toml"
EXAMPLE = "open_files"
MAX_NAME_LENGTH = 24  # characters of a name, so that lines stay within 120
COMMENT_COLUMN = 40  # column of the comments in the sample settings
USAGE = 64


def example() -> tuple[str, str, str]:
    """Return the check, its test and its settings table from docs/development.md."""
    text = (ROOT / "docs/development.md").read_text("utf-8")
    check, test = re.findall(r"(?s)```python\n(.*?)```", text)[:2]
    (table,) = re.findall(r"(?s)```toml\n(.*?)```", text)
    return check, test, table


def problem(name: str) -> str:
    """Return why the name is invalid for a new check, or "" if it is valid."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        return f'"{name}" is not a valid name for a check: use lower-case letters, digits and "_", as in "disk_space"'
    if len(name) > MAX_NAME_LENGTH:
        return f'"{name}" is too long for a check: {MAX_NAME_LENGTH} characters at most'
    for path in (f"checks/{name}.py", f"tests/checks/test_{name}.py"):
        if (ROOT / path).exists():
            return f'the name "{name}" is taken: there is {path}'
    return ""


def settings(text: str, table: str, heading: str) -> str:
    """Return the sample settings with the table at the end of the section under the heading. Raises ValueError."""
    headings = re.findall(r"(?m)^# --- (.*)$", text)
    check_headings = headings[headings.index("checks") + 1 :]
    if heading not in check_headings:
        raise ValueError(f'conf/healthd.toml has no heading "{heading}": there are {", ".join(check_headings)}')
    start = text.index(f"# --- {heading}\n")
    end = text.find("\n# --- ", start)
    above, below = (text[:end], text[end:]) if end >= 0 else (text, "")
    return f"{above.rstrip()}\n\n{table.rstrip()}\n{below}"


def renamed(text: str, name: str) -> str:
    return re.sub(rf"\b{EXAMPLE}\b", name, text)


def aligned(table: str) -> str:
    """Align the comments of the table with those of the sample settings."""
    halves = (line.partition("  #") for line in table.splitlines())
    return "\n".join(f"{left.rstrip().ljust(COMMENT_COLUMN)}#{right}" for left, _, right in halves)


def restore(before: dict[str, str | None]) -> None:
    """Restore all files as far as possible, so that no check is half written."""
    for path, text in before.items():
        with contextlib.suppress(OSError):
            if text is None:
                (ROOT / path).unlink(missing_ok=True)
            else:
                (ROOT / path).write_text(text, "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Write a new check as a starting point.")
    parser.add_argument("name", metavar="NAME")
    parser.add_argument(
        "--under", metavar="HEADING", default="host", help="heading of conf/healthd.toml (default: host)"
    )
    args = parser.parse_args()
    check, test, table = (renamed(text, args.name) for text in example())
    error_text = problem(args.name)
    try:
        sample = settings(SAMPLE.read_text("utf-8"), aligned(table), args.under)
    except ValueError as error:
        error_text = error_text or str(error)
    if error_text:
        print(f"new_check: {error_text}", file=sys.stderr)
        return USAGE
    files = {f"checks/{args.name}.py": check, f"tests/checks/test_{args.name}.py": test, "conf/healthd.toml": sample}
    before = {path: (ROOT / path).read_text("utf-8") if (ROOT / path).exists() else None for path in files}
    try:
        for path, text in files.items():
            (ROOT / path).write_text(text, "utf-8")
    except OSError as error:
        restore(before)
        print(f"new_check: {error.filename}: cannot be written: {error.strerror}", file=sys.stderr)
        return USAGE
    for script in ("checks_page.py", "fleet_codes.py"):
        subprocess.run([sys.executable, ROOT / "scripts" / script], check=True)
    pages = "docs/checks.md, docs/peers.md, README.md and healthd/fleet/codes.csv"
    print("\n".join(f"{path}: written" for path in [*files, pages]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
