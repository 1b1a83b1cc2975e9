"""Kernel modules that must be loaded.

Rules: GCM's check-module, gpud's kernel-module and dr-hpc's peermem_module_check: without nvidia_peermem NCCL copies
through the host's memory instead of GPUDirect RDMA, and nobody is told. Only what the site's settings or a baseline
name is judged. Right after a boot or an upgrade modules come one by one, so it must last.
Files: Linux, sysfs-module. A module that is built in has no initstate; if it has no parameters either it is not shown
at all: do not expect that.
"""

from __future__ import annotations

from collections.abc import Iterator

from healthd.api import (
    NOT_IN_BASELINE,
    Baseline,
    CheckSettings,
    Clears,
    Entry,
    Explain,
    Finding,
    Host,
    LeftOut,
    NothingToCheck,
    Past,
    Seconds,
    Severity,
    regex,
)

USES = ""
BASELINE = Baseline(("expected",), place=61)

MODULES = "/sys/module"
NAME = regex(r"[A-Za-z0-9_-]{1,63}")


class Config(CheckSettings, frozen=True):
    """expected          ("nvidia", "nvidia_peermem", ...); "-" and "_" are the same. Others are not judged
    confirm_seconds   it must be so for this long
    """

    expected: tuple[str, ...] = ()
    confirm_seconds: Seconds = 60.0


def validate(config: Config) -> str | None:
    for name in config.expected:
        if not NAME.fullmatch(name):
            return f'expected: "{name}" is no name of a module, as "nvidia_peermem" is'
    return None


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | NothingToCheck]:
    if "expected" in config.guessed and not host.exists(MODULES):
        yield NothingToCheck("no kernel modules in this tree")  # a profile only guesses which there should be
        return
    if not config.expected:
        yield NOT_IN_BASELINE
    unreadable = []
    for name in dict.fromkeys(name.replace("-", "_") for name in config.expected):
        try:
            wrong = problem(host, name)
        except (OSError, ValueError) as error:  # it must not hide the others
            unreadable.append(f"{name}: {error}")
            continue
        if wrong:
            yield Finding(
                Severity.DEGRADED,
                "kernel_modules/not_loaded",
                name,
                f"the kernel module {name} {wrong}",
                confirm_seconds=config.confirm_seconds,
                shared_cause=True,
                expects="expected",
            )
    if unreadable:
        raise ValueError("; ".join(unreadable))


def problem(host: Host, name: str) -> str:
    """The module's problem, "" if it is in use. `name` is as the kernel writes it. Raises OSError, ValueError."""
    state = host.read(f"{MODULES}/{name}/initstate")
    if state is None:
        return "" if host.stat(f"{MODULES}/{name}") else "is not loaded"
    if state not in ("live", "coming", "going"):
        raise ValueError(f"{MODULES}/{name}/initstate: not a state: {state[:40]!r}")
    return {"coming": "has not ended its start", "going": "is being unloaded"}.get(state, "")


WITH_THE_FIRST_CUDA_PROGRAM = ("nvidia_uvm",)  # device_nodes.py says why
USUAL = (
    *("nvidia", "nvidia_peermem", "nvidia_fs", "gdrdrv"),
    *("ib_umad", "ib_uverbs", "rdma_cm", "rdma_ucm"),
)


def baseline(host: Host, config: Config) -> Iterator[Entry | LeftOut]:
    """The modules that have been loaded since the boot, among those that the settings or a profile name and the usual
    ones."""
    named = [name.replace("-", "_") for name in config.expected]
    for name in dict.fromkeys((*named, *USUAL)):
        if name in WITH_THE_FIRST_CUDA_PROGRAM:
            continue
        try:
            wrong = problem(host, name)
        except (OSError, ValueError) as error:
            yield LeftOut("kernel_modules", str(error), "expected", name, unread=True)
            continue
        if not wrong:
            yield Entry("kernel_modules", "expected", key=name)
        elif name in named:
            yield LeftOut("kernel_modules", wrong, "expected", name)


EXPLAIN = {
    "kernel_modules/not_loaded": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A kernel module that this node should have is not loaded, or hangs while it is loaded or unloaded.",
        "nvidia, nvidia_uvm: no CUDA. nvidia_peermem: no GPUDirect RDMA, jobs over several nodes are slow. ib_umad, "
        "ib_uverbs, rdma_ucm: no InfiniBand for programs.",
        "modprobe NAME, and journalctl -k if it refuses: mostly it was built for another kernel (dkms status) or "
        "driver. To load it at each boot: its name in a file of /etc/modules-load.d.",
        confirm="confirm_seconds",
        shared=True,
        expects="expected",
    ),
}
