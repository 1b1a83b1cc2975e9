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


def create_project(folder: Path, **files: str) -> Path:
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
    environment = {**os.environ, "TMPDIR": str(folder)}  # so that other runs do not find leftovers of this one
    return subprocess.Popen(
        argv, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(folder: Path, *options: str) -> tuple[int, str]:
    """Return the exit status and the output."""
    process = start(folder, *options)
    printed, _ = process.communicate()
    return process.returncode, printed


def is_running(pid: str) -> bool:
    """Return True if the process runs. A zombie does not count: PID 1 may be slow to reap."""
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("side_by_side", [("-n", "2"), ()], ids=["side by side", "in one process"])
def test_flaky_test_passes_and_is_reported(tmp_path, side_by_side):
    folder = create_project(tmp_path, test_a=FLAKY.format(seen=str(tmp_path / "seen")), test_b=RIGHT)
    status, printed = run(folder, *side_by_side)
    assert (status, printed.splitlines()[-1]) == (0, "FLAKY test_a.py::test_it")


def test_flaky_test_fails_with_flaky_is_red(tmp_path):
    folder = create_project(tmp_path, test_a=FLAKY.format(seen=str(tmp_path / "seen")))
    status, printed = run(folder, "--flaky-is-red")
    assert (status, printed.splitlines()[-1]) == (1, "FLAKY test_a.py::test_it")


def test_test_failing_twice_is_red(tmp_path):
    folder = create_project(tmp_path, test_a=FLAKY.format(seen=str(tmp_path / "seen")), test_b=WRONG, test_c=RIGHT)
    status, printed = run(folder, "-n", "2")
    assert status == 1
    assert "FLAKY" not in printed
    assert printed.count("test_wrong: assert 1 == 2") + printed.count("def test_wrong(): assert 1 == 2") >= 2, "twice"


def test_second_run_has_only_failed_tests(tmp_path):
    once_test = f"""
    def test_once():
        with open({str(tmp_path / "ran")!r}, "a") as file: file.write("x")
    """
    folder = create_project(tmp_path, test_a=FLAKY.format(seen=str(tmp_path / "seen")), test_b=once_test)
    assert run(folder)[0] == 0
    assert (tmp_path / "ran").read_text() == "x"


def test_failures_in_four_files_are_red_without_second_run(tmp_path):
    flaky = {f"test_{n}": FLAKY.format(seen=str(tmp_path / f"seen{n}")) for n in range(4)}
    status, printed = run(create_project(tmp_path, **flaky))
    assert status == 1
    assert "run_tests: tests in 4 files failed: too many for chance, so they do not run again" in printed


def test_usage_error_is_not_test_failure(tmp_path):
    status, printed = run(create_project(tmp_path, test_a=RIGHT), "--no-such-option")
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
def test_alone_test_runs_once_after_all_others(tmp_path, side_by_side):
    text = ALONE.format(ran=str(tmp_path / "ran"), passes=True)
    status, printed = run(create_project(tmp_path, test_a=text, test_b=RIGHT), *side_by_side)
    assert status == 0, printed
    assert (tmp_path / "ran").read_text() == "beside alone "


def test_failing_alone_test_is_red_without_second_run(tmp_path):
    text = ALONE.format(ran=str(tmp_path / "ran"), passes=False)
    status, printed = run(create_project(tmp_path, test_a=text), "-n", "2")
    assert (status, (tmp_path / "ran").read_text()) == (1, "beside alone "), printed
    assert "FLAKY" not in printed


def test_failure_beside_others_is_red_if_alone_test_passes(tmp_path):
    text = ALONE.format(ran=str(tmp_path / "ran"), passes=True)
    status, printed = run(create_project(tmp_path, test_a=text, test_b=WRONG), "-n", "2")
    assert (status, (tmp_path / "ran").read_text()) == (1, "beside alone "), printed


def test_run_with_only_alone_tests_passes(tmp_path):
    text = ALONE.format(ran=str(tmp_path / "ran"), passes=True)
    status, printed = run(create_project(tmp_path, test_a=text), "-n", "2", "-k", "test_alone")
    assert (status, (tmp_path / "ran").read_text()) == (0, "alone "), printed


def test_leftover_process_is_ended_before_second_run_and_at_end(tmp_path):
    leaving_test = f"""
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
    status, printed = run(create_project(tmp_path, test_a=leaving_test))
    assert (status, printed.splitlines()[-1]) == (0, "FLAKY test_a.py::test_it"), printed
    assert not is_running((tmp_path / "pid").read_text())
    assert list(tmp_path.glob("hdt*")) == []


HANGING = """
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


def test_terminated_run_names_running_tests_and_leaves_nothing(tmp_path):
    note = tmp_path / "note"
    process = start(create_project(tmp_path, test_a=HANGING.format(note=str(note))), "-n", "2")
    until(note.exists, "the test hangs")
    pid, folder = note.read_text().split()
    # xdist may report the end of the other test after this one hangs.
    until(lambda: "-test_a.py::test_quick\n" in Path(folder, "running").read_text(), "the other test has ended")
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert "run_tests: terminated; running tests: test_a.py::test_hangs\n" in printed
    assert (is_running(pid), Path(folder).exists()) == (False, False)


def test_leftovers_of_killed_run_are_removed_by_next_run(tmp_path):
    note = tmp_path / "note"
    process = start(create_project(tmp_path, test_a=HANGING.format(note=str(note))))
    until(note.exists, "the test hangs")
    assert process.stdout is not None
    process.stdout.close()
    process.kill()
    process.wait()
    pid, folder = note.read_text().split()
    assert (is_running(pid), Path(folder).exists()) == (True, True)
    (tmp_path / "test_a.py").write_text(RIGHT)
    status, printed = run(tmp_path)
    assert status == 0, printed
    assert f"run_tests: an earlier run was killed; removing its processes and {folder}" in printed
    assert (is_running(pid), Path(folder).exists()) == (False, False)


def test_folders_of_others_are_kept(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "lock").touch()
    (tmp_path / "hdt.link").symlink_to(tmp_path / "kept")
    assert run(create_project(tmp_path, test_a=RIGHT))[0] == 0
    assert (tmp_path / "kept" / "lock").exists()


def test_tier_tables_name_existing_files_and_tests():
    tables = runpy.run_path(str(TESTS / "conftest.py"))  # by path, because tests/e2e has a conftest too
    wide, core = tables["WIDE"], tables["CORE"]
    assert core.keys() <= wide.keys()
    for file in wide:
        text = (TESTS / file).read_text()
        for test in core.get(file, ()):
            assert f"def {test.partition('[')[0]}(" in text
