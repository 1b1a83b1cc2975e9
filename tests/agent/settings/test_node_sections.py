"""Tests of [[node]] sections: settings for single nodes, so that one file serves all nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.settings import node_sections
from healthd.agent.settings.config import ConfigError
from healthd.agent.settings.effective import find_mistakes, resolve_settings, setting_rows
from healthd.agent.settings.registry import built_in_checks
from healthd.common.codec import ConvertError
from healthd.common.model import Mode
from healthd.common.toml import parse

FILE = "/etc/healthd/healthd.toml"
CHECKS = built_in_checks()
TEXT = """
interval_seconds = 200
[slurm]
max_restarts = 3
[checks.gpu_count]
expected = 4
[checks.gpu_nvlink]
links = 12

[[node]]
match = ["gpu-[001-128]", "!gpu-042", "login1"]
mode = "drain"
[node.slurm]
admin_comment = false
[node.checks.gpu_count]
expected = 8

[[node]]
match = ["gpu-[001-002]"]
mode = "act"
[node.checks.mount."/data"]
fstype = "nfs"
"""


def values(node: str, text: str = TEXT) -> dict[str, tuple[Any, str]]:
    loaded = resolve_settings(parse(text), FILE, {"node_name": ("--node-name", node)}, CHECKS)
    return {setting: (value, source) for setting, value, source in setting_rows(loaded)}


def section(*match: str, **table: Any) -> node_sections.Section:
    (parsed,) = node_sections.sections({"node": [{"match": list(match), **table}]})
    return parsed


@pytest.mark.parametrize(
    ("node", "expected"),
    [("gpu-001", 8), ("gpu-128", 8), ("login1", 8), ("gpu-042", 4), ("gpu-129", 4), ("gpu-1", 4), ("login11", 4)],
)
def test_section_applies_to_nodes_in_host_lists(node, expected):
    assert values(node)["checks.gpu_count.expected"][0] == expected


def test_later_section_overrides_earlier_section():
    node_values = values("gpu-001")
    assert node_values["mode"] == ("act", f"{FILE} [[node]] 2")
    assert node_values["checks.gpu_count.expected"] == (8, f"{FILE} [[node]] 1")
    assert node_values["slurm.admin_comment"] == (False, f"{FILE} [[node]] 1")
    assert node_values["slurm.max_restarts"] == (3, FILE)
    assert node_values["checks.gpu_nvlink.links"] == (12, FILE)
    assert node_values["interval_seconds"] == (200, FILE)
    assert node_values['checks.mount."/data".fstype'] == ("nfs", f"{FILE} [[node]] 2")
    assert 'checks.mount."/data".fstype' not in values("gpu-003")


def test_section_may_set_kernel_log_source():
    text = '[[node]]\nmatch = ["gpu-1"]\n[node.kernel_log]\nsource = "journal"\n'
    assert values("gpu-1", text)["kernel_log.source"] == ("journal", f"{FILE} [[node]] 1")


def test_flag_overrides_section():
    flags = {"node_name": ("--node-name", "gpu-001"), "mode": ("--mode", "observe")}
    assert resolve_settings(parse(TEXT), FILE, flags, CHECKS).settings.mode is Mode.OBSERVE


def test_section_matches_configured_or_host_name():
    text = '[[node]]\nmatch = ["{}"]\nmode = "act"\n'
    host = os.uname().nodename.partition(".")[0]
    assert resolve_settings(parse(text.format(host)), FILE, {}, CHECKS).settings.mode is Mode.ACT
    with_node_name = 'node_name = "gpu-1"\n' + text.format("gpu-1")
    assert resolve_settings(parse(with_node_name), FILE, {}, CHECKS).settings.mode is Mode.ACT


def test_excluded_nodes_alone_match_all_others():
    assert node_sections.applies_to(section("!gpu-[1-3]"), "gpu-4")
    assert not node_sections.applies_to(section("!gpu-[1-3]"), "gpu-2")


@given(st.permutations(["gpu-[1-9]", "!gpu-[2-3]", "cpu-1"]), st.integers(1, 12))
def test_host_list_order_does_not_matter(match, number):
    name = f"gpu-{number}"
    assert node_sections.applies_to(section(*match), name) == (number in (1, 4, 5, 6, 7, 8, 9))


@given(st.lists(st.text(max_size=12), max_size=3), st.text(max_size=8))
def test_any_match_is_accepted_or_refused_in_single_sentence(match, name):
    problem, parsed = "", None
    try:
        parsed = section(*match)
    except ConvertError as error:
        problem = str(error)
    assert (
        problem.startswith("[[node]] 1: match: ")
        if parsed is None
        else node_sections.applies_to(parsed, name) in (True, False)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[node]\nmatch = ["a"]', "[[node]] sections"),
        ("node = 5", "[[node]] sections"),
        ('[[node]]\nmode = "act"', "[[node]] 1: match: must be a list"),
        ('[[node]]\nmatch = "a"', "[[node]] 1: match: must be a list"),
        ("[[node]]\nmatch = []", "[[node]] 1: match: must be a list"),
        ('[[node]]\nmatch = ["a["]', '[[node]] 1: match: "a["'),
        ('[[node]]\nmatch = ["!"]', "names no node"),
        ('[[node]]\nmatch = ["gpu*"]', '[[node]] 1: match: "gpu*" is not the name of a node; write a host list'),
        ('[[node]]\nmatch = ["a", "!gpu-?"]', '[[node]] 1: match: "gpu-?"'),
        ('[[node]]\nmatch = ["ALL"]', '[[node]] 1: match: "ALL"'),
        ('[[node]]\nmatch = ["all"]', '[[node]] 1: match: "all"'),
        ('[[node]]\nmatch = ["gpu-.*"]', '[[node]] 1: match: "gpu-.*"'),
        ('[[node]]\nmatch = ["a[1-99999999]"]', "more than"),
        ('[[node]]\nmatch = ["a"]\n[[node]]\nmatch = ["b"]\nnode_name = "c"', "[[node]] 2: node_name"),
        ('[[node]]\nmatch = ["a"]\nstate_dir = "/x"', "[[node]] 1: state_dir"),
        (
            '[[node]]\nmatch = ["a"]\n[node.kernel_log.patterns.x]\npattern = "abcd"',
            "[[node]] 1: kernel_log.patterns: cannot be set for individual nodes",
        ),
        ('[[node]]\nmatch = ["a"]\n[node.kernel_log]\npatterns = {}', "[[node]] 1: kernel_log.patterns"),
    ],
)
def test_invalid_section_is_refused_on_every_node(text, message):
    with pytest.raises(ConfigError) as raised:
        values("another", text)
    assert str(raised.value).startswith(f"{FILE}: ")
    assert message in str(raised.value)
    assert any(message in mistake for mistake in find_mistakes(parse(text), FILE, CHECKS))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('mode = "acts"', "mode: "),
        ("intervall_seconds = 5", "intervall_seconds"),
        ("[node.checks.gpu_count]\nexpectd = 8", "expectd"),
        ("[node.checks.gpu_cont]\nexpected = 8", "gpu_cont"),
        ("[node.slurm]\nmax_restarts = -1", "slurm.max_restarts"),
    ],
)
def test_invalid_setting_in_section_names_section(lines, message):
    text = f'[[node]]\nmatch = ["gpu-1"]\n{lines}\n'
    with pytest.raises(ConfigError) as raised:
        values("gpu-1", text)
    assert str(raised.value).startswith(f"{FILE} [[node]] 1: ")
    assert message in str(raised.value)
    (mistake,) = find_mistakes(parse(text), FILE, CHECKS)
    assert mistake.startswith(f"{FILE} [[node]] 1: ")
    assert message in mistake


def test_config_check_applies_node_sections(tmp_path):
    path = tmp_path / "healthd.toml"
    path.write_text(TEXT)
    path.chmod(0o644)

    def run_config(*arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "healthd", "config", *arguments]
        return subprocess.run(argv, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])

    assert "mode act" in run_config("check", str(path), "--node", "gpu-002").stdout
    assert "mode drain" in run_config("check", str(path), "--node", "gpu-003").stdout
    assert "mode observe" in run_config("check", str(path), "--node", "gpu-042").stdout
    assert "mode act" in run_config("check", str(path), "--node-name", "gpu-002").stdout  # as in config show
    path.write_text(TEXT + '[[node]]\nmatch = ["far-away"]\nmode = "acts"\n')
    failed_check = run_config("check", str(path))
    assert failed_check.returncode == 64
    assert "[[node]] 3: mode" in failed_check.stderr


OVERRIDES = [
    (
        '[checks.exec.lic]\ncommand = ["/bin/true"]',
        "[node.checks.exec.lic]\nenabled = false",
        'checks.exec."lic".enabled',
        False,
    ),
    (
        '[checks.exec.nhc]\ncommand = ["/usr/sbin/nhc"]\nkind = "nhc"',
        '[node.checks.exec.nhc]\ncritical_severity = "critical"',
        'checks.exec."nhc".critical_severity',
        "critical",
    ),
    (
        "[checks.match.bios]\nfile = '/etc/passwd'\nrequires = 'root'",
        "[node.checks.match.bios]\nenabled = false",
        'checks.match."bios".enabled',
        False,
    ),
    (
        "[checks.disk_space]\nwarning_percent = 20",
        "[node.checks.disk_space]\ndegraded_percent = 12",
        "checks.disk_space.degraded_percent",
        12,
    ),
]


@pytest.mark.parametrize(("outside", "inside", "setting", "value"), OVERRIDES)
def test_section_may_change_single_check_setting(outside, inside, setting, value):
    text = f'{outside}\n[[node]]\nmatch = ["gpu-1"]\n{inside}\n'
    assert values("gpu-1", text)[setting] == (value, f"{FILE} [[node]] 1")
    assert values("gpu-2", text)[setting] != (value, f"{FILE} [[node]] 1")
    assert find_mistakes(parse(text), FILE, CHECKS) == []


@pytest.mark.parametrize(
    "inside",
    [
        "[node.checks.disk_space]\ndegraded_percent = 25",
        "[node.checks.exec]\nlic = 5",
        "[node.checks]\nexec = 5",
        "[node.checks.exec.lic]\ncomand = []",
        "[node.checks.exec.lic]\nenabled = true",
        "[node]\nchecks = 5",
    ],
)
def test_invalid_check_in_section_is_refused(inside):
    inside = inside.removeprefix("[node]\n")
    text = f'[checks.disk_space]\nwarning_percent = 20\n[[node]]\nmatch = ["gpu-1"]\n{inside}\n'
    with pytest.raises(ConfigError):
        values("gpu-1", text)
    assert [f"{FILE} [[node]] 1: " in mistake for mistake in find_mistakes(parse(text), FILE, CHECKS)] == [True]


def test_find_mistakes_checks_named_tables_and_sections():
    text = """
[checks.match.x]
file = "/etc/passwd"
requires = "(a"
[checks.match.y]
file = "etc"
forbids = "a"
[checks.exec.n]
command = ["/bin/true"]
[[node]]
match = ["gpu-1"]
[node.checks.bogus]
x = 1
[node.checks.gpu_count]
expected = "8"
[node.checks.exec.n]
comand = []
[node.checks.match.x]
file = 5
"""
    mistakes = find_mistakes(parse(text), FILE, CHECKS)
    tables = [mistake.removeprefix(FILE).split(": ")[1].split(".")[1] for mistake in mistakes]
    assert tables == [
        "match",
        "match",
        "bogus",
        "gpu_count",
        "exec",
    ]  # not match of the section: it overrides a wrong one
    assert [f"{FILE} [[node]] 1: " in mistake for mistake in mistakes] == [False, False, True, True, True]


def test_find_mistakes_names_check_mistake_once():
    text = '[checks.exec]\ntimeout_seconds = "x"\n' + "".join(
        f'[checks.exec.n{n}]\ncommand = ["/bin/true"]\n' for n in range(3)
    )
    (mistake,) = find_mistakes(parse(text), FILE, CHECKS)
    assert "timeout_seconds" in mistake


def test_find_mistakes_with_invalid_checks_continues():
    mistakes = find_mistakes({"checks": 5, "mod": "act"}, FILE, CHECKS)
    assert [mistake.startswith(f"{FILE}: ") for mistake in mistakes] == [True, True]


def test_find_mistakes_with_invalid_match_continues():
    text = """
[[node]]
match = ["a[", "b", "c*"]
node_name = "x"
mode = "acts"
[node.kernel_log]
patterns = {}
[node.checks.bogus]
[[node]]
match = "gpu-1"
intervall_seconds = 5
[node.checks.gpu_count]
expected = "8"
"""
    mistakes = find_mistakes(parse(text), FILE, CHECKS)
    locations = [mistake.removeprefix(FILE).strip(": ").split(": ")[:2] for mistake in mistakes]
    assert [(name.strip(), setting.partition(";")[0]) for name, setting in locations] == [
        ("[[node]] 1", "match"),
        ("[[node]] 1", "match"),
        ("[[node]] 1", "node_name"),
        ("[[node]] 1", "kernel_log.patterns"),
        ("[[node]] 2", "match"),
        ("[[node]] 1", "mode"),
        ("[[node]] 1", "checks.bogus"),
        ("[[node]] 2", 'unknown setting "intervall_seconds"'),
        ("[[node]] 2", "checks.gpu_count.expected"),
    ]
