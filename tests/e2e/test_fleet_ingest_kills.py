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
            which = number * ROWS // 2 + index  # half of the jobs are also in the next file
            job = f"{which},n[{index % 5}-{index % 5 + 1}],16,{BEGIN + which * DAY // 8},{start},{end}"
            jobs.append(f"{job},{'COMPLETED' if end else 'RUNNING'},u{index % 7}")
        (folder / f"tickets{number}.csv").write_text("\n".join(tickets) + "\n")
        (folder / f"jobs{number}.csv").write_text("\n".join(jobs) + "\n")
    return folder


def command(history: Path, db: Path, *more: str) -> list[str]:
    tickets, jobs = (sorted(map(str, history.glob(f"{kind}*.csv"))) for kind in ("tickets", "jobs"))
    its = ["--cluster", "c1", "--jobs", *jobs, "--tickets", *tickets, "--key", str(key(history)), *more]
    return [sys.executable, "-m", "healthd", "fleet", "ingest", "--out", str(db), *its]


def key(history: Path) -> Path:
    file = history / "site.key"
    file.write_text("0123456789abcdef")
    file.chmod(0o600)
    return file


def begun(history: Path, db: Path) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command(history, db), text=True, cwd=ROOT, **pipes)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=400)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def ingested(history: Path, db: Path) -> tuple[int, str, str]:
    return ended(begun(history, db))


def kept(db: Path) -> dict[str, list[Row]]:
    """Return the content of the store without the times of reading."""
    found = content(db)
    found["ingests"] = [(*its[:5], *its[6:]) for its in found.get("ingests", [])]
    return found


@pytest.fixture(scope="module")
def undisturbed(history: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[Row]], float]:
    """Return the content of an undisturbed ingest, and its duration in seconds."""
    db, start = tmp_path_factory.mktemp("undisturbed") / "db", time.monotonic()
    assert ingested(history, db)[0] == 0
    taken = time.monotonic() - start
    found = kept(db)
    assert len(found["tickets"]) > ROWS
    assert len(found["jobs"]) > ROWS
    return found, taken


def pieces(db: Path) -> list[Row]:
    """Return the ingests that were committed so far."""
    return kept(db)["ingests"] if (db / "manifest.json").exists() else []


@pytest.mark.parametrize("kills", KILLS)
def test_a_rerun_after_kills_comes_to_the_same(history, undisturbed, tmp_path, kills):
    expected, seconds = undisturbed
    rng = random.Random(SEED)
    print(f"HEALTHD_KILLS_SEED={SEED}")
    met = 0
    while met < kills:
        db = tmp_path / f"db{met}"
        while met < kills and len(pieces(db)) < 2 * FILES:
            process = begun(history, db)
            time.sleep(rng.uniform(0.2, 0.8) * seconds)
            process.kill()
            process.communicate()
            met += 1
        assert ingested(history, db)[0] == 0
        assert kept(db) == expected
        assert files(db) == live(db)
        assert not (db / "temporary").exists()


def live(db: Path) -> set[str]:
    from healthd.fleet.store import open_for_reading

    with open_for_reading(str(db)) as snapshot:
        return {str(Path(file).relative_to(db)) for table in expected_tables(db) for file in snapshot.files(table)}


def expected_tables(db: Path) -> list[str]:
    return [path.name for path in db.iterdir() if path.is_dir()]


def until_it_has_begun(history: Path, db: Path) -> subprocess.Popen[str]:
    """Start an ingest and wait for its first commit.

    The first manifest is created before the store is locked permanently. On a busy machine the ingest may have ended
    by then.
    """
    process = begun(history, db)
    until(lambda: (db / "manifest.json").exists() and generation(db) > 0, "the first commit is made")
    return process


def generation(db: Path) -> int:
    return int(json.loads((db / "manifest.json").read_bytes())["generation"])


def is_over(db: Path) -> bool:
    return len(pieces(db)) == 2 * FILES


def test_ctrl_c_says_that_the_same_command_goes_on(history, undisturbed, tmp_path):
    for db in (tmp_path / f"db{number}" for number in range(20)):
        process = until_it_has_begun(history, db)
        process.send_signal(signal.SIGSTOP)
        over = is_over(db)
        if not over:
            process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        status, _, err = ended(process)
        if not over:
            break
    else:
        pytest.fail("each ingest ended before the signal")
    assert (status, err) == (
        130,
        "healthd fleet: stopped; earlier commits are kept, and the same command continues from there\n",
    )
    assert ingested(history, db)[0] == 0
    assert kept(db) == undisturbed[0]


def test_a_second_ingest_at_once_is_one_sentence_and_the_first_goes_on(history, undisturbed, tmp_path):
    for db in (tmp_path / f"db{number}" for number in range(20)):
        first = until_it_has_begun(history, db)
        first.send_signal(signal.SIGSTOP)
        if not is_over(db):
            break
        first.send_signal(signal.SIGCONT)
        ended(first)
    else:
        pytest.fail("each ingest ended before the signal")
    status, out, err = ingested(history, db)
    first.send_signal(signal.SIGCONT)
    sentence = f"healthd fleet: {db}: another ingest (process {first.pid}) is running: wait for it\n"
    assert (status, out, err) == (3, "", sentence)
    assert ended(first)[0] == 0
    assert kept(db) == undisturbed[0]


def test_a_rerun_reads_nothing_and_writes_nothing(history, undisturbed, tmp_path):
    assert ingested(history, tmp_path / "db")[0] == 0
    before = (tmp_path / "db/manifest.json").read_bytes()
    assert ingested(history, tmp_path / "db") == (0, "jobs_file: nothing new\ntickets: nothing new\n", "")
    assert (tmp_path / "db/manifest.json").read_bytes() == before


def test_on_a_terminal_there_is_a_bar_and_elsewhere_none(history, tmp_path):
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    process = subprocess.Popen(command(history, tmp_path / "db"), stderr=its, stdout=subprocess.PIPE, cwd=ROOT)
    os.close(its)
    shown = b""
    while process.poll() is None or not shown:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    assert process.communicate()[0].splitlines()[0].startswith(b"jobs_file: ")
    assert process.returncode == 0
    assert b"/4" in shown


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
def test_a_full_disk_is_one_sentence_and_with_room_it_goes_on(history, undisturbed, disk, limit):
    db = disk / "db"
    subprocess.run(["mount", "-o", f"remount,{limit}", disk], check=True)
    status, _, err = ingested(history, db)
    assert status == 3
    assert err.count("\n") == 1
    assert "No space left on device" in err
    if (db / "manifest.json").exists():
        kept(db)
        assert files(db) == live(db)
    subprocess.run(["mount", "-o", "remount,size=100m,nr_inodes=10000", disk], check=True)
    assert ingested(history, db)[0] == 0
    assert kept(db) == undisturbed[0]


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 65536)


def test_a_disk_that_is_filled_by_others_loses_nothing(history, undisturbed, disk):
    db = disk / "db"
    assert ingested(history, db)[0] == 0
    (history / "more.csv").write_text(f"node,time,kind\nn1,{NOVEMBER},gpu\n")
    filled = disk / "filled"
    with pytest.raises(OSError, match="No space"):
        fill(filled)
    done = subprocess.run(
        command(history, db, "--failures", str(history / "more.csv")), capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stderr.count("\n")) == (3, 1), done.stderr
    assert kept(db) == undisturbed[0]
    filled.unlink()
    assert ingested(history, db)[0] == 0
    assert kept(db) == undisturbed[0]


def test_a_folder_that_cannot_be_written_is_one_sentence_and_can_be_asked(history, undisturbed, disk):
    db = disk / "db"
    assert ingested(history, db)[0] == 0
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert ingested(history, db) == (3, "", f"healthd fleet: {db}: cannot be written: Read-only file system\n")
    assert kept(db) == undisturbed[0]
    new = disk / "new"
    assert ingested(history, new) == (3, "", f"healthd fleet: {new}: cannot be created: Read-only file system\n")
