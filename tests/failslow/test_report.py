"""Tests of the output and exit status of `healthd failslow`, and of its document as text."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from healthd.common.page import Page
from healthd.failslow import report
from healthd.failslow.model import Cause, Confidence, Diagnosis, Point, Series, SlowJob, Suspect
from healthd.failslow.times import TimeStyle

ROOT = Path(__file__).parents[2]


def run(*arguments: str, stdin: str = "", columns: int = 100, first: Path = ROOT) -> tuple[int, str, str]:
    """Run `healthd failslow`; modules are imported from `first` before all other folders."""
    python_path = f"{first}:{ROOT}"
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": python_path, "COLUMNS": str(columns), "LC_ALL": "C.UTF-8"}
    argv = [sys.executable, "-m", "healthd", "failslow", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=env, input=stdin)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def run_json(*arguments: str, stdin: str = "") -> tuple[int, Any]:
    status, out, err = run(*arguments, "--json", stdin=stdin)
    assert err == ""
    return status, json.loads(out)


def job_csv(slow: dict[int, tuple[int, int]], workers: int = 8, samples: int = 400) -> str:
    """Return a CSV of independent workers. `slow` has the first and last sample at +60 % of a worker."""
    draw = random.Random(7)
    lines = ["worker,step,at,step_time"]
    for step in range(samples):
        for worker in range(workers):
            begin, end = slow.get(worker, (samples, samples))
            value = draw.gauss(1, 0.02) * (1.6 if begin <= step < end else 1)
            at = f"2026-11-22T{10 + step // 60:02}:{step % 60:02}:00Z"
            lines.append(f"{worker},{5 * step},{at},{value:.5f}")
    return "\n".join(lines) + "\n"


def write_file(folder: Path, text: str, name: str = "job.csv") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


# --- the command


def test_slow_worker_is_named_and_its_peers_are_not(tmp_path):
    status, result = run_json(
        write_file(tmp_path, job_csv({6: (180, 260)})), "--series", "worker", "--value", "step_time"
    )
    assert status == 1
    assert [(entry["subject"], entry["subject_kind"]) for entry in result["suspects"]] == [("6", "worker")]
    assert result["job_slow"] == []
    assert [entry["series"] for entry in result["series"] if entry["points"]] == ["6"]
    point = result["series"][6]["points"][0]
    assert point["onset"] == point["onset_index"]
    assert (point["onset_index"], point["relief_index"]) == (180, 260)
    assert abs(point["slowdown"] - 0.6) < 0.02
    assert result["samples"] == 8 * 400


def test_healthy_job_has_empty_lists_and_exits_with_0(tmp_path):
    status, result = run_json(write_file(tmp_path, job_csv({})), "--series", "worker", "--value", "step_time")
    assert (status, result["suspects"], result["job_slow"]) == (0, [], [])
    assert [entry["points"] for entry in result["series"]] == [[]] * 8


@pytest.mark.parametrize(
    ("column", "place"), [("step", lambda at: 5 * at), ("at", "2026-11-22T{:02}:{:02}:00Z".format)]
)
def test_positions_are_values_of_index_column(tmp_path, column, place):
    path = write_file(tmp_path, job_csv({6: (180, 260)}))
    point = run_json(path, "--series", "worker", "--value", "step_time", "--index", column)[1]["suspects"][0]["point"]
    row = point["onset_index"]
    assert point["onset"] == (place(row) if column == "step" else place(10 + row // 60, row % 60))


def test_folder_has_one_file_per_rank_and_reports_unread_files(tmp_path):
    rows = job_csv({6: (180, 260)}).splitlines()
    for worker in range(8):
        own = [row for row in rows[1:] if row.startswith(f"{worker},")]
        write_file(tmp_path, "\n".join([rows[0], *own]), f"rank{worker}.csv")
    write_file(tmp_path, "no table\n", "README")
    os.mkfifo(tmp_path / "pipe")
    os.symlink(tmp_path, tmp_path / "again")
    status, result = run_json(str(tmp_path), "--value", "step_time", "--series", "worker")
    assert (status, [entry["subject"] for entry in result["suspects"]]) == (1, ["6"])
    assert [entry["file"] for entry in result["unread"]] == ["README", "pipe"]
    assert '"worker"' in result["unread"][0]["why"]


def test_series_of_same_name_are_named_with_file(tmp_path):
    for name in ("n1.csv", "n2.csv"):
        write_file(tmp_path, "rank,t\n" + "0,1\n1,1\n" * 30, name)
    result = run_json(str(tmp_path), "--value", "t", "--series", "rank")[1]
    assert [entry["series"] for entry in result["series"]] == ["n1/0", "n1/1", "n2/0", "n2/1"]


def test_standard_input_is_accepted(tmp_path):
    status, result = run_json("-", "--series", "worker", "--value", "step_time", stdin=job_csv({}))
    assert (status, result["files"], len(result["series"])) == (0, ["-"], 8)


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (("none.csv",), 3, "none.csv: cannot be read: No such file or directory"),
        (("job.csv", "--value", "x"), 3, 'job.csv: has no column "x"; columns: worker, step, at and step_time'),
        (("job.csv", "--series", "a,,b"), 64, '--series: must be column names like a,b, got "a,,b"'),
        (("job.csv", "--value", ""), 64, "--value: is an empty string; name a column"),
        (("empty",), 3, "empty: no file can be read: no file"),
        (("broken",), 3, "broken: no file can be read: a.csv: is empty (and 1 more)"),
        (("",), 64, "FILE is an empty string; name a file"),
    ],
)
def test_invalid_input_is_one_sentence(tmp_path, monkeypatch, arguments, status, sentence):
    monkeypatch.chdir(tmp_path)
    write_file(tmp_path, job_csv({}, samples=5))
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    write_file(tmp_path, "", "broken/a.csv")
    write_file(tmp_path, "", "broken/b.csv")
    assert run(*arguments) == (status, "", f"healthd failslow: {sentence}\n")


def test_missing_file_argument_is_usage_error():
    status, out, err = run()
    assert (status, out) == (64, "")
    assert "FILE|DIR" in err


# --- the text


def make_series(names: str = "0123456789", **options: Any) -> Series:
    return Series(name=names, value=[1.0] * 300, index=range(300), label="worker", **options)


NOTE = "2 rows without a value: left out"
POINT = Point(180, 184, 0.65, 0.99, 195)


def text_of(judgement: Diagnosis, series: list[Series], notes: tuple[str, ...] = (), width: int = 100) -> str:
    return report.format_text(
        report.build_document(["job.csv"], series, judgement, notes), Page(width, fold=width < 100)
    )


def rows_of(text: str) -> list[tuple[str, str, str, str]]:
    """Return subject, interval, slowdown in percent and the whole text of each row below the first line."""
    pattern = re.compile(r"(.*?) {3,}(.*?(?:since|from) (\d+(?: to \d+)?), \+(\d+) %.*)")
    matches = [pattern.fullmatch(line) for line in text.splitlines()[1:]]
    return [(match[1], match[3], match[4], match[2]) for match in matches if match]


def test_suspect_is_one_line():
    series = [make_series(str(number)) for number in range(10)]
    points = tuple((POINT,) if number == 6 else () for number in range(10))
    suspect = Suspect("6", "worker", Cause.COMPUTE, Confidence.HIGH, (), ("6",), POINT)
    head, line = text_of(Diagnosis(points, (suspect,)), series).splitlines()
    assert head == "job.csv: 10 series, 3,000 samples; 1 fail-slow"
    assert re.fullmatch(r"worker 6   .* 180 to 195, \+65 %, .*: .* compute .* worker 6 \(high\)", line)


def test_evidence_wraps_below_suspect():
    series = [make_series("6"), make_series("7")]
    lasting = Point(180, 184, 0.65, 0.99)
    long_evidence = (
        "its compute time is 1.52 x its own baseline, and that of its seven peers is 1.01 x theirs in the same steps"
    )
    suspect = Suspect(
        "6", "worker", Cause.COMPUTE_GPU, Confidence.MEDIUM, (long_evidence, "clocks were held"), ("6",), lasting
    )
    _, first, *evidence, last = text_of(Diagnosis(((lasting,), (POINT,)), (suspect,)), series, width=72).splitlines()
    assert re.match(r"worker 6   .* 180, \+65 %: .* \(medium\)$", first)
    assert re.match(r"worker 7   waited .* 180 to 195, \+65 %", last)
    assert [len(line) - len(line.lstrip()) for line in evidence] == [11, 13, 11]
    assert " ".join(line.strip() for line in evidence) == f"- {long_evidence} - clocks were held"


def test_slow_job_names_no_suspect():
    series = [make_series("0", group="dp"), make_series("1", group="dp")]
    slow = SlowJob("dp", 180, POINT, ("0", "1"), 2, Cause.UNKNOWN, "all of its peers became slower at the same time")
    _, first, second = text_of(Diagnosis(((), ()), (), (slow,)), series, width=80).splitlines()
    assert re.fullmatch(r"group dp   .* 180 to 195, \+65 %, .*2 of 2 workers; no suspect:", first)
    assert second == " " * 11 + slow.reason


@pytest.mark.parametrize("ranks", [4, 8, 1024])
def test_gang_has_suspect_and_one_line_for_waiting_ranks(ranks):
    series = [make_series(str(rank)) for rank in range(ranks)]
    suspect = Suspect("2", "worker", Cause.COMPUTE_GPU, Confidence.HIGH, ("busy 0.7, up from 0.5",), ("2",), POINT)
    result = text_of(Diagnosis(((POINT,),) * ranks, (suspect,)), series, width=80).splitlines()
    other_workers = f"{ranks - 1:,} other workers"
    head, *lines, waiting = result
    assert head == f"job.csv: {ranks:,} series, {300 * ranks:,} samples; 1 fail-slow"
    width = len(other_workers) + 3
    assert [line[:width].strip() for line in lines] == ["worker 2", "", ""]
    assert [line[width:] for line in lines[1:]] == ["worker 2 (high)", "- busy 0.7, up from 0.5"]
    assert re.match(rf"{other_workers}   waited .* 180 to 195, \+65 %", waiting)


def test_each_slow_period_of_gang_has_suspect_and_waiting_ranks():
    again = Point(240, 244, 0.3, 0.99)
    close = replace(POINT, onset_index=182, slowdown=0.61)
    points = ((POINT, again), *((close, again),) * 6, (POINT, again))
    suspects = tuple(
        Suspect(name, "worker", Cause.COMPUTE, Confidence.HIGH, (), (name,), point)
        for name, point in (("0", POINT), ("7", POINT), ("0", again))
    )
    result = text_of(Diagnosis(points, suspects), [make_series(str(rank)) for rank in range(8)])
    assert [row[:3] for row in rows_of(result)] == [
        ("worker 0", "240", "30"),
        ("7 other workers", "240", "30"),
        ("worker 0", "180 to 195", "65"),
        ("worker 7", "180 to 195", "65"),
        ("6 other workers", "182 to 195", "61"),
    ]
    assert ["waited" in rest for *_, rest in rows_of(result)] == [False, True, False, False, True]


def test_workers_slow_for_same_reason_are_one_slow_job():
    points = ((),) * 5 + ((POINT,), (replace(POINT, slowdown=0.7),), ())
    slow = tuple(
        SlowJob("", 180, point, (str(at),), 8, Cause.UNKNOWN, "it waits for others")
        for at, (point,) in enumerate(points[5:7], 5)
    )
    _, line = text_of(Diagnosis(points, (), slow), [make_series(str(at)) for at in range(8)]).splitlines()
    assert re.fullmatch(rf"job   .* 180 to 195, \+65 to \+70 %.* 2 of 8 workers; .*: {slow[0].reason}", line)


def test_waiting_worker_is_named_without_suspicion():
    slow = SlowJob("", 180, POINT, ("5",), 8, Cause.UNKNOWN, "it waits for others")
    result = text_of(Diagnosis(((),) * 5 + ((POINT,), (), ()), (), (slow,)), [make_series(str(at)) for at in range(8)])
    ((subject, interval, percent, text),) = rows_of(result)
    assert (subject, interval, percent) == ("worker 5", "180 to 195", "65")
    assert text.endswith(f"no suspect: {slow.reason}")


def test_slow_worker_beside_suspect_is_not_waiting():
    points = ((POINT,), (POINT,)) + ((),) * 8
    suspect = Suspect("0", "worker", Cause.COMPUTE, Confidence.HIGH, (), ("0",), POINT)
    result = text_of(Diagnosis(points, (suspect,)), [make_series(str(at)) for at in range(10)])
    assert [subject for subject, *_ in rows_of(result)] == ["worker 0", "worker 1"]
    assert rows_of(result)[1][3].endswith("; no suspect")


def test_long_list_is_cut_and_counted():
    series = [make_series(str(number)) for number in range(50)]
    points = tuple((replace(POINT, onset_index=30 * number),) for number in range(50))
    result = text_of(Diagnosis(points), [replace(entry, index=range(1500)) for entry in series], (NOTE,))
    lines = result.splitlines()
    assert lines[0].startswith("job.csv: 50 series, 15,000 samples; 50 slow")
    assert len(lines) == 1 + report.MAX_SHOWN + 2
    assert lines[-2].startswith("and 30 more ")
    assert lines[-1] == f"note: {NOTE}"


def test_workers_slow_together_are_one_line():
    result = text_of(Diagnosis(((POINT,),) * 50), [make_series(str(number)) for number in range(50)])
    assert len(result.splitlines()) == 2
    assert [row[:3] for row in rows_of(result)] == [("50 workers", "180 to 195", "65")]


def test_healthy_series_is_reported_as_nothing_slow():
    (line,) = text_of(Diagnosis(((),)), [make_series("0")]).splitlines()
    assert line.endswith("; nothing became slow")


def test_too_short_series_are_not_reported_as_healthy():
    result = text_of(Diagnosis(((), ())), [Series(name, [1.0] * 19, range(19)) for name in "01"])
    (line,) = result.splitlines()
    assert line.startswith("job.csv: 2 series, 38 samples; too few ")


def test_hostile_name_is_escaped():
    series = [make_series("\x1b[2J6\n7")]
    assert "\x1b" not in text_of(Diagnosis(((POINT,),)), series)


def test_positions_count_rows_left_out():
    times = TimeStyle("T", 0, "Z")
    entry = Series("0", [1.0, 1.0, 2.0], [0.0, 60.0, 240.0], rows=[0, 1, 4], times=times)
    result = report.build_document(["job.csv"], [entry], Diagnosis(((Point(1, 2, 0.5, 1.0),),)))
    point = result["series"][0]["points"][0]
    assert (point["onset"], point["onset_index"], point["alarm"], point["alarm_index"]) == (
        "1970-01-01T00:01:00Z",
        1,
        "1970-01-01T00:04:00Z",
        4,
    )
    assert (point["relief"], point["relief_index"]) == (None, None)


# --- many suspects


def many_suspects(
    number: int, evidence: tuple[str, ...] = (), kind: str = "worker", name: str = "{}"
) -> tuple[Diagnosis, list[Series]]:
    """Return suspects among 100 series. Each starts 40 samples after the previous one and is slower."""
    series = [
        replace(make_series(name.format(at)), label=kind, index=range(4000), value=[1.0] * 4000) for at in range(100)
    ]
    points = [Point(40 * at, 40 * at + 4, 0.2 + at / 100, 0.99, 40 * at + 15) for at in range(number)]
    suspects = tuple(
        Suspect(
            entry.name,
            kind,
            Cause.COMPUTE,
            Confidence.HIGH,
            ("busy 1.4, up from 1", *evidence),
            (entry.name,),
            point,
        )
        for entry, point in zip(series, points, strict=False)
    )
    return Diagnosis(tuple((point,) for point in points) + ((),) * (100 - number), suspects), series


@pytest.mark.parametrize("width", [80, 120])
def test_worst_suspects_take_two_lines_and_others_are_counted(width):
    judgement, series = many_suspects(29)
    page = Page(width, fold=True)
    lines = report.format_text(report.build_document(["job.csv"], series, judgement), page).splitlines()
    assert lines[0].endswith("29 fail-slow")
    assert re.fullmatch(r"worker 28   .* 1120 to 1135, \+48 %.*: compute \(high\)", lines[1])
    assert lines[2] == "  busy 1.4, up from 1"
    assert len(lines) == 1 + 2 * report.MAX_SHOWN + 1
    assert lines[-1].startswith("and 9 suspects more ")
    assert max(map(len, lines)) <= width


def test_suspect_with_high_confidence_precedes_slowest():
    judgement, series = many_suspects(3)
    first, *other_suspects = judgement.suspects
    suspects = (first, *(replace(entry, confidence=Confidence.LOW) for entry in other_suspects))
    lines = text_of(replace(judgement, suspects=suspects), series).splitlines()
    assert [line.split("   ")[0] for line in lines if line.startswith("worker")] == ["worker 0", "worker 2", "worker 1"]


def test_common_evidence_is_printed_once_with_names():
    judgement, series = many_suspects(7)
    evidence = "7 became slow at about the same time, possibly from a common cause"
    suspects = tuple(replace(entry, evidence=(*entry.evidence, evidence), point=POINT) for entry in judgement.suspects)
    result = text_of(replace(judgement, suspects=suspects, points=((POINT,),) * 7 + ((),) * 93), series)
    assert result.count("a common cause") == 1
    assert f"together   {evidence} (0, 1, 2, 3, 4, 5, 6)" in result.splitlines()


def test_long_name_is_cut_in_text_only():
    judgement, series = many_suspects(1, name="a-very-long-name-of-a-worker-in-some-cluster-{}")
    result = report.build_document(["job.csv"], series, judgement)
    assert result["suspects"][0]["subject"] == "a-very-long-name-of-a-worker-in-some-cluster-0"
    assert "worker a-very-long-name-of-a-worker-in-some-c..." not in report.format_text(result, Page(100))
    assert "worker a-very-long-name-of-a-worker-in-some-..." in report.format_text(result, Page(100))


def test_name_of_two_columns_is_followed_by_their_names():
    judgement, series = many_suspects(1, kind="node/gpu", name="node-{}/1")
    (line,) = (line for line in text_of(judgement, series).splitlines() if line.startswith("node-0/1"))
    assert line.startswith("node-0/1 (node/gpu)   ")
    assert line.endswith(" node-0/1 (high)")


# --- notes


def test_common_note_is_printed_once_with_number_of_files(tmp_path):
    for rank in range(64):
        write_file(tmp_path, "seconds\n" + "1.0\n" * 30, f"times-{rank}.csv")
    taken = "64 files: columns found by name: value seconds"
    result = run_json(str(tmp_path))[1]
    assert (result["notes"][0], len(result["notes"]), result["compared"]) == (taken, 2, 0)
    assert "64 series not compared" in result["notes"][1]
    assert run(str(tmp_path))[1].splitlines()[1:] == [f"note: {note}" for note in result["notes"]]


def test_long_list_of_notes_is_cut_and_counted():
    lines = text_of(
        Diagnosis(((),)), [make_series("0")], tuple(f"rank{at}.csv: a row" for at in range(30))
    ).splitlines()
    assert len(lines) == 1 + report.MAX_NOTES + 1
    assert lines[-1].startswith(f"and {30 - report.MAX_NOTES} notes more ")


# --- plots that cannot be written


@pytest.mark.one_python  # only .venv has vl-convert
@pytest.mark.parametrize(
    ("plot", "message", "more"),
    [
        ("folder.svg", "Is a directory", ()),
        ("none/plot.svg", "No such file or directory", ("--json",)),
        ("job.csv/plot.svg", "Not a directory", ()),
    ],
)
def test_unwritable_plot_keeps_answer(tmp_path, monkeypatch, plot, message, more):
    monkeypatch.chdir(tmp_path)
    write_file(tmp_path, job_csv({6: (180, 260)}))
    (tmp_path / "folder.svg").mkdir()
    expected = run("job.csv", *more)
    assert expected[0] == 1
    error = f"healthd failslow: --plot {plot}: cannot be written: {message}\n"
    assert run("job.csv", *more, "--plot", plot) == (3, expected[1], error)


@pytest.mark.one_python  # only .venv has vl-convert
@pytest.mark.parametrize(
    ("plot", "message"),
    [
        ("job.svg", "is also an input file"),
        ("./job.svg", "is also an input file"),
        ("hard.svg", "is also an input file"),
        ("pipe.svg", "is not a regular file"),
        ("link.svg", "is a symbolic link; name its target"),
    ],
)
def test_plot_replaces_no_input_pipe_or_link(tmp_path, monkeypatch, plot, message):
    monkeypatch.chdir(tmp_path)
    write_file(tmp_path, job_csv({}), "job.svg")
    os.link("job.svg", "hard.svg")
    os.symlink("elsewhere.svg", "link.svg")
    os.mkfifo("pipe.svg")
    assert run("job.svg", "--plot", plot) == (64, "", f"healthd failslow: --plot {plot}: {message}\n")
    assert (tmp_path / "job.svg").read_text() == job_csv({})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hard.svg", "job.svg", "link.svg", "pipe.svg"]


def test_later_suspect_is_not_counted_as_waiting():
    long, later = Point(100, 109, 0.6, 0.99), Point(200, 209, 0.85, 0.99)
    suspects = tuple(
        Suspect(name, "worker", Cause.COMPUTE_GPU, Confidence.HIGH, (), (name,), point)
        for name, point in (("2", long), ("6", later))
    )
    result = text_of(Diagnosis(((long,),) * 8, suspects), [make_series(str(rank)) for rank in range(8)])
    assert [row[:3] for row in rows_of(result)][1:] == [("6 other workers", "100", "60"), ("worker 6", "200", "85")]


def test_slow_jobs_of_same_reason_join_up_to_number_of_peers():
    names = [("0", "1", "2"), ("3", "4"), ("5", "6", "7")]
    slow = tuple(SlowJob("", 180, POINT, series_names, 5, Cause.UNKNOWN, "half of them") for series_names in names)
    result = text_of(Diagnosis(((),) * 10, (), slow), [make_series(str(at)) for at in range(10)]).splitlines()
    assert [line.split("recovered, ")[1].split(";")[0] for line in result[1:]] == ["5 of 5 workers", "3 of 5 workers"]
