"""A row of the catalogue, told by the real `healthd run` and a real Slurm:

    a healthy node with a job -> fault -> condition -> drain (and requeue) -> the load is gone, still drained
                                                    -> repair -> cleared -> resumed

A row that is added is a `Row` in the list of a file of them (stories_*.py), mostly of a few lines. What the parts of a
machine look like is for tests/support/machine.py and the fake NVML to say; steps change them. Rounds come twice a
second, so a row shortens confirm times and windows by its settings.
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
FREE_SECONDS = 240.0  # a node that could not be mended is not given to another
IDLE_SECONDS = 120.0  # after a story, or the node is mended and the story has failed
WINDOW_SECONDS = 45.0  # of what ends by itself: longer than a story takes, on a busy machine, until it waits for that
ROUNDS = 4  # in which nothing may happen: more than `clear_after`
GPU = GPUS[3]
CHECKS = registry.built_in_checks()
NOT_YET = "not told yet"
BASE = """\
profile = "none"
baseline_file = ""
[fleet]  # each story is its own node's
limit_percent = 100
own_hardware_limit_percent = 100
jitter_seconds = 0
"""


@dataclass
class Scene:
    """A node with a running job, what it is made of, and its daemon. `boots`: how often it was booted again. `ends`:
    what steps mounted, undone when the story is over."""

    row: Row
    cluster: SlurmCluster
    node: str
    machine: Machine
    daemon: Healthd
    job: str
    boots: int = 0
    ends: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def rounds(self, count: int = ROUNDS) -> dict[str, Any]:
        """The status after so many more whole rounds."""
        last = self.daemon.status()["round"]["number"] + count
        time.sleep(count * INTERVAL_SECONDS)  # it cannot be sooner, and each question costs what others wait for
        return self.daemon.until(lambda s: s["round"]["number"] > last, f"round {last} is over")

    def drain(self) -> str:
        """The words of the drain that stands, "" without one."""
        found = self.cluster.node(self.node)
        return found.reason if "DRAIN" in found.flags else ""

    def job_fate(self) -> tuple[str, int]:
        """(state, how often it was requeued)."""
        job = self.cluster.job(self.job)
        return job["JobState"], int(job["Restarts"])


Step = Callable[[Scene], None]


def nothing(scene: Scene) -> None:
    pass


@dataclass(frozen=True)
class Row:
    """code, part   the condition that the fault opens
    fault, repair   what happens to the node. No part of the repair may be missing, or the condition stands
    well        what else the machine is before the fault
    meanwhile   after the drain: what looks like a repair and is none
    checks      others that look at it too: their evidence ends the condition, or they see the same fault
    also        conditions that these open besides, and that end with the same repair
    settings    by check, beside what the machine needs (machine.EXPECTED)
    severity    where it is not as explained: after it worsened, or by a setting
    how         tells rows of one code apart
    programs    names of programs that the checks ask; a step says what they print (`prints`). The daemon then looks at
                this machine instead of the made tree: only for checks that ask nothing but programs and NVML
    fake        the machine whose GPUs it has
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
    return explained(row.code) if row.severity is None else row.severity


def explained(code: str) -> Severity:
    found = registry.explain(CHECKS, code)
    assert found is not None, f"there is no {code}"
    return found.severity


# --- steps


def steps(*several: Step) -> Step:
    def do(scene: Scene) -> None:
        for step in several:
            step(scene)

    return do


def gpu(text: str) -> Step:
    """GPU 3 is so, the others are well: gpu("lost = true")."""
    return lambda scene: scene.machine.gpus(f"[gpu.3]\n{text}")


def gpus(text: str) -> Step:
    """All GPUs, or the machine: the rest of a scenario file. With "" all are well."""
    return lambda scene: scene.machine.gpus(text)


def writes(files: Mapping[str, str]) -> Step:
    """Files of the made tree."""
    return lambda scene: scene.machine.write(dict(files))


def kernel(*lines: str) -> Step:
    """The kernel says so, now."""
    return lambda scene: scene.daemon.kernel_line(*lines)


def prints(program: str, text: str) -> Step:
    """What this program prints from now on."""

    def do(scene: Scene) -> None:
        assert scene.daemon.programs is not None
        script = scene.daemon.programs / f".{program}"
        script.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        script.chmod(0o755)
        script.replace(scene.daemon.programs / program)

    return do


def opens(*codes: str) -> Step:
    """These are open, besides what the row is about."""
    return lambda scene: scene.daemon.until(lambda s: counting(s).issuperset(codes), f"{codes} are open") and None


def rounds(count: int = ROUNDS) -> Step:
    def do(scene: Scene) -> None:
        scene.rounds(count)

    return do


def repaired(scene: Scene) -> None:
    """`healthd repaired CODE PART`"""
    answer = scene.daemon.ask(command="repaired", code=scene.row.code, part=scene.row.part)
    assert "done" in answer, answer


def resumed(scene: Scene) -> None:
    """It was, by healthd: what stands is known to a person."""
    scene.cluster.wait_state(scene.node, without=("DRAIN",))


def taken_out(pci: str) -> Step:
    """A PCI device is not on the bus any more."""

    def do(scene: Scene) -> None:
        device = scene.machine.root / PCI[1:] / pci
        device.rename(scene.machine.root / pci)

    return do


def put_back(pci: str) -> Step:
    def do(scene: Scene) -> None:
        (scene.machine.root / pci).rename(scene.machine.root / PCI[1:] / pci)

    return do


def restarted(scene: Scene) -> None:
    """healthd, in the same boot."""
    scene.daemon.stop()
    scene.daemon.start()


def booted(change: Step) -> Step:
    """The machine, and while it is down `change` happens. /run is empty after it: what is known is in the state
    directory."""

    def do(scene: Scene) -> None:
        scene.daemon.stop()
        shutil.rmtree(scene.daemon.run_dir)
        scene.boots += 1
        scene.machine.up_seconds = 60
        scene.machine.now()
        scene.machine.write({"/proc/sys/kernel/random/boot_id": f"00000000-0000-4000-8000-{scene.boots:012}\n"})
        change(scene)
        scene.daemon.start()

    return do


def rebooted(scene: Scene) -> None:
    booted(nothing)(scene)


# --- the story


def live(scene: Scene) -> None:
    row, daemon, cluster, node = scene.row, scene.daemon, scene.cluster, scene.node
    severity = severity_of(row)
    worst = max(severity, *map(explained, row.also), Severity.INFO)
    status = scene.rounds(1)
    assert (status["health"], counting(status)) == ("healthy", set()), "before the fault"

    row.fault(scene)
    daemon.until(lambda s: is_open(s, row, severity), f"{row.code} {row.part} is open and {severity.name}")
    if worst >= Severity.DEGRADED:
        cluster.wait_state(node, "DRAIN", reason="healthd: ")
    if worst is Severity.CRITICAL:
        cluster.wait_job(scene.job, "PENDING")
        assert scene.job_fate() == ("PENDING", 1), "requeued, once"
    else:
        scene.rounds(2)
        assert scene.job_fate() == ("RUNNING", 0), "the job goes on"
    if worst is Severity.DEGRADED:
        cluster.run("scancel", scene.job)
        cluster.wait_state(node, "IDLE", "DRAIN")

    row.meanwhile(scene)
    words = scene.drain()
    status = scene.rounds()
    assert is_open(status, row, severity), "nobody has repaired it"
    assert counting(status) <= {row.code, *row.also}
    assert scene.drain() == words, "nobody has repaired it"
    if not row.also or worst is Severity.WARNING:
        assert parse_reason(words) == ((row.code, row.part) if worst > Severity.WARNING else None)

    row.repair(scene)
    daemon.until(lambda s: condition(s, row.code, row.part) is None, f"{row.code} {row.part} is cleared")
    daemon.until(lambda s: s["health"] == "healthy", "healthy again")
    cluster.wait_state(node, without=("DRAIN",))
    status = scene.rounds()
    assert (status["health"], counting(status), scene.drain()) == ("healthy", set(), ""), "and it stays so"
    if worst is Severity.WARNING:
        assert scene.job_fate() == ("RUNNING", 0), "the job never felt it"


def is_open(status: dict[str, Any], row: Row, severity: Severity) -> bool:
    found = condition(status, row.code, row.part)
    return found is not None and (found["state"], found["severity"]) == ("open", severity.name.lower())


def counting(status: dict[str, Any]) -> set[str]:
    """The codes that count as a warning at least."""
    return {found["code"] for found in status["conditions"] if found["severity"] != "info"}


def tell(row: Row, cluster: SlurmCluster, free: queue.SimpleQueue[str]) -> None:
    """On a node that is free, and is so again afterwards. Raises AssertionError, with the daemon's log."""
    try:
        node = free.get(timeout=FREE_SECONDS)
    except queue.Empty:
        why = f"no node was free in {FREE_SECONDS:g} s: those of other stories could not be mended"
        raise AssertionError(f"{row}: {why}") from None
    folder, job = Path(tempfile.mkdtemp(prefix="story.")), ""
    try:
        job = cluster.sbatch("sleep 600", "-w", node)
        cluster.wait_job(job, "RUNNING")
        scene = scene_of(row, cluster, node, folder, job)
        with scene.ends:
            row.well(scene)
            with scene.daemon:
                live(scene)
    except Exception as error:
        log = folder / "healthd.log"
        words = log.read_text(errors="replace")[-8000:] if log.exists() else ""
        raise AssertionError(f"{row} on {node}: {type(error).__name__}: {error}\n{words}") from error
    finally:
        if job:
            cluster.run("scancel", job, check=False)
        cluster.run("scontrol", "update", f"NodeName={node}", "State=UNDRAIN", check=False)
        shutil.rmtree(folder)
        give_back(cluster, node, free)


def give_back(cluster: SlurmCluster, node: str, free: queue.SimpleQueue[str]) -> None:
    """For the next story. Raises what kept the node from being idle, but not before it is: no other story must wait."""
    try:
        cluster.wait_state(node, "IDLE", without=("DRAIN", "COMPLETING"), timeout=IDLE_SECONDS)
    except (TimeoutError, RuntimeError):
        cluster.mend(node)
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
    """The settings of all checks: those that the row does not name are off."""
    own = row.code.partition("/")[0]
    looking = {own, *row.checks, *([] if CHECKS[own].has_run else ["gpu_access"])}  # without any there are no rounds
    for name, check in CHECKS.items():
        if name not in looking:
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
