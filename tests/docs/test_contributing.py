"""CONTRIBUTING.md stays true: its tree shows every module, and its example of a check is one."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from fakes import codes, findings
from trees import write

from healthd.settings.registry import Check
from healthd.settings.settle import settle

pytestmark = pytest.mark.one_python

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
TREE = TEXT.partition("## The tree")[2].partition("\n## ")[0]


def rooms() -> dict[str, str]:
    """What the tree says of each room of healthd/, and of healthd itself (""), by its headings."""
    text = TREE.partition("\n    healthd/\n")[2].partition("\n    packaging/")[0]
    parts = re.split(r"(?m)^      ([a-z]+(?:/[a-z]+)?)/(?=\s)", text)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


@pytest.mark.parametrize(
    "module", sorted(str(path.relative_to(ROOT / "healthd")) for path in (ROOT / "healthd").rglob("[!_]*.py"))
)
def test_the_tree_shows_a_module(module):
    room, _, name = module.rpartition("/")
    if not module.startswith(("checks/", "kernel/lines/", "fleet/sources/", "fleet/answers/", "fleet/chapters/")):
        assert re.search(rf"(?m)(^|[ ,]){re.escape(name)}( |,|$)", rooms()[room])


def test_the_tree_shows_no_module_that_does_not_exist():
    for room, text in rooms().items():
        named = re.findall(r"(?:^|[ ,])([a-z_0-9]+\.py)\b", text, re.MULTILINE)
        assert [name for name in named if not (ROOT / "healthd" / room / name).exists()] == []


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


def test_the_example_of_a_check_works(example, tmp_path):
    def files(text: str) -> list[str]:
        return codes(findings(example, write(tmp_path, {"/proc/sys/fs/file-nr": text})))

    assert files("950\t0\t1000\n") == ["open_files/many"]
    assert files("1312\t0\t9223372036854775807\n") == []


def test_the_example_of_its_settings_is_accepted_and_at_their_defaults(example):
    table = tomllib.loads(re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)[0].replace("\n#", "\n"))
    loaded = settle(table, "healthd.toml", {}, {"open_files": Check("open_files", example)})
    assert loaded.checks["open_files", ""] == example.Config()


def test_each_command_of_make_that_is_named_exists():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in set(re.findall(r"`make ([a-z-]+)`", TEXT)):
        assert re.search(rf"(?m)^{target}:", makefile), target
