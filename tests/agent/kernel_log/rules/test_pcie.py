"""Tests of PCI Express lines: errors (AER, DPC, firmware first) and hotplug slots."""

import pytest
from cpu_time import cpu_seconds
from hypothesis import given
from hypothesis import strategies as st
from kernel_lines import captured, events, fields, messages

from healthd.agent.kernel_log.coalesce import coalesce_events
from healthd.agent.kernel_log.parse import parse
from healthd.agent.kernel_log.source import RawLine, make_event
from healthd.common.model import KernelEvent

PORT, NIC = "0000:00:1d.3", "0000:06:00.0"


def coalesced(text: str) -> list[KernelEvent]:
    """Return the events of lines within one second."""
    parsed = [make_event(RawLine(1000.0, message), "b") for message in messages(text)]
    return list(coalesce_events((), [event for event in parsed if event is not None], 1)[0])


def only_event(text: str) -> KernelEvent:
    (event,) = events(text)
    return event


def expected_severity(expected: dict[str, object]) -> str:
    severity = str(expected.get("aer_severity"))
    return "corrected" if severity.startswith("Correct") else "fatal" if "(Fatal)" in severity else "nonfatal"


@pytest.mark.parametrize("row", captured("pcie_aer"))
def test_captured_aer_line_has_severity_device_and_bit(row):
    coalesced_events, expected = coalesced(row["text"]), row["expected"]
    assert {event.kind for event in coalesced_events} == {"pcie_aer"}
    if "device" in expected:
        assert expected["device"] in {event.pci for event in coalesced_events}
    if "reporter" in expected:
        assert expected["reporter"] in {fields(event).get("reporter") for event in coalesced_events}
    if "severity=" in row["text"] or "received" in row["text"].replace("EDR event received", ""):
        assert expected_severity(expected) in {event.code for event in coalesced_events}
        assert {event.code for event in coalesced_events} <= {expected_severity(expected), "contained"}
    if expected.get("type") and "PCIe Bus Error" in row["text"]:
        assert expected["type"] in {fields(event).get("layer") for event in coalesced_events}
    if "(First)" in row["text"] and expected["bits"]:
        assert expected["bits"][0] in {fields(event).get("bit") for event in coalesced_events}


@pytest.mark.parametrize("row", captured("pcie_hotplug"))
def test_captured_hotplug_line_is_read(row):
    event, expected = only_event(row["text"]), row["expected"]
    assert (event.kind, event.pci) == ("pcie_hotplug", expected.get("port") or expected["pci"])
    assert event.code == ("link_down" if expected.get("event") == "link_down" else "inaccessible")


AER_ERROR = f"""\
pcieport {PORT}: AER: Multiple Uncorrected (Non-Fatal) error received: {NIC}
mlx5_core {NIC}: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer, (Requester ID)
mlx5_core {NIC}:   device [15b3:1021] error status/mask=00100000/00000000
mlx5_core {NIC}:    [20] UnsupReq               (First)
mlx5_core {NIC}: AER:   TLP Header: 60001004 000000ff 0000007d fe7eb000
mlx5_core {NIC}: AER: can't recover (no error_detected callback)"""


def test_error_lines_are_single_event_with_reporter_and_bit():
    (event,) = coalesced(AER_ERROR)
    assert (event.code, event.pci, event.lines) == ("nonfatal", NIC, 6)
    assert fields(event) == {
        "reporter": PORT,
        "layer": "Transaction Layer",
        "agent": "Requester ID",
        "driver": "mlx5_core",
        "bit": "UnsupReq",
    }


@pytest.mark.parametrize(
    ("severity", "code"),
    [
        ("Corrected", "corrected"),
        ("Correctable", "corrected"),
        ("Uncorrected (Non-Fatal)", "nonfatal"),
        ("Uncorrectable (Non-Fatal)", "nonfatal"),
        ("Uncorrected (Fatal)", "fatal"),
        ("Uncorrectable (Fatal)", "fatal"),
    ],
)
def test_aer_severity_is_read_in_every_wording(severity, code):
    for text in (
        f"pcieport {PORT}: AER: {severity} error received: {NIC}",
        f"pcieport {PORT}: AER: Multiple {severity} error message received from {NIC}",
        f"pcieport {PORT}: AER: {severity} error received: id=0600",
        f"mlx5_core {NIC}: PCIe Bus Error: severity={severity}, type=Physical Layer, (Receiver ID)",
        f"mlx5_core {NIC}: AER: PCIe Bus Error: severity={severity}, type=Inaccessible, (Unregistered Agent ID)",
        f"mlx5_core {NIC}: PCIe Bus Error: severity={severity}, type=Unaccessible, id=0600(Unregistered Agent ID)",
        f"mlx5_core {NIC}: PCIe Bus Error: severity={severity}, type=Data Link Layer, id=0600(Transmitter ID)",
        f"mlx5_core {NIC}: PCIe Bus Error: {severity}, type=Transaction Layer",
    ):
        assert (only_event(text).kind, only_event(text).code, only_event(text).pci) == ("pcie_aer", code, NIC)


def test_bit_line_is_detail():
    for bit in ("[ 5] SDES                  ", "[14] CmpltTO                (First)", "[ 0] Receiver Error        "):
        event = only_event(f"pcieport {PORT}:    {bit}")
        assert (event.code, fields(event)["bit"]) == ("detail", bit[5:21].strip())


def test_sender_in_old_kernel_line_has_port_domain():
    event = only_event("pcieport 0004:00:1c.5: AER: Corrected error received: id=00e5")
    assert (event.pci, fields(event)) == ("0004:00:1c.5", {"reporter": "0004:00:1c.5"})


def test_port_without_sender_number_is_the_part():
    event = only_event("pcieport 0000:00:03.1: AER: Correctable error message received from 0000:00:00.0")
    assert event.pci == "0000:00:03.1"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("DPC: containment event, status:0x1f09 source:0x0300", "contained"),
        ("DPC: containment event, status:0x1f05 source:0x0000", "contained"),
        ("DPC: containment event, status:0x1f01: unmasked uncorrectable error detected", "contained"),
        ("DPC: containment event, status:0x1f27 source:0x0000", "detail"),
        ("DPC: unmasked uncorrectable error detected", "contained"),
        ("DPC: ERR_FATAL detected", "detail"),
        ("DPC: software trigger detected", "detail"),
        ("DPC: rp_pio_status: 0x00010000, rp_pio_mask: 0x07070707", "detail"),
        ("DPC: RP PIO severity=0x00010000, syserror=0x00000000, exception=0x00000000", "detail"),
        ("DPC: [16] Memory Request received UR Completion (First)", "detail"),
        ("DPC: TLP Header: 0x40000001 0x0000000f 0xfe000000 0x00000000", "detail"),
        ("EDR: EDR event received", "detail"),
        ("AER: subordinate device reset failed", "reset_failed"),
        ("AER: device recovery failed", "recovery_failed"),
        ("AER: Device recovery failed", "recovery_failed"),
        ("AER: device recovery successful", "recovered"),
        ("AER driver successfully recovered", "recovered"),
        ("broadcast error_detected message", None),
        ("Root Port link has been reset", None),
        ("AER: Root Port link has been reset (0)", "detail"),
        ("DPC: error containment capabilities: Int Msg #0, RPExt+ PoisonedTLP+ SwTrigger+ RP PIO Log 4", None),
        ("DPC: RP PIO log size 0 is invalid", None),
        ("DPC: enabled with IRQ 29", None),
        ("AER: enabled with IRQ 122", None),
        ("AER: can't find device of ID00e5", None),
        ("PME: Signaling with IRQ 122", None),
    ],
)
def test_containment_and_recovery_lines_are_read(text, code):
    event = parse(f"pcieport {PORT}: {text}")
    assert (event and (event.kind, event.code, event.pci)) == (code and ("pcie_aer", code, PORT))


@pytest.mark.parametrize(
    "text", ["status:0x1f05 source:0x0608", "status:0x1f03 source:0x0608", "status:0x1f05, ERR_FATAL received from {}"]
)
def test_containment_by_message_names_sender(text):
    event = only_event(f"pcieport {PORT}: DPC: containment event, {text.format('0000:06:01.0')}")
    assert (event.code, event.pci, fields(event)) == ("contained", "0000:06:01.0", {"reporter": PORT})


def test_containment_line_from_first_dpc_kernels_is_read():
    event = only_event("dpc 0000:a9:10.0:pcie008: DPC containment event, status:0x1f09 source:0x0000")
    assert (event.code, event.pci) == ("contained", "0000:a9:10.0")


FIRMWARE_FIRST = f"""\
tg3 {NIC}: AER: aer_status: 0x00100000, aer_mask: 0x00010000
tg3 {NIC}: AER: [20] UnsupReq (First)
tg3 {NIC}: AER: aer_layer=Transaction Layer, aer_agent=Requester ID
tg3 {NIC}: AER: aer_uncor_severity: 0x000ef030
tg3 {NIC}: AER: TLP Header: 40000001 0000030f 90028090 00000000"""


def test_firmware_first_lines_are_single_uncorrected_error():
    (event,) = coalesced(FIRMWARE_FIRST)
    assert (event.code, event.pci, event.lines, fields(event)["bit"]) == ("nonfatal", NIC, 5, "UnsupReq")
    assert [part_event.code for part_event in coalesced("\n".join(FIRMWARE_FIRST.split("\n")[:3]))] == ["detail"]


@pytest.mark.parametrize("prefix", ["{7}[Hardware Error]:", "[Hardware Error]: {7}"])
def test_firmware_record_has_number_and_device(prefix):
    assert fields(only_event(f"{prefix}   section_type: PCIe error")) == {"record": "7"}
    event = only_event(f"{prefix}   device_id: {NIC}")
    assert (event.code, event.pci, fields(event)) == ("record", NIC, {"record": "7"})
    assert only_event(f"{prefix}   vendor_id: 0x15b3, device_id: 0x1021").kind == "mce_edac"


def test_record_from_last_boot_is_detail():
    assert only_event(f"[Hardware Error]:   device_id: {NIC}").code == "detail"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("pcieport 0000:00:1c.0: pciehp: Slot(41): Link Down", "link_down"),
        ("pciehp 0000:00:1c.0:pcie004: Slot(41): Link Down", "link_down"),
        ("pciehp 0000:00:1c.0:pcie04: slot(41): Link Down event", "link_down"),
        ("pcieport 0000:00:1c.0: pciehp: Slot(41): Card not present", "removed"),
        ("pciehp 0000:00:1c.0:pcie04: Card not present on Slot(41)", "removed"),
        ("pcieport 0000:00:1c.0: pciehp: Slot(41): Power fault", "power_fault"),
        ("pciehp 0000:00:1c.0:pcie04: Power fault on slot 41", "power_fault"),
        ("pcieport 0000:00:1c.0: pciehp: Slot(41): No link", "no_link"),
        ("pcieport 0000:00:1c.0: pciehp: Slot(41): Cannot train link: status 0x5841", "no_link"),
    ],
)
def test_slot_fault_is_read_with_slot_number(text, code):
    event = only_event(text)
    assert (event.kind, event.code, event.pci, fields(event)) == (
        "pcie_hotplug",
        code,
        "0000:00:1c.0",
        {"slot": "41"},
    )


def test_slot_without_number_is_named_by_port():
    for text in (
        "pcieport 0000:3c:06.0: pciehp: Failed to check link status",
        "pciehp 0000:3c:06.0:pcie004: Failed to check link status",
    ):
        event = only_event(text)
        assert (event.kind, event.code, event.pci, fields(event)) == ("pcie_hotplug", "no_link", "0000:3c:06.0", {})


@pytest.mark.parametrize(
    "text",
    [
        "Slot(41): Link Up",
        "Slot(41): Link Down/Up ignored",
        "Slot(41): Link Down/Up ignored (recovered by DPC)",
        "Slot(41): Link Down event ignored; already powering off",
        "Slot(41): Link Down event queued; currently getting powered on",
        "Link Down event ignored on slot(41): already powering off",
        "Slot(41): Card present",
        "Slot(41): Attention button pressed",
        "Slot(41): Button press: will power off in 5 sec",
        "Slot(41): Powering off due to button press",
        "Slot(41): Latch open",
        "Card present on Slot(41)",
        "Slot #12 AttnBtn- PwrCtrl- MRL- AttnInd- PwrInd- HotPlug+ Surprise+ Interlock- NoCompl+ IbPresDis-",
    ],
)
def test_parse_ignores_operator_actions_on_slots(text):
    assert parse(f"pcieport 0000:00:1c.0: pciehp: {text}") is None
    assert parse(f"pciehp 0000:00:1c.0:pcie004: {text}") is None


@pytest.mark.parametrize(
    "text",
    [
        "Unable to change power state from D3cold to D0, device inaccessible",
        "can't change power state from D3cold to D0 (config space inaccessible)",
        "not ready 65535ms after bus reset; giving up",
        "not ready 65535ms after FLR; giving up",
        "Refused to change power state, currently in D3",
        "refused to change power state (currently D3hot)",
        "Refused to change power state from D3hot to D0",
    ],
)
def test_inaccessible_device_is_read(text):
    event = only_event(f"nvidia {NIC}: {text}")
    assert (event.kind, event.code, event.pci) == ("pcie_hotplug", "inaccessible", NIC)
    assert parse(f"nvidia {NIC}: not ready 1023ms after FLR; waiting") is None
    assert parse(f"xhci_hcd {NIC}: Refused to change power state from D0 to D3hot") is None


@pytest.mark.parametrize("text", f"{AER_ERROR}\n{FIRMWARE_FIRST}".split("\n"))
def test_parse_ignores_program_that_quotes_kernel(text):
    assert parse(f"myprog: {text}") is None


STARTS = [
    f"mlx5_core {NIC}: PCIe Bus Error: severity=Uncorrected (Fatal), type=",
    f"mlx5_core {NIC}: ",
    f"mlx5_core {NIC}:    [20] ",
    f"pcieport {PORT}: AER: Corrected error received: ",
    f"pcieport {PORT}: DPC: containment event, status:",
    f"pcieport {PORT}: pciehp: Slot(",
    f"nvidia {NIC}: not ready 1ms after ",
    "{1}[Hardware Error]: ",
    "",
]
ENDS = [
    "",
    " (First)",
    " inaccessible",
    "; giving up",
    " AER: DPC Slot( TLP Header",
    " error received",
    "Power fault on ",
]


@given(st.sampled_from(STARTS), st.text(st.sampled_from(" ,'()[]:.0x1aD\n-"), max_size=200), st.sampled_from(ENDS))
def test_parse_accepts_any_text(start, middle, end):
    assert parse(start + middle + end) is None or parse(start + middle + end) is not None


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("piece", [" ", ",", "a", "a ", "(", "0", "0000:00:00.0 ", "\n"])
def test_parse_is_fast_for_long_line(start, piece):
    assert cpu_seconds(lambda: [parse(start + piece * 50_000 + end) for end in ENDS], 1.0) < 1.0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("0000:00:1c.5: PCIe Bus Error: severity=Corrected, type=Physical Layer, id=00e5(Receiver ID)", "corrected"),
        ("0000:00:1c.5: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, id=00e5(x)", "fatal"),
        ("0000:00:1c.5: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer", "nonfatal"),
    ],
)
def test_aer_error_is_read_without_driver(text, code):
    event = parse(text)
    assert (event.kind, event.code, event.pci) == ("pcie_aer", code, "0000:00:1c.5")
    assert event.field("driver") == ""


DEVICE_PREFIX = "nvidia 0000:63:00.0: AER: "


@pytest.mark.parametrize(
    ("text", "code", "pci"),
    [
        (f"{DEVICE_PREFIX}PCIe Bus Error: severity=Uncorrectable (Fatal)", "fatal", "0000:63:00.0"),
        (f"{DEVICE_PREFIX}PCIe Bus Error: severity=Uncorrectable (Non-Fatal)", "nonfatal", "0000:63:00.0"),
        (f"{DEVICE_PREFIX}PCIe Bus Error: severity=Correctable", "corrected", "0000:63:00.0"),
        (f"{DEVICE_PREFIX}CXL Bus Error: severity=Uncorrectable (Fatal)", "fatal", "0000:63:00.0"),
        (f"{DEVICE_PREFIX}PCIe Bus Error: severity=Uncorrectable (Fatal) (Inaccessible)", "fatal", "0000:63:00.0"),
        (
            f"{DEVICE_PREFIX}  [20] UnsupReq          | Requester ID | Transaction Layer (First)",
            "detail",
            "0000:63:00.0",
        ),
        (f"{DEVICE_PREFIX}  TLP Header (Flit): 0x60001004 0x000000ff", "detail", "0000:63:00.0"),
        (
            "pcieport 0000:00:1d.3: AER: Uncorrectable (Fatal) Error message received from 0000:06:00.0",
            "fatal",
            "0000:06:00.0",
        ),
        (
            "pcieport 0000:00:1d.3: AER: Multiple Correctable Error messages received, first one from 0000:06:00.0",
            "corrected",
            "0000:06:00.0",
        ),
    ],
)
def test_aer_lines_from_linux_7_3_are_read(text, code, pci):
    (event,) = events(text)
    assert (event.kind, event.code, event.pci) == ("pcie_aer", code, pci)


def test_aer_bit_from_linux_7_3_is_read():
    (event,) = events(f"{DEVICE_PREFIX}  [20] UnsupReq          | Requester ID | Transaction Layer (First)")
    assert fields(event)["bit"] == "UnsupReq"
