"""Tests of `healthd doctor`: its lines for the state of a node. An area that hangs or dies delays no other area."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slurm_text import columns
from status_daemon import StatusDaemon

from healthd.agent.doctor import parallel, service, slurm, visibility
from healthd.agent.doctor.result import (
    Line,
    State,
    absent_line,
    failed_line,
    limited_line,
    line_json,
    ok_line,
    status,
    text,
)
from healthd.agent.settings import layers
from healthd.agent.settings.config import HooksConfig, MetricsConfig, Settings
from healthd.cli import flags
from healthd.cli.main import main
from healthd.common.model import CheckResult, Finding, Mode, Observation, Outcome, Severity
from healthd.common.page import Page
from healthd.common.slurm import commands
from healthd.common.slurm.commands import CommandResult

# --- lines and exit status


def test_status_follows_worst_line() -> None:
    assert status([]) == 0
    assert status([ok_line("a", ""), absent_line("b", "")]) == 0
    assert status([ok_line("a", ""), limited_line("b", "")]) == 1
    assert status([limited_line("a", ""), failed_line("b", "")]) == 2


def document(*lines: Line) -> dict[str, object]:
    head = {"version": "1", "node": "n1", "user": "root", "mode": "act", "time": 0.0}
    return {**head, "lines": [line_json(line) for line in lines]}


def test_text_puts_failures_first_with_fix() -> None:
    output = text(
        document(ok_line("GPUs", "8"), failed_line("munge", "it is dead", "systemctl restart munge")), Page(80)
    )
    assert output.index("munge") < output.index("GPUs")
    assert "-> systemctl restart munge" in output
    assert re.match(r"n1: healthd 1 .*root, mode act: 1 ", output)


def test_text_without_failures_says_so() -> None:
    assert "all works" in text(document(ok_line("GPUs", "8 GPUs"), absent_line("IPMI", "none")), Page(80))


@given(st.text(), st.text(), st.text(), st.integers(40, 200))
def test_text_escapes_control_characters(node: str, message: str, fix: str, width: int) -> None:
    output = text({**document(failed_line("x", message, fix)), "node": node}, Page(width))
    assert all(character.isprintable() or character == "\n" for character in output)


# --- areas that hang, die or fail


def run_area(area: Callable[[], Sequence[Line]], seconds: float = 60.0) -> Line:
    (line,) = parallel.run_areas([("area", seconds, area)])
    return line


def test_run_areas_reports_area_that_hangs() -> None:
    def hang() -> Sequence[Line]:
        time.sleep(1000)
        return []

    lines = parallel.run_areas([("first", 0.2, hang), ("second", 60.0, lambda: [ok_line("second", "fine")])])
    assert [(line.topic, line.state) for line in lines] == [("first", State.FAILED), ("second", State.OK)]
    assert "no answer within 0.2 s" in lines[0].message


def test_run_areas_reports_area_that_fails_or_dies() -> None:
    def fail() -> Sequence[Line]:
        raise RuntimeError("what is this")

    failed, dead = run_area(fail), run_area(lambda: os._exit(9))
    assert [(line.topic, line.state) for line in (failed, dead)] == [("area", State.FAILED)] * 2
    assert failed.message.endswith(": what is this")
    assert dead.message.endswith(" died")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("TimeoutError: /bin/sh: did not end within 19 s", "/bin/sh: did not end within 19 s"),
        ("RuntimeError: no such bus", "no such bus"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/x'", "No such file or directory: '/x'"),
        ("KeyError: 'model'", "KeyError: 'model'"),
        ("TimeoutError", "TimeoutError"),
        ("an OSError: x", "an OSError: x"),
    ],
)
def test_check_error_omits_uninformative_class_name(error: str, expected: str) -> None:
    line = visible_lines(ROOT, result("exec", Outcome.FAILED, error=error))["checks"]
    assert line.message.startswith("1 of 1 ")
    assert line.message.endswith(f" cannot run: {expected}")


def test_run_areas_returns_long_answer() -> None:
    assert run_area(lambda: [ok_line("area", "x" * 1_000_000)]).message == "x" * 1_000_000


def test_call_all_returns_any_picklable_value() -> None:
    assert parallel.call_all([(60.0, lambda: {"a": [1]}), (60.0, lambda: 1 / 0), (60.0, lambda: lambda: 0)])[0] == {
        "a": [1]
    }
    unpicklable, raised = parallel.call_all([(60.0, lambda: lambda: 0), (60.0, lambda: 1 / 0)])
    assert isinstance(unpicklable, parallel.Unanswered)
    assert raised.why.endswith(": ZeroDivisionError: division by zero")


# --- what the checks can read

ROOT = visibility.Environment(ipmi_device=True, ipmitool=True, is_root=True)


def result(check: str, outcome: Outcome = Outcome.COMPLETED, **fields: object) -> CheckResult:
    return CheckResult(check=check, outcome=outcome, started=0.0, duration_seconds=0.1, **{"instance": "", **fields})  # type: ignore[arg-type]


def visible_lines(environment: visibility.Environment, *results: CheckResult) -> dict[str, Line]:
    return {line.topic: line for line in visibility.lines(results, environment)}


def test_visibility_counts_gpus_with_driver() -> None:
    driver = Observation("gpu_driver_info", 1, labels=(("version", "580.105.08"),))
    topics = visible_lines(ROOT, result("gpu_access", observations=(Observation("gpus", 8), driver)))
    assert topics["GPUs"].state is State.OK
    assert topics["GPUs"].message.endswith(" 580.105.08, 8 GPUs")


def test_visibility_without_gpus_is_absent() -> None:
    assert visible_lines(ROOT, result("gpu_access"))["GPUs"].state is State.ABSENT


def test_visibility_fails_with_explain_command_for_unloaded_driver() -> None:
    finding = Finding(Severity.DEGRADED, "gpu_access/driver_not_loaded", "", "the NVIDIA driver is not loaded")
    line = visible_lines(ROOT, result("gpu_access", findings=(finding,)))["GPUs"]
    assert (line.state, line.fix) == (State.FAILED, ("healthd explain gpu_access/driver_not_loaded",))


def test_visibility_fails_for_hung_nvml() -> None:
    line = visible_lines(ROOT, result("gpu_access", Outcome.TIMED_OUT, error="no answer within 10 s"))["GPUs"]
    assert (line.state, line.message.partition(":")[0]) == (State.FAILED, "NVML hangs")
    assert line.message.endswith(" 10 s")


@pytest.mark.parametrize(
    ("environment", "state"),
    [
        (visibility.Environment(ipmi_device=False, ipmitool=False, is_root=True), State.ABSENT),
        (visibility.Environment(ipmi_device=True, ipmitool=False, is_root=True), State.LIMITED),
        (visibility.Environment(ipmi_device=True, ipmitool=True, is_root=True), State.OK),
    ],
)
def test_visibility_is_limited_for_bmc_without_ipmitool(environment: visibility.Environment, state: State) -> None:
    line = visible_lines(environment, result("ipmi_sel"))["IPMI"]
    assert line.state is state
    assert not any(package_manager in str(line) for package_manager in ("apt", "dnf", "yum"))
    assert "modprobe ipmi" not in line.message, "without -a the second module is a parameter of the first"


def test_visibility_suggests_baseline_for_mounts() -> None:
    assert "healthd baseline --write" in visible_lines(ROOT)["mounts"].fix
    hung = result("mount", Outcome.TIMED_OUT, instance="/data", error="no answer within 10 s")
    assert "/data: no answer" in visible_lines(ROOT, hung, result("mount", instance="/home"))["mounts"].message
    assert visible_lines(ROOT, result("mount", instance="/home"))["mounts"] == ok_line("mounts", "1 monitored: /home")


def test_visibility_names_failed_checks_and_merges_equal_reasons() -> None:
    failed = [result(f"c{i}", Outcome.FAILED, error=f"reason {i}") for i in range(5)]
    message = visible_lines(ROOT, *failed, result("well"))["checks"].message
    assert message.startswith("5 of 6 ")
    assert re.findall(r"c(\d): reason \1|and (\d) more", message) == [("0", ""), ("1", ""), ("2", ""), ("", "2")]
    equal_failures = [result(f"c{i}", Outcome.FAILED, error="not root") for i in range(5)]
    message = visible_lines(ROOT, *equal_failures)["checks"].message
    assert message.startswith("5 of 5 ")
    assert message.count("not root") == 1


# --- Slurm

CONFIG = "AuthInfo   = (null)\nAuthType   = auth/munge\nProlog[0]   = /etc/slurm/prolog\nEpilog = (null)\n"
NODE = ("gpu", "1", "idle", "Unknown", "Unknown", "none", "(null)")
INVALID_USER = "slurm_update error: Invalid user id"


class FakePrograms:
    """Results of fake programs, selected by a word of the command line."""

    def __init__(self, **overrides: CommandResult | Exception) -> None:
        self.results = {
            "config": CommandResult(0, CONFIG.encode(), ""),
            "munge": CommandResult(0, b"STATUS: Success (0)", ""),
            "update": CommandResult(1, b"", "slurm_update error: Invalid node name specified\n"),
            "sinfo": CommandResult(
                0, columns(("gpu", "1", "idle", "Unknown", "Unknown", "none", "(null)"), commands.NODE_COLUMNS)
            ),
            **overrides,
        }

    def __call__(self, argv: tuple[str, ...]) -> CommandResult:
        key = (
            "munge"
            if argv[0] == "sh"
            else argv[0]
            if argv[0] == "sinfo"
            else "config"
            if "config" in argv
            else "update"
        )
        answer = self.results[key]
        if isinstance(answer, Exception):
            raise answer
        return answer


def slurm_lines(
    mode: Mode = Mode.ACT, find_program: Callable[[str], str | None] = str, **results: CommandResult | Exception
) -> dict[str, Line]:
    return {
        line.topic: line
        for line in slurm.lines(Settings(mode=mode, node_name="n1"), FakePrograms(**results), find_program)
    }


def test_slurm_lines_are_ok_for_working_slurm() -> None:
    topics = slurm_lines()
    assert {topic: line.state for topic, line in topics.items()} == dict.fromkeys(
        ("munge", "Slurm node", "Slurm rights", "Slurm hooks"), State.OK
    )
    assert topics["Slurm node"].message == "n1 is idle"
    assert "Prolog=/etc/slurm/prolog" in topics["Slurm hooks"].message


@pytest.mark.parametrize(
    ("mode", "state"), [(Mode.ACT, State.FAILED), (Mode.DRAIN, State.FAILED), (Mode.OBSERVE, State.LIMITED)]
)
def test_slurm_rights_fail_only_in_modes_that_use_them(mode: Mode, state: State) -> None:
    assert slurm_lines(mode, update=CommandResult(1, b"", INVALID_USER))["Slurm rights"].state is state


def test_slurm_lines_without_slurm_depend_on_mode() -> None:
    assert slurm_lines(Mode.OBSERVE, find_program=lambda _: None)["Slurm"].state is State.ABSENT
    assert slurm_lines(Mode.ACT, find_program=lambda _: None)["Slurm"].state is State.FAILED


def test_slurm_lines_report_slurmctld_munge_and_node_failures() -> None:
    unreachable = slurm_lines(
        config=CommandResult(1, b"", "slurm_load_ctl_conf error: Unable to contact slurm controller\nmore\n")
    )
    assert "Unable to contact slurm controller" in unreachable["Slurm"].message
    assert "more" not in unreachable["Slurm"].message
    assert slurm_lines(config=TimeoutError("scontrol: did not end within 10 s"))["Slurm"].state is State.FAILED
    assert slurm_lines(munge=CommandResult(1, b"", "munge: Error: Failed to access"))["munge"].state is State.FAILED
    assert slurm_lines(sinfo=CommandResult(0, b"", ""))["Slurm node"].fix[1].startswith("node_name = ")


def test_slurm_node_line_is_limited_by_unreadable_row() -> None:
    rows = [("gpu", "1", "idle", "Unknown", "Unknown", "none", ""), ("night", "1", "???", "", "", "", "")]
    table = b"".join(columns(row, commands.NODE_COLUMNS) for row in rows)
    line = slurm_lines(sinfo=CommandResult(0, table))["Slurm node"]
    assert line.state is State.LIMITED
    assert line.message.startswith("n1 is idle; 1 row ")


def test_munge_line_is_absent_with_other_authentication() -> None:
    assert slurm_lines(config=CommandResult(0, b"AuthType = auth/slurm\n", ""))["munge"].state is State.ABSENT


@given(st.binary(), st.binary(), st.text())
def test_slurm_lines_accept_any_output(config: bytes, sinfo: bytes, update: str) -> None:
    answers = {"config": CommandResult(0, config), "sinfo": CommandResult(0, sinfo)}
    assert slurm_lines(**answers, update=CommandResult(1, update.encode(), update))


# --- the daemon, its files and its metrics page


def test_daemon_line_reports_no_answer_mode_difference_and_problems() -> None:
    (no_answer,) = service.daemon(Settings(), None, "nobody listens", [])
    assert (no_answer.state, no_answer.message) == (State.FAILED, "nobody listens")
    reported = {"started": time.time() - 200, "mode": "observe", "version": "1", "problems": []}
    assert [line.state for line in service.daemon(Settings(), reported, "", [])] == [State.OK]
    (different_mode,) = service.daemon(Settings(mode=Mode.ACT), reported, "", [])
    assert re.search(r"observe.* act\b", different_mode.message)
    (with_problem,) = service.daemon(Settings(), {**reported, "problems": ["the page has no port"]}, "", [])
    assert (with_problem.state, with_problem.fix) == (State.LIMITED, ("healthd status",))


def test_daemon_line_has_memory_and_names_second_daemon(tmp_path: Path) -> None:
    import socket

    import psutil

    current = psutil.Process()
    second = psutil.Popen([sys.executable, "-c", "print('x', flush=True); input()"], stdin=-1, stdout=-1)
    assert second.stdout.readline() == b"x\n"  # before this line its command line may still read as empty
    reported = {"started": time.time() - 200, "mode": "observe", "version": "1", "problems": []}
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "healthd.sock"))
        server.listen()
        (line,) = service.daemon(Settings(runtime_dir=str(tmp_path)), reported, "", [second, current])
    second.communicate(b"\n")  # lets it end
    assert re.search(r"\d MiB for ", line.message)
    assert f"process {second.pid} ({current.username()}): " in line.message
    assert line.message.endswith("input()")
    assert f"process {os.getpid()} " not in line.message


def test_page_line_names_process_that_uses_port(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        settings = Settings(metrics=MetricsConfig(listen=f"127.0.0.1:{port}"))
        (line,) = service.page(settings, True, [])
    assert line.state is State.LIMITED
    assert f"(process {os.getpid()})" in line.message


def test_baseline_line_is_limited_without_baseline(tmp_path: Path) -> None:
    path = tmp_path / "baseline.toml"
    (line,) = service.baseline(Settings(baseline_file=str(path)), time.time())
    assert line.state is State.LIMITED
    path.write_text("")
    (line,) = service.baseline(Settings(baseline_file=str(path)), time.time())
    assert line.state is State.OK


def test_files_line_for_world_writable_settings_has_fix(tmp_path: Path) -> None:
    file = tmp_path / "healthd.toml"
    file.write_text("")
    file.chmod(0o666)
    (line,) = [line for line in service.files(None, str(file)) if str(file) in line.message]
    assert "writable by all" in line.message
    assert line.fix == (f"chown root:root {file}", f"chmod go-w {file}")


def test_files_line_fix_names_writable_folder(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    file = folder / "healthd.toml"
    file.write_text("")
    (line,) = [line for line in service.files(None, str(file)) if str(file) in line.message]
    assert line.fix == (f"chown root:root {folder}", f"chmod go-w {folder}")


def test_room_uses_existing_parent_for_missing_folder() -> None:
    assert [line.topic for line in service.room("/var/lib/no/such/folder", "/run", 1)] == ["room"]
    assert {line.state for line in service.room("/", "/", 1 << 60)} == {State.LIMITED}


# --- the command


def doctor(*flags: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "healthd", "doctor", "--fake-nvml", "dgx-h100", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def test_doctor_with_invalid_settings_runs_other_areas(tmp_path: Path) -> None:
    file = tmp_path / "healthd.toml"
    file.write_text('mode = "actt"\n')
    completed = doctor("--config", str(file), "--runtime-dir", str(tmp_path), "--json")
    assert completed.returncode == 2, completed.stderr
    lines = {line["topic"]: line for line in json.loads(completed.stdout)["lines"]}
    assert "actt" in lines["settings"]["message"]
    assert {"GPUs", "kernel log", "files"} <= set(lines)


def test_doctor_with_invalid_toml_takes_mode_from_running_daemon(tmp_path: Path) -> None:
    file = tmp_path / "healthd.toml"
    file.write_text("mode = \n")
    with StatusDaemon(tmp_path, mode="act", problems=[]):
        completed = doctor("--config", str(file), "--runtime-dir", str(tmp_path), "--json")
    document = json.loads(completed.stdout)
    lines = {line["topic"]: line for line in document["lines"]}
    assert "not TOML" in lines["settings"]["message"]
    assert lines["daemon"]["state"] == "ok"
    assert document["mode"] == "act"


def test_doctor_with_invalid_toml_uses_default_runtime_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "healthd.toml"
    file.write_text("mode = \n")
    monkeypatch.setattr(flags.runtime_dir, "__defaults__", (str(tmp_path),))
    with StatusDaemon(tmp_path, mode="drain", problems=[]):
        assert main(["doctor", "--config", str(file), "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["mode"] == "drain"
    assert {line["topic"]: line["state"] for line in document["lines"]}["daemon"] == "ok"


def test_doctor_reports_invalid_default_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baseline.toml"
    file.write_text("mode = \n")
    monkeypatch.setattr(layers, "baseline_tables", lambda _path, real=layers.baseline_tables: real(str(file)))
    assert main(["doctor", "--runtime-dir", str(tmp_path), "--json"]) == 2
    lines = {line["topic"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    assert f"{file}: not TOML" in lines["settings"]["message"]


def test_doctor_lines_have_state_and_fix(tmp_path: Path) -> None:
    completed = doctor("--runtime-dir", str(tmp_path), "--json")
    lines = json.loads(completed.stdout)["lines"]
    assert completed.returncode == 2  # no daemon
    assert all(line["fix"] for line in lines if line["state"] in ("failed", "limited"))
    assert {line["state"] for line in lines} <= {state.value for state in State}


def test_hooks_without_program_fail(tmp_path):
    no_systemd = str(tmp_path / "systemd")
    assert [line.state for line in service.hooks(Settings(), no_systemd)] == [State.ABSENT]
    works = Settings(hooks=HooksConfig(on_drain=("/bin/true",)))
    assert [line.state for line in service.hooks(works, no_systemd)] == [State.OK]
    missing = Settings(hooks=HooksConfig(on_drain=("/bin/true",), on_resume=(str(tmp_path / "none"),)))
    (line,) = service.hooks(missing, no_systemd)
    assert line.state is State.FAILED
    assert line.fix == ("healthd hooks test on_resume",)
