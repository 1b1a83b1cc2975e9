"""`healthd validate` on real GPUs, compared with published numbers (`make test-gpu`).

The machine's settings stay unchanged: the kernel of another program slows a GPU down, not a clock or a limit.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import until

from healthd.common.toml import parse
from healthd.validation import parts

ROOT = Path(__file__).parents[2]
HERE = parts.read_parts("/")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not HERE.gpus or not os.path.exists("/dev/nvidiactl"), reason="this machine has no NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="this Python has no PyTorch"),
]

# Name reported by the GPU -> profile with the published floors (conf/profiles).
PROFILES = {"H200": "dgx-h200", "H100 80GB HBM3": "dgx-h100", "A100-SXM": "dgx-a100", "B200": "dgx-b200"}


def gpu_name() -> str:
    code = "import torch; print(torch.cuda.get_device_name(0))"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def floors() -> dict[str, float]:
    name = gpu_name()
    profile = next((profile for part, profile in PROFILES.items() if part in name), None)
    if profile is None:
        pytest.skip(f"no floors were published for a {name}")
    path = ROOT / f"conf/profiles/{profile}.toml"
    table = parse(path.read_text("utf-8"))
    return {test: float(floor) for test, floor in table["checks"]["validation"]["floors"].items()}


def validate(state: Path, *arguments: str) -> dict:
    """Return the document. No profile is used: each test has its own reference values."""
    (state / "settings.toml").touch()
    command = [sys.executable, "-m", "healthd", "validate", "--json", "--state-dir", str(state / "state")]
    command += ["--runtime-dir", str(state / "run"), "--config", str(state / "settings.toml"), "--profile", "none"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # this Python first: it has PyTorch
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path},
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def values(document: dict, test: str) -> dict[str, float]:
    return {
        result["part"]: result["value"] for result in document["results"] if result["test"] == test and result["value"]
    }


def test_each_gpu_reaches_published_floors(tmp_path, floors):
    document = validate(tmp_path, "--only", "gemm,memory,pcie")
    assert "failed" not in {result["verdict"] for result in document["results"]}, document["results"]
    for test in ("gemm_bf16", "memory", "pcie_h2d", "pcie_d2h"):
        found = values(document, test)
        assert set(found) == set(HERE.gpus), f"{test}: {document['results']}"
        assert all(value >= floors.get(test, 0.0) for value in found.values()), (test, found, floors)


def test_lower_precision_is_faster_than_single(tmp_path):
    document = validate(tmp_path, "--only", "gemm")
    for part, single in values(document, "gemm_fp32").items():
        assert values(document, "gemm_bf16")[part] > 2 * single
        if part in values(document, "gemm_fp8"):
            assert values(document, "gemm_fp8")[part] > values(document, "gemm_bf16")[part]


COMPETES = """
import torch
a = torch.randn(4096, 4096, device="cuda:0", dtype=torch.bfloat16)
out = torch.mm(a, a)
torch.cuda.synchronize()
print("up", flush=True)
while True:
    for _ in range(50):
        torch.mm(a, a, out=out)
    torch.cuda.synchronize()
"""


@contextmanager
def competing_kernel(output_file: Path) -> Iterator[None]:
    """Run another program on the first GPU. It is computing as soon as it has printed."""
    with output_file.open("w") as file:
        competitor = subprocess.Popen([sys.executable, "-c", COMPETES], stdout=file, env={**os.environ, **ORDER})
    try:
        until(lambda: output_file.read_text() or competitor.poll() is not None, "the competitor runs", 300)
        assert competitor.poll() is None
        yield
    finally:
        competitor.kill()
        competitor.wait(60)


ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_gpu_with_competing_kernel_is_slow_and_others_are_not(tmp_path):
    first = min(HERE.gpus)
    for _ in range(3):  # its own past
        before = validate(tmp_path, "--only", "gemm")
    assert {result["verdict"] for result in before["results"] if result["test"] == "gemm_bf16"} == {"ok"}
    with competing_kernel(tmp_path / "competitor"):
        during = validate(tmp_path, "--only", "gemm")
    found = {result["part"]: result for result in during["results"] if result["test"] == "gemm_bf16"}
    assert found[first]["verdict"] == "slow", found[first]
    assert found[first]["against"] in ("own", "peers")
    assert [part for part, result in found.items() if result["verdict"] != "ok"] == [first]
    after = validate(tmp_path, "--only", "gemm")
    assert {result["verdict"] for result in after["results"] if result["test"] == "gemm_bf16"} == {"ok"}


def test_pairs_of_gpus_are_measured_in_passes(tmp_path):
    if len(HERE.gpus) < 2:
        pytest.skip("one GPU has no pair")
    document = validate(tmp_path, "--only", "p2p")
    gpus = list(HERE.gpus)
    ring = {f"{result}>{gpus[(number + 1) % len(gpus)]}" for number, result in enumerate(gpus)}
    for test in ("p2p_16mb", "p2p_32mb", "p2p_64mb"):
        assert {result["part"] for result in document["results"] if result["test"] == test} == ring
