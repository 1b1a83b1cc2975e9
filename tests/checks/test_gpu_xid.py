import re
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_lines import event_of, finding_of, findings_of
from story import Story

from healthd.checks import gpu_count, gpu_xid
from healthd.checks.gpu_xid import Config, correlate, explain
from healthd.common.model import Clears, Finding, Gpu, Inventory, KernelEvent, PciDevice, Severity
from healthd.nvidia import codes
from healthd.nvidia.recovery_action import ACTIONS
from healthd.nvidia.xid_table import RESET_XIDS

PCI = "0000:3b:00.0"
NODE = Inventory(gpus=(Gpu(PCI, 3, "GPU-8a47641b"), Gpu("0000:5e:00.0", 4, "GPU-5e")))
WINDOW = Config().warning_window_seconds


findings_from = partial(findings_of, gpu_xid, node=NODE)
finding_from = partial(finding_of, gpu_xid, node=NODE)


def xid(text, pci="0000:3b:00"):
    return f"NVRM: Xid (PCI:{pci}): {text}"


def outcome(*lines, **kw):
    finding = finding_from(*lines, **kw)
    return finding.severity, finding.clears, finding.window_seconds


def test_lost_gpu_is_critical_until_reboot_with_index_and_uuid():
    finding = finding_from(xid("79, pid=1234, name=python3, GPU has fallen off the bus."))
    assert finding == Finding(
        Severity.CRITICAL,
        "gpu_xid/79",
        PCI,
        "Xid 79: GPU has fallen off the bus, GPU 3 (GPU-8a47641b), python3 (pid 1234)",
        Clears.REBOOT,
        events=(1,),
    )


@given(
    st.one_of(st.text(), st.from_regex(r"[0-9-]{1,12}", fullmatch=True), st.sampled_from(["74", "154", "149"])),
    st.dictionaries(
        st.sampled_from(["unit", "intr_info", "error_status", "register", "recovery_to", "fatal", "inactive"]),
        st.one_of(st.text(max_size=40), st.from_regex(r"(0x)?[0-9a-f]{1,12}( 0x[0-9a-f]+)?", fullmatch=True)),
    ),
)
def test_correlate_accepts_any_event_in_ledger(code, fields):
    made = KernelEvent("xid", code, PCI, time=1000.0, last_time=1000.0, fields=tuple(fields.items()), sequence=1)
    for finding in correlate([made], NODE, Config()):
        assert finding.message


@pytest.mark.parametrize("code", ["9-4", "-79", "٧٩", "79 ", "9" * 5000])
def test_invalid_xid_code_is_unknown_and_only_warns(code):
    made = KernelEvent("xid", code, PCI, time=1000.0, last_time=1000.0, sequence=1)
    (finding,) = correlate([made], NODE, Config())
    assert (finding.severity, finding.clears, finding.window_seconds) == (Severity.WARNING, Clears.WINDOW, WINDOW)
    assert "unknown" in finding.message


def test_key_rotation_error_needs_reboot():
    assert outcome(xid("151, Key rotation Error")) == (Severity.CRITICAL, Clears.REBOOT, 0)


@pytest.mark.parametrize("code", [46, 48, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158])
def test_reset_xid_is_critical_until_gpu_reset(code):
    assert outcome(xid(f"{code}, pid=1, name=a, x")) == (Severity.CRITICAL, Clears.GPU_RESET, 0)


def test_reset_xids_contain_reset_class_of_catalogue():
    reset = {code for code in range(1, 177) if (fact := codes.xid(code)) and fact.action == "RESET_GPU"}
    assert reset <= RESET_XIDS
    assert RESET_XIDS - reset == {48, 175}


@pytest.mark.parametrize("code", [13, 31, 32, 43, 45, 63, 68, 69, 94, 8, 11, 70, 92, 121, 137, 160])
def test_application_xid_never_drains_and_clears_after_an_hour(code):
    severity, clears, window = outcome(*[xid(f"{code}, pid=1, name=a, x")] * 20)
    assert severity <= Severity.WARNING
    assert (clears, window) == (Clears.WINDOW, 3600)


@pytest.mark.parametrize("code", [63, 45, 43])
def test_follow_up_xid_is_only_recorded(code):
    assert finding_from(xid(f"{code}, x")).severity is Severity.INFO


@pytest.mark.parametrize("code", [1, 54, 61, 65, 78, 159, 162, 163, 172, 176, 185, 999])
def test_xid_without_justified_action_warns_for_a_day(code):
    assert outcome(xid(f"{code}, x")) == (Severity.WARNING, Clears.WINDOW, WINDOW)


def test_only_listed_xids_drain():
    drains = {code for code in range(1, 1000) if finding_from(xid(f"{code}, x")).severity > Severity.WARNING}
    assert drains == RESET_XIDS | {79, 151, 173}


def test_xids_from_driver_source_have_severities():
    gsp = finding_from(xid("119, pid=7, name=a, Timeout after 45s of waiting for RPC response from GPU0 GSP!"))
    memory = finding_from(xid("175, pid=7, name=a, Timeout after 45s of waiting for RPC response from GPU0 GSP!"))
    assert (memory.severity, memory.clears) == (gsp.severity, gsp.clears) == (Severity.CRITICAL, Clears.GPU_RESET)
    c2c = finding_from(xid("173, C2C link failure"))
    assert (c2c.severity, c2c.clears, c2c.window_seconds) == (Severity.DEGRADED, Clears.REBOOT, 0.0)
    assert finding_from(xid("174, pid=7, name=a, Ch 00000008")).severity is Severity.INFO
    assert outcome(xid("176, x")) == (Severity.WARNING, Clears.WINDOW, WINDOW)
    assert [code for code in (173, 174, 175, 176) if codes.xid(code) is None] == []


@pytest.mark.parametrize(
    ("line", "code", "clears"),
    [
        ("NVRM: The NVIDIA probe routine failed for 1 device(s).", "gpu_xid/probe_failed", Clears.REBOOT),
        (
            "nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping further processing",
            "gpu_xid/peermem",
            Clears.WINDOW,
        ),
    ],
)
def test_probe_failure_and_peermem_error_warn(line, code, clears):
    finding = finding_from(line)
    assert (finding.code, finding.severity, finding.clears) == (code, Severity.WARNING, clears)
    assert explain(code) is not None


def test_gpu_count_runs_after_failed_probe():
    assert event_of("NVRM: The NVIDIA probe routine failed for 1 device(s).").kind in gpu_count.AFTER_EVENTS


@pytest.mark.parametrize(
    ("action", "severity", "clears"),
    [
        ("0x1 (GPU Reset Required)", Severity.CRITICAL, Clears.GPU_RESET),
        ("0x1 (PF FLR)", Severity.CRITICAL, Clears.GPU_RESET),
        ("0x2 (OS Reboot)", Severity.CRITICAL, Clears.REBOOT),
        ("0x3 (Drain P2P)", Severity.WARNING, Clears.GPU_RESET),
        ("0x4 (Drain and Reset)", Severity.DEGRADED, Clears.GPU_RESET),
        ("0x5 (GPU Reset Required)", Severity.WARNING, Clears.GPU_RESET),
        ("0x6 (Bus Reset)", Severity.CRITICAL, Clears.GPU_RESET),
        ("0x7 (System Reboot)", Severity.CRITICAL, Clears.REBOOT),
        ("0x1f (Something New)", Severity.WARNING, Clears.GPU_RESET),
    ],
)
def test_recovery_action_is_evaluated_by_number(action, severity, clears):
    finding = finding_from(xid(f"154, GPU recovery action changed from 0x0 (None) to {action}"))
    assert (finding.code, finding.severity, finding.clears) == ("gpu_xid/154", severity, clears)


def test_newest_recovery_action_counts():
    to_reset = xid("154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)")
    to_none = xid("154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)")
    assert findings_from(to_reset, to_none) == []
    assert finding_from(to_none, to_reset).severity is Severity.CRITICAL
    assert findings_from(to_none) == []
    assert outcome(xid("154, cut")) == (Severity.WARNING, Clears.GPU_RESET, WINDOW)


NVLINK = "74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link {}(0x10000, 0x0)"


def test_nvlink_error_on_several_links_warns_once():
    lines = [xid(NVLINK.format(link)) for link in range(6)]
    assert outcome(*lines, times=[1000.0] * 6) == (Severity.WARNING, Clears.GPU_RESET, 24 * 3600)


def test_nvlink_error_repeated_within_a_day_is_critical():
    lines = [xid(NVLINK.format(1)), xid(NVLINK.format(2))]
    assert outcome(*lines, times=[1000.0, 1000.0 + 3600 * 23]) == (Severity.CRITICAL, Clears.GPU_RESET, 0)
    assert finding_from(*lines, times=[1000.0, 1000.0 + 3600 * 25]).severity is Severity.WARNING


def test_nvlink_errors_of_two_gpus_are_no_repetition():
    lines = [xid(NVLINK.format(1)), xid(NVLINK.format(1), "0000:5e:00")]
    assert [finding.severity for finding in findings_from(*lines)] == [Severity.WARNING] * 2


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        ("145, RLW_REMAP Fatal XC1 i0 Link 10 (0x00000082 0x00000040 0x0 0x0 0x0 0x0)", Severity.CRITICAL),
        ("149, NETIR_LINK_EVT Fatal XC0 i0 Link 09 (0x004525c6 0x00000000 0x0 0x0 0x0 0x0)", Severity.CRITICAL),
        ("149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x00000000 0x0 0x0 0x0 0x0)", Severity.WARNING),
        ("149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 01 (0x00082226 0x00000001 0x0 0x0 0x0 0x0)", Severity.INFO),
        ("145, RLW_SRC_TRACK Nonfatal XC1 i0 Link 12 (0x040988e2 0x00000008 0x0 0x0 0x0 0x0)", Severity.WARNING),
        ("149, NETIR_INT  Fatal   XC0 i0 Link -1", Severity.WARNING),
        ("145, NEW_UNIT Fatal XC0 i0 Link 01 (0x00000082 0x00000040 0x0)", Severity.WARNING),
        ("144, ...", Severity.WARNING),
    ],
)
def test_nvlink5_error_is_critical_only_if_table_requires_reset(text, severity):
    finding = finding_from(xid(text))
    clears = Clears.WINDOW if severity is Severity.INFO else Clears.GPU_RESET
    assert (finding.severity, finding.clears) == (severity, clears)


def test_harmless_nvlink5_line_does_not_hide_fatal_one():
    fatal = xid("145, RLW_REMAP Fatal XC1 i0 Link 10 (0x00000082 0x00000040 0x0)")
    harmless = xid("145, RLW_SRC_TRACK Nonfatal XC1 i0 Link 12 (0x040988e2 0x00000008 0x0)")
    finding = finding_from(fatal, harmless)
    assert (finding.severity, finding.events) == (Severity.CRITICAL, (1, 2))
    assert "link 10" in finding.message
    assert finding_from(fatal, harmless, boots=["a", "b"]).severity is Severity.WARNING
    assert finding_from(fatal, harmless, times=[0.0, WINDOW + 1]).severity is Severity.WARNING


LOST = "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus."


def test_gpu_off_the_bus_without_xid_is_critical():
    finding = finding_from(LOST)
    assert (finding.code, finding.severity, finding.clears, finding.subject) == (
        "gpu_xid/fallen_off_bus",
        Severity.CRITICAL,
        Clears.REBOOT,
        PCI,
    )


def test_loss_and_its_xid_give_one_finding():
    assert finding_from(xid("79, GPU has fallen off the bus."), LOST).code == "gpu_xid/79"
    assert len(findings_from(xid("79, GPU has fallen off the bus.", "0000:5e:00"), LOST)) == 2


def test_xid_of_other_time_or_boot_does_not_hide_loss():
    xid_79 = xid("79, GPU has fallen off the bus.")
    assert len(findings_from(xid_79, LOST, times=[1000.0, 1059.0])) == 1
    assert len(findings_from(xid_79, LOST, times=[1000.0, 1061.0])) == 2
    assert len(findings_from(xid_79, LOST, times=[1000.0, 1001.0], boots=["a", "b"])) == 2
    events = [event_of(xid_79, history=True), event_of(LOST, 1001.0)]
    assert len(list(correlate(events, NODE, Config()))) == 2


RM_INIT = "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0x40:2168)"


def test_gpu_that_driver_cannot_initialise_is_critical():
    assert outcome(RM_INIT) == (Severity.CRITICAL, Clears.REBOOT, 0)
    on_pci = Inventory(devices=(PciDevice(PCI, "10de", "2330", "030200", "gpu"),))
    assert outcome(RM_INIT, node=on_pci) == (Severity.CRITICAL, Clears.REBOOT, 0)
    assert (
        finding_from(RM_INIT).message
        == "the driver could not initialise the GPU (0x62:0x40:2168), GPU 3 (GPU-8a47641b)"
    )


def test_failed_initialisation_without_pci_device_warns():
    assert outcome(RM_INIT, node=Inventory()) == (Severity.WARNING, Clears.REBOOT, WINDOW)
    assert outcome("NVRM: RmInitAdapter failed! (0x26:0xffff:1096)") == (Severity.WARNING, Clears.REBOOT, WINDOW)


def test_lines_of_memory_error_stay_separate_and_only_cause_drains():
    lines = [
        xid("48, pid='<unknown>', name=<unknown>, An uncorrectable double bit error (DBE) has been detected"),
        xid("63, pid='<unknown>', name=<unknown>, Row Remapper: New row marked for remapping"),
        xid("154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"),
        xid("171, x"),
        xid("45, pid=1, name=a, Ch 00000008"),
    ]
    severities = {
        finding.code: finding.severity for finding in findings_from(*lines, times=[1000.0 + n / 100 for n in range(5)])
    }
    assert severities == {
        "gpu_xid/48": Severity.CRITICAL,
        "gpu_xid/63": Severity.INFO,
        "gpu_xid/154": Severity.CRITICAL,
        "gpu_xid/171": Severity.INFO,
        "gpu_xid/45": Severity.INFO,
    }


def nvrm(text, gpu=None):
    return f"NVRM: {text}" if gpu is None else f"NVRM: GPU{gpu} {text}"


TIMEOUT = "119, pid=1, name=a, Timeout after 45s of waiting for RPC response from GPU4 GSP! Expected function 76 (x)."
HALTED = "_kgspRpcGspEventPmuHalted: Received signal from GSP that PMU has halted."
NO_BOOT = "_kgspBootGspRm: unexpected WPR2 already up, cannot proceed with booting GSP"
REFUSED = "nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED]"
CRASH = "kgspHealthCheck_TU102: ****************************** GSP-CrashCat Report *******************************"
NO_ANSWER = "_kgspLogXid119: ********************************* GSP Timeout **********************************"
ROW = "     0    76   GSP_RM_CONTROL        0x000000002080a097 0x0000000000000490 0x000609ffebd7f5bd          y"


@pytest.mark.parametrize(
    ("text", "severity", "clears", "window"),
    [
        (NO_BOOT, Severity.CRITICAL, Clears.REBOOT, 0),
        (HALTED, Severity.CRITICAL, Clears.GPU_RESET, 0),
        (REFUSED, Severity.CRITICAL, Clears.GPU_RESET, 0),
        (CRASH, Severity.WARNING, Clears.GPU_RESET, WINDOW),
        (NO_ANSWER, Severity.WARNING, Clears.GPU_RESET, WINDOW),
        (
            "kgspExecuteBooterLoad_TU102: failed to execute Booter Load: 0x62",
            Severity.WARNING,
            Clears.GPU_RESET,
            WINDOW,
        ),
        ("RPC history (CPU -> GSP):", Severity.INFO, Clears.WINDOW, 3600),
        ("kgspSomethingNew_GB300: a future message", Severity.INFO, Clears.WINDOW, 3600),
    ],
)
def test_gsp_line_without_xid_applies_to_gpu_with_that_number(text, severity, clears, window):
    finding = finding_from(nvrm(text, 3))
    assert (finding.code, finding.subject) == ("gpu_xid/gsp", PCI)
    assert (finding.severity, finding.clears, finding.window_seconds) == (severity, clears, window)
    assert finding.message.endswith("GPU 3 (GPU-8a47641b)")


def test_gsp_line_of_unknown_gpu_only_warns():
    for text in (NO_BOOT, HALTED, REFUSED):
        finding = finding_from(nvrm(text, 7))
        assert (finding.severity, finding.subject, finding.window_seconds) == (Severity.WARNING, "", WINDOW)
        assert finding.message.endswith("the driver's GPU7")
        assert finding_from(nvrm(text)).severity is Severity.WARNING


def test_line_with_address_and_number_maps_number_to_gpu():
    timeout = xid(TIMEOUT, "0000:5e:00")
    (first, second) = findings_from(timeout, nvrm(HALTED, 4), times=[0.0, 3600.0])
    assert (first.subject, second.subject, second.code) == ("0000:5e:00.0", "0000:5e:00.0", "gpu_xid/gsp")
    swapped = Inventory(gpus=(Gpu(PCI, 4), Gpu("0000:5e:00.0", 3)))
    assert [f.subject for f in findings_from(timeout, nvrm(HALTED, 4), node=swapped, times=[0.0, 3600.0])] == [
        "0000:5e:00.0"
    ] * 2


def test_gsp_lines_give_one_finding_of_worst_severity():
    finding = finding_from(nvrm(NO_ANSWER, 3), nvrm(NO_BOOT, 3), nvrm(CRASH, 3), times=[1.0, 2.0, 3.0])
    assert (finding.severity, finding.clears, finding.events) == (Severity.CRITICAL, Clears.REBOOT, (1, 2, 3))
    assert "does not boot" in finding.message


@pytest.mark.parametrize(
    "line",
    [
        xid(TIMEOUT.replace("GPU4", "GPU3")),
        xid("120, GSP kernel exception: store access page fault (cause:0xf) @ pc:0xffffffff93003d42, partition:4#0"),
        xid("62, 223b6a66 00002100"),
        xid("154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"),
        xid("79, GPU has fallen off the bus."),
        "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0x40:2168)",
    ],
)
@pytest.mark.parametrize("number", [3, None])
def test_gsp_line_within_a_minute_of_xid_adds_no_finding(line, number):
    lines = [nvrm(text, number) for text in (NO_ANSWER, CRASH, HALTED, NO_BOOT, REFUSED)]
    codes_found = {
        finding.code for finding in findings_from(line, *lines, nvrm(ROW), times=[10.0, *[11.0 + n for n in range(6)]])
    }
    assert len(codes_found) == 1
    assert "gpu_xid/gsp" not in codes_found
    later = findings_from(line, lines[0], times=[10.0, 71.0])
    assert "gpu_xid/gsp" in {finding.code for finding in later}
    assert len(findings_from(line, nvrm(HALTED, 4), times=[10.0, 11.0])) == 2, "lines of another GPU"


def test_gsp_boot_failure_is_part_of_failed_initialisation_with_any_number():
    lines = [nvrm(NO_BOOT, 4), nvrm("RmInitAdapter: Cannot initialize GSP firmware RM", 4), RM_INIT]
    finding = finding_from(*lines, times=[1.0, 1.1, 1.2])
    assert (finding.code, finding.subject) == ("gpu_xid/rm_init_failed", PCI)


@pytest.mark.parametrize(
    "text",
    [
        "knvlinkUpdatePostRxDetectLinkMask_IMPL: Failed to update Rx Detect Link mask!",
        "knvlinkLogAliDebugMessages_GB100: ALI Error for GPU 3::linkId 5: 0x10001",
        "NVLink training failed on link 4",
    ],
)
def test_nvlink_line_without_xid_warns(text):
    finding = finding_from(nvrm(text, 3))
    assert (finding.code, finding.subject, finding.severity) == ("gpu_xid/nvlink", PCI, Severity.WARNING)
    assert (finding.clears, finding.window_seconds) == (Clears.GPU_RESET, WINDOW)
    assert finding_from(nvrm(text)).severity is Severity.WARNING
    assert finding_from(xid(NVLINK.format(1)), nvrm(text, 3), times=[1.0, 2.0]).code == "gpu_xid/74"
    assert finding_from(nvrm(text, 3), xid("136, x"), times=[1.0, 2.0]).code == "gpu_xid/136"


def test_retried_gsp_boot_does_not_drain():
    assert finding_from(nvrm("kgspBootstrap_TU102: Failed to boot GSP.", 3)).severity is Severity.WARNING
    assert (
        finding_from(nvrm("kgspInitRm_IMPL: Max GSP-RM boot attempts exceeded: 4/4", 3)).severity is Severity.CRITICAL
    )


def test_calls_failing_on_lost_gpu_are_reported_only_without_other_line():
    lost = "NVRM: nvCheckOkFailedNoLog: Check failed: GPU lost from the bus [NV_ERR_GPU_IS_LOST] (0x0000000F) returned"
    assert outcome(lost) == (Severity.WARNING, Clears.REBOOT, WINDOW)
    for line in (xid("79, GPU has fallen off the bus."), LOST, RM_INIT):
        assert (
            len(findings_from(line, lost, lost.replace("Check failed", "Assertion failed"), times=[1.0, 2.0, 3.0])) == 1
        )


@pytest.mark.parametrize("code", [171, 172])
@pytest.mark.parametrize("cause", [48, 63, 64, 94, 95, 140])
def test_memory_detail_xid_is_recorded_with_its_cause_and_warns_alone(code, cause):
    severities = {f.code: f.severity for f in findings_from(xid(f"{code}, x"), xid(f"{cause}, x"), times=[1.0, 1.1])}
    assert severities[f"gpu_xid/{code}"] is Severity.INFO
    assert outcome(xid(f"{code}, x")) == (Severity.WARNING, Clears.WINDOW, WINDOW)
    apart = findings_from(xid(f"{code}, x"), xid(f"{cause}, x", "0000:5e:00"), times=[1.0, 1.1])
    assert {f.code: f.severity for f in apart}[f"gpu_xid/{code}"] is Severity.WARNING


@pytest.mark.parametrize(
    ("registers", "severity", "text"),
    [
        ("0x0, 0x0, 0x0, 0x40000, 0x0, 0x0, 0x0", Severity.CRITICAL, "the NVLink fabric must be reset"),
        ("0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", Severity.WARNING, "perhaps the link's hardware"),
        ("0x10, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", Severity.WARNING, "ECC or parity"),
        ("0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0", Severity.WARNING, "field diagnostics"),
        ("0x0, 0x0, 0x0, 0x0, 0x100000, 0x0, 0x0", Severity.WARNING, "nothing lost"),
        ("0x40800001, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", Severity.WARNING, "link 2, fatal"),
    ],
)
def test_nvlink_error_message_decodes_registers(registers, severity, text):
    finding = finding_from(
        xid(f"74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 2({registers})")
    )
    assert (finding.severity, finding.clears) == (severity, Clears.GPU_RESET)
    assert text in finding.message


def test_reset_registers_are_not_hidden_by_harmless_line_of_same_link():
    template = "74, NVLink: fatal error detected on link 2(0x10000, 0x0, 0x0, {}, 0x0, 0x0, 0x0)"
    finding = finding_from(xid(template.format("0x0")), xid(template.format("0x40000")), times=[1.0, 1.5])
    assert (finding.severity, finding.clears) == (Severity.CRITICAL, Clears.GPU_RESET)
    assert "the NVLink fabric must be reset" in finding.message


def test_link_that_does_not_train_is_critical_despite_later_lines():
    down = xid("74, NVLink: failed to train link 3 to remote PCI:0000:08:00")
    assert outcome(down) == (Severity.CRITICAL, Clears.GPU_RESET, 0)
    finding = finding_from(down, xid(NVLINK.format(4)), times=[1.0, 2.0])
    assert (finding.severity, "link 3, the link is down" in finding.message) == (Severity.CRITICAL, True)


def test_message_names_previous_xid():
    finding = finding_from(xid("45, pid=11, name=python3, Ch 00000001 caused by previous Xid 149"))
    assert finding.message.endswith(", after Xid 149, GPU 3 (GPU-8a47641b), python3 (pid 11)")


def test_nvlink5_message_has_sub_code():
    finding = finding_from(xid("149, NETIR_LINK_EVT Fatal XC0 i0 Link 09 (0x004525c6 0x00000000 0x0 0x0 0x0 0x0)"))
    assert finding.message.startswith("Xid 149: NVLINK: NETIR Error, NETIR_LINK_EVT, 149:4, link 9, fatal, GPU 3")


@pytest.mark.parametrize(
    "text", ["999, x", "178, x", "145, NEW_UNIT Fatal XC0 i0 Link 01 (0x00000082 0x00000040 0x0 0x0 0x0 0x0)"]
)
def test_unlisted_code_is_unknown_and_warns_for_a_day(text):
    finding = finding_from(xid(text))
    assert (finding.severity, finding.window_seconds) == (Severity.WARNING, WINDOW)
    assert "unknown to this version" in finding.message


def test_xid_storm_gives_one_finding_with_count():
    finding = finding_from(
        *[xid("95, pid=1, name=a, Uncontained: x")] * 500, times=[1000.0 + n / 10 for n in range(500)]
    )
    assert finding.message.endswith("500 lines")
    assert finding.events == (1,)


def test_other_events_are_left_to_other_checks():
    assert (
        findings_from(
            "pcieport 0004:00:00.0: PCIe Bus Error: severity=Corrected",
            "NVRM: GPU Board Serial Number: 1",
            all_events=False,
        )
        == []
    )


def test_control_characters_in_process_name_are_replaced():
    assert "a?b" in finding_from(xid("13, pid=1, name=a\x1bb, Graphics Exception")).message


@pytest.mark.parametrize("code", [*range(1, 186), 999])
def test_explain_of_xid_matches_its_finding(code):
    text = explain(f"gpu_xid/{code}")
    assert text is not None
    assert all((text.meaning, text.matters, text.todo))
    if code not in (74, 154) and not 144 <= code <= 150:
        finding = finding_from(xid(f"{code}, x"))
        assert (text.severity, text.clears) == (finding.severity, finding.clears)


@pytest.mark.parametrize("code", ["gpu_is_lost", "gsp", "nvlink"])
def test_explain_of_lines_without_xid(code):
    text = explain(f"gpu_xid/{code}")
    assert text is not None
    assert all((text.meaning, text.matters, text.todo))
    assert text.severity is (Severity.CRITICAL if code == "gsp" else Severity.WARNING)


def test_explain_covers_only_own_codes():
    assert [explain(code) for code in ("sxid/20034", "nvlink5/149:4", "79", "gpu_xid/", "gpu_xid/sxid-20034")] == [
        None
    ] * 5


@pytest.mark.parametrize("code", ["fallen_off_bus", "rm_init_failed"])
def test_explain_of_lost_and_uninitialised_gpu(code):
    text = explain(f"gpu_xid/{code}")
    assert text is not None
    assert text.clears is Clears.REBOOT
    assert all((text.meaning, text.matters, text.todo))


@given(st.text() | st.from_regex(re.compile("[0-9]{1,30}"), fullmatch=True))
def test_explain_accepts_any_code(code):
    text = explain(f"gpu_xid/{code}")
    assert text is None or text.meaning


def test_every_recovery_action_has_a_text():
    assert sorted(ACTIONS) == [1, 2, 3, 4, 5, 6, 7]
    assert all(action.text for action in ACTIONS.values())


# --- stories


HOUR, DAY = 60.0, 24 * 60.0  # minutes
NVLINK5 = "145, RLW_{} XC1 i0 Link 12 (0x{:08x} 0x{:08x} 0x0 0x0 0x0 0x0)"


class XidStory(Story):
    def __init__(self) -> None:
        super().__init__(gpu_xid, inventory=NODE)

    @property
    def acts(self):
        return (self.drained, self.requeued)


def recovery_action(action):
    return xid(f"154, GPU recovery action changed from 0x0 (None) to 0x{action:x} (x)")


@pytest.mark.parametrize(
    ("line", "node"),
    [
        (xid("79, pid=1, name=a, GPU has fallen off the bus."), NODE),
        (xid("151, Key rotation Error"), NODE),
        (LOST, NODE),
        (RM_INIT, NODE),
        (recovery_action(2), NODE),
        (recovery_action(7), NODE),
    ],
)
def test_reboot_fault_drains_until_reboot_and_second_time_until_repaired(line, node):
    story = XidStory().log_lines(line, node=node)
    assert story.acts == (True, True)
    story.wait(30 * DAY).reset(PCI)
    assert story.drained
    story.reboot()
    assert not story.drained
    story.wait(DAY).log_lines(line, node=node)
    assert story.acts == (True, True)
    story.reboot().wait(30 * DAY)
    assert story.drained
    story.repaired(next(iter(story.conditions.values())).code)
    assert not story.drained


FATAL_NVLINK5 = xid(NVLINK5.format("REMAP Fatal", 0x82, 0x40))


@pytest.mark.parametrize(
    "line", [*(xid(f"{code}, x") for code in sorted(RESET_XIDS)), recovery_action(1), recovery_action(6), FATAL_NVLINK5]
)
@pytest.mark.parametrize("repair", ["reset", "reboot"])
def test_reset_fault_drains_until_reset_of_that_gpu_or_reboot(line, repair):
    story = XidStory().log_lines(line)
    assert story.acts == (True, True)
    story.wait(30 * DAY).reset(NODE.gpus[1].pci)
    assert story.drained
    story = story.reset(PCI) if repair == "reset" else story.reboot()
    assert (story.drained, story.codes) == (False, [])


def test_nvlink_error_warns_for_a_day_or_until_reset():
    story = XidStory().log_lines(*(xid(NVLINK.format(link)) for link in range(4)))
    assert (story.acts, story.codes) == ((False, False), ["gpu_xid/74"])
    assert story.wait(DAY - HOUR).codes == ["gpu_xid/74"]
    assert story.wait(2 * HOUR).codes == []
    assert story.wait(DAY).log_lines(xid(NVLINK.format(1))).reset(PCI).codes == []


def test_repeated_nvlink_error_drains_until_reset_and_count_restarts():
    line = xid(NVLINK.format(1))
    story = XidStory().log_lines(line).wait(23 * HOUR).log_lines(line)
    assert story.acts == (True, True)
    assert story.wait(30 * DAY).drained
    assert not story.reset(PCI).drained
    assert story.wait(HOUR).log_lines(line).acts == (False, False)
    assert story.wait(HOUR).log_lines(line).drained


APPLICATION = [13, 31, 32, 43, 45, 63, 68, 69, 94]


@pytest.mark.parametrize(
    "code",
    sorted({*APPLICATION, *(n for n in range(173) if (f := codes.xid(n)) and f.action in ("RESTART_APP", "IGNORE"))}),
)
def test_application_xid_never_drains_and_clears_one_hour_after_last(code):
    story = XidStory()
    for _ in range(50):
        story.log_lines(xid(f"{code}, pid=1, name=python3, x")).wait(1)
    assert (story.acts, story.codes) == ((False, False), [f"gpu_xid/{code}"])
    assert story.wait(58).codes == [f"gpu_xid/{code}"]
    assert story.wait(2).codes == []


@pytest.mark.parametrize(
    "line",
    [
        *(xid(f"{code}, x") for code in (1, 54, 61, 65, 78, 81, 159, *range(162, 173), 176, 177, 999)),
        *(recovery_action(action) for action in (3, 5, 0x1F)),
        xid("154, cut"),
        xid(NVLINK5.format("SRC_TRACK Nonfatal", 0x040988E2, 0x8)),
        xid("149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x00000000 0x0 0x0 0x0 0x0)"),  # other action
        xid("149, NETIR_INT  Fatal   XC0 i0 Link -1"),
        "NVRM: RmInitAdapter failed! (0x26:0xffff:1096)",
    ],
)
def test_unjustified_fault_never_drains_and_clears_after_a_day(line):
    story = XidStory()
    for _ in range(50):
        story.log_lines(line).wait(10)
    assert story.acts == (False, False)
    assert len(story.codes) == 1
    assert len(story.wait(DAY - 11).codes) == 1
    assert story.wait(2).codes == []


@pytest.mark.parametrize(
    ("line", "repair"),
    [(recovery_action(3), "reset"), (FATAL_NVLINK5.replace("Fatal", "Nonfatal"), "reset")],
)
def test_warning_also_ends_with_its_repair(line, repair):
    story = XidStory().log_lines(line)
    assert story.wait(HOUR).codes
    assert (story.reset(PCI) if repair == "reset" else story.reboot()).codes == []


def recovery_action_cleared(action):
    return xid(f"154, GPU recovery action changed from 0x{action:x} (x) to 0x0 (None)")


@pytest.mark.parametrize("action", [1, 4, 6])
def test_cleared_reset_request_is_evidence_of_a_reset(action):
    story = XidStory().log_lines(xid("95, x"), recovery_action(action))
    assert story.acts == (True, True)
    story.log_lines(recovery_action_cleared(action))
    assert (story.drained, story.codes) == (False, [])


@pytest.mark.parametrize("action", [3, 5])
def test_cleared_other_request_is_no_evidence_of_a_reset(action):
    story = XidStory().log_lines(xid("95, x"), recovery_action(action), recovery_action_cleared(action))
    assert story.drained


def test_cleared_request_clears_only_earlier_reset_faults_of_that_gpu():
    other_pci = NODE.gpus[1].pci.removesuffix(".0")
    story = XidStory().log_lines(xid("95, x"), xid("95, x", other_pci), xid("79, x"), recovery_action(1))
    story.log_lines(recovery_action_cleared(1))
    assert {(c.code, c.subject) for c in story.conditions.values()} == {
        ("gpu_xid/95", NODE.gpus[1].pci),
        ("gpu_xid/79", PCI),
    }
    story.log_lines(xid("48, x"))
    assert ("gpu_xid/48", PCI) in {(c.code, c.subject) for c in story.conditions.values()}
    assert story.drained


def test_history_line_is_no_evidence_of_a_reset():
    story = XidStory().log_lines(xid("95, x"))
    assert story.take_event(event_of(recovery_action_cleared(1), history=True)).drained


OTHER = NODE.gpus[1].pci


@pytest.mark.parametrize(
    "reset",
    [*(xid(f"{code}, x") for code in sorted(RESET_XIDS)), recovery_action(1), recovery_action(6), FATAL_NVLINK5],
)
@pytest.mark.parametrize(
    "reboot", [xid("79, x"), xid("151, x"), recovery_action(2), recovery_action(7), LOST, RM_INIT, nvrm(NO_BOOT, 3)]
)
def test_gpu_reset_clears_only_reset_faults_of_that_gpu(reset, reboot):
    if "154" in reset and "154" in reboot:
        return  # one state: the newest line counts
    on_other_gpu = reset.replace("0000:3b:00", OTHER.removesuffix(".0"))
    story = XidStory().log_lines(reset).wait(2).log_lines(on_other_gpu).wait(2).log_lines(reboot)
    before = {(c.code, c.subject) for c in story.conditions.values()}
    story.reset(PCI)
    ended = before - {(c.code, c.subject) for c in story.conditions.values()}
    (first,) = [finding.code for finding in findings_from(reset)]
    assert ended == {(first, PCI)}
    assert story.drained
    story.reset(OTHER)
    assert {c.subject for c in story.conditions.values()} == {PCI}
    assert story.drained
    story.reboot()
    assert (story.drained, story.codes) == (False, [])


@pytest.mark.parametrize("text", [HALTED, REFUSED])
def test_gsp_failure_drains_until_reset_of_that_gpu(text):
    story = XidStory().log_lines(nvrm(text, 3))
    assert story.acts == (True, True)
    assert story.wait(30 * DAY).reset(OTHER).drained
    assert not story.reset(PCI).drained


def test_slow_or_crashed_gsp_without_xid_never_drains():
    story = XidStory()
    for _ in range(50):
        story.log_lines(nvrm(NO_ANSWER, 3), nvrm(CRASH, 3), nvrm(ROW)).wait(10)
    assert story.acts == (False, False)
    assert story.wait(DAY + HOUR).codes == []


def test_memory_error_is_one_cause_and_clears_with_one_reset():
    story = XidStory().log_lines(
        xid("48, pid='<unknown>', name=<unknown>, An uncorrectable double bit error (DBE) has been detected"),
        xid("63, pid='<unknown>', name=<unknown>, Row Remapper: New row marked for remapping"),
        xid("171, pid='<unknown>', name=<unknown>, Uncorrectable DRAM error"),
        recovery_action(4),
        xid("45, pid=1, name=a, Ch 00000008 caused by previous Xid 48"),
    )
    severe = {c.code for c in story.conditions.values() if c.severity >= Severity.WARNING}
    assert severe == {"gpu_xid/48", "gpu_xid/154"}
    story.reset(PCI)
    assert not story.drained


def test_recommended_reset_drains_and_required_reset_requeues():
    assert not XidStory().log_lines(recovery_action(4)).reset(PCI).drained
    story = XidStory().log_lines(recovery_action(4))
    assert story.acts == (True, False)
    story.log_lines(recovery_action(1))
    assert story.acts == (True, True)
    story.log_lines(recovery_action(4))
    assert story.acts == (True, True), "the reset was never performed"


def test_worsened_recovery_action_needs_reboot():
    story = XidStory().log_lines(recovery_action(1), recovery_action(2)).reset(PCI)
    assert story.drained
    assert not story.reboot().drained


def test_job_crash_on_gpu_awaiting_reset_changes_nothing():
    story = XidStory().log_lines(xid("95, x"), xid("13, x"), xid("45, x"), xid("63, x"))
    assert story.acts == (True, True)
    story.reset(PCI)
    assert not story.drained


def test_history_of_first_start_never_drains():
    before = event_of(xid("79, GPU has fallen off the bus."), history=True)
    story = XidStory().take_event(before)
    assert (story.drained, story.codes) == (False, ["gpu_xid/79"])
    assert XidStory().take_event(before).log_lines(xid("79, GPU has fallen off the bus.")).drained


LOCKED = "NVRM: GPU0 krcWatchdog_IMPL: RC watchdog: GPU is probably locked!  Notify Timeout Seconds: 7"


@pytest.mark.parametrize("line", [LOCKED, LOCKED.replace("GPU0 ", ""), LOCKED.split("  ", maxsplit=1)[0]])
def test_rc_watchdog_warns_until_reset(line):
    finding = finding_of(gpu_xid, line)
    assert (finding.code, finding.severity) == ("gpu_xid/rc_watchdog", Severity.WARNING)
    assert finding.clears is Clears.GPU_RESET


def test_rc_watchdog_with_xid_8_adds_no_finding():
    xid = "NVRM: Xid (PCI:0000:3b:00): 8, pid=12, name=python3, Channel 00000010"
    assert [each.code for each in findings_of(gpu_xid, LOCKED, xid)] == ["gpu_xid/8"]


def test_nvlink5_error_ignored_by_nvidia_is_recorded_unless_fatal():
    line = "NVRM: Xid (PCI:0008:01:00): 149, NETIR_BER_EVENT {} XC0 i0 Link 03 (0x00086226 0x00000001)"
    ignored = finding_of(gpu_xid, line.format("Nonfatal"))
    assert (ignored.severity, ignored.clears) == (Severity.INFO, Clears.WINDOW)
    assert ignored.window_seconds == gpu_xid.Config().application_window_seconds
    assert finding_of(gpu_xid, line.format("Fatal")).severity is Severity.WARNING


def test_required_reset_of_unnamed_gpu_warns():
    line = "NVRM: nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED]"
    assert finding_of(gpu_xid, line).severity is Severity.WARNING
