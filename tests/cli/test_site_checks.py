"""Tests of a site's own checks: findings, explanations, settings and declarations."""

from __future__ import annotations

from pathlib import Path

import pytest
from machine import Machine
from site_checks import install_checks

from healthd.agent.settings import registry
from tests.cli.test_cli import run


@pytest.fixture
def site_flags(tmp_path: Path) -> list[str]:
    """Return the flags for a machine with a lost GPU, a leaf that is down and a swap device in use."""
    machine = Machine(tmp_path)
    machine.gpus("gpu.3.lost = true")
    machine.write(
        {"/leaf": "down 5\n", "/proc/swaps": "Filename Type Size Used Priority\n/dev/sda2 partition 9 1 -2\n"}
    )
    machine.now()
    config = tmp_path / "healthd.toml"
    config.write_text(install_checks(tmp_path))
    return ["--config", str(config), "--root", str(machine.root), "--fake-nvml", str(machine.scenario)]


def test_site_checks_report_their_findings_and_failures(site_flags: list[str]) -> None:
    found = run("check", "leaf", "swap", "--json", *site_flags).document
    assert {
        (condition["code"], condition["subject"], condition["severity"], condition["message"])
        for condition in found["conditions"]
    } == {
        ("leaf/down", "rail0", "degraded", "the leaf of rail0 is down"),
        ("swap/used", "/dev/sda2", "warning", "is in use"),
    }
    assert {(result["check"], result["instance"], result["outcome"]) for result in found["results"]} == {
        ("swap", "", "completed"),
        ("leaf", "rail0", "completed"),
        ("leaf", "rail1", "failed"),
    }


@pytest.mark.one_python
def test_site_checks_explain_their_codes(site_flags: list[str]) -> None:
    for code, words in {
        "leaf/down": ("The leaf is down.", "The rail has no network.", "Look at it."),
        "leaf/hang": ("The leaf is ill.", "Look at its log."),
        "swap/gpu": ("A GPU is silent.", "Its jobs fail.", "dmesg"),
    }.items():
        text = run("explain", code, *site_flags[:2]).out
        assert all(word in text for word in words), text
    codes = run("list", "--codes", *site_flags[:2]).out
    assert all(code in codes for code in ("leaf/down", "leaf/errors", "leaf/hang", "swap/used", "swap/gpu"))


def test_site_checks_reject_invalid_setting(site_flags: list[str]) -> None:
    config = Path(site_flags[1])
    config.write_text(config.read_text().replace("max_errors = 20", "max_errors = -1"))
    result = run("config", "check", str(config))
    assert result.status == 64
    assert "max_errors" in result.err


def test_registry_reads_declarations_of_site_checks(site_flags: list[str]) -> None:
    checks = registry.find_checks(str(Path(site_flags[1]).with_name("checks.d")))
    leaf, swap = checks["leaf"], checks["swap"]
    config = leaf.make_config({"name": "rail0", "overdue_seconds": 1.0}, "leaf")
    assert (leaf.per, leaf.uses, leaf.after_events) == ("rail", "", ("xid", "job_end"))
    assert not leaf.may_block_resume(config)
    assert [finding.code for finding in leaf.overdue(config, 2.0)] == ["leaf/hang"]
    assert not list(leaf.overdue(config, 0.5))
    assert (swap.when, swap.uses) == ("idle", "nvml")
    assert not swap.may_block_resume(swap.make_config({}, "swap")), "its codes only warn"
    assert swap.may_block_resume(swap.make_config({"severity": {"swap/used": "degraded"}}, "swap"))
