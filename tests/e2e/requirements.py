"""Requirements of the end-to-end tests. If one is missing, the test is skipped, or fails where tests must run."""

from __future__ import annotations

import os
import shutil
import urllib.request
from typing import NoReturn

import pytest


def require(reason: str) -> NoReturn:
    """Skip this test because of `reason`, or fail it if CI or HEALTHD_REQUIRE_E2E is set."""
    if os.environ.get("CI") or os.environ.get("HEALTHD_REQUIRE_E2E"):
        pytest.fail(f"end-to-end tests must run here, but {reason}")
    pytest.skip(reason)


def require_root() -> None:
    if os.geteuid() != 0:
        require("this test needs root")


def require_programs(*names: str, packages: str) -> None:
    """Require these programs. `packages` is the apt-get text for them ("slurmctld munge")."""
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        require(f"{', '.join(missing)} not found: apt-get install {packages}")


def require_network(*urls: str) -> None:
    """Require these URLs, for a test that installs packages as users do."""
    for url in urls:
        try:
            urllib.request.urlopen(url, timeout=120).close()
        except OSError as error:
            require(f"{url} cannot be reached: {error}")
