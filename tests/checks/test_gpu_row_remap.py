"""gpu_row_remap: memory rows that were remapped, are pending, or could not be remapped."""

from __future__ import annotations

import pytest
from fake_gpus import fake_pci_gpus
from fakes import NOW, codes, findings, healthy_gpus, observed, rounds, run_check, until_it_fails
from story import Story

from healthd.checks import gpu_row_remap
from healthd.checks.gpu_row_remap import Config
from healthd.common.model import Clears, Finding, Repair, Severity
from healthd.nvidia.nvml import NvmlError

PCI = fake_pci_gpus("dgx-h100")[3]
healthy = healthy_gpus(Config(), "\n".join(f"gpu.{n}.unrepairable_memory = false" for n in range(8)))


@pytest.mark.parametrize("profile", ["dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200"])
def test_a_healthy_machine_gives_its_counters_and_no_finding(host, profile):
    given = run_check(gpu_row_remap, host(profile=profile))
    assert len(list(observed(given, "gpu_remapped_rows_total"))) == 16
    assert [item for item in given if isinstance(item, Finding)] == []


def test_a_failed_remap_is_critical_until_an_operator_knows(host):
    (finding,) = findings(gpu_row_remap, host("gpu.3.remap_failure = true"))
    assert (finding.code, finding.subject) == ("gpu_row_remap/failure", PCI)
    assert (finding.severity, finding.clears) == (Severity.CRITICAL, Clears.OPERATOR)
    assert finding.evidence == "failure flag 1"


def test_a_pending_remap_is_degraded_until_a_gpu_reset(host):
    (finding,) = findings(gpu_row_remap, host("[gpu.3]\nremap_pending = true\nremap_correctable = 1"))
    assert (finding.code, finding.severity) == ("gpu_row_remap/pending", Severity.DEGRADED)
    assert finding.clears is Clears.GPU_RESET


def test_a_pending_remap_that_was_made_is_evidence_of_a_reset(host):
    given = rounds(gpu_row_remap, [host("gpu.3.remap_pending = true"), host()])
    (repair,) = (item for item in given if isinstance(item, Repair))
    assert (repair.clears, repair.subject, repair.before) == (Clears.GPU_RESET, PCI, NOW)


def test_gpu_row_remap_reports_no_repair_while_a_remap_is_pending(host):
    given = rounds(gpu_row_remap, [host("gpu.3.remap_pending = true")] * 3)
    assert [item for item in given if isinstance(item, Repair)] == []


def test_a_gpu_that_goes_under_mig_gives_no_evidence_of_a_reset(host):
    given = rounds(gpu_row_remap, [host("gpu.3.remap_pending = true"), host("gpu.3.mig = true")])
    assert [item for item in given if isinstance(item, Repair)] == []


@pytest.mark.parametrize(("rows", "expected"), [(512, []), (513, ["gpu_row_remap/too_many"])])
def test_more_than_512_uncorrectable_rows_are_degraded(host, rows, expected):
    found = findings(gpu_row_remap, host(f"gpu.3.remap_uncorrectable = {rows}"))
    assert codes(found) == expected
    assert all(f.severity is Severity.DEGRADED and f.clears is Clears.OPERATOR and f.evidence for f in found)


def test_the_limit_is_a_setting(host):
    found = findings(gpu_row_remap, host("gpu.3.remap_uncorrectable = 9"), Config(max_uncorrectable=8))
    assert codes(found) == ["gpu_row_remap/too_many"]


def test_a_few_remapped_rows_are_no_finding(host):
    assert findings(gpu_row_remap, host("[gpu.3]\nremap_uncorrectable = 3\nremap_correctable = 2")) == []


def test_a_bank_without_spare_rows_warns(host):
    (finding,) = findings(gpu_row_remap, host("gpu.3.remap_histogram = [2558, 1, 0, 0, 1]"))
    assert (finding.code, finding.severity) == ("gpu_row_remap/no_spare_rows", Severity.WARNING)


@pytest.mark.parametrize("mig", ["", "\nmig = true"])
def test_memory_that_the_driver_calls_unrepairable_is_degraded_until_an_operator_knows_also_under_mig(host, mig):
    (finding,) = findings(gpu_row_remap, host(f"[gpu.3]\nunrepairable_memory = true{mig}"))
    assert (finding.code, finding.subject) == ("gpu_row_remap/unrepairable", PCI)
    assert (finding.severity, finding.clears) == (Severity.DEGRADED, Clears.OPERATOR)
    assert finding.evidence == "unrepairable memory flag 1"


def test_a_flag_that_is_not_set_or_that_the_driver_does_not_know_is_no_finding(host):
    assert findings(gpu_row_remap, host("gpu.3.unrepairable_memory = false")) == []
    older = 'missing_functions = ["nvmlDeviceGetUnrepairableMemoryFlag_v1"]\ngpu.3.unrepairable_memory = true'
    assert findings(gpu_row_remap, host(older)) == []
    refuses = '[gpu.3]\nerrors = { nvmlDeviceGetUnrepairableMemoryFlag_v1 = "ArgumentVersionMismatch" }'
    assert findings(gpu_row_remap, host(refuses)) == []


def test_a_flag_that_cannot_be_asked_hides_no_rows_and_rows_hide_no_flag(host):
    text = '[gpu.3]\nremap_failure = true\nunrepairable_memory = true\nerrors = {{ {} = "Unknown" }}'
    for call, left in (("UnrepairableMemoryFlag_v1", "failure"), ("RemappedRows", "unrepairable")):
        given, error = until_it_fails(gpu_row_remap, host(text.format(f"nvmlDeviceGet{call}")))
        assert call in error
        assert codes([item for item in given if isinstance(item, Finding)]) == [f"gpu_row_remap/{left}"]


@pytest.mark.parametrize("text", ["mig = true", 'unsupported = ["nvmlDeviceGetRemappedRows"]'])
def test_under_mig_and_before_ampere_nothing_is_judged(host, text):
    given = run_check(gpu_row_remap, host(f"[gpu.3]\n{text}\nremap_failure = true"))
    assert [item for item in given if isinstance(item, Finding)] == []
    assert not any(item.labels[0][1] == PCI for item in observed(given, "gpu_row_remap_pending"))


def test_a_driver_without_the_function_gives_nothing(host):
    assert run_check(gpu_row_remap, host('missing_functions = ["nvmlDeviceGetRemappedRows"]')) == []


def test_an_error_is_a_failure(host):
    with pytest.raises(NvmlError, match="nvmlDeviceGetRemappedRows"):
        run_check(gpu_row_remap, host('gpu.3.errors = { nvmlDeviceGetRemappedRows = "Unknown" }'))


def test_a_gpu_that_fails_hides_no_other(host):
    text = '[gpu.0]\nerrors = { nvmlDeviceGetRemappedRows = "Unknown" }\n[gpu.3]\nremap_failure = true'
    given, error = until_it_fails(gpu_row_remap, host(text))
    assert fake_pci_gpus("dgx-h100")[0] in error
    assert codes([item for item in given if isinstance(item, Finding)]) == ["gpu_row_remap/failure"]


# --- stories


def test_a_failed_remap_drains_and_requeues_until_an_operator_knows(host):
    bad = host("gpu.3.remap_failure = true")
    story = Story(gpu_row_remap).look(host()).look(bad)
    assert story.drained
    assert story.requeued
    story.looks(bad, 300).reboot().looks(bad, 3)
    assert story.drained, "the flag is permanent"
    story.repaired("gpu_row_remap/failure", PCI).looks(bad, 300)
    assert not story.drained, "the operator accepted this flag"


def test_unrepairable_memory_drains_until_an_operator_knows_and_not_again_for_the_same_flag(host):
    bad, good = host("gpu.3.unrepairable_memory = true"), host("gpu.3.unrepairable_memory = false")
    story = Story(gpu_row_remap).look(good).look(bad)
    assert story.drained
    assert not story.requeued, "the job may never use this memory"
    story.looks(bad, 300).reboot().looks(bad, 3)
    assert story.drained
    story.looks(good, 300)
    assert story.drained, "a replacement was not reported"
    story.repaired("gpu_row_remap/unrepairable", PCI).looks(bad, 300)
    assert not story.drained, "the operator accepted this flag"


def test_a_gpu_that_was_replaced_after_a_failed_remap_is_free_when_the_operator_says_so(host):
    story = Story(gpu_row_remap).look(host()).look(host("gpu.3.remap_failure = true")).reboot().looks(host(), 300)
    assert story.drained
    story.repaired("gpu_row_remap/failure", PCI).looks(host(), 2)
    assert not story.drained
    assert story.conditions == {}


def test_a_pending_remap_drains_until_the_gpu_is_reset(host):
    pending = host("[gpu.3]\nremap_pending = true\nremap_uncorrectable = 1")
    story = Story(gpu_row_remap).look(host()).look(pending)
    assert story.drained
    assert not story.requeued, "the job may survive"
    story.looks(pending, 300)
    assert story.drained, "there was no reset"
    story.look(host("gpu.3.remap_uncorrectable = 1"))
    assert not story.drained


def test_a_pending_remap_ends_with_a_reboot_but_not_where_it_is_still_pending(host):
    pending = host("gpu.3.remap_pending = true")
    assert Story(gpu_row_remap).look(host()).look(pending).reboot().look(pending).drained
    assert not Story(gpu_row_remap).look(host()).look(pending).reboot().look(host()).drained


def test_a_pending_remap_that_mig_hides_is_still_there(host):
    story = Story(gpu_row_remap).look(host()).look(host("gpu.3.remap_pending = true"))
    story.looks(host("gpu.3.mig = true"), 300)
    assert story.drained


def test_too_many_remapped_rows_drain_until_an_operator_knows_and_again_with_the_next_row(host):
    bad, worse = (host(f"gpu.3.remap_uncorrectable = {rows}") for rows in (600, 601))
    story = Story(gpu_row_remap).look(host()).look(bad)
    assert story.drained
    assert not story.requeued
    story.looks(bad, 300).reboot().looks(bad, 3)
    assert story.drained
    story.repaired("gpu_row_remap/too_many", PCI).looks(bad, 300)
    assert not story.drained
    story.look(worse)
    assert story.drained


def test_a_bank_without_spare_rows_warns_until_the_gpu_is_another_and_never_drains(host):
    bad = host("gpu.3.remap_histogram = [2558, 1, 0, 0, 1]")
    story = Story(gpu_row_remap).looks(bad, 300)
    assert story.codes == ["gpu_row_remap/no_spare_rows"]
    assert not story.drained
    assert story.looks(host(), 2).codes == []
