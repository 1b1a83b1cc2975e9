import re
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_lines import event, finding_of, findings_of
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


found = partial(findings_of, gpu_xid, node=NODE)
one = partial(finding_of, gpu_xid, node=NODE)


def xid(rest, pci="0000:3b:00"):
    return f"NVRM: Xid (PCI:{pci}): {rest}"


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


@given(
    st.one_of(st.text(), st.from_regex(r"[0-9-]{1,12}", fullmatch=True), st.sampled_from(["74", "154", "149"])),
    st.dictionaries(
        st.sampled_from(["unit", "intr_info", "error_status", "register", "recovery_to", "fatal", "inactive"]),
        st.one_of(st.text(max_size=40), st.from_regex(r"(0x)?[0-9a-f]{1,12}( 0x[0-9a-f]+)?", fullmatch=True)),
    ),
)
def test_an_event_of_a_ledger_that_no_line_can_have_made_is_judged_without_a_mistake(code, fields):
    made = KernelEvent("xid", code, PCI, time=1000.0, last_time=1000.0, fields=tuple(fields.items()), sequence=1)
    for finding in correlate([made], NODE, Config()):
        assert finding.message


@pytest.mark.parametrize("code", ["9-4", "-79", "٧٩", "79 ", "9" * 5000])
def test_what_is_no_xids_code_is_unknown_and_only_warns(code):
    made = KernelEvent("xid", code, PCI, time=1000.0, last_time=1000.0, sequence=1)
    (finding,) = correlate([made], NODE, Config())
    assert (finding.severity, finding.clears, finding.window_seconds) == (Severity.WARNING, Clears.WINDOW, WINDOW)
    assert "unknown" in finding.message


def test_a_key_rotation_error_needs_a_reboot():
    assert judged(xid("151, Key rotation Error")) == (Severity.CRITICAL, Clears.REBOOT, 0)


@pytest.mark.parametrize("code", [46, 48, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158])
def test_what_nvidia_resets_the_gpu_for_is_critical_until_a_reset(code):
    assert judged(xid(f"{code}, pid=1, name=a, x")) == (Severity.CRITICAL, Clears.GPU_RESET, 0)


def test_every_code_of_the_catalogues_reset_class_is_critical():
    reset = {code for code in range(1, 177) if (fact := codes.xid(code)) and fact.action == "RESET_GPU"}
    assert reset <= RESET_XIDS
    assert RESET_XIDS - reset == {48, 175}


@pytest.mark.parametrize("code", [13, 31, 32, 43, 45, 63, 68, 69, 94, 8, 11, 70, 92, 121, 137, 160])
def test_what_an_application_did_never_drains_and_is_forgotten_after_an_hour(code):
    severity, clears, window = judged(*[xid(f"{code}, pid=1, name=a, x")] * 20)
    assert severity <= Severity.WARNING
    assert (clears, window) == (Clears.WINDOW, 3600)


@pytest.mark.parametrize("code", [63, 45, 43])
def test_what_only_follows_from_something_else_is_recorded(code):
    assert one(xid(f"{code}, x")).severity is Severity.INFO


@pytest.mark.parametrize("code", [1, 54, 61, 65, 78, 159, 162, 163, 172, 176, 185, 999])
def test_codes_without_a_justified_action_warn_for_a_day(code):
    assert judged(xid(f"{code}, x")) == (Severity.WARNING, Clears.WINDOW, WINDOW)


def test_no_code_but_the_listed_ones_drains():
    drains = {code for code in range(1, 1000) if one(xid(f"{code}, x")).severity > Severity.WARNING}
    assert drains == RESET_XIDS | {79, 151, 173}


def test_codes_that_only_the_drivers_source_has_are_judged_by_it():
    gsp = one(xid("119, pid=7, name=a, Timeout after 45s of waiting for RPC response from GPU0 GSP!"))
    memory = one(xid("175, pid=7, name=a, Timeout after 45s of waiting for RPC response from GPU0 GSP!"))
    assert (memory.severity, memory.clears) == (gsp.severity, gsp.clears) == (Severity.CRITICAL, Clears.GPU_RESET)
    c2c = one(xid("173, C2C link failure"))
    assert (c2c.severity, c2c.clears, c2c.window_seconds) == (Severity.DEGRADED, Clears.REBOOT, 0.0)
    assert one(xid("174, pid=7, name=a, Ch 00000008")).severity is Severity.INFO
    assert judged(xid("176, x")) == (Severity.WARNING, Clears.WINDOW, WINDOW)
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
def test_what_the_driver_and_peermem_say_at_their_start_and_end_warns(line, code, clears):
    finding = one(line)
    assert (finding.code, finding.severity, finding.clears) == (code, Severity.WARNING, clears)
    assert explain(code) is not None


def test_gpu_count_looks_at_once_after_the_driver_did_not_take_a_gpu():
    assert event("NVRM: The NVIDIA probe routine failed for 1 device(s).").kind in gpu_count.AFTER_EVENTS


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
        ("149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 01 (0x00082226 0x00000001 0x0 0x0 0x0 0x0)", Severity.INFO),
        ("145, RLW_SRC_TRACK Nonfatal XC1 i0 Link 12 (0x040988e2 0x00000008 0x0 0x0 0x0 0x0)", Severity.WARNING),
        ("149, NETIR_INT  Fatal   XC0 i0 Link -1", Severity.WARNING),
        ("145, NEW_UNIT Fatal XC0 i0 Link 01 (0x00000082 0x00000040 0x0)", Severity.WARNING),
        ("144, ...", Severity.WARNING),
    ],
)
def test_an_nvlink5_error_is_critical_only_where_nvidias_table_says_reset(rest, severity):
    finding = one(xid(rest))
    ends = Clears.WINDOW if severity is Severity.INFO else Clears.GPU_RESET
    assert (finding.severity, finding.clears) == (severity, ends)


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
    events = [event(gone, history=True), event(LOST, 1001.0)]
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
        "gpu_xid/171": Severity.INFO,
        "gpu_xid/45": Severity.INFO,
    }


def nvrm(rest, gpu=None):
    return f"NVRM: {rest}" if gpu is None else f"NVRM: GPU{gpu} {rest}"


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
def test_what_the_driver_says_of_the_gsp_without_an_xid_counts_for_the_gpu_with_that_number(
    text, severity, clears, window
):
    finding = one(nvrm(text, 3))
    assert (finding.code, finding.subject) == ("gpu_xid/gsp", PCI)
    assert (finding.severity, finding.clears, finding.window_seconds) == (severity, clears, window)
    assert finding.message.endswith("GPU 3 (GPU-8a47641b)")


def test_of_a_gpu_that_is_not_known_it_only_warns():
    for text in (NO_BOOT, HALTED, REFUSED):
        finding = one(nvrm(text, 7))
        assert (finding.severity, finding.subject, finding.window_seconds) == (Severity.WARNING, "", WINDOW)
        assert finding.message.endswith("the driver's GPU7")
        assert one(nvrm(text)).severity is Severity.WARNING


def test_a_line_that_gives_address_and_number_tells_which_gpu_the_number_is():
    timeout = xid(TIMEOUT, "0000:5e:00")
    (first, second) = found(timeout, nvrm(HALTED, 4), times=[0.0, 3600.0])
    assert (first.subject, second.subject, second.code) == ("0000:5e:00.0", "0000:5e:00.0", "gpu_xid/gsp")
    swapped = Inventory(gpus=(Gpu(PCI, 4), Gpu("0000:5e:00.0", 3)))
    assert [f.subject for f in found(timeout, nvrm(HALTED, 4), node=swapped, times=[0.0, 3600.0])] == [
        "0000:5e:00.0"
    ] * 2


def test_the_lines_of_one_gsp_are_one_finding_and_the_worst_of_them_counts():
    finding = one(nvrm(NO_ANSWER, 3), nvrm(NO_BOOT, 3), nvrm(CRASH, 3), times=[1.0, 2.0, 3.0])
    assert (finding.severity, finding.clears, finding.events) == (Severity.CRITICAL, Clears.REBOOT, (1, 2, 3))
    assert "does not boot" in finding.message


@pytest.mark.parametrize(
    "said",
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
def test_what_an_xid_of_the_same_minute_says_is_not_said_twice(said, number):
    lines = [nvrm(text, number) for text in (NO_ANSWER, CRASH, HALTED, NO_BOOT, REFUSED)]
    codes_found = {
        finding.code for finding in found(said, *lines, nvrm(ROW), times=[10.0, *[11.0 + n for n in range(6)]])
    }
    assert len(codes_found) == 1
    assert "gpu_xid/gsp" not in codes_found
    later = found(said, lines[0], times=[10.0, 71.0])
    assert "gpu_xid/gsp" in {finding.code for finding in later}
    assert len(found(said, nvrm(HALTED, 4), times=[10.0, 11.0])) == 2, "lines of another GPU"


def test_a_gsp_that_does_not_boot_is_said_by_the_gpu_that_is_not_initialised_whatever_its_number():
    lines = [nvrm(NO_BOOT, 4), nvrm("RmInitAdapter: Cannot initialize GSP firmware RM", 4), RM_INIT]
    finding = one(*lines, times=[1.0, 1.1, 1.2])
    assert (finding.code, finding.subject) == ("gpu_xid/rm_init_failed", PCI)


@pytest.mark.parametrize(
    "text",
    [
        "knvlinkUpdatePostRxDetectLinkMask_IMPL: Failed to update Rx Detect Link mask!",
        "knvlinkLogAliDebugMessages_GB100: ALI Error for GPU 3::linkId 5: 0x10001",
        "NVLink training failed on link 4",
    ],
)
def test_what_the_driver_says_of_nvlink_without_an_xid_warns(text):
    finding = one(nvrm(text, 3))
    assert (finding.code, finding.subject, finding.severity) == ("gpu_xid/nvlink", PCI, Severity.WARNING)
    assert (finding.clears, finding.window_seconds) == (Clears.GPU_RESET, WINDOW)
    assert one(nvrm(text)).severity is Severity.WARNING
    assert one(xid(NVLINK.format(1)), nvrm(text, 3), times=[1.0, 2.0]).code == "gpu_xid/74"
    assert one(nvrm(text, 3), xid("136, x"), times=[1.0, 2.0]).code == "gpu_xid/136"


def test_a_boot_of_the_gsp_that_the_driver_tries_again_drains_nothing():
    assert one(nvrm("kgspBootstrap_TU102: Failed to boot GSP.", 3)).severity is Severity.WARNING
    assert one(nvrm("kgspInitRm_IMPL: Max GSP-RM boot attempts exceeded: 4/4", 3)).severity is Severity.CRITICAL


def test_calls_that_fail_because_a_gpu_is_lost_are_a_finding_only_where_nothing_else_says_so():
    lost = "NVRM: nvCheckOkFailedNoLog: Check failed: GPU lost from the bus [NV_ERR_GPU_IS_LOST] (0x0000000F) returned"
    assert judged(lost) == (Severity.WARNING, Clears.REBOOT, WINDOW)
    for said in (xid("79, GPU has fallen off the bus."), LOST, RM_INIT):
        assert len(found(said, lost, lost.replace("Check failed", "Assertion failed"), times=[1.0, 2.0, 3.0])) == 1


@pytest.mark.parametrize("code", [171, 172])
@pytest.mark.parametrize("cause", [48, 63, 64, 94, 95, 140])
def test_what_says_more_of_a_memory_error_is_recorded_beside_it_and_warns_alone(code, cause):
    severities = {f.code: f.severity for f in found(xid(f"{code}, x"), xid(f"{cause}, x"), times=[1.0, 1.1])}
    assert severities[f"gpu_xid/{code}"] is Severity.INFO
    assert judged(xid(f"{code}, x")) == (Severity.WARNING, Clears.WINDOW, WINDOW)
    apart = found(xid(f"{code}, x"), xid(f"{cause}, x", "0000:5e:00"), times=[1.0, 1.1])
    assert {f.code: f.severity for f in apart}[f"gpu_xid/{code}"] is Severity.WARNING


@pytest.mark.parametrize(
    ("words", "severity", "says"),
    [
        ("0x0, 0x0, 0x0, 0x40000, 0x0, 0x0, 0x0", Severity.CRITICAL, "the NVLink fabric must be reset"),
        ("0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", Severity.WARNING, "perhaps the link's hardware"),
        ("0x10, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", Severity.WARNING, "ECC or parity"),
        ("0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0", Severity.WARNING, "field diagnostics"),
        ("0x0, 0x0, 0x0, 0x0, 0x100000, 0x0, 0x0", Severity.WARNING, "nothing lost"),
        ("0x40800001, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", Severity.WARNING, "link 2, fatal"),
    ],
)
def test_the_registers_of_an_nvlink_error_say_what_it_is(words, severity, says):
    finding = one(xid(f"74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 2({words})"))
    assert (finding.severity, finding.clears) == (severity, Clears.GPU_RESET)
    assert says in finding.message


def test_registers_that_ask_for_a_reset_are_not_lost_behind_harmless_ones_of_the_same_link():
    words = "74, NVLink: fatal error detected on link 2(0x10000, 0x0, 0x0, {}, 0x0, 0x0, 0x0)"
    finding = one(xid(words.format("0x0")), xid(words.format("0x40000")), times=[1.0, 1.5])
    assert (finding.severity, finding.clears) == (Severity.CRITICAL, Clears.GPU_RESET)
    assert "the NVLink fabric must be reset" in finding.message


def test_a_link_that_does_not_train_is_critical_at_once_and_no_later_line_makes_it_less():
    down = xid("74, NVLink: failed to train link 3 to remote PCI:0000:08:00")
    assert judged(down) == (Severity.CRITICAL, Clears.GPU_RESET, 0)
    finding = one(down, xid(NVLINK.format(4)), times=[1.0, 2.0])
    assert (finding.severity, "link 3, it is down" in finding.message) == (Severity.CRITICAL, True)


def test_what_an_xid_follows_from_is_named():
    finding = one(xid("45, pid=11, name=python3, Ch 00000001 caused by previous Xid 149"))
    assert finding.message.endswith(", after Xid 149, GPU 3 (GPU-8a47641b), python3 (pid 11)")


def test_an_nvlink5_error_is_named_with_its_sub_code():
    finding = one(xid("149, NETIR_LINK_EVT Fatal XC0 i0 Link 09 (0x004525c6 0x00000000 0x0 0x0 0x0 0x0)"))
    assert finding.message.startswith("Xid 149: NVLINK: NETIR Error, NETIR_LINK_EVT, 149:4, link 9, fatal, GPU 3")


@pytest.mark.parametrize(
    "rest", ["999, x", "178, x", "145, NEW_UNIT Fatal XC0 i0 Link 01 (0x00000082 0x00000040 0x0 0x0 0x0 0x0)"]
)
def test_a_code_in_no_table_is_unknown_to_this_version_and_warns_for_a_day(rest):
    finding = one(xid(rest))
    assert (finding.severity, finding.window_seconds) == (Severity.WARNING, WINDOW)
    assert "unknown to this version" in finding.message


def test_a_storm_is_one_finding_with_its_count():
    finding = one(*[xid("95, pid=1, name=a, Uncontained: x")] * 500, times=[1000.0 + n / 10 for n in range(500)])
    assert finding.message.endswith("500 lines")
    assert finding.events == (1,)


def test_other_events_are_left_to_other_checks():
    assert (
        found(
            "pcieport 0004:00:00.0: PCIe Bus Error: severity=Corrected",
            "NVRM: GPU Board Serial Number: 1",
            all_events=False,
        )
        == []
    )


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


@pytest.mark.parametrize("code", ["gpu_is_lost", "gsp", "nvlink"])
def test_what_the_driver_says_without_an_xid_is_explained(code):
    text = explain(f"gpu_xid/{code}")
    assert text is not None
    assert all((text.meaning, text.matters, text.todo))
    assert text.severity is (Severity.CRITICAL if code == "gsp" else Severity.WARNING)


def test_only_its_own_codes_are_explained():
    assert [explain(code) for code in ("sxid/20034", "nvlink5/149:4", "79", "gpu_xid/", "gpu_xid/sxid-20034")] == [
        None
    ] * 5


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
    assert sorted(ACTIONS) == [1, 2, 3, 4, 5, 6, 7]
    assert all(action.text for action in ACTIONS.values())


# --- stories


HOUR, DAY = 60.0, 24 * 60.0  # minutes
NVLINK5 = "145, RLW_{} XC1 i0 Link 12 (0x{:08x} 0x{:08x} 0x0 0x0 0x0 0x0)"


class Life(Story):
    def __init__(self) -> None:
        super().__init__(gpu_xid, inventory=NODE)

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


@pytest.mark.parametrize("line", [*(xid(f"{code}, x") for code in sorted(RESET_XIDS)), to(1), to(6), FATAL_NVLINK5])
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
        *(xid(f"{code}, x") for code in (1, 54, 61, 65, 78, 81, 159, *range(162, 173), 176, 177, 999)),
        *(to(action) for action in (3, 5, 0x1F)),
        xid("154, cut"),
        xid(NVLINK5.format("SRC_TRACK Nonfatal", 0x040988E2, 0x8)),
        xid("149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x00000000 0x0 0x0 0x0 0x0)"),  # other action
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


def no_longer(action):
    return xid(f"154, GPU recovery action changed from 0x{action:x} (x) to 0x0 (None)")


@pytest.mark.parametrize("action", [1, 4, 6])
def test_a_recovery_action_that_is_no_longer_asked_for_is_evidence_of_the_reset(action):
    life = Life().says(xid("95, x"), to(action))
    assert life.acts == (True, True)
    life.says(no_longer(action))
    assert (life.drained, life.codes) == (False, [])


@pytest.mark.parametrize("action", [3, 5])
def test_one_that_is_no_reset_is_no_evidence(action):
    life = Life().says(xid("95, x"), to(action), no_longer(action))
    assert life.drained


def test_it_is_evidence_for_that_gpu_only_for_resets_only_and_for_what_was_before_it():
    other = NODE.gpus[1].pci.removesuffix(".0")
    life = Life().says(xid("95, x"), xid("95, x", other), xid("79, x"), to(1))
    life.says(no_longer(1))
    assert {(c.code, c.subject) for c in life.conditions.values()} == {
        ("gpu_xid/95", NODE.gpus[1].pci),
        ("gpu_xid/79", PCI),
    }
    life.says(xid("48, x"))
    assert ("gpu_xid/48", PCI) in {(c.code, c.subject) for c in life.conditions.values()}
    assert life.drained


def test_what_the_log_held_before_the_first_start_is_no_evidence():
    life = Life().says(xid("95, x"))
    assert life.hear(event(no_longer(1), history=True)).drained


OTHER = NODE.gpus[1].pci


@pytest.mark.parametrize("reset", [*(xid(f"{code}, x") for code in sorted(RESET_XIDS)), to(1), to(6), FATAL_NVLINK5])
@pytest.mark.parametrize("reboot", [xid("79, x"), xid("151, x"), to(2), to(7), LOST, RM_INIT, nvrm(NO_BOOT, 3)])
def test_a_reset_of_one_gpu_ends_what_waits_for_it_there_and_nothing_else(reset, reboot):
    if "154" in reset and "154" in reboot:
        return  # one state: the newest line counts
    there = reset.replace("0000:3b:00", OTHER.removesuffix(".0"))
    life = Life().says(reset).wait(2).says(there).wait(2).says(reboot)
    before = {(c.code, c.subject) for c in life.conditions.values()}
    life.reset(PCI)
    ended = before - {(c.code, c.subject) for c in life.conditions.values()}
    (first,) = [finding.code for finding in found(reset)]
    assert ended == {(first, PCI)}
    assert life.drained
    life.reset(OTHER)
    assert {c.subject for c in life.conditions.values()} == {PCI}
    assert life.drained
    life.reboot()
    assert (life.drained, life.codes) == (False, [])


@pytest.mark.parametrize("text", [HALTED, REFUSED])
def test_a_gpu_that_its_driver_gave_up_drains_until_a_reset_of_it(text):
    life = Life().says(nvrm(text, 3))
    assert life.acts == (True, True)
    assert life.wait(30 * DAY).reset(OTHER).drained
    assert not life.reset(PCI).drained


def test_a_gsp_that_is_slow_or_crashed_without_an_xid_never_drains_by_itself():
    life = Life()
    for _ in range(50):
        life.says(nvrm(NO_ANSWER, 3), nvrm(CRASH, 3), nvrm(ROW)).wait(10)
    assert life.acts == (False, False)
    assert life.wait(DAY + HOUR).codes == []


def test_one_memory_error_is_one_cause_and_ends_with_one_reset():
    life = Life().says(
        xid("48, pid='<unknown>', name=<unknown>, An uncorrectable double bit error (DBE) has been detected"),
        xid("63, pid='<unknown>', name=<unknown>, Row Remapper: New row marked for remapping"),
        xid("171, pid='<unknown>', name=<unknown>, Uncorrectable DRAM error"),
        to(4),
        xid("45, pid=1, name=a, Ch 00000008 caused by previous Xid 48"),
    )
    severe = {c.code for c in life.conditions.values() if c.severity >= Severity.WARNING}
    assert severe == {"gpu_xid/48", "gpu_xid/154"}
    life.reset(PCI)
    assert not life.drained


def test_a_reset_that_is_only_recommended_drains_and_one_that_becomes_necessary_requeues():
    assert not Life().says(to(4)).reset(PCI).drained
    life = Life().says(to(4))
    assert life.acts == (True, False)
    life.says(to(1))
    assert life.acts == (True, True)
    life.says(to(4))
    assert life.acts == (True, True), "the reset was never performed"


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
    before = event(xid("79, GPU has fallen off the bus."), history=True)
    life = Life().hear(before)
    assert (life.drained, life.codes) == (False, ["gpu_xid/79"])
    assert Life().hear(before).says(xid("79, GPU has fallen off the bus.")).drained


LOCKED = "NVRM: GPU0 krcWatchdog_IMPL: RC watchdog: GPU is probably locked!  Notify Timeout Seconds: 7"


@pytest.mark.parametrize("line", [LOCKED, LOCKED.replace("GPU0 ", ""), LOCKED.split("  ", maxsplit=1)[0]])
def test_watchdog_that_finds_the_gpu_locked_warns_until_a_reset(line):
    finding = finding_of(gpu_xid, line)
    assert (finding.code, finding.severity) == ("gpu_xid/rc_watchdog", Severity.WARNING)
    assert finding.clears is Clears.GPU_RESET


def test_watchdog_beside_its_xid_is_no_finding_of_its_own():
    xid = "NVRM: Xid (PCI:0000:3b:00): 8, pid=12, name=python3, Channel 00000010"
    assert [each.code for each in findings_of(gpu_xid, LOCKED, xid)] == ["gpu_xid/8"]


def test_nvlink5_error_that_nvidia_ignores_is_recorded_and_expires_unless_the_line_calls_it_fatal():
    line = "NVRM: Xid (PCI:0008:01:00): 149, NETIR_BER_EVENT {} XC0 i0 Link 03 (0x00086226 0x00000001)"
    ignored = finding_of(gpu_xid, line.format("Nonfatal"))
    assert (ignored.severity, ignored.clears) == (Severity.INFO, Clears.WINDOW)
    assert ignored.window_seconds == gpu_xid.Config().application_window_seconds
    assert finding_of(gpu_xid, line.format("Fatal")).severity is Severity.WARNING


def test_required_reset_of_a_gpu_that_the_line_does_not_name_warns():
    line = "NVRM: nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED]"
    assert finding_of(gpu_xid, line).severity is Severity.WARNING
