"""What lies below healthd.toml: the profile of this machine's type, and the baseline of this node.

A profile (conf/profiles) says what machines of one type have. It is a guess: what is compared with it warns and never
drains. A baseline (`healthd baseline`) says what this very node has. Both hold nothing but [checks.*]; a profile also
has [match], by which it is chosen.

GPUs are told by their PCI ids in sysfs, never by name: names need NVIDIA's driver, which may hang (docs/adr/0013).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from msgspec import field
from msgspec.structs import replace

from healthd.agent.settings.config import ConfigError, Layer, Settings
from healthd.agent.settings.settings_file import parse_toml, read_file
from healthd.common.codec import ConvertError, load, nearest
from healthd.common.toml import names_in
from healthd.common.values import Value
from healthd.host.host import Host
from healthd.host.inventory import device_kind

PROFILES = os.path.join(os.path.dirname(__file__), "profiles")
PRODUCT_NAME = "/sys/class/dmi/id/product_name"


class Match(Value, frozen=True):
    """The machines that a profile is for.

    products   patterns of the DMI product name, () = any name
    gpus       PCI ids and what they are: {"10de:2330" = "H100 SXM5 80GB"}
    at_least, at_most   how many of these GPUs PCI shows; not asked where `products` decides: all may be lost
    """

    products: tuple[str, ...] = ()
    gpus: dict[str, str] = field(default_factory=dict)
    at_least: int = 0
    at_most: int = 1000

    def fits(self, product: str, gpus: Mapping[str, int]) -> bool:
        """`gpus`: PCI id -> how many, for every NVIDIA GPU on PCI."""
        mine = sum(count for pci_id, count in gpus.items() if pci_id in self.gpus)
        if self.products:
            return any(fnmatchcase(product, pattern) for pattern in self.products) and (mine > 0 or not gpus)
        return self.at_least <= mine <= self.at_most


def below(settings: Settings) -> list[Layer]:
    """The layers under healthd.toml, the lowest first. Raises ConfigError; ConvertError for an unknown profile."""
    layers = []
    profile = _chosen(settings)
    if profile:
        path = profile if "/" in profile else os.path.join(PROFILES, f"{profile}.toml")
        table = read_file(path, True, "profile") if "/" in profile else _built_in(profile)
        layers.append(Layer(f"profile {profile}", _checks_in(table, path, ("match",)), guessed=True))
    if settings.baseline_file and _is_of_this_machine(settings):
        layers.append(Layer(settings.baseline_file, checks_of(settings.baseline_file)))
    return layers


def without_baseline(settings: Settings) -> list[Layer]:
    """The layers by which a new baseline is made: without the old one."""
    return below(replace(settings, baseline_file=""))


def _is_of_this_machine(settings: Settings) -> bool:
    """Whether the baseline is about this tree: the node's own says nothing about another root, a named one does."""
    return settings.root == "/" or settings.baseline_file != Settings().baseline_file


def names() -> list[str]:
    """Return the names of the profiles that come with healthd."""
    return names_in(PROFILES)


def _chosen(settings: Settings) -> str:
    """The profile's name or path, "" for none."""
    wanted = settings.profile
    if wanted == "auto":
        return _find(Host(settings.root))
    if wanted == "none" or wanted in names():
        return wanted if wanted != "none" else ""
    if not wanted.startswith("/"):
        known = ["auto", "none", *names()]
        raise ConvertError(f'profile: there is no profile "{wanted}"{nearest(wanted, known)}')
    read_file(wanted, True, "profile")
    return wanted


def _find(host: Host) -> str:
    """The profile that fits this machine. Profiles that ask for its product name come first."""
    try:
        product = host.read(PRODUCT_NAME) or ""
        gpus: dict[str, int] = {}
        for function in host.pci_functions():
            if device_kind(function.vendor, function.pci_class) == "gpu" and not function.virtual:
                pci_id = f"10de:{function.device[2:]}"
                gpus[pci_id] = gpus.get(pci_id, 0) + 1
    except (OSError, ValueError):
        return ""  # pcie_devices and gpu_count say what cannot be read; a guess without it is worse than none
    if not product and not gpus:
        return ""  # a machine that tells nothing of itself: the profiles need not be read
    matches = {name: _match(name) for name in names()}
    by_product = sorted(matches, key=lambda name: (not matches[name].products, name))
    return next((name for name in by_product if matches[name].fits(product, gpus)), "")


@functools.cache
def _match(name: str) -> Match:
    return load(Match, _built_in(name).get("match", {}), "match")


def _built_in(name: str) -> dict[str, Any]:
    """A profile that comes with healthd, as trusted as its code."""
    path = os.path.join(PROFILES, f"{name}.toml")
    with open(path, "rb") as file:
        return parse_toml(file.read(), path)


def checks_of(baseline_file: str) -> Any:
    """The [checks] of a baseline, which has nothing else. Raises ConfigError."""
    return _checks_in(read_file(baseline_file, False, "baseline_file"), baseline_file)


def _checks_in(table: Mapping[str, Any], path: str, beside: tuple[str, ...] = ()) -> Any:
    """The [checks] of a file's table that has nothing else but the tables `beside`. Raises ConfigError."""
    for key in table:
        if key != "checks" and key not in beside:
            raise ConfigError(f'{path}: unknown setting "{key}"; only [checks.NAME] belongs in this file')
    if "match" in table:
        try:
            load(Match, table["match"], "match")
        except ConvertError as error:
            raise ConfigError(f"{path}: {error}") from None
    return table.get("checks", {})
