"""Tests of `healthd doctor`: its lines for the state of a node. An area that hangs or dies delays no other area."""

from __future__ import annotations

import json
import os
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
from healthd.agent.settings.config import MetricsConfig, Settings
from healthd.cli import flags
from healthd.cli.main import main
from healthd.common.model import CheckResult, Finding, Mode, Observation, Outcome, Severity
from healthd.common.page import Page
from healthd.common.slurm import commands
from healthd.common.slurm.commands import CommandResult

# --- lines and exit status


def test_the_status_is_that_of_the_worst_line() -> None:
    assert status([]) == 0
    assert status([ok_line("a", ""), absent_line("b", "")]) == 0
    assert status([ok_line("a", ""), limited_line("b", "")]) == 1
    assert status([limited_line("a", ""), failed_line("b", "")]) == 2


def document(*lines: Line) -> dict[str, object]:
    head = {"version": "1", "node": "n1", "user": "root", "mode": "act", "time": 0.0}
    return {**head, "lines": [line_json(line) for line in lines]}


def test_what_needs_somebody_comes_first_with_what_mends_it() -> None:
    said = text(document(ok_line("GPUs", "8"), failed_line("munge", "it is dead", "systemctl restart munge")), Page(80))
    assert said.index("munge") < said.index("GPUs")
    assert "-> systemctl restart munge" in said
    assert said.startswith("n1: healthd 1 as root, mode act: 1 thing does not work\n")


def test_where_all_works_it_says_so() -> None:
    assert "all works" in text(document(ok_line("GPUs", "8 GPUs"), absent_line("IPMI", "none")), Page(80))


@given(st.text(), st.text(), st.text(), st.integers(40, 200))
def test_no_text_of_others_steers_the_terminal(node: str, message: str, fix: str, width: int) -> None:
    said = text({**document(failed_line("x", message, fix)), "node": node}, Page(width))
    assert all(character.isprintable() or character == "\n" for character in said)


# --- areas that hang, die or fail


def one(look: Callable[[], Sequence[Line]], seconds: float = 60.0) -> Line:
    (line,) = parallel.run_areas([("area", seconds, look)])
    return line


def test_an_area_that_hangs_is_a_line_and_the_others_answer() -> None:
    def hangs() -> Sequence[Line]:
        time.sleep(1000)
        return []

    lines = parallel.run_areas([("first", 0.2, hangs), ("second", 60.0, lambda: [ok_line("second", "fine")])])
    assert [(line.topic, line.state) for line in lines] == [("first", State.FAILED), ("second", State.OK)]
    assert "no answer within 0.2 s" in lines[0].message


def test_an_area_that_stumbles_or_dies_is_a_line() -> None:
    def stumbles() -> Sequence[Line]:
        raise RuntimeError("what is this")

    assert one(stumbles) == failed_line("area", "could not be tested: what is this")
    assert one(lambda: os._exit(9)) == failed_line("area", "the test process died")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("TimeoutError: /bin/sh: did not end within 19 s", "/bin/sh: did not end within 19 s"),
        ("RuntimeError: no such bus", "no such bus"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/x'", "No such file or directory: '/x'"),
        ("KeyError: 'model'", "KeyError: 'model'"),
        ("TimeoutError", "TimeoutError"),
        ("an OSError: x", "an OSError: x"),
    ],
)
def test_a_check_that_cannot_look_is_told_without_the_name_of_a_class(error: str, told: str) -> None:
    line = seen(ROOT, result("exec", Outcome.FAILED, error=error))["checks"]
    assert line.message == f"1 of 1 other checks cannot run: {told}"


def test_a_long_answer_comes_whole() -> None:
    assert one(lambda: [ok_line("area", "x" * 1_000_000)]).message == "x" * 1_000_000


def test_a_look_may_give_any_value_back() -> None:
    assert parallel.call_all([(60.0, lambda: {"a": [1]}), (60.0, lambda: 1 / 0), (60.0, lambda: lambda: 0)])[0] == {
        "a": [1]
    }
    unpicklable, raised = parallel.call_all([(60.0, lambda: lambda: 0), (60.0, lambda: 1 / 0)])
    assert "could not be tested" in unpicklable.why
    assert raised.why == "could not be tested: ZeroDivisionError: division by zero"


# --- what the checks can read

ROOT = visibility.Environment(ipmi_device=True, ipmitool=True, is_root=True)


def result(check: str, outcome: Outcome = Outcome.COMPLETED, **more: object) -> CheckResult:
    return CheckResult(check=check, outcome=outcome, started=0.0, duration_seconds=0.1, **{"instance": "", **more})  # type: ignore[arg-type]


def seen(around: visibility.Environment, *results: CheckResult) -> dict[str, Line]:
    return {line.topic: line for line in visibility.lines(results, around)}


def test_gpus_that_answer_are_counted_with_their_driver() -> None:
    driver = Observation("gpu_driver_info", 1, labels=(("version", "580.105.08"),))
    said = seen(ROOT, result("gpu_access", observations=(Observation("gpus", 8), driver)))
    assert said["GPUs"] == ok_line("GPUs", "NVML answers: driver 580.105.08, 8 GPUs")


def test_a_machine_without_gpus_needs_none() -> None:
    assert seen(ROOT, result("gpu_access"))["GPUs"].state is State.ABSENT


def test_a_driver_that_is_not_loaded_fails_and_explain_says_more() -> None:
    finding = Finding(Severity.DEGRADED, "gpu_access/driver_not_loaded", "", "the NVIDIA driver is not loaded")
    said = seen(ROOT, result("gpu_access", findings=(finding,)))["GPUs"]
    assert (said.state, said.fix) == (State.FAILED, ("healthd explain gpu_access/driver_not_loaded",))


def test_nvml_that_hangs_fails() -> None:
    said = seen(ROOT, result("gpu_access", Outcome.TIMED_OUT, error="no answer within 10 s"))["GPUs"]
    assert (said.state, said.message) == (State.FAILED, "NVML hangs: no answer within 10 s")


@pytest.mark.parametrize(
    ("around", "state"),
    [
        (visibility.Environment(ipmi_device=False, ipmitool=False, is_root=True), State.ABSENT),
        (visibility.Environment(ipmi_device=True, ipmitool=False, is_root=True), State.LIMITED),
        (visibility.Environment(ipmi_device=True, ipmitool=True, is_root=True), State.OK),
    ],
)
def test_a_bmc_without_ipmitool_is_limited_and_none_is_no_matter(around: visibility.Environment, state: State) -> None:
    line = seen(around, result("ipmi_sel"))["IPMI"]
    assert line.state is state
    assert not any(manager in str(line) for manager in ("apt", "dnf", "yum"))
    assert "modprobe ipmi" not in line.message, "without -a the second module is a parameter of the first"


def test_mounts_that_nobody_named_are_asked_for() -> None:
    assert "healthd baseline --write" in seen(ROOT)["mounts"].fix
    hung = result("mount", Outcome.TIMED_OUT, instance="/data", error="no answer within 10 s")
    assert "/data: no answer within 10 s" in seen(ROOT, hung, result("mount", instance="/home"))["mounts"].message
    assert seen(ROOT, result("mount", instance="/home"))["mounts"] == ok_line("mounts", "1 monitored: /home")


def test_checks_that_cannot_look_are_named_and_one_reason_for_all_is_told_once() -> None:
    blind = [result(f"c{i}", Outcome.FAILED, error=f"reason {i}") for i in range(5)]
    said = seen(ROOT, *blind, result("well"))["checks"].message
    assert said == "5 of 6 other checks cannot run: c0: reason 0; c1: reason 1; c2: reason 2; and 2 more"
    alike = [result(f"c{i}", Outcome.FAILED, error="not root") for i in range(5)]
    assert seen(ROOT, *alike)["checks"].message == "5 of 5 other checks cannot run: not root"


# --- Slurm

CONFIG = "AuthInfo   = (null)\nAuthType   = auth/munge\nProlog[0]   = /etc/slurm/prolog\nEpilog = (null)\n"
NODE = ("gpu", "1", "idle", "Unknown", "Unknown", "none", "(null)")
NOBODY = "slurm_update error: Invalid user id"


class Answers:
    """Results of fake programs, selected by a word of the command line."""

    def __init__(self, **said: CommandResult | Exception) -> None:
        self.said = {
            "config": CommandResult(0, CONFIG.encode(), ""),
            "munge": CommandResult(0, b"STATUS: Success (0)", ""),
            "update": CommandResult(1, b"", "slurm_update error: Invalid node name specified\n"),
            "sinfo": CommandResult(
                0, columns(("gpu", "1", "idle", "Unknown", "Unknown", "none", "(null)"), commands.NODE_COLUMNS)
            ),
            **said,
        }

    def __call__(self, argv: tuple[str, ...]) -> CommandResult:
        asked = (
            "munge"
            if argv[0] == "sh"
            else argv[0]
            if argv[0] == "sinfo"
            else "config"
            if "config" in argv
            else "update"
        )
        answer = self.said[asked]
        if isinstance(answer, Exception):
            raise answer
        return answer


def slurm_lines(
    mode: Mode = Mode.ACT, which: Callable[[str], str | None] = str, **said: CommandResult | Exception
) -> dict[str, Line]:
    return {line.topic: line for line in slurm.lines(Settings(mode=mode, node_name="n1"), Answers(**said), which)}


def test_a_slurm_that_is_well_works_in_each_part() -> None:
    said = slurm_lines()
    assert {topic: line.state for topic, line in said.items()} == dict.fromkeys(
        ("munge", "Slurm node", "Slurm rights", "Slurm hooks"), State.OK
    )
    assert said["Slurm node"].message == "n1 is idle"
    assert "Prolog=/etc/slurm/prolog" in said["Slurm hooks"].message


@pytest.mark.parametrize(
    ("mode", "state"), [(Mode.ACT, State.FAILED), (Mode.DRAIN, State.FAILED), (Mode.OBSERVE, State.LIMITED)]
)
def test_a_missing_right_fails_where_healthd_would_use_it(mode: Mode, state: State) -> None:
    assert slurm_lines(mode, update=CommandResult(1, b"", NOBODY))["Slurm rights"].state is state


def test_without_slurm_mode_observe_needs_none_and_mode_act_fails() -> None:
    assert slurm_lines(Mode.OBSERVE, which=lambda _: None)["Slurm"].state is State.ABSENT
    assert slurm_lines(Mode.ACT, which=lambda _: None)["Slurm"].state is State.FAILED


def test_a_slurmctld_that_is_away_a_dead_munge_and_an_unknown_node_are_told() -> None:
    away = slurm_lines(
        config=CommandResult(1, b"", "slurm_load_ctl_conf error: Unable to contact slurm controller\nmore\n")
    )
    assert "Unable to contact slurm controller" in away["Slurm"].message
    assert "more" not in away["Slurm"].message
    assert slurm_lines(config=TimeoutError("scontrol: did not end within 10 s"))["Slurm"].state is State.FAILED
    assert slurm_lines(munge=CommandResult(1, b"", "munge: Error: Failed to access"))["munge"].state is State.FAILED
    assert slurm_lines(sinfo=CommandResult(0, b"", ""))["Slurm node"].fix[1] == 'node_name = "..." in healthd.toml'


def test_a_row_of_the_node_that_cannot_be_read_limits_and_shows_the_node() -> None:
    rows = [("gpu", "1", "idle", "Unknown", "Unknown", "none", ""), ("night", "1", "???", "", "", "", "")]
    table = b"".join(columns(row, commands.NODE_COLUMNS) for row in rows)
    line = slurm_lines(sinfo=CommandResult(0, table))["Slurm node"]
    assert line.state is State.LIMITED
    assert line.message.startswith("n1 is idle; 1 row from sinfo could not be read")


def test_another_authentication_needs_no_munge() -> None:
    assert slurm_lines(config=CommandResult(0, b"AuthType = auth/slurm\n", ""))["munge"].state is State.ABSENT


@given(st.binary(), st.binary(), st.text())
def test_whatever_slurm_prints_is_a_line(config: bytes, sinfo: bytes, update: str) -> None:
    answers = {"config": CommandResult(0, config), "sinfo": CommandResult(0, sinfo)}
    assert slurm_lines(**answers, update=CommandResult(1, update.encode(), update))


# --- the daemon, its files and its metrics page


def test_a_daemon_that_does_not_answer_fails_and_one_in_another_mode_than_the_settings_is_limited() -> None:
    (silent,) = service.daemon(Settings(), None, "nobody listens", [])
    assert (silent.state, silent.message) == (State.FAILED, "nobody listens")
    told = {"started": time.time() - 200, "mode": "observe", "version": "1", "problems": []}
    assert [line.state for line in service.daemon(Settings(), told, "", [])] == [State.OK]
    (other,) = service.daemon(Settings(mode=Mode.ACT), told, "", [])
    assert "but the mode in the settings is act" in other.message
    (troubled,) = service.daemon(Settings(), {**told, "problems": ["the page has no port"]}, "", [])
    assert (troubled.state, troubled.fix) == (State.LIMITED, ("healthd status",))


def test_the_memory_is_that_of_the_daemon_that_was_asked_and_another_one_is_named(tmp_path: Path) -> None:
    import socket

    import psutil

    this = psutil.Process()
    other = psutil.Popen([sys.executable, "-c", "print('x', flush=True); input()"], stdin=-1, stdout=-1)
    assert other.stdout.readline() == b"x\n"  # before this line its command line may still read as empty
    told = {"started": time.time() - 200, "mode": "observe", "version": "1", "problems": []}
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "healthd.sock"))
        server.listen()
        (line,) = service.daemon(Settings(runtime_dir=str(tmp_path)), told, "", [other, this])
    other.communicate(b"\n")  # lets it end
    assert "MiB for its children" in line.message
    assert f"another daemon runs too: process {other.pid} ({this.username()}): " in line.message
    assert line.message.endswith("input()")
    assert f"process {os.getpid()} " not in line.message


def test_a_port_that_another_program_has_is_told_with_who(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        settings = Settings(metrics=MetricsConfig(listen=f"127.0.0.1:{port}"))
        (line,) = service.page(settings, True, [])
    assert line.state is State.LIMITED
    assert f"(process {os.getpid()})" in line.message


def test_a_node_without_a_baseline_is_asked_for_one(tmp_path: Path) -> None:
    path = tmp_path / "baseline.toml"
    (line,) = service.baseline(Settings(baseline_file=str(path)), time.time())
    assert line.state is State.LIMITED
    path.write_text("")
    (line,) = service.baseline(Settings(baseline_file=str(path)), time.time())
    assert line.state is State.OK


def test_settings_that_anybody_can_write_fail_with_what_mends_them(tmp_path: Path) -> None:
    file = tmp_path / "healthd.toml"
    file.write_text("")
    file.chmod(0o666)
    (line,) = [line for line in service.files(None, str(file)) if str(file) in line.message]
    assert "is writable by all users" in line.message
    assert line.fix == (f"chown root:root {file}", f"chmod go-w {file}")


def test_what_mends_it_names_the_folder_that_others_can_write_and_not_what_lies_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    file = folder / "healthd.toml"
    file.write_text("")
    (line,) = [line for line in service.files(None, str(file)) if str(file) in line.message]
    assert line.fix == (f"chown root:root {folder}", f"chmod go-w {folder}")


def test_room_is_looked_for_above_what_is_not_there_yet() -> None:
    assert [line.topic for line in service.room("/var/lib/no/such/folder", "/run", 1)] == ["room"]
    assert {line.state for line in service.room("/", "/", 1 << 60)} == {State.LIMITED}


# --- the command


def doctor(*flags: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "healthd", "doctor", "--fake-nvml", "dgx-h100", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def test_wrong_settings_are_a_line_and_the_rest_is_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "healthd.toml"
    file.write_text('mode = "actt"\n')
    done = doctor("--config", str(file), "--runtime-dir", str(tmp_path), "--json")
    assert done.returncode == 2, done.stderr
    lines = {line["topic"]: line for line in json.loads(done.stdout)["lines"]}
    assert "actt" in lines["settings"]["message"]
    assert {"GPUs", "kernel log", "files"} <= set(lines)


def test_with_settings_that_are_no_toml_the_daemon_is_asked_all_the_same_and_its_mode_counts(tmp_path: Path) -> None:
    file = tmp_path / "healthd.toml"
    file.write_text("mode = \n")
    with StatusDaemon(tmp_path, mode="act", problems=[]):
        done = doctor("--config", str(file), "--runtime-dir", str(tmp_path), "--json")
    document = json.loads(done.stdout)
    lines = {line["topic"]: line for line in document["lines"]}
    assert "not TOML" in lines["settings"]["message"]
    assert lines["daemon"]["state"] == "ok"
    assert document["mode"] == "act"


def test_with_settings_that_are_no_toml_the_default_runtime_dir_is_where_the_daemon_is_asked(
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


def test_a_default_baseline_that_is_wrong_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baseline.toml"
    file.write_text("mode = \n")
    monkeypatch.setattr(layers, "baseline_tables", lambda _path, real=layers.baseline_tables: real(str(file)))
    assert main(["doctor", "--runtime-dir", str(tmp_path), "--json"]) == 2
    lines = {line["topic"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    assert f"{file}: not TOML" in lines["settings"]["message"]


def test_each_line_has_a_state_and_what_does_not_work_has_something_to_type(tmp_path: Path) -> None:
    done = doctor("--runtime-dir", str(tmp_path), "--json")
    lines = json.loads(done.stdout)["lines"]
    assert done.returncode == 2  # no daemon
    assert all(line["fix"] for line in lines if line["state"] in ("failed", "limited"))
    assert {line["state"] for line in lines} <= {state.value for state in State}
