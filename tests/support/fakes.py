"""Helpers that run checks: a Host on a temporary tree, a fake NVML from scenario text, and earlier readings."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from healthd.agent.reporting.fault_timeline import possible_findings
from healthd.agent.reporting.status import Snapshot
from healthd.agent.settings.config import CheckConfig
from healthd.common.codec import dump, load
from healthd.common.history import History, Series, update
from healthd.common.model import (
    Explain,
    Finding,
    Health,
    Inventory,
    KernelLogStatus,
    Leave,
    NothingToCheck,
    Observation,
    ObservationKind,
    Repair,
    RoundStatus,
    SlurmStatus,
    Verdict,
)
from healthd.host.host import Host
from healthd.nvidia import xid_table
from healthd.nvidia.fake_nvml import open_fake
from healthd.nvidia.nvml import NvmlError

BOOT = "b"
NOW = 1_800_000_000.0

_numbers = itertools.count()


def run_check(
    module: ModuleType, host: Host, config: CheckConfig | None = None, history: History | None = None
) -> list[Finding | Observation | Repair]:
    """Return everything that one run of a check yields except NothingToCheck. Exceptions of the check are passed on.

    Assert what the core requires: data that survives JSON, findings that match their explanations, and observations
    that match their declared meaning.
    """
    items = list(module.run(host, config or module.Config(), history or History({}, NOW, BOOT)))
    for item in items:
        assert load(type(item), json.loads(json.dumps(dump(item)))) == item
    for reading in items:
        if isinstance(reading, Observation):
            meaning = module.OBSERVATIONS[reading.name]
            assert {label for label, _ in reading.labels} == set(meaning.labels), reading.name
            assert reading.name.endswith("_total") == (reading.kind is ObservationKind.COUNTER)
    for finding in items:
        if isinstance(finding, Finding):
            assert_as_explained(finding, module, config or module.Config())
    return [item for item in items if not isinstance(item, NothingToCheck)]


def assert_as_explained(finding: Finding, module: ModuleType, config: CheckConfig) -> None:
    """Assert that the finding matches the output of `healthd explain` for its code."""
    explain = module.EXPLAIN[finding.code]
    possible = possible_findings(finding.code, explain, config)
    assert_ends_as_explained(finding, explain, config)
    assert finding.severity in {each.severity for each in possible}
    assert finding.worsens == possible[0].worsens
    seconds = {possible[0].confirm_seconds, 0.0} if explain.at_once else {possible[0].confirm_seconds}
    assert finding.confirm_seconds in seconds
    assert explain.shared is None or finding.shared_cause == explain.shared
    assert explain.expects in ("", finding.expects)


# The ending of these codes depends on the line (a GPU reset or a reboot; an NVLink 5 error that NVIDIA's table ignores
# expires) or on the cause (how long clocks may stay slow).
CODES_WITH_VARIABLE_ENDING = frozenset(
    {"gpu_xid/gsp", "gpu_xid/154", "gpu_clocks/slowed", *(f"gpu_xid/{code}" for code in xid_table.NVLINK5)}
)


def assert_ends_as_explained(finding: Finding, explain: Explain, config: CheckConfig) -> None:
    """Assert that a finding ends as explain, list and runbook print for its code: by time, reset or reboot."""
    if finding.code in CODES_WITH_VARIABLE_ENDING:
        return
    ends = {
        (f.clears, f.window_seconds)
        for f in possible_findings(finding.code, explain, config)
        if f.severity is finding.severity or explain.chosen_by or (f.worsens and f.worsens.severity is finding.severity)
    }
    assert (finding.clears, finding.window_seconds) in ends, (finding, ends)


def findings(*args: Any, **kwargs: Any) -> list[Finding]:
    return [item for item in run_check(*args, **kwargs) if isinstance(item, Finding)]


def repairs(*args: Any, **kwargs: Any) -> list[Repair]:
    return [item for item in run_check(*args, **kwargs) if isinstance(item, Repair)]


def codes(items: Sequence[Finding]) -> list[str]:
    return [finding.code for finding in items]


def run_until_error(module: ModuleType, host: Host, config: CheckConfig | None = None) -> tuple[list[Any], str]:
    """Return the items of a run and the error text ("" if it completed), as the worker sees them."""
    items: list[Any] = []
    try:
        items.extend(module.run(host, config or module.Config(), History({}, NOW, BOOT)))
    except (OSError, ValueError, RuntimeError, NvmlError) as error:
        return items, str(error)
    return [item for item in items if not isinstance(item, NothingToCheck)], ""


def run_rounds(
    module: ModuleType, hosts: Sequence[Host], config: CheckConfig | None = None, interval: float = 300.0
) -> Any:
    """Return the items of the last of several runs, which are `apart` seconds apart and share one history."""
    store: dict[str, Series] = {}
    items: list[Any] = []
    for number, host in enumerate(hosts):
        now = NOW + number * interval
        items = run_check(module, host, config, History(store, now, BOOT))
        store = update(store, [item for item in items if isinstance(item, Observation)], now, BOOT)
    return items


def scenarios(tmp_path: Path) -> Callable[..., Host]:
    """Return a function that makes hosts with a fake NVML: host("gpu.3.lost = true", profile="dgx-a100", root=...)."""

    def host(text: str = "", profile: str = "dgx-h100", root: str = "/nonexistent") -> Host:
        path = tmp_path / f"scenario{next(_numbers)}.toml"
        path.write_text(f'profile = "{profile}"\n{text}\n')
        return Host(root, lambda: open_fake(str(path)))

    return host


def healthy_gpus(
    config: CheckConfig, text: str = "", profile: str = "dgx-h100"
) -> Callable[[Path], tuple[Host, CheckConfig]]:
    """Return the healthy node for a check that only uses NVML (tests/checks/test_mutations.py): healthy GPUs and these
    settings."""
    return lambda tmp_path: (scenarios(tmp_path)(text, profile), config)


def observations_named(items: Sequence[Any], name: str) -> Iterator[Observation]:
    return (item for item in items if isinstance(item, Observation) and item.name == name)


def parse_or_error(function: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """Return (result, "") or (None, text of the ValueError), for parsers that get garbage."""
    try:
        return function(*args), ""
    except ValueError as error:
        return None, str(error)


# A healthy idle node as the daemon publishes it.
PLAIN_SNAPSHOT = Snapshot(
    version="0.1.0",
    node_name="n1",
    mode="observe",
    started=NOW - 100,
    now=NOW,
    interval_seconds=300.0,
    verdict=Verdict(Health.HEALTHY, may_resume=True),
    results=(),
    outcomes={},
    decision=Leave("nothing to do"),
    slurm=SlurmStatus(),
    kernel_log=KernelLogStatus("kmsg", alive=True, lines_total=12),
    round=RoundStatus(3, NOW - 50, 0.02, NOW + 250),
    inventory=Inventory(),
)


def stopped_clock() -> float:
    """Return 0.0: a clock that never reaches a deadline, however busy the machine is."""
    return 0.0
