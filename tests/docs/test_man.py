"""Tests of the manual pages: they are well formed and match the command line and the settings."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from healthd.agent.settings.config import CheckConfig, Settings
from healthd.agent.settings.effective import resolve_settings
from healthd.agent.settings.registry import built_in_checks
from healthd.cli.main import FAMILIES
from healthd.common.codec import dump, fields_of

pytestmark = pytest.mark.one_python

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
COMMANDS, SETTINGS = ROOT / "man/healthd.8", ROOT / "man/healthd.toml.5"


def plain_text(page: Path) -> str:
    """Return the page without the fonts and escapes of roff."""
    plain = re.sub(r"\\f[BIPR]", "", page.read_text("utf-8"))
    return plain.replace(r"\-", "-").replace(r"\(dq", '"').replace(r"\(aq", "'").replace(r"\e", "\\")


@pytest.mark.parametrize("page", [COMMANDS, SETTINGS], ids=lambda page: page.name)
def test_groff_reports_no_warnings(page):
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    command = ["groff", "-man", "-Tutf8", "-ww", str(page)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (result.returncode, result.stderr) == (0, "")


def healthd(*arguments: str) -> str:
    command = [sys.executable, "-m", "healthd", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT).stdout


def test_every_command_and_flag_is_documented():
    page = plain_text(COMMANDS)
    named = re.findall(
        r"(?m)^  ((?:(?:config|fleet|hooks?) )?[a-z-]+)(?= )", healthd("--help").partition("\nexamples")[0]
    )
    assert {"run", "check", "status", "config check", "fleet prune"} <= set(named)
    for command in named:
        assert f"healthd {command}" in page, command
        for flag in set(re.findall(r"--[a-z-]+", healthd(*command.split(), "--help").partition("\nexamples")[0])):
            assert flag in page or flag == "--help", f"{command} {flag}"


def test_synopsis_has_each_command():
    synopsis = plain_text(COMMANDS).partition(".SH SYNOPSIS")[2].partition("\n.SH ")[0]
    lines = [line.removeprefix(".B ") for line in synopsis.splitlines()]
    missing = [name for name in FAMILIES if not any(f"{line} ".startswith(f"healthd {name} ") for line in lines)]
    assert missing == []


def defaults(config: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields_of(type(config)):
        value = getattr(config, field.name)
        if fields_of(type(value)):
            found.update(defaults(value, f"{field.name}."))
        else:
            found[f"{prefix}{field.name}"] = dump(value)
    return found


def documented_settings() -> dict[str, str]:
    """Return "kernel_log.source" -> '"kmsg", start', as on the page."""
    found, section = {}, ""
    for line in plain_text(SETTINGS).splitlines():
        if line.startswith(".SS ["):
            section = line[len(".SS [") : -1] + "."
        elif setting := re.fullmatch(r'\.BR ([a-z_]+) " \((.*)\)"', line):
            found[section + setting[1]] = setting[2]
    return found


def display(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str | list) else str(value).lower()


def test_every_setting_is_documented_with_its_default():
    daemon_settings = {name: display(value) for name, value in defaults(Settings()).items()}
    common = {
        f"checks.NAME.{name}": display(value)
        for name, value in defaults(CheckConfig()).items()
        if name not in ("name", "guessed")
    }
    common["checks.NAME.interval_seconds"] = "the daemon's"
    assert {name: value.removesuffix(", start") for name, value in documented_settings().items()} == {
        **daemon_settings,
        **common,
    }


def test_settings_requiring_restart_are_marked():
    from healthd.agent.daemon import FIXED_SETTINGS

    marked = {name for name, value in documented_settings().items() if value.endswith(", start")}
    assert marked == {name for name in defaults(Settings()) if name.partition(".")[0] in FIXED_SETTINGS}


def test_example_settings_are_accepted():
    example = re.search(r"\.SH EXAMPLE\n\.nf\n(.*?)\n\.fi", plain_text(SETTINGS), re.DOTALL)
    assert example is not None
    loaded = resolve_settings(tomllib.loads(example[1]), "healthd.toml", {}, built_in_checks())
    assert {("mount", "/data"), ("exec", "nhc")} <= set(loaded.checks)
