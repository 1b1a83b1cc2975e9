"""gpu_mig: MIG state that differs from the settings."""

from __future__ import annotations

import pytest
from fake_gpus import fake_pci_gpus
from fakes import BOOT, NOW, findings, healthy_gpus
from story import Story

from healthd.checks import gpu_mig
from healthd.checks.gpu_mig import Config
from healthd.common.history import History
from healthd.common.model import Clears, Finding, Severity
from healthd.nvidia.nvml import NvmlError

PCI = fake_pci_gpus("dgx-h100")[3]
SLICED = "".join(f"[gpu.{n}]\nmig = true\nmig_devices = 7\n" for n in range(8))
healthy = healthy_gpus(Config(mode="on", instances=7), SLICED)


def test_mig_mode_is_not_queried_without_expectation(host):
    failing = host('[gpu.3]\nmig = true\nmig_devices = 2\nerrors = { nvmlDeviceGetMigMode = "Unknown" }')
    assert findings(gpu_mig, failing) == []


@pytest.mark.parametrize(("text", "config"), [("", Config(mode="off", instances=0)), (SLICED, Config(mode="on"))])
def test_expected_mig_state_gives_no_finding(host, text, config):
    assert findings(gpu_mig, host(text), config) == []


def test_unexpected_mig_mode_is_degraded_until_fixed(host):
    (finding,) = findings(gpu_mig, host("[gpu.3]\nmig = true\nmig_devices = 2"), Config(mode="off", instances=0))
    assert (finding.code, finding.subject) == ("gpu_mig/mode", PCI)
    assert (finding.severity, finding.clears, finding.expects) == (Severity.DEGRADED, Clears.PASS, "mode")
    assert finding.message == 'MIG is on; the settings require "off"'


def test_mode_finding_mentions_change_pending_until_reset(host):
    text = "[gpu.3]\nmig = false\nmig_pending = true\n"
    found = findings(gpu_mig, host(text), Config(mode="on"))
    assert [f.message for f in found if f.subject == PCI] == [
        'MIG is off (on after the next GPU reset); the settings require "on"'
    ]


def test_unexpected_number_of_mig_devices_is_degraded(host):
    (finding,) = findings(gpu_mig, host(SLICED.replace("7", "6", 1)), Config(mode="on", instances=7))
    assert (finding.code, finding.severity, finding.expects) == ("gpu_mig/instances", Severity.DEGRADED, "instances")
    assert finding.message == "6 MIG devices; the settings require 7"
    assert len(findings(gpu_mig, host(), Config(instances=7))) == 8


def test_gpu_without_mig_support_counts_as_off(host):
    text = '[gpu.3]\nunsupported = ["nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount"]'
    assert findings(gpu_mig, host(text), Config(mode="off", instances=0)) == []
    found = [f for f in findings(gpu_mig, host(text), Config(mode="on")) if f.subject == PCI]
    assert [f.message for f in found] == ['MIG is not supported; the settings require "on"']


def test_unreadable_mig_mode_hides_no_other_finding(host):
    text = '[gpu.0]\nerrors = { nvmlDeviceGetMigMode = "Unknown" }\n[gpu.3]\nmig = true'
    results: list[object] = []
    with pytest.raises(NvmlError, match="nvmlDeviceGetMigMode"):
        results.extend(gpu_mig.run(host(text), Config(mode="off"), History({}, NOW, BOOT)))
    assert [f.subject for f in results if isinstance(f, Finding)] == [PCI]


@pytest.mark.parametrize("config", [Config(mode="yes"), Config(instances=-2), Config(mode="off", instances=1)])
def test_validate_rejects_invalid_settings(config):
    assert gpu_mig.validate(config)


@pytest.mark.parametrize(
    ("config", "unexpected", "code"),
    [
        (Config(mode="off"), "gpu.3.mig = true", "gpu_mig/mode"),
        (Config(mode="on", instances=7), SLICED.replace("7", "6", 1), "gpu_mig/instances"),
    ],
)
def test_wrong_mig_state_drains_until_fixed(host, config, unexpected, code):
    as_expected = host(SLICED if config.mode == "on" else "")
    story = Story(gpu_mig, config).run_check(as_expected)
    story.run_check(host(unexpected))
    assert (story.codes, story.drained, story.requeued) == ([code], True, False)
    story.run_checks(host(unexpected), 20)
    story.reboot().run_check(host(unexpected))
    assert story.drained, "neither time nor a reboot changes it"
    story.run_checks(as_expected, 3)
    assert (story.codes, story.drained) == ([], False)
