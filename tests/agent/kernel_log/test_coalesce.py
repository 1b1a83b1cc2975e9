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


def xid(code="95", pci="0000:3b:00.0", at=0.0, boot="b", **fields):
    return KernelEvent("xid", code, pci, at, fields=tuple(fields.items()), last_time=at, boot_id=boot)


def test_the_same_fault_within_five_seconds_is_one_event_with_a_count():
    recent, touched, following = coalesce_events((), [xid(at=0), xid(at=4), xid(at=8.5)], 1)
    (event,) = recent
    assert (event.lines, event.time, event.last_time, event.sequence) == (3, 0.0, 8.5, 1)
    assert (touched, following) == ((1,), 2)


def test_the_same_fault_after_five_seconds_is_another_event():
    recent, touched, following = coalesce_events((), [xid(at=0), xid(at=5.1)], 7)
    assert [event.sequence for event in recent] == [7, 8]
    assert (touched, following) == ((7, 8), 9)


def test_different_faults_are_never_one_event():
    different = [xid(), xid("48"), xid(pci="0000:5e:00.0"), xid(boot="c"), xid(link="3"), xid(link="4")]
    different += [xid("154", recovery_to="1"), xid("154", recovery_to="0"), KernelEvent("sxid", "95", "0000:3b:00.0")]
    recent, _, _ = coalesce_events((), different, 1)
    assert len(recent) == len(different)


def test_what_varies_between_lines_of_one_fault_does_not_part_them():
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


def test_rules_declare_only_varying_fields_that_events_of_their_kind_have():
    seen = {(event.kind, name) for event in CAPTURED for name, _ in event.fields}
    assert {(rule.kind, name) for rule in RULES for name in rule.varies} <= seen


def test_each_field_of_a_captured_line_identifies_the_fault_unless_its_kind_declares_that_it_varies():
    compared = set()
    for event in CAPTURED:
        for place, (name, value) in enumerate(event.fields):
            fields = (*event.fields[:place], (name, value + "0"), *event.fields[place + 1 :])
            other = replace(event, fields=fields)
            if name == "record" or is_detail(event) != is_detail(other):  # each record is a fault of its own
                continue
            is_one_fault = coalesce(event, other) is not None
            assert is_one_fault == (name in varying_fields(event.kind)), (event, name)
            compared.add(is_one_fault)
    assert compared == {True, False}


BUS_ERROR = "0000:63:00.0: PCIe Bus Error: severity=Corrected, type="
OOM_KILL = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=a,oom_memcg=/a,task_memcg="
MLX5 = "mlx5_core 0000:61:00.0: f:1:(pid 1): "


@pytest.mark.parametrize(
    ("before", "first", "second", "after"),
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
def test_two_lines_of_one_fault_with_different_details_are_one_event(before, first, second, after):
    (event,), (other,) = events(before + first + after), events(before + second + after)
    assert event.fields != other.fields
    assert coalesce(event, other) is not None


def test_a_field_varies_only_for_the_kinds_that_declare_it():
    assert coalesce(aer("corrected", driver="nvme"), aer("corrected", driver="pcieport")) is not None
    assert coalesce(xid(driver="nvme"), xid(driver="pcieport")) is None
    assert coalesce(aer("x", kind="site", severity="info"), aer("x", kind="site", severity="warning")) is None


def aer(code, at=0.0, pci="0000:3b:00.0", kind="pcie_aer", **fields):
    return KernelEvent(kind, code, pci, at, fields=tuple(fields.items()), last_time=at, boot_id="b")


def test_a_further_line_goes_to_the_fault_beside_it_before_or_after_and_tells_what_it_names():
    for lines in ((aer("fatal"), aer("detail", 1, bit="MalfTLP")), (aer("detail", bit="MalfTLP"), aer("fatal", 1))):
        ((event,), touched, _) = coalesce_events((), lines, 1)
        assert (event.code, event.lines, event.time, event.last_time) == ("fatal", 2, 0, 1)
        assert (event.fields, touched) == ((("bit", "MalfTLP"),), (1,))


def test_further_lines_alone_are_one_event_and_make_no_fault_of_two():
    recent, _, _ = coalesce_events((), [aer("detail", 0), aer("detail", 1), aer("corrected", 2), aer("fatal", 3)], 1)
    assert [(event.code, event.lines) for event in recent] == [("corrected", 3), ("fatal", 1)]


def test_a_further_line_of_another_part_kind_or_time_stays_alone():
    apart = [aer("detail", 1, pci="0000:5e:00.0"), aer("detail", 1, kind="mce_edac"), aer("detail", 9)]
    recent, _, _ = coalesce_events((), [aer("fatal"), *apart], 1)
    assert len(recent) == 4


def test_two_records_of_the_firmware_are_two_faults_with_their_own_lines():
    lines = [aer(code, record=number) for number in "12" for code in ("recoverable", "detail")]
    recent, _, _ = coalesce_events((), lines, 1)
    assert [(dict(event.fields)["record"], event.lines) for event in recent] == [("1", 2), ("2", 2)]


def test_an_event_that_was_stored_before_grows_and_is_touched():
    recent, _, following = coalesce_events((), [xid(at=0)], 1)
    recent, touched, following = coalesce_events(recent, [xid("48", at=1), xid(at=2)], following)
    assert [(event.code, event.lines) for event in recent] == [("95", 2), ("48", 1)]
    assert set(touched) == {1, 2}
    assert following == 3


def test_old_events_are_forgotten():
    recent, _, following = coalesce_events((), [xid(at=0)], 1)
    recent, touched, _ = coalesce_events(recent, [xid(at=1000)], following, keep_seconds=999)
    assert [event.sequence for event in recent] == [2]
    assert touched == (2,)


def test_what_is_read_together_is_kept_together_however_old_until_the_next_call():
    weekend = [xid("119", at=0), xid("13", at=2 * 86400.0)]
    recent, touched, following = coalesce_events((), weekend, 1, keep_seconds=86400.0)
    assert ([event.code for event in recent], touched) == (["119", "13"], (1, 2))
    recent, _, _ = coalesce_events(recent, [xid("13", at=2 * 86400.0 + 60)], following, keep_seconds=86400.0)
    assert [event.sequence for event in recent] == [2, 3]


def test_the_job_of_a_process_does_not_part_the_lines_of_one_fault():
    assert coalesce(xid("95", job="1"), xid("95", job="2")) is not None


def test_a_storm_that_goes_on_for_days_pushes_out_no_other_fault():
    recent, following = (xid("79", pci="0000:5e:00.0", at=0.0),), 2
    for hour in range(20):
        storm = [xid(at=hour * 600 + n * 6.0) for n in range(100)]
        recent, _, following = coalesce_events(recent, storm, following)
        recent = limit_events(recent, 50)
    assert len(recent) == 50
    assert recent[0].code == "79"
    assert [event.sequence for event in recent[1:]] == list(range(following - 49, following))


def test_a_storm_of_a_million_lines_is_one_event_and_delays_no_other():
    batch = [xid(at=n / 1000) for n in range(1000)]
    recent, following = (), 1

    def storm():
        nonlocal recent, following
        recent, following = (), 1
        for _ in range(100):
            recent, _, following = coalesce_events(recent, batch, following)

    assert cpu_seconds(storm, 10) < 10  # 1 s here: 10 us a line
    assert recent[0].lines == 100_000
    recent, touched, _ = coalesce_events(recent, [*batch, xid("79", at=1.0)], following)
    assert [(event.code, event.lines) for event in recent] == [("95", 101_000), ("79", 1)]
    assert len(touched) == 2


EVENTS = st.lists(st.builds(xid, st.sampled_from(["13", "48", "79"]), st.just("0000:3b:00.0"), st.floats(0, 100)))


@given(EVENTS, st.integers(1, 10))
def test_what_is_kept_is_bounded_and_every_line_counts_once(incoming, most):
    recent, touched, following = coalesce_events((), incoming, 1)
    assert sum(event.lines for event in recent) == len(incoming)
    assert [event.sequence for event in recent] == list(range(1, following))
    assert set(touched) == set(range(1, following))
    kept = limit_events(recent, most)
    assert len(kept) == len(recent) if len(recent) <= most else len(kept) <= most
    if most >= 3:
        assert {event.code for event in kept} == {event.code for event in recent}
    assert list(kept) == [event for event in recent if event in kept]


def test_newest_of_each_keeps_the_events_behind_a_drain_first():
    burst = [xid("79"), *(xid("31", pci=f"{n:04x}:00:00.0") for n in range(9))]
    recent, _, _ = coalesce_events((), burst, 1)
    assert [event.sequence for event in limit_events(recent, 3)] == [8, 9, 10]
    assert [event.sequence for event in limit_events(recent, 3, protected={1})] == [1, 9, 10]


@pytest.mark.parametrize("others", [1, 500, 1280, 5000])
def test_what_is_new_is_all_there_to_be_judged_however_much_came_with_it(others):
    burst = [xid("79"), *(xid("31", pci=f"{n:04x}:00:00.0") for n in range(others))]
    recent, touched, following = coalesce_events((), burst, 1)
    assert (len(recent), len(touched), following) == (others + 1, others + 1, others + 2)


def disk(code, name, at=0.0):
    return KernelEvent("nvme", code, "", at, fields=(("controller", name),), last_time=at, boot_id="b")


def test_a_further_line_goes_to_the_disk_that_it_names_not_to_another_one():
    recent, _, _ = coalesce_events(
        (), [disk("timeout", "nvme0"), disk("timeout", "nvme1", 1), disk("detail", "nvme0", 2)], 1
    )
    assert [(dict(event.fields)["controller"], event.lines) for event in recent] == [("nvme0", 2), ("nvme1", 1)]
