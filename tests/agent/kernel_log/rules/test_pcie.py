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
    read = [make_event(RawLine(1000.0, message), "b") for message in messages(text)]
    return list(coalesce_events((), [event for event in read if event is not None], 1)[0])


def one(text: str) -> KernelEvent:
    (event,) = events(text)
    return event


def severity_of(expected: dict[str, object]) -> str:
    said = str(expected.get("aer_severity"))
    return "corrected" if said.startswith("Correct") else "fatal" if "(Fatal)" in said else "nonfatal"


@pytest.mark.parametrize("row", captured("pcie_aer"))
def test_captured_errors_are_read_with_their_severity_device_and_bits(row):
    found, expected = coalesced(row["text"]), row["expected"]
    assert {event.kind for event in found} == {"pcie_aer"}
    if "device" in expected:
        assert expected["device"] in {event.pci for event in found}
    if "reporter" in expected:
        assert expected["reporter"] in {fields(event).get("reporter") for event in found}
    if "severity=" in row["text"] or "received" in row["text"].replace("EDR event received", ""):
        assert severity_of(expected) in {event.code for event in found}
        assert {event.code for event in found} <= {severity_of(expected), "contained"}
    if expected.get("type") and "PCIe Bus Error" in row["text"]:
        assert expected["type"] in {fields(event).get("layer") for event in found}
    if "(First)" in row["text"] and expected["bits"]:
        assert expected["bits"][0] in {fields(event).get("bit") for event in found}


@pytest.mark.parametrize("row", captured("pcie_hotplug"))
def test_captured_slot_lines_are_read(row):
    found, expected = one(row["text"]), row["expected"]
    assert (found.kind, found.pci) == ("pcie_hotplug", expected.get("port") or expected["pci"])
    assert found.code == ("link_down" if expected.get("event") == "link_down" else "inaccessible")


AN_ERROR = f"""\
pcieport {PORT}: AER: Multiple Uncorrected (Non-Fatal) error received: {NIC}
mlx5_core {NIC}: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer, (Requester ID)
mlx5_core {NIC}:   device [15b3:1021] error status/mask=00100000/00000000
mlx5_core {NIC}:    [20] UnsupReq               (First)
mlx5_core {NIC}: AER:   TLP Header: 60001004 000000ff 0000007d fe7eb000
mlx5_core {NIC}: AER: can't recover (no error_detected callback)"""


def test_all_lines_of_one_error_are_one_event_that_knows_who_reported_it_and_what_it_was():
    (event,) = coalesced(AN_ERROR)
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
def test_severities_in_the_words_of_every_kernel(severity, code):
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
        assert (one(text).kind, one(text).code, one(text).pci) == ("pcie_aer", code, NIC)


def test_the_bits_of_an_error_are_lines_of_it():
    for bit in ("[ 5] SDES                  ", "[14] CmpltTO                (First)", "[ 0] Receiver Error        "):
        found = one(f"pcieport {PORT}:    {bit}")
        assert (found.code, fields(found)["bit"]) == ("detail", bit[5:21].strip())


def test_the_sender_of_an_old_kernel_is_in_the_domain_of_its_port():
    found = one("pcieport 0004:00:1c.5: AER: Corrected error received: id=00e5")
    assert (found.pci, fields(found)) == ("0004:00:1c.5", {"reporter": "0004:00:1c.5"})


def test_a_port_that_lost_the_senders_number_is_blamed_itself():
    found = one("pcieport 0000:00:03.1: AER: Correctable error message received from 0000:00:00.0")
    assert found.pci == "0000:00:03.1"


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
def test_containment_and_recovery(text, code):
    found = parse(f"pcieport {PORT}: {text}")
    assert (found and (found.kind, found.code, found.pci)) == (code and ("pcie_aer", code, PORT))


@pytest.mark.parametrize(
    "text", ["status:0x1f05 source:0x0608", "status:0x1f03 source:0x0608", "status:0x1f05, ERR_FATAL received from {}"]
)
def test_containment_for_a_message_blames_its_sender(text):
    found = one(f"pcieport {PORT}: DPC: containment event, {text.format('0000:06:01.0')}")
    assert (found.code, found.pci, fields(found)) == ("contained", "0000:06:01.0", {"reporter": PORT})


def test_containment_as_the_first_kernels_with_it_said_it():
    found = one("dpc 0000:a9:10.0:pcie008: DPC containment event, status:0x1f09 source:0x0000")
    assert (found.code, found.pci) == ("contained", "0000:a9:10.0")


FIRMWARE_FIRST = f"""\
tg3 {NIC}: AER: aer_status: 0x00100000, aer_mask: 0x00010000
tg3 {NIC}: AER: [20] UnsupReq (First)
tg3 {NIC}: AER: aer_layer=Transaction Layer, aer_agent=Requester ID
tg3 {NIC}: AER: aer_uncor_severity: 0x000ef030
tg3 {NIC}: AER: TLP Header: 40000001 0000030f 90028090 00000000"""


def test_what_the_firmware_heard_first_is_one_uncorrected_error():
    (event,) = coalesced(FIRMWARE_FIRST)
    assert (event.code, event.pci, event.lines, fields(event)["bit"]) == ("nonfatal", NIC, 5, "UnsupReq")
    assert [each.code for each in coalesced("\n".join(FIRMWARE_FIRST.split("\n")[:3]))] == ["detail"]


@pytest.mark.parametrize("before", ["{7}[Hardware Error]:", "[Hardware Error]: {7}"])
def test_a_firmwares_record_names_its_number_and_the_device(before):
    assert fields(one(f"{before}   section_type: PCIe error")) == {"record": "7"}
    found = one(f"{before}   device_id: {NIC}")
    assert (found.code, found.pci, fields(found)) == ("record", NIC, {"record": "7"})
    assert one(f"{before}   vendor_id: 0x15b3, device_id: 0x1021").kind == "mce_edac"


def test_a_record_of_the_last_boot_is_no_news():
    assert one(f"[Hardware Error]:   device_id: {NIC}").code == "detail"


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
def test_slots_that_lose_what_is_in_them(text, code):
    found = one(text)
    assert (found.kind, found.code, found.pci, fields(found)) == (
        "pcie_hotplug",
        code,
        "0000:00:1c.0",
        {"slot": "41"},
    )


def test_a_slot_whose_card_gets_no_link_is_known_by_its_port_where_the_line_has_no_number():
    for text in (
        "pcieport 0000:3c:06.0: pciehp: Failed to check link status",
        "pciehp 0000:3c:06.0:pcie004: Failed to check link status",
    ):
        found = one(text)
        assert (found.kind, found.code, found.pci, fields(found)) == ("pcie_hotplug", "no_link", "0000:3c:06.0", {})


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
def test_what_people_do_with_slots_is_no_event(text):
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
def test_a_device_that_does_not_answer_when_it_is_woken(text):
    found = one(f"nvidia {NIC}: {text}")
    assert (found.kind, found.code, found.pci) == ("pcie_hotplug", "inaccessible", NIC)
    assert parse(f"nvidia {NIC}: not ready 1023ms after FLR; waiting") is None
    assert parse(f"xhci_hcd {NIC}: Refused to change power state from D0 to D3hot") is None


@pytest.mark.parametrize("text", f"{AN_ERROR}\n{FIRMWARE_FIRST}".split("\n"))
def test_a_program_that_quotes_the_kernel_is_not_it(text):
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
def test_the_rest_of_a_line_may_be_anything(start, rest, end):
    assert parse(start + rest + end) is None or parse(start + rest + end) is not None


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("piece", [" ", ",", "a", "a ", "(", "0", "0000:00:00.0 ", "\n"])
def test_a_very_long_line_takes_no_longer_than_its_length(start, piece):
    assert cpu_seconds(lambda: [parse(start + piece * 50_000 + end) for end in ENDS], 1.0) < 1.0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("0000:00:1c.5: PCIe Bus Error: severity=Corrected, type=Physical Layer, id=00e5(Receiver ID)", "corrected"),
        ("0000:00:1c.5: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, id=00e5(x)", "fatal"),
        ("0000:00:1c.5: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer", "nonfatal"),
    ],
)
def test_an_error_is_read_without_its_devices_driver(text, code):
    event = parse(text)
    assert (event.kind, event.code, event.pci) == ("pcie_aer", code, "0000:00:1c.5")
    assert event.field("driver") == ""


AT = "nvidia 0000:63:00.0: AER: "


@pytest.mark.parametrize(
    ("text", "code", "pci"),
    [
        (f"{AT}PCIe Bus Error: severity=Uncorrectable (Fatal)", "fatal", "0000:63:00.0"),
        (f"{AT}PCIe Bus Error: severity=Uncorrectable (Non-Fatal)", "nonfatal", "0000:63:00.0"),
        (f"{AT}PCIe Bus Error: severity=Correctable", "corrected", "0000:63:00.0"),
        (f"{AT}CXL Bus Error: severity=Uncorrectable (Fatal)", "fatal", "0000:63:00.0"),
        (f"{AT}PCIe Bus Error: severity=Uncorrectable (Fatal) (Inaccessible)", "fatal", "0000:63:00.0"),
        (f"{AT}  [20] UnsupReq          | Requester ID | Transaction Layer (First)", "detail", "0000:63:00.0"),
        (f"{AT}  TLP Header (Flit): 0x60001004 0x000000ff", "detail", "0000:63:00.0"),
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
def test_errors_are_read_in_the_words_of_linux_7_3(text, code, pci):
    (event,) = events(text)
    assert (event.kind, event.code, event.pci) == ("pcie_aer", code, pci)


def test_bit_of_linux_7_3_is_read():
    (event,) = events(f"{AT}  [20] UnsupReq          | Requester ID | Transaction Layer (First)")
    assert fields(event)["bit"] == "UnsupReq"
