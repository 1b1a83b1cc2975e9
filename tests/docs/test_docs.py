"""Tests of the documents: each function, file, link and code that they name exists."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from healthd import api
from healthd.agent.settings import registry

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "man").glob("*")])
CALL = re.compile(r"`((?:[A-Za-z_]+\.)+[a-z_]+)\([^`]*`")
CLASS = re.compile(r"`((?:[a-z_]+\.)+[A-Z]+[a-z][A-Za-z]+)`")
FILE = re.compile(r"`((?:healthd|checks|conf|docs|man|packaging|scripts|tests|bench)/[\w./-]+\.\w+)`")
LINK = re.compile(r"\]\(([^)#:]+)(?:#([^)]*))?\)")
CHECKS = registry.built_in_checks()


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def defined_names(tree: ast.Module) -> set[str]:
    """Return functions, classes and methods: "run", "Daemon", "Daemon.hear"."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


MODULES = {
    ".".join(path.relative_to(base).with_suffix("").parts): defined_names(ast.parse(path.read_text("utf-8")))
    for base, pattern in ((ROOT / "healthd", "[!_]*.py"), (ROOT, "checks/*.py"))
    for path in (base.rglob(pattern) if base.name == "healthd" else base.glob(pattern))
}
ENDINGS: dict[str, list[str]] = {}  # "worker.process", "process": ["agent.worker.process"]
for module in MODULES:
    parts = module.split(".")
    for start in range(len(parts)):
        ENDINGS.setdefault(".".join(parts[start:]), []).append(module)
METHODS = {name for names in MODULES.values() for name in names if "." in name}
METHOD_NAMES = {name.partition(".")[2] for name in METHODS}
THIRD_PARTY_NAMES = {"loss.item", "msgspec.Struct"}


def is_defined(name: str) -> bool:
    """Return True if a page may name this function or class.

    The module may be shortened from the left (`worker.process.Worker.do_run`), a class may be named without its module,
    and a method may follow the name of a value (`past.growth`).
    """
    words = name.removeprefix("healthd.").split(".")
    if words[0] == "api":  # its names are imported at their first use
        return words[1] in api.__all__
    for count in range(1, len(words)):
        name_in_module = ".".join(words[count:])
        if any(name_in_module in MODULES[module] for module in ENDINGS.get(".".join(words[:count]), ())):
            return True
    is_method_of_value = len(words) == 2 and words[1] in METHOD_NAMES
    return name in METHODS | THIRD_PARTY_NAMES or is_method_of_value or words[0] in sys.stdlib_module_names


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_function_exists(page):
    text = page.read_text("utf-8")
    assert [name for name in CALL.findall(text) + CLASS.findall(text) if not is_defined(name)] == []


@pytest.mark.parametrize("name", ["work.worker.Worker.do_run", "worker.process.Worker.no_run", "kernel.parse.parse"])
def test_name_in_wrong_package_is_not_defined(name):
    assert not is_defined(name)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_file_exists(page):
    text = page.read_text("utf-8")
    named = [name for name in FILE.findall(text) if name not in ("checks/NAME.py", "checks/open_files.py")]
    assert [name for name in named if not (ROOT / name).exists() and "open_files" not in name] == []


SOURCES = sorted(
    [*(ROOT / "healthd").rglob("*.py"), *(ROOT / "checks").glob("*.py"), *(ROOT / "docs/adr").glob("*.md")]
)
FILE_NAME = re.compile(
    r"(?<![\w./-])((?:\w+/)*\w+\.(?:py|csv))(?![\w/])"
)  # "parse.py", "agent/kernel_log/rules/nvidia.py"
TREE_FILES = {
    str(path.relative_to(ROOT))
    for top in ("healthd", "checks", "tests", "scripts", "bench")
    for path in (ROOT / top).rglob("*.*")
}
TREE_FILES |= {path.name for path in ROOT.glob("*.py")}
EXAMPLE_FILES = {"open_files.py", "checks/open_files.py", "job.csv", "calls.csv"}


@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_file_named_in_source_or_record_exists(source):
    named = {
        name for name in FILE_NAME.findall(source.read_text("utf-8")) if not name.endswith("NAME.py")
    } - EXAMPLE_FILES
    assert {
        name for name in named if not any(path == name or path.endswith(f"/{name}") for path in TREE_FILES)
    } == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_link_target_exists(page):
    for target, anchor in LINK.findall(page.read_text("utf-8")):
        target_path = page.parent / target
        assert target_path.exists(), target
        if anchor:
            text = target_path.read_text("utf-8")
            headings = [
                re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-")
                for heading in re.findall(r"(?m)^#+ (.*)", text)
            ]
            assert anchor in headings or f'id="{anchor}"' in text, f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_code_exists(page):
    text = page.read_text("utf-8")
    if page.name == "kernel-lines.md":  # the last column quotes kernel lines: "log mount/recovery failed"
        text = re.sub(r"(?m) `[^`]*` \|$", "", text)
    for code in re.findall(rf"\b(?<!/)((?:{'|'.join(CHECKS)})/[a-z0-9_-]+)\b(?![./])", text):
        assert registry.explain(CHECKS, code) is not None, code


TERMS = re.findall(r"(?m)^\| (.+?) \| .+ \| (.*`.*) \|$", (ROOT / "docs/glossary.md").read_text("utf-8"))


def test_glossary_has_at_most_60_terms() -> None:
    assert 40 < len(TERMS) <= 60


@pytest.mark.parametrize(("term", "location"), TERMS, ids=[word for word, _ in TERMS])
def test_glossary_term_is_in_named_file(term, location):
    text = ""
    for name in re.findall(r"`([^`]+)`", location):
        if "/" in name or name.endswith(".py"):
            path = next((path for path in (ROOT / "healthd" / name, ROOT / name) if path.exists()), None)
            assert path is not None, name
            text = path.read_text("utf-8") if path.is_file() else ""
        else:
            assert re.search(rf"\b{name}\b", text), name
