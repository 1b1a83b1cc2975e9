"""memory_edac: counted and logged errors of memory and processors."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from cpu_time import cpu_seconds
from fakes import codes, observations_named, parse_or_error, run_check, run_until_error
from hypothesis import given
from hypothesis import strategies as st
from kernel_lines import event_of, findings_of
from story import Story
from trees import captured_text, write

from healthd.agent.kernel_log.coalesce import coalesce_events
from healthd.checks import memory_edac
from healthd.checks.memory_edac import Config, parse, validate
from healthd.common.history import History
from healthd.common.model import Clears, Finding, Inventory, Severity
from healthd.host.host import Host

MC = "/sys/devices/system/edac/mc"
# Labels of the drivers for Intel servers: https://github.com/prometheus/node_exporter/pull/3656
LABEL = "CPU_SrcID#{}_Ha#0_Chan#{}_DIMM#0"
HEALTHY = {
    "power/control": "auto",
    **{
        f"mc{number}/{file}": text
        for number in range(2)
        for file, text in {
            "mc_name": f"Skylake Socket#{number} IMC#0",
            "ue_count": "0",
            "ce_count": "0",
            "ue_noinfo_count": "0",
            "ce_noinfo_count": "0",
            **{
                f"dimm{channel}/{name}": text
                for channel in (0, 2)
                for name, text in {
                    "dimm_ce_count": "0",
                    "dimm_ue_count": "0",
                    "dimm_label": LABEL.format(number, channel),
                }.items()
            },
        }.items()
    },
}
ABSENT_IS_FINE = {
    MC: "no EDAC driver: virtual machines, and boards whose firmware does not report errors",
    rf"{MC}/mc\d+": "a memory controller without DIMMs has no DIMM counts",
}


@pytest.fixture
def node(tmp_path):
    """Create a node with two controllers with two DIMMs each; node({"mc0/ue_count": "1"}) changes files."""

    def make(changed=()):
        return write(tmp_path, {f"{MC}/{file}": f"{text}\n" for file, text in {**HEALTHY, **dict(changed)}.items()})

    return make


def healthy(tmp_path: Path) -> tuple[Host, Config]:
    return write(tmp_path, {f"{MC}/{file}": f"{text}\n" for file, text in HEALTHY.items()}), Config()


def story_findings(story: Story) -> list[Finding]:
    assert story.result is not None
    return list(story.result.findings)


# --- counters


def test_healthy_node_gives_counters_and_no_finding(node):
    results = run_check(memory_edac, node())
    assert not [item for item in results if isinstance(item, Finding)]
    assert len(list(observations_named(results, "memory_edac_uncorrected_errors_total"))) == 2
    assert [
        dict(item.labels)["part"] for item in observations_named(results, "memory_edac_corrected_errors_total")
    ] == [*("mc0", "mc0/dimm0", "mc0/dimm2", "mc1", "mc1/dimm0", "mc1/dimm2")]


def test_machine_without_edac_gives_nothing(tmp_path):
    assert run_check(memory_edac, Host(str(tmp_path))) == []


def test_ranks_are_read_like_dimms(tmp_path):
    files = dict(line.rsplit(":", 1) for line in captured_text("edac_ranks.txt").splitlines())
    files |= {f"{MC}/mc{number}/{file}": "0" for number in (0, 1) for file in ("ue_count", "ce_noinfo_count")}
    results = run_check(memory_edac, write(tmp_path, files))
    assert {dict(i.labels)["part"]: i.value for i in results if i.value} == {"mc0/rank4": 1}


def test_old_kernel_counts_by_rows(tmp_path):
    lines = captured_text("edac_csrow.txt").splitlines()
    files = {**dict(zip(lines[::2], lines[1::2], strict=True)), f"{MC}/mc0/ce_noinfo_count": "0"}
    results = run_check(memory_edac, write(tmp_path, files))
    assert [dict(item.labels)["part"] for item in results] == ["mc0", "mc0", "mc0/csrow0"]


def test_kernel_with_dimms_and_rows_is_not_counted_twice(node):
    results = run_check(memory_edac, node({"mc0/csrow0/ce_count": "5"}))
    assert "mc0/csrow0" not in {dict(item.labels)["part"] for item in results}


# --- counts from before the first run


def test_counts_before_first_run_give_no_finding(node):
    results = run_check(memory_edac, node({"mc0/ue_count": "3", "mc0/dimm0/dimm_ce_count": "50000"}))
    assert not [item for item in results if isinstance(item, Finding)]


# --- uncorrected errors


def test_uncorrected_error_drains_and_requeues_until_reboot(node):
    story = Story(memory_edac).run_check(node())
    with_error = node({"mc1/ue_count": "1", "mc1/dimm2/dimm_ue_count": "1"})
    story.run_check(with_error)
    (finding,) = story_findings(story)
    assert (finding.code, finding.subject, finding.severity) == ("memory_edac/uncorrected", "mc1", Severity.CRITICAL)
    assert finding.message == f"1 new uncorrected memory errors (since boot: {LABEL.format(1, 2)} (mc1/dimm2) 1)"
    assert story.drained
    assert story.requeued
    story.run_checks(with_error, 400)  # a day without load and without new errors
    assert story.drained
    story.reboot().run_checks(node({"mc1/ue_count": "0", "mc1/dimm2/dimm_ue_count": "0"}), 2)
    assert not story.drained
    assert not story.codes


def test_uncorrected_errors_again_after_reboot_need_operator(node):
    story = Story(memory_edac).run_check(node()).run_check(node({"mc0/ue_count": "1"}))
    story.reboot().run_checks(node({"mc0/ue_count": "0"}), 2)
    assert not story.drained
    story.run_check(node({"mc0/ue_count": "1"})).reboot().run_checks(node({"mc0/ue_count": "0"}), 400)
    assert story.drained
    story.repaired("memory_edac/uncorrected", "mc0").run_check(node())
    assert not story.drained


def test_uncorrected_error_without_dimm_counts(node):
    story = Story(memory_edac).run_check(node()).run_check(node({"mc0/ue_count": "2", "mc0/ue_noinfo_count": "2"}))
    (finding,) = story_findings(story)
    assert finding.message == "2 new uncorrected memory errors"
    assert story.drained


def test_uncorrected_error_of_named_dimm_gives_one_finding(node):
    """The error is in the count of the controller and in that of the DIMM."""
    story = Story(memory_edac).run_check(node()).run_check(node({"mc0/ue_count": "1", "mc0/dimm0/dimm_ue_count": "1"}))
    assert codes(story_findings(story)) == ["memory_edac/uncorrected"]


def test_unreadable_dimm_names_hide_no_error(node, tmp_path):
    story = Story(memory_edac).run_check(node())
    host = node({"mc0/ue_count": "1"})
    for name in ("dimm_ue_count", "dimm_label"):
        file = tmp_path / f"{MC}/mc0/dimm0/{name}"[1:]
        file.unlink()
        file.mkdir()  # reading a directory fails with EISDIR
    assert codes(story_findings(story.run_check(host))) == ["memory_edac/uncorrected"]


def test_garbled_dimm_file_hides_no_other_counter(node):
    results, error = run_until_error(memory_edac, node({"mc0/dimm0/dimm_ce_count": "N/A"}))
    assert "mc0/dimm0/dimm_ce_count: not a count" in error
    parts = [dict(item.labels)["part"] for item in results if item.name == "memory_edac_corrected_errors_total"]
    assert parts == ["mc0", "mc0/dimm2", "mc1", "mc1/dimm0", "mc1/dimm2"]


def test_garbled_controller_file_hides_no_other_finding(node):
    before = Story(memory_edac).run_check(node())
    past = History(before.history_series, before.now + 300, before.boot_id)
    results = memory_edac.run(node({"mc0/ue_count": "N/A", "mc1/ue_count": "1"}), Config(), past)
    subjects = []
    with pytest.raises(ValueError, match="mc0/ue_count: not a count: 'N/A'"):
        subjects.extend(item.subject for item in results if isinstance(item, Finding))
    assert subjects == ["mc1"]


def test_uncorrected_error_before_first_run_of_boot_warns_until_next_boot(node):
    story = Story(memory_edac).run_check(node())
    with_error = node({"mc0/ue_count": "1"})
    story.reboot().run_check(with_error)
    assert (story.codes, story.drained) == (["memory_edac/uncorrected_at_boot"], False)
    assert story.run_checks(with_error, 400).codes == ["memory_edac/uncorrected_at_boot"]
    assert story.run_check(node({"mc0/ue_count": "2"})).drained
    story.reboot().run_checks(node(), 2)
    assert (story.codes, story.drained) == ([], False)


# --- corrected errors


def corrected(node, count, file="mc0/dimm2/dimm_ce_count"):
    return node({file: str(count)})


def test_many_corrected_errors_in_a_day_warn_and_never_drain(node):
    story = Story(memory_edac).run_check(node()).run_check(corrected(node, 1000))
    assert story.codes == []
    story.run_check(corrected(node, 1001))
    assert story.codes == ["memory_edac/corrected"]
    (finding,) = story_findings(story)
    assert (finding.severity, finding.clears, finding.subject) == (Severity.WARNING, Clears.REBOOT, "mc0/dimm2")
    assert LABEL.format(0, 2) in finding.message
    assert not story.drained


def test_corrected_warning_clears_after_clean_day(node):
    story = Story(memory_edac).run_check(node()).run_check(corrected(node, 5000))
    still = corrected(node, 5000)
    story.run_checks(still, 12, minutes=110)  # 22 h
    assert story.codes == ["memory_edac/corrected"]
    story.run_checks(still, 3, minutes=110)
    assert story.codes == []


def test_corrected_warning_stays_while_errors_continue(node):
    story = Story(memory_edac).run_check(node())
    for hour in range(60):
        story.run_check(corrected(node, 100 * hour), minutes=60)
    assert story.codes == ["memory_edac/corrected"]


def test_corrected_warning_clears_by_reboot_and_old_errors_do_not_count(node):
    story = Story(memory_edac).run_check(node()).run_check(corrected(node, 5000))
    story.reboot().run_checks(corrected(node, 0), 2).run_check(corrected(node, 3))
    assert story.codes == []


def test_few_corrected_errors_every_day_give_no_finding(node):
    story = Story(memory_edac).run_check(node())
    for hour in range(60):
        story.run_check(corrected(node, 40 * hour), minutes=60)
        assert story.codes == []


def test_corrected_errors_without_dimm_warn(node):
    story = Story(memory_edac).run_check(node()).run_check(corrected(node, 2000, "mc1/ce_noinfo_count"))
    assert [finding.subject for finding in story_findings(story)] == ["mc1"]


def test_corrected_per_day_is_a_setting(node):
    story = Story(memory_edac, Config(corrected_per_day=5)).run_check(node()).run_check(corrected(node, 6))
    assert story.codes == ["memory_edac/corrected"]


def test_validate_rejects_negative_limit():
    assert "must not be negative" in (validate(Config(corrected_per_day=-1)) or "")
    assert validate(Config()) is None


# --- garbled files


def test_vanished_file_fails_run(node, tmp_path):
    host = node()
    (tmp_path / f"{MC}/mc0/dimm0/dimm_ce_count"[1:]).unlink()
    assert run_until_error(memory_edac, host)[1] == f"{MC}/mc0/dimm0/dimm_ce_count: is missing"


@given(st.one_of(st.text(max_size=12), st.sampled_from(["", "N/A", "-1", "1.0", "٣", "0x1", str(2**32), str(2**64)])))
def test_parse_rejects_invalid_count(text):
    count, error = parse_or_error(parse, text, "mc0/ue_count")
    if error:
        assert error.startswith(f"{MC}/mc0/ue_count: not a count")
    else:
        assert str(count) == text.lstrip("0") or count == 0


# --- the kernel log

UE = "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_Ha#0_Chan#2_DIMM#0 (channel:2 slot:0 page:0x849923)"
CE = UE.replace("UE", "CE")
EXCEPTION = "mce: [Hardware Error]: CPU 0: Machine Check Exception: 5 Bank 7: bd80000000100134"
RECOVERED = "Memory failure: 0x849923: recovery action for dirty LRU page: Recovered"
KILLED = "Memory failure: 0x849923: Sending SIGBUS to python3:4711 due to hardware memory corruption"


findings_from = partial(findings_of, memory_edac, interval=0.0)


def summaries(*lines, **kw):
    return [(f.code.partition("/")[2], f.subject, f.severity) for f in findings_from(*lines, **kw)]


def record(severity, *section):
    lines = (f"event severity: {severity}", f" Error 0, type: {severity}", *section)
    return [f"{{3}}[Hardware Error]: {line}" for line in lines]


def test_uncorrected_error_in_log_has_condition_of_count():
    (finding,) = findings_from(UE, UE)
    assert (finding.code, finding.subject) == ("memory_edac/uncorrected", "mc0")
    assert (finding.severity, finding.clears, finding.window_seconds) == (Severity.CRITICAL, Clears.REBOOT, 0.0)
    assert finding.message == "uncorrected memory error, CPU_SrcID#0_Ha#0_Chan#2_DIMM#0 (mc0), 2 lines"


@pytest.mark.parametrize(
    "line",
    [
        EXCEPTION,
        KILLED,
        "mce: [Hardware Error]: Machine check: Processor context corrupt",
        "mce: Uncorrected hardware memory error in user-access at 3f1d5c0040",
        "[Hardware Error]: Uncorrected, software containable error.",
        "Memory failure: 0x7740c0: recovery action for reserved kernel page: Ignored",
    ],
)
def test_machine_check_with_lost_data_is_critical(line):
    assert summaries(line) == [("machine_check", "", Severity.CRITICAL)]


def test_message_names_killed_process():
    assert findings_from(KILLED)[0].message == "an uncorrected memory error killed a process, python3 (pid 4711)"


def test_machine_check_near_edac_line_adds_no_finding():
    for lines in ([UE, EXCEPTION, KILLED, RECOVERED], [EXCEPTION, RECOVERED, KILLED, UE]):
        assert summaries(*lines) == [("uncorrected", "mc0", Severity.CRITICAL)]
    assert summaries(UE, EXCEPTION, interval=60.0) == [
        ("uncorrected", "mc0", Severity.CRITICAL),
        ("machine_check", "", Severity.CRITICAL),
    ]


@pytest.mark.parametrize(
    ("severity", "section", "expected"),
    [
        ("fatal", ["  section_type: memory error"], [Severity.CRITICAL]),
        ("fatal", [], [Severity.CRITICAL]),
        ("recoverable", ["  section_type: memory error"], [Severity.CRITICAL]),
        ("recoverable", ["  section_type: general processor error"], [Severity.CRITICAL]),
        ("recoverable", ["  section_type: Firmware Error Record Reference"], [Severity.WARNING]),
        ("recoverable", ["  section_type: PCIe error", "  device_id: 0000:03:00.0"], []),
        ("fatal", ["  section_type: PCIe error", "  device_id: 0000:03:00.0"], []),
        ("corrected", ["  section_type: memory error"], []),
        ("info", ["  section_type: memory error"], []),
    ],
)
def test_firmware_record_is_evaluated_by_severity_and_section(severity, section, expected):
    assert summaries(*record(severity, *section)) == [("machine_check", "", each) for each in expected]


@pytest.mark.parametrize(
    ("line", "code", "subject"),
    [
        (RECOVERED, "page_recovered", ""),
        ("[Hardware Error]: Deferred error, no action required.", "deferred", ""),
        ("[Hardware Error]: System Fatal error.", "left_over", ""),
        ("mce: [Hardware Error]: CPU 0: Machine Check: 0 Bank 5: be00000000800400", "left_over", ""),
        ("EDAC PCI: Signaled System Error on 0000:03:00.0", "pci_parity", "0000:03:00.0"),
    ],
)
def test_error_without_lost_data_warns_for_a_day(line, code, subject):
    (finding,) = findings_from(line)
    assert (finding.code, finding.subject, finding.severity) == (f"memory_edac/{code}", subject, Severity.WARNING)
    assert (finding.clears, finding.window_seconds) == (Clears.REBOOT, 86400.0)


def test_corrected_errors_and_records_of_previous_boot_give_no_finding():
    lines = [
        CE,
        "mce: [Hardware Error]: Machine check events logged",
        "mce: [Hardware Error]: CPU 0: Machine Check: 0 Bank 7: 8c00004000010092",
        "[Hardware Error]: Corrected error, no action required.",
        "BERT: Error records from previous boot:",
        "[Hardware Error]: event severity: fatal",
        "[Hardware Error]:   section_type: memory error",
        "EDAC DEVICE1: CE: thunderx-l2c instance: 0 block: N/A 'L2 ECC'",
    ]
    assert summaries(*lines) == []


SCRUBBED = UE.replace("memory read error", "memory scrubbing error")


@pytest.mark.parametrize(
    ("lines", "part"),
    [
        ([SCRUBBED], "mc0"),
        (
            ["EDAC MC1: 1 UE Scrub uncorrected error on DIMM_A1 (node:0 card:0 module:1 page:0x1 offset:0x0 grain:1)"],
            "mc1",
        ),
        (["mce: [Hardware Error]: CPU 0: Machine Check Exception: 5 Bank 7: bd000000001000c1"], ""),
        (record("recoverable", "  section_type: memory error", "  error_type: 14, scrub uncorrected error"), ""),
    ],
)
def test_scrubber_error_is_degraded_until_reboot(lines, part):
    (finding,) = findings_from(*lines)
    code = "memory_edac/uncorrected" if part else "memory_edac/machine_check"
    assert (finding.code, finding.subject, finding.severity) == (code, part, Severity.DEGRADED)
    assert (finding.clears, finding.window_seconds) == (Clears.REBOOT, 0.0)
    assert part == "" or finding.message.startswith("the memory scrubber found an uncorrected error")


def test_other_firmware_error_types_and_corrupt_context_are_critical():
    for error_type in ("error_type: 3, multi-bit ECC", "error_type: 13, scrub corrected error"):
        lines = record("recoverable", "  section_type: memory error", f"  {error_type}")
        assert summaries(*lines) == [("machine_check", "", Severity.CRITICAL)]
    assert summaries("mce: [Hardware Error]: CPU 0: Machine Check Exception: 5 Bank 7: bf000000001000c1") == [
        ("machine_check", "", Severity.CRITICAL)
    ]


def test_consumed_error_next_to_scrubber_error_is_critical():
    critical = [("uncorrected", "mc0", Severity.CRITICAL)]
    assert summaries(SCRUBBED, UE) == summaries(UE, SCRUBBED) == critical
    assert summaries(SCRUBBED, UE, interval=600.0) == critical
    assert sorted(summaries(SCRUBBED, KILLED)) == [
        ("machine_check", "", Severity.CRITICAL),
        ("uncorrected", "mc0", Severity.DEGRADED),
    ]
    assert summaries(SCRUBBED, RECOVERED) == [("uncorrected", "mc0", Severity.DEGRADED)]


def test_scrubber_error_drains_without_requeue_also_if_counted(node):
    def with_count(count: int) -> Host:
        return node({"mc0/ue_count": str(count)})

    story = (
        Story(memory_edac)
        .run_check(node())
        .take_event(event_of(SCRUBBED))
        .run_check(with_count(1), 0.1)
        .run_checks(with_count(1), 20)
    )
    assert (story.drained, story.requeued) == (True, False)
    story.take_event(event_of(SCRUBBED)).run_check(with_count(2), 0.1)
    assert (story.drained, story.requeued) == (True, False)
    assert [(c.code, c.severity) for c in story.conditions.values()] == [("memory_edac/uncorrected", Severity.DEGRADED)]
    story.run_checks(with_count(2), 2).run_check(with_count(3))  # an error without a log line
    assert (story.drained, story.requeued) == (True, True)
    assert not story.reboot().run_checks(node(), 2).drained


def test_consumed_error_after_scrubber_error_requeues(node):
    story = (
        Story(memory_edac).run_check(node()).take_event(event_of(SCRUBBED)).run_check(node({"mc0/ue_count": "1"}), 0.1)
    )
    assert not story.requeued
    story.take_event(event_of(UE)).run_check(node({"mc0/ue_count": "2"}), 0.1)
    assert (story.drained, story.requeued) == (True, True)


def test_logged_error_drains_until_reboot_despite_clean_counts(node):
    story = Story(memory_edac).run_check(node()).take_event(event_of(EXCEPTION)).run_checks(node(), 400)
    assert (story.codes, story.drained, story.requeued) == (["memory_edac/machine_check"], True, True)
    story.reboot().run_check(node())
    assert (story.codes, story.drained) == ([], False)


def test_logged_and_counted_error_is_one_condition_until_repaired(node):
    counted = node({"mc0/ue_count": "1"})
    story = (
        Story(memory_edac).run_check(node()).take_event(event_of(UE)).run_check(counted, 0.1).run_checks(counted, 400)
    )
    assert [(c.code, c.subject) for c in story.conditions.values()] == [("memory_edac/uncorrected", "mc0")]
    assert story.drained
    story.repaired("memory_edac/uncorrected").run_checks(counted, 2)
    assert (story.codes, story.drained) == ([], False)


def test_resumed_node_drains_again_only_for_new_error(node):
    from healthd.agent.conditions.endings import acknowledge_resumed

    story = Story(memory_edac).run_check(node()).take_event(event_of(EXCEPTION))
    story.conditions = acknowledge_resumed(story.conditions, story.now, story.now)
    story.run_checks(node(), 5)
    assert story.codes == []
    story.take_event(event_of(EXCEPTION))
    assert (story.codes, story.drained) == (["memory_edac/machine_check"], True)


def test_error_storm_takes_linear_time():
    events = tuple(event_of(line, 1000.0 + 6 * n) for n in range(1000) for line in (UE, EXCEPTION))
    recent, _, _ = coalesce_events((), events, 1)
    seconds = cpu_seconds(lambda: [list(memory_edac.correlate(recent, Inventory(), Config())) for _ in range(10)], 2.0)
    assert seconds < 2.0
