"""Paths of the measuring tools: from a setting, on the PATH, or in the usual places below /opt and /usr/local.

Root runs only programs that no other user could have written (common/ownership.py).
"""

from __future__ import annotations

import glob
import os
import stat
import sys
from collections.abc import Iterator, Mapping

from healthd.common import ownership

# The usual installation directories: nvbandwidth and nccl-tests have no packages of their own; the images of Azure and
# NVIDIA have them here (Azure/azurehpc-health-checks, customTests; NVIDIA's containers).
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
MOST_PYTHONS = 6


class Tools(dict[str, str]):
    """Tool -> path of its program. `pythons`: those that may have torch, best first. `refused`: tool -> reason."""

    pythons: tuple[str, ...] = ()
    refused: Mapping[str, str] = {}


def find(named: Mapping[str, str], path: str) -> Tools:
    """Find the tools. named: tool -> path from the settings ("python" too). path: directories separated by ":"."""
    found = Tools()
    refused: dict[str, str] = {}
    for tool in TOOLS:
        for place in [named[tool]] if tool in named else _places((tool,), path):
            why = _why_not(place)
            if why is None:
                found[tool] = place
                refused.pop(tool, None)
                break
            if why:
                refused.setdefault(tool, why)
    pythons = [named["python"]] if "python" in named else _places(PYTHONS, path)
    usable = dict.fromkeys(place for place in [*pythons, sys.executable] if _why_not(place) is None)
    found.pythons = tuple(usable)[:MOST_PYTHONS]
    found.refused = refused
    return found


def _places(names: tuple[str, ...], path: str) -> Iterator[str]:
    for name in names:
        if "/" in name:
            yield from sorted(glob.glob(name))
            continue
        for folder in [one for one in path.split(":") if one.startswith("/")]:
            yield os.path.join(folder, name)
        for pattern in FOLDERS:
            yield from sorted(glob.glob(os.path.join(pattern, name)))


def _why_not(place: str) -> str | None:
    """Return None for a program that may be run, "" if there is none, else the reason against it."""
    try:
        about = ownership.program(place)
    except ownership.Untrusted as error:
        return str(error) if os.path.isfile(place) else ""
    except OSError:
        return ""
    return None if stat.S_ISREG(about.st_mode) and about.st_mode & 0o111 else ""
