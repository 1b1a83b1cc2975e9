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


def is_gone(pid: int) -> bool:
    """A zombie counts as ended, because its parent must reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_what_it_said_and_its_status_are_told():
    ended = run([python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")], 60)
    assert [(one.status, one.stdout, one.stderr, one.ending) for one in ended] == [(3, "out\n", "err\n", "ended")]


def test_programs_run_side_by_side(tmp_path):
    code = (
        "import os, sys, time\nopen(sys.argv[1], 'w').close()\nwhile not os.path.exists(sys.argv[2]): time.sleep(0.01)"
    )
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert [one.status for one in run([python(code, a, b), python(code, b, a)], 60)] == [0, 0]


def test_a_program_that_is_missing_is_told():
    (one,) = run([Command(("/nowhere/at/all",))], 60)
    assert (one.status, one.ending) == (None, "missing")
    assert "/nowhere/at/all: No such file" in one.stderr


def test_more_than_a_mebibyte_is_dropped_and_holds_nothing_up():
    (one,) = run([python("import sys; sys.stdout.write('x' * 5_000_000)")], 60)
    assert (one.status, len(one.stdout)) == (0, 1 << 20)


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


def test_what_is_overdue_ends_with_its_whole_group_and_what_it_said_is_kept(tmp_path):
    told = tmp_path / "pids"
    (one,) = run([python(HANGS, str(told))], 5)
    assert (one.ending, one.is_hanging, one.status) == ("overdue", False, -signal.SIGKILL)
    if told.exists():  # otherwise this machine needed more than 5 s to start it
        assert one.stdout == "begun\n"
        for pid in map(int, told.read_text().split()):
            until(lambda pid=pid: is_gone(pid), f"process {pid} is gone")


def test_when_we_are_told_to_end_all_end(tmp_path):
    told = tmp_path / "pids"
    reading, writing = os.pipe()
    teller = subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-c",
            "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)",
            told,
        ],
        stdout=writing,
    )
    os.close(writing)  # when the stopper ends, `reading` is at its end and becomes readable
    try:
        (one,) = run([python(HANGS, str(told))], 300, reading)
    finally:
        teller.wait(240)
        os.close(reading)
    assert one.ending == "stopped"
    for pid in map(int, told.read_text().split()):
        until(lambda pid=pid: is_gone(pid), f"process {pid} is gone")


def test_nobody_is_left_behind_in_the_group_of_one_that_ended(tmp_path):
    code = "import os, sys, time\nif os.fork() == 0: time.sleep(600)\nprint(os.getpgid(0))"
    (one,) = run([python(code)], 60)
    group = int(one.stdout)

    def nobody() -> bool:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(words[2]) == group and words[0] != "Z":
                return False
        return True

    until(nobody, "the group is empty")


def test_they_die_with_us(tmp_path):
    """They end even if the parent is killed by SIGKILL."""
    told = tmp_path / "pids"
    code = (
        "import sys\nfrom healthd.validation.programs import Command, run\n"
        "run([Command((sys.executable, '-I', '-c', sys.argv[2], sys.argv[1]))], 600)"
    )
    ours = subprocess.Popen([sys.executable, "-c", code, str(told), HANGS])
    try:
        until(told.exists, "the program has started")
    finally:
        ours.kill()
        ours.wait(240)
    first, other = map(int, told.read_text().split())
    until(lambda: is_gone(first), "the program is gone")
    os.kill(other, signal.SIGKILL)  # the grandchild survives: PR_SET_PDEATHSIG is not inherited


def test_a_client_starts_when_its_server_listens_and_a_server_without_client_ends():
    server = "import socket, sys\ns = socket.create_server(('127.0.0.1', int(sys.argv[1])))\nwhile True: s.accept()"
    client = "import socket, sys\nsocket.create_connection(('127.0.0.1', int(sys.argv[1])), 60)\nprint('met')"
    with contextlib.ExitStack() as held:
        port = free_ports(1, held)
        assert not is_listening(port)
        of_server, of_client = run([python(server, str(port)), python(client, str(port), port=port)], 120)
    assert (of_client.stdout, of_client.status, of_client.ending) == ("met\n", 0, "ended")
    assert of_server.status in (-signal.SIGTERM, -signal.SIGKILL)


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_a_client_whose_server_never_listens_is_never_started(seconds):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # does not listen
        port = bound.getsockname()[1]
        ended = run([python("import time; time.sleep(600)"), python("pass", port=port)], seconds)
    assert ended[1].status is None
    assert ended[1].ending == "overdue"


def test_a_client_whose_server_has_ended_is_not_waited_for():
    ended = run([python("raise SystemExit('the port is taken')"), python("pass", port=1)], 600)
    assert [one.ending for one in ended] == ["ended", "missing"]
    assert (ended[0].status, ended[0].stderr) == (1, "the port is taken\n")
