"""memory_edac: counted and logged errors of memory and processors."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from cpu_time import cpu_seconds
from fakes import codes, observed, refusal, run_check, until_it_fails
from hypothesis import given
from hypothesis import strategies as st
from kernel_lines import event, findings_of
from story import Story
from trees import captured, write

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


def found(story: Story) -> list[Finding]:
    assert story.result is not None
    return list(story.result.findings)


# --- counters


def test_a_healthy_node_gives_its_counters_and_no_finding(node):
    given_ = run_check(memory_edac, node())
    assert not [item for item in given_ if isinstance(item, Finding)]
    assert len(list(observed(given_, "memory_edac_uncorrected_errors_total"))) == 2
    assert [dict(item.labels)["part"] for item in observed(given_, "memory_edac_corrected_errors_total")] == [
        *("mc0", "mc0/dimm0", "mc0/dimm2", "mc1", "mc1/dimm0", "mc1/dimm2")
    ]


def test_a_machine_without_edac_gives_nothing(tmp_path):
    assert run_check(memory_edac, Host(str(tmp_path))) == []


def test_ranks_are_read_like_dimms(tmp_path):
    files = dict(line.rsplit(":", 1) for line in captured("edac_ranks.txt").splitlines())
    files |= {f"{MC}/mc{number}/{file}": "0" for number in (0, 1) for file in ("ue_count", "ce_noinfo_count")}
    given_ = run_check(memory_edac, write(tmp_path, files))
    assert {dict(i.labels)["part"]: i.value for i in given_ if i.value} == {"mc0/rank4": 1}


def test_an_old_kernel_counts_by_rows(tmp_path):
    lines = captured("edac_csrow.txt").splitlines()
    files = {**dict(zip(lines[::2], lines[1::2], strict=True)), f"{MC}/mc0/ce_noinfo_count": "0"}
    given_ = run_check(memory_edac, write(tmp_path, files))
    assert [dict(item.labels)["part"] for item in given_] == ["mc0", "mc0", "mc0/csrow0"]


def test_a_kernel_that_has_both_is_not_counted_twice(node):
    given_ = run_check(memory_edac, node({"mc0/csrow0/ce_count": "5"}))
    assert "mc0/csrow0" not in {dict(item.labels)["part"] for item in given_}


# --- counts from before the first run


def test_counts_that_were_there_before_the_first_look_are_no_finding(node):
    given_ = run_check(memory_edac, node({"mc0/ue_count": "3", "mc0/dimm0/dimm_ce_count": "50000"}))
    assert not [item for item in given_ if isinstance(item, Finding)]


# --- uncorrected errors


def test_an_uncorrected_error_drains_and_requeues_until_a_reboot(node):
    story = Story(memory_edac).look(node())
    bad = node({"mc1/ue_count": "1", "mc1/dimm2/dimm_ue_count": "1"})
    story.look(bad)
    (finding,) = found(story)
    assert (finding.code, finding.subject, finding.severity) == ("memory_edac/uncorrected", "mc1", Severity.CRITICAL)
    assert finding.message == f"1 new uncorrected memory errors (since boot: {LABEL.format(1, 2)} (mc1/dimm2) 1)"
    assert story.drained
    assert story.requeued
    story.looks(bad, 400)  # a day without load and without new errors
    assert story.drained
    story.reboot().looks(node({"mc1/ue_count": "0", "mc1/dimm2/dimm_ue_count": "0"}), 2)
    assert not story.drained
    assert not story.codes


def test_uncorrected_errors_again_after_the_reboot_wait_for_an_operator(node):
    story = Story(memory_edac).look(node()).look(node({"mc0/ue_count": "1"}))
    story.reboot().looks(node({"mc0/ue_count": "0"}), 2)
    assert not story.drained
    story.look(node({"mc0/ue_count": "1"})).reboot().looks(node({"mc0/ue_count": "0"}), 400)
    assert story.drained
    story.repaired("memory_edac/uncorrected", "mc0").look(node())
    assert not story.drained


def test_an_uncorrected_error_that_no_dimm_is_named_for_counts_too(node):
    story = Story(memory_edac).look(node()).look(node({"mc0/ue_count": "2", "mc0/ue_noinfo_count": "2"}))
    (finding,) = found(story)
    assert finding.message == "2 new uncorrected memory errors"
    assert story.drained


def test_an_error_of_a_named_dimm_is_one_finding(node):
    """The error is in the count of the controller and in that of the DIMM."""
    story = Story(memory_edac).look(node()).look(node({"mc0/ue_count": "1", "mc0/dimm0/dimm_ue_count": "1"}))
    assert codes(found(story)) == ["memory_edac/uncorrected"]


def test_names_that_cannot_be_read_hide_no_error(node, tmp_path):
    story = Story(memory_edac).look(node())
    host = node({"mc0/ue_count": "1"})
    for name in ("dimm_ue_count", "dimm_label"):
        file = tmp_path / f"{MC}/mc0/dimm0/{name}"[1:]
        file.unlink()
        file.mkdir()  # reading a directory fails with EISDIR
    assert codes(found(story.look(host))) == ["memory_edac/uncorrected"]


def test_memory_edac_reads_the_other_dimms_of_a_controller_after_a_garbled_file(node):
    given_, error = until_it_fails(memory_edac, node({"mc0/dimm0/dimm_ce_count": "N/A"}))
    assert "mc0/dimm0/dimm_ce_count: not a count" in error
    parts = [dict(item.labels)["part"] for item in given_ if item.name == "memory_edac_corrected_errors_total"]
    assert parts == ["mc0", "mc0/dimm2", "mc1", "mc1/dimm0", "mc1/dimm2"]


def test_a_garbled_file_hides_no_error_elsewhere(node):
    before = Story(memory_edac).look(node())
    past = History(before.past, before.now + 300, before.boot_id)
    given_ = memory_edac.run(node({"mc0/ue_count": "N/A", "mc1/ue_count": "1"}), Config(), past)
    found_ = []
    with pytest.raises(ValueError, match="mc0/ue_count: not a count: 'N/A'"):
        found_.extend(item.subject for item in given_ if isinstance(item, Finding))
    assert found_ == ["mc1"]


def test_one_that_was_counted_between_the_boot_and_the_first_look_warns_until_the_next_boot(node):
    story = Story(memory_edac).look(node())
    bad = node({"mc0/ue_count": "1"})
    story.reboot().look(bad)
    assert (story.codes, story.drained) == (["memory_edac/uncorrected_at_boot"], False)
    assert story.looks(bad, 400).codes == ["memory_edac/uncorrected_at_boot"]
    assert story.look(node({"mc0/ue_count": "2"})).drained
    story.reboot().looks(node(), 2)
    assert (story.codes, story.drained) == ([], False)


# --- corrected errors


def corrected(node, count, file="mc0/dimm2/dimm_ce_count"):
    return node({file: str(count)})


def test_many_corrected_errors_in_a_day_warn_and_never_drain(node):
    story = Story(memory_edac).look(node()).look(corrected(node, 1000))
    assert story.codes == []
    story.look(corrected(node, 1001))
    assert story.codes == ["memory_edac/corrected"]
    (finding,) = found(story)
    assert (finding.severity, finding.clears, finding.subject) == (Severity.WARNING, Clears.REBOOT, "mc0/dimm2")
    assert LABEL.format(0, 2) in finding.message
    assert not story.drained


def test_the_warning_ends_after_a_clean_day(node):
    story = Story(memory_edac).look(node()).look(corrected(node, 5000))
    still = corrected(node, 5000)
    story.looks(still, 12, minutes=110)  # 22 h
    assert story.codes == ["memory_edac/corrected"]
    story.looks(still, 3, minutes=110)
    assert story.codes == []


def test_the_warning_does_not_end_while_errors_go_on(node):
    story = Story(memory_edac).look(node())
    for hour in range(60):
        story.look(corrected(node, 100 * hour), minutes=60)
    assert story.codes == ["memory_edac/corrected"]


def test_the_warning_ends_with_a_reboot_and_yesterdays_errors_do_not_count_after_it(node):
    story = Story(memory_edac).look(node()).look(corrected(node, 5000))
    story.reboot().looks(corrected(node, 0), 2).look(corrected(node, 3))
    assert story.codes == []


def test_few_corrected_errors_every_day_are_no_finding(node):
    story = Story(memory_edac).look(node())
    for hour in range(60):
        story.look(corrected(node, 40 * hour), minutes=60)
        assert story.codes == []


def test_corrected_errors_that_no_dimm_is_named_for_warn_too(node):
    story = Story(memory_edac).look(node()).look(corrected(node, 2000, "mc1/ce_noinfo_count"))
    assert [finding.subject for finding in found(story)] == ["mc1"]


def test_the_limit_is_a_setting(node):
    story = Story(memory_edac, Config(corrected_per_day=5)).look(node()).look(corrected(node, 6))
    assert story.codes == ["memory_edac/corrected"]


def test_a_negative_limit_is_refused():
    assert "must not be negative" in (validate(Config(corrected_per_day=-1)) or "")
    assert validate(Config()) is None


# --- garbled files


def test_a_file_that_vanishes_is_unknown(node, tmp_path):
    host = node()
    (tmp_path / f"{MC}/mc0/dimm0/dimm_ce_count"[1:]).unlink()
    assert until_it_fails(memory_edac, host)[1] == f"{MC}/mc0/dimm0/dimm_ce_count: is missing"


@given(st.one_of(st.text(max_size=12), st.sampled_from(["", "N/A", "-1", "1.0", "٣", "0x1", str(2**32), str(2**64)])))
def test_what_is_no_count_is_refused_in_one_sentence(text):
    count, said = refusal(parse, text, "mc0/ue_count")
    if said:
        assert said.startswith(f"{MC}/mc0/ue_count: not a count")
    else:
        assert str(count) == text.lstrip("0") or count == 0


# --- the kernel log

UE = "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_Ha#0_Chan#2_DIMM#0 (channel:2 slot:0 page:0x849923)"
CE = UE.replace("UE", "CE")
EXCEPTION = "mce: [Hardware Error]: CPU 0: Machine Check Exception: 5 Bank 7: bd80000000100134"
RECOVERED = "Memory failure: 0x849923: recovery action for dirty LRU page: Recovered"
KILLED = "Memory failure: 0x849923: Sending SIGBUS to python3:4711 due to hardware memory corruption"


heard = partial(findings_of, memory_edac, apart=0.0)


def judged(*lines, **kw):
    return [(f.code.partition("/")[2], f.subject, f.severity) for f in heard(*lines, **kw)]


def record(severity, *section):
    lines = (f"event severity: {severity}", f" Error 0, type: {severity}", *section)
    return [f"{{3}}[Hardware Error]: {line}" for line in lines]


def test_an_uncorrected_error_in_the_log_is_the_same_condition_as_its_count():
    (finding,) = heard(UE, UE)
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
def test_a_machine_check_that_lost_data_is_critical_until_a_reboot(line):
    assert judged(line) == [("machine_check", "", Severity.CRITICAL)]


def test_the_process_that_was_killed_is_named():
    assert heard(KILLED)[0].message == "an uncorrected memory error killed a process, python3 (pid 4711)"


def test_what_edac_names_is_not_said_twice_and_something_later_is():
    for lines in ([UE, EXCEPTION, KILLED, RECOVERED], [EXCEPTION, RECOVERED, KILLED, UE]):
        assert judged(*lines) == [("uncorrected", "mc0", Severity.CRITICAL)]
    assert judged(UE, EXCEPTION, apart=60.0) == [
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
def test_a_firmwares_record_is_judged_by_its_severity_and_section(severity, section, expected):
    assert judged(*record(severity, *section)) == [("machine_check", "", each) for each in expected]


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
def test_what_lost_nothing_yet_warns_for_a_day(line, code, subject):
    (finding,) = heard(line)
    assert (finding.code, finding.subject, finding.severity) == (f"memory_edac/{code}", subject, Severity.WARNING)
    assert (finding.clears, finding.window_seconds) == (Clears.REBOOT, 86400.0)


def test_corrected_errors_and_records_of_the_last_boot_are_judged_by_nobody():
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
    assert judged(*lines) == []


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
def test_what_the_memorys_scrubber_found_is_degraded_until_a_reboot_for_nobody_has_read_it(lines, part):
    (finding,) = heard(*lines)
    code = "memory_edac/uncorrected" if part else "memory_edac/machine_check"
    assert (finding.code, finding.subject, finding.severity) == (code, part, Severity.DEGRADED)
    assert (finding.clears, finding.window_seconds) == (Clears.REBOOT, 0.0)
    assert part == "" or finding.message.startswith("the memory scrubber found an uncorrected error")


def test_other_error_types_of_a_firmware_and_a_scrubbers_error_with_a_corrupt_context_lost_data():
    for error_type in ("error_type: 3, multi-bit ECC", "error_type: 13, scrub corrected error"):
        lines = record("recoverable", "  section_type: memory error", f"  {error_type}")
        assert judged(*lines) == [("machine_check", "", Severity.CRITICAL)]
    assert judged("mce: [Hardware Error]: CPU 0: Machine Check Exception: 5 Bank 7: bf000000001000c1") == [
        ("machine_check", "", Severity.CRITICAL)
    ]


def test_an_error_that_was_read_beside_one_that_the_scrubber_found_is_critical():
    both = [("uncorrected", "mc0", Severity.CRITICAL)]
    assert judged(SCRUBBED, UE) == judged(UE, SCRUBBED) == both
    assert judged(SCRUBBED, UE, apart=600.0) == both
    assert sorted(judged(SCRUBBED, KILLED)) == [
        ("machine_check", "", Severity.CRITICAL),
        ("uncorrected", "mc0", Severity.DEGRADED),
    ]
    assert judged(SCRUBBED, RECOVERED) == [("uncorrected", "mc0", Severity.DEGRADED)]


def test_what_the_scrubber_found_drains_without_a_requeue_also_when_it_is_counted(node):
    def counted(count: int) -> Host:
        return node({"mc0/ue_count": str(count)})

    life = Story(memory_edac).look(node()).hear(event(SCRUBBED)).look(counted(1), 0.1).looks(counted(1), 20)
    assert (life.drained, life.requeued) == (True, False)
    life.hear(event(SCRUBBED)).look(counted(2), 0.1)
    assert (life.drained, life.requeued) == (True, False)
    assert [(c.code, c.severity) for c in life.conditions.values()] == [("memory_edac/uncorrected", Severity.DEGRADED)]
    life.looks(counted(2), 2).look(counted(3))  # an error without a log line
    assert (life.drained, life.requeued) == (True, True)
    assert not life.reboot().looks(node(), 2).drained


def test_an_error_that_is_read_after_the_scrubber_found_one_requeues(node):
    life = Story(memory_edac).look(node()).hear(event(SCRUBBED)).look(node({"mc0/ue_count": "1"}), 0.1)
    assert not life.requeued
    life.hear(event(UE)).look(node({"mc0/ue_count": "2"}), 0.1)
    assert (life.drained, life.requeued) == (True, True)


def test_a_logged_error_drains_and_clean_counts_do_not_end_it_but_the_reboot_does(node):
    life = Story(memory_edac).look(node()).hear(event(EXCEPTION)).looks(node(), 400)
    assert (life.codes, life.drained, life.requeued) == (["memory_edac/machine_check"], True, True)
    life.reboot().look(node())
    assert (life.codes, life.drained) == ([], False)


def test_an_error_that_is_logged_and_counted_is_one_condition_until_it_is_repaired(node):
    counted = node({"mc0/ue_count": "1"})
    life = Story(memory_edac).look(node()).hear(event(UE)).look(counted, 0.1).looks(counted, 400)
    assert [(c.code, c.subject) for c in life.conditions.values()] == [("memory_edac/uncorrected", "mc0")]
    assert life.drained
    life.repaired("memory_edac/uncorrected").looks(counted, 2)
    assert (life.codes, life.drained) == ([], False)


def test_after_an_operator_resumed_the_node_only_another_error_drains_it_again(node):
    from healthd.agent.conditions.endings import acknowledge_resumed

    life = Story(memory_edac).look(node()).hear(event(EXCEPTION))
    life.conditions = acknowledge_resumed(life.conditions, life.now, life.now)
    life.looks(node(), 5)
    assert life.codes == []
    life.hear(event(EXCEPTION))
    assert (life.codes, life.drained) == (["memory_edac/machine_check"], True)


def test_a_storm_of_errors_is_judged_in_time_that_grows_with_their_number():
    events = tuple(event(line, 1000.0 + 6 * n) for n in range(1000) for line in (UE, EXCEPTION))
    recent, _, _ = coalesce_events((), events, 1)
    judged = cpu_seconds(lambda: [list(memory_edac.correlate(recent, Inventory(), Config())) for _ in range(10)], 2.0)
    assert judged < 2.0
