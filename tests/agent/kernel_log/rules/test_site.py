"""Tests of the site's own kernel log patterns: [kernel_log.patterns]."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cpu_time import cpu_seconds
from fakes import BOOT
from hypothesis import given
from hypothesis import strategies as st
from story import Story

from healthd.agent.kernel_log.parse import LITERALS, parse, use_patterns
from healthd.agent.kernel_log.source import RawLine, make_event
from healthd.agent.settings.config import ConfigError, KernelPattern, kernel_log_config
from healthd.agent.settings.effective import resolve_settings, setting_rows
from healthd.agent.settings.limits import longest_literal
from healthd.agent.settings.registry import built_in_checks
from healthd.checks import kernel as kernel_check
from healthd.cli.scan import correlate_all
from healthd.common.model import Clears, Inventory, Severity
from healthd.scan import candidates
from healthd.scan.events import events
from healthd.scan.findings import judge
from healthd.scan.lines import Block, Tally

EVICTED = "LustreError: 167-0: data-OST0001: This client was evicted by data-OST0001; in progress operations will fail"
FOO = "foo_driver 0000:3b:00.0: queue 7 is stuck (code 42)"
PATTERNS = {
    "foo_stuck": KernelPattern("foo_driver *: queue *is stuck", Severity.DEGRADED),
    "anywhere": KernelPattern("*very odd thing"),
    "xid": KernelPattern("NVRM: Xid *"),
}


@pytest.fixture(autouse=True)
def patterns():
    use_patterns(PATTERNS)
    yield
    use_patterns({})


def name_of(text: str) -> str:
    event = parse(text)
    return event.code if event is not None and event.kind == "site" else ""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (FOO, "foo_stuck"),
        ("foo_driver 1: queue 3 was stuck, queue 4 is stuck", "foo_stuck"),
        ("foo_driver 1: is stuck, queue", ""),
        (f" {FOO}", ""),
        (f"app: {FOO}", ""),
        ("eth9: a very odd thing happened", "anywhere"),
        ("very odd thing", "anywhere"),
        ("very od thing", ""),
    ],
)
def test_a_pattern_matches_from_the_beginning_of_the_message(text, name):
    assert name_of(text) == name


def test_a_line_that_a_built_in_rule_reads_keeps_its_meaning():
    event = parse("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=x, GPU has fallen off the bus.")
    assert event is not None
    assert (event.kind, event.code) == ("xid", "79")
    assert name_of("NVRM: Xid of a form that no rule reads") == "xid"


@pytest.mark.parametrize("names", [("info", "degraded", "warning"), ("degraded", "warning", "info")])
def test_the_most_severe_pattern_of_a_line_counts(names):
    texts = {"info": "foo_driver*", "degraded": "foo_driver *stuck", "warning": "*queue 7 is*"}
    use_patterns({name: KernelPattern(texts[name], Severity[name.upper()]) for name in names})
    assert name_of(FOO) == "degraded"


def test_of_equally_severe_patterns_of_a_line_one_counts_in_any_order_of_the_settings():
    patterns = {"a": KernelPattern("foo_driver*"), "b": KernelPattern("*queue 7 is*")}
    for order in (["a", "b"], ["b", "a"]):
        use_patterns({name: patterns[name] for name in order})
        assert name_of(FOO) == "a"


def test_a_line_that_begins_with_a_process_name_is_not_the_sites():
    assert name_of("very odd thing[4711]: segfault at 0 ip 0 sp 0 error 4") == ""


def test_without_patterns_no_rule_is_added():
    use_patterns({})
    assert name_of(FOO) == ""
    assert not any(rule.kind == "site" for rules in LITERALS.values() for rule in rules)


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="*"), max_size=8), min_size=1, max_size=5))
def test_a_pattern_matches_its_own_text_with_anything_in_the_place_of_a_wildcard(pieces):
    if len(longest_literal("*".join(pieces))) < 4:
        return
    use_patterns({"it": KernelPattern("*".join(pieces))})
    text = "zz".join(pieces)
    assert name_of(text) == "it" or (event := parse(text)) is None or event.kind != "site"
    if pieces[0].isalpha():
        assert name_of(text) == "it"


def test_a_pattern_with_many_wildcards_takes_no_time_on_a_line_that_almost_matches():
    use_patterns({"slow": KernelPattern("aaaa" + "*a" * 9 + "*b")})
    assert cpu_seconds(lambda: parse("a" * 100_000), 5.0) < 5.0


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"x": {"pattern": "ab*cd"}}, "kernel_log.patterns.x.pattern: must have 4 plain characters"),
        ({"x": {"pattern": 'ab"c\\def'}}, "kernel_log.patterns.x.pattern: must have 4 plain characters"),
        ({"x": {"pattern": ""}}, "kernel_log.patterns.x.pattern"),
        ({"x": {"pattern": "a\nbcdef"}}, "kernel_log.patterns.x.pattern: must be printable"),
        ({"x": {"pattern": "abcd" + "*" * 11}}, "kernel_log.patterns.x.pattern: must have at most"),
        ({"x": {}}, "kernel_log.patterns.x"),
        ({"x": {"pattern": "abcd", "severity": "bad"}}, "kernel_log.patterns.x.severity"),
        ({"x": {"pattern": "*abcd", "severity": "degraded"}}, "kernel_log.patterns.x: severity: must be"),
        ({"x": {"pattern": "*abcd", "severity": "critical"}}, "kernel_log.patterns.x: severity: must be"),
        ({"x": {"pattern": "**abcd*", "severity": "degraded"}}, "kernel_log.patterns.x: severity: must be"),
        ({"x y": {"pattern": "abcd"}}, "kernel_log.patterns: a name must have"),
        ({"x": "abcd"}, "kernel_log.patterns.x"),
    ],
)
def test_a_wrong_pattern_is_refused_with_its_setting(table, words):
    with pytest.raises(ConfigError, match=r"healthd\.toml") as raised:
        resolve_settings({"kernel_log": {"patterns": table}}, "healthd.toml", {}, {})
    assert words in str(raised.value)
    with pytest.raises(ConfigError):
        kernel_log_config({"kernel_log": {"patterns": table}}, "healthd.toml")


@pytest.mark.parametrize(
    "table",
    [
        {"pattern": "*abcd"},
        {"pattern": "*abcd", "severity": "info"},
        {"pattern": "abcd*", "severity": "critical"},
        {"pattern": "a*abcd", "severity": "degraded"},
    ],
)
def test_a_pattern_that_begins_with_a_wildcard_may_warn_and_others_may_drain(table):
    kernel_log = {"kernel_log": {"patterns": {"x": table}}}
    assert kernel_log_config(kernel_log, "healthd.toml").patterns["x"].pattern == table["pattern"]


def test_config_show_has_each_pattern_and_its_file():
    loaded = resolve_settings({"kernel_log": {"patterns": {"x": {"pattern": "abcd*"}}}}, "healthd.toml", {}, {})
    rows = {setting: (value, source) for setting, value, source in setting_rows(loaded)}
    assert rows["kernel_log.patterns.x.pattern"] == ("abcd*", "healthd.toml")


# --- findings of pattern lines


def event(text: str = FOO, at: float = 0.0):
    found = make_event(RawLine(at, text), BOOT)
    assert found is not None
    return found


def test_each_pattern_is_a_finding_of_its_own_with_the_severity_of_the_site():
    story = Story(kernel_check)
    story.hear(event(), Inventory()).hear(event("a very odd thing"), Inventory())
    found = {each.subject: each for each in story.conditions.values() if each.code == "kernel/pattern"}
    assert {name: each.severity for name, each in found.items()} == {
        "foo_stuck": Severity.DEGRADED,
        "anywhere": Severity.WARNING,
    }
    assert {each.clears for each in found.values()} == {Clears.WINDOW}
    assert story.drained
    assert not story.requeued


def by_scan(lines: list[str], search: int = -1) -> list[tuple[str, Severity, str]]:
    block = Block.from_lines(1, [f"[  {number}.000001] {line}".encode() for number, line in enumerate(lines, 1)])
    found = judge(events([block], time.time(), Tally()), correlate_all())
    return [(one.code, one.severity, one.meaning.part) for one in found]


@pytest.mark.parametrize("blocks_without_re2", [0, 1000])
def test_scan_judges_such_a_line_as_the_daemon_does(monkeypatch, blocks_without_re2):
    monkeypatch.setattr(candidates, "BLOCKS_WITHOUT_RE2", blocks_without_re2)
    lines = ["usb 1-1: new device", FOO, "a very odd thing", "another line", EVICTED]
    found = by_scan(lines)
    assert ("kernel/pattern", Severity.DEGRADED, "foo_stuck") in found
    assert ("kernel/pattern", Severity.WARNING, "anywhere") in found
    (by_daemon,) = built_in_checks({"kernel"})["kernel"].correlate([event()], Inventory(), kernel_check.Config())[0]
    assert (by_daemon.severity, by_daemon.subject) == (Severity.DEGRADED, "foo_stuck")


def test_scan_finds_a_line_that_its_log_writes_with_escapes():
    use_patterns({"quoted": KernelPattern('driver "é" is very odd')})
    entry = {"__REALTIME_TIMESTAMP": "1700000000000000", "_TRANSPORT": "kernel", "MESSAGE": 'driver "é" is very odd'}
    block = Block.from_lines(1, [json.dumps(entry).encode()])
    (one,) = judge(events([block], time.time(), Tally()), correlate_all())
    assert (one.code, one.meaning.part) == ("kernel/pattern", "quoted")


def test_scan_shows_the_line_of_another_program_as_no_fault_of_the_node():
    found = by_scan(["systemd[1]: foo_driver 1: queue 7 is stuck"])
    assert [severity for code, severity, _ in found if code == "kernel/pattern" and severity > Severity.WARNING] == []


def test_healthd_scan_takes_the_patterns_of_a_settings_file(tmp_path):
    log, settings = tmp_path / "log", tmp_path / "healthd.toml"
    log.write_text(f"[    1.000001] Linux version 6.1\n[    2.000001] {FOO}\n")
    settings.write_text('[kernel_log.patterns.foo_stuck]\npattern = "foo_driver *stuck"\nseverity = "degraded"\n')
    settings.chmod(0o644)

    def scan(*words: str | Path) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "healthd", "scan", str(log), "--json", *map(str, words)]
        return subprocess.run(argv, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[4])

    found = scan("--config", settings)
    assert found.returncode == 2
    shown = [json.loads(line) for line in found.stdout.splitlines()]
    assert [(each["code"], each["pattern"]) for each in shown] == [("kernel/pattern", "foo_stuck")]
    settings.write_text('[kernel_log.patterns.foo_stuck]\npattern = "f*"\n')
    refused = scan("--config", settings)
    assert refused.returncode == 64
    assert "kernel_log.patterns.foo_stuck.pattern" in refused.stderr
