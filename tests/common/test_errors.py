"""errors: all exceptions of healthd have one base class."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import pytest

import healthd
from healthd.common.errors import HealthdError

pytestmark = pytest.mark.one_python  # it has all extras, and each module is imported


def modules() -> list[ModuleType]:
    found = pkgutil.walk_packages(healthd.__path__, "healthd.", onerror=None)
    return [importlib.import_module(module.name) for module in found if not module.name.endswith("__main__")]


def defined_exceptions() -> list[type[BaseException]]:
    """Return every exception class that a module of healthd defines."""
    return [
        value
        for module in modules()
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == module.__name__
    ]


def test_every_exception_of_healthd_is_a_healthd_error() -> None:
    assert [error.__qualname__ for error in defined_exceptions() if not issubclass(error, HealthdError)] == []
