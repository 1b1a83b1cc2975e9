"""Tests of profiles and layers: the profile of a machine, the precedence of layers, and that a guess never drains."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes import scenarios
from hypothesis import given
from hypothesis import strategies as st
from machine import KERNEL_COUNTERS, Machine
from story import MultiCheckNode, Story
from trees import add_pci_device, write

from healthd.agent.reporting import render
from healthd.agent.settings import layers
from healthd.agent.settings.config import ConfigError, Layer, Loaded, Settings
from healthd.agent.settings.effective import resolve_settings, setting_rows
from healthd.agent.settings.layers import Match, lower_layers
from healthd.agent.settings.registry import built_in_checks
from healthd.checks import gpu_count, ib_link, mount, services
from healthd.cli import flags
from healthd.cli.main import main
from healthd.common.codec import load
from healthd.common.model import Severity
from healthd.host.host import Host

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CHECKS = built_in_checks()
FILE = "/etc/healthd/healthd.toml"
ADDRESSES = [f"0000:{number:02x}:00.0" for number in range(0x1B, 0x1B + 8)]
MACHINES = {  # profile -> (product name, PCI device id of the GPUs, number of GPUs)
    "dgx-a100": ("DGXA100 920-23687-2531-001", "20b2", 8),
    "dgx-h100": ("DGXH100", "2330", 8),
    "dgx-h200": ("DGXH200", "2335", 8),
    "dgx-b200": ("DGXB200", "2901", 8),
    "gb200-nvl72": ("PowerEdge XE9712", "2941", 4),
    "gb300-nvl72": ("PowerEdge XE9712", "31c2", 4),
    "hgx": ("PowerEdge XE9680", "2330", 8),
    "hgx-a100": ("G492-ZD2-00", "20b0", 8),
    "hgx-4": ("PowerEdge T-XE8545", "20b2", 4),
    "hgx-b300": ("PowerEdge XE9780", "3182", 8),
}


def fake_machine(root: Path, product: str, device: str, count: int) -> str:
    write(root, {"/sys/class/dmi/id/product_name": f"{product}\n"})
    for pci in ADDRESSES[:count]:
        add_pci_device(root, pci, "0x030200", device=f"0x{device}")
    return str(root)


def selected_profile(root: str) -> str:
    return next((layer.source for layer in lower_layers(Settings(root=root)) if layer.guessed), "")


def layered(*tables: tuple[str, str, bool], top: str = "") -> Loaded:
    """Return settings of (source, TOML, guessed) layers below a healthd.toml."""
    lower = [Layer(source, tomllib.loads(text).get("checks", {}), guessed) for source, text, guessed in tables]
    return resolve_settings(tomllib.loads(top), FILE, {}, CHECKS, lambda _settings: lower)


def origins(loaded: Loaded) -> dict[str, tuple[Any, str]]:
    return {name: (value, origin) for name, value, origin in setting_rows(loaded)}


# --- profiles in healthd


def test_every_profile_has_a_test_machine():
    assert sorted(MACHINES) == layers.profile_names()


@pytest.mark.parametrize("name", layers.profile_names())
def test_profile_has_only_existing_settings(name):
    loaded = resolve_settings({"profile": name, "baseline_file": ""}, FILE, {}, CHECKS, lower_layers)
    assert loaded.profile == f"profile {name}"
    assert loaded.checks["gpu_count", ""].guessed == ("expected",)


@pytest.mark.parametrize("name", layers.profile_names())
def test_profile_names_sources(name):
    text = Path(layers.PROFILES, f"{name}.toml").read_text("utf-8")
    assert "# Sources: " in text
    assert "pci.ids" in text


@pytest.mark.parametrize("name", layers.profile_names())
def test_machine_type_selects_profile(tmp_path, name):
    assert selected_profile(fake_machine(tmp_path, *MACHINES[name])) == f"profile {name}"


@pytest.mark.parametrize("name", layers.profile_names())
def test_machine_with_lost_gpu_keeps_profile(tmp_path, name):
    product, device, count = MACHINES[name]
    assert selected_profile(fake_machine(tmp_path, product, device, count - 1)) == f"profile {name}"


SWITCHES = {"dgx-a100": 6, "dgx-h100": 4, "dgx-h200": 4}  # profile -> number of switches with a device file
FAKES = {
    "hgx": "dgx-h100",
    "hgx-a100": "dgx-a100",
    "hgx-4": "dgx-a100",
}  # profile -> profile of the fake NVML, if other
PORTS = 12


def healthy_machine(folder: Path, name: str) -> tuple[Machine, Loaded]:
    """Return a machine that has run no CUDA program since its boot, and the settings that it selects."""
    product, device, count = MACHINES[name]
    node = Machine(folder, FAKES.get(name, name), count, f"0x{device}")
    for path in ("sys/module/nvidia_uvm/initstate", "dev/nvidia-uvm", "dev/nvidia-uvm-tools"):
        (node.root / path).unlink()
    (node.root / "sys/module/nvidia_uvm").rmdir()
    switch_count = SWITCHES.get(name, 0)
    node.write({f"/dev/nvidia-nvswitch{number}": "" for number in range(switch_count)})
    node.write({"/dev/null": "", **({"/dev/nvidia-nvswitchctl": ""} if switch_count else {})})
    node.write({"/sys/class/dmi/id/product_name": f"{product}\n"})
    if name.endswith("-nvl72"):  # two Grace CPUs
        node.write({"/sys/devices/system/cpu/online": "0-143\n", "/sys/devices/system/node/has_cpu": "0-1\n"})
    for number in range(PORTS):
        node.port(number)
        node.count(number, **dict.fromkeys(KERNEL_COUNTERS, 0))
    loaded = resolve_settings({"root": str(node.root), "baseline_file": ""}, FILE, {}, CHECKS, lower_layers)
    assert loaded.profile == f"profile {name}"
    config: Any = loaded.checks["services", ""]
    node.units = dict.fromkeys((*config.required, *config.wanted), "active running")
    return node, loaded


def check_stories(loaded: Loaded) -> MultiCheckNode:
    return MultiCheckNode(Story(CHECKS[check].module, config) for (check, _), config in loaded.checks.items())


@pytest.mark.parametrize("name", layers.profile_names())
def test_healthy_machine_has_no_finding_above_info(tmp_path, name):
    node, loaded = healthy_machine(tmp_path, name)
    stories = check_stories(loaded).run_rounds(node.now(), 4)
    stories.apply_to_each(
        lambda story: story.drain_by_operator("drained, so that checks of an idle node run")
    ).run_rounds(node.now(), 2)
    results = [story.result for story in stories.stories if story.result]
    findings = [finding for result in results for finding in result.findings if finding.severity > Severity.INFO]
    assert (findings, stories.seen, stories.failed) == ([], set(), [])
    assert {CHECKS[result.check].name for result in results} >= {"device_nodes", "kernel_modules", "services"}


@pytest.mark.parametrize("name", layers.profile_names())
def test_guessed_settings_find_losses_and_do_not_drain(tmp_path, name):
    """Without this test, an empty profile would pass the test above."""
    node, loaded = healthy_machine(tmp_path, name)
    node.units["slurmd.service"] = "failed failed"
    node_config: Any = loaded.checks["device_nodes", ""]
    expected_codes = {"services/inactive"}
    if node_config.expected:
        (node.root / "dev/nvidia0").unlink()
        (node.root / "sys/module/nvidia/initstate").write_text("going\n")
        expected_codes |= {"device_nodes/missing", "kernel_modules/not_loaded"}
    stories = check_stories(loaded).run_rounds(node.now(), 4)
    assert (stories.seen, stories.drained) == (expected_codes, False)


@pytest.mark.parametrize("name", ["gb200-nvl72", "gb300-nvl72"])
@pytest.mark.parametrize(
    ("file", "text", "code"),
    [
        ("cpu/online", "0-142", "cpu/missing"),
        ("cpu/online", "0-71", "cpu/missing"),
        ("node/has_cpu", "0", "cpu/numa_nodes"),
    ],
)
def test_missing_grace_cpu_warns_without_baseline(tmp_path, name, file, text, code):
    node, loaded = healthy_machine(tmp_path, name)
    node.write({f"/sys/devices/system/{file}": f"{text}\n"})
    stories = check_stories(loaded).run_rounds(node.now(), 4)
    assert (stories.seen, stories.drained) == ({code}, False)


def test_dgx_without_gpus_is_recognized_by_name(tmp_path):
    assert selected_profile(fake_machine(tmp_path, "DGXH100", "2330", 0)) == "profile dgx-h100"


def test_dgx_with_other_gpus_is_recognized_by_gpus(tmp_path):
    assert selected_profile(fake_machine(tmp_path, "DGXH100", "2335", 8)) == "profile hgx"


@pytest.mark.parametrize(
    ("product", "device", "count"),
    [
        ("PowerEdge R750xa", "20b5", 4),  # A100 PCIe
        ("PowerEdge R760xa", "2331", 8),  # H100 PCIe
        ("Standard PC (Q35 + ICH9, 2009)", "2330", 1),  # a virtual machine with one
        ("Standard PC (Q35 + ICH9, 2009)", "2330", 2),
        ("DGX-1 with V100", "1db5", 8),
        ("PowerEdge XE9712", "2941", 2),  # half of a tray of an NVL72
        ("PowerEdge C6520", "2330", 0),
        ("", "2330", 0),
    ],
)
def test_other_machines_select_no_profile(tmp_path, product, device, count):
    assert selected_profile(fake_machine(tmp_path, product, device, count)) == ""


def test_virtual_functions_are_not_counted(tmp_path):
    root = fake_machine(tmp_path, "PowerEdge XE9680", "2330", 2)
    for number in range(1, 7):
        pci = f"0000:1b:00.{number}"
        add_pci_device(tmp_path, pci, "0x030200", device="0x2330")
        (tmp_path / "sys/bus/pci/devices" / pci / "physfn").symlink_to("../0000:1b:00.0")
    assert selected_profile(root) == ""


@pytest.mark.parametrize("name", layers.profile_names())
def test_profile_requires_product_or_gpus(name):
    """So no profile matches a machine without both, and none is read there."""
    match = load(Match, tomllib.loads(Path(layers.PROFILES, f"{name}.toml").read_text())["match"])
    assert match.products or match.at_least > 0
    assert not match.fits("", {})


def test_empty_root_selects_no_profile(tmp_path):
    assert selected_profile(str(tmp_path)) == ""


def test_unreadable_device_selects_no_profile(tmp_path):
    root = fake_machine(tmp_path, "DGXH100", "2330", 8)
    (tmp_path / "sys/bus/pci/devices" / ADDRESSES[0] / "vendor").write_text("N/A\n")
    assert selected_profile(root) == ""


@given(st.text(), st.dictionaries(st.text(max_size=9), st.integers(0, 20)))
def test_match_fits_accepts_any_machine(product, gpus):
    assert Match(products=("DGX*",)).fits(product, gpus) in (True, False)


def test_profile_selection_reads_only_files(tmp_path):
    """The daemon itself reads the machine, and NVIDIA's driver may hang. So no GPU is queried."""
    fake_machine(tmp_path, *MACHINES["dgx-h100"])
    write(tmp_path, {"/proc/driver/nvidia/version": "x"})
    (tmp_path / "proc/driver/nvidia/gpus").symlink_to("/dev/full")
    assert selected_profile(str(tmp_path)) == "profile dgx-h100"


# --- precedence of layers


def test_setting_comes_from_highest_layer():
    loaded = layered(
        ("profile dgx-h100", "[checks.gpu_count]\nexpected = 8\n[checks.gpu_nvlink]\nlinks = 18", True),
        ("/etc/healthd/baseline.toml", "[checks.gpu_count]\nexpected = 7\nclear_after = 3", False),
        top="[checks.gpu_count]\nclear_after = 5",
    )
    values = origins(loaded)
    assert values["checks.gpu_count.expected"] == (7, "/etc/healthd/baseline.toml")
    assert values["checks.gpu_count.clear_after"] == (5, FILE)
    assert values["checks.gpu_nvlink.links"] == (18, "profile dgx-h100")
    assert values["checks.gpu_nvlink.enforce"] == (True, "default")


def test_table_value_is_replaced_whole():
    loaded = layered(
        ("profile x", '[checks.ib_link.expected_gbps]\n"mlx5_0/1" = 400\n"mlx5_1/1" = 400', True),
        ("baseline", '[checks.ib_link.expected_gbps]\n"mlx5_5/1" = 200', False),
    )
    assert loaded.checks["ib_link", ""].expected_gbps == {"mlx5_5/1": 200.0}  # type: ignore[attr-defined]
    values = origins(loaded)
    assert values["checks.ib_link.expected_gbps.mlx5_5/1"] == (200.0, "baseline")
    assert "checks.ib_link.expected_gbps.mlx5_0/1" not in values


def test_named_tables_are_merged_across_layers():
    loaded = layered(
        ("baseline", '[checks.mount."/data"]\nfstype = "nfs"\n[checks.mount."/scratch"]\nfstype = "lustre"', False),
        top='[checks.mount]\nhang_degraded_seconds = 60.0\n[checks.mount."/scratch"]\nenabled = false',
    )
    assert ("mount", "/scratch") in loaded.disabled
    data = loaded.checks["mount", "/data"]
    assert (data.fstype, data.hang_degraded_seconds) == ("nfs", 60.0)  # type: ignore[attr-defined]
    values = origins(loaded)
    assert values['checks.mount."/data".fstype'] == ("nfs", "baseline")
    assert values['checks.mount."/data".hang_degraded_seconds'] == (60.0, FILE)


def test_guessed_has_only_settings_last_set_by_profile():
    profile_layer = ("profile x", "[checks.gpu_count]\nexpected = 8", True)
    baseline_layer = ("baseline", "[checks.gpu_count]\nexpected = 8", False)
    assert layered(profile_layer).checks["gpu_count", ""].guessed == ("expected",)
    assert layered(profile_layer, baseline_layer).checks["gpu_count", ""].guessed == ()
    assert layered(profile_layer, top="[checks.gpu_count]\nexpected = 8").checks["gpu_count", ""].guessed == ()
    assert layered(profile_layer, top="[checks.gpu_count]\nclear_after = 8").checks["gpu_count", ""].guessed == (
        "expected",
    )


def test_guessed_includes_named_table_and_check():
    profile_layer = ("profile x", '[checks.mount]\nread_only = true\n[checks.mount."/data"]\nfstype = "nfs"', True)
    assert set(layered(profile_layer).checks["mount", "/data"].guessed) == {"name", "fstype", "read_only"}
    top = '[checks.mount."/data"]\nread_only = false'
    assert layered(profile_layer, top=top).checks["mount", "/data"].guessed == ("fstype",)


def test_worker_table_lists_guessed_settings():
    loaded = layered(("profile x", "[checks.gpu_count]\nexpected = 8", True))
    assert loaded.tables["gpu_count", ""] == {"name": "", "expected": 8, "guessed": ["expected"]}


# --- a guess warns and never drains


def host_with_seven_gpus(tmp_path: Path) -> Any:
    return scenarios(tmp_path)("gpu.3.gone = true")


def test_guessed_setting_warns_and_does_not_drain(tmp_path):
    loaded = layered(("profile dgx-h100", "[checks.gpu_count]\nexpected = 8", True))
    story = Story(gpu_count, loaded.checks["gpu_count", ""]).run_checks(host_with_seven_gpus(tmp_path), 5)
    assert (story.codes, story.drained) == (["gpu_count/fewer_than_expected"], False)


@pytest.mark.parametrize("source", ["baseline", "person"])
def test_baseline_or_site_setting_drains(tmp_path, source):
    text = "[checks.gpu_count]\nexpected = 8"
    profile_layer, baseline = ("profile dgx-h100", text, True), ("baseline", text, False)
    loaded = layered(profile_layer, baseline) if source == "baseline" else layered(profile_layer, top=text)
    story = Story(gpu_count, loaded.checks["gpu_count", ""]).run_checks(host_with_seven_gpus(tmp_path), 2)
    assert (story.codes, story.drained) == (["gpu_count/fewer_than_expected"], True)


def test_reload_follows_changed_guess(tmp_path):
    text = "[checks.gpu_count]\nexpected = 8"
    guessed, baseline = layered(("profile dgx-h100", text, True)), layered(("baseline", text, False))
    host = host_with_seven_gpus(tmp_path)
    story = Story(gpu_count, guessed.checks["gpu_count", ""]).run_checks(host, 3)
    story.config = baseline.checks["gpu_count", ""]
    assert story.run_check(host).drained
    story.config = guessed.checks["gpu_count", ""]
    assert not story.run_check(host).drained
    assert story.codes == ["gpu_count/fewer_than_expected"]


def test_guess_about_units_without_systemd_is_ignored(tmp_path):
    profile_layer = ("profile x", '[checks.services]\nrequired = ["slurmd"]', True)
    config = layered(profile_layer).checks["services", ""]
    assert Story(services, config).run_check(Host(str(tmp_path))).codes == []
    site_config = layered(profile_layer, top='[checks.services]\nwanted = ["munge"]').checks["services", ""]
    with pytest.raises(RuntimeError, match="systemctl is missing"):
        Story(services, site_config).run_check(Host(str(tmp_path)))


def test_guessed_mount_does_not_drain(tmp_path):
    text = '[checks.mount."/data"]'
    host = write(tmp_path, {"/proc/self/mountinfo": "21 0 8:1 / / rw - ext4 /dev/sda1 rw\n"})
    story = Story(mount, layered(("profile x", text, True)).checks["mount", "/data"]).run_checks(host, 6)
    assert (story.codes, story.drained) == (["mount/missing"], False)
    story = Story(mount, layered(("profile x", text, True), ("b", text, False)).checks["mount", "/data"])
    assert story.run_checks(host, 3).drained


def test_guessed_port_does_not_become_critical(tmp_path):
    text = '[checks.ib_link.expected_gbps]\n"mlx5_0/1" = 400'
    guessed, baseline = layered(("profile dgx-h100", text, True)), layered(("baseline", text, False))
    host = write(tmp_path, {"/sys/class/infiniband/none": ""})
    story = Story(ib_link, guessed.checks["ib_link", ""]).run_checks(host, 6)
    assert (story.codes, story.drained) == (["ib_link/missing"], False)
    story = Story(ib_link, baseline.checks["ib_link", ""]).run_checks(host, 6)
    assert (story.drained, story.requeued) == (True, True)


# --- files


def loaded_from(tmp_path: Path, *arguments: str, top: str = "") -> Loaded:
    file = tmp_path / "healthd.toml"
    file.write_text(top)
    parser = flags.Parser("check", "", "")
    flags.add_target_flags(parser)
    args: argparse.Namespace = parser.parse_args(["--config", str(file), *arguments])
    return flags.load_settings(args)[0]


def config_error(tmp_path: Path, *arguments: str, top: str = "") -> str:
    with pytest.raises(ConfigError) as raised:
        loaded_from(tmp_path, *arguments, top=top)
    return str(raised.value)


def test_mistake_in_baseline_is_single_sentence_with_file(tmp_path):
    file = tmp_path / "baseline.toml"
    for text, sentence in (
        ("[checks.gpu_count]\nexpekted = 8", 'checks.gpu_count: unknown setting "expekted"; did you mean "expected"?'),
        ('[checks.gpu_count]\nexpected = "8"', 'checks.gpu_count.expected: must be a whole number, got "8"'),
        ("[checks.gpu_count]\nexpected = -8", "checks.gpu_count.expected: must be 0 to 255 GPUs, got -8"),
        ("[checks.gpu_cont]", 'checks.gpu_cont: there is no check "gpu_cont"; did you mean "gpu_count"?'),
        ('mode = "act"', 'unknown setting "mode"; this file may only contain [checks.NAME]'),
        ("[match]", 'unknown setting "match"; this file may only contain [checks.NAME]'),
        ("[checks.gpu_count]\nguessed = []", 'checks.gpu_count: unknown setting "guessed"'),
        ("checks = 3", "checks: must be a table"),
        ("checks", "not TOML: "),
    ):
        file.write_text(text)
        assert config_error(tmp_path, "--baseline", str(file)).startswith(f"{file}: {sentence}"), text


def test_mistake_in_profile_is_single_sentence_with_file(tmp_path):
    file = tmp_path / "ours.toml"
    for text, sentence in (
        ("[checks.gpu_count]\nexpekted = 8", f"profile {file}: checks.gpu_count: unknown setting"),
        ('mode = "act"', f'{file}: unknown setting "mode"; this file may only contain [checks.NAME]'),
        ("[match]\nproduct = 1", f'{file}: match: unknown setting "product"; did you mean "products"?'),
    ):
        file.write_text(text)
        assert config_error(tmp_path, "--profile", str(file)).startswith(sentence), text


def test_unknown_profile_is_refused(tmp_path):
    message = 'profile: unknown profile "dgx-h10"; did you mean "dgx-h100"?'
    assert config_error(tmp_path, top='profile = "dgx-h10"') == f"{tmp_path}/healthd.toml: {message}"
    assert config_error(tmp_path, "--profile", "dgx-h10") == f"--profile: {message}"
    assert config_error(tmp_path, "--profile", "/none.toml") == "/none.toml: no such file"


def test_missing_baseline_is_accepted(tmp_path):
    assert loaded_from(tmp_path, "--baseline", str(tmp_path / "none.toml")).checks["gpu_count", ""].guessed == ()
    assert "absolute path" in config_error(tmp_path, top='baseline_file = "baseline.toml"')


def test_profile_from_site_is_guessed(tmp_path):
    (tmp_path / "ours.toml").write_text("[checks.gpu_count]\nexpected = 2")
    loaded = loaded_from(tmp_path, "--profile", str(tmp_path / "ours.toml"))
    assert loaded.checks["gpu_count", ""].guessed == ("expected",)


def test_default_baseline_is_not_used_for_other_root(tmp_path):
    default = Settings().baseline_file
    assert [layer.source for layer in lower_layers(Settings(profile="none"))] == [default]
    assert lower_layers(Settings(profile="none", root=str(tmp_path))) == []
    baseline_path = str(tmp_path / "b.toml")
    (baseline_layer,) = lower_layers(Settings(profile="none", root=str(tmp_path), baseline_file=baseline_path))
    assert baseline_layer.source == baseline_path


def test_load_settings_reads_layers_again(tmp_path):
    """SIGHUP does the same."""
    file = tmp_path / "baseline.toml"
    file.write_text("[checks.gpu_count]\nexpected = 8")
    assert loaded_from(tmp_path, "--baseline", str(file)).checks["gpu_count", ""].expected == 8  # type: ignore[attr-defined]
    file.write_text("[checks.gpu_count]\nexpected = 4")
    assert loaded_from(tmp_path, "--baseline", str(file)).checks["gpu_count", ""].expected == 4  # type: ignore[attr-defined]


def test_config_show_names_profile_and_setting_sources(tmp_path, capsys):
    root = fake_machine(tmp_path / "node", *MACHINES["dgx-h100"])
    (tmp_path / "b.toml").write_text("[checks.gpu_count]\nexpected = 7")
    assert main(["config", "show", "--root", root, "--baseline", str(tmp_path / "b.toml")]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert 'profile "auto" default: profile dgx-h100' in lines
    assert f"checks.gpu_count.expected 7 {tmp_path}/b.toml" in lines
    assert "checks.gpu_nvlink.links 18 profile dgx-h100" in lines
    assert "checks.ib_link.expected_gbps.mlx5_0/1 400 profile dgx-h100" in lines


def test_without_profile_no_setting_is_guessed(tmp_path):
    root = fake_machine(tmp_path, *MACHINES["dgx-h100"])
    loaded = resolve_settings({"profile": "none", "root": root}, FILE, {}, CHECKS, lower_layers)
    assert {origin for _, _, origin in setting_rows(loaded)} == {"default", FILE}
    assert render.settings(setting_rows(loaded), render.Page())
