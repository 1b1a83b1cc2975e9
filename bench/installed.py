"""Run a daemon with a Python as the packages install it: without pip and without .pth files.

An editable install has a finder that imports pathlib, urllib and ipaddress into each process. This adds 0.5 MiB to the
daemon and to its worker together.
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
    """Run a daemon with this Python. PYTHONPATH names the packages, so that their .pth files are not read."""
    with tempfile.TemporaryDirectory(prefix="healthd-bench.") as folder:
        # If typing_extensions is installed, msgspec imports it and with it inspect. Only development tools need it.
        Path(folder, "typing_extensions.py").write_text("raise ModuleNotFoundError(__name__)\n")
        found = [folder, str(REPOSITORY), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        paths = os.pathsep.join(found)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        python = str(Path(folder, "bin", "python"))
        with Healthd(*flags, config=config, env={"PYTHONPATH": paths}, python=python) as daemon:
            yield daemon
