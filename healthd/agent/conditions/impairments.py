"""Requirements that a node must meet before healthd reports it as healthy. All functions are pure.

status, check and doctor use these functions. They do not affect the verdict that the prolog and Slurm use, because a
problem with healthd itself never drains a node.
"""

from __future__ import annotations

from collections.abc import Callable

from healthd.common.model import Health, Mode

PROGRAMS = ("scontrol", "sinfo", "squeue")


def needs_slurm(mode: Mode) -> bool:
    """Return True if healthd cannot do its job in this mode without Slurm."""
    return mode is not Mode.OBSERVE


def needs_kernel_log(source: str) -> bool:
    """Return True unless the site has turned off the kernel log."""
    return source != "off"


def missing_programs(find_program: Callable[[str], str | None]) -> list[str]:
    """Return the Slurm commands that are not on PATH. `find_program` is normally shutil.which."""
    return [name for name in PROGRAMS if find_program(name) is None]


def limits(mode: Mode, log_source: str, log_alive: bool, log_problem: str, slurm_problem: str) -> tuple[str, ...]:
    """Return a sentence for each requirement that this node does not meet."""
    sentences = []
    if needs_kernel_log(log_source) and not log_alive:
        sentences.append(f"the kernel log is not read: {log_problem or log_source}")
    if needs_slurm(mode) and slurm_problem:
        sentences.append(f'mode is "{mode.value}", and Slurm cannot be used: {slurm_problem}')
    return tuple(sentences)


def reported_health(health: Health, limits: tuple[str, ...]) -> Health:
    """Return the health that users see, which is at best a warning if there are any `limits`."""
    return Health.WARNING if limits and health is Health.HEALTHY else health
