"""Tests of the metrics page: read by promtool, by Prometheus' own parser, and as a file."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import NOW, run_check, scenarios
from fakes import PLAIN_SNAPSHOT as PLAIN
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from trees import plain_machine

from healthd.agent.conditions.ledger import Pause
from healthd.agent.hooks.result import HookResult
from healthd.agent.metrics.families import render
from healthd.agent.reporting.status import Snapshot
from healthd.agent.settings import registry
from healthd.agent.settings.config import RepairConfig
from healthd.agent.worker.process import Setup, Worker
from healthd.agent.worker.requests import WriteFile
from healthd.common.model import (
    Ack,
    CheckResult,
    Clears,
    Condition,
    ConditionState,
    Drain,
    Finding,
    FleetHold,
    Gpu,
    Health,
    Inventory,
    Leave,
    NodeState,
    Observation,
    ObservationKind,
    Outcome,
    RepairMode,
    RepairStep,
    RoundStatus,
    Severity,
    SlurmStatus,
    SourceStatus,
    StreamStatus,
    Verdict,
)
from healthd.common.repair_plan import Attempt, AttemptStage, CauseStep, Obstacle, Plan, Reason, RepairRecord
from healthd.common.slurm.drain_reason import domain_id
from healthd.host.host import Host
from tests.e2e.requirements import require_programs

HOSTILE = 'a "quoted"\nnew line, back\\slash, tab\t, NUL \0, UTF-8 é漢🔥, half a pair \ud800, {label="x"} 1'


def test_source_families_have_state_and_losses() -> None:
    sources = (
        SourceStatus("kernel_log", up=True, last_read=NOW, overruns_total=2, lost_total=70, rotations_total=1),
        SourceStatus("journal", up=False, restarts_total=3, problem="the disk hangs"),
        SourceStatus("device_removals", up=True, last_read=NOW, malformed_total=4),
    )
    page = render(replace(PLAIN, sources=sources)).decode()
    for line in (
        'healthd_source_up{source="kernel_log"} 1.0',
        'healthd_source_up{source="journal"} 0.0',
        'healthd_source_overruns_total{source="kernel_log"} 2.0',
        'healthd_source_lost_total{source="kernel_log"} 70.0',
        'healthd_source_rotations_total{source="kernel_log"} 1.0',
        'healthd_source_restarts_total{source="journal"} 3.0',
        'healthd_source_malformed_total{source="device_removals"} 4.0',
    ):
        assert f"{line}\n" in page
    assert 'healthd_source_last_read_timestamp_seconds{source="journal"}' not in page, "it was never read"


def result(
    *observations: Observation, check: str = "gpu_ecc", instance: str = "", outcome: Outcome = Outcome.COMPLETED
) -> CheckResult:
    return CheckResult(check, instance, outcome, NOW - 1, 0.5, observations=observations)


def condition(subject: str, **changes: object) -> Condition:
    finding = Condition(
        "gpu_xid",
        "",
        "gpu_xid/79",
        subject,
        Severity.CRITICAL,
        HOSTILE,
        Clears.REBOOT,
        ConditionState.OPEN,
        first_seen=NOW,
        last_seen=NOW,
        count=1,
        boot_id="b",
    )
    return replace(finding, **changes)  # type: ignore[arg-type]


@pytest.fixture
def healthy(tmp_path: Path) -> Snapshot:
    """Return a snapshot with the results of all checks that run on a DGX H100."""
    plain_machine(tmp_path / "tree")
    host = scenarios(tmp_path)(profile="dgx-h100", root=str(tmp_path / "tree"))
    results = []
    for name, check in registry.built_in_checks().items():
        if check.has_run and not check.per:
            given_items = run_check(check.module, host)
            results.append(
                CheckResult(
                    name,
                    "",
                    Outcome.COMPLETED,
                    NOW,
                    0.01,
                    findings=tuple(item for item in given_items if isinstance(item, Finding)),
                    observations=tuple(item for item in given_items if isinstance(item, Observation)),
                )
            )
    outcomes = {(r.check, r.instance, "completed"): 3 for r in results}
    return replace(PLAIN, results=tuple(results), outcomes=outcomes)


@pytest.fixture
def faulty() -> Snapshot:
    """Return a snapshot with every kind of problem and texts that could break the page."""
    conditions = (
        condition("0000:1b:00.0"),
        condition(HOSTILE, severity=Severity.WARNING, state=ConditionState.PENDING),
        condition("", check="mount", code="mount/missing", state=ConditionState.ACKNOWLEDGED),
    )
    return replace(
        PLAIN,
        mode="act",
        verdict=Verdict(Health.UNHEALTHY, conditions, causes=conditions[:1], unknown=("x failed",)),
        results=(
            result(outcome=Outcome.TIMED_OUT),
            result(Observation("mount_mounted", 0, labels=(("mountpoint", HOSTILE),)), check="mount", instance=HOSTILE),
            result(
                Observation("mount_mounted", 1, labels=(("mountpoint", "/a"),)),
                Observation("mount_stalls_total", 2, ObservationKind.COUNTER, (("mountpoint", "/a"),)),
                check="mount",
                instance="/a",
            ),
        ),
        outcomes={("mount", HOSTILE, "stuck"): 2, ("mount", "/a", "completed"): 5},
        decision=Drain("healthd: gpu_xid/79 ...", requeue=True),
        slurm=SlurmStatus(owner="healthd", read_at=NOW, problem=HOSTILE, commands={("scontrol update", "ok"): 2}),
        pause=Pause(NOW + 60, "driver upgrade", "root"),
        quarantined={"nvml": 4711, f"mount {HOSTILE}": 4712},
        workers_started_total=3,
        workers_abandoned_total=2,
        ledger_copy_failures_total=1,
        evidence_failures_total=1,
        stream=StreamStatus(waiting=3, dropped_total=2, failures_total=4, journal_lost_total=1, problem=HOSTILE),
        hooks={"on_drain": HookResult(2, HOSTILE), "on_resume": HookResult()},
        config_reload_failures_total=1,
    )


def samples(snapshot: Snapshot) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the page as read by Prometheus' own parser: (name, labels) -> value."""
    sample_values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(render(snapshot).decode()):
        for sample in family.samples:
            series = (sample.name, tuple(sorted(sample.labels.items())))
            assert series not in sample_values, f"{series} appears twice on the page"
            sample_values[series] = sample.value
    return sample_values


def value(snapshot: Snapshot, name: str, /, **labels: str) -> float:
    return samples(snapshot)[f"healthd_{name}", tuple(sorted(labels.items()))]


def names(snapshot: Snapshot) -> set[str]:
    return {name for name, _labels in samples(snapshot)}


def promtool(page: bytes) -> str:
    require_programs("promtool", packages="prometheus")
    completed = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, timeout=240, check=False
    )
    return f"{completed.returncode} {(completed.stdout + completed.stderr).decode()}".strip()


def test_promtool_accepts_healthy_page(healthy: Snapshot) -> None:
    assert promtool(render(healthy)) == "0"


def test_promtool_accepts_page_with_hostile_texts(faulty: Snapshot) -> None:
    assert promtool(render(faulty)) == "0"


def test_healthy_page_has_check_readings(healthy: Snapshot) -> None:
    assert value(healthy, "health", state="healthy") == 1
    assert value(healthy, "health", state="unhealthy") == 0
    assert value(healthy, "gpus") == 8
    assert sum(name == "healthd_gpu_recovery_action" for name, _ in samples(healthy)) == 8
    refused = {labels: n for (name, labels), n in samples(healthy).items() if name.endswith("_refused")}
    assert refused
    assert set(refused.values()) == {0}


XID = {"check": "gpu_xid", "code": "gpu_xid/79"}


def test_condition_families_have_severity_and_state(
    faulty: Snapshot,
) -> None:
    cleaned = HOSTILE.replace("\0", "\ufffd").replace("\ud800", "?")
    for subject, severity, is_open in (("0000:1b:00.0", 3, 1), (cleaned, 1, 0)):
        assert value(faulty, "condition_severity", **XID, subject=subject) == severity
        assert value(faulty, "condition_open", **XID, subject=subject) == is_open
        assert value(faulty, "condition_enforced", **XID, subject=subject) == 1
        assert value(faulty, "condition_acknowledged", **XID, subject=subject) == 0
        assert value(faulty, "condition_since_timestamp_seconds", **XID, subject=subject) == NOW
    known = {"check": "mount", "code": "mount/missing", "subject": ""}
    assert value(faulty, "condition_open", **known) == 1
    assert value(faulty, "condition_acknowledged", **known) == 1


def test_condition_series_keep_labels_for_their_lifetime() -> None:
    """The `for:` of an alert starts again with each new series."""
    states = (
        {"state": ConditionState.PENDING, "severity": Severity.WARNING},
        {"state": ConditionState.OPEN, "severity": Severity.DEGRADED, "opened_at": NOW + 60},
        {"state": ConditionState.OPEN, "severity": Severity.CRITICAL, "count": 7},
        {"state": ConditionState.ACKNOWLEDGED, "severity": Severity.CRITICAL, "observed": True},
    )
    snapshots = [
        replace(PLAIN, verdict=Verdict(Health.UNHEALTHY, (condition("0000:1b:00.0", **state_fields),)))
        for state_fields in states
    ]
    series_sets = [
        {series for series in samples(snapshot) if series[0].startswith("healthd_condition_")} for snapshot in snapshots
    ]
    assert len(series_sets[0]) == 6
    assert series_sets == [series_sets[0]] * 4
    part_labels = {**XID, "subject": "0000:1b:00.0"}
    assert [value(snapshot, "condition_severity", **part_labels) for snapshot in snapshots] == [1, 2, 3, 3]
    assert [value(snapshot, "condition_open", **part_labels) for snapshot in snapshots] == [0, 1, 1, 1]
    assert [value(snapshot, "condition_enforced", **part_labels) for snapshot in snapshots] == [1, 1, 1, 0]
    assert [value(snapshot, "condition_acknowledged", **part_labels) for snapshot in snapshots] == [0, 0, 0, 1]
    assert [value(snapshot, "condition_since_timestamp_seconds", **part_labels) for snapshot in snapshots] == [
        NOW,
        NOW + 60,
        NOW,
        NOW,
    ]


@pytest.mark.parametrize(("worsened_at", "begun"), [(0.0, NOW), (NOW + 30, NOW + 30)])
def test_condition_begun_is_before_its_confirm_time(worsened_at: float, begun: float) -> None:
    opened = condition("0000:1b:00.0", opened_at=NOW + 60, worsened_at=worsened_at)
    snapshot = replace(PLAIN, verdict=Verdict(Health.UNHEALTHY, (opened,)))
    assert value(snapshot, "condition_begun_timestamp_seconds", **XID, subject="0000:1b:00.0") == begun


def test_nvlink_domain_info_has_uuid_and_short_id() -> None:
    domain = "00000001-0000-0000-0000-000000000001"
    shown = replace(PLAIN, inventory=Inventory(domain=domain))
    assert value(shown, "nvlink_domain_info", domain=domain, id=domain_id(domain)) == 1
    for none in (None, ""):
        assert "healthd_nvlink_domain_info" not in names(replace(PLAIN, inventory=Inventory(domain=none)))


def test_gpu_info_has_dcgm_exporter_labels() -> None:
    gpus = (
        Gpu("0000:61:00.0", 3, "GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52", "NVIDIA H100 80GB HBM3", 5),
        Gpu("0001:c1:00.0", 4),
    )
    gpu_labels = [
        dict(labels)
        for name, labels in samples(replace(PLAIN, inventory=Inventory(gpus=gpus)))
        if name == "healthd_gpu_info"
    ]
    assert gpu_labels == [
        {
            "gpu": "3",
            "UUID": "GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52",
            "pci_bus_id": "00000000:61:00.0",
            "device": "nvidia5",
            "modelName": "NVIDIA H100 80GB HBM3",
            "pci": "0000:61:00.0",
        },
        {"gpu": "4", "pci_bus_id": "00000001:C1:00.0", "pci": "0001:c1:00.0"},
    ]


def test_promtool_warns_only_about_camel_case_in_dcgm_labels() -> None:
    gpu = Gpu("0000:61:00.0", 3, "GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52", "NVIDIA H100 80GB HBM3", 5)
    output = promtool(render(replace(PLAIN, inventory=Inventory(gpus=(gpu,)))))
    assert output == "3 healthd_gpu_info label names should be written in 'snake_case' not 'camelCase'"


def test_drain_families_have_owner_reason_and_time() -> None:
    node = NodeState("n1", frozenset({"IDLE", "DRAIN"}), "bad cable", "ann", NOW - 3600)
    drained = replace(PLAIN, slurm=SlurmStatus(node, "other", NOW), drained_since=NOW - 3600)
    assert value(drained, "slurm_drained_by", owner="other") == 1
    assert value(drained, "slurm_drain_info", owner="other", reason="bad cable") == 1
    assert value(drained, "slurm_drained_since_timestamp_seconds") == NOW - 3600
    resumed = replace(drained, slurm=SlurmStatus(replace(node, flags=frozenset({"IDLE"})), "none", NOW))
    assert not {name for name in names(resumed) if name.startswith("healthd_slurm_drain")} - {
        "healthd_slurm_drain_desired"
    }, "since 24.11 the reason remains after its drain"


def test_config_last_reload_successful_shows_refused_settings() -> None:
    assert value(PLAIN, "config_last_reload_successful") == 1
    assert value(replace(PLAIN, config_last_reload_successful=False), "config_last_reload_successful") == 0


def test_metrics_have_no_reserved_prometheus_label(healthy: Snapshot, faulty: Snapshot) -> None:
    for snapshot in (healthy, faulty):
        for name, labels in samples(snapshot):
            assert not {"instance", "job"} & {label for label, _ in labels}, name


def test_check_up_is_0_for_failed_run(faulty: Snapshot) -> None:
    assert value(faulty, "check_up", check="gpu_ecc", name="") == 0
    assert value(faulty, "check_up", check="mount", name="/a") == 1
    assert not any(
        name == "healthd_check_last_completed_timestamp_seconds" and ("check", "gpu_ecc") in labels
        for name, labels in samples(faulty)
    )


def test_page_has_decision_and_blocked_resources(faulty: Snapshot) -> None:
    assert value(faulty, "decision", action="drain_requeue") == 1
    assert value(faulty, "decision", action="leave") == 0
    assert value(faulty, "resource_blocked", resource="nvml") == 1
    assert value(faulty, "slurm_drain_desired") == 1
    assert value(faulty, "slurm_drained_by", owner="healthd") == 1
    assert value(faulty, "slurm_commands_total", command="scontrol update", result="ok") == 2
    assert value(faulty, "slurm_problem") == 1
    assert value(faulty, "paused_until_timestamp_seconds") == NOW + 60
    assert value(faulty, "workers_abandoned_total") == 2


def test_decision_withheld_shows_decision_in_other_mode() -> None:
    assert value(replace(PLAIN, decision=Leave("mode observe", would="drain n1")), "decision_withheld") == 1
    assert value(PLAIN, "decision_withheld") == 0


def test_fleet_limit_families_describe_hold(healthy: Snapshot) -> None:
    hold = FleetHold(NOW - 60, NOW + 60, 2, partition="gpu", nodes=1000, drained=101, limit=100)
    held_snapshot, hold_labels = replace(healthy, fleet_hold=hold), {"partition": "gpu", "kind": "shared"}
    assert value(held_snapshot, "fleet_limit_drain_waiting", **hold_labels) == 1
    assert value(held_snapshot, "fleet_limit_nodes_drained", **hold_labels) == 101
    assert value(held_snapshot, "fleet_limit_nodes", **hold_labels) == 1000
    assert value(held_snapshot, "fleet_limit_nodes_allowed", **hold_labels) == 100
    assert value(held_snapshot, "fleet_limit_waiting_since_timestamp_seconds") == NOW - 60
    assert value(held_snapshot, "fleet_limit_next_try_timestamp_seconds") == NOW + 60
    assert promtool(render(held_snapshot)) == "0"
    in_domain = replace(healthy, fleet_hold=FleetHold(NOW - 60, NOW + 60, 2, drained=2, limit=2, domain="1a2b3c4d"))
    assert value(in_domain, "fleet_limit_nodes_drained", partition="NVLink domain 1a2b3c4d", kind="shared") == 2
    assert "healthd_fleet_limit_nodes" not in names(in_domain), "the size of a domain is unknown"
    waiting = names(replace(healthy, fleet_hold=FleetHold(NOW, NOW + 60)))
    assert "healthd_fleet_limit_drain_waiting" not in waiting, "the first wait is not a hold"
    assert not any("fleet_limit" in name for name in names(healthy))


def test_repair_families_show_step_and_obstacles(healthy: Snapshot) -> None:
    cause = CauseStep("gpu_xid/119", "0000:1b:00.0", RepairStep.GPU_RESET, Reason.REMEDY)
    plan = Plan(RepairStep.GPU_RESET, RepairStep.REBOOT, (cause,), ("0000:1b:00.0",), (Obstacle.JOBS, Obstacle.PAUSED))
    advise, off = RepairConfig(RepairMode.ADVISE), RepairConfig(RepairMode.OFF)
    advised = replace(healthy, repair_config=advise, repair=RepairRecord(plan))
    assert value(advised, "repair_mode_info", mode="advise") == 1
    assert value(advised, "repair_step", step="gpu_reset") == 1
    assert value(advised, "repair_obstacle", obstacle="jobs") == 1
    assert value(advised, "repair_obstacle", obstacle="paused") == 1
    assert promtool(render(advised)) == "0"
    assert "healthd_repair_step" not in names(replace(healthy, repair_config=advise))
    assert not any(name.startswith("healthd_repair") for name in names(replace(advised, repair_config=off)))


def test_repair_families_show_stage_and_failure(healthy: Snapshot) -> None:
    attempt = Attempt("id", RepairStep.REBOOT, AttemptStage.STEP, NOW, "boot", ())
    act = RepairConfig(RepairMode.ACT, boot_timeout_seconds=600.0)
    rebooting = replace(healthy, repair_config=act, repair=RepairRecord(attempt=attempt))
    stage = {"step": "reboot", "stage": "step"}
    assert value(rebooting, "repair_stage_begun_timestamp_seconds", **stage) == NOW
    assert value(rebooting, "repair_stage_deadline_timestamp_seconds", **stage) == NOW + 600
    assert value(rebooting, "repair_given_up") == 0
    assert value(replace(rebooting, repair=RepairRecord(has_given_up=True)), "repair_given_up") == 1
    assert promtool(render(rebooting)) == "0"


def test_fleet_count_available_is_0_while_fleet_cannot_be_counted(healthy: Snapshot) -> None:
    assert value(healthy, "fleet_count_available") == 1
    assert value(replace(healthy, fleet_counted=False), "fleet_count_available") == 0


def test_events_that_have_not_happened_have_no_time() -> None:
    new_daemon = replace(PLAIN, round=RoundStatus())
    assert not {"healthd_slurm_read_timestamp_seconds", "healthd_round_started_timestamp_seconds"} & names(new_daemon)


def test_slurm_drained_by_is_absent_without_drain() -> None:
    assert "healthd_slurm_drained_by" not in names(replace(PLAIN, slurm=SlurmStatus(owner="none")))


def test_counter_ends_in_total_once() -> None:
    reading = Observation("gpu_ecc_errors_total", 3, ObservationKind.COUNTER, (("pci", "0000:1b:00.0"),))
    assert value(replace(PLAIN, results=(result(reading),)), "gpu_ecc_errors_total", pci="0000:1b:00.0") == 3


@pytest.mark.parametrize(
    "invalid",
    [
        Observation("not a name", 1),
        Observation("", 1),
        Observation("1st", 1),
        Observation("temperature", 1, labels=(("not a label", "x"),)),
        Observation("temperature", 1, labels=(("__name__", "x"),)),
        Observation("temperature", 1, labels=(("pci", "a"), ("pci", "b"))),
        Observation("looks_like_a_counter_total", 1),
        Observation("health", 1),
        Observation("workers_started_total", 1, ObservationKind.COUNTER),
        Observation("paused_until_timestamp_seconds", 1),
        Observation("good", 2),
        Observation("good", 1, ObservationKind.COUNTER, (("pci", "a"),)),
    ],
    ids=lambda o: f"{o.name} {o.kind.value} {o.labels}",
)
def test_invalid_observation_is_omitted_and_counted(invalid: Observation) -> None:
    """The last two cases are a duplicate series and a name that is already a gauge."""
    snapshot = replace(PLAIN, results=(result(Observation("good", 1), invalid),))
    assert value(snapshot, "good") == 1
    assert value(snapshot, "check_observations_refused", check="gpu_ecc") == 1
    too_many = replace(PLAIN, results=(replace(result(Observation("good", 1), invalid), dropped_observations=10),))
    assert value(too_many, "check_observations_refused", check="gpu_ecc") == 11
    assert promtool(render(snapshot)) == "0"


labels = st.lists(
    st.tuples(st.text(max_size=6) | st.sampled_from(["pci", "le", "port"]), st.text(max_size=9)), max_size=3
)
observations = st.builds(
    Observation,
    name=st.text(max_size=9) | st.sampled_from(["gpus", "x_total", "x", "x_info", "health", "condition"]),
    value=st.floats() | st.integers(),
    kind=st.sampled_from(ObservationKind),
    labels=labels.map(tuple),
)


@given(st.lists(observations, max_size=8))
@settings(deadline=None)
def test_any_observation_keeps_page_readable(readings: list[Observation]) -> None:
    snapshot = replace(PLAIN, results=(result(*readings[:4]), result(*readings[4:], check="other")))
    assert value(snapshot, "health", state="healthy") == 1


def test_page_does_not_depend_on_order(healthy: Snapshot) -> None:
    reordered = replace(
        healthy,
        results=tuple(replace(r, observations=r.observations[::-1]) for r in healthy.results[::-1]),
        outcomes=dict(reversed(healthy.outcomes.items())),
    )
    assert render(reordered) == render(healthy)


def test_textfile_equals_page_and_is_world_readable(tmp_path: Path, healthy: Snapshot) -> None:
    path = tmp_path / "healthd.prom"
    path.write_text("old")
    old_umask = os.umask(0o077)  # a unit may set this umask
    try:
        Worker(Setup(), Host("/")).do_write_file(WriteFile(str(path), render(healthy).decode()))
    finally:
        os.umask(old_umask)
    assert path.read_bytes() == render(healthy)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [file.name for file in tmp_path.iterdir() if file.is_file() and file.suffix != ".toml"] == ["healthd.prom"]


# --- cost of healthd itself


def test_process_families_have_memory_and_cpu_time() -> None:
    with subprocess.Popen(["sleep", "60"]) as worker:
        snapshot = replace(PLAIN, processes={"daemon": (os.getpid(),), "worker": (worker.pid,)})
        daemon_bytes, worker_bytes = (
            value(snapshot, "process_resident_memory_bytes", process=name) for name in ("daemon", "worker")
        )
        cpu_seconds = value(snapshot, "process_cpu_seconds_total", process="daemon")
        assert value(snapshot, "process_cpu_seconds_total", process="children") >= 0
        worker.kill()
    assert daemon_bytes > 10 << 20 > worker_bytes > 0
    assert cpu_seconds > 0


def test_children_cpu_time_includes_ended_children() -> None:
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    snapshot = replace(PLAIN, processes={"daemon": (os.getpid(),), "worker": ()})
    assert value(snapshot, "process_cpu_seconds_total", process="children") > 0.01
    assert ("healthd_process_resident_memory_bytes", (("process", "worker"),)) not in samples(snapshot)


@pytest.mark.parametrize("pid", [2**22 + 1, 2**40, -1])
def test_ended_process_is_omitted(pid: int) -> None:
    all_samples = samples(replace(PLAIN, processes={"daemon": (os.getpid(),), "worker": (pid,)}))
    process_labels = {labels for name, labels in all_samples if name == "healthd_process_resident_memory_bytes"}
    assert process_labels == {(("process", "daemon"),)}


def test_condition_slurm_job_has_single_series_per_job() -> None:
    open_conditions = (condition("0000:1b:00.0", job="12,13"), condition("0000:1c:00.0"))
    page = render(replace(PLAIN, verdict=Verdict(Health.UNHEALTHY, open_conditions))).decode()
    jobs = [line for line in page.splitlines() if line.startswith("healthd_condition_slurm_job{")]
    assert sorted(jobs) == [
        f'healthd_condition_slurm_job{{check="gpu_xid",code="gpu_xid/79",slurm_job="{job}",subject="0000:1b:00.0"}} 1.0'
        for job in ("12", "13")
    ]


def test_condition_acknowledged_until_is_ack_expiry() -> None:
    ack = Ack(NOW + 7200, "cable is on its way", "ann", Severity.CRITICAL)
    open_conditions = (condition("0000:1b:00.0", ack=ack), condition("0000:1c:00.0"))
    page = render(replace(PLAIN, verdict=Verdict(Health.WARNING, open_conditions))).decode()
    (line,) = [line for line in page.splitlines() if line.startswith("healthd_condition_acknowledged_until")]
    assert '_timestamp_seconds{check="gpu_xid",code="gpu_xid/79",subject="0000:1b:00.0"} ' in line
    assert float(line.split()[-1]) == NOW + 7200


def test_hooks_have_failures_and_last_result(faulty: Snapshot) -> None:
    found = samples(faulty)
    failures = [found["healthd_hook_failures_total", (("hook", name),)] for name in ("on_drain", "on_resume")]
    failing = [found["healthd_hook_failing", (("hook", name),)] for name in ("on_drain", "on_resume")]
    assert (failures, failing) == ([2, 0], [1, 0])
    found = samples(replace(faulty, hooks_problem="the request is not served"))
    assert [found["healthd_hook_failing", (("hook", name),)] for name in ("on_drain", "on_resume")] == [1, 1]
