"""The units that take repair steps, under a real systemd: a request starts the program, which stops and starts real
services for a reset, and a killed program is started again without a second reset.

nvidia-smi and Slurm's commands are fakes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from repair_node import (
    ID,
    IDLE,
    NVIDIA_SMI,
    REASON,
    SCONTROL,
    SINFO,
    made_fleet,
    made_node,
    made_request,
)
from systemd_container import CHECKOUT, SystemdContainer
from waiting import until

from healthd.agent.repair.journal import JOURNAL_FILE, Journal
from healthd.common.paths import RUNTIME_DIR, STATE_DIR
from healthd.common.values import encode

SECONDS = 300
BOOT_ID = "/proc/sys/kernel/random/boot_id"
FAKES = "/var/lib/fakes"
SERVICES = ("nvidia-persistenced", "nvidia-dcgm")
SERVICE = "[Service]\nExecStart=/usr/bin/sleep infinity\n"


@pytest.fixture
def box() -> Iterator[SystemdContainer]:
    with SystemdContainer() as running:
        programs = {"nvidia-smi": NVIDIA_SMI, "scontrol": SCONTROL, "sinfo": SINFO, "squeue": "cat squeue.out"}
        for name, text in programs.items():
            running.write(f"/usr/local/sbin/{name}", f"#!/bin/sh\ncd {FAKES}\n{text}", 0o755)
        texts = {
            "reservations": "No reservations in the system\n",
            "listpids.err": "No job steps exist on this node.\n",
        }
        texts |= {"listpids.out": "", "squeue.out": "", "claims.out": "", "smi.mode": "ok\n"}
        texts |= {
            "sinfo.out": made_node(IDLE, REASON).decode(),
            "fleet.out": made_fleet((IDLE, 1), ("mixed", 3)).decode(),
        }
        for name, text in texts.items():
            running.write(f"{FAKES}/{name}", text)
        running.install_healthd()
        for name in SERVICES:
            running.install_unit(f"{name}.service", SERVICE)
            running.systemctl("start", name)
        running.exec("mkdir", "-p", RUNTIME_DIR)
        show = "from healthd.agent.repair.journal_file import machine_identity; print(machine_identity('/'))"
        machine = running.exec("env", f"PYTHONPATH={CHECKOUT}", sys.executable, "-c", show).stdout.strip()
        journal = Journal("an-earlier-boot", node="n1", machine=machine)
        running.write(f"{STATE_DIR}/{JOURNAL_FILE}", encode(journal).decode())
        yield running


def request_step(box: SystemdContainer) -> None:
    boot_id = box.exec("cat", BOOT_ID).stdout.strip()  # the container has its own
    found = replace(made_request(STATE_DIR, "/"), boot_id=boot_id)
    path = f"{RUNTIME_DIR}/repair.request"
    box.write(f"{path}.new", encode(found).decode())
    box.exec("mv", f"{path}.new", path)


def entry(box: SystemdContainer) -> dict[str, Any]:
    """Return the step in the daemon's copy of the journal, or {}."""
    shown = box.exec("cat", f"{RUNTIME_DIR}/{JOURNAL_FILE}", check=False).stdout
    document = json.loads(shown) if shown else {}
    found = [*document.get("entries", ()), document.get("refused") or {}]
    return next((each for each in found if each.get("id") == ID), {})


def wait_for_outcome(box: SystemdContainer) -> str:
    until(
        lambda: entry(box).get("outcome", "taking") != "taking",
        f"the step has ended; {box.log('healthd-repair')[-2000:]}",
        SECONDS,
    )
    until(lambda: box.exec("ls", RUNTIME_DIR).stdout.count("request") == 0, "the request is served", SECONDS)
    return str(entry(box)["outcome"])


def main_pids(box: SystemdContainer) -> list[str]:
    return [box.show(name, "MainPID") for name in SERVICES]


def resets(box: SystemdContainer) -> int:
    return len(box.exec("cat", f"{FAKES}/smi.resets", check=False).stdout.splitlines())


def test_request_starts_reset_that_restarts_services(box: SystemdContainer) -> None:
    before = main_pids(box)
    box.systemctl("start", "healthd-repair.path")
    request_step(box)
    assert wait_for_outcome(box) == "done", entry(box)
    assert resets(box) == 1
    box.wait_for_property("healthd-repair.service", "ActiveState", "inactive")
    assert box.show("healthd-repair.service", "Result") == "success"
    assert [box.show(name, "ActiveState") for name in SERVICES] == ["active", "active"]
    assert not set(before) & set(main_pids(box))
    assert box.exec("stat", "-c", "%a %U", f"{STATE_DIR}/{JOURNAL_FILE}").stdout.split() == ["600", "root"]


def test_killed_program_takes_nvidia_smi_with_it_and_starts_services(box: SystemdContainer) -> None:
    box.write(f"{FAKES}/smi.mode", "hangs\n")
    box.systemctl("start", "healthd-repair.path")
    request_step(box)
    until(lambda: resets(box), f"nvidia-smi runs; {entry(box)}", SECONDS)
    assert [box.show(name, "ActiveState") for name in SERVICES] == ["inactive", "inactive"]
    box.systemctl("kill", "--kill-whom=main", "--signal=KILL", "healthd-repair.service")
    assert wait_for_outcome(box) == "unknown"
    assert resets(box) == 1
    assert box.exec("pgrep", "-f", "sleep 600", check=False).stdout == ""
    assert [box.show(name, "ActiveState") for name in SERVICES] == ["active", "active"]


def test_unit_that_requires_a_service_prevents_the_reset(box: SystemdContainer) -> None:
    box.install_unit("slurmd.service", f"[Unit]\nRequires=nvidia-persistenced.service\n{SERVICE}")
    box.systemctl("start", "slurmd")
    before = main_pids(box)
    box.systemctl("start", "healthd-repair.path")
    request_step(box)
    assert wait_for_outcome(box) == "impossible"
    assert (resets(box), main_pids(box)) == (0, before)
    assert box.show("slurmd", "ActiveState") == "active"


def test_scheduled_shutdown_prevents_the_reset(box: SystemdContainer) -> None:
    box.exec("shutdown", "-r", "+600")
    box.systemctl("start", "healthd-repair.path")
    request_step(box)
    assert wait_for_outcome(box) == "refused"
    assert resets(box) == 0
    box.exec("shutdown", "-c")


def test_masked_units_take_no_step(box: SystemdContainer) -> None:
    """The command of docs/repair.md that forbids all steps. A package installs the units in /usr/lib/systemd/system."""
    units = ("healthd-repair.path", "healthd-repair.service")
    for unit in units:
        box.exec("mv", f"/etc/systemd/system/{unit}", f"/usr/lib/systemd/system/{unit}")
    box.systemctl("daemon-reload")
    box.systemctl("start", "healthd-repair.path")
    before = main_pids(box)
    box.systemctl("mask", "--now", *units)
    request_step(box)
    for unit in units:
        assert "masked" in box.exec("systemctl", "start", unit, check=False).stderr
    assert [box.show(unit, "ActiveState") for unit in units] == ["inactive", "inactive"]
    assert (entry(box), resets(box), main_pids(box)) == ({}, 0, before)
    box.systemctl("unmask", *units)
    box.systemctl("start", "healthd-repair.path")
    assert wait_for_outcome(box) == "done", "the same request is served without the mask"


def test_program_that_cannot_start_is_given_up(box: SystemdContainer) -> None:
    drop_in = "[Service]\nExecStart=\nExecStart=/bin/false\n"
    box.write("/etc/systemd/system/healthd-repair.service.d/test.conf", drop_in)
    box.systemctl("daemon-reload")
    box.systemctl("start", "healthd-repair.path")
    request_step(box)
    box.wait_for_property("healthd-repair.path", "ActiveState", "failed", SECONDS)
    assert resets(box) == 0
