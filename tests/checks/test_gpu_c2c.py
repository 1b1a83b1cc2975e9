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


ALL_DOWN = f"c2c_inactive = {[*range(10)]}"
NO_STATES = f"c2c_unreported = {[*range(10)]}"


@pytest.mark.parametrize("mode", ["c2c_enabled = false", 'unsupported = ["nvmlDeviceGetC2cModeInfoV"]'])
def test_links_that_no_gpu_uses_are_not_checked(host, mode):
    text = f"{ALL_DOWN}\n{mode}"
    assert list(gpu_c2c.run(host(grace(text, text)), Config(), History({}, NOW, BOOT))) == [NO_LINK]


def test_fewer_active_links_than_other_gpus_are_degraded_after_a_minute(host):
    (finding,) = findings(gpu_c2c, host(grace("c2c_inactive = [2, 7]")))
    assert (finding.code, finding.subject, finding.severity) == ("gpu_c2c/inactive", PCI, Severity.DEGRADED)
    assert (finding.clears, finding.confirm_seconds) == (Clears.PASS, 60.0)
    assert finding.message == "2 of 10 C2C links to the CPU are down: 2, 7; another GPU has 10 active links"


def test_all_links_of_all_gpus_down_are_degraded_while_c2c_is_on(host):
    down = host(grace(ALL_DOWN, ALL_DOWN))
    found = findings(gpu_c2c, down)
    assert [(f.code, f.severity) for f in found] == [("gpu_c2c/inactive", Severity.DEGRADED)] * 8
    assert found[0].message == "10 of 10 C2C links to the CPU are down: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    story = Story(gpu_c2c).run_checks(down, 3)
    assert (story.drained, story.requeued) == (True, False)


def test_only_gpu_with_all_links_down_is_degraded(host):
    """GH200 has one GPU, and so no peer."""
    lone = host(f'pci = ["{PCI}"]\n[gpu.0]\nc2c_links = 10\n{ALL_DOWN}')
    assert [f.severity for f in findings(gpu_c2c, lone)] == [Severity.DEGRADED]


@pytest.mark.parametrize(
    ("gpu_3", "numbers"), [("c2c_unreported = [2, 7]", "2, 7"), (NO_STATES, "0, 1, 2, 3, 4, 5, 6, 7, 8, 9")]
)
def test_unreported_state_is_not_down_and_only_warns(host, gpu_3, numbers):
    blind = host(grace(gpu_3))
    (finding,) = findings(gpu_c2c, blind)
    assert (finding.code, finding.subject, finding.severity) == ("gpu_c2c/inactive", PCI, Severity.WARNING)
    assert finding.message.endswith(f"C2C links to the CPU: {numbers}; another GPU has 10 active links")
    assert not Story(gpu_c2c).run_checks(blind, 20).drained


def test_gpu_without_c2c_links_next_to_others_of_its_model_warns(host):
    (finding,) = findings(
        gpu_c2c, host(grace("c2c_links = 0").replace("c2c_links = 10\nc2c_links = 0", "c2c_links = 0"))
    )
    assert (finding.subject, finding.severity) == (PCI, Severity.WARNING)
    other_model = grace('name = "NVIDIA T1000"\nc2c_links = 0').replace("c2c_links = 10\nname", "name")
    assert findings(gpu_c2c, host(other_model)) == []


def test_states_that_no_gpu_reports_are_not_checked(host):
    assert list(gpu_c2c.run(host(grace(NO_STATES, NO_STATES)), Config(), History({}, NOW, BOOT))) == [NO_LINK]


def test_unreported_link_hides_no_link_that_is_down(host):
    (finding,) = findings(gpu_c2c, host(grace("c2c_unreported = [2]\nc2c_inactive = [7]")))
    assert finding.severity is Severity.DEGRADED
    assert "1 of 10 C2C links to the CPU is down: 7; the driver reports no state" in finding.message


LOWER, UPPER = "c2c_inactive = [0, 1, 2, 3, 4]", "c2c_inactive = [5, 6, 7, 8, 9]"


def test_gpus_that_use_other_links_only_warn(host):
    """If the driver counted more links than a GPU uses, each GPU could use others."""
    found = findings(gpu_c2c, host(grace(UPPER, LOWER)))
    assert [f.severity for f in found] == [Severity.WARNING] * 8
    assert not Story(gpu_c2c).run_checks(host(grace(UPPER, LOWER)), 20).drained
    (degraded,) = (
        f
        for f in findings(gpu_c2c, host(grace("c2c_inactive = [0, 5, 6, 7, 8, 9]", LOWER)))
        if f.severity > Severity.WARNING
    )
    assert (degraded.subject, degraded.severity) == (PCI, Severity.DEGRADED)


def test_unused_links_without_state_are_no_fault(host):
    text = "c2c_unreported = [5, 6, 7, 8, 9]"
    assert findings(gpu_c2c, host(grace(text, text))) == []


def test_unreadable_c2c_mode_fails_run(host):
    text = f'{ALL_DOWN}\nerrors = {{ nvmlDeviceGetC2cModeInfoV = "Unknown" }}'
    assert "nvmlDeviceGetC2cModeInfoV" in run_until_error(gpu_c2c, host(grace(text, text)))[1]


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
