"""Draw docs/board-fleet.png and docs/board-node.png: the boards of packaging/grafana with the data of a simulated day.

The script loads the history below into a real Prometheus (Debian's package prometheus, with promtool), runs the queries
of each panel, and draws the results with matplotlib (`pip install -e '.[docs]'`) at the position of the panel. The
pictures show the results of the queries, not Grafana's appearance. Run `python scripts/board_figure.py`. If the queries
are unchanged, the pictures are unchanged too.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BOARDS = ROOT / "packaging/grafana"

# --- the simulated day

NODES = [f"gpu-{number:03d}" for number in range(1, 49)]
END = 1_795_305_600  # 2026-11-22 00:00 UTC
HOURS, STEP, RESOLUTION = 24, 120, 300  # STEP: seconds between samples; RESOLUTION: step of the range queries
BEGIN = END - HOURS * 3600
SHOWN_NODE = "gpu-031"  # the node of the second board
PCI = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
HEALTHS = ("healthy", "warning", "degraded", "unhealthy", "unknown")


class Fault:
    """A condition on nodes, with times in hours of the day.

    `levels` has (hour, severity) pairs; the last severity lasts until `end`. `drained` is the interval of the drain.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        code: str,
        subject: str,
        levels: Sequence[tuple[float, int]],
        end: float = HOURS + 1,
        drained: tuple[float, float] | None = None,
        drained_nodes: Sequence[str] | None = None,
    ) -> None:
        self.nodes, self.code, self.subject, self.levels, self.end = set(nodes), code, subject, levels, end
        self.drained, self.drained_nodes = drained, set(nodes if drained_nodes is None else drained_nodes)

    def severity(self, hour: float) -> int | None:
        reached = [severity for begins, severity in self.levels if begins <= hour]
        return reached[-1] if reached and hour < self.end else None

    def is_drained(self, node: str, hour: float) -> bool:
        return bool(self.drained) and node in self.drained_nodes and self.drained[0] <= hour < self.drained[1]  # type: ignore[index]


FAULTS = (
    Fault(["gpu-017"], "gpu_xid/79", "0000:61:00.0", [(5.2, 3)], 11.5, (5.25, 11.6)),
    Fault([SHOWN_NODE], "gpu_row_remap/pending", "0000:c3:00.0", [(9.0, 1), (14.0, 2)], drained=(14.1, 25)),
    Fault([SHOWN_NODE], "gpu_ecc/uncorrected", "0000:c3:00.0", [(13.9, 2)], drained=None),
    Fault(["gpu-005"], "ib_flap/flapping", "mlx5_3/1", [(2.0, 1)], 8.0),
    Fault(["gpu-040"], "disk_space/low", "/var", [(12.0, 1)]),
    # A file server fails for an hour. All nodes report the failure, and healthd drains only as many as the fleet limit
    # allows.
    Fault(NODES, "mount/hang", "/data", [(18.0, 1), (18.17, 2)], 19.1, (18.3, 19.2), NODES[9:14]),
)
# Repairs: node, step, stage, and its begin, end and deadline in hours of the day.
REPAIRS = (
    ("gpu-017", "reboot", "step", 5.4, 5.8, 6.4),
    ("gpu-017", "reboot", "verify", 5.8, 6.3, 6.3),
    (SHOWN_NODE, "gpu_reset", "claim", 14.2, 14.3, 0.0),
    (SHOWN_NODE, "gpu_reset", "step", 14.3, 14.4, 14.5),
    (SHOWN_NODE, "gpu_reset", "verify", 14.4, 14.9, 14.9),
    (SHOWN_NODE, "reboot", "verify", 22.9, HOURS + 1, 23.4),
)
# Nodes whose last step failed, with the hours from then on.
GIVEN_UP = {"gpu-017": (6.3, 11.5)}
DEAD_NODE = "gpu-044", 20.5  # healthd on this node stops answering at this hour


def history() -> Iterator[str]:
    """Yield the day in OpenMetrics format: one family after another, each series sorted by time."""
    rows: dict[str, dict[str, list[tuple[int, float]]]] = {}

    def put(name: str, at: int, value: float, target: str, labels: Mapping[str, str]) -> None:
        all_labels = {"job": "healthd", "instance": f"{target}:9478", **labels}
        series = ",".join(f'{label}="{text}"' for label, text in all_labels.items())
        rows.setdefault(name, {}).setdefault(series, []).append((at, value))

    for at in range(BEGIN, END + 1, STEP):
        hour = (at - BEGIN) / 3600
        for number, node in enumerate(NODES):
            is_up = node != DEAD_NODE[0] or hour < DEAD_NODE[1]
            put("up", at, float(is_up), node, {})
            if is_up:
                for name, value, labels in _node_metrics(node, number, at, hour):
                    put(name, at, value, node, labels)
    for name, by_series in sorted(rows.items()):
        yield f"# TYPE {name} gauge\n"
        for series, samples in by_series.items():
            yield from (f"{name}{{{series}}} {value:.10g} {at}\n" for at, value in samples)
    yield "# EOF\n"


Metric = tuple[str, float, dict[str, str]]


def _node_metrics(node: str, number: int, at: int, hour: float) -> Iterator[Metric]:
    """Yield the metrics of one node at one time."""
    active_faults = [
        (fault, severity) for fault in FAULTS if node in fault.nodes and (severity := fault.severity(hour))
    ]
    worst = max((severity for _, severity in active_faults), default=0)
    state = ("healthy", "warning", "degraded", "unhealthy")[worst]
    drains = [fault for fault in FAULTS if fault.is_drained(node, hour)]
    mode = "observe" if number >= 45 else "act"
    yield "healthd_node_info", 1, {"node": node}
    yield "healthd_build_info", 1, {"version": "0.1.0" if number == 20 else "0.2.0"}
    yield "healthd_mode_info", 1, {"mode": mode}
    yield from (("healthd_health", float(name == state), {"state": name}) for name in HEALTHS)
    for fault, severity in active_faults:
        labels = {"check": fault.code.partition("/")[0], "code": fault.code, "subject": fault.subject}
        yield "healthd_condition_severity", severity, labels
        yield "healthd_condition_open", 1, labels
        yield "healthd_condition_enforced", 1, labels
        yield "healthd_condition_acknowledged", 0, labels
    if drains:
        reason = f"healthd: {drains[0].code} {drains[0].subject}"
        yield "healthd_slurm_drained_by", 1, {"owner": "healthd"}
        yield "healthd_slurm_drain_info", 1, {"owner": "healthd", "reason": reason}
        yield "healthd_slurm_drained_since_timestamp_seconds", BEGIN + drains[0].drained[0] * 3600, {}  # type: ignore[index]
    if node == "gpu-002":
        yield "healthd_slurm_drain_info", 1, {"owner": "other", "reason": "firmware update, jm"}
        yield "healthd_slurm_drained_by", 1, {"owner": "other"}
    is_drain_desired = worst >= 2
    waits = is_drain_desired and not drains and mode == "act"
    yield "healthd_slurm_drain_desired", is_drain_desired, {}
    yield "healthd_decision_withheld", is_drain_desired and not drains, {}
    action = "drain_requeue" if drains and worst == 3 else "drain" if drains else "leave"
    yield from (
        ("healthd_decision", float(name == action), {"action": name})
        for name in ("drain", "drain_requeue", "leave", "resume")
    )
    if waits and number % 8 == 0:
        limit_labels = {"partition": "batch", "kind": "shared"}
        yield "healthd_fleet_limit_drain_waiting", 1, limit_labels
        yield "healthd_fleet_limit_nodes_drained", 5, limit_labels
        yield "healthd_fleet_limit_nodes_allowed", 5, limit_labels
    began = at - (at + number * 7) % 300
    yield "healthd_round_started_timestamp_seconds", began, {}
    yield "healthd_round_interval_seconds", 300, {}
    yield "healthd_source_up", float(node != "gpu-023" or hour < 16), {"source": "kernel_log"}
    yield "healthd_slurm_problem", 0, {}
    yield "healthd_config_last_reload_successful", float(node != "gpu-047"), {}
    yield "healthd_paused", float(node == "gpu-002"), {}
    yield "healthd_stream_lines_waiting", 0, {}
    if number in (6, 7, 30):  # two nodes of one gang, and the node that the second board shows
        slow = 11 <= hour < 13.5 and number != 30
        yield "healthd_failslow_jobs", 1, {}
        yield "healthd_failslow_slow_jobs", float(slow or (number == 30 and hour >= 23)), {}
        yield "healthd_failslow_worst_slowdown", 0.31 if slow else 0.14 if number == 30 and hour >= 23 else 0.0, {}
        lost = max(0.0, min(hour, 13.5) - 11) * 3600 * 8 * 0.24
        yield "healthd_failslow_lost_seconds_total", lost, {"source": "client"}
        yield "healthd_failslow_dropped_total", max(0.0, hour - 16) * 40, {"reason": "strangers"}
        yield "healthd_failslow_sampling_cpu_ratio", 0.0006 + 0.0001 * math.sin(hour), {}
    yield from _repair_metrics(node, hour, [fault.code for fault in drains])
    yield "healthd_validation_results", 8, {"test": "gemm_bf16", "verdict": "ok"}
    yield "healthd_validation_results", float(7 + (number != 17)), {"test": "pcie_h2d", "verdict": "ok"}
    if number == 17:
        yield "healthd_validation_results", 1, {"test": "pcie_h2d", "verdict": "slow"}
    if node == SHOWN_NODE:
        yield from _gpu_metrics(at, hour)


def _repair_metrics(node: str, hour: float, codes: Sequence[str]) -> Iterator[Metric]:
    """Yield the metrics of a node's repair. `codes` are the faults that drain the node."""
    failed = GIVEN_UP.get(node)
    has_failed = failed is not None and failed[0] <= hour < failed[1]
    yield "healthd_repair_given_up", float(has_failed), {}
    stages = [repair for repair in REPAIRS if repair[0] == node and repair[3] <= hour < repair[4]]
    for _, step, stage, began, _, deadline in stages:
        labels = {"step": step, "stage": stage}
        yield "healthd_repair_stage_begun_timestamp_seconds", BEGIN + began * 3600, labels
        if deadline:
            yield "healthd_repair_stage_deadline_timestamp_seconds", BEGIN + deadline * 3600, labels
    if codes:
        later = "person" if has_failed or codes[0].startswith("mount/") else "reboot"
        is_first = codes[0].startswith("gpu_row_remap/") and hour < 14.9
        yield "healthd_repair_step", 1, {"step": stages[0][1] if stages else "gpu_reset" if is_first else later}


def _gpu_metrics(at: int, hour: float) -> Iterator[Metric]:
    """Yield the metrics that only the board of one node shows."""
    yield "healthd_gpus", 8, {}
    for gpu, bus in enumerate(PCI):
        pci = {"pci": f"0000:{bus}:00.0"}
        about = {"gpu": str(gpu), "UUID": f"GPU-{gpu:08d}-6f1c-4a52-9d0e-3b7a5c{bus}0000"}
        yield (
            "healthd_gpu_info",
            1,
            {**about, "pci_bus_id": f"00000000:{bus.upper()}:00.0", "modelName": "NVIDIA H100 80GB HBM3", **pci},
        )
        wave = math.sin(hour * 1.7 + gpu) * 3 + math.sin(hour * 9.1 + 2 * gpu) * 2
        hot = 18 if bus == "52" and 6 <= hour < 8.5 else 0
        drained = hour >= 14.1
        yield "healthd_gpu_temperature_celsius", (34 if drained else 58 + gpu) + wave / (4 if drained else 1) + hot, pci
        slowed = max(0.0, min(hour, 8.5) - 6) * 3600 * 0.4 if bus == "52" else 0.0
        yield "healthd_gpu_clock_slowed_seconds_total", slowed, pci
        uncorrected = 4.0 if bus == "c3" and hour >= 13.9 else 0.0
        yield "healthd_gpu_ecc_volatile_errors_total", uncorrected, {**pci, "location": "dram", "error": "uncorrected"}
        crc = max(0.0, hour - 3) * 700 if bus == "d1" else 0.0
        yield "healthd_gpu_nvlink_errors_total", crc, {**pci, "error": "crc_flit", "links": "3ffff"}
        yield "healthd_gpu_pcie_replays_total", hour * 30 if bus == "43" else 0.0, pci
        yield "healthd_pcie_aer_correctable_total", hour * 11 if bus == "43" else 0.0, pci
    for port in ("mlx5_0/1", "mlx5_3/1"):
        errors = max(0.0, hour - 10) * 50 if port == "mlx5_3/1" else 0.0
        yield "healthd_ib_errors_total", errors, {"port": port, "counter": "port_rcv_errors"}
        yield "healthd_ib_link_downed_total", 1.0 if errors else 0.0, {"port": port}
    for mountpoint, free in (
        ("/", 0.62),
        ("/var", 0.41 - hour * 0.004),
        ("/scratch", 0.8 - 0.3 * abs(math.sin(hour / 3))),
    ):
        yield "healthd_disk_space_available_ratio", free, {"mountpoint": mountpoint}
    for check, name, seconds in (
        ("gpu_access", "", 0.21),
        ("ipmi_sel", "", 1.6),
        ("gpu_nvlink", "", 0.4),
        ("mount", "/data", 30.0 if 18 <= hour < 19.1 else 0.002),
        ("services", "", 0.05),
        ("exec", "fans", 0.3),
    ):
        yield "healthd_check_duration_seconds", seconds, {"check": check, "name": name}
        yield "healthd_check_up", float(check != "exec"), {"check": check, "name": name}
    yield "healthd_process_resident_memory_bytes", 34e6, {"process": "daemon"}
    yield "healthd_process_resident_memory_bytes", 25e6 + 1e6 * math.sin(hour), {"process": "worker"}


# --- Prometheus


@contextlib.contextmanager
def prometheus(lines: Iterator[str], folder: Path, port: int) -> Iterator[str]:
    """Start a Prometheus with this history and yield its address."""
    with open(folder / "history.txt", "w") as file:
        file.writelines(lines)
    blocks = ("promtool", "tsdb", "create-blocks-from", "openmetrics", "--quiet", str(folder / "history.txt"))
    subprocess.run((*blocks, str(folder / "data")), check=True, capture_output=True, timeout=600)
    (folder / "prometheus.yml").write_text("{}")
    argv = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    argv += [f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.retention.time=10y"]
    with open(folder / "prometheus.log", "wb") as log:
        server = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while not _is_ready(url) and time.monotonic() < deadline and server.poll() is None:
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def _is_ready(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def run_query(
    url: str, target: Mapping[str, Any], begin: int, end: int, variables: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Run the query of a panel and return its result: an instant query at `end`, or a range query. Raises OSError."""
    query = target["expr"]
    for name, value in variables.items():
        query = query.replace(f"${name}", value)
    if target["instant"]:
        path, times = "query", {"time": str(end)}
    else:
        path, times = "query_range", {"start": str(begin), "end": str(end), "step": str(RESOLUTION)}
    with urllib.request.urlopen(
        f"{url}/api/v1/{path}?{urllib.parse.urlencode({'query': query, **times})}", timeout=60
    ) as response:
        result: list[dict[str, Any]] = json.loads(response.read())["data"]["result"]
    return result


def panels(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((BOARDS / f"healthd-{name}.json").read_text("utf-8"))["panels"]
    return found


VARIABLES = {"cluster": ".*", "job": "healthd", "instance": f"{SHOWN_NODE}:9478", "node": SHOWN_NODE}


# --- drawing

INK, DIM, PAPER, CARD, LINE = "#d8d9da", "#8e9296", "#111217", "#181b1f", "#2a2d33"
COLOURS = {
    "green": "#73bf69",
    "yellow": "#f2cc0c",
    "orange": "#ff9830",
    "red": "#f2495c",
    "purple": "#b877d9",
    "text": INK,
}
CYCLE = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#e0b400")
COLUMN, ROW = 0.55, 0.30  # inches of one of the 24 columns, and of one row


def draw(board: Sequence[Mapping[str, Any]], run_target: Any) -> Any:
    """Return a figure with each panel at its position on the board. `run_target` returns the result of one target."""
    from matplotlib.figure import Figure

    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board)
    figure = Figure(figsize=(24 * COLUMN, height * ROW), facecolor=PAPER, dpi=100)
    for panel in board:
        position = panel["gridPos"]
        left, bottom = position["x"] / 24, 1 - (position["y"] + position["h"]) / height
        gap_x, gap_y = 0.06 / (24 * COLUMN), 0.06 / (height * ROW)
        box = (left + gap_x, bottom + gap_y, position["w"] / 24 - 2 * gap_x, position["h"] / height - 2 * gap_y)
        card = figure.add_axes(box, facecolor=CARD)
        card.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(0, 1))
        for spine in card.spines.values():
            spine.set_color(LINE)
        inches = position["h"] * ROW
        card.text(
            0.09 / (position["w"] * COLUMN),
            1 - 0.17 / inches,
            panel["title"],
            color=INK,
            fontsize=8.5,
            weight="bold",
            va="center",
        )
        results = [(target, run_target(target)) for target in panel["targets"]]
        KINDS[panel["type"]](figure, card, box, panel, results)
    return figure


def _legend(target: Mapping[str, Any], series: Mapping[str, Any]) -> str:
    text = str(target["legendFormat"])
    for label, value in series["metric"].items():
        text = text.replace("{{" + label + "}}", value)
    return re.sub(r"{{\w+}}", "", text).strip()  # a label that the series does not have becomes empty


def _stat(figure: Any, card: Any, box: Any, panel: Any, answers: Any) -> None:
    target, result = answers[0]
    if not result:
        card.text(0.5, 0.42, "none", color=DIM, fontsize=15, ha="center", va="center")
        return
    value = float(result[0]["value"][1])
    text = _legend(target, result[0]) or _formatted(value, panel["fieldConfig"]["defaults"]["unit"])
    colour = INK
    for step in panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", ()):
        if value >= (step["value"] or 0):
            colour = COLOURS[step["color"]]
    colour = _fixed_colours(panel).get(text, colour)
    card.text(0.5, 0.42, text, color=colour, fontsize=21, ha="center", va="center", weight="bold")


def _formatted(value: float, unit: str) -> str:
    if math.isnan(value):
        return "not known"
    if unit == "s":
        return (
            f"{value / 3600:.1f} h" if value >= 7200 else f"{value / 60:.1f} min" if value >= 120 else f"{value:.3g} s"
        )
    if unit == "bytes":
        return f"{value / 2**20:.0f} MiB"
    if unit == "percentunit":
        return f"{value:.0%}"
    return f"{value:.3g}" if value != int(value) else f"{value:,.0f}"


def _fixed_colours(panel: Any) -> dict[str, str]:
    """Return the fixed colours of series by name."""
    overrides = panel["fieldConfig"]["overrides"]
    return {
        override["matcher"]["options"]: COLOURS[override["properties"][0]["value"]["fixedColor"]]
        for override in overrides
    }


def _table(figure: Any, card: Any, box: Any, panel: Any, answers: Any) -> None:
    rename = panel["transformations"][1]["options"]["renameByName"]
    mappings = [
        mapping for mapping in panel["fieldConfig"]["defaults"].get("mappings", ()) if mapping["type"] == "value"
    ]
    value_texts = mappings[0]["options"] if mappings else {}
    unit = panel["fieldConfig"]["defaults"]["unit"]
    rows = []
    for series in answers[0][1]:
        value = series["value"][1]
        cell_text = value_texts.get(value, {}).get("text") or _formatted(float(value), unit)
        rows.append([cell_text if label == "Value" else series["metric"].get(label, "") for label in rename])
    headings = list(rename.values())
    widths = [max(len(str(row[at])) for row in (headings, *rows)) + 2 for at in range(len(headings))]
    inches = panel["gridPos"]["h"] * ROW
    max_rows = int((inches - 0.55) / 0.2)
    left = 0.11 / (panel["gridPos"]["w"] * COLUMN)
    for line, row in enumerate([headings, *rows[:max_rows]]):
        x = left
        for cell, width in zip(row, widths, strict=True):
            colour = (
                next((COLOURS[word["color"]] for word in value_texts.values() if word["text"] == cell), INK)
                if line
                else "#6e9fff"
            )
            card.text(
                x,
                1 - (0.42 + 0.2 * line) / inches,
                cell,
                color=colour,
                fontsize=7.5,
                va="center",
                family="monospace",
                clip_on=True,
            )
            x += width * 0.068 / (panel["gridPos"]["w"] * COLUMN)
    if not rows:
        card.text(0.5, 0.45, "none", color=DIM, fontsize=11, ha="center", va="center")


def _plot(figure: Any, box: Any, panel: Any, legend: int) -> Any:
    """Return the axes within a card, with room for `legend` lines of legend."""
    left, bottom, width, height = box
    inches_wide, inches = panel["gridPos"]["w"] * COLUMN, panel["gridPos"]["h"] * ROW
    room = (0.45 / inches_wide, (0.27 + 0.17 * legend) / inches)
    axes = figure.add_axes(
        (
            left + room[0] * width,
            bottom + room[1] * height,
            width * (0.97 - room[0]),
            height * (1 - room[1] - 0.36 / inches),
        ),
        facecolor=CARD,
    )
    axes.tick_params(colors=DIM, labelsize=6.5, length=2)
    axes.grid(color=LINE, linewidth=0.5)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set(xlim=(0, HOURS), xticks=range(0, HOURS + 1, 4))
    axes.set_xticklabels([f"{hour:02d}:00" for hour in range(0, HOURS + 1, 4)])
    return axes


def _timeseries(figure: Any, card: Any, box: Any, panel: Any, answers: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    lines = [
        (_legend(target, series) or panel["title"], series["values"]) for target, result in answers for series in result
    ]
    fixed = _fixed_colours(panel)
    lines.sort(key=lambda line: (list(fixed).index(line[0]) if line[0] in fixed else 99, line[0]))
    legend_lines = lines[:8]
    axes = _plot(figure, box, panel, 1 + (len(legend_lines) > 4))
    if not lines:
        card.text(0.5, 0.45, "none", color=DIM, fontsize=11, ha="center", va="center")
    colours = [fixed.get(name, CYCLE[at % len(CYCLE)]) for at, (name, _) in enumerate(lines)]
    if panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal":
        hours = sorted({at for _, values in lines for at, _ in values})
        stacks = [[float(dict(values).get(at, 0)) for at in hours] for _, values in lines]
        axes.stackplot([(at - BEGIN) / 3600 for at in hours], stacks, colors=colours, alpha=0.65, linewidth=0)
    else:
        for (_, values), colour in zip(lines, colours, strict=True):
            for part in _split_at_gaps(values):
                hours = [(at - BEGIN) / 3600 for at, _ in part]
                style = ".-" if len(part) < 3 else "-"
                axes.plot(hours, [float(value) for _, value in part], style, color=colour, linewidth=1)
    top = max((float(value) for _, values in lines for _, value in values), default=1.0)
    axes.set_ylim(
        0, None if panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal" else max(top, 1e-9) * 1.12
    )
    unit = panel["fieldConfig"]["defaults"]["unit"]
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _formatted(value, unit)))
    inches_wide, inches = panel["gridPos"]["w"] * COLUMN, panel["gridPos"]["h"] * ROW
    for at, ((name, _), colour) in enumerate(zip(legend_lines, colours, strict=False)):
        x, y = 0.08 + (at % 4) * (inches_wide - 0.1) / 4, 0.28 - 0.16 * (at // 4) if len(legend_lines) > 4 else 0.13
        room = int((inches_wide - 0.1) / 4 / 0.058) - 3
        card.text(x / inches_wide, y / inches, "■ ", color=colour, fontsize=6.5, va="center")
        card.text((x + 0.12) / inches_wide, y / inches, name[:room], color=INK, fontsize=6.5, va="center")


def _split_at_gaps(values: Sequence[tuple[int, str]]) -> list[list[tuple[int, str]]]:
    """Split the samples at gaps."""
    parts: list[list[tuple[int, str]]] = []
    for at, value in values:
        if not parts or at - parts[-1][-1][0] > RESOLUTION:
            parts.append([])
        parts[-1].append((at, value))
    return parts


def _timeline(figure: Any, card: Any, box: Any, panel: Any, answers: Any) -> None:
    value_texts = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]
    target, result = answers[0]
    axes = _plot(figure, box, panel, 0)
    for at, series in enumerate(result):
        for when, value in series["values"]:
            axes.barh(
                at,
                300 / 3600 * 1.05,
                left=(when - BEGIN) / 3600,
                height=0.5,
                color=COLOURS[value_texts[value]["color"]],
            )
        axes.text(0.1, at + 0.42, _legend(target, series), color=INK, fontsize=7, va="center")
    axes.set(yticks=[], ylim=(-0.5, max(len(result), 1) - 0.2))


KINDS = {"stat": _stat, "table": _table, "timeseries": _timeseries, "state-timeline": _timeline}


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, prometheus(history(), Path(folder), port) as url:
        for name in ("fleet", "node"):
            figure = draw(panels(name), lambda target: run_query(url, target, BEGIN, END, VARIABLES))
            path = ROOT / f"docs/board-{name}.png"
            figure.savefig(path, facecolor=PAPER, metadata={"Software": None})
            print(f"docs/{path.name}: written")


if __name__ == "__main__":
    main()
