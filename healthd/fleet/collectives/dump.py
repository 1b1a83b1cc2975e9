"""Parser of dumps of PyTorch's flight recorder (plain data). Pure.

The format: torch/csrc/distributed/c10d/FlightRecorder.hpp, versions 1.x to 2.10 (`version` in the dump). `entries`: one
ring buffer over all groups, in the order in which they were entered. `pg_config`: the groups of this rank. `pg_status`:
the last sequence numbers, by the number of a group on this rank (`pg_id`). A dump of active operations has no completed
entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from healthd.common.errors import HealthdError
from healthd.common.text import is_decimal, regex
from healthd.fleet.collectives.rank_view import Dtypes, Lane, Membership, Numel, Operation, Pair, Progress, View

MOST_RANKS = 1 << 17
MOST_MEMBERS = 1 << 22  # over all groups of a dump
MOST_ELEMENTS = 1 << 63
MOST_WAITING, MOST_DONE = 32, 4  # operations kept per lane, to find differences between ranks
_POINT_TO_POINT = regex(r"(?:send (\d{1,7})->(\d{1,7})|recv (\d{1,7})<-(\d{1,7}))")
_DONE = "completed"

Entry = Mapping[str, Any]


class NoDump(HealthdError):
    """Plain data that is not a dump. The message follows the file's name."""


class _Read(NamedTuple):
    """A parsed entry. pair: of a send or a receive. is_batch: "coalesced", the batch that contains sends."""

    entry: Entry
    group: str
    name: str
    sequence: int
    order: int
    pair: Pair | None
    beside: bool


def view(dump: Any, source: str = "", texts: dict[str, tuple[int, ...] | None] | None = None) -> View:
    """Return the view of the rank that wrote this dump; the rank is usually not recorded: -1. Raises InvalidDump.

    texts: cache of parsed lists of ranks, which are the same in all dumps of a folder.
    """
    parts = dump if isinstance(dump, Mapping) else {"entries": dump}
    entries = parts.get("entries", [])
    if not {"entries", "pg_config", "pg_status"} & set(parts) or not isinstance(entries, list):
        raise NoDump("has no entries of a flight recorder")
    try:
        return _view(parts, entries, source, {} if texts is None else texts)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
        raise NoDump("has invalid entries of a flight recorder") from None


def ranks_possible(view: View) -> frozenset[int] | None:
    """Return the ranks that are in all groups of this dump, one of which wrote it. None: it names no groups."""
    told = {group.ranks for group in view.groups.values() if group.ranks}
    return frozenset.intersection(*map(frozenset, told)) if told else None


def _view(parts: Entry, entries: list[Entry], source: str, texts: dict[str, tuple[int, ...] | None]) -> View:
    own = parts.get("rank")
    rank = own if type(own) is int and 0 <= own < MOST_RANKS else -1
    seen = View(rank, source, version=str(parts.get("version", ""))[:20])
    seen.groups = _groups(parts.get("pg_config"), texts)
    read = [_read(entry, at) for at, entry in enumerate(entries)]
    seen.with_pairs = {one.group for one in read if one.pair or one.beside}
    for one in read:
        if one.group not in seen.groups:
            seen.groups[one.group] = Membership(one.group, _group(one.entry)[1], None)
    seen.progress = _progress(parts.get("pg_status"), read, seen.groups)
    _collectives(seen, read)
    _pairs(seen, read)
    times = [_count(one.entry.get("time_created_ns") or 0) for one in read]
    seen.first_ns, seen.last_ns = min(times, default=0), max(times, default=0)
    any_done = any(one.entry.get("state") == _DONE for one in read)
    first = read[0].order if read else 0
    holes = any(after.order - before.order != 1 for before, after in pairwise(read))
    seen.only_waiting = not any_done and (holes or first > 0 or not read)
    seen.since_ns = seen.first_ns if first > 0 and not seen.only_waiting else 0
    return seen


def _read(entry: Entry, at: int) -> _Read:
    group, _ = _group(entry)
    whole = str(entry["profiling_name"])
    name = whole.partition(":")[2] or whole
    told = _POINT_TO_POINT.fullmatch(name)
    pair = None
    if told is not None:
        sender, receiver, to, by = told.groups()
        pair = Pair(group, int(sender), int(receiver)) if sender else Pair(group, int(by), int(to))
    beside = pair is None and bool(entry.get("is_p2p"))
    number = entry.get("p2p_seq_id" if pair or beside else "collective_seq_id", entry.get("seq_id"))  # 1.x: seq_id
    kind = name.partition(" ")[0]
    return _Read(entry, group, kind, _count(number), _count(entry.get("record_id", at)), pair, beside)


def _group(entry: Entry) -> tuple[str, str]:
    """Return the name and description of an entry's group; the first versions have the name alone, or a number."""
    told = entry.get("process_group", entry.get("pg_name", entry.get("pg_id", "")))
    if isinstance(told, (tuple, list)):
        return str(told[0]), str(told[1]) if len(told) > 1 else ""
    return str(told), ""


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
            if members > MOST_MEMBERS:
                raise ValueError(members)
    return found


def _ranks(told: Any, texts: dict[str, tuple[int, ...] | None]) -> tuple[int, ...] | None:
    """Parse "[0, 1, 2]", or a list."""
    if isinstance(told, (list, tuple)):
        if len(told) > MOST_RANKS or any(_count(rank) >= MOST_RANKS for rank in told):
            raise ValueError(len(told))
        return tuple(told) or None
    text = str(told)
    if text not in texts:
        words = text.strip("[] ").split(",")
        ranks = [int(word) for word in words if is_decimal(word.strip()) and len(word) < 9]
        texts[text] = tuple(ranks) if ranks and len(ranks) == len(words) and max(ranks) < MOST_RANKS else None
    return texts[text]


def _progress(status: Any, read: Iterable[_Read], groups: Mapping[str, Membership]) -> dict[str, Progress]:
    """Return the progress of the groups whose number is known.

    The number comes from an entry, or from the position: both lists are in the order in which this rank created its
    groups, if there are as many numbers as groups and no entry contradicts.
    """
    if not isinstance(status, Mapping):
        return {}
    told = {str(number): _last(about) for number, about in status.items() if isinstance(about, Mapping)}
    names = {str(one.entry["pg_id"]): one.group for one in read if "pg_id" in one.entry}
    if len(told) == len(groups) and all(map(is_decimal, (*told, *groups))):
        placed = dict(zip(sorted(told, key=int), sorted(groups, key=int), strict=True))
        if all(placed.get(number) == name for number, name in names.items()):
            names = placed
    return {names[number]: last for number, last in told.items() if number in names and last}


def _last(about: Entry) -> Progress | None:
    entered, started, done = (
        _whole(int(about.get(f"last_{what}_collective", -1))) for what in ("enqueued", "started", "completed")
    )
    if done > entered:  # some versions left them uninitialised
        return None
    return Progress(entered, done, started if done <= started <= entered else -1)


def _collectives(seen: View, read: Iterable[_Read]) -> None:
    """Add the lanes. A coalesced collective has several entries with one number, of which only the last is marked
    completed.
    """
    lanes: dict[str, dict[int, tuple[_Read, bool]]] = {}
    for one in read:
        if one.pair is None and not one.beside:
            lane = lanes.setdefault(one.group, {})
            _, before = lane.get(one.sequence, (one, False))
            lane[one.sequence] = one, before or one.entry.get("state") == _DONE
    for group, lane in lanes.items():
        last = seen.progress.get(group) if group not in seen.with_pairs else None
        through = last.done if last else -1
        waiting = sorted(sequence for sequence, (_, done) in lane.items() if not done and sequence > through)
        others = sorted(set(lane).difference(waiting))
        kept = {
            sequence: _operation(lane[sequence][0])
            for sequence in (*others[-MOST_DONE:], *waiting[:MOST_WAITING], *waiting[-1:])
        }
        entered = max(*lane, last.entered) if last else max(lane)
        first = kept[waiting[0]] if waiting else None
        if first is not None and last and last.started >= first.sequence:
            first = first._replace(started=True)
        seen.lanes[group] = Lane(entered, first, kept)


def _pairs(seen: View, read: Iterable[_Read]) -> None:
    """Add the pending sends and receives.

    A send in a batch (batch_isend_irecv) has the number of its batch and is never marked completed; its batch is.
    """
    batches: dict[tuple[str, int], bool] = {}
    together: dict[tuple[str, int], int] = {}
    for one in read:
        key = one.group, one.sequence
        if one.beside:
            batches[key] = one.entry.get("state") == _DONE
        elif one.pair:
            together[key] = together.get(key, 0) + 1
    for one in read:
        if one.pair is None:
            continue
        key = one.group, one.sequence
        done = one.entry.get("state") == _DONE or batches.get(key, False)
        if key not in batches and together[key] > 1 and one.group in seen.progress:
            done = one.sequence <= seen.progress[one.group].done
        if not done:
            seen.pairs.setdefault(one.pair, []).append(_operation(one))


def _operation(one: _Read) -> Operation:
    entry = one.entry
    numel: Numel = ()
    dtypes: Dtypes = ()
    if "input_sizes" in entry and "output_sizes" in entry:
        numel = (_numel(entry["input_sizes"]), _numel(entry["output_sizes"]))
    if "input_dtypes" in entry and "output_dtypes" in entry:
        dtypes = (_kinds(entry["input_dtypes"]), _kinds(entry["output_dtypes"]))
    started = entry.get("state") == "started" or bool(entry.get("time_discovered_started_ns"))
    created = _count(entry.get("time_created_ns") or 0)
    return Operation(one.sequence, one.order, one.name, numel, dtypes, created, started)


def _numel(sizes: Any) -> int:
    """Return the number of elements. Raises ValueError for more than a tensor can have: such text would be too long."""
    total = 0
    for size in sizes:
        elements = 1
        for length in size:
            elements *= _count(length)
            if elements >= MOST_ELEMENTS:
                raise ValueError(length)
        total += elements
    return _count(total)


def _kinds(dtypes: Any) -> tuple[str, ...]:
    return tuple(sorted({str(one) for one in dtypes}))


def _count(value: Any) -> int:
    if _whole(value) < 0:
        raise ValueError(value)
    return int(value)


def _whole(value: Any) -> int:
    if not isinstance(value, int) or abs(value) >= 1 << 63:
        raise ValueError(value)
    return value
