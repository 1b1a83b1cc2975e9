"""Tests that the running daemon drops invalid input and continues: requests, kernel lines, bursts, a changed ledger."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from healthd_daemon import Healthd, condition, xid_line
from other_user import NOBODY, many_connections

from healthd.agent.conditions.bounds import MAX_CONDITIONS

OTHERS = 1280


@pytest.fixture
def daemon() -> Iterator[Healthd]:
    with Healthd(directory=Path(tempfile.mkdtemp(prefix="healthd."))) as running:
        yield running


def send(daemon: Healthd, line: bytes) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.settimeout(60)
        stream.connect(str(daemon.run_dir / "healthd.sock"))
        stream.sendall(line + b"\n")
        received = b""
        while chunk := stream.recv(1 << 16):
            received += chunk
    answer: dict[str, Any] = json.loads(received)
    return answer


REQUESTS = (
    b'{"command":"looks-left","asked":%s}' % (b"9" * 400),
    b'{"command":"looks-left","asked":%s}' % (b"9" * 5000),
    b'{"command":"looks-left","asked":1e999}',
    b'{"command":"looks-left","asked":NaN}',
    b'{"command":"looks-left","asked":-1}',
    b'{"command":"looks-left","asked":"now"}',
    b'{"command":"looks-left"}',
    b'{"command":%s}' % (b"9" * 400),
    b'{"command":["status"]}',
    b'{"command":"pause","seconds":%s,"why":"x"}' % (b"9" * 400),
    b'{"command":"pause","seconds":NaN,"why":"x"}',
    b'{"command":"ack","code":%s,"seconds":1,"why":"x"}' % (b"9" * 400),
    b'{"command":"repaired","code":{"a":[]},"part":{}}',
    b"[" * 60_000,
    b"\xff\xfe\x00",
    b"null",
)


def test_invalid_request_does_not_end_daemon(daemon: Healthd) -> None:
    for line in REQUESTS:
        assert list(send(daemon, line)) == ["error"], line[:80]
        status = daemon.status()
        assert (status["health"], status["dropped"], status["problems"]) == ("healthy", {}, []), line[:80]


def test_endless_idle_connections_of_other_user_do_not_block_root(daemon: Healthd) -> None:
    daemon.directory.chmod(0o755)
    with many_connections(NOBODY, str(daemon.run_dir / "healthd.sock"), 100_000) as connected:
        assert sum(len(os.read(connected, 1)) for _ in range(80)) == 80, "new connections replace the oldest"
        for words in (
            ["status"],
            ["pause", "--for", "1m", "--why", "a crowd"],
            ["unpause"],
            ["hook", "epilog", "--wait", "20"],
        ):
            flags = ["--runtime-dir", str(daemon.run_dir)]
            answer = subprocess.run(
                [sys.executable, "-m", "healthd", *words, *flags], env=daemon.env, capture_output=True, text=True
            )
            assert (answer.returncode, answer.stderr) == (0, ""), words
            assert "does not answer" not in answer.stdout, words


def test_xid_is_found_among_many_other_faults(daemon: Healthd) -> None:
    """The lines are written at once, and so read at once. Each is a fault of another part."""
    others = [xid_line(31, f"{number:04x}:01:00", "Ch 00000001, MMU Fault") for number in range(1, OTHERS + 1)]
    daemon.kernel_line(xid_line(79), *others)
    status = daemon.wait_until(lambda s: s["kernel_log"]["events_total"] == OTHERS + 1, "all lines are read")
    assert condition(status, "gpu_xid/79") is not None, "the Xid is a condition"
    other_conditions = [entry for entry in status["conditions"] if entry["code"] in ("gpu_xid/31", "gpu_xid/others")]
    assert sum(entry["count"] for entry in other_conditions) == OTHERS, "all faults are counted"
    assert len(status["conditions"]) == MAX_CONDITIONS, "the maximum number of parts have their own condition"
    assert status["health"] == "unhealthy"
    log = daemon.log.read_text()
    assert "kernel: NVRM: Xid (PCI:0000:61:00): 79" in log
    assert re.search(r"WARNING: \d+ kernel events were evaluated but are no longer kept: more than 500", log)


def test_xid_in_backlog_is_found_after_restart(daemon: Healthd) -> None:
    daemon.kernel_line(xid_line(43, text="Ch 00000001"))
    daemon.wait_until(lambda s: condition(s, "gpu_xid/43") is not None, "the log is read")
    daemon.kill()
    others = [xid_line(31, f"{number:04x}:01:00", "Ch 00000001, MMU Fault") for number in range(1, OTHERS + 1)]
    daemon.kernel_line(xid_line(79), *others)
    daemon.start()
    status = daemon.wait_until(lambda s: condition(s, "gpu_xid/79") is not None, "the Xid is a condition")
    assert status["health"] == "unhealthy"


def test_invalid_event_in_ledger_is_dropped_and_others_are_evaluated(daemon: Healthd) -> None:
    daemon.kernel_line(
        xid_line(43, text="Ch 00000001"), xid_line(63, "0000:5d:00", "Row Remapper: New row marked for remapping")
    )
    daemon.wait_until(lambda s: condition(s, "gpu_xid/43") is not None, "the log is read")
    daemon.kill()
    file = daemon.run_dir / "ledger.json"
    ledger = json.loads(file.read_text())
    ledger["events"][0] |= {"kind": "sxid", "code": "3x1"}
    ledger["cursors"]["kmsg"] = {"boot_id": "b", "sequence": 1, "usec": 1e308}
    file.write_text(json.dumps(ledger))
    daemon.start()
    daemon.kernel_line(xid_line(79))
    status = daemon.wait_until(lambda s: condition(s, "gpu_xid/79") is not None, "Xids are still evaluated")
    rule_failed = condition(status, "kernel/rule_failed")
    assert rule_failed is None, "the event was evaluated when it arrived"
    assert status["dropped"] == {"kernel_log": 1}
    assert any(problem.startswith("kernel_log: 1 input was dropped") for problem in status["problems"])
    assert daemon.log.read_text().count("Traceback") == 1
    daemon.kernel_line(xid_line(48, "0000:5d:00", "DBE"))
    status = daemon.wait_until(lambda s: condition(s, "gpu_xid/48") is not None, "the next Xid is evaluated too")
    assert status["dropped"] == {"kernel_log": 1}, "the invalid event is not tried again"


@pytest.mark.parametrize(
    ("old_text", "new_text"),
    [('"count":1', f'"count":{"9" * 400}'), ('"subject":"0000:61:00.0"', '"subject":"\\ud800"')],
    ids=["a number of 400 digits", "a lone surrogate"],
)
def test_ledger_with_impossible_value_is_set_aside(daemon: Healthd, old_text: str, new_text: str) -> None:
    daemon.kernel_line(xid_line(79))
    daemon.wait_until(lambda s: condition(s, "gpu_xid/79") is not None, "the ledger has a condition")
    daemon.kill()
    file = daemon.run_dir / "ledger.json"
    assert old_text in file.read_text()
    file.write_text(file.read_text().replace(old_text, new_text))
    daemon.start()
    assert daemon.status()["health"] in ("healthy", "unhealthy")
    assert (daemon.run_dir / "ledger.json.unreadable").exists()


def test_garbage_from_slurm_is_slurm_problem_and_faults_are_found(tmp_path: Path) -> None:
    """Slurm's programs print random bytes."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sinfo", "scontrol", "squeue"):
        (programs / name).write_text("#!/bin/sh\nhead -c 300000 /dev/urandom\n")
        (programs / name).chmod(0o755)
    env = {"PATH": f"{programs}:/usr/bin:/bin"}
    with Healthd("--mode", "act", env=env, directory=Path(tempfile.mkdtemp(prefix="healthd."))) as daemon:
        daemon.wait_until(lambda s: bool(s["slurm"]["problem"]), "Slurm's problem is reported")
        daemon.kernel_line(xid_line(79))
        status = daemon.wait_until(lambda s: condition(s, "gpu_xid/79") is not None, "the Xid is a condition")
        assert status["health"] == "unhealthy"
