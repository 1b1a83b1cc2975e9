"""Write the tree in CONTRIBUTING.md: each package with the first line of its docstring.

Run it after a package was added, removed or renamed. tests/docs/test_contributing.py fails if the tree is out of date.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
HEADING, NEXT = "## The tree\n", "\n`healthd/checks` is a symbolic link"
COLUMN = 34
OTHER_PATHS = {
    "checks/NAME.py": "The built-in checks, one per file.",
    "conf/healthd.toml": "Every setting with its default and a comment.",
    "conf/profiles/": "Expected hardware of machine types, one file per type.",
    "docs/": "Pages for users and developers; docs/adr/ has the decisions.",
    "packaging/": "The unit, packages, Slurm scripts, Prometheus rules, Grafana, Ansible.",
    "man/": "The manual pages.",
    "scripts/": "Demo, set-up, wheel, and the programs that write generated pages.",
    "bench/": "Benchmarks, a soak test, a simulated fleet, generated histories.",
    "tests/": "The same tree as healthd/; e2e/ needs root; support/ has helpers and fakes.",
}


def summary(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n")[0]


def tree() -> str:
    """Return the tree as an indented block of text, one line per package."""
    lines = [(name, text) for name, text in OTHER_PATHS.items() if name.startswith(("checks", "conf"))]
    lines.append(("healthd/", summary(ROOT / "healthd/__init__.py")))
    for path in sorted((ROOT / "healthd").rglob("__init__.py")):
        names = path.parent.relative_to(ROOT / "healthd").parts
        if names and names[0] != "checks":
            lines.append((f"{'  ' * len(names)}{names[-1]}/", summary(path)))
    lines += [(name, text) for name, text in OTHER_PATHS.items() if not name.startswith(("checks", "conf"))]
    return "".join(f"    {name.ljust(COLUMN)}{text}\n" for name, text in lines)


def page(text: str) -> str:
    """Return the page with the current tree."""
    before, _, rest = text.partition(HEADING)
    return f"{before}{HEADING}\n{tree()}{NEXT}{rest.partition(NEXT)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
