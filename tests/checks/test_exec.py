"""exec: site programs, evaluated by their exit status, and NHC."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from fakes import BOOT, NOW, findings, run_check, until_it_fails
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from story import Story

from healthd.checks import exec as exec_check
from healthd.checks.exec import MAX_MESSAGE, Config, Kind, _first_line, _nhc_failures, validate
from healthd.common.history import History
from healthd.common.model import Clears, Finding, NothingToCheck, Observation, Severity
from healthd.host.host import Host
from healthd.host.program import ENVIRONMENT, ProgramResult

HOST = Host()

HARMLESS = {(r"returns .*|is (empty|cut short|binary)", r"/.*/check"): "exit status 0 is good whatever it prints"}


def sh(script: str, timeout_seconds: float = 20.0, **settings) -> Config:
    return Config(name="mine", command=("/bin/sh", "-c", script), timeout_seconds=timeout_seconds, **settings)


def program(folder: Path, script: str, name: str = "check") -> Path:
    """Write an executable that only its owner may write, in a directory with the same rights."""
    folder.mkdir(mode=0o755, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def healthy(tmp_path: Path) -> tuple[Host, Config]:
    path = program(tmp_path / "healthy", "echo all is well")
    return HOST, Config(name="mine", command=(str(path),))


def gone(pid: int) -> bool:
    """Return True for a zombie too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def ends(pid: int, seconds: float = 120.0) -> bool:
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
        ("echo no sensor; exit 3", r"mine: exit status 3 \(unknown\): no sensor"),
        ("echo what; exit 4", "exit status 4 is not 0, 1, 2 or 3: what"),
        ("exit 127", "exit status 127"),
        ("kill -SEGV $$", "was killed by SIGSEGV"),
        ("echo text on stderr >&2; exit 5", "text on stderr"),
    ],
)
def test_anything_else_is_a_failure_and_no_finding(script, error):
    with pytest.raises(RuntimeError, match=error):
        run_check(exec_check, HOST, sh(script))


def test_a_program_that_is_not_there_is_a_failure(tmp_path):
    with pytest.raises(RuntimeError, match=r"nothing-here does not exist"):
        run_check(exec_check, HOST, Config(name="mine", command=(str(tmp_path / "nothing-here"),)))


def test_a_program_that_may_not_be_run_is_a_failure(tmp_path):
    path = program(tmp_path, "exit 0")
    path.chmod(0o644)
    with pytest.raises(PermissionError, match="check"):
        run_check(exec_check, HOST, Config(name="mine", command=(str(path),)))


def test_a_program_that_is_no_program_is_a_failure(tmp_path):
    (tmp_path / "check").write_bytes(b"\x00\x01\x02")
    (tmp_path / "check").chmod(0o755)
    with pytest.raises(OSError, match="Exec format error"):
        run_check(exec_check, HOST, Config(name="mine", command=(str(tmp_path / "check"),)))


def test_a_program_that_is_too_slow_is_killed_with_all_that_it_started(tmp_path):
    pids = tmp_path / "pids"
    script = f"echo $$ >{pids}; sleep 1000 & echo $! >>{pids}; trap '' TERM; wait; sleep 1000"
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"did not end within 9 s"):  # includes time for a slow start
        run_check(exec_check, HOST, sh(script, timeout_seconds=10.0))
    assert time.monotonic() - began < 60.0
    assert all(ends(int(pid)) for pid in pids.read_text().split())


def test_a_child_left_in_the_background_delays_nothing_and_is_ended(tmp_path):
    pid = tmp_path / "pid"
    began = time.monotonic()
    (finding,) = findings(exec_check, HOST, sh(f"sleep 1000 & echo $! >{pid}; echo done; exit 1"))
    assert finding.message == "done"
    assert time.monotonic() - began < 60.0
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


# --- permissions of the program


def refused(path: Path, host: Host = HOST) -> str:
    """Return why the program is refused. Fail if it is run."""
    with pytest.raises(RuntimeError) as raised:
        run_check(exec_check, host, Config(name="mine", command=(str(path),)))
    return str(raised.value)


@pytest.fixture
def ours(tmp_path):
    """A program that creates the file `it-ran`."""
    return program(tmp_path / "site", f"touch {tmp_path}/it-ran")


def test_a_program_that_only_its_owner_may_write_is_run(ours, tmp_path):
    run_check(exec_check, HOST, Config(name="mine", command=(str(ours),)))
    assert (tmp_path / "it-ran").exists()


@pytest.mark.parametrize("mode", [0o757, 0o777])
def test_a_program_that_others_may_write_is_refused_and_not_run(ours, tmp_path, mode):
    ours.chmod(mode)
    assert refused(ours) == f"mine: command: refused: {ours} is writable by all users (mode {mode:o})"
    assert not (tmp_path / "it-ran").exists()


def test_a_program_in_a_directory_where_others_may_put_another_is_refused(ours, tmp_path):
    """This applies to each directory above: the program could be moved away and replaced."""
    for folder in (ours.parent, tmp_path):
        folder.chmod(0o777)
        assert refused(ours) == f"mine: command: refused: {folder} is writable by all users (mode 777)"
        folder.chmod(0o755)
    assert not (tmp_path / "it-ran").exists()


def test_in_a_sticky_directory_nobody_else_can_put_another(ours, tmp_path):
    ours.parent.chmod(0o1777)
    run_check(exec_check, HOST, Config(name="mine", command=(str(ours),)))
    assert (tmp_path / "it-ran").exists()


@pytest.mark.parametrize("target", ["real/check", "{}/real/check"])
def test_a_link_is_refused_for_what_it_points_at(tmp_path, target):
    real = program(tmp_path / "real", "exit 0")
    link = tmp_path / "check"
    link.symlink_to(target.format(tmp_path))
    run_check(exec_check, HOST, Config(name="mine", command=(str(link),)))
    real.parent.chmod(0o777)
    assert f"refused: {real.parent} is writable" in refused(link)


def test_links_that_go_round_in_a_circle_are_a_failure(tmp_path):
    (tmp_path / "check").symlink_to("other")
    (tmp_path / "other").symlink_to("check")
    with pytest.raises(OSError, match="symbolic links"):
        run_check(exec_check, HOST, Config(name="mine", command=(str(tmp_path / "check"),)))


def test_with_a_tree_for_the_machine_it_is_looked_at_where_it_is_run(ours, tmp_path):
    """`healthd check --root DIR` runs the program of this machine."""
    ours.chmod(0o777)
    assert "is writable by all users" in refused(ours, Host(str(tmp_path / "tree")))
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("of", ["program", "directory"])
def test_a_program_of_another_user_is_refused(ours, tmp_path, of):
    given = ours if of == "program" else ours.parent
    os.chown(given, 4711, -1)
    assert refused(ours) == f"mine: command: refused: {given} belongs to user 4711; it must belong to root"
    assert not (tmp_path / "it-ran").exists()


def test_a_program_that_is_found_by_its_name_is_not_taken_from_where_others_may_write(tmp_path, monkeypatch):
    folders = [program(tmp_path / name, f"echo {name}").parent for name in ("first", "second")]
    monkeypatch.setitem(ENVIRONMENT, "PATH", ":".join(map(str, folders)))
    assert HOST.run(["check"], 20.0) == ProgramResult(0, "first\n", "")
    folders[0].chmod(0o777)
    assert HOST.run(["check"], 20.0) == ProgramResult(0, "second\n", "")
    folders[1].chmod(0o777)
    with pytest.raises(PermissionError, match=rf"^refused: {folders[0]} is writable by all users"):
        HOST.run(["check"], 20.0)
    assert HOST.run(["none"], 20.0) is None


# --- NHC

NHC = Path(__file__).parents[1] / "data" / "nhc"  # the script and its checks, github.com/mej/nhc at 9c4a38c0c9f4

NHC_CONF = """\
* || check_file_test -r /etc/passwd
* || check_file_test -r /nope/one
* || /bin/false
another-host || check_file_test -r /nope/two
* || check_hw_eth nope9
"""
NHC_FAILURES = {
    "nhc: check_file_test -r /nope/one": "check_file_test:  -r /nope/one returned 1.",
    "nhc: check_hw_eth nope9": "check_hw_eth:  Ethernet device nope9 not detected.",
}
# Lines that fail on every machine, and the start of NHC's message. The rest of the message depends on the machine.
FAILING_LINES = {
    "check_cmd_output -m '/never/' echo hello": 'check_cmd_output:  "/never/" failed to match',
    "check_cmd_status -r 0 /bin/false": "check_cmd_status:  1 (expected 0) returned by",
    "check_file_contents /etc/passwd '/^no-such-user:/'": 'check_file_contents:  File "/etc/passwd" failed to match',
    "check_file_stat -m 0666 /etc/passwd": 'check_file_stat:  File "/etc/passwd" has permissions',
    "check_file_test -k /etc": "check_file_test:  -k /etc returned 1.",
    "check_fs_free / 99999TB": "check_fs_free:  / has only",
    "check_fs_mount -t lustre -f /proc": "check_fs_mount:  ",
    "check_hw_cpuinfo 999 999 999": "check_hw_cpuinfo:  Actual CPU socket count",
    "check_hw_physmem 9999TB 9999TB 5%": "check_hw_physmem:  Actual RAM size",
    # This check sets NHC's NAME, so its line begins with "ERROR:  nope:" and not with "ERROR:  nhc:".
    "check_net_socket -n nope /run/nope": "check_net_socket:  Syntax error:",
    "check_ps_daemon nope9d": "check_ps_daemon:  Process nope9d not running",
}


def nhc(*command: str | Path, **settings) -> Config:
    return Config(name="nhc", command=tuple(map(str, command)), kind=Kind.NHC, timeout_seconds=120.0, **settings)


def stand_in(folder: Path, script: str) -> Config:
    """Return a program in place of NHC, for exits that cannot be provoked in NHC itself."""
    return nhc(program(folder, script, "nhc"))


def real(folder: Path, conf: str) -> Config:
    """Return NHC itself, copied because healthd refuses a program that others may write. A drain creates `offline`."""
    (folder / "nhc.conf").write_text(conf)
    script = shutil.copy(NHC / "nhc", folder / "nhc")
    words = (f"INCDIR={NHC / 'scripts'}", "NHC_RM=slurm", f"OFFLINE_NODE='touch {folder}/offline;:'", "ONLINE_NODE=:")
    return nhc(script, "-c", folder / "nhc.conf", *words)


def failures(config: Config) -> dict[str, str]:
    found = findings(exec_check, HOST, config)
    assert {finding.code for finding in found} <= {"exec/critical"}
    return {finding.subject: finding.message for finding in found}


def nothing_to_check(config: Config) -> bool:
    return any(isinstance(given, NothingToCheck) for given in exec_check.run(HOST, config, History({}, NOW, BOOT)))


def test_each_failed_check_of_nhc_is_a_critical_finding_and_nhc_drains_nothing(tmp_path):
    assert failures(real(tmp_path, NHC_CONF)) == NHC_FAILURES
    assert not (tmp_path / "offline").exists()


def test_nhc_drains_by_itself_without_mark_offline_0(tmp_path):
    HOST.run(real(tmp_path, NHC_CONF).command, 60.0, {}, anywhere=True)
    assert (tmp_path / "offline").exists()


def test_nhc_does_not_fork_its_checks(tmp_path):
    config = real(tmp_path, NHC_CONF)
    for word in ("NHC_CHECK_FORKED=1", "-f"):
        program, *rest = config.command
        assert failures(
            replace(config, command=(program, word, *rest) if word == "-f" else (*config.command, word))
        ) == (NHC_FAILURES)


def test_forked_checks_of_nhc_are_named_by_their_message(tmp_path):
    """The sysconfig file of NHC may set NHC_CHECK_FORKED=1. NHC reads it after the command line and exits with 0."""
    (tmp_path / "sysconfig").mkdir()
    (tmp_path / "sysconfig/nhc").write_text("NHC_CHECK_FORKED=1\n")
    config = real(tmp_path, NHC_CONF)
    found = failures(replace(config, command=(*config.command, f"SYSCONFIGDIR={tmp_path}/sysconfig")))
    assert found == {f"nhc: {message.partition(':')[0]}": message for message in NHC_FAILURES.values()}


def test_every_kind_of_check_of_nhc_is_named_by_its_line(tmp_path):
    found = failures(real(tmp_path, "".join(f"* || {line}\n" for line in FAILING_LINES)))
    assert found.keys() == {f"nhc: {line}" for line in FAILING_LINES}
    wrong = [line for line, words in FAILING_LINES.items() if not found[f"nhc: {line}"].startswith(words)]
    assert wrong == [], found


@pytest.mark.parametrize("status", [0, 1, 2, 3, 4, 77, 127, 142])
def test_a_failure_line_of_nhc_is_a_fault_whatever_its_exit_status(tmp_path, status):
    lines = [
        "Node Health Check starting.",
        'Running check:  "check_hw_eth nope9"',
        "ERROR:  nhc:  Health check failed:  check_hw_eth:  no nope9",
    ]
    echo = "; ".join(f"echo '{line}'" for line in lines)
    assert failures(stand_in(tmp_path, f"{echo}; exit {status}")) == {
        "nhc: check_hw_eth nope9": "check_hw_eth:  no nope9"
    }


@pytest.mark.parametrize("status", [1, 2, 3, 4, 9, 11, 77, 142])
def test_any_exit_status_but_0_of_nhc_is_a_fault(tmp_path, status):
    config = stand_in(tmp_path, f"echo Node Health Check starting.; echo no log file >&2; exit {status}")
    assert failures(config) == {"nhc": "no log file"}


def test_a_script_and_a_misspelt_check_that_fail_are_found_although_nhc_ignores_them_with_a(tmp_path):
    assert failures(real(tmp_path, "* || /bin/false\n")) == {"nhc: /bin/false": "Check /bin/false returned 1"}
    assert failures(real(tmp_path, "* || check_nope 1\n")) == {"nhc: check_nope 1": "Check check_nope 1 returned 127"}


def test_nhc_that_fails_nothing_passes(tmp_path):
    config = real(tmp_path, "* || check_file_test -r /etc/passwd\n")
    assert failures(config) == {}
    assert not nothing_to_check(config)


def test_a_check_of_nhc_that_hangs_is_a_fault(tmp_path):
    config = real(tmp_path, "* || sleep 60\n")
    (subject,) = failures(replace(config, command=(*config.command, "TIMEOUT=1")))
    assert subject == "nhc: sleep 60"


def test_nhc_without_settings_is_no_pass(tmp_path):
    config = real(tmp_path, "")
    (tmp_path / "nhc.conf").unlink()
    with pytest.raises(RuntimeError, match=r"nhc\.conf is missing"):
        run_check(exec_check, HOST, config)


def test_nhc_with_no_check_for_this_node_has_nothing_to_check(tmp_path):
    assert nothing_to_check(real(tmp_path, "another-host || check_file_test -r /nope\n"))


@pytest.mark.parametrize(("script", "error"), [("exit 10", "command line"), ("kill -SEGV $$", "SIGSEGV")])
def test_nhc_that_cannot_run_is_a_failure_and_no_finding(tmp_path, script, error):
    with pytest.raises(RuntimeError, match=error):
        run_check(exec_check, HOST, stand_in(tmp_path, script))


def test_nhc_that_refuses_its_command_line_is_a_failure_and_no_finding(tmp_path):
    config = real(tmp_path, NHC_CONF)
    with pytest.raises(RuntimeError, match="command line"):
        run_check(exec_check, HOST, replace(config, command=(config.command[0], "-Z", *config.command[1:])))


def test_a_second_run_of_nhc_that_is_too_slow_leaves_what_the_first_one_found(tmp_path):
    config = replace(real(tmp_path, f"{NHC_CONF}* || sleep 60\n"), timeout_seconds=20.0)
    given, error = until_it_fails(exec_check, HOST, config)
    assert [item.subject for item in given if isinstance(item, Finding)] == [next(iter(NHC_FAILURES))]
    assert "did not end" in error  # otherwise the checks that did not run would count as passed


def test_a_second_run_of_nhc_that_cannot_start_leaves_what_the_first_one_found(tmp_path):
    line = "ERROR:  nhc:  Health check failed:  check_file_test:  -r /nope/one returned 1."
    script = f"""rm "$0"; echo 'Running check:  "check_file_test -r /nope/one"'; echo '{line}'; exit 1"""
    given, error = until_it_fails(exec_check, HOST, stand_in(tmp_path, script))
    assert [item.subject for item in given if isinstance(item, Finding)] == [next(iter(NHC_FAILURES))]
    assert "does not exist" in error


def test_only_a_newline_ends_a_line_of_nhc():
    line = "ERROR:  nhc:  Health check failed:  check_ps_blacklist:  a\x85ERROR:  nhc:  Health check failed:  b"
    assert len(_nhc_failures(f'Running check:  "check_ps_blacklist"\n{line}\n')) == 1
    assert list(_nhc_failures(line)) == ["check_ps_blacklist"]


def test_a_failed_check_of_nhc_drains_and_two_good_runs_resume(tmp_path):
    story = Story(exec_check, real(tmp_path, NHC_CONF)).look(HOST)
    assert story.drained
    real(tmp_path, "* || check_file_test -r /etc/passwd\n")
    assert story.look(HOST).drained
    assert not story.look(HOST).drained


@pytest.mark.parametrize("word", ["-a", "-va", "-qda", "-ac", "NHC_CHECK_ALL=1"])
def test_nhc_with_a_of_the_site_is_refused(word):
    assert "must not contain -a" in (validate(nhc("/usr/sbin/nhc", word)) or "")


@pytest.mark.parametrize("word", ["-v", "-t", "-c/etc/nhc/nhca.conf", "-D/data", "NHC_CHECK_ALL=0", "TIMEOUT=9"])
def test_other_arguments_of_nhc_are_accepted(word):
    assert validate(nhc("/usr/sbin/nhc", word)) is None


def test_an_empty_argument_of_nhc_is_refused():
    """NHC reads VARIABLE=value arguments up to the first empty one, and MARK_OFFLINE=0 comes last."""
    assert "empty argument" in (validate(nhc("/usr/sbin/nhc", "TIMEOUT=9", "")) or "")


def test_nhc_ignores_what_follows_an_empty_argument(tmp_path):
    config = real(tmp_path, NHC_CONF)
    HOST.run((*config.command, "", "MARK_OFFLINE=0"), 60.0, {}, anywhere=True)
    assert (tmp_path / "offline").exists()


@given(st.text(max_size=300))
def test_output_that_is_not_nhcs_names_no_failed_check(output):
    assert all(message.isprintable() for message in _nhc_failures(output).values())


# --- stories


def says(folder: Path, status: int) -> Config:
    path = program(folder, f"echo fan is slow; exit {status}")
    return Config(name="mine", command=(str(path),))


def test_a_critical_program_drains_and_two_good_runs_resume(tmp_path):
    story = Story(exec_check, says(tmp_path, 2)).look(HOST)
    assert story.drained
    assert not story.requeued
    assert story.looks(HOST, 5).drained
    says(tmp_path, 0)
    assert story.look(HOST).drained
    assert not story.look(HOST).drained


def test_a_program_that_warns_never_drains(tmp_path):
    story = Story(exec_check, says(tmp_path, 1)).looks(HOST, 10)
    assert story.codes == ["exec/warning"]
    assert not story.drained
    says(tmp_path, 0)
    assert story.looks(HOST, 2).codes == []


def test_a_program_that_cannot_look_neither_drains_nor_ends_a_drain(tmp_path):
    story = Story(exec_check, says(tmp_path, 2)).look(HOST)
    says(tmp_path, 3)
    for _ in range(5):
        with pytest.raises(RuntimeError, match=r"mine: exit status 3 \(unknown\): fan is slow"):
            story.look(HOST)
    assert story.drained


def test_a_program_that_is_replaced_by_one_that_others_may_write_ends_no_drain(tmp_path):
    story = Story(exec_check, says(tmp_path, 2)).look(HOST)
    says(tmp_path, 0)
    (tmp_path / "check").chmod(0o777)
    with pytest.raises(RuntimeError, match="refused"):
        story.look(HOST)
    assert story.drained
