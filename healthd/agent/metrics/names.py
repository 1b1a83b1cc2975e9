"""healthd's own metrics: what each is called, which labels it has, and what its value says.

Names follow Prometheus' rules (prometheus.io/docs/practices/naming): prefix healthd_, base units, counters end in
_total, a moment is `_timestamp_seconds`. No label is called `instance` or `job`: Prometheus gives each series its own.
A label never says what may change while a thing stands (how bad it is, whether it is confirmed): another label value is
another series, at which an alert's `for:` begins anew.
"""

from __future__ import annotations

from typing import NamedTuple

PREFIX = "healthd_"


class Family(NamedTuple):
    """labels: all that a series of it may have. text: what the value says, with its unit, as HELP has it."""

    labels: tuple[str, ...]
    text: str


_CONDITION = ("check", "code", "subject")
_CHECK = ("check", "name")
_LIMIT = ("kind", "partition")

# The forms of gpu, UUID, pci_bus_id, device and modelName are dcgm-exporter's (NVIDIA/dcgm-exporter,
# internal/pkg/rendermetrics): an eight-digit domain and capital digits, as NVML has them.
FAMILIES = {
    "build_info": Family(("version",), "Always 1; the label is the version of healthd that runs."),
    "node_info": Family(("node",), "Always 1; the label is the node's name in Slurm."),
    "mode_info": Family(("mode",), "Always 1; the label is what healthd may do: observe, drain or act."),
    "start_timestamp_seconds": Family((), "When this healthd was started, in seconds since the epoch."),
    "gpu_info": Family(
        ("gpu", "UUID", "pci_bus_id", "device", "modelName", "pci"),
        "Always 1; a GPU that NVML told of. gpu, UUID, pci_bus_id, device and modelName are as dcgm-exporter has them, "
        "pci is the address in healthd's other series.",
    ),
    # --- the node and what is wrong with it
    "health": Family(("state",), "1 for the health that the node has, 0 for the others."),
    "condition_severity": Family(
        _CONDITION,
        "How bad a condition is that stands, suspected ones too: 0 info, 1 warning, 2 degraded (drains), 3 critical "
        "(drains and requeues).",
    ),
    "condition_open": Family(
        _CONDITION, "1 for a condition that is confirmed, 0 while it is only suspected (not yet seen for long enough)."
    ),
    "condition_enforced": Family(
        _CONDITION, "0 for a condition that rests only on a log which users can forge, and decides nothing; else 1."
    ),
    "condition_acknowledged": Family(
        _CONDITION, "1 for a condition that a person knows of (healthd ack, or a resume), so that it does not act."
    ),
    "condition_since_timestamp_seconds": Family(
        _CONDITION, "When a condition was confirmed, or first seen while it is suspected; seconds since the epoch."
    ),
    "condition_acknowledged_until_timestamp_seconds": Family(
        _CONDITION, "Until when a healthd ack of a condition holds, in seconds since the epoch."
    ),
    "condition_slurm_job": Family(
        (*_CONDITION, "slurm_job"), "Always 1; the label is a Slurm job at the source of a condition that stands."
    ),
    # --- the checks and their rounds
    "check_runs_total": Family((*_CHECK, "outcome"), "Runs of a check since the start, by how they ended."),
    "check_up": Family(_CHECK, "1 if the last run of a check completed, 0 if it could not look."),
    "check_duration_seconds": Family(_CHECK, "How long the last run of a check took, in seconds."),
    "check_last_completed_timestamp_seconds": Family(
        _CHECK, "When the last run of a check ended, if it completed; seconds since the epoch."
    ),
    "check_observations_refused": Family(
        ("check",), "Readings of a check's last run that are not shown: no valid metric, or too many."
    ),
    "rounds_total": Family((), "Rounds of checks begun since the start."),
    "round_started_timestamp_seconds": Family((), "When the last round began, in seconds since the epoch."),
    "round_duration_seconds": Family((), "How long the last finished round took, in seconds; 0 before the first."),
    "round_next_timestamp_seconds": Family((), "When the next round begins, in seconds since the epoch."),
    "round_interval_seconds": Family((), "How far apart rounds are meant to be, in seconds."),
    # --- what is listened to
    "kernel_log_info": Family(("from",), "Always 1; the label is where kernel lines are read from."),
    "kernel_log_observed_only": Family(
        (), "1 if what the kernel log says is shown and decides nothing, since users can forge its lines; else 0."
    ),
    "kernel_log_lines_total": Family((), "Lines of the kernel log read since the start."),
    "kernel_log_events_total": Family((), "Of these, lines that say something about the hardware."),
    "kernel_log_events_forgotten_total": Family(
        (), "Events that were judged and are no longer kept: what repeats is counted without them."
    ),
    "kernel_log_last_line_timestamp_seconds": Family(
        (), "The time of the last line of the kernel log, in seconds since the epoch."
    ),
    "source_up": Family(("source",), "1 if what is listened to is open and was last read without an error, else 0."),
    "source_last_read_timestamp_seconds": Family(
        ("source",), "When a source was last read without an error, in seconds since the epoch."
    ),
    "source_restarts_total": Family(
        ("source",), "Times that a source died, or could not be opened, and was opened again or will be."
    ),
    "source_overruns_total": Family(("source",), "Times that something was overwritten or dropped before it was read."),
    "source_lost_total": Family(
        ("source",), "Lines lost so, where their number is known; the journal may still have them."
    ),
    "source_malformed_total": Family(("source",), "Lines that were no record, or too long, and are not read."),
    "source_rotations_total": Family(("source",), "Times that the file of a source became another or was cut."),
    # --- Slurm and what is done
    "slurm_commands_total": Family(
        ("command", "result"), "Slurm commands run since the start, by how they ended: ok, error or timeout."
    ),
    "slurm_read_timestamp_seconds": Family((), "When the node was last read from Slurm, in seconds since the epoch."),
    "slurm_problem": Family((), "1 if Slurm could not be read or changed when last tried, else 0."),
    "slurm_drain_desired": Family((), "1 if an open condition wants the node drained, in mode observe too; else 0."),
    "slurm_drained_by": Family(
        ("owner",), "Always 1; the label is whose the drain is, as last read: healthd, other, or unrecorded_healthd."
    ),
    "slurm_drained_since_timestamp_seconds": Family(
        (),
        "When the drain that stands was set, in seconds since the epoch: healthd's own when it began to stand, any "
        "other's by Slurm's time of its reason.",
    ),
    "slurm_drain_info": Family(
        ("owner", "reason"), "Always 1; the labels are whose the drain that stands is, and its Reason in Slurm."
    ),
    "fleet_count_available": Family(
        (),
        "0 while a drain is wanted or set and the nodes that healthd keeps drained cannot be counted, else 1. Drains "
        "are held then.",
    ),
    "fleet_limit_drain_waiting": Family(
        _LIMIT, "Always 1: a drain that is wanted is held back, since healthd holds as many nodes as it may."
    ),
    "fleet_limit_nodes_drained": Family(_LIMIT, "Nodes that healthd held drained at the last count."),
    "fleet_limit_nodes": Family(_LIMIT, "Nodes of that partition."),
    "fleet_limit_nodes_allowed": Family(_LIMIT, "How many of them healthd may hold drained."),
    "fleet_limit_waiting_since_timestamp_seconds": Family(
        (), "Since when a drain waits for the fleet, in seconds since the epoch."
    ),
    "fleet_limit_next_try_timestamp_seconds": Family((), "When that drain is tried again, in seconds since the epoch."),
    "decision": Family(("action",), "1 for what was last decided, 0 for the others."),
    "decision_withheld": Family((), "1 if something would be done but for the mode, a pause or a limit; else 0."),
    "commands_total": Family(
        ("command",),
        "What people told healthd since the start: ack, repaired, pause, unpause, failslow-pause, failslow-unpause.",
    ),
    "paused": Family((), "1 while a healthd pause holds, else 0."),
    "paused_until_timestamp_seconds": Family((), "When the pause ends, in seconds since the epoch."),
    # --- healthd itself
    "config_last_reload_successful": Family(
        (), "1 if the settings were read without an error when last tried, 0 if the old ones were kept."
    ),
    "config_reload_failures_total": Family((), "Times since the start that changed settings were refused."),
    "resource_blocked": Family(
        ("resource",), "Always 1: a lost worker still hangs in it, and checks that use it cannot run."
    ),
    "workers_started_total": Family((), "Worker processes started since the start."),
    "workers_abandoned_total": Family((), "Workers that were overdue and were given up."),
    "ledger_copy_failures_total": Family((), "Copies of the ledger to the state directory that failed."),
    "stream_lines_waiting": Family((), "Lines of the event stream that are not yet on the disk."),
    "stream_write_failures_total": Family((), "Times that lines of the event stream could not be written."),
    "stream_lines_dropped_total": Family((), "Lines of the event stream that are lost: too many waited for the disk."),
    "stream_journal_lost_total": Family(
        (), "Lines of the event stream that the journal did not take; they are in the file."
    ),
    "inputs_dropped_total": Family(
        ("from",), "Inputs that healthd made a mistake with and left out, by where they came from; its log has why."
    ),
    "resource_shortages_total": Family(
        ("resource",),
        "Times that healthd could not get a thread, a process or a file descriptor (threads, processes, "
        "file_descriptors); the work is tried again.",
    ),
    "process_resident_memory_bytes": Family(
        ("process",), "Resident memory in bytes, of the daemon and of all workers together."
    ),
    "process_cpu_seconds_total": Family(
        ("process",),
        "CPU time in seconds of the daemon, and of its children: workers and Slurm commands, ended ones too.",
    ),
}
