"""What an end-to-end test needs of the machine. Missing: the test is skipped, where tests must run it fails."""

from __future__ import annotations

import os
import shutil
import urllib.request
from typing import NoReturn

import pytest


def require(reason: str) -> NoReturn:
    """Skip this test because of `reason`; with CI or HEALTHD_REQUIRE_E2E in the environment, fail it."""
    if os.environ.get("CI") or os.environ.get("HEALTHD_REQUIRE_E2E"):
        pytest.fail(f"end-to-end tests must run here, but {reason}")
    pytest.skip(reason)


def require_root() -> None:
    if os.geteuid() != 0:
        require("this test needs root")


def require_programs(*names: str, packages: str) -> None:
    """`packages`: what to install for them ("slurmctld munge")."""
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        require(f"{', '.join(missing)} not found: apt-get install {packages}")


def require_network(*urls: str) -> None:
    """For a test that installs packages as people do."""
    for url in urls:
        try:
            urllib.request.urlopen(url, timeout=120).close()
        except OSError as error:
            require(f"{url} cannot be reached: {error}")
