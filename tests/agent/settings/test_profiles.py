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
from story import Node, Story
from trees import pci_device, write

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

KNOWN = built_in_checks()
FILE = "/etc/healthd/healthd.toml"
ADDRESSES = [f"0000:{number:02x}:00.0" for number in range(0x1B, 0x1B + 8)]
MACHINES = {  # profile -> (product name, PCI device id of the GPUs, number of GPUs)
    "dgx-a100": ("DGXA100 920-23687-2531-001", "20b2", 8),
    "dgx-h100": ("DGXH100", "2330", 8),
    "dgx-h200": ("DGXH200", "2335", 8),
    "dgx-b200": ("DGXB200", "2901", 8),
    "hgx": ("PowerEdge XE9680", "2330", 8),
    "hgx-a100": ("G492-ZD2-00", "20b0", 8),
    "hgx-4": ("PowerEdge T-XE8545", "20b2", 4),
}


def machine(root: Path, product: str, device: str, count: int) -> str:
    write(root, {"/sys/class/dmi/id/product_name": f"{product}\n"})
    for pci in ADDRESSES[:count]:
        pci_device(root, pci, "0x030200", device=f"0x{device}")
    return str(root)


def chosen(root: str) -> str:
    return next((layer.source for layer in lower_layers(Settings(root=root)) if layer.guessed), "")


def laid(*tables: tuple[str, str, bool], top: str = "") -> Loaded:
    """Return settings of (source, TOML, guessed) layers below a healthd.toml."""
    lower = [Layer(source, tomllib.loads(text).get("checks", {}), guessed) for source, text, guessed in tables]
    return resolve_settings(tomllib.loads(top), FILE, {}, KNOWN, lambda _settings: lower)


def origins(loaded: Loaded) -> dict[str, tuple[Any, str]]:
    return {name: (value, origin) for name, value, origin in setting_rows(loaded)}


# --- profiles in healthd


def test_there_is_a_machine_for_every_profile():
    assert sorted(MACHINES) == layers.profile_names()


@pytest.mark.parametrize("name", layers.profile_names())
def test_a_profile_holds_settings_that_exist(name):
    loaded = resolve_settings({"profile": name, "baseline_file": ""}, FILE, {}, KNOWN, lower_layers)
    assert loaded.profile == f"profile {name}"
    assert loaded.checks["gpu_count", ""].guessed == ("expected",)


@pytest.mark.parametrize("name", layers.profile_names())
def test_a_profile_says_where_its_numbers_are_from(name):
    text = Path(layers.PROFILES, f"{name}.toml").read_text("utf-8")
    assert "# Sources: " in text
    assert "pci.ids" in text


@pytest.mark.parametrize("name", layers.profile_names())
def test_a_machine_gets_its_profile(tmp_path, name):
    assert chosen(machine(tmp_path, *MACHINES[name])) == f"profile {name}"


@pytest.mark.parametrize("name", layers.profile_names())
def test_it_keeps_it_when_a_gpu_is_lost(tmp_path, name):
    product, device, count = MACHINES[name]
    assert chosen(machine(tmp_path, product, device, count - 1)) == f"profile {name}"


SWITCHES = {"dgx-a100": 6, "dgx-h100": 4, "dgx-h200": 4}  # profile -> number of switches with a device file
FAKES = {
    "hgx": "dgx-h100",
    "hgx-a100": "dgx-a100",
    "hgx-4": "dgx-a100",
}  # profile -> profile of the fake NVML, if other
PORTS = 12


def healthy(folder: Path, name: str) -> tuple[Machine, Loaded]:
    """Return a machine that has run no CUDA program since its boot, and the settings that it selects."""
    product, device, count = MACHINES[name]
    node = Machine(folder, FAKES.get(name, name), count, f"0x{device}")
    for path in ("sys/module/nvidia_uvm/initstate", "dev/nvidia-uvm", "dev/nvidia-uvm-tools"):
        (node.root / path).unlink()
    (node.root / "sys/module/nvidia_uvm").rmdir()
    switches = SWITCHES.get(name, 0)
    node.write({f"/dev/nvidia-nvswitch{number}": "" for number in range(switches)})
    node.write({"/dev/null": "", **({"/dev/nvidia-nvswitchctl": ""} if switches else {})})
    node.write({"/sys/class/dmi/id/product_name": f"{product}\n"})
    for number in range(PORTS):
        node.port(number)
        node.count(number, **dict.fromkeys(KERNEL_COUNTERS, 0))
    loaded = resolve_settings({"root": str(node.root), "baseline_file": ""}, FILE, {}, KNOWN, lower_layers)
    assert loaded.profile == f"profile {name}"
    config: Any = loaded.checks["services", ""]
    node.units = dict.fromkeys((*config.required, *config.wanted), "active running")
    return node, loaded


def all_checks(loaded: Loaded) -> Node:
    return Node(Story(KNOWN[check].module, config) for (check, _), config in loaded.checks.items())


@pytest.mark.parametrize("name", layers.profile_names())
def test_a_healthy_machine_of_the_type_gives_nothing_above_info(tmp_path, name):
    node, loaded = healthy(tmp_path, name)
    checks = all_checks(loaded).looks(node.now(), 4)
    checks.each(lambda story: story.hold("drained, so that checks of an idle node run")).looks(node.now(), 2)
    results = [story.result for story in checks.stories if story.result]
    found = [finding for result in results for finding in result.findings if finding.severity > Severity.INFO]
    assert (found, checks.seen, checks.failed) == ([], set(), [])
    assert {KNOWN[result.check].name for result in results} >= {"device_nodes", "kernel_modules", "services"}


@pytest.mark.parametrize("name", layers.profile_names())
def test_what_it_lost_is_found_on_the_same_machine_and_drains_nothing_that_is_only_guessed(tmp_path, name):
    """Without this test, an empty profile would pass the test above."""
    node, loaded = healthy(tmp_path, name)
    node.units["slurmd.service"] = "failed failed"
    expected: Any = loaded.checks["device_nodes", ""]
    lost = {"services/inactive"}
    if expected.expected:
        (node.root / "dev/nvidia0").unlink()
        (node.root / "sys/module/nvidia/initstate").write_text("going\n")
        lost |= {"device_nodes/missing", "kernel_modules/not_loaded"}
    checks = all_checks(loaded).looks(node.now(), 4)
    assert (checks.seen, checks.drained) == (lost, False)


def test_a_dgx_that_lost_every_gpu_is_known_by_its_name(tmp_path):
    assert chosen(machine(tmp_path, "DGXH100", "2330", 0)) == "profile dgx-h100"


def test_a_dgx_with_other_gpus_than_its_name_says_is_taken_by_its_gpus(tmp_path):
    assert chosen(machine(tmp_path, "DGXH100", "2335", 8)) == "profile hgx"


@pytest.mark.parametrize(
    ("product", "device", "count"),
    [
        ("PowerEdge R750xa", "20b5", 4),  # A100 PCIe
        ("PowerEdge R760xa", "2331", 8),  # H100 PCIe
        ("Standard PC (Q35 + ICH9, 2009)", "2330", 1),  # a virtual machine with one
        ("Standard PC (Q35 + ICH9, 2009)", "2330", 2),
        ("DGX-1 with V100", "1db5", 8),
        ("PowerEdge C6520", "2330", 0),
        ("", "2330", 0),
    ],
)
def test_other_machines_get_none(tmp_path, product, device, count):
    assert chosen(machine(tmp_path, product, device, count)) == ""


def test_virtual_functions_are_not_counted(tmp_path):
    root = machine(tmp_path, "PowerEdge XE9680", "2330", 2)
    for number in range(1, 7):
        pci = f"0000:1b:00.{number}"
        pci_device(tmp_path, pci, "0x030200", device="0x2330")
        (tmp_path / "sys/bus/pci/devices" / pci / "physfn").symlink_to("../0000:1b:00.0")
    assert chosen(root) == ""


@pytest.mark.parametrize("name", layers.profile_names())
def test_a_profile_asks_for_a_product_or_for_gpus(name):
    """So no profile matches a machine without both, and none is read there."""
    match = load(Match, tomllib.loads(Path(layers.PROFILES, f"{name}.toml").read_text())["match"])
    assert match.products or match.at_least > 0
    assert not match.fits("", {})


def test_a_tree_without_anything_gets_none(tmp_path):
    assert chosen(str(tmp_path)) == ""


def test_what_cannot_be_read_is_not_guessed_on(tmp_path):
    root = machine(tmp_path, "DGXH100", "2330", 8)
    (tmp_path / "sys/bus/pci/devices" / ADDRESSES[0] / "vendor").write_text("N/A\n")
    assert chosen(root) == ""


@given(st.text(), st.dictionaries(st.text(max_size=9), st.integers(0, 20)))
def test_any_machine_is_matched_or_not(product, gpus):
    assert Match(products=("DGX*",)).fits(product, gpus) in (True, False)


def test_a_machine_is_looked_at_through_files_alone(tmp_path):
    """The daemon itself reads the machine, and NVIDIA's driver may hang. So no GPU is queried."""
    machine(tmp_path, *MACHINES["dgx-h100"])
    write(tmp_path, {"/proc/driver/nvidia/version": "x"})
    (tmp_path / "proc/driver/nvidia/gpus").symlink_to("/dev/full")
    assert chosen(str(tmp_path)) == "profile dgx-h100"


# --- precedence of layers


def test_each_setting_comes_from_the_uppermost_layer_that_has_it():
    loaded = laid(
        ("profile dgx-h100", "[checks.gpu_count]\nexpected = 8\n[checks.gpu_nvlink]\nlinks = 18", True),
        ("/etc/healthd/baseline.toml", "[checks.gpu_count]\nexpected = 7\nclear_after = 3", False),
        top="[checks.gpu_count]\nclear_after = 5",
    )
    found = origins(loaded)
    assert found["checks.gpu_count.expected"] == (7, "/etc/healthd/baseline.toml")
    assert found["checks.gpu_count.clear_after"] == (5, FILE)
    assert found["checks.gpu_nvlink.links"] == (18, "profile dgx-h100")
    assert found["checks.gpu_nvlink.enforce"] == (True, "default")


def test_a_table_that_is_a_value_is_replaced_whole():
    loaded = laid(
        ("profile x", '[checks.ib_link.expected_gbps]\n"mlx5_0/1" = 400\n"mlx5_1/1" = 400', True),
        ("baseline", '[checks.ib_link.expected_gbps]\n"mlx5_5/1" = 200', False),
    )
    assert loaded.checks["ib_link", ""].expected_gbps == {"mlx5_5/1": 200.0}  # type: ignore[attr-defined]
    found = origins(loaded)
    assert found["checks.ib_link.expected_gbps.mlx5_5/1"] == (200.0, "baseline")
    assert "checks.ib_link.expected_gbps.mlx5_0/1" not in found


def test_named_tables_are_laid_over_each_other_too():
    loaded = laid(
        ("baseline", '[checks.mount."/data"]\nfstype = "nfs"\n[checks.mount."/scratch"]\nfstype = "lustre"', False),
        top='[checks.mount]\nhang_degraded_seconds = 60.0\n[checks.mount."/scratch"]\nenabled = false',
    )
    assert ("mount", "/scratch") in loaded.disabled
    data = loaded.checks["mount", "/data"]
    assert (data.fstype, data.hang_degraded_seconds) == ("nfs", 60.0)  # type: ignore[attr-defined]
    found = origins(loaded)
    assert found['checks.mount."/data".fstype'] == ("nfs", "baseline")
    assert found['checks.mount."/data".hang_degraded_seconds'] == (60.0, FILE)


def test_only_what_a_profile_said_last_is_guessed():
    guess = ("profile x", "[checks.gpu_count]\nexpected = 8", True)
    written = ("baseline", "[checks.gpu_count]\nexpected = 8", False)
    assert laid(guess).checks["gpu_count", ""].guessed == ("expected",)
    assert laid(guess, written).checks["gpu_count", ""].guessed == ()
    assert laid(guess, top="[checks.gpu_count]\nexpected = 8").checks["gpu_count", ""].guessed == ()
    assert laid(guess, top="[checks.gpu_count]\nclear_after = 8").checks["gpu_count", ""].guessed == ("expected",)


def test_a_guess_in_a_named_table_and_beside_it():
    guess = ("profile x", '[checks.mount]\nread_only = true\n[checks.mount."/data"]\nfstype = "nfs"', True)
    assert set(laid(guess).checks["mount", "/data"].guessed) == {"name", "fstype", "read_only"}
    top = '[checks.mount."/data"]\nread_only = false'
    assert laid(guess, top=top).checks["mount", "/data"].guessed == ("fstype",)


def test_the_worker_is_told_what_is_guessed():
    loaded = laid(("profile x", "[checks.gpu_count]\nexpected = 8", True))
    assert loaded.tables["gpu_count", ""] == {"name": "", "expected": 8, "guessed": ["expected"]}


# --- a guess warns and never drains


def seven_gpus(tmp_path: Path) -> Any:
    return scenarios(tmp_path)("gpu.3.gone = true")


def test_what_a_profile_guessed_warns_and_never_drains(tmp_path):
    loaded = laid(("profile dgx-h100", "[checks.gpu_count]\nexpected = 8", True))
    story = Story(gpu_count, loaded.checks["gpu_count", ""]).looks(seven_gpus(tmp_path), 5)
    assert (story.codes, story.drained) == (["gpu_count/fewer_than_expected"], False)


@pytest.mark.parametrize("written", ["baseline", "person"])
def test_what_a_person_or_a_baseline_wrote_drains(tmp_path, written):
    text = "[checks.gpu_count]\nexpected = 8"
    guess, baseline = ("profile dgx-h100", text, True), ("baseline", text, False)
    loaded = laid(guess, baseline) if written == "baseline" else laid(guess, top=text)
    story = Story(gpu_count, loaded.checks["gpu_count", ""]).looks(seven_gpus(tmp_path), 2)
    assert (story.codes, story.drained) == (["gpu_count/fewer_than_expected"], True)


def test_a_reload_that_makes_a_guess_certain_or_takes_that_back_is_followed(tmp_path):
    text = "[checks.gpu_count]\nexpected = 8"
    guessed, written = laid(("profile dgx-h100", text, True)), laid(("baseline", text, False))
    host = seven_gpus(tmp_path)
    story = Story(gpu_count, guessed.checks["gpu_count", ""]).looks(host, 3)
    story.config = written.checks["gpu_count", ""]
    assert story.look(host).drained
    story.config = guessed.checks["gpu_count", ""]
    assert not story.look(host).drained
    assert story.codes == ["gpu_count/fewer_than_expected"]


def test_where_there_is_no_systemd_a_guess_about_its_units_is_no_unknown(tmp_path):
    guess = ("profile x", '[checks.services]\nrequired = ["slurmd"]', True)
    config = laid(guess).checks["services", ""]
    assert Story(services, config).look(Host(str(tmp_path))).codes == []
    written = laid(guess, top='[checks.services]\nwanted = ["munge"]').checks["services", ""]
    with pytest.raises(RuntimeError, match="there is no systemctl"):
        Story(services, written).look(Host(str(tmp_path)))


def test_a_mount_that_a_profile_guessed_never_drains(tmp_path):
    text = '[checks.mount."/data"]'
    nothing = write(tmp_path, {"/proc/self/mountinfo": "21 0 8:1 / / rw - ext4 /dev/sda1 rw\n"})
    story = Story(mount, laid(("profile x", text, True)).checks["mount", "/data"]).looks(nothing, 6)
    assert (story.codes, story.drained) == (["mount/missing"], False)
    story = Story(mount, laid(("profile x", text, True), ("b", text, False)).checks["mount", "/data"])
    assert story.looks(nothing, 3).drained


def test_a_port_that_a_profile_guessed_never_gets_critical(tmp_path):
    text = '[checks.ib_link.expected_gbps]\n"mlx5_0/1" = 400'
    guessed, written = laid(("profile dgx-h100", text, True)), laid(("baseline", text, False))
    nothing = write(tmp_path, {"/sys/class/infiniband/none": ""})
    story = Story(ib_link, guessed.checks["ib_link", ""]).looks(nothing, 6)
    assert (story.codes, story.drained) == (["ib_link/missing"], False)
    story = Story(ib_link, written.checks["ib_link", ""]).looks(nothing, 6)
    assert (story.drained, story.requeued) == (True, True)


# --- files


def loaded_from(tmp_path: Path, *words: str, top: str = "") -> Loaded:
    file = tmp_path / "healthd.toml"
    file.write_text(top)
    parser = flags.Parser("check", "", "")
    flags.add_target_flags(parser)
    args: argparse.Namespace = parser.parse_args(["--config", str(file), *words])
    return flags.load_settings(args)[0]


def complaint(tmp_path: Path, *words: str, top: str = "") -> str:
    with pytest.raises(ConfigError) as raised:
        loaded_from(tmp_path, *words, top=top)
    return str(raised.value)


def test_a_mistake_in_a_baseline_is_one_sentence_with_its_name(tmp_path):
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
        assert complaint(tmp_path, "--baseline", str(file)).startswith(f"{file}: {sentence}"), text


def test_a_mistake_in_a_profile_is_one_sentence_with_its_name(tmp_path):
    file = tmp_path / "ours.toml"
    for text, sentence in (
        ("[checks.gpu_count]\nexpekted = 8", f"profile {file}: checks.gpu_count: unknown setting"),
        ('mode = "act"', f'{file}: unknown setting "mode"; this file may only contain [checks.NAME]'),
        ("[match]\nproduct = 1", f'{file}: match: unknown setting "product"; did you mean "products"?'),
    ):
        file.write_text(text)
        assert complaint(tmp_path, "--profile", str(file)).startswith(sentence), text


def test_a_profile_must_exist(tmp_path):
    words = 'profile: unknown profile "dgx-h10"; did you mean "dgx-h100"?'
    assert complaint(tmp_path, top='profile = "dgx-h10"') == f"{tmp_path}/healthd.toml: {words}"
    assert complaint(tmp_path, "--profile", "dgx-h10") == f"--profile: {words}"
    assert complaint(tmp_path, "--profile", "/none.toml") == "/none.toml: no such file"


def test_a_baseline_need_not_exist(tmp_path):
    assert loaded_from(tmp_path, "--baseline", str(tmp_path / "none.toml")).checks["gpu_count", ""].guessed == ()
    assert "absolute path" in complaint(tmp_path, top='baseline_file = "baseline.toml"')


def test_a_sites_own_profile_is_a_guess_too(tmp_path):
    (tmp_path / "ours.toml").write_text("[checks.gpu_count]\nexpected = 2")
    loaded = loaded_from(tmp_path, "--profile", str(tmp_path / "ours.toml"))
    assert loaded.checks["gpu_count", ""].guessed == ("expected",)


def test_the_baseline_of_this_machine_is_not_that_of_a_tree(tmp_path):
    default = Settings().baseline_file
    assert [layer.source for layer in lower_layers(Settings(profile="none"))] == [default]
    assert lower_layers(Settings(profile="none", root=str(tmp_path))) == []
    named = str(tmp_path / "b.toml")
    (settings,) = lower_layers(Settings(profile="none", root=str(tmp_path), baseline_file=named))
    assert settings.source == named


def test_settings_that_are_read_again_read_the_layers_again(tmp_path):
    """SIGHUP does the same."""
    file = tmp_path / "baseline.toml"
    file.write_text("[checks.gpu_count]\nexpected = 8")
    assert loaded_from(tmp_path, "--baseline", str(file)).checks["gpu_count", ""].expected == 8  # type: ignore[attr-defined]
    file.write_text("[checks.gpu_count]\nexpected = 4")
    assert loaded_from(tmp_path, "--baseline", str(file)).checks["gpu_count", ""].expected == 4  # type: ignore[attr-defined]


def test_config_show_tells_which_profile_was_chosen_and_where_each_setting_is_from(tmp_path, capsys):
    root = machine(tmp_path / "node", *MACHINES["dgx-h100"])
    (tmp_path / "b.toml").write_text("[checks.gpu_count]\nexpected = 7")
    assert main(["config", "show", "--root", root, "--baseline", str(tmp_path / "b.toml")]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert 'profile "auto" default: profile dgx-h100' in lines
    assert f"checks.gpu_count.expected 7 {tmp_path}/b.toml" in lines
    assert "checks.gpu_nvlink.links 18 profile dgx-h100" in lines
    assert "checks.ib_link.expected_gbps.mlx5_0/1 400 profile dgx-h100" in lines


def test_without_a_profile_nothing_is_guessed(tmp_path):
    root = machine(tmp_path, *MACHINES["dgx-h100"])
    loaded = resolve_settings({"profile": "none", "root": root}, FILE, {}, KNOWN, lower_layers)
    assert {origin for _, _, origin in setting_rows(loaded)} == {"default", FILE}
    assert render.settings(setting_rows(loaded), render.Page())
