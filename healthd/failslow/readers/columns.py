"""Determines the meaning of a table's columns, from the user's options or from well-known names.

All functions are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from healthd.common.text import printable, regex

# Names that training loops and their loggers use, without units.
_VALUES = (
    *("iteration_time", "iter_time", "iteration_duration", "step_time", "step_duration", "batch_time"),
    *("train_step_time", "time_per_iteration", "time_per_step", "elapsed_time_per_iteration", "duration", "value"),
)
# Other names for times. They are used only if no column has a name above, because a column with such a name may also
# contain the time since the start.
_PLAIN_VALUES = ("seconds", "secs", "sec", "milliseconds", "millis", "ms")
_COUNTERS = ("step", "iteration", "iter", "batch")  # these names mean a time only together with a unit: step_ms
_UNIT = regex(
    r"(?i)[_ .(\[-]{1,8}(seconds|secs|sec|s|milliseconds|millis|ms|microseconds|us|nanoseconds|ns|norm)[)\]]?$"
)
_SERIES = (
    *(
        "rank",
        "global_rank",
        "rank_id",
        "procid",
        "slurm_procid",
        "process_index",
        "worker",
        "worker_id",
        "worker_name",
    ),
    *("worker_rank", "replica", "replica_id", "task", "task_id", "proc", "process", "process_id", "series"),
)
_GPUS, _NODES = ("gpu", "gpu_id", "device", "local_rank"), ("node", "node_name", "hostname", "host")
_PARTS = {
    "busy": ("busy", "busy_time", "compute", "compute_time"),
    "wait": ("wait", "wait_time"),
    "transfer": ("transfer", "transfer_time"),
}
_MAX_NAMED = 12


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of a table's columns, "" or () if there are none.

    If several columns are given for the series, group or regime, they are combined.
    """

    series: tuple[str, ...] = ()
    value: str = ""
    index: str = ""
    group: tuple[str, ...] = ()
    node: str = ""
    regime: tuple[str, ...] = ()
    busy: str = ""
    wait: str = ""
    transfer: str = ""

    def parts(self) -> dict[str, str]:
        """Return the names of the columns with busy, wait and transfer times that exist."""
        return {part: name for part in _PARTS if (name := getattr(self, part))}

    def used(self) -> tuple[str, ...]:
        """Return all columns that have a role, each once."""
        single = (self.value, self.index, self.node, self.busy, self.wait, self.transfer)
        return tuple(dict.fromkeys(name for name in (*self.series, *self.group, *self.regime, *single) if name))


def missing_column(requested: Columns, names: Sequence[str]) -> str:
    """Return a sentence about the first requested column that is missing or duplicate, or ""."""
    for name in requested.used():
        if name not in names:
            return f'has no column "{printable(name)}"; columns: {join_names(names)}'
        if names.count(name) > 1:
            return f'has {names.count(name)} columns "{printable(name)}"'
    return ""


def choose_columns(
    requested: Columns, names: Sequence[str], is_numeric: Callable[[str], bool]
) -> tuple[Columns, list[str], str]:
    """Return the columns for each role: the requested columns, and for all other roles columns with well-known names.

    Also return texts like "value step_time" for the columns that were found by name, and a sentence without a full stop
    if it is ambiguous which column has the values, otherwise "".

    Args:
        names: columns of the table.
        is_numeric: returns True if the first cells of a column are numbers.
    """
    taken: list[str] = []
    free = [name for name in names if name and name not in requested.used() and names.count(name) == 1]
    found = requested
    if not found.value:
        likely = [name for name in free if _is_time(name) and is_numeric(name)]
        plain = [name for name in free if name.strip().lower() in _PLAIN_VALUES and is_numeric(name)]
        other_numbers = [name for name in free if is_numeric(name) and not _has_other_role(name)]
        best = likely or plain or [name for name in free if _is_time(name)][:1] or other_numbers
        if len(best) != 1:
            if best:
                return requested, [], f"which of {join_names(best)} contains the times? Use --value"
            if any(map(is_numeric, free)):
                problem = f"no numeric column is known to contain iteration times; columns: {join_names(names)}"
                return (
                    requested,
                    [],
                    f"{problem} (use --value C; for times of operations use `healthd failslow period`)",
                )
            return requested, [], f"no column is numeric; columns: {join_names(names)}"
        found = replace(found, value=best[0])
        taken.append(f"value {best[0]}")
        free.remove(best[0])
    if not found.series and (series := _series_columns(free)):
        found = replace(found, series=series)
        taken.append(f"series {', '.join(series)}")
        free = [name for name in free if name not in series]
    nodes = [name for name in free if name.lower() in _NODES]
    if not found.node and len(nodes) == 1:
        found = replace(found, node=nodes[0])
        taken.append(f"node {nodes[0]}")
    for part, known_names in _PARTS.items():
        candidates = [name for name in free if _bare_name(name) in known_names and is_numeric(name)]
        if not getattr(found, part) and len(candidates) == 1:
            found = _with_part(found, part, candidates[0])
            taken.append(f"{part} {candidates[0]}")
    return found, taken, ""


def _with_part(columns: Columns, part: str, name: str) -> Columns:
    if part == "busy":
        return replace(columns, busy=name)
    return replace(columns, wait=name) if part == "wait" else replace(columns, transfer=name)


def _series_columns(free: Sequence[str]) -> tuple[str, ...]:
    """Return the column that names a rank or worker. If there is none, return a GPU with its node, or else a node."""
    by_name = {name.lower(): name for name in free}
    for name in (*_SERIES,):
        if name in by_name:
            return (by_name[name],)
    node = tuple(by_name[name] for name in _NODES if name in by_name)[:1]
    gpu = tuple(by_name[name] for name in _GPUS if name in by_name)[:1]
    return node + gpu


def _is_time(name: str) -> bool:
    """Return True if the name means the time of an iteration. A name such as "iteration" counts only with a unit."""
    bare = _bare_name(name)
    if bare in _COUNTERS:
        return _UNIT.search(name.strip()) is not None
    return bare in _VALUES


def _has_other_role(name: str) -> bool:
    """Return True if the name means a series, a node, a part of the time or an index.

    Such a column cannot be the value.
    """
    index_names = ("step", "iteration", "iter", "epoch", "time", "timestamp", "index", "batch", "id")
    known_names = (
        *_SERIES,
        *_GPUS,
        *_NODES,
        *(part_name for part_names in _PARTS.values() for part_name in part_names),
        *index_names,
    )
    return _bare_name(name) in known_names or name.lower() in known_names


def _bare_name(name: str) -> str:
    """Return "step_time" for "Step_Time_ms" and "step time [s]"."""
    return _UNIT.sub("", name.strip()).lower().replace(" ", "_").replace("-", "_")


def join_names(names: Sequence[str], conjunction: str = "and") -> str:
    """Return "a, b and c". If there are many names, only the first are listed."""
    visible = [printable(name) for name in names if name]
    if not visible:
        return "none with a name"
    if len(visible) > _MAX_NAMED:
        return f"{', '.join(visible[:_MAX_NAMED])} and {len(visible) - _MAX_NAMED:,} more"
    return f"{', '.join(visible[:-1])} {conjunction} {visible[-1]}" if len(visible) > 1 else visible[0]
