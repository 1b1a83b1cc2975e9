"""gpu_ecc: errors since the driver was loaded, lifetime errors, and disabled ECC."""

from __future__ import annotations

import pytest
from fake_gpus import fake_pci_gpus
from fakes import NOW, codes, findings, healthy_gpus, observations_named, run_check, run_rounds, run_until_error
from story import Story
from trees import write

from healthd.agent.slurm.affected_jobs import JobGpus, fault_reach, is_hit
from healthd.checks import gpu_ecc
from healthd.checks.gpu_ecc import Config
from healthd.common.history import History
from healthd.common.model import Clears, Finding, Gpu, NothingToCheck, Repair, Severity
from healthd.nvidia.nvml import NvmlError

PCI = fake_pci_gpus("dgx-h100")[3]
healthy = healthy_gpus(Config())


@pytest.mark.parametrize("profile", ["dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200"])
def test_healthy_machine_gives_counters_and_no_finding(host, profile):
    results = run_check(gpu_ecc, host(profile=profile))
    assert len(list(observations_named(results, "gpu_ecc_volatile_errors_total"))) == 8 * 4
    assert [item for item in results if isinstance(item, Finding)] == []


# Compute capabilities: developer.nvidia.com/cuda-gpus
CONTAIN = {"A100, A30": (8, 0), "H100, H200": (9, 0), "B200": (10, 0)}
REMAP = {"A10, A40": (8, 6), "L4, L40": (8, 9)}
RETIRE = {"V100": (7, 0), "T4": (7, 5)}
OTHERS = {"B300, GB300": (10, 3), "RTX PRO 6000 Blackwell": (12, 0), "future GPU": (99, 0)}
DO_NOT_CONTAIN = {**REMAP, **RETIRE, **OTHERS}


CONTAINED_TEXT = "which this GPU should have contained (see Xid 94 or 95)"


def gpu_text(capability: tuple[int, int], text: str = "") -> str:
    return f"[gpu.3]\ncompute_capability = {list(capability)}\n{text}\n"


def findings_of_second_round(host, capability, before: str, after: str, **kw) -> list[Finding]:
    """Return the findings of the second of two rounds."""
    results = run_rounds(gpu_ecc, [host(gpu_text(capability, text), **kw) for text in (before, after)])
    return [item for item in results if isinstance(item, Finding) and item.code != "gpu_ecc/aggregate"]


@pytest.mark.parametrize("where", ["sram", "dram"])
@pytest.mark.parametrize("capability", [*CONTAIN.values(), *DO_NOT_CONTAIN.values()])
def test_uncorrected_error_at_first_reading_is_degraded_on_every_model(host, where, capability):
    """Which jobs the error affected is unknown."""
    (finding,) = findings(gpu_ecc, host(gpu_text(capability, f"ecc_volatile_uncorrected_{where} = 2")))
    assert (finding.code, finding.subject) == ("gpu_ecc/uncorrected", PCI)
    assert (finding.severity, finding.clears) == (Severity.DEGRADED, Clears.GPU_RESET)
    assert finding.evidence == f"uncorrected: {where} 2"
    assert finding.message == f"uncorrected ECC errors since the driver was loaded: {where} 2"


@pytest.mark.parametrize("where", ["sram", "dram"])
@pytest.mark.parametrize("capability", DO_NOT_CONTAIN.values(), ids=DO_NOT_CONTAIN)
def test_new_errors_are_critical_on_models_without_containment(host, capability, where):
    counts = [f"ecc_volatile_uncorrected_{where} = {count}" for count in (2, 5)]
    (finding,) = findings_of_second_round(host, capability, *counts)
    assert (finding.code, finding.subject, finding.severity) == ("gpu_ecc/uncorrected", PCI, Severity.CRITICAL)
    assert finding.message == f"3 new uncorrected ECC errors; since the driver was loaded: {where} 5"
    (finding,) = findings_of_second_round(host, capability, *counts[:1] * 2)
    assert finding.severity is Severity.DEGRADED, "the count did not grow"


@pytest.mark.parametrize("capability", CONTAIN.values(), ids=CONTAIN)
def test_contained_new_errors_are_degraded_unless_driver_requests_reset(host, capability):
    grown = "ecc_volatile_uncorrected_dram = 1"
    for action in (0, 3, 4, 5):  # no action, or one that can wait until the jobs have ended
        (finding,) = findings_of_second_round(host, capability, "", f"{grown}\nrecovery_action = {action}")
        assert (finding.subject, finding.severity) == (PCI, Severity.DEGRADED)
        assert f"1 new uncorrected ECC errors, {CONTAINED_TEXT}; since" in finding.message
    (finding,) = findings_of_second_round(
        host, capability, "", f"{grown}\nunsupported_fields = [230]"
    )  # drivers before 570
    assert (finding.severity, CONTAINED_TEXT in finding.message) == (Severity.DEGRADED, True), "no claim of containment"
    for action in (1, 2, 6, 7):
        (finding,) = findings_of_second_round(host, capability, "", f"{grown}\nrecovery_action = {action}")
        assert (finding.severity, "contained" in finding.message) == (Severity.CRITICAL, False)


def test_gpu_of_unknown_model_counts_as_not_containing(host):
    text = 'unsupported = ["nvmlDeviceGetCudaComputeCapability"]\n'
    (finding,) = findings_of_second_round(host, (9, 0), text, f"{text}ecc_volatile_uncorrected_dram = 1")
    assert finding.severity is Severity.CRITICAL


@pytest.mark.parametrize(
    ("capability", "severity"), [((8, 0), Severity.DEGRADED), ((9, 0), Severity.DEGRADED), ((12, 0), Severity.CRITICAL)]
)
def test_lifetime_growth_with_mig_is_critical_only_without_containment(host, capability, severity):
    """A contained error ends a process of one MIG device, and jobs on the other devices continue."""
    (finding,) = findings_of_second_round(
        host, capability, "mig = true", "mig = true\necc_aggregate_uncorrected_dram = 1"
    )
    assert (finding.code, finding.subject, finding.severity) == ("gpu_ecc/uncorrected", PCI, severity)
    more = "mig = true\necc_aggregate_uncorrected_dram = 1\nrecovery_action = 1"
    assert findings_of_second_round(host, capability, "mig = true", more)[0].severity is Severity.CRITICAL


def test_errors_before_driver_reload_are_no_growth_and_later_ones_are(host):
    text = "ecc_volatile_uncorrected_dram = {}".format
    assert findings_of_second_round(host, (7, 0), text(5), text(1))[0].severity is Severity.CRITICAL
    story = Story(gpu_ecc).run_check(host(gpu_text((7, 0)))).reboot().run_check(host(gpu_text((7, 0), text(1))))
    assert (story.drained, story.requeued) == (True, False), "the first run of this boot"


@pytest.mark.parametrize("mig", [False, True])
@pytest.mark.parametrize(
    ("minutes", "config", "requeued"),
    [
        (5, Config(), True),
        (15, Config(), True),
        (15.1, Config(), False),
        (24 * 60, Config(), False),
        (15.1, Config(growth_seconds=1800.0), True),
    ],
)
def test_errors_after_long_gap_between_runs_do_not_requeue(host, minutes, config, requeued, mig):
    """Current jobs may have started long after the error."""
    mode = "mig = true\n" if mig else ""
    grown = f"ecc_{'aggregate' if mig else 'volatile'}_uncorrected_dram = 1"
    capability = (12, 0) if mig else (7, 0)
    without_errors, with_errors = host(gpu_text(capability, mode)), host(gpu_text(capability, f"{mode}{grown}"))
    story = Story(gpu_ecc, config).run_checks(without_errors, 2).run_check(with_errors, minutes)
    assert (story.drained, story.requeued) == (True, requeued)
    assert story.run_check(with_errors).requeued is requeued, "the count did not grow again"


def test_growth_after_long_gap_requeues_from_next_reading(host):
    without_errors, one_error, two_errors = (
        host(gpu_text((7, 0), f"ecc_volatile_uncorrected_dram = {n}")) for n in range(3)
    )
    story = Story(gpu_ecc).run_check(without_errors).run_check(one_error, 600)
    assert not story.requeued
    (finding,) = story.run_check(two_errors).result.findings
    assert (finding.severity, finding.message.partition(";")[0]) == (
        Severity.CRITICAL,
        "1 new uncorrected ECC errors",
    )


def test_more_uncorrected_errors_change_the_evidence(host):
    one_error, two_errors = (findings(gpu_ecc, host(f"gpu.3.ecc_volatile_uncorrected_dram = {n}"))[0] for n in (1, 2))
    assert one_error.evidence != two_errors.evidence


def test_sram_threshold_flag_is_degraded_until_operator_acts(host):
    (finding,) = findings(gpu_ecc, host("gpu.3.sram_threshold_exceeded = true"))
    assert (finding.code, finding.severity) == ("gpu_ecc/sram_threshold", Severity.DEGRADED)
    assert (finding.clears, finding.evidence) == (Clears.OPERATOR, "SRAM threshold flag 1")


def test_lifetime_errors_are_only_recorded(host):
    (finding,) = findings(gpu_ecc, host("gpu.3.ecc_aggregate_uncorrected_dram = 7"))
    assert (finding.code, finding.severity) == ("gpu_ecc/aggregate", Severity.INFO)


@pytest.mark.parametrize(("where", "limit"), [("sram", 10_000), ("dram", 20_000_000)])
def test_corrected_errors_warn_only_above_limit(host, where, limit):
    at, above = (findings(gpu_ecc, host(f"gpu.3.ecc_volatile_corrected_{where} = {limit + n}")) for n in (0, 1))
    assert at == []
    assert [(f.code, f.severity) for f in above] == [("gpu_ecc/corrected", Severity.WARNING)]


def test_corrected_limits_are_settings(host):
    node = host("gpu.3.ecc_volatile_corrected_dram = 177")
    assert codes(findings(gpu_ecc, node, Config(max_corrected_dram=100))) == ["gpu_ecc/corrected"]


def test_disabled_ecc_warns_and_needs_no_counters(host):
    (finding,) = findings(gpu_ecc, host("gpu.3.ecc = false"))
    assert (finding.code, finding.severity, finding.clears) == ("gpu_ecc/disabled", Severity.WARNING, Clears.PASS)


def test_gpu_without_ecc_gives_nothing(host):
    calls = '["nvmlDeviceGetEccMode", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetMemoryErrorCounter"]'
    results = run_check(gpu_ecc, host(f"[gpu.3]\nunsupported = {calls}\nsram_threshold_exceeded = false"))
    assert {item.labels[0][1] for item in observations_named(results, "gpu_ecc_volatile_errors_total")} == {
        *fake_pci_gpus("dgx-h100")
    } - {PCI}
    assert [item for item in results if isinstance(item, Finding)] == []


def test_gpu_before_ampere_uses_total_count(host):
    text = '[gpu.3]\nunsupported = ["nvmlDeviceGetMemoryErrorCounter"]\necc_volatile_uncorrected_dram = 1'
    (finding,) = findings(gpu_ecc, host(text))
    assert finding.evidence == "uncorrected: memory 1"


def test_ecc_without_counters_fails_run_and_hides_no_other_finding(host):
    unsupported = '["nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetMemoryErrorCounter"]'
    text = f"[gpu.3]\nunsupported = {unsupported}\n[gpu.4]\necc_volatile_uncorrected_sram = 1"
    results, error = run_until_error(gpu_ecc, host(text))
    assert PCI in error
    assert codes([item for item in results if isinstance(item, Finding)]) == ["gpu_ecc/uncorrected"]


def test_ecc_off_by_factory_default_gives_no_finding(host):
    assert findings(gpu_ecc, host("[gpu.3]\necc = false\necc_default = false")) == []


def test_ecc_off_by_factory_default_on_all_gpus_gives_nothing_to_check(host):
    off = "\n".join(
        f"[gpu.{index}]\necc = false\necc_default = false" for index in range(len(fake_pci_gpus("dgx-h100")))
    )
    assert list(gpu_ecc.run(host(off), Config(), History({}, 1000.0, "b"))) == [NothingToCheck("no GPU with ECC on")]


def test_ecc_off_warns_if_old_driver_has_no_default_mode(host):
    text = '[gpu.3]\necc = false\necc_default = false\nunsupported = ["nvmlDeviceGetDefaultEccMode"]'
    assert codes(findings(gpu_ecc, host(text))) == ["gpu_ecc/disabled"]


def test_error_of_ecc_mode_fails_run(host):
    with pytest.raises(NvmlError, match="nvmlDeviceGetEccMode"):
        run_check(gpu_ecc, host('gpu.3.errors = { nvmlDeviceGetEccMode = "Unknown" }'))


def test_lost_gpu_is_left_to_gpu_access(host):
    assert findings(gpu_ecc, host("gpu.3.lost = true")) == []


def test_fallen_counter_is_evidence_of_reset_before_reading(host):
    results = run_rounds(gpu_ecc, [host("gpu.3.ecc_volatile_uncorrected_dram = 5"), host()])
    (repair,) = (item for item in results if isinstance(item, Repair))
    assert (repair.clears, repair.subject, repair.before) == (Clears.GPU_RESET, PCI, NOW)


def test_new_errors_after_reset_remain_a_finding(host):
    results = run_rounds(
        gpu_ecc, [host("gpu.3.ecc_volatile_uncorrected_dram = 5"), host("gpu.3.ecc_volatile_uncorrected_dram = 1")]
    )
    assert [item.code for item in results if isinstance(item, Finding)] == ["gpu_ecc/uncorrected"]
    assert [item for item in results if isinstance(item, Repair)]


def test_unreadable_counter_is_no_evidence_of_reset(host):
    unsupported = host('gpu.3.unsupported = ["nvmlDeviceGetMemoryErrorCounter"]')
    results = run_rounds(gpu_ecc, [host("gpu.3.ecc_volatile_uncorrected_dram = 5"), unsupported])
    assert [item for item in results if isinstance(item, Repair)] == []


def test_unchanged_or_growing_counters_are_no_evidence_of_reset(host):
    node = host("gpu.3.ecc_volatile_corrected_dram = 5")
    assert [item for item in run_rounds(gpu_ecc, [host(), node, node]) if isinstance(item, Repair)] == []


def test_v100_reports_dram_and_caches(host):
    """Volta and Pascal do not have the location SRAM."""
    text = "[gpu.3]\necc_sram = false\necc_volatile_uncorrected_sram = 2\necc_volatile_uncorrected_dram = 1"
    (finding,) = findings(gpu_ecc, host(text))
    assert finding.evidence == "uncorrected: dram 1, caches 2"


def test_old_errors_with_mig_are_no_fault_and_new_ones_are(host):
    """nvml.h: the handle of a GPU with MIG has no volatile errors. nvidia-smi shows N/A."""
    old, new = (host(f"[gpu.3]\nmig = true\necc_aggregate_uncorrected_dram = {n}") for n in (4, 5))
    assert codes(findings(gpu_ecc, old)) == ["gpu_ecc/aggregate"]
    assert codes([item for item in run_rounds(gpu_ecc, [old, old]) if isinstance(item, Finding)]) == [
        "gpu_ecc/aggregate"
    ]
    found = [item for item in run_rounds(gpu_ecc, [old, new]) if isinstance(item, Finding)]
    assert codes(found) == ["gpu_ecc/uncorrected", "gpu_ecc/aggregate"]
    assert found[0].message == f"1 new uncorrected ECC errors, {CONTAINED_TEXT} (5 over the life of this GPU)"


def test_unreadable_counters_with_mig_fail_run(host):
    _, error = run_until_error(gpu_ecc, host('[gpu.3]\nmig = true\nunsupported = ["nvmlDeviceGetTotalEccErrors"]'))
    assert error == f"GPU {PCI}: ECC is on, but no error counter can be read"


@pytest.mark.parametrize("ending", ["reboot", "repaired"])
@pytest.mark.parametrize(("capability", "requeued"), [((9, 0), False), ((12, 0), True)])
def test_new_error_with_mig_drains_until_reboot_or_repaired(host, ending, capability, requeued):
    old, new = (host(gpu_text(capability, f"mig = true\necc_aggregate_uncorrected_sram = {n}")) for n in (0, 1))
    story = Story(gpu_ecc).run_check(old).run_check(new)
    assert story.codes == ["gpu_ecc/aggregate", "gpu_ecc/uncorrected"]
    assert (story.drained, story.requeued) == (True, requeued)
    story.run_checks(new, 300)
    assert story.drained
    story.reboot() if ending == "reboot" else story.repaired("gpu_ecc/uncorrected", PCI)
    assert not story.run_checks(new, 2).drained


def test_counter_at_maximum_is_a_finding(host):
    assert codes(findings(gpu_ecc, host(f"gpu.3.ecc_volatile_uncorrected_dram = {2**32 - 1}"))) == [
        "gpu_ecc/uncorrected"
    ]


@pytest.mark.parametrize(
    ("persistence_modes", "resets"), [([True, True], 1), ([True, False], 0), ([False, True], 0), ([False, False], 0)]
)
def test_fallen_counter_is_no_evidence_without_persistence_mode(host, tmp_path, persistence_modes, resets):
    """A job may have kept the driver loaded at both readings, but not in between."""
    write(tmp_path, {"/sys/module/nvidia/refcnt": "7\n"})
    counts = ["ecc_volatile_uncorrected_dram = 5", ""]
    nodes = [
        host(f"[gpu.3]\npersistence = {str(mode).lower()}\n{text}", root=str(tmp_path))
        for mode, text in zip(persistence_modes, counts, strict=True)
    ]
    assert len([item for item in run_rounds(gpu_ecc, nodes) if isinstance(item, Repair)]) == resets


def test_fallen_counter_is_evidence_with_persistence_mode_and_no_driver_user(host, tmp_path):
    """The mode set by `nvidia-smi -pm 1` opens no device file."""
    write(tmp_path, {"/sys/module/nvidia/refcnt": "0\n"})
    nodes = [host(text, root=str(tmp_path)) for text in ("gpu.3.ecc_volatile_uncorrected_dram = 5", "")]
    assert len([item for item in run_rounds(gpu_ecc, nodes) if isinstance(item, Repair)]) == 1


@pytest.mark.parametrize(
    ("driver_in_use", "resets"),
    [([True, True], 1), ([True, False], 0), ([False, True], 0), ([False, False], 0), ([None, None], 1)],
)
def test_fallen_counter_is_evidence_with_unknown_mode_if_driver_is_in_use(host, tmp_path, driver_in_use, resets):
    nodes = []
    for number, (in_use, text) in enumerate(zip(driver_in_use, ["ecc_volatile_uncorrected_dram = 5", ""], strict=True)):
        root = tmp_path / f"node{number}"
        files = {} if in_use is None else {"/sys/module/nvidia/refcnt": "7\n" if in_use else "0\n"}
        write(root, files)
        text = f'[gpu.3]\nunsupported = ["nvmlDeviceGetPersistenceMode"]\n{text}'
        nodes.append(host(text, root=str(root)))
    results = run_rounds(gpu_ecc, nodes)
    assert len([item for item in results if isinstance(item, Repair)]) == resets


def test_failing_gpu_hides_no_other_finding(host):
    text = '[gpu.0]\nerrors = { nvmlDeviceGetMemoryErrorCounter = "Unknown" }\n'
    node = host(f"{text}[gpu.3]\necc_volatile_uncorrected_dram = 1")
    results, error = run_until_error(gpu_ecc, node)
    assert fake_pci_gpus("dgx-h100")[0] in error
    found = [item for item in results if isinstance(item, Finding)]
    assert [(item.code, item.subject) for item in found] == [("gpu_ecc/uncorrected", PCI)]


# --- stories


@pytest.mark.parametrize(("capability", "requeued"), [((9, 0), False), ((8, 6), True), ((7, 0), True)])
def test_uncorrected_error_drains_until_reset_and_requeues_if_not_contained(host, capability, requeued):
    with_errors = host(gpu_text(capability, "ecc_volatile_uncorrected_dram = 2"))
    story = Story(gpu_ecc).run_check(host()).run_check(with_errors)
    assert (story.drained, story.requeued) == (True, requeued)
    (condition,) = (c for c in story.conditions.values() if c.code == "gpu_ecc/uncorrected")
    story.run_checks(with_errors, 300)  # the load is gone, and a day passes
    assert story.drained, "there was no reset"
    after = story.conditions[condition.key]
    assert after.severity is condition.severity, "the count is unchanged, so the severity stays"
    story.run_checks(host(), 2)
    assert story.codes == []
    assert not story.drained


def test_growing_count_requeues_from_then_on(host):
    unchanged, grown = (host(gpu_text((8, 9), f"ecc_volatile_uncorrected_dram = {count}")) for count in (1, 2))
    story = Story(gpu_ecc).run_checks(unchanged, 20)
    assert (story.drained, story.requeued) == (True, False)
    story.run_check(grown)
    assert (story.drained, story.requeued) == (True, True)
    (condition,) = (c for c in story.conditions.values() if c.code == "gpu_ecc/uncorrected")
    assert condition.critical_at >= story.now, "jobs that started before are affected"


def test_new_errors_affect_only_jobs_on_that_gpu(host):
    story = (
        Story(gpu_ecc)
        .run_check(host(gpu_text((7, 0))))
        .run_check(host(gpu_text((7, 0), "ecc_volatile_uncorrected_dram = 1")))
    )
    (condition,) = story.conditions.values()
    gpus = [Gpu(pci, index) for index, pci in enumerate(fake_pci_gpus("dgx-h100"))]
    reach = fault_reach(condition, gpus, ())
    hit = [is_hit(reach, JobGpus(True, frozenset({gpu.pci}), is_complete=True), 8) for gpu in gpus]
    assert (condition.severity, hit) == (Severity.CRITICAL, [index == 3 for index in range(8)])
    assert not is_hit(reach, JobGpus(False, frozenset(), is_complete=True), 8), "nor a job without a GPU"


def test_reboot_clears_uncorrected_errors(host):
    with_errors = host("gpu.3.ecc_volatile_uncorrected_sram = 1")
    story = Story(gpu_ecc).run_check(host()).run_check(with_errors).run_checks(with_errors, 3)
    assert story.drained
    story.reboot().run_check(host())
    assert not story.drained


def test_errors_that_return_after_reboot_drain_again(host):
    with_errors = host("gpu.3.ecc_volatile_uncorrected_sram = 1")
    story = Story(gpu_ecc).run_check(host()).run_check(with_errors).reboot().run_check(with_errors)
    assert story.drained
    assert story.codes == ["gpu_ecc/uncorrected"]


def test_cleared_count_without_persistence_mode_drains_until_repaired(host):
    off = "gpu.3.persistence = false\n"
    story = Story(gpu_ecc).run_check(host(off)).run_check(host(off + "gpu.3.ecc_volatile_uncorrected_dram = 2"))
    story.run_checks(host(off), 300)
    assert story.drained
    story.repaired("gpu_ecc/uncorrected", PCI).run_check(host(off))
    story.run_checks(host(off), 2)
    assert not story.drained


def test_sram_threshold_flag_drains_until_repaired_and_stays_accepted(host):
    with_flag = host("gpu.3.sram_threshold_exceeded = true")
    story = Story(gpu_ecc).run_check(host()).run_check(with_flag)
    assert story.drained
    assert not story.requeued
    story.run_checks(with_flag, 300).reboot().run_checks(with_flag, 3)
    assert story.drained, "neither time nor a reboot ends it"
    story.repaired("gpu_ecc/sram_threshold", PCI).run_checks(with_flag, 300)
    assert not story.drained
    story.reboot().run_checks(with_flag, 3)
    assert not story.drained, "the operator accepted this flag"
    story.run_checks(host(), 2)  # a replacement GPU
    assert story.conditions == {}


def test_replaced_gpu_stays_drained_until_repaired(host):
    story = Story(gpu_ecc).run_check(host()).run_check(host("gpu.3.sram_threshold_exceeded = true"))
    story.reboot().run_checks(host(), 5)
    assert story.drained
    story.repaired("gpu_ecc/sram_threshold", PCI).run_checks(host(), 3)
    assert not story.drained


def test_many_corrected_errors_warn_until_reset_and_never_drain(host):
    with_errors = host("gpu.3.ecc_volatile_corrected_sram = 10001")
    story = Story(gpu_ecc).run_check(host()).run_checks(with_errors, 300)
    assert story.codes == ["gpu_ecc/corrected"]
    assert not story.drained
    assert Story(gpu_ecc).run_checks(with_errors, 3).reboot().run_check(host()).codes == []
    assert story.run_checks(host(), 2).codes == []


def test_disabled_ecc_warns_until_enabled_and_never_drains(host):
    story = Story(gpu_ecc).run_checks(host("gpu.3.ecc = false"), 5)
    assert story.codes == ["gpu_ecc/disabled"]
    assert not story.drained
    assert story.run_check(host()).codes == ["gpu_ecc/disabled"]
    assert story.run_check(host()).codes == []


def test_lifetime_errors_never_drain(host):
    story = Story(gpu_ecc).run_checks(host("gpu.3.ecc_aggregate_uncorrected_dram = 7"), 5)
    assert not story.drained
