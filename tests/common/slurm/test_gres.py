"""GPUs in Slurm's output (versions 22.05.8, 24.11.5 and 26.05.5), and their PCI addresses."""

from __future__ import annotations

import pytest
from cpu_time import cpu_seconds
from hypothesis import given
from hypothesis import strategies as st
from slurm_text import ANY_TEXT, TYPED

from healthd.common.model import Gpu
from healthd.common.slurm.gres import (
    MAX_GPUS,
    count_gpus,
    count_single_type_gpus,
    parse_job_gpus,
    parse_numbers,
    parse_prolog_file,
    pci_addresses,
    pci_by_uuid,
    slurm_gpu_order,
)

BUSES = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
EIGHT = tuple(Gpu(f"0000:{bus}:00.0", i, f"GPU-{i}", minor=i) for i, bus in enumerate(BUSES))


def job_text(detail: str, job: str = "12", more: str = "") -> str:
    """Return shortened output of `scontrol -d -o show job`."""
    return (
        f"JobId={job} JobName=wrap{more} UserId=root(0) JobState=RUNNING NodeList=n[1-2] BatchHost=n1 NumNodes=2 "
        f"JOB_GRES=gpu:h100:2   {detail} MinCPUsNode=1 MinMemoryNode=0 Command=(null) TresPerNode=gres:gpu:2\n"
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("gpu:h100:8", 8),
        ("gpu:h100:8(S:0-1)", 8),
        ("gpu:8", 8),
        ("gpu:h100:8(S:0-1),shard:h100:32(S:0-1)", 8),
        ("gpu:a100_3g.20gb:2(S:0),gpu:a100_7g.80gb:1(S:1),mps:400", 3),
        ("nic:2", 0),
        ("(null)", 0),
        ("gpu:0", 0),
        ("", None),
        ("gpu", None),
        ("gpu:h100:no_consume:8", 0),
        ("gpu:h100:", None),
        ("gpu:h100:8(S:0-1),", None),
        ("gpu:" + "9" * 5, None),
    ],
)
def test_count_gpus_reads_gres_of_node(text: str, number: int | None) -> None:
    assert count_gpus(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("gpu:h100:8(S:0-1),shard:32", 8),
        ("gpu:8,nic:2", 8),
        ("gpu:a:4,gpu:b:4", None),
        ("gpu:a:4,gpu:4", None),
        ("nic:2", None),
        ("(null)", None),
        ("gpu:8,", None),
    ],
)
def test_count_single_type_gpus_returns_none_for_several_types(text: str, number: int | None) -> None:
    assert count_single_type_gpus(text) == number


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu:h100:2(IDX:0-1)", ("0", "1")),
        ("gpu:h100:1(IDX:10)", ("10",)),
        ("gpu:4(IDX:0,2-4)", ("0", "2", "3", "4")),
        ("gpu:a:1(IDX:0),gpu:b:2(IDX:4-5),nic:1(IDX:7)", ("0", "4", "5")),
        ("shard:2(IDX:3)", ("3",)),
        ("shard:2(0/4,0/4,0/4,2/4)", ("3",)),
        ("mps:h100:50(0/100,50/100)", ("1",)),
        ("gpu:0(IDX:),shard:1(1/4,0/4)", ("0",)),
        ("nic:1(IDX:0)", ()),
        ("", ()),
        ("(null)", ()),
        ("gpu:2(CNT:2)", None),  # gres/gpu without a device file
        ("gpu:2", None),
        ("gpu:2(IDX:)", None),
        ("gpu:2(IDX:1-0)", None),
        ("gpu:2(IDX:1023)", ("1023",)),
        ("gpu:2(IDX:1024)", None),
        ("gpu:2(IDX:0-999999999)", None),
        ("shard:2(0/4,0/4)", None),
        ("gpu:1(IDX:0),shard:2(x)", None),
        ("gpu(IDX:0", None),
    ],
)
def test_parse_job_gpus_reads_gres_of_job(text: str, expected: tuple[str, ...] | None) -> None:
    assert parse_job_gpus(job_text(f"Nodes=n1 CPU_IDs=0 Mem=0 GRES={text}"), "12", "n1") == expected


def test_parse_job_gpus_uses_line_of_this_node() -> None:
    text = job_text("Nodes=n[1-2,9] CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:4)   Nodes=n10 CPU_IDs=0-3 Mem=8 GRES=gpu:1(IDX:0)")
    assert parse_job_gpus(text, "12", "n2") == ("4",)
    assert parse_job_gpus(text, "12", "n10") == ("0",)
    assert parse_job_gpus(text, "12", "n3") is None


@pytest.mark.parametrize("group", ["ArrayJobId", "HetJobId"])
def test_parse_job_gpus_uses_record_of_this_job(group: str) -> None:
    text = "".join(job_text(f"Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:{i})", f"{10 + i} {group}=10") for i in range(3))
    assert parse_job_gpus(text, "11", "n1") == ("1",)
    assert parse_job_gpus(text, "1", "n1") is None


@pytest.mark.parametrize(
    "name",
    [
        " Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:7)",
        "\nJobId=12 JobName=x Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:7)",
        " Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:7)\nJobId=99 JobName=y",
        " Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:7)\nJobId=99 ArrayJobId=99 ArrayTaskId=1 JobName=y",
    ],
)
def test_parse_job_gpus_returns_none_if_job_name_imitates_output(name: str) -> None:
    assert parse_job_gpus(job_text("Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0)", more=name), "12", "n1") is None


FIELDS = ("JobName", "Comment", "Extra", "AdminComment", "Features", "WorkDir")
# Text that imitates Slurm's output: the result may then be None, but never the GPUs of another job.
IMITATION = st.sampled_from(
    [b" Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:7) ", b"\nJobId=99 ", b"\nJobId=12 ", b" GRES=gpu:1(IDX:7) ", b"\n"]
)


@given(typed=st.tuples(*[st.lists(TYPED | IMITATION, max_size=4).map(b"".join)] * len(FIELDS)), at=st.integers(0, 6))
def test_parse_job_gpus_never_returns_gpu_from_user_text(typed: tuple[bytes, ...], at: int) -> None:
    """`at`: the number of fields printed before the line of this node."""
    fields = [b" " + name.encode() + b"=" + value for name, value in zip(FIELDS, typed, strict=True)]
    detail = b"   Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:h100:1(IDX:3) "
    record = b"JobId=12" + b"".join([*fields[:at], detail, *fields[at:]]) + b"\n"
    found = parse_job_gpus(record.decode("utf-8", "backslashreplace"), "12", "n1")
    assert found in (("3",), None)
    if not any(word in b"".join(typed) for word in (b"JobId=", b"GRES=")):
        assert found == ("3",)


@pytest.mark.parametrize("name", ["\nComment=x", "\nJobId=99 JobName=y\n", "\x85\u2028\x0b", "j\u00f6b"])
def test_parse_job_gpus_finds_gpus_after_any_job_name(name: str) -> None:
    expected = None if "JobId" in name else ("0",)
    assert parse_job_gpus(job_text("Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0)", more=name), "12", "n1") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12 0,3 \n", ("0", "3")),
        ("12 0 GPU-2f3a-11\n", ("GPU-2f3a-11",)),
        ("12 0,1 MIG-aa,MIG-GPU-bb/1/0\n", ("MIG-aa", "MIG-GPU-bb/1/0")),
        ("12 0,1 GPU-aa\n", ("0", "1")),  # the numbers of items differ
        ("12 0,1 0,1\n", ("0", "1")),
        ("13 0\n", None),  # another job overwrote the file
        ("12 \n", None),
        ("12\n", None),
        ("", None),
        ("12 0,\n", None),
        ("12 0;1\n", None),
        ("12 0 0 0\n", None),
        ("12 00000\n", None),
    ],
)
def test_parse_prolog_file_reads_what_the_prolog_wrote(text: str, expected: tuple[str, ...] | None) -> None:
    assert parse_prolog_file(text, "12") == expected


@given(ANY_TEXT | st.text("gpu:()IDX-,0123456789/[]n = ", max_size=60))
def test_gres_parsers_accept_any_text(text: str) -> None:
    numbers = count_gpus(text)
    assert numbers is None or numbers >= 0
    for found in (
        parse_prolog_file(text, "12"),
        parse_job_gpus(job_text(f"Nodes=n1 CPU_IDs=0 Mem=0 GRES={text}"), "12", "n1"),
    ):
        assert found is None or all(word.isdecimal() or word.startswith(("GPU-", "MIG-")) for word in found)


# --- PCI addresses of GPUs


@given(st.text("0123456789,-[] ", max_size=12))
def test_parse_numbers_returns_small_numbers_or_none(text: str) -> None:
    found = parse_numbers(text)
    assert found is None or (set(text) <= set("0123456789,-") and all(0 <= number < MAX_GPUS for number in found))


@pytest.mark.parametrize("text", ["0],[1", "", "1024", "5-3", "0, 3", "0-1023,5000", "1-", "0,,1"])
def test_parse_numbers_rejects_other_text(text: str) -> None:
    assert parse_numbers(text) is None


def test_slurm_gpu_order_is_pci_order_if_all_orders_agree() -> None:
    order = tuple(gpu.pci for gpu in EIGHT)
    assert slurm_gpu_order(8, EIGHT) == slurm_gpu_order(8, EIGHT[::-1]) == order
    assert pci_addresses(("0", "3"), order, {}) == {"0000:1b:00.0", "0000:61:00.0"}


def gpus_with(number: int, **changes: object) -> tuple[Gpu, ...]:
    values = [{f: getattr(gpu, f) for f in ("pci", "index", "uuid", "minor", "mig")} for gpu in EIGHT]
    values[number] |= changes
    return tuple(Gpu(**value) for value in values)


@pytest.mark.parametrize(
    ("slurm_count", "gpus"),
    [
        (7, EIGHT),
        (9, EIGHT),
        (0, EIGHT),
        (None, EIGHT),
        (8, EIGHT[:7]),  # one GPU is lost
        (0, ()),
        (8, gpus_with(3, minor=None)),
        (8, gpus_with(0, minor=9)),  # the device files have another order
        (8, gpus_with(3, minor=2)),
        (8, gpus_with(7, minor=8)),  # SLURM_JOB_GPUS would contain 8
        (8, gpus_with(0, index=7)),  # NVML has another order
        (8, gpus_with(0, mig=("MIG-1",))),  # whole GPUs next to MIG devices
    ],
)
def test_slurm_gpu_order_returns_none_if_numbers_are_ambiguous(slurm_count: int | None, gpus: tuple[Gpu, ...]) -> None:
    assert slurm_gpu_order(slurm_count, gpus) is None
    assert pci_addresses(("0",), None, pci_by_uuid(gpus)) is None


def test_slurm_gpu_order_counts_mig_devices() -> None:
    gpus = tuple(Gpu(f"0000:{i}1:00.0", i, f"GPU-{i}", minor=i, mig=(f"MIG-{i}a", f"MIG-{i}b")) for i in range(2))
    order = slurm_gpu_order(4, gpus)
    assert order == ("0000:01:00.0", "0000:01:00.0", "0000:11:00.0", "0000:11:00.0")
    assert slurm_gpu_order(2, gpus) is None
    by_uuid = pci_by_uuid(gpus)
    assert pci_addresses(("1", "2"), order, by_uuid) == {"0000:01:00.0", "0000:11:00.0"}
    assert pci_addresses(("MIG-1b",), None, by_uuid) == {"0000:11:00.0"}
    assert pci_addresses(("MIG-GPU-1/7/0",), None, by_uuid) == {"0000:11:00.0"}, "name format of drivers before R470"
    assert pci_addresses(("GPU-0",), None, by_uuid) == {"0000:01:00.0"}


def test_pci_addresses_returns_none_if_one_gpu_is_unknown() -> None:
    order = slurm_gpu_order(8, EIGHT)
    assert pci_addresses(("0", "8"), order, {}) is None
    assert pci_addresses(("GPU-0", "GPU-new"), order, pci_by_uuid(EIGHT)) is None
    assert pci_addresses((), order, {}) == frozenset()


def test_gres_parsers_reject_non_ascii_digits() -> None:
    assert count_gpus("gpu:\u0663") is None
    assert parse_prolog_file("12 \u0663\n", "12") is None
    assert parse_job_gpus(job_text("Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:\u0663)"), "12", "n1") is None


@pytest.mark.parametrize("pump", ["[", "n[1", "[1]", "n[1-2],", "gpu:1(IDX:0),", ":", "(", " Nodes=n1", "0,", "0/4,"])
def test_gres_parsers_are_fast_for_long_user_text(pump: str) -> None:
    text = pump * ((64 << 10) // len(pump))

    def read() -> None:
        count_gpus(text)
        parse_job_gpus(job_text(f"Nodes={text} CPU_IDs=0 Mem=0 GRES={text}"), "12", "n1")
        parse_prolog_file(f"12 {text}", "12")

    assert cpu_seconds(read, 5) < 5  # a quadratic pattern takes minutes
