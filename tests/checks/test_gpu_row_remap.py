"""gpu_row_remap: memory rows that were remapped, are pending, or could not be remapped."""

from __future__ import annotations

import pytest
from fake_gpus import fake_pci_gpus
from fakes import NOW, codes, findings, healthy_gpus, observations_named, run_check, run_rounds, run_until_error
from story import Story

from healthd.checks import gpu_row_remap
from healthd.checks.gpu_row_remap import Config
from healthd.common.model import Clears, Finding, Repair, Severity
from healthd.nvidia.nvml import NvmlError

PCI = fake_pci_gpus("dgx-h100")[3]
NO_REPAIR = "repair_pending_channel = false\nrepair_pending_tpc = false"
healthy = healthy_gpus(Config(), "\n".join(f"[gpu.{n}]\nunrepairable_memory = false\n{NO_REPAIR}" for n in range(8)))


@pytest.mark.parametrize("profile", ["dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200"])
def test_healthy_machine_gives_counters_and_no_finding(host, profile):
    results = run_check(gpu_row_remap, host(profile=profile))
    assert len(list(observations_named(results, "gpu_remapped_rows_total"))) == 16
    assert [item for item in results if isinstance(item, Finding)] == []


def test_failed_remap_is_critical_until_operator_acts(host):
    (finding,) = findings(gpu_row_remap, host("gpu.3.remap_failure = true"))
    assert (finding.code, finding.subject) == ("gpu_row_remap/failure", PCI)
    assert (finding.severity, finding.clears) == (Severity.CRITICAL, Clears.OPERATOR)
    assert finding.evidence == "failure flag 1"


def test_pending_remap_is_degraded_until_gpu_reset(host):
    (finding,) = findings(gpu_row_remap, host("[gpu.3]\nremap_pending = true\nremap_correctable = 1"))
    assert (finding.code, finding.severity) == ("gpu_row_remap/pending", Severity.DEGRADED)
    assert finding.clears is Clears.GPU_RESET


def test_pending_remap_of_real_rtx_pro_6000_is_degraded(host):
    """The card is that of the fake machine: nvidia-smi -q -d ROW_REMAPPER after Xids 48, 171, 63 and 154."""
    text = "remap_uncorrectable = 1\nremap_pending = true\nremap_histogram = [511, 1, 0, 0, 0]"
    (finding,) = findings(gpu_row_remap, host(f"[gpu.1]\n{text}\nrecovery_action = 4", profile="rtx-pro-6000"))
    assert (finding.code, finding.subject) == ("gpu_row_remap/pending", fake_pci_gpus("rtx-pro-6000")[1])


def test_completed_pending_remap_is_evidence_of_a_reset(host):
    results = run_rounds(gpu_row_remap, [host("gpu.3.remap_pending = true"), host()])
    (repair,) = (item for item in results if isinstance(item, Repair))
    assert (repair.clears, repair.subject, repair.before) == (Clears.GPU_RESET, PCI, NOW)


def test_pending_remap_gives_no_repair(host):
    results = run_rounds(gpu_row_remap, [host("gpu.3.remap_pending = true")] * 3)
    assert [item for item in results if isinstance(item, Repair)] == []


def test_enabling_mig_is_no_evidence_of_a_reset(host):
    results = run_rounds(gpu_row_remap, [host("gpu.3.remap_pending = true"), host("gpu.3.mig = true")])
    assert [item for item in results if isinstance(item, Repair)] == []


@pytest.mark.parametrize("mig", ["", "\nmig = true"])
@pytest.mark.parametrize(
    ("setting", "part"), [("repair_pending_channel", "a memory channel"), ("repair_pending_tpc", "a TPC")]
)
def test_pending_repair_is_degraded_until_gpu_reset_also_with_mig(host, setting, part, mig):
    (finding,) = findings(gpu_row_remap, host(f"[gpu.3]\n{setting} = true{mig}"))
    assert (finding.code, finding.subject) == ("gpu_row_remap/repair_pending", PCI)
    assert (finding.severity, finding.clears) == (Severity.DEGRADED, Clears.GPU_RESET)
    assert finding.message == f"the repair of {part} waits for a reset"


def test_two_pending_repairs_of_a_gpu_are_one_finding(host):
    (finding,) = findings(gpu_row_remap, host("[gpu.3]\nrepair_pending_channel = true\nrepair_pending_tpc = true"))
    assert finding.message == "the repair of a memory channel and of a TPC waits for a reset"


def test_gpu_without_pending_or_reported_repair_gives_no_finding(host):
    assert findings(gpu_row_remap, host(f"[gpu.3]\n{NO_REPAIR}")) == []
    older = 'missing_functions = ["nvmlDeviceGetRepairStatus"]\n[gpu.3]\nrepair_pending_tpc = true'
    assert findings(gpu_row_remap, host(older)) == []


def test_completed_repair_is_evidence_of_a_reset(host):
    results = run_rounds(gpu_row_remap, [host("gpu.3.repair_pending_tpc = true"), host(f"[gpu.3]\n{NO_REPAIR}")])
    (repair,) = (item for item in results if isinstance(item, Repair))
    assert (repair.clears, repair.subject, repair.before) == (Clears.GPU_RESET, PCI, NOW)


@pytest.mark.parametrize(("rows", "expected"), [(512, []), (513, ["gpu_row_remap/too_many"])])
def test_more_than_512_uncorrectable_rows_are_degraded(host, rows, expected):
    found = findings(gpu_row_remap, host(f"gpu.3.remap_uncorrectable = {rows}"))
    assert codes(found) == expected
    assert all(f.severity is Severity.DEGRADED and f.clears is Clears.OPERATOR and f.evidence for f in found)


def test_max_uncorrectable_is_a_setting(host):
    found = findings(gpu_row_remap, host("gpu.3.remap_uncorrectable = 9"), Config(max_uncorrectable=8))
    assert codes(found) == ["gpu_row_remap/too_many"]


def test_few_remapped_rows_give_no_finding(host):
    assert findings(gpu_row_remap, host("[gpu.3]\nremap_uncorrectable = 3\nremap_correctable = 2")) == []


def test_bank_without_spare_rows_warns(host):
    (finding,) = findings(gpu_row_remap, host("gpu.3.remap_histogram = [2558, 1, 0, 0, 1]"))
    assert (finding.code, finding.severity) == ("gpu_row_remap/no_spare_rows", Severity.WARNING)


@pytest.mark.parametrize("mig", ["", "\nmig = true"])
def test_unrepairable_memory_is_degraded_until_operator_acts_also_with_mig(host, mig):
    (finding,) = findings(gpu_row_remap, host(f"[gpu.3]\nunrepairable_memory = true{mig}"))
    assert (finding.code, finding.subject) == ("gpu_row_remap/unrepairable", PCI)
    assert (finding.severity, finding.clears) == (Severity.DEGRADED, Clears.OPERATOR)
    assert finding.evidence == "unrepairable memory flag 1"


def test_unset_or_unsupported_unrepairable_flag_gives_no_finding(host):
    assert findings(gpu_row_remap, host("gpu.3.unrepairable_memory = false")) == []
    older = 'missing_functions = ["nvmlDeviceGetUnrepairableMemoryFlag_v1"]\ngpu.3.unrepairable_memory = true'
    assert findings(gpu_row_remap, host(older)) == []
    refuses = '[gpu.3]\nerrors = { nvmlDeviceGetUnrepairableMemoryFlag_v1 = "ArgumentVersionMismatch" }'
    assert findings(gpu_row_remap, host(refuses)) == []


def test_error_of_flag_or_rows_does_not_hide_the_other(host):
    text = '[gpu.3]\nremap_failure = true\nunrepairable_memory = true\nerrors = {{ {} = "Unknown" }}'
    for call, remaining in (("UnrepairableMemoryFlag_v1", "failure"), ("RemappedRows", "unrepairable")):
        results, error = run_until_error(gpu_row_remap, host(text.format(f"nvmlDeviceGet{call}")))
        assert call in error
        assert codes([item for item in results if isinstance(item, Finding)]) == [f"gpu_row_remap/{remaining}"]


@pytest.mark.parametrize("text", ["mig = true", 'unsupported = ["nvmlDeviceGetRemappedRows"]'])
def test_remapped_rows_are_ignored_with_mig_and_before_ampere(host, text):
    results = run_check(gpu_row_remap, host(f"[gpu.3]\n{text}\nremap_failure = true"))
    assert [item for item in results if isinstance(item, Finding)] == []
    assert not any(item.labels[0][1] == PCI for item in observations_named(results, "gpu_row_remap_pending"))


def test_driver_without_remapped_rows_gives_nothing(host):
    text = 'missing_functions = ["nvmlDeviceGetRemappedRows", "nvmlDeviceGetRepairStatus"]'
    assert run_check(gpu_row_remap, host(text)) == []


def test_nvml_error_fails_run(host):
    with pytest.raises(NvmlError, match="nvmlDeviceGetRemappedRows"):
        run_check(gpu_row_remap, host('gpu.3.errors = { nvmlDeviceGetRemappedRows = "Unknown" }'))


def test_failing_gpu_hides_no_other_finding(host):
    text = '[gpu.0]\nerrors = { nvmlDeviceGetRemappedRows = "Unknown" }\n[gpu.3]\nremap_failure = true'
    results, error = run_until_error(gpu_row_remap, host(text))
    assert fake_pci_gpus("dgx-h100")[0] in error
    assert codes([item for item in results if isinstance(item, Finding)]) == ["gpu_row_remap/failure"]


# --- stories


def test_failed_remap_drains_and_requeues_until_repaired(host):
    faulty = host("gpu.3.remap_failure = true")
    story = Story(gpu_row_remap).run_check(host()).run_check(faulty)
    assert story.drained
    assert story.requeued
    story.run_checks(faulty, 300).reboot().run_checks(faulty, 3)
    assert story.drained, "the flag is permanent"
    story.repaired("gpu_row_remap/failure", PCI).run_checks(faulty, 300)
    assert not story.drained, "the operator accepted this flag"


def test_unrepairable_memory_drains_until_repaired_and_stays_accepted(host):
    faulty, healthy_host = host("gpu.3.unrepairable_memory = true"), host("gpu.3.unrepairable_memory = false")
    story = Story(gpu_row_remap).run_check(healthy_host).run_check(faulty)
    assert story.drained
    assert not story.requeued, "the job may never use this memory"
    story.run_checks(faulty, 300).reboot().run_checks(faulty, 3)
    assert story.drained
    story.run_checks(healthy_host, 300)
    assert story.drained, "a replacement was not reported"
    story.repaired("gpu_row_remap/unrepairable", PCI).run_checks(faulty, 300)
    assert not story.drained, "the operator accepted this flag"


def test_replaced_gpu_after_failed_remap_is_free_after_repaired(host):
    story = (
        Story(gpu_row_remap)
        .run_check(host())
        .run_check(host("gpu.3.remap_failure = true"))
        .reboot()
        .run_checks(host(), 300)
    )
    assert story.drained
    story.repaired("gpu_row_remap/failure", PCI).run_checks(host(), 2)
    assert not story.drained
    assert story.conditions == {}


def test_pending_remap_drains_until_gpu_reset(host):
    pending = host("[gpu.3]\nremap_pending = true\nremap_uncorrectable = 1")
    story = Story(gpu_row_remap).run_check(host()).run_check(pending)
    assert story.drained
    assert not story.requeued, "the job may survive"
    story.run_checks(pending, 300)
    assert story.drained, "there was no reset"
    story.run_check(host("gpu.3.remap_uncorrectable = 1"))
    assert not story.drained


def test_pending_repair_drains_until_gpu_reset(host):
    pending, repaired = host("gpu.3.repair_pending_channel = true"), host(f"[gpu.3]\n{NO_REPAIR}")
    story = Story(gpu_row_remap).run_check(repaired).run_check(pending)
    assert story.drained
    assert not story.requeued, "the job may survive"
    story.run_checks(pending, 300)
    assert story.drained, "there was no reset"
    story.run_check(repaired)
    assert not story.drained


def test_pending_remap_clears_by_reboot_unless_still_pending(host):
    pending = host("gpu.3.remap_pending = true")
    assert Story(gpu_row_remap).run_check(host()).run_check(pending).reboot().run_check(pending).drained
    assert not Story(gpu_row_remap).run_check(host()).run_check(pending).reboot().run_check(host()).drained


def test_pending_remap_hidden_by_mig_stays_open(host):
    story = Story(gpu_row_remap).run_check(host()).run_check(host("gpu.3.remap_pending = true"))
    story.run_checks(host("gpu.3.mig = true"), 300)
    assert story.drained


def test_too_many_rows_drain_until_repaired_and_again_with_next_row(host):
    with_600_rows, worse = (host(f"gpu.3.remap_uncorrectable = {rows}") for rows in (600, 601))
    story = Story(gpu_row_remap).run_check(host()).run_check(with_600_rows)
    assert story.drained
    assert not story.requeued
    story.run_checks(with_600_rows, 300).reboot().run_checks(with_600_rows, 3)
    assert story.drained
    story.repaired("gpu_row_remap/too_many", PCI).run_checks(with_600_rows, 300)
    assert not story.drained
    story.run_check(worse)
    assert story.drained


def test_bank_without_spare_rows_warns_until_gpu_is_replaced(host):
    faulty = host("gpu.3.remap_histogram = [2558, 1, 0, 0, 1]")
    story = Story(gpu_row_remap).run_checks(faulty, 300)
    assert story.codes == ["gpu_row_remap/no_spare_rows"]
    assert not story.drained
    assert story.run_checks(host(), 2).codes == []
