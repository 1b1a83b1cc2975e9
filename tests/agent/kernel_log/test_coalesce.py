import json

import pytest
from cpu_time import cpu_seconds
from hypothesis import given
from hypothesis import strategies as st
from kernel_lines import DATA, events
from msgspec.structs import replace

from healthd.agent.kernel_log.coalesce import coalesce, coalesce_events, is_detail, limit_events, varying_fields
from healthd.agent.kernel_log.parse import RULES
from healthd.common.model import KernelEvent


def xid(code="95", pci="0000:3b:00.0", timestamp=0.0, boot="b", **fields):
    return KernelEvent("xid", code, pci, timestamp, fields=tuple(fields.items()), last_time=timestamp, boot_id=boot)


def test_same_fault_within_five_seconds_is_single_event():
    recent, touched, following = coalesce_events((), [xid(timestamp=0), xid(timestamp=4), xid(timestamp=8.5)], 1)
    (event,) = recent
    assert (event.lines, event.time, event.last_time, event.sequence) == (3, 0.0, 8.5, 1)
    assert (touched, following) == ((1,), 2)


def test_same_fault_after_five_seconds_is_another_event():
    recent, touched, following = coalesce_events((), [xid(timestamp=0), xid(timestamp=5.1)], 7)
    assert [event.sequence for event in recent] == [7, 8]
    assert (touched, following) == ((7, 8), 9)


def test_different_faults_are_not_coalesced():
    different = [xid(), xid("48"), xid(pci="0000:5e:00.0"), xid(boot="c"), xid(link="3"), xid(link="4")]
    different += [xid("154", recovery_to="1"), xid("154", recovery_to="0"), KernelEvent("sxid", "95", "0000:3b:00.0")]
    recent, _, _ = coalesce_events((), different, 1)
    assert len(recent) == len(different)


def test_varying_fields_do_not_separate_lines():
    assert coalesce(xid("74", link="3", register="0x1"), xid("74", link="3", register="0x2")) is not None


TEXTS = [
    *(
        json.loads(row)["text"]
        for file in DATA.parent.glob("*_lines*.jsonl")
        for row in file.read_text("utf-8").splitlines()
    ),
    "nvidia 0000:01:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0019 address=0xfee00000 flags=0x0020]",
    "{1}[Hardware Error]:   error_type: 14, scrub uncorrected error",
]
CAPTURED = [event for text in TEXTS for event in events(text)]


def test_rules_declare_only_existing_event_fields():
    existing = {(event.kind, name) for event in CAPTURED for name, _ in event.fields}
    assert {(rule.kind, name) for rule in RULES for name in rule.varies} <= existing


def test_fields_identify_fault_unless_declared_varying():
    compared = set()
    for event in CAPTURED:
        for position, (name, value) in enumerate(event.fields):
            fields = (*event.fields[:position], (name, value + "0"), *event.fields[position + 1 :])
            changed = replace(event, fields=fields)
            if name == "record" or is_detail(event) != is_detail(changed):  # each record is a fault of its own
                continue
            is_one_fault = coalesce(event, changed) is not None
            assert is_one_fault == (name in varying_fields(event.kind)), (event, name)
            compared.add(is_one_fault)
    assert compared == {True, False}


BUS_ERROR = "0000:63:00.0: PCIe Bus Error: severity=Corrected, type="
OOM_KILL = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=a,oom_memcg=/a,task_memcg="
MLX5 = "mlx5_core 0000:61:00.0: f:1:(pid 1): "


@pytest.mark.parametrize(
    ("prefix", "first", "second", "suffix"),
    [
        ("NVRM: GPU 0000:a1:00.0: RmInitAdapter failed! (0x62:0x40:", "2168", "2169", ")"),
        ("NVRM: The NVIDIA probe routine failed for ", "1", "2", " device(s)."),
        ("NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x", "0", "2", " (x) to 0x1 (y)"),
        ("NVRM: Xid (PCI:0000:3b:00): 62, pid=1, name=x, halted caused by previous Xid ", "13", "31", ""),
        ("NVRM: Xid (PCI:0000:3b:00): 13, Graphics SM Warp Exception on (GPC 7, TPC 7, SM ", "0", "1", "): x"),
        ("", "nvidia", "nvme", " 0000:01:00.0: Unable to change power state from D3cold to D0, device inaccessible"),
        ("", "nvidia", "pcieport", f" {BUS_ERROR}Physical Layer, (Receiver ID)"),
        (f"nvidia {BUS_ERROR}", "Physical", "Data Link", " Layer, (Receiver ID)"),
        (f"nvidia {BUS_ERROR}Physical Layer, (", "Receiver", "Transmitter", " ID)"),
        ("pcieport 0000:00:1d.", "2", "3", ": AER: Corrected error received: 0000:06:00.0"),
        ("nvidia 0000:63:00.0:    [", "20] UnsupReq", "12] Timeout", "      (First)"),
        ("mce: [Hardware Error]: CPU 1: Machine Check: 0 Bank ", "7", "8", ": 8c00004000010092"),
        ("mce: [Hardware Error]: CPU 1: Machine Check: 0 Bank 7: 8c0000400001009", "2", "3", ""),
        ("{2}[Hardware Error]:  section_type: ", "memory", "firmware", " error"),
        ("{2}[Hardware Error]:   error_type: ", "2, single-bit ECC", "3, multi-bit ECC", ""),
        (f"{MLX5}CREATE_MKEY(0x200) op_mod(0x0) failed, status ", "bad resource", "bad parameter", "(0x5), x"),
        (f"{MLX5}CQ error on CQN 0x", "1", "2", ", syndrome 0x1"),
        (f"{MLX5}CREATE_MKEY(0x200) timeout", "", ". Will cause a leak of a command resource", ""),
        ("INFO: task dd:456 blocked for more than ", "120", "240", " seconds."),
        ("watchdog: BUG: soft lockup - CPU#18 stuck for ", "27", "52", "s! [python3:2254956]"),
        ("kernel BUG at drivers/", "nvidia", "mlx5", "/x.c:1!"),
        ("", "Memory cgroup out", "Out", " of memory: Killed process 1 (x) total-vm:8kB"),
        (OOM_KILL, "/a/b", "/a/c", ",task=x,pid=1,uid=0"),
        ("", "nvidia", "nvme", " 0000:01:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x1 address=0x1 flags=0x0]"),
    ],
)
def test_lines_with_different_varying_fields_are_single_event(prefix, first, second, suffix):
    (event,), (other_event,) = events(prefix + first + suffix), events(prefix + second + suffix)
    assert event.fields != other_event.fields
    assert coalesce(event, other_event) is not None


def test_varying_field_applies_only_to_kind():
    assert coalesce(aer("corrected", driver="nvme"), aer("corrected", driver="pcieport")) is not None
    assert coalesce(xid(driver="nvme"), xid(driver="pcieport")) is None
    assert coalesce(aer("x", kind="site", severity="info"), aer("x", kind="site", severity="warning")) is None


def aer(code, timestamp=0.0, pci="0000:3b:00.0", kind="pcie_aer", **fields):
    return KernelEvent(kind, code, pci, timestamp, fields=tuple(fields.items()), last_time=timestamp, boot_id="b")


def test_detail_line_joins_adjacent_fault():
    for lines in ((aer("fatal"), aer("detail", 1, bit="MalfTLP")), (aer("detail", bit="MalfTLP"), aer("fatal", 1))):
        ((event,), touched, _) = coalesce_events((), lines, 1)
        assert (event.code, event.lines, event.time, event.last_time) == ("fatal", 2, 0, 1)
        assert (event.fields, touched) == ((("bit", "MalfTLP"),), (1,))


def test_detail_lines_join_only_next_fault():
    recent, _, _ = coalesce_events((), [aer("detail", 0), aer("detail", 1), aer("corrected", 2), aer("fatal", 3)], 1)
    assert [(event.code, event.lines) for event in recent] == [("corrected", 3), ("fatal", 1)]


def test_detail_line_for_other_part_kind_or_time_stays_separate():
    separate = [aer("detail", 1, pci="0000:5e:00.0"), aer("detail", 1, kind="mce_edac"), aer("detail", 9)]
    recent, _, _ = coalesce_events((), [aer("fatal"), *separate], 1)
    assert len(recent) == 4


def test_two_firmware_records_are_two_faults():
    lines = [aer(code, record=number) for number in "12" for code in ("recoverable", "detail")]
    recent, _, _ = coalesce_events((), lines, 1)
    assert [(dict(event.fields)["record"], event.lines) for event in recent] == [("1", 2), ("2", 2)]


def test_stored_event_grows_and_is_touched():
    recent, _, following = coalesce_events((), [xid(timestamp=0)], 1)
    recent, touched, following = coalesce_events(recent, [xid("48", timestamp=1), xid(timestamp=2)], following)
    assert [(event.code, event.lines) for event in recent] == [("95", 2), ("48", 1)]
    assert set(touched) == {1, 2}
    assert following == 3


def test_coalesce_events_removes_old_events():
    recent, _, following = coalesce_events((), [xid(timestamp=0)], 1)
    recent, touched, _ = coalesce_events(recent, [xid(timestamp=1000)], following, keep_seconds=999)
    assert [event.sequence for event in recent] == [2]
    assert touched == (2,)


def test_events_in_same_call_are_kept_until_next_call():
    weekend = [xid("119", timestamp=0), xid("13", timestamp=2 * 86400.0)]
    recent, touched, following = coalesce_events((), weekend, 1, keep_seconds=86400.0)
    assert ([event.code for event in recent], touched) == (["119", "13"], (1, 2))
    recent, _, _ = coalesce_events(recent, [xid("13", timestamp=2 * 86400.0 + 60)], following, keep_seconds=86400.0)
    assert [event.sequence for event in recent] == [2, 3]


def test_job_does_not_separate_lines():
    assert coalesce(xid("95", job="1"), xid("95", job="2")) is not None


def test_limit_events_keeps_other_faults_in_long_storm():
    recent, following = (xid("79", pci="0000:5e:00.0", timestamp=0.0),), 2
    for hour in range(20):
        storm = [xid(timestamp=hour * 600 + n * 6.0) for n in range(100)]
        recent, _, following = coalesce_events(recent, storm, following)
        recent = limit_events(recent, 50)
    assert len(recent) == 50
    assert recent[0].code == "79"
    assert [event.sequence for event in recent[1:]] == list(range(following - 49, following))


def test_coalesce_events_handles_million_line_storm():
    batch = [xid(timestamp=n / 1000) for n in range(1000)]
    recent, following = (), 1

    def run_storm():
        nonlocal recent, following
        recent, following = (), 1
        for _ in range(100):
            recent, _, following = coalesce_events(recent, batch, following)

    assert cpu_seconds(run_storm, 10) < 10  # 1 s here: 10 us a line
    assert recent[0].lines == 100_000
    recent, touched, _ = coalesce_events(recent, [*batch, xid("79", timestamp=1.0)], following)
    assert [(event.code, event.lines) for event in recent] == [("95", 101_000), ("79", 1)]
    assert len(touched) == 2


EVENTS = st.lists(st.builds(xid, st.sampled_from(["13", "48", "79"]), st.just("0000:3b:00.0"), st.floats(0, 100)))


@given(EVENTS, st.integers(1, 10))
def test_coalesce_and_limit_events_count_every_line_once(incoming, max_events):
    recent, touched, following = coalesce_events((), incoming, 1)
    assert sum(event.lines for event in recent) == len(incoming)
    assert [event.sequence for event in recent] == list(range(1, following))
    assert set(touched) == set(range(1, following))
    limited = limit_events(recent, max_events)
    assert len(limited) == len(recent) if len(recent) <= max_events else len(limited) <= max_events
    if max_events >= 3:
        assert {event.code for event in limited} == {event.code for event in recent}
    assert list(limited) == [event for event in recent if event in limited]


def test_limit_events_keeps_protected_events_first():
    burst = [xid("79"), *(xid("31", pci=f"{n:04x}:00:00.0") for n in range(9))]
    recent, _, _ = coalesce_events((), burst, 1)
    assert [event.sequence for event in limit_events(recent, 3)] == [8, 9, 10]
    assert [event.sequence for event in limit_events(recent, 3, protected={1})] == [1, 9, 10]


@pytest.mark.parametrize("other_count", [1, 500, 1280, 5000])
def test_coalesce_events_keeps_all_new_events(other_count):
    burst = [xid("79"), *(xid("31", pci=f"{n:04x}:00:00.0") for n in range(other_count))]
    recent, touched, following = coalesce_events((), burst, 1)
    assert (len(recent), len(touched), following) == (other_count + 1, other_count + 1, other_count + 2)


def disk(code, name, timestamp=0.0):
    return KernelEvent("nvme", code, "", timestamp, fields=(("controller", name),), last_time=timestamp, boot_id="b")


def test_detail_line_joins_event_for_same_disk():
    recent, _, _ = coalesce_events(
        (), [disk("timeout", "nvme0"), disk("timeout", "nvme1", 1), disk("detail", "nvme0", 2)], 1
    )
    assert [(dict(event.fields)["controller"], event.lines) for event in recent] == [("nvme0", 2), ("nvme1", 1)]
