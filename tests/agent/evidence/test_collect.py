"""The collector: parts, kills, full disks and limits. Its programs are fakes in a folder of the test."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from healthd.agent.evidence import archive, collect, programs
from healthd.agent.evidence.case import MAX_ATTEMPTS, Cause, Result
from healthd.agent.evidence.request import RESULT_FILE, Request, parse_result
from healthd.agent.evidence.sources import first_sources, full_sources
from healthd.agent.settings.config import EvidenceConfig
from healthd.common.model import Gpu
from healthd.common.values import encode
from healthd.host.separate_program import request_file

SMI = '<nvidia_smi_log><driver_version>570.1</driver_version><gpu id="00000000:1B:00.0"><serial>1650</serial></gpu>'
FAKES = {
    "dmesg": "echo 'kern: NVRM: Xid 79'",
    "journalctl": 'echo "$@"',
    "ipmitool": 'if [ "$1" = mc ]; then echo "Firmware Revision : 13.06"; else echo "Product Serial : S1"; fi',
    "nvidia-smi": f"echo '{SMI}'; echo \"$@\"",
    "nvidia-bug-report.sh": 'echo start | gzip >"$3.gz"; echo end | gzip >>"$3.gz"',
}


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put fake programs before those of the machine."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in FAKES.items():
        write_fake(folder, name, script)
    path = f"{folder}:{programs.ENVIRONMENT['PATH']}"
    monkeypatch.setitem(programs.ENVIRONMENT, "PATH", path)
    return folder


def write_fake(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def request(tmp_path: Path, part: str = "first", **changes: object) -> Request:
    state = tmp_path / "state"
    state.mkdir(exist_ok=True)
    return replace(
        Request(
            "20261129T060000Z-gpu_xid-79",
            part,
            str(state),
            node="gpu-1",
            began=1000.0,
            fault_at=9000.0,
            causes=(Cause("gpu_xid/79 0000:1b:00.0", "a-1"),),
            flags=("--fake-nvml", "dgx-h100"),
            root=str(tmp_path),
        ),
        **changes,
    )


def collected(tmp_path: Path, wanted: Request, stop: str = "") -> Result:
    return collect.collect_part(wanted, str(tmp_path), lambda: stop)


def test_both_parts_are_in_one_file(tmp_path: Path, fakes: Path) -> None:
    first = collected(tmp_path, request(tmp_path))
    assert (first.error, first.problems, first.stuck) == ("", (), ())
    full = collected(tmp_path, request(tmp_path, "full"))
    assert (full.error, full.problems, full.path) == ("", (), first.path)
    assert full.bytes == os.stat(full.path).st_size
    names = {name for name, _ in archive.list_files(full.path)}
    assert names == {
        "manifest.json",
        *(f"first/{name}" for name in ("kernel.log", "record.rec", "system.json")),
        *(f"{part}/journal{name}.log" for part in ("first", "full") for name in ("", "-vendor")),
        *(f"full/{name}" for name in ("hardware.json", "sel.txt", "bmc.txt", "fru.txt", "kernel-idle.log")),
        *(f"full/{name}" for name in ("nvidia-smi.txt", "nvidia-smi.xml", "nvidia-bug-report.log.gz")),
    }
    found = archive.read_manifest(full.path)
    assert [part.name for part in found.parts] == ["first", "full"]
    assert [(gpu.pci, gpu.serial) for gpu in found.hardware.gpus] == [("0000:1b:00.0", "1650")]
    assert (found.hardware.driver, found.hardware.bmc.serial, found.hardware.bmc.firmware) == ("570.1", "S1", "13.06")
    assert found.causes == (Cause("gpu_xid/79 0000:1b:00.0", "a-1"),)
    with archive.open_archive(full.path) as tar:
        for part, since in (("first", 9000 - 3600), ("full", 9000)):
            journal = tar.extractfile(f"{found.id}/{part}/journal.log")
            assert journal is not None
            assert f"@{since}" in journal.read().decode()


def test_journal_begins_before_now_after_the_clock_was_set_back(tmp_path: Path) -> None:
    for sources in (first_sources, full_sources):
        found = sources(request(tmp_path, fault_at=1e9), "/work", ("python3",), 5000.0)
        since = [word for source in found if "journalctl" in source.argv for word in source.argv if word[0] == "@"]
        assert [float(time[1:]) <= 5000.0 for time in since] == [True, True]


def test_manifest_has_the_gpu_that_nvidia_smi_no_longer_shows(tmp_path: Path, fakes: Path) -> None:
    gpus = (Gpu("0000:1b:00.0", 0), Gpu("0000:1c:00.0", 1, "GPU-2", "H100", serial="1651"))
    first = collected(tmp_path, request(tmp_path, gpus=gpus))
    assert [gpu.serial for gpu in archive.read_manifest(first.path).hardware.gpus] == ["", "1651"]
    full = collected(tmp_path, request(tmp_path, "full"))
    found = archive.read_manifest(full.path).hardware.gpus
    assert [(gpu.pci, gpu.serial) for gpu in found] == [("0000:1b:00.0", "1650"), ("0000:1c:00.0", "1651")]


def test_programs_have_a_private_folder_for_temporary_files(tmp_path: Path, fakes: Path) -> None:
    write_fake(fakes, "dmesg", 'echo "$TMPDIR"; stat -c %a "$TMPDIR"')
    result = collected(tmp_path, request(tmp_path))
    with archive.open_archive(result.path) as tar:
        member = tar.extractfile(f"{request(tmp_path).id}/first/kernel.log")
        assert member is not None
        folder, mode = member.read().decode().split()
    assert (folder.startswith(archive.folder(request(tmp_path).state_dir)), mode) == (True, "700")


def test_only_the_archive_remains(tmp_path: Path, fakes: Path) -> None:
    result = collected(tmp_path, request(tmp_path))
    assert os.listdir(archive.folder(request(tmp_path).state_dir)) == [os.path.basename(result.path)]


def test_bug_report_can_be_switched_off(tmp_path: Path, fakes: Path) -> None:
    settings = EvidenceConfig(bug_report=False)
    result = collected(tmp_path, request(tmp_path, "full", settings=settings))
    assert "full/nvidia-bug-report.log.gz" not in dict(archive.list_files(result.path))


def test_bug_report_is_omitted_if_many_nodes_have_the_same_cause(tmp_path: Path) -> None:
    shared, own = Cause("mount/missing /home", shared_cause=True), Cause("gpu_xid/79 0000:1b:00.0")
    for causes, runs in (((shared,), False), ((shared, own), True), ((), True)):
        sources = full_sources(request(tmp_path, "full", causes=causes), "/work", ("python3",), 5000.0)
        assert ("nvidia-bug-report.sh" in {source.argv[0] for source in sources}) is runs


def test_hung_bug_report_is_a_problem_and_the_rest_is_saved(tmp_path: Path, fakes: Path) -> None:
    write_fake(fakes, "nvidia-bug-report.sh", 'echo part >"$3.gz"; sleep 600')
    settings = EvidenceConfig(timeout_seconds=1.0)
    result = collected(tmp_path, request(tmp_path, "full", settings=settings))
    assert (result.error, len(result.problems), result.stuck) == ("", 1, ())
    assert dict(archive.list_files(result.path))["full/nvidia-bug-report.log.gz"] == 5


def test_missing_programs_are_no_problem(tmp_path: Path, fakes: Path) -> None:
    for name in ("ipmitool", "nvidia-smi", "nvidia-bug-report.sh"):
        (fakes / name).unlink()
    result = collected(tmp_path, request(tmp_path, "full"))
    assert (result.error, result.problems) == ("", ())


def test_stopped_part_saves_what_it_has(tmp_path: Path, fakes: Path) -> None:
    marker = tmp_path / "bug-report-runs"
    write_fake(fakes, "nvidia-bug-report.sh", f"touch {marker}; sleep 600")
    wanted = request(tmp_path, "full")
    result = collect.collect_part(wanted, str(tmp_path), lambda: "a job" if marker.exists() else "")
    assert (result.stopped, result.error) == ("a job", "")
    assert "full/sel.txt" in dict(archive.list_files(result.path))
    assert archive.read_manifest(result.path).parts[0].stopped == "a job"


def test_second_attempt_keeps_what_the_first_completed(tmp_path: Path, fakes: Path) -> None:
    wanted = request(tmp_path, "full")
    first = collected(tmp_path, wanted)
    write_fake(fakes, "nvidia-bug-report.sh", 'echo part >"$3.gz"; exit 1')
    write_fake(fakes, "nvidia-smi", "exit 1")
    second = collected(tmp_path, wanted)
    assert (second.problems, second.stopped) == ((), "")
    assert dict(archive.list_files(second.path)).keys() == dict(archive.list_files(first.path)).keys()
    assert dict(archive.list_files(second.path))["full/nvidia-bug-report.log.gz"] > len("part\n")


def test_second_attempt_adds_what_the_first_lacked(tmp_path: Path, fakes: Path) -> None:
    wanted = request(tmp_path, "full")
    write_fake(fakes, "ipmitool", "exit 1")
    assert collected(tmp_path, wanted, stop="").problems
    write_fake(fakes, "ipmitool", "echo sel")
    second = collected(tmp_path, wanted)
    assert second.problems == ()
    assert dict(archive.list_files(second.path))["full/sel.txt"] == len("sel\n")


@pytest.mark.parametrize("end", [b"", b"\xff" * 64])
def test_damaged_archive_is_put_aside(tmp_path: Path, fakes: Path, end: bytes) -> None:
    path = Path(collected(tmp_path, request(tmp_path)).path)
    path.write_bytes(path.read_bytes()[:-100] + end)
    result = collected(tmp_path, request(tmp_path, "full"))
    assert (result.error, result.path) == ("", str(path))
    assert "full/sel.txt" in dict(archive.list_files(result.path))
    assert [found.path == str(path) for found in archive.list_archives(request(tmp_path).state_dir)] == [False, True]


def test_full_disk_is_one_error_and_leaves_nothing(
    tmp_path: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "MIN_FREE_BYTES", 1 << 62)
    result = collected(tmp_path, request(tmp_path))
    assert (bool(result.error), result.path) == (True, "")
    assert os.listdir(archive.folder(request(tmp_path).state_dir)) == []


def test_part_stops_when_the_disk_becomes_full(tmp_path: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill() -> str:
        if (tmp_path / "runs").exists():
            monkeypatch.setattr(collect, "MIN_FREE_BYTES", 1 << 62)
        return ""

    write_fake(fakes, "nvidia-bug-report.sh", f"touch {tmp_path}/runs; sleep 600")
    result = collect.collect_part(request(tmp_path, "full"), str(tmp_path), fill)
    assert (bool(result.stopped), bool(result.error)) == (True, True)
    assert "full/sel.txt" in dict(archive.list_files(result.path))


def test_old_archives_are_removed_before_the_part_is_collected(tmp_path: Path, fakes: Path) -> None:
    wanted = request(tmp_path)
    old = Path(archive.prepare_folder(wanted.state_dir)) / "20250101T000000Z-x.tar.gz"
    old.touch()
    os.utime(old, (0, 0))
    write_fake(fakes, "dmesg", f"ls {old}")
    assert len(collected(tmp_path, wanted).problems) == 1


def test_missing_state_directory_is_one_error(tmp_path: Path, fakes: Path) -> None:
    (tmp_path / "file").touch()
    result = collected(tmp_path, request(tmp_path, state_dir=f"{tmp_path}/file"))
    assert (bool(result.error), result.path) == (True, "")


def test_file_larger_than_the_limit_is_an_error(tmp_path: Path, fakes: Path) -> None:
    write_fake(fakes, "nvidia-bug-report.sh", 'head -c 3000000 /dev/urandom >"$3.gz"; kill -s TERM $$')
    wanted = request(tmp_path, "full", settings=EvidenceConfig(max_mib=2))
    result = collected(tmp_path, wanted)
    assert os.listdir(archive.folder(wanted.state_dir)) in ([], [os.path.basename(result.path)])
    assert not result.path or os.stat(result.path).st_size <= 2 << 20
    assert result.error or result.problems


def test_stop_reason_finds_job_only_for_full_part(tmp_path: Path) -> None:
    procs = tmp_path / "sys/fs/cgroup/system.slice/slurmstepd.scope/job_77/step_0/cgroup.procs"
    procs.parent.mkdir(parents=True)
    procs.write_text(f"{os.getpid()}\n")
    assert collect.stop_reason(request(tmp_path), lambda: False)() == ""
    assert "77" in collect.stop_reason(request(tmp_path, "full"), lambda: False)()
    assert collect.stop_reason(request(tmp_path), lambda: True)()


# --- requests


def write_request(tmp_path: Path, wanted: Request) -> str:
    path = request_file(str(tmp_path), "evidence")
    Path(path).write_bytes(encode(wanted))
    return path


def result_of(tmp_path: Path) -> Result | None:
    path = tmp_path / RESULT_FILE
    return parse_result(path.read_text()) if path.exists() else None


def test_serve_writes_the_result_and_removes_the_request(tmp_path: Path, fakes: Path) -> None:
    path = write_request(tmp_path, request(tmp_path, attempt=2))
    collect.serve_requests(str(tmp_path))
    assert not os.path.exists(path)
    result = result_of(tmp_path)
    assert result is not None
    assert (result.part, result.attempt, bool(result.path)) == ("first", 2, True)


HOLD_LOCK = """
import fcntl, sys, time
from healthd.host.lock import lock_file
fcntl.flock(lock_file(sys.argv[1], "evidence.lock"), fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_serve_waits_for_another_collector(tmp_path: Path, fakes: Path) -> None:
    path = write_request(tmp_path, request(tmp_path))
    command = [sys.executable, "-c", HOLD_LOCK, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()
        timer = threading.Timer(0.5, other.stdin.close)
        timer.start()
        collect.serve_requests(str(tmp_path))
        assert not timer.is_alive()
    assert not os.path.exists(path)


def test_stop_request_collects_nothing(tmp_path: Path) -> None:
    write_request(tmp_path, request(tmp_path, "stop"))
    collect.serve_requests(str(tmp_path))
    assert result_of(tmp_path) is None
    assert os.listdir(tmp_path / "state") == []


def test_invalid_request_is_dropped(tmp_path: Path) -> None:
    path = Path(request_file(str(tmp_path), "evidence"))
    path.write_text("x")
    collect.serve_requests(str(tmp_path))
    assert not path.exists()


def test_stop_request_stops_running_part(tmp_path: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake program replaces the request, as the daemon does when an operator resumes the node."""
    monkeypatch.setattr(collect, "STOP_POLL_SECONDS", 0.0)
    path = request_file(str(tmp_path), "evidence")
    (tmp_path / "stop").write_bytes(encode(request(tmp_path, "stop")))
    write_fake(fakes, "nvidia-bug-report.sh", f"mv {tmp_path}/stop {path}; sleep 600")
    write_request(tmp_path, request(tmp_path, "full"))
    collect.serve_requests(str(tmp_path))
    result = result_of(tmp_path)
    assert result is not None
    assert result.stopped
    assert not os.path.exists(path)


def test_collector_that_is_always_killed_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> Result:
        raise KeyboardInterrupt

    monkeypatch.setattr(collect, "collect_part", die)
    path = write_request(tmp_path, request(tmp_path))
    for _ in range(MAX_ATTEMPTS):
        with pytest.raises(KeyboardInterrupt):
            collect.serve_requests(str(tmp_path))
        assert os.path.exists(path)
    collect.serve_requests(str(tmp_path))
    result = result_of(tmp_path)
    assert result is not None
    assert result.error
    assert not os.path.exists(path)
