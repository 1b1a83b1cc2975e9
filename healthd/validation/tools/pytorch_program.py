"""Measures GPU performance with PyTorch: matrix products, device memory, PCIe, copies between GPUs.

It is a separate program for a Python that has torch, and does not import healthd:

    python -I pytorch_program.py '{"families": ["gemm", "memory", "pcie", "p2p"], "seconds": 1.0, "passes": {"8": ...}}'

It prints each result immediately, as a JSON object on one line. The objects are {"source"}, {"gpus"}, {"test", "part",
"value", "unit"}, the same with "wrong" (a wrong result), {"test", "part", "error"} (a CUDA error) and {... "skipped"}.
If a test hangs, all earlier results have been printed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

SIZE = 8192  # rows of the square matrices; large enough to saturate every GPU
MEMORY_BYTES, PCIE_BYTES = 1 << 30, 256 << 20
P2P_MEGABYTES, REPEATS = (16, 32, 64), 3
POLL_SECONDS = 0.001
WARM_UP, MAX_QUEUED = 3, 400  # CUDA queues about a thousand kernels; after that the caller waits for the GPU
LIMIT_SECONDS = 20.0  # time limit for work that takes about a second
# A CUDA error is the GPU's fault, with these exceptions: memory is short, the GPU is in use, or this PyTorch does not
# support the GPU.
EXCUSED = (
    *("out of memory", "ALLOC_FAILED", "busy or unavailable", "no kernel image", "not supported", "NOT_SUPPORTED"),
    *("invalid device function", "invalid argument", "INVALID_VALUE", "insufficient"),
)


def report(**record: Any) -> None:
    print(json.dumps(record), flush=True)


def addresses(count: int) -> list[str]:
    """Return each CUDA device's PCI address in sysfs format (CUDA driver API, cuDeviceGetPCIBusId)."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuInit(0)
    found = []
    for number in range(count):
        device, text = ctypes.c_int(), ctypes.create_string_buffer(64)
        driver.cuDeviceGet(ctypes.byref(device), number)
        driver.cuDeviceGetPCIBusId(text, 64, device)
        address_parts = text.value.decode("ascii", "replace").lower().split(":")
        found.append(
            ":".join([address_parts[0][-4:], *address_parts[1:]]) if len(address_parts) == 3 else f"gpu {number}"
        )
    return found


class Timed:
    """Work on one GPU that is queued between two CUDA events. Completion is polled, with a time limit."""

    def __init__(self, torch: Any, number: int, work: Callable[[], object], times: int) -> None:
        self.times = times
        with torch.cuda.device(number):
            self.stream = torch.cuda.Stream()
            self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(self.stream):
                self.begin.record()
                for _ in range(times):
                    work()
                self.end.record()

    def seconds(self, limit: float) -> tuple[float, ...]:
        """Return the seconds per repetition, or () if the work has not finished."""
        until = time.monotonic() + limit
        while not self.end.query():
            if time.monotonic() > until:
                return ()
            time.sleep(POLL_SECONDS)
        return (float(self.begin.elapsed_time(self.end)) / 1000 / self.times,)


def side_by_side(
    torch: Any, test: str, parts: Sequence[str], works: dict[int, Callable[[], object]], seconds: float
) -> dict[int, float]:
    """Run `work` on all GPUs at the same time for about `seconds`. Return the seconds per repetition for each GPU.

    If the work hangs or fails on a GPU, this is reported for that GPU and does not affect the others.
    """

    def begun(number: int, times: int) -> Any:
        return tried(test, parts[number], functools.partial(Timed, torch, number, works[number], times))

    def ended(number: int, timed: Timed | None) -> float | None:
        return None if timed is None else wait_for(test, parts[number], timed)

    warm_up = {number: begun(number, WARM_UP) for number in works}
    warm_up_seconds = {number: ended(number, value) for number, value in warm_up.items()}
    second_warm_up = {
        number: begun(number, WARM_UP) for number, work_seconds in warm_up_seconds.items() if work_seconds
    }
    work_seconds = {number: ended(number, value) for number, value in second_warm_up.items()}
    times = {
        number: max(WARM_UP, min(MAX_QUEUED, int(seconds / value))) for number, value in work_seconds.items() if value
    }
    queued = {number: begun(number, count) for number, count in times.items()}
    measured = {number: ended(number, value) for number, value in queued.items()}
    return {number: value for number, value in measured.items() if value}


def wait_for(test: str, part: str, timed: Timed) -> float | None:
    """Return the seconds that the work took. If the work hangs or fails, report this and return None."""
    seconds = tried(test, part, functools.partial(timed.seconds, LIMIT_SECONDS))
    if seconds == ():
        report(test=test, part=part, error=f"the test did not end within {LIMIT_SECONDS:.0f} s")
    return seconds[0] if seconds else None


def tried(test: str, part: str, act: Callable[[], Any]) -> Any:
    """Return the result of `act`. If `act` fails, report this and return None."""
    try:
        return act()
    except Exception as error:
        _report_error(test, part, error)
        return None


def gemm(torch: Any, parts: Sequence[str], seconds: float) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for test, dtype in (("gemm_bf16", torch.bfloat16), ("gemm_fp32", torch.float32), ("gemm_fp8", None)):
        works: dict[int, Callable[[], object]] = {}
        checks: dict[int, Callable[[], int]] = {}
        for number, part in enumerate(parts):
            if dtype is None and torch.cuda.get_device_capability(number) < (8, 9):
                report(test=test, part=part, skipped="this GPU has no FP8")
                continue
            made = tried(test, part, functools.partial(_product, torch, number, dtype))
            if made is not None:
                works[number], checks[number] = made
        for number, took in side_by_side(torch, test, parts, works, seconds).items():
            value = 2.0 * SIZE**3 / took / 1e12
            wrong_count = tried(test, parts[number], checks[number])
            if wrong_count is None:
                continue
            extra = (
                {"wrong": f"{wrong_count} of {SIZE * SIZE} numbers changed when a matrix product was repeated"}
                if wrong_count
                else {}
            )
            report(test=test, part=parts[number], value=value, unit="TFLOPS", **extra)
        del works, checks
        torch.cuda.empty_cache()


def _product(torch: Any, number: int, dtype: Any) -> tuple[Callable[[], object], Callable[[], int]]:
    """Return a function that multiplies two matrices, and a function that counts differences from the first product.

    The matrices are SIZE x SIZE.

    cuBLAS: "all API routines from a given version produce the same bit-wise results at every run when executed on GPUs
    with the same architecture and the same number of SMs" (docs.nvidia.com/cuda/cublas, "Results reproducibility").
    """
    device = f"cuda:{number}"
    generator = torch.Generator(device=device).manual_seed(1)
    a, b = (torch.randn(SIZE, SIZE, device=device, dtype=torch.float32, generator=generator) for _ in range(2))
    if dtype is None:
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        scale = torch.ones((), device=device, dtype=torch.float32)

        def work() -> Any:
            return torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    else:
        a, b = a.to(dtype), b.to(dtype)

        def work() -> Any:
            return torch.mm(a, b)

    first = work()
    torch.cuda.synchronize(number)
    return work, lambda: int(torch.ne(first, work()).sum().item())


def memory(torch: Any, parts: Sequence[str], seconds: float) -> None:
    """Copy memory within each GPU. Each byte is read and written."""

    def made(number: int) -> Callable[[], object]:
        a = torch.zeros(MEMORY_BYTES, dtype=torch.uint8, device=f"cuda:{number}")
        return functools.partial(torch.empty_like(a).copy_, a)

    works: dict[int, Callable[[], object]] = {}
    for number, part in enumerate(parts):
        work = tried("memory", part, functools.partial(made, number))
        if work is not None:
            works[number] = work
    for number, took in side_by_side(torch, "memory", parts, works, seconds).items():
        report(test="memory", part=parts[number], value=2 * MEMORY_BYTES / took / 1e9, unit="GB/s")


def pcie(torch: Any, parts: Sequence[str], seconds: float) -> None:
    """Measure one GPU after another, because several GPUs may share a link.

    Host memory is on the CPU next to the GPU.
    """
    everywhere = os.sched_getaffinity(0)
    for number, part in enumerate(parts):
        run_on(near(part) & everywhere or everywhere)
        for test in ("pcie_h2d", "pcie_d2h"):
            work = tried(test, part, functools.partial(_transfer, torch, number, test == "pcie_h2d"))
            works: dict[int, Callable[[], object]] = {} if work is None else {number: work}
            # Use the best of three runs: a link that has lost lanes or speed is slow in each run, but a disturbance
            # slows only one. In a few dozen runs on an H100 whose link reaches 55 GB/s, one measured 45 GB/s, which is
            # below the floor.
            tries: list[float] = []
            for _ in range(REPEATS):
                took = side_by_side(torch, test, parts, works, min(seconds, 0.3) / REPEATS)
                if number not in took:
                    break
                tries.append(took[number])
            else:
                report(test=test, part=part, value=PCIE_BYTES / min(tries) / 1e9, unit="GB/s")
    run_on(everywhere)


def run_on(cpus: set[int]) -> None:
    """Bind to CPUs if permitted. healthd's unit forbids it (SystemCallFilter=, @resources). Any CPU is then used."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cpus)


def _transfer(torch: Any, number: int, to_gpu: bool) -> Callable[[], object]:
    host_buffer = torch.empty(PCIE_BYTES, dtype=torch.uint8, pin_memory=True).fill_(1)
    device_buffer = torch.empty(PCIE_BYTES, dtype=torch.uint8, device=f"cuda:{number}")
    target, source = (device_buffer, host_buffer) if to_gpu else (host_buffer, device_buffer)
    return functools.partial(target.copy_, source, non_blocking=True)


def near(part: str) -> set[int]:
    """Return the CPUs next to a PCI device, from sysfs ("0-31,64-95"), or an empty set if unknown."""
    found: set[int] = set()
    try:
        with open(f"/sys/bus/pci/devices/{part}/local_cpulist", encoding="ascii") as file:
            for span in file.read(4096).strip().split(","):
                first, _, last = span.partition("-")
                found.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return set()
    return found


def p2p(torch: Any, parts: Sequence[str], passes: Sequence[Sequence[Sequence[int]]]) -> None:
    """Measure copies between GPUs. All pairs in a pass run at the same time. Report the median of three."""
    for megabytes in P2P_MEGABYTES:
        size = megabytes * 1_000_000
        for pairs in passes:
            works: dict[tuple[int, int], Callable[[], object]] = {}
            for sender, receiver in pairs:
                part, test = f"{parts[sender]}>{parts[receiver]}", f"p2p_{megabytes}mb"
                if not torch.cuda.can_device_access_peer(sender, receiver):
                    report(test=test, part=part, skipped="the driver does not allow copies between these two GPUs")
                    continue
                work = tried(test, part, functools.partial(_copy, torch, sender, receiver, size))
                if work is not None:
                    works[sender, receiver] = work
            pair_seconds: dict[tuple[int, int], list[float]] = {pair: [] for pair in works}
            broken: set[tuple[int, int]] = set()
            for _ in range(REPEATS + 1):  # the first copy enables peer access, so it is not measured
                queued: dict[tuple[int, int], Timed] = {}
                for pair, work in works.items():
                    part, test = f"{parts[pair[0]]}>{parts[pair[1]]}", f"p2p_{megabytes}mb"
                    timed = None
                    if pair not in broken:
                        timed = tried(test, part, functools.partial(Timed, torch, pair[0], work, 8))
                    if timed is None:
                        broken.add(pair)
                    else:
                        queued[pair] = timed
                for pair, timed in queued.items():
                    part, test = f"{parts[pair[0]]}>{parts[pair[1]]}", f"p2p_{megabytes}mb"
                    seconds = wait_for(test, part, timed)
                    if seconds is None:
                        broken.add(pair)
                    else:
                        pair_seconds[pair].append(seconds)
            for (sender, receiver), durations in pair_seconds.items():
                part, test = f"{parts[sender]}>{parts[receiver]}", f"p2p_{megabytes}mb"
                if (sender, receiver) not in broken:
                    report(test=test, part=part, value=size / statistics.median(durations[1:]) / 1e9, unit="GB/s")


def _copy(torch: Any, sender: int, receiver: int, size: int) -> Callable[[], object]:
    a = torch.zeros(size, dtype=torch.uint8, device=f"cuda:{sender}")
    b = torch.empty(size, dtype=torch.uint8, device=f"cuda:{receiver}")
    return functools.partial(b.copy_, a, non_blocking=True)


def _report_error(test: str, part: str, error: Exception) -> None:
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    is_cuda_error = "CUDA error" in text or "CUBLAS_STATUS" in text
    if is_cuda_error and not any(phrase in text for phrase in EXCUSED):
        report(test=test, part=part, error=text)
    else:
        report(test=test, part=part, skipped=text)


def main() -> None:
    request = json.loads(sys.argv[1])
    try:
        import torch
    except ImportError as error:
        report(missing=f"{error}")
        return
    report(source=f"PyTorch {torch.__version__}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        report(missing="PyTorch sees no GPU here")
        return
    parts = addresses(count)
    report(gpus=parts)
    seconds = float(request["seconds"])
    for family, measure in (("gemm", gemm), ("memory", memory), ("pcie", pcie)):
        if family in request["families"]:
            measure(torch, parts, seconds)
    if "p2p" in request["families"] and count > 1:
        p2p(torch, parts, request["passes"].get(str(count), []))


if __name__ == "__main__":
    main()
