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


def pattern_name(text: str) -> str:
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
def test_pattern_matches_from_message_start(text, name):
    assert pattern_name(text) == name


def test_built_in_rule_takes_precedence_over_pattern():
    event = parse("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=x, GPU has fallen off the bus.")
    assert event is not None
    assert (event.kind, event.code) == ("xid", "79")
    assert pattern_name("NVRM: Xid of a form that no rule reads") == "xid"


@pytest.mark.parametrize("names", [("info", "degraded", "warning"), ("degraded", "warning", "info")])
def test_most_severe_matching_pattern_counts(names):
    texts = {"info": "foo_driver*", "degraded": "foo_driver *stuck", "warning": "*queue 7 is*"}
    use_patterns({name: KernelPattern(texts[name], Severity[name.upper()]) for name in names})
    assert pattern_name(FOO) == "degraded"


def test_equally_severe_patterns_match_independently_from_order():
    patterns = {"a": KernelPattern("foo_driver*"), "b": KernelPattern("*queue 7 is*")}
    for order in (["a", "b"], ["b", "a"]):
        use_patterns({name: patterns[name] for name in order})
        assert pattern_name(FOO) == "a"


def test_pattern_does_not_match_process_name():
    assert pattern_name("very odd thing[4711]: segfault at 0 ip 0 sp 0 error 4") == ""


def test_use_patterns_without_patterns_adds_no_rule():
    use_patterns({})
    assert pattern_name(FOO) == ""
    assert not any(rule.kind == "site" for rules in LITERALS.values() for rule in rules)


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="*"), max_size=8), min_size=1, max_size=5))
def test_pattern_matches_text_with_any_wildcard_text(pieces):
    if len(longest_literal("*".join(pieces))) < 4:
        return
    use_patterns({"it": KernelPattern("*".join(pieces))})
    text = "zz".join(pieces)
    assert pattern_name(text) == "it" or (event := parse(text)) is None or event.kind != "site"
    if pieces[0].isalpha():
        assert pattern_name(text) == "it"


def test_pattern_with_many_wildcards_is_fast():
    use_patterns({"slow": KernelPattern("aaaa" + "*a" * 9 + "*b")})
    assert cpu_seconds(lambda: parse("a" * 100_000), 5.0) < 5.0


@pytest.mark.parametrize(
    ("table", "message"),
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
def test_invalid_pattern_is_refused_with_setting(table, message):
    with pytest.raises(ConfigError, match=r"healthd\.toml") as raised:
        resolve_settings({"kernel_log": {"patterns": table}}, "healthd.toml", {}, {})
    assert message in str(raised.value)
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
def test_pattern_severity_depends_on_leading_wildcard(table):
    kernel_log = {"kernel_log": {"patterns": {"x": table}}}
    assert kernel_log_config(kernel_log, "healthd.toml").patterns["x"].pattern == table["pattern"]


def test_setting_rows_have_each_pattern_and_file():
    loaded = resolve_settings({"kernel_log": {"patterns": {"x": {"pattern": "abcd*"}}}}, "healthd.toml", {}, {})
    rows = {setting: (value, source) for setting, value, source in setting_rows(loaded)}
    assert rows["kernel_log.patterns.x.pattern"] == ("abcd*", "healthd.toml")


# --- findings of pattern lines


def event(text: str = FOO, timestamp: float = 0.0):
    new_event = make_event(RawLine(timestamp, text), BOOT)
    assert new_event is not None
    return new_event


def test_pattern_finding_has_site_severity():
    story = Story(kernel_check)
    story.take_event(event(), Inventory()).take_event(event("a very odd thing"), Inventory())
    by_part = {
        condition.subject: condition for condition in story.conditions.values() if condition.code == "kernel/pattern"
    }
    assert {name: condition.severity for name, condition in by_part.items()} == {
        "foo_stuck": Severity.DEGRADED,
        "anywhere": Severity.WARNING,
    }
    assert {condition.clears for condition in by_part.values()} == {Clears.WINDOW}
    assert story.drained
    assert not story.requeued


def scan_findings(lines: list[str], search: int = -1) -> list[tuple[str, Severity, str]]:
    block = Block.from_lines(1, [f"[  {number}.000001] {line}".encode() for number, line in enumerate(lines, 1)])
    judged = judge(events([block], time.time(), Tally()), correlate_all())
    return [(finding.code, finding.severity, finding.meaning.part) for finding in judged]


@pytest.mark.parametrize("blocks_without_re2", [0, 1000])
def test_scan_judges_pattern_like_daemon(monkeypatch, blocks_without_re2):
    monkeypatch.setattr(candidates, "BLOCKS_WITHOUT_RE2", blocks_without_re2)
    lines = ["usb 1-1: new device", FOO, "a very odd thing", "another line", EVICTED]
    scan_result = scan_findings(lines)
    assert ("kernel/pattern", Severity.DEGRADED, "foo_stuck") in scan_result
    assert ("kernel/pattern", Severity.WARNING, "anywhere") in scan_result
    (daemon_finding,) = built_in_checks({"kernel"})["kernel"].correlate([event()], Inventory(), kernel_check.Config())[
        0
    ]
    assert (daemon_finding.severity, daemon_finding.subject) == (Severity.DEGRADED, "foo_stuck")


def test_scan_finds_pattern_in_escaped_line():
    use_patterns({"quoted": KernelPattern('driver "é" is very odd')})
    entry = {"__REALTIME_TIMESTAMP": "1700000000000000", "_TRANSPORT": "kernel", "MESSAGE": 'driver "é" is very odd'}
    block = Block.from_lines(1, [json.dumps(entry).encode()])
    (finding,) = judge(events([block], time.time(), Tally()), correlate_all())
    assert (finding.code, finding.meaning.part) == ("kernel/pattern", "quoted")


def test_scan_does_not_drain_for_line_from_other_program():
    scan_result = scan_findings(["systemd[1]: foo_driver 1: queue 7 is stuck"])
    assert [
        severity for code, severity, _ in scan_result if code == "kernel/pattern" and severity > Severity.WARNING
    ] == []


def test_scan_command_takes_patterns_from_settings_file(tmp_path):
    log, settings = tmp_path / "log", tmp_path / "healthd.toml"
    log.write_text(f"[    1.000001] Linux version 6.1\n[    2.000001] {FOO}\n")
    settings.write_text('[kernel_log.patterns.foo_stuck]\npattern = "foo_driver *stuck"\nseverity = "degraded"\n')
    settings.chmod(0o644)

    def scan(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "healthd", "scan", str(log), "--json", *map(str, arguments)]
        return subprocess.run(argv, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[4])

    scan_result = scan("--config", settings)
    assert scan_result.returncode == 2
    records = [json.loads(line) for line in scan_result.stdout.splitlines()]
    assert [(record["code"], record["pattern"]) for record in records] == [("kernel/pattern", "foo_stuck")]
    settings.write_text('[kernel_log.patterns.foo_stuck]\npattern = "f*"\n')
    failed_scan = scan("--config", settings)
    assert failed_scan.returncode == 64
    assert "kernel_log.patterns.foo_stuck.pattern" in failed_scan.stderr
