"""docs/README.md lists every page of docs/."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_python

DOCS = Path(__file__).parents[2] / "docs"
INDEX = (DOCS / "README.md").read_text("utf-8")


def test_docs_index_lists_every_page() -> None:
    pages = {path.name for path in DOCS.glob("*.md")} - {"README.md"}
    pages |= {f"{path.parent.name}/README.md" for path in DOCS.glob("*/README.md")}
    assert pages - set(re.findall(r"\]\(([^)#]+)\)", INDEX)) == set()


def test_docs_index_has_group_for_each_audience() -> None:
    groups = set(re.findall(r"(?m)^## (.*)", INDEX))
    assert {"Operate", "Integrate", "Understand", "Develop"} <= groups
