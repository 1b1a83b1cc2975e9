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


def required_packages() -> Iterator[str]:
    """Yield the requirements of an environment of healthd and of a package build."""
    yield from PROJECT["dependencies"]
    yield from PYPROJECT["build-system"]["requires"]
    for extra, requirements in PROJECT["optional-dependencies"].items():
        if extra != "spark":
            yield from requirements


def pins_for(python: str) -> dict[str, str]:
    """Return name -> version of the pins for this Python, at most one per package."""
    found: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        pin = Requirement(line)
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            (specifier,) = pin.specifier
            assert specifier.operator == "=="
            assert found.setdefault(canonicalize_name(pin.name), specifier.version) == specifier.version
    return found


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("requirement_text", sorted({*required_packages()}))
def test_each_requirement_has_satisfying_pin(requirement_text: str, python: str) -> None:
    requirement = Requirement(requirement_text)
    if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
        assert requirement.specifier.contains(pins_for(python)[canonicalize_name(requirement.name)])


def test_environments_use_only_extras_with_pins() -> None:
    extras_lists = re.findall(r"make_venv \S+ \S+ \"\.\[(\S+)\]\"", (ROOT / "scripts/setup.sh").read_text())
    assert {extra for extras in extras_lists for extra in extras.split(",")} <= {*PROJECT["optional-dependencies"]} - {
        "spark"
    }
    assert len(extras_lists) == 2


@pytest.mark.parametrize("script", sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("*/*.sh")))
def test_install_and_build_scripts_use_pins(script: str) -> None:
    text = (ROOT / script).read_text()
    if re.search(r"-m (pip (install|wheel)|build) ", text):
        assert "constraints.txt" in text


def test_pins_have_version_per_python_if_needed() -> None:
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
