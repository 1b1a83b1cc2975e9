import re
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_lines import finding_of, findings_of
from story import Story

from healthd.checks import sxid
from healthd.checks.sxid import Config, explain, known_codes
from healthd.common.model import Clears, Severity
from healthd.nvidia import codes

SWITCH, OTHER_SWITCH = "0000:85:00.0", "0000:86:00.0"
WINDOW = Config().warning_window_seconds
MINUTES_OF_DAY = 24 * 60.0


def sxid_line(text, pci=SWITCH, switch=2):
    return f"nvidia-nvswitch{switch}: SXid (PCI:{pci}): {text}"


findings_from = partial(findings_of, sxid)
finding_from = partial(finding_of, sxid)


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        ("22003, Fatal, Link 60 Minion Halt", Severity.CRITICAL),  # always fatal
        ("23001, Non-fatal, Link 60 x", Severity.CRITICAL),
        ("24007, Fatal, Link 28 sourcetrack timeout error (First)", Severity.CRITICAL),  # potentially fatal
        ("20034, Non-fatal, Link 28 LTSSM Fault Up", Severity.WARNING),
        ("20034, LTSSM", Severity.WARNING),
        ("12028, Non-fatal, Link 61 egress non-posted PRIV error (First)", Severity.WARNING),
        ("12028, Fatal, Link 61 x", Severity.WARNING),
        ("19057, Fatal, Link 03 DAT0 RAM ECC Limit Error (First)", Severity.WARNING),  # the guide lists it as non-fatal
        ("28006, Fatal, Link 46 MC TS crumbstore MCTO (First)", Severity.CRITICAL),  # in no list
        ("28006, Non-fatal, Link 46 MC TS crumbstore MCTO (First)", Severity.WARNING),
        ("20035, Fatal, Link 30 LTSSM Fault Down", Severity.CRITICAL),
        ("22010, Fatal, Link 30 MINION Watchdog timer ran out", Severity.CRITICAL),
        ("10008, Fatal, Firmware initialization failure (0x1/0x2, 0x0, 0x0)", Severity.CRITICAL),
        ("26007, SOE EXTERR", Severity.WARNING),
        ("26008, SOE Watchdog error", Severity.WARNING),
        ("26001, Failed to reset SOE(1)", Severity.DEGRADED),
        ("26002, Failed to boot SOE(0)", Severity.DEGRADED),
        ("26006, SOE HALTED", Severity.DEGRADED),
        ("26006, SOE HALT data[0] = 0x0000000000001234", Severity.DEGRADED),
        ("10007, IO failure", Severity.DEGRADED),
        # lr10/therm_lr10.c, ls10/therm_ls10.c
        ("10004, NVSWITCH Temperature 91C | TSENSE WARN Threshold 90C", Severity.WARNING),
        ("10004, Thermal Slowdown Engaged | Temp higher than WARN Threshold", Severity.WARNING),
        ("10004, Thermal Slowdown Engaged | Links Thermal Mode ON", Severity.WARNING),
        ("10004, Thermal Slowdown Engaged | PMGR WARN Threshold reached", Severity.WARNING),
        ("10004, PMGR OVERT Threshold reached. Shutting Down", Severity.DEGRADED),
        ("10004, Non-fatal, Shutting Down", Severity.WARNING),
        ("10004, Fatal, Shutting Down", Severity.CRITICAL),
        ("10004, Shutting Down is what it does not do", Severity.WARNING),
        ("10005, NVSWITCH Temperature 80C | TSENSE WARN Threshold 90C", Severity.WARNING),
        ("10005, Thermal Slowdown Disengaged | Links Thermal Mode OFF", Severity.WARNING),
        ("10005, Thermal slowdown Disengaged", Severity.WARNING),
        ("10006, NVSWITCH Temperature 111C | OVERT Threshold 110C", Severity.DEGRADED),
        ("10006, TSENSE OVERT Threshold reached. Shutting Down", Severity.DEGRADED),
        # ls10/heartbeat_ls10.c
        ("28001, OSFP Thermal Warn Activated", Severity.WARNING),
        ("28002, OSFP Thermal Warn Deactivated", Severity.WARNING),
        ("28003, OSFP Thermal Overt Activated", Severity.WARNING),
        ("28004, OSFP Thermal Overt Deactivated", Severity.WARNING),
        ("28005, OSFP Thermal SOE Heartbeat Shutdown", Severity.DEGRADED),
    ],
)
def test_sxid_severity_depends_on_class_and_line(text, severity):
    finding = finding_from(sxid_line(text))
    assert (finding.code, finding.severity, finding.clears) == (f"sxid/{text[:5]}", severity, Clears.REBOOT)
    assert finding.subject == SWITCH
    assert finding.window_seconds == (WINDOW if severity is Severity.WARNING else 0)


@pytest.mark.parametrize("number", codes.sxid_numbers())
@pytest.mark.parametrize("word", ["Fatal", "Non-fatal"])
def test_every_sxid_of_guide_has_severity_of_its_class(number, word):
    fact = codes.sxid(number)
    assert fact is not None
    critical = fact.category == "always fatal" or (fact.category == "potentially fatal" and word == "Fatal")
    finding = finding_from(sxid_line(f"{number:05d}, {word}, Link 03 x"))
    assert finding.severity is (Severity.CRITICAL if critical else Severity.WARNING)
    assert fact.name in finding.message


def test_message_names_switch_and_link():
    message = finding_from(sxid_line("24007, Fatal, Link 28 sourcetrack timeout error (First)")).message
    assert message == "SXid 24007: sourcetrack timeout error, NVSwitch 2, link 28, fatal"


# The driver's source reports these as fatal: open-gpu-kernel-modules 595.45.04, src/common/nvswitch/kernel/{lr10,ls10}.
FATAL_IN_NO_GUIDE = [
    10008,
    19004,
    19009,
    *range(19013, 19016),
    *range(19018, 19024),
    *range(19026, 19029),
    19030,
    19031,
]
FATAL_IN_NO_GUIDE += [19032, 19033, *range(19036, 19040), 19046, *range(19050, 19054), 19080, 19081, 19083]
FATAL_IN_NO_GUIDE += [*range(20004, 20009), 20014, *range(20035, 20039), 22010, 25007, 25008, 25009]


def test_sxid_fatal_only_in_driver_source_drains_and_requeues():
    assert len(FATAL_IN_NO_GUIDE) == 45
    assert [number for number in FATAL_IN_NO_GUIDE if codes.sxid(number) is not None] == []
    assert {finding_from(sxid_line(f"{n:05d}, Fatal, Link 30 x")).severity for n in FATAL_IN_NO_GUIDE} == {
        Severity.CRITICAL
    }
    assert {finding_from(sxid_line(f"{n:05d}, Non-fatal, Link 30 x")).severity for n in FATAL_IN_NO_GUIDE} == {
        Severity.WARNING
    }


def test_message_of_unlisted_code_uses_text_of_driver():
    message = finding_from(sxid_line("22010, Fatal, Link 30 MINION Watchdog timer ran out")).message
    assert message == "SXid 22010: MINION Watchdog timer ran out, NVSwitch 2, link 30, fatal"
    assert finding_from(sxid_line("10008, Fatal, Firmware initialization failure (0x1)")).message.startswith(
        "SXid 10008: Firmware ini"
    )
    assert finding_from(sxid_line("28006")).message == "SXid 28006: unknown to this version, NVSwitch 2"
    assert finding_from(sxid_line("28006, Non-fatal, Link 4")).message.startswith(
        "SXid 28006: unknown to this version, "
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("26004, SOE reset timeout error(0)", "SXid 26004: SOE reset timeout error(0), NVSwitch 2"),
        ("26008, SOE Watchdog error", "SXid 26008: SOE Watchdog error, NVSwitch 2"),
        ("28003, OSFP Thermal Overt Activated", "SXid 28003: OSFP Thermal Overt Activated, NVSwitch 2"),
        ("28005, OSFP Thermal SOE Heartbeat Shutdown", f"SXid 28005: {sxid.UNCLASSIFIED_FAULTS[28005]}, NVSwitch 2"),
        ("26006, SOE HALTED", f"SXid 26006: {sxid.UNCLASSIFIED_FAULTS[26006]}, NVSwitch 2"),
        (
            "10004, PMGR OVERT Threshold reached. Shutting Down",
            "SXid 10004: PMGR OVERT Threshold reached. Shutting Down, NVSwitch 2",
        ),
        ("10004, Thermal Slowdown Engaged | x", "SXid 10004: Host_thermal_event_start, NVSwitch 2"),
        (
            "26008, Severity 0 Engine instance 28 Sub-engine instance 00",
            "SXid 26008: unknown to this version, NVSwitch 2",
        ),
    ],
)
def test_message_of_line_without_fatal_uses_text_of_driver(text, message):
    assert finding_from(sxid_line(text)).message == message


@pytest.mark.parametrize(
    "text", ["26008, x Fatal, Link 3 y", "26008, x): 26008, Fatal, Link 3 y", "26008 Fatal, Link 3 y"]
)
def test_fatal_elsewhere_in_line_is_ignored(text):
    finding = finding_from(sxid_line(text))
    assert finding.severity is Severity.WARNING
    assert not finding.message.endswith(("fatal", "link 3"))


def test_shutdown_after_slowdown_with_same_code_drains():
    hot = [
        sxid_line("10004, NVSWITCH Temperature 91C | TSENSE WARN Threshold 90C"),
        sxid_line("10004, Thermal Slowdown Engaged | PMGR WARN Threshold reached"),
    ]
    off = sxid_line("10004, PMGR OVERT Threshold reached. Shutting Down")
    for lines in ([*hot, off], [off, *hot]):
        finding = finding_from(*lines, times=[1.0, 1.1, 1.2])
        assert (finding.severity, finding.message) == (
            Severity.DEGRADED,
            "SXid 10004: PMGR OVERT Threshold reached. Shutting Down, NVSwitch 2, 3 lines",
        )


def test_detail_lines_of_event_are_not_counted():
    more = [
        sxid_line("24007, Severity 0 Engine instance 28 Sub-engine instance 00"),
        sxid_line("24007, Data {0x0000003c, 0x0000003c, 0x00000000, 0x0000003c}"),
    ]
    assert finding_from(sxid_line("24007, Fatal, Link 28 x"), *more, times=[1.0, 1.1, 1.2]).message.endswith("fatal")


def test_storm_on_link_is_one_event_and_two_switches_two_findings():
    storm = [sxid_line("12028, Non-fatal, Link 61 x")] * 100
    finding = finding_from(*storm, times=[1000.0 + n / 10 for n in range(100)])
    assert (finding.events, finding.message.endswith("100 lines")) == ((1,), True)
    assert {
        finding.subject for finding in findings_from(sxid_line("20034, x"), sxid_line("20034, x", OTHER_SWITCH))
    } == {SWITCH, OTHER_SWITCH}


def test_harmless_line_hides_no_fatal_line_of_boot_within_window():
    fatal, harmless = sxid_line("24007, Fatal, Link 28 x"), sxid_line("24007, Non-fatal, Link 29 x")
    assert finding_from(fatal, harmless).severity is Severity.CRITICAL
    assert finding_from(fatal, harmless, boots=["a", "b"]).severity is Severity.WARNING
    assert finding_from(fatal, harmless, times=[0.0, WINDOW + 1]).severity is Severity.WARNING


def test_lines_of_gpus_are_left_to_other_checks():
    assert findings_from("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.") == []


@pytest.mark.parametrize("code", [code for code in known_codes() if codes.sxid(int(code[5:])) is not None])
def test_explain_of_every_sxid_of_guide(code):
    text = explain(code)
    assert text is not None
    fact = codes.sxid(int(code.removeprefix("sxid/")))
    assert fact is not None
    assert fact.name in text.meaning
    assert fact.category in text.meaning
    assert all((text.matters, text.todo))


def test_explain_of_unlisted_code_depends_on_fatal_in_line():
    text = explain("sxid/28006")
    assert text is not None
    assert (text.severity, "unknown to this version" in text.meaning) == (Severity.CRITICAL, True)
    assert "contains Fatal" in text.matters


def test_explain_of_unclassified_fault():
    text = explain("sxid/26006")
    assert text is not None
    assert (text.severity, "SOE" in text.meaning) == (Severity.DEGRADED, True)
    assert "sxid/26006" in known_codes()
    hot = explain("sxid/10004")
    assert hot is not None
    assert "reports a shutdown of the switch, healthd drains" in hot.matters


@given(st.text() | st.from_regex(re.compile("[0-9]{1,30}"), fullmatch=True))
def test_explain_accepts_any_code(code):
    text = explain(f"sxid/{code}")
    assert text is None or text.meaning


# --- stories


SxidStory = partial(Story, sxid)


FATAL = [
    "22003, Fatal, Link 60 Minion Halt",
    "24007, Fatal, Link 28 sourcetrack timeout",
    "20035, Fatal, Link 30 LTSSM",
]


@pytest.mark.parametrize("text", FATAL)
def test_fatal_sxid_drains_until_reboot_and_second_time_until_repaired(text):
    story = SxidStory().log_lines(sxid_line(text))
    assert (story.drained, story.requeued) == (True, True)
    story.wait(30 * MINUTES_OF_DAY).reset(SWITCH)
    assert story.drained
    story.reboot()
    assert not story.drained
    story.wait(MINUTES_OF_DAY).log_lines(sxid_line(text))
    assert story.drained
    story.reboot().wait(30 * MINUTES_OF_DAY)
    assert story.drained
    story.repaired(f"sxid/{text[:5]}")
    assert not story.drained


def test_fatal_sxids_of_two_switches_clear_with_one_reboot():
    story = SxidStory().log_lines(
        sxid_line("22003, Fatal, Link 60 x"), sxid_line("22003, Fatal, Link 60 x", OTHER_SWITCH, 3)
    )
    assert len(story.codes) == 2
    assert story.reboot().codes == []


@pytest.mark.parametrize(
    "text", ["24007, Non-fatal, Link 28 x", "20034, Non-fatal, Link 28 x", "28006, Non-fatal, Link 4"]
)
def test_other_sxid_warns_for_a_day_or_until_reboot(text):
    story = SxidStory()
    for _ in range(50):
        story.log_lines(sxid_line(text)).wait(10)
    assert (story.drained, len(story.codes)) == (False, 1)
    assert len(story.wait(MINUTES_OF_DAY - 11).codes) == 1
    assert story.wait(2).codes == []
    assert story.log_lines(sxid_line(text)).wait(60).codes != []
    assert story.reboot().codes == []


def test_halted_controller_drains_without_requeue():
    story = SxidStory().log_lines(sxid_line("26006, SOE HALTED"))
    assert (story.drained, story.requeued) == (True, False)
    assert not story.wait(30 * MINUTES_OF_DAY).reboot().drained
