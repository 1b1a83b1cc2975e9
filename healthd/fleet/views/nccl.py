"""Describes the ranks that block a stuck job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healthd.fleet.answers.document import Document
from healthd.fleet.answers.nccl import MAX_NAMED, format_ranges, format_ranks, has_findings
from healthd.fleet.answers.nccl_transport import (
    FAILURE_KINDS,
    MAX_SHOWN,
    failure_sentence,
    failures_advice,
    failures_verdict,
    hang_sentence,
    hangs_advice,
    hangs_verdict,
)
from healthd.fleet.figures import Figure, Record, category, colours, nominal, points
from healthd.fleet.view import Column, Form, Table, View, describe

MAX_GROUPS, MAX_SUSPECTS = 12, 16
MAX_DRAWN_RANKS = 256  # with more ranks, the square for each rank is too small to see
RANK_STATES = ("entered", "waits in it", "left it", "missing", "not known")
RANKS = Form(lambda ranks: format_ranges(ranks) or "-", right_aligned=False)
GROUPS = (
    Column("group", lambda row: " ".join(filter(None, (row["group"], row["description"])))),
    Column("collective", lambda row: format_operation(row)),
    Column("entered", "entered", RANKS),
    Column("missing", "missing", RANKS),
    Column("left it", "left", RANKS),
)


def view(nccl: Document) -> View:
    return describe(
        nccl,
        "Cause of a stuck job",
        _sentences(nccl),
        [Table("First collective of each group that only some ranks entered", GROUPS, nccl["groups"], MAX_GROUPS)],
        [_rank_figure(nccl)],
    )


def _sentences(nccl: Document) -> list[str]:
    reasons = [*map(reason_sentence, nccl["reasons"][:MAX_SUSPECTS])]
    if len(nccl["reasons"]) > MAX_SUSPECTS:
        reasons.append(f"and {len(nccl['reasons']) - MAX_SUSPECTS:,} more ranks")
    details = [f"{sentence[:1].upper()}{sentence[1:]}" for sentence in (*reasons, *request_sentences(nccl))]
    return [sentence for sentence in (verdict_sentence(nccl), *details, advice_sentence(nccl)) if sentence]


def _rank_figure(nccl: Document) -> Figure | None:
    """Draw the state of each rank in the first groups, unless the job is too large."""
    if nccl["ranks"] > MAX_DRAWN_RANKS:
        return None
    records: list[Record] = []
    for row in nccl["groups"][:MAX_GROUPS]:
        states = {
            **dict.fromkeys(row["unknown"], "not known"),
            **dict.fromkeys(row["entered"], "entered"),
            **dict.fromkeys(row["waiting"], "waits in it"),
            **dict.fromkeys(row["left"], "left it"),
            **dict.fromkeys(row["missing"], "missing"),
        }
        group = " ".join(filter(None, (row["group"], row["description"], format_operation(row))))
        records += [{"rank": rank, "group": group, "stands": state} for rank, state in sorted(states.items())]
    if not records:
        return None
    squares = points(
        records,
        60,
        x={"field": "rank", "type": "ordinal", "title": "rank"},
        y=category("group"),
        color=colours("stands", RANK_STATES),
        shape=nominal("stands", scale={"domain": list(RANK_STATES)}, title=None),
    )
    return Figure("State of the ranks", verdict_sentence(nccl), (squares,))


# --- sentences


def format_group(group: Mapping[str, Any]) -> str:
    """Format a group as "TENSOR_MODEL_PARALLEL_GROUP (41)", or return only its name."""
    name, description = group["group"], group["description"]
    return f"{description} ({name})" if description and description not in ("undefined", name) else f"group {name}"


def format_operation(row: Mapping[str, Any]) -> str:
    """Format an operation as "all_to_all 20537" or "send 11981 from rank 0 to rank 12"."""
    between = f" from rank {row['source']} to rank {row['target']}" if row.get("source") is not None else ""
    return f"{row['collective'] or 'collective'} {row['sequence']}{between}"


def verdict_sentence(nccl: Document) -> str:
    """Return the verdict in one or two sentences."""
    suspects, kind, count = nccl["suspects"], nccl["kind"], nccl["ranks"]
    if kind == "mismatch":
        mismatch = nccl["mismatch"]
        if mismatch["ring"]:
            return (
                f"A program error, not a node failure: {format_ranks(mismatch['ring'])} wait for each other in a ring. "
                "Each waits in a collective of a different group, so they entered the collectives in different orders."
            )
        call_texts = "; ".join(
            f"{format_ranks(item['ranks'])}: {item['message']}" for item in mismatch["calls"][:MAX_NAMED]
        )
        return (
            f"A program error, not a node failure: as collective {mismatch['sequence']} of {format_group(mismatch)}, "
            f"the ranks entered different operations ({call_texts})."
        )
    if kind == "missing":
        hosts = sorted({item["host"] for item in nccl["reasons"] if item["host"]})
        where = f" (on {', '.join(hosts[:MAX_NAMED])}{', ...' if len(hosts) > MAX_NAMED else ''})" if hosts else ""
        verb = "holds" if len(suspects) == 1 else "hold"
        suspects_text = format_ranks(suspects)
        if all(item["why"] == "no_dump" for item in nccl["reasons"]):
            pronoun, verb_plural = ("it", "holds") if len(suspects) == 1 else ("they", "hold")
            return (
                f"{suspects_text[0].upper()}{suspects_text[1:]} wrote no dump, and {nccl['held_up']:,} of {count:,} "
                f"ranks wait in operations that all others entered: most likely {pronoun} died and {verb_plural} up "
                f"the job. It is unknown whether {pronoun} waited for other ranks."
            )
        qualifier = ", as far as is known" if any(item["why"] == "no_dump" for item in nccl["reasons"]) else ""
        return (
            f"{suspects_text[0].upper()}{suspects_text[1:]}{where} {verb} up the job: {nccl['held_up']:,} of {count:,} "
            f"ranks wait for {'it' if len(suspects) == 1 else 'them'}, "
            f"{'it waits' if len(suspects) == 1 else 'they wait'} for no other rank{qualifier}."
        )
    if nccl["failures"] and kind in FAILURE_KINDS:
        return failures_verdict(nccl)
    if kind == "hang":
        return hangs_verdict(nccl)
    if kind == "network":
        row = next(row for row in nccl["groups"] if row["waiting"] and not row["missing"])
        return (
            f"The network between the ranks is suspect: all {len(row['entered'])} ranks of {format_group(row)} entered "
            f"{format_operation(row)}, and none left it."
        )
    if has_findings(nccl):
        ranks_without_dump = nccl["ranks_without_dump_count"]
        missing_note = (
            f": {ranks_without_dump:,} of {count:,} ranks have no dump, so the folder is incomplete"
            if ranks_without_dump * 2 > count
            else ""
        )
        return f"Ranks wait, but the records do not show which rank they wait for{missing_note}."
    return "No rank waits in a collective that another rank has not entered."


def reason_sentence(row: dict[str, Any]) -> str:
    """Return a sentence that explains why a rank is a suspect."""
    rank_text = f"rank {row['rank']}{' on ' + row['host'] if row['host'] else ''}"
    operation_text = f"{row['collective'] or 'collective'} {row['sequence']} of {format_group(row)}"
    waiting = f", in which {format_ranks(row['waiting'])} {'waits' if len(row['waiting']) == 1 else 'wait'}"
    waiting = waiting if row["waiting"] else ""
    if row["why"] == "missing":
        return (
            f"{rank_text} never entered {operation_text}{waiting}. It waits for no other rank: its GPU, host or "
            "program stopped."
        )
    if row["why"] == "behind":
        return (
            f"{rank_text} entered {operation_text}{waiting}, but its GPU, unlike the GPUs of the other ranks, did "
            "not reach the operation: the GPU is in an earlier kernel or has stopped."
        )
    if row["why"] == "stayed":
        return (
            f"{rank_text} did not leave {operation_text}, although all ranks entered it and other ranks left it: its "
            "GPU, or the process that monitors the GPU, stopped."
        )
    return (
        f"{rank_text} wrote no dump, but {operation_text}{waiting}, needs it: all other ranks in the group that wrote "
        "a dump entered the operation."
    )


def advice_sentence(nccl: Document) -> str:
    """Return a sentence with the next step."""
    if nccl["kind"] == "missing":
        hosts = sorted({row["host"] for row in nccl["reasons"] if row["host"]})
        if hosts:
            return (
                f"Next: check {hosts[0]} at that time. Run `healthd fleet attribution` for the job and `healthd scan` "
                "on its kernel log. Take the node out of service if they report a hardware fault."
            )
        return (
            "Next: find the node of such a rank (with srun --label, or with the host name in "
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE). Then run `healthd fleet attribution` for the job and `healthd scan` on "
            "that node's kernel log."
        )
    if nccl["failures"] and nccl["kind"] in FAILURE_KINDS:
        return failures_advice(nccl)
    if nccl["kind"] == "hang":
        return hangs_advice()
    if nccl["kind"] == "network":
        return "Next: run `healthd fleet links` for the ports and switches between these nodes at that time."
    if nccl["kind"] == "mismatch":
        return "Next: contact the program's author. No node needs to be taken out of service."
    return "Next: collect the missing dumps of the other ranks." if nccl["ranks_without_dump"] else ""


def request_sentences(nccl: Document) -> list[str]:
    """Return the first failed requests and hanging ranks as sentences."""
    found = []
    for rows, sentence in ((nccl["failures"], failure_sentence), (nccl["hangs"], hang_sentence)):
        found += [sentence(row) for row in rows[:MAX_SHOWN]]
        found += [f"and {len(rows) - MAX_SHOWN:,} more (see --json)"] if len(rows) > MAX_SHOWN else []
    return found
