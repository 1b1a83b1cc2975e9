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


def test_without_an_expectation_no_gpu_is_asked(host):
    unasked = host('[gpu.3]\nmig = true\nmig_devices = 2\nerrors = { nvmlDeviceGetMigMode = "Unknown" }')
    assert findings(gpu_mig, unasked) == []


@pytest.mark.parametrize(("text", "config"), [("", Config(mode="off", instances=0)), (SLICED, Config(mode="on"))])
def test_gpus_as_the_settings_have_them_are_fine(host, text, config):
    assert findings(gpu_mig, host(text), config) == []


def test_mig_that_is_on_where_it_should_be_off_is_degraded_until_it_is_off(host):
    (finding,) = findings(gpu_mig, host("[gpu.3]\nmig = true\nmig_devices = 2"), Config(mode="off", instances=0))
    assert (finding.code, finding.subject) == ("gpu_mig/mode", PCI)
    assert (finding.severity, finding.clears, finding.expects) == (Severity.DEGRADED, Clears.PASS, "mode")
    assert finding.message == 'MIG is on; the settings require "off"'


def test_a_change_that_waits_for_a_reset_is_told(host):
    text = "[gpu.3]\nmig = false\nmig_pending = true\n"
    found = findings(gpu_mig, host(text), Config(mode="on"))
    assert [f.message for f in found if f.subject == PCI] == [
        'MIG is off (on after the next GPU reset); the settings require "on"'
    ]


def test_another_number_of_mig_devices_is_degraded(host):
    (finding,) = findings(gpu_mig, host(SLICED.replace("7", "6", 1)), Config(mode="on", instances=7))
    assert (finding.code, finding.severity, finding.expects) == ("gpu_mig/instances", Severity.DEGRADED, "instances")
    assert finding.message == "6 MIG devices; the settings require 7"
    assert len(findings(gpu_mig, host(), Config(instances=7))) == 8


def test_a_gpu_that_cannot_have_mig_is_off(host):
    text = '[gpu.3]\nunsupported = ["nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount"]'
    assert findings(gpu_mig, host(text), Config(mode="off", instances=0)) == []
    found = [f for f in findings(gpu_mig, host(text), Config(mode="on")) if f.subject == PCI]
    assert [f.message for f in found] == ['MIG is not supported; the settings require "on"']


def test_a_gpu_that_cannot_be_asked_hides_no_other(host):
    text = '[gpu.0]\nerrors = { nvmlDeviceGetMigMode = "Unknown" }\n[gpu.3]\nmig = true'
    given: list[object] = []
    with pytest.raises(NvmlError, match="nvmlDeviceGetMigMode"):
        given.extend(gpu_mig.run(host(text), Config(mode="off"), History({}, NOW, BOOT)))
    assert [f.subject for f in given if isinstance(f, Finding)] == [PCI]


@pytest.mark.parametrize("config", [Config(mode="yes"), Config(instances=-2), Config(mode="off", instances=1)])
def test_settings_that_make_no_sense_are_refused_with_a_sentence(config):
    assert gpu_mig.validate(config)


@pytest.mark.parametrize(
    ("config", "wrong", "code"),
    [
        (Config(mode="off"), "gpu.3.mig = true", "gpu_mig/mode"),
        (Config(mode="on", instances=7), SLICED.replace("7", "6", 1), "gpu_mig/instances"),
    ],
)
def test_story_a_node_in_the_wrong_mode_is_drained_until_it_is_as_the_settings_say(host, config, wrong, code):
    right = host(SLICED if config.mode == "on" else "")
    story = Story(gpu_mig, config).look(right)
    story.look(host(wrong))
    assert (story.codes, story.drained, story.requeued) == ([code], True, False)
    story.looks(host(wrong), 20)
    story.reboot().look(host(wrong))
    assert story.drained, "neither time nor a reboot changes it"
    story.looks(right, 3)
    assert (story.codes, story.drained) == ([], False)
