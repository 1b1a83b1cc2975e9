"""`pytest -n auto`: the tests side by side, in more processes than there are cores, for most of them wait."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePath

import hypothesis
import pytest
from fakes import scenarios
from xdist.scheduler import LoadScopeScheduling

from healthd import guard
from healthd.host import Host

# How long an example takes says only what else the machine does.
hypothesis.settings.register_profile(
    "busy machine",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    # What a reader makes of a text depends hardly on the version of Python: one of them tries a hundred.
    max_examples=25 if os.environ.get("HEALTHD_FEW_EXAMPLES") else 100,
)
hypothesis.settings.load_profile("busy machine")

# A shell's background job has SIGINT ignored, and so would have each program that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# They write into the machine's one kernel log, or read it all the while; two of them say of a device that it was taken
# out, and each daemon of this machine looks then, in the midst of what test_hung_driver counts.
KERNEL_LOG = (
    "test_hot_unplug",
    "test_daemon",
    "test_hung_driver",
    "test_package_kernel_log",
    "test_real_kernel_log",
    "test_storm",
)
# Their tests of one release of Debian stay together.
BY_RELEASE = ("test_package", "test_readme_on_a_node")


@pytest.hookimpl(optionalhook=True)  # also for `pytest -p no:xdist`
def pytest_xdist_auto_num_workers() -> int:
    cores = len(os.sched_getaffinity(0))
    return min(3 * cores, cores + 8)


@pytest.hookimpl(optionalhook=True)  # also for `pytest -p no:xdist`
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    config.option.loadscopereorder = False  # in their order: the end-to-end tests first, the others fill the gaps
    return Scheduling(config, log)


class Scheduling(LoadScopeScheduling):
    """xdist's own, which gives all tests of a group to one process."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def group(nodeid: str) -> str:
    """An end-to-end file: its tests share a cluster or a container, or a package. Elsewhere the cases of one test."""
    file, _, test = nodeid.partition("::")
    if "e2e" not in PurePath(file).parts and PurePath(file).stem not in KERNEL_LOG:
        return f"{file}::{test.partition('[')[0]}"
    if PurePath(file).stem in BY_RELEASE:
        return f"{file}[{test.partition('[')[2]}"
    return "kernel log" if PurePath(file).stem in KERNEL_LOG else file


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What healthd counts of its own mistakes is the whole process's, like its log: it begins anew with each test."""
    guard.dropped.clear()
    guard._last.clear()
    guard._told.clear()


@pytest.fixture
def host(tmp_path: Path) -> Callable[..., Host]:
    """Makes hosts that have GPUs: host("gpu.3.lost = true")."""
    return scenarios(tmp_path)


@pytest.fixture
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Host]:
    """Makes hosts as the test's file says, with its `make(folder, ...)`, in a folder of this test."""
    return partial(request.module.make, tmp_path)
