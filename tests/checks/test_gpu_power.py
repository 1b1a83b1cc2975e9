"""gpu_power: GPUs with a power limit below the default of their model."""

from __future__ import annotations

import pytest
from fake_gpus import fake_pci_gpus
from fakes import codes, findings, healthy_gpus, observations_named, run_check, run_until_error
from story import Story

from healthd.checks import gpu_power
from healthd.checks.gpu_power import Config
from healthd.common.model import Clears, Finding, Severity
from healthd.host.host import Host

GPUS = fake_pci_gpus("dgx-h100")
PCI = GPUS[3]
healthy = healthy_gpus(Config())


@pytest.mark.parametrize("profile", ["dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200"])
def test_healthy_machine_gives_limits_and_no_finding(host, profile):
    results = run_check(gpu_power, host(profile=profile))
    assert len(list(observations_named(results, "gpu_power_limit_watts"))) == len(results) == 8


def test_limit_below_default_warns(host):
    (finding,) = findings(gpu_power, host("gpu.3.power_limit_watts = 500"))
    assert (finding.code, finding.subject, finding.clears) == ("gpu_power/limited", PCI, Clears.PASS)
    assert finding.severity is Severity.WARNING
    assert finding.message == "the power limit in force is 500 W; the default is 700 W"


def test_limit_above_default_gives_no_finding(host):
    assert findings(gpu_power, host("gpu.3.power_limit_watts = 750")) == []


@pytest.mark.parametrize(("limit", "expected"), [(600, []), (599, ["gpu_power/limited"]), (700, [])])
def test_accepted_watts_accepts_a_lower_limit(host, limit, expected):
    found = findings(gpu_power, host(f"gpu.3.power_limit_watts = {limit}"), Config(accepted_watts=600.0))
    assert codes(found) == expected


def test_accepted_watts_above_default_requires_only_the_default(host):
    assert findings(gpu_power, host(), Config(accepted_watts=900.0)) == []


@pytest.mark.parametrize("call", ["nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementDefaultLimit"])
def test_gpu_without_limits_gives_nothing(host, call):
    results = run_check(gpu_power, host(f'[gpu.3]\nunsupported = ["{call}"]\npower_limit_watts = 1'))
    assert PCI not in {dict(item.labels)["pci"] for item in results}


def test_machine_without_gpus_gives_nothing(tmp_path):
    assert run_check(gpu_power, Host(str(tmp_path))) == []


def test_power_limit_is_evaluated_with_mig(host):
    assert len(findings(gpu_power, host("[gpu.3]\nmig = true\npower_limit_watts = 500"))) == 1


def test_failing_gpu_hides_no_other_finding(host):
    text = '[gpu.0]\nerrors = { nvmlDeviceGetEnforcedPowerLimit = "Unknown" }\n[gpu.3]\npower_limit_watts = 500'
    results, error = run_until_error(gpu_power, host(text))
    assert GPUS[0] in error
    assert codes([item for item in results if isinstance(item, Finding)]) == ["gpu_power/limited"]


def test_low_limit_warns_until_restored_and_never_drains(host):
    limited = host("gpu.3.power_limit_watts = 500")
    story = Story(gpu_power).run_checks(limited, 300).reboot().run_check(limited)
    assert story.codes == ["gpu_power/limited"]
    assert not story.drained
    assert story.run_check(host()).codes == ["gpu_power/limited"]
    assert story.run_check(host()).codes == []
