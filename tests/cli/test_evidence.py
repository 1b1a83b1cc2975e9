"""`healthd evidence`: exit statuses and documents. tests/cli/output/evidence.txt has the texts."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from healthd.agent.evidence import archive, collect
from healthd.agent.evidence.case import Cause
from healthd.agent.evidence.hardware import GpuPart, Hardware
from healthd.agent.evidence.manifest import Manifest, SavedPart
from healthd.agent.evidence.sources import Entry
from healthd.cli.main import main
from healthd.cli.terminal import REFUSED, UNKNOWN, USAGE_ERROR
from healthd.host.lock import lock_file

OLD, NEW = "20261101T000000Z-gpu_ecc-uncorrectable", "20261129T060000Z-gpu_xid-79"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory with two files."""
    for number, id in enumerate((OLD, NEW)):
        (tmp_path / "kernel").write_text("NVRM: Xid (PCI:0000:1b:00): 79, pid=7, name=secretjob")
        folder = archive.prepare_folder(str(tmp_path))
        parts = (SavedPart("first", 1.0, 0.5, (Entry("kernel.log", ("dmesg",), 0, 0.1, 53),)),)
        hardware = Hardware(driver="570.1", gpus=(GpuPart("0000:1b:00.0", serial="1650"),))
        causes = (Cause("gpu_xid/79 0000:1b:00.0", "a-1"),)
        document = Manifest(
            id, "gpu-1", "0.1", "boot", 1.0 + number, 1.0, causes=causes, parts=parts, hardware=hardware
        )
        files = {"first/kernel.log": str(tmp_path / "kernel")}
        archive.write_archive(f"{folder}/{id}{archive.SUFFIX}", document, files)
    return tmp_path


@pytest.fixture(autouse=True)
def process_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the priority and the orphans of this process as they are."""
    monkeypatch.setattr(collect, "prepare_process", lambda: None)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    try:
        status = main(["evidence", *words])
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    return status, capsys.readouterr().out


def as_document(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    status, out = run(capsys, *words)
    assert status == 0
    found: dict[str, Any] = json.loads(out)
    return found


def test_list(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = as_document(capsys, "list", "--json", "--state-dir", str(state))["evidence"]
    assert [(row["id"], row["parts"], row["error"]) for row in rows] == [(OLD, ["first"], ""), (NEW, ["first"], "")]
    status, out = run(capsys, "list", "--state-dir", str(state))
    assert (status, NEW in out) == (0, True)


def test_list_shows_damaged_file(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path(archive.list_archives(str(state))[0].path).write_bytes(b"x")
    rows = as_document(capsys, "list", "--json", "--state-dir", str(state))["evidence"]
    assert [bool(row["error"]) for row in rows] == [True, False]
    assert run(capsys, "show", OLD, "--state-dir", str(state))[0] == UNKNOWN


def test_list_without_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert as_document(capsys, "list", "--json", "--state-dir", str(tmp_path)) == {"evidence": []}
    assert run(capsys, "show", "--state-dir", str(tmp_path))[0] == REFUSED


def test_show_without_id_is_the_latest(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = as_document(capsys, "show", "--json", "--state-dir", str(state))
    assert document["id"] == NEW
    assert document["hardware"]["gpus"][0]["serial"] == "1650"
    assert {file["file"] for file in document["files"]} == {"manifest.json", "first/kernel.log"}
    status, out = run(capsys, "show", OLD, "--state-dir", str(state))
    assert status == 0
    assert "1650" in out


def test_show_of_unknown_id_is_refused(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "show", "nothing", "--state-dir", str(state))[0] == REFUSED


def test_path(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(capsys, "path", OLD, "--state-dir", str(state))
    assert (status, os.path.isfile(out.strip())) == (0, True)


def test_path_redact_writes_a_copy_once(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("path", "--redact", "--out", str(state / "copy.tar.gz"), "--state-dir", str(state))
    assert run(capsys, *words)[0] == 0
    with tarfile.open(state / "copy.tar.gz") as tar:
        texts = [file.read() for member in tar if (file := tar.extractfile(member))]
    assert not [text for text in texts if b"secretjob" in text or b"gpu-1" in text]
    assert run(capsys, *words)[0] == REFUSED


@pytest.mark.parametrize("words", [("--redact",), ("--out", "x")])
def test_path_needs_redact_and_out_together(
    words: tuple[str, ...], state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "path", *words, "--state-dir", str(state))[0] == USAGE_ERROR


def test_collect_without_request_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "collect", "--runtime-dir", str(tmp_path))[0] == 0
    assert not (tmp_path / "evidence.result").exists()


def test_collect_full_needs_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "collect", "--full", "--runtime-dir", str(tmp_path))[0] == USAGE_ERROR


@pytest.mark.skipif(os.geteuid() != 0, reason="collect requires root")
def test_collect_now_is_refused_while_another_collector_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import fcntl

    lock = lock_file(str(tmp_path), "evidence.lock")
    fcntl.flock(lock, fcntl.LOCK_EX)
    words = ("collect", "--now", "--runtime-dir", str(tmp_path), "--state-dir", str(tmp_path))
    assert run(capsys, *words)[0] == REFUSED
    os.close(lock)
