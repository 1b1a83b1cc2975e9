"""Rules of a GPU reset: which GPUs one command resets, and what proves its effect. All functions are pure.

Sources: docs/adr/0043-steps-of-a-repair.md, section "NVIDIA: resets". A proof never rests on one value alone. The
services that keep the driver open are stopped for the reset; without a client, the driver itself may stop a GPU, which
clears the volatile counters and the uptime without a reset. Therefore nvidia-smi must report the reset of each GPU, and
the GPUs must be as expected afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from healthd.agent.repair.journal import Outcome
from healthd.common.errors import HealthdError
from healthd.common.text import is_decimal, regex
from healthd.common.values import Value
from healthd.nvidia.smi_report import parse_smi, sysfs_address

PERSISTENCE_DAEMON = "nvidia-persistenced.service"
FABRIC_MANAGER = "nvidia-fabricmanager.service"
QUERY = ("nvidia-smi", "-q", "-x")

# Architectures as nvidia-smi prints them. One GPU is reset alone only from Ampere on.
_TOGETHER = frozenset({"Kepler", "Maxwell", "Pascal", "Volta", "Turing"})
_ALONE = frozenset({"Ampere", "Ada Lovelace", "Hopper", "Blackwell"})
_NEEDS_FABRIC_MANAGER = frozenset({"Ampere"})  # behind NVSwitches
_GUEST_OR_HOST = ("vgpu", "vsga")  # virtualisation modes of a GPU that virtual machines share
_ABSENT = frozenset({"", "n/a", "none", "not supported"})
_RACK_PRODUCTS = regex(r"\bGB[23]00\b")  # NVL72 systems, whose NVLink fabric spans several nodes
_SWITCHED = "Switch Connected"  # peer type: NVLink leads to switches, in the node (HGX B200) or in the rack (NVL72)
_RACK_PATHS = ("chassis_serial_number", "slot_number", "tray_index")  # of the GPU's place in a rack
_UNCORRECTABLE = (
    *("sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded", "dram_uncorrectable"),
    "double_bit/total",
)
_PENDING = (
    *("remapped_rows/remapped_row_pending", "retired_pages/pending_retirement", "retired_pages/pending_blacklist"),
)
_DONE = regex(r"GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]) was successfully reset")
_ALL_DONE = regex(r"successfully reset all GPUs")
_IN_USE = regex(r"In use by another client|currently in use by another process|currently being used by one or more")
_NOT_AVAILABLE = 3  # exit status of nvidia-smi: not available on this device


class ResetImpossible(HealthdError):
    """Raised if the GPUs cannot be reset on this machine or in its state. The message is one sentence."""


class GpuReading(Value, frozen=True):
    """A GPU as nvidia-smi shows it.

    id              nvidia-smi's address
    has_persistence  True if persistence mode is on
    rack            why the GPU's NVLink fabric spans several nodes, or may do so, as a clause, or ""
    recovery_action  action that the driver requests, or ""
    is_pending      True if a row remap or a page retirement waits for a reset
    uncorrectable   volatile uncorrectable ECC errors, or None if unknown
    """

    id: str
    pci: str
    architecture: str = ""
    virtualization: str = ""
    has_mig: bool = False
    has_persistence: bool = False
    rack: str = ""
    has_confidential_memory: bool = False
    recovery_action: str = ""
    is_pending: bool = False
    uncorrectable: int | None = None


class ResetPlan(Value, frozen=True):
    """A reset by one command.

    ids                   arguments for `-i`, or () for all GPUs and their NVSwitches
    parts                 PCI addresses of the GPUs that are reset
    keeps_fabric_manager  True if the fabric manager may or must run during the reset
    """

    ids: tuple[str, ...]
    parts: tuple[str, ...]
    keeps_fabric_manager: bool

    @property
    def argv(self) -> tuple[str, ...]:
        return ("nvidia-smi", "--gpu-reset", *(("-i", ",".join(self.ids)) if self.ids else ()))


def parse_gpus(text: str) -> tuple[GpuReading, ...]:
    """Parse `nvidia-smi -q -x`."""
    return tuple(
        GpuReading(
            gpu.id,
            gpu.pci,
            architecture=_known(gpu.values, "product_architecture"),
            virtualization=_known(gpu.values, "gpu_virtualization_mode/virtualization_mode"),
            has_mig=_known(gpu.values, "mig_mode/current_mig").lower() == "enabled",
            has_persistence=_known(gpu.values, "persistence_mode").lower() == "enabled",
            rack=_rack(gpu.values),
            has_confidential_memory=regex(r"0*[1-9]").match(_known(gpu.values, "cc_protected_memory_usage/total"))
            is not None,
            recovery_action=_recovery_action(gpu.values),
            is_pending=any(_known(gpu.values, path).lower() == "yes" for path in _PENDING),
            uncorrectable=_uncorrectable(gpu.values),
        )
        for gpu in parse_smi(text).gpus
    )


def _known(values: Mapping[str, str], path: str) -> str:
    """Return a value, or "" if it is missing or stands for no value, such as "N/A"."""
    text = values.get(path, "").strip("[] ")
    return "" if text.lower() in _ABSENT else text[:200]


def _rack(values: Mapping[str, str]) -> str:
    """Return why the NVLink fabric spans several nodes, or may do so, as a clause, or "".

    A fabric that is not complete may not show its clusterUuid yet.
    """
    product, cluster = _known(values, "product_name"), _known(values, "fabric/clusterUuid")
    if _RACK_PRODUCTS.search(product):
        return f"its type is {product}"
    if regex(r"[0-]*").fullmatch(cluster) is None:
        return f'its clusterUuid is "{cluster}"'
    if _known(values, "platformInfo/peer_type") != _SWITCHED:
        return ""
    if any(_known(values, f"platformInfo/{name}") for name in _RACK_PATHS):
        return "it is switch connected, and has a place in a rack"
    state, status = _known(values, "fabric/state"), _known(values, "fabric/status")
    if (state, status) != ("Completed", "Success"):
        return f"it is switch connected, and its fabric is not complete (state {state or '-'}, status {status or '-'})"
    return ""


def _recovery_action(values: Mapping[str, str]) -> str:
    """Return the requested action. Drivers before R570 only print whether a reset is required."""
    action = _known(values, "gpu_recovery_action")
    return action or ("Reset" if _known(values, "gpu_reset_status/reset_required").lower() == "yes" else "")


def _uncorrectable(values: Mapping[str, str]) -> int | None:
    texts = [values.get(f"ecc_errors/volatile/{name}", "") for name in _UNCORRECTABLE]
    counts = [int(text) for text in texts if is_decimal(text) and len(text) <= 20]
    return sum(counts) if counts else None


def plan_reset(
    gpus: Sequence[GpuReading],
    parts: Collection[str],
    inventory: Collection[str],
    has_nvswitches: bool,
    fabric_manager_runs: bool,
) -> ResetPlan:
    """Return how to reset `parts`, or all GPUs if `parts` is empty. Raises ResetImpossible.

    Args:
        gpus: all GPUs that nvidia-smi shows.
        inventory: PCI addresses of all GPUs of the node.
    """
    shown = {gpu.pci: gpu for gpu in gpus}
    wanted = set(parts) or {*inventory, *shown}
    if not wanted:
        raise ResetImpossible("nvidia-smi shows no GPU")
    needs_fabric_manager = has_nvswitches and any(gpu.architecture in _NEEDS_FABRIC_MANAGER for gpu in gpus)
    is_together = any(gpu.architecture in _TOGETHER for gpu in gpus)
    if is_together or (needs_fabric_manager and not fabric_manager_runs):
        wanted, parts = {*inventory, *shown}, ()
    if missing := sorted(wanted - set(shown)):
        raise ResetImpossible(f"the driver does not show {_names(missing)}, so it cannot be reset")
    for gpu in gpus:
        _require_resettable(gpu, is_reset=gpu.pci in wanted)
    if not parts:
        return ResetPlan((), tuple(sorted(wanted)), keeps_fabric_manager=False)
    chosen = [gpu for gpu in gpus if gpu.pci in wanted]
    return ResetPlan(tuple(gpu.id for gpu in chosen), tuple(gpu.pci for gpu in chosen), keeps_fabric_manager=True)


def _require_resettable(gpu: GpuReading, is_reset: bool) -> None:
    """Raise ResetImpossible if this GPU forbids a reset. A fabric of several nodes forbids it for all GPUs."""
    if gpu.rack:
        raise ResetImpossible(f"the NVLink fabric of GPU {gpu.pci} may span several nodes: {gpu.rack}")
    if not is_reset:
        return
    if gpu.architecture not in _ALONE | _TOGETHER:
        raise ResetImpossible(f'healthd does not know how to reset GPU {gpu.pci} of architecture "{gpu.architecture}"')
    if any(word in gpu.virtualization.lower() for word in _GUEST_OR_HOST):
        raise ResetImpossible(f"GPU {gpu.pci} is shared by virtual machines ({gpu.virtualization})")
    if gpu.has_confidential_memory:
        raise ResetImpossible(f"GPU {gpu.pci} is in use for confidential computing, which a reset would end")


def services_to_stop(plan: ResetPlan, stop_services: Iterable[str], fabric_manager_runs: bool) -> tuple[str, ...]:
    """Return the units to stop for this reset, without those that may keep running."""
    units = [unit_name(name) for name in stop_services]
    if plan.keeps_fabric_manager:
        units = [unit for unit in units if unit != FABRIC_MANAGER]
    elif fabric_manager_runs:
        units.append(FABRIC_MANAGER)
    return tuple(dict.fromkeys(units))


def kernel_clients(plan: ResetPlan, before: Iterable[GpuReading], services: Collection[str]) -> tuple[str, ...]:
    """Return the ids of the GPUs to reset whose persistence mode nvidia-persistenced does not set (`nvidia-smi -pm 1`).

    The driver then keeps the GPU open, and refuses a reset. nvidia-persistenced switches the mode off when it stops.
    """
    if PERSISTENCE_DAEMON in services:
        return ()
    return tuple(gpu.id for gpu in before if gpu.has_persistence and gpu.pci in plan.parts)


def persistence_argv(ids: Iterable[str], is_on: bool) -> tuple[str, ...]:
    return ("nvidia-smi", "-pm", "1" if is_on else "0", "-i", ",".join(ids))


def unit_name(name: str) -> str:
    """Return the unit's full name; systemd's default suffix is ".service"."""
    return name if "." in name else f"{name}.service"


def is_in_use(status: int | None, output: str) -> bool:
    """Return True if nvidia-smi refused the reset because a GPU has a client. No GPU was reset."""
    return status not in (0, None) and _IN_USE.search(output) is not None and not _has_reset(output)


def _has_reset(output: str) -> bool:
    """Return True if nvidia-smi reported a reset. One command may reset some GPUs, and refuse others."""
    return _DONE.search(output) is not None or _ALL_DONE.search(output) is not None


def command_failure(status: int | None, output: str, plan: ResetPlan) -> tuple[Outcome, str] | None:
    """Return why the command did not reset all GPUs, or None. `status` is not None."""
    last = next((line.strip() for line in reversed(output.split("\n")) if line.strip()), "")[:200]
    if is_in_use(status, output):
        return Outcome.IMPOSSIBLE, "the driver refused the reset: a GPU is in use, perhaps by a console or nvidia-drm"
    if status == _NOT_AVAILABLE and not _has_reset(output):
        return Outcome.IMPOSSIBLE, f"a reset is not available on this GPU: {last}"
    done = {sysfs_address(address) for address in _DONE.findall(output)}
    if status != 0:
        only = f" after the reset of {_names(sorted(done))}" if done else ""
        return Outcome.FAILED, f"nvidia-smi --gpu-reset ended with status {status}{only}: {last}"
    missing = sorted(set(plan.parts) - done)
    if missing and (plan.ids or not _ALL_DONE.search(output)):
        return Outcome.FAILED, f"nvidia-smi did not report the reset of {_names(missing)}"
    return None


def effect_problem(before: Sequence[GpuReading], after: Sequence[GpuReading], plan: ResetPlan) -> str:
    """Return why the GPUs are not as expected after the reset, as one sentence, or ""."""
    now = {gpu.pci: gpu for gpu in after}
    gone = [gpu.pci for gpu in before if gpu.pci not in now]
    if own := [pci for pci in gone if pci in plan.parts]:
        return f"the driver no longer shows {_names(own)} after the reset"
    if gone:
        return f"after the reset of {_names(plan.parts)}, the driver no longer shows {_names(gone)}"
    for pci in plan.parts:
        gpu = now[pci]
        if gpu.recovery_action:
            return f'GPU {pci} still requests the recovery action "{gpu.recovery_action}" after the reset'
        if gpu.is_pending:
            return f"GPU {pci} still has a pending row remap or page retirement after the reset"
        if gpu.uncorrectable:
            return f"GPU {pci} has {gpu.uncorrectable} volatile uncorrectable ECC errors after the reset"
    had_mig = [gpu.pci for gpu in before if gpu.has_mig and gpu.pci in plan.parts]
    if lost := [pci for pci in had_mig if not now[pci].has_mig]:
        return f"MIG is no longer enabled on {_names(lost)} after the reset"
    return ""


def proof(before: Sequence[GpuReading], plan: ResetPlan) -> str:
    """Return the evidence of a reset after which `effect_problem` found nothing, as one sentence."""
    seen = [f"nvidia-smi reported the reset of {_names(plan.parts)}"]
    for gpu in before:
        if gpu.pci in plan.parts:
            if gpu.recovery_action:
                seen.append(f'GPU {gpu.pci} no longer requests "{gpu.recovery_action}"')
            if gpu.is_pending:
                seen.append(f"GPU {gpu.pci} no longer has a pending row remap or page retirement")
            if gpu.uncorrectable:
                seen.append(f"GPU {gpu.pci} had {gpu.uncorrectable} volatile uncorrectable ECC errors and now has none")
            if gpu.has_mig:
                seen.append(f"GPU {gpu.pci} has lost its MIG instances, which the site must create again")
    return "; ".join(seen)


def _names(parts: Sequence[str]) -> str:
    shown = ", ".join(parts[:8]) + (f" and {len(parts) - 8} more" if len(parts) > 8 else "")
    return f"{'GPU' if len(parts) == 1 else 'GPUs'} {shown}"
