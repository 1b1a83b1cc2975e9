"""Builds stub_nvml.c as the libnvidia-ml.so.1 that a child process then loads.

environment = stub_nvml.environment(tmp_path, STUB_ERRORS="*@1=15")
subprocess.run([sys.executable, ...], env=environment)
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("stub_nvml.c")
NAME = "libnvidia-ml.so.1"
ROOT = SOURCE.parents[1]


def build(directory: Path, minimal: bool = False) -> Path:
    """Compile the stub once into its own directory under `directory` and return that directory."""
    library_dir = directory / ("stub-minimal" if minimal else "stub")
    library_dir.mkdir(parents=True, exist_ok=True)
    if not (library_dir / NAME).exists():
        flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{NAME}"]
        command = ["gcc", *flags, *(["-DMINIMAL"] if minimal else []), str(SOURCE), "-o", str(library_dir / NAME)]
        subprocess.run(command, check=True)
    return library_dir


def environment(directory: Path, minimal: bool = False, **settings: str) -> dict[str, str]:
    """Return the environment of a process that finds the stub, with STUB_* settings (see stub_nvml.c)."""
    paths = {
        "LD_LIBRARY_PATH": _prepended("LD_LIBRARY_PATH", build(directory, minimal)),
        "PYTHONPATH": _prepended("PYTHONPATH", ROOT),
    }
    return {**os.environ, **paths, **settings}


def _prepended(variable: str, path: Path) -> str:
    return os.pathsep.join(filter(None, [str(path), os.environ.get(variable)]))
