import re
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_lines import finding_of, findings_of
from story import Story

from healthd.checks import sxid
from healthd.checks.sxid import Config, explain, known_codes
from healthd.model import Clears, Severity
from healthd.nvidia import codes

SWITCH, OTHER = "0000:85:00.0", "0000:86:00.0"
WINDOW = Config().warning_window_seconds
MINUTES_OF_DAY = 24 * 60.0


def line(rest, pci=SWITCH, switch=2):
    return f"nvidia-nvswitch{switch}: SXid (PCI:{pci}): {rest}"


found = partial(findings_of, sxid)
one = partial(finding_of, sxid)


@pytest.mark.parametrize(
    ("rest", "severity"),
    [
        ("22003, Fatal, Link 60 Minion Halt", Severity.CRITICAL),  # always fatal
        ("23001, Non-fatal, Link 60 x", Severity.CRITICAL),
        ("24007, Fatal, Link 28 sourcetrack timeout error (First)", Severity.CRITICAL),  # potentially fatal
        ("20034, Non-fatal, Link 28 LTSSM Fault Up", Severity.WARNING),
        ("20034, LTSSM", Severity.WARNING),
        ("12028, Non-fatal, Link 61 egress non-posted PRIV error (First)", Severity.WARNING),
        ("12028, Fatal, Link 61 x", Severity.WARNING),
        ("28006, Fatal, Link 46 MC TS crumbstore MCTO (First)", Severity.WARNING),  # in no list
        ("26007, SOE EXTERR", Severity.WARNING),
        ("26006, SOE HALTED", Severity.WARNING),
    ],
)
def test_an_sxid_is_critical_by_its_class_and_its_line(rest, severity):
    finding = one(line(rest))
    assert (finding.code, finding.severity, finding.clears) == (f"sxid/{rest[:5]}", severity, Clears.REBOOT)
    assert finding.subject == SWITCH
    assert finding.window_seconds == (0 if severity is Severity.CRITICAL else WINDOW)


@pytest.mark.parametrize("number", codes.sxid_numbers())
@pytest.mark.parametrize("word", ["Fatal", "Non-fatal"])
def test_every_sxid_of_the_guide_is_judged_by_its_class(number, word):
    fact = codes.sxid(number)
    assert fact is not None
    critical = fact.category == "always fatal" or (fact.category == "potentially fatal" and word == "Fatal")
    finding = one(line(f"{number:05d}, {word}, Link 03 x"))
    assert finding.severity is (Severity.CRITICAL if critical else Severity.WARNING)
    assert fact.name in finding.message


def test_it_says_which_switch_and_link():
    message = one(line("24007, Fatal, Link 28 sourcetrack timeout error (First)")).message
    assert message == "SXid 24007: sourcetrack timeout error, NVSwitch 2, link 28, fatal"


def test_a_code_in_no_list_is_unknown_to_this_version():
    assert one(line("28006, Non-fatal, Link 46 x")).message.startswith("SXid 28006: unknown to this version, ")


def test_the_further_lines_of_one_event_are_not_counted():
    more = [
        line("24007, Severity 0 Engine instance 28 Sub-engine instance 00"),
        line("24007, Data {0x0000003c, 0x0000003c, 0x00000000, 0x0000003c}"),
    ]
    assert one(line("24007, Fatal, Link 28 x"), *more, times=[1.0, 1.1, 1.2]).message.endswith("fatal")


def test_a_storm_on_one_link_is_one_event_with_its_count_and_two_switches_are_two_findings():
    storm = [line("12028, Non-fatal, Link 61 x")] * 100
    finding = one(*storm, times=[1000.0 + n / 10 for n in range(100)])
    assert (finding.events, finding.message.endswith("100 lines")) == ((1,), True)
    assert {finding.subject for finding in found(line("20034, x"), line("20034, x", OTHER))} == {SWITCH, OTHER}


def test_a_harmless_line_hides_no_fatal_one_of_this_boot_within_the_window():
    fatal, harmless = line("24007, Fatal, Link 28 x"), line("24007, Non-fatal, Link 29 x")
    assert one(fatal, harmless).severity is Severity.CRITICAL
    assert one(fatal, harmless, boots=["a", "b"]).severity is Severity.WARNING
    assert one(fatal, harmless, times=[0.0, WINDOW + 1]).severity is Severity.WARNING


def test_lines_of_gpus_are_left_to_other_checks():
    assert found("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.") == []


@pytest.mark.parametrize("code", known_codes())
def test_every_sxid_of_the_guide_is_explained(code):
    text = explain(code)
    assert text is not None
    fact = codes.sxid(int(code.removeprefix("sxid/")))
    assert fact is not None
    assert fact.name in text.meaning
    assert fact.category in text.meaning
    assert all((text.matters, text.todo))


def test_a_code_in_no_list_is_explained_as_a_warning():
    text = explain("sxid/28006")
    assert text is not None
    assert (text.severity, "no list known to this version" in text.meaning) == (Severity.WARNING, True)


@given(st.text() | st.from_regex(re.compile("[0-9]{1,30}"), fullmatch=True))
def test_explain_takes_any_code(code):
    text = explain(f"sxid/{code}")
    assert text is None or text.meaning


# --- stories


Life = partial(Story, sxid)


@pytest.mark.parametrize("rest", ["22003, Fatal, Link 60 Minion Halt", "24007, Fatal, Link 28 sourcetrack timeout"])
def test_a_fatal_sxid_drains_and_requeues_until_a_reboot_and_the_second_time_until_an_engineer_says_so(rest):
    life = Life().says(line(rest))
    assert (life.drained, life.requeued) == (True, True)
    life.wait(30 * MINUTES_OF_DAY).reset(SWITCH)
    assert life.drained
    life.reboot()
    assert not life.drained
    life.wait(MINUTES_OF_DAY).says(line(rest))
    assert life.drained
    life.reboot().wait(30 * MINUTES_OF_DAY)
    assert life.drained
    life.repaired(f"sxid/{rest[:5]}")
    assert not life.drained


def test_a_fatal_sxid_of_each_of_two_switches_ends_with_one_reboot():
    life = Life().says(line("22003, Fatal, Link 60 x"), line("22003, Fatal, Link 60 x", OTHER, 3))
    assert len(life.codes) == 2
    assert life.reboot().codes == []


@pytest.mark.parametrize("rest", ["24007, Non-fatal, Link 28 x", "20034, Non-fatal, Link 28 x", "28006, Fatal, Link 4"])
def test_any_other_sxid_warns_for_a_day_or_until_a_reboot(rest):
    life = Life()
    for _ in range(50):
        life.says(line(rest)).wait(10)
    assert (life.drained, len(life.codes)) == (False, 1)
    assert len(life.wait(MINUTES_OF_DAY - 11).codes) == 1
    assert life.wait(2).codes == []
    assert life.says(line(rest)).wait(60).codes != []
    assert life.reboot().codes == []
