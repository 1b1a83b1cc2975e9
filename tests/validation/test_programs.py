"""run: external programs end by themselves or are killed, and leave no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

from healthd.validation.programs import Command, is_listening, run
from tests.e2e.ports import free_ports


def python(code: str, *arguments: str, port: int = 0) -> Command:
    return Command((sys.executable, "-I", "-c", code, *arguments), port=port)


def has_ended(pid: int) -> bool:
    """A zombie counts as ended, because its parent must reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_run_returns_output_and_status():
    ended = run([python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")], 60)
    assert [
        (program_end.status, program_end.stdout, program_end.stderr, program_end.ending) for program_end in ended
    ] == [(3, "out\n", "err\n", "ended")]


def test_run_starts_programs_in_parallel(tmp_path):
    code = (
        "import os, sys, time\nopen(sys.argv[1], 'w').close()\nwhile not os.path.exists(sys.argv[2]): time.sleep(0.01)"
    )
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert [program_end.status for program_end in run([python(code, a, b), python(code, b, a)], 60)] == [0, 0]


def test_missing_program_is_reported():
    (program_end,) = run([Command(("/nowhere/at/all",))], 60)
    assert (program_end.status, program_end.ending) == (None, "missing")
    assert "/nowhere/at/all: No such file" in program_end.stderr


def test_output_above_one_mebibyte_is_dropped_without_blocking():
    (program_end,) = run([python("import sys; sys.stdout.write('x' * 5_000_000)")], 60)
    assert (program_end.status, len(program_end.stdout)) == (0, 1 << 20)


HANGS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{os.getpid()} {child}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
print("begun", flush=True)
time.sleep(600)
"""


def test_overdue_program_is_killed_with_its_group_and_keeps_output(tmp_path):
    pid_file = tmp_path / "pids"
    (program_end,) = run([python(HANGS, str(pid_file))], 5)
    assert (program_end.ending, program_end.is_hanging, program_end.status) == ("overdue", False, -signal.SIGKILL)
    if pid_file.exists():  # otherwise this machine needed more than 5 s to start it
        assert program_end.stdout == "begun\n"
        for pid in map(int, pid_file.read_text().split()):
            until(lambda pid=pid: has_ended(pid), f"process {pid} is gone")


def test_stop_request_kills_all_programs(tmp_path):
    pid_file = tmp_path / "pids"
    reading, writing = os.pipe()
    stopper = subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-c",
            "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)",
            pid_file,
        ],
        stdout=writing,
    )
    os.close(writing)  # when the stopper ends, `reading` is at its end and becomes readable
    try:
        (program_end,) = run([python(HANGS, str(pid_file))], 300, reading)
    finally:
        stopper.wait(240)
        os.close(reading)
    assert program_end.ending == "stopped"
    for pid in map(int, pid_file.read_text().split()):
        until(lambda pid=pid: has_ended(pid), f"process {pid} is gone")


def test_group_of_an_ended_program_is_killed(tmp_path):
    code = "import os, sys, time\nif os.fork() == 0: time.sleep(600)\nprint(os.getpgid(0))"
    (program_end,) = run([python(code)], 60)
    group = int(program_end.stdout)

    def is_group_empty() -> bool:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                fields = (process / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                return False
        return True

    until(is_group_empty, "the group is empty")


def test_programs_die_with_their_parent(tmp_path):
    """They end even if the parent is killed by SIGKILL."""
    pid_file = tmp_path / "pids"
    code = (
        "import sys\nfrom healthd.validation.programs import Command, run\n"
        "run([Command((sys.executable, '-I', '-c', sys.argv[2], sys.argv[1]))], 600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(pid_file), HANGS])
    try:
        until(pid_file.exists, "the program has started")
    finally:
        parent.kill()
        parent.wait(240)
    first, grandchild = map(int, pid_file.read_text().split())
    until(lambda: has_ended(first), "the program is gone")
    os.kill(grandchild, signal.SIGKILL)  # the grandchild survives: PR_SET_PDEATHSIG is not inherited


def test_client_starts_when_server_listens_and_lone_server_is_ended():
    server = "import socket, sys\ns = socket.create_server(('127.0.0.1', int(sys.argv[1])))\nwhile True: s.accept()"
    client = "import socket, sys\nsocket.create_connection(('127.0.0.1', int(sys.argv[1])), 60)\nprint('met')"
    with contextlib.ExitStack() as stack:
        port = free_ports(1, stack)
        assert not is_listening(port)
        server_end, client_end = run([python(server, str(port)), python(client, str(port), port=port)], 120)
    assert (client_end.stdout, client_end.status, client_end.ending) == ("met\n", 0, "ended")
    assert server_end.status in (-signal.SIGTERM, -signal.SIGKILL)


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_client_without_listening_server_is_not_started(seconds):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # does not listen
        port = bound.getsockname()[1]
        ended = run([python("import time; time.sleep(600)"), python("pass", port=port)], seconds)
    assert ended[1].status is None
    assert ended[1].ending == "overdue"


def test_client_of_an_ended_server_is_not_started():
    ended = run([python("raise SystemExit('the port is taken')"), python("pass", port=1)], 600)
    assert [program_end.ending for program_end in ended] == ["ended", "missing"]
    assert (ended[0].status, ended[0].stderr) == (1, "the port is taken\n")
