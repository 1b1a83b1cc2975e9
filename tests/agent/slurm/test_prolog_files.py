"""Tests of the GPUs of jobs as the node reports them: files of the prolog, open devices, and the complete inventory."""

from __future__ import annotations

import os
import subprocess
from itertools import count
from pathlib import Path

import pytest
from fakes import standing
from trees import write

from healthd.agent.slurm.node_gpus import NodeGpus
from healthd.agent.slurm.prolog_files import FILE, FILES, LINES, read_node_gpus, refusal_times
from healthd.common.model import Gpu, Inventory
from healthd.host.inventory import complete_gpus
from healthd.host.job_processes import gpus_open_by_job

PROLOG = Path(__file__).resolve().parents[3] / "packaging/slurm/prolog"


def prolog(run: Path, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    default = tmp_path / "default"
    default.write_text(f"HEALTHD_RUNTIME_DIR={run}\n")
    script = tmp_path / "prolog"
    script.write_text(PROLOG.read_text().replace("/etc/default/healthd", str(default)))
    return subprocess.run(
        ["/bin/sh", str(script)], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def gpus(run: Path) -> NodeGpus:
    return read_node_gpus(Inventory(), (), str(run), "/")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "jobs").mkdir(parents=True)
    return tmp_path / "run"


def test_the_prolog_notes_the_gpus_of_a_job_and_says_nothing(run: Path, tmp_path: Path) -> None:
    for environment, job, given in (
        ({"SLURM_JOB_ID": "12", "SLURM_JOB_GPUS": "0,3", "CUDA_VISIBLE_DEVICES": "0,3"}, "12", ("0", "3")),
        ({"SLURM_JOB_ID": "13", "SLURM_JOB_GPUS": "1", "CUDA_VISIBLE_DEVICES": "GPU-1f-2"}, "13", ("GPU-1f-2",)),
        ({"SLURM_JOB_ID": "4294967295", "SLURM_JOB_GPUS": "7"}, "4294967295", ("7",)),
        ({"SLURM_JOB_ID": "14"}, "14", None),
    ):
        done = prolog(run, tmp_path, **environment)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert gpus(run).allocation(job, 0.0) == given
    assert sorted(path.name for path in (run / "jobs").iterdir()) == ["1023", "12", "13"]


def test_the_files_are_as_few_as_their_numbers_and_the_later_job_counts(run: Path, tmp_path: Path) -> None:
    for job in ("5", str(5 + FILES)):
        prolog(run, tmp_path, SLURM_JOB_ID=job, SLURM_JOB_GPUS="2")
    assert len(list((run / "jobs").iterdir())) == 1
    assert gpus(run).allocation("5", 0.0) is None
    assert gpus(run).allocation(str(5 + FILES), 0.0) == ("2",)


def test_a_prolog_that_cannot_note_anything_lets_the_job_run(run: Path, tmp_path: Path) -> None:
    (run / "jobs" / "12").mkdir()
    for place, job in ((run, "12"), (run / "none", "12"), (run, "x; rm -r /"), (run, "")):
        done = prolog(place, tmp_path, SLURM_JOB_ID=job, SLURM_JOB_GPUS="1")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert gpus(run).allocation("12", 0.0) is None


def test_what_was_written_before_this_run_of_the_job_does_not_count(run: Path) -> None:
    write(run, {"/jobs/12": "12 1 \n"})
    os.utime(run / "jobs/12", (1000.0, 1000.0))
    assert gpus(run).allocation("12", 1001.0) == ("1",)
    assert gpus(run).allocation("12", 1003.0) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_that_somebody_else_wrote_or_linked_does_not_count(run: Path, tmp_path: Path) -> None:
    write(run, {"/jobs/12": "12 1 \n", "/theirs": "13 1 \n"})
    for path in (run / "jobs/12", run / "theirs"):
        os.chown(path, 65534, 65534)
    (run / "jobs/13").symlink_to(run / "theirs")
    os.mkfifo(run / "jobs/14")
    assert [gpus(run).allocation(job, 0.0) for job in ("12", "13", "14")] == [None] * 3


# --- open devices


def processes(root: Path, *descriptors: dict[str, str]) -> None:
    for pid, links in enumerate(descriptors, 100):
        folder = root / f"proc/{pid}/fd"
        folder.mkdir(parents=True)
        for name, target in links.items():
            (folder / name).symlink_to(target)


def test_what_a_job_has_open_is_told_for_all_its_processes(tmp_path: Path) -> None:
    processes(
        tmp_path,
        {"0": "/dev/null", "5": "/dev/nvidia3", "6": "/dev/nvidiactl", "7": "/dev/nvidia-uvm"},
        {"5": "/dev/nvidia0 (deleted)", "6": "/container/dev/nvidia12", "7": "/dev/nvidia-caps/nvidia-cap3"},
        {"5": "/dev/null"},
    )
    found = gpus_open_by_job({100: "12", 101: "12", 102: "13", 103: "13"}, str(tmp_path), standing)
    assert found == ({"12": frozenset({0, 3, 12}), "13": frozenset()}, True)


def test_numbers_that_no_device_has_are_none(tmp_path: Path) -> None:
    processes(tmp_path, {"5": "/dev/nvidia\u0663", "6": "/dev/nvidia" + "9" * 200, "7": "/dev/nvidia"})
    assert gpus_open_by_job({100: "12"}, str(tmp_path), standing) == ({"12": frozenset()}, True)


def test_where_time_is_too_short_it_says_so(tmp_path: Path) -> None:
    processes(tmp_path, {"5": "/dev/nvidia3"}, {"5": "/dev/nvidia4"})
    clock = count()
    found, all_seen = gpus_open_by_job({100: "12", 101: "13"}, str(tmp_path), lambda: next(clock) * 0.06)
    assert (found, all_seen) == ({"12": frozenset({3})}, False)


# --- the inventory


GPUS = tuple(Gpu(f"0000:{i}1:00.0", i, f"GPU-{i}", minor=i) for i in range(4))


def test_gpus_that_are_lost_are_remembered_and_exchanged_ones_are_not() -> None:
    assert complete_gpus((), GPUS) == GPUS
    assert complete_gpus(GPUS, GPUS[1:]) == GPUS
    assert complete_gpus(GPUS, ()) == GPUS
    assert complete_gpus(GPUS[1:], GPUS) == GPUS
    other = (*GPUS[:3], Gpu("0000:f1:00.0", 3, "GPU-9", minor=3))
    assert complete_gpus(GPUS, other) == other
    renewed = tuple(Gpu(gpu.pci, gpu.index, "GPU-new", minor=gpu.minor) for gpu in GPUS)
    assert complete_gpus(GPUS, renewed) == renewed


def test_refusal_times_returns_the_time_of_each_line(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("1800000000 12\n1800000060 13\nnonsense\n\n")
    assert refusal_times(str(tmp_path)) == (1800000000.0, 1800000060.0)


def test_refusal_times_returns_the_last_lines_of_a_long_file(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("".join(f"{1800000000 + n} {n}\n" for n in range(2 * LINES)))
    assert refusal_times(str(tmp_path))[-1] == 1800000000.0 + 2 * LINES - 1
    assert len(refusal_times(str(tmp_path))) < LINES + 1


def test_refusal_times_returns_nothing_without_a_line(tmp_path: Path) -> None:
    assert refusal_times(str(tmp_path)) == ()
    (tmp_path / FILE).touch()
    assert refusal_times(str(tmp_path)) == ()
