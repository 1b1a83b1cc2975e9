"""What holds up a stuck job, as a chapter."""

from __future__ import annotations

import altair as alt

from healthd.fleet.answers import nccl as answer
from healthd.fleet.answers.document import Document
from healthd.fleet.chapters.chapter import COLOURS, Chapter, Table, chart, rows_of

MOST_ROWS = 40
MOST_DRAWN = 256  # ranks: beyond, a square of one is no more seen
_STANDS = ("entered", "waits in it", "left it", "missing", "not known")


def chapter(nccl: Document) -> Chapter:
    rows = answer.group_rows(nccl)
    title = "The first collective of each group in which ranks differ"
    tables = (Table(title, answer.COLUMNS, tuple(rows[:MOST_ROWS])),)
    drawn = _squares(nccl)
    drawing = (
        alt.Chart(rows_of(drawn))
        .mark_point(filled=True, size=60)
        .encode(
            x=alt.X("rank:O", title="rank"),
            y=alt.Y("group:N", sort=None, title=None),
            color=alt.Color("stands:N", scale=alt.Scale(domain=list(_STANDS), range=list(COLOURS[:5])), title=None),
            shape=alt.Shape("stands:N", scale=alt.Scale(domain=list(_STANDS)), title=None),
        )
    )
    details = [*map(answer.reason, _few(nccl)), *answer.more_sentences(nccl)]
    sentences = [answer.verdict(nccl), *(f"{one[:1].upper()}{one[1:]}" for one in details)]
    advice = answer.advice(nccl)
    return Chapter(
        "nccl",
        "What holds up a stuck job",
        (*sentences, *((advice,) if advice else ())),
        (chart("Where the ranks stand", answer.verdict(nccl), drawing),) if drawn else (),
        tables if rows else (),
        tuple(nccl["notes"]),
    )


def _few(nccl: Document) -> list[dict[str, object]]:
    return list(nccl["reasons"][: answer.MOST_SUSPECTS])


def _squares(nccl: Document) -> list[dict[str, object]]:
    """For each of the first groups where each of its ranks stands; none of a job that is too large to be drawn."""
    if nccl["ranks"] > MOST_DRAWN:
        return []
    found: list[dict[str, object]] = []
    for row in nccl["groups"][: answer.MOST_GROUPS]:
        stands = {
            **dict.fromkeys(row["unknown"], "not known"),
            **dict.fromkeys(row["entered"], "entered"),
            **dict.fromkeys(row["waiting"], "waits in it"),
            **dict.fromkeys(row["left"], "left it"),
            **dict.fromkeys(row["missing"], "missing"),
        }
        group = " ".join(filter(None, (row["group"], row["description"], answer.operation(row))))
        found += [{"rank": rank, "group": group, "stands": stand} for rank, stand in sorted(stands.items())]
    return found
