"""The event stream of the real daemon: each event once, despite kills, frozen disks and full disks."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from frozen import FrozenFilesystem, wait_for_d_state
from healthd_daemon import EACH_SECOND, Healthd, condition, rounds, xid
from machine import Machine
from requirements import require_root
from slurm_cluster import SlurmCluster, running_job
from waiting import until

from tests.events.test_event import script

WARNS = '[checks.gpu_xid]\nseverity = { "gpu_xid/79" = "warning" }\n'


def lines(state: Path) -> list[dict[str, Any]]:
    """Return the complete lines; the last one may be only partly written."""
    text = (state / "events.jsonl").read_text("ascii") if (state / "events.jsonl").exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def names(told: list[dict[str, Any]]) -> list[str]:
    """Leave out the events of each start about checks and decisions."""
    left_out = ("check_enabled", "decision", "alive")
    return [f"{e['event']} {e.get('stage', '')}".strip() for e in told if e["event"] not in left_out]


def is_whole(told: list[dict[str, Any]]) -> bool:
    """Check that each stream has each number once, from the first to the last."""
    streams: dict[str, list[int]] = {}
    for event in told:
        streams.setdefault(event["stream_id"], []).append(event["seq"])
    return all(numbers == list(range(1, len(numbers) + 1)) for numbers in streams.values())


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=1, gpus=0) as running:
        yield running


def test_a_fault_from_its_line_to_the_resume_is_told_once_though_the_daemon_is_killed(
    cluster: SlurmCluster, node: str, machine: Machine, tmp_path: Path
) -> None:
    from jsonschema import Draft202012Validator

    job = running_job(cluster, node)
    state = tmp_path / "state"
    daemon = Healthd(
        *("--mode", "act", "--node-name", node, "--root", str(machine.root)),
        directory=tmp_path,
        config=EACH_SECOND + WARNS,
        env=cluster.env,
        fake_nvml=str(machine.scenario),
    )
    with daemon:
        daemon.kernel_line(xid(79))
        until(lambda: "opened" in names(lines(state)), "the condition is in the stream")
        daemon.kill()
        daemon.start()
        assert daemon.process is not None
        daemon.config.write_text(daemon.config.read_text().replace(WARNS, ""))
        daemon.process.send_signal(1)  # SIGHUP
        until(lambda: "drain confirmed" in names(lines(state)), "the drain is in the stream")
        daemon.kill()
        daemon.start()
        assert cluster.wait_job(job, "PENDING")["Restarts"] == "1"
        rounds(daemon, 2)
        daemon.kill()
        daemon.start()
        assert "done" in daemon.ask(command="repaired", code="gpu_xid/79")
        cluster.wait_state(node, "IDLE", without=("DRAIN",))
        until(lambda: "resume confirmed" in names(lines(state)), "the resume is in the stream")
        assert daemon.stop_at_rest() == 0
    told = lines(state)
    assert is_whole(told)
    once = Counter(names(told))
    once.pop("requeue confirmed", None)  # missing if the daemon was killed before it saw the job gone
    starts = once.pop("started")
    changed = once.pop("check_changed")
    assert (starts, changed) == (4, 1)
    assert once == Counter(
        [
            *("opened", "worsened", "drain sent", "drain confirmed", "requeue sent"),
            *("repaired", "cleared", "resume sent", "resume confirmed", "stopped"),
        ]
    )
    of = {e["event"]: e for e in told}
    assert of["worsened"]["was"] == "warning"
    assert len({of[name]["condition"] for name in ("opened", "worsened", "cleared")}) == 1
    assert of["requeue"]["job"] == job
    assert [e["clean"] for e in told if e["event"] == "started"] == [False] * 4
    assert told[-1]["event"] == "stopped"
    assert told[-1]["cluster"] != "", "slurm.conf has been read by then"
    assert {name for e in told if e["event"] == "alive" for name in e["checks"]} >= {"gpu_xid", "gpu_ecc"}
    validator = Draft202012Validator(script().schema())
    for event in told:
        validator.validate(event)


def test_a_disk_that_hangs_delays_the_stream_and_neither_the_daemon_nor_its_stop(tmp_path: Path) -> None:
    with FrozenFilesystem(tmp_path) as disk:
        state = disk.path / "state"
        daemon = Healthd("--node-name", "n1", "--state-dir", str(state), directory=tmp_path, config=EACH_SECOND)
        with daemon:
            until(lambda: "started" in names(lines(state)), "the start is in the stream")
            with disk.frozen():
                daemon.kernel_line(xid(79))
                daemon.until(lambda s: condition(s, "gpu_xid/79") is not None, "the daemon continues")
                wait_for_d_state(daemon.worker())
                status = daemon.until(lambda s: s["stream"]["waiting"] > 0, "the line waits")
                assert status["health"] == "unhealthy"
                daemon.stop()  # before the disk is thawed
            daemon.start()
            until(lambda: names(lines(state))[-1:] == ["started"], "the waiting lines are written")
            assert daemon.stop_at_rest() == 0
        told = lines(state)
        assert is_whole(told)
        assert names(told) == ["started", "opened", "stopped", "started", "stopped"]
        assert [e["clean"] for e in told if e["event"] == "started"] == [False, True]


def test_a_full_disk_delays_the_stream_and_says_so(tmp_path: Path) -> None:
    require_root()
    disk = tmp_path / "full"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=0755", "tmpfs", disk], check=True)
    try:
        (disk / "filler").write_bytes(b"x" * (256 << 10))
        flags = ("--node-name", "n1", "--state-dir", str(disk))
        with Healthd(*flags, directory=tmp_path, config=EACH_SECOND) as daemon:
            daemon.kernel_line(xid(79))
            daemon.until(lambda s: condition(s, "gpu_xid/79") is not None, "the daemon continues")
            daemon.until(
                lambda s: any("not written: No space left on device" in problem for problem in s["problems"]),
                "the problem is reported",
            )
            daemon.kill()
            daemon.start()
            assert lines(disk) == []
            (disk / "filler").unlink()
            daemon.until(lambda s: not s["problems"] and not s["stream"]["waiting"], "the problem is over")
            assert daemon.stop_at_rest() == 0
        told = lines(disk)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    assert is_whole(told)
    assert names(told) == ["started", "opened", "started", "stopped"]


def test_a_quiet_round_writes_neither_a_line_nor_the_ledger(tmp_path: Path) -> None:
    with Healthd("--node-name", "n1", directory=tmp_path, config=EACH_SECOND) as daemon:
        rounds(daemon, 2)
        daemon.until(lambda s: not s["stream"]["waiting"], "the events of the start are written")
        files = daemon.run_dir / "ledger.json", tmp_path / "state/events.jsonl"
        before = [(file.stat().st_mtime_ns, file.stat().st_size) for file in files]
        rounds(daemon, 3)
        assert [(file.stat().st_mtime_ns, file.stat().st_size) for file in files] == before


def test_a_machine_that_was_shut_down_and_boots_begins_another_stream_after_the_old_one(tmp_path: Path) -> None:
    with Healthd("--node-name", "n1", directory=tmp_path, config=EACH_SECOND) as daemon:
        assert daemon.stop_at_rest() == 0
        assert json.loads((tmp_path / "state/events.jsonl").read_text().splitlines()[-1])["event"] == "stopped"
        shutil.rmtree(daemon.run_dir)  # tmpfs
        daemon.start()
        assert daemon.stop_at_rest() == 0
    told = lines(tmp_path / "state")
    assert is_whole(told)
    assert len({e["stream_id"] for e in told}) == 2
    assert names(told) == ["started", "stopped", "started", "stopped"]
    again = [e for e in told if e["event"] == "started"][1]
    assert again["clean"]
    assert again["last_alive"] is not None
