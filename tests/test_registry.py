"""A site's own checks, written by people: whatever they do wrong costs one sentence and never the daemon."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from healthd import registry, trial
from healthd.config import ConfigError, settle
from healthd.model import Finding, Inventory, KernelEvent, Severity
from healthd.registry import Check

RUN = "def run(host, config, past):\n    yield from ()\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    return tmp_path


def site(folder: Path, text: str) -> Check:
    (folder / "fan.py").write_text(f"from healthd.model import *\n{RUN}{text}\n")
    (folder / "fan.py").chmod(0o644)
    return registry.find(str(folder))["fan"]


@pytest.mark.parametrize(
    "raised",
    ["ValueError('no')", "SystemExit(3)", "GeneratorExit", "RecursionError", "type('Own', (BaseException,), {})"],
)
def test_whatever_a_file_raises_when_it_is_imported_is_one_sentence(folder, raised):
    with pytest.raises(ConfigError, match=r"fan\.py: cannot be loaded: "):
        site(folder, f"raise {raised}")


def test_a_link_that_points_nowhere_is_one_sentence(folder):
    (folder / "fan.py").symlink_to(folder / "gone.py")
    with pytest.raises(ConfigError, match=r"fan\.py: cannot be read: No such file or directory"):
        registry.find(str(folder))


def test_what_is_no_file_is_refused_before_it_is_opened(folder):
    os.mkfifo(folder / "fan.py", 0o600)
    with pytest.raises(ConfigError, match=r"fan\.py: is not a file"):
        registry.find(str(folder))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("run = 3", "has no run(host, config, past)"),
        ("Config = 3", "Config must be a dataclass and a CheckConfig"),
        ("class Config: ...", "Config must be a dataclass and a CheckConfig"),
        ("PER = 3", "PER must be text"),
        ("USES = None", "USES must be text"),
        ("WHEN = 'busy'", 'WHEN must be "idle" or ""'),
        ("AFTER_EVENTS = 3", "AFTER_EVENTS must be a tuple of texts"),
        ("AFTER_EVENTS = 'xid'", "AFTER_EVENTS must be a tuple of texts"),
    ],
)
def test_what_it_declares_is_looked_at_when_it_is_loaded(folder, text, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        site(folder, text)


@pytest.mark.parametrize("stop", ["1 / 0", "raise SystemExit(2)"])
def test_a_validate_that_raises_refuses_the_settings_in_a_sentence(folder, stop):
    check = site(folder, f"def validate(config):\n    {stop}")
    with pytest.raises(ConfigError, match=r"checks\.fan: its validate\(\) raised (ZeroDivisionError|SystemExit)"):
        settle({}, "file", {}, {"fan": check})


FINDING = "Finding(Severity.WARNING, 'fan/hang', '', 'the fans do not answer'"


@pytest.mark.parametrize(
    "does",
    [
        "1 / 0",
        "raise SystemExit(2)",
        "return 3",
        "yield 3",
        f"yield {FINDING}); 1 / 0",
        "yield Finding(Severity.WARNING, 'mount/hang', '', 'not its own code')",
        "yield Finding('bad', 'fan/hang', '', 'no severity')",
    ],
)
def test_an_overdue_that_goes_wrong_is_a_logged_sentence_and_nothing_else(folder, caplog, does):
    check = site(folder, f"def overdue(config, seconds):\n    {does}")
    assert list(check.overdue(check.config(), 10.0)) == []
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("check fan: overdue: ")


def test_an_overdue_that_is_right_is_heard(folder):
    check = site(folder, f"def overdue(config, seconds):\n    yield {FINDING})")
    (finding,) = check.overdue(check.config(), 10.0)
    assert (finding.code, finding.severity) == ("fan/hang", Severity.WARNING)


@pytest.mark.parametrize(
    "text",
    [
        "def explain(code):\n    1 / 0",
        "def explain(code):\n    return 3",
        "EXPLAIN = 3",
        "EXPLAIN = {'fan/hang': 'a text'}",
        "EXPLAIN = {'fan/hang': Explain('bad', Clears.PASS, 'a', 'b', 'c')}",
    ],
)
def test_an_explanation_that_cannot_be_had_is_none_and_a_sentence(folder, caplog, text):
    check = site(folder, text)
    assert check.explain("fan/hang") is None
    check.codes()
    assert {record.getMessage().partition(": ")[0] for record in caplog.records} == {"check fan"}


def test_codes_that_cannot_be_listed_are_none(folder):
    assert site(folder, "def known_codes():\n    1 / 0").codes() == []


def test_a_sites_check_does_not_listen_to_the_kernel_log(folder):
    check = site(folder, "def correlate(events, node, config):\n    1 / 0")
    assert check.correlate((), Inventory(), check.config()) is None


def test_a_built_in_check_does():
    check = registry.built_in()["gpu_xid"]
    assert list(check.correlate((), Inventory(), check.config()) or ()) == []


def test_every_built_in_check_is_declared_as_a_sites_has_to_be():
    assert {registry._misdeclared(check) for check in registry.built_in().values() if check.runs} == {""}


# --- files that hang or crash when they are imported


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("while True: pass", 4),
        ("import time\ntime.sleep(1000)", 5),
        ("import re\nre.match('(a+)+$', 'a' * 64 + 'b')", 5),  # a loop in C
        ("import threading\nthreading.Event().wait()", 5),
        ("import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass", 6),
    ],
)
def test_a_file_whose_import_does_not_end_is_refused_with_the_line_where_it_is(folder, monkeypatch, text, line):
    path = folder / "fan.py"
    monkeypatch.setattr(trial.require_loadable, "__defaults__", (1.0,))
    with pytest.raises(ConfigError) as refused:
        site(folder, text)
    assert str(refused.value) == f"{path}: refused: not imported within 1 s, it is in line {line}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import os\nos._exit(3)", "its import ends the process with status 3"),
        ("import os\nos.kill(os.getpid(), 9)", "its import ends the process by SIGKILL"),
        ("import ctypes\nctypes.string_at(0)", "its import ends the process by SIGSEGV"),
    ],
)
def test_a_file_whose_import_ends_the_process_is_refused(folder, text, words):
    with pytest.raises(ConfigError) as refused:
        site(folder, text)
    assert str(refused.value).startswith(f"{folder / 'fan.py'}: refused: {words}")


def test_of_several_files_the_one_that_hangs_is_named(folder, monkeypatch):
    for name, text in (("a", RUN), ("b", "while True: pass"), ("c", RUN)):
        (folder / f"{name}.py").write_text(text)
        (folder / f"{name}.py").chmod(0o644)
    with pytest.raises(ConfigError, match=r"/b\.py: refused: not imported within 1 s, it is in line 1"):
        trial.require_loadable([str(folder / f"{name}.py") for name in "abc"], 1.0)


def test_what_a_file_prints_or_leaves_running_is_no_matter(folder):
    check = site(
        folder, "import threading, time\nprint('x' * 100)\nthreading.Thread(target=time.sleep, args=(3,)).start()"
    )
    assert check.runs


def test_a_file_that_was_imported_once_is_not_tried_again_until_it_changes(folder, monkeypatch):
    site(folder, "")
    tried = []
    monkeypatch.setattr(trial, "run_program", lambda *args: tried.append(args))
    registry.find(str(folder))
    assert tried == []
    with pytest.raises(AttributeError):  # the stand-in gives nothing
        site(folder, "# changed")
    assert len(tried) == 1


def test_a_file_that_hangs_does_not_hang_the_commands(folder):
    (folder / "checks").mkdir()
    (folder / "checks/fan.py").write_text("while True: pass\n")
    settings = folder / "healthd.toml"
    settings.write_text(f'checks_dir = "{folder}/checks"\n')
    command = [sys.executable, "-m", "healthd", "config", "check", str(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 64
    assert done.stderr.strip().endswith("fan.py: refused: not imported within 10 s, it is in line 1")


# --- a Config that refuses what it is given


@pytest.mark.parametrize("raised", ["ValueError('no fans')", "SystemExit(2)", "TypeError('no fans')"])
def test_a_config_that_raises_when_it_is_made_is_one_sentence(folder, raised):
    text = f"""
from dataclasses import dataclass
from healthd.config import CheckConfig
@dataclass(frozen=True, slots=True)
class Config(CheckConfig):
    fans: int = 1
    def __post_init__(self):
        raise {raised}
"""
    check = site(folder, text)
    with pytest.raises(ConfigError) as refused:
        settle({"checks": {"fan": {"fans": 2}}}, "healthd.toml", {}, {"fan": check})
    sentence = str(refused.value)
    assert sentence.startswith("healthd.toml: checks.fan: its Config raised ")
    assert "\n" not in sentence


def test_a_listening_check_with_a_mistake_costs_a_sentence_and_neither_the_daemon_nor_the_others(caplog):
    """At each start the daemon would meet the same line again."""

    def mistaken(*_: object) -> Iterator[Finding]:
        yield Finding(Severity.WARNING, "broken/a", "", "")
        raise ZeroDivisionError("a mistake of its author")

    module = ModuleType("broken")
    module.__dict__.update(correlate=mistaken, repairs=mistaken)
    check = Check("broken", module)
    event = KernelEvent("xid", "79", sequence=1)
    for _ in range(3):
        assert check.correlate([event], Inventory(), check.config()) == []
        assert check.repairs([event]) == []
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "check broken: correlate: left out, healthd makes a mistake: ZeroDivisionError: a mistake of its author"
    ], "both raise at the same place"


def test_an_event_that_a_check_fails_on_keeps_no_other_from_being_judged():
    check = registry.built_in()["gpu_xid"]
    codes = ["79", "3x1", "48", "9" * 5000]
    events = [KernelEvent("xid", code, f"0000:{n}b:00.0", sequence=n) for n, code in enumerate(codes)]
    failed = []
    found = check.correlate(events, Inventory(), check.config(), lambda event, error: failed.append(event.sequence))
    assert {finding.code for finding in found} == {"gpu_xid/79", "gpu_xid/48"}
    assert failed == [1, 3]


def test_what_a_code_is_called_now_exists():
    checks = registry.built_in()
    for old in ("gpu_xid/sxid-20034", "gpu_xid/pciehp_link_down"):
        assert registry.explain(checks, old) is None
        assert registry.explain(checks, registry.renamed(old).split('"')[1]) is not None
    assert registry.renamed("gpu_xid/79") == ""
