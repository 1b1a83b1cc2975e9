"""Names, labels and meanings of healthd's own metrics.

Names follow Prometheus' rules (prometheus.io/docs/practices/naming): prefix healthd_, base units, counters end in
_total, times end in `_timestamp_seconds`. No label is called `instance` or `job`: Prometheus adds these to each series.
Properties that may change while an object exists (severity, confirmation) are not labels. A different label value makes
a different series, for which an alert's `for:` starts over.
"""

from __future__ import annotations

from typing import NamedTuple

PREFIX = "healthd_"


class Family(NamedTuple):
    """A metric family. `labels` are all labels that a series may have. `text` is the HELP text: the value's meaning and
    unit.
    """

    labels: tuple[str, ...]
    text: str


_CONDITION = ("check", "code", "subject")
_CHECK = ("check", "name")
_LIMIT = ("kind", "partition")

# gpu, UUID, pci_bus_id, device and modelName have dcgm-exporter's format (NVIDIA/dcgm-exporter,
# internal/pkg/rendermetrics): an eight-digit domain and upper-case digits, as in NVML.
FAMILIES = {
    "build_info": Family(("version",), "Always 1; the label is the running version of healthd."),
    "node_info": Family(("node",), "Always 1; the label is the node's name in Slurm."),
    "mode_info": Family(("mode",), "Always 1; the label is the mode: observe, drain or act."),
    "start_timestamp_seconds": Family((), "Start time of this healthd, in seconds since the epoch."),
    "gpu_info": Family(
        ("gpu", "UUID", "pci_bus_id", "device", "modelName", "pci"),
        "Always 1; there is one series for each GPU that NVML reports. gpu, UUID, pci_bus_id, device and modelName are "
        "as in dcgm-exporter, pci is the address in healthd's other series.",
    ),
    "nvlink_domain_info": Family(
        ("domain", "id"),
        "Always 1, on a node whose GPUs have joined an NVLink domain. domain is its UUID, id its short id in the drain "
        "reason.",
    ),
    # --- the node and its conditions
    "health": Family(("state",), "1 for the current health of the node, 0 for the other values."),
    "condition_severity": Family(
        _CONDITION,
        "Severity of a condition, including pending ones: 0 info, 1 warning, 2 degraded (drains), 3 critical (drains "
        "and requeues).",
    ),
    "condition_open": Family(
        _CONDITION, "1 for a confirmed condition, 0 while it is pending (not yet present for its confirm time)."
    ),
    "condition_enforced": Family(
        _CONDITION,
        "0 for a condition that never drains, because it is based only on a log that users can forge; else 1.",
    ),
    "condition_acknowledged": Family(
        _CONDITION, "1 for a condition that an operator acknowledged (healthd ack, or a resume); it does not drain."
    ),
    "condition_since_timestamp_seconds": Family(
        _CONDITION,
        "When a condition was confirmed or, if it is still pending, first reported; seconds since the epoch.",
    ),
    "condition_begun_timestamp_seconds": Family(
        _CONDITION,
        "When a condition was first reported, before its confirm time. If its severity was lower then: when it became "
        "degraded or critical. Seconds since the epoch.",
    ),
    "condition_acknowledged_until_timestamp_seconds": Family(
        _CONDITION, "When the healthd ack of a condition expires, in seconds since the epoch."
    ),
    "condition_slurm_job": Family(
        (*_CONDITION, "slurm_job"), "Always 1; the label is a Slurm job that caused a condition."
    ),
    # --- the checks and their rounds
    "check_runs_total": Family((*_CHECK, "outcome"), "Runs of a check since the start, by outcome."),
    "check_up": Family(_CHECK, "1 if the last run of a check completed, else 0."),
    "check_duration_seconds": Family(_CHECK, "Duration of the last run of a check, in seconds."),
    "check_last_completed_timestamp_seconds": Family(
        _CHECK, "When the last run of a check ended, if it completed; seconds since the epoch."
    ),
    "check_observations_refused": Family(
        ("check",), "Readings of a check's last run that are not exported: invalid as a metric, or too many."
    ),
    "rounds_total": Family((), "Rounds of checks started since the start."),
    "round_started_timestamp_seconds": Family((), "When the last round began, in seconds since the epoch."),
    "round_duration_seconds": Family((), "Duration of the last finished round, in seconds; 0 before the first."),
    "round_next_timestamp_seconds": Family((), "When the next round begins, in seconds since the epoch."),
    "round_interval_seconds": Family((), "Configured interval between rounds, in seconds."),
    # --- sources of events
    "kernel_log_info": Family(("from",), "Always 1; the label is the source of kernel lines."),
    "kernel_log_observed_only": Family(
        (), "1 if the kernel log is only displayed and never drains, because users can forge its lines; else 0."
    ),
    "kernel_log_lines_total": Family((), "Kernel log lines read since the start."),
    "kernel_log_events_total": Family((), "Kernel log lines since the start that a rule recognised."),
    "kernel_log_events_forgotten_total": Family(
        (), "Events that were evaluated but are no longer kept; later repeats are counted without them."
    ),
    "kernel_log_last_line_timestamp_seconds": Family(
        (), "Time of the last kernel log line, in seconds since the epoch."
    ),
    "source_up": Family(("source",), "1 if the source is open and was last read without an error, else 0."),
    "source_last_read_timestamp_seconds": Family(
        ("source",), "When a source was last read without an error, in seconds since the epoch."
    ),
    "source_restarts_total": Family(
        ("source",), "Times that a source failed or could not be opened; healthd reopens it."
    ),
    "source_overruns_total": Family(("source",), "Times that lines were overwritten or dropped before they were read."),
    "source_lost_total": Family(
        ("source",), "Lines lost in overruns, if their number is known; the journal may still have them."
    ),
    "source_malformed_total": Family(("source",), "Lines that were malformed or too long, and were skipped."),
    "source_rotations_total": Family(("source",), "Times that a source's file was rotated or truncated."),
    # --- Slurm and decisions
    "slurm_commands_total": Family(
        ("command", "result"), "Slurm commands run since the start, by result: ok, error or timeout."
    ),
    "slurm_read_timestamp_seconds": Family((), "When the node was last read from Slurm, in seconds since the epoch."),
    "slurm_problem": Family((), "1 if the last attempt to read or change the node in Slurm failed, else 0."),
    "slurm_drain_desired": Family((), "1 if an open condition requires a drain, even in mode observe; else 0."),
    "slurm_drained_by": Family(
        ("owner",),
        "Always 1; the label is the owner of the drain, as last read: healthd, other, or unrecorded_healthd.",
    ),
    "slurm_drained_since_timestamp_seconds": Family(
        (),
        "When the current drain was set, in seconds since the epoch: for healthd's own drain the time of its first "
        "Reason, for other drains Slurm's time of the current Reason.",
    ),
    "slurm_drain_info": Family(
        ("owner", "reason"), "Always 1; the labels are the owner of the current drain, and its Reason in Slurm."
    ),
    "fleet_count_available": Family(
        (),
        "0 if a drain is due or set, but the nodes that healthd keeps drained cannot be counted; else 1. At 0, drains "
        "wait.",
    ),
    "fleet_limit_drain_waiting": Family(
        _LIMIT,
        "Always 1: a drain waits because healthd keeps as many nodes drained as the fleet limit allows. If the limit "
        "of an NVLink domain applies, `partition` names the domain.",
    ),
    "fleet_limit_nodes_drained": Family(_LIMIT, "Nodes that healthd kept drained at the last count."),
    "fleet_limit_nodes": Family(_LIMIT, "Nodes in the partition; no series for an NVLink domain."),
    "fleet_limit_nodes_allowed": Family(_LIMIT, "Nodes in the partition that healthd may keep drained."),
    "fleet_limit_waiting_since_timestamp_seconds": Family(
        (), "Since when a drain waits for the fleet limit, in seconds since the epoch."
    ),
    "fleet_limit_next_try_timestamp_seconds": Family(
        (), "When the waiting drain is retried, in seconds since the epoch."
    ),
    "repair_mode_info": Family(("mode",), "Always 1; the label is repair.mode."),
    "repair_step": Family(("step",), "1 for the repair step that this node needs; no series if it needs none."),
    "repair_obstacle": Family(("obstacle",), "1 for each obstacle that prevents this step now."),
    "repair_given_up": Family(
        (), "1 if the last repair step failed, or a service does not start after it, so that a person must act."
    ),
    "repair_stage_begun_timestamp_seconds": Family(
        ("step", "stage"),
        "Start of the stage (claim, step, verify) of the repair in progress, in seconds since the epoch.",
    ),
    "repair_stage_deadline_timestamp_seconds": Family(
        ("step", "stage"),
        "Time by which this stage should end, in seconds since the epoch. A claim has no deadline.",
    ),
    "decision": Family(("action",), "1 for the last decision, 0 for the other actions."),
    "decision_withheld": Family((), "1 if the mode, a pause or a limit prevents an action; else 0."),
    "commands_total": Family(
        ("command",),
        "Operators' commands since the start, such as ack, repaired, pause, repair-now and failslow-pause.",
    ),
    "paused": Family((), "1 while healthd is paused, else 0."),
    "paused_until_timestamp_seconds": Family((), "When the pause ends, in seconds since the epoch."),
    # --- healthd itself
    "config_last_reload_successful": Family(
        (), "1 if the last reload of the settings succeeded, 0 if the old ones were kept."
    ),
    "config_reload_failures_total": Family((), "Reloads since the start in which the settings were rejected."),
    "resource_blocked": Family(
        ("resource",), "Always 1: a lost worker still hangs in the resource, and checks that use it cannot run."
    ),
    "workers_started_total": Family((), "Worker processes started since the start."),
    "workers_abandoned_total": Family((), "Overdue workers that were abandoned since the start."),
    "evidence_failures_total": Family((), "Parts of the evidence of a fault that could not be saved."),
    "ledger_copy_failures_total": Family((), "Failed copies of the ledger to the state directory."),
    "stream_lines_waiting": Family((), "Lines of the event stream that are not yet on disk."),
    "stream_write_failures_total": Family((), "Failed writes of the event stream."),
    "stream_lines_dropped_total": Family(
        (), "Lines of the event stream that were lost because too many waited for the disk."
    ),
    "stream_journal_lost_total": Family(
        (), "Lines of the event stream that the journal did not accept; they are in the file."
    ),
    "hook_failures_total": Family(("hook",), "Events for which all runs of a hook failed."),
    "hook_failing": Family(
        ("hook",), "1 if all runs of a hook for its last event failed, or if hooks cannot run, else 0."
    ),
    "inputs_dropped_total": Family(
        ("from",), "Inputs that healthd dropped because of an internal error, by source; the log has the reason."
    ),
    "resource_shortages_total": Family(
        ("resource",),
        "Times that healthd could not get a thread, a process or a file descriptor (threads, processes, "
        "file_descriptors); healthd retries.",
    ),
    "process_resident_memory_bytes": Family(
        ("process",), "Resident memory in bytes: of the daemon, and of all workers together."
    ),
    "process_cpu_seconds_total": Family(
        ("process",),
        "CPU time in seconds of the daemon, and of its children: workers and Slurm commands, including ended ones.",
    ),
}
