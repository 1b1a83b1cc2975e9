"""Parser for PyTorch flight recorder dumps (plain data). All functions are pure.

Format: torch/csrc/distributed/c10d/FlightRecorder.hpp, versions 1.x to 2.10 (`version` in the dump). `entries` is a
single ring buffer for all groups, in the order of entry. `pg_config` lists this rank's groups. `pg_status` contains
each group's last sequence numbers; its key is the group's number on this rank (`pg_id`). A dump of active operations
has no completed entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from healthd.common.errors import HealthdError
from healthd.common.text import is_decimal, regex
from healthd.fleet.collectives.rank_view import Dtypes, Lane, Membership, Numel, Operation, Pair, Progress, RankView

MAX_RANKS = 1 << 17
MAX_MEMBERS = 1 << 22  # maximum for all groups in a dump together
MAX_ELEMENTS = 1 << 63
MAX_WAITING, MAX_DONE = 32, 4  # number of operations to keep for each lane, to find differences between ranks
_POINT_TO_POINT = regex(r"(?:send (\d{1,7})->(\d{1,7})|recv (\d{1,7})<-(\d{1,7}))")
_DONE = "completed"

Entry = Mapping[str, Any]


class InvalidDump(HealthdError):
    """The data is not a dump. The message continues a sentence that begins with the file's name."""


class _ParsedEntry(NamedTuple):
    """A parsed entry.

    Attributes:
        pair: set only for a send or receive.
        is_batch: True for "coalesced", a batch of sends and receives.
    """

    entry: Entry
    group: str
    name: str
    sequence: int
    order: int
    pair: Pair | None
    is_batch: bool


def parse_dump(dump: Any, source: str = "", texts: dict[str, tuple[int, ...] | None] | None = None) -> RankView:
    """Return the view of the rank that wrote this dump. The rank is usually not recorded (-1). Raises InvalidDump.

    Args:
        texts: cache for parsed lists of ranks, because all dumps in a folder contain the same lists.
    """
    parts = dump if isinstance(dump, Mapping) else {"entries": dump}
    entries = parts.get("entries", [])
    if not {"entries", "pg_config", "pg_status"} & set(parts) or not isinstance(entries, list):
        raise InvalidDump("has no flight recorder entries")
    try:
        return _build_view(parts, entries, source, {} if texts is None else texts)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
        raise InvalidDump("has invalid flight recorder entries") from None


def possible_ranks(view: RankView) -> frozenset[int] | None:
    """Return all ranks in this dump's groups, or None if the dump names no groups.

    One of these ranks wrote the dump.
    """
    rank_sets = {group.ranks for group in view.groups.values() if group.ranks}
    return frozenset.intersection(*map(frozenset, rank_sets)) if rank_sets else None


def _build_view(parts: Entry, entries: list[Entry], source: str, texts: dict[str, tuple[int, ...] | None]) -> RankView:
    own = parts.get("rank")
    rank = own if type(own) is int and 0 <= own < MAX_RANKS else -1
    result = RankView(rank, source, version=str(parts.get("version", ""))[:20])
    result.groups = _groups(parts.get("pg_config"), texts)
    parsed_entries = [_parse_entry(entry, at) for at, entry in enumerate(entries)]
    result.with_pairs = {parsed.group for parsed in parsed_entries if parsed.pair or parsed.is_batch}
    for parsed in parsed_entries:
        if parsed.group not in result.groups:
            result.groups[parsed.group] = Membership(parsed.group, _group_name(parsed.entry)[1], None)
    result.progress = _progress(parts.get("pg_status"), parsed_entries, result.groups)
    _collectives(result, parsed_entries)
    _pairs(result, parsed_entries)
    times = [_count(parsed.entry.get("time_created_ns") or 0) for parsed in parsed_entries]
    result.first_ns, result.last_ns = min(times, default=0), max(times, default=0)
    any_done = any(parsed.entry.get("state") == _DONE for parsed in parsed_entries)
    first = parsed_entries[0].order if parsed_entries else 0
    holes = any(after.order - before.order != 1 for before, after in pairwise(parsed_entries))
    result.has_only_pending = not any_done and (holes or first > 0 or not parsed_entries)
    result.since_ns = result.first_ns if first > 0 and not result.has_only_pending else 0
    return result


def _parse_entry(entry: Entry, index: int) -> _ParsedEntry:
    group, _ = _group_name(entry)
    full_name = str(entry["profiling_name"])
    name = full_name.partition(":")[2] or full_name
    match = _POINT_TO_POINT.fullmatch(name)
    pair = None
    if match is not None:
        sender, receiver, receiver_of_send, receiver_of_recv = match.groups()
        pair = (
            Pair(group, int(sender), int(receiver))
            if sender
            else Pair(group, int(receiver_of_recv), int(receiver_of_send))
        )
    is_batch = pair is None and bool(entry.get("is_p2p"))
    number = entry.get("p2p_seq_id" if pair or is_batch else "collective_seq_id", entry.get("seq_id"))  # 1.x: seq_id
    kind = name.partition(" ")[0]
    return _ParsedEntry(entry, group, kind, _count(number), _count(entry.get("record_id", index)), pair, is_batch)


def _group_name(entry: Entry) -> tuple[str, str]:
    """Return the name and description of an entry's group. The first PyTorch versions have only a name or a number."""
    group_field = entry.get("process_group", entry.get("pg_name", entry.get("pg_id", "")))
    if isinstance(group_field, (tuple, list)):
        return str(group_field[0]), str(group_field[1]) if len(group_field) > 1 else ""
    return str(group_field), ""


def _groups(config: Any, texts: dict[str, tuple[int, ...] | None]) -> dict[str, Membership]:
    if not isinstance(config, Mapping):
        return {}
    found: dict[str, Membership] = {}
    members = 0
    for key, about in config.items():
        if isinstance(about, Mapping):
            name = str(about.get("name", key))
            found[name] = Membership(name, str(about.get("desc", "")), _ranks(about.get("ranks"), texts))
            members += len(found[name].ranks or ())
            if members > MAX_MEMBERS:
                raise ValueError(members)
    return found


def _ranks(recorded: Any, texts: dict[str, tuple[int, ...] | None]) -> tuple[int, ...] | None:
    """Parse ranks from "[0, 1, 2]" or from a list."""
    if isinstance(recorded, (list, tuple)):
        if len(recorded) > MAX_RANKS or any(_count(rank) >= MAX_RANKS for rank in recorded):
            raise ValueError(len(recorded))
        return tuple(recorded) or None
    text = str(recorded)
    if text not in texts:
        parts = text.strip("[] ").split(",")
        ranks = [int(word) for word in parts if is_decimal(word.strip()) and len(word) < 9]
        texts[text] = tuple(ranks) if ranks and len(ranks) == len(parts) and max(ranks) < MAX_RANKS else None
    return texts[text]


def _progress(status: Any, read: Iterable[_ParsedEntry], groups: Mapping[str, Membership]) -> dict[str, Progress]:
    """Return the progress of each group whose number is known.

    A group's number is taken from one of its entries. Without such an entry, it is taken from the group's position,
    because both lists are in the order in which this rank created its groups. This requires that there are as many
    numbers as groups and that no entry contradicts the order.
    """
    if not isinstance(status, Mapping):
        return {}
    progress_by_number = {
        str(number): _group_progress(group_status)
        for number, group_status in status.items()
        if isinstance(group_status, Mapping)
    }
    names = {str(entry.entry["pg_id"]): entry.group for entry in read if "pg_id" in entry.entry}
    if len(progress_by_number) == len(groups) and all(map(is_decimal, (*progress_by_number, *groups))):
        placed = dict(zip(sorted(progress_by_number, key=int), sorted(groups, key=int), strict=True))
        if all(placed.get(number) == name for number, name in names.items()):
            names = placed
    return {names[number]: last for number, last in progress_by_number.items() if number in names and last}


def _group_progress(group_status: Entry) -> Progress | None:
    entered, started, done = (
        _whole(int(group_status.get(f"last_{stage}_collective", -1))) for stage in ("enqueued", "started", "completed")
    )
    if done > entered:  # some versions left the values uninitialised
        return None
    return Progress(entered, done, started if done <= started <= entered else -1)


def _collectives(result: RankView, read: Iterable[_ParsedEntry]) -> None:
    """Add the lanes for collectives.

    A coalesced collective has several entries with one number, and only the last entry is marked as completed.
    """
    lanes: dict[str, dict[int, tuple[_ParsedEntry, bool]]] = {}
    for entry in read:
        if entry.pair is None and not entry.is_batch:
            lane = lanes.setdefault(entry.group, {})
            _, before = lane.get(entry.sequence, (entry, False))
            lane[entry.sequence] = entry, before or entry.entry.get("state") == _DONE
    for group, lane in lanes.items():
        progress = result.progress.get(group) if group not in result.with_pairs else None
        last_done = progress.done if progress else -1
        waiting = sorted(sequence for sequence, (_, done) in lane.items() if not done and sequence > last_done)
        done_numbers = sorted(set(lane).difference(waiting))
        kept_operations = {
            sequence: _operation(lane[sequence][0])
            for sequence in (*done_numbers[-MAX_DONE:], *waiting[:MAX_WAITING], *waiting[-1:])
        }
        entered = max(*lane, progress.entered) if progress else max(lane)
        first = kept_operations[waiting[0]] if waiting else None
        if first is not None and progress and progress.started >= first.sequence:
            first = first._replace(started=True)
        result.lanes[group] = Lane(entered, first, kept_operations)


def _pairs(result: RankView, read: Iterable[_ParsedEntry]) -> None:
    """Add the pending sends and receives.

    A send in a batch (batch_isend_irecv) has the batch's number. Only the batch is ever marked as completed, not the
    send.
    """
    batches: dict[tuple[str, int], bool] = {}
    batch_sizes: dict[tuple[str, int], int] = {}
    for entry in read:
        key = entry.group, entry.sequence
        if entry.is_batch:
            batches[key] = entry.entry.get("state") == _DONE
        elif entry.pair:
            batch_sizes[key] = batch_sizes.get(key, 0) + 1
    for entry in read:
        if entry.pair is None:
            continue
        key = entry.group, entry.sequence
        done = entry.entry.get("state") == _DONE or batches.get(key, False)
        if key not in batches and batch_sizes[key] > 1 and entry.group in result.progress:
            done = entry.sequence <= result.progress[entry.group].done
        if not done:
            result.pairs.setdefault(entry.pair, []).append(_operation(entry))


def _operation(parsed: _ParsedEntry) -> Operation:
    entry = parsed.entry
    numel: Numel = ()
    dtypes: Dtypes = ()
    if "input_sizes" in entry and "output_sizes" in entry:
        numel = (_numel(entry["input_sizes"]), _numel(entry["output_sizes"]))
    if "input_dtypes" in entry and "output_dtypes" in entry:
        dtypes = (_type_names(entry["input_dtypes"]), _type_names(entry["output_dtypes"]))
    started = entry.get("state") == "started" or bool(entry.get("time_discovered_started_ns"))
    created = _count(entry.get("time_created_ns") or 0)
    return Operation(parsed.sequence, parsed.order, parsed.name, numel, dtypes, created, started)


def _numel(sizes: Any) -> int:
    """Return the number of elements.

    Raises ValueError if a tensor cannot have that many, because the text would be too long.
    """
    total = 0
    for size in sizes:
        elements = 1
        for length in size:
            elements *= _count(length)
            if elements >= MAX_ELEMENTS:
                raise ValueError(length)
        total += elements
    return _count(total)


def _type_names(dtypes: Any) -> tuple[str, ...]:
    return tuple(sorted({str(dtype) for dtype in dtypes}))


def _count(value: Any) -> int:
    if _whole(value) < 0:
        raise ValueError(value)
    return int(value)


def _whole(value: Any) -> int:
    if not isinstance(value, int) or abs(value) >= 1 << 63:
        raise ValueError(value)
    return value
