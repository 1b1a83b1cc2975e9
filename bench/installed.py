"""A Python as where healthd is installed: the packages make such an environment, without pip and without .pth files. An
editable install's finder brings pathlib, urllib and ipaddress into each process: 0.5 MiB in both."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from healthd_daemon import Healthd

REPOSITORY = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def installed(*flags: str, config: str) -> Iterator[Healthd]:
    """A daemon of it. What lies beside this Python is found by PYTHONPATH, whose folders' .pth files are not read."""
    with tempfile.TemporaryDirectory(prefix="healthd-bench.") as folder:
        # msgspec imports it, with inspect, where it is there. Only tools for development need it.
        Path(folder, "typing_extensions.py").write_text("raise ModuleNotFoundError(__name__)\n")
        found = [folder, str(REPOSITORY), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        paths = os.pathsep.join(found)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        python = str(Path(folder, "bin", "python"))
        with Healthd(*flags, config=config, env={"PYTHONPATH": paths}, python=python) as daemon:
            yield daemon
