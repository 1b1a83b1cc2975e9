"""Tests of the GPUs of jobs as the node reports them: files of the prolog, open devices, and the complete inventory."""

from __future__ import annotations

import os
import subprocess
from itertools import count
from pathlib import Path

import pytest
from fakes import stopped_clock
from trees import write

from healthd.agent.slurm.node_gpus import NodeGpus
from healthd.agent.slurm.prolog_files import FILE, FILES, LINES, read_node_gpus, refusal_times
from healthd.common.model import Gpu, Inventory
from healthd.host.inventory import complete_gpus
from healthd.host.job_processes import gpus_open_by_job

PROLOG = Path(__file__).resolve().parents[3] / "packaging/slurm/prolog"


def run_prolog(run_dir: Path, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    default = tmp_path / "default"
    default.write_text(f"HEALTHD_RUNTIME_DIR={run_dir}\n")
    script = tmp_path / "prolog"
    script.write_text(PROLOG.read_text().replace("/etc/default/healthd", str(default)))
    return subprocess.run(
        ["/bin/sh", str(script)], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def node_gpus(run_dir: Path) -> NodeGpus:
    return read_node_gpus(Inventory(), (), str(run_dir), "/")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run" / "jobs").mkdir(parents=True)
    return tmp_path / "run"


def test_prolog_records_job_gpus_silently(run_dir: Path, tmp_path: Path) -> None:
    for environment, job, expected in (
        ({"SLURM_JOB_ID": "12", "SLURM_JOB_GPUS": "0,3", "CUDA_VISIBLE_DEVICES": "0,3"}, "12", ("0", "3")),
        ({"SLURM_JOB_ID": "13", "SLURM_JOB_GPUS": "1", "CUDA_VISIBLE_DEVICES": "GPU-1f-2"}, "13", ("GPU-1f-2",)),
        ({"SLURM_JOB_ID": "4294967295", "SLURM_JOB_GPUS": "7"}, "4294967295", ("7",)),
        ({"SLURM_JOB_ID": "14"}, "14", None),
    ):
        completed = run_prolog(run_dir, tmp_path, **environment)
        assert (completed.returncode, completed.stdout, completed.stderr) == (0, "", "")
        assert node_gpus(run_dir).allocation(job, 0.0) == expected
    assert sorted(path.name for path in (run_dir / "jobs").iterdir()) == ["1023", "12", "13"]


def test_prolog_files_are_bounded_and_later_job_counts(run_dir: Path, tmp_path: Path) -> None:
    for job in ("5", str(5 + FILES)):
        run_prolog(run_dir, tmp_path, SLURM_JOB_ID=job, SLURM_JOB_GPUS="2")
    assert len(list((run_dir / "jobs").iterdir())) == 1
    assert node_gpus(run_dir).allocation("5", 0.0) is None
    assert node_gpus(run_dir).allocation(str(5 + FILES), 0.0) == ("2",)


def test_prolog_without_writable_file_lets_job_run(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "jobs" / "12").mkdir()
    for runtime_dir, job in ((run_dir, "12"), (run_dir / "none", "12"), (run_dir, "x; rm -r /"), (run_dir, "")):
        completed = run_prolog(runtime_dir, tmp_path, SLURM_JOB_ID=job, SLURM_JOB_GPUS="1")
        assert (completed.returncode, completed.stdout, completed.stderr) == (0, "", "")
    assert node_gpus(run_dir).allocation("12", 0.0) is None


def test_allocation_ignores_file_from_earlier_run(run_dir: Path) -> None:
    write(run_dir, {"/jobs/12": "12 1 \n"})
    os.utime(run_dir / "jobs/12", (1000.0, 1000.0))
    assert node_gpus(run_dir).allocation("12", 1001.0) == ("1",)
    assert node_gpus(run_dir).allocation("12", 1003.0) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_allocation_ignores_file_from_other_user_or_link(run_dir: Path, tmp_path: Path) -> None:
    write(run_dir, {"/jobs/12": "12 1 \n", "/theirs": "13 1 \n"})
    for path in (run_dir / "jobs/12", run_dir / "theirs"):
        os.chown(path, 65534, 65534)
    (run_dir / "jobs/13").symlink_to(run_dir / "theirs")
    os.mkfifo(run_dir / "jobs/14")
    assert [node_gpus(run_dir).allocation(job, 0.0) for job in ("12", "13", "14")] == [None] * 3


# --- open devices


def add_processes(root: Path, *descriptors: dict[str, str]) -> None:
    for pid, links in enumerate(descriptors, 100):
        folder = root / f"proc/{pid}/fd"
        folder.mkdir(parents=True)
        for name, target in links.items():
            (folder / name).symlink_to(target)


def test_gpus_open_by_job_unites_job_processes(tmp_path: Path) -> None:
    add_processes(
        tmp_path,
        {"0": "/dev/null", "5": "/dev/nvidia3", "6": "/dev/nvidiactl", "7": "/dev/nvidia-uvm"},
        {"5": "/dev/nvidia0 (deleted)", "6": "/container/dev/nvidia12", "7": "/dev/nvidia-caps/nvidia-cap3"},
        {"5": "/dev/null"},
    )
    open_gpus = gpus_open_by_job({100: "12", 101: "12", 102: "13", 103: "13"}, str(tmp_path), stopped_clock)
    assert open_gpus == ({"12": frozenset({0, 3, 12}), "13": frozenset()}, True)


def test_gpus_open_by_job_ignores_invalid_device_numbers(tmp_path: Path) -> None:
    add_processes(tmp_path, {"5": "/dev/nvidia\u0663", "6": "/dev/nvidia" + "9" * 200, "7": "/dev/nvidia"})
    assert gpus_open_by_job({100: "12"}, str(tmp_path), stopped_clock) == ({"12": frozenset()}, True)


def test_gpus_open_by_job_reports_timeout(tmp_path: Path) -> None:
    add_processes(tmp_path, {"5": "/dev/nvidia3"}, {"5": "/dev/nvidia4"})
    clock = count()
    open_gpus, is_complete = gpus_open_by_job({100: "12", 101: "13"}, str(tmp_path), lambda: next(clock) * 0.06)
    assert (open_gpus, is_complete) == ({"12": frozenset({3})}, False)


# --- the inventory


GPUS = tuple(Gpu(f"0000:{i}1:00.0", i, f"GPU-{i}", minor=i) for i in range(4))


def test_complete_gpus_keeps_lost_and_drops_replaced_gpus() -> None:
    assert complete_gpus((), GPUS) == GPUS
    assert complete_gpus(GPUS, GPUS[1:]) == GPUS
    assert complete_gpus(GPUS, ()) == GPUS
    assert complete_gpus(GPUS[1:], GPUS) == GPUS
    replaced = (*GPUS[:3], Gpu("0000:f1:00.0", 3, "GPU-9", minor=3))
    assert complete_gpus(GPUS, replaced) == replaced
    renewed = tuple(Gpu(gpu.pci, gpu.index, "GPU-new", minor=gpu.minor) for gpu in GPUS)
    assert complete_gpus(GPUS, renewed) == renewed


def test_refusal_times_returns_time_per_line(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("1800000000 12\n1800000060 13\nnonsense\n\n")
    assert refusal_times(str(tmp_path)) == (1800000000.0, 1800000060.0)


def test_refusal_times_returns_last_lines_from_long_file(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("".join(f"{1800000000 + n} {n}\n" for n in range(2 * LINES)))
    assert refusal_times(str(tmp_path))[-1] == 1800000000.0 + 2 * LINES - 1
    assert len(refusal_times(str(tmp_path))) < LINES + 1


def test_refusal_times_returns_nothing_without_line(tmp_path: Path) -> None:
    assert refusal_times(str(tmp_path)) == ()
    (tmp_path / FILE).touch()
    assert refusal_times(str(tmp_path)) == ()
