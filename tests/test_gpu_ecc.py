"""gpu_ecc: errors since the driver was loaded, in the GPU's life, and ECC that is off."""

from __future__ import annotations

import pytest
from fakes import NOW, codes, findings, observed, rounds, run_check, scenarios, until_it_fails
from trees import write

from healthd.checks import gpu_ecc
from healthd.checks.gpu_ecc import Config
from healthd.fake_nvml import fake_pci_gpus
from healthd.model import Clears, Finding, Repair, Severity
from healthd.nvml import NvmlError

PCI = fake_pci_gpus("dgx-h100")[3]


@pytest.fixture
def host(tmp_path):
    return scenarios(tmp_path)


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


def test_mig_does_not_hide_the_memorys_errors(host):
    found = findings(gpu_ecc, host("[gpu.3]\nmig = true\necc_volatile_uncorrected_dram = 1"))
    assert codes(found) == ["gpu_ecc/uncorrected"]


def test_counters_at_the_end_of_their_width_are_findings_too(host):
    assert codes(findings(gpu_ecc, host(f"gpu.3.ecc_volatile_uncorrected_dram = {2**32 - 1}"))) == [
        "gpu_ecc/uncorrected"
    ]


@pytest.mark.parametrize(
    ("held", "resets"),
    [([True, True], 1), ([True, False], 0), ([False, True], 0), ([False, False], 0), ([None, None], 1)],
)
def test_a_count_that_fell_is_no_evidence_where_our_own_closing_wiped_it(host, tmp_path, held, resets):
    nodes = []
    for number, (who, text) in enumerate(zip(held, ["gpu.3.ecc_volatile_uncorrected_dram = 5", ""], strict=True)):
        root = tmp_path / f"node{number}"
        files = {} if who is None else {"/sys/module/nvidia/refcnt": "7\n" if who else "0\n"}
        write(root, files)
        nodes.append(host(text, root=str(root)))
    given = rounds(gpu_ecc, nodes)
    assert len([item for item in given if isinstance(item, Repair)]) == resets
