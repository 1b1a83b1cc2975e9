"""gpu_temperature: GPUs close to the slowdown temperature, and hot memory."""

from __future__ import annotations

from typing import Any

import pytest
import smi_capture
from fake_gpus import fake_pci_gpus
from fakes import BOOT, NOW, codes, findings, healthy_gpus, observations_named, run_check
from story import Story

from healthd.checks import gpu_temperature
from healthd.checks.gpu_temperature import Config, model_slowdown
from healthd.common.history import History
from healthd.common.model import Clears, Finding, Severity
from healthd.host.host import Host
from healthd.nvidia.nvml import NvmlError

PCI = fake_pci_gpus("dgx-h100")[3]
healthy = healthy_gpus(Config())


@pytest.mark.parametrize("profile", ["dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200"])
def test_healthy_machine_gives_temperatures_and_no_finding(host, profile):
    results = run_check(gpu_temperature, host(profile=profile))
    for name in ("gpu_temperature_celsius", "gpu_slowdown_margin_celsius", "gpu_memory_temperature_celsius"):
        assert len([*observations_named(results, name)]) == 8
    assert [item for item in results if isinstance(item, Finding)] == []


def test_a100_slows_down_at_89_and_warns_from_87(host):
    assert findings(gpu_temperature, host("gpu.3.temperature = 86", "dgx-a100")) == []
    (finding,) = findings(gpu_temperature, host("gpu.3.temperature = 87", "dgx-a100"))
    assert (finding.code, finding.severity, finding.clears) == ("gpu_temperature/hot", Severity.WARNING, Clears.PASS)
    assert finding.subject == fake_pci_gpus("dgx-a100")[3]
    assert finding.message == "87 C, 2 C below the temperature at which the hardware slows it down"
    (hotter,) = findings(gpu_temperature, host("gpu.3.temperature = 91", "dgx-a100"))
    assert "91 C, 2 C above the temperature" in hotter.message


def test_h100_reports_margin_and_slows_down_at_minus_two(host):
    """The margin counts from the operating maximum (T.LIMIT), and the slowdown is two degrees above that maximum."""
    assert findings(gpu_temperature, host("gpu.3.temperature_margin = 1")) == []
    (finding,) = findings(gpu_temperature, host("gpu.3.temperature_margin = 0"))
    assert (finding.code, finding.subject) == ("gpu_temperature/hot", PCI)
    (at,) = findings(gpu_temperature, host("gpu.3.temperature_margin = -2"))
    assert ", at the temperature at which" in at.message


def test_margin_ends_at_zero_if_driver_reports_no_slowdown_margin(host):
    text = "[gpu.3]\nunsupported_fields = [194]\ntemperature_margin = {}\n"
    assert findings(gpu_temperature, host(text.format(3))) == []
    assert codes(findings(gpu_temperature, host(text.format(2)))) == ["gpu_temperature/hot"]


def test_margin_is_preferred_to_slowdown_limit(host):
    text = "[gpu.3]\ntemperature = 88\ntemperature_slowdown = 89\n"
    assert findings(gpu_temperature, host(text)) == []


def test_margin_celsius_is_a_setting(host):
    assert len(findings(gpu_temperature, host("gpu.3.temperature_margin = 8"), Config(margin_celsius=10.0))) == 1


def test_memory_above_its_maximum_warns(host):
    assert findings(gpu_temperature, host("gpu.3.temperature_memory = 95", "dgx-a100")) == []
    (finding,) = findings(gpu_temperature, host("gpu.3.temperature_memory = 96", "dgx-a100"))
    assert (finding.code, finding.severity) == ("gpu_temperature/memory_hot", Severity.WARNING)
    assert finding.message == "the memory is at 96 C; the maximum is 95 C"


NO_LIMIT = """[gpu.3]
unsupported_fields = [194]
unsupported = ["nvmlDeviceGetTemperatureThreshold", "nvmlDeviceGetMarginTemperature"]
"""


@pytest.mark.parametrize(
    ("name", "slowdown"),
    [
        ("Tesla P100-PCIE-16GB", 82),
        ("Tesla V100-SXM2-32GB", 87),
        ("NVIDIA A100-SXM4-80GB", 89),
        ("NVIDIA H100 80GB HBM3", 89),
        ("NVIDIA H200", 89),
        ("NVIDIA B200", 91),
        ("NVIDIA GB200", 89),
        ("Tesla T4", 93),
        ("NVIDIA L40S", 90),
        ("", 90),
    ],
)
def test_slowdown_of_model_is_used_if_driver_reports_no_limit(host, name, slowdown):
    assert model_slowdown(name) == slowdown
    text = f'{NO_LIMIT}name = "{name}"\ntemperature = '
    assert findings(gpu_temperature, host(f"{text}{slowdown - 3}")) == []
    (finding,) = findings(gpu_temperature, host(f"{text}{slowdown - 2}"))
    assert (finding.code, finding.subject, finding.severity) == ("gpu_temperature/hot", PCI, Severity.WARNING)
    assert finding.message == (
        f"{slowdown - 2} C; the driver reports no limit, and this model slows down at about {slowdown} C"
    )


@pytest.mark.parametrize("capture", smi_capture.CAPTURES, ids=lambda path: path.stem)
def test_model_slowdown_is_that_of_real_machines_or_slightly_below(capture):
    for gpu in smi_capture.host(capture).gpus():
        limits, margin = gpu.temperature_limits(), gpu.temperature_margin()
        real = limits.slowdown
        if real is None:  # T.LIMIT: the sensors of temperature and margin may round differently
            assert margin is not None
            real = (gpu.temperature() or 0) + margin - (limits.slowdown_margin or 0)
        assert real - 5 <= model_slowdown(gpu.name) <= real + 1


def test_slowdown_celsius_applies_only_without_limit_from_driver(host):
    hot = host(f"{NO_LIMIT}temperature = 81")
    assert codes(findings(gpu_temperature, hot, Config(slowdown_celsius=83))) == ["gpu_temperature/hot"]
    assert findings(gpu_temperature, hot, Config(slowdown_celsius=84)) == []
    assert findings(gpu_temperature, host("gpu.3.temperature = 86", "dgx-a100"), Config(slowdown_celsius=60)) == []


def test_unreported_temperatures_are_not_evaluated(host):
    assert findings(gpu_temperature, host(f"{NO_LIMIT}temperature_memory = 120\n")) == []
    no_sensor = '[gpu.3]\nunsupported_fields = [82]\nunsupported = ["nvmlDeviceGetTemperature"]\n'
    assert findings(gpu_temperature, host(no_sensor)) == []
    assert findings(gpu_temperature, host(no_sensor, "dgx-a100")) == []


def test_limit_of_zero_counts_as_no_limit(host):
    text = "[gpu.3]\ntemperature_slowdown = 0\ntemperature_memory_max = 0\n"
    assert findings(gpu_temperature, host(text, "dgx-a100")) == []
    (finding,) = findings(gpu_temperature, host(f"{text}temperature = 91\n", "dgx-a100"))
    assert "the driver reports no limit" in finding.message


def test_hot_gpu_without_temperature_is_reported_by_margin(host):
    text = '[gpu.3]\ntemperature_margin = -3\nunsupported = ["nvmlDeviceGetTemperature"]\n'
    (finding,) = findings(gpu_temperature, host(text))
    assert finding.message == "1 C above the temperature at which the hardware slows it down"


def test_machine_without_gpus_gives_nothing(tmp_path):
    assert run_check(gpu_temperature, Host(str(tmp_path))) == []


def test_failing_gpu_hides_no_other_finding(host):
    text = '[gpu.2.errors]\nnvmlDeviceGetMarginTemperature = "Unknown"\n[gpu.3]\ntemperature_margin = -5\n'
    results: list[Any] = []
    with pytest.raises(NvmlError):
        results.extend(gpu_temperature.run(host(text), Config(), History({}, NOW, BOOT)))
    assert codes([item for item in results if isinstance(item, Finding)]) == ["gpu_temperature/hot"]


def test_hot_gpus_never_drain_and_clear_when_cool(host):
    hot = host("[gpu.3]\ntemperature_margin = -4\n[gpu.4]\ntemperature_memory_max = 95\ntemperature_memory = 99\n")
    story = Story(gpu_temperature).run_checks(hot, 50)
    assert story.codes == ["gpu_temperature/hot", "gpu_temperature/memory_hot"]
    assert not story.drained
    assert story.run_check(host()).codes == ["gpu_temperature/hot", "gpu_temperature/memory_hot"]
    assert story.run_check(host()).codes == []
