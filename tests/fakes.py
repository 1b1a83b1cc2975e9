"""Checks run on values: a Host on a made tree, a fake NVML from a scenario's text, earlier readings in a Past."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from healthd.config import CheckConfig
from healthd.convert import dump, load
from healthd.host import Host
from healthd.model import Finding, Observation, Repair
from healthd.nvidia.fake_nvml import open_fake
from healthd.nvml import NvmlError
from healthd.past import Past, Series, update

BOOT = "b"
NOW = 1_800_000_000.0

_numbers = itertools.count()


def run_check(
    module: ModuleType, host: Host, config: CheckConfig | None = None, past: Past | None = None
) -> list[Finding | Observation | Repair]:
    """All that one run of a check gives. Raises what the check raises.

    Holds it to what the core takes: plain data that comes back equal, and findings as their explanations say.
    """
    given = list(module.run(host, config or module.Config(), past or Past({}, NOW, BOOT)))
    for item in given:
        assert load(type(item), json.loads(json.dumps(dump(item)))) == item
    for finding in given:
        if isinstance(finding, Finding) and finding.code != "exec/critical":  # whose severity the site chooses
            explain = module.EXPLAIN[finding.code]
            assert (finding.severity, finding.clears) == (explain.severity, explain.clears)
    return given


def findings(*args: Any, **kwargs: Any) -> list[Finding]:
    return [item for item in run_check(*args, **kwargs) if isinstance(item, Finding)]


def repairs(*args: Any, **kwargs: Any) -> list[Repair]:
    return [item for item in run_check(*args, **kwargs) if isinstance(item, Repair)]


def codes(found: Sequence[Finding]) -> list[str]:
    return [finding.code for finding in found]


def until_it_fails(module: ModuleType, host: Host, config: CheckConfig | None = None) -> tuple[list[Any], str]:
    """(what a run gave, what stopped it: "" if it completed), as the worker sees it."""
    given: list[Any] = []
    try:
        given.extend(module.run(host, config or module.Config(), Past({}, NOW, BOOT)))
    except (OSError, ValueError, RuntimeError, NvmlError) as error:
        return given, str(error)
    return given, ""


def rounds(module: ModuleType, hosts: Sequence[Host], config: CheckConfig | None = None, apart: float = 300.0) -> Any:
    """What the last of several runs gives, `apart` seconds after each other, each with the past of those before."""
    store: dict[str, Series] = {}
    given: list[Any] = []
    for number, host in enumerate(hosts):
        now = NOW + number * apart
        given = run_check(module, host, config, Past(store, now, BOOT))
        store = update(store, [item for item in given if isinstance(item, Observation)], now, BOOT)
    return given


def scenarios(tmp_path: Path) -> Callable[..., Host]:
    """Makes hosts with a fake NVML: host("gpu.3.lost = true", profile="dgx-a100", root=...)."""

    def host(text: str = "", profile: str = "dgx-h100", root: str = "/nonexistent") -> Host:
        path = tmp_path / f"scenario{next(_numbers)}.toml"
        path.write_text(f'profile = "{profile}"\n{text}\n')
        return Host(root, lambda: open_fake(str(path)))

    return host


def healthy_gpus(
    config: CheckConfig, text: str = "", profile: str = "dgx-h100"
) -> Callable[[Path], tuple[Host, CheckConfig]]:
    """`healthy` (tests/test_mutations.py) of a check that asks NVML alone: healthy GPUs, and these settings."""
    return lambda tmp_path: (scenarios(tmp_path)(text, profile), config)


def observed(given: Sequence[Any], name: str) -> Iterator[Observation]:
    return (item for item in given if isinstance(item, Observation) and item.name == name)


def refusal(function: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """(what it answers, "") or (None, the one sentence of its ValueError), for parsers fed with garbage."""
    try:
        return function(*args), ""
    except ValueError as error:
        return None, str(error)
