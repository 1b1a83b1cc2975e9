"""What an older healthd wrote is read: its ledger, a recording, its settings, a site's checks (tests/data/7adda38)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from machine import Machine
from old_healthd import OLD

from healthd.agent.conditions import ledger_codec
from healthd.agent.settings import registry
from healthd.agent.settings.config import read_file
from healthd.agent.settings.effective import effective, settle
from healthd.common.codec import dump
from tests.cli.test_cli import run


def is_in(wanted: Any, found: Any) -> bool:
    """Whether all of it is there; a table may have more by now."""
    if isinstance(wanted, dict):
        return all(key in found and is_in(value, found[key]) for key, value in wanted.items())
    if isinstance(wanted, list):
        return len(wanted) == len(found) and all(map(is_in, wanted, found))
    return bool(wanted == found)


# --- what it remembered


def test_its_ledger_is_read_with_all_that_is_in_it():
    text = (OLD / "ledger.json").read_text()
    found = ledger_codec.decode(text, "ledger.json")
    assert is_in(json.loads(text), dump(found))
    assert {c.code: c.state.value for c in (*found.conditions, *found.cleared)} == {
        "eth_link/down": "acknowledged",
        "gpu_row_remap/pending": "open",
        "gpu_xid/13": "open",
        "gpu_xid/31": "cleared",
        "gpu_xid/79": "open",
    }
    assert [event.code for event in found.events] == ["31", "79", "13"]
    assert [requeued.job for requeued in found.slurm.requeued] == ["1"]
    assert found.slurm.reason.startswith("healthd: gpu_xid/79 ")
    assert found.pause
    assert found.pause.why == "driver upgrade"


def test_its_counters_past_is_read():
    text = (OLD / "past.json").read_text()
    assert ledger_codec.decode_past(text, "past.json") == json.loads(text)


# --- a recording


def test_its_recording_gives_the_verdict_of_then():
    then = json.loads((OLD / "node.json").read_text())
    now = run("check", "--replay", str(OLD / "node.rec"), "--json").document
    assert is_in(then["conditions"], now["conditions"])
    assert [is_in(old, new) for old, new in zip(then["results"], now["results"], strict=True)]
    assert now["health"] == then["health"]


# --- settings


@pytest.mark.parametrize("name", ["settings", "settings_changed"])
def test_its_settings_mean_what_they_meant(name):
    file = str(OLD / f"{name}.toml")
    loaded = settle(read_file(file, required=True), file, {}, registry.built_in())
    now = {setting: value for setting, value, _ in effective(loaded)}
    then = dict(json.loads((OLD / f"{name}.json").read_text()))
    if name == "settings":  # the default of this one was changed
        del then["checks.gpu_nvlink.bit_error_rate"]
    assert {setting: now.get(setting) for setting in then} == then


def test_each_of_its_tables_was_changed():
    then, changed = (dict(json.loads((OLD / f"{name}.json").read_text())) for name in ("settings", "settings_changed"))
    places = {setting.rpartition(".")[0] for setting in changed if changed[setting] != then.get(setting)}
    assert {setting.rpartition(".")[0] for setting in then} - places == set()


# --- a site's checks


@pytest.fixture
def site(tmp_path: Path) -> list[str]:
    """The flags with which a node of that site is looked at."""
    machine = Machine(tmp_path)
    machine.gpus("gpu.3.lost = true")
    machine.write(
        {"/leaf": "down 5\n", "/proc/swaps": "Filename Type Size Used Priority\n/dev/sda2 partition 9 1 -2\n"}
    )
    machine.now()
    folder, config = tmp_path / "checks.d", tmp_path / "healthd.toml"
    shutil.copytree(OLD / "checks.d", folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)
    config.write_text((OLD / "site.toml").read_text().replace("CHECKS_DIR", str(folder)))
    return ["--config", str(config), "--root", str(machine.root), "--fake-nvml", str(machine.scenario)]


def test_its_sites_checks_find_what_they_found(site):
    then = json.loads((OLD / "site.json").read_text())
    now = run("check", "leaf", "swap", "--json", *site).document
    told = [[c[key] for key in ("code", "subject", "severity", "message")] for c in now["conditions"]]
    assert told == then["conditions"]
    assert [[r[key] for key in ("check", "instance", "outcome")] for r in now["results"]] == then["results"]


@pytest.mark.one_python
def test_its_sites_checks_explain_their_codes(site):
    for code, words in {
        "leaf/down": ("The leaf is down.", "The rail has no network.", "Look at it."),
        "leaf/hang": ("The leaf is ill.", "Look at its log."),
        "swap/gpu": ("A GPU is silent.", "Its jobs fail.", "dmesg"),
    }.items():
        said = run("explain", code, *site[:2]).out
        assert all(word in said for word in words), said
    codes = run("list", "--codes", *site[:2]).out
    assert all(code in codes for code in ("leaf/down", "leaf/errors", "leaf/hang", "swap/used", "swap/gpu"))


def test_its_sites_checks_refuse_a_setting(site):
    config = Path(site[1])
    config.write_text(config.read_text().replace("max_errors = 20", "max_errors = -1"))
    done = run("config", "check", str(config))
    assert done.status == 64
    assert done.err.endswith("max_errors must not be negative\n")


def test_what_its_sites_checks_declare_is_known(site):
    checks = registry.find(str(Path(site[1]).with_name("checks.d")))
    leaf, swap = checks["leaf"], checks["swap"]
    config = leaf.make_config({"name": "rail0", "overdue_seconds": 1.0}, "leaf")
    assert (leaf.per, leaf.uses, leaf.after_events) == ("rail", "", ("xid", "job_end"))
    assert not leaf.holds_resume(config)
    assert [finding.code for finding in leaf.overdue(config, 2.0)] == ["leaf/hang"]
    assert not list(leaf.overdue(config, 0.5))
    assert (swap.when, swap.uses) == ("idle", "nvml")
    assert not swap.holds_resume(swap.make_config({}, "swap")), "its codes only warn"
    assert swap.holds_resume(swap.make_config({"severity": {"swap/used": "degraded"}}, "swap"))
