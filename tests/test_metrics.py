"""The metrics page, read by promtool and by Prometheus' own parser, over HTTP and as a file."""

from __future__ import annotations

import logging
import os
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from trees import plain_machine

from healthd.host import Host
from healthd.judge.ledger import Pause
from healthd.model import (
    Ack,
    CheckResult,
    Clears,
    Condition,
    ConditionState,
    Drain,
    Finding,
    FleetHold,
    Health,
    Inventory,
    KernelLogStatus,
    Leave,
    Observation,
    ObservationKind,
    Outcome,
    RoundStatus,
    Severity,
    SlurmStatus,
    SourceStatus,
    Verdict,
)
from healthd.say.metrics import CLIENT_SECONDS, render, serve
from healthd.say.status import Snapshot
from healthd.settings import registry
from healthd.work.worker import Setup, Worker
from tests.e2e.requirements import require_programs
from tests.fakes import NOW, run_check, scenarios

HOSTILE = 'a "quoted"\nnew line, back\\slash, tab\t, NUL \0, UTF-8 é漢🔥, half a pair \ud800, {label="x"} 1'

PLAIN = Snapshot(
    version="0.1.0",
    node_name="n1",
    mode="observe",
    started=NOW - 100,
    now=NOW,
    interval_seconds=300.0,
    verdict=Verdict(Health.HEALTHY, may_resume=True),
    results=(),
    outcomes={},
    decision=Leave("nothing to do"),
    slurm=SlurmStatus(),
    kernel_log=KernelLogStatus("kmsg", alive=True, lines_total=12),
    round=RoundStatus(3, NOW - 50, 0.02, NOW + 250),
    inventory=Inventory(),
)


def test_each_source_says_whether_it_lives_and_what_it_lost() -> None:
    sources = (
        SourceStatus("kernel_log", up=True, last_read=NOW, overruns_total=2, lost_total=70, rotations_total=1),
        SourceStatus("journal", up=False, restarts_total=3, trouble="the disk hangs"),
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
    """All checks that a DGX H100 runs, by the checks themselves."""
    plain_machine(tmp_path / "tree")
    host = scenarios(tmp_path)(profile="dgx-h100", root=str(tmp_path / "tree"))
    results = []
    for name, check in registry.built_in().items():
        if check.runs and not check.per:
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
def troubled() -> Snapshot:
    """Everything at once, with words that want to break the page."""
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
        slurm=SlurmStatus(owner="ours", read_at=NOW, trouble=HOSTILE, commands={("scontrol update", "ok"): 2}),
        pause=Pause(NOW + 60, "driver upgrade", "root"),
        quarantined={"nvml": 4711, f"mount {HOSTILE}": 4712},
        workers_started_total=3,
        workers_abandoned_total=2,
        ledger_copy_failures_total=1,
        config_reload_failures_total=1,
    )


def samples(snapshot: Snapshot) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, labels) -> value, as Prometheus' own parser reads the page."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(render(snapshot).decode()):
        for sample in family.samples:
            series = (sample.name, tuple(sorted(sample.labels.items())))
            assert series not in found, f"{series} is on the page twice"
            found[series] = sample.value
    return found


def value(snapshot: Snapshot, name: str, **labels: str) -> float:
    return samples(snapshot)[f"healthd_{name}", tuple(sorted(labels.items()))]


def names(snapshot: Snapshot) -> set[str]:
    return {name for name, _labels in samples(snapshot)}


def promtool(page: bytes) -> str:
    require_programs("promtool", packages="prometheus")
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, timeout=30, check=False)
    return f"{done.returncode} {(done.stdout + done.stderr).decode()}".strip()


def test_promtool_has_nothing_to_say_of_a_healthy_node(healthy: Snapshot) -> None:
    assert promtool(render(healthy)) == "0"


def test_promtool_has_nothing_to_say_of_a_node_full_of_hostile_words(troubled: Snapshot) -> None:
    assert promtool(render(troubled)) == "0"


def test_a_healthy_node_shows_what_its_checks_read(healthy: Snapshot) -> None:
    assert value(healthy, "health", state="healthy") == 1
    assert value(healthy, "health", state="unhealthy") == 0
    assert value(healthy, "gpus") == 8
    assert sum(name == "healthd_gpu_recovery_action" for name, _ in samples(healthy)) == 8
    refused = {labels: n for (name, labels), n in samples(healthy).items() if name.endswith("_refused")}
    assert refused
    assert set(refused.values()) == {0}


def test_a_condition_is_one_series_with_its_words_unbroken(troubled: Snapshot) -> None:
    labels = {"check": "gpu_xid", "code": "gpu_xid/79"}
    assert value(troubled, "condition", **labels, subject="0000:1b:00.0", severity="critical", state="open") == 1
    cleaned = HOSTILE.replace("\0", "\ufffd").replace("\ud800", "?")
    assert value(troubled, "condition", **labels, subject=cleaned, severity="warning", state="pending") == 1


def test_a_check_that_could_not_look_is_down(troubled: Snapshot) -> None:
    assert value(troubled, "check_up", check="gpu_ecc", instance="") == 0
    assert not any(
        name == "healthd_check_last_completed_timestamp_seconds" and ("check", "gpu_ecc") in labels
        for name, labels in samples(troubled)
    )


def test_the_page_tells_what_was_decided_and_what_hangs(troubled: Snapshot) -> None:
    assert value(troubled, "decision", action="drain_requeue") == 1
    assert value(troubled, "decision", action="leave") == 0
    assert value(troubled, "resource_barred", resource="nvml") == 1
    assert value(troubled, "slurm_drain_wanted") == 1
    assert value(troubled, "slurm_drained_by", owner="ours") == 1
    assert value(troubled, "slurm_commands_total", command="scontrol update", result="ok") == 2
    assert value(troubled, "slurm_trouble") == 1
    assert value(troubled, "paused_until_timestamp_seconds") == NOW + 60
    assert value(troubled, "workers_abandoned_total") == 2


def test_what_would_be_done_in_another_mode_is_withheld() -> None:
    assert value(replace(PLAIN, decision=Leave("mode observe", would="drain n1")), "decision_withheld") == 1
    assert value(PLAIN, "decision_withheld") == 0


def test_a_drain_that_the_fleet_limit_holds_is_loud(healthy: Snapshot) -> None:
    hold = FleetHold(NOW - 60, NOW + 60, 2, partition="gpu", nodes=1000, drained=101, limit=100)
    held, of = replace(healthy, fleet_hold=hold), {"partition": "gpu", "kind": "shared"}
    assert value(held, "fleet_limit_held", **of) == 1
    assert value(held, "fleet_limit_nodes_held", **of) == 101
    assert value(held, "fleet_limit_nodes", **of) == 1000
    assert value(held, "fleet_limit_nodes_allowed", **of) == 100
    assert value(held, "fleet_limit_waiting_since_timestamp_seconds") == NOW - 60
    assert value(held, "fleet_limit_next_try_timestamp_seconds") == NOW + 60
    assert promtool(render(held)) == "0"
    waiting = names(replace(healthy, fleet_hold=FleetHold(NOW, NOW + 60)))
    assert "healthd_fleet_limit_held" not in waiting, "the first wait is no hold"
    assert not any("fleet" in name for name in names(healthy))


def test_what_has_not_happened_yet_has_no_time() -> None:
    young = replace(PLAIN, round=RoundStatus())
    assert not {"healthd_slurm_read_timestamp_seconds", "healthd_round_started_timestamp_seconds"} & names(young)


def test_nobodys_drain_has_no_owner() -> None:
    assert "healthd_slurm_drained_by" not in names(replace(PLAIN, slurm=SlurmStatus(owner="nobody")))


def test_a_counter_ends_in_total_once() -> None:
    reading = Observation("gpu_ecc_errors_total", 3, ObservationKind.COUNTER, (("pci", "0000:1b:00.0"),))
    assert value(replace(PLAIN, results=(result(reading),)), "gpu_ecc_errors_total", pci="0000:1b:00.0") == 3


@pytest.mark.parametrize(
    "wrong",
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
def test_an_observation_that_cannot_be_shown_is_left_out_and_counted(wrong: Observation) -> None:
    """The last two: the same series twice, and a name that is a gauge already."""
    snapshot = replace(PLAIN, results=(result(Observation("good", 1), wrong),))
    assert value(snapshot, "good") == 1
    assert value(snapshot, "check_observations_refused", check="gpu_ecc") == 1
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
def test_no_observation_breaks_the_page(readings: list[Observation]) -> None:
    snapshot = replace(PLAIN, results=(result(*readings[:4]), result(*readings[4:], check="other")))
    assert value(snapshot, "health", state="healthy") == 1


def test_the_page_is_the_same_whatever_order_things_came_in(healthy: Snapshot) -> None:
    turned = replace(
        healthy,
        results=tuple(replace(r, observations=r.observations[::-1]) for r in healthy.results[::-1]),
        outcomes=dict(reversed(healthy.outcomes.items())),
    )
    assert render(turned) == render(healthy)


def test_the_textfile_is_the_page_and_everyone_may_read_it(tmp_path: Path, healthy: Snapshot) -> None:
    path = tmp_path / "healthd.prom"
    path.write_text("old")
    before = os.umask(0o077)  # as a unit may have it
    try:
        Worker(Setup(), Host("/")).do_write_file({"path": str(path), "text": render(healthy).decode()})
    finally:
        os.umask(before)
    assert path.read_bytes() == render(healthy)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [file.name for file in tmp_path.iterdir() if file.is_file() and file.suffix != ".toml"] == ["healthd.prom"]


# --- what healthd itself costs


def test_the_page_tells_memory_and_cpu_of_the_daemon_and_its_workers() -> None:
    with subprocess.Popen(["sleep", "60"]) as worker:
        snapshot = replace(PLAIN, processes={"daemon": (os.getpid(),), "worker": (worker.pid,)})
        daemon_bytes, worker_bytes = (
            value(snapshot, "process_resident_memory_bytes", process=name) for name in ("daemon", "worker")
        )
        spent = value(snapshot, "process_cpu_seconds_total", process="daemon")
        assert value(snapshot, "process_cpu_seconds_total", process="children") >= 0
        worker.kill()
    assert daemon_bytes > 10 << 20 > worker_bytes > 0
    assert spent > 0


def test_the_cpu_time_of_a_child_goes_on_counting_after_its_end() -> None:
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    snapshot = replace(PLAIN, processes={"daemon": (os.getpid(),), "worker": ()})
    assert value(snapshot, "process_cpu_seconds_total", process="children") > 0.01
    assert ("healthd_process_resident_memory_bytes", (("process", "worker"),)) not in samples(snapshot)


@pytest.mark.parametrize("pid", [2**22 + 1, 2**40, -1])
def test_a_process_that_is_gone_is_left_out(pid: int) -> None:
    found = samples(replace(PLAIN, processes={"daemon": (os.getpid(),), "worker": (pid,)}))
    shown = {labels for name, labels in found if name == "healthd_process_resident_memory_bytes"}
    assert shown == {(("process", "daemon"),)}


# --- over HTTP


@pytest.fixture
def page(healthy: Snapshot) -> Iterator[str]:
    port, stop = serve(("127.0.0.1", 0), lambda: healthy)
    yield f"http://127.0.0.1:{port}"
    stop()


def get(url: str, **headers: str) -> tuple[str, bytes]:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read()


def test_a_scrape_gets_the_page(page: str, healthy: Snapshot) -> None:
    content_type, body = get(f"{page}/metrics")
    assert content_type.startswith("text/plain; version=")
    assert body == render(healthy)


def test_a_scrape_may_ask_for_openmetrics(page: str) -> None:
    content_type, body = get(f"{page}/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_there_is_nothing_but_the_page(page: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="the page is /metrics") as refused:
        get(f"{page}/etc/passwd")
    assert refused.value.code == 404
    refused.value.close()


def test_a_client_that_says_nothing_holds_up_neither_others_nor_the_stop(healthy: Snapshot) -> None:
    port, stop = serve(("127.0.0.1", 0), lambda: healthy)
    with socket.create_connection(("127.0.0.1", port)):
        get(f"http://127.0.0.1:{port}/metrics")
        began = time.monotonic()
        stop()
        assert time.monotonic() - began < CLIENT_SECONDS
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=1)


def test_too_many_clients_are_turned_away_and_the_page_comes_back(healthy: Snapshot) -> None:
    port, stop = serve(("127.0.0.1", 0), lambda: healthy)
    crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    with pytest.raises((ConnectionError, urllib.error.URLError)):
        get(f"http://127.0.0.1:{port}/metrics")
    for client in crowd:
        client.close()
    end = time.monotonic() + 30
    body = b""
    while not body:
        with suppress(ConnectionError, urllib.error.URLError):
            body = get(f"http://127.0.0.1:{port}/metrics")[1]
        assert time.monotonic() < end
    stop()


def test_a_port_in_use_is_one_sentence(page: str) -> None:
    port = int(page.rpartition(":")[2])
    with pytest.raises(OSError, match=rf"metrics.listen: cannot listen on 127.0.0.1:{port}: Address already in use"):
        serve(("127.0.0.1", port), lambda: PLAIN)


def test_a_page_that_cannot_be_made_is_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Snapshot:
        raise RuntimeError("dictionary changed size during iteration")

    port, stop = serve(("127.0.0.1", 0), broken)
    with caplog.at_level(logging.ERROR), pytest.raises(ConnectionError):
        get(f"http://127.0.0.1:{port}/metrics")
    stop()
    assert [record.message.count("\n") for record in caplog.records] == [0]
    assert "dictionary changed size" in caplog.text


def test_the_jobs_at_the_source_are_a_family_of_their_own() -> None:
    standing = (condition("0000:1b:00.0", job="12,13"), condition("0000:1c:00.0"))
    page = render(replace(PLAIN, verdict=Verdict(Health.UNHEALTHY, standing))).decode()
    jobs = [line for line in page.splitlines() if line.startswith("healthd_condition_slurm_job{")]
    assert sorted(jobs) == [
        f'healthd_condition_slurm_job{{code="gpu_xid/79",slurm_job="{job}",subject="0000:1b:00.0"}} 1.0'
        for job in ("12", "13")
    ]


def test_until_when_a_person_knows_of_a_problem_is_told_while_they_do() -> None:
    known = Ack(NOW + 7200, "cable is on its way", "ann", Severity.CRITICAL)
    standing = (condition("0000:1b:00.0", ack=known), condition("0000:1c:00.0"))
    page = render(replace(PLAIN, verdict=Verdict(Health.WARNING, standing))).decode()
    (line,) = [line for line in page.splitlines() if line.startswith("healthd_condition_acknowledged_until")]
    assert '_timestamp_seconds{code="gpu_xid/79",subject="0000:1b:00.0"} ' in line
    assert float(line.split()[-1]) == NOW + 7200
