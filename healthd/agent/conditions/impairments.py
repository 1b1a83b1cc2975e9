"""What keeps healthd from its job on a node: such a node is not called healthy. For status, check and doctor. Pure.

The verdict that the prolog and Slurm see does not change: trouble of healthd itself never drains a node.
"""

from __future__ import annotations

from collections.abc import Callable

from healthd.common.model import Health, Mode

PROGRAMS = ("scontrol", "sinfo", "squeue")


def needs_slurm(mode: Mode) -> bool:
    """Return True if healthd cannot do its job in this mode without Slurm."""
    return mode is not Mode.OBSERVE


def needs_kernel_log(source: str) -> bool:
    """Return True unless the site switched the kernel log off."""
    return source != "off"


def missing_programs(which: Callable[[str], str | None]) -> list[str]:
    """Return Slurm's commands that are not on PATH. `which`: shutil.which."""
    return [name for name in PROGRAMS if which(name) is None]


def limits(mode: Mode, log_source: str, log_alive: bool, log_trouble: str, slurm_problem: str) -> tuple[str, ...]:
    """Return sentences: what healthd needs here and does not have."""
    found = []
    if needs_kernel_log(log_source) and not log_alive:
        found.append(f"the kernel log is not read: {log_trouble or log_source}")
    if needs_slurm(mode) and slurm_problem:
        found.append(f'mode is "{mode.value}", and Slurm cannot be used: {slurm_problem}')
    return tuple(found)


def shown_health(health: Health, limits: tuple[str, ...]) -> Health:
    """Return the health that people are shown: a node whose healthd is limited is at best a warning."""
    return Health.WARNING if limits and health is Health.HEALTHY else health
