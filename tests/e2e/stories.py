"""A row of the catalogue as a test with the real `healthd run` and a real Slurm:

    a healthy node with a job -> fault -> condition -> drain (and requeue) -> the load is gone, still drained
                                                    -> repair -> cleared -> resumed

To add a row, add a `Row` of a few lines to the list of one of the files stories_*.py. tests/support/machine.py and the
fake NVML define the parts of a machine; steps change them. There are two rounds per second, so a row shortens
confirmation times and windows by its settings.
"""

from __future__ import annotations

import contextlib
import json
import queue
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from healthd_daemon import Healthd, condition
from machine import EXPECTED, GPUS, Machine
from slurm_cluster import SlurmCluster
from trees import PCI

from healthd.agent.settings import registry
from healthd.common.model import Severity
from healthd.common.slurm.drain_reason import parse_reason

INTERVAL_SECONDS = 0.5
FREE_NODE_SECONDS = 240.0  # a node that could not be reset is not given to another story
IDLE_SECONDS = 120.0  # after a story; otherwise the node is reset and the story fails
WINDOW_SECONDS = 45.0  # for conditions that end by time: longer than a story takes up to that point on a busy machine
ROUNDS = 4  # for checks that nothing happens: more than `clear_after`
GPU = GPUS[3]
CHECKS = registry.built_in_checks()
NOT_YET = "not told yet"
BASE = """\
profile = "none"
baseline_file = ""
[fleet]  # the limits do not apply between stories
limit_percent = 100
own_hardware_limit_percent = 100
jitter_seconds = 0
"""


@dataclass
class Scene:
    """A node with a running job, its files, and its daemon.

    boots: number of reboots. ends: undoes the mounts of the steps after the story.
    """

    row: Row
    cluster: SlurmCluster
    node: str
    machine: Machine
    daemon: Healthd
    job: str
    boots: int = 0
    ends: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def rounds(self, count: int = ROUNDS) -> dict[str, Any]:
        """Return the status after `count` more complete rounds."""
        last = self.daemon.status()["round"]["number"] + count
        time.sleep(count * INTERVAL_SECONDS)  # it cannot be sooner, and each query delays other stories
        return self.daemon.wait_until(lambda s: s["round"]["number"] > last, f"round {last} is over")

    def drain_reason(self) -> str:
        """Return the reason of the current drain, "" without one."""
        found = self.cluster.node(self.node)
        return found.reason if "DRAIN" in found.flags else ""

    def job_state(self) -> tuple[str, int]:
        """Return the state of the job and how often it was requeued."""
        job = self.cluster.job(self.job)
        return job["JobState"], int(job["Restarts"])


Step = Callable[[Scene], None]


def nothing(scene: Scene) -> None:
    pass


@dataclass(frozen=True)
class Row:
    """code, part   the condition that the fault opens
    fault, repair   steps that change the node. The repair must be complete, or the condition stays open
    well        state of the machine before the fault
    meanwhile   after the drain: an event that looks like a repair but is not one
    checks      other checks that run: their evidence ends the condition, or they detect the same fault
    also        further conditions that open, and that end with the same repair
    settings    by check, in addition to those of the machine (machine.EXPECTED)
    severity    if it is not the explained one: after it worsened, or by a setting
    how         distinguishes rows of one code
    programs    names of programs that the checks run; a step sets their output (`prints`). The daemon then reads this
                machine instead of the fake tree: only for checks that use nothing but programs and NVML
    fake        the fake machine whose GPUs it has
    """

    code: str
    part: str
    fault: Step
    repair: Step
    well: Step = nothing
    meanwhile: Step = nothing
    checks: tuple[str, ...] = ()
    also: frozenset[str] = frozenset()
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    severity: Severity | None = None
    how: str = ""
    programs: tuple[str, ...] = ()
    fake: str = "dgx-h100"

    def __str__(self) -> str:
        return f"{self.code} {self.how}".strip()


def severity_of(row: Row) -> Severity:
    return default_severity(row.code) if row.severity is None else row.severity


def default_severity(code: str) -> Severity:
    found = registry.explain(CHECKS, code)
    assert found is not None, f"there is no {code}"
    return found.severity


# --- steps


def steps(*several: Step) -> Step:
    def run_all(scene: Scene) -> None:
        for step in several:
            step(scene)

    return run_all


def gpu(text: str) -> Step:
    """Change GPU 3, with the others healthy: gpu("lost = true")."""
    return lambda scene: scene.machine.gpus(f"[gpu.3]\n{text}")


def gpus(text: str) -> Step:
    """Change all GPUs or the machine: the rest of a scenario file. With "" all are healthy."""
    return lambda scene: scene.machine.gpus(text)


def writes(files: Mapping[str, str]) -> Step:
    """Write files of the fake tree."""
    return lambda scene: scene.machine.write(dict(files))


def kernel(*lines: str) -> Step:
    """Write lines to the kernel log now."""
    return lambda scene: scene.daemon.kernel_line(*lines)


def prints(program: str, text: str) -> Step:
    """Set the output of this program from now on."""

    def write_program(scene: Scene) -> None:
        assert scene.daemon.programs is not None
        script = scene.daemon.programs / f".{program}"
        script.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        script.chmod(0o755)
        script.replace(scene.daemon.programs / program)

    return write_program


def wait_until_open(*codes: str) -> Step:
    """Wait until these codes are open too."""
    return lambda scene: (
        scene.daemon.wait_until(lambda s: open_codes(s).issuperset(codes), f"{codes} are open") and None
    )


def rounds(count: int = ROUNDS) -> Step:
    def wait_rounds(scene: Scene) -> None:
        scene.rounds(count)

    return wait_rounds


def repaired(scene: Scene) -> None:
    """Run `healthd repaired CODE PART`."""
    answer = scene.daemon.request(command="repaired", code=scene.row.code, part=scene.row.part)
    assert "done" in answer, answer


def wait_until_resumed(scene: Scene) -> None:
    """Wait until healthd has resumed the node: the remaining conditions are acknowledged."""
    scene.cluster.wait_state(scene.node, without=("DRAIN",))


def taken_out(pci: str) -> Step:
    """Remove a PCI device from the bus."""

    def remove(scene: Scene) -> None:
        device = scene.machine.root / PCI[1:] / pci
        device.rename(scene.machine.root / pci)

    return remove


def put_back(pci: str) -> Step:
    def restore(scene: Scene) -> None:
        (scene.machine.root / pci).rename(scene.machine.root / PCI[1:] / pci)

    return restore


def restarted(scene: Scene) -> None:
    """Restart healthd in the same boot."""
    scene.daemon.stop()
    scene.daemon.start()


def booted(change: Step) -> Step:
    """Reboot the machine, with `change` while it is down. /run is empty afterwards; the state directory is kept."""

    def reboot(scene: Scene) -> None:
        scene.daemon.stop()
        shutil.rmtree(scene.daemon.run_dir)
        scene.boots += 1
        scene.machine.up_seconds = 60
        scene.machine.now()
        scene.machine.write({"/proc/sys/kernel/random/boot_id": f"00000000-0000-4000-8000-{scene.boots:012}\n"})
        change(scene)
        scene.daemon.start()

    return reboot


def rebooted(scene: Scene) -> None:
    booted(nothing)(scene)


# --- story


def check_story(scene: Scene) -> None:
    row, daemon, cluster, node = scene.row, scene.daemon, scene.cluster, scene.node
    severity = severity_of(row)
    worst = max(severity, *map(default_severity, row.also), Severity.INFO)
    status = scene.rounds(1)
    assert (status["health"], open_codes(status)) == ("healthy", set()), "before the fault"

    row.fault(scene)
    daemon.wait_until(lambda s: is_open(s, row, severity), f"{row.code} {row.part} is open and {severity.name}")
    if worst >= Severity.DEGRADED:
        cluster.wait_state(node, "DRAIN", reason="healthd: ")
    if worst is Severity.CRITICAL:
        cluster.wait_job(scene.job, "PENDING")
        assert scene.job_state() == ("PENDING", 1), "the job is requeued once"
    else:
        scene.rounds(2)
        assert scene.job_state() == ("RUNNING", 0), "the job continues"
    if worst is Severity.DEGRADED:
        cluster.run("scancel", scene.job)
        cluster.wait_state(node, "IDLE", "DRAIN")

    row.meanwhile(scene)
    reason = scene.drain_reason()
    status = scene.rounds()
    assert is_open(status, row, severity), "no repair was recorded"
    assert open_codes(status) <= {row.code, *row.also}
    assert scene.drain_reason() == reason, "no repair was recorded"
    if not row.also or worst is Severity.WARNING:
        assert parse_reason(reason) == ((row.code, row.part) if worst > Severity.WARNING else None)

    row.repair(scene)
    daemon.wait_until(lambda s: condition(s, row.code, row.part) is None, f"{row.code} {row.part} is cleared")
    daemon.wait_until(lambda s: s["health"] == "healthy", "healthy again")
    cluster.wait_state(node, without=("DRAIN",))
    status = scene.rounds()
    assert (status["health"], open_codes(status), scene.drain_reason()) == ("healthy", set(), ""), (
        "the node stays healthy"
    )
    if worst is Severity.WARNING:
        assert scene.job_state() == ("RUNNING", 0), "the job was not affected"


def is_open(status: dict[str, Any], row: Row, severity: Severity) -> bool:
    found = condition(status, row.code, row.part)
    return found is not None and (found["state"], found["severity"]) == ("open", severity.name.lower())


def open_codes(status: dict[str, Any]) -> set[str]:
    """Return the codes with a severity of warning or above."""
    return {found["code"] for found in status["conditions"] if found["severity"] != "info"}


def run_story(row: Row, cluster: SlurmCluster, free: queue.SimpleQueue[str]) -> None:
    """Run a story on a free node, which is free again afterwards. Raise AssertionError with the daemon's log."""
    try:
        node = free.get(timeout=FREE_NODE_SECONDS)
    except queue.Empty:
        error_text = f"no node was free in {FREE_NODE_SECONDS:g} s: the nodes of other stories could not be reset"
        raise AssertionError(f"{row}: {error_text}") from None
    folder, job = Path(tempfile.mkdtemp(prefix="story.")), ""
    try:
        job = cluster.sbatch("sleep 600", "-w", node)
        cluster.wait_job(job, "RUNNING")
        scene = scene_of(row, cluster, node, folder, job)
        with scene.ends:
            row.well(scene)
            with scene.daemon:
                check_story(scene)
    except Exception as error:
        log = folder / "healthd.log"
        log_text = log.read_text(errors="replace")[-8000:] if log.exists() else ""
        raise AssertionError(f"{row} on {node}: {type(error).__name__}: {error}\n{log_text}") from error
    finally:
        if job:
            cluster.run("scancel", job, check=False)
        cluster.run("scontrol", "update", f"NodeName={node}", "State=UNDRAIN", check=False)
        shutil.rmtree(folder)
        return_node(cluster, node, free)


def return_node(cluster: SlurmCluster, node: str, free: queue.SimpleQueue[str]) -> None:
    """Return a node for the next story. If it does not become idle, reset and return it, then raise the error."""
    try:
        cluster.wait_state(node, "IDLE", without=("DRAIN", "COMPLETING"), timeout=IDLE_SECONDS)
    except (TimeoutError, RuntimeError):
        cluster.reset_node(node)
        free.put(node)
        raise
    free.put(node)


def scene_of(row: Row, cluster: SlurmCluster, node: str, folder: Path, job: str) -> Scene:
    machine = Machine(folder, row.fake)
    machine.now()
    programs = folder / "programs" if row.programs else None
    if programs is not None:
        programs.mkdir()
    flags = ["--mode", "act", "--node-name", node, "--interval", str(INTERVAL_SECONDS)]
    flags += [] if programs else ["--root", str(machine.root)]
    options: dict[str, Any] = {"env": cluster.env, "fake_nvml": str(machine.scenario), "programs": programs}
    daemon = Healthd(*flags, directory=folder, config=BASE + "".join(tables(row)), **options)
    return Scene(row, cluster, node, machine, daemon, job)


def tables(row: Row) -> Iterable[str]:
    """Yield the settings of all checks; checks that the row does not name are disabled."""
    own_check = row.code.partition("/")[0]
    enabled = {own_check, *row.checks, *([] if CHECKS[own_check].has_run else ["gpu_access"])}  # rounds need a run
    for name, check in CHECKS.items():
        if name not in enabled:
            if not check.per:
                yield f"[checks.{name}]\nenabled = false\n"
            continue
        table = {**EXPECTED.get(name, {}), **row.settings.get(name, {})}
        instance = f".{json.dumps(table.pop('name'))}" if check.per else ""
        yield f"[checks.{name}{instance}]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in table.items())


def toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{json.dumps(key)} = {toml(item)}' for key, item in value.items())} }}"
    return json.dumps(value)
