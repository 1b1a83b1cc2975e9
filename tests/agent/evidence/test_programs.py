"""Programs of the collector: output, deadline, everything that a program starts, and a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import until

from healthd.agent.evidence.programs import _RECORD_SESSION, Run, end_earlier_session, run_source
from healthd.agent.evidence.sources import Source

SLEEP = "import time; time.sleep(600)"


def run(tmp_path: Path, *argv: str, seconds: float = 60.0, stop: str = "", output: str = "") -> Run:
    source = Source("out.txt", argv, seconds, output)
    return run_source(source, str(tmp_path / "out.txt"), str(tmp_path / "session"), lambda: stop)


def test_output_is_saved(tmp_path: Path) -> None:
    entry = run(tmp_path, "/bin/sh", "-c", "echo hello; echo bad >&2").entry
    assert (entry.status, entry.bytes, entry.problem) == (0, 6, "")
    assert (tmp_path / "out.txt").read_text() == "hello\n"
    assert (tmp_path / "out.txt").stat().st_mode & 0o777 == 0o600


def test_failed_program_is_a_problem_and_keeps_its_output(tmp_path: Path) -> None:
    entry = run(tmp_path, "/bin/sh", "-c", "echo hello; echo bad >&2; exit 3").entry
    assert (entry.status, entry.bytes) == (3, 6)
    assert "bad" in entry.problem


@pytest.mark.parametrize(("is_optional", "is_problem"), [(True, False), (False, True)])
def test_missing_program(tmp_path: Path, is_optional: bool, is_problem: bool) -> None:
    source = Source("out.txt", ("no-such-program",), 1.0, is_optional=is_optional)
    entry = run_source(source, str(tmp_path / "out.txt"), str(tmp_path / "session"), lambda: "").entry
    assert (entry.missing, entry.status, bool(entry.problem)) == (True, None, is_problem)


def test_program_that_writes_its_own_file(tmp_path: Path) -> None:
    entry = run(tmp_path, "/bin/sh", "-c", f"echo 12345 > {tmp_path}/own; echo noise", output=f"{tmp_path}/own").entry
    assert entry.bytes == 6
    assert not (tmp_path / "out.txt").exists()


IN_COLLECTOR = """
import sys
from healthd.agent.evidence.programs import become_subreaper, run_source
from healthd.agent.evidence.sources import Source
become_subreaper()
folder, seconds, stop = sys.argv[1], float(sys.argv[2]), sys.argv[3]
run = run_source(Source("o", tuple(sys.argv[4:]), seconds), folder + "/o", folder + "/session", lambda: stop)
print(run.entry.status, run.stopped, len(run.stuck), run.entry.problem != "")
"""


def start_collector(tmp_path: Path, seconds: float, stop: str, *argv: str) -> subprocess.Popen[str]:
    """Run a program in a separate collector process, because the subreaper kills all descendants."""
    command = [sys.executable, "-c", IN_COLLECTOR, str(tmp_path), str(seconds), stop, *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def shell_with_escaped_children(tmp_path: Path) -> tuple[str, ...]:
    """Return a program whose children leave its process group and session, as a daemon does."""
    start = f"({sys.executable} -c '{SLEEP}' & echo $! >>{tmp_path}/pids)"
    detached = f"setsid sh -c '{sys.executable} -c \"{SLEEP}\" & echo $! >>{tmp_path}/pids; wait' &"
    return ("/bin/sh", "-c", f"{start}\n{detached}\nwait; sleep 600")


def pids(tmp_path: Path) -> list[int]:
    path = tmp_path / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def test_deadline_ends_everything_that_a_program_started(tmp_path: Path) -> None:
    collector = start_collector(tmp_path, 3.0, "", *shell_with_escaped_children(tmp_path))
    output, _ = collector.communicate(timeout=120)
    assert output.split() == ["None", "0", "True"]
    assert len(pids(tmp_path)) == 2
    assert [pid for pid in pids(tmp_path) if is_running(pid)] == []


def test_stop_ends_program_at_once(tmp_path: Path) -> None:
    collector = start_collector(tmp_path, 600.0, "job", "/bin/sleep", "600")
    output, _ = collector.communicate(timeout=120)
    assert output.split() == ["None", "job", "0", "True"]


def test_background_child_does_not_delay_the_end(tmp_path: Path) -> None:
    collector = start_collector(tmp_path, 600.0, "", "/bin/sh", "-c", "sleep 600 & exit 0")
    output, _ = collector.communicate(timeout=120)
    assert output.split() == ["0", "0", "False"]


def test_next_collector_ends_programs_of_a_killed_one(tmp_path: Path) -> None:
    collector = start_collector(tmp_path, 600.0, "", "/bin/sh", "-c", f"echo $$ >>{tmp_path}/pids; sleep 600; true")
    until(lambda: pids(tmp_path))
    collector.kill()
    collector.communicate(timeout=60)
    (pid,) = pids(tmp_path)
    assert is_running(pid)
    assert end_earlier_session(str(tmp_path / "session")) == ()
    until(lambda: not is_running(pid))


def test_later_process_with_the_recorded_session_is_not_killed(tmp_path: Path) -> None:
    with subprocess.Popen(["/bin/sleep", "600"], start_new_session=True) as innocent:
        (tmp_path / "session").write_text(f"{innocent.pid}\n")
        assert end_earlier_session(str(tmp_path / "session")) == ()
        assert innocent.poll() is None
        innocent.kill()


@pytest.mark.parametrize("content", [None, "", "x\n", "0\n"])
def test_end_earlier_session_without_session(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "session").write_text(content)
    assert end_earlier_session(str(tmp_path / "session")) == ()


def test_full_disk_raises_and_ends_program() -> None:
    script = "import os, sys; os.write(1, b'x' * 100000); __import__('time').sleep(600)"
    source = Source("o", (sys.executable, "-c", script), 600.0)
    started = time.monotonic()
    with pytest.raises(OSError, match="space"):
        run_source(source, "/dev/full", os.devnull, lambda: "")
    assert time.monotonic() - started < 300.0


@pytest.mark.parametrize("is_killed", [False, True])
def test_program_does_not_start_after_a_kill_of_its_collector(tmp_path: Path, is_killed: bool) -> None:
    """Otherwise nothing would be recorded yet when the next collector looks for what is left."""
    parent = 1 if is_killed else os.getpid()
    argv = (_RECORD_SESSION, str(tmp_path / "session"), str(parent), "touch", str(tmp_path / "started"))
    status = subprocess.run(("/bin/sh", "-c", *argv)).returncode
    assert (status != 0, (tmp_path / "started").exists()) == (is_killed, not is_killed)
    assert (tmp_path / "session").read_text().strip().isdecimal()
