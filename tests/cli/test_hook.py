"""Tests of the Slurm hooks: bounded in time, and they never fail a node. The prolog refuses jobs only for a drain."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from other_user import NOBODY, only_root, run_as_user
from waiting import until

from healthd.agent.slurm.prolog_files import refusal_times
from healthd.cli import hook

PENDING = b'{"requested_at": 5, "pending": ["gpu_ecc"]}'
NONE_PENDING = b'{"requested_at": 5, "pending": []}'
PENDING_RUNS = b'{"command": "pending-runs", "requested_at": 5}\n'
ROOT = Path(__file__).parents[2]
PROLOG, EPILOG = ROOT / "packaging/slurm/prolog", ROOT / "packaging/slurm/epilog"
SHELLS = [shell for shell in ("/bin/dash", "/bin/bash", "/bin/busybox") if os.path.exists(shell)]
DRAIN = "drain {} gpu_xid/79 0000:61:00.0: Xid 79: GPU has fallen off the bus, *, $(reboot) `x`\n"


def run_script(
    tmp_path: Path, script: Path, settings: Sequence[str] = (), shell: str = "/bin/sh", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a script as slurmd does, with only the environment of slurmd."""
    default = tmp_path / "default"
    default.write_text("\n".join((f"HEALTHD_RUNTIME_DIR={tmp_path}", *settings)) + "\n")
    copy = tmp_path / script.name
    copy.write_text(script.read_text().replace("/etc/default/healthd", str(default)))
    argv = [shell, *(["sh"] if shell.endswith("busybox") else []), str(copy)]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL)


def write_verdict(tmp_path: Path, line: str, seconds: float = 300) -> None:
    (tmp_path / "verdict").write_text(line.format(int(time.time() + seconds)))


# --- prolog


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("line", "seconds", "allowed", "denied"),
    [
        ("ok {} healthy\n", 300, 0, 0),
        ("warning {} disk_space/low /: 5 %\n", 300, 0, 0),
        ("unknown {} gpu_ecc has not run yet\n", 300, 0, 0),
        (DRAIN, 300, 1, 1),
        (DRAIN, -1, 0, 1),
        ("ok {} healthy\n", -1, 0, 1),
        ("", 0, 0, 1),
        ("drain\n", 0, 0, 1),
        ("drain soon because\n", 0, 0, 1),
        ("drain -5 x\n", 0, 0, 1),
        ("drained {} x\n", 300, 0, 0),
    ],
)
def test_prolog_refuses_only_for_current_drain(
    tmp_path: Path, shell: str, line: str, seconds: float, allowed: int, denied: int
) -> None:
    write_verdict(tmp_path, line, seconds)
    assert run_script(tmp_path, PROLOG, shell=shell).returncode == allowed
    assert run_script(tmp_path, PROLOG, ["HEALTHD_ON_STALE=deny"], shell=shell).returncode == denied


@pytest.mark.parametrize("shell", SHELLS)
def test_prolog_records_refusal_only_for_current_drain(tmp_path: Path, shell: str) -> None:
    note = tmp_path / "refused"
    for line, seconds in (("ok {} healthy\n", 300.0), (DRAIN, -1.0)):
        write_verdict(tmp_path, line, seconds)
        run_script(tmp_path, PROLOG, ["HEALTHD_ON_STALE=deny"], shell=shell)
        assert not note.exists()
    write_verdict(tmp_path, DRAIN, 300)
    assert run_script(tmp_path, PROLOG, shell=shell).returncode == 1
    assert note.read_text().split()[1:] == ["0"]
    note.unlink()
    note.mkdir()  # it cannot be written
    result = run_script(tmp_path, PROLOG, shell=shell)
    assert result.returncode == 1
    assert "accepts no jobs" in result.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_prolog_record_has_time_and_job_and_is_bounded(tmp_path: Path, shell: str) -> None:
    note = tmp_path / "refused"
    write_verdict(tmp_path, DRAIN, 300)
    before = int(time.time())
    for job in ("7", "8"):
        assert run_script(tmp_path, PROLOG, shell=shell, SLURM_JOB_ID=job).returncode == 1
    rows = [line.split() for line in note.read_text().splitlines()]
    assert [job for _, job in rows] == ["7", "8"]
    assert all(before <= int(time_text) <= time.time() for time_text, _ in rows)
    assert refusal_times(str(tmp_path))[:2] == tuple(float(time_text) for time_text, _ in rows)
    note.write_text("".join(f"{number} {number}\n" for number in range(1, 48)))
    run_script(tmp_path, PROLOG, shell=shell, SLURM_JOB_ID="48")
    assert len(note.read_text().splitlines()) == 48
    run_script(tmp_path, PROLOG, shell=shell, SLURM_JOB_ID="49")
    jobs = [line.split()[1] for line in note.read_text().splitlines()]
    assert jobs == [str(number) for number in range(25, 50)], "the newest lines are kept"


def test_prolog_record_never_follows_link_or_pipe(tmp_path: Path) -> None:
    write_verdict(tmp_path, DRAIN, 300)
    (tmp_path / "theirs").write_text("kept")
    for target in ("theirs", "nothing"):
        (tmp_path / "refused").symlink_to(tmp_path / target)
        assert run_script(tmp_path, PROLOG).returncode == 1
        (tmp_path / "refused").unlink()
    assert (tmp_path / "theirs").read_text() == "kept"
    assert not (tmp_path / "nothing").exists()
    os.mkfifo(tmp_path / "refused")
    assert run_script(tmp_path, PROLOG).returncode == 1
    assert refusal_times(str(tmp_path)) == ()


def test_refusal_times_ignores_invalid_lines(tmp_path: Path) -> None:
    note = tmp_path / "refused"
    assert refusal_times(str(tmp_path)) == ()
    note.touch()
    assert refusal_times(str(tmp_path)) == ()
    note.write_bytes(b"\xff 1\n\xb2 1\n-5 1\n1e9 1\n" + b"9" * 5000 + b" 1\n77 1\n88")
    assert refusal_times(str(tmp_path)) == (77.0, 88.0)


def test_prolog_without_daemon_accepts_unless_on_stale_is_deny(tmp_path: Path) -> None:
    result = run_script(tmp_path, PROLOG)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    result = run_script(tmp_path, PROLOG, ["HEALTHD_ON_STALE=deny"], SLURMD_NODENAME="n7")
    assert result.returncode == 1
    assert re.fullmatch(r"healthd: node n7 .*no verdict.*\n", result.stderr)


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    "bad_line", ['HEALTHD_TELL_JOB="no', "HEALTHD_ON_STALE=(deny", "if true", "no_such_word", "false"]
)
def test_prolog_and_epilog_survive_error_in_defaults_file(tmp_path: Path, shell: str, bad_line: str) -> None:
    write_verdict(tmp_path, "ok {} healthy\n")
    assert run_script(tmp_path, PROLOG, [bad_line], shell=shell).returncode == 0
    assert run_script(tmp_path, EPILOG, [bad_line], shell=shell).returncode == 0
    write_verdict(tmp_path, DRAIN)
    assert run_script(tmp_path, PROLOG, [bad_line], shell=shell).returncode == 1, "settings before the bad line count"


def test_prolog_refusal_prints_reason_without_expanding_it(tmp_path: Path) -> None:
    write_verdict(tmp_path, DRAIN)
    result = run_script(tmp_path, PROLOG, SLURMD_NODENAME="n7")
    assert result.returncode == 1
    assert result.stderr == (
        "healthd: node n7 accepts no jobs: gpu_xid/79 0000:61:00.0: "
        "Xid 79: GPU has fallen off the bus, *, $(reboot) `x`\n"
    )


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """Create a directory that every user can read; those of pytest are private."""
    with tempfile.TemporaryDirectory(prefix="healthd-hook.") as path:
        Path(path).chmod(0o755)
        yield Path(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed")
def test_prolog_writes_reason_to_job_output_as_its_user(public_directory: Path) -> None:
    tmp_path = public_directory
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 1234, 1234)
    (tmp_path / "root.txt").touch(mode=0o600)
    write_verdict(tmp_path, DRAIN)
    job = {"SLURM_JOB_ID": "42", "SLURM_JOB_UID": "1234", "SLURM_JOB_GID": "1234"}
    array = {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "2"}
    run_script(tmp_path, PROLOG, SLURM_JOB_STDOUT=str(tmp_path / "theirs/slurm-%j.out"), **job)
    run_script(tmp_path, PROLOG, SLURM_JOB_STDOUT=str(tmp_path / "theirs/slurm-%A_%a.out"), **job, **array)
    run_script(tmp_path, PROLOG, SLURM_JOB_STDOUT=str(tmp_path / "theirs/%x.out"), **job)
    run_script(tmp_path, PROLOG, SLURM_JOB_STDOUT=str(tmp_path / "root.txt"), **job)
    run_script(tmp_path, PROLOG, ["HEALTHD_TELL_JOB=no"], SLURM_JOB_STDOUT=str(tmp_path / "theirs/no"), **job)
    written = [tmp_path / f"theirs/slurm-{name}.out" for name in ("42", "40_2")]
    until(lambda: all(path.exists() and path.read_text() for path in written))
    assert [path.stat().st_uid for path in written] == [1234, 1234]
    assert ": gpu_xid/79 " in written[0].read_text()
    assert sorted((tmp_path / "theirs").iterdir()) == sorted(written)
    assert (tmp_path / "root.txt").read_text() == ""


def test_prolog_does_not_wait_for_blocked_job_output(tmp_path: Path) -> None:
    write_verdict(tmp_path, DRAIN)
    os.mkfifo(tmp_path / "out")
    start = time.monotonic()
    job = {"SLURM_JOB_ID": "42", "SLURM_JOB_UID": f"{os.geteuid()}", "SLURM_JOB_GID": f"{os.getegid()}"}
    assert run_script(tmp_path, PROLOG, SLURM_JOB_STDOUT=str(tmp_path / "out"), **job).returncode == 1
    assert time.monotonic() - start < 60
    with suppress(OSError), open(os.open(tmp_path / "out", os.O_RDONLY | os.O_NONBLOCK)):
        pass  # ends the process that waits there


# --- epilog


@contextmanager
def fake_daemon(tmp_path: Path, *answers: bytes | None) -> Iterator[list[bytes]]:
    """Listen on the daemon's socket and send these answers, one per connection (None: no answer).

    Yield the list of received requests.
    """
    requests: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(tmp_path)  # the path of a socket must be short
        listener.bind("healthd.sock")
        listener.listen()
        open_streams: list[socket.socket] = []

        def serve() -> None:
            for answer in answers:
                try:
                    stream, _ = listener.accept()
                except OSError:
                    return
                open_streams.append(stream)
                with suppress(OSError):  # the client may have disconnected
                    requests.append(stream.recv(4096))
                    if answer is not None:
                        stream.sendall(answer)
                        stream.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield requests
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            for stream in open_streams:
                stream.close()
            thread.join(120)


@pytest.fixture(autouse=True)
def _restore_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(".")


def test_epilog_waits_until_checks_have_run(tmp_path: Path) -> None:
    answers = [PENDING, PENDING, NONE_PENDING]
    with fake_daemon(tmp_path, *answers) as requests:
        assert hook.epilog(str(tmp_path), "12", 60.0) == "the checks have run"
    assert requests == [b'{"command": "job-ended", "job": "12"}\n', *[PENDING_RUNS] * 2]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (PENDING, "still running: gpu_ecc"),
        (b'{"error": "job-ended: refused"}', "job-ended: refused"),
        (b"nonsense", "sent an invalid answer"),
        (None, "no reply"),
    ],
)
def test_epilog_waits_at_most_given_time(tmp_path: Path, answer: bytes | None, sentence: str) -> None:
    with fake_daemon(tmp_path, *[answer] * 500):
        start = time.monotonic()
        assert sentence in hook.epilog(str(tmp_path), "12", 3.0)
        assert time.monotonic() - start < 60


def run_epilog(tmp_path: Path, program: str, seconds: int = 2) -> tuple[int, float]:
    start = time.monotonic()
    result = run_script(tmp_path, EPILOG, [f"HEALTHD='{program}'", f"HEALTHD_EPILOG_SECONDS={seconds}"])
    assert (result.stdout, result.stderr) == ("", "")
    return result.returncode, time.monotonic() - start


@pytest.fixture
def healthd_program(tmp_path: Path) -> str:
    path = tmp_path / "healthd"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m healthd "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_epilog_script_ends_after_checks_have_run(tmp_path: Path, healthd_program: str) -> None:
    with fake_daemon(tmp_path, NONE_PENDING) as requests:
        status, seconds = run_epilog(tmp_path, healthd_program, 200)
    assert (status, len(requests)) == (0, 1)
    assert seconds < 150


def test_epilog_script_is_bounded_if_daemon_or_program_hangs(tmp_path: Path, healthd_program: str) -> None:
    stuck = tmp_path / "stuck"
    stuck.write_text("#!/bin/sh\ntrap '' TERM\nsleep 600 & wait\n")
    stuck.chmod(0o755)
    with fake_daemon(tmp_path, *[None] * 3):
        for name in (healthd_program, str(stuck), str(tmp_path / "absent")):
            status, seconds = run_epilog(tmp_path, name)
            assert status == 0, name
            assert seconds < 150, name


def test_epilog_script_ends_at_once_without_daemon(tmp_path: Path) -> None:
    assert run_epilog(tmp_path, "/nowhere")[0] == 0
    (tmp_path / "verdict").touch()
    status, seconds = run_epilog(tmp_path, "/nowhere", 200)
    assert status == 0
    assert seconds < 150


# --- validation in the epilog


def answer_with_command(tmp_path: Path, code: str, seconds: float = 40.0) -> bytes:
    """Return the answer of a daemon that requests a command; the command records its added arguments."""
    program_text = f"import sys; open({str(tmp_path / 'ran')!r}, 'w').write(' '.join(sys.argv[1:])); {code}"
    command = {"argv": [sys.executable, "-c", program_text], "seconds": seconds}
    return json.dumps({"requested_at": 5, "pending": [], "then": [command]}).encode()


def test_epilog_runs_validation_and_reports_job_end_again(tmp_path: Path) -> None:
    with fake_daemon(tmp_path, answer_with_command(tmp_path, "sys.exit(2)"), NONE_PENDING) as requests:
        assert hook.epilog(str(tmp_path), "12", 60.0).endswith("validated (status 2)")
    assert (tmp_path / "ran").read_text() == "--seconds 40"
    assert requests == [b'{"command": "job-ended", "job": "12"}\n'] * 2


def answer_as_user(uid: int, folder: Path, answer: bytes) -> int:
    """Start a process of `uid` that answers one request on the socket in `folder`.

    Return the descriptor of a pipe to which it writes a byte once it listens.
    """

    def serve(writing: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(folder / "healthd.sock"))
            listener.listen()
            listener.settimeout(120)
            os.write(writing, b"l")
            stream, _ = listener.accept()
            with stream:
                stream.recv(1 << 16)
                stream.sendall(answer + b"\n")

    return run_as_user(uid, serve)


@only_root
def test_epilog_runs_nothing_for_daemon_of_other_user(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="healthd."))
    folder.chmod(0o777)
    reading = answer_as_user(NOBODY, folder, answer_with_command(tmp_path, ""))
    assert os.read(reading, 1) == b"l"
    hook.epilog(str(folder), "12", 60.0)
    os.close(reading)
    shutil.rmtree(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("daemon_uid", "own_uid", "is_trusted"), [(0, 0, True), (0, 1000, True), (1000, 1000, True), (1000, 0, False)]
)
def test_epilog_trusts_root_and_its_own_user_only(daemon_uid: int, own_uid: int, is_trusted: bool) -> None:
    assert hook.is_trusted_request(daemon_uid, own_uid) == is_trusted


def test_epilog_ends_hanging_validation_in_time(tmp_path: Path) -> None:
    hangs = f"open({str(tmp_path / 'up')!r}, 'w'); import time; time.sleep(600)"
    with fake_daemon(tmp_path, answer_with_command(tmp_path, hangs), NONE_PENDING):
        assert hook.epilog(str(tmp_path), "12", 12.0).endswith("took too long")


@pytest.mark.parametrize(("wait", "conf"), [(5.0, ""), (60.0, "PrologEpilogTimeout=5\n")])
def test_epilog_skips_validation_without_enough_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: float, conf: str
) -> None:
    (tmp_path / "slurm.conf").write_text(conf)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    with fake_daemon(tmp_path, answer_with_command(tmp_path, "")):
        assert "not enough time" in hook.epilog(str(tmp_path), "12", wait)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "commands", ['"x"', "[3]", '[{"argv": "sh"}]', '[{"argv": []}]', '[{"argv": [1], "seconds": 1}]']
)
def test_epilog_ignores_invalid_command_of_daemon(tmp_path: Path, commands: str) -> None:
    with fake_daemon(tmp_path, f'{{"requested_at": 5, "pending": [], "then": {commands}}}'.encode(), NONE_PENDING):
        assert hook.epilog(str(tmp_path), "12", 60.0).startswith("the checks have run; ")


# --- HealthCheckProgram


@pytest.mark.parametrize(
    ("text", "status", "sentence"),
    [
        ("ok 2000 healthy\n", 0, "ok: healthy"),
        ("warning 2000 disk_space/low /: 5 %\n", 0, "warning: disk_space/low /: 5 %"),
        ("drain 2000 gpu_xid/79 x: y\n", 2, "drain: gpu_xid/79 x: y"),
        ("drain 1000 gpu_xid/79 x: y\n", 3, "the verdict has expired: healthd is not running, or it hangs"),
        ("", 3, "the verdict has expired: healthd is not running, or it hangs"),
        ("ok\n", 3, "the verdict has expired: healthd is not running, or it hangs"),
        ("ok \xb2 x\n", 3, "the verdict has expired: healthd is not running, or it hangs"),
        ("ok 20\u0660\u0660 x\n", 3, "the verdict has expired: healthd is not running, or it hangs"),
    ],
)
def test_healthcheck_reports_verdict(tmp_path: Path, text: str, status: int, sentence: str) -> None:
    (tmp_path / "verdict").write_text(text, "utf-8")
    assert hook.healthcheck(str(tmp_path), 1000.0) == (status, sentence)


@pytest.mark.parametrize("end_time", ["9" * 4000, "9" * 12, "253402300799", str(1000 + 4 * 7 * 86400)])
def test_healthcheck_rejects_verdict_with_excessive_lifetime(tmp_path: Path, end_time: str) -> None:
    (tmp_path / "verdict").write_text(f"ok {end_time} healthy\n")
    status, sentence = hook.healthcheck(str(tmp_path), 1000.0)
    assert (status, sentence.partition(":")[0]) == (3, "no verdict")
    assert len(sentence) < 300


def test_healthcheck_accepts_verdict_of_longest_interval(tmp_path: Path) -> None:
    (tmp_path / "verdict").write_text(f"ok {1000 + 3 * 7 * 86400} healthy\n")
    assert hook.healthcheck(str(tmp_path), 1000.0) == (0, "ok: healthy")


def test_healthcheck_reports_missing_verdict(tmp_path: Path) -> None:
    status, sentence = hook.healthcheck(str(tmp_path), 1000.0)
    assert (status, sentence.startswith(f"no verdict: {tmp_path}/verdict: ")) == (3, True)


def test_healthcheck_ignores_lock_on_verdict_file(
    tmp_path: Path,
) -> None:
    """The file is world-readable, so any user can lock it."""
    (tmp_path / "verdict").write_text("drain 2000 x\n")
    with open(tmp_path / "verdict") as verdict_file:
        fcntl.flock(verdict_file, fcntl.LOCK_EX)
        assert hook.healthcheck(str(tmp_path), 1000.0) == (2, "drain: x")


def test_hooks_import_little_and_need_no_environment(tmp_path: Path) -> None:
    write_verdict(tmp_path, "ok {} healthy\n")
    code = "import sys; from healthd.cli.main import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    for words in (["hook", "healthcheck"], ["hook", "epilog", "--wait", "1"]):
        argv = [sys.executable, "-c", code, *words, "--runtime-dir", str(tmp_path)]
        result = subprocess.run(
            argv, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240, check=True
        )
        assert result.stdout
        heavy = {
            "healthd.agent.settings.config",
            "healthd.agent.daemon",
            "healthd.common.model",
            "asyncio",
            "dataclasses",
            "pynvml",
        }
        assert heavy.isdisjoint(result.stderr.split())


@pytest.mark.parametrize(("text", "message"), [("mode = \n", "not TOML"), ("runtime_dir = 7\n", "must be text")])
def test_epilog_exits_0_with_invalid_settings(
    tmp_path: Path, text: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "healthd.toml"
    file.write_text(text)
    argv = [sys.executable, "-m", "healthd", "hook", "epilog", "--wait", "1", "--config", str(file)]
    assert subprocess.run(argv, timeout=240).returncode == 0
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("wait", ["10s", "", "-5", "nan", "inf", "1e400"])
def test_epilog_exits_0_with_invalid_wait(tmp_path: Path, wait: str, capfd: pytest.CaptureFixture[str]) -> None:
    argv = [sys.executable, "-m", "healthd", "hook", "epilog", "--wait", wait, "--runtime-dir", str(tmp_path)]
    assert subprocess.run(argv, timeout=240).returncode == 0
    output = capfd.readouterr()
    (line,) = output.err.splitlines()
    assert line.startswith("healthd hook epilog: --wait: ")
    assert line.endswith(f'got "{wait}"; using 10')
    assert "is not running" in output.out


def test_healthcheck_uses_default_verdict_with_invalid_settings(
    tmp_path: Path,
) -> None:
    write_verdict(tmp_path, "ok {} healthy\n")
    file = tmp_path / "healthd.toml"
    file.write_text("mode = \n")
    code = "import sys; from healthd.cli import flags; from healthd.cli.main import main; "
    code += "flags.runtime_dir.__defaults__ = (sys.argv[1],); sys.exit(main(sys.argv[2:]))"
    argv = [sys.executable, "-c", code, str(tmp_path), "hook", "healthcheck", "--config", str(file)]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    assert (result.returncode, result.stdout) == (0, "ok: healthy\n")
    assert "not TOML" in result.stderr
