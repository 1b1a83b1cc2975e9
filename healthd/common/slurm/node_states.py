"""Groups of flags that a node's Slurm state may contain."""

from __future__ import annotations

REBOOT = frozenset({"REBOOT_REQUESTED", "REBOOT_ISSUED", "REBOOT^", "REBOOT"})
# Slurm's power saving removes a drain when it powers off a node. UNDRAIN would undo POWER_DOWN_ASAP.
POWER = frozenset({"POWER_DOWN", "POWER_DRAIN", "POWERING_DOWN", "POWERED_DOWN", "POWER_UP", "POWERING_UP"})
NOT_RESUMABLE = REBOOT | POWER | {"DOWN", "INVALID_REG"}
DRAINED_STATES = frozenset({"DRAIN", "DRAINING", "DRAINED", "FAIL", "FAILING"})
UNSETTLED = NOT_RESUMABLE | {"NOT_RESPONDING", "UNKNOWN"}
# `scontrol show node` prints these for a node in a reservation with the flag MAINT (slurm.h: NODE_STATE_MAINT).
MAINTENANCE = frozenset({"MAINT", "MAINTENANCE"})
IN_SERVICE = frozenset({"IDLE", "ALLOCATED", "MIXED"})  # states of a node that runs or may start jobs
ALLOCATION = frozenset({"ALLOCATED", "MIXED"})  # states of a node with jobs on all or some of its CPUs
