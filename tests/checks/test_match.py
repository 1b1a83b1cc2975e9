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


def codes_of(host: Host, config: Config) -> list[str]:
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
def test_lines_of_a_file_and_of_a_command_are_judged_alike(tmp_path, text, settings, expected):
    host = write(tmp_path, {"/etc/site": text})
    assert codes_of(host, in_file(**settings)) == expected
    assert codes_of(HOST, sh(f"cat {tmp_path}/etc/site", **settings)) == expected


def test_a_finding_names_the_file_the_pattern_and_the_line(tmp_path):
    host = write(tmp_path, {"/etc/site": "fine\n  broken since 3 o'clock\n"})
    (finding,) = findings(match, host, in_file(forbids="bro+ken"))
    assert finding.subject == "mine"
    for part in ("/etc/site", "bro+ken", "broken since 3 o'clock"):
        assert part in finding.message


def test_a_finding_names_the_command():
    (finding,) = findings(match, HOST, sh("echo no", requires="yes"))
    assert "/bin/sh -c echo no" in finding.message
    assert "yes" in finding.message


@pytest.mark.parametrize("severity", [Severity.INFO, Severity.WARNING, Severity.DEGRADED, Severity.CRITICAL])
def test_the_severity_is_the_sites(tmp_path, severity):
    host = write(tmp_path, {"/etc/site": "no\n"})
    (finding,) = findings(match, host, in_file(requires="yes", fault_severity=severity))
    assert finding.severity is severity


def test_a_missing_file_lacks_the_required_line(tmp_path):
    (finding,) = findings(match, Host(str(tmp_path)), in_file(requires="yes"))
    assert (finding.code, finding.severity) == ("match/missing", Severity.DEGRADED)


def test_a_missing_file_is_no_evidence_that_a_forbidden_line_is_absent(tmp_path):
    with pytest.raises(RuntimeError, match="/etc/site does not exist"):
        run_check(match, Host(str(tmp_path)), in_file(forbids="yes"))


def test_a_fifo_is_refused_and_not_read(tmp_path):
    (tmp_path / "etc").mkdir()
    os.mkfifo(tmp_path / "etc/site")
    with pytest.raises(RuntimeError, match="not a regular file"):
        run_check(match, Host(str(tmp_path)), in_file(requires="yes"))


def test_a_file_that_is_too_large_is_a_failure(tmp_path):
    host = write(tmp_path, {"/etc/site": "yes\n" + "x" * MAX_FILE_CHARACTERS})
    with pytest.raises(RuntimeError, match="larger than"):
        run_check(match, host, in_file(requires="yes"))


@pytest.mark.parametrize("settings", [{"requires": "yes"}, {"forbids": "yes"}, {"requires": "x$"}, {"forbids": "x$"}])
def test_a_line_that_is_too_long_to_be_searched_is_a_failure(tmp_path, settings):
    text = "short\n" + "x" * 2 * MAX_LINE + "yes\nshort too\n"
    host = write(tmp_path, {"/etc/site": text})
    for where, config in ((host, in_file(**settings)), (HOST, sh(f"cat {tmp_path}/etc/site", **settings))):
        with pytest.raises(RuntimeError, match="has a line of more than"):
            run_check(match, where, config)


def test_a_line_in_more_output_than_is_read_may_have_been_missed():
    much = "yes | head -c 200000; echo last"
    assert codes_of(HOST, sh(much, requires="^y$")) == []
    for settings in ({"requires": "last"}, {"forbids": "last"}):
        with pytest.raises(RuntimeError, match="printed more than"):
            run_check(match, HOST, sh(much, **settings))


@pytest.mark.parametrize(
    ("script", "error"),
    [("echo yes; echo denied >&2; exit 1", "status 1: denied"), ("kill -SEGV $$", "status -11")],
)
def test_a_command_that_fails_is_a_failure_and_no_finding(script, error):
    with pytest.raises(RuntimeError, match=error):
        run_check(match, HOST, sh(script, forbids="yes"))


def test_a_status_that_the_site_expects_lets_the_output_count():
    assert codes_of(HOST, sh("echo inactive; exit 3", requires="^active", exit_statuses=(0, 3))) == ["match/missing"]


def test_a_command_that_is_not_there_or_too_slow_is_a_failure(tmp_path):
    with pytest.raises(RuntimeError, match="does not exist"):
        run_check(match, HOST, Config(name="mine", command=(str(tmp_path / "nothing"),), requires="x"))
    with pytest.raises(TimeoutError):
        run_check(match, HOST, Config(name="mine", command=("/bin/sleep", "600"), requires="x", timeout_seconds=1.0))


def test_a_program_that_others_may_write_is_not_run(tmp_path):
    path = tmp_path / "program"
    path.write_text(f"#!/bin/sh\ntouch {tmp_path}/it-ran\n")
    path.chmod(0o777)
    with pytest.raises(RuntimeError, match="refused"):
        run_check(match, HOST, Config(name="mine", command=(str(path),), requires="x"))
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
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
def test_wrong_settings_are_refused_with_the_setting(settings, words):
    assert words in (validate(Config(name="mine", **settings)) or "")


def test_a_pattern_that_takes_forever_is_only_compiled_where_settings_are_read():
    assert validate(Config(name="mine", file="/etc/site", requires="(((a?){999}){999}){999}b")) is None


@given(st.text(max_size=40))
def test_any_pattern_is_taken_or_refused(pattern):
    problem = validate(Config(name="mine", file="/etc/site", requires=pattern))
    assert problem is None or problem.startswith(("requires: ", "needs a pattern"))


@pytest.mark.parametrize(("settings", "code"), [({"requires": "^ok"}, "missing"), ({"forbids": "^bad"}, "found")])
def test_a_mismatch_drains_and_two_good_runs_resume(tmp_path, settings, code):
    host = write(tmp_path, {"/etc/site": "bad\n"})
    story = Story(match, in_file(**settings)).look(host)
    assert story.codes == [f"match/{code}"]
    assert story.drained
    assert not story.requeued
    write(tmp_path, {"/etc/site": "ok\n"})
    assert story.look(host).drained
    assert not story.look(host).drained
