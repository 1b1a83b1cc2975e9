"""exec: site programs, evaluated by their exit status, and NHC."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from fakes import BOOT, NOW, findings, run_check, run_until_error
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


def has_ended(pid: int) -> bool:
    """Return True for a zombie too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_ended(pid: int, seconds: float = 120.0) -> bool:
    deadline = time.monotonic() + seconds
    while not has_ended(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return has_ended(pid)


def test_exit_status_0_gives_no_finding():
    (observation,) = run_check(exec_check, HOST, sh("echo all is well"))
    assert observation == Observation("exec_exit_status", 0, labels=(("name", "mine"),))


def test_exit_status_1_warns_with_first_line_as_message():
    (finding,) = findings(exec_check, HOST, sh("echo; echo disk is slow; echo more; exit 1"))
    assert (finding.code, finding.subject, finding.message) == ("exec/warning", "mine", "disk is slow")
    assert (finding.severity, finding.clears) == (Severity.WARNING, Clears.PASS)


@pytest.mark.parametrize("severity", [Severity.WARNING, Severity.DEGRADED, Severity.CRITICAL])
def test_exit_status_2_has_configured_severity(severity):
    (finding,) = findings(exec_check, HOST, sh("echo broken; exit 2", critical_severity=severity))
    assert (finding.code, finding.severity) == ("exec/critical", severity)


def test_exit_status_2_is_degraded_by_default():
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
def test_other_exit_fails_run_without_finding(script, error):
    with pytest.raises(RuntimeError, match=error):
        run_check(exec_check, HOST, sh(script))


def test_missing_program_fails_run(tmp_path):
    with pytest.raises(RuntimeError, match=r"nothing-here does not exist"):
        run_check(exec_check, HOST, Config(name="mine", command=(str(tmp_path / "nothing-here"),)))


def test_program_without_execute_permission_fails_run(tmp_path):
    path = program(tmp_path, "exit 0")
    path.chmod(0o644)
    with pytest.raises(PermissionError, match="check"):
        run_check(exec_check, HOST, Config(name="mine", command=(str(path),)))


def test_invalid_program_file_fails_run(tmp_path):
    (tmp_path / "check").write_bytes(b"\x00\x01\x02")
    (tmp_path / "check").chmod(0o755)
    with pytest.raises(OSError, match="Exec format error"):
        run_check(exec_check, HOST, Config(name="mine", command=(str(tmp_path / "check"),)))


def test_slow_program_is_killed_with_its_children(tmp_path):
    pids = tmp_path / "pids"
    script = f"echo $$ >{pids}; sleep 1000 & echo $! >>{pids}; trap '' TERM; wait; sleep 1000"
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"did not end within 9 s"):  # includes time for a slow start
        run_check(exec_check, HOST, sh(script, timeout_seconds=10.0))
    assert time.monotonic() - began < 60.0
    assert all(wait_until_ended(int(pid)) for pid in pids.read_text().split())


def test_background_child_does_not_delay_run_and_is_killed(tmp_path):
    pid = tmp_path / "pid"
    began = time.monotonic()
    (finding,) = findings(exec_check, HOST, sh(f"sleep 1000 & echo $! >{pid}; echo done; exit 1"))
    assert finding.message == "done"
    assert time.monotonic() - began < 60.0
    assert wait_until_ended(int(pid.read_text()))


def test_program_that_closes_its_output_is_awaited():
    (finding,) = findings(exec_check, HOST, sh("exec >&- 2>&-; sleep 0.2; exit 1"))
    assert finding.message == "exit status 1"


@given(st.text(max_size=300))
def test_first_line_is_printable_and_limited_to_200_characters(output):
    message = _first_line(output)
    assert len(message) <= MAX_MESSAGE
    assert message.isprintable()


@pytest.mark.parametrize(
    ("command", "error"), [((), "command is missing"), (("check",), "absolute path"), (("/x", "a\0b"), "NUL")]
)
def test_validate_rejects_unusable_command(command, error):
    assert error in (validate(Config(name="mine", command=command)) or "")


def test_validate_accepts_absolute_path():
    assert validate(sh("exit 0")) is None


# --- permissions of the program


def refusal_message(path: Path, host: Host = HOST) -> str:
    """Return why the program is refused. Fail if it is run."""
    with pytest.raises(RuntimeError) as raised:
        run_check(exec_check, host, Config(name="mine", command=(str(path),)))
    return str(raised.value)


@pytest.fixture
def site_program(tmp_path):
    """A program that creates the file `it-ran`."""
    return program(tmp_path / "site", f"touch {tmp_path}/it-ran")


def test_program_writable_only_by_owner_is_run(site_program, tmp_path):
    run_check(exec_check, HOST, Config(name="mine", command=(str(site_program),)))
    assert (tmp_path / "it-ran").exists()


@pytest.mark.parametrize("mode", [0o757, 0o777])
def test_program_writable_by_others_is_refused(site_program, tmp_path, mode):
    site_program.chmod(mode)
    assert (
        refusal_message(site_program)
        == f"mine: command: refused: {site_program} is writable by all users (mode {mode:o})"
    )
    assert not (tmp_path / "it-ran").exists()


def test_program_in_directory_writable_by_others_is_refused(site_program, tmp_path):
    """This applies to each directory above: the program could be moved away and replaced."""
    for folder in (site_program.parent, tmp_path):
        folder.chmod(0o777)
        assert refusal_message(site_program) == f"mine: command: refused: {folder} is writable by all users (mode 777)"
        folder.chmod(0o755)
    assert not (tmp_path / "it-ran").exists()


def test_program_in_sticky_directory_is_run(site_program, tmp_path):
    site_program.parent.chmod(0o1777)
    run_check(exec_check, HOST, Config(name="mine", command=(str(site_program),)))
    assert (tmp_path / "it-ran").exists()


@pytest.mark.parametrize("target", ["real/check", "{}/real/check"])
def test_link_is_refused_because_of_its_target(tmp_path, target):
    real = program(tmp_path / "real", "exit 0")
    link = tmp_path / "check"
    link.symlink_to(target.format(tmp_path))
    run_check(exec_check, HOST, Config(name="mine", command=(str(link),)))
    real.parent.chmod(0o777)
    assert f"refused: {real.parent} is writable" in refusal_message(link)


def test_circular_links_fail_run(tmp_path):
    (tmp_path / "check").symlink_to("other")
    (tmp_path / "other").symlink_to("check")
    with pytest.raises(OSError, match="symbolic links"):
        run_check(exec_check, HOST, Config(name="mine", command=(str(tmp_path / "check"),)))


def test_program_of_this_machine_is_checked_with_another_root(site_program, tmp_path):
    """`healthd check --root DIR` runs the program of this machine."""
    site_program.chmod(0o777)
    assert "is writable by all users" in refusal_message(site_program, Host(str(tmp_path / "tree")))
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("owned", ["program", "directory"])
def test_program_of_another_user_is_refused(site_program, tmp_path, owned):
    path = site_program if owned == "program" else site_program.parent
    os.chown(path, 4711, -1)
    assert (
        refusal_message(site_program) == f"mine: command: refused: {path} belongs to user 4711; it must belong to root"
    )
    assert not (tmp_path / "it-ran").exists()


def test_path_search_skips_directories_writable_by_others(tmp_path, monkeypatch):
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


def fake_nhc(folder: Path, script: str) -> Config:
    """Return a program in place of NHC, for exits that cannot be provoked in NHC itself."""
    return nhc(program(folder, script, "nhc"))


def real_nhc(folder: Path, conf: str) -> Config:
    """Return NHC itself, copied because healthd refuses a program that others may write. A drain creates `offline`."""
    (folder / "nhc.conf").write_text(conf)
    script = shutil.copy(NHC / "nhc", folder / "nhc")
    assignments = (
        f"INCDIR={NHC / 'scripts'}",
        "NHC_RM=slurm",
        f"OFFLINE_NODE='touch {folder}/offline;:'",
        "ONLINE_NODE=:",
    )
    return nhc(script, "-c", folder / "nhc.conf", *assignments)


def failures(config: Config) -> dict[str, str]:
    found = findings(exec_check, HOST, config)
    assert {finding.code for finding in found} <= {"exec/critical"}
    return {finding.subject: finding.message for finding in found}


def has_nothing_to_check(config: Config) -> bool:
    return any(isinstance(item, NothingToCheck) for item in exec_check.run(HOST, config, History({}, NOW, BOOT)))


def test_failed_nhc_checks_are_critical_and_nhc_does_not_drain(tmp_path):
    assert failures(real_nhc(tmp_path, NHC_CONF)) == NHC_FAILURES
    assert not (tmp_path / "offline").exists()


def test_nhc_itself_drains_without_mark_offline_0(tmp_path):
    HOST.run(real_nhc(tmp_path, NHC_CONF).command, 60.0, {}, anywhere=True)
    assert (tmp_path / "offline").exists()


def test_nhc_checks_are_not_forked(tmp_path):
    config = real_nhc(tmp_path, NHC_CONF)
    for word in ("NHC_CHECK_FORKED=1", "-f"):
        program, *arguments = config.command
        assert failures(
            replace(config, command=(program, word, *arguments) if word == "-f" else (*config.command, word))
        ) == (NHC_FAILURES)


def test_forked_nhc_checks_are_named_by_message(tmp_path):
    """The sysconfig file of NHC may set NHC_CHECK_FORKED=1. NHC reads it after the command line and exits with 0."""
    (tmp_path / "sysconfig").mkdir()
    (tmp_path / "sysconfig/nhc").write_text("NHC_CHECK_FORKED=1\n")
    config = real_nhc(tmp_path, NHC_CONF)
    found = failures(replace(config, command=(*config.command, f"SYSCONFIGDIR={tmp_path}/sysconfig")))
    assert found == {f"nhc: {message.partition(':')[0]}": message for message in NHC_FAILURES.values()}


def test_every_kind_of_nhc_check_is_named_by_its_line(tmp_path):
    found = failures(real_nhc(tmp_path, "".join(f"* || {line}\n" for line in FAILING_LINES)))
    assert found.keys() == {f"nhc: {line}" for line in FAILING_LINES}
    unexpected = [line for line, start in FAILING_LINES.items() if not found[f"nhc: {line}"].startswith(start)]
    assert unexpected == [], found


@pytest.mark.parametrize("status", [0, 1, 2, 3, 4, 77, 127, 142])
def test_nhc_failure_line_is_a_finding_with_any_exit_status(tmp_path, status):
    lines = [
        "Node Health Check starting.",
        'Running check:  "check_hw_eth nope9"',
        "ERROR:  nhc:  Health check failed:  check_hw_eth:  no nope9",
    ]
    echo = "; ".join(f"echo '{line}'" for line in lines)
    assert failures(fake_nhc(tmp_path, f"{echo}; exit {status}")) == {
        "nhc: check_hw_eth nope9": "check_hw_eth:  no nope9"
    }


@pytest.mark.parametrize("status", [1, 2, 3, 4, 9, 11, 77, 142])
def test_nhc_exit_status_other_than_0_is_a_finding(tmp_path, status):
    config = fake_nhc(tmp_path, f"echo Node Health Check starting.; echo no log file >&2; exit {status}")
    assert failures(config) == {"nhc": "no log file"}


def test_failing_script_and_misspelt_check_are_found_without_a(tmp_path):
    assert failures(real_nhc(tmp_path, "* || /bin/false\n")) == {"nhc: /bin/false": "Check /bin/false returned 1"}
    assert failures(real_nhc(tmp_path, "* || check_nope 1\n")) == {
        "nhc: check_nope 1": "Check check_nope 1 returned 127"
    }


def test_nhc_without_failures_passes(tmp_path):
    config = real_nhc(tmp_path, "* || check_file_test -r /etc/passwd\n")
    assert failures(config) == {}
    assert not has_nothing_to_check(config)


def test_nhc_check_that_hangs_is_a_finding(tmp_path):
    config = real_nhc(tmp_path, "* || sleep 60\n")
    (subject,) = failures(replace(config, command=(*config.command, "TIMEOUT=1")))
    assert subject == "nhc: sleep 60"


def test_missing_nhc_conf_fails_run(tmp_path):
    config = real_nhc(tmp_path, "")
    (tmp_path / "nhc.conf").unlink()
    with pytest.raises(RuntimeError, match=r"nhc\.conf is missing"):
        run_check(exec_check, HOST, config)


def test_nhc_without_check_for_this_node_has_nothing_to_check(tmp_path):
    assert has_nothing_to_check(real_nhc(tmp_path, "another-host || check_file_test -r /nope\n"))


@pytest.mark.parametrize(("script", "error"), [("exit 10", "command line"), ("kill -SEGV $$", "SIGSEGV")])
def test_nhc_that_cannot_run_fails_run_without_finding(tmp_path, script, error):
    with pytest.raises(RuntimeError, match=error):
        run_check(exec_check, HOST, fake_nhc(tmp_path, script))


def test_rejected_nhc_command_line_fails_run_without_finding(tmp_path):
    config = real_nhc(tmp_path, NHC_CONF)
    with pytest.raises(RuntimeError, match="command line"):
        run_check(exec_check, HOST, replace(config, command=(config.command[0], "-Z", *config.command[1:])))


def test_slow_second_nhc_run_keeps_findings_of_first_run(tmp_path):
    config = replace(real_nhc(tmp_path, f"{NHC_CONF}* || sleep 60\n"), timeout_seconds=20.0)
    results, error = run_until_error(exec_check, HOST, config)
    assert [item.subject for item in results if isinstance(item, Finding)] == [next(iter(NHC_FAILURES))]
    assert "did not end" in error  # otherwise the checks that did not run would count as passed


def test_failed_start_of_second_nhc_run_keeps_findings_of_first_run(tmp_path):
    line = "ERROR:  nhc:  Health check failed:  check_file_test:  -r /nope/one returned 1."
    script = f"""rm "$0"; echo 'Running check:  "check_file_test -r /nope/one"'; echo '{line}'; exit 1"""
    results, error = run_until_error(exec_check, HOST, fake_nhc(tmp_path, script))
    assert [item.subject for item in results if isinstance(item, Finding)] == [next(iter(NHC_FAILURES))]
    assert "does not exist" in error


def test_nhc_failures_splits_lines_only_at_newline():
    line = "ERROR:  nhc:  Health check failed:  check_ps_blacklist:  a\x85ERROR:  nhc:  Health check failed:  b"
    assert len(_nhc_failures(f'Running check:  "check_ps_blacklist"\n{line}\n')) == 1
    assert list(_nhc_failures(line)) == ["check_ps_blacklist"]


def test_failed_nhc_check_drains_until_two_good_runs(tmp_path):
    story = Story(exec_check, real_nhc(tmp_path, NHC_CONF)).run_check(HOST)
    assert story.drained
    real_nhc(tmp_path, "* || check_file_test -r /etc/passwd\n")
    assert story.run_check(HOST).drained
    assert not story.run_check(HOST).drained


@pytest.mark.parametrize("word", ["-a", "-va", "-qda", "-ac", "NHC_CHECK_ALL=1"])
def test_validate_rejects_option_a_of_nhc(word):
    assert "must not contain -a" in (validate(nhc("/usr/sbin/nhc", word)) or "")


@pytest.mark.parametrize("word", ["-v", "-t", "-c/etc/nhc/nhca.conf", "-D/data", "NHC_CHECK_ALL=0", "TIMEOUT=9"])
def test_validate_accepts_other_arguments_of_nhc(word):
    assert validate(nhc("/usr/sbin/nhc", word)) is None


def test_validate_rejects_empty_argument_of_nhc():
    """NHC reads VARIABLE=value arguments up to the first empty one, and MARK_OFFLINE=0 comes last."""
    assert "empty argument" in (validate(nhc("/usr/sbin/nhc", "TIMEOUT=9", "")) or "")


def test_nhc_ignores_arguments_after_empty_one(tmp_path):
    config = real_nhc(tmp_path, NHC_CONF)
    HOST.run((*config.command, "", "MARK_OFFLINE=0"), 60.0, {}, anywhere=True)
    assert (tmp_path / "offline").exists()


@given(st.text(max_size=300))
def test_nhc_failures_finds_nothing_in_other_output(output):
    assert all(message.isprintable() for message in _nhc_failures(output).values())


# --- stories


def program_with_status(folder: Path, status: int) -> Config:
    path = program(folder, f"echo fan is slow; exit {status}")
    return Config(name="mine", command=(str(path),))


def test_critical_program_drains_until_two_good_runs(tmp_path):
    story = Story(exec_check, program_with_status(tmp_path, 2)).run_check(HOST)
    assert story.drained
    assert not story.requeued
    assert story.run_checks(HOST, 5).drained
    program_with_status(tmp_path, 0)
    assert story.run_check(HOST).drained
    assert not story.run_check(HOST).drained


def test_warning_program_never_drains(tmp_path):
    story = Story(exec_check, program_with_status(tmp_path, 1)).run_checks(HOST, 10)
    assert story.codes == ["exec/warning"]
    assert not story.drained
    program_with_status(tmp_path, 0)
    assert story.run_checks(HOST, 2).codes == []


def test_unknown_status_neither_drains_nor_clears(tmp_path):
    story = Story(exec_check, program_with_status(tmp_path, 2)).run_check(HOST)
    program_with_status(tmp_path, 3)
    for _ in range(5):
        with pytest.raises(RuntimeError, match=r"mine: exit status 3 \(unknown\): fan is slow"):
            story.run_check(HOST)
    assert story.drained


def test_refused_program_does_not_clear_drain(tmp_path):
    story = Story(exec_check, program_with_status(tmp_path, 2)).run_check(HOST)
    program_with_status(tmp_path, 0)
    (tmp_path / "check").chmod(0o777)
    with pytest.raises(RuntimeError, match="refused"):
        story.run_check(HOST)
    assert story.drained
