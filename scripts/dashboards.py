"""Write packaging/grafana/*.json: one board for the fleet, one for a node.

Grafana's JSON is long and repetitive; here a panel takes a few lines. Run `python scripts/dashboards.py` after a
change; tests/packaging/test_dashboards.py fails if a file is outdated. The schema is that of Grafana 10
(grafana/grafana, kinds/dashboard/dashboard_kind.cue), which newer versions also read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parents[1] / "packaging/grafana"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
JOB = 'cluster=~"$cluster", job=~"$job"'
INSTANCE = f'{JOB}, instance="$instance"'
TARGET = "on (cluster, job, instance)"  # two clusters may have nodes of the same name
WITH_NODE_NAME = f"* {TARGET} group_left (node) healthd_node_info"
WIDTH = 24

GREEN, YELLOW, ORANGE, RED, PURPLE, GREY = "green", "yellow", "orange", "red", "purple", "text"
HEALTH = {"healthy": GREEN, "warning": YELLOW, "degraded": ORANGE, "unhealthy": RED, "unknown": PURPLE}
SEVERITY = {0: ("info", GREY), 1: ("warning", YELLOW), 2: ("degraded", ORANGE), 3: ("critical", RED)}


class Query(NamedTuple):
    """A PromQL query. `legend` names each series; "{{code}}" stands for the value of a label."""

    expr: str
    legend: str = ""


class Panel(NamedTuple):
    """A panel of a board.

    `kind` and `unit` are Grafana's names. `size` is in columns (24 per row) and rows of 30 px. `description` is the
    text in the corner of the panel. `columns` maps labels to the headings of a table, in order; "Value" is the
    number that the query returns.
    """

    title: str
    kind: str
    size: tuple[int, int]
    queries: Sequence[Query]
    description: str
    unit: str = "short"
    colours: Mapping[float, str] = {}  # colour by threshold
    series: Mapping[str, str] = {}  # the colour of each series, by its legend
    value_texts: Mapping[int, tuple[str, str]] = {}  # value -> text and colour
    columns: Mapping[str, str] = {}
    stacked: bool = False


def faults(more: str) -> str:
    """Return a query for the conditions that drain: open, enforced and not acknowledged."""
    labels = f"{{{more}}}"
    return (
        f"healthd_condition_severity{labels} >= 2 and healthd_condition_open{labels} == 1"
        f" and healthd_condition_enforced{labels} == 1 unless healthd_condition_acknowledged{labels} == 1"
    )


def problem(expr: str, text: str) -> str:
    return f'label_replace({expr}, "problem", "{text}", "", "")'


PROBLEMS = " or ".join(
    problem(expr, text)
    for expr, text in (
        (f"up{{{JOB}}} == 0", "not scraped"),
        (
            f"time() - healthd_round_started_timestamp_seconds{{{JOB}}} > 3 * healthd_round_interval_seconds{{{JOB}}}",
            "checks are late",
        ),
        (f'healthd_source_up{{{JOB}, source="kernel_log"}} == 0', "kernel log not read"),
        (f"healthd_slurm_problem{{{JOB}}} == 1", "Slurm commands fail"),
        (f"healthd_config_last_reload_successful{{{JOB}}} == 0", "settings rejected"),
        (f"healthd_paused{{{JOB}}} == 1", "paused"),
        (f"healthd_stream_lines_waiting{{{JOB}}} > 100", "events not written to disk"),
    )
)

FLEET = (
    Panel(
        "Nodes",
        "stat",
        (4, 4),
        [Query(f"count(healthd_node_info{{{JOB}}})")],
        "Nodes that report healthd metrics to Prometheus.",
    ),
    Panel(
        "Healthy",
        "stat",
        (4, 4),
        [Query(f'sum(healthd_health{{{JOB}, state="healthy"}})')],
        "Nodes without open conditions.",
        colours={0: GREEN},
    ),
    Panel(
        "Broken",
        "stat",
        (4, 4),
        [Query(f'sum(healthd_health{{{JOB}, state=~"degraded|unhealthy"}})')],
        "Nodes with a fault that drains, also in mode observe.",
        colours={0: GREEN, 1: RED},
    ),
    Panel(
        "Drained by healthd",
        "stat",
        (4, 4),
        [Query(f'count(healthd_slurm_drained_by{{{JOB}, owner="healthd"}}) or vector(0)')],
        "Nodes drained by healthd, as each node last read from Slurm.",
        colours={0: GREEN, 1: ORANGE},
    ),
    Panel(
        "Waiting (fleet limit)",
        "stat",
        (4, 4),
        [
            Query(
                f'count(healthd_decision_withheld{{{JOB}}} == 1 unless {TARGET} healthd_mode_info{{mode="observe"}}'
                f" unless {TARGET} healthd_paused == 1) or vector(0)"
            )
        ],
        "Nodes whose drain or resume waits for the fleet limit or a retry, without paused or observing nodes.",
        colours={0: GREEN, 1: YELLOW},
    ),
    Panel(
        "Not reporting",
        "stat",
        (4, 4),
        [Query(f"count(up{{{JOB}}} == 0) or vector(0)")],
        "Nodes where healthd does not answer Prometheus.",
        colours={0: GREEN, 1: RED},
    ),
    Panel(
        "Nodes by health",
        "timeseries",
        (16, 8),
        [Query(f"sum by (state) (healthd_health{{{JOB}}})", "{{state}}")],
        "Number of nodes by health. Nodes that are not scraped are missing from the total.",
        series=HEALTH,
        stacked=True,
    ),
    Panel(
        "Open conditions by code",
        "table",
        (8, 8),
        [Query(f"sort_desc(count by (code) ({faults(JOB)}))")],
        "Codes that drain, with the number of parts. healthd explain CODE explains a code.",
        columns={"code": "Code", "Value": "Parts"},
    ),
    Panel(
        "Drained nodes",
        "table",
        (24, 8),
        [
            Query(
                f"((time() - healthd_slurm_drained_since_timestamp_seconds{{{JOB}}})"
                f" * {TARGET} group_left (owner, reason) healthd_slurm_drain_info"
                f" or {TARGET} NaN * healthd_slurm_drain_info{{{JOB}}}) {WITH_NODE_NAME}"
            )
        ],
        "Owner, reason and duration of each drain.",
        unit="s",
        columns={"node": "Node", "Value": "For", "owner": "Drained by", "reason": "Reason"},
    ),
    Panel(
        "Faults by check",
        "timeseries",
        (12, 8),
        [Query(f"count by (check) ({faults(JOB)})", "{{check}}")],
        "Faults that drain, by check. A step on many nodes at once has one cause.",
    ),
    Panel(
        "Drains: desired, in place, waiting",
        "timeseries",
        (12, 8),
        [
            Query(f"sum(healthd_slurm_drain_desired{{{JOB}}})", "desired"),
            Query(f'count(healthd_slurm_drained_by{{{JOB}, owner="healthd"}}) or vector(0)', "in place"),
            Query(f"count(healthd_fleet_limit_drain_waiting{{{JOB}}}) or vector(0)", "waiting (fleet limit)"),
        ],
        "A desired drain may be missing because of the mode, a pause, the fleet limit, or Slurm.",
        series={"desired": ORANGE, "in place": RED, "waiting (fleet limit)": YELLOW},
    ),
    Panel(
        "Problems of healthd itself",
        "table",
        (12, 8),
        [Query(f"({PROBLEMS})")],
        "Nodes that are not fully monitored: their other metrics may be outdated.",
        columns={"instance": "Target", "problem": "Problem"},
    ),
    Panel(
        "Fleet limit in use",
        "timeseries",
        (6, 8),
        [
            Query(
                f"max by (partition, kind) (healthd_fleet_limit_nodes_drained{{{JOB}}}"
                f" / (healthd_fleet_limit_nodes_allowed{{{JOB}}} > 0))",
                "{{partition}}, {{kind}}",
            )
        ],
        "Share of the fleet limit of a partition in use, as a waiting node last counted. Empty: no drain waits.",
        unit="percentunit",
    ),
    Panel(
        "Modes and versions",
        "table",
        (6, 8),
        [
            Query(
                f"count by (mode, version) (healthd_mode_info{{{JOB}}}"
                f" * {TARGET} group_left (version) healthd_build_info)"
            )
        ],
        "Nodes by mode and version, to find nodes that a roll-out missed.",
        columns={"mode": "Mode", "version": "Version", "Value": "Nodes"},
    ),
    Panel(
        "Slow jobs",
        "timeseries",
        (6, 7),
        [
            Query(f"count(healthd_failslow_slow_jobs{{{JOB}}} > 0) or 0 * sum(healthd_failslow_jobs{{{JOB}}})", "slow"),
            Query(f"count(healthd_failslow_jobs{{{JOB}}} > 0)", "monitored"),
        ],
        "Nodes with a job that became slower, and nodes with a monitored job. Empty: no job is monitored.",
        series={"slow": ORANGE, "monitored": GREEN},
    ),
    Panel(
        "GPUs lost to slow jobs",
        "timeseries",
        (6, 7),
        [Query(f'sum(rate(healthd_failslow_lost_seconds_total{{{JOB}, source="client"}}[30m]))', "GPUs")],
        "Seconds lost by all ranks per second. With one GPU per rank, this is the number of idle GPUs.",
    ),
    Panel(
        "Nodes with slow jobs",
        "table",
        (6, 7),
        [Query(f"topk(20, healthd_failslow_worst_slowdown{{{JOB}}} > 0) {WITH_NODE_NAME}")],
        "Increase of the iteration time of the slowest job on each node.",
        unit="percentunit",
        columns={"node": "Node", "Value": "Slower by"},
    ),
    Panel(
        "Validations",
        "timeseries",
        (6, 7),
        [Query(f"sum by (verdict) (healthd_validation_results{{{JOB}}})", "{{verdict}}")],
        "Results of the last validation of each node, by verdict. Empty: no node was validated.",
        series={"ok": GREEN, "slow": YELLOW, "failed": RED},
    ),
    Panel(
        "Nodes by repair step",
        "timeseries",
        (8, 7),
        [Query(f"sum by (step) (healthd_repair_step{{{JOB}}})", "{{step}}")],
        "Nodes that need a repair, by the step that they need now. Empty: repair.mode is off, or no node needs one.",
        series={"gpu_reset": GREEN, "reboot": YELLOW, "power_cycle": ORANGE, "person": RED},
        stacked=True,
    ),
    Panel(
        "Repairs in progress, and failed",
        "timeseries",
        (8, 7),
        [
            Query(f"count by (stage) (healthd_repair_stage_begun_timestamp_seconds{{{JOB}}})", "{{stage}}"),
            Query(f"sum(healthd_repair_given_up{{{JOB}}})", "a person must act"),
        ],
        "Nodes that healthd repairs, by stage, and nodes where a person must act. A node that reboots is missing until "
        "it answers.",
        series={"claim": GREY, "step": YELLOW, "verify": GREEN, "a person must act": RED},
    ),
    Panel(
        "Late repairs",
        "table",
        (8, 7),
        [Query(f"sort_desc((time() - healthd_repair_stage_deadline_timestamp_seconds{{{JOB}}} > 0) {WITH_NODE_NAME})")],
        "Repairs whose stage is past its deadline, the longest overrun first. The alert HealthdRepairStuck also covers "
        "a node that does not answer.",
        unit="s",
        columns={"node": "Node", "step": "Step", "stage": "Stage", "Value": "Late by"},
    ),
)


def rate(metric: str, window: str = "15m") -> str:
    return f"rate({metric}{{{INSTANCE}}}[{window}])"


NODE = (
    Panel(
        "Health",
        "stat",
        (4, 4),
        [Query(f"healthd_health{{{INSTANCE}}} == 1", "{{state}}")],
        "Current health of the node.",
        series=HEALTH,
    ),
    Panel(
        "Mode",
        "stat",
        (4, 4),
        [Query(f"healthd_mode_info{{{INSTANCE}}}", "{{mode}}")],
        "Changes that healthd may make in Slurm for this node.",
    ),
    Panel(
        "Decision",
        "stat",
        (4, 4),
        [Query(f"healthd_decision{{{INSTANCE}}} == 1", "{{action}}")],
        "Last decision of healthd: leave, drain, drain_requeue or resume.",
    ),
    Panel(
        "Drained for",
        "stat",
        (4, 4),
        [Query(f"time() - healthd_slurm_drained_since_timestamp_seconds{{{INSTANCE}}}")],
        "Duration of the current drain. Empty: no drain is recorded.",
        unit="s",
        colours={0: ORANGE},
    ),
    Panel("GPUs", "stat", (4, 4), [Query(f"healthd_gpus{{{INSTANCE}}}")], "GPUs that the driver reports."),
    Panel(
        "Last round",
        "stat",
        (4, 4),
        [Query(f"time() - healthd_round_started_timestamp_seconds{{{INSTANCE}}}")],
        "Time since the last round of checks began.",
        unit="s",
        colours={0: GREEN, 900: RED},
    ),
    Panel(
        "Open conditions",
        "table",
        (12, 8),
        [Query(f"healthd_condition_severity{{{INSTANCE}}}")],
        "All conditions, including unconfirmed ones. healthd status on the node shows what to do.",
        value_texts=SEVERITY,
        columns={"Value": "Severity", "code": "Code", "subject": "Part"},
    ),
    Panel(
        "Conditions over time",
        "state-timeline",
        (12, 8),
        [Query(f"healthd_condition_severity{{{INSTANCE}}}", "{{code}} {{subject}}")],
        "When each condition began, became worse and ended.",
        value_texts=SEVERITY,
    ),
    Panel(
        "Drain in Slurm",
        "table",
        (24, 4),
        [Query(f"healthd_slurm_drain_info{{{INSTANCE}}}")],
        "Owner and Reason of the current drain. Empty: no drain is recorded.",
        columns={"owner": "Drained by", "reason": "Reason"},
    ),
    Panel(
        "GPUs of this node",
        "table",
        (12, 8),
        [Query(f"healthd_gpu_info{{{INSTANCE}}}")],
        "As NVML reports them; join with dcgm-exporter by UUID.",
        columns={"gpu": "GPU", "modelName": "Model", "pci": "PCI", "UUID": "UUID"},
    ),
    Panel(
        "GPU temperature",
        "timeseries",
        (12, 8),
        [Query(f"healthd_gpu_temperature_celsius{{{INSTANCE}}}", "{{pci}}")],
        "Temperature of each GPU at each round.",
        unit="celsius",
    ),
    Panel(
        "Slowed by heat or power",
        "timeseries",
        (8, 7),
        [Query(rate("healthd_gpu_clock_slowed_seconds_total"), "{{pci}}")],
        "Share of the time in which heat or power slowed a GPU.",
        unit="percentunit",
    ),
    Panel(
        "ECC errors per day",
        "timeseries",
        (8, 7),
        [Query(f"increase(healthd_gpu_ecc_volatile_errors_total{{{INSTANCE}}}[1d])", "{{pci}} {{location}} {{error}}")],
        "New ECC errors within the last day, by location and type.",
    ),
    Panel(
        "NVLink errors",
        "timeseries",
        (8, 7),
        [Query(f"sum by (pci, error) ({rate('healthd_gpu_nvlink_errors_total', '30m')})", "{{pci}} {{error}}")],
        "Errors per second on the NVLinks of each GPU.",
        unit="cps",
    ),
    Panel(
        "PCIe replays and AER errors",
        "timeseries",
        (8, 7),
        [
            Query(rate("healthd_gpu_pcie_replays_total", "30m"), "{{pci}} replays"),
            Query(rate("healthd_pcie_aer_correctable_total", "30m"), "{{pci}} AER correctable"),
        ],
        "Errors per second of GPUs, cards and the ports above them.",
        unit="cps",
    ),
    Panel(
        "InfiniBand errors",
        "timeseries",
        (8, 7),
        [
            Query(rate("healthd_ib_errors_total", "30m"), "{{port}} {{counter}}"),
            Query(rate("healthd_ib_link_downed_total", "30m"), "{{port}} link down"),
        ],
        "Errors per second of each port. Empty: the node has no port.",
        unit="cps",
    ),
    Panel(
        "Free disk",
        "timeseries",
        (8, 7),
        [Query(f"healthd_disk_space_available_ratio{{{INSTANCE}}}", "{{mountpoint}}")],
        "Free share of the space of each local file system.",
        unit="percentunit",
    ),
    Panel(
        "Failing checks",
        "table",
        (8, 7),
        [Query(f"healthd_check_up{{{INSTANCE}}} == 0")],
        "Checks that fail to run. Their earlier findings stay open.",
        columns={"check": "Check", "name": "Name"},
    ),
    Panel(
        "Slowest checks",
        "timeseries",
        (8, 7),
        [Query(f"topk(5, healthd_check_duration_seconds{{{INSTANCE}}})", "{{check}} {{name}}")],
        "Duration of the last run of each check.",
        unit="s",
    ),
    Panel(
        "healthd memory",
        "timeseries",
        (8, 7),
        [Query(f"healthd_process_resident_memory_bytes{{{INSTANCE}}}", "{{process}}")],
        "Resident memory of the daemon and its workers.",
        unit="bytes",
    ),
    Panel(
        "Slowdown of the slowest job",
        "timeseries",
        (8, 7),
        [Query(f"healthd_failslow_worst_slowdown{{{INSTANCE}}}", "slower by")],
        "Increase of the iteration time. Empty: no job is monitored.",
        unit="percentunit",
    ),
    Panel(
        "Step monitoring: drops and overhead",
        "timeseries",
        (8, 7),
        [
            Query(rate("healthd_failslow_dropped_total"), "dropped: {{reason}}"),
            Query(f"healthd_failslow_sampling_cpu_ratio{{{INSTANCE}}}", "sampler, share of a core"),
        ],
        "Dropped messages of jobs per second, and the CPU share of the counter sampling.",
    ),
    Panel(
        "Last validation",
        "table",
        (8, 7),
        [Query(f"healthd_validation_results{{{INSTANCE}}}")],
        "Number of parts by test and verdict. Empty: the node was not validated.",
        columns={"test": "Test", "verdict": "Verdict", "Value": "Parts"},
    ),
)


# --- Grafana's JSON


def dashboard(
    uid: str, title: str, description: str, panels: Sequence[Panel], variables: Sequence[Mapping[str, Any]]
) -> str:
    """Return the JSON of one board."""
    return (
        json.dumps(
            {
                "uid": uid,
                "title": title,
                "description": description,
                "tags": ["healthd"],
                "schemaVersion": 38,
                "version": 1,
                "editable": True,
                "graphTooltip": 1,
                "refresh": "1m",
                "time": {"from": "now-24h", "to": "now"},
                "templating": {"list": [_datasource(), *variables]},
                "links": [{"type": "dashboards", "tags": ["healthd"], "title": "healthd", "keepTime": True}],
                "panels": list(_placed(panels)),
            },
            indent=2,
        )
        + "\n"
    )


def _placed(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Return the panels with positions: from left to right, with a new row where the next one does not fit."""
    placed, x, y, tallest = [], 0, 0, 0
    for number, panel in enumerate(panels, 1):
        width, height = panel.size
        if x + width > WIDTH:
            x, y, tallest = 0, y + tallest, 0
        placed.append(_panel(number, panel, {"x": x, "y": y, "w": width, "h": height}))
        x, tallest = x + width, max(tallest, height)
    return placed


def _panel(number: int, panel: Panel, position: Mapping[str, int]) -> dict[str, Any]:
    steps = [{"color": colour, "value": value or None} for value, colour in panel.colours.items()]
    defaults: dict[str, Any] = {"unit": panel.unit, "color": {"mode": "palette-classic"}}
    if steps:
        defaults |= {"color": {"mode": "thresholds"}, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.unit == "s":
        nan_text = {"match": "nan", "result": {"text": "not known", "index": 0}}
        defaults["mappings"] = [{"type": "special", "options": nan_text}]
    if panel.value_texts:
        options = {str(value): {"text": text, "color": colour} for value, (text, colour) in panel.value_texts.items()}
        defaults |= {"color": {"mode": "fixed"}, "mappings": [{"type": "value", "options": options}]}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none"}
        defaults["custom"] = {"stacking": stacking, "fillOpacity": 60 if panel.stacked else 10, "lineWidth": 1}
        defaults["min"] = 0
    overrides = [
        {
            "matcher": {"id": "byName", "options": name},
            "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}],
        }
        for name, colour in panel.series.items()
    ]
    is_table = panel.kind == "table"
    return {
        "id": number,
        "title": panel.title,
        "description": panel.description,
        "type": panel.kind,
        "datasource": DATASOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": overrides},
        "options": _options(panel),
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "instant": is_table or panel.kind == "stat",
                "range": not (is_table or panel.kind == "stat"),
                **({"format": "table"} if is_table else {}),
            }
            for at, query in enumerate(panel.queries)
        ],
        **({"transformations": _column_transformations(panel.columns)} if is_table else {}),
    }


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        named = any(query.legend for query in panel.queries)
        return {
            "textMode": "name" if named else "value",
            "colorMode": "background" if panel.colours or panel.series else "none",
            "graphMode": "none",
            "reduceOptions": {"calcs": ["lastNotNull"]},
        }
    if panel.kind == "table":
        return {"showHeader": True, "cellHeight": "sm"}
    return {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}


def _column_transformations(columns: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return transformations that show only these columns, in this order, under their headings."""
    order = {label: at for at, label in enumerate(columns)}
    return [
        {"id": "filterFieldsByName", "options": {"include": {"names": list(columns)}}},
        {"id": "organize", "options": {"indexByName": order, "renameByName": dict(columns)}},
    ]


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(name: str, label: str, query: str, more: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        **more,
    }


JOBS = _variable(
    "job",
    "Job",
    "label_values(healthd_node_info, job)",
    # Without allValue, "All" means the jobs of healthd; with it, other exporters would match too.
    {"includeAll": True, "multi": True, "current": {"text": "All", "value": "$__all"}},
)
CLUSTERS = _variable(
    "cluster",
    "Cluster",
    "label_values(healthd_node_info, cluster)",
    # A site with one cluster may not have this label.
    {"includeAll": True, "allValue": ".*", "multi": True, "current": {"text": "All", "value": "$__all"}},
)
NODE_VARIABLES = (
    _variable("node", "Node", f"label_values(healthd_node_info{{{JOB}}}, node)", {}),
    _variable("instance", "Target", f'label_values(healthd_node_info{{{JOB}, node="$node"}}, instance)', {"hide": 2}),
)


def boards() -> dict[str, str]:
    """Return the text of each file by name."""
    return {
        "healthd-fleet.json": dashboard(
            "healthd-fleet",
            "healthd: fleet",
            "All nodes that healthd monitors: which are out of service, and why.",
            FLEET,
            [CLUSTERS, JOBS],
        ),
        "healthd-node.json": dashboard(
            "healthd-node",
            "healthd: node",
            "One node: open conditions, their start, and the metrics behind them.",
            NODE,
            [CLUSTERS, JOBS, *NODE_VARIABLES],
        ),
    }


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in boards().items():
        (FOLDER / name).write_text(text, "utf-8")
        print(f"{FOLDER.name}/{name}: written")


if __name__ == "__main__":
    main()
