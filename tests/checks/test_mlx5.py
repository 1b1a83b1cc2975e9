"""mlx5: kernel messages of NVIDIA network cards."""

import re
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_lines import event_of, finding_of, findings_of
from story import Story

from healthd.checks import eth_link, ib_flap, ib_link, mlx5
from healthd.checks.mlx5 import EXPLAIN, LEAK_RULE, RULES
from healthd.common.model import Clears, Finding, Severity

PCI = "0000:61:00.0"
CARD = f"mlx5_core {PCI}: "
HOUR, DAY = 60.0, 24 * 60.0  # minutes


findings_from = partial(findings_of, mlx5, interval=0.1)
finding_from = partial(finding_of, mlx5, interval=0.1)


def finding_codes(*lines, **kw):
    return sorted(finding.code for finding in findings_from(*lines, **kw))


Mlx5Story = partial(Story, mlx5)


MISSED = f"{CARD}poll_health:801:(pid 0): device's health compromised - reached miss count"
REPORT = f"{CARD}print_health_info:431:(pid 0): Health issue observed, {{}}, severity({{}}) X:"
SYNDROME = f"{CARD}print_health_info:448:(pid 0): synd 0x1: firmware internal error"


def test_dead_firmware_is_degraded_until_reboot():
    assert finding_from(MISSED) == Finding(
        Severity.DEGRADED,
        "mlx5/health_fatal",
        PCI,
        "the card's firmware failed",
        Clears.REBOOT,
        events=(1,),
    )


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([REPORT.format("firmware internal error", 3)], "health_fatal"),
        ([REPORT.format("firmware internal error", 0)], "health_fatal"),
        ([REPORT.format("ICM fetch PCI data poisoned error", 4)], "health_warning"),
        ([SYNDROME], "health_fatal"),  # up to Linux 5.13 there is no severity
        ([REPORT.format("firmware internal error", 4), SYNDROME], "health_warning"),
        ([REPORT.format("firmware internal error", 3), SYNDROME], "health_fatal"),
    ],
)
def test_health_report_has_severity_of_firmware(lines, code):
    assert finding_codes(*lines) == [f"mlx5/{code}"]


def test_message_keeps_report_of_firmware_during_recovery():
    lines = [
        REPORT.format("irisc not responding", 3),
        f"{CARD}mlx5_health_try_recover:338:(pid 1): health recovery failed",
    ]
    assert finding_from(*lines).message == "the card's firmware failed: irisc not responding, 2 lines"


def test_report_of_other_card_or_time_is_independent():
    mild = REPORT.format("firmware internal error", 4)
    assert finding_codes(mild.replace("61:00.0", "61:00.1"), SYNDROME) == ["mlx5/health_fatal", "mlx5/health_warning"]
    assert finding_codes(mild, SYNDROME, times=[1000.0, 1006.0]) == ["mlx5/health_fatal", "mlx5/health_warning"]


def test_health_report_gives_one_finding_with_fault_name():
    lines = [
        REPORT.format("firmware internal error", 3),
        SYNDROME,
        f"{CARD}print_health_info:1:(pid 0): hw_id 0x000020f",
    ]
    finding = finding_from(MISSED, *lines)
    assert (finding.code, finding.subject, finding.events) == ("mlx5/health_fatal", PCI, (1, 2, 3))
    assert finding.message == "the card's firmware failed: firmware internal error, 4 lines"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("temp_warn:171:(pid 0): High temperature on sensors with bit set 0 1", "temperature"),
        ("print_health_info:520:(pid 0): synd 0x10: High temperature", "temperature"),
        ("Port module event[error]: module 0, Cable error, High Temperature", "module_temperature"),
        ("Port module event[error]: module 0, Cable error, Power budget exceeded", "module_power"),
        ("Port module event[error]: module 0, Cable error, Unknown identifier", "module_error"),
        ("wait_func:1155:(pid 1): DESTROY_QP(0x501) canceled on out of queue timeout.", "command_timeout"),
        ("mlx5_pcie_event:299:(pid 12): Detected insufficient power on the PCIe slot (27W).", "slot_power"),
        (
            "port_module:254:(pid 0): Port module event[error]: module 0, Cable error, One or more network ports have "
            "been powered down due to insufficient/unadvertised power on the PCIe slot",
            "slot_power",
        ),
        ("mlx5_pci_err_detected Device state = 1 health sensors: 1 pci_status: 1. Enter", "pci_error"),
        ("poll_health:740:(pid 0): Fatal error 3 detected", "health_recovery"),
    ],
)
def test_heat_transceiver_and_timeout_faults_warn_for_a_day(text, code):
    story = Mlx5Story()
    for _ in range(20):
        story.log_lines(CARD + text).wait(10)
    assert (story.drained, story.codes) == (False, [f"mlx5/{code}"])
    assert story.wait(DAY - 11).codes == [f"mlx5/{code}"]
    assert story.wait(2).codes == []


LEAKING = [
    f"{CARD}wait_func:991:(pid 1): CREATE_DCT(0x710) timeout. Will cause a leak of a command resource",
    f"{CARD}cb_timeout_handler:887:(pid 3): cmd[4]: CREATE_MKEY(0x200) Async, timeout. Will cause a leak of a command "
    "resource",
]


@pytest.mark.parametrize("line", LEAKING)
def test_leaking_command_timeout_drains_without_requeue_until_reboot(line):
    finding = finding_from(line)
    assert (finding.severity, finding.code, finding.clears) == (
        Severity.DEGRADED,
        "mlx5/command_timeout",
        Clears.REBOOT,
    )
    story = Mlx5Story().log_lines(line)
    assert (story.drained, story.requeued) == (True, False)
    assert story.wait(30 * DAY).drained
    assert not story.reboot().drained


def test_leak_of_earlier_boot_does_not_worsen_later_timeout():
    cancelled = f"{CARD}wait_func:1155:(pid 1): DESTROY_QP(0x501) canceled on out of queue timeout."
    assert finding_from(LEAKING[0], cancelled, times=[0.0, 60.0]).severity is Severity.DEGRADED
    assert finding_from(LEAKING[0], cancelled, times=[0.0, 60.0], boots=["a", "b"]).severity is Severity.WARNING


@pytest.mark.parametrize("line", [MISSED, SYNDROME, REPORT.format("irisc not responding", 2)])
def test_dead_firmware_drains_until_reboot_despite_later_lines(line):
    story = Mlx5Story().log_lines(line, f"{CARD}mlx5_health_try_recover:330:(pid 1): handling bad device here")
    assert (story.drained, story.requeued) == (True, False)
    assert story.wait(30 * DAY).log_lines(REPORT.format("firmware internal error", 4)).wait(2 * DAY).drained
    assert not story.reboot().drained


def test_link_down_is_recorded_until_up_again():
    down, up = "mlx5_core 0000:53:00.0 enp83s0f0np0: Link down", "mlx5_core 0000:53:00.0 enp83s0f0np0: Link up"
    finding = finding_from(down)
    assert (finding.severity, finding.code, finding.subject) == (Severity.INFO, "mlx5/link_down", "0000:53:00.0")
    assert finding.message == "the link went down (enp83s0f0np0)"
    story = Mlx5Story().log_lines(down)
    assert (story.drained, story.codes) == (False, ["mlx5/link_down"])
    assert story.log_lines(up).codes == []
    assert story.wait(HOUR).log_lines(down).codes == ["mlx5/link_down"]
    assert story.wait(HOUR + 1).codes == []


def test_link_up_at_boot_gives_no_finding():
    assert (
        findings_from(
            "mlx5_core 0000:53:00.0 mlx5_3: Port: 1 Link ACTIVE",
            f"{CARD}Port module event: module 0, Cable plugged",
            all_events=False,
        )
        == []
    )


def test_link_lines_give_one_finding_and_bond_names_member():
    lines = ["mlx5_core 0000:53:00.0 enp83s0f0np0: Link down", "mlx5_core 0000:53:00.0 mlx5_3: Port: 1 Link DOWN"]
    assert finding_from(*lines).message == "the link went down (mlx5_3, port 1), 2 lines"
    finding = finding_from("bond0: (slave enp83s0f0np0): link status definitely down, disabling slave")
    assert (finding.subject, finding.message) == ("enp83s0f0np0", "the link went down (bond0, enp83s0f0np0)")


@pytest.mark.parametrize("check", [ib_link, ib_flap, eth_link])
def test_link_checks_run_after_events(check):
    assert {"mlx5", "ib"} <= set(check.AFTER_EVENTS)


def test_failed_probe_warns_until_reboot_or_a_day():
    line = "mlx5_core: probe of 0000:03:00.0 failed with error -22"
    assert finding_from(line).message == "the driver could not start the card: -22"
    assert Mlx5Story().log_lines(line).codes == ["mlx5/load_failed"]
    assert Mlx5Story().log_lines(line).reboot().codes == []
    assert Mlx5Story().log_lines(line).wait(DAY + 1).codes == []


@pytest.mark.parametrize(
    "line",
    [
        f"{CARD}mlx5_eq_int:556:(pid 0): CQ error on CQN 0x40a, syndrom 0x1",
        f"{CARD}mlx5_cmd_check:769:(pid 9): CREATE_QP(0x500) op_mod(0x0) failed, status bad resource(0x5), x",
        "infiniband mlx5_0: dump_cqe:272:(pid 0): dump error cqe",
        f"{CARD}63.008 Gb/s available PCIe bandwidth, limited by 8.0 GT/s PCIe x8 link at 0000:16:02.0",
    ],
)
def test_error_caused_by_application_is_only_recorded(line):
    story = Mlx5Story()
    for _ in range(50):
        story.log_lines(line)
    assert finding_from(line).severity is Severity.INFO
    assert not story.drained
    assert story.wait(HOUR + 1).codes == []


def test_infiniband_line_about_mlx5_device_counts_and_other_cards_do_not():
    assert (
        findings_from("mlx4_core 0000:81:00.0: Internal error detected:", "efa 0000:00:06.0: Admin queue is closed")
        == []
    )
    assert (
        finding_from("infiniband mlx5_1: Couldn't open port 1 for agents").message
        == "a port could not be opened (mlx5_1, port 1)"
    )


def test_other_events_and_detail_lines_give_no_finding():
    assert (
        findings_from(
            "NVRM: Xid (PCI:0000:3b:00): 79, x",
            f"{CARD}hw_id 0x00000020",
            f"{CARD}not enough MMIO resources for SR-IOV",
        )
        == []
    )


def test_history_of_first_start_never_drains():
    story = Mlx5Story().take_event(event_of(MISSED, history=True))
    assert (story.drained, story.codes) == (False, ["mlx5/health_fatal"])


@pytest.mark.parametrize("code", sorted(RULES))
def test_explain_matches_findings(code):
    text = EXPLAIN[f"mlx5/{code}"]
    assert (text.severity, text.clears) == (LEAK_RULE if code == "command_timeout" else RULES[code])[:2]
    assert all((text.meaning, text.matters, text.todo))
    assert len(EXPLAIN) == len(RULES)


@given(
    st.lists(st.sampled_from([MISSED, SYNDROME, REPORT.format("x", 4), f"{CARD}Fatal error 1 detected"]), max_size=8)
)
def test_any_lines_give_one_finding_per_code_and_part(lines):
    keys = [(finding.code, finding.subject) for finding in findings_from(*lines)]
    assert len(keys) == len(set(keys))
    assert all(re.fullmatch(r"mlx5/\w+", code) for code, _ in keys)


# A card whose sub-functions recover separately (linux stable 33de865f7bce). The last line is the fault.
SUB_FUNCTION = """\
mlx5_core.sf mlx5_core.sf.25: mlx5_health_try_recover:387:(pid 40948): starting health recovery flow
mlx5_core 0000:03:00.0: mlx5_pci_slot_reset was called
mlx5_core 0000:03:00.0: wait vital counter value 0xab175 after 1 iterations
mlx5_core.sf mlx5_core.sf.25: firmware version: 24.32.532
mlx5_core.sf mlx5_core.sf.23: mlx5_health_try_recover:387:(pid 40946): starting health recovery flow
mlx5_core.sf mlx5_core.sf.25: mlx5_cmd_check:813:(pid 40948): ENABLE_HCA(0x104) op_mod(0x0) failed, status bad \
resource state(0x9), syndrome (0x658908)
mlx5_core.sf mlx5_core.sf.25: mlx5_function_setup:1292:(pid 40948): enable hca failed
mlx5_core.sf mlx5_core.sf.25: mlx5_health_try_recover:389:(pid 40948): health recovery failed"""


def test_failed_recovery_of_sub_function_is_degraded():
    findings = findings_from(*SUB_FUNCTION.split("\n"), all_events=False)
    assert ("mlx5/health_fatal", "mlx5_core.sf.25", Severity.DEGRADED) in [
        (each.code, each.subject, each.severity) for each in findings
    ]
    assert "mlx5/pci_error" not in [each.code for each in findings]
    assert {each.subject for each in findings} == {"mlx5_core.sf.25", "mlx5_core.sf.23", "0000:03:00.0"}


def test_command_without_free_entry_warns():
    assert (
        finding_from(f"{CARD}cmd_work_handler:918:(pid 812): failed to allocate command entry").code
        == "mlx5/command_timeout"
    )
