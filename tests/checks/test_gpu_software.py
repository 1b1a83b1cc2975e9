"""gpu_software: driver, VBIOS and InfoROM."""

from __future__ import annotations

import pytest
from fake_gpus import fake_pci_gpus
from fakes import codes, findings, healthy_gpus, run_check, run_until_error
from story import Story

from healthd.checks import gpu_software
from healthd.checks.gpu_software import Config
from healthd.common.model import Clears, Severity
from healthd.host.host import INFOROM_SECONDS, Host
from healthd.nvidia.fake_nvml import open_fake

GPUS = fake_pci_gpus("dgx-h100")
PCI = GPUS[3]
DRIVER, VBIOS = "580.105.08", "96.00.99.00.01"  # of the DGX H100
OLD = 'gpu.3.vbios = "96.00.74.00.01"'
healthy = healthy_gpus(Config(driver_version=DRIVER, vbios=VBIOS))


@pytest.mark.parametrize("profile", ["dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200"])
def test_healthy_machine_gives_no_finding(host, profile):
    assert run_check(gpu_software, host(profile=profile)) == []


def test_expected_versions_give_no_finding(host):
    assert run_check(gpu_software, host(), Config(driver_version=DRIVER, vbios=VBIOS)) == []


def test_machine_without_gpus_gives_nothing(tmp_path):
    assert run_check(gpu_software, Host(str(tmp_path)), Config(driver_version=DRIVER, vbios=VBIOS)) == []


# --- driver


def test_unexpected_driver_version_warns(host):
    (finding,) = findings(gpu_software, host('driver_version = "570.148.08"'), Config(driver_version=DRIVER))
    assert (finding.code, finding.subject, finding.severity) == ("gpu_software/driver", "", Severity.WARNING)
    assert (finding.clears, finding.expects) == (Clears.PASS, "driver_version")
    assert finding.message == "driver 570.148.08 is loaded; expected 580.105.08"


def test_driver_version_without_expectation_is_ignored(host):
    assert findings(gpu_software, host('driver_version = "570.148.08"')) == []


def test_unreadable_driver_version_is_not_the_expected_one(host):
    node = host('missing_functions = ["nvmlSystemGetDriverVersion"]')
    assert codes(findings(gpu_software, node, Config(driver_version=DRIVER))) == ["gpu_software/driver"]


# --- VBIOS


def test_vbios_different_from_other_gpus_warns(host):
    (finding,) = findings(gpu_software, host(OLD))
    assert (finding.code, finding.subject, finding.severity) == ("gpu_software/vbios", PCI, Severity.WARNING)
    assert (finding.clears, finding.expects) == (Clears.PASS, "")
    assert finding.message == f"VBIOS 96.00.74.00.01; {VBIOS} is the version of the other GPUs"


def test_newer_vbios_is_right_in_a_tie(host):
    text = f'pci = ["0000:1b:00.0", "0000:43:00.0"]\n{OLD.replace("gpu.3", "gpu.0")}'
    assert [finding.subject for finding in findings(gpu_software, host(text))] == ["0000:1b:00.0"]


def test_vbios_is_compared_within_one_model(host):
    assert findings(gpu_software, host('[gpu.3]\nname = "NVIDIA L40S"\nvbios = "95.02.66.00.02"')) == []


def test_vbios_setting_replaces_comparison(host):
    found = findings(gpu_software, host(), Config(vbios="96.00.A5.00.03"))
    assert [finding.subject for finding in found] == GPUS
    assert {finding.expects for finding in found} == {"vbios"}
    (finding,) = findings(gpu_software, host(OLD), Config(vbios=VBIOS))
    assert finding.message.endswith(f"{VBIOS} is the expected version")


def test_unreported_vbios_is_ignored_without_expectation(host):
    node = host('missing_functions = ["nvmlDeviceGetVbiosVersion"]')
    assert findings(gpu_software, node) == []
    assert len(findings(gpu_software, node, Config(vbios=VBIOS))) == 8


def test_gpu_software_ignores_mig(host):
    assert findings(gpu_software, host("gpu.3.mig = true")) == []


# --- InfoROM


def test_corrupted_inforom_is_degraded(host):
    (finding,) = findings(gpu_software, host("gpu.3.inforom = false"))
    assert (finding.code, finding.subject) == ("gpu_software/inforom", PCI)
    assert (finding.severity, finding.clears) == (Severity.DEGRADED, Clears.PASS)


def test_gpu_without_inforom_gives_nothing(host):
    assert findings(gpu_software, host('gpu.3.unsupported = ["nvmlDeviceValidateInforom"]')) == []


@pytest.mark.parametrize("call", ["nvmlDeviceValidateInforom", "nvmlDeviceGetVbiosVersion"])
def test_failing_gpu_hides_no_other_finding(host, call):
    text = f'driver_version = "570.148.08"\n{OLD}\ngpu.0.errors = {{ {call} = "Unknown" }}\ngpu.4.inforom = false'
    results, error = run_until_error(gpu_software, host(text), Config(driver_version=DRIVER))
    assert GPUS[0] in error
    assert sorted(codes(results)) == ["gpu_software/driver", "gpu_software/inforom", "gpu_software/vbios"]


def test_valid_inforom_is_cached_for_an_hour_and_corrupted_one_is_not(tmp_path, monkeypatch):
    scenario, clock = tmp_path / "gpus.toml", [1000.0]
    monkeypatch.setattr("healthd.host.host.time.monotonic", lambda: clock[0])
    node = Host("/nonexistent", lambda: open_fake(str(scenario)))

    def run_once(text: str) -> list[str]:
        scenario.write_text(f'profile = "dgx-h100"\n{text}')
        found = codes(findings(gpu_software, node))
        node.close_nvml()  # as after each round
        return found

    expected_codes = ["gpu_software/inforom"]
    assert run_once("") == []
    clock[0] += INFOROM_SECONDS - 1
    assert run_once("gpu.3.inforom = false") == []
    clock[0] += 1
    assert run_once("gpu.3.inforom = false") == expected_codes
    assert run_once("gpu.3.inforom = false") == expected_codes
    assert run_once("") == [], "a repair is detected at once"


# --- stories


def test_corrupted_inforom_drains_until_valid(host):
    corrupted = host("gpu.3.inforom = false")
    story = Story(gpu_software).run_check(host()).run_check(corrupted)
    assert story.drained
    assert not story.requeued
    story.run_checks(corrupted, 300).reboot().run_checks(corrupted, 3)
    assert story.drained, "neither time nor a reboot alone repairs it"
    assert story.run_check(host()).drained, "once is not enough"
    assert not story.run_check(host()).drained


@pytest.mark.parametrize(
    ("setting", "code"),
    [(OLD, "gpu_software/vbios"), ('driver_version = "570.148.08"', "gpu_software/driver")],
    ids=["vbios", "driver"],
)
def test_unexpected_version_warns_until_fixed_and_never_drains(host, setting, code):
    story = (
        Story(gpu_software, Config(driver_version=DRIVER))
        .run_checks(host(setting), 300)
        .reboot()
        .run_check(host(setting))
    )
    assert story.codes == [code]
    assert not story.drained
    assert story.run_check(host()).codes == [code]
    assert story.run_check(host()).codes == []
