"""Tests of the report page and its file: self-contained, escaped, and never in place of another file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fleet_history import BEGIN, END, History, history, write_parquet
from hypothesis import given
from hypothesis import strategies as st

from healthd.cli.main import main
from healthd.fleet.answers.study import open_study
from healthd.fleet.tables import TABLES

pytestmark = pytest.mark.one_python

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


class Elements(HTMLParser):
    """Parse the elements of a page as a browser does."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._in_script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data
        else:
            self.text += data


def parse_page(page: str) -> Elements:
    parsed = Elements()
    parsed.feed(page)
    return parsed


@given(JSON)
def test_embed_json_keeps_value_and_cannot_end_element(value: Any) -> None:
    from healthd.fleet.report_page import embed_json

    text = embed_json(value)
    assert json.loads(text) == value
    assert not set("<>&\u2028\u2029") & set(text)


def test_embed_json_rejects_nan() -> None:
    from healthd.fleet.report_page import embed_json

    with pytest.raises(ValueError, match="JSON compliant"):
        embed_json({"n": float("nan")})


@given(st.text(min_size=1, max_size=60))  # a longer name moves the description of a chart into its details
def test_names_become_no_elements(name: str) -> None:
    from fleet_page import hostile_page

    plain, named = parse_page(hostile_page(("a", "b"))), parse_page(hostile_page((name, name)))
    assert [tag for tag, _ in named.found] == [tag for tag, _ in plain.found]
    assert len(named.scripts) == len(plain.scripts)


def test_page_loads_nothing_and_allows_only_own_scripts() -> None:
    from fleet_page import hostile_page

    page = parse_page(hostile_page())
    loads = [
        (tag, name) for tag, attributes in page.found for name in attributes if name in ("src", "srcset", "action")
    ]
    assert loads == []
    assert [a["href"] for _, a in page.found if not str(a.get("href", "#")).startswith("#")] == ["data:,"]
    (policy,) = [str(a["content"]) for _, a in page.found if a.get("http-equiv") == "Content-Security-Policy"]
    digests = re.findall(r"'sha256-([^']+)'", policy)
    programs = page.scripts[-2:]
    assert digests == [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in programs]
    assert policy.startswith("default-src 'none';")
    assert "unsafe-eval" not in policy
    assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]


def test_figure_table_has_numbers_of_chart() -> None:
    from fleet_page import layers_by_kind

    from healthd.fleet.figures import Figure
    from healthd.fleet.report_page import figure_table

    for layers in layers_by_kind(("gpu-1", "gpu-2")).values():
        table = figure_table(Figure("Failures", "Few.", layers))
        assert [column.title for column in table.columns] == ["name", "n", "of"]
        assert table.cell_texts() == [("gpu-1", "1", "of 1"), ("gpu-2", "2", "of 0")]
        assert [column.form.right_aligned for column in table.columns] == [False, True, False]


def test_figure_spec_has_description_and_page_style() -> None:
    from fleet_page import layers_by_kind

    from healthd.fleet.figures import Figure
    from healthd.fleet.report_page import figure_spec

    spec = figure_spec(Figure("Failures", "Few.", layers_by_kind(("gpu-1",))["layers"]))
    assert spec["description"] == "Failures. Few."
    assert spec["config"]["axis"]["labelFontSize"] == 12
    assert [layer["mark"]["type"] for layer in spec["layer"]] == ["rule", "text"]


# --- the file


def test_write_report_replaces_report_and_keeps_mode(tmp_path: Path) -> None:
    from fleet_page import hostile_page

    from healthd.fleet.report import write_report as write_report

    path = Path(write_report(str(tmp_path / "new/folder"), hostile_page()))
    assert (path.name, path.stat().st_mode & 0o777) == ("report.html", 0o600)
    path.chmod(0o644)
    write_report(str(path.parent), hostile_page(("again",)))
    assert path.stat().st_mode & 0o777 == 0o644
    assert "again" in path.read_text("utf-8")
    assert os.listdir(path.parent) == ["report.html"]


@pytest.mark.parametrize("existing", ["file", "empty file", "folder", "link"])
def test_write_report_leaves_other_files(existing: str, tmp_path: Path) -> None:
    from fleet_page import hostile_page

    from healthd.fleet.report import UnknownReport
    from healthd.fleet.report import write_report as write_report

    path = tmp_path / "report.html"
    if existing == "folder":
        path.mkdir()
    elif existing == "link":
        (tmp_path / "other").write_text(hostile_page())
        path.symlink_to("other")
    else:
        path.write_text("<!doctype html><p>mine" if existing == "file" else "")
    with pytest.raises(UnknownReport, match=r"report\.html exists and is not a"):
        write_report(str(tmp_path), hostile_page())
    assert path.is_dir() or path.read_text("utf-8")[:25] in ("<!doctype html><p>mine", "", hostile_page()[:25])
    assert path.is_symlink() == (existing == "link")


# --- reports of stores


def documents_and_page(made: History, folder: Path) -> tuple[dict[str, Any], str]:
    """Return the documents and the page of a store."""
    from healthd.fleet import report
    from healthd.fleet.report_page import Assets

    folder.mkdir(exist_ok=True)
    chapters = report.report_chapters(2.0, 99.0)
    with open_study(write_parquet(made, folder), BEGIN, END) as study:
        documents = report.report_document(study, report.compute_answers(study, chapters, 512))
    return documents, report.report_html(
        documents, chapters, "", "Made by a test:", "make unit", Assets("", "1;", "2;")
    )


@pytest.mark.parametrize("seed", range(6))
def test_each_answer_has_chapter_or_reason(seed: int, tmp_path: Path) -> None:
    """The store of seed 0 has no rows."""
    from healthd.fleet import report

    made = history(Random(seed), 4 * seed) if seed else {name: [] for name in TABLES}
    documents, page = documents_and_page(made, tmp_path)
    parsed = parse_page(page)
    chapters = [str(a["id"]).removeprefix("chapter-") for _, a in parsed.found if "chapter-" in str(a.get("id"))]
    assert chapters == [part.name for part in report.report_chapters()]
    assert len(documents["report"]["opening"]) == 5
    for name, message in documents["report"]["unanswered"].items():
        assert name not in documents
        reason, _, flags = message.partition(": healthd ")
        assert f"Unknown: {reason}." in parsed.text
        assert not flags or f": healthd {flags}." in parsed.text
    json.dumps(documents, allow_nan=False)


def test_report_ignores_order_of_rows(tmp_path: Path) -> None:
    made = history(Random(5), 20)
    first = documents_and_page(made, tmp_path / "a")
    assert first == documents_and_page({name: rows[::-1] for name, rows in made.items()}, tmp_path / "b")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "healthd fleet report: --out DIR or --json is required"),
        *(
            (
                ("--out", "o", "--price", price),
                f'--price: must be the price of a GPU-hour, a number from 0 to 1,000,000,000, got "{price}"',
            )
            for price in ("-1", "nan", "1e308")
        ),
        (("--out", "o", "--sla", "0.99"), '--sla: must be a number from 1 to 100 like 99.5, got "0.99"'),
    ],
)
def test_usage_error_is_one_sentence(flags: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "report", *flags]) == 64
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.out == ""


def test_command_refuses_to_replace_other_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fleet_rows import job, store_with

    db = store_with(
        tmp_path / "db", {"jobs": [job(1, state="COMPLETED", start_time=BEGIN, end_time=BEGIN + 60, gpus=8)]}
    )
    (tmp_path / "out").mkdir()
    (tmp_path / "out/report.html").write_text("mine")
    assert main(["fleet", "report", "--db", str(db), "--out", str(tmp_path / "out")]) == 3
    assert capsys.readouterr().err.startswith(f"healthd fleet: {tmp_path}/out/report.html ")
    assert (tmp_path / "out/report.html").read_text() == "mine"
    assert main(["fleet", "report", "--db", str(db), "--json"]) == 0
    documents = json.loads(capsys.readouterr().out)
    assert documents["report"]["answer"] == "report"
    assert documents["states"]["by_state"][0]["jobs"] == 1


def test_chapter_out_of_memory_leaves_other_chapters(tmp_path: Path) -> None:
    from healthd.fleet import report
    from healthd.fleet.report_page import Assets
    from healthd.fleet.views.states import view

    def too_large(study: Any) -> dict[str, Any]:
        return {"numbers": study.database.rows("SELECT list(n) FROM range(1_000_000_000) AS every(n)")}

    states = report.report_chapters()[0]
    chapters = (report.Chapter("large", "A large chapter", too_large, view), states)
    with open_study(write_parquet(history(Random(1), 4), tmp_path), BEGIN, END, None, 1, 256) as study:
        found = report.compute_answers(study, chapters, 256)
        documents = report.report_document(study, found)
    assert list(found.documents) == ["states"]
    assert "256 MiB" in found.failed["large"]
    assert documents["report"]["failed"] == ["large"]
    page = parse_page(
        report.report_html(documents, chapters, "", "Made by a test:", "make unit", Assets("", "1;", "2;"))
    )
    assert f"This chapter failed: {found.failed['large']}." in page.text


def damage_column(path: str, column: str) -> None:
    """Overwrite the values of one column of a Parquet file."""
    import duckdb

    (chunk,) = duckdb.sql(
        "SELECT least(data_page_offset, coalesce(nullif(dictionary_page_offset, 0), data_page_offset)), "
        f"total_compressed_size FROM parquet_metadata('{path}') WHERE path_in_schema = '{column}'"
    ).fetchall()
    with open(path, "r+b") as file:
        file.seek(chunk[0])
        file.write(b"\xff" * chunk[1])


def test_damaged_table_fails_one_chapter_and_exits_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fleet_rows import job, store_with, ticket

    from healthd.fleet.store import open_for_reading

    jobs = [job(1, state="COMPLETED", start_time=BEGIN, end_time=BEGIN + 60, gpus=8)]
    db = store_with(tmp_path / "db", {"jobs": jobs, "tickets": [ticket("gpu-1", BEGIN, text="fan " * 99)]})
    with open_for_reading(str(db)) as snapshot:
        (path,) = snapshot.files("tickets")
    damage_column(path, "text")
    assert main(["fleet", "report", "--db", str(db), "--out", str(tmp_path / "out")]) == 3
    assert capsys.readouterr().err.startswith(f"healthd fleet report: lemons: {path}: ")
    page = parse_page((tmp_path / "out/report.html").read_text("utf-8"))
    assert "This chapter failed" in page.text
    assert main(["fleet", "report", "--db", str(db), "--json"]) == 3
    documents = json.loads(capsys.readouterr().out)
    assert documents["report"]["failed"] == ["lemons"]
    assert documents["states"]["by_state"][0]["jobs"] == 1


def test_comparison_out_of_memory_fails_chapter_and_exits_with_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from healthd.fleet.answers import compare

    def too_large(study: Any, _: str) -> dict[str, Any]:
        return {"numbers": study.database.rows("SELECT list(n) FROM range(1_000_000_000) AS every(n)")}

    monkeypatch.setattr(compare, "measure_side", too_large)
    db = write_store(tmp_path)
    flags = ("--db", db, "--compare", "partition:p1", "partition:p2", "--threads", "1", "--memory", "1024")
    assert main(["fleet", "report", *flags, "--out", str(tmp_path / "out")]) == 3
    assert " compare: " in capsys.readouterr().err
    assert "This chapter failed" in parse_page((tmp_path / "out/report.html").read_text("utf-8")).text
    assert main(["fleet", "report", *flags, "--json"]) == 3
    documents = json.loads(capsys.readouterr().out)
    assert documents["report"]["failed"] == ["compare"]
    assert "MiB" in documents["report"]["unanswered"]["compare"]
    assert documents["states"]["by_state"][0]["jobs"] == 2


def test_damaged_file_of_comparison_exits_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from healthd.fleet.store import open_for_reading

    db = write_store(tmp_path)
    with open_for_reading(db) as snapshot:
        (path,) = snapshot.files("jobs")
    damage_column(path, "state")
    flags = ("--db", db, "--compare", "partition:p1", "partition:p2")
    assert main(["fleet", "report", *flags, "--out", str(tmp_path / "out")]) == 3
    assert f" compare: {path}: is damaged" in capsys.readouterr().err
    assert (tmp_path / "out/report.html").exists()


def write_store(folder: Path) -> str:
    """Write a store of one job and one ticket, and return its path."""
    from fleet_rows import job, store_with, ticket

    jobs = [
        job(number, partition=f"p{number}", state="COMPLETED", start_time=BEGIN, end_time=BEGIN + 60, gpus=8)
        for number in (1, 2)
    ]
    return str(store_with(folder / "db", {"jobs": jobs, "tickets": [ticket("gpu-1", BEGIN, text="fan " * 99)]}))


def commands_by_chapter(page: str) -> dict[str, list[str]]:
    """Return the command printed below each chapter, split into words."""
    found = {}
    for chapter in re.split(r'(?=<section class="chapter" )', page)[1:]:
        name = re.search(r'id="chapter-([^"]+)"', chapter)
        command = re.search(r"<code>(healthd fleet [^<]*--json)</code>", chapter)
        if name is not None and command is not None:
            found[name[1]] = shlex.split(html.unescape(command[1]))[1:]
    return found


@pytest.fixture(scope="module")
def made_db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fleet_made import Size, create_store

    return create_store(tmp_path_factory.mktemp("report"), Size(jobs=25_000, nodes=70, months=2, seed=5))


@pytest.mark.parametrize("choice", [(), ("--cluster", "made", "--from", "2025-12-05", "--to", "2026-01-20")])
def test_command_below_chapter_prints_its_numbers(
    made_db: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], choice: tuple[str, ...]
) -> None:
    dumps = Path(__file__).parents[1] / "data/flight_recorder"
    flags = ["--db", str(made_db), *choice, "--price", "2", "--sla", "99.9"]
    sides = ("account:a04", "account:a09") if "--from" in choice else ("2025-12", "2026-01")
    flags += ["--compare", *sides, "--nccl", str(dumps)]
    assert main(["fleet", "report", *flags, "--out", str(tmp_path), "--json"]) == 0
    chapters = json.loads(capsys.readouterr().out)
    shown = commands_by_chapter((tmp_path / "report.html").read_text("utf-8"))
    assert set(shown) == set(chapters) - {"report"}
    for name, command in shown.items():
        assert main(command) in (0, 1)
        printed = json.loads(capsys.readouterr().out)
        printed.pop("old", None)  # depends on the time of the command
        assert printed == chapters[name], name
