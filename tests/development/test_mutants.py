"""Tests of scripts/mutants.py and its list: after a rename or a move the list must be adapted."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants_script", ROOT / "scripts/mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants_script"] = module  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


SOURCE = '''
class Gauge:
    def level(self, value, low=1):
        """1 < 2"""
        if value < low and not value == 7:
            return "low"
        return max(value, low)


def first(items):
    for item in items:
        if item:
            continue
        if item is None:
            continue
    return items
'''


def make_mutant(mutants, function, line, mutated, occurrence=0):
    return mutants.Mutant("x", "slurm", "chosen", "gauge.py", function, line, mutated, occurrence)


def test_verify_finds_each_listed_mutant_in_source(mutants):
    assert mutants.verify(mutants.read(mutants.LIST), ROOT) == []


def test_list_has_25_mutants_per_area_and_50_chosen_with_harm(mutants):
    stored = mutants.read(mutants.LIST)
    assert Counter(entry.area for entry in stored) == dict.fromkeys(mutants.AREAS, 25)
    chosen = [entry for entry in stored if entry.kind == mutants.CHOSEN]
    assert len(chosen) == 50
    assert all(entry.harm for entry in chosen)


def test_list_names_tests_of_each_result(mutants):
    for entry in mutants.read(mutants.LIST):
        assert entry.result in ("", "killed", "survived")
        assert bool(entry.tests) == bool(entry.result)


def test_applied_replaces_one_line_and_keeps_indentation(mutants):
    changed = mutants.applied(make_mutant(mutants, "first", "continue", "break", 2), SOURCE)
    assert changed == SOURCE.replace("is None:\n            continue", "is None:\n            break")


@pytest.mark.parametrize(
    ("function", "line", "mutated", "occurrence"),
    [
        ("Gauge.width", "return items", "return None", 0),  # no such function
        ("first", 'return "low"', "return None", 0),  # in another function
        ("first", "continue", "break", 0),  # twice
        ("first", "continue", "break", 3),
        ("first", "return items", "return (items)", 0),  # no change
        ("first", "return items", "return items)", 0),  # invalid Python
    ],
)
def test_applied_rejects_unfitting_mutants(mutants, function, line, mutated, occurrence):
    with pytest.raises(mutants.NotApplicable):
        mutants.applied(make_mutant(mutants, function, line, mutated, occurrence), SOURCE)


def test_edits_change_logic_and_no_text(mutants):
    mutated_lines = {
        mutants.make_mutant("gauge.py", name, SOURCE, edit).mutated
        for name, function in mutants.functions(ast.parse(SOURCE))
        for edit in mutants.edits(function, SOURCE.encode().split(b"\n"))
    }
    assert mutated_lines == {
        "if value <= low and not value == 7:",
        "if value < low or not value == 7:",
        "if value < low and value == 7:",
        "if value < low and not value != 7:",
        "if value < low and not value == 8:",
        "if not (value < low and not value == 7):",
        'return "low_"',
        "return None",
        "return min(value, low)",
        "break",
        "if not (item):",
        "if item is not None:",
    }


@pytest.fixture
def gauge(mutants, monkeypatch, tmp_path):
    """Create a tree with one area that has two functions."""
    (tmp_path / "gauge").mkdir()
    (tmp_path / "gauge/gauge.py").write_text(SOURCE)
    monkeypatch.setattr(mutants, "AREAS", {"gauge": ("gauge", 2)})
    return tmp_path


def test_draw_is_repeatable_for_seed(mutants, gauge):
    drawn = mutants.draw(1, gauge, {"gauge": 2})
    assert drawn == mutants.draw(1, gauge, {"gauge": 2})
    assert {entry.function for entry in drawn} == {"Gauge.level", "first"}
    assert [entry for entry in drawn if mutants.applied(entry, SOURCE) == SOURCE] == []


def test_redraw_prefers_function_without_mutants(mutants, gauge):
    stored = mutants.draw(1, gauge, {"gauge": 1}, taken={("gauge/gauge.py", "first")})
    (new,) = mutants.redraw(1, gauge, stored, [stored[0].id])
    assert (stored[0].function, new.function, new.id) == ("Gauge.level", "first", stored[0].id)
    assert mutants.redraw(1, gauge, stored, []) == stored


def test_choices_prefer_killing_test_then_executing_tests(mutants, tmp_path):
    folder = tmp_path / "tests"
    folder.mkdir()
    (tmp_path / "gauge.py").write_text(SOURCE)
    texts = {
        "test_a.py": "",
        "test_b.py": "from healthd.slurm import gauge",
        "test_gauge.py": "",
        "test_c.py": 'run([python, "-m", "healthd", "check"])',
        "test_d.py": "import json",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    executed = {"test_a.py": frozenset({"healthd/slurm/gauge.py:3"}), "test_d.py": frozenset({"gauge.py:11"})}
    tests = {f"tests/{name}::test_it": mutants.Test(0.1, executed.get(name, frozenset())) for name in texts}
    (tmp_path / "healthd/slurm").mkdir(parents=True)
    (tmp_path / "healthd/slurm/gauge.py").write_text(SOURCE)
    in_level = make_mutant(mutants, "Gauge.level", "", "")
    in_level = dataclasses.replace(in_level, file="healthd/slurm/gauge.py", tests=("test_d.py::test_it",))
    assert [*mutants.choices(in_level, tmp_path, tests)] == [
        ["tests/test_d.py::test_it"],
        ["tests/test_a.py::test_it"],
        ["tests/test_b.py::test_it", "tests/test_gauge.py::test_it", "tests/test_c.py::test_it"],
    ]
