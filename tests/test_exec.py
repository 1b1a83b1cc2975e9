"""exec: any program of the site, by its exit status."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fakes import findings, run_check
from hypothesis import given
from hypothesis import strategies as st

from healthd.checks import exec as exec_check
from healthd.checks.exec import MAX_MESSAGE, Config, _first_line, validate
from healthd.host import Host
from healthd.model import Clears, Observation, Severity

HOST = Host()


def sh(script: str, timeout_seconds: float = 20.0, **settings) -> Config:
    return Config(name="mine", command=("/bin/sh", "-c", script), timeout_seconds=timeout_seconds, **settings)


def gone(pid: int) -> bool:
    """Whether a process has ended, a zombie included."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def ends(pid: int, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return gone(pid)


def test_exit_status_0_is_ok():
    (observation,) = run_check(exec_check, HOST, sh("echo all is well"))
    assert observation == Observation("exec_exit_status", 0, labels=(("name", "mine"),))


def test_exit_status_1_warns_with_the_first_line_as_its_message():
    (finding,) = findings(exec_check, HOST, sh("echo; echo disk is slow; echo more; exit 1"))
    assert (finding.code, finding.subject, finding.message) == ("exec/warning", "mine", "disk is slow")
    assert (finding.severity, finding.clears) == (Severity.WARNING, Clears.PASS)


@pytest.mark.parametrize("severity", [Severity.WARNING, Severity.DEGRADED, Severity.CRITICAL])
def test_exit_status_2_is_what_the_site_says(severity):
    (finding,) = findings(exec_check, HOST, sh("echo broken; exit 2", critical_severity=severity))
    assert (finding.code, finding.severity) == ("exec/critical", severity)


def test_exit_status_2_is_degraded_unless_the_site_says_else():
    (finding,) = findings(exec_check, HOST, sh("exit 2"))
    assert (finding.severity, finding.message) == (Severity.DEGRADED, "exit status 2")


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("echo no sensor; exit 3", "mine says unknown: no sensor"),
        ("echo what; exit 4", "exit status 4 is none of 0, 1, 2, 3: what"),
        ("exit 127", "exit status 127"),
        ("kill -SEGV $$", "was ended by SIGSEGV"),
        ("echo words on stderr >&2; exit 5", "words on stderr"),
    ],
)
def test_anything_else_is_a_failure_and_no_finding(script, error):
    with pytest.raises(RuntimeError, match=error):
        run_check(exec_check, HOST, sh(script))


def test_a_program_that_is_not_there_is_a_failure(tmp_path):
    with pytest.raises(RuntimeError, match=r"there is no program .*nothing-here"):
        run_check(exec_check, HOST, Config(name="mine", command=(str(tmp_path / "nothing-here"),)))


def test_a_program_that_may_not_be_run_is_a_failure(tmp_path):
    (tmp_path / "check").write_text("#!/bin/sh\n")
    with pytest.raises(PermissionError, match="check"):
        run_check(exec_check, HOST, Config(name="mine", command=(str(tmp_path / "check"),)))


def test_a_program_that_is_no_program_is_a_failure(tmp_path):
    (tmp_path / "check").write_bytes(b"\x00\x01\x02")
    (tmp_path / "check").chmod(0o755)
    with pytest.raises(OSError, match="Exec format error"):
        run_check(exec_check, HOST, Config(name="mine", command=(str(tmp_path / "check"),)))


def test_a_program_that_is_too_slow_is_killed_with_all_that_it_started(tmp_path):
    pids = tmp_path / "pids"
    script = f"echo $$ >{pids}; sleep 1000 & echo $! >>{pids}; trap '' TERM; wait; sleep 1000"
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"did not end within 0\.8 s"):
        run_check(exec_check, HOST, sh(script, timeout_seconds=1.0))
    assert time.monotonic() - began < 5.0
    assert all(ends(int(pid)) for pid in pids.read_text().split())


def test_a_child_left_in_the_background_delays_nothing_and_is_ended(tmp_path):
    pid = tmp_path / "pid"
    began = time.monotonic()
    (finding,) = findings(exec_check, HOST, sh(f"sleep 1000 & echo $! >{pid}; echo done; exit 1"))
    assert finding.message == "done"
    assert time.monotonic() - began < 5.0
    assert ends(int(pid.read_text()))


def test_a_program_that_closes_its_output_is_waited_for():
    (finding,) = findings(exec_check, HOST, sh("exec >&- 2>&-; sleep 0.2; exit 1"))
    assert finding.message == "exit status 1"


@given(st.text(max_size=300))
def test_a_message_is_one_printable_line_of_at_most_200_characters(output):
    message = _first_line(output)
    assert len(message) <= MAX_MESSAGE
    assert message.isprintable()


@pytest.mark.parametrize(
    ("command", "words"), [((), "command is missing"), (("check",), "absolute path"), (("/x", "a\0b"), "NUL")]
)
def test_a_command_that_cannot_be_run_is_refused(command, words):
    assert words in (validate(Config(name="mine", command=command)) or "")


def test_a_command_by_its_absolute_path_is_accepted():
    assert validate(sh("exit 0")) is None
