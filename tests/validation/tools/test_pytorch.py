"""The PyTorch program, on fake GPUs that take time, fail or hang (real GPUs: test_validate_gpu.py)."""

from __future__ import annotations

import json

import pytest
from fake_torch import Torch

from healthd.validation.passes import ring
from healthd.validation.tools import pytorch, pytorch_program

PARTS = [f"0000:{number:02x}:00.0" for number in range(4)]
ILLEGAL = "CUDA error: an illegal memory access was encountered"


@pytest.fixture
def told(capsys):
    """Return a function that parses the output since its last call: (test, part) -> measurement."""

    def read() -> dict:
        return {(one.test, one.part): one for one in pytorch.parse(capsys.readouterr().out)}

    return read


def test_products_are_measured_gpu_by_gpu(told):
    flop = 2.0 * pytorch_program.SIZE**3
    pytorch_program.gemm(Torch({0: 0.001, 1: 0.002}), PARTS[:2], 0.1)
    found = told()
    assert len(found) == 6
    assert found["gemm_bf16", PARTS[0]].value == pytest.approx(flop / 0.001 / 1e12)
    assert found["gemm_fp8", PARTS[1]].value == pytest.approx(flop / 0.002 / 1e12)


def test_an_error_of_one_gpu_accuses_no_other(told):
    torch = Torch(dict.fromkeys(range(3), 0.001), errors={1: ILLEGAL})
    for measure in (pytorch_program.gemm, pytorch_program.memory, pytorch_program.pcie):
        measure(torch, PARTS[:3], 0.1)
    found = told()
    assert {one.part for one in found.values() if one.state == "failed"} == {PARTS[1]}
    assert {one.state for one in found.values() if one.part != PARTS[1]} == {"measured"}
    assert "illegal memory access" in found["memory", PARTS[1]].message


def test_the_best_of_three_transfers_counts_since_what_disturbs_one_is_no_slow_link(told):
    torch = Torch({0: 0.001})
    queue, tries = torch.work, []

    def slower_at_first(number: int) -> None:
        tries.append(number)
        queue(number)
        if len(tries) <= 2 * pytorch_program.WARM_UP + 10:
            queue(number)

    torch.work = slower_at_first
    pytorch_program.pcie(torch, PARTS[:1], 0.1)
    found = told()
    assert found["pcie_h2d", PARTS[0]].value == pytest.approx(pytorch_program.PCIE_BYTES / 0.001 / 1e9)


def test_a_transfer_that_hangs_is_told_once(told, monkeypatch, capsys):
    monkeypatch.setattr(pytorch_program, "LIMIT_SECONDS", 0.01)
    pytorch_program.pcie(Torch({0: 0.001}, hangs=frozenset({0})), PARTS[:1], 0.1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all("did not end" in line for line in lines)


def test_where_it_may_not_choose_its_cpu_it_measures_from_any(told, monkeypatch):
    def refused(_pid: int, _cpus: set[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(pytorch_program.os, "sched_setaffinity", refused)
    pytorch_program.pcie(Torch({0: 0.001}), PARTS[:1], 0.1)
    assert {(one.test, one.state) for one in told().values()} == {("pcie_h2d", "measured"), ("pcie_d2h", "measured")}


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 1024.00 MiB",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: no kernel image is available for execution on the device",
        "CUDA error: all CUDA-capable devices are busy or unavailable",
        "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9",
    ],
)
def test_no_room_and_a_pytorch_that_cannot_are_no_fault_of_the_gpu(told, text):
    pytorch_program.gemm(Torch({0: 0.001}, errors={0: text}), PARTS[:1], 0.1)
    assert {one.state for one in told().values()} == {"not_measured"}


def test_a_gpu_that_hangs_keeps_nobody_elses_number_back(told, monkeypatch):
    monkeypatch.setattr(pytorch_program, "LIMIT_SECONDS", 0.05)
    pytorch_program.memory(Torch({0: 0.001, 1: 0.001}, hangs=frozenset({0})), PARTS[:2], 0.1)
    found = told()
    assert (found["memory", PARTS[0]].state, found["memory", PARTS[1]].state) == ("failed", "measured")
    assert "did not end" in found["memory", PARTS[0]].message


def test_a_product_that_differs_from_the_first_one_is_a_failure(told):
    pytorch_program.gemm(Torch({0: 0.001, 1: 0.001}, wrong={1: 7}), PARTS[:2], 0.1)
    found = told()
    assert found["gemm_bf16", PARTS[0]].state == "measured"
    assert found["gemm_bf16", PARTS[1]].state == "failed"
    assert "7 of 67108864 numbers" in found["gemm_bf16", PARTS[1]].message


def test_a_gpu_without_fp8_is_not_asked_for_it(told):
    pytorch_program.gemm(Torch({0: 0.001}, capability=(8, 0)), PARTS[:1], 0.1)
    assert told()["gemm_fp8", PARTS[0]].message == "this GPU has no FP8"


def test_pairs_are_copied_in_passes_and_a_broken_sender_breaks_its_pair_only(told):
    passes = json.loads(json.dumps(ring(4)))
    pytorch_program.p2p(Torch(dict.fromkeys(range(4), 0.001), errors={2: ILLEGAL}), PARTS, passes)
    found = told()
    ring_of_parts = {f"{PARTS[one]}>{PARTS[(one + 1) % 4]}" for one in range(4)}
    for megabytes in (16, 32, 64):
        states = {part: one.state for (test, part), one in found.items() if test == f"p2p_{megabytes}mb"}
        assert set(states) == ring_of_parts
        assert {part for part, state in states.items() if state == "failed"} == {f"{PARTS[2]}>{PARTS[3]}"}
    assert found["p2p_64mb", f"{PARTS[0]}>{PARTS[1]}"].value == pytest.approx(64.0)


def test_cpus_next_to_a_device_are_read_as_sysfs_lists_them():
    assert pytorch_program.near("0000:ff:1f.7") == set()
