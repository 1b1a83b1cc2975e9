"""gpu_software: driver, VBIOS and InfoROM."""

from __future__ import annotations

import pytest
from fake_gpus import fake_pci_gpus
from fakes import codes, findings, healthy_gpus, run_check, until_it_fails
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
def test_a_healthy_machine_gives_no_finding(host, profile):
    assert run_check(gpu_software, host(profile=profile)) == []


def test_what_the_settings_expect_is_no_finding(host):
    assert run_check(gpu_software, host(), Config(driver_version=DRIVER, vbios=VBIOS)) == []


def test_a_machine_without_gpus_gives_nothing(tmp_path):
    assert run_check(gpu_software, Host(str(tmp_path)), Config(driver_version=DRIVER, vbios=VBIOS)) == []


# --- driver


def test_another_driver_than_expected_warns(host):
    (finding,) = findings(gpu_software, host('driver_version = "570.148.08"'), Config(driver_version=DRIVER))
    assert (finding.code, finding.subject, finding.severity) == ("gpu_software/driver", "", Severity.WARNING)
    assert (finding.clears, finding.expects) == (Clears.PASS, "driver_version")
    assert finding.message == "driver 570.148.08 is loaded; expected 580.105.08"


def test_without_an_expectation_any_driver_is_fine(host):
    assert findings(gpu_software, host('driver_version = "570.148.08"')) == []


def test_a_driver_that_cannot_be_asked_for_is_not_the_expected_one(host):
    node = host('missing_functions = ["nvmlSystemGetDriverVersion"]')
    assert codes(findings(gpu_software, node, Config(driver_version=DRIVER))) == ["gpu_software/driver"]


# --- VBIOS


def test_a_vbios_that_the_other_gpus_do_not_have_warns(host):
    (finding,) = findings(gpu_software, host(OLD))
    assert (finding.code, finding.subject, finding.severity) == ("gpu_software/vbios", PCI, Severity.WARNING)
    assert (finding.clears, finding.expects) == (Clears.PASS, "")
    assert finding.message == f"VBIOS 96.00.74.00.01; {VBIOS} is the version of the other GPUs"


def test_of_as_many_the_newer_is_the_right_one(host):
    text = f'pci = ["0000:1b:00.0", "0000:43:00.0"]\n{OLD.replace("gpu.3", "gpu.0")}'
    assert [finding.subject for finding in findings(gpu_software, host(text))] == ["0000:1b:00.0"]


def test_gpus_of_another_model_have_their_own_vbios(host):
    assert findings(gpu_software, host('[gpu.3]\nname = "NVIDIA L40S"\nvbios = "95.02.66.00.02"')) == []


def test_an_expected_vbios_is_compared_with_instead(host):
    found = findings(gpu_software, host(), Config(vbios="96.00.A5.00.03"))
    assert [finding.subject for finding in found] == GPUS
    assert {finding.expects for finding in found} == {"vbios"}
    (finding,) = findings(gpu_software, host(OLD), Config(vbios=VBIOS))
    assert finding.message.endswith(f"{VBIOS} is the expected version")


def test_gpus_that_do_not_tell_their_vbios_are_no_finding(host):
    node = host('missing_functions = ["nvmlDeviceGetVbiosVersion"]')
    assert findings(gpu_software, node) == []
    assert len(findings(gpu_software, node, Config(vbios=VBIOS))) == 8


def test_mig_changes_nothing(host):
    assert findings(gpu_software, host("gpu.3.mig = true")) == []


# --- InfoROM


def test_a_corrupted_inforom_is_degraded(host):
    (finding,) = findings(gpu_software, host("gpu.3.inforom = false"))
    assert (finding.code, finding.subject) == ("gpu_software/inforom", PCI)
    assert (finding.severity, finding.clears) == (Severity.DEGRADED, Clears.PASS)


def test_a_gpu_without_inforom_gives_nothing(host):
    assert findings(gpu_software, host('gpu.3.unsupported = ["nvmlDeviceValidateInforom"]')) == []


@pytest.mark.parametrize("call", ["nvmlDeviceValidateInforom", "nvmlDeviceGetVbiosVersion"])
def test_a_gpu_that_fails_is_unknown_and_hides_no_other(host, call):
    text = f'driver_version = "570.148.08"\n{OLD}\ngpu.0.errors = {{ {call} = "Unknown" }}\ngpu.4.inforom = false'
    given, error = until_it_fails(gpu_software, host(text), Config(driver_version=DRIVER))
    assert GPUS[0] in error
    assert sorted(codes(given)) == ["gpu_software/driver", "gpu_software/inforom", "gpu_software/vbios"]


def test_an_inforom_that_was_whole_is_looked_at_once_an_hour_and_a_bad_one_each_time(tmp_path, monkeypatch):
    scenario, now = tmp_path / "gpus.toml", [1000.0]
    monkeypatch.setattr("healthd.host.host.time.monotonic", lambda: now[0])
    node = Host("/nonexistent", lambda: open_fake(str(scenario)))

    def look(text: str) -> list[str]:
        scenario.write_text(f'profile = "dgx-h100"\n{text}')
        found = codes(findings(gpu_software, node))
        node.close_nvml()  # as after each round
        return found

    bad = ["gpu_software/inforom"]
    assert look("") == []
    now[0] += INFOROM_SECONDS - 1
    assert look("gpu.3.inforom = false") == []
    now[0] += 1
    assert look("gpu.3.inforom = false") == bad
    assert look("gpu.3.inforom = false") == bad
    assert look("") == [], "a repair is detected at once"


# --- stories


def test_a_corrupted_inforom_drains_until_it_is_whole_again(host):
    bad = host("gpu.3.inforom = false")
    story = Story(gpu_software).look(host()).look(bad)
    assert story.drained
    assert not story.requeued
    story.looks(bad, 300).reboot().looks(bad, 3)
    assert story.drained, "neither time nor a reboot alone repairs it"
    assert story.look(host()).drained, "once is not enough"
    assert not story.look(host()).drained


@pytest.mark.parametrize(
    ("bad", "code"),
    [(OLD, "gpu_software/vbios"), ('driver_version = "570.148.08"', "gpu_software/driver")],
    ids=["vbios", "driver"],
)
def test_other_software_warns_until_it_is_right_and_never_drains(host, bad, code):
    story = Story(gpu_software, Config(driver_version=DRIVER)).looks(host(bad), 300).reboot().look(host(bad))
    assert story.codes == [code]
    assert not story.drained
    assert story.look(host()).codes == [code]
    assert story.look(host()).codes == []
