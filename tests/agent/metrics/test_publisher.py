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


def test_verdict_file_is_written_on_change_and_after_each_round(publisher: Publisher) -> None:
    assert publisher.publish(PLAIN, drain=False, until=NOW + 10, round_ended=False)
    first = verdict(publisher)
    assert not publisher.publish(PLAIN, drain=False, until=NOW + 20, round_ended=False)
    assert verdict(publisher) == first
    assert publisher.publish(PLAIN, drain=False, until=NOW + 20, round_ended=True)
    assert verdict(publisher) != first, "it has a later expiry time"
    assert publisher.publish(PLAIN, drain=True, until=NOW + 20, round_ended=False)
    assert publisher.verdict_word == verdict(publisher).split()[0] == "drain"


def test_publish_updates_snapshot_without_new_verdict_file(publisher: Publisher) -> None:
    publisher.publish(PLAIN, drain=False, until=NOW, round_ended=True)
    later = replace(PLAIN, now=NOW + 5)
    assert not publisher.publish(later, drain=False, until=NOW, round_ended=False)
    assert publisher.snapshot is later


def test_verdict_write_error_is_reported_and_retried(
    publisher: Publisher, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / VERDICT_FILE).mkdir()
    assert publisher.publish(PLAIN, drain=False, until=NOW, round_ended=True)
    assert publisher.verdict_problem in caplog.text
    (tmp_path / VERDICT_FILE).rmdir()
    assert publisher.publish(PLAIN, drain=False, until=NOW, round_ended=False), "it is retried at once"
    assert not publisher.verdict_problem


@pytest.mark.parametrize(("first_word", "second_word"), [("ok", "drain"), ("drain", "ok")])
def test_verdict_is_overwritten_when_no_new_file_can_be_made(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, first_word: str, second_word: str
) -> None:
    publisher.publish(PLAIN, drain=first_word == "drain", until=NOW + 10**9, round_ended=True)

    def fail_no_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("healthd.agent.metrics.publisher.replace_file", fail_no_space)
    publisher.publish(PLAIN, drain=second_word == "drain", until=NOW + 20, round_ended=True)
    word, expires, *_ = verdict(publisher).splitlines()[0].split()
    assert (word, int(expires)) == (second_word, int(NOW) + 20)
    assert not publisher.verdict_problem


@pytest.mark.parametrize(("first_word", "is_kept"), [("ok", False), ("drain", True)])
def test_verdict_that_admits_jobs_is_removed_if_not_writable(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, first_word: str, is_kept: bool
) -> None:
    publisher.publish(PLAIN, drain=first_word == "drain", until=NOW + 10, round_ended=True)

    def fail_io(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("healthd.agent.metrics.publisher.replace_file", fail_io)
    monkeypatch.setattr("healthd.agent.metrics.publisher.overwrite_file", fail_io)
    publisher.publish(PLAIN, drain=True, until=NOW + 20, round_ended=True)
    assert (Path(publisher.settings.runtime_dir) / VERDICT_FILE).exists() == is_kept
    assert publisher.verdict_problem


def test_has_changed_compares_with_last_value(publisher: Publisher) -> None:
    assert publisher.has_changed(("healthy", 1))
    assert not publisher.has_changed(("healthy", 1))
    assert publisher.has_changed(("healthy", 2))


def test_metrics_are_not_served_with_listen_off(tmp_path: Path) -> None:
    settings = Settings(runtime_dir=str(tmp_path))
    settings = replace(settings, metrics=replace(settings.metrics, listen="off"))
    publisher = Publisher(settings)
    publisher.serve_metrics()
    assert (publisher._pages, publisher.metrics_problems) == (None, ())
    publisher.close()
