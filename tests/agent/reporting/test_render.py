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
    told = {"code": code, "severity": severity, "subject": subject, "message": "m", "clears": "pass"}
    return {**told, "confirm_seconds": 0.0, **changes}


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


def looked(**changes: Any) -> dict[str, Any]:
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


def believed(**changes: Any) -> dict[str, Any]:
    """Return the document of `healthd status`."""
    return {
        **looked(),
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
    return render.check(looked(**changes), page)


def status(page: Page = PAGE, **changes: Any) -> str:
    return render.status(believed(**changes), NOW, page)


# --- times


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "just now"), (-3, "just now"), (1, "1 s ago"), (12.7, "12 s ago"), (119, "119 s ago"), (180, "3 min ago"),
     (7199, "119 min ago"), (7200, "2 h ago"), (86399, "23 h ago")],
)  # fmt: skip
def test_how_long_ago(seconds, words):
    assert ago(NOW - seconds, NOW) == words


def test_what_is_older_than_a_day_has_a_date_in_local_time():
    assert ago(NOW - 86400, NOW) == time.strftime("%Y-%m-%d %H:%M", time.localtime(NOW - 86400))
    assert ago(0.0, NOW) == "never"


@pytest.mark.parametrize(("seconds", "words"), [(-5, "now"), (0.3, "now"), (5.5, "in 5 s"), (1800, "in 30 min")])
def test_how_long_until(seconds, words):
    assert time_ahead(NOW + seconds, NOW) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0234, "0.02 s"), (10.0, "10 s"), (60, "60 s"), (300, "5 min"), (3600, "60 min"), (86400, "24 h"),
     (604800, "7 days")],
)  # fmt: skip
def test_durations_have_one_unit(seconds, words):
    assert duration(seconds) == words


@given(st.floats(0, 4e9), st.floats(0, 4e9))
def test_any_two_times_have_words(then, now):
    assert ago(then, now)
    assert time_ahead(then, now)


# --- check


def test_a_run_has_one_row_with_its_worst_finding():
    text = check(results=[result(finding("gpu_ecc/disabled", "warning"), finding(), finding("gpu_ecc/x", "info"))])
    assert "gpu_ecc  completed  0.02 s  critical  gpu_ecc/uncorrected 0000:61:00.0 (+2 more)\n" in text


def test_many_checks_that_found_nothing_are_one_paragraph_and_what_is_odd_has_a_row():
    quiet = [result(check=f"quiet{n}") for n in range(render.MAX_ROWS)]
    assert check(results=quiet).count("completed") == render.MAX_ROWS
    more = [*quiet, result(check="mount", instance="/data"), result(finding()), result(check="cpu", outcome="failed")]
    text = check(results=more)
    assert [line.split()[0] for line in text.splitlines()[2:5]] == ["check", "gpu_ecc", "cpu"]
    assert " ".join(text.split()).endswith("9 checks passed: mount /data, " + ", ".join(f"quiet{n}" for n in range(8)))
    shown = status(results=more)
    assert "9 checks passed (the oldest run 11 s ago): mount /data, " in shown
    assert re.search(r"(?m)^  cpu +failed +11 s ago", shown)


def test_a_check_with_nothing_to_check_is_not_among_those_that_passed():
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
    assert lines[2:5] == [
        "1 check passed: clock",
        "9 checks had nothing to check:",
        "  no NVIDIA GPU: gpu_0, gpu_1, gpu_2, gpu_3, gpu_4, gpu_5, gpu_6, gpu_7",
    ]
    assert lines[5:] == [
        "  no baseline (healthd baseline --write): cpu",
        "1 check only reads the kernel log: sxid",
        "2 checks are not set up: exec, mount",
    ]
    assert re.search(r"(?m)^cpu +completed +0.02 s +nothing to check: no baseline$", check(results=results[-2:]))


def test_what_limits_healthd_is_printed_below_the_health():
    shown = status(health="warning", limits=["the kernel log is not read: no such file"]).splitlines()
    assert shown[:2] == ["n1: warning", "  the kernel log is not read: no such file"]
    assert "Problems with healthd\n  no kernel log\n" in check(health="warning", limits=["no kernel log"])


def test_a_run_of_an_instance_is_named_with_it():
    assert re.search(r"(?m)^mount /data  timed out  10 s$", check(results=[result(
        check="mount", instance="/data", outcome="timed_out", duration_seconds=10.0)]))  # fmt: skip


def test_a_finding_is_told_with_its_message_and_what_ends_it():
    text = check(conditions=[condition(history=False)])
    told = [
        "Found",
        "  critical  gpu_xid/79 0000:61:00.0",
        "    Xid 79: GPU has fallen off the bus",
        "    clears after: a reboot",
    ]
    assert "\n".join(told) in text


def test_history_is_called_so():
    text = check(conditions=[condition(severity="info", history=True)])
    assert "in this boot's kernel log, 2 times, last 20 s ago: history, not evidence of" in text


def test_what_only_a_person_ends_is_told_as_the_command():
    text = check(conditions=[condition(clears="operator")])
    assert "clears after: healthd repaired gpu_xid/79 0000:61:00.0" in text


def test_who_knows_of_it_why_and_until_when_is_told():
    known = {"until": NOW + 7200, "why": "cable is on its way", "who": "ann (uid 1000)"}
    text = status(conditions=[condition(state="acknowledged", ack=known)])
    assert "last 20 s ago, by ann (uid 1000), ends in 2 h: cable is on its way" in " ".join(text.split())


def test_a_replay_says_of_when_it_is():
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(NOW))
    assert render.check(looked(), PAGE, replayed=True).startswith(f"n1: healthy, recorded on {when}\n")


def test_what_could_not_be_looked_at_is_told():
    assert check(unknown=["gpu_ecc failed: no"]).endswith("\nNo result\n  gpu_ecc failed: no\n")


def test_what_keeps_several_checks_from_looking_is_told_once():
    text = check(unknown=["gpu_ecc waits for worker 9", "mount /data failed: no", "gpu_mig waits for worker 9"])
    assert text.endswith("\nNo result\n  gpu_ecc, gpu_mig: waits for worker 9\n  mount /data failed: no\n")


@pytest.mark.parametrize("word", [*Severity.__members__, *Clears.__members__, *Outcome.__members__])
def test_every_word_of_the_model_can_be_shown(word):
    word = word.lower()
    if word.upper() in Severity.__members__:
        assert word in check(conditions=[condition(severity=word)], results=[result(finding(severity=word))])
    elif word.upper() in Clears.__members__:
        assert "clears after: " in check(conditions=[condition(clears=word)])
    else:
        assert word.replace("_", " ") in check(results=[result(outcome=word)])


@pytest.mark.parametrize("health", [health.value for health in Health])
def test_health_comes_first_and_in_its_colour(health):
    assert check(health=health).startswith(f"n1: {health}\n")
    assert re.match(rf"n1: \033\[[0-9;]+m{health}\033\[0m\n", check(Page(100, colour=True), health=health))


# --- status


def test_a_quiet_node():
    assert status().splitlines() == [
        "n1: healthy",
        "",
        "Open conditions",
        "  none",
        "",
        "Slurm",
        "  state: not queried",
        "  decision: nothing to do",
        "",
        "Checks",
        "  check    outcome    last run  took    finding",
        "  gpu_ecc  completed  11 s ago  0.02 s",
        "",
        "Service",
        "  healthd 1, mode act, started 3 h ago; round 4 began 12 s ago, the next in 4 min",
        "  kernel log: kmsg, 7 lines, 1 event, last line 5 s ago",
    ]


def test_a_condition_is_told_with_since_count_job_and_what_ends_it():
    text = status(conditions=[condition(job="123")])
    assert "    open since 3 min ago, seen 2 times, last 20 s ago, job 123; clears after: a reboot\n" in text


@pytest.mark.parametrize(
    ("state", "word"),
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
def test_first_line_shows_drained_where_no_job_is_left(state, word):
    slurm = {**believed()["slurm"], "state": state.split("+"), "owner": "healthd"}
    assert status(slurm=slurm).splitlines()[0].endswith(f", {word} (by healthd)")


@pytest.mark.parametrize(
    ("jobs", "words"), [([], ""), (["12"], ", 1 job requeued"), (["12", "14"], ", 2 jobs requeued")]
)
def test_first_line_counts_the_requeued_jobs(jobs, words):
    slurm = {**believed()["slurm"], "state": ["DRAIN", "IDLE"], "owner": "healthd", "requeued": jobs}
    assert status(slurm=slurm).splitlines()[0].endswith(f", drained (by healthd){words}")


def test_what_slurm_has_is_told_with_whose_it_is_and_how_old_that_is():
    slurm = {
        "state": ["DRAIN", "IDLE"],
        "reason": "healthd: gpu_xid/79",
        "reason_user": "root",
        "owner": "healthd",
        "read_at": NOW - 12,
        "problem": "slurmctld does not answer",
    }
    text = status(slurm=slurm)
    assert '  state: DRAIN+IDLE, reason "healthd: gpu_xid/79" set by root, read 12 s ago\n' in text
    assert "slurmctld does not answer" not in text, "it is listed with the problems"


def test_a_pause_a_hung_worker_and_trouble_are_told():
    text = status(
        pause={"until": NOW + 1800, "why": "driver upgrade", "who": "root (uid 0)"},
        blocked={"nvml": 4711},
        problems=["the ledger cannot be copied"],
        problem_commands=[""],
        cleared=[condition(cleared_at=NOW - 60, cleared_by="repaired by root")],
    )
    assert "  paused by root (uid 0), ends in 30 min: driver upgrade\n    to end the pause now: " in text
    assert "now: healthd unpause\n" in text
    assert "  worker 4711 hangs in nvml; checks that need nvml do not run\n    next: ps -o pid," in text
    assert ",args -p 4711\n" in text
    assert "  the ledger cannot be copied\n  worker" in text
    assert "  cleared 60 s ago: gpu_xid/79 0000:61:00.0 (repaired by root)\n" in text


def test_trouble_stands_above_all_conditions_with_what_mends_it():
    hold = {"since": NOW - 300, "until": NOW + 60, "times": 2}
    shown = status(
        problems=["no metrics page: in use", "another"],
        problem_commands=["ss -ltnp", ""],
        conditions=[condition()],
        slurm={**believed()["slurm"], "fleet_hold": hold},
    )
    problems = [
        "    once no job runs here (power on again at the BMC): systemctl poweroff",
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
    assert "\n".join(problems) in shown


def test_under_a_condition_stands_the_next_command_whole_also_where_the_window_is_narrow():
    stale = condition(code="mount/stale", subject="/mnt/a long name/" + "x" * 60, clears="operator")
    shown = status(Page(40), conditions=[condition(), stale]).splitlines()
    assert "    next: healthd explain gpu_xid/79 0000:61:00.0" in shown
    assert "    first, save the evidence: healthd record" in shown
    assert "    once no job runs here (power on again at the BMC): systemctl poweroff" in shown
    assert f"    after the repair: healthd repaired mount/stale '/mnt/a long name/{'x' * 60}'" in shown


def test_commands_reach_the_daemon_whose_status_is_shown():
    text = render.status(
        believed(conditions=[condition(clears="operator")], pause={"until": NOW, "why": "w", "who": "ann"}),
        NOW,
        PAGE,
        "--runtime-dir 'a b'",
    )
    assert "healthd repaired --runtime-dir 'a b' gpu_xid/79 0000:61:00.0\n" in text
    assert "healthd unpause --runtime-dir 'a b'\n" in text


def test_what_only_listens_is_told_by_the_daemons_word():
    log = believed()["kernel_log"]
    heard = {"checks": ["gpu_xid"], "since": NOW - 7200, "kernel_log": log, "conditions": [], "problem": ""}
    told = [
        "Reported by the daemon",
        "  gpu_xid only reads the kernel log and cannot run on request",
        "  kernel log: kmsg, 7 lines, 1 event, last line 5 s ago; the daemon was started 2 h ago",
        "  no open conditions",
    ]
    assert "\n".join(told) in check(from_daemon=heard, results=[result(check="gpu_xid")])
    standing = check(from_daemon={**heard, "checks": ["gpu_xid", "sxid"], "conditions": [condition(ack=None)]})
    assert "  gpu_xid, sxid only read the kernel log" in standing
    assert "\n\n\n" not in check(from_daemon=heard, results=[result(check="gpu_xid")]), "one empty line above"
    assert "    open since 3 min ago, seen 2 times, last 20 s ago; clears after: a reboot\n    next: " in standing


def test_before_the_first_round():
    text = status(round={"number": 0, "started": 0.0, "seconds": 0.0, "next_at": 0.0}, results=[])
    assert "; no round yet\n" in text
    assert "\nChecks\n  no check has run yet\n" in text


def test_conditions_of_one_incident_are_told_with_the_first_of_them():
    incident = {"first": "gpu_xid/48 0000:1b:00.0", "then": ["gpu_xid/79 0000:1b:00.0"]}
    told = " ".join(status(incidents=[incident]).split())
    assert "one incident: gpu_xid/48 0000:1b:00.0, then gpu_xid/79 0000:1b:00.0" in told


def test_a_kernel_log_that_is_not_read_is_told_with_why():
    log = {"source": "kmsg", "alive": False, "problem": "Operation not permitted"}
    assert "  kernel log: kmsg, not read: Operation not permitted\n" in status(kernel_log=log)


# --- layout


@pytest.mark.parametrize("drain", [0, 1, MAX_SHOWN, 64])
def test_a_storm_of_conditions_shows_what_drains_and_the_worst_in_full_and_counts_the_rest(drain):
    def row(number: int, severity: str, **more: Any) -> dict[str, Any]:
        return condition(subject=f"part{number:03}", severity=severity, **more)

    bad = [row(number, "degraded") for number in range(drain)]
    others = [
        *(row(500 + number, "critical", observed=True) for number in range(5)),
        *(row(600 + number, "warning") for number in range(123)),
    ]
    shown = status(conditions=[*others[:5], *bad, *others[5:]])
    parts = [line.split()[2] for line in shown.splitlines() if line.split()[1:2] == ["gpu_xid/79"]]
    room = max(MAX_SHOWN - drain, 0)
    assert sorted(parts) == sorted(c["subject"] for c in [*bad, *others[:room]])
    assert f"  and {128 - room} more: healthd status --json\n" in shown
    few = status(conditions=others[:MAX_SHOWN])
    assert "more: healthd status" not in few


def test_an_incident_of_hundreds_names_the_first_of_them():
    then = [f"gpu_xid/31 part{number:03}" for number in range(MAX_SHOWN + 7)]
    told = " ".join(status(incidents=[{"first": "gpu_xid/79", "then": then}]).split())
    assert f"{then[MAX_SHOWN - 1]} and 7 more" in told
    assert then[MAX_SHOWN] not in told


def test_paragraphs_are_wrapped_and_long_words_stay_whole():
    lines = Page(40).wrap("word " * 20 + "/a/very/long/path/that/is/longer/than/one/line/of/the/page end", "    ")
    assert all(len(line) <= 40 or "/path/" in line for line in lines)
    assert all(line.startswith("    ") for line in lines)
    assert len(Page(10).wrap("word " * 20)) == len(Page(40).wrap("word " * 20))


def test_a_long_row_goes_on_below_its_last_column_on_a_terminal_only():
    row = ("gpu_ecc", "5 min", "10 s", "word " * 20)
    folded = render.checks([row], Page(60, fold=True)).splitlines()
    assert len(folded) > 2
    assert all(len(line) <= 60 for line in folded)
    assert all(line.startswith(" " * len("gpu_ecc  interval  timeout  ") + "word") for line in folded[2:])
    assert len(render.checks([row], Page(60)).splitlines()) == 2


def test_a_very_long_value_moves_its_own_row_only():
    shown = render.settings([("a", "x" * 90, "here"), ("b", 1, "there")], PAGE).splitlines()
    assert shown[1:] == ['a        "' + "x" * 90 + '"  here', "b        1      there"]


def test_without_colour_there_is_none():
    assert "\033" not in status(conditions=[condition()]) + check(conditions=[condition()])


@given(st.text())
def test_plain_text_steers_no_terminal(text):
    assert plain(text).isprintable()


@given(st.text(max_size=20), st.integers(1, 200))
def test_nothing_that_a_document_says_steers_the_terminal(text, width):
    page = Page(width)
    bad = condition(message=text, subject=text, job=text, code=text, cleared_at=NOW, cleared_by=text)
    slurm = {"state": [text], "reason": text, "reason_user": text, "owner": text, "read_at": NOW, "problem": text}
    problems = {"problems": [text], "problem_commands": [text]}
    found = result(finding(subject=text), instance=text)
    shown = [
        render.check(looked(node=text, conditions=[bad], results=[found], unknown=[text]), page),
        status(page, node=text, conditions=[bad], cleared=[bad], results=[found], slurm=slurm, **problems),
        status(page, blocked={text: 1}, pause={"until": NOW, "why": text, "who": text}, decision={"text": text}),
        render.settings([(text, text, text), (text, [text], text)], page),
    ]
    assert all(line.isprintable() for written in shown for line in written.split("\n"))


@pytest.mark.parametrize(
    ("value", "written"),
    [(True, "true"), (300.0, "300"), (0.5, "0.5"), ("a", '"a"'), (["a", 1], '["a", 1]'), ({}, "{}"),
     ({"a/b": "info"}, '{ "a/b" = "info" }')],
)  # fmt: skip
def test_settings_are_shown_as_one_would_write_them(value, written):
    assert render.settings([("name", value, "default")], PAGE).splitlines()[1].split(None, 1)[1].startswith(written)
