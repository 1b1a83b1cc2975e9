"""The command line, driven as a user does: the real program, its text, its sentences and its exit status."""

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


class Done:
    """What a run of healthd left: `status`, and what it said on either stream."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.status, self.out, self.err = done.returncode, done.stdout, done.stderr

    @property
    def document(self) -> Any:
        return json.loads(self.out)

    def __repr__(self) -> str:
        return f"exit status {self.status}\n{self.out}\n{self.err}"


def run(*arguments: str, **environment: str) -> Done:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "COLUMNS": "100", "LC_ALL": "C.UTF-8", **environment}
    argv = [sys.executable, "-m", "healthd", *arguments]
    done = Done(subprocess.run(argv, capture_output=True, text=True, timeout=240, env=env))
    assert "Traceback" not in done.err, done.err
    return done


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A machine without anything in it."""
    plain_machine(tmp_path / "tree")
    return tmp_path / "tree"


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    """A fake DGX H100 whose GPU 3 is lost."""
    file = tmp_path / "lost.toml"
    file.write_text('profile = "dgx-h100"\ngpu.3.lost = true\n')
    return file


def settings(tmp_path: Path, text: str) -> str:
    file = tmp_path / "healthd.toml"
    file.write_text(text)
    return str(file)


# --- help


def test_alone_it_says_how_it_is_used_and_that_nothing_was_done():
    done = run()
    assert (done.status, done.out, done.err) == (64, "", HELP)


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ("help",), ("help", "help"), ("help", "--help")])
def test_help_that_was_asked_for_is_an_answer(arguments):
    done = run(*arguments)
    assert (done.status, done.out, done.err) == (0, HELP, "")


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_alone_names_its_commands_in_80_columns(group):
    alone = run(group)
    assert (alone.status, alone.out) == (64, "")
    assert run(group, "--help").out == run("help", group).out == alone.err
    assert max(map(len, alone.err.splitlines())) <= 80
    for name in (name for name in FAMILIES if name.startswith(f"{group} ")):
        assert re.search(rf"(?m)^  {name}  +\w", alone.err)
        assert command(name).examples.partition("\n")[0] in alone.err


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_command_is_in_the_help_and_has_its_own(name):
    assert re.search(rf"(?m)^  {name}\b", HELP)
    done = run(*name.split(), "--help")
    assert done.status == 0
    assert " ".join(command(name).description.split()) in " ".join(done.out.split())
    assert command(name).examples in done.out


def test_a_family_has_the_commands_that_are_looked_for_there():
    for family in set(FAMILIES.values()):
        there = import_module(f"healthd.cli.{family}").COMMANDS
        assert list(there) == [name for name, of in FAMILIES.items() if of == family]


def test_the_help_fits_a_terminal_of_80_columns():
    assert max(map(len, HELP.splitlines())) <= 80
    for name in FAMILIES:
        assert max(map(len, run(*name.split(), "--help", COLUMNS="80").out.splitlines())) <= 80, name


def test_version_is_that_of_the_program():
    assert run("--version").out == f"healthd {healthd.__version__}\n"


def test_version_names_the_package_that_healthd_was_installed_from(tmp_path, monkeypatch, capsys):
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
        (("--json", "check"), 'healthd: unknown command "--json"; write the command first, then its options'),
        (("frobnicate",), 'healthd: unknown command "frobnicate"; healthd --help shows all'),
        (("cofnig",), 'healthd: unknown command "cofnig"; did you mean "config"?'),
        (("hook", "--json"), 'healthd: unknown command "hook --json"; valid names: hook epilog, hook healthcheck'),
        (("config", "check", ""), "healthd: --config must name a file, got an empty name"),
        (("record", ""), "healthd record: the file name is empty"),
        (("config", "shwo"), 'healthd: unknown command "config shwo"; did you mean "config show"?'),
        (("check", "--jsn"), 'healthd check: no option --jsn; did you mean "--json"?'),
        (("check", "--config"), "healthd check: argument --config: expected one argument"),
        (("check", "gpu_eccc"), 'healthd check: no check is called "gpu_eccc"; did you mean "gpu_ecc"?'),
        (("check", "gpu_ecc/disabled"), 'healthd check: no check is called "gpu_ecc/disabled"; did you mean '
         '"gpu_ecc"?'),
        (("check", "mount"), "healthd check: mount: nothing to check: the settings have no enabled table "
         "[checks.mount.NAME]"),
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
def test_wrong_use_is_one_sentence_and_exit_status_64(arguments, sentence):
    done = run(*arguments)
    assert (done.status, done.out, done.err) == (64, "", sentence + "\n")


@pytest.mark.parametrize("command", ["run", "check", "config show", "list"])
def test_a_wrong_file_is_one_sentence_from_every_command_that_reads_it(tmp_path, command):
    file = settings(tmp_path, "[checks.gpu_ec]\n")
    done = run(*command.split(), "--config", file)
    assert (done.status, done.out) == (64, "")
    assert done.err == f'healthd: {file}: checks.gpu_ec: there is no check "gpu_ec"; did you mean "gpu_ecc"?\n'


@pytest.mark.skipif(os.path.exists(DEFAULT_FILE), reason="this machine has settings")
def test_the_usual_file_is_required_only_where_it_is_named():
    assert run("list").status == 0
    done = run("config", "check", DEFAULT_FILE)
    assert (done.status, done.out) == (64, "")
    assert done.err.startswith(f"healthd: {DEFAULT_FILE} does not exist: all settings are at their defaults")


def test_a_wrong_scenario_is_named_before_anything_runs(tmp_path):
    file = tmp_path / "scenario.toml"
    file.write_text('profile = "dgx-h100"\ngpu.3.lots = true\n')
    done = run("check", "--fake-nvml", str(file))
    assert done.status == 64
    assert done.err == f'healthd: --fake-nvml: {file}: gpu.3: unknown setting "lots"; did you mean "lost"?\n'


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("1h30m", 5400), ("2d", 172800)],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "m", "30 m", "-30m", "0s", "1e3s", "30min", "1h30", "²h", "9" * 99 + "s"])
def test_what_is_no_duration(text):
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
    done = run("config", "check", file)
    assert (done.status, done.out) == (64, "")
    told = [line.removeprefix(f"healthd: {file}: ") for line in done.err.splitlines()]
    places = [line.partition(": ")[0] for line in told]
    assert places == [
        'unknown setting "intervall"; did you mean "interval_seconds"?',
        "mode",
        "metrics.listen",
        "checks.services.required",
        "checks.services.timeout_seconds",
        "checks.memory_size.expected_bytes",
        "checks.gpu_ecc.severity",
        "checks.nope",
    ]
    assert '"0.0.0.0:9478"' in told[2]
    assert told[3].endswith('must be a list: ["slurmd"]')
    assert "bytes, like 2199023255552" in told[5]
    assert "gpu_ecc has: aggregate, corrected, " in told[6]


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
    done = run("config", "check", file)
    assert done.status == 64
    found = [line.removeprefix(f"healthd: {file}: ").partition(": ")[0] for line in done.err.splitlines()]
    assert found == places


def test_a_table_that_is_defined_twice_is_named_as_in_the_file(tmp_path):
    done = run("config", "check", settings(tmp_path, "[checks.services]\n[checks.services]\n"))
    assert done.status == 64
    assert "[checks.services] is defined twice (" in done.err


def test_a_program_that_does_not_exist_here_is_a_warning(tmp_path):
    done = run("config", "check", settings(tmp_path, '[checks.exec.a]\ncommand = ["/nope/x"]\n'))
    assert done.status == 0
    assert 'warning: checks.exec."a".command: /nope/x does not exist here' in done.err


def test_a_program_that_exists_here_is_no_warning(tmp_path):
    done = run("config", "check", settings(tmp_path, '[checks.exec.a]\ncommand = ["/bin/sh"]\n'))
    assert (done.status, done.err) == (0, "")


def test_a_program_on_a_file_server_that_does_not_answer_is_a_warning(tmp_path, monkeypatch, capsys):
    """`sleep` stands for a look at a file that never ends; the time limit ends it."""
    from healthd.cli import config
    from healthd.host import program

    real = program.run_program
    monkeypatch.setattr(config, "TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(program, "run_program", lambda argv, seconds: real(("sleep", "1000"), seconds))
    assert main(["config", "check", settings(tmp_path, '[checks.exec.a]\ncommand = ["/nfs/x"]\n')]) == 0
    assert 'warning: checks.exec."a".command: /nfs/x cannot be tested' in capsys.readouterr().err


# --- check


def test_a_healthy_machine_is_exit_status_0(tree):
    done = run("check", "--root", str(tree), "--fake-nvml", "dgx-h100")
    assert (done.status, done.err) == (0, "")
    first, _, *names = done.out.splitlines()
    assert first.endswith(": healthy")
    assert re.match(r"\d+ checks passed: block_device, .*\bgpu_ecc\b", " ".join(names))


def test_a_few_checks_have_a_row_each(tree):
    _, _, head, *rows = run(
        "check", "gpu_ecc", "gpu_xid", "--root", str(tree), "--fake-nvml", "dgx-h100"
    ).out.splitlines()
    assert head.split() == ["check", "outcome", "took", "finding"]
    assert rows[0].split()[:2] == ["gpu_ecc", "completed"]
    assert rows[1:3] == ["", "No result"], "what only listens has nothing to look at, and nobody listened there"
    assert rows[3].split()[:2] == ["gpu_xid", "only"]


def test_a_lost_gpu_is_exit_status_2_and_told_with_what_ends_it(tree, scenario):
    done = run("check", "--root", str(tree), "--fake-nvml", str(scenario))
    assert done.status == 2
    assert re.search(r"(?m)^gpu_access +completed +\S+ s +critical  gpu_access/lost 0000:61:00.0$", done.out)
    assert "  critical  gpu_access/lost 0000:61:00.0\n    GPU 0000:61:00.0 is lost" in done.out
    assert "    clears after: a reboot\n" in done.out


def test_named_checks_alone_are_run(tree, scenario):
    done = run("check", "gpu_nvlink", "gpu_count", "--json", "--root", str(tree), "--fake-nvml", str(scenario))
    assert [result["check"] for result in done.document["results"]] == ["gpu_count", "gpu_nvlink"]


def test_the_json_is_for_programs(tree, scenario):
    done = run("check", "--json", "--root", str(tree), "--fake-nvml", str(scenario))
    assert done.status == 2
    assert done.document["health"] == "unhealthy"
    (condition,) = done.document["conditions"]
    told = {key: condition[key] for key in ("check", "code", "severity", "subject", "clears", "state")}
    assert told == {
        "check": "gpu_access",
        "code": "gpu_access/lost",
        "severity": "critical",
        "subject": "0000:61:00.0",
        "clears": "reboot",
        "state": "open",
    }
    access = next(result for result in done.document["results"] if result["check"] == "gpu_access")
    assert access["outcome"] == "completed"
    assert {"name": "gpus_unreachable", "value": 1, "kind": "gauge", "labels": {}} in access["observations"]


def test_a_warning_is_exit_status_1_and_enforce_false_makes_it_one(tree, scenario, tmp_path):
    file = settings(tmp_path, "[checks.gpu_access]\nenforce = false\n")
    done = run("check", "gpu_access", "--config", file, "--root", str(tree), "--fake-nvml", str(scenario))
    assert done.status == 1
    assert "  warning   gpu_access/lost" in done.out


def test_a_finding_that_would_have_to_last_counts_and_that_is_said(tree, tmp_path):
    file = settings(tmp_path, '[checks.mount."/data"]\nmissing_confirm_seconds = 120\n')
    done = run("check", "--config", file, "mount", "--root", str(tree))
    assert done.status == 2
    assert "mount/missing /data" in done.out
    assert "the daemon opens a condition once it has lasted 2 min" in done.out


def test_a_check_that_fails_makes_the_node_unknown(tree, tmp_path):
    file = settings(tmp_path, "")
    done = run("check", "gpu_ecc", "--config", file, "--root", str(tree), "--fake-nvml", str(broken(tmp_path)))
    assert done.status == 3
    assert "No result\n  gpu_ecc failed: " in done.out


def broken(tmp_path: Path) -> Path:
    file = tmp_path / "broken.toml"
    file.write_text('profile = "dgx-h100"\ngpu.3.errors.nvmlDeviceGetEccMode = "Unknown"\n')
    return file


def test_a_hung_driver_ends_at_its_deadline_and_nobody_waits_for_the_worker(tree, tmp_path):
    hang = tmp_path / "hang.toml"
    hang.write_text('profile = "dgx-h100"\nhang = "nvmlDeviceGetEccMode"\nhang_seconds = 90\n')
    file = settings(tmp_path, "[checks.gpu_ecc]\ntimeout_seconds = 0.5\n")
    began = time.monotonic()
    done = run("check", "--config", file, "--root", str(tree), "--fake-nvml", str(hang))  # to the end of its streams
    assert time.monotonic() - began < 60
    assert done.status == 3
    assert re.search(r"(?m)^gpu_ecc +timed out", done.out)
    assert re.search(r"(?m)^gpu_nvlink +stuck", done.out)
    assert re.search(r"\d+ checks? passed: [^:]*\bblock_device\b", done.out)


def test_a_hung_access_to_the_driver_is_also_a_finding(tree, tmp_path):
    hang = tmp_path / "hang.toml"
    hang.write_text('profile = "dgx-h100"\nhang = "nvmlInit"\nhang_seconds = 90\n')
    file = settings(tmp_path, "[checks.gpu_access]\ntimeout_seconds = 0.5\n")
    done = run("check", "gpu_access", "--json", "--config", file, "--root", str(tree), "--fake-nvml", str(hang))
    assert done.status == 3
    assert [c["code"] for c in done.document["conditions"]] == ["gpu_access/hang"]


def test_what_a_sites_check_prints_is_shown_and_what_it_raises_is_said(tree, tmp_path):
    site = tmp_path / "checks.d"
    site.mkdir(mode=0o755)
    code = "import sys\ndef run(host, config, past):\n    print('look here', file=sys.stderr)\n    yield 3\n"
    (site / "fan.py").write_text(code)
    (site / "fan.py").chmod(0o644)
    done = run("check", "fan", "--config", settings(tmp_path, f'checks_dir = "{site}"\n'), "--root", str(tree))
    assert done.status == 3
    assert "look here" in done.err
    assert "fan failed: TypeError: the check" in done.out


def test_there_is_nothing_to_run_where_only_the_log_is_listened_to_and_there_is_none(tree):
    done = run("check", "gpu_xid", "--root", str(tree))
    assert (done.status, done.out) == (64, "")
    assert "the checks only read the kernel log, and there is none here" in done.err


def test_a_check_for_idle_nodes_is_run_by_its_name_only(tmp_path):
    nothing = ("--config", settings(tmp_path, ""), "--fake-nvml", "dgx-h100", "--json")
    everything = {result["check"] for result in json.loads(run("check", *nothing).out)["results"]}
    assert "gpu_nvlink" in everything
    assert "gpu_processes" not in everything
    (result,) = json.loads(run("check", "gpu_processes", *nothing).out)["results"]
    assert (result["check"], result["outcome"]) == ("gpu_processes", "completed")


def test_a_check_that_is_switched_off_is_not_run_even_by_name(tmp_path):
    done = run("check", "gpu_ecc", "--config", settings(tmp_path, "[checks.gpu_ecc]\nenabled = false\n"))
    assert (done.status, done.err) == (
        64,
        "healthd check: gpu_ecc: is disabled in the settings (enabled = false)\n",
    )


# --- record


def recorded(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*"))


def test_a_recording_without_a_name_says_which_node_and_when(tree, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "node.toml").write_text('node_name = "gpu-042"\n')
    done = run("record", "--config", str(tmp_path / "node.toml"), "--root", str(tree), "--fake-nvml", "dgx-h100")
    assert (done.status, done.err) == (0, "")
    (name,) = recorded(tmp_path / "here")
    assert re.fullmatch(r"gpu-042-\d{8}T\d{6}Z\.rec", name)
    assert f"healthd check --replay {name}" in done.out
    assert run("check", "--replay", name).status == 0


def test_the_name_of_a_check_is_no_name_of_a_file(tree, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    node = ("--root", str(tree), "--fake-nvml", "dgx-h100")
    assert run("record", "gpu_ecc", "gpu_count", *node).status == 0
    (name,) = recorded(tmp_path / "here")
    assert name.endswith(".rec")
    results = run("check", "--json", "--replay", name).document["results"]
    assert sorted(result["check"] for result in results) == ["gpu_count", "gpu_ecc"]
    assert run("record", "./gpu_ecc", "gpu_count", *node).status == 0
    assert "gpu_ecc" in recorded(tmp_path / "here")


# --- output


def test_there_is_no_colour_in_a_pipe(tree, scenario):
    assert "\033" not in run("check", "--root", str(tree), "--fake-nvml", str(scenario)).out


@pytest.mark.parametrize(
    ("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_a_terminal_gets_colour_unless_told_otherwise(environment, coloured):
    ours, theirs = pty.openpty()
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TERM": "xterm", **environment}
    argv = [sys.executable, "-m", "healthd", "explain", "gpu_xid/79"]
    with subprocess.Popen(argv, stdout=theirs, env=env) as process:
        os.close(theirs)
        text = b""
        while chunk := _read(ours):
            text += chunk
        assert process.wait(240) == 0
    os.close(ours)
    assert (b"\033[" in text) is coloured


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # a terminal whose other end is closed
        return b""


@pytest.mark.parametrize("arguments", [("--help",), ("list", "--codes"), ("explain", "gpu_xid/79")])
def test_who_stops_reading_gets_no_complaint(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "healthd", *arguments]
    done = subprocess.run(argv, stdout=writing, stderr=subprocess.PIPE, env=env, timeout=240)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_full_disk_is_one_sentence():
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    with open("/dev/full", "wb") as full:
        argv = [sys.executable, "-m", "healthd", "--help"]
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, env=env, timeout=240)
    assert done.returncode == 3
    assert done.stderr == b"healthd: standard output cannot be written: No space left on device\n"


def test_a_terminal_without_unicode_gets_question_marks():
    done = run("check", "grüße", PYTHONIOENCODING="ascii")
    assert done.status == 64
    assert 'no check is called "gr??e"' in done.err or 'no check is called "gr???' in done.err


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_break_nothing(tree, closed):
    command = f"{sys.executable} -m healthd check --root {tree} --fake-nvml dgx-h100 {closed}"
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    assert subprocess.run(["sh", "-c", command], env=env, timeout=240).returncode == 0


@pytest.mark.parametrize("arguments", ["", "hook", "chekc"])
def test_a_complaint_that_nobody_hears_is_no_answer(arguments):
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    command = ["sh", "-c", f"{sys.executable} -m healthd {arguments} 2>&-"]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, timeout=240)
    assert (done.returncode, done.stdout) == (64, b"")


# --- settings, checks, codes


def test_a_right_file_is_called_right(tmp_path):
    file = settings(tmp_path, 'mode = "act"\n[checks.mount."/data"]\n')
    assert run("config", "check", file).out.startswith(
        f"{file}: no errors; mode act, {len(built_in_checks())} checks: "
    )


def test_the_sample_settings_are_right():
    assert run("config", "check", str(ROOT / "conf/healthd.toml")).status == 0


def test_the_settings_in_effect_are_shown_with_where_they_come_from(tmp_path):
    file = settings(tmp_path, 'mode = "drain"\n[checks.mount]\nfstype = "nfs"\n[checks.mount."/data"]\n')
    done = run("config", "show", "--config", file, "--interval", "60")
    rows = {line.split()[0]: line.split()[1:] for line in done.out.splitlines()[1:]}
    assert rows["mode"] == ['"drain"', file]
    assert rows["interval_seconds"] == ["60", "--interval"]
    assert rows["state_dir"] == ['"/var/lib/healthd"', "default"]
    assert rows['checks.mount."/data".fstype'] == ['"nfs"', file]


def test_explain_answers_all_five_questions():
    done = run("explain", "gpu_xid/79", COLUMNS="60")
    assert done.status == 0
    titles = ["Meaning", "Why it matters", "On this node", "When it clears", "What to do"]
    assert [line for line in done.out.splitlines() if line in titles] == titles
    rows = [line for line in done.out.splitlines() if "default" not in line]
    assert max(map(len, rows)) <= 60


def test_explain_of_a_check_shows_what_it_looks_at_and_its_codes():
    done = run("explain", "mount")
    assert done.status == 0
    summary, _, head, first, *_ = done.out.splitlines()[1:]
    assert "mounted" in summary
    assert head.split()[:2] == ["code", "severity"]
    assert first.split()[:4] == ["mount/failing", "degraded", "clean", "runs"]


def test_the_settings_are_for_programs_too(tmp_path):
    file = settings(tmp_path, '[checks.mount."/data"]\nfstype = "nfs"\n')
    done = run("config", "show", "--json", "--config", file, "--interval", "60")
    rows = {row["setting"]: (row["value"], row["from"]) for row in done.document["settings"]}
    assert done.document["version"] == healthd.__version__
    assert rows["interval_seconds"] == (60.0, "--interval")
    assert rows['checks.mount."/data".fstype'] == ("nfs", file)
    assert rows["checks.services.required"] == ([], "default")
    changed = run("config", "show", "--json", "--changed", "--config", file).document["settings"]
    assert all(row["from"] != "default" for row in changed)
    shown = run("config", "show", "--config", file, "--interval", "60").out.splitlines()[1:]
    assert [line.split()[0] for line in shown] == [row.split()[0] for row in rows]


def test_the_list_is_for_programs_too(tmp_path):
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


def test_only_what_is_changed_can_be_shown(tmp_path):
    file = settings(tmp_path, 'mode = "drain"\n')
    done = run("config", "show", "--changed", "--config", file, "--profile", "none", "--baseline", "")
    assert [line.split()[0] for line in done.out.splitlines()[1:]] == ["mode", "profile", "baseline_file"]


def test_an_xid_of_no_catalogue_is_explained_too():
    done = run("explain", "gpu_xid/999")
    assert (done.status, "warning" in done.out) == (0, True)


def test_every_code_that_is_listed_can_be_explained():
    from healthd.agent.settings import registry

    checks = registry.built_in_checks()
    rows = run("list", "--codes").out.splitlines()[1:]
    codes = [row.split()[0] for row in rows]
    assert sorted(codes) == sorted(registry.all_codes(checks))
    assert all(registry.explain(checks, code) for code in codes)
    assert {"gpu_xid/79", "sxid/20034", "mount/missing"} <= set(codes)


def test_the_list_has_every_check_with_its_times(tmp_path):
    file = settings(tmp_path, '[checks.mount."/data"]\ntimeout_seconds = 5\n[checks.gpu_ecc]\nenabled = false\n')
    rows = run("list", "--config", file).out.splitlines()[1:]
    assert any(re.match(r"mount /data +5 min +5 s +File systems that jobs need", row) for row in rows)
    assert any(re.match(r"gpu_ecc +off +ECC", row) for row in rows)
    assert any(re.match(r"gpu_xid +each kernel line +", row) for row in rows)


# --- the daemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """(its runtime directory, the file that it reads as kernel log)."""
    folder = tmp_path_factory.mktemp("daemon")
    log = folder / "kernel.log"
    log.touch()
    runtime = str(folder / "run")
    off = ("processes", "disk_space")  # of the machine that runs the tests
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


def test_the_status_of_a_healthy_node(daemon):
    done = run("status", "--runtime-dir", daemon[0])
    assert done.status == 0
    assert done.out.startswith("n1: healthy\n\nOpen conditions\n  none\n")
    assert re.search(r"mode observe, started .*; round \d+ began .*, the next in ", done.out)
    oldest = r"just now|\d+ (s|min) ago"
    assert re.search(rf"\d+ checks passed \(the oldest run ({oldest})\): [^:]*\bgpu_ecc\b", done.out)


def test_the_status_for_programs_is_the_daemons_document(daemon):
    done = run("status", "--json", "--runtime-dir", daemon[0])
    assert (done.status, done.document["health"], done.document["node"]) == (0, "healthy", "n1")


def test_a_fault_is_told_until_it_is_repaired(daemon):
    runtime, log = daemon
    with log.open("a") as file:
        file.write(XID + "\n")
    until(lambda: run("status", "--runtime-dir", runtime).status == 2)
    text = run("status", "--runtime-dir", runtime).out
    assert text.startswith("n1: unhealthy\n")
    assert "  critical  gpu_xid/79 0000:61:00.0\n" in text
    assert "clears after: a reboot" in text
    assert 'decision: would drain and requeue (mode is "observe")' in text
    done = run("repaired", "gpu_xid/79", "0000:61:00.0", "--runtime-dir", runtime)
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("repaired: gpu_xid/79 0000:61:00.0")
    until(lambda: run("status", "--runtime-dir", runtime).status == 0)
    assert "cleared" in run("status", "--runtime-dir", runtime).out


def test_what_is_not_there_cannot_be_repaired(daemon):
    done = run("repaired", "gpu_xid/13", "--runtime-dir", daemon[0])
    assert (done.status, done.out) == (1, "")
    assert done.err == "healthd: repaired: no condition gpu_xid/13; conditions on this node: none\n"


def test_a_pause_is_told_and_ended(daemon):
    done = run("pause", "--for", "30m", "--why", "driver upgrade", "--runtime-dir", daemon[0])
    assert (done.status, done.err) == (0, "")
    assert re.search(r"paused by .*, ends in \d+ min: driver upgrade", run("status", "--runtime-dir", daemon[0]).out)
    assert run("unpause", "--runtime-dir", daemon[0]).status == 0
    assert "paused" not in run("status", "--runtime-dir", daemon[0]).out
    assert run("unpause", "--runtime-dir", daemon[0]).status == 1


def test_detection_is_paused_told_and_ended_and_the_pause_is_no_pause_of_healthd(daemon):
    runtime = daemon[0]
    done = run("failslow", "pause", "--for", "2h", "--why", "a benchmark", "--runtime-dir", runtime)
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("slow-job detection paused for 2 h by ")
    told = json.loads(run("status", "--json", "--runtime-dir", runtime).out)
    assert (told["pause"], told["detection_pause"]["why"]) == (None, "a benchmark")
    assert told["detection_pause"]["until"] - told["detection_pause"]["given"] == 7200
    shown = run("status", "--runtime-dir", runtime).out.replace("\n ", "")
    assert re.search(r"slow-job detection paused by .*: a benchmark", shown)
    assert "healthd failslow unpause --runtime-dir" in shown
    assert run("failslow", "unpause", "--runtime-dir", runtime).status == 0
    assert "slow-job detection" not in run("status", "--runtime-dir", runtime).out
    done = run("failslow", "unpause", "--runtime-dir", runtime)
    assert (done.status, done.err) == (1, "healthd: failslow-unpause: slow-job detection is not paused\n")


@pytest.mark.parametrize("time", ["8d", "200h"])
def test_a_pause_of_detection_is_at_most_a_week(daemon, time):
    done = run("failslow", "pause", "--for", time, "--why", "x", "--runtime-dir", daemon[0])
    assert (done.status, done.out) == (1, "")
    assert done.err == f"healthd: failslow-pause: a pause must last at most 7d, got {time}\n"


def test_a_reload_says_what_was_read(daemon):
    done = run("reload", "--runtime-dir", daemon[0])
    assert (done.status, done.err) == (0, "")
    assert re.fullmatch(r"settings reloaded: mode observe, \d+ checks\n", done.out)


def test_the_settings_say_where_the_daemon_is_even_if_they_are_wrong_elsewhere(daemon, tmp_path):
    file = settings(tmp_path, f'runtime_dir = "{daemon[0]}"\nmode = "wrong"\n')
    assert run("status", "--config", file).status == 0


def test_a_second_daemon_in_the_same_place_says_so(daemon):
    done = run("run", "--runtime-dir", daemon[0], "--listen", "off")
    assert done.status == 1
    assert done.err == f"healthd run: {daemon[0]}: another healthd is running there\n"


@pytest.mark.parametrize(
    "command",
    [
        *("status", "repaired gpu_xid/79", "pause --for 1h --why x", "unpause", "reload"),
        *("failslow pause --for 1h --why x", "failslow unpause"),
    ],
)
def test_without_a_daemon_it_is_one_sentence_and_exit_status_3(tmp_path, command):
    done = run(*command.split(), "--runtime-dir", str(tmp_path))
    assert (done.status, done.out) == (3, "")
    assert done.err.startswith(f"healthd is not running (no {tmp_path}/healthd.sock). Try: ")


def test_an_answer_of_another_version_is_no_traceback(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "healthd.sock"))
        listener.listen()
        threading.Thread(
            target=answer_once, args=(listener, b'{"status": {"version": "9", "health": "fine"}}\n')
        ).start()
        done = run("status", "--runtime-dir", str(tmp_path))
    assert done.status == 3
    assert "the daemon (version 9) answered something that this version" in done.err


def answer_once(listener: socket.socket, answer: bytes) -> None:
    stream, _ = listener.accept()
    with stream:
        stream.recv(1 << 16)
        stream.sendall(answer)
