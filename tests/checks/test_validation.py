"""validation: results of the last `healthd validate` on this node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes import codes, findings, run_check
from trees import write

from healthd.checks import validation
from healthd.checks.validation import Config
from healthd.common.codec import ConvertError, load
from healthd.common.model import Observation, Program, Severity
from healthd.host.host import Host
from healthd.validation.document import Result, Validation, as_text

GPU = "0000:1b:00.0"
DOCUMENT_PATH = "/var/lib/healthd/validation.json"


def result(verdict: str, part: str = GPU, test: str = "gemm_bf16", message: str = "601 TFLOPS") -> Result:
    return Result(test, part, 601.0, "TFLOPS", verdict, "", None, message, "pytorch 2.5.1")


def document(*results: Result) -> str:
    return as_text(Validation("n1", "boot", 1000.0, 1060.0, "manual", "", results, ()))


def node(tmp_path: Path, *results: Result) -> Host:
    return write(tmp_path, {DOCUMENT_PATH: document(*results)})


def healthy(tmp_path: Path) -> tuple[Host, Config]:
    return node(tmp_path, result("ok")), Config()


ABSENT_IS_FINE = {DOCUMENT_PATH: "this node was never validated"}


def test_node_without_validation_gives_no_finding(tmp_path: Path) -> None:
    assert findings(validation, write(tmp_path, {})) == []
    assert run_check(validation, write(tmp_path, {})) == []


def test_good_results_are_observed_and_give_no_finding(tmp_path: Path) -> None:
    host = node(tmp_path, result("ok"), result("not_measured", ""))
    assert findings(validation, host) == []
    observations = [item for item in run_check(validation, host) if isinstance(item, Observation)]
    values = {(item.name, *(value for _, value in item.labels)): item.value for item in observations}
    assert values == {
        ("validation_ended_timestamp_seconds",): 1060.0,
        ("validation_duration_seconds",): 60.0,
        ("validation_results", "gemm_bf16", "ok"): 1,
        ("validation_results", "gemm_bf16", "not_measured"): 1,
    }


def test_number_of_series_is_limited(tmp_path: Path) -> None:
    host = node(tmp_path, *(result("ok", test=f"t{number:03}") for number in range(500)))
    observations = [item for item in run_check(validation, host) if isinstance(item, Observation)]
    assert sum(item.name == "validation_results" for item in observations) == validation.MAX_SERIES


def test_failed_result_is_degraded_and_slow_result_warns(tmp_path: Path) -> None:
    other_gpu = "0000:43:00.0"
    host = node(
        tmp_path,
        result("failed", message="wrong result"),
        result("slow", other_gpu, "pcie_h2d", "12 GB/s"),
        result("failed", GPU, "memory", "CUDA error 719"),
    )
    failed, slow = findings(validation, host)
    assert (failed.code, failed.subject, failed.severity) == ("validation/failed", GPU, Severity.DEGRADED)
    assert failed.message == "gemm_bf16: wrong result; memory: CUDA error 719"
    assert (slow.code, slow.subject, slow.severity) == ("validation/slow", other_gpu, Severity.WARNING)
    assert slow.message == "pcie_h2d: 12 GB/s"


def test_evidence_depends_only_on_messages(tmp_path: Path) -> None:
    """Therefore `healthd repaired` applies to this document, and a later document counts again."""
    first, again = (findings(validation, node(tmp_path, result("failed"))) for _ in range(2))
    changed = findings(validation, node(tmp_path, result("failed", message="wrong result")))
    assert first[0].evidence == again[0].evidence != changed[0].evidence


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2}', json.dumps({"schema": 1, "results": 3})])
def test_invalid_document_fails_run(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"validation\.json: "):
        findings(validation, write(tmp_path, {DOCUMENT_PATH: text}))


def test_document_is_read_from_state_dir(tmp_path: Path) -> None:
    host = write(tmp_path, {"/srv/state/validation.json": document(result("failed"))})
    assert codes(findings(validation, host)) == []
    host.state_dir = "/srv/state"
    assert codes(findings(validation, host)) == ["validation/failed"]


def test_before_resume_is_off_by_default() -> None:
    assert validation.before_resume(Config()) is None
    program = Program(("validate", "--why", "before_resume", "--seconds", "90"), 120.0)
    assert validation.before_resume(Config(before_resume=True, before_resume_seconds=90.0)) == program


def test_validate_rejects_unknown_tool() -> None:
    assert validation.validate(Config(tools={"nvbandwidth": "/opt/nvbandwidth"})) is None
    assert str(validation.validate(Config(tools={"nvbw": "/opt/nvbandwidth"}))).startswith('tools: there is no "nvbw"')


@pytest.mark.parametrize(("seconds", "fits"), [(9.9, False), (10, True), (86400, True), (86401, False)])
def test_before_resume_seconds_has_limits_of_healthd_validate(seconds: float, fits: bool) -> None:
    if fits:
        assert load(Config, {"before_resume_seconds": seconds}).before_resume_seconds == seconds
    else:
        with pytest.raises(ConvertError, match="before_resume_seconds: must be 10 to 86400"):
            load(Config, {"before_resume_seconds": seconds})


def test_after_job_is_off_by_default() -> None:
    assert validation.after_job(Config()) is None
    program = Program(("validate", "--quick", "--why", "epilog"), 20.0)
    assert validation.after_job(Config(epilog=True, epilog_seconds=20.0)) == program
