"""Tests of `--engine`: which database computes an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import pytest
from fleet_history import BEGIN, END, history, write
from fleet_rows import made

from healthd.cli.fleet import answers, lemons
from healthd.cli.main import main
from healthd.fleet import engine, spark
from healthd.fleet.answers.states import states
from healthd.fleet.answers.study import open_study
from healthd.fleet.database import DuckDb
from tests.fleet.test_fleet_cli import fleet

pytestmark = pytest.mark.one_python

OF_A_STORE = sorted({name.removeprefix("fleet ") for name in (*answers.COMMANDS, *lemons.COMMANDS)} - {"nccl"})


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = {table: [tuple(one.values()) for one in some] for table, some in history(Random(1), 20).items() if some}
    return made(tmp_path_factory.mktemp("engine") / "db", rows)


@pytest.fixture
def masters(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace Spark by DuckDB. Return the list of masters of the started sessions."""
    started: list[str] = []

    @contextmanager
    def session(master: str, threads: int, memory_mib: int) -> Iterator[ExitStack]:
        started.append(master)
        with ExitStack() as databases:
            yield databases

    def database(session: ExitStack, files: engine.Files) -> DuckDb:
        return DuckDb(session.enter_context(engine.open_database(files, 1, 512)), files)

    monkeypatch.setattr(spark, "session", session)
    monkeypatch.setattr(spark, "Spark", database)
    return started


@pytest.mark.parametrize("name", OF_A_STORE)
def test_each_answer_refuses_an_engine_that_is_none(name: str, db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = ["2026-10", "2026-11"] if name == "compare" else []
    assert main(["fleet", name, *sides, "--db", str(db), "--engine", "sprak"]) == 64
    assert "--engine" in capsys.readouterr().err


@pytest.mark.parametrize("master", ["spark", "spark://head:7077"])
def test_an_answer_runs_on_the_engine_of_the_flag(
    master: str, db: Path, masters: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    times = ["--from", "2026-10-30", "--to", "2026-11-03"]
    documents = []
    for flags in ([], ["--engine", "duckdb"], ["--engine", master]):
        assert main(["fleet", "states", "--db", str(db), *times, "--json", *flags]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    assert documents[0] == documents[1] == documents[2]
    assert masters == [master]


def test_a_comparison_opens_both_sides_on_the_engine(
    db: Path, masters: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sides = ["2026-10-30..2026-11-01", "2026-11-01..2026-11-03"]
    assert main(["fleet", "compare", *sides, "--db", str(db), "--engine", "spark", "--json"]) in (0, 1)
    assert masters == ["spark", "spark"]
    json.loads(capsys.readouterr().out)


def test_a_study_on_spark_gives_the_same_document(tmp_path: Path, masters: list[str]) -> None:
    files = write(history(Random(2), 20), tmp_path)
    with open_study(files, BEGIN, END) as ours, open_study(files, BEGIN, END, engine_name="spark") as theirs:
        assert isinstance(ours.database, DuckDb)
        assert states(ours) == states(theirs)


def test_an_answer_without_pyspark_reports_what_to_install(db: Path) -> None:
    without = "import sys\nsys.modules['pyspark'] = sys.modules['sqlglot'] = None"
    status, out, err = fleet("states", "--db", str(db), "--engine", "spark", program=without)
    assert (status, out, err.count("\n")) == (3, "", 1)
    assert err.endswith("pip install pyspark sqlglot\n")
