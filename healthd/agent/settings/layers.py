"""Layers below healthd.toml: the profile for this machine's type, and this node's baseline.

A profile (conf/profiles) describes a machine type's hardware. A profile is a guess, so deviations from it are warnings
and never drain. A baseline (`healthd baseline`) describes this node's hardware. Both contain only [checks.*]; a profile
also has [match], which selects it.

GPUs are identified by their PCI ids in sysfs, never by name, because reading names requires NVIDIA's driver, which may
hang (docs/adr/0013).
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
from healthd.common.codec import ConvertError, load, spelling_hint
from healthd.common.toml import names_in
from healthd.common.values import Value
from healthd.host.host import Host
from healthd.host.inventory import device_kind

PROFILES = os.path.join(os.path.dirname(__file__), "profiles")
PRODUCT_NAME = "/sys/class/dmi/id/product_name"


class Match(Value, frozen=True):
    """The machines that a profile describes.

    products   patterns for the DMI product name; () = any name
    gpus       PCI ids and descriptions: {"10de:2330" = "H100 SXM5 80GB"}
    at_least, at_most   number of these GPUs on PCI; ignored if `products` decides, because all GPUs may be lost
    """

    products: tuple[str, ...] = ()
    gpus: dict[str, str] = field(default_factory=dict)
    at_least: int = 0
    at_most: int = 1000

    def fits(self, product: str, gpus: Mapping[str, int]) -> bool:
        """Return True if the profile fits. `gpus` maps each PCI id to the number of NVIDIA GPUs with that id."""
        mine = sum(count for pci_id, count in gpus.items() if pci_id in self.gpus)
        if self.products:
            return any(fnmatchcase(product, pattern) for pattern in self.products) and (mine > 0 or not gpus)
        return self.at_least <= mine <= self.at_most


def lower_layers(settings: Settings) -> list[Layer]:
    """Return the layers below healthd.toml, lowest first.

    Raises ConfigError, or ConvertError for an unknown profile.
    """
    layers = []
    profile = _chosen_profile(settings)
    if profile:
        path = profile if "/" in profile else os.path.join(PROFILES, f"{profile}.toml")
        table = read_file(path, True, "profile") if "/" in profile else _built_in(profile)
        layers.append(Layer(f"profile {profile}", _only_checks(table, path, ("match",)), guessed=True))
    if settings.baseline_file and _applies_to_root(settings):
        layers.append(Layer(settings.baseline_file, baseline_tables(settings.baseline_file)))
    return layers


def layers_without_baseline(settings: Settings) -> list[Layer]:
    """Return the layers for creating a new baseline, without the old baseline."""
    return lower_layers(replace(settings, baseline_file=""))


def _applies_to_root(settings: Settings) -> bool:
    """Return True if the baseline applies to the configured root. The default baseline is valid only for "/"."""
    return settings.root == "/" or settings.baseline_file != Settings().baseline_file


def profile_names() -> list[str]:
    """Return the names of the profiles that come with healthd."""
    return names_in(PROFILES)


def _chosen_profile(settings: Settings) -> str:
    """Return the profile's name or path, or "" for none."""
    profile = settings.profile
    if profile == "auto":
        return _find_profile(Host(settings.root))
    if profile == "none" or profile in profile_names():
        return profile if profile != "none" else ""
    if not profile.startswith("/"):
        options = ["auto", "none", *profile_names()]
        raise ConvertError(f'profile: unknown profile "{profile}"{spelling_hint(profile, options)}')
    read_file(profile, True, "profile")
    return profile


def _find_profile(host: Host) -> str:
    """Return the profile that fits this machine. Profiles with a product name have priority."""
    try:
        product = host.read(PRODUCT_NAME) or ""
        gpus: dict[str, int] = {}
        for function in host.pci_functions():
            if device_kind(function.vendor, function.pci_class) == "gpu" and not function.virtual:
                pci_id = f"10de:{function.device[2:]}"
                gpus[pci_id] = gpus.get(pci_id, 0) + 1
    except (OSError, ValueError):
        return ""  # pcie_devices and gpu_count report the error; a guess without this data is worse than no guess
    if not product and not gpus:
        return ""  # the machine has no such data, so do not read the profiles
    matches = {name: _match(name) for name in profile_names()}
    by_product = sorted(matches, key=lambda name: (not matches[name].products, name))
    return next((name for name in by_product if matches[name].fits(product, gpus)), "")


@functools.cache
def _match(name: str) -> Match:
    return load(Match, _built_in(name).get("match", {}), "match")


def _built_in(name: str) -> dict[str, Any]:
    """Return a built-in profile, which is as trusted as healthd's code."""
    path = os.path.join(PROFILES, f"{name}.toml")
    with open(path, "rb") as file:
        return parse_toml(file.read(), path)


def baseline_tables(baseline_file: str) -> Any:
    """Return [checks] from a baseline, which may not contain anything else. Raises ConfigError."""
    return _only_checks(read_file(baseline_file, False, "baseline_file"), baseline_file)


def _only_checks(table: Mapping[str, Any], path: str, allowed: tuple[str, ...] = ()) -> Any:
    """Return [checks] from a file. Raises ConfigError if there are tables other than those in `allowed`."""
    for key in table:
        if key != "checks" and key not in allowed:
            raise ConfigError(f'{path}: unknown setting "{key}"; this file may only contain [checks.NAME]')
    if "match" in table:
        try:
            load(Match, table["match"], "match")
        except ConvertError as error:
            raise ConfigError(f"{path}: {error}") from None
    return table.get("checks", {})
