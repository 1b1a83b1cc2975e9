"""The daemon's side of the hooks: when it requests a run, and which results it shows."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from waiting import until

from healthd.agent.hooks import payload
from healthd.agent.hooks.request import HooksRequest, parse_request
from healthd.agent.hooks.result import HookResult, render_results, result_path
from healthd.agent.hooks.trigger import MARKS, HookTrigger
from healthd.agent.settings.config import HOOKS, HooksConfig, Settings
from healthd.events.schema import Event, Source, render
from healthd.host.separate_program import request_file

SOURCE = Source("c1", "n1", "b", "a" * 16)
DRAIN = render(SOURCE, 1, 1e9, 1.0, Event("drain", {"stage": "confirmed", "reason": "healthd: x"}))


def trigger(folder: Path, now: float = 1000.0, argv: tuple[str, ...] = ("true",), **hooks: Any) -> HookTrigger:
    return HookTrigger(settings(folder, **hooks), argv, True, lambda: now, time.monotonic)


def settings(folder: Path, **hooks: Any) -> Settings:
    return Settings(runtime_dir=str(folder), state_dir=f"{folder}/state", hooks=HooksConfig(**hooks))


def requested(folder: Path) -> HooksRequest | None:
    path = Path(request_file(str(folder), "hooks"))
    return parse_request(path.read_text()) if path.exists() else None


def served(folder: Path) -> None:
    Path(request_file(str(folder), "hooks")).unlink()


def test_marks_match_events_of_hooks():
    for (event, stage), hook in payload.HOOK_BY_EVENT.items():
        line = render(SOURCE, 1, 1e9, 1.0, Event(event, {"stage": stage}))
        assert [name for name in HOOKS if all(mark in line for mark in MARKS[name])] == [hook]
    quoted = render(SOURCE, 1, 1e9, 1.0, Event("decision", {"text": DRAIN}))
    assert not any(all(mark in quoted for mark in marks) for marks in MARKS.values())


def test_start_requests_run_with_settings(tmp_path):
    trigger(tmp_path, on_drain=("/x", "a"), retries=1).start()
    config = HooksConfig(on_drain=("/x", "a"), retries=1)
    assert requested(tmp_path) == HooksRequest(f"{tmp_path}/state", {"on_drain": 1000.0}, config)


def test_node_without_hooks_requests_nothing(tmp_path):
    hooks = trigger(tmp_path)
    hooks.start()
    hooks.take_written([DRAIN])
    hooks.end_round()
    hooks.step()
    assert os.listdir(tmp_path) == []
    assert (hooks.results, hooks.problem) == ({}, "")


def test_removed_hooks_are_reported_to_runner(tmp_path):
    hooks = trigger(tmp_path)
    hooks.start()
    assert requested(tmp_path) is None
    hooks.remove_record()
    assert requested(tmp_path) == HooksRequest(f"{tmp_path}/state", {}, HooksConfig())


def test_removed_hooks_replace_request_that_was_not_served(tmp_path):
    trigger(tmp_path, on_drain=("/x",)).start()
    trigger(tmp_path).start()
    assert requested(tmp_path) == HooksRequest(f"{tmp_path}/state", {}, HooksConfig())


def test_written_event_requests_run(tmp_path):
    hooks = trigger(tmp_path, on_drain=("/x",))
    hooks.start()
    served(tmp_path)
    hooks.take_written([render(SOURCE, 1, 1e9, 1.0, Event("resume", {"stage": "confirmed"}))])
    assert requested(tmp_path) is None
    hooks.take_written([DRAIN])
    assert requested(tmp_path) is not None


def since(folder: Path) -> dict[str, float]:
    request = requested(folder)
    assert request is not None
    return request.since


def test_next_daemon_keeps_time_of_request_that_is_not_served(tmp_path):
    trigger(tmp_path, 1000.0, on_drain=("/x",)).start()
    trigger(tmp_path, 2000.0, on_drain=("/x",), on_resume=("/x",)).start()
    assert since(tmp_path) == {"on_drain": 1000.0, "on_resume": 2000.0}


def test_each_hook_has_the_time_of_its_first_configuration(tmp_path):
    times = iter((1000.0, 1000.0, 2000.0, 2000.0, 3000.0, 3000.0))
    configured = settings(tmp_path, on_drain=("/x",))
    hooks = HookTrigger(configured, ("true",), True, lambda: next(times), time.monotonic)
    hooks.start()
    hooks.reconfigure(settings(tmp_path, on_drain=("/x",), on_resume=("/x",)))
    assert since(tmp_path) == {"on_drain": 1000.0, "on_resume": 2000.0}
    hooks.reconfigure(settings(tmp_path, on_resume=("/x",)))
    assert since(tmp_path) == {"on_resume": 2000.0}


def test_served_request_is_the_time_for_a_record_that_is_lost_later(tmp_path):
    now, monotonic = [1000.0], [0.0]
    configured = settings(tmp_path, on_drain=("/x",))
    hooks = HookTrigger(configured, ("true",), True, lambda: now[0], lambda: monotonic[0])
    hooks.start()
    now[0] = 2000.0
    hooks.take_written([DRAIN])
    assert since(tmp_path) == {"on_drain": 1000.0}
    served(tmp_path)
    now[0], monotonic[0] = 2500.0, 60.0
    hooks.step()
    now[0] = 3000.0
    hooks.take_written([DRAIN])
    assert since(tmp_path) == {"on_drain": 2000.0}


def test_reload_requests_run_only_if_hooks_changed(tmp_path):
    hooks = trigger(tmp_path)
    hooks.start()
    hooks.reconfigure(replace(settings(tmp_path), interval_seconds=5.0))
    assert requested(tmp_path) is None
    hooks.reconfigure(settings(tmp_path, on_resume=("/x",)))
    request = requested(tmp_path)
    assert request is not None
    assert set(request.hooks.programs) == {"on_resume"}
    assert hooks.results == {"on_resume": HookResult()}


def test_results_are_read_when_their_file_changes(tmp_path):
    hooks = trigger(tmp_path, on_drain=("/x",))
    hooks.end_round()
    assert hooks.results == {"on_drain": HookResult()}
    results = {"on_drain": HookResult(2, "exit status 1"), "on_resume": HookResult(1)}
    Path(result_path(str(tmp_path))).write_bytes(render_results(results))
    hooks.end_round()
    assert hooks.results == {"on_drain": HookResult(2, "exit status 1")}
    Path(result_path(str(tmp_path))).write_bytes(b"{")
    hooks.end_round()
    assert hooks.results == {"on_drain": HookResult()}


def test_request_that_cannot_be_written_is_a_problem_and_repeated(tmp_path):
    folder = tmp_path / "run"
    hooks = trigger(folder, on_drain=("/x",))
    hooks.start()
    assert hooks.problem
    folder.mkdir()
    hooks.end_round()
    assert hooks.problem == ""
    assert requested(folder) is not None


def test_program_without_systemd_is_a_child(tmp_path):
    argv = (sys.executable, "-m", "healthd", "hooks", "run", "--runtime-dir", str(tmp_path))
    state = tmp_path / "state"
    child_settings = replace(settings(tmp_path, on_drain=("/bin/true",)), state_dir=str(state))
    hooks = HookTrigger(child_settings, argv, False, time.time, time.monotonic)
    hooks.start()

    def is_served() -> bool:
        hooks.step()
        return requested(tmp_path) is None

    until(is_served, "the request is served")
    assert (state / "hooks.json").exists()
    hooks.close()


@pytest.mark.one_python
def test_trigger_imports_nothing_of_runner():
    program = "import sys, healthd.agent.daemon; print(*(m for m in sys.modules if m.startswith('healthd')))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert "healthd.agent.hooks.trigger" in loaded
    unwanted = {"healthd.agent.hooks.runner", "healthd.agent.hooks.payload", "healthd.events.reader"}
    assert loaded & unwanted == set()
