"""Validates this node: runs one tool after another within the time limit, evaluates the results and saves them.

If a test has no result, the document contains it as not measured, with the reason. No test is skipped silently.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

from healthd.common import ownership
from healthd.common.atomic_files import replace_file
from healthd.common.errors import HealthdError
from healthd.common.text import printable
from healthd.host import job_processes
from healthd.host.lock import lock_file
from healthd.validation import parts, programs
from healthd.validation.document import (
    FILE,
    HISTORY_FILE,
    LOCK,
    History,
    NotAValidation,
    StoppedBy,
    Validation,
    Why,
    as_text,
    history_as_text,
    parse,
    parse_history,
    with_new_values,
    with_untested,
)
from healthd.validation.measurement import BETWEEN_GPUS, FAMILIES, GPU_FAMILIES, Measurement, NotUnderstood, judge
from healthd.validation.programs import Command, FinishedProgram
from healthd.validation.tool_paths import Tools
from healthd.validation.tools import cpu, dcgmi, nccl_tests, nvbandwidth, perftest, pytorch

IN_PCI_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
PER_GPU_FAMILIES = ("gemm", "memory", "pcie")
WAITER_SECONDS = 0.3  # time within which the process that stopped this validation begins to wait for the lock
MIN_SECONDS = 2.0  # minimum time limit; a shorter time is not enough to measure anything
# Minimum for a loopback, as a share of the port's rate. The share is AzNHC's, which requires 180 of 200 and 360 of 400
# Gb/s (check_ib_bw_gdr in conf/nd96amsr_a100_v4.conf and nd96isr_h200_v5.conf in
# github.com/Azure/azurehpc-health-checks).
MIN_RATE_SHARE = 0.9
TRIAL_SECONDS = 60.0  # time limit for a Python to report whether it has torch; this can take long on a slow file server

# Problems that no test covers; docs/validation.md lists more.
NOT_COVERED = (
    "problems that occur only while a GPU computes and transfers data at the same time",
    "links and switches between nodes: use healthd validate --nodes",
)


class Refused(HealthdError):
    """The validation cannot start. The message is one sentence."""


class ValidationRequest(NamedTuple):
    """Request for a validation of this node.

    Attributes:
        node: name of the node.
        root: directory that contains this machine's /proc and /sys.
        families: test families, in the order in which they run.
        seconds: time limit for all families together.
        floors: maps each test to its minimum.
        dcgm_level: level for `dcgmi diag -r`.
        why: reason for the validation.
        alongside_jobs: True to validate even if a job is on this node.
    """

    node: str
    root: str
    families: tuple[str, ...]
    quick: bool
    seconds: float
    floors: Mapping[str, float]
    dcgm_level: int
    why: Why
    alongside_jobs: bool = False


class Step(NamedTuple):
    """One call of a tool.

    Attributes:
        commands: function that returns the commands for the requested families; it is called again for each attempt.
        seconds: time limit for this step.
        also: True if it measures something that earlier steps do not; False if it is a fallback for them.
        part: the only GPU, link or port that it measures, or "" for all.
    """

    families: tuple[str, ...]
    tool: str
    commands: Callable[[Sequence[str]], tuple[Command, ...]]
    seconds: float
    parse: Callable[[Sequence[FinishedProgram]], list[Measurement]]
    also: bool = False
    part: str = ""


def jobs_on_node(root: str) -> tuple[str, ...]:
    """Return the jobs that have processes on this node, according to the processes' cgroups.

    If Slurm does not use cgroups, return ().
    """
    return tuple(sorted(job_processes.local_jobs(root)))


@contextmanager
def exclusive_lock(runtime_dir: str) -> Iterator[None]:
    """Hold RUNTIME_DIR/validation.lock. The file contains the holder's pid and a line feed, or nothing after release.

    Other users must not be able to open the file: a process that can open a file can also lock it (flock(2)). It could
    then block every validation, or make a prolog kill an unrelated process that has the pid of an old validation.

    Raises Refused, ownership.Untrusted, OSError.
    """
    descriptor = lock_file(runtime_dir, LOCK)
    try:
        os.fchmod(descriptor, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = printable(os.pread(descriptor, 32, 0).decode("ascii", "replace").strip())
            process = f" (process {holder})" if holder else ""
            raise Refused(f"another validation is running on this node{process}") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        try:
            yield
        finally:
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def has_waiter(path: str) -> bool:
    """Return True if a process is waiting for the lock on this file. Only the prolog of a job waits for it.

    proc_locks(5): "1: -> FLOCK ADVISORY WRITE 4711 fe:00:123 0 EOF", where the last part of fe:00:123 is the inode.
    """
    try:
        inode = str(os.stat(path).st_ino)
        with open("/proc/locks", encoding="ascii", errors="replace") as file:
            rows = [line.split() for line in file]
    except OSError:
        return False
    return any(row[1:3] == ["->", "FLOCK"] and len(row) > 6 and row[6].rpartition(":")[2] == inode for row in rows)


def _was_stopped_by_job(request: ValidationRequest, lock: str) -> bool:
    """Return True if a job stopped this validation.

    The job's prolog first sends its signal, and begins to wait for the lock a moment later.
    """
    until = time.monotonic() + WAITER_SECONDS
    while not has_waiter(lock):
        if time.monotonic() > until:
            return bool(jobs_on_node(request.root))
        time.sleep(0.02)
    return True


def validate(request: ValidationRequest, tools: Tools, history: History, stop: int, lock: str = "") -> Validation:
    """Validate this node.

    Args:
        stop: a file descriptor; when readable, the validation stops.
        lock: path of the held lock.
    """
    began, until = time.time(), time.monotonic() + request.seconds
    node_parts = parts.read_parts(request.root)
    measured: list[Measurement] = []
    unmeasured = [*NOT_COVERED]
    remaining_families = list(request.families)
    steps, missing = plan(request, tools, node_parts, _python_with_torch(request, tools, node_parts, until, stop))
    has_job = False
    for step in steps:
        # The prolog of a new job stops this validation (docs/prolog-epilog.md). If there is no prolog, or if it ran
        # just before the lock was taken, the job is detected here. By then, at most one call of a tool ran beside the
        # job.
        has_job = not request.alongside_jobs and bool(jobs_on_node(request.root))
        if has_job:
            break
        families = (
            step.families if step.also else tuple(family for family in step.families if family in remaining_families)
        )
        remaining = until - time.monotonic()
        if not families or programs.is_stop_requested(stop) or remaining < MIN_SECONDS:
            continue
        seconds = min(step.seconds, remaining)
        ended = programs.run(step.commands(families), seconds, stop)
        # Another process took the port between the choice of the port and the start of the server. Try another port,
        # once.
        if _never_met(ended) and until - time.monotonic() >= MIN_SECONDS:
            seconds = min(step.seconds, until - time.monotonic())
            ended = programs.run(step.commands(families), seconds, stop)
        found = _with_pci_addresses(_parse_results(step._replace(families=families), ended, seconds), node_parts)
        found = [measurement for measurement in found if _is_in_families(measurement, families)]
        measured += found
        measured_families = {
            family
            for family in families
            if any(_is_in_family(measurement, family) and measurement.state != "not_measured" for measurement in found)
        }
        remaining_families = [family for family in remaining_families if family not in measured_families]
    stopped_by: StoppedBy = (
        "a signal" if programs.is_stop_requested(stop) else "time" if until - time.monotonic() < 0 else ""
    )
    if has_job or (programs.is_stop_requested(stop) and _was_stopped_by_job(request, lock)):
        stopped_by = "a job"
    reported_families = {
        family for family in FAMILIES if any(_is_in_family(measurement, family) for measurement in measured)
    }
    without_gpus: list[str] = []
    single_gpu_families: list[str] = []
    for family in [family for family in request.families if family not in reported_families]:
        reason = missing.get(family) or _not_reached(stopped_by, until)
        if family in GPU_FAMILIES and not node_parts.gpus and family in missing:
            without_gpus.append(family)
        elif family in BETWEEN_GPUS and len(node_parts.gpus) == 1:
            single_gpu_families.append(family)
        elif family == "ib" and not node_parts.ports:
            unmeasured.append("ib: this node has no active InfiniBand or RoCE port in sysfs")
        else:
            measured.append(Measurement(FAMILIES[family][0], "", None, "", "not_measured", reason, ""))
    if without_gpus:
        unmeasured.append(f"{', '.join(without_gpus)}: this node has no GPU in sysfs")
    if single_gpu_families:
        unmeasured.append(f"{', '.join(single_gpu_families)}: this node has only one GPU")
    # If a site has a floor for all ports, it takes precedence over floors from the ports' rates.
    rates = {} if "ib_loopback" in request.floors else node_parts.ports
    floors = {**request.floors, **{f"ib_loopback {port}": MIN_RATE_SHARE * rate for port, rate in rates.items()}}
    measured += _unseen_gpus(measured, node_parts)
    known_tests = {test for tests in FAMILIES.values() for test in tests}
    if unknown := sorted({printable(name.partition(" ")[0]) for name in request.floors} - known_tests):
        unmeasured.append(f"floors: no such test: {', '.join(unknown[:5])}; these floors are ignored")
    results = judge(measured, floors, history, partial(parts.relation, gpus=node_parts.gpus))
    return Validation(
        request.node,
        _boot_id(request.root),
        began,
        time.time(),
        request.why,
        stopped_by,
        tuple(results),
        tuple(unmeasured),
    )


def _not_reached(stopped_by: str, until: float) -> str:
    if stopped_by in ("a signal", "a job"):
        return f"the validation was stopped by {stopped_by} before this test"
    return "no time was left" if until - time.monotonic() < MIN_SECONDS else "the tool reported nothing"


def plan(
    request: ValidationRequest, tools: Tools, node_parts: parts.Parts, python: tuple[str, str]
) -> tuple[list[Step], dict[str, str]]:
    """Return the tool calls in order, and a dict that maps each family without a tool to the reason.

    Args:
        python: path of a Python that has torch, or ""; and the reason if there is none.
    """
    steps: list[Step] = []
    seconds = 0.3 if request.quick else 1.0
    programs_folder = os.path.join(os.path.dirname(__file__), "tools")
    possible = [family for family in request.families if family not in BETWEEN_GPUS or len(node_parts.gpus) != 1]
    pytorch_families = tuple(family for family in pytorch.MEASURES if family in possible)
    by_nvbandwidth = tuple(family for family in nvbandwidth.MEASURES if family in possible)
    missing = dict.fromkeys(set(request.families) - set(possible), "this node has only one GPU")
    # nvbandwidth comes first if available, because its PCIe measurements have published floors.
    if "pcie" in request.families and "nvbandwidth" in tools:
        steps.append(_nvbandwidth(tools["nvbandwidth"], ("pcie",), request))
    if python[0] and pytorch_families:
        by_pytorch = _pytorch(python[0], os.path.join(programs_folder, "pytorch_program.py"), seconds)
        steps.append(
            Step(
                pytorch_families, "PyTorch", by_pytorch, 60.0 if request.quick else 300.0, _parse_stdout(pytorch.parse)
            )
        )
    if "nvbandwidth" in tools and by_nvbandwidth:
        steps.append(_nvbandwidth(tools["nvbandwidth"], by_nvbandwidth, request))
    for family in pytorch_families:
        if not python[0] and not (family in by_nvbandwidth and "nvbandwidth" in tools):
            also = (
                f", and nvbandwidth was not found{_refusal_text(tools, 'nvbandwidth')}"
                if family in nvbandwidth.MEASURES
                else ""
            )
            missing[family] = f"no Python with PyTorch was found ({python[1]}){also}"
    if "nccl" in possible:
        for name, test in (("all_reduce_perf", "nccl_all_reduce"), ("sendrecv_perf", "nccl_sendrecv")):
            if name in tools:
                command = Command(nccl_tests.command(tools[name], max(len(node_parts.gpus), 2)))
                steps.append(Step(("nccl",), name, _always(command), 120.0, _nccl(test), also=True))
            else:
                missing.setdefault("nccl", f"{name} was not found{_refusal_text(tools, name)}")
    if "ib" in request.families:
        if "ib_write_bw" not in tools:
            missing["ib"] = f"ib_write_bw was not found{_refusal_text(tools, 'ib_write_bw')}"
        for port in node_parts.ports if "ib_write_bw" in tools else ():
            loopback_commands = _server_and_client(tools["ib_write_bw"], port)
            steps.append(Step(("ib",), "ib_write_bw", loopback_commands, 30.0, _loopback(port), also=True, part=port))
    if "dcgm" in request.families:
        if "dcgmi" in tools:
            command = Command(dcgmi.command(tools["dcgmi"], request.dcgm_level))
            steps.append(
                Step(
                    ("dcgm",), "dcgmi", _always(command), dcgmi.SECONDS[request.dcgm_level], _parse_stdout(dcgmi.parse)
                )
            )
        else:
            missing["dcgm"] = f"dcgmi was not found{_refusal_text(tools, 'dcgmi')}"
    if "cpu" in request.families:
        program = os.path.join(programs_folder, "cpu_program.py")
        own_python = tools.pythons[-1] if tools.pythons else ""
        if own_python:
            command = Command(cpu.command(own_python, program, seconds))
            steps.append(Step(("cpu",), "Python", _always(command), 120.0, _parse_stdout(cpu.parse)))
        else:
            missing["cpu"] = "no Python that root may run was found"
    return steps, missing


def _refusal_text(tools: Tools, name: str) -> str:
    return f" ({tools.refused[name]})" if name in tools.refused else ""


def _pytorch(python: str, program: str, seconds: float) -> Callable[[Sequence[str]], tuple[Command, ...]]:
    return lambda families: (Command(pytorch.command(python, program, families, seconds), IN_PCI_ORDER),)


def _nvbandwidth(program: str, families: tuple[str, ...], request: ValidationRequest) -> Step:
    def commands(requested: Sequence[str]) -> tuple[Command, ...]:
        return (Command(nvbandwidth.command(program, requested), IN_PCI_ORDER),)

    return Step(families, "nvbandwidth", commands, 30.0 if request.quick else 180.0, _parse_stdout(nvbandwidth.parse))


def _always(*commands: Command) -> Callable[[Sequence[str]], tuple[Command, ...]]:
    return lambda _families: commands


def _server_and_client(program: str, port: str) -> Callable[[Sequence[str]], tuple[Command, ...]]:
    def commands(_families: Sequence[str]) -> tuple[Command, ...]:
        free = _free_port()
        server, client = perftest.commands(program, port, free)
        return Command(server), Command(client, port=free)

    return commands


def _never_met(ended: Sequence[FinishedProgram]) -> bool:
    """Return True if the server ended before its client could be started, or if its port was already in use.

    If the port was in use, the client may have connected to another server.
    """
    if len(ended) < 2 or ended[0].ending != "ended":
        return False
    server, client = ended[0], ended[-1]
    return client.ending == "missing" or bool(
        server.status and perftest.PORT_IS_TAKEN.search(server.stdout + server.stderr)
    )


def _with_pci_addresses(found: Sequence[Measurement], node_parts: parts.Parts) -> list[Measurement]:
    """Replace "gpu 3" with the PCI address of the fourth GPU. The commands make CUDA count in the order of the
    addresses.

    If a tool sees only some of the GPUs, it may count differently, so its names stay unchanged.
    """
    names = {f"gpu {number}": address for number, address in enumerate(node_parts.gpus)}
    named = {word for measurement in found for word in measurement.part.split(">") if word.startswith("gpu ")}
    if named != set(names):
        return list(found)
    return [
        measurement._replace(part=">".join(names.get(word, word) for word in measurement.part.split(">")))
        for measurement in found
    ]


def _unseen_gpus(found: Sequence[Measurement], node_parts: parts.Parts) -> list[Measurement]:
    """Return not_measured results for GPUs that a test did not see, although it measured other GPUs."""
    missing = []
    for test in (test for family in PER_GPU_FAMILIES for test in FAMILIES[family]):
        seen = {measurement.part: measurement for measurement in found if measurement.test == test and measurement.part}
        if seen and set(seen) & set(node_parts.gpus):
            tool = next(iter(seen.values())).source
            missing += [
                Measurement(test, gpu, None, "", "not_measured", f"{tool} does not see this GPU", tool)
                for gpu in node_parts.gpus
                if gpu not in seen
            ]
    return missing


def _parse_stdout(
    parse: Callable[[str], list[Measurement]],
) -> Callable[[Sequence[FinishedProgram]], list[Measurement]]:
    """Return a parser for a tool that prints its results on standard output."""
    return lambda ended: parse(ended[-1].stdout)


def _nccl(test: str) -> Callable[[Sequence[FinishedProgram]], list[Measurement]]:
    return lambda ended: nccl_tests.parse(f"{ended[-1].stdout}\n{ended[-1].stderr}", test)


def _loopback(port: str) -> Callable[[Sequence[FinishedProgram]], list[Measurement]]:
    return lambda ended: perftest.parse(f"{ended[-1].stdout}\n{ended[-1].stderr}", port)


def _parse_results(step: Step, ended: Sequence[FinishedProgram], seconds: float) -> list[Measurement]:
    """Return the tool's measurements, and the reasons why measurements are missing."""
    try:
        found = step.parse(ended)
        problem = ""
    except NotUnderstood as error:
        found, problem = [], str(error)
    last = ended[0] if _never_met(ended) else ended[-1]
    ending = _ending_text(last, seconds)
    if any(item.ending in ("overdue", "stopped") for item in ended):
        found = [_discount_failure(item, ending) for item in found]
    silent = [family for family in step.families if not any(_is_in_family(item, family) for item in found)]
    message = "; ".join(item for item in (ending, problem, _last_output_line(last)) if item) or "it reported nothing"
    found += [
        Measurement(FAMILIES[family][0], step.part, None, "", "not_measured", f"{step.tool}: {message}", "")
        for family in silent
    ]
    if found and not silent and last.ending in ("overdue", "stopped"):
        test = FAMILIES[step.families[-1]][0]
        found.append(Measurement(test, step.part, None, "", "not_measured", f"{step.tool}: {ending}", ""))
    return found


def _discount_failure(measurement: Measurement, ending: str) -> Measurement:
    """Turn a failure into not measured if healthd ended the tool.

    A tool that is ended reports a failure. So does its other half (a port's server without its client). PyTorch's
    program reports real failures before it is ended.
    """
    if measurement.state != "failed" or measurement.source.startswith("PyTorch"):
        return measurement
    return measurement._replace(
        state="not_measured", message=f"{ending}: {measurement.message}" if ending else measurement.message
    )


def _ending_text(last: FinishedProgram, seconds: float) -> str:
    hangs = ", but could not be ended" if last.is_hanging else ""
    if last.ending == "overdue":
        return f"did not end within {seconds:.0f} s and was terminated{hangs}"
    if last.ending == "stopped":
        return f"was stopped{hangs}"
    if last.ending == "missing" or last.status is None:
        return "could not be started"
    return f"ended with status {last.status}" if last.status else ""


def _last_output_line(last: FinishedProgram) -> str:
    lines = [line.strip() for line in (last.stderr or last.stdout).splitlines() if line.strip()]
    return printable(lines[-1])[:160] if lines and (last.status or last.status is None) else ""


def _is_in_family(measurement: Measurement, family: str) -> bool:
    return measurement.test in FAMILIES[family] or (family == "dcgm" and measurement.test.startswith("dcgm"))


def _is_in_families(measurement: Measurement, families: Sequence[str]) -> bool:
    return any(_is_in_family(measurement, family) for family in families)


def _python_with_torch(
    request: ValidationRequest, tools: Tools, node_parts: parts.Parts, until: float, stop: int
) -> tuple[str, str]:
    """Return the first Python that has torch, or "" and the reason. torch is not imported, which would take seconds."""
    if not set(request.families) & set(pytorch.MEASURES):
        return "", "not requested"
    probe_code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    for python in tools.pythons:
        seconds = min(TRIAL_SECONDS, until - time.monotonic())
        if seconds <= 0 or programs.is_stop_requested(stop):
            break
        if programs.run([Command((python, "-I", "-c", probe_code))], seconds, stop)[0].status == 0:
            return python, ""
    return "", f"{len(tools.pythons)} checked" if tools.pythons else "none may be run"


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _boot_id(root: str) -> str:
    try:
        with open(os.path.join(root, "proc/sys/kernel/random/boot_id"), encoding="ascii", errors="replace") as file:
            return printable(file.read(64).strip())
    except OSError:
        return ""


# --- files


def read_history(state_dir: str) -> History:
    """Return the values from earlier validations, or {} if there are none or they may not be read."""
    try:
        text = ownership.read(os.path.join(state_dir, HISTORY_FILE)).decode("utf-8", "replace")
    except OSError:
        return {}
    return parse_history(text)


def save(state_dir: str, validation: Validation, history: History) -> None:
    """Write the document and add its good values to the history.

    The document also has earlier faults that this validation did not test again. Raises ownership.Untrusted, OSError.
    """
    with ownership.open_folder(state_dir, make_mode=0o700):
        pass
    path = os.path.join(state_dir, FILE)
    previous = None
    with suppress(OSError, NotAValidation, UnicodeDecodeError):
        previous = parse(ownership.read(path).decode("utf-8"))
    replace_file(path, as_text(with_untested(validation, previous)), 0o644, durable=True)
    if not validation.stopped_by:
        new = with_new_values(history, validation.results)
        replace_file(os.path.join(state_dir, HISTORY_FILE), history_as_text(new), 0o600, durable=True)


def is_permission_error(error: OSError) -> bool:
    return error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
