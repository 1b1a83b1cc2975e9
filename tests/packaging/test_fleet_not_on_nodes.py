"""Tests that nodes do not need the packages of the fleet: the daemon and all other modules run without them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from waiting import until

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]
# Packages of the extras healthd[fleet], healthd[failslow] and healthd[spark].
PACKAGES = ("duckdb", "numpy", "pyspark", "scipy", "sqlglot", "tqdm", "vl_convert")


@pytest.fixture
def environment_without_packages(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a Python that cannot import these packages; the file `tried` lists each attempt."""
    for name in PACKAGES:
        package = tmp_path / "path" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(
            f"open({str(tmp_path / 'tried')!r}, 'a').write('{name}\\n')\nraise ImportError('{name} is not on a node')\n"
        )
    path = f"{tmp_path / 'path'}:{ROOT}"
    return {"PATH": os.environ["PATH"], "PYTHONPATH": path, "LC_ALL": "C.UTF-8", "HOME": str(tmp_path)}


def test_blocked_package_cannot_be_imported(environment_without_packages, tmp_path):
    assert find_spec("duckdb") is not None, "without duckdb these tests would prove nothing"
    result = subprocess.run(
        [sys.executable, "-c", "import duckdb"], env=environment_without_packages, capture_output=True, text=True
    )
    assert "duckdb is not on a node" in result.stderr
    assert (tmp_path / "tried").read_text() == "duckdb\n"


def test_modules_outside_fleet_import_without_packages(environment_without_packages, tmp_path):
    program = (
        "import importlib, pkgutil, healthd\n"
        "names = [m.name for m in pkgutil.walk_packages(healthd.__path__, 'healthd.')]\n"
        "others = ('healthd.fleet.', 'healthd.failslow.detect_numpy')\n"
        "others = (*others, 'healthd.__main__')\n"
        "names = [n for n in names if not n.startswith(others)]\n"
        "for name in names: importlib.import_module(name)\n"
        "print(len(names))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment_without_packages, capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert int(result.stdout) > 100
    assert not (tmp_path / "tried").exists()


def test_daemon_runs_without_packages(environment_without_packages, tmp_path):
    (tmp_path / "healthd.toml").write_text("[checks.processes]\nenabled = false\n")
    (tmp_path / "kernel.log").write_text("")
    argv = [sys.executable, "-m", "healthd", "run", "--config", "healthd.toml", "--fake-nvml", "dgx-h100"]
    argv += ["--kernel-log", "kernel.log", "--runtime-dir", "run", "--state-dir", "state", "--listen", "off"]

    def status() -> int:
        command = [sys.executable, "-m", "healthd", "status", "--runtime-dir", str(tmp_path / "run")]
        return subprocess.run(command, env=environment_without_packages, capture_output=True, timeout=240).returncode

    with open(tmp_path / "out", "wb") as out:
        daemon = subprocess.Popen(argv, env=environment_without_packages, cwd=tmp_path, stdout=out, stderr=out)
    try:
        until(lambda: status() in (0, 1), "the first round has ended")
    finally:
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(240) == 0, (tmp_path / "out").read_text()
    assert not (tmp_path / "tried").exists()


def test_fleet_status_runs_without_packages(environment_without_packages, tmp_path):
    argv = [sys.executable, "-m", "healthd", "fleet", "status", "--prometheus", "http://127.0.0.1:9"]
    result = subprocess.run(argv, env=environment_without_packages, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (
        3,
        "healthd fleet status: http://127.0.0.1:9: cannot be reached: Connection refused\n",
    )
    assert not (tmp_path / "tried").exists()
