"""detection_pause: a file with the end of the pause. No content of the file can break its reader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.common import detection_pause
from healthd.common.detection_pause import FILE, MAX_SECONDS, DetectionPause, active_pause, parse

NOW = 1_795_000_000.0
PAUSE = DetectionPause(NOW + 7200, "a benchmark", "root (uid 0)", NOW)


@pytest.fixture
def runtime(tmp_path: Path) -> str:
    detection_pause.write_pause(str(tmp_path), PAUSE)
    return str(tmp_path)


def test_active_pause_ends_exactly_at_until(runtime: str) -> None:
    assert active_pause(runtime, NOW) == active_pause(runtime, PAUSE.until - 0.001) == PAUSE
    assert active_pause(runtime, PAUSE.until) is None


def test_write_pause_makes_file_readable_for_all_and_writable_for_root(runtime: str) -> None:
    assert (Path(runtime) / FILE).stat().st_mode & 0o777 == 0o644


def test_write_pause_replaces_and_remove_pause_ends_it(runtime: str) -> None:
    shorter = DetectionPause(NOW + 60, "shorter", "root (uid 0)", NOW)
    detection_pause.write_pause(runtime, shorter)
    assert active_pause(runtime, NOW) == shorter
    assert detection_pause.remove_pause(runtime)
    assert active_pause(runtime, NOW) is None
    assert not detection_pause.remove_pause(runtime)


def test_active_pause_returns_none_without_directory(tmp_path: Path) -> None:
    assert active_pause(str(tmp_path / "none"), NOW) is None


def test_active_pause_returns_none_for_a_folder(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    assert active_pause(str(tmp_path), NOW) is None


@pytest.mark.parametrize(("seconds", "is_valid"), [(MAX_SECONDS, True), (MAX_SECONDS + 1, False), (0.0, False)])
def test_parse_rejects_pause_longer_than_a_week(seconds: float, is_valid: bool) -> None:
    text = json.dumps({"until": NOW + seconds, "why": "x", "who": "y", "given": NOW})
    assert (parse(text.encode()) is not None) is is_valid


KEYS = st.sampled_from(["until", "why", "who", "given", "x"])
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda some: st.dictionaries(KEYS, some, max_size=5) | st.lists(some),
)


@given(st.binary(max_size=200) | JSON.map(lambda data: json.dumps(data).encode()))
def test_parse_of_any_content_gives_a_pause_or_none(content: bytes) -> None:
    found = parse(content)
    assert found is None or 0 < found.until - found.given <= MAX_SECONDS
