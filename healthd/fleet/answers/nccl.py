"""Finds the rank that blocks a stuck job, using the ranks' records of their NCCL collectives. It needs no store.

The rule is in healthd/fleet/collectives/waits.py; files.py in that package describes the input formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from healthd.fleet.answers.document import Document, Unanswerable, head
from healthd.fleet.answers.nccl_transport import (
    failure_kind,
    failure_rows,
    hang_rows,
    hang_suspects,
)
from healthd.fleet.collectives import files
from healthd.fleet.collectives.rank_view import RankView, file_name
from healthd.fleet.collectives.waits import Blame, Group, Judgement, Stall, judge

MAX_NAMED = 5
MAX_WITHOUT_DUMP = 4096  # maximum number of ranks to list


def nccl(folder: str) -> Document:
    """Return the document for `healthd fleet nccl`. Raises Unanswerable if the folder has no rank's records.

    Keys:
        kind: missing, network, memory, hang, mismatch or none.
        suspects: the suspected ranks.
        groups: [{group, collective, entered, missing, ...}].
        failures: failed requests.
        hangs: ranks whose watchdog made no progress.
    """
    try:
        read = files.read(folder)
    except files.UnusableFolder as error:
        raise Unanswerable(str(error)) from None
    if not (read.views or read.failures or read.hangs):
        first_reason = next((f" ({file_name(file.file)} {file.reason})" for file in read.unread), "")
        raise Unanswerable(
            f"{file_name(folder)}: it has no dump of PyTorch's flight recorder, and no log with collectives or "
            f"failed requests by NCCL's watchdog or NCCL_DEBUG{first_reason}"
        )
    return build_document(judge(read.views), read)


def build_document(judgement: Judgement, read: files.Folder) -> Document:
    """Convert a judgement into the answer's document."""
    views = {view.rank: view for view in read.views}
    used_views = [view for rank, view in views.items() if rank not in judgement.unused_dumps]
    reasons = [_reason_row(blame, judgement, views) for blame in judgement.suspects]
    failures, hangs = failure_rows(read.failures), hang_rows(read.hangs)
    suspects = [blame.rank for blame in judgement.suspects]
    kind = judgement.kind
    if kind in ("none", "network"):  # the ranks' own records name no suspect
        hanging = hang_suspects(hangs, len({*views, *judgement.ranks_without_view, *(row["rank"] for row in hangs)}))
        kind = failure_kind(failures) or ("hang" if hanging or (hangs and kind == "none") else kind)
        suspects = hanging if kind == "hang" else suspects
    return {
        **head("nccl", None, None, {}, _notes(judgement, read)),
        "kind": kind,
        "suspects": suspects,
        "groups": [_group_row(stall, judgement.groups) for stall in judgement.stalls],
        "reasons": reasons,
        "failures": failures,
        "hangs": hangs,
        "mismatch": _mismatch_row(judgement),
        "held_up": judgement.blocked_ranks,
        "ranks": len(used_views) + len(judgement.ranks_without_view),
        "ranks_without_dump": list(judgement.ranks_without_view[:MAX_WITHOUT_DUMP]),
        "ranks_without_dump_count": len(judgement.ranks_without_view),
        "files": [
            {"file": file_name(view.source), "rank": view.rank, "host": view.host, "version": view.version}
            for _, view in sorted(views.items())
        ],
        "unread": [{"file": file_name(file.file), "why": file.reason} for file in read.unread],
    }


def has_findings(nccl: Document) -> bool:
    """Return True if a cause was found, or if ranks wait for an unknown reason."""
    return bool(nccl["kind"] != "none" or any(row["waiting"] for row in nccl["groups"]))


# --- parts of the document


def _group_row(stall: Stall, groups: Sequence[Group]) -> dict[str, Any]:
    """Return a row with a group's ranks.

    Keys:
        left: ranks that finished the collective.
        unknown: ranks that may or may not have entered it.
    """
    group, operation_id = groups[stall.key.group], stall.key
    return {
        "group": group.name,
        "description": group.description,
        "collective": stall.operation.name,
        "sequence": operation_id.sequence,
        "source": operation_id.source if operation_id.source >= 0 else None,
        "target": operation_id.target if operation_id.source >= 0 else None,
        "entered": sorted(stall.entered),
        "missing": sorted(stall.missing),
        "left": sorted(stall.finished),
        "unknown": sorted(stall.unknown)[:MAX_WITHOUT_DUMP],
        "waiting": sorted(stall.waiting),
    }


def _reason_row(blame: Blame, judgement: Judgement, views: dict[int, RankView]) -> dict[str, Any]:
    group = judgement.groups[blame.key.group]
    view = views.get(blame.rank)
    return {
        "rank": blame.rank,
        "host": view.host if view else "",
        "file": file_name(view.source) if view else "",
        "why": blame.reason,
        "group": group.name,
        "description": group.description,
        "collective": blame.operation,
        "sequence": blame.key.sequence,
        "waiting": sorted(blame.waiting),
    }


def _mismatch_row(judgement: Judgement) -> dict[str, Any] | None:
    """Return the ranks whose calls do not match.

    These ranks entered different collectives with the same number, or they wait for each other in a ring.
    """
    if judgement.difference is not None:
        group = judgement.groups[judgement.difference.key.group]
        calls = [
            {"message": message, "ranks": list(ranks)} for message, ranks in judgement.difference.descriptions.items()
        ]
        return {
            "group": group.name,
            "description": group.description,
            "sequence": judgement.difference.key.sequence,
            "calls": sorted(calls, key=lambda call: (-len(call["ranks"]), call["ranks"])),
            "ring": [],
        }
    if judgement.ring and judgement.kind == "mismatch":
        return {"group": None, "description": None, "sequence": None, "calls": [], "ring": list(judgement.ring)}
    return None


def _notes(judgement: Judgement, read: files.Folder) -> list[str]:
    notes = []
    if judgement.ranks_without_view:
        notes.append(
            f"There is no record of {format_ranks(judgement.ranks_without_view)}. When a rank times out, PyTorch "
            "writes a dump of every rank that is still alive. The other ranks were dead by then, or their files were "
            "not collected."
        )
    if judgement.kind == "network" and any(
        not judgement.groups[stall.key.group].has_rank_order for stall in judgement.stalls
    ):
        notes.append(
            "The members of these groups are not recorded. If such a group contains a rank that left no record, this "
            "rank may be the cause instead of the network."
        )
    for rank, why in sorted(judgement.unused_dumps.items())[:MAX_NAMED]:
        notes.append(f"The dump of rank {rank} {why}; it is not used.")
    if len(judgement.unused_dumps) > MAX_NAMED:
        notes.append(f"{len(judgement.unused_dumps) - MAX_NAMED:,} more dumps are not used, for similar reasons.")
    notes += [f"{file_name(file.file)} {file.reason}." for file in read.unread[:MAX_NAMED]]
    if len(read.unread) > MAX_NAMED:
        notes.append(f"{len(read.unread) - MAX_NAMED:,} more files could not be used.")
    if any(not lane.has_completions for view in read.views for lane in view.lanes.values()):
        notes.append(
            "NCCL's own log records when a rank enters a collective, but not when it leaves it. It therefore does "
            "not show whether all ranks are stuck in the collective."
        )
    if any(not view.version and not view.pairs for view in read.views if view.lanes):
        notes.append("A watchdog log names only groups with a time-out; a dump contains all groups.")
    return notes


# --- for people


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as "rank 3" or "ranks 0-11, 13"."""
    ordered = sorted(set(ranks))
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {format_ranges(ordered)}" if ordered else "no rank"


def format_ranges(ranks: Sequence[int]) -> str:
    """Format sorted ranks as "0-11, 13". If there are more than 12 ranges, only the first 10 are written."""
    intervals: list[list[int]] = []
    for rank in ranks:
        if intervals and intervals[-1][1] == rank - 1:
            intervals[-1][1] = rank
        else:
            intervals.append([rank, rank])
    parts = [f"{first}" if first == last else f"{first}-{last}" for first, last in intervals]
    more = f" and {len(parts) - 10} more ranges" if len(parts) > 12 else ""
    return ", ".join(parts[:10] if more else parts) + more
