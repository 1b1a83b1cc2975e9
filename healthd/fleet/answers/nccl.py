"""The rank that holds up a stuck job, from the ranks' records of their NCCL collectives. Needs no store.

The rule is in healthd/fleet/collectives/waits.py, the input formats in files.py there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from healthd.fleet.answers.document import Document, Unanswerable, head
from healthd.fleet.answers.nccl_transport import (
    failure_rows,
    hang_rows,
    kind_of,
    single_out,
)
from healthd.fleet.collectives import files
from healthd.fleet.collectives.rank_view import View, file_name
from healthd.fleet.collectives.waits import Blame, Group, Judgement, Stall, judge

MOST_NAMED = 5
MOST_WITHOUT_DUMP = 4096  # number of ranks to list


def nccl(folder: str) -> Document:
    """Return the document of `healthd fleet nccl`. Raises Unanswerable if the folder has no record of a rank.

    kind: missing, network, memory, hang, mismatch, none. suspects: ranks. groups: [{group, collective, entered,
    missing, ...}]. failures: failed requests. hangs: ranks whose watchdog made no progress.
    """
    try:
        read = files.read(folder)
    except files.NoFolder as error:
        raise Unanswerable(str(error)) from None
    if not (read.views or read.failures or read.hangs):
        first = next((f" ({file_name(one.file)} {one.why})" for one in read.unread), "")
        raise Unanswerable(
            f"{file_name(folder)}: it has no dump of PyTorch's flight recorder, and no log with collectives or "
            f"failed requests by NCCL's watchdog or NCCL_DEBUG{first}"
        )
    return of(judge(read.views), read)


def of(judged: Judgement, read: files.Folder) -> Document:
    """Return the document of a judgement. Pure."""
    views = {view.rank: view for view in read.views}
    used = [view for rank, view in views.items() if rank not in judged.aside]
    reasons = [_reason(blame, judged, views) for blame in judged.suspects]
    failures, hangs = failure_rows(read.failures), hang_rows(read.hangs)
    suspects = [blame.rank for blame in judged.suspects]
    kind = judged.kind
    if kind in ("none", "network"):  # the ranks' own records name no suspect
        singled = single_out(hangs, len({*views, *judged.unseen, *(row["rank"] for row in hangs)}))
        kind = kind_of(failures) or ("hang" if singled or (hangs and kind == "none") else kind)
        suspects = singled if kind == "hang" else suspects
    return {
        **head("nccl", None, None, {}, _notes(judged, read)),
        "kind": kind,
        "suspects": suspects,
        "groups": [_group(stall, judged.groups) for stall in judged.stalls],
        "reasons": reasons,
        "failures": failures,
        "hangs": hangs,
        "mismatch": _mismatch(judged),
        "held_up": judged.held_up,
        "ranks": len(used) + len(judged.unseen),
        "ranks_without_dump": list(judged.unseen[:MOST_WITHOUT_DUMP]),
        "ranks_without_dump_count": len(judged.unseen),
        "files": [
            {"file": file_name(view.source), "rank": view.rank, "host": view.host, "version": view.version}
            for _, view in sorted(views.items())
        ],
        "unread": [{"file": file_name(one.file), "why": one.why} for one in read.unread],
    }


def found(nccl: Document) -> bool:
    """Return True if there is a verdict, or ranks wait for an unknown reason."""
    return bool(nccl["kind"] != "none" or any(row["waiting"] for row in nccl["groups"]))


# --- parts of the document


def _group(stall: Stall, groups: Sequence[Group]) -> dict[str, Any]:
    """Return a group's ranks. left: ranks that finished. unknown: ranks that may have entered or missed it."""
    group, place = groups[stall.place.group], stall.place
    return {
        "group": group.name,
        "description": group.description,
        "collective": stall.operation.name,
        "sequence": place.sequence,
        "source": place.source if place.source >= 0 else None,
        "target": place.target if place.source >= 0 else None,
        "entered": sorted(stall.entered),
        "missing": sorted(stall.missing),
        "left": sorted(stall.left),
        "unknown": sorted(stall.unknown)[:MOST_WITHOUT_DUMP],
        "waiting": sorted(stall.waiting),
    }


def _reason(blame: Blame, judged: Judgement, views: dict[int, View]) -> dict[str, Any]:
    group = judged.groups[blame.place.group]
    view = views.get(blame.rank)
    return {
        "rank": blame.rank,
        "host": view.host if view else "",
        "file": file_name(view.source) if view else "",
        "why": blame.why,
        "group": group.name,
        "description": group.description,
        "collective": blame.operation,
        "sequence": blame.place.sequence,
        "waiting": sorted(blame.waiting),
    }


def _mismatch(judged: Judgement) -> dict[str, Any] | None:
    """Return the ranks that entered different collectives under one number, or the ring of ranks that wait for each
    other.
    """
    if judged.difference is not None:
        group = judged.groups[judged.difference.place.group]
        said = [{"message": words, "ranks": list(ranks)} for words, ranks in judged.difference.said.items()]
        return {
            "group": group.name,
            "description": group.description,
            "sequence": judged.difference.place.sequence,
            "calls": sorted(said, key=lambda one: (-len(one["ranks"]), one["ranks"])),
            "ring": [],
        }
    if judged.ring and judged.kind == "mismatch":
        return {"group": None, "description": None, "sequence": None, "calls": [], "ring": list(judged.ring)}
    return None


def _notes(judged: Judgement, read: files.Folder) -> list[str]:
    notes = []
    if judged.unseen:
        notes.append(
            f"There is no record of {ranks_of(judged.unseen)}. When a rank times out, PyTorch writes a dump of every "
            "rank that is still alive: the others were dead by then, or their files were not collected."
        )
    if judged.kind == "network" and any(not judged.groups[stall.place.group].told for stall in judged.stalls):
        notes.append(
            "The members of these groups are not recorded: if a group has a rank without a record, that rank may be "
            "the cause, not the network."
        )
    for rank, why in sorted(judged.aside.items())[:MOST_NAMED]:
        notes.append(f"The dump of rank {rank} {why}; it is not used.")
    if len(judged.aside) > MOST_NAMED:
        notes.append(f"{len(judged.aside) - MOST_NAMED:,} more dumps are not used for such reasons.")
    notes += [f"{file_name(one.file)} {one.why}." for one in read.unread[:MOST_NAMED]]
    if len(read.unread) > MOST_NAMED:
        notes.append(f"{len(read.unread) - MOST_NAMED:,} more files could not be used.")
    if any(not lane.sure for view in read.views for lane in view.lanes.values()):
        notes.append(
            "NCCL's own log records which collective a rank entered, not which it left, so it does not show whether "
            "all ranks are stuck in it."
        )
    if any(not view.version and not view.pairs for view in read.views if view.lanes):
        notes.append("A watchdog log names only groups with a time-out; a dump has all groups.")
    return notes


# --- for people


def ranks_of(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0-11, 13"."""
    ordered = sorted(set(ranks))
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {ranges(ordered)}" if ordered else "no rank"


def ranges(ranks: Sequence[int]) -> str:
    """Format sorted ranks as "0-11, 13". Of more than 12 ranges only the first 10 are written."""
    pieces: list[list[int]] = []
    for rank in ranks:
        if pieces and pieces[-1][1] == rank - 1:
            pieces[-1][1] = rank
        else:
            pieces.append([rank, rank])
    words = [f"{first}" if first == last else f"{first}-{last}" for first, last in pieces]
    more = f" and {len(words) - 10} more stretches" if len(words) > 12 else ""
    return ", ".join(words[:10] if more else words) + more
