import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from story import Story

from healthd import codes
from healthd.checks import gpu_xid
from healthd.checks.gpu_xid import RECOVERY, RESET, Config, correlate, explain
from healthd.kernel_fold import fold_events
from healthd.kernel_log import RawLine, event_of
from healthd.model import Clears, Finding, Gpu, Inventory, PciDevice, Severity

PCI = "0000:3b:00.0"
NODE = Inventory(gpus=(Gpu(PCI, 3, "GPU-8a47641b"), Gpu("0000:5e:00.0", 4, "GPU-5e")))
WINDOW = Config().warning_window_seconds


def found(*lines, node=NODE, config=None, boots=None, times=None):
    """Findings of correlate for kernel messages, ten seconds apart unless `times` says else."""
    times = times or [1000.0 + 10 * n for n in range(len(lines))]
    boots = boots or ["b"] * len(lines)
    events = [event_of(RawLine(t, line), b) for t, line, b in zip(times, lines, boots, strict=True)]
    recent, _, _ = fold_events((), [event for event in events if event is not None], 1)
    return list(correlate(recent, node, config or Config()))


def xid(rest, pci="0000:3b:00"):
    return f"NVRM: Xid (PCI:{pci}): {rest}"


def one(*lines, **kw) -> Finding:
    (finding,) = found(*lines, **kw)
    return finding


def judged(*lines, **kw):
    finding = one(*lines, **kw)
    return finding.severity, finding.clears, finding.window_seconds


def test_a_lost_gpu_is_critical_until_a_reboot_and_named_for_people():
    finding = one(xid("79, pid=1234, name=python3, GPU has fallen off the bus."))
    assert finding == Finding(
        Severity.CRITICAL,
        "gpu_xid/79",
        PCI,
        "Xid 79: GPU has fallen off the bus, GPU 3 (GPU-8a47641b), python3 (pid 1234)",
        Clears.REBOOT,
        events=(1,),
    )


def test_a_key_rotation_error_needs_a_reboot():
    assert judged(xid("151, Key rotation Error")) == (Severity.CRITICAL, Clears.REBOOT, 0)


@pytest.mark.parametrize("code", [46, 48, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158])
def test_what_nvidia_resets_the_gpu_for_is_critical_until_a_reset(code):
    assert judged(xid(f"{code}, pid=1, name=a, x")) == (Severity.CRITICAL, Clears.GPU_RESET, 0)


def test_every_code_of_the_catalogues_reset_class_is_critical():
    reset = {code for code in range(1, 174) if (fact := codes.xid(code)) and fact.action == "RESET_GPU"}
    assert reset <= RESET
    assert RESET - reset == {48}


@pytest.mark.parametrize("code", [13, 31, 32, 43, 45, 63, 68, 69, 94, 8, 11, 70, 92, 121, 137, 160])
def test_what_an_application_did_never_drains_and_is_forgotten_after_an_hour(code):
    severity, clears, window = judged(*[xid(f"{code}, pid=1, name=a, x")] * 20)
    assert severity <= Severity.WARNING
    assert (clears, window) == (Clears.WINDOW, 3600)


@pytest.mark.parametrize("code", [63, 45, 43])
def test_what_only_follows_from_something_else_is_recorded(code):
    assert one(xid(f"{code}, x")).severity is Severity.INFO


@pytest.mark.parametrize("code", [1, 54, 61, 65, 78, 159, 162, 163, 172, 173, 174, 185, 999])
def test_codes_without_a_justified_action_warn_for_a_day(code):
    assert judged(xid(f"{code}, x")) == (Severity.WARNING, Clears.WINDOW, WINDOW)


def test_no_code_but_the_listed_ones_drains():
    drains = {code for code in range(1, 1000) if one(xid(f"{code}, x")).severity > Severity.WARNING}
    assert drains == RESET | {79, 151}


@pytest.mark.parametrize(
    ("action", "severity", "clears"),
    [
        ("0x1 (GPU Reset Required)", Severity.CRITICAL, Clears.GPU_RESET),
        ("0x1 (PF FLR)", Severity.CRITICAL, Clears.GPU_RESET),
        ("0x2 (OS Reboot)", Severity.CRITICAL, Clears.REBOOT),
        ("0x3 (Drain P2P)", Severity.WARNING, Clears.GPU_RESET),
        ("0x4 (Drain and Reset)", Severity.CRITICAL, Clears.GPU_RESET),
        ("0x5 (GPU Reset Required)", Severity.WARNING, Clears.GPU_RESET),
        ("0x6 (Bus Reset)", Severity.CRITICAL, Clears.GPU_RESET),
        ("0x7 (System Reboot)", Severity.CRITICAL, Clears.REBOOT),
        ("0x1f (Something New)", Severity.WARNING, Clears.GPU_RESET),
    ],
)
def test_a_recovery_action_counts_by_its_number(action, severity, clears):
    finding = one(xid(f"154, GPU recovery action changed from 0x0 (None) to {action}"))
    assert (finding.code, finding.severity, finding.clears) == ("gpu_xid/154", severity, clears)


def test_the_newest_recovery_action_counts():
    to_reset = xid("154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)")
    to_none = xid("154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)")
    assert found(to_reset, to_none) == []
    assert one(to_none, to_reset).severity is Severity.CRITICAL
    assert found(to_none) == []
    assert judged(xid("154, cut")) == (Severity.WARNING, Clears.GPU_RESET, WINDOW)


NVLINK = "74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link {}(0x10000, 0x0)"


def test_one_nvlink_error_warns_on_however_many_links():
    lines = [xid(NVLINK.format(link)) for link in range(6)]
    assert judged(*lines, times=[1000.0] * 6) == (Severity.WARNING, Clears.GPU_RESET, 24 * 3600)


def test_an_nvlink_error_that_repeats_within_a_day_is_critical():
    lines = [xid(NVLINK.format(1)), xid(NVLINK.format(2))]
    assert judged(*lines, times=[1000.0, 1000.0 + 3600 * 23]) == (Severity.CRITICAL, Clears.GPU_RESET, 0)
    assert one(*lines, times=[1000.0, 1000.0 + 3600 * 25]).severity is Severity.WARNING


def test_nvlink_errors_of_two_gpus_are_no_repetition():
    lines = [xid(NVLINK.format(1)), xid(NVLINK.format(1), "0000:5e:00")]
    assert [finding.severity for finding in found(*lines)] == [Severity.WARNING] * 2


@pytest.mark.parametrize(
    ("rest", "severity"),
    [
        ("145, RLW_REMAP Fatal XC1 i0 Link 10 (0x00000082 0x00000040 0x0 0x0 0x0 0x0)", Severity.CRITICAL),
        ("149, NETIR_LINK_EVT Fatal XC0 i0 Link 09 (0x004525c6 0x00000000 0x0 0x0 0x0 0x0)", Severity.CRITICAL),
        ("149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x00000000 0x0 0x0 0x0 0x0)", Severity.WARNING),
        ("149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 01 (0x00082226 0x00000001 0x0 0x0 0x0 0x0)", Severity.WARNING),
        ("145, RLW_SRC_TRACK Nonfatal XC1 i0 Link 12 (0x040988e2 0x00000008 0x0 0x0 0x0 0x0)", Severity.WARNING),
        ("149, NETIR_INT  Fatal   XC0 i0 Link -1", Severity.WARNING),
        ("145, NEW_UNIT Fatal XC0 i0 Link 01 (0x00000082 0x00000040 0x0)", Severity.WARNING),
        ("144, ...", Severity.WARNING),
    ],
)
def test_an_nvlink5_error_is_critical_only_where_nvidias_table_says_reset(rest, severity):
    finding = one(xid(rest))
    assert (finding.severity, finding.clears) == (severity, Clears.GPU_RESET)


def test_a_harmless_nvlink5_line_does_not_hide_a_fatal_one_of_the_same_code():
    fatal = xid("145, RLW_REMAP Fatal XC1 i0 Link 10 (0x00000082 0x00000040 0x0)")
    harmless = xid("145, RLW_SRC_TRACK Nonfatal XC1 i0 Link 12 (0x040988e2 0x00000008 0x0)")
    finding = one(fatal, harmless)
    assert (finding.severity, finding.events) == (Severity.CRITICAL, (1, 2))
    assert "link 10" in finding.message
    assert one(fatal, harmless, boots=["a", "b"]).severity is Severity.WARNING
    assert one(fatal, harmless, times=[0.0, WINDOW + 1]).severity is Severity.WARNING


LOST = "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus."


def test_a_gpu_that_fell_off_the_bus_without_an_xid_is_critical():
    finding = one(LOST)
    assert (finding.code, finding.severity, finding.clears, finding.subject) == (
        "gpu_xid/fallen_off_bus",
        Severity.CRITICAL,
        Clears.REBOOT,
        PCI,
    )


def test_with_the_xid_it_is_one_finding():
    assert one(xid("79, GPU has fallen off the bus."), LOST).code == "gpu_xid/79"
    assert len(found(xid("79, GPU has fallen off the bus.", "0000:5e:00"), LOST)) == 2


def test_an_xid_of_another_time_or_boot_hides_no_loss():
    gone = xid("79, GPU has fallen off the bus.")
    assert len(found(gone, LOST, times=[1000.0, 1059.0])) == 1
    assert len(found(gone, LOST, times=[1000.0, 1061.0])) == 2
    assert len(found(gone, LOST, times=[1000.0, 1001.0], boots=["a", "b"])) == 2
    events = [event_of(RawLine(1000.0, gone, history=True), "b"), event_of(RawLine(1001.0, LOST), "b")]
    assert len(list(correlate(events, NODE, Config()))) == 2


RM_INIT = "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0x40:2168)"


def test_a_gpu_that_pci_has_but_the_driver_cannot_initialise_is_critical():
    assert judged(RM_INIT) == (Severity.CRITICAL, Clears.REBOOT, 0)
    on_pci = Inventory(devices=(PciDevice(PCI, "10de", "2330", "030200", "gpu"),))
    assert judged(RM_INIT, node=on_pci) == (Severity.CRITICAL, Clears.REBOOT, 0)
    assert one(RM_INIT).message == "the driver could not initialise the GPU (0x62:0x40:2168), GPU 3 (GPU-8a47641b)"


def test_one_that_pci_does_not_have_is_a_warning():
    assert judged(RM_INIT, node=Inventory()) == (Severity.WARNING, Clears.REBOOT, WINDOW)
    assert judged("NVRM: RmInitAdapter failed! (0x26:0xffff:1096)") == (Severity.WARNING, Clears.REBOOT, WINDOW)


def test_the_lines_of_one_memory_error_stay_apart_and_only_the_cause_drains():
    lines = [
        xid("48, pid='<unknown>', name=<unknown>, An uncorrectable double bit error (DBE) has been detected"),
        xid("63, pid='<unknown>', name=<unknown>, Row Remapper: New row marked for remapping"),
        xid("154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"),
        xid("171, x"),
        xid("45, pid=1, name=a, Ch 00000008"),
    ]
    severities = {
        finding.code: finding.severity for finding in found(*lines, times=[1000.0 + n / 100 for n in range(5)])
    }
    assert severities == {
        "gpu_xid/48": Severity.CRITICAL,
        "gpu_xid/63": Severity.INFO,
        "gpu_xid/154": Severity.CRITICAL,
        "gpu_xid/171": Severity.WARNING,
        "gpu_xid/45": Severity.INFO,
    }


def test_a_storm_is_one_finding_with_its_count():
    finding = one(*[xid("95, pid=1, name=a, Uncontained: x")] * 500, times=[1000.0 + n / 10 for n in range(500)])
    assert finding.message.endswith("500 lines")
    assert finding.events == (1,)


def test_other_events_are_left_to_other_checks():
    assert found("pcieport 0004:00:00.0: PCIe Bus Error: severity=Corrected", "NVRM: GPU Board Serial Number: 1") == []


def test_a_process_name_with_control_characters_is_printable():
    assert "a?b" in one(xid("13, pid=1, name=a\x1bb, Graphics Exception")).message


@pytest.mark.parametrize("code", [*range(1, 186), 999])
def test_every_xid_is_explained_as_it_is_judged(code):
    text = explain(f"gpu_xid/{code}")
    assert text is not None
    assert all((text.meaning, text.matters, text.todo))
    if code not in (74, 154) and not 144 <= code <= 150:
        finding = one(xid(f"{code}, x"))
        assert (text.severity, text.clears) == (finding.severity, finding.clears)


@pytest.mark.parametrize("code", ["fallen_off_bus", "rm_init_failed"])
def test_everything_else_that_it_finds_is_explained(code):
    text = explain(f"gpu_xid/{code}")
    assert text is not None
    assert text.clears is Clears.REBOOT
    assert all((text.meaning, text.matters, text.todo))


@given(st.text() | st.from_regex(re.compile("[0-9]{1,30}"), fullmatch=True))
def test_explain_takes_any_code(code):
    text = explain(f"gpu_xid/{code}")
    assert text is None or text.meaning


def test_every_recovery_action_has_words():
    assert sorted(RECOVERY) == [1, 2, 3, 4, 5, 6, 7]
    assert all(words for _, _, words in RECOVERY.values())


# --- stories


HOUR, DAY = 60.0, 24 * 60.0  # minutes
NVLINK5 = "145, RLW_{} XC1 i0 Link 12 (0x{:08x} 0x{:08x} 0x0 0x0 0x0 0x0)"


class Life(Story):
    def __init__(self) -> None:
        super().__init__(gpu_xid)

    def says(self, *lines, node=NODE):
        for line in lines:
            event = event_of(RawLine(self.now, line), self.boot_id)
            assert event is not None
            self.hear(event, node)
        return self

    @property
    def acts(self):
        return (self.drained, self.requeued)


def to(action):
    return xid(f"154, GPU recovery action changed from 0x0 (None) to 0x{action:x} (x)")


@pytest.mark.parametrize(
    ("line", "node"),
    [
        (xid("79, pid=1, name=a, GPU has fallen off the bus."), NODE),
        (xid("151, Key rotation Error"), NODE),
        (LOST, NODE),
        (RM_INIT, NODE),
        (to(2), NODE),
        (to(7), NODE),
    ],
)
def test_what_needs_a_reboot_drains_and_requeues_until_the_second_time_an_engineer_must_say_so(line, node):
    life = Life().says(line, node=node)
    assert life.acts == (True, True)
    life.wait(30 * DAY).reset(PCI)
    assert life.drained
    life.reboot()
    assert not life.drained
    life.wait(DAY).says(line, node=node)
    assert life.acts == (True, True)
    life.reboot().wait(30 * DAY)
    assert life.drained
    life.repaired(next(iter(life.conditions.values())).code)
    assert not life.drained


FATAL_NVLINK5 = xid(NVLINK5.format("REMAP Fatal", 0x82, 0x40))


@pytest.mark.parametrize("line", [*(xid(f"{code}, x") for code in sorted(RESET)), to(1), to(4), to(6), FATAL_NVLINK5])
@pytest.mark.parametrize("repair", ["reset", "reboot"])
def test_what_needs_a_reset_drains_and_requeues_until_a_reset_of_that_gpu_or_a_reboot(line, repair):
    life = Life().says(line)
    assert life.acts == (True, True)
    life.wait(30 * DAY).reset(NODE.gpus[1].pci)
    assert life.drained
    life = life.reset(PCI) if repair == "reset" else life.reboot()
    assert (life.drained, life.codes) == (False, [])


def test_an_nvlink_error_only_warns_for_a_day_or_until_a_reset():
    life = Life().says(*(xid(NVLINK.format(link)) for link in range(4)))
    assert (life.acts, life.codes) == ((False, False), ["gpu_xid/74"])
    assert life.wait(DAY - HOUR).codes == ["gpu_xid/74"]
    assert life.wait(2 * HOUR).codes == []
    assert life.wait(DAY).says(xid(NVLINK.format(1))).reset(PCI).codes == []


def test_an_nvlink_error_that_repeats_within_a_day_drains_and_requeues_until_a_reset_and_counts_anew_after_it():
    line = xid(NVLINK.format(1))
    life = Life().says(line).wait(23 * HOUR).says(line)
    assert life.acts == (True, True)
    assert life.wait(30 * DAY).drained
    assert not life.reset(PCI).drained
    assert life.wait(HOUR).says(line).acts == (False, False)
    assert life.wait(HOUR).says(line).drained


APPLICATION = [13, 31, 32, 43, 45, 63, 68, 69, 94]


@pytest.mark.parametrize(
    "code",
    sorted({*APPLICATION, *(n for n in range(173) if (f := codes.xid(n)) and f.action in ("RESTART_APP", "IGNORE"))}),
)
def test_what_a_job_did_never_drains_however_often_and_is_forgotten_after_an_hour(code):
    life = Life()
    for _ in range(50):
        life.says(xid(f"{code}, pid=1, name=python3, x")).wait(1)
    assert (life.acts, life.codes) == ((False, False), [f"gpu_xid/{code}"])
    assert life.wait(58).codes == [f"gpu_xid/{code}"]
    assert life.wait(2).codes == []


@pytest.mark.parametrize(
    "line",
    [
        *(xid(f"{code}, x") for code in (1, 54, 61, 65, 78, 81, 159, *range(162, 173), 173, 177, 999)),
        *(to(action) for action in (3, 5, 0x1F)),
        xid("154, cut"),
        xid(NVLINK5.format("SRC_TRACK Nonfatal", 0x040988E2, 0x8)),
        xid("149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x00000000 0x0 0x0 0x0 0x0)"),  # not RESET_GPU
        xid("149, NETIR_INT  Fatal   XC0 i0 Link -1"),
        "NVRM: RmInitAdapter failed! (0x26:0xffff:1096)",
    ],
)
def test_what_nobody_can_justify_a_drain_for_warns_for_a_day(line):
    life = Life()
    for _ in range(50):
        life.says(line).wait(10)
    assert life.acts == (False, False)
    assert len(life.codes) == 1
    assert len(life.wait(DAY - 11).codes) == 1
    assert life.wait(2).codes == []


@pytest.mark.parametrize(
    ("line", "repair"),
    [(to(3), "reset"), (FATAL_NVLINK5.replace("Fatal", "Nonfatal"), "reset")],
)
def test_such_a_warning_ends_with_its_repair_too(line, repair):
    life = Life().says(line)
    assert life.wait(HOUR).codes
    assert (life.reset(PCI) if repair == "reset" else life.reboot()).codes == []


def test_a_recovery_action_that_is_no_longer_asked_for_ends_only_with_evidence_of_what_was_done():
    life = Life().says(to(1), to(0))
    assert life.acts == (True, True)
    assert life.wait(30 * DAY).drained
    assert not life.reset(PCI).drained


def test_a_recovery_action_that_got_worse_needs_the_reboot():
    life = Life().says(to(1), to(2)).reset(PCI)
    assert life.drained
    assert not life.reboot().drained


def test_a_job_that_crashes_on_a_gpu_that_waits_for_a_reset_changes_nothing():
    life = Life().says(xid("95, x"), xid("13, x"), xid("45, x"), xid("63, x"))
    assert life.acts == (True, True)
    life.reset(PCI)
    assert not life.drained


def test_what_the_log_held_before_healthd_first_looked_never_acts():
    event = event_of(RawLine(0.0, xid("79, GPU has fallen off the bus."), history=True), "b")
    life = Life().hear(event, NODE)
    assert (life.drained, life.codes) == (False, ["gpu_xid/79"])
    assert Life().hear(event, NODE).says(xid("79, GPU has fallen off the bus.")).drained
