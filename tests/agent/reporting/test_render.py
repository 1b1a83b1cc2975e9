"""Tests of the printed output: no text of a document reaches the terminal unescaped, and times are easy to read."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.reporting import render
from healthd.agent.reporting.render import MAX_SHOWN
from healthd.common.duration import duration
from healthd.common.model import Clears, Health, Outcome, Severity
from healthd.common.page import Page, ago, plain, time_ahead

NOW = 1_800_000_000.0
PAGE = Page(100)


def condition(**changes: Any) -> dict[str, Any]:
    return {
        "check": "gpu_xid",
        "instance": "",
        "code": "gpu_xid/79",
        "severity": "critical",
        "subject": "0000:61:00.0",
        "message": "Xid 79: GPU has fallen off the bus",
        "clears": "reboot",
        "window_seconds": 0.0,
        "remedy": "power_cycle",
        "state": "open",
        "since": NOW - 200,
        "first_seen": NOW - 200,
        "last_seen": NOW - 20,
        "count": 2,
        "job": "",
        "history": False,
        **changes,
    }


def finding(code: str = "gpu_ecc/uncorrected", severity: str = "critical", **changes: Any) -> dict[str, Any]:
    subject = "0000:61:00.0"
    defaults = {"code": code, "severity": severity, "subject": subject, "message": "m", "clears": "pass"}
    return {**defaults, "confirm_seconds": 0.0, **changes}


def result(*findings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "check": "gpu_ecc",
        "instance": "",
        "outcome": "completed",
        "started": NOW - 12,
        "duration_seconds": 0.02,
        "error": "",
        "nothing_to_check": None,
        "findings": list(findings),
        "observations": [],
        **changes,
    }


def check_document(**changes: Any) -> dict[str, Any]:
    """Return the document of `healthd check`."""
    return {
        "version": "1",
        "node": "n1",
        "time": NOW,
        "health": "healthy",
        "conditions": [],
        "limits": [],
        "unknown": [],
        "results": [result()],
        "without_result": {},
        **changes,
    }


def status_document(**changes: Any) -> dict[str, Any]:
    """Return the document of `healthd status`."""
    return {
        **check_document(),
        "mode": "act",
        "started": NOW - 3 * 3600,
        "interval_seconds": 300.0,
        "cleared": [],
        "decision": {"action": "leave", "text": "nothing to do", "would": ""},
        "slurm": {"state": None, "reason": "", "reason_user": "", "owner": "", "read_at": 0.0, "problem": ""},
        "incidents": [],
        "kernel_log": {
            "source": "kmsg",
            "alive": True,
            "lines_total": 7,
            "events_total": 1,
            "lost_total": 0,
            "last_line": NOW - 5,
            "problem": "",
        },
        "round": {"number": 4, "started": NOW - 12, "seconds": 0.1, "next_at": NOW + 288},
        "pause": None,
        "blocked": {},
        "problems": [],
        "problem_commands": [],
        "inventory": {"gpus": [], "devices": [], "driver_version": "", "dmi_product": ""},
        **changes,
    }


def check(page: Page = PAGE, **changes: Any) -> str:
    return render.check(check_document(**changes), page)


def status(page: Page = PAGE, **changes: Any) -> str:
    return render.status(status_document(**changes), NOW, page)


# --- times


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "just now"), (-3, "just now"), (1, "1 s ago"), (12.7, "12 s ago"), (119, "119 s ago"), (180, "3 min ago"),
     (7199, "119 min ago"), (7200, "2 h ago"), (86399, "23 h ago")],
)  # fmt: skip
def test_ago_returns_time_with_unit(seconds, expected):
    assert ago(NOW - seconds, NOW) == expected


def test_ago_returns_local_date_after_a_day():
    assert ago(NOW - 86400, NOW) == time.strftime("%Y-%m-%d %H:%M", time.localtime(NOW - 86400))
    assert ago(0.0, NOW) == "never"


@pytest.mark.parametrize(("seconds", "expected"), [(-5, "now"), (0.3, "now"), (5.5, "in 5 s"), (1800, "in 30 min")])
def test_time_ahead_returns_time_with_unit(seconds, expected):
    assert time_ahead(NOW + seconds, NOW) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.0234, "0.02 s"), (10.0, "10 s"), (60, "60 s"), (300, "5 min"), (3600, "60 min"), (86400, "24 h"),
     (604800, "7 days")],
)  # fmt: skip
def test_duration_has_single_unit(seconds, expected):
    assert duration(seconds) == expected


@given(st.floats(0, 4e9), st.floats(0, 4e9))
def test_any_two_times_can_be_formatted(first, second):
    assert ago(first, second)
    assert time_ahead(first, second)


# --- check


def test_check_row_shows_worst_finding():
    text = check(results=[result(finding("gpu_ecc/disabled", "warning"), finding(), finding("gpu_ecc/x", "info"))])
    assert "gpu_ecc  completed  0.02 s  critical  gpu_ecc/uncorrected 0000:61:00.0 (+2 more)\n" in text


def test_check_lists_passed_checks_in_single_paragraph():
    passed = [result(check=f"quiet{n}") for n in range(render.MAX_ROWS)]
    assert check(results=passed).count("completed") == render.MAX_ROWS
    results = [
        *passed,
        result(check="mount", instance="/data"),
        result(finding()),
        result(check="cpu", outcome="failed"),
    ]
    text = check(results=results)
    assert [line.split()[0] for line in text.splitlines()[2:5]] == ["check", "gpu_ecc", "cpu"]
    assert " ".join(text.split()).endswith("9 checks passed: mount /data, " + ", ".join(f"quiet{n}" for n in range(8)))
    status_text = status(results=results)
    assert re.search(r"9 checks passed \(.* 11 s ago\): mount /data, ", status_text)
    assert re.search(r"(?m)^  cpu +failed +11 s ago", status_text)


def test_check_lists_checks_with_nothing_to_check_separately():
    gpu, baseline = (
        {"reason": "no NVIDIA GPU", "fix": ""},
        {"reason": "no baseline", "fix": "healthd baseline --write"},
    )
    results = [
        *(result(check=f"gpu_{n}", nothing_to_check=gpu) for n in range(render.MAX_ROWS)),
        result(check="cpu", nothing_to_check=baseline),
        result(check="clock"),
    ]
    lines = check(
        results=results, without_result={"kernel_log_only": ["sxid"], "not_set_up": ["exec", "mount"]}
    ).splitlines()
    assert [line.split()[0] for line in lines[2:] if not line.startswith(" ")] == ["1", "9", "1", "2"]
    assert [line.partition(":")[2].strip() for line in lines[2:]] == [
        "clock",
        "",
        "gpu_0, gpu_1, gpu_2, gpu_3, gpu_4, gpu_5, gpu_6, gpu_7",
        "cpu",
        "sxid",
        "exec, mount",
    ]
    assert "no NVIDIA GPU" in lines[4]
    assert "(healthd baseline --write)" in lines[5]
    assert re.search(r"(?m)^cpu +completed +0.02 s .*: no baseline$", check(results=results[-2:]))


def test_healthd_limits_are_printed_below_health():
    status_text = status(health="warning", limits=["the kernel log is not read: no such file"]).splitlines()
    assert status_text[:2] == ["n1: warning", "  the kernel log is not read: no such file"]
    assert "Problems with healthd\n  no kernel log\n" in check(health="warning", limits=["no kernel log"])


def test_check_row_names_instance():
    assert re.search(r"(?m)^mount /data  timed out  10 s$", check(results=[result(
        check="mount", instance="/data", outcome="timed_out", duration_seconds=10.0)]))  # fmt: skip


def test_check_shows_condition_message_and_ending():
    text = check(conditions=[condition(history=False)])
    expected = [
        "Found",
        "  critical  gpu_xid/79 0000:61:00.0",
        "    Xid 79: GPU has fallen off the bus",
        "    clears after: a reboot",
    ]
    assert "\n".join(expected) in text


def test_check_marks_history():
    text = check(conditions=[condition(severity="info", history=True)])
    assert "2 times, last 20 s ago: history, " in text


def test_check_shows_repaired_command_for_operator_condition():
    text = check(conditions=[condition(clears="operator")])
    assert "clears after: healthd repaired gpu_xid/79 0000:61:00.0" in text


def test_status_shows_ack_with_user_why_and_until():
    ack = {"until": NOW + 7200, "why": "cable is on its way", "who": "ann (uid 1000)"}
    text = status(conditions=[condition(state="acknowledged", ack=ack)])
    assert "last 20 s ago, by ann (uid 1000), ends in 2 h: cable is on its way" in " ".join(text.split())


def test_check_for_replay_shows_recording_date():
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime(NOW))
    assert render.check(check_document(), PAGE, replayed=True).startswith(f"n1: healthy, recorded on {date}\n")


def test_check_shows_checks_without_result():
    assert check(unknown=["gpu_ecc failed: no"]).endswith("\n  gpu_ecc failed: no\n")


def test_check_merges_equal_reasons_for_no_result():
    text = check(unknown=["gpu_ecc waits for worker 9", "mount /data failed: no", "gpu_mig waits for worker 9"])
    assert text.endswith("\nNo result\n  gpu_ecc, gpu_mig: waits for worker 9\n  mount /data failed: no\n")


@pytest.mark.parametrize("member", [*Severity.__members__, *Clears.__members__, *Outcome.__members__])
def test_check_shows_every_enum_member(member):
    member = member.lower()
    if member.upper() in Severity.__members__:
        assert member in check(conditions=[condition(severity=member)], results=[result(finding(severity=member))])
    elif member.upper() in Clears.__members__:
        assert "clears after: " in check(conditions=[condition(clears=member)])
    else:
        assert member.replace("_", " ") in check(results=[result(outcome=member)])


@pytest.mark.parametrize("health", [health.value for health in Health])
def test_check_starts_with_coloured_health(health):
    assert check(health=health).startswith(f"n1: {health}\n")
    assert re.match(rf"n1: \033\[[0-9;]+m{health}\033\[0m\n", check(Page(100, colour=True), health=health))


# --- status


def test_status_for_healthy_node():
    first, *sections = status().split("\n\n")
    assert first == "n1: healthy"
    assert [section.splitlines()[0] for section in sections] == ["Open conditions", "Slurm", "Checks", "Service"]
    open_conditions, _, checks, service = (section.splitlines()[1:] for section in sections)
    assert open_conditions == ["  none"]
    assert [row.split() for row in checks[1:]] == [["gpu_ecc", "completed", "11", "s", "ago", "0.02", "s"]]
    assert re.findall(r"\d+ \w+", service[0]) == ["3 h", "4 began", "12 s", "4 min"]
    assert re.findall(r"\d+ \w+", service[1]) == ["7 lines", "1 event", "5 s"]


def test_status_shows_condition_age_count_job_and_ending():
    text = status(conditions=[condition(job="123")])
    assert re.search(r"(?m)^    open .*3 min ago, .*2 times, .*20 s ago, job 123; clears after: a reboot$", text)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("IDLE+DRAIN", "drained"),
        ("IDLE+DRAIN+NOT_RESPONDING", "drained"),
        ("DOWN+DRAIN", "drained"),
        ("DOWN+DRAIN+NOT_RESPONDING", "drained"),
        ("IDLE+COMPLETING+DRAIN", "draining"),
        ("DOWN+COMPLETING+DRAIN", "draining"),
        ("ALLOCATED+DRAIN", "draining"),
        ("MIXED+DRAIN", "draining"),
    ],
)
def test_status_first_line_shows_drained_without_jobs(state, expected):
    slurm = {**status_document()["slurm"], "state": state.split("+"), "owner": "healthd"}
    assert status(slurm=slurm).splitlines()[0].endswith(f", {expected} (by healthd)")


@pytest.mark.parametrize(
    ("jobs", "suffix"), [([], ""), (["12"], ", 1 job requeued"), (["12", "14"], ", 2 jobs requeued")]
)
def test_status_first_line_counts_requeued_jobs(jobs, suffix):
    slurm = {**status_document()["slurm"], "state": ["DRAIN", "IDLE"], "owner": "healthd", "requeued": jobs}
    assert status(slurm=slurm).splitlines()[0].endswith(f", drained (by healthd){suffix}")


def test_status_shows_slurm_state_with_reason_and_age():
    slurm = {
        "state": ["DRAIN", "IDLE"],
        "reason": "healthd: gpu_xid/79",
        "reason_user": "root",
        "owner": "healthd",
        "read_at": NOW - 12,
        "problem": "slurmctld does not answer",
    }
    text = status(slurm=slurm)
    assert re.search(r'(?m)DRAIN\+IDLE, reason "healthd: gpu_xid/79" .* root, .* 12 s ago$', text)
    assert "slurmctld" not in text, "it is listed with the problems"


def test_status_shows_pause_hung_worker_and_problems():
    text = status(
        pause={"until": NOW + 1800, "why": "driver upgrade", "who": "root (uid 0)"},
        blocked={"nvml": 4711},
        problems=["the ledger cannot be copied"],
        problem_commands=[""],
        cleared=[condition(cleared_at=NOW - 60, cleared_by="repaired by root")],
    )
    assert re.search(r"(?m)^  paused by root \(uid 0\), .* 30 min: driver upgrade$", text)
    assert "now: healthd unpause\n" in text
    assert re.search(r"\n  worker 4711 .* nvml.*\n    next: ps -o pid,", text)
    assert ",args -p 4711\n" in text
    assert "cannot be copied\n  worker" in text
    assert "  cleared 60 s ago: gpu_xid/79 0000:61:00.0 (repaired by root)\n" in text


def test_status_shows_problems_above_slurm_with_fix():
    hold = {"since": NOW - 300, "until": NOW + 60, "times": 2}
    status_text = status(
        problems=["no metrics page: in use", "another"],
        problem_commands=["ss -ltnp", ""],
        conditions=[condition()],
        slurm={**status_document()["slurm"], "fleet_hold": hold},
    )
    problems = [
        "    details: healthd explain gpu_xid/79 0000:61:00.0",
        "",
        "Problems with healthd",
        "  no metrics page: in use",
        "    next: ss -ltnp",
        "  another",
        "",
        "Slurm",
        "  state: not queried",
        "  decision: nothing to do",
        "  the drain waits for the fleet limit since 5 min ago, delayed 2 times; next attempt in 60 s",
        "    next: sinfo -R",
    ]
    assert "\n".join(problems) in status_text


def test_status_shows_next_command_unwrapped():
    stale_mount = condition(code="mount/stale", subject="/mnt/a long name/" + "x" * 60, clears="operator")
    output = status(Page(40), conditions=[condition(), stale_mount]).splitlines()
    commands = [line.rpartition(": ")[2] for line in output]
    assert "healthd explain gpu_xid/79 0000:61:00.0" in commands
    assert "healthd record" in commands
    assert "systemctl poweroff" in commands
    assert f"healthd repaired mount/stale '/mnt/a long name/{'x' * 60}'" in commands


def test_status_commands_have_runtime_dir_option():
    text = render.status(
        status_document(conditions=[condition(clears="operator")], pause={"until": NOW, "why": "w", "who": "ann"}),
        NOW,
        PAGE,
        "--runtime-dir 'a b'",
    )
    assert "healthd repaired --runtime-dir 'a b' gpu_xid/79 0000:61:00.0\n" in text
    assert "healthd unpause --runtime-dir 'a b'\n" in text


def test_check_reports_daemon_state_for_kernel_log_checks():
    log = status_document()["kernel_log"]
    daemon_report = {"checks": ["gpu_xid"], "since": NOW - 7200, "kernel_log": log, "conditions": [], "problem": ""}
    expected = [
        "Reported by the daemon",
        "  gpu_xid only reads the kernel log and cannot run on request",
        "  kernel log: kmsg, 7 lines, 1 event, last line 5 s ago; the daemon was started 2 h ago",
        "  no open conditions",
    ]
    assert "\n".join(expected) in check(from_daemon=daemon_report, results=[result(check="gpu_xid")])
    text = check(from_daemon={**daemon_report, "checks": ["gpu_xid", "sxid"], "conditions": [condition(ack=None)]})
    assert "  gpu_xid, sxid only read the kernel log" in text
    assert "\n\n\n" not in check(from_daemon=daemon_report, results=[result(check="gpu_xid")]), "one empty line above"
    assert "; clears after: a reboot\n    first, " in text


def test_status_before_first_round():
    text = status(round={"number": 0, "started": 0.0, "seconds": 0.0, "next_at": 0.0}, results=[])
    assert "; no round yet\n" in text
    assert "\nChecks\n  no check " in text


def test_status_shows_incident():
    incident = {"first": "gpu_xid/48 0000:1b:00.0", "then": ["gpu_xid/79 0000:1b:00.0"]}
    text = " ".join(status(incidents=[incident]).split())
    assert "one incident: gpu_xid/48 0000:1b:00.0, then gpu_xid/79 0000:1b:00.0" in text


def test_status_says_why_kernel_log_is_not_read():
    log = {"source": "kmsg", "alive": False, "problem": "Operation not permitted"}
    assert "  kernel log: kmsg, not read: Operation not permitted\n" in status(kernel_log=log)


# --- layout


@pytest.mark.parametrize("drain", [0, 1, MAX_SHOWN, 64])
def test_status_in_condition_storm_shows_draining_and_worst(drain):
    def storm_condition(number: int, severity: str, **fields: Any) -> dict[str, Any]:
        return condition(subject=f"part{number:03}", severity=severity, **fields)

    draining = [storm_condition(number, "degraded") for number in range(drain)]
    other_conditions = [
        *(storm_condition(500 + number, "critical", observed=True) for number in range(5)),
        *(storm_condition(600 + number, "warning") for number in range(123)),
    ]
    output = status(conditions=[*other_conditions[:5], *draining, *other_conditions[5:]])
    parts = [line.split()[2] for line in output.splitlines() if line.split()[1:2] == ["gpu_xid/79"]]
    remaining = max(MAX_SHOWN - drain, 0)
    assert sorted(parts) == sorted(c["subject"] for c in [*draining, *other_conditions[:remaining]])
    assert f"  and {128 - remaining} more: healthd status --json\n" in output
    short = status(conditions=other_conditions[:MAX_SHOWN])
    assert "more: healthd status" not in short


def test_status_names_first_conditions_in_large_incident():
    later = [f"gpu_xid/31 part{number:03}" for number in range(MAX_SHOWN + 7)]
    text = " ".join(status(incidents=[{"first": "gpu_xid/79", "then": later}]).split())
    assert f"{later[MAX_SHOWN - 1]} and 7 more" in text
    assert later[MAX_SHOWN] not in text


def test_wrap_keeps_long_words_whole():
    lines = Page(40).wrap("word " * 20 + "/a/very/long/path/that/is/longer/than/one/line/of/the/page end", "    ")
    assert all(len(line) <= 40 or "/path/" in line for line in lines)
    assert all(line.startswith("    ") for line in lines)
    assert len(Page(10).wrap("word " * 20)) == len(Page(40).wrap("word " * 20))


def test_long_row_is_folded_only_on_terminal():
    row = ("gpu_ecc", "5 min", "10 s", "word " * 20)
    folded = render.checks([row], Page(60, fold=True)).splitlines()
    assert len(folded) > 2
    assert all(len(line) <= 60 for line in folded)
    assert all(line.startswith(" " * len("gpu_ecc  interval  timeout  ") + "word") for line in folded[2:])
    assert len(render.checks([row], Page(60)).splitlines()) == 2


def test_settings_column_is_widened_only_for_long_row():
    output = render.settings([("a", "x" * 90, "here"), ("b", 1, "there")], PAGE).splitlines()
    assert output[1:] == ['a        "' + "x" * 90 + '"  here', "b        1      there"]


def test_output_without_colour_has_no_escape():
    assert "\033" not in status(conditions=[condition()]) + check(conditions=[condition()])


@given(st.text())
def test_plain_is_printable(text):
    assert plain(text).isprintable()


@given(st.text(max_size=20), st.integers(1, 200))
def test_no_document_text_reaches_terminal_unescaped(text, width):
    page = Page(width)
    condition_fields = condition(message=text, subject=text, job=text, code=text, cleared_at=NOW, cleared_by=text)
    slurm = {"state": [text], "reason": text, "reason_user": text, "owner": text, "read_at": NOW, "problem": text}
    problems = {"problems": [text], "problem_commands": [text]}
    found_result = result(finding(subject=text), instance=text)
    outputs = [
        render.check(
            check_document(node=text, conditions=[condition_fields], results=[found_result], unknown=[text]), page
        ),
        status(
            page,
            node=text,
            conditions=[condition_fields],
            cleared=[condition_fields],
            results=[found_result],
            slurm=slurm,
            **problems,
        ),
        status(page, blocked={text: 1}, pause={"until": NOW, "why": text, "who": text}, decision={"text": text}),
        render.settings([(text, text, text), (text, [text], text)], page),
    ]
    assert all(line.isprintable() for output in outputs for line in output.split("\n"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, "true"), (300.0, "300"), (0.5, "0.5"), ("a", '"a"'), (["a", 1], '["a", 1]'), ({}, "{}"),
     ({"a/b": "info"}, '{ "a/b" = "info" }')],
)  # fmt: skip
def test_settings_are_shown_as_toml(value, expected):
    assert render.settings([("name", value, "default")], PAGE).splitlines()[1].split(None, 1)[1].startswith(expected)


def test_status_shows_nvlink_domain() -> None:
    inventory = {**status_document()["inventory"], "domain": "4f9a1b2c-0000-0000-0000-00000000000a"}
    text = status(inventory={**inventory, "domain_id": "1a2b3c4d"})
    assert "NVLink domain: 1a2b3c4d (4f9a1b2c-0000-0000-0000-00000000000a)" in text
    assert "NVLink domain" not in status()
    assert "NVLink domain" not in status(inventory={**inventory, "domain": None, "domain_id": ""})
