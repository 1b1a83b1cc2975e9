"""Parser for `nvidia-smi -q -x`. Pure, and linear for any input.

It reads tags one by one instead of using an XML parser, so that the end may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from healthd.common.text import regex

_TAG = regex(r"<(/?)([A-Za-z0-9_]{1,60})([^<>]{0,200})>|([^<]+)")
_ID = regex(r'id="([^"]{1,40})"')
_MAX_DEPTH = 20


class SmiGpu(NamedTuple):
    """A GPU.

    id      nvidia-smi's address, as an argument for `-i`: "00000000:1B:00.0"
    pci     the kernel's address: "0000:1b:00.0"
    values  the first text of each path below the GPU: {"mig_mode/current_mig": "Disabled"}
    """

    id: str
    pci: str
    values: Mapping[str, str]


class SmiText(NamedTuple):
    driver: str
    gpus: tuple[SmiGpu, ...]


def parse_smi(text: str) -> SmiText:
    """Parse the output of `nvidia-smi -q -x`. A GPU whose end is missing has the values before it."""
    driver, gpus, gpu = "", [], None  # type: str, list[SmiGpu], SmiGpu | None
    values: dict[str, str] = {}
    path: list[str] = []
    for found in _TAG.finditer(text):
        closes, name, attributes, content = found.groups()
        if content is not None:
            if path and content.strip():
                values.setdefault("/".join(path), content.strip())
        elif closes:
            if name == "gpu" and gpu:
                gpus.append(gpu)
                gpu = None
            while path and path.pop() != name:
                pass
        elif name == "gpu" and (identity := _ID.search(attributes)):
            driver = driver or values.get("nvidia_smi_log/driver_version", "")
            values, path = {}, []
            gpu = SmiGpu(identity[1], sysfs_address(identity[1]), values)
        elif not attributes.endswith("/") and len(path) < _MAX_DEPTH:
            path.append(name)
    if gpu:
        gpus.append(gpu)
    return SmiText(driver or values.get("nvidia_smi_log/driver_version", ""), tuple(gpus))


def sysfs_address(address: str) -> str:
    """Return "0000:1b:00.0" for nvidia-smi's "00000000:1B:00.0"."""
    domain, colon, rest = address.lower().partition(":")
    return f"{domain[-4:]}{colon}{rest}" if domain.startswith("0000") else address.lower()
