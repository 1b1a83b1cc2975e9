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
from healthd_daemon import xid
from stories import GPU, Row, Scene, Step, gpu, kernel, prints, rebooted, steps, writes

DATA = Path(__file__).parents[1] / "data"
RECORDINGS = sorted((DATA / "recordings").glob("*.rec"))
SCENARIOS = DATA / "golden" / "scenarios.toml"
STORIES = [
    row for file in (stories_gpu, stories_host, stories_network, stories_pci, stories_storage) for row in file.ROWS
]
# Rows that need a real device file, mount or hanging call. Most of their codes have a row in REPLACEMENTS.
NEED_MORE = (
    *("disk_space/", "device_nodes/", "ipmi_sel/", "gpu_access/hang", "failslow/"),
    *("mount/stale", "mount/failing", "mount/hang"),
)
SET_UP: dict[str, dict[str, Any]] = {**EXPECTED}  # type: ignore[dict-item]
ANY_SOFTWARE = {"gpu_software": {"driver_version": "", "vbios": ""}}
OF_FAKE: dict[str, dict[str, dict[str, Any]]] = {
    "dgx-a100": {"gpu_nvlink": {"links": 12}, **ANY_SOFTWARE},
    "dgx-b200": ANY_SOFTWARE,
    "dgx-h200": ANY_SOFTWARE,
}
ROUND_SECONDS = 0.5  # as in e2e/stories.py; the settings of its rows match
FAULT_ROUNDS = 16
LOOKS = (0.0, 60.0, 300.0, 900.0, 3600.0)  # times of the check rounds


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


class Driven:
    """A machine and its node. `lines` lists the changes from one time to the next."""

    def __init__(self, folder: Path, fake: str, runs: Iterable[tuple[Check, CheckConfig]]) -> None:
        folder.mkdir()
        self.folder = folder
        self.machine = Machine(folder, fake)
        self.machine.system = self.system = Scripted(self.machine.root)
        self.written: tuple[int, float] = (0, 0.0)  # inode of the scenario file and its time of writing
        self.now: Callable[[], float] = lambda: NOW
        taken = inventory.collect(self.host(), gpus=True)
        self.node = Node(runs, taken, self.boot_id())
        self.now = lambda: self.node.now
        self.lines: list[str] = []
        self.last: tuple[str, ...] = (NONE,)

    def boot_id(self) -> str:
        return (self.machine.root / "proc/sys/kernel/random/boot_id").read_text().strip()

    def host(self) -> Host:
        """Return the host now. The seconds of a rewritten scenario count from now."""
        self.machine.now()
        file = self.machine.scenario
        if file.stat().st_ino != self.written[0]:
            self.written = (file.stat().st_ino, self.now())
        os.utime(file, (self.written[1], self.written[1]))
        host = Host(str(self.machine.root), lambda: open_fake(str(file), self.now), self.now, self.system)
        host.state_dir, host.runtime_dir = f"{self.folder}/state", f"{self.folder}/run"
        return host

    def look(self, passed: float, title: str) -> None:
        self.node.wait(passed)
        self.node.look(self.host())
        self.show(title)

    def rounds(self, count: int, title: str) -> None:
        for _ in range(count):
            self.look(ROUND_SECONDS, title)

    def show(self, title: str) -> None:
        """Record what changed: new and ended conditions, and the decision."""
        shown = self.node.outcome()
        self.lines += [f"{title}: {line}" for line in shown if line not in self.last]
        keys = {tuple(line.split()[:2]) for line in shown}
        gone = (" ".join(line.split()[:2]) for line in self.last if tuple(line.split()[:2]) not in keys)
        self.lines += [f"{title}: no longer {key}" for key in gone if key.split()[0] != NONE]
        self.last = shown


# --- fake machines


def runs_on(fake: str, profile: str) -> Iterator[tuple[Check, CheckConfig]]:
    """Yield the checks of GPUs with the settings of a site, or with those of a profile only."""
    guessed = of_profile(profile) if profile else {}
    for name, check in CHECKS.items():
        table = {**SET_UP.get(name, {}), **OF_FAKE.get(fake, {}).get(name, {})}
        if check.uses == "nvml":
            yield check, guessed[RunName(name)] if profile else load(check.config, table, name)


def scenarios(folder: Path) -> Iterator[str]:
    """Run each scenario on each fake machine that supports it: a healthy hour, the fault, the repair."""
    for name, scenario in toml.parse(SCENARIOS.read_text("utf-8")).items():
        assert isinstance(scenario, dict)
        for machine in scenario.get("machines", ["dgx-h100"]):
            fake, _, profile = machine.partition("+")
            driven = Driven(folder / f"{name}.{machine}", fake, runs_on(fake, profile))
            for _ in range(2):
                driven.look(300.0, "healthy")
            driven.machine.gpus(scenario["text"])
            for before, after in pairwise((0.0, *LOOKS)):
                driven.look(after - before, f"fault {after:g}s")
            driven.machine.gpus("")
            driven.look(300.0, "well")
            driven.look(300.0, "well")
            driven.node.reboot()
            driven.look(300.0, "rebooted")
            driven.look(300.0, "rebooted")
            for condition in driven.node.ledger.conditions:
                driven.node.repaired(condition.code, condition.subject)
            driven.look(300.0, "repaired")
            shutil.rmtree(driven.folder)
            yield from (f"{name} {machine} {line}" for line in driven.lines)


# --- settings


def settings() -> Iterator[str]:
    """Yield the defaults of each check and the settings of each profile."""
    for name, check in CHECKS.items():
        common = {field.name for field in fields_of(CheckConfig)} - {
            "timeout_seconds",
            "clear_after",
            "interval_seconds",
        }
        for setting, value in table_of(check.config()).items():
            if setting not in common:
                yield f"{name}.{setting} = {value}"
    for profile in layers.profile_names():
        for run, config in of_profile(profile).items():
            yield from (
                f"{profile} {run} {setting} = {table_of(config)[setting]}" for setting in sorted(config.guessed)
            )


def table_of(config: CheckConfig) -> dict[str, str]:
    return {
        field.name: json.dumps(dump(getattr(config, field.name)), sort_keys=True) for field in fields_of(type(config))
    }


def of_profile(profile: str) -> Mapping[RunName, CheckConfig]:
    return resolve_settings({"profile": profile}, "healthd.toml", {}, CHECKS, layers.layers_without_baseline).checks


# --- stories of e2e/


def fails(point: str, error: int) -> Step:
    """Calls on this mount point fail with this error; 0 ends that."""

    def do(scene: Scene) -> None:
        scene.machine.system.fails.clear()
        scene.machine.system.fails.update({point: error} if error else {})

    return do


def free(share: float) -> Step:
    return lambda scene: scene.machine.system.free.update({"/tmp": share})


def slow_job(slow: bool) -> Step:
    """The live process reports a slow job, or a normal one."""

    def do(scene: Scene) -> None:
        daemon: Any = scene.daemon
        now = daemon.driven.node.now
        job = replace(stories_host.LOST, since=now - 7200.0) if slow else stories_host.WELL
        scene.machine.write({f"{scene.daemon.run_dir}/{FILE}": to_json(LiveDocument(written=now, jobs=(job,)))})

    return do


QUICK = {"device_nodes": {"confirm_seconds": 1.0}}
STOPPED_ROOT = stories_host.mounts(
    ROOT.replace("- ext4 /dev/sda2 rw", "- ext4 /dev/sda2 rw,emergency_ro"), TMP, DATA_MOUNT
)
NODE_3 = "/dev/nvidia3"
INSTEAD = [
    Row("mount/stale", "/data", fails("/data", errno.ESTALE), fails("/data", 0), settings=stories_host.QUICK_MOUNT),
    Row("mount/failing", "/data", fails("/data", errno.EIO), fails("/data", 0), settings=stories_host.QUICK_MOUNT),
    Row("disk_space/no_space", "/tmp", free(0.03), free(0.5)),
    Row("disk_space/low_space", "/tmp", free(0.07), free(0.5)),
    Row("device_nodes/missing", NODE_3, stories_host.without(NODE_3), writes({NODE_3: ""}), settings=QUICK),
    Row(  # could be a reset if the kernel had not logged the Xid
        "gpu_access/lost",
        GPU,
        steps(kernel(xid(79, stories_gpu.BUS)), gpu("lost = true")),
        rebooted,
        well=writes({"/proc/4242/comm": "slurmd\n"}),
        checks=("gpu_xid", "gpu_count"),
        settings=stories_gpu.ANY_NUMBER,
    ),
    Row("block_device/root_stopped", "/", STOPPED_ROOT, steps(stories_host.mounts(), rebooted)),
    *(
        Row("failslow/loss", "", slow_job(True), slow_job(False), settings={"failslow": {**table, "action": act}})
        for table in stories_host.REQUEUES.values()
        for act in ("", "drain", "requeue")
    ),
    *(
        dataclasses.replace(row, well=steps(writes({"/dev/ipmi0": ""}), prints("ipmitool", stories_host.SEL)))
        for row in stories_host.ROWS
        if row.code.startswith("ipmi_sel/")
    ),
]


class Daemon:
    """The daemon methods that the steps of a story use, in this process."""

    def __init__(self, driven: Driven, row: Row) -> None:
        self.driven = driven
        self.directory = driven.folder
        self.run_dir = driven.folder / "run"
        self.instead: dict[str, Path] = {}
        self.programs = driven.folder / "programs" if row.programs else None
        self.title = "before"

    def kernel_line(self, *lines: str) -> None:
        for line in lines:
            self.driven.node.now += 0.1
            self.driven.node.hear([line])
        self.driven.show(self.title)

    def until(self, _satisfied: object, _what: str) -> None:
        self.driven.rounds(2, self.title)

    def ask(self, command: str, code: str, part: str) -> str:
        assert command == "repaired"
        self.driven.node.repaired(code, part)
        self.driven.show(f"{self.title} {command}")
        return "done"

    def stop(self) -> None:
        self.run_dir.mkdir(exist_ok=True)

    def start(self) -> None:
        if self.driven.boot_id() != self.driven.node.ledger.boot_id:
            self.driven.node.reboot(self.driven.boot_id())
            self.driven.show(f"{self.title} boot")


class DrivenScene(Scene):
    def rounds(self, count: int = 4) -> dict[str, Any]:
        daemon: Any = self.daemon
        daemon.driven.rounds(count, daemon.title)
        return {}


class Cluster:
    def wait_state(self, *_args: str, **_kwargs: object) -> None:
        """Do nothing: the simulated Slurm does at once what healthd decides."""


def story(row: Row, folder: Path) -> list[str]:
    own = row.code.partition("/")[0]
    names = {own, *row.checks, *([] if CHECKS[own].has_run else ["gpu_access"])}
    tables = {name: {**SET_UP.get(name, {}), **row.settings.get(name, {})} for name in sorted(names)}
    runs = [(CHECKS[name], load(CHECKS[name].config, table, name)) for name, table in tables.items()]
    driven = Driven(folder, row.fake, runs)
    daemon = Daemon(driven, row)
    if daemon.programs is not None:
        daemon.programs.mkdir()
        driven.machine.write({"/run/systemd/system/made": ""})  # as systemd has it, if it booted the machine
        driven.system.programs = daemon.programs
    scene: Any = DrivenScene(row, Cluster(), "n1", driven.machine, daemon, "101")  # type: ignore[arg-type]
    with scene.ends:
        for title, step, count in (
            ("before", row.well, 2),
            ("fault", row.fault, FAULT_ROUNDS),
            ("meanwhile", row.meanwhile, 4),
            ("repair", row.repair, 6),
        ):
            daemon.title = title
            step(scene)
            driven.rounds(count, title)
    driven.look(3600.0, "an hour later")
    driven.look(86400.0, "a day later")
    shutil.rmtree(folder)
    return driven.lines


def stories(folder: Path) -> Iterator[str]:
    numbers: Counter[str] = Counter()
    for row in (*(row for row in STORIES if not row.code.startswith(NEED_MORE)), *INSTEAD):
        numbers[row.code] += 1
        name = f"{row.code}#{numbers[row.code]}"
        yield from (f"{name} {line}" for line in story(row, folder / name.replace("/", ".")))


# --- recordings


def recordings() -> Iterator[str]:
    """Yield each recorded round as `healthd check --replay` evaluates it."""
    for path in RECORDINGS:
        recorded = recording.read(str(path))
        loaded, lost = replay.recorded_settings(recorded, CHECKS)
        assert not lost
        with worker_client(Setup(root="/", fake_nvml="", replay=str(path)), CHECKS) as runner:
            found = one_round.run_round(loaded, CHECKS, runner, replay.recorded_kernel_log(recorded), recorded)
        node = Node([])
        node.ledger = with_conditions(node.ledger, {c.key: c for c in found.verdict.conditions})
        node.now, node.started = found.time + 60.0, found.time - 3600.0
        failed = sorted(str(result.run) for result in found.results if result.outcome is not Outcome.COMPLETED)
        yield f"{path.stem}: {found.verdict.health.value}, did not complete: {' '.join(failed) or 'none'}"
        yield from (f"{path.stem}: {line}" for line in node.outcome())
