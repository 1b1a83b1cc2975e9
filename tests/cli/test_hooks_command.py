"""`healthd hooks`: the sample event, the exit status of a test, and a run without and with a request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from event_lines import line

from healthd.agent.hooks.request import PROGRAM, HooksRequest, render_request
from healthd.agent.hooks.result import HookResult, read_results
from healthd.agent.hooks.runner import HooksState, load_state, save_state
from healthd.agent.settings.config import HOOKS, HooksConfig
from healthd.cli.main import main
from healthd.host.separate_program import request_file


def settings(folder: Path, **programs: list[str]) -> list[str]:
    path = folder / "healthd.toml"
    lines = [f"{name} = {json.dumps(argv)}" for name, argv in programs.items()]
    path.write_text("\n".join(["cluster = 'c1'", "node_name = 'n1'", "[hooks]", *lines]))
    return ["--config", str(path), "--runtime-dir", str(folder), "--state-dir", str(folder)]


@pytest.mark.parametrize("hook", HOOKS)
def test_print_shows_sample_without_running_anything(hook, tmp_path, capsys):
    assert main(["hooks", "test", hook, "--print", *settings(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["hook"], document["node"], document["test"]) == (hook, "n1", True)


def test_test_passes_sample_to_program(tmp_path, capsys):
    command = ["/bin/sh", "-c", f"cat > {tmp_path}/out"]
    assert main(["hooks", "test", "on_drain", *settings(tmp_path, on_drain=command)]) == 0
    document = json.loads((tmp_path / "out").read_text())
    assert (document["v"], document["cluster"], document["test"]) == (1, "c1", True)


def test_successful_test_ends_recorded_failure(tmp_path, capsys):
    failed = HooksState(hooks={"on_drain": 0.0}, results={"on_drain": HookResult(3, "no route")})
    save_state(str(tmp_path), str(tmp_path), failed)
    assert main(["hooks", "test", "on_drain", *settings(tmp_path, on_drain=["/bin/false"])]) == 1
    assert read_results(str(tmp_path))["on_drain"].error
    assert main(["hooks", "test", "on_drain", *settings(tmp_path, on_drain=["/bin/true"])]) == 0
    assert read_results(str(tmp_path))["on_drain"] == HookResult(3)
    assert load_state(str(tmp_path)).results["on_drain"] == HookResult(3)


def test_test_without_daemon_changes_nothing(tmp_path, capsys):
    folder = tmp_path / "none"
    flags = [*settings(tmp_path, on_drain=["/bin/true"])[:2], "--runtime-dir", str(folder), "--state-dir", str(folder)]
    assert main(["hooks", "test", "on_drain", *flags]) == 0
    assert not folder.exists()


def test_run_serves_request(tmp_path):
    assert main(["hooks", "run", "--runtime-dir", str(tmp_path)]) == 0
    request = Path(request_file(str(tmp_path), PROGRAM))
    request.write_text(
        render_request(HooksRequest(str(tmp_path), {"on_drain": 0.0}, HooksConfig(on_drain=("/bin/true",))))
    )
    assert main(["hooks", "run", "--runtime-dir", str(tmp_path)]) == 0
    assert not request.exists()
    assert read_results(str(tmp_path)) == {"on_drain": HookResult()}


def test_run_that_cannot_record_its_state_keeps_request(tmp_path, capsys):
    request = Path(request_file(str(tmp_path), PROGRAM))
    request.write_text(
        render_request(HooksRequest("/proc/none", {"on_drain": 0.0}, HooksConfig(on_drain=("/bin/true",))))
    )
    assert main(["hooks", "run", "--runtime-dir", str(tmp_path)]) == 1
    assert request.exists()


def test_run_leaves_request_of_newer_version_to_a_new_process(tmp_path, capsys):
    """The hook's program writes the request, as an upgraded daemon does while an old process runs the hook."""
    request = Path(request_file(str(tmp_path), PROGRAM))
    (tmp_path / "events.jsonl").write_bytes(line(1, "drain", stage="confirmed", reason="healthd: x") + b"\n")
    argv = ("/bin/sh", "-c", f"echo '{{\"new\": 1}}' > {request}.new; mv {request}.new {request}")
    config = HooksConfig(on_drain=argv)
    request.write_text(render_request(HooksRequest(str(tmp_path), {"on_drain": 0.0}, config)))
    assert main(["hooks", "run", "--runtime-dir", str(tmp_path)]) == 1
    assert json.loads(request.read_text()) == {"new": 1}
    assert main(["hooks", "run", "--runtime-dir", str(tmp_path)]) == 0
    assert not request.exists()
