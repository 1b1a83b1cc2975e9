"""gpu_c2c: chip-to-chip links that are down, and growing error counts."""

from __future__ import annotations

import pytest
from fake_gpus import fake_pci_gpus
from fakes import BOOT, NOW, findings, healthy_gpus, observations_named, run_check, run_rounds, run_until_error
from story import Story

from healthd.checks import gpu_c2c
from healthd.checks.gpu_c2c import Config
from healthd.common.history import History
from healthd.common.model import Clears, Finding, NothingToCheck, Severity

NO_LINK = NothingToCheck("no C2C link")
PCI = fake_pci_gpus("dgx-h100")[3]


# Eight GPUs with ten links, as many as `nvidia-smi c2c -s` lists on a GH200 (github.com/dmlc/xgboost,
# tests/cpp/common/test_cuda_dr_utils.cc).
def grace(gpu_3: str = "", others: str = "") -> str:
    """Return a scenario: `gpu_3` for GPU 3, and `others` for the other GPUs."""
    return "".join(f"[gpu.{n}]\nc2c_links = 10\n{gpu_3 if n == 3 else others}\n" for n in range(8))


healthy = healthy_gpus(Config(), grace())


def findings_after_growth(host, first, second, **kwargs):
    hosts = [host(grace(text)) for text in (first, second)]
    return [item for item in run_rounds(gpu_c2c, hosts, **kwargs) if isinstance(item, Finding)]


def test_healthy_links_give_observations_and_no_finding(host):
    results = run_rounds(gpu_c2c, [host(grace())] * 2)
    assert [item.value for item in observations_named(results, "gpu_c2c_links_active")] == [10] * 8
    assert [item.value for item in observations_named(results, "gpu_c2c_links_full_power")] == [10] * 8
    assert {dict(item.labels)["error"] for item in observations_named(results, "gpu_c2c_errors_total")} == {
        "crc",
        "replay",
        "replay_repeated",
    }
    assert [item for item in results if isinstance(item, Finding)] == []


def test_machine_without_c2c_has_nothing_to_check(host):
    results = list(gpu_c2c.run(host(), Config(), History({}, NOW, BOOT)))
    assert results == [NO_LINK]


def test_links_that_no_gpu_uses_are_not_checked(host):
    text = f"c2c_inactive = {[*range(10)]}"
    assert list(gpu_c2c.run(host(grace(text, text)), Config(), History({}, NOW, BOOT))) == [NO_LINK]


def test_link_active_on_other_gpus_is_degraded_after_a_minute(host):
    (finding,) = findings(gpu_c2c, host(grace("c2c_inactive = [2, 7]")))
    assert (finding.code, finding.subject, finding.severity) == ("gpu_c2c/inactive", PCI, Severity.DEGRADED)
    assert (finding.clears, finding.confirm_seconds) == (Clears.PASS, 60.0)
    assert finding.message == "2 of 10 C2C links to the CPU are down, active on other GPUs: 2, 7"


def test_gpu_without_active_link_is_degraded(host):
    (finding,) = findings(gpu_c2c, host(grace(f"c2c_inactive = {[*range(10)]}")))
    assert (finding.subject, finding.severity) == (PCI, Severity.DEGRADED)


def test_link_inactive_on_all_gpus_only_warns(host):
    found = findings(gpu_c2c, host(grace("c2c_inactive = [9]", "c2c_inactive = [9]")))
    assert [finding.severity for finding in found] == [Severity.WARNING] * 8
    assert found[0].message == "1 of 10 C2C links to the CPU is down: 9"


@pytest.mark.parametrize(("setting", "name"), [("c2c_errors", "CRC errors"), ("c2c_replays", "replays")])
def test_growing_counter_warns_until_clean(host, setting, name):
    (finding,) = findings_after_growth(host, f"{setting} = {{2 = 5}}", f"{setting} = {{2 = 9}}")
    assert (finding.code, finding.subject, finding.severity) == ("gpu_c2c/errors", PCI, Severity.WARNING)
    assert (finding.clears, finding.window_seconds) == (Clears.GPU_RESET, 86400.0)
    assert finding.message == f"C2C links to the CPU: 4 new {name} (since the driver was loaded: link 2: 9)"


def test_old_errors_and_reset_counters_give_no_finding(host):
    assert findings(gpu_c2c, host(grace("c2c_errors = {2 = 5}"))) == []
    assert findings_after_growth(host, "c2c_errors = {2 = 5}", "c2c_errors = {2 = 1}") == []


def test_driver_without_counters_still_shows_links(host):
    older = "unsupported_fields = [231, 232, 233, 234]"
    text = grace(f"{older}\nc2c_inactive = [2]", older)
    results = run_check(gpu_c2c, host(text))
    assert list(observations_named(results, "gpu_c2c_errors_total")) == []
    assert list(observations_named(results, "gpu_c2c_links_full_power")) == []
    assert [item.subject for item in results if isinstance(item, Finding)] == [PCI]


def test_failing_gpu_hides_no_other_finding(host):
    text = grace('errors = { nvmlDeviceGetFieldValues = "Unknown" }', "c2c_inactive = [2]")
    results, error = run_until_error(gpu_c2c, host(text))
    assert PCI in error
    assert len([item for item in results if isinstance(item, Finding)]) == 7


def test_inactive_link_drains_until_active_again(host):
    well, faulty = host(grace()), host(grace("c2c_inactive = [2]"))
    story = Story(gpu_c2c).run_check(well).run_checks(faulty, 3)
    assert story.drained
    assert not story.requeued
    story.run_checks(faulty, 300)
    assert story.drained
    story.run_checks(well, 2)
    assert not story.drained


def test_errors_never_drain(host):
    story = Story(gpu_c2c).run_check(host(grace())).run_check(host(grace("c2c_replays = {2 = 5}")))
    assert story.codes == ["gpu_c2c/errors"]
    assert not story.drained
