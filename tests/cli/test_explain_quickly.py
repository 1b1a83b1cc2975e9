"""Tests of the fast path of `healthd explain CODE`.

It imports only the check of that code and those of the settings, and must print the same as with all checks imported.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from healthd.agent.settings import registry
from healthd.cli import explain
from healthd.cli.flags import load_settings

ROOT = Path(__file__).parents[2]
CHECKS = registry.built_in_checks()
CODES = [*registry.all_codes(CHECKS), "mount/others", "kernel/others"]

NO_SETTINGS = ""
MANY_SETTINGS = """\
mode = "act"
profile = "dgx-h100"
slurm.requeue = "node"
[checks.mount]
missing_confirm_seconds = 30
[checks.mount."/data"]
fstype = "lustre"
[checks.mount."/home"]
enforce = false
[checks.gpu_ecc]
enabled = false
[checks.gpu_xid]
enforce = false
severity = {"gpu_xid/79" = "warning"}
"""


def arguments(tmp_path: Path, text: str) -> argparse.Namespace:
    file = tmp_path / "healthd.toml"
    file.write_text(f'runtime_dir = "{tmp_path}"\nchecks_dir = "{tmp_path}/checks.d"\nbaseline_file = ""\n{text}')
    return argparse.Namespace(config=str(file), json=True)


@pytest.mark.parametrize("text", [NO_SETTINGS, MANY_SETTINGS], ids=["plain", "many"])
def test_fast_path_equals_full_path_for_each_code(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(tmp_path, text)
    settings_with_all_checks = load_settings(args)
    monkeypatch.setattr(
        explain, "load_settings", lambda args: settings_with_all_checks
    )  # loaded once because it is slow
    for code in CODES:
        fast_document = explain._code_document(code, args)
        assert fast_document is not None, code
        assert fast_document == explain._query_document(code, args), code


@pytest.mark.parametrize(
    "words",
    ["79", "gpu_xid", "gpu_xid/079", "GPU_XID/79", "gpu_xid/7o", "nvlink5/149:4", "healthd: gpu_xid/79", "/", "a/b"],
)
def test_fast_path_rejects_other_queries(words: str, tmp_path: Path) -> None:
    assert explain._code_document(words, arguments(tmp_path, NO_SETTINGS)) is None


@pytest.mark.parametrize(
    "invalid_settings", ["[checks.mout]", "[checks.gpu_ecc]\nenabeld = true", "checks = 5", "[fleet]\nlimit = 1", "["]
)
def test_fast_path_rejects_invalid_settings(invalid_settings: str, tmp_path: Path) -> None:
    args = arguments(tmp_path, invalid_settings)
    assert explain._code_document("gpu_xid/79", args) is None
    assert explain._query_document("gpu_xid/79", args)["settings_problem"]


def test_fast_path_rejects_site_checks(tmp_path: Path) -> None:
    args = arguments(tmp_path, NO_SETTINGS)
    (tmp_path / "checks.d").mkdir()
    (tmp_path / "checks.d/own.py").write_text("def run(host, config, past):\n    return ()\n")
    assert explain._code_document("gpu_xid/79", args) is None


def test_fast_path_imports_only_named_checks(tmp_path: Path) -> None:
    args = arguments(tmp_path, "[checks.disk_space]\nenforce = false\n")
    program = (
        "import sys; from healthd.cli.main import main; status = main(sys.argv[1:]);"
        "print(*(name for name in sys.modules if name.startswith('healthd.checks.')), file=sys.stderr);"
        "sys.exit(status)"
    )
    words = [sys.executable, "-c", program, "explain", "gpu_xid/79", "--config", args.config]
    result = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.startswith("gpu_xid/79")
    assert sorted(result.stderr.split()) == ["healthd.checks.disk_space", "healthd.checks.gpu_xid"]
