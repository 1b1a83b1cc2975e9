"""healthd's errors are one tree, and it is drawn as it is."""

from __future__ import annotations

import importlib
import pkgutil
import re
from types import ModuleType

import pytest

import healthd
from healthd import errors
from healthd.errors import HealthdError

pytestmark = pytest.mark.one_python  # which has all extras: each module is imported
LINE = re.compile(r"[├└]── (?P<name>\w+)(?: \((?P<other>\w+)\))? +(?P<file>[\w/]+\.py) +\S.*")


def modules() -> list[ModuleType]:
    found = pkgutil.walk_packages(healthd.__path__, "healthd.", onerror=None)
    return [importlib.import_module(module.name) for module in found if not module.name.endswith("__main__")]


def raised() -> list[type[BaseException]]:
    """Every class of an exception that a module of healthd defines."""
    return [
        value
        for module in modules()
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == module.__name__
    ]


def test_every_error_of_healthd_is_a_healthd_error() -> None:
    assert [error.__qualname__ for error in raised() if not issubclass(error, HealthdError)] == []


def test_the_tree_is_drawn_as_it_is() -> None:
    drawn = [line for line in str(errors.__doc__).splitlines() if line.startswith(("├", "└", "│", " "))]
    found = [LINE.fullmatch(line) for line in drawn]
    assert None not in found, "a line of the drawing says name, file and what it means"
    assert {match.group("name", "other", "file") for match in found if match} == {
        (
            error.__name__,
            next((base.__name__ for base in error.__bases__ if base is not HealthdError), None),
            f"{error.__module__.removeprefix('healthd.').replace('.', '/')}.py",
        )
        for error in raised()
        if error is not HealthdError
    }
