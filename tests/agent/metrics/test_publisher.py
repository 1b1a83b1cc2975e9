"""Tests of the publisher: the verdict file is written when the verdict changes, and after each round."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from fakes import NOW
from fakes import PLAIN_SNAPSHOT as PLAIN
from msgspec.structs import replace

from healthd.agent.metrics.publisher import Publisher
from healthd.agent.settings.config import Settings
from healthd.common.paths import VERDICT_FILE


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(Settings(runtime_dir=str(tmp_path)))


def verdict(publisher: Publisher) -> str:
    return (Path(publisher.settings.runtime_dir) / VERDICT_FILE).read_text()


def test_the_verdict_is_written_when_its_word_changes_and_after_each_round(publisher: Publisher) -> None:
    assert publisher.publish(PLAIN, drain=False, until=NOW + 10, round_ended=False)
    first = verdict(publisher)
    assert not publisher.publish(PLAIN, drain=False, until=NOW + 20, round_ended=False)
    assert verdict(publisher) == first
    assert publisher.publish(PLAIN, drain=False, until=NOW + 20, round_ended=True)
    assert verdict(publisher) != first, "it has a later expiry time"
    assert publisher.publish(PLAIN, drain=True, until=NOW + 20, round_ended=False)
    assert publisher.verdict_word == verdict(publisher).split()[0] == "drain"


def test_what_is_shown_is_the_last_also_where_the_verdict_is_not_written_anew(publisher: Publisher) -> None:
    publisher.publish(PLAIN, drain=False, until=NOW, round_ended=True)
    later = replace(PLAIN, now=NOW + 5)
    assert not publisher.publish(later, drain=False, until=NOW, round_ended=False)
    assert publisher.snapshot is later


def test_a_verdict_that_cannot_be_written_is_told_and_ends_nothing(
    publisher: Publisher, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / VERDICT_FILE).mkdir()
    assert publisher.publish(PLAIN, drain=False, until=NOW, round_ended=True)
    assert publisher.verdict_problem in caplog.text
    (tmp_path / VERDICT_FILE).rmdir()
    assert publisher.publish(PLAIN, drain=False, until=NOW, round_ended=False), "it is retried at once"
    assert not publisher.verdict_problem


@pytest.mark.parametrize(("before", "after"), [("ok", "drain"), ("drain", "ok")])
def test_verdict_is_overwritten_when_no_new_file_can_be_made(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    publisher.publish(PLAIN, drain=before == "drain", until=NOW + 10**9, round_ended=True)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("healthd.agent.metrics.publisher.replace_file", full)
    publisher.publish(PLAIN, drain=after == "drain", until=NOW + 20, round_ended=True)
    word, expires, *_ = verdict(publisher).splitlines()[0].split()
    assert (word, int(expires)) == (after, int(NOW) + 20)
    assert not publisher.verdict_problem


@pytest.mark.parametrize(("before", "stays"), [("ok", False), ("drain", True)])
def test_verdict_that_admits_jobs_is_removed_when_it_cannot_be_written(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, before: str, stays: bool
) -> None:
    publisher.publish(PLAIN, drain=before == "drain", until=NOW + 10, round_ended=True)

    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("healthd.agent.metrics.publisher.replace_file", broken)
    monkeypatch.setattr("healthd.agent.metrics.publisher.overwrite_file", broken)
    publisher.publish(PLAIN, drain=True, until=NOW + 20, round_ended=True)
    assert (Path(publisher.settings.runtime_dir) / VERDICT_FILE).exists() == stays
    assert publisher.verdict_problem


def test_news_is_what_the_shown_rests_on_and_has_changed(publisher: Publisher) -> None:
    assert publisher.has_changed(("healthy", 1))
    assert not publisher.has_changed(("healthy", 1))
    assert publisher.has_changed(("healthy", 2))


def test_metrics_that_nobody_wants_are_not_served(tmp_path: Path) -> None:
    quiet = Settings(runtime_dir=str(tmp_path))
    quiet = replace(quiet, metrics=replace(quiet.metrics, listen="off"))
    publisher = Publisher(quiet)
    publisher.serve_metrics()
    assert (publisher._pages, publisher.metrics_problems) == (None, ())
    publisher.close()
