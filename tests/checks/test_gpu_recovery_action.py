"""gpu_recovery_action: the recovery that the driver requests."""

from __future__ import annotations

import pytest
from fake_gpus import fake_pci_gpus
from fakes import NOW, findings, healthy_gpus, observations_named, run_check, run_rounds, run_until_error
from story import Story

from healthd.checks import gpu_recovery_action
from healthd.checks.gpu_recovery_action import Config
from healthd.common.model import Clears, Finding, Repair, Severity
from healthd.nvidia.nvml import NvmlError

PCI = fake_pci_gpus("dgx-h100")[3]
healthy = healthy_gpus(Config())


def test_no_requested_action_gives_no_finding(host):
    results = run_check(gpu_recovery_action, host())
    assert [item.value for item in observations_named(results, "gpu_recovery_action")] == [0] * 8
    assert [item for item in results if isinstance(item, Finding)] == []


@pytest.mark.parametrize(
    ("action", "name", "severity"),
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
def test_each_action_is_a_finding_until_no_longer_requested(host, action, name, severity):
    (finding,) = findings(gpu_recovery_action, host(f"gpu.3.recovery_action = {action}"))
    assert (finding.code, finding.subject) == (f"gpu_recovery_action/{name}", PCI)
    assert (finding.severity, finding.clears) == (severity, Clears.PASS)
    assert finding.code in gpu_recovery_action.EXPLAIN


@pytest.mark.parametrize(("action", "evidence"), [(1, True), (2, True), (4, True), (3, False), (5, False), (9, False)])
def test_only_a_withdrawn_reset_request_is_evidence_of_a_reset(host, action, evidence):
    results = run_rounds(gpu_recovery_action, [host(f"gpu.3.recovery_action = {action}"), host()])
    made = [item for item in results if isinstance(item, Repair)]
    assert [(r.clears, r.subject, r.before) for r in made] == ([(Clears.GPU_RESET, PCI, NOW)] if evidence else [])


def test_changed_action_is_no_evidence_of_a_reset(host):
    results = run_rounds(gpu_recovery_action, [host("gpu.3.recovery_action = 4"), host("gpu.3.recovery_action = 1")])
    assert [item for item in results if isinstance(item, Repair)] == []


def test_old_driver_gives_nothing(host):
    assert run_check(gpu_recovery_action, host('missing_functions = ["nvmlDeviceGetFieldValues"]')) == []
    results = run_check(gpu_recovery_action, host("[gpu.3]\nrecovery_action = 1\nunsupported_fields = [230]"))
    assert PCI not in {item.labels[0][1] for item in results}


def test_recovery_action_is_evaluated_with_mig(host):
    assert len(findings(gpu_recovery_action, host("[gpu.3]\nmig = true\nrecovery_action = 1"))) == 1


def test_nvml_error_fails_run(host):
    with pytest.raises(NvmlError):
        run_check(gpu_recovery_action, host('gpu.3.errors = { nvmlDeviceGetFieldValues = "Unknown" }'))


def test_failing_gpu_hides_no_other_finding(host):
    text = '[gpu.0]\nerrors = { nvmlDeviceGetFieldValues = "Unknown" }\n[gpu.3]\nrecovery_action = 1'
    results, error = run_until_error(gpu_recovery_action, host(text))
    assert fake_pci_gpus("dgx-h100")[0] in error
    assert [item.code for item in results if isinstance(item, Finding)] == ["gpu_recovery_action/gpu_reset"]


# --- stories


@pytest.mark.parametrize("action", [1, 2, 4, 6, 7])
def test_reset_request_drains_until_withdrawn_and_requeues_if_required(host, action):
    requesting = host(f"gpu.3.recovery_action = {action}")
    story = Story(gpu_recovery_action).run_check(host()).run_check(requesting)
    assert (story.drained, story.requeued) == (True, action != 4)
    story.run_checks(requesting, 300).reboot().run_checks(requesting, 3)
    assert story.drained, "neither time nor a reboot: the driver still requests it"
    story.run_check(host())
    assert story.drained, "once is not enough"
    story.run_check(host())
    assert not story.drained
    assert story.codes == []


def test_recommended_reset_requeues_when_it_becomes_required(host):
    recommended, necessary = (host(f"gpu.3.recovery_action = {action}") for action in (4, 1))
    story = Story(gpu_recovery_action).run_check(host()).run_checks(recommended, 20)
    assert (story.drained, story.requeued) == (True, False)
    story.run_check(necessary)
    assert (story.drained, story.requeued) == (True, True)


@pytest.mark.parametrize("action", [3, 5, 8, 2**32 - 1])
def test_other_actions_warn_while_requested_and_never_drain(host, action):
    requesting = host(f"gpu.3.recovery_action = {action}")
    story = Story(gpu_recovery_action).run_checks(requesting, 300)
    assert len(story.codes) == 1
    assert not story.drained
    assert story.run_checks(host(), 2).codes == []


def test_milder_action_replaces_finding(host):
    story = Story(gpu_recovery_action).run_check(host("gpu.3.recovery_action = 2"))
    story.run_checks(host("gpu.3.recovery_action = 3"), 2)
    assert story.codes == ["gpu_recovery_action/drain_p2p"]
    assert not story.drained
