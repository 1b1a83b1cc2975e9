"""match: a line that must or must not be in a command's output or in a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fakes import findings, run_check
from hypothesis import given
from hypothesis import strategies as st
from story import Story
from trees import write

from healthd.checks import match
from healthd.checks.match import MAX_FILE_CHARACTERS, MAX_LINE, Config, validate
from healthd.common.model import Severity
from healthd.host.host import Host

HOST = Host()


def sh(script: str, **settings) -> Config:
    return Config(name="mine", command=("/bin/sh", "-c", script), timeout_seconds=20.0, **settings)


def in_file(**settings) -> Config:
    return Config(name="mine", file="/etc/site", **settings)


def healthy(tmp_path: Path) -> tuple[Host, Config]:
    return write(tmp_path, {"/etc/site": "version 3\n"}), in_file(requires="^version 3$")


def finding_codes(host: Host, config: Config) -> list[str]:
    return [finding.code for finding in findings(match, host, config)]


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        ("a\nversion 3\nb", {"requires": "^version 3$"}, []),
        ("version 2\n", {"requires": "^version 3$"}, ["match/missing"]),
        ("", {"requires": "version"}, ["match/missing"]),
        ("all good\n", {"forbids": "ERROR|FATAL"}, []),
        ("good\nit is FATAL\n", {"forbids": "ERROR|FATAL"}, ["match/found"]),
        ("version 2\nERROR\n", {"requires": "^version 3$", "forbids": "ERROR"}, ["match/missing", "match/found"]),
        ("split over\ntwo lines\n", {"forbids": r"over\s+two"}, []),
        ("Upper\n", {"requires": "(?i)upper"}, []),
        ("  indented  \n", {"requires": "^  indented  $"}, []),
        ("version 3\r\nb\r\n", {"requires": "^version 3$"}, []),
        ("a\fb \x1cc\u2028d\n", {"forbids": "^[bcd]"}, []),
        ("a\n\nb\n", {"forbids": "^$"}, ["match/found"]),
        ("a\nb\n", {"forbids": "^$"}, []),
        ("", {"forbids": "^$"}, []),
        ("x" * MAX_LINE + "\n", {"forbids": "y", "requires": "x$"}, []),
        ("z" * (MAX_LINE + 1) + "\nyes\n", {"requires": "^yes$"}, []),
    ],
)
def test_file_and_command_output_are_matched_alike(tmp_path, text, settings, expected):
    host = write(tmp_path, {"/etc/site": text})
    assert finding_codes(host, in_file(**settings)) == expected
    assert finding_codes(HOST, sh(f"cat {tmp_path}/etc/site", **settings)) == expected


def test_finding_names_file_pattern_and_line(tmp_path):
    host = write(tmp_path, {"/etc/site": "fine\n  broken since 3 o'clock\n"})
    (finding,) = findings(match, host, in_file(forbids="bro+ken"))
    assert finding.subject == "mine"
    for part in ("/etc/site", "bro+ken", "broken since 3 o'clock"):
        assert part in finding.message


def test_finding_names_command():
    (finding,) = findings(match, HOST, sh("echo no", requires="yes"))
    assert "/bin/sh -c echo no" in finding.message
    assert "yes" in finding.message


@pytest.mark.parametrize("severity", [Severity.INFO, Severity.WARNING, Severity.DEGRADED, Severity.CRITICAL])
def test_fault_severity_is_a_setting(tmp_path, severity):
    host = write(tmp_path, {"/etc/site": "no\n"})
    (finding,) = findings(match, host, in_file(requires="yes", fault_severity=severity))
    assert finding.severity is severity


def test_missing_file_lacks_required_line(tmp_path):
    (finding,) = findings(match, Host(str(tmp_path)), in_file(requires="yes"))
    assert (finding.code, finding.severity) == ("match/missing", Severity.DEGRADED)


def test_missing_file_with_forbidden_line_fails_run(tmp_path):
    with pytest.raises(RuntimeError, match="/etc/site does not exist"):
        run_check(match, Host(str(tmp_path)), in_file(forbids="yes"))


def test_fifo_fails_run_and_is_not_read(tmp_path):
    (tmp_path / "etc").mkdir()
    os.mkfifo(tmp_path / "etc/site")
    with pytest.raises(RuntimeError, match="not a regular file"):
        run_check(match, Host(str(tmp_path)), in_file(requires="yes"))


def test_file_above_size_limit_fails_run(tmp_path):
    host = write(tmp_path, {"/etc/site": "yes\n" + "x" * MAX_FILE_CHARACTERS})
    with pytest.raises(RuntimeError, match="larger than"):
        run_check(match, host, in_file(requires="yes"))


@pytest.mark.parametrize("settings", [{"requires": "yes"}, {"forbids": "yes"}, {"requires": "x$"}, {"forbids": "x$"}])
def test_line_above_length_limit_fails_run(tmp_path, settings):
    text = "short\n" + "x" * 2 * MAX_LINE + "yes\nshort too\n"
    host = write(tmp_path, {"/etc/site": text})
    for where, config in ((host, in_file(**settings)), (HOST, sh(f"cat {tmp_path}/etc/site", **settings))):
        with pytest.raises(RuntimeError, match="has a line of more than"):
            run_check(match, where, config)


def test_output_above_size_limit_fails_run_unless_decided():
    script = "yes | head -c 200000; echo last"
    assert finding_codes(HOST, sh(script, requires="^y$")) == []
    for settings in ({"requires": "last"}, {"forbids": "last"}):
        with pytest.raises(RuntimeError, match="printed more than"):
            run_check(match, HOST, sh(script, **settings))


@pytest.mark.parametrize(
    ("script", "error"),
    [("echo yes; echo denied >&2; exit 1", "status 1: denied"), ("kill -SEGV $$", "status -11")],
)
def test_failing_command_fails_run_without_finding(script, error):
    with pytest.raises(RuntimeError, match=error):
        run_check(match, HOST, sh(script, forbids="yes"))


def test_accepted_exit_status_allows_matching():
    assert finding_codes(HOST, sh("echo inactive; exit 3", requires="^active", exit_statuses=(0, 3))) == [
        "match/missing"
    ]


def test_missing_or_slow_command_fails_run(tmp_path):
    with pytest.raises(RuntimeError, match="does not exist"):
        run_check(match, HOST, Config(name="mine", command=(str(tmp_path / "nothing"),), requires="x"))
    with pytest.raises(TimeoutError):
        run_check(match, HOST, Config(name="mine", command=("/bin/sleep", "600"), requires="x", timeout_seconds=1.0))


def test_program_writable_by_others_is_not_run(tmp_path):
    path = tmp_path / "program"
    path.write_text(f"#!/bin/sh\ntouch {tmp_path}/it-ran\n")
    path.chmod(0o777)
    with pytest.raises(RuntimeError, match="refused"):
        run_check(match, HOST, Config(name="mine", command=(str(path),), requires="x"))
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"requires": "x"}, "either a command or a file"),
        ({"requires": "x", "command": ("/bin/true",), "file": "/etc/site"}, "not both"),
        ({"requires": "x", "command": ("true",)}, "absolute path"),
        ({"requires": "x", "command": ("/bin/true", "a\0b")}, "NUL"),
        ({"file": "/etc/site"}, "requires or forbids"),
        ({"file": "/etc/site", "requires": "(a"}, "requires: is not a regular expression"),
        ({"file": "/etc/site", "forbids": "(?u)a"}, "forbids: is not a regular expression"),
        ({"file": "/etc/site", "forbids": "a{99999999999}"}, "forbids: is not a regular expression"),
        ({"file": "/etc/site", "forbids": "a" * 1001}, "forbids: must have at most"),
    ],
)
def test_validate_names_wrong_setting(settings, error):
    assert error in (validate(Config(name="mine", **settings)) or "")


def test_validate_does_not_run_slow_pattern():
    assert validate(Config(name="mine", file="/etc/site", requires="(((a?){999}){999}){999}b")) is None


@given(st.text(max_size=40))
def test_validate_accepts_or_rejects_any_pattern(pattern):
    problem = validate(Config(name="mine", file="/etc/site", requires=pattern))
    assert problem is None or problem.startswith(("requires: ", "needs a pattern"))


@pytest.mark.parametrize(("settings", "code"), [({"requires": "^ok"}, "missing"), ({"forbids": "^bad"}, "found")])
def test_mismatch_drains_until_two_good_runs(tmp_path, settings, code):
    host = write(tmp_path, {"/etc/site": "bad\n"})
    story = Story(match, in_file(**settings)).run_check(host)
    assert story.codes == [f"match/{code}"]
    assert story.drained
    assert not story.requeued
    write(tmp_path, {"/etc/site": "ok\n"})
    assert story.run_check(host).drained
    assert not story.run_check(host).drained
