"""gpu_pcie: lanes, generation and replays of the PCI Express links of GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_gpus import fake_pci_gpus
from fakes import BOOT, NOW, codes, findings, healthy_gpus, observations_named, run_check, run_rounds
from story import Story
from trees import add_pci_device

from healthd.agent.conditions.absorb import as_configured
from healthd.agent.settings.layers import PROFILES
from healthd.checks import gpu_pcie
from healthd.checks.gpu_pcie import Config, validate
from healthd.common import toml
from healthd.common.history import History
from healthd.common.model import Clears, Finding, LeftOut, Severity
from healthd.host.host import Host
from healthd.nvidia.nvml import NvmlError

PCI = fake_pci_gpus("dgx-h100")[3]
BUSY = "utilization_percent = 99\n"
healthy = healthy_gpus(Config())


def replay_findings(host, *counts: int, interval: float = 300.0, more: str = "") -> list[Finding]:
    hosts = [host(f"[gpu.3]\npcie_replays = {count}\n{more}") for count in counts]
    return [item for item in run_rounds(gpu_pcie, hosts, interval=interval) if isinstance(item, Finding)]


@pytest.mark.parametrize("profile", ["dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200"])
def test_healthy_machine_gives_no_finding(host, profile):
    results = run_check(gpu_pcie, host(profile=profile))
    assert [item.value for item in observations_named(results, "gpu_pcie_link_lanes")] == [16] * 8
    assert len([*observations_named(results, "gpu_pcie_link_generation")]) == 8
    assert len([*observations_named(results, "gpu_pcie_replays_total")]) == 8
    assert [item for item in results if isinstance(item, Finding)] == []


@pytest.mark.parametrize("lanes", [0, 1, 4, 8])
@pytest.mark.parametrize("more", ["", BUSY, f"pcie_generation = 1\n{BUSY}"])
@pytest.mark.parametrize(("config", "severity"), [(Config(), Severity.WARNING), (Config(lanes=16), Severity.DEGRADED)])
def test_missing_lanes_warn_and_are_degraded_if_expected_lanes_are_set(host, lanes, more, config, severity):
    found = findings(gpu_pcie, host(f"[gpu.3]\npcie_width = {lanes}\n{more}"), config)
    finding = found[-1]
    assert (finding.code, finding.subject, finding.severity) == ("gpu_pcie/lanes", PCI, severity)
    assert (finding.clears, finding.confirm_seconds, finding.window_seconds) == (Clears.REBOOT, 120.0, 0.0)
    assert finding.message == f"the PCIe link has {lanes} of 16 lanes"


def lane_findings(host, *widths: int, config: Config | None = None) -> list[tuple[str, Severity]]:
    """Return the lane findings of the last of several rounds of one boot."""
    results = run_rounds(gpu_pcie, [host(f"[gpu.3]\npcie_width = {width}") for width in widths], config)
    return [(f.message, f.severity) for f in results if isinstance(f, Finding)]


def test_link_with_more_lanes_earlier_in_boot_is_degraded(host):
    assert lane_findings(host, 16, 8) == [("the PCIe link has 8 of 16 lanes", Severity.DEGRADED)]
    assert lane_findings(host, 16, 8, 8, 8) == [("the PCIe link has 8 of 16 lanes", Severity.DEGRADED)]
    assert lane_findings(host, 8, 4) == [("the PCIe link has 4 of 8 lanes", Severity.DEGRADED)]
    assert lane_findings(host, 4, 8) == [("the PCIe link has 8 of 16 lanes", Severity.WARNING)]
    assert lane_findings(host, 8, 16) == []


def test_lanes_of_previous_boot_do_not_count(host):
    narrow = host("[gpu.3]\npcie_width = 8")
    story = Story(gpu_pcie).run_check(host()).reboot().run_checks(narrow, 3)
    assert (story.codes, story.drained) == (["gpu_pcie/lanes"], False)


def test_lanes_setting_below_maximum_is_the_limit(host):
    assert lane_findings(host, 8, config=Config(lanes=8)) == []
    assert lane_findings(host, 4, config=Config(lanes=8)) == [("the PCIe link has 4 of 8 lanes", Severity.DEGRADED)]


def test_link_that_lost_lanes_but_meets_setting_warns(host):
    """A site that sets 8 lanes accepts 8, so no drain. But this GPU had more lanes and lost them."""
    found = lane_findings(host, 16, 8, config=Config(lanes=8))
    assert found == [("the PCIe link has 8 of 16 lanes", Severity.WARNING)]
    found = lane_findings(host, 16, 4, config=Config(lanes=8))
    assert found == [("the PCIe link has 4 of 8 lanes", Severity.DEGRADED)]


def test_lanes_guessed_by_profile_suppress_no_finding(host):
    config = Config(lanes=8, guessed=("lanes",))
    assert lane_findings(host, 8, config=config) == [("the PCIe link has 8 of 16 lanes", Severity.WARNING)]
    assert lane_findings(host, 16, 8, config=config) == [("the PCIe link has 8 of 16 lanes", Severity.DEGRADED)]


def test_lanes_setting_and_repaired_clear_finding_of_narrow_machine(host):
    """The documentation recommends this: set `lanes` and run `healthd repaired`."""
    narrow = host("[gpu.3]\npcie_width = 8")
    story = Story(gpu_pcie).run_checks(narrow, 3)
    assert story.codes == ["gpu_pcie/lanes"]
    story.config = Config(lanes=8)
    story.repaired("gpu_pcie/lanes").run_checks(narrow, 3)
    assert (story.codes, story.drained) == ([], False)


def test_lanes_beyond_card_and_slot_are_not_missing(host, tmp_path):
    root = tree_with_slot(tmp_path, "8")
    assert findings(gpu_pcie, host("[gpu.3]\npcie_width = 8", root=root), Config(lanes=16)) == []


@pytest.mark.parametrize("name", ["dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200"])
def test_lanes_of_dgx_profile_drain_if_confirmed_by_card_and_slot(host, name):
    lanes = toml.parse(Path(PROFILES, f"{name}.toml").read_text())["checks"]["gpu_pcie"]["lanes"]
    config = Config(lanes=lanes, guessed=("lanes",))
    (finding,) = findings(gpu_pcie, host("[gpu.3]\npcie_width = 8", profile=name), config)
    assert as_configured(finding, config).severity is Severity.DEGRADED


def test_baseline_has_lanes_common_to_all_gpus_and_omits_faulty_ones(host, tmp_path):
    def baseline_values(text: str = "", root: str = "/nonexistent") -> list[Any]:
        return [getattr(item, "value", item) for item in gpu_pcie.baseline(host(text, root=root), Config())]

    assert baseline_values() == [16]
    assert baseline_values("[gpu.3]\npcie_width = 8") == [LeftOut("gpu_pcie", f"GPU {PCI} has 8 of 16 lanes", "lanes")]
    assert baseline_values("[gpu.3]\npcie_width = 8", tree_with_slot(tmp_path, "8")) == [
        LeftOut("gpu_pcie", "GPUs have 8 or 16 lanes", "lanes")
    ]
    assert baseline_values('pci = ["0000:00:1e.0"]\n[gpu.0]\npcie_width = 8\n') == [8]
    assert baseline_values('pci = ["0000:1b:00.0"]\n[gpu.0]\nunsupported = ["nvmlDeviceGetCurrPcieLinkWidth"]') == []


def test_lower_generation_of_busy_gpu_warns(host):
    (finding,) = findings(gpu_pcie, host(f"[gpu.3]\npcie_generation = 3\n{BUSY}"))
    assert (finding.code, finding.severity, finding.clears) == (
        "gpu_pcie/generation",
        Severity.WARNING,
        Clears.REBOOT,
    )
    assert finding.message == "the PCIe link runs at generation 3 of 5 while the GPU is busy"


@pytest.mark.parametrize("lanes", [1, 8, 16])
@pytest.mark.parametrize("percent", [0, 49])
def test_idle_gpu_may_lower_generation_and_lanes(host, lanes, percent):
    text = f"[gpu.3]\npcie_generation = 1\npcie_width = {lanes}\nutilization_percent = {percent}\n"
    assert findings(gpu_pcie, host(text)) == []


def test_lanes_with_mig_are_evaluated_only_at_full_generation(host):
    slow = "[gpu.3]\nmig = true\npcie_generation = 1\npcie_width = 8\n"
    assert findings(gpu_pcie, host(slow)) == []
    assert codes(findings(gpu_pcie, host("[gpu.3]\nmig = true\npcie_width = 8\n"))) == ["gpu_pcie/lanes"]


def test_limit_of_slot_or_machine_is_no_fault(host):
    text = f"[gpu.3]\npcie_width = 8\npcie_max_width = 8\npcie_generation = 4\npcie_max_generation = 4\n{BUSY}"
    assert findings(gpu_pcie, host(text)) == []


def tree_with_slot(tmp_path: Path, lanes: str) -> str:
    """Create a tree with GPU 3 below a port with this number of lanes."""
    add_pci_device(tmp_path, "0000:60:01.0", "0x060400", vendor="0x8086", max_link_width=lanes)
    add_pci_device(tmp_path, PCI, "0x030200", "0000:60:01.0")
    return str(tmp_path)


@pytest.mark.parametrize(("slot", "lanes"), [("8", 8), ("16", 16), ("0", 16), ("255", 16)])
def test_expected_lanes_are_limited_by_slot(host, tmp_path, slot, lanes):
    """A T4 in a riser slot with 8 lanes: nvidia-smi shows a maximum of 16x and a current width of 8x."""
    root = tree_with_slot(tmp_path, slot)
    for current in (4, 8, 16):
        found = findings(gpu_pcie, host(f"[gpu.3]\npcie_width = {current}", root=root))
        assert [f.message for f in found] == (
            [f"the PCIe link has {current} of {lanes} lanes"] if current < lanes else []
        )


@pytest.mark.parametrize("text", ["", "N/A", "Unknown", "x16", "18446744073709551616"])
def test_garbled_slot_width_fails_run_only_if_lanes_are_missing(host, tmp_path, text):
    root = tree_with_slot(tmp_path, text)
    assert findings(gpu_pcie, host(root=root)) == []
    with pytest.raises(ValueError, match=r"0000:60:01\.0/max_link_width: not a number of lanes"):
        findings(gpu_pcie, host("[gpu.3]\npcie_width = 8", root=root))


def test_unsupported_values_are_not_evaluated(host):
    calls = [f"nvmlDeviceGet{name}" for name in ("CurrPcieLinkGeneration", "CurrPcieLinkWidth", "PcieReplayCounter")]
    text = "".join(f"[gpu.{n}]\nunsupported = {calls}\n" for n in range(8)).replace("'", '"')
    assert run_check(gpu_pcie, host(text)) == []


def test_machine_without_gpus_gives_nothing(tmp_path):
    assert run_check(gpu_pcie, Host(str(tmp_path))) == []


@pytest.mark.parametrize(
    ("setting", "number"), [("pcie_width", 63), ("pcie_width", 2**32 - 1), ("pcie_generation", 15)]
)
def test_value_above_maximum_fails_run_and_hides_no_other_finding(host, setting, number):
    results: list[Any] = []
    text = f"[gpu.2]\n{setting} = {number}\n[gpu.3]\npcie_width = 8\n"
    with pytest.raises(ValueError, match=f"GPU {fake_pci_gpus('dgx-h100')[2]}: .*: {number}, but the maximum is"):
        results.extend(gpu_pcie.run(host(text), Config(), History({}, NOW, BOOT)))
    assert codes([item for item in results if isinstance(item, Finding)]) == ["gpu_pcie/lanes"]


@pytest.mark.parametrize("setting", ["width", "generation"])
@pytest.mark.parametrize("number", [0, 63, 2**32 - 1])
def test_invalid_maximum_fails_run(host, setting, number):
    text = f"[gpu.3]\npcie_{setting} = {min(number, 63)}\npcie_max_{setting} = {number}\n{BUSY}"
    with pytest.raises(ValueError, match=f"the maximum {number} is not valid"):
        run_check(gpu_pcie, host(text))


def test_nvml_error_fails_run(host):
    with pytest.raises(NvmlError):
        run_check(gpu_pcie, host('gpu.3.errors = { nvmlDeviceGetPcieReplayCounter = "Unknown" }'))


# --- replays


@pytest.mark.parametrize(
    ("generation", "lanes", "limit"),
    [(1, 16, 3), (2, 16, 5), (3, 16, 8), (4, 16, 16), (5, 16, 31), (6, 16, 62), (7, 16, 62), (3, 8, 4), (1, 1, 1)],
)
def test_replays_above_limit_of_generation_and_lanes_warn(host, generation, lanes, limit):
    link = f"pcie_generation = {generation}\npcie_max_generation = {generation}\n"
    link += f"pcie_width = {lanes}\npcie_max_width = {lanes}\n"
    assert replay_findings(host, 100, 100 + 5 * limit, more=link) == []
    (finding,) = replay_findings(host, 100, 100 + 5 * limit + 1, more=link)
    assert (finding.code, finding.severity, finding.subject) == ("gpu_pcie/replays", Severity.WARNING, PCI)
    assert (finding.clears, finding.window_seconds) == (Clears.WINDOW, 86400.0)
    assert f"(limit {limit})" in finding.message


def test_idle_link_uses_limit_of_earlier_link_state(host):
    assert replay_findings(host, 0, 100, more="pcie_generation = 1\n") == []


def test_old_replays_and_restarted_counter_give_no_finding(host):
    assert replay_findings(host, 10_000) == []
    assert replay_findings(host, 10_000, 10_000) == []
    assert replay_findings(host, 10_000, 9) == []
    assert replay_findings(host, 400, 150, interval=40.0) == [], "a GPU reset, which trains the link"


def test_few_replays_within_seconds_are_no_rate(host):
    assert replay_findings(host, 0, 30, interval=2.0) == []
    assert len(replay_findings(host, 0, 32, interval=2.0)) == 1


@pytest.mark.parametrize("property_name", ["LinkGeneration", "LinkWidth"])
def test_link_of_unknown_state_has_no_replay_limit(host, property_name):
    more = f'unsupported = ["nvmlDeviceGetCurrPcie{property_name}", "nvmlDeviceGetMaxPcie{property_name}"]\n'
    assert replay_findings(host, 0, 10_000, more=more) == []


# --- stories


def test_missing_lanes_drain_without_requeue_until_reboot_restores_them(host):
    narrow = host(f"[gpu.3]\npcie_width = 8\n{BUSY}")
    story = Story(gpu_pcie).run_check(host()).run_check(narrow)
    assert not story.drained  # not yet confirmed
    story.run_check(narrow, minutes=2)
    assert (story.drained, story.requeued) == (True, False)
    idle = host("[gpu.3]\npcie_width = 8\npcie_generation = 1\n")
    story.run_checks(idle, 100)  # the load is gone, and with it the evidence of the fault
    assert story.drained
    story.run_checks(host(), 100)  # lanes that return without a repair disappear again
    assert story.drained
    assert not story.reboot().run_check(host()).drained


def test_lanes_missing_after_reboot_need_operator(host):
    narrow = host("[gpu.3]\npcie_width = 8")
    story = Story(gpu_pcie, Config(lanes=16)).run_check(narrow).run_check(narrow).reboot().run_checks(narrow, 3)
    assert story.drained
    assert story.reboot().run_checks(host(), 3).drained
    assert not story.repaired("gpu_pcie/lanes").run_check(host()).drained


def test_gpu_passed_to_guest_has_no_expected_lanes(host):
    on_root_bus = host('pci = ["0000:00:1e.0"]\n[gpu.0]\npcie_width = 8\n')
    assert findings(gpu_pcie, on_root_bus) == []
    (finding,) = findings(gpu_pcie, on_root_bus, Config(lanes=16))
    assert finding.severity is Severity.DEGRADED


def test_lanes_restored_within_two_minutes_clear(host):
    narrow = host("[gpu.3]\npcie_width = 8")
    story = Story(gpu_pcie).run_check(narrow).run_check(host(), minutes=2).run_check(narrow)
    assert (story.drained, story.codes) == (False, [])


@pytest.mark.parametrize("ending", ["reboot", "a clean day"])
def test_lower_generation_never_drains_and_clears_by_reboot_or_clean_day(host, ending):
    slow = host(f"[gpu.3]\npcie_generation = 3\n{BUSY}")
    story = Story(gpu_pcie).run_checks(slow, 50)
    assert (story.drained, story.codes) == (False, ["gpu_pcie/generation"])
    assert story.run_checks(host(), 280).codes == ["gpu_pcie/generation"]
    assert (story.reboot() if ending == "reboot" else story.run_checks(host(), 12)).codes == []


def test_replays_never_drain_and_clear_after_clean_day(host):
    story = Story(gpu_pcie)
    for count in range(0, 10_000, 1000):
        story.run_check(host(f"gpu.3.pcie_replays = {count}"))
    assert (story.drained, story.codes) == (False, ["gpu_pcie/replays"])
    still = host("gpu.3.pcie_replays = 9000")
    assert story.run_checks(still, 280).codes == ["gpu_pcie/replays"]
    assert story.run_checks(still, 12).codes == []


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (Config(busy_share=0.0), "busy_share"),
        (Config(lanes=-1), "lanes"),
        (Config(lanes=33), "lanes"),
        (Config(busy_share=50.0), "busy_share"),
        (Config(lane_replays_per_minute=()), "lane_replays_per_minute"),
        (Config(lane_replays_per_minute=(1.0, -1.0)), "lane_replays_per_minute"),
        (Config(), ""),
    ],
)
def test_validate_rejects_invalid_settings(config, setting):
    assert (validate(config) or "").partition(":")[0] == setting
