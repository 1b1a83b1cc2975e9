"""Tests of the formulas of the effective training time ratio: published numbers, each other, and the simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.one_python

try:  # only .venv has numpy; the marked tests run nowhere else
    from healthd.fleet.statistics import ettr_model as model
    from healthd.fleet.statistics.ettr_model import Job
except ModuleNotFoundError as error:
    if error.name != "numpy":
        raise
else:
    JOBS = st.builds(
        Job,
        nodes=st.floats(1, 20_000),
        rate=st.floats(0, 20),
        checkpoint_seconds=st.floats(30, 7200),
        restart_seconds=st.floats(0, 1800),
        queue_seconds=st.floats(0, 3600),
        write_seconds=st.floats(0, 600),
        productive_seconds=st.none() | st.floats(60, 30 * 86400),
    )


@pytest.mark.parametrize(
    ("nodes", "rate", "checkpoint", "restart", "queue", "ettr"),
    [
        # Kokolis et al.: the published numbers that their formula reproduces.
        (2048, 6.5, 60, 5, 0, 0.68),
        (2048, 6.5, 5, 5, 0, 0.93),
        (1000, 6.5, 30, 5, 1, 0.91),
        (512, 6.5, 60, 5, 0, 0.92),
        (12_500, 6.5, 7, 5, 0, 0.52),
        (12_500, 2.34, 2, 2, 0, 0.94),
    ],
)
def test_analytic_matches_published_ratios(nodes, rate, checkpoint, restart, queue, ettr):
    job = Job(nodes, rate, checkpoint * 60, restart * 60, queue * 60)
    assert model.analytic(job) == pytest.approx(ettr, abs=0.005)


@pytest.mark.parametrize(("rate", "write", "ettr"), [(1.0, 300, 0.898), (6.5, 10, 0.921), (6.5, 300, 0.74)])
def test_closed_form_matches_published_ratios_at_best_interval(rate, write, ettr):
    job = Job(1500, rate, 3600, 300, 0, write)
    best = model.daly_young_seconds(job)
    assert model.closed_form(model.with_interval(job, best)) == pytest.approx(ettr, abs=0.005)


@pytest.mark.parametrize("write", [0.0, 120.0])
@pytest.mark.parametrize("queue", [0.0, 600.0])
@pytest.mark.parametrize("productive", [None, 1800.0, 40 * 3600.0])
@pytest.mark.parametrize("nodes", [64, 2048, 6000])
def test_simulation_agrees_with_exact_form(nodes, productive, queue, write):
    job = Job(nodes, 6.5, 3600, 300, queue, write, productive)
    simulated = model.simulate(job, 7)
    exact = model.exact(job)
    # The mean of ratios of short runs is above the ratio of means, by about its variance.
    above = 0.0 if simulated.high is None else (simulated.high - simulated.low) ** 2 / (4 * exact) + 0.02 * exact
    if productive == 1800.0:  # one interval only: the approximation does not hold
        assert simulated.ettr >= exact - 4 * simulated.standard_error
    else:
        assert -4 * simulated.standard_error <= simulated.ettr - exact <= 4 * simulated.standard_error + above


@pytest.mark.parametrize(
    ("nodes", "minutes", "queue", "too_low"), [(2048, 60, 0, 0.054), (2048, 5, 0, 0.003), (12_500, 7, 0, 0.155)]
)
def test_analytic_underestimates_exact_form_by_known_share(nodes, minutes, queue, too_low):
    job = Job(nodes, 6.5, minutes * 60, 300, queue)
    assert 1 - model.analytic(job) / model.exact(job) == pytest.approx(too_low, abs=0.005)


@settings(max_examples=300)
@given(st.data())
def test_forms_are_shares_and_analytic_is_lower_bound(data):
    job = data.draw(JOBS)
    for form in (model.analytic, model.closed_form, model.exact):
        assert 0 <= form(job) <= 1
    # The formula also charges a write for the last interval, which has none; otherwise it is a lower bound.
    free = replace(job, write_seconds=0.0)
    assert model.analytic(free) <= model.exact(free) * (1 + 1e-9)


@given(st.data(), st.floats(1.0, 3.0))
def test_higher_costs_never_increase_ratio(data, times):
    job = data.draw(JOBS)
    for name in ("nodes", "rate", "restart_seconds", "queue_seconds", "write_seconds"):
        worse = replace(job, **{name: getattr(job, name) * times})
        for form in (model.analytic, model.closed_form, model.exact):
            assert form(worse) <= form(job) * (1 + 1e-9)


@given(st.data())
def test_long_job_approaches_endless_job(data):
    job = replace(data.draw(JOBS), productive_seconds=None)
    long = replace(job, productive_seconds=job.checkpoint_seconds * 1e6)
    assert model.analytic(long) == pytest.approx(model.analytic(job), rel=1e-2)
    assert model.exact(long) == pytest.approx(model.exact(job), rel=1e-2, abs=1e-12)


def test_job_without_failures_loses_only_start_wait_and_writes():
    job = Job(100, 0.0, 3600, 300, 600, 36, 36_000)
    assert model.analytic(job) == pytest.approx(36_000 / (36_360 + 900))
    assert model.exact(job) == pytest.approx(36_000 / (36_360 - 36 + 900))
    assert model.simulate(job, 1).ettr == pytest.approx(model.exact(job))
    assert model.daly_young_seconds(job) is None


def test_job_with_constant_failures_makes_no_progress():
    job = Job(1e6, 1000.0)
    assert (model.analytic(job), model.closed_form(job)) == (0.0, 0.0)
    assert model.exact(job) < 1e-9
    assert model.simulate(job, 1) == model.Simulation(0.0, 0.0, None, None, 0, 0.0)


def test_simulation_depends_only_on_seed():
    job = Job(2048, 6.5, productive_seconds=86_400.0)
    assert model.simulate(job, 1) == model.simulate(job, 1)
    assert model.simulate(job, 1) != model.simulate(job, 2)


def test_daly_young_interval_is_best():
    job = Job(1500, 6.5, 3600, 300, 0, 60)
    best = model.daly_young_seconds(job)
    at_best = model.closed_form(model.with_interval(job, best))
    assert at_best > model.closed_form(model.with_interval(job, best / 3))
    assert at_best > model.closed_form(model.with_interval(job, best * 3))


@pytest.mark.parametrize("productive", [None, 86_400])
def test_simulation_accepts_integer_seconds(productive):
    whole = Job(2048, 6.5, 3600, 300, 60, 30, productive)
    broken = Job(2048, 6.5, 3600.0, 300.0, 60.0, 30.0, None if productive is None else float(productive))
    assert model.simulate(whole, 1) == model.simulate(broken, 1)


def test_mean_of_short_runs_is_above_exact_ratio():
    job = Job(2048, 6.5, 3600, 300)
    short, long = (replace(job, productive_seconds=hours * 3600.0) for hours in (4, 2000))
    short_run, long_run = model.simulate(short, 1), model.simulate(long, 1)
    assert short_run.ettr > model.exact(short) + 4 * short_run.standard_error
    assert long_run.ettr == pytest.approx(model.exact(long), abs=0.005)


def test_daly_young_gives_no_interval_for_slow_writes():
    mttf = 1 / Job(2048, 6.5).failures_per_second
    assert model.daly_young_seconds(Job(2048, 6.5, write_seconds=0.49 * mttf)) == pytest.approx(0.98**0.5 * mttf)
    assert model.daly_young_seconds(Job(2048, 6.5, write_seconds=0.51 * mttf)) is None
