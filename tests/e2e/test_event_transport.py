"""Tests of the transport from a node to the centre with the real rsyslogd and rsync and the shipped files for them.

Every event arrives, whatever is rotated, stopped, killed or down meanwhile; the reader drops duplicates.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from event_lines import NOON, line
from ports import free_ports
from requirements import require_programs, require_root
from waiting import until

from healthd.events import writer as stream_file
from healthd.events.reader import Cursor, Tally, find, read

TRANSPORT = Path(__file__).resolve().parents[2] / "packaging/transport"
SECONDS = 240.0


class NodeStream:
    """The stream of a node as its worker writes it. Tests rotate it early."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seq = 0

    def write(self, count: int) -> None:
        numbers = range(self.seq + 1, self.seq + count + 1)
        lines = [line(n, "opened", at=NOON + n, message="x" * 300, node="gpu-1").decode() for n in numbers]
        for first in range(0, count, 100):
            stream_file.append(str(self.folder), lines[first : first + 100], may_repeat=False)
        self.seq += count

    def rotate(self) -> None:
        folder = os.open(self.folder, os.O_RDONLY)
        stream_file._rotate(folder)
        os.close(folder)


def count_arrived(centre: Path) -> tuple[int, Tally, Cursor]:
    tally, cursor = Tally(), Cursor()
    count = sum(1 for stream in find([str(centre)], tally) for _ in read(stream, cursor, tally))
    return count, tally, cursor


def wait_for_all(written: NodeStream, centre: Path) -> Tally:
    """Wait until every event is at the centre, readable and without a gap. Return the reader's tally."""
    end = time.monotonic() + SECONDS
    while count_arrived(centre)[0] < written.seq and time.monotonic() < end:
        time.sleep(0.1)
    count, tally, cursor = count_arrived(centre)
    assert (count, list(cursor.sequences.gaps())) == (written.seq, [])
    assert (tally.unread, tally.unfinished, tally.problems) == (0, 0, {})
    return tally


def files_below(centre: Path) -> dict[str, bytes]:
    contents = {}
    for path in centre.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # rsync replaces a temporary file
            if path.is_file():
                contents[str(path.relative_to(centre))] = path.read_bytes()
    return contents


class Site:
    """The shipped files, with the paths, the port and the centre of this test."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.port = port
        self.node, self.centre, self.spool = folder / "healthd", folder / "srv", folder / "spool"
        for new_dir in (self.node, self.centre, self.spool, folder / "work"):
            new_dir.mkdir()
        self.node.chmod(0o700)

    def shipped_text(self, name: str) -> str:
        text = (TRANSPORT / name).read_text()
        for shipped, here in {
            "/var/lib/healthd": str(self.node),
            "/srv/events": str(self.centre),
            "/var/spool/rsyslog/healthd": str(self.spool),
            "/etc/rsyncd.healthd-events.secrets": str(self.folder / "secrets"),
            "/etc/healthd-events.secret": str(self.folder / "secret"),
            "uid = healthd-events": "uid = daemon",
            "gid = healthd-events": "gid = daemon",
            "CENTRE": "127.0.0.1",
            "2514": str(self.port),
        }.items():
            text = text.replace(shipped, here)
        return text


# --- rsyslog


class Rsyslogd:
    """An rsyslogd with only a shipped file. The commands of its drop-in run before and after it, as systemd runs
    them."""

    def __init__(self, place: Site, name: str, drop_in: str = "") -> None:
        self.folder = place.folder
        self.name = name
        self.config = self.folder / f"{name}.conf"
        global_lines = f'global(workDirectory="{self.folder}/work" localHostname="gpu-1")\n'
        text = place.shipped_text(f"rsyslog-{name}.conf").replace('resumeInterval="10"', 'resumeInterval="1"')
        self.config.write_text(global_lines + text)
        unit = place.shipped_text(drop_in) if drop_in else ""
        self.before = re.findall(r"(?m)^ExecStartPre=(.*)", unit)
        self.after = re.findall(r"(?m)^ExecStopPost=(.*)", unit)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._run(self.before)
        argv = ["rsyslogd", "-n", "-f", str(self.config), "-i", str(self.folder / f"{self.name}.pid")]
        with open(self.folder / f"{self.name}.log", "ab") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log)

    def end(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        status = self.process.wait(SECONDS)
        self._run(self.after, EXIT_STATUS=str(status) if status >= 0 else "KILL")

    def stop(self) -> None:
        self.end(signal.SIGTERM)

    def kill(self) -> None:
        self.end(signal.SIGKILL)

    def _run(self, commands: list[str], **environment: str) -> None:
        for command in commands:
            subprocess.run(shlex.split(command), check=True, timeout=SECONDS, env={**os.environ, **environment})


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Site]:
    require_root()
    with contextlib.ExitStack() as reservations:
        yield Site(tmp_path, free_ports(1, reservations))


@pytest.fixture
def rsyslog(place: Site) -> Iterator[tuple[Rsyslogd, Rsyslogd]]:
    """Run an rsyslogd on the node and one at the centre."""
    require_programs("rsyslogd", packages="rsyslog rsyslog-relp")
    pair = Rsyslogd(place, "node", "rsyslog-unclean.conf"), Rsyslogd(place, "centre")
    try:
        for instance in reversed(pair):
            instance.start()
        yield pair
    finally:
        for instance in pair:
            if instance.process is not None and instance.process.poll() is None:
                instance.process.kill()
                instance.process.wait()
            log = (instance.folder / f"{instance.name}.log").read_text(errors="replace")
            print(f"{instance.name}: {log[-3000:]}")


def test_rsyslog_accepts_shipped_files(place: Site) -> None:
    require_programs("rsyslogd", packages="rsyslog rsyslog-relp")
    for name in ("node", "centre"):
        argv = ["rsyslogd", "-N1", "-f", str(Rsyslogd(place, name).config)]
        result = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS)
        messages = [row for row in result.stderr.splitlines() if "version" not in row and "End of config" not in row]
        assert (result.returncode, messages) == (0, []), result.stderr


def test_rsyslog_transfers_each_line_unchanged_through_rotations(
    place: Site, rsyslog: tuple[Rsyslogd, Rsyslogd]
) -> None:
    written = NodeStream(place.node)
    longest = line(1, "opened", message="x" * ((16 << 10) - len(line(1, "opened", message="")) - 1), node="gpu-1")
    stream_file.append(str(place.node), [longest.decode()], may_repeat=False)
    written.seq = 1
    written.write(300)
    wait_for_all(written, place.centre)
    assert (place.centre / "gpu-1/events.jsonl").read_bytes() == (place.node / "events.jsonl").read_bytes()
    for _ in range(5):
        written.write(200)
        written.rotate()
        written.write(200)
        wait_for_all(written, place.centre)


def test_rsyslog_loses_nothing_when_stopped_and_killed(place: Site, rsyslog: tuple[Rsyslogd, Rsyslogd]) -> None:
    node, _ = rsyslog
    written = NodeStream(place.node)
    for number in range(8):
        written.write(1000)
        time.sleep(0.03 * number)
        (node.kill if number % 2 else node.stop)()
        written.write(50)
        if number in (2, 5):
            written.rotate()
            written.write(50)
        node.start()
    wait_for_all(written, place.centre)


def test_rsyslog_loses_nothing_while_centre_is_stopped_or_killed(
    place: Site, rsyslog: tuple[Rsyslogd, Rsyslogd]
) -> None:
    node, centre = rsyslog
    written = NodeStream(place.node)
    written.write(100)
    wait_for_all(written, place.centre)
    for end in (centre.stop, centre.kill):
        end()
        written.write(1500)
        written.rotate()
        written.write(500)
        centre.start()
        wait_for_all(written, place.centre)
    centre.kill()  # the node's rsyslogd stops too, with lines in transit
    written.write(1500)
    time.sleep(0.3)
    node.stop()
    written.write(50)
    node.start()
    centre.start()
    wait_for_all(written, place.centre)
    for number in range(4):
        written.write(1000)
        time.sleep(0.03 * number)
        centre.kill()
        centre.start()
    wait_for_all(written, place.centre)


def test_rsyslog_clean_stop_sends_no_duplicates(place: Site, rsyslog: tuple[Rsyslogd, Rsyslogd]) -> None:
    node, _ = rsyslog
    written = NodeStream(place.node)
    written.write(500)
    wait_for_all(written, place.centre)
    node.stop()
    written.write(50)
    node.start()
    assert wait_for_all(written, place.centre).repeats == 0


def test_files_of_centre_are_readable_after_logrotate(place: Site, rsyslog: tuple[Rsyslogd, Rsyslogd]) -> None:
    require_programs("logrotate", packages="logrotate")
    _, centre = rsyslog
    assert centre.process is not None
    written = NodeStream(place.node)
    config = place.folder / "logrotate.conf"
    hup = f"kill -HUP {centre.process.pid}"
    text = place.shipped_text("logrotate-centre").replace("/usr/lib/rsyslog/rsyslog-rotate", hup)
    text = text.replace("dateext\n", "dateext\n    dateformat -%s\n")  # allows several rotations per day
    config.write_text(text)
    for _ in range(3):
        written.write(300)
        wait_for_all(written, place.centre)
        argv = ["logrotate", "--force", "--state", str(place.folder / "logrotate.state"), str(config)]
        subprocess.run(argv, check=True, timeout=SECONDS)
        time.sleep(1.1)  # the name of a rotated file has a resolution of 1 s
    written.write(300)
    wait_for_all(written, place.centre)
    names = [path.name for path in (place.centre / "gpu-1").iterdir()]
    assert sum(name.endswith(".gz") for name in names) >= 1, names


def send_relp(port: int, *messages: str) -> list[str]:
    """Return imrelp's answers to a peer without identity.

    https://github.com/rsyslog/librelp, doc/relp.html: a frame is TXNR COMMAND LENGTH [DATA] and a newline.
    """
    offers = "relp_version=0\nrelp_software=test\ncommands=syslog"
    frames = [("open", offers), *(("syslog", message) for message in messages)]
    answers: list[str] = []
    with socket.create_connection(("127.0.0.1", port), SECONDS) as peer:
        for number, (command, data) in enumerate(frames, 1):
            peer.sendall(f"{number} {command} {len(data)} {data}\n".encode())
            answers.append(peer.recv(4096).decode())
    return answers


def test_forged_relp_line_changes_no_other_line_and_stays_in_folder(
    place: Site, rsyslog: tuple[Rsyslogd, Rsyslogd]
) -> None:
    written = NodeStream(place.node)
    written.write(20)
    wait_for_all(written, place.centre)
    before = files_below(place.centre)["gpu-1/events.jsonl"]
    forged = line(1, "stopped", node="gpu-1", why="forged").decode()
    names = ("../../escaped", "/etc/escaped", "gpu-1")
    answers = send_relp(place.port, *(f"<13>1 2025-11-22T12:00:00Z {name} t - - - {forged}" for name in names))
    assert [answer.split()[3] for answer in answers] == ["200"] * 4, answers
    own_file = place.centre / "gpu-1/events.jsonl"
    until(lambda: forged.encode() in own_file.read_bytes(), "the last line is written, and so are those before it")
    after = files_below(place.folder)
    assert after["srv/gpu-1/events.jsonl"].startswith(before)
    assert {name for name, content in after.items() if forged.encode() in content} <= {
        name for name in after if name.startswith("srv/")
    }
    assert not Path("/etc/escaped").exists()
    assert not (place.folder.parent / "escaped").exists()


# --- rsync


SECRET = "as printed by openssl rand -hex 32"


class Rsyncd:
    """The shipped rsync daemon, with a user of this machine as the owner of the files."""

    def __init__(self, place: Site) -> None:
        self.owner = pwd.getpwnam("daemon")
        os.chown(place.centre, self.owner.pw_uid, self.owner.pw_gid)
        for name, content in (("secrets", f"healthd:{SECRET}\n"), ("secret", f"{SECRET}\n")):
            file = place.folder / name
            file.touch(0o600)
            file.write_text(content)
        self.config = place.folder / "rsyncd.conf"
        port_lines = f"port = {place.port}\naddress = 127.0.0.1\npid file = {place.folder}/rsyncd.pid\n"
        self.config.write_text(port_lines + place.shipped_text("rsyncd.conf"))
        self.port, self.pid_file = place.port, place.folder / "rsyncd.pid"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = ["rsync", "--daemon", "--no-detach", f"--config={self.config}"]
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        until(self.listens, "rsync listens")

    def listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), SECONDS).close()
        except ConnectionRefusedError:
            return False
        return True

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.pid_file.unlink(missing_ok=True)


@pytest.fixture
def rsyncd(place: Site) -> Iterator[Rsyncd]:
    require_programs("rsync", packages="rsync")
    daemon = Rsyncd(place)
    daemon.start()
    yield daemon
    if daemon.process is not None and daemon.process.poll() is None:
        daemon.kill()


def rsync_command(place: Site) -> list[str]:
    """Return the command of the shipped unit."""
    (command,) = re.findall(r"(?m)^ExecStart=(.*)", place.shipped_text("healthd-events-rsync.service"))
    return shlex.split(command.replace("%l", "gpu-1").replace("@127.0.0.1/", f"@127.0.0.1:{place.port}/"))


def test_rsync_transfers_every_event_through_rotations_and_kills(place: Site, rsyncd: Rsyncd) -> None:
    written = NodeStream(place.node)
    (place.node / "ledger.json").write_text("no part of the stream")
    for number in range(12):
        written.write(700)
        if number % 4 == 3:
            written.rotate()
            written.write(50)
        process = subprocess.Popen(rsync_command(place), stderr=subprocess.DEVNULL)
        if number % 3 == 1:  # killed during the transfer
            time.sleep(0.01 * number)
            process.kill()
        if number % 3 == 2:
            written.write(100)
        process.wait(SECONDS)
        if number == 6:
            rsyncd.kill()
            assert subprocess.run(rsync_command(place), stderr=subprocess.DEVNULL, timeout=SECONDS).returncode != 0
            rsyncd.start()
        assert count_arrived(place.centre)[1].problems.keys() <= {f"{place.centre}: contains no events.jsonl"}
    subprocess.run(rsync_command(place), check=True, timeout=SECONDS)
    wait_for_all(written, place.centre)
    names = {path.name for path in (place.centre / "gpu-1").iterdir()}
    assert {name for name in names if not name.startswith(".")} == {path.name for path in place.node.glob("events.*")}


NOBODY = 65534


@pytest.fixture
def user_folder() -> Iterator[Path]:
    """Create the folder of a user: a setuid program, a link, and an empty folder."""
    with tempfile.TemporaryDirectory(prefix="healthd.") as name:
        folder = Path(name)
        for new_dir in (folder, folder / "x", folder / "empty"):
            new_dir.mkdir(exist_ok=True)
            new_dir.chmod(0o777)
            os.chown(new_dir, NOBODY, NOBODY)
        shutil.copy("/bin/true", folder / "x/sh")
        os.chown(folder / "x/sh", NOBODY, NOBODY)
        (folder / "x/sh").chmod(0o4755)
        (folder / "x/events.jsonl").symlink_to("/etc/passwd")
        yield folder


def send_as_user(place: Site, theirs: Path, secret: str, *arguments: str) -> int:
    """Run rsync as another user of a node against the centre's port. Return its exit status."""
    argv = ["rsync", *arguments, f"rsync://healthd@127.0.0.1:{place.port}/events/"]
    environment = {**os.environ, "RSYNC_PASSWORD": secret}
    result = subprocess.run(
        argv, user=NOBODY, group=NOBODY, extra_groups=[], cwd=theirs, env=environment, timeout=SECONDS,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return result.returncode


RSYNC_ARGUMENTS = (
    ["-rp", "x"],
    ["-r", "x"],
    ["-a", "x"],
    ["-r", "--delete", "empty/"],
    ["-r", "--remove-source-files", "x"],
)


@pytest.mark.parametrize("arguments", RSYNC_ARGUMENTS, ids=" ".join)
def test_rsync_user_without_secret_changes_nothing(
    place: Site, rsyncd: Rsyncd, user_folder: Path, arguments: list[str]
) -> None:
    NodeStream(place.node).write(10)
    subprocess.run(rsync_command(place), check=True, timeout=SECONDS)
    before = files_below(place.centre)
    assert list(before) == ["gpu-1/events.jsonl"]
    assert send_as_user(place, user_folder, "guessed", *arguments) != 0
    assert files_below(place.centre) == before


@pytest.mark.parametrize(
    "option", ["-rl", "-rp", "-ro", "-rg", "-rD", "-rH", "-rA", "-rX", "--delete", "--delete-after"]
)
def test_rsync_user_with_secret_deletes_nothing_and_sends_plain_files_only(
    place: Site, rsyncd: Rsyncd, user_folder: Path, option: str
) -> None:
    NodeStream(place.node).write(10)
    subprocess.run(rsync_command(place), check=True, timeout=SECONDS)
    before = files_below(place.centre)
    assert send_as_user(place, user_folder, SECRET, "-r", option, "x", "empty/") != 0
    assert files_below(place.centre) == before


def test_files_from_rsync_belong_to_its_user_without_setuid(place: Site, rsyncd: Rsyncd, user_folder: Path) -> None:
    assert send_as_user(place, user_folder, SECRET, "-r", "--exclude=events.jsonl", "x") == 0
    created = {path.name: path.lstat() for path in place.centre.rglob("*")}
    assert {
        name: (stat.filemode(status.st_mode), status.st_uid, status.st_gid) for name, status in created.items()
    } == {
        "x": ("drwxr-xr-x", rsyncd.owner.pw_uid, rsyncd.owner.pw_gid),
        "sh": ("-rw-r-----", rsyncd.owner.pw_uid, rsyncd.owner.pw_gid),
    }


def test_fetch_only_ssh_key_reads_stream_and_nothing_else(place: Site) -> None:
    """sshd runs the command of the key, with the requested command in SSH_ORIGINAL_COMMAND."""
    require_programs("rsync", "rrsync", packages="rsync")
    NodeStream(place.node).write(10)
    ssh = place.folder / "ssh"
    ssh.write_text(f'#!/bin/sh\nshift\nSSH_ORIGINAL_COMMAND="$*" exec /usr/bin/rrsync -ro {place.node}\n')
    ssh.chmod(0o755)

    def rsync_over(*arguments: object) -> int:
        argv = ["rsync", "-rt", "-e", str(ssh), *map(str, arguments)]
        return subprocess.run(argv, timeout=SECONDS, stderr=subprocess.DEVNULL).returncode

    stream_only = ("--include=/events.jsonl", "--include=/events.jsonl.[0-9]", "--exclude=*")
    assert rsync_over("--chmod=D755,F640", *stream_only, "NODE:/", f"{place.centre}/gpu-1/") == 0
    assert count_arrived(place.centre)[0] == 10
    assert rsync_over(place.folder / "ssh", "NODE:/") != 0
    assert rsync_over("NODE:/../ssh", f"{place.centre}/") != 0
    assert [path.name for path in place.node.iterdir()] == ["events.jsonl"]


def test_systemd_accepts_shipped_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze not found")
    for name in ("healthd-events-rsync.service", "healthd-events-rsync.timer"):
        text = (TRANSPORT / name).read_text().replace("/usr/bin/rsync", "/bin/true")
        (tmp_path / name).write_text(text)
    argv = ["systemd-analyze", "verify", "--man=no", *map(str, tmp_path.iterdir())]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS)
    assert (result.returncode, [row for row in result.stderr.splitlines() if "healthd" in row]) == (0, []), (
        result.stderr
    )
