"""Tests of completion: the program itself, run as the scripts of argcomplete run it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from status_daemon import StatusDaemon

from healthd.cli.completion import DURATIONS, SHELLS, parser, split
from healthd.cli.flags import Parser
from healthd.cli.main import FAMILIES, GROUPS, command, main
from healthd.nvidia.fake_scenario import profiles

ROOT = Path(__file__).parents[2]
CONDITIONS = (
    ("gpu_xid/79", "0000:61:00.0"),
    ("gpu_xid/79", "0000:1b:00.0"),
    ("ib_link/down", "mlx5_3/1"),
    ("exec/critical", "nhc: check_fs_free /tmp 3%"),
    ("kernel/taint", ""),
)


def run(line: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `healthd` as the script for bash does; the completions are in `folder`/offered."""
    (folder / "offered").write_text("")
    completion_variables = {
        "PYTHONPATH": str(ROOT),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n\"'><=;|&(:",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(folder / "offered"),
    }
    return subprocess.run(
        [sys.executable, "-m", "healthd"],
        env={**os.environ, **completion_variables, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )


def completions(line: str, folder: Path, **environment: str) -> list[str]:
    result = run(line, folder, **environment)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    return sorted(filter(None, (folder / "offered").read_text().split("\n")))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[StatusDaemon]:
    conditions: list[dict[str, Any]] = [{"code": code, "subject": part} for code, part in CONDITIONS]
    with StatusDaemon(tmp_path, conditions=conditions) as status_daemon:
        yield status_daemon


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("healthd ", ("", " ")),
        ("healthd conf", ("", " conf")),
        ("healthd config ", ("config", " ")),
        ("healthd config show --ch", ("config show", " --ch")),
        ("healthd  failslow  pl", ("failslow", "  pl")),
        ("healthd failslow plan ", ("failslow plan", " ")),
        ("healthd help config ch", ("config", " ch")),
        ("healthd nothing ack ", ("", " nothing ack ")),
        ("healthd scan /var/log/healthd ", ("scan", " /var/log/healthd ")),
        ("cd /tmp && sudo /opt/healthd/bin/healthd ack gpu", ("ack", " gpu")),
        ("healthd status; healthd ack ", ("ack", " ")),
    ],
)
def test_split_returns_command_and_remainder(line: str, found: tuple[str, str]) -> None:
    assert split(line) == found


@given(
    st.text(max_size=60) | st.lists(st.sampled_from(["healthd", "help", "config", "show", " ", ";", "x"])).map("".join)
)
def test_split_returns_known_command_and_end_of_line(line: str) -> None:
    found = split(line)
    assert found.command in {"", *FAMILIES, *GROUPS}
    assert line.endswith(found.remainder)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_parser_has_flags_of_command(name: str) -> None:
    own = Parser(name, "", "")
    command(name).flags(own)
    assert {flag for action in parser(name)._actions for flag in action.option_strings} == {
        flag for action in own._actions for flag in action.option_strings
    }


def test_completion_offers_every_command_by_word(tmp_path: Path) -> None:
    assert completions("healthd ", tmp_path) == sorted({name.partition(" ")[0] for name in FAMILIES} | {"help"})
    for group in sorted({name.partition(" ")[0] for name in FAMILIES if " " in name}):
        second = {name.partition(" ")[2] for name in FAMILIES if name.startswith(f"{group} ")}
        assert second <= set(completions(f"healthd {group} ", tmp_path))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("-", ["--help", "--version", "-V", "-h"]),
        ("run --mode ", ["act", "drain", "observe"]),
        ("run --mode=dr", ["drain"]),
        ("run --kernel-log j", ["journal"]),
        ("run --interval ", []),
        ("run --state-dir ", ["folder/"]),
        ("check --js", ["--json"]),
        ("check --fake-nvml dgx-", sorted(name for name in profiles() if name.startswith("dgx-"))),
        ("check --profile no", ["none"]),
        ("check gpu_ec", ["gpu_ecc"]),
        ("check gpu_ecc gpu_acc", ["gpu_access"]),
        ("record out.rec gpu_ec", ["gpu_ecc"]),
        ("explain gpu_access/lo", ["gpu_access/lost"]),
        ("fleet ingest --users ", ["drop", "hash", "keep"]),
        ("fleet query jobs_k", ["jobs_known"]),
        ("ack x/y --for ", sorted(DURATIONS)),
        ("pause --for ", sorted(DURATIONS)),
        ("config check ", ["folder/", "kern.log"]),
        ("fleet ingest --nodes kern.log ke", ["kern.log"]),
        ("completion ", sorted(SHELLS)),
        ("status ", []),
        ("validate --pai", []),  # internal option that the help omits
        ("help config sh", ["show"]),
    ],
)
def test_completion_offers_values(tmp_path: Path, line: str, found: list[str]) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "kern.log").touch()
    assert [word for word in completions(f"healthd {line}", tmp_path) if word != "offered"] == found


def test_completion_offers_open_conditions_and_parts(tmp_path: Path, daemon: StatusDaemon) -> None:
    for name in ("ack", "unack", "repaired"):
        command_line = f"healthd {name} --runtime-dir {tmp_path}"
        assert completions(f"{command_line} ", tmp_path) == [
            "exec/critical",
            "gpu_xid/79",
            "ib_link/down",
            "kernel/taint",
        ]
        assert completions(f"{command_line} gpu", tmp_path) == ["gpu_xid/79"]
        assert completions(f"{command_line} gpu_xid/79 ", tmp_path) == ["0000:1b:00.0", "0000:61:00.0"]
        assert completions(f"{command_line} gpu_xid/79 0000:6", tmp_path) == ["61:00.0"], "bash ends a word at a colon"
        assert completions(f"{command_line} exec/critical nhc:", tmp_path) == ["\\ check_fs_free\\ /tmp\\ 3%"]
        assert completions(f"{command_line} exec/critical 'nhc: ch", tmp_path) == ["nhc: check_fs_free /tmp 3%"]
        assert completions(f"{command_line} kernel/taint ", tmp_path) == []


def test_completion_offers_all_codes_without_open_conditions(tmp_path: Path, daemon: StatusDaemon) -> None:
    line = f"healthd ack --runtime-dir {tmp_path} mount/mis"
    daemon.document["conditions"] = []
    assert completions(line, tmp_path) == ["mount/missing"]


def test_completion_offers_all_codes_without_daemon(tmp_path: Path) -> None:
    assert completions(f"healthd ack --runtime-dir {tmp_path} mount/mis", tmp_path) == ["mount/missing"]


def test_completion_returns_if_daemon_hangs(tmp_path: Path) -> None:
    import socket

    from healthd.common.paths import SOCKET

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / SOCKET))
        listener.listen(1)
        start = time.monotonic()
        assert completions(f"healthd ack --runtime-dir {tmp_path} mount/mis", tmp_path) == ["mount/missing"]
        assert time.monotonic() - start < 120


def test_completion_offers_site_checks(tmp_path: Path) -> None:
    folder = tmp_path / "checks.d"
    folder.mkdir(mode=0o755)
    (folder / "site_own.py").write_text(
        '"""A check of the site."""\nfrom healthd.api import Clears, Explain, Severity\n'
        'EXPLAIN = {"site_own/wrong": Explain(Severity.WARNING, Clears.PASS, "m", "w", "t")}\n'
        "def run(host, config, past):\n    return ()\n"
    )
    (tmp_path / "settings.toml").write_text(f'checks_dir = "{folder}"\n')
    assert completions("healthd check --config settings.toml site", tmp_path) == ["site_own"]
    assert completions("healthd explain --config settings.toml site_own/", tmp_path) == ["site_own/wrong"]


def test_completion_with_invalid_settings_fails_without_offers(tmp_path: Path) -> None:
    """The scripts discard standard error; an exit status other than 0 leaves the command line unchanged."""
    (tmp_path / "settings.toml").write_text("mode = 3\n")
    result = run("healthd check --config settings.toml gpu", tmp_path)
    assert result.returncode == 64
    assert "Traceback" not in result.stderr
    assert (tmp_path / "offered").read_text() == ""


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_scripts_name_healthd_and_discard_errors(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "healthd" in script
    assert "_ARGCOMPLETE" in script
    assert "2>&1" in script


def test_completion_without_argcomplete_names_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert main(["completion", "bash"]) == 3
    assert "pip install argcomplete" in capsys.readouterr().err


def test_list_does_not_load_argcomplete() -> None:
    program = (
        "import sys, healthd.cli.main as m\nm.main(['list'])\n"
        "print({'argcomplete', 'healthd.cli.completion'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert result.stdout.splitlines()[-1] == "set()"


def test_ids_of_evidence_are_completed(tmp_path: Path) -> None:
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence/20261129T060000Z-gpu_xid-79.tar.gz").touch()
    line = f"healthd evidence show --state-dir {tmp_path} 2026"
    assert completions(line, tmp_path) == ["20261129T060000Z-gpu_xid-79"]
