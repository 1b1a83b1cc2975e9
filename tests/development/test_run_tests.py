"""Tests of scripts/run_tests.py: failed tests run again alone, nothing is left behind, and a timeout names its
tests."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import until

TESTS = Path(__file__).parents[1]
RUN_TESTS = TESTS.parent / "scripts" / "run_tests.py"
# Fails in its first process, like a test that cannot run in parallel with others.
FLAKY = """
    from pathlib import Path
    def test_it(): 
        seen = Path({seen!r})
        again = seen.exists()
        seen.touch()
        assert again
"""
WRONG = "def test_wrong(): assert 1 == 2"
RIGHT = "def test_right(): pass"


def project(folder: Path, **files: str) -> Path:
    """Create test files, and the hooks that run_tests.py needs."""
    plugins = 'pytest_plugins = ["alone", "started"]'
    (folder / "conftest.py").write_text(f"import sys\nsys.path.insert(0, {str(TESTS / 'support')!r})\n{plugins}\n")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q\nmarkers = alone\n")
    for name, text in files.items():
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        (folder / f"{name}.py").write_text("".join(f"{line[indent:]}\n" for line in lines))
    return folder


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    argv = [sys.executable, str(RUN_TESTS), *options]
    own = {**os.environ, "TMPDIR": str(folder)}  # so that other runs do not find leftovers of this one
    return subprocess.Popen(argv, cwd=folder, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(folder: Path, *options: str) -> tuple[int, str]:
    """Return the exit status and the output."""
    process = start(folder, *options)
    printed, _ = process.communicate()
    return process.returncode, printed


def lives(pid: str) -> bool:
    """Return True if the process runs. A zombie does not count: PID 1 may be slow to reap."""
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("side_by_side", [("-n", "2"), ()], ids=["side by side", "in one process"])
def test_what_fails_once_and_passes_alone_is_told_as_flaky_and_the_run_has_passed(tmp_path, side_by_side):
    folder = project(tmp_path, test_a=FLAKY.format(seen=str(tmp_path / "seen")), test_b=RIGHT)
    status, printed = run(folder, *side_by_side)
    assert (status, printed.splitlines()[-1]) == (0, "FLAKY test_a.py::test_it")


def test_a_flaky_test_is_red_where_that_is_wanted(tmp_path):
    folder = project(tmp_path, test_a=FLAKY.format(seen=str(tmp_path / "seen")))
    status, printed = run(folder, "--flaky-is-red")
    assert (status, printed.splitlines()[-1]) == (1, "FLAKY test_a.py::test_it")


def test_what_fails_alone_too_is_red(tmp_path):
    folder = project(tmp_path, test_a=FLAKY.format(seen=str(tmp_path / "seen")), test_b=WRONG, test_c=RIGHT)
    status, printed = run(folder, "-n", "2")
    assert status == 1
    assert "FLAKY" not in printed
    assert printed.count("test_wrong: assert 1 == 2") + printed.count("def test_wrong(): assert 1 == 2") >= 2, "twice"


def test_the_second_run_has_only_what_failed(tmp_path):
    once = f"""
    def test_once():
        with open({str(tmp_path / "ran")!r}, "a") as file: file.write("x")
    """
    folder = project(tmp_path, test_a=FLAKY.format(seen=str(tmp_path / "seen")), test_b=once)
    assert run(folder)[0] == 0
    assert (tmp_path / "ran").read_text() == "x"


def test_failures_in_more_files_than_chance_has_are_red_at_once(tmp_path):
    flaky = {f"test_{n}": FLAKY.format(seen=str(tmp_path / f"seen{n}")) for n in range(4)}
    status, printed = run(project(tmp_path, **flaky))
    assert status == 1
    assert "run_tests: tests of 4 files failed: not by chance, they do not run again" in printed


def test_a_run_that_cannot_begin_is_no_failure_of_a_test(tmp_path):
    status, printed = run(project(tmp_path, test_a=RIGHT), "--no-such-option")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "run again" not in printed


ALONE = """
    import os
    from pathlib import Path
    import pytest
    @pytest.mark.alone
    def test_alone():
        with open({ran!r}, "a") as ran: ran.write("alone ")
        assert "PYTEST_XDIST_WORKER" not in os.environ
        assert {passes}
    def test_beside():
        with open({ran!r}, "a") as ran: ran.write("beside ")
"""


@pytest.mark.parametrize("side_by_side", [("-n", "2"), ()], ids=["side by side", "in one process"])
def test_what_bears_nothing_beside_it_runs_once_after_all_others_in_one_process(tmp_path, side_by_side):
    text = ALONE.format(ran=str(tmp_path / "ran"), passes=True)
    status, printed = run(project(tmp_path, test_a=text, test_b=RIGHT), *side_by_side)
    assert status == 0, printed
    assert (tmp_path / "ran").read_text() == "beside alone "


def test_what_fails_with_nothing_beside_it_is_red_at_once(tmp_path):
    text = ALONE.format(ran=str(tmp_path / "ran"), passes=False)
    status, printed = run(project(tmp_path, test_a=text), "-n", "2")
    assert (status, (tmp_path / "ran").read_text()) == (1, "beside alone "), printed
    assert "FLAKY" not in printed


def test_what_failed_beside_others_is_red_although_the_rest_passes_alone(tmp_path):
    text = ALONE.format(ran=str(tmp_path / "ran"), passes=True)
    status, printed = run(project(tmp_path, test_a=text, test_b=WRONG), "-n", "2")
    assert (status, (tmp_path / "ran").read_text()) == (1, "beside alone "), printed


def test_a_run_of_nothing_but_what_runs_alone_has_passed(tmp_path):
    text = ALONE.format(ran=str(tmp_path / "ran"), passes=True)
    status, printed = run(project(tmp_path, test_a=text), "-n", "2", "-k", "test_alone")
    assert (status, (tmp_path / "ran").read_text()) == (0, "alone "), printed


def test_what_a_test_left_running_is_ended_before_the_failed_tests_run_again_and_at_the_end(tmp_path):
    leaves = f"""
    import os, subprocess, time
    from pathlib import Path
    import psutil
    def test_it(tmp_path):
        note = Path({str(tmp_path / "pid")!r})
        if note.exists():
            assert not psutil.pid_exists(int(note.read_text()))
            return
        # an orphan in a session of its own
        subprocess.run(["setsid", "sh", "-c", f"sleep 600 & echo $! >{{note}}.new; mv {{note}}.new {{note}}"])
        assert psutil.pid_exists(int(note.read_text()))
        raise AssertionError("beside others")
    """
    status, printed = run(project(tmp_path, test_a=leaves))
    assert (status, printed.splitlines()[-1]) == (0, "FLAKY test_a.py::test_it"), printed
    assert not lives((tmp_path / "pid").read_text())
    assert list(tmp_path.glob("hdt*")) == []


HANGS = """
    import os, subprocess, time
    from pathlib import Path
    def test_quick(): pass
    def test_hangs():
        child = subprocess.Popen(["sleep", "600"])
        note = Path({note!r})
        note.with_suffix(".new").write_text(f"{{child.pid}} {{os.environ['TMPDIR']}}")
        note.with_suffix(".new").rename(note)
        time.sleep(600)
"""


def test_at_the_end_of_its_time_a_run_names_the_tests_that_were_running_and_leaves_nothing(tmp_path):
    note = tmp_path / "note"
    process = start(project(tmp_path, test_a=HANGS.format(note=str(note))), "-n", "2")
    until(note.exists, "the test hangs")
    pid, folder = note.read_text().split()
    # xdist may report the end of the other test after this one hangs.
    until(lambda: "-test_a.py::test_quick\n" in Path(folder, "running").read_text(), "the other test has ended")
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert "run_tests: ended; running were: test_a.py::test_hangs\n" in printed
    assert (lives(pid), Path(folder).exists()) == (False, False)


def test_what_a_killed_run_left_is_removed_by_the_next_one(tmp_path):
    note = tmp_path / "note"
    process = start(project(tmp_path, test_a=HANGS.format(note=str(note))))
    until(note.exists, "the test hangs")
    assert process.stdout is not None
    process.stdout.close()
    process.kill()
    process.wait()
    pid, folder = note.read_text().split()
    assert (lives(pid), Path(folder).exists()) == (True, True)
    (tmp_path / "test_a.py").write_text(RIGHT)
    status, printed = run(tmp_path)
    assert status == 0, printed
    assert f"run_tests: a run was killed; what it left in {folder} is removed" in printed
    assert (lives(pid), Path(folder).exists()) == (False, False)


def test_the_folders_of_others_are_not_touched(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "lock").touch()
    (tmp_path / "hdt.link").symlink_to(tmp_path / "kept")
    assert run(project(tmp_path, test_a=RIGHT))[0] == 0
    assert (tmp_path / "kept" / "lock").exists()


def test_the_tables_of_tiers_name_files_and_tests_that_exist():
    tables = runpy.run_path(str(TESTS / "conftest.py"))  # by path, because tests/e2e has a conftest too
    wide, core = tables["WIDE"], tables["CORE"]
    assert core.keys() <= wide.keys()
    for file in wide:
        text = (TESTS / file).read_text()
        for test in core.get(file, ()):
            assert f"def {test.partition('[')[0]}(" in text
