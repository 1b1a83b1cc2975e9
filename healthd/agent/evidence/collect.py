"""The collector: saves one part of a case. It runs as `healthd evidence collect`, outside the daemon.

It stops when the daemon replaces the request (an operator resumed the node), or when a job appears while the full part
is being collected. What has been collected until then is saved.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from msgspec.structs import replace

import healthd
from healthd.agent.evidence import archive, manifest
from healthd.agent.evidence.archive import ArchiveError
from healthd.agent.evidence.case import FIRST, MAX_ATTEMPTS, Process, Result
from healthd.agent.evidence.hardware import GpuPart, Hardware, merge_gpus, parse_ipmi, parse_nvidia_smi
from healthd.agent.evidence.manifest import Manifest, SavedPart
from healthd.agent.evidence.programs import become_subreaper, end_earlier_session, run_source
from healthd.agent.evidence.request import ATTEMPTS_FILE, NAME, RESULT_FILE, STOP, Request, parse_request
from healthd.agent.evidence.sources import Entry, first_sources, full_sources
from healthd.common.atomic_files import replace_file
from healthd.common.model import Gpu
from healthd.common.values import DecodeError, decode, encode
from healthd.host.job_processes import local_jobs
from healthd.host.lock import wait_until_free
from healthd.host.separate_program import OpenRequest, serve

log = logging.getLogger("healthd")

WORK = ".work"  # folder of the running part, below the evidence folder
TEMPORARY = "tmp"  # folder for the programs' temporary files, below the work folder
MIN_FREE_BYTES = 64 << 20  # less free space than this, and nothing is collected
NICE = 19
STOP_POLL_SECONDS = 0.5


def prepare_process() -> None:
    """Run at nice 19, and become the parent of orphans. Programs inherit the priority. Call this once, in a process
    that only collects."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    become_subreaper()


def serve_requests(runtime_dir: str) -> None:
    """Serve the daemon's request, after another collector has ended. Raises ownership.Untrusted or OSError.

    If this returned while the request is still open, systemd would start it again at once (PathExists=).
    """
    while not serve(runtime_dir, NAME, lambda request: _serve(runtime_dir, request)):
        wait_until_free(runtime_dir, f"{NAME}.lock")


def _serve(runtime_dir: str, open_request: OpenRequest) -> None:
    try:
        request = parse_request(open_request.text)
    except DecodeError as error:
        log.error("evidence: the request cannot be read: %s", error)
        return
    if request.part == STOP:
        return
    if _count_attempt(runtime_dir, f"{request.id} {request.part} {request.attempt}") > MAX_ATTEMPTS:
        why = f"the {request.part} part of {request.id} was not saved: the collector was killed {MAX_ATTEMPTS} times"
        result = Result(request.id, request.part, request.attempt, error=why)
    else:
        result = collect_part(request, runtime_dir, stop_reason(request, open_request.is_replaced))
    replace_file(os.path.join(runtime_dir, RESULT_FILE), encode(result))
    log_result(result)


def log_result(result: Result) -> None:
    if result.error:
        log.error("evidence: %s", result.error)
    else:
        log.info("evidence: saved %s, %d KiB in %.0f s", result.path, result.bytes >> 10, result.seconds)
    for problem in result.problems:
        log.warning("evidence: %s", problem)


def _count_attempt(runtime_dir: str, name: str) -> int:
    """Return how often this part has been begun, now included. A collector that is killed leaves its count."""
    path = os.path.join(runtime_dir, ATTEMPTS_FILE)
    before, _, count = (_read(path) or "").strip().rpartition(" ")
    attempts = int(count) + 1 if before == name and count in map(str, range(MAX_ATTEMPTS + 1)) else 1
    replace_file(path, f"{name} {attempts}\n")
    return attempts


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def stop_reason(request: Request, is_replaced: Callable[[], bool]) -> Callable[[], str]:
    """Return a function that returns why the part must stop, or "". It reads files at most every STOP_POLL_SECONDS."""
    last, reason = -STOP_POLL_SECONDS, ""

    def check() -> str:
        nonlocal last, reason
        if reason or time.monotonic() - last < STOP_POLL_SECONDS:
            return reason
        last = time.monotonic()
        if is_replaced():
            reason = "the node is no longer drained and idle"
        elif request.part != FIRST and (jobs := local_jobs(request.root)):
            reason = f"job {min(jobs)} runs on the node"
        return reason

    return check


def collect_part(request: Request, runtime_dir: str, check: Callable[[], str]) -> Result:
    """Collect one part and save it. Never raises OSError: the result has the error."""
    started, began = time.monotonic(), time.time()
    stuck: list[Process] = []
    entries: list[Entry] = []
    head = (request.id, request.part, request.attempt)
    try:
        with _work_folder(request.state_dir) as (work, session_file):
            earlier_stuck = end_earlier_session(session_file)
            stuck += earlier_stuck
            _remove_old(request)
            if shortage := _shortage(request.state_dir):
                raise OSError(0, shortage)
            is_stopped = _with_space_check(request.state_dir, check)
            stopped = _run_sources(request, work, session_file, is_stopped, entries, stuck)
            part = SavedPart(request.part, began, round(time.monotonic() - started, 3), tuple(entries), stopped)
            path, size, part = _save(request, part, work)
            is_full = bool(stopped) and stopped != check()  # `check` keeps its reason
    except (OSError, ArchiveError) as error:
        why = str(error) if isinstance(error, ArchiveError) else f"{archive.folder(request.state_dir)}: {_why(error)}"
        return Result(*head, seconds=_since(started), error=why, stuck=tuple(stuck))
    problems = tuple(manifest.problems(part))
    why = f"{archive.folder(request.state_dir)}: {stopped}" if is_full else ""
    return Result(*head, path, size, _since(started), problems, why, stopped, tuple(stuck))


def _since(started: float) -> float:
    return round(time.monotonic() - started, 3)


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def _run_sources(
    request: Request,
    work: str,
    session_file: str,
    check: Callable[[], str],
    entries: list[Entry],
    stuck: list[Process],
) -> str:
    """Run the part's programs one after another. Return why the part was stopped, or "". Raises OSError."""
    choose = first_sources if request.part == FIRST else full_sources
    sources = choose(request, work, (sys.executable, "-m"), time.time())
    for source in sources:
        if stopped := check():
            return stopped
        path, max_bytes = os.path.join(work, source.file), request.settings.max_mib << 20
        run = run_source(source, path, session_file, check, _environment(work), max_bytes)
        entries.append(run.entry)
        stuck += run.stuck
        if run.stopped:
            return run.stopped
    return ""


def _environment(work: str) -> dict[str, str]:
    """Return a private folder for temporary files, because some programs use predictable names in /tmp. Healthd's own
    programs need the path of its modules in a source tree."""
    own = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    return {"TMPDIR": os.path.join(work, TEMPORARY), **own}


@contextmanager
def _work_folder(state_dir: str) -> Iterator[tuple[str, str]]:
    """Create an empty folder for the programs' output, and remove it afterwards. Yield it and the session file."""
    folder = archive.prepare_folder(state_dir)
    work, session_file = os.path.join(folder, WORK), os.path.join(folder, ".session")
    shutil.rmtree(work, ignore_errors=True)
    os.mkdir(work, 0o700)
    os.mkdir(os.path.join(work, TEMPORARY), 0o700)
    try:
        yield work, session_file
    finally:
        shutil.rmtree(work, ignore_errors=True)
        with suppress(FileNotFoundError):
            os.unlink(session_file)


def _shortage(state_dir: str) -> str:
    """Return a text if the disk is almost full: events and the ledger's copy need the rest. Raises OSError."""
    status = os.statvfs(archive.folder(state_dir))
    free = status.f_bavail * status.f_frsize
    if free >= MIN_FREE_BYTES:
        return ""
    return f"only {free >> 20} MiB are free, and evidence needs {MIN_FREE_BYTES >> 20} MiB"


def _with_space_check(state_dir: str, check: Callable[[], str]) -> Callable[[], str]:
    return lambda: check() or _shortage(state_dir)


# --- the archive


def _save(request: Request, part: SavedPart, work: str) -> tuple[str, int, SavedPart]:
    """Add the part to the case's archive. Return its path and size, and the part with what earlier attempts saved.

    Raises ArchiveError or OSError.
    """
    path = os.path.join(archive.folder(request.state_dir), f"{request.id}{archive.SUFFIX}")
    before = _earlier_manifest(path, request.id)
    part, taken = manifest.merge_part(manifest.find_part(before, part.name) if before else None, part)
    files = {
        f"{part.name}/{entry.file}": os.path.join(work, entry.file)
        for entry in part.entries
        if entry.file in taken and os.path.isfile(os.path.join(work, entry.file)) and (entry.bytes or not entry.missing)
    }
    document = manifest.with_part(before or _new_manifest(request), part)
    document = replace(
        document, hardware=_hardware(work, document.hardware, request.gpus), reason=request.reason or document.reason
    )
    document = replace(document, causes=request.causes or document.causes)
    size = archive.write_archive(path, document, files, path if before else "", request.settings.max_mib << 20)
    _remove_old(request)
    return path, size, part


def _remove_old(request: Request) -> None:
    """Remove the archives that exceed the limits. Raises OSError."""
    limits = request.settings
    for removed in archive.remove_old(request.state_dir, request.id, limits.max_files, limits.max_mib, limits.max_days):
        log.info("evidence: removed %s (evidence.max_files, max_mib or max_days)", removed.path)


def _earlier_manifest(path: str, id: str) -> Manifest | None:
    """Return the manifest of the case's archive, or None. A damaged archive is put aside. Raises OSError."""
    if not os.path.lexists(path):
        return None
    try:
        archive.verify(path)
        return archive.read_manifest(path)
    except ArchiveError as error:
        log.warning("evidence: %s; it is now %s", error, archive.put_aside(path, id))
        return None


def _new_manifest(request: Request) -> Manifest:
    return Manifest(
        id=request.id,
        node=request.node,
        healthd=healthd.__version__,
        boot_id=(_read("/proc/sys/kernel/random/boot_id") or "").strip(),
        began=request.began,
        fault_at=request.fault_at,
        cluster=request.cluster,
        mode=request.mode,
        reason=request.reason,
        causes=request.causes,
    )


def _hardware(work: str, before: Hardware, inventory: tuple[Gpu, ...]) -> Hardware:
    """Return the hardware, from the daemon's inventory and the programs' output. What is missing stays as before."""
    text = {name: _read(os.path.join(work, name)) or "" for name in ("nvidia-smi.xml", "bmc.txt", "fru.txt")}
    found = before
    for name in ("system.json", "hardware.json"):
        with suppress(DecodeError, OSError), open(os.path.join(work, name), "rb") as file:
            found = decode(Hardware, file.read(1 << 20))
    report = parse_nvidia_smi(text["nvidia-smi.xml"])
    known = (GpuPart(gpu.pci, gpu.name, gpu.uuid, gpu.serial) for gpu in inventory)
    found = replace(
        found,
        driver=report.driver or found.driver or before.driver,
        chassis_serial=report.chassis_serial or before.chassis_serial,
        gpus=merge_gpus(merge_gpus(known, before.gpus), report.gpus),
    )
    if text["bmc.txt"] or text["fru.txt"]:
        return replace(found, bmc=parse_ipmi(text["bmc.txt"], text["fru.txt"]))
    return replace(found, bmc=before.bmc)
