"""gpu_ecc: errors since the driver was loaded, lifetime errors, and disabled ECC."""

from __future__ import annotations

import pytest
from fake_gpus import fake_pci_gpus
from fakes import NOW, codes, findings, healthy_gpus, observed, rounds, run_check, until_it_fails
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
def test_a_healthy_machine_gives_its_counters_and_no_finding(host, profile):
    given = run_check(gpu_ecc, host(profile=profile))
    assert len(list(observed(given, "gpu_ecc_volatile_errors_total"))) == 8 * 4
    assert [item for item in given if isinstance(item, Finding)] == []


# Compute capabilities: developer.nvidia.com/cuda-gpus
CONTAIN = {"A100, A30": (8, 0), "H100, H200": (9, 0), "B200": (10, 0)}
REMAP = {"A10, A40": (8, 6), "L4, L40": (8, 9)}
RETIRE = {"V100": (7, 0), "T4": (7, 5)}
OTHERS = {"B300, GB300": (10, 3), "RTX PRO 6000 Blackwell": (12, 0), "future GPU": (99, 0)}
DO_NOT_CONTAIN = {**REMAP, **RETIRE, **OTHERS}


SHOULD = "which this GPU should have contained (see Xid 94 or 95)"


def part(capability: tuple[int, int], text: str = "") -> str:
    return f"[gpu.3]\ncompute_capability = {list(capability)}\n{text}\n"


def of_two(host, capability, before: str, after: str, **kw) -> list[Finding]:
    """Return the findings of the second of two rounds."""
    given = rounds(gpu_ecc, [host(part(capability, text), **kw) for text in (before, after)])
    return [item for item in given if isinstance(item, Finding) and item.code != "gpu_ecc/aggregate"]


@pytest.mark.parametrize("where", ["sram", "dram"])
@pytest.mark.parametrize("capability", [*CONTAIN.values(), *DO_NOT_CONTAIN.values()])
def test_an_uncorrected_error_that_is_there_at_first_sight_is_degraded_on_every_part(host, where, capability):
    """Which jobs the error affected is unknown."""
    (finding,) = findings(gpu_ecc, host(part(capability, f"ecc_volatile_uncorrected_{where} = 2")))
    assert (finding.code, finding.subject) == ("gpu_ecc/uncorrected", PCI)
    assert (finding.severity, finding.clears) == (Severity.DEGRADED, Clears.GPU_RESET)
    assert finding.evidence == f"uncorrected: {where} 2"
    assert finding.message == f"uncorrected ECC errors since the driver was loaded: {where} 2"


@pytest.mark.parametrize("where", ["sram", "dram"])
@pytest.mark.parametrize("capability", DO_NOT_CONTAIN.values(), ids=DO_NOT_CONTAIN)
def test_new_errors_are_critical_where_the_part_does_not_contain_them(host, capability, where):
    counts = [f"ecc_volatile_uncorrected_{where} = {count}" for count in (2, 5)]
    (finding,) = of_two(host, capability, *counts)
    assert (finding.code, finding.subject, finding.severity) == ("gpu_ecc/uncorrected", PCI, Severity.CRITICAL)
    assert finding.message == f"3 new uncorrected ECC errors; since the driver was loaded: {where} 5"
    (finding,) = of_two(host, capability, *counts[:1] * 2)
    assert finding.severity is Severity.DEGRADED, "the count did not grow"


@pytest.mark.parametrize("capability", CONTAIN.values(), ids=CONTAIN)
def test_new_errors_drain_only_where_the_part_contains_them_and_the_driver_asks_for_no_reset(host, capability):
    grown = "ecc_volatile_uncorrected_dram = 1"
    for action in (0, 3, 4, 5):  # no action, or one that can wait until the jobs have ended
        (finding,) = of_two(host, capability, "", f"{grown}\nrecovery_action = {action}")
        assert (finding.subject, finding.severity) == (PCI, Severity.DEGRADED)
        assert f"1 new uncorrected ECC errors, {SHOULD}; since" in finding.message
    (finding,) = of_two(host, capability, "", f"{grown}\nunsupported_fields = [230]")  # drivers before 570
    assert (finding.severity, SHOULD in finding.message) == (Severity.DEGRADED, True), "no claim of containment"
    for action in (1, 2, 6, 7):
        (finding,) = of_two(host, capability, "", f"{grown}\nrecovery_action = {action}")
        assert (finding.severity, "contained" in finding.message) == (Severity.CRITICAL, False)


def test_a_part_that_does_not_say_what_it_is_contains_nothing(host):
    text = 'unsupported = ["nvmlDeviceGetCudaComputeCapability"]\n'
    (finding,) = of_two(host, (9, 0), text, f"{text}ecc_volatile_uncorrected_dram = 1")
    assert finding.severity is Severity.CRITICAL


@pytest.mark.parametrize(
    ("capability", "severity"), [((8, 0), Severity.DEGRADED), ((9, 0), Severity.DEGRADED), ((12, 0), Severity.CRITICAL)]
)
def test_with_mig_the_growth_for_life_is_judged_by_the_part_as_well(host, capability, severity):
    """A contained error ends a process of one MIG device, and jobs on the other devices continue."""
    (finding,) = of_two(host, capability, "mig = true", "mig = true\necc_aggregate_uncorrected_dram = 1")
    assert (finding.code, finding.subject, finding.severity) == ("gpu_ecc/uncorrected", PCI, severity)
    more = "mig = true\necc_aggregate_uncorrected_dram = 1\nrecovery_action = 1"
    assert of_two(host, capability, "mig = true", more)[0].severity is Severity.CRITICAL


def test_errors_of_the_driver_before_are_no_growth_and_those_since_a_reset_are(host):
    text = "ecc_volatile_uncorrected_dram = {}".format
    assert of_two(host, (7, 0), text(5), text(1))[0].severity is Severity.CRITICAL
    story = Story(gpu_ecc).look(host(part((7, 0)))).reboot().look(host(part((7, 0), text(1))))
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
def test_story_errors_that_came_while_nobody_looked_for_long_requeue_nobody(host, minutes, config, requeued, mig):
    """Current jobs may have started long after the error."""
    mode = "mig = true\n" if mig else ""
    grown = f"ecc_{'aggregate' if mig else 'volatile'}_uncorrected_dram = 1"
    capability = (12, 0) if mig else (7, 0)
    well, bad = host(part(capability, mode)), host(part(capability, f"{mode}{grown}"))
    story = Story(gpu_ecc, config).looks(well, 2).look(bad, minutes)
    assert (story.drained, story.requeued) == (True, requeued)
    assert story.look(bad).requeued is requeued, "the count did not grow again"


def test_what_grows_after_a_long_time_without_a_look_is_new_again(host):
    well, one, two = (host(part((7, 0), f"ecc_volatile_uncorrected_dram = {n}")) for n in range(3))
    story = Story(gpu_ecc).look(well).look(one, 600)
    assert not story.requeued
    (finding,) = story.look(two).result.findings
    assert (finding.severity, finding.message.partition(";")[0]) == (
        Severity.CRITICAL,
        "1 new uncorrected ECC errors",
    )


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


def test_gpu_ecc_is_silent_where_ecc_is_off_by_factory_default(host):
    assert findings(gpu_ecc, host("[gpu.3]\necc = false\necc_default = false")) == []


def test_gpu_ecc_has_nothing_to_check_where_ecc_is_off_on_every_gpu_by_factory_default(host):
    off = "\n".join(
        f"[gpu.{index}]\necc = false\necc_default = false" for index in range(len(fake_pci_gpus("dgx-h100")))
    )
    assert list(gpu_ecc.run(host(off), Config(), History({}, 1000.0, "b"))) == [NothingToCheck("no GPU with ECC on")]


def test_gpu_ecc_warns_where_an_old_driver_has_no_default_mode(host):
    text = '[gpu.3]\necc = false\necc_default = false\nunsupported = ["nvmlDeviceGetDefaultEccMode"]'
    assert codes(findings(gpu_ecc, host(text))) == ["gpu_ecc/disabled"]


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
    """Volta and Pascal do not have the location SRAM."""
    text = "[gpu.3]\necc_sram = false\necc_volatile_uncorrected_sram = 2\necc_volatile_uncorrected_dram = 1"
    (finding,) = findings(gpu_ecc, host(text))
    assert finding.evidence == "uncorrected: dram 1, caches 2"


def test_with_mig_old_errors_are_no_fault_and_new_ones_are(host):
    """nvml.h: the handle of a GPU with MIG has no volatile errors. nvidia-smi shows N/A."""
    old, new = (host(f"[gpu.3]\nmig = true\necc_aggregate_uncorrected_dram = {n}") for n in (4, 5))
    assert codes(findings(gpu_ecc, old)) == ["gpu_ecc/aggregate"]
    assert codes([item for item in rounds(gpu_ecc, [old, old]) if isinstance(item, Finding)]) == ["gpu_ecc/aggregate"]
    found = [item for item in rounds(gpu_ecc, [old, new]) if isinstance(item, Finding)]
    assert codes(found) == ["gpu_ecc/uncorrected", "gpu_ecc/aggregate"]
    assert found[0].message == f"1 new uncorrected ECC errors, {SHOULD} (5 over the life of this GPU)"


def test_with_mig_counters_that_do_not_answer_are_unknown_too(host):
    _, error = until_it_fails(gpu_ecc, host('[gpu.3]\nmig = true\nunsupported = ["nvmlDeviceGetTotalEccErrors"]'))
    assert error == f"GPU {PCI}: ECC is on, but no error counter can be read"


@pytest.mark.parametrize("way", ["reboot", "repaired"])
@pytest.mark.parametrize(("capability", "requeued"), [((9, 0), False), ((12, 0), True)])
def test_story_with_mig_a_new_error_drains_until_a_reboot_or_a_word(host, way, capability, requeued):
    old, new = (host(part(capability, f"mig = true\necc_aggregate_uncorrected_sram = {n}")) for n in (0, 1))
    story = Story(gpu_ecc).look(old).look(new)
    assert story.codes == ["gpu_ecc/aggregate", "gpu_ecc/uncorrected"]
    assert (story.drained, story.requeued) == (True, requeued)
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
    """A job may have kept the driver loaded at both readings, but not in between."""
    write(tmp_path, {"/sys/module/nvidia/refcnt": "7\n"})
    counts = ["ecc_volatile_uncorrected_dram = 5", ""]
    nodes = [
        host(f"[gpu.3]\npersistence = {str(mode).lower()}\n{text}", root=str(tmp_path))
        for mode, text in zip(on, counts, strict=True)
    ]
    assert len([item for item in rounds(gpu_ecc, nodes) if isinstance(item, Repair)]) == resets


def test_with_persistence_mode_it_does_not_matter_who_holds_the_driver(host, tmp_path):
    """The mode set by `nvidia-smi -pm 1` opens no device file."""
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


# --- stories


@pytest.mark.parametrize(("capability", "requeued"), [((9, 0), False), ((8, 6), True), ((7, 0), True)])
def test_an_uncorrected_error_drains_until_the_gpu_is_reset_and_requeues_where_nothing_contained_it(
    host, capability, requeued
):
    bad = host(part(capability, "ecc_volatile_uncorrected_dram = 2"))
    story = Story(gpu_ecc).look(host()).look(bad)
    assert (story.drained, story.requeued) == (True, requeued)
    (condition,) = (c for c in story.conditions.values() if c.code == "gpu_ecc/uncorrected")
    story.looks(bad, 300)  # the load is gone, and a day passes
    assert story.drained, "there was no reset"
    after = story.conditions[condition.key]
    assert after.severity is condition.severity, "the count is unchanged, so the severity stays"
    story.looks(host(), 2)
    assert story.codes == []
    assert not story.drained


def test_a_count_that_stood_and_then_grew_requeues_from_then_on(host):
    stood, grown = (host(part((8, 9), f"ecc_volatile_uncorrected_dram = {count}")) for count in (1, 2))
    story = Story(gpu_ecc).looks(stood, 20)
    assert (story.drained, story.requeued) == (True, False)
    story.look(grown)
    assert (story.drained, story.requeued) == (True, True)
    (condition,) = (c for c in story.conditions.values() if c.code == "gpu_ecc/uncorrected")
    assert condition.critical_at >= story.now, "jobs that started before are affected"


def test_new_errors_hit_the_jobs_on_that_gpu_and_no_others(host):
    story = Story(gpu_ecc).look(host(part((7, 0)))).look(host(part((7, 0), "ecc_volatile_uncorrected_dram = 1")))
    (condition,) = story.conditions.values()
    gpus = [Gpu(pci, index) for index, pci in enumerate(fake_pci_gpus("dgx-h100"))]
    whom = fault_reach(condition, gpus, ())
    hit = [is_hit(whom, JobGpus(True, frozenset({gpu.pci}), is_complete=True), 8) for gpu in gpus]
    assert (condition.severity, hit) == (Severity.CRITICAL, [index == 3 for index in range(8)])
    assert not is_hit(whom, JobGpus(False, frozenset(), is_complete=True), 8), "nor a job without a GPU"


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
    assert not story.drained, "the operator accepted this flag"
    story.looks(host(), 2)  # a replacement GPU
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
