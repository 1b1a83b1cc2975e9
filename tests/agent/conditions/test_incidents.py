"""Tests of how events are grouped into incidents."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from healthd.agent.conditions import incidents
from healthd.agent.kernel_log.parse import parse
from healthd.common.model import Clears, Condition, ConditionState, Inventory, KernelEvent, PciDevice, Severity

PORT, GPU, OTHER = "0000:15:01.0", "0000:18:00.0", "0000:2a:00.0"
NODE = Inventory(devices=(PciDevice(GPU, "0x10de", "0x2330", "0x030200", "gpu", upstream=PORT),))


def at(seconds: float, text: str) -> KernelEvent:
    event = parse(text)
    assert event is not None, text
    return replace(event, time=seconds, last_time=seconds, sequence=int(seconds * 1000))


def grouped(*events: KernelEvent, inventory: Inventory | None = None) -> list[list[str]]:
    return [[f"{event.kind}/{event.code}" for event in members] for members in incidents.group(events, inventory)]


def test_lost_gpu_with_port_and_slot_is_single_incident():
    events = (
        at(10.0, f"pcieport {PORT}: AER: Uncorrected (Fatal) error received: {GPU}"),
        at(10.1, "NVRM: Xid (PCI:0000:18:00): 79, pid=4711, name=python3, GPU has fallen off the bus."),
        at(10.2, f"NVRM: GPU {GPU}: GPU has fallen off the bus."),
        at(10.4, f"pcieport {PORT}: pciehp: Slot(21): Link Down"),
    )
    assert len(grouped(*events)) == 1
    assert grouped(*events)[0][0] == "pcie_aer/fatal"  # the first cause comes first
    assert len(grouped(*events[1:], inventory=NODE)) == 1  # the inventory connects what no line connects
    assert len(grouped(*events[1:])) == 2


def test_xids_from_failing_gpu_are_single_incident():
    codes = ("48, pid=1, name=a, DBE", "63, row remap", "45, pid=1, name=a, Ch 1", "154, GPU recovery action changed "
             "from 0x0 (None) to 0x1 (GPU Reset Required)")  # fmt: skip
    events = [at(10.0 + position, f"NVRM: Xid (PCI:0000:18:00): {code}") for position, code in enumerate(codes)]
    assert grouped(*events) == [["xid/48", "xid/63", "xid/45", "xid/154"]]


def test_nvswitch_and_connected_gpus_are_single_incident():
    events = (
        at(10.0, "nvidia-nvswitch3: SXid (PCI:0000:08:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"),
        at(10.5, "NVRM: Xid (PCI:0000:18:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on "
                 "link 2(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)"),
    )  # fmt: skip
    assert grouped(*events) == [["sxid/20034", "xid/74"]]


def test_failing_disk_and_file_system_are_single_incident():
    events = (
        at(10.0, "nvme nvme1: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0xffff"),
        at(12.0, "blk_update_request: I/O error, dev nvme1n1, sector 1234 op 0x1:(WRITE) flags 0x0 phys_seg 1"),
        at(12.5, "EXT4-fs (nvme1n1p2): Remounting filesystem read-only"),
        at(12.6, "EXT4-fs (sda2): Remounting filesystem read-only"),
    )
    incident_list = grouped(*events)
    assert list(map(len, incident_list)) == [3, 1]


def test_numbered_gpu_joins_only_failing_gpu():
    numbered = "NVRM: GPU6 _kgspBootGspRm: unexpected WPR2 already up, cannot proceed with booting GSP"
    failed = "NVRM: GPU 0000:a1:00.0: RmInitAdapter failed! (0x62:0x40:2168)"
    other_failed = "NVRM: GPU 0000:18:00.0: RmInitAdapter failed! (0x62:0x40:2168)"
    assert len(grouped(at(10.0, numbered), at(10.2, failed))) == 1
    assert len(grouped(at(10.0, failed), at(10.2, numbered))) == 1
    assert len(grouped(at(10.0, failed), at(30.0, numbered))) == 2
    assert len(grouped(at(10.0, failed), at(10.1, other_failed), at(10.2, numbered))) == 3  # the GPU is ambiguous


def test_equal_ports_on_two_cards_are_two_incidents():
    events = [at(10.0, f"infiniband mlx5_{card}: Couldn't open port 1 for agents") for card in (0, 1)]
    assert len(grouped(*events)) == 2


def test_other_gpu_or_later_time_is_another_incident():
    xid = "NVRM: Xid (PCI:{}): 79, pid=1, name=a, GPU has fallen off the bus."
    events = (at(10, xid.format("0000:18:00")), at(11, xid.format("0000:2a:00")), at(200, xid.format("0000:18:00")))
    assert len(grouped(*events)) == 3


def test_line_joins_two_incidents():
    events = (
        at(10.0, f"pcieport {PORT}: pciehp: Slot(21): Link Down"),
        at(10.1, "NVRM: Xid (PCI:0000:18:00): 79, pid=1, name=a, GPU has fallen off the bus."),
        at(10.2, f"pcieport {PORT}: AER: Uncorrected (Fatal) error received: {GPU}"),
    )
    assert grouped(*events) == [["pcie_hotplug/link_down", "xid/79", "pcie_aer/fatal"]]


def test_disk_returns_device_for_any_name():
    names = ("nvme1n1p2", "nvme1c0n1", "sda3", "sda", "md0p1", "dm-3", "mmcblk0p1")
    assert [incidents.disk(name) for name in names] == ["nvme1", "nvme1", "sda", "sda", "md0", "dm-3", "mmcblk0"]


KINDS = ("xid", "sxid", "pcie_aer", "block", "gsp", "oom")
EVENTS = st.builds(
    lambda kind, code, pci, time, fields: KernelEvent(kind, code, pci, time, last_time=time, fields=fields),
    st.sampled_from(KINDS),
    st.sampled_from(["79", "74", "", "fatal"]),
    st.sampled_from(["", PORT, GPU, OTHER]),
    st.floats(0, 1000),
    st.lists(st.sampled_from([("reporter", PORT), ("device", "sda1"), ("slot", "7")])).map(tuple),
)


@given(st.lists(EVENTS, max_size=30))
def test_group_puts_every_event_in_single_incident(events):
    numbered = [replace(event, sequence=position) for position, event in enumerate(events)]
    grouped_events = incidents.group(numbered)
    assert sorted(event.sequence for members in grouped_events for event in members) == list(range(len(events)))
    for members in grouped_events:
        assert [event.time for event in members] == sorted(event.time for event in members)


def make_condition(code: str, subject: str, event: KernelEvent) -> Condition:
    event_time = event.time
    return Condition(
        code.partition("/")[0],
        "",
        code,
        subject,
        Severity.CRITICAL,
        "",
        Clears.REBOOT,
        ConditionState.OPEN,
        first_seen=event_time,
        last_seen=event_time,
        count=1,
        boot_id="b",
        last_sequence=event.sequence,
    )


def test_causes_names_first_condition_in_incident() -> None:
    memory = at(10.0, "NVRM: Xid (PCI:0000:18:00): 48, pid=1, name=a, DBE (double bit error)")
    lost = at(10.5, "NVRM: Xid (PCI:0000:18:00): 79, pid=1, name=a, GPU has fallen off the bus.")
    other = at(10.7, "NVRM: Xid (PCI:0000:2a:00): 79, pid=1, name=a, GPU has fallen off the bus.")
    conditions = (
        make_condition("gpu_xid/79", GPU, lost),
        make_condition("gpu_xid/48", GPU, memory),
        make_condition("gpu_xid/79", OTHER, other),
    )
    assert incidents.causes(conditions, (memory, lost, other)) == {("gpu_xid/79", GPU): ("gpu_xid/48", GPU)}
    assert incidents.causes(conditions, ()) == {}
