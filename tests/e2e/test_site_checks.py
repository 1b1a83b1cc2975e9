"""A site's own checks in a daemon: after an event, with their history, and when they hang."""

from __future__ import annotations

from pathlib import Path

from healthd_daemon import Healthd, condition, xid_line
from machine import GPUS, Machine
from site_checks import install_checks


def test_site_checks_run_in_daemon(directory: Path) -> None:
    config = install_checks(directory).replace("max_errors = 20", "max_errors = 20\ninterval_seconds = 3600.0")
    config += "[checks.leaf.rail2]\ninterval_seconds = 1.0\ntimeout_seconds = 5.0\n"
    machine = Machine(directory)
    machine.write({"/leaf": "up 5\n"})
    machine.now()
    with Healthd(
        *("--root", str(machine.root), "--mode", "observe", "--node-name", "n1"),
        directory=directory,
        config=config,
        fake_nvml=str(machine.scenario),
        env={"SLURM_CONF": "/nonexistent/slurm.conf"},
    ) as daemon:
        machine.write({"/leaf": "up 50\n"})
        daemon.kernel_line(xid_line(31, GPUS[1].removesuffix(".0")))
        status = daemon.wait_until(
            lambda s: condition(s, "leaf/errors"), "the check runs after an Xid, with its history"
        )
        assert "45 errors within an hour" in str(condition(status, "leaf/errors"))
        machine.write({"/leaf-hangs": "yes\n"})
        daemon.wait_until(lambda s: condition(s, "leaf/hang", "rail2"), "the hanging run opens a condition")
