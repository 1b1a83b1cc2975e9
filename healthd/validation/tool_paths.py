"""Finds the measuring tools: from a setting, on the PATH, or in the usual places under /opt and /usr/local.

Root runs only programs that no other user could have written (common/ownership.py).
"""

from __future__ import annotations

import glob
import os
import stat
import sys
from collections.abc import Iterator, Mapping

from healthd.common import ownership

# The usual installation directories. There are no packages for nvbandwidth and nccl-tests; these are the places where
# Azure's and NVIDIA's images have them (Azure/azurehpc-health-checks, customTests; NVIDIA's containers).
FOLDERS = (
    "/opt/*/bin",
    "/opt/nccl-tests/build",
    "/opt/nvbandwidth",
    "/opt/nvidia/*/bin",
    "/usr/local/cuda/bin",
    "/usr/local/*/bin",
)
PYTHONS = ("python3", "/opt/conda/bin/python3", "/opt/*/bin/python3", "/usr/local/*/bin/python3")
TOOLS = ("nvbandwidth", "all_reduce_perf", "sendrecv_perf", "ib_write_bw", "dcgmi")
MAX_PYTHONS = 6


class Tools(dict[str, str]):
    """Maps each tool to its program's path.

    Attributes:
        pythons: interpreters that may have torch, best first.
        refused: maps each refused tool to the reason.
    """

    pythons: tuple[str, ...] = ()
    refused: Mapping[str, str] = {}


def find(named: Mapping[str, str], path: str) -> Tools:
    """Find the tools.

    Args:
        named: paths from the settings, by tool or "python".
        path: directories separated by ":".
    """
    found = Tools()
    refused: dict[str, str] = {}
    for tool in TOOLS:
        for candidate in [named[tool]] if tool in named else _candidates((tool,), path):
            refusal = _refusal(candidate)
            if refusal is None:
                found[tool] = candidate
                refused.pop(tool, None)
                break
            if refusal:
                refused.setdefault(tool, refusal)
    pythons = [named["python"]] if "python" in named else _candidates(PYTHONS, path)
    usable = dict.fromkeys(candidate for candidate in [*pythons, sys.executable] if _refusal(candidate) is None)
    found.pythons = tuple(usable)[:MAX_PYTHONS]
    found.refused = refused
    return found


def _candidates(names: tuple[str, ...], path: str) -> Iterator[str]:
    for name in names:
        if "/" in name:
            yield from sorted(glob.glob(name))
            continue
        for folder in [entry for entry in path.split(":") if entry.startswith("/")]:
            yield os.path.join(folder, name)
        for pattern in FOLDERS:
            yield from sorted(glob.glob(os.path.join(pattern, name)))


def _refusal(candidate: str) -> str | None:
    """Return None if root may run the program, "" if it does not exist, otherwise the reason why root may not run
    it."""
    try:
        file_stat = ownership.stat_program(candidate)
    except ownership.Untrusted as error:
        return str(error) if os.path.isfile(candidate) else ""
    except OSError:
        return ""
    return None if stat.S_ISREG(file_stat.st_mode) and file_stat.st_mode & 0o111 else ""
