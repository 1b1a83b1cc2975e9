"""gpu_pcie: lanes, generation and replays of the PCI Express links of GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_gpus import fake_pci_gpus
from fakes import BOOT, NOW, codes, findings, healthy_gpus, observed, rounds, run_check
from story import Story
from trees import pci_device

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


def replays(host, *counts: int, apart: float = 300.0, more: str = "") -> list[Finding]:
    hosts = [host(f"[gpu.3]\npcie_replays = {count}\n{more}") for count in counts]
    return [item for item in rounds(gpu_pcie, hosts, apart=apart) if isinstance(item, Finding)]


@pytest.mark.parametrize("profile", ["dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200"])
def test_a_healthy_machine_gives_no_finding(host, profile):
    given = run_check(gpu_pcie, host(profile=profile))
    assert [item.value for item in observed(given, "gpu_pcie_link_lanes")] == [16] * 8
    assert len([*observed(given, "gpu_pcie_link_generation")]) == 8
    assert len([*observed(given, "gpu_pcie_replays_total")]) == 8
    assert [item for item in given if isinstance(item, Finding)] == []


@pytest.mark.parametrize("lanes", [0, 1, 4, 8])
@pytest.mark.parametrize("more", ["", BUSY, f"pcie_generation = 1\n{BUSY}"])
@pytest.mark.parametrize(("config", "severity"), [(Config(), Severity.WARNING), (Config(lanes=16), Severity.DEGRADED)])
def test_missing_lanes_warn_after_two_minutes_and_are_degraded_where_more_are_known(
    host, lanes, more, config, severity
):
    found = findings(gpu_pcie, host(f"[gpu.3]\npcie_width = {lanes}\n{more}"), config)
    finding = found[-1]
    assert (finding.code, finding.subject, finding.severity) == ("gpu_pcie/lanes", PCI, severity)
    assert (finding.clears, finding.confirm_seconds, finding.window_seconds) == (Clears.REBOOT, 120.0, 0.0)
    assert finding.message == f"the PCIe link has {lanes} of 16 lanes"


def lanes_in_turn(host, *widths: int, config: Config | None = None) -> list[tuple[str, Severity]]:
    """Return the lane findings of the last of several rounds of one boot."""
    given = rounds(gpu_pcie, [host(f"[gpu.3]\npcie_width = {width}") for width in widths], config)
    return [(f.message, f.severity) for f in given if isinstance(f, Finding)]


def test_a_link_that_had_more_lanes_in_this_boot_is_degraded_however_long_ago(host):
    assert lanes_in_turn(host, 16, 8) == [("the PCIe link has 8 of 16 lanes", Severity.DEGRADED)]
    assert lanes_in_turn(host, 16, 8, 8, 8) == [("the PCIe link has 8 of 16 lanes", Severity.DEGRADED)]
    assert lanes_in_turn(host, 8, 4) == [("the PCIe link has 4 of 8 lanes", Severity.DEGRADED)]
    assert lanes_in_turn(host, 4, 8) == [("the PCIe link has 8 of 16 lanes", Severity.WARNING)]
    assert lanes_in_turn(host, 8, 16) == []


def test_lanes_of_the_boot_before_are_not_of_this_one(host):
    narrow = host("[gpu.3]\npcie_width = 8")
    story = Story(gpu_pcie).look(host()).reboot().looks(narrow, 3)
    assert (story.codes, story.drained) == (["gpu_pcie/lanes"], False)


def test_a_machine_with_fewer_lanes_by_its_settings_is_degraded_below_them_and_else_silent(host):
    assert lanes_in_turn(host, 8, config=Config(lanes=8)) == []
    assert lanes_in_turn(host, 4, config=Config(lanes=8)) == [("the PCIe link has 4 of 8 lanes", Severity.DEGRADED)]


def test_a_link_that_had_more_lanes_in_this_boot_than_its_settings_say_warns(host):
    """A site that sets 8 lanes accepts 8, so no drain. But this GPU had more lanes and lost them."""
    given = lanes_in_turn(host, 16, 8, config=Config(lanes=8))
    assert given == [("the PCIe link has 8 of 16 lanes", Severity.WARNING)]
    given = lanes_in_turn(host, 16, 4, config=Config(lanes=8))
    assert given == [("the PCIe link has 4 of 8 lanes", Severity.DEGRADED)]


def test_a_profile_that_guesses_fewer_lanes_silences_nothing(host):
    config = Config(lanes=8, guessed=("lanes",))
    assert lanes_in_turn(host, 8, config=config) == [("the PCIe link has 8 of 16 lanes", Severity.WARNING)]
    assert lanes_in_turn(host, 16, 8, config=config) == [("the PCIe link has 8 of 16 lanes", Severity.DEGRADED)]


def test_story_the_remedy_of_a_machine_that_is_built_so_is_one(host):
    """The documentation recommends this: set `lanes` and run `healthd repaired`."""
    narrow = host("[gpu.3]\npcie_width = 8")
    story = Story(gpu_pcie).looks(narrow, 3)
    assert story.codes == ["gpu_pcie/lanes"]
    story.config = Config(lanes=8)
    story.repaired("gpu_pcie/lanes").looks(narrow, 3)
    assert (story.codes, story.drained) == ([], False)


def test_more_lanes_than_card_and_slot_can_have_are_nobodys_to_miss(host, tmp_path):
    root = in_slot(tmp_path, "8")
    assert findings(gpu_pcie, host("[gpu.3]\npcie_width = 8", root=root), Config(lanes=16)) == []


@pytest.mark.parametrize("name", ["dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200"])
def test_the_profile_of_a_dgx_knows_its_lanes_and_what_card_and_slot_confirm_drains(host, name):
    lanes = toml.parse(Path(PROFILES, f"{name}.toml").read_text())["checks"]["gpu_pcie"]["lanes"]
    config = Config(lanes=lanes, guessed=("lanes",))
    (finding,) = findings(gpu_pcie, host("[gpu.3]\npcie_width = 8", profile=name), config)
    assert as_configured(finding, config).severity is Severity.DEGRADED


def test_the_baseline_has_the_lanes_that_all_gpus_have_and_none_that_look_broken(host, tmp_path):
    def written(text: str = "", root: str = "/nonexistent") -> list[Any]:
        return [getattr(given, "value", given) for given in gpu_pcie.baseline(host(text, root=root), Config())]

    assert written() == [16]
    assert written("[gpu.3]\npcie_width = 8") == [LeftOut("gpu_pcie", f"GPU {PCI} has 8 of 16 lanes", "lanes")]
    assert written("[gpu.3]\npcie_width = 8", in_slot(tmp_path, "8")) == [
        LeftOut("gpu_pcie", "GPUs have 8 or 16 lanes", "lanes")
    ]
    assert written('pci = ["0000:00:1e.0"]\n[gpu.0]\npcie_width = 8\n') == [8]
    assert written('pci = ["0000:1b:00.0"]\n[gpu.0]\nunsupported = ["nvmlDeviceGetCurrPcieLinkWidth"]') == []


def test_a_lower_generation_of_a_gpu_that_works_warns(host):
    (finding,) = findings(gpu_pcie, host(f"[gpu.3]\npcie_generation = 3\n{BUSY}"))
    assert (finding.code, finding.severity, finding.clears) == (
        "gpu_pcie/generation",
        Severity.WARNING,
        Clears.REBOOT,
    )
    assert finding.message == "the PCIe link runs at generation 3 of 5 while the GPU is busy"


@pytest.mark.parametrize("lanes", [1, 8, 16])
@pytest.mark.parametrize("percent", [0, 49])
def test_an_idle_gpu_may_lower_its_generation_and_its_lanes(host, lanes, percent):
    text = f"[gpu.3]\npcie_generation = 1\npcie_width = {lanes}\nutilization_percent = {percent}\n"
    assert findings(gpu_pcie, host(text)) == []


def test_with_mig_nobody_knows_whether_it_works_so_only_a_link_at_full_generation_is_judged(host):
    slow = "[gpu.3]\nmig = true\npcie_generation = 1\npcie_width = 8\n"
    assert findings(gpu_pcie, host(slow)) == []
    assert codes(findings(gpu_pcie, host("[gpu.3]\nmig = true\npcie_width = 8\n"))) == ["gpu_pcie/lanes"]


def test_a_slot_or_a_machine_that_cannot_do_more_is_no_fault(host):
    text = f"[gpu.3]\npcie_width = 8\npcie_max_width = 8\npcie_generation = 4\npcie_max_generation = 4\n{BUSY}"
    assert findings(gpu_pcie, host(text)) == []


def in_slot(tmp_path: Path, lanes: str) -> str:
    """Create a tree with GPU 3 below a port with this number of lanes."""
    pci_device(tmp_path, "0000:60:01.0", "0x060400", vendor="0x8086", max_link_width=lanes)
    pci_device(tmp_path, PCI, "0x030200", "0000:60:01.0")
    return str(tmp_path)


@pytest.mark.parametrize(("slot", "lanes"), [("8", 8), ("16", 16), ("0", 16), ("255", 16)])
def test_a_card_of_16_lanes_has_as_many_as_its_slot(host, tmp_path, slot, lanes):
    """A T4 in a riser slot with 8 lanes: nvidia-smi shows a maximum of 16x and a current width of 8x."""
    root = in_slot(tmp_path, slot)
    for now in (4, 8, 16):
        found = findings(gpu_pcie, host(f"[gpu.3]\npcie_width = {now}", root=root))
        assert [f.message for f in found] == ([f"the PCIe link has {now} of {lanes} lanes"] if now < lanes else [])


@pytest.mark.parametrize("text", ["", "N/A", "Unknown", "x16", "18446744073709551616"])
def test_a_slot_that_says_something_else_is_unknown_and_only_asked_where_lanes_are_missing(host, tmp_path, text):
    root = in_slot(tmp_path, text)
    assert findings(gpu_pcie, host(root=root)) == []
    with pytest.raises(ValueError, match=r"0000:60:01\.0/max_link_width: not a number of lanes"):
        findings(gpu_pcie, host("[gpu.3]\npcie_width = 8", root=root))


def test_what_is_not_told_is_not_judged(host):
    calls = [f"nvmlDeviceGet{name}" for name in ("CurrPcieLinkGeneration", "CurrPcieLinkWidth", "PcieReplayCounter")]
    text = "".join(f"[gpu.{n}]\nunsupported = {calls}\n" for n in range(8)).replace("'", '"')
    assert run_check(gpu_pcie, host(text)) == []


def test_a_machine_without_gpus_gives_nothing(tmp_path):
    assert run_check(gpu_pcie, Host(str(tmp_path))) == []


@pytest.mark.parametrize(
    ("setting", "number"), [("pcie_width", 63), ("pcie_width", 2**32 - 1), ("pcie_generation", 15)]
)
def test_more_than_there_can_be_is_a_dead_link_thus_unknown_and_hides_no_other_gpu(host, setting, number):
    seen: list[Any] = []
    text = f"[gpu.2]\n{setting} = {number}\n[gpu.3]\npcie_width = 8\n"
    with pytest.raises(ValueError, match=f"GPU {fake_pci_gpus('dgx-h100')[2]}: .*: {number}, but the maximum is"):
        seen.extend(gpu_pcie.run(host(text), Config(), History({}, NOW, BOOT)))
    assert codes([item for item in seen if isinstance(item, Finding)]) == ["gpu_pcie/lanes"]


@pytest.mark.parametrize("setting", ["width", "generation"])
@pytest.mark.parametrize("number", [0, 63, 2**32 - 1])
def test_a_maximum_that_no_link_has_is_unknown_and_no_missing_lane(host, setting, number):
    text = f"[gpu.3]\npcie_{setting} = {min(number, 63)}\npcie_max_{setting} = {number}\n{BUSY}"
    with pytest.raises(ValueError, match=f"the maximum {number} is not valid"):
        run_check(gpu_pcie, host(text))


def test_an_error_is_a_failure(host):
    with pytest.raises(NvmlError):
        run_check(gpu_pcie, host('gpu.3.errors = { nvmlDeviceGetPcieReplayCounter = "Unknown" }'))


# --- replays


@pytest.mark.parametrize(
    ("generation", "lanes", "limit"),
    [(1, 16, 3), (2, 16, 5), (3, 16, 8), (4, 16, 16), (5, 16, 31), (6, 16, 62), (7, 16, 62), (3, 8, 4), (1, 1, 1)],
)
def test_more_replays_a_minute_than_its_generation_and_lanes_allow_warn(host, generation, lanes, limit):
    link = f"pcie_generation = {generation}\npcie_max_generation = {generation}\n"
    link += f"pcie_width = {lanes}\npcie_max_width = {lanes}\n"
    assert replays(host, 100, 100 + 5 * limit, more=link) == []
    (finding,) = replays(host, 100, 100 + 5 * limit + 1, more=link)
    assert (finding.code, finding.severity, finding.subject) == ("gpu_pcie/replays", Severity.WARNING, PCI)
    assert (finding.clears, finding.window_seconds) == (Clears.WINDOW, 86400.0)
    assert f"(limit {limit})" in finding.message


def test_a_link_that_went_idle_since_is_judged_by_what_it_had(host):
    assert replays(host, 0, 100, more="pcie_generation = 1\n") == []


def test_old_replays_and_a_counter_that_starts_again_are_nothing(host):
    assert replays(host, 10_000) == []
    assert replays(host, 10_000, 10_000) == []
    assert replays(host, 10_000, 9) == []
    assert replays(host, 400, 150, apart=40.0) == [], "a GPU reset, which trains the link"


def test_a_few_replays_between_two_looks_within_seconds_are_no_rate(host):
    assert replays(host, 0, 30, apart=2.0) == []
    assert len(replays(host, 0, 32, apart=2.0)) == 1


@pytest.mark.parametrize("what", ["LinkGeneration", "LinkWidth"])
def test_a_link_of_which_nothing_is_known_has_no_limit(host, what):
    more = f'unsupported = ["nvmlDeviceGetCurrPcie{what}", "nvmlDeviceGetMaxPcie{what}"]\n'
    assert replays(host, 0, 10_000, more=more) == []


# --- stories


def test_missing_lanes_drain_without_a_requeue_until_a_reboot_shows_them_again(host):
    narrow = host(f"[gpu.3]\npcie_width = 8\n{BUSY}")
    story = Story(gpu_pcie).look(host()).look(narrow)
    assert not story.drained  # not yet confirmed
    story.look(narrow, minutes=2)
    assert (story.drained, story.requeued) == (True, False)
    idle = host("[gpu.3]\npcie_width = 8\npcie_generation = 1\n")
    story.looks(idle, 100)  # the load is gone, and with it the evidence of the fault
    assert story.drained
    story.looks(host(), 100)  # lanes that return without a repair disappear again
    assert story.drained
    assert not story.reboot().look(host()).drained


def test_lanes_that_are_missing_after_the_reboot_too_wait_for_an_engineer(host):
    narrow = host("[gpu.3]\npcie_width = 8")
    story = Story(gpu_pcie, Config(lanes=16)).look(narrow).look(narrow).reboot().looks(narrow, 3)
    assert story.drained
    assert story.reboot().looks(host(), 3).drained
    assert not story.repaired("gpu_pcie/lanes").look(host()).drained


def test_a_gpu_that_was_given_to_a_virtual_machine_has_the_lanes_that_it_has(host):
    on_root_bus = host('pci = ["0000:00:1e.0"]\n[gpu.0]\npcie_width = 8\n')
    assert findings(gpu_pcie, on_root_bus) == []
    (finding,) = findings(gpu_pcie, on_root_bus, Config(lanes=16))
    assert finding.severity is Severity.DEGRADED


def test_lanes_that_are_back_within_two_minutes_are_forgotten(host):
    narrow = host("[gpu.3]\npcie_width = 8")
    story = Story(gpu_pcie).look(narrow).look(host(), minutes=2).look(narrow)
    assert (story.drained, story.codes) == (False, [])


@pytest.mark.parametrize("way", ["reboot", "a clean day"])
def test_a_lower_generation_never_drains_and_ends_with_a_reboot_or_a_clean_day_under_load(host, way):
    slow = host(f"[gpu.3]\npcie_generation = 3\n{BUSY}")
    story = Story(gpu_pcie).looks(slow, 50)
    assert (story.drained, story.codes) == (False, ["gpu_pcie/generation"])
    assert story.looks(host(), 280).codes == ["gpu_pcie/generation"]
    assert (story.reboot() if way == "reboot" else story.looks(host(), 12)).codes == []


def test_replays_never_drain_and_are_forgotten_after_a_clean_day(host):
    story = Story(gpu_pcie)
    for count in range(0, 10_000, 1000):
        story.look(host(f"gpu.3.pcie_replays = {count}"))
    assert (story.drained, story.codes) == (False, ["gpu_pcie/replays"])
    still = host("gpu.3.pcie_replays = 9000")
    assert story.looks(still, 280).codes == ["gpu_pcie/replays"]
    assert story.looks(still, 12).codes == []


@pytest.mark.parametrize(
    ("config", "sentence"),
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
def test_settings_without_sense_are_refused(config, sentence):
    assert (validate(config) or "").partition(":")[0] == sentence
