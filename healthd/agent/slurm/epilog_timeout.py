"""How long Slurm lets an epilog run, by slurm.conf on this node: scontrol must not be asked in an epilog.

An epilog that takes longer is ended, and the node drained (slurm.conf(5): EpilogTimeout, PrologEpilogTimeout).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from healthd.common.slurm.cluster_name import FILES, MOST_BYTES
from healthd.common.text import regex

FOREVER = float("inf")


def epilog_timeout(root: str, environment: Mapping[str, str] = os.environ) -> float:
    """Seconds; infinity where no file that can be read names one. A file that slurm.conf includes is not read."""
    named = environment.get("SLURM_CONF")
    for path in [named] if named else [os.path.join(root, file) for file in FILES]:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return parse_epilog_timeout(file.read(MOST_BYTES))
        except OSError:
            continue
    return FOREVER


def parse_epilog_timeout(text: str) -> float:
    """The least that a slurm.conf names; infinity where it names none, or 65534, which stands for none there."""
    found = FOREVER
    for line in text.split("\n"):
        for name, value in regex(r"(?i)\b(\w*)EpilogTimeout\s*=\s*\"?(\d{1,5})\b").findall(line.partition("#")[0]):
            if name.lower() in ("", "prolog") and int(value) < 65534:
                found = min(found, float(value))
    return found
