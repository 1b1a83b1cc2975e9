"""Tests of `healthd failslow plan` and `split`, and of the examples in docs/fail-slow-plan.md."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from gangs import Fault, gang

from healthd.cli import main

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from failslow_figures import make_folder  # noqa: E402
from fleet_excerpts import CONSOLE, block, command_output, commands  # noqa: E402

PAGE = ROOT / "docs/fail-slow-plan.md"
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    jobs_folder = tmp_path_factory.mktemp("jobs")
    make_folder(jobs_folder)
    return jobs_folder


@pytest.mark.parametrize("terminal", CONSOLE.findall(PAGE.read_text("utf-8")), ids=lambda text: text.partition("\n")[0])
def test_terminal_on_page_matches_output(terminal: str, folder: Path) -> None:
    assert block(commands(terminal), lambda command: command_output(command, folder)) == terminal


def run_failslow(capsys: Captured, *arguments: str) -> tuple[int, str, str]:
    status = main.main(["failslow", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_split_prints_micro_batches_of_each_group(capsys: Captured) -> None:
    status, out, _ = run_failslow(capsys, "split", "--micro-batches", "28", "--times", "1,1,1,2", "--json")
    assert status == 0
    assert json.loads(out) == {"micro_batches": [8, 8, 8, 4], "makespan": 8.0, "even": 14.0, "saved": 1 - 8 / 14}


def test_split_reads_times_from_file(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "times").write_text("1.0\n1.0, 1.0\n2.0\n")
    status, out, _ = run_failslow(
        capsys, "split", "--micro-batches", "28", "--times", str(tmp_path / "times"), "--json"
    )
    assert status == 0
    assert json.loads(out)["micro_batches"] == [8, 8, 8, 4]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (
            ("--micro-batches", "8", "--times", "1,x"),
            64,
            '--times: must be numbers above 0 like 1.0,1.3, or a file, got "x"',
        ),
        (("--micro-batches", "8", "--times", "1,nan"), 64, 'got "nan"'),
        (("--micro-batches", "8", "--times", "1,-1"), 64, 'got "-1"'),
        (("--micro-batches", "8", "--times", ","), 64, "--times: contains no numbers"),
        (("--micro-batches", "1", "--times", "1,1"), 64, "1 micro-batches are too few for 2 groups"),
        (
            ("--micro-batches", "0.5", "--times", "1,1"),
            64,
            '--micro-batches: must be a whole number above 0, got "0.5"',
        ),
        (("--micro-batches", "8", "--times", "/"), 3, "--times /: cannot be read"),
        (("--times", "1,1"), 64, "--micro-batches"),
    ],
)
def test_split_rejects_invalid_arguments(
    capsys: Captured, arguments: tuple[str, ...], status: int, message: str
) -> None:
    exit_status, out, err = run_failslow(capsys, "split", *arguments)
    assert (exit_status, out) == (status, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_plan_states_when_remedy_was_worth_its_cost(capsys: Captured, folder: Path) -> None:
    job = str(folder / "gang.csv")
    status, out, _ = run_failslow(
        capsys, "plan", job, "--index", "step", "--gpus", "8", "--overhead", "S2=5,s3=60", "--json"
    )
    document = json.loads(out)
    assert status == 0  # the slowness has ended
    assert document["overhead_seconds"] == {"s2": 5.0, "s3": 60.0, "s4": 600.0}
    (slow,) = document["slow"]
    assert slow["series"] == ["5"]
    assert [action["action"] for action in slow["actions"]] == ["s2"]
    assert slow["actions"][0]["lost_gpu_seconds"] >= slow["actions"][0]["overhead_gpu_seconds"] == 40
    assert document["now"] == {"action": "s1", "slow": False, "lost_gpu_seconds": 0.0, "next": None}


def test_plan_with_due_remedy_exits_with_1(capsys: Captured, folder: Path, tmp_path: Path) -> None:
    rows = (folder / "gang.csv").read_text().splitlines()
    cut = [row for row in rows if re.match(r"rank|\d+,[^,]*,(\d|\d\d|[12]\d\d),", row)]  # until step 300
    (tmp_path / "now.csv").write_text("\n".join(cut) + "\n")
    arguments = (str(tmp_path / "now.csv"), "--index", "step", "--gpus", "8")
    status, out, _ = run_failslow(capsys, "plan", *arguments)
    assert status == 1
    assert "now: S2, " in out
    now = json.loads(run_failslow(capsys, "plan", *arguments, "--json")[1])["now"]
    assert (now["action"], now["next"]["action"]) == ("s2", "s3")


def test_plan_restarts_for_slow_node_with_whole_stage(capsys: Captured, tmp_path: Path) -> None:
    rows = ["rank,node,stage,step,step_time,busy,wait,transfer"]
    slow = [Fault("busy", range(8, 16), 0.4)]
    for series in gang(32, slow, per_node=8, groups={rank: f"s{rank // 8}" for rank in range(32)}):
        for at, value in enumerate(series.value):
            parts = [times[at] for times in (series.busy, series.wait, series.transfer) if times is not None]
            rows.append(",".join(map(str, (series.name, series.node, series.group, at, value, *parts))))
    (tmp_path / "job.csv").write_text("\n".join(rows) + "\n")
    arguments = (str(tmp_path / "job.csv"), "--index", "step", "--group", "stage", "--gpus", "32")
    status, out, _ = run_failslow(capsys, "plan", *arguments, "--overhead", "s2=0.1,s3=0.1,s4=0.2", "--json")
    document = json.loads(out)
    assert (status, document["now"]["action"], [series["series"] for series in document["slow"]]) == (
        1,
        "s4",
        [["gpu-1"]],
    )


def test_plan_notes_series_slow_throughout(capsys: Captured) -> None:
    stall = str(Path(__file__).parents[1] / "data/failslow/input_stall_rank2.csv")
    status, out, _ = run_failslow(capsys, "plan", stall, "--index", "step", "--gpus", "4", "--json")
    assert (status, sum("rank 2 is slower" in note for note in json.loads(out)["notes"])) == (0, 1)


def test_plan_without_slowness_exits_with_0(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text("step_time\n" + "1.5\n" * 100)
    status, out, _ = run_failslow(capsys, "plan", str(tmp_path / "steps.csv"), "--gpus", "8", "--json")
    document = json.loads(out)
    assert (status, document["samples"], document["slow"]) == (0, 100, [])


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--gpus", "0"), 64, '--gpus: must be a whole number from 1 to 1,000,000, got "0"'),
        (("--gpus", "1000001"), 64, "--gpus: must be"),
        (("--gpus", "x\x1b"), 64, 'got "x?"'),
        ((), 64, "--gpus"),
        (("--gpus", "8", "--overhead", "s5=3"), 64, "--overhead: must be seconds from 0 to 604,800 like s2=5"),
        (("--gpus", "8", "--overhead", "s2=-1"), 64, 'got "s2=-1"'),
        (("--gpus", "8", "--overhead", "s2=nan"), 64, 'got "s2=nan"'),
        (("--gpus", "8", "--overhead", "s2=1,s2=2"), 64, "each once"),
        (("--gpus", "8", "--overhead", ""), 64, "--overhead"),
        (("--gpus", "8", "--value", ""), 64, "healthd failslow plan: --value: is an empty string"),
        (("--gpus", "8", "--value", "none"), 3, "healthd failslow plan:"),
    ],
)
def test_plan_rejects_invalid_arguments(
    capsys: Captured, folder: Path, arguments: tuple[str, ...], status: int, message: str
) -> None:
    exit_status, out, err = run_failslow(capsys, "plan", str(folder / "gang.csv"), *arguments)
    assert (exit_status, out) == (status, "")
    assert message in err
    assert len(err.splitlines()) == 1


def write_job_with_slow_rank(tmp_path: Path) -> str:
    """Write a job of nine ranks, where rank 8 is slow until the end. Return its path."""
    rows = ["rank,step,step_time,busy,wait,transfer"]
    for series in gang(9, [Fault("busy", [8], 0.4)]):
        for at, value in enumerate(series.value):
            parts = [times[at] for times in (series.busy, series.wait, series.transfer) if times is not None]
            rows.append(",".join(map(str, (series.name, at, value, *parts))))
    path = tmp_path / "job.csv"
    path.write_text("\n".join(rows) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("layout", "stage", "swaps"),
    [
        ("10x1x1", 8, 0),  # an interior stage
        ("5x3x1", 2, 0),
        ("9x1x1", 1, 1),  # the last stage
        ("3x3x1", 1, 1),
        ("1x9x1", 0, 0),
    ],
)
def test_plan_moves_slow_rank_into_interior_stage(
    capsys: Captured, tmp_path: Path, layout: str, stage: int, swaps: int
) -> None:
    arguments = ("plan", write_job_with_slow_rank(tmp_path), "--index", "step", "--gpus", "9", "--layout", layout)
    _, out, _ = run_failslow(capsys, *arguments, "--json")
    document = json.loads(out)
    assert document["slow"][-1]["series"] == ["8"]
    assert (document["topology"]["stages"], len(document["topology"]["swaps"])) == ([stage], swaps)


def test_plan_prints_swaps_for_slow_links(capsys: Captured, tmp_path: Path) -> None:
    arguments = ("plan", write_job_with_slow_rank(tmp_path), "--index", "step", "--gpus", "9")
    _, out, _ = run_failslow(capsys, *arguments, "--layout", "5x2x1", "--slow-links", "4-5", "--json")
    swaps = json.loads(out)["topology"]["swaps"]
    assert [swap["why"] for swap in swaps] == ["straggler", "link"]
    _, out, _ = run_failslow(capsys, *arguments, "--layout", "5x2x1", "--slow-links", "4-5")
    assert "S3: swap ranks" in out
    _, out, _ = run_failslow(capsys, *arguments, "--json")
    assert json.loads(out)["topology"] is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--layout", "4x2"), "--layout: must be stages x"),
        (("--layout", "0x2x2"), "--layout: must be stages x"),
        (("--layout", "99999x99x99"), "--layout: must be stages x"),
        (("--layout", "2x2x2"), "rank 8 has no position in the job"),
        (("--layout", "3x3x1", "--slow-links", "1"), "--slow-links: must be pairs of ranks"),
        (("--layout", "3x3x1", "--slow-links", "1-99"), "rank 99 has no position"),
        (("--slow-links", "0-1"), "--slow-links requires --layout"),
    ],
)
def test_plan_rejects_invalid_layout(capsys: Captured, tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    arguments = ("plan", write_job_with_slow_rank(tmp_path), "--index", "step", "--gpus", "9")
    status, out, err = run_failslow(capsys, *arguments, *flags)
    assert (status, out, len(err.splitlines())) == (64, "", 1)
    assert message in err
