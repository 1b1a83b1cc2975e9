"""The step "GPU reset": runs nvidia-smi while the services that use the GPUs are stopped, and proves the effect.

The rules are in gpu_reset.py. `prepare_reset` changes nothing. The executor then records the step, stops the services
and calls `take_reset`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from healthd.agent.evidence.case import Process
from healthd.agent.evidence.programs import Run, end_earlier_session, run_source
from healthd.agent.evidence.sources import Source
from healthd.agent.repair import gpu_reset, services
from healthd.agent.repair.gpu_reset import FABRIC_MANAGER, GpuReading, ResetImpossible, ResetPlan
from healthd.agent.repair.journal import Outcome, Request
from healthd.agent.repair.node_reading import read_node
from healthd.agent.repair.requirements import gpu_users
from healthd.agent.repair.step_result import StepResult
from healthd.host.inventory import device_kind
from healthd.host.program import find_program

QUERY_SECONDS = 120.0  # without another client, the driver first initialises each GPU, which takes seconds
RELEASE_SECONDS = 60.0  # how long stopped services and healthd's own checks may keep a GPU open
RELEASE_POLL_SECONDS = 1.0
TRIES = 3  # of a reset that was refused for all GPUs: the client, such as a check, may end soon
RETRY_SECONDS = 10.0
WORK = "repair.work"  # folder in the runtime directory for the output of nvidia-smi
SESSION = "session"  # file in this folder: the session of the running program
MAX_OUTPUT_CHARACTERS = 8 << 20


class PreparedReset(NamedTuple):
    """A reset that may be taken.

    before    all GPUs before the reset
    services  running units that must stop
    kept      units that may keep the GPUs open
    persistent  ids of the GPUs whose persistence mode must be switched off during the reset
    """

    plan: ResetPlan
    before: tuple[GpuReading, ...]
    services: tuple[str, ...]
    kept: tuple[str, ...]
    persistent: tuple[str, ...] = ()


class Smi:
    """Runs nvidia-smi with deadlines. `folder` has its output, and the session id of the running program.

    stuck      processes that hang in the kernel, so they could not be ended
    has_begun  True if a reset may have begun
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._session = os.path.join(folder, SESSION)
        self.stuck: tuple[Process, ...] = ()
        self.has_begun = False

    def end_earlier(self) -> tuple[Process, ...]:
        """Kill an nvidia-smi that an earlier run has left running. Return its processes that hang in the kernel."""
        return end_earlier_session(self._session)

    def reset(self, plan: ResetPlan, seconds: float) -> tuple[int | None, str]:
        """Run the reset. Return its exit status, or None if it did not end in time, and its output and errors.

        Raises OSError if nvidia-smi cannot be run, or its output cannot be written.
        """
        name, *arguments = plan.argv
        argv = ("/bin/sh", "-c", 'exec "$@" 2>&1', "sh", find_program(name), *arguments)
        self.has_begun = True
        run, text = self._run(argv, seconds)
        return run.entry.status, text

    def set_persistence(self, ids: tuple[str, ...], is_on: bool) -> str:
        """Switch the persistence mode of these GPUs. Return why that failed, or "". Raises OSError."""
        if not ids:
            return ""
        problem = self._run(gpu_reset.persistence_argv(ids, is_on), QUERY_SECONDS)[0].entry.problem
        return f"persistence mode could not be switched {'on' if is_on else 'off'}: {problem}" if problem else ""

    def _run(self, argv: tuple[str, ...], seconds: float) -> tuple[Run, str]:
        """Run a program. Return the run and its output. Raises OSError if the output cannot be written."""
        path = os.path.join(self._folder, "output")
        with suppress(FileNotFoundError):
            os.unlink(path)
        run = run_source(Source("output", argv, seconds), path, self._session, lambda: "")
        if run.stuck:
            self.stuck = (*self.stuck, *run.stuck)
        if run.entry.missing or not os.path.exists(path):
            return run, ""
        with open(path, encoding="utf-8", errors="replace") as file:
            return run, file.read(MAX_OUTPUT_CHARACTERS)

    def gpus(self) -> tuple[GpuReading, ...]:
        """Return all GPUs that the driver shows. Raises ResetImpossible if nvidia-smi fails, or OSError."""
        run, text = self._run(gpu_reset.QUERY, QUERY_SECONDS)
        if run.entry.problem:
            raise ResetImpossible(f"nvidia-smi -q does not show the GPUs: {run.entry.problem}")
        return gpu_reset.parse_gpus(text)


def open_smi(runtime_dir: str) -> Smi:
    """Create the folder for nvidia-smi's output. Raises OSError."""
    folder = os.path.join(runtime_dir, WORK)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return Smi(folder)


def prepare_reset(request: Request, smi: Smi) -> PreparedReset | StepResult:
    """Return how to reset the GPUs of the request, or why they cannot be reset. Nothing is changed."""
    try:
        return _prepared(request, smi)
    except ResetImpossible as error:
        return StepResult(Outcome.IMPOSSIBLE, str(error))
    except OSError as error:
        return StepResult(Outcome.REFUSED, f"the reset could not be prepared: {error.strerror or error}")


def _prepared(request: Request, smi: Smi) -> PreparedReset:
    has_systemd = services.has_systemd(request.root)
    fabric_manager_runs = has_systemd and FABRIC_MANAGER in services.running((FABRIC_MANAGER,))
    before = smi.gpus()
    inventory = [gpu.pci for gpu in request.gpus]
    plan = gpu_reset.plan_reset(before, request.parts, inventory, has_nvswitches(request.root), fabric_manager_runs)
    names = gpu_reset.services_to_stop(plan, request.settings.stop_services, fabric_manager_runs)
    units = services.running(names) if has_systemd else ()
    if units:
        services.require_no_other_stops(units)
    kept = (FABRIC_MANAGER,) if plan.keeps_fabric_manager and fabric_manager_runs else ()
    return PreparedReset(plan, before, units, kept, gpu_reset.kernel_clients(plan, before, units))


def has_nvswitches(root: str) -> bool:
    """Return True if the kernel shows an NVSwitch. Blackwell's switches are not PCI devices of the node."""
    folder = os.path.join(root, "sys/bus/pci/devices")
    return any(
        device_kind(_text(folder, pci, "vendor"), _text(folder, pci, "class")) == "nvswitch"
        for pci in (os.listdir(folder) if os.path.isdir(folder) else ())
    )


def _text(*path: str) -> str:
    try:
        with open(os.path.join(*path), encoding="utf-8", errors="replace") as file:
            return file.read(100).strip()
    except OSError:
        return ""


def wait_for_release(request: Request, prepared: PreparedReset, sleep: Callable[[float], None]) -> str:
    """Wait until no process has a GPU open. Return the processes that still have one, or ""."""
    deadline = time.monotonic() + RELEASE_SECONDS
    while users := _users(request, prepared):
        if time.monotonic() >= deadline:
            return f"a GPU is still in use by {users}"
        sleep(RELEASE_POLL_SECONDS)
    return ""


def _users(request: Request, prepared: PreparedReset) -> str:
    processes = read_node(request.root).processes
    if processes is None:
        return "an unknown process"
    return ", ".join(f"{p.name} (pid {p.pid})" for p in gpu_users(processes, prepared.kept, ()))


def take_reset(
    request: Request,
    prepared: PreparedReset,
    smi: Smi,
    check: Callable[[], str],
    sleep: Callable[[float], None] = time.sleep,
) -> StepResult:
    """Reset the GPUs. The services have been stopped. Persistence mode is not switched on again here.

    `check` returns why the step must not be taken now, or "". It is called right before each try.
    """
    try:
        return _take_reset(request, prepared, smi, check, sleep)
    except OSError as error:
        outcome = Outcome.FAILED if smi.has_begun else Outcome.REFUSED
        return StepResult(outcome, f"nvidia-smi could not be run: {error.strerror or error}")


def _take_reset(
    request: Request, prepared: PreparedReset, smi: Smi, check: Callable[[], str], sleep: Callable[[float], None]
) -> StepResult:
    if prepared.persistent:
        problem = wait_for_release(request, prepared, sleep) or check()
        if problem := problem or smi.set_persistence(prepared.persistent, is_on=False):
            return StepResult(Outcome.REFUSED, problem)
    return _run_reset(request, prepared, smi, check, sleep) or _effect(prepared, smi)


def _run_reset(
    request: Request, prepared: PreparedReset, smi: Smi, check: Callable[[], str], sleep: Callable[[float], None]
) -> StepResult | None:
    """Run the command. Return why there was no reset, or None if nvidia-smi reported it."""
    plan, seconds = prepared.plan, request.settings.reset_timeout_seconds
    for number in range(1, TRIES + 1):
        if problem := wait_for_release(request, prepared, sleep) or check():
            return StepResult(Outcome.REFUSED, problem)
        status, output = smi.reset(plan, seconds)
        if number == TRIES or not gpu_reset.is_in_use(status, output):
            break
        sleep(RETRY_SECONDS)
    if smi.stuck or status is None:
        pids = ", ".join(str(process.pid) for process in smi.stuck)
        hangs = f" and hangs in the kernel (process {pids})" if pids else ""
        return StepResult(Outcome.FAILED, f"nvidia-smi --gpu-reset did not end within {seconds:g} s{hangs}")
    failure = gpu_reset.command_failure(status, output, plan)
    return StepResult(*failure) if failure else None


def _effect(prepared: PreparedReset, smi: Smi) -> StepResult:
    try:
        after = smi.gpus()
    except ResetImpossible as error:
        return StepResult(Outcome.FAILED, f"after the reset, {error}")
    if problem := gpu_reset.effect_problem(prepared.before, after, prepared.plan):
        return StepResult(Outcome.FAILED, problem)
    return StepResult(Outcome.DONE, proof=gpu_reset.proof(prepared.before, prepared.plan))
