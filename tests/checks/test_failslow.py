"""failslow: slow jobs in the live document become findings, and data from a job itself never drains."""

from __future__ import annotations

import json
import time

import pytest
from fakes import codes, findings, run_check
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from trees import write

from healthd import client
from healthd.checks import failslow
from healthd.checks.failslow import Config
from healthd.common.codec import fields_of
from healthd.common.history import History
from healthd.common.model import Clears, NothingToCheck, Observation, Severity, Slowness
from healthd.common.values import DecodeError
from healthd.failslow.live import datagram
from healthd.failslow.live.document import Dropped, LiveDocument, LiveJob, LostSeconds, to_json
from healthd.failslow.live.evidence import NodeChange
from healthd.failslow.live.jobs import Jobs
from healthd.failslow.live.settings import LiveSettings, live_settings

FILE = "/run/healthd/failslow.json"
GPU = "0000:1b:00.0"
SLOW = LiveJob("4711", 8, "client", True, 1000.0, 0.26, 12.5, GPU, "rank 5", "compute_gpu", ("its own work: 0.3 s",))
ABSENT_IS_FINE = {FILE: "nothing was reported so far; the daemon reports a missing live process"}


def live_file(*jobs, written=None):
    return {FILE: to_json(LiveDocument(written=time.time() if written is None else written, jobs=jobs))}


def healthy(tmp_path):
    return write(tmp_path, live_file(LiveJob("4711", 8, "client"))), Config(client=True)


def test_job_that_is_not_slow_gives_no_finding(tmp_path):
    host, config = healthy(tmp_path)
    assert codes(findings(failslow, host, config)) == []


def test_slow_job_and_its_suspect_gpu_warn(tmp_path):
    host, config = healthy(tmp_path)
    write(tmp_path, live_file(SLOW))
    found = findings(failslow, host, config)
    assert [(finding.code, finding.subject, finding.severity) for finding in found] == [
        ("failslow/gpu", GPU, Severity.WARNING),
        ("failslow/job", "", Severity.WARNING),
    ]
    assert found[0].message == "job 4711 is 26% slower than before, slowed by rank 5: its own work: 0.3 s"


def test_slowness_has_share_onset_and_jobs(tmp_path):
    host, config = healthy(tmp_path)
    worse = LiveJob("9", 8, "client", True, 900.0, 0.5)
    write(tmp_path, live_file(SLOW, worse))
    gpu_finding, job_finding = findings(failslow, host, config)
    assert gpu_finding.slowness == Slowness(0.26, 1000.0, ("4711",))
    assert job_finding.slowness == Slowness(0.5, 900.0, ("4711", "9"))


def test_totals_are_observed_without_job_labels(tmp_path):
    host, config = healthy(tmp_path)
    document = LiveDocument(
        time.time(), 1e9, (SLOW,), dropped=Dropped(strangers=3), lost=LostSeconds(12.5, 2.0), sampling=0.0004
    )
    write(tmp_path, {FILE: to_json(document)})
    values = {
        (item.name, *(value for _, value in item.labels)): item.value
        for item in run_check(failslow, host, config)
        if isinstance(item, Observation)
    }
    assert values["failslow_worst_slowdown",] == 0.26
    assert values["failslow_lost_seconds_total", "client"] == 12.5
    assert values["failslow_lost_seconds_total", "counters"] == 2.0
    assert values["failslow_dropped_total", "strangers"] == 3
    assert values["failslow_paused_until_timestamp_seconds",] == 1e9
    assert (values["failslow_sampling",], values["failslow_sampling_cpu_ratio",]) == (1, 0.0004)
    assert not any("4711" in part for key in values for part in key)


def test_cpu_ratio_is_not_observed_without_sampling(tmp_path):
    host, config = healthy(tmp_path)
    values = {item.name: item.value for item in run_check(failslow, host, config) if isinstance(item, Observation)}
    assert values["failslow_sampling"] == values["failslow_worst_slowdown"] == 0
    assert "failslow_sampling_cpu_ratio" not in values


def test_slow_jobs_share_one_finding_per_source(tmp_path):
    host, config = healthy(tmp_path)
    jobs = [LiveJob(str(number), 8, "client", True, 1000.0, 0.3) for number in range(5)]
    write(tmp_path, live_file(*jobs, LiveJob("9", 2, "counters", True, 1000.0, 0.3)))
    found = findings(failslow, host, config)
    assert [(finding.code, finding.subject) for finding in found] == [("failslow/job", ""), ("failslow/counters", "")]
    assert "job 3 is 30% slower" in found[0].message
    assert found[0].message.endswith("; and 1 more jobs")


def test_failslow_reads_nothing_unless_enabled(tmp_path):
    host = write(tmp_path, {FILE: "no document"})
    assert [type(item) for item in failslow.run(host, Config(), History({}, 0.0, ""))] == [NothingToCheck]


@pytest.mark.parametrize("text", ["no document", "{}", '{"schema": 2}', "[]", '{"schema": 1, "written": "x"}'])
def test_invalid_live_document_fails_run(tmp_path, text):
    host, config = healthy(tmp_path)
    write(tmp_path, {FILE: text})
    with pytest.raises(DecodeError):
        findings(failslow, host, config)


def test_stale_live_document_fails_run(tmp_path):
    host, config = healthy(tmp_path)
    write(tmp_path, live_file(SLOW, written=time.time() - 3600))
    with pytest.raises(ValueError, match="old"):
        findings(failslow, host, config)


@pytest.mark.parametrize("code", ["failslow/job", "failslow/gpu"])
def test_validate_limits_client_findings_to_warning(code):
    assert failslow.validate(Config(severity={code: Severity.INFO})) is None
    assert failslow.validate(Config(severity={code: Severity.WARNING})) is None
    for worse in (Severity.DEGRADED, Severity.CRITICAL):
        assert "cannot be more than" in (failslow.validate(Config(severity={code: worse})) or "")


COUNTED = LiveJob("4711", 4, "counters", True, time.time() - 7200, 0.25, 1400.0, "", "", "unknown", ("CNP rose",), True)
ACTS = Config(sample=("ib",), action="drain", restart_seconds=600.0, loss_window_seconds=60.0)


def losses(tmp_path, config, *jobs):
    host = write(tmp_path, live_file(*jobs))
    return [finding for finding in findings(failslow, host, config) if finding.code == "failslow/loss"]


@pytest.mark.parametrize(("act", "severity"), [("drain", Severity.DEGRADED), ("requeue", Severity.CRITICAL)])
def test_loss_above_restart_cost_drains_or_requeues_if_configured(tmp_path, act, severity):
    (found,) = losses(tmp_path, replace(ACTS, action=act), COUNTED)
    assert (found.subject, found.severity, found.clears, found.window_seconds) == ("", severity, Clears.WINDOW, 60.0)
    assert found.slowness == Slowness(0.25, COUNTED.since, ("4711",))
    assert found.shared_cause  # congestion makes many nodes slow at once
    assert found.message == "job 4711 is 25% slower than before: CNP rose, and lost 23 min"


@pytest.mark.parametrize(
    ("make_changes", "why"),
    [
        (lambda: {"since": time.time() - 600}, "it lost 120 s so far"),
        (lambda: {"lost_seconds": 599.0}, "its iterations were slow for less"),
        (lambda: {"slow": False, "since": None}, "it recovered"),
        (lambda: {"node_changed": False}, "no counter of this node changed: another node may be the cause"),
        (lambda: {"source": "client"}, "a user reported it"),
        (lambda: {"since": time.time() + 1e6}, "a clock was set"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_loss_without_all_conditions_does_not_drain(tmp_path, make_changes, why):
    """`make_changes` is called when the test runs, because it may run an hour after collection."""
    assert losses(tmp_path, ACTS, replace(COUNTED, **make_changes())) == []


def test_loss_does_not_drain_while_detection_is_paused(tmp_path):
    """An operator pauses detection for a benchmark that is slow on purpose. The node must not drain for it."""
    for until, found in ((time.time() + 60, 0), (time.time() - 60, 1)):
        document = LiveDocument(time.time(), until, (COUNTED,))
        host = write(tmp_path, {FILE: to_json(document)})
        assert codes(findings(failslow, host, ACTS)).count("failslow/loss") == found


def test_loss_does_not_drain_without_action(tmp_path):
    assert losses(tmp_path, replace(ACTS, action=""), COUNTED) == []


def test_loss_counts_from_exactly_restart_seconds(tmp_path):
    enough = replace(COUNTED, lost_seconds=600.0)
    assert len(losses(tmp_path, ACTS, enough)) == 1
    assert losses(tmp_path, ACTS, replace(enough, lost_seconds=599.0)) == []


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_loss_seen_by_several_devices_counts_once(tmp_path, devices):
    assert len(losses(tmp_path, ACTS, replace(COUNTED, ranks=devices, lost_seconds=600.0))) == 1


def test_validate_requires_sample_for_action():
    assert "requires `sample`" in (failslow.validate(Config(client=True, action="requeue")) or "")
    assert failslow.validate(ACTS) is None
    assert '"reboot"' in (failslow.validate(replace(ACTS, action="reboot")) or "")


def jobs_from_messages(sent):
    """Return the live process's jobs for these messages. The node shows a change all the time. The messages follow 60
    normal steps of a rank, and precede 30 very slow steps."""
    jobs = Jobs(
        LiveSettings(client=True),
        lambda pid, job, rank: GPU,
        lambda gpu, cause, since: (NodeChange(0.9, "gpu", "the clock fell"),),
    )
    for second, (connection, seconds, busy, steps) in enumerate(
        [*[(0, 1.0, 0.9, 1)] * 60, *sent, *[(0, 9.0, 8.0, 9)] * 30]
    ):
        message = client.MESSAGE.pack(
            client.MAGIC, connection, connection, second, steps, seconds, busy, client.NOT_MEASURED
        )
        if isinstance(step := datagram.parse(message), datagram.StepMessage):
            jobs.add_step(connection, 100 + connection, "4711", step, 1000.0 + second)
    jobs.evaluate(is_paused=False)
    return jobs.records()


REQUEUES = Config(client=True, sample=("ib",), action="requeue", restart_seconds=0.0)


def test_hours_of_loss_reported_by_client_only_warn(tmp_path):
    found = findings(failslow, write(tmp_path, live_file(*jobs_from_messages([]))), REQUEUES)
    assert [(finding.code, finding.severity) for finding in found] == [("failslow/job", Severity.WARNING)]


NUMBERS = st.one_of(st.floats(), st.floats(1e-6, 1e5), st.integers(-(2**31), 2**31 - 1).map(float))


@settings(max_examples=60, deadline=None, suppress_health_check=also(HealthCheck.function_scoped_fixture))
@given(st.lists(st.tuples(st.integers(0, 3), NUMBERS, NUMBERS, st.integers(1, 10**7)), max_size=150))
def test_messages_of_hostile_client_never_drain(tmp_path, sent):
    """Send packed bytes through the parser and the jobs of the live process to a check that requeues at the first
    second of loss."""
    found = findings(failslow, write(tmp_path, live_file(*jobs_from_messages(sent))), REQUEUES)
    assert {finding.severity for finding in found} <= {Severity.WARNING}
    assert "failslow/loss" not in codes(found)


def test_validate_allows_higher_severity_for_counters():
    assert failslow.validate(Config(severity={"failslow/counters": Severity.DEGRADED})) is None


def test_validate_accepts_only_known_samplers():
    assert failslow.validate(Config(sample=("ib", "power", "nvlink", "pcie"))) is None
    assert '"ipoib"' in (failslow.validate(Config(sample=("ipoib",))) or "")


def test_live_settings_have_the_defaults_of_the_check():
    declared = {field.name: field.default for field in fields_of(Config)}
    assert {field.name: field.default for field in fields_of(LiveSettings)} == {
        field.name: declared[field.name] for field in fields_of(LiveSettings)
    }
    assert live_settings({"client": True, "severity": {}, "max_ranks": 4}) == LiveSettings(client=True, max_ranks=4)


def test_live_document_has_the_documented_fields():
    table = json.loads(to_json(LiveDocument(1.0, jobs=(SLOW,))))
    assert set(table) >= {"schema", "written", "paused_until", "jobs", "recent", "dropped"}
    assert set(table["jobs"][0]) >= {
        *("job", "ranks", "source", "slow", "since", "slowdown", "lost_seconds", "suspect", "cause", "evidence")
    }
    assert set(table["dropped"]) >= {"oversized", "strangers", "malformed", "series", "jobs"}
