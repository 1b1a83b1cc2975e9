"""Tests of `healthd fleet ingest` with kills at any moment, a full disk, and a folder that cannot be written.

A rerun continues after the committed data and ends with the same store as an undisturbed run.
HEALTHD_KILLS_SEED: the seed that a failed run printed.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import random
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet_rows import NOVEMBER, Row, content, files
from requirements import require_root
from waiting import until

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("HEALTHD_KILLS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
KILLS = (pytest.param(12), pytest.param(200, marks=(pytest.mark.timeout(1200), pytest.mark.long)))
FILES, ROWS = 4, 100
DAY = 86400
BEGIN = NOVEMBER - 180 * DAY  # all of it is in the past, so every file is complete


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create tickets, jobs and failures of four months, some of them in several files, in which jobs still run."""
    folder = tmp_path_factory.mktemp("history")
    rng = random.Random(12)
    for number in range(FILES):
        tickets, jobs = ["node,opened,closed,text"], ["job_id,nodes,gpus,submit,start,end,state,user"]
        for index in range(ROWS):
            start = BEGIN + rng.randrange(120) * DAY + index
            tickets.append(f"n{index % 9},{start},{start + DAY},{number} words")
            end = "" if rng.random() < 0.3 else start + 3600
            job_number = number * ROWS // 2 + index  # half of the jobs are also in the next file
            job = f"{job_number},n[{index % 5}-{index % 5 + 1}],16,{BEGIN + job_number * DAY // 8},{start},{end}"
            jobs.append(f"{job},{'COMPLETED' if end else 'RUNNING'},u{index % 7}")
        (folder / f"tickets{number}.csv").write_text("\n".join(tickets) + "\n")
        (folder / f"jobs{number}.csv").write_text("\n".join(jobs) + "\n")
    return folder


def command(history: Path, db: Path, *more_arguments: str) -> list[str]:
    tickets, jobs = (sorted(map(str, history.glob(f"{kind}*.csv"))) for kind in ("tickets", "jobs"))
    arguments = [
        "--cluster",
        "c1",
        "--jobs",
        *jobs,
        "--tickets",
        *tickets,
        "--key",
        str(write_key(history)),
        *more_arguments,
    ]
    return [sys.executable, "-m", "healthd", "fleet", "ingest", "--out", str(db), *arguments]


def write_key(history: Path) -> Path:
    file = history / "site.key"
    file.write_text("0123456789abcdef")
    file.chmod(0o600)
    return file


def start_ingest(history: Path, db: Path) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command(history, db), text=True, cwd=ROOT, **pipes)


def wait_for_end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=400)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def run_ingest(history: Path, db: Path) -> tuple[int, str, str]:
    return wait_for_end(start_ingest(history, db))


def stored_rows(db: Path) -> dict[str, list[Row]]:
    """Return the content of the store without the times of reading."""
    tables = content(db)
    tables["ingests"] = [(*values[:5], *values[6:]) for values in tables.get("ingests", [])]
    return tables


@pytest.fixture(scope="module")
def undisturbed(history: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[Row]], float]:
    """Return the content of an undisturbed ingest, and its duration in seconds."""
    db, start = tmp_path_factory.mktemp("undisturbed") / "db", time.monotonic()
    assert run_ingest(history, db)[0] == 0
    duration = time.monotonic() - start
    tables = stored_rows(db)
    assert len(tables["tickets"]) > ROWS
    assert len(tables["jobs"]) > ROWS
    return tables, duration


def ingested_pieces(db: Path) -> list[Row]:
    """Return the ingests that were committed so far."""
    return stored_rows(db)["ingests"] if (db / "manifest.json").exists() else []


@pytest.mark.parametrize("kills", KILLS)
def test_rerun_after_kills_has_same_result(history, undisturbed, tmp_path, kills):
    expected, seconds = undisturbed
    rng = random.Random(SEED)
    print(f"HEALTHD_KILLS_SEED={SEED}")
    kill_count = 0
    while kill_count < kills:
        db = tmp_path / f"db{kill_count}"
        while kill_count < kills and len(ingested_pieces(db)) < 2 * FILES:
            process = start_ingest(history, db)
            time.sleep(rng.uniform(0.2, 0.8) * seconds)
            process.kill()
            process.communicate()
            kill_count += 1
        assert run_ingest(history, db)[0] == 0
        assert stored_rows(db) == expected
        assert files(db) == live_files(db)
        assert not (db / "temporary").exists()


def live_files(db: Path) -> set[str]:
    from healthd.fleet.store import open_for_reading

    with open_for_reading(str(db)) as snapshot:
        return {str(Path(file).relative_to(db)) for table in expected_tables(db) for file in snapshot.files(table)}


def expected_tables(db: Path) -> list[str]:
    return [path.name for path in db.iterdir() if path.is_dir()]


def start_until_first_commit(history: Path, db: Path) -> subprocess.Popen[str]:
    """Start an ingest and wait for its first commit.

    The first manifest is created before the store is locked permanently. On a busy machine the ingest may have ended
    by then.
    """
    process = start_ingest(history, db)
    until(lambda: (db / "manifest.json").exists() and generation(db) > 0, "the first commit is made")
    return process


def generation(db: Path) -> int:
    return int(json.loads((db / "manifest.json").read_bytes())["generation"])


def is_complete(db: Path) -> bool:
    return len(ingested_pieces(db)) == 2 * FILES


def test_ctrl_c_names_same_command_for_continuation(history, undisturbed, tmp_path):
    for db in (tmp_path / f"db{number}" for number in range(20)):
        process = start_until_first_commit(history, db)
        process.send_signal(signal.SIGSTOP)
        has_ended = is_complete(db)
        if not has_ended:
            process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        status, _, err = wait_for_end(process)
        if not has_ended:
            break
    else:
        pytest.fail("each ingest ended before the signal")
    assert (status, err) == (
        130,
        "healthd fleet: stopped; data loaded so far is kept, and the same command continues from there\n",
    )
    assert run_ingest(history, db)[0] == 0
    assert stored_rows(db) == undisturbed[0]


def test_second_simultaneous_ingest_is_refused_and_first_continues(history, undisturbed, tmp_path):
    for db in (tmp_path / f"db{number}" for number in range(20)):
        first = start_until_first_commit(history, db)
        first.send_signal(signal.SIGSTOP)
        if not is_complete(db):
            break
        first.send_signal(signal.SIGCONT)
        wait_for_end(first)
    else:
        pytest.fail("each ingest ended before the signal")
    status, out, err = run_ingest(history, db)
    first.send_signal(signal.SIGCONT)
    sentence = f"healthd fleet: {db}: another ingest (process {first.pid}) is running; wait for it to finish\n"
    assert (status, out, err) == (3, "", sentence)
    assert wait_for_end(first)[0] == 0
    assert stored_rows(db) == undisturbed[0]


def test_rerun_without_new_data_changes_nothing(history, undisturbed, tmp_path):
    assert run_ingest(history, tmp_path / "db")[0] == 0
    before = (tmp_path / "db/manifest.json").read_bytes()
    assert run_ingest(history, tmp_path / "db") == (0, "jobs_file: nothing new\ntickets: nothing new\n", "")
    assert (tmp_path / "db/manifest.json").read_bytes() == before


def test_progress_bar_is_shown_on_terminal_only(history, tmp_path):
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    process = subprocess.Popen(command(history, tmp_path / "db"), stderr=terminal, stdout=subprocess.PIPE, cwd=ROOT)
    os.close(terminal)
    output = b""
    while process.poll() is None or not output:
        try:
            output += os.read(master, 65536)
        except OSError:  # the other end is closed
            break
    os.close(master)
    assert process.communicate()[0].splitlines()[0].startswith(b"jobs_file: ")
    assert process.returncode == 0
    assert b"/4" in output


# --- disks


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a small file system."""
    require_root()
    point = tmp_path / "disk"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m,mode=0755", "tmpfs", point], check=True)
    yield point
    subprocess.run(["umount", "-l", point], check=True)


@pytest.mark.parametrize("limit", ["size=8k", "size=32k", "size=48k", "size=64k", "nr_inodes=6", "nr_inodes=12"])
def test_full_disk_is_one_sentence_and_rerun_with_room_succeeds(history, undisturbed, disk, limit):
    db = disk / "db"
    subprocess.run(["mount", "-o", f"remount,{limit}", disk], check=True)
    status, _, err = run_ingest(history, db)
    assert status == 3
    assert err.count("\n") == 1
    assert "No space left on device" in err
    if (db / "manifest.json").exists():
        stored_rows(db)
        assert files(db) == live_files(db)
    subprocess.run(["mount", "-o", "remount,size=100m,nr_inodes=10000", disk], check=True)
    assert run_ingest(history, db)[0] == 0
    assert stored_rows(db) == undisturbed[0]


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 65536)


def test_disk_filled_by_others_loses_nothing(history, undisturbed, disk):
    db = disk / "db"
    assert run_ingest(history, db)[0] == 0
    (history / "more.csv").write_text(f"node,time,kind\nn1,{NOVEMBER},gpu\n")
    filled = disk / "filled"
    with pytest.raises(OSError, match="No space"):
        fill(filled)
    result = subprocess.run(
        command(history, db, "--failures", str(history / "more.csv")), capture_output=True, text=True, cwd=ROOT
    )
    assert (result.returncode, result.stderr.count("\n")) == (3, 1), result.stderr
    assert stored_rows(db) == undisturbed[0]
    filled.unlink()
    assert run_ingest(history, db)[0] == 0
    assert stored_rows(db) == undisturbed[0]


def test_read_only_folder_is_one_sentence_and_stays_readable(history, undisturbed, disk):
    db = disk / "db"
    assert run_ingest(history, db)[0] == 0
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert run_ingest(history, db) == (3, "", f"healthd fleet: {db}: cannot be written: Read-only file system\n")
    assert stored_rows(db) == undisturbed[0]
    new = disk / "new"
    assert run_ingest(history, new) == (3, "", f"healthd fleet: {new}: cannot be created: Read-only file system\n")
