"""Tests that hold for every answer of `healthd fleet`, over small generated histories with many edge cases."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fleet_history import BEGIN, HOUR, NODES, History, history
from fleet_rows import Row, put, row, store_with
from fleet_views import text_of, view_of

from healthd.cli.fleet import answers, lemons
from healthd.cli.main import main
from healthd.cli.terminal import CONTROL_CHARACTERS
from healthd.common.page import Page
from healthd.fleet.answers.document import no_findings
from healthd.fleet.answers.study import open_study
from healthd.fleet.store import StoreError, open_for_reading, open_for_writing
from healthd.fleet.tables import TABLES
from tests.cli.test_fleet_command import ROOT, fleet
from tests.fleet.test_fleet_query import ROWS_WITH_TIME

pytestmark = pytest.mark.one_python

Document = dict[str, Any]
PYTHON_VALUES = re.compile(r"\bNone\b(?! of)|\bnan\b|\binf\b")  # Python's values where the text must have "-"

WITHOUT_STORE, WITH_TWO_SIDES = {"nccl"}, {"compare"}
NAMES = sorted({name.removeprefix("fleet ") for name in (*answers.COMMANDS, *lemons.COMMANDS)} - WITHOUT_STORE)
TIMES = ("--from", "2026-10-30T22:00:00", "--to", "2026-11-03T05:00:00")
MODELS, SWITCHES, PARTITIONS, ACCOUNTS = ("H100", "A100"), ("leaf1", "leaf2"), ("train", "debug"), ("speech", "vision")
# Required flags of an answer, besides the store and its period.
FLAGS: dict[str, tuple[str, ...]] = {
    "compare": ("2026-10-30..2026-11-01", "2026-11-01..2026-11-03"),
    "ettr": ("--gpus", "1024"),
}
CHOICES = (
    ("--cluster", "c1"),
    ("--partition", "train"),
    ("--model", "H100"),
    ("--account", "speech"),
    ("--switch", "leaf2"),
)


def site_history(random: Random, size: int = 30) -> History:
    """Return a history with every field that flags can choose, and with large jobs."""
    site = history(random, size)
    for job in site["jobs"]:
        job["partition"] = random.choice((*PARTITIONS, "train,debug", None))
        job["account"] = random.choice((*ACCOUNTS, None))
    for number, (cluster, node) in enumerate((c, n) for c in ("c1", "c2") for n in NODES):
        site["nodes"] = [
            *[node_row for node_row in site["nodes"] if (node_row["cluster"], node_row["node"]) != (cluster, node)],
            {
                **dict.fromkeys(TABLES["nodes"].columns),
                "cluster": cluster,
                "node": node,
                "gpu_model": MODELS[number % 2],
                "switch": SWITCHES[number // 2 % 2],
                "gpus": 8,
                "partitions": random.choice((*PARTITIONS, None)),
                "rack": f"r{number}",
            },
        ]
    # Make sure that every name in CHOICES occurs.
    for job, (partition, account) in zip(site["jobs"], (("train", "speech"), ("debug", "vision")), strict=False):
        job["partition"], job["account"] = partition, account
    return site


def write_store(site: History, folder: Path, order: Random | None = None) -> Path:
    """Write the store of a history; with `order`, its rows are shuffled and written in two steps."""
    rows: dict[str, list[Row]] = {
        table: [tuple(values.values()) for values in table_rows] for table, table_rows in site.items() if table_rows
    }
    if order is None:
        return store_with(folder, rows)
    mixed = {table: order.sample(table_rows, len(table_rows)) for table, table_rows in rows.items()}
    first = {table: table_rows[: len(table_rows) // 2] for table, table_rows in mixed.items()}
    # Rows with a common key come in one step, because a later step replaces them.
    whole = {table: table_rows for table, table_rows in mixed.items() if TABLES[table].row_key_columns}
    return store_with(
        folder,
        {**first, **whole},
        {t: table_rows[len(table_rows) // 2 :] for t, table_rows in mixed.items() if t not in whole},
    )


def run_answer(name: str, db: Path, *flags: str) -> tuple[int, str, str]:
    """Run `healthd fleet NAME` in this process. Return the exit status, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["fleet", name, "--db", str(db), *FLAGS.get(name, ()), *flags])
    return status, out.getvalue(), err.getvalue()


def document(name: str, db: Path, *flags: str) -> Document | None:
    """Return the answer, or None if the command exits with 3 and one sentence."""
    status, out, err = run_answer(name, db, "--json", *(flags if "--from" in flags else (*TIMES, *flags)))
    if status == 3:
        assert out == ""
        assert re.fullmatch(r"healthd fleet: [^\n]+\n", err), err
        return None
    assert status in (0, 1), err
    assert err == ""
    answer: Document = json.loads(out, parse_constant=not_json)
    return answer


def not_json(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for every value except lists and objects."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from leaves(value, name)
    elif isinstance(node, list):
        for value in node:
            yield from leaves(value, key)
    else:
        yield key, node


def round_numbers(node: Any) -> Any:
    """Round fractions to nine digits, because two threads sum in any order."""
    if isinstance(node, dict):
        return {name: round_numbers(value) for name, value in node.items()}
    if isinstance(node, list):
        return [round_numbers(value) for value in node]
    return float(f"{node:.9g}") if isinstance(node, float) else node


def check_document(name: str, answer: Document) -> None:
    """Assert properties of every document, its text and its view."""
    module = importlib.import_module(f"healthd.fleet.answers.{name}")
    assert list(answer)[:6] == ["answer", "version", "from_time", "to_time", "filters", "notes"]
    assert (answer["answer"], answer["version"]) == (name, 1)
    assert all(isinstance(note, str) and note.strip() for note in answer["notes"])
    for key, value in leaves(answer):
        if re.search(r"(^|_)share($|_)", key) and value is not None:
            assert 0 <= value <= 1 + 1e-9, (key, value)
    for columns in (40, 80, 120):
        text = text_of(answer, Page(columns))
        assert text.endswith("\n")
        assert not CONTROL_CHARACTERS.search(text), CONTROL_CHARACTERS.search(text)
        assert not PYTHON_VALUES.search(text), text
    assert module.has_findings(answer) in (True, False)
    view = view_of(answer)
    assert view.name == name
    for table in view.tables:
        assert {len(cells) for cells in table.cell_texts()} <= {len(table.columns)}
        assert all(isinstance(cell, str) for cells in table.cell_texts() for cell in cells)
    texts = [view.title, *view.sentences, *view.notes, *(figure.description for figure in view.figures)]
    assert not [
        entry for entry in texts if CONTROL_CHARACTERS.search(entry) or not entry.strip() or PYTHON_VALUES.search(entry)
    ]
    json.dumps([figure.spec for figure in view.figures], allow_nan=False)


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(site_history(Random(7)), tmp_path_factory.mktemp("answers") / "db")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of `db` with its rows in another order."""
    return write_store(site_history(Random(7)), tmp_path_factory.mktemp("mixed") / "db", Random(1))


@pytest.fixture(scope="module")
def store_of_seed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return the store of the history of a seed; its size depends on the seed."""

    @functools.cache
    def made_of(seed: int) -> Path:
        size = (0, 1, 4, 12, 30)[seed % 5]
        return write_store(site_history(Random(seed), size), tmp_path_factory.mktemp(f"seed{seed}") / "db")

    return made_of


@pytest.fixture(scope="module")
def store_of_one_row(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a store that has one row, in the given table."""

    @functools.cache
    def made_of(table: str) -> Path:
        values = ROWS_WITH_TIME.get(table, {"cluster": "c1", "node": "n", "db_index": 1})
        entry = row(table, **{key: value for key, value in values.items() if key in TABLES[table].columns})
        return store_with(tmp_path_factory.mktemp(table) / "db", {table: [entry]})

    return made_of


@functools.cache
def full_answer(name: str, db: Path) -> Document | None:
    """Return the document of the whole store. Tests share it, so it must not be changed."""
    return document(name, db)


@pytest.mark.parametrize("seed", [0, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_answer_of_any_history_is_json_with_text_and_view(
    name: str, seed: int, store_of_seed: Callable[[int], Path]
) -> None:
    answer = full_answer(name, store_of_seed(seed))
    if answer is not None:
        check_document(name, answer)


@pytest.mark.parametrize("seed", [0, 2, 3, 7])
def test_compare_of_any_history_has_text_and_view(seed: int, store_of_seed: Callable[[int], Path]) -> None:
    """`compare` has a period for each side, so the tests of answers with one period do not cover it."""
    status, out, err = run_answer("compare", store_of_seed(seed), "--json")
    assert (status in (0, 1), err) == (True, "")
    check_document("compare", json.loads(out, parse_constant=not_json))


@pytest.mark.parametrize("name", NAMES)
def test_default_history_has_answer(name: str, db: Path) -> None:
    """Without it, the tests here could compare empty answers."""
    answer = full_answer(name, db)
    assert answer is not None
    assert [value for key, value in leaves(answer) if value not in (None, 0, "", False) and key != "notes"]


@pytest.mark.parametrize("name", NAMES)
def test_answer_ignores_row_order_and_threads(name: str, db: Path, mixed: Path) -> None:
    assert round_numbers(document(name, mixed, "--threads", "2")) == round_numbers(document(name, db, "--threads", "1"))


@pytest.mark.parametrize("table", sorted(TABLES))
@pytest.mark.parametrize("name", NAMES)
def test_store_of_one_row_has_answer_or_sentence(
    name: str, table: str, store_of_one_row: Callable[[str], Path]
) -> None:
    answer = document(name, store_of_one_row(table))
    if answer is not None:
        check_document(name, answer)


@pytest.mark.parametrize("name", NAMES)
def test_incomplete_jobs_and_nodes_are_no_error(name: str, tmp_path: Path) -> None:
    times = {"submit_time": BEGIN, "start_time": BEGIN + HOUR, "end_time": BEGIN + 2 * HOUR}
    jobs = [
        row("jobs", cluster="c1", db_index=1, job_id=1, state="NODE_FAIL", gpus=256, **times),
        row("jobs", cluster="c1", db_index=2, job_id=2, state="FAILED", gpus=8, **{**times, "end_time": BEGIN}),
        row("jobs", cluster="c1", db_index=3, job_id=3, state="COMPLETED", gpus=None, nodes=0, **times),
        row("jobs", cluster="c1", db_index=4, job_id=3, state="", gpus=-8, **{**times, "start_time": None}),
        row("jobs", cluster="c1", db_index=5, job_id=5, state="RUNNING", gpus=1, end_time=BEGIN + HOUR),
    ]
    nodes = [row("nodes", cluster="c1", node="\x1b[31mred\u202e", gpu_model="H\x07100", switch="\u2028")]
    states = [row("node_states", cluster="c1", node="n", start_time=BEGIN + HOUR, end_time=BEGIN, state="DOWN")]
    answer = document(name, store_with(tmp_path / "db", {"jobs": jobs, "nodes": nodes, "node_states": states}))
    if answer is not None:
        check_document(name, answer)


@pytest.mark.parametrize(
    ("name", "choice"),
    # An account is chosen like a partition, a switch like a model.
    [(name, choice) for name in NAMES for choice in (CHOICES if name == "states" else CHOICES[:3])],
    ids=str,
)
def test_choice_never_increases_counts(name: str, choice: tuple[str, str], db: Path) -> None:
    whole, part = full_answer(name, db), document(name, db, *choice)
    assert whole is not None
    if part is not None:
        assert part["filters"] == {choice[0].removeprefix("--"): choice[1]}
        check_document(name, part)
        for total in TOTALS.get(name, ()):
            assert total(part) <= total(whole) + 1e-6


# Counts that a choice must not increase.
Total = Callable[[Document], float]


def summed(rows: str, key: str) -> Total:
    return lambda answer: sum(entry[key] for entry in answer[rows] if entry[key] is not None)


def count(rows: str) -> Total:
    return lambda answer: len(answer[rows])


def value(key: str) -> Total:
    return lambda answer: float(answer[key])


TOTALS: dict[str, tuple[Total, ...]] = {
    "attribution": (count("jobs"),),
    "lemons": (summed("fleets", "nodes"),),
    "states": (summed("by_state", "jobs"), summed("by_state", "gpu_seconds")),
}
# The shares of these rows sum to one.
WHOLES = {"states": (("by_state", "share_of_jobs"), ("by_state", "share_of_gpu_time"))}


@pytest.mark.parametrize(("name", "rows", "key"), [(n, *pair) for n, pairs in WHOLES.items() for pair in pairs])
@pytest.mark.parametrize("seed", [4, 9, 14])  # of the largest histories
def test_shares_of_whole_sum_to_one(
    name: str, rows: str, key: str, seed: int, store_of_seed: Callable[[int], Path]
) -> None:
    answer = full_answer(name, store_of_seed(seed))
    assert answer is not None
    shares = [entry[key] for entry in answer[rows]]
    assert shares
    assert sum(shares) == pytest.approx(1)


# --- invalid flags and unreadable stores


@pytest.mark.parametrize("name", ["alarms", "ettr", "states"])  # all answers have the same choice flags
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--partition", "trian"), 'the partition "trian" does not occur in the store; did you mean "train"?'),
        (("--model", "B200"), 'the model "B200" does not occur in the store'),
        (("--switch", "x"), 'the switch "x" does not occur in the store'),
        (("--account", "'; DROP"), 'the account "'),
        (("--cluster", "c3"), 'the cluster "c3" does not occur in the store'),
        (("--from", "2026-11-02", "--to", "2026-11-01"), "(--from) is not before"),
        (("--from", "soon"), '--from: "soon" is not a time; examples: 2026-11-01'),
        (("--from", "2026-13-01"), '--from: "2026-13-01" is not a time; examples: 2026-11-01'),
        (("--switch", ""), "argument --switch: must be a name, got an empty string"),
        (("--cluster", ""), "argument --cluster: must be a name, got an empty string"),
        (("--from", "1970-01-01"), "is too long: at most 9999 days"),
        (("--threads", "0"), "argument --threads: must be a whole number from 1 to 256"),
        (("--threads", "257"), "argument --threads: must be a whole number from 1 to 256"),
        (("--memory", "much"), "argument --memory: must be a whole number of MiB, at least 256"),
        (("--memory", "255"), "argument --memory: must be a whole number of MiB, at least 256"),
        (("--wrong",), "--wrong"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_invalid_flags_are_one_sentence(name: str, flags: tuple[str, ...], message: str, db: Path) -> None:
    status, out, err = run_answer(name, db, *flags)
    assert (status, out, err.count("\n")) == (64, "", 1), err
    assert err.startswith("healthd fleet")
    assert message in err


def test_page_lists_answers_with_and_without_findings() -> None:
    page = (Path(ROOT) / "docs/fleet-answers.md").read_text(encoding="utf-8")
    text = " ".join(page.split()).partition("The findings are: ")[2].partition(" have no findings and exit with 0")[0]
    finds, how_much = text.split(". ")
    quiet = {
        entry
        for entry in NAMES
        if importlib.import_module(f"healthd.fleet.answers.{entry}").has_findings is no_findings
    }
    assert set(re.findall(r"`([a-z]+)`", how_much)) == quiet
    assert set(re.findall(r"`([a-z]+)`", finds)) == {*NAMES, *WITHOUT_STORE, *WITH_TWO_SIDES} - quiet


@pytest.mark.parametrize("name", NAMES)
def test_empty_or_missing_store_is_one_sentence(name: str, tmp_path: Path) -> None:
    for folder in (store_with(tmp_path / "empty"), tmp_path / "none"):
        status, out, err = run_answer(name, folder)
        assert (status, out, err.count("\n")) == (3, "", 1)
        assert str(folder) in err


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", ["cut", "zeros"])
def test_damaged_file_is_named(name: str, damage: str, db: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(db, tmp_path / "db"))
    for path in folder.glob("*/*/*.parquet"):
        whole = path.read_bytes()
        half = len(whole) // 2
        # The end of a Parquet file has the positions and statistics of its columns.
        path.write_bytes(whole[:half] if damage == "cut" else whole[:4] + bytes(half) + whole[half + 4 :])
    status, out, err = run_answer(name, folder, *TIMES)
    assert (status, out, err.count("\n")) == (3, "", 1), err
    assert re.match(rf"healthd fleet: {re.escape(str(folder))}/[a-z_]+/month=[^/]+/\d+\.parquet: ", err), err


def test_answer_exceeding_memory_is_one_sentence(db: Path) -> None:
    with open_for_reading(str(db)) as snapshot:
        files = {table: snapshot.files(table) for table in TABLES}
    needs = pytest.raises(StoreError, match="the answer needs more than 4 MiB; raise the limit with --memory")
    with needs, open_study(files, 0, 4_000_000_000, threads=2, memory_mib=4) as study:
        study.database.rows("SELECT list(n) AS all FROM (SELECT a.n FROM numbers AS a, numbers AS b)")


# --- endings, and concurrent writes


def test_closed_reader_is_no_error(db: Path) -> None:
    """One answer is enough: every answer is written in the same way."""
    reading, writing_end = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "healthd", "fleet", "states", "--db", str(db), "--json"],
            stdout=writing_end,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            timeout=120,
        )
    finally:
        os.close(writing_end)
    assert (done.returncode in (0, 1), done.stderr) == (True, b"")


# The signal arrives while DuckDB, which handles signals itself, runs an endless query.
INTERRUPTED = """
import os, signal, threading
from healthd.fleet.answers import study
def _create_chosen_tables(self):
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    self.database.rows("SELECT max(hash(a.n, b.n, c.n)) FROM numbers AS a, numbers AS b, numbers AS c")
study.Study._create_chosen_tables = _create_chosen_tables
"""


def test_ctrl_c_ends_computation_quietly(db: Path) -> None:
    status, out, err = fleet("states", "--db", db, program=INTERRUPTED)
    assert (status, out, err) == (130, "", "")


def test_store_written_during_answer_is_read_unchanged(
    db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from healthd.fleet.answers import study

    folder = Path(shutil.copytree(db, tmp_path / "db"))
    before = full_answer(NAMES[0], db)
    new_rows = {
        "jobs": [row("jobs", cluster="c1", db_index=10_000 + n, job_id=1, submit_time=BEGIN) for n in range(50)]
    }
    choose = study.Study._create_chosen_tables

    def while_it_is_written(self: study.Study) -> None:
        with open_for_writing(str(folder)) as store:  # replaces its months: no manifest names the old files
            put(store, new_rows)
        choose(self)

    monkeypatch.setattr(study.Study, "_create_chosen_tables", while_it_is_written)
    assert document(NAMES[0], folder) == before
    monkeypatch.undo()
    assert document("states", folder) is not None
