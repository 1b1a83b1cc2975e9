"""gpu_count: the GPUs of PCI compared with NVML and with the settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_gpus import fake_pci_gpus
from fakes import codes, findings, run_until_error, scenarios
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from story import Story
from trees import PCI, add_gpus, add_pci_device, write

from healthd.checks import gpu_count
from healthd.checks.gpu_count import Config
from healthd.common.model import Clears, Finding, Severity
from healthd.host.host import Host

H100 = fake_pci_gpus("dgx-h100")


DEVICE_FILE = r"/sys/bus/pci/devices/[^/]+/"
ABSENT_IS_FINE = {
    DEVICE_FILE + "(revision|current_link_width)": "older kernels and virtual machines do not have it",
    DEVICE_FILE + "driver": "a GPU without a driver counts as missing from NVML, like one with a driver",
    DEVICE_FILE + "(vendor|class)": "the device is being removed: pcie_devices reports it if it is expected",
    r"/sys/bus/pci/devices(/[^/]+)?": "a machine without PCI; a device on a root bus has no port above",
}


def healthy(tmp_path: Path) -> tuple[Host, Config]:
    add_gpus(tmp_path, H100)
    return scenarios(tmp_path)(root=str(tmp_path)), Config(expected=8)


@pytest.fixture
def host(tmp_path):
    """Create a host with these GPUs in sysfs. host("gpu.3.gone = true") removes one from NVML only."""
    make = scenarios(tmp_path)

    def on_pci(text="", addresses=H100, **files):
        add_gpus(tmp_path, [pci for pci in addresses if not (tmp_path / PCI[1:] / pci).exists()], **files)
        return make(text, root=str(tmp_path))

    return on_pci


def test_same_gpus_in_nvml_and_pci_give_no_finding(host):
    assert findings(gpu_count, host(), Config(expected=8)) == []


def test_gpu_in_pci_but_not_in_nvml_is_critical_until_reboot(host):
    (finding,) = findings(gpu_count, host("gpu.3.gone = true"))
    assert (finding.code, finding.subject) == ("gpu_count/missing", H100[3])
    assert (finding.severity, finding.clears) == (Severity.CRITICAL, Clears.REBOOT)


def test_gpu_without_address_in_nvml_is_named_from_pci(host):
    assert [f.subject for f in findings(gpu_count, host("gpu.3.unreachable = true"))] == [H100[3]]


def test_gpu_without_permission_fails_run_and_is_not_missing(host, tmp_path):
    node = host('gpu.3.errors = { nvmlDeviceGetHandleByIndex = "NoPermission" }')
    (tmp_path / PCI[1:] / H100[5] / "revision").write_text("0xff\n")
    found, error = run_until_error(gpu_count, node, Config(expected=8))
    assert codes([item for item in found if isinstance(item, Finding)]) == ["gpu_count/dead"]
    assert "index 3" in error


@pytest.mark.parametrize("state", ["lost", "requires_reset"])
def test_gpu_count_does_not_repeat_findings_of_gpu_access(host, state):
    assert findings(gpu_count, host(f"gpu.3.{state} = true")) == []


def test_gpu_that_reads_all_ones_is_critical_even_if_nvml_lists_it(host, tmp_path):
    node = host()
    (tmp_path / PCI[1:] / H100[2] / "current_link_width").write_text("63\n")
    (tmp_path / PCI[1:] / H100[5] / "revision").write_text("0xff\n")
    found = findings(gpu_count, node)
    assert codes(found) == ["gpu_count/dead"] * 2
    assert {f.subject for f in found} == {H100[2], H100[5]}
    assert {f.clears for f in found} == {Clears.REBOOT}


def test_dead_gpu_missing_in_nvml_gives_one_finding(host, tmp_path):
    node = host("gpu.2.gone = true")
    (tmp_path / PCI[1:] / H100[2] / "current_link_width").write_text("63\n")
    assert codes(findings(gpu_count, node)) == ["gpu_count/dead"]


def test_sleeping_gpu_is_not_dead(host):
    assert findings(gpu_count, host(power_state="D3cold", current_link_width="63")) == []


def test_fewer_gpus_than_expected_are_degraded_until_complete(host):
    (finding,) = findings(gpu_count, host(addresses=[]), Config(expected=9))
    assert (finding.code, finding.subject) == ("gpu_count/fewer_than_expected", "")
    assert (finding.severity, finding.clears) == (Severity.DEGRADED, Clears.PASS)
    assert "8 GPUs respond; expected 9" in finding.message


def test_lost_gpu_does_not_count_as_present(host):
    assert codes(findings(gpu_count, host("gpu.3.lost = true"), Config(expected=8))) == [
        "gpu_count/fewer_than_expected"
    ]


def test_more_gpus_than_expected_give_no_finding(host):
    assert findings(gpu_count, host(), Config(expected=4)) == []


def test_fake_nvml_without_nvidia_devices_gives_no_finding(host, tmp_path):
    add_pci_device(tmp_path, "0000:00:02.0", "0x030000", vendor="0x1234")
    assert findings(gpu_count, host("gpu.3.gone = true", addresses=[])) == []


@pytest.mark.parametrize("driver", ["vfio-pci", "nouveau"])
def test_gpu_of_another_driver_is_not_missing(host, tmp_path, driver):
    node = host(addresses=[*H100, "0000:f0:00.0"])
    link = tmp_path / PCI[1:] / "0000:f0:00.0" / "driver"
    link.unlink()
    link.symlink_to(f"../../../../bus/pci/drivers/{driver}")
    assert findings(gpu_count, node) == []
    link.unlink()
    assert codes(findings(gpu_count, node)) == ["gpu_count/missing"]


def test_virtual_function_of_gpu_is_not_missing(host, tmp_path):
    """With SR-IOV an A40 shows up to 32 more functions of its class, bound to the same driver."""
    node = host(addresses=[*H100, "0000:f0:00.4"])
    (tmp_path / PCI[1:] / "0000:f0:00.4" / "physfn").symlink_to("../0000:f0:00.0")
    assert findings(gpu_count, node) == []


def test_mig_does_not_change_gpu_count(host):
    assert findings(gpu_count, host("gpu.0.mig = true"), Config(expected=8)) == []


@settings(max_examples=60, suppress_health_check=also(HealthCheck.function_scoped_fixture))
@given(name=st.sampled_from(["vendor", "class", "revision", "current_link_width"]), text=st.binary(max_size=40))
def test_any_sysfs_text_of_another_gpu_keeps_finding_or_fails_run(host, tmp_path, name, text):
    if not (tmp_path / "sys").exists():
        add_gpus(tmp_path, H100)
    (tmp_path / PCI[1:] / H100[3] / name).write_bytes(text)
    node = scenarios(tmp_path)("gpu.4.gone = true", root=str(tmp_path))
    found, error = run_until_error(gpu_count, node)
    assert error or H100[4] in {finding.subject for finding in found if isinstance(finding, Finding)}


def test_unreadable_gpu_hides_no_other_finding(host, tmp_path):
    node = host("gpu.4.gone = true")
    (tmp_path / PCI[1:] / H100[0] / "revision").write_text("garbage\n")
    found, error = run_until_error(gpu_count, node)
    assert [item.subject for item in found if isinstance(item, Finding)] == [H100[4]]
    assert error == f"{PCI}/{H100[0]}/revision: not a revision like 0xa1: 'garbage'"


SLURMD = {"/proc/4242/comm": "slurmd\n"}


def confirm_seconds_by_code(found: list[Finding]) -> dict[str, float]:
    return {finding.code: finding.confirm_seconds for finding in found}


def test_missing_gpu_is_confirmed_for_a_minute_if_slurmd_may_reset_it(host, tmp_path):
    node = host("gpu.3.gone = true")
    config = Config(expected=8)
    assert confirm_seconds_by_code(findings(gpu_count, node, config)) == {
        "gpu_count/missing": 0.0,
        "gpu_count/fewer_than_expected": 0.0,
    }, "slurmd has not started"
    write(tmp_path, SLURMD)
    assert confirm_seconds_by_code(findings(gpu_count, node, config)) == {
        "gpu_count/missing": 60.0,
        "gpu_count/fewer_than_expected": 60.0,
    }


@pytest.mark.parametrize("state", ["lost", "unreachable", "requires_reset"])
def test_too_few_gpus_are_confirmed_as_long_as_lost_gpu(host, tmp_path, state):
    write(tmp_path, SLURMD)
    found = confirm_seconds_by_code(
        findings(gpu_count, host(f"gpu.3.{state} = true"), Config(expected=8, confirm_seconds=30.0))
    )
    assert found["gpu_count/fewer_than_expected"] == 30.0


def test_gpu_that_no_reset_restores_counts_at_once(host, tmp_path):
    write(tmp_path, SLURMD)
    node = host("gpu.3.gone = true")
    assert (
        confirm_seconds_by_code(findings(gpu_count, node, Config(expected=9)))["gpu_count/fewer_than_expected"] == 0.0
    )
    (tmp_path / PCI[1:] / H100[3] / "driver").unlink()
    assert confirm_seconds_by_code(findings(gpu_count, node, Config(expected=8))) == {
        "gpu_count/missing": 0.0,
        "gpu_count/fewer_than_expected": 0.0,
    }


def test_dead_gpu_is_confirmed_for_a_minute_if_slurmd_may_reset_it(host, tmp_path):
    node = host()
    write(tmp_path, {f"{PCI}/{H100[3]}/current_link_width": "63\n"})
    assert confirm_seconds_by_code(findings(gpu_count, node)) == {"gpu_count/dead": 0.0}, "slurmd has not started"
    write(tmp_path, SLURMD)
    assert confirm_seconds_by_code(findings(gpu_count, node)) == {"gpu_count/dead": 60.0}
    (finding,) = findings(gpu_count, node)
    assert "gpu_xid/79" in finding.confirmed_by


def test_reset_of_all_gpus_drains_only_after_a_minute(host, tmp_path):
    write(tmp_path, SLURMD)
    healthy_host, reset = host(), host("".join(f"[gpu.{n}]\ngone = true\n" for n in range(8)))
    story = (
        Story(gpu_count, Config(expected=8))
        .run_check(healthy_host)
        .run_check(reset)
        .run_check(reset, 0.9)
        .run_check(healthy_host, 0.1)
    )
    assert (story.codes, story.drained) == ([], False)
    story.run_check(reset).run_check(reset, 1.0)
    assert (story.drained, story.requeued, set(story.codes)) == (
        True,
        True,
        {"gpu_count/missing", "gpu_count/fewer_than_expected"},
    )


def test_gpu_missing_in_nvml_requeues_and_needs_reboot(host):
    healthy_host, missing = host(), host("gpu.3.gone = true")
    story = Story(gpu_count).run_check(healthy_host).run_check(missing)
    assert (story.codes, story.drained, story.requeued) == (["gpu_count/missing"], True, True)
    story.run_checks(healthy_host, 300)
    assert story.drained, "it is back, but there was no reboot"
    story.reboot().run_check(healthy_host)
    assert (story.codes, story.drained) == ([], False)


def test_gpu_still_missing_after_reboot_drains_again(host):
    healthy_host, missing = host(), host("gpu.3.gone = true")
    story = Story(gpu_count).run_check(healthy_host).run_check(missing).reboot()
    story.run_check(missing)
    assert (story.codes, story.drained) == (["gpu_count/missing"], True)
    story.repaired("gpu_count/missing").run_check(healthy_host)
    assert (story.codes, story.drained) == ([], False)


def test_dead_gpu_requeues_and_needs_reboot(host, tmp_path):
    node, width = host(), tmp_path / PCI[1:] / H100[2] / "current_link_width"
    story = Story(gpu_count).run_check(node)
    width.write_text("63\n")
    story.run_check(node)
    assert (story.codes, story.drained, story.requeued) == (["gpu_count/dead"], True, True)
    width.write_text("16\n")
    story.run_checks(node, 300)
    assert story.drained
    story.reboot().run_check(node)
    assert (story.codes, story.drained) == ([], False)


def test_too_few_gpus_drain_until_complete(host):
    healthy_host, fewer = (host(text, addresses=[]) for text in ("", "gpu.3.gone = true"))
    story = Story(gpu_count, Config(expected=8)).run_check(healthy_host).run_check(fewer)
    assert (story.codes, story.drained, story.requeued) == (["gpu_count/fewer_than_expected"], True, False)
    story.run_checks(fewer, 300).reboot().run_check(fewer)
    assert story.drained, "neither time nor a reboot restores it"
    story.run_checks(healthy_host, 3)
    assert (story.codes, story.drained) == ([], False)


def test_fewer_gpus_than_guessed_by_profile_only_warn(host):
    config = Config(expected=8, guessed=("expected",))
    story = Story(gpu_count, config).run_check(host("gpu.3.gone = true", addresses=[]))
    assert story.codes == ["gpu_count/fewer_than_expected"]
    assert not story.drained
