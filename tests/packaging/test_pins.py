"""Tests of constraints.txt: only `make pins` changes the versions in .venv, the wheel and the packages."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.one_python

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
spec = importlib.util.spec_from_file_location("pins", ROOT / "scripts/pins.py")
pins = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pins)


def wanted() -> Iterator[str]:
    """Yield the requirements of an environment of healthd and of a package build."""
    yield from PROJECT["dependencies"]
    yield from PYPROJECT["build-system"]["requires"]
    for extra, requirements in PROJECT["optional-dependencies"].items():
        if extra != "spark":
            yield from requirements


def pinned(python: str) -> dict[str, str]:
    """Return name -> version of the pins for this Python, at most one per package."""
    found: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        pin = Requirement(line)
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            (exactly,) = pin.specifier
            assert exactly.operator == "=="
            assert found.setdefault(canonicalize_name(pin.name), exactly.version) == exactly.version
    return found


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("wish", sorted({*wanted()}))
def test_what_pyproject_asks_for_has_a_pin_that_satisfies_it(wish: str, python: str) -> None:
    requirement = Requirement(wish)
    if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
        assert requirement.specifier.contains(pinned(python)[canonicalize_name(requirement.name)])


def test_an_environment_has_no_extra_that_has_no_pins() -> None:
    made = re.findall(r"make_venv \S+ \S+ \"\.\[(\S+)\]\"", (ROOT / "scripts/setup.sh").read_text())
    assert {extra for extras in made for extra in extras.split(",")} <= {*PROJECT["optional-dependencies"]} - {"spark"}
    assert len(made) == 2


@pytest.mark.parametrize("script", sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("*/*.sh")))
def test_a_script_that_has_pip_install_or_build_gives_it_the_pins(script: str) -> None:
    text = (ROOT / script).read_text()
    if re.search(r"-m (pip (install|wheel)|build) ", text):
        assert "constraints.txt" in text


def test_a_package_that_left_a_python_behind_has_a_pin_for_each() -> None:
    found = {
        "3.10": {"numpy": "2.2", "tomli": "2.5", "tqdm": "4.70"},
        "3.11": {"numpy": "2.4", "tqdm": "4.70"},
        "3.12": {"numpy": "2.5", "tqdm": "4.70"},
        "3.13": {"numpy": "2.5", "tqdm": "4.70"},
    }
    assert pins.pins(found) == [
        'numpy==2.2; python_version < "3.11"',
        'numpy==2.4; python_version >= "3.11" and python_version < "3.12"',
        'numpy==2.5; python_version >= "3.12"',
        "tomli==2.5",
        "tqdm==4.70",
    ]
