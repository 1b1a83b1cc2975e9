"""Whether required kernel modules are loaded.

Rules: as in GCM's check-module, gpud's kernel-module and dr-hpc's peermem_module_check. Without nvidia_peermem, NCCL
silently copies through host memory instead of using GPUDirect RDMA. Only modules that are named in the settings or a
baseline are checked. Right after a boot or an upgrade, modules are loaded one by one, so a problem is reported only
after confirm_seconds. Files: Linux, sysfs-module. A built-in module has no initstate. If it has no parameters either,
sysfs does not show the module, so it must not be listed in `expected`.
"""

from __future__ import annotations

from collections.abc import Iterator

from healthd.api import (
    NOT_IN_BASELINE,
    Baseline,
    CheckSettings,
    Clears,
    EndsJob,
    Entry,
    Explain,
    FailureCause,
    Finding,
    History,
    Host,
    LeftOut,
    NothingToCheck,
    Seconds,
    Severity,
    regex,
)

USES = ""
BASELINE = Baseline(("expected",), place=61)

MODULES = "/sys/module"
NAME = regex(r"[A-Za-z0-9_-]{1,63}")


class Config(CheckSettings, frozen=True):
    """expected          modules, as in ("nvidia", "nvidia_peermem"); "-" and "_" are equivalent. Only these are checked
    confirm_seconds   a problem must last this long before it is reported
    """

    expected: tuple[str, ...] = ()
    confirm_seconds: Seconds = 60.0


def validate(config: Config) -> str | None:
    for name in config.expected:
        if not NAME.fullmatch(name):
            return f'expected: "{name}" is not a module name like "nvidia_peermem"'
    return None


def run(host: Host, config: Config, past: History) -> Iterator[Finding | NothingToCheck]:
    if "expected" in config.guessed and not host.exists(MODULES):
        yield NothingToCheck("no kernel modules in this tree")  # a profile's modules are only a guess
        return
    if not config.expected:
        yield NOT_IN_BASELINE
    unreadable = []
    for name in dict.fromkeys(name.replace("-", "_") for name in config.expected):
        try:
            problem_text = problem(host, name)
        except (OSError, ValueError) as error:  # this error must not hide the other modules
            unreadable.append(f"{name}: {error}")
            continue
        if problem_text:
            yield Finding(
                Severity.DEGRADED,
                "kernel_modules/not_loaded",
                name,
                f"the kernel module {name} {problem_text}",
                confirm_seconds=config.confirm_seconds,
                shared_cause=True,
                expects="expected",
            )
    if unreadable:
        raise ValueError("; ".join(unreadable))


def problem(host: Host, name: str) -> str:
    """Return the problem with the module, or "" if it is loaded. `name` is the kernel's spelling.

    Raises OSError or ValueError."""
    state = host.read(f"{MODULES}/{name}/initstate")
    if state is None:
        return "" if host.stat(f"{MODULES}/{name}") else "is not loaded"
    if state not in ("live", "coming", "going"):
        raise ValueError(f"{MODULES}/{name}/initstate: not a state: {state[:40]!r}")
    return {"coming": "has not finished loading", "going": "is being unloaded"}.get(state, "")


LOADED_ON_DEMAND = ("nvidia_uvm",)  # for the reason see device_nodes.py
USUAL_MODULES = (
    *("nvidia", "nvidia_peermem", "nvidia_fs", "gdrdrv"),
    *("ib_umad", "ib_uverbs", "rdma_cm", "rdma_ucm"),
)


def baseline(host: Host, config: Config) -> Iterator[Entry | LeftOut]:
    """Yield the loaded modules that are usual on GPU nodes or are named in the settings or a profile."""
    named = [name.replace("-", "_") for name in config.expected]
    for name in dict.fromkeys((*named, *USUAL_MODULES)):
        if name in LOADED_ON_DEMAND:
            continue
        try:
            problem_text = problem(host, name)
        except (OSError, ValueError) as error:
            yield LeftOut("kernel_modules", str(error), "expected", name, unread=True)
            continue
        if not problem_text:
            yield Entry("kernel_modules", "expected", key=name)
        elif name in named:
            yield LeftOut("kernel_modules", problem_text, "expected", name)


EXPLAIN = {
    "kernel_modules/not_loaded": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A required kernel module is not loaded, or hangs while being loaded or unloaded.",
        "Without nvidia or nvidia_uvm, CUDA does not work. Without nvidia_peermem there is no GPUDirect RDMA, and "
        "multi-node jobs are slow. Without ib_umad, ib_uverbs or rdma_ucm, programs cannot use InfiniBand.",
        "Run modprobe NAME. If that fails, read journalctl -k. Usually the module was built for another kernel (dkms "
        "status) or another driver. To load the module at each boot, add its name to a file in /etc/modules-load.d.",
        confirm="confirm_seconds",
        shared=True,
        expects="expected",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.DRIVER)
ENDS_JOB = {"kernel_modules/not_loaded": EndsJob.ALWAYS}
