"""Tests of the command line as a user runs it: the real program, its output, its errors and its exit status."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from trees import plain_machine
from waiting import until

import healthd
from healthd.agent.settings.registry import built_in_checks
from healthd.cli.flags import DEFAULT_FILE, parse_duration
from healthd.cli.main import FAMILIES, GROUPS, HELP, command, main

ROOT = Path(__file__).parents[2]
XID = "NVRM: Xid (PCI:0000:61:00): 79, pid=4711, name=python3, GPU has fallen off the bus."


class CommandResult:
    """The result of a healthd command: exit status and output."""

    def __init__(self, completed: subprocess.CompletedProcess[str]) -> None:
        self.status, self.out, self.err = completed.returncode, completed.stdout, completed.stderr

    @property
    def document(self) -> Any:
        return json.loads(self.out)

    def __repr__(self) -> str:
        return f"exit status {self.status}\n{self.out}\n{self.err}"


def run(*arguments: str, **environment: str) -> CommandResult:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "COLUMNS": "100", "LC_ALL": "C.UTF-8", **environment}
    argv = [sys.executable, "-m", "healthd", *arguments]
    result = CommandResult(subprocess.run(argv, capture_output=True, text=True, timeout=240, env=env))
    assert "Traceback" not in result.err, result.err
    return result


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Create an empty machine."""
    plain_machine(tmp_path / "tree")
    return tmp_path / "tree"


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    """Create a scenario: a DGX H100 with GPU 3 lost."""
    file = tmp_path / "lost.toml"
    file.write_text('profile = "dgx-h100"\ngpu.3.lost = true\n')
    return file


def settings(tmp_path: Path, text: str) -> str:
    file = tmp_path / "healthd.toml"
    file.write_text(text)
    return str(file)


# --- help


def test_without_arguments_prints_help_and_exits_64():
    result = run()
    assert (result.status, result.out, result.err) == (64, "", HELP)


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ("help",), ("help", "help"), ("help", "--help")])
def test_help_option_prints_help_and_exits_0(arguments):
    result = run(*arguments)
    assert (result.status, result.out, result.err) == (0, HELP, "")


@pytest.mark.parametrize("group", GROUPS)
def test_group_without_command_lists_its_commands_in_80_columns(group):
    alone = run(group)
    assert (alone.status, alone.out) == (64, "")
    assert run(group, "--help").out == run("help", group).out == alone.err
    assert max(map(len, alone.err.splitlines())) <= 80
    for name in (name for name in FAMILIES if name.startswith(f"{group} ")):
        assert re.search(rf"(?m)^  {name}  +\w", alone.err)
        assert command(name).examples.partition("\n")[0] in alone.err


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_help_lists_every_command_with_its_own_help(name):
    assert re.search(rf"(?m)^  {name}\b", HELP)
    result = run(*name.split(), "--help")
    assert result.status == 0
    assert " ".join(command(name).description.split()) in " ".join(result.out.split())
    assert command(name).examples in result.out


def test_each_family_module_has_its_commands():
    for family in set(FAMILIES.values()):
        commands = import_module(f"healthd.cli.{family}").COMMANDS
        assert list(commands) == [name for name, command_family in FAMILIES.items() if command_family == family]


def test_help_fits_80_columns():
    assert max(map(len, HELP.splitlines())) <= 80
    for name in FAMILIES:
        assert max(map(len, run(*name.split(), "--help", COLUMNS="80").out.splitlines())) <= 80, name


def test_version_matches_package():
    assert run("--version").out == f"healthd {healthd.__version__}\n"


def test_version_names_installed_debian_package(tmp_path, monkeypatch, capsys):
    (tmp_path / "share/healthd").mkdir(parents=True)
    (tmp_path / "share/healthd/package-version").write_text("0.1.0-2~deb12\n")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"healthd {healthd.__version__} (package 0.1.0-2~deb12)\n"


# --- wrong use


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("chekc",), 'healthd: unknown command "chekc"; did you mean "check"?'),
        (("--json", "check"), 'healthd: unknown command "--json"; put the command before its options'),
        (("frobnicate",), 'healthd: unknown command "frobnicate"; healthd --help lists all commands'),
        (("cofnig",), 'healthd: unknown command "cofnig"; did you mean "config"?'),
        (("hook", "--json"), 'healthd: unknown command "hook --json"; valid names: hook epilog, hook healthcheck'),
        (("config", "check", ""), "healthd: --config needs a file name, got an empty string"),
        (("record", ""), "healthd record: the file name is empty"),
        (("config", "shwo"), 'healthd: unknown command "config shwo"; did you mean "config show"?'),
        (("check", "--jsn"), 'healthd check: no option --jsn; did you mean "--json"?'),
        (("check", "--config"), "healthd check: argument --config: expected one argument"),
        (("check", "gpu_eccc"), 'healthd check: no check is called "gpu_eccc"; did you mean "gpu_ecc"?'),
        (("check", "gpu_ecc/disabled"), 'healthd check: no check is called "gpu_ecc/disabled"; did you mean '
         '"gpu_ecc"?'),
        (("check", "mount"), "healthd check: mount: nothing to check: no [checks.mount.NAME] table is "
         "enabled in the settings"),
        (("check", "--fake-nvml", "dgx-h10"), 'healthd: --fake-nvml: nvml.fake: no profile or file is called '
         '"dgx-h10"; did you mean "dgx-h100"?'),
        (("check", "--root", "/none"), "healthd: --root: root: directory /none does not exist"),
        (("check", "--config", "/none"), "healthd: /none: no such file"),
        (("run", "--mode", "drian"), 'healthd: --mode: mode: "drian" is not one of observe, drain, act; did you mean '
         '"drain"?'),
        (("run", "--interval", "5m"), 'healthd run: argument --interval: must be a number of seconds, got "5m"'),
        (("run", "--interval", "nan"), "healthd: --interval: interval_seconds: must be a finite number, got nan"),
        (("run", "extra"), "healthd run: unrecognized arguments: extra"),
        (("pause", "--for", "30", "--why", "x"), "healthd pause: --for: must be a duration like 30m, 2h or 1h30m "
         '(units s, m, h, d), got "30"'),
        (("pause", "--for", "30m"), "healthd pause: the following arguments are required: --why"),
        (("repaired",), "healthd repaired: the following arguments are required: CODE"),
        (("explain", "gpu_xid/7o"), 'healthd explain: unknown code "gpu_xid/7o"; did you mean "gpu_xid/7", '
         '"gpu_xid/97" or "gpu_xid/79"?'),
        (("explain", "mount/mising"), 'healthd explain: unknown code "mount/mising"; did you mean '
         '"mount/missing"?'),
    ],
)  # fmt: skip
def test_wrong_use_prints_one_sentence_and_exits_64(arguments, sentence):
    result = run(*arguments)
    assert (result.status, result.out, result.err) == (64, "", sentence + "\n")


@pytest.mark.parametrize("command", ["run", "check", "config show", "list"])
def test_invalid_settings_file_is_one_sentence_from_each_command(tmp_path, command):
    file = settings(tmp_path, "[checks.gpu_ec]\n")
    result = run(*command.split(), "--config", file)
    assert (result.status, result.out) == (64, "")
    (line,) = result.err.splitlines()
    assert line.startswith(f"healthd: {file}: checks.gpu_ec: ")
    assert '"gpu_ecc"' in line


@pytest.mark.skipif(os.path.exists(DEFAULT_FILE), reason="this machine has settings")
def test_default_settings_file_is_required_only_if_named():
    assert run("list").status == 0
    result = run("config", "check", DEFAULT_FILE)
    assert (result.status, result.out) == (64, "")
    assert result.err.startswith(f"healthd: {DEFAULT_FILE} does not exist")


def test_invalid_scenario_is_reported_before_checks_run(tmp_path):
    file = tmp_path / "scenario.toml"
    file.write_text('profile = "dgx-h100"\ngpu.3.lots = true\n')
    result = run("check", "--fake-nvml", str(file))
    assert (result.status, result.out) == (64, "")
    (line,) = result.err.splitlines()
    assert line.startswith(f"healthd: --fake-nvml: {file}: gpu.3: ")
    assert '"lost"' in line


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("1h30m", 5400), ("2d", 172800)],
)
def test_parse_duration_returns_seconds(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "m", "30 m", "-30m", "0s", "1e3s", "30min", "1h30", "²h", "9" * 99 + "s"])
def test_parse_duration_rejects_invalid_text(text):
    assert parse_duration(text) is None


MISTAKES = """
mode = "foo"
intervall = 3
[metrics]
listen = "*:9478"
[checks.services]
required = "slurmd"
timeout_seconds = "10"
[checks.memory_size]
expected_bytes = "2T"
[checks.gpu_ecc]
severity = { "gpu_ecc/off" = "info" }
[checks.nope]
"""


def test_config_check_reports_every_mistake_at_once(tmp_path):
    file = settings(tmp_path, MISTAKES)
    result = run("config", "check", file)
    assert (result.status, result.out) == (64, "")
    messages = [line.removeprefix(f"healthd: {file}: ") for line in result.err.splitlines()]
    places = [line.partition(": ")[0] for line in messages]
    assert '"intervall"' in places.pop(0)
    assert places == [
        "mode",
        "metrics.listen",
        "checks.services.required",
        "checks.services.timeout_seconds",
        "checks.memory_size.expected_bytes",
        "checks.gpu_ecc.severity",
        "checks.nope",
    ]
    assert '"0.0.0.0:9478"' in messages[2]
    assert messages[3].endswith(': ["slurmd"]')
    assert "bytes, like 2199023255552" in messages[5]
    assert "aggregate, corrected, " in messages[6]


@pytest.mark.parametrize(
    ("text", "places"),
    [
        (
            "[kernel_log.patterns.A]\n"
            '[kernel_log.patterns.B]\npattern = 5\n[kernel_log.patterns.C]\npattern = "abcd"\nseverty = "info"\n',
            ["kernel_log.patterns.C", "kernel_log.patterns.A", "kernel_log.patterns.B.pattern"],
        ),
        (
            '[checks.gpu_ecc]\nseverity = {a = "warnin", b = "infoo"}\n',
            ["checks.gpu_ecc.severity.a", "checks.gpu_ecc.severity.b"],
        ),
        (
            '[checks.gpu_ecc]\nseverity = {aa = "info", bb = "info"}\n',
            ["checks.gpu_ecc.severity", "checks.gpu_ecc.severity"],
        ),
        ("[checks.mount]\na = 5\nb = 6\n", ["checks.mount", "checks.mount"]),
        ('[metrics]\nlisten = ["x", "127.0.0.1:9", "y"]\n', ["metrics.listen[0]", "metrics.listen[2]"]),
    ],
)
def test_config_check_reports_every_mistake_of_one_table_or_list(tmp_path, text, places):
    file = settings(tmp_path, text)
    result = run("config", "check", file)
    assert result.status == 64
    found = [line.removeprefix(f"healthd: {file}: ").partition(": ")[0] for line in result.err.splitlines()]
    assert found == places


def test_config_check_names_duplicate_table(tmp_path):
    result = run("config", "check", settings(tmp_path, "[checks.services]\n[checks.services]\n"))
    assert result.status == 64
    assert "[checks.services] is defined twice" in result.err


def test_config_check_warns_about_missing_program(tmp_path):
    result = run("config", "check", settings(tmp_path, '[checks.exec.a]\ncommand = ["/nope/x"]\n'))
    assert result.status == 0
    assert 'warning: checks.exec."a".command: /nope/x ' in result.err


def test_config_check_accepts_existing_program(tmp_path):
    result = run("config", "check", settings(tmp_path, '[checks.exec.a]\ncommand = ["/bin/sh"]\n'))
    assert (result.status, result.err) == (0, "")


def test_config_check_warns_about_program_on_hanging_file_server(tmp_path, monkeypatch, capsys):
    """`sleep` replaces a stat call that never returns; the time limit ends it."""
    from healthd.cli import config
    from healthd.host import program

    run_program = program.run_program
    monkeypatch.setattr(config, "TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(program, "run_program", lambda argv, seconds: run_program(("sleep", "1000"), seconds))
    assert main(["config", "check", settings(tmp_path, '[checks.exec.a]\ncommand = ["/nfs/x"]\n')]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert 'warning: checks.exec."a".command: ' in line
    assert "cannot be tested" in line


# --- check


def test_check_exits_0_on_healthy_machine(tree):
    result = run("check", "--root", str(tree), "--fake-nvml", "dgx-h100")
    assert (result.status, result.err) == (0, "")
    first, _, *names = result.out.splitlines()
    assert first.endswith(": healthy")
    assert re.match(r"\d+ checks passed: block_device, .*\bgpu_ecc\b", " ".join(names))


def test_check_prints_one_row_per_named_check(tree):
    _, _, head, *rows = run(
        "check", "gpu_ecc", "gpu_xid", "--root", str(tree), "--fake-nvml", "dgx-h100"
    ).out.splitlines()
    assert head.split() == ["check", "outcome", "took", "finding"]
    assert rows[0].split()[:2] == ["gpu_ecc", "completed"]
    assert rows[1:3] == ["", "No result"], "gpu_xid only reads the kernel log, and no daemon runs"
    assert rows[3].split()[:2] == ["gpu_xid", "only"]


def test_check_exits_2_for_lost_gpu_and_prints_its_ending(tree, scenario):
    result = run("check", "--root", str(tree), "--fake-nvml", str(scenario))
    assert result.status == 2
    assert re.search(r"(?m)^gpu_access +completed +\S+ s +critical  gpu_access/lost 0000:61:00.0$", result.out)
    assert "    clears after: a reboot\n" in result.out


def test_check_runs_only_named_checks(tree, scenario):
    completed = run("check", "gpu_nvlink", "gpu_count", "--json", "--root", str(tree), "--fake-nvml", str(scenario))
    assert [result["check"] for result in completed.document["results"]] == ["gpu_count", "gpu_nvlink"]


def test_check_json_has_conditions_and_observations(tree, scenario):
    completed = run("check", "--json", "--root", str(tree), "--fake-nvml", str(scenario))
    assert completed.status == 2
    assert completed.document["health"] == "unhealthy"
    (condition,) = completed.document["conditions"]
    fields = {key: condition[key] for key in ("check", "code", "severity", "subject", "clears", "state")}
    assert fields == {
        "check": "gpu_access",
        "code": "gpu_access/lost",
        "severity": "critical",
        "subject": "0000:61:00.0",
        "clears": "reboot",
        "state": "open",
    }
    access = next(result for result in completed.document["results"] if result["check"] == "gpu_access")
    assert access["outcome"] == "completed"
    assert {"name": "gpus_unreachable", "value": 1, "kind": "gauge", "labels": {}} in access["observations"]


def test_check_exits_1_for_warning_with_enforce_false(tree, scenario, tmp_path):
    file = settings(tmp_path, "[checks.gpu_access]\nenforce = false\n")
    result = run("check", "gpu_access", "--config", file, "--root", str(tree), "--fake-nvml", str(scenario))
    assert result.status == 1
    assert "  warning   gpu_access/lost" in result.out


def test_check_reports_finding_that_needs_confirmation(tree, tmp_path):
    file = settings(tmp_path, '[checks.mount."/data"]\nmissing_confirm_seconds = 120\n')
    result = run("check", "--config", file, "mount", "--root", str(tree))
    assert result.status == 2
    assert "mount/missing /data" in result.out
    assert re.search(r"(?m) lasted 2 min$", result.out)


def test_check_exits_3_if_check_fails(tree, tmp_path):
    file = settings(tmp_path, "")
    result = run(
        "check",
        "gpu_ecc",
        "--config",
        file,
        "--root",
        str(tree),
        "--fake-nvml",
        str(scenario_with_nvml_error(tmp_path)),
    )
    assert result.status == 3
    assert "No result\n  gpu_ecc failed" in result.out


def scenario_with_nvml_error(tmp_path: Path) -> Path:
    file = tmp_path / "broken.toml"
    file.write_text('profile = "dgx-h100"\ngpu.3.errors.nvmlDeviceGetEccMode = "Unknown"\n')
    return file


def test_check_ends_at_deadline_with_hung_driver(tree, tmp_path):
    hang = tmp_path / "hang.toml"
    hang.write_text('profile = "dgx-h100"\nhang = "nvmlDeviceGetEccMode"\nhang_seconds = 90\n')
    file = settings(tmp_path, "[checks.gpu_ecc]\ntimeout_seconds = 0.5\n")
    start = time.monotonic()
    result = run("check", "--config", file, "--root", str(tree), "--fake-nvml", str(hang))  # until its streams close
    assert time.monotonic() - start < 60
    assert result.status == 3
    assert re.search(r"(?m)^gpu_ecc +timed out", result.out)
    assert re.search(r"(?m)^gpu_nvlink +stuck", result.out)
    assert re.search(r"\d+ checks? passed: [^:]*\bblock_device\b", result.out)


def test_check_reports_hung_driver_as_finding(tree, tmp_path):
    hang = tmp_path / "hang.toml"
    hang.write_text('profile = "dgx-h100"\nhang = "nvmlInit"\nhang_seconds = 90\n')
    file = settings(tmp_path, "[checks.gpu_access]\ntimeout_seconds = 0.5\n")
    result = run("check", "gpu_access", "--json", "--config", file, "--root", str(tree), "--fake-nvml", str(hang))
    assert result.status == 3
    assert [c["code"] for c in result.document["conditions"]] == ["gpu_access/hang"]


def test_check_shows_output_and_exception_of_site_check(tree, tmp_path):
    checks_dir = tmp_path / "checks.d"
    checks_dir.mkdir(mode=0o755)
    code = "import sys\ndef run(host, config, past):\n    print('look here', file=sys.stderr)\n    yield 3\n"
    (checks_dir / "fan.py").write_text(code)
    (checks_dir / "fan.py").chmod(0o644)
    result = run("check", "fan", "--config", settings(tmp_path, f'checks_dir = "{checks_dir}"\n'), "--root", str(tree))
    assert result.status == 3
    assert "look here" in result.err
    assert "fan failed: TypeError: " in result.out


def test_check_exits_64_for_kernel_log_check_without_log(tree):
    result = run("check", "gpu_xid", "--root", str(tree))
    assert (result.status, result.out) == (64, "")
    assert "no kernel log" in result.err


def test_check_runs_idle_check_only_by_name(tmp_path):
    flags = ("--config", settings(tmp_path, ""), "--fake-nvml", "dgx-h100", "--json")
    default_checks = {result["check"] for result in json.loads(run("check", *flags).out)["results"]}
    assert "gpu_nvlink" in default_checks
    assert "gpu_processes" not in default_checks
    (result,) = json.loads(run("check", "gpu_processes", *flags).out)["results"]
    assert (result["check"], result["outcome"]) == ("gpu_processes", "completed")


def test_check_refuses_disabled_check(tmp_path):
    result = run("check", "gpu_ecc", "--config", settings(tmp_path, "[checks.gpu_ecc]\nenabled = false\n"))
    assert (result.status, result.out) == (64, "")
    assert result.err.startswith("healthd check: gpu_ecc: is disabled")


# --- record


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*"))


def test_record_default_name_has_node_and_time(tree, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "node.toml").write_text('node_name = "gpu-042"\n')
    result = run("record", "--config", str(tmp_path / "node.toml"), "--root", str(tree), "--fake-nvml", "dgx-h100")
    assert (result.status, result.err) == (0, "")
    (name,) = files_in(tmp_path / "here")
    assert re.fullmatch(r"gpu-042-\d{8}T\d{6}Z\.rec", name)
    assert f"healthd check --replay {name}" in result.out
    assert run("check", "--replay", name).status == 0


def test_record_with_check_name_only_uses_default_file_name(tree, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    node = ("--root", str(tree), "--fake-nvml", "dgx-h100")
    assert run("record", "gpu_ecc", "gpu_count", *node).status == 0
    (name,) = files_in(tmp_path / "here")
    assert name.endswith(".rec")
    results = run("check", "--json", "--replay", name).document["results"]
    assert sorted(result["check"] for result in results) == ["gpu_count", "gpu_ecc"]
    assert run("record", "./gpu_ecc", "gpu_count", *node).status == 0
    assert "gpu_ecc" in files_in(tmp_path / "here")


# --- output


def test_output_has_no_colour_in_pipe(tree, scenario):
    assert "\033" not in run("check", "--root", str(tree), "--fake-nvml", str(scenario)).out


@pytest.mark.parametrize(
    ("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_terminal_gets_colour_unless_disabled(environment, coloured):
    master, terminal = pty.openpty()
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TERM": "xterm", **environment}
    argv = [sys.executable, "-m", "healthd", "explain", "gpu_xid/79"]
    with subprocess.Popen(argv, stdout=terminal, env=env) as process:
        os.close(terminal)
        text = b""
        while chunk := _read(master):
            text += chunk
        assert process.wait(240) == 0
    os.close(master)
    assert (b"\033[" in text) is coloured


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # a terminal whose other end is closed
        return b""


@pytest.mark.parametrize("arguments", [("--help",), ("list", "--codes"), ("explain", "gpu_xid/79")])
def test_closed_reader_causes_no_error(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "healthd", *arguments]
    result = subprocess.run(argv, stdout=writing, stderr=subprocess.PIPE, env=env, timeout=240)
    os.close(writing)
    assert (result.returncode, result.stderr) == (0, b"")


def test_full_disk_is_one_sentence():
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    with open("/dev/full", "wb") as full:
        argv = [sys.executable, "-m", "healthd", "--help"]
        result = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, env=env, timeout=240)
    assert result.returncode == 3
    assert result.stderr == b"healthd: standard output cannot be written: No space left on device\n"


def test_output_without_unicode_uses_question_marks():
    result = run("check", "grüße", PYTHONIOENCODING="ascii")
    assert result.status == 64
    assert re.search(r'"gr\?\?(e|\?\?e?)"', result.err)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_do_not_change_exit_status(tree, closed):
    command = f"{sys.executable} -m healthd check --root {tree} --fake-nvml dgx-h100 {closed}"
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    assert subprocess.run(["sh", "-c", command], env=env, timeout=240).returncode == 0


@pytest.mark.parametrize("arguments", ["", "hook", "chekc"])
def test_closed_stderr_leaves_exit_status_64(arguments):
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    command = ["sh", "-c", f"{sys.executable} -m healthd {arguments} 2>&-"]
    result = subprocess.run(command, env=env, stdout=subprocess.PIPE, timeout=240)
    assert (result.returncode, result.stdout) == (64, b"")


# --- settings, checks, codes


def test_config_check_reports_no_errors_for_valid_file(tmp_path):
    file = settings(tmp_path, 'mode = "act"\n[checks.mount."/data"]\n')
    result = run("config", "check", file)
    assert (result.status, result.err) == (0, "")
    assert re.match(rf"{file}: .* mode act, {len(built_in_checks())} checks: ", result.out)


def test_config_check_accepts_sample_settings():
    assert run("config", "check", str(ROOT / "conf/healthd.toml")).status == 0


def test_config_show_prints_value_and_origin(tmp_path):
    file = settings(tmp_path, 'mode = "drain"\n[checks.mount]\nfstype = "nfs"\n[checks.mount."/data"]\n')
    result = run("config", "show", "--config", file, "--interval", "60")
    rows = {line.split()[0]: line.split()[1:] for line in result.out.splitlines()[1:]}
    assert rows["mode"] == ['"drain"', file]
    assert rows["interval_seconds"] == ["60", "--interval"]
    assert rows["state_dir"] == ['"/var/lib/healthd"', "default"]
    assert rows['checks.mount."/data".fstype'] == ['"nfs"', file]


def test_explain_prints_all_five_sections():
    result = run("explain", "gpu_xid/79", COLUMNS="60")
    assert result.status == 0
    titles = ["Meaning", "Why it matters", "On this node", "When it clears", "What to do"]
    assert [line for line in result.out.splitlines() if line in titles] == titles
    rows = [line for line in result.out.splitlines() if "default" not in line]
    assert max(map(len, rows)) <= 60


def test_explain_check_prints_summary_and_codes():
    result = run("explain", "mount")
    assert result.status == 0
    summary, _, head, first, *_ = result.out.splitlines()[1:]
    assert "mounted" in summary
    assert head.split()[:2] == ["code", "severity"]
    assert first.split()[:4] == ["mount/failing", "degraded", "clean", "runs"]


def test_config_show_json_equals_text(tmp_path):
    file = settings(tmp_path, '[checks.mount."/data"]\nfstype = "nfs"\n')
    result = run("config", "show", "--json", "--config", file, "--interval", "60")
    rows = {row["setting"]: (row["value"], row["from"]) for row in result.document["settings"]}
    assert result.document["version"] == healthd.__version__
    assert rows["interval_seconds"] == (60.0, "--interval")
    assert rows['checks.mount."/data".fstype'] == ("nfs", file)
    assert rows["checks.services.required"] == ([], "default")
    changed = run("config", "show", "--json", "--changed", "--config", file).document["settings"]
    assert all(row["from"] != "default" for row in changed)
    printed = run("config", "show", "--config", file, "--interval", "60").out.splitlines()[1:]
    assert [line.split()[0] for line in printed] == [row.split()[0] for row in rows]


def test_list_json_has_checks_and_codes(tmp_path):
    file = settings(tmp_path, '[checks.mount."/data"]\ntimeout_seconds = 5\n[checks.gpu_ecc]\nenabled = false\n')
    listed = run("list", "--json", "--config", file).document["checks"]
    rows = {(row["check"], row["instance"]): row for row in listed}
    data = rows["mount", "/data"]
    assert (data["state"], data["interval_seconds"], data["timeout_seconds"]) == ("on", 300.0, 5.0)
    assert (rows["gpu_ecc", ""]["state"], rows["exec", ""]["state"]) == ("off", "not_set_up")
    assert (rows["gpu_xid", ""]["runs"], rows["gpu_xid", ""]["reads_kernel_log"]) == (False, True)
    assert rows["gpu_processes", ""]["when"] == "idle"
    assert {name for name, _ in rows} == set(built_in_checks())
    codes = run("list", "--codes", "--json").document["codes"]
    assert [row["code"] for row in codes] == [line.split()[0] for line in run("list", "--codes").out.splitlines()[1:]]
    (xid,) = [row for row in codes if row["code"] == "gpu_xid/79"]
    assert (xid["severity"], xid["clears"]) == ("critical", "reboot")


def test_config_show_changed_omits_defaults(tmp_path):
    file = settings(tmp_path, 'mode = "drain"\n')
    result = run("config", "show", "--changed", "--config", file, "--profile", "none", "--baseline", "")
    assert [line.split()[0] for line in result.out.splitlines()[1:]] == ["mode", "profile", "baseline_file"]


def test_explain_handles_xid_outside_catalogue():
    result = run("explain", "gpu_xid/999")
    assert (result.status, "warning" in result.out) == (0, True)


def test_list_codes_are_all_explained():
    from healthd.agent.settings import registry

    checks = registry.built_in_checks()
    rows = run("list", "--codes").out.splitlines()[1:]
    codes = [row.split()[0] for row in rows]
    assert sorted(codes) == sorted(registry.all_codes(checks))
    assert all(registry.explain(checks, code) for code in codes)
    assert {"gpu_xid/79", "sxid/20034", "mount/missing"} <= set(codes)


def test_list_prints_interval_and_timeout_of_checks(tmp_path):
    file = settings(tmp_path, '[checks.mount."/data"]\ntimeout_seconds = 5\n[checks.gpu_ecc]\nenabled = false\n')
    rows = run("list", "--config", file).out.splitlines()[1:]
    assert any(re.match(r"mount /data +5 min +5 s +", row) for row in rows)
    assert any(re.match(r"gpu_ecc +off +", row) for row in rows)
    assert any(re.match(r"gpu_xid +each kernel line +", row) for row in rows)


# --- the daemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Run a daemon; yield its runtime directory and the file that it reads as kernel log."""
    folder = tmp_path_factory.mktemp("daemon")
    log = folder / "kernel.log"
    log.touch()
    runtime = str(folder / "run")
    off = ("processes", "disk_space")  # they depend on the machine that runs the tests
    config = settings(folder, "".join(f"[checks.{check}]\nenabled = false\n" for check in off))
    argv = [sys.executable, "-m", "healthd", "run", "--config", config]
    argv += ["--fake-nvml", "dgx-h100", "--kernel-log", str(log)]
    argv += ["--runtime-dir", runtime, "--state-dir", str(folder / "state"), "--node-name", "n1", "--listen", "off"]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    with open(folder / "out", "wb") as out, subprocess.Popen(argv, env=env, stdout=out, stderr=out) as process:
        try:
            until(lambda: run("status", "--runtime-dir", runtime).status == 0)
            yield runtime, log
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 0


def test_status_of_healthy_node(daemon):
    result = run("status", "--runtime-dir", daemon[0])
    assert result.status == 0
    assert result.out.startswith("n1: healthy\n")
    assert re.search(r"mode observe, started .*; round \d+ began .*, the next in ", result.out)
    oldest = r"just now|\d+ (s|min) ago"
    assert re.search(rf"\d+ checks passed \(the oldest run ({oldest})\): [^:]*\bgpu_ecc\b", result.out)


def test_status_json_is_document_of_daemon(daemon):
    result = run("status", "--json", "--runtime-dir", daemon[0])
    assert (result.status, result.document["health"], result.document["node"]) == (0, "healthy", "n1")


def test_status_reports_fault_until_repaired(daemon):
    runtime, log = daemon
    with log.open("a") as file:
        file.write(XID + "\n")
    until(lambda: run("status", "--runtime-dir", runtime).status == 2)
    text = run("status", "--runtime-dir", runtime).out
    assert text.startswith("n1: unhealthy\n")
    assert "  critical  gpu_xid/79 0000:61:00.0\n" in text
    assert "clears after: a reboot" in text
    assert 'would drain and requeue (mode is "observe")' in text
    result = run("repaired", "gpu_xid/79", "0000:61:00.0", "--runtime-dir", runtime)
    assert (result.status, result.err) == (0, "")
    assert result.out.startswith("repaired: gpu_xid/79 0000:61:00.0")
    until(lambda: run("status", "--runtime-dir", runtime).status == 0)
    assert "cleared" in run("status", "--runtime-dir", runtime).out


def test_repaired_fails_without_condition(daemon):
    result = run("repaired", "gpu_xid/13", "--runtime-dir", daemon[0])
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("healthd: repaired: no condition gpu_xid/13; ")


def test_pause_is_shown_and_ended_by_unpause(daemon):
    result = run("pause", "--for", "30m", "--why", "driver upgrade", "--runtime-dir", daemon[0])
    assert (result.status, result.err) == (0, "")
    assert re.search(r"paused by .* \d+ min: driver upgrade", run("status", "--runtime-dir", daemon[0]).out)
    assert run("unpause", "--runtime-dir", daemon[0]).status == 0
    assert "paused" not in run("status", "--runtime-dir", daemon[0]).out
    assert run("unpause", "--runtime-dir", daemon[0]).status == 1


def test_failslow_pause_is_separate_from_pause(daemon):
    runtime = daemon[0]
    result = run("failslow", "pause", "--for", "2h", "--why", "a benchmark", "--runtime-dir", runtime)
    assert (result.status, result.err) == (0, "")
    assert " paused for 2 h " in result.out
    status = json.loads(run("status", "--json", "--runtime-dir", runtime).out)
    assert (status["pause"], status["detection_pause"]["why"]) == (None, "a benchmark")
    assert status["detection_pause"]["until"] - status["detection_pause"]["given"] == 7200
    text = run("status", "--runtime-dir", runtime).out.replace("\n ", "")
    assert re.search(r"slow-job detection paused .*: a benchmark", text)
    assert "healthd failslow unpause --runtime-dir" in text
    assert run("failslow", "unpause", "--runtime-dir", runtime).status == 0
    assert "slow-job detection" not in run("status", "--runtime-dir", runtime).out
    result = run("failslow", "unpause", "--runtime-dir", runtime)
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("healthd: failslow-unpause: ")


@pytest.mark.parametrize("time", ["8d", "200h"])
def test_failslow_pause_is_limited_to_week(daemon, time):
    result = run("failslow", "pause", "--for", time, "--why", "x", "--runtime-dir", daemon[0])
    assert (result.status, result.out) == (1, "")
    assert re.fullmatch(rf"healthd: failslow-pause: .* 7d, got {time}\n", result.err)


def test_reload_reports_mode_and_number_of_checks(daemon):
    result = run("reload", "--runtime-dir", daemon[0])
    assert (result.status, result.err) == (0, "")
    assert re.fullmatch(r"[\w ]+: mode observe, \d+ checks\n", result.out)


def test_status_finds_daemon_with_otherwise_invalid_settings(daemon, tmp_path):
    file = settings(tmp_path, f'runtime_dir = "{daemon[0]}"\nmode = "wrong"\n')
    assert run("status", "--config", file).status == 0


def test_run_refuses_second_daemon_in_same_directory(daemon):
    result = run("run", "--runtime-dir", daemon[0], "--listen", "off")
    assert result.status == 1
    assert re.fullmatch(f"healthd run: {daemon[0]}: another healthd .*\n", result.err)


@pytest.mark.parametrize(
    "command",
    [
        *("status", "repaired gpu_xid/79", "pause --for 1h --why x", "unpause", "reload"),
        *("failslow pause --for 1h --why x", "failslow unpause"),
    ],
)
def test_command_without_daemon_is_one_sentence_and_exits_3(tmp_path, command):
    result = run(*command.split(), "--runtime-dir", str(tmp_path))
    assert (result.status, result.out) == (3, "")
    (line,) = result.err.splitlines()
    assert f"{tmp_path}/healthd.sock" in line


def test_status_reports_unreadable_answer_of_other_version(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "healthd.sock"))
        listener.listen()
        threading.Thread(
            target=answer_once, args=(listener, b'{"status": {"version": "9", "health": "fine"}}\n')
        ).start()
        result = run("status", "--runtime-dir", str(tmp_path))
    assert result.status == 3
    assert "the daemon (version 9)" in result.err


def answer_once(listener: socket.socket, answer: bytes) -> None:
    stream, _ = listener.accept()
    with stream:
        stream.recv(1 << 16)
        stream.sendall(answer)
