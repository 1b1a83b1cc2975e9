"""gpu_ecc: errors since the driver was loaded, in the GPU's life, and ECC that is off."""

from __future__ import annotations

import pytest
from fakes import NOW, codes, findings, healthy_gpus, observed, rounds, run_check, until_it_fails
from story import Story
from trees import write

from healthd.checks import gpu_ecc
from healthd.checks.gpu_ecc import Config
from healthd.model import Clears, Finding, Repair, Severity
from healthd.nvidia.fake_nvml import fake_pci_gpus
from healthd.nvml import NvmlError

PCI = fake_pci_gpus("dgx-h100")[3]
healthy = healthy_gpus(Config())


@pytest.mark.parametrize("profile", ["dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200"])
def test_a_healthy_machine_gives_its_counters_and_no_finding(host, profile):
    given = run_check(gpu_ecc, host(profile=profile))
    assert len(list(observed(given, "gpu_ecc_volatile_errors_total"))) == 8 * 4
    assert [item for item in given if isinstance(item, Finding)] == []


@pytest.mark.parametrize("where", ["sram", "dram"])
def test_an_uncorrected_error_is_critical_until_a_gpu_reset(host, where):
    (finding,) = findings(gpu_ecc, host(f"gpu.3.ecc_volatile_uncorrected_{where} = 2"))
    assert (finding.code, finding.subject) == ("gpu_ecc/uncorrected", PCI)
    assert (finding.severity, finding.clears) == (Severity.CRITICAL, Clears.GPU_RESET)
    assert finding.evidence == f"uncorrected: {where} 2"


def test_more_uncorrected_errors_are_other_evidence(host):
    one, two = (findings(gpu_ecc, host(f"gpu.3.ecc_volatile_uncorrected_dram = {n}"))[0] for n in (1, 2))
    assert one.evidence != two.evidence


def test_the_flag_for_too_many_sram_errors_is_degraded_until_an_operator_knows(host):
    (finding,) = findings(gpu_ecc, host("gpu.3.sram_threshold_exceeded = true"))
    assert (finding.code, finding.severity) == ("gpu_ecc/sram_threshold", Severity.DEGRADED)
    assert (finding.clears, finding.evidence) == (Clears.OPERATOR, "SRAM threshold flag 1")


def test_errors_of_the_past_are_only_recorded(host):
    (finding,) = findings(gpu_ecc, host("gpu.3.ecc_aggregate_uncorrected_dram = 7"))
    assert (finding.code, finding.severity) == ("gpu_ecc/aggregate", Severity.INFO)


@pytest.mark.parametrize(("where", "limit"), [("sram", 10_000), ("dram", 20_000_000)])
def test_corrected_errors_warn_above_the_limit_only(host, where, limit):
    at, above = (findings(gpu_ecc, host(f"gpu.3.ecc_volatile_corrected_{where} = {limit + n}")) for n in (0, 1))
    assert at == []
    assert [(f.code, f.severity) for f in above] == [("gpu_ecc/corrected", Severity.WARNING)]


def test_the_limits_are_settings(host):
    node = host("gpu.3.ecc_volatile_corrected_dram = 177")
    assert codes(findings(gpu_ecc, node, Config(max_corrected_dram=100))) == ["gpu_ecc/corrected"]


def test_ecc_that_is_off_warns_and_its_counters_are_not_missed(host):
    (finding,) = findings(gpu_ecc, host("gpu.3.ecc = false"))
    assert (finding.code, finding.severity, finding.clears) == ("gpu_ecc/disabled", Severity.WARNING, Clears.PASS)


def test_a_gpu_without_ecc_gives_nothing(host):
    calls = '["nvmlDeviceGetEccMode", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetMemoryErrorCounter"]'
    given = run_check(gpu_ecc, host(f"[gpu.3]\nunsupported = {calls}\nsram_threshold_exceeded = false"))
    assert {item.labels[0][1] for item in observed(given, "gpu_ecc_volatile_errors_total")} == {
        *fake_pci_gpus("dgx-h100")
    } - {PCI}
    assert [item for item in given if isinstance(item, Finding)] == []


def test_a_gpu_before_ampere_is_judged_by_its_sum(host):
    text = '[gpu.3]\nunsupported = ["nvmlDeviceGetMemoryErrorCounter"]\necc_volatile_uncorrected_dram = 1'
    (finding,) = findings(gpu_ecc, host(text))
    assert finding.evidence == "uncorrected: memory 1"


def test_ecc_that_is_on_but_counts_nowhere_is_unknown_and_hides_no_other_gpu(host):
    unsupported = '["nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetMemoryErrorCounter"]'
    text = f"[gpu.3]\nunsupported = {unsupported}\n[gpu.4]\necc_volatile_uncorrected_sram = 1"
    given, error = until_it_fails(gpu_ecc, host(text))
    assert PCI in error
    assert codes([item for item in given if isinstance(item, Finding)]) == ["gpu_ecc/uncorrected"]


def test_an_error_of_the_ecc_mode_is_a_failure(host):
    with pytest.raises(NvmlError, match="nvmlDeviceGetEccMode"):
        run_check(gpu_ecc, host('gpu.3.errors = { nvmlDeviceGetEccMode = "Unknown" }'))


def test_a_lost_gpu_is_left_to_gpu_access(host):
    assert findings(gpu_ecc, host("gpu.3.lost = true")) == []


def test_a_counter_that_fell_is_evidence_of_a_reset_before_the_reading_that_shows_it(host):
    given = rounds(gpu_ecc, [host("gpu.3.ecc_volatile_uncorrected_dram = 5"), host()])
    (repair,) = (item for item in given if isinstance(item, Repair))
    assert (repair.clears, repair.subject, repair.before) == (Clears.GPU_RESET, PCI, NOW)


def test_new_errors_after_a_reset_stay_a_finding(host):
    given = rounds(
        gpu_ecc, [host("gpu.3.ecc_volatile_uncorrected_dram = 5"), host("gpu.3.ecc_volatile_uncorrected_dram = 1")]
    )
    assert [item.code for item in given if isinstance(item, Finding)] == ["gpu_ecc/uncorrected"]
    assert [item for item in given if isinstance(item, Repair)]


def test_a_counter_that_cannot_be_read_any_more_is_no_evidence(host):
    unsupported = host('gpu.3.unsupported = ["nvmlDeviceGetMemoryErrorCounter"]')
    given = rounds(gpu_ecc, [host("gpu.3.ecc_volatile_uncorrected_dram = 5"), unsupported])
    assert [item for item in given if isinstance(item, Repair)] == []


def test_counters_that_stand_or_grow_are_no_evidence(host):
    node = host("gpu.3.ecc_volatile_corrected_dram = 5")
    assert [item for item in rounds(gpu_ecc, [host(), node, node]) if isinstance(item, Repair)] == []


def test_a_v100_tells_its_memory_alone_and_its_caches_count_too(host):
    """Neither Volta nor Pascal has the location SRAM."""
    text = "[gpu.3]\necc_sram = false\necc_volatile_uncorrected_sram = 2\necc_volatile_uncorrected_dram = 1"
    (finding,) = findings(gpu_ecc, host(text))
    assert finding.evidence == "uncorrected: dram 1, caches 2"


def test_with_mig_old_errors_are_no_fault_and_new_ones_are(host):
    """nvml.h: volatile errors cannot be queried by the handle of a GPU with MIG; nvidia-smi shows N/A."""
    old, new = (host(f"[gpu.3]\nmig = true\necc_aggregate_uncorrected_dram = {n}") for n in (4, 5))
    assert codes(findings(gpu_ecc, old)) == ["gpu_ecc/aggregate"]
    assert codes([item for item in rounds(gpu_ecc, [old, old]) if isinstance(item, Finding)]) == ["gpu_ecc/aggregate"]
    found = [item for item in rounds(gpu_ecc, [old, new]) if isinstance(item, Finding)]
    assert codes(found) == ["gpu_ecc/uncorrected", "gpu_ecc/aggregate"]
    assert found[0].message == "1 new uncorrected ECC errors (5 in the life of this GPU)"


def test_with_mig_counters_that_do_not_answer_are_unknown_too(host):
    _, error = until_it_fails(gpu_ecc, host('[gpu.3]\nmig = true\nunsupported = ["nvmlDeviceGetTotalEccErrors"]'))
    assert error == f"GPU {PCI}: ECC is on, but no error counter answers"


@pytest.mark.parametrize("way", ["reboot", "repaired"])
def test_story_with_mig_a_new_error_requeues_until_a_reboot_or_a_word(host, way):
    old, new = (host(f"[gpu.3]\nmig = true\necc_aggregate_uncorrected_sram = {n}") for n in (0, 1))
    story = Story(gpu_ecc).look(old).look(new)
    assert (story.codes, story.drained, story.requeued) == (["gpu_ecc/aggregate", "gpu_ecc/uncorrected"], True, True)
    story.looks(new, 300)
    assert story.drained
    story.reboot() if way == "reboot" else story.repaired("gpu_ecc/uncorrected", PCI)
    assert not story.looks(new, 2).drained


def test_counters_at_the_end_of_their_width_are_findings_too(host):
    assert codes(findings(gpu_ecc, host(f"gpu.3.ecc_volatile_uncorrected_dram = {2**32 - 1}"))) == [
        "gpu_ecc/uncorrected"
    ]


@pytest.mark.parametrize(
    ("on", "resets"), [([True, True], 1), ([True, False], 0), ([False, True], 0), ([False, False], 0)]
)
def test_a_count_that_fell_is_no_evidence_where_persistence_mode_is_off(host, tmp_path, on, resets):
    """A job may have held the driver at both readings, and let go in between."""
    write(tmp_path, {"/sys/module/nvidia/refcnt": "7\n"})
    counts = ["ecc_volatile_uncorrected_dram = 5", ""]
    nodes = [
        host(f"[gpu.3]\npersistence = {str(mode).lower()}\n{text}", root=str(tmp_path))
        for mode, text in zip(on, counts, strict=True)
    ]
    assert len([item for item in rounds(gpu_ecc, nodes) if isinstance(item, Repair)]) == resets


def test_with_persistence_mode_it_does_not_matter_who_holds_the_driver(host, tmp_path):
    """The mode that nvidia-smi -pm 1 sets holds nothing open."""
    write(tmp_path, {"/sys/module/nvidia/refcnt": "0\n"})
    nodes = [host(text, root=str(tmp_path)) for text in ("gpu.3.ecc_volatile_uncorrected_dram = 5", "")]
    assert len([item for item in rounds(gpu_ecc, nodes) if isinstance(item, Repair)]) == 1


@pytest.mark.parametrize(
    ("held", "resets"),
    [([True, True], 1), ([True, False], 0), ([False, True], 0), ([False, False], 0), ([None, None], 1)],
)
def test_where_the_mode_is_not_known_a_count_that_fell_is_evidence_if_somebody_held_the_driver(
    host, tmp_path, held, resets
):
    nodes = []
    for number, (who, text) in enumerate(zip(held, ["ecc_volatile_uncorrected_dram = 5", ""], strict=True)):
        root = tmp_path / f"node{number}"
        files = {} if who is None else {"/sys/module/nvidia/refcnt": "7\n" if who else "0\n"}
        write(root, files)
        text = f'[gpu.3]\nunsupported = ["nvmlDeviceGetPersistenceMode"]\n{text}'
        nodes.append(host(text, root=str(root)))
    given = rounds(gpu_ecc, nodes)
    assert len([item for item in given if isinstance(item, Repair)]) == resets


def test_a_gpu_that_fails_hides_no_other(host):
    text = '[gpu.0]\nerrors = { nvmlDeviceGetMemoryErrorCounter = "Unknown" }\n'
    node = host(f"{text}[gpu.3]\necc_volatile_uncorrected_dram = 1")
    given, error = until_it_fails(gpu_ecc, node)
    assert fake_pci_gpus("dgx-h100")[0] in error
    found = [item for item in given if isinstance(item, Finding)]
    assert [(item.code, item.subject) for item in found] == [("gpu_ecc/uncorrected", PCI)]


# stories


def test_an_uncorrected_error_drains_and_requeues_until_the_gpu_is_reset(host):
    bad = host("gpu.3.ecc_volatile_uncorrected_dram = 2")
    story = Story(gpu_ecc).look(host()).look(bad)
    assert story.drained
    assert story.requeued
    story.looks(bad, 300)  # the load is gone, and a day goes by
    assert story.drained, "nobody has reset it"
    story.looks(host(), 2)
    assert story.codes == []
    assert not story.drained


def test_a_reboot_is_a_reset_too(host):
    bad = host("gpu.3.ecc_volatile_uncorrected_sram = 1")
    story = Story(gpu_ecc).look(host()).look(bad).looks(bad, 3)
    assert story.drained
    story.reboot().look(host())
    assert not story.drained


def test_errors_that_come_back_after_the_reboot_drain_again(host):
    bad = host("gpu.3.ecc_volatile_uncorrected_sram = 1")
    story = Story(gpu_ecc).look(host()).look(bad).reboot().look(bad)
    assert story.drained
    assert story.codes == ["gpu_ecc/uncorrected"]


def test_without_persistence_mode_a_count_that_is_gone_holds_the_node_until_somebody_says_so(host):
    off = "gpu.3.persistence = false\n"
    story = Story(gpu_ecc).look(host(off)).look(host(off + "gpu.3.ecc_volatile_uncorrected_dram = 2"))
    story.looks(host(off), 300)
    assert story.drained
    story.repaired("gpu_ecc/uncorrected", PCI).look(host(off))
    story.looks(host(off), 2)
    assert not story.drained


def test_the_flag_for_too_many_sram_errors_drains_until_an_operator_knows_and_then_stays_known(host):
    bad = host("gpu.3.sram_threshold_exceeded = true")
    story = Story(gpu_ecc).look(host()).look(bad)
    assert story.drained
    assert not story.requeued
    story.looks(bad, 300).reboot().looks(bad, 3)
    assert story.drained, "neither time nor a reboot ends it"
    story.repaired("gpu_ecc/sram_threshold", PCI).looks(bad, 300)
    assert not story.drained
    story.reboot().looks(bad, 3)
    assert not story.drained, "the same flag, which the operator knows"
    story.looks(host(), 2)  # another GPU is there now
    assert story.conditions == {}


def test_a_gpu_that_was_replaced_without_a_word_stays_drained(host):
    story = Story(gpu_ecc).look(host()).look(host("gpu.3.sram_threshold_exceeded = true"))
    story.reboot().looks(host(), 5)
    assert story.drained
    story.repaired("gpu_ecc/sram_threshold", PCI).looks(host(), 3)
    assert not story.drained


def test_many_corrected_errors_warn_until_a_reset_and_never_drain(host):
    bad = host("gpu.3.ecc_volatile_corrected_sram = 10001")
    story = Story(gpu_ecc).look(host()).looks(bad, 300)
    assert story.codes == ["gpu_ecc/corrected"]
    assert not story.drained
    assert Story(gpu_ecc).looks(bad, 3).reboot().look(host()).codes == []
    assert story.looks(host(), 2).codes == []


def test_ecc_that_is_off_warns_until_it_is_on_and_never_drains(host):
    story = Story(gpu_ecc).looks(host("gpu.3.ecc = false"), 5)
    assert story.codes == ["gpu_ecc/disabled"]
    assert not story.drained
    assert story.look(host()).codes == ["gpu_ecc/disabled"]
    assert story.look(host()).codes == []


def test_errors_of_the_past_never_drain(host):
    story = Story(gpu_ecc).looks(host("gpu.3.ecc_aggregate_uncorrected_dram = 7"), 5)
    assert not story.drained
