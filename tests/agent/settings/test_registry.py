"""Tests of a site's own checks: any mistake in them is one sentence and never stops the daemon."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import field, make_dataclass
from datetime import date
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.reporting.fault_timeline import Effect, possible_findings, timeline
from healthd.agent.settings import registry, site_config, trial
from healthd.agent.settings.config import (
    CheckConfig,
    ConfigError,
    FleetLimits,
    KernelLogConfig,
    Layer,
    MetricsConfig,
    NvmlConfig,
    Settings,
    SlurmConfig,
)
from healthd.agent.settings.effective import resolve_settings, setting_rows
from healthd.agent.settings.registry import Check
from healthd.agent.slurm.policy import Policy
from healthd.common.codec import fields_of
from healthd.common.model import Finding, Inventory, KernelEvent, Mode, RunName, Severity

RUN = "def run(host, config, past):\n    yield from ()\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    return tmp_path


def config_of(*fields: str) -> str:
    """Return the source of a Config with these fields."""
    imports = (
        "dataclasses import dataclass, field",
        "datetime import date",
        "healthd.api import CheckConfig",
    )
    head = "".join(f"from {names}\n" for names in imports)
    lines = "".join(f"    {line}\n" for line in fields)
    return f"{head}@dataclass(frozen=True, slots=True)\nclass Config(CheckConfig):\n{lines}"


def site(folder: Path, text: str) -> Check:
    (folder / "fan.py").write_text(f"from healthd.api import *\n{RUN}{text}\n")
    (folder / "fan.py").chmod(0o644)
    return registry.find_checks(str(folder))["fan"]


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
        registry.find_checks(str(folder))


def test_what_is_no_file_is_refused_before_it_is_opened(folder):
    os.mkfifo(folder / "fan.py", 0o600)
    with pytest.raises(ConfigError, match=r"fan\.py: is not a file"):
        registry.find_checks(str(folder))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("run = 3", "has no run(host, config, past)"),
        ("Config = 3", "Config must be a dataclass and a CheckConfig"),
        ("class Config: ...", "Config must be a dataclass and a CheckConfig"),
        ("PER = 3", "PER must be text"),
        ("USES = None", "USES must be text"),
        ("WHEN = 'busy'", 'WHEN must be "idle" or ""'),
        ("AFTER_EVENTS = 3", "AFTER_EVENTS must be a tuple of strings"),
        ("AFTER_EVENTS = 'xid'", "AFTER_EVENTS must be a tuple of strings"),
        ("HOLDS_RESUME = 'no'", "HOLDS_RESUME must be True or False"),
        (config_of("timeout_seconds: str = '5s'"), 'Config.timeout_seconds: must be a number, got "5s"'),
        (config_of("clear_after: float = 2.0"), "Config.clear_after: must be a whole number, got 2.0"),
        (config_of("interval_seconds: int = 0"), "Config.interval_seconds: must be 0.1 to "),
        (config_of("severity: int = 3"), "Config.severity: must be a table, got 3"),
        (config_of("enabled: str = 'no'"), 'Config.enabled: must be true or false, got "no"'),
        (config_of("name: int = 1"), "Config.name: must be text, got 1"),
    ],
)
def test_what_it_declares_is_looked_at_when_it_is_loaded(folder, text, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        site(folder, text)


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(2)", "SystemExit: 2"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})", "Odd"),
    ],
)
def test_a_validate_that_raises_refuses_the_settings_in_a_sentence(folder, stop, words):
    check = site(folder, f"def validate(config):\n    {stop}")
    with pytest.raises(ConfigError) as refused:
        resolve_settings({}, "file", {}, {"fan": check})
    assert str(refused.value) == f"file: checks.fan: its validate() raised {words} ({folder}/fan.py)"


def test_a_mistake_of_a_check_is_told_of_the_file_that_has_settings_for_it(folder):
    check = site(folder, "def validate(config):\n    1 / 0")
    for layers in ([], [Layer("profile x", {})], [Layer("profile x", {}), Layer("baseline.toml", {})]):
        with pytest.raises(ConfigError, match=r"^healthd\.toml: checks\.fan: "):
            resolve_settings({}, "healthd.toml", {}, {"fan": check}, lambda _settings, layers=layers: layers)
    with pytest.raises(ConfigError, match=r"^baseline\.toml: checks\.fan: "):
        resolve_settings(
            {}, "healthd.toml", {}, {"fan": check}, lambda _settings: [Layer("baseline.toml", {"fan": {}})]
        )


def test_a_name_that_is_almost_one_of_the_contract_is_warned_of_and_refuses_nothing(folder, caplog):
    check = site(folder, "AFTER_EVENT = ('xid',)\nPERIOD = 3\nUSES = ''\nEXPLAINED = {}")
    assert check.after_events == ()
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"{folder}/fan.py: healthd ignores AFTER_EVENT; did you mean AFTER_EVENTS?"]


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
    assert check.correlate((), Inventory(), check.config()) == ([], ())


def test_a_built_in_check_does():
    check = registry.built_in_checks()["gpu_xid"]
    assert check.correlate((), Inventory(), check.config()) == ([], ())


def test_every_built_in_check_is_declared_as_a_sites_has_to_be():
    assert {registry._misdeclared(check) for check in registry.built_in_checks().values() if check.has_run} == {""}


# --- files that hang or crash during import


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
    monkeypatch.setattr(trial, "START_SECONDS", 60.0)
    with pytest.raises(ConfigError) as refused:
        site(folder, text)
    assert str(refused.value) == f"{path}: refused: not imported within 1 s; it hangs at line {line}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import os\nos._exit(3)", "its import ends the process with status 3"),
        ("import os\nos.kill(os.getpid(), 9)", "its import kills the process with SIGKILL"),
        ("import ctypes\nctypes.string_at(0)", "its import kills the process with SIGSEGV"),
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
    with pytest.raises(ConfigError, match=r"/b\.py: refused: not imported within 1 s; it hangs at line 1"):
        trial.require_loadable([str(folder / f"{name}.py") for name in "abc"], 1.0)


@pytest.mark.parametrize(
    "text",
    [
        config_of("limit: int = 3") + "def validate(config):\n    while config.limit > 3: pass\n",
        config_of("limit: int = 3", "def __post_init__(self):", "    while self.limit > 3: pass"),
    ],
)
def test_a_site_whose_validation_of_a_setting_does_not_end_is_refused_with_the_line_where_it_is(
    folder, monkeypatch, text
):
    known = {"fan": site(folder, text)}
    assert resolve_settings({}, "x.toml", {}, known).checks[RunName("fan")].limit == 3
    monkeypatch.setattr(trial.require_validated, "__defaults__", (1.0,))
    monkeypatch.setattr(trial, "START_SECONDS", 60.0)
    with pytest.raises(ConfigError) as refused:
        resolve_settings({"checks": {"fan": {"limit": 4}}}, "x.toml", {}, known)
    said = f"checks.fan ({folder / 'fan.py'}): refused: not validated within 1 s; it hangs at line "
    assert str(refused.value).startswith(said)


def test_a_validation_that_ends_the_process_is_refused_and_one_that_only_refuses_is_heard(folder):
    text = config_of("limit: int = 3") + "def validate(config):\n    import os\n    return os._exit(config.limit)\n"
    with pytest.raises(ConfigError, match="refused: its validation ends the process with status 3"):
        resolve_settings({}, "x.toml", {}, {"fan": site(folder, text)})
    text = config_of("limit: int = 3") + "def validate(config):\n    return 'limit: no'\n"
    with pytest.raises(ConfigError, match=r"x\.toml: checks\.fan: limit: no"):
        resolve_settings({}, "x.toml", {}, {"fan": site(folder, text)})


def test_what_a_file_prints_or_leaves_running_is_no_matter(folder):
    check = site(
        folder, "import threading, time\nprint('x' * 100)\nthreading.Thread(target=time.sleep, args=(3,)).start()"
    )
    assert check.has_run


def test_a_file_that_was_imported_once_is_not_tried_again_until_it_changes(folder, monkeypatch):
    site(folder, "")
    tried = []
    monkeypatch.setattr(trial, "run_program", lambda *args: tried.append(args))
    registry.find_checks(str(folder))
    assert tried == []
    with pytest.raises(AttributeError):  # the fake returns None
        site(folder, "# changed")
    assert len(tried) == 1


def test_a_file_that_hangs_does_not_hang_the_commands(folder):
    (folder / "checks").mkdir()
    (folder / "checks/fan.py").write_text("__import__('time').sleep(1e6)\n")  # hangs without CPU load
    settings = folder / "healthd.toml"
    settings.write_text(f'checks_dir = "{folder}/checks"\n')
    command = [sys.executable, "-m", "healthd", "config", "check", str(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 64
    assert done.stderr.strip().endswith("fan.py: refused: not imported within 10 s; it hangs at line 1")


# --- a Config that refuses its values


@pytest.mark.parametrize("raised", ["ValueError('no fans')", "SystemExit(2)", "TypeError('no fans')"])
def test_a_config_that_raises_when_it_is_made_is_one_sentence(folder, raised):
    text = f"""
from dataclasses import dataclass
from healthd.api import CheckConfig
@dataclass(frozen=True, slots=True)
class Config(CheckConfig):
    fans: int = 1
    def __post_init__(self):
        raise {raised}
"""
    check = site(folder, text)
    with pytest.raises(ConfigError) as refused:
        resolve_settings({"checks": {"fan": {"fans": 2}}}, "healthd.toml", {}, {"fan": check})
    sentence = str(refused.value)
    assert sentence.startswith("healthd.toml: checks.fan: its Config raised ")
    assert "\n" not in sentence


# --- settings of a site's check


OURS = (Settings, NvmlConfig, KernelLogConfig, SlurmConfig, FleetLimits, MetricsConfig)


@pytest.mark.parametrize(
    ("kind", "value"), [("int | None", "None"), ("int", "-3"), ("str", "'ALL?'"), ("float", "-1.5"), ("int", "3")]
)
def test_a_setting_of_a_sites_check_is_not_judged_by_its_name(folder, kind, value):
    names = {f.name for of in OURS for f in fields_of(of)} - {f.name for f in fields_of(CheckConfig)}
    check = site(folder, config_of(*(f"{name}: {kind} = {value}" for name in sorted(names))))
    assert resolve_settings({}, "file", {}, {"fan": check}).checks["fan", ""] == check.config()


def test_a_time_of_a_sites_check_may_be_negative_if_the_check_does_not_refuse_it(folder):
    check = site(folder, config_of("offset_seconds: float = 0.0"))
    loaded = resolve_settings({"checks": {"fan": {"offset_seconds": -2}}}, "file", {}, {"fan": check})
    assert loaded.tables["fan", ""] == {"name": "", "offset_seconds": -2.0}


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        (
            "interval_seconds: str | None = None",
            "5m",
            'interval_seconds: must be a number, got "5m"; write a plain number',
        ),
        (
            "timeout_seconds: float = 30",
            -1,
            "timeout_seconds: must be 0.1 to 604800 seconds (a week), got -1",
        ),
        ("clear_after: int = 3", 0, "clear_after: must be 1 to 1000, got 0"),
        ("severity: dict[str, str] = field(default_factory=dict)", {"fan/a": "bad"}, "severity.fan/a: "),
        ("enforce: bool | None = True", None, "enforce: must be true or false, got None"),
    ],
)
def test_what_every_check_can_be_told_is_judged_also_where_a_site_declares_it_anew(folder, field, value, sentence):
    check = site(folder, config_of(field))
    with pytest.raises(ConfigError) as refused:
        resolve_settings({"checks": {"fan": {field.partition(":")[0]: value}}}, "healthd.toml", {}, {"fan": check})
    assert str(refused.value).startswith(f"healthd.toml: checks.fan.{sentence}")


@pytest.mark.parametrize(
    ("own", "setting", "value", "place"),
    [
        ("since: date = date(2020, 1, 1)", "since", date(2021, 1, 1), "checks.fan.since"),
        ("which: list = field(default_factory=list)", "which", [16**6000], "checks.fan.which"),
        ("fans: set[int] = field(default_factory=lambda: {3})", "enabled", True, "checks.fan.fans"),
        ("fans: int | str = 3", "fans", 4, "checks.fan"),
    ],
)
def test_a_setting_that_the_worker_could_not_be_told_is_one_sentence_that_names_the_checks_file(
    folder, own, setting, value, place
):
    check = site(folder, config_of(own))
    with pytest.raises(ConfigError) as refused:
        resolve_settings({"checks": {"fan": {setting: value}}}, "healthd.toml", {}, {"fan": check})
    assert str(refused.value).startswith(f"healthd.toml: {place}: its Config raised ")
    assert str(refused.value).endswith(f" ({folder}/fan.py)")


def test_a_config_that_raises_once_it_is_set_up_is_one_sentence(folder):
    once = ("def __post_init__(self):", "    if self.guessed or self.fans > 1:", "        raise LookupError('a\\nb')")
    check = site(folder, config_of("fans: int = 1", *once))
    for layers in (
        [Layer("profile x", {"fan": {"fans": 1}}, guessed=True)],
        [Layer("profile x", {"fan": {"fans": 2}})],
    ):
        with pytest.raises(ConfigError) as refused:
            resolve_settings({}, "healthd.toml", {}, {"fan": check}, lambda _settings, layers=layers: layers)
        assert str(refused.value).endswith(f"checks.fan: its Config raised LookupError: a?b ({folder}/fan.py)")


NAMES = sorted({f.name for of in (*OURS, CheckConfig) for f in fields_of(of)} | {"fans", "x_seconds"})
KINDS = [
    int,
    str,
    float,
    bool,
    list,
    int | None,
    str | None,
    float | None,
    bool | None,
    list[int],
    dict[str, int],
    date,
]
VALUES = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.just(10**400), st.floats(), st.text(max_size=6), st.dates()),
    st.lists(st.integers() | st.text(max_size=3), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.sampled_from(["/", "off", "ALL", -1, 0.0, "info", 1e300]),
)


@st.composite
def site_checks(draw: st.DrawFn) -> Check:
    """Draw a check whose Config declares settings of any type and default, also under names of healthd's settings."""
    own = draw(st.dictionaries(st.sampled_from(NAMES), st.tuples(st.sampled_from(KINDS), VALUES), max_size=5))
    columns = [
        (
            name,
            kind,
            field(default_factory=lambda value=value: value)
            if isinstance(value, list | dict)
            else field(default=value),
        )
        for name, (kind, value) in own.items()
    ]
    module = ModuleType("fan")
    config = make_dataclass("Config", columns, bases=(site_config.CheckConfig,), frozen=True, slots=draw(st.booleans()))
    module.__dict__.update(Config=config, run=lambda host, config, past: (), PER=draw(st.sampled_from(["", "fan"])))
    return Check("fan", module, "/etc/healthd/checks.d/fan.py")


@given(site_checks(), st.dictionaries(st.sampled_from([*NAMES, "a"]), VALUES, max_size=4))
def test_whatever_a_sites_config_declares_settings_are_made_or_refused_in_one_sentence(check, table):
    assert isinstance(registry._misdeclared(check), str)
    sentence, loaded = "", None
    try:
        loaded = resolve_settings({"checks": {"fan": table}}, "healthd.toml", {}, {"fan": check})
    except ConfigError as error:
        sentence = str(error)
    if loaded is None:
        assert sentence.startswith("healthd.toml: checks.fan")
        assert sentence.isprintable()
        return
    setting_rows(loaded)
    for name, config in loaded.checks.items():
        assert json.loads(json.dumps(loaded.tables[name]))["name"] == name[1]
        assert 0 < config.timeout_seconds <= 7 * 86400
        assert config.interval_seconds is None or 0 < config.interval_seconds <= 7 * 86400
        assert config.clear_after >= 1
        assert all(isinstance(severity, Severity) for severity in config.severity.values())


def test_a_check_whose_settings_must_be_given_is_explained(folder):
    config = config_of("fans: int").replace("slots=True", "slots=True, kw_only=True")
    (folder / "checks").mkdir(mode=0o755)
    explained = "EXPLAIN = {'fan/hot': Explain(Severity.WARNING, Clears.PASS, 'It is hot.', 'It may break.', 'Look.')}"
    (folder / "checks/fan.py").write_text(f"from healthd.api import *\n{RUN}{config}{explained}\n")
    settings = folder / "healthd.toml"
    settings.write_text(f'checks_dir = "{folder}/checks"\n[checks.fan]\nfans = 3\n')
    command = [sys.executable, "-m", "healthd", "explain", "fan/hot", "--config", str(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert "It is hot." in done.stdout


def test_a_listening_check_with_a_mistake_costs_a_sentence_and_neither_the_daemon_nor_the_others(caplog):
    """The daemon reads the same line again at each start."""

    def mistaken(*_: object) -> Iterator[Finding]:
        yield Finding(Severity.WARNING, "broken/a", "", "")
        raise ZeroDivisionError("error in the check")

    module = ModuleType("broken")
    module.__dict__.update(correlate=mistaken, repairs=mistaken)
    check = Check("broken", module)
    event = KernelEvent("xid", "79", sequence=1)
    for _ in range(3):
        found, ((failed, error),) = check.correlate([event], Inventory(), check.config())
        assert (found, failed, str(error)) == ([], event, "error in the check")
        assert check.repairs([event]) == []
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "kernel_log: input dropped after an internal error with 'check broken': ZeroDivisionError: error in the check"
    ]


def test_an_event_that_a_check_fails_on_keeps_no_other_from_being_judged():
    def mistaken(events: Sequence[KernelEvent], *_: object) -> Iterator[Finding]:
        for event in events:
            yield Finding(Severity.WARNING, f"broken/{int(event.code)}", event.pci, "")

    module = ModuleType("broken")
    module.__dict__.update(correlate=mistaken)
    check = Check("broken", module)
    events = [KernelEvent("xid", code, sequence=n) for n, code in enumerate(["79", "3x1", "48", "9" * 5000])]
    found, failed = check.correlate(events, Inventory(), check.config())
    assert {finding.code for finding in found} == {"broken/79", "broken/48"}
    assert [event.sequence for event, _ in failed] == [1, 3]


def test_a_check_that_fails_on_several_events_together_has_judged_each_and_says_that_it_failed():
    def mistaken(events: Sequence[KernelEvent], *_: object) -> Iterator[Finding]:
        if len(events) > 1:
            raise ZeroDivisionError
        yield Finding(Severity.WARNING, "broken/a", events[0].pci, "")

    module = ModuleType("broken")
    module.__dict__.update(correlate=mistaken)
    check = Check("broken", module)
    found, ((event, error),) = check.correlate(
        [KernelEvent("xid", "79", pci, sequence=n) for n, pci in enumerate("ab")], Inventory(), check.config()
    )
    assert [finding.subject for finding in found] == ["a", "b"]
    assert (event, type(error)) == (None, ZeroDivisionError)


def test_a_check_whose_codes_only_warn_holds_no_resume_unless_the_site_lets_one_drain() -> None:
    checks = registry.built_in_checks()
    clock, access = checks["clock"], checks["gpu_access"]
    assert not clock.may_block_resume(clock.config())
    for severity, holds in ((Severity.WARNING, False), (Severity.DEGRADED, True)):
        config = clock.config(severity={"clock/offset": severity})
        assert clock.may_block_resume(config) is holds
    assert access.may_block_resume(access.config())
    assert not access.may_block_resume(access.config(enforce=False))
    harmless = dict.fromkeys(access.codes(), Severity.INFO)
    assert not access.may_block_resume(access.config(severity=harmless)), "the site sets all codes to info"


EXEC = {"command": ("/x",)}


@pytest.mark.parametrize(
    ("name", "settings", "holds"),
    [
        ("exec", {**EXEC, "critical_severity": Severity.WARNING}, False),
        ("exec", {**EXEC, "critical_severity": Severity.DEGRADED}, True),
        ("exec", {**EXEC, "critical_severity": Severity.CRITICAL, "severity": {"exec/critical": Severity.INFO}}, False),
        (
            "exec",
            {**EXEC, "critical_severity": Severity.WARNING, "severity": {"exec/warning": Severity.DEGRADED}},
            True,
        ),
        ("mount", {"guessed": ("name",)}, False),
        ("mount", {"severity": {"mount/hang": Severity.WARNING, "mount/missing": Severity.WARNING}}, True),
        ("gpu_xid", {"severity": {"gpu_xid/79": Severity.WARNING}}, True),
    ],
)
def test_what_a_check_can_find_under_the_sites_settings_says_whether_it_holds_a_resume(name, settings, holds) -> None:
    check = registry.built_in_checks()[name]
    assert check.may_block_resume(check.config(**settings)) is holds


DRAINING = Policy(Mode.ACT)


@pytest.mark.parametrize("name", sorted(registry.built_in_checks()))
@pytest.mark.parametrize(
    "settings", [{}, {"enforce": False}, {"guessed": ("name",)}], ids=["default", "warns", "guess"]
)
def test_a_check_holds_a_resume_where_the_daemon_would_drain_for_something_that_it_finds(name, settings) -> None:
    check = registry.built_in_checks()[name]
    config = check.config(**settings)
    found = [one for code in check.codes() for one in possible_findings(code, check.explain(code), config)]
    drains = any(
        step.effect_in_act in (Effect.DRAINS, Effect.REQUEUES)
        for one in found
        for step in timeline(one, config, DRAINING)
    )
    assert check.may_block_resume(config) is (drains and check.declares.HOLDS_RESUME)


def test_a_sites_check_that_explains_nothing_may_drain_for_anything(tmp_path: Path) -> None:
    path = tmp_path / "fan.py"
    path.write_text("def run(host, config, past):\n    yield from ()\n")
    path.chmod(0o644)
    fan = registry.load_site(str(path))
    assert fan.may_block_resume(fan.config())
    path.write_text(path.read_text() + "HOLDS_RESUME = False\n")
    assert not registry.load_site(str(path)).may_block_resume(fan.config())
