"""gpu_nvlink: NVLinks that are down, and growing error counts."""

from __future__ import annotations

import pytest
from fake_gpus import fake_pci_gpus
from fakes import BOOT, NOW, codes, findings, healthy_gpus, observed, rounds, run_check
from story import Story

from healthd.checks import gpu_nvlink
from healthd.checks.gpu_nvlink import Config
from healthd.common.history import History
from healthd.common.model import Clears, Finding, Severity
from healthd.nvidia.nvml import NvmlError, _unpacked_ber

PCI = fake_pci_gpus("dgx-h100")[3]
PCIE = 'pci = ["0000:17:00.0", "0000:65:00.0", "0000:ca:00.0"]\n'
healthy = healthy_gpus(Config(links=18), profile="dgx-b200")


def grown(host, first, then, profile="dgx-h100", **kwargs):
    hosts = [host(text, profile=profile) for text in (first, then)]
    return [item for item in rounds(gpu_nvlink, hosts, **kwargs) if isinstance(item, Finding)]


@pytest.mark.parametrize(("profile", "links"), [("dgx-a100", 12), ("dgx-h100", 18), ("dgx-h200", 18), ("dgx-b200", 18)])
def test_a_healthy_machine_has_all_links_and_no_finding(host, profile, links):
    given = run_check(gpu_nvlink, host(profile=profile))
    assert [item.value for item in observed(given, "gpu_nvlinks_active")] == [links] * 8
    assert [item for item in given if isinstance(item, Finding)] == []


def test_links_that_its_peers_have_are_critical_after_a_minute_until_they_are_back(host):
    (finding,) = findings(gpu_nvlink, host("gpu.3.nvlink_inactive = [5, 17]"))
    assert (finding.code, finding.subject) == ("gpu_nvlink/inactive", PCI)
    assert (finding.severity, finding.clears, finding.confirm_seconds) == (Severity.CRITICAL, Clears.PASS, 60.0)
    assert finding.message == "2 NVLinks are down, active on other GPUs; down: 5, 17"


def test_one_link_is_one_link(host):
    (finding,) = findings(gpu_nvlink, host("gpu.3.nvlink_inactive = [5]"))
    assert finding.message == "1 NVLink is down, active on other GPUs; down: 5"


def test_links_of_which_the_driver_no_longer_tells_are_down_too(host):
    (finding,) = findings(gpu_nvlink, host("gpu.3.nvlinks = 16"))
    assert finding.message == "2 NVLinks are down, active on other GPUs; down: 16, 17"


def test_a_link_of_which_the_driver_tells_nothing_hides_none_of_those_behind_it(host):
    text = "[gpu.3]\nnvlink_untold = [7]\nnvlink_inactive = [17]\nnvlink_crc = {16 = 5}\n"
    given = run_check(gpu_nvlink, host(text))
    assert [item.value for item in observed(given, "gpu_nvlinks_active")] == [18, 18, 18, 16, 18, 18, 18, 18]
    (finding,) = (item for item in given if isinstance(item, Finding))
    assert finding.message == "2 NVLinks are down, active on other GPUs; down: 7, 17"


def test_links_that_the_driver_counts_and_tells_nothing_of_at_the_end_are_none(host):
    text = "".join(f"[gpu.{n}]\nnvlink_untold = [16, 17]\n" for n in range(8))
    given = run_check(gpu_nvlink, host(text))
    assert [item.value for item in observed(given, "gpu_nvlinks_active")] == [16] * 8
    assert [item for item in given if isinstance(item, Finding)] == []


def test_a_gpu_on_a_baseboard_without_any_active_link_is_critical(host):
    found = findings(gpu_nvlink, host(f"gpu.3.nvlink_inactive = {[*range(18)]}"))
    assert [f.subject for f in found] == [PCI]


@pytest.mark.parametrize(
    "setting", ["nvlinks = 0", 'unsupported = ["nvmlDeviceGetFieldValues", "nvmlDeviceGetNvLinkState"]']
)
@pytest.mark.parametrize("profile", ["dgx-a100", "dgx-h100"])
def test_a_gpu_on_a_baseboard_of_whose_links_the_driver_tells_nothing_is_critical(host, profile, setting):
    (finding,) = findings(gpu_nvlink, host(f"[gpu.3]\n{setting}", profile=profile))
    assert (finding.code, finding.subject) == ("gpu_nvlink/inactive", fake_pci_gpus(profile)[3])
    assert finding.message.startswith("0 NVLinks are active, other GPUs have 1")


def v100(*active):
    """V100 topology from `nvidia-smi nvlink --status` at RWTH (help.itc.rwth-aachen.de): each GPU has 6 links."""
    pci = ", ".join(f'"0000:{61 + n}:00.0"' for n in range(len(active)))
    cards = (
        f'[gpu.{n}]\nname = "Tesla V100-SXM2-16GB"\nnvlinks = 6\nnvlink_inactive = {sorted({*range(6)} - {*links})}\n'
        for n, links in enumerate(active)
    )
    return f"pci = [{pci}]\n{''.join(cards)}"


def test_gpus_that_are_wired_to_each_other_by_other_links_are_healthy(host):
    assert findings(gpu_nvlink, host(v100((0, 2), (1, 2)), profile="dgx-a100")) == []


def test_of_gpus_that_are_wired_to_each_other_one_with_fewer_links_is_critical(host):
    (finding,) = findings(gpu_nvlink, host(v100((0, 1, 2, 3), (2, 3, 4), (1, 2, 4, 5)), profile="dgx-a100"))
    assert (finding.subject, finding.message) == ("0000:62:00.0", "3 NVLinks are active, other GPUs have 4")


def test_links_that_no_gpu_has_are_not_missed(host):
    text = "".join(f"[gpu.{n}]\nnvlink_inactive = [17]\n" for n in range(8))
    assert findings(gpu_nvlink, host(text)) == []
    assert len(findings(gpu_nvlink, host(text), Config(links=18))) == 8


def test_a_number_of_links_can_be_expected(host):
    assert findings(gpu_nvlink, host(), Config(links=18)) == []
    (finding,) = findings(gpu_nvlink, host("gpu.3.nvlink_inactive = [5]"), Config(links=18))
    assert finding.message == "17 of 18 NVLinks are active; down: 5"
    (fewer,) = findings(gpu_nvlink, host("gpu.3.nvlink_inactive = [7, 17]"), Config(links=18))
    assert fewer.message == "16 of 18 NVLinks are active; down: 7, 17"


def test_pcie_cards_without_links_give_nothing(host):
    text = PCIE + "".join(f'[gpu.{n}]\nname = "NVIDIA L40S"\nnvlinks = 0\n' for n in range(3))
    assert run_check(gpu_nvlink, host(text)) == []


@pytest.mark.parametrize(
    "name", ["A100 80GB PCIe", "H100 PCIe", "H100 NVL", "H200 NVL", "A800 40GB Active", "A30", "RTX A6000"]
)
def test_a_pcie_card_without_a_bridge_beside_two_that_have_one_is_no_fault(host, name):
    text = PCIE + "".join(f'[gpu.{n}]\nname = "NVIDIA {name}"\nnvlinks = 12\n' for n in range(3))
    text += f"nvlink_inactive = {[*range(12)]}\n"
    assert findings(gpu_nvlink, host(text, profile="dgx-a100")) == []


def test_half_a_bridge_is_a_fault(host):
    text = PCIE + "".join(f'[gpu.{n}]\nname = "NVIDIA A100 80GB PCIe"\nnvlinks = 12\n' for n in range(3))
    assert len(findings(gpu_nvlink, host(f"{text}nvlink_inactive = [0]\n", profile="dgx-a100"))) == 1


def test_a_gpu_of_another_model_is_no_peer(host):
    assert findings(gpu_nvlink, host('[gpu.3]\nname = "NVIDIA T1000"\nnvlinks = 0')) == []


def test_under_mig_there_is_no_nvlink_to_judge(host):
    text = "".join(f"[gpu.{n}]\nmig = true\nnvlink_inactive = [1, 2]\n" for n in range(4))
    assert findings(gpu_nvlink, host(text)) == []


@pytest.mark.parametrize("kind", ["replay", "recovery"])
@pytest.mark.parametrize("profile", ["dgx-a100", "dgx-h100"])
def test_replays_and_recoveries_that_grew_are_degraded_until_a_reset_or_a_clean_day(host, kind, profile):
    hosts = [host(f"gpu.3.nvlink_{kind} = {{ 4 = {n} }}", profile) for n in (7, 9)]
    (finding,) = (item for item in rounds(gpu_nvlink, hosts) if isinstance(item, Finding))
    assert (finding.code, finding.severity) == (f"gpu_nvlink/{kind}", Severity.DEGRADED)
    assert (finding.clears, finding.window_seconds) == (Clears.GPU_RESET, 86400.0)
    assert finding.message.startswith(f"2 new NVLink {kind} errors")
    assert "link 4: 9" in finding.message


def test_old_errors_that_do_not_grow_are_no_finding(host):
    text = "[gpu.3]\nnvlink_replay = { 4 = 7 }\nnvlink_crc = { 4 = 100000 }"
    assert findings(gpu_nvlink, host(text)) == []
    assert grown(host, text, text) == []


def test_counters_that_start_again_at_zero_are_no_finding(host):
    assert grown(host, "gpu.3.nvlink_replay = { 4 = 7 }", "") == []


@pytest.mark.parametrize("kind", ["replay", "recovery", "crc"])
def test_what_training_the_links_anew_after_a_reset_counts_is_no_fault(host, kind):
    hosts = [host(f"gpu.3.nvlink_{kind} = {{ 4 = {n} }}") for n in (90, 2, 2, 3)]
    assert [item for item in rounds(gpu_nvlink, hosts[:2]) if isinstance(item, Finding)] == []
    assert codes([item for item in rounds(gpu_nvlink, hosts) if isinstance(item, Finding)]) == [f"gpu_nvlink/{kind}"]


def test_a_few_crc_errors_warn_and_a_hundred_a_second_are_degraded(host):
    few = grown(host, "", "gpu.3.nvlink_crc = { 2 = 29999 }")
    many = grown(host, "", "gpu.3.nvlink_crc = { 2 = 30000 }")
    assert [(f.code, f.severity) for f in few] == [("gpu_nvlink/crc", Severity.WARNING)]
    assert [(f.code, f.severity) for f in many] == [("gpu_nvlink/crc_rate", Severity.DEGRADED)]


def test_errors_of_several_links_of_a_gpu_are_one_finding(host):
    found = grown(host, "", "gpu.3.nvlink_replay = { 2 = 1, 11 = 3 }")
    assert codes(found) == ["gpu_nvlink/replay"]
    assert found[0].message.startswith("4 new")
    assert "link 2: 1, link 11: 3" in found[0].message


def test_a_link_that_no_longer_answers_is_no_growth(host):
    down = "[gpu.3]\nnvlinks = 17\nnvlink_replay = { 4 = 2 }"
    found = grown(host, "gpu.3.nvlink_replay = { 4 = 2, 17 = 500 }", down)
    assert codes(found) == ["gpu_nvlink/inactive"]


def test_gpu_nvlink_grades_recoveries_and_damaged_packets_of_blackwell(host):
    (finding,) = grown(
        host, "gpu.3.nvlink_recovery = { 4 = 7 }", "gpu.3.nvlink_recovery = { 4 = 9 }", profile="dgx-b200"
    )
    assert (finding.code, finding.severity) == ("gpu_nvlink/recovered", Severity.WARNING)
    (finding,) = grown(host, "", "gpu.3.nvlink_recovery_failed = { 4 = 1 }", profile="dgx-b200")
    assert (finding.code, finding.severity) == ("gpu_nvlink/recovery_failed", Severity.DEGRADED)
    (finding,) = grown(host, "", "gpu.3.nvlink_packet_errors = { 4 = 9 }", profile="dgx-b200")
    assert (finding.code, finding.severity) == ("gpu_nvlink/packet", Severity.WARNING)
    assert finding.message == "9 new NVLink packet errors (since the driver was loaded: link 4: 9)"


@pytest.mark.parametrize(
    ("setting", "is_above"),
    [
        ("nvlink_ber = { 4 = 1e-12 }", False),
        ("nvlink_ber = { 4 = 1e-13 }", False),
        ("nvlink_ber = { 4 = 2e-12, 5 = 1e-13 }", True),
        ("nvlink_ber = { 4 = 5e-7 }", True),
        ("nvlink_symbol_ber = { 4 = 1e-239 }", False),
        ("nvlink_symbol_ber = { 4 = 2e-237 }", True),
        ("nvlink_symbol_ber = { 4 = 3e-12 }", True),
    ],
)
def test_gpu_nvlink_warns_above_nvidias_bit_error_limits(host, setting, is_above):
    found = findings(gpu_nvlink, host(f"gpu.3.{setting}", profile="dgx-b200"))
    assert [(f.code, f.severity, f.clears) for f in found] == (
        [("gpu_nvlink/bit_errors", Severity.WARNING, Clears.PASS)] if is_above else []
    )


def test_gpu_nvlink_needs_two_readings_of_a_bit_error_rate(host):
    bad, good = host("gpu.3.nvlink_ber = { 4 = 1e-5 }", profile="dgx-b200"), host(profile="dgx-b200")
    assert Story(gpu_nvlink).look(bad).looks(good, 3).codes == []
    assert Story(gpu_nvlink).looks(bad, 2).codes == ["gpu_nvlink/bit_errors"]


def test_gpu_nvlink_is_silent_on_a_gpu_without_bit_error_fields(host):
    text = "gpu.3.nvlink_ber = { 4 = 1e-5 }\ngpu.3.unsupported_fields = [220, 222]"
    assert findings(gpu_nvlink, host(text, profile="dgx-b200")) == []


def test_gpu_nvlink_warns_of_recoveries_of_a_driver_that_counts_their_sum_only(host):
    without = "gpu.3.unsupported_fields = [213, 214]\n"
    (finding,) = grown(host, without, without + "gpu.3.nvlink_recovery = { 4 = 2 }", profile="dgx-b200")
    assert (finding.code, finding.severity) == ("gpu_nvlink/recovered", Severity.WARNING)


def test_every_packed_rate_is_decoded_exactly():
    for mantissa in range(16):
        for exponent in range(256):
            assert _unpacked_ber(mantissa << 8 | exponent) == float(f"{mantissa}e-{exponent}")


def test_a_gpu_that_cannot_be_asked_hides_no_other(host):
    text = '[gpu.0]\nerrors = { nvmlDeviceGetFieldValues = "Unknown" }\n[gpu.3]\nnvlink_inactive = [5]'
    given: list[object] = []
    with pytest.raises(NvmlError, match=r"0000:1b:00\.0"):
        given.extend(gpu_nvlink.run(host(text), Config(), History({}, NOW, BOOT)))
    assert [f.subject for f in given if isinstance(f, Finding)] == [PCI]


@pytest.mark.parametrize(
    "config", [Config(links=-1), Config(bit_error_rate=0.0), Config(symbol_bit_error_rate=float("nan"))]
)
def test_settings_that_make_no_sense_are_refused_with_a_sentence(config):
    assert gpu_nvlink.validate(config)


def test_an_error_is_a_failure(host):
    with pytest.raises(NvmlError):
        run_check(gpu_nvlink, host('gpu.3.errors = { nvmlDeviceGetFieldValues = "Unknown" }'))


# --- stories


def test_story_a_link_that_is_down_for_a_minute_requeues_until_it_is_back(host):
    down = host("gpu.3.nvlink_inactive = [5]")
    story = Story(gpu_nvlink).look(host()).look(down)
    assert not story.drained, "the link may be training"
    story.look(down, minutes=1.5)
    assert (story.codes, story.drained, story.requeued) == (["gpu_nvlink/inactive"], True, True)
    story.looks(down, 300).reboot().look(down)
    assert story.drained, "neither a day nor a reboot repairs it"
    story.looks(host(), 3)
    assert (story.codes, story.drained) == ([], False)


def test_story_a_link_that_is_back_within_the_minute_is_no_fault(host):
    story = Story(gpu_nvlink).look(host("gpu.3.nvlink_inactive = [5]")).looks(host(), 3)
    assert (story.conditions, story.drained) == ({}, False)


@pytest.mark.one_python
@pytest.mark.parametrize(
    ("profile", "setting", "code"),
    [
        ("dgx-h100", "nvlink_replay", "gpu_nvlink/replay"),
        ("dgx-h100", "nvlink_recovery", "gpu_nvlink/recovery"),
        ("dgx-b200", "nvlink_recovery_failed", "gpu_nvlink/recovery_failed"),
        ("dgx-h100", "nvlink_crc", "gpu_nvlink/crc_rate"),
    ],
)
def test_story_errors_drain_until_a_reset_and_no_quiet_time_without_load_ends_them(host, profile, setting, code):
    before, after = host(profile=profile), host(f"gpu.3.{setting} = {{ 4 = 90000 }}", profile=profile)
    story = Story(gpu_nvlink).look(before).look(after)
    assert (story.codes, story.drained, story.requeued) == ([code], True, False)
    story.looks(after, 300)
    assert story.drained, "a day without load proves nothing about a link"
    story.reset("0000:1b:00.0").look(after)
    assert story.drained, "that was another GPU"
    story.reset(PCI).looks(before, 2)
    assert (story.codes, story.drained) == ([], False)


def test_story_errors_that_come_again_after_the_reset_drain_again(host):
    counts = [host(f"gpu.3.nvlink_replay = {{ 4 = {n} }}") for n in (0, 9, 12)]
    story = Story(gpu_nvlink).look(counts[0]).look(counts[1]).reset(PCI).looks(counts[0], 2)
    assert not story.drained
    story.look(counts[2])
    assert (story.codes, story.drained) == (["gpu_nvlink/replay"], True)


@pytest.mark.one_python
@pytest.mark.parametrize(
    ("profile", "setting", "code"),
    [
        ("dgx-h100", "nvlink_crc", "gpu_nvlink/crc"),
        ("dgx-b200", "nvlink_packet_errors", "gpu_nvlink/packet"),
        ("dgx-b200", "nvlink_recovery", "gpu_nvlink/recovered"),
    ],
)
def test_story_a_few_errors_never_drain_and_a_clean_day_under_load_ends_them(host, profile, setting, code):
    before, after = host(profile=profile), host(f"gpu.3.{setting} = {{ 4 = 20 }}", profile=profile)
    story = Story(gpu_nvlink).look(before).look(after)
    assert (story.codes, story.drained) == ([code], False)
    story.looks(after, 280)
    assert story.codes == [code], "not yet a day"
    story.looks(after, 10)
    assert story.codes == []


@pytest.mark.one_python
def test_story_too_many_wrong_bits_never_drain_and_pass_with_them(host):
    bad = host("gpu.3.nvlink_ber = { 4 = 1e-5 }", profile="dgx-b200")
    story = Story(gpu_nvlink).looks(bad, 300)
    assert (story.codes, story.drained) == (["gpu_nvlink/bit_errors"], False)
    story.looks(host(profile="dgx-b200"), 3)
    assert story.codes == []


def test_a_link_that_only_one_gpu_lacks_drains_also_where_a_profile_guessed_how_many_there_are(host):
    guessed = Config(links=18, guessed=("links",))
    story = Story(gpu_nvlink, guessed).looks(host("gpu.3.nvlink_inactive = [4]"), 2)
    assert (story.drained, story.requeued) == (True, True)
    assert not story.looks(host(), 2).drained


def test_links_that_all_gpus_lack_and_only_a_profile_names_warn_and_never_drain(host):
    all_lack = "".join(f"gpu.{number}.nvlink_inactive = [4]\n" for number in range(8))
    story = Story(gpu_nvlink, Config(links=18, guessed=("links",))).looks(host(all_lack), 20)
    assert (story.codes, story.drained) == (["gpu_nvlink/inactive"] * 8, False)
