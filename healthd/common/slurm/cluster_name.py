"""The name of the cluster, from Slurm's settings on this node: no request to slurmctld, and right also in mode observe.

Only the worker reads them: their folder may be a network's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from healthd.common.text import regex

MOST_BYTES = 4 << 20
# Where slurmd keeps what it was sent ("configless"), and where packages and those who build it themselves look.
FILES = ("etc/slurm/slurm.conf", "run/slurm/conf/slurm.conf", "usr/local/etc/slurm.conf", "opt/slurm/etc/slurm.conf")


def cluster_name(root: str, environment: Mapping[str, str] = os.environ) -> str:
    """ "" = not known. Raises OSError where a file is there and cannot be read."""
    named = environment.get("SLURM_CONF")
    for path in [named] if named else [os.path.join(root, file) for file in FILES]:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                name = parse_cluster_name(file.read(MOST_BYTES))
        except FileNotFoundError:
            continue
        if name:
            return name
    return ""


def parse_cluster_name(text: str) -> str:
    """ClusterName of a slurm.conf; "" = it has none that could be one. "Any upper case letters in the name will be
    silently mapped to lower case" (slurm.conf(5)), so it is that of sacct."""
    for line in text.split("\n"):
        found = regex(r"(?i)(?:.*\s)?ClusterName\s*=\s*\"?([a-z0-9_.-]{1,40})").match(line.partition("#")[0])
        if found:
            return found[1].lower()
    return ""
