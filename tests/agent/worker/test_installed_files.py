"""Tests of healthd's installed files: a running daemon detects their replacement, and does not need them later."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from healthd.agent.worker import installed_files
from healthd.agent.worker.installed_files import identities, problem
from tests.development.test_design import imports

pytestmark = pytest.mark.one_python

# Start a daemon like `healthd run` and print its loaded modules once it is ready.
READY_DAEMON = """
import sys
from types import SimpleNamespace
from healthd.cli.flags import load_settings
from healthd.agent.daemon import Daemon
from healthd.common.text import compile_patterns
args = SimpleNamespace(config=sys.argv[1])
daemon = Daemon(lambda checks_dir: load_settings(args, checks_dir=checks_dir))
daemon.start()
print(*sys.modules, f"uncompiled={compile_patterns()}")
daemon.shut_down()
"""
SETTINGS = """\
runtime_dir = "{0}/run"
state_dir = "{0}/state"
profile = "none"
baseline_file = ""
nvml.fake = "dgx-h100"
repair.mode = "advise"
metrics.listen = "127.0.0.1:0"
kernel_log.source = "{0}/log"
"""
# Modules whose late imports a daemon does not need, or not without its files, with the reason.
NOT_NEEDED = {
    "agent.worker.process": "the worker's operations",
    "host.host": "the worker queries NVML",
    "nvidia.nvml": "the worker's, like host",
    "common.codec": "Python's own module, which is not in the venv",
    "common.toml": "the library of one Python or the other",
    "host.inventory": "the worker queries udev",
    "agent.kernel_log.open_source": "its source was opened at the start, or is of another kind",
    "agent.kernel_log.journal": "the worker reads the journal",
    "agent.reporting.systemd": "the log was set up at the start",
    "agent.settings.registry": "a reload is refused then",
    "agent.settings.effective": "a reload is refused then",
    "agent.kernel_log.prefix": "Python's own module, which is not in the venv",
    "host.system": "Python's own module, which is not in the venv",
    "checks.validation": "the worker reads the result of the last validation",
    "checks.gpu_xid": "texts of `healthd explain`",
    "agent.metrics.http_server": "TLS: at the start, where a site has it",
    "agent.metrics.web_config": "TLS: at the start, where a site has it",
    "cli.flags": "read at the start; a reload is refused then",
    "cli.terminal": "the output of commands that end",
}


def test_late_imports_in_ready_daemon_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    file = tmp_path / "healthd.toml"
    file.write_text(SETTINGS.format(tmp_path))
    completed = subprocess.run(
        [sys.executable, "-c", READY_DAEMON, str(file)], capture_output=True, text=True, timeout=120
    )
    loaded = set(completed.stdout.split())
    assert "healthd.agent.daemon" in loaded, completed.stderr
    assert "uncompiled=0" in loaded
    late_imports = [
        item
        for item in imports()
        if not item.at_top and f"healthd.{item.module}" in loaded and item.module not in NOT_NEEDED
    ]
    assert [str(item) for item in late_imports if item.imported not in loaded] == []
    assert set(NOT_NEEDED) <= {item.module for item in imports() if not item.at_top}


def test_problem_reports_replaced_or_removed_file(tmp_path: Path) -> None:
    file, link = tmp_path / "healthd.py", tmp_path / "python"
    file.write_text("1")
    link.symlink_to("/usr/bin/python3")
    paths = [str(file), str(link)]
    old_identities = identities(paths)
    assert set(old_identities) == set(paths)
    assert problem(old_identities, identities(paths)) == ""
    (tmp_path / "new").write_text("1")
    os.replace(tmp_path / "new", file)
    assert problem(old_identities, identities(paths)).startswith(
        f"healthd's files were replaced ({file}) while healthd is running: restart"
    )
    file.unlink()
    assert problem(old_identities, identities(paths)).startswith(f"healthd's files were removed ({file}) while ")


def test_identities_includes_installed_files() -> None:
    assert set(identities()) == set(installed_files.FILES)
