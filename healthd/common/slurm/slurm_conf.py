"""Values from slurm.conf on this node, read without a request to slurmctld. Included files are not read.

In the daemon, only the worker does this, because the folder may be on a network file system.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from healthd.common.text import regex

MAX_BYTES = 4 << 20
# First the folder where slurmd stores received files ("configless"), then those that packages and source builds use.
FILES = ("etc/slurm/slurm.conf", "run/slurm/conf/slurm.conf", "usr/local/etc/slurm.conf", "opt/slurm/etc/slurm.conf")
NO_LIMIT = float("inf")


def cluster_name(root: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return ClusterName, or "" if the name is unknown. Raises OSError if a file exists but cannot be read."""
    for path in _paths(root, environment):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                name = parse_cluster_name(file.read(MAX_BYTES))
        except FileNotFoundError:
            continue
        if name:
            return name
    return ""


def parse_cluster_name(text: str) -> str:
    """Return ClusterName, or "" if the text has no valid name.

    "Any upper case letters in the name will be silently mapped to lower case" (slurm.conf(5)), as in sacct.
    """
    for line in text.split("\n"):
        found = regex(r"(?i)(?:.*\s)?ClusterName\s*=\s*\"?([a-z0-9_.-]{1,40})").match(line.partition("#")[0])
        if found:
            return found[1].lower()
    return ""


def epilog_timeout(root: str, environment: Mapping[str, str] = os.environ) -> float:
    """Return Slurm's time limit for an epilog in seconds, or infinity if no readable file sets a limit.

    Slurm kills an epilog that takes longer, and drains the node (slurm.conf(5): EpilogTimeout, PrologEpilogTimeout).
    An epilog must not call scontrol, so the limit is read from the file.
    """
    for path in _paths(root, environment):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return parse_epilog_timeout(file.read(MAX_BYTES))
        except OSError:
            continue
    return NO_LIMIT


def parse_epilog_timeout(text: str) -> float:
    """Return the lowest limit in seconds, or infinity if there is none. In slurm.conf, 65534 means no limit."""
    found = NO_LIMIT
    for line in text.split("\n"):
        for name, value in regex(r"(?i)\b(\w*)EpilogTimeout\s*=\s*\"?(\d{1,5})\b").findall(line.partition("#")[0]):
            if name.lower() in ("", "prolog") and int(value) < 65534:
                found = min(found, float(value))
    return found


def _paths(root: str, environment: Mapping[str, str]) -> list[str]:
    named = environment.get("SLURM_CONF")
    return [named] if named else [os.path.join(root, file) for file in FILES]
