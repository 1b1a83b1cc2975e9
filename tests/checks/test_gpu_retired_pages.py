"""gpu_retired_pages: pages of GPU memory that are retired or about to be retired."""

from __future__ import annotations

import pytest
from fake_gpus import fake_pci_gpus
from fakes import codes, findings, healthy_gpus, observations_named, run_check, run_until_error, scenarios
from story import Story

from healthd.checks import gpu_retired_pages
from healthd.checks.gpu_retired_pages import Config, validate
from healthd.common.model import Clears, Finding, Severity
from healthd.host.host import Host

GPUS = fake_pci_gpus("dgx-a100")
PCI = GPUS[3]


def before_ampere(single: int = 0, double: int = 0, pending: bool = False, more: str = "") -> str:
    """Return a scenario of GPUs that retire pages. The numbers apply to GPU 3."""
    other_gpus = "".join(f"[gpu.{n}]\nretired_single_bit = 0\nretired_double_bit = 0\n" for n in range(8) if n != 3)
    numbers = (
        f"retired_single_bit = {single}\nretired_double_bit = {double}\nretired_pending = {str(pending).lower()}\n"
    )
    return f"{other_gpus}[gpu.3]\n{numbers}{more}"


@pytest.fixture
def host(tmp_path):
    make = scenarios(tmp_path)
    return lambda *numbers, **more: make(before_ampere(*numbers, **more), profile="dgx-a100")


healthy = healthy_gpus(Config(), before_ampere(), "dgx-a100")


def test_healthy_gpus_give_counters_and_no_finding(host):
    results = run_check(gpu_retired_pages, host())
    assert len(list(observations_named(results, "gpu_retired_pages_total"))) == len(results) == 16


@pytest.mark.parametrize("profile", ["dgx-a100", "dgx-h100", "dgx-b200"])
def test_gpus_that_remap_rows_give_nothing(tmp_path, profile):
    assert run_check(gpu_retired_pages, scenarios(tmp_path)(profile=profile)) == []


def test_machine_without_gpus_gives_nothing(tmp_path):
    assert run_check(gpu_retired_pages, Host(str(tmp_path))) == []


def test_pending_page_is_degraded_until_reboot(host):
    # A V100 with two pages for single bit errors and one pending: github.com/stas00/ml-engineering, debug.md
    (finding,) = findings(gpu_retired_pages, host(2, 0, pending=True))
    assert (finding.code, finding.subject) == ("gpu_retired_pages/pending", PCI)
    assert (finding.severity, finding.clears) == (Severity.DEGRADED, Clears.REBOOT)
    assert "0 for double bit errors, 2 for single bit errors" in finding.message


@pytest.mark.parametrize(
    ("single", "double", "expected"),
    [(59, 0, []), (30, 29, []), (60, 0, ["gpu_retired_pages/too_many"]), (20, 40, ["gpu_retired_pages/too_many"])],
)
def test_sixty_retired_pages_of_both_causes_are_degraded(host, single, double, expected):
    found = findings(gpu_retired_pages, host(single, double))
    assert codes(found) == expected
    assert all(f.severity is Severity.DEGRADED and f.clears is Clears.OPERATOR and f.evidence for f in found)


def test_degraded_pages_is_a_setting_above_zero(host):
    assert codes(findings(gpu_retired_pages, host(1, 1), Config(degraded_pages=2))) == ["gpu_retired_pages/too_many"]
    assert "must be positive" in (validate(Config(degraded_pages=0)) or "")
    assert validate(Config()) is None


def test_failing_gpu_hides_no_other_finding(tmp_path):
    text = before_ampere(pending=True) + '[gpu.0.errors]\nnvmlDeviceGetRetiredPages = "Unknown"\n'
    results, error = run_until_error(gpu_retired_pages, scenarios(tmp_path)(text, profile="dgx-a100"))
    assert GPUS[0] in error
    assert codes([item for item in results if isinstance(item, Finding)]) == ["gpu_retired_pages/pending"]


def test_unreadable_pending_status_fails_run(host):
    node = host(more='errors = { nvmlDeviceGetRetiredPagesPendingStatus = "Unknown" }\n')
    assert PCI in run_until_error(gpu_retired_pages, node)[1]


# --- stories


def test_pending_page_drains_until_reboot_retires_it(host):
    story = Story(gpu_retired_pages).run_check(host()).run_check(host(0, 1, pending=True))
    assert story.drained
    assert not story.requeued
    story.run_checks(host(0, 1, pending=True), 300)
    assert story.drained, "there was no reboot"
    story.reboot().run_check(host(0, 1))
    assert not story.drained


def test_page_still_pending_after_reboot_needs_operator(host):
    pending = host(0, 1, pending=True)
    story = Story(gpu_retired_pages).run_check(host()).run_check(pending).reboot().run_check(pending)
    assert story.drained
    story.reboot().run_checks(host(0, 1), 3)
    assert story.drained
    story.repaired("gpu_retired_pages/pending", PCI).run_check(host(0, 1))
    assert not story.drained


def test_too_many_pages_drain_until_repaired_and_again_with_next_page(host):
    story = Story(gpu_retired_pages).run_check(host(59)).run_check(host(60))
    assert story.drained
    story.run_checks(host(60), 300).reboot().run_checks(host(60), 3)
    assert story.drained, "neither time nor a reboot ends it"
    story.repaired("gpu_retired_pages/too_many", PCI).run_checks(host(60), 300)
    assert not story.drained, "the operator accepted sixty"
    assert story.run_check(host(61)).drained
