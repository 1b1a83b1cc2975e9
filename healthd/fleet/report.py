"""`healthd fleet report`: write all answers from one store to one page."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import duckdb

from healthd.common import atomic_files, ownership
from healthd.common.errors import HealthdError
from healthd.fleet import store
from healthd.fleet.answers import (
    alarms,
    attribution,
    availability,
    checks,
    ettr,
    failslow,
    goodput,
    lemons,
    links,
    nccl,
    rate,
    repairs,
    states,
)
from healthd.fleet.answers.document import Document, Unanswerable, format_time
from healthd.fleet.answers.study import Study
from healthd.fleet.manifest import StoreError
from healthd.fleet.report_page import Assets, Report, is_report, render_page
from healthd.fleet.statistics.lemon_score import WINDOW_DAYS
from healthd.fleet.summary import opening_sentences
from healthd.fleet.view import COUNT, TIME, Column, Table, View
from healthd.fleet.views import alarms as alarms_view
from healthd.fleet.views import attribution as attribution_view
from healthd.fleet.views import availability as availability_view
from healthd.fleet.views import checks as checks_view
from healthd.fleet.views import compare as compare_view
from healthd.fleet.views import ettr as ettr_view
from healthd.fleet.views import failslow as failslow_view
from healthd.fleet.views import goodput as goodput_view
from healthd.fleet.views import lemons as lemons_view
from healthd.fleet.views import links as links_view
from healthd.fleet.views import nccl as nccl_view
from healthd.fleet.views import rate as rate_view
from healthd.fleet.views import repairs as repairs_view
from healthd.fleet.views import states as states_view

FILE = "report.html"


class UnknownReport(HealthdError):
    """A file that healthd did not write already exists at the report's path."""


class Source(NamedTuple):
    """A row returned by report_sources.sql. Its fields are keys of the document."""

    cluster: str | None
    source: str
    from_time: int | None
    to_time: int | None
    names: int
    rows_read: int
    rows_unread: int
    read_time: int | None


@dataclass(frozen=True, slots=True)
class Chapter:
    """A chapter of the report.

    Attributes:
        command: arguments of `healthd fleet` for the same answer; "" if the only argument is the chapter's name.
        takes_store_flags: True if this command also takes the store's options.
    """

    name: str
    title: str  # shown if the store has no answer
    answer: Callable[[Study], Document]
    view: Callable[[Document], View]
    command: str = ""
    takes_store_flags: bool = True


def report_chapters(
    price: float | None = None,
    sla: float | None = None,
    nccl_folders: Sequence[str] = (),
    compared: tuple[str, Callable[[], Document]] | None = None,
) -> tuple[Chapter, ...]:
    """Return the chapters in the report's order.

    Args:
        price: price per GPU-hour.
        sla: percentage of time for which nodes should be up.
        nccl_folders: folders with flight recorder dumps.
        compared: the arguments of `healthd fleet compare`, and a function that computes its document. The function may
            raise the same errors as `compute_answers`.
    """
    found = [
        Chapter("states", "Outcome of the jobs", states.states, states_view.view),
        Chapter(
            "goodput",
            "Cost of failures",
            partial(goodput.goodput, price=price),
            goodput_view.view,
            "goodput" if price is None else f"goodput --price {price:g}",
        ),
        Chapter("rate", "Interruption rate of jobs", rate.rate, rate_view.view),
        Chapter("ettr", "Effective training time ratio (ETTR) of a large job", ettr.ettr, ettr_view.view),
        Chapter("attribution", "Causes of failed jobs", attribution.attribution, attribution_view.view),
        Chapter("lemons", "Nodes to take out", lemons.lemons, lemons_view.view, f"lemons --days {WINDOW_DAYS}"),
        Chapter(
            "availability",
            "Availability of the nodes",
            partial(availability.availability, sla=sla),
            availability_view.view,
            "availability" if sla is None else f"availability --sla {sla:g}",
        ),
        Chapter("alarms", "Failing checks during completed jobs", alarms.alarms, alarms_view.view),
        Chapter("checks", "First evidence, by check", checks.checks, checks_view.view),
        Chapter("links", "Links that flap or count errors", links.links, links_view.view),
        Chapter("repairs", "Repairs that lasted", repairs.repairs, repairs_view.view),
        Chapter("failslow", "Slow jobs and their cost", failslow.failslow, failslow_view.view),
    ]
    if compared is not None:
        arguments, get_document = compared
        found.append(
            Chapter(
                "compare", "Differences", lambda _: get_document(), compare_view.view, f"compare {arguments}", False
            )
        )
    for number, folder in enumerate(nccl_folders, 1):
        name = "nccl" if number == 1 else f"nccl-{number}"
        nccl_command = f"nccl {shlex.quote(folder)}"
        found.append(
            Chapter(name, f"The job in {folder}", partial(_nccl_document, folder), nccl_view.view, nccl_command, False)
        )
    return tuple(found)


def _nccl_document(folder: str, _: Study) -> Document:
    return nccl.nccl(folder)


@dataclass(frozen=True, slots=True)
class Answers:
    """The documents for a report.

    Attributes:
        documents: each chapter's document, by name.
        unanswered: the reason why a chapter has no document (missing data or an error), by name.
        failed: the errors in `unanswered`: not enough memory or disk, a damaged file.
    """

    documents: dict[str, Document]
    unanswered: dict[str, str]
    failed: dict[str, str]


def compute_answers(study: Study, selected: Sequence[Chapter], memory_mib: int) -> Answers:
    """Compute every chapter.

    An error in one chapter does not affect the others.

    Args:
        memory_mib: memory limit, for messages.
    """
    documents, unanswered, failed = dict[str, Document](), dict[str, str](), dict[str, str]()
    for part in selected:
        try:
            documents[part.name] = part.answer(study)
        except Unanswerable as error:
            unanswered[part.name] = str(error)
        except duckdb.OutOfMemoryException:
            failed[part.name] = str(store.MemoryLimitExceeded(memory_mib))
        except StoreError as error:
            failed[part.name] = str(error)
    return Answers(documents, {**unanswered, **failed}, failed)


def report_document(study: Study, found: Answers) -> dict[str, Document]:
    """Return the `--json` document.

    The key `report` has the opening, the sources and the missing answers. The other keys have the answers.
    """
    notes = [f"There is no answer for {name}: {why}." for name, why in found.unanswered.items()]
    head = {
        **study.head("report", *notes),
        "opening": list(opening_sentences(found.documents, found.unanswered)),
        "unanswered": found.unanswered,
        "failed": sorted(found.failed),
        "sources": [row._asdict() for row in study.query("report_sources", Source)],
    }
    return {"report": head, **found.documents}


def report_html(
    documents: Mapping[str, Document],
    selected: Sequence[Chapter],
    flags: str,
    made_by: str,
    command: str,
    page_assets: Assets,
) -> str:
    """Return the page.

    Args:
        flags: options for each chapter's command.
        made_by, command: how the page was made.
    """
    head = documents["report"]
    chapters = [_chapter(part, documents) for part in selected]
    common = _shared_notes([note for chapter in chapters for note in dict.fromkeys(chapter.notes)])
    report = Report(
        title="Failures, their cost, and nodes to take out",
        coverage=_coverage_text(head),
        opening=tuple(head["opening"]),
        chapters=tuple(_without_notes(chapter, common) for chapter in chapters),
        commands={part.name: _command(part, flags) for part in selected},
        limits=(*common, *LIMITS),
        sources=_sources(head["sources"]),
        made_by=made_by,
        command=command,
    )
    return render_page(report, page_assets)


def _command(part: Chapter, flags: str) -> str:
    command_words = ("healthd fleet", part.command or part.name, flags if part.takes_store_flags else "", "--json")
    return " ".join(filter(None, command_words))


# Limits that apply to every report.
LIMITS = (
    "Faults may be missing for times when healthd did not run or its event lines were lost.",
    "Prometheus records only conditions that are open during a scrape: a condition that opens and closes "
    "between two scrapes is missing.",
    "Slurm completes a job's record when the job ends, so running jobs are incomplete.",
    "A condition near a failure is evidence, not proof: the chapter on causes estimates how many such matches are "
    "due to chance.",
)


def write_report(folder: str, text: str) -> str:
    """Write the report atomically and return its path. Raises UnknownReport, ownership.Untrusted, OSError.

    An existing report keeps its mode. A new one can be read only by its owner, like the store.
    """
    path = os.path.join(folder, FILE)
    with ownership.open_folder(folder, make_mode=0o700):
        pass
    mode = 0o600
    if os.path.lexists(path):
        if os.path.islink(path) or not os.path.isfile(path):
            raise UnknownReport(f"{path} exists and is not a regular file; choose another folder")
        with open(path, encoding="utf-8", errors="replace") as file:
            if not is_report(file.read(20_000)):
                raise UnknownReport(f"{path} exists and is not a healthd report; choose another folder")
        mode = os.stat(path).st_mode & 0o777
    atomic_files.replace_file(path, text, mode)
    return path


def load_assets() -> Assets:
    """Load the page's style and scripts from the installed packages."""
    import vl_convert  # not installed on machines where Spark computes the answers

    folder = Path(__file__).with_name("page")
    return Assets(
        style=(folder / "report.css").read_text("utf-8"),
        bundle=vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"),
        script=(folder / "report.js").read_text("utf-8"),
    )


def _chapter(part: Chapter, documents: Mapping[str, Document]) -> View:
    if part.name in documents:
        return replace(part.view(documents[part.name]), name=part.name)
    head = documents["report"]
    reason, command, flags = head["unanswered"][part.name].partition(": healthd ")
    if part.name in head["failed"]:
        return View(part.name, part.title, (f"This chapter failed: {reason}.",))
    remedy = (f"To get this chapter, ingest the missing source with: healthd {flags}.",) if command else ()
    return View(part.name, part.title, (f"Unknown: {reason}.",), notes=remedy)


def _shared_notes(notes: Sequence[str]) -> tuple[str, ...]:
    """Return the notes that several chapters share, without repetition."""
    return tuple(note for note in dict.fromkeys(notes) if notes.count(note) > 1)


def _without_notes(chapter: View, notes: Sequence[str]) -> View:
    return replace(chapter, notes=tuple(note for note in chapter.notes if note not in notes))


def _coverage_text(head: Document) -> str:
    choice = ", ".join(f"{key} {value}" for key, value in head["filters"].items())
    scope = f"Only {choice}." if choice else "All data in the store."
    return f"From {format_time(head['from_time'])} to {format_time(head['to_time'])} UTC. {scope}"


SOURCES = (
    Column("cluster", "cluster"),
    Column("source", "source"),
    Column("from", "from_time", TIME),
    Column("to", "to_time", TIME),
    Column("rows", lambda row: row["rows_read"] or 0, COUNT),
    Column("unreadable", lambda row: row["rows_unread"] or 0, COUNT),
)


def _sources(rows: Sequence[dict[str, Any]]) -> Table | None:
    return Table("Periods read from each source (UTC)", SOURCES, rows) if rows else None
