"""Tests of CONTRIBUTING.md (current tree), the example check in docs/development.md, and the contact in SECURITY.md."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from fakes import codes, findings
from trees import write

from healthd.agent.settings.effective import resolve_settings
from healthd.agent.settings.registry import Check

pytestmark = pytest.mark.one_python

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
TEXT = (ROOT / "docs/development.md").read_text("utf-8")
MAX_BYTES = 8192


def test_contributing_tree_is_current():
    script = runpy.run_path(str(ROOT / "scripts/contributing_tree.py"))
    assert script["page"](CONTRIBUTING) == CONTRIBUTING, "run scripts/contributing_tree.py"


def test_contributing_is_short():
    assert len(CONTRIBUTING.encode()) <= MAX_BYTES


def test_security_contact_is_maintainer():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    contacts = re.findall(r"<([^<>@\s]+@[^<>\s]+)>", (ROOT / "SECURITY.md").read_text("utf-8"))
    assert contacts == [maintainer["email"] for maintainer in project["maintainers"]]


@pytest.fixture
def example(tmp_path) -> Iterator[ModuleType]:
    path = tmp_path / "open_files.py"
    path.write_text(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0])
    spec = importlib.util.spec_from_file_location("open_files", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["open_files"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["open_files"]


def test_example_check_works(example, tmp_path):
    def files(text: str) -> list[str]:
        return codes(findings(example, write(tmp_path, {"/proc/sys/fs/file-nr": text})))

    assert files("950\t0\t1000\n") == ["open_files/many"]
    assert files("1312\t0\t9223372036854775807\n") == []


def test_example_settings_are_defaults(example):
    table = tomllib.loads(re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)[0].replace("\n#", "\n"))
    loaded = resolve_settings(table, "healthd.toml", {}, {"open_files": Check("open_files", example)})
    assert loaded.checks["open_files", ""] == example.Config()


def test_each_named_make_target_exists():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in set(re.findall(r"`make ([a-z-]+)`", CONTRIBUTING + TEXT)):
        assert re.search(rf"(?m)^{target}:", makefile), target
