"""gpu_nvlink: NVLinks that are down, and growing error counts."""

from __future__ import annotations

import re

import pytest
from fake_gpus import fake_pci_gpus
from fakes import BOOT, NOW, codes, findings, healthy_gpus, observations_named, run_check, run_rounds, run_until_error
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from story import Story
from trees import add_pci_device, write

from healthd.checks import gpu_nvlink
from healthd.checks.gpu_nvlink import Config
from healthd.common.history import History
from healthd.common.model import Clears, Finding, NothingToCheck, Severity
from healthd.nvidia.nvml import NvmlError, _unpacked_ber

PCI = fake_pci_gpus("dgx-h100")[3]
PCIE = 'pci = ["0000:17:00.0", "0000:65:00.0", "0000:ca:00.0"]\n'
healthy = healthy_gpus(Config(links=18), profile="dgx-b200")


def findings_after_growth(host, first, second, profile="dgx-h100", **kwargs):
    hosts = [host(text, profile=profile) for text in (first, second)]
    return [item for item in run_rounds(gpu_nvlink, hosts, **kwargs) if isinstance(item, Finding)]


@pytest.mark.parametrize(("profile", "links"), [("dgx-a100", 12), ("dgx-h100", 18), ("dgx-h200", 18), ("dgx-b200", 18)])
def test_healthy_machine_has_all_links_and_no_finding(host, profile, links):
    results = run_check(gpu_nvlink, host(profile=profile))
    assert [item.value for item in observations_named(results, "gpu_nvlinks_active")] == [links] * 8
    assert [item for item in results if isinstance(item, Finding)] == []


def test_links_active_on_peers_are_critical_after_a_minute_until_restored(host):
    (finding,) = findings(gpu_nvlink, host("gpu.3.nvlink_inactive = [5, 17]"))
    assert (finding.code, finding.subject) == ("gpu_nvlink/inactive", PCI)
    assert (finding.severity, finding.clears, finding.confirm_seconds) == (Severity.CRITICAL, Clears.PASS, 60.0)
    assert finding.message == "2 NVLinks are down here, but active on other GPUs: links 5, 17"


def test_message_uses_singular_for_one_link(host):
    (finding,) = findings(gpu_nvlink, host("gpu.3.nvlink_inactive = [5]"))
    assert finding.message == "1 NVLink is down here, but active on other GPUs: link 5"


def test_links_not_reported_by_driver_are_down(host):
    (finding,) = findings(gpu_nvlink, host("gpu.3.nvlinks = 16"))
    assert (finding.code, finding.severity) == ("gpu_nvlink/inactive", Severity.CRITICAL)
    expected = "2 NVLinks are not active here, but active on other GPUs; state not reported: links 16, 17"
    assert finding.message == expected


@pytest.mark.parametrize("fields", ["", "unsupported_fields = [165]"])
def test_link_whose_traffic_is_disabled_is_active_and_warns(host, fields):
    results = run_check(gpu_nvlink, host(f"[gpu.3]\nnvlink_traffic_disabled = [5, 17]\n{fields}\n"))
    (finding,) = (item for item in results if isinstance(item, Finding))
    assert (finding.code, finding.subject) == ("gpu_nvlink/traffic_disabled", PCI)
    assert (finding.severity, finding.confirm_seconds) == (Severity.WARNING, 60.0)
    assert finding.message == "the driver has disabled traffic on 2 active NVLinks: links 5, 17"
    assert [item.value for item in observations_named(results, "gpu_nvlinks_active")] == [18] * 8


def test_unreported_link_does_not_hide_later_links(host):
    text = "[gpu.3]\nnvlink_unreported = [7]\nnvlink_inactive = [17]\nnvlink_crc = {16 = 5}\n"
    results = run_check(gpu_nvlink, host(text))
    assert [item.value for item in observations_named(results, "gpu_nvlinks_active")] == [
        18,
        18,
        18,
        16,
        18,
        18,
        18,
        18,
    ]
    (finding,) = (item for item in results if isinstance(item, Finding))
    assert finding.message.endswith("but active on other GPUs; down: link 17; state not reported: link 7")


def test_links_that_no_gpu_reports_are_no_fault_without_nvswitches(host):
    text = "".join(f"[gpu.{n}]\nnvlink_unreported = [16, 17]\n" for n in range(8))
    results = run_check(gpu_nvlink, host(text))
    assert [item.value for item in observations_named(results, "gpu_nvlinks_active")] == [16] * 8
    assert [item for item in results if isinstance(item, Finding)] == []


def test_gpu_on_baseboard_without_active_link_is_critical(host):
    found = findings(gpu_nvlink, host(f"gpu.3.nvlink_inactive = {[*range(18)]}"))
    assert [f.subject for f in found] == [PCI]


@pytest.mark.parametrize(
    "setting", ["nvlinks = 0", 'unsupported = ["nvmlDeviceGetFieldValues", "nvmlDeviceGetNvLinkState"]']
)
@pytest.mark.parametrize("profile", ["dgx-a100", "dgx-h100"])
def test_gpu_on_baseboard_without_reported_links_is_critical(host, profile, setting):
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


def test_gpus_wired_by_different_links_are_healthy(host):
    assert findings(gpu_nvlink, host(v100((0, 2), (1, 2)), profile="dgx-a100")) == []


def test_directly_wired_gpu_with_fewer_links_is_critical(host):
    (finding,) = findings(gpu_nvlink, host(v100((0, 1, 2, 3), (2, 3, 4), (1, 2, 4, 5)), profile="dgx-a100"))
    assert (finding.subject, finding.message) == ("0000:62:00.0", "3 NVLinks are active, other GPUs have 4")


def test_links_inactive_on_all_gpus_are_not_missing(host):
    text = "".join(f"[gpu.{n}]\nnvlink_inactive = [17]\n" for n in range(8))
    assert findings(gpu_nvlink, host(text)) == []
    assert len(findings(gpu_nvlink, host(text), Config(links=18))) == 8


def test_links_setting_is_the_expected_number(host):
    assert findings(gpu_nvlink, host(), Config(links=18)) == []
    (finding,) = findings(gpu_nvlink, host("gpu.3.nvlink_inactive = [5]"), Config(links=18))
    assert finding.message == "17 of 18 NVLinks are active; down: link 5"
    (fewer,) = findings(gpu_nvlink, host("gpu.3.nvlink_inactive = [7, 17]"), Config(links=18))
    assert fewer.message == "16 of 18 NVLinks are active; down: links 7, 17"


def test_pcie_cards_without_links_give_nothing(host):
    text = PCIE + "".join(f'[gpu.{n}]\nname = "NVIDIA L40S"\nnvlinks = 0\n' for n in range(3))
    assert run_check(gpu_nvlink, host(text)) == []


@pytest.mark.parametrize(
    "name", ["A100 80GB PCIe", "H100 PCIe", "H100 NVL", "H200 NVL", "A800 40GB Active", "A30", "RTX A6000"]
)
def test_pcie_card_without_bridge_next_to_bridged_cards_is_no_fault(host, name):
    text = PCIE + "".join(f'[gpu.{n}]\nname = "NVIDIA {name}"\nnvlinks = 12\n' for n in range(3))
    text += f"nvlink_inactive = {[*range(12)]}\n"
    assert findings(gpu_nvlink, host(text, profile="dgx-a100")) == []


def test_half_a_bridge_is_a_fault(host):
    text = PCIE + "".join(f'[gpu.{n}]\nname = "NVIDIA A100 80GB PCIe"\nnvlinks = 12\n' for n in range(3))
    assert len(findings(gpu_nvlink, host(f"{text}nvlink_inactive = [0]\n", profile="dgx-a100"))) == 1


def test_gpu_of_another_model_is_no_peer(host):
    assert findings(gpu_nvlink, host('[gpu.3]\nname = "NVIDIA T1000"\nnvlinks = 0')) == []


def test_links_of_gpu_with_mig_are_ignored(host):
    text = "".join(f"[gpu.{n}]\nmig = true\nnvlink_inactive = [1, 2]\n" for n in range(4))
    assert findings(gpu_nvlink, host(text)) == []


@pytest.mark.parametrize("kind", ["replay", "recovery"])
@pytest.mark.parametrize("profile", ["dgx-a100", "dgx-h100"])
def test_growing_replays_or_recoveries_are_degraded_until_reset_or_clean_day(host, kind, profile):
    hosts = [host(f"gpu.3.nvlink_{kind} = {{ 4 = {n} }}", profile) for n in (7, 9)]
    (finding,) = (item for item in run_rounds(gpu_nvlink, hosts) if isinstance(item, Finding))
    assert (finding.code, finding.severity) == (f"gpu_nvlink/{kind}", Severity.DEGRADED)
    assert (finding.clears, finding.window_seconds) == (Clears.GPU_RESET, 86400.0)
    assert finding.message.startswith(f"2 new NVLink {kind} errors")
    assert "link 4: 9" in finding.message


def test_unchanged_old_errors_give_no_finding(host):
    text = "[gpu.3]\nnvlink_replay = { 4 = 7 }\nnvlink_crc = { 4 = 100000 }"
    assert findings(gpu_nvlink, host(text)) == []
    assert findings_after_growth(host, text, text) == []


def test_counters_restarted_at_zero_give_no_finding(host):
    assert findings_after_growth(host, "gpu.3.nvlink_replay = { 4 = 7 }", "") == []


@pytest.mark.parametrize("kind", ["replay", "recovery", "crc"])
def test_errors_of_link_training_after_reset_are_no_fault(host, kind):
    hosts = [host(f"gpu.3.nvlink_{kind} = {{ 4 = {n} }}") for n in (90, 2, 2, 3)]
    assert [item for item in run_rounds(gpu_nvlink, hosts[:2]) if isinstance(item, Finding)] == []
    assert codes([item for item in run_rounds(gpu_nvlink, hosts) if isinstance(item, Finding)]) == [
        f"gpu_nvlink/{kind}"
    ]


def test_few_crc_errors_warn_and_100_per_second_are_degraded(host):
    below_limit = findings_after_growth(host, "", "gpu.3.nvlink_crc = { 2 = 29999 }")
    at_limit = findings_after_growth(host, "", "gpu.3.nvlink_crc = { 2 = 30000 }")
    assert [(f.code, f.severity) for f in below_limit] == [("gpu_nvlink/crc", Severity.WARNING)]
    assert [(f.code, f.severity) for f in at_limit] == [("gpu_nvlink/crc_rate", Severity.DEGRADED)]


def test_errors_of_several_links_give_one_finding_per_gpu(host):
    found = findings_after_growth(host, "", "gpu.3.nvlink_replay = { 2 = 1, 11 = 3 }")
    assert codes(found) == ["gpu_nvlink/replay"]
    assert found[0].message.startswith("4 new")
    assert "link 2: 1, link 11: 3" in found[0].message


def test_link_that_stops_responding_is_no_growth(host):
    down = "[gpu.3]\nnvlinks = 17\nnvlink_replay = { 4 = 2 }"
    found = findings_after_growth(host, "gpu.3.nvlink_replay = { 4 = 2, 17 = 500 }", down)
    assert codes(found) == ["gpu_nvlink/inactive"]


def test_recoveries_and_packet_errors_of_blackwell_have_their_severities(host):
    (finding,) = findings_after_growth(
        host, "gpu.3.nvlink_recovery = { 4 = 7 }", "gpu.3.nvlink_recovery = { 4 = 9 }", profile="dgx-b200"
    )
    assert (finding.code, finding.severity) == ("gpu_nvlink/recovered", Severity.WARNING)
    (finding,) = findings_after_growth(host, "", "gpu.3.nvlink_recovery_failed = { 4 = 1 }", profile="dgx-b200")
    assert (finding.code, finding.severity) == ("gpu_nvlink/recovery_failed", Severity.DEGRADED)
    (finding,) = findings_after_growth(host, "", "gpu.3.nvlink_packet_errors = { 4 = 9 }", profile="dgx-b200")
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
def test_bit_errors_warn_above_limits_of_nvidia(host, setting, is_above):
    found = findings(gpu_nvlink, host(f"gpu.3.{setting}", profile="dgx-b200"))
    assert [(f.code, f.severity, f.clears) for f in found] == (
        [("gpu_nvlink/bit_errors", Severity.WARNING, Clears.PASS)] if is_above else []
    )


def test_bit_error_rate_needs_two_readings(host):
    faulty, healthy_host = host("gpu.3.nvlink_ber = { 4 = 1e-5 }", profile="dgx-b200"), host(profile="dgx-b200")
    assert Story(gpu_nvlink).run_check(faulty).run_checks(healthy_host, 3).codes == []
    assert Story(gpu_nvlink).run_checks(faulty, 2).codes == ["gpu_nvlink/bit_errors"]


def test_gpu_without_bit_error_fields_gives_no_finding(host):
    text = "gpu.3.nvlink_ber = { 4 = 1e-5 }\ngpu.3.unsupported_fields = [220, 222]"
    assert findings(gpu_nvlink, host(text, profile="dgx-b200")) == []


def test_recoveries_warn_if_driver_counts_only_their_sum(host):
    without = "gpu.3.unsupported_fields = [213, 214]\n"
    (finding,) = findings_after_growth(host, without, without + "gpu.3.nvlink_recovery = { 4 = 2 }", profile="dgx-b200")
    assert (finding.code, finding.severity) == ("gpu_nvlink/recovered", Severity.WARNING)


def test_unpacked_ber_decodes_every_rate_exactly():
    for mantissa in range(16):
        for exponent in range(256):
            assert _unpacked_ber(mantissa << 8 | exponent) == float(f"{mantissa}e-{exponent}")


def test_unreadable_gpu_hides_no_other_finding(host):
    text = '[gpu.0]\nerrors = { nvmlDeviceGetFieldValues = "Unknown" }\n[gpu.3]\nnvlink_inactive = [5]'
    results: list[object] = []
    with pytest.raises(NvmlError, match=r"0000:1b:00\.0"):
        results.extend(gpu_nvlink.run(host(text), Config(), History({}, NOW, BOOT)))
    assert [f.subject for f in results if isinstance(f, Finding)] == [PCI]


@pytest.mark.parametrize(
    "config", [Config(links=-1), Config(bit_error_rate=0.0), Config(symbol_bit_error_rate=float("nan"))]
)
def test_validate_rejects_invalid_settings(config):
    assert gpu_nvlink.validate(config)


def test_nvml_error_fails_run(host):
    with pytest.raises(NvmlError):
        run_check(gpu_nvlink, host('gpu.3.errors = { nvmlDeviceGetFieldValues = "Unknown" }'))


# --- links that NVSwitches connect

RACK_PLACE = 'peer_type = 1, serial = "1820000000001", slot = 14, tray = 4, host = 1'


def tray(settings="", first="", name="NVIDIA GB200", place=RACK_PLACE, capability="[10, 0]"):
    """Return the text of a compute tray: 4 GPUs, connected to switches outside the node (qx-gb200.xml, qx-gb300.xml in
    k8s-test-infra). `settings` are those of each GPU, or a list with those of GPU 0, 1, ...; `first` is added to GPU
    0."""
    about = f'name = "{name}"\ncompute_capability = {capability}\nnvlink_speed = 53125\nplatform = {{ {place} }}\n'
    each = settings if isinstance(settings, list) else [settings] * 4
    tables = (f"[gpu.{n}]\n{about}{each[n]}\n{first if n == 0 else ''}\n" for n in range(4))
    addresses = ", ".join(f'"{pci}"' for pci in fake_pci_gpus("dgx-b200")[:4])
    return f"pci = [{addresses}]\n" + "".join(tables)


ALL_DOWN = f"nvlink_inactive = {[*range(18)]}"


@pytest.mark.parametrize(("name", "capability"), [("NVIDIA GB200", "[10, 0]"), ("NVIDIA GB300", "[10, 3]")])
@pytest.mark.parametrize(
    ("down", "message"),
    [
        ("nvlink_inactive = [7]", "17 of 18 NVLinks are active; down: link 7"),
        (ALL_DOWN, "0 of 18 NVLinks are active; "),
    ],
)
def test_links_down_on_all_gpus_of_tray_are_critical(host, name, capability, down, message):
    found = findings(gpu_nvlink, host(tray(down, name=name, capability=capability), profile="dgx-b200"))
    assert [(f.code, f.severity, f.shared_cause) for f in found] == [
        ("gpu_nvlink/inactive", Severity.CRITICAL, True)
    ] * 4, "a dead switch of the rack"
    assert all(f.message.startswith(message) for f in found)


def test_link_down_on_one_gpu_of_tray_is_its_own_fault(host):
    (finding,) = findings(gpu_nvlink, host(tray(first="nvlink_inactive = [7]"), profile="dgx-b200"))
    assert (finding.severity, finding.shared_cause) == (Severity.CRITICAL, False)


def test_lone_gpu_of_tray_with_link_down_has_no_shared_cause(host):
    others_gone = "".join(f"[[at]]\nseconds = 0\ngpu = {n}\ngone = true\n" for n in (1, 2, 3))
    lone = host(tray("nvlink_inactive = [7]") + others_gone, profile="dgx-b200")
    (finding,) = findings(gpu_nvlink, lone)
    assert (finding.severity, finding.shared_cause) == (Severity.CRITICAL, False)


@pytest.mark.parametrize("config", [Config(), Config(links=18), Config(links=18, guessed=("links",))])
@pytest.mark.parametrize(
    "numbers",
    [(7, 7, 7, 7), (3, 7, 9, 11)],  # no source tells whether a number leads to the same switch on each GPU
)
def test_link_lost_on_each_gpu_of_tray_suspects_switch_side(host, numbers, config):
    down = [f"nvlink_inactive = [{number}]" for number in numbers]
    found = findings(gpu_nvlink, host(tray(down), profile="dgx-b200"), config)
    assert [(f.code, f.severity, f.shared_cause) for f in found] == [
        ("gpu_nvlink/inactive", Severity.CRITICAL, True)
    ] * 4
    assert all(f.message.endswith("; all GPUs of this node have lost links: suspect the switch side") for f in found)
    story = Story(gpu_nvlink, config).run_checks(host(tray(down), profile="dgx-b200"), 3)
    assert (story.drained, story.requeued) == (True, False)


def test_gpu_of_tray_that_lost_more_links_also_has_its_own_fault(host):
    down = ["nvlink_inactive = [3, 7]", *["nvlink_inactive = [7]"] * 3]
    found = findings(gpu_nvlink, host(tray(down), profile="dgx-b200"))
    assert [f.shared_cause for f in found] == [False, True, True, True]


def test_link_lost_on_all_but_one_gpu_of_tray_is_their_own_fault(host):
    found = findings(gpu_nvlink, host(tray(["", *["nvlink_inactive = [7]"] * 3]), profile="dgx-b200"))
    assert [(f.severity, f.shared_cause) for f in found] == [(Severity.CRITICAL, False)] * 3


LINK_7_DOWN = "nvlink_inactive = [7]"


def drained_by_switch(host):
    story = Story(gpu_nvlink).run_checks(host(tray(LINK_7_DOWN), profile="dgx-b200"), 3)
    assert (story.drained, story.requeued) == (True, False)
    return story


def test_switch_fault_that_ends_on_one_gpu_first_requeues_nothing(host):
    story = drained_by_switch(host)
    healing = host(tray(["", *[LINK_7_DOWN] * 3]), profile="dgx-b200")
    assert not story.run_check(healing).requeued
    assert not story.run_check(host(tray(), profile="dgx-b200")).requeued
    assert not story.run_check(host(tray(), profile="dgx-b200")).drained


def test_switch_fault_that_has_ended_on_one_gpu_for_a_minute_is_the_others_own_fault(host):
    healing = host(tray(["", *[LINK_7_DOWN] * 3]), profile="dgx-b200")
    assert drained_by_switch(host).run_checks(healing, 2).requeued


def test_gpu_that_loses_a_second_link_for_a_minute_has_its_own_fault(host):
    story = drained_by_switch(host)
    second = host(tray(["nvlink_inactive = [3, 7]", *[LINK_7_DOWN] * 3]), profile="dgx-b200")
    assert not story.run_check(second).requeued
    assert story.run_check(second).requeued


def test_switch_fault_that_is_not_confirmed_yet_and_ends_on_one_gpu_first_requeues_nothing(host):
    story = Story(gpu_nvlink).run_check(host(tray(LINK_7_DOWN), profile="dgx-b200"))
    story.run_check(host(tray(["", *[LINK_7_DOWN] * 3]), profile="dgx-b200"))
    assert (story.drained, story.requeued) == (True, False)


def test_virtual_machine_of_rack_knows_it_by_its_nvlink_domain(host):
    domain = 'fabric_cluster = "00000001-0000-0000-0000-000000000001"\nvirtualization = 1\nnvlink_inactive = [7]'
    found = findings(gpu_nvlink, host(tray(domain, place="peer_type = 1, host = 1"), profile="dgx-b200"))
    assert [f.shared_cause for f in found] == [True] * 4


def test_healthy_tray_gives_no_finding(host):
    results = run_check(gpu_nvlink, host(tray(), profile="dgx-b200"))
    assert [item.value for item in observations_named(results, "gpu_nvlinks_active")] == [18] * 4
    assert [item for item in results if isinstance(item, Finding)] == []


@pytest.mark.parametrize("down", ["nvlink_inactive = [7]", ALL_DOWN])
@pytest.mark.parametrize("profile", ["dgx-h100", "dgx-h200", "dgx-b200"])
def test_links_down_on_all_gpus_of_hgx_board_are_critical(host, tmp_path, profile, down):
    place = "platform = { peer_type = 1 }\n" if profile == "dgx-b200" else ""
    for number in range(0 if place else 4):
        add_pci_device(tmp_path, f"0000:0{5 + number}:00.0", "0x068000")
    text = "".join(f"[gpu.{n}]\n{place}{down}\n" for n in range(8))
    for config in (Config(), Config(links=18, guessed=("links",))):
        found = findings(gpu_nvlink, host(text, profile, str(tmp_path)), config)
        assert [(f.code, f.severity, f.expects, f.shared_cause) for f in found] == [
            ("gpu_nvlink/inactive", Severity.CRITICAL, "", False)
        ] * 8
    story = Story(gpu_nvlink).run_checks(host(text, profile, str(tmp_path)), 3)
    assert (story.drained, story.requeued) == (True, True)


def test_links_that_the_driver_was_told_not_to_use_are_no_fault(host, tmp_path):
    """NVreg_NvLinkDisable: no link is active, and the GPUs have no fabric."""
    for number in range(4):
        add_pci_device(tmp_path, f"0000:0{5 + number}:00.0", "0x068000")
    text = "".join(f"[gpu.{n}]\nfabric_state = 0\n{ALL_DOWN}\n" for n in range(8))
    assert findings(gpu_nvlink, host(text, "dgx-h100", str(tmp_path)), Config()) == []


def test_links_down_on_all_gpus_of_a100_board_are_critical(host, tmp_path):
    for number in range(6):
        add_pci_device(tmp_path, f"0000:0{number}:00.0", "0x068000")
    text = "".join(f"[gpu.{n}]\nnvlink_inactive = [7]\n" for n in range(8))
    found = findings(gpu_nvlink, host(text, "dgx-a100", str(tmp_path)))
    assert [f.message for f in found] == ["11 of 12 NVLinks are active; down: link 7"] * 8


def test_links_setting_replaces_number_of_board(host):
    down = host(tray("nvlink_inactive = [7]"), profile="dgx-b200")
    assert findings(gpu_nvlink, down, Config(links=17)) == []
    assert len(findings(gpu_nvlink, down, Config(links=18))) == 4


@pytest.mark.parametrize(
    "text",
    [
        tray(ALL_DOWN, place="peer_type = 0"),  # no switches: a card, or a node with directly connected GPUs
        tray(ALL_DOWN, name="NVIDIA GH200 480GB", place="peer_type = 0, host = 1", capability="[9, 0]"),
        tray(ALL_DOWN, name="NVIDIA H100 NVL", capability="[9, 0]"),
        tray(ALL_DOWN, name="NVIDIA RTX PRO 6000 Blackwell", capability="[12, 0]"),
        tray(ALL_DOWN + "\nmig = true"),
        tray("nvlink_inactive = [16, 17]", name="NVIDIA H800", capability="[9, 0]"),
        tray("nvlinks = 8", name="NVIDIA H100 80GB HBM3", place="peer_type = 0, host = 1", capability="[9, 0]"),
        tray(ALL_DOWN + "\nvirtualization = 2"),
        tray(ALL_DOWN + "\nvirtualization = 3"),
        tray(ALL_DOWN + "\nvirtualization = 4"),
        tray(ALL_DOWN + "\nvirtualization = 1", place="peer_type = 1, host = 1"),  # a partition of one GPU each
        tray(ALL_DOWN + "\nfabric_state = 1"),
        tray(ALL_DOWN + "\nfabric_state = 2"),
        tray(ALL_DOWN + "\nfabric_status = 3"),
    ],
)
def test_gpus_that_may_have_fewer_links_are_only_compared_with_peers(host, text):
    assert findings(gpu_nvlink, host(text, profile="dgx-b200")) == []


def test_guest_with_active_links_must_have_all(host):
    guest = tray("nvlink_inactive = [7]\nvirtualization = 1", place="peer_type = 1, host = 1")
    assert len(findings(gpu_nvlink, host(guest, profile="dgx-b200"))) == 4
    assert len(findings(gpu_nvlink, host(tray(ALL_DOWN + "\nvirtualization = 1"), profile="dgx-b200"))) == 4


@pytest.mark.parametrize(("switches", "found"), [(0, 8), (2, 0), (4, 8)])
def test_guest_with_some_of_the_nvswitches_may_have_fewer_links(host, tmp_path, switches, found):
    for number in range(switches):
        add_pci_device(tmp_path, f"0000:0{5 + number}:00.0", "0x068000")
    text = "".join(f"[gpu.{n}]\nvirtualization = 1\nnvlink_inactive = [7]\n" for n in range(8))
    assert len(findings(gpu_nvlink, host(text, "dgx-h100", str(tmp_path)))) == found


def test_gpu_with_unreadable_platform_hides_no_other_finding(host):
    text = tray("nvlink_inactive = [7]", first='errors = { nvmlDeviceGetPlatformInfo = "Unknown" }')
    results: list[object] = []
    with pytest.raises(NvmlError, match="nvmlDeviceGetPlatformInfo"):
        results.extend(gpu_nvlink.run(host(text, profile="dgx-b200"), Config(), History({}, NOW, BOOT)))
    assert len([item for item in results if isinstance(item, Finding)]) == 3


# --- links whose state is not reported

NO_STATES = 'unsupported = ["nvmlDeviceGetNvLinkState"]\nunsupported_fields = [165]'
NO_LINKS = 'unsupported = ["nvmlDeviceGetFieldValues", "nvmlDeviceGetNvLinkState"]'


@pytest.mark.parametrize(
    ("unreported", "message"),
    [
        ("nvlink_unreported = [16, 17]", "16 of 18 NVLinks are active; state not reported: links 16, 17"),
        (NO_STATES, "0 of 18 NVLinks are active; state not reported: links 0, 1, 2, "),
    ],
)
def test_links_that_no_gpu_of_tray_reports_only_warn(host, unreported, message):
    blind = host(tray(unreported), profile="dgx-b200")
    found = findings(gpu_nvlink, blind)
    assert [(f.code, f.severity, f.shared_cause) for f in found] == [
        ("gpu_nvlink/unreported", Severity.WARNING, False)
    ] * 4
    assert all(f.message.startswith(message) for f in found)
    assert not Story(gpu_nvlink).run_checks(blind, 20).drained


def test_links_of_baseline_that_no_gpu_reports_only_warn(host):
    blind = host(tray("nvlink_unreported = [16, 17]"), profile="dgx-b200")
    found = findings(gpu_nvlink, blind, Config(links=18))
    assert [(f.code, f.severity, f.expects) for f in found] == [
        ("gpu_nvlink/unreported", Severity.WARNING, "links")
    ] * 4


@pytest.mark.parametrize("config", [Config(), Config(links=18)])
def test_unreported_links_hide_no_link_that_is_down(host, config):
    found = findings(gpu_nvlink, host(tray("nvlink_unreported = [16]\nnvlink_inactive = [7]"), "dgx-b200"), config)
    assert [(f.code, f.severity) for f in found] == [("gpu_nvlink/inactive", Severity.CRITICAL)] * 4
    assert found[0].message.startswith("16 of 18 NVLinks are active; down: link 7; state not reported: link 16")


@pytest.mark.parametrize("no_links", [NO_LINKS, "nvlinks = 0"])
@pytest.mark.parametrize("config", [Config(), Config(links=18, guessed=("links",))])
def test_gpus_for_which_the_driver_reports_no_nvlink_have_none(host, no_links, config):
    found = findings(gpu_nvlink, host(tray(no_links, place="peer_type = 1, host = 1"), profile="dgx-b200"), config)
    assert codes(found) == ["gpu_nvlink/inactive"] * 4 * bool(config.links)


@pytest.mark.parametrize(
    ("settings", "count", "links"),
    [("nvlinks = 17", 17, "link 17"), ("nvlinks = 0", 0, "links 0, 1, "), (NO_LINKS, 0, "")],
)
def test_gpus_in_rack_must_report_all_links(host, settings, count, links):
    found = findings(gpu_nvlink, host(tray(settings), profile="dgx-b200"))
    assert [(f.code, f.severity) for f in found] == [("gpu_nvlink/unreported", Severity.WARNING)] * 4
    assert f"{count} of 18 NVLinks are active; state not reported: {links}" in found[0].message
    found = findings(gpu_nvlink, host(tray(settings), profile="dgx-b200"), Config(links=18))
    assert [(f.code, f.severity) for f in found] == [("gpu_nvlink/inactive", Severity.CRITICAL)] * 4


@pytest.mark.parametrize("mode", ["", "virtualization = 1"])
@pytest.mark.parametrize("down", ["nvlink_inactive = [7]", ALL_DOWN])
def test_domain_proves_a_rack_without_the_platform(host, mode, down):
    text = tray(f'{down}\n{mode}\nfabric_cluster = "00000001-0000-0000-0000-000000000001"', place="")
    no_platform = text.replace("platform = {  }", 'errors = { nvmlDeviceGetPlatformInfo = "Unknown" }')
    results: list[object] = []
    results.extend(gpu_nvlink.run(host(no_platform, profile="dgx-b200"), Config(), History({}, NOW, BOOT)))
    found = [item for item in results if isinstance(item, Finding)]
    assert [(f.code, f.severity, f.shared_cause) for f in found] == [
        ("gpu_nvlink/inactive", Severity.CRITICAL, True)
    ] * 4


@pytest.mark.parametrize("settings", [NO_STATES, NO_LINKS, "nvlinks = 0"])
def test_gpus_without_nvswitches_that_report_no_links_have_nothing_to_check(host, settings):
    cards = host(tray(settings, name="NVIDIA H100 PCIe", place="peer_type = 0", capability="[9, 0]"), "dgx-b200")
    assert list(gpu_nvlink.run(cards, Config(), History({}, NOW, BOOT))) == [NothingToCheck("no NVLink")]


@given(st.sets(st.integers(0, 17)), st.sets(st.integers(0, 17)))
@settings(max_examples=40, suppress_health_check=also(HealthCheck.function_scoped_fixture))
def test_every_missing_link_of_one_gpu_is_named(host, down, unreported):
    text = f"nvlink_inactive = {sorted(down)}\nnvlink_unreported = {sorted(unreported)}"
    found = findings(gpu_nvlink, host(tray(first=text), profile="dgx-b200"))
    assert [f.code for f in found] == ["gpu_nvlink/inactive"] * bool(down | unreported)
    named = {int(number) for f in found for number in re.findall(r"[0-9]+", re.split("[:;]", f.message, maxsplit=1)[1])}
    assert named == down | unreported


# --- after a boot


@pytest.mark.parametrize("config", [Config(), Config(links=12)])
@pytest.mark.parametrize(("uptime", "found"), [("120.5 900.1", 0), ("301.0 900.1", 8)])
def test_a100_without_active_links_has_five_minutes_after_boot(host, tmp_path, uptime, found, config):
    for number in range(6):
        add_pci_device(tmp_path, f"0000:0{number}:00.0", "0x068000")
    write(tmp_path, {"/proc/uptime": f"{uptime}\n"})
    text = "".join(f"[gpu.{n}]\nnvlink_inactive = {[*range(12)]}\n" for n in range(8))
    assert len(findings(gpu_nvlink, host(text, "dgx-a100", str(tmp_path)), config)) == found


def test_a100_with_one_link_down_is_reported_after_boot(host, tmp_path):
    write(tmp_path, {"/proc/uptime": "90.0 900.1\n"})
    found = findings(gpu_nvlink, host("gpu.3.nvlink_inactive = [5]", "dgx-a100", str(tmp_path)))
    assert codes(found) == ["gpu_nvlink/inactive"]


@pytest.mark.parametrize("state", [1, 2])
def test_gpu_that_joins_its_fabric_is_left_to_gpu_fabric(host, state):
    text = "".join(f"[gpu.{n}]\nfabric_state = {state}\n{ALL_DOWN}\n" for n in range(8))
    assert findings(gpu_nvlink, host(text), Config(links=18)) == []
    one = host(f"[gpu.3]\nfabric_state = {state}\n{ALL_DOWN}")
    assert findings(gpu_nvlink, one) == []


def test_unreadable_uptime_fails_run_and_hides_no_finding(host, tmp_path):
    write(tmp_path, {"/proc/uptime": "N/A\n"})
    down = host(f"gpu.3.nvlink_inactive = {[*range(12)]}", "dgx-a100", str(tmp_path))
    results, error = run_until_error(gpu_nvlink, down)
    assert "/proc/uptime" in error
    assert codes([item for item in results if isinstance(item, Finding)]) == ["gpu_nvlink/inactive"]


# --- speed


@pytest.mark.parametrize("capability", ["[10, 0]", "[10, 3]"])
def test_slow_link_is_degraded_and_drains_without_requeue(host, capability):
    slow = host(tray(first="nvlink_speeds = { 4 = 26562, 9 = 26562 }", capability=capability), profile="dgx-b200")
    (finding,) = findings(gpu_nvlink, slow)
    assert (finding.code, finding.severity, finding.clears) == ("gpu_nvlink/slow", Severity.DEGRADED, Clears.PASS)
    assert finding.message == "2 NVLinks are slower than 53125 MB/s (link 4: 26562, link 9: 26562)"
    story = Story(gpu_nvlink).run_check(slow)
    assert not story.drained, "the link may be training"
    story.run_checks(slow, 2)
    assert (story.codes, story.drained, story.requeued) == (["gpu_nvlink/slow"], True, False)
    story.run_checks(host(tray(), profile="dgx-b200"), 2)
    assert (story.codes, story.drained) == ([], False)


def test_slow_links_on_all_gpus_only_warn(host):
    found = findings(gpu_nvlink, host(tray("nvlink_speed = 26562").replace("nvlink_speed = 53125\n", ""), "dgx-b200"))
    assert [(f.code, f.severity) for f in found] == [("gpu_nvlink/slow", Severity.WARNING)] * 4


@pytest.mark.parametrize("speed", [0, 50000, 53125])
def test_speed_without_encoding_overhead_is_full(host, speed):
    assert findings(gpu_nvlink, host(tray(first=f"nvlink_speeds = {{ 4 = {speed} }}"), profile="dgx-b200")) == []


def test_speed_of_hopper_is_26562(host):
    text = "".join(f"[gpu.{n}]\nnvlink_speed = 26562\n" for n in range(8))
    assert findings(gpu_nvlink, host(text)) == []
    (finding,) = findings(gpu_nvlink, host(f"{text}nvlink_speeds = {{ 4 = 13281 }}\n"))
    assert finding.message == "1 NVLink is slower than 26562 MB/s (link 4: 13281)"


# --- stories


def test_link_down_for_a_minute_requeues_until_restored(host):
    down = host("gpu.3.nvlink_inactive = [5]")
    story = Story(gpu_nvlink).run_check(host()).run_check(down)
    assert not story.drained, "the link may be training"
    story.run_check(down, minutes=1.5)
    assert (story.codes, story.drained, story.requeued) == (["gpu_nvlink/inactive"], True, True)
    story.run_checks(down, 300).reboot().run_check(down)
    assert story.drained, "neither a day nor a reboot repairs it"
    story.run_checks(host(), 3)
    assert (story.codes, story.drained) == ([], False)


def test_link_restored_within_a_minute_is_no_fault(host):
    story = Story(gpu_nvlink).run_check(host("gpu.3.nvlink_inactive = [5]")).run_checks(host(), 3)
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
def test_link_errors_drain_until_reset_and_not_until_idle_day(host, profile, setting, code):
    before, after = host(profile=profile), host(f"gpu.3.{setting} = {{ 4 = 90000 }}", profile=profile)
    story = Story(gpu_nvlink).run_check(before).run_check(after)
    assert (story.codes, story.drained, story.requeued) == ([code], True, False)
    story.run_checks(after, 300)
    assert story.drained, "a day without load proves nothing about a link"
    story.reset("0000:1b:00.0").run_check(after)
    assert story.drained, "that was another GPU"
    story.reset(PCI).run_checks(before, 2)
    assert (story.codes, story.drained) == ([], False)


def test_errors_that_return_after_reset_drain_again(host):
    counts = [host(f"gpu.3.nvlink_replay = {{ 4 = {n} }}") for n in (0, 9, 12)]
    story = Story(gpu_nvlink).run_check(counts[0]).run_check(counts[1]).reset(PCI).run_checks(counts[0], 2)
    assert not story.drained
    story.run_check(counts[2])
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
def test_few_link_errors_never_drain_and_clear_after_clean_day_under_load(host, profile, setting, code):
    before, after = host(profile=profile), host(f"gpu.3.{setting} = {{ 4 = 20 }}", profile=profile)
    story = Story(gpu_nvlink).run_check(before).run_check(after)
    assert (story.codes, story.drained) == ([code], False)
    story.run_checks(after, 280)
    assert story.codes == [code], "not yet a day"
    story.run_checks(after, 10)
    assert story.codes == []


@pytest.mark.one_python
def test_bit_errors_never_drain_and_clear_with_the_rate(host):
    faulty = host("gpu.3.nvlink_ber = { 4 = 1e-5 }", profile="dgx-b200")
    story = Story(gpu_nvlink).run_checks(faulty, 300)
    assert (story.codes, story.drained) == (["gpu_nvlink/bit_errors"], False)
    story.run_checks(host(profile="dgx-b200"), 3)
    assert story.codes == []


def test_link_down_on_one_gpu_drains_despite_guessed_number(host):
    guessed = Config(links=18, guessed=("links",))
    story = Story(gpu_nvlink, guessed).run_checks(host("gpu.3.nvlink_inactive = [4]"), 2)
    assert (story.drained, story.requeued) == (True, True)
    assert not story.run_checks(host(), 2).drained


def test_links_down_on_all_gpus_against_guessed_number_never_drain(host):
    all_lack = "".join(f"gpu.{number}.nvlink_inactive = [4]\n" for number in range(8))
    story = Story(gpu_nvlink, Config(links=18, guessed=("links",))).run_checks(host(all_lack), 20)
    assert (story.codes, story.drained) == (["gpu_nvlink/inactive"] * 8, False)
