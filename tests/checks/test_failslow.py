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


def told(*jobs, written=None):
    return {FILE: to_json(LiveDocument(written=time.time() if written is None else written, jobs=jobs))}


def healthy(tmp_path):
    return write(tmp_path, told(LiveJob("4711", 8, "client"))), Config(client=True)


def test_a_job_that_is_not_slow_is_nothing(tmp_path):
    host, config = healthy(tmp_path)
    assert codes(findings(failslow, host, config)) == []


def test_a_slow_job_and_the_gpu_that_makes_it_so_warn(tmp_path):
    host, config = healthy(tmp_path)
    write(tmp_path, told(SLOW))
    found = findings(failslow, host, config)
    assert [(one.code, one.subject, one.severity) for one in found] == [
        ("failslow/gpu", GPU, Severity.WARNING),
        ("failslow/job", "", Severity.WARNING),
    ]
    assert found[0].message == "job 4711 is 26% slower than before, slowed by rank 5: its own work: 0.3 s"


def test_how_slow_since_when_and_which_jobs_stands_in_numbers_too(tmp_path):
    host, config = healthy(tmp_path)
    worse = LiveJob("9", 8, "client", True, 900.0, 0.5)
    write(tmp_path, told(SLOW, worse))
    of_gpu, of_jobs = findings(failslow, host, config)
    assert of_gpu.slowness == Slowness(0.26, 1000.0, ("4711",))
    assert of_jobs.slowness == Slowness(0.5, 900.0, ("4711", "9"))


def test_what_was_lost_dropped_and_sampled_is_observed_and_no_job_is_a_label(tmp_path):
    host, config = healthy(tmp_path)
    document = LiveDocument(
        time.time(), 1e9, (SLOW,), dropped=Dropped(strangers=3), lost=LostSeconds(12.5, 2.0), sampling=0.0004
    )
    write(tmp_path, {FILE: to_json(document)})
    seen = {
        (one.name, *(value for _, value in one.labels)): one.value
        for one in run_check(failslow, host, config)
        if isinstance(one, Observation)
    }
    assert seen["failslow_worst_slowdown",] == 0.26
    assert seen["failslow_lost_seconds_total", "client"] == 12.5
    assert seen["failslow_lost_seconds_total", "counters"] == 2.0
    assert seen["failslow_dropped_total", "strangers"] == 3
    assert seen["failslow_paused_until_timestamp_seconds",] == 1e9
    assert (seen["failslow_sampling",], seen["failslow_sampling_cpu_ratio",]) == (1, 0.0004)
    assert not any("4711" in part for key in seen for part in key)


def test_where_nothing_is_sampled_no_share_of_a_core_is_told(tmp_path):
    host, config = healthy(tmp_path)
    seen = {one.name: one.value for one in run_check(failslow, host, config) if isinstance(one, Observation)}
    assert seen["failslow_sampling"] == seen["failslow_worst_slowdown"] == 0
    assert "failslow_sampling_cpu_ratio" not in seen


def test_no_job_is_a_subject_however_many_are_slow(tmp_path):
    host, config = healthy(tmp_path)
    jobs = [LiveJob(str(number), 8, "client", True, 1000.0, 0.3) for number in range(5)]
    write(tmp_path, told(*jobs, LiveJob("9", 2, "counters", True, 1000.0, 0.3)))
    found = findings(failslow, host, config)
    assert [(one.code, one.subject) for one in found] == [("failslow/job", ""), ("failslow/counters", "")]
    assert "job 3 is 30% slower" in found[0].message
    assert found[0].message.endswith("; and 1 more jobs")


def test_nothing_is_read_where_nothing_is_watched(tmp_path):
    host = write(tmp_path, {FILE: "no document"})
    assert [type(item) for item in failslow.run(host, Config(), History({}, 0.0, ""))] == [NothingToCheck]


@pytest.mark.parametrize("text", ["no document", "{}", '{"schema": 2}', "[]", '{"schema": 1, "written": "x"}'])
def test_a_file_that_is_no_document_is_an_error_and_no_silence(tmp_path, text):
    host, config = healthy(tmp_path)
    write(tmp_path, {FILE: text})
    with pytest.raises(DecodeError):
        findings(failslow, host, config)


def test_slowness_that_nobody_writes_of_any_more_is_not_believed(tmp_path):
    host, config = healthy(tmp_path)
    write(tmp_path, told(SLOW, written=time.time() - 3600))
    with pytest.raises(ValueError, match="old"):
        findings(failslow, host, config)


@pytest.mark.parametrize("code", ["failslow/job", "failslow/gpu"])
def test_no_setting_makes_a_jobs_own_word_more_than_a_warning(code):
    assert failslow.validate(Config(severity={code: Severity.INFO})) is None
    assert failslow.validate(Config(severity={code: Severity.WARNING})) is None
    for worse in (Severity.DEGRADED, Severity.CRITICAL):
        assert "cannot be more than" in (failslow.validate(Config(severity={code: worse})) or "")


COUNTED = LiveJob("4711", 4, "counters", True, time.time() - 7200, 0.25, 1400.0, "", "", "unknown", ("CNP rose",), True)
ACTS = Config(sample=("ib",), action="drain", restart_seconds=600.0, loss_window_seconds=60.0)


def losses(tmp_path, config, *jobs):
    host = write(tmp_path, told(*jobs))
    return [one for one in findings(failslow, host, config) if one.code == "failslow/loss"]


@pytest.mark.parametrize(("act", "severity"), [("drain", Severity.DEGRADED), ("requeue", Severity.CRITICAL)])
def test_a_loss_as_large_as_a_restart_costs_takes_the_node_out_where_a_site_wants_it(tmp_path, act, severity):
    (found,) = losses(tmp_path, replace(ACTS, action=act), COUNTED)
    assert (found.subject, found.severity, found.clears, found.window_seconds) == ("", severity, Clears.WINDOW, 60.0)
    assert found.slowness == Slowness(0.25, COUNTED.since, ("4711",))
    assert found.shared_cause  # congestion makes many nodes slow at once
    assert found.message == "job 4711 is 25% slower than before: CNP rose, and lost 23 min"


@pytest.mark.parametrize(
    ("unlike", "why"),
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
def test_else_no_node_is_taken_out(tmp_path, unlike, why):
    """`make_changes` is called when the test runs, because it may run an hour after collection."""
    assert losses(tmp_path, ACTS, replace(COUNTED, **unlike())) == []


def test_while_detection_is_paused_no_node_is_taken_out(tmp_path):
    """An operator pauses detection for a benchmark that is slow on purpose. The node must not drain for it."""
    for until, found in ((time.time() + 60, 0), (time.time() - 60, 1)):
        document = LiveDocument(time.time(), until, (COUNTED,))
        host = write(tmp_path, {FILE: to_json(document)})
        assert codes(findings(failslow, host, ACTS)).count("failslow/loss") == found


def test_without_act_no_node_is_taken_out(tmp_path):
    assert losses(tmp_path, replace(ACTS, action=""), COUNTED) == []


def test_as_much_as_it_costs_is_enough_and_a_second_less_is_not(tmp_path):
    enough = replace(COUNTED, lost_seconds=600.0)
    assert len(losses(tmp_path, ACTS, enough)) == 1
    assert losses(tmp_path, ACTS, replace(enough, lost_seconds=599.0)) == []


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_rhythm_that_several_devices_show_is_one_loss_and_not_a_part_of_it(tmp_path, devices):
    assert len(losses(tmp_path, ACTS, replace(COUNTED, ranks=devices, lost_seconds=600.0))) == 1


def test_act_needs_what_root_reads():
    assert "requires `sample`" in (failslow.validate(Config(client=True, action="requeue")) or "")
    assert failslow.validate(ACTS) is None
    assert '"reboot"' in (failslow.validate(replace(ACTS, action="reboot")) or "")


def heard(sent):
    """Return the live process's jobs for these messages. The node shows a change all the time. The messages follow 60
    normal steps of a rank, and precede 30 very slow steps."""
    jobs = Jobs(
        LiveSettings(client=True),
        lambda pid, job, rank: GPU,
        lambda gpu, cause, since: (NodeChange(0.9, "gpu", "the clock fell"),),
    )
    for at, (connection, seconds, busy, steps) in enumerate(
        [*[(0, 1.0, 0.9, 1)] * 60, *sent, *[(0, 9.0, 8.0, 9)] * 30]
    ):
        message = client.MESSAGE.pack(
            client.MAGIC, connection, connection, at, steps, seconds, busy, client.NOT_MEASURED
        )
        if isinstance(said := datagram.parse(message), datagram.StepMessage):
            jobs.add_step(connection, 100 + connection, "4711", said, 1000.0 + at)
    jobs.evaluate(is_paused=False)
    return jobs.records()


REQUEUES = Config(client=True, sample=("ib",), action="requeue", restart_seconds=0.0)


def test_a_client_that_shows_hours_of_loss_only_warns(tmp_path):
    found = findings(failslow, write(tmp_path, told(*heard([]))), REQUEUES)
    assert [(one.code, one.severity) for one in found] == [("failslow/job", Severity.WARNING)]


NUMBERS = st.one_of(st.floats(), st.floats(1e-6, 1e5), st.integers(-(2**31), 2**31 - 1).map(float))


@settings(max_examples=60, deadline=None, suppress_health_check=also(HealthCheck.function_scoped_fixture))
@given(st.lists(st.tuples(st.integers(0, 3), NUMBERS, NUMBERS, st.integers(1, 10**7)), max_size=150))
def test_whatever_a_hostile_client_sends_it_takes_no_node_out(tmp_path, sent):
    """Send packed bytes through the parser and the jobs of the live process to a check that requeues at the first
    second of loss."""
    found = findings(failslow, write(tmp_path, told(*heard(sent))), REQUEUES)
    assert {one.severity for one in found} <= {Severity.WARNING}
    assert "failslow/loss" not in codes(found)


def test_what_root_read_may_count_for_more():
    assert failslow.validate(Config(severity={"failslow/counters": Severity.DEGRADED})) is None


def test_only_what_can_be_sampled_is_accepted():
    assert failslow.validate(Config(sample=("ib", "power", "nvlink", "pcie"))) is None
    assert '"ipoib"' in (failslow.validate(Config(sample=("ipoib",))) or "")


def test_the_live_process_knows_the_settings_as_the_check_declares_them():
    declared = {one.name: one.default for one in fields_of(Config)}
    assert {one.name: one.default for one in fields_of(LiveSettings)} == {
        one.name: declared[one.name] for one in fields_of(LiveSettings)
    }
    assert live_settings({"client": True, "severity": {}, "max_ranks": 4}) == LiveSettings(client=True, max_ranks=4)


def test_the_document_has_the_fields_that_others_rely_on():
    table = json.loads(to_json(LiveDocument(1.0, jobs=(SLOW,))))
    assert set(table) >= {"schema", "written", "paused_until", "jobs", "recent", "dropped"}
    assert set(table["jobs"][0]) >= {
        *("job", "ranks", "source", "slow", "since", "slowdown", "lost_seconds", "suspect", "cause", "evidence")
    }
    assert set(table["dropped"]) >= {"oversized", "strangers", "malformed", "series", "jobs"}
