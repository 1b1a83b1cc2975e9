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
def new_results(capsys):
    """Return a function that parses the output since its last call: (test, part) -> measurement."""

    def read() -> dict:
        return {(result.test, result.part): result for result in pytorch.parse(capsys.readouterr().out)}

    return read


def test_gemm_measures_each_gpu(new_results):
    flop = 2.0 * pytorch_program.SIZE**3
    pytorch_program.gemm(Torch({0: 0.001, 1: 0.002}), PARTS[:2], 0.1)
    found = new_results()
    assert len(found) == 6
    assert found["gemm_bf16", PARTS[0]].value == pytest.approx(flop / 0.001 / 1e12)
    assert found["gemm_fp8", PARTS[1]].value == pytest.approx(flop / 0.002 / 1e12)


def test_error_of_one_gpu_affects_no_other(new_results):
    torch = Torch(dict.fromkeys(range(3), 0.001), errors={1: ILLEGAL})
    for measure in (pytorch_program.gemm, pytorch_program.memory, pytorch_program.pcie):
        measure(torch, PARTS[:3], 0.1)
    found = new_results()
    assert {result.part for result in found.values() if result.state == "failed"} == {PARTS[1]}
    assert {result.state for result in found.values() if result.part != PARTS[1]} == {"measured"}
    assert "illegal memory access" in found["memory", PARTS[1]].message


def test_best_of_three_transfers_counts(new_results):
    torch = Torch({0: 0.001})
    queue, tries = torch.work, []

    def slower_at_first(number: int) -> None:
        tries.append(number)
        queue(number)
        if len(tries) <= 2 * pytorch_program.WARM_UP + 10:
            queue(number)

    torch.work = slower_at_first
    pytorch_program.pcie(torch, PARTS[:1], 0.1)
    found = new_results()
    assert found["pcie_h2d", PARTS[0]].value == pytest.approx(pytorch_program.PCIE_BYTES / 0.001 / 1e9)


def test_hanging_transfer_is_reported_once(new_results, monkeypatch, capsys):
    monkeypatch.setattr(pytorch_program, "LIMIT_SECONDS", 0.01)
    pytorch_program.pcie(Torch({0: 0.001}, hangs=frozenset({0})), PARTS[:1], 0.1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all("did not end" in line for line in lines)


def test_measurement_works_without_cpu_affinity(new_results, monkeypatch):
    def refused(_pid: int, _cpus: set[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(pytorch_program.os, "sched_setaffinity", refused)
    pytorch_program.pcie(Torch({0: 0.001}), PARTS[:1], 0.1)
    assert {(result.test, result.state) for result in new_results().values()} == {
        ("pcie_h2d", "measured"),
        ("pcie_d2h", "measured"),
    }


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
def test_missing_memory_and_unsupported_pytorch_are_no_gpu_failures(new_results, text):
    pytorch_program.gemm(Torch({0: 0.001}, errors={0: text}), PARTS[:1], 0.1)
    assert {result.state for result in new_results().values()} == {"not_measured"}


def test_hanging_gpu_does_not_delay_results_of_others(new_results, monkeypatch):
    monkeypatch.setattr(pytorch_program, "LIMIT_SECONDS", 0.05)
    pytorch_program.memory(Torch({0: 0.001, 1: 0.001}, hangs=frozenset({0})), PARTS[:2], 0.1)
    found = new_results()
    assert (found["memory", PARTS[0]].state, found["memory", PARTS[1]].state) == ("failed", "measured")
    assert "did not end" in found["memory", PARTS[0]].message


def test_changed_product_is_a_failure(new_results):
    pytorch_program.gemm(Torch({0: 0.001, 1: 0.001}, wrong={1: 7}), PARTS[:2], 0.1)
    found = new_results()
    assert found["gemm_bf16", PARTS[0]].state == "measured"
    assert found["gemm_bf16", PARTS[1]].state == "failed"
    assert "7 of 67108864 numbers" in found["gemm_bf16", PARTS[1]].message


def test_gpu_without_fp8_is_not_measured_with_fp8(new_results):
    pytorch_program.gemm(Torch({0: 0.001}, capability=(8, 0)), PARTS[:1], 0.1)
    assert new_results()["gemm_fp8", PARTS[0]].message == "this GPU has no FP8"


def test_p2p_copies_in_passes_and_failing_sender_affects_only_its_pair(new_results):
    passes = json.loads(json.dumps(ring(4)))
    pytorch_program.p2p(Torch(dict.fromkeys(range(4), 0.001), errors={2: ILLEGAL}), PARTS, passes)
    found = new_results()
    expected_pairs = {f"{PARTS[result]}>{PARTS[(result + 1) % 4]}" for result in range(4)}
    for megabytes in (16, 32, 64):
        states = {part: result.state for (test, part), result in found.items() if test == f"p2p_{megabytes}mb"}
        assert set(states) == expected_pairs
        assert {part for part, state in states.items() if state == "failed"} == {f"{PARTS[2]}>{PARTS[3]}"}
    assert found["p2p_64mb", f"{PARTS[0]}>{PARTS[1]}"].value == pytest.approx(64.0)


def test_near_returns_no_cpus_for_missing_device():
    assert pytorch_program.near("0000:ff:1f.7") == set()
