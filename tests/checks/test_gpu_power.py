"""gpu_power: GPUs with a power limit below the default of their model."""

from __future__ import annotations

import pytest
from fake_gpus import fake_pci_gpus
from fakes import codes, findings, healthy_gpus, observed, run_check, until_it_fails
from story import Story

from healthd.checks import gpu_power
from healthd.checks.gpu_power import Config
from healthd.common.model import Clears, Finding, Severity
from healthd.host.host import Host

GPUS = fake_pci_gpus("dgx-h100")
PCI = GPUS[3]
healthy = healthy_gpus(Config())


@pytest.mark.parametrize("profile", ["dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200"])
def test_a_healthy_machine_gives_its_limits_and_no_finding(host, profile):
    given = run_check(gpu_power, host(profile=profile))
    assert len(list(observed(given, "gpu_power_limit_watts"))) == len(given) == 8


def test_a_limit_below_the_default_warns(host):
    (finding,) = findings(gpu_power, host("gpu.3.power_limit_watts = 500"))
    assert (finding.code, finding.subject, finding.clears) == ("gpu_power/limited", PCI, Clears.PASS)
    assert finding.severity is Severity.WARNING
    assert finding.message == "the power limit in force is 500 W; the default is 700 W"


def test_a_limit_above_the_default_is_no_finding(host):
    assert findings(gpu_power, host("gpu.3.power_limit_watts = 750")) == []


@pytest.mark.parametrize(("limit", "expected"), [(600, []), (599, ["gpu_power/limited"]), (700, [])])
def test_a_site_that_caps_on_purpose_accepts_its_own_limit(host, limit, expected):
    found = findings(gpu_power, host(f"gpu.3.power_limit_watts = {limit}"), Config(accepted_watts=600.0))
    assert codes(found) == expected


def test_an_accepted_limit_above_the_default_asks_for_no_more_than_the_default(host):
    assert findings(gpu_power, host(), Config(accepted_watts=900.0)) == []


@pytest.mark.parametrize("call", ["nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementDefaultLimit"])
def test_a_gpu_without_limits_gives_nothing(host, call):
    given = run_check(gpu_power, host(f'[gpu.3]\nunsupported = ["{call}"]\npower_limit_watts = 1'))
    assert PCI not in {dict(item.labels)["pci"] for item in given}


def test_a_machine_without_gpus_gives_nothing(tmp_path):
    assert run_check(gpu_power, Host(str(tmp_path))) == []


def test_mig_changes_nothing(host):
    assert len(findings(gpu_power, host("[gpu.3]\nmig = true\npower_limit_watts = 500"))) == 1


def test_a_gpu_that_fails_is_unknown_and_hides_no_other(host):
    text = '[gpu.0]\nerrors = { nvmlDeviceGetEnforcedPowerLimit = "Unknown" }\n[gpu.3]\npower_limit_watts = 500'
    given, error = until_it_fails(gpu_power, host(text))
    assert GPUS[0] in error
    assert codes([item for item in given if isinstance(item, Finding)]) == ["gpu_power/limited"]


def test_it_warns_until_the_limit_is_back_and_never_drains(host):
    bad = host("gpu.3.power_limit_watts = 500")
    story = Story(gpu_power).looks(bad, 300).reboot().look(bad)
    assert story.codes == ["gpu_power/limited"]
    assert not story.drained
    assert story.look(host()).codes == ["gpu_power/limited"]
    assert story.look(host()).codes == []
