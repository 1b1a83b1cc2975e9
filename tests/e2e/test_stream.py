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
from healthd_daemon import EVERY_SECOND, Healthd, condition, wait_for_rounds, xid_line
from machine import Machine
from requirements import require_root
from slurm_cluster import SlurmCluster, start_job
from waiting import until

from tests.events.test_event import schema_script

WARNING_OVERRIDE = '[checks.gpu_xid]\nseverity = { "gpu_xid/79" = "warning" }\n'


def read_events(state: Path) -> list[dict[str, Any]]:
    """Return the complete lines; the last one may be only partly written."""
    text = (state / "events.jsonl").read_text("ascii") if (state / "events.jsonl").exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def event_names(events: list[dict[str, Any]]) -> list[str]:
    """Leave out the events of each start about checks, GPUs and decisions."""
    excluded = ("check_enabled", "decision", "alive", "gpus")
    return [f"{event['event']} {event.get('stage', '')}".strip() for event in events if event["event"] not in excluded]


def is_complete(events: list[dict[str, Any]]) -> bool:
    """Check that each stream has each number once, from the first to the last."""
    streams: dict[str, list[int]] = {}
    for event in events:
        streams.setdefault(event["stream_id"], []).append(event["seq"])
    return all(numbers == list(range(1, len(numbers) + 1)) for numbers in streams.values())


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=1, gpus=0) as running:
        yield running


def test_fault_is_reported_once_from_line_to_resume_despite_kills(
    cluster: SlurmCluster, node: str, machine: Machine, tmp_path: Path
) -> None:
    from jsonschema import Draft202012Validator

    job = start_job(cluster, node)
    state = tmp_path / "state"
    daemon = Healthd(
        *("--mode", "act", "--node-name", node, "--root", str(machine.root)),
        directory=tmp_path,
        config=EVERY_SECOND + WARNING_OVERRIDE,
        env=cluster.env,
        fake_nvml=str(machine.scenario),
    )
    with daemon:
        daemon.kernel_line(xid_line(79))
        until(lambda: "opened" in event_names(read_events(state)), "the condition is in the stream")
        daemon.kill()
        daemon.start()
        assert daemon.process is not None
        daemon.config.write_text(daemon.config.read_text().replace(WARNING_OVERRIDE, ""))
        daemon.process.send_signal(1)  # SIGHUP
        until(lambda: "drain confirmed" in event_names(read_events(state)), "the drain is in the stream")
        daemon.kill()
        daemon.start()
        assert cluster.wait_job(job, "PENDING")["Restarts"] == "1"
        wait_for_rounds(daemon, 2)
        daemon.kill()
        daemon.start()
        assert "done" in daemon.request(command="repaired", code="gpu_xid/79")
        cluster.wait_state(node, "IDLE", without=("DRAIN",))
        until(lambda: "resume confirmed" in event_names(read_events(state)), "the resume is in the stream")
        assert daemon.stop_when_idle() == 0
    events = read_events(state)
    assert is_complete(events)
    counts = Counter(event_names(events))
    counts.pop("requeue confirmed", None)  # missing if the daemon was killed before it saw the job gone
    starts = counts.pop("started")
    check_changes = counts.pop("check_changed")
    assert (starts, check_changes) == (4, 1)
    assert counts == Counter(
        [
            *("opened", "worsened", "drain sent", "drain confirmed", "requeue sent"),
            *("repaired", "cleared", "resume sent", "resume confirmed", "stopped"),
        ]
    )
    event_by_name = {entry["event"]: entry for entry in events}
    assert event_by_name["worsened"]["was"] == "warning"
    assert len({event_by_name[name]["condition"] for name in ("opened", "worsened", "cleared")}) == 1
    assert event_by_name["requeue"]["job"] == job
    assert [entry["clean"] for entry in events if entry["event"] == "started"] == [False] * 4
    assert events[-1]["event"] == "stopped"
    assert events[-1]["cluster"] != "", "slurm.conf has been read by then"
    (gpus,) = (entry["gpus"] for entry in events if entry["event"] == "gpus")
    (serial,) = (gpu["serial"] for gpu in gpus if gpu["subject"] == event_by_name["opened"]["subject"])
    assert event_by_name["cleared"]["serial"] == serial
    assert {name for entry in events if entry["event"] == "alive" for name in entry["checks"]} >= {"gpu_xid", "gpu_ecc"}
    validator = Draft202012Validator(schema_script().schema())
    for event in events:
        validator.validate(event)


def test_hanging_disk_delays_stream_but_not_daemon_or_stop(tmp_path: Path) -> None:
    with FrozenFilesystem(tmp_path) as disk:
        state = disk.path / "state"
        daemon = Healthd("--node-name", "n1", "--state-dir", str(state), directory=tmp_path, config=EVERY_SECOND)
        with daemon:
            until(lambda: "started" in event_names(read_events(state)), "the start is in the stream")
            with disk.frozen():
                daemon.kernel_line(xid_line(79))
                daemon.wait_until(lambda s: condition(s, "gpu_xid/79") is not None, "the daemon continues")
                wait_for_d_state(daemon.worker_pid())
                status = daemon.wait_until(lambda s: s["stream"]["waiting"] > 0, "the line waits")
                assert status["health"] == "unhealthy"
                daemon.stop()  # before the disk is thawed
            daemon.start()
            until(lambda: event_names(read_events(state))[-1:] == ["started"], "the waiting lines are written")
            assert daemon.stop_when_idle() == 0
        events = read_events(state)
        assert is_complete(events)
        assert event_names(events) == ["started", "opened", "stopped", "started", "stopped"]
        assert [event["clean"] for event in events if event["event"] == "started"] == [False, True]


def test_full_disk_delays_stream_and_is_reported(tmp_path: Path) -> None:
    require_root()
    disk = tmp_path / "full"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=0755", "tmpfs", disk], check=True)
    try:
        (disk / "filler").write_bytes(b"x" * (256 << 10))
        flags = ("--node-name", "n1", "--state-dir", str(disk))
        with Healthd(*flags, directory=tmp_path, config=EVERY_SECOND) as daemon:
            daemon.kernel_line(xid_line(79))
            daemon.wait_until(lambda s: condition(s, "gpu_xid/79") is not None, "the daemon continues")
            daemon.wait_until(
                lambda s: any("not been written: No space left on device" in problem for problem in s["problems"]),
                "the problem is reported",
            )
            daemon.kill()
            daemon.start()
            assert read_events(disk) == []
            (disk / "filler").unlink()
            daemon.wait_until(lambda s: not s["problems"] and not s["stream"]["waiting"], "the problem is over")
            assert daemon.stop_when_idle() == 0
        events = read_events(disk)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    assert is_complete(events)
    assert event_names(events) == ["started", "opened", "started", "stopped"]


def test_quiet_round_writes_neither_stream_nor_ledger(tmp_path: Path) -> None:
    with Healthd("--node-name", "n1", directory=tmp_path, config=EVERY_SECOND) as daemon:
        wait_for_rounds(daemon, 2)
        daemon.wait_until(lambda s: not s["stream"]["waiting"], "the events of the start are written")
        files = daemon.run_dir / "ledger.json", tmp_path / "state/events.jsonl"
        before = [(file.stat().st_mtime_ns, file.stat().st_size) for file in files]
        wait_for_rounds(daemon, 3)
        assert [(file.stat().st_mtime_ns, file.stat().st_size) for file in files] == before


def test_boot_after_shutdown_starts_new_stream_after_old_one(tmp_path: Path) -> None:
    with Healthd("--node-name", "n1", directory=tmp_path, config=EVERY_SECOND) as daemon:
        assert daemon.stop_when_idle() == 0
        assert json.loads((tmp_path / "state/events.jsonl").read_text().splitlines()[-1])["event"] == "stopped"
        shutil.rmtree(daemon.run_dir)  # tmpfs
        daemon.start()
        assert daemon.stop_when_idle() == 0
    events = read_events(tmp_path / "state")
    assert is_complete(events)
    assert len({event["stream_id"] for event in events}) == 2
    assert event_names(events) == ["started", "stopped", "started", "stopped"]
    second_start = [event for event in events if event["event"] == "started"][1]
    assert second_start["clean"]
    assert second_start["last_alive"] is not None
