"""nic: messages of network cards other than mlx5. The formats are those of Linux 6.12 and 7.3."""

from __future__ import annotations

import re
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_lines import finding_of, findings_of
from story import Story

from healthd.agent.kernel_log.parse import parse
from healthd.agent.kernel_log.rules import network
from healthd.checks import mlx5, nic
from healthd.checks.nic import EXPLAIN
from healthd.common.model import Clears, Severity

PCI = "0000:41:00.0"
BNXT, BNXT_RE = f"bnxt_en {PCI} eth0: ", f"bnxt_en {PCI} rocep65s0f0: "
ICE, IRDMA, ENA = f"ice {PCI}: ", f"ice {PCI} rocep65s0f0: ", f"ena {PCI} eth0: "

findings_from = partial(findings_of, nic, interval=0.1)
finding_from = partial(finding_of, nic, interval=0.1)

DEAD = [
    f"{BNXT}Firmware reset aborted, rc = -110",
    f"{BNXT}Firmware reset aborted, PCI config space invalid",
    f"{BNXT}Failed to reinitialize after aborted firmware reset",
    f"{BNXT}bnxt_open() failed during FW reset",
    f"bnxt_en {PCI}: Firmware not responding, status: 0x8000",
    f"{ICE}Rebuild failed, unload and reload driver",
    f"{ICE}PF reset failed",
    f"{ICE}ice_aer_err_detected: unrecoverable device error 3",
    f"ice {PCI} ens1f0: tx_timeout recovery unsuccessful, device is in unrecoverable state.",
    f"{ICE}Error during VSI rebuild: -5. Unload and reload the driver.",
    f"{ENA}Reset attempt failed. Can not reset the device",
    f"ena {PCI}: Reset indication didn't turn on",
    f"efa {PCI}: Reset indication didn't turn off",
    f"mlx4_core {PCI}: Internal error detected:",
]
RDMA = [
    f"{BNXT_RE}Failed to create HW CQ",
    f"{BNXT_RE}Failed to create HW QP",
    f"bnxt_en {PCI} bnxt_re0: Failed to allocate HW PD",
    f"bnxt_en {PCI}: bnxt_re_dev_init: FW STALL Detected. cmdq[0xd3a]=0x9 waited (120 > 100) msec active 1 ",
    f"{IRDMA}AEQ has overflowed",
    f"{IRDMA}critical PE Error, GLPE_CRITERR=0x00000001",
]
FORMS = [pytest.param(re.compile(form.pattern, re.ASCII), id=form.pattern) for _, _, form in network._CARD_FORMS]
PREFIXES = [f"{driver} {PCI}{name}: " for driver in network.CARD_DRIVERS for name in ("", " rocep65s0f0")]
PREFIXES += ["infiniband rocep65s0f0: ", "infiniband bnxt_re0: ", "infiniband irdma0: "]
RESETS = [
    f"{BNXT}Detected firmware fatal condition, initiating reset",
    f"{BNXT}Fatal firmware reset event, data1: 0x2, data2: 0x0, min wait 100 ms, max wait 6000 ms",
    f"{IRDMA}Requesting a reset",
    f"{ENA}Keep alive watchdog timeout.",
]


@pytest.mark.parametrize("line", DEAD)
def test_card_that_its_driver_cannot_recover_is_degraded_until_reboot(line):
    finding = finding_from(line)
    assert (finding.code, finding.severity, finding.clears) == (
        "nic/firmware_failed",
        Severity.DEGRADED,
        Clears.REBOOT,
    )
    assert finding.subject == PCI
    story = Story(nic).log_lines(line)
    assert (story.drained, story.requeued) == (True, False)
    assert not story.reboot().drained


@pytest.mark.parametrize(("lines", "code"), [(RDMA, "rdma_failed"), (RESETS, "recovery")])
def test_rdma_failure_and_driver_reset_warn_with_the_card(lines, code):
    for line in lines:
        finding = finding_from(line)
        assert (finding.code, finding.severity, finding.subject) == (f"nic/{code}", Severity.WARNING, PCI)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=10)
@given(st.data())
def test_every_message_form_is_parsed_with_every_prefix(form, data):
    text = data.draw(st.from_regex(form, fullmatch=True))
    assert [prefix for prefix in PREFIXES if (event := parse(prefix + text)) is None or event.kind != "ib"] == []


@pytest.mark.parametrize("line", RDMA)
def test_rdma_failure_names_device_renamed_by_udev(line):
    event = parse("infiniband rocep65s0f0: " + line.split(": ", 1)[1])
    assert (event.code, event.field("ibdev")) == ("rdma_failed", "rocep65s0f0")


# A Broadcom card whose RoCE is unusable while its port stays ACTIVE (from a vendor's runbook).
def test_failed_completion_queue_names_the_card():
    findings = findings_from(f"bnxt_en {PCI}: QPLIB: cmdq[0xd3a]=0x9 status 0x3", f"{BNXT_RE}Failed to create HW CQ")
    assert {(each.code, each.severity, each.subject) for each in findings} == {
        ("nic/request_failed", Severity.INFO, PCI),
        ("nic/rdma_failed", Severity.WARNING, PCI),
    }


@pytest.mark.parametrize(
    "line",
    [
        "infiniband rdmap0s6: The device didn't send any completion for admin cmd CREATE_QP(1) status 0 (ctx 0x0)",
        "efa 0000:00:06.0: Wait for completion (polling) timeout",
    ],
)
def test_efa_command_without_answer_drains_until_reboot(line):
    finding = finding_from(line)
    assert (finding.code, finding.severity, finding.clears) == (
        "nic/command_timeout",
        Severity.DEGRADED,
        Clears.REBOOT,
    )


def test_command_timeout_of_another_card_warns():
    assert finding_from(f"mlx4_core {PCI}: command 0x23 timed out (go bit not cleared)").severity is Severity.WARNING


@pytest.mark.parametrize(
    ("line", "subject"),
    [
        (f"bnxt_en {PCI} eth0: NIC Link is Down", PCI),
        (f"bnxt_en {PCI} eth0: NIC Link is Down (Remote fault)", PCI),
        (f"ice {PCI} ens1f0: NIC Link is Down", PCI),
        ("mlx4_en: ens2: Link Down", "ens2"),
    ],
)
def test_link_down_is_only_recorded(line, subject):
    finding = finding_from(line)
    assert (finding.code, finding.severity, finding.subject) == ("nic/link_down", Severity.INFO, subject)


def test_link_up_clears_link_down():
    down, up = (f"bnxt_en {PCI} bnxt_re0: Port: 1 Link {state}" for state in ("DOWN", "ACTIVE"))
    assert finding_from(down, up).recovered
    assert findings_from(up) == []


def test_lines_of_mlx5_are_left_to_its_check():
    lines = [f"mlx5_core {PCI}: mlx5_health_try_recover:389:(pid 4): health recovery failed"]
    lines += ["infiniband mlx5_1: Couldn't open port 1 for agents"]
    assert findings_from(*lines) == []
    assert [each.code for each in findings_of(mlx5, *lines)] == ["mlx5/health_fatal", "mlx5/port_failed"]


def test_port_failure_of_renamed_rdma_device_is_reported_by_nic():
    line = "infiniband ibp65s0: Couldn't open port 1 for agents"
    assert (finding_from(line).code, finding_from(line).subject) == ("nic/port_failed", "ibp65s0")
    assert findings_of(mlx5, line) == []


@pytest.mark.parametrize(
    "line",
    [
        f"{ICE}Firmware version 7.5",
        f"{BNXT}Solicited firmware reset event, data1: 0x0, data2: 0x0, min wait 100 ms, max wait 6000 ms",
        f"{BNXT}NIC Link is Up, 200000 Mbps full duplex, Flow control: none",
        f"{BNXT_RE}Create CQ failed - max exceeded",
        "ata2: SATA link down (SStatus 0 SControl 300)",
        "python3: ice 0000:41:00.0: Rebuild failed, unload and reload driver",
    ],
)
def test_other_lines_are_not_parsed(line):
    assert parse(line) is None


@given(st.sampled_from([*DEAD, *RDMA, *RESETS]), st.data())
def test_truncated_line_names_the_card_or_is_not_parsed(line, data):
    event = parse(line[: data.draw(st.integers(0, len(line)))])
    assert event is None or event.pci == PCI


def test_explain_has_worst_severity_of_every_code():
    lines = [*DEAD[:1], *RDMA[:1], *RESETS[:1], "efa 0000:00:06.0: Wait for completion (polling) timeout"]
    lines += ["ib0: transmit timeout: latency 1756 msecs", "ib_mad: Couldn't open mlx4_0 port 1 for agents"]
    lines += ["mlx4_en: ens2: Link Down", "ib0: failed cm send event (status=12, wrid=3 vend_err 129)"]
    assert {each.code: each.severity for each in findings_from(*lines)} == {
        code: text.severity for code, text in EXPLAIN.items()
    }
