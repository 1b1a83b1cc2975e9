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


def config_source(*fields: str) -> str:
    """Return the source of a Config with these fields."""
    imports = (
        "dataclasses import dataclass, field",
        "datetime import date",
        "healthd.api import CheckConfig",
    )
    imports_text = "".join(f"from {names}\n" for names in imports)
    lines = "".join(f"    {line}\n" for line in fields)
    return f"{imports_text}@dataclass(frozen=True, slots=True)\nclass Config(CheckConfig):\n{lines}"


def site_check(folder: Path, text: str) -> Check:
    (folder / "fan.py").write_text(f"from healthd.api import *\n{RUN}{text}\n")
    (folder / "fan.py").chmod(0o644)
    return registry.find_checks(str(folder))["fan"]


@pytest.mark.parametrize(
    "raised",
    ["ValueError('no')", "SystemExit(3)", "GeneratorExit", "RecursionError", "type('Own', (BaseException,), {})"],
)
def test_exception_during_import_is_single_sentence(folder, raised):
    with pytest.raises(ConfigError, match=r"fan\.py: cannot be loaded: "):
        site_check(folder, f"raise {raised}")


def test_broken_link_is_single_sentence(folder):
    (folder / "fan.py").symlink_to(folder / "gone.py")
    with pytest.raises(ConfigError, match=r"fan\.py: cannot be read: No such file or directory"):
        registry.find_checks(str(folder))


def test_fifo_is_refused_before_open(folder):
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
        (config_source("timeout_seconds: str = '5s'"), 'Config.timeout_seconds: must be a number, got "5s"'),
        (config_source("clear_after: float = 2.0"), "Config.clear_after: must be a whole number, got 2.0"),
        (config_source("interval_seconds: int = 0"), "Config.interval_seconds: must be 0.1 to "),
        (config_source("severity: int = 3"), "Config.severity: must be a table, got 3"),
        (config_source("enabled: str = 'no'"), 'Config.enabled: must be true or false, got "no"'),
        (config_source("name: int = 1"), "Config.name: must be text, got 1"),
    ],
)
def test_declarations_are_checked_at_loading(folder, text, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        site_check(folder, text)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(2)", "SystemExit: 2"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})", "Odd"),
    ],
)
def test_validate_that_raises_is_single_sentence(folder, stop, expected):
    check = site_check(folder, f"def validate(config):\n    {stop}")
    with pytest.raises(ConfigError) as raised:
        resolve_settings({}, "file", {}, {"fan": check})
    assert str(raised.value) == f"file: checks.fan: its validate() raised {expected} ({folder}/fan.py)"


def test_validate_error_names_file_with_check_settings(folder):
    check = site_check(folder, "def validate(config):\n    1 / 0")
    for layers in ([], [Layer("profile x", {})], [Layer("profile x", {}), Layer("baseline.toml", {})]):
        with pytest.raises(ConfigError, match=r"^healthd\.toml: checks\.fan: "):
            resolve_settings({}, "healthd.toml", {}, {"fan": check}, lambda _settings, layers=layers: layers)
    with pytest.raises(ConfigError, match=r"^baseline\.toml: checks\.fan: "):
        resolve_settings(
            {}, "healthd.toml", {}, {"fan": check}, lambda _settings: [Layer("baseline.toml", {"fan": {}})]
        )


def test_misspelled_contract_name_is_logged(folder, caplog):
    check = site_check(folder, "AFTER_EVENT = ('xid',)\nPERIOD = 3\nUSES = ''\nEXPLAINED = {}")
    assert check.after_events == ()
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"{folder}/fan.py: healthd ignores AFTER_EVENT; did you mean AFTER_EVENTS?"]


FINDING = "Finding(Severity.WARNING, 'fan/hang', '', 'the fans do not answer'"


@pytest.mark.parametrize(
    "body",
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
def test_overdue_that_fails_is_logged(folder, caplog, body):
    check = site_check(folder, f"def overdue(config, seconds):\n    {body}")
    assert list(check.overdue(check.config(), 10.0)) == []
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("check fan: overdue: ")


def test_overdue_finding_is_returned(folder):
    check = site_check(folder, f"def overdue(config, seconds):\n    yield {FINDING})")
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
def test_explain_that_fails_is_logged_and_returns_none(folder, caplog, text):
    check = site_check(folder, text)
    assert check.explain("fan/hang") is None
    check.codes()
    assert {record.getMessage().partition(": ")[0] for record in caplog.records} == {"check fan"}


def test_known_codes_that_fails_yields_no_codes(folder):
    assert site_check(folder, "def known_codes():\n    1 / 0").codes() == []


def test_site_check_does_not_correlate_kernel_events(folder):
    check = site_check(folder, "def correlate(events, node, config):\n    1 / 0")
    assert check.correlate((), Inventory(), check.config()) == ([], ())


def test_built_in_check_correlates_kernel_events():
    check = registry.built_in_checks()["gpu_xid"]
    assert check.correlate((), Inventory(), check.config()) == ([], ())


def test_built_in_checks_have_valid_declarations():
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
def test_import_that_hangs_is_refused_with_line(folder, monkeypatch, text, line):
    path = folder / "fan.py"
    monkeypatch.setattr(trial.require_loadable, "__defaults__", (1.0,))
    monkeypatch.setattr(trial, "START_SECONDS", 60.0)
    with pytest.raises(ConfigError) as raised:
        site_check(folder, text)
    assert str(raised.value) == f"{path}: refused: not imported within 1 s; it hangs at line {line}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import os\nos._exit(3)", "its import ends the process with status 3"),
        ("import os\nos.kill(os.getpid(), 9)", "its import kills the process with SIGKILL"),
        ("import ctypes\nctypes.string_at(0)", "its import kills the process with SIGSEGV"),
    ],
)
def test_import_that_ends_process_is_refused(folder, text, reason):
    with pytest.raises(ConfigError) as raised:
        site_check(folder, text)
    assert str(raised.value).startswith(f"{folder / 'fan.py'}: refused: {reason}")


def test_hanging_file_among_several_is_named(folder, monkeypatch):
    for name, text in (("a", RUN), ("b", "while True: pass"), ("c", RUN)):
        (folder / f"{name}.py").write_text(text)
        (folder / f"{name}.py").chmod(0o644)
    with pytest.raises(ConfigError, match=r"/b\.py: refused: not imported within 1 s; it hangs at line 1"):
        trial.require_loadable([str(folder / f"{name}.py") for name in "abc"], 1.0)


@pytest.mark.parametrize(
    "text",
    [
        config_source("limit: int = 3") + "def validate(config):\n    while config.limit > 3: pass\n",
        config_source("limit: int = 3", "def __post_init__(self):", "    while self.limit > 3: pass"),
    ],
)
def test_validation_that_hangs_is_refused_with_line(folder, monkeypatch, text):
    checks = {"fan": site_check(folder, text)}
    assert resolve_settings({}, "x.toml", {}, checks).checks[RunName("fan")].limit == 3
    monkeypatch.setattr(trial.require_validated, "__defaults__", (1.0,))
    monkeypatch.setattr(trial, "START_SECONDS", 60.0)
    with pytest.raises(ConfigError) as raised:
        resolve_settings({"checks": {"fan": {"limit": 4}}}, "x.toml", {}, checks)
    expected = f"checks.fan ({folder / 'fan.py'}): refused: not validated within 1 s; it hangs at line "
    assert str(raised.value).startswith(expected)


def test_validation_that_ends_process_or_fails_is_refused(folder):
    text = config_source("limit: int = 3") + "def validate(config):\n    import os\n    return os._exit(config.limit)\n"
    with pytest.raises(ConfigError, match="refused: its validation ends the process with status 3"):
        resolve_settings({}, "x.toml", {}, {"fan": site_check(folder, text)})
    text = config_source("limit: int = 3") + "def validate(config):\n    return 'limit: no'\n"
    with pytest.raises(ConfigError, match=r"x\.toml: checks\.fan: limit: no"):
        resolve_settings({}, "x.toml", {}, {"fan": site_check(folder, text)})


def test_output_and_threads_from_import_are_ignored(folder):
    check = site_check(
        folder, "import threading, time\nprint('x' * 100)\nthreading.Thread(target=time.sleep, args=(3,)).start()"
    )
    assert check.has_run


def test_unchanged_file_is_tried_only_once(folder, monkeypatch):
    site_check(folder, "")
    trials = []
    monkeypatch.setattr(trial, "run_program", lambda *args: trials.append(args))
    registry.find_checks(str(folder))
    assert trials == []
    with pytest.raises(AttributeError):  # the fake returns None
        site_check(folder, "# changed")
    assert len(trials) == 1


def test_hanging_site_check_does_not_hang_command(folder):
    (folder / "checks").mkdir()
    (folder / "checks/fan.py").write_text("__import__('time').sleep(1e6)\n")  # hangs without CPU load
    settings = folder / "healthd.toml"
    settings.write_text(f'checks_dir = "{folder}/checks"\n')
    command = [sys.executable, "-m", "healthd", "config", "check", str(settings)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert completed.returncode == 64
    assert completed.stderr.strip().endswith("fan.py: refused: not imported within 10 s; it hangs at line 1")


# --- a Config that refuses its values


@pytest.mark.parametrize("raised", ["ValueError('no fans')", "SystemExit(2)", "TypeError('no fans')"])
def test_config_that_raises_is_single_sentence(folder, raised):
    text = f"""
from dataclasses import dataclass
from healthd.api import CheckConfig
@dataclass(frozen=True, slots=True)
class Config(CheckConfig):
    fans: int = 1
    def __post_init__(self):
        raise {raised}
"""
    check = site_check(folder, text)
    with pytest.raises(ConfigError) as refused:
        resolve_settings({"checks": {"fan": {"fans": 2}}}, "healthd.toml", {}, {"fan": check})
    sentence = str(refused.value)
    assert sentence.startswith("healthd.toml: checks.fan: its Config raised ")
    assert "\n" not in sentence


# --- settings of a site's check


HEALTHD_SETTINGS = (Settings, NvmlConfig, KernelLogConfig, SlurmConfig, FleetLimits, MetricsConfig)


@pytest.mark.parametrize(
    ("kind", "value"), [("int | None", "None"), ("int", "-3"), ("str", "'ALL?'"), ("float", "-1.5"), ("int", "3")]
)
def test_site_setting_is_not_validated_by_name(folder, kind, value):
    names = {f.name for settings_class in HEALTHD_SETTINGS for f in fields_of(settings_class)} - {
        f.name for f in fields_of(CheckConfig)
    }
    check = site_check(folder, config_source(*(f"{name}: {kind} = {value}" for name in sorted(names))))
    assert resolve_settings({}, "file", {}, {"fan": check}).checks["fan", ""] == check.config()


def test_site_time_may_be_negative(folder):
    check = site_check(folder, config_source("offset_seconds: float = 0.0"))
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
def test_common_setting_is_validated_if_redeclared_by_site(folder, field, value, sentence):
    check = site_check(folder, config_source(field))
    with pytest.raises(ConfigError) as raised:
        resolve_settings({"checks": {"fan": {field.partition(":")[0]: value}}}, "healthd.toml", {}, {"fan": check})
    assert str(raised.value).startswith(f"healthd.toml: checks.fan.{sentence}")


@pytest.mark.parametrize(
    ("declaration", "setting", "value", "location"),
    [
        ("since: date = date(2020, 1, 1)", "since", date(2021, 1, 1), "checks.fan.since"),
        ("which: list = field(default_factory=list)", "which", [16**6000], "checks.fan.which"),
        ("fans: set[int] = field(default_factory=lambda: {3})", "enabled", True, "checks.fan.fans"),
        ("fans: int | float | str = 3", "fans", 4, "checks.fan"),
    ],
)
def test_setting_that_cannot_be_sent_to_worker_is_refused(folder, declaration, setting, value, location):
    check = site_check(folder, config_source(declaration))
    with pytest.raises(ConfigError) as raised:
        resolve_settings({"checks": {"fan": {setting: value}}}, "healthd.toml", {}, {"fan": check})
    assert str(raised.value).startswith(f"healthd.toml: {location}: its Config raised ")
    assert str(raised.value).endswith(f" ({folder}/fan.py)")


def test_config_that_raises_with_layers_is_single_sentence(folder):
    post_init = (
        "def __post_init__(self):",
        "    if self.guessed or self.fans > 1:",
        "        raise LookupError('a\\nb')",
    )
    check = site_check(folder, config_source("fans: int = 1", *post_init))
    for layers in (
        [Layer("profile x", {"fan": {"fans": 1}}, guessed=True)],
        [Layer("profile x", {"fan": {"fans": 2}})],
    ):
        with pytest.raises(ConfigError) as raised:
            resolve_settings({}, "healthd.toml", {}, {"fan": check}, lambda _settings, layers=layers: layers)
        assert str(raised.value).endswith(f"checks.fan: its Config raised LookupError: a?b ({folder}/fan.py)")


SETTING_NAMES = sorted(
    {f.name for settings_class in (*HEALTHD_SETTINGS, CheckConfig) for f in fields_of(settings_class)}
    | {"fans", "x_seconds"}
)
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
    declared_settings = draw(
        st.dictionaries(st.sampled_from(SETTING_NAMES), st.tuples(st.sampled_from(KINDS), VALUES), max_size=5)
    )
    columns = [
        (
            name,
            kind,
            field(default_factory=lambda value=value: value)
            if isinstance(value, list | dict)
            else field(default=value),
        )
        for name, (kind, value) in declared_settings.items()
    ]
    module = ModuleType("fan")
    config = make_dataclass("Config", columns, bases=(site_config.CheckConfig,), frozen=True, slots=draw(st.booleans()))
    module.__dict__.update(Config=config, run=lambda host, config, past: (), PER=draw(st.sampled_from(["", "fan"])))
    return Check("fan", module, "/etc/healthd/checks.d/fan.py")


@given(site_checks(), st.dictionaries(st.sampled_from([*SETTING_NAMES, "a"]), VALUES, max_size=4))
def test_any_site_config_yields_settings_or_single_sentence(check, table):
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


def test_explain_works_for_check_with_required_settings(folder):
    config = config_source("fans: int").replace("slots=True", "slots=True, kw_only=True")
    (folder / "checks").mkdir(mode=0o755)
    explain_source = (
        "EXPLAIN = {'fan/hot': Explain(Severity.WARNING, Clears.PASS, 'It is hot.', 'It may break.', 'Look.')}"
    )
    (folder / "checks/fan.py").write_text(f"from healthd.api import *\n{RUN}{config}{explain_source}\n")
    settings = folder / "healthd.toml"
    settings.write_text(f'checks_dir = "{folder}/checks"\n[checks.fan]\nfans = 3\n')
    command = [sys.executable, "-m", "healthd", "explain", "fan/hot", "--config", str(settings)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert "It is hot." in completed.stdout


def test_correlate_that_fails_is_logged_and_yields_failure(caplog):
    """The daemon reads the same line again at each start."""

    def fail_after_finding(*_: object) -> Iterator[Finding]:
        yield Finding(Severity.WARNING, "broken/a", "", "")
        raise ZeroDivisionError("error in the check")

    module = ModuleType("broken")
    module.__dict__.update(correlate=fail_after_finding, repairs=fail_after_finding)
    check = Check("broken", module)
    event = KernelEvent("xid", "79", sequence=1)
    for _ in range(3):
        findings, ((failed_event, error),) = check.correlate([event], Inventory(), check.config())
        assert (findings, failed_event, str(error)) == ([], event, "error in the check")
        assert check.repairs([event]) == []
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "kernel_log: input dropped after an internal error with 'check broken': ZeroDivisionError: error in the check"
    ]


def test_correlate_failure_on_single_event_keeps_other_findings():
    def find_by_number(events: Sequence[KernelEvent], *_: object) -> Iterator[Finding]:
        for event in events:
            yield Finding(Severity.WARNING, f"broken/{int(event.code)}", event.pci, "")

    module = ModuleType("broken")
    module.__dict__.update(correlate=find_by_number)
    check = Check("broken", module)
    events = [KernelEvent("xid", code, sequence=n) for n, code in enumerate(["79", "3x1", "48", "9" * 5000])]
    findings, failures = check.correlate(events, Inventory(), check.config())
    assert {finding.code for finding in findings} == {"broken/79", "broken/48"}
    assert [event.sequence for event, _ in failures] == [1, 3]


def test_correlate_failure_on_several_events_retries_each():
    def fail_for_several(events: Sequence[KernelEvent], *_: object) -> Iterator[Finding]:
        if len(events) > 1:
            raise ZeroDivisionError
        yield Finding(Severity.WARNING, "broken/a", events[0].pci, "")

    module = ModuleType("broken")
    module.__dict__.update(correlate=fail_for_several)
    check = Check("broken", module)
    findings, ((event, error),) = check.correlate(
        [KernelEvent("xid", "79", pci, sequence=n) for n, pci in enumerate("ab")], Inventory(), check.config()
    )
    assert [finding.subject for finding in findings] == ["a", "b"]
    assert (event, type(error)) == (None, ZeroDivisionError)


def test_may_block_resume_follows_site_severities() -> None:
    checks = registry.built_in_checks()
    clock, gpu_access = checks["clock"], checks["gpu_access"]
    assert not clock.may_block_resume(clock.config())
    for severity, blocks in ((Severity.WARNING, False), (Severity.DEGRADED, True)):
        config = clock.config(severity={"clock/offset": severity})
        assert clock.may_block_resume(config) is blocks
    assert gpu_access.may_block_resume(gpu_access.config())
    assert not gpu_access.may_block_resume(gpu_access.config(enforce=False))
    harmless = dict.fromkeys(gpu_access.codes(), Severity.INFO)
    assert not gpu_access.may_block_resume(gpu_access.config(severity=harmless)), "the site sets all codes to info"


EXEC = {"command": ("/x",)}


@pytest.mark.parametrize(
    ("name", "settings", "blocks"),
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
def test_may_block_resume_follows_check_settings(name, settings, blocks) -> None:
    check = registry.built_in_checks()[name]
    assert check.may_block_resume(check.config(**settings)) is blocks


DRAINING = Policy(Mode.ACT)


@pytest.mark.parametrize("name", sorted(registry.built_in_checks()))
@pytest.mark.parametrize(
    "settings", [{}, {"enforce": False}, {"guessed": ("name",)}], ids=["default", "warns", "guess"]
)
def test_may_block_resume_agrees_with_possible_drains(name, settings) -> None:
    check = registry.built_in_checks()[name]
    config = check.config(**settings)
    findings = [finding for code in check.codes() for finding in possible_findings(code, check.explain(code), config)]
    drains = any(
        step.effect_in_act in (Effect.DRAINS, Effect.REQUEUES)
        for finding in findings
        for step in timeline(finding, config, DRAINING)
    )
    assert check.may_block_resume(config) is (drains and check.declares.HOLDS_RESUME)


def test_site_check_without_explain_may_block_resume(tmp_path: Path) -> None:
    path = tmp_path / "fan.py"
    path.write_text("def run(host, config, past):\n    yield from ()\n")
    path.chmod(0o644)
    fan = registry.load_site(str(path))
    assert fan.may_block_resume(fan.config())
    path.write_text(path.read_text() + "HOLDS_RESUME = False\n")
    assert not registry.load_site(str(path)).may_block_resume(fan.config())
