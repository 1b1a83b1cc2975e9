"""The runner: each event runs its hook once, whatever is killed, and a program that fails or hangs stops nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from event_lines import NOON, line
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from healthd.agent.hooks.request import HooksRequest, UnreadableRequest, parse_request, render_request
from healthd.agent.hooks.result import HookResult, parse_results, read_results, render_results
from healthd.agent.hooks.runner import HooksState, load_state, mark_working, run_hook, serve_request
from healthd.agent.settings.config import HooksConfig
from healthd.common.values import DecodeError, decode, encode
from healthd.host.separate_program import OpenRequest

FILE = "hooks.json"
REASON = "healthd: gpu_xid/79"
FIRST = f'"reason":"{REASON} 1"'


def program(folder: Path, body: str = "cat >> $OUT; echo >> $OUT", name: str = "hook") -> tuple[str, ...]:
    path = folder / name
    path.write_text(f"#!/bin/sh\nOUT={folder}/out\n{body}\n")
    path.chmod(0o755)
    return (str(path),)


def drain(seq: int, **fields: Any) -> bytes:
    return line(seq, "drain", at=NOON + seq, stage="confirmed", reason=f"{REASON} {seq}", **fields) + b"\n"


def resume(seq: int, **fields: Any) -> bytes:
    return line(seq, "resume", at=NOON + seq, stage="confirmed", reason=REASON, **fields) + b"\n"


def write(folder: Path, *lines: bytes, name: str = "events.jsonl") -> None:
    with open(folder / name, "ab") as file:
        file.write(b"".join(lines))


def request_text(folder: Path, since: float = NOON, **hooks: Any) -> str:
    config = HooksConfig(**hooks)
    return render_request(HooksRequest(str(folder), dict.fromkeys(config.programs, since), config))


def serve(
    folder: Path,
    since: float = NOON,
    delays: list[float] | None = None,
    is_replaced: Callable[[], bool] = lambda: False,
    **hooks: Any,
) -> None:
    request = OpenRequest(request_text(folder, since, **hooks), is_replaced=is_replaced)
    serve_request(request, str(folder), ([] if delays is None else delays).append)


def payloads(folder: Path) -> list[dict[str, Any]]:
    path = folder / "out"
    return [json.loads(text) for text in path.read_text().splitlines() if text] if path.exists() else []


def seqs(folder: Path) -> list[int]:
    return [int(payload["id"].rpartition("-")[2]) for payload in payloads(folder)]


def test_each_event_runs_its_hook_once(tmp_path):
    argv = program(tmp_path)
    write(tmp_path, drain(1), line(2) + b"\n", resume(3))
    serve(tmp_path, on_drain=argv, on_resume=argv)
    assert [p["hook"] for p in payloads(tmp_path)] == ["on_drain", "on_resume"]
    serve(tmp_path, on_drain=argv, on_resume=argv)
    write(tmp_path, drain(4))
    serve(tmp_path, on_drain=argv, on_resume=argv)
    assert seqs(tmp_path) == [1, 3, 4]


def test_rotated_stream_runs_each_event_once(tmp_path):
    argv = program(tmp_path)
    write(tmp_path, drain(1))
    serve(tmp_path, on_drain=argv)
    write(tmp_path, drain(2))
    os.rename(tmp_path / "events.jsonl", tmp_path / "events.jsonl.1")
    write(tmp_path, drain(2), drain(3))
    serve(tmp_path, on_drain=argv)
    assert seqs(tmp_path) == [1, 2, 3]


def test_events_before_first_configuration_run_nothing(tmp_path):
    argv = program(tmp_path)
    write(tmp_path, drain(1), drain(10))
    serve(tmp_path, since=NOON + 5, on_drain=argv)
    assert seqs(tmp_path) == [10]
    write(tmp_path, resume(11), resume(20))
    serve(tmp_path, since=NOON + 15, on_drain=argv, on_resume=argv)
    assert seqs(tmp_path) == [10, 20]


def test_later_request_of_known_hook_does_not_depend_on_clock(tmp_path):
    argv = program(tmp_path)
    serve(tmp_path, on_drain=argv)
    write(tmp_path, drain(1))
    serve(tmp_path, since=NOON + 1000, on_drain=argv)
    assert seqs(tmp_path) == [1]


def test_hook_that_was_removed_gets_no_old_events_when_it_returns(tmp_path):
    argv = program(tmp_path)
    serve(tmp_path, on_drain=argv)
    write(tmp_path, drain(1))
    serve(tmp_path)
    assert read_results(str(tmp_path)) == {}
    write(tmp_path, drain(2))
    serve(tmp_path, since=NOON + 100, on_drain=argv)
    assert seqs(tmp_path) == []


def test_conditions_from_earlier_runs_are_in_payload(tmp_path):
    argv = program(tmp_path)
    opened = {"condition": "x-1", "check": "gpu_xid", "code": "gpu_xid/79", "severity": "critical", "message": "gone"}
    write(tmp_path, line(1, "opened", **opened, serial="165") + b"\n")
    serve(tmp_path, on_drain=argv)
    write(tmp_path, drain(2))
    serve(tmp_path, on_drain=argv)
    (found,) = payloads(tmp_path)
    assert [(c["code"], c["serial"]) for c in found["conditions"]] == [("gpu_xid/79", "165")]


def test_failed_program_is_retried_with_growing_delays_and_next_event_follows(tmp_path):
    argv = program(tmp_path, f"grep -q '{FIRST}' && {{ echo no route >&2; exit 7; }} || echo >> $OUT")
    write(tmp_path, drain(1), drain(2))
    delays: list[float] = []
    serve(tmp_path, delays=delays, on_drain=argv, retries=2)
    assert delays == [5.0, 20.0]
    result = read_results(str(tmp_path))["on_drain"]
    assert (result.failures, result.error) == (1, "")
    assert (tmp_path / "out").exists()


def test_failure_has_status_and_last_line(tmp_path):
    argv = program(tmp_path, "echo one; echo two >&2; exit 7")
    write(tmp_path, drain(1))
    serve(tmp_path, on_drain=argv, retries=0)
    result = read_results(str(tmp_path))["on_drain"]
    assert result.failures == 1
    assert "exit status 7: two" in result.error
    write(tmp_path, drain(2))
    serve(tmp_path, on_drain=argv, retries=0)
    assert read_results(str(tmp_path))["on_drain"].failures == 2
    mark_working("on_drain", str(tmp_path), str(tmp_path))
    assert read_results(str(tmp_path))["on_drain"] == HookResult(failures=2)


def test_hanging_program_is_killed_with_its_children(tmp_path):
    argv = program(tmp_path, f"sleep 600 & echo $! > {tmp_path}/pid; wait")
    attempt = run_hook("on_drain", argv, {}, 1.0)
    assert attempt.error
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not os.path.exists(f"/proc/{pid}"), "the child has ended")


def test_program_that_ignores_its_input_works(tmp_path):
    assert run_hook("on_drain", program(tmp_path, "exit 0"), {"text": "x" * 300_000}, 30.0).error == ""


def test_missing_and_untrusted_programs_fail(tmp_path):
    assert run_hook("on_drain", (str(tmp_path / "none"),), {}, 30.0).error
    argv = program(tmp_path)
    Path(argv[0]).write_text("#!/nonexistent\n")
    assert "interpreter" in run_hook("on_drain", argv, {}, 30.0).error
    os.chmod(argv[0], 0o777)
    attempt = run_hook("on_drain", argv, {}, 30.0)
    assert "writable" in attempt.error
    assert payloads(tmp_path) == []


def test_program_gets_environment_and_json(tmp_path):
    argv = program(tmp_path, 'printf \'{"hook": "%s", "arg": "%s"}\\n\' "$HEALTHD_HOOK" "$1" > $OUT')
    assert run_hook("on_resume", (*argv, "a b"), {"node": "n1"}, 30.0).error == ""
    assert payloads(tmp_path) == [{"hook": "on_resume", "arg": "a b"}]


RUN = (
    "import sys; from healthd.agent.hooks.runner import serve_request; "
    "from healthd.host.separate_program import OpenRequest; serve_request(OpenRequest(sys.argv[1]), sys.argv[2])"
)


def test_killed_runner_runs_event_again_and_only_this_event(tmp_path):
    body = f"cat >> $OUT; [ -e {tmp_path}/go ] || {{ touch {tmp_path}/started; sleep 600; }}"
    argv = program(tmp_path, f"if grep -q '{FIRST}'; then echo first >> $OUT; exit 0; fi; {body}")
    write(tmp_path, drain(1), drain(2), drain(3))
    text = request_text(tmp_path, on_drain=argv, timeout_seconds=600.0)
    command = [sys.executable, "-c", RUN, text, str(tmp_path)]
    with subprocess.Popen(command, start_new_session=True) as runner:
        until((tmp_path / "started").exists, "the second event runs")
        runner.send_signal(signal.SIGKILL)
    (tmp_path / "go").touch()
    serve_request(OpenRequest(text), str(tmp_path), time.sleep)
    assert (tmp_path / "out").read_text().splitlines().count("first") == 1
    state = load_state(str(tmp_path))
    assert state.view.drain is not None
    assert state.view.drain.reason == f"{REASON} 3"
    for process in os.listdir("/proc"):  # the killed runner's program
        if process.isdigit() and argv[0].encode() in _command_line(process):
            os.killpg(int(process), signal.SIGKILL)


def test_program_that_kills_the_runner_runs_a_limited_number_of_times(tmp_path):
    argv = program(tmp_path, f"if grep -q '{FIRST}'; then echo first >> $OUT; kill -9 $PPID; fi; exit 0")
    serve(tmp_path, on_drain=argv, retries=1)  # the hook is settled before the first event
    write(tmp_path, drain(1), drain(2))
    command = [sys.executable, "-c", RUN, request_text(tmp_path, on_drain=argv, retries=1), str(tmp_path)]
    statuses = [subprocess.run(command, timeout=240).returncode for _ in range(4)]
    assert statuses == [-signal.SIGKILL, -signal.SIGKILL, 0, 0]
    assert (tmp_path / "out").read_text().split() == ["first", "first"]
    assert read_results(str(tmp_path))["on_drain"] == HookResult(failures=1)
    assert (load_state(str(tmp_path)).event, load_state(str(tmp_path)).runs) == ("", 0)


def test_interrupted_run_without_retry_is_a_failure(tmp_path):
    argv = program(tmp_path, "kill -9 $PPID")
    write(tmp_path, drain(1))
    command = [sys.executable, "-c", RUN, request_text(tmp_path, on_drain=argv, retries=0), str(tmp_path)]
    assert subprocess.run(command, timeout=240).returncode == -signal.SIGKILL
    serve(tmp_path, on_drain=argv, retries=0)
    result = read_results(str(tmp_path))["on_drain"]
    assert result.failures == 1
    assert "interrupted" in result.error


def test_replaced_request_ends_pass_between_retries_and_keeps_number_of_runs(tmp_path):
    argv = program(tmp_path, "cat >> $OUT; echo >> $OUT; exit 1")
    write(tmp_path, drain(1))
    serve(tmp_path, is_replaced=lambda: bool(payloads(tmp_path)), on_drain=argv, retries=1)
    assert (seqs(tmp_path), load_state(str(tmp_path)).runs) == ([1], 1)
    assert read_results(str(tmp_path))["on_drain"] == HookResult()
    delays: list[float] = []
    serve(tmp_path, delays=delays, on_drain=argv, retries=1)
    assert (seqs(tmp_path), delays) == ([1, 1], [])
    assert read_results(str(tmp_path))["on_drain"].failures == 1


def test_replaced_request_ends_pass_between_events(tmp_path):
    argv = program(tmp_path)
    write(tmp_path, drain(1), drain(2))
    serve(tmp_path, is_replaced=lambda: bool(payloads(tmp_path)), on_drain=argv)
    assert seqs(tmp_path) == [1]
    serve(tmp_path, on_drain=argv)
    assert seqs(tmp_path) == [1, 2]


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("content", [b"", b"{", b'{"cursor": "x"}', b"[]", b'{"cursor": "[[1],[]]"}'])
def test_damaged_state_starts_anew(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    argv = program(tmp_path)
    write(tmp_path, drain(1), drain(9))
    serve(tmp_path, since=NOON + 5, on_drain=argv)
    assert seqs(tmp_path) == [9]


def test_state_that_cannot_be_recorded_stops_before_a_program_runs(tmp_path):
    argv = program(tmp_path)
    write(tmp_path, drain(1))
    (tmp_path / FILE).mkdir()
    with pytest.raises(OSError, match="directory"):
        serve(tmp_path, on_drain=argv)
    assert payloads(tmp_path) == []


def test_run_that_cannot_be_recorded_does_not_begin(tmp_path):
    """The state is settled, so that the first record of the pass changes nothing on disk."""
    argv = program(tmp_path)
    serve(tmp_path, on_drain=argv)
    write(tmp_path, drain(1))
    obstacle = tmp_path / f"{FILE}.{os.getpid()}.new"
    obstacle.mkdir()
    for _ in range(3):
        with pytest.raises(OSError, match="directory"):
            serve(tmp_path, on_drain=argv)
    assert payloads(tmp_path) == []
    obstacle.rmdir()
    serve(tmp_path, on_drain=argv)
    assert seqs(tmp_path) == [1]


def test_removed_hooks_remove_state_and_results(tmp_path):
    serve(tmp_path, on_drain=program(tmp_path))
    assert (tmp_path / FILE).exists()
    for _ in range(2):
        serve(tmp_path)
        assert not (tmp_path / FILE).exists()
        assert read_results(str(tmp_path)) == {}


def test_missing_state_directory_is_created(tmp_path):
    text = request_text(tmp_path / "state", on_drain=program(tmp_path))
    serve_request(OpenRequest(text), str(tmp_path))
    assert (tmp_path / "state" / FILE).exists()


@pytest.mark.parametrize("text", ["{}", '{"state_dir": "/x", "since": {}, "hooks": {"on_drain": ["/x"]}}'])
def test_request_that_no_version_wrote_is_ignored_by_a_new_process_only(tmp_path, text):
    with pytest.raises(UnreadableRequest):
        serve_request(OpenRequest(text, number=2), str(tmp_path))
    serve_request(OpenRequest(text), str(tmp_path))
    assert not (tmp_path / FILE).exists()


@given(st.text() | st.binary().map(lambda data: data.decode("utf-8", "replace")))
def test_parse_request_accepts_any_text(text):
    request = parse_request(text)
    assert request is None or isinstance(request, HooksRequest)


@given(st.floats(0, 1e12), st.lists(st.text(), max_size=3), st.integers(0, 10))
def test_request_is_parsed_as_rendered(since, words, retries):
    request = HooksRequest("/s", {"on_drain": since}, HooksConfig(on_drain=tuple(words), retries=retries))
    assert parse_request(render_request(request)) == request


@given(st.dictionaries(st.text(), st.builds(HookResult, st.integers(0, 2**60), st.text())))
def test_results_are_parsed_as_rendered(results):
    assert parse_results(render_results(results)) == results


@given(st.binary())
def test_parse_results_rejects_other_bytes(data):
    with contextlib.suppress(DecodeError):
        parse_results(data)


def test_state_is_read_as_written():
    state = HooksState("[[],[]]", hooks={"on_drain": 0.0}, results={"on_drain": HookResult(1, "e")}, runs=1)
    assert decode(HooksState, encode(state)) == state
