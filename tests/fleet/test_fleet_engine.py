"""Tests of `--engine`: which database computes an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import pytest
from fleet_history import BEGIN, END, history, write_parquet
from fleet_rows import store_with

from healthd.cli.fleet import answers, lemons
from healthd.cli.main import main
from healthd.fleet import engine, spark
from healthd.fleet.answers.states import states
from healthd.fleet.answers.study import open_study
from healthd.fleet.database import DuckDb
from tests.cli.test_fleet_command import fleet

pytestmark = pytest.mark.one_python

STORE_ANSWERS = sorted({name.removeprefix("fleet ") for name in (*answers.COMMANDS, *lemons.COMMANDS)} - {"nccl"})


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = {
        table: [tuple(row.values()) for row in rows_of_table]
        for table, rows_of_table in history(Random(1), 20).items()
        if rows_of_table
    }
    return store_with(tmp_path_factory.mktemp("engine") / "db", rows)


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


@pytest.mark.parametrize("name", STORE_ANSWERS)
def test_answer_rejects_unknown_engine(name: str, db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = ["2026-10", "2026-11"] if name == "compare" else []
    assert main(["fleet", name, *sides, "--db", str(db), "--engine", "sprak"]) == 64
    assert "--engine" in capsys.readouterr().err


@pytest.mark.parametrize("master", ["spark", "spark://head:7077"])
def test_answer_runs_on_chosen_engine(
    master: str, db: Path, masters: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    times = ["--from", "2026-10-30", "--to", "2026-11-03"]
    documents = []
    for flags in ([], ["--engine", "duckdb"], ["--engine", master]):
        assert main(["fleet", "states", "--db", str(db), *times, "--json", *flags]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    assert documents[0] == documents[1] == documents[2]
    assert masters == [master]


def test_compare_opens_both_sides_on_chosen_engine(
    db: Path, masters: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sides = ["2026-10-30..2026-11-01", "2026-11-01..2026-11-03"]
    assert main(["fleet", "compare", *sides, "--db", str(db), "--engine", "spark", "--json"]) in (0, 1)
    assert masters == ["spark", "spark"]
    json.loads(capsys.readouterr().out)


def test_study_on_spark_gives_same_document(tmp_path: Path, masters: list[str]) -> None:
    files = write_parquet(history(Random(2), 20), tmp_path)
    with (
        open_study(files, BEGIN, END) as duckdb_study,
        open_study(files, BEGIN, END, engine_name="spark") as spark_study,
    ):
        assert isinstance(duckdb_study.database, DuckDb)
        assert states(duckdb_study) == states(spark_study)


def test_missing_pyspark_is_one_sentence(db: Path) -> None:
    without = "import sys\nsys.modules['pyspark'] = sys.modules['sqlglot'] = None"
    status, out, err = fleet("states", "--db", str(db), "--engine", "spark", program=without)
    assert (status, out, err.count("\n")) == (3, "", 1)
    assert err.endswith("pip install pyspark sqlglot\n")
