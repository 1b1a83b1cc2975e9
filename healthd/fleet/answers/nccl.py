"""Which rank holds up a stuck job: from what its ranks wrote of their NCCL collectives. No store is needed.

The rule stands in healthd/fleet/collectives/waits.py, what is read in files.py there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from healthd.common.page import Page
from healthd.fleet.answers import document
from healthd.fleet.answers.document import Document, Unanswerable, head
from healthd.fleet.answers.nccl_transport import (
    FAILURE_KINDS,
    MOST_SHOWN,
    failure_rows,
    failure_sentence,
    failures_advice,
    failures_verdict,
    hang_rows,
    hang_sentence,
    hangs_advice,
    hangs_verdict,
    kind_of,
    single_out,
)
from healthd.fleet.collectives import files
from healthd.fleet.collectives.rank_view import View
from healthd.fleet.collectives.waits import Blame, Group, Judgement, Stall, judge
from healthd.fleet.table import table

MOST_GROUPS, MOST_SUSPECTS, MOST_NAMED = 12, 16, 5
MOST_WITHOUT_DUMP = 4096  # so many of them are listed


def nccl(folder: str) -> Document:
    """kind: missing, network, memory, hang, mismatch, none; suspects: ranks; groups: [{group, collective, entered,
    missing, ...}]; failures: failed requests; hangs: ranks whose watchdog made no progress.

    Raises Unanswerable if nothing in the folder tells of a rank."""
    try:
        read = files.read(folder)
    except files.NoFolder as error:
        raise Unanswerable(str(error)) from None
    if not (read.views or read.failures or read.hangs):
        first = next((f" ({shown(one.file)} {one.why})" for one in read.unread), "")
        raise Unanswerable(
            f"{shown(folder)}: no file in it is a dump of PyTorch's flight recorder, or a log in which NCCL's watchdog "
            f"or NCCL_DEBUG tells of collectives or failed requests{first}"
        )
    return of(judge(read.views), read)


def of(judged: Judgement, read: files.Folder) -> Document:
    """The document of a judgement. Pure."""
    views = {view.rank: view for view in read.views}
    used = [view for rank, view in views.items() if rank not in judged.aside]
    reasons = [_reason(blame, judged, views) for blame in judged.suspects]
    failures, hangs = failure_rows(read.failures), hang_rows(read.hangs)
    suspects = [blame.rank for blame in judged.suspects]
    kind = judged.kind
    if kind in ("none", "network"):  # the ranks' own records name nobody
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
            {"file": shown(view.source), "rank": view.rank, "host": view.host, "version": view.version}
            for _, view in sorted(views.items())
        ],
        "unread": [{"file": shown(one.file), "why": one.why} for one in read.unread],
    }


def found(nccl: Document) -> bool:
    """Also where ranks wait, and what was read does not tell for whom."""
    return bool(nccl["kind"] != "none" or any(row["waiting"] for row in nccl["groups"]))


def shown(name: str) -> str:
    """A file's name as text: what is not UTF-8 in it is replaced."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


# --- its parts


def _group(stall: Stall, groups: Sequence[Group]) -> dict[str, Any]:
    """entered, missing: of whom it is known. left: who is through; unknown: of whom neither is known."""
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
        "file": shown(view.source) if view else "",
        "why": blame.why,
        "group": group.name,
        "description": group.description,
        "collective": blame.operation,
        "sequence": blame.place.sequence,
        "waiting": sorted(blame.waiting),
    }


def _mismatch(judged: Judgement) -> dict[str, Any] | None:
    """Where ranks enter different collectives under one number; or the ring in which they wait for each other."""
    if judged.difference is not None:
        group = judged.groups[judged.difference.place.group]
        said = [{"says": words, "ranks": list(ranks)} for words, ranks in judged.difference.said.items()]
        return {
            "group": group.name,
            "description": group.description,
            "sequence": judged.difference.place.sequence,
            "said": sorted(said, key=lambda one: (-len(one["ranks"]), one["ranks"])),
            "ring": [],
        }
    if judged.ring and judged.kind == "mismatch":
        return {"group": None, "description": None, "sequence": None, "said": [], "ring": list(judged.ring)}
    return None


def _notes(judged: Judgement, read: files.Folder) -> list[str]:
    notes = []
    if judged.unseen:
        notes.append(
            f"Nothing was read of {ranks_of(judged.unseen)}. PyTorch writes a dump of every rank whose process still "
            "lives when one of them times out: who wrote none was dead by then, or its file was not collected."
        )
    if judged.kind == "network" and any(not judged.groups[stall.place.group].told for stall in judged.stalls):
        notes.append(
            "Who is in these groups is not told: if a rank beyond those that were read is in one, that rank may be the "
            "cause, and not the network."
        )
    for rank, why in sorted(judged.aside.items())[:MOST_NAMED]:
        notes.append(f"The dump of rank {rank} {why}; it is not used.")
    if len(judged.aside) > MOST_NAMED:
        notes.append(f"So of {len(judged.aside) - MOST_NAMED:,} more.")
    notes += [f"{shown(one.file)} {one.why}." for one in read.unread[:MOST_NAMED]]
    if len(read.unread) > MOST_NAMED:
        notes.append(f"{len(read.unread) - MOST_NAMED:,} more files could not be used.")
    if any(not lane.sure for view in read.views for lane in view.lanes.values()):
        notes.append(
            "NCCL's own log says which collective a rank entered, not which it left: whether all are stuck in one is "
            "not known from it."
        )
    if any(not view.version and not view.pairs for view in read.views if view.lanes):
        notes.append("A log of the watchdog names only groups in which something timed out: a dump tells of all.")
    return notes


# --- for people


def ranks_of(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0-11, 13"."""
    ordered = sorted(set(ranks))
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {ranges(ordered)}" if ordered else "no rank"


def ranges(ranks: Sequence[int]) -> str:
    """ "0-11, 13" of what is ordered; of very many pieces the first ones."""
    pieces: list[list[int]] = []
    for rank in ranks:
        if pieces and pieces[-1][1] == rank - 1:
            pieces[-1][1] = rank
        else:
            pieces.append([rank, rank])
    words = [f"{first}" if first == last else f"{first}-{last}" for first, last in pieces]
    more = f" and {len(words) - 10} more stretches" if len(words) > 12 else ""
    return ", ".join(words[:10] if more else words) + more


def named(group: dict[str, Any]) -> str:
    """ "TENSOR_MODEL_PARALLEL_GROUP (41)", or the name alone."""
    name, description = group["group"], group["description"]
    return f"{description} ({name})" if description and description not in ("undefined", name) else f"group {name}"


def operation(row: dict[str, Any]) -> str:
    """ "all_to_all 20537", "send 11981 of rank 0 to rank 12"."""
    between = f" of rank {row['source']} to rank {row['target']}" if row.get("source") is not None else ""
    return f"{row['collective'] or 'collective'} {row['sequence']}{between}"


def verdict(nccl: Document) -> str:
    """The answer in one or two sentences."""
    suspects, kind, count = nccl["suspects"], nccl["kind"], nccl["ranks"]
    if kind == "mismatch":
        wrong = nccl["mismatch"]
        if wrong["ring"]:
            return (
                f"A program's error, no node's: {ranks_of(wrong['ring'])} wait for each other in a ring, each in a "
                "collective of another group, so they entered them in different orders."
            )
        said = "; ".join(f"{ranks_of(one['ranks'])}: {one['says']}" for one in wrong["said"][:MOST_NAMED])
        return (
            f"A program's error, no node's: as collective {wrong['sequence']} of {named(wrong)} ranks entered "
            f"different ones ({said})."
        )
    if kind == "missing":
        hosts = sorted({one["host"] for one in nccl["reasons"] if one["host"]})
        where = f" (on {', '.join(hosts[:MOST_NAMED])}{', ...' if len(hosts) > MOST_NAMED else ''})" if hosts else ""
        holds = "holds" if len(suspects) == 1 else "hold"
        begin = ranks_of(suspects)
        if all(one["why"] == "no_dump" for one in nccl["reasons"]):
            they, hold = ("it", "holds") if len(suspects) == 1 else ("they", "hold")
            return (
                f"{begin[0].upper()}{begin[1:]} wrote no dump, and {nccl['held_up']:,} of {count:,} ranks wait in what "
                f"nobody else misses: most likely {they} died and {hold} up the job. Whom {they} waited for, if "
                "anybody, is not known."
            )
        sure = ", as far as is known" if any(one["why"] == "no_dump" for one in nccl["reasons"]) else ""
        return (
            f"{begin[0].upper()}{begin[1:]}{where} {holds} up the job: {nccl['held_up']:,} of {count:,} ranks wait for "
            f"{'it' if len(suspects) == 1 else 'them'}, {'it waits' if len(suspects) == 1 else 'they wait'} for "
            f"nobody{sure}."
        )
    if nccl["failures"] and kind in FAILURE_KINDS:
        return failures_verdict(nccl)
    if kind == "hang":
        return hangs_verdict(nccl)
    if kind == "network":
        row = next(row for row in nccl["groups"] if row["waiting"] and not row["missing"])
        return (
            f"The network between the ranks: all {len(row['entered'])} of {named(row)} entered {operation(row)}, and "
            "none left it."
        )
    if found(nccl):
        without = nccl["ranks_without_dump_count"]
        lacks = (
            f": {without:,} of {count:,} ranks have no dump, so the folder is not complete"
            if without * 2 > count
            else ""
        )
        return f"Ranks wait, and what was read does not tell for whom{lacks}."
    return "No rank waits in a collective that another one misses."


def reason(one: dict[str, Any]) -> str:
    """Why a rank is a suspect, in a sentence."""
    who = f"rank {one['rank']}{' on ' + one['host'] if one['host'] else ''}"
    place = f"{one['collective'] or 'collective'} {one['sequence']} of {named(one)}"
    waiting = f", in which {ranks_of(one['waiting'])} {'waits' if len(one['waiting']) == 1 else 'wait'}"
    waiting = waiting if one["waiting"] else ""
    if one["why"] == "missing":
        return f"{who} never entered {place}{waiting}. It waits for nobody: its GPU, its host or its program stopped."
    if one["why"] == "behind":
        return (
            f"{who} entered {place}{waiting}, but its GPU did not come to it, as theirs did: it is in a kernel before "
            "that, or it stopped."
        )
    if one["why"] == "stayed":
        return (
            f"{who} did not come out of {place}, which all ranks entered and others left: its GPU stopped, or the "
            "process that watches it."
        )
    return f"{who} wrote no dump, and {place}{waiting}, wants it: all of that group of whom a dump was read entered it."


def advice(nccl: Document) -> str:
    """What to do next."""
    if nccl["kind"] == "missing":
        hosts = sorted({one["host"] for one in nccl["reasons"] if one["host"]})
        if hosts:
            return (
                f"Next: what {hosts[0]} told at that time: `healthd fleet attribution` for the job, `healthd scan` of "
                "its kernel log; take it out if that names hardware."
            )
        return (
            "Next: on which node such a rank ran (srun --label, or TORCH_NCCL_DEBUG_INFO_TEMP_FILE with the host in "
            "it), then `healthd fleet attribution` for the job and `healthd scan` of that node's kernel log."
        )
    if nccl["failures"] and nccl["kind"] in FAILURE_KINDS:
        return failures_advice(nccl)
    if nccl["kind"] == "hang":
        return hangs_advice()
    if nccl["kind"] == "network":
        return "Next: `healthd fleet links` for the ports and switches between these nodes at that time."
    if nccl["kind"] == "mismatch":
        return "Next: who wrote the program; no node is to be taken out for this."
    return "Next: dumps of all ranks, if some are missing." if nccl["ranks_without_dump"] else ""


def more_sentences(nccl: Document) -> list[str]:
    """Return the failed requests and the hanging ranks as sentences, of many the first."""
    found = []
    for rows, sentence in ((nccl["failures"], failure_sentence), (nccl["hangs"], hang_sentence)):
        found += [sentence(row) for row in rows[:MOST_SHOWN]]
        found += [f"and {len(rows) - MOST_SHOWN:,} more: --json has them"] if len(rows) > MOST_SHOWN else []
    return found


def group_rows(nccl: Document) -> list[tuple[str, ...]]:
    """Of each group: what, who entered, who did not, who is through. As text."""
    return [
        (
            " ".join(filter(None, (row["group"], row["description"]))),
            operation(row),
            ranges(row["entered"]),
            ranges(row["missing"]) or "-",
            ranges(row["left"]) or "-",
        )
        for row in nccl["groups"]
    ]


COLUMNS = ("group", "collective", "entered", "missing", "left it")


def text(nccl: Document, page: Page) -> str:
    reasons = [line for one in nccl["reasons"][:MOST_SUSPECTS] for line in page.item(reason(one))]
    if len(nccl["reasons"]) > MOST_SUSPECTS:
        reasons += page.item(f"so do {len(nccl['reasons']) - MOST_SUSPECTS:,} more")
    reasons += [line for one in more_sentences(nccl) for line in page.item(one)]
    rows = group_rows(nccl)
    blocks = ["\n".join(page.wrap(verdict(nccl))), "\n".join(reasons)]
    if rows:
        more = f"\n{len(rows) - MOST_GROUPS:,} more groups: --json" if len(rows) > MOST_GROUPS else ""
        blocks.append(table(COLUMNS, rows[:MOST_GROUPS], page).rstrip("\n") + more)
    blocks.append("\n".join(page.wrap(advice(nccl))))
    return document.told("What holds up a stuck job", nccl, blocks, page)
