"""The daemon's side: requests, results of a collector that may die, and events. The collector is played by the test."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from healthd.agent.evidence.case import Case, Cause, Process, Result, Stage, View
from healthd.agent.evidence.collection import EvidenceCollection
from healthd.agent.evidence.request import RESULT_FILE, Request, parse_request
from healthd.agent.settings.config import EvidenceConfig, Settings
from healthd.common.model import Gpu
from healthd.common.values import encode
from healthd.host.separate_program import request_file

CAUSE = Cause("gpu_xid/79 0000:1b:00.0", "a-1")
HEALTHY = View((), 0.0, "", is_drained=False, is_idle=False, is_in_use=True)
DRAINING = View((CAUSE,), 900.0, "healthd: gpu_xid/79", is_drained=True, is_idle=False, is_in_use=True)
IDLE = DRAINING._replace(is_idle=True, is_in_use=False)


class Node:
    """A daemon under systemd with a collector that the test plays."""

    def __init__(self, folder: Path, case: Case | None = None) -> None:
        self.case, self.now = case, 1000.0
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self.folder = folder
        self.settings = Settings(runtime_dir=str(folder), state_dir="/state", node_name="gpu-1")
        self.collection = self.start()

    def start(self) -> EvidenceCollection:
        return EvidenceCollection(
            self.settings,
            ("false",),
            ("--config", "/x"),
            True,
            lambda stage, fields: self.events.append((stage, fields)),
            lambda: self.now,
            lambda: self.now,
        )

    def step(self, view: View) -> Case | None:
        self.now += 10.0
        self.case = self.collection.step(self.case, view, self.settings, "cluster")
        return self.case

    def restart(self) -> None:
        self.collection = self.start()

    def request(self) -> Request | None:
        path = Path(request_file(str(self.folder), "evidence"))
        return parse_request(path.read_text()) if path.exists() else None

    def serve(self, **changes: Any) -> Request:
        """Serve the request as the collector does. Without a path, it saves nothing."""
        request = self.request()
        assert request is not None
        if request.part != "stop":
            result = Result(request.id, request.part, request.attempt, "/state/evidence/x", 10 * len(request.part), 1.0)
            (self.folder / RESULT_FILE).write_bytes(encode(replace(result, **changes)))
        os.unlink(request_file(str(self.folder), "evidence"))
        return request

    @property
    def stages(self) -> list[tuple[str, str]]:
        return [(stage, fields["part"]) for stage, fields in self.events]


def test_healthy_node_makes_no_request(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for _ in range(3):
        assert node.step(HEALTHY) is None
    assert (node.request(), node.events, node.collection.deadline) == (None, [], float("inf"))


def test_request_has_the_gpus_of_the_inventory(tmp_path: Path) -> None:
    node, gpus = Node(tmp_path), (Gpu("0000:1b:00.0", 0, serial="1650"),)
    node.collection.step(None, DRAINING, node.settings, "cluster", gpus)
    request = node.request()
    assert request is not None
    assert request.gpus == gpus


def test_drain_requests_both_parts(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.step(DRAINING)
    first = node.serve()
    assert (first.part, first.causes, first.flags, first.node) == ("first", (CAUSE,), ("--config", "/x"), "gpu-1")
    node.step(DRAINING)
    assert node.request() is None
    node.step(IDLE)
    assert node.serve().part == "full"
    case = node.step(IDLE)
    assert case is not None
    assert (case.stage, case.path, case.bytes, case.error) == (Stage.DONE, "/state/evidence/x", 40, "")
    assert node.stages == [("begun", "first"), ("saved", "first"), ("begun", "full"), ("saved", "full")]
    assert node.collection.failures == 0
    assert node.collection.problem(case) == ""


def test_failed_part_is_counted_and_a_problem(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.step(DRAINING)
    node.serve(path="", bytes=0, error="No space left on device")
    node.step(DRAINING)
    assert node.stages == [("begun", "first"), ("failed", "first")]
    assert node.collection.failures == 1
    assert node.collection.problem(node.case) == "No space left on device"


def test_part_that_a_full_disk_stopped_is_counted_and_its_file_kept(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.step(DRAINING)
    node.serve()
    node.step(IDLE)
    node.serve(stopped="only 3 MiB are free", error="only 3 MiB are free")
    case = node.step(IDLE)
    assert case is not None
    assert (node.collection.failures, case.path) == (1, "/state/evidence/x")


def test_operator_resume_stops_full_part_and_keeps_its_file(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.step(DRAINING)
    node.serve()
    node.step(DRAINING)
    node.step(IDLE)
    full = node.request()
    assert full is not None
    node.step(HEALTHY)
    assert node.request() == replace(full, part="stop")
    result = Result(full.id, "full", full.attempt, "/state/evidence/x", 77, stopped="in use")
    (tmp_path / RESULT_FILE).write_bytes(encode(result))
    node.serve()
    case = node.step(HEALTHY)
    assert case is not None
    assert (case.stage, case.bytes) == (Stage.DONE, 77)
    assert node.stages[-2:] == [("stopped", "full"), ("saved", "full")]
    node.step(HEALTHY)
    assert node.request() is None


def test_restarted_daemon_takes_result_that_came_meanwhile(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.step(DRAINING)
    node.serve()
    node.restart()
    case = node.step(DRAINING)
    assert case is not None
    assert case.stage is Stage.WAITING
    assert node.request() is None


def test_restarted_daemon_follows_open_request(tmp_path: Path) -> None:
    node = Node(tmp_path)
    before = node.step(DRAINING)
    node.restart()
    assert node.step(DRAINING) == before
    node.serve()
    case = node.step(DRAINING)
    assert case is not None
    assert case.stage is Stage.WAITING


def test_lost_result_is_requested_again(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.step(DRAINING)
    os.unlink(request_file(str(tmp_path), "evidence"))
    node.step(DRAINING)
    request = node.request()
    assert request is not None
    assert (request.part, request.attempt) == ("first", 2)


def test_disabled_evidence_makes_no_request_and_ends_an_open_case(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.settings = replace(node.settings, evidence=EvidenceConfig(enabled=False))
    assert node.step(DRAINING) is None
    node.settings = replace(node.settings, evidence=EvidenceConfig())
    node.step(DRAINING)
    node.serve()
    node.step(DRAINING)
    node.settings = replace(node.settings, evidence=EvidenceConfig(enabled=False))
    case = node.step(DRAINING)
    assert case is not None
    assert case.stage is Stage.DONE


def test_request_that_cannot_be_written_is_a_problem_until_it_can(tmp_path: Path) -> None:
    node = Node(tmp_path)
    tmp_path.chmod(0o777)
    node.step(DRAINING)
    assert node.collection.problem(node.case)
    tmp_path.chmod(0o755)
    node.step(DRAINING)
    assert not node.collection.problem(node.case)
    assert node.request() is not None


def test_stuck_process_is_remembered(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.step(DRAINING)
    node.serve(stuck=(Process(7, 70),))
    case = node.step(DRAINING)
    assert case is not None
    assert case.stuck == (Process(7, 70),)


def test_unserved_request_counts_once_as_failure(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for _ in range(10):
        node.step(DRAINING)
    assert node.collection.failures == 1
    assert node.collection.problem(node.case)
    node.serve()
    node.step(DRAINING)
    assert not node.collection.problem(node.case)
