"""gpu_sm: Xid 13 from different jobs on one streaming multiprocessor gives a warning that names it."""

from functools import partial

import pytest
from cpu_time import cpu_seconds
from fakes import BOOT, NOW
from kernel_lines import event_of, findings_of
from msgspec.structs import replace

from healthd.agent.conditions import intake
from healthd.agent.conditions.ledger import MAX_EVENTS, Ledger
from healthd.agent.kernel_log.coalesce import MAX_SMS, coalesce_events, with_jobs
from healthd.agent.kernel_log.file import counted_lines
from healthd.agent.kernel_log.repeats import fault_head
from healthd.agent.kernel_log.source import RawLine, merge_repeats
from healthd.agent.settings import registry
from healthd.checks import gpu_sm, gpu_xid
from healthd.checks.gpu_sm import Config, correlate
from healthd.common.model import Clears, Gpu, Inventory, Severity

BUS, PCI = "0000:cb:00", "0000:cb:00.0"
NODE = Inventory(gpus=(Gpu(PCI, 5, "GPU-8a47641b"),))
HOUR = 3600.0
WINDOW = Config().window_seconds


def xid_13_line(sm="GPC 7, TPC 7, SM 0", bus=BUS, pid=""):
    process = pid and f"pid={pid}, name=python3, "
    return f"NVRM: Xid (PCI:{bus}): 13, {process}Graphics SM Warp Exception on ({sm}): Out Of Range Address"


def findings_of_lines(*lines):
    """Return the findings of lines, given as (line, job, time)."""
    events = [event_of(text, at) for text, _, at in lines]
    jobs = {number: job for number, (_, job, _) in enumerate(lines, 1) if job}
    recent, _, _ = coalesce_events((), events, 1)
    return list(correlate(with_jobs(recent, jobs), NODE, Config()))


def test_same_sm_in_two_jobs_warns_and_names_it():
    (finding,) = findings_of_lines((xid_13_line(), "12", 0.0), (xid_13_line(), "13", HOUR))
    assert (finding.code, finding.subject) == ("gpu_sm/several_jobs", PCI)
    assert (finding.severity, finding.clears, finding.window_seconds) == (Severity.WARNING, Clears.WINDOW, WINDOW)
    assert finding.events == (1, 2)
    assert finding.message == "Xid 13 from different jobs (jobs 12, 13) on (GPC 7, TPC 7, SM 0) of GPU 5 (GPU-8a47641b)"


@pytest.mark.parametrize(
    "lines",
    [
        [(xid_13_line(), "12", 0.0), (xid_13_line(), "12", HOUR)],  # one job, twice
        [(xid_13_line(), "12", 0.0), (xid_13_line("GPC 7, TPC 7, SM 1"), "13", HOUR)],
        [(xid_13_line(), "12", 0.0), (xid_13_line(bus="0000:cc:00"), "13", HOUR)],
        [(xid_13_line(), "12", 0.0), (xid_13_line(), "", HOUR)],  # the job is unknown
        [(xid_13_line(), "12,13", 0.0), (xid_13_line(), "13", HOUR)],  # both lines may belong to job 13
        [(xid_13_line(), "12", 0.0), (xid_13_line(), "13", WINDOW + 1)],
        [(xid_13_line(), "12", 0.0), (xid_13_line().replace(": 13,", ": 31,"), "13", HOUR)],
    ],
)
def test_other_xid_13_combinations_give_no_finding(lines):
    assert findings_of_lines(*lines) == []


def test_jobs_sharing_a_gpu_count_if_no_job_explains_all_lines():
    assert (
        findings_of_lines(
            (xid_13_line(), "12,13", 0.0), (xid_13_line(), "13,14", HOUR), (xid_13_line(), "13", 2 * HOUR)
        )
        == []
    )
    (finding,) = findings_of_lines(
        (xid_13_line(), "12,13", 0.0), (xid_13_line(), "13,14", HOUR), (xid_13_line(), "12,14", 2 * HOUR)
    )
    assert "jobs 12, 13, 14" in finding.message


@pytest.mark.parametrize("count", [MAX_EVENTS, 10 * MAX_EVENTS])
@pytest.mark.parametrize("job_count", [1, MAX_EVENTS])
def test_xid_13_correlation_takes_linear_time(count, job_count):
    """Comparing each pair took 0.7 s for MAX_EVENTS lines of one job, and a minute for ten times as many lines."""
    events = [replace(event_of(xid_13_line(), NOW), sequence=n) for n in range(count)]
    events = with_jobs(events, {n: f"7,{100 + n % job_count}" for n in range(count)})
    assert list(correlate(events, NODE, Config())) == []
    linear = 0.1 * count / MAX_EVENTS
    assert cpu_seconds(lambda: list(correlate(events, NODE, Config())), linear) < linear


def test_window_ends_at_newest_line():
    assert findings_of_lines((xid_13_line(), "12", 0.0), (xid_13_line(), "13", WINDOW))


def test_line_of_older_gpu_without_sm_is_matched_by_tpc():
    (finding,) = findings_of_lines((xid_13_line("GPC 1, TPC 0"), "12", 0.0), (xid_13_line("GPC 1, TPC 0"), "13", HOUR))
    assert "(GPC 1, TPC 0)" in finding.message


def test_mig_instances_have_separate_processors():
    instance_5 = xid_13_line().replace(f"{BUS})", f"{BUS} GPU-I:05)")
    instance_6 = xid_13_line().replace(f"{BUS})", f"{BUS} GPU-I:06)")
    assert findings_of_lines((instance_5, "12", 0.0), (instance_6, "13", HOUR)) == []
    assert "MIG instance 05" in findings_of_lines((instance_5, "12", 0.0), (instance_5, "13", HOUR))[0].message


def burst(count, at=0.0):
    """Return events of one incident, each with another SM."""
    return [event_of(xid_13_line(f"GPC {n // 9}, TPC {n % 9}, SM 0"), at) for n in range(count)]


@pytest.mark.parametrize(("count", "names"), [(MAX_SMS, MAX_SMS), (MAX_SMS + 1, 0), (144, 0)])
def test_exception_on_many_processors_names_none(count, names):
    recent, _, _ = coalesce_events((), [*burst(count), *burst(count, HOUR)], 1)
    assert len(recent) == 2
    named = recent[0].field("sm").split()
    assert len(named) == (names or 1)
    found = list(correlate(with_jobs(recent, {1: "12", 2: "13"}), NODE, Config()))
    assert bool(found) is bool(names)
    assert len(str(recent[0].fields)) < 200


def test_counted_repeats_keep_their_processors():
    lines = [xid_13_line(f"GPC 7, TPC {n}, SM {m}", pid=4711) for n in range(2) for m in range(2) for _ in range(500)]
    registers = [
        f"NVRM: Xid (PCI:{BUS}): 13, pid=4711, name=python3, Graphics Exception: ESR 0x{n:x}=0x1" for n in range(9)
    ]
    merged = merge_repeats(RawLine(NOW, text) for text in [*lines, *registers])
    assert len(merged) == 5
    assert sum(each.lines for each in merged) == 2009
    assert fault_head(lines[0]) != fault_head(lines[-1])
    bulk, _, _ = counted_lines("".join(f"{text}\n" for text in [*lines, *registers]).encode(), 10_000, False)
    assert sorted(count for _, count in bulk) == [9, 500, 500, 500, 500]
    recent, _, _ = coalesce_events((), [event_of(text.decode()) for text, _ in bulk], 1)
    assert [each.field("sm") for each in recent] == ["7.0.0 7.0.1 7.1.0 7.1.1"]


LISTENERS = [
    (check, check.config()) for name, check in registry.built_in_checks().items() if name in ("gpu_sm", "gpu_xid")
]


def test_cleared_xid_and_late_job_still_count():
    """The condition of the Xid ends after an hour. Without cgroups Slurm reports the job a moment later."""
    ledger = Ledger(boot_id=BOOT, inventory=NODE)
    ledger = intake.take_kernel_events(ledger, [event_of(xid_13_line(), NOW, BOOT)], LISTENERS, NOW).ledger
    ledger = intake.take_jobs(ledger, {1: "12"}, LISTENERS)
    assert [c.code for c in ledger.conditions] == ["gpu_xid/13"]
    ended = [
        c.__class__(**{**{f: getattr(c, f) for f in c.__slots__}, "cleared_at": NOW + HOUR}) for c in ledger.conditions
    ]
    ledger = Ledger(**{**{f: getattr(ledger, f) for f in ledger.__slots__}, "conditions": (), "cleared": tuple(ended)})
    later = NOW + 2 * HOUR
    ledger = intake.take_kernel_events(ledger, [event_of(xid_13_line(), later, BOOT)], LISTENERS, later).ledger
    assert [c.code for c in ledger.conditions] == ["gpu_xid/13"]
    ledger = intake.take_jobs(ledger, {2: "13"}, LISTENERS)
    assert sorted(c.code for c in ledger.conditions) == ["gpu_sm/several_jobs", "gpu_xid/13"]
    assert max(c.severity for c in ledger.conditions) is Severity.WARNING


def test_gpu_sm_does_not_change_finding_of_gpu_xid():
    (finding,) = partial(findings_of, gpu_xid, node=NODE)(xid_13_line())
    assert (finding.code, finding.severity) == ("gpu_xid/13", Severity.WARNING)
    assert findings_of(gpu_sm, xid_13_line(), xid_13_line(), node=NODE) == []
