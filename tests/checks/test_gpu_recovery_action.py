"""gpu_recovery_action: the recovery that the driver requests."""

from __future__ import annotations

import pytest
from fake_gpus import fake_pci_gpus
from fakes import NOW, findings, healthy_gpus, observed, rounds, run_check, until_it_fails
from story import Story

from healthd.checks import gpu_recovery_action
from healthd.checks.gpu_recovery_action import Config
from healthd.common.model import Clears, Finding, Repair, Severity
from healthd.nvidia.nvml import NvmlError

PCI = fake_pci_gpus("dgx-h100")[3]
healthy = healthy_gpus(Config())


def test_no_action_is_no_finding(host):
    given = run_check(gpu_recovery_action, host())
    assert [item.value for item in observed(given, "gpu_recovery_action")] == [0] * 8
    assert [item for item in given if isinstance(item, Finding)] == []


@pytest.mark.parametrize(
    ("action", "what", "severity"),
    [
        (1, "gpu_reset", Severity.CRITICAL),
        (2, "node_reboot", Severity.CRITICAL),
        (3, "drain_p2p", Severity.WARNING),
        (4, "drain_and_reset", Severity.DEGRADED),
        (5, "recover_imex_domain", Severity.WARNING),
        (6, "bus_reset", Severity.CRITICAL),
        (7, "system_reboot", Severity.CRITICAL),
        (8, "unknown", Severity.WARNING),
        (2**32 - 1, "unknown", Severity.WARNING),
    ],
)
def test_each_action_is_a_finding_until_the_driver_no_longer_asks(host, action, what, severity):
    (finding,) = findings(gpu_recovery_action, host(f"gpu.3.recovery_action = {action}"))
    assert (finding.code, finding.subject) == (f"gpu_recovery_action/{what}", PCI)
    assert (finding.severity, finding.clears) == (severity, Clears.PASS)
    assert finding.code in gpu_recovery_action.EXPLAIN


@pytest.mark.parametrize(("action", "evidence"), [(1, True), (2, True), (4, True), (3, False), (5, False), (9, False)])
def test_only_a_reset_that_is_no_longer_asked_for_is_evidence_of_one(host, action, evidence):
    given = rounds(gpu_recovery_action, [host(f"gpu.3.recovery_action = {action}"), host()])
    made = [item for item in given if isinstance(item, Repair)]
    assert [(r.clears, r.subject, r.before) for r in made] == ([(Clears.GPU_RESET, PCI, NOW)] if evidence else [])


def test_another_action_is_no_evidence_of_a_reset(host):
    given = rounds(gpu_recovery_action, [host("gpu.3.recovery_action = 4"), host("gpu.3.recovery_action = 1")])
    assert [item for item in given if isinstance(item, Repair)] == []


def test_a_driver_that_is_too_old_gives_nothing(host):
    assert run_check(gpu_recovery_action, host('missing_functions = ["nvmlDeviceGetFieldValues"]')) == []
    given = run_check(gpu_recovery_action, host("[gpu.3]\nrecovery_action = 1\nunsupported_fields = [230]"))
    assert PCI not in {item.labels[0][1] for item in given}


def test_mig_changes_nothing(host):
    assert len(findings(gpu_recovery_action, host("[gpu.3]\nmig = true\nrecovery_action = 1"))) == 1


def test_an_error_is_a_failure(host):
    with pytest.raises(NvmlError):
        run_check(gpu_recovery_action, host('gpu.3.errors = { nvmlDeviceGetFieldValues = "Unknown" }'))


def test_a_gpu_that_fails_hides_no_other(host):
    text = '[gpu.0]\nerrors = { nvmlDeviceGetFieldValues = "Unknown" }\n[gpu.3]\nrecovery_action = 1'
    given, error = until_it_fails(gpu_recovery_action, host(text))
    assert fake_pci_gpus("dgx-h100")[0] in error
    assert [item.code for item in given if isinstance(item, Finding)] == ["gpu_recovery_action/gpu_reset"]


# --- stories


@pytest.mark.parametrize("action", [1, 2, 4, 6, 7])
def test_what_needs_a_reset_drains_until_the_driver_no_longer_asks_and_all_but_a_recommended_one_requeue(host, action):
    bad = host(f"gpu.3.recovery_action = {action}")
    story = Story(gpu_recovery_action).look(host()).look(bad)
    assert (story.drained, story.requeued) == (True, action != 4)
    story.looks(bad, 300).reboot().looks(bad, 3)
    assert story.drained, "neither time nor a reboot: the driver still requests it"
    story.look(host())
    assert story.drained, "once is not enough"
    story.look(host())
    assert not story.drained
    assert story.codes == []


def test_a_reset_that_was_recommended_and_becomes_necessary_requeues_then(host):
    recommended, necessary = (host(f"gpu.3.recovery_action = {action}") for action in (4, 1))
    story = Story(gpu_recovery_action).look(host()).looks(recommended, 20)
    assert (story.drained, story.requeued) == (True, False)
    story.look(necessary)
    assert (story.drained, story.requeued) == (True, True)


@pytest.mark.parametrize("action", [3, 5, 8, 2**32 - 1])
def test_every_other_action_warns_while_it_is_asked_for_and_never_drains(host, action):
    bad = host(f"gpu.3.recovery_action = {action}")
    story = Story(gpu_recovery_action).looks(bad, 300)
    assert len(story.codes) == 1
    assert not story.drained
    assert story.looks(host(), 2).codes == []


def test_an_action_that_gets_milder_is_another_finding(host):
    story = Story(gpu_recovery_action).look(host("gpu.3.recovery_action = 2"))
    story.looks(host("gpu.3.recovery_action = 3"), 2)
    assert story.codes == ["gpu_recovery_action/drain_p2p"]
    assert not story.drained
