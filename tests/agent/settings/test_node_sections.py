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
KNOWN = built_in_checks()
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
    loaded = resolve_settings(parse(text), FILE, {"node_name": ("--node-name", node)}, KNOWN)
    return {setting: (value, source) for setting, value, source in setting_rows(loaded)}


def section(*match: str, **table: Any) -> node_sections.Section:
    (found,) = node_sections.sections({"node": [{"match": list(match), **table}]})
    return found


@pytest.mark.parametrize(
    ("node", "expected"),
    [("gpu-001", 8), ("gpu-128", 8), ("login1", 8), ("gpu-042", 4), ("gpu-129", 4), ("gpu-1", 4), ("login11", 4)],
)
def test_a_section_holds_for_the_nodes_of_its_host_lists(node, expected):
    assert values(node)["checks.gpu_count.expected"][0] == expected


def test_a_later_section_goes_before_an_earlier_one_and_leaves_the_rest():
    found = values("gpu-001")
    assert found["mode"] == ("act", f"{FILE} [[node]] 2")
    assert found["checks.gpu_count.expected"] == (8, f"{FILE} [[node]] 1")
    assert found["slurm.admin_comment"] == (False, f"{FILE} [[node]] 1")
    assert found["slurm.max_restarts"] == (3, FILE)
    assert found["checks.gpu_nvlink.links"] == (12, FILE)
    assert found["interval_seconds"] == (200, FILE)
    assert found['checks.mount."/data".fstype'] == ("nfs", f"{FILE} [[node]] 2")
    assert 'checks.mount."/data".fstype' not in values("gpu-003")


def test_other_settings_of_the_kernel_log_may_be_in_a_section():
    text = '[[node]]\nmatch = ["gpu-1"]\n[node.kernel_log]\nsource = "journal"\n'
    assert values("gpu-1", text)["kernel_log.source"] == ("journal", f"{FILE} [[node]] 1")


def test_a_flag_goes_before_a_section():
    flags = {"node_name": ("--node-name", "gpu-001"), "mode": ("--mode", "observe")}
    assert resolve_settings(parse(TEXT), FILE, flags, KNOWN).settings.mode is Mode.OBSERVE


def test_the_name_of_the_node_is_the_files_or_the_hosts():
    text = '[[node]]\nmatch = ["{}"]\nmode = "act"\n'
    host = os.uname().nodename.partition(".")[0]
    assert resolve_settings(parse(text.format(host)), FILE, {}, KNOWN).settings.mode is Mode.ACT
    named = 'node_name = "gpu-1"\n' + text.format("gpu-1")
    assert resolve_settings(parse(named), FILE, {}, KNOWN).settings.mode is Mode.ACT


def test_lists_of_excluded_nodes_alone_hold_for_all_others():
    assert node_sections.applies_to(section("!gpu-[1-3]"), "gpu-4")
    assert not node_sections.applies_to(section("!gpu-[1-3]"), "gpu-2")


@given(st.permutations(["gpu-[1-9]", "!gpu-[2-3]", "cpu-1"]), st.integers(1, 12))
def test_the_order_of_the_host_lists_does_not_matter(match, number):
    name = f"gpu-{number}"
    assert node_sections.applies_to(section(*match), name) == (number in (1, 4, 5, 6, 7, 8, 9))


@given(st.lists(st.text(max_size=12), max_size=3), st.text(max_size=8))
def test_any_match_is_taken_or_refused_in_a_sentence(match, name):
    problem, found = "", None
    try:
        found = section(*match)
    except ConvertError as error:
        problem = str(error)
    assert (
        problem.startswith("[[node]] 1: match: ")
        if found is None
        else node_sections.applies_to(found, name) in (True, False)
    )


@pytest.mark.parametrize(
    ("text", "words"),
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
def test_a_wrong_section_is_refused_on_every_node(text, words):
    with pytest.raises(ConfigError) as raised:
        values("another", text)
    assert str(raised.value).startswith(f"{FILE}: ")
    assert words in str(raised.value)
    assert any(words in mistake for mistake in find_mistakes(parse(text), FILE, KNOWN))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('mode = "acts"', "mode: "),
        ("intervall_seconds = 5", "intervall_seconds"),
        ("[node.checks.gpu_count]\nexpectd = 8", "expectd"),
        ("[node.checks.gpu_cont]\nexpected = 8", "gpu_cont"),
        ("[node.slurm]\nmax_restarts = -1", "slurm.max_restarts"),
    ],
)
def test_a_wrong_setting_in_a_section_is_named_with_the_section(lines, words):
    text = f'[[node]]\nmatch = ["gpu-1"]\n{lines}\n'
    with pytest.raises(ConfigError) as raised:
        values("gpu-1", text)
    assert str(raised.value).startswith(f"{FILE} [[node]] 1: ")
    assert words in str(raised.value)
    (mistake,) = find_mistakes(parse(text), FILE, KNOWN)
    assert mistake.startswith(f"{FILE} [[node]] 1: ")
    assert words in mistake


def test_config_check_reads_a_file_as_a_node_does(tmp_path):
    path = tmp_path / "healthd.toml"
    path.write_text(TEXT)
    path.chmod(0o644)

    def healthd(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "healthd", "config", *words]
        return subprocess.run(argv, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])

    assert "mode act" in healthd("check", str(path), "--node", "gpu-002").stdout
    assert "mode drain" in healthd("check", str(path), "--node", "gpu-003").stdout
    assert "mode observe" in healthd("check", str(path), "--node", "gpu-042").stdout
    assert "mode act" in healthd("check", str(path), "--node-name", "gpu-002").stdout  # as in config show
    path.write_text(TEXT + '[[node]]\nmatch = ["far-away"]\nmode = "acts"\n')
    wrong = healthd("check", str(path))
    assert wrong.returncode == 64
    assert "[[node]] 3: mode" in wrong.stderr


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
def test_a_section_may_change_one_setting_of_a_check(outside, inside, setting, value):
    text = f'{outside}\n[[node]]\nmatch = ["gpu-1"]\n{inside}\n'
    assert values("gpu-1", text)[setting] == (value, f"{FILE} [[node]] 1")
    assert values("gpu-2", text)[setting] != (value, f"{FILE} [[node]] 1")
    assert find_mistakes(parse(text), FILE, KNOWN) == []


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
def test_checks_that_are_wrong_over_those_of_the_file_are_refused(inside):
    inside = inside.removeprefix("[node]\n")
    text = f'[checks.disk_space]\nwarning_percent = 20\n[[node]]\nmatch = ["gpu-1"]\n{inside}\n'
    with pytest.raises(ConfigError):
        values("gpu-1", text)
    assert [f"{FILE} [[node]] 1: " in mistake for mistake in find_mistakes(parse(text), FILE, KNOWN)] == [True]


def test_every_mistake_of_named_tables_and_of_the_checks_of_a_section_is_found():
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
    found = find_mistakes(parse(text), FILE, KNOWN)
    places = [mistake.removeprefix(FILE).split(": ")[1].split(".")[1] for mistake in found]
    assert places == [
        "match",
        "match",
        "bogus",
        "gpu_count",
        "exec",
    ]  # not match of the section: it overrides a wrong one
    assert [f"{FILE} [[node]] 1: " in mistake for mistake in found] == [False, False, True, True, True]


def test_a_wrong_setting_beside_named_tables_is_named_once():
    text = '[checks.exec]\ntimeout_seconds = "x"\n' + "".join(
        f'[checks.exec.n{n}]\ncommand = ["/bin/true"]\n' for n in range(3)
    )
    (mistake,) = find_mistakes(parse(text), FILE, KNOWN)
    assert "timeout_seconds" in mistake


def test_checks_that_are_no_table_are_named_with_the_file_and_hide_no_other_mistake():
    found = find_mistakes({"checks": 5, "mod": "act"}, FILE, KNOWN)
    assert [mistake.startswith(f"{FILE}: ") for mistake in found] == [True, True]


def test_a_wrong_match_hides_no_other_mistake_of_the_sections():
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
    found = find_mistakes(parse(text), FILE, KNOWN)
    places = [mistake.removeprefix(FILE).strip(": ").split(": ")[:2] for mistake in found]
    assert [(name.strip(), place.partition(";")[0]) for name, place in places] == [
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
