"""A daemon with a Python as in an installation: like the packages, without pip and without .pth files.

The finder of an editable install imports pathlib, urllib and ipaddress into each process: 0.5 MiB in both.
"""

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
    """Run a daemon with it. PYTHONPATH names this Python's packages, without reading their .pth files."""
    with tempfile.TemporaryDirectory(prefix="healthd-bench.") as folder:
        # If typing_extensions exists, msgspec imports it, with inspect. Only development tools need it.
        Path(folder, "typing_extensions.py").write_text("raise ModuleNotFoundError(__name__)\n")
        found = [folder, str(REPOSITORY), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        paths = os.pathsep.join(found)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        python = str(Path(folder, "bin", "python"))
        with Healthd(*flags, config=config, env={"PYTHONPATH": paths}, python=python) as daemon:
            yield daemon
