"""Ranks that hold up a stuck job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healthd.fleet.answers.document import Document
from healthd.fleet.answers.nccl import MOST_NAMED, found, ranges, ranks_of
from healthd.fleet.answers.nccl_transport import (
    FAILURE_KINDS,
    MOST_SHOWN,
    failure_sentence,
    failures_advice,
    failures_verdict,
    hang_sentence,
    hangs_advice,
    hangs_verdict,
)
from healthd.fleet.figures import Figure, Record, category, colours, nominal, points
from healthd.fleet.view import Column, Form, Table, View, described

MOST_GROUPS, MOST_SUSPECTS = 12, 16
MOST_DRAWN = 256  # ranks; with more, the square of one rank is too small to see
STANDS = ("entered", "waits in it", "left it", "missing", "not known")
RANKS = Form(lambda ranks: ranges(ranks) or "-", right=False)
GROUPS = (
    Column("group", lambda row: " ".join(filter(None, (row["group"], row["description"])))),
    Column("collective", lambda row: operation(row)),
    Column("entered", "entered", RANKS),
    Column("missing", "missing", RANKS),
    Column("left it", "left", RANKS),
)


def view(nccl: Document) -> View:
    return described(
        nccl,
        "Cause of a stuck job",
        _sentences(nccl),
        [Table("First collective of each group that only some ranks entered", GROUPS, nccl["groups"], MOST_GROUPS)],
        [_ranks(nccl)],
    )


def _sentences(nccl: Document) -> list[str]:
    reasons = [*map(reason, nccl["reasons"][:MOST_SUSPECTS])]
    if len(nccl["reasons"]) > MOST_SUSPECTS:
        reasons.append(f"and {len(nccl['reasons']) - MOST_SUSPECTS:,} more ranks")
    details = [f"{one[:1].upper()}{one[1:]}" for one in (*reasons, *more_sentences(nccl))]
    return [one for one in (verdict(nccl), *details, advice(nccl)) if one]


def _ranks(nccl: Document) -> Figure | None:
    """Draw the state of each rank in the first groups, unless the job is too large."""
    if nccl["ranks"] > MOST_DRAWN:
        return None
    records: list[Record] = []
    for row in nccl["groups"][:MOST_GROUPS]:
        stands = {
            **dict.fromkeys(row["unknown"], "not known"),
            **dict.fromkeys(row["entered"], "entered"),
            **dict.fromkeys(row["waiting"], "waits in it"),
            **dict.fromkeys(row["left"], "left it"),
            **dict.fromkeys(row["missing"], "missing"),
        }
        group = " ".join(filter(None, (row["group"], row["description"], operation(row))))
        records += [{"rank": rank, "group": group, "stands": stand} for rank, stand in sorted(stands.items())]
    if not records:
        return None
    squares = points(
        records,
        60,
        x={"field": "rank", "type": "ordinal", "title": "rank"},
        y=category("group"),
        color=colours("stands", STANDS),
        shape=nominal("stands", scale={"domain": list(STANDS)}, title=None),
    )
    return Figure("State of the ranks", verdict(nccl), (squares,))


# --- sentences


def named(group: Mapping[str, Any]) -> str:
    """Return "TENSOR_MODEL_PARALLEL_GROUP (41)", or the name alone."""
    name, description = group["group"], group["description"]
    return f"{description} ({name})" if description and description not in ("undefined", name) else f"group {name}"


def operation(row: Mapping[str, Any]) -> str:
    """Return "all_to_all 20537" or "send 11981 of rank 0 to rank 12"."""
    between = f" of rank {row['source']} to rank {row['target']}" if row.get("source") is not None else ""
    return f"{row['collective'] or 'collective'} {row['sequence']}{between}"


def verdict(nccl: Document) -> str:
    """Return the answer in one or two sentences."""
    suspects, kind, count = nccl["suspects"], nccl["kind"], nccl["ranks"]
    if kind == "mismatch":
        wrong = nccl["mismatch"]
        if wrong["ring"]:
            return (
                f"An error of the program, not of a node: {ranks_of(wrong['ring'])} wait for each other in a ring, "
                "each in a collective of another group, so they entered them in different orders."
            )
        said = "; ".join(f"{ranks_of(one['ranks'])}: {one['message']}" for one in wrong["calls"][:MOST_NAMED])
        return (
            f"An error of the program, not of a node: as collective {wrong['sequence']} of {named(wrong)} the ranks "
            f"entered different ones ({said})."
        )
    if kind == "missing":
        hosts = sorted({one["host"] for one in nccl["reasons"] if one["host"]})
        where = f" (on {', '.join(hosts[:MOST_NAMED])}{', ...' if len(hosts) > MOST_NAMED else ''})" if hosts else ""
        holds = "holds" if len(suspects) == 1 else "hold"
        begin = ranks_of(suspects)
        if all(one["why"] == "no_dump" for one in nccl["reasons"]):
            they, hold = ("it", "holds") if len(suspects) == 1 else ("they", "hold")
            return (
                f"{begin[0].upper()}{begin[1:]} wrote no dump, and {nccl['held_up']:,} of {count:,} ranks wait in "
                f"operations that all others entered: most likely {they} died and {hold} up the job. It is not known "
                f"whether {they} waited for other ranks."
            )
        sure = ", as far as is known" if any(one["why"] == "no_dump" for one in nccl["reasons"]) else ""
        return (
            f"{begin[0].upper()}{begin[1:]}{where} {holds} up the job: {nccl['held_up']:,} of {count:,} ranks wait for "
            f"{'it' if len(suspects) == 1 else 'them'}, {'it waits' if len(suspects) == 1 else 'they wait'} for "
            f"no other rank{sure}."
        )
    if nccl["failures"] and kind in FAILURE_KINDS:
        return failures_verdict(nccl)
    if kind == "hang":
        return hangs_verdict(nccl)
    if kind == "network":
        row = next(row for row in nccl["groups"] if row["waiting"] and not row["missing"])
        return (
            f"The network between the ranks: all {len(row['entered'])} ranks of {named(row)} entered {operation(row)}, "
            "and none left it."
        )
    if found(nccl):
        without = nccl["ranks_without_dump_count"]
        lacks = (
            f": {without:,} of {count:,} ranks have no dump, so the folder is not complete"
            if without * 2 > count
            else ""
        )
        return f"Ranks wait, but the records do not show for which rank{lacks}."
    return "No rank waits in a collective that another one misses."


def reason(one: dict[str, Any]) -> str:
    """Return why a rank is a suspect, as a sentence."""
    who = f"rank {one['rank']}{' on ' + one['host'] if one['host'] else ''}"
    place = f"{one['collective'] or 'collective'} {one['sequence']} of {named(one)}"
    waiting = f", in which {ranks_of(one['waiting'])} {'waits' if len(one['waiting']) == 1 else 'wait'}"
    waiting = waiting if one["waiting"] else ""
    if one["why"] == "missing":
        return f"{who} never entered {place}{waiting}. It waits for no rank: its GPU, its host or its program stopped."
    if one["why"] == "behind":
        return (
            f"{who} entered {place}{waiting}, but unlike theirs its GPU did not reach it: it is in an earlier kernel, "
            "or it stopped."
        )
    if one["why"] == "stayed":
        return (
            f"{who} did not leave {place}, which all ranks entered and others left: its GPU stopped, or the process "
            "that monitors it."
        )
    return f"{who} wrote no dump, and {place}{waiting}, needs it: all other ranks of the group with a dump entered it."


def advice(nccl: Document) -> str:
    """Return what to do next."""
    if nccl["kind"] == "missing":
        hosts = sorted({one["host"] for one in nccl["reasons"] if one["host"]})
        if hosts:
            return (
                f"Next: check {hosts[0]} at that time: `healthd fleet attribution` for the job, `healthd scan` of its "
                "kernel log; take the node out of service if they name hardware."
            )
        return (
            "Next: find the node of such a rank (srun --label, or TORCH_NCCL_DEBUG_INFO_TEMP_FILE with the host in "
            "it), then run `healthd fleet attribution` for the job and `healthd scan` of that node's kernel log."
        )
    if nccl["failures"] and nccl["kind"] in FAILURE_KINDS:
        return failures_advice(nccl)
    if nccl["kind"] == "hang":
        return hangs_advice()
    if nccl["kind"] == "network":
        return "Next: run `healthd fleet links` for the ports and switches between these nodes at that time."
    if nccl["kind"] == "mismatch":
        return "Next: ask the author of the program; no node needs to be taken out of service."
    return "Next: collect the missing dumps of the other ranks." if nccl["ranks_without_dump"] else ""


def more_sentences(nccl: Document) -> list[str]:
    """Return the first failed requests and hanging ranks as sentences."""
    found = []
    for rows, sentence in ((nccl["failures"], failure_sentence), (nccl["hangs"], hang_sentence)):
        found += [sentence(row) for row in rows[:MOST_SHOWN]]
        found += [f"and {len(rows) - MOST_SHOWN:,} more: --json has them"] if len(rows) > MOST_SHOWN else []
    return found
