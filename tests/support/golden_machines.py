"""Golden decisions on whole machines: replayed recordings, faults of fake GPUs, and the stories of e2e/.

No step waits: the machines have simulated clocks, and the steps of the stories run without a daemon.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fakes import NOW
from golden_node import CHECKS, NONE, Node
from machine import DATA as DATA_MOUNT
from machine import EXPECTED, ROOT, TMP, Machine, System
from msgspec.structs import replace

from healthd.agent.conditions.ledger import with_conditions
from healthd.agent.recording import recording
from healthd.agent.scheduler import one_round
from healthd.agent.settings import layers
from healthd.agent.settings.config import CheckConfig
from healthd.agent.settings.effective import resolve_settings
from healthd.agent.settings.registry import Check
from healthd.agent.worker.process import Setup
from healthd.cli import replay
from healthd.cli.check import worker_client
from healthd.common import toml
from healthd.common.codec import dump, fields_of, load
from healthd.common.model import Outcome, RunName
from healthd.failslow.live.document import FILE, LiveDocument, to_json
from healthd.host import inventory
from healthd.host.host import Host
from healthd.host.program import ProgramResult
from healthd.nvidia.fake_nvml import open_fake

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

import stories_gpu
import stories_host
import stories_network
import stories_pci
import stories_storage
from healthd_daemon import xid_line
from stories import GPU, Row, Scene, Step, gpu, kernel, prints, rebooted, steps, writes

DATA = Path(__file__).parents[1] / "data"
RECORDINGS = sorted((DATA / "recordings").glob("*.rec"))
SCENARIOS = DATA / "golden" / "scenarios.toml"
STORIES = [
    row for file in (stories_gpu, stories_host, stories_network, stories_pci, stories_storage) for row in file.ROWS
]
# Rows that need a real device file, mount or hanging call. Most of their codes have a row in REPLACEMENTS.
NEED_REAL_SYSTEM = (
    *("disk_space/", "device_nodes/", "ipmi_sel/", "gpu_access/hang", "failslow/"),
    *("mount/stale", "mount/failing", "mount/hang"),
)
SETTINGS: dict[str, dict[str, Any]] = {**EXPECTED}  # type: ignore[dict-item]
ANY_SOFTWARE = {"gpu_software": {"driver_version": "", "vbios": ""}}
SETTINGS_OF_FAKES: dict[str, dict[str, dict[str, Any]]] = {
    "dgx-a100": {"gpu_nvlink": {"links": 12}, **ANY_SOFTWARE},
    "dgx-b200": ANY_SOFTWARE,
    "dgx-h200": ANY_SOFTWARE,
}
ROUND_SECONDS = 0.5  # as in e2e/stories.py; the settings of its rows match
FAULT_ROUNDS = 16
SECONDS_AFTER_FAULT = (0.0, 60.0, 300.0, 900.0, 3600.0)  # times of the check rounds


class Scripted(System):
    """A fake system whose programs are scripts in a folder that print a text, as the stories write them."""

    programs: Path | None = None

    def run(
        self, argv: Sequence[str], seconds: float, environment: Mapping[str, str], anywhere: bool
    ) -> ProgramResult | None:
        script = self.programs / os.path.basename(argv[0]) if self.programs else None
        if script is None or not script.exists():
            return super().run(argv, seconds, environment, anywhere)
        text = script.read_text()
        if "cat <<'END'" in text:
            return ProgramResult(0, text.partition("cat <<'END'\n")[2].rpartition("\nEND\n")[0] + "\n", "")
        words, status = text.partition("\necho ")[2].rsplit("\nexit ", 1)
        return ProgramResult(int(status), words + "\n", "")


class SimulatedMachine:
    """A machine and its node. `lines` lists the changes from one time to the next."""

    def __init__(self, folder: Path, fake: str, runs: Iterable[tuple[Check, CheckConfig]]) -> None:
        folder.mkdir()
        self.folder = folder
        self.machine = Machine(folder, fake)
        self.machine.system = self.system = Scripted(self.machine.root)
        self.scenario_version: tuple[int, float] = (0, 0.0)  # inode of the scenario file and its time of writing
        self.now: Callable[[], float] = lambda: NOW
        collected = inventory.collect(self.host(), gpus=True)
        self.node = Node(runs, collected, self.boot_id())
        self.now = lambda: self.node.now
        self.lines: list[str] = []
        self.last: tuple[str, ...] = (NONE,)

    def boot_id(self) -> str:
        return (self.machine.root / "proc/sys/kernel/random/boot_id").read_text().strip()

    def host(self) -> Host:
        """Return the host now. The seconds of a rewritten scenario count from now."""
        self.machine.now()
        file = self.machine.scenario
        if file.stat().st_ino != self.scenario_version[0]:
            self.scenario_version = (file.stat().st_ino, self.now())
        os.utime(file, (self.scenario_version[1], self.scenario_version[1]))
        host = Host(str(self.machine.root), lambda: open_fake(str(file), self.now), self.now, self.system)
        host.state_dir, host.runtime_dir = f"{self.folder}/state", f"{self.folder}/run"
        return host

    def run_checks(self, seconds: float, title: str) -> None:
        self.node.wait(seconds)
        self.node.run_checks(self.host())
        self.record_changes(title)

    def rounds(self, count: int, title: str) -> None:
        for _ in range(count):
            self.run_checks(ROUND_SECONDS, title)

    def record_changes(self, title: str) -> None:
        """Record what changed: new and ended conditions, and the decision."""
        outcome_lines = self.node.outcome()
        self.lines += [f"{title}: {line}" for line in outcome_lines if line not in self.last]
        keys = {tuple(line.split()[:2]) for line in outcome_lines}
        ended = (" ".join(line.split()[:2]) for line in self.last if tuple(line.split()[:2]) not in keys)
        self.lines += [f"{title}: no longer {key}" for key in ended if key.split()[0] != NONE]
        self.last = outcome_lines


# --- fake machines


def gpu_checks(fake: str, profile: str) -> Iterator[tuple[Check, CheckConfig]]:
    """Yield the checks of GPUs with the settings of a site, or with those of a profile only."""
    profile_settings = settings_of_profile(profile) if profile else {}
    for name, check in CHECKS.items():
        table = {**SETTINGS.get(name, {}), **SETTINGS_OF_FAKES.get(fake, {}).get(name, {})}
        if check.uses == "nvml":
            yield check, profile_settings[RunName(name)] if profile else load(check.config, table, name)


def scenarios(folder: Path) -> Iterator[str]:
    """Run each scenario on each fake machine that supports it: a healthy hour, the fault, the repair."""
    for name, scenario in toml.parse(SCENARIOS.read_text("utf-8")).items():
        assert isinstance(scenario, dict)
        for machine in scenario.get("machines", ["dgx-h100"]):
            fake, _, profile = machine.partition("+")
            simulated = SimulatedMachine(folder / f"{name}.{machine}", fake, gpu_checks(fake, profile))
            for _ in range(2):
                simulated.run_checks(300.0, "healthy")
            simulated.machine.gpus(scenario["text"])
            for before, after in pairwise((0.0, *SECONDS_AFTER_FAULT)):
                simulated.run_checks(after - before, f"fault {after:g}s")
            simulated.machine.gpus("")
            simulated.run_checks(300.0, "well")
            simulated.run_checks(300.0, "well")
            simulated.node.reboot()
            simulated.run_checks(300.0, "rebooted")
            simulated.run_checks(300.0, "rebooted")
            for condition in simulated.node.ledger.conditions:
                simulated.node.repaired(condition.code, condition.subject)
            simulated.run_checks(300.0, "repaired")
            shutil.rmtree(simulated.folder)
            yield from (f"{name} {machine} {line}" for line in simulated.lines)


# --- settings


def settings() -> Iterator[str]:
    """Yield the defaults of each check and the settings of each profile."""
    for name, check in CHECKS.items():
        common = {field.name for field in fields_of(CheckConfig)} - {
            "timeout_seconds",
            "clear_after",
            "interval_seconds",
        }
        for setting, value in settings_table(check.config()).items():
            if setting not in common:
                yield f"{name}.{setting} = {value}"
    for profile in layers.profile_names():
        for run, config in settings_of_profile(profile).items():
            yield from (
                f"{profile} {run} {setting} = {settings_table(config)[setting]}" for setting in sorted(config.guessed)
            )


def settings_table(config: CheckConfig) -> dict[str, str]:
    return {
        field.name: json.dumps(dump(getattr(config, field.name)), sort_keys=True) for field in fields_of(type(config))
    }


def settings_of_profile(profile: str) -> Mapping[RunName, CheckConfig]:
    return resolve_settings({"profile": profile}, "healthd.toml", {}, CHECKS, layers.layers_without_baseline).checks


# --- stories of e2e/


def mount_fails(point: str, error: int) -> Step:
    """Calls on this mount point fail with this error; 0 ends that."""

    def apply(scene: Scene) -> None:
        scene.machine.system.fails.clear()
        scene.machine.system.fails.update({point: error} if error else {})

    return apply


def free_space(share: float) -> Step:
    return lambda scene: scene.machine.system.free.update({"/tmp": share})


def job_report(slow: bool) -> Step:
    """The live process reports a slow job, or a normal one."""

    def apply(scene: Scene) -> None:
        daemon: Any = scene.daemon
        now = daemon.driven.node.now
        job = replace(stories_host.LOST, since=now - 7200.0) if slow else stories_host.WELL
        scene.machine.write({f"{scene.daemon.run_dir}/{FILE}": to_json(LiveDocument(written=now, jobs=(job,)))})

    return apply


QUICK = {"device_nodes": {"confirm_seconds": 1.0}}
STOPPED_ROOT = stories_host.mounts(
    ROOT.replace("- ext4 /dev/sda2 rw", "- ext4 /dev/sda2 rw,emergency_ro"), TMP, DATA_MOUNT
)
NODE_3 = "/dev/nvidia3"
REPLACEMENTS = [
    Row(
        "mount/stale",
        "/data",
        mount_fails("/data", errno.ESTALE),
        mount_fails("/data", 0),
        settings=stories_host.QUICK_MOUNT,
    ),
    Row(
        "mount/failing",
        "/data",
        mount_fails("/data", errno.EIO),
        mount_fails("/data", 0),
        settings=stories_host.QUICK_MOUNT,
    ),
    Row("disk_space/no_space", "/tmp", free_space(0.03), free_space(0.5)),
    Row("disk_space/low_space", "/tmp", free_space(0.07), free_space(0.5)),
    Row("device_nodes/missing", NODE_3, stories_host.without(NODE_3), writes({NODE_3: ""}), settings=QUICK),
    Row(  # could be a reset if the kernel had not logged the Xid
        "gpu_access/lost",
        GPU,
        steps(kernel(xid_line(79, stories_gpu.BUS)), gpu("lost = true")),
        rebooted,
        well=writes({"/proc/4242/comm": "slurmd\n"}),
        checks=("gpu_xid", "gpu_count"),
        settings=stories_gpu.ANY_NUMBER,
    ),
    Row("block_device/root_stopped", "/", STOPPED_ROOT, steps(stories_host.mounts(), rebooted)),
    *(
        Row("failslow/loss", "", job_report(True), job_report(False), settings={"failslow": {**table, "action": act}})
        for table in stories_host.REQUEUES.values()
        for act in ("", "drain", "requeue")
    ),
    *(
        dataclasses.replace(row, well=steps(writes({"/dev/ipmi0": ""}), prints("ipmitool", stories_host.SEL)))
        for row in stories_host.ROWS
        if row.code.startswith("ipmi_sel/")
    ),
]


class SimulatedDaemon:
    """The daemon methods that the steps of a story use, in this process."""

    def __init__(self, driven: SimulatedMachine, row: Row) -> None:
        self.driven = driven
        self.directory = driven.folder
        self.run_dir = driven.folder / "run"
        self.bind_mounts: dict[str, Path] = {}
        self.programs = driven.folder / "programs" if row.programs else None
        self.title = "before"

    def kernel_line(self, *lines: str) -> None:
        for line in lines:
            self.driven.node.now += 0.1
            self.driven.node.log_lines([line])
        self.driven.record_changes(self.title)

    def wait_until(self, _satisfied: object, _what: str) -> None:
        self.driven.rounds(2, self.title)

    def request(self, command: str, code: str, part: str) -> str:
        assert command == "repaired"
        self.driven.node.repaired(code, part)
        self.driven.record_changes(f"{self.title} {command}")
        return "done"

    def stop(self) -> None:
        self.run_dir.mkdir(exist_ok=True)

    def start(self) -> None:
        if self.driven.boot_id() != self.driven.node.ledger.boot_id:
            self.driven.node.reboot(self.driven.boot_id())
            self.driven.record_changes(f"{self.title} boot")


class SimulatedScene(Scene):
    def rounds(self, count: int = 4) -> dict[str, Any]:
        daemon: Any = self.daemon
        daemon.driven.rounds(count, daemon.title)
        return {}


class StubCluster:
    def wait_state(self, *_args: str, **_kwargs: object) -> None:
        """Do nothing: the simulated Slurm does at once what healthd decides."""


def run_story(row: Row, folder: Path) -> list[str]:
    own_check = row.code.partition("/")[0]
    names = {own_check, *row.checks, *([] if CHECKS[own_check].has_run else ["gpu_access"])}
    tables = {name: {**SETTINGS.get(name, {}), **row.settings.get(name, {})} for name in sorted(names)}
    runs = [(CHECKS[name], load(CHECKS[name].config, table, name)) for name, table in tables.items()]
    simulated = SimulatedMachine(folder, row.fake, runs)
    daemon = SimulatedDaemon(simulated, row)
    if daemon.programs is not None:
        daemon.programs.mkdir()
        simulated.machine.write({"/run/systemd/system/made": ""})  # as systemd has it, if it booted the machine
        simulated.system.programs = daemon.programs
    scene: Any = SimulatedScene(row, StubCluster(), "n1", simulated.machine, daemon, "101")  # type: ignore[arg-type]
    with scene.ends:
        for title, step, count in (
            ("before", row.well, 2),
            ("fault", row.fault, FAULT_ROUNDS),
            ("meanwhile", row.meanwhile, 4),
            ("repair", row.repair, 6),
        ):
            daemon.title = title
            step(scene)
            simulated.rounds(count, title)
    simulated.run_checks(3600.0, "an hour later")
    simulated.run_checks(86400.0, "a day later")
    shutil.rmtree(folder)
    return simulated.lines


def stories(folder: Path) -> Iterator[str]:
    numbers: Counter[str] = Counter()
    for row in (*(row for row in STORIES if not row.code.startswith(NEED_REAL_SYSTEM)), *REPLACEMENTS):
        numbers[row.code] += 1
        name = f"{row.code}#{numbers[row.code]}"
        yield from (f"{name} {line}" for line in run_story(row, folder / name.replace("/", ".")))


# --- recordings


def run_recordings() -> Iterator[str]:
    """Yield each recorded round as `healthd check --replay` evaluates it."""
    for path in RECORDINGS:
        recorded = recording.read(str(path))
        loaded, unknown_settings = replay.recorded_settings(recorded, CHECKS)
        assert not unknown_settings
        with worker_client(Setup(root="/", fake_nvml="", replay=str(path)), CHECKS) as runner:
            round_result = one_round.run_round(loaded, CHECKS, runner, replay.recorded_kernel_log(recorded), recorded)
        node = Node([])
        node.ledger = with_conditions(node.ledger, {c.key: c for c in round_result.verdict.conditions})
        node.now, node.started = round_result.time + 60.0, round_result.time - 3600.0
        failed = sorted(str(result.run) for result in round_result.results if result.outcome is not Outcome.COMPLETED)
        yield f"{path.stem}: {round_result.verdict.health.value}, did not complete: {' '.join(failed) or 'none'}"
        yield from (f"{path.stem}: {line}" for line in node.outcome())
