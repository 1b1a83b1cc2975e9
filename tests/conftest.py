"""Selection of the wide tests, and `pytest -n auto`: more processes than cores, since most tests wait."""

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

from healthd.common import guard
from healthd.host.host import Host

pytest_plugins = ("alone", "started")

hypothesis.settings.register_profile(
    "repeatable",
    # `make test` gives the same result for the same commit: the same examples each time, and none from an earlier run.
    derandomize=True,
    database=None,
    # The duration of an example only shows the load of the machine.
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    # The examples are the same each time. `make test-all` runs more, and others.
    max_examples=25,
)
hypothesis.settings.load_profile("repeatable")
# `make test-all` searches further, with a printed seed that alone determines the examples.
hypothesis.settings.register_profile(
    "random",
    hypothesis.settings.default,
    derandomize=False,
    # A parser's result hardly depends on the version of Python: one version tries more examples.
    max_examples=25 if os.environ.get("HEALTHD_FEW_EXAMPLES") else 100,
)

# SIGINT is ignored in a shell's background job, and would be in each program that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests that `make test` leaves to `make test-all` for their cost or needs, never because they failed.
WIDE = {
    "e2e/test_alerts_prometheus.py": "a real Prometheus that scrapes for a minute",
    "e2e/test_bad_days.py": "minutes of reboots, clock jumps and full disks",
    "e2e/test_block_topology_slurm.py": "Slurm 24.11, 70 s",
    "e2e/test_board.py": "a real Grafana or its queries, and a browser",
    "e2e/test_boot.py": "minutes of boots",
    "e2e/test_daemon.py": "the machine's only kernel log, events of real devices, every profile",
    "e2e/test_daemon_slurm.py": "minutes, with slurmctlds that die and hang",
    "e2e/test_deploy_slurm.py": "Slurm set up as in docs/deploy.md, a minute",
    "e2e/test_doctor_node.py": "nodes with missing parts, one container each",
    "e2e/test_drained_page.py": "the commands of docs/drained.md on a real Slurm",
    "e2e/test_event_kills.py": "kills",
    "e2e/test_event_transport.py": "rsyslog and rsync, restarted during the transfer",
    "e2e/test_failslow_live.py": "real jobs that become slow, a minute",
    "e2e/test_failslow_plot.py": "a browser",
    "e2e/test_failslow_unit.py": "the unit's limits under a real systemd",
    "e2e/test_files_removed.py": "the installed files removed under a running daemon",
    "e2e/test_files_replaced.py": "an upgrade under a running daemon, and its rollback",
    "e2e/test_fixtures.py": "frozen and hanging file systems",
    "e2e/test_flapping_slurm.py": "minutes of flapping faults",
    "e2e/test_fleet_air_gap.py": "a container without a network",
    "e2e/test_fleet_ingest_kills.py": "kills",
    "e2e/test_fleet_lemons_apply.py": "a real Slurm, minutes",
    "e2e/test_fleet_limit_slurm.py": "many simultaneous daemons, and Slurm 24.11",
    "e2e/test_fleet_prometheus.py": "Prometheus and VictoriaMetrics",
    "e2e/test_fleet_report.py": "a browser",
    "e2e/test_fleet_slurm_sources.py": "logs and reservations of a real slurmctld, minutes",
    "e2e/test_fleet_slurmdbd.py": "a MariaDB and a slurmdbd of each version",
    "e2e/test_hardening.py": "one container for each rule of the unit",
    "e2e/test_hooks.py": "kills, and a systemd container",
    "e2e/test_hung_driver.py": "processes in D state, visible to all tests that look for them",
    "e2e/test_job_at_source_slurm.py": "real jobs in real cgroups",
    "e2e/test_journal_fields.py": "a journald",
    "e2e/test_kills.py": "100 kills",
    "e2e/test_long_rounds.py": "rounds longer than their interval",
    "e2e/test_normal_days.py": "minutes of upgrades and restarts",
    "e2e/test_package.py": "packages in fresh Debian systems, from the network",
    "e2e/test_package_kernel_log.py": "a fresh Debian system, and the machine's only kernel log",
    "e2e/test_prolog_epilog.py": "one cluster for each test, some with hanging programs",
    "e2e/test_rack.py": "21 daemons with Slurm 24.11 and a real Prometheus, minutes",
    "e2e/test_readme_on_a_node.py": "fresh Debian systems, from the network",
    "e2e/test_real_file_system.py": "real errors of a file system, in the machine's only kernel log",
    "e2e/test_real_kernel_log.py": "the machine's only kernel log, filled to its capacity",
    "e2e/test_repair_claim.py": "claims with a real slurmctld, minutes",
    "e2e/test_repair_jobs_slurm.py": "jobs on several versions of Slurm",
    "e2e/test_repair_prolog.py": "a repair with jobs, on its own cluster",
    "e2e/test_repair_reboot.py": "reboots on two versions of Slurm, minutes",
    "e2e/test_repair_reset.py": "resets with a real slurmctld and kills, minutes",
    "e2e/test_repair_trials.py": "kills and races with a real Slurm, minutes",
    "e2e/test_repair_unit.py": "the unit under a real systemd",
    "e2e/test_requeue_by_part.py": "parallel jobs on each version of Slurm",
    "e2e/test_run_leaves_nothing.py": "frozen disks and cgroups, and runs killed while using them",
    "e2e/test_shells.py": "TAB in bash, zsh and fish",
    "e2e/test_site_checks.py": "a site's check that hangs",
    "e2e/test_slurm_accounting.py": "a MariaDB and a slurmdbd",
    "e2e/test_slurm_commands.py": "each Slurm command, late and broken",
    "e2e/test_slurm_failover_versions.py": "failovers on newer versions of Slurm, from the network",
    "e2e/test_slurm_real.py": "every version of Slurm, from the network",
    "e2e/test_slurm_reboot.py": "reboots on each version of Slurm, minutes",
    "e2e/test_slurm_states.py": "each state of a node, minutes",
    "e2e/test_soak_short.py": "two minutes of all events",
    "e2e/test_stories.py": "every draining fault, from start to end",
    "e2e/test_storm.py": "100,000 lines into the machine's only kernel log",
    "e2e/test_user_fuse.py": "a user's file system that hangs",
    "e2e/test_validation_nodes.py": "reservations and jobs between nodes, minutes",
    "e2e/test_validation_slurm.py": "jobs that end a validation, minutes",
    "e2e/test_web.py": "minutes of clients that guess, hang and flood",
    "docs/test_fleet_limit_figure.py": "draws a figure of docs/ again",
    "host/test_hot_unplug.py": "device events received by every daemon of this machine",
    "development/test_new_check.py": "`make check` on a new tree",
    "packaging/test_wheel.py": "builds wheels",
}
# Tests that `make test` runs from wide files: the core with real parts, and tests without cost.
CORE = {
    "e2e/test_daemon.py": (
        "test_second_daemon_in_same_directory_is_refused",
        "test_verdict_file_has_word_expiry_and_reason",
        "test_metrics_are_served_and_written_atomically",
    ),
    "e2e/test_daemon_slurm.py": (
        "test_xid_79_drains_and_requeues_and_repaired_resumes",
        "test_operator_drain_is_never_changed",
    ),
    "e2e/test_hooks.py": ("test_drain_and_resume_run_hooks_once_despite_kills",),
    "e2e/test_prolog_epilog.py": (
        "test_prolog_admits_jobs_in_observe_mode_and_with_expired_verdict",
        "test_epilog_checks_gpus_before_next_job_starts",
    ),
    "e2e/test_stories.py": (
        "test_every_draining_row_has_story_or_reason_without",
        "test_story[gpu_access/lost]",
        "test_story[gpu_count/missing]",
        "test_story[gpu_ecc/uncorrected]",
        "test_story[gpu_nvlink/inactive]",
        "test_story[gpu_row_remap/pending]",
        "test_story[gpu_xid/79]",
        "test_story[ib_link/down]",
        "test_story[pcie_link/narrow]",
        "test_story[memory_edac/uncorrected]",
        "test_story[mount/missing]",
        "test_story[block_device/medium_error]",
        "test_story[exec/critical]",
    ),
    "packaging/test_wheel.py": ("test_pyproject_lists_each_package",),
}
TESTS = Path(__file__).parent
ROOT = TESTS.parent
OUR_FOLDERS = ("tests", "bench", "scripts", "examples")

# They write into the machine's only kernel log, or read it all the time.
KERNEL_LOG = (
    "test_daemon",
    "test_package_kernel_log",
    "test_real_file_system",
    "test_real_kernel_log",
    "test_storm",
)
# Tests of one Debian release stay together.
BY_RELEASE = ("test_package", "test_readme_on_a_node")


@pytest.hookimpl(optionalhook=True)  # also for `pytest -p no:xdist`
def pytest_xdist_auto_num_workers() -> int:
    cores = len(os.sched_getaffinity(0))
    return min(2 * cores, cores + 8)  # each worker collects all tests, for 20 s


@pytest.hookimpl(optionalhook=True)  # also for `pytest -p no:xdist`
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    config.option.loadscopereorder = False  # in their order: the end-to-end tests first, the others fill the gaps
    return GroupScheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Make a warning from a module of ours an error, also from one outside the packages of pyproject.toml."""
    paths = (path.relative_to(ROOT) for folder in OUR_FOLDERS for path in (ROOT / folder).rglob("*.py"))
    names = {name for path in paths for name in path.with_suffix("").parts}
    config.addinivalue_line("filterwarnings", rf"error:::({'|'.join(sorted(names))})\b")


class GroupScheduling(LoadScopeScheduling):
    """The scheduling of xdist, with all tests of a group in one process."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def group(nodeid: str) -> str:
    """Return the group of a test: its end-to-end file (shared cluster, container or package), elsewhere its
    function."""
    file, _, test = nodeid.partition("::")
    if "e2e" not in PurePath(file).parts and PurePath(file).stem not in KERNEL_LOG:
        return f"{file}::{test.partition('[')[0]}"
    if PurePath(file).stem in BY_RELEASE:
        return f"{file}[{test.partition('[')[2]}"
    return "kernel log" if PurePath(file).stem in KERNEL_LOG else file


def is_wide(nodeid: str) -> bool:
    """Return whether `make test` leaves out "tests/e2e/test_boot.py::test_..."."""
    file, _, test = nodeid.removeprefix("tests/").partition("::")
    return file in WIDE and test not in CORE.get(file, ())


@pytest.hookimpl(tryfirst=True)  # before pytest deselects tests for `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_wide(item.nodeid):
            item.add_marker("wide")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Clear the count and log of healthd's internal errors, which belong to the whole process, before each test."""
    guard.dropped.clear()
    guard._last_drops.clear()
    guard._logged_locations.clear()


@pytest.fixture
def host(tmp_path: Path) -> Callable[..., Host]:
    """Return a function that makes hosts with GPUs: host("gpu.3.lost = true")."""
    return scenarios(tmp_path)


@pytest.fixture
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Host]:
    """Return a function that makes hosts with `make(folder, ...)` of the test's file, in a folder of this test."""
    return partial(request.module.make, tmp_path)
